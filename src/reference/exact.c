/* Exact tiles, and the end of a row.
 *
 * Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over tiles in rising order. One row's state is (m, l, o):
 *     s_j = scale·q·k_j - shift          shift = scale·q·k̄, so that exact and cold scores share one frame; 0 if
 * unsmoothed m'  = max(m, max s_j)      p_j = e^(s_j - m') l'  = l·e^(m-m') + Σ p_j   o' = o·e^(m-m') + Σ p_j v_j Only
 * keys that the row sees are touched, so nothing of an invisible key can reach it. -inf scores have p = 0 (never -inf -
 * -inf); NaN scores make p, l and o NaN, as they should. */
#include "reference/internal.h"

#include <math.h>
#include <string.h>

#define LANES 8 /* sums side by side, each in its own order: the compiler vectorises without reassociating */

/* dot[j] = Σ_d q[d]·kt[d][j] for 64 keys, d rising. */
void apa_reference_dots(const double *q, const double *kt, int64_t D, double *dot)
{
    for (int j = 0; j < APA_REFERENCE_TILE; j += LANES) {
        double sum[LANES] = {0};
        for (int64_t d = 0; d < D; ++d)
            for (int u = 0; u < LANES; ++u)
                sum[u] += q[d] * kt[d * APA_REFERENCE_TILE + j + u];
        memcpy(dot + j, sum, sizeof sum);
    }
}

/* o[c] += Σ_j p[j]·v[j][c] for j in lo … hi-1, rising. */
static void add_run(const double *p, const double *v, int64_t Dv, int64_t lo, int64_t hi, double *o)
{
    int64_t c = 0;
    for (; c + LANES <= Dv; c += LANES) {
        double sum[LANES];
        memcpy(sum, o + c, sizeof sum);
        for (int64_t j = lo; j < hi; ++j)
            for (int u = 0; u < LANES; ++u)
                sum[u] += p[j] * v[j * Dv + c + u];
        memcpy(o + c, sum, sizeof sum);
    }
    for (; c < Dv; ++c)
        for (int64_t j = lo; j < hi; ++j)
            o[c] += p[j] * v[j * Dv + c];
}

/* The same for the bits of `seen`, run by run: values of other keys are not touched. */
void apa_reference_weighted_sum(const double *p, const double *v, int64_t Dv, uint64_t seen, double *o)
{
    for (int64_t lo = 0; lo < APA_REFERENCE_TILE;) {
        int64_t hi = lo;
        while (hi < APA_REFERENCE_TILE && (seen >> hi & 1) != 0)
            ++hi;
        if (hi > lo)
            add_run(p, v, Dv, lo, hi, o);
        lo = hi + 1;
    }
}

/* The tile's K transposed and its V, from the inputs. Places beyond the sequence are zeroed: dots runs over them. */
void apa_reference_load_tile(apa_reference_block *block, int64_t t)
{
    const apa_call *call = block->call;
    const int64_t base = t * APA_REFERENCE_TILE;
    const int64_t n = call->Skv - base < APA_REFERENCE_TILE ? call->Skv - base : APA_REFERENCE_TILE;
    double key[APA_REFERENCE_DIM_MAX];
    if (n < APA_REFERENCE_TILE)
        memset(block->kt, 0, sizeof(double) * (size_t)(APA_REFERENCE_TILE * call->D));
    for (int64_t j = 0; j < n; ++j) {
        apa_reference_load(apa_call_key(call, &call->k, block->head->b, block->head->h, base + j), call->k.dtype,
                           call->D, call->recipe.exact_format, key);
        for (int64_t d = 0; d < call->D; ++d)
            block->kt[d * APA_REFERENCE_TILE + j] = key[d];
        apa_reference_load(apa_call_key(call, &call->v, block->head->b, block->head->h, base + j), call->v.dtype,
                           call->Dv, call->recipe.exact_format, block->v + j * call->Dv);
    }
}

/* o += P·V in the accumulator: FP32 key by key, f16 16 keys at a time. */
static void narrow_values(apa_reference_block *block, const double *p, uint64_t seen, double *o)
{
    const apa_call *call = block->call;
    const apa_accumulator kind = call->recipe.exact_accum;
    const int64_t step = kind == APA_ACCUMULATOR_F16 ? 16 : 1;
    double product[16];
    for (int64_t c = 0; c < call->Dv; ++c)
        for (int64_t j = 0; j < APA_REFERENCE_TILE; j += step) {
            int64_t n = 0;
            for (int64_t i = j; i < j + step; ++i)
                if ((seen >> i & 1) != 0)
                    product[n++] = p[i] * block->v[i * call->Dv + c];
            o[c] = n == 0 ? o[c] : apa_reference_step(kind, o[c], product, n);
        }
}

/* P·V of a tile into an FP32 state: P in FP16 against the row's largest score of the tile, so that its 11 bits are the
 * tile's own; exact_flush keys are summed in FP16, 16 at a time, what they come to in FP32. weight: e^(top - m). */
static void flushed_values(apa_reference_block *block, const double *p, uint64_t seen, double weight, double *o)
{
    const apa_call *call = block->call;
    double product[16];
    for (int64_t c = 0; c < call->Dv; ++c) {
        double sum = 0, flushed = 0;
        for (int64_t j = 0; j < APA_REFERENCE_TILE; j += 16) {
            int64_t n = 0;
            for (int64_t i = j; i < j + 16; ++i)
                if ((seen >> i & 1) != 0)
                    product[n++] = p[i] * block->v[i * call->Dv + c];
            sum = apa_reference_step(APA_ACCUMULATOR_F16, sum, product, n);
            if ((j + 16) % call->recipe.exact_flush == 0) {
                flushed = apa_reference_to(APA_ACCUMULATOR_F32, flushed + sum);
                sum = 0;
            }
        }
        o[c] = apa_reference_to(APA_ACCUMULATOR_F32, o[c] + weight * flushed);
    }
}

/* l sums the P that is multiplied. */
static void add_flushed(apa_reference_block *block, apa_reference_row *row, double *s, uint64_t seen, double *o)
{
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j)
        if ((seen >> j & 1) != 0)
            top = s[j] > top ? s[j] : top;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        if ((seen >> j & 1) == 0)
            continue;
        s[j] = s[j] == -INFINITY ? 0.0 : apa_reference_to(APA_ACCUMULATOR_F16, exp(s[j] - top));
        sum += s[j];
    }
    const double weight = top == -INFINITY ? 1.0 : exp(top - row->hot_max);
    row->hot_sum = apa_reference_to(APA_ACCUMULATOR_F32, row->hot_sum + weight * sum);
    flushed_values(block, s, seen, weight, o);
}

/* exact_accum f32: scores, exponentials and every sum round to FP32. f16: o is FP16 and P is FP16 in P·V (as in kernels
 * that trade its accuracy for registers); l stays FP32. exact_flush: o is FP32, only sums within a tile are FP16. */
static void exact_row(apa_reference_block *block, int64_t r, int64_t t)
{
    const apa_call *call = block->call;
    const apa_accumulator kind = call->recipe.exact_accum;
    const apa_accumulator scalar = kind == APA_ACCUMULATOR_F64 ? APA_ACCUMULATOR_F64 : APA_ACCUMULATOR_F32;
    const bool flushes = kind == APA_ACCUMULATOR_F16 && call->recipe.exact_flush > 0;
    apa_reference_row *row = &block->row[r];
    double *o = block->hot + r * call->Dv;
    const uint64_t seen = apa_reference_seen(block, r, t);
    double s[APA_REFERENCE_TILE];
    apa_reference_dots(block->q + r * call->D, block->kt, call->D, s);
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j)
        s[j] *= call->scale;
    apa_reference_bend(block, r, t, s);

    double m = row->hot_max;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        if ((seen >> j & 1) == 0)
            continue;
        s[j] = apa_reference_to(scalar, s[j] - row->shift);
        m = s[j] > m ? s[j] : m;
    }
    if (m > row->hot_max) {
        const double move = apa_reference_to(scalar, exp(row->hot_max - m)); /* 0 from the empty state */
        row->hot_sum = apa_reference_to(scalar, row->hot_sum * move);
        for (int64_t c = 0; c < call->Dv; ++c)
            o[c] = apa_reference_to(flushes ? scalar : kind, o[c] * move);
        row->hot_max = m;
    }
    if (flushes) {
        add_flushed(block, row, s, seen, o);
        return;
    }
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        if ((seen >> j & 1) == 0)
            continue;
        s[j] = s[j] == -INFINITY ? 0.0 : apa_reference_to(scalar, exp(s[j] - m));
        row->hot_sum = apa_reference_to(scalar, row->hot_sum + s[j]);
        s[j] = apa_reference_to(kind, s[j]);
    }
    if (kind == APA_ACCUMULATOR_F64)
        apa_reference_weighted_sum(s, block->v, call->Dv, seen, o);
    else
        narrow_values(block, s, seen, o);
}

void apa_reference_exact_tile(apa_reference_block *block, int64_t t)
{
    apa_reference_load_tile(block, t);
    for (int64_t r = 0; r < block->rows; ++r)
        if (apa_reference_sees(block, r, t))
            exact_row(block, r, t);
}

/* Merges the two states of a row, and its sink, as (o/l, lse) pairs (apa/state.h) and writes it:
 *     out = (w_c·(o_c/l_c + v̄) + w_h·o_h/l_h) / (w_c + w_h + w_s),   w = e^(lse - max lse),
 *     lse = max + ln(w_c + w_h + w_s) + shift
 * A sink is a state without values, at sink - shift. The weights come from the masses and not from the frames: a cold
 * frame is an estimate, and far from it all mass of the cold state may have rounded to 0. A state without mass has
 * o = 0, or NaN where a NaN in V was seen: o is added as it is. */
typedef struct weights {
    bool has_cold, has_hot, has_sink;
    double cold, hot, sink, sum; /* sum: of the three */
    double lse;
} weights;

static double relative(bool has, double lse, double top)
{
    return !has ? 0.0 : lse == top ? 1.0 : exp(lse - top);
}

static weights weigh(const apa_reference_block *block, const apa_reference_row *row)
{
    const double tau = apa_reference_tau(&block->call->recipe);
    weights w = {.has_cold = row->cold_sum > 0, .has_hot = row->hot_sum != 0, .has_sink = row->sink != -INFINITY};
    const double cold = w.has_cold ? (row->cold_frame + tau) * APA_REFERENCE_LN2 + log(row->cold_sum) : -INFINITY;
    const double hot = w.has_hot ? row->hot_max + log(row->hot_sum) : -INFINITY;
    const double sink = w.has_sink ? row->sink - row->shift : -INFINITY;
    double top = cold > hot ? cold : hot; /* NaN if hot is */
    top = sink > top ? sink : top;
    w.cold = relative(w.has_cold, cold, top);
    w.hot = relative(w.has_hot, hot, top);
    w.sink = relative(w.has_sink, sink, top);
    w.sum = w.cold + w.hot + w.sink;
    w.lse = top + log(w.sum) + row->shift;
    if (!w.has_cold && !w.has_hot)
        w.lse = row->sink; /* as given; -inf without one */
    return w;
}

static void finish_row(const apa_reference_block *block, int64_t r)
{
    const apa_call *call = block->call;
    const apa_reference_row *row = &block->row[r];
    const double *cold = block->cold, *hot = block->hot + r * call->Dv;
    const weights w = weigh(block, row);
    double out[APA_REFERENCE_DIM_MAX] = {0};

    for (int64_t c = 0; c < call->Dv; ++c) {
        out[c] = w.has_hot ? hot[c] / row->hot_sum : hot[c];
        if (w.has_cold)
            out[c] = (w.cold * (cold[r * call->Dv + c] / row->cold_sum + (double)block->head->v_mean[c]) +
                      (w.has_hot ? w.hot * out[c] : out[c])) /
                     w.sum;
        else if (w.has_hot && w.has_sink)
            out[c] = w.hot * out[c] / w.sum;
    }
    apa_reference_store(&call->out, block->head->b, row->hq, row->position, out);
    if (call->lse.dtype != APA_DTYPE_NONE)
        apa_reference_store(&call->lse, block->head->b, row->hq, row->position, &w.lse);
}

void apa_reference_finish(const apa_reference_block *block)
{
    for (int64_t r = 0; r < block->rows; ++r)
        if (block->row[r].real)
            finish_row(block, r);
}
