/* Prep on Hopper: the mean of each query head, which `smooth_q` takes off its queries before they are coded.
 *
 * As the reference engine has it (reference/query.c): sums in double over blocks of 128 positions, in order, of the
 * queries that are finite; the blocks' sums added in order; one division, rounded once to FP32. */
#include "cuda/wgmma/prep.cuh"

constexpr int MEAN_BLOCK = 128; /* positions */
constexpr int FINITE_LANES = 8; /* threads that look at one query */

/* A block MEAN_BLOCK positions of a query head, a thread a channel. */
template <int D, bool BF16>
static __global__ void __launch_bounds__(D) wgmma_query_sum_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    chain_go();
    __shared__ uint8_t finite[MEAN_BLOCK];
    const int blocks = (job.Sq + MEAN_BLOCK - 1) / MEAN_BLOCK, head = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const int first = block * MEAN_BLOCK, n = min(MEAN_BLOCK, job.Sq - first);
    const uint16_t *from = row_pointer<uint16_t>(job.q, head / job.Hq, head % job.Hq, first);
    for (int at = threadIdx.x / FINITE_LANES; at < MEAN_BLOCK; at += D / FINITE_LANES) {
        bool good = true;
        for (int piece = threadIdx.x % FINITE_LANES; at < n && piece < D / 8; piece += FINITE_LANES)
            good = good && are_finite<BF16>(
                               magnitudes(*reinterpret_cast<const uint4 *>(from + at * job.q.stride[2] + piece * 8)));
        good = row_finite<FINITE_LANES>(good);
        if (threadIdx.x % FINITE_LANES == 0)
            finite[at] = at < n && good;
    }
    __syncthreads();
    double sum = 0.0, count = 0.0;
#pragma unroll 8
    for (int i = 0; i < MEAN_BLOCK; i++)
        if (finite[i]) {
            sum += static_cast<double>(widen<BF16>(from[i * job.q.stride[2] + threadIdx.x]));
            count += 1.0;
        }
    chain_wait();
    double *to = job.q_sum + static_cast<int64_t>(blockIdx.x) * (D + 1);
    to[threadIdx.x] = job.negate ? -sum : sum;
    if (threadIdx.x == 0)
        to[D] = count;
#endif
}

/* A block a query head. */
template <int D>
static __global__ void __launch_bounds__(D) wgmma_query_mean_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    chain_go();
    const int blocks = (job.Sq + MEAN_BLOCK - 1) / MEAN_BLOCK;
    const double *from = job.q_sum + static_cast<int64_t>(blockIdx.x) * blocks * (D + 1);
    double sum = 0.0, count = 0.0;
    chain_wait();
#pragma unroll 8
    for (int i = 0; i < blocks; i++, from += D + 1) {
        sum += from[threadIdx.x];
        count += from[D];
    }
    job.q_mean[static_cast<int64_t>(blockIdx.x) * D + threadIdx.x] =
        count == 0.0 ? 0.0f : static_cast<float>(sum / count);
#endif
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    const int64_t heads = static_cast<int64_t>(job->B) * job->Hq, blocks = (job->Sq + MEAN_BLOCK - 1) / MEAN_BLOCK;
    const cudaError_t error =
        launch_chained(chained, wgmma_query_sum_kernel<D, BF16>, heads * blocks, D, 0, stream, *job);
    return error != cudaSuccess ? error : launch_chained(1, wgmma_query_mean_kernel<D>, heads, D, 0, stream, *job);
}

int apa_wgmma_launch_query_mean(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    if (job->D == 64)
        return job->bf16 ? launch<64, true>(job, chained, stream) : launch<64, false>(job, chained, stream);
    return job->bf16 ? launch<128, true>(job, chained, stream) : launch<128, false>(job, chained, stream);
}
