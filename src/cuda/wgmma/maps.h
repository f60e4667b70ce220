/* Tensor maps: how the tensor copy engine of sm_90 finds its way in K and V. */
#ifndef APA_CUDA_WGMMA_MAPS_H
#define APA_CUDA_WGMMA_MAPS_H

#include "apa/tensor.h"
#include "cuda/wgmma/launch.h"

/* Is the layout one that a map can describe (strides not negative and below 2^40 bytes, no stride of 0 over an axis)?
 * NULL, or what is wrong. */
const char *apa_wgmma_map_objection(const apa_tensor *x);

/* Maps of the job's K and V with boxes of 64 channels × `keys`. Returns 0 or a cudaError_t. */
int apa_wgmma_make_maps(const apa_cuda_job *job, uint32_t keys, apa_wgmma_maps *maps);

#endif
