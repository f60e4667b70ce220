/* Defaults. */
#include "recipe/defaults.h"

#include <math.h>

#define DEFAULT_GROUP 16 /* rows: the verdict granularity of APA */

/* INT8 and FP8. A cold tile of share x adds an error of about x·e to its row, e being the format's own relative error,
 * and tiles are independent: sqrt(Σ x²)·e <= sqrt(ε)·e in a row. One ε would do for that bound; measured on a real
 * model (30 layers, 2048 … 32768 keys) the error at one ε still grows with context, and ε = 0.22/sqrt(tiles) holds it
 * near 2·10⁻³ (docs/accuracy.md). */
#define INT8_EPS_PER_ROOT_TILE 0.22
#define INT8_EPS_HIGHEST 0.1
/* FP4: APA's own. */
#define NVFP4_EPS 0.005

double apa_recipe_default_eps(apa_cold_format cold_format, int64_t Skv, int32_t tile)
{
    if (cold_format == APA_COLD_FORMAT_NVFP4 || cold_format == APA_COLD_FORMAT_MXFP4)
        return NVFP4_EPS;
    const double tiles = ceil((double)Skv / tile);
    const double eps = tiles > 0.0 ? INT8_EPS_PER_ROOT_TILE / sqrt(tiles) : INT8_EPS_HIGHEST;
    return eps > INT8_EPS_HIGHEST ? INT8_EPS_HIGHEST : eps;
}

/* Beyond these bounds ε says that nothing is hot, or that all of it is, in whatever row. */
static bool eps_is_by_row(const apa_recipe *recipe)
{
    return recipe->eps_by == APA_EPS_BY_ROW && recipe->eps > 0.0 && recipe->eps < 1.0;
}

double apa_recipe_most_eps(const apa_recipe *recipe)
{
    return eps_is_by_row(recipe) ? fmax(recipe->eps, INT8_EPS_HIGHEST) : recipe->eps;
}

double apa_recipe_group_eps(const apa_recipe *recipe, int64_t tiles, int64_t seen)
{
    if (!eps_is_by_row(recipe) || seen <= 0)
        return recipe->eps;
    return fmin(recipe->eps * sqrt((double)tiles / (double)seen), apa_recipe_most_eps(recipe));
}

/* ---- formats ---- */

apa_qk_format apa_recipe_qk_format(const apa_recipe *recipe)
{
    static const apa_qk_format of[] = {
        [APA_COLD_FORMAT_AUTO] = APA_QK_FORMAT_AUTO,   [APA_COLD_FORMAT_INT8] = APA_QK_FORMAT_INT8,
        [APA_COLD_FORMAT_NVFP4] = APA_QK_FORMAT_NVFP4, [APA_COLD_FORMAT_E4M3] = APA_QK_FORMAT_E4M3,
        [APA_COLD_FORMAT_MXFP4] = APA_QK_FORMAT_MXFP4,
    };
    return recipe->qk_format != APA_QK_FORMAT_AUTO ? recipe->qk_format : of[recipe->cold_format];
}

apa_pv_format apa_recipe_pv_format(const apa_recipe *recipe)
{
    static const apa_pv_format of[] = {
        [APA_COLD_FORMAT_AUTO] = APA_PV_FORMAT_AUTO,   [APA_COLD_FORMAT_INT8] = APA_PV_FORMAT_INT8,
        [APA_COLD_FORMAT_NVFP4] = APA_PV_FORMAT_NVFP4, [APA_COLD_FORMAT_E4M3] = APA_PV_FORMAT_E4M3,
        [APA_COLD_FORMAT_MXFP4] = APA_PV_FORMAT_MXFP4,
    };
    return recipe->pv_format != APA_PV_FORMAT_AUTO ? recipe->pv_format : of[recipe->cold_format];
}

double apa_recipe_p_range(apa_pv_format format)
{
    static const double range[] = {
        [APA_PV_FORMAT_AUTO] = 1,  [APA_PV_FORMAT_INT8] = 255,  [APA_PV_FORMAT_E4M3] = 448,  [APA_PV_FORMAT_NVFP4] = 6,
        [APA_PV_FORMAT_MXFP4] = 6, [APA_PV_FORMAT_MXFP8] = 448, [APA_PV_FORMAT_F16] = 65504, [APA_PV_FORMAT_EXACT] = 1,
    };
    return range[format];
}

double apa_recipe_static_scale(apa_pv_format format)
{
    return format == APA_PV_FORMAT_F16 ? 1.0 : apa_recipe_p_range(format);
}

/* ---- auto ---- */

static void set_toggle(apa_toggle *toggle, apa_toggle value)
{
    if (*toggle == APA_TOGGLE_AUTO)
        *toggle = value;
}

/* A field whose auto is 0. */
#define SET(field, value)                                                                                              \
    do {                                                                                                               \
        if (recipe->field == 0)                                                                                        \
            recipe->field = value;                                                                                     \
    } while (0)

static void fill_qk(apa_recipe *recipe, int64_t D)
{
    static const apa_qk_granularity own[] = {
        [APA_QK_FORMAT_AUTO] = APA_QK_GRANULARITY_ROW, [APA_QK_FORMAT_INT8] = APA_QK_GRANULARITY_ROW,
        [APA_QK_FORMAT_E4M3] = APA_QK_GRANULARITY_ROW, [APA_QK_FORMAT_NVFP4] = APA_QK_GRANULARITY_16,
        [APA_QK_FORMAT_MXFP4] = APA_QK_GRANULARITY_32, [APA_QK_FORMAT_EXACT] = APA_QK_GRANULARITY_ROW,
    };
    const bool fp4 = recipe->qk_format == APA_QK_FORMAT_NVFP4 || recipe->qk_format == APA_QK_FORMAT_MXFP4;
    const bool int8 = recipe->qk_format == APA_QK_FORMAT_INT8;
    SET(q_terms, fp4 ? 2 : 1);
    SET(qk_scale_granularity, own[recipe->qk_format]);
    set_toggle(&recipe->exact_q, APA_TOGGLE_OFF);
    set_toggle(&recipe->exact_k, APA_TOGGLE_OFF);
    set_toggle(&recipe->smooth_k, APA_TOGGLE_ON);
    SET(smooth_k_stride, 1);
    set_toggle(&recipe->smooth_q, APA_TOGGLE_OFF);
    SET(q_mean, APA_Q_MEAN_BLOCK);
    /* Rotation costs INT8 nothing but prep; where D has no factor of 16 it would mix too few channels to help. */
    set_toggle(&recipe->hadamard, int8 && D % 16 == 0 ? APA_TOGGLE_ON : APA_TOGGLE_OFF);
}

static void fill_pv(apa_recipe *recipe)
{
    static const apa_p_scale scale[] = {
        [APA_PV_FORMAT_AUTO] = APA_P_SCALE_STATIC,   [APA_PV_FORMAT_INT8] = APA_P_SCALE_ROW_TILE,
        [APA_PV_FORMAT_E4M3] = APA_P_SCALE_ROW_TILE, [APA_PV_FORMAT_NVFP4] = APA_P_SCALE_UE4M3,
        [APA_PV_FORMAT_MXFP4] = APA_P_SCALE_MX,      [APA_PV_FORMAT_MXFP8] = APA_P_SCALE_MX,
        [APA_PV_FORMAT_F16] = APA_P_SCALE_STATIC,    [APA_PV_FORMAT_EXACT] = APA_P_SCALE_STATIC,
    };
    const apa_pv_format format = recipe->pv_format;
    const bool mx = format == APA_PV_FORMAT_MXFP4 || format == APA_PV_FORMAT_MXFP8;
    SET(p_scale, isnan(recipe->p_static_scale) ? scale[format] : APA_P_SCALE_STATIC);
    SET(v_scale_granularity, format == APA_PV_FORMAT_NVFP4 ? APA_V_GRANULARITY_16
                             : mx                          ? APA_V_GRANULARITY_32
                                                           : APA_V_GRANULARITY_TILE_CHANNEL);
    SET(p_sum, APA_P_SUM_QUANTISED);
    SET(p_map, APA_P_MAP_EXP);
    set_toggle(&recipe->p_phase, APA_TOGGLE_OFF);
    if (isnan(recipe->p_static_scale))
        recipe->p_static_scale = apa_recipe_static_scale(format);
    if (isnan(recipe->v_range))
        recipe->v_range = 448.0;
    set_toggle(&recipe->exact_p, APA_TOGGLE_OFF);
    set_toggle(&recipe->exact_v, APA_TOGGLE_OFF);
    set_toggle(&recipe->smooth_v, APA_TOGGLE_OFF);
}

/* Integer sums are exact in every accumulator: `accum` passes them by. */
static void fill_sums(apa_recipe *recipe)
{
    SET(accum, APA_ACCUMULATOR_F64);
    const bool fits_qk = recipe->accum <= APA_ACCUMULATOR_F32 || recipe->qk_format == APA_QK_FORMAT_EXACT ||
                         (recipe->accum == APA_ACCUMULATOR_FP22 && recipe->qk_format != APA_QK_FORMAT_INT8);
    SET(qk_accum, fits_qk ? recipe->accum : APA_ACCUMULATOR_F32);
    SET(pv_accum, recipe->accum);
    SET(exact_accum, APA_ACCUMULATOR_F64);
    if (recipe->pv_flush < 0)
        recipe->pv_flush = 64;
    if (recipe->exact_flush < 0)
        recipe->exact_flush = 0; /* as the kernels that the knob's f16 is modelled on */
}

static void fill_formats(apa_recipe *recipe, int64_t Skv, int64_t D)
{
    if (recipe->verdict == APA_VERDICT_RULE_LAMP && recipe->cold_format == APA_COLD_FORMAT_AUTO) {
        SET(qk_format, APA_QK_FORMAT_EXACT); /* LampAttention narrows sums, not operands */
        SET(pv_format, APA_PV_FORMAT_EXACT);
    }
    SET(cold_format, APA_COLD_FORMAT_INT8);
    recipe->qk_format = apa_recipe_qk_format(recipe);
    recipe->pv_format = apa_recipe_pv_format(recipe);
    if (isnan(recipe->eps))
        recipe->eps = apa_recipe_default_eps(recipe->cold_format, Skv, recipe->tile);
    SET(exact_format, APA_EXACT_FORMAT_INPUT);
    set_toggle(&recipe->scale_search, APA_TOGGLE_ON);
    SET(tensor_scale, APA_TENSOR_SCALE_POW2);
    SET(mx_rounding, APA_MX_ROUNDING_FLOOR);
    set_toggle(&recipe->pow2_scales, APA_TOGGLE_OFF);
    fill_qk(recipe, D);
    fill_pv(recipe);
    fill_sums(recipe);
    SET(softmax, APA_SOFTMAX_ONLINE);
    SET(s_format, APA_KEPT_EXACT);
    SET(p_format, APA_KEPT_EXACT);
}

static void fill_verdict(apa_recipe *recipe)
{
    SET(select, APA_SELECT_NONE);
    SET(verdict, recipe->select > APA_SELECT_NONE ? APA_VERDICT_RULE_NONE : APA_VERDICT_RULE_MASS);
    set_toggle(&recipe->force_sink, APA_TOGGLE_OFF);
    set_toggle(&recipe->force_diagonal, APA_TOGGLE_OFF);
    SET(lamp_stages, APA_LAMP_STAGES_BOTH);
}

void apa_recipe_fill_auto(apa_recipe *recipe, int64_t Sq, int64_t Skv, int64_t D)
{
    fill_formats(recipe, Skv, D);
    fill_verdict(recipe);
    if (recipe->eps_by == APA_EPS_BY_AUTO)
        recipe->eps_by = APA_EPS_BY_CALL;
    if (recipe->group == 0)
        recipe->group = DEFAULT_GROUP;
    if (recipe->packing == APA_PACKING_AUTO)
        recipe->packing = Sq < recipe->group ? APA_PACKING_ROWS : APA_PACKING_HEAD;
    if (recipe->order == APA_ORDER_AUTO)
        recipe->order = APA_ORDER_SINK_BACKWARD;
    if (recipe->lambda_bound == APA_LAMBDA_BOUND_AUTO)
        recipe->lambda_bound = APA_LAMBDA_BOUND_NONE;
    if (recipe->early_tiles < 0)
        recipe->early_tiles = 0;
    set_toggle(&recipe->second_look, APA_TOGGLE_ON);
}

/* ---- what plain engines lack ---- */

bool apa_recipe_beyond_walk(const apa_recipe *r, const char **knob)
{
    apa_recipe plain = *r;
    plain.qk_format = APA_QK_FORMAT_AUTO;
    plain.pv_format = APA_PV_FORMAT_AUTO;
    const bool int8 = r->cold_format == APA_COLD_FORMAT_INT8;
    const struct {
        const char *name;
        bool beyond;
    } rows[] = {
        {"eps_by", r->eps_by == APA_EPS_BY_ROW},
        {"qk_format", r->qk_format != apa_recipe_qk_format(&plain)},
        {"pv_format", r->pv_format != apa_recipe_pv_format(&plain)},
        {"exact_q", r->exact_q == APA_TOGGLE_ON},
        {"exact_k", r->exact_k == APA_TOGGLE_ON},
        {"exact_p", r->exact_p == APA_TOGGLE_ON},
        {"exact_v", r->exact_v == APA_TOGGLE_ON},
        {"qk_scale_granularity",
         r->qk_scale_granularity >= APA_QK_GRANULARITY_THREAD && r->qk_scale_granularity <= APA_QK_GRANULARITY_BLOCK},
        {"v_scale_granularity",
         r->v_scale_granularity == APA_V_GRANULARITY_CHANNEL || r->v_scale_granularity == APA_V_GRANULARITY_BLOCK},
        {"tensor_scale", !int8 && r->tensor_scale != APA_TENSOR_SCALE_POW2},
        {"p_scale", r->p_scale >= APA_P_SCALE_STATIC},
        {"pow2_scales", r->pow2_scales == APA_TOGGLE_ON},
        {"v_range", r->v_range != 448.0},
        {"p_sum", r->p_sum != APA_P_SUM_QUANTISED},
        {"p_map", r->p_map != APA_P_MAP_EXP},
        {"smooth_k_stride", r->smooth_k == APA_TOGGLE_ON && r->smooth_k_stride > 1},
        {"p_phase", r->p_phase == APA_TOGGLE_ON},
        {"smooth_q", r->smooth_q == APA_TOGGLE_ON},
        {"q_mean", r->q_mean == APA_Q_MEAN_HEAD},
        {"qk_accum", r->qk_accum > APA_ACCUMULATOR_F32},
        {"pv_accum", r->pv_accum > APA_ACCUMULATOR_F32},
        {"pv_flush", r->pv_flush != 64},
        {"exact_accum", r->exact_accum > APA_ACCUMULATOR_F32},
        {"softmax", r->softmax != APA_SOFTMAX_ONLINE},
        {"early_rows", r->early_rows != 0},
        {"verdict", r->verdict != APA_VERDICT_RULE_MASS},
        {"select", r->select != APA_SELECT_NONE},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].beyond) {
            *knob = rows[i].name;
            return true;
        }
    return false;
}
