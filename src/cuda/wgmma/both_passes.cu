/* Both passes of a block's rows in one block, for calls with so many units that none is split: nothing is kept of them
 * in memory but their candidates.
 *
 *     pass 1    all tiles in E4M3 (cold_walk.cuh)
 *     verdicts  λ is complete: each warp looks through its candidates (verdicts.cuh)
 *     fix       what pass 1 guessed wrong (fix_pair.cuh)
 *     pass 2    hot tiles exactly, on top of the cold sums (hot_tiles.cuh); then the quotient, and out
 *
 * Multiprocessors are in different phases at the same time, so what bounds one (products, second-level cache,
 * latency) leaves room for another. The three warps beside the one that feeds have work between the phases: lists of
 * hot tiles, of each warpgroup, which has a ring of its own in pass 2.
 *
 * Two warpgroups take 128 rows. At D = 64, where registers are left, and in calls of many blocks, three take 192: there
 * a step waits for what depends on what, and a third one fills that. A warpgroup's rows lie in one unit, which may have
 * gone to the exact kernel (rows of few tiles), or be of no batch: it takes part then, and writes nothing.
 *
 * Shared memory: pass 1's ring and the masks of the verdicts; pass 2's rings lie over all of that. Barriers lie behind,
 * and what rows see. Candidates are in the memory of a slot, of which a block takes a free one: as many as there are
 * multiprocessors, since a block fills one. */
#include "cuda/chain.cuh"
#include "cuda/wgmma/fix_pair.cuh"
#include "cuda/wgmma/hot_tiles.cuh"
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/verdicts.cuh"

/* Where a warpgroup has its queries in pass 1. */
template <int WARPGROUPS> struct QueriesOf {
    using Type = QueriesInRegisters;
};
template <> struct QueriesOf<3> {
    using Type = QueriesInShared;
};

template <int D, int WARPGROUPS> struct BothShape : ColdRing<D, WARPGROUPS> {
    using Ring = ColdRing<D, WARPGROUPS>;
    using Hot = HotShape<D>;
    using Ring::GROUPS;
    static constexpr bool SHARES_QUERIES = GROUPS == 3;
    using Queries = typename QueriesOf<GROUPS>::Type;
    static constexpr int MASK_BYTES = MOST_TILES * (GROUPS == 2 ? 1 : 2);
    static constexpr int HOT_MASK_AT = Ring::RING_BYTES, FIX_MASK_AT = HOT_MASK_AT + MASK_BYTES,
                         CANDIDATE_MASK_AT = FIX_MASK_AT + MASK_BYTES, APART_MASK_AT = CANDIDATE_MASK_AT + MASK_BYTES,
                         QUERIES_AT = APART_MASK_AT + MASK_BYTES,
                         PASS_1_BYTES = QUERIES_AT + (SHARES_QUERIES ? Ring::ROWS * 128 : 0),
                         PASS_2_BYTES = GROUPS * Hot::BYTES;
    static constexpr int FULL_AT = PASS_1_BYTES > PASS_2_BYTES ? PASS_1_BYTES : PASS_2_BYTES,
                         FIX_FULL_AT = FULL_AT + Ring::STAGES * 16, HOT_BARRIERS_AT = FIX_FULL_AT + Ring::STAGES * 16,
                         ROWS_AT = HOT_BARRIERS_AT + GROUPS * Hot::BARRIER_BYTES;
    static constexpr int SHARED = ROWS_AT + Ring::ROWS * ROW_ENTRY + 1024; /* 1024: to align the start */
    static_assert(FULL_AT % 16 == 0 && HOT_BARRIERS_AT % 16 == 0, "entries are read 16 bytes at a time");
    static_assert(!SHARES_QUERIES || QUERIES_AT % 1024 == 0, "queries are swizzled");
    static constexpr int WAITING = Ring::WARPS * 32 + 32; /* the warpgroups, for one warp more */
    /* the warps that do not multiply: one feeds pass 1 and corrections, one finds things out; of each warpgroup one
     * lists its hot tiles and brings them */
    static constexpr int FEED = Ring::WARPS, FIND_OUT = FEED + 1, LIST = FEED + 4 - GROUPS;
};

#ifdef APA_CUDA_BULK

/* Named barriers; 0 is __syncthreads(). */
constexpr int OWN = 3 /* to 5: among a warpgroup */, PHASE = 6 /* all threads */, FEEDERS = 7, SLOT_KNOWN = 8,
              SCANNED = 9 /* whether there are values that are not finite */;

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

template <int D, int GROUPS> __device__ __forceinline__ FixRing<D> fix_ring(uint32_t base)
{
    using S = BothShape<D, GROUPS>;
    return {base, base + S::FIX_FULL_AT, S::STAGES, S::WARPS};
}

/* One warp: pairs in rising order. */
template <int D, int GROUPS, bool BIAS>
__device__ __forceinline__ void feed_fix(const apa_cuda_job &job, int head, uint32_t base, const PairRange &pairs,
                                         const Masks<GROUPS> &masks)
{
    using M = Masks<GROUPS>;
    const FixRing<D> ring = fix_ring<D, GROUPS>(base);
    const int lane = threadIdx.x & 31;
    int at = 0;
    for (int begin = pairs.first; begin < pairs.end; begin += 32) { /* a lane a pair */
        const uint32_t own = begin + lane < pairs.end ? M::of_pair(masks.fix, begin + lane) : 0u;
        for (uint32_t left = __ballot_sync(0xffffffffu, own != 0); left != 0; left &= left - 1) {
            const int from = __ffs(static_cast<int>(left)) - 1, pair = begin + from;
            const uint32_t fix = __shfl_sync(0xffffffffu, own, from), hot = M::of_pair(masks.hot, pair);
            if (lane != 0)
                continue;
            const apa_wgmma_pair_fix both =
                apa_wgmma_fix_of_pair(static_cast<uint32_t>(pair), fix & M::ENTRY, fix >> M::SECOND & M::ENTRY,
                                      hot & M::ENTRY, hot >> M::SECOND & M::ENTRY, M::of_tile(masks.apart, 2 * pair));
            push_fix<D, BIAS>(ring, at++, both.now, job, head);
            if ((both.then.first | both.then.second) != 0)
                push_fix<D, BIAS>(ring, at++, both.then, job, head);
        }
    }
    if (lane == 0)
        push_fix<D, BIAS>(ring, at, {NO_PAIR, 0, 0, 0}, job, head);
}

/* What a warpgroup wants soon, on its way to the second-level cache: its queries. By one warp. */
template <int D> __device__ __forceinline__ void fetch_queries(const apa_cuda_job &job, const Unit &unit, int first)
{
    for (int r = threadIdx.x & 31; r < WARPGROUP_ROWS; r += 32) {
        const Row row = row_of(job, unit, first + r);
        const uint16_t *from = row_pointer<uint16_t>(job.q, unit.head / job.Hkv, row.head, row.position);
#pragma unroll
        for (int line = 0; row.real && line < D * 2 / 128; line++)
            prefetch_line(from + line * 64);
    }
}

/* ... and what it needs of its rows behind pass 1: log2 units between the frames of both passes, a line for 32 rows,
 * and what is hot throughout. */
template <int GROUPS>
__device__ __forceinline__ void fetch_notes(const apa_cuda_job &job, const apa_cuda_stretch &place)
{
    const int lane = threadIdx.x & 31;
    if (lane >= GROUPS * WARPGROUP_ROWS / 32)
        return;
    const Unit unit = unit_of_row(job, place, place.row + lane * 32);
    if (!is_there(job, unit))
        return;
    prefetch_line(job.shift + unit.local * APA_CUDA_UNIT + (place.row + lane * 32) % APA_CUDA_UNIT);
    prefetch_line(job.all_hot + unit.local * APA_CUDA_UNIT_GROUPS);
}

/* One warp: the list of a warpgroup's hot tiles, its first entries in shared memory too. Returns its length. some_are:
 * some tile of the block's holds a value that is not finite. */
template <int GROUPS>
__device__ __forceinline__ int list_hot(const apa_cuda_job &job, int head, uint32_t *list, uint32_t *first, int group,
                                        int first_tile, int end_tile, bool some_are, const Masks<GROUPS> &masks)
{
    const uint8_t *poisoned = job.poisoned + static_cast<int64_t>(head) * job.room;
    const int lane = threadIdx.x & 31;
    int n = 0;
    for (int base = first_tile; base < end_tile; base += 32) {
        const int tile = base + lane;
        const uint32_t mask = tile < end_tile ? Masks<GROUPS>::of_tile(masks.hot, tile) >> 4 * group & 15 : 0u;
        const uint32_t some = __ballot_sync(0xffffffffu, mask != 0);
        if (mask != 0) {
            const uint32_t entry = hot_entry(static_cast<uint32_t>(tile), mask, some_are && poisoned[tile] != 0);
            const int at = n + __popc(some & ((1u << lane) - 1));
            list[at] = entry;
            if (at < 32)
                first[at] = entry;
        }
        n += __popc(some);
    }
    return n;
}

/* One warp. */
template <int D>
__device__ __forceinline__ void feed_hot(const HotRing<D> &ring, const apa_wgmma_maps &maps, const apa_cuda_job &job,
                                         int head, const uint32_t *list, const uint32_t *first, int n)
{
    FeedingWarp<D> warp(ring, maps, job, head);
    for (int base = 0; base < n; base += 32) {
        const int at = base + static_cast<int>(threadIdx.x & 31);
        warp.take(at >= n ? 0u : base == 0 ? first[at] : __ldcg(list + at));
    }
    warp.end(static_cast<uint32_t>(job.tiles));
}

template <int D, int GROUPS> __device__ __forceinline__ HotRing<D> hot_ring(uint32_t base, int group)
{
    using S = BothShape<D, GROUPS>;
    return {base + group * HotShape<D>::BYTES, base + S::HOT_BARRIERS_AT + group * HotShape<D>::BARRIER_BYTES};
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
template <int GROUPS> struct Block {
    const apa_cuda_job &job;
    const apa_wgmma_maps &maps;
    apa_cuda_stretch place;
    PairRange pairs;
    int first_tile, end_tile;
    uint32_t base; /* of the shared memory */
    Masks<GROUPS> masks;

    /* Is the warpgroup's unit one of the batch, and not the exact kernel's? */
    __device__ bool writes(const Unit &unit) const
    {
        return is_there(job, unit) && !is_early(job, unit);
    }
};

/* What its warps tell each other. */
template <int GROUPS> struct BlockNotes {
    apa_cuda_stretch place; /* for what comes after pass 1: no register holds it meanwhile */
    int slot, poisoned, hot_count[GROUPS];
    uint32_t hot_first[GROUPS][32]; /* the beginnings of the lists */
    WholeKeys whole[GROUPS * 4];    /* of each warp's rows */
};

template <int D, int GROUPS> __device__ __forceinline__ uint32_t row_table(uint32_t base, int row)
{
    return base + BothShape<D, GROUPS>::ROWS_AT + row * ROW_ENTRY;
}

template <int D, int GROUPS> __device__ __forceinline__ void set_barriers(uint32_t base)
{
    using S = BothShape<D, GROUPS>;
    for (int i = 0; i < S::STAGES; i++) {
        barrier_init(base + S::FULL_AT + i * 16, 1);
        barrier_init(base + S::FULL_AT + i * 16 + 8, S::WARPS);
    }
    fix_ring<D, GROUPS>(base).set_barriers();
    for (int group = 0; group < GROUPS; group++) {
        const HotRing<D> ring = hot_ring<D, GROUPS>(base, group);
        for (int i = 0; i < HotShape<D>::SLOTS; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), 4);
        }
    }
    barrier_init_fence();
}

/* Rows of ones, empty masks, barriers, the block's place. By all threads. */
template <int D, int GROUPS>
__device__ __forceinline__ void set_up(const Block<GROUPS> &block, BlockNotes<GROUPS> &notes)
{
    using S = BothShape<D, GROUPS>;
    constexpr int BYTES = Masks<GROUPS>::BYTES;
    for (int i = 0; i < S::STAGES; i++)
        if (threadIdx.x < 64)
            write_ones(block.base + i * Pair<D>::STAGE + Pair<D>::ONES_AT, threadIdx.x);
    for (int at = block.first_tile * BYTES / 16 * 16 + static_cast<int>(threadIdx.x) * 16; at < block.end_tile * BYTES;
         at += S::THREADS * 16) {
        const uint32_t zeros[4] = {0, 0, 0, 0};
        store_shared_16(block.masks.hot + at, zeros);
        store_shared_16(block.masks.fix + at, zeros);
        store_shared_16(block.masks.candidate + at, zeros);
        store_shared_16(block.masks.apart + at, zeros);
    }
    if (threadIdx.x == 0) {
        set_barriers<D, GROUPS>(block.base);
        notes.place = block.place;
    }
    fence_for_async();
    __syncthreads();
}

/* One warp, while pass 1 goes on. */
template <int D, int GROUPS>
__device__ __forceinline__ void find_out(const Block<GROUPS> &block, BlockNotes<GROUPS> &notes)
{
    using S = BothShape<D, GROUPS>;
    const bool first_lane = (threadIdx.x & 31) == 0;
    if (first_lane)
        notes.slot = take_slot(block.job);
    __syncwarp();
    named_barrier_arrive(SLOT_KNOWN, S::WAITING);
    fetch_notes<GROUPS>(block.job, block.place);
    const bool poisoned = some_not_finite(block.job, block.place.head, block.first_tile, block.end_tile);
    if (first_lane)
        notes.poisoned = poisoned;
    __syncwarp();
    named_barrier_arrive(SCANNED, S::WAITING);
}

/* One warp: a warpgroup's list, and its queries on their way. */
template <int D, int GROUPS>
__device__ __forceinline__ void prepare_hot(const Block<GROUPS> &block, BlockNotes<GROUPS> &notes, uint32_t *list,
                                            int group)
{
    const int row = block.place.row + group * WARPGROUP_ROWS;
    const Unit unit = unit_of_row(block.job, block.place, row);
    int n = 0;
    if (block.writes(unit))
        n = list_hot(block.job, block.place.head, list, notes.hot_first[group], group, block.first_tile, block.end_tile,
                     notes.poisoned != 0, block.masks);
    if ((threadIdx.x & 31) == 0)
        notes.hot_count[group] = n;
    if (n > 0)
        fetch_queries<D>(block.job, unit, row % APA_CUDA_UNIT);
}

/* The four warps that do not multiply. */
template <int D, int GROUPS, bool BIAS>
__device__ __forceinline__ void feed_block(const Block<GROUPS> &block, BlockNotes<GROUPS> &notes)
{
    using S = BothShape<D, GROUPS>;
    const apa_cuda_job &job = block.job;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, head = block.place.head, group = warp - S::LIST;
    if (warp == S::FEED && lane == 0)
        feed_pairs<D, BIAS, S>(block.base, job, block.place, block.pairs);
    if (warp == S::FIND_OUT)
        find_out<D>(block, notes);
    __syncwarp();
    named_barrier_anywhere(PHASE, S::THREADS); /* verdicts are there */
    uint32_t *const list = job.hot_tile + (static_cast<int64_t>(notes.slot) * GROUPS + max(group, 0)) * job.tiles;
    if (warp == S::FEED)
        feed_fix<D, GROUPS, BIAS>(job, head, block.base, block.pairs, block.masks);
    if (warp == S::FIND_OUT)
        report<GROUPS>(job, block.place, row_table<D, GROUPS>(block.base, 0), false, block.first_tile, block.end_tile,
                       block.masks);
    if (group >= 0)
        prepare_hot<D>(block, notes, list, group);
    fence_for_async();
    __syncwarp();
    named_barrier_anywhere(PHASE, S::THREADS); /* rings are free, lists complete */
    if (group < 0)
        return;
    const int n = notes.hot_count[group];
    if (n > 0)
        feed_hot<D>(hot_ring<D, GROUPS>(block.base, group), block.maps, job, head, list, notes.hot_first[group], n);
    __syncwarp();
    named_barrier_anywhere(FEEDERS, GROUPS * 32);
    if (group == 0 && lane == 0)
        leave_slot(job, notes.slot);
}

/* ... where they are to be for the walk. */
template <int D, int GROUPS>
__device__ __forceinline__ void place_queries(QueriesInRegisters &queries, const Block<GROUPS> &block,
                                              const WarpPlace &my, bool writes)
{
    load_pair_queries(queries.q, block.job, my.unit, my.first_row / 16, writes);
    bias_operand(queries.picks, (block.place.row + own_group() * 16) / block.job.Sq16);
}

template <int D, int GROUPS>
__device__ __forceinline__ void place_queries(QueriesInShared &queries, const Block<GROUPS> &block, const WarpPlace &my,
                                              bool writes)
{
    const int group = own_group() / 4;
    uint32_t q[SCORE_STEPS][4];
    queries.at = block.base + BothShape<D, GROUPS>::QUERIES_AT + group * WARPGROUP_ROWS * 128;
    load_pair_queries(q, block.job, my.unit, my.first_row / 16, writes);
    share_pair_queries(queries.at, q);
    fence_for_async();
    __syncwarp();
    named_barrier(OWN + group, WARPGROUP);
}

/* Pass 1 and what follows from it: a warp's cold sums of all tiles that are not hot. Returns whether its group has none
 * of use. */
template <int D, int GROUPS, bool BIAS>
__device__ __forceinline__ bool sum_cold(ColdRows<D> &rows, const Block<GROUPS> &block, BlockNotes<GROUPS> &notes,
                                         WarpPlace &my)
{
    using S = BothShape<D, GROUPS>;
    const apa_cuda_job &job = block.job;
    const int lane = threadIdx.x & 31;
    const bool writes = block.writes(my.unit);
    typename S::Queries queries;
    float q_unit[2] = {0.0f, 0.0f};
    const WholeKeys whole = see_rows(my, is_there(job, my.unit));
    if (lane == 0)
        notes.whole[own_group()] = whole;
    place_queries<D, GROUPS>(queries, block, my, writes);
    clear(rows);
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (writes)
            q_unit[h] = job.q_scale[my.unit.local * APA_CUDA_UNIT + my.first_row + h * 8 + (lane >> 2)];
    named_barrier_anywhere(SLOT_KNOWN, S::WAITING);
    CandidatesInLine<GROUPS> candidates = {shared_address(&notes.slot), 0};
    walk<D, BIAS, typename S::Queries, CandidatesInLine<GROUPS>, S>(rows, queries, q_unit, block.base, my, candidates);
    __syncwarp(); /* what lanes wrote down, others may read */

    const bool throughout = !writes || job.all_hot[my.unit.local * APA_CUDA_UNIT_GROUPS + my.first_row / 16] != 0;
    if (!throughout)
        judge<D>(rows, my, notes.slot, candidates.count, block.masks);
    __syncwarp(); /* lanes that settled a candidate each are together again */
    named_barrier_anywhere(SCANNED, S::WAITING);
    if (throughout || notes.poisoned != 0) {
        __syncwarp();
        force(job, block.place.head, own_group(), my.row_table, throughout, block.first_tile, block.end_tile,
              block.masks);
    }
    __syncwarp();
    named_barrier_anywhere(PHASE, S::THREADS);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows.lambda[h] -= rows.held[h];
        rows.held[h] = 0.0f;
    }
    fix_all<D, BIAS>(rows, queries, q_unit, fix_ring<D, GROUPS>(block.base), my);
    fence_for_async();
    __syncwarp();
    named_barrier_anywhere(PHASE, S::THREADS);
    return throughout;
}

/* Pass 2 on top of the cold sums, and the result. */
template <int D, int GROUPS, bool BF16>
__device__ __forceinline__ void add_hot(const ColdRows<D> &rows, bool throughout, const Block<GROUPS> &block,
                                        const BlockNotes<GROUPS> &notes)
{
    const apa_cuda_job &job = block.job;
    const int group = own_group() / 4, line = notes.place.row + own_group() * 16, first_row = line % APA_CUDA_UNIT;
    const Unit unit = unit_of_row(job, notes.place, line);
    if (!block.writes(unit))
        return;
    const int b = unit.head / job.Hkv;
    const HotRing<D> ring = hot_ring<D, GROUPS>(block.base, group);
    const bool some_hot = notes.hot_count[group] > 0;
    if (some_hot)
        ask_for_queries<D>(ring.base, job, b, lane_row(job, unit, first_row));
    State16<D, 1> state;
    float l[2], shift[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        shift[h] = job.shift[unit.local * APA_CUDA_UNIT + first_row + h * 8 + (threadIdx.x & 31) / 4];
    go_over<D>(state, l, rows, shift, throughout);
    if (some_hot) {
        queries_there<D>(ring.base, job);
        __syncwarp();
        named_barrier(OWN + group, WARPGROUP);
        const uint32_t table = row_table<D, GROUPS>(block.base, own_group() * 16);
        const HotPlace exact = {job, notes.whole[own_group()], table, b, unit.head % job.Hkv, OWN + group};
        consume<D, BF16>(state, l, ring, exact);
        __syncwarp();
        named_barrier(OWN + group, WARPGROUP); /* no warp of it reads queries any more */
    }
    join_sums(state, l);
    int line_again = line;
    asm volatile("" : "+r"(line_again)); /* so that nothing of it lives through pass 2 in registers */
    const Unit same = unit_of_row(job, notes.place, line_again);
    const Row row = lane_row(job, same, line_again % APA_CUDA_UNIT);
    store_lane_rows<D>(state, job, same, b, line_again % APA_CUDA_UNIT, row, ring.base + own_group() % 4 * 16 * D * 2);
}

#endif

template <int D, int GROUPS, bool BIAS, bool BF16>
static __global__ void __launch_bounds__(BothShape<D, GROUPS>::THREADS, 1)
    wgmma_both_kernel(const __grid_constant__ apa_cuda_job job, const __grid_constant__ apa_wgmma_maps maps)
{
#ifdef APA_CUDA_BULK
    using S = BothShape<D, GROUPS>;
    constexpr int MOST_SHARED = 227 * 1024, ELSEWHERE = 64; /* block_pairs(), eps_place() */
    static_assert(S::SHARED + sizeof(BlockNotes<GROUPS>) + ELSEWHERE <= MOST_SHARED, "a block's shared memory");
    chain_go();
    extern __shared__ uint8_t shared[];
    __shared__ BlockNotes<GROUPS> notes;
    const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    const int warp = threadIdx.x / 32, group = warp % S::WARPS;
    const apa_cuda_stretch place = apa_cuda_stretch_of(&job, blockIdx.x, gridDim.x, S::ROWS);
    const bool early = apa_cuda_in_early_units(&job, place.row, S::ROWS) != 0; /* the exact kernel has them */
    if (early && job.counts == nullptr && job.verdicts == nullptr) {
        chain_wait();
        return;
    }
    const PairRange pairs = block_pairs<GROUPS>(job, place);
    const Block<GROUPS> block = {
        job,
        maps,
        place,
        pairs,
        pairs.first * 2,
        min(pairs.end * 2, job.tiles),
        base,
        {base + S::HOT_MASK_AT, base + S::FIX_MASK_AT, base + S::CANDIDATE_MASK_AT, base + S::APART_MASK_AT}};
    const int row = place.row + group * 16;
    const Unit unit = unit_of_row(job, place, row);
    WarpPlace my = {job, unit, row % APA_CUDA_UNIT, row_table<D, GROUPS>(base, group * 16), pairs, {0, 0}, 0};
    if (early) {
        chain_wait();
        if (warp < S::WARPS)
            see_rows(my, is_there(job, unit));
        __syncthreads();
        if (warp == S::FIND_OUT)
            report<GROUPS>(job, place, row_table<D, GROUPS>(base, 0), true, block.first_tile, block.end_tile,
                           block.masks);
        return;
    }
    set_up<D>(block, notes);
    chain_wait();
    if (warp >= S::WARPS) {
        give_registers<S::PRODUCER_REGISTERS>();
        feed_block<D, GROUPS, BIAS>(block, notes);
        return;
    }
    take_registers<S::CONSUMER_REGISTERS>();
    ColdRows<D> rows;
    const bool throughout = sum_cold<D, GROUPS, BIAS>(rows, block, notes, my);
    add_hot<D, GROUPS, BF16>(rows, throughout, block, notes);
#endif
}

template <int D, int GROUPS, bool BIAS, bool BF16>
static int launch(const apa_cuda_job *job, const apa_wgmma_maps *maps, cudaStream_t stream)
{
    using S = BothShape<D, GROUPS>;
    const auto kernel = wgmma_both_kernel<D, GROUPS, BIAS, BF16>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    return error != cudaSuccess ? error
                                : launch_chained(job->chained, kernel, apa_cuda_stretches(job, S::ROWS), S::THREADS,
                                                 S::SHARED, stream, *job, *maps);
}

template <int D, int GROUPS, bool BIAS>
static int launch(const apa_cuda_job *job, const apa_wgmma_maps *maps, cudaStream_t stream)
{
    return job->bf16 ? launch<D, GROUPS, BIAS, true>(job, maps, stream)
                     : launch<D, GROUPS, BIAS, false>(job, maps, stream);
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
    if (job->D == 64)
        return job->wide ? launch<64, 3, false>(job, maps, stream) : launch<64, 2, false>(job, maps, stream);
    return job->smooth_q ? launch<128, 2, true>(job, maps, stream) : launch<128, 2, false>(job, maps, stream);
}
