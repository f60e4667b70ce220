/* Merge of (o, lse) results, row by row in double. */
#include "apa/state.h"

#include "attention/tensors.h"
#include "core/context_internal.h"
#include "formats/formats.h"

#include <math.h>
#include <string.h>

static int64_t offset_of(const apa_tensor *tensor, int64_t b, int64_t h, int64_t s, int64_t d)
{
    return b * tensor->stride[0] + h * tensor->stride[1] + s * tensor->stride[2] + d;
}

static double load(const apa_tensor *tensor, int64_t at)
{
    switch (tensor->dtype) {
    case APA_DTYPE_F16:
        return apa_f16_to_f32(((const uint16_t *)tensor->data)[at]);
    case APA_DTYPE_BF16:
        return apa_bf16_to_f32(((const uint16_t *)tensor->data)[at]);
    case APA_DTYPE_F32:
        return ((const float *)tensor->data)[at];
    default:
        return ((const double *)tensor->data)[at];
    }
}

static void store(const apa_tensor *tensor, int64_t at, double value)
{
    switch (tensor->dtype) {
    case APA_DTYPE_F16:
        ((uint16_t *)tensor->data)[at] = apa_f64_to_f16(value);
        break;
    case APA_DTYPE_BF16:
        ((uint16_t *)tensor->data)[at] = apa_f64_to_bf16(value);
        break;
    case APA_DTYPE_F32:
        ((float *)tensor->data)[at] = (float)value;
        break;
    default:
        ((double *)tensor->data)[at] = value;
    }
}

typedef struct merge_task {
    const apa_tensor *out_a, *lse_a, *out_b, *lse_b, *out, *lse;
} merge_task;

static void merge_row(const merge_task *task, int64_t b, int64_t h, int64_t s)
{
    const double lse_a = load(task->lse_a, offset_of(task->lse_a, b, h, s, 0));
    const double lse_b = load(task->lse_b, offset_of(task->lse_b, b, h, s, 0));
    const double most = lse_a > lse_b ? lse_a : lse_b;
    double weight_a = lse_a == most ? 1.0 : exp(lse_a - most), weight_b = lse_b == most ? 1.0 : exp(lse_b - most);
    double lse = most + log(weight_a + weight_b);
    if (lse_a == -INFINITY) { /* empty: the other one as it is */
        weight_a = 0.0;
        weight_b = 1.0;
        lse = lse_b;
    } else if (lse_b == -INFINITY) {
        weight_a = 1.0;
        weight_b = 0.0;
        lse = lse_a;
    }
    for (int64_t d = 0; d < task->out->shape[3]; d++) {
        double value = lse == -INFINITY ? 0.0 : -0.0; /* -0 + x is x, also where x is -0 */
        /* By selection: what an empty state holds does not matter. */
        if (weight_a != 0.0)
            value += weight_a * load(task->out_a, offset_of(task->out_a, b, h, s, d));
        if (weight_b != 0.0 && lse_b != -INFINITY)
            value += weight_b * load(task->out_b, offset_of(task->out_b, b, h, s, d));
        store(task->out, offset_of(task->out, b, h, s, d), value / (weight_a + weight_b));
    }
    store(task->lse, offset_of(task->lse, b, h, s, 0), lse);
}

static void merge_rows(void *argument, size_t index)
{
    const merge_task *task = argument;
    const int64_t heads = task->out->shape[1];
    for (int64_t s = 0; s < task->out->shape[2]; s++)
        merge_row(task, (int64_t)index / heads, (int64_t)index % heads, s);
}

static apa_status check(apa_context *context, const char *name, const apa_tensor *tensor, const int64_t *shape,
                        bool is_lse, bool is_output)
{
    if (tensor == NULL || apa_dtype_bytes(tensor->dtype) == 0 || tensor->dtype == APA_DTYPE_BOOL ||
        (is_lse && tensor->dtype != APA_DTYPE_F32 && tensor->dtype != APA_DTYPE_F64))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: missing or of a wrong dtype, expected %s", name,
                        is_lse ? "f32 or f64" : "f16, bf16, f32 or f64");
    for (int axis = 0; axis < 4; axis++) {
        const int64_t expected = is_lse && axis == 3 ? 1 : shape[axis];
        if (tensor->shape[axis] != expected || expected < 0)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: size %lld along axis %d, expected %lld", name,
                            (long long)tensor->shape[axis], axis, (long long)expected);
    }
    return apa_tensor_check(context, name, tensor, is_output, true);
}

static bool is_same(const apa_tensor *a, const apa_tensor *b)
{
    return a->data == b->data && a->dtype == b->dtype && memcmp(a->stride, b->stride, sizeof a->stride) == 0;
}

apa_status apa_state_merge(apa_context *context, const apa_tensor *out_a, const apa_tensor *lse_a,
                           const apa_tensor *out_b, const apa_tensor *lse_b, const apa_tensor *out,
                           const apa_tensor *lse)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (out_a == NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "out_a: missing");
    const struct {
        const char *name;
        const apa_tensor *tensor;
        bool is_lse;
    } argument[6] = {{"out_a", out_a, false}, {"lse_a", lse_a, true}, {"out_b", out_b, false},
                     {"lse_b", lse_b, true},  {"out", out, false},    {"lse", lse, true}};
    for (int i = 0; i < 6; i++) {
        apa_status status =
            check(context, argument[i].name, argument[i].tensor, out_a->shape, argument[i].is_lse, i >= 4);
        if (status != APA_STATUS_OK)
            return status;
    }
    /* A result row is written when its own inputs have been read, so it may lie where they lie, and nowhere else. */
    for (int result = 4; result < 6; result++)
        for (int i = 0; i < result; i++)
            if (apa_tensors_overlap(argument[result].tensor, argument[i].tensor) &&
                !(i < 4 && argument[i].is_lse == argument[result].is_lse &&
                  is_same(argument[result].tensor, argument[i].tensor)))
                return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                                "%s: overlaps %s, expected memory of its own or exactly the tensor of an input",
                                argument[result].name, argument[i].name);
    merge_task task = {out_a, lse_a, out_b, lse_b, out, lse};
    apa_context_parallel(context, merge_rows, &task, (size_t)(out->shape[0] * out->shape[1]));
    return APA_STATUS_OK;
}
