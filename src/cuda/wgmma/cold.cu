/* Pass 1 on Hopper as a kernel of its own (cold_walk.cuh): a block takes 128 rows and a split of their tiles, and
 * leaves its state and its candidates to the kernels behind it. */
#include "cuda/chain.cuh"
#include "cuda/wgmma/cold_walk.cuh"
#include "cuda/wgmma/launch.h"

template <int D> struct ColdShape : ColdRing<D, COLD_GROUPS> {
    static constexpr int FULL_AT = ColdRing<D, COLD_GROUPS>::RING_BYTES;
    static constexpr int ROWS_AT =
        FULL_AT + ColdRing<D, COLD_GROUPS>::STAGES * 16; /* first key seen and end, of each row */
    static constexpr int SHARED = ROWS_AT + COLD_GROUPS * WARPGROUP_ROWS * ROW_ENTRY + 1024;
};

#ifdef APA_CUDA_BULK

/* Both tiles of a pair become candidates: their kind, and their rows' masses. Bytes of other tiles were zeroed before.
 */
struct CandidatesByTile {
    __device__ void write(const Note &note, const WarpPlace &my, int number) const
    {
        const int lane = threadIdx.x & 31, tile = 2 * number + mass_tile();
        const int64_t at = (my.unit.local * APA_CUDA_UNIT_GROUPS + my.first_row / 16) * my.job.tiles;
        if (tile >= my.job.tiles)
            return;
        my.job.mass[(at + tile) * 16 + mass_h() * 8 + (lane >> 2)] = note.mass;
        if (lane < 2)
            my.job.candidate[at + tile] = note.held ? APA_CUDA_CANDIDATE_HELD : APA_CUDA_CANDIDATE_ADDED;
    }
};

#endif

template <int D, bool BIAS>
static __global__ void __launch_bounds__(ColdShape<D>::THREADS, 1)
    wgmma_cold_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    using S = ColdShape<D>;
    chain_go();
    extern __shared__ uint8_t shared[];
    const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const apa_cuda_stretch place = apa_cuda_stretch_of(&job, blockIdx.x, gridDim.x, COLD_GROUPS * WARPGROUP_ROWS);
    if (apa_cuda_in_early_units(&job, place.row, COLD_GROUPS * WARPGROUP_ROWS)) {
        chain_wait();
        return;
    }
    const PairRange pairs = block_pairs<COLD_GROUPS>(job, place);
    for (int i = 0; i < S::STAGES; i++)
        if (threadIdx.x < 64)
            write_ones(base + i * Pair<D>::STAGE + Pair<D>::ONES_AT, threadIdx.x);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(base + S::FULL_AT + i * 16, 1);
            barrier_init(base + S::FULL_AT + i * 16 + 8, 4 * COLD_GROUPS);
        }
        barrier_init_fence();
    }
    fence_for_async();
    __syncthreads();
    chain_wait();
    if (warp >= 4 * COLD_GROUPS) {
        give_registers<S::PRODUCER_REGISTERS>();
        if (threadIdx.x == 128 * COLD_GROUPS)
            feed_pairs<D, BIAS, S>(base, job, place, pairs);
        return;
    }
    take_registers<S::CONSUMER_REGISTERS>();
    const int line = place.row + warp * 16;
    const Unit unit = unit_of_row(job, place, line);
    const bool there = is_there(job, unit);
    WarpPlace my = {job, unit, line % APA_CUDA_UNIT, base + S::ROWS_AT + warp * 16 * ROW_ENTRY, pairs, {0, 0}, 0};
    see_rows(my, there);
    ColdRows<D> rows;
    QueriesInRegisters queries;
    float q_unit[2] = {0.0f, 0.0f};
    bias_operand(queries.picks, line / job.Sq16);
    load_pair_queries(queries.q, job, unit, my.first_row / 16, there);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (there)
            q_unit[h] = job.q_scale[unit.local * APA_CUDA_UNIT + my.first_row + h * 8 + (lane >> 2)];
    }
    clear(rows);
    const CandidatesByTile candidates;
    walk<D, BIAS, QueriesInRegisters, const CandidatesByTile, S>(rows, queries, q_unit, base, my, candidates);
    if (!there)
        return;
    const int64_t first_row = (place.split * job.unit_count + unit.local) * APA_CUDA_UNIT + my.first_row;
    store_cold<D>(rows, job, first_row);
#pragma unroll
    for (int h = 0; h < 2; h++)
        if ((lane & 3) == 0)
            job.part_lambda[first_row + h * 8 + (lane >> 2)] = rows.lambda[h] * (1.0f / P_RANGE);
#endif
}

template <int D, bool BIAS> static int launch(const apa_cuda_job *job, cudaStream_t stream)
{
    using S = ColdShape<D>;
    const cudaError_t error =
        cudaFuncSetAttribute(wgmma_cold_kernel<D, BIAS>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    return error != cudaSuccess
               ? error
               : launch_chained(job->chained, wgmma_cold_kernel<D, BIAS>, apa_wgmma_cold_blocks(job) * job->splits,
                                S::THREADS, S::SHARED, stream, *job);
}

extern "C" int64_t apa_wgmma_cold_blocks(const apa_cuda_job *job)
{
    return apa_cuda_stretches(job, COLD_GROUPS * WARPGROUP_ROWS);
}

extern "C" int64_t apa_wgmma_pair_bytes(int64_t D)
{
    return D == 64 ? Pair<64>::BYTES : Pair<128>::BYTES;
}

extern "C" int apa_wgmma_launch_cold(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    if (job->unit_count == 0)
        return cudaSuccess;
    if (job->D == 64)
        return launch<64, false>(job, stream);
    return job->smooth_q ? launch<128, true>(job, stream) : launch<128, false>(job, stream);
}
