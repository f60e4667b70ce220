/* Prep on Hopper: the mean of each query head, which `smooth_q` takes off its queries before they are coded, and the
 * scale of what is left, one for all queries of the head.
 *
 * Sums in double of the queries that are finite, over blocks of 128 positions, then over blocks; the quotient is
 * rounded once to FP32. Smallest and largest values of the channels say how large a query minus the mean can be.
 *
 * Why one scale: biases of keys join the sums of scores (tile_e4m3.cuh), and the rows of a head share them only in
 * units that they share. FP16 has to hold these sums: a bias is at most |mean|·√D·14 units of K's scale, and a scale of
 * at least |mean|/253 keeps it under 40000, beside which 14·14·128 fit. */
#include "cuda/wgmma/prep.cuh"

constexpr int MEAN_BLOCK = 128; /* positions */
constexpr int QUERY_SUM_THREADS = 256, QUERY_MEAN_STRIPES = 8;
constexpr float MOST_MEAN = 253.0f; /* of its length over the scale */

template <int D> struct QuerySum {
    static constexpr int LANES = D / 8, ROWS = QUERY_SUM_THREADS / LANES, TURNS = MEAN_BLOCK / ROWS;
};

#ifdef APA_CUDA_BULK

/* What is known of a channel. */
struct Channel {
    double sum;
    float least, most;
};

__device__ __forceinline__ void join(Channel &to, const Channel &other)
{
    to.sum += other.sum;
    to.least = fminf(to.least, other.least);
    to.most = fmaxf(to.most, other.most);
}

__device__ __forceinline__ Channel nothing()
{
    return {0.0, CUDART_INF_F, -CUDART_INF_F};
}

#endif

/* A block MEAN_BLOCK positions of a query head. */
template <int D, bool BF16>
static __global__ void __launch_bounds__(QUERY_SUM_THREADS)
    wgmma_query_sum_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    using S = QuerySum<D>;
    chain_go();
    __shared__ Channel channels[S::ROWS][D];
    __shared__ int count;
    const int blocks = (job.Sq + MEAN_BLOCK - 1) / MEAN_BLOCK, head = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const int lane = threadIdx.x % S::LANES, r = threadIdx.x / S::LANES, first = block * MEAN_BLOCK + r;
    const uint16_t *from = row_pointer<uint16_t>(job.q, head / job.Hq, head % job.Hq, first) + lane * 8;
    uint4 raw[S::TURNS];
#pragma unroll
    for (int turn = 0; turn < S::TURNS; turn++) {
        raw[turn] = make_uint4(0, 0, 0, 0);
        if (first + turn * S::ROWS < job.Sq)
            raw[turn] = *reinterpret_cast<const uint4 *>(from + turn * S::ROWS * job.q.stride[2]);
    }
    if (threadIdx.x == 0)
        count = 0;
    Channel own[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        own[i] = nothing();
    int good_rows = 0;
#pragma unroll
    for (int turn = 0; turn < S::TURNS; turn++) {
        float x[8];
        const bool finite = row_finite<S::LANES>(are_finite<BF16>(magnitudes(raw[turn])));
        widen_8<BF16>(raw[turn], x);
        if (!finite || first + turn * S::ROWS >= job.Sq)
            continue;
        good_rows++;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float value = job.negate ? -x[i] : x[i];
            join(own[i], Channel{static_cast<double>(value), value, value});
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        channels[r][lane * 8 + i] = own[i];
    __syncthreads();
    if (lane == 0)
        atomicAdd(&count, good_rows);
    __syncthreads();
    chain_wait();
    if (threadIdx.x < D) {
        Channel all = nothing();
        for (int row = 0; row < S::ROWS; row++)
            join(all, channels[row][threadIdx.x]);
        double *sum = job.q_sum + static_cast<int64_t>(blockIdx.x) * (D + 1);
        float *range = job.q_range + static_cast<int64_t>(blockIdx.x) * 2 * D;
        sum[threadIdx.x] = all.sum;
        range[threadIdx.x] = all.least;
        range[D + threadIdx.x] = all.most;
        if (threadIdx.x == 0)
            sum[D] = static_cast<double>(count);
    }
#endif
}

/* A block a query head, stripes of its blocks side by side. */
template <int D>
static __global__ void __launch_bounds__(D *QUERY_MEAN_STRIPES)
    wgmma_query_mean_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    chain_go();
    __shared__ Channel channels[QUERY_MEAN_STRIPES][D];
    __shared__ double counts[QUERY_MEAN_STRIPES];
    __shared__ float largest[D / 32], squares[D / 32];
    const int blocks = (job.Sq + MEAN_BLOCK - 1) / MEAN_BLOCK, d = threadIdx.x % D, stripe = threadIdx.x / D;
    Channel own = nothing();
    double count = 0.0;
    chain_wait();
    for (int i = stripe; i < blocks; i += QUERY_MEAN_STRIPES) {
        const int64_t at = static_cast<int64_t>(blockIdx.x) * blocks + i;
        join(own, Channel{job.q_sum[at * (D + 1) + d], job.q_range[at * 2 * D + d], job.q_range[at * 2 * D + D + d]});
        count += job.q_sum[at * (D + 1) + D];
    }
    channels[stripe][d] = own;
    if (d == 0)
        counts[stripe] = count;
    __syncthreads();
    if (threadIdx.x >= D)
        return;
    for (int i = 1; i < QUERY_MEAN_STRIPES; i++) {
        join(own, channels[i][d]);
        count += counts[i];
    }
    const float mean = count == 0.0 ? 0.0f : static_cast<float>(own.sum / count);
    float most = count == 0.0 ? 0.0f : fmaxf(own.most - mean, mean - own.least), square = mean * mean;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
        square += __shfl_xor_sync(0xffffffffu, square, m);
    }
    if (d % 32 == 0) {
        largest[d / 32] = most;
        squares[d / 32] = square;
    }
    named_barrier(1, D);
    job.q_mean[static_cast<int64_t>(blockIdx.x) * D + d] = mean;
    if (d > 0)
        return;
    for (int i = 1; i < D / 32; i++) {
        most = fmaxf(most, largest[i]);
        square += squares[i];
    }
    job.q_head_scale[blockIdx.x] = power_of_two(fmaxf(most * (1.0f / QK_LARGEST), sqrtf(square) * (1.0f / MOST_MEAN)));
#endif
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    const int64_t heads = static_cast<int64_t>(job->B) * job->Hq, blocks = (job->Sq + MEAN_BLOCK - 1) / MEAN_BLOCK;
    const cudaError_t error =
        launch_chained(chained, wgmma_query_sum_kernel<D, BF16>, heads * blocks, QUERY_SUM_THREADS, 0, stream, *job);
    return error != cudaSuccess
               ? error
               : launch_chained(1, wgmma_query_mean_kernel<D>, heads, D * QUERY_MEAN_STRIPES, 0, stream, *job);
}

extern "C" int apa_wgmma_launch_query_mean(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    if (job->D == 64)
        return job->bf16 ? launch<64, true>(job, chained, stream) : launch<64, false>(job, chained, stream);
    return job->bf16 ? launch<128, true>(job, chained, stream) : launch<128, false>(job, chained, stream);
}
