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
constexpr int QUERY_SUM_THREADS = 128, QUERY_MEAN_STRIPES = 8;
constexpr float MOST_MEAN = 253.0f; /* of its length over the scale */

template <int D> struct QuerySum {
    static constexpr int LANES = D / 8, ROWS = QUERY_SUM_THREADS / LANES, TURNS = MEAN_BLOCK / ROWS, AHEAD = 8;
    /* In shared memory channel 8·lane + i of a row lies at i·STEP + lane, so that neither writing by rows nor reading
     * by channels meets a bank twice. */
    static constexpr int STEP = LANES + 2, PITCH = 8 * STEP + (LANES == 8 ? 8 : 0);
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

__device__ __forceinline__ uint4 row_or_zeros(const uint16_t *from, bool there)
{
    uint4 x = make_uint4(0, 0, 0, 0);
    if (there)
        x = *reinterpret_cast<const uint4 *>(from);
    return x;
}

#endif

/* A block MEAN_BLOCK positions of a query head. A thread has AHEAD rows on their way while it adds one up. */
template <int D, bool BF16>
static __global__ void __launch_bounds__(QUERY_SUM_THREADS)
    wgmma_query_sum_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    using S = QuerySum<D>;
    chain_go();
    __shared__ double sums[S::ROWS][S::PITCH];
    __shared__ uint4 least_of[S::ROWS][S::LANES], most_of[S::ROWS][S::LANES];
    __shared__ int counts[S::ROWS];
    const int blocks = (job.Sq + MEAN_BLOCK - 1) / MEAN_BLOCK, head = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const int lane = threadIdx.x % S::LANES, r = threadIdx.x / S::LANES, first = block * MEAN_BLOCK + r;
    const uint16_t *from = row_pointer<uint16_t>(job.q, head / job.Hq, head % job.Hq, first) + lane * 8;
    const int64_t step = S::ROWS * job.q.stride[2];
    uint4 raw[S::AHEAD];
#pragma unroll
    for (int turn = 0; turn < S::AHEAD; turn++)
        raw[turn] = row_or_zeros(from + turn * step, first + turn * S::ROWS < job.Sq);
    double sum[8] = {};
    uint32_t least[4], most[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        least[i] = BF16 ? 0x7f807f80u : 0x7c007c00u;
        most[i] = BF16 ? 0xff80ff80u : 0xfc00fc00u;
    }
    int good_rows = 0;
#pragma unroll
    for (int turn = 0; turn < S::TURNS; turn++) {
        const uint4 now = raw[turn % S::AHEAD];
        if (turn + S::AHEAD < S::TURNS)
            raw[turn % S::AHEAD] =
                row_or_zeros(from + (turn + S::AHEAD) * step, first + (turn + S::AHEAD) * S::ROWS < job.Sq);
        if (!row_finite<S::LANES>(are_finite<BF16>(magnitudes(now))) || first + turn * S::ROWS >= job.Sq)
            continue;
        good_rows++;
        float x[8];
        widen_8<BF16>(now, x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += small_double(x[i]);
        const uint32_t word[4] = {now.x, now.y, now.z, now.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            least[i] = min_16_2<BF16>(least[i], word[i]);
            most[i] = max_16_2<BF16>(most[i], word[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sums[r][i * S::STEP + lane] = sum[i];
    least_of[r][lane] = make_uint4(least[0], least[1], least[2], least[3]);
    most_of[r][lane] = make_uint4(most[0], most[1], most[2], most[3]);
    if (lane == 0)
        counts[r] = good_rows;
    __syncthreads();
    chain_wait();
    double *to = job.q_sum + static_cast<int64_t>(blockIdx.x) * (D + 1);
    float *range = job.q_range + static_cast<int64_t>(blockIdx.x) * 2 * D;
#pragma unroll
    for (int at = threadIdx.x; at < 2 * D; at += QUERY_SUM_THREADS) { /* D sums, then two channels at a time */
        if (at < D) {
            double all = 0.0;
#pragma unroll
            for (int row = 0; row < S::ROWS; row++)
                all += sums[row][at % 8 * S::STEP + at / 8];
            to[at] = job.negate ? 0.0 - all * FROM_SMALL : all * FROM_SMALL;
            continue;
        }
        const bool of_most = (at - D >= D / 2) != (job.negate != 0); /* of the values as they lie there */
        const int word = at % (D / 2);
        const uint32_t *column = reinterpret_cast<const uint32_t *>(of_most ? most_of : least_of) + word;
        uint32_t all = column[0];
#pragma unroll
        for (int row = 1; row < S::ROWS; row++) {
            const uint32_t other = column[row * S::LANES * 4];
            all = of_most ? max_16_2<BF16>(all, other) : min_16_2<BF16>(all, other);
        }
        *reinterpret_cast<float2 *>(range + (at - D) * 2) = widen_pair<BF16>(job.negate ? all ^ 0x80008000u : all);
    }
    if (threadIdx.x == 0) {
        int count = 0;
#pragma unroll
        for (int row = 0; row < S::ROWS; row++)
            count += counts[row];
        to[D] = static_cast<double>(count);
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
