/* Which row is which, what it sees, and where a thread block's work lies. */
#ifndef APA_CUDA_ROWS_CUH
#define APA_CUDA_ROWS_CUH

#include "cuda/order.h"

struct Row {
    int position, head; /* head: of all query heads */
    bool real;          /* not padding */
    int first, end;     /* visible keys */
};

/* A unit of one KV head. */
struct Unit {
    int64_t index; /* of all units */
    int64_t local; /* in the (batch) buffers */
    int head;      /* b·Hkv + KV head */
    int number;    /* within the KV head */
    int split;
};

__device__ __forceinline__ int clamp_key(int64_t key, int Skv)
{
    return static_cast<int>(key < 0 ? 0 : key > Skv ? Skv : key);
}

__device__ __forceinline__ Row row_of(const apa_cuda_job &job, const Unit &unit, int r)
{
    Row row;
    const int at = unit.number * APA_CUDA_UNIT + r;
    int in_group;
    if (job.packing_rows) {
        row.position = at / job.G;
        in_group = at % job.G;
    } else {
        row.position = at % job.Sq16;
        in_group = at / job.Sq16;
    }
    row.real = at < job.rows && row.position < job.Sq;
    row.head = unit.head % job.Hkv * job.G + (row.real ? in_group : 0);
    row.first = 0;
    row.end = 0;
    if (row.real) {
        row.end = clamp_key(row.position + job.end_offset, job.Skv);
        const int first = clamp_key(row.position + job.first_offset, job.Skv);
        row.first = first < row.end ? first : row.end;
    }
    return row;
}

/* Tiles between the first and the last key that a row sees. */
__device__ __forceinline__ int tiles_seen(int first, int end)
{
    return first < end ? (end - 1) / APA_CUDA_TILE - first / APA_CUDA_TILE + 1 : 0;
}

/* ε of a group whose rows see at most `tiles` tiles (apa_recipe_group_eps()). */
__device__ __forceinline__ float group_eps(const apa_cuda_job &job, int tiles)
{
    return job.eps_root > 0.0f && tiles > 0 ? fminf(job.eps_root * rsqrtf(static_cast<float>(tiles)), job.eps_most)
                                            : job.eps;
}

__device__ __forceinline__ float group_log2_eps(const apa_cuda_job &job, int tiles)
{
    return job.eps_root > 0.0f && tiles > 0 ? log2f(group_eps(job, tiles)) : job.log2_eps;
}

/* Piece of work `item` of unit_count·splits (order.h). */
__device__ __forceinline__ Unit unit_of(const apa_cuda_job &job, int64_t item, int splits)
{
    const apa_cuda_item from = apa_cuda_item_of(&job, item, splits);
    Unit unit;
    unit.index = from.index;
    unit.local = from.local;
    unit.head = from.head;
    unit.number = from.number;
    unit.split = from.split;
    return unit;
}

/* The unit at `local` in the batch's buffers, where blocks come in that order. */
__device__ __forceinline__ Unit unit_at(const apa_cuda_job &job, int64_t local, int split = 0)
{
    const int64_t index = local + job.unit_first;
    return {index, local, static_cast<int>(index / job.units), static_cast<int>(index % job.units), split};
}

/* Piece `item` of those that the exact kernel takes beside an adaptive call; number -1: there is none. */
__device__ __forceinline__ Unit early_unit_of(const apa_cuda_job &job, int64_t item)
{
    const apa_cuda_item from = apa_cuda_early_item(&job, item);
    const Unit unit = {from.index, from.local, from.head, from.number, from.split};
    return unit;
}

/* Does the unit go to the exact kernel alone (order.h)? */
__device__ __forceinline__ bool is_early(const apa_cuda_job &job, const Unit &unit)
{
    return apa_cuda_is_early(&job, unit.number * APA_CUDA_UNIT, APA_CUDA_UNIT) != 0;
}

template <typename T> __device__ __forceinline__ const T *row_pointer(const apa_cuda_tensor &x, int b, int h, int64_t s)
{
    return static_cast<const T *>(x.data) + b * x.stride[0] + h * x.stride[1] + s * x.stride[2];
}

/* Tiles that some row of the unit sees, cut to the unit's split. All threads of the block call it. */
struct TileRange {
    int first, end;
};

__device__ __forceinline__ TileRange tile_range(const apa_cuda_job &job, const Unit &unit, int splits)
{
    __shared__ int range[2];
    if (threadIdx.x == 0) {
        range[0] = job.tiles;
        range[1] = 0;
    }
    __syncthreads();
    if (threadIdx.x < APA_CUDA_UNIT) {
        const Row row = row_of(job, unit, static_cast<int>(threadIdx.x));
        if (row.first < row.end) {
            atomicMin(&range[0], row.first / APA_CUDA_TILE);
            atomicMax(&range[1], (row.end - 1) / APA_CUDA_TILE + 1);
        }
    }
    __syncthreads();
    TileRange tiles = {range[0], range[1]};
    if (splits > 1) {
        const int part = (job.tiles + splits - 1) / splits;
        tiles.first = max(tiles.first, unit.split * part);
        tiles.end = min(tiles.end, (unit.split + 1) * part);
    }
    if (tiles.end < tiles.first)
        tiles.end = tiles.first;
    return tiles;
}

#endif
