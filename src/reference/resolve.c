/* Fills in what a recipe leaves on auto, and refuses what the reference engine cannot do, with the reason. */
#include "reference/internal.h"

#include "recipe/defaults.h"

#define EARLY_ROWS_CAUSAL 256 /* FFPA's default */

apa_status apa_reference_resolve(apa_context *context, apa_call *call)
{
    if (apa_call_changes_scores(call) || call->sinks.dtype != APA_DTYPE_NONE || call->pages != NULL)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "softcap, attn_mask, alibi_slopes, sinks or block_table: no engine takes them yet");
    apa_recipe *recipe = &call->recipe;
    char message[256];
    apa_recipe_fill_auto(recipe, call->Sq, call->Skv, call->D);
    if (recipe->skip == APA_TOGGLE_AUTO)
        recipe->skip = APA_TOGGLE_OFF;
    if (recipe->early_rows < 0)
        recipe->early_rows = call->causal ? EARLY_ROWS_CAUSAL : 0;
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
    /* what auto came to may not go together: a format's default with another knob's wish */
    if (apa_recipe_check(recipe, message, sizeof message) != APA_STATUS_OK)
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "%s", message);
    return APA_STATUS_OK;
}
