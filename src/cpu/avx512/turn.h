/* Turning 16 x 16 pieces: shared by the kernels of few rows. */
#ifndef APA_CPU_AVX512_TURN_H
#define APA_CPU_AVX512_TURN_H

#include "cpu/avx512/vector.h"

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

/* 16 rows of 32 16-bit values: x[8o + e], part p, becomes rows 8o … 8o+7 at d = 8p + e. */
APA_INLINE void transpose8_words(__m512i *x)
{
    __m512i t[16];
    for (int o = 0; o < 16; o += 8) {
        for (int i = 0; i < 8; i += 2) {
            t[o + i] = _mm512_unpacklo_epi16(x[o + i], x[o + i + 1]);
            t[o + i + 1] = _mm512_unpackhi_epi16(x[o + i], x[o + i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int h = 0; h < 2; h++) {
                x[o + i + 2 * h] = _mm512_unpacklo_epi32(t[o + i + h], t[o + i + 2 + h]);
                x[o + i + 2 * h + 1] = _mm512_unpackhi_epi32(t[o + i + h], t[o + i + 2 + h]);
            }
        for (int i = 0; i < 4; i++) {
            t[o + 2 * i] = _mm512_unpacklo_epi64(x[o + i], x[o + i + 4]);
            t[o + 2 * i + 1] = _mm512_unpackhi_epi64(x[o + i], x[o + i + 4]);
        }
    }
    for (int i = 0; i < 16; i++)
        x[i] = t[i];
}

#endif
