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

#include "cpu/exact.h"
#include "cpu/floor.h"

#include <math.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define P_BYTES APA_CPU_P_BYTES
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
    uint16_t *judged = apa_cpu_take(arena, shape->tiles, sizeof *judged);
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
    adaptive->judged = judged;
    adaptive->pool = pool;
    adaptive->p8 = p8;
}

/* The second look. Candidates lie in walk order, so registers that demote the same tile meet and share its values. */
static void look_again(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared,
                       int64_t first, int64_t end)
{
    const apa_recipe *recipe = &block->call->recipe;
    int64_t next[APA_CPU_BLOCK_REGISTERS] = {0};
    for (int64_t i = 0; i < end - first; i++) {
        const int64_t tile = apa_cpu_tile_in_order(recipe->order, first, end, i);
        if (adaptive->judged[tile] == 0)
            continue;
        int demoted = 0, reg[APA_CPU_PANEL_I8];
        const uint8_t *p8[APA_CPU_PANEL_I8];
        float p_scale[APA_CPU_PANEL_I8][LANES];
        apa_cpu_tile codes = {0};
        for (int r = 0; r < block->n; r++) {
            if ((adaptive->judged[tile] >> r & 1) != 0) {
                const apa_cpu_candidate *candidate = &adaptive->candidate[r][next[r]++];
                if (codes.blob == NULL) {
                    codes = apa_cpu_prepared_tile(prepared, block->shape, block->head, tile);
                    apa_cpu_adaptive_move(block, adaptive, codes.blob->segment);
                }
                adaptive->candidate_pairs += apa_cpu_lanes_in(apa_cpu_block_seeing(block, r, tile));
                if (recipe->second_look != APA_TOGGLE_ON ||
                    block->kernels->judge_again(&adaptive->walk[r], candidate->top, candidate->sum, adaptive->eps[r],
                                                p_scale[demoted])) {
                    adaptive->hot[tile] |= (uint16_t)(1u << r);
                } else {
                    uint8_t *made = adaptive->p8 + demoted * P_BYTES;
                    float maximum[LANES];
                    int32_t sum[LANES];
                    if (candidate->slot < 0)
                        apa_cpu_adaptive_p_again(block, adaptive, &codes, r, tile, made, maximum, sum);
                    apa_cpu_walk_add_cold(&adaptive->walk[r], candidate->sum, p_scale[demoted]);
                    p8[demoted] = candidate->slot < 0 ? made : adaptive->pool + candidate->slot * P_BYTES;
                    reg[demoted++] = r;
                }
            }
            if (demoted == APA_CPU_PANEL_I8 || (r == block->n - 1 && demoted > 0)) {
                apa_cpu_panel_values(block, adaptive, &codes, demoted, reg, p8, (const float(*)[LANES])p_scale);
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
        apa_cpu_adaptive_p_again(block, adaptive, &codes, r, tile, adaptive->p8, maximum, sum);
        for (int i = 0; i < LANES; i++) {
            const double over = over_frame(block, reg, i, (double)maximum[i] * (double)q_scale[i]);
            p_scale[0][i] = maximum[i] == -INFINITY ? 0.0f : (float)(exp2(over) / 255.0);
            reg->state.sum[i] += (float)sum[i] * p_scale[0][i];
        }
        apa_cpu_panel_values(block, adaptive, &codes, 1, &r, p8, (const float(*)[LANES])p_scale);
    }
}

static void count(const apa_cpu_block *block, apa_cpu_adaptive *adaptive, int64_t first, int64_t end)
{
    for (int64_t tile = first; tile < end; tile++) {
        const bool whole = apa_cpu_tile_is_whole(adaptive, tile);
        for (int r = 0; r < block->n; r++) {
            const int64_t seeing = whole ? adaptive->rows[r] : apa_cpu_lanes_in(apa_cpu_block_seeing(block, r, tile));
            adaptive->visible += seeing;
            if ((adaptive->hot[tile] >> r & 1) != 0)
                adaptive->hot_pairs += seeing;
            if ((adaptive->skipped[tile] >> r & 1) != 0)
                adaptive->skipped_pairs += seeing;
        }
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

void apa_cpu_adaptive_run(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared)
{
    int64_t first, end;
    apa_cpu_block_tiles(block, &first, &end);
    apa_cpu_adaptive_walk(block, adaptive, prepared, first, end, prepared->floor_groups > 0);
    if (prepared->floor_groups > 0 && !apa_cpu_floor_held(block, adaptive))
        apa_cpu_adaptive_walk(block, adaptive, prepared, first, end, false);
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
