/* Pass 2: the hot tiles exactly, and the INT8 sums that pass 1 guessed wrong.
 *
 * A block takes an equal part of a unit's two lists; a warp one group of 16 rows. First the exact list: a tile of K and
 * V is loaded once for the unit and worked on by the warps whose group it is hot for. Then the other list: INT8 blobs,
 * whose sums a warp adds or takes out. What comes out may be negative before it meets the cold state. A frame that an
 * INT8 maximum passes moves too, so neither sum overflows however far estimate and truth are apart.
 *
 * With one part a unit the block starts from the cold state and writes the finished rows; otherwise partial states,
 * which finish.cu adds up. */
#include "cuda/warp_mma/store.cuh"
#include "cuda/warp_mma/tile_i8.cuh"

template <int D> struct HotShape {
    static constexpr int WARPS = APA_CUDA_UNIT_GROUPS;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BLOCKS = D <= 128 ? 2 : 1;
    static constexpr int TILE_BYTES = APA_CUDA_TILE * D * 2;
    static constexpr int Q_BYTES = APA_CUDA_UNIT * D * 2;
    static constexpr int STAGE = 2 * TILE_BYTES;
    static constexpr int SHARED = Q_BYTES + 2 * STAGE;
    static_assert(Blob<D>::BYTES <= STAGE, "a blob takes the place of K and V");
};

/* A piece of a list, brought near: its entries are on the way of every step. */
constexpr int LIST_PIECE = HotShape<64>::THREADS;

struct Entries {
    int tile[LIST_PIECE];
    uint32_t mask[LIST_PIECE];
};

template <typename Mask>
__device__ __forceinline__ void take_entries(Entries &entries, const uint32_t *tiles, const Mask *masks, int n)
{
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < n) {
        entries.tile[threadIdx.x] = static_cast<int>(tiles[threadIdx.x]);
        entries.mask[threadIdx.x] = masks[threadIdx.x];
    }
    __syncthreads();
}

/* A warp's state as pass 1 left it, with a raw frame; scaled by 2^OFFSET, the distance that frames keep here. */
template <int D>
__device__ __forceinline__ void load_cold_state(State16<D, 1> &state, const apa_cuda_job &job, const Unit &unit,
                                                int warp, const float (&shift)[2])
{
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const float up = exp2f(FRAME_OFFSET);
    if (job.all_hot[unit.local * APA_CUDA_UNIT_GROUPS + warp] != 0)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t row = unit.local * APA_CUDA_UNIT + warp * 16 + h * 8 + g;
        const float frame = job.part_frame[row];
        if (frame == -CUDART_INF_F)
            continue;
        state.X[h] = frame + shift[h] - FRAME_OFFSET;
        state.l[0][2 * h] = state.l[0][2 * h + 1] = job.part_sum[row] * up;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const float2 o = *reinterpret_cast<const float2 *>(job.part_o + row * D + n * 8 + t * 2);
            state.o[0][n][2 * h] = o.x * up;
            state.o[0][n][2 * h + 1] = o.y * up;
        }
    }
}

/* The exact list: n entries. */
template <int D, bool BF16>
__device__ __forceinline__ void exact_list(State16<D, 1> &state, const apa_cuda_job &job, const Unit &unit,
                                           const WarpView &view, const Entries &entries, uint32_t shared, int n)
{
    using S = HotShape<D>;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, b = unit.head / job.Hkv, h = unit.head % job.Hkv;
    const uint32_t ring = shared + S::Q_BYTES, q_base = shared + warp * 16 * D * 2 + lane * 16;
    auto load = [&](int i) {
        if (i < n) {
            const uint32_t stage = ring + (i & 1) * S::STAGE;
            load_tile_16<D, S::THREADS>(stage, job.k, b, h, entries.tile[i], job.Skv);
            load_tile_16<D, S::THREADS>(stage + S::TILE_BYTES, job.v, b, h, entries.tile[i], job.Skv);
        }
        copy_async_commit();
    };
    load(0);
    for (int i = 0; i < n; i++) {
        copy_async_wait<0>();
        __syncthreads();
        load(i + 1);
        if ((entries.mask[i] >> warp & 1) == 0)
            continue;
        const int tile = entries.tile[i];
        const bool partly = view.partly(tile);
        const uint32_t stage = ring + (i & 1) * S::STAGE;
        float s[1][8][4], top[2];
        scores_16<D, BF16, 1>(s, stage,
                              [&](int, int step, uint32_t(&q)[4]) { load_shared_16(q, q_base + step * 512); });
        ThreadRows<1> rows = {};
        if (partly) {
            warp_rows<1>(job, unit, warp * 16, rows);
            mask<1>(s, rows, tile);
        }
        row_maxima<1>(s, top);
        top[0] *= job.c;
        top[1] *= job.c;
        move_frames<D, 1>(state, top);
        uint32_t p[1][4][4];
        probabilities_16<BF16, 1>(s, job.c, state.X, p);
        values_16<D, BF16, 1>(state, p, stage + S::TILE_BYTES, partly, rows, job.v, b, h, tile, job.Skv);
    }
    copy_async_wait<0>();
}

/* The list of INT8 sums to be added or taken out: n entries. */
template <int D>
__device__ __forceinline__ void fix_list(State16<D, 1> &state, const apa_cuda_job &job, const Unit &unit,
                                         const WarpView &view, const Entries &entries, uint32_t shared,
                                         const float (&shift)[2], int n)
{
    using S = HotShape<D>;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t ring = shared + S::Q_BYTES, q_base = shared + warp * 16 * D + lane * 16;
    auto load = [&](int i) {
        if (i < n) {
            const uint8_t *blob =
                job.blob + (static_cast<int64_t>(unit.head) * job.tiles + entries.tile[i]) * Blob<D>::BYTES;
            for (int at = threadIdx.x * 16; at < Blob<D>::BYTES; at += S::THREADS * 16)
                copy_async_16(ring + (i & 1) * S::STAGE + at, blob + at);
        }
        copy_async_commit();
    };
    load(0);
    float q_scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        q_scale[h] = job.q_scale[unit.local * APA_CUDA_UNIT + warp * 16 + h * 8 + (lane >> 2)];
    for (int i = 0; i < n; i++) {
        copy_async_wait<0>();
        __syncthreads();
        load(i + 1);
        if ((entries.mask[i] >> warp & 1) == 0)
            continue;
        const float sign = (entries.mask[i] >> (8 + warp) & 1) != 0 ? -1.0f / 255.0f : 1.0f / 255.0f;
        const uint32_t blob = ring + (i & 1) * S::STAGE;
        float s[1][8][4], top[2], raw[2];
        scores_i8<D, 1>(s, blob, [&](int, int step, uint32_t(&q)[4]) { load_shared_16(q, q_base + step * 512); });
        if (view.partly(entries.tile[i])) {
            ThreadRows<1> rows;
            warp_rows<1>(job, unit, warp * 16, rows);
            mask<1>(s, rows, entries.tile[i]);
        }
        row_maxima<1>(s, top);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            top[h] *= q_scale[h];
            raw[h] = top[h] + shift[h];
        }
        move_frames<D, 1>(state, raw);
        uint32_t p[1][2][4];
        float total[2], weight[2];
        probabilities_i8<1, true>(s, q_scale, top, p, total);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            weight[h] = top[h] == -CUDART_INF_F ? 0.0f : exp2_fast(raw[h] - state.X[h]) * sign;
            state.l[0][2 * h] += total[h] * weight[h];
        }
        add_values_i8<D / 8, 1, 4>(state.o, p, blob + Blob<D>::V, blob + Blob<D>::V_SCALE, weight);
    }
    copy_async_wait<0>();
}

/* 16 bytes at a time from global to shared memory; waited for with the first tile. */
template <int THREADS> __device__ __forceinline__ void copy_in(uint32_t to, const uint8_t *from, int bytes)
{
    for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16)
        copy_async_16(to + at, from + at);
}

template <int D, bool BF16>
static __global__ void __launch_bounds__(HotShape<D>::THREADS, HotShape<D>::BLOCKS)
    hot_kernel(const __grid_constant__ apa_cuda_job job)
{
    using S = HotShape<D>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool whole = apa_cuda_finishes_in_pass_2(&job);
    Unit unit;
    unit.split = static_cast<int>(blockIdx.x % job.hot_splits);
    unit.local = blockIdx.x / job.hot_splits;
    unit.index = unit.local + job.unit_first;
    unit.head = static_cast<int>(unit.index / job.units);
    unit.number = static_cast<int>(unit.index % job.units);
    __shared__ Entries entries;
    int first[2], end[2];
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const int count = job.list_count[unit.local * 2 + which], part = (count + job.hot_splits - 1) / job.hot_splits;
        first[which] = min(count, unit.split * part);
        end[which] = min(count, first[which] + part);
    }
    State16<D, 1> state;
    clear(state);
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        shift[h] = job.shift[unit.local * APA_CUDA_UNIT + warp * 16 + h * 8 + (lane >> 2)];
    if (whole)
        load_cold_state<D>(state, job, unit, warp, shift);
    WarpView view;
    {
        ThreadRows<1> rows;
        view = warp_rows<1>(job, unit, warp * 16, rows);
    }
    const int64_t lists = unit.local * job.tiles;
    if (first[0] < end[0])
        copy_in<S::THREADS>(base, job.q16 + unit.local * S::Q_BYTES, S::Q_BYTES);
    for (int at = first[0]; at < end[0]; at += LIST_PIECE) {
        const int n = min(LIST_PIECE, end[0] - at);
        take_entries(entries, job.hot_tile + lists + at, job.hot_mask + lists + at, n);
        exact_list<D, BF16>(state, job, unit, view, entries, base, n);
    }
    if (first[1] < end[1]) {
        __syncthreads(); /* the 16-bit queries are done with */
        copy_in<S::THREADS>(base, job.q8 + unit.local * (S::Q_BYTES / 2), S::Q_BYTES / 2);
    }
    for (int at = first[1]; at < end[1]; at += LIST_PIECE) {
        const int n = min(LIST_PIECE, end[1] - at);
        take_entries(entries, job.fix_tile + lists + at, job.fix_mask + lists + at, n);
        fix_list<D>(state, job, unit, view, entries, base, shift, n);
    }
    if (whole)
        store_result<D, 1>(state, job, unit, unit.head / job.Hkv, warp * 16);
    else
        store_part<D, 1>(state, job.hot_o, job.hot_frame, job.hot_sum, unit.split * job.unit_count + unit.local,
                         warp * 16);
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, cudaStream_t stream)
{
    using S = HotShape<D>;
    cudaError_t error =
        cudaFuncSetAttribute(hot_kernel<D, BF16>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error != cudaSuccess)
        return error;
    hot_kernel<D, BF16>
        <<<static_cast<unsigned>(job->unit_count * job->hot_splits), S::THREADS, S::SHARED, stream>>>(*job);
    return cudaGetLastError();
}

extern "C" int64_t apa_cuda_hot_shared_bytes(int64_t D)
{
    return D == 64 ? HotShape<64>::SHARED : D == 128 ? HotShape<128>::SHARED : HotShape<256>::SHARED;
}

extern "C" int apa_cuda_launch_hot(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    switch (job->D) {
    case 64:
        return job->bf16 ? launch<64, true>(job, stream) : launch<64, false>(job, stream);
    case 128:
        return job->bf16 ? launch<128, true>(job, stream) : launch<128, false>(job, stream);
    default:
        return job->bf16 ? launch<256, true>(job, stream) : launch<256, false>(job, stream);
    }
}
