/* The rows' part of the adaptive method: queries into codes, and which registers need no verdict. */
#include "cpu/adaptive.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define LARGEST_DIM 1024
#define LOG2_E 1.4426950408889634074

/* One query: centre shift, rotation, codes. Returns false when rotating it overflowed. */
static bool quantise_query(const apa_cpu_block *block, const apa_cpu_register *reg, int lane, const float *mean,
                           apa_cpu_adaptive *adaptive, int r, float *shift)
{
    const int64_t D = block->call->D;
    apa_cpu_walk *walk = &adaptive->walk[r];
    float row[LARGEST_DIM];
    int8_t code[LARGEST_DIM];
    double dot = 0.0;
    for (int64_t d = 0; d < D; d++) {
        row[d] = reg->q[d * LANES + lane];
        dot += (double)row[d] * mean[d];
    }
    *shift = (float)(dot * fabs(block->call->scale) * LOG2_E);
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
    walk->q_scale[lane] = scale * block->c;
    adaptive->q_reach[r][lane] = (float)(walk->q_scale[lane] * (127.0 * sqrt((double)D) + sqrt((double)squares)));
    /* |q·k - q̂·k̂| <= |δq||k| + |q̂||δk|, with |δ| <= (step/2)·sqrt(D) and |k| <= 127.5·step·sqrt(D); in units of the key
     * scale. 1.01 covers the roundings of the scales themselves. */
    const double root = sqrt((double)D);
    const double error = 0.5 * scale * root * 127.5 * root + scale * sqrt((double)squares) * 0.5 * root;
    walk->error[lane] = block->call->recipe.skip == APA_TOGGLE_ON ? (float)(1.01 * error * block->c) : INFINITY;
    return true;
}

static void load_register(apa_cpu_block *block, apa_cpu_adaptive *adaptive, int r, const float *mean)
{
    apa_cpu_register *reg = &block->reg[r];
    apa_cpu_walk *walk = &adaptive->walk[r];
    memset(walk, 0, sizeof *walk);
    memset(adaptive->q_reach[r], 0, sizeof adaptive->q_reach[r]);
    memset(adaptive->q8[r], 128, (size_t)(block->shape->Dp * LANES));
    walk->real = reg->real;
    for (int i = 0; i < LANES; i++) {
        walk->frame[i] = -INFINITY;
        if ((reg->real >> i & 1) != 0 && reg->finite)
            reg->finite = quantise_query(block, reg, i, mean, adaptive, r, &reg->shift[i]);
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
static bool is_all_hot(const apa_cpu_block *block, const apa_cpu_register *reg, const float *q_reach, float k_scale_max)
{
    const apa_recipe *recipe = &block->call->recipe;
    if (recipe->force == APA_FORCE_HIGH || !reg->finite)
        return true;
    if (recipe->force == APA_FORCE_NONE &&
        (recipe->eps < 0.0 || (recipe->eps < 1.0 && beyond_int8(reg, q_reach, k_scale_max))))
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
    const int64_t head = block->b * block->call->Hkv + block->kv_head;
    const float *mean = prepared->k_mean + head * block->shape->Dp;
    float k_scale_max = 0.0f;
    for (int64_t tile = 0; tile < block->shape->tiles; tile++)
        k_scale_max = fmaxf(k_scale_max, prepared->k_scale_max[head * block->shape->tiles + tile]);
    adaptive->all_hot = 0;
    for (int r = 0; r < block->n; r++) {
        load_register(block, adaptive, r, mean);
        if (is_all_hot(block, &block->reg[r], adaptive->q_reach[r], k_scale_max))
            adaptive->all_hot |= (uint16_t)(1u << r);
    }
}
