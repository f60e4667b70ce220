/* Pairs sorted by how far they are off: the worst ones, histograms, heads. */
#include "apa/eval.h"

#include "core/context_internal.h"
#include "eval/pair.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

/* ------------------------------------------------------------------------------- every pair's error */

typedef struct pair_figures {
    double cos, rel;
} pair_figures;

typedef struct figures_job {
    const apa_tensor *x, *y;
    int64_t pairs;
    pair_figures *figures;
    double *rows; /* two rows of Dv for every block */
} figures_job;

static void figures_of_block(void *argument, size_t index)
{
    const figures_job *job = argument;
    const int64_t Dv = job->x->shape[3], first = (int64_t)index * APA_EVAL_BLOCK_PAIRS;
    const int64_t end = first + APA_EVAL_BLOCK_PAIRS < job->pairs ? first + APA_EVAL_BLOCK_PAIRS : job->pairs;
    double *x = job->rows + (int64_t)index * 2 * Dv, *y = x + Dv;
    for (int64_t pair = first; pair < end; pair++) {
        apa_eval_load_row(job->x, pair, x);
        apa_eval_load_row(job->y, pair, y);
        const apa_eval_pair p = apa_eval_compare(x, y, Dv);
        job->figures[pair] = (pair_figures){p.cos, p.rel};
    }
}

/* Cosine and relative error of every pair; the caller frees *figures. */
static apa_status find_figures(apa_context *context, const apa_tensor *out, const apa_tensor *truth, int64_t *pairs,
                               pair_figures **figures)
{
    *figures = NULL;
    apa_status status = apa_eval_check_outputs(context, out, truth);
    if (status != APA_STATUS_OK)
        return status;
    figures_job job = {out, truth, 0, NULL, NULL};
    apa_eval_pair_count(out, &job.pairs); /* checked before */
    const size_t blocks = (size_t)((job.pairs + APA_EVAL_BLOCK_PAIRS - 1) / APA_EVAL_BLOCK_PAIRS);
    job.figures = apa_aligned_allocate((size_t)job.pairs, sizeof *job.figures);
    job.rows = apa_aligned_allocate(blocks, (size_t)(2 * out->shape[3]) * sizeof *job.rows);
    if (job.figures == NULL || job.rows == NULL) {
        apa_aligned_free(job.figures);
        apa_aligned_free(job.rows);
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "no memory for the errors of every pair");
    }
    apa_context_parallel(context, figures_of_block, &job, blocks);
    apa_aligned_free(job.rows);
    *pairs = job.pairs;
    *figures = job.figures;
    return APA_STATUS_OK;
}

/* ------------------------------------------------------------------------------- the worst ones */

static bool is_worse(const apa_pair_error *a, const apa_pair_error *b, apa_worst_by by)
{
    return by == APA_WORST_BY_COS ? a->cos < b->cos : a->rel_l2 > b->rel_l2;
}

/* Into the sorted list, behind its equals; the last one falls out of a full list. */
static void insert(apa_pair_error *list, int64_t *found, int64_t wanted, apa_worst_by by,
                   const apa_pair_error *candidate)
{
    if (*found == wanted && !is_worse(candidate, &list[wanted - 1], by))
        return;
    int64_t low = 0, high = *found;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (is_worse(candidate, &list[middle], by))
            high = middle;
        else
            low = middle + 1;
    }
    if (*found < wanted)
        ++*found;
    memmove(list + low + 1, list + low, (size_t)(*found - 1 - low) * sizeof *list);
    list[low] = *candidate;
}

apa_status apa_worst_pairs(apa_context *context, const apa_tensor *out, const apa_tensor *truth, apa_worst_by by,
                           int64_t wanted, apa_pair_error *worst, int64_t *found)
{
    if (context == NULL || worst == NULL || found == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    *found = 0;
    if (wanted < 1 || (by != APA_WORST_BY_COS && by != APA_WORST_BY_REL))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "wanted, by: expected at least 1 pair, by cosine or relative L2");
    int64_t pairs;
    pair_figures *figures;
    apa_status status = find_figures(context, out, truth, &pairs, &figures);
    if (status != APA_STATUS_OK)
        return status;
    for (int64_t pair = 0; pair < pairs; pair++) {
        int64_t place[3];
        apa_eval_pair_place(out, pair, place);
        const apa_pair_error candidate = {place[0], place[1], place[2], figures[pair].cos, figures[pair].rel};
        if (isnan(candidate.cos)) /* its truth is not finite */
            continue;
        insert(worst, found, wanted, by, &candidate);
    }
    apa_aligned_free(figures);
    return APA_STATUS_OK;
}

/* ------------------------------------------------------------------------------- histograms */

#define EDGES (APA_HISTOGRAM_BINS - 1)

/* Written out, so that no library's pow() decides on which side a value falls. */
static const double edges[EDGES] = {
    1e-10, 3.1622776601683795e-10, 1e-9, 3.1622776601683795e-9, 1e-8, 3.1622776601683795e-8,
    1e-7,  3.1622776601683795e-7,  1e-6, 3.1622776601683795e-6, 1e-5, 3.1622776601683795e-5,
    1e-4,  3.1622776601683795e-4,  1e-3, 3.1622776601683795e-3, 1e-2, 3.1622776601683795e-2,
    1e-1,  3.1622776601683795e-1,  1,    3.1622776601683795,    10};

double apa_histogram_edge(int32_t i)
{
    return i >= 0 && i < EDGES ? edges[i] : NAN;
}

static int bin_of(double value)
{
    int bin = 0;
    while (bin < EDGES && value >= edges[bin])
        bin++;
    return bin;
}

apa_status apa_histogram_measure(apa_context *context, const apa_tensor *out, const apa_tensor *truth,
                                 apa_histogram *histogram)
{
    if (context == NULL || histogram == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    int64_t pairs;
    pair_figures *figures;
    apa_status status = find_figures(context, out, truth, &pairs, &figures);
    if (status != APA_STATUS_OK)
        return status;
    memset(histogram, 0, sizeof *histogram);
    histogram->size = sizeof *histogram;
    histogram->pairs = pairs;
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (isnan(figures[pair].cos)) { /* its truth is not finite */
            histogram->truth_not_finite++;
            continue;
        }
        histogram->cos[bin_of(1 - figures[pair].cos)]++;
        histogram->rel_l2[bin_of(figures[pair].rel)]++;
    }
    apa_aligned_free(figures);
    return APA_STATUS_OK;
}

/* ------------------------------------------------------------------------------- heads */

static apa_tensor one_head(apa_tensor tensor, int64_t batch, int64_t head)
{
    const int64_t offset = batch * tensor.stride[0] + head * tensor.stride[1];
    if (tensor.data != NULL)
        tensor.data = (char *)tensor.data + offset * (int64_t)apa_dtype_bytes(tensor.dtype);
    tensor.shape[0] = tensor.shape[1] = 1;
    return tensor;
}

/* Shares of a head's visible (row, tile) pairs. */
static void count_verdicts(const uint8_t *verdict, int64_t count, apa_head_error *head)
{
    int64_t of[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < count; i++)
        of[verdict[i] & 3]++;
    const int64_t visible = count - of[APA_VERDICT_INVISIBLE];
    head->hot_share = visible > 0 ? (double)of[APA_VERDICT_HOT] / (double)visible : 0;
    head->skip_share = visible > 0 ? (double)of[APA_VERDICT_SKIPPED] / (double)visible : 0;
}

static apa_status measure_head(apa_context *context, const apa_tensor *out, const apa_tensor *truth,
                               apa_head_error *head)
{
    const apa_tensor x = one_head(*out, head->batch, head->head), y = one_head(*truth, head->batch, head->head);
    apa_error e;
    apa_status status = apa_error_measure(context, &x, NULL, &y, NULL, &e);
    if (status != APA_STATUS_OK)
        return status;
    head->mean_cos = e.mean_cos;
    head->min_cos = e.min_cos;
    head->min_cos_row = e.min_cos_pair[2];
    head->rel_l2 = e.rel_l2;
    head->rel_l2_max = e.rel_l2_max;
    head->lt_0_99 = e.lt_0_99;
    head->truth_not_finite = e.truth_not_finite;
    return APA_STATUS_OK;
}

apa_status apa_heads_measure(apa_context *context, const apa_tensor *out, const apa_tensor *truth,
                             const uint8_t *verdicts, int64_t tiles, apa_head_error *heads)
{
    if (context == NULL || heads == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    apa_status status = apa_eval_check_outputs(context, out, truth);
    if (status == APA_STATUS_OK && tiles < 0)
        status = apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "tiles: negative");
    const int64_t H = out != NULL ? out->shape[1] : 0, S = out != NULL ? out->shape[2] : 0;
    for (int64_t i = 0; status == APA_STATUS_OK && i < out->shape[0] * H; i++) {
        memset(&heads[i], 0, sizeof heads[i]);
        heads[i].size = sizeof heads[i];
        heads[i].batch = i / H;
        heads[i].head = i % H;
        heads[i].hot_share = heads[i].skip_share = NAN;
        status = measure_head(context, out, truth, &heads[i]);
        if (verdicts != NULL)
            count_verdicts(verdicts + i * S * tiles, S * tiles, &heads[i]);
    }
    return status;
}
