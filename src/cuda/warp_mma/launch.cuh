/* Launchers of one trait: each file cold_*.cu is one instantiation, compiled by itself. launch.cu picks among them. */
#ifndef APA_CUDA_LAUNCH_CUH
#define APA_CUDA_LAUNCH_CUH

#include "cuda/warp_mma/fix.cuh"

/* What a block of pass 1 or of the corrections needs, whichever is more. */
template <typename T> constexpr int64_t shared_of(int capability)
{
    return ColdShape<T>::shared_bytes(capability) > FixShape<T>::SHARED ? ColdShape<T>::shared_bytes(capability)
                                                                        : FixShape<T>::SHARED;
}

#define APA_CUDA_COLD_LAUNCHERS(name, TRAIT)                                                                           \
    extern "C" int apa_cuda_cold_##name(const apa_cuda_job *job, cudaStream_t stream)                                  \
    {                                                                                                                  \
        return job->D == 64    ? launch_cold<TRAIT<64>>(job, stream)                                                   \
               : job->D == 128 ? launch_cold<TRAIT<128>>(job, stream)                                                  \
                               : launch_cold<TRAIT<256>>(job, stream);                                                 \
    }                                                                                                                  \
    extern "C" int apa_cuda_fix_##name(const apa_cuda_job *job, cudaStream_t stream)                                   \
    {                                                                                                                  \
        return job->D == 64    ? launch_fix<TRAIT<64>>(job, stream)                                                    \
               : job->D == 128 ? launch_fix<TRAIT<128>>(job, stream)                                                   \
                               : launch_fix<TRAIT<256>>(job, stream);                                                  \
    }                                                                                                                  \
    extern "C" int64_t apa_cuda_cold_shared_##name(int64_t D, int capability)                                          \
    {                                                                                                                  \
        return D == 64    ? shared_of<TRAIT<64>>(capability)                                                           \
               : D == 128 ? shared_of<TRAIT<128>>(capability)                                                          \
                          : shared_of<TRAIT<256>>(capability);                                                         \
    }

#define APA_CUDA_COLD_DECLARE(name)                                                                                    \
    extern "C" int apa_cuda_cold_##name(const apa_cuda_job *job, cudaStream_t stream);                                 \
    extern "C" int apa_cuda_fix_##name(const apa_cuda_job *job, cudaStream_t stream);                                  \
    extern "C" int64_t apa_cuda_cold_shared_##name(int64_t D, int capability);

APA_CUDA_COLD_DECLARE(int8)
APA_CUDA_COLD_DECLARE(int8_fine)
APA_CUDA_COLD_DECLARE(int8_e4m3)
APA_CUDA_COLD_DECLARE(e4m3)
APA_CUDA_COLD_DECLARE(nvfp4)

#endif
