/* What sm_90a has beyond the warp-level kernels, in tiny functions: tensor copies, register budgets, groups of
 * asynchronous matrix products, and the descriptors that tell these where their operands lie. Names and meanings are
 * those of the PTX ISA manual (wgmma, cp.async.bulk.tensor, setmaxnreg).
 *
 * Operands in shared memory lie in the 128-byte swizzle: rows of 128 bytes, the 16-byte piece p of row r at place
 * p ^ (r % 8), 8 rows a block of 1024 bytes (aligned to as much). The tensor copy engine writes that form, and
 * swizzled() computes it where threads write. Two ways to read it:
 *   K-major   a row holds 128 bytes of the summed dimension; blocks of 8 rows follow each other
 *   MN-major  a row holds 64 16-bit columns of the result, rows are the summed dimension; further columns 64 at a time
 */
#ifndef APA_CUDA_HOPPER_CUH
#define APA_CUDA_HOPPER_CUH

#include "cuda/ptx.cuh"

#include <cuda.h>

/* Byte offset of 16-byte piece `piece` of row `row`. */
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t piece)
{
    return row * 128 + ((piece ^ (row & 7)) << 4);
}

#ifdef APA_CUDA_BULK

/* ---- roles ---- */

template <int REGISTERS> __device__ __forceinline__ void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void named_barrier_arrive(int which, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

/* A barrier that tells every thread whether some thread said yes. */
__device__ __forceinline__ bool named_barrier_any(int which, int threads, bool yes)
{
    uint32_t any;
    asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n"
                 " barrier.cta.red.or.pred q, %1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"(which), "r"(threads), "r"(static_cast<uint32_t>(yes))
                 : "memory");
    return any != 0;
}

/* What this thread wrote to shared memory, the matrix units and the copy engine may read after the next barrier. */
__device__ __forceinline__ void fence_for_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Larger of two unsigned 16-bit numbers, in both halves. */
__device__ __forceinline__ uint32_t max_u16_2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* Smaller, larger of two 16-bit floats, in both halves. */
template <bool BF16> __device__ __forceinline__ uint32_t min_16_2(uint32_t a, uint32_t b)
{
    uint32_t r;
    if (BF16)
        asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else
        asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

template <bool BF16> __device__ __forceinline__ uint32_t max_16_2(uint32_t a, uint32_t b)
{
    uint32_t r;
    if (BF16)
        asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else
        asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* a·b in 64 bits, as one instruction (of a power of two the compiler would make three). */
__device__ __forceinline__ int64_t wide_product(int a, int b)
{
    int64_t r;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(r) : "r"(a), "r"(b));
    return r;
}

/* The same pointer, of which the compiler does not know how it came about: sums with it are not taken apart. */
template <typename T> __device__ __forceinline__ const T *as_it_is(const T *pointer)
{
    const T *r;
    asm("mov.b64 %0, %1;" : "=l"(r) : "l"(pointer));
    return r;
}

/* ---- tensor copies ---- */

/* A box of a 4-D tensor (channel, key, head, batch) into shared memory; what lies outside comes as zeros. */
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int channel, int key, int head, int batch,
                                         uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(channel), "r"(key), "r"(head), "r"(batch)
                 : "memory");
}

/* Shared memory to global memory, 16-byte pieces; what threads wrote to it needs fence_for_async() and a barrier. */
__device__ __forceinline__ void copy_bulk_out(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}

/* The shared memory that this thread's copies read may go. */
__device__ __forceinline__ void copy_bulk_out_wait()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* ---- descriptors ---- */

constexpr uint64_t SWIZZLE_128 = 1ull << 62;

/* Rows of 128 bytes along the summed dimension. A step along it of 32 bytes adds 2. */
__device__ __forceinline__ uint64_t k_major(uint32_t address)
{
    return SWIZZLE_128 | (1024ull >> 4) << 32 | 1ull << 16 | (address & 0x3ffff) >> 4;
}

/* Rows of 64 16-bit columns; `columns_64` bytes from one 64 columns to the next. 16 rows further: adds 128. */
__device__ __forceinline__ uint64_t mn_major(uint32_t address, uint32_t columns_64)
{
    return SWIZZLE_128 | (1024ull >> 4) << 32 | static_cast<uint64_t>(columns_64 >> 4) << 16 | (address & 0x3ffff) >> 4;
}

/* ---- groups of products ---- */

/* Registers that products read or write are in order up to here. */
__device__ __forceinline__ void products_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* All but the last PENDING groups are done. */
template <int PENDING> __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* The compiler does not see that a product writes its sums after it was issued: nothing of x moves over this line. */
template <int N> __device__ __forceinline__ void pin(float (&x)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])::"memory");
}

template <int N> __device__ __forceinline__ void pin(uint32_t (&x)[N])
{
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+r"(x[n])::"memory");
}

template <int N> __device__ __forceinline__ void pin(uint32_t (&x)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+r"(x[n][0]), "+r"(x[n][1]), "+r"(x[n][2]), "+r"(x[n][3])::"memory");
}

#endif
#endif
