/* A chain of kernels: each may be launched, and set itself up, while the one before it ends (programmatic dependent
 * launch, sm_90 and later; on older devices and in plain launches all of this is nothing).
 *
 *     chain_go()     the next kernel may be launched once every block of this one has said so or is gone
 *     chain_wait()   goes on when the kernel before has ended and all that it wrote can be seen
 *
 * chain_wait() waits for one kernel, the one before in the stream, and that has to be enough. It is, because a chain
 * keeps to these rules:
 *   1. The first kernel of a call is launched plainly: it begins when everything before it in the stream has ended, and
 *      so the call's inputs are there for all of its kernels, before they wait.
 *   2. A block touches what other kernels of the call write, or writes what they read, after chain_wait() alone.
 *   3. Every block waits before it ends, also one that has nothing to do. A kernel that has ended has then waited, so
 * the one before it had ended, and so had all before that.
 *   4. Nothing but kernels lies between two of a chain: after a copy, a fill or an event the next launch is plain.
 * chain_go() stands at a kernel's beginning. Blocks of the next kernel take only what room those of this one leave, for
 * these are all running by then; that they stand by in the third kernel while the first one runs changes nothing: they
 * wait for the second. A captured stream keeps the chain as edges of the graph. */
#ifndef APA_CUDA_CHAIN_CUH
#define APA_CUDA_CHAIN_CUH

#include <cuda_runtime.h>

__device__ __forceinline__ void chain_go()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void chain_wait()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* `chained`: the launch before it in the stream was a kernel of this chain. */
template <typename... Parameters, typename... Arguments>
static cudaError_t launch_chained(int chained, void (*kernel)(Parameters...), int64_t blocks, int threads, int shared,
                                  cudaStream_t stream, const Arguments &...arguments)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = chained != 0 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

#endif
