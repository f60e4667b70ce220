/* Checks of everything that stands between scale·q·k and the softmax. */
#include "attention/scores.h"

#include "attention/tensors.h"
#include "core/context_internal.h"

#include <inttypes.h>
#include <math.h>

static apa_status check_lines(apa_context *context, const apa_problem *problem)
{
    if (isinf(problem->softmax_scale))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "softmax_scale: infinite, expected a number (NaN: 1/sqrt(D))");
    if (problem->causal < APA_CAUSAL_NONE || problem->causal > APA_CAUSAL_TOP_LEFT)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "causal: %d, expected 0 (none), 1 (bottom-right) or 2 (top-left)", problem->causal);
    if (problem->causal == APA_CAUSAL_TOP_LEFT &&
        (problem->q_offset != APA_Q_OFFSET_DEFAULT || problem->q_offsets != NULL))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "causal: top-left together with an offset of the queries, expected one of them");
    if (problem->window_left < -1 || problem->window_right < -1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "window_%s: %" PRId64 ", expected -1 (no bound) or more",
                        problem->window_left < -1 ? "left" : "right",
                        problem->window_left < -1 ? problem->window_left : problem->window_right);
    if (!(problem->softcap >= 0.0) || isinf(problem->softcap))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "softcap: %g, expected a positive number, or 0 for none",
                        problem->softcap);
    return APA_STATUS_OK;
}

/* Extents of 1 repeat; the last may be longer than the keys. */
static apa_status check_mask(apa_context *context, const apa_problem *problem, int64_t batch, int64_t Skv,
                             bool need_data)
{
    const apa_tensor *mask = &problem->attn_mask;
    if (mask->dtype == APA_DTYPE_NONE)
        return APA_STATUS_OK;
    apa_status status = apa_tensor_check(context, "attn_mask", mask, false, need_data);
    if (status != APA_STATUS_OK)
        return status;
    const int64_t entries = problem->cu_seqlens_q != NULL ? 1 : batch;
    const int64_t expected[3] = {entries, problem->q.shape[1], problem->q.shape[2]};
    bool fits = mask->shape[3] == 1 || mask->shape[3] >= Skv;
    for (int axis = 0; axis < 3; axis++)
        fits = fits && (mask->shape[axis] == 1 || mask->shape[axis] == expected[axis]);
    if (!fits)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "attn_mask: shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], expected [%" PRId64
                        ", %" PRId64 ", %" PRId64 ", %" PRId64 " or more] or 1 where it repeats",
                        mask->shape[0], mask->shape[1], mask->shape[2], mask->shape[3], expected[0], expected[1],
                        expected[2], Skv);
    return APA_STATUS_OK;
}

static apa_status check_per_head(apa_context *context, const char *name, const apa_tensor *x, int64_t batch, int64_t Hq,
                                 bool need_data)
{
    if (x->dtype == APA_DTYPE_NONE)
        return APA_STATUS_OK;
    if (x->dtype != APA_DTYPE_F32)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: dtype %s, expected f32", name,
                        apa_dtype_name(x->dtype));
    apa_status status = apa_tensor_check(context, name, x, false, need_data);
    if (status != APA_STATUS_OK)
        return status;
    const int64_t *n = x->shape;
    if ((n[0] != 1 && n[0] != batch) || n[1] != Hq || n[2] != 1 || n[3] != 1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "%s: shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], expected [%s%" PRId64
                        ", %" PRId64 ", 1, 1]",
                        name, n[0], n[1], n[2], n[3], batch == 1 ? "" : "1 or ", batch, Hq);
    return APA_STATUS_OK;
}

apa_status apa_scores_check(apa_context *context, const apa_problem *problem, int64_t batch, int64_t Skv,
                            bool need_data)
{
    const int64_t Hq = problem->q.shape[1];
    apa_status status = check_lines(context, problem);
    if (status == APA_STATUS_OK)
        status = check_mask(context, problem, batch, Skv, need_data);
    if (status == APA_STATUS_OK)
        status = check_per_head(context, "mask_slopes", &problem->mask_slopes, 1, Hq, need_data);
    if (status == APA_STATUS_OK)
        status = check_per_head(context, "alibi_slopes", &problem->alibi_slopes, batch, Hq, need_data);
    if (status == APA_STATUS_OK)
        status = check_per_head(context, "sinks", &problem->sinks, 1, Hq, need_data);
    if (status == APA_STATUS_OK && problem->mask_slopes.dtype != APA_DTYPE_NONE &&
        (problem->attn_mask.dtype == APA_DTYPE_NONE || problem->attn_mask.dtype == APA_DTYPE_BOOL))
        status = apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                          "mask_slopes: without a float attn_mask, expected one to be multiplied");
    return status;
}

static apa_tensor repeating(const apa_tensor *x, const int64_t *shape)
{
    apa_tensor tensor = *x;
    if (x->dtype == APA_DTYPE_NONE)
        return tensor;
    for (int axis = 0; axis < 4; axis++) {
        if (x->shape[axis] == 0) /* nothing to read, so there need be no data */
            tensor.dtype = APA_DTYPE_NONE;
        if (x->shape[axis] == 1)
            tensor.stride[axis] = 0;
        tensor.shape[axis] = shape[axis];
    }
    return tensor;
}

void apa_scores_fill(const apa_problem *problem, apa_call *call)
{
    const int64_t entries = problem->cu_seqlens_q != NULL ? 1 : call->B;
    const int64_t mask[4] = {entries, call->Hq, problem->q.shape[2], call->Skv};
    const int64_t per_head[4] = {call->B, call->Hq, 1, 1};
    call->softcap = problem->softcap;
    call->mask = repeating(&problem->attn_mask, mask);
    call->mask_slopes = repeating(&problem->mask_slopes, per_head);
    call->alibi_slopes = repeating(&problem->alibi_slopes, per_head);
    call->sinks = repeating(&problem->sinks, per_head);
}
