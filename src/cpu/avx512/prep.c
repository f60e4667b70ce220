/* Widening, quantisation and rotation of rows. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/vector.h"
#include "formats/formats.h"

#include <string.h>

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

/* Lanes that are NaN or infinite: exponent all ones. */
APA_INLINE __mmask16 not_finite(__m512 x)
{
    return _mm512_fpclass_ps_mask(x, 0x99); /* quiet NaN, +inf, -inf, signalling NaN */
}

APA_INLINE __mmask16 first_lanes(int64_t n)
{
    return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1u);
}

APA_INLINE bool widen(apa_dtype dtype, const char *src, int64_t n, float *dst)
{
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 lanes = first_lanes(n - i);
        const __m512 x = load16(dtype, src, i, lanes);
        bad |= not_finite(x);
        _mm512_mask_storeu_ps(dst + i, lanes, x);
    }
    return bad == 0;
}

bool apa_widen_avx512(apa_dtype dtype, const void *src, int64_t n, float *dst)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return widen(APA_DTYPE_F16, src, n, dst);
    case APA_DTYPE_BF16:
        return widen(APA_DTYPE_BF16, src, n, dst);
    default:
        return widen(APA_DTYPE_F32, src, n, dst);
    }
}

APA_INLINE bool widen_v(apa_dtype dtype, const char *src, int64_t n, int64_t Dvp, int64_t key, float *v)
{
    __mmask16 bad = 0;
    for (int64_t c = 0; c < Dvp; c += 16) {
        const __m512 x = load16(dtype, src, c, first_lanes(n - c > 0 ? n - c : 0));
        bad |= not_finite(x);
        _mm256_store_ps(v + c / 8 * APA_CPU_V_BLOCK + key * 8, _mm512_castps512_ps256(x));
        if (c + 8 < Dvp)
            _mm256_store_ps(v + (c / 8 + 1) * APA_CPU_V_BLOCK + key * 8, _mm512_extractf32x8_ps(x, 1));
    }
    return bad == 0;
}

bool apa_widen_v_avx512(apa_dtype dtype, const void *src, int64_t n, int64_t Dvp, int64_t key, float *v)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return widen_v(APA_DTYPE_F16, src, n, Dvp, key, v);
    case APA_DTYPE_BF16:
        return widen_v(APA_DTYPE_BF16, src, n, Dvp, key, v);
    default:
        return widen_v(APA_DTYPE_F32, src, n, Dvp, key, v);
    }
}

float apa_quantise_row_avx512(const float *value, int64_t n, int8_t *code)
{
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16)
        most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_maskz_loadu_ps(first_lanes(n - i), value + i)));
    const float amax = _mm512_reduce_max_ps(most);
    const float inverse = 127.0f / amax;
    if (amax < APA_INT8_AMAX_MIN) {
        memset(code, 0, (size_t)n);
        return 0.0f;
    }
    const __m512 factor = _mm512_set1_ps(inverse);
    const __m512i limit = _mm512_set1_epi32(127);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 lanes = first_lanes(n - i);
        __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, value + i), factor));
        x = _mm512_max_epi32(_mm512_min_epi32(x, limit), _mm512_sub_epi32(_mm512_setzero_si512(), limit));
        _mm512_mask_cvtepi32_storeu_epi8(code + i, lanes, x);
    }
    return amax / 127.0f;
}

void apa_accumulate_avx512(double *sum, const float *value, int64_t n)
{
    for (int64_t i = 0; i < n; i += 8) {
        const __mmask8 lanes = n - i >= 8 ? (__mmask8)0xff : (__mmask8)((1u << (n - i)) - 1u);
        const __m512d x = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, value + i));
        _mm512_mask_storeu_pd(sum + i, lanes, _mm512_add_pd(_mm512_maskz_loadu_pd(lanes, sum + i), x));
    }
}

/* 16 channels of one key as integer codes. */
APA_INLINE __m512i codes16(const float *v, __mmask16 lanes, __m512 inverse)
{
    const __m512i limit = _mm512_set1_epi32(127);
    const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, v), inverse));
    return _mm512_max_epi32(_mm512_min_epi32(x, limit), _mm512_sub_epi32(_mm512_setzero_si512(), limit));
}

float apa_quantise_v_avx512(const float *v, int64_t Dvp, int8_t *v8, float *v_scale)
{
    __m512 most = _mm512_setzero_ps();
    const __m512i byte = _mm512_set1_epi32(0xff);
    for (int64_t c = 0; c < Dvp; c += 16) {
        const __mmask16 lanes = first_lanes(Dvp - c);
        __m512 amax = _mm512_setzero_ps();
        for (int key = 0; key < TILE; key++)
            amax = _mm512_max_ps(amax, _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes, v + key * Dvp + c)));
        most = _mm512_max_ps(most, amax);
        const __mmask16 usable = _mm512_cmp_ps_mask(amax, _mm512_set1_ps(APA_INT8_AMAX_MIN), _CMP_GE_OQ);
        const __m512 inverse = _mm512_maskz_div_ps(usable, _mm512_set1_ps(127.0f), amax);
        _mm512_mask_storeu_ps(v_scale + c, lanes, _mm512_maskz_div_ps(usable, amax, _mm512_set1_ps(127.0f)));
        for (int key = 0; key < TILE; key += 4) {
            const float *row = v + key * Dvp + c;
            __m512i packed = _mm512_and_si512(codes16(row, lanes, inverse), byte);
            for (int b = 1; b < 4; b++) {
                const __m512i code = _mm512_and_si512(codes16(row + b * Dvp, lanes, inverse), byte);
                packed = _mm512_or_si512(packed, _mm512_sllv_epi32(code, _mm512_set1_epi32(8 * b)));
            }
            _mm512_mask_storeu_epi32(v8 + (key / 4 * Dvp + c) * 4, lanes, packed);
        }
    }
    return _mm512_reduce_max_ps(most);
}

/* bf16 bits, nearest even; NaN keeps its sign and becomes quiet. */
APA_INLINE __m256i bf16_bits(__m512 x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

void apa_narrow_avx512(apa_dtype dtype, const float *value, int64_t n, void *dst)
{
    if (dtype == APA_DTYPE_F32) {
        memcpy(dst, value, (size_t)n * sizeof *value);
        return;
    }
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 lanes = first_lanes(n - i);
        const __m512 x = _mm512_maskz_loadu_ps(lanes, value + i);
        const __m256i bits =
            dtype == APA_DTYPE_F16 ? _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) : bf16_bits(x);
        _mm256_mask_storeu_epi16((uint16_t *)dst + i, lanes, bits);
    }
}

/* Butterflies of distance h inside a vector: lane i gets x[i] + x[i^h] or x[i^h] - x[i]. */
APA_INLINE __m512 butterfly(__m512 x, __m512 partner, __mmask16 upper)
{
    return _mm512_mask_sub_ps(_mm512_add_ps(x, partner), upper, partner, x);
}

APA_INLINE __m512 butterflies_within(__m512 x)
{
    x = butterfly(x, _mm512_permute_ps(x, 0xB1), 0xAAAA);
    x = butterfly(x, _mm512_permute_ps(x, 0x4E), 0xCCCC);
    x = butterfly(x, _mm512_shuffle_f32x4(x, x, 0xB1), 0xF0F0);
    return butterfly(x, _mm512_shuffle_f32x4(x, x, 0x4E), 0xFF00);
}

/* 1/sqrt(block), made of exact halves and at most one rounded 1/sqrt(2). */
APA_INLINE float hadamard_scale(int64_t block)
{
    float root = 1.0f;
    for (; block > 1; block /= 4)
        root *= block == 2 ? 0.70710678118654752f : 0.5f;
    return root;
}

void apa_hadamard_avx512(float *value, int64_t n, int64_t block)
{
    if (block < 16) {
        apa_cpu_kernels_scalar.hadamard(value, n, block);
        return;
    }
    const __m512 scale = _mm512_set1_ps(hadamard_scale(block));
    for (int64_t start = 0; start < n; start += block) {
        float *x = value + start;
        for (int64_t i = 0; i < block; i += 16)
            _mm512_storeu_ps(x + i, butterflies_within(_mm512_loadu_ps(x + i)));
        for (int64_t h = 16; h < block; h *= 2)
            for (int64_t i = 0; i < block; i += 2 * h)
                for (int64_t j = i; j < i + h; j += 16) {
                    const __m512 a = _mm512_loadu_ps(x + j), b = _mm512_loadu_ps(x + j + h);
                    _mm512_storeu_ps(x + j, _mm512_add_ps(a, b));
                    _mm512_storeu_ps(x + j + h, _mm512_sub_ps(a, b));
                }
        for (int64_t i = 0; i < block; i += 16)
            _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), scale));
    }
}

/* A key of 16·n values with the rotation over all of them (or none): nothing leaves the registers but the codes. */
APA_INLINE bool quantise_k_whole(int n, apa_dtype dtype, const char *src, const float *mean, bool rotate, int8_t *code,
                                 float *scale, int32_t *sum)
{
    __m512 x[16];
    for (int i = 0; i < n; i++) {
        x[i] = _mm512_sub_ps(load16(dtype, src, i * 16, 0xffff), _mm512_loadu_ps(mean + i * 16));
        if (rotate)
            x[i] = butterflies_within(x[i]);
    }
    for (int h = 1; rotate && h < n; h *= 2)
        for (int i = 0; i < n; i += 2 * h)
            for (int j = i; j < i + h; j++) {
                const __m512 a = x[j], b = x[j + h];
                x[j] = _mm512_add_ps(a, b);
                x[j + h] = _mm512_sub_ps(a, b);
            }
    /* Magnitudes compare as integers, and NaN and Inf are the largest: one maximum finds amax and anything not finite
     * (an input that is not stays so through differences, sums and products). */
    const __m512 root = _mm512_set1_ps(hadamard_scale(16 * n));
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < n; i++) {
        if (rotate)
            x[i] = _mm512_mul_ps(x[i], root);
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(x[i]), magnitude));
    }
    const uint32_t largest = _mm512_reduce_max_epu32(most);
    if (largest >= 0x7f800000u)
        return false;
    float amax;
    memcpy(&amax, &largest, sizeof amax);
    const bool usable = amax >= APA_INT8_AMAX_MIN;
    const __m512 inverse = _mm512_set1_ps(usable ? 127.0f / amax : 0.0f);
    const __m512i limit = _mm512_set1_epi32(127), lowest = _mm512_set1_epi32(-127);
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < n; i++) {
        __m512i c = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverse));
        c = _mm512_max_epi32(_mm512_min_epi32(c, limit), lowest);
        total = _mm512_add_epi32(total, c);
        _mm_storeu_si128((__m128i *)(code + i * 16), _mm512_cvtepi32_epi8(c));
    }
    *scale = usable ? amax / 127.0f : 0.0f;
    *sum = _mm512_reduce_add_epi32(total);
    return true;
}

APA_INLINE bool quantise_k_typed(apa_dtype dtype, const char *src, int64_t D, const float *mean, bool rotate,
                                 int8_t *code, float *scale, int32_t *sum)
{
    if (D == 64)
        return quantise_k_whole(4, dtype, src, mean, rotate, code, scale, sum);
    if (D == 128)
        return quantise_k_whole(8, dtype, src, mean, rotate, code, scale, sum);
    return quantise_k_whole(16, dtype, src, mean, rotate, code, scale, sum);
}

/* Any D and block, through memory. */
static bool quantise_k_any(apa_dtype dtype, const void *src, int64_t D, const float *mean, int64_t block, int8_t *code,
                           float *scale, int32_t *sum)
{
    float row[1024];
    if (!apa_widen_avx512(dtype, src, D, row))
        return false;
    for (int64_t d = 0; d < D; d++)
        row[d] -= mean[d];
    if (block > 1)
        apa_hadamard_avx512(row, D, block);
    if (!apa_widen_avx512(APA_DTYPE_F32, row, D, row))
        return false;
    *scale = apa_quantise_row_avx512(row, D, code);
    *sum = 0;
    for (int64_t d = 0; d < D; d++)
        *sum += code[d];
    return true;
}

bool apa_quantise_k_avx512(apa_dtype dtype, const void *src, int64_t D, const float *mean, int64_t block, int8_t *code,
                           float *scale, int32_t *sum)
{
    if ((D != 64 && D != 128 && D != 256) || (block != 1 && block != D))
        return quantise_k_any(dtype, src, D, mean, block, code, scale, sum);
    if (dtype == APA_DTYPE_F16)
        return quantise_k_typed(APA_DTYPE_F16, src, D, mean, block > 1, code, scale, sum);
    if (dtype == APA_DTYPE_BF16)
        return quantise_k_typed(APA_DTYPE_BF16, src, D, mean, block > 1, code, scale, sum);
    return quantise_k_typed(APA_DTYPE_F32, src, D, mean, block > 1, code, scale, sum);
}
