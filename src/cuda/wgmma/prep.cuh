/* What the kernels of prep share: 16-bit floats eight at a time, rows that are not finite, scales. */
#ifndef APA_CUDA_WGMMA_PREP_CUH
#define APA_CUDA_WGMMA_PREP_CUH

#include "cuda/chain.cuh"
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/tile_e4m3.cuh"

#include <float.h>

#ifdef APA_CUDA_BULK

constexpr uint32_t WITHOUT_SIGNS = 0x7fff7fffu;

template <bool BF16> __device__ __forceinline__ constexpr uint32_t largest_finite_2()
{
    return BF16 ? 0x7f7f7f7fu : 0x7bff7bffu;
}

/* Largest magnitudes of eight floats, in two columns; bits of a float without its sign rise with it, NaN's last. */
__device__ __forceinline__ uint32_t magnitudes(const uint4 &x)
{
    return max_u16_2(max_u16_2(x.x & WITHOUT_SIGNS, x.y & WITHOUT_SIGNS),
                     max_u16_2(x.z & WITHOUT_SIGNS, x.w & WITHOUT_SIGNS));
}

template <bool BF16> __device__ __forceinline__ bool are_finite(uint32_t magnitudes)
{
    return max_u16_2(magnitudes, largest_finite_2<BF16>()) == largest_finite_2<BF16>();
}

template <bool BF16> __device__ __forceinline__ float2 widen_pair(uint32_t x)
{
    return make_float2(widen<BF16>(static_cast<uint16_t>(x & 0xffff)), widen<BF16>(static_cast<uint16_t>(x >> 16)));
}

template <bool BF16> __device__ __forceinline__ void widen_8(const uint4 &x, float (&to)[8])
{
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = widen_pair<BF16>(word[i]);
        to[2 * i] = two.x;
        to[2 * i + 1] = two.y;
    }
}

/* The two values of pack_e4m3(). */
__device__ __forceinline__ float2 unpack_e4m3(uint32_t codes)
{
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
    return make_float2(low_half(halves), high_half(halves));
}

/* Is the row finite, of which LANES neighbouring lanes hold a part each? */
template <int LANES> __device__ __forceinline__ bool row_finite(bool own)
{
    constexpr uint32_t mask = LANES == 32 ? 0xffffffffu : (1u << LANES % 32) - 1;
    return (__ballot_sync(0xffffffffu, own) >> (threadIdx.x & 31 & ~(LANES - 1)) & mask) == mask;
}

/* One step of a sum over lanes of several values at once, with the lane m away: a goes on in the lanes without m's
 * lowest bit, b in those with it. */
template <typename T> __device__ __forceinline__ T fold(T a, T b, int m)
{
    const bool upper = (threadIdx.x & m & -m) != 0;
    return (upper ? b : a) + __shfl_xor_sync(0xffffffffu, upper ? a : b, m);
}

/* Smallest power of two that is >= x; 1 for 0. */
__device__ __forceinline__ float power_of_two(float x)
{
    if (!(x >= FLT_MIN))
        return x > 0.0f ? FLT_MIN : 1.0f;
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float((bits + 0x7fffffu) & 0x7f800000u);
}

/* Eight codes of Q or K: E4M3 in two words, FP16 in four. */
template <int D> struct QKCodes {
    static constexpr int WORDS = 2 * Pair<D>::QK_BYTES;
    uint32_t word[WORDS];
    __device__ void set(const float (&x)[8])
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (D == 64)
                word[i] = pack_16<false>(x[2 * i], x[2 * i + 1]);
            else
                word[i] = pack_e4m3(x[4 * i], x[4 * i + 1]) | pack_e4m3(x[4 * i + 2], x[4 * i + 3]) << 16;
        }
    }
    __device__ void clear_unless(bool kept)
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            word[i] = kept ? word[i] : 0u;
    }
};

/* 1 / x of a power of two from 2^-126 to 2^126. */
__device__ __forceinline__ float inverse_power(float x)
{
    return __uint_as_float(0x7f000000u - __float_as_uint(x));
}

/* x·2^-896 of a finite 16-bit float, exact, subnormal ones too: two instructions at full and half rate, where a
 * conversion to double runs at an eighth. FROM_SMALL takes it back. */
constexpr double FROM_SMALL = 0x1p896;

__device__ __forceinline__ double small_double(float x)
{
    return __longlong_as_double(wide_product(__float_as_int(x), 1 << 29) & static_cast<int64_t>(0x8fffffffffffffffu));
}

/* A score's unit, 8·c·(scales), goes into an FP16 product: c is rounded to FP16, and what that changes goes into q. */
struct ScoreUnit {
    float unit;    /* of scales that are 1 */
    double change; /* of q */
};

__device__ __forceinline__ float unit_of_score(const apa_cuda_job &job)
{
    const float c_exponent = power_of_two(job.c); /* so that FP16 holds what is left, between 4 and 8 */
    return __half2float(__float2half_rn(CODES_PER_OCTAVE * (job.c / c_exponent))) * c_exponent;
}

__device__ __forceinline__ ScoreUnit score_unit(const apa_cuda_job &job)
{
    ScoreUnit to;
    to.unit = unit_of_score(job);
    to.change = CODES_PER_OCTAVE * job.c_exact / static_cast<double>(to.unit);
    return to;
}

/* The mean in the eight channels from `first` on. */
__device__ __forceinline__ void load_mean_8(float (&mean)[8], const float *from)
{
    const float4 low = *reinterpret_cast<const float4 *>(from), high = *reinterpret_cast<const float4 *>(from + 4);
    mean[0] = low.x;
    mean[1] = low.y;
    mean[2] = low.z;
    mean[3] = low.w;
    mean[4] = high.x;
    mean[5] = high.y;
    mean[6] = high.z;
    mean[7] = high.w;
}

#endif

/* means.cu, pairs.cu, bias.cu */
extern "C" int apa_wgmma_launch_means(const apa_cuda_job *job, cudaStream_t stream);
extern "C" int apa_wgmma_launch_pairs(const apa_cuda_job *job, int chained, cudaStream_t stream);
extern "C" int apa_wgmma_launch_bias(const apa_cuda_job *job, int chained, cudaStream_t stream);

#endif
