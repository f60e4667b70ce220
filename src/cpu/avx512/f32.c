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

APA_INLINE void scores_block(int n, const float *const *q, const float *k, int64_t Dp, float *s, float *maximum)
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
    if (maximum != NULL)
        apa_avx512_maxima(n, KEYS, &sum[0][0], APA_CPU_PANEL_F32, maximum);
}

APA_INLINE void scores_panel(int n, const float *const *q, const float *k, int64_t Dp, float *s, float *maximum,
                             const apa_cpu_prefetch *prefetch)
{
    for (int r = 0; r < n && maximum != NULL; r++)
        _mm512_storeu_ps(maximum + r * LANES, _mm512_set1_ps(-INFINITY));
    for (int key = 0; key < TILE; key += KEYS) {
        apa_avx512_prefetch(prefetch, key / KEYS, TILE / KEYS);
        scores_block(n, q, k + key * Dp, Dp, s + key * n * LANES, maximum);
    }
}

void apa_scores_f32_avx512(int n, const float *const *q, const float *k, int64_t Dp, float *s, float *maximum,
                           const apa_cpu_prefetch *prefetch)
{
    if (n == 3)
        scores_panel(3, q, k, Dp, s, maximum, prefetch);
    else if (n == 2)
        scores_panel(2, q, k, Dp, s, maximum, prefetch);
    else
        scores_panel(1, q, k, Dp, s, maximum, prefetch);
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

/* ---- softmax ---- */

/* Over the keys that each lane sees. NaN is left out. */
APA_INLINE __m512 largest(const float *s, int n, bool masked, __m512i lo, __m512i hi)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    __m512 most[4] = {lowest, lowest, lowest, lowest};
    /* Nested loops: indexed by j % 4, gcc keeps the four accumulators in memory (6.9 against 10.6 G keys·rows/s). */
    for (int key = 0; key < TILE; key += 4)
        for (int u = 0; u < 4; u++) {
            const __m512 x = _mm512_load_ps(s + (key + u) * n * LANES);
            const __mmask16 sees = masked ? apa_avx512_visible(lo, hi, key + u) : (__mmask16)0xffff;
            most[u] = _mm512_mask_max_ps(most[u], sees, x, most[u]);
        }
    return _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
}

/* The frame's rule. Returns the lanes' factors. */
APA_INLINE __m512 move_frame(__m512 maximum, __m512 scale, __m512 *frame)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY), one = _mm512_set1_ps(1.0f), old = *frame;
    /* A lane without a frame moves to its first score whatever c is; one that sees no score does not move. */
    const __mmask16 any = _mm512_cmp_ps_mask(maximum, lowest, _CMP_NEQ_UQ);
    const __mmask16 first = _mm512_cmp_ps_mask(old, lowest, _CMP_EQ_OQ);
    const __m512 rise = _mm512_mul_ps(_mm512_sub_ps(maximum, old), scale);
    const __mmask16 over = _mm512_cmp_ps_mask(rise, _mm512_set1_ps(APA_CPU_FRAME_SLACK), _CMP_GT_OQ);
    const __mmask16 moves = any & (first | over);
    if (moves == 0)
        return one;
    *frame = _mm512_mask_mov_ps(old, moves, maximum);
    const __m512 power = apa_avx512_exp2(_mm512_mul_ps(_mm512_sub_ps(old, *frame), scale));
    return _mm512_mask_mov_ps(one, moves, _mm512_maskz_mov_ps((__mmask16)~first, power));
}

/* p = 2^((s - base)·scale) of all keys in place; returns their sum. Four keys' polynomials and the arguments of the
 * four after them go side by side, step by step: the chains are long, and multiply-adds are the short unit here. */
APA_INLINE __m512 exponentials(float *s, int n, bool masked, __m512i lo, __m512i hi, __m512 base, __m512 scale)
{
    const float c[6] = {APA_EXP2_UP_C5, APA_EXP2_UP_C4, APA_EXP2_UP_C3, APA_EXP2_UP_C2, APA_EXP2_UP_C1, 1.0f};
    __m512 x[4], r[4], sum[4];
    for (int u = 0; u < 4; u++) {
        x[u] = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(s + u * n * LANES), base), scale);
        r[u] = apa_avx512_fraction(x[u]);
        sum[u] = _mm512_setzero_ps();
    }
    for (int key = 0; key < TILE; key += 4) {
        float *at = s + key * n * LANES;
        const float *next = key + 4 < TILE ? at + 4 * n * LANES : at; /* the last turn's are not used */
        __m512 p[4], y[4];
        for (int u = 0; u < 4; u++)
            p[u] = _mm512_fmadd_ps(_mm512_set1_ps(APA_EXP2_UP_C6), r[u], _mm512_set1_ps(c[0]));
        for (int u = 0; u < 4; u++)
            y[u] = _mm512_sub_ps(_mm512_load_ps(next + u * n * LANES), base);
        for (int u = 0; u < 4; u++)
            p[u] = _mm512_fmadd_ps(p[u], r[u], _mm512_set1_ps(c[1]));
        for (int u = 0; u < 4; u++)
            y[u] = _mm512_mul_ps(y[u], scale);
        for (int step = 2; step < 6; step++)
            for (int u = 0; u < 4; u++)
                p[u] = _mm512_fmadd_ps(p[u], r[u], _mm512_set1_ps(c[step]));
        for (int u = 0; u < 4; u++) {
            p[u] = _mm512_scalef_ps(p[u], x[u]);
            if (masked)
                p[u] = _mm512_maskz_mov_ps(apa_avx512_visible(lo, hi, key + u), p[u]);
            _mm512_store_ps(at + u * n * LANES, p[u]);
            sum[u] = _mm512_add_ps(sum[u], p[u]);
            x[u] = y[u];
            r[u] = apa_avx512_fraction(y[u]);
        }
    }
    return _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
}

APA_INLINE bool softmax_panel(float *s, int n, float c, const apa_cpu_span *span, const float *maximum,
                              apa_cpu_state *state, float *alpha)
{
    const bool masked = span != NULL;
    const __m512i lo = masked ? _mm512_loadu_si512(span->lo) : _mm512_setzero_si512();
    const __m512i hi = masked ? _mm512_loadu_si512(span->hi) : _mm512_setzero_si512();
    const __m512 lowest = _mm512_set1_ps(-INFINITY), scale = _mm512_set1_ps(c);
    const __m512 most = maximum != NULL ? _mm512_loadu_ps(maximum) : largest(s, n, masked, lo, hi);
    __m512 frame = _mm512_loadu_ps(state->frame);
    const __m512 factor = move_frame(most, scale, &frame);
    _mm512_storeu_ps(state->frame, frame);
    _mm512_storeu_ps(alpha, factor);
    /* No finite score yet: -inf scores weigh nothing, and -inf - -inf would be NaN. */
    const __m512 base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(frame, lowest, _CMP_NEQ_UQ), frame);
    const __m512 added = exponentials(s, n, masked, lo, hi, base, scale);
    _mm512_storeu_ps(state->sum, _mm512_fmadd_ps(_mm512_loadu_ps(state->sum), factor, added));
    return _mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0;
}

bool apa_softmax_f32_avx512(float *s, int n, float c, const apa_cpu_span *span, const float *maximum,
                            apa_cpu_state *state, float *alpha)
{
    if (span != NULL)
        return softmax_panel(s, n, c, span, maximum, state, alpha);
    if (n == 3) /* known strides: addresses cost nothing */
        return softmax_panel(s, 3, c, NULL, maximum, state, alpha);
    return softmax_panel(s, n, c, NULL, maximum, state, alpha);
}

/* ---- states ---- */

void apa_scale_lanes_avx512(float *x, int64_t rows, const float *alpha)
{
    const __m512 factor = _mm512_loadu_ps(alpha);
    for (int64_t i = 0; i < rows; i++)
        _mm512_store_ps(x + i * LANES, _mm512_mul_ps(_mm512_load_ps(x + i * LANES), factor));
}

/* 2^((frame - most)·c): 1 where they are equal (-inf against -inf: both empty), 0 where only the frame is -inf. */
APA_INLINE __m512 weight(__m512 frame, __m512 most, float c)
{
    const __mmask16 same = _mm512_cmp_ps_mask(frame, most, _CMP_EQ_OQ);
    const __mmask16 some = _mm512_cmp_ps_mask(frame, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    const __m512 power = apa_avx512_exp2(_mm512_mul_ps(_mm512_sub_ps(frame, most), _mm512_set1_ps(c)));
    return _mm512_mask_mov_ps(_mm512_maskz_mov_ps(some, power), same, _mm512_set1_ps(1.0f));
}

APA_INLINE __m512 weighted(const float *left, __m512 a, const float *right, __m512 b)
{
    return _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(left), a), _mm512_mul_ps(_mm512_loadu_ps(right), b));
}

void apa_merge_lanes_avx512(const apa_cpu_state *left, const float *left_o, float c, int64_t rows, apa_cpu_state *state,
                            float *o)
{
    const __m512 frame = _mm512_loadu_ps(left->frame), own = _mm512_loadu_ps(state->frame);
    const __m512 most = _mm512_mask_mov_ps(own, _mm512_cmp_ps_mask(frame, own, _CMP_GT_OQ), frame);
    const __m512 a = weight(frame, most, c), b = weight(own, most, c);
    _mm512_storeu_ps(state->frame, most);
    _mm512_storeu_ps(state->sum, weighted(left->sum, a, state->sum, b));
    for (int64_t at = 0; at < rows * LANES; at += LANES)
        _mm512_storeu_ps(o + at, weighted(left_o + at, a, o + at, b));
}
