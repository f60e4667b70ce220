/* Exact tiles on AVX2: FP32 products and sums, 16 rows as two halves of eight lanes.
 *
 * A panel of n registers is 2n columns of eight lanes. A block of W columns by K keys (or channels) keeps W·K sums in
 * registers over the whole inner loop; a step is W loads and K broadcasts for W·K multiply-adds. 16 registers hold
 *   3 × 4: 12 sums, 3 columns, 1 broadcast; 7 loads for 12 multiply-adds (n = 3)
 *   2 × 6: 12 sums, 2 columns, 1 broadcast; 8 loads for 12 (scores, n = 1 and 2)
 *   2 × 4: 8 sums; 6 loads for 8 (P·V, n = 1 and 2: six channels don't divide a block of eight)
 * Two multiply-adds a cycle of latency 4 want 8 sums; two loads a cycle are enough for all of these. */
#include "cpu/avx2/avx2.h"
#include "cpu/avx2/vector.h"
#include "cpu/lanes8/common.h"

#define COLUMNS (2 * APA_CPU_PANEL_F32)
#define CHANNELS 8 /* the width of v's blocks */

/* Scores of W columns with K keys: column w of the panel is `column[w]`, its scores go to s + 8w. */
APA_INLINE void scores_block(int W, int K, int n, const float *const *column, const float *k, int64_t Dp, float *s)
{
    __m256 sum[6][3];
    for (int j = 0; j < K; j++)
        for (int w = 0; w < W; w++)
            sum[j][w] = _mm256_setzero_ps();
    for (int64_t d = 0; d < Dp; d++) {
        __m256 row[3];
        for (int w = 0; w < W; w++)
            row[w] = _mm256_load_ps(column[w] + d * LANES);
        for (int j = 0; j < K; j++) {
            const __m256 key = _mm256_broadcast_ss(k + j * Dp + d);
            for (int w = 0; w < W; w++)
                sum[j][w] = _mm256_fmadd_ps(row[w], key, sum[j][w]);
        }
    }
    for (int j = 0; j < K; j++)
        for (int w = 0; w < W; w++)
            _mm256_store_ps(s + j * n * LANES + w * EIGHT, sum[j][w]);
}

/* All keys for columns first … first+W-1 of the panel, K at a time, then the rest as one block. */
APA_INLINE void scores_columns(int W, int K, int n, const float *const *column, int first, const float *k, int64_t Dp,
                               float *s, const apa_cpu_prefetch *prefetch)
{
    int key = 0;
    for (; key + K <= TILE; key += K) {
        if (first == 0)
            apa_lanes8_prefetch(prefetch, key / K, TILE / K);
        scores_block(W, K, n, column + first, k + key * Dp, Dp, s + key * n * LANES + first * EIGHT);
    }
    const int rest = TILE % K;
    if (rest != 0)
        scores_block(W, rest, n, column + first, k + key * Dp, Dp, s + key * n * LANES + first * EIGHT);
}

void apa_scores_f32_avx2(int n, const float *const *q, const float *k, int64_t Dp, float *s, float *maximum,
                         const apa_cpu_prefetch *prefetch)
{
    const float *column[COLUMNS];
    for (int r = 0; r < n; r++) {
        column[2 * r] = q[r];
        column[2 * r + 1] = q[r] + EIGHT;
    }
    if (n == 3) {
        scores_columns(3, 4, 3, column, 0, k, Dp, s, prefetch);
        scores_columns(3, 4, 3, column, 3, k, Dp, s, prefetch);
    } else if (n == 2) {
        scores_columns(2, 6, 2, column, 0, k, Dp, s, prefetch);
        scores_columns(2, 6, 2, column, 2, k, Dp, s, prefetch);
    } else {
        scores_columns(2, 6, 1, column, 0, k, Dp, s, prefetch);
    }
    apa_lanes8_maxima(n, s, maximum);
}

/* W columns of P by 4 channels: v is at the first of them, column w of o is `out[w]`. */
APA_INLINE void pv_block(int W, int n, const float *p, const float *v, float *const *out)
{
    __m256 sum[4][3];
    for (int i = 0; i < 4; i++)
        for (int w = 0; w < W; w++)
            sum[i][w] = _mm256_setzero_ps();
    for (int key = 0; key < TILE; key++) {
        __m256 row[3];
        for (int w = 0; w < W; w++)
            row[w] = _mm256_load_ps(p + key * n * LANES + w * EIGHT);
        for (int i = 0; i < 4; i++) {
            const __m256 value = _mm256_broadcast_ss(v + key * CHANNELS + i);
            for (int w = 0; w < W; w++)
                sum[i][w] = _mm256_fmadd_ps(row[w], value, sum[i][w]);
        }
    }
    for (int i = 0; i < 4; i++)
        for (int w = 0; w < W; w++) {
            float *at = out[w] + i * LANES;
            _mm256_store_ps(at, _mm256_add_ps(_mm256_load_ps(at), sum[i][w]));
        }
}

APA_INLINE void pv_panel(int W, int n, const float *p, const float *v, int64_t Dvp, float *const *o)
{
    for (int64_t c = 0; c < Dvp; c += 4) {
        const float *values = v + c / CHANNELS * APA_CPU_V_BLOCK + c % CHANNELS;
        for (int first = 0; first < 2 * n; first += W) {
            float *out[3];
            for (int w = 0; w < W; w++)
                out[w] = o[(first + w) / 2] + c * LANES + (first + w) % 2 * EIGHT;
            pv_block(W, n, p + first * EIGHT, values, out);
        }
    }
}

void apa_pv_f32_avx2(int n, const float *p, const float *v, int64_t Dvp, float *const *o)
{
    if (n == 3)
        pv_panel(3, 3, p, v, Dvp, o);
    else if (n == 2)
        pv_panel(2, 2, p, v, Dvp, o);
    else
        pv_panel(2, 1, p, v, Dvp, o);
}
