/* Pass 2 on Hopper as a kernel of its own (hot_tiles.cuh): the hot tiles exactly.
 *
 * A block takes 64 rows and an equal part of their unit's list of hot tiles: one warpgroup that multiplies and one warp
 * that feeds it; two blocks share a multiprocessor, and the exponentials of one run under the products of the other.
 * The feeding warp goes through the list and leaves out what is hot for none of the four groups of 16 rows. Partial
 * states go to the buffers that finish.cu adds up. */
#include "cuda/chain.cuh"
#include "cuda/wgmma/hot_tiles.cuh"

template <int D> struct HotBlock {
    using S = HotShape<D>;
    static constexpr int THREADS = 256, SHARED = S::BYTES + 1024; /* twice that and the system's share fill 228 KB */
    static constexpr int ROWS_AT = S::BYTES + 512; /* what rows see; barriers lie between them and the ring */
    static_assert(S::BARRIER_BYTES <= 512 && WARPGROUP_ROWS * ROW_ENTRY <= 512, "both lie behind the ring");
};

#ifdef APA_CUDA_BULK

constexpr int HOT_PRODUCER_REGISTERS = 24, HOT_CONSUMER_REGISTERS = 232;
constexpr int OWN = 1; /* named barrier of the warpgroup */

/* All lanes read the unit's list, entries first … end - 1. */
template <int D>
__device__ __forceinline__ void feed(const HotRing<D> &ring, const apa_wgmma_maps &maps, const apa_cuda_job &job,
                                     const Unit &unit, int half, int first, int end)
{
    const int lane = threadIdx.x & 31;
    const uint32_t *tiles = job.hot_tile + unit.local * job.tiles;
    const uint8_t *masks = job.hot_mask + unit.local * job.tiles;
    const uint8_t *poisoned = job.poisoned + static_cast<int64_t>(unit.head) * job.room;
    FeedingWarp<D> warp(ring, maps, job, unit.head);
    for (int base = first; base < end; base += 32) {
        uint32_t entry = 0;
        if (base + lane < end) {
            const uint32_t tile = tiles[base + lane];
            entry = hot_entry(tile, masks[base + lane] >> (4 * half) & 15, poisoned[tile] != 0);
        }
        warp.take(entry);
    }
    warp.end(static_cast<uint32_t>(job.tiles));
}

#endif

template <int D, bool BF16>
static __global__ void __launch_bounds__(HotBlock<D>::THREADS, 2)
    wgmma_hot_kernel(const __grid_constant__ apa_cuda_job job, const __grid_constant__ apa_wgmma_maps maps)
{
#ifdef APA_CUDA_BULK
    using S = HotShape<D>;
    chain_go();
    extern __shared__ __align__(1024) uint8_t shared[];
    const HotRing<D> ring = {shared_address(shared), shared_address(shared) + S::BYTES};
    const int warp = threadIdx.x / 32, half = static_cast<int>(blockIdx.x & 1);
    Unit unit;
    unit.split = static_cast<int>(blockIdx.x / 2 % job.hot_splits);
    unit.local = blockIdx.x / 2 / job.hot_splits;
    unit.index = unit.local + job.unit_first;
    unit.head = static_cast<int>(unit.index / job.units);
    unit.number = static_cast<int>(unit.index % job.units);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::SLOTS; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), 4);
        }
        barrier_init_fence();
    }
    chain_wait();
    if (is_early(job, unit))
        return;
    const int count = job.list_count[unit.local * 2], part = (count + job.hot_splits - 1) / job.hot_splits;
    const int first = min(count, unit.split * part), end = min(count, first + part);
    if (first == end)
        return; /* finish.cu leaves the part out */
    const int first_row = half * WARPGROUP_ROWS + warp % 4 * 16;
    const uint32_t row_table = ring.base + HotBlock<D>::ROWS_AT + warp % 4 * 16 * ROW_ENTRY;
    WholeKeys whole = {0, 0};
    if (warp < 4) {
        const Row row = lane_row(job, unit, first_row);
        ask_for_queries<D>(ring.base, job, unit.head / job.Hkv, row);
        whole = whole_keys(row);
        store_rows(row_table, row.first, row.end);
        queries_there<D>(ring.base, job);
    }
    __syncthreads();
    if (warp >= 4) {
        give_registers<HOT_PRODUCER_REGISTERS>();
        if (warp == 4)
            feed<D>(ring, maps, job, unit, half, first, end);
        return;
    }
    take_registers<HOT_CONSUMER_REGISTERS>();
    const HotPlace my = {job, whole, row_table, unit.head / job.Hkv, unit.head % job.Hkv, OWN};
    State16<D, 1> state;
    clear(state);
    float l[2] = {0.0f, 0.0f};
    consume<D, BF16>(state, l, ring, my);
    join_sums(state, l);
    store_part<D, 1>(state, job.hot_o, job.hot_frame, job.hot_sum, unit.split * job.unit_count + unit.local, first_row);
#endif
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, const apa_wgmma_maps *maps, cudaStream_t stream)
{
    using S = HotBlock<D>;
    const cudaError_t error =
        cudaFuncSetAttribute(wgmma_hot_kernel<D, BF16>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    return error != cudaSuccess
               ? error
               : launch_chained(job->chained, wgmma_hot_kernel<D, BF16>, job->unit_count * job->hot_splits * 2,
                                S::THREADS, S::SHARED, stream, *job, *maps);
}

extern "C" int apa_wgmma_launch_hot(const apa_cuda_job *job, const apa_wgmma_maps *maps, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    if (job->D == 64)
        return job->bf16 ? launch<64, true>(job, maps, stream) : launch<64, false>(job, maps, stream);
    return job->bf16 ? launch<128, true>(job, maps, stream) : launch<128, false>(job, maps, stream);
}
