/* Prep on Hopper: what the mean of a query head adds to the scores of each key, q̄·(k - k̄), where `smooth_q` took it off
 * the queries. Sums of scores begin there (tile_e4m3.cuh), so it costs pass 1 a few loads.
 *
 * A block takes a pair of tiles and 16 query heads of its KV head, as warp-level products of q̄ (16 bits, as
 * query_mean.cu rounds it) with the keys as they were given; q̄·k̄ comes off in FP32. Which channels a step of the
 * product sums up is free as long as both operands agree: step 2j + half of lane t of a quad takes 4·half … 4·half + 3
 * of the eight channels from 8·(t + 4j) on, so that a key's part is one load of 16 bytes.
 *
 * It hangs on the queries, so it is made for all keys in every call, kept ones too. */
#include "cuda/wgmma/prep.cuh"

constexpr int BIAS_THREADS = 256, BIAS_WARP_BLOCKS = PAIR_KEYS / 8 / (BIAS_THREADS / 32), MMA_HEADS = 16;

#ifdef APA_CUDA_BULK

/* Two neighbouring channels of q̄, as they were rounded. */
template <bool BF16> __device__ __forceinline__ uint32_t mean_pair(const float *from)
{
    const float2 two = *reinterpret_cast<const float2 *>(from);
    return pack_16<BF16>(two.x, two.y);
}

/* A operands of 16 heads, rows beyond `heads` zero; what to subtract from rows g and g + 8. */
template <int D, bool BF16>
__device__ __forceinline__ void load_means(uint32_t (&a)[D / 16][4], float (&minus)[2], const float *q_mean,
                                           const float *k_mean, int heads)
{
    const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const bool there = g + 8 * h < heads;
        const float *row = q_mean + (there ? g + 8 * h : 0) * D;
        minus[h] = 0.0f;
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            const int channel = 8 * (t + step / 2 * 4) + 4 * (step % 2);
#pragma unroll
            for (int part = 0; part < 2; part++) {
                a[step][2 * part + h] = there ? mean_pair<BF16>(row + channel + 2 * part) : 0u;
                minus[h] = fmaf(row[channel + 2 * part], k_mean[channel + 2 * part], minus[h]);
                minus[h] = fmaf(row[channel + 2 * part + 1], k_mean[channel + 2 * part + 1], minus[h]);
            }
        }
        minus[h] += __shfl_xor_sync(0xffffffffu, minus[h], 1);
        minus[h] += __shfl_xor_sync(0xffffffffu, minus[h], 2);
    }
}

__device__ __forceinline__ uint32_t bias_pair(float first, float second)
{ /* groups whose scores come near to what FP16 holds are computed exactly */
    return pack_16<false>(fminf(fmaxf(first, -60000.0f), 60000.0f), fminf(fmaxf(second, -60000.0f), 60000.0f));
}

#endif

template <int D, bool BF16>
static __global__ void __launch_bounds__(BIAS_THREADS) wgmma_bias_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    chain_go();
    const int pairs = (job.tiles + 1) / 2, parts = (job.G + MMA_HEADS - 1) / MMA_HEADS;
    const int part = blockIdx.x % parts, number = blockIdx.x / parts % pairs, head = blockIdx.x / parts / pairs;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane & 3;
    const int left =
        static_cast<int>(min(static_cast<int64_t>(PAIR_KEYS), job.Skv - static_cast<int64_t>(number) * PAIR_KEYS));
    const uint16_t *keys =
        row_pointer<uint16_t>(job.k, head / job.Hkv, head % job.Hkv, static_cast<int64_t>(number) * PAIR_KEYS) + 8 * t;
    uint4 k[BIAS_WARP_BLOCKS][D / 32];
#pragma unroll
    for (int i = 0; i < BIAS_WARP_BLOCKS; i++) {
        const int key = (warp * BIAS_WARP_BLOCKS + i) * 8 + g;
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            k[i][j] = make_uint4(0, 0, 0, 0);
            if (key < left)
                k[i][j] = *reinterpret_cast<const uint4 *>(keys + key * job.k.stride[2] + 32 * j);
        }
    }
    chain_wait();
    const int first_head = part * MMA_HEADS, heads = min(job.G - first_head, MMA_HEADS);
    const int64_t row = static_cast<int64_t>(head / job.Hkv) * job.Hq + head % job.Hkv * job.G + first_head;
    uint32_t a[D / 16][4];
    float minus[2];
    load_means<D, BF16>(a, minus, job.q_mean + row * D, job.k_mean + static_cast<int64_t>(head) * D, heads);
    const int64_t place = static_cast<int64_t>(head) * ((job.room + 1) / 2) + number;
    const float k_scale = *reinterpret_cast<const float *>(job.blob + place * Pair<D>::BYTES + Pair<D>::META);
    const float change = static_cast<float>(score_unit(job).change);
    uint16_t *to = job.key_bias + ((static_cast<int64_t>(head) * pairs + number) * job.G + first_head) * PAIR_KEYS;
#pragma unroll
    for (int i = 0; i < BIAS_WARP_BLOCKS; i++) {
        float sum[4] = {};
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            const uint4 &x = k[i][step / 2];
            mma_16<BF16>(sum, a[step], step % 2 == 0 ? x.x : x.z, step % 2 == 0 ? x.y : x.w);
        }
        const int key = (warp * BIAS_WARP_BLOCKS + i) * 8 + 2 * t;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (g + 8 * h >= heads)
                continue;
            const float factor = change / (job.q_head_scale[row + g + 8 * h] * k_scale);
            *reinterpret_cast<uint32_t *>(to + (g + 8 * h) * PAIR_KEYS + place_of_bias(key)) =
                bias_pair((sum[2 * h] - minus[h]) * factor, (sum[2 * h + 1] - minus[h]) * factor);
        }
    }
#endif
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    const int64_t heads = static_cast<int64_t>(job->B) * job->Hkv, pairs = (job->tiles + 1) / 2,
                  parts = (job->G + MMA_HEADS - 1) / MMA_HEADS;
    return launch_chained(chained, wgmma_bias_kernel<D, BF16>, heads * pairs * parts, BIAS_THREADS, 0, stream, *job);
}

int apa_wgmma_launch_bias(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    if (job->D == 64)
        return job->bf16 ? launch<64, true>(job, chained, stream) : launch<64, false>(job, chained, stream);
    return job->bf16 ? launch<128, true>(job, chained, stream) : launch<128, false>(job, chained, stream);
}
