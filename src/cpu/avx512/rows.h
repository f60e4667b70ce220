/* Reading and rotating rows, 16 values at a time: shared by the prep kernels of this level. */
#ifndef APA_CPU_AVX512_ROWS_H
#define APA_CPU_AVX512_ROWS_H

#include "cpu/avx512/vector.h"

/* Up to 16 elements of a row as f32; lanes past `lanes` are 0 and their memory is not touched. */
APA_INLINE __m512 load16(apa_dtype dtype, const char *src, int64_t at, __mmask16 lanes)
{
    if (dtype == APA_DTYPE_F32)
        return _mm512_maskz_loadu_ps(lanes, src + at * 4);
    const __m256i bits = _mm256_maskz_loadu_epi16(lanes, src + at * 2);
    if (dtype == APA_DTYPE_F16)
        return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* Eight of them. */
APA_INLINE __m256 load8(apa_dtype dtype, const char *src, int64_t at, __mmask8 lanes)
{
    if (dtype == APA_DTYPE_F32)
        return _mm256_maskz_loadu_ps(lanes, src + at * 4);
    const __m128i bits = _mm_maskz_loadu_epi16(lanes, src + at * 2);
    if (dtype == APA_DTYPE_F16)
        return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/* Lanes that are NaN or infinite: exponent all ones. */
APA_INLINE __mmask16 not_finite(__m512 x)
{
    return _mm512_fpclass_ps_mask(x, 0x99); /* quiet NaN, +inf, -inf, signalling NaN */
}

APA_INLINE __mmask16 first_lanes(int64_t n)
{
    return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1u);
}

/* Butterflies of distance 1, 2, 4 and 8 inside each of m vectors: lane i gets x[i] + x[i^h], or x[i^h] - x[i] where bit
 * h of i is set. One rounding either way, so a multiply-add by ±1 gives the bits of the sum and the difference. */
APA_INLINE void butterflies_within(int m, __m512 *x)
{
    const __m512 h1 = _mm512_setr_ps(1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1);
    const __m512 h2 = _mm512_setr_ps(1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1);
    const __m512 h4 = _mm512_setr_ps(1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1);
    const __m512 h8 = _mm512_setr_ps(1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1);
    for (int i = 0; i < m; i++)
        x[i] = _mm512_fmadd_ps(x[i], h1, _mm512_permute_ps(x[i], 0xB1));
    for (int i = 0; i < m; i++)
        x[i] = _mm512_fmadd_ps(x[i], h2, _mm512_permute_ps(x[i], 0x4E));
    for (int i = 0; i < m; i++)
        x[i] = _mm512_fmadd_ps(x[i], h4, _mm512_shuffle_f32x4(x[i], x[i], 0xB1));
    for (int i = 0; i < m; i++)
        x[i] = _mm512_fmadd_ps(x[i], h8, _mm512_shuffle_f32x4(x[i], x[i], 0x4E));
}

/* 1/sqrt(block), made of exact halves and at most one rounded 1/sqrt(2). */
APA_INLINE float hadamard_scale(int64_t block)
{
    float root = 1.0f;
    for (; block > 1; block /= 4)
        root *= block == 2 ? 0.70710678118654752f : 0.5f;
    return root;
}

/* Asks for bytes from … from+bytes-1 of a row that will be read soon; ahead NULL: nothing to ask for. A tile's requests
 * are spread over the work on the tile before: in one go they fill the queue of outstanding misses and stall. */
APA_INLINE void ask_for_part(const void *const *ahead, int i, int64_t from, int64_t bytes)
{
    for (int64_t byte = from; ahead != NULL && byte < from + bytes; byte += 64)
        _mm_prefetch((const char *)ahead[i] + byte, _MM_HINT_T0);
}

#endif
