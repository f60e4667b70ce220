/* What "auto" means, the same for every engine. */
#ifndef APA_RECIPE_DEFAULTS_H
#define APA_RECIPE_DEFAULTS_H

#include "apa/recipe.h"

/* Resolves every auto field but `skip`, which is the engine's own business, for Sq queries, Skv keys and head dim D. */
void apa_recipe_fill_auto(apa_recipe *recipe, int64_t Sq, int64_t Skv, int64_t D);

/* The default ε of a cold format over Skv keys; see docs/verdict.md for the measurements behind it. */
double apa_recipe_default_eps(apa_cold_format cold_format, int64_t Skv, int32_t tile);

#endif
