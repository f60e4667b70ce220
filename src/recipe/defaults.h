/* What "auto" means, the same for every engine. */
#ifndef APA_RECIPE_DEFAULTS_H
#define APA_RECIPE_DEFAULTS_H

#include "apa/recipe.h"

#include <stdbool.h>

/* Resolves every auto field but `skip`, which is the engine's own business, and early_rows, which asks for the mask,
 * for Sq queries, Skv keys and head dim D. */
void apa_recipe_fill_auto(apa_recipe *recipe, int64_t Sq, int64_t Skv, int64_t D);

/* The default ε of a cold format over Skv keys; see docs/verdict.md for the measurements behind it. */
double apa_recipe_default_eps(apa_cold_format cold_format, int64_t Skv, int32_t tile);

/* The largest ε that a group of a resolved recipe may have (eps_by). */
double apa_recipe_most_eps(const apa_recipe *recipe);

/* ε of a group of a resolved recipe whose rows see at most `seen` of a call's `tiles` (eps_by). */
double apa_recipe_group_eps(const apa_recipe *recipe, int64_t tiles, int64_t seen);

/* A recipe's formats, by their own knob or by cold_format; AUTO where both leave it open. */
apa_qk_format apa_recipe_qk_format(const apa_recipe *recipe);
apa_pv_format apa_recipe_pv_format(const apa_recipe *recipe);

/* The largest code of P in a format, and the S that p_scale static has by default. */
double apa_recipe_p_range(apa_pv_format format);
double apa_recipe_static_scale(apa_pv_format format);

/* Does a resolved recipe need anything beyond the plain adaptive walk: one cold format for all operands with that
 * format's own scales, wide sums, the online exact pass, the mass verdict? *knob is then the first knob that asks for
 * more, in static storage. For engines that can do no more. Knobs of the walk (tile, group, q_terms, …) are not looked
 * at. */
bool apa_recipe_beyond_walk(const apa_recipe *recipe, const char **knob);

#endif
