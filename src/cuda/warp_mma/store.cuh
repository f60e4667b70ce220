/* Between memory and a warp: pieces into shared memory, partial states and finished rows out of registers. */
#ifndef APA_CUDA_STORE_CUH
#define APA_CUDA_STORE_CUH

#include "apa/tensor.h"
#include "cuda/warp_mma/tile_16.cuh"

constexpr float LN2 = 0.693147180559945309f;

/* 16 bytes at a time from global to shared memory, asynchronously; waited for with the next copies. */
template <int THREADS> __device__ __forceinline__ void copy_in(uint32_t to, const uint8_t *from, int bytes)
{
    for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16)
        copy_async_16(to + at, from + at);
}

/* Two neighbouring output elements, rounded once to the tensor's dtype. */
__device__ __forceinline__ void store_pair(const apa_cuda_tensor &out, int64_t at, float x, float y)
{
    if (out.dtype == APA_DTYPE_F32) {
        float *to = static_cast<float *>(out.data) + at;
        to[0] = x;
        to[1] = y;
    } else if (out.dtype == APA_DTYPE_BF16) {
        __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(out.data) + at;
        to[0] = __float2bfloat16_rn(x);
        to[1] = __float2bfloat16_rn(y);
    } else {
        __half *to = static_cast<__half *>(out.data) + at;
        to[0] = __float2half_rn(x);
        to[1] = __float2half_rn(y);
    }
}

__device__ __forceinline__ void store_lse(const apa_cuda_tensor &lse, int b, int head, int position, float X, float l)
{
    if (lse.dtype == APA_DTYPE_NONE)
        return;
    float *to = static_cast<float *>(lse.data) + b * lse.stride[0] + head * lse.stride[1] + position * lse.stride[2];
    /* l is 0 exactly where a row saw nothing; a NaN stays one */
    *to = l == 0.0f ? -CUDART_INF_F : (X + log2f(l)) * LN2;
}

/* States of the warp's rows, into row `first_row` on of piece `piece` ([piece][128][D], [piece][128]). */
template <int D, int MT>
__device__ __forceinline__ void store_part(const State16<D, MT> &state, float *o, float *frame, float *sum,
                                           int64_t piece, int first_row)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t row = piece * APA_CUDA_UNIT + first_row + mt * 16 + h * 8 + g;
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *reinterpret_cast<float2 *>(o + row * D + n * 8 + t * 2) =
                    make_float2(state.o[mt][n][2 * h], state.o[mt][n][2 * h + 1]);
            if (t == 0) {
                frame[row] = state.X[2 * mt + h];
                sum[row] = state.l[mt][2 * h];
            }
        }
}

/* May a row's neighbouring elements be written up to 16 bytes at a time? */
__device__ __forceinline__ bool is_aligned(const apa_cuda_tensor &out)
{
    return (reinterpret_cast<uintptr_t>(out.data) & 15) == 0 &&
           ((out.stride[0] | out.stride[1] | out.stride[2]) & 7) == 0;
}

/* Lane t of a quad has x[k] of four blocks k; afterwards it has x[0 … 3] of lanes 0 … 3, of block t. */
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4])
{
#pragma unroll
    for (int m = 1; m < 4; m *= 2) {
        const bool upper = (threadIdx.x & m) != 0;
#pragma unroll
        for (int k = 0; k < 4; k++)
            if ((k & m) == 0) {
                const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? x[k] : x[k | m], m);
                x[k] = upper ? other : x[k];
                x[k | m] = upper ? x[k | m] : other;
            }
    }
}

/* A lane's two elements of each 8-channel block, times `factor`, to a row of 16-bit numbers, 16 bytes at a time. */
template <int D, bool BF16>
__device__ __forceinline__ void store_row_16(const apa_cuda_tensor &out, int64_t at, const float (&o)[D / 8][4], int h,
                                             float factor, bool real)
{
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < D / 8; n += 4) {
        uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            x[k] = pack_16<BF16>(o[n + k][2 * h] * factor, o[n + k][2 * h + 1] * factor);
        transpose_quad(x);
        if (real)
            *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(out.data) + at + (n + t) * 8) =
                make_uint4(x[0], x[1], x[2], x[3]);
    }
}

template <int D, int MT>
__device__ __forceinline__ void store_result(const State16<D, MT> &state, const apa_cuda_job &job, const Unit &unit,
                                             int b, int first_row)
{
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const bool wide = job.out.dtype != APA_DTYPE_F32 && is_aligned(job.out);
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Row row = row_of(job, unit, first_row + mt * 16 + h * 8 + g);
            const float l = state.l[mt][2 * h], inverse = l == 0.0f ? 0.0f : 1.0f / l;
            const int64_t at = b * job.out.stride[0] + row.head * job.out.stride[1] + row.position * job.out.stride[2];
            if (wide && job.out.dtype == APA_DTYPE_BF16) {
                store_row_16<D, true>(job.out, at, state.o[mt], h, inverse, row.real);
            } else if (wide) {
                store_row_16<D, false>(job.out, at, state.o[mt], h, inverse, row.real);
            } else if (row.real) {
#pragma unroll
                for (int n = 0; n < D / 8; n++)
                    store_pair(job.out, at + n * 8 + t * 2, state.o[mt][n][2 * h] * inverse,
                               state.o[mt][n][2 * h + 1] * inverse);
            }
            if (row.real && t == 0)
                store_lse(job.lse, b, row.head, row.position, state.X[2 * mt + h], l);
        }
}

#endif
