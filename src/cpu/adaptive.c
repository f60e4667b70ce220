/* The adaptive method on one block.
 *
 *   quantise Q → walk all visible tiles in INT8 (scores, look, P, judge; cold tiles: P·V)
 *              → second look at the candidates with the final λ: demoted ones get their P·V from the stored P
 *              → check what was skipped against the finished sums → exact pass over the hot tiles
 *
 * P of a tile is scaled by the tile's own row maximum, not by the running frame, so P bytes stay valid whatever comes
 * later: that makes the second look nearly free and the drowned tail of a frame-scaled format impossible. Cold sums, λ
 * and the exact pass share one frame per row; the exact pass goes on with the cold state, which is the exact merge of
 * the two. */
#include "cpu/adaptive.h"

#include "cpu/bend.h"
#include "cpu/exact.h"
#include "cpu/floor.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define P_BYTES (TILE * LANES)
/* log2 units that a change of frame may be corrected by. */
#define LARGEST_CORRECTION 60.0
#define LOG2_E 1.4426950408889634074
/* FP32 output sums: half a unit in the last place, with the same spare factor of two as APA_CPU_SKIP_LIMIT. */
#define OUTPUT_SKIP_LIMIT 0x1p-26f

void apa_cpu_adaptive_layout(const apa_cpu_shape *shape, apa_cpu_arena *arena, apa_cpu_adaptive *adaptive)
{
    const int n = shape->block_registers;
    uint8_t *q8 = apa_cpu_take(arena, n * (shape->Dp * LANES + 64), 1);
    apa_cpu_candidate *candidate = apa_cpu_take(arena, n * shape->tiles, sizeof *candidate);
    uint16_t *hot = apa_cpu_take(arena, shape->tiles, sizeof *hot);
    uint16_t *skipped = apa_cpu_take(arena, shape->tiles, sizeof *skipped);
    uint8_t *pool = apa_cpu_take(arena, shape->pool_slots, P_BYTES);
    uint8_t *p8 = apa_cpu_take(arena, APA_CPU_PANEL_I8, P_BYTES);
    float *shifts = apa_cpu_take(arena, n * shape->mean_rows * LANES, sizeof *shifts);
    if (arena->base == NULL)
        return;
    for (int r = 0; r < n; r++) {
        adaptive->q8[r] = q8 + r * (shape->Dp * LANES + 64);
        adaptive->candidate[r] = candidate + r * shape->tiles;
        adaptive->shifts[r] = shifts + r * shape->mean_rows * LANES;
    }
    adaptive->hot = hot;
    adaptive->skipped = skipped;
    adaptive->pool = pool;
    adaptive->p8 = p8;
}

/* Tile number i of the recipe's order over [first, end). */
static int64_t tile_at(apa_order order, int64_t first, int64_t end, int64_t i)
{
    if (order == APA_ORDER_FORWARD)
        return first + i;
    if (order == APA_ORDER_SINK_BACKWARD && first == 0)
        return i == 0 ? 0 : end - i;
    return end - 1 - i;
}

static int64_t popcount16(uint16_t lanes)
{
    return __builtin_popcount(lanes);
}

/* A panel of the walk: registers side by side on one tile. */
typedef struct panel {
    int n, reg[APA_CPU_PANEL_I8];
    bool part[APA_CPU_PANEL_I8];
    apa_cpu_span span[APA_CPU_PANEL_I8];
} panel;

static void scores(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes, const panel *at,
                   float *maximum, const apa_cpu_prefetch *prefetch)
{
    const apa_cpu_kernels *kernels = block->kernels;
    const uint8_t *q8[APA_CPU_PANEL_I8];
    if (adaptive->few > 0) {
        kernels->scores_few_i8(adaptive->few, adaptive->q_few, codes->k8, codes->k_bias, codes->k_scale,
                               block->shape->Dp, block->s, prefetch);
        kernels->max_few_i8(adaptive->few, block->s, at->part[0] ? &at->span[0] : NULL, maximum);
        return;
    }
    for (int i = 0; i < at->n; i++)
        q8[i] = adaptive->q8[at->reg[i]];
    kernels->scores_i8(at->n, q8, codes->k8, codes->k_bias, codes->k_scale, block->shape->Dp, block->s, maximum,
                       prefetch);
}

static const float log2_e[LANES] = {1.44269504f, 1.44269504f, 1.44269504f, 1.44269504f, 1.44269504f, 1.44269504f,
                                    1.44269504f, 1.44269504f, 1.44269504f, 1.44269504f, 1.44269504f, 1.44269504f,
                                    1.44269504f, 1.44269504f, 1.44269504f, 1.44269504f};

/* What the call puts between a register's scores and its softmax, and the maxima over the keys that are seen. From here
 * on a score times walk->q_scale is in log2 units, whichever way it went: on tiles that a mask leaves alone the scale
 * of the query is still in there. The bound of a score's error holds either way: bias is added as it is, and tanh draws
 * scores together. */
static void settle(apa_cpu_block *block, apa_cpu_adaptive *adaptive, int r, int64_t tile, float *s, int n,
                   const apa_cpu_span *span, float *maximum)
{
    apa_cpu_walk *walk = &adaptive->walk[r];
    const bool bends = apa_cpu_bends(block, r, tile);
    if (adaptive->few > 0)
        return;
    if (block->bend.changes)
        memcpy(walk->q_scale, bends ? log2_e : adaptive->plain_scale[r], sizeof walk->q_scale);
    if (bends)
        apa_cpu_bend_scores(block, r, tile, s, n, adaptive->factor[r]);
    if (bends || span != NULL)
        block->kernels->max_i8(s, n, span, maximum);
}

/* Codes of P. A lane whose keys a mask hides has scores and a maximum of -inf, the difference of which is no number. */
static void probabilities(const apa_cpu_block *block, const apa_cpu_adaptive *adaptive, int r, const float *s, int n,
                          const apa_cpu_span *span, const float *maximum, uint8_t *p8, int32_t *sum)
{
    const apa_cpu_walk *walk = &adaptive->walk[r];
    float from[LANES];
    if (adaptive->few > 0) {
        block->kernels->softmax_few_i8(adaptive->few, s, span, maximum, walk->q_scale, p8, sum);
        return;
    }
    memcpy(from, maximum, sizeof from);
    for (int i = 0; i < LANES && block->bend.masked; i++)
        from[i] = from[i] == -INFINITY ? 0.0f : from[i];
    block->kernels->softmax_i8(s, n, span, from, walk->q_scale, p8, sum);
}

/* o += P·V for up to a panel of registers with their own P and scales. */
static void add_values(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes, int n,
                       const int *reg, const uint8_t *const *p8, const float (*p_scale)[LANES])
{
    float *o[APA_CPU_PANEL_I8];
    if (adaptive->few > 0 && n > 0) {
        block->kernels->pv_few_i8(adaptive->few, p8[0], codes->v8, codes->v_scale, p_scale[0], block->shape->Dvp,
                                  block->reg[0].o);
        return;
    }
    const float *scale[APA_CPU_PANEL_I8];
    for (int i = 0; i < n; i++) {
        o[i] = block->reg[reg[i]].o;
        scale[i] = p_scale[i];
    }
    if (n > 0)
        block->kernels->pv_i8(n, p8, codes->v8, codes->v_scale, scale, block->shape->Dvp, o);
}

static void add_cold_mass(apa_cpu_walk *walk, const int32_t *sum, const float *p_scale)
{
    for (int i = 0; i < LANES; i++)
        walk->cold[i] += (float)sum[i] * p_scale[i];
}

static void remember(const apa_cpu_block *block, apa_cpu_adaptive *adaptive, int r, int64_t tile, const float *top,
                     const int32_t *sum, const uint8_t *p8)
{
    apa_cpu_candidate *candidate = &adaptive->candidate[r][adaptive->candidates[r]++];
    memcpy(candidate->top, top, sizeof candidate->top);
    memcpy(candidate->sum, sum, sizeof candidate->sum);
    candidate->tile = tile;
    candidate->slot = -1;
    if (block->call->recipe.second_look != APA_TOGGLE_ON || adaptive->slots_used == block->shape->pool_slots)
        return;
    candidate->slot = adaptive->slots_used++;
    memcpy(adaptive->pool + candidate->slot * P_BYTES, p8, P_BYTES);
}

/* Scores, verdicts and cold P·V of one panel on one tile. */
static void walk_panel(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes, const panel *at,
                       int64_t tile, const apa_cpu_prefetch *prefetch)
{
    const apa_cpu_kernels *kernels = block->kernels;
    const apa_recipe *recipe = &block->call->recipe;
    const bool judging = recipe->force != APA_FORCE_LOW && recipe->eps < 1.0;
    int cold = 0, cold_reg[APA_CPU_PANEL_I8];
    const uint8_t *cold_p[APA_CPU_PANEL_I8];
    float p_scale[APA_CPU_PANEL_I8][LANES];
    float maxima[APA_CPU_PANEL_I8 * LANES];
    scores(block, adaptive, codes, at, maxima, prefetch);
    for (int i = 0; i < at->n; i++) {
        const int r = at->reg[i];
        apa_cpu_walk *walk = &adaptive->walk[r];
        const apa_cpu_span *span = at->part[i] ? &at->span[i] : NULL;
        float *s = block->s + i * LANES, *maximum = maxima + i * LANES, top[LANES], alpha[LANES];
        int32_t sum[LANES];
        settle(block, adaptive, r, tile, s, at->n, span, maximum);
        if (kernels->look(walk, maximum, codes->blob->k_scale_max, codes->blob->v_max, top)) {
            adaptive->skipped[tile] |= (uint16_t)(1u << r);
            continue;
        }
        uint8_t *p8 = adaptive->p8 + i * P_BYTES;
        probabilities(block, adaptive, r, s, at->n, span, maximum, p8, sum);
        const int judged = kernels->judge(walk, top, sum, (float)recipe->eps, alpha, p_scale[cold]);
        if ((judged & APA_CPU_JUDGED_MOVED) != 0 && adaptive->few > 0)
            apa_cpu_few_scale(block, adaptive, alpha);
        else if ((judged & APA_CPU_JUDGED_MOVED) != 0)
            kernels->scale_lanes(block->reg[r].o, block->shape->Dvp, alpha);
        if (judging && (judged & APA_CPU_JUDGED_CANDIDATE) != 0) {
            remember(block, adaptive, r, tile, top, sum, p8);
            continue;
        }
        add_cold_mass(walk, sum, p_scale[cold]);
        cold_reg[cold] = r;
        cold_p[cold++] = p8;
    }
    add_values(block, adaptive, codes, cold, cold_reg, cold_p, (const float(*)[LANES])p_scale);
}

/* The codes of a tile, in as many shares as the tile before has panels. */
static apa_cpu_prefetch next_codes(const apa_cpu_block *block, const apa_cpu_tile *next)
{
    const int64_t Dp = block->shape->Dp, Dvp = block->shape->Dvp;
    const int64_t panels = (block->n + APA_CPU_PANEL_I8 - 1) / APA_CPU_PANEL_I8;
    return (apa_cpu_prefetch){.row = {(const char *)next->k8, (const char *)next->v8},
                              .stride = {Dp, Dvp},
                              .bytes = {Dp, Dvp},
                              .rows = TILE / panels};
}

static void walk_tile(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared, int64_t tile,
                      int64_t next)
{
    const apa_cpu_tile codes = apa_cpu_prepared_tile(prepared, block->shape, block->head, tile);
    const apa_cpu_tile ahead = apa_cpu_prepared_tile(prepared, block->shape, block->head, next);
    apa_cpu_prefetch prefetch = next_codes(block, &ahead);
    panel at; /* not cleared: half a kilobyte for every tile */
    at.n = 0;
    apa_cpu_adaptive_move(block, adaptive, codes.blob->segment);
    for (int r = 0; r < block->n; r++) {
        apa_cpu_span span;
        const apa_cpu_view view = apa_cpu_block_view(block, r, tile, &span);
        if (view != APA_CPU_VIEW_NONE) {
            if (codes.blob->poisoned || (adaptive->all_hot >> r & 1) != 0 || apa_cpu_bend_is_wild(block, r, tile)) {
                adaptive->hot[tile] |= (uint16_t)(1u << r);
                adaptive->candidate_pairs += popcount16(apa_cpu_block_seeing(block, r, tile));
            } else {
                at.part[at.n] = view == APA_CPU_VIEW_PART;
                if (view == APA_CPU_VIEW_PART)
                    at.span[at.n] = span;
                at.reg[at.n++] = r;
            }
        }
        if (at.n == APA_CPU_PANEL_I8 || (r == block->n - 1 && at.n > 0)) {
            walk_panel(block, adaptive, &codes, &at, tile, &prefetch);
            for (int set = 0; set < 2; set++)
                prefetch.row[set] += prefetch.rows * prefetch.stride[set];
            at.n = 0;
        }
    }
}

/* P of one register and tile once more, for a demoted candidate without stored P or a skipped tile that counts after
 * all. */
static void make_p_again(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes, int r,
                         int64_t tile, uint8_t *p8, float *maximum, int32_t *sum)
{
    panel at = {.n = 1, .reg = {r}};
    at.part[0] = apa_cpu_block_view(block, r, tile, &at.span[0]) == APA_CPU_VIEW_PART;
    const apa_cpu_span *span = at.part[0] ? &at.span[0] : NULL;
    scores(block, adaptive, codes, &at, maximum, NULL);
    settle(block, adaptive, r, tile, block->s, 1, span, maximum);
    probabilities(block, adaptive, r, block->s, 1, span, maximum, p8, sum);
}

/* The second look. Candidates lie in walk order, so registers that demote the same tile meet and share its values. */
static void look_again(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared,
                       int64_t first, int64_t end)
{
    const apa_recipe *recipe = &block->call->recipe;
    int64_t next[APA_CPU_BLOCK_REGISTERS] = {0};
    for (int64_t i = 0; i < end - first; i++) {
        const int64_t tile = tile_at(recipe->order, first, end, i);
        int demoted = 0, reg[APA_CPU_PANEL_I8];
        const uint8_t *p8[APA_CPU_PANEL_I8];
        float p_scale[APA_CPU_PANEL_I8][LANES];
        apa_cpu_tile codes = {0};
        for (int r = 0; r < block->n; r++) {
            if (next[r] < adaptive->candidates[r] && adaptive->candidate[r][next[r]].tile == tile) {
                const apa_cpu_candidate *candidate = &adaptive->candidate[r][next[r]++];
                if (codes.blob == NULL) {
                    codes = apa_cpu_prepared_tile(prepared, block->shape, block->head, tile);
                    apa_cpu_adaptive_move(block, adaptive, codes.blob->segment);
                }
                adaptive->candidate_pairs += popcount16(apa_cpu_block_seeing(block, r, tile));
                if (recipe->second_look != APA_TOGGLE_ON ||
                    block->kernels->judge_again(&adaptive->walk[r], candidate->top, candidate->sum, (float)recipe->eps,
                                                p_scale[demoted])) {
                    adaptive->hot[tile] |= (uint16_t)(1u << r);
                } else {
                    uint8_t *made = adaptive->p8 + demoted * P_BYTES;
                    float maximum[LANES];
                    int32_t sum[LANES];
                    if (candidate->slot < 0)
                        make_p_again(block, adaptive, &codes, r, tile, made, maximum, sum);
                    add_cold_mass(&adaptive->walk[r], candidate->sum, p_scale[demoted]);
                    p8[demoted] = candidate->slot < 0 ? made : adaptive->pool + candidate->slot * P_BYTES;
                    reg[demoted++] = r;
                }
            }
            if (demoted == APA_CPU_PANEL_I8 || (r == block->n - 1 && demoted > 0)) {
                add_values(block, adaptive, &codes, demoted, reg, p8, (const float(*)[LANES])p_scale);
                demoted = 0;
            }
        }
    }
}

/* A sink is mass that the second look counts; frames and cold sums know nothing of it. */
static void add_sinks(const apa_cpu_block *block, apa_cpu_adaptive *adaptive)
{
    for (int r = 0; r < block->n && block->call->sinks.dtype != APA_DTYPE_NONE; r++) {
        const apa_cpu_register *reg = &block->reg[r];
        apa_cpu_walk *walk = &adaptive->walk[r];
        for (int i = 0; i < LANES; i++) {
            if ((reg->real >> i & 1) == 0 || walk->frame[i] == -INFINITY)
                continue;
            const double sink = (double)apa_call_per_head(&block->call->sinks, block->b, reg->row[i].head);
            walk->lambda[i] += (float)exp2(sink * LOG2_E - (double)reg->shift[i] - (double)walk->frame[i]);
        }
    }
}

static void exact_pass(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, int64_t first, int64_t end)
{
    for (int64_t tile = first; tile < end; tile++) {
        if (adaptive->hot[tile] == 0)
            continue;
        int reg[APA_CPU_BLOCK_REGISTERS], n = 0;
        for (int r = 0; r < block->n; r++)
            if ((adaptive->hot[tile] >> r & 1) != 0)
                reg[n++] = r;
        int64_t next = tile + 1;
        while (next < end && adaptive->hot[next] == 0)
            next++;
        apa_cpu_exact_load(block, tile);
        apa_cpu_exact_tile(block, tile, reg, n, next < end ? next : -1);
    }
}

/* How far a walk's log2 value lies over the lane's frame now; 2^x of it stays a finite number. */
static double over_frame(const apa_cpu_block *block, const apa_cpu_register *reg, int lane, double log2_value)
{
    const double over = log2_value + (double)reg->shift[lane] - (double)reg->state.frame[lane] * (double)block->c;
    return over > LARGEST_CORRECTION ? LARGEST_CORRECTION : over;
}

/* Was everything that the register left out too small for its sums? ℓ was checked tile by tile; o is judged here, when
 * its size is known. */
static bool skipping_held(const apa_cpu_block *block, const apa_cpu_register *reg, const apa_cpu_walk *walk)
{
    for (int i = 0; i < LANES; i++) {
        if ((reg->real >> i & 1) == 0 || walk->skipped_v[i] == 0.0f)
            continue;
        float most = 0.0f;
        for (int64_t c = 0; c < block->call->Dv; c++)
            most = fabsf(reg->o[c * LANES + i]) > most ? fabsf(reg->o[c * LANES + i]) : most;
        /* The exact pass may have moved the frame since the walk. */
        const double moved = exp2(over_frame(block, reg, i, walk->frame[i]));
        if (!(walk->skipped_v[i] * moved <= OUTPUT_SKIP_LIMIT * most))
            return false;
    }
    return true;
}

/* Computes a register's skipped tiles after all. */
static void bring_back(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared, int r,
                       int64_t first, int64_t end)
{
    apa_cpu_register *reg = &block->reg[r];
    const float *q_scale = adaptive->walk[r].q_scale;
    for (int64_t tile = first; tile < end; tile++) {
        if ((adaptive->skipped[tile] >> r & 1) == 0)
            continue;
        adaptive->skipped[tile] &= (uint16_t) ~(1u << r);
        float maximum[LANES], p_scale[1][LANES];
        int32_t sum[LANES];
        const uint8_t *p8[1] = {adaptive->p8};
        const apa_cpu_tile codes = apa_cpu_prepared_tile(prepared, block->shape, block->head, tile);
        apa_cpu_adaptive_move(block, adaptive, codes.blob->segment);
        make_p_again(block, adaptive, &codes, r, tile, adaptive->p8, maximum, sum);
        for (int i = 0; i < LANES; i++) {
            const double over = over_frame(block, reg, i, (double)maximum[i] * (double)q_scale[i]);
            p_scale[0][i] = maximum[i] == -INFINITY ? 0.0f : (float)(exp2(over) / 255.0);
            reg->state.sum[i] += (float)sum[i] * p_scale[0][i];
        }
        add_values(block, adaptive, &codes, 1, &r, p8, (const float(*)[LANES])p_scale);
    }
}

static void count(const apa_cpu_block *block, apa_cpu_adaptive *adaptive, int64_t first, int64_t end)
{
    for (int64_t tile = first; tile < end; tile++)
        for (int r = 0; r < block->n; r++) {
            const int64_t seeing = popcount16(apa_cpu_block_seeing(block, r, tile));
            adaptive->visible += seeing;
            if ((adaptive->hot[tile] >> r & 1) != 0)
                adaptive->hot_pairs += seeing;
            if ((adaptive->skipped[tile] >> r & 1) != 0)
                adaptive->skipped_pairs += seeing;
        }
}

/* The cold state goes on as the block's state, its frame in units of the raw scores, which it leaves by a rounding:
 * sums and o are scaled by what that changed. A lane with no cold mass is empty: its frame came from estimates of hot
 * tiles, and where logits are large those can lie far above the exact scores. */
static void take_cold_state(apa_cpu_block *block, apa_cpu_register *reg, const apa_cpu_walk *walk)
{
    float factor[LANES];
    for (int i = 0; i < LANES; i++) {
        const double log2_frame = (double)walk->frame[i] + (double)reg->shift[i], c = (double)block->c;
        factor[i] = 1.0f;
        reg->state.sum[i] = walk->cold[i];
        reg->state.frame[i] = -INFINITY;
        if (!(walk->cold[i] > 0.0f))
            continue;
        reg->state.frame[i] = c > 0.0 ? (float)(log2_frame / c) : 0.0f;
        const double left = log2_frame - (double)reg->state.frame[i] * c;
        /* Beyond this the scores themselves (10^8 and more) are rounded more coarsely than any weight could show. */
        if (fabs(left) < LARGEST_CORRECTION)
            factor[i] = (float)exp2(left);
        reg->state.sum[i] *= factor[i];
    }
    block->kernels->scale_lanes(reg->o, block->shape->Dvp, factor);
}

/* All visible tiles in INT8, from empty states. */
static void walk_all(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared, int64_t first,
                     int64_t end, bool with_floor)
{
    const apa_order order = block->call->recipe.order;
    memset(adaptive->hot, 0, sizeof *adaptive->hot * (size_t)block->shape->tiles);
    memset(adaptive->skipped, 0, sizeof *adaptive->skipped * (size_t)block->shape->tiles);
    memset(adaptive->candidates, 0, sizeof adaptive->candidates);
    adaptive->visible = adaptive->hot_pairs = adaptive->skipped_pairs = adaptive->candidate_pairs = 0;
    adaptive->slots_used = 0;
    apa_cpu_block_clear(block);
    apa_cpu_bend_scan(block, first, end);
    apa_cpu_adaptive_rows(block, adaptive, prepared);
    if (with_floor)
        apa_cpu_floor_set(block, adaptive, prepared);
    apa_cpu_few_begin(block, adaptive);
    for (int64_t i = 0; i < end - first; i++) {
        const int64_t tile = tile_at(order, first, end, i);
        const int64_t next = i + 1 < end - first ? tile_at(order, first, end, i + 1) : tile;
        walk_tile(block, adaptive, prepared, tile, next);
    }
}

void apa_cpu_adaptive_run(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared)
{
    int64_t first, end;
    apa_cpu_block_tiles(block, &first, &end);
    walk_all(block, adaptive, prepared, first, end, prepared->floor_groups > 0);
    if (prepared->floor_groups > 0 && !apa_cpu_floor_held(block, adaptive))
        walk_all(block, adaptive, prepared, first, end, false);
    add_sinks(block, adaptive);
    look_again(block, adaptive, prepared, first, end);
    apa_cpu_few_end(block, adaptive);
    for (int r = 0; r < block->n; r++)
        take_cold_state(block, &block->reg[r], &adaptive->walk[r]);
    exact_pass(block, adaptive, first, end);
    for (int r = 0; r < block->n; r++)
        if (!skipping_held(block, &block->reg[r], &adaptive->walk[r]))
            bring_back(block, adaptive, prepared, r, first, end);
    count(block, adaptive, first, end);
}
