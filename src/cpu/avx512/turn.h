/* Turning pieces of rows in registers: shared by the kernels of few rows and of changed scores. */
#ifndef APA_CPU_AVX512_TURN_H
#define APA_CPU_AVX512_TURN_H

#include "cpu/avx512/vector.h"
#include "cpu/unroll.h"

/* x[i] lane j → x[j] lane i. */
APA_INLINE void transpose16(__m512 *x)
{
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; h++) {
            const __m512d a = _mm512_castps_pd(t[i + h]), b = _mm512_castps_pd(t[i + 2 + h]);
            x[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            x[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    /* x[4q + e], part p: keys 4q … 4q+3 at d = 4p + e. */
    for (int e = 0; e < 4; e++) {
        const __m512 low01 = _mm512_shuffle_f32x4(x[e], x[4 + e], 0x88);
        const __m512 high01 = _mm512_shuffle_f32x4(x[e], x[4 + e], 0xdd);
        const __m512 low23 = _mm512_shuffle_f32x4(x[8 + e], x[12 + e], 0x88);
        const __m512 high23 = _mm512_shuffle_f32x4(x[8 + e], x[12 + e], 0xdd);
        t[e] = _mm512_shuffle_f32x4(low01, low23, 0x88);
        t[8 + e] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
        t[4 + e] = _mm512_shuffle_f32x4(high01, high23, 0x88);
        t[12 + e] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
    for (int i = 0; i < 16; i++)
        x[i] = t[i];
}

/* ---- keys of few rows: 32 bytes of each of 32 rows ----
 *
 * A register holds 32 bytes of two rows, and is turned inside its 128-bit parts, the cheapest moves there are (four a
 * cycle on Zen 5, where moves across parts are two). One move across parts for each 64 bytes then puts values of 16 or
 * 32 rows side by side. */

/* 32 bytes of two rows. The second comes in as a masked broadcast, which costs a load and no move. */
APA_INLINE __m512i load_two(const void *const *row, int second, int64_t at)
{
    const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)((const char *)row[0] + at));
    const __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)((const char *)row[second] + at));
    return _mm512_mask_broadcast_i64x4(_mm512_castsi256_si512(low), 0xf0, high);
}

/* Parts of eight registers, 8 words each: x[i] word j → x[j] word i. */
APA_INLINE void turn_words_in_parts(__m512i *x)
{
    __m512i t[8];
    APA_UNROLL
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_epi16(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi16(x[i], x[i + 1]);
    }
    APA_UNROLL
    for (int i = 0; i < 4; i++) {
        const int from = i / 2 * 4 + i % 2;
        x[2 * i] = _mm512_unpacklo_epi32(t[from], t[from + 2]);
        x[2 * i + 1] = _mm512_unpackhi_epi32(t[from], t[from + 2]);
    }
    APA_UNROLL
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm512_unpacklo_epi64(x[i], x[i + 4]);
        t[2 * i + 1] = _mm512_unpackhi_epi64(x[i], x[i + 4]);
    }
    APA_UNROLL
    for (int i = 0; i < 8; i++)
        x[i] = t[i];
}

/* Parts of four registers, 4 words of 32 bits each: x[i] word j → x[j] word i. */
APA_INLINE void turn_dwords_in_parts(__m512i *x)
{
    __m512i t[4];
    t[0] = _mm512_unpacklo_epi32(x[0], x[1]);
    t[1] = _mm512_unpackhi_epi32(x[0], x[1]);
    t[2] = _mm512_unpacklo_epi32(x[2], x[3]);
    t[3] = _mm512_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi64(t[0], t[2]);
    x[1] = _mm512_unpackhi_epi64(t[0], t[2]);
    x[2] = _mm512_unpacklo_epi64(t[1], t[3]);
    x[3] = _mm512_unpackhi_epi64(t[1], t[3]);
}

/* 8 values of 32 bits of 32 rows: x[8g + e] and x[8g + 4 + e] hold value e of rows 16g … in their parts 0 and 2, and
 * value 4 + e in their parts 1 and 3. */
APA_INLINE void turn_dwords(const void *const *row, int64_t at, __m512i *x)
{
    APA_UNROLL
    for (int i = 0; i < 16; i += 4) {
        APA_UNROLL
        for (int j = 0; j < 4; j++)
            x[i + j] = load_two(row + 2 * i + j, 4, at);
        turn_dwords_in_parts(x + i);
    }
}

/* Value e (0 … 7) of rows 16g … 16g+15. */
APA_INLINE __m512i turned_dword(const __m512i *x, int g, int e)
{
    if (e < 4)
        return _mm512_shuffle_i32x4(x[8 * g + e], x[8 * g + 4 + e], 0x88);
    return _mm512_shuffle_i32x4(x[8 * g + e - 4], x[8 * g + e], 0xdd);
}

#endif
