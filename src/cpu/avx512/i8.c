/* INT8 tiles on VNNI: vpdpbusd multiplies 4 unsigned by 4 signed bytes and adds to 32 bits.
 *
 * Queries are the unsigned operand (code + 128) and rows lie in the lanes, so keys are read as 4-byte broadcasts from
 * their row-major codes; the offset costs -128·Σ(key codes), which the accumulators start from. Probabilities are
 * unsigned by nature. |Σ| <= 255·127·1024 < 2^31 for any D allowed, and 255·127·64 < 2^24 converts to float exactly. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/vector.h"

#include <math.h>
#include <string.h>

#define KEYS 4     /* keys side by side in a score block */
#define CHANNELS 4 /* channels side by side in a P·V block */

APA_INLINE __m512i broadcast4(const void *bytes)
{
    int32_t word;
    memcpy(&word, bytes, sizeof word);
    return _mm512_set1_epi32(word);
}

APA_INLINE void scores_panel(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                             const float *k_scale, int64_t Dp, float *s, float *maximum,
                             const apa_cpu_prefetch *prefetch)
{
    __m512 most[APA_CPU_PANEL_I8];
    for (int r = 0; r < n; r++)
        most[r] = _mm512_set1_ps(-INFINITY);
    for (int key = 0; key < TILE; key += KEYS) {
        apa_avx512_prefetch(prefetch, key / KEYS, TILE / KEYS);
        const int8_t *k = k8 + key * Dp;
        __m512i sum[KEYS][APA_CPU_PANEL_I8];
        for (int j = 0; j < KEYS; j++)
            for (int r = 0; r < n; r++)
                sum[j][r] = _mm512_set1_epi32(k8_bias[key + j]);
        for (int64_t d = 0; d < Dp; d += 4) {
            __m512i row[APA_CPU_PANEL_I8];
            for (int r = 0; r < n; r++)
                row[r] = _mm512_load_si512(q8[r] + d * LANES);
            for (int j = 0; j < KEYS; j++) {
                const __m512i codes = broadcast4(k + j * Dp + d);
                for (int r = 0; r < n; r++)
                    apa_avx512_dot4(&sum[j][r], row[r], codes);
            }
        }
        for (int j = 0; j < KEYS; j++) {
            const __m512 scale = _mm512_set1_ps(k_scale[key + j]);
            for (int r = 0; r < n; r++) {
                const __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[j][r]), scale);
                most[r] = _mm512_max_ps(most[r], x);
                _mm512_store_ps(s + ((key + j) * n + r) * LANES, x);
            }
        }
    }
    for (int r = 0; r < n; r++)
        _mm512_storeu_ps(maximum + r * LANES, most[r]);
}

void apa_scores_i8_avx512vnni(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                              const float *k_scale, int64_t Dp, float *s, float *maximum,
                              const apa_cpu_prefetch *prefetch)
{
    if (n == 4)
        scores_panel(4, q8, k8, k8_bias, k_scale, Dp, s, maximum, prefetch);
    else if (n == 3)
        scores_panel(3, q8, k8, k8_bias, k_scale, Dp, s, maximum, prefetch);
    else if (n == 2)
        scores_panel(2, q8, k8, k8_bias, k_scale, Dp, s, maximum, prefetch);
    else
        scores_panel(1, q8, k8, k8_bias, k_scale, Dp, s, maximum, prefetch);
}

void apa_max_i8_avx512(const float *s, int n, const apa_cpu_span *span, float *maximum)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    __m512 most[4] = {lowest, lowest, lowest, lowest};
    if (span == NULL) {
        for (int key = 0; key < TILE; key += 4)
            for (int u = 0; u < 4; u++)
                most[u] = _mm512_max_ps(most[u], _mm512_load_ps(s + (key + u) * n * LANES));
    } else {
        const __m512i lo = _mm512_loadu_si512(span->lo), hi = _mm512_loadu_si512(span->hi);
        for (int key = 0; key < TILE; key += 4)
            for (int u = 0; u < 4; u++)
                most[u] = _mm512_mask_max_ps(most[u], apa_avx512_visible(lo, hi, key + u), most[u],
                                             _mm512_load_ps(s + (key + u) * n * LANES));
    }
    _mm512_storeu_ps(maximum, _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])));
}

APA_INLINE void softmax_panel(const float *s, int n, const apa_cpu_span *span, const float *maximum,
                              const float *q_scale, uint8_t *p8, int32_t *sum)
{
    const bool masked = span != NULL;
    const __m512i lo = masked ? _mm512_loadu_si512(span->lo) : _mm512_setzero_si512();
    const __m512i hi = masked ? _mm512_loadu_si512(span->hi) : _mm512_setzero_si512();
    const __m512 most = _mm512_loadu_ps(maximum), scale = _mm512_loadu_ps(q_scale);
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i total = _mm512_setzero_si512();
    for (int key = 0; key < TILE; key += 8) {
        __m512 x[8];
        __m512i p[8];
        for (int j = 0; j < 8; j++)
            x[j] = _mm512_sub_ps(_mm512_load_ps(s + (key + j) * n * LANES), most);
        for (int j = 0; j < 8; j++)
            x[j] = _mm512_mul_ps(x[j], scale);
        apa_avx512_probabilities(8, x, p);
        for (int j = 0; masked && j < 8; j++)
            p[j] = _mm512_maskz_mov_epi32(apa_avx512_visible(lo, hi, key + j), p[j]);
        for (int j = 0; j < 8; j += 4) {
            const __m512i packed = apa_avx512_pack4(p + j);
            _mm512_store_si512(p8 + (key + j) * LANES, packed);
            total = _mm512_dpbusd_epi32(total, packed, ones);
        }
    }
    _mm512_storeu_si512(sum, total);
}

void apa_softmax_i8_avx512(const float *s, int n, const apa_cpu_span *span, const float *maximum, const float *q_scale,
                           uint8_t *p8, int32_t *sum)
{
    if (span != NULL)
        softmax_panel(s, n, span, maximum, q_scale, p8, sum);
    else
        softmax_panel(s, n, NULL, maximum, q_scale, p8, sum);
}

APA_INLINE void pv_panel(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale,
                         const float *const *p_scale, int64_t Dvp, float *const *o)
{
    __m512 row_scale[APA_CPU_PANEL_I8];
    for (int r = 0; r < n; r++)
        row_scale[r] = _mm512_loadu_ps(p_scale[r]);
    for (int64_t c = 0; c < Dvp; c += CHANNELS) {
        __m512i sum[CHANNELS][APA_CPU_PANEL_I8];
        for (int i = 0; i < CHANNELS; i++)
            for (int r = 0; r < n; r++)
                sum[i][r] = _mm512_setzero_si512();
        for (int quad = 0; quad < TILE / 4; quad++) {
            __m512i row[APA_CPU_PANEL_I8];
            for (int r = 0; r < n; r++)
                row[r] = _mm512_load_si512(p8[r] + quad * 4 * LANES);
            for (int i = 0; i < CHANNELS; i++) {
                const __m512i codes = broadcast4(v8 + (quad * Dvp + c + i) * 4);
                for (int r = 0; r < n; r++)
                    apa_avx512_dot4(&sum[i][r], row[r], codes);
            }
        }
        for (int i = 0; i < CHANNELS; i++) {
            const __m512 scale = _mm512_set1_ps(v_scale[c + i]);
            for (int r = 0; r < n; r++) {
                float *out = o[r] + (c + i) * LANES;
                const __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[i][r]), scale);
                _mm512_store_ps(out, _mm512_fmadd_ps(x, row_scale[r], _mm512_load_ps(out)));
            }
        }
    }
}

void apa_pv_i8_avx512vnni(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale,
                          const float *const *p_scale, int64_t Dvp, float *const *o)
{
    if (n == 4)
        pv_panel(4, p8, v8, v_scale, p_scale, Dvp, o);
    else if (n == 3)
        pv_panel(3, p8, v8, v_scale, p_scale, Dvp, o);
    else if (n == 2)
        pv_panel(2, p8, v8, v_scale, p_scale, Dvp, o);
    else
        pv_panel(1, p8, v8, v_scale, p_scale, Dvp, o);
}
