/* Engine calls on parts, states, and the way from states to outputs. See job.h. */
#include "dist/job.h"

#include "dist/hot.h"

#include "apa/state.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rows of one engine call's output at most, so that scratch does not grow with the shard: a multiple of the rows that
 * engines take together. */
#define PART_ELEMENTS ((int64_t)1 << 25)
#define PART_GRANULE 768
#define TILES_TOGETHER 16 /* of one block, whose exact parts one engine call gives */

static int64_t part_positions(const apa_dist_job *job)
{
    const int64_t most = PART_ELEMENTS / (job->mine->B * job->mine->Hq * job->mine->Dv) / PART_GRANULE * PART_GRANULE;
    return most < PART_GRANULE ? PART_GRANULE : most;
}

apa_status apa_dist_job_allocate(apa_dist_job *job)
{
    const apa_dist_card *c = job->mine;
    const int64_t heads = c->B * c->Hq;
    int64_t longest = 0;
    for (int32_t i = 0; i < c->q.count; i++) {
        job->rows += c->q.run[i].count;
        longest = c->q.run[i].count > longest ? c->q.run[i].count : longest;
    }
    if (heads == 0 || job->rows == 0)
        return APA_STATUS_OK;
    job->part_rows = heads * (longest < part_positions(job) ? longest : part_positions(job));
    if (job->statistics->exchange == APA_DIST_EXCHANGE_CODES) {
        const int64_t tiles = TILES_TOGETHER * job->G * APA_DIST_BLOCK;
        job->part_rows = job->part_rows < tiles ? tiles : job->part_rows;
        job->rotated = malloc((size_t)(heads * job->rows * c->D) * sizeof *job->rotated);
        job->known = malloc((size_t)(heads * job->rows) * 2 * sizeof *job->known);
        if (job->rotated == NULL || job->known == NULL)
            return APA_STATUS_OUT_OF_MEMORY;
    }
    job->state = calloc((size_t)(heads * job->rows), (size_t)job->width * sizeof *job->state);
    job->out_part = malloc((size_t)(job->part_rows * c->Dv) * sizeof *job->out_part);
    job->lse_part = malloc((size_t)job->part_rows * sizeof *job->lse_part);
    if (job->state == NULL || job->out_part == NULL || job->lse_part == NULL)
        return APA_STATUS_OUT_OF_MEMORY;
    for (int64_t row = 0; row < heads * job->rows; row++)
        apa_dist_row_clear(job->state + row * job->width, job->width);
    return APA_STATUS_OK;
}

void apa_dist_job_free(apa_dist_job *job)
{
    free(job->card);
    free(job->state);
    free(job->out_part);
    free(job->lse_part);
    free(job->rotated);
    free(job->known);
}

/* a + b, held within int64. */
static int64_t saturating(int64_t a, int64_t b)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return a > 0 ? INT64_MAX : INT64_MIN;
    return sum;
}

bool apa_dist_sees(const apa_dist_card *card, const apa_dist_run *q, const apa_dist_run *k)
{
    if (q->count == 0 || k->count == 0)
        return false;
    const int64_t from = saturating(q->first, card->q_offset), to = saturating(from, q->count - 1);
    int64_t low = INT64_MIN, high = INT64_MAX;
    if (card->window_left >= 0)
        low = saturating(from, -card->window_left);
    if (card->window_right >= 0)
        high = saturating(to, card->window_right);
    if (card->causal && to < high)
        high = to;
    return k->first <= high && k->first + k->count - 1 >= low;
}

bool apa_dist_sees_all(const apa_dist_card *card, const apa_dist_run *q, const apa_dist_run *k)
{
    const int64_t from = saturating(q->first, card->q_offset), to = saturating(from, q->count - 1);
    const int64_t last = k->first + k->count - 1;
    return !(card->causal && last > from) &&
           !(card->window_left >= 0 && k->first < saturating(to, -card->window_left)) &&
           !(card->window_right >= 0 && last > saturating(from, card->window_right));
}

apa_tensor apa_dist_view(const apa_tensor *tensor, int64_t at, int64_t count)
{
    apa_tensor view = *tensor;
    if (tensor->data != NULL)
        view.data = (char *)tensor->data + at * tensor->stride[2] * (int64_t)apa_dtype_bytes(tensor->dtype);
    view.shape[2] = count;
    return view;
}

apa_tensor apa_dist_view_heads(const apa_tensor *tensor, int64_t batch, int64_t head, int64_t heads)
{
    apa_tensor view = *tensor;
    view.data = (char *)tensor->data +
                (batch * tensor->stride[0] + head * tensor->stride[1]) * (int64_t)apa_dtype_bytes(tensor->dtype);
    view.shape[0] = 1;
    view.shape[1] = heads;
    return view;
}

double *apa_dist_state(const apa_dist_job *job, int64_t batch, int64_t head, int64_t row)
{
    return job->state + ((batch * job->mine->Hq + head) * job->rows + row) * job->width;
}

apa_status apa_dist_attend(apa_dist_job *job, const apa_tensor *q, int64_t q_position, const apa_tensor *k,
                           const apa_tensor *v, int64_t k_position, int masked, const apa_recipe *recipe,
                           uint8_t *verdicts, apa_statistics *statistics)
{
    apa_problem problem;
    apa_attention_options options;
    apa_problem_init(&problem);
    apa_attention_options_init(&options);
    apa_statistics_init(statistics);
    problem.q = *q;
    problem.k = *k;
    problem.v = *v;
    problem.out = apa_tensor_hnd(job->out_part, APA_DTYPE_F32, q->shape[0], q->shape[1], q->shape[2], v->shape[3]);
    problem.lse = apa_tensor_hnd(job->lse_part, APA_DTYPE_F32, q->shape[0], q->shape[1], q->shape[2], 1);
    problem.softmax_scale = job->mine->scale;
    problem.q_offset = 0;
    if (masked) {
        problem.causal = job->mine->causal;
        problem.window_left = job->mine->window_left;
        problem.window_right = job->mine->window_right;
        problem.q_offset = saturating(saturating(job->mine->q_offset, q_position), -k_position);
    }
    options.engine = job->engine;
    options.verdicts = verdicts;
    const double start = apa_dist_now_ms();
    apa_status status = apa_attention(job->context, &problem, recipe, &options, statistics);
    job->statistics->compute_ms += apa_dist_now_ms() - start;
    return status == APA_STATUS_OK
               ? status
               : apa_dist_fail(job->dist, status, "rank %d: %s", (int)job->rank, apa_context_message(job->context));
}

void apa_dist_count(apa_dist_job *job, const apa_statistics *s)
{
    job->statistics->visible += s->visible;
    job->statistics->hot += s->hot;
    job->statistics->skipped += s->skipped;
    memcpy(job->statistics->engine, s->engine, sizeof s->engine);
    memcpy(job->statistics->kernel, s->kernel, sizeof s->kernel);
}

/* out_part and lse_part of all heads, rows at … at+n-1 of this rank. */
static void add_part(apa_dist_job *job, int64_t at, int64_t n)
{
    const apa_dist_card *c = job->mine;
    const double start = apa_dist_now_ms();
    for (int64_t head = 0; head < c->B * c->Hq; head++)
        for (int64_t i = 0; i < n; i++)
            apa_dist_row_add(job->state + (head * job->rows + at + i) * job->width, job->width,
                             (double)job->lse_part[head * n + i], job->out_part + (head * n + i) * c->Dv, 1.0);
    job->statistics->pack_ms += apa_dist_now_ms() - start;
}

apa_status apa_dist_attend_run(apa_dist_job *job, const apa_tensor *k, const apa_tensor *v, const apa_dist_run *run)
{
    const apa_dist_card *c = job->mine;
    int64_t at = 0;
    for (int32_t i = 0; i < c->q.count; at += c->q.run[i].count, i++) {
        const apa_dist_run *q = &c->q.run[i];
        for (int64_t from = 0; from < q->count; from += part_positions(job)) {
            const int64_t rest = q->count - from, n = rest < part_positions(job) ? rest : part_positions(job);
            const apa_dist_run part = {q->first + from, n, 0};
            apa_statistics statistics;
            if (c->B == 0 || !apa_dist_sees(c, &part, run))
                continue;
            const apa_tensor rows = apa_dist_view(&job->q, q->at + from, n);
            apa_status status =
                apa_dist_attend(job, &rows, part.first, k, v, run->first, 1, &job->recipe, NULL, &statistics);
            if (status != APA_STATUS_OK)
                return status;
            apa_dist_count(job, &statistics);
            add_part(job, at + from, n);
        }
    }
    return APA_STATUS_OK;
}

apa_status apa_dist_attend_own(apa_dist_job *job)
{
    const apa_dist_shard *shard = &job->mine->k;
    apa_status status = APA_STATUS_OK;
    for (int32_t i = 0; i < shard->count && status == APA_STATUS_OK; i++) {
        const apa_tensor k = apa_dist_view(&job->k, shard->run[i].at, shard->run[i].count);
        const apa_tensor v = apa_dist_view(&job->v, shard->run[i].at, shard->run[i].count);
        status = apa_dist_attend_run(job, &k, &v, &shard->run[i]);
    }
    return status;
}

/* (frame, sum, o·sum) → (lse, ·, o). */
static void normalise(double *row, int64_t width)
{
    const double sum = row[1];
    row[0] = apa_dist_row_lse(row);
    for (int64_t d = APA_DIST_ROW_HEAD; d < width && row[0] != -INFINITY; d++)
        row[d] /= sum;
}

/* Merging with the empty state rounds once to whatever the outputs are. */
apa_status apa_dist_finish(apa_dist_job *job)
{
    const apa_dist_card *c = job->mine;
    const int64_t width = job->width;
    float zeros[1024] = {0}, nothing = -INFINITY;
    if (job->rows == 0 || c->B == 0)
        return APA_STATUS_OK;
    for (int64_t row = 0; row < c->B * c->Hq * job->rows; row++)
        normalise(job->state + row * width, width);
    const int64_t stride[4] = {c->Hq * job->rows * width, job->rows * width, width, 1};
    float *lse_memory = NULL;
    int64_t at = 0;
    apa_status status = APA_STATUS_OK;
    for (int32_t i = 0; i < c->q.count && status == APA_STATUS_OK; at += c->q.run[i].count, i++) {
        const apa_dist_run *run = &c->q.run[i];
        apa_tensor a =
            apa_tensor_hnd(job->state + at * width + APA_DIST_ROW_HEAD, APA_DTYPE_F64, c->B, c->Hq, run->count, c->Dv);
        apa_tensor a_lse = apa_tensor_hnd(job->state + at * width, APA_DTYPE_F64, c->B, c->Hq, run->count, 1);
        apa_tensor b = apa_tensor_hnd(zeros, APA_DTYPE_F32, c->B, c->Hq, run->count, c->Dv);
        apa_tensor b_lse = apa_tensor_hnd(&nothing, APA_DTYPE_F32, c->B, c->Hq, run->count, 1);
        memcpy(a.stride, stride, sizeof stride);
        memcpy(a_lse.stride, stride, sizeof stride);
        memset(b.stride, 0, 3 * sizeof b.stride[0]);
        memset(b_lse.stride, 0, 3 * sizeof b.stride[0]);
        const apa_tensor out = apa_dist_view(&job->out, run->at, run->count);
        apa_tensor lse = apa_dist_view(&job->lse, run->at, run->count);
        if (run->count > 0 && job->lse.dtype == APA_DTYPE_NONE) {
            lse_memory = malloc((size_t)(c->B * c->Hq * run->count) * sizeof *lse_memory);
            if (lse_memory == NULL)
                return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "no memory for the LSE");
            lse = apa_tensor_hnd(lse_memory, APA_DTYPE_F32, c->B, c->Hq, run->count, 1);
        }
        if (run->count > 0)
            status = apa_state_merge(job->context, &a, &a_lse, &b, &b_lse, &out, &lse);
        free(lse_memory);
        lse_memory = NULL;
    }
    return status == APA_STATUS_OK ? status : apa_dist_fail(job->dist, status, "%s", apa_context_message(job->context));
}
