/* Prep on Hopper: biases of keys (bias.cuh) for pairs of tiles that an earlier call has made: a bias hangs on the
 * queries, so every call makes it for all keys. With new pairs it is made where they are (pairs.cu). */
#include "cuda/wgmma/bias.cuh"

constexpr int BIAS_PAIRS = 8; /* a block */

template <int D, bool BF16>
static __global__ void __launch_bounds__(PairTurns<D>::THREADS, 2 * 128 / D)
    wgmma_bias_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    using S = PairTurns<D>;
    chain_go();
    __shared__ __align__(16) BiasShared<D> shared;
    const int pairs = job.first_tile / 2, runs = (pairs + BIAS_PAIRS - 1) / BIAS_PAIRS;
    const int run = blockIdx.x % runs, head = blockIdx.x / runs;
    const int lane = threadIdx.x % S::LANES, r = threadIdx.x / S::LANES;
    clear_digits<D>(shared);
    chain_wait();
    float k_mean[8];
    load_mean_8(k_mean, job.k_mean + static_cast<int64_t>(head) * D + lane * 8);
    share_means<D, BF16>(shared, job, head, k_mean);
#pragma unroll 1
    for (int number = run * BIAS_PAIRS; number < min(pairs, (run + 1) * BIAS_PAIRS); number++) {
        const int64_t first = static_cast<int64_t>(number) * PAIR_KEYS + r,
                      place = static_cast<int64_t>(head) * ((job.room + 1) / 2) + number;
        const uint16_t *from = row_pointer<uint16_t>(job.k, head / job.Hkv, head % job.Hkv, first) + lane * 8;
        uint4 k[S::TURNS];
#pragma unroll
        for (int turn = 0; turn < S::TURNS; turn++) {
            k[turn] = make_uint4(0, 0, 0, 0);
            if (first + turn * S::ROWS < job.Skv)
                k[turn] = *reinterpret_cast<const uint4 *>(from + turn * S::ROWS * job.k.stride[2]);
        }
        const float k_scale = *reinterpret_cast<const float *>(job.blob + place * Pair<D>::BYTES + Pair<D>::META);
        __syncthreads(); /* the digits before have been copied */
        write_digits<D, BF16>(shared, k, job.G, 1.0f / k_scale);
        __syncthreads();
        uint8_t *to = job.key_bias + (static_cast<int64_t>(head) * ((job.tiles + 1) / 2) + number) * BIAS_BYTES;
        if (threadIdx.x < BIAS_BYTES / 16)
            reinterpret_cast<uint4 *>(to)[threadIdx.x] = reinterpret_cast<const uint4 *>(shared.digits)[threadIdx.x];
        static_assert(S::THREADS >= BIAS_BYTES / 16, "a thread 16 bytes");
    }
#endif
}

template <int D, bool BF16> static int launch(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    const int64_t heads = static_cast<int64_t>(job->B) * job->Hkv, pairs = job->first_tile / 2;
    const int64_t runs = (pairs + BIAS_PAIRS - 1) / BIAS_PAIRS;
    if (runs == 0)
        return cudaSuccess;
    return launch_chained(chained, wgmma_bias_kernel<D, BF16>, heads * runs, PairTurns<D>::THREADS, 0, stream, *job);
}

extern "C" int apa_wgmma_launch_bias(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    return job->bf16 ? launch<128, true>(job, chained, stream) : launch<128, false>(job, chained, stream);
}
