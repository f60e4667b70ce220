/* The table of cold formats. */
#include "cuda/trait.h"

#include "cuda/job.h"

#include <stddef.h>

#define ROW APA_QK_GRANULARITY_ROW
#define THREAD APA_QK_GRANULARITY_THREAD
#define TILE_CHANNEL APA_V_GRANULARITY_TILE_CHANNEL
#define CHANNEL APA_V_GRANULARITY_CHANNEL

/* name, number, capability, native, cold_format, qk, pv, granularity of Q and K, of V */
static const apa_cuda_trait traits[] = {
    {"i8", APA_CUDA_INT8, 80, 80, APA_COLD_FORMAT_INT8, APA_QK_FORMAT_INT8, APA_PV_FORMAT_INT8, THREAD, CHANNEL},
    {"i8-fine", APA_CUDA_INT8_FINE, 80, 80, APA_COLD_FORMAT_INT8, APA_QK_FORMAT_INT8, APA_PV_FORMAT_INT8, ROW,
     TILE_CHANNEL},
    {"i8/e4m3", APA_CUDA_INT8_E4M3, 89, 89, APA_COLD_FORMAT_INT8, APA_QK_FORMAT_INT8, APA_PV_FORMAT_E4M3, THREAD,
     CHANNEL},
    {"e4m3", APA_CUDA_E4M3, 89, 89, APA_COLD_FORMAT_E4M3, APA_QK_FORMAT_E4M3, APA_PV_FORMAT_E4M3, THREAD, CHANNEL},
    {"nvfp4", APA_CUDA_NVFP4, 90, 120, APA_COLD_FORMAT_NVFP4, APA_QK_FORMAT_NVFP4, APA_PV_FORMAT_NVFP4,
     APA_QK_GRANULARITY_16, APA_V_GRANULARITY_16},
};

#define COUNT (sizeof traits / sizeof traits[0])

const apa_cuda_trait *apa_cuda_trait_find(const apa_recipe *recipe, const char **knob)
{
    bool qk = false, pv = false, k_scales = false;
    for (size_t i = 0; i < COUNT; i++) {
        const apa_cuda_trait *row = &traits[i];
        if (row->qk != recipe->qk_format)
            continue;
        qk = true;
        if (row->pv != recipe->pv_format)
            continue;
        pv = true;
        if (row->qk_granularity != recipe->qk_scale_granularity)
            continue;
        k_scales = true;
        if (row->v_granularity == recipe->v_scale_granularity)
            return row;
    }
    *knob = !qk ? "qk_format" : !pv ? "pv_format" : !k_scales ? "qk_scale_granularity" : "v_scale_granularity";
    return NULL;
}

bool apa_cuda_trait_skips(const apa_cuda_trait *trait)
{
    return trait->number == APA_CUDA_INT8 || trait->number == APA_CUDA_INT8_E4M3;
}

void apa_cuda_trait_prefer(apa_recipe *recipe)
{
    if (recipe->exact_accum == APA_ACCUMULATOR_F16 && recipe->exact_flush < 0)
        recipe->exact_flush = APA_CUDA_TILE;
    const bool fp4 = recipe->cold_format == APA_COLD_FORMAT_NVFP4 || recipe->cold_format == APA_COLD_FORMAT_MXFP4;
    const bool qk_8 = recipe->qk_format == APA_QK_FORMAT_INT8 || recipe->qk_format == APA_QK_FORMAT_E4M3 ||
                      (recipe->qk_format == APA_QK_FORMAT_AUTO && !fp4);
    const bool pv_8 = recipe->pv_format == APA_PV_FORMAT_INT8 || recipe->pv_format == APA_PV_FORMAT_E4M3 ||
                      (recipe->pv_format == APA_PV_FORMAT_AUTO && !fp4);
    if (!qk_8 || !pv_8)
        return;
    /* one of the two given: the other goes with it */
    if (recipe->qk_scale_granularity == APA_QK_GRANULARITY_AUTO)
        recipe->qk_scale_granularity = recipe->v_scale_granularity == TILE_CHANNEL ? ROW : THREAD;
    if (recipe->v_scale_granularity == APA_V_GRANULARITY_AUTO)
        recipe->v_scale_granularity = recipe->qk_scale_granularity == ROW ? TILE_CHANNEL : CHANNEL;
}

const apa_cuda_trait *apa_cuda_trait_of_device(int32_t capability, const char **why)
{
    *why = capability >= 120
               ? "by estimate as fast as nvfp4 and more accurate; cold_format=nvfp4 (block-scaled products) and "
                 "e4m3 run too, neither was ever run on such a device"
           : capability >= 90 ? "its mma.sync is twice as fast as FP16's; E4M3's is made of FP16 products here"
           : capability >= 89 ? "as fast as E4M3 and more accurate; cold_format=e4m3 and pv_format=e4m3 run too"
                              : "the cheapest matrix product that the device has";
    return &traits[0];
}
