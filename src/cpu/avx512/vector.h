/* Small AVX-512 helpers shared by the kernels of this level. */
#ifndef APA_CPU_AVX512_VECTOR_H
#define APA_CPU_AVX512_VECTOR_H

#include "cpu/exp2.h"
#include "cpu/kernels.h"

#include <immintrin.h>

#define APA_INLINE static inline __attribute__((always_inline))
#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE

/* 1, hidden from compilers that would turn a multiply-add by it into a sum: here sums, roundings and conversions share
 * two pipes, multiply-adds have two others, and the first are the ones that are short (Zen 4 and 5). */
APA_INLINE __m512 apa_avx512_one(void)
{
    __m512 one = _mm512_set1_ps(1.0f);
    __asm__("" : "+v"(one));
    return one;
}

/* x - floor(x); 0 for the infinities, NaN for NaN. */
APA_INLINE __m512 apa_avx512_fraction(__m512 x)
{
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

/* 2^x of m registers to within half an ulp or little more; 0 for -inf, infinity for +inf, NaN for NaN. Scaling by a
 * power of two takes the floor of its exponent by itself, so the fraction above it is all that has to be made.
 * Step by step over all of them: one register's chain is some 40 cycles long, and chains in a row fill the schedulers
 * before they fill the units. */
APA_INLINE void apa_avx512_exp2_of(int m, __m512 *x)
{
    const float c[6] = {APA_EXP2_UP_C5, APA_EXP2_UP_C4, APA_EXP2_UP_C3, APA_EXP2_UP_C2, APA_EXP2_UP_C1, 1.0f};
    __m512 r[8], p[8];
    for (int i = 0; i < m; i++) {
        r[i] = apa_avx512_fraction(x[i]);
        p[i] = _mm512_set1_ps(APA_EXP2_UP_C6);
    }
    for (int step = 0; step < 6; step++)
        for (int i = 0; i < m; i++)
            p[i] = _mm512_fmadd_ps(p[i], r[i], _mm512_set1_ps(c[step]));
    for (int i = 0; i < m; i++)
        x[i] = _mm512_scalef_ps(p[i], x[i]);
}

APA_INLINE __m512 apa_avx512_exp2(__m512 x)
{
    apa_avx512_exp2_of(1, &x);
    return x;
}

/* round(255·2^x) of m registers, x <= 0 and finite (whatever it is in lanes that see nothing is masked afterwards).
 * Step by step over all of them: one register's chain is some 45 cycles long, and chains in a row fill the schedulers
 * before they fill the units. */
APA_INLINE void apa_avx512_probabilities(int m, const __m512 *x, __m512i *result)
{
    const __m512 one = apa_avx512_one();
    __m512 n[8], p[8], r[8];
    for (int i = 0; i < m; i++)
        n[i] = _mm512_roundscale_ps(x[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    for (int i = 0; i < m; i++)
        r[i] = _mm512_fnmadd_ps(n[i], one, x[i]);
    for (int i = 0; i < m; i++)
        p[i] = _mm512_fmadd_ps(_mm512_set1_ps(255.0f * APA_EXP2_3_C3), r[i], _mm512_set1_ps(255.0f * APA_EXP2_3_C2));
    for (int i = 0; i < m; i++)
        p[i] = _mm512_fmadd_ps(p[i], r[i], _mm512_set1_ps(255.0f * APA_EXP2_3_C1));
    for (int i = 0; i < m; i++)
        p[i] = _mm512_fmadd_ps(p[i], r[i], _mm512_set1_ps(255.0f));
    for (int i = 0; i < m; i++)
        p[i] = _mm512_scalef_ps(p[i], n[i]);
    for (int i = 0; i < m; i++)
        result[i] = _mm512_cvtps_epi32(p[i]);
}

/* Four registers of values 0 … 255 as the bytes of one. */
APA_INLINE __m512i apa_avx512_pack4(const __m512i *p)
{
    const __m512i low = _mm512_or_si512(p[0], _mm512_slli_epi32(p[1], 8));
    return _mm512_or_si512(low, _mm512_or_si512(_mm512_slli_epi32(p[2], 16), _mm512_slli_epi32(p[3], 24)));
}

/* sum += a (unsigned bytes) · b (signed bytes). Inline assembly because gcc 12 copies and spills the accumulators of
 * _mm512_dpbusd_epi32 in blocks like these (measured on Zen 5: 705 GOP/s with the intrinsic, 1000 with this). */
APA_INLINE void apa_avx512_dot4(__m512i *sum, __m512i a, __m512i b)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(b));
}

/* maximum[r] = the larger of it and column r of sums [keys][columns], of which n are in use; NaN is left out:
 * _mm512_max_ps(a, b) is b when either is NaN. */
APA_INLINE void apa_avx512_maxima(int n, int keys, const __m512 *sum, int columns, float *maximum)
{
    for (int r = 0; r < n; r++) {
        __m512 most = _mm512_loadu_ps(maximum + r * LANES);
        for (int j = 0; j < keys; j++)
            most = _mm512_max_ps(sum[j * columns + r], most);
        _mm512_storeu_ps(maximum + r * LANES, most);
    }
}

/* Asks for part `part` of `parts` of the rows, into the second-level cache. */
APA_INLINE void apa_avx512_prefetch(const apa_cpu_prefetch *prefetch, int part, int parts)
{
    if (prefetch == NULL)
        return;
    const int64_t from = prefetch->rows * part / parts, to = prefetch->rows * (part + 1) / parts;
    for (int set = 0; set < 2; set++)
        for (int64_t row = from; row < to; row++)
            for (int64_t byte = 0; byte < prefetch->bytes[set]; byte += 64)
                _mm_prefetch(prefetch->row[set] + row * prefetch->stride[set] + byte, _MM_HINT_T1);
}

/* Lanes that see key j of the tile. */
APA_INLINE __mmask16 apa_avx512_visible(__m512i lo, __m512i hi, int j)
{
    const __m512i key = _mm512_set1_epi32(j);
    return _mm512_mask_cmplt_epi32_mask(_mm512_cmple_epi32_mask(lo, key), key, hi);
}

#endif
