/* The rows' part of the adaptive method: queries into codes, and which registers need no verdict. */
#include "cpu/adaptive.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define LARGEST_DIM 1024
#define LOG2_E 1.4426950408889634074

/* Log2 units of a score as it is formed from Q in the lanes; of a change of it, where there is a cap: tanh is flat. */
static double log2_units(const apa_cpu_block *block)
{
    return block->bend.changes && block->bend.cap > 0.0f ? (double)block->bend.cap * LOG2_E : (double)block->c;
}

/* What q·k̄ is multiplied by for log2 units; scores that carry the softmax scale are natural. */
static double shift_units(const apa_cpu_block *block)
{
    return block->bend.changes ? LOG2_E : fabs(block->call->scale) * LOG2_E;
}

/* One query: centre shift, rotation, codes. Returns false when rotating it overflowed. */
static bool quantise_query(const apa_cpu_block *block, const apa_cpu_register *reg, int lane, const float *mean,
                           apa_cpu_adaptive *adaptive, int r, float *shift)
{
    const int64_t D = block->call->D;
    apa_cpu_walk *walk = &adaptive->walk[r];
    float row[LARGEST_DIM];
    int8_t code[LARGEST_DIM];
    double dot[4] = {0.0}; /* four sums: one is a chain of D additions, and longer than all the rest of this */
    for (int64_t d = 0; d < D; d++) {
        row[d] = reg->q[d * LANES + lane];
        dot[d % 4] += (double)row[d] * mean[d];
    }
    *shift = (float)(((dot[0] + dot[1]) + (dot[2] + dot[3])) * shift_units(block));
    if (block->shape->hadamard_block > 1)
        block->kernels->hadamard(row, D, block->shape->hadamard_block);
    if (!block->kernels->widen(APA_DTYPE_F32, row, D, row))
        return false;
    const float scale = block->kernels->quantise_row(row, D, code);
    int64_t squares = 0;
    for (int64_t d = 0; d < D; d++) {
        squares += (int64_t)code[d] * code[d];
        adaptive->q8[r][d / 4 * 4 * LANES + lane * 4 + d % 4] = (uint8_t)(code[d] + 128);
    }
    const float units = (float)log2_units(block);
    walk->q_scale[lane] = scale * units;
    adaptive->factor[r][lane] = scale;
    adaptive->q_reach[r][lane] = (float)(walk->q_scale[lane] * (127.0 * sqrt((double)D) + sqrt((double)squares)));
    /* |q·k - q̂·k̂| <= |δq||k| + |q̂||δk|, with |δ| <= (step/2)·sqrt(D) and |k| <= 127.5·step·sqrt(D); in units of the key
     * scale. 1.01 covers the roundings of the scales themselves. */
    const double root = sqrt((double)D);
    const double error = 0.5 * scale * root * 127.5 * root + scale * sqrt((double)squares) * 0.5 * root;
    walk->error[lane] = block->call->recipe.skip == APA_TOGGLE_ON ? (float)(1.01 * error * units) : INFINITY;
    return true;
}

static void load_register(apa_cpu_block *block, apa_cpu_adaptive *adaptive, int r, const float *mean)
{
    apa_cpu_register *reg = &block->reg[r];
    apa_cpu_walk *walk = &adaptive->walk[r];
    memset(walk, 0, sizeof *walk);
    memset(adaptive->q_reach[r], 0, sizeof adaptive->q_reach[r]);
    memset(adaptive->factor[r], 0, sizeof adaptive->factor[r]);
    memset(adaptive->q8[r], 128, (size_t)(block->shape->Dp * LANES));
    walk->real = reg->real;
    for (int i = 0; i < LANES; i++) {
        walk->frame[i] = -INFINITY;
        if ((reg->real >> i & 1) != 0 && reg->finite)
            reg->finite = quantise_query(block, reg, i, mean, adaptive, r, &reg->shift[i]);
    }
    memcpy(adaptive->plain_scale[r], walk->q_scale, sizeof walk->q_scale);
}

/* One exact score tile gives 64 of them: means are rows like keys. */
void apa_cpu_adaptive_shifts(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared)
{
    const float *mean = apa_cpu_prepared_mean(prepared, block->shape, block->head, 0);
    const float units = (float)shift_units(block);
    adaptive->segment = 0;
    for (int r = 0; r < block->n && block->shape->mean_rows > 0; r++) {
        const float *q[1] = {block->reg[r].q};
        float *shift = adaptive->shifts[r];
        for (int64_t row = 0; row < prepared->kept->segments; row += TILE)
            block->kernels->scores_f32(1, q, mean + row * block->shape->Dp, block->shape->Dp, shift + row * LANES,
                                       NULL);
        for (int64_t i = 0; i < prepared->kept->segments * LANES; i++)
            shift[i] *= units;
        memcpy(block->reg[r].shift, shift, sizeof block->reg[r].shift);
    }
}

void apa_cpu_adaptive_move(apa_cpu_block *block, apa_cpu_adaptive *adaptive, int32_t segment)
{
    if (segment == adaptive->segment)
        return;
    adaptive->segment = segment;
    for (int r = 0; r < block->n; r++) {
        apa_cpu_register *reg = &block->reg[r];
        apa_cpu_walk *walk = &adaptive->walk[r];
        const float *to = adaptive->shifts[r] + (int64_t)segment * LANES;
        for (int i = 0; i < LANES; i++) {
            walk->frame[i] = (float)((double)walk->frame[i] + ((double)reg->shift[i] - (double)to[i]));
            reg->shift[i] = to[i];
        }
    }
}

/* Where INT8 scores can be off by this many log2 units (logits in the thousands), estimates say nothing about mass. */
#define SCORE_ERROR_MAX 32.0

/* The error is about half a step of one factor times the norm of the other, both ways; q_reach holds the query's part,
 * q_scale·(127·sqrt(D) + |q codes|), so that one product per row is left. */
static bool beyond_int8(const apa_cpu_register *reg, const float *q_reach, float k_scale_max)
{
    for (int i = 0; i < LANES; i++)
        if ((reg->real >> i & 1) != 0 && reg->row[i].first < reg->row[i].end &&
            (double)q_reach[i] * k_scale_max > SCORE_ERROR_MAX)
            return true;
    return false;
}

/* Registers that need no verdict: forced, a query with a NaN or Inf or beyond what INT8 can judge, or too few tiles in
 * sight (every row of the group). */
static bool is_all_hot(const apa_cpu_block *block, const apa_cpu_register *reg, const float *q_reach, float k_scale_top)
{
    const apa_recipe *recipe = &block->call->recipe;
    if (recipe->force == APA_FORCE_HIGH || !reg->finite || (block->bend.changes && reg->drowned))
        return true;
    if (recipe->force == APA_FORCE_NONE &&
        (recipe->eps < 0.0 || (recipe->eps < 1.0 && beyond_int8(reg, q_reach, k_scale_top))))
        return true;
    if (recipe->early_tiles <= 0 || recipe->force == APA_FORCE_LOW || recipe->eps >= 1.0)
        return false;
    for (int i = 0; i < LANES; i++) {
        const apa_cpu_row *row = &reg->row[i];
        if ((reg->real >> i & 1) != 0 && row->first < row->end &&
            (row->end - 1) / TILE - row->first / TILE + 1 > recipe->early_tiles)
            return false;
    }
    return true;
}

void apa_cpu_adaptive_rows(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared)
{
    const float *mean = apa_cpu_prepared_mean(prepared, block->shape, block->head, 0);
    const float k_scale_top = prepared->k_scale_top[block->head];
    adaptive->all_hot = 0;
    for (int r = 0; r < block->n; r++) {
        load_register(block, adaptive, r, mean);
        if (is_all_hot(block, &block->reg[r], adaptive->q_reach[r], k_scale_top))
            adaptive->all_hot |= (uint16_t)(1u << r);
    }
    apa_cpu_adaptive_shifts(block, adaptive, prepared);
}
