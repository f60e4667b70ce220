/* Prep on Hopper: codes of pairs of tiles (layout in tile_e4m3.cuh), the kernel that moves most bytes of prep.
 *
 * A block makes one blob. Keys go to registers, values to shared memory, both on their way before the mean is there.
 * Two passes over them, for scales and for codes; then the codes take the place of the values, in the order of the
 * blob, and one bulk copy writes it: whole sectors, no address in any thread. Every scale is the smallest power of two
 * that keeps the largest value in range, so that multiplying by its inverse is exact and a code is the rounding of one
 * FP32 number: k - mean, or v. Rows that are not finite count as zeros and mark their tile. With BIAS the keys' biases
 * are made, too (bias.cuh), while the keys are at hand. */
#include "cuda/wgmma/bias.cuh"

template <int D> struct PairShape : PairTurns<D> {
    using PairTurns<D>::THREADS;
    static constexpr int PIECES = PAIR_KEYS / 16; /* places of V that a thread writes at once, two channels of them */
    static_assert(D / 2 * PIECES == THREADS, "a thread two channels and 16 places");
    static_assert(PAIR_KEYS * D * 2 <= Pair<D>::META, "values take the place of codes");
};

/* What a block finds out about its pair; bits of floats that are not negative rise with them. */
struct PairFacts {
    int k_amax, k_square; /* FP32 */
    int v_amax;           /* 16 bits */
    int poisoned[2];
};

#ifdef APA_CUDA_BULK

__device__ __forceinline__ void raise(int *to, int own)
{
    const int most = __reduce_max_sync(0xffffffffu, own);
    if ((threadIdx.x & 31) == 0)
        atomicMax(to, most);
}

/* Row sums of four rows: lane l of the LANES that hold a row has a part of each, and gets the whole of one. */
template <int LANES> __device__ __forceinline__ float sum_rows(const float (&part)[4])
{
    const bool second = (threadIdx.x & 1) != 0, fourth = (threadIdx.x & 2) != 0;
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float other = __shfl_xor_sync(0xffffffffu, second ? part[i] : part[2 + i], 1);
        two[i] = (second ? part[2 + i] : part[i]) + other;
    }
    const float other = __shfl_xor_sync(0xffffffffu, fourth ? two[0] : two[1], 2);
    float sum = (fourth ? two[1] : two[0]) + other;
#pragma unroll
    for (int m = 4; m < LANES; m *= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, m);
    return sum;
}

/* Codes of two channels at 16 places from [key][D] in shared memory. */
template <int D, bool BF16>
__device__ __forceinline__ void transpose_values(uint4 (&code)[2], const uint32_t *values, float inverse)
{
    const int c = threadIdx.x % (D / 2), piece = threadIdx.x / (D / 2);
    uint32_t word[2][4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        float2 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = piece / 2 * 32 + piece % 2 * 16 + key_of_slot(4 * w + i);
            const float2 two = widen_pair<BF16>(values[key * (D / 2) + c]);
            x[i] = make_float2(two.x * inverse, two.y * inverse);
        }
        word[0][w] = pack_e4m3(x[0].x, x[1].x) | pack_e4m3(x[2].x, x[3].x) << 16;
        word[1][w] = pack_e4m3(x[0].y, x[1].y) | pack_e4m3(x[2].y, x[3].y) << 16;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        code[half] = make_uint4(word[half][0], word[half][1], word[half][2], word[half][3]);
}

static_assert(key_of_slot(16) == 16 && key_of_slot(31) == 31, "the two halves of 32 places hold their own 16 keys");

/* Keys minus mean: codes of a key's eight channels. */
template <int D, bool BF16>
__device__ __forceinline__ QKCodes<D> key_codes(const uint4 &raw, float inverse, const float (&minus_mean)[8])
{
    float x[8];
    widen_8<BF16>(raw, x);
#pragma unroll
    for (int i = 0; i < 8; i++) /* powers of two: this is (x - mean)·inverse, rounded once */
        x[i] = fmaf(x[i], inverse, minus_mean[i]);
    QKCodes<D> codes;
    codes.set(x);
    return codes;
}

/* ... and their place in the blob. */
template <int D> __device__ __forceinline__ void put_key_codes(uint8_t *to, int key, int lane, const QKCodes<D> &code)
{
    if constexpr (D == 64)
        *reinterpret_cast<uint4 *>(to + swizzled(key, lane)) =
            make_uint4(code.word[0], code.word[1], code.word[2], code.word[3]);
    else
        *reinterpret_cast<uint2 *>(to + swizzled(key, lane / 2) + lane % 2 * 8) =
            make_uint2(code.word[0], code.word[1]);
}

#endif

template <int D, bool BF16, bool BIAS>
static __global__ void __launch_bounds__(PairShape<D>::THREADS, 3 * 128 / D)
    wgmma_pair_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    using S = PairShape<D>;
    chain_go();
    __shared__ __align__(128) uint8_t blob[Pair<D>::BYTES]; /* first the values */
    __shared__ PairFacts facts;
    __shared__ __align__(128) BiasShared<D> shared; /* with BIAS */
    const int first_pair = job.first_tile / 2, pairs = (job.tiles + 1) / 2 - first_pair;
    const int head = blockIdx.x / pairs, number = first_pair + blockIdx.x % pairs;
    const int lane = threadIdx.x % S::LANES, r = threadIdx.x / S::LANES, b = head / job.Hkv, h = head % job.Hkv;
    const int left = static_cast<int>(min(
        static_cast<int64_t>(PAIR_KEYS), job.Skv - static_cast<int64_t>(number) * PAIR_KEYS)); /* keys that there are */
    const int64_t first = static_cast<int64_t>(number) * PAIR_KEYS + r;
    const uint16_t *k_from = row_pointer<uint16_t>(job.k, b, h, first) + lane * 8,
                   *v_from = row_pointer<uint16_t>(job.v, b, h, first) + lane * 8;
    uint4 *own_values = reinterpret_cast<uint4 *>(blob + r * D * 2 + lane * 16);
    constexpr int TURN = S::ROWS * D * 2 / 16; /* of own_values */
    uint4 k[S::TURNS];
#pragma unroll
    for (int turn = 0; turn < S::TURNS; turn++) {
        const bool there = turn * S::ROWS + r < left;
        k[turn] = make_uint4(0, 0, 0, 0);
        if (there)
            k[turn] = *reinterpret_cast<const uint4 *>(k_from + turn * S::ROWS * job.k.stride[2]);
        copy_async_16_or_zero(shared_address(own_values + turn * TURN),
                              there ? static_cast<const void *>(v_from + turn * S::ROWS * job.v.stride[2]) : job.v.data,
                              there ? 16 : 0);
    }
    copy_async_commit();
    if (threadIdx.x == 0)
        facts = {0, 0, 0, {0, 0}};
    if constexpr (BIAS)
        clear_digits<D>(shared);
    chain_wait();
    float mean[8];
    load_mean_8(mean, job.k_mean + head * D + lane * 8);
    if constexpr (BIAS)
        share_means<D, BF16>(shared, job, head, mean);
    copy_async_wait<0>();
    __syncthreads();
    float k_amax = 0.0f, square[S::TURNS];
    uint32_t v_most = 0, good_keys = 0; /* bit per turn: the key is there and finite */
#pragma unroll
    for (int turn = 0; turn < S::TURNS; turn++) {
        const int key = turn * S::ROWS + r;
        const uint32_t v = magnitudes(own_values[turn * TURN]);
        const bool there = key < left, k_good = row_finite<S::LANES>(are_finite<BF16>(magnitudes(k[turn]))),
                   v_good = row_finite<S::LANES>(are_finite<BF16>(v)), good = there && k_good;
        if (v_good)
            v_most = max_u16_2(v_most, v);
        else
            own_values[turn * TURN] = make_uint4(0, 0, 0, 0);
        float x[8], most = 0.0f, sum = 0.0f;
        widen_8<BF16>(k[turn], x);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] -= mean[i];
            most = fmaxf(most, fabsf(x[i]));
            sum = fmaf(x[i], x[i], sum);
        }
        k_amax = good ? fmaxf(k_amax, most) : k_amax;
        square[turn] = good ? sum : 0.0f;
        good_keys |= good ? 1u << turn : 0u;
        if (there && !(k_good && v_good))
            facts.poisoned[key / APA_CUDA_TILE] = 1;
    }
    static_assert(S::TURNS == 4, "rows whose squares are summed at once");
    raise(&facts.k_amax, __float_as_int(k_amax));
    raise(&facts.k_square, __float_as_int(sum_rows<S::LANES>(square)));
    raise(&facts.v_amax, static_cast<int>(max(v_most & 0xffff, v_most >> 16)));
    __syncthreads();
    const float k_scale = power_of_two(__int_as_float(facts.k_amax) * (1.0f / qk_largest<D>())),
                inverse = 1.0f / k_scale;
    if constexpr (BIAS) {
        write_digits<D, BF16>(shared, k, job.G, inverse);
        load_mean_8(mean, shared.k_mean + lane * 8); /* from here, so that no register holds it meanwhile */
    }
    const float v_scale = power_of_two(widen<BF16>(static_cast<uint16_t>(facts.v_amax)) * (1.0f / V_LARGEST));
    QKCodes<D> k_code[S::TURNS];
    uint4 v_code[2];
#pragma unroll
    for (int i = 0; i < 8; i++)
        mean[i] *= -inverse;
#pragma unroll
    for (int turn = 0; turn < S::TURNS; turn++) {
        k_code[turn] = key_codes<D, BF16>(k[turn], inverse, mean);
        k_code[turn].clear_unless((good_keys >> turn & 1) != 0);
    }
    transpose_values<D, BF16>(v_code, reinterpret_cast<const uint32_t *>(blob), 1.0f / v_scale);
    __syncthreads(); /* the values have been read */
#pragma unroll
    for (int turn = 0; turn < S::TURNS; turn++)
        put_key_codes<D>(blob + Pair<D>::K, turn * S::ROWS + r, lane, k_code[turn]);
#pragma unroll
    for (int half = 0; half < 2; half++)
        *reinterpret_cast<uint4 *>(blob + Pair<D>::V +
                                   swizzled(threadIdx.x % (D / 2) * 2 + half, threadIdx.x / (D / 2))) = v_code[half];
    if (threadIdx.x < 4)
        *reinterpret_cast<uint4 *>(blob + Pair<D>::META + threadIdx.x * 16) =
            threadIdx.x > 0 ? make_uint4(0, 0, 0, 0)
                            : make_uint4(__float_as_uint(k_scale), __float_as_uint(v_scale),
                                         static_cast<uint32_t>(facts.poisoned[0] | facts.poisoned[1] << 1),
                                         __float_as_uint(job.p_phase ? phase_of(number) : 0.0f));
    fence_for_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        const int64_t place = static_cast<int64_t>(head) * ((job.room + 1) / 2) + number;
        copy_bulk_out(job.blob + place * Pair<D>::BYTES, shared_address(blob), Pair<D>::BYTES);
        if constexpr (BIAS)
            copy_bulk_out(job.key_bias + (static_cast<int64_t>(head) * ((job.tiles + 1) / 2) + number) * BIAS_BYTES,
                          shared_address(shared.digits), BIAS_BYTES);
        atomicMax(reinterpret_cast<int *>(job.k_scale_max) + head, facts.k_square);
    }
    if (threadIdx.x < 2 && 2 * number + static_cast<int>(threadIdx.x) < job.tiles)
        job.poisoned[static_cast<int64_t>(head) * job.room + 2 * number + threadIdx.x] =
            static_cast<uint8_t>(facts.poisoned[threadIdx.x]);
    if (threadIdx.x == 0)
        copy_bulk_out_wait();
#endif
}

template <int D, bool BF16, bool BIAS> static int launch(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    const int64_t pairs = (job->tiles + 1) / 2 - job->first_tile / 2;
    if (pairs <= 0)
        return cudaSuccess;
    return launch_chained(chained, wgmma_pair_kernel<D, BF16, BIAS>, job->B * job->Hkv * pairs, PairShape<D>::THREADS,
                          0, stream, *job);
}

extern "C" int apa_wgmma_launch_pairs(const apa_cuda_job *job, int chained, cudaStream_t stream)
{
    if (job->D == 64)
        return job->bf16 ? launch<64, true, false>(job, chained, stream)
                         : launch<64, false, false>(job, chained, stream);
    if (job->smooth_q)
        return job->bf16 ? launch<128, true, true>(job, chained, stream)
                         : launch<128, false, true>(job, chained, stream);
    return job->bf16 ? launch<128, true, false>(job, chained, stream) : launch<128, false, false>(job, chained, stream);
}
