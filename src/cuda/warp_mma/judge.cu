/* Verdicts: the candidates of pass 1 against the complete λ, and the lists of what pass 2 has to do.
 *
 * A block a unit. A group's tile is hot if some row that sees it has mass > ε·λ there, or if the tile or a query of the
 * group is not finite or beyond INT8. Pass 2 gets two lists of tiles in rising order, each entry with a mask of groups:
 * tiles to be computed exactly, and tiles whose INT8 sums pass 1 guessed wrong (hot ones that it added, cold ones that
 * it held back). */
#include "cuda/warp_mma/tile_16.cuh"

constexpr int JUDGE_THREADS = 256;

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

/* Place of each thread's entry in a list that grows by one block of threads at a time; *length goes on. */
__device__ __forceinline__ int place_in_list(bool has_entry, int *length, int *in_warp)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t ballot = __ballot_sync(0xffffffffu, has_entry);
    if (lane == 0)
        in_warp[warp] = __popc(ballot);
    __syncthreads();
    int before = *length, all = 0;
    for (int w = 0; w < JUDGE_THREADS / 32; w++) {
        before += w < warp ? in_warp[w] : 0;
        all += in_warp[w];
    }
    __syncthreads();
    if (threadIdx.x == 0)
        *length += all;
    __syncthreads();
    return before + __popc(ballot & ((1u << lane) - 1));
}

static __global__ void __launch_bounds__(JUDGE_THREADS) judge_kernel(const __grid_constant__ apa_cuda_job job)
{
    __shared__ float log2_least[APA_CUDA_UNIT]; /* a tile is hot above it */
    __shared__ int row_first[APA_CUDA_UNIT], row_end[APA_CUDA_UNIT];
    __shared__ GroupView any[APA_CUDA_UNIT_GROUPS],
        every[APA_CUDA_UNIT_GROUPS]; /* keys that some row, that every row sees */
    __shared__ int rows_seeing[APA_CUDA_UNIT_GROUPS];
    __shared__ int hot_length, fix_length, in_warp[JUDGE_THREADS / 32];
    __shared__ unsigned long long counted[APA_CUDA_COUNTS];
    Unit unit;
    unit.local = blockIdx.x;
    unit.index = unit.local + job.unit_first;
    unit.head = static_cast<int>(unit.index / job.units);
    unit.number = static_cast<int>(unit.index % job.units);
    unit.split = 0;
    const TileRange tiles = tile_range(job, unit, 1);
    Row row = {};
    if (threadIdx.x < APA_CUDA_UNIT) {
        row = row_of(job, unit, threadIdx.x);
        row_first[threadIdx.x] = row.first;
        row_end[threadIdx.x] = row.end;
        /* padding has no say, nor has a row that sees nothing */
        log2_least[threadIdx.x] =
            row.first < row.end ? log2_lambda(job, unit.local, threadIdx.x) + job.log2_eps : CUDART_INF_F;
    }
    if (threadIdx.x < APA_CUDA_COUNTS)
        counted[threadIdx.x] = 0;
    if (threadIdx.x == 0)
        hot_length = fix_length = 0;
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
    unsigned long long hot_rows = 0, candidate_rows = 0;

    for (int base = tiles.first; base < tiles.end; base += JUDGE_THREADS) {
        const int tile = base + threadIdx.x, key = tile * APA_CUDA_TILE;
        const bool there = tile < tiles.end, bad = there && poisoned[tile] != 0;
        uint32_t hot = 0, fix = 0, kind[APA_CUDA_UNIT_GROUPS];
#pragma unroll
        for (int g = 0; g < APA_CUDA_UNIT_GROUPS; g++)
            kind[g] = there ? job.candidate[(unit.local * APA_CUDA_UNIT_GROUPS + g) * job.tiles + tile] : 0;
#pragma unroll
        for (int g = 0; g < APA_CUDA_UNIT_GROUPS; g++) {
            kind[g] &= 3; /* a skipped tile is no candidate */
            if (!there || any[g].first >= key + APA_CUDA_TILE || any[g].end <= key)
                continue;
            const bool forced = bad || throughout[g] != 0;
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
                hot_rows += is_hot ? n : 0;
                candidate_rows += n;
            }
        }
        const int at = place_in_list(hot != 0, &hot_length, in_warp);
        if (hot != 0) {
            job.hot_tile[unit.local * job.tiles + at] = tile;
            job.hot_mask[unit.local * job.tiles + at] = static_cast<uint8_t>(hot);
        }
        const int fix_at = place_in_list(fix != 0, &fix_length, in_warp);
        if (fix != 0) {
            job.fix_tile[unit.local * job.tiles + fix_at] = tile;
            job.fix_mask[unit.local * job.tiles + fix_at] = static_cast<uint16_t>(fix | (fix & hot) << 8);
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
        job.list_count[unit.local * 2] = hot_length;
        job.list_count[unit.local * 2 + 1] = fix_length;
    }
    if (job.counts == nullptr)
        return;
    const unsigned long long visible =
        row.first < row.end ? (row.end - 1) / APA_CUDA_TILE - row.first / APA_CUDA_TILE + 1 : 0;
    atomicAdd(&counted[APA_CUDA_VISIBLE], visible);
    atomicAdd(&counted[APA_CUDA_HOT], hot_rows);
    atomicAdd(&counted[APA_CUDA_CANDIDATES], candidate_rows);
    __syncthreads();
    if (threadIdx.x < APA_CUDA_COUNTS)
        atomicAdd(&job.counts[threadIdx.x], counted[threadIdx.x]);
}

extern "C" int apa_cuda_launch_judge(const apa_cuda_job *job, void *stream)
{
    judge_kernel<<<static_cast<unsigned>(job->unit_count), JUDGE_THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*job);
    return cudaGetLastError();
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
    all_hot_kernel<<<static_cast<unsigned>(job->Sq), 128, 0, static_cast<cudaStream_t>(stream)>>>(*job);
    return cudaGetLastError();
}
