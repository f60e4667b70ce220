/* Between the passes: the tiles whose cold sums pass 1 guessed wrong.
 *
 * A block takes a part of a unit's list, as many parts as pass 1 had splits, and changes that split's state: blobs come
 * into shared memory one after another, a warp a group of 16 rows adds or takes out its sums. What comes out may be
 * negative where it meets other splits' sums later. A frame that a maximum passes moves too, so no sum overflows.
 *
 * NVFP4: the list is walked as pass 1 walks (the sink, then backwards), frames moving on, which is what the reference
 * engine does with tiles that its second look demotes. */
#ifndef APA_CUDA_FIX_CUH
#define APA_CUDA_FIX_CUH

#include "cuda/warp_mma/cold.cuh"

template <typename T> struct FixShape {
    static constexpr int THREADS = APA_CUDA_UNIT_GROUPS * 32;
    static constexpr int BLOCKS = T::D <= 128 ? 2 : 1;
    static constexpr int Q_BYTES = APA_CUDA_UNIT_GROUPS * T::Q_BYTES;
    static constexpr int STAGE = (T::BYTES + 127) / 128 * 128;
    static constexpr int SHARED = Q_BYTES + 2 * STAGE;
};

/* A piece of a list, brought near: its entries are on the way of every step. */
constexpr int FIX_PIECE = 256;

struct FixEntries {
    int tile[FIX_PIECE];
    uint32_t mask[FIX_PIECE];
};

/* Place in the list of entry i of the walk. */
__device__ __forceinline__ int walk_place(int i, int count, bool sink)
{
    return !sink ? count - 1 - i : i == 0 ? 0 : count - i;
}

/* Entries of the walk that are done when every tile from `first` on was visited, and the sink. */
__device__ __forceinline__ int entries_done(const uint32_t *list, int count, bool sink, int first)
{
    if (first == INT32_MAX)
        return 0;
    int low = sink ? 1 : 0, high = count; /* the place of the first such tile */
    while (low < high) {
        const int middle = (low + high) / 2;
        if (static_cast<int>(list[middle]) < first)
            low = middle + 1;
        else
            high = middle;
    }
    return count - low + (sink ? 1 : 0);
}

/* The warp's rows as pass 1 stored them, back in units of codes. */
template <typename T>
__device__ __forceinline__ void load_cold(ColdState<T, 1> &state, const apa_cuda_job &job, int64_t first_row,
                                          float inverse)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t row = first_row + h * 8 + (lane >> 2);
        state.frame[h] = job.part_frame[row] - (T::FRAMED ? job.tau - T::LOG2_RANGE : 0.0f);
        state.sum[h] = job.part_sum[row];
#pragma unroll
        for (int n = 0; n < T::D / 8; n++) {
            const float2 o = *reinterpret_cast<const float2 *>(job.part_o + row * T::D + n * 8 + (lane & 3) * 2);
            state.o[0][n][2 * h] = o.x * inverse;
            state.o[0][n][2 * h + 1] = o.y * inverse;
        }
    }
}

template <typename T>
__device__ __forceinline__ void put_back(const ColdState<T, 1> &state, const apa_cuda_job &job, int64_t first_row,
                                         float v_scale)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t row = first_row + h * 8 + (lane >> 2);
        if ((lane & 3) == 0) {
            job.part_frame[row] = state.frame[h] + (T::FRAMED ? job.tau - T::LOG2_RANGE : 0.0f);
            job.part_sum[row] = state.sum[h];
        }
#pragma unroll
        for (int n = 0; n < T::D / 8; n++)
            *reinterpret_cast<float2 *>(job.part_o + row * T::D + n * 8 + (lane & 3) * 2) =
                make_float2(state.o[0][n][2 * h] * v_scale, state.o[0][n][2 * h + 1] * v_scale);
    }
}

/* A tile's sums, added (sign 1) or taken out (-1). */
template <typename T>
__device__ __forceinline__ void fix_tile_8(ColdState<T, 1> &state, const apa_cuda_job &job, const Unit &unit,
                                           const ColdRows<1> &rows, bool partly, uint32_t blob, int tile, float sign)
{
    Scores<1> scores;
    float top[2], total[2], weight[2];
    scores_8<T, 1>(scores, blob, rows.q, rows.q_scale);
    if (partly) {
        ThreadRows<1> seen;
        warp_rows<1>(job, unit, rows.first_row, seen);
        mask<1>(scores.s, seen, tile);
    }
    tops_8<T, 1>(scores, top);
    leap_frames(state, top);
    typename T::template P<1> p;
    probabilities_8<T, 1, true>(scores, top, p, total);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        weight[h] = top[h] == -CUDART_INF_F ? 0.0f : exp2_fast(top[h] - state.frame[h]) * (sign / T::RANGE);
        state.sum[h] += total[h] * weight[h];
    }
    Products<T, 1, COLD_AT_ONCE> products;
    multiply_values_8<T, 1, COLD_AT_ONCE>(products, p, blob, 0);
    add_values_8<T, 1, COLD_AT_ONCE, true>(state.o, products, p, blob, weight,
                                           job.v_scale + static_cast<int64_t>(unit.head) * T::D);
}

template <typename T>
static __global__ void __launch_bounds__(FixShape<T>::THREADS, FixShape<T>::BLOCKS)
    fix_kernel(const __grid_constant__ apa_cuda_job job)
{
#if defined(__CUDA_ARCH__)
    if constexpr (__CUDA_ARCH__ >= T::ARCH) {
        using S = FixShape<T>;
        extern __shared__ __align__(128) uint8_t shared[];
        __shared__ FixEntries entries;
        const uint32_t base = shared_address(shared), ring = base + S::Q_BYTES;
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        Unit unit;
        unit.split = static_cast<int>(blockIdx.x % job.splits);
        unit.local = blockIdx.x / job.splits;
        unit.index = unit.local + job.unit_first;
        unit.head = static_cast<int>(unit.index / job.units);
        unit.number = static_cast<int>(unit.index % job.units);
        const int count = job.list_count[unit.local * 2 + 1], part = (count + job.splits - 1) / job.splits;
        int first = min(count, unit.split * part), end = min(count, first + part);
        if (first == end)
            return;
        const uint32_t *list = job.fix_tile + unit.local * job.tiles;
        const uint16_t *masks = job.fix_mask + unit.local * job.tiles;
        const bool sink = list[0] == 0;
        if (job.windowed) {
            first = max(first, entries_done(list, count, sink, job.window_before));
            end = min(end, entries_done(list, count, sink, job.window_first));
            if (first >= end)
                return;
        }
        copy_in<S::THREADS>(base, job.q_codes + unit.local * S::Q_BYTES, S::Q_BYTES);

        ColdRows<1> rows;
        rows.first_row = warp * 16;
        rows.q = base + warp * T::Q_BYTES + (T::FRAMED ? 0 : lane * 16);
        WarpView view;
        uint32_t real = 0;
        {
            ThreadRows<1> seen;
            view = warp_rows<1>(job, unit, rows.first_row, seen);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                rows.q_scale[r] = job.q_scale[unit.local * APA_CUDA_UNIT + rows.first_row + r * 8 + (lane >> 2)];
                real |= seen.first[r] < seen.end[r] ? 1u << r : 0u;
            }
        }
        const int64_t stored = (unit.split * job.unit_count + unit.local) * APA_CUDA_UNIT + rows.first_row;
        const float v_scale = T::FRAMED ? job.v_scale[static_cast<int64_t>(unit.head) * T::D] : 1.0f;
        ColdState<T, 1> state;
        clear(state);
        load_cold(state, job, stored, 1.0f / v_scale);

        for (int at = first; at < end; at += FIX_PIECE) {
            const int n = min(FIX_PIECE, end - at);
            __syncthreads();
            if (static_cast<int>(threadIdx.x) < n) {
                const int place = walk_place(at + static_cast<int>(threadIdx.x), count, sink);
                entries.tile[threadIdx.x] = static_cast<int>(list[place]);
                entries.mask[threadIdx.x] = masks[place];
            }
            __syncthreads();
            auto load = [&](int i) {
                if (i < n)
                    copy_in<S::THREADS>(ring + (i & 1) * S::STAGE,
                                        job.blob + apa_cuda_blob_slot(&job, unit.head, entries.tile[i]) * T::BYTES,
                                        T::BYTES);
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
                const uint32_t blob = ring + (i & 1) * S::STAGE;
                if constexpr (T::FRAMED)
                    work_on_tile_framed<T, 1, true, false>(state, job, unit, rows, real, blob, tile);
                else
                    fix_tile_8<T>(state, job, unit, rows, view.partly(tile), blob, tile,
                                  (entries.mask[i] >> (8 + warp) & 1) != 0 ? -1.0f : 1.0f);
            }
            copy_async_wait<0>();
        }
        put_back(state, job, stored, v_scale);
    }
#endif
}

template <typename T> static int launch_fix(const apa_cuda_job *job, cudaStream_t stream)
{
    using S = FixShape<T>;
    const cudaError_t error =
        cudaFuncSetAttribute(fix_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error != cudaSuccess)
        return error;
    fix_kernel<T><<<static_cast<unsigned>(job->unit_count * job->splits), S::THREADS, S::SHARED, stream>>>(*job);
    return cudaGetLastError();
}

#endif
