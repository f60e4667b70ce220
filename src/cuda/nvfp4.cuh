/* The NVFP4 matrix product and its conversions: what only sm_120a has, in small functions, each with a version in
 * software that has the same operands in the same places, so that a kernel written on them runs (slowly) from sm_90.
 *
 * mma_nvfp4: d += (A ∘ scales of A)·(B ∘ scales of B), A 16 × 64 and B 64 × 8 in E2M1, one UE4M3 scale for 16 elements
 * along k. Lane 4g + t holds (PTX ISA, matrix fragments for mma.m16n8k64; block scaling for mma.sync)
 *   a[0], a[2]   row g,     k = 8t … 8t + 7, and the same + 32; element i of the eight in bits 4i … 4i + 3
 *   a[1], a[3]   row g + 8, likewise
 *   b[0], b[1]   column g,  k = 8t … 8t + 7, and + 32
 *   scale_a      lanes 4g + 2·from_a, 4g + 2·from_a + 1: rows g and g + 8; byte j is for k = 16j … 16j + 15
 *   scale_b      lane 4g + from_b: column g
 *   d            rows g (0, 1) and g + 8 (2, 3), columns 2t, 2t + 1
 * In software a block of 16 k, which two lanes of each quad hold, is two products of 16-bit floats with the other
 * lanes' share of A at zero, and then one fused multiply-add with the product of the scales: a block's sum is exact,
 * and d is rounded once a block. The instruction's own order of sums is not documented.
 *
 * tests/cuda/fragments.cu puts single elements through every place. */
#ifndef APA_CUDA_NVFP4_CUH
#define APA_CUDA_NVFP4_CUH

#include "cuda/ptx.cuh"

#include <cuda_fp16.h>

#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || (defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ == 1200)
#define APA_CUDA_NVFP4_HARDWARE 1
#endif

/* A UE4M3 code (not NaN) as float. */
__device__ __forceinline__ float ue4m3_value(uint32_t code)
{
    /* normal: the same significand, another bias; below, code·2^-9 */
    return code >= 8 ? __uint_as_float((code << 20) + ((127u - 7u) << 23)) : static_cast<float>(code) * 0x1p-9f;
}

/* Code of the UE4M3 value nearest to x >= 0, ties to even, 448 at most. */
__device__ __forceinline__ uint32_t ue4m3_nearest(float x)
{
    return pack_e4m3(x, 0.0f) & 0x7fu;
}

/* x (at least 0) → E2M1 code, ties to even. */
__device__ __forceinline__ uint32_t e2m1_nearest(float x)
{
    return (x > 0.25f) + (x >= 0.75f) + (x > 1.25f) + (x >= 1.75f) + (x > 2.5f) + (x >= 3.5f) + (x > 5.0f);
}

/* Eight numbers >= 0 → E2M1 codes, the first in the lowest bits. */
__device__ __forceinline__ uint32_t pack_e2m1(const float (&x)[8])
{
#ifdef APA_CUDA_NVFP4_HARDWARE
    uint32_t r;
    asm("{\n .reg .b8 p0, p1, p2, p3;\n"
        " cvt.rn.satfinite.e2m1x2.f32 p0, %2, %1;\n cvt.rn.satfinite.e2m1x2.f32 p1, %4, %3;\n"
        " cvt.rn.satfinite.e2m1x2.f32 p2, %6, %5;\n cvt.rn.satfinite.e2m1x2.f32 p3, %8, %7;\n"
        " mov.b32 %0, {p0, p1, p2, p3};\n}"
        : "=r"(r)
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
    return r;
#else
    uint32_t r = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        r |= e2m1_nearest(x[i]) << (4 * i);
    return r;
#endif
}

/* ---- the product in software ---- */

/* Elements 2·PAIR and 2·PAIR + 1 of eight → two 16-bit floats. An E2M1 code one bit left of FP16's mantissa is its
 * value times 2^-14, subnormals included. */
template <int PAIR> __device__ __forceinline__ uint32_t e2m1_to_f16(uint32_t eight)
{
    const uint32_t two = eight >> (8 * PAIR);
    const uint32_t bits = (two & 0x7u) << 9 | (two & 0x8u) << 12 | (two & 0x70u) << 21 | (two & 0x80u) << 24;
    const __half2 value = __hmul2(*reinterpret_cast<const __half2 *>(&bits), __half2half2(__ushort_as_half(0x7400)));
    return *reinterpret_cast<const uint32_t *>(&value);
}

static __device__ __noinline__ float4 mma_nvfp4_software(float4 d, uint4 a, uint2 b, uint32_t scale_a, uint32_t scale_b,
                                                         int from_a, int from_b)
{
    const int lane = threadIdx.x & 31, quad = lane & ~3, t = lane & 3;
    const uint32_t of_a[2] = {__shfl_sync(0xffffffffu, scale_a, quad + 2 * from_a),
                              __shfl_sync(0xffffffffu, scale_a, quad + 2 * from_a + 1)};
    const uint32_t of_b[2] = {__shfl_sync(0xffffffffu, scale_b, 8 * t + from_b),
                              __shfl_sync(0xffffffffu, scale_b, 8 * t + 4 + from_b)};
#pragma unroll 1
    for (int block = 0; block < 4; block++) {
        const bool mine = t >> 1 == (block & 1);
        const uint32_t upper = mine ? (block < 2 ? a.x : a.z) : 0, lower = mine ? (block < 2 ? a.y : a.w) : 0;
        const uint32_t column = block < 2 ? b.x : b.y;
        const uint32_t first[4] = {e2m1_to_f16<0>(upper), e2m1_to_f16<0>(lower), e2m1_to_f16<1>(upper),
                                   e2m1_to_f16<1>(lower)};
        const uint32_t second[4] = {e2m1_to_f16<2>(upper), e2m1_to_f16<2>(lower), e2m1_to_f16<3>(upper),
                                    e2m1_to_f16<3>(lower)};
        float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        mma_16<false>(dot, first, e2m1_to_f16<0>(column), e2m1_to_f16<1>(column));
        mma_16<false>(dot, second, e2m1_to_f16<2>(column), e2m1_to_f16<3>(column));
        const float row[2] = {ue4m3_value(of_a[0] >> (8 * block) & 0xff), ue4m3_value(of_a[1] >> (8 * block) & 0xff)};
        const float col[2] = {ue4m3_value(of_b[0] >> (8 * block) & 0xff), ue4m3_value(of_b[1] >> (8 * block) & 0xff)};
        d.x = fmaf(dot[0], row[0] * col[0], d.x);
        d.y = fmaf(dot[1], row[0] * col[1], d.y);
        d.z = fmaf(dot[2], row[1] * col[0], d.z);
        d.w = fmaf(dot[3], row[1] * col[1], d.w);
    }
    return d;
}

/* ---- the product ---- */

__device__ __forceinline__ void mma_nvfp4(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                          uint32_t scale_a, int from_a, uint32_t scale_b, int from_b)
{
#ifdef APA_CUDA_NVFP4_HARDWARE
    asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%14, %15};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "h"(static_cast<uint16_t>(0)),
          "h"(static_cast<uint16_t>(from_a)), "r"(scale_b), "h"(static_cast<uint16_t>(0)),
          "h"(static_cast<uint16_t>(from_b)));
#else
    const float4 r = mma_nvfp4_software(make_float4(d[0], d[1], d[2], d[3]), make_uint4(a[0], a[1], a[2], a[3]),
                                        make_uint2(b0, b1), scale_a, scale_b, from_a, from_b);
    d[0] = r.x;
    d[1] = r.y;
    d[2] = r.z;
    d[3] = r.w;
#endif
}

#endif
