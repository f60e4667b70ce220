/* From a trait's number to its kernels. */
#include "cuda/warp_mma/launch.cuh"

struct Launchers {
    int (*cold)(const apa_cuda_job *, cudaStream_t);
    int (*fix)(const apa_cuda_job *, cudaStream_t);
    int64_t (*shared)(int64_t, int);
};

#define APA_CUDA_LAUNCHERS(name)                                                                                       \
    {                                                                                                                  \
        apa_cuda_cold_##name, apa_cuda_fix_##name, apa_cuda_cold_shared_##name                                         \
    }

/* in the order of the numbers in job.h */
static const Launchers launchers[APA_CUDA_TRAITS] = {
    APA_CUDA_LAUNCHERS(int8_fine), APA_CUDA_LAUNCHERS(int8),  APA_CUDA_LAUNCHERS(int8_e4m3),
    APA_CUDA_LAUNCHERS(e4m3),      APA_CUDA_LAUNCHERS(nvfp4),
};

extern "C" int apa_cuda_launch_cold(const apa_cuda_job *job, void *stream)
{
    return launchers[job->trait].cold(job, static_cast<cudaStream_t>(stream));
}

extern "C" int apa_cuda_launch_fix(const apa_cuda_job *job, void *stream)
{
    return launchers[job->trait].fix(job, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t apa_cuda_cold_shared_bytes(int32_t trait, int64_t D, int32_t capability)
{
    return launchers[trait].shared(D, capability);
}
