/* The rows' part of the adaptive method: queries into codes, and which registers need no verdict. */
#include "cpu/adaptive.h"
#include "recipe/defaults.h"

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

/* q·k̄ of all lanes in log2 units; four sums each, or a lane's would be one chain of D additions. Two lanes at a time:
 * their sums stay in registers. */
static void centre_shifts(const apa_cpu_block *block, const apa_cpu_register *reg, const float *mean, float *shift)
{
    double at[LARGEST_DIM] = {0.0};
    const double units = shift_units(block);
    for (int64_t d = 0; d < block->call->D; d++)
        at[d] = (double)mean[d];
    for (int lane = 0; lane < LANES; lane += 2) {
        double dot[4][2] = {{0.0}};
        for (int64_t d = 0; d < block->shape->Dp; d += 4)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 2; i++)
                    dot[j][i] += (double)reg->q[(d + j) * LANES + lane + i] * at[d + j];
        for (int i = 0; i < 2; i++)
            shift[lane + i] = (float)(((dot[0][i] + dot[1][i]) + (dot[2][i] + dot[3][i])) * units);
    }
}

/* A register's real rows, one after the other, as a tensor's rows: the tensor's own where Q is in the lanes as it is.
 */
static int query_rows(const apa_cpu_block *block, const apa_cpu_register *reg, float *copy, const void **rows,
                      apa_dtype *dtype)
{
    const apa_call *call = block->call;
    const int64_t D = call->D, size = (int64_t)apa_dtype_bytes(call->q.dtype);
    const bool own = !block->bend.changes && call->scale >= 0.0;
    int n = 0;
    *dtype = own ? call->q.dtype : APA_DTYPE_F32;
    for (int i = 0; i < LANES; i++) {
        const apa_cpu_row *row = &reg->row[i];
        if ((reg->real >> i & 1) == 0)
            continue;
        rows[n] =
            own ? (const char *)call->q.data + size * (block->b * call->q.stride[0] + row->head * call->q.stride[1] +
                                                       row->position * call->q.stride[2])
                : (const char *)(copy + n * D);
        for (int64_t d = 0; d < D && !own; d++)
            copy[n * D + d] = reg->q[d * LANES + i];
        n++;
    }
    return n;
}

/* What a lane's codes and their scale say of it. */
static void set_lane(const apa_cpu_block *block, apa_cpu_adaptive *adaptive, int r, int lane, const int8_t *code,
                     float scale)
{
    const int64_t D = block->call->D, Dp = block->shape->Dp;
    apa_cpu_walk *walk = &adaptive->walk[r];
    int32_t squares = 0; /* at most 1024·127² */
    for (int64_t d = 0; d < Dp; d++)
        squares += (int32_t)code[d] * code[d];
    for (int64_t d = 0; d < Dp; d += 4) {
        uint32_t word;
        memcpy(&word, code + d, sizeof word);
        word ^= 0x80808080u; /* code + 128 of each byte */
        memcpy(adaptive->q8[r] + d * LANES + lane * 4, &word, sizeof word);
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
}

/* Rotates and codes the queries of a register, which are rows to quantise like keys without a mean. Returns false when
 * rotating one overflowed. */
static bool quantise_queries(const apa_cpu_block *block, const apa_cpu_register *reg, apa_cpu_adaptive *adaptive, int r)
{
    static const float nothing[LARGEST_DIM];
    /* Exact tiles have not been loaded yet: their place holds a tile of codes, and rows behind it. */
    int8_t *code = (int8_t *)block->k;
    float *copy = block->k + LANES * block->shape->Dp, scale[TILE];
    int32_t bias[TILE];
    const void *rows[LANES];
    apa_dtype dtype;
    const int n = query_rows(block, reg, copy, rows, &dtype);
    if (!block->kernels->quantise_k(dtype, rows, n, block->call->D, NULL, nothing, block->shape->hadamard_block, code,
                                    bias, scale))
        return false;
    for (int i = 0, lane = 0; i < n; i++, lane++) {
        while ((reg->real >> lane & 1) == 0)
            lane++;
        set_lane(block, adaptive, r, lane, code + i * block->shape->Dp, scale[i]);
    }
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
    for (int i = 0; i < LANES; i++)
        walk->frame[i] = -INFINITY;
    if (reg->finite) {
        centre_shifts(block, reg, mean, reg->shift);
        reg->finite = quantise_queries(block, reg, adaptive, r);
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
            block->kernels->scores_f32(1, q, mean + row * block->shape->Dp, block->shape->Dp, shift + row * LANES, NULL,
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

/* The most tiles that a real row of the register sees. */
static int64_t most_tiles(const apa_cpu_register *reg)
{
    int64_t most = 0;
    for (int i = 0; i < LANES; i++) {
        const apa_cpu_row *row = &reg->row[i];
        if ((reg->real >> i & 1) == 0 || row->first >= row->end)
            continue;
        const int64_t seen = (row->end - 1) / TILE - row->first / TILE + 1;
        most = seen > most ? seen : most;
    }
    return most;
}

/* Registers that need no verdict: forced, a query with a NaN or Inf or beyond what INT8 can judge, or too few tiles in
 * sight (every row of the group; `tiles`: that a row sees at most). */
static bool is_all_hot(const apa_cpu_block *block, const apa_cpu_register *reg, int64_t tiles, const float *q_reach,
                       float k_scale_top)
{
    const apa_recipe *recipe = &block->call->recipe;
    if (recipe->force == APA_FORCE_HIGH || !reg->finite || (block->bend.changes && reg->drowned))
        return true;
    if (recipe->force == APA_FORCE_NONE &&
        (recipe->eps < 0.0 || (recipe->eps < 1.0 && beyond_int8(reg, q_reach, k_scale_top))))
        return true;
    if (recipe->early_tiles <= 0 || recipe->force == APA_FORCE_LOW || recipe->eps >= 1.0)
        return false;
    return tiles <= recipe->early_tiles;
}

void apa_cpu_adaptive_rows(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared)
{
    const float *mean = apa_cpu_prepared_mean(prepared, block->shape, block->head, 0);
    const float k_scale_top = prepared->k_scale_top[block->head];
    adaptive->all_hot = 0;
    for (int r = 0; r < block->n; r++) {
        load_register(block, adaptive, r, mean);
        const int64_t tiles = most_tiles(&block->reg[r]);
        adaptive->eps[r] = (float)apa_recipe_group_eps(&block->call->recipe, block->shape->tiles, tiles);
        if (is_all_hot(block, &block->reg[r], tiles, adaptive->q_reach[r], k_scale_top))
            adaptive->all_hot |= (uint16_t)(1u << r);
    }
    apa_cpu_adaptive_shifts(block, adaptive, prepared);
}
