/* INT8 with scales per key, and per tile and channel of V. */
#include "cuda/warp_mma/launch.cuh"

template <int D> using Trait = Cold8<D, APA_CUDA_INT8_CODES, APA_CUDA_INT8_CODES, true>;

APA_CUDA_COLD_LAUNCHERS(int8_fine, Trait)
