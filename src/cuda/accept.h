/* Which recipes the warp-MMA kernels run. */
#ifndef APA_CUDA_ACCEPT_H
#define APA_CUDA_ACCEPT_H

#include "apa/recipe.h"
#include "core/context_internal.h"

#include <stdbool.h>

/* True when every tile is hot, so that the exact kernel does all. */
bool apa_cuda_all_hot(const apa_recipe *recipe);

/* Refuses what the kernels cannot do, with the knob, what was found and what they take. The recipe has nothing on auto.
 * Errors: UNSUPPORTED. */
apa_status apa_cuda_accept(apa_context *context, const apa_recipe *recipe);

#endif
