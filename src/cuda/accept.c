/* Which resolved recipes the warp-MMA kernels run, and which shapes all families. No CUDA in here, so it is tested
 * without one. */
#include "cuda/enqueue.h"

#include "cuda/job.h"
#include "cuda/trait.h"
#include "recipe/defaults.h"

#include <stdio.h>

bool apa_cuda_all_hot(const apa_recipe *recipe)
{
    return recipe->force == APA_FORCE_HIGH || (recipe->force == APA_FORCE_NONE && recipe->eps < 0.0);
}

static apa_status refuse(apa_context *context, const char *what, const char *found, const char *expected)
{
    return apa_fail(context, APA_STATUS_UNSUPPORTED, "%s: %s, the cuda engine takes %s", what, found, expected);
}

static apa_status refuse_knob(apa_context *context, const apa_recipe *recipe, const char *knob, const char *expected)
{
    char found[32] = "";
    apa_recipe_get(recipe, knob, found, sizeof found);
    return refuse(context, knob, found, expected);
}

/* The recipe with plain values for the knobs of cold tiles that the table of traits answers for (or, where all is hot,
 * that nothing reads). */
static apa_recipe without_cold_knobs(const apa_recipe *recipe)
{
    apa_recipe plain = *recipe;
    plain.qk_format = APA_QK_FORMAT_AUTO;
    plain.pv_format = APA_PV_FORMAT_AUTO;
    plain.qk_format = apa_recipe_qk_format(&plain);
    plain.pv_format = apa_recipe_pv_format(&plain);
    plain.qk_scale_granularity = APA_QK_GRANULARITY_AUTO;
    plain.v_scale_granularity = APA_V_GRANULARITY_AUTO;
    if (recipe->exact_accum == APA_ACCUMULATOR_F16 && recipe->exact_flush == APA_CUDA_TILE)
        plain.exact_accum = APA_ACCUMULATOR_F64;
    if (!apa_cuda_all_hot(recipe))
        return plain;
    plain.exact_q = plain.exact_k = plain.exact_p = plain.exact_v = APA_TOGGLE_OFF;
    plain.tensor_scale = APA_TENSOR_SCALE_POW2;
    plain.p_scale = APA_P_SCALE_ROW_TILE;
    plain.v_range = 448.0;
    plain.p_sum = APA_P_SUM_QUANTISED;
    plain.p_map = APA_P_MAP_EXP;
    plain.p_phase = plain.smooth_q = APA_TOGGLE_OFF;
    plain.eps_by = APA_EPS_BY_CALL;
    plain.q_mean = APA_Q_MEAN_BLOCK;
    plain.smooth_k_stride = 1;
    plain.qk_accum = plain.pv_accum = APA_ACCUMULATOR_F64;
    plain.pv_flush = 64;
    return plain;
}

/* Is everything outside the cold formats' own knobs that of the plain walk? */
static apa_status check_walk(apa_context *context, const apa_recipe *recipe)
{
    const apa_recipe plain = without_cold_knobs(recipe);
    const char *knob;
    if (recipe->tile != APA_CUDA_TILE)
        return refuse_knob(context, recipe, "tile", "64");
    if (recipe->exact_format != APA_EXACT_FORMAT_INPUT)
        return refuse_knob(context, recipe, "exact_format", "input");
    if (recipe->exact_accum == APA_ACCUMULATOR_F16 && recipe->exact_flush != APA_CUDA_TILE)
        return refuse_knob(context, recipe, "exact_flush", "64 (with exact_accum=f16)");
    if (apa_recipe_beyond_walk(&plain, &knob))
        return refuse_knob(context, recipe, knob, "the plain adaptive walk only");
    return APA_STATUS_OK;
}

/* Where the order of the walk and the start of λ decide anything: verdicts that fall on the way, and frames that P is
 * rounded against. Elsewhere verdicts fall when λ is complete. */
static apa_status check_order(apa_context *context, const apa_recipe *recipe)
{
    if (recipe->second_look == APA_TOGGLE_ON && recipe->pv_format != APA_PV_FORMAT_NVFP4)
        return APA_STATUS_OK;
    if (recipe->order != APA_ORDER_SINK_BACKWARD)
        return refuse_knob(context, recipe, "order", "sink-backward (with nvfp4 or second_look=off)");
    if (recipe->lambda_bound != APA_LAMBDA_BOUND_NONE)
        return refuse_knob(context, recipe, "lambda_bound", "none (with nvfp4 or second_look=off)");
    return APA_STATUS_OK;
}

apa_status apa_cuda_accept(apa_context *context, const apa_recipe *recipe)
{
    const char *knob;
    const bool nvfp4 = recipe->pv_format == APA_PV_FORMAT_NVFP4, all_hot = apa_cuda_all_hot(recipe);
    if (!all_hot && recipe->verdict == APA_VERDICT_RULE_MASS && apa_cuda_trait_find(recipe, &knob) == NULL)
        return refuse_knob(context, recipe, knob,
                           "int8 with scales row and tile-channel, or int8, int8 with pv_format=e4m3 or e4m3 with "
                           "scales thread and channel, or nvfp4");
    const apa_status status = check_walk(context, recipe);
    if (status != APA_STATUS_OK || all_hot)
        return status; /* all hot: no cold tile, so nothing below matters */
    if (recipe->group != APA_CUDA_GROUP)
        return refuse_knob(context, recipe, "group", "16");
    if (recipe->q_terms != (nvfp4 ? 2 : 1))
        return refuse_knob(context, recipe, "q_terms", "1, with nvfp4 2");
    if (recipe->smooth_v != APA_TOGGLE_OFF)
        return refuse_knob(context, recipe, "smooth_v", "off");
    if (recipe->p_scale != (nvfp4 ? APA_P_SCALE_UE4M3 : APA_P_SCALE_ROW_TILE))
        return refuse_knob(context, recipe, "p_scale", "row-tile, with nvfp4 ue4m3");
    if (recipe->skip == APA_TOGGLE_ON && !apa_cuda_trait_skips(apa_cuda_trait_find(recipe, &knob)))
        return refuse_knob(
            context, recipe, "skip",
            "off, or on with int8 scores and coarse scales (others' error bounds leave nothing to skip)");
    return check_order(context, recipe);
}

apa_status apa_cuda_check_shape(apa_context *context, const apa_call *call)
{
    char found[64];
    if (call->k.dtype != call->q.dtype || call->v.dtype != call->q.dtype)
        return refuse(context, "dtype", "q, k and v that differ", "one dtype for all three");
    if (call->q.dtype != APA_DTYPE_F16 && call->q.dtype != APA_DTYPE_BF16)
        return refuse(context, "dtype", apa_dtype_name(call->q.dtype), "f16 and bf16");
    if (call->q.dtype != APA_DTYPE_F16 && call->recipe.exact_accum == APA_ACCUMULATOR_F16)
        return refuse_knob(context, &call->recipe, "exact_accum",
                           "auto|f64|f32 with bf16 (no matrix unit sums it in 16 bits)");
    if (call->out.dtype == APA_DTYPE_F64 || call->lse.dtype == APA_DTYPE_F64)
        return refuse(context, "dtype of out or lse", "f64", "f16, bf16 and f32 (lse: f32)");
    if (call->D != call->Dv || (call->D != 64 && call->D != 128 && call->D != 256)) {
        snprintf(found, sizeof found, "%lld (values %lld)", (long long)call->D, (long long)call->Dv);
        return refuse(context, "dim", found, "64, 128 or 256, the same for values");
    }
    if (call->Skv > INT32_MAX - APA_CUDA_TILE || call->Sq > INT32_MAX / 2 / call->G || call->Hq > INT32_MAX / 2 ||
        call->B * call->Hkv > INT32_MAX / 2 || apa_call_tiles(call) * call->B * call->Hkv > INT32_MAX)
        return refuse(context, "shape", "an axis beyond 2^30", "fewer rows, keys and tiles");
    if (apa_call_changes_scores(call) || call->sinks.dtype != APA_DTYPE_NONE)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "softcap, attn_mask, alibi_slopes or sinks: the cuda engine takes none of them");
    return APA_STATUS_OK;
}
