/* Prep on Hopper: the mean of K, and with `smooth_q` that of each query head, which comes off its queries before they
 * are coded, and the scale of what is left, one for all queries of the head. Two kernels, sums and means, in which
 * blocks of both kinds stand side by side: neither kind hangs on the other, and either may be missing.
 *
 * K: sums over the finite keys of every smooth_stride-th tile, SUM_TILES of them a block: float over a thread's few
 * keys, then double.
 * Queries: sums in double of those that are finite; the quotient is rounded once to FP32. Smallest and largest values
 * of the channels say how large a query minus the mean can be.
 *
 * Why one scale: biases of keys join the sums of scores (tile_e4m3.cuh), and the rows of a head share them only in
 * units that they share. FP16 has to hold these sums: a bias is at most |mean|·√D·14 units of K's scale, and a scale of
 * at least |mean|/253 keeps it under 40000, beside which 14·14·128 fit. */
#include "cuda/wgmma/prep.cuh"

constexpr int SUM_TILES = 4; /* tiles whose keys one block adds up */
constexpr int SUM_THREADS = 256, STRIPES = 8;
constexpr int MOST_PARTS = 64;      /* of a query head: beyond, blocks take more queries each */
constexpr float MOST_MEAN = 253.0f; /* of its length over the scale */

/* FP16 codes (D 64) need no mean off their queries: no recipe for them has `smooth_q`. */
template <int D> constexpr bool HAS_QUERY_MEANS = D == 128;

/* A thread has eight channels of every ROWS-th row, and AHEAD rows on their way at once, a round of the block's. */
template <int D> struct Sum {
    static constexpr int LANES = D / 8, ROWS = SUM_THREADS / LANES, AHEAD = 8, ROUND = ROWS * AHEAD;
    static constexpr int KEYS = SUM_TILES * APA_CUDA_TILE;
    /* In shared memory channel 8·lane + i of a row lies at i·STEP + lane, so that neither writing by rows nor reading
     * by channels meets a bank twice. */
    static constexpr int STEP = LANES + 2, PITCH = 8 * STEP + (LANES == 8 ? 8 : 0);
    static_assert(KEYS % ROUND == 0, "whole rounds");
};

/* Parts of a KV head's keys. */
static __host__ __device__ __forceinline__ int sum_parts(int tiles, int stride)
{
    return ((tiles + stride - 1) / stride + SUM_TILES - 1) / SUM_TILES;
}

static __host__ __device__ __forceinline__ bool sums_keys(const apa_cuda_job &job)
{
    return job.smooth && !job.mean_given;
}

/* Queries of a part: whole rounds, at least 128. Parts of a query head: no more than there are blocks of 128. */
template <int D> static __host__ __device__ __forceinline__ int queries_of_part(int Sq)
{
    constexpr int ROUND = Sum<D>::ROUND, MOST = ROUND * MOST_PARTS;
    static_assert(ROUND >= 128, "q_sum and q_range have room for a part per 128 queries");
    return (Sq + MOST - 1) / MOST * ROUND;
}

template <int D> static __host__ __device__ __forceinline__ int query_parts(int Sq)
{
    return (Sq + queries_of_part<D>(Sq) - 1) / queries_of_part<D>(Sq);
}

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

/* Part `number` of all KV heads. Element D counts the keys. */
template <int D, bool BF16> __device__ __forceinline__ void sum_keys(const apa_cuda_job &job, int number)
{
    using S = Sum<D>;
    __shared__ float sums[S::ROWS][D];
    __shared__ int counts[S::ROWS];
    const int parts = sum_parts(job.tiles, job.smooth_stride), head = number / parts, part = number % parts;
    if (threadIdx.x == 0 && part == 0)
        job.k_scale_max[head] = 0.0f; /* the pair kernel raises it */
    const int lane = threadIdx.x % S::LANES, r = threadIdx.x / S::LANES;
    /* a round's rows lie in ROUND_TILES tiles of the sample, each of which is TILE_TURNS turns */
    constexpr int TILE_TURNS = APA_CUDA_TILE / S::ROWS, ROUND_TILES = S::AHEAD / TILE_TURNS;
    const int tile_keys = job.smooth_stride * APA_CUDA_TILE;
    const int64_t first = static_cast<int64_t>(part) * SUM_TILES * tile_keys + r;
    const int64_t step = S::ROWS * job.k.stride[2], tile_step = tile_keys * job.k.stride[2];
    const uint16_t *from = row_pointer<uint16_t>(job.k, head / job.Hkv, head % job.Hkv, first) + lane * 8;
    int left = static_cast<int>(job.Skv - first); /* keys from the thread's own at the beginning of a round on */
    float sum[8] = {};
    int count = 0;
#pragma unroll 1
    for (int round = 0; round < S::KEYS; round += S::ROUND) {
        uint4 raw[S::AHEAD];
#pragma unroll
        for (int turn = 0; turn < S::AHEAD; turn++)
            raw[turn] = row_or_zeros(from + turn / TILE_TURNS * tile_step + turn % TILE_TURNS * step,
                                     turn / TILE_TURNS * tile_keys + turn % TILE_TURNS * S::ROWS < left);
#pragma unroll
        for (int turn = 0; turn < S::AHEAD; turn++) {
            const bool there = turn / TILE_TURNS * tile_keys + turn % TILE_TURNS * S::ROWS < left;
            if (!row_finite<S::LANES>(are_finite<BF16>(magnitudes(raw[turn]))) || !there)
                continue;
            float value[8];
            widen_8<BF16>(raw[turn], value);
            count++;
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum[i] += value[i];
        }
        from += ROUND_TILES * tile_step;
        left -= ROUND_TILES * tile_keys;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sums[r][lane * 8 + i] = sum[i];
    if (lane == 0)
        counts[r] = count;
    __syncthreads();
    double *to = job.tile_sum + static_cast<int64_t>(number) * (D + 1);
    for (int d = threadIdx.x; d <= D; d += SUM_THREADS) {
        double total = 0.0;
        for (int i = 0; i < S::ROWS; i++)
            total += d == D ? static_cast<double>(counts[i]) : static_cast<double>(sums[i][d]);
        to[d] = total;
    }
}

/* Part `number` of all query heads. */
template <int D, bool BF16> __device__ __forceinline__ void sum_queries(const apa_cuda_job &job, int number)
{
    using S = Sum<D>;
    __shared__ double sums[S::ROWS][S::PITCH];
    __shared__ uint4 least_of[S::ROWS][S::LANES], most_of[S::ROWS][S::LANES];
    __shared__ int counts[S::ROWS];
    const int parts = query_parts<D>(job.Sq), queries = queries_of_part<D>(job.Sq), head = number / parts,
              begin = number % parts * queries;
    const int lane = threadIdx.x % S::LANES, r = threadIdx.x / S::LANES;
    const uint16_t *from = row_pointer<uint16_t>(job.q, head / job.Hq, head % job.Hq, begin + r) + lane * 8;
    const int64_t step = S::ROWS * job.q.stride[2];
    int left = min(queries, job.Sq - begin) - r; /* rows from the thread's own at the beginning of a round on */
    uint4 raw[S::AHEAD];
#pragma unroll
    for (int turn = 0; turn < S::AHEAD; turn++)
        raw[turn] = row_or_zeros(from + turn * step, turn * S::ROWS < left);
    double sum[8] = {};
    uint32_t least[4], most[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        least[i] = BF16 ? 0x7f807f80u : 0x7c007c00u;
        most[i] = BF16 ? 0xff80ff80u : 0xfc00fc00u;
    }
    int good_rows = 0;
#pragma unroll 1
    for (int round = 0; round < queries; round += S::ROUND) { /* the same ones in all threads */
        from += S::AHEAD * step;
#pragma unroll
        for (int turn = 0; turn < S::AHEAD; turn++) {
            const uint4 now = raw[turn];
            raw[turn] = row_or_zeros(from + turn * step, S::ROUND + turn * S::ROWS < left);
            if (!row_finite<S::LANES>(are_finite<BF16>(magnitudes(now))) || turn * S::ROWS >= left)
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
        left -= S::ROUND;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sums[r][i * S::STEP + lane] = sum[i];
    least_of[r][lane] = make_uint4(least[0], least[1], least[2], least[3]);
    most_of[r][lane] = make_uint4(most[0], most[1], most[2], most[3]);
    if (lane == 0)
        counts[r] = good_rows;
    __syncthreads();
    double *to = job.q_sum + static_cast<int64_t>(number) * (D + 1);
    float *range = job.q_range + static_cast<int64_t>(number) * 2 * D;
#pragma unroll
    for (int at = threadIdx.x; at < 2 * D; at += SUM_THREADS) { /* D sums, then two channels at a time */
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
}

/* The parts' sums → the mean of a KV head. */
template <int D> __device__ __forceinline__ void mean_of_keys(const apa_cuda_job &job, int head)
{
    __shared__ double sums[STRIPES][D], counts[STRIPES];
    const int parts = sum_parts(job.tiles, job.smooth_stride), d = threadIdx.x % D, stripe = threadIdx.x / D;
    const double *from = job.tile_sum + static_cast<int64_t>(head) * parts * (D + 1);
    double sum = 0.0, count = 0.0;
#pragma unroll 8
    for (int part = stripe; part < parts; part += STRIPES) {
        sum += from[static_cast<int64_t>(part) * (D + 1) + d];
        if (d == 0)
            count += from[static_cast<int64_t>(part) * (D + 1) + D];
    }
    sums[stripe][d] = sum;
    if (d == 0)
        counts[stripe] = count;
    __syncthreads();
    if (stripe != 0)
        return;
    double keys = counts[0];
#pragma unroll
    for (int i = 1; i < STRIPES; i++) {
        sum += sums[i][d];
        keys += counts[i];
    }
    job.k_mean[head * D + d] = keys > 0.0 ? static_cast<float>(sum / keys) : 0.0f;
}

/* The same of a query head, and its scale. */
template <int D> __device__ __forceinline__ void mean_of_queries(const apa_cuda_job &job, int head)
{
    __shared__ Channel channels[STRIPES][D];
    __shared__ double counts[STRIPES];
    __shared__ float largest[D / 32], squares[D / 32];
    const int parts = query_parts<D>(job.Sq), d = threadIdx.x % D, stripe = threadIdx.x / D;
    const double *sums = job.q_sum + static_cast<int64_t>(head) * parts * (D + 1);
    const float *ranges = job.q_range + static_cast<int64_t>(head) * parts * 2 * D;
    Channel own = nothing();
    double count = 0.0;
#pragma unroll 8
    for (int part = stripe; part < parts; part += STRIPES) {
        join(own, Channel{sums[part * (D + 1) + d], ranges[part * 2 * D + d], ranges[part * 2 * D + D + d]});
        if (d == 0)
            count += sums[part * (D + 1) + D];
    }
    static_assert(MOST_PARTS * 2 * D < 1 << 20, "a head's numbers");
    channels[stripe][d] = own;
    if (d == 0)
        counts[stripe] = count;
    __syncthreads();
    if (threadIdx.x >= D)
        return;
    count = counts[0];
#pragma unroll
    for (int i = 1; i < STRIPES; i++) {
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
    job.q_mean[static_cast<int64_t>(head) * D + d] = mean;
    if (d > 0)
        return;
    for (int i = 1; i < D / 32; i++) {
        most = fmaxf(most, largest[i]);
        square += squares[i];
    }
    job.q_head_scale[head] = power_of_two(fmaxf(most * (1.0f / qk_largest<D>()), sqrtf(square) * (1.0f / MOST_MEAN)));
}

#endif

/* K's blocks come first: they are as long as two of 128 queries. This kernel is the first of a call. */
template <int D, bool BF16>
static __global__ void __launch_bounds__(SUM_THREADS, 3) wgmma_sum_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    chain_go();
    const int of_keys = sums_keys(job) ? job.B * job.Hkv * sum_parts(job.tiles, job.smooth_stride) : 0,
              block = static_cast<int>(blockIdx.x);
    if (block < of_keys)
        sum_keys<D, BF16>(job, block);
    else if constexpr (HAS_QUERY_MEANS<D>)
        sum_queries<D, BF16>(job, block - of_keys);
#endif
}

/* A block a head, STRIPES threads a channel. */
template <int D>
static __global__ void __launch_bounds__(D *STRIPES) wgmma_mean_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    chain_go();
    chain_wait();
    const int of_keys = sums_keys(job) ? job.B * job.Hkv : 0, block = static_cast<int>(blockIdx.x);
    if (block < of_keys)
        mean_of_keys<D>(job, block);
    else if constexpr (HAS_QUERY_MEANS<D>)
        mean_of_queries<D>(job, block - of_keys);
#endif
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, cudaStream_t stream)
{
    const int64_t key_heads = sums_keys(*job) ? static_cast<int64_t>(job->B) * job->Hkv : 0,
                  query_heads = HAS_QUERY_MEANS<D> && job->smooth_q ? static_cast<int64_t>(job->B) * job->Hq : 0;
    int64_t blocks = query_heads * query_parts<D>(job->Sq);
    if (key_heads > 0)
        blocks += key_heads * sum_parts(job->tiles, job->smooth_stride);
    if (blocks == 0)
        return cudaSuccess;
    const cudaError_t error = launch_chained(0, wgmma_sum_kernel<D, BF16>, blocks, SUM_THREADS, 0, stream, *job);
    return error != cudaSuccess
               ? error
               : launch_chained(1, wgmma_mean_kernel<D>, key_heads + query_heads, D * STRIPES, 0, stream, *job);
}

extern "C" int64_t apa_wgmma_sum_parts(const apa_cuda_job *job)
{
    return sum_parts(job->tiles, job->smooth_stride);
}

extern "C" int apa_wgmma_launch_means(const apa_cuda_job *job, cudaStream_t stream)
{
    if (job->D == 64)
        return job->bf16 ? launch<64, true>(job, stream) : launch<64, false>(job, stream);
    return job->bf16 ? launch<128, true>(job, stream) : launch<128, false>(job, stream);
}
