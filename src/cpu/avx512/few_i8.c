/* INT8 tiles for a few rows (decode): keys, then channels in the lanes, so that no lane is idle for want of rows.
 *
 * Scores: a key's codes are a register or two of 64 bytes; a row's codes times them leave 16 partial sums a key, and
 * the sums of 16 keys are added up crosswise in four steps. P·V: codes of V lie as [key/4][channel][4], so 16 channels
 * are a register and four P of a row, broadcast, are the other operand. Integer sums are exact in any order, and what
 * follows them is the arithmetic of i8.c: the bits are the same. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/vector.h"

#include <math.h>

#define FEW APA_CPU_FEW

/* Sums over the lanes of 16 registers, as the lanes of one: each step adds halves of two registers side by side. */
APA_INLINE __m512i across16(const __m512i *x)
{
    __m512i pair[8], quad[4], eight[2];
    for (int i = 0; i < 8; i++)
        pair[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                                   _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        quad[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(pair[2 * i], pair[2 * i + 1]),
                                   _mm512_unpackhi_epi64(pair[2 * i], pair[2 * i + 1]));
    /* every quarter of quad[i] holds partial sums of keys 4i … 4i+3 */
    for (int i = 0; i < 2; i++)
        eight[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(quad[2 * i], quad[2 * i + 1], 0x88),
                                    _mm512_shuffle_i32x4(quad[2 * i], quad[2 * i + 1], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(eight[0], eight[1], 0x88),
                            _mm512_shuffle_i32x4(eight[0], eight[1], 0xdd));
}

/* 16 keys against one row; `whole` registers of 64 codes and a rest that `tail` selects. */
APA_INLINE __m512i dots16(const uint8_t *q, const int8_t *k8, int64_t Dp, int64_t whole, __mmask64 tail)
{
    __m512i sum[16];
    for (int key = 0; key < 16; key++) {
        const int8_t *row = k8 + key * Dp;
        sum[key] = _mm512_setzero_si512();
        for (int64_t i = 0; i < whole; i++)
            apa_avx512_dot4(&sum[key], _mm512_load_si512(q + i * 64), _mm512_loadu_si512(row + i * 64));
        if (tail != 0)
            apa_avx512_dot4(&sum[key], _mm512_load_si512(q + whole * 64),
                            _mm512_maskz_loadu_epi8(tail, row + whole * 64));
    }
    return across16(sum);
}

void apa_scores_few_i8_avx512(int R, const uint8_t *q8, const int8_t *k8, const int32_t *k8_bias, const float *k_scale,
                              int64_t Dp, float *s, const apa_cpu_prefetch *prefetch)
{
    const int64_t whole = Dp / 64, Dq = (Dp + 63) / 64 * 64;
    const __mmask64 tail = Dp % 64 == 0 ? 0 : ((__mmask64)1 << Dp % 64) - 1;
    for (int key = 0; key < TILE; key += 16) {
        const __m512i bias = _mm512_loadu_si512(k8_bias + key);
        const __m512 scale = _mm512_loadu_ps(k_scale + key);
        for (int r = 0; r < R; r++) {
            const __m512i sum = _mm512_add_epi32(dots16(q8 + r * Dq, k8 + key * Dp, Dp, whole, tail), bias);
            _mm512_store_ps(s + r * TILE + key, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale));
        }
        apa_avx512_prefetch(prefetch, key / 16, TILE / 16);
    }
}

/* Keys of the tile that row r sees, 16 of them from `key` on. */
APA_INLINE __mmask16 sees(const apa_cpu_span *span, int r, int key)
{
    const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(key),
                                        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    if (span == NULL)
        return 0xffff;
    return _mm512_mask_cmplt_epi32_mask(_mm512_cmple_epi32_mask(_mm512_set1_epi32(span->lo[r]), at), at,
                                        _mm512_set1_epi32(span->hi[r]));
}

void apa_max_few_i8_avx512(int R, const float *s, const apa_cpu_span *span, float *maximum)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    _mm512_storeu_ps(maximum, lowest);
    for (int r = 0; r < R; r++) {
        __m512 most = lowest;
        for (int key = 0; key < TILE; key += 16)
            most = _mm512_mask_max_ps(most, sees(span, r, key), most, _mm512_load_ps(s + r * TILE + key));
        maximum[r] = _mm512_reduce_max_ps(most);
    }
}

void apa_softmax_few_i8_avx512(int R, const float *s, const apa_cpu_span *span, const float *maximum,
                               const float *q_scale, uint8_t *p8, int32_t *sum)
{
    _mm512_storeu_si512(sum, _mm512_setzero_si512());
    for (int r = 0; r < R; r++) {
        const __m512 most = _mm512_set1_ps(maximum[r]), scale = _mm512_set1_ps(q_scale[r]);
        __m512 x[4];
        __m512i p[4], total = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++)
            x[i] = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(s + r * TILE + 16 * i), most), scale);
        apa_avx512_probabilities(4, x, p);
        for (int i = 0; i < 4; i++) {
            p[i] = _mm512_maskz_mov_epi32(sees(span, r, 16 * i), p[i]);
            total = _mm512_add_epi32(total, p[i]);
            _mm_store_si128((__m128i *)(void *)(p8 + r * TILE + 16 * i), _mm512_cvtepi32_epi8(p[i]));
        }
        sum[r] = _mm512_reduce_add_epi32(total);
    }
}

/* 16 channels, R rows side by side. */
APA_INLINE void values16(int R, const uint8_t *p8, const int8_t *v8, int64_t Dvp, __mmask16 real, const float *v_scale,
                         const float *p_scale, int64_t Do, float *o)
{
    __m512i sum[FEW];
    for (int r = 0; r < R; r++)
        sum[r] = _mm512_setzero_si512();
    for (int quad = 0; quad < TILE / 4; quad++) {
        const __m512i codes = _mm512_maskz_loadu_epi32(real, v8 + quad * Dvp * 4);
        for (int r = 0; r < R; r++)
            apa_avx512_dot4(&sum[r], _mm512_set1_epi32(((const int32_t *)(const void *)(p8 + r * TILE))[quad]), codes);
    }
    const __m512 scale = _mm512_maskz_loadu_ps(real, v_scale);
    for (int r = 0; r < R; r++) {
        const __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r]), scale);
        _mm512_store_ps(o + r * Do, _mm512_fmadd_ps(x, _mm512_set1_ps(p_scale[r]), _mm512_load_ps(o + r * Do)));
    }
}

APA_INLINE void values(int R, const uint8_t *p8, const int8_t *v8, const float *v_scale, const float *p_scale,
                       int64_t Dvp, float *o)
{
    const int64_t Do = (Dvp + 15) / 16 * 16;
    for (int64_t c = 0; c < Dvp; c += 16)
        values16(R, p8, v8 + c * 4, Dvp, Dvp - c < 16 ? 0xff : 0xffff, v_scale + c, p_scale, Do, o + c);
}

void apa_pv_few_i8_avx512(int R, const uint8_t *p8, const int8_t *v8, const float *v_scale, const float *p_scale,
                          int64_t Dvp, float *o)
{
    switch (R) { /* so that the sums stay in registers */
    case 1:
        values(1, p8, v8, v_scale, p_scale, Dvp, o);
        break;
    case 2:
        values(2, p8, v8, v_scale, p_scale, Dvp, o);
        break;
    case 3:
        values(3, p8, v8, v_scale, p_scale, Dvp, o);
        break;
    case 4:
        values(4, p8, v8, v_scale, p_scale, Dvp, o);
        break;
    default:
        values(FEW, p8, v8, v_scale, p_scale, Dvp, o); /* rows beyond R are scratch */
    }
}
