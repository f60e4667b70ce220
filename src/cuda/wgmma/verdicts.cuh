/* Verdicts of a block's rows within that block (both_passes.cu): candidates as the walk writes them down, masks in
 * shared memory of what is hot and what was guessed wrong, and what callers ask for beside the result, out of these
 * masks. */
#ifndef APA_CUDA_WGMMA_VERDICTS_CUH
#define APA_CUDA_WGMMA_VERDICTS_CUH

#include "cuda/wgmma/cold_walk.cuh"

constexpr int MOST_TILES = 8192; /* of the masks: a bit a group */

#ifdef APA_CUDA_BULK

/* Where the candidates of a block's group begin, in pairs. */
template <int GROUPS> __device__ __forceinline__ int64_t first_candidate(const apa_cuda_job &job, int slot, int group)
{
    return (static_cast<int64_t>(slot) * (GROUPS * 4) + group) * ((job.tiles + 1) / 2);
}

/* Numbers in the order of floats. */
__device__ __forceinline__ int in_order(float x)
{
    const int bits = __float_as_int(x);
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

/* A pair written down: its number, how pass 1 took it, and the largest mass that some row has in one of its tiles, by
 * which most are told to be cold without a look at the others. */
struct Candidate {
    static constexpr uint32_t HELD = 1u << 31, APART = 1u << 30, NUMBER = APART - 1;
    uint32_t pair;
    int most;
};

/* Candidates one after the other, as the walk comes by them. */
template <int GROUPS> struct CandidatesInLine {
    uint32_t slot; /* where the block's slot stands in shared memory */
    int count;

    __device__ void write(const Note &note, const WarpPlace &my, int number)
    {
        const int64_t at = first_candidate<GROUPS>(my.job, static_cast<int>(load_shared_4(slot)), own_group()) + count;
        const int most = __reduce_max_sync(0xffffffffu, in_order(note.mass));
        my.job.mass[at * 32 + (threadIdx.x & 31)] = note.mass;
        if ((threadIdx.x & 31) == 0) {
            const uint32_t pair = static_cast<uint32_t>(number) | (note.held ? Candidate::HELD : 0u) |
                                  (note.apart ? Candidate::APART : 0u);
            reinterpret_cast<uint2 *>(my.job.candidate_pair)[at] = make_uint2(pair, static_cast<uint32_t>(most));
        }
        count++;
    }
};

/* Masks of verdicts: entry t of each array is tile t, bit g group g of the block. An entry has a byte for the eight
 * groups of two warpgroups, two bytes for those of three. */
template <int GROUPS> struct Masks {
    static constexpr int BYTES = GROUPS == 2 ? 1 : 2, SECOND = 8 * BYTES, IN_WORD = 4 / BYTES;
    static constexpr uint32_t ENTRY = (1u << SECOND) - 1;
    uint32_t hot, fix, candidate, apart; /* addresses; apart: of a pair, in the entry of its first tile */

    __device__ static uint32_t word(uint32_t mask, int tile)
    {
        return mask + tile / IN_WORD * 4;
    }
    __device__ static int shift(int tile, int group)
    {
        return tile % IN_WORD * SECOND + group;
    }
    __device__ void set(uint32_t mask, int tile, int group) const
    {
        or_shared(word(mask, tile), 1u << shift(tile, group));
    }
    /* of a pair's two tiles, as bits 0 and SECOND say */
    __device__ void set_two(uint32_t mask, int pair, uint32_t two, int group) const
    {
        if (two != 0)
            or_shared(word(mask, 2 * pair), two << shift(2 * pair, group));
    }
    __device__ void clear(uint32_t mask, int tile, int group) const
    {
        and_shared(word(mask, tile), ~(1u << shift(tile, group)));
    }
    __device__ static uint32_t of_tile(uint32_t mask, int tile)
    {
        return BYTES == 1 ? load_shared_1(mask + tile) : load_shared_2(mask + tile * 2);
    }
    /* of a pair's first tile, and << SECOND of its second one */
    __device__ static uint32_t of_pair(uint32_t mask, int pair)
    {
        return BYTES == 1 ? load_shared_2(mask + pair * 2) : load_shared_4(mask + pair * 4);
    }
};

/* A candidate's verdict: which of its tiles are hot (bits of lanes whose row's mass says so). */
template <int GROUPS>
__device__ __forceinline__ void settle(uint32_t pair, uint32_t hot_lanes, int end_key, int group,
                                       const Masks<GROUPS> &masks)
{
    constexpr uint32_t SECOND = 1u << Masks<GROUPS>::SECOND, BOTH = SECOND | 1u;
    const int number = static_cast<int>(pair & Candidate::NUMBER);
    const uint32_t seen = number * PAIR_KEYS + APA_CUDA_TILE < end_key ? BOTH : 1u;
    const uint32_t hot = ((hot_lanes & 0x55555555u) != 0 ? 1u : 0u) | ((hot_lanes & 0xaaaaaaaau) != 0 ? SECOND : 0u);
    masks.set_two(masks.candidate, number, seen, group);
    masks.set_two(masks.hot, number, hot & seen, group);
    /* also where a tile has no mass in its pair's frame: it is to have its own */
    masks.set_two(masks.fix, number, (hot ^ ((pair & Candidate::HELD) != 0 ? BOTH : 0u)) & seen, group);
    masks.set_two(masks.apart, number, (pair & Candidate::APART) != 0 ? 1u : 0u, group);
}

constexpr int AT_ONCE = 8; /* candidates whose masses are read together */

/* The warp's candidates against its rows' complete λ. */
template <int D, int GROUPS>
__device__ __forceinline__ void judge(const ColdRows<D> &rows, const WarpPlace &my, int slot, int n,
                                      const Masks<GROUPS> &masks)
{
    const apa_cuda_job &job = my.job;
    const int lane = threadIdx.x & 31, group = own_group();
    const int64_t first = first_candidate<GROUPS>(job, slot, group);
    const uint2 *const candidates = reinterpret_cast<const uint2 *>(job.candidate_pair) + first;
    uint2 ahead = lane < n ? __ldcg(candidates + lane) : make_uint2(0, 0);
    ThreadRows<1> seen;
    load_rows(seen, my.row_table);
    const int end_key = __reduce_max_sync(0xffffffffu, max(seen.end[0], seen.end[1]));
    const float lambda = mass_h() == 0 ? rows.lambda[0] : rows.lambda[1],
                frame = mass_h() == 0 ? rows.frame[0] : rows.frame[1];
    /* padding has no say, nor has a row that sees nothing */
    const bool judges = mass_h() == 0 ? seen.first[0] < seen.end[0] : seen.first[1] < seen.end[1];
    const float least = judges && lambda > 0.0f
                            ? frame + log2f(lambda) - LOG2_P_RANGE + group_log2_eps(job, my.most_tiles)
                            : CUDART_INF_F;
    const int least_of_all = __reduce_min_sync(0xffffffffu, in_order(least));
    for (int base = 0; base < n; base += 32) { /* a lane a candidate */
        const bool there = base + lane < n;
        const uint2 own = ahead;
        if (base + 32 + lane < n)
            ahead = __ldcg(candidates + base + 32 + lane);
        uint32_t hot_lanes = 0;
        uint32_t left = __ballot_sync(0xffffffffu, there && static_cast<int>(own.y) > least_of_all);
        while (left != 0) {
            float mass[AT_ONCE];
            int from[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                from[i] = __ffs(static_cast<int>(left)) - 1; /* -1: no more */
                mass[i] = -CUDART_INF_F;
                if (left != 0)
                    mass[i] = __ldcg(job.mass + (first + base + from[i]) * 32 + lane);
                left &= left - 1;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const uint32_t hot = __ballot_sync(0xffffffffu, mass[i] > least);
                hot_lanes = lane == from[i] ? hot : hot_lanes;
            }
        }
        if (there)
            settle(own.x, hot_lanes, end_key, group, masks);
    }
}

/* How many rows of a warp see the tile, by one thread. */
__device__ __forceinline__ int rows_that_see(uint32_t row_table, int tile)
{
    int n = 0;
    for (int r = 0; r < 16; r++) {
        const int first = static_cast<int>(load_shared_4(row_table + r * ROW_ENTRY)),
                  end = static_cast<int>(load_shared_4(row_table + r * ROW_ENTRY + 4));
        n += first < min(end, (tile + 1) * APA_CUDA_TILE) && end > tile * APA_CUDA_TILE;
    }
    return n;
}

/* Tiles that are hot whatever their mass: all of a group that pass 1 cannot judge, those that hold a value that is not
 * finite. By the lanes of a warp, which go through the loop together and come back together: a barrier follows. */
template <int GROUPS>
__device__ __noinline__ void force(const apa_cuda_job &job, int head, int group, uint32_t row_table, bool all,
                                   int first_tile, int end_tile, Masks<GROUPS> masks)
{
    const uint8_t *poisoned = job.poisoned + static_cast<int64_t>(head) * job.room;
    for (int begin = first_tile; begin < end_tile; begin += 32) {
        const int tile = begin + static_cast<int>(threadIdx.x & 31);
        if (tile < end_tile && (all || poisoned[tile] != 0) && rows_that_see(row_table, tile) > 0) {
            masks.set(masks.hot, tile, group);
            masks.clear(masks.fix, tile, group);
        }
        __syncwarp();
    }
}

/* ---- what is asked for beside the result ---- */

/* A block's rows for its counters: each lane has some of them in line. */
template <int GROUPS> struct CountedRows {
    static constexpr int OWN = GROUPS * WARPGROUP_ROWS / 32;
    int first[OWN], end[OWN];
    int whole_first, whole_end; /* tiles that all rows see whole: a block with padding has none */
    uint32_t visible;           /* tiles that the lane's rows see */

    __device__ explicit CountedRows(uint32_t row_table) : whole_first(0), whole_end(0x7fffffff), visible(0)
    {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            uint32_t keys[2];
            load_shared_8(keys, row_table + ((threadIdx.x & 31) * OWN + i) * ROW_ENTRY);
            first[i] = static_cast<int>(keys[0]);
            end[i] = static_cast<int>(keys[1]);
            whole_first = max(whole_first, (first[i] + APA_CUDA_TILE - 1) / APA_CUDA_TILE);
            whole_end = min(whole_end, first[i] < end[i] ? end[i] / APA_CUDA_TILE : 0);
            visible += static_cast<uint32_t>(tiles_seen(first[i], end[i]));
        }
        whole_first = __reduce_max_sync(0xffffffffu, whole_first);
        whole_end = __reduce_min_sync(0xffffffffu, whole_end);
    }

    /* Of the lane's rows, those of groups in each entry of `word` that see its tile, the first one's being `tile`. */
    __device__ uint32_t that_see(uint32_t word, int tile) const
    {
        using M = Masks<GROUPS>;
        uint32_t n = 0;
#pragma unroll
        for (int t = 0; t < M::IN_WORD; t++)
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                const int group = (static_cast<int>(threadIdx.x & 31) * OWN + i) / 16, key = (tile + t) * APA_CUDA_TILE;
                const bool sees = first[i] < min(end[i], key + APA_CUDA_TILE) && end[i] > key;
                n += sees ? word >> (t * M::SECOND + group) & 1 : 0;
            }
        return n;
    }
};

/* Rows that the masks count, the lane's part: what entries of tiles first_tile … end_tile - 1 say in `hot`, and in
 * either of the masks. By one warp, a word a lane; words with tiles that not all rows see whole, all lanes together. */
template <int GROUPS>
__device__ __forceinline__ void count_masks(uint32_t &hot_rows, uint32_t &candidates, const CountedRows<GROUPS> &rows,
                                            int first_tile, int end_tile, const Masks<GROUPS> &masks)
{
    using M = Masks<GROUPS>;
    for (int begin = first_tile / M::IN_WORD * M::IN_WORD; begin < end_tile; begin += 32 * M::IN_WORD) {
        const int tile = begin + static_cast<int>(threadIdx.x & 31) * M::IN_WORD;
        uint32_t hot = 0, either = 0;
        if (tile < end_tile) {
            hot = load_shared_4(M::word(masks.hot, tile));
            either = hot | load_shared_4(M::word(masks.candidate, tile));
        }
        const bool whole = tile >= rows.whole_first && tile + M::IN_WORD <= rows.whole_end;
        if (whole) {
            hot_rows += static_cast<uint32_t>(__popc(hot)) * 16;
            candidates += static_cast<uint32_t>(__popc(either)) * 16;
        }
        for (uint32_t left = __ballot_sync(0xffffffffu, !whole && either != 0); left != 0; left &= left - 1) {
            const int from = __ffs(static_cast<int>(left)) - 1;
            hot_rows += rows.that_see(__shfl_sync(0xffffffffu, hot, from), begin + from * M::IN_WORD);
            candidates += rows.that_see(__shfl_sync(0xffffffffu, either, from), begin + from * M::IN_WORD);
        }
    }
}

__device__ __forceinline__ void add_count(unsigned long long *to, uint32_t n)
{
    n = __reduce_add_sync(0xffffffffu, n); /* below 2^21: 192 rows, 8192 tiles */
    if ((threadIdx.x & 31) == 0)
        atomicAdd(to, static_cast<unsigned long long>(n));
}

/* Counters and verdicts of the block's rows, by one warp, from the masks. all: every tile is hot. */
template <int GROUPS>
__device__ __forceinline__ void report(const apa_cuda_job &job, const apa_cuda_stretch &place, uint32_t row_table,
                                       bool all, int first_tile, int end_tile, const Masks<GROUPS> &masks)
{
    using M = Masks<GROUPS>;
    if (job.counts != nullptr) {
        const CountedRows<GROUPS> rows(row_table);
        uint32_t hot_rows = rows.visible, candidates = rows.visible;
        if (!all) {
            hot_rows = candidates = 0;
            count_masks(hot_rows, candidates, rows, first_tile, end_tile, masks);
        }
        add_count(job.counts + APA_CUDA_VISIBLE, rows.visible);
        add_count(job.counts + APA_CUDA_HOT, hot_rows);
        add_count(job.counts + APA_CUDA_CANDIDATES, candidates);
    }
    for (int r = 0; job.verdicts != nullptr && r < GROUPS * WARPGROUP_ROWS; r++) {
        const int first = static_cast<int>(load_shared_4(row_table + r * ROW_ENTRY)),
                  end = static_cast<int>(load_shared_4(row_table + r * ROW_ENTRY + 4));
        if (first >= end)
            continue;
        const Row row = row_of(job, unit_of_row(job, place, place.row + r), (place.row + r) % APA_CUDA_UNIT);
        uint8_t *to =
            job.verdicts +
            ((static_cast<int64_t>(place.head / job.Hkv) * job.Hq + row.head) * job.Sq + row.position) * job.tiles;
        for (int tile = first / APA_CUDA_TILE + static_cast<int>(threadIdx.x & 31); tile <= (end - 1) / APA_CUDA_TILE;
             tile += 32)
            to[tile] = all || (M::of_tile(masks.hot, tile) >> r / 16 & 1) != 0;
    }
}

#endif
#endif
