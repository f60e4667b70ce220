/* How calls become tasks.
 *
 * A *job* is one call with what is prepared for it; a *wave* is as many jobs as share the workspace at once
 * (cpu/wave.h). All tasks of a wave stand in one list, step by step (prep, walk, merge), whichever job they are of, so
 * that many short sequences keep all threads busy; the largest jobs come first. Threads share nothing but *slots*,
 * scratch laid out for the largest job of the wave. How work is cut and who does it changes no bit of any result. */
#include "cpu/work.h"

#include "cpu/task.h"

#include <stdlib.h>

/* Prepared tiles and partial states of a wave, unless a single job needs more. Pages that many sequences share are
 * prepared for each, so without a bound a batch could need more than its inputs. */
#define WAVE_BYTES ((size_t)1 << 30)

/* ---- steps ---- */

static void run_task(void *argument, size_t index)
{
    apa_cpu_wave *wave = argument;
    int64_t low = 0, high = wave->jobs - 1;
    while (low < high) { /* the last job whose first task is not beyond */
        const int64_t middle = (low + high + 1) / 2;
        if (wave->job[middle].first <= (int64_t)index)
            low = middle;
        else
            high = middle - 1;
    }
    const apa_cpu_job *job = &wave->job[low];
    apa_cpu_task_run(wave, job, (int64_t)index - job->first);
}

static void run_step(apa_context *context, apa_cpu_wave *wave, int step)
{
    int64_t tasks = 0;
    wave->step = step;
    for (int64_t i = 0; i < wave->jobs; i++) {
        wave->job[i].first = tasks;
        tasks += apa_cpu_tasks_of(&wave->job[i], step);
    }
    if (tasks > 0)
        apa_context_parallel(context, run_task, wave, (size_t)tasks);
}

/* Prep, some heads after the other when a job is alone: step by step over all heads K would have left the caches before
 * it is read again. */
static void run_prep(apa_context *context, apa_cpu_wave *wave)
{
    apa_cpu_job *alone = wave->jobs == 1 && wave->job->shape.adaptive ? wave->job : NULL;
    const int64_t heads = alone != NULL ? alone->prepared.heads : 1;
    const int64_t at_once = alone != NULL ? apa_cpu_prep_heads_at_once(alone->call) : 1;
    for (int64_t head = 0; head < heads; head += at_once) {
        if (alone != NULL) {
            alone->prepared.first_head = head;
            alone->prepared.heads = heads - head < at_once ? heads - head : at_once;
        }
        for (int step = 0; step < APA_CPU_STEP_WALK; step++)
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
static void report_phases(const apa_context *context, const apa_cpu_wave *wave, double ticks_per_ms, double prep_ms,
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
    const double left = apa_cpu_work_of(((const apa_cpu_job *)a)->call),
                 right = apa_cpu_work_of(((const apa_cpu_job *)b)->call);
    return left < right ? 1 : left > right ? -1 : 0;
}

static void run_wave(apa_context *context, const apa_call *calls, int64_t count, double all_work, void *workspace,
                     apa_statistics *statistics)
{
    apa_cpu_wave wave = {.kernels = apa_cpu_kernels_for(apa_context_isa_level(context))};
    wave.phases = calls[0].phases;
    wave.timed = apa_cpu_phases_table(wave.kernels);
    apa_cpu_wave_lay_out(context, calls, count, all_work, workspace, &wave);
    qsort(wave.job, (size_t)count, sizeof *wave.job, by_work);
    const uint64_t ticks = apa_cpu_ticks();
    const double start = apa_now_ms();
    run_prep(context, &wave);
    const double prepared = apa_now_ms();
    run_step(context, &wave, APA_CPU_STEP_WALK);
    run_step(context, &wave, APA_CPU_STEP_MERGE);
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

/* How many of the calls make the next wave. */
static int64_t wave_length(const apa_call *calls, int64_t count, double all_work)
{
    size_t bytes = 0;
    int64_t n = 0;
    for (; n < count; n++) {
        const size_t more = apa_cpu_job_bytes(&calls[n], all_work);
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
        apa_cpu_wave measured;
        n = wave_length(calls + at, count - at, all_work);
        const size_t bytes = apa_cpu_wave_lay_out(context, calls + at, n, all_work, NULL, &measured);
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
    const size_t bytes = apa_cpu_job_bytes(&one, 0.0);
    const int64_t fit = bytes > 0 ? (int64_t)(WAVE_BYTES / bytes) : call->B;
    return call->B <= fit || apa_cpu_job_bytes(call, 0.0) <= WAVE_BYTES ? call->B : fit > 0 ? fit : 1;
}

size_t apa_cpu_workspace_bytes(const apa_context *context, const apa_call *call)
{
    const int64_t n = entries_at_once(call), rest = n > 0 ? call->B % n : 0;
    apa_cpu_wave measured;
    const apa_call first = part_of(call, 0, n), last = part_of(call, 0, rest);
    const size_t bytes = apa_cpu_wave_lay_out(context, &first, 1, 0.0, NULL, &measured);
    const size_t of_rest = rest > 0 ? apa_cpu_wave_lay_out(context, &last, 1, 0.0, NULL, &measured) : 0;
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
