/* What "cuda:wgmma" takes: what its kernels do where a recipe leaves it open, and what is refused by name. */
#include "cuda/wgmma/accept.h"
#include "cuda/engine.h"
#include "cuda/enqueue.h"
#include "cuda/wgmma/maps.h"
#include "recipe/defaults.h"

#include <math.h>
#include <stdio.h>

#define CAPABILITY 90        /* wgmma of sm_90a runs on 9.0 and on nothing else */
#define EPS_PART (2.0 / 3.0) /* of the default ε, without smooth_q: a real head's error is under 5·10⁻³ then */
#define EPS_64 0.1           /* of every row where scores are exact and only P and V are rounded (docs/accuracy.md) */
/* A row of n tiles with even shares has them all hot while 1/n > ε, and a group of 16 a little longer: at n·ε = 1
 * … 1.25 (1.25 … 1.5) .9 (.35) of its tiles are hot on normal noise, .3 (.15) on topics, .1 on a real head. A tile of
 * both passes costs more than one of the exact kernel from about a fifth hot on, so a unit whose rows see no more than
 * that goes to the exact kernel at once. */
#define EARLY_SHARES 1.5
#define EARLY_SHARES_64 4.0
#define MOST_STRIDE 8 /* with LEAST_SAMPLE tiles in it a sample's mean changes no error by a tenth */
#define LEAST_SAMPLE 128
#define MOST_BIAS_HEADS 8    /* of a KV head: tile_e4m3.cuh */
#define LARGEST_COLD_DIM 128 /* at 256 channels the sums of two products do not fit the registers */

static apa_status refuse(apa_context *context, const char *what, const char *found)
{
    return apa_fail(context, APA_STATUS_UNSUPPORTED, "%s: %s, which the cuda:wgmma engine does not take", what, found);
}

/* Tiles up to which a group is hot throughout: n of them, where n·ε of a group that sees n is the limit. */
static int32_t early_tiles(const apa_recipe *recipe, const apa_call *call)
{
    const double shares = call->D == 64 ? EARLY_SHARES_64 : EARLY_SHARES;
    const double tiles = (double)apa_call_tiles(call);
    if (recipe->force != APA_FORCE_NONE || !(recipe->eps > 0.0 && recipe->eps < 1.0) || tiles == 0.0)
        return 0;
    double most = shares / recipe->eps;
    if (recipe->eps_by == APA_EPS_BY_ROW) /* n·ε·sqrt(tiles / n), or n times the most that ε may be */
        most = fmax(most * most / tiles, shares / apa_recipe_most_eps(recipe));
    return (int32_t)fmin(most, INT32_MAX);
}

/* K's mean from a part of the keys, as long as that is LEAST_SAMPLE tiles. */
static int32_t sample_stride(int64_t tiles)
{
    int32_t stride = 1;
    while (stride < MOST_STRIDE && tiles / (2 * stride) >= LEAST_SAMPLE)
        stride *= 2;
    return stride;
}

bool apa_wgmma_has_exact_scores(int64_t D)
{
    return D == 64;
}

static apa_qk_format qk_format_of(int64_t D)
{
    return apa_wgmma_has_exact_scores(D) ? APA_QK_FORMAT_EXACT : APA_QK_FORMAT_E4M3;
}

/* Does the recipe ask for the kernels' formats, at least where it says anything? */
static bool takes_formats(const apa_recipe *recipe, int64_t D)
{
    return apa_recipe_qk_format(recipe) == qk_format_of(D) && apa_recipe_pv_format(recipe) == APA_PV_FORMAT_E4M3;
}

/* The queries' mean and the phases of P cure what E4M3 does not average (docs/accuracy.md). Rows that are packed
 * position by position have a query head each: their scores' biases are not those of a warp. */
static void prefer_smooth(apa_recipe *recipe, const apa_call *call)
{
    apa_recipe resolved = *recipe;
    apa_recipe_fill_auto(&resolved, call->Sq, call->Skv, call->D);
    if (recipe->smooth_q == APA_TOGGLE_AUTO && !apa_wgmma_has_exact_scores(call->D) &&
        resolved.packing != APA_PACKING_ROWS && call->G <= MOST_BIAS_HEADS)
        recipe->smooth_q = APA_TOGGLE_ON;
    if (recipe->smooth_q == APA_TOGGLE_ON && recipe->q_mean == APA_Q_MEAN_AUTO)
        recipe->q_mean = APA_Q_MEAN_HEAD;
    if (recipe->p_phase == APA_TOGGLE_AUTO && recipe->p_scale == APA_P_SCALE_ROW_TILE_POW2)
        recipe->p_phase = APA_TOGGLE_ON;
}

/* ε, and whose it is; an ε that was given is that of every row, unless eps_by was given too. */
static void prefer_eps(apa_recipe *recipe, const apa_call *call)
{
    const bool open = isnan(recipe->eps), exact_scores = apa_wgmma_has_exact_scores(call->D);
    if (recipe->eps_by == APA_EPS_BY_AUTO)
        recipe->eps_by = open && !exact_scores ? APA_EPS_BY_ROW : APA_EPS_BY_CALL;
    if (open)
        recipe->eps = exact_scores ? EPS_64
                                   : (recipe->smooth_q == APA_TOGGLE_ON ? 1.0 : EPS_PART) *
                                         apa_recipe_default_eps(APA_COLD_FORMAT_E4M3, call->Skv, recipe->tile);
}

/* What the E4M3 kernels do, where the recipe leaves it open. */
static void prefer(apa_recipe *recipe, const apa_call *call)
{
    if (recipe->cold_format == APA_COLD_FORMAT_AUTO && recipe->qk_format == APA_QK_FORMAT_AUTO &&
        recipe->pv_format == APA_PV_FORMAT_AUTO)
        recipe->cold_format = APA_COLD_FORMAT_E4M3;
    if (recipe->cold_format == APA_COLD_FORMAT_E4M3 && recipe->qk_format == APA_QK_FORMAT_AUTO)
        recipe->qk_format = qk_format_of(call->D);
    if (!takes_formats(recipe, call->D))
        return;
    if (recipe->cold_format == APA_COLD_FORMAT_AUTO) /* both formats were given */
        recipe->cold_format = APA_COLD_FORMAT_E4M3;
    if (recipe->qk_scale_granularity == APA_QK_GRANULARITY_AUTO)
        recipe->qk_scale_granularity = APA_QK_GRANULARITY_WARP;
    if (recipe->v_scale_granularity == APA_V_GRANULARITY_AUTO)
        recipe->v_scale_granularity = APA_V_GRANULARITY_BLOCK;
    if (recipe->p_scale == APA_P_SCALE_AUTO && isnan(recipe->p_static_scale))
        recipe->p_scale = APA_P_SCALE_ROW_TILE_POW2;
    if (recipe->p_map == APA_P_MAP_AUTO && recipe->p_scale == APA_P_SCALE_ROW_TILE_POW2)
        recipe->p_map = APA_P_MAP_DIRECT;
    if (recipe->pow2_scales == APA_TOGGLE_AUTO)
        recipe->pow2_scales = APA_TOGGLE_ON;
    prefer_smooth(recipe, call);
    prefer_eps(recipe, call);
    if (recipe->smooth_k_stride == 0)
        recipe->smooth_k_stride = sample_stride(apa_call_tiles(call));
    if (recipe->early_tiles < 0)
        recipe->early_tiles = early_tiles(recipe, call);
}

static apa_status refuse_knob(apa_context *context, const apa_recipe *recipe, const char *knob)
{
    char found[32] = "";
    apa_recipe_get(recipe, knob, found, sizeof found);
    return refuse(context, knob, found);
}

/* A resolved recipe with cold tiles, for G query heads a KV head. */
static apa_status check_cold(apa_context *context, const apa_recipe *recipe, int64_t G, int64_t D)
{
    const bool exact_scores = apa_wgmma_has_exact_scores(D);
    const struct {
        const char *knob;
        bool taken;
    } rows[] = {
        {"tile", recipe->tile == APA_CUDA_TILE},
        {"group", recipe->group == APA_CUDA_GROUP},
        {"exact_format", recipe->exact_format == APA_EXACT_FORMAT_INPUT},
        {"qk_format", recipe->qk_format == qk_format_of(D)},
        {"pv_format", recipe->pv_format == APA_PV_FORMAT_E4M3},
        {"qk_scale_granularity", recipe->qk_scale_granularity == APA_QK_GRANULARITY_WARP},
        {"v_scale_granularity", recipe->v_scale_granularity == APA_V_GRANULARITY_BLOCK},
        {"p_scale", recipe->p_scale == APA_P_SCALE_ROW_TILE_POW2},
        {"p_map", recipe->p_map == APA_P_MAP_DIRECT},
        {"pow2_scales", recipe->pow2_scales == APA_TOGGLE_ON},
        {"q_terms", recipe->q_terms == 1},
        {"smooth_v", recipe->smooth_v == APA_TOGGLE_OFF},
        {"hadamard", recipe->hadamard == APA_TOGGLE_OFF},
        {"smooth_q", recipe->smooth_q == APA_TOGGLE_OFF ||
                         (!exact_scores && recipe->packing != APA_PACKING_ROWS && G <= MOST_BIAS_HEADS)},
        {"q_mean", recipe->smooth_q == APA_TOGGLE_OFF || recipe->q_mean == APA_Q_MEAN_HEAD},
        {"skip", recipe->skip == APA_TOGGLE_OFF},
        {"second_look", recipe->second_look == APA_TOGGLE_ON}, /* verdicts fall when λ is complete */
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (!rows[i].taken)
            return refuse_knob(context, recipe, rows[i].knob);
    apa_recipe plain = *recipe;
    const char *knob;
    plain.qk_scale_granularity = APA_QK_GRANULARITY_ROW;
    plain.v_scale_granularity = APA_V_GRANULARITY_TILE_CHANNEL;
    plain.p_scale = APA_P_SCALE_ROW_TILE;
    plain.p_map = APA_P_MAP_EXP;
    plain.pow2_scales = APA_TOGGLE_OFF;
    plain.smooth_k_stride = 1;
    plain.smooth_q = plain.p_phase = APA_TOGGLE_OFF;
    plain.q_mean = APA_Q_MEAN_BLOCK;
    plain.eps_by = APA_EPS_BY_CALL;
    if (exact_scores)
        plain.qk_format = APA_QK_FORMAT_E4M3;
    return apa_recipe_beyond_walk(&plain, &knob) ? refuse_knob(context, recipe, knob) : APA_STATUS_OK;
}

static apa_status resolve_cold(apa_context *context, apa_call *call)
{
    char found[32];
    prefer(&call->recipe, call);
    apa_recipe_fill_auto(&call->recipe, call->Sq, call->Skv, call->D);
    if (call->recipe.skip == APA_TOGGLE_AUTO)
        call->recipe.skip = APA_TOGGLE_OFF;
    if (call->D > LARGEST_COLD_DIM) {
        snprintf(found, sizeof found, "%d with cold tiles", (int)call->D);
        return refuse(context, "dim", found);
    }
    const apa_status status = check_cold(context, &call->recipe, call->G, call->D);
    return status == APA_STATUS_OK ? apa_cuda_check_shape(context, call) : status;
}

apa_status apa_wgmma_resolve(apa_context *context, apa_call *call)
{
    apa_cuda_target target;
    apa_status status = apa_cuda_current(context, &target);
    if (status != APA_STATUS_OK)
        return status;
    if (target.capability != CAPABILITY)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "cuda:wgmma: needs compute capability 9.0, device %d has %d.%d", (int)target.index,
                        (int)target.capability / 10, (int)target.capability % 10);
    if (call->recipe.exact_accum == APA_ACCUMULATOR_F16) /* of cuda:warp alone */
        return refuse_knob(context, &call->recipe, "exact_accum");
    status = apa_cuda_all_hot(&call->recipe) ? apa_cuda_resolve(context, call) : resolve_cold(context, call);
    if (status != APA_STATUS_OK)
        return status;
    if (call->pages != NULL)
        return APA_STATUS_OK; /* they are laid flat first */
    const char *objection = apa_wgmma_map_objection(&call->k);
    if (objection != NULL)
        return refuse(context, "k", objection);
    objection = apa_wgmma_map_objection(&call->v);
    return objection != NULL ? refuse(context, "v", objection) : APA_STATUS_OK;
}
