/* Engine table entry: what it supports, how the work is spread, where the memory goes. */
#include "cpu/engine.h"

#include "cpu/adaptive.h"
#include "cpu/exact.h"
#include "recipe/defaults.h"

#include <float.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define LARGEST_LEVELS 64

static apa_status refuse(apa_context *context, const char *knob, const char *found, const char *expected)
{
    return apa_fail(context, APA_STATUS_UNSUPPORTED, "%s: %s, the cpu engine takes %s (the reference engine takes it)",
                    knob, found, expected);
}

static apa_status check_recipe(apa_context *context, const apa_recipe *recipe)
{
    char found[32];
    if (recipe->tile != APA_CPU_TILE) {
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "tile: %d, the cpu engine takes 64", (int)recipe->tile);
    }
    if (recipe->group != APA_CPU_LANES) {
        snprintf(found, sizeof found, "%d", (int)recipe->group);
        return refuse(context, "group", found, "16");
    }
    if (recipe->exact_format != APA_EXACT_FORMAT_INPUT)
        return refuse(context, "exact_format", "f16 or bf16", "input");
    const char *knob;
    if (apa_recipe_beyond_walk(recipe, &knob)) {
        char held[32] = "";
        apa_recipe_get(recipe, knob, held, sizeof held);
        return refuse(context, knob, held, "the plain adaptive walk only");
    }
    if (recipe->force == APA_FORCE_HIGH)
        return APA_STATUS_OK; /* no cold tile, so nothing below matters */
    if (recipe->cold_format != APA_COLD_FORMAT_INT8) {
        char held[32] = "";
        apa_recipe_get(recipe, "cold_format", held, sizeof held);
        return refuse(context, "cold_format", held, "int8");
    }
    if (recipe->q_terms != 1)
        return refuse(context, "q_terms", "2", "1");
    if (recipe->smooth_v != APA_TOGGLE_OFF)
        return refuse(context, "smooth_v", "on", "off");
    /* Judged again against the final λ, the start of λ decides nothing: the bound is accepted there and has no effect.
     */
    if (recipe->lambda_bound != APA_LAMBDA_BOUND_NONE && recipe->second_look != APA_TOGGLE_ON)
        return refuse(context, "lambda_bound", "jensen without second_look", "none, or second_look=on");
    return APA_STATUS_OK;
}

/* Products of sizes below this fit int64 with room for every factor that the layout adds. Broadcast views (stride 0)
 * can describe more than any memory holds. */
#define LARGEST_PROBLEM 0x1p52

static bool is_too_large(const apa_call *call)
{
    const double keys = (double)call->B * (double)call->Hkv * (double)(call->Skv + APA_CPU_TILE);
    const double rows = (double)call->B * (double)call->Hq * (double)(call->Sq + APA_CPU_LANES);
    return keys > LARGEST_PROBLEM / 1024.0 * 8.0 || rows > LARGEST_PROBLEM / 1024.0 * 8.0;
}

static apa_status resolve(apa_context *context, apa_call *call)
{
    if (is_too_large(call))
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "shape: batch x heads x length beyond 2^45 rows or keys");
    const double factor = fabs(call->scale) * 1.4426950408889634;
    if (call->scale != 0.0 && !(factor >= FLT_MIN && factor <= FLT_MAX))
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "softmax_scale: %g, the cpu engine takes 0 and what FP32 holds (the reference engine takes it)",
                        call->scale);
    if (apa_call_changes_scores(call) || call->sinks.dtype != APA_DTYPE_NONE || call->pages != NULL)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "softcap, attn_mask, alibi_slopes, sinks or block_table: the cpu engine takes none of them (the "
                        "reference engine does)");
    apa_recipe *recipe = &call->recipe;
    apa_recipe_fill_auto(recipe, call->Sq, call->Skv, call->D);
    if (recipe->skip == APA_TOGGLE_AUTO)
        recipe->skip = APA_TOGGLE_ON;
    if (call->q.dtype == APA_DTYPE_F64 || call->out.dtype == APA_DTYPE_F64 || call->lse.dtype == APA_DTYPE_F64)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "dtype: f64, the cpu engine takes f16, bf16 and f32 (the reference "
                        "engine takes f64)");
    return check_recipe(context, recipe);
}

static void kernel_name(const apa_context *context, const apa_call *call, char *name, size_t size)
{
    apa_cpu_shape shape;
    apa_cpu_shape_of(call, &shape);
    snprintf(name, size, "%s %s", shape.adaptive ? "i8+f32" : "f32",
             apa_cpu_kernels_for(apa_context_isa_level(context))->name);
}

/* A thread's scratch: a block and what its method needs. */
typedef struct cpu_slot {
    apa_cpu_block block;
    apa_cpu_adaptive adaptive;
    apa_cpu_node level[LARGEST_LEVELS];
    atomic_flag taken;
} cpu_slot;

typedef struct cpu_work {
    const apa_call *call;
    const apa_cpu_kernels *kernels;
    apa_cpu_shape shape;
    apa_cpu_prepared prepared;
    cpu_slot *slots;
    int64_t slot_count;
    apa_cpu_node *chunk; /* [units][chunks], exact method with more than one chunk */
    _Atomic int64_t visible, hot, skipped, candidates;
} cpu_work;

/* Lays everything out; with base NULL it only measures. */
static size_t layout(const apa_context *context, const apa_call *call, void *base, cpu_work *work)
{
    apa_cpu_arena arena = {base, 0};
    apa_cpu_shape *shape = &work->shape;
    apa_cpu_shape_of(call, shape);
    const int64_t tasks = shape->units * shape->chunks;
    work->slot_count = apa_context_threads(context) < tasks ? apa_context_threads(context) : tasks;
    if (shape->adaptive)
        apa_cpu_prepared_layout(call, shape, &arena, &work->prepared);
    work->slots = apa_cpu_take(&arena, work->slot_count, sizeof(cpu_slot));
    cpu_slot measured;
    for (int64_t i = 0; i < work->slot_count; i++) {
        cpu_slot *at = base == NULL ? &measured : &work->slots[i];
        apa_cpu_block_layout(shape, &arena, &at->block);
        if (shape->adaptive)
            apa_cpu_adaptive_layout(shape, &arena, &at->adaptive);
        for (int level = 0; level < shape->levels && !shape->adaptive; level++)
            apa_cpu_node_layout(shape, &arena, &at->level[level]);
        if (base != NULL)
            atomic_flag_clear(&at->taken);
    }
    const int64_t nodes = shape->chunks > 1 ? tasks : 0;
    work->chunk = apa_cpu_take(&arena, nodes, sizeof(apa_cpu_node));
    for (int64_t i = 0; i < nodes; i++) {
        apa_cpu_node node;
        apa_cpu_node_layout(shape, &arena, &node);
        if (base != NULL)
            work->chunk[i] = node;
    }
    return arena.used;
}

static size_t workspace_bytes(const apa_context *context, const apa_call *call)
{
    cpu_work measured;
    return layout(context, call, NULL, &measured);
}

/* There are as many slots as threads, so one is free or about to be. */
static cpu_slot *take_slot(cpu_work *work)
{
    for (;;) {
        for (int64_t i = 0; i < work->slot_count; i++)
            if (!atomic_flag_test_and_set_explicit(&work->slots[i].taken, memory_order_acquire))
                return &work->slots[i];
        sched_yield();
    }
}

static void free_slot(cpu_slot *slot)
{
    atomic_flag_clear_explicit(&slot->taken, memory_order_release);
}

/* Verdicts of a block, when the caller wants them. */
static void write_verdicts(const apa_cpu_block *block, const apa_cpu_adaptive *adaptive)
{
    const apa_call *call = block->call;
    const int64_t tiles = block->shape->tiles;
    for (int r = 0; r < block->n && call->verdicts != NULL; r++)
        for (int i = 0; i < APA_CPU_LANES; i++) {
            const apa_cpu_row *row = &block->reg[r].row[i];
            if (row->position < 0)
                continue;
            uint8_t *verdict = call->verdicts + ((block->b * call->Hq + row->head) * call->Sq + row->position) * tiles;
            for (int64_t tile = 0; tile < tiles; tile++) {
                const bool sees =
                    row->first < row->end && row->first < (tile + 1) * APA_CPU_TILE && row->end > tile * APA_CPU_TILE;
                const bool hot = adaptive == NULL || (adaptive->hot[tile] >> r & 1) != 0;
                const bool skipped = adaptive != NULL && (adaptive->skipped[tile] >> r & 1) != 0;
                verdict[tile] = (uint8_t)(!sees     ? APA_VERDICT_INVISIBLE
                                          : hot     ? APA_VERDICT_HOT
                                          : skipped ? APA_VERDICT_SKIPPED
                                                    : APA_VERDICT_COLD);
            }
        }
}

static void adaptive_task(void *argument, size_t index)
{
    cpu_work *work = argument;
    cpu_slot *slot = take_slot(work);
    /* Last units first: with a causal mask they are the longest of their head. */
    apa_cpu_block_load(&slot->block, work->call, &work->shape, work->kernels, work->shape.units - 1 - (int64_t)index);
    apa_cpu_adaptive_run(&slot->block, &slot->adaptive, &work->prepared);
    write_verdicts(&slot->block, &slot->adaptive);
    apa_cpu_block_store(&slot->block);
    work->visible += slot->adaptive.visible;
    work->hot += slot->adaptive.hot_pairs;
    work->skipped += slot->adaptive.skipped_pairs;
    work->candidates += slot->adaptive.candidate_pairs;
    free_slot(slot);
}

static void finish_exact(cpu_work *work, cpu_slot *slot)
{
    const apa_cpu_block *block = &slot->block;
    int64_t visible = 0;
    for (int r = 0; r < block->n; r++)
        for (int i = 0; i < APA_CPU_LANES; i++) {
            const apa_cpu_row *row = &block->reg[r].row[i];
            if (row->position >= 0 && row->first < row->end)
                visible += (row->end - 1) / APA_CPU_TILE - row->first / APA_CPU_TILE + 1;
        }
    work->visible += visible;
    work->hot += visible;
    write_verdicts(block, NULL);
    apa_cpu_block_store(&slot->block);
}

static void exact_task(void *argument, size_t index)
{
    cpu_work *work = argument;
    cpu_slot *slot = take_slot(work);
    const int64_t chunks = work->shape.chunks, task = work->shape.units * chunks - 1 - (int64_t)index;
    apa_cpu_block_load(&slot->block, work->call, &work->shape, work->kernels, task / chunks);
    apa_cpu_exact_chunk(&slot->block, task % chunks, slot->level);
    if (chunks > 1)
        apa_cpu_node_save(&slot->block, &work->chunk[task]);
    else
        finish_exact(work, slot);
    free_slot(slot);
}

static void merge_task(void *argument, size_t unit)
{
    cpu_work *work = argument;
    cpu_slot *slot = take_slot(work);
    apa_cpu_block_load(&slot->block, work->call, &work->shape, work->kernels, (int64_t)unit);
    apa_cpu_exact_merge_chunks(&slot->block, work->chunk + (int64_t)unit * work->shape.chunks, work->shape.chunks,
                               slot->level);
    finish_exact(work, slot);
    free_slot(slot);
}

static apa_status run(apa_context *context, const apa_call *call, void *workspace, apa_statistics *statistics)
{
    cpu_work work = {.call = call, .kernels = apa_cpu_kernels_for(apa_context_isa_level(context))};
    layout(context, call, workspace, &work);
    const size_t units = (size_t)work.shape.units;
    const double start = apa_now_ms();
    double prepared = start;
    if (units > 0 && work.shape.adaptive) {
        apa_cpu_prepare(context, call, &work.shape, work.kernels, &work.prepared);
        prepared = apa_now_ms();
        apa_context_parallel(context, adaptive_task, &work, units);
    } else if (units > 0) {
        apa_context_parallel(context, exact_task, &work, units * (size_t)work.shape.chunks);
        if (work.shape.chunks > 1)
            apa_context_parallel(context, merge_task, &work, units);
    }
    statistics->prep_ms = prepared - start;
    statistics->attention_ms = apa_now_ms() - prepared;
    statistics->visible = work.visible;
    statistics->hot = work.hot;
    statistics->cold = work.visible - work.hot;
    statistics->skipped = work.skipped;
    statistics->candidates = work.candidates;
    return APA_STATUS_OK;
}

const apa_engine apa_cpu_engine = {
    .name = "cpu",
    .resolve = resolve,
    .kernel_name = kernel_name,
    .workspace_bytes = workspace_bytes,
    .run = run,
};
