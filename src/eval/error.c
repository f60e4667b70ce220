/* The error of an output against a truth, over every pair.
 *
 * Pairs are cut into blocks of fixed size; each block is summed by one task, and the blocks' results are combined one
 * after the other, so that no figure depends on the number of threads. Squares may leave the range of a double (f64
 * inputs), so norms are taken of values divided by a power of two where it is needed: `scale` below, nearly always 1.
 */
#include "apa/eval.h"

#include "core/context_internal.h"
#include "formats/formats.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define BLOCK_PAIRS ((int64_t)128)
#define SQUARE_SAFE                                                                                                    \
    1e140 /* the squares of a thousand values up to here, and of one down to 1/here, are normal numbers */

typedef struct block_sums {
    double xx, yy, xy, dd; /* in units of the whole comparison's scale², over pairs without a fault */
    double cos, min_cos, rel_l2_max, max_abs, sum_abs;
    double ratio_min, ratio_max, lse_max_abs, largest;
    int64_t min_cos_pair, rel_l2_max_pair;
    int64_t lt_0_99, lt_0_9, lt_0, non_finite, faults;
} block_sums;

typedef struct comparison {
    const apa_tensor *x, *y, *x_lse, *y_lse; /* lse NULL when there is none to compare */
    int64_t pairs, Dv;
    double scale;
    block_sums *block;
    double *rows; /* two rows of Dv for every block */
} comparison;

static double element(const apa_tensor *t, int64_t offset)
{
    switch (t->dtype) {
    case APA_DTYPE_F16:
        return (double)apa_f16_to_f32(((const uint16_t *)t->data)[offset]);
    case APA_DTYPE_BF16:
        return (double)apa_bf16_to_f32(((const uint16_t *)t->data)[offset]);
    case APA_DTYPE_F32:
        return (double)((const float *)t->data)[offset];
    case APA_DTYPE_F64:
        return ((const double *)t->data)[offset];
    case APA_DTYPE_NONE:
        break;
    }
    return NAN;
}

static int64_t pair_offset(const apa_tensor *t, int64_t pair)
{
    const int64_t row = pair % t->shape[2], head = pair / t->shape[2] % t->shape[1],
                  batch = pair / t->shape[2] / t->shape[1];
    return batch * t->stride[0] + head * t->stride[1] + row * t->stride[2];
}

static void load_row(const apa_tensor *t, int64_t pair, double *row)
{
    const int64_t offset = pair_offset(t, pair);
    for (int64_t d = 0; d < t->shape[3]; d++)
        row[d] = element(t, offset + d);
}

/* 1 where squares of values up to `largest` are harmless, else a power of two that brings `largest` near 1. */
static double safe_scale(double largest)
{
    if (largest == 0 || (largest < SQUARE_SAFE && largest > 1 / SQUARE_SAFE))
        return 1;
    int exponent;
    frexp(largest, &exponent);
    return ldexp(1.0, exponent > -1000 ? -exponent : 1000);
}

/* Where both are NaN, or the same infinity, x says what y says: such elements are taken out of both. Otherwise a
 * non-finite value in either is a fault of the pair. */
static bool settle_non_finite(double *x, double *y, int64_t n, bool *truth_finite)
{
    bool fault = false;
    *truth_finite = true;
    for (int64_t d = 0; d < n; d++) {
        const bool xf = isfinite(x[d]), yf = isfinite(y[d]);
        if (xf && yf)
            continue;
        *truth_finite = *truth_finite && yf;
        if ((isnan(x[d]) && isnan(y[d])) || x[d] == y[d])
            x[d] = y[d] = 0;
        else
            fault = true;
    }
    return !fault;
}

static double largest_of(const double *x, const double *y, int64_t n)
{
    double largest = 0;
    for (int64_t d = 0; d < n; d++)
        largest = fmax(largest, fmax(fabs(x[d]), fabs(y[d])));
    return largest;
}

static void note_cos(block_sums *b, int64_t pair, double cos)
{
    b->cos += cos;
    b->lt_0_99 += cos < 0.99;
    b->lt_0_9 += cos < 0.9;
    b->lt_0 += cos < 0;
    if (b->min_cos_pair < 0 || cos < b->min_cos) {
        b->min_cos = cos;
        b->min_cos_pair = pair;
    }
}

static void note_rel(block_sums *b, int64_t pair, double rel)
{
    if (b->rel_l2_max_pair < 0 || rel > b->rel_l2_max) {
        b->rel_l2_max = rel;
        b->rel_l2_max_pair = pair;
    }
}

static void measure_pair(const comparison *c, block_sums *b, int64_t pair, const double *x, const double *y)
{
    const double scale = safe_scale(largest_of(x, y, c->Dv));
    double xx = 0, yy = 0, xy = 0, dd = 0;
    for (int64_t d = 0; d < c->Dv; d++) {
        const double u = x[d] * scale, w = y[d] * scale, difference = u - w, abs = fabs(x[d] - y[d]);
        xx += u * u;
        yy += w * w;
        xy += u * w;
        dd += difference * difference;
        b->sum_abs += abs;
        b->max_abs = fmax(b->max_abs, abs);
    }
    const double nx = sqrt(xx), ny = sqrt(yy);
    double cos = nx == 0 && ny == 0 ? 1 : nx == 0 || ny == 0 ? 0 : xy / nx / ny;
    cos = cos > 1 ? 1 : cos < -1 ? -1 : cos; /* rounding may pass ±1 by some 1e-16 */
    note_cos(b, pair, cos);
    note_rel(b, pair, dd == 0 ? 0 : ny == 0 ? INFINITY : sqrt(dd) / ny);
    if (ny > 0) {
        b->ratio_min = fmin(b->ratio_min, nx / ny);
        b->ratio_max = fmax(b->ratio_max, nx / ny);
    }
    const double to_common = c->scale / scale, square = to_common * to_common;
    b->xx += xx * square;
    b->yy += yy * square;
    b->xy += xy * square;
    b->dd += dd * square;
}

static void measure_lse(const comparison *c, block_sums *b, int64_t pair)
{
    const double x = element(c->x_lse, pair_offset(c->x_lse, pair)), y = element(c->y_lse, pair_offset(c->y_lse, pair));
    double difference = x == y || (isnan(x) && isnan(y)) ? 0 : fabs(x - y);
    if (isnan(difference))
        difference = INFINITY; /* a NaN on one side alone */
    b->lse_max_abs = fmax(b->lse_max_abs, difference);
}

static int64_t block_end(const comparison *c, int64_t first)
{
    return first + BLOCK_PAIRS < c->pairs ? first + BLOCK_PAIRS : c->pairs;
}

static void measure_block(void *argument, size_t index)
{
    const comparison *c = argument;
    block_sums *b = &c->block[index];
    const int64_t first = (int64_t)index * BLOCK_PAIRS;
    double *x = c->rows + (int64_t)index * 2 * c->Dv, *y = x + c->Dv;
    memset(b, 0, sizeof *b);
    b->min_cos_pair = b->rel_l2_max_pair = -1;
    b->ratio_min = INFINITY;
    for (int64_t pair = first; pair < block_end(c, first); pair++) {
        load_row(c->x, pair, x);
        load_row(c->y, pair, y);
        bool truth_finite;
        if (settle_non_finite(x, y, c->Dv, &truth_finite)) {
            measure_pair(c, b, pair, x, y);
        } else {
            b->faults++;
            b->non_finite += truth_finite;
            note_cos(b, pair, -1);
            note_rel(b, pair, INFINITY);
        }
        if (c->x_lse != NULL)
            measure_lse(c, b, pair);
    }
}

/* The largest finite magnitude, for the common scale. */
static void find_largest(void *argument, size_t index)
{
    const comparison *c = argument;
    const int64_t first = (int64_t)index * BLOCK_PAIRS;
    double *x = c->rows + (int64_t)index * 2 * c->Dv, *y = x + c->Dv, largest = 0;
    for (int64_t pair = first; pair < block_end(c, first); pair++) {
        load_row(c->x, pair, x);
        load_row(c->y, pair, y);
        for (int64_t d = 0; d < c->Dv; d++) {
            largest = isfinite(x[d]) ? fmax(largest, fabs(x[d])) : largest;
            largest = isfinite(y[d]) ? fmax(largest, fabs(y[d])) : largest;
        }
    }
    c->block[index].largest = largest;
}

static void combine(block_sums *t, const block_sums *b)
{
    t->xx += b->xx;
    t->yy += b->yy;
    t->xy += b->xy;
    t->dd += b->dd;
    t->cos += b->cos;
    t->sum_abs += b->sum_abs;
    t->max_abs = fmax(t->max_abs, b->max_abs);
    t->ratio_min = fmin(t->ratio_min, b->ratio_min);
    t->ratio_max = fmax(t->ratio_max, b->ratio_max);
    t->lse_max_abs = fmax(t->lse_max_abs, b->lse_max_abs);
    t->lt_0_99 += b->lt_0_99;
    t->lt_0_9 += b->lt_0_9;
    t->lt_0 += b->lt_0;
    t->non_finite += b->non_finite;
    t->faults += b->faults;
    if (t->min_cos_pair < 0 || b->min_cos < t->min_cos) {
        t->min_cos = b->min_cos;
        t->min_cos_pair = b->min_cos_pair;
    }
    note_rel(t, b->rel_l2_max_pair, b->rel_l2_max);
}

static void pair_place(const comparison *c, int64_t pair, int64_t place[3])
{
    if (pair < 0) {
        place[0] = place[1] = place[2] = -1;
        return;
    }
    place[2] = pair % c->x->shape[2];
    place[1] = pair / c->x->shape[2] % c->x->shape[1];
    place[0] = pair / c->x->shape[2] / c->x->shape[1];
}

static void report(const comparison *c, const block_sums *t, apa_error *error)
{
    const double elements = (double)c->pairs * (double)c->Dv;
    memset(error, 0, sizeof *error);
    error->size = sizeof *error;
    error->pairs = c->pairs;
    error->pooled_cos = t->xx == 0 && t->yy == 0 ? 1 : t->xx == 0 || t->yy == 0 ? 0 : t->xy / sqrt(t->xx) / sqrt(t->yy);
    error->pooled_cos = fmin(1, fmax(-1, error->pooled_cos));
    error->rel_l2 = t->dd == 0 ? 0 : t->yy == 0 ? INFINITY : sqrt(t->dd) / sqrt(t->yy);
    error->max_abs = t->max_abs;
    error->mean_abs = elements > 0 ? t->sum_abs / elements : 0;
    if (t->faults > 0) { /* an infinite error anywhere is one everywhere it is part of */
        error->pooled_cos = -1;
        error->rel_l2 = error->max_abs = error->mean_abs = INFINITY;
    }
    error->mean_cos = c->pairs > 0 ? t->cos / (double)c->pairs : 1;
    error->min_cos = c->pairs > 0 ? t->min_cos : 1;
    error->rel_l2_max = t->rel_l2_max;
    pair_place(c, t->min_cos_pair, error->min_cos_pair);
    pair_place(c, t->rel_l2_max_pair, error->rel_l2_max_pair);
    error->lt_0_99 = t->lt_0_99;
    error->lt_0_9 = t->lt_0_9;
    error->lt_0 = t->lt_0;
    const bool any = t->ratio_min <= t->ratio_max;
    error->norm_ratio_min = any ? t->ratio_min : 1;
    error->norm_ratio_max = any ? t->ratio_max : 1;
    error->lse_max_abs = c->x_lse != NULL ? t->lse_max_abs : NAN;
    error->non_finite = t->non_finite;
}

static bool same_shape(const apa_tensor *a, const apa_tensor *b)
{
    return memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

static bool readable(const apa_tensor *t)
{
    bool empty = false;
    for (int i = 0; i < 4; i++) {
        if (t->shape[i] < 0)
            return false;
        empty = empty || t->shape[i] == 0;
    }
    return apa_dtype_bytes(t->dtype) != 0 && (empty || t->data != NULL);
}

static apa_status check(apa_context *context, const apa_tensor *out, const apa_tensor *lse, const apa_tensor *truth,
                        const apa_tensor *truth_lse)
{
    if (out == NULL || truth == NULL || !readable(out) || !readable(truth))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "out, truth: not given, expected two tensors with data");
    if (!same_shape(out, truth))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "out, truth: shapes differ, expected equal ones");
    const apa_tensor *const logs[2] = {lse, truth_lse};
    for (int i = 0; i < 2; i++) {
        const apa_tensor *t = logs[i];
        if (t == NULL || t->dtype == APA_DTYPE_NONE)
            continue;
        if (!readable(t) || memcmp(t->shape, out->shape, 3 * sizeof t->shape[0]) != 0 || t->shape[3] != 1)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: shape differs from [B, H, S, 1] of out",
                            i == 0 ? "lse" : "truth_lse");
    }
    return APA_STATUS_OK;
}

apa_status apa_error_measure(apa_context *context, const apa_tensor *out, const apa_tensor *lse,
                             const apa_tensor *truth, const apa_tensor *truth_lse, apa_error *error)
{
    if (context == NULL || error == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    apa_status status = check(context, out, lse, truth, truth_lse);
    if (status != APA_STATUS_OK)
        return status;
    const bool logs =
        lse != NULL && truth_lse != NULL && lse->dtype != APA_DTYPE_NONE && truth_lse->dtype != APA_DTYPE_NONE;
    comparison c = {out, truth, logs ? lse : NULL, logs ? truth_lse : NULL, 0, out->shape[3], 1, NULL, NULL};
    if (__builtin_mul_overflow(out->shape[0], out->shape[1], &c.pairs) ||
        __builtin_mul_overflow(c.pairs, out->shape[2], &c.pairs))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "out: shape overflows");
    const size_t blocks = (size_t)((c.pairs + BLOCK_PAIRS - 1) / BLOCK_PAIRS);
    c.block = apa_aligned_allocate(blocks, sizeof *c.block);
    c.rows = apa_aligned_allocate(blocks, (size_t)(2 * c.Dv) * sizeof *c.rows);
    if (c.block == NULL || c.rows == NULL) {
        apa_aligned_free(c.block);
        apa_aligned_free(c.rows);
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "no memory for the sums of %zu blocks", blocks);
    }
    double largest = 0;
    apa_context_parallel(context, find_largest, &c, blocks);
    for (size_t i = 0; i < blocks; i++)
        largest = fmax(largest, c.block[i].largest);
    c.scale = safe_scale(largest);
    apa_context_parallel(context, measure_block, &c, blocks);
    block_sums total;
    memset(&total, 0, sizeof total);
    total.min_cos_pair = total.rel_l2_max_pair = -1;
    total.ratio_min = INFINITY;
    for (size_t i = 0; i < blocks; i++)
        combine(&total, &c.block[i]);
    report(&c, &total, error);
    apa_aligned_free(c.block);
    apa_aligned_free(c.rows);
    return APA_STATUS_OK;
}
