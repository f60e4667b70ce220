/* Exact tiles on NEON: FP32 products and sums, 16 rows as four registers of four lanes.
 *
 * The multiply-add takes one lane of a register as its factor, so four values of a key (or channels of a value row)
 * come with one load. A block is 16 rows by 4 keys: 16 sums, 4 registers of the rows, 4 of the keys, of 32; over four
 * steps 16 + 4 loads feed 64 multiply-adds. P·V is the same by 4 channels, 4 + 1 loads for 16. Sixteen chains cover
 * four units of latency four. */
#include "cpu/neon/neon.h"
#include "cpu/neon/vector.h"
#include "cpu/lanes8/common.h"

#define SIDE 4
#define PARTS (LANES / 4)
#define CHANNELS 8 /* the width of v's blocks */

/* sum += row·factor[lane], lane a constant. */
#define STEP(lane)                                                                                                     \
    do {                                                                                                               \
        float32x4_t row[PARTS];                                                                                        \
        for (int w = 0; w < PARTS; w++)                                                                                \
            row[w] = vld1q_f32(q + (d + (lane)) * LANES + 4 * w);                                                      \
        for (int j = 0; j < SIDE; j++)                                                                                 \
            for (int w = 0; w < PARTS; w++)                                                                            \
                sum[j][w] = vfmaq_laneq_f32(sum[j][w], row[w], key[j], lane);                                          \
    } while (0)

/* Scores of one register with SIDE keys; Dp is a multiple of 8. */
APA_INLINE void scores_block(int n, const float *q, const float *k, int64_t Dp, float *s)
{
    float32x4_t sum[SIDE][PARTS];
    for (int j = 0; j < SIDE; j++)
        for (int w = 0; w < PARTS; w++)
            sum[j][w] = vdupq_n_f32(0.0f);
    for (int64_t d = 0; d < Dp; d += 4) {
        float32x4_t key[SIDE];
        for (int j = 0; j < SIDE; j++)
            key[j] = vld1q_f32(k + j * Dp + d);
        STEP(0);
        STEP(1);
        STEP(2);
        STEP(3);
    }
    for (int j = 0; j < SIDE; j++)
        for (int w = 0; w < PARTS; w++)
            vst1q_f32(s + j * n * LANES + 4 * w, sum[j][w]);
}

void apa_scores_f32_neon(int n, const float *const *q, const float *k, int64_t Dp, float *s, float *maximum,
                         const apa_cpu_prefetch *prefetch)
{
    for (int r = 0; r < n; r++)
        for (int key = 0; key < TILE; key += SIDE) {
            apa_lanes8_prefetch(prefetch, r * (TILE / SIDE) + key / SIDE, n * (TILE / SIDE));
            scores_block(n, q[r], k + key * Dp, Dp, s + (key * n + r) * LANES);
        }
    apa_lanes8_maxima(n, s, maximum);
}

/* SIDE channels of one register; v is at the first of them. */
APA_INLINE void pv_block(int n, const float *p, const float *v, float *o)
{
    float32x4_t sum[SIDE][PARTS];
    for (int i = 0; i < SIDE; i++)
        for (int w = 0; w < PARTS; w++)
            sum[i][w] = vdupq_n_f32(0.0f);
    for (int key = 0; key < TILE; key++) {
        const float32x4_t value = vld1q_f32(v + key * CHANNELS);
        for (int w = 0; w < PARTS; w++) {
            const float32x4_t row = vld1q_f32(p + key * n * LANES + 4 * w);
            sum[0][w] = vfmaq_laneq_f32(sum[0][w], row, value, 0);
            sum[1][w] = vfmaq_laneq_f32(sum[1][w], row, value, 1);
            sum[2][w] = vfmaq_laneq_f32(sum[2][w], row, value, 2);
            sum[3][w] = vfmaq_laneq_f32(sum[3][w], row, value, 3);
        }
    }
    for (int i = 0; i < SIDE; i++)
        for (int w = 0; w < PARTS; w++) {
            float *at = o + i * LANES + 4 * w;
            vst1q_f32(at, vaddq_f32(vld1q_f32(at), sum[i][w]));
        }
}

void apa_pv_f32_neon(int n, const float *p, const float *v, int64_t Dvp, float *const *o)
{
    for (int64_t c = 0; c < Dvp; c += SIDE) {
        const float *values = v + c / CHANNELS * APA_CPU_V_BLOCK + c % CHANNELS;
        for (int r = 0; r < n; r++)
            pv_block(n, p + r * LANES, values, o[r] + c * LANES);
    }
}
