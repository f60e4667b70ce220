/* Prep on Hopper: what the mean of a query head adds to the scores of each key, q̄·(k - k̄), where `smooth_q` took it off
 * the queries. Pass 1 adds it as one more step of the scores' products (tile_e4m3.cuh): three digits in E4M3, of weight
 * 256, 16 and 1, each of what the ones before it left, which is 12 bits of the whole.
 *
 * A block takes some pairs of tiles and the query heads of their KV head, eight at most, as warp-level products with
 * the keys as they were given. q̄ is FP32: its 16-bit rounding makes rows 0 … 7 of the product, what that leaves rows 8
 * … 15. q̄·k̄ comes off in FP32. Which channels a step of the product sums up is free as long as both operands agree:
 * step 2j + half of lane t of a quad takes 4·half … 4·half + 3 of the eight channels from 8·(t + 4j) on, so that a
 * key's part is one load of 16 bytes.
 *
 * A bias hangs on the queries, so it is made for all keys in every call, kept ones too. */
#include "cuda/wgmma/prep.cuh"

constexpr int BIAS_THREADS = 256, BIAS_PAIRS = 8;
constexpr int BIAS_STEPS = PAIR_KEYS / 8 / (BIAS_THREADS / 32); /* of eight keys, a warp and pair */

#ifdef APA_CUDA_BULK

/* A operands of the heads; what to subtract from head g's sums. */
template <int D, bool BF16>
__device__ __forceinline__ float load_means(uint32_t (&a)[D / 16][4], const float *q_mean, const float *k_mean,
                                            int heads)
{
    const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const bool there = g < heads;
    const float *row = q_mean + (there ? g : 0) * D;
    float minus = 0.0f;
#pragma unroll
    for (int step = 0; step < D / 16; step++)
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const int channel = 8 * (t + step / 2 * 4) + 4 * (step % 2) + 2 * part;
            const float2 x = *reinterpret_cast<const float2 *>(row + channel);
            const uint32_t high = pack_16<BF16>(x.x, x.y);
            const float2 rounded = widen_pair<BF16>(high);
            a[step][2 * part] = there ? high : 0u;
            a[step][2 * part + 1] = there ? pack_16<BF16>(x.x - rounded.x, x.y - rounded.y) : 0u;
            minus = fmaf(x.x, k_mean[channel], minus);
            minus = fmaf(x.y, k_mean[channel + 1], minus);
        }
    minus += __shfl_xor_sync(0xffffffffu, minus, 1);
    return minus + __shfl_xor_sync(0xffffffffu, minus, 2);
}

/* A digit of two biases: its codes; what is left of them stays. */
__device__ __forceinline__ uint32_t take_digit(float (&bias)[2], float weight)
{
    const uint32_t codes = pack_e4m3(bias[0] / weight, bias[1] / weight);
    const float2 value = unpack_e4m3(codes);
    bias[0] -= value.x * weight;
    bias[1] -= value.y * weight;
    return codes;
}

#endif

template <int D, bool BF16>
static __global__ void __launch_bounds__(BIAS_THREADS, 2) wgmma_bias_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    chain_go();
    __shared__ __align__(16) uint8_t digits[BIAS_BYTES];
    const int pairs = (job.tiles + 1) / 2, runs = (pairs + BIAS_PAIRS - 1) / BIAS_PAIRS;
    const int run = blockIdx.x % runs, head = blockIdx.x / runs;
    const int warp = threadIdx.x / 32, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const int64_t row = static_cast<int64_t>(head / job.Hkv) * job.Hq + head % job.Hkv * job.G;
    uint4 *const own = reinterpret_cast<uint4 *>(digits) + threadIdx.x;
    *own = make_uint4(0, 0, 0, 0); /* places of heads that there are not */
    static_assert(BIAS_BYTES == BIAS_THREADS * 16, "a thread 16 bytes");
    chain_wait();
    uint32_t a[D / 16][4];
    const float minus =
        load_means<D, BF16>(a, job.q_mean + row * D, job.k_mean + static_cast<int64_t>(head) * D, job.G);
    const float factor = static_cast<float>(score_unit(job).change) / job.q_head_scale[row + min(g, job.G - 1)];
#pragma unroll 1
    for (int number = run * BIAS_PAIRS; number < min(pairs, (run + 1) * BIAS_PAIRS); number++) {
        const int64_t first = static_cast<int64_t>(number) * PAIR_KEYS + warp * BIAS_STEPS * 8 + g,
                      place = static_cast<int64_t>(head) * ((job.room + 1) / 2) + number;
        const uint16_t *keys = row_pointer<uint16_t>(job.k, head / job.Hkv, head % job.Hkv, first) + 8 * t;
        uint4 k[BIAS_STEPS][D / 32];
#pragma unroll
        for (int i = 0; i < BIAS_STEPS; i++)
#pragma unroll
            for (int j = 0; j < D / 32; j++) {
                k[i][j] = make_uint4(0, 0, 0, 0);
                if (first + 8 * i < job.Skv)
                    k[i][j] = *reinterpret_cast<const uint4 *>(keys + 8 * i * job.k.stride[2] + 32 * j);
            }
        const float scale = /* finite: a bias of 0 stays one where the quotient overflows */
            fminf(factor / *reinterpret_cast<const float *>(job.blob + place * Pair<D>::BYTES + Pair<D>::META), 3e38f);
        __syncthreads(); /* the digits before have been copied */
#pragma unroll
        for (int i = 0; i < BIAS_STEPS; i++) {
            float sum[4] = {};
#pragma unroll
            for (int step = 0; step < D / 16; step++) {
                const uint4 &x = k[i][step / 2];
                mma_16<BF16>(sum, a[step], step % 2 == 0 ? x.x : x.z, step % 2 == 0 ? x.y : x.w);
            }
            if (g >= job.G)
                continue;
            float bias[2] = {(sum[0] + sum[2] - minus) * scale, (sum[1] + sum[3] - minus) * scale};
            const int key = (warp * BIAS_STEPS + i) * 8 + 2 * t;
#pragma unroll
            for (int digit = 0; digit < BIAS_DIGITS; digit++) {
                const uint32_t codes = take_digit(bias, digit == 0 ? 256.0f : digit == 1 ? 16.0f : 1.0f);
                digits[bias_place(key, BIAS_DIGITS * g + digit)] = static_cast<uint8_t>(codes);
                digits[bias_place(key + 1, BIAS_DIGITS * g + digit)] = static_cast<uint8_t>(codes >> 8);
            }
        }
        __syncthreads();
        uint8_t *to = job.key_bias + (static_cast<int64_t>(head) * pairs + number) * BIAS_BYTES;
        reinterpret_cast<uint4 *>(to)[threadIdx.x] = *own;
    }
#endif
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    const int64_t heads = static_cast<int64_t>(job->B) * job->Hkv, pairs = (job->tiles + 1) / 2;
    const int64_t runs = (pairs + BIAS_PAIRS - 1) / BIAS_PAIRS;
    return launch_chained(chained, wgmma_bias_kernel<D, BF16>, heads * runs, BIAS_THREADS, 0, stream, *job);
}

extern "C" int apa_wgmma_launch_bias(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    if (job->D == 64)
        return job->bf16 ? launch<64, true>(job, chained, stream) : launch<64, false>(job, chained, stream);
    return job->bf16 ? launch<128, true>(job, chained, stream) : launch<128, false>(job, chained, stream);
}
