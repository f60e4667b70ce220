/* The exact method: every tile in 16-bit floats, FP32 sums.
 *
 * A thread block takes a unit of 128 rows; a warp takes 32 of them (16 at D = 256, where 32 do not fit the registers),
 * so that a fragment of K or V that it reads from shared memory serves two matrix products. K and V tiles pass through
 * two stages of shared memory; the copy of the next tile runs under the arithmetic of this one. Two blocks share a
 * multiprocessor: the exponentials of one run under the products of the other. */
#include "cuda/warp_mma/store.cuh"
#include "cuda/warp_mma/tile_16.cuh"

template <int D> struct ExactShape {
    static constexpr int MT = D <= 128 ? 2 : 1;
    static constexpr int WARPS = APA_CUDA_UNIT / (16 * MT);
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BLOCKS = D <= 128 ? 2 : 1;
    static constexpr int TILE_BYTES = APA_CUDA_TILE * D * 2;
    static constexpr int Q_BYTES = APA_CUDA_UNIT * D * 2;
    static constexpr int SHARED = Q_BYTES + 4 * TILE_BYTES;
};

/* The unit's queries into shared memory, laid out as a tile; zeros for padding. */
template <int D, int THREADS>
__device__ __forceinline__ void load_queries(uint32_t to, const apa_cuda_job &job, const Unit &unit, int b)
{
    constexpr int CHUNKS = D / 8;
    const int chunk = threadIdx.x % CHUNKS;
    for (int r = threadIdx.x / CHUNKS; r < APA_CUDA_UNIT; r += THREADS / CHUNKS) {
        const Row row = row_of(job, unit, r);
        const uint16_t *from = row_pointer<uint16_t>(job.q, b, row.head, row.real ? row.position : 0) + chunk * 8;
        copy_async_16_or_zero(to + r * D * 2 + ((chunk ^ (r & 7)) << 4), from, row.real ? 16 : 0);
    }
}

template <int D, bool BF16, bool HALF>
static __global__ void __launch_bounds__(ExactShape<D>::THREADS, ExactShape<D>::BLOCKS)
    exact_kernel(const __grid_constant__ apa_cuda_job job)
{
    using S = ExactShape<D>;
    constexpr int MT = S::MT;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t q_shared = shared_address(shared), ring = q_shared + S::Q_BYTES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Unit unit = unit_of(job, blockIdx.x, job.splits);
    const int b = unit.head / job.Hkv, h = unit.head % job.Hkv;
    const TileRange tiles = tile_range(job, unit, job.splits);

    load_queries<D, S::THREADS>(q_shared, job, unit, b);
    auto load = [&](int tile) {
        const uint32_t stage = ring + (tile & 1) * 2 * S::TILE_BYTES;
        if (tile < tiles.end) {
            load_tile_16<D, S::THREADS>(stage, job.k, b, h, tile, job.Skv);
            load_tile_16<D, S::THREADS>(stage + S::TILE_BYTES, job.v, b, h, tile, job.Skv);
        }
        copy_async_commit();
    };
    load(tiles.first);

    const int first_row = warp * 16 * MT;
    WarpView view;
    {
        ThreadRows<MT> rows;
        view = warp_rows<MT>(job, unit, first_row, rows);
    }
    State16<D, MT> state;
    clear(state);
    const uint32_t q_base = q_shared + (first_row + (lane & 15)) * D * 2 + (((lane >> 4) ^ (lane & 7)) << 4);
    const uint32_t flip = job.negate ? 0x80008000u : 0u;

    for (int tile = tiles.first; tile < tiles.end; tile++) {
        copy_async_wait<0>();
        __syncthreads();
        load(tile + 1);
        if (!view.sees(tile))
            continue;
        const uint32_t stage = ring + (tile & 1) * 2 * S::TILE_BYTES;
        float s[MT][8][4];
        scores_16<D, BF16, MT>(s, stage, [&](int mt, int step, uint32_t(&q)[4]) {
            load_matrix_4(q, (q_base ^ (step << 5)) + mt * 16 * D * 2);
            if (flip != 0) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    q[i] ^= flip;
            }
        });
        const bool partly = view.partly(tile);
        ThreadRows<MT> rows = {};
        if (partly) { /* made again for the few tiles that need it: registers are scarce */
            warp_rows<MT>(job, unit, first_row, rows);
            mask<MT>(s, rows, tile);
        }
        float top[2 * MT];
        row_maxima<MT>(s, top);
#pragma unroll
        for (int r = 0; r < 2 * MT; r++)
            top[r] *= job.c;
        move_frames<D, MT>(state, top);
        uint32_t p[MT][4][4];
        probabilities_16<BF16, MT>(s, job.c, HALF ? top : state.X, p);
        values_16<D, BF16, HALF, MT>(state, p, top, stage + S::TILE_BYTES, partly, rows, job.v, b, h, tile, job.Skv);
    }
    copy_async_wait<0>();
    if (job.splits > 1)
        store_part<D, MT>(state, job.part_o, job.part_frame, job.part_sum, unit.split * job.unit_count + unit.local,
                          first_row);
    else
        store_result<D, MT>(state, job, unit, b, first_row);
}

template <int D, bool BF16, bool HALF> static int launch(const apa_cuda_job *job, cudaStream_t stream)
{
    using S = ExactShape<D>;
    const int64_t items = job->unit_count * job->splits;
    cudaError_t error =
        cudaFuncSetAttribute(exact_kernel<D, BF16, HALF>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error != cudaSuccess)
        return error;
    exact_kernel<D, BF16, HALF><<<static_cast<unsigned>(items), S::THREADS, S::SHARED, stream>>>(*job);
    return cudaGetLastError();
}

template <int D> static int launch_of(const apa_cuda_job *job, cudaStream_t stream)
{
    return job->bf16        ? launch<D, true, false>(job, stream)
           : job->half_sums ? launch<D, false, true>(job, stream)
                            : launch<D, false, false>(job, stream);
}

extern "C" int64_t apa_cuda_exact_shared_bytes(int64_t D)
{
    return D == 64 ? ExactShape<64>::SHARED : D == 128 ? ExactShape<128>::SHARED : ExactShape<256>::SHARED;
}

extern "C" int apa_cuda_launch_exact(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    if (job->unit_count == 0)
        return cudaSuccess;
    switch (job->D) {
    case 64:
        return launch_of<64>(job, stream);
    case 128:
        return launch_of<128>(job, stream);
    case 256:
        return launch_of<256>(job, stream);
    default:
        return cudaErrorInvalidValue;
    }
}
