/* Fills in what a recipe leaves on auto, and refuses what the reference engine cannot do, with the reason. */
#include "reference/internal.h"

#include "recipe/defaults.h"

#define EARLY_ROWS_CAUSAL 256 /* FFPA's default */

/* Methods that say nothing of scores other than scale·q·k. */
static apa_status check_scores(apa_context *context, const apa_call *call)
{
    const apa_recipe *recipe = &call->recipe;
    const bool changed = apa_call_changes_scores(call), masked = call->mask.dtype != APA_DTYPE_NONE;
    if (recipe->verdict == APA_VERDICT_RULE_LAMP && (changed || call->sinks.dtype != APA_DTYPE_NONE))
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "verdict: lamp together with softcap, attn_mask, alibi_slopes or sinks: its formats hold "
                        "scale·q·k and its error bound knows nothing else");
    if (recipe->select > APA_SELECT_NONE && (recipe->select == APA_SELECT_LOCAL ? masked : changed))
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "select: together with %s: tiles are chosen and counted by position and scale·q·k alone",
                        recipe->select == APA_SELECT_LOCAL ? "attn_mask" : "softcap, attn_mask or alibi_slopes");
    return APA_STATUS_OK;
}

apa_status apa_reference_resolve(apa_context *context, apa_call *call)
{
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
    const apa_status status = check_scores(context, call);
    if (status != APA_STATUS_OK)
        return status;
    /* what auto came to may not go together: a format's default with another knob's wish */
    if (apa_recipe_check(recipe, message, sizeof message) != APA_STATUS_OK)
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "%s", message);
    return APA_STATUS_OK;
}
