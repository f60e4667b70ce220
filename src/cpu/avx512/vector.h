/* Small AVX-512 helpers shared by the kernels of this level. */
#ifndef APA_CPU_AVX512_VECTOR_H
#define APA_CPU_AVX512_VECTOR_H

#include "cpu/exp2.h"
#include "cpu/kernels.h"

#include <immintrin.h>

#define APA_INLINE static inline __attribute__((always_inline))
#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE

/* 2^x to within about an ulp; 0 for x <= -200, NaN for NaN and +inf.
 * _mm512_max_ps(a, b) returns b when either is NaN: the order of the operands keeps NaN. */
APA_INLINE __m512 apa_avx512_exp2(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(APA_EXP2_LOWEST), x);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(APA_EXP2_6_C6), r, _mm512_set1_ps(APA_EXP2_6_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(APA_EXP2_6_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(APA_EXP2_6_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(APA_EXP2_6_C2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(APA_EXP2_6_C1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
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
