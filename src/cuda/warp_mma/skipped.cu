/* Skipped tiles once the outputs are there: was what a row left out too small for them, too?
 *
 * Pass 1 (skip.cuh) weighs masses. An output is small where values cancel, or where the tiles that hold a row's mass
 * have small values, as a sink's often are, so with M the mass that a row has skipped at most, λ its mass, v the head's
 * largest value: |what is missing from out| <= M/λ·v, and it has to be under half a unit in the last place of the row's
 * largest output. A group with a row that fails gets all its skipped tiles back: they go into the list of corrections,
 * and corrections and pass 2 run again for its unit. Otherwise its tiles are counted and shown as skipped. */
#include "apa/attention.h"
#include "cuda/warp_mma/skip.cuh"
#include "cuda/warp_mma/store.cuh"

constexpr int RECHECK_THREADS = 256;

__device__ __forceinline__ float element(const apa_cuda_tensor &x, int64_t at)
{
    return x.dtype == APA_DTYPE_F32    ? static_cast<const float *>(x.data)[at]
           : x.dtype == APA_DTYPE_BF16 ? __bfloat162float(static_cast<const __nv_bfloat16 *>(x.data)[at])
                                       : __half2float(static_cast<const __half *>(x.data)[at]);
}

/* What a row has skipped at most, as a part of its mass; over the splits. */
__device__ __forceinline__ float skipped_part(const apa_cuda_job &job, int64_t unit_local, int r)
{
    float frame = -CUDART_INF_F, lambda = 0.0f, skipped = 0.0f;
    for (int split = 0; split < job.splits; split++)
        frame = fmaxf(frame, job.part_frame[(split * job.unit_count + unit_local) * APA_CUDA_UNIT + r]);
    if (frame == -CUDART_INF_F)
        return 0.0f;
    for (int split = 0; split < job.splits; split++) {
        const int64_t at = (split * job.unit_count + unit_local) * APA_CUDA_UNIT + r;
        lambda += job.part_lambda[at] * exp2f(job.part_frame[at] - frame);
        skipped += exp2f(job.part_skipped[at] - frame);
    }
    return skipped == 0.0f ? 0.0f : skipped / lambda;
}

/* Largest |v| of the head; a warp. */
__device__ __forceinline__ float largest_value(const apa_cuda_job &job, int head)
{
    float most = 0.0f;
    for (int c = threadIdx.x & 31; c < job.D; c += 32)
        most = fmaxf(most, job.v_amax[static_cast<int64_t>(head) * job.D + c]);
    return __int_as_float(__reduce_max_sync(0xffffffffu, __float_as_int(most))); /* not negative: bits rise with it */
}

/* A warp, a group of 16 rows: does some row's output feel what was left out? */
__device__ __forceinline__ bool group_feels(const apa_cuda_job &job, const Unit &unit, int group)
{
    const float most_value = largest_value(job, unit.head);
    bool feels = false;
    for (int r = group * 16; r < group * 16 + 16; r++) {
        const Row row = row_of(job, unit, r);
        const float part = row.first < row.end ? skipped_part(job, unit.local, r) : 0.0f;
        if (part == 0.0f)
            continue;
        const int64_t at =
            unit.head / job.Hkv * job.out.stride[0] + row.head * job.out.stride[1] + row.position * job.out.stride[2];
        float most = 0.0f;
        for (int c = threadIdx.x & 31; c < job.D; c += 32)
            most = fmaxf(most, fabsf(element(job.out, at + c)));
        most = __int_as_float(__reduce_max_sync(0xffffffffu, __float_as_int(most)));
        feels = feels || !(SKIP_MARGIN * part * most_value <= SKIP_LIMIT * most);
    }
    return feels;
}

__device__ __forceinline__ bool sees_tile(int first, int end, int tile)
{
    const int key = tile * APA_CUDA_TILE;
    return first < min(end, key + APA_CUDA_TILE) && end > key;
}

/* Rows of a group that see a tile. */
__device__ __forceinline__ int rows_that_see(const int *row_first, const int *row_end, int group, int tile)
{
    int n = 0;
    for (int r = group * 16; r < group * 16 + 16; r++)
        n += sees_tile(row_first[r], row_end[r], tile);
    return n;
}

__device__ __forceinline__ void show_skipped(const apa_cuda_job &job, const Unit &unit, int group, int tile)
{
    for (int r = group * 16; r < group * 16 + 16; r++) {
        const Row row = row_of(job, unit, r);
        if (sees_tile(row.first, row.end, tile))
            job.verdicts[((static_cast<int64_t>(unit.head / job.Hkv) * job.Hq + row.head) * job.Sq + row.position) *
                             job.tiles +
                         tile] = APA_VERDICT_SKIPPED;
    }
}

static __global__ void __launch_bounds__(RECHECK_THREADS) recheck_kernel(const __grid_constant__ apa_cuda_job job)
{
    __shared__ int row_first[APA_CUDA_UNIT], row_end[APA_CUDA_UNIT];
    __shared__ int wants[APA_CUDA_UNIT_GROUPS]; /* its tiles back */
    __shared__ unsigned long long counted;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Unit unit = unit_at(job, blockIdx.x);
    const TileRange tiles = tile_range(job, unit, 1);
    const uint8_t *throughout = job.all_hot + unit.local * APA_CUDA_UNIT_GROUPS;
    const uint8_t *kinds = job.candidate + unit.local * APA_CUDA_UNIT_GROUPS * job.tiles;
    if (threadIdx.x < APA_CUDA_UNIT) {
        const Row row = row_of(job, unit, static_cast<int>(threadIdx.x));
        row_first[threadIdx.x] = row.first;
        row_end[threadIdx.x] = row.end;
    }
    if (threadIdx.x == 0)
        counted = 0;
    const bool feels = throughout[warp] == 0 && group_feels(job, unit, warp);
    if (lane == 0)
        wants[warp] = feels;
    __syncthreads();

    unsigned long long skipped = 0;
    uint32_t back = 0; /* groups that want tiles */
    for (int g = 0; g < APA_CUDA_UNIT_GROUPS; g++)
        back |= wants[g] != 0 ? 1u << g : 0;
    for (int tile = tiles.first + static_cast<int>(threadIdx.x); tile < tiles.end; tile += RECHECK_THREADS)
        for (int g = 0; g < APA_CUDA_UNIT_GROUPS; g++) {
            if (kinds[g * job.tiles + tile] != APA_CUDA_SKIPPED_TILE || throughout[g] != 0 || (back >> g & 1) != 0)
                continue;
            skipped += rows_that_see(row_first, row_end, g, tile);
            if (job.verdicts != nullptr)
                show_skipped(job, unit, g, tile);
        }
    atomicAdd(&counted, skipped);

    /* tiles in rising order, by one warp: this is rare */
    int length = 0;
    for (int base = tiles.first; warp == 0 && back != 0 && base < tiles.end; base += 32) {
        const int tile = base + lane;
        uint32_t mask = 0;
        for (int g = 0; tile < tiles.end && g < APA_CUDA_UNIT_GROUPS; g++)
            if ((back >> g & 1) != 0 && kinds[g * job.tiles + tile] == APA_CUDA_SKIPPED_TILE &&
                rows_that_see(row_first, row_end, g, tile) > 0)
                mask |= 1u << g;
        const uint32_t ballot = __ballot_sync(0xffffffffu, mask != 0);
        if (mask != 0) {
            const int64_t at = unit.local * job.tiles + length + __popc(ballot & ((1u << lane) - 1));
            job.fix_tile[at] = tile;
            job.fix_mask[at] = static_cast<uint16_t>(mask);
        }
        length += __popc(ballot);
    }
    if (threadIdx.x == 0)
        job.list_count[unit.local * 2 + 1] = length;
    __syncthreads();
    if (threadIdx.x == 0 && job.counts != nullptr)
        atomicAdd(&job.counts[APA_CUDA_SKIPPED], counted);
}

extern "C" int apa_cuda_launch_recheck(const apa_cuda_job *job, void *stream)
{
    recheck_kernel<<<static_cast<unsigned>(job->unit_count), RECHECK_THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
        *job);
    return cudaGetLastError();
}
