/* Pass 1 on Hopper: every tile in E4M3, whatever its verdict; tiles in pairs (tile_e4m3.cuh).
 *
 * A block takes 128 rows in line: two warpgroups of 64 rows, and one thread that keeps a ring of pairs full. Queries
 * stay in registers.
 *
 *     step i of a warpgroup    issue S(i+1) = Q·Kᵀ, issue P(i)·V(i); frames of pair i
 *                              wait for S(i+1): codes of P(i+1), while P·V goes on
 *                              wait for P·V:    masses, verdicts, o += weight·P·V in FP32
 *
 * The assembler puts much of the codes' arithmetic after the second wait, between the verdict's: forced before it, the
 * whole is slower.
 *
 * Sums of E4M3 products keep about 13 bits, so they are taken over one pair. Verdicts fall on a guess as
 * in cuda/warp_mma: a tile whose mass in some row exceeds ε of λ so far is a candidate, written down with its masses,
 * and held back if it would still pass with λ grown at its pace so far; what was guessed wrong, fix.cu sets right. Rows
 * of a verdict are the 16 of a warp: a warp leaves out what it holds back. */
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/tile_e4m3.cuh"

constexpr int COLD_GROUPS = 2, COLD_ROWS = COLD_GROUPS * 64;

template <int D> struct ColdShape {
    static constexpr int STAGES = D == 64 ? 8 : 5;
    static constexpr int THREADS = (COLD_GROUPS + 1) * 128;
    static constexpr int FULL_AT = STAGES * Pair<D>::STAGE;
    static constexpr int SHARED = FULL_AT + STAGES * 16 + 1024;
};

#ifdef APA_CUDA_BULK

constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

/* A place in the ring, one step after the other. */
template <int D> struct Cursor {
    using S = ColdShape<D>;
    uint32_t base, index = 0, phase = 0;

    __device__ explicit Cursor(uint32_t shared) : base(shared)
    {
    }
    __device__ uint32_t stage() const
    {
        return base + index * Pair<D>::STAGE;
    }
    __device__ uint32_t full() const
    {
        return base + S::FULL_AT + index * 16;
    }
    __device__ uint32_t empty() const
    {
        return full() + 8;
    }
    __device__ void advance()
    {
        index++;
        if (index == S::STAGES) {
            index = 0;
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
    int first_row; /* in the unit */
    WarpView view;
    PairRange pairs;
};

/* Both tiles of a pair become candidates: their kind, and their rows' masses, a lane one of them. Bytes of other tiles
 * were zeroed before. */
__device__ __forceinline__ void write_candidates(const float (&sums)[4], const uint32_t (&row_frames)[2],
                                                 const WarpPlace &my, int number, bool held)
{
    const int lane = threadIdx.x & 31, tile = lane & 1, h = lane >> 1 & 1;
    const int64_t at = (my.unit.local * APA_CUDA_UNIT_GROUPS + my.first_row / 16) * my.job.tiles + 2 * number;
    const float sum = h == 0 ? (tile == 0 ? sums[0] : sums[1]) : (tile == 0 ? sums[2] : sums[3]);
    const uint32_t frames = h == 0 ? row_frames[0] : row_frames[1];
    const float frame = tile == 0 ? low_half(frames) : high_half(frames);
    if (2 * number + tile >= my.job.tiles)
        return;
    my.job.mass[(at + tile) * 16 + h * 8 + (lane >> 2)] =
        sum > 0.0f ? frame + log2_fast(sum) - LOG2_P_RANGE : -CUDART_INF_F;
    if (lane < 2)
        my.job.candidate[at + lane] = held ? APA_CUDA_CANDIDATE_HELD : APA_CUDA_CANDIDATE_ADDED;
}

/* P·V of pair number i of the walk is there: masses, verdicts, sums. */
template <int D>
__device__ __forceinline__ void take_in(ColdRows<D> &rows, const float (&acc)[D / 8 + 1][4],
                                        const uint32_t (&frames)[2], bool separate, const float (&weight)[2],
                                        float v_scale, const WarpPlace &my, int i)
{
    float most[2], both[2];
    bool above = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float first = acc[D / 8][2 * h] * weight[h], second = acc[D / 8][2 * h + 1] * weight[h];
        if (separate) {
            first = acc[D / 8][2 * h] * weight_of(low_half(frames[h]), rows.frame[h]);
            second = acc[D / 8][2 * h + 1] * weight_of(high_half(frames[h]), rows.frame[h]);
        }
        both[h] = first + second;
        most[h] = fmaxf(first, second);
        rows.lambda[h] += both[h];
        above = above || most[h] > my.job.eps * rows.lambda[h];
    }
    if (__any_sync(0xffffffffu, above) || separate) {
        const float pairs = static_cast<float>(my.pairs.end - my.pairs.first) * static_cast<float>(my.job.splits);
        const float held_above = my.job.eps * fmaxf(1.0f, __fdividef(pairs, static_cast<float>(i + 1)));
        const bool held = separate || __any_sync(0xffffffffu, most[0] > held_above * rows.lambda[0] ||
                                                                  most[1] > held_above * rows.lambda[1]);
        write_candidates(acc[D / 8], frames, my, pair_at(my.pairs, i), held);
        if (held) {
            rows.held[0] += both[0];
            rows.held[1] += both[1];
            return;
        }
    }
    add_pair<D>(rows, acc, weight, v_scale);
}

/* Scores of pair number i of the walk → codes, and the rows' larger frames. */
template <int D>
__device__ __forceinline__ void soften_step(PairState<D> &pair, float (&top)[2], const PairMeta &meta,
                                            const float (&q_unit)[2], const WarpPlace &my, int i)
{
    const int key = pair_at(my.pairs, i) * PAIR_KEYS;
    if (my.view.every_first > key || my.view.every_end < key + PAIR_KEYS ||
        (meta.poisoned[0] | meta.poisoned[1]) != 0) {
        ThreadRows<1> seen;
        warp_rows<1>(my.job, my.unit, my.first_row, seen);
        mask_pair(pair.s, seen, key, meta.poisoned);
    }
    const float unit[2] = {q_unit[0] * meta.k_scale, q_unit[1] * meta.k_scale};
    soften_pair<D>(pair, unit, top);
}

template <int D>
__device__ __forceinline__ void walk(ColdRows<D> &rows, const uint32_t (&q)[D / 32][4], const float (&q_unit)[2],
                                     uint32_t shared, const WarpPlace &my)
{
    const int n = my.pairs.end - my.pairs.first;
    if (n == 0)
        return;
    Cursor<D> here(shared), ahead(shared);
    PairState<D> pair;
    float top[2];
    barrier_wait(here.full(), here.phase);
    products_fence();
    issue_pair_scores<D>(pair.s, q, here.stage());
    PairMeta meta = load_meta(here.stage() + Pair<D>::META_AT);
    products_wait<0>();
    pin(pair.s);
    soften_step<D>(pair, top, meta, q_unit, my, 0);
    pack_pair(pair.s, pair.p);
    for (int i = 0; i < n; i++) {
        const bool more = i + 1 < n;
        const float v_scale = meta.v_scale;
        const uint32_t frames[2] = {pair.frames[0], pair.frames[1]};
        const bool separate = pair.separate;
        if (more) { /* the last step multiplies its own keys once more, for nothing */
            ahead.advance();
            barrier_wait(ahead.full(), ahead.phase);
        }
        pin(pair.s);
        pin(pair.p);
        pin(pair.acc);
        products_fence();
        issue_pair_scores<D>(pair.s, q, ahead.stage());
        issue_pair_values<D>(pair.acc, pair.p, here.stage());
        meta = load_meta(ahead.stage() + Pair<D>::META_AT);
        meet_frames<D>(rows, top);
        const float weight[2] = {weight_of(top[0], rows.frame[0]), weight_of(top[1], rows.frame[1])};
        products_wait<1>();
        pin(pair.s);
        soften_step<D>(pair, top, meta, q_unit, my, more ? i + 1 : i);
        products_wait<0>();
        pin(pair.acc);
        take_in<D>(rows, pair.acc, frames, separate, weight, v_scale, my, i);
        __syncwarp();
        if ((threadIdx.x & 31) == 0)
            barrier_arrive(here.empty());
        here.advance();
        pack_pair(pair.s, pair.p);
    }
}

/* One thread keeps the ring full. */
template <int D>
__device__ __forceinline__ void feed(uint32_t shared, const apa_cuda_job &job, int head, const PairRange &pairs)
{
    const uint8_t *blobs = job.blob + static_cast<int64_t>(head) * ((job.room + 1) / 2) * Pair<D>::BYTES;
    Cursor<D> at(shared);
    for (int i = 0; i < pairs.end - pairs.first; i++, at.advance()) {
        const uint8_t *from = blobs + static_cast<int64_t>(pair_at(pairs, i)) * Pair<D>::BYTES;
        barrier_wait(at.empty(), at.phase ^ 1);
        barrier_expect(at.full(), Pair<D>::BYTES);
        copy_bulk(at.stage(), from, Pair<D>::META, at.full());
        copy_bulk(at.stage() + Pair<D>::META_AT, from + Pair<D>::META, 64, at.full());
    }
}

#endif

template <int D>
static __global__ void __launch_bounds__(ColdShape<D>::THREADS, 1)
    wgmma_cold_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    using S = ColdShape<D>;
    extern __shared__ uint8_t shared[];
    const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const apa_cuda_stretch place = apa_cuda_stretch_of(&job, blockIdx.x, gridDim.x, COLD_ROWS);
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
    if (warp >= 4 * COLD_GROUPS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 128 * COLD_GROUPS)
            feed<D>(base, job, place.head, pairs);
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    const int line = place.row + warp * 16;
    const Unit unit = unit_of_row(job, place, line);
    const bool there = unit.number < job.units && unit.local < job.unit_count;
    WarpPlace my = {job, unit, line % APA_CUDA_UNIT, {}, pairs};
    {
        ThreadRows<1> seen;
        my.view = warp_rows<1>(job, unit, my.first_row, seen);
    }
    if (!there)
        my.view.every_first = 0x7fffffff; /* so that everything is masked */
    ColdRows<D> rows;
    uint32_t q[D / 32][4] = {};
    float q_unit[2] = {0.0f, 0.0f};
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
    walk<D>(rows, q, q_unit, base, my);
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

template <int D> static int launch(const apa_cuda_job *job, cudaStream_t stream)
{
    using S = ColdShape<D>;
    cudaError_t error =
        cudaFuncSetAttribute(wgmma_cold_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error == cudaSuccess)
        error = cudaMemsetAsync(job->candidate, 0,
                                static_cast<size_t>(job->unit_count) * APA_CUDA_UNIT_GROUPS * job->tiles, stream);
    if (error != cudaSuccess)
        return error;
    wgmma_cold_kernel<D>
        <<<static_cast<unsigned>(apa_wgmma_cold_blocks(job) * job->splits), S::THREADS, S::SHARED, stream>>>(*job);
    return cudaGetLastError();
}

extern "C" int64_t apa_wgmma_cold_blocks(const apa_cuda_job *job)
{
    const int64_t in_head = job->unit_count < job->units ? job->unit_count : job->units;
    return job->unit_count / in_head * apa_cuda_stretches_of_head(job, COLD_ROWS);
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
    return job->D == 64 ? launch<64>(job, stream) : launch<128>(job, stream);
}
