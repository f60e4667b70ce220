/* Checks and calls of sequences that differ. */
#include "attention/sequences.h"

#include "core/context_internal.h"
#include "cpu/prep.h"

#include <inttypes.h>

bool apa_sequences_differ(const apa_problem *problem)
{
    return problem->cu_seqlens_q != NULL || problem->cu_seqlens_k != NULL || problem->seqused_k != NULL ||
           problem->q_offsets != NULL || problem->block_table != NULL;
}

int64_t apa_sequences_count(const apa_problem *problem)
{
    const bool packed = problem->cu_seqlens_q != NULL || problem->cu_seqlens_k != NULL;
    return packed ? problem->batch : problem->q.shape[0];
}

static int64_t queries_of(const apa_problem *problem, int64_t b)
{
    const int64_t *cu = problem->cu_seqlens_q;
    return cu != NULL ? cu[b + 1] - cu[b] : problem->q.shape[2];
}

/* Places for keys of sequence b; of a paged one those of its row of the table. */
static int64_t room_of(const apa_problem *problem, int64_t b)
{
    const int64_t *cu = problem->cu_seqlens_k;
    if (problem->block_table != NULL) {
        int64_t room;
        return __builtin_mul_overflow(problem->block_table_stride, problem->k.shape[2], &room) ? INT64_MAX : room;
    }
    return cu != NULL ? cu[b + 1] - cu[b] : problem->k.shape[2];
}

static int64_t keys_of(const apa_problem *problem, int64_t b)
{
    return problem->seqused_k != NULL ? problem->seqused_k[b] : room_of(problem, b);
}

static apa_status check_cumulative(apa_context *context, const char *name, const int64_t *cu, int64_t batch,
                                   int64_t rows)
{
    if (cu[0] != 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: starts with %" PRId64 ", expected 0", name, cu[0]);
    for (int64_t b = 0; b < batch; b++)
        if (cu[b + 1] < cu[b])
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                            "%s: falls from %" PRId64 " to %" PRId64 " at sequence %" PRId64 ", expected it to rise",
                            name, cu[b], cu[b + 1], b);
    if (cu[batch] > rows)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "%s: ends with %" PRId64 ", expected at most the tensor's %" PRId64 " rows", name, cu[batch],
                        rows);
    return APA_STATUS_OK;
}

static apa_status expect_batch(apa_context *context, const char *name, int64_t found, int64_t expected, const char *why)
{
    if (found == expected)
        return APA_STATUS_OK;
    return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: batch is %" PRId64 ", expected %" PRId64 " (%s)", name,
                    found, expected, why);
}

static apa_status check_batch_axes(apa_context *context, const apa_problem *problem, int64_t batch)
{
    apa_status status = problem->cu_seqlens_q != NULL
                            ? expect_batch(context, "q", problem->q.shape[0], 1, "packed by cu_seqlens_q")
                            : expect_batch(context, "q", problem->q.shape[0], batch, "one entry a sequence");
    if (status != APA_STATUS_OK || problem->block_table != NULL)
        return status;
    return problem->cu_seqlens_k != NULL
               ? expect_batch(context, "k", problem->k.shape[0], 1, "packed by cu_seqlens_k")
               : expect_batch(context, "k", problem->k.shape[0], batch, "one entry a sequence");
}

static apa_status check_used(apa_context *context, const apa_problem *problem, int64_t batch)
{
    for (int64_t b = 0; b < batch; b++)
        if (problem->seqused_k[b] < 0 || problem->seqused_k[b] > room_of(problem, b))
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                            "seqused_k: %" PRId64 " at sequence %" PRId64 ", expected 0 … %" PRId64,
                            problem->seqused_k[b], b, room_of(problem, b));
    return APA_STATUS_OK;
}

static apa_status check_pages(apa_context *context, const apa_problem *problem, int64_t batch)
{
    const int64_t pages = problem->k.shape[0], page_size = problem->k.shape[2];
    for (int64_t b = 0; b < batch; b++)
        for (int64_t j = 0; j < problem->seqused_k[b]; j += page_size) {
            const int64_t at = j / page_size, page = problem->block_table[b * problem->block_table_stride + at];
            if (page < 0 || page >= pages)
                return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                                "block_table: page %" PRId64 " at sequence %" PRId64 ", entry %" PRId64
                                ", expected 0 … %" PRId64,
                                page, b, at, pages - 1);
        }
    return APA_STATUS_OK;
}

static apa_status check_table(apa_context *context, const apa_problem *problem, int64_t batch, bool need_data)
{
    if (problem->seqused_k == NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "block_table: without seqused_k, expected the keys in use of every sequence");
    if (problem->block_table_stride < 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "block_table_stride: %" PRId64 ", expected 0 or more entries a sequence",
                        problem->block_table_stride);
    if (problem->v.shape[0] != problem->k.shape[0])
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "v: %" PRId64 " pages, expected k's %" PRId64,
                        problem->v.shape[0], problem->k.shape[0]);
    if (problem->k.shape[2] < 1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "k: pages of 0 keys, expected at least 1");
    apa_status status = check_used(context, problem, batch);
    return status == APA_STATUS_OK && need_data ? check_pages(context, problem, batch) : status;
}

apa_status apa_sequences_check(apa_context *context, const apa_problem *problem, bool need_data)
{
    const bool packed = problem->cu_seqlens_q != NULL || problem->cu_seqlens_k != NULL;
    if (packed && (problem->batch < 0 || problem->batch > INT32_MAX))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "batch: %" PRId64 ", expected 0 … %d sequences",
                        problem->batch, INT32_MAX);
    if (problem->block_table != NULL && problem->cu_seqlens_k != NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "block_table: together with cu_seqlens_k, expected one of them");
    const int64_t batch = apa_sequences_count(problem);
    apa_status status = check_batch_axes(context, problem, batch);
    if (status == APA_STATUS_OK && problem->cu_seqlens_q != NULL)
        status = check_cumulative(context, "cu_seqlens_q", problem->cu_seqlens_q, batch, problem->q.shape[2]);
    if (status == APA_STATUS_OK && problem->cu_seqlens_k != NULL)
        status = check_cumulative(context, "cu_seqlens_k", problem->cu_seqlens_k, batch, problem->k.shape[2]);
    if (status != APA_STATUS_OK)
        return status;
    if (problem->block_table != NULL)
        return check_table(context, problem, batch, need_data);
    return problem->seqused_k != NULL ? check_used(context, problem, batch) : APA_STATUS_OK;
}

void apa_sequences_longest(const apa_problem *problem, int64_t *Sq, int64_t *Skv)
{
    *Sq = *Skv = 0;
    if (!apa_sequences_differ(problem)) {
        *Sq = problem->q.shape[2];
        *Skv = problem->k.shape[2];
        return;
    }
    for (int64_t b = 0; b < apa_sequences_count(problem); b++) {
        const int64_t queries = queries_of(problem, b), keys = keys_of(problem, b);
        *Sq = queries > *Sq ? queries : *Sq;
        *Skv = keys > *Skv ? keys : *Skv;
    }
}

/* Entry b of a batch axis, or the rows from `first` on of a packed tensor. */
static apa_tensor part(const apa_tensor *whole, int64_t b, const int64_t *cu, int64_t rows)
{
    apa_tensor tensor = *whole;
    const int64_t offset = cu != NULL ? cu[b] * whole->stride[2] : b * whole->stride[0];
    if (tensor.data != NULL)
        tensor.data = (char *)tensor.data + offset * (int64_t)apa_dtype_bytes(whole->dtype);
    tensor.shape[0] = 1;
    tensor.shape[2] = rows;
    return tensor;
}

/* The mask of `whole` has strides of 0 where it repeats, so offsets vanish there. */
static apa_tensor mask_part(const apa_tensor *whole, int64_t b, const int64_t *cu, int64_t Sq, int64_t Skv)
{
    apa_tensor mask = part(whole, b, cu, Sq);
    mask.shape[3] = Skv;
    return mask;
}

static apa_tensor per_head_part(const apa_tensor *whole, int64_t b)
{
    return whole->dtype == APA_DTYPE_NONE ? *whole : part(whole, b, NULL, 1);
}

void apa_sequences_call(const apa_problem *problem, const apa_call *whole, int64_t b, apa_call *call)
{
    const int64_t *cu_q = problem->cu_seqlens_q, *cu_k = problem->cu_seqlens_k;
    *call = *whole;
    call->recipe = whole->asked;
    call->kept = whole->kept != NULL ? whole->kept + b : NULL;
    call->B = 1;
    call->Sq = queries_of(problem, b);
    call->Skv = keys_of(problem, b);
    call->q = part(&whole->q, b, cu_q, call->Sq);
    call->out = part(&whole->out, b, cu_q, call->Sq);
    if (whole->lse.dtype != APA_DTYPE_NONE)
        call->lse = part(&whole->lse, b, cu_q, call->Sq);
    if (problem->block_table != NULL) {
        call->pages = problem->block_table + b * problem->block_table_stride;
        call->page_size = problem->k.shape[2];
    } else {
        call->k = part(&whole->k, b, cu_k, call->Skv);
        call->v = part(&whole->v, b, cu_k, call->Skv);
    }
    if (whole->mask.dtype != APA_DTYPE_NONE)
        call->mask = mask_part(&whole->mask, b, cu_q, call->Sq, call->Skv);
    call->mask_slopes = per_head_part(&whole->mask_slopes, b);
    call->alibi_slopes = per_head_part(&whole->alibi_slopes, b);
    call->sinks = per_head_part(&whole->sinks, b);
    if (problem->q_offsets != NULL)
        call->q_offset = problem->q_offsets[b];
    else if (problem->causal == APA_CAUSAL_TOP_LEFT)
        call->q_offset = 0;
    else if (problem->q_offset == APA_Q_OFFSET_DEFAULT)
        call->q_offset = call->Skv - call->Sq;
}
