/* V of a tile: per channel the maximum over its keys, then codes, four keys to a 32-bit word.
 *
 * Two passes over rows that the first one leaves in the first-level cache; no copy of the tile is made. 16 channels at
 * a time. Rows with a NaN or Inf are found first and read as zeros. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/rows.h"
#include "formats/formats.h"

#include <string.h>

/* Largest magnitudes of a strip of 32 channels from c on, as the bits of two registers of f32: magnitudes compare as
 * integers, and NaN and Inf are the largest. */
APA_INLINE void strip_maxima(apa_dtype dtype, const void *const *rows, int n, int64_t c, int64_t Dv,
                             const void *const *ahead, __m512i *amax)
{
    const int64_t left = Dv - c < 32 ? Dv - c : 32;
    const int64_t size = dtype == APA_DTYPE_F32 ? 4 : 2;
    if (dtype == APA_DTYPE_F32) {
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        amax[0] = amax[1] = _mm512_setzero_si512();
        for (int i = 0; i < n; i++) {
            ask_for_part(ahead, i, c * size, left * size);
            for (int h = 0; h < 2; h++) {
                const __m512 x = load16(dtype, rows[i], c + 16 * h, first_lanes(left > 16 * h ? left - 16 * h : 0));
                amax[h] = _mm512_max_epu32(amax[h], _mm512_and_si512(_mm512_castps_si512(x), magnitude));
            }
        }
        return;
    }
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    const __mmask32 lanes = left == 32 ? 0xffffffffu : (1u << left) - 1u;
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < n; i++) {
        ask_for_part(ahead, i, c * size, left * size);
        const __m512i x = _mm512_maskz_loadu_epi16(lanes, (const uint16_t *)rows[i] + c);
        most = _mm512_max_epu16(most, _mm512_and_si512(x, magnitude));
    }
    uint16_t bits[32] __attribute__((aligned(64)));
    _mm512_store_si512(bits, most);
    for (int h = 0; h < 2; h++)
        amax[h] = _mm512_castps_si512(load16(dtype, (const char *)bits, 16 * h, 0xffff));
}

/* Codes of 16 channels of keys 4·quad … 4·quad+3 as words; rows past n are zeros. |x| <= amax, so nothing is left to
 * clamp (cpu/avx512/prep_k.c). */
APA_INLINE __m512i quad_codes(apa_dtype dtype, const void *const *rows, int n, int64_t c, __mmask16 lanes,
                              __m512 inverse)
{
    __m512i code[4];
    for (int j = 0; j < 4; j++) {
        const __m512 x = j < n ? load16(dtype, rows[j], c, lanes) : _mm512_setzero_ps();
        code[j] = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
    }
    /* Each 128-bit part: four channels of key 0, then of keys 1, 2 and 3; the shuffle transposes them. */
    const __m512i packed =
        _mm512_packs_epi16(_mm512_packs_epi32(code[0], code[1]), _mm512_packs_epi32(code[2], code[3]));
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(packed, _mm512_broadcast_i32x4(order));
}

/* 16 channels of finite rows. Whole lines go past the caches, as K's codes do (cpu/avx512/prep_k.c). */
APA_INLINE void quantise_columns(apa_dtype dtype, const void *const *rows, int n, int64_t c, int64_t Dv, __m512 amax,
                                 int8_t *v8, float *v_scale)
{
    const int64_t Dvp = (Dv + 7) / 8 * 8;
    const __mmask16 stored = first_lanes(Dvp - c), lanes = first_lanes(Dv - c > 0 ? Dv - c : 0);
    const __mmask16 usable = _mm512_cmp_ps_mask(amax, _mm512_set1_ps(APA_INT8_AMAX_MIN), _CMP_GE_OQ);
    const __m512 inverse = _mm512_maskz_div_ps(usable, _mm512_set1_ps(127.0f), amax);
    _mm512_mask_storeu_ps(v_scale + c, stored, _mm512_maskz_div_ps(usable, amax, _mm512_set1_ps(127.0f)));
    const bool lines = Dvp % 16 == 0;
    int quad = 0;
    for (; quad < n / 4 && lines; quad++)
        _mm512_stream_si512((__m512i *)(void *)(v8 + (quad * Dvp + c) * 4),
                            quad_codes(dtype, rows + 4 * quad, 4, c, lanes, inverse));
    for (; quad < n / 4; quad++)
        _mm512_mask_storeu_epi32(v8 + (quad * Dvp + c) * 4, stored,
                                 quad_codes(dtype, rows + 4 * quad, 4, c, lanes, inverse));
    for (; quad < TILE / 4; quad++)
        _mm512_mask_storeu_epi32(v8 + (quad * Dvp + c) * 4, stored,
                                 quad_codes(dtype, rows + 4 * quad, n - 4 * quad, c, lanes, inverse));
}

/* All channels; false, with nothing to be relied on, when a row is not finite. */
APA_INLINE bool quantise_finite(apa_dtype dtype, const void *const *rows, int n, int64_t Dv, const void *const *ahead,
                                int8_t *v8, float *v_scale, float *largest)
{
    const int64_t Dvp = (Dv + 7) / 8 * 8;
    __m512i most = _mm512_setzero_si512();
    for (int64_t c = 0; c < Dvp; c += 32) {
        __m512i amax[2];
        strip_maxima(dtype, rows, n, c, Dv, ahead, amax);
        most = _mm512_max_epu32(most, _mm512_max_epu32(amax[0], amax[1]));
        quantise_columns(dtype, rows, n, c, Dv, _mm512_castsi512_ps(amax[0]), v8, v_scale);
        if (c + 16 < Dvp)
            quantise_columns(dtype, rows, n, c + 16, Dv, _mm512_castsi512_ps(amax[1]), v8, v_scale);
    }
    _mm_sfence(); /* other threads see the codes in the order of later stores */
    const uint32_t bits = _mm512_reduce_max_epu32(most);
    memcpy(largest, &bits, sizeof *largest);
    return bits < 0x7f800000u;
}

APA_INLINE bool quantise_v(apa_dtype dtype, const void *const *rows, int n, int64_t Dv, const void *const *ahead,
                           int8_t *v8, float *v_scale, float *largest)
{
    static const uint64_t zeros[1024 * 4 / 8] = {0};
    if (quantise_finite(dtype, rows, n, Dv, ahead, v8, v_scale, largest))
        return true;
    const void *cleaned[TILE];
    for (int i = 0; i < n; i++) {
        __mmask16 bad = 0;
        for (int64_t c = 0; c < Dv; c += 16)
            bad |= not_finite(load16(dtype, rows[i], c, first_lanes(Dv - c)));
        cleaned[i] = bad == 0 ? rows[i] : zeros;
    }
    quantise_finite(dtype, cleaned, n, Dv, NULL, v8, v_scale, largest);
    return false;
}

bool apa_quantise_v_avx512(apa_dtype dtype, const void *const *rows, int n, int64_t Dv, const void *const *ahead,
                           int8_t *v8, float *v_scale, float *largest)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return quantise_v(APA_DTYPE_F16, rows, n, Dv, ahead, v8, v_scale, largest);
    case APA_DTYPE_BF16:
        return quantise_v(APA_DTYPE_BF16, rows, n, Dv, ahead, v8, v_scale, largest);
    default:
        return quantise_v(APA_DTYPE_F32, rows, n, Dv, ahead, v8, v_scale, largest);
    }
}
