/* Which cold format a call runs in: the recipe and the device say. No CUDA in here. */
#ifndef APA_CUDA_TRAIT_H
#define APA_CUDA_TRAIT_H

#include "apa/recipe.h"

#include <stdbool.h>

typedef struct apa_cuda_trait {
    const char *name;            /* in kernel names */
    int32_t number;              /* APA_CUDA_INT8, … (job.h) */
    int32_t capability;          /* lowest that runs it */
    int32_t native;              /* lowest whose matrix unit has the format: below it is made of others */
    apa_cold_format cold_format; /* what resolves to it on a device where nothing else is asked for */
    apa_qk_format qk;
    apa_pv_format pv;
    apa_qk_granularity qk_granularity;
    apa_v_granularity v_granularity;
} apa_cuda_trait;

/* The row of a recipe whose autos are filled in; NULL when there is none, and *knob says which knob it fails on. */
const apa_cuda_trait *apa_cuda_trait_find(const apa_recipe *recipe, const char **knob);

/* Are there kernels of it that leave out tiles? INT8 scores alone: the error bound of E4M3's and E2M1's is so wide that
 * no score is surely far below another. */
bool apa_cuda_trait_skips(const apa_cuda_trait *trait);

/* Fills in what the recipe leaves on auto and these kernels decide: scale granularities of INT8 and E4M3,
 * where FP16 sums of the exact pass end. Call it
 * before apa_recipe_fill_auto(). */
void apa_cuda_trait_prefer(apa_recipe *recipe);

/* What recipes with cold_format=auto get on a device, and why, for people. */
const apa_cuda_trait *apa_cuda_trait_of_device(int32_t capability, const char **why);

#endif
