/* Pages of K and V to flat tensors: 16 bytes a thread and step, neighbouring threads neighbouring pieces of a row, so
 * that both sides are read and written whole lines at a time. What is read is the table as it stands when the kernel
 * runs, so a captured graph follows the pages from replay to replay. */
#include "cuda/gather.h"

#include <cuda_runtime.h>

constexpr int GATHER_THREADS = 256;
constexpr int AT_ONCE = 4; /* loads under way in a thread */
constexpr int MOST_ROWS_OF_BLOCKS = 65535;
constexpr uint32_t TWO_NANS = 0x7fff7fffu; /* of f16 and of bf16 alike */

static __global__ void __launch_bounds__(GATHER_THREADS)
    gather_kernel(const __grid_constant__ apa_cuda_pages pages, int piece_bits)
{
    const apa_cuda_tensor &from = pages.from[blockIdx.z];
    uint4 *to = static_cast<uint4 *>(pages.to[blockIdx.z]);
    const int64_t first = static_cast<int64_t>(blockIdx.x) * GATHER_THREADS * AT_ONCE + threadIdx.x;
    const int64_t pieces = static_cast<int64_t>(pages.Skv) << piece_bits;
    for (int h = blockIdx.y; h < pages.Hkv; h += gridDim.y) {
        uint4 value[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int64_t at = first + i * GATHER_THREADS;
            value[i] = make_uint4(TWO_NANS, TWO_NANS, TWO_NANS, TWO_NANS);
            if (at >= pieces)
                continue;
            const int key = static_cast<int>(at >> piece_bits), piece = static_cast<int>(at & ((1 << piece_bits) - 1));
            const int64_t page = pages.table[key / pages.page_size];
            if (page >= 0 && page < pages.pages)
                value[i] =
                    reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(from.data) + page * from.stride[0] +
                                                    h * from.stride[1] + key % pages.page_size * from.stride[2])[piece];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * GATHER_THREADS < pieces)
                to[h * pieces + first + i * GATHER_THREADS] = value[i];
    }
}

extern "C" int apa_cuda_launch_gather(const apa_cuda_pages *pages, void *stream)
{
    int piece_bits = 0;
    while (8 << piece_bits < pages->D)
        piece_bits++;
    const int64_t pieces = static_cast<int64_t>(pages->Skv) << piece_bits, block = GATHER_THREADS * AT_ONCE;
    if (pieces == 0)
        return cudaSuccess;
    const dim3 grid(static_cast<unsigned>((pieces + block - 1) / block),
                    static_cast<unsigned>(pages->Hkv < MOST_ROWS_OF_BLOCKS ? pages->Hkv : MOST_ROWS_OF_BLOCKS), 2);
    gather_kernel<<<grid, GATHER_THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*pages, piece_bits);
    return cudaGetLastError();
}
