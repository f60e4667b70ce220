/* Softmax of exact and INT8 tiles, maxima, scaling: 16 rows as two halves of eight lanes. The text of these kernels for
 * every instruction set of that width; a .c file of the set includes it after its vector.h, with SUFFIX defined. */
#include "cpu/lanes8/common.h"
#include "cpu/lanes8/frame.h"

#include <math.h>

/* ---- exact tiles ---- */

APA_INLINE v8f largest(const float *s, int n, bool masked, v8i lo, v8i hi)
{
    const v8f lowest = v8f_set(-INFINITY);
    v8f most[4] = {lowest, lowest, lowest, lowest};
    for (int key = 0; key < TILE; key += 4)
        for (int u = 0; u < 4; u++) {
            v8f x = v8f_load(s + (key + u) * n * LANES);
            if (masked)
                x = v8f_select(v8_visible(lo, hi, key + u), x, lowest);
            most[u] = v8f_max_drop_nan(most[u], x);
        }
    return v8f_max_drop_nan(v8f_max_drop_nan(most[0], most[1]), v8f_max_drop_nan(most[2], most[3]));
}

/* Half a register. */
APA_INLINE bool softmax_half(float *s, int n, float c, bool masked, const int32_t *lo_at, const int32_t *hi_at,
                             const float *maximum, float *frame, float *sum_at, float *alpha)
{
    const v8i lo = masked ? v8i_load(lo_at) : v8i_set(0), hi = masked ? v8i_load(hi_at) : v8i_set(0);
    v8f base;
    const v8f most = maximum != NULL ? v8f_load(maximum) : largest(s, n, masked, lo, hi);
    const v8f factor = move_frame(most, c, frame, &base);
    v8f_store(alpha, factor);

    v8f sum[4] = {v8f_set(0.0f), v8f_set(0.0f), v8f_set(0.0f), v8f_set(0.0f)};
    for (int key = 0; key < TILE; key += 4)
        for (int u = 0; u < 4; u++) {
            float *at = s + (key + u) * n * LANES;
            v8f p = v8f_exp2(v8f_mul(v8f_sub(v8f_load(at), base), v8f_set(c)));
            if (masked)
                p = v8f_keep(v8_visible(lo, hi, key + u), p);
            v8f_store(at, p);
            sum[u] = v8f_add(sum[u], p);
        }
    const v8f added = v8f_add(v8f_add(sum[0], sum[1]), v8f_add(sum[2], sum[3]));
    v8f_store(sum_at, v8f_fma(v8f_load(sum_at), factor, added));
    return v8m_bits(v8f_ne(factor, v8f_set(1.0f))) != 0;
}

bool KERNEL(softmax_f32)(float *s, int n, float c, const apa_cpu_span *span, const float *maximum, apa_cpu_state *state,
                         float *alpha)
{
    bool moved = false;
    for (int i = 0; i < LANES; i += EIGHT) {
        const float *most = maximum != NULL ? maximum + i : NULL;
        bool half;
        if (span != NULL)
            half = softmax_half(s + i, n, c, true, span->lo + i, span->hi + i, most, state->frame + i, state->sum + i,
                                alpha + i);
        else
            half = softmax_half(s + i, n, c, false, NULL, NULL, most, state->frame + i, state->sum + i, alpha + i);
        moved = moved || half;
    }
    return moved;
}

void KERNEL(scale_lanes)(float *x, int64_t rows, const float *alpha)
{
    const v8f low = v8f_load(alpha), high = v8f_load(alpha + EIGHT);
    for (int64_t i = 0; i < rows; i++) {
        v8f_store(x + i * LANES, v8f_mul(v8f_load(x + i * LANES), low));
        v8f_store(x + i * LANES + EIGHT, v8f_mul(v8f_load(x + i * LANES + EIGHT), high));
    }
}

/* 2^((frame - most)·c): 1 where they are equal (-inf against -inf: both empty), 0 where only the frame is -inf. */
APA_INLINE v8f weight(v8f frame, v8f most, float c)
{
    const v8f power = v8f_exp2(v8f_mul(v8f_sub(frame, most), v8f_set(c)));
    return v8f_select(v8f_ne(frame, most), v8f_keep(v8f_ne(frame, v8f_set(-INFINITY)), power), v8f_set(1.0f));
}

APA_INLINE v8f weighted(const float *left, v8f a, const float *right, v8f b)
{
    return v8f_add(v8f_mul(v8f_load(left), a), v8f_mul(v8f_load(right), b));
}

void KERNEL(merge_lanes)(const apa_cpu_state *left, const float *left_o, float c, int64_t rows, apa_cpu_state *state,
                         float *o)
{
    for (int i = 0; i < LANES; i += EIGHT) {
        const v8f frame = v8f_load(left->frame + i), own = v8f_load(state->frame + i);
        const v8f most = v8f_select(v8f_gt(frame, own), frame, own);
        const v8f a = weight(frame, most, c), b = weight(own, most, c);
        v8f_store(state->frame + i, most);
        v8f_store(state->sum + i, weighted(left->sum + i, a, state->sum + i, b));
        for (int64_t at = i; at < rows * LANES; at += LANES)
            v8f_store(o + at, weighted(left_o + at, a, o + at, b));
    }
}

/* ---- INT8 tiles ---- */

void KERNEL(max_i8)(const float *s, int n, const apa_cpu_span *span, float *maximum)
{
    const v8f lowest = v8f_set(-INFINITY);
    for (int i = 0; i < LANES; i += EIGHT) {
        v8f most[2] = {lowest, lowest};
        const v8i lo = v8i_load(span != NULL ? span->lo + i : (const int32_t[EIGHT]){0});
        const v8i hi = span != NULL ? v8i_load(span->hi + i) : v8i_set(TILE);
        for (int key = 0; key < TILE; key += 2)
            for (int u = 0; u < 2; u++) {
                const v8f x = v8f_select(v8_visible(lo, hi, key + u), v8f_load(s + (key + u) * n * LANES + i), lowest);
                most[u] = v8f_max_drop_nan(most[u], x);
            }
        v8f_store(maximum + i, v8f_max_drop_nan(most[0], most[1]));
    }
}

APA_INLINE void softmax_i8_half(const float *s, int n, bool masked, const int32_t *lo_at, const int32_t *hi_at,
                                v8f most, v8f scale, uint8_t *p8, int32_t *sum)
{
    const v8i lo = masked ? v8i_load(lo_at) : v8i_set(0), hi = masked ? v8i_load(hi_at) : v8i_set(0);
    v8i total = v8i_set(0);
    for (int key = 0; key < TILE; key += 4) {
        v8i p[4];
        for (int j = 0; j < 4; j++) {
            const v8f below = v8f_sub(v8f_load(s + (key + j) * n * LANES), most);
            p[j] = v8i_probability(v8f_mul(below, scale));
            if (masked)
                p[j] = v8i_keep(v8_visible(lo, hi, key + j), p[j]);
        }
        const v8i packed = v8i_or(v8i_or(p[0], v8i_left(p[1], 8)), v8i_or(v8i_left(p[2], 16), v8i_left(p[3], 24)));
        v8i_store((int32_t *)(void *)(p8 + key * LANES), packed);
        total = v8i_add(total, v8i_byte_sums(packed));
    }
    v8i_store(sum, total);
}

void KERNEL(softmax_i8)(const float *s, int n, const apa_cpu_span *span, const float *maximum, const float *q_scale,
                        uint8_t *p8, int32_t *sum)
{
    for (int i = 0; i < LANES; i += EIGHT) {
        const v8f most = v8f_load(maximum + i), scale = v8f_load(q_scale + i);
        if (span != NULL)
            softmax_i8_half(s + i, n, true, span->lo + i, span->hi + i, most, scale, p8 + 4 * i, sum + i);
        else
            softmax_i8_half(s + i, n, false, NULL, NULL, most, scale, p8 + 4 * i, sum + i);
    }
}
