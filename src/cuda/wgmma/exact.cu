/* The exact method on Hopper: every tile in 16-bit floats, FP32 sums.
 *
 * A block takes a unit of 128 rows: two warpgroups of 64 rows that multiply, and one warp that feeds them. Tiles of K
 * and of V come by the tensor copy engine into two rings of shared memory, each stage with a barrier that says it is
 * full and one that says it has been read.
 *
 *     step i of a warpgroup    issue S(i) = Q·K(i)ᵀ, issue o += P(i-1)·V(i-1)
 *                              wait for S(i):  mask, maxima, exponentials, while P·V goes on
 *                              wait for P·V:   o into the new frames, P(i) from the exponentials
 *
 * The two take turns at issuing, so that one's exponentials run under the other's products: the pipeline of
 * FlashAttention-3 (Shah et al., arXiv 2407.08608). Frames are those of cuda/warp_mma/tile_16.cuh: they lie under the
 * maximum and move by leaps, so the multiplication of o is rare. Row sums are of the FP32 probabilities. */
#include "cuda/chain.cuh"
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/tile_16.cuh"

template <int D> struct ExactShape {
    static constexpr int KEYS = D <= 128 ? 128 : 64;
    static constexpr int STAGES = 2;
    static constexpr int THREADS = 3 * 128;
    static constexpr int TILE_BYTES = KEYS * D * 2;
    static constexpr int Q_BYTES = APA_CUDA_UNIT * D * 2;
    static constexpr int K_AT = Q_BYTES, V_AT = K_AT + STAGES * TILE_BYTES, ZEROS_AT = V_AT + STAGES * TILE_BYTES;
    static constexpr int ZEROS = 32 * D; /* bytes that one product reads of V */
    static constexpr int FULL_AT = ZEROS_AT + ZEROS;
    static constexpr bool TURNS = D > 64; /* measured: below, issuing in turns costs more than it brings */
    static constexpr int SHARED = FULL_AT + STAGES * 32 + 1024; /* 1024: to align the start */
};

#ifdef APA_CUDA_BULK

constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
/* Named barriers; 0 is __syncthreads(). */
constexpr int TURN = 1 /* and 2: the warpgroup may issue */, OWN = 3 /* and 4: among a warpgroup */;

/* Shared memory of a block, as addresses. */
template <int D> struct ExactMemory {
    using S = ExactShape<D>;
    uint32_t base;

    __device__ uint32_t k(int i) const
    {
        return base + S::K_AT + i % S::STAGES * S::TILE_BYTES;
    }
    __device__ uint32_t v(int i) const
    {
        return base + S::V_AT + i % S::STAGES * S::TILE_BYTES;
    }
    __device__ uint32_t k_full(int i) const
    {
        return base + S::FULL_AT + i % S::STAGES * 32;
    }
    __device__ uint32_t v_full(int i) const
    {
        return k_full(i) + 8;
    }
    __device__ uint32_t k_empty(int i) const
    {
        return k_full(i) + 16;
    }
    __device__ uint32_t v_empty(int i) const
    {
        return k_full(i) + 24;
    }
    __device__ static uint32_t phase(int i)
    {
        return i / S::STAGES & 1;
    }
};

/* One thread keeps the rings full: n tiles from key `first` on. K runs one tile ahead of V, as its use does. */
template <int D>
__device__ __forceinline__ void feed(const ExactMemory<D> &memory, const apa_wgmma_maps &maps, int first, int n, int h,
                                     int b)
{
    using S = ExactShape<D>;
    auto load = [&](const CUtensorMap &map, uint32_t to, uint32_t full, int key) {
        barrier_expect(full, S::TILE_BYTES);
#pragma unroll
        for (int block = 0; block < D / 64; block++)
            copy_box(to + block * S::KEYS * 128, &map, block * 64, key, h, b, full);
    };
    for (int i = 0; i <= n; i++) {
        if (i < n) {
            barrier_wait(memory.k_empty(i), memory.phase(i) ^ 1);
            load(maps.k, memory.k(i), memory.k_full(i), first + i * S::KEYS);
        }
        if (i > 0) {
            barrier_wait(memory.v_empty(i - 1), memory.phase(i - 1) ^ 1);
            load(maps.v, memory.v(i - 1), memory.v_full(i - 1), first + (i - 1) * S::KEYS);
        }
    }
}

/* What a warpgroup works with. */
template <int D> struct Consumer {
    using S = ExactShape<D>;
    const apa_cuda_job &job;
    const Unit &unit;
    ExactMemory<D> memory;
    WarpView view;                /* of the warpgroup */
    int group;                    /* 0, 1 */
    int first_row;                /* of the warp */
    int first_key, end_key, b, h; /* end_key: of the block's part */

    __device__ bool partly(int i) const
    {
        const int key = first_key + i * S::KEYS;
        return view.every_first > key || min(view.every_end, end_key) < key + S::KEYS;
    }
};

template <int D, bool BF16>
__device__ __forceinline__ void issue_scores(float (&s)[ExactShape<D>::KEYS / 8][4], const Consumer<D> &my, int i)
{
    using S = ExactShape<D>;
    const uint64_t q = k_major(my.memory.base + my.group * (S::Q_BYTES / 2)), k = k_major(my.memory.k(i));
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        constexpr int Q_BLOCK = WARPGROUP_ROWS * 128 / 16, K_BLOCK = S::KEYS * 128 / 16;
        product_16<BF16>(s, q + step / 4 * Q_BLOCK + step % 4 * 2, k + step / 4 * K_BLOCK + step % 4 * 2, step != 0);
    }
    products_commit();
}

/* Nothing is added where `away`: the products then read a block of zeros. (A branch around them would make the compiler
 * run all products one after the other.) */
template <int D, bool BF16>
__device__ __forceinline__ void issue_values(State16<D, 1> &state, const uint32_t (&p)[ExactShape<D>::KEYS / 16][4],
                                             const Consumer<D> &my, int i, bool away)
{
    using S = ExactShape<D>;
    const uint64_t v =
        away ? SWIZZLE_128 | (my.memory.base + S::ZEROS_AT & 0x3ffff) >> 4 : mn_major(my.memory.v(i), S::KEYS * 128);
    const uint32_t rows_16 = away ? 0 : 128;
#pragma unroll
    for (int step = 0; step < S::KEYS / 16; step++)
        product_16<BF16>(state.o[0], p[step], v + step * rows_16);
    products_commit();
}

/* Is tile i masked for some row and not finite? All threads of the warpgroup get the same answer. */
template <int D, bool BF16> __device__ __forceinline__ bool needs_care(const Consumer<D> &my, int i)
{
    return my.partly(i) && named_barrier_any(OWN + my.group, WARPGROUP,
                                             has_non_finite<BF16>(my.memory.v(i), ExactShape<D>::TILE_BYTES));
}

/* P·V with care: the state goes through memory, so that otherwise it has no address. */
template <int D, bool BF16>
__device__ __forceinline__ void add_with_care(State16<D, 1> &state, const uint32_t (&p)[ExactShape<D>::KEYS / 16][4],
                                              const Consumer<D> &my, int i)
{
    constexpr int KEYS = ExactShape<D>::KEYS;
    State16<D, 1> in_memory = state;
    uint32_t p_in_memory[KEYS / 16][4];
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            p_in_memory[k][j] = p[k][j];
    careful_values<D, BF16, KEYS>(in_memory, p_in_memory, my.memory.v(i), my.job, my.unit, my.first_row, my.b, my.h,
                                  my.first_key + i * KEYS);
    state = in_memory;
}

/* Scores of tile i → exponentials in place, frames and sums moved on. alpha: what o has to be multiplied by; returns
 * whether that is not 1 somewhere in the warp. */
template <int D>
__device__ __forceinline__ bool soften(float (&s)[ExactShape<D>::KEYS / 8][4], float (&X)[2], float (&l)[2],
                                       float (&alpha)[2], const Consumer<D> &my, int i)
{
    constexpr int N = ExactShape<D>::KEYS / 8;
    if (my.partly(i)) {
        ThreadRows<1> rows;
        warp_rows<1>(my.job, my.unit, my.first_row, rows);
        const int key = my.first_key + i * ExactShape<D>::KEYS + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = key + n * 8 + (j & 1);
                if (at < rows.first[j >> 1] || at >= min(rows.end[j >> 1], my.end_key))
                    s[n][j] = -CUDART_INF_F;
            }
    }
    const float c = my.job.c;
    bool moves[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < N; n++)
            top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        const float next = quad_max(top) * c - FRAME_OFFSET;
        moves[h] = next > X[h] + FRAME_SLACK;
        alpha[h] = moves[h] ? exp2_fast(X[h] - next) : 1.0f;
        X[h] = moves[h] ? next : X[h];
        l[h] *= alpha[h];
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float minus = X[h] == -CUDART_INF_F ? 0.0f : -X[h];
        float sum = 0.0f, other = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][2 * h] = exp2_fast(fmaf(s[n][2 * h], c, minus));
            s[n][2 * h + 1] = exp2_fast(fmaf(s[n][2 * h + 1], c, minus));
            sum += s[n][2 * h];
            other += s[n][2 * h + 1];
        }
        l[h] += sum + other;
    }
    return __any_sync(0xffffffffu, moves[0] || moves[1]);
}

/* Exponentials → P as A operands. */
template <int N, bool BF16>
__device__ __forceinline__ void pack_probabilities(const float (&s)[N][4], uint32_t (&p)[N / 2][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            p[n / 2][n % 2 * 2 + h] = pack_16<BF16>(s[n][2 * h], s[n][2 * h + 1]);
}

template <int D> __device__ __forceinline__ void multiply(State16<D, 1> &state, const float (&alpha)[2])
{
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            state.o[0][n][j] *= alpha[j >> 1];
}

/* n tiles, n > 0. */
template <int D, bool BF16> __device__ __forceinline__ void consume(State16<D, 1> &state, const Consumer<D> &my, int n)
{
    using S = ExactShape<D>;
    constexpr int N = S::KEYS / 8;
    const ExactMemory<D> &memory = my.memory;
    const bool first_lane = (threadIdx.x & 31) == 0;
    float s[N][4], l[2] = {0.0f, 0.0f}, alpha[2];
    uint32_t p[N / 2][4];
    auto read = [&](uint32_t empty) {
        if (first_lane)
            barrier_arrive(empty);
    };

    barrier_wait(memory.k_full(0), 0);
    products_fence();
    issue_scores<D, BF16>(s, my, 0);
    products_wait<0>();
    pin(s);
    read(memory.k_empty(0));
    soften<D>(s, state.X, l, alpha, my, 0);
    pack_probabilities<N, BF16>(s, p);

    for (int i = 1; i < n; i++) {
        barrier_wait(memory.k_full(i), memory.phase(i));
        barrier_wait(memory.v_full(i - 1), memory.phase(i - 1));
        const bool care = needs_care<D, BF16>(my, i - 1);
        if (care)
            add_with_care<D, BF16>(state, p, my, i - 1);
        if (S::TURNS)
            named_barrier(TURN + my.group, 2 * WARPGROUP);
        pin(s);
        pin(p);
        pin(state.o[0]);
        products_fence();
        issue_scores<D, BF16>(s, my, i);
        issue_values<D, BF16>(state, p, my, i - 1, care);
        if (S::TURNS)
            named_barrier_arrive(TURN + (my.group ^ 1), 2 * WARPGROUP);
        products_wait<1>();
        pin(s);
        read(memory.k_empty(i));
        const bool moves = soften<D>(s, state.X, l, alpha, my, i);
        products_wait<0>();
        pin(state.o[0]);
        read(memory.v_empty(i - 1));
        if (moves)
            multiply<D>(state, alpha);
        pack_probabilities<N, BF16>(s, p);
    }

    barrier_wait(memory.v_full(n - 1), memory.phase(n - 1));
    const bool care = needs_care<D, BF16>(my, n - 1);
    if (care)
        add_with_care<D, BF16>(state, p, my, n - 1);
    pin(p);
    pin(state.o[0]);
    products_fence();
    issue_values<D, BF16>(state, p, my, n - 1, care);
    products_wait<0>();
    pin(state.o[0]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
        state.l[0][2 * h] = state.l[0][2 * h + 1] = l[h];
    }
}

#endif

template <int D, bool BF16>
static __global__ void __launch_bounds__(ExactShape<D>::THREADS, 1)
    wgmma_exact_kernel(const __grid_constant__ apa_cuda_job job, const __grid_constant__ apa_wgmma_maps maps)
{
#ifdef APA_CUDA_BULK
    using S = ExactShape<D>;
    chain_go();
    extern __shared__ uint8_t shared[];
    __shared__ WarpView views[8];
    const ExactMemory<D> memory = {(shared_address(shared) + 1023) & ~1023u};
    const int warp = threadIdx.x / 32;
    const Unit unit = job.early_only != 0 ? early_unit_of(job, blockIdx.x) : unit_of(job, blockIdx.x, job.splits);
    if (unit.number < 0) {
        chain_wait();
        return;
    }
    const int b = unit.head / job.Hkv, h = unit.head % job.Hkv;
    const TileRange tiles = tile_range(job, unit, job.splits);
    constexpr int PER_STEP = S::KEYS / APA_CUDA_TILE;
    const int first_key = tiles.first * APA_CUDA_TILE, n = (tiles.end - tiles.first + PER_STEP - 1) / PER_STEP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(memory.k_full(i), 1);
            barrier_init(memory.v_full(i), 1);
            barrier_init(memory.k_empty(i), 8); /* warps that read */
            barrier_init(memory.v_empty(i), 8);
        }
        barrier_init_fence();
    }
    for (int at = threadIdx.x * 16; at < S::ZEROS; at += S::THREADS * 16) {
        const uint32_t zeros[4] = {0, 0, 0, 0};
        store_shared_16(memory.base + S::ZEROS_AT + at, zeros);
    }
    fence_for_async();
    __syncthreads();
    if (warp >= 8) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 256)
            feed<D>(memory, maps, first_key, n, h, b);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        const int group = warp / 4;
        load_query_rows<D>(memory.base + group * (S::Q_BYTES / 2), job, unit, b, group * WARPGROUP_ROWS);
        fence_for_async();
        WarpView view;
        {
            ThreadRows<1> rows;
            view = warp_rows<1>(job, unit, warp * 16, rows);
        }
        view = warpgroup_view(view, views + group * 4, OWN + group); /* its barrier is the queries' too */
        State16<D, 1> state;
        clear(state);
        const Consumer<D> my = {job, unit, memory, view, group, warp * 16, first_key, tiles.end * APA_CUDA_TILE, b, h};
        if (S::TURNS && group == 1)
            named_barrier_arrive(TURN, 2 * WARPGROUP);
        if (n > 0)
            consume<D, BF16>(state, my, n);
        if (job.splits > 1)
            store_part<D, 1>(state, job.part_o, job.part_frame, job.part_sum, unit.split * job.unit_count + unit.local,
                             warp * 16);
        else
            store_result<D, 1>(state, job, unit, b, warp * 16);
    }
    chain_wait(); /* at the end: it reads inputs alone, and what it writes no other kernel of an adaptive call touches
                   */
#endif
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, const apa_wgmma_maps *maps, cudaStream_t stream)
{
    using S = ExactShape<D>;
    cudaError_t error =
        cudaFuncSetAttribute(wgmma_exact_kernel<D, BF16>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error != cudaSuccess)
        return error;
    const int64_t blocks = job->early_only != 0 ? apa_cuda_early_items(job) : job->unit_count * job->splits;
    if (blocks == 0)
        return cudaSuccess;
    return launch_chained(job->chained, wgmma_exact_kernel<D, BF16>, blocks, S::THREADS, S::SHARED, stream, *job,
                          *maps);
}

extern "C" int64_t apa_wgmma_exact_keys(int64_t D)
{
    return D == 64 ? ExactShape<64>::KEYS : D == 128 ? ExactShape<128>::KEYS : ExactShape<256>::KEYS;
}

extern "C" int apa_wgmma_launch_exact(const apa_cuda_job *job, const apa_wgmma_maps *maps, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    switch (job->D) {
    case 64:
        return job->bf16 ? launch<64, true>(job, maps, stream) : launch<64, false>(job, maps, stream);
    case 128:
        return job->bf16 ? launch<128, true>(job, maps, stream) : launch<128, false>(job, maps, stream);
    case 256:
        return job->bf16 ? launch<256, true>(job, maps, stream) : launch<256, false>(job, maps, stream);
    default:
        return cudaErrorInvalidValue;
    }
}
