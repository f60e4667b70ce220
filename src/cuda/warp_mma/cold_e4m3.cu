/* E4M3 throughout. */
#include "cuda/warp_mma/launch.cuh"

template <int D> using Trait = Cold8<D, APA_CUDA_E4M3_CODES, APA_CUDA_E4M3_CODES, false>;

APA_CUDA_COLD_LAUNCHERS(e4m3, Trait)
