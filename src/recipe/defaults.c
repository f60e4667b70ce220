/* Defaults. */
#include "recipe/defaults.h"

#include <math.h>

#define DEFAULT_GROUP 16 /* rows: the verdict granularity of APA */

/* INT8 and FP8. A cold tile of share x adds an error of about x·e to its row, e being the format's own relative error, and
 * tiles are independent: sqrt(Σ x²)·e <= sqrt(ε)·e in a row. One ε would do for that bound; measured on a real model (30
 * layers, 2048 … 32768 keys) the error at one ε still grows with context, and ε = 0.22/sqrt(tiles) holds it near 2·10⁻³
 * (docs/accuracy.md). */
#define INT8_EPS_PER_ROOT_TILE 0.22
#define INT8_EPS_HIGHEST 0.1
/* NVFP4: APA's own. */
#define NVFP4_EPS 0.005

double apa_recipe_default_eps(apa_cold_format cold_format, int64_t Skv, int32_t tile)
{
    if (cold_format == APA_COLD_FORMAT_NVFP4)
        return NVFP4_EPS;
    const double tiles = ceil((double)Skv / tile);
    const double eps = tiles > 0.0 ? INT8_EPS_PER_ROOT_TILE / sqrt(tiles) : INT8_EPS_HIGHEST;
    return eps > INT8_EPS_HIGHEST ? INT8_EPS_HIGHEST : eps;
}

static void set_toggle(apa_toggle *toggle, apa_toggle value)
{
    if (*toggle == APA_TOGGLE_AUTO)
        *toggle = value;
}

static void fill_formats(apa_recipe *recipe, int64_t Skv, int64_t D)
{
    if (recipe->cold_format == APA_COLD_FORMAT_AUTO)
        recipe->cold_format = APA_COLD_FORMAT_INT8;
    const int int8 = recipe->cold_format == APA_COLD_FORMAT_INT8;
    if (isnan(recipe->eps))
        recipe->eps = apa_recipe_default_eps(recipe->cold_format, Skv, recipe->tile);
    if (recipe->exact_format == APA_EXACT_FORMAT_AUTO)
        recipe->exact_format = APA_EXACT_FORMAT_INPUT;
    if (recipe->q_terms == 0)
        recipe->q_terms = int8 ? 1 : 2;
    if (recipe->p_scale == APA_P_SCALE_AUTO)
        recipe->p_scale = int8 ? APA_P_SCALE_ROW_TILE : APA_P_SCALE_UE4M3;
    set_toggle(&recipe->scale_search, APA_TOGGLE_ON);
    set_toggle(&recipe->smooth_k, APA_TOGGLE_ON);
    set_toggle(&recipe->smooth_v, APA_TOGGLE_OFF);
    /* Rotation costs INT8 nothing but prep; where D has no factor of 16 it would mix too few channels to help. */
    set_toggle(&recipe->hadamard, int8 && D % 16 == 0 ? APA_TOGGLE_ON : APA_TOGGLE_OFF);
}

void apa_recipe_fill_auto(apa_recipe *recipe, int64_t Sq, int64_t Skv, int64_t D)
{
    fill_formats(recipe, Skv, D);
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
