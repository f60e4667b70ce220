/* Prep on Hopper: codes of queries (order in tile_e4m3.cuh), and the launches of prep. Means are made in means.cu,
 * pairs of tiles in pairs.cu.
 *
 * A query's scale is the smallest power of two that keeps its largest value in range. */
#include "cuda/wgmma/prep.cuh"

constexpr int QUERY_THREADS = 32 * APA_CUDA_UNIT_GROUPS;
constexpr float LOST_LIMIT = 1.0f / 12.0f; /* octaves; beyond, an outlier among a head's queries is to blame */

#ifdef APA_CUDA_BULK

/* A unit's candidates are 8·tiles bytes: `tiles` words of 8. */
__device__ __forceinline__ void clear_candidates(const apa_cuda_job &job, const Unit &unit, int threads)
{
    uint64_t *words = reinterpret_cast<uint64_t *>(job.candidate) + unit.local * job.tiles;
    for (int at = static_cast<int>(threadIdx.x); at < job.tiles; at += threads)
        words[at] = 0;
}

/* How a warp shares the 16 rows of its group: LANES lanes a row, 8 channels each, ROWS rows at a time. */
template <int D> struct QueryTurns {
    static constexpr int LANES = D / 8, ROWS = 32 / LANES, TURNS = 16 / ROWS;

    /* Row of a lane's turn: rows r and r + 8, which share pieces of the codes, follow each other. */
    static __device__ __forceinline__ int row(int turn)
    {
        return turn / 2 * ROWS + static_cast<int>(threadIdx.x & 31) / LANES + turn % 2 * 8;
    }
};

/* 16 bytes of each turn's row; zeros for padding. */
template <int D>
__device__ __forceinline__ void load_turns(uint4 (&raw)[QueryTurns<D>::TURNS], const apa_cuda_job &job,
                                           const Unit &unit, const Row &lead, int group)
{
    using T = QueryTurns<D>;
    const int b = unit.head / job.Hkv, channel = static_cast<int>(threadIdx.x) % T::LANES * 8;
    const uint16_t *from = as_it_is(row_pointer<uint16_t>(job.q, b, lead.head, lead.position + T::row(0)) + channel);
    const int left = lead.real ? job.Sq - lead.position - T::row(0) : 0; /* from the row of turn 0 on */
#pragma unroll
    for (int turn = 0; turn < T::TURNS; turn++)
        raw[turn] = make_uint4(0, 0, 0, 0);
    if (job.packing_rows) {
#pragma unroll
        for (int turn = 0; turn < T::TURNS; turn++) {
            const Row row = row_of(job, unit, group * 16 + T::row(turn));
            if (row.real)
                raw[turn] =
                    *reinterpret_cast<const uint4 *>(row_pointer<uint16_t>(job.q, b, row.head, row.position) + channel);
        }
        return;
    }
#pragma unroll
    for (int turn = 0; turn < T::TURNS; turn++) {
        const int further = T::row(turn) - T::row(0);
        if (further < left)
            raw[turn] = *reinterpret_cast<const uint4 *>(from + further * job.q.stride[2]);
    }
}

/* Codes of rows r and r + 8 in the order of A operands: 16 bytes are 4 of row r, 4 of row r + 8, and of either those 16
 * bytes on. A lane has 8 channels of both rows; two of them swap words. to: of row r. */
template <int D>
__device__ __forceinline__ void put_query_codes(uint4 *to, int lane, const QKCodes<D> &upper, const QKCodes<D> &lower)
{
    if constexpr (D == 64) { /* a lane has half a step's 32 bytes: words 0 and 1 go to the one, 2 and 3 to the other */
        const bool second = (lane & 1) != 0;
        uint32_t own[2][2], other[2][2]; /* [row][word] */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            own[0][i] = second ? upper.word[2 + i] : upper.word[i];
            own[1][i] = second ? lower.word[2 + i] : lower.word[i];
            other[0][i] = __shfl_xor_sync(0xffffffffu, second ? upper.word[i] : upper.word[2 + i], 1);
            other[1][i] = __shfl_xor_sync(0xffffffffu, second ? lower.word[i] : lower.word[2 + i], 1);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            to[lane / 2 * 32 + (second ? 2 : 0) + i] = second
                                                           ? make_uint4(other[0][i], other[1][i], own[0][i], own[1][i])
                                                           : make_uint4(own[0][i], own[1][i], other[0][i], other[1][i]);
    } else { /* a quarter: word 0 goes to the one, word 1 to the other */
        const bool second = (lane & 2) != 0;
        const uint32_t up = second ? upper.word[1] : upper.word[0], low = second ? lower.word[1] : lower.word[0],
                       up_other = __shfl_xor_sync(0xffffffffu, second ? upper.word[0] : upper.word[1], 2),
                       low_other = __shfl_xor_sync(0xffffffffu, second ? lower.word[0] : lower.word[1], 2);
        to[lane / 4 * 32 + lane % 2 * 2 + (second ? 1 : 0)] =
            second ? make_uint4(up_other, low_other, up, low) : make_uint4(up, low, up_other, low_other);
    }
}

/* What q·mean is taken with, so that products with small_double() are far from the ends of double. */
constexpr double LARGE = 0x1p800;

/* x·change, rounded once but for a chance of 2^-23: change = high + low. */
__device__ __forceinline__ float times(float x, float high, float low)
{
    return fmaf(x, high, x * low);
}

#endif

/* A block a unit, a warp a group of 16 rows: codes, units, shifts, and whether the group is hot throughout. With
 * `smooth_q` a group's rows are of one query head; its padding counts as rows of it. Nothing in the loop over rows is
 * converted from or to double: that runs at an eighth of the rate of FP32 and less. */
template <int D, bool BF16>
static __global__ void __launch_bounds__(QUERY_THREADS, D == 64 ? 4 : 3)
    wgmma_query_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    using T = QueryTurns<D>;
    chain_go();
    __shared__ float shared_unit[3]; /* score_unit(), the change in two parts */
    __shared__ __align__(16) double shared_mean[D];
    const int lane = threadIdx.x % T::LANES, group = threadIdx.x / 32;
    const Unit unit = unit_at(job, blockIdx.x);
    if (is_early(job, unit)) {
        chain_wait();
        return;
    }
    const Row lead = row_of(job, unit, group * 16);
    uint4 raw[T::TURNS];
    load_turns<D>(raw, job, unit, lead, group);
    if (threadIdx.x == 0) { /* once: it takes as long as a turn */
        const ScoreUnit of_scores = score_unit(job);
        const float high = static_cast<float>(of_scores.change);
        shared_unit[0] = of_scores.unit;
        shared_unit[1] = high;
        shared_unit[2] = static_cast<float>(of_scores.change - static_cast<double>(high));
    }
    const float sign = job.negate ? -1.0f : 1.0f;
    chain_wait();
    if (job.slots == 0)
        clear_candidates(job, unit, QUERY_THREADS);
    if (threadIdx.x < D)
        shared_mean[threadIdx.x] =
            static_cast<double>(sign * job.k_mean[static_cast<int64_t>(unit.head) * D + threadIdx.x]) * LARGE;
    float q_mean[8] = {}, own_scale = 1.0f, mean_square = 0.0f;
    double large_mean[8];
    const int64_t of_heads = static_cast<int64_t>(unit.head / job.Hkv) * job.Hq + lead.head;
    if (job.smooth_q) {
        load_mean_8(q_mean, job.q_mean + of_heads * D + lane * 8);
        own_scale = job.q_head_scale[of_heads];
    }
    __syncthreads();
    const float high = shared_unit[1], low = shared_unit[2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        large_mean[i] = shared_mean[lane * 8 + i];
        mean_square = fmaf(q_mean[i], q_mean[i], mean_square);
    }
    const float head_inverse = 1.0f / own_scale, head_high = high * head_inverse, head_low = low * head_inverse;
    const int64_t at = unit.local * APA_CUDA_UNIT_GROUPS + group;
    uint4 *const codes = reinterpret_cast<uint4 *>(job.q_codes + at * 16 * 128) + T::row(0) * 4;
    QKCodes<D> before = {};
    double dot = 0.0, dots[3];
    float square = 0.0f, squares[3];
    bool own_finite = true;
#pragma unroll
    for (int turn = 0; turn < T::TURNS; turn++) {
        const bool finite = row_finite<T::LANES>(are_finite<BF16>(magnitudes(raw[turn])));
        float x[8], by_high = head_high, by_low = head_low;
        widen_8<BF16>(raw[turn], x);
        dot = 0.0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            dot = fma(small_double(x[i]), large_mean[i], dot);
            x[i] = fmaf(x[i], sign, -q_mean[i]);
        }
        const bool own = lane % T::TURNS == turn;
        if (own)
            own_finite = finite;
        if (!job.smooth_q) {
            float amax = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++)
                amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
            for (int m = 1; m < T::LANES; m *= 2)
                amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, m));
            const float scale = power_of_two(finite ? times(amax, high, low) * (1.0f / qk_largest<D>()) : 0.0f),
                        inverse = inverse_power(scale);
            by_high = high * inverse;
            by_low = low * inverse;
            if (own)
                own_scale = scale;
        }
        square = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = times(x[i], by_high, by_low);
            square = fmaf(x[i], x[i], square);
        }
#pragma unroll
        for (int level = 0; level < 3; level++) { /* a binary counter: sums of 1, 2, 4 turns that wait for their like */
            if ((turn >> level & 1) == 0) {
                dots[level] = dot;
                squares[level] = square;
                break;
            }
            dot = fold(dots[level], dot, 1 << level);
            square = fold(squares[level], square, 1 << level);
        }
        QKCodes<D> now;
        now.set(x);
        now.clear_unless(finite);
        if (turn % 2 == 1)
            put_query_codes<D>(codes + turn / 2 * T::ROWS * 4, lane, before, now);
        before = now;
    }
#pragma unroll
    for (int m = T::TURNS; m < T::LANES; m *= 2) {
        dot += __shfl_xor_sync(0xffffffffu, dot, m);
        square += __shfl_xor_sync(0xffffffffu, square, m);
    }
#pragma unroll
    for (int m = 1; m < T::LANES; m *= 2)
        mean_square += __shfl_xor_sync(0xffffffffu, mean_square, m);

    /* From here on a lane has the row of turn lane % TURNS; two lanes have the same one. */
    const int r = T::row(lane % T::TURNS);
    const Row row = row_of(job, unit, group * 16 + r);
    const int sees = tiles_seen(row.first, row.end);
    const float norm = sqrtf(job.k_scale_max[unit.head]), pair_unit = shared_unit[0] * own_scale;
    const float largest = job.c * (sqrtf(square) * own_scale + sqrtf(mean_square)) * norm;
    /* With a scale of the head a row's codes may lie below 2^-6, where a channel loses up to half their step,
     * 2^-10. Its channels' losses add up at random, so about 1 / sqrt(3) of this is what a score loses. */
    const float lost = job.smooth_q ? job.c * own_scale * norm / 1024.0f : 0.0f;
    /* A pair's unit of scores is FP16 in pass 1; its scale of K stays below a seventh of the largest norm. */
    const bool fits = pair_unit * norm <= 7.0f * 65504.0f;
    const bool unjudged =
        __any_sync(0xffffffffu, sees > 0 && (!own_finite || !fits || !(lost <= LOST_LIMIT) ||
                                             !(largest <= (job.p_phase ? SCORE_LIMIT_OF_PHASES : SCORE_LIMIT))));
    const bool many = __any_sync(0xffffffffu, sees > job.early_tiles);
    if (lane < T::TURNS) {
        const double shift = dot * (FROM_SMALL / LARGE) * job.c_exact;
        job.q_scale[at * 16 + r] = pair_unit;
        job.shift[at * 16 + r] = own_finite && isfinite(shift) ? static_cast<float>(shift) : 0.0f;
    }
    if (threadIdx.x % 32 == 0)
        job.all_hot[at] = static_cast<uint8_t>(unjudged || (job.early_tiles > 0 && !many));
#endif
}

static int launch_keys(const apa_cuda_job *job, cudaStream_t stream)
{
    const int64_t heads = static_cast<int64_t>(job->B) * job->Hkv;
    const bool sums = job->smooth && !job->mean_given;
    cudaError_t error = cudaSuccess;
    if (job->slots > 0)
        error = cudaMemsetAsync(job->slot_taken, 0, sizeof *job->slot_taken * static_cast<size_t>(job->slots), stream);
    if (error == cudaSuccess && !sums &&
        job->first_tile == 0) /* else it holds the maximum of the pairs that are there */
        error = cudaMemsetAsync(job->k_scale_max, 0, sizeof(float) * static_cast<size_t>(heads), stream);
    if (error == cudaSuccess && !job->smooth)
        error = cudaMemsetAsync(job->k_mean, 0, sizeof(float) * static_cast<size_t>(heads * job->D), stream);
    if (error == cudaSuccess)
        error = static_cast<cudaError_t>(apa_wgmma_launch_means(job, stream));
    if (error == cudaSuccess)
        error = static_cast<cudaError_t>(apa_wgmma_launch_pairs(job, sums || job->smooth_q, stream));
    return error != cudaSuccess || !job->smooth_q ? error : apa_wgmma_launch_bias(job, 1, stream);
}

template <int D, bool BF16> static int launch_queries(const apa_cuda_job *job, cudaStream_t stream)
{
    return launch_chained(job->chained, wgmma_query_kernel<D, BF16>, job->unit_count, QUERY_THREADS, 0, stream, *job);
}

extern "C" int apa_wgmma_launch_prep_keys(const apa_cuda_job *job, void *stream_pointer)
{
    return launch_keys(job, static_cast<cudaStream_t>(stream_pointer));
}

extern "C" int apa_wgmma_launch_prep_queries(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    if (job->D == 64)
        return job->bf16 ? launch_queries<64, true>(job, stream) : launch_queries<64, false>(job, stream);
    return job->bf16 ? launch_queries<128, true>(job, stream) : launch_queries<128, false>(job, stream);
}
