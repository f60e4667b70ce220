/* Between the passes on Hopper, as a kernel of its own: the tiles whose cold sums pass 1 guessed wrong (judge.cu lists
 * them, fix_pair.cuh sets them right). A block takes a part of a unit's list, as many parts as pass 1 had splits, and
 * changes that split's state. */
#include "cuda/chain.cuh"
#include "cuda/wgmma/fix_pair.cuh"
#include "cuda/wgmma/launch.h"

template <int D> struct FixShape {
    static constexpr int STAGES = 4;
    static constexpr int THREADS = 3 * 128;
    static constexpr int FULL_AT = STAGES * Pair<D>::STAGE, ROWS_AT = FULL_AT + STAGES * 16;
    static constexpr int SHARED = ROWS_AT + APA_CUDA_UNIT * ROW_ENTRY + 1024;
};

#ifdef APA_CUDA_BULK

/* Entries first … end - 1 of the unit's list into the ring, by one thread. */
template <int D, bool BIAS>
__device__ __forceinline__ void feed_entries(const FixRing<D> &ring, const apa_cuda_job &job, const Unit &unit,
                                             int first, int end)
{
    const int64_t list = unit.local * job.tiles;
    for (int i = first; i < end; i++) {
        const uint32_t tile = job.fix_tile[list + i], mask = job.fix_mask[list + i], groups = mask & 255;
        const apa_wgmma_fix entry = {tile / 2, tile % 2 == 0 ? groups : 0, tile % 2 == 0 ? 0 : groups, mask >> 8};
        push_fix<D, BIAS>(ring, i - first, entry, job, unit.head);
    }
    push_fix<D, BIAS>(ring, end - first, {NO_PAIR, 0, 0, 0}, job, unit.head);
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
    const FixRing<D> ring = {base, base + S::FULL_AT, S::STAGES, 8};
    if (threadIdx.x == 0) {
        ring.set_barriers();
        barrier_init_fence();
    }
    __syncthreads();
    if (warp >= 8) {
        give_registers<24>();
        if (threadIdx.x == 256)
            feed_entries<D, BIAS>(ring, job, unit, first, end);
        return;
    }
    take_registers<240>();
    const int64_t first_row = (unit.split * job.unit_count + unit.local) * APA_CUDA_UNIT + warp * 16;
    QueriesInRegisters queries;
    load_pair_queries(queries.q, job, unit, warp, true);
    bias_operand(queries.picks, (unit.number * APA_CUDA_UNIT + warp * 16) / job.Sq16);
    ColdRows<D> rows;
    load_cold<D>(rows, job, first_row);
    float q_unit[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        q_unit[h] = job.q_scale[unit.local * APA_CUDA_UNIT + warp * 16 + h * 8 + (lane >> 2)];
    WarpPlace my = {job, unit, warp * 16, base + S::ROWS_AT + warp * 16 * ROW_ENTRY, {0, 0}, {0, 0}, 0};
    see_rows(my, true);
    fix_all<D, BIAS>(rows, queries, q_unit, ring, my);
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
        return launch<64, false>(job, stream);
    return job->smooth_q ? launch<128, true>(job, stream) : launch<128, false>(job, stream);
}
