/* The error of an output against a truth, over every pair.
 *
 * Pairs are cut into blocks of fixed size; each block is summed by one task, and the blocks' results are combined one
 * after the other, so that no figure depends on the number of threads. A pair's sums of squares come in units of its
 * own scale (pair.c); here they are brought to that of the largest value of all. */
#include "apa/eval.h"

#include "core/context_internal.h"
#include "eval/pair.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

typedef struct block_sums {
    double xx, yy, xy, dd; /* in units of the whole comparison's scale², over pairs without a fault */
    double cos, min_cos, rel_l2_max, max_abs, sum_abs;
    double ratio_min, ratio_max, lse_max_abs, largest;
    int64_t min_cos_pair, rel_l2_max_pair;
    int64_t lt_0_99, lt_0_9, lt_0, faults, truth_not_finite, logs;
} block_sums;

typedef struct comparison {
    const apa_tensor *x, *y, *x_lse, *y_lse; /* lse NULL when there is none to compare */
    int64_t pairs, Dv;
    double scale;
    block_sums *block;
    double *rows; /* two rows of Dv for every block */
} comparison;

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

static void measure_pair(const comparison *c, block_sums *b, int64_t pair, const apa_eval_pair *p)
{
    b->truth_not_finite += !p->truth_finite;
    if (!p->truth_finite)
        return; /* not perfect, not wrong: nothing is known */
    note_cos(b, pair, p->cos);
    note_rel(b, pair, p->rel);
    b->faults += p->fault;
    if (p->fault)
        return;
    const double nx = sqrt(p->xx), ny = sqrt(p->yy), to_common = c->scale / p->scale, square = to_common * to_common;
    b->sum_abs += p->sum_abs;
    b->max_abs = fmax(b->max_abs, p->max_abs);
    if (ny > 0) {
        b->ratio_min = fmin(b->ratio_min, nx / ny);
        b->ratio_max = fmax(b->ratio_max, nx / ny);
    }
    b->xx += p->xx * square;
    b->yy += p->yy * square;
    b->xy += p->xy * square;
    b->dd += p->dd * square;
}

static void measure_lse(const comparison *c, block_sums *b, int64_t pair)
{
    const double x = apa_eval_element(c->x_lse, apa_eval_pair_offset(c->x_lse, pair)),
                 y = apa_eval_element(c->y_lse, apa_eval_pair_offset(c->y_lse, pair));
    if (isnan(y))
        return;
    double difference = x == y ? 0 : fabs(x - y);
    if (isnan(difference))
        difference = INFINITY; /* a NaN where the truth has none */
    b->logs++;
    b->lse_max_abs = fmax(b->lse_max_abs, difference);
}

static int64_t block_end(const comparison *c, int64_t first)
{
    return first + APA_EVAL_BLOCK_PAIRS < c->pairs ? first + APA_EVAL_BLOCK_PAIRS : c->pairs;
}

static void measure_block(void *argument, size_t index)
{
    const comparison *c = argument;
    block_sums *b = &c->block[index];
    const int64_t first = (int64_t)index * APA_EVAL_BLOCK_PAIRS;
    double *x = c->rows + (int64_t)index * 2 * c->Dv, *y = x + c->Dv;
    memset(b, 0, sizeof *b);
    b->min_cos_pair = b->rel_l2_max_pair = -1;
    b->ratio_min = INFINITY;
    for (int64_t pair = first; pair < block_end(c, first); pair++) {
        apa_eval_load_row(c->x, pair, x);
        apa_eval_load_row(c->y, pair, y);
        const apa_eval_pair p = apa_eval_compare(x, y, c->Dv);
        measure_pair(c, b, pair, &p);
        if (c->x_lse != NULL)
            measure_lse(c, b, pair);
    }
}

/* The largest magnitude of the pairs that are summed, for the common scale. */
static void find_largest(void *argument, size_t index)
{
    const comparison *c = argument;
    const int64_t first = (int64_t)index * APA_EVAL_BLOCK_PAIRS;
    double *x = c->rows + (int64_t)index * 2 * c->Dv, *y = x + c->Dv, largest = 0;
    for (int64_t pair = first; pair < block_end(c, first); pair++) {
        apa_eval_load_row(c->x, pair, x);
        apa_eval_load_row(c->y, pair, y);
        if (!apa_eval_all_finite(x, c->Dv) || !apa_eval_all_finite(y, c->Dv))
            continue;
        for (int64_t d = 0; d < c->Dv; d++)
            largest = fmax(largest, fmax(fabs(x[d]), fabs(y[d])));
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
    t->faults += b->faults;
    t->truth_not_finite += b->truth_not_finite;
    t->logs += b->logs;
    if (b->min_cos_pair < 0)
        return; /* no pair of the block has a figure */
    if (t->min_cos_pair < 0 || b->min_cos < t->min_cos) {
        t->min_cos = b->min_cos;
        t->min_cos_pair = b->min_cos_pair;
    }
    note_rel(t, b->rel_l2_max_pair, b->rel_l2_max);
}

static void report(const comparison *c, const block_sums *t, apa_error *error)
{
    const double measured = (double)(c->pairs - t->truth_not_finite), elements = measured * (double)c->Dv;
    memset(error, 0, sizeof *error);
    error->size = sizeof *error;
    error->pairs = c->pairs;
    error->truth_not_finite = t->truth_not_finite;
    error->pooled_cos = t->xx == 0 && t->yy == 0 ? 1 : t->xx == 0 || t->yy == 0 ? 0 : t->xy / sqrt(t->xx) / sqrt(t->yy);
    error->pooled_cos = fmin(1, fmax(-1, error->pooled_cos));
    error->rel_l2 = t->dd == 0 ? 0 : t->yy == 0 ? INFINITY : sqrt(t->dd) / sqrt(t->yy);
    error->max_abs = t->max_abs;
    error->mean_abs = elements > 0 ? t->sum_abs / elements : 0;
    if (t->faults > 0) { /* an infinite error anywhere is one everywhere it is part of */
        error->pooled_cos = -1;
        error->rel_l2 = error->max_abs = error->mean_abs = INFINITY;
    }
    error->mean_cos = t->cos / measured;
    error->min_cos = t->min_cos;
    error->rel_l2_max = t->rel_l2_max;
    apa_eval_pair_place(c->x, t->min_cos_pair, error->min_cos_pair);
    apa_eval_pair_place(c->x, t->rel_l2_max_pair, error->rel_l2_max_pair);
    error->lt_0_99 = t->lt_0_99;
    error->lt_0_9 = t->lt_0_9;
    error->lt_0 = t->lt_0;
    const bool any = t->ratio_min <= t->ratio_max;
    error->norm_ratio_min = any ? t->ratio_min : 1;
    error->norm_ratio_max = any ? t->ratio_max : 1;
    error->lse_max_abs = t->logs > 0 ? t->lse_max_abs : NAN;
    error->non_finite = t->faults;
    if (measured == 0) /* nothing was compared: no figure, rather than a perfect one */
        error->pooled_cos = error->mean_cos = error->min_cos = error->rel_l2 = error->rel_l2_max = error->max_abs =
            error->mean_abs = error->norm_ratio_min = error->norm_ratio_max = NAN;
}

static apa_status check(apa_context *context, const apa_tensor *out, const apa_tensor *lse, const apa_tensor *truth,
                        const apa_tensor *truth_lse)
{
    apa_status status = apa_eval_check_outputs(context, out, truth);
    if (status != APA_STATUS_OK)
        return status;
    const apa_tensor *const logs[2] = {lse, truth_lse};
    for (int i = 0; i < 2; i++) {
        const apa_tensor *t = logs[i];
        if (t == NULL || t->dtype == APA_DTYPE_NONE)
            continue;
        if (!apa_eval_readable(t) || memcmp(t->shape, out->shape, 3 * sizeof t->shape[0]) != 0 || t->shape[3] != 1)
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
    apa_eval_pair_count(out, &c.pairs); /* checked before */
    const size_t blocks = (size_t)((c.pairs + APA_EVAL_BLOCK_PAIRS - 1) / APA_EVAL_BLOCK_PAIRS);
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
    c.scale = apa_eval_safe_scale(largest);
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
