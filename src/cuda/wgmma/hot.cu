/* Pass 2 on Hopper: the hot tiles exactly.
 *
 * A block takes 64 rows and an equal part of their unit's list of hot tiles: one warpgroup that multiplies and one warp
 * that feeds it; two blocks share a multiprocessor, and the exponentials of one run under the products of the other.
 * The feeding warp goes through the list, leaves out what is hot for none of the four groups of 16 rows, and brings the
 * rest two tiles at a time, keys of the first above those of the second, into a ring of three slots, in the order in
 * which they are used:
 *
 *     K(0), K(1), V(0), K(2), V(1), …      and an end mark in place of the K after the last
 *
 * A warp whose group a tile is not hot for sees -inf there. The pipeline is that of exact.cu. Tiles with values that
 * are not finite are hot for every group that sees them: their values are cleared in shared memory, and what was there
 * is added to the rows that see it. Partial states go to the buffers that finish.cu adds up. */
#include "cuda/chain.cuh"
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/tile_16.cuh"

template <int D> struct HotShape {
    static constexpr int KEYS = 2 * APA_CUDA_TILE;
    static constexpr int SLOTS = 3;
    static constexpr int THREADS = 256;
    static constexpr int TILE_BYTES = KEYS * D * 2;
    static constexpr int Q_BYTES = 64 * D * 2;
    static constexpr int RING_AT = Q_BYTES, FULL_AT = RING_AT + SLOTS * TILE_BYTES, ENTRY_AT = FULL_AT + SLOTS * 16,
                         VIEWS_AT = ENTRY_AT + SLOTS * 16;
    static constexpr int SHARED = FULL_AT + 1024; /* twice that and two blocks' share of the system fill 228 KB */
};

#ifdef APA_CUDA_BULK

constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 232;
constexpr int OWN = 1; /* named barrier of the warpgroup */

/* Two tiles of a step, packed: the tile's number, for which of the four warps it is hot, whether it holds a value that
 * is not finite. */
constexpr int MASK_AT = 27;
constexpr uint32_t TILE_BITS = (1u << MASK_AT) - 1, POISONED = 1u << 31, END = 0xffffffffu;

template <int D> struct HotRing {
    using S = HotShape<D>;
    uint32_t base;

    __device__ uint32_t slot(int at) const
    {
        return base + S::RING_AT + at % S::SLOTS * S::TILE_BYTES;
    }
    __device__ uint32_t full(int at) const
    {
        return base + S::FULL_AT + at % S::SLOTS * 16;
    }
    __device__ uint32_t empty(int at) const
    {
        return full(at) + 8;
    }
    __device__ uint32_t entry(int at) const
    {
        return base + S::ENTRY_AT + at % S::SLOTS * 16;
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

/* All lanes read entries, the first one starts copies. */
template <int D>
__device__ __forceinline__ void feed(const HotRing<D> &ring, const apa_wgmma_maps &maps, const apa_cuda_job &job,
                                     const Unit &unit, int half, int first, int end)
{
    const int lane = threadIdx.x & 31;
    const uint32_t *tiles = job.hot_tile + unit.local * job.tiles;
    const uint8_t *masks = job.hot_mask + unit.local * job.tiles;
    const uint8_t *poisoned = job.poisoned + static_cast<int64_t>(unit.head) * job.room;
    const uint32_t none = static_cast<uint32_t>(job.tiles); /* beyond the keys: comes as zeros */
    Feeder<D> feeder = {ring, maps, unit.head / job.Hkv, unit.head % job.Hkv, 0, 0, {{0, 0}}};
    uint32_t waiting = END;
    for (int base = first; base < end; base += 32) {
        uint32_t entry = 0, mask = 0;
        if (base + lane < end) {
            const uint32_t tile = tiles[base + lane];
            mask = masks[base + lane] >> (4 * half) & 15;
            entry = tile | mask << MASK_AT | (poisoned[tile] != 0 ? POISONED : 0);
        }
        uint32_t left = __ballot_sync(0xffffffffu, mask != 0);
        for (; left != 0; left &= left - 1) {
            const uint32_t next = __shfl_sync(0xffffffffu, entry, __ffs(static_cast<int>(left)) - 1);
            if (waiting == END) {
                waiting = next;
                continue;
            }
            if (lane == 0)
                feeder.step({{waiting, next}});
            waiting = END;
        }
    }
    if (lane == 0) {
        if (waiting != END)
            feeder.step({{waiting, none}});
        feeder.end();
    }
}

/* ---- the warpgroup ---- */

struct HotPlace {
    const apa_cuda_job &job;
    const Unit &unit;
    WarpView view; /* of the warp */
    int first_row; /* of the warp, in the unit */
    int b, h;
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
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int key = static_cast<int>(two.tile[i] & TILE_BITS) * APA_CUDA_TILE;
        if ((two.tile[i] >> (MASK_AT + warp) & 1) == 0) {
#pragma unroll
            for (int n = 8 * i; n < 8 * i + 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    s[n][j] = -CUDART_INF_F;
        } else if (my.view.every_first > key || my.view.every_end < key + APA_CUDA_TILE) {
            ThreadRows<1> rows;
            warp_rows<1>(my.job, my.unit, my.first_row, rows);
#pragma unroll
            for (int n = 8 * i; n < 8 * i + 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int at = key + (n & 7) * 8 + (threadIdx.x & 3) * 2 + (j & 1);
                    if (at < rows.first[j >> 1] || at >= rows.end[j >> 1])
                        s[n][j] = -CUDART_INF_F;
                }
        }
    }
    const float c = my.job.c;
    bool moves[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < 16; n++)
            top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        const float next = quad_max(top) * c - FRAME_OFFSET;
        moves[h] = next > X[h] + FRAME_SLACK;
        alpha[h] = moves[h] ? exp2_fast(X[h] - next) : 1.0f;
        X[h] = moves[h] ? next : X[h];
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

template <bool BF16> __device__ __forceinline__ void pack_probabilities(const float (&s)[16][4], uint32_t (&p)[8][4])
{
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            p[n / 2][n % 2 * 2 + h] = pack_16<BF16>(s[n][2 * h], s[n][2 * h + 1]);
}

/* Zeros in place of values that are not finite, by the whole warpgroup. */
template <bool BF16> __device__ __noinline__ void clear_non_finite(uint32_t tile, int bytes)
{
    for (int at = threadIdx.x * 16; at < bytes; at += WARPGROUP * 16) {
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
    named_barrier(OWN, WARPGROUP);
}

template <int D, bool BF16>
__device__ __forceinline__ void add_cleared(State16<D, 1> &state, const HotPlace &my, const Two &two)
{
    State16<D, 1> in_memory = state; /* so that the state itself has no address */
    ThreadRows<1> rows;
    warp_rows<1>(my.job, my.unit, my.first_row, rows);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if ((two.tile[i] & POISONED) != 0 && (two.tile[i] >> (MASK_AT + threadIdx.x / 32) & 1) != 0)
            add_non_finite<D, BF16, 1>(in_memory, rows, my.job.v, my.b, my.h, static_cast<int>(two.tile[i] & TILE_BITS),
                                       my.job.Skv);
    state = in_memory;
}

template <int D, bool BF16>
__device__ __forceinline__ void consume(State16<D, 1> &state, const HotRing<D> &ring, const HotPlace &my)
{
    float s[16][4], l[2] = {0.0f, 0.0f}, alpha[2];
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
    soften(s, state.X, l, alpha, my, now);
    pack_probabilities<BF16>(s, p);
    int at = 1; /* place of the next K; the V of `now` is behind it */
    for (;;) {
        const Two next = take(at);
        take(at + 1);
        const bool poisoned = ((now.tile[0] | now.tile[1]) & POISONED) != 0;
        if (poisoned)
            clear_non_finite<BF16>(ring.slot(at + 1), HotShape<D>::TILE_BYTES);
        if (next.tile[0] == END)
            break;
        pin(s);
        pin(p);
        pin(state.o[0]);
        products_fence();
        issue_scores<D, BF16>(s, ring.base, ring.slot(at));
        issue_values<D, BF16>(state, p, ring.slot(at + 1));
        products_wait<1>();
        pin(s);
        read(at);
        const bool moves = soften(s, state.X, l, alpha, my, next);
        products_wait<0>();
        pin(state.o[0]);
        read(at + 1);
        if (poisoned)
            add_cleared<D, BF16>(state, my, now);
        if (moves) {
#pragma unroll
            for (int n = 0; n < D / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    state.o[0][n][j] *= alpha[j >> 1];
        }
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
#pragma unroll
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
        state.l[0][2 * h] = state.l[0][2 * h + 1] = l[h];
    }
}

#endif

template <int D, bool BF16>
static __global__ void __launch_bounds__(HotShape<D>::THREADS, 2)
    wgmma_hot_kernel(const __grid_constant__ apa_cuda_job job, const __grid_constant__ apa_wgmma_maps maps)
{
#ifdef APA_CUDA_BULK
    using S = HotShape<D>;
    chain_go();
    extern __shared__ __align__(1024) uint8_t shared[];
    const HotRing<D> ring = {shared_address(shared)};
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
    if (warp < 4) {
        load_query_rows<D>(ring.base, job, unit, unit.head / job.Hkv, half * WARPGROUP_ROWS);
        fence_for_async();
    }
    __syncthreads();
    if (warp >= 4) {
        give_registers<PRODUCER_REGISTERS>();
        if (warp == 4)
            feed<D>(ring, maps, job, unit, half, first, end);
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    HotPlace my = {job, unit, {}, half * WARPGROUP_ROWS + warp * 16, unit.head / job.Hkv, unit.head % job.Hkv};
    {
        ThreadRows<1> rows;
        my.view = warp_rows<1>(job, unit, my.first_row, rows);
    }
    State16<D, 1> state;
    clear(state);
    consume<D, BF16>(state, ring, my);
    store_part<D, 1>(state, job.hot_o, job.hot_frame, job.hot_sum, unit.split * job.unit_count + unit.local,
                     my.first_row);
#endif
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, const apa_wgmma_maps *maps, cudaStream_t stream)
{
    using S = HotShape<D>;
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
