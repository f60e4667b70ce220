/* A pair taken apart: what of its exact output comes from hot tiles, what from cold ones.
 *
 * This is a computation of its own, in double, apart from every engine: for each visible tile all scores, their
 * maximum, exponentials against it, and the weighted values; then the tile joins one of two running sums, hot or cold,
 * each with its own maximum. At the end both are brought to the larger maximum: with l = l_hot + l_cold the parts are
 * o_hot / l and o_cold / l, and cold mass is l_cold / l. */
#include "apa/eval.h"

#include "attention/sequences.h"
#include "core/call.h"
#include "core/context_internal.h"
#include "eval/pair.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define CHUNK ((int64_t)64) /* pairs that have scratch memory at once */

/* Σ exp(score - max)·(1, value) over some tiles. */
typedef struct part {
    double max, sum, *o;
} part;

typedef struct examine_job {
    const apa_problem *problem;
    const apa_tensor *out;
    apa_call call; /* masks alone, for apa_call_visible() */
    double scale;
    int32_t tile;
    int64_t tiles;
    const uint8_t *verdicts;
    const apa_pair_error *pairs; /* of the chunk */
    apa_pair_detail *details;
    double *scratch;
    size_t per_pair; /* doubles of scratch */
} examine_job;

/* A row's scratch: q [D], hot and cold o, tile o, output row [Dv], scores [tile]. */
typedef struct examine_row {
    const examine_job *job;
    const apa_pair_error *pair;
    int64_t kv_head, first, end;
    double *q, *tile_o, *x, *score;
    part hot, cold;
    double largest_cold; /* log of its mass */
    int64_t largest_cold_tile;
} examine_row;

static int64_t row_offset(const apa_tensor *t, int64_t b, int64_t h, int64_t s)
{
    return b * t->stride[0] + h * t->stride[1] + s * t->stride[2];
}

static double score_of(const examine_row *row, int64_t key)
{
    const apa_tensor *k = &row->job->problem->k;
    const int64_t offset = row_offset(k, row->pair->batch, row->kv_head, key);
    double dot = 0;
    for (int64_t d = 0; d < k->shape[3]; d++)
        dot += row->q[d] * apa_eval_element(k, offset + d);
    return row->job->scale * dot;
}

/* to += from, exactly but for rounding. Tiles whose scores are all -inf add nothing. */
static void join(part *to, double max, double sum, const double *o, int64_t n)
{
    if (max == -INFINITY)
        return;
    const double top = to->max > max ? to->max : max;
    const double old = to->max == -INFINITY ? 0 : exp(to->max - top), new = exp(max - top);
    for (int64_t d = 0; d < n; d++)
        to->o[d] = to->o[d] * old + o[d] * new;
    to->sum = to->sum * old + sum * new;
    to->max = top;
}

/* Keys first … end-1 of tile t. */
static void take_tile(examine_row *row, int64_t t, int64_t first, int64_t end, uint8_t verdict)
{
    const apa_tensor *v = &row->job->problem->v;
    const int64_t Dv = v->shape[3];
    double max = -INFINITY, sum = 0;
    memset(row->tile_o, 0, (size_t)Dv * sizeof(double));
    for (int64_t key = first; key < end; key++) {
        const double s = row->score[key - first] = score_of(row, key);
        max = isnan(s) || s > max ? s : max; /* once NaN, no comparison changes it */
    }
    for (int64_t key = first; key < end && max != -INFINITY; key++) {
        const double p = exp(row->score[key - first] - max);
        const int64_t offset = row_offset(v, row->pair->batch, row->kv_head, key);
        sum += p;
        for (int64_t d = 0; d < Dv; d++)
            row->tile_o[d] += p * apa_eval_element(v, offset + d);
    }
    join(verdict == APA_VERDICT_HOT ? &row->hot : &row->cold, max, sum, row->tile_o, Dv);
    if (verdict != APA_VERDICT_HOT && (row->largest_cold_tile < 0 || max + log(sum) > row->largest_cold)) {
        row->largest_cold = max == -INFINITY ? -INFINITY : max + log(sum);
        row->largest_cold_tile = t;
    }
}

static double norm(const double *o, int64_t n)
{
    double largest = 0, sum = 0;
    for (int64_t d = 0; d < n; d++)
        largest = fmax(largest, fabs(o[d]));
    const double scale = isfinite(largest) ? apa_eval_safe_scale(largest) : 1;
    for (int64_t d = 0; d < n; d++)
        sum += o[d] * scale * (o[d] * scale);
    return sqrt(sum) / scale;
}

/* Both parts over their common sum. */
static void finish(examine_row *row, apa_pair_detail *detail)
{
    const int64_t Dv = row->job->problem->v.shape[3];
    const double top = row->hot.max > row->cold.max || isnan(row->hot.max) ? row->hot.max : row->cold.max;
    const double hot = row->hot.max == -INFINITY ? 0 : exp(row->hot.max - top),
                 cold = row->cold.max == -INFINITY ? 0 : exp(row->cold.max - top);
    const double sum = row->hot.sum * hot + row->cold.sum * cold;
    double *truth = row->tile_o;
    for (int64_t d = 0; d < Dv; d++) {
        row->hot.o[d] = sum == 0 ? 0 : row->hot.o[d] * hot / sum;
        row->cold.o[d] = sum == 0 ? 0 : row->cold.o[d] * cold / sum;
        truth[d] = row->hot.o[d] + row->cold.o[d];
    }
    detail->cold_mass = sum == 0 ? 0 : row->cold.sum * cold / sum;
    detail->largest_cold_tile = row->largest_cold_tile;
    const double largest = row->largest_cold_tile < 0 || sum == 0 ? 0 : exp(row->largest_cold - top) / sum;
    detail->largest_cold_share =
        largest > detail->cold_mass ? detail->cold_mass : largest; /* but for rounding it isn't */
    detail->lse = sum == 0 ? -INFINITY : top + log(sum);
    detail->truth_norm = norm(truth, Dv);
    detail->hot_norm = norm(row->hot.o, Dv);
    detail->cold_norm = norm(row->cold.o, Dv);
    const double parts = detail->hot_norm + detail->cold_norm;
    detail->cancellation = parts == 0 ? 1 : parts / detail->truth_norm;
    apa_eval_load_row(row->job->out,
                      (row->pair->batch * row->job->out->shape[1] + row->pair->head) * row->job->out->shape[2] +
                          row->pair->row,
                      row->x);
    detail->out_norm = norm(row->x, Dv);
    const apa_eval_pair p = apa_eval_compare(row->x, truth, Dv);
    detail->error = *row->pair;
    detail->error.cos = p.cos;
    detail->error.rel_l2 = p.rel;
}

static void set_up_row(const examine_job *job, size_t index, examine_row *row)
{
    const apa_tensor *q = &job->problem->q;
    const int64_t D = q->shape[3], Dv = job->problem->v.shape[3];
    memset(row, 0, sizeof *row);
    row->job = job;
    row->pair = &job->pairs[index];
    row->kv_head = row->pair->head / (q->shape[1] / job->problem->k.shape[1]);
    row->q = job->scratch + index * job->per_pair;
    memset(row->q, 0, job->per_pair * sizeof(double));
    row->hot.o = row->q + D;
    row->cold.o = row->hot.o + Dv;
    row->tile_o = row->cold.o + Dv;
    row->x = row->tile_o + Dv;
    row->score = row->x + Dv;
    row->hot.max = row->cold.max = row->largest_cold = -INFINITY;
    row->largest_cold_tile = -1;
    const int64_t offset = row_offset(q, row->pair->batch, row->pair->head, row->pair->row);
    for (int64_t d = 0; d < D; d++)
        row->q[d] = apa_eval_element(q, offset + d);
    apa_call_visible(&job->call, row->pair->row, &row->first, &row->end);
}

static void examine_pair(void *argument, size_t index)
{
    const examine_job *job = argument;
    const int64_t *shape = job->problem->q.shape;
    apa_pair_detail *detail = &job->details[index];
    examine_row row;
    set_up_row(job, index, &row);
    memset(detail, 0, sizeof *detail);
    detail->size = sizeof *detail;
    const uint8_t *verdicts =
        job->verdicts + ((row.pair->batch * shape[1] + row.pair->head) * shape[2] + row.pair->row) * job->tiles;
    for (int64_t first = row.first; first < row.end;) {
        const int64_t t = first / job->tile;
        const int64_t end = row.end - t * job->tile < job->tile ? row.end : (t + 1) * job->tile;
        detail->tiles++;
        detail->hot_tiles += verdicts[t] == APA_VERDICT_HOT;
        detail->skipped_tiles += verdicts[t] == APA_VERDICT_SKIPPED;
        take_tile(&row, t, first, end, verdicts[t]);
        first = end;
    }
    if (__builtin_add_overflow(job->call.q_offset, row.pair->row, &detail->position))
        detail->position = INT64_MAX;
    detail->keys = row.end > row.first ? row.end - row.first : 0;
    finish(&row, detail);
}

/* Everything that can be wrong with the problem itself is the plan's to find. */
static apa_status set_up(apa_context *context, examine_job *job)
{
    apa_problem problem = *job->problem;
    apa_recipe exact;
    apa_attention_options options;
    apa_plan plan;
    apa_plan_init(&plan);
    apa_attention_options_init(&options);
    options.engine = "reference";
    problem.out = *job->out;
    problem.lse.dtype = APA_DTYPE_NONE;
    apa_status status = apa_recipe_init(&exact, "exact");
    if (status == APA_STATUS_OK)
        status = apa_attention_plan(context, &problem, &exact, &options, &plan);
    if (status != APA_STATUS_OK)
        return status;
    if (problem.softcap != 0.0 || problem.attn_mask.dtype != APA_DTYPE_NONE ||
        problem.alibi_slopes.dtype != APA_DTYPE_NONE || problem.sinks.dtype != APA_DTYPE_NONE ||
        apa_sequences_differ(&problem))
        return apa_fail(
            context, APA_STATUS_UNSUPPORTED,
            "pairs: with softcap, attn_mask, alibi_slopes, sinks or sequences that differ none is taken apart");
    job->scale = plan.softmax_scale;
    job->tiles = problem.k.shape[2] / job->tile + (problem.k.shape[2] % job->tile != 0);
    job->call.Sq = problem.q.shape[2];
    job->call.Skv = problem.k.shape[2];
    job->call.causal = problem.causal != 0;
    job->call.q_offset = plan.q_offset;
    job->call.window_left = problem.window_left;
    job->call.window_right = problem.window_right;
    job->per_pair = (size_t)(problem.q.shape[3] + 4 * problem.v.shape[3] + job->tile);
    return APA_STATUS_OK;
}

static apa_status check_pairs(apa_context *context, const apa_problem *problem, const apa_pair_error *pairs,
                              int64_t count)
{
    const int64_t *shape = problem->q.shape;
    if (count > 0 &&
        !(apa_eval_readable(&problem->q) && apa_eval_readable(&problem->k) && apa_eval_readable(&problem->v)))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "q, k or v: no data");
    for (int64_t i = 0; i < count; i++)
        if (pairs[i].batch < 0 || pairs[i].batch >= shape[0] || pairs[i].head < 0 || pairs[i].head >= shape[1] ||
            pairs[i].row < 0 || pairs[i].row >= shape[2])
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                            "pairs: batch %" PRId64 ", head %" PRId64 ", row %" PRId64 " is outside of q",
                            pairs[i].batch, pairs[i].head, pairs[i].row);
    return APA_STATUS_OK;
}

apa_status apa_pairs_examine(apa_context *context, const apa_problem *problem, const apa_tensor *out, int32_t tile,
                             const uint8_t *verdicts, const apa_pair_error *pairs, int64_t count,
                             apa_pair_detail *details)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (problem == NULL || problem->size != sizeof *problem || out == NULL || verdicts == NULL || tile < 1 ||
        count < 0 || (count > 0 && (pairs == NULL || details == NULL)) || !apa_eval_readable(out))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "problem, out, tile, verdicts, pairs or details: not given, expected all of them");
    examine_job job;
    memset(&job, 0, sizeof job);
    job.problem = problem;
    job.out = out;
    job.tile = tile;
    job.verdicts = verdicts;
    apa_status status = set_up(context, &job);
    if (status == APA_STATUS_OK)
        status = check_pairs(context, problem, pairs, count);
    if (status != APA_STATUS_OK)
        return status;
    job.scratch = apa_aligned_allocate((size_t)(count < CHUNK ? count : CHUNK), job.per_pair * sizeof(double));
    if (job.scratch == NULL)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "no memory to examine pairs with");
    for (int64_t done = 0; done < count; done += CHUNK) {
        job.pairs = pairs + done;
        job.details = details + done;
        apa_context_parallel(context, examine_pair, &job, (size_t)(count - done < CHUNK ? count - done : CHUNK));
    }
    apa_aligned_free(job.scratch);
    return APA_STATUS_OK;
}
