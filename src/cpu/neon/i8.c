/* INT8 tiles on NEON with the dot product: sdot multiplies 4 signed by 4 signed bytes and adds to 32 bits, and takes
 * one group of four of a register as its second factor, so 16 codes of a key (4 channels of a value quad) come with one
 * load.
 *
 * sdot has no unsigned operand (usdot is a later extension), so 128 is taken off the unsigned bytes by their top bit:
 *   scores  the queries were stored as code + 128: byte - 128 is the code, and Σ (q8 - 128)·k8 what is asked; k8_bias
 * is not needed. P·V     Σ p·v = Σ (p - 128)·v + 128·Σ v, exact in integers: p - 128 is in -128 … 127, the sum starts
 * from 128·Σ v of its channel, which one more sdot with ones per load of values gives. |Σ| <= 128·127·1024 < 2^31 for
 * any D allowed; 255·127·64 < 2^24 converts to float exactly.
 *
 * A block is 16 rows by 4 keys or channels: 16 sums, 4 registers of rows, 4 of keys, of 32. */
#include "cpu/neon/neon.h"
#include "cpu/neon/vector.h"
#include "cpu/lanes8/common.h"

#include <math.h>

#define SIDE 4
#define PARTS (LANES / 4)

/* 16 unsigned bytes minus 128. */
APA_INLINE int8x16_t row_load(const uint8_t *p)
{
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80)));
}

/* sum += the quad's rows times group `lane` of each key's codes, lane a constant. The empty statement keeps the
 * compiler from loading the rows of all four steps at once, for which the registers don't suffice (gcc 12: 10 spills a
 * turn). */
#define STEP(lane)                                                                                                     \
    do {                                                                                                               \
        __asm__ volatile("" ::: "memory");                                                                             \
        int8x16_t row[PARTS];                                                                                          \
        for (int w = 0; w < PARTS; w++)                                                                                \
            row[w] = row_load(q8 + (d + 4 * (lane)) * LANES + 16 * w);                                                 \
        for (int j = 0; j < SIDE; j++)                                                                                 \
            for (int w = 0; w < PARTS; w++)                                                                            \
                sum[j][w] = vdotq_laneq_s32(sum[j][w], row[w], codes[j], lane);                                        \
    } while (0)

/* Scores of one register of a panel of n with SIDE keys; Dp is a multiple of 8. The running maximum stays in memory: it
 * would take four registers from the inner loop. */
APA_INLINE void scores_block(int n, const uint8_t *q8, const int8_t *k, const float *k_scale, int64_t Dp, float *s,
                             float *maximum)
{
    int32x4_t sum[SIDE][PARTS];
    for (int j = 0; j < SIDE; j++)
        for (int w = 0; w < PARTS; w++)
            sum[j][w] = vdupq_n_s32(0);
    int64_t d = 0;
    for (; d + 16 <= Dp; d += 16) {
        int8x16_t codes[SIDE];
        for (int j = 0; j < SIDE; j++)
            codes[j] = vld1q_s8(k + j * Dp + d);
        STEP(0);
        STEP(1);
        STEP(2);
        STEP(3);
    }
    if (d < Dp) {
        int8x16_t codes[SIDE];
        for (int j = 0; j < SIDE; j++)
            codes[j] = vcombine_s8(vld1_s8(k + j * Dp + d), vdup_n_s8(0));
        STEP(0);
        STEP(1);
    }
    for (int j = 0; j < SIDE; j++)
        for (int w = 0; w < PARTS; w++) {
            const float32x4_t x = vmulq_n_f32(vcvtq_f32_s32(sum[j][w]), k_scale[j]);
            vst1q_f32(maximum + 4 * w, vmaxq_f32(vld1q_f32(maximum + 4 * w), x));
            vst1q_f32(s + j * n * LANES + 4 * w, x);
        }
}

void apa_scores_i8_neon(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias, const float *k_scale,
                        int64_t Dp, float *s, float *maximum, const apa_cpu_prefetch *prefetch)
{
    (void)k8_bias;
    for (int r = 0; r < n; r++) {
        for (int i = 0; i < LANES; i++)
            maximum[r * LANES + i] = -INFINITY;
        for (int key = 0; key < TILE; key += SIDE) {
            apa_lanes8_prefetch(prefetch, r * (TILE / SIDE) + key / SIDE, n * (TILE / SIDE));
            scores_block(n, q8[r], k8 + key * Dp, k_scale + key, Dp, s + (key * n + r) * LANES, maximum + r * LANES);
        }
    }
}

/* SIDE channels of one register: 128·Σ v of each channel grows beside the products. */
APA_INLINE void pv_block(const uint8_t *p8, const int8_t *v8, const float *v_scale, const float *p_scale, int64_t Dvp,
                         float *o)
{
    int32x4_t sum[SIDE][PARTS], column = vdupq_n_s32(0);
    for (int i = 0; i < SIDE; i++)
        for (int w = 0; w < PARTS; w++)
            sum[i][w] = vdupq_n_s32(0);
    for (int quad = 0; quad < TILE / 4; quad++) {
        const int8x16_t codes = vld1q_s8(v8 + quad * Dvp * 4);
        column = vdotq_s32(column, codes, vdupq_n_s8(1));
        for (int w = 0; w < PARTS; w++) {
            const int8x16_t row = row_load(p8 + quad * 4 * LANES + 16 * w);
            sum[0][w] = vdotq_laneq_s32(sum[0][w], row, codes, 0);
            sum[1][w] = vdotq_laneq_s32(sum[1][w], row, codes, 1);
            sum[2][w] = vdotq_laneq_s32(sum[2][w], row, codes, 2);
            sum[3][w] = vdotq_laneq_s32(sum[3][w], row, codes, 3);
        }
    }
    int32_t offset[SIDE];
    vst1q_s32(offset, vshlq_n_s32(column, 7));
    for (int i = 0; i < SIDE; i++)
        for (int w = 0; w < PARTS; w++) {
            float *out = o + i * LANES + 4 * w;
            const int32x4_t whole = vaddq_s32(sum[i][w], vdupq_n_s32(offset[i]));
            const float32x4_t x = vmulq_n_f32(vcvtq_f32_s32(whole), v_scale[i]);
            vst1q_f32(out, vfmaq_f32(vld1q_f32(out), x, vld1q_f32(p_scale + 4 * w)));
        }
}

void apa_pv_i8_neon(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale,
                    const float *const *p_scale, int64_t Dvp, float *const *o)
{
    for (int64_t c = 0; c < Dvp; c += SIDE)
        for (int r = 0; r < n; r++)
            pv_block(p8[r], v8 + c * 4, v_scale + c, p_scale[r], Dvp, o[r] + c * LANES);
}

/* The ceiling of sdot: 16 sums, operands in registers. */
double apa_peak_i8_neon(int64_t rounds)
{
    int32x4_t sum[16];
    const int8x16_t row = vdupq_n_s8(3), codes = vdupq_n_s8(-1);
    for (int i = 0; i < 16; i++)
        sum[i] = vdupq_n_s32(0);
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < 16; i++)
            sum[i] = vdotq_laneq_s32(sum[i], row, codes, 1);
    for (int i = 0; i < 16; i++)
        __asm__ volatile("" : : "w"(sum[i]));
    return 2.0 * 16 * 16 * (double)rounds;
}
