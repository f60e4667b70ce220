/* The CUDA engines, one a kernel family, for tensors in host memory. */
#ifndef APA_CUDA_ENGINE_H
#define APA_CUDA_ENGINE_H

#include "core/engine.h"

extern const apa_engine apa_cuda_warp_engine, apa_cuda_wgmma_engine;

#endif
