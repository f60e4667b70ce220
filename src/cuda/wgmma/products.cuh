/* Products of a warpgroup: 64 rows × N columns, one step along the summed dimension (32 bytes of it).
 *
 * Lane 4g + t of warp w holds of the sums d[n][…]: row 16w + g, columns 8n + 2t and 8n + 2t + 1, then row 16w + g + 8,
 * the same two: as the warp-level mma has it. FP16 sums are packed, two columns a register: d[2n] row g, d[2n + 1] row
 * g + 8. A operands in registers: 16-bit a[0] row g, columns 2t, 2t + 1; a[1] row g + 8; a[2], a[3] the same 8 columns
 * on. 8-bit: a[0] row g, columns 4t … 4t + 3; a[1] row g + 8; a[2], a[3] the same 16 columns on. */
#ifndef APA_CUDA_PRODUCTS_CUH
#define APA_CUDA_PRODUCTS_CUH

#include "cuda/wgmma/hopper.cuh"

#ifdef APA_CUDA_BULK

/* Lists of operands; the numbers are those of the asm statement. */
#define F4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define F8(d, n) F4(d, n), F4(d, n + 1)
#define F32(d, n) F8(d, n), F8(d, n + 2), F8(d, n + 4), F8(d, n + 6)
#define F64(d) F32(d, 0), F32(d, 8)
#define F128(d) F32(d, 0), F32(d, 8), F32(d, 16), F32(d, 24)
#define U4(d, n) "+r"(d[n]), "+r"(d[n + 1]), "+r"(d[n + 2]), "+r"(d[n + 3])
#define U16(d, n) U4(d, n), U4(d, n + 4), U4(d, n + 8), U4(d, n + 12)
#define U32(d) U16(d, 0), U16(d, 16)

#define R32                                                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R36                                                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                 \
    "%32, %33, %34, %35"
#define R64                                                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R68                                                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                                 \
    "%64, %65, %66, %67"
#define R128                                                                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                                 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                                 \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                                 \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                     \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* d += A·Bᵀ or d = A·Bᵀ: both in shared memory, K-major. */
template <bool BF16> __device__ __forceinline__ void product_16(float (&d)[8][4], uint64_t a, uint64_t b, int add)
{
    if (BF16)
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
                     " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" R32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                     : F32(d, 0)
                     : "l"(a), "l"(b), "r"(add));
    else
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
                     " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" R32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                     : F32(d, 0)
                     : "l"(a), "l"(b), "r"(add));
}

/* d += A·Bᵀ or d = A·Bᵀ: both in shared memory, K-major. */
template <bool BF16> __device__ __forceinline__ void product_16(float (&d)[16][4], uint64_t a, uint64_t b, int add)
{
    if (BF16)
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
                     " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                     : F64(d)
                     : "l"(a), "l"(b), "r"(add));
    else
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
                     " wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" R64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                     : F64(d)
                     : "l"(a), "l"(b), "r"(add));
}

/* d += A·B: A in registers, B MN-major. */
template <bool BF16> __device__ __forceinline__ void product_16(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b)
{
    if (BF16)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" R32
                     "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                     : F32(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" R32
                     "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                     : F32(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* d += A·B: A in registers, B MN-major. */
template <bool BF16> __device__ __forceinline__ void product_16(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b)
{
    if (BF16)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R64
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                     : F64(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" R64
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                     : F64(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* d += A·B: A in registers, B MN-major. */
template <bool BF16> __device__ __forceinline__ void product_16(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b)
{
    if (BF16)
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" R128
                     "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                     : F128(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" R128
                     "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                     : F128(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* E4M3 scores: FP16 sums of 64 × 128; A in registers, B K-major. */
__device__ __forceinline__ void product_e4m3_f16(uint32_t (&d)[32], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n128k32.f16.e4m3.e4m3 {" R32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}"
                 : U32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* FP16 scores: FP16 sums of 64 × 128; A in registers, B K-major. */
__device__ __forceinline__ void product_f16_f16(uint32_t (&d)[32], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n128k16.f16.f16.f16 {" R32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : U32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* The same with both in shared memory, K-major. */
__device__ __forceinline__ void product_f16_f16(uint32_t (&d)[32], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n128k16.f16.f16.f16 {" R32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : U32(d)
                 : "l"(a), "l"(b), "r"(add));
}

/* E4M3 P·V with 8 more columns: A in registers, B K-major. */
__device__ __forceinline__ void product_e4m3(float (&d)[9][4], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %41, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n72k32.f32.e4m3.e4m3 {" R36
                 "}, {%36, %37, %38, %39}, %40, p, 1, 1;\n}"
                 : F32(d, 0), F4(d, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* E4M3 P·V with 8 more columns: A in registers, B K-major. */
__device__ __forceinline__ void product_e4m3(float (&d)[17][4], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %73, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" R68
                 "}, {%68, %69, %70, %71}, %72, p, 1, 1;\n}"
                 : F64(d), F4(d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#undef F4
#undef F8
#undef F32
#undef F64
#undef F128
#undef U4
#undef U16
#undef U32
#undef R32
#undef R36
#undef R64
#undef R68
#undef R128

#endif
#endif
