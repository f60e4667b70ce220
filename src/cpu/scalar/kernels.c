/* The portable level: plain C, the contracts of cpu/kernels.h written out. Slow, and the yardstick of the other levels.
 */
#include "cpu/exp2.h"
#include "cpu/kernels.h"
#include "formats/formats.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define LARGEST_DIM 1024

static float element(apa_dtype dtype, const void *src, int64_t i)
{
    if (dtype == APA_DTYPE_F32)
        return ((const float *)src)[i];
    const uint16_t bits = ((const uint16_t *)src)[i];
    return dtype == APA_DTYPE_F16 ? apa_f16_to_f32(bits) : apa_bf16_to_f32(bits);
}

static bool widen_scalar(apa_dtype dtype, const void *src, int64_t n, float *dst)
{
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        dst[i] = element(dtype, src, i);
        finite = finite && isfinite(dst[i]);
    }
    return finite;
}

static bool widen_v_scalar(apa_dtype dtype, const void *src, int64_t n, int64_t Dvp, int64_t key, float *v)
{
    bool finite = true;
    for (int64_t c = 0; c < Dvp; c++) {
        const float x = c < n ? element(dtype, src, c) : 0.0f;
        finite = finite && isfinite(x);
        v[c / 8 * APA_CPU_V_BLOCK + key * 8 + c % 8] = x;
    }
    return finite;
}

static void scores_f32_scalar(int n, const float *const *q, const float *k, int64_t Dp, float *s,
                              const apa_cpu_prefetch *prefetch)
{
    (void)prefetch;
    memset(s, 0, sizeof *s * (size_t)(TILE * n * LANES));
    for (int key = 0; key < TILE; key++)
        for (int r = 0; r < n; r++) {
            float *sum = s + (key * n + r) * LANES;
            for (int64_t d = 0; d < Dp; d++)
                for (int i = 0; i < LANES; i++)
                    sum[i] += q[r][d * LANES + i] * k[key * Dp + d];
        }
}

/* 2^n by its bits, for a whole number n; 0 under the subnormals, through two factors where the result is subnormal. */
static float power_of_two(float n)
{
    if (n < -126.0f)
        return n < -150.0f ? 0.0f : power_of_two(n + 60.0f) * 0x1p-60f;
    if (n > 127.0f)
        return INFINITY;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

static float exp2_scalar(float x)
{
    if (x != x || x == INFINITY)
        return NAN;
    x = x < APA_EXP2_LOWEST ? APA_EXP2_LOWEST : x;
    const float n = rintf(x), r = x - n;
    float p = APA_EXP2_6_C6 * r + APA_EXP2_6_C5;
    p = p * r + APA_EXP2_6_C4;
    p = p * r + APA_EXP2_6_C3;
    p = p * r + APA_EXP2_6_C2;
    p = p * r + APA_EXP2_6_C1;
    p = p * r + 1.0f;
    return p * power_of_two(n);
}

static bool sees(const apa_cpu_span *span, int lane, int key)
{
    return span == NULL || (span->lo[lane] <= key && key < span->hi[lane]);
}

static bool softmax_f32_scalar(float *s, int n, float c, const apa_cpu_span *span, apa_cpu_state *state, float *alpha)
{
    bool moved = false;
    for (int i = 0; i < LANES; i++) {
        float most = -INFINITY;
        for (int key = 0; key < TILE; key++) {
            const float x = s[key * n * LANES + i];
            if (sees(span, i, key) && x > most)
                most = x;
        }
        const float old = state->frame[i];
        alpha[i] = 1.0f;
        if (most != -INFINITY && (old == -INFINITY || (most - old) * c > APA_CPU_FRAME_SLACK)) {
            alpha[i] = old == -INFINITY ? 0.0f : exp2_scalar((old - most) * c);
            state->frame[i] = most;
            moved = moved || alpha[i] != 1.0f;
        }
        /* No finite score yet: -inf scores weigh nothing, and -inf - -inf would be NaN. */
        const float base = state->frame[i] == -INFINITY ? 0.0f : state->frame[i];
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int key = 0; key < TILE; key++) {
            float *at = &s[key * n * LANES + i];
            *at = sees(span, i, key) ? exp2_scalar((*at - base) * c) : 0.0f;
            sum[key % 4] += *at;
        }
        state->sum[i] = state->sum[i] * alpha[i] + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    return moved;
}

static void pv_f32_scalar(int n, const float *p, const float *v, int64_t Dvp, float *const *o)
{
    for (int64_t c = 0; c < Dvp; c++)
        for (int r = 0; r < n; r++) {
            float sum[LANES] = {0.0f};
            for (int key = 0; key < TILE; key++) {
                const float value = v[c / 8 * APA_CPU_V_BLOCK + key * 8 + c % 8];
                for (int i = 0; i < LANES; i++)
                    sum[i] += p[(key * n + r) * LANES + i] * value;
            }
            for (int i = 0; i < LANES; i++)
                o[r][c * LANES + i] += sum[i];
        }
}

static void scale_lanes_scalar(float *x, int64_t rows, const float *alpha)
{
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < LANES; i++)
            x[row * LANES + i] *= alpha[i];
}

static void scores_i8_scalar(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                             const float *k_scale, int64_t Dp, float *s, float *maximum,
                             const apa_cpu_prefetch *prefetch)
{
    (void)prefetch;
    for (int i = 0; i < n * LANES; i++)
        maximum[i] = -INFINITY;
    for (int key = 0; key < TILE; key++)
        for (int r = 0; r < n; r++) {
            int32_t sum[LANES];
            for (int i = 0; i < LANES; i++)
                sum[i] = k8_bias[key];
            for (int64_t d = 0; d < Dp; d += 4)
                for (int i = 0; i < LANES; i++)
                    for (int b = 0; b < 4; b++)
                        sum[i] += (int32_t)q8[r][d * LANES + i * 4 + b] * k8[key * Dp + d + b];
            for (int i = 0; i < LANES; i++) {
                const float x = (float)sum[i] * k_scale[key];
                s[(key * n + r) * LANES + i] = x;
                maximum[r * LANES + i] = x > maximum[r * LANES + i] ? x : maximum[r * LANES + i];
            }
        }
}

static void max_i8_scalar(const float *s, int n, const apa_cpu_span *span, float *maximum)
{
    for (int i = 0; i < LANES; i++) {
        maximum[i] = -INFINITY;
        for (int key = 0; key < TILE; key++)
            if (sees(span, i, key) && s[key * n * LANES + i] > maximum[i])
                maximum[i] = s[key * n * LANES + i];
    }
}

/* round(255·2^x) for x <= 0 */
static uint8_t probability(float x)
{
    x = x < APA_EXP2_LOWEST ? APA_EXP2_LOWEST : x;
    const float n = rintf(x), r = x - n;
    float p = (float)((double)(255.0f * APA_EXP2_3_C3) * r + (double)(255.0f * APA_EXP2_3_C2));
    p = (float)((double)p * r + (double)(255.0f * APA_EXP2_3_C1));
    p = (float)((double)p * r + 255.0);
    return (uint8_t)lrintf(p * power_of_two(n));
}

static void softmax_i8_scalar(const float *s, int n, const apa_cpu_span *span, const float *maximum,
                              const float *q_scale, uint8_t *p8, int32_t *sum)
{
    memset(sum, 0, sizeof *sum * LANES);
    for (int key = 0; key < TILE; key++)
        for (int i = 0; i < LANES; i++) {
            uint8_t p = 0;
            if (sees(span, i, key))
                p = probability((s[key * n * LANES + i] - maximum[i]) * q_scale[i]);
            p8[key / 4 * 4 * LANES + i * 4 + key % 4] = p;
            sum[i] += p;
        }
}

static void pv_i8_scalar(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale,
                         const float *const *p_scale, int64_t Dvp, float *const *o)
{
    for (int64_t c = 0; c < Dvp; c++)
        for (int r = 0; r < n; r++) {
            int32_t sum[LANES] = {0};
            for (int quad = 0; quad < TILE / 4; quad++)
                for (int i = 0; i < LANES; i++)
                    for (int b = 0; b < 4; b++)
                        sum[i] += (int32_t)p8[r][quad * 4 * LANES + i * 4 + b] * v8[(quad * Dvp + c) * 4 + b];
            for (int i = 0; i < LANES; i++)
                o[r][c * LANES + i] += (float)sum[i] * v_scale[c] * p_scale[r][i];
        }
}

static bool is_real(const apa_cpu_walk *walk, int lane)
{
    return (walk->real >> lane & 1) != 0;
}

static bool look_scalar(apa_cpu_walk *walk, const float *maximum, float k_scale_max, float v_max, float *top)
{
    float bound[LANES];
    bool within = true;
    for (int i = 0; i < LANES; i++) {
        top[i] = maximum[i] == -INFINITY ? -INFINITY : maximum[i] * walk->q_scale[i];
        bound[i] = top[i] == -INFINITY
                       ? 0.0f
                       : (float)TILE * exp2_scalar(top[i] + walk->error[i] * k_scale_max - walk->frame[i]);
        if (is_real(walk, i) && !(walk->skipped[i] + bound[i] <= APA_CPU_SKIP_LIMIT * walk->lambda[i]))
            within = false;
    }
    if (within)
        for (int i = 0; i < LANES; i++) {
            walk->skipped[i] += bound[i];
            walk->skipped_v[i] += bound[i] * v_max;
        }
    return within;
}

static int judge_scalar(apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *alpha,
                        float *p_scale)
{
    int judged = 0;
    for (int i = 0; i < LANES; i++) {
        alpha[i] = 1.0f;
        if (top[i] > walk->frame[i] + APA_CPU_FRAME_SLACK) {
            alpha[i] = exp2_scalar(walk->frame[i] - top[i]);
            walk->frame[i] = top[i];
            walk->lambda[i] *= alpha[i];
            walk->cold[i] *= alpha[i];
            walk->skipped[i] *= alpha[i];
            walk->skipped_v[i] *= alpha[i];
            if (alpha[i] != 1.0f)
                judged |= APA_CPU_JUDGED_MOVED;
        }
        p_scale[i] = top[i] == -INFINITY ? 0.0f : exp2_scalar(top[i] - walk->frame[i]) * (1.0f / 255.0f);
        const float mass = (float)sum[i] * p_scale[i];
        walk->lambda[i] += mass;
        if (is_real(walk, i) && mass > eps * walk->lambda[i])
            judged |= APA_CPU_JUDGED_CANDIDATE;
    }
    return judged;
}

static bool judge_again_scalar(const apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps,
                               float *p_scale)
{
    bool hot = false;
    for (int i = 0; i < LANES; i++) {
        p_scale[i] = top[i] == -INFINITY ? 0.0f : exp2_scalar(top[i] - walk->frame[i]) * (1.0f / 255.0f);
        hot = hot || (is_real(walk, i) && (float)sum[i] * p_scale[i] > eps * walk->lambda[i]);
    }
    return hot;
}

static void accumulate_scalar(double *sum, const float *value, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sum[i] += value[i];
}

static float quantise_v_scalar(const float *v, int64_t Dvp, int8_t *v8, float *v_scale)
{
    float most = 0.0f;
    for (int64_t c = 0; c < Dvp; c++) {
        float column[TILE];
        int8_t code[TILE];
        for (int key = 0; key < TILE; key++) {
            column[key] = v[key * Dvp + c];
            most = fabsf(column[key]) > most ? fabsf(column[key]) : most;
        }
        v_scale[c] = apa_int8_quantise(column, TILE, code);
        for (int key = 0; key < TILE; key++)
            v8[(key / 4 * Dvp + c) * 4 + key % 4] = code[key];
    }
    return most;
}

static void narrow_scalar(apa_dtype dtype, const float *value, int64_t n, void *dst)
{
    for (int64_t i = 0; i < n; i++)
        if (dtype == APA_DTYPE_F32)
            ((float *)dst)[i] = value[i];
        else
            ((uint16_t *)dst)[i] = dtype == APA_DTYPE_F16 ? apa_f32_to_f16(value[i]) : apa_f32_to_bf16(value[i]);
}

static float quantise_row_scalar(const float *value, int64_t n, int8_t *code)
{
    return apa_int8_quantise(value, (size_t)n, code);
}

static void hadamard_scalar(float *value, int64_t n, int64_t block)
{
    float root = 1.0f;
    for (int64_t b = block; b > 1; b /= 4)
        root *= b == 2 ? 0.70710678118654752f : 0.5f;
    for (int64_t start = 0; start < n; start += block) {
        float *x = value + start;
        for (int64_t h = 1; h < block; h *= 2)
            for (int64_t i = 0; i < block; i += 2 * h)
                for (int64_t j = i; j < i + h; j++) {
                    const float a = x[j], b = x[j + h];
                    x[j] = a + b;
                    x[j + h] = a - b;
                }
        for (int64_t i = 0; i < block; i++)
            x[i] *= root;
    }
}

static bool quantise_k_scalar(apa_dtype dtype, const void *src, int64_t D, const float *mean, int64_t block,
                              int8_t *code, float *scale, int32_t *sum)
{
    float row[LARGEST_DIM];
    if (!widen_scalar(dtype, src, D, row))
        return false;
    for (int64_t d = 0; d < D; d++)
        row[d] -= mean[d];
    if (block > 1)
        hadamard_scalar(row, D, block);
    for (int64_t d = 0; d < D; d++)
        if (!isfinite(row[d]))
            return false;
    *scale = quantise_row_scalar(row, D, code);
    *sum = 0;
    for (int64_t d = 0; d < D; d++)
        *sum += code[d];
    return true;
}

const apa_cpu_kernels apa_cpu_kernels_scalar = {
    .name = "scalar",
    .widen = widen_scalar,
    .widen_v = widen_v_scalar,
    .scores_f32 = scores_f32_scalar,
    .softmax_f32 = softmax_f32_scalar,
    .pv_f32 = pv_f32_scalar,
    .scale_lanes = scale_lanes_scalar,
    .scores_i8 = scores_i8_scalar,
    .max_i8 = max_i8_scalar,
    .softmax_i8 = softmax_i8_scalar,
    .look = look_scalar,
    .judge = judge_scalar,
    .judge_again = judge_again_scalar,
    .pv_i8 = pv_i8_scalar,
    .accumulate = accumulate_scalar,
    .quantise_v = quantise_v_scalar,
    .quantise_k = quantise_k_scalar,
    .quantise_row = quantise_row_scalar,
    .narrow = narrow_scalar,
    .hadamard = hadamard_scalar,
};
