/* The reference engine: memory, threads, counts.
 *
 * Heads are prepared one after the other in the same memory; a head's groups are then dealt to slots, slot i taking
 * groups i, i + slots, …, each with its own scratch. A group's work depends on nothing but the group, so neither the
 * number of slots nor of threads changes a bit. Plain exact attention has no prep: all heads' rows are dealt at once.
 */
#include "reference/reference.h"

#include "reference/internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define SLOTS_PER_THREAD 4 /* evens out causal rows */
#define SLOTS_UNKNOWN 64   /* with a caller's pool */
#define ALIGNMENT 64       /* bytes */

void *apa_reference_take(apa_reference_arena *arena, int64_t count, int64_t per, size_t bytes)
{
    const size_t room = (SIZE_MAX - ALIGNMENT) / bytes;
    const size_t at = arena->size;
    if (at == SIZE_MAX || (per > 0 && (size_t)count > room / (size_t)per))
        goto overflow;
    size_t need = (size_t)count * (size_t)per * bytes;
    need = (need + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (need > SIZE_MAX - 1 - at)
        goto overflow;
    arena->size = at + need;
    return arena->base == NULL ? NULL : arena->base + at;
overflow:
    arena->size = SIZE_MAX;
    return NULL;
}

typedef struct reference_slot {
    apa_reference_block block;
    int64_t visible, hot, cold, candidates;
    apa_reference_lamp lamp;
} reference_slot;

typedef struct reference_run {
    const apa_call *call;
    apa_reference_head head;
    reference_slot *slots;
    int64_t slot_count;
    int64_t block_rows;      /* of a block */
    int64_t blocks_per_head; /* blocks of a KV head */
    int64_t first, blocks;   /* blocks at hand, numbered through all heads */
} reference_run;

static void block_layout(apa_reference_arena *arena, const apa_call *call, int64_t rows, apa_reference_block *block)
{
    const int64_t tiles = apa_call_tiles(call), D = call->D, Dv = call->Dv, T = APA_REFERENCE_TILE;
    block->q = apa_reference_take(arena, rows, D, sizeof(double));
    block->hot = apa_reference_take(arena, rows, Dv, sizeof(double));
    block->kt = apa_reference_take(arena, T, D, sizeof(double));
    block->v = apa_reference_take(arena, T, Dv, sizeof(double));
    block->verdict = apa_reference_take(arena, tiles, 1, sizeof(uint8_t));
    if (call->mask.dtype != APA_DTYPE_NONE)
        block->seen = apa_reference_take(arena, rows, tiles, sizeof(uint64_t));
    if (call->recipe.softmax == APA_SOFTMAX_TREE)
        block->tree = apa_reference_take(arena, rows, apa_reference_tree_doubles(call), sizeof(double));
    if (apa_reference_all_hot(&call->recipe))
        return;
    block->cold = apa_reference_take(arena, rows, Dv, sizeof(double));
    block->q_prepared = apa_reference_take(arena, rows, D, sizeof(double));
    for (int term = 0; term < call->recipe.q_terms; ++term)
        block->q_units[term] = apa_reference_take(arena, rows, D, sizeof(double));
    block->p = apa_reference_take(arena, rows, T, sizeof(double));
    block->mass = apa_reference_take(arena, tiles, rows, sizeof(double));
    block->code = apa_reference_take(arena, rows, T, sizeof(double));
    block->given = apa_reference_take(arena, tiles, 2, sizeof(uint8_t));
    if (call->mask.dtype != APA_DTYPE_NONE)
        block->spoilt = apa_reference_take(arena, tiles, 1, sizeof(uint8_t));
    if (call->recipe.smooth_q == APA_TOGGLE_ON) {
        block->q_mean = apa_reference_take(arena, rows, D, sizeof(double));
        block->delta = apa_reference_take(arena, rows, T, sizeof(double));
    }
    if (call->recipe.verdict == APA_VERDICT_RULE_MASS_VALUE)
        block->middle = apa_reference_take(arena, rows, Dv, sizeof(double));
    if (call->recipe.lambda_bound == APA_LAMBDA_BOUND_JENSEN)
        block->rest = apa_reference_take(arena, tiles, rows, sizeof(double));
}

/* Plans a run and lays it out in the arena; base NULL only measures. */
static void run_layout(apa_reference_arena *arena, const apa_context *context, const apa_call *call, reference_run *run)
{
    const int64_t threads = apa_context_threads(context), rows = apa_call_rows(call);
    const bool plain = apa_reference_plain(&call->recipe);
    memset(run, 0, sizeof *run);
    run->call = call;
    run->block_rows = plain ? APA_REFERENCE_ROWS : call->recipe.group;
    run->blocks_per_head = rows / run->block_rows + (rows % run->block_rows != 0);
    run->slot_count = threads > 0 ? threads * SLOTS_PER_THREAD : SLOTS_UNKNOWN;
    run->slots = apa_reference_take(arena, run->slot_count, 1, sizeof(reference_slot));
    if (!plain)
        apa_reference_head_layout(arena, call, &run->head);
    for (int64_t i = 0; i < run->slot_count; ++i) {
        reference_slot scratch = {0}, *slot = run->slots == NULL ? &scratch : &run->slots[i];
        memset(slot, 0, sizeof *slot);
        block_layout(arena, call, run->block_rows, &slot->block);
    }
}

/* Rows of block n of a head: who they are, what they see, their q and its shift. */
static void block_begin(const reference_run *run, const apa_reference_head *head, int64_t n, apa_reference_block *block)
{
    const apa_call *call = run->call;
    const int64_t left = apa_call_rows(call) - n * run->block_rows;
    block->call = call;
    block->head = head;
    block->rows = left < run->block_rows ? left : run->block_rows;
    block->tile_first = INT64_MAX;
    block->tile_end = 0;
    block->visible = block->hot_count = block->cold_count = block->candidates = 0;
    memset(&block->lamp, 0, sizeof block->lamp);
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        memset(row, 0, sizeof *row);
        apa_call_row(call, n * run->block_rows + r, &row->position, &row->hq);
        row->hq += head->h * call->G;
        row->real = row->position < call->Sq;
        row->lambda.frame = row->cold_frame = row->hot_max = row->top = row->next = -INFINITY;
        row->sink = apa_reference_sink(call, head->b, row->hq);
        if (!row->real)
            continue;
        apa_call_visible(call, row->position, &row->first, &row->end);
        if (row->first >= row->end)
            continue;
        const int64_t tile_first = row->first / APA_REFERENCE_TILE, tile_end = (row->end - 1) / APA_REFERENCE_TILE + 1;
        block->tile_first = tile_first < block->tile_first ? tile_first : block->tile_first;
        block->tile_end = tile_end > block->tile_end ? tile_end : block->tile_end;
    }
    if (block->tile_end == 0)
        block->tile_first = 0; /* nobody sees anything */
    apa_reference_see(block);
}

/* λ begins with the sink, in the frame of the cold scores. It is nothing to the frame of the cold state. */
static void start_sum(apa_reference_row *row)
{
    if (row->sink == -INFINITY)
        return;
    row->lambda = (apa_reference_mass){(row->sink - row->shift) * APA_REFERENCE_LOG2E, 1.0};
    row->finite = row->finite && !isnan(row->sink);
}

static void load_queries(apa_reference_block *block)
{
    const apa_call *call = block->call;
    const bool all_hot = apa_reference_all_hot(&call->recipe);
    memset(block->hot, 0, sizeof(double) * (size_t)(block->rows * call->Dv));
    if (!all_hot)
        memset(block->cold, 0, sizeof(double) * (size_t)(block->rows * call->Dv));
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        double *q = block->q + r * call->D;
        if (!row->real)
            continue;
        apa_reference_load(apa_reference_query(call, block->head->b, row->hq, row->position), call->q.dtype, call->D,
                           call->recipe.exact_format, q);
        if (!all_hot)
            apa_reference_quantise_q(block, r);
        row->finite = row->finite && apa_reference_slopes_finite(call, block->head->b, row->hq);
        double dot = 0;
        for (int64_t d = 0; d < call->D && call->recipe.smooth_k == APA_TOGGLE_ON; ++d)
            dot += q[d] * (double)block->head->k_mean[d];
        /* A q that is not finite has all its tiles hot: no frame to share, and no shift that could add a NaN. */
        row->shift = isfinite(call->scale * dot) ? call->scale * dot : 0.0;
        start_sum(row);
    }
}

/* The caller's map: [B][Hq][Sq][tiles]. */
static void write_verdicts(const apa_reference_block *block)
{
    const apa_call *call = block->call;
    const int64_t tiles = apa_call_tiles(call);
    for (int64_t r = 0; r < block->rows; ++r) {
        const apa_reference_row *row = &block->row[r];
        if (call->verdicts == NULL || !row->real)
            continue;
        uint8_t *map = call->verdicts + ((block->head->b * call->Hq + row->hq) * call->Sq + row->position) * tiles;
        for (int64_t t = 0; t < tiles; ++t)
            map[t] = apa_reference_sees(block, r, t) ? block->verdict[t] : APA_VERDICT_INVISIBLE;
    }
}

static void exact_pass(apa_reference_block *block)
{
    if (block->call->recipe.softmax == APA_SOFTMAX_WHOLE) {
        apa_reference_exact_whole(block);
        return;
    }
    if (block->call->recipe.softmax == APA_SOFTMAX_TREE) {
        apa_reference_exact_tree(block);
        return;
    }
    for (int64_t t = block->tile_first; t < block->tile_end; ++t)
        if (block->verdict[t] == APA_VERDICT_HOT)
            apa_reference_exact_tile(block, t);
}

static void run_block(const reference_run *run, int64_t index, reference_slot *slot)
{
    const int64_t bh = index / run->blocks_per_head;
    apa_reference_block *block = &slot->block;
    apa_reference_head head = run->head;
    head.b = bh / run->call->Hkv;
    head.h = bh % run->call->Hkv;
    block_begin(run, &head, index % run->blocks_per_head, block);
    load_queries(block);
    apa_reference_walk(block);
    exact_pass(block);
    apa_reference_finish(block);
    write_verdicts(block);
    slot->visible += block->visible;
    slot->hot += block->hot_count;
    slot->cold += block->cold_count;
    slot->candidates += block->candidates;
    slot->lamp.sub_blocks += block->lamp.sub_blocks;
    slot->lamp.recomputed += block->lamp.recomputed;
    slot->lamp.tiles += block->lamp.tiles;
    slot->lamp.disruptive += block->lamp.disruptive;
}

static void slot_task(void *argument, size_t index)
{
    const reference_run *run = argument;
    for (int64_t i = (int64_t)index; i < run->blocks; i += run->slot_count)
        run_block(run, run->first + i, &run->slots[index]);
}

static void run_blocks(apa_context *context, reference_run *run, int64_t first, int64_t blocks)
{
    const int64_t busy = blocks < run->slot_count ? blocks : run->slot_count;
    run->first = first;
    run->blocks = blocks;
    apa_context_parallel(context, slot_task, run, (size_t)busy);
}

static void sum_counts(const reference_run *run, apa_statistics *statistics)
{
    statistics->visible = statistics->hot = statistics->cold = statistics->skipped = statistics->candidates = 0;
    statistics->lamp_sub_blocks = statistics->lamp_recomputed = statistics->lamp_tiles = statistics->lamp_disruptive =
        0;
    for (int64_t i = 0; i < run->slot_count; ++i) {
        statistics->visible += run->slots[i].visible;
        statistics->hot += run->slots[i].hot;
        statistics->cold += run->slots[i].cold;
        statistics->candidates += run->slots[i].candidates;
        statistics->lamp_sub_blocks += run->slots[i].lamp.sub_blocks;
        statistics->lamp_recomputed += run->slots[i].lamp.recomputed;
        statistics->lamp_tiles += run->slots[i].lamp.tiles;
        statistics->lamp_disruptive += run->slots[i].lamp.disruptive;
    }
    statistics->hot_share = statistics->visible == 0 ? 0.0 : (double)statistics->hot / (double)statistics->visible;
    statistics->skip_share = 0.0; /* the reference never skips */
}

static apa_status reference_run_call(apa_context *context, const apa_call *call, void *workspace,
                                     apa_statistics *statistics)
{
    apa_reference_arena arena = {.base = workspace};
    const int64_t heads = call->B * call->Hkv;
    const double start = apa_now_ms();
    reference_run run;
    double prep_ms = 0;
    run_layout(&arena, context, call, &run);
    if (apa_reference_plain(&call->recipe)) {
        run_blocks(context, &run, 0, heads * run.blocks_per_head);
    } else {
        for (int64_t bh = 0; bh < heads && run.blocks_per_head > 0; ++bh) {
            const double prep_start = apa_now_ms();
            run.head.b = bh / call->Hkv;
            run.head.h = bh % call->Hkv;
            apa_reference_prep(context, call, &run.head);
            prep_ms += apa_now_ms() - prep_start;
            run_blocks(context, &run, bh * run.blocks_per_head, run.blocks_per_head);
        }
    }
    sum_counts(&run, statistics);
    statistics->prep_ms = prep_ms;
    statistics->attention_ms = apa_now_ms() - start - prep_ms;
    return APA_STATUS_OK;
}

static size_t reference_workspace_bytes(const apa_context *context, const apa_call *call)
{
    apa_reference_arena arena = {.base = NULL};
    reference_run run;
    run_layout(&arena, context, call, &run);
    return arena.size;
}

static void reference_kernel_name(const apa_context *context, const apa_call *call, char *name, size_t size)
{
    (void)context;
    char qk[16] = "", pv[16] = "";
    if (apa_reference_all_hot(&call->recipe)) {
        snprintf(name, size, "f64 portable");
        return;
    }
    apa_recipe_get(&call->recipe, "qk_format", qk, sizeof qk);
    apa_recipe_get(&call->recipe, "pv_format", pv, sizeof pv);
    const bool one = strcmp(qk, pv) == 0;
    snprintf(name, size, "%s%s%s+f64 portable", qk, one ? "" : "/", one ? "" : pv);
}

const apa_engine apa_reference_engine = {
    .name = "reference",
    .resolve = apa_reference_resolve,
    .kernel_name = reference_kernel_name,
    .workspace_bytes = reference_workspace_bytes,
    .run = reference_run_call,
};
