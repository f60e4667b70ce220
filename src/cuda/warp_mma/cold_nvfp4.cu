/* NVFP4: block-scaled products on sm_120a, the same in software elsewhere. */
#include "cuda/warp_mma/launch.cuh"

template <int D> using Trait = ColdNvfp4<D>;

APA_CUDA_COLD_LAUNCHERS(nvfp4, Trait)
