/* The portable level: plain C, the contracts of cpu/kernels.h written out. Slow, and the yardstick of the other levels.
 */
#include "cpu/scalar/scalar.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE

void apa_scores_f32_scalar(int n, const float *const *q, const float *k, int64_t Dp, float *s, float *maximum,
                           const apa_cpu_prefetch *prefetch)
{
    (void)prefetch;
    for (int i = 0; i < n * LANES && maximum != NULL; i++)
        maximum[i] = -INFINITY;
    memset(s, 0, sizeof *s * (size_t)(TILE * n * LANES));
    for (int key = 0; key < TILE; key++)
        for (int r = 0; r < n; r++) {
            float *sum = s + (key * n + r) * LANES;
            for (int64_t d = 0; d < Dp; d++)
                for (int i = 0; i < LANES; i++)
                    sum[i] += q[r][d * LANES + i] * k[key * Dp + d];
            for (int i = 0; i < LANES && maximum != NULL; i++)
                if (sum[i] > maximum[r * LANES + i])
                    maximum[r * LANES + i] = sum[i];
        }
}

static bool sees(const apa_cpu_span *span, int lane, int key)
{
    return span == NULL || (span->lo[lane] <= key && key < span->hi[lane]);
}

bool apa_softmax_f32_scalar(float *s, int n, float c, const apa_cpu_span *span, const float *maximum,
                            apa_cpu_state *state, float *alpha)
{
    bool moved = false;
    for (int i = 0; i < LANES; i++) {
        float most = maximum != NULL ? maximum[i] : -INFINITY;
        for (int key = 0; key < TILE && maximum == NULL; key++) {
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

void apa_pv_f32_scalar(int n, const float *p, const float *v, int64_t Dvp, float *const *o)
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

void apa_scale_lanes_scalar(float *x, int64_t rows, const float *alpha)
{
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < LANES; i++)
            x[row * LANES + i] *= alpha[i];
}

/* 2^((frame - most)·c) */
static float weight(float frame, float most, float c)
{
    if (frame == most)
        return 1.0f; /* -inf against -inf: both empty */
    return frame == -INFINITY ? 0.0f : exp2_scalar((frame - most) * c);
}

void apa_merge_lanes_scalar(const apa_cpu_state *left, const float *left_o, float c, int64_t rows, apa_cpu_state *state,
                            float *o)
{
    float a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++) {
        const float most = left->frame[i] > state->frame[i] ? left->frame[i] : state->frame[i];
        a[i] = weight(left->frame[i], most, c);
        b[i] = weight(state->frame[i], most, c);
        state->frame[i] = most;
        state->sum[i] = left->sum[i] * a[i] + state->sum[i] * b[i];
    }
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < LANES; i++)
            o[row * LANES + i] = left_o[row * LANES + i] * a[i] + o[row * LANES + i] * b[i];
}

void apa_scores_i8_scalar(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                          const float *k_scale, int64_t Dp, float *s, float *maximum, const apa_cpu_prefetch *prefetch)
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

void apa_max_i8_scalar(const float *s, int n, const apa_cpu_span *span, float *maximum)
{
    for (int i = 0; i < LANES; i++) {
        maximum[i] = -INFINITY;
        for (int key = 0; key < TILE; key++)
            if (sees(span, i, key) && s[key * n * LANES + i] > maximum[i])
                maximum[i] = s[key * n * LANES + i];
    }
}

void apa_softmax_i8_scalar(const float *s, int n, const apa_cpu_span *span, const float *maximum, const float *q_scale,
                           uint8_t *p8, int32_t *sum)
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

void apa_pv_i8_scalar(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale,
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

bool apa_look_scalar(apa_cpu_walk *walk, const float *maximum, float k_scale_max, float v_max, float *top)
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

int apa_judge_scalar(apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *alpha, float *p_scale)
{
    int judged = 0;
    for (int i = 0; i < LANES; i++) {
        alpha[i] = 1.0f;
        if (top[i] > walk->frame[i] + APA_CPU_FRAME_SLACK) {
            alpha[i] = exp2_scalar(walk->frame[i] - top[i]);
            walk->frame[i] = top[i];
            walk->lambda[i] *= alpha[i];
            walk->floor[i] *= alpha[i];
            walk->cold[i] *= alpha[i];
            walk->skipped[i] *= alpha[i];
            walk->skipped_v[i] *= alpha[i];
            if (alpha[i] != 1.0f)
                judged |= APA_CPU_JUDGED_MOVED;
        }
        p_scale[i] = top[i] == -INFINITY ? 0.0f : exp2_scalar(top[i] - walk->frame[i]) * (1.0f / 255.0f);
        const float mass = (float)sum[i] * p_scale[i];
        walk->lambda[i] += mass;
        const float known = walk->lambda[i] > walk->floor[i] ? walk->lambda[i] : walk->floor[i];
        if (is_real(walk, i) && mass > eps * known)
            judged |= APA_CPU_JUDGED_CANDIDATE;
    }
    return judged;
}

bool apa_judge_again_scalar(const apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *p_scale)
{
    bool hot = false;
    for (int i = 0; i < LANES; i++) {
        p_scale[i] = top[i] == -INFINITY ? 0.0f : exp2_scalar(top[i] - walk->frame[i]) * (1.0f / 255.0f);
        hot = hot || (is_real(walk, i) && (float)sum[i] * p_scale[i] > eps * walk->lambda[i]);
    }
    return hot;
}
