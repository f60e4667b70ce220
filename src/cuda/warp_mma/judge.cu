/* Verdicts: the candidates of pass 1 against the complete λ, and the lists of what pass 2 has to do.
 *
 * A block a unit. A group's tile is hot if some row that sees it has mass > ε·λ there, or if the tile or a query of the
 * group is not finite or beyond INT8. Pass 2 gets two lists of tiles in rising order, each entry with a mask of groups:
 * tiles to be computed exactly, and tiles whose INT8 sums pass 1 guessed wrong (hot ones that it added, cold ones that
 * it held back). */
#include "cuda/chain.cuh"
#include "cuda/warp_mma/tile_16.cuh"

/* Threads of a block: as many as there are tiles, so that a long list is few steps of waiting. */
constexpr int JUDGE_LEAST = 256, JUDGE_MOST = 1024, JUDGE_WARPS = JUDGE_MOST / 32;

struct GroupView {
    int first, end; /* keys that some row sees */
};

/* log2 λ of a row over all splits; -inf where nothing was seen. */
__device__ __forceinline__ float log2_lambda(const apa_cuda_job &job, int64_t unit_local, int r)
{
    float frame = -CUDART_INF_F, sum = 0.0f;
    for (int split = 0; split < job.splits; split++) {
        const int64_t at = (split * job.unit_count + unit_local) * APA_CUDA_UNIT + r;
        frame = fmaxf(frame, job.part_frame[at]);
    }
    if (frame == -CUDART_INF_F)
        return frame;
    for (int split = 0; split < job.splits; split++) {
        const int64_t at = (split * job.unit_count + unit_local) * APA_CUDA_UNIT + r;
        sum += job.part_lambda[at] * exp2f(job.part_frame[at] - frame);
    }
    return frame + log2f(sum);
}

/* Two lists that grow by one block of threads at a time: entries so far, the same in every thread. */
struct Lengths {
    int hot, fix;
};

/* Places of each thread's entries. `in_warp` has room for JUDGE_WARPS; two calls in line take different room, so one
 * barrier is enough. */
__device__ __forceinline__ Lengths places_in_lists(bool is_hot, bool is_fix, Lengths &length, uint32_t *in_warp)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const uint32_t hot = __ballot_sync(0xffffffffu, is_hot), fix = __ballot_sync(0xffffffffu, is_fix);
    if (lane == 0)
        in_warp[warp] = static_cast<uint32_t>(__popc(hot) | __popc(fix) << 16);
    __syncthreads();
    const uint32_t own = lane < warps ? in_warp[lane] : 0u;
    const uint32_t all = __reduce_add_sync(0xffffffffu, own),
                   before = __reduce_add_sync(0xffffffffu, lane < warp ? own : 0u);
    const uint32_t lower = (1u << lane) - 1;
    const Lengths at = {length.hot + static_cast<int>(before & 0xffff) + __popc(hot & lower),
                        length.fix + static_cast<int>(before >> 16) + __popc(fix & lower)};
    length.hot += static_cast<int>(all & 0xffff);
    length.fix += static_cast<int>(all >> 16);
    return at;
}

/* A number of every thread onto a block's counter. */
__device__ __forceinline__ void count(unsigned long long *to, uint32_t own)
{
    const uint32_t all = __reduce_add_sync(0xffffffffu, own); /* of a warp: below 2^30, at 2^31 keys */
    if ((threadIdx.x & 31) == 0 && all > 0)
        atomicAdd(to, static_cast<unsigned long long>(all));
}

static __global__ void __launch_bounds__(JUDGE_MOST) judge_kernel(const __grid_constant__ apa_cuda_job job)
{
    __shared__ float log2_least[APA_CUDA_UNIT]; /* a tile is hot above it */
    __shared__ int row_first[APA_CUDA_UNIT], row_end[APA_CUDA_UNIT];
    __shared__ GroupView any[APA_CUDA_UNIT_GROUPS],
        every[APA_CUDA_UNIT_GROUPS]; /* keys that some row, that every row sees */
    __shared__ int rows_seeing[APA_CUDA_UNIT_GROUPS];
    __shared__ uint32_t in_warp[2][JUDGE_WARPS];
    __shared__ unsigned long long counted[APA_CUDA_COUNTS];
    chain_go();
    const Unit unit = unit_at(job, blockIdx.x);
    const bool early = is_early(job, unit); /* computed exactly elsewhere: nothing to list, all of it is hot */
    chain_wait();
    if (early && job.counts == nullptr && job.verdicts == nullptr) {
        if (threadIdx.x < 2)
            job.list_count[unit.local * 2 + threadIdx.x] = 0;
        return;
    }
    const TileRange tiles = tile_range(job, unit, 1);
    Row row = {};
    if (threadIdx.x < APA_CUDA_UNIT) {
        row = row_of(job, unit, threadIdx.x);
        row_first[threadIdx.x] = row.first;
        row_end[threadIdx.x] = row.end;
        int seen = tiles_seen(row.first, row.end); /* by a row of the group */
#pragma unroll
        for (int m = 1; m < APA_CUDA_GROUP; m *= 2)
            seen = max(seen, __shfl_xor_sync(0xffffffffu, seen, m));
        /* padding has no say, nor has a row that sees nothing */
        log2_least[threadIdx.x] = row.first < row.end && !early
                                      ? log2_lambda(job, unit.local, threadIdx.x) + group_log2_eps(job, seen)
                                      : CUDART_INF_F;
    }
    if (threadIdx.x < APA_CUDA_COUNTS)
        counted[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x < APA_CUDA_UNIT_GROUPS) {
        GroupView some = {0x7fffffff, 0}, all = {0, 0x7fffffff};
        int n = 0;
        for (int r = threadIdx.x * 16; r < static_cast<int>(threadIdx.x + 1) * 16; r++)
            if (row_first[r] < row_end[r]) {
                n++;
                some.first = min(some.first, row_first[r]);
                some.end = max(some.end, row_end[r]);
                all.first = max(all.first, row_first[r]);
                all.end = min(all.end, row_end[r]);
            }
        any[threadIdx.x] = some;
        every[threadIdx.x] = all;
        rows_seeing[threadIdx.x] = n;
    }
    __syncthreads();
    const uint8_t *poisoned = job.poisoned + static_cast<int64_t>(unit.head) * job.room;
    const uint8_t *throughout = job.all_hot + unit.local * APA_CUDA_UNIT_GROUPS;
    uint32_t hot_rows = 0, candidate_rows = 0;
    Lengths length = {0, 0};

    for (int base = tiles.first, turn = 0; base < tiles.end; base += static_cast<int>(blockDim.x), turn ^= 1) {
        const int tile = base + threadIdx.x, key = tile * APA_CUDA_TILE;
        const bool there = tile < tiles.end, bad = there && poisoned[tile] != 0;
        uint32_t hot = 0, fix = 0, kind[APA_CUDA_UNIT_GROUPS];
#pragma unroll
        for (int g = 0; g < APA_CUDA_UNIT_GROUPS; g++)
            kind[g] = there && !early ? job.candidate[(unit.local * APA_CUDA_UNIT_GROUPS + g) * job.tiles + tile] : 0;
#pragma unroll
        for (int g = 0; g < APA_CUDA_UNIT_GROUPS; g++) {
            kind[g] &= 3; /* a skipped tile is no candidate */
            if (!there || any[g].first >= key + APA_CUDA_TILE || any[g].end <= key)
                continue;
            const bool forced = bad || early || throughout[g] != 0;
            bool is_hot = forced || (!job.second_look && kind[g] != 0);
            if (!is_hot && kind[g] != 0) {
                const float4 *mass = reinterpret_cast<const float4 *>(
                    job.mass + ((unit.local * APA_CUDA_UNIT_GROUPS + g) * job.tiles + tile) * 16);
#pragma unroll
                for (int i = 0; i < 4; i++) { /* rows that do not see the tile have mass 0: -inf here */
                    const float4 m = mass[i];
                    const float *least = log2_least + g * 16 + i * 4;
                    is_hot = is_hot || m.x > least[0] || m.y > least[1] || m.z > least[2] || m.w > least[3];
                }
            }
            hot |= is_hot ? 1u << g : 0;
            if (!forced && kind[g] == (is_hot ? APA_CUDA_CANDIDATE_ADDED : APA_CUDA_CANDIDATE_HELD))
                fix |= 1u << g;
            if (is_hot || kind[g] != 0) {
                int n = rows_seeing[g];
                if (every[g].first > key || every[g].end < key + APA_CUDA_TILE) {
                    n = 0;
                    for (int r = g * 16; r < (g + 1) * 16; r++)
                        n += row_first[r] < min(row_end[r], key + APA_CUDA_TILE) && row_end[r] > key;
                }
                hot_rows += static_cast<uint32_t>(is_hot ? n : 0);
                candidate_rows += static_cast<uint32_t>(n);
            }
        }
        const Lengths at = places_in_lists(hot != 0, fix != 0, length, in_warp[turn]);
        if (hot != 0) {
            job.hot_tile[unit.local * job.tiles + at.hot] = tile;
            job.hot_mask[unit.local * job.tiles + at.hot] = static_cast<uint8_t>(hot);
        }
        if (fix != 0) {
            job.fix_tile[unit.local * job.tiles + at.fix] = tile;
            job.fix_mask[unit.local * job.tiles + at.fix] = static_cast<uint16_t>(fix | (fix & hot) << 8);
        }
        if (there && job.verdicts != nullptr)
            for (int r = 0; r < APA_CUDA_UNIT; r++) {
                const Row at_row = row_of(job, unit, r);
                if (at_row.first < min(at_row.end, key + APA_CUDA_TILE) && at_row.end > key)
                    job.verdicts[((static_cast<int64_t>(unit.head / job.Hkv) * job.Hq + at_row.head) * job.Sq +
                                  at_row.position) *
                                     job.tiles +
                                 tile] = hot >> (r / 16) & 1;
            }
    }
    if (threadIdx.x == 0) {
        job.list_count[unit.local * 2] = early ? 0 : length.hot;
        job.list_count[unit.local * 2 + 1] = length.fix;
    }
    if (job.counts == nullptr)
        return;
    const int visible = tiles_seen(row.first, row.end);
    count(&counted[APA_CUDA_VISIBLE], static_cast<uint32_t>(visible));
    count(&counted[APA_CUDA_HOT], hot_rows);
    count(&counted[APA_CUDA_CANDIDATES], candidate_rows);
    __syncthreads();
    if (threadIdx.x < APA_CUDA_COUNTS)
        atomicAdd(&job.counts[threadIdx.x], counted[threadIdx.x]);
}

extern "C" int apa_cuda_launch_judge(const apa_cuda_job *job, void *stream)
{
    const int threads = job->tiles > JUDGE_MOST / 2 ? JUDGE_MOST : JUDGE_LEAST;
    return launch_chained(job->chained, judge_kernel, job->unit_count, threads, 0, static_cast<cudaStream_t>(stream),
                          *job);
}

/* A block a position: what all heads see there. */
static __global__ void all_hot_kernel(const __grid_constant__ apa_cuda_job job)
{
    const int position = blockIdx.x;
    const int end = clamp_key(position + job.end_offset, job.Skv),
              first = min(clamp_key(position + job.first_offset, job.Skv), end);
    if (first >= end)
        return;
    const int tile_first = first / APA_CUDA_TILE, tile_end = (end - 1) / APA_CUDA_TILE + 1;
    const unsigned long long heads = static_cast<unsigned long long>(job.B) * job.Hq;
    if (threadIdx.x < APA_CUDA_COUNTS && job.counts != nullptr)
        atomicAdd(&job.counts[threadIdx.x], heads * (tile_end - tile_first));
    if (job.verdicts == nullptr)
        return;
    for (unsigned long long head = 0; head < heads; head++)
        for (int tile = tile_first + threadIdx.x; tile < tile_end; tile += blockDim.x)
            job.verdicts[(head * job.Sq + position) * job.tiles + tile] = 1;
}

extern "C" int apa_cuda_launch_all_hot(const apa_cuda_job *job, void *stream)
{
    if (job->Sq == 0)
        return cudaSuccess;
    return launch_chained(0, all_hot_kernel, job->Sq, 128, 0, static_cast<cudaStream_t>(stream), *job);
}
