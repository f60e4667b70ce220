/* Prep: statistics over K and V, then the codes of the trait.
 *
 *   sums of K a tile ∥ maxima of V a channel → (8 bits) means ∥ V codes → K codes
 *                                            → (NVFP4) means → maximum of K → head scales → V codes ∥ K codes */
#include "cuda/warp_mma/prep.cuh"

template <int D> constexpr int SUM_THREADS = D < 128 ? 128 : D;

/* Sum over a tile's finite keys, in order, in double; element D counts them. */
template <int D> __device__ __forceinline__ void sum_of_tile(const apa_cuda_job &job, int block)
{
    constexpr int THREADS = SUM_THREADS<D>;
    __shared__ __align__(16) uint16_t rows[APA_CUDA_TILE * D];
    __shared__ int bad[APA_CUDA_TILE];
    const int head = block / job.tiles, tile = block % job.tiles, d = threadIdx.x;
    stage_rows<D, THREADS>(rows, bad, job.k, head / job.Hkv, head % job.Hkv, tile, job.Skv, job.bf16);
    double *to = job.tile_sum + static_cast<int64_t>(block) * (D + 1);
    if (d < D) {
        double sum = 0.0;
#pragma unroll 8
        for (int key = 0; key < APA_CUDA_TILE; key++)
            if (bad[key] == 0)
                sum += static_cast<double>(widen(rows[key * D + d], job.bf16));
        to[d] = sum;
    }
    if (d == 0) {
        int n = 0;
        for (int key = 0; key < APA_CUDA_TILE; key++)
            n += bad[key] == 0;
        to[D] = n;
    }
}

/* Largest |v| of each channel over a tile's finite keys, into the head's. Bits of floats that are not negative rise
 * with them, and a maximum does not depend on the order. */
template <int D> __device__ __forceinline__ void maxima_of_tile(const apa_cuda_job &job, int block)
{
    constexpr int THREADS = SUM_THREADS<D>, CHUNKS = D / 8;
    constexpr uint32_t ROW = CHUNKS == 32 ? 0xffffffffu : (1u << CHUNKS % 32) - 1;
    __shared__ int most[D];
    for (int d = threadIdx.x; d < D; d += THREADS)
        most[d] = 0;
    __syncthreads();
    const int head = block / job.tiles, tile = block % job.tiles, chunk = threadIdx.x % CHUNKS;
    float amax[8] = {};
    for (int r = threadIdx.x / CHUNKS; r < APA_CUDA_TILE; r += THREADS / CHUNKS) {
        const int64_t key = static_cast<int64_t>(tile) * APA_CUDA_TILE + r;
        uint16_t raw[8] = {};
        if (key < job.Skv)
            load_elements<8>(row_pointer<uint16_t>(job.v, head / job.Hkv, head % job.Hkv, key) + chunk * 8, raw);
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 8; i++)
            finite = finite && is_finite_16(raw[i], job.bf16);
        if ((__ballot_sync(0xffffffffu, finite) >> (threadIdx.x & 31 & ~(CHUNKS - 1)) & ROW) == ROW)
#pragma unroll
            for (int i = 0; i < 8; i++)
                amax[i] = fmaxf(amax[i], fabsf(widen(raw[i], job.bf16)));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        atomicMax(&most[chunk * 8 + i], __float_as_int(amax[i]));
    __syncthreads();
    int *to = reinterpret_cast<int *>(job.v_amax) + static_cast<int64_t>(head) * D;
    for (int d = threadIdx.x; d < D; d += THREADS)
        if (most[d] > *static_cast<volatile int *>(to + d))
            atomicMax(to + d, most[d]);
}

/* sums: blocks that sum K; the others find the maxima of V. */
template <int D>
static __global__ void __launch_bounds__(SUM_THREADS<D>)
    statistics_kernel(const __grid_constant__ apa_cuda_job job, int sums)
{
    if (static_cast<int>(blockIdx.x) < sums)
        sum_of_tile<D>(job, blockIdx.x);
    else
        maxima_of_tile<D>(job, blockIdx.x - sums);
}

template <int D> static int launch_statistics(const apa_cuda_job *job, cudaStream_t stream)
{
    const int heads = job->B * job->Hkv, tiles = heads * job->tiles;
    const int sums = job->smooth && !job->mean_given ? tiles : 0, maxima = job->trait == APA_CUDA_INT8_FINE ? 0 : tiles;
    cudaError_t error = cudaSuccess;
    if (!job->smooth || !job->mean_given)
        error = cudaMemsetAsync(job->k_mean, 0, sizeof(float) * static_cast<size_t>(heads) * D, stream);
    if (error == cudaSuccess && job->first_tile == 0) /* it holds the maximum of the tiles that are there */
        error = cudaMemsetAsync(job->k_scale_max, 0, sizeof(float) * static_cast<size_t>(heads), stream);
    if (error == cudaSuccess)
        error = cudaMemsetAsync(job->k_amax, 0, sizeof(float) * static_cast<size_t>(heads), stream);
    if (error == cudaSuccess && maxima > 0)
        error = cudaMemsetAsync(job->v_amax, 0, sizeof(float) * static_cast<size_t>(heads) * D, stream);
    if (error != cudaSuccess || sums + maxima == 0)
        return error;
    statistics_kernel<D><<<static_cast<unsigned>(sums + maxima), SUM_THREADS<D>, 0, stream>>>(*job, sums);
    return cudaGetLastError();
}

extern "C" int apa_cuda_launch_prep_keys(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    const int error = job->statistics_given ? cudaSuccess
                      : job->D == 64        ? launch_statistics<64>(job, stream)
                      : job->D == 128       ? launch_statistics<128>(job, stream)
                                            : launch_statistics<256>(job, stream);
    if (error != cudaSuccess || job->tiles == 0)
        return error;
    return job->trait == APA_CUDA_NVFP4 ? apa_cuda_keys_nvfp4(job, stream) : apa_cuda_keys_8(job, stream);
}

extern "C" int apa_cuda_launch_prep_queries(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    return job->trait == APA_CUDA_NVFP4 ? apa_cuda_queries_nvfp4(job, stream) : apa_cuda_queries_8(job, stream);
}
