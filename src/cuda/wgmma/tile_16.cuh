/* Tiles of 16-bit keys and values for a warpgroup of 64 rows: what a warpgroup sees, probabilities as
 * operands, P·V where values may not be finite. Rows, states and probabilities are those of the
 * warp-level kernels (cuda/warp_mma/tile_16.cuh): a warp of a warpgroup holds its 16 rows in the same registers.
 *
 * A tile of n keys lies as D / 64 blocks of [n][64 channels], 128-byte swizzled (hopper.cuh). */
#ifndef APA_CUDA_WGMMA_TILE_16_CUH
#define APA_CUDA_WGMMA_TILE_16_CUH

#include "cuda/warp_mma/store.cuh"
#include "cuda/warp_mma/tile_16.cuh"
#include "cuda/wgmma/products.cuh"

constexpr int WARPGROUP = 128;
constexpr int WARPGROUP_ROWS = 64;

#ifdef APA_CUDA_BULK

/* The view of a whole warpgroup, from those of its warps; `shared` has room for 4 views. Named barrier `which`. */
__device__ __forceinline__ WarpView warpgroup_view(const WarpView &own, WarpView *shared, int which)
{
    if ((threadIdx.x & 31) == 0)
        shared[threadIdx.x / 32 % 4] = own;
    named_barrier(which, WARPGROUP);
    WarpView all = shared[0];
#pragma unroll
    for (int w = 1; w < 4; w++) {
        all.any_first = min(all.any_first, shared[w].any_first);
        all.any_end = max(all.any_end, shared[w].any_end);
        all.every_first = max(all.every_first, shared[w].every_first);
        all.every_end = min(all.every_end, shared[w].every_end);
    }
    return all;
}

/* A row's frame X for the scores at hand, row g + 8h of the lane. alpha: what its sums have to be multiplied by;
 * returns whether that is not 1. */
template <int N>
__device__ __forceinline__ bool move_frame(const float (&s)[N][4], int h, float c, float &X, float &alpha)
{
    float top = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
    for (int n = 1; n < N; n++)
        top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    const float next = quad_max(top) * c - FRAME_OFFSET;
    const bool moves = next > X + FRAME_SLACK;
    alpha = moves ? exp2_fast(X - next) : 1.0f;
    X = moves ? next : X;
    return moves;
}

/* Exponentials → P as A operands. */
template <bool BF16, int N>
__device__ __forceinline__ void pack_probabilities(const float (&s)[N][4], uint32_t (&p)[N / 2][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            p[n / 2][n % 2 * 2 + h] = pack_16<BF16>(s[n][2 * h], s[n][2 * h + 1]);
}

/* o into the rows' new frames. */
template <int D> __device__ __forceinline__ void multiply(State16<D, 1> &state, const float (&alpha)[2])
{
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            state.o[0][n][j] *= alpha[j >> 1];
}

/* Does a tile hold a value that is not finite? The threads of a warpgroup look at one part each. */
template <bool BF16> __device__ __forceinline__ bool has_non_finite(uint32_t tile, int bytes)
{
    constexpr uint32_t EXPONENT = BF16 ? 0x7f807f80u : 0x7c007c00u, ONE = BF16 ? 0x00800080u : 0x04000400u;
    uint32_t found = 0;
    for (int at = threadIdx.x % WARPGROUP * 16; at < bytes; at += WARPGROUP * 16) {
        uint32_t x[4];
        load_shared_16(x, tile + at);
#pragma unroll
        for (int i = 0; i < 4; i++) /* an exponent of ones carries into the sign's place */
            found |= (x[i] & EXPONENT) + ONE;
    }
    return (found & 0x80008000u) != 0;
}

/* o += P·V for one warp's 16 rows without the values that are not finite; those are added to the rows that see their
 * keys. KEYS keys from `key` on. For the rare masked tile that holds such values. */
template <int D, bool BF16, int KEYS>
__device__ __noinline__ void careful_values(State16<D, 1> &state, const uint32_t (&p)[KEYS / 16][4], uint32_t v,
                                            const apa_cuda_job &job, const Unit &unit, int first_row, int b, int h,
                                            int key)
{
    const int lane = threadIdx.x & 31;
    bool found = false;
    for (int step = 0; step < KEYS / 16; step++)
        for (int pair = 0; pair < D / 16; pair++) {
            const int piece = pair * 2 + (lane >> 4);
            uint32_t x[4];
            load_matrix_4_transposed(x, v + piece / 8 * (KEYS * 128) + swizzled(step * 16 + (lane & 15), piece % 8));
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[i] = without_non_finite<BF16>(x[i], &found);
            mma_16<BF16>(state.o[0][2 * pair], p[step], x[0], x[1]);
            mma_16<BF16>(state.o[0][2 * pair + 1], p[step], x[2], x[3]);
        }
    if (!__any_sync(0xffffffffu, found))
        return;
    ThreadRows<1> rows;
    warp_rows<1>(job, unit, first_row, rows);
    for (int tile = key / APA_CUDA_TILE; tile < (key + KEYS) / APA_CUDA_TILE; tile++)
        add_non_finite<D, BF16, 1>(state, rows, job.v, b, h, tile, job.Skv);
}

#endif
#endif
