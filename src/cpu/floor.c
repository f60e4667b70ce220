/* The floor under λ. See cpu/floor.h. */
#include "cpu/floor.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
/* With fewer tiles a pass over their means costs about what it saves. */
#define FEWEST_TILES 16
/* Room for the roundings of a mean's codes, so that a floor seldom has to be taken back. */
#define TRUST 0.95f

bool apa_cpu_floor_applies(const apa_call *call)
{
    const apa_recipe *recipe = &call->recipe;
    return recipe->smooth_k == APA_TOGGLE_ON && recipe->second_look == APA_TOGGLE_ON &&
           recipe->force == APA_FORCE_NONE && recipe->eps >= 0.0 && recipe->eps < 1.0 &&
           apa_call_tiles(call) >= FEWEST_TILES && call->kept == NULL && !apa_call_changes_scores(call);
}

void apa_cpu_floor_prepare(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_kernels *kernels,
                           const apa_cpu_prepared *prepared, int64_t head, int64_t group)
{
    const int64_t Dp = shape->Dp, first = group * TILE, at = head * prepared->floor_groups + group;
    const int n = (int)(shape->tiles - first < TILE ? shape->tiles - first : TILE);
    const void *rows[TILE];
    for (int i = 0; i < n; i++) {
        /* The sums are no longer needed: their means take their place, as floats. */
        double *sum = prepared->tile_sum + (head * shape->tiles + first + i) * (Dp + 1);
        float *mean = (float *)(void *)sum;
        const apa_cpu_tile tile = apa_cpu_prepared_tile(prepared, shape, head, first + i);
        prepared->floor_whole[at * TILE + i] = sum[Dp] == TILE && tile.blob->poisoned == 0;
        for (int64_t d = 0; d < call->D; d++) {
            const float value = (float)(sum[d] / TILE);
            memcpy(&mean[d], &value, sizeof value); /* the place is still one of doubles to the compiler */
        }
        rows[i] = mean;
    }
    memset(prepared->floor_whole + at * TILE + n, 0, (size_t)(TILE - n));
    kernels->quantise_k(APA_DTYPE_F32, rows, n, call->D, NULL, prepared->k_mean + head * Dp, shape->hadamard_block,
                        prepared->floor_k8 + at * TILE * Dp, prepared->floor_bias + at * TILE,
                        prepared->floor_scale + at * TILE);
}

/* Of tiles 64·group …: those that each lane sees whole. Returns whether there are any. */
static bool whole_tiles(const apa_cpu_register *reg, int64_t group, apa_cpu_span *span)
{
    bool any = false;
    for (int i = 0; i < LANES; i++) {
        const int64_t lo = (reg->row[i].first + TILE - 1) / TILE - group * TILE,
                      hi = reg->row[i].end / TILE - group * TILE;
        span->lo[i] = (int32_t)(lo < 0 ? 0 : lo > TILE ? TILE : lo);
        span->hi[i] = (int32_t)(hi < 0 ? 0 : hi > TILE ? TILE : hi);
        any = any || span->lo[i] < span->hi[i];
    }
    return any;
}

/* Raw scores to log2 units; what is no whole tile weighs nothing. */
static void to_log2(float *s, int n, const float *q_scale, const uint8_t *whole)
{
    float scale[LANES]; /* no part of s, as far as the compiler can tell */
    memcpy(scale, q_scale, sizeof scale);
    for (int key = 0; key < TILE; key++) {
        float *at = s + key * n * LANES;
        for (int i = 0; i < LANES; i++)
            at[i] *= scale[i];
        for (int i = 0; i < LANES && whole[key] == 0; i++)
            at[i] = -INFINITY;
    }
}

/* Adds 64 tiles' bounds to the states of a panel of registers. */
static void add_bounds(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared,
                       int first, int n, int64_t at, int64_t group, apa_cpu_state *state)
{
    const int64_t Dp = block->shape->Dp;
    const uint8_t *q8[APA_CPU_PANEL_I8];
    float maximum[APA_CPU_PANEL_I8 * LANES], alpha[LANES];
    for (int i = 0; i < n; i++)
        q8[i] = adaptive->q8[first + i];
    block->kernels->scores_i8(n, q8, prepared->floor_k8 + at * TILE * Dp, prepared->floor_bias + at * TILE,
                              prepared->floor_scale + at * TILE, Dp, block->s, maximum, NULL);
    for (int i = 0; i < n; i++) {
        apa_cpu_span span;
        if (!whole_tiles(&block->reg[first + i], group, &span))
            continue;
        to_log2(block->s + i * LANES, n, adaptive->walk[first + i].q_scale, prepared->floor_whole + at * TILE);
        block->kernels->softmax_f32(block->s + i * LANES, n, 1.0f, &span, NULL, &state[i], alpha);
    }
}

void apa_cpu_floor_set(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared)
{
    const int64_t groups = prepared->floor_groups, head = block->head;
    for (int first = 0; first < block->n; first += APA_CPU_PANEL_I8) {
        const int n = block->n - first < APA_CPU_PANEL_I8 ? block->n - first : APA_CPU_PANEL_I8;
        apa_cpu_state state[APA_CPU_PANEL_I8];
        for (int r = 0; r < n; r++)
            for (int i = 0; i < LANES; i++) {
                state[r].frame[i] = -INFINITY;
                state[r].sum[i] = 0.0f;
            }
        for (int64_t group = 0; group < groups; group++)
            add_bounds(block, adaptive, prepared, first, n, head * groups + group, group, state);
        for (int r = 0; r < n; r++)
            for (int i = 0; i < LANES; i++) {
                apa_cpu_walk *walk = &adaptive->walk[first + r];
                walk->frame[i] = state[r].frame[i];
                walk->floor[i] = TRUST * TILE * state[r].sum[i];
            }
    }
}

bool apa_cpu_floor_held(const apa_cpu_block *block, const apa_cpu_adaptive *adaptive)
{
    for (int r = 0; r < block->n; r++)
        for (int i = 0; i < LANES; i++) {
            const apa_cpu_walk *walk = &adaptive->walk[r];
            const bool votes = (adaptive->all_hot >> r & 1) == 0 && (walk->real >> i & 1) != 0;
            if (votes && !(walk->floor[i] <= walk->lambda[i]))
                return false;
        }
    return true;
}
