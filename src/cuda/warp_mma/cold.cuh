/* Pass 1: every tile in the cold format, whatever its verdict.
 *
 * A warp keeps 32 rows (two groups of 16; one at D = 256), so that a fragment of K or V that it reads from shared
 * memory serves two products. For every tile it adds P·V to o and the row sums to λ, and asks whether a row's mass in
 * the tile exceeds ε of its λ so far. λ only grows, so a tile that fails the test now is cold for good; of a tile that
 * passes, a *candidate*, the masses of the group's 16 rows are written down, and judge.cu asks again when λ is
 * complete.
 *
 * P·V cannot wait for that verdict.
 *   8 bits   It is added on a guess: a candidate that would still pass if λ went on growing at its pace so far is held
 *            back, any other is added. Where the guess was wrong, pass 2 (hot.cuh) adds or takes out the tile's sums:
 *            the same codes with the same scales, so what is taken out leaves only FP32 rounding behind. No P is kept
 *            and the guess decides about time alone. frame is a row's largest score of some tile, and moves when a
 *            tile passes it by SLACK.
 *   NVFP4    P is rounded against the frame, so a tile that is taken out would have to come out of the frame too. All
 *            candidates are held back; pass 2 adds those that turn out cold. If a score of the group exceeds its row's
 *            frame by more than τ, every row's candidate frame is c = max(frame, top), else the frame. A cold tile
 *            moves the frame to c, a held one to c - δ at most. o and λ are in units of 2^(frame + τ), times
 *            T::LOG2_RANGE.
 *
 * o, λ are sums of 2^(s - frame). Kernels that may leave tiles out (skip.cuh) are kernels of their own, and so
 * are those that go over the keys window by window: a launch goes on with the steps of the walk whose tiles are there,
 * and the state lies in memory between launches as it was in registers. */
#ifndef APA_CUDA_COLD_CUH
#define APA_CUDA_COLD_CUH

#include "cuda/warp_mma/ring.cuh"
#include "cuda/warp_mma/skip.cuh"
#include "cuda/warp_mma/store.cuh"
#include "cuda/warp_mma/tile_nvfp4.cuh"

constexpr float COLD_SLACK = 8.0f;
constexpr int COLD_AT_ONCE = 4; /* blocks of 8 channels whose products are under way together */

template <typename T, int MT> struct ColdState {
    float o[MT][T::D / 8][4];
    float frame[2 * MT], lambda[2 * MT], sum[2 * MT]; /* sum: λ without what was held back */
};

/* Rows of the warp that do not change from tile to tile. */
template <int MT> struct ColdRows {
    float q_scale[2 * MT];
    uint32_t q; /* shared memory: the lane's first 16 bytes of the first group */
    int first_row;
    Skipping skipping; /* of kernels that skip */
};

template <typename T, int MT> __device__ __forceinline__ void clear(ColdState<T, MT> &state)
{
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        state.frame[r] = -CUDART_INF_F;
        state.lambda[r] = state.sum[r] = 0.0f;
#pragma unroll
        for (int n = 0; n < T::D / 8; n++)
            state.o[r / 2][n][2 * (r % 2)] = state.o[r / 2][n][2 * (r % 2) + 1] = 0.0f;
    }
}

template <typename T, int MT> __device__ __forceinline__ void scale_row(ColdState<T, MT> &state, int r, float alpha)
{
    state.lambda[r] *= alpha;
    state.sum[r] *= alpha;
#pragma unroll
    for (int n = 0; n < T::D / 8; n++) {
        state.o[r / 2][n][2 * (r % 2)] *= alpha;
        state.o[r / 2][n][2 * (r % 2) + 1] *= alpha;
    }
}

/* Moves frames that a tile maximum leapt over. */
template <typename T, int MT>
__device__ __forceinline__ void leap_frames(ColdState<T, MT> &state, const float (&top)[2 * MT])
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
        scale_row(state, r, alpha);
    }
}

/* A candidate's kind and masses. Bytes of other tiles were zeroed before. */
static __device__ __noinline__ void write_candidate(const apa_cuda_job &job, int64_t at, bool held, float mass_0,
                                                    float mass_1)
{
    const int lane = threadIdx.x & 31, g = lane >> 2;
    if (lane == 0)
        job.candidate[at] = held ? APA_CUDA_CANDIDATE_HELD : APA_CUDA_CANDIDATE_ADDED;
    if ((lane & 3) == 0) {
        job.mass[at * 16 + g] = mass_0;
        job.mass[at * 16 + 8 + g] = mass_1;
    }
}

/* Where the masses of a group's tile go. */
__device__ __forceinline__ int64_t candidate_at(const apa_cuda_job &job, const Unit &unit, int first_row, int tile)
{
    return (unit.local * APA_CUDA_UNIT_GROUPS + first_row / 16) * job.tiles + tile;
}

/* What a code of P counts for in the row's frame. */
template <typename T, bool PARTLY> __device__ __forceinline__ float tile_weight(float top, float frame)
{
    return PARTLY && top == -CUDART_INF_F ? 0.0f : exp2_fast(top - frame) * (1.0f / T::RANGE);
}

/* A tile in which some row's mass is above ε, or whose frames have just moved: λ, weights, candidates. */
template <typename T, int MT, bool PARTLY>
__device__ __forceinline__ void
judge_tile(ColdState<T, MT> &state, const apa_cuda_job &job, const Unit &unit, const ColdRows<MT> &rows, int tile,
           float held_above, const float (&top)[2 * MT], const float (&total)[2 * MT], float (&weight)[2 * MT])
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        bool above = false, far_above = false;
        float mass[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = 2 * mt + h;
            weight[r] = tile_weight<T, PARTLY>(top[r], state.frame[r]);
            mass[h] = total[r] * weight[r];
            state.lambda[r] += mass[h];
            above = above || mass[h] > job.eps * state.lambda[r];
            far_above = far_above || mass[h] > held_above * state.lambda[r];
        }
        const bool candidate = __any_sync(0xffffffffu, above), held = __any_sync(0xffffffffu, far_above);
        if (candidate)
            write_candidate(job, candidate_at(job, unit, rows.first_row + 16 * mt, tile), held,
                            top[2 * mt] + log2_fast(total[2 * mt]) - T::LOG2_RANGE,
                            top[2 * mt + 1] + log2_fast(total[2 * mt + 1]) - T::LOG2_RANGE);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            weight[2 * mt + h] = held ? 0.0f : weight[2 * mt + h];
            state.sum[2 * mt + h] += held ? 0.0f : mass[h];
        }
    }
}

/* One tile in 8 bits. SKIP: tiles may be left out. */
template <typename T, int MT, bool PARTLY, bool SKIP>
__device__ __forceinline__ void work_on_tile_8(ColdState<T, MT> &state, const apa_cuda_job &job, const Unit &unit,
                                               const ColdRows<MT> &rows, uint32_t blob, int tile, float held_above)
{
    Scores<MT> scores;
    float top[2 * MT];
    const bool poisoned = T::poisoned(blob); /* its codes are numbers all the same: nobody has to wait for this */
    scores_8<T, MT>(scores, blob, rows.q, rows.q_scale);
    if (poisoned)
        return;
    if (PARTLY) {
        ThreadRows<MT> seen; /* made again for the few tiles that need it: registers are scarce */
        warp_rows<MT>(job, unit, rows.first_row, seen);
        mask<MT>(scores.s, seen, tile);
    }
    tops_8<T, MT>(scores, top);
    if constexpr (SKIP) {
        if (skips_tile<MT>(rows.skipping, rows.first_row, rows.q_scale, blob + T::K_SCALE, top, state.frame,
                           state.lambda)) {
            note_skipped(job, candidate_at(job, unit, rows.first_row, tile), MT);
            return;
        }
    }
    typename T::template P<MT> p;
    float total[2 * MT], weight[2 * MT], mass[2 * MT];
    probabilities_8<T, MT, PARTLY>(scores, top, p, total);
    /* neither P nor these products wait for frames and verdicts */
    Products<T, MT, COLD_AT_ONCE> products;
    multiply_values_8<T, MT, COLD_AT_ONCE>(products, p, blob, 0);
    bool rare = false;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        weight[r] = tile_weight<T, PARTLY>(top[r], state.frame[r]);
        mass[r] = total[r] * weight[r];
        rare = rare || top[r] > state.frame[r] + COLD_SLACK || mass[r] > job.eps * (state.lambda[r] + mass[r]);
    }
    if (!__any_sync(0xffffffffu, rare)) {
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            state.lambda[r] += mass[r];
            state.sum[r] += mass[r];
        }
    } else {
        leap_frames(state, top);
        judge_tile<T, MT, PARTLY>(state, job, unit, rows, tile, held_above, top, total, weight);
    }
    add_values_8<T, MT, COLD_AT_ONCE, false>(state.o, products, p, blob, weight);
}

/* The frames c that P of a tile is rounded against. Padding has no say (real: a bit a row of the thread). */
template <int MT>
__device__ __forceinline__ void candidate_frames(const float (&frame)[2 * MT], const float (&top)[2 * MT],
                                                 uint32_t real, float tau, float (&next)[2 * MT])
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        bool moves = false;
#pragma unroll
        for (int r = 2 * mt; r < 2 * mt + 2; r++)
            moves = moves || ((real >> r & 1) != 0 && top[r] > frame[r] + tau);
        moves = __any_sync(0xffffffffu, moves);
#pragma unroll
        for (int r = 2 * mt; r < 2 * mt + 2; r++)
            next[r] = moves ? fmaxf(frame[r], top[r]) : frame[r];
    }
}

/* 2^(from - to), 1 where both are -inf. */
__device__ __forceinline__ float moved(float from, float to)
{
    return from == to ? 1.0f : exp2_fast(from - to);
}

/* One tile in NVFP4. JUDGED: candidates are held back; otherwise the tile is cold. */
template <typename T, int MT, bool PARTLY, bool JUDGED>
__device__ __forceinline__ void work_on_tile_framed(ColdState<T, MT> &state, const apa_cuda_job &job, const Unit &unit,
                                                    const ColdRows<MT> &rows, uint32_t real, uint32_t blob, int tile)
{
    Scores<MT> scores;
    float block[2 * MT][2], top[2 * MT], next[2 * MT], total[2 * MT];
    scores_nvfp4<T, MT>(scores, blob, rows.q, rows.q_scale);
    if (PARTLY) {
        ThreadRows<MT> seen;
        warp_rows<MT>(job, unit, rows.first_row, seen);
        mask<MT, KeysForNvfp4>(scores.s, seen, tile);
    }
    tops_nvfp4<MT>(scores, block, top);
    candidate_frames<MT>(state.frame, top, real, job.tau, next);
    typename T::template P<MT> p;
    probabilities_nvfp4<T, MT>(scores, block, next, job.tau, p, total);
    bool held[MT], any_cold = false;
    float moves_to[2 * MT];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        bool above = false;
#pragma unroll
        for (int r = 2 * mt; r < 2 * mt + 2; r++)
            above = above || total[r] > job.eps * (state.lambda[r] * moved(state.frame[r], next[r]) + total[r]);
        held[mt] = JUDGED && __any_sync(0xffffffffu, above);
        if (held[mt])
            write_candidate(job, candidate_at(job, unit, rows.first_row + 16 * mt, tile), true,
                            next[2 * mt] + job.tau + log2_fast(total[2 * mt]) - T::LOG2_RANGE,
                            next[2 * mt + 1] + job.tau + log2_fast(total[2 * mt + 1]) - T::LOG2_RANGE);
        any_cold = any_cold || !held[mt];
#pragma unroll
        for (int i = 0; i < 4; i++)
            p[mt].code[i] = held[mt] ? 0 : p[mt].code[i];
    }
    bool any_moves = false;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        moves_to[r] = held[r / 2] ? fmaxf(state.frame[r], next[r] - job.delta) : next[r];
        any_moves = any_moves || moves_to[r] != state.frame[r];
    }
    if (__any_sync(0xffffffffu, any_moves)) {
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            scale_row(state, r, moved(state.frame[r], moves_to[r]));
            state.frame[r] = moves_to[r];
        }
    }
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        state.lambda[r] += total[r] == 0.0f ? 0.0f : total[r] * moved(next[r], moves_to[r]);
        state.sum[r] += held[r / 2] ? 0.0f : total[r];
    }
    if (any_cold)
        add_values_nvfp4<T, MT>(state.o, p, blob);
}

/* Stages of the ring. A multiprocessor of major version 9 (and 10) holds two blocks with 4 each; those of 8 and 12 have
 * 100 KB, A100's 164 KB, and get two blocks with 2 each. Machine code runs on devices of its own major version alone,
 * so host and device agree. D = 256 is one block. */
__host__ __device__ constexpr int ring_stages(int capability, int D)
{
    return D > 128 ? 3 : capability / 10 == 9 || capability / 10 == 10 ? 4 : 2;
}

template <typename T> struct ColdShape {
    static constexpr int MT = T::D <= 128 ? 2 : 1;
    static constexpr int WARPS = APA_CUDA_UNIT / (16 * MT);
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BLOCKS = T::D <= 128 ? 2 : 1;
    static constexpr int Q_BYTES = APA_CUDA_UNIT_GROUPS * T::Q_BYTES;
#if defined(__CUDA_ARCH__)
    using Tiles = Ring<ring_stages(__CUDA_ARCH__ / 10, T::D), T::BYTES, THREADS>;
#endif

    /* On the host, which has to know what the device's code was compiled with. */
    static constexpr int64_t shared_bytes(int capability)
    {
        return Q_BYTES + (ring_stages(capability, T::D) == 4   ? Ring<4, T::BYTES, THREADS>::SHARED
                          : ring_stages(capability, T::D) == 3 ? Ring<3, T::BYTES, THREADS>::SHARED
                                                               : Ring<2, T::BYTES, THREADS>::SHARED);
    }
};

/* The states of the warp's rows go out as a State16, with V's scales of the head multiplied in. */
template <typename T, int MT>
__device__ __forceinline__ void store_cold(ColdState<T, MT> &state, const apa_cuda_job &job, const Unit &unit,
                                           int first_row)
{
    const int lane = threadIdx.x & 31;
    const int64_t piece = unit.split * job.unit_count + unit.local;
    State16<T::D, MT> stored;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        stored.X[r] = state.frame[r] + (T::FRAMED ? job.tau - T::LOG2_RANGE : 0.0f);
        stored.l[r / 2][2 * (r % 2)] = state.sum[r];
        if ((lane & 3) == 0)
            job.part_lambda[piece * APA_CUDA_UNIT + first_row + r * 8 + (lane >> 2)] = state.lambda[r];
    }
    const float *v_scale = job.v_scale + static_cast<int64_t>(unit.head) * T::D + (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < T::D / 8; n++) {
        float2 scale = make_float2(1.0f, 1.0f);
        if (!T::FINE)
            scale = *reinterpret_cast<const float2 *>(v_scale + n * 8);
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                stored.o[mt][n][i] = state.o[mt][n][i] * (i % 2 == 0 ? scale.x : scale.y);
    }
    store_part<T::D, MT>(stored, job.part_o, job.part_frame, job.part_sum, piece, first_row);
}

/* The state between two windows: nothing is scaled, so nothing is rounded. */
template <typename T, int MT>
__device__ __forceinline__ void put_aside(const ColdState<T, MT> &state, const apa_cuda_job &job, int64_t first_row)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        const int64_t row = first_row + r * 8 + (lane >> 2);
        if ((lane & 3) == 0) {
            job.part_frame[row] = state.frame[r];
            job.part_lambda[row] = state.lambda[r];
            job.part_sum[row] = state.sum[r];
        }
#pragma unroll
        for (int n = 0; n < T::D / 8; n++)
            *reinterpret_cast<float2 *>(job.part_o + row * T::D + n * 8 + (lane & 3) * 2) =
                make_float2(state.o[r / 2][n][2 * (r % 2)], state.o[r / 2][n][2 * (r % 2) + 1]);
    }
}

template <typename T, int MT>
__device__ __forceinline__ void take_up(ColdState<T, MT> &state, const apa_cuda_job &job, int64_t first_row)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        const int64_t row = first_row + r * 8 + (lane >> 2);
        state.frame[r] = job.part_frame[row];
        state.lambda[r] = job.part_lambda[row];
        state.sum[r] = job.part_sum[row];
#pragma unroll
        for (int n = 0; n < T::D / 8; n++) {
            const float2 o = *reinterpret_cast<const float2 *>(job.part_o + row * T::D + n * 8 + (lane & 3) * 2);
            state.o[r / 2][n][2 * (r % 2)] = o.x;
            state.o[r / 2][n][2 * (r % 2) + 1] = o.y;
        }
    }
}

/* Steps of the walk over `tiles` that are done when every tile from `first` on was visited, and the sink. */
__device__ __forceinline__ int steps_done(const TileRange &tiles, int first)
{
    const int n = tiles.end - tiles.first, behind = max(0, tiles.end - max(first, 1));
    return first == INT32_MAX ? 0 : min(n, tiles.first > 0 ? behind : 1 + behind);
}

/* SKIP: tiles may be left out. WINDOWED: the blobs of a window of the keys are there. */
template <typename T, bool SKIP, bool WINDOWED> __device__ __forceinline__ void cold_unit(const apa_cuda_job &job)
{
#if defined(__CUDA_ARCH__)
    if constexpr (__CUDA_ARCH__ >= T::ARCH) {
        using S = ColdShape<T>;
        constexpr int MT = S::MT;
        extern __shared__ __align__(128) uint8_t shared[];
        const uint32_t base = kept(shared_address(shared));
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const Unit unit = unit_of(job, blockIdx.x, job.splits);
        const TileRange tiles = tile_range(job, unit, job.splits);
        const int n = tiles.end - tiles.first;
        int done = 0, end = n; /* steps of the walk before this launch and after it */
        if constexpr (WINDOWED) {
            done = steps_done(tiles, job.window_before);
            end = steps_done(tiles, job.window_first);
            if (done == end && job.window_first > 1)
                return;
        }

        /* the sink tile, then from the last one backwards; backwards alone in the splits that do not hold the sink */
        auto tile_at = [&](int i) { return tiles.first > 0 ? tiles.end - 1 - i : i == 0 ? 0 : tiles.end - i; };
        const uint8_t *blobs = job.blob + static_cast<int64_t>(unit.head) * job.held * T::BYTES;
        auto source = [&](int i) {
            if constexpr (WINDOWED)
                return job.blob + apa_cuda_blob_slot(&job, unit.head, tile_at(done + i)) * T::BYTES;
            else
                return blobs + static_cast<int64_t>(tile_at(i)) * T::BYTES;
        };
        typename S::Tiles ring;
        {
            const uint4 *from = reinterpret_cast<const uint4 *>(job.q_codes + unit.local * S::Q_BYTES);
            for (int i = threadIdx.x; i < S::Q_BYTES / 16; i += S::THREADS)
                reinterpret_cast<uint4 *>(shared)[i] = from[i];
        }
        ring.start(base + S::Q_BYTES, end - done, source);
        __syncthreads();

        ColdRows<MT> rows;
        rows.first_row = warp * 16 * MT;
        rows.q = base + warp * MT * T::Q_BYTES + (T::FRAMED ? 0 : lane * 16);
        WarpView view;
        uint32_t real = 0;
        {
            ThreadRows<MT> seen;
            view = warp_rows<MT>(job, unit, rows.first_row, seen);
#pragma unroll
            for (int r = 0; r < 2 * MT; r++)
                real |= seen.first[r] < seen.end[r] ? 1u << r : 0u;
        }
        const float all_tiles = static_cast<float>(n) * job.splits; /* to tell how much of λ is still to come */
        const int64_t stored = (unit.split * job.unit_count + unit.local) * APA_CUDA_UNIT + rows.first_row;
        ColdState<T, MT> state;
        if (WINDOWED && done > 0)
            take_up(state, job, stored);
        else
            clear(state);
#pragma unroll
        for (int r = 0; r < 2 * MT; r++)
            rows.q_scale[r] = job.q_scale[unit.local * APA_CUDA_UNIT + rows.first_row + r * 8 + (lane >> 2)];
        if constexpr (SKIP)
            rows.skipping = start_skipping<T, MT>(rows.q, rows.first_row, real, job.k_scale_max[unit.head]);

        for (int i = done; i < end; i++) {
            const int tile = tile_at(i);
            const uint32_t blob = ring.next(i - done, source);
            if (view.sees(tile) && (!T::FRAMED || !T::poisoned(blob))) {
                if constexpr (T::FRAMED) {
                    if (view.partly(tile))
                        work_on_tile_framed<T, MT, true, true>(state, job, unit, rows, real, blob, tile);
                    else
                        work_on_tile_framed<T, MT, false, true>(state, job, unit, rows, real, blob, tile);
                } else {
                    const float held_above =
                        job.hold_all ? job.eps
                                     : job.eps * fmaxf(1.0f, __fdividef(all_tiles, static_cast<float>(i + 1)));
                    if (view.partly(tile))
                        work_on_tile_8<T, MT, true, SKIP>(state, job, unit, rows, blob, tile, held_above);
                    else
                        work_on_tile_8<T, MT, false, SKIP>(state, job, unit, rows, blob, tile, held_above);
                }
            }
            ring.done(i - done);
        }
        if (WINDOWED && job.window_first > 1)
            put_aside(state, job, stored);
        else
            store_cold(state, job, unit, rows.first_row);
        if constexpr (SKIP)
            store_skipped<MT>(job, stored, rows.first_row);
    }
#endif
}

template <typename T>
static __global__ void __launch_bounds__(ColdShape<T>::THREADS, ColdShape<T>::BLOCKS)
    cold_kernel(const __grid_constant__ apa_cuda_job job)
{
    cold_unit<T, false, false>(job);
}

template <typename T>
static __global__ void __launch_bounds__(ColdShape<T>::THREADS, ColdShape<T>::BLOCKS)
    skipping_kernel(const __grid_constant__ apa_cuda_job job)
{
    cold_unit<T, true, false>(job);
}

template <typename T>
static __global__ void __launch_bounds__(ColdShape<T>::THREADS, ColdShape<T>::BLOCKS)
    windowed_kernel(const __grid_constant__ apa_cuda_job job)
{
    cold_unit<T, false, true>(job);
}

template <typename T> static int launch_cold(const apa_cuda_job *job, cudaStream_t stream)
{
    using S = ColdShape<T>;
    const int shared = static_cast<int>(S::shared_bytes(job->capability));
    void (*kernel)(apa_cuda_job) = cold_kernel<T>;
    if constexpr (T::SKIPS)
        kernel = job->skip ? skipping_kernel<T> : kernel;
    if constexpr (!T::FRAMED)
        kernel = job->windowed ? windowed_kernel<T> : kernel;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error == cudaSuccess && job->window_before == INT32_MAX)
        error = cudaMemsetAsync(job->candidate, 0,
                                static_cast<size_t>(job->unit_count) * APA_CUDA_UNIT_GROUPS * job->tiles, stream);
    if (error != cudaSuccess)
        return error;
    kernel<<<static_cast<unsigned>(job->unit_count * job->splits), S::THREADS, shared, stream>>>(*job);
    return cudaGetLastError();
}

#endif
