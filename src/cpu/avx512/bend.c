/* Softcap, slopes and bias of the AVX-512 level: 16 rows are a register. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/turn.h"

#include <math.h>

/* tanh(x) = E/(E + 2), E = e^(2|x|) - 1 = 2^n·(2^r - 1) + (2^n - 1): see cpu/scalar/bend.c.
 * _mm512_min_ps(a, b) returns b when either is NaN: the order of the operands keeps NaN. */
APA_INLINE __m512 tanh16(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 z = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(APA_TANH_SCALE));
    z = _mm512_min_ps(_mm512_set1_ps(APA_TANH_HIGHEST), z);
    const __m512 n = _mm512_roundscale_ps(z, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(z, n), power = _mm512_scalef_ps(one, n);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(APA_EXP2_6_C6), r, _mm512_set1_ps(APA_EXP2_6_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(APA_EXP2_6_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(APA_EXP2_6_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(APA_EXP2_6_C2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(APA_EXP2_6_C1));
    const __m512 e = _mm512_fmadd_ps(power, _mm512_mul_ps(p, r), _mm512_sub_ps(power, one));
    const __m512 t = _mm512_div_ps(e, _mm512_add_ps(e, _mm512_set1_ps(2.0f)));
    const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
    return _mm512_or_ps(_mm512_abs_ps(t), sign);
}

/* What isn't NULL (or 0) is known where this is inlined, so that each case gets a loop without questions. */
APA_INLINE void bend_panel(float *s, int n, const float *factor, float cap, const float *slope, const float *distance,
                           const float *bias)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    const __m512 times = factor != NULL ? _mm512_loadu_ps(factor) : _mm512_set1_ps(1.0f);
    const __m512 steep = slope != NULL ? _mm512_loadu_ps(slope) : _mm512_setzero_ps();
    const __m512 at = slope != NULL ? _mm512_loadu_ps(distance) : _mm512_setzero_ps();
    for (int key = 0; key < TILE; key++) {
        __m512 x = _mm512_load_ps(s + key * n * LANES);
        if (factor != NULL)
            x = _mm512_mul_ps(x, times);
        if (cap > 0.0f)
            x = _mm512_mul_ps(_mm512_set1_ps(cap), tanh16(x));
        if (slope != NULL) {
            const __m512 apart = _mm512_abs_ps(_mm512_sub_ps(at, _mm512_set1_ps((float)key)));
            x = _mm512_sub_ps(x, _mm512_mul_ps(steep, apart));
        }
        if (bias != NULL) {
            const __m512 b = _mm512_load_ps(bias + key * LANES);
            const __mmask16 shown = _mm512_cmp_ps_mask(b, lowest, _CMP_NEQ_UQ);
            x = _mm512_mask_add_ps(lowest, shown, x, b);
        }
        _mm512_store_ps(s + key * n * LANES, x);
    }
}

void apa_bend_avx512(float *s, int n, const float *factor, float cap, const float *slope, const float *distance,
                     const float *bias)
{
    if (cap > 0.0f)
        bend_panel(s, n, factor, cap, slope, distance, bias);
    else if (slope == NULL && bias != NULL && factor == NULL)
        bend_panel(s, n, NULL, 0.0f, NULL, NULL, bias);
    else if (slope == NULL && bias != NULL)
        bend_panel(s, n, factor, 0.0f, NULL, NULL, bias);
    else
        bend_panel(s, n, factor, 0.0f, slope, distance, bias);
}

void apa_into_lanes_avx512(const float *rows, float *lanes)
{
    for (int key = 0; key < TILE; key += 16) {
        __m512 x[16];
        for (int i = 0; i < 16; i++)
            x[i] = _mm512_loadu_ps(rows + i * TILE + key);
        transpose16(x);
        for (int i = 0; i < 16; i++)
            _mm512_storeu_ps(lanes + (key + i) * LANES, x[i]);
    }
}
