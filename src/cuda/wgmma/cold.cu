/* Pass 1 on Hopper: every tile in E4M3, whatever its verdict; tiles in pairs (tile_e4m3.cuh).
 *
 * A block takes 128 rows in line: two warpgroups of 64 rows, and one thread that keeps a ring of pairs full. Queries
 * stay in registers.
 *
 *     step i of a warpgroup    issue S(i+1) = Q·Kᵀ
 *                              P·V of pair i-1: masses, verdicts, o += weight·P·V in FP32, while S(i+1) goes on
 *                              issue P(i)·V(i); frames of pair i
 *                              wait for S(i+1): codes of P(i+1), while P·V goes on
 *                              wait for P·V
 *
 * so that the arithmetic of either product runs beside the other one, and beside the other warpgroup's: the two take
 * turns at issuing. Rare code works from shared memory, so that it takes no registers from the loop.
 *
 * Sums of E4M3 products keep about 13 bits, so they are taken over one pair. Verdicts fall on a guess as
 * in cuda/warp_mma: a tile whose mass in some row exceeds ε of λ so far is a candidate, written down with its masses,
 * and held back if it would still pass with λ grown at its pace so far; what was guessed wrong, fix.cu sets right. Rows
 * of a verdict are the 16 of a warp: a warp leaves out what it holds back. */
#include "cuda/chain.cuh"
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/tile_e4m3.cuh"

constexpr int COLD_GROUPS = 2, COLD_ROWS = COLD_GROUPS * 64;

template <int D> struct ColdShape {
    static constexpr int STAGES = D == 64 ? 8 : 5;
    static constexpr int THREADS = (COLD_GROUPS + 1) * 128;
    static constexpr int FULL_AT = STAGES * Pair<D>::STAGE;
    static constexpr int ROWS_AT = FULL_AT + STAGES * 16; /* first key seen and end, of each row */
    static constexpr int SHARED = ROWS_AT + COLD_ROWS * 8 + 1024;
};

#ifdef APA_CUDA_BULK

constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int TURN = 1; /* and 2, named barriers: the warpgroup may issue */

/* A place in the ring, one step after the other. Its addresses are kept, so that a step does not begin by working them
 * out. */
template <int D> struct Cursor {
    using S = ColdShape<D>;
    uint32_t base, stage, full, phase = 0;

    __device__ explicit Cursor(uint32_t shared) : base(shared), stage(shared), full(shared + S::FULL_AT)
    {
    }
    __device__ uint32_t empty() const
    {
        return full + 8;
    }
    __device__ void advance()
    {
        stage += Pair<D>::STAGE;
        full += 16;
        if (stage == base + S::FULL_AT) {
            stage = base;
            full = base + S::FULL_AT;
            phase ^= 1;
        }
    }
};

/* The sink pair, then from the last one backwards; backwards alone where the sink is not among them. */
__device__ __forceinline__ int pair_at(const PairRange &pairs, int i)
{
    return pairs.first > 0 ? pairs.end - 1 - i : i == 0 ? 0 : pairs.end - i;
}

/* The unit that holds a row of the line. */
__device__ __forceinline__ Unit unit_of_row(const apa_cuda_job &job, const apa_cuda_stretch &place, int row)
{
    Unit unit;
    unit.head = place.head;
    unit.number = row / APA_CUDA_UNIT;
    unit.index = static_cast<int64_t>(place.head) * job.units + unit.number;
    unit.local = unit.index - job.unit_first;
    unit.split = place.split;
    return unit;
}

/* Pairs that some row of the block sees, cut to its split. All threads call it. */
__device__ __forceinline__ PairRange block_pairs(const apa_cuda_job &job, const apa_cuda_stretch &place)
{
    __shared__ int range[2];
    if (threadIdx.x == 0) {
        range[0] = job.tiles;
        range[1] = 0;
    }
    __syncthreads();
    if (threadIdx.x < COLD_ROWS) {
        const int at = place.row + static_cast<int>(threadIdx.x);
        const Row row = row_of(job, unit_of_row(job, place, at), at % APA_CUDA_UNIT);
        if (row.first < row.end) {
            atomicMin(&range[0], row.first / PAIR_KEYS);
            atomicMax(&range[1], (row.end - 1) / PAIR_KEYS + 1);
        }
    }
    __syncthreads();
    const int part = ((job.tiles + 1) / 2 + job.splits - 1) / job.splits;
    PairRange pairs = {max(range[0], place.split * part), min(range[1], (place.split + 1) * part)};
    pairs.end = max(pairs.end, pairs.first);
    return pairs;
}

/* What a warp rarely needs. */
struct WarpPlace {
    const apa_cuda_job &job;
    const Unit &unit;
    int first_row;          /* in the unit */
    uint32_t row_table;     /* of the warp, in shared memory */
    PairRange pairs, whole; /* whole: pairs that every row of the warp sees to the last key */
};

/* What the thread's rows see: kept in shared memory, as few pairs need it. */
__device__ __forceinline__ void store_rows(uint32_t table, const ThreadRows<1> &seen)
{
    const uint32_t at = table + (threadIdx.x & 31) / 4 * 8;
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at), "r"(seen.first[0]), "r"(seen.end[0]) : "memory");
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at + 64), "r"(seen.first[1]), "r"(seen.end[1]) : "memory");
}

__device__ __forceinline__ void load_rows(ThreadRows<1> &seen, uint32_t table)
{
    const uint32_t at = table + (threadIdx.x & 31) / 4 * 8;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(seen.first[0]), "=r"(seen.end[0]) : "r"(at) : "memory");
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(seen.first[1]), "=r"(seen.end[1]) : "r"(at + 64) : "memory");
}

/* A pair whose P·V is under way. */
struct PairAhead {
    float top[2], weight[2], v_scale;
    float
        apart; /* times the smaller sum of a row's two tiles: below the larger one, they are too far from each other */
};

/* Both tiles of a pair become candidates: their kind, and their rows' masses, a lane one of them. Bytes of other tiles
 * were zeroed before. */
__device__ __forceinline__ void write_candidates(const float (&sums)[4], const float (&top)[2], const WarpPlace &my,
                                                 int number, bool held)
{
    const int lane = threadIdx.x & 31, tile = lane & 1, h = lane >> 1 & 1;
    const int64_t at = (my.unit.local * APA_CUDA_UNIT_GROUPS + my.first_row / 16) * my.job.tiles + 2 * number;
    const float sum = h == 0 ? (tile == 0 ? sums[0] : sums[1]) : (tile == 0 ? sums[2] : sums[3]);
    const float frame = h == 0 ? top[0] : top[1];
    if (2 * number + tile >= my.job.tiles)
        return;
    my.job.mass[(at + tile) * 16 + h * 8 + (lane >> 2)] =
        sum > 0.0f ? frame + log2_fast(sum) - LOG2_P_RANGE : -CUDART_INF_F;
    if (lane < 2)
        my.job.candidate[at + lane] = held ? APA_CUDA_CANDIDATE_HELD : APA_CUDA_CANDIDATE_ADDED;
}

/* P·V of pair number i of the walk is there: masses, verdicts, sums. */
template <int D>
__device__ __forceinline__ void take_in(ColdRows<D> &rows, const float (&acc)[D / 8 + 1][4], const PairAhead &pair,
                                        const WarpPlace &my, int i)
{
    float most[2], both[2];
    bool above = false, apart = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float first = acc[D / 8][2 * h] * pair.weight[h], second = acc[D / 8][2 * h + 1] * pair.weight[h];
        both[h] = first + second;
        most[h] = fmaxf(first, second);
        rows.lambda[h] += both[h];
        above = above || most[h] > my.job.eps * rows.lambda[h];
        apart = apart || fminf(first, second) * pair.apart < most[h];
    }
    if (__builtin_expect(__any_sync(0xffffffffu, above || apart), 0)) {
        const float pairs = static_cast<float>(my.pairs.end - my.pairs.first) * static_cast<float>(my.job.splits);
        const float held_above = my.job.eps * fmaxf(1.0f, __fdividef(pairs, static_cast<float>(i + 1)));
        const bool held = __any_sync(0xffffffffu, apart || most[0] > held_above * rows.lambda[0] ||
                                                      most[1] > held_above * rows.lambda[1]);
        write_candidates(acc[D / 8], pair.top, my, pair_at(my.pairs, i), held);
        if (held) {
            rows.held[0] += both[0];
            rows.held[1] += both[1];
            return;
        }
    }
    add_pair<D>(rows, acc, pair.weight, pair.v_scale);
}

/* Whether the warp has to look at each key of pair `number`. */
__device__ __forceinline__ bool is_partial(const WarpPlace &my, const PairMeta &meta, int number)
{
    return static_cast<uint32_t>(number - my.whole.first) >= static_cast<uint32_t>(my.whole.end - my.whole.first) ||
           meta.poisoned != 0;
}

/* Scores → codes and frames. */
__device__ __forceinline__ void soften_step(uint32_t (&s)[32], PairAhead &pair, const float (&q_unit)[2],
                                            const PairMeta &meta, bool partial, const WarpPlace &my, int number)
{
    const float unit[2] = {q_unit[0] * meta.k_scale, q_unit[1] * meta.k_scale};
    pair.apart = APART;
    if (__builtin_expect(partial, 0)) {
        ThreadRows<1> seen;
        const int key = number * PAIR_KEYS;
        load_rows(seen, my.row_table);
        mask_pair(s, seen, key, meta.poisoned);
        /* a row that sees nothing of a tile has no sum of it */
        const int middle = key + APA_CUDA_TILE, first = max(seen.first[0], seen.first[1]),
                  end = min(seen.end[0], seen.end[1]);
        if (first >= middle || end <= middle || meta.poisoned != 0)
            pair.apart = CUDART_INF_F;
    }
    soften_pair(s, unit, meta.phase, pair.top);
}

/* Scores of the first pair of the walk → codes. */
template <int D, bool BIAS>
__device__ __forceinline__ PairMeta begin(PairState<D> &pair, PairAhead &next, const uint32_t (&q)[D / 32][4],
                                          const uint32_t (&picks)[4], const float (&q_unit)[2], uint32_t stage,
                                          const WarpPlace &my)
{
    const int number = pair_at(my.pairs, 0);
    products_fence();
    issue_pair_scores<D, BIAS>(pair.s, q, picks, stage);
    const PairMeta meta = load_meta(stage + Pair<D>::META_AT);
    products_wait<0>();
    pin(pair.s);
    soften_step(pair.s, next, q_unit, meta, is_partial(my, meta, number), my, number);
#pragma unroll
    for (int k = 0; k <= D / 8; k++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            pair.acc[k][j] = 0.0f; /* there is nothing to take in before the first */
    return meta;
}

template <int D, bool BIAS>
__device__ __forceinline__ void walk(ColdRows<D> &rows, const uint32_t (&q)[D / 32][4], const uint32_t (&picks)[4],
                                     const float (&q_unit)[2], uint32_t shared, const WarpPlace &my)
{
    const int n = my.pairs.end - my.pairs.first;
    if (n == 0)
        return;
    Cursor<D> here(shared), ahead(shared);
    PairState<D> pair;
    PairAhead next, last = {{0.0f, 0.0f}, {0.0f, 0.0f}, 0.0f, CUDART_INF_F};
    barrier_wait(here.full, here.phase);
    PairMeta meta = begin<D, BIAS>(pair, next, q, picks, q_unit, here.stage, my);
    if (n > 1)
        ahead.advance();
    bool ready = false;
    const int group = threadIdx.x / 128;
    if (group == 1)
        named_barrier_arrive(TURN, COLD_GROUPS * 128);
    for (int i = 0; i < n; i++) { /* the last step multiplies its own keys once more, for nothing */
        next.v_scale = meta.v_scale;
        pack_pair(pair.s, pair.p);
        if (!ready)
            barrier_wait(ahead.full, ahead.phase);
        named_barrier(TURN + group, COLD_GROUPS * 128);
        pin(pair.s);
        pin(pair.p);
        products_fence();
        issue_pair_scores<D, BIAS>(pair.s, q, picks, ahead.stage);
        meta = load_meta(ahead.stage + Pair<D>::META_AT);
        take_in<D>(rows, pair.acc, last, my, i - 1);
        pin(pair.acc);
        products_fence();
        issue_pair_values<D>(pair.acc, pair.p, here.stage);
        if (group == 0 || i + 1 < n)
            named_barrier_arrive(TURN + 1 - group, COLD_GROUPS * 128);
        meet_frames<D>(rows, next.top);
#pragma unroll
        for (int h = 0; h < 2; h++)
            next.weight[h] = weight_of(next.top[h], rows.frame[h]);
        last = next;
        const uint32_t release = here.empty();
        here = ahead;
        if (i + 2 < n)
            ahead.advance();
        const int number = pair_at(my.pairs, i + 1);
        const bool partial = is_partial(my, meta, number);
        products_wait<1>();
        pin(pair.s);
        soften_step(pair.s, next, q_unit, meta, partial, my, number);
        ready = barrier_test(ahead.full, ahead.phase);
        products_wait<0>();
        pin(pair.acc);
        __syncwarp();
        if ((threadIdx.x & 31) == 0)
            barrier_arrive(release);
    }
    take_in<D>(rows, pair.acc, last, my, n - 1);
}

/* One thread keeps the ring full. */
template <int D, bool BIAS>
__device__ __forceinline__ void feed(uint32_t shared, const apa_cuda_job &job, const apa_cuda_stretch &place,
                                     const PairRange &pairs)
{
    const uint8_t *blobs = job.blob + static_cast<int64_t>(place.head) * ((job.room + 1) / 2) * Pair<D>::BYTES;
    const uint32_t bias_bytes = BIAS ? BIAS_BYTES : 0;
    Cursor<D> at(shared);
    for (int i = 0; i < pairs.end - pairs.first; i++, at.advance()) {
        const int number = pair_at(pairs, i);
        const uint8_t *from = blobs + static_cast<int64_t>(number) * Pair<D>::BYTES;
        barrier_wait(at.empty(), at.phase ^ 1);
        barrier_expect(at.full, Pair<D>::BYTES + bias_bytes);
        copy_bulk(at.stage, from, Pair<D>::META, at.full);
        copy_bulk(at.stage + Pair<D>::META_AT, from + Pair<D>::META, 64, at.full);
        if (BIAS)
            copy_bulk(at.stage + Pair<D>::BIAS_AT, bias_of(job, place.head, number), bias_bytes, at.full);
    }
}

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
    const apa_cuda_stretch place = apa_cuda_stretch_of(&job, blockIdx.x, gridDim.x, COLD_ROWS);
    if (apa_cuda_is_early(&job, place.row, COLD_ROWS)) {
        chain_wait();
        return;
    }
    const PairRange pairs = block_pairs(job, place);
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
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 128 * COLD_GROUPS)
            feed<D, BIAS>(base, job, place, pairs);
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    const int line = place.row + warp * 16;
    const Unit unit = unit_of_row(job, place, line);
    const bool there = unit.number < job.units && unit.local < job.unit_count;
    WarpPlace my = {job, unit, line % APA_CUDA_UNIT, base + S::ROWS_AT + warp * 16 * 8, pairs, {0, 0}};
    {
        ThreadRows<1> seen;
        const WarpView view = warp_rows<1>(job, unit, my.first_row, seen);
        store_rows(my.row_table, seen);
        __syncwarp();
        if (there) {
            my.whole.first = (view.every_first + PAIR_KEYS - 1) / PAIR_KEYS;
            my.whole.end = max(my.whole.first, view.every_end / PAIR_KEYS);
        }
    }
    ColdRows<D> rows;
    uint32_t q[D / 32][4] = {}, picks[4];
    float q_unit[2] = {0.0f, 0.0f};
    bias_operand(picks, line / job.Sq16);
    if (there)
        load_pair_queries<D>(q, job, unit, my.first_row / 16);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (there)
            q_unit[h] = job.q_scale[unit.local * APA_CUDA_UNIT + my.first_row + h * 8 + (lane >> 2)];
        rows.frame[h] = -CUDART_INF_F;
        rows.lambda[h] = rows.held[h] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < D / 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            rows.o[k][i] = 0.0f;
    walk<D, BIAS>(rows, q, picks, q_unit, base, my);
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
    return apa_cuda_stretches(job, COLD_ROWS);
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
        return job->smooth_q ? launch<64, true>(job, stream) : launch<64, false>(job, stream);
    return job->smooth_q ? launch<128, true>(job, stream) : launch<128, false>(job, stream);
}
