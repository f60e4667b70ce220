/* The walk: every visible tile in INT8, panel by panel.
 *
 *   open a panel    scores, and what there is to say before probabilities: maxima, can the tile be skipped?
 *   close it        P, verdicts, P·V of the cold registers
 *
 * Where kernels make P of one panel while they score the next (scores_beside_i8), a panel stays open until the scores
 * of the next one, on this tile or the one after, have been made. A register's own steps keep their order, so nothing
 * changes but the time. */
#include "cpu/adaptive.h"

#include "cpu/bend.h"
#include "cpu/floor.h"

#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define PANEL APA_CPU_PANEL_I8

static void remember(const apa_cpu_block *block, apa_cpu_adaptive *adaptive, int r, int64_t tile, const float *top,
                     const int32_t *sum, const uint8_t *p8)
{
    apa_cpu_candidate *candidate = &adaptive->candidate[r][adaptive->candidates[r]++];
    memcpy(candidate->top, top, sizeof candidate->top);
    memcpy(candidate->sum, sum, sizeof candidate->sum);
    candidate->tile = tile;
    candidate->slot = -1;
    adaptive->judged[tile] |= (uint16_t)(1u << r);
    if (block->call->recipe.second_look != APA_TOGGLE_ON || adaptive->slots_used == block->shape->pool_slots)
        return;
    candidate->slot = adaptive->slots_used++;
    memcpy(adaptive->pool + candidate->slot * APA_CPU_P_BYTES, p8, APA_CPU_P_BYTES);
}

/* Verdicts and cold P·V of a panel whose P has been made. */
static void conclude(apa_cpu_block *block, apa_cpu_adaptive *adaptive, apa_cpu_open *open)
{
    const apa_cpu_kernels *kernels = block->kernels;
    const apa_recipe *recipe = &block->call->recipe;
    const bool judging = recipe->force != APA_FORCE_LOW && recipe->eps < 1.0;
    int cold = 0, cold_reg[PANEL];
    const uint8_t *cold_p[PANEL];
    _Alignas(64) float p_scale[PANEL][LANES], alpha[LANES];
    for (int i = 0; i < open->at.n; i++) {
        if ((open->skipped >> i & 1) != 0)
            continue;
        const int r = open->at.reg[i];
        const uint8_t *p8 = adaptive->p8 + i * APA_CPU_P_BYTES;
        const int32_t *sum = open->sum + i * LANES;
        const int judged =
            kernels->judge(&adaptive->walk[r], open->top[i], sum, adaptive->eps[r], alpha, p_scale[cold]);
        if ((judged & APA_CPU_JUDGED_MOVED) != 0 && adaptive->few > 0)
            apa_cpu_few_scale(block, adaptive, alpha);
        else if ((judged & APA_CPU_JUDGED_MOVED) != 0)
            kernels->scale_lanes(block->reg[r].o, block->shape->Dvp, alpha);
        if (judging && (judged & APA_CPU_JUDGED_CANDIDATE) != 0) {
            remember(block, adaptive, r, open->tile, open->top[i], sum, p8);
            continue;
        }
        apa_cpu_walk_add_cold(&adaptive->walk[r], sum, p_scale[cold]);
        cold_reg[cold] = r;
        cold_p[cold++] = p8;
    }
    apa_cpu_panel_values(block, adaptive, &open->codes, cold, cold_reg, cold_p, (const float(*)[LANES])p_scale);
    open->at.n = 0;
}

/* All that is due of an open panel whose scores lie in block->s. */
static void close_panel(apa_cpu_block *block, apa_cpu_adaptive *adaptive, apa_cpu_open *open)
{
    for (int i = 0; i < open->at.n; i++)
        if ((open->skipped >> i & 1) == 0)
            apa_cpu_panel_probabilities(block, adaptive, &open->at, i, open->maximum + i * LANES,
                                        adaptive->p8 + i * APA_CPU_P_BYTES, open->sum + i * LANES);
    conclude(block, adaptive, open);
}

static void close_last(apa_cpu_block *block, apa_cpu_adaptive *adaptive)
{
    close_panel(block, adaptive, &adaptive->open[adaptive->turn]);
}

/* May P of a panel be made beside the scores of another? */
static bool goes_beside(const apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_panel *at)
{
    bool whole = block->kernels->scores_beside_i8 != NULL && adaptive->few == 0 && !block->bend.changes;
    for (int i = 0; i < at->n; i++)
        whole = whole && !at->part[i];
    return whole;
}

/* Scores of `next` and P of `last`, which is open only if it goes beside others: false where they don't fit. */
static bool score_beside(apa_cpu_block *block, apa_cpu_adaptive *adaptive, apa_cpu_open *last, apa_cpu_open *next,
                         const apa_cpu_prefetch *prefetch)
{
    const uint8_t *q8[PANEL];
    apa_cpu_due due = {.maximum = last->maximum, .p8 = adaptive->p8, .sum = last->sum};
    if (last->at.n == 0 || last->at.n != next->at.n)
        return false;
    for (int i = 0; i < next->at.n; i++) {
        q8[i] = adaptive->q8[next->at.reg[i]];
        due.q_scale[i] = adaptive->walk[last->at.reg[i]].q_scale;
    }
    return block->kernels->scores_beside_i8(next->at.n, q8, next->codes.k8, next->codes.k_bias, next->codes.k_scale,
                                            block->shape->Dp, block->s, next->maximum, prefetch, &due);
}

/* Opens the panel of adaptive->open[turn ^ 1], and closes the one before if it is open. */
static void walk_panel(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prefetch *prefetch)
{
    apa_cpu_open *last = &adaptive->open[adaptive->turn], *next = &adaptive->open[adaptive->turn ^ 1];
    const apa_cpu_blob *blob = next->codes.blob;
    if (score_beside(block, adaptive, last, next, prefetch)) {
        conclude(block, adaptive, last);
    } else {
        close_panel(block, adaptive, last);
        apa_cpu_panel_scores(block, adaptive, &next->codes, &next->at, next->maximum, prefetch);
    }
    next->skipped = 0;
    for (int i = 0; i < next->at.n; i++) {
        const int r = next->at.reg[i];
        float *maximum = next->maximum + i * LANES;
        apa_cpu_panel_settle(block, adaptive, &next->at, i, next->tile, maximum);
        if (!block->kernels->look(&adaptive->walk[r], maximum, blob->k_scale_max, blob->v_max, next->top[i]))
            continue;
        adaptive->skipped[next->tile] |= (uint16_t)(1u << r);
        next->skipped |= (uint16_t)(1u << i);
    }
    adaptive->turn ^= 1;
    if (!goes_beside(block, adaptive, &next->at) || next->skipped == (1u << next->at.n) - 1u)
        close_panel(block, adaptive, next);
}

/* The codes of a tile, in as many shares as the tile before has panels. */
static apa_cpu_prefetch next_codes(const apa_cpu_block *block, const apa_cpu_tile *next)
{
    const int64_t Dp = block->shape->Dp, Dvp = block->shape->Dvp;
    const int64_t panels = (block->n + PANEL - 1) / PANEL;
    return (apa_cpu_prefetch){.row = {(const char *)next->k8, (const char *)next->v8},
                              .stride = {Dp, Dvp},
                              .bytes = {Dp, Dvp},
                              .rows = TILE / panels};
}

/* What stands before and behind the codes. */
static void ask_for_scales(const apa_cpu_block *block, const apa_cpu_tile *tile)
{
    const char *from = (const char *)tile->k_bias, *end = (const char *)(tile->v_scale + block->shape->Dvp);
    __builtin_prefetch(tile->blob);
    for (const char *line = from; line < end; line += 64)
        __builtin_prefetch(line);
}

/* Registers from `from` on that see the tile and are not hot anyway, as a panel; returns where the next one begins. */
static int next_panel(apa_cpu_block *block, apa_cpu_adaptive *adaptive, int64_t tile, bool poisoned, int from,
                      apa_cpu_panel *at)
{
    /* Panels of like size: then they go beside each other. */
    const int rest = block->n - from, panels = (rest + PANEL - 1) / PANEL, most = (rest + panels - 1) / panels;
    int r = from;
    at->n = 0;
    if (apa_cpu_tile_is_whole(adaptive, tile) && !poisoned && adaptive->all_hot == 0) {
        for (; r < block->n && at->n < most; r++) {
            at->part[at->n] = false;
            at->reg[at->n++] = r;
        }
        return r;
    }
    for (; r < block->n && at->n < most; r++) {
        const apa_cpu_view view = apa_cpu_block_view(block, r, tile, &at->span[at->n]);
        if (view == APA_CPU_VIEW_NONE)
            continue;
        if (poisoned || (adaptive->all_hot >> r & 1) != 0 || apa_cpu_bend_is_wild(block, r, tile)) {
            adaptive->hot[tile] |= (uint16_t)(1u << r);
            adaptive->candidate_pairs += apa_cpu_lanes_in(apa_cpu_block_seeing(block, r, tile));
            continue;
        }
        at->part[at->n] = view == APA_CPU_VIEW_PART;
        at->reg[at->n++] = r;
    }
    return r;
}

static void walk_tile(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared, int64_t tile,
                      int64_t next)
{
    const apa_cpu_tile codes = apa_cpu_prepared_tile(prepared, block->shape, block->head, tile);
    const apa_cpu_tile ahead = apa_cpu_prepared_tile(prepared, block->shape, block->head, next);
    apa_cpu_prefetch prefetch = next_codes(block, &ahead);
    ask_for_scales(block, &ahead);
    if (codes.blob->segment != adaptive->segment) {
        close_last(block, adaptive);
        apa_cpu_adaptive_move(block, adaptive, codes.blob->segment);
    }
    for (int r = 0; r < block->n;) {
        apa_cpu_open *open = &adaptive->open[adaptive->turn ^ 1];
        r = next_panel(block, adaptive, tile, codes.blob->poisoned != 0, r, &open->at);
        if (open->at.n == 0)
            continue;
        open->codes = codes;
        open->tile = tile;
        walk_panel(block, adaptive, &prefetch);
        for (int set = 0; set < 2; set++)
            prefetch.row[set] += prefetch.rows * prefetch.stride[set];
    }
}

/* See apa_cpu_adaptive.whole_first. A mask says more than this, so with one there are none. */
static void find_whole_tiles(const apa_cpu_block *block, apa_cpu_adaptive *adaptive)
{
    adaptive->whole_first = 0;
    adaptive->whole_end = block->bend.masked ? 0 : block->shape->tiles;
    for (int r = 0; r < block->n; r++) {
        const apa_cpu_register *reg = &block->reg[r];
        const int64_t first = (reg->every_first + TILE - 1) / TILE, end = reg->every_end / TILE;
        adaptive->whole_first = first > adaptive->whole_first ? first : adaptive->whole_first;
        adaptive->whole_end = end < adaptive->whole_end ? end : adaptive->whole_end;
        adaptive->rows[r] = apa_cpu_lanes_in(reg->real);
    }
}

static void begin(apa_cpu_block *block, apa_cpu_adaptive *adaptive)
{
    memset(adaptive->hot, 0, sizeof *adaptive->hot * (size_t)block->shape->tiles);
    memset(adaptive->skipped, 0, sizeof *adaptive->skipped * (size_t)block->shape->tiles);
    memset(adaptive->judged, 0, sizeof *adaptive->judged * (size_t)block->shape->tiles);
    memset(adaptive->candidates, 0, sizeof adaptive->candidates);
    adaptive->visible = adaptive->hot_pairs = adaptive->skipped_pairs = adaptive->candidate_pairs = 0;
    adaptive->slots_used = 0;
    adaptive->open[0].at.n = adaptive->open[1].at.n = 0;
    adaptive->turn = 0;
    find_whole_tiles(block, adaptive);
}

void apa_cpu_adaptive_walk(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared,
                           int64_t first, int64_t end, bool with_floor)
{
    const apa_order order = block->call->recipe.order;
    begin(block, adaptive);
    apa_cpu_block_clear(block);
    apa_cpu_bend_scan(block, first, end);
    apa_cpu_adaptive_rows(block, adaptive, prepared);
    if (with_floor)
        apa_cpu_floor_set(block, adaptive, prepared);
    apa_cpu_few_begin(block, adaptive);
    for (int64_t i = 0; i < end - first; i++) {
        const int64_t tile = apa_cpu_tile_in_order(order, first, end, i);
        const int64_t next = i + 1 < end - first ? apa_cpu_tile_in_order(order, first, end, i + 1) : tile;
        walk_tile(block, adaptive, prepared, tile, next);
    }
    close_last(block, adaptive);
}
