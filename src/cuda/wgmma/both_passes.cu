/* Both passes of a unit in one block, for calls with so many units that none is split: nothing is kept of a unit in
 * memory but its candidates.
 *
 *     pass 1    all tiles in E4M3 (cold_walk.cuh)
 *     verdicts  λ is complete: each warp looks through its candidates (verdicts.cuh)
 *     fix       what pass 1 guessed wrong (fix_pair.cuh)
 *     pass 2    hot tiles exactly, on top of the cold sums (hot_tiles.cuh); then the quotient, and out
 *
 * Multiprocessors are in different phases at the same time, so what bounds one (products, second-level cache,
 * latency) leaves room for another. The three warps beside the one that feeds have work between the phases: lists of
 * hot tiles, of either half of the unit, which is a ring of its own in pass 2.
 *
 * Shared memory: pass 1's ring, the masks of the verdicts and what rows see; pass 2's two rings lie over all of that.
 * Barriers lie behind. Candidates are in the memory of a slot, of which a block takes a free one: as many as there are
 * multiprocessors, since a block fills one. */
#include "cuda/chain.cuh"
#include "cuda/wgmma/fix_pair.cuh"
#include "cuda/wgmma/hot_tiles.cuh"
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/verdicts.cuh"

template <int D> struct BothShape : ColdRing<D> {
    using Ring = ColdRing<D>;
    using Hot = HotShape<D>;
    static constexpr int HOT_MASK_AT = Ring::RING_BYTES, FIX_MASK_AT = HOT_MASK_AT + MOST_TILES,
                         CANDIDATE_MASK_AT = FIX_MASK_AT + MOST_TILES, APART_MASK_AT = CANDIDATE_MASK_AT + MOST_TILES,
                         ROWS_AT = APART_MASK_AT + MOST_TILES, PASS_1_BYTES = ROWS_AT + COLD_ROWS * 8,
                         PASS_2_BYTES = 2 * Hot::BYTES;
    static constexpr int FULL_AT = PASS_1_BYTES > PASS_2_BYTES ? PASS_1_BYTES : PASS_2_BYTES,
                         FIX_FULL_AT = FULL_AT + Ring::STAGES * 16, HOT_BARRIERS_AT = FIX_FULL_AT + Ring::STAGES * 16;
    static constexpr int SHARED = HOT_BARRIERS_AT + 2 * Hot::BARRIER_BYTES + 1024; /* 1024: to align the start */
    static_assert(FULL_AT % 16 == 0 && HOT_BARRIERS_AT % 16 == 0, "entries are read 16 bytes at a time");
};

#ifdef APA_CUDA_BULK

/* Named barriers; 0 is __syncthreads(), and 1 and 2 are turns. */
constexpr int OWN = 3 /* and 4: among a warpgroup */, PHASE = 5 /* all threads */, FEEDERS = 6,
              SLOT_KNOWN =
                  7 /* and 8, whether there are values that are not finite: the warpgroups wait for one warp */,
              SCANNED = 8, WAITING = COLD_GROUPS * 128 + 32;

/* A free slot, by one thread. What blocks had it before have read all of theirs. */
__device__ __forceinline__ int take_slot(const apa_cuda_job &job)
{
    uint32_t at;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(at));
    for (at %= static_cast<uint32_t>(job.slots); atomicCAS(job.slot_taken + at, 0u, 1u) != 0;)
        at = at + 1 == static_cast<uint32_t>(job.slots) ? 0 : at + 1;
    __threadfence();
    return static_cast<int>(at);
}

__device__ __forceinline__ void leave_slot(const apa_cuda_job &job, int slot)
{
    __threadfence();
    atomicExch(job.slot_taken + slot, 0u);
}

/* ---- the feeding warps ---- */

/* Does some tile hold a value that is not finite? By one warp. */
__device__ __forceinline__ bool some_not_finite(const apa_cuda_job &job, int head, int first_tile, int end_tile)
{
    const uint8_t *poisoned = job.poisoned + static_cast<int64_t>(head) * job.room;
    bool found = false;
#pragma unroll 4
    for (int tile = first_tile + static_cast<int>(threadIdx.x & 31); tile < end_tile; tile += 32)
        found = poisoned[tile] != 0 || found;
    return __any_sync(0xffffffffu, found) != 0;
}

template <int D> __device__ __forceinline__ FixRing<D> fix_ring(uint32_t base)
{
    return {base, base + BothShape<D>::FIX_FULL_AT, BothShape<D>::STAGES};
}

/* One warp: pairs in rising order. */
template <int D, bool BIAS>
__device__ __forceinline__ void feed_fix(const apa_cuda_job &job, int head, uint32_t base, const PairRange &pairs,
                                         const Masks &masks)
{
    const FixRing<D> ring = fix_ring<D>(base);
    const int lane = threadIdx.x & 31;
    int at = 0;
    for (int begin = pairs.first; begin < pairs.end; begin += 32) { /* a lane a pair */
        const uint32_t own = begin + lane < pairs.end ? load_shared_2(masks.fix + (begin + lane) * 2) : 0u;
        for (uint32_t left = __ballot_sync(0xffffffffu, own != 0); left != 0; left &= left - 1) {
            const int from = __ffs(static_cast<int>(left)) - 1, pair = begin + from;
            const uint32_t fix = __shfl_sync(0xffffffffu, own, from);
            if (lane != 0)
                continue;
            const apa_wgmma_pair_fix both =
                apa_wgmma_fix_of_pair(static_cast<uint32_t>(pair), fix, load_shared_2(masks.hot + pair * 2),
                                      load_shared_1(masks.apart + pair * 2));
            push_fix<D, BIAS>(ring, at++, both.now, job, head);
            if (both.then.groups != 0)
                push_fix<D, BIAS>(ring, at++, both.then, job, head);
        }
    }
    if (lane == 0)
        push_fix<D, BIAS>(ring, at, {NO_PAIR, 0}, job, head);
}

/* One warp: the list of a half's hot tiles. Returns its length. */
__device__ __forceinline__ int list_hot(const apa_cuda_job &job, int head, uint32_t *list, int half, int first_tile,
                                        int end_tile, const Masks &masks)
{
    const uint8_t *poisoned = job.poisoned + static_cast<int64_t>(head) * job.room;
    const int lane = threadIdx.x & 31;
    int n = 0;
    for (int base = first_tile; base < end_tile; base += 32) {
        const int tile = base + lane;
        const uint32_t mask = tile < end_tile ? load_shared_1(masks.hot + tile) >> 4 * half & 15 : 0u;
        const uint32_t some = __ballot_sync(0xffffffffu, mask != 0);
        if (mask != 0)
            list[n + __popc(some & ((1u << lane) - 1))] =
                hot_entry(static_cast<uint32_t>(tile), mask, poisoned[tile] != 0);
        n += __popc(some);
    }
    return n;
}

/* One warp. */
template <int D>
__device__ __forceinline__ void feed_hot(const HotRing<D> &ring, const apa_wgmma_maps &maps, const apa_cuda_job &job,
                                         int head, const uint32_t *list, int n)
{
    FeedingWarp<D> warp(ring, maps, job, head);
    for (int base = 0; base < n; base += 32) {
        const int at = base + static_cast<int>(threadIdx.x & 31);
        warp.take(at < n ? __ldcg(list + at) : 0u);
    }
    warp.end(static_cast<uint32_t>(job.tiles));
}

template <int D> __device__ __forceinline__ HotRing<D> hot_ring(uint32_t base, int half)
{
    using S = BothShape<D>;
    return {base + half * HotShape<D>::BYTES, base + S::HOT_BARRIERS_AT + half * HotShape<D>::BARRIER_BYTES};
}

/* ---- the warpgroups ---- */

/* The cold state as one of exact tiles: the frame of raw scores, below the largest one as theirs are. l: of a lane. */
template <int D>
__device__ __forceinline__ void go_over(State16<D, 1> &state, float (&l)[2], const ColdRows<D> &rows,
                                        const float (&shift)[2], bool throughout)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const bool none = throughout || rows.frame[h] == -CUDART_INF_F;
        /* selected, not multiplied by 0: codes of scores beyond the limit may have summed up to NaN */
        const float scale = exp2f(FRAME_OFFSET) / P_RANGE;
        state.X[h] = none ? -CUDART_INF_F : rows.frame[h] + shift[h] - FRAME_OFFSET;
        l[h] = !none && (threadIdx.x & 3) == 0 ? rows.lambda[h] * scale : 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            state.o[0][n][2 * h] = none ? 0.0f : rows.o[n][2 * h] * scale;
            state.o[0][n][2 * h + 1] = none ? 0.0f : rows.o[n][2 * h + 1] * scale;
        }
    }
}

/* ---- the block ---- */

/* What all of a block's threads work on. */
struct Block {
    const apa_cuda_job &job;
    const apa_wgmma_maps &maps;
    apa_cuda_stretch place;
    Unit unit;
    PairRange pairs;
    int first_tile, end_tile;
    uint32_t base; /* of the shared memory */
    Masks masks;
};

/* What its warps tell each other. */
struct BlockNotes {
    int slot, poisoned, hot_count[2];
};

template <int D> __device__ __forceinline__ uint32_t row_table(uint32_t base, int row)
{
    return base + BothShape<D>::ROWS_AT + row * 8;
}

template <int D> __device__ __forceinline__ void set_barriers(uint32_t base)
{
    using S = BothShape<D>;
    for (int i = 0; i < S::STAGES; i++) {
        barrier_init(base + S::FULL_AT + i * 16, 1);
        barrier_init(base + S::FULL_AT + i * 16 + 8, 4 * COLD_GROUPS);
    }
    fix_ring<D>(base).set_barriers();
    for (int half = 0; half < 2; half++) {
        const HotRing<D> ring = hot_ring<D>(base, half);
        for (int i = 0; i < HotShape<D>::SLOTS; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), 4);
        }
    }
    barrier_init_fence();
}

/* Rows of ones, empty masks, barriers. By all threads. */
template <int D> __device__ __forceinline__ void set_up(const Block &block)
{
    using S = BothShape<D>;
    for (int i = 0; i < S::STAGES; i++)
        if (threadIdx.x < 64)
            write_ones(block.base + i * Pair<D>::STAGE + Pair<D>::ONES_AT, threadIdx.x);
    for (int at = block.first_tile / 16 * 16 + static_cast<int>(threadIdx.x) * 16; at < block.end_tile;
         at += S::THREADS * 16) {
        const uint32_t zeros[4] = {0, 0, 0, 0};
        store_shared_16(block.masks.hot + at, zeros);
        store_shared_16(block.masks.fix + at, zeros);
        store_shared_16(block.masks.candidate + at, zeros);
        store_shared_16(block.masks.apart + at, zeros);
    }
    if (threadIdx.x == 0)
        set_barriers<D>(block.base);
    fence_for_async();
    __syncthreads();
}

/* Warp 9 while pass 1 goes on. */
__device__ __forceinline__ void find_out(const Block &block, BlockNotes &notes)
{
    const bool first_lane = (threadIdx.x & 31) == 0;
    if (first_lane)
        notes.slot = take_slot(block.job);
    __syncwarp();
    named_barrier_arrive(SLOT_KNOWN, WAITING);
    const bool poisoned = some_not_finite(block.job, block.unit.head, block.first_tile, block.end_tile);
    if (first_lane)
        notes.poisoned = poisoned;
    __syncwarp();
    named_barrier_arrive(SCANNED, WAITING);
}

/* The four warps that do not multiply. */
template <int D, bool BIAS> __device__ __forceinline__ void feed_block(const Block &block, BlockNotes &notes)
{
    using S = BothShape<D>;
    const apa_cuda_job &job = block.job;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, head = block.unit.head;
    if (warp == 8 && lane == 0)
        feed_pairs<D, BIAS, S>(block.base, job, block.place, block.pairs);
    if (warp == 9)
        find_out(block, notes);
    __syncwarp();
    named_barrier(PHASE, S::THREADS); /* verdicts are there */
    uint32_t *const lists = job.hot_tile + static_cast<int64_t>(notes.slot) * 2 * job.tiles;
    if (warp == 8)
        feed_fix<D, BIAS>(job, head, block.base, block.pairs, block.masks);
    if (warp == 9)
        report(job, block.unit, row_table<D>(block.base, 0), false, block.first_tile, block.end_tile, block.masks);
    if (warp >= 10) {
        const int half = warp - 10;
        const int n =
            list_hot(job, head, lists + half * job.tiles, half, block.first_tile, block.end_tile, block.masks);
        if (lane == 0)
            notes.hot_count[half] = n;
    }
    fence_for_async();
    __syncwarp();
    named_barrier(PHASE, S::THREADS); /* rings are free, lists complete */
    if (warp >= 10)
        return;
    const int half = warp - 8, n = notes.hot_count[half];
    if (n > 0)
        feed_hot<D>(hot_ring<D>(block.base, half), block.maps, job, head, lists + half * job.tiles, n);
    __syncwarp();
    named_barrier(FEEDERS, 64);
    if (threadIdx.x == 256)
        leave_slot(job, notes.slot);
}

/* Pass 1 and what follows from it: a warp's cold sums of all tiles that are not hot. Returns whether its group has none
 * of use. */
template <int D, bool BIAS>
__device__ __forceinline__ bool sum_cold(ColdRows<D> &rows, const Block &block, const BlockNotes &notes, WarpPlace &my)
{
    using S = BothShape<D>;
    const apa_cuda_job &job = block.job;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    uint32_t q[D / 32][4], picks[4];
    float q_unit[2];
    see_rows(my);
    bias_operand(picks, (block.place.row + my.first_row) / job.Sq16);
    load_pair_queries<D>(q, job, block.unit, warp);
    clear(rows);
#pragma unroll
    for (int h = 0; h < 2; h++)
        q_unit[h] = job.q_scale[block.unit.local * APA_CUDA_UNIT + my.first_row + h * 8 + (lane >> 2)];
    named_barrier(SLOT_KNOWN, WAITING);
    CandidatesInLine candidates = {shared_address(&notes.slot), 0};
    walk<D, BIAS, CandidatesInLine, S>(rows, q, picks, q_unit, block.base, my, candidates);
    __syncwarp(); /* what lanes wrote down, others may read */

    const bool throughout = job.all_hot[block.unit.local * APA_CUDA_UNIT_GROUPS + warp] != 0;
    if (!throughout)
        judge<D>(rows, my, notes.slot, candidates.count, block.masks);
    __syncwarp(); /* lanes that settled a candidate each are together again */
    named_barrier(SCANNED, WAITING);
    if (throughout || notes.poisoned != 0) {
        __syncwarp();
        force(job, block.unit.head, warp, my.row_table, throughout, block.first_tile, block.end_tile, block.masks);
    }
    __syncwarp();
    named_barrier(PHASE, S::THREADS);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows.lambda[h] -= rows.held[h];
        rows.held[h] = 0.0f;
    }
    fix_all<D, BIAS>(rows, q, picks, q_unit, fix_ring<D>(block.base), my);
    fence_for_async();
    __syncwarp();
    named_barrier(PHASE, S::THREADS);
    return throughout;
}

/* Pass 2 on top of the cold sums, and the result. */
template <int D, bool BF16>
__device__ __forceinline__ void add_hot(const ColdRows<D> &rows, bool throughout, const Block &block,
                                        const BlockNotes &notes, int first_row)
{
    const apa_cuda_job &job = block.job;
    const int half = first_row / WARPGROUP_ROWS, b = block.unit.head / job.Hkv;
    State16<D, 1> state;
    float l[2], shift[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        shift[h] = job.shift[block.unit.local * APA_CUDA_UNIT + first_row + h * 8 + (threadIdx.x & 31) / 4];
    go_over<D>(state, l, rows, shift, throughout);
    if (notes.hot_count[half] > 0) {
        const HotRing<D> ring = hot_ring<D>(block.base, half);
        load_query_rows<D>(ring.base, job, block.unit, b, half * WARPGROUP_ROWS);
        fence_for_async();
        __syncwarp();
        named_barrier(OWN + half, WARPGROUP);
        HotPlace exact = {job, block.unit, {}, first_row, b, block.unit.head % job.Hkv, OWN + half};
        {
            ThreadRows<1> seen;
            exact.view = warp_rows<1>(job, block.unit, first_row, seen);
        }
        consume<D, BF16>(state, l, ring, exact);
    }
    join_sums(state, l);
    store_result<D, 1>(state, job, block.unit, b, first_row);
}

#endif

template <int D, bool BIAS, bool BF16>
static __global__ void __launch_bounds__(BothShape<D>::THREADS, 1)
    wgmma_both_kernel(const __grid_constant__ apa_cuda_job job, const __grid_constant__ apa_wgmma_maps maps)
{
#ifdef APA_CUDA_BULK
    using S = BothShape<D>;
    chain_go();
    extern __shared__ uint8_t shared[];
    __shared__ BlockNotes notes;
    const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    const int warp = threadIdx.x / 32;
    const apa_cuda_stretch place = apa_cuda_stretch_of(&job, blockIdx.x, gridDim.x, COLD_ROWS);
    const bool early = apa_cuda_is_early(&job, place.row, COLD_ROWS) != 0; /* the exact kernel has them */
    if (early && job.counts == nullptr && job.verdicts == nullptr) {
        chain_wait();
        return;
    }
    const PairRange pairs = block_pairs(job, place);
    const Block block = {
        job,
        maps,
        place,
        unit_of_row(job, place, place.row),
        pairs,
        pairs.first * 2,
        min(pairs.end * 2, job.tiles),
        base,
        {base + S::HOT_MASK_AT, base + S::FIX_MASK_AT, base + S::CANDIDATE_MASK_AT, base + S::APART_MASK_AT}};
    const int first_row = warp % 8 * 16;
    WarpPlace my = {job, block.unit, first_row, row_table<D>(base, first_row), pairs, {0, 0}};
    if (early) {
        chain_wait();
        if (warp < 8)
            see_rows(my);
        __syncthreads();
        if (warp == 9)
            report(job, block.unit, row_table<D>(base, 0), true, block.first_tile, block.end_tile, block.masks);
        return;
    }
    set_up<D>(block);
    chain_wait();
    if (warp >= 8) {
        give_registers<COLD_PRODUCER_REGISTERS>();
        feed_block<D, BIAS>(block, notes);
        return;
    }
    take_registers<COLD_CONSUMER_REGISTERS>();
    ColdRows<D> rows;
    const bool throughout = sum_cold<D, BIAS>(rows, block, notes, my);
    add_hot<D, BF16>(rows, throughout, block, notes, first_row);
#endif
}

template <int D, bool BIAS, bool BF16>
static int launch(const apa_cuda_job *job, const apa_wgmma_maps *maps, cudaStream_t stream)
{
    using S = BothShape<D>;
    const cudaError_t error =
        cudaFuncSetAttribute(wgmma_both_kernel<D, BIAS, BF16>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    return error != cudaSuccess
               ? error
               : launch_chained(job->chained, wgmma_both_kernel<D, BIAS, BF16>, apa_wgmma_cold_blocks(job), S::THREADS,
                                S::SHARED, stream, *job, *maps);
}

template <int D> static int launch(const apa_cuda_job *job, const apa_wgmma_maps *maps, cudaStream_t stream)
{
    if (job->smooth_q)
        return job->bf16 ? launch<D, true, true>(job, maps, stream) : launch<D, true, false>(job, maps, stream);
    return job->bf16 ? launch<D, false, true>(job, maps, stream) : launch<D, false, false>(job, maps, stream);
}

extern "C" int64_t apa_wgmma_most_tiles_of_both(void)
{
    return MOST_TILES;
}

extern "C" int apa_wgmma_launch_both(const apa_cuda_job *job, const apa_wgmma_maps *maps, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    if (job->unit_count == 0)
        return cudaSuccess;
    return job->D == 64 ? launch<64>(job, maps, stream) : launch<128>(job, maps, stream);
}
