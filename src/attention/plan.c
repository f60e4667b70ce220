/* Validation and choice of engine. Messages name the argument, what was found and what was expected. */
#include "attention/plan.h"

#include "attention/engines.h"
#include "attention/scores.h"
#include "attention/sequences.h"
#include "attention/tensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define APA_MAX_DIM 1024
#define APA_MAX_BATCH INT32_MAX

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
        if (tensor[i]->dtype == APA_DTYPE_BOOL)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: dtype bool, expected f16, bf16, f32 or f64",
                            name[i]);
        apa_status status = apa_tensor_check(context, name[i], tensor[i], false, need_data);
        if (status != APA_STATUS_OK)
            return status;
        if ((tensor[i]->dtype == APA_DTYPE_F64) != (problem->q.dtype == APA_DTYPE_F64))
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                            "%s: dtype %s with q's %s, expected f64 for q, k and v or for none of them", name[i],
                            apa_dtype_name(tensor[i]->dtype), apa_dtype_name(problem->q.dtype));
    }
    const int64_t *q = problem->q.shape, *k = problem->k.shape, *v = problem->v.shape;
    if (q[0] > APA_MAX_BATCH)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "q: batch is %" PRId64 ", expected at most %d", q[0],
                        APA_MAX_BATCH);
    if (!apa_sequences_differ(problem) && (k[0] != q[0] || v[0] != q[0]))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: batch is %" PRId64 ", expected q's %" PRId64,
                        k[0] != q[0] ? "k" : "v", k[0] != q[0] ? k[0] : v[0], q[0]);
    if (q[1] < 1 || k[1] < 1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: 0 heads, expected at least 1", q[1] < 1 ? "q" : "k");
    if (q[1] % k[1] != 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "q: %" PRId64 " heads, expected a multiple of k's %" PRId64 " heads", q[1], k[1]);
    if (v[0] != k[0])
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "v: batch is %" PRId64 ", expected k's %" PRId64, v[0],
                        k[0]);
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

static apa_status check_outputs(apa_context *context, const apa_problem *problem, bool need_data)
{
    const int64_t B = problem->q.shape[0], Hq = problem->q.shape[1], Sq = problem->q.shape[2];
    if (problem->out.dtype == APA_DTYPE_BOOL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "out: dtype bool, expected f16, bf16, f32 or f64");
    apa_status status = apa_tensor_check(context, "out", &problem->out, true, need_data);
    if (status == APA_STATUS_OK)
        status = expect_shape(context, "out", &problem->out, B, Hq, Sq, problem->v.shape[3]);
    if (status == APA_STATUS_OK && problem->lse.dtype != APA_DTYPE_NONE) {
        status = apa_tensor_check(context, "lse", &problem->lse, true, need_data);
        if (status == APA_STATUS_OK)
            status = expect_shape(context, "lse", &problem->lse, B, Hq, Sq, 1);
        if (status == APA_STATUS_OK && problem->lse.dtype != APA_DTYPE_F32 && problem->lse.dtype != APA_DTYPE_F64)
            status = apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "lse: dtype %s, expected f32 or f64",
                              apa_dtype_name(problem->lse.dtype));
    }
    return status == APA_STATUS_OK && need_data ? apa_tensor_check_overlap(context, problem) : status;
}

/* Where sequences differ the call holds the longest sides; apa_sequences_call() makes those of the sequences. */
static void fill_call(const apa_problem *problem, apa_call *call)
{
    call->q = problem->q;
    call->k = problem->k;
    call->v = problem->v;
    call->out = problem->out;
    call->lse = problem->lse;
    call->B = apa_sequences_count(problem);
    call->Hq = problem->q.shape[1];
    call->D = problem->q.shape[3];
    call->Hkv = problem->k.shape[1];
    call->Dv = problem->v.shape[3];
    call->G = call->Hq / call->Hkv;
    apa_sequences_longest(problem, &call->Sq, &call->Skv);
    call->scale = isnan(problem->softmax_scale) ? 1.0 / sqrt((double)call->D) : problem->softmax_scale;
    call->causal = problem->causal != APA_CAUSAL_NONE;
    call->q_offset = problem->q_offset;
    if (problem->causal == APA_CAUSAL_TOP_LEFT)
        call->q_offset = 0;
    else if (problem->q_offset == APA_Q_OFFSET_DEFAULT)
        call->q_offset = call->Skv - call->Sq;
    call->window_left = problem->window_left;
    call->window_right = problem->window_right;
    call->pages = problem->block_table;
    call->page_size = problem->block_table != NULL ? problem->k.shape[2] : 0;
    apa_scores_fill(problem, call);
}

/* A cap bends scores, so what smoothing takes off K can't be given back after it. */
static apa_status forbid_smoothing(apa_context *context, apa_call *call)
{
    apa_recipe *recipe = &call->recipe;
    if (call->softcap == 0.0)
        return APA_STATUS_OK;
    if (recipe->smooth_k == APA_TOGGLE_ON)
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "smooth_k: on together with softcap, expected off or auto");
    recipe->smooth_k = APA_TOGGLE_OFF;
    return APA_STATUS_OK;
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
    for (size_t i = 0; apa_engine_at(i) != NULL; i++) {
        const apa_engine *engine = apa_engine_at(i);
        if (!any && !is_named(engine, name))
            continue;
        known = true;
        call->recipe = call->asked;
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
                         const apa_attention_options *options, apa_plan_data data, apa_call *call,
                         const apa_engine **engine)
{
    const bool need_data = data != APA_PLAN_NO_DATA;
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
    if (status == APA_STATUS_OK && apa_sequences_differ(problem))
        status = apa_sequences_check(context, problem, data == APA_PLAN_HOST_DATA);
    if (status == APA_STATUS_OK)
        status = check_outputs(context, problem, need_data);
    if (status != APA_STATUS_OK)
        return status;
    fill_call(problem, call);
    status = apa_scores_check(context, problem, call->B, call->Skv, need_data);
    if (status == APA_STATUS_OK)
        status = forbid_smoothing(context, call);
    if (status != APA_STATUS_OK)
        return status;
    call->asked = call->recipe;
    call->verdicts = options != NULL ? options->verdicts : NULL;
    call->phases = options != NULL && options->phases != 0;
    if (call->verdicts != NULL && apa_sequences_differ(problem))
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "verdicts: of sequences that differ, expected a problem without cu_seqlens, seqused_k, "
                        "q_offsets and block_table");
    return choose_engine(context, options != NULL ? options->engine : NULL, call, engine);
}
