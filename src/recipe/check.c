/* The rules between knobs: combinations that make no sense, each refused with the reason. */
#include "recipe/recipe_internal.h"

#include "recipe/defaults.h"

#include <math.h>
#include <string.h>

/* What a knob holds, as text. */
static const char *held(const apa_recipe *r, const char *knob, char text[64])
{
    if (!apa_knob_print(apa_knob_find(knob), r, text, 64))
        strcpy(text, "?");
    return text;
}

#define REFUSE(knob, expected)                                                                                         \
    do {                                                                                                               \
        char found_[64];                                                                                               \
        return apa_recipe_fail(message, size, "%s: found %s, expected %s", knob, held(r, knob, found_), expected);     \
    } while (0)

/* ... where a second knob is what speaks against it. */
#define REFUSE_WITH(knob, other, expected)                                                                             \
    do {                                                                                                               \
        char found_[64], other_[64];                                                                                   \
        return apa_recipe_fail(message, size, "%s: found %s with %s %s, expected %s", knob, held(r, knob, found_),     \
                               other, held(r, other, other_), expected);                                               \
    } while (0)

/* The knob that decides a format: its own, or cold_format. */
static const char *pv_knob(const apa_recipe *r)
{
    return r->pv_format == APA_PV_FORMAT_AUTO ? "cold_format" : "pv_format";
}

static const char *qk_knob(const apa_recipe *r)
{
    return r->qk_format == APA_QK_FORMAT_AUTO ? "cold_format" : "qk_format";
}

/* ---- scales ---- */

static apa_status check_p_scale(const apa_recipe *r, char *message, size_t size)
{
    const apa_p_scale p = r->p_scale;
    switch (apa_recipe_pv_format(r)) {
    case APA_PV_FORMAT_AUTO:
        return APA_STATUS_OK;
    case APA_PV_FORMAT_INT8:
        if (p > APA_P_SCALE_ROW_TILE && p != APA_P_SCALE_STATIC)
            REFUSE_WITH(
                "p_scale", pv_knob(r),
                "auto|row-tile|static (the integer product sums over the whole tile, so it takes one scale per row)");
        break;
    case APA_PV_FORMAT_E4M3:
        if (p > APA_P_SCALE_ROW_TILE && p != APA_P_SCALE_STATIC && p != APA_P_SCALE_ROW_TILE_POW2)
            REFUSE_WITH("p_scale", pv_knob(r), "auto|row-tile|static|row-tile-pow2 (E4M3 has no block scales)");
        break;
    case APA_PV_FORMAT_NVFP4:
        if (p == APA_P_SCALE_ROW_TILE || p == APA_P_SCALE_MX || p == APA_P_SCALE_ROW_TILE_POW2)
            REFUSE_WITH(
                "p_scale", pv_knob(r),
                "auto|ue4m3|pow2|static|two-level (E2M1 has 8 steps: one scale per row and tile would round most "
                "of P to 0; MX scales are MXFP4's)");
        break;
    case APA_PV_FORMAT_MXFP4:
    case APA_PV_FORMAT_MXFP8:
        if (p != APA_P_SCALE_AUTO && p != APA_P_SCALE_STATIC && p != APA_P_SCALE_MX)
            REFUSE_WITH("p_scale", pv_knob(r), "auto|mx|static (MX scales are powers of two per 32 values)");
        break;
    case APA_PV_FORMAT_F16:
    case APA_PV_FORMAT_EXACT:
        if (p != APA_P_SCALE_AUTO && p != APA_P_SCALE_STATIC)
            REFUSE_WITH("p_scale", pv_knob(r), "auto|static (wide formats need no scale)");
        break;
    }
    return APA_STATUS_OK;
}

/* S·2^τ is the largest code that P can ask for. */
static apa_status check_static_scale(const apa_recipe *r, char *message, size_t size)
{
    const apa_pv_format format = apa_recipe_pv_format(r);
    if (!isnan(r->p_static_scale) && r->p_scale > APA_P_SCALE_AUTO && r->p_scale != APA_P_SCALE_STATIC &&
        r->p_static_scale != apa_recipe_static_scale(format))
        REFUSE_WITH("p_static_scale", "p_scale", "auto, or p_scale=static");
    if (r->p_scale != APA_P_SCALE_STATIC || format == APA_PV_FORMAT_AUTO)
        return APA_STATUS_OK;
    const double largest = format == APA_PV_FORMAT_EXACT ? 65504.0 : apa_recipe_p_range(format);
    const double scale = isnan(r->p_static_scale) ? apa_recipe_static_scale(format) : r->p_static_scale;
    if (!(scale * exp2(r->lazy_tau) <= largest))
        REFUSE_WITH(isnan(r->p_static_scale) ? "lazy_tau" : "p_static_scale", pv_knob(r),
                    "a scale that times 2^lazy_tau stays inside the format (a lagging frame lets P reach 2^lazy_tau)");
    return APA_STATUS_OK;
}

static apa_status check_granularity(const apa_recipe *r, char *message, size_t size)
{
    const apa_qk_format qk = apa_recipe_qk_format(r);
    const apa_pv_format pv = apa_recipe_pv_format(r);
    const apa_qk_granularity g = r->qk_scale_granularity;
    const apa_v_granularity v = r->v_scale_granularity;
    const bool mx_pv = pv == APA_PV_FORMAT_MXFP4 || pv == APA_PV_FORMAT_MXFP8;
    if ((g == APA_QK_GRANULARITY_16) != (qk == APA_QK_FORMAT_NVFP4) && g != APA_QK_GRANULARITY_AUTO &&
        qk != APA_QK_FORMAT_AUTO)
        REFUSE_WITH("qk_scale_granularity", qk_knob(r), "auto, 16 with nvfp4 and only so (its blocks are 16 values)");
    if ((g == APA_QK_GRANULARITY_32) != (qk == APA_QK_FORMAT_MXFP4) && g != APA_QK_GRANULARITY_AUTO &&
        qk != APA_QK_FORMAT_AUTO)
        REFUSE_WITH("qk_scale_granularity", qk_knob(r), "auto, 32 with mxfp4 and only so (its blocks are 32 values)");
    if ((v == APA_V_GRANULARITY_16) != (pv == APA_PV_FORMAT_NVFP4) && v != APA_V_GRANULARITY_AUTO &&
        pv != APA_PV_FORMAT_AUTO)
        REFUSE_WITH("v_scale_granularity", pv_knob(r), "auto, 16 with nvfp4 and only so (its blocks are 16 values)");
    if ((v == APA_V_GRANULARITY_32) != mx_pv && v != APA_V_GRANULARITY_AUTO && pv != APA_PV_FORMAT_AUTO)
        REFUSE_WITH("v_scale_granularity", pv_knob(r),
                    "auto, 32 with mxfp4 or mxfp8 and only so (their blocks are 32 values)");
    if (r->q_terms == 2 && g >= APA_QK_GRANULARITY_THREAD && g <= APA_QK_GRANULARITY_BLOCK)
        REFUSE_WITH("q_terms", "qk_scale_granularity", "1, or a scale per row (a residual has a scale of its own row)");
    if (!isnan(r->v_range) && r->v_range != 448.0 && pv != APA_PV_FORMAT_AUTO && pv != APA_PV_FORMAT_E4M3)
        REFUSE_WITH("v_range", pv_knob(r), "auto, or pv_format=e4m3");
    return APA_STATUS_OK;
}

/* ---- P and sums ---- */

/* Knobs that refine another one, which must not be off. */
static apa_status check_refinements(const apa_recipe *r, char *message, size_t size)
{
    if (r->p_phase == APA_TOGGLE_ON && r->p_scale != APA_P_SCALE_AUTO && r->p_scale != APA_P_SCALE_ROW_TILE_POW2)
        REFUSE_WITH("p_phase", "p_scale", "auto|off, or p_scale=row-tile-pow2 (other frames are not rounded)");
    if (r->q_mean == APA_Q_MEAN_HEAD && r->smooth_q == APA_TOGGLE_OFF)
        REFUSE_WITH("q_mean", "smooth_q", "auto|block, or smooth_q=on");
    return APA_STATUS_OK;
}

static apa_status check_p(const apa_recipe *r, char *message, size_t size)
{
    const apa_pv_format pv = apa_recipe_pv_format(r);
    if (r->p_map != APA_P_MAP_DIRECT || pv == APA_PV_FORMAT_AUTO)
        return APA_STATUS_OK;
    if (pv != APA_PV_FORMAT_NVFP4 && pv != APA_PV_FORMAT_MXFP4 && pv != APA_PV_FORMAT_E4M3)
        REFUSE_WITH("p_map", pv_knob(r), "exp, or nvfp4|mxfp4|e4m3 (codes come from thresholds on the scores)");
    if (pv == APA_PV_FORMAT_E4M3 && r->p_scale != APA_P_SCALE_STATIC && r->p_scale != APA_P_SCALE_ROW_TILE_POW2)
        REFUSE_WITH("p_map", "p_scale", "exp, or p_scale=static|row-tile-pow2");
    if (r->p_scale == APA_P_SCALE_UE4M3 || r->p_scale == APA_P_SCALE_TWO_LEVEL)
        REFUSE_WITH("p_map", "p_scale",
                    "exp, or p_scale=pow2|static|mx (other scales need the exponential of the maximum)");
    if (pv == APA_PV_FORMAT_NVFP4 && r->p_scale == APA_P_SCALE_AUTO)
        REFUSE_WITH("p_map", "p_scale", "exp, or p_scale=pow2|static");
    if (r->p_sum == APA_P_SUM_EXACT || r->exact_p == APA_TOGGLE_ON)
        REFUSE_WITH("p_map", r->p_sum == APA_P_SUM_EXACT ? "p_sum" : "exact_p",
                    "exp, or a sum over the codes (P never exists in high precision)");
    return APA_STATUS_OK;
}

/* The accumulator that a sum has, auto resolved. */
static apa_accumulator accumulator(apa_accumulator own, const apa_recipe *r)
{
    return own != APA_ACCUMULATOR_AUTO ? own : r->accum != APA_ACCUMULATOR_AUTO ? r->accum : APA_ACCUMULATOR_F64;
}

static apa_status check_sums(const apa_recipe *r, char *message, size_t size)
{
    const apa_qk_format qk = apa_recipe_qk_format(r);
    const apa_pv_format pv = apa_recipe_pv_format(r);
    const apa_accumulator qk_accum = accumulator(r->qk_accum, r), pv_accum = accumulator(r->pv_accum, r);
    const char *qk_name = r->qk_accum == APA_ACCUMULATOR_AUTO ? "accum" : "qk_accum";
    const char *pv_name = r->pv_accum == APA_ACCUMULATOR_AUTO ? "accum" : "pv_accum";
    const bool narrow_qk = qk_accum >= APA_ACCUMULATOR_FP22, narrow_pv = pv_accum >= APA_ACCUMULATOR_FP22;
    if (r->pv_flush > 0 && r->pv_flush != 16 && r->pv_flush != 32 && r->pv_flush != 64)
        REFUSE("pv_flush", "auto, 0, 16, 32 or 64");
    if (r->exact_flush > 0 && r->exact_flush != 16 && r->exact_flush != 32 && r->exact_flush != 64)
        REFUSE("exact_flush", "auto, 0, 16, 32 or 64");
    if (r->exact_flush > 0 && r->exact_accum != APA_ACCUMULATOR_F16)
        REFUSE_WITH("exact_flush", "exact_accum", "auto|0, or exact_accum=f16 (wider sums need no flushing)");
    if (r->exact_flush > 0 && r->softmax > APA_SOFTMAX_ONLINE)
        REFUSE_WITH("exact_flush", "softmax", "auto|0, or softmax=online (P is taken tile by tile)");
    if (narrow_qk && r->qk_accum != APA_ACCUMULATOR_AUTO && qk == APA_QK_FORMAT_INT8)
        REFUSE_WITH(qk_name, qk_knob(r), "f64|f32 (integer sums are exact)");
    if (qk_accum == APA_ACCUMULATOR_F16 && r->qk_accum != APA_ACCUMULATOR_AUTO && qk != APA_QK_FORMAT_AUTO &&
        qk != APA_QK_FORMAT_EXACT)
        REFUSE_WITH(qk_name, qk_knob(r), "f64|f32|fp22, or qk_format=exact (products of codes overflow FP16)");
    if (narrow_pv && pv == APA_PV_FORMAT_INT8)
        REFUSE_WITH(pv_name, pv_knob(r), "f64|f32 (integer sums are exact)");
    if (pv_accum == APA_ACCUMULATOR_F16 && pv != APA_PV_FORMAT_AUTO && pv < APA_PV_FORMAT_F16) {
        const double p =
            r->p_scale == APA_P_SCALE_STATIC
                ? (isnan(r->p_static_scale) ? apa_recipe_static_scale(pv) : r->p_static_scale) * exp2(r->lazy_tau)
                : apa_recipe_p_range(pv);
        const double v = pv == APA_PV_FORMAT_E4M3 && !isnan(r->v_range) ? r->v_range
                         : pv == APA_PV_FORMAT_E4M3                     ? 448.0
                                                                        : INFINITY;
        const int32_t keys = r->pv_flush < 0 ? 64 : r->pv_flush;
        if (keys == 0 || !(keys * p * v <= 65504.0))
            REFUSE_WITH(
                pv_name, pv_knob(r),
                "f64|f32|fp22, or e4m3 with pv_flush · P's largest code · v_range <= 65504 (else the sum overflows)");
    }
    if (r->exact_accum == APA_ACCUMULATOR_FP22)
        REFUSE("exact_accum", "auto|f64|f32|f16 (16-bit matrix units have no such sums)");
    return APA_STATUS_OK;
}

/* ---- the walk ---- */

static apa_status check_softmax(const apa_recipe *r, char *message, size_t size)
{
    const bool kept = r->s_format > APA_KEPT_EXACT || r->p_format > APA_KEPT_EXACT;
    if (r->softmax != APA_SOFTMAX_WHOLE && kept)
        REFUSE_WITH(r->s_format > APA_KEPT_EXACT ? "s_format" : "p_format", "softmax",
                    "auto|exact, or softmax=whole (S and P are not kept otherwise)");
    if (r->softmax > APA_SOFTMAX_ONLINE && r->force != APA_FORCE_HIGH && !(r->force == APA_FORCE_NONE && r->eps < 0))
        REFUSE_WITH("softmax", "force", "auto|online, or force=high (whole and tree are orders of an all-exact pass)");
    if (r->softmax > APA_SOFTMAX_ONLINE && r->smooth_k == APA_TOGGLE_ON)
        REFUSE_WITH("softmax", "smooth_k",
                    "auto|online, or smooth_k=off (there is no cold pass to share a frame with)");
    if (r->softmax == APA_SOFTMAX_TREE && r->exact_accum == APA_ACCUMULATOR_F16)
        REFUSE_WITH("softmax", "exact_accum", "auto|online|whole, or f64|f32 (ELSA is an FP32 method)");
    return APA_STATUS_OK;
}

static apa_status check_verdict(const apa_recipe *r, char *message, size_t size)
{
    const bool selects = r->select > APA_SELECT_NONE;
    if (!selects && r->force_sink == APA_TOGGLE_ON)
        REFUSE_WITH("force_sink", "select", "auto|off, or a selection");
    if (!selects && r->force_diagonal == APA_TOGGLE_ON)
        REFUSE_WITH("force_diagonal", "select", "auto|off, or a selection");
    if (64 % r->sub_block != 0 || r->tile % r->sub_block != 0)
        REFUSE("sub_block", "4, 8, 16, 32 or 64, a divisor of the tile");
    if (r->verdict != APA_VERDICT_RULE_LAMP)
        return APA_STATUS_OK;
    if (selects)
        REFUSE_WITH("verdict", "select", "another verdict, or select=none (LampAttention has no hot tiles)");
    const bool qk = apa_recipe_qk_format(r) == APA_QK_FORMAT_AUTO || apa_recipe_qk_format(r) == APA_QK_FORMAT_EXACT;
    const bool pv = apa_recipe_pv_format(r) == APA_PV_FORMAT_AUTO || apa_recipe_pv_format(r) == APA_PV_FORMAT_EXACT;
    if (!qk || !pv)
        REFUSE_WITH(
            "verdict", qk ? pv_knob(r) : qk_knob(r),
            "another verdict, or qk_format=exact and pv_format=exact (LampAttention narrows sums, not operands)");
    return APA_STATUS_OK;
}

apa_status apa_recipe_check_pairs(const apa_recipe *r, char *message, size_t size)
{
    static apa_status (*const checks[])(const apa_recipe *, char *, size_t) = {
        check_p_scale, check_static_scale, check_granularity, check_refinements,
        check_p,       check_sums,         check_softmax,     check_verdict,
    };
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        const apa_status status = checks[i](r, message, size);
        if (status != APA_STATUS_OK)
            return status;
    }
    return APA_STATUS_OK;
}
