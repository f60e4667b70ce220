/* Exact tiles for a few rows (decode) over eight lanes: keys in the lanes for the scores and the softmax, channels for
 * P·V. See cpu/lanes8/softmax.h for how this text becomes kernels; the file that includes it defines
 *   turn8(x)   eight vectors: lane j of x[i] → lane i of x[j]
 *
 * The arithmetic of a (row, key) or (row, channel) is that of the kernels with rows in the lanes: one chain of
 * multiply-adds over rising d, or over rising keys. A chain's links follow each other at the latency of a multiply-add,
 * so four groups of keys take turns every eight links. */
#include "cpu/lanes8/common.h"
#include "cpu/lanes8/frame.h"
#include "cpu/few_keys.h"
#include "cpu/unroll.h"

#include <math.h>
#include <string.h>

#define FEW APA_CPU_FEW
#define GROUPS (KEYS / EIGHT)
#define AT_ONCE 4   /* rows whose chains are in registers beside eight vectors of keys */
#define ASK_EVERY 8 /* keys of P·V: the inner loop is kept free of it, or gcc spills sums */

APA_INLINE v8f load8(apa_dtype dtype, const char *at)
{
    if (dtype == APA_DTYPE_F16)
        return v8f_load_f16(at);
    if (dtype == APA_DTYPE_BF16)
        return v8f_load_bf16(at);
    return v8f_load((const float *)(const void *)at);
}

/* ---- scores ---- */

/* Rows first … end-1: eight links of each chain. */
APA_INLINE void links(int first, int end, const v8f *x, const float *q, v8f *sum)
{
    v8f chain[AT_ONCE];
    for (int r = first; r < end; r++)
        chain[r - first] = sum[r];
    APA_UNROLL
    for (int e = 0; e < EIGHT; e++)
        for (int r = first; r < end; r++)
            chain[r - first] = v8f_fma(x[e], v8f_set(q[e * FEW + r]), chain[r - first]);
    for (int r = first; r < end; r++)
        sum[r] = chain[r - first];
}

/* Eight values of eight keys, `at` bytes into them. */
APA_INLINE void scores_piece(int R, apa_dtype dtype, const void *const *keys, int64_t at, const float *q, v8f *sum)
{
    v8f x[EIGHT];
    for (int i = 0; i < EIGHT; i++)
        x[i] = load8(dtype, (const char *)keys[i] + at);
    turn8(x);
    links(0, R < AT_ONCE ? R : AT_ONCE, x, q, sum);
    if (R > AT_ONCE)
        links(AT_ONCE, R, x, q, sum);
}

APA_INLINE void scores_keys(int R, apa_dtype dtype, const void *const *keys, int64_t D, apa_cpu_asking *asking,
                            const float *q, float *s)
{
    const int64_t size = dtype == APA_DTYPE_F32 ? 4 : 2, whole = D / EIGHT * EIGHT;
    v8f sum[GROUPS][FEW];
    tail_rows tails;
    for (int g = 0; g < GROUPS; g++)
        for (int r = 0; r < R; r++)
            sum[g][r] = v8f_set(0.0f);
    for (int64_t d = 0; d < D; d += EIGHT) {
        const bool rest = d == whole;
        apa_cpu_ask(asking);
        if (rest)
            take_tails(keys, d * size, (D - d) * size, &tails);
        APA_UNROLL_BY_GCC
        for (int g = 0; g < GROUPS; g++)
            scores_piece(R, dtype, (rest ? tails.row : keys) + g * EIGHT, rest ? 0 : d * size, q + d * FEW, sum[g]);
    }
    for (int g = 0; g < GROUPS; g++)
        for (int r = 0; r < R; r++)
            v8f_store(s + r * TILE + g * EIGHT, sum[g][r]);
}

APA_INLINE void scores_rows(int R, apa_dtype dtype, const void *const *keys, int64_t D, const apa_cpu_ahead *ahead,
                            const float *q, float *s)
{
    apa_cpu_asking asking = apa_cpu_asking_over(ahead, (D + EIGHT - 1) / EIGHT * (TILE / KEYS));
    for (int key = 0; key < TILE; key += KEYS)
        scores_keys(R, dtype, keys + key, D, &asking, q, s + key);
}

void KERNEL(scores_few)(apa_dtype dtype, const void *const *keys, int n, int64_t D, const apa_cpu_ahead *ahead, int R,
                        const float *q, float *s)
{
    scores_of_tile(dtype, keys, n, D, ahead, R, q, s);
}

/* ---- softmax ---- */

/* Lanes of keys 8g … 8g+7 that a row sees. */
APA_INLINE v8m seen(const apa_cpu_span *span, int r, int g)
{
    static const int32_t order[EIGHT] = {0, 1, 2, 3, 4, 5, 6, 7};
    const v8i key = v8i_add(v8i_load(order), v8i_set(g * EIGHT));
    return v8m_and(v8i_gt(v8i_set(span->hi[r]), key), v8i_gt(v8i_add(key, v8i_set(1)), v8i_set(span->lo[r])));
}

/* A row's scores become its weights; returns their sum, in the order of softmax_f32: four sums over keys 0, 4, 8 … ,
 * 1, 5, 9 … and so on. */
APA_INLINE float weigh(float *s, float base, float c, const apa_cpu_span *span, int r)
{
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int g = 0; g < TILE / EIGHT; g++) {
        v8f p = v8f_exp2(v8f_mul(v8f_sub(v8f_load(s + g * EIGHT), v8f_set(base)), v8f_set(c)));
        if (span != NULL)
            p = v8f_keep(seen(span, r, g), p);
        v8f_store(s + g * EIGHT, p);
    }
    for (int key = 0; key < TILE; key += 4)
        for (int u = 0; u < 4; u++)
            sum[u] += s[key + u];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

void KERNEL(softmax_few)(int R, float *s, float c, const apa_cpu_span *span, apa_cpu_state *state, float *alpha)
{
    const v8f lowest = v8f_set(-INFINITY);
    float maximum[FEW], base[FEW], sum[FEW] = {0.0f};
    v8f base_of_rows;
    for (int r = 0; r < FEW; r++)
        maximum[r] = -INFINITY;
    for (int r = 0; r < R; r++) {
        v8f most = lowest;
        for (int g = 0; g < TILE / EIGHT; g++) {
            const v8f x = v8f_load(s + r * TILE + g * EIGHT);
            most = v8f_max_drop_nan(most, span != NULL ? v8f_select(seen(span, r, g), x, lowest) : x);
        }
        maximum[r] = v8f_reduce_max(most);
    }
    const v8f factor = move_frame(v8f_load(maximum), c, state->frame, &base_of_rows);
    v8f_store(alpha, factor);
    v8f_store(base, base_of_rows);
    for (int r = 0; r < R; r++)
        sum[r] = span != NULL ? weigh(s + r * TILE, base[r], c, span, r) : weigh(s + r * TILE, base[r], c, NULL, r);
    v8f_store(state->sum, v8f_fma(v8f_load(state->sum), factor, v8f_load(sum)));
}

/* ---- P·V ---- */

/* One key's. The fewer operands, weights or values, stay in registers: 16 of them hold 12 sums, 3 and 1. */
APA_INLINE void add_products(int R, int W, apa_dtype dtype, const char *row, const float *p, v8f (*acc)[8])
{
    const int64_t step = EIGHT * (dtype == APA_DTYPE_F32 ? 4 : 2);
    v8f kept[8];
    if (R <= W) {
        for (int r = 0; r < R; r++)
            kept[r] = v8f_set(p[r * TILE]);
        for (int w = 0; w < W; w++) {
            const v8f v = load8(dtype, row + w * step);
            for (int r = 0; r < R; r++)
                acc[r][w] = v8f_fma(kept[r], v, acc[r][w]);
        }
        return;
    }
    for (int w = 0; w < W; w++)
        kept[w] = load8(dtype, row + w * step);
    for (int r = 0; r < R; r++) {
        const v8f weight = v8f_set(p[r * TILE]);
        for (int w = 0; w < W; w++)
            acc[r][w] = v8f_fma(weight, kept[w], acc[r][w]);
    }
}

/* R rows' sums over the tile of 8·W channels from c on; false when one is not finite. Of the last, `left` of 8 are
 * there. */
APA_INLINE bool values_strip(int R, int W, apa_dtype dtype, const void *const *values, int n, int64_t c, int left,
                             apa_cpu_asking *asking, const float *p, int64_t Do, float *sum)
{
    const int64_t size = dtype == APA_DTYPE_F32 ? 4 : 2;
    char part[EIGHT * sizeof(float)] = {0};
    v8f acc[FEW][8];
    v8m bad = v8m_none();
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++)
            acc[r][w] = v8f_set(0.0f);
    for (int start = 0; start < n; start += ASK_EVERY) {
        const int end = start + ASK_EVERY < n ? start + ASK_EVERY : n;
        apa_cpu_ask(asking);
        for (int key = start; key < end; key++) {
            const char *row = (const char *)values[key] + c * size;
            if (left < EIGHT)
                row = memcpy(part, row, (size_t)(left * size));
            __asm__("" : "+r"(row)); /* one base and constant offsets, or gcc keeps a register for each offset */
            add_products(R, W, dtype, row, p + key, acc);
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) {
            bad = v8m_or(bad, v8f_not_finite(acc[r][w]));
            v8f_store(sum + r * Do + c + EIGHT * w, acc[r][w]);
        }
    return v8m_bits(bad) == 0;
}

/* Strips of W vectors, then of one, then what is left of one. */
APA_INLINE bool values_rows(int R, int W, apa_dtype dtype, const void *const *values, int n, int64_t Dv,
                            const apa_cpu_ahead *ahead, const float *p, const float *alpha, bool check, float *o)
{
    const int64_t Do = (Dv + 15) / 16 * 16, whole = Dv / (EIGHT * W), rest = (Dv - whole * EIGHT * W + 7) / EIGHT;
    float sum[FEW * LARGEST_DIM];
    apa_cpu_asking asking = apa_cpu_asking_over(ahead, (n + ASK_EVERY - 1) / ASK_EVERY * (whole + rest));
    bool finite = true;
    int64_t c = 0;
    for (; c + EIGHT * W <= Dv; c += EIGHT * W)
        finite = values_strip(R, W, dtype, values, n, c, EIGHT, &asking, p, Do, sum) && finite;
    for (; c + EIGHT <= Dv && W > 1; c += EIGHT)
        finite = values_strip(R, 1, dtype, values, n, c, EIGHT, &asking, p, Do, sum) && finite;
    if (c < Dv)
        finite = values_strip(R, 1, dtype, values, n, c, (int)(Dv - c), &asking, p, Do, sum) && finite;
    if (check && !finite)
        return false;
    for (int r = 0; r < R; r++)
        for (c = r * Do; c < r * Do + Dv; c += EIGHT)
            v8f_store(o + c, v8f_add(v8f_mul(v8f_load(o + c), v8f_set(alpha[r])), v8f_load(sum + c)));
    return true;
}

/* One text for each number of rows: at least eight sums in registers, and what feeds them. */
APA_INLINE bool values_typed(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const apa_cpu_ahead *ahead,
                             int R, const float *p, const float *alpha, bool check, float *o)
{
    switch (R) {
    case 1:
        return values_rows(1, 8, dtype, values, n, Dv, ahead, p, alpha, check, o);
    case 2:
        return values_rows(2, 4, dtype, values, n, Dv, ahead, p, alpha, check, o);
    case 3:
        return values_rows(3, 4, dtype, values, n, Dv, ahead, p, alpha, check, o);
    case 4:
        return values_rows(4, 2, dtype, values, n, Dv, ahead, p, alpha, check, o);
    case 5:
    case 6:
        return values_rows(6, 2, dtype, values, n, Dv, ahead, p, alpha, check, o);
    default:
        return values_rows(FEW, 1, dtype, values, n, Dv, ahead, p, alpha, check, o);
    }
}

bool KERNEL(pv_few)(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const apa_cpu_ahead *ahead, int R,
                    const float *p, const float *alpha, bool check, float *o)
{
    if (dtype == APA_DTYPE_F16)
        return values_typed(APA_DTYPE_F16, values, n, Dv, ahead, R, p, alpha, check, o);
    if (dtype == APA_DTYPE_BF16)
        return values_typed(APA_DTYPE_BF16, values, n, Dv, ahead, R, p, alpha, check, o);
    return values_typed(APA_DTYPE_F32, values, n, Dv, ahead, R, p, alpha, check, o);
}
