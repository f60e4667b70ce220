/* Between the passes on Hopper: the tiles whose cold sums pass 1 guessed wrong (judge.cu lists them).
 *
 * A block takes a part of a unit's list, as many parts as pass 1 had splits, and changes that split's state. The pair
 * that holds the tile goes through the same products and the same rounding as in pass 1, so its codes of P are the same
 * bits; those of the other tile are cleared. What is taken out leaves rounding of FP32 sums and of the 13 bits of one
 * pair's E4M3 sum behind. */
#include "cuda/chain.cuh"
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/tile_e4m3.cuh"

template <int D> struct FixShape {
    static constexpr int STAGES = 4;
    static constexpr int THREADS = 3 * 128;
    static constexpr int FULL_AT = STAGES * Pair<D>::STAGE;
    static constexpr int SHARED = FULL_AT + STAGES * 16 + 1024;
    static constexpr int ENTRY_AT = Pair<D>::META_AT + 64; /* in a stage: tile, mask */
};

#ifdef APA_CUDA_BULK

/* Entries first … end - 1 of the unit's list into the ring, by one thread. */
template <int D, bool BIAS>
__device__ __forceinline__ void feed_entries(const apa_cuda_job &job, const Unit &unit, uint32_t base, int first,
                                             int end)
{
    using S = FixShape<D>;
    const int64_t list = unit.local * job.tiles, pairs = (job.room + 1) / 2;
    const uint32_t bias_bytes = BIAS ? BIAS_BYTES : 0;
    for (int i = 0; i < end - first; i++) {
        const uint32_t stage = base + i % S::STAGES * Pair<D>::STAGE, full = base + S::FULL_AT + i % S::STAGES * 16;
        const uint32_t tile = job.fix_tile[list + first + i];
        const uint8_t *from = job.blob + (unit.head * pairs + tile / 2) * Pair<D>::BYTES;
        const uint32_t entry[4] = {tile, job.fix_mask[list + first + i], 0, 0};
        barrier_wait(full + 8, (i / S::STAGES & 1) ^ 1);
        store_shared_16(stage + S::ENTRY_AT, entry);
        barrier_expect(full, Pair<D>::BYTES + bias_bytes);
        copy_bulk(stage, from, Pair<D>::META, full);
        copy_bulk(stage + Pair<D>::META_AT, from + Pair<D>::META, 64, full);
        if (BIAS)
            copy_bulk(stage + Pair<D>::BIAS_AT, bias_of(job, unit.head, static_cast<int>(tile / 2)), bias_bytes, full);
    }
}

/* The warp's rows as pass 1 stored them, in units of codes. */
template <int D>
__device__ __forceinline__ void load_cold(ColdRows<D> &rows, const apa_cuda_job &job, int64_t first_row)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t row = first_row + h * 8 + (lane >> 2);
        rows.frame[h] = job.part_frame[row];
        rows.lambda[h] = job.part_sum[row] * P_RANGE; /* here: without what was held back */
        rows.held[h] = 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const float2 o = *reinterpret_cast<const float2 *>(job.part_o + row * D + n * 8 + (lane & 3) * 2);
            rows.o[n][2 * h] = o.x * P_RANGE;
            rows.o[n][2 * h + 1] = o.y * P_RANGE;
        }
    }
}

/* What a warp's work is on. */
struct FixPlace {
    const apa_cuda_job &job;
    const Unit &unit;
    WarpView view;
    int warp;
};

/* Scores of the pair at `stage` that the warp's rows see. */
template <int D, bool BIAS>
__device__ __forceinline__ void scores_again(PairState<D> &pair, const uint32_t (&q)[D / 32][4], uint32_t stage,
                                             int number, const PairMeta &meta, const FixPlace &my)
{
    uint32_t picks[4];
    bias_operand(picks, (my.unit.number * APA_CUDA_UNIT + my.warp * 16) / my.job.Sq16);
    products_fence();
    issue_pair_scores<D, BIAS>(pair.s, q, picks, stage);
    products_wait<0>();
    pin(pair.s);
    if (my.view.every_first > number * PAIR_KEYS || my.view.every_end < (number + 1) * PAIR_KEYS ||
        meta.poisoned != 0) {
        ThreadRows<1> seen;
        warp_rows<1>(my.job, my.unit, my.warp * 16, seen);
        mask_pair(pair.s, seen, number * PAIR_KEYS, meta.poisoned);
    }
}

/* One tile of the pair at `stage`, for the warps that want it. What is taken out was added in the frame of the pair;
 * what is added has its own. */
template <int D, bool BIAS>
__device__ __forceinline__ void fix_one(ColdRows<D> &rows, const uint32_t (&q)[D / 32][4], const float (&q_unit)[2],
                                        uint32_t stage, const FixPlace &my)
{
    uint32_t entry[4];
    load_shared_16(entry, stage + FixShape<D>::ENTRY_AT);
    const int tile = static_cast<int>(entry[0] & 1), number = static_cast<int>(entry[0] / 2);
    const bool take_out = (entry[1] >> (8 + my.warp) & 1) != 0;
    const PairMeta meta = load_meta(stage + Pair<D>::META_AT);
    const float unit[2] = {q_unit[0] * meta.k_scale, q_unit[1] * meta.k_scale};
    PairState<D> pair;
    scores_again<D, BIAS>(pair, q, stage, number, meta, my);
#pragma unroll
    for (int n = 0; n < 32; n++)
        if (!take_out && n / 16 != tile)
            pair.s[n] = MINUS_INF_2;
    float top[2];
    soften_pair(pair.s, unit, meta.phase, top);
    pack_pair(pair.s, pair.p);
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            pair.p[step][i] = step / 2 == tile ? pair.p[step][i] : 0u;
    pin(pair.p);
    products_fence();
    issue_pair_values<D>(pair.acc, pair.p, stage);
    products_wait<0>();
    pin(pair.acc);
    if ((entry[1] >> my.warp & 1) == 0)
        return;
    meet_frames<D>(rows, top);
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        weight[h] = (take_out ? -1.0f : 1.0f) * weight_of(top[h], rows.frame[h]);
        rows.lambda[h] += (tile == 0 ? pair.acc[D / 8][2 * h] : pair.acc[D / 8][2 * h + 1]) * weight[h];
    }
    add_pair<D>(rows, pair.acc, weight, meta.v_scale); /* there is one tile alone in the sums */
}

#endif

template <int D, bool BIAS>
static __global__ void __launch_bounds__(FixShape<D>::THREADS, 1)
    wgmma_fix_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    using S = FixShape<D>;
    chain_go();
    extern __shared__ uint8_t shared[];
    const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Unit unit = unit_at(job, blockIdx.x / job.splits, static_cast<int>(blockIdx.x % job.splits));
    chain_wait();
    const int count = job.list_count[unit.local * 2 + 1], part = (count + job.splits - 1) / job.splits;
    const int first = min(count, unit.split * part), end = min(count, first + part);
    if (first == end)
        return;
    for (int i = 0; i < S::STAGES; i++)
        if (threadIdx.x < 64)
            write_ones(base + i * Pair<D>::STAGE + Pair<D>::ONES_AT, threadIdx.x);
    fence_for_async();
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(base + S::FULL_AT + i * 16, 1);
            barrier_init(base + S::FULL_AT + i * 16 + 8, 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (warp >= 8) {
        give_registers<24>();
        if (threadIdx.x == 256)
            feed_entries<D, BIAS>(job, unit, base, first, end);
        return;
    }
    take_registers<240>();
    const int64_t first_row = (unit.split * job.unit_count + unit.local) * APA_CUDA_UNIT + warp * 16;
    uint32_t q[D / 32][4];
    load_pair_queries<D>(q, job, unit, warp);
    ColdRows<D> rows;
    load_cold<D>(rows, job, first_row);
    float q_unit[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        q_unit[h] = job.q_scale[unit.local * APA_CUDA_UNIT + warp * 16 + h * 8 + (lane >> 2)];
    FixPlace my = {job, unit, {}, warp};
    {
        ThreadRows<1> seen;
        my.view = warp_rows<1>(job, unit, warp * 16, seen);
    }
    for (int i = 0; i < end - first; i++) {
        const uint32_t stage = base + i % S::STAGES * Pair<D>::STAGE, full = base + S::FULL_AT + i % S::STAGES * 16;
        barrier_wait(full, i / S::STAGES & 1);
        fix_one<D, BIAS>(rows, q, q_unit, stage, my);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(full + 8);
    }
    store_cold<D>(rows, job, first_row);
#endif
}

template <int D, bool BIAS> static int launch(const apa_cuda_job *job, cudaStream_t stream)
{
    using S = FixShape<D>;
    const cudaError_t error =
        cudaFuncSetAttribute(wgmma_fix_kernel<D, BIAS>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    return error != cudaSuccess ? error
                                : launch_chained(job->chained, wgmma_fix_kernel<D, BIAS>, job->unit_count * job->splits,
                                                 S::THREADS, S::SHARED, stream, *job);
}

extern "C" int apa_wgmma_launch_fix(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    if (job->D == 64)
        return job->smooth_q ? launch<64, true>(job, stream) : launch<64, false>(job, stream);
    return job->smooth_q ? launch<128, true>(job, stream) : launch<128, false>(job, stream);
}
