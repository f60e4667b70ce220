/* Single tensors: shape, strides, data, and whether two of them meet in memory. */
#include "attention/tensors.h"

#include "core/context_internal.h"

#include <inttypes.h>

static const char axis_name[4][6] = {"batch", "heads", "seq", "dim"};

static int64_t magnitude(int64_t value)
{
    return value < 0 ? (value == INT64_MIN ? INT64_MAX : -value) : value;
}

apa_status apa_tensor_check(apa_context *context, const char *name, const apa_tensor *tensor, bool is_output,
                            bool need_data)
{
    const size_t bytes = apa_dtype_bytes(tensor->dtype);
    if (bytes == 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: dtype %d, expected f16, bf16, f32 or f64", name,
                        (int)tensor->dtype);
    int64_t elements = 1, reach = 0;
    int64_t size = 1; /* as if no extent were 0, so that engines may multiply any of them */
    for (int axis = 0; axis < 4; axis++) {
        const int64_t n = tensor->shape[axis];
        if (n < 0)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: %s is %" PRId64 ", expected 0 or more", name,
                            axis_name[axis], n);
        if (n == 0)
            elements = 0;
        if (__builtin_mul_overflow(size, n == 0 ? 1 : n, &size) || size > INT64_MAX / 16)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                            "%s: shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                            "], expected at most 2^59 elements",
                            name, tensor->shape[0], tensor->shape[1], tensor->shape[2], tensor->shape[3]);
    }
    for (int axis = 0; axis < 4 && elements != 0; axis++) {
        int64_t span;
        if (__builtin_mul_overflow(magnitude(tensor->stride[axis]), tensor->shape[axis] - 1, &span) ||
            __builtin_add_overflow(reach, span, &reach) || reach > INT64_MAX / 16)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: the strides reach beyond 2^59 elements", name);
        if (is_output && tensor->stride[axis] == 0 && tensor->shape[axis] > 1)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                            "%s: stride 0 over %s, expected an output's elements apart", name, axis_name[axis]);
    }
    if (tensor->stride[3] != 1 && tensor->shape[3] > 1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: last stride is %" PRId64 ", expected 1", name,
                        tensor->stride[3]);
    if (need_data && elements != 0) {
        if (tensor->data == NULL)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: data is NULL", name);
        if ((uintptr_t)tensor->data % bytes != 0)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: data is not aligned to its %zu-byte elements",
                            name, bytes);
    }
    return APA_STATUS_OK;
}

/* First byte and one past the last that a tensor's strides reach; false when it has no elements. */
static bool extent(const apa_tensor *tensor, const char **from, const char **to)
{
    const int64_t bytes = (int64_t)apa_dtype_bytes(tensor->dtype);
    int64_t low = 0, high = 0;
    if (tensor->dtype == APA_DTYPE_NONE || tensor->data == NULL)
        return false;
    for (int axis = 0; axis < 4; axis++) {
        if (tensor->shape[axis] == 0)
            return false;
        const int64_t reach = (axis == 3 ? 1 : tensor->stride[axis]) * (tensor->shape[axis] - 1);
        *(reach < 0 ? &low : &high) += reach;
    }
    *from = (const char *)tensor->data + low * bytes;
    *to = (const char *)tensor->data + (high + 1) * bytes;
    return true;
}

/* Are all bytes between the first and the last the tensor's own? */
static bool is_dense(const apa_tensor *tensor)
{
    const char *from, *to;
    int64_t elements = 1;
    for (int axis = 0; axis < 4; axis++)
        elements *= tensor->shape[axis];
    return extent(tensor, &from, &to) && to - from == elements * (int64_t)apa_dtype_bytes(tensor->dtype);
}

bool apa_tensors_overlap(const apa_tensor *a, const apa_tensor *b)
{
    const char *a_from, *a_to, *b_from, *b_to;
    if (!extent(a, &a_from, &a_to) || !extent(b, &b_from, &b_to) || a_to <= b_from || b_to <= a_from)
        return false;
    return a->data == b->data || (is_dense(a) && is_dense(b));
}

apa_status apa_tensor_check_overlap(apa_context *context, const apa_problem *problem)
{
    const apa_tensor *const tensor[] = {
        &problem->out,         &problem->lse,          &problem->q,    &problem->k, &problem->v, &problem->attn_mask,
        &problem->mask_slopes, &problem->alibi_slopes, &problem->sinks};
    static const char *const name[] = {"out",         "lse",          "q",    "k", "v", "attn_mask",
                                       "mask_slopes", "alibi_slopes", "sinks"};
    const int count = (int)(sizeof name / sizeof name[0]);
    for (int i = 0; i < 2; i++)
        for (int j = i + 1; j < count; j++)
            if (apa_tensors_overlap(tensor[i], tensor[j]))
                return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: overlaps %s, expected memory of its own",
                                name[i], name[j]);
    return APA_STATUS_OK;
}
