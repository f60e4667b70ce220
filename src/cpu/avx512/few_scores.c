/* Scores of exact tiles for a few rows (decode): keys in the lanes.
 *
 * With rows in the lanes a tile costs the same for one row as for sixteen. Here pieces of K are turned in registers, so
 * that a lane is a key and every row costs one multiply-add a key vector. The arithmetic of a (row, key) is what it is
 * there: one chain of multiply-adds over rising d.
 *
 * 32 keys at a time over all of d: their chains, two for each row, stay in registers, and their memory is read in
 * order, as it was asked for. A step takes 32 bytes of each key, 16 values of f16 or bf16 or 8 of f32. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/turn.h"
#include "cpu/few_keys.h"

/* 16 values of 16 bits of 32 keys: x[e] and x[8 + e] hold value e in their parts 0 and 2, value 8 + e in 1 and 3. f16:
 * x[e] has keys 0 … 15, as widening wants 16 keys side by side. bf16 is widened by moves inside parts, which take the
 * lower and the upper halves of parts: keys lie so that these are 0 … 15 and 16 … 31. */
APA_INLINE void turn_words(apa_dtype dtype, const void *const *keys, int64_t at, __m512i *x)
{
    const bool f16 = dtype == APA_DTYPE_F16;
    for (int i = 0; i < 8; i++) {
        const int key = f16 || i < 4 ? i : 12 + i;
        x[i] = load_two(keys + key, f16 ? 8 : 4, at);
        x[8 + i] = load_two(keys + key + (f16 ? 16 : 8), f16 ? 8 : 4, at);
    }
    turn_words_in_parts(x);
    turn_words_in_parts(x + 8);
}

/* Value e of keys 0 … 15 and 16 … 31, widened. */
APA_INLINE void turned(apa_dtype dtype, const __m512i *x, int e, __m512 *low, __m512 *high)
{
    if (dtype == APA_DTYPE_F32) {
        *low = _mm512_castsi512_ps(turned_dword(x, 0, e));
        *high = _mm512_castsi512_ps(turned_dword(x, 1, e));
        return;
    }
    const __m512i both =
        e < 8 ? _mm512_shuffle_i64x2(x[e], x[8 + e], 0x88) : _mm512_shuffle_i64x2(x[e - 8], x[e], 0xdd);
    if (dtype == APA_DTYPE_F16) {
        *low = _mm512_cvtph_ps(_mm512_castsi512_si256(both));
        *high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
    } else {
        *low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), both));
        *high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), both));
    }
}

/* One step: `at` bytes into the keys, q at the step's first value. */
APA_INLINE void scores_step(int R, apa_dtype dtype, const void *const *keys, int64_t at, const float *q,
                            __m512 (*chain)[APA_CPU_FEW])
{
    const int values = dtype == APA_DTYPE_F32 ? 8 : 16;
    __m512i x[16];
    if (dtype == APA_DTYPE_F32)
        turn_dwords(keys, at, x);
    else
        turn_words(dtype, keys, at, x);
    APA_UNROLL
    for (int e = 0; e < values; e++) {
        __m512 low, high;
        turned(dtype, x, e, &low, &high);
        for (int r = 0; r < R; r++) {
            const __m512 query = _mm512_set1_ps(q[e * APA_CPU_FEW + r]);
            chain[0][r] = _mm512_fmadd_ps(low, query, chain[0][r]);
            chain[1][r] = _mm512_fmadd_ps(high, query, chain[1][r]);
        }
    }
}

APA_INLINE void scores_keys(int R, apa_dtype dtype, const void *const *keys, int64_t D, apa_cpu_asking *asking,
                            apa_cpu_asking *again, const float *q, float *s)
{
    const int64_t size = dtype == APA_DTYPE_F32 ? 4 : 2, bytes = D * size, whole = bytes / KEY_STEP * KEY_STEP;
    __m512 chain[2][APA_CPU_FEW];
    for (int r = 0; r < R; r++)
        chain[0][r] = chain[1][r] = _mm512_setzero_ps();
    tail_rows tails;
    for (int64_t at = 0; at < bytes; at += KEY_STEP) {
        apa_cpu_ask(asking);
        apa_cpu_ask(again);
        if (at == whole)
            take_tails(keys, at, bytes - at, &tails);
        scores_step(R, dtype, at < whole ? keys : tails.row, at < whole ? at : 0, q + at / size * APA_CPU_FEW, chain);
    }
    for (int r = 0; r < R; r++) {
        _mm512_store_ps(s + r * TILE, chain[0][r]);
        _mm512_store_ps(s + r * TILE + LANES, chain[1][r]);
    }
}

APA_INLINE void scores_rows(int R, apa_dtype dtype, const void *const *keys, int64_t D, const apa_cpu_ahead *ahead,
                            const float *q, float *s)
{
    const int64_t bytes = D * (dtype == APA_DTYPE_F32 ? 4 : 2), steps = (bytes + KEY_STEP - 1) / KEY_STEP;
    apa_cpu_asking asking = apa_cpu_asking_over(ahead, steps * (TILE / KEYS));
    /* Where the arithmetic is faster than memory, requests seem to get lost, and two tiles of f32 are more than the
     * first-level cache holds: half a tile ahead keys are asked for once more, which costs little. */
    const apa_cpu_ahead half = {keys + KEYS, KEYS, bytes};
    apa_cpu_asking again = apa_cpu_asking_over(ahead != NULL ? &half : NULL, steps);
    for (int key = 0; key < TILE; key += KEYS) {
        scores_keys(R, dtype, keys + key, D, &asking, &again, q, s + key);
        again.ahead = NULL;
    }
}

void apa_scores_few_avx512(apa_dtype dtype, const void *const *keys, int n, int64_t D, const apa_cpu_ahead *ahead,
                           int R, const float *q, float *s)
{
    scores_of_tile(dtype, keys, n, D, ahead, R, q, s);
}
