/* A tile of 64 keys in 16-bit floats: loading, scores, online softmax, P·V, for a warp with MT blocks of 16 rows.
 *
 * Shared memory holds K and V as [key][D], 16-byte chunks of a row swapped about by (chunk ^ key % 8), so that the
 * eight rows of an ldmatrix lie in different banks. Fragments are those of mma.m16n8k16: lane 4g + t holds of 16 rows ×
 * 8 columns (row g: columns 2t, 2t+1; row g+8: the same two).
 *
 * A row's state is (X, l, o): sums of 2^(s - X) over the keys seen, s the score in log2 units. X lies OFFSET below the
 * largest score at the time that it was set and moves only when a score passes it by OFFSET + SLACK: P is then at most
 * 2^15 in FP16, and probabilities down to 2^-35 of the largest keep some bits instead of rounding to zero. A row's X
 * depends on its own scores alone. l comes from a product with ones: the sum of the P that the tensor cores multiply.
 */
#ifndef APA_CUDA_TILE_16_CUH
#define APA_CUDA_TILE_16_CUH

#include "cuda/job.h"
#include "cuda/ptx.cuh"
#include "cuda/rows.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

constexpr float FRAME_OFFSET = 11.0f;
constexpr float FRAME_SLACK = 4.0f;

template <int D> constexpr int chunks_of_row()
{
    return D / 8;
}

/* Copies keys 64·tile … of one head into shared memory, zeros beyond the sequence. Every thread of the block calls it.
 */
template <int D, int THREADS>
__device__ __forceinline__ void load_tile_16(uint32_t to, const apa_cuda_tensor &x, int b, int h, int tile, int Skv)
{
    constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0, "a thread stays in its column");
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    const int64_t key = static_cast<int64_t>(tile) * APA_CUDA_TILE;
    const uint16_t *from = row_pointer<uint16_t>(x, b, h, key + first) + chunk * 8;
    const int64_t step = STEP * x.stride[2];
    const int keys = Skv - static_cast<int>(key);
    if (keys >= APA_CUDA_TILE) {
#pragma unroll
        for (int r = 0; r < APA_CUDA_TILE; r += STEP, from += step)
            copy_async_16(to + (r + first) * D * 2 + ((chunk ^ ((r + first) & 7)) << 4), from);
        return;
    }
#pragma unroll
    for (int r = 0; r < APA_CUDA_TILE; r += STEP, from += step) {
        const bool there = r + first < keys;
        copy_async_16_or_zero(to + (r + first) * D * 2 + ((chunk ^ ((r + first) & 7)) << 4), there ? from : x.data,
                              there ? 16 : 0);
    }
}

/* s = Q·Kᵀ, raw dot products. load_q(mt, step, fragment) gives the 16 × 16 piece of Q at depth 16·step. */
template <int D, bool BF16, int MT, typename LoadQ>
__device__ __forceinline__ void scores_16(float (&s)[MT][8][4], uint32_t k, LoadQ load_q)
{
    const int lane = threadIdx.x & 31;
    const uint32_t base = k + ((lane >> 4) * 8 + (lane & 7)) * D * 2 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[mt][n][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        uint32_t q[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            load_q(mt, step, q[mt]);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            uint32_t b[4];
            load_matrix_4(b, (base ^ (step << 5)) + pair * 16 * D * 2);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_16<BF16>(s[mt][2 * pair], q[mt], b[0], b[1]);
                mma_16<BF16>(s[mt][2 * pair + 1], q[mt], b[2], b[3]);
            }
        }
    }
}

/* Rows 2·mt + h of a thread: row g + 8h of block mt. */
template <int MT> struct ThreadRows {
    int first[2 * MT], end[2 * MT];
};

/* Which key of the tile score column n, element i of a lane's pair, belongs to: as mma has its columns. */
struct KeysInOrder {
    __device__ static int key(int n, int i)
    {
        return n * 8 + (threadIdx.x & 3) * 2 + i;
    }
};

/* Keys that a row does not see get -inf: selected, never multiplied. */
template <int MT, typename Keys = KeysInOrder>
__device__ __forceinline__ void mask(float (&s)[MT][8][4], const ThreadRows<MT> &rows, int tile)
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = tile * APA_CUDA_TILE + Keys::key(n, i & 1), row = 2 * mt + (i >> 1);
                if (j < rows.first[row] || j >= rows.end[row])
                    s[mt][n][i] = -CUDART_INF_F;
            }
}

__device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* Largest score of each row in the tile, over the four lanes that share it. */
template <int MT> __device__ __forceinline__ void row_maxima(const float (&s)[MT][8][4], float (&most)[2 * MT])
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float m = fmaxf(s[mt][0][2 * h], s[mt][0][2 * h + 1]);
#pragma unroll
            for (int n = 1; n < 8; n++)
                m = fmaxf(m, fmaxf(s[mt][n][2 * h], s[mt][n][2 * h + 1]));
            most[2 * mt + h] = quad_max(m);
        }
}

template <int D, int MT> struct State16 {
    float o[MT][D / 8][4];
    float l[MT][4]; /* [0] and [2]: rows g and g + 8; all columns are the same */
    float X[2 * MT];
};

template <int D, int MT> __device__ __forceinline__ void clear(State16<D, MT> &state)
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                state.o[mt][n][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            state.l[mt][i] = 0.0f;
        state.X[2 * mt] = state.X[2 * mt + 1] = -CUDART_INF_F;
    }
}

/* Moves the frames for rows whose tile maximum `top` (log2 units) leapt. */
template <int D, int MT> __device__ __forceinline__ void move_frames(State16<D, MT> &state, const float (&top)[2 * MT])
{
    bool moves = false;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
        moves = moves || top[r] - FRAME_OFFSET > state.X[r] + FRAME_SLACK;
    if (!__any_sync(0xffffffffu, moves))
        return;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        float alpha = 1.0f;
        if (top[r] - FRAME_OFFSET > state.X[r] + FRAME_SLACK) {
            const float next = top[r] - FRAME_OFFSET;
            alpha = exp2_fast(state.X[r] - next);
            state.X[r] = next;
        }
        const int mt = r / 2, h = r % 2;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            state.o[mt][n][2 * h] *= alpha;
            state.o[mt][n][2 * h + 1] *= alpha;
        }
        state.l[mt][2 * h] *= alpha;
        state.l[mt][2 * h + 1] *= alpha;
    }
}

/* Scores → P = 2^(s·c - X) as A fragments of the next product, 16 keys each. A row that has seen nothing has only -inf.
 */
template <bool BF16, int MT>
__device__ __forceinline__ void probabilities_16(const float (&s)[MT][8][4], float c, const float (&X)[2 * MT],
                                                 uint32_t (&p)[MT][4][4])
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float minus = X[2 * mt + h] == -CUDART_INF_F ? 0.0f : -X[2 * mt + h];
#pragma unroll
            for (int n = 0; n < 8; n++)
                p[mt][n / 2][(n & 1) * 2 + h] = pack_16<BF16>(exp2_fast(fmaf(s[mt][n][2 * h], c, minus)),
                                                              exp2_fast(fmaf(s[mt][n][2 * h + 1], c, minus)));
        }
}

/* 0 in place of a NaN or Inf in either half; *found says whether there was one. */
template <bool BF16> __device__ __forceinline__ uint32_t without_non_finite(uint32_t pair, bool *found)
{
    const uint32_t exponent = BF16 ? 0x7f80u : 0x7c00u;
    uint32_t kept = pair;
    if ((pair & exponent) == exponent)
        kept &= 0xffff0000u;
    if (((pair >> 16) & exponent) == exponent)
        kept &= 0x0000ffffu;
    *found = *found || kept != pair;
    return kept;
}

/* o += P·V, l += P·1. CAREFUL: non-finite values of V count as 0; returns whether there were any (in this thread). */
template <int D, bool BF16, int MT, bool CAREFUL>
__device__ __forceinline__ bool add_values_16(State16<D, MT> &state, const uint32_t (&p)[MT][4][4], uint32_t v)
{
    constexpr uint32_t ONES = BF16 ? 0x3f803f80u : 0x3c003c00u;
    const int lane = threadIdx.x & 31;
    const uint32_t base = v + (lane & 15) * D * 2 + (((lane >> 4) ^ (lane & 7)) << 4);
    bool found = false;
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            mma_16<BF16>(state.l[mt], p[mt][step], ONES, ONES);
#pragma unroll
        for (int pair = 0; pair < D / 16; pair++) {
            uint32_t b[4];
            load_matrix_4_transposed(b, (base ^ (pair << 5)) + step * 16 * D * 2);
            if (CAREFUL) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    b[i] = without_non_finite<BF16>(b[i], &found);
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_16<BF16>(state.o[mt][2 * pair], p[mt][step], b[0], b[1]);
                mma_16<BF16>(state.o[mt][2 * pair + 1], p[mt][step], b[2], b[3]);
            }
        }
    }
    return found;
}

/* What 2^0 of a tile counts for in a row's frame, where P stands against the row's largest score of the tile. */
template <int MT>
__device__ __forceinline__ void tile_weights(const float (&top)[2 * MT], const float (&X)[2 * MT],
                                             float (&weight)[2 * MT])
{
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
        weight[r] = top[r] == -CUDART_INF_F ? 1.0f : exp2_fast(top[r] - X[r]); /* nothing seen: P is 0, or NaN */
}

/* The same with sums of the tile's P·V in FP16, which then go into the FP32 state with the tile's weight; sums of P are
 * FP32. P is at most 1, so a sum is at most 64 of the largest value, and beyond 65504 an infinity. */
template <int D, int MT, bool CAREFUL>
__device__ __forceinline__ bool add_half_values_16(State16<D, MT> &state, const uint32_t (&p)[MT][4][4],
                                                   const float (&weight)[2 * MT], uint32_t v)
{
    constexpr uint32_t ONES = 0x3c003c00u;
    const int lane = threadIdx.x & 31;
    const uint32_t base = v + (lane & 15) * D * 2 + (((lane >> 4) ^ (lane & 7)) << 4);
    bool found = false;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        float sum[4] = {};
#pragma unroll
        for (int step = 0; step < 4; step++)
            mma_16<false>(sum, p[mt][step], ONES, ONES);
#pragma unroll
        for (int i = 0; i < 4; i++)
            state.l[mt][i] = fmaf(sum[i], weight[2 * mt + i / 2], state.l[mt][i]);
    }
#pragma unroll
    for (int pair = 0; pair < D / 16; pair++) {
        uint32_t sum[MT][2][2] = {};
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t b[4];
            load_matrix_4_transposed(b, (base ^ (pair << 5)) + step * 16 * D * 2);
            if (CAREFUL) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    b[i] = without_non_finite<false>(b[i], &found);
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma_half(sum[mt][0], p[mt][step], b[0], b[1]);
                mma_half(sum[mt][1], p[mt][step], b[2], b[3]);
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float2 x = unpack_half(sum[mt][n][h]);
                    float(&o)[4] = state.o[mt][2 * pair + n];
                    o[2 * h] = fmaf(x.x, weight[2 * mt + h], o[2 * h]);
                    o[2 * h + 1] = fmaf(x.y, weight[2 * mt + h], o[2 * h + 1]);
                }
    }
    return found;
}

template <bool BF16> __device__ __forceinline__ float widen(uint16_t bits)
{
    return BF16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}

/* The rare end of CAREFUL: adds the non-finite values of V, which add_values_16() left out, to the rows that see their
 * keys. A probability is positive, so a NaN or an infinity arrives as itself. */
template <int D, bool BF16, int MT>
__device__ __noinline__ void add_non_finite(State16<D, MT> &state, const ThreadRows<MT> &rows, const apa_cuda_tensor &v,
                                            int b, int h, int tile, int Skv)
{
    const int column = (threadIdx.x & 3) * 2, first = tile * APA_CUDA_TILE;
    for (int key = first; key < first + APA_CUDA_TILE && key < Skv; key++) {
        const uint16_t *value = row_pointer<uint16_t>(v, b, h, key) + column;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float x = widen<BF16>(value[n * 8 + i]);
                if (isfinite(x))
                    continue;
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        if (key >= rows.first[2 * mt + half] && key < rows.end[2 * mt + half])
                            state.o[mt][n][2 * half + i] += x;
            }
    }
}

/* One or the other. */
template <int D, bool BF16, bool HALF, int MT, bool CAREFUL>
__device__ __forceinline__ bool add_either_16(State16<D, MT> &state, const uint32_t (&p)[MT][4][4],
                                              const float (&top)[2 * MT], uint32_t v)
{
    if constexpr (HALF) {
        static_assert(!BF16, "no such sums");
        float weight[2 * MT];
        tile_weights<MT>(top, state.X, weight);
        return add_half_values_16<D, MT, CAREFUL>(state, p, weight, v);
    } else {
        return add_values_16<D, BF16, MT, CAREFUL>(state, p, v);
    }
}

/* P·V of a tile: the fast way where every row sees every key, the careful one at masks. top: the rows' largest scores
 * of the tile, what P stands against with HALF sums; otherwise it stands against the frames. */
template <int D, bool BF16, bool HALF, int MT>
__device__ __forceinline__ void
values_16(State16<D, MT> &state, const uint32_t (&p)[MT][4][4], const float (&top)[2 * MT], uint32_t v_shared,
          bool partly, const ThreadRows<MT> &rows, const apa_cuda_tensor &v, int b, int h, int tile, int Skv)
{
    if (!partly) {
        add_either_16<D, BF16, HALF, MT, false>(state, p, top, v_shared);
        return;
    }
    const bool found = add_either_16<D, BF16, HALF, MT, true>(state, p, top, v_shared);
    if (__any_sync(0xffffffffu, found)) {
        /* copies, so that the state itself has no address and stays in registers */
        State16<D, MT> in_memory = state;
        const ThreadRows<MT> seen = rows;
        add_non_finite<D, BF16, MT>(in_memory, seen, v, b, h, tile, Skv);
        state = in_memory;
    }
}

/* What a warp's rows see of a tile. */
struct WarpView {
    int any_first, any_end, every_first, every_end;

    __device__ bool sees(int tile) const
    {
        return any_first < (tile + 1) * APA_CUDA_TILE && any_end > tile * APA_CUDA_TILE;
    }
    __device__ bool partly(int tile) const
    {
        return every_first > tile * APA_CUDA_TILE || every_end < (tile + 1) * APA_CUDA_TILE;
    }
};

/* Rows of the thread, and what the warp sees: padding and rows that see nothing have no say in `every`. A row that sees
 * nothing beside rows that see something makes every tile a partial one. */
template <int MT>
__device__ __forceinline__ WarpView warp_rows(const apa_cuda_job &job, const Unit &unit, int first_row,
                                              ThreadRows<MT> &rows)
{
    WarpView view = {0x7fffffff, 0, 0, 0x7fffffff};
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Row row = row_of(job, unit, first_row + mt * 16 + h * 8 + ((threadIdx.x & 31) >> 2));
            rows.first[2 * mt + h] = row.first;
            rows.end[2 * mt + h] = row.end;
            if (!row.real)
                continue;
            view.every_first = max(view.every_first, row.first);
            view.every_end = min(view.every_end, row.end);
            if (row.first < row.end) {
                view.any_first = min(view.any_first, row.first);
                view.any_end = max(view.any_end, row.end);
            }
        }
    view.any_first = __reduce_min_sync(0xffffffffu, view.any_first);
    view.any_end = __reduce_max_sync(0xffffffffu, view.any_end);
    view.every_first = __reduce_max_sync(0xffffffffu, view.every_first);
    view.every_end = __reduce_min_sync(0xffffffffu, view.every_end);
    return view;
}

#endif
