/* Engine table entry: what it supports. How the work is spread: cpu/work.c. */
#include "cpu/engine.h"

#include "cpu/prep.h"
#include "cpu/work.h"
#include "recipe/defaults.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

static apa_status refuse(apa_context *context, const char *knob, const char *found, const char *expected)
{
    return apa_fail(context, APA_STATUS_UNSUPPORTED, "%s: %s, the cpu engine takes %s (the reference engine takes it)",
                    knob, found, expected);
}

static apa_status check_recipe(apa_context *context, const apa_recipe *recipe)
{
    char found[32];
    if (recipe->tile != APA_CPU_TILE) {
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "tile: %d, the cpu engine takes 64", (int)recipe->tile);
    }
    if (recipe->group != APA_CPU_LANES) {
        snprintf(found, sizeof found, "%d", (int)recipe->group);
        return refuse(context, "group", found, "16");
    }
    if (recipe->exact_format != APA_EXACT_FORMAT_INPUT)
        return refuse(context, "exact_format", "f16 or bf16", "input");
    const char *knob;
    apa_recipe plain = *recipe;
    plain.eps_by = APA_EPS_BY_CALL;
    if (apa_recipe_beyond_walk(&plain, &knob)) {
        char held[32] = "";
        apa_recipe_get(recipe, knob, held, sizeof held);
        return refuse(context, knob, held, "the plain adaptive walk only");
    }
    if (recipe->force == APA_FORCE_HIGH)
        return APA_STATUS_OK; /* no cold tile, so nothing below matters */
    if (recipe->cold_format != APA_COLD_FORMAT_INT8) {
        char held[32] = "";
        apa_recipe_get(recipe, "cold_format", held, sizeof held);
        return refuse(context, "cold_format", held, "int8");
    }
    if (recipe->q_terms != 1)
        return refuse(context, "q_terms", "2", "1");
    if (recipe->smooth_v != APA_TOGGLE_OFF)
        return refuse(context, "smooth_v", "on", "off");
    /* Judged again against the final λ, the start of λ decides nothing: the bound is accepted there and has no effect.
     */
    if (recipe->lambda_bound != APA_LAMBDA_BOUND_NONE && recipe->second_look != APA_TOGGLE_ON)
        return refuse(context, "lambda_bound", "jensen without second_look", "none, or second_look=on");
    return APA_STATUS_OK;
}

/* Products of sizes below this fit int64 with room for every factor that the layout adds. Broadcast views (stride 0)
 * can describe more than any memory holds. */
#define LARGEST_PROBLEM 0x1p52

static bool is_too_large(const apa_call *call)
{
    const double keys = (double)call->B * (double)call->Hkv * (double)(call->Skv + APA_CPU_TILE);
    const double rows = (double)call->B * (double)call->Hq * (double)(call->Sq + APA_CPU_LANES);
    return keys > LARGEST_PROBLEM / 1024.0 * 8.0 || rows > LARGEST_PROBLEM / 1024.0 * 8.0;
}

/* Where a call changes scores its scale goes into Q (cpu/bend.h), so it has to leave Q's values in range. */
#define LARGEST_FACTOR 0x1p60

static apa_status check_scores(apa_context *context, const apa_call *call)
{
    const double factor = fabs(call->scale) * 1.4426950408889634;
    if (call->scale != 0.0 && !(factor >= FLT_MIN && factor <= FLT_MAX))
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "softmax_scale: %g, the cpu engine takes 0 and what FP32 holds (the reference engine takes it)",
                        call->scale);
    const double cap = call->softcap > 0.0 ? call->softcap : 1.0, into_q = fabs(call->scale) / cap;
    if (apa_call_changes_scores(call) &&
        ((into_q != 0.0 && !(into_q >= 1.0 / LARGEST_FACTOR && into_q <= LARGEST_FACTOR)) ||
         !(cap >= 1.0 / LARGEST_FACTOR && cap <= LARGEST_FACTOR)))
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "softmax_scale: %g with softcap %g (or a mask or slopes), the cpu engine takes both, and the "
                        "scale over the cap, from 2^-60 to 2^60 (the reference engine takes them)",
                        call->scale, call->softcap);
    return APA_STATUS_OK;
}

static apa_status check_mask(apa_context *context, const apa_call *call)
{
    if (call->mask.dtype == APA_DTYPE_F64)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "attn_mask: f64, the cpu engine takes bool, f16, bf16 and f32 (the reference engine takes it)");
    return APA_STATUS_OK;
}

/* Tiles that were quantised before serve calls that would have made the same ones. */
static apa_status check_kept(apa_context *context, const apa_call *call)
{
    const apa_recipe *recipe = &call->recipe;
    apa_cpu_shape shape;
    if (call->kept == NULL)
        return APA_STATUS_OK;
    apa_cpu_shape_of(call, 1.0, &shape);
    const bool smooth = recipe->smooth_k == APA_TOGGLE_ON;
    if (!shape.adaptive || (smooth == call->kept->smooth_k && shape.hadamard_block == call->kept->hadamard_block))
        return APA_STATUS_OK;
    const bool differs = smooth != call->kept->smooth_k;
    return apa_fail(context, APA_STATUS_UNSUPPORTED,
                    "%s: %s%s, the cache's tiles were made with %s; a cache made with it takes it",
                    differs ? "smooth_k" : "hadamard", (differs ? smooth : shape.hadamard_block > 1) ? "on" : "off",
                    call->softcap > 0.0 && differs ? " (because of softcap)" : "",
                    (differs ? call->kept->smooth_k : call->kept->hadamard_block > 1) ? "on" : "off");
}

static apa_status resolve(apa_context *context, apa_call *call)
{
    if (is_too_large(call))
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "shape: batch x heads x length beyond 2^45 rows or keys");
    apa_status status = check_scores(context, call);
    if (status == APA_STATUS_OK)
        status = check_mask(context, call);
    if (status != APA_STATUS_OK)
        return status;
    apa_recipe *recipe = &call->recipe;
    apa_recipe_fill_auto(recipe, call->Sq, call->Skv, call->D);
    if (recipe->skip == APA_TOGGLE_AUTO)
        recipe->skip = APA_TOGGLE_ON;
    if (call->q.dtype == APA_DTYPE_F64 || call->out.dtype == APA_DTYPE_F64 || call->lse.dtype == APA_DTYPE_F64)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "dtype: f64, the cpu engine takes f16, bf16 and f32 (the reference "
                        "engine takes f64)");
    status = check_recipe(context, recipe);
    /* The running test knows nothing of a sink's mass; judged again, every verdict does. */
    if (status == APA_STATUS_OK && call->sinks.dtype != APA_DTYPE_NONE && recipe->force == APA_FORCE_NONE &&
        recipe->second_look != APA_TOGGLE_ON)
        return refuse(context, "second_look", "off with sinks", "on");
    return status == APA_STATUS_OK ? check_kept(context, call) : status;
}

static void kernel_name(const apa_context *context, const apa_call *call, char *name, size_t size)
{
    apa_cpu_shape shape;
    apa_cpu_shape_of(call, 1.0, &shape);
    snprintf(name, size, "%s %s", shape.adaptive ? "i8+f32" : "f32",
             apa_cpu_kernels_for(apa_context_isa_level(context))->name);
}

const apa_engine apa_cpu_engine = {
    .name = "cpu",
    .resolve = resolve,
    .kernel_name = kernel_name,
    .workspace_bytes = apa_cpu_workspace_bytes,
    .run = apa_cpu_run,
    .batch_workspace_bytes = apa_cpu_batch_workspace_bytes,
    .run_batch = apa_cpu_run_batch,
};
