/* One panel on one tile: the steps that the walk, the second look and whoever comes back to a tile share. */
#include "cpu/adaptive.h"

#include "cpu/bend.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE

void apa_cpu_panel_scores(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes,
                          const apa_cpu_panel *at, float *maximum, const apa_cpu_prefetch *prefetch)
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

/* From here on a score times walk->q_scale is in log2 units, whichever way it went: on tiles that a mask leaves alone
 * the scale of the query is still in there. The bound of a score's error holds either way: bias is added as it is, and
 * tanh draws scores together. */
void apa_cpu_panel_settle(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_panel *at, int i,
                          int64_t tile, float *maximum)
{
    const int r = at->reg[i];
    const apa_cpu_span *span = at->part[i] ? &at->span[i] : NULL;
    apa_cpu_walk *walk = &adaptive->walk[r];
    float *s = block->s + i * LANES;
    const bool bends = apa_cpu_bends(block, r, tile);
    if (adaptive->few > 0)
        return;
    if (block->bend.changes)
        memcpy(walk->q_scale, bends ? log2_e : adaptive->plain_scale[r], sizeof walk->q_scale);
    if (bends)
        apa_cpu_bend_scores(block, r, tile, s, at->n, adaptive->factor[r]);
    if (bends || span != NULL)
        block->kernels->max_i8(s, at->n, span, maximum);
}

/* A lane whose keys a mask hides has scores and a maximum of -inf, the difference of which is no number. */
void apa_cpu_panel_probabilities(const apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_panel *at,
                                 int i, const float *maximum, uint8_t *p8, int32_t *sum)
{
    const apa_cpu_span *span = at->part[i] ? &at->span[i] : NULL;
    const apa_cpu_walk *walk = &adaptive->walk[at->reg[i]];
    const float *s = block->s + i * LANES;
    float from[LANES];
    if (adaptive->few > 0) {
        block->kernels->softmax_few_i8(adaptive->few, s, span, maximum, walk->q_scale, p8, sum);
        return;
    }
    if (!block->bend.masked) {
        block->kernels->softmax_i8(s, at->n, span, maximum, walk->q_scale, p8, sum);
        return;
    }
    for (int lane = 0; lane < LANES; lane++)
        from[lane] = maximum[lane] == -INFINITY ? 0.0f : maximum[lane];
    block->kernels->softmax_i8(s, at->n, span, from, walk->q_scale, p8, sum);
}

void apa_cpu_panel_values(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes, int n,
                          const int *reg, const uint8_t *const *p8, const float (*p_scale)[LANES])
{
    float *o[APA_CPU_PANEL_I8];
    const float *scale[APA_CPU_PANEL_I8];
    if (adaptive->few > 0 && n > 0) {
        block->kernels->pv_few_i8(adaptive->few, p8[0], codes->v8, codes->v_scale, p_scale[0], block->shape->Dvp,
                                  block->reg[0].o);
        return;
    }
    for (int i = 0; i < n; i++) {
        o[i] = block->reg[reg[i]].o;
        scale[i] = p_scale[i];
    }
    if (n > 0)
        block->kernels->pv_i8(n, p8, codes->v8, codes->v_scale, scale, block->shape->Dvp, o);
}

void apa_cpu_adaptive_p_again(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes, int r,
                              int64_t tile, uint8_t *p8, float *maximum, int32_t *sum)
{
    apa_cpu_panel at = {.n = 1, .reg = {r}};
    at.part[0] = apa_cpu_block_view(block, r, tile, &at.span[0]) == APA_CPU_VIEW_PART;
    apa_cpu_panel_scores(block, adaptive, codes, &at, maximum, NULL);
    apa_cpu_panel_settle(block, adaptive, &at, 0, tile, maximum);
    apa_cpu_panel_probabilities(block, adaptive, &at, 0, maximum, p8, sum);
}
