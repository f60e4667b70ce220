/* Exact tiles for a few rows (decode): keys in the lanes for the scores, channels in the lanes for P·V.
 *
 * With rows in the lanes a tile costs the same for one row as for sixteen. Here a 16 x 16 piece of K is turned in
 * registers, so that a lane is a key, and every row costs one multiply-add a key vector; a row of V is used as it lies.
 * The arithmetic of a (row, key) or (row, channel) is what it is there: one chain of multiply-adds over rising d, or
 * over rising keys. Sixteen links of a chain follow each other at the latency of a multiply-add, so pieces of four
 * groups of keys take turns. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/rows.h"
#include "cpu/avx512/turn.h"

#include <math.h>

#define GROUPS (TILE / LANES)
#define LARGEST_DIM 1024

/* Written out: as a loop over i, x goes through memory, and 16 stores in a row hold everything up. */
#define LINK(i)                                                                                                        \
    for (int r = 0; r < R; r++)                                                                                        \
    chain[r] = _mm512_fmadd_ps(x[i], _mm512_set1_ps(q[(i)*APA_CPU_FEW + r]), chain[r])
#define LINKS_4(i)                                                                                                     \
    LINK(i);                                                                                                           \
    LINK((i) + 1);                                                                                                     \
    LINK((i) + 2);                                                                                                     \
    LINK((i) + 3)

/* One value of 16 keys, f16, to the chains. */
APA_INLINE void link_f16(int R, __m256i bits, const float *q, __m512 *chain)
{
    const __m512 x = _mm512_cvtph_ps(bits);
    for (int r = 0; r < R; r++)
        chain[r] = _mm512_fmadd_ps(x, _mm512_set1_ps(q[r]), chain[r]);
}

/* Values d0 … d0+31 of 16 keys, f16, join the chains of R rows: turned as 16-bit words, half the moves, and widened 16
 * keys at a time. */
APA_INLINE void scores_piece_f16(int R, const void *const *keys, int64_t d0, int64_t D, const float *q, __m512 *sum)
{
    const __mmask32 lanes = D - d0 >= 32 ? 0xffffffffu : (1u << (D - d0)) - 1u;
    __m512i x[16], pair[8];
    __m512 chain[APA_CPU_FEW];
    for (int i = 0; i < 16; i++)
        x[i] = _mm512_maskz_loadu_epi16(lanes, (const uint16_t *)keys[i] + d0);
    transpose8_words(x);
    for (int r = 0; r < R; r++)
        chain[r] = sum[r];
    q += d0 * APA_CPU_FEW;
    for (int p = 0; p < 4 && d0 + 8 * p < D; p++) {
        /* parts p of the two octets of keys side by side, for d and d + 4 of the eight */
        const __m512i order = _mm512_add_epi64(_mm512_setr_epi64(0, 1, 8, 9, 0, 1, 8, 9), _mm512_set1_epi64(2 * p));
        for (int e = 0; e < 8; e++)
            pair[e] = _mm512_permutex2var_epi64(x[e], order, x[8 + e]);
        link_f16(R, _mm512_castsi512_si256(pair[0]), q + (8 * p + 0) * APA_CPU_FEW, chain);
        link_f16(R, _mm512_castsi512_si256(pair[1]), q + (8 * p + 1) * APA_CPU_FEW, chain);
        link_f16(R, _mm512_castsi512_si256(pair[2]), q + (8 * p + 2) * APA_CPU_FEW, chain);
        link_f16(R, _mm512_castsi512_si256(pair[3]), q + (8 * p + 3) * APA_CPU_FEW, chain);
        link_f16(R, _mm512_castsi512_si256(pair[4]), q + (8 * p + 4) * APA_CPU_FEW, chain);
        link_f16(R, _mm512_castsi512_si256(pair[5]), q + (8 * p + 5) * APA_CPU_FEW, chain);
        link_f16(R, _mm512_castsi512_si256(pair[6]), q + (8 * p + 6) * APA_CPU_FEW, chain);
        link_f16(R, _mm512_castsi512_si256(pair[7]), q + (8 * p + 7) * APA_CPU_FEW, chain);
    }
    for (int r = 0; r < R; r++)
        sum[r] = chain[r];
}

/* d0 … d0+15 of 16 keys joins the chains of R rows; what lies beyond D is 0. */
APA_INLINE void scores_piece(int R, apa_dtype dtype, const void *const *keys, int64_t d0, int64_t D, const float *q,
                             __m512 *sum)
{
    __m512 x[16];
    for (int i = 0; i < 16; i++)
        x[i] = load16(dtype, keys[i], d0, first_lanes(D - d0));
    transpose16(x);
    __m512 chain[APA_CPU_FEW];
    for (int r = 0; r < R; r++)
        chain[r] = sum[r];
    q += d0 * APA_CPU_FEW;
    LINKS_4(0);
    LINKS_4(4);
    LINKS_4(8);
    LINKS_4(12);
    for (int r = 0; r < R; r++)
        sum[r] = chain[r];
}

APA_INLINE void scores_rows(int R, apa_dtype dtype, const void *const *keys, int64_t D, const void *const *ahead,
                            const float *q, float *s)
{
    const int64_t size = dtype == APA_DTYPE_F32 ? 4 : 2;
    __m512 sum[GROUPS][APA_CPU_FEW];
    for (int g = 0; g < GROUPS; g++)
        for (int r = 0; r < R; r++)
            sum[g][r] = _mm512_setzero_ps();
    const int64_t step = dtype == APA_DTYPE_F16 ? 32 : 16;
    for (int64_t d0 = 0; d0 < D; d0 += step)
        for (int g = 0; g < GROUPS; g++) {
            for (int i = 0; i < LANES && d0 * size % 64 == 0; i++)
                ask_for_part(ahead, g * LANES + i, d0 * size, 1);
            if (dtype == APA_DTYPE_F16)
                scores_piece_f16(R, keys + g * LANES, d0, D, q, sum[g]);
            else
                scores_piece(R, dtype, keys + g * LANES, d0, D, q, sum[g]);
        }
    for (int g = 0; g < GROUPS; g++)
        for (int r = 0; r < R; r++)
            _mm512_store_ps(s + r * TILE + g * LANES, sum[g][r]);
}

/* R rows' sums over the tile of 16·W channels from c on; false when one is not finite. */
APA_INLINE bool values_strip(int R, int W, apa_dtype dtype, const void *const *values, int n, int64_t c, int64_t Dv,
                             const void *const *ahead, const float *p, int64_t Do, float *sum)
{
    const int64_t size = dtype == APA_DTYPE_F32 ? 4 : 2, left = Dv - c < 16 * W ? Dv - c : 16 * W;
    __m512 acc[APA_CPU_FEW][4];
    __mmask16 bad = 0;
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++)
            acc[r][w] = _mm512_setzero_ps();
    for (int key = 0; key < n; key++) {
        __m512 v[4];
        ask_for_part(ahead, key, c * size, left * size);
        for (int w = 0; w < W; w++)
            v[w] = load16(dtype, values[key], c + 16 * w, first_lanes(left - 16 * w > 0 ? left - 16 * w : 0));
        for (int r = 0; r < R; r++) {
            const __m512 weight = _mm512_set1_ps(p[r * TILE + key]);
            for (int w = 0; w < W; w++)
                acc[r][w] = _mm512_fmadd_ps(weight, v[w], acc[r][w]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W && c + 16 * w < Do; w++) {
            bad |= not_finite(acc[r][w]);
            _mm512_storeu_ps(sum + r * Do + c + 16 * w, acc[r][w]);
        }
    return bad == 0;
}

APA_INLINE bool values_rows(int R, apa_dtype dtype, const void *const *values, int n, int64_t Dv,
                            const void *const *ahead, const float *p, const float *alpha, bool check, float *o)
{
    const int64_t Do = (Dv + 15) / 16 * 16;
    const int W = R <= 4 ? 4 : 2;
    float sum[APA_CPU_FEW * LARGEST_DIM] __attribute__((aligned(64)));
    bool finite = true;
    for (int64_t c = 0; c < Dv; c += 16 * W)
        finite = values_strip(R, W, dtype, values, n, c, Dv, ahead, p, Do, sum) && finite;
    if (check && !finite)
        return false;
    for (int r = 0; r < R; r++) {
        const __m512 factor = _mm512_set1_ps(alpha[r]);
        for (int64_t c = 0; c < Do; c += 16) {
            const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(o + r * Do + c), factor);
            _mm512_storeu_ps(o + r * Do + c, _mm512_add_ps(old, _mm512_load_ps(sum + r * Do + c)));
        }
    }
    return true;
}

/* One text for each number of rows and dtype: the rows' chains live in registers. */
#define ROWS_CASES(call)                                                                                               \
    switch (R) {                                                                                                       \
    case 1:                                                                                                            \
        call(1);                                                                                                       \
    case 2:                                                                                                            \
        call(2);                                                                                                       \
    case 3:                                                                                                            \
        call(3);                                                                                                       \
    case 4:                                                                                                            \
        call(4);                                                                                                       \
    case 5:                                                                                                            \
    case 6:                                                                                                            \
        call(6);                                                                                                       \
    default:                                                                                                           \
        call(8);                                                                                                       \
    }

#define SCORES(rows) return scores_rows(rows, dtype, keys, D, ahead, q, s)
#define VALUES(rows) return values_rows(rows, dtype, values, n, Dv, ahead, p, alpha, check, o)

APA_INLINE void scores_typed(apa_dtype dtype, const void *const *keys, int64_t D, const void *const *ahead, int R,
                             const float *q, float *s){ROWS_CASES(SCORES)}

APA_INLINE bool values_typed(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const void *const *ahead,
                             int R, const float *p, const float *alpha, bool check, float *o)
{
    ROWS_CASES(VALUES)
}

void apa_scores_few_avx512(apa_dtype dtype, const void *const *keys, int n, int64_t D, const void *const *ahead, int R,
                           const float *q, float *s)
{
    static const uint64_t zeros[LARGEST_DIM * 4 / 8] = {0};
    const void *whole[TILE];
    const void *const *from = keys;
    for (int key = 0; n < TILE && key < TILE; key++)
        whole[key] = key < n ? keys[key] : zeros;
    if (n < TILE) {
        from = whole;
        ahead = NULL;
    }
    if (dtype == APA_DTYPE_F16)
        scores_typed(APA_DTYPE_F16, from, D, ahead, R, q, s);
    else if (dtype == APA_DTYPE_BF16)
        scores_typed(APA_DTYPE_BF16, from, D, ahead, R, q, s);
    else
        scores_typed(APA_DTYPE_F32, from, D, ahead, R, q, s);
}

bool apa_pv_few_avx512(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const void *const *ahead, int R,
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
        most = _mm512_mask_max_ps(most, sees[g], most, x[g]);
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
