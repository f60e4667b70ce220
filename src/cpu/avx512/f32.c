/* Exact tiles: FP32 products and sums, 16 rows in the lanes.
 *
 * Scores and P·V are outer products: n query registers by 8 keys (or channels) make 8n accumulators that stay in
 * registers over the whole inner loop; per step n loads and 8 broadcasts feed 8n multiply-adds, so from n = 2 on the
 * FMA units are the limit. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/vector.h"

#include <math.h>

#define KEYS 8     /* keys side by side in a score block */
#define CHANNELS 8 /* channels side by side in a P·V block; the width of v's blocks */

APA_INLINE void scores_block(int n, const float *const *q, const float *k, int64_t Dp, float *s)
{
    __m512 sum[KEYS][APA_CPU_PANEL_F32];
    for (int j = 0; j < KEYS; j++)
        for (int r = 0; r < n; r++)
            sum[j][r] = _mm512_setzero_ps();
    for (int64_t d = 0; d < Dp; d++) {
        __m512 row[APA_CPU_PANEL_F32];
        for (int r = 0; r < n; r++)
            row[r] = _mm512_load_ps(q[r] + d * LANES);
        for (int j = 0; j < KEYS; j++) {
            const __m512 key = _mm512_set1_ps(k[j * Dp + d]);
            for (int r = 0; r < n; r++)
                sum[j][r] = _mm512_fmadd_ps(row[r], key, sum[j][r]);
        }
    }
    for (int j = 0; j < KEYS; j++)
        for (int r = 0; r < n; r++)
            _mm512_store_ps(s + (j * n + r) * LANES, sum[j][r]);
}

APA_INLINE void scores_panel(int n, const float *const *q, const float *k, int64_t Dp, float *s,
                             const apa_cpu_prefetch *prefetch)
{
    for (int key = 0; key < TILE; key += KEYS) {
        apa_avx512_prefetch(prefetch, key / KEYS, TILE / KEYS);
        scores_block(n, q, k + key * Dp, Dp, s + key * n * LANES);
    }
}

void apa_scores_f32_avx512(int n, const float *const *q, const float *k, int64_t Dp, float *s,
                           const apa_cpu_prefetch *prefetch)
{
    if (n == 3)
        scores_panel(3, q, k, Dp, s, prefetch);
    else if (n == 2)
        scores_panel(2, q, k, Dp, s, prefetch);
    else
        scores_panel(1, q, k, Dp, s, prefetch);
}

APA_INLINE void pv_panel(int n, const float *p, const float *v, int64_t Dvp, float *const *o)
{
    for (int64_t c = 0; c < Dvp; c += CHANNELS) {
        const float *values = v + c / CHANNELS * APA_CPU_V_BLOCK;
        __m512 sum[CHANNELS][APA_CPU_PANEL_F32];
        for (int i = 0; i < CHANNELS; i++)
            for (int r = 0; r < n; r++)
                sum[i][r] = _mm512_setzero_ps();
        for (int key = 0; key < TILE; key++) {
            __m512 row[APA_CPU_PANEL_F32];
            for (int r = 0; r < n; r++)
                row[r] = _mm512_load_ps(p + (key * n + r) * LANES);
            for (int i = 0; i < CHANNELS; i++) {
                const __m512 value = _mm512_set1_ps(values[key * CHANNELS + i]);
                for (int r = 0; r < n; r++)
                    sum[i][r] = _mm512_fmadd_ps(row[r], value, sum[i][r]);
            }
        }
        for (int i = 0; i < CHANNELS; i++)
            for (int r = 0; r < n; r++) {
                float *out = o[r] + (c + i) * LANES;
                _mm512_store_ps(out, _mm512_add_ps(_mm512_load_ps(out), sum[i][r]));
            }
    }
}

void apa_pv_f32_avx512(int n, const float *p, const float *v, int64_t Dvp, float *const *o)
{
    if (n == 3)
        pv_panel(3, p, v, Dvp, o);
    else if (n == 2)
        pv_panel(2, p, v, Dvp, o);
    else
        pv_panel(1, p, v, Dvp, o);
}

APA_INLINE bool softmax_panel(float *s, int n, float c, const apa_cpu_span *span, apa_cpu_state *state, float *alpha)
{
    const bool masked = span != NULL;
    const __m512i lo = masked ? _mm512_loadu_si512(span->lo) : _mm512_setzero_si512();
    const __m512i hi = masked ? _mm512_loadu_si512(span->hi) : _mm512_setzero_si512();
    const __m512 lowest = _mm512_set1_ps(-INFINITY);

    __m512 most[4] = {lowest, lowest, lowest, lowest};
    /* Nested loops: indexed by j % 4, gcc keeps the four accumulators in memory (6.9 against 10.6 G keys·rows/s). */
    for (int key = 0; key < TILE; key += 4)
        for (int u = 0; u < 4; u++) {
            const __m512 x = _mm512_load_ps(s + (key + u) * n * LANES);
            const __mmask16 sees = masked ? apa_avx512_visible(lo, hi, key + u) : (__mmask16)0xffff;
            most[u] = _mm512_mask_max_ps(most[u], sees, most[u], x);
        }
    const __m512 maximum = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    const __m512 scale = _mm512_set1_ps(c), old = _mm512_loadu_ps(state->frame);
    /* A lane without a frame moves to its first score whatever c is; one that sees no score does not move. */
    const __mmask16 any = _mm512_cmp_ps_mask(maximum, lowest, _CMP_NEQ_UQ);
    const __mmask16 first = _mm512_cmp_ps_mask(old, lowest, _CMP_EQ_OQ);
    const __m512 rise = _mm512_mul_ps(_mm512_sub_ps(maximum, old), scale);
    const __mmask16 over = _mm512_cmp_ps_mask(rise, _mm512_set1_ps(APA_CPU_FRAME_SLACK), _CMP_GT_OQ);
    const __mmask16 moves = any & (first | over);
    const __m512 frame = _mm512_mask_mov_ps(old, moves, maximum);
    __m512 factor = _mm512_set1_ps(1.0f);
    if (moves != 0) {
        const __m512 power = apa_avx512_exp2(_mm512_mul_ps(_mm512_sub_ps(old, frame), scale));
        factor = _mm512_mask_mov_ps(factor, moves, _mm512_maskz_mov_ps((__mmask16)~first, power));
    }
    _mm512_storeu_ps(state->frame, frame);
    _mm512_storeu_ps(alpha, factor);

    /* No finite score yet: -inf scores weigh nothing, and -inf - -inf would be NaN. */
    const __m512 base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(frame, lowest, _CMP_NEQ_UQ), frame);
    __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int key = 0; key < TILE; key += 8) {
        float *at = s + key * n * LANES;
        __m512 p[8];
        for (int u = 0; u < 8; u++)
            p[u] = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(at + u * n * LANES), base), scale);
        apa_avx512_exp2_of(8, p);
        for (int u = 0; u < 8; u++) {
            if (masked)
                p[u] = _mm512_maskz_mov_ps(apa_avx512_visible(lo, hi, key + u), p[u]);
            _mm512_store_ps(at + u * n * LANES, p[u]);
            sum[u & 3] = _mm512_add_ps(sum[u & 3], p[u]);
        }
    }
    const __m512 added = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
    _mm512_storeu_ps(state->sum, _mm512_fmadd_ps(_mm512_loadu_ps(state->sum), factor, added));
    return _mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0;
}

bool apa_softmax_f32_avx512(float *s, int n, float c, const apa_cpu_span *span, apa_cpu_state *state, float *alpha)
{
    if (span != NULL)
        return softmax_panel(s, n, c, span, state, alpha);
    return softmax_panel(s, n, c, NULL, state, alpha);
}

void apa_scale_lanes_avx512(float *x, int64_t rows, const float *alpha)
{
    const __m512 factor = _mm512_loadu_ps(alpha);
    for (int64_t i = 0; i < rows; i++)
        _mm512_store_ps(x + i * LANES, _mm512_mul_ps(_mm512_load_ps(x + i * LANES), factor));
}
