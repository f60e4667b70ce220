/* INT8 scores of a panel with the exponentials of the panel before among them.
 *
 * Scores and P·V keep the two pipes busy that multiply; the exponentials need those for less than half of their
 * instructions and wait for most of their time: sums, roundings, conversions and 2^n have pipes of their own. A loop
 * of scores is longer than what the processor looks ahead, so the two only meet when they stand next to each other:
 * after every step or two of scores (16 dot products, 8 cycles, each) comes one step of exponentials on four vectors.
 *
 * The scores of the panel before lie where the new ones go. Block of keys by block of keys they are read a step before
 * they are written over. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/vector.h"

#include <math.h>
#include <string.h>

#define KEYS 4 /* of a block */
#define MOST APA_CPU_PANEL_I8
#define STEPS 8 /* of four exponentials */

/* Four keys of one register on their way from scores to codes: x the argument, then its fraction; n its whole part. */
typedef struct quartet {
    __m512 x[KEYS], n[KEYS], p[KEYS];
} quartet;

/* One step of register r, keys from `key` on. The bits of softmax_i8: only the order of the instructions differs, and
 * x - n, which is exact, is a difference here and a multiply-add there. */
APA_INLINE void exponential_step(int step, int n, quartet *at, const float *s, int key, int r, const apa_cpu_due *due)
{
    const float *from = s + (key * n + r) * LANES;
    for (int j = 0; j < KEYS; j++)
        switch (step) {
        case 0:
            at->x[j] = _mm512_sub_ps(_mm512_load_ps(from + j * n * LANES), _mm512_loadu_ps(due->maximum + r * LANES));
            break;
        case 1:
            at->x[j] = _mm512_mul_ps(at->x[j], _mm512_loadu_ps(due->q_scale[r]));
            break;
        case 2:
            at->n[j] = _mm512_roundscale_ps(at->x[j], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            break;
        case 3:
            at->x[j] = _mm512_sub_ps(at->x[j], at->n[j]);
            break;
        case 4:
            at->p[j] = _mm512_fmadd_ps(_mm512_set1_ps(255.0f * APA_EXP2_3_C3), at->x[j],
                                       _mm512_set1_ps(255.0f * APA_EXP2_3_C2));
            break;
        case 5:
            at->p[j] = _mm512_fmadd_ps(at->p[j], at->x[j], _mm512_set1_ps(255.0f * APA_EXP2_3_C1));
            break;
        case 6:
            at->p[j] = _mm512_fmadd_ps(at->p[j], at->x[j], _mm512_set1_ps(255.0f));
            break;
        default:
            break;
        }
    if (step < STEPS - 1)
        return;
    __m512i code[KEYS];
    for (int j = 0; j < KEYS; j++)
        code[j] = _mm512_cvtps_epi32(_mm512_scalef_ps(at->p[j], at->n[j]));
    const __m512i packed = apa_avx512_pack4(code), sum = _mm512_loadu_si512(due->sum + r * LANES);
    _mm512_store_si512(due->p8 + (r * TILE + key) * LANES, packed);
    _mm512_storeu_si512(due->sum + r * LANES, _mm512_dpbusd_epi32(sum, packed, _mm512_set1_epi8(1)));
}

/* Four channels of a block of keys: 4·n dot products. */
APA_INLINE void score_step(int n, const uint8_t *const *q8, const int8_t *k, int64_t Dp, int64_t d,
                           __m512i (*sum)[MOST])
{
    __m512i row[MOST];
    for (int r = 0; r < n; r++)
        row[r] = _mm512_load_si512(q8[r] + d * LANES);
    for (int j = 0; j < KEYS; j++) {
        int32_t word;
        memcpy(&word, k + j * Dp + d, sizeof word);
        const __m512i codes = _mm512_set1_epi32(word);
        for (int r = 0; r < n; r++)
            apa_avx512_dot4(&sum[j][r], row[r], codes);
    }
}

/* What scores_i8 does with a finished block of sums. */
APA_INLINE void finish_block(int n, __m512i (*sum)[MOST], const float *k_scale, float *s, float *maximum)
{
    for (int r = 0; r < n; r++) {
        __m512 most = _mm512_loadu_ps(maximum + r * LANES);
        for (int j = 0; j < KEYS; j++) {
            const __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[j][r]), _mm512_set1_ps(k_scale[j]));
            most = _mm512_max_ps(most, x);
            _mm512_store_ps(s + (j * n + r) * LANES, x);
        }
        _mm512_storeu_ps(maximum + r * LANES, most);
    }
}

/* Step `step` of register r's exponentials, and before it what falls to it of the register's share of the scores. */
APA_INLINE void both(int step, int n, int r, int key, int64_t Dp, const uint8_t *const *q8, const int8_t *k,
                     __m512i (*sum)[MOST], quartet *at, const float *s, const apa_cpu_due *due)
{
    const int64_t share = Dp / 4 / n;
    for (int64_t i = share * step / STEPS; i < share * (step + 1) / STEPS; i++)
        score_step(n, q8, k, Dp, (r * share + i) * 4, sum);
    exponential_step(step, n, at, s, key, r, due);
}

APA_INLINE void scores_beside(int n, int64_t Dp, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                              const float *k_scale, float *s, float *maximum, const apa_cpu_prefetch *prefetch,
                              const apa_cpu_due *due)
{
    for (int r = 0; r < n; r++) {
        _mm512_storeu_ps(maximum + r * LANES, _mm512_set1_ps(-INFINITY));
        _mm512_storeu_si512(due->sum + r * LANES, _mm512_setzero_si512());
    }
    for (int key = 0; key < TILE; key += KEYS) {
        apa_avx512_prefetch(prefetch, key / KEYS, TILE / KEYS);
        const int8_t *k = k8 + key * Dp;
        __m512i sum[KEYS][MOST];
        quartet at;
        for (int j = 0; j < KEYS; j++)
            for (int r = 0; r < n; r++)
                sum[j][r] = _mm512_set1_epi32(k8_bias[key + j]);
        /* The steps not as a loop: gcc keeps it one, and the registers in memory. */
        for (int r = 0; r < n; r++) {
            both(0, n, r, key, Dp, q8, k, sum, &at, s, due);
            both(1, n, r, key, Dp, q8, k, sum, &at, s, due);
            both(2, n, r, key, Dp, q8, k, sum, &at, s, due);
            both(3, n, r, key, Dp, q8, k, sum, &at, s, due);
            both(4, n, r, key, Dp, q8, k, sum, &at, s, due);
            both(5, n, r, key, Dp, q8, k, sum, &at, s, due);
            both(6, n, r, key, Dp, q8, k, sum, &at, s, due);
            both(7, n, r, key, Dp, q8, k, sum, &at, s, due);
        }
        for (int64_t d = Dp / 4 / n * n * 4; d < Dp; d += 4)
            score_step(n, q8, k, Dp, d, sum);
        finish_block(n, sum, k_scale + key, s + key * n * LANES, maximum);
    }
}

/* Sizes are constants, so that the steps are one straight line: with loops among them this way is the slower one. */
#define SIZES(n, Dp)                                                                                                   \
    scores_beside(n, Dp, q8, k8, k8_bias, k_scale, s, maximum, prefetch, due);                                         \
    return true

bool apa_scores_beside_i8_avx512(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                                 const float *k_scale, int64_t Dp, float *s, float *maximum,
                                 const apa_cpu_prefetch *prefetch, const apa_cpu_due *due)
{
    switch (n == 4 || n == 3 ? n * 1024 + Dp : 0) {
    case 4 * 1024 + 64:
        SIZES(4, 64);
    case 4 * 1024 + 96:
        SIZES(4, 96);
    case 4 * 1024 + 128:
        SIZES(4, 128);
    case 3 * 1024 + 64:
        SIZES(3, 64);
    case 3 * 1024 + 96:
        SIZES(3, 96);
    case 3 * 1024 + 128:
        SIZES(3, 128);
    case 3 * 1024 + 192:
        SIZES(3, 192);
    case 3 * 1024 + 256:
        SIZES(3, 256);
    default:
        return false;
    }
}
