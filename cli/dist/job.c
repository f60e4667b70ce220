/* From whole inputs to a rank's part, and one call. */
#include "ranks.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define GRANULE 64 /* keys: tiles stay whole */

/* Bytes that a rank would send: states of all rows, twice for a reduction to all, against keys. */
static bool whole_is_cheaper(const apa_problem *p, int32_t ranks)
{
    const double states =
        (double)p->q.shape[0] * (double)p->q.shape[1] * (double)p->q.shape[2] * ((double)p->v.shape[3] + 2) * 8 * 2;
    const double keys = (double)p->k.shape[0] * (double)p->k.shape[1] * (double)p->k.shape[2] *
                        (double)(p->k.shape[3] + p->v.shape[3]) * (double)apa_dtype_bytes(p->k.dtype) *
                        (double)(ranks - 1) / (double)ranks;
    return states < keys;
}

static apa_dist_shard cut(const ranks_job *job, int64_t length, bool causal)
{
    const int32_t rank = apa_dist_rank(job->dist), ranks = apa_dist_ranks(job->dist);
    return causal ? apa_dist_split_zigzag(length, ranks, rank, GRANULE)
                  : apa_dist_split_blocks(length, ranks, rank, GRANULE);
}

/* An array of the whole output in q's layout and number of dimensions (last 0: an LSE, [B,H,S]), and its tensor. The
 * memory is calloc's: pages that nobody touches take no room. */
static int make_output(const ranks_inputs *inputs, apa_array_type type, int64_t last, apa_array *array,
                       apa_tensor *tensor)
{
    const int64_t *q = inputs->whole.problem.q.shape, dim = last == 0 ? 1 : last;
    const bool nhd = inputs->whole.nhd && last != 0;
    const int64_t shape[4] = {q[0], nhd ? q[2] : q[1], nhd ? q[1] : q[2], last};
    const int32_t skip = 4 - inputs->whole.q.dims;
    array->type = type;
    array->dims = inputs->whole.q.dims - (last == 0);
    for (int32_t i = 0; i < array->dims; i++)
        array->shape[i] = shape[i + skip];
    array->elements = q[0] * q[1] * q[2] * dim;
    array->data = calloc((size_t)array->elements + 1, apa_dtype_bytes((apa_dtype)type));
    if (array->data == NULL)
        return cli_complain(CLI_FAILED, "no memory for an output of %" PRId64 " elements", array->elements);
    *tensor = nhd ? apa_tensor_nhd(array->data, (apa_dtype)type, q[0], q[1], q[2], dim)
                  : apa_tensor_hnd(array->data, (apa_dtype)type, q[0], q[1], q[2], dim);
    return CLI_DONE;
}

int ranks_job_cut(ranks_job *job, apa_array_type type, int lse)
{
    const apa_problem *whole = &job->inputs.whole.problem;
    apa_dist_problem *part = &job->part;
    apa_dist_problem_init(part);
    part->local = *whole;
    part->Sq = whole->q.shape[2];
    part->Skv = whole->k.shape[2];
    const int wanted = job->ranks_options->queries;
    part->queries = wanted == 2 || (wanted == 0 && whole_is_cheaper(whole, apa_dist_ranks(job->dist)))
                        ? APA_DIST_QUERIES_WHOLE
                        : APA_DIST_QUERIES_SHARDED;
    const bool sharded = part->queries == APA_DIST_QUERIES_SHARDED;
    part->k_shard = cut(job, part->Skv, sharded && whole->causal);
    part->q_shard = cut(job, part->Sq, whole->causal);
    for (int32_t i = 0; i < part->k_shard.count; i++) /* the inputs are whole */
        part->k_shard.run[i].at = part->k_shard.run[i].first;
    for (int32_t i = 0; i < part->q_shard.count; i++)
        part->q_shard.run[i].at = part->q_shard.run[i].first;
    job->all = calloc((size_t)apa_dist_ranks(job->dist), sizeof *job->all);
    if (job->all == NULL)
        return cli_complain(CLI_FAILED, "no memory for the figures of all ranks");
    int code = make_output(&job->inputs, type, whole->v.shape[3], &job->out, &part->local.out);
    if (code == CLI_DONE && lse)
        code = make_output(&job->inputs, APA_ARRAY_F32, 0, &job->lse, &part->local.lse);
    return code;
}

void ranks_job_free(ranks_job *job)
{
    ranks_inputs_free(&job->inputs);
    free(job->out.data);
    free(job->lse.data);
    apa_context_destroy(job->context);
    free(job->all);
}

int ranks_complain(const ranks_job *job, apa_status status)
{
    if (status == APA_STATUS_IO) { /* other ranks may be waiting: end them too, and let none write */
        cli_complain(CLI_FAILED, "%s", apa_dist_message(job->dist));
        apa_dist_abort(job->dist, CLI_FAILED);
    }
    if (apa_dist_rank(job->dist) != 0)
        return cli_exit_code(status);
    return cli_complain(cli_exit_code(status), "%s", apa_dist_message(job->dist));
}

int ranks_job_attend(ranks_job *job, const apa_recipe *recipe, apa_dist_statistics *statistics)
{
    apa_dist_call call;
    apa_dist_call_init(&call);
    call.engine = job->options->engine;
    call.exchange = job->ranks_options->exchange;
    apa_dist_statistics_init(statistics);
    apa_status status = apa_dist_attention(job->dist, job->context, &job->part, recipe, &call, statistics);
    return status == APA_STATUS_OK ? CLI_DONE : ranks_complain(job, status);
}
