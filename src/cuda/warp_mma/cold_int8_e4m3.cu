/* INT8 scores, E4M3 probabilities and values. */
#include "cuda/warp_mma/launch.cuh"

template <int D> using Trait = Cold8<D, APA_CUDA_INT8_CODES, APA_CUDA_E4M3_CODES, false>;

APA_CUDA_COLD_LAUNCHERS(int8_e4m3, Trait)
