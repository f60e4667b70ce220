/* Skipped tiles of pass 1: a tile's exponentials and P·V are left out where all that its keys could add is lost in
 * FP32.
 *
 * A row's keys in a tile have at most the mass
 *     64·2^(top + error),   error = reach·k_scale,   reach = q_scale·(127.5·D/2 + |q codes|·√D/2)
 * top the largest quantised score, k_scale the tile's largest scale: a quantised score is off by at most half a step of
 * one factor times the norm of the other, both ways, and |k| <= 127.5·k_scale·√D. λ is an estimate too, and its largest
 * terms may come from exact tiles in the end: it is at least 2^-(reach·k_scale of the head) of what it looks like. The
 * tile is skipped by a warp when for every row the bounds of all tiles that the row has skipped, this one too, come to
 * at most SKIP_LIMIT of λ so far: half a unit in the last place of a sum in FP32 is at least as much. skipped.cu asks
 * the same of the outputs when they are known, and brings tiles back where they are small against the values left out.
 *
 * What a row has skipped lies in shared memory as log2 of a mass, which needs no frame: registers are scarce. */
#ifndef APA_CUDA_SKIP_CUH
#define APA_CUDA_SKIP_CUH

#include "cuda/warp_mma/tile_8.cuh"

constexpr float SKIP_LIMIT = 0x1p-25f;
constexpr float SKIP_MARGIN = 1.01f; /* for the roundings of scales, exponents and the sum itself */

/* What a warp needs of its rows. */
struct Skipping {
    float factor; /* the largest reach of its rows over their q_scale */
    float head;   /* largest key scale of the head */
    uint32_t real;
};

/* log2 of what each row of the block has skipped at most. */
__device__ __forceinline__ float *skipped_of_rows()
{
    __shared__ float skipped[APA_CUDA_UNIT];
    return skipped;
}

/* q: the lane's first 16 bytes of the warp's first group: words 0 and 2 are of row g, 1 and 3 of row g + 8. */
template <typename T, int MT>
__device__ __forceinline__ Skipping start_skipping(uint32_t q, int first_row, uint32_t real, float k_scale_max)
{
    const int lane = threadIdx.x & 31;
    int most = 0;
#pragma unroll 1
    for (int mt = 0; mt < MT; mt++) {
        int squares[2] = {0, 0};
        for (int step = 0; step < T::D / 32; step++) {
            uint32_t word[4];
            load_shared_16(word, q + mt * T::Q_BYTES + step * 512);
            for (int i = 0; i < 4; i++)
                squares[i & 1] = __dp4a(static_cast<int>(word[i]), static_cast<int>(word[i]), squares[i & 1]);
        }
        for (int h = 0; h < 2; h++) {
            squares[h] += __shfl_xor_sync(0xffffffffu, squares[h], 1);
            squares[h] += __shfl_xor_sync(0xffffffffu, squares[h], 2);
            most = max(most, squares[h]);
        }
    }
    most = __reduce_max_sync(0xffffffffu, most);
    for (int r = lane; r < 16 * MT; r += 32)
        skipped_of_rows()[first_row + r] = -CUDART_INF_F;
    __syncwarp();
    const float D = static_cast<float>(T::D);
    /* 1: what the start of integer sums at MAGIC costs */
    const float steps = 63.75f * D + 0.5f * sqrtf(D * static_cast<float>(most)) + 1.0f;
    const Skipping skipping = {SKIP_MARGIN * steps, k_scale_max, real};
    return skipping;
}

/* May the warp leave the tile out? If so its rows' bounds have been added to what they have skipped. k_scale: shared
 * memory, the tile's four scales. */
template <int MT>
__device__ __forceinline__ bool skips_tile(const Skipping &skipping, int first_row, const float (&q_scale)[2 * MT],
                                           uint32_t k_scale, const float (&top)[2 * MT], const float (&frame)[2 * MT],
                                           const float (&lambda)[2 * MT])
{
    const float4 k = load_shared_float4(k_scale);
    const float reach = skipping.factor * (fmaxf(fmaxf(k.x, k.y), fmaxf(k.z, k.w)) + skipping.head);
    float bound[2 * MT];
    bool within = true;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        bound[r] = exp2_fast(fmaf(q_scale[r], reach, top[r] - frame[r]) + 6.0f);
        within = within && ((skipping.real >> r & 1) == 0 || bound[r] <= SKIP_LIMIT * lambda[r]);
    }
    if (!__all_sync(0xffffffffu, within)) /* nearly always, where little can be skipped */
        return false;
    float *skipped = skipped_of_rows() + first_row + ((threadIdx.x & 31) >> 2);
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        const float before = skipped[r * 8];
        bound[r] = fmaf(bound[r], SKIP_MARGIN, before == -CUDART_INF_F ? 0.0f : exp2_fast(before - frame[r]));
        within = within && ((skipping.real >> r & 1) == 0 || bound[r] <= SKIP_LIMIT * lambda[r]);
    }
    if (!__all_sync(0xffffffffu, within))
        return false;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
        if ((threadIdx.x & 3) == 0 && (skipping.real >> r & 1) != 0)
            skipped[r * 8] = bound[r] == 0.0f ? -CUDART_INF_F : frame[r] + log2_fast(bound[r]);
    __syncwarp();
    return true;
}

/* Marks a tile of the warp's groups, which lie job.tiles apart. */
static __device__ __noinline__ void note_skipped(const apa_cuda_job &job, int64_t at, int groups)
{
    const int lane = threadIdx.x & 31;
    if (lane < groups)
        job.candidate[at + static_cast<int64_t>(lane) * job.tiles] = APA_CUDA_SKIPPED_TILE;
}

template <int MT> __device__ __forceinline__ void store_skipped(const apa_cuda_job &job, int64_t first, int first_row)
{
    for (int r = threadIdx.x & 31; r < 16 * MT; r += 32)
        job.part_skipped[first + r] = skipped_of_rows()[first_row + r];
}

#endif
