/* Softcap, slopes and bias over eight lanes: see cpu/lanes8/softmax.h for how this text becomes kernels. */
#include "cpu/lanes8/common.h"

#include <math.h>

/* tanh(x) = E/(E + 2), E = e^(2|x|) - 1 = 2^n·(2^r - 1) + (2^n - 1): see cpu/scalar/bend.c. x + 1.5·2^23 has round(x)
 * in its low bits, which become the exponent of 2^n. */
APA_INLINE v8f v8f_tanh(v8f x)
{
    const v8f magic = v8f_set(0x1.8p23f), one = v8f_set(1.0f), size = v8f_abs(x);
    const v8f z = v8f_min_keep_nan(v8f_set(APA_TANH_HIGHEST), v8f_mul(size, v8f_set(APA_TANH_SCALE)));
    const v8f shifted = v8f_add(z, magic), r = v8f_sub(z, v8f_sub(shifted, magic));
    v8f p = v8f_fma(v8f_set(APA_EXP2_6_C6), r, v8f_set(APA_EXP2_6_C5));
    p = v8f_fma(p, r, v8f_set(APA_EXP2_6_C4));
    p = v8f_fma(p, r, v8f_set(APA_EXP2_6_C3));
    p = v8f_fma(p, r, v8f_set(APA_EXP2_6_C2));
    p = v8f_fma(p, r, v8f_set(APA_EXP2_6_C1));
    const v8f power = v8f_from_bits(v8i_add(v8i_left(v8i_from_bits(shifted), 23), v8i_set(127 << 23)));
    const v8f e = v8f_fma(power, v8f_mul(p, r), v8f_sub(power, one));
    const v8f t = v8f_div(e, v8f_add(e, v8f_set(2.0f)));
    return v8f_select(v8f_ge(x, v8f_set(0.0f)), t, v8f_sub(v8f_set(0.0f), t));
}

APA_INLINE void bend_half(float *s, int n, const float *factor, float cap, const float *slope, const float *distance,
                          const float *bias)
{
    const v8f lowest = v8f_set(-INFINITY), zero = v8f_set(0.0f);
    const v8f times = factor != NULL ? v8f_load(factor) : v8f_set(1.0f);
    const v8f steep = slope != NULL ? v8f_load(slope) : zero, at = slope != NULL ? v8f_load(distance) : zero;
    for (int key = 0; key < TILE; key++) {
        v8f x = v8f_load(s + key * n * LANES);
        if (factor != NULL)
            x = v8f_mul(x, times);
        if (cap > 0.0f)
            x = v8f_mul(v8f_set(cap), v8f_tanh(x));
        if (slope != NULL)
            x = v8f_sub(x, v8f_mul(steep, v8f_abs(v8f_sub(at, v8f_set((float)key)))));
        if (bias != NULL) {
            const v8f b = v8f_load(bias + key * LANES);
            x = v8f_select(v8f_ne(b, lowest), v8f_add(x, b), lowest);
        }
        v8f_store(s + key * n * LANES, x);
    }
}

void KERNEL(bend)(float *s, int n, const float *factor, float cap, const float *slope, const float *distance,
                  const float *bias)
{
    for (int i = 0; i < LANES; i += EIGHT) {
        const float *f = factor != NULL ? factor + i : NULL, *b = bias != NULL ? bias + i : NULL;
        const float *m = slope != NULL ? slope + i : NULL, *at = slope != NULL ? distance + i : NULL;
        if (cap > 0.0f)
            bend_half(s + i, n, f, cap, m, at, b);
        else if (m == NULL && f == NULL) /* a mask alone on exact scores */
            bend_half(s + i, n, NULL, 0.0f, NULL, NULL, b);
        else
            bend_half(s + i, n, f, 0.0f, m, at, b);
    }
}
