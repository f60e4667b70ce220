/* Validation and choice of engine. Messages name the argument, what was found and what was expected. */
#include "attention/plan.h"

#include "attention/engines.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define APA_MAX_DIM 1024
#define APA_MAX_BATCH INT32_MAX

static const char axis_name[4][6] = {"batch", "heads", "seq", "dim"};

static int64_t magnitude(int64_t value)
{
    return value < 0 ? (value == INT64_MIN ? INT64_MAX : -value) : value;
}

/* Shape not negative, unit last stride, and every offset the strides reach representable in bytes. */
static apa_status check_tensor(apa_context *context, const char *name, const apa_tensor *tensor, bool is_output,
                               bool need_data)
{
    const size_t bytes = apa_dtype_bytes(tensor->dtype);
    if (bytes == 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: dtype %d, expected f16, bf16, f32 or f64", name,
                        (int)tensor->dtype);
    int64_t elements = 1, reach = 0;
    for (int axis = 0; axis < 4; axis++) {
        const int64_t n = tensor->shape[axis];
        if (n < 0)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: %s is %" PRId64 ", expected 0 or more", name,
                            axis_name[axis], n);
        if (n == 0)
            elements = 0;
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

static apa_status expect_shape(apa_context *context, const char *name, const apa_tensor *tensor, int64_t B, int64_t H,
                               int64_t S, int64_t D)
{
    const int64_t expected[4] = {B, H, S, D};
    if (memcmp(tensor->shape, expected, sizeof expected) == 0)
        return APA_STATUS_OK;
    return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                    "%s: shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], expected [%" PRId64 ", %" PRId64
                    ", %" PRId64 ", %" PRId64 "] from q, k and v",
                    name, tensor->shape[0], tensor->shape[1], tensor->shape[2], tensor->shape[3], B, H, S, D);
}

static apa_status check_inputs(apa_context *context, const apa_problem *problem, bool need_data)
{
    const apa_tensor *const tensor[3] = {&problem->q, &problem->k, &problem->v};
    static const char *const name[3] = {"q", "k", "v"};
    for (int i = 0; i < 3; i++) {
        apa_status status = check_tensor(context, name[i], tensor[i], false, need_data);
        if (status != APA_STATUS_OK)
            return status;
        if (tensor[i]->dtype != problem->q.dtype)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: dtype %s, expected q's %s", name[i],
                            apa_dtype_name(tensor[i]->dtype), apa_dtype_name(problem->q.dtype));
    }
    const int64_t *q = problem->q.shape, *k = problem->k.shape, *v = problem->v.shape;
    if (q[0] > APA_MAX_BATCH)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "q: batch is %" PRId64 ", expected at most %d", q[0],
                        APA_MAX_BATCH);
    if (k[0] != q[0] || v[0] != q[0])
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: batch is %" PRId64 ", expected q's %" PRId64,
                        k[0] != q[0] ? "k" : "v", k[0] != q[0] ? k[0] : v[0], q[0]);
    if (q[1] < 1 || k[1] < 1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: 0 heads, expected at least 1", q[1] < 1 ? "q" : "k");
    if (q[1] % k[1] != 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "q: %" PRId64 " heads, expected a multiple of k's %" PRId64 " heads", q[1], k[1]);
    if (v[1] != k[1] || v[2] != k[2])
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "v: %" PRId64 " heads and %" PRId64 " keys, expected k's %" PRId64 " and %" PRId64, v[1], v[2],
                        k[1], k[2]);
    if (k[3] != q[3])
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "k: dim is %" PRId64 ", expected q's %" PRId64, k[3],
                        q[3]);
    if (q[3] < 1 || q[3] > APA_MAX_DIM || v[3] < 1 || v[3] > APA_MAX_DIM)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: dim is %" PRId64 ", expected 1 … %d",
                        q[3] < 1 || q[3] > APA_MAX_DIM ? "q" : "v", q[3] < 1 || q[3] > APA_MAX_DIM ? q[3] : v[3],
                        APA_MAX_DIM);
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

/* Overlap is certain when two tensors start at one place or when both are dense and their bytes meet. Views that
 * interleave (a fused buffer) are the caller's word. */
static bool overlap(const apa_tensor *a, const apa_tensor *b)
{
    const char *a_from, *a_to, *b_from, *b_to;
    if (!extent(a, &a_from, &a_to) || !extent(b, &b_from, &b_to) || a_to <= b_from || b_to <= a_from)
        return false;
    return a->data == b->data || (is_dense(a) && is_dense(b));
}

static apa_status check_overlap(apa_context *context, const apa_problem *problem)
{
    const apa_tensor *const tensor[5] = {&problem->out, &problem->lse, &problem->q, &problem->k, &problem->v};
    static const char *const name[5] = {"out", "lse", "q", "k", "v"};
    for (int i = 0; i < 2; i++)
        for (int j = i + 1; j < 5; j++)
            if (overlap(tensor[i], tensor[j]))
                return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: overlaps %s, expected memory of its own",
                                name[i], name[j]);
    return APA_STATUS_OK;
}

static apa_status check_outputs(apa_context *context, const apa_problem *problem, bool need_data)
{
    const int64_t B = problem->q.shape[0], Hq = problem->q.shape[1], Sq = problem->q.shape[2];
    apa_status status = check_tensor(context, "out", &problem->out, true, need_data);
    if (status == APA_STATUS_OK)
        status = expect_shape(context, "out", &problem->out, B, Hq, Sq, problem->v.shape[3]);
    if (status == APA_STATUS_OK && problem->lse.dtype != APA_DTYPE_NONE) {
        status = check_tensor(context, "lse", &problem->lse, true, need_data);
        if (status == APA_STATUS_OK)
            status = expect_shape(context, "lse", &problem->lse, B, Hq, Sq, 1);
        if (status == APA_STATUS_OK && problem->lse.dtype != APA_DTYPE_F32 && problem->lse.dtype != APA_DTYPE_F64)
            status = apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "lse: dtype %s, expected f32 or f64",
                              apa_dtype_name(problem->lse.dtype));
    }
    return status == APA_STATUS_OK && need_data ? check_overlap(context, problem) : status;
}

static apa_status check_masks(apa_context *context, const apa_problem *problem)
{
    if (isinf(problem->softmax_scale))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "softmax_scale: infinite, expected a number (NaN: 1/sqrt(D))");
    if (problem->causal != 0 && problem->causal != 1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "causal: %d, expected 0 or 1", problem->causal);
    if (problem->window_left < -1 || problem->window_right < -1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "window_%s: %" PRId64 ", expected -1 (no bound) or more",
                        problem->window_left < -1 ? "left" : "right",
                        problem->window_left < -1 ? problem->window_left : problem->window_right);
    return APA_STATUS_OK;
}

static void fill_call(const apa_problem *problem, apa_call *call)
{
    call->q = problem->q;
    call->k = problem->k;
    call->v = problem->v;
    call->out = problem->out;
    call->lse = problem->lse;
    call->B = problem->q.shape[0];
    call->Hq = problem->q.shape[1];
    call->Sq = problem->q.shape[2];
    call->D = problem->q.shape[3];
    call->Hkv = problem->k.shape[1];
    call->Skv = problem->k.shape[2];
    call->Dv = problem->v.shape[3];
    call->G = call->Hq / call->Hkv;
    call->scale = isnan(problem->softmax_scale) ? 1.0 / sqrt((double)call->D) : problem->softmax_scale;
    call->causal = problem->causal != 0;
    call->q_offset = problem->q_offset == APA_Q_OFFSET_DEFAULT ? call->Skv - call->Sq : problem->q_offset;
    call->window_left = problem->window_left;
    call->window_right = problem->window_right;
}

/* "cuda" names the first engine of the family, "cuda:warp" that engine. */
static bool is_named(const apa_engine *engine, const char *name)
{
    const size_t n = strlen(name);
    return strncmp(name, engine->name, n) == 0 && (engine->name[n] == '\0' || engine->name[n] == ':');
}

/* The named engine, or the first that can run the call. The message of a refusal is the last engine's. */
static apa_status choose_engine(apa_context *context, const char *name, apa_call *call, const apa_engine **chosen)
{
    const bool any = name == NULL || strcmp(name, "auto") == 0;
    apa_status status = APA_STATUS_INVALID_ARGUMENT;
    bool known = any;
    const apa_recipe asked = call->recipe;
    for (size_t i = 0; apa_engine_at(i) != NULL; i++) {
        const apa_engine *engine = apa_engine_at(i);
        if (!any && !is_named(engine, name))
            continue;
        known = true;
        call->recipe = asked;
        status = engine->resolve(context, call);
        if (status == APA_STATUS_OK) {
            *chosen = engine;
            /* what engines before it had against the call is no failure of the call */
            return i > 0 ? apa_fail(context, APA_STATUS_OK, "%s", "") : status;
        }
    }
    if (!known)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "engine: \"%s\", expected auto, cpu or reference", name);
    return status;
}

apa_status apa_plan_call(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                         const apa_attention_options *options, bool need_data, apa_call *call,
                         const apa_engine **engine)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (problem == NULL || problem->size != sizeof *problem)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "problem: NULL or not set up by apa_problem_init()");
    if (options != NULL && options->size != sizeof *options)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "options: not set up by apa_attention_options_init()");
    memset(call, 0, sizeof *call);
    if (recipe == NULL)
        apa_recipe_init(&call->recipe, NULL);
    else if (recipe->size != sizeof *recipe)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "recipe: not set up by apa_recipe_init()");
    else
        call->recipe = *recipe;
    char message[256];
    apa_status status = apa_recipe_check(&call->recipe, message, sizeof message);
    if (status != APA_STATUS_OK)
        return apa_fail(context, status, "recipe: %s", message);
    status = check_inputs(context, problem, need_data);
    if (status == APA_STATUS_OK)
        status = check_outputs(context, problem, need_data);
    if (status == APA_STATUS_OK)
        status = check_masks(context, problem);
    if (status != APA_STATUS_OK)
        return status;
    fill_call(problem, call);
    call->verdicts = options != NULL ? options->verdicts : NULL;
    return choose_engine(context, options != NULL ? options->engine : NULL, call, engine);
}
