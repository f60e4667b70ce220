/* The exact pass of a warpgroup over hot tiles.
 *
 * Tiles come two at a time, keys of the first above those of the second, into a ring of three slots:
 *
 *     K(0), K(1), V(0), K(2), V(1), …      and an end mark in place of the K after the last
 *
 * A step issues P·V of the two tiles at hand and then the next ones' scores, and waits for both. A warp whose group a
 * tile is not hot for sees -inf there. Tiles with values that are not finite are hot for every group that sees them:
 * their values are cleared in shared memory, and what was there is added to the rows that see it. */
#ifndef APA_CUDA_WGMMA_HOT_TILES_CUH
#define APA_CUDA_WGMMA_HOT_TILES_CUH

#include "cuda/wgmma/lane_rows.cuh"
#include "cuda/wgmma/launch.h"

template <int D> struct HotShape {
    static constexpr int KEYS = 2 * APA_CUDA_TILE;
    static constexpr int SLOTS = 3;
    static constexpr int TILE_BYTES = KEYS * D * 2;
    static constexpr int Q_BYTES = 64 * D * 2;
    static constexpr int RING_AT = Q_BYTES, BYTES = RING_AT + SLOTS * TILE_BYTES, BARRIER_BYTES = SLOTS * 32;
};

#ifdef APA_CUDA_BULK

/* Two tiles of a step, packed: the tile's number, for which of the four warps it is hot, whether it holds a value that
 * is not finite. */
constexpr int MASK_AT = 27;
constexpr uint32_t TILE_BITS = (1u << MASK_AT) - 1, POISONED = 1u << 31, END = 0xffffffffu;

template <int D> struct HotRing {
    using S = HotShape<D>;
    uint32_t base, barriers; /* queries and tiles; barriers and entries: anywhere */

    __device__ uint32_t slot(int at) const
    {
        return base + S::RING_AT + at % S::SLOTS * S::TILE_BYTES;
    }
    __device__ uint32_t full(int at) const
    {
        return barriers + at % S::SLOTS * 32;
    }
    __device__ uint32_t empty(int at) const
    {
        return full(at) + 8;
    }
    __device__ uint32_t entry(int at) const
    {
        return barriers + at % S::SLOTS * 32 + 16;
    }
    __device__ static uint32_t phase(int at)
    {
        return at / S::SLOTS & 1;
    }
};

struct Two {
    uint32_t tile[2];
};

/* ---- the feeding warp ---- */

template <int D> struct Feeder {
    using S = HotShape<D>;
    const HotRing<D> &ring;
    const apa_wgmma_maps &maps;
    int b, h, at, steps;
    Two last;

    __device__ void load(const CUtensorMap &map, const Two &two)
    {
        const uint32_t entry[4] = {two.tile[0], two.tile[1], 0, 0};
        barrier_wait(ring.empty(at), ring.phase(at) ^ 1);
        store_shared_16(ring.entry(at), entry);
        barrier_expect(ring.full(at), S::TILE_BYTES);
#pragma unroll
        for (int block = 0; block < D / 64; block++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                copy_box(ring.slot(at) + block * S::KEYS * 128 + i * APA_CUDA_TILE * 128, &map, block * 64,
                         static_cast<int>(two.tile[i] & TILE_BITS) * APA_CUDA_TILE, h, b, ring.full(at));
        at++;
    }
    __device__ void step(const Two &two)
    {
        load(maps.k, two);
        if (steps > 0)
            load(maps.v, last);
        last = two;
        steps++;
    }
    __device__ void end()
    {
        const uint32_t entry[4] = {END, END, 0, 0};
        barrier_wait(ring.empty(at), ring.phase(at) ^ 1);
        store_shared_16(ring.entry(at), entry);
        barrier_arrive(ring.full(at));
        at++;
        if (steps > 0)
            load(maps.v, last);
    }
};

/* Tiles come to the ring two by two, from lists of entries of which a lane has one each time; an entry of 0 is none. */
template <int D> struct FeedingWarp {
    Feeder<D> feeder;
    uint32_t waiting;

    __device__ FeedingWarp(const HotRing<D> &ring, const apa_wgmma_maps &maps, const apa_cuda_job &job, int head)
        : feeder{ring, maps, head / job.Hkv, head % job.Hkv, 0, 0, {{0, 0}}}, waiting(END)
    {
    }
    __device__ void take(uint32_t entry)
    {
        uint32_t left = __ballot_sync(0xffffffffu, entry != 0);
        for (; left != 0; left &= left - 1) {
            const uint32_t next = __shfl_sync(0xffffffffu, entry, __ffs(static_cast<int>(left)) - 1);
            if (waiting == END) {
                waiting = next;
                continue;
            }
            if ((threadIdx.x & 31) == 0)
                feeder.step({{waiting, next}});
            waiting = END;
        }
    }
    /* none: a tile beyond the keys, which comes as zeros */
    __device__ void end(uint32_t none)
    {
        if ((threadIdx.x & 31) != 0)
            return;
        if (waiting != END)
            feeder.step({{waiting, none}});
        feeder.end();
    }
};

/* A tile that is hot for some of a half unit's four groups; 0 where mask is. */
__device__ __forceinline__ uint32_t hot_entry(uint32_t tile, uint32_t mask, bool poisoned)
{
    return mask == 0 ? 0 : tile | mask << MASK_AT | (poisoned ? POISONED : 0);
}

/* ---- the warpgroup ---- */

struct HotPlace {
    const apa_cuda_job &job;
    WholeKeys whole;    /* of the warp */
    uint32_t row_table; /* of the warp, in shared memory */
    int b, h;
    int own; /* named barrier of the warpgroup */
};

template <int D, bool BF16>
__device__ __forceinline__ void issue_scores(float (&s)[16][4], uint32_t q_at, uint32_t k_at)
{
    constexpr int Q_BLOCK = WARPGROUP_ROWS * 128 / 16, K_BLOCK = HotShape<D>::KEYS * 128 / 16;
    const uint64_t q = k_major(q_at), k = k_major(k_at);
#pragma unroll
    for (int step = 0; step < D / 16; step++)
        product_16<BF16>(s, q + step / 4 * Q_BLOCK + step % 4 * 2, k + step / 4 * K_BLOCK + step % 4 * 2, step != 0);
    products_commit();
}

template <int D, bool BF16>
__device__ __forceinline__ void issue_values(State16<D, 1> &state, const uint32_t (&p)[8][4], uint32_t v_at)
{
    const uint64_t v = mn_major(v_at, HotShape<D>::KEYS * 128);
#pragma unroll
    for (int step = 0; step < 8; step++)
        product_16<BF16>(state.o[0], p[step], v + step * 128);
    products_commit();
}

/* Scores → exponentials in place, frames and sums moved on; alpha as in exact.cu. */
__device__ __forceinline__ bool soften(float (&s)[16][4], float (&X)[2], float (&l)[2], float (&alpha)[2],
                                       const HotPlace &my, const Two &two)
{
    const int warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int key = static_cast<int>(two.tile[i] & TILE_BITS) * APA_CUDA_TILE;
        if ((two.tile[i] >> (MASK_AT + warp) & 1) == 0) {
#pragma unroll
            for (int n = 8 * i; n < 8 * i + 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    s[n][j] = -CUDART_INF_F;
        } else if (my.whole.first > key || my.whole.end < key + APA_CUDA_TILE) {
#pragma unroll
            for (int h = 0; h < 2; h++) { /* a row after the other: there are no registers left */
                int first, end;
                load_row(first, end, my.row_table, h);
                first -= key + (threadIdx.x & 3) * 2;
                end -= key + (threadIdx.x & 3) * 2;
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        if (n * 8 + j < first || n * 8 + j >= end)
                            s[8 * i + n][2 * h + j] = -CUDART_INF_F;
            }
        }
    }
    const float c = my.job.c;
    bool moves[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        moves[h] = move_frame(s, h, c, X[h], alpha[h]);
        const float minus = X[h] == -CUDART_INF_F ? 0.0f : -X[h];
        float sum = 0.0f, other = 0.0f;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            s[n][2 * h] = exp2_fast(fmaf(s[n][2 * h], c, minus));
            s[n][2 * h + 1] = exp2_fast(fmaf(s[n][2 * h + 1], c, minus));
            sum += s[n][2 * h];
            other += s[n][2 * h + 1];
        }
        l[h] = l[h] * alpha[h] + sum + other;
    }
    return __any_sync(0xffffffffu, moves[0] || moves[1]);
}

/* Zeros in place of values that are not finite, by the whole warpgroup. */
template <bool BF16> __device__ __noinline__ void clear_non_finite(uint32_t tile, int bytes, int own)
{
    for (int at = threadIdx.x % WARPGROUP * 16; at < bytes; at += WARPGROUP * 16) {
        uint32_t x[4];
        bool found = false;
        load_shared_16(x, tile + at);
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = without_non_finite<BF16>(x[i], &found);
        if (found)
            store_shared_16(tile + at, x);
    }
    fence_for_async();
    named_barrier(own, WARPGROUP);
}

template <int D, bool BF16>
__device__ __forceinline__ void add_cleared(State16<D, 1> &state, const HotPlace &my, const Two &two)
{
    State16<D, 1> in_memory = state; /* so that the state itself has no address */
    ThreadRows<1> rows;
    load_rows(rows, my.row_table);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if ((two.tile[i] & POISONED) != 0 && (two.tile[i] >> (MASK_AT + threadIdx.x / 32 % 4) & 1) != 0)
            add_non_finite<D, BF16, 1>(in_memory, rows, my.job.v, my.b, my.h, static_cast<int>(two.tile[i] & TILE_BITS),
                                       my.job.Skv);
    state = in_memory;
}

/* The state may hold sums already. l: what a lane adds to those of its rows. */
template <int D, bool BF16>
__device__ __forceinline__ void consume(State16<D, 1> &state, float (&l)[2], const HotRing<D> &ring, const HotPlace &my)
{
    float s[16][4], alpha[2];
    uint32_t p[8][4];
    auto read = [&](int at) {
        if ((threadIdx.x & 31) == 0)
            barrier_arrive(ring.empty(at));
    };
    auto take = [&](int at) {
        barrier_wait(ring.full(at), ring.phase(at));
        return Two{{load_shared_4(ring.entry(at)), load_shared_4(ring.entry(at) + 4)}};
    };
    Two now = take(0);
    if (now.tile[0] == END)
        return;
    products_fence();
    issue_scores<D, BF16>(s, ring.base, ring.slot(0));
    products_wait<0>();
    pin(s);
    read(0);
    if (soften(s, state.X, l, alpha, my, now))
        multiply<D>(state, alpha);
    pack_probabilities<BF16>(s, p);
    int at = 1; /* place of the next K; the V of `now` is behind it */
    for (;;) {
        const Two next = take(at);
        take(at + 1);
        const bool poisoned = ((now.tile[0] | now.tile[1]) & POISONED) != 0;
        if (poisoned)
            clear_non_finite<BF16>(ring.slot(at + 1), HotShape<D>::TILE_BYTES, my.own);
        if (next.tile[0] == END)
            break;
        pin(s);
        pin(p);
        pin(state.o[0]);
        products_fence();
        issue_values<D, BF16>(state, p, ring.slot(at + 1));
        issue_scores<D, BF16>(s, ring.base, ring.slot(at));
        products_wait<0>();
        pin(s);
        pin(state.o[0]);
        read(at);
        read(at + 1);
        const bool moves = soften(s, state.X, l, alpha, my, next);
        if (poisoned)
            add_cleared<D, BF16>(state, my, now);
        if (moves)
            multiply<D>(state, alpha);
        pack_probabilities<BF16>(s, p);
        now = next;
        at += 2;
    }
    pin(p);
    pin(state.o[0]);
    products_fence();
    issue_values<D, BF16>(state, p, ring.slot(at + 1));
    products_wait<0>();
    pin(state.o[0]);
    if (((now.tile[0] | now.tile[1]) & POISONED) != 0)
        add_cleared<D, BF16>(state, my, now);
}

/* The lanes' sums. */
template <int D> __device__ __forceinline__ void join_sums(State16<D, 1> &state, float (&l)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
        state.l[0][2 * h] = state.l[0][2 * h + 1] = l[h];
    }
}

#endif

#endif
