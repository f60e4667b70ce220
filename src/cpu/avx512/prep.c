/* Widening, rounding, quantisation and rotation of single rows. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/rows.h"
#include "formats/formats.h"

#include <string.h>

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

void apa_hadamard_avx512(float *value, int64_t n, int64_t block)
{
    if (block < 16) {
        apa_cpu_kernels_scalar.hadamard(value, n, block);
        return;
    }
    const __m512 scale = _mm512_set1_ps(hadamard_scale(block));
    for (int64_t start = 0; start < n; start += block) {
        float *x = value + start;
        for (int64_t i = 0; i < block; i += 16) {
            __m512 part = _mm512_loadu_ps(x + i);
            butterflies_within(1, &part);
            _mm512_storeu_ps(x + i, part);
        }
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
