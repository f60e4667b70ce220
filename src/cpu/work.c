/* How calls become tasks.
 *
 * A *job* is one call with what is prepared for it; a *wave* is as many jobs as share the workspace at once. All tasks
 * of a wave stand in one list, step by step (prep, walk, merge), whichever job they are of, so that many short
 * sequences keep all threads busy; the largest jobs come first. Threads share nothing but *slots*, scratch laid out for
 * the largest job of the wave. How work is cut and who does it changes no bit of any result.
 *
 *   workspace: jobs | per job: prepared tiles, partial states | slots, one a thread */
#include "cpu/work.h"

#include "cpu/adaptive.h"
#include "cpu/exact.h"
#include "cpu/phases.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST_LEVELS 64
/* Prepared tiles and partial states of a wave, unless a single job needs more. Pages that many sequences share are
 * prepared for each, so without a bound a batch could need more than its inputs. */
#define WAVE_BYTES ((size_t)1 << 30)

/* A thread's scratch: a block and what its method needs. */
typedef struct cpu_slot {
    apa_cpu_block block;
    apa_cpu_adaptive adaptive;
    apa_cpu_node level[LARGEST_LEVELS];
    apa_cpu_phases phases; /* when the call asks */
    atomic_flag taken;
} cpu_slot;

typedef struct cpu_job {
    const apa_call *call;
    apa_cpu_shape shape;
    apa_cpu_prepared prepared;
    apa_cpu_node *chunk; /* [units][chunks], exact method with more than one chunk */
    int64_t first;       /* of the step at hand: number of the job's first task */
} cpu_job;

typedef struct cpu_wave {
    const apa_cpu_kernels *kernels;
    apa_cpu_kernels timed; /* the same with clocks, when the calls ask for phases */
    bool phases;
    cpu_job *job; /* largest first */
    int64_t jobs;
    cpu_slot *slots;
    int64_t slot_count;
    int step;
    _Atomic int64_t visible, hot, skipped, candidates;
} cpu_wave;

/* After the steps of prep. */
enum { STEP_WALK = APA_CPU_PREP_STEPS, STEP_MERGE, STEPS };

/* ---- memory ---- */

/* What belongs to the job alone. */
static void lay_out_job(apa_cpu_arena *arena, cpu_job *job)
{
    const apa_cpu_shape *shape = &job->shape;
    job->prepared = (apa_cpu_prepared){0};
    if (shape->adaptive)
        apa_cpu_prepared_layout(job->call, shape, arena, &job->prepared);
    const int64_t nodes = shape->chunks > 1 ? shape->units * shape->chunks : 0;
    job->chunk = apa_cpu_take(arena, nodes, sizeof(apa_cpu_node));
    for (int64_t i = 0; i < nodes; i++) {
        apa_cpu_node node;
        apa_cpu_node_layout(shape, arena, &node);
        if (arena->base != NULL)
            job->chunk[i] = node;
    }
}

static void lay_out_slot(const apa_cpu_shape *most, apa_cpu_arena *arena, cpu_slot *slot)
{
    apa_cpu_block_layout(most, arena, &slot->block);
    if (most->adaptive)
        apa_cpu_adaptive_layout(most, arena, &slot->adaptive);
    for (int level = 0; level < most->levels; level++)
        apa_cpu_node_layout(most, arena, &slot->level[level]);
    if (arena->base != NULL) {
        atomic_flag_clear(&slot->taken);
        memset(&slot->phases, 0, sizeof slot->phases);
    }
}

static cpu_job job_of(const apa_call *call, double all_work)
{
    cpu_job job = {.call = call};
    apa_cpu_shape_of(call, all_work > 0.0 ? apa_cpu_work_of(call) / all_work : 1.0, &job.shape);
    return job;
}

/* Lays out the wave of `count` calls; with base NULL it only measures. */
static size_t lay_out(const apa_context *context, const apa_call *calls, int64_t count, double all_work, void *base,
                      cpu_wave *wave)
{
    apa_cpu_arena arena = {base, 0};
    apa_cpu_shape most = {0};
    int64_t tasks = 0;
    wave->jobs = count;
    wave->job = apa_cpu_take(&arena, count, sizeof *wave->job);
    for (int64_t i = 0; i < count; i++) {
        cpu_job job = job_of(&calls[i], all_work);
        lay_out_job(&arena, &job);
        apa_cpu_shape_join(&most, &job.shape);
        tasks += job.shape.units * job.shape.chunks;
        if (base != NULL)
            wave->job[i] = job;
    }
    wave->slot_count = apa_context_threads(context) < tasks ? apa_context_threads(context) : tasks;
    wave->slots = apa_cpu_take(&arena, wave->slot_count, sizeof(cpu_slot));
    cpu_slot measured;
    for (int64_t i = 0; i < wave->slot_count; i++)
        lay_out_slot(&most, &arena, base == NULL ? &measured : &wave->slots[i]);
    return arena.used;
}

/* ---- slots ---- */

/* There are as many slots as threads, so one is free or about to be. */
static cpu_slot *take_slot(cpu_wave *wave)
{
    for (;;) {
        for (int64_t i = 0; i < wave->slot_count; i++)
            if (!atomic_flag_test_and_set_explicit(&wave->slots[i].taken, memory_order_acquire)) {
                if (wave->phases)
                    apa_cpu_phases_begin(&wave->slots[i].phases, wave->kernels);
                return &wave->slots[i];
            }
        sched_yield();
    }
}

/* The kernels that a task's block works with. */
static const apa_cpu_kernels *walk_kernels(const cpu_wave *wave)
{
    return wave->phases ? &wave->timed : wave->kernels;
}

static void free_slot(const cpu_wave *wave, cpu_slot *slot)
{
    if (wave->phases)
        apa_cpu_phases_end(&slot->phases);
    atomic_flag_clear_explicit(&slot->taken, memory_order_release);
}

/* ---- tasks ---- */

/* Verdicts of a block on tiles start … stop-1, when the caller wants them. */
static void write_verdicts(const apa_cpu_block *block, const apa_cpu_adaptive *adaptive, int64_t start, int64_t stop)
{
    const apa_call *call = block->call;
    const int64_t tiles = block->shape->tiles;
    for (int r = 0; r < block->n && call->verdicts != NULL; r++)
        for (int64_t tile = start; tile < stop; tile++) {
            const uint16_t seeing = apa_cpu_block_seeing(block, r, tile);
            const bool hot = adaptive == NULL || (adaptive->hot[tile] >> r & 1) != 0;
            const bool skipped = adaptive != NULL && (adaptive->skipped[tile] >> r & 1) != 0;
            const uint8_t seen = (uint8_t)(hot ? APA_VERDICT_HOT : skipped ? APA_VERDICT_SKIPPED : APA_VERDICT_COLD);
            for (int i = 0; i < APA_CPU_LANES; i++) {
                const apa_cpu_row *row = &block->reg[r].row[i];
                if (row->position < 0)
                    continue;
                const int64_t at = (block->b * call->Hq + row->head) * call->Sq + row->position;
                call->verdicts[at * tiles + tile] = (seeing >> i & 1) != 0 ? seen : APA_VERDICT_INVISIBLE;
            }
        }
}

/* Rows that see a tile and tiles, over tiles start … stop-1. */
static int64_t count_visible(const apa_cpu_block *block, int64_t start, int64_t stop)
{
    int64_t visible = 0;
    for (int r = 0; r < block->n; r++) {
        for (int64_t tile = start; tile < stop && block->bend.masked; tile++)
            visible += __builtin_popcount(apa_cpu_block_seeing(block, r, tile));
        for (int i = 0; i < APA_CPU_LANES && !block->bend.masked; i++) {
            const apa_cpu_row *row = &block->reg[r].row[i];
            if (row->position < 0 || row->first >= row->end)
                continue;
            const int64_t first = row->first / APA_CPU_TILE, last = (row->end - 1) / APA_CPU_TILE;
            const int64_t from = first > start ? first : start, to = last < stop - 1 ? last : stop - 1;
            visible += to >= from ? to - from + 1 : 0;
        }
    }
    return visible;
}

static void walk_adaptive(cpu_wave *wave, const cpu_job *job, cpu_slot *slot, int64_t unit)
{
    apa_cpu_block_load(&slot->block, job->call, &job->shape, walk_kernels(wave), unit);
    apa_cpu_adaptive_run(&slot->block, &slot->adaptive, &job->prepared);
    write_verdicts(&slot->block, &slot->adaptive, 0, job->shape.tiles);
    apa_cpu_block_store(&slot->block);
    wave->visible += slot->adaptive.visible;
    wave->hot += slot->adaptive.hot_pairs;
    wave->skipped += slot->adaptive.skipped_pairs;
    wave->candidates += slot->adaptive.candidate_pairs;
}

static void walk_exact(cpu_wave *wave, const cpu_job *job, cpu_slot *slot, int64_t task)
{
    const int64_t chunks = job->shape.chunks;
    int64_t start, stop;
    apa_cpu_block_load(&slot->block, job->call, &job->shape, walk_kernels(wave), task / chunks);
    apa_cpu_exact_chunk(&slot->block, task % chunks, slot->level);
    apa_cpu_exact_chunk_tiles(&job->shape, task % chunks, &start, &stop);
    const int64_t visible = count_visible(&slot->block, start, stop);
    wave->visible += visible;
    wave->hot += visible;
    write_verdicts(&slot->block, NULL, start, stop);
    if (chunks > 1)
        apa_cpu_node_save(&slot->block, &job->chunk[task]);
    else
        apa_cpu_block_store(&slot->block);
}

static void merge_chunks(cpu_wave *wave, const cpu_job *job, cpu_slot *slot, int64_t unit)
{
    apa_cpu_block_load(&slot->block, job->call, &job->shape, walk_kernels(wave), unit);
    apa_cpu_exact_merge_chunks(&slot->block, job->chunk + unit * job->shape.chunks, job->shape.chunks, slot->level);
    apa_cpu_block_store(&slot->block);
}

static int64_t tasks_of(const cpu_job *job, int step)
{
    const apa_cpu_shape *shape = &job->shape;
    if (step == STEP_WALK)
        return shape->units * shape->chunks;
    if (step == STEP_MERGE)
        return shape->chunks > 1 ? shape->units : 0;
    return shape->adaptive && shape->units > 0
               ? apa_cpu_prep_items(job->call, shape, &job->prepared, (apa_cpu_prep_step)step)
               : 0;
}

static void run_task(void *argument, size_t index)
{
    cpu_wave *wave = argument;
    int64_t low = 0, high = wave->jobs - 1;
    while (low < high) { /* the last job whose first task is not beyond */
        const int64_t middle = (low + high + 1) / 2;
        if (wave->job[middle].first <= (int64_t)index)
            low = middle;
        else
            high = middle - 1;
    }
    const cpu_job *job = &wave->job[low];
    const int64_t task = (int64_t)index - job->first;
    if (wave->step < STEP_WALK) {
        apa_cpu_prep_item(job->call, &job->shape, wave->kernels, &job->prepared, (apa_cpu_prep_step)wave->step, task);
        return;
    }
    cpu_slot *slot = take_slot(wave);
    /* Last units first: with a causal mask they are the longest of their head. */
    if (wave->step == STEP_MERGE)
        merge_chunks(wave, job, slot, task);
    else if (job->shape.adaptive)
        walk_adaptive(wave, job, slot, job->shape.units - 1 - task);
    else
        walk_exact(wave, job, slot, job->shape.units * job->shape.chunks - 1 - task);
    free_slot(wave, slot);
}

static void run_step(apa_context *context, cpu_wave *wave, int step)
{
    int64_t tasks = 0;
    wave->step = step;
    for (int64_t i = 0; i < wave->jobs; i++) {
        wave->job[i].first = tasks;
        tasks += tasks_of(&wave->job[i], step);
    }
    if (tasks > 0)
        apa_context_parallel(context, run_task, wave, (size_t)tasks);
}

/* Prep, some heads after the other when a job is alone: step by step over all heads K would have left the caches before
 * it is read again. */
static void run_prep(apa_context *context, cpu_wave *wave)
{
    cpu_job *alone = wave->jobs == 1 && wave->job->shape.adaptive ? wave->job : NULL;
    const int64_t heads = alone != NULL ? alone->prepared.heads : 1;
    const int64_t at_once = alone != NULL ? apa_cpu_prep_heads_at_once(alone->call) : 1;
    for (int64_t head = 0; head < heads; head += at_once) {
        if (alone != NULL) {
            alone->prepared.first_head = head;
            alone->prepared.heads = heads - head < at_once ? heads - head : at_once;
        }
        for (int step = 0; step < STEP_WALK; step++)
            run_step(context, wave, step);
    }
}

/* ---- phases ---- */

/* What prep reads and writes: K twice where its mean is taken, V, and the codes with their scales. */
static double prep_bytes(const apa_call *call, const apa_cpu_shape *shape)
{
    const double keys = (double)(call->B * call->Hkv) * (double)call->Skv;
    const double k = (double)call->D * (call->recipe.smooth_k == APA_TOGGLE_ON ? 2.0 : 1.0);
    const double read =
        k * (double)apa_dtype_bytes(call->k.dtype) + (double)(call->Dv * (int64_t)apa_dtype_bytes(call->v.dtype));
    return keys * (read + (double)(shape->Dp + shape->Dvp) + 8.0);
}

/* Times of the wave's tasks, and of its prep, in which all threads took part. */
static void report_phases(const apa_context *context, const cpu_wave *wave, double ticks_per_ms, double prep_ms,
                          apa_phase_cost *cost)
{
    for (int64_t i = 0; i < wave->slot_count; i++)
        apa_cpu_phases_add(&wave->slots[i].phases, ticks_per_ms, cost);
    for (int64_t i = 0; i < wave->jobs; i++)
        if (wave->job[i].shape.adaptive)
            cost[APA_PHASE_PREP].bytes += prep_bytes(wave->job[i].call, &wave->job[i].shape);
    if (cost[APA_PHASE_PREP].bytes > 0.0)
        cost[APA_PHASE_PREP].ms += prep_ms * (double)apa_context_threads(context);
}

/* ---- waves ---- */

static int by_work(const void *a, const void *b)
{
    const double left = apa_cpu_work_of(((const cpu_job *)a)->call),
                 right = apa_cpu_work_of(((const cpu_job *)b)->call);
    return left < right ? 1 : left > right ? -1 : 0;
}

static void run_wave(apa_context *context, const apa_call *calls, int64_t count, double all_work, void *workspace,
                     apa_statistics *statistics)
{
    cpu_wave wave = {.kernels = apa_cpu_kernels_for(apa_context_isa_level(context))};
    wave.phases = calls[0].phases;
    wave.timed = apa_cpu_phases_table(wave.kernels);
    lay_out(context, calls, count, all_work, workspace, &wave);
    qsort(wave.job, (size_t)count, sizeof *wave.job, by_work);
    const uint64_t ticks = apa_cpu_ticks();
    const double start = apa_now_ms();
    run_prep(context, &wave);
    const double prepared = apa_now_ms();
    run_step(context, &wave, STEP_WALK);
    run_step(context, &wave, STEP_MERGE);
    if (wave.phases)
        report_phases(context, &wave, (double)(apa_cpu_ticks() - ticks) / (apa_now_ms() - start), prepared - start,
                      statistics->phase);
    statistics->prep_ms += prepared - start;
    statistics->attention_ms += apa_now_ms() - prepared;
    statistics->visible += wave.visible;
    statistics->hot += wave.hot;
    statistics->cold += wave.visible - wave.hot;
    statistics->skipped += wave.skipped;
    statistics->candidates += wave.candidates;
}

static size_t own_bytes(const apa_call *call, double all_work)
{
    apa_cpu_arena arena = {NULL, 0};
    cpu_job job = job_of(call, all_work);
    lay_out_job(&arena, &job);
    return arena.used;
}

/* How many of the calls make the next wave. */
static int64_t wave_length(const apa_call *calls, int64_t count, double all_work)
{
    size_t bytes = 0;
    int64_t n = 0;
    for (; n < count; n++) {
        const size_t more = own_bytes(&calls[n], all_work);
        if (n > 0 && more > WAVE_BYTES - bytes)
            break;
        bytes = more < WAVE_BYTES - bytes ? bytes + more : WAVE_BYTES;
    }
    return n;
}

static double work_of_all(const apa_call *calls, int64_t count)
{
    double work = 0.0;
    for (int64_t i = 0; i < count; i++)
        work += apa_cpu_work_of(&calls[i]);
    return work;
}

size_t apa_cpu_batch_workspace_bytes(const apa_context *context, const apa_call *calls, int64_t count)
{
    const double all_work = work_of_all(calls, count);
    size_t most = 0;
    for (int64_t at = 0, n; at < count; at += n) {
        cpu_wave measured;
        n = wave_length(calls + at, count - at, all_work);
        const size_t bytes = lay_out(context, calls + at, n, all_work, NULL, &measured);
        most = bytes > most ? bytes : most;
    }
    return most;
}

apa_status apa_cpu_run_batch(apa_context *context, const apa_call *calls, int64_t count, void *workspace,
                             apa_statistics *statistics)
{
    const double all_work = work_of_all(calls, count);
    for (int64_t at = 0, n; at < count; at += n) {
        n = wave_length(calls + at, count - at, all_work);
        run_wave(context, calls + at, n, all_work, workspace, statistics);
    }
    return APA_STATUS_OK;
}

/* ---- plain batches ---- */

static void advance(apa_tensor *x, int64_t entries)
{
    if (x->dtype != APA_DTYPE_NONE && x->data != NULL)
        x->data = (char *)x->data + entries * x->stride[0] * (int64_t)apa_dtype_bytes(x->dtype);
}

/* Batch entries first … first+n-1 of a call. */
static apa_call part_of(const apa_call *call, int64_t first, int64_t n)
{
    apa_call part = *call;
    apa_tensor *const tensor[] = {&part.q,    &part.k,    &part.v,           &part.out,
                                  &part.lse,  &part.mask, &part.mask_slopes, &part.alibi_slopes,
                                  &part.sinks};
    for (size_t i = 0; i < sizeof tensor / sizeof tensor[0]; i++)
        advance(tensor[i], first);
    if (call->verdicts != NULL)
        part.verdicts = call->verdicts + first * call->Hq * call->Sq * apa_call_tiles(call);
    part.B = n;
    return part;
}

/* Batch entries that are prepared at once. */
static int64_t entries_at_once(const apa_call *call)
{
    const apa_call one = part_of(call, 0, call->B > 0 ? 1 : 0);
    const size_t bytes = own_bytes(&one, 0.0);
    const int64_t fit = bytes > 0 ? (int64_t)(WAVE_BYTES / bytes) : call->B;
    return call->B <= fit || own_bytes(call, 0.0) <= WAVE_BYTES ? call->B : fit > 0 ? fit : 1;
}

size_t apa_cpu_workspace_bytes(const apa_context *context, const apa_call *call)
{
    const int64_t n = entries_at_once(call), rest = n > 0 ? call->B % n : 0;
    cpu_wave measured;
    const apa_call first = part_of(call, 0, n), last = part_of(call, 0, rest);
    const size_t bytes = lay_out(context, &first, 1, 0.0, NULL, &measured);
    const size_t of_rest = rest > 0 ? lay_out(context, &last, 1, 0.0, NULL, &measured) : 0;
    return bytes > of_rest ? bytes : of_rest;
}

apa_status apa_cpu_run(apa_context *context, const apa_call *call, void *workspace, apa_statistics *statistics)
{
    const int64_t n = entries_at_once(call);
    for (int64_t b = 0; b < call->B; b += n) {
        const apa_call part = part_of(call, b, call->B - b < n ? call->B - b : n);
        run_wave(context, &part, 1, 0.0, workspace, statistics);
    }
    return APA_STATUS_OK;
}
