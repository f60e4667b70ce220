/* Pass 1: every tile in INT8, whatever its verdict.
 *
 * A warp keeps 32 rows (two groups of 16; one at D = 256), so that a fragment of K or V that it reads from shared
 * memory serves two products. For every tile it adds P·V to o and the row sums to λ, and asks whether a row's mass in
 * the tile exceeds ε of its λ so far. λ only grows, so a tile that fails the test now is cold for good; of a tile that
 * passes, a *candidate*, the masses of the group's 16 rows are written down, and judge.cu asks again when λ is
 * complete.
 *
 * P·V cannot wait for that verdict, so it is added on a guess: a candidate that would still pass if λ went on growing
 * at its pace so far is held back, any other is added. Where the guess was wrong, pass 2 (hot.cu) adds or takes out the
 * tile's INT8 sums: the same integers with the same scales, so what is taken out leaves only FP32 rounding behind. No P
 * is kept and the guess decides about time alone.
 *
 * o, λ are sums of 2^(s - frame); frame is a row's largest score of some tile, and moves when a tile passes it by
 * SLACK. */
#include "cuda/warp_mma/ring.cuh"
#include "cuda/warp_mma/store.cuh"
#include "cuda/warp_mma/tile_i8.cuh"

constexpr float COLD_SLACK = 8.0f;

template <int D> struct ColdShape {
    static constexpr int MT = D <= 128 ? 2 : 1;
    static constexpr int WARPS = APA_CUDA_UNIT / (16 * MT);
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BLOCKS = D <= 128 ? 2 : 1;
    static constexpr int STAGES = D <= 128 ? 4 : 3;
    static constexpr int Q_BYTES = APA_CUDA_UNIT * D;
    using Tiles = Ring<STAGES, Blob<D>::BYTES, THREADS>;
    static constexpr int SHARED = Q_BYTES + Tiles::SHARED;
};

template <int D, int MT> struct ColdState {
    float o[MT][D / 8][4];
    float frame[2 * MT], lambda[2 * MT], sum[2 * MT]; /* sum: λ without what was held back */
};

/* What does not change from tile to tile. */
template <int MT> struct Constants {
    float q_scale[2 * MT];
    uint32_t q; /* shared memory: the lane's first piece of Q */
    int first_row;
};

/* Moves frames that a tile maximum leapt over. */
template <int D, int MT>
__device__ __forceinline__ void move_frames(ColdState<D, MT> &state, const float (&top)[2 * MT])
{
    bool moves = false;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
        moves = moves || top[r] > state.frame[r] + COLD_SLACK;
    if (!__any_sync(0xffffffffu, moves))
        return;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        float alpha = 1.0f;
        if (top[r] > state.frame[r] + COLD_SLACK) {
            alpha = exp2_fast(state.frame[r] - top[r]);
            state.frame[r] = top[r];
        }
        state.lambda[r] *= alpha;
        state.sum[r] *= alpha;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            state.o[r / 2][n][2 * (r % 2)] *= alpha;
            state.o[r / 2][n][2 * (r % 2) + 1] *= alpha;
        }
    }
}

/* A candidate's kind and masses. Bytes of other tiles were zeroed before. */
static __device__ __noinline__ void write_candidate(const apa_cuda_job &job, int64_t at, bool held, float top_0,
                                                    float top_1, float total_0, float total_1)
{
    const int lane = threadIdx.x & 31, g = lane >> 2;
    if (lane == 0)
        job.candidate[at] = held ? APA_CUDA_CANDIDATE_HELD : APA_CUDA_CANDIDATE_ADDED;
    if ((lane & 3) == 0) {
        job.mass[at * 16 + g] = top_0 + log2_fast(total_0) - LOG2_STEPS;
        job.mass[at * 16 + 8 + g] = top_1 + log2_fast(total_1) - LOG2_STEPS;
    }
}

/* One tile. */
template <int D, int MT, bool PARTLY>
__device__ __forceinline__ void work_on_tile(ColdState<D, MT> &state, const apa_cuda_job &job, const Unit &unit,
                                             const Constants<MT> &constants, uint32_t blob, int tile, float held_above)
{
    float s[MT][8][4], top[2 * MT];
    scores_i8<D, MT>(
        s, blob, [&](int mt, int step, uint32_t(&q)[4]) { load_shared_16(q, constants.q + mt * 16 * D + step * 512); });
    if (PARTLY) {
        ThreadRows<MT> rows; /* made again for the few tiles that need it: registers are scarce */
        warp_rows<MT>(job, unit, constants.first_row, rows);
        mask<MT>(s, rows, tile);
    }
    row_maxima<MT>(s, top);
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
        top[r] *= constants.q_scale[r];
    move_frames<D, MT>(state, top);
    float weight[2 * MT], total[2 * MT];
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
        weight[r] = PARTLY && top[r] == -CUDART_INF_F ? 0.0f : exp2_fast(top[r] - state.frame[r]) * (1.0f / 255.0f);
    uint32_t p[MT][2][4];
    probabilities_i8<MT, PARTLY>(s, constants.q_scale, top, p, total);
    bool above[MT], far_above[MT];
    float mass[2 * MT];
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        mass[r] = total[r] * weight[r];
        state.lambda[r] += mass[r];
        above[r / 2] = (r % 2 != 0 && above[r / 2]) || mass[r] > job.eps * state.lambda[r];
        far_above[r / 2] = (r % 2 != 0 && far_above[r / 2]) || mass[r] > held_above * state.lambda[r];
        state.sum[r] += mass[r];
    }
    bool any_above = above[0];
#pragma unroll
    for (int mt = 1; mt < MT; mt++)
        any_above = any_above || above[mt];
    if (__any_sync(0xffffffffu, any_above)) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            const bool candidate = __any_sync(0xffffffffu, above[mt]), held = __any_sync(0xffffffffu, far_above[mt]);
            if (candidate)
                write_candidate(job,
                                (unit.local * APA_CUDA_UNIT_GROUPS + constants.first_row / 16 + mt) * job.tiles + tile,
                                held, top[2 * mt], top[2 * mt + 1], total[2 * mt], total[2 * mt + 1]);
#pragma unroll
            for (int r = 2 * mt; r < 2 * mt + 2; r++) {
                weight[r] = held ? 0.0f : weight[r];
                state.sum[r] -= held ? mass[r] : 0.0f;
            }
        }
    }
    add_values_i8<D / 8, MT, 4>(state.o, p, blob + Blob<D>::V, blob + Blob<D>::V_SCALE, weight);
}

template <int D>
static __global__ void __launch_bounds__(ColdShape<D>::THREADS, ColdShape<D>::BLOCKS)
    cold_kernel(const __grid_constant__ apa_cuda_job job)
{
    using S = ColdShape<D>;
    constexpr int MT = S::MT;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = kept(shared_address(shared));
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Unit unit = unit_of(job, blockIdx.x, job.splits);
    const TileRange tiles = tile_range(job, unit, job.splits);
    const int n = tiles.end - tiles.first;

    /* the sink tile, then from the last one backwards; backwards alone in the splits that do not hold the sink */
    auto tile_at = [&](int i) { return tiles.first > 0 ? tiles.end - 1 - i : i == 0 ? 0 : tiles.end - i; };
    const uint8_t *blobs = job.blob + static_cast<int64_t>(unit.head) * job.tiles * Blob<D>::BYTES;
    auto source = [&](int i) { return blobs + static_cast<int64_t>(tile_at(i)) * Blob<D>::BYTES; };
    typename S::Tiles ring;
    {
        const uint4 *from = reinterpret_cast<const uint4 *>(job.q8 + unit.local * S::Q_BYTES);
        for (int i = threadIdx.x; i < S::Q_BYTES / 16; i += S::THREADS)
            reinterpret_cast<uint4 *>(shared)[i] = from[i];
    }
    ring.start(base + S::Q_BYTES, n, source);
    __syncthreads();

    Constants<MT> constants;
    constants.first_row = warp * 16 * MT;
    constants.q = base + constants.first_row * D + lane * 16;
    WarpView view;
    {
        ThreadRows<MT> rows;
        view = warp_rows<MT>(job, unit, constants.first_row, rows);
    }
    const float all_tiles = static_cast<float>(n) * job.splits; /* to tell how much of λ is still to come */
    ColdState<D, MT> state;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        constants.q_scale[r] = job.q_scale[unit.local * APA_CUDA_UNIT + constants.first_row + r * 8 + (lane >> 2)];
        state.frame[r] = -CUDART_INF_F;
        state.lambda[r] = state.sum[r] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 8; c++)
            state.o[r / 2][c][2 * (r % 2)] = state.o[r / 2][c][2 * (r % 2) + 1] = 0.0f;
    }

    for (int i = 0; i < n; i++) {
        const int tile = tile_at(i);
        const uint32_t blob = ring.next(i, source);
        if (view.sees(tile) && load_shared_4(blob + Blob<D>::FLAG) == 0) {
            const float held_above = job.eps * fmaxf(1.0f, __fdividef(all_tiles, static_cast<float>(i + 1)));
            if (view.partly(tile))
                work_on_tile<D, MT, true>(state, job, unit, constants, blob, tile, held_above);
            else
                work_on_tile<D, MT, false>(state, job, unit, constants, blob, tile, held_above);
        }
        ring.done(i);
    }

    /* as a State16, so that it is stored the same way */
    State16<D, MT> stored;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        stored.X[r] = state.frame[r];
        stored.l[r / 2][2 * (r % 2)] = state.sum[r];
        if ((lane & 3) == 0)
            job.part_lambda[(unit.split * job.unit_count + unit.local) * APA_CUDA_UNIT + constants.first_row + r * 8 +
                            (lane >> 2)] = state.lambda[r];
#pragma unroll
        for (int c = 0; c < D / 8; c++) {
            stored.o[r / 2][c][2 * (r % 2)] = state.o[r / 2][c][2 * (r % 2)];
            stored.o[r / 2][c][2 * (r % 2) + 1] = state.o[r / 2][c][2 * (r % 2) + 1];
        }
    }
    store_part<D, MT>(stored, job.part_o, job.part_frame, job.part_sum, unit.split * job.unit_count + unit.local,
                      constants.first_row);
}

template <int D> static int launch(const apa_cuda_job *job, cudaStream_t stream)
{
    using S = ColdShape<D>;
    cudaError_t error = cudaFuncSetAttribute(cold_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error == cudaSuccess)
        error = cudaMemsetAsync(job->candidate, 0,
                                static_cast<size_t>(job->unit_count) * APA_CUDA_UNIT_GROUPS * job->tiles, stream);
    if (error != cudaSuccess)
        return error;
    cold_kernel<D><<<static_cast<unsigned>(job->unit_count * job->splits), S::THREADS, S::SHARED, stream>>>(*job);
    return cudaGetLastError();
}

extern "C" int64_t apa_cuda_cold_shared_bytes(int64_t D)
{
    return D == 64 ? ColdShape<64>::SHARED : D == 128 ? ColdShape<128>::SHARED : ColdShape<256>::SHARED;
}

extern "C" int apa_cuda_launch_cold(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    return job->D == 64 ? launch<64>(job, stream) : job->D == 128 ? launch<128>(job, stream) : launch<256>(job, stream);
}
