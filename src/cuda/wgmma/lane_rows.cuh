/* The 16 rows of a warp, one a lane (lanes i and i + 16 have row i): what they see, their queries on the way into
 * shared memory, their results on the way out. Which row is which takes a division, and a block does each of these
 * once: so a lane finds out about one row, and the others ask it. */
#ifndef APA_CUDA_WGMMA_LANE_ROWS_CUH
#define APA_CUDA_WGMMA_LANE_ROWS_CUH

#include "cuda/wgmma/tile_16.cuh"

constexpr int ROW_ENTRY = 8; /* bytes of a row in a table of what rows see: its first key and the end of its keys */

#ifdef APA_CUDA_BULK

__device__ __forceinline__ Row lane_row(const apa_cuda_job &job, const Unit &unit, int first_row)
{
    return row_of(job, unit, first_row + static_cast<int>(threadIdx.x & 15));
}

/* ---- what they see ---- */

/* Keys that every real row of a warp sees: a row that sees nothing leaves none. */
struct WholeKeys {
    int first, end;
};

__device__ __forceinline__ WholeKeys whole_keys(const Row &row)
{
    return {__reduce_max_sync(0xffffffffu, row.real ? row.first : 0),
            __reduce_min_sync(0xffffffffu, row.real ? row.end : 0x7fffffff)};
}

/* Each of a warp's 16 rows into its table, 128 bytes of shared memory; the lanes may read it after __syncwarp(). */
__device__ __forceinline__ void store_rows(uint32_t table, int first, int end)
{
    const uint32_t keys[2] = {static_cast<uint32_t>(first), static_cast<uint32_t>(end)};
    if ((threadIdx.x & 31) < 16)
        store_shared_8(table + (threadIdx.x & 15) * ROW_ENTRY, keys);
}

/* Row g + 8h of lane 4g + t, as products have them. */
__device__ __forceinline__ void load_row(int &first, int &end, uint32_t table, int h)
{
    uint32_t keys[2];
    load_shared_8(keys, table + ((threadIdx.x & 31) / 4 + 8 * h) * ROW_ENTRY);
    first = static_cast<int>(keys[0]);
    end = static_cast<int>(keys[1]);
}

__device__ __forceinline__ void load_rows(ThreadRows<1> &seen, uint32_t table)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
        load_row(seen.first[h], seen.end[h], table, h);
}

/* ---- 16-byte pieces of rows ---- */

/* A warp goes through its rows ROWS at a time; of them a lane has piece `piece` of row `line`. */
template <int D> struct Pieces {
    static constexpr int OF_ROW = D / 8, ROWS = 32 / OF_ROW, STEPS = 16 / ROWS;
    static_assert(ROWS >= 1 && OF_ROW >= 8, "D is 64, 128 or 256");

    __device__ static int piece()
    {
        return threadIdx.x & (OF_ROW - 1);
    }
    __device__ static int line()
    {
        return (threadIdx.x & 31) / OF_ROW;
    }
};

/* The address that lane `from` has. */
template <typename T> __device__ __forceinline__ T *address_of_lane(T *own, int from)
{
    return reinterpret_cast<T *>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own), from));
}

/* Place of row `row`, 16-byte piece `piece` of a warpgroup's queries: D / 64 blocks of [64 rows][64 channels]. */
__device__ __forceinline__ uint32_t query_place(uint32_t queries, int row, int piece)
{
    return queries + piece / 8 * (WARPGROUP_ROWS * 128) + swizzled(row, piece % 8);
}

/* Queries of a warp's rows set out for `queries`, its warpgroup's; zeros for padding. queries_there() waits for them.
 */
template <int D>
__device__ __forceinline__ void ask_for_queries(uint32_t queries, const apa_cuda_job &job, int b, const Row &row)
{
    using P = Pieces<D>;
    const uint16_t *own = row_pointer<uint16_t>(job.q, b, row.head, row.real ? row.position : 0);
    const uint32_t real = __ballot_sync(0xffffffffu, row.real);
    const int first = threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int i = 0; i < P::STEPS; i++) {
        const int at = i * P::ROWS + P::line();
        copy_async_16_or_zero(query_place(queries, first + at, P::piece()), address_of_lane(own, at) + P::piece() * 8,
                              (real >> at & 1) != 0 ? 16 : 0);
    }
    copy_async_commit();
}

/* The warp's own are there, for the products too once the warpgroup has met. */
template <int D> __device__ __forceinline__ void queries_there(uint32_t queries, const apa_cuda_job &job)
{
    using P = Pieces<D>;
    copy_async_wait<0>();
#pragma unroll 1
    for (int i = 0; job.negate != 0 && i < P::STEPS; i++) { /* what this lane asked for */
        const uint32_t at = query_place(queries, threadIdx.x / 32 % 4 * 16 + i * P::ROWS + P::line(), P::piece());
        uint32_t x[4];
        load_shared_16(x, at);
        const uint32_t negative[4] = {x[0] ^ 0x80008000u, x[1] ^ 0x80008000u, x[2] ^ 0x80008000u, x[3] ^ 0x80008000u};
        store_shared_16(at, negative);
    }
    fence_for_async();
}

/* Sums of a warp's rows times `factor`, rounded once, into 16 rows of D 16-bit numbers; piece p of row r lies at place
 * p ^ (r % 8), so that neither these writes nor reads of whole rows meet in a bank. */
template <int D, bool BF16>
__device__ __forceinline__ void put_rows(uint32_t rows, const float (&o)[D / 8][4], const float (&factor)[2])
{
    const uint32_t g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, at = rows + g * (D * 2) + g * 16 + t * 4;
#pragma unroll
    for (uint32_t n = 0; n < D / 8; n++)
#pragma unroll
        for (uint32_t h = 0; h < 2; h++)
            store_shared_4((at ^ n * 16) + h * 8 * (D * 2),
                           pack_16<BF16>(o[n][2 * h] * factor[h], o[n][2 * h + 1] * factor[h]));
}

/* Whatever the tensor: outputs of 32 bits, or at addresses that are no multiples of 16. */
template <int D>
__device__ __noinline__ void store_result_slowly(const State16<D, 1> &state, const apa_cuda_job &job, const Unit &unit,
                                                 int b, int first_row)
{
    store_result<D, 1>(state, job, unit, b, first_row);
}

/* A warp's rows, done. `rows`: 16·D·2 bytes of shared memory of the warp's own, at a multiple of D·2. */
template <int D>
__device__ __forceinline__ void store_lane_rows(const State16<D, 1> &state, const apa_cuda_job &job, const Unit &unit,
                                                int b, int first_row, const Row &row, uint32_t rows)
{
    using P = Pieces<D>;
    if (job.out.dtype == APA_DTYPE_F32 || !is_aligned(job.out)) {
        const State16<D, 1> in_memory = state; /* so that the state itself has no address */
        store_result_slowly<D>(in_memory, job, unit, b, first_row);
        return;
    }
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        inverse[h] = state.l[0][2 * h] == 0.0f ? 0.0f : 1.0f / state.l[0][2 * h];
    if (job.out.dtype == APA_DTYPE_BF16)
        put_rows<D, true>(rows, state.o[0], inverse);
    else
        put_rows<D, false>(rows, state.o[0], inverse);
    uint16_t *const own = static_cast<uint16_t *>(job.out.data) + b * job.out.stride[0] + row.head * job.out.stride[1] +
                          row.position * job.out.stride[2];
    const uint32_t real = __ballot_sync(0xffffffffu, row.real);
    __syncwarp(); /* what lanes put there, others may read */
#pragma unroll
    for (int i = 0; i < P::STEPS; i++) {
        const int at = i * P::ROWS + P::line();
        uint32_t x[4];
        load_shared_16(x, rows + at * (D * 2) + ((P::piece() ^ (at & 7)) << 4));
        uint16_t *const to = address_of_lane(own, at) + P::piece() * 8;
        if ((real >> at & 1) != 0)
            *reinterpret_cast<uint4 *>(to) = make_uint4(x[0], x[1], x[2], x[3]);
    }
    if (job.lse.dtype == APA_DTYPE_NONE)
        return;
    const int from = static_cast<int>(threadIdx.x & 7) * 4;
    const bool lower = (threadIdx.x & 8) == 0;
    float X[2], l[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        X[h] = __shfl_sync(0xffffffffu, state.X[h], from);
        l[h] = __shfl_sync(0xffffffffu, state.l[0][2 * h], from);
    }
    if (row.real && (threadIdx.x & 31) < 16)
        store_lse(job.lse, b, row.head, row.position, lower ? X[0] : X[1], lower ? l[0] : l[1]);
}

#endif
#endif
