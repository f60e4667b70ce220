/* Eight floats or integers of AVX2, under the names that cpu/lanes8 is written in; cpu/neon/vector.h has the same
 * names.
 *
 * A register of the engine (16 rows) is two of these. Masks are all ones or all zeros in each lane. */
#ifndef APA_CPU_AVX2_VECTOR_H
#define APA_CPU_AVX2_VECTOR_H

#include "cpu/exp2.h"
#include "cpu/kernels.h"

#include <immintrin.h>

#define APA_INLINE static inline __attribute__((always_inline))
#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define EIGHT 8

typedef __m256 v8f;
typedef __m256i v8i;
typedef __m256 v8m;

APA_INLINE v8f v8f_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

APA_INLINE void v8f_store(float *p, v8f x)
{
    _mm256_storeu_ps(p, x);
}

APA_INLINE v8f v8f_set(float x)
{
    return _mm256_set1_ps(x);
}

APA_INLINE v8f v8f_add(v8f a, v8f b)
{
    return _mm256_add_ps(a, b);
}

APA_INLINE v8f v8f_sub(v8f a, v8f b)
{
    return _mm256_sub_ps(a, b);
}

APA_INLINE v8f v8f_mul(v8f a, v8f b)
{
    return _mm256_mul_ps(a, b);
}

APA_INLINE v8f v8f_div(v8f a, v8f b)
{
    return _mm256_div_ps(a, b);
}

/* a·b + c and a·b - c, rounded once. */
APA_INLINE v8f v8f_fma(v8f a, v8f b, v8f c)
{
    return _mm256_fmadd_ps(a, b, c);
}

APA_INLINE v8f v8f_fms(v8f a, v8f b, v8f c)
{
    return _mm256_fmsub_ps(a, b, c);
}

/* The larger; a where x is NaN. vmaxps gives its second operand when either is NaN. */
APA_INLINE v8f v8f_max_drop_nan(v8f a, v8f x)
{
    return _mm256_max_ps(x, a);
}

/* The larger; NaN where x is. */
APA_INLINE v8f v8f_max_keep_nan(v8f a, v8f x)
{
    return _mm256_max_ps(a, x);
}

/* The smaller; NaN where x is. */
APA_INLINE v8f v8f_min_keep_nan(v8f a, v8f x)
{
    return _mm256_min_ps(a, x);
}

APA_INLINE v8f v8f_abs(v8f x)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

APA_INLINE v8m v8f_gt(v8f a, v8f b)
{
    return _mm256_cmp_ps(a, b, _CMP_GT_OQ);
}

APA_INLINE v8m v8f_ge(v8f a, v8f b)
{
    return _mm256_cmp_ps(a, b, _CMP_GE_OQ);
}

/* True where either is NaN. */
APA_INLINE v8m v8f_ne(v8f a, v8f b)
{
    return _mm256_cmp_ps(a, b, _CMP_NEQ_UQ);
}

APA_INLINE v8f v8f_select(v8m mask, v8f yes, v8f no)
{
    return _mm256_blendv_ps(no, yes, mask);
}

/* x where the mask says so, 0 elsewhere, whatever x is there. */
APA_INLINE v8f v8f_keep(v8m mask, v8f x)
{
    return _mm256_and_ps(mask, x);
}

/* One bit a lane. */
APA_INLINE unsigned v8m_bits(v8m mask)
{
    return (unsigned)_mm256_movemask_ps(mask);
}

APA_INLINE v8m v8m_or(v8m a, v8m b)
{
    return _mm256_or_ps(a, b);
}

APA_INLINE v8m v8m_and(v8m a, v8m b)
{
    return _mm256_and_ps(a, b);
}

APA_INLINE v8m v8m_none(void)
{
    return _mm256_setzero_ps();
}

/* Lanes that are NaN or infinite: |x| is not under infinity. */
APA_INLINE v8m v8f_not_finite(v8f x)
{
    return _mm256_cmp_ps(v8f_abs(x), _mm256_set1_ps(__builtin_inff()), _CMP_NLT_UQ);
}

APA_INLINE float v8f_reduce_max(v8f x)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

APA_INLINE v8i v8i_load(const int32_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

APA_INLINE void v8i_store(int32_t *p, v8i x)
{
    _mm256_storeu_si256((__m256i *)p, x);
}

APA_INLINE v8i v8i_set(int32_t x)
{
    return _mm256_set1_epi32(x);
}

APA_INLINE v8i v8i_add(v8i a, v8i b)
{
    return _mm256_add_epi32(a, b);
}

APA_INLINE v8i v8i_or(v8i a, v8i b)
{
    return _mm256_or_si256(a, b);
}

APA_INLINE v8i v8i_min(v8i a, v8i b)
{
    return _mm256_min_epi32(a, b);
}

APA_INLINE v8i v8i_max(v8i a, v8i b)
{
    return _mm256_max_epi32(a, b);
}

APA_INLINE v8i v8i_left(v8i x, int bits)
{
    return _mm256_slli_epi32(x, bits);
}

APA_INLINE v8m v8i_gt(v8i a, v8i b)
{
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b));
}

APA_INLINE v8i v8i_keep(v8m mask, v8i x)
{
    return _mm256_and_si256(_mm256_castps_si256(mask), x);
}

/* The lowest byte of each lane. */
APA_INLINE v8i v8i_low_byte(v8i x)
{
    return _mm256_and_si256(x, _mm256_set1_epi32(0xff));
}

APA_INLINE v8f v8f_from_bits(v8i x)
{
    return _mm256_castsi256_ps(x);
}

APA_INLINE v8i v8i_from_bits(v8f x)
{
    return _mm256_castps_si256(x);
}

APA_INLINE v8f v8f_from_int(v8i x)
{
    return _mm256_cvtepi32_ps(x);
}

/* Rounds to the nearest, ties to even. */
APA_INLINE v8i v8i_from_float(v8f x)
{
    return _mm256_cvtps_epi32(x);
}

APA_INLINE int32_t v8i_reduce_add(v8i x)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

/* Sums of the four unsigned bytes of each lane. */
APA_INLINE v8i v8i_byte_sums(v8i x)
{
    const __m256i pairs = _mm256_maddubs_epi16(x, _mm256_set1_epi8(1));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

/* Eight integers in -128 … 127 as bytes. */
APA_INLINE void v8i_store_bytes(int8_t *p, v8i x)
{
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}

/* Eight 16-bit numbers as f32, and back (nearest even; a NaN becomes quiet and keeps the top of its payload). */
APA_INLINE v8f v8f_load_f16(const void *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
}

APA_INLINE v8f v8f_load_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

APA_INLINE void v8f_store_f16(void *p, v8f x)
{
    _mm_storeu_si128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

APA_INLINE void v8f_store_bf16(void *p, v8f x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    _mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

/* sum[0 … 7] += x, in double. */
APA_INLINE void v8f_accumulate(double *sum, v8f x)
{
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    _mm256_storeu_pd(sum, _mm256_add_pd(_mm256_loadu_pd(sum), low));
    _mm256_storeu_pd(sum + 4, _mm256_add_pd(_mm256_loadu_pd(sum + 4), high));
}

/* Butterflies of distance 1, 2 and 4: lane i gets x[i] + x[i^h], or x[i^h] - x[i] where i has the bit h. */
APA_INLINE v8f v8f_butterfly_1(v8f x)
{
    const v8f partner = _mm256_permute_ps(x, 0xB1);
    return _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), 0xAA);
}

APA_INLINE v8f v8f_butterfly_2(v8f x)
{
    const v8f partner = _mm256_permute_ps(x, 0x4E);
    return _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), 0xCC);
}

APA_INLINE v8f v8f_butterfly_4(v8f x)
{
    const v8f partner = _mm256_permute2f128_ps(x, x, 0x01);
    return _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), 0xF0);
}

APA_INLINE void v8_prefetch(const void *p)
{
    _mm_prefetch(p, _MM_HINT_T1);
}

#endif
