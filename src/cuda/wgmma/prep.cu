/* Prep on Hopper: the mean of K, and queries in E4M3 (order in tile_e4m3.cuh); pairs of tiles are made in pairs.cu.
 *
 * A query's scale is the smallest power of two that keeps its largest value in range. */
#include "cuda/wgmma/prep.cuh"

constexpr int SUM_TILES = 4; /* tiles whose keys one block adds up */
constexpr int PREP_THREADS = 256;
constexpr int MEAN_STRIPES = 8;
constexpr float LOST_LIMIT = 1.0f / 12.0f; /* octaves; beyond, an outlier among a head's queries is to blame */

/* Blocks that add up the keys of a head: every smooth_stride-th tile. */
static __host__ __device__ __forceinline__ int sum_parts(int tiles, int stride)
{
    return ((tiles + stride - 1) / stride + SUM_TILES - 1) / SUM_TILES;
}

/* Sums over the finite keys of SUM_TILES tiles: float over a thread's few keys, then double. Element D counts them. */
template <int D, bool BF16>
static __global__ void __launch_bounds__(PREP_THREADS) wgmma_sum_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    constexpr int LANES = D / 8, ROWS = PREP_THREADS / LANES, KEYS = SUM_TILES * APA_CUDA_TILE;
    __shared__ float sums[ROWS][D];
    __shared__ int counts[ROWS];
    chain_go();
    const int parts = sum_parts(job.tiles, job.smooth_stride);
    const int head = blockIdx.x / parts, part = blockIdx.x % parts;
    if (threadIdx.x == 0 && part == 0)
        job.k_scale_max[head] = 0.0f; /* the pair kernel raises it */
    const int lane = threadIdx.x % LANES, r = threadIdx.x / LANES;
    const uint16_t *keys = row_pointer<uint16_t>(job.k, head / job.Hkv, head % job.Hkv, 0) + lane * 8;
    float sum[8] = {};
    int count = 0;
#pragma unroll 8
    for (int at = r; at < KEYS; at += ROWS) {
        const int64_t tile = (static_cast<int64_t>(part) * SUM_TILES + at / APA_CUDA_TILE) * job.smooth_stride,
                      key = tile * APA_CUDA_TILE + at % APA_CUDA_TILE;
        const bool there = key < job.Skv;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (there)
            x = *reinterpret_cast<const uint4 *>(keys + key * job.k.stride[2]);
        if (!row_finite<LANES>(are_finite<BF16>(magnitudes(x))) || !there)
            continue;
        float value[8];
        widen_8<BF16>(x, value);
        count++;
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += value[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sums[r][lane * 8 + i] = sum[i];
    if (lane == 0)
        counts[r] = count;
    __syncthreads();
    double *to = job.tile_sum + static_cast<int64_t>(blockIdx.x) * (D + 1);
    for (int d = threadIdx.x; d <= D; d += PREP_THREADS) {
        double total = 0.0;
        for (int i = 0; i < ROWS; i++)
            total += d == D ? static_cast<double>(counts[i]) : static_cast<double>(sums[i][d]);
        to[d] = total;
    }
#endif
}

/* The parts' sums → the mean; a block a head, MEAN_STRIPES threads a channel. */
template <int D>
static __global__ void __launch_bounds__(D *MEAN_STRIPES) wgmma_mean_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    chain_go();
    __shared__ double sums[MEAN_STRIPES][D], counts[MEAN_STRIPES];
    const int parts = sum_parts(job.tiles, job.smooth_stride), head = blockIdx.x;
    const int d = threadIdx.x % D, stripe = threadIdx.x / D;
    const double *from = job.tile_sum + static_cast<int64_t>(head) * parts * (D + 1);
    double sum = 0.0, count = 0.0;
    chain_wait();
#pragma unroll 8
    for (int part = stripe; part < parts; part += MEAN_STRIPES) {
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
    for (int i = 1; i < MEAN_STRIPES; i++) {
        sum += sums[i][d];
        keys += counts[i];
    }
    job.k_mean[head * D + d] = keys > 0.0 ? static_cast<float>(sum / keys) : 0.0f;
#endif
}

#ifdef APA_CUDA_BULK

/* A unit's candidates are 8·tiles bytes: `tiles` words of 8, of which each of its 8 blocks takes every eighth run. */
__device__ __forceinline__ void clear_candidates(const apa_cuda_job &job, const Unit &unit, int group, int threads)
{
    uint64_t *words = reinterpret_cast<uint64_t *>(job.candidate) + unit.local * job.tiles;
    for (int at = group * threads + static_cast<int>(threadIdx.x); at < job.tiles; at += APA_CUDA_UNIT_GROUPS * threads)
        words[at] = 0;
}

#endif

/* A block a group of 16 rows, D / 8 lanes a row: codes, units, shifts, and whether the group is hot throughout. */
template <int D, bool BF16>
static __global__ void __launch_bounds__(2 * D) wgmma_query_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    chain_go();
    constexpr int LANES = D / 8;
    __shared__ int unjudged, many;
    __shared__ __align__(16) uint8_t codes[16 * D];
    const int lane = threadIdx.x % LANES, r = threadIdx.x / LANES, group = blockIdx.x % APA_CUDA_UNIT_GROUPS;
    const Unit unit = unit_at(job, blockIdx.x / APA_CUDA_UNIT_GROUPS);
    const Row row = row_of(job, unit, group * 16 + r);
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (row.real)
        raw = *reinterpret_cast<const uint4 *>(
            row_pointer<uint16_t>(job.q, unit.head / job.Hkv, row.head, row.position) + lane * 8);
    const ScoreUnit of_scores = score_unit(job);
    if (threadIdx.x == 0)
        unjudged = many = 0;
    chain_wait();
    if (is_early(job, unit))
        return;
    if (job.slots == 0)
        clear_candidates(job, unit, group, 2 * D);
    float x[8], mean[8], q_mean[8] = {}, amax = 0.0f, square = 0.0f, mean_square = 0.0f;
    double dot = 0.0;
    load_mean_8(mean, job.k_mean + static_cast<int64_t>(unit.head) * D + lane * 8);
    if (job.smooth_q)
        load_mean_8(q_mean,
                    job.q_mean + (static_cast<int64_t>(unit.head / job.Hkv) * job.Hq + row.head) * D + lane * 8);
    const bool finite = row_finite<LANES>(are_finite<BF16>(magnitudes(raw)));
    const uint32_t flip = job.negate ? 0x80008000u : 0u;
    widen_8<BF16>(make_uint4(raw.x ^ flip, raw.y ^ flip, raw.z ^ flip, raw.w ^ flip), x);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        dot += static_cast<double>(x[i]) * static_cast<double>(mean[i]);
        x[i] -= q_mean[i];
        mean_square = fmaf(q_mean[i], q_mean[i], mean_square);
        x[i] = finite ? static_cast<float>(static_cast<double>(x[i]) * of_scores.change) : 0.0f;
        amax = fmaxf(amax, fabsf(x[i]));
        square = fmaf(x[i], x[i], square);
    }
#pragma unroll
    for (int m = 1; m < LANES; m *= 2) {
        dot += __shfl_xor_sync(0xffffffffu, dot, m);
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, m));
        square += __shfl_xor_sync(0xffffffffu, square, m);
        mean_square += __shfl_xor_sync(0xffffffffu, mean_square, m);
    }
    const float scale = job.smooth_q ? job.q_head_scale[unit.head / job.Hkv * job.Hq + row.head]
                                     : power_of_two(amax * (1.0f / QK_LARGEST)),
                inverse = 1.0f / scale;
    __syncthreads(); /* the flags */
#pragma unroll
    for (int i = 0; i < 8; i += 4) { /* fragment order of 8-bit A operands */
        const int d = lane * 8 + i, d32 = d % 32;
        *reinterpret_cast<uint32_t *>(codes + (d / 32 * 32 + r % 8 * 4 + d32 % 16 / 4) * 16 +
                                      (d32 / 16 * 2 + r / 8) * 4) =
            pack_e4m3(x[i] * inverse, x[i + 1] * inverse) | pack_e4m3(x[i + 2] * inverse, x[i + 3] * inverse) << 16;
    }
    if (lane == 0) {
        const int64_t at = unit.local * APA_CUDA_UNIT + group * 16 + r;
        const int sees = row.first < row.end ? (row.end - 1) / APA_CUDA_TILE - row.first / APA_CUDA_TILE + 1 : 0;
        const double shift = dot * job.c_exact;
        job.q_scale[at] = of_scores.unit * scale;
        job.shift[at] = isfinite(shift) ? static_cast<float>(shift) : 0.0f;
        const float largest = job.c * (sqrtf(square) + sqrtf(mean_square)) * sqrtf(job.k_scale_max[unit.head]);
        /* With a scale of the head a row's codes may lie below 2^-6, where a channel loses up to half their step,
         * 2^-10. Its channels' losses add up at random, so about 1 / sqrt(3) of this is what a score loses. */
        const float norm = sqrtf(job.k_scale_max[unit.head]),
                    lost = job.smooth_q ? job.c * scale * norm / 1024.0f : 0.0f;
        /* A pair's unit of scores is FP16 in pass 1; its scale of K stays below a seventh of the largest norm. */
        const bool fits = of_scores.unit * scale * norm <= 7.0f * 65504.0f;
        if (sees > 0 && (!finite || !fits || !(lost <= LOST_LIMIT) ||
                         !(largest <= (job.p_phase ? SCORE_LIMIT_OF_PHASES : SCORE_LIMIT))))
            unjudged = 1;
        if (sees > job.early_tiles)
            many = 1;
    }
    __syncthreads();
    const int64_t at = unit.local * APA_CUDA_UNIT_GROUPS + group;
    if (threadIdx.x < D)
        reinterpret_cast<uint4 *>(job.q_codes + at * 16 * D)[threadIdx.x] =
            reinterpret_cast<const uint4 *>(codes)[threadIdx.x];
    if (threadIdx.x == 0)
        job.all_hot[at] = static_cast<uint8_t>(unjudged != 0 || (job.early_tiles > 0 && many == 0));
#endif
}

template <int D, bool BF16> static int launch_keys(const apa_cuda_job *job, cudaStream_t stream)
{
    const int64_t heads = static_cast<int64_t>(job->B) * job->Hkv;
    const bool sums = job->smooth && !job->mean_given;
    cudaError_t error = cudaSuccess;
    if (job->slots > 0)
        error = cudaMemsetAsync(job->slot_taken, 0, sizeof *job->slot_taken * static_cast<size_t>(job->slots), stream);
    if (error == cudaSuccess && !sums && job->first_tile == 0) /* else it holds the maximum of the pairs that are there */
        error = cudaMemsetAsync(job->k_scale_max, 0, sizeof(float) * static_cast<size_t>(heads), stream);
    if (error == cudaSuccess && !job->smooth)
        error = cudaMemsetAsync(job->k_mean, 0, sizeof(float) * static_cast<size_t>(heads) * D, stream);
    if (error == cudaSuccess && sums)
        error = launch_chained(0, wgmma_sum_kernel<D, BF16>, heads * apa_wgmma_sum_parts(job), PREP_THREADS, 0, stream,
                               *job);
    if (error == cudaSuccess && sums)
        error = launch_chained(1, wgmma_mean_kernel<D>, heads, D * MEAN_STRIPES, 0, stream, *job);
    if (error == cudaSuccess && job->smooth_q)
        error = static_cast<cudaError_t>(apa_wgmma_launch_query_mean(job, sums, stream));
    if (error == cudaSuccess)
        error = static_cast<cudaError_t>(apa_wgmma_launch_pairs(job, sums || job->smooth_q, stream));
    return error != cudaSuccess || !job->smooth_q ? error : apa_wgmma_launch_bias(job, 1, stream);
}

template <int D, bool BF16> static int launch_queries(const apa_cuda_job *job, cudaStream_t stream)
{
    return launch_chained(job->chained, wgmma_query_kernel<D, BF16>, job->unit_count * APA_CUDA_UNIT_GROUPS, 2 * D, 0,
                          stream, *job);
}

extern "C" int64_t apa_wgmma_sum_parts(const apa_cuda_job *job)
{
    return sum_parts(job->tiles, job->smooth_stride);
}

extern "C" int apa_wgmma_launch_prep_keys(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    if (job->D == 64)
        return job->bf16 ? launch_keys<64, true>(job, stream) : launch_keys<64, false>(job, stream);
    return job->bf16 ? launch_keys<128, true>(job, stream) : launch_keys<128, false>(job, stream);
}

extern "C" int apa_wgmma_launch_prep_queries(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    if (job->D == 64)
        return job->bf16 ? launch_queries<64, true>(job, stream) : launch_queries<64, false>(job, stream);
    return job->bf16 ? launch_queries<128, true>(job, stream) : launch_queries<128, false>(job, stream);
}
