/* P·V and softmax of exact tiles for a few rows (decode); their scores are in few_scores.c.
 *
 * P·V has channels in the lanes and uses a row of V as it lies; the arithmetic of a (row, channel) is what it is with
 * rows in the lanes: one chain of multiply-adds over rising keys. */
#include "cpu/ahead.h"
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/rows.h"
#include "cpu/unroll.h"

#include <math.h>

#define GROUPS (TILE / LANES)
#define LARGEST_DIM 1024

/* ---- P·V ---- */

/* R rows' sums over the tile of 16·W channels from c on; false when one is not finite. `whole`: all of them are there.
 */
APA_INLINE bool values_strip(int R, int W, bool whole, apa_dtype dtype, const void *const *values, int n, int64_t c,
                             int64_t Dv, apa_cpu_asking *asking, const float *p, int64_t Do, float *sum)
{
    const int64_t from = c * (dtype == APA_DTYPE_F32 ? 4 : 2);
    __m512 acc[APA_CPU_FEW][8];
    __mmask16 bad = 0;
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++)
            acc[r][w] = _mm512_setzero_ps();
    for (int key = 0; key < n; key++) {
        const char *row = (const char *)values[key] + from;
        __m512 weight[APA_CPU_FEW];
        apa_cpu_ask(asking);
        __asm__("" : "+r"(row)); /* one base and constant offsets, or gcc keeps a register for each offset */
        for (int r = 0; r < R; r++)
            weight[r] = _mm512_set1_ps(p[r * TILE + key]);
        for (int w = 0; w < W; w++) {
            const int64_t left = Dv - c - 16 * w;
            const __m512 v = load16(dtype, row, 16 * w, whole ? 0xffff : first_lanes(left > 0 ? left : 0));
            for (int r = 0; r < R; r++)
                acc[r][w] = _mm512_fmadd_ps(weight[r], v, acc[r][w]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++)
            if (whole || c + 16 * w < Do) {
                bad |= not_finite(acc[r][w]);
                _mm512_storeu_ps(sum + r * Do + c + 16 * w, acc[r][w]);
            }
    return bad == 0;
}

/* Whole strips of W vectors, then strips of two for the rest. Where the sums fit in registers all of a row of V is one
 * strip: it is then read once and in order. */
APA_INLINE bool values_rows(int R, int W, apa_dtype dtype, const void *const *values, int n, int64_t Dv,
                            const apa_cpu_ahead *ahead, const float *p, const float *alpha, bool check, float *o)
{
    const int64_t Do = (Dv + 15) / 16 * 16, whole = Dv / (16 * W), rest = (Dv - whole * 16 * W + 31) / 32;
    float sum[APA_CPU_FEW * LARGEST_DIM] __attribute__((aligned(64)));
    apa_cpu_asking asking = apa_cpu_asking_over(ahead, n * (whole + rest));
    bool finite = true;
    int64_t c = 0;
    for (; Dv - c >= 16 * W; c += 16 * W)
        finite = values_strip(R, W, true, dtype, values, n, c, Dv, &asking, p, Do, sum) && finite;
    for (; c < Dv; c += 32)
        finite = values_strip(R, 2, false, dtype, values, n, c, Dv, &asking, p, Do, sum) && finite;
    if (check && !finite)
        return false;
    for (int r = 0; r < R; r++) {
        const __m512 factor = _mm512_set1_ps(alpha[r]);
        for (c = 0; c < Do; c += 16) {
            const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(o + r * Do + c), factor);
            _mm512_storeu_ps(o + r * Do + c, _mm512_add_ps(old, _mm512_load_ps(sum + r * Do + c)));
        }
    }
    return true;
}

/* One text for each number of rows: their chains live in registers. */
APA_INLINE bool values_typed(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const apa_cpu_ahead *ahead,
                             int R, const float *p, const float *alpha, bool check, float *o)
{
    const bool wide = Dv >= 128;
    switch (R) {
    case 1:
        return wide ? values_rows(1, 8, dtype, values, n, Dv, ahead, p, alpha, check, o)
                    : values_rows(1, 4, dtype, values, n, Dv, ahead, p, alpha, check, o);
    case 2:
        return wide ? values_rows(2, 8, dtype, values, n, Dv, ahead, p, alpha, check, o)
                    : values_rows(2, 4, dtype, values, n, Dv, ahead, p, alpha, check, o);
    case 3:
        return wide ? values_rows(3, 8, dtype, values, n, Dv, ahead, p, alpha, check, o)
                    : values_rows(3, 4, dtype, values, n, Dv, ahead, p, alpha, check, o);
    case 4:
        return values_rows(4, 4, dtype, values, n, Dv, ahead, p, alpha, check, o);
    case 5:
    case 6:
        return values_rows(6, 4, dtype, values, n, Dv, ahead, p, alpha, check, o);
    default:
        return values_rows(8, 2, dtype, values, n, Dv, ahead, p, alpha, check, o);
    }
}

bool apa_pv_few_avx512(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const apa_cpu_ahead *ahead, int R,
                       const float *p, const float *alpha, bool check, float *o)
{
    if (dtype == APA_DTYPE_F16)
        return values_typed(APA_DTYPE_F16, values, n, Dv, ahead, R, p, alpha, check, o);
    if (dtype == APA_DTYPE_BF16)
        return values_typed(APA_DTYPE_BF16, values, n, Dv, ahead, R, p, alpha, check, o);
    return values_typed(APA_DTYPE_F32, values, n, Dv, ahead, R, p, alpha, check, o);
}

/* ---- softmax ---- */

/* Sum of a row's 64 weights in the order of softmax_f32: four sums over keys 0, 4, 8 … , 1, 5, 9 … and so on. */
APA_INLINE float ordered_sum(const __m512 *p)
{
    __m128 sum = _mm_setzero_ps();
    for (int g = 0; g < GROUPS; g++) {
        sum = _mm_add_ps(sum, _mm512_castps512_ps128(p[g]));
        sum = _mm_add_ps(sum, _mm512_extractf32x4_ps(p[g], 1));
        sum = _mm_add_ps(sum, _mm512_extractf32x4_ps(p[g], 2));
        sum = _mm_add_ps(sum, _mm512_extractf32x4_ps(p[g], 3));
    }
    float part[4];
    _mm_storeu_ps(part, sum);
    return (part[0] + part[1]) + (part[2] + part[3]);
}

/* One row; the rules are those of softmax_panel in f32.c, its keys in the lanes. */
APA_INLINE void softmax_row(float *s, float c, bool masked, int32_t lo, int32_t hi, float *frame_at, float *sum_at,
                            float *alpha)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 sees[GROUPS];
    __m512 x[GROUPS], most = lowest;
    for (int g = 0; g < GROUPS; g++) {
        x[g] = _mm512_load_ps(s + g * LANES);
        sees[g] = masked ? apa_avx512_visible(_mm512_sub_epi32(_mm512_set1_epi32(lo), first),
                                              _mm512_sub_epi32(_mm512_set1_epi32(hi), first), g * LANES)
                         : (__mmask16)0xffff;
        most = _mm512_mask_max_ps(most, sees[g], x[g], most); /* a NaN is left out */
    }
    const float maximum = _mm512_reduce_max_ps(most), old = *frame_at;
    const bool moves = maximum != -INFINITY && (old == -INFINITY || (maximum - old) * c > APA_CPU_FRAME_SLACK);
    const float frame = moves ? maximum : old;
    *alpha = 1.0f;
    if (moves)
        *alpha = old == -INFINITY ? 0.0f : _mm512_cvtss_f32(apa_avx512_exp2(_mm512_set1_ps((old - frame) * c)));
    const __m512 base = _mm512_set1_ps(frame != -INFINITY ? frame : 0.0f), scale = _mm512_set1_ps(c);
    for (int g = 0; g < GROUPS; g++)
        x[g] = _mm512_mul_ps(_mm512_sub_ps(x[g], base), scale);
    apa_avx512_exp2_of(GROUPS, x);
    for (int g = 0; g < GROUPS; g++) {
        x[g] = _mm512_maskz_mov_ps(sees[g], x[g]);
        _mm512_store_ps(s + g * LANES, x[g]);
    }
    *frame_at = frame;
    *sum_at = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(*sum_at), _mm_set_ss(*alpha), _mm_set_ss(ordered_sum(x))));
}

void apa_softmax_few_avx512(int R, float *s, float c, const apa_cpu_span *span, apa_cpu_state *state, float *alpha)
{
    for (int r = 0; r < R; r++)
        if (span != NULL)
            softmax_row(s + r * TILE, c, true, span->lo[r], span->hi[r], &state->frame[r], &state->sum[r], &alpha[r]);
        else
            softmax_row(s + r * TILE, c, false, 0, TILE, &state->frame[r], &state->sum[r], &alpha[r]);
}
