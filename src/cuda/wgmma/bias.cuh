/* Biases of keys: what the mean of a query head adds to the scores of each key, q̄·(k - k̄), where `smooth_q` took it
 * off the queries. Pass 1 adds it as one more step of the scores' products (tile_e4m3.cuh): three digits in E4M3, of
 * weight 256, 16 and 1, each of what the ones before it left. pairs.cu makes them with the pairs, bias.cu for pairs
 * that an earlier call has made; both from here, so that they are the same bits.
 *
 * Warp-level products with the keys as they were given and as they lie in registers: D / 8 lanes a key, eight channels
 * each. As a B operand a register pair of lane 4n + t is four rows of column n, so a column is 32 channels of a key (a
 * *block*), and the rows of A have to be as long: a row for each block of each head, q̄ rounded to 16 bits in rows 0 … 7
 * and what that leaves in rows 8 … 15. A lane's part of A is then eight channels of q̄, the same ones as of its key. Of
 * the sums those count whose row and column are of one block, and a key's are added up across lanes; q̄·k̄ comes off.
 *
 * Error of a bias: of the channels' sum of |q̄|·(|k| + |k̄|) under 2^-19 (bf16 2^-15), from q̄ in two terms (2^-22, or
 * 2^-25 as it stands where q̄ is under 2^-3; bf16 2^-16), two products in a row, and FP32 sums of four blocks; of the
 * bias itself 2^-12 from its digits, each of which leaves a 16th at most of what it was to hold, and 2^-21 from its
 * factor; or 2^-10 units, half a step of the last digit. */
#ifndef APA_CUDA_WGMMA_BIAS_CUH
#define APA_CUDA_WGMMA_BIAS_CUH

#include "cuda/wgmma/prep.cuh"

/* How the threads of a block share a pair's keys: LANES lanes a key, eight channels each, ROWS keys at a time. */
template <int D> struct PairTurns {
    static constexpr int THREADS = 4 * D, LANES = D / 8, ROWS = THREADS / LANES, TURNS = PAIR_KEYS / ROWS;
    static_assert(TURNS == 4, "rows whose sums over lanes are taken at once");
};

/* Query heads at a time, in products of PRODUCT_HEADS; a lane gets a bias each time. */
template <int D> struct BiasStep {
    static constexpr int HEADS = 4, PRODUCT_HEADS = 32 / PairTurns<D>::LANES;
};

/* What a block needs in shared memory. */
template <int D> struct BiasShared {
    uint8_t digits[BIAS_BYTES];
    uint4 means[BIAS_HEADS / BiasStep<D>::PRODUCT_HEADS][2][32]; /* A operands of two steps */
    float k_mean[D], minus[BIAS_HEADS], factor[BIAS_HEADS];
};

#ifdef APA_CUDA_BULK

/* Places of heads that there are not. */
template <int D> __device__ __forceinline__ void clear_digits(BiasShared<D> &to)
{
    constexpr int OWN = BIAS_BYTES / PairTurns<D>::THREADS / 8;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        reinterpret_cast<uint2 *>(to.digits)[i * PairTurns<D>::THREADS + threadIdx.x] = make_uint2(0, 0);
}

/* Means of the query heads of KV head `head` as operands, and what their biases need; a warp PRODUCT_HEADS of them.
 * k_mean: in the thread's channels. */
template <int D, bool BF16>
__device__ __forceinline__ void share_means(BiasShared<D> &to, const apa_cuda_job &job, int head,
                                            const float (&k_mean)[8])
{
    using S = PairTurns<D>;
    const int lane = threadIdx.x & 31, product = threadIdx.x / 32, part = lane % S::LANES,
              g = product * BiasStep<D>::PRODUCT_HEADS + lane / S::LANES;
    if (threadIdx.x >= S::THREADS - S::LANES) { /* of the last warp, which has no heads */
        float4 *own = reinterpret_cast<float4 *>(to.k_mean + part * 8);
        own[0] = make_float4(k_mean[0], k_mean[1], k_mean[2], k_mean[3]);
        own[1] = make_float4(k_mean[4], k_mean[5], k_mean[6], k_mean[7]);
    }
    if (product * BiasStep<D>::PRODUCT_HEADS >= job.G)
        return;
    const bool there = g < job.G;
    const int64_t row = static_cast<int64_t>(head / job.Hkv) * job.Hq + head % job.Hkv * job.G + (there ? g : 0);
    float minus = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 q = *reinterpret_cast<const float4 *>(job.q_mean + row * D + part * 8 + half * 4);
        const uint32_t first = pack_16<BF16>(q.x, q.y), second = pack_16<BF16>(q.z, q.w);
        const float2 of_first = widen_pair<BF16>(first), of_second = widen_pair<BF16>(second);
        to.means[product][half][lane] = there ? make_uint4(first, pack_16<BF16>(q.x - of_first.x, q.y - of_first.y),
                                                           second, pack_16<BF16>(q.z - of_second.x, q.w - of_second.y))
                                              : make_uint4(0, 0, 0, 0);
        minus = fmaf(q.x, k_mean[half * 4], minus);
        minus = fmaf(q.y, k_mean[half * 4 + 1], minus);
        minus = fmaf(q.z, k_mean[half * 4 + 2], minus);
        minus = fmaf(q.w, k_mean[half * 4 + 3], minus);
    }
#pragma unroll
    for (int m = 1; m < S::LANES; m *= 2)
        minus += __shfl_xor_sync(0xffffffffu, minus, m);
    if (part == 0 && there) {
        to.minus[g] = minus;
        /* what q was multiplied by, without a division in double: within 2^-23 */
        to.factor[g] = CODES_PER_OCTAVE * job.c / unit_of_score(job) / job.q_head_scale[row];
    }
}

/* A digit of a bias: its code; what is left of it stays. */
__device__ __forceinline__ uint8_t take_digit(float &bias, float weight)
{
    const uint32_t codes = pack_e4m3(bias * (1.0f / weight), 0.0f);
    bias -= unpack_e4m3(codes).x * weight;
    return static_cast<uint8_t>(codes);
}

/* Sums q̄·k of a product's heads in blocks: turn 2·upper + i in two[i], where `upper` is bit 0 of lanes whose bits 0 and
 * 3 are the same, and of one half of a key's blocks. */
template <int D, bool BF16>
__device__ __forceinline__ void multiply_means(float (&two)[2], const uint4 (&means)[2][32],
                                               const uint4 (&k)[PairTurns<D>::TURNS])
{
    const int lane = threadIdx.x & 31;
    const uint4 low = means[0][lane], high = means[1][lane];
    const uint32_t a[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
    float part[4];
#pragma unroll
    for (int turn = 0; turn < 4; turn++) {
        float sum[4] = {};
        mma_16<BF16>(sum, a[0], k[turn].x, k[turn].y);
        mma_16<BF16>(sum, a[1], k[turn].z, k[turn].w);
        part[turn] = (lane & 4) != 0 ? sum[1] + sum[3] : sum[0] + sum[2];
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        two[i] = fold(part[i], part[2 + i], 9);
}

/* Digits of the biases of the pair whose keys the block holds. `inverse`: of the pair's scale of K. */
template <int D, bool BF16>
__device__ __forceinline__ void write_digits(BiasShared<D> &to, const uint4 (&k)[PairTurns<D>::TURNS], int G,
                                             float inverse)
{
    static_assert(D == 128, "lanes as its products leave them");
    using S = PairTurns<D>;
    using B = BiasStep<D>;
    const int lane = threadIdx.x & 31, second = (lane ^ lane >> 3) & 1;
    /* lane 16·(head % 2) + 8·(head / 2 ^ turn / 2) + 4·(turn % 2) + 2·key + turn / 2 */
    const int key = threadIdx.x / 32 * (32 / S::LANES) + ((lane & 1) * 2 + (lane >> 2 & 1)) * S::ROWS + (lane >> 1 & 1);
#pragma unroll 1
    for (int first = 0; first < G; first += B::HEADS) {
        const int g = first + 2 * second + lane / 16;
        float two[2];
        multiply_means<D, BF16>(two, to.means[first / B::PRODUCT_HEADS], k);
        float bias = fold(two[0], two[1], 4);
        if (first + B::PRODUCT_HEADS < G) {
            multiply_means<D, BF16>(two, to.means[first / B::PRODUCT_HEADS + 1], k);
            const float other = __shfl_xor_sync(0xffffffffu, fold(two[0], two[1], 4), 8);
            bias = second ? other : bias;
        }
        if (g >= G)
            continue;
        /* finite: a bias of 0 stays one where the product overflows */
        bias = (bias - to.minus[g]) * fminf(to.factor[g] * inverse, 3e38f);
#pragma unroll
        for (int digit = 0; digit < BIAS_DIGITS; digit++)
            to.digits[bias_place(key, BIAS_DIGITS * g + digit)] = take_digit(bias, digit == 0   ? 256.0f
                                                                                   : digit == 1 ? 16.0f
                                                                                                : 1.0f);
    }
}

#endif
#endif
