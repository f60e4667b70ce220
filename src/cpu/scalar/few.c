/* Exact tiles for a few rows in plain C: the chains of cpu/kernels.h written out. */
#include "cpu/scalar/scalar.h"
#include "formats/formats.h"

#define TILE APA_CPU_TILE
#define LANES APA_CPU_LANES
#define LARGEST_DIM 1024

void apa_scores_few_scalar(apa_dtype dtype, const void *const *keys, int n, int64_t D, const apa_cpu_ahead *ahead,
                           int R, const float *q, float *s)
{
    (void)ahead;
    float row[LARGEST_DIM] = {0.0f};
    for (int key = 0; key < TILE; key++) {
        if (key < n)
            apa_widen_scalar(dtype, keys[key], D, row);
        for (int r = 0; r < R; r++) {
            float sum = 0.0f;
            for (int64_t d = 0; d < D && key < n; d++)
                sum += q[d * APA_CPU_FEW + r] * row[d];
            s[r * TILE + key] = sum;
        }
    }
}

bool apa_pv_few_scalar(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const apa_cpu_ahead *ahead, int R,
                       const float *p, const float *alpha, bool check, float *o)
{
    (void)ahead;
    const int64_t Do = (Dv + 15) / 16 * 16;
    float sum[APA_CPU_FEW * LARGEST_DIM] = {0.0f}, row[LARGEST_DIM] = {0.0f};
    bool finite = true;
    for (int key = 0; key < n; key++) {
        apa_widen_scalar(dtype, values[key], Dv, row);
        for (int r = 0; r < R; r++)
            for (int64_t c = 0; c < Dv; c++)
                sum[r * Do + c] += p[r * TILE + key] * row[c];
    }
    for (int64_t i = 0; i < R * Do; i++)
        finite = finite && isfinite(sum[i]);
    for (int r = 0; r < R && (finite || !check); r++)
        for (int64_t c = 0; c < Do; c++)
            o[r * Do + c] = o[r * Do + c] * alpha[r] + sum[r * Do + c];
    return finite || !check;
}

/* By the kernel with rows in the lanes. */
void apa_softmax_few_scalar(int R, float *s, float c, const apa_cpu_span *span, apa_cpu_state *state, float *alpha)
{
    float lanes[TILE * LANES] = {0.0f};
    for (int r = 0; r < R; r++)
        for (int key = 0; key < TILE; key++)
            lanes[key * LANES + r] = s[r * TILE + key];
    apa_softmax_f32_scalar(lanes, 1, c, span, NULL, state, alpha);
    for (int r = 0; r < R; r++)
        for (int key = 0; key < TILE; key++)
            s[r * TILE + key] = lanes[key * LANES + r];
}
