/* What "cuda:wgmma" takes of a call. */
#ifndef APA_CUDA_WGMMA_ACCEPT_H
#define APA_CUDA_WGMMA_ACCEPT_H

#include "core/call.h"

/* Resolves the call's recipe for the current device, or refuses by name what the kernels do not take. */
apa_status apa_wgmma_resolve(apa_context *context, apa_call *call);

/* At D 64 products are not what takes the time, and E4M3 scores cost more accuracy than there is to win
 * (docs/cuda-wgmma.md): scores there are those of the inputs, in FP16. */
bool apa_wgmma_has_exact_scores(int64_t D);

#endif
