/* A ring of equal pieces of memory on their way into shared memory.
 *
 * sm_90 and later: one thread starts bulk copies, readers wait on a barrier per stage; a stage is filled again LAG
 * steps after it was read, so that no warp waits for the slowest one of the step before. Earlier devices: every thread
 * copies 16 bytes at a time, and a block barrier a step. */
#ifndef APA_CUDA_RING_CUH
#define APA_CUDA_RING_CUH

#include "cuda/ptx.cuh"

template <int STAGES, int BYTES, int THREADS> struct Ring {
    static constexpr int LAG = STAGES > 3 ? 2 : 1;
    static constexpr int BARRIER_BYTES = 16 * STAGES;
    static constexpr int SHARED = STAGES * BYTES + BARRIER_BYTES;
    static_assert(BYTES % 16 == 0, "copies are of 16 bytes");

    uint32_t base, barriers;
    int n;

    __device__ uint32_t stage(int i) const
    {
        return base + i % STAGES * BYTES;
    }
    __device__ uint32_t full(int i) const
    {
        return barriers + i % STAGES * 16;
    }
    __device__ uint32_t empty(int i) const
    {
        return barriers + i % STAGES * 16 + 8;
    }

#ifdef APA_CUDA_BULK
    template <typename Source> __device__ void fill(int i, Source source) const
    {
        barrier_expect(full(i), BYTES);
        copy_bulk(stage(i), source(i), BYTES, full(i));
    }

    /* source(i): address of piece i, 16-byte aligned. Every thread of the block calls start() and next(). */
    template <typename Source> __device__ void start(uint32_t shared, int pieces, Source source)
    {
        base = shared;
        barriers = shared + STAGES * BYTES;
        n = pieces;
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) {
                barrier_init(full(i), 1);
                barrier_init(empty(i), THREADS / 32);
            }
            barrier_init_fence();
            for (int i = 0; i < STAGES && i < n; i++)
                fill(i, source);
        }
        __syncthreads();
    }

    /* Waits for piece i and returns where it lies. */
    template <typename Source> __device__ uint32_t next(int i, Source source) const
    {
        const int again = i - LAG + STAGES;
        if (threadIdx.x == 0 && i >= LAG && again < n) {
            barrier_wait(empty(i - LAG), (i - LAG) / STAGES & 1);
            fill(again, source);
        }
        __syncwarp();
        barrier_wait(full(i), i / STAGES & 1);
        return stage(i);
    }

    /* The warp has read piece i. */
    __device__ void done(int i) const
    {
        __syncwarp();
        if ((threadIdx.x & 31) == 0)
            barrier_arrive(empty(i));
    }
#else
    template <typename Source> __device__ void fill(int i, Source source) const
    {
        if (i < n) {
            const uint8_t *from = source(i);
            for (int at = threadIdx.x * 16; at < BYTES; at += THREADS * 16)
                copy_async_16(stage(i) + at, from + at);
        }
        copy_async_commit();
    }

    template <typename Source> __device__ void start(uint32_t shared, int pieces, Source source)
    {
        base = shared;
        n = pieces;
        for (int i = 0; i < STAGES - 1; i++)
            fill(i, source);
    }

    template <typename Source> __device__ uint32_t next(int i, Source source) const
    {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        fill(i + STAGES - 1, source);
        return stage(i);
    }

    __device__ void done(int) const
    {
    }
#endif
};

#endif
