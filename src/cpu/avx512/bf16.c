/* BF16 scores by the BF16 dot product, for CPUs of this level that have it (Zen 4 and later, Cooper Lake, Sapphire
 * Rapids): vdpbf16ps multiplies two pairs and adds to FP32, twice the work of a multiply-add (measured on Zen 5: 552
 * against 276 GFLOP/s).
 *
 * Products of BF16 values are exact in FP32; a pair joins the sum in two roundings, as two multiply-adds would. What
 * differs is that inputs and sums under 2^-126 count as zero, whatever MXCSR says: a score moves by less than D·2^-126,
 * which no exponential notices. P is not BF16, so P·V stays with the FP32 kernels. Keys are read as they lie in their
 * tensor: nothing is widened.
 *
 * Inline assembly, so that the file needs no flag of its own and sums stay in registers (see cpu/avx512/vector.h). */
#include "cpu/ahead.h"
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/rows.h"
#include "cpu/avx512/turn.h"

#include <math.h>
#include <string.h>

#define KEYS 8
#define LARGEST_DIM 1024

APA_INLINE void dot2(__m512 *sum, __m512i a, __m512i b)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(b));
}

APA_INLINE __m512i broadcast2(const void *pair)
{
    int32_t word;
    memcpy(&word, pair, sizeof word);
    return _mm512_set1_epi32(word);
}

/* ---- rows in the lanes ---- */

APA_INLINE void scores_panel(int n, const uint32_t *const *q, const uint16_t *k, int64_t Dp, float *s, float *maximum,
                             const apa_cpu_prefetch *prefetch)
{
    for (int r = 0; r < n && maximum != NULL; r++)
        _mm512_storeu_ps(maximum + r * LANES, _mm512_set1_ps(-INFINITY));
    for (int key = 0; key < TILE; key += KEYS) {
        __m512 sum[KEYS][APA_CPU_PANEL_F32];
        apa_avx512_prefetch(prefetch, key / KEYS, TILE / KEYS);
        for (int j = 0; j < KEYS; j++)
            for (int r = 0; r < n; r++)
                sum[j][r] = _mm512_setzero_ps();
        for (int64_t d = 0; d < Dp; d += 2) {
            __m512i row[APA_CPU_PANEL_F32];
            for (int r = 0; r < n; r++)
                row[r] = _mm512_load_si512(q[r] + d / 2 * LANES);
            for (int j = 0; j < KEYS; j++) {
                const __m512i pair = broadcast2(k + (key + j) * Dp + d);
                for (int r = 0; r < n; r++)
                    dot2(&sum[j][r], row[r], pair);
            }
        }
        for (int j = 0; j < KEYS; j++)
            for (int r = 0; r < n; r++)
                _mm512_store_ps(s + ((key + j) * n + r) * LANES, sum[j][r]);
        if (maximum != NULL)
            apa_avx512_maxima(n, KEYS, &sum[0][0], APA_CPU_PANEL_F32, maximum);
    }
}

void apa_scores_bf16_avx512(int n, const uint32_t *const *q, const uint16_t *k, int64_t Dp, float *s, float *maximum,
                            const apa_cpu_prefetch *prefetch)
{
    if (n == 3)
        scores_panel(3, q, k, Dp, s, maximum, prefetch);
    else if (n == 2)
        scores_panel(2, q, k, Dp, s, maximum, prefetch);
    else
        scores_panel(1, q, k, Dp, s, maximum, prefetch);
}

/* ---- few rows ---- */

/* 32 keys at a time, as in few_scores.c, whose 16 values of a step are here 8 pairs that are turned as they are. */
APA_INLINE void scores_keys(int R, const void *const *keys, int64_t D, apa_cpu_asking *asking, const uint32_t *q,
                            float *s)
{
    uint16_t tail[32][16] = {{0}};
    const void *tails[32];
    __m512 sum[2][APA_CPU_FEW];
    for (int r = 0; r < R; r++)
        sum[0][r] = sum[1][r] = _mm512_setzero_ps();
    for (int64_t d = 0; d < D; d += 16) {
        const bool whole = D - d >= 16;
        __m512i x[16];
        apa_cpu_ask(asking);
        for (int i = 0; i < 32 && !whole; i++) {
            memcpy(tail[i], (const uint16_t *)keys[i] + d, sizeof **tail * (size_t)(D - d));
            tails[i] = tail[i];
        }
        turn_dwords(whole ? keys : tails, whole ? d * 2 : 0, x);
        APA_UNROLL
        for (int e = 0; e < 8; e++) {
            const __m512i low = turned_dword(x, 0, e), high = turned_dword(x, 1, e);
            for (int r = 0; r < R; r++) {
                const __m512i pair = broadcast2(q + (d / 2 + e) * APA_CPU_FEW + r);
                dot2(&sum[0][r], low, pair);
                dot2(&sum[1][r], high, pair);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        _mm512_store_ps(s + r * TILE, sum[0][r]);
        _mm512_store_ps(s + r * TILE + LANES, sum[1][r]);
    }
}

APA_INLINE void scores_rows(int R, const void *const *keys, int64_t D, const apa_cpu_ahead *ahead, const uint32_t *q,
                            float *s)
{
    apa_cpu_asking asking = apa_cpu_asking_over(ahead, (D + 15) / 16 * 2);
    for (int key = 0; key < TILE; key += 32)
        scores_keys(R, keys + key, D, &asking, q, s + key);
}

/* Pairs of BF16 values from floats that are such values: q [D up to 16][FEW] → [D up to 32, over 2][FEW]. */
static void pair_up(const float *q, int64_t D, uint32_t *pairs)
{
    const int64_t rows = (D + 15) / 16 * 16;
    memset(pairs, 0, sizeof *pairs * (size_t)((D + 31) / 32 * 16 * APA_CPU_FEW));
    for (int64_t d = 0; d < rows; d += 2) {
        const __m256i even = _mm256_loadu_si256((const __m256i *)(const void *)(q + d * APA_CPU_FEW));
        const __m256i odd = _mm256_loadu_si256((const __m256i *)(const void *)(q + (d + 1) * APA_CPU_FEW));
        const __m256i high = _mm256_and_si256(odd, _mm256_set1_epi32((int32_t)0xffff0000u));
        _mm256_storeu_si256((__m256i *)(void *)(pairs + d / 2 * APA_CPU_FEW),
                            _mm256_or_si256(_mm256_srli_epi32(even, 16), high));
    }
}

void apa_scores_few_avx512bf16(apa_dtype dtype, const void *const *keys, int n, int64_t D, const apa_cpu_ahead *ahead,
                               int R, const float *q, float *s)
{
    static const uint64_t zeros[LARGEST_DIM * 4 / 8] = {0};
    uint32_t pairs[LARGEST_DIM / 2 * APA_CPU_FEW];
    const void *whole[TILE];
    if (dtype != APA_DTYPE_BF16) {
        apa_scores_few_avx512(dtype, keys, n, D, ahead, R, q, s);
        return;
    }
    pair_up(q, D, pairs);
    for (int key = 0; key < TILE; key++)
        whole[key] = key < n ? keys[key] : zeros;
    if (R == 1)
        scores_rows(1, whole, D, ahead, pairs, s);
    else if (R <= 3)
        scores_rows(3, whole, D, ahead, pairs, s);
    else
        scores_rows(8, whole, D, ahead, pairs, s);
}

/* ---- the ceiling ---- */

double apa_peak_bf16_avx512(int64_t rounds)
{
    __m512 sum[16];
    const __m512i ones = _mm512_set1_epi32(0x3f803f80);
    /* Unrolled: the sums stay in registers only where every index is a constant. */
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        sum[i] = _mm512_setzero_ps();
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            dot2(&sum[i], ones, ones);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        __asm__ volatile("" : : "v"(sum[i]));
    return 2.0 * 2 * LANES * 16 * (double)rounds;
}
