/* INT8 with coarse scales. */
#include "cuda/warp_mma/launch.cuh"

template <int D> using Trait = Cold8<D, APA_CUDA_INT8_CODES, APA_CUDA_INT8_CODES, false>;

APA_CUDA_COLD_LAUNCHERS(int8, Trait)
