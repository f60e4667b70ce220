/* Does compute-sanitizer's racecheck know rings of bulk copies? One block, two stages in shared memory, a producer and
 * 32 readers, written as the manuals have it, and nothing else: what the tool says of it is about the tool. Three rings
 * carry the same pieces, and a run fails if a reader's sum is wrong.
 *
 *   bulk     one thread waits until all 32 readers have arrived at the stage's `empty` barrier, announces the bytes on
 * its `full` barrier and starts cp.async.bulk; readers wait for `full`, read, and arrive at `empty` each for itself
 *   warp     the same, but the readers' warp meets in __syncwarp() and one of it arrives for all, as ring.cuh does
 *   once     bulk with as many pieces as stages: nothing is ever overwritten, so a report is of a read that comes
 *            after its write alone
 *   plain    the same two barriers with stores by 32 threads instead of the bulk copy
 *   async    cp.async, cp.async.wait_group and __syncthreads(), as before sm_90
 *
 *     nvcc -std=c++17 -O2 -Isrc -arch=sm_90 -o cuda_race tests/cuda/race.cu
 *     for ring in bulk warp once plain async; do compute-sanitizer --tool racecheck ./cuda_race $ring; done
 *
 * What a report of one says: bulk and once, that the tool does not see a bulk copy's writes come before the end of the
 * wait on its barrier; plain, that it does not know the barriers; warp alone, that it does not see one lane's arrival,
 * after
 * __syncwarp(), come after the other lanes' reads. None of them: look at src/cuda/warp_mma/ring.cuh. */
#include "cuda/ptx.cuh"

#include <cstdio>
#include <cstring>

constexpr int STAGES = 2, READERS = 32, BYTES = READERS * 16, PIECES = 9;

struct Stages {
    uint32_t base, barriers;

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
        return full(i) + 8;
    }
};

/* A reader's 16 bytes of piece i. */
__device__ uint32_t read_piece(const Stages &ring, int i, int reader)
{
    uint32_t x[4];
    load_shared_16(x, ring.stage(i) + reader * 16);
    return x[0] + x[1] + x[2] + x[3];
}

/* Warp 0 produces, warp 1 reads. BULK: one thread and bulk copies; otherwise 32 threads and stores. */
template <bool BULK, bool BY_WARP = false>
static __global__ void barrier_ring(const uint4 *from, int pieces, uint32_t *sums)
{
#ifdef APA_CUDA_BULK
    __shared__ __align__(128) uint8_t stages[STAGES * BYTES];
    __shared__ __align__(16) uint8_t barriers[STAGES * 16];
    const Stages ring = {shared_address(stages), shared_address(barriers)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), BULK ? 1 : 32);
            barrier_init(ring.empty(i), BY_WARP ? 1 : READERS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int i = 0; i < pieces && (!BULK || threadIdx.x == 0); i++) {
            if (i >= STAGES)
                barrier_wait(ring.empty(i), (i / STAGES - 1) & 1);
            if (BULK) {
                barrier_expect(ring.full(i), BYTES);
                copy_bulk(ring.stage(i), from + i * READERS, BYTES, ring.full(i));
            } else {
                const uint4 x = from[i * READERS + threadIdx.x];
                const uint32_t word[4] = {x.x, x.y, x.z, x.w};
                store_shared_16(ring.stage(i) + threadIdx.x * 16, word);
                barrier_arrive(ring.full(i));
            }
        }
        return;
    }
    const int reader = threadIdx.x - 32;
    uint32_t sum = 0;
    for (int i = 0; i < pieces; i++) {
        barrier_wait(ring.full(i), i / STAGES & 1);
        sum += read_piece(ring, i, reader);
        if (BY_WARP)
            __syncwarp();
        if (!BY_WARP || reader == 0)
            barrier_arrive(ring.empty(i));
    }
    sums[reader] = sum;
#endif
}

static __global__ void async_ring(const uint4 *from, int pieces, uint32_t *sums)
{
    __shared__ __align__(128) uint8_t stages[STAGES * BYTES];
    const Stages ring = {shared_address(stages), 0};
    const int reader = threadIdx.x - 32;
    uint32_t sum = 0;
    auto fill = [&](int i) {
        if (threadIdx.x < 32 && i < pieces)
            copy_async_16(ring.stage(i) + threadIdx.x * 16, from + i * READERS + threadIdx.x);
        copy_async_commit();
    };
    fill(0);
    for (int i = 0; i < pieces; i++) {
        copy_async_wait<0>();
        __syncthreads();
        fill(i + 1);
        if (reader >= 0)
            sum += read_piece(ring, i, reader);
    }
    if (reader >= 0)
        sums[reader] = sum;
}

int main(int argc, char **argv)
{
    const char *which = argc > 1 ? argv[1] : "bulk";
    const int pieces = strcmp(which, "once") == 0 ? STAGES : PIECES;
    static uint4 piece[PIECES * READERS];
    uint32_t sums[READERS], wanted[READERS] = {};
    uint4 *from = nullptr;
    uint32_t *to = nullptr;
    for (int i = 0; i < PIECES * READERS; i++) {
        const uint32_t x = 2654435761u * static_cast<uint32_t>(i + 1);
        piece[i] = make_uint4(x, x >> 3, x >> 7, ~x);
        if (i < pieces * READERS)
            wanted[i % READERS] += piece[i].x + piece[i].y + piece[i].z + piece[i].w;
    }
    cudaError_t error = cudaMalloc(&from, sizeof piece);
    if (error == cudaSuccess)
        error = cudaMalloc(&to, sizeof sums);
    if (error == cudaSuccess)
        error = cudaMemcpy(from, piece, sizeof piece, cudaMemcpyHostToDevice);
    if (error == cudaSuccess)
        error = cudaMemset(to, 0, sizeof sums);
    if (error == cudaSuccess) {
        if (strcmp(which, "async") == 0)
            async_ring<<<1, 64>>>(from, pieces, to);
        else if (strcmp(which, "plain") == 0)
            barrier_ring<false><<<1, 64>>>(from, pieces, to);
        else if (strcmp(which, "warp") == 0)
            barrier_ring<true, true><<<1, 64>>>(from, pieces, to);
        else
            barrier_ring<true><<<1, 64>>>(from, pieces, to);
        error = cudaDeviceSynchronize();
    }
    if (error == cudaSuccess)
        error = cudaMemcpy(sums, to, sizeof sums, cudaMemcpyDeviceToHost);
    const bool right = error == cudaSuccess && memcmp(sums, wanted, sizeof sums) == 0;
    printf("%s: %s, sums %s\n", which, cudaGetErrorString(error), right ? "right" : "wrong");
    cudaFree(from);
    cudaFree(to);
    return right ? 0 : 1;
}
