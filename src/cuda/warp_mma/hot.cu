/* Pass 2: the hot tiles exactly.
 *
 * A block takes an equal part of a unit's list of hot tiles; a warp one group of 16 rows. A tile of K and V is loaded
 * once for the unit and worked on by the warps whose group it is hot for.
 *
 * With one part a unit the block starts from the cold state, as pass 1 and fix.cuh left it, and writes the finished
 * rows; otherwise partial states, which finish.cu adds up. */
#include "cuda/warp_mma/store.cuh"

template <int D> struct HotShape {
    static constexpr int WARPS = APA_CUDA_UNIT_GROUPS;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BLOCKS = D <= 128 ? 2 : 1;
    static constexpr int TILE_BYTES = APA_CUDA_TILE * D * 2;
    static constexpr int Q_BYTES = APA_CUDA_UNIT * D * 2;
    static constexpr int STAGE = 2 * TILE_BYTES;
    static constexpr int SHARED = Q_BYTES + 2 * STAGE;
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
template <int D, bool BF16, bool HALF>
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
        probabilities_16<BF16, 1>(s, job.c, HALF ? top : state.X, p);
        values_16<D, BF16, HALF, 1>(state, p, top, stage + S::TILE_BYTES, partly, rows, job.v, b, h, tile, job.Skv);
    }
    copy_async_wait<0>();
}

template <int D, bool BF16, bool HALF>
static __global__ void __launch_bounds__(HotShape<D>::THREADS, HotShape<D>::BLOCKS)
    hot_kernel(const __grid_constant__ apa_cuda_job job)
{
    using S = HotShape<D>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool whole = apa_cuda_finishes_in_pass_2(&job);
    const Unit unit = unit_at(job, blockIdx.x / job.hot_splits, static_cast<int>(blockIdx.x % job.hot_splits));
    if (job.again != 0 && job.list_count[unit.local * 2 + 1] == 0)
        return;
    __shared__ Entries entries;
    const int count = job.list_count[unit.local * 2], part = (count + job.hot_splits - 1) / job.hot_splits;
    const int first = min(count, unit.split * part), end = min(count, first + part);
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
    if (first < end)
        copy_in<S::THREADS>(base, job.q16 + unit.local * S::Q_BYTES, S::Q_BYTES);
    for (int at = first; at < end; at += LIST_PIECE) {
        const int n = min(LIST_PIECE, end - at);
        take_entries(entries, job.hot_tile + lists + at, job.hot_mask + lists + at, n);
        exact_list<D, BF16, HALF>(state, job, unit, view, entries, base, n);
    }
    if (whole)
        store_result<D, 1>(state, job, unit, unit.head / job.Hkv, warp * 16);
    else
        store_part<D, 1>(state, job.hot_o, job.hot_frame, job.hot_sum, unit.split * job.unit_count + unit.local,
                         warp * 16);
}

template <int D, bool BF16, bool HALF> static int launch(const apa_cuda_job *job, cudaStream_t stream)
{
    using S = HotShape<D>;
    cudaError_t error =
        cudaFuncSetAttribute(hot_kernel<D, BF16, HALF>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error != cudaSuccess)
        return error;
    hot_kernel<D, BF16, HALF>
        <<<static_cast<unsigned>(job->unit_count * job->hot_splits), S::THREADS, S::SHARED, stream>>>(*job);
    return cudaGetLastError();
}

template <int D> static int launch_of(const apa_cuda_job *job, cudaStream_t stream)
{
    return job->bf16        ? launch<D, true, false>(job, stream)
           : job->half_sums ? launch<D, false, true>(job, stream)
                            : launch<D, false, false>(job, stream);
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
        return launch_of<64>(job, stream);
    case 128:
        return launch_of<128>(job, stream);
    default:
        return launch_of<256>(job, stream);
    }
}
