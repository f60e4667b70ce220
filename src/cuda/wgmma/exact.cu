/* The exact method on Hopper: every tile in 16-bit floats, FP32 sums.
 *
 * A block takes a unit of 128 rows: two warpgroups of 64 rows that multiply, and one warp that feeds them. A wide block
 * (D = 64, where registers are left) has three such warpgroups and takes 192 rows in line of a KV head. Tiles of K and
 * of V come by the tensor copy engine into two rings of shared memory, each stage with a barrier that says it is full
 * and one that says it has been read.
 *
 *     step i of a warpgroup    issue S(i) = Q·K(i)ᵀ, issue o += P(i-1)·V(i-1)
 *                              wait for S(i):  mask, maxima, exponentials, while P·V goes on
 *                              wait for P·V:   o into the new frames, P(i) from the exponentials
 *
 * They take turns at issuing, so that one's exponentials run under the other's products: the pipeline of
 * FlashAttention-3 (Shah et al., arXiv 2407.08608). Frames are those of cuda/warp_mma/tile_16.cuh: they lie under the
 * maximum and move by leaps, so the multiplication of o is rare. Row sums are of the FP32 probabilities.
 *
 * At D = 64 a tile's exponentials take as long as its products, and what is short are issue slots: a block of three has
 * something to issue more often. No exponential is a polynomial, as FlashAttention-4 has some of them on Blackwell:
 * that spares the unit for exponentials and takes more slots (measured: 1 in 4, 7 % slower). */
#include "cuda/chain.cuh"
#include "cuda/wgmma/lane_rows.cuh"
#include "cuda/wgmma/launch.h"

template <int D_, bool WIDE_> struct ExactShape {
    static constexpr int D = D_;
    static constexpr bool WIDE = WIDE_;
    static constexpr int GROUPS = WIDE ? 3 : 2; /* warpgroups that multiply */
    static constexpr int GROUP_ROWS = 64, ROWS = GROUPS * GROUP_ROWS;
    static constexpr int KEYS = D <= 128 ? 128 : 64;
    static constexpr int STAGES = 2;
    static constexpr int THREADS = (GROUPS + 1) * 128;
    /* measured: at D = 64 turns of two cost more than they bring, turns of three do not */
    static constexpr bool TURNS = WIDE || D > 64;
    /* what a launch has for each thread is divided anew */
    static constexpr int PRODUCER_REGISTERS = WIDE ? 32 : 24, CONSUMER_REGISTERS = WIDE ? 160 : 240;
    static constexpr int TILE_BYTES = KEYS * D * 2;
    static constexpr int GROUP_BYTES = GROUP_ROWS * D * 2; /* of queries */
    static constexpr int K_AT = GROUPS * GROUP_BYTES, V_AT = K_AT + STAGES * TILE_BYTES,
                         ZEROS_AT = V_AT + STAGES * TILE_BYTES;
    static constexpr int ZEROS = 32 * D; /* bytes that one product reads of V */
    static constexpr int FULL_AT = ZEROS_AT + ZEROS;
    static constexpr int SHARED = FULL_AT + STAGES * 32 + 1024; /* 1024: to align the start */
};

/* Above, 160 registers are not enough. */
constexpr bool has_wide(int64_t D)
{
    return D == 64;
}

#ifdef APA_CUDA_BULK

/* Named barriers; 0 is __syncthreads(). */
constexpr int TURN = 1 /* … 3: the warpgroup may issue */, OWN = 4 /* … 6: among a warpgroup */;

/* Shared memory of a block, as addresses. */
template <typename S> struct ExactMemory {
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
template <typename S>
__device__ __forceinline__ void feed(const ExactMemory<S> &memory, const apa_wgmma_maps &maps, int first, int n, int h,
                                     int b)
{
    auto load = [&](const CUtensorMap &map, uint32_t to, uint32_t full, int key) {
        barrier_expect(full, S::TILE_BYTES);
#pragma unroll
        for (int block = 0; block < S::D / 64; block++)
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

/* What a warp needs at masks alone. A wide block has few registers and keeps it in memory, rows too: else others
 * spill. */
struct AtMasks {
    ThreadRows<1> rows;           /* of a wide block */
    int first_row;                /* of the warp, in the unit */
    int first_key, end_key, b, h; /* end_key: of the block's part */
};

/* What a warpgroup works with. */
template <typename S> struct Consumer {
    const apa_cuda_job &job;
    const Unit &unit;
    const AtMasks &masks;
    ExactMemory<S> memory;
    WarpView view;              /* of the warpgroup */
    int group;                  /* 0 … S::GROUPS - 1 */
    int whole_first, whole_end; /* of a wide block: tiles that all of the warpgroup's rows see to the last key */

    __device__ bool partly(int i) const
    {
        if (S::WIDE)
            return i < whole_first || i >= whole_end;
        const int key = masks.first_key + i * S::KEYS;
        return view.every_first > key || min(view.every_end, masks.end_key) < key + S::KEYS;
    }
    __device__ void take_turn() const
    {
        if (S::TURNS)
            named_barrier(TURN + group, 2 * WARPGROUP);
    }
    __device__ void pass_turn() const
    {
        if (S::TURNS)
            named_barrier_arrive(TURN + (group == S::GROUPS - 1 ? 0 : group + 1), 2 * WARPGROUP);
    }
};

template <typename S, bool BF16>
__device__ __forceinline__ void issue_scores(float (&s)[S::KEYS / 8][4], const Consumer<S> &my, int i)
{
    const uint64_t q = k_major(my.memory.base + my.group * S::GROUP_BYTES), k = k_major(my.memory.k(i));
#pragma unroll
    for (int step = 0; step < S::D / 16; step++) {
        constexpr int Q_BLOCK = WARPGROUP_ROWS * 128 / 16, K_BLOCK = S::KEYS * 128 / 16;
        product_16<BF16>(s, q + step / 4 * Q_BLOCK + step % 4 * 2, k + step / 4 * K_BLOCK + step % 4 * 2, step != 0);
    }
    products_commit();
}

/* Nothing is added where `away`: the products then read a block of zeros. (A branch around them would make the compiler
 * run all products one after the other. For a wide block it makes one of a plain choice of address, too.) */
template <typename S, bool BF16>
__device__ __forceinline__ void issue_values(State16<S::D, 1> &state, const uint32_t (&p)[S::KEYS / 16][4],
                                             const Consumer<S> &my, int i, bool away)
{
    const uint64_t zeros = SWIZZLE_128 | (my.memory.base + S::ZEROS_AT & 0x3ffff) >> 4;
    uint64_t v;
    if (S::WIDE)
        asm("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n selp.b64 %0, %1, %2, p;\n}"
            : "=l"(v)
            : "l"(zeros), "l"(mn_major(my.memory.v(i), S::KEYS * 128)), "r"(static_cast<uint32_t>(away)));
    else
        v = away ? zeros : mn_major(my.memory.v(i), S::KEYS * 128);
    const uint32_t rows_16 = away ? 0 : 128;
#pragma unroll
    for (int step = 0; step < S::KEYS / 16; step++)
        product_16<BF16>(state.o[0], p[step], v + step * rows_16);
    products_commit();
}

/* Is tile i masked for some row and not finite? All threads of the warpgroup get the same answer. */
template <typename S, bool BF16> __device__ __forceinline__ bool needs_care(const Consumer<S> &my, int i)
{
    return my.partly(i) &&
           named_barrier_any(OWN + my.group, WARPGROUP, has_non_finite<BF16>(my.memory.v(i), S::TILE_BYTES));
}

/* P·V with care: the state goes through memory, so that otherwise it has no address. */
template <typename S, bool BF16>
__device__ __forceinline__ void add_with_care(State16<S::D, 1> &state, const uint32_t (&p)[S::KEYS / 16][4],
                                              const Consumer<S> &my, int i)
{
    constexpr int D = S::D, KEYS = S::KEYS;
    State16<D, 1> in_memory = state;
    uint32_t p_in_memory[KEYS / 16][4];
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            p_in_memory[k][j] = p[k][j];
    careful_values<D, BF16, KEYS>(in_memory, p_in_memory, my.memory.v(i), my.job, my.unit, my.masks.first_row,
                                  my.masks.b, my.masks.h, my.masks.first_key + i * KEYS);
    state = in_memory;
}

/* Scores of tile i → exponentials in place, frames and sums moved on. alpha: what o has to be multiplied by; returns
 * whether that is not 1 somewhere in the warp. */
template <typename S>
__device__ __forceinline__ bool soften(float (&s)[S::KEYS / 8][4], float (&X)[2], float (&l)[2], float (&alpha)[2],
                                       const Consumer<S> &my, int i)
{
    constexpr int N = S::KEYS / 8;
    if (my.partly(i)) {
        ThreadRows<1> rows;
        if (S::WIDE)
            rows = my.masks.rows;
        else
            warp_rows<1>(my.job, my.unit, my.masks.first_row, rows);
        const int key = my.masks.first_key + i * S::KEYS + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = key + n * 8 + (j & 1);
                if (at < rows.first[j >> 1] || at >= min(rows.end[j >> 1], my.masks.end_key))
                    s[n][j] = -CUDART_INF_F;
            }
    }
    const float c = my.job.c;
    bool moves[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        moves[h] = move_frame(s, h, c, X[h], alpha[h]);
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

/* Tiles [first, end) of a wide block that no row of the warpgroup sees. */
template <typename S> __device__ __forceinline__ void pass_over(const Consumer<S> &my, int first, int end)
{
    for (int i = first; i < end; i++) {
        if (i > 0) { /* the block's first tile is no turn */
            my.take_turn();
            my.pass_turn();
        }
        barrier_wait(my.memory.k_full(i), my.memory.phase(i));
        barrier_wait(my.memory.v_full(i), my.memory.phase(i));
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            barrier_arrive(my.memory.k_empty(i));
            barrier_arrive(my.memory.v_empty(i));
        }
    }
}

/* Tiles [first, end), one at least. */
template <typename S, bool BF16>
__device__ __forceinline__ void consume(State16<S::D, 1> &state, const Consumer<S> &my, int first, int end)
{
    constexpr int N = S::KEYS / 8;
    const ExactMemory<S> &memory = my.memory;
    const bool first_lane = (threadIdx.x & 31) == 0;
    float s[N][4], l[2] = {0.0f, 0.0f}, alpha[2];
    uint32_t p[N / 2][4];
    auto read = [&](uint32_t empty) {
        if (first_lane)
            barrier_arrive(empty);
    };

    barrier_wait(memory.k_full(first), memory.phase(first));
    if (first > 0)
        my.take_turn();
    products_fence();
    issue_scores<S, BF16>(s, my, first);
    if (first > 0)
        my.pass_turn();
    products_wait<0>();
    pin(s);
    read(memory.k_empty(first));
    soften<S>(s, state.X, l, alpha, my, first);
    pack_probabilities<BF16>(s, p);

    for (int i = first + 1; i < end; i++) {
        barrier_wait(memory.k_full(i), memory.phase(i));
        barrier_wait(memory.v_full(i - 1), memory.phase(i - 1));
        const bool care = needs_care<S, BF16>(my, i - 1);
        if (care)
            add_with_care<S, BF16>(state, p, my, i - 1);
        my.take_turn();
        pin(s);
        pin(p);
        pin(state.o[0]);
        products_fence();
        issue_scores<S, BF16>(s, my, i);
        issue_values<S, BF16>(state, p, my, i - 1, care);
        my.pass_turn();
        products_wait<1>();
        pin(s);
        read(memory.k_empty(i));
        const bool moves = soften<S>(s, state.X, l, alpha, my, i);
        products_wait<0>();
        pin(state.o[0]);
        read(memory.v_empty(i - 1));
        if (moves)
            multiply<S::D>(state, alpha);
        pack_probabilities<BF16>(s, p);
    }

    barrier_wait(memory.v_full(end - 1), memory.phase(end - 1));
    const bool care = needs_care<S, BF16>(my, end - 1);
    if (care)
        add_with_care<S, BF16>(state, p, my, end - 1);
    pin(p);
    pin(state.o[0]);
    products_fence();
    issue_values<S, BF16>(state, p, my, end - 1, care);
    products_wait<0>();
    pin(state.o[0]);
    if (S::WIDE) /* other warpgroups may have tiles to come */
        read(memory.v_empty(end - 1));
#pragma unroll
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
        state.l[0][2 * h] = state.l[0][2 * h + 1] = l[h];
    }
}

/* n tiles of a wide block, of which each warpgroup multiplies those that its rows see: at the diagonal they differ. */
template <typename S, bool BF16>
__device__ __forceinline__ void consume_seen(State16<S::D, 1> &state, const Consumer<S> &my, int n)
{
    const int first = max(my.view.any_first - my.masks.first_key, 0) / S::KEYS,
              end = min((my.view.any_end - my.masks.first_key + S::KEYS - 1) / S::KEYS, n);
    if (first < end) {
        pass_over(my, 0, first);
        consume<S, BF16>(state, my, first, end);
        pass_over(my, end, n);
    } else {
        pass_over(my, 0, n);
    }
}

/* The unit that row `row` of a KV head's line lies in. Rows before the batch's first come as padding: of a unit past
 * the last. */
__device__ __forceinline__ Unit unit_of_line(const apa_cuda_job &job, const apa_cuda_stretch &place, int row)
{
    const int64_t head_first = static_cast<int64_t>(place.head) * job.units;
    const bool before = row < 0 || head_first + row / APA_CUDA_UNIT < job.unit_first;
    Unit unit;
    unit.head = place.head;
    unit.number = before ? job.units : row / APA_CUDA_UNIT;
    unit.index = head_first + unit.number;
    unit.local = unit.index - job.unit_first;
    unit.split = place.split;
    return unit;
}

/* Tiles that some row of the wide block sees, cut to its split: tile_range() for more rows than a unit's. (One function
 * for both makes other kernels spill more.) All threads call it. */
template <int ROWS>
__device__ __forceinline__ TileRange wide_range(const apa_cuda_job &job, const apa_cuda_stretch &place)
{
    __shared__ int range[2];
    if (threadIdx.x == 0) {
        range[0] = job.tiles;
        range[1] = 0;
    }
    __syncthreads();
    if (threadIdx.x < ROWS) {
        const int at = place.row + static_cast<int>(threadIdx.x);
        const Row row = row_of(job, unit_of_line(job, place, at), at & APA_CUDA_UNIT - 1);
        if (row.first < row.end) {
            atomicMin(&range[0], row.first / APA_CUDA_TILE);
            atomicMax(&range[1], (row.end - 1) / APA_CUDA_TILE + 1);
        }
    }
    __syncthreads();
    const int part = (job.tiles + job.splits - 1) / job.splits, first = max(range[0], place.split * part);
    return {first, max(first, min(range[1], (place.split + 1) * part))};
}

#endif

template <typename S, bool BF16>
static __global__ void __launch_bounds__(S::THREADS, 1)
    wgmma_exact_kernel(const __grid_constant__ apa_cuda_job job, const __grid_constant__ apa_wgmma_maps maps)
{
#ifdef APA_CUDA_BULK
    chain_go();
    extern __shared__ uint8_t shared[];
    __shared__ WarpView views[4 * S::GROUPS];
    const ExactMemory<S> memory = {(shared_address(shared) + 1023) & ~1023u};
    const int warp = threadIdx.x / 32;
    apa_cuda_stretch place = {};
    if (S::WIDE)
        place = apa_cuda_stretch_to_end(&job, blockIdx.x, gridDim.x, S::ROWS);
    /* of the warpgroup: one, since a wide block's rows are counted from a unit's end */
    const Unit unit = S::WIDE               ? unit_of_line(job, place, place.row + warp / 4 * WARPGROUP_ROWS)
                      : job.early_only != 0 ? early_unit_of(job, blockIdx.x)
                                            : unit_of(job, blockIdx.x, job.splits);
    if (unit.number < 0) {
        chain_wait();
        return;
    }
    const int b = unit.head / job.Hkv, h = unit.head % job.Hkv;
    const TileRange tiles = S::WIDE ? wide_range<S::ROWS>(job, place) : tile_range(job, unit, job.splits);
    constexpr int PER_STEP = S::KEYS / APA_CUDA_TILE;
    const int first_key = tiles.first * APA_CUDA_TILE, n = (tiles.end - tiles.first + PER_STEP - 1) / PER_STEP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(memory.k_full(i), 1);
            barrier_init(memory.v_full(i), 1);
            barrier_init(memory.k_empty(i), 4 * S::GROUPS); /* warps that read */
            barrier_init(memory.v_empty(i), 4 * S::GROUPS);
        }
        barrier_init_fence();
    }
    for (int at = threadIdx.x * 16; at < S::ZEROS; at += S::THREADS * 16) {
        const uint32_t zeros[4] = {0, 0, 0, 0};
        store_shared_16(memory.base + S::ZEROS_AT + at, zeros);
    }
    fence_for_async();
    __syncthreads();
    if (warp >= 4 * S::GROUPS) {
        give_registers<S::PRODUCER_REGISTERS>();
        if (threadIdx.x == S::GROUPS * WARPGROUP)
            feed(memory, maps, first_key, n, h, b);
    } else {
        take_registers<S::CONSUMER_REGISTERS>();
        const int group = warp / 4;
        const int group_row = S::WIDE ? place.row + group * WARPGROUP_ROWS & APA_CUDA_UNIT - 1 : group * WARPGROUP_ROWS;
        const int first_row = group_row + warp % 4 * 16;
        const uint32_t queries = memory.base + group * S::GROUP_BYTES;
        ask_for_queries<S::D>(queries, job, b, lane_row(job, unit, first_row));
        queries_there<S::D>(queries, job);
        AtMasks masks = {{}, first_row, first_key, tiles.end * APA_CUDA_TILE, b, h};
        WarpView view = warp_rows<1>(job, unit, first_row, masks.rows);
        view = warpgroup_view(view, views + group * 4, OWN + group); /* its barrier is the queries' too */
        int whole_first = 0, whole_end = 0;
        if (S::WIDE) {
            whole_first = max(view.every_first - first_key + S::KEYS - 1, 0) / S::KEYS;
            whole_end = max(min(view.every_end, masks.end_key) - first_key, 0) / S::KEYS;
            asm volatile("" ::"l"(&masks) : "memory"); /* so it has an address, and stays out of registers */
        }
        State16<S::D, 1> state;
        clear(state);
        const Consumer<S> my = {job, unit, masks, memory, view, group, whole_first, whole_end};
        if (S::TURNS && group == S::GROUPS - 1)
            my.pass_turn();
        if constexpr (S::WIDE)
            consume_seen<S, BF16>(state, my, n);
        else if (n > 0)
            consume<S, BF16>(state, my, 0, n);
        if (job.splits > 1) {
            if (!S::WIDE || unit.number < job.units)
                store_part<S::D, 1>(state, job.part_o, job.part_frame, job.part_sum,
                                    unit.split * job.unit_count + unit.local, first_row);
        } else {
            named_barrier(OWN + group, WARPGROUP); /* no warp of it reads queries any more */
            store_lane_rows<S::D>(state, job, unit, b, first_row, lane_row(job, unit, first_row),
                                  queries + warp % 4 * 16 * S::D * 2);
        }
    }
    chain_wait(); /* at the end: it reads inputs alone, and what it writes no other kernel of an adaptive call touches
                   */
#endif
}

template <typename S, bool BF16>
static int launch(const apa_cuda_job *job, int64_t blocks, const apa_wgmma_maps *maps, cudaStream_t stream)
{
    const cudaError_t error =
        cudaFuncSetAttribute(wgmma_exact_kernel<S, BF16>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error != cudaSuccess || blocks == 0)
        return error;
    return launch_chained(job->chained, wgmma_exact_kernel<S, BF16>, blocks, S::THREADS, S::SHARED, stream, *job,
                          *maps);
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, const apa_wgmma_maps *maps, cudaStream_t stream)
{
    if constexpr (has_wide(D)) {
        using S = ExactShape<D, true>;
        if (job->wide != 0 && job->early_only == 0)
            return launch<S, BF16>(job, apa_cuda_stretches(job, S::ROWS) * job->splits, maps, stream);
    }
    const int64_t blocks = job->early_only != 0 ? apa_cuda_early_items(job) : job->unit_count * job->splits;
    return launch<ExactShape<D, false>, BF16>(job, blocks, maps, stream);
}

extern "C" int64_t apa_wgmma_exact_keys(int64_t D)
{
    return D == 64    ? ExactShape<64, false>::KEYS
           : D == 128 ? ExactShape<128, false>::KEYS
                      : ExactShape<256, false>::KEYS;
}

extern "C" int64_t apa_wgmma_exact_rows(int64_t D)
{
    return has_wide(D) ? ExactShape<64, true>::ROWS : APA_CUDA_UNIT;
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
