/* Fills in what a recipe leaves on auto, and refuses what the reference engine cannot do, with the reason. */
#include "reference/internal.h"

#include "recipe/defaults.h"

apa_status apa_reference_resolve(apa_context *context, apa_call *call)
{
    apa_recipe *recipe = &call->recipe;
    apa_recipe_fill_auto(recipe, call->Sq, call->Skv, call->D);
    if (recipe->skip == APA_TOGGLE_AUTO)
        recipe->skip = APA_TOGGLE_OFF;
    if (recipe->tile != APA_REFERENCE_TILE)
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "tile: is %d, the reference engine has tiles of %d keys only",
                        (int)recipe->tile, APA_REFERENCE_TILE);
    if (recipe->group < 1 || recipe->group > APA_REFERENCE_ROWS)
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "group: is %d, the reference engine takes 1 to %d rows",
                        (int)recipe->group, APA_REFERENCE_ROWS);
    if (call->D > APA_REFERENCE_DIM_MAX || call->Dv > APA_REFERENCE_DIM_MAX)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "head dim: is %lld (values %lld), the reference engine takes 1 to %d", (long long)call->D,
                        (long long)call->Dv, APA_REFERENCE_DIM_MAX);
    if (apa_reference_all_hot(recipe))
        return APA_STATUS_OK; /* nothing below is used */
    if ((recipe->cold_format == APA_COLD_FORMAT_INT8) != (recipe->p_scale == APA_P_SCALE_ROW_TILE))
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "p_scale: row-tile goes with cold format int8, ue4m3 and pow2 with nvfp4, and only so");
    return APA_STATUS_OK;
}
