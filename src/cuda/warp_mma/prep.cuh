/* What the prep of every cold format shares. Codes are those of the reference engine, bit for bit: sums in double in
 * its order (keys of a tile in order, then tiles in order), single FP32 operations in its order. Nothing that includes
 * this file may be compiled with fast math. */
#ifndef APA_CUDA_PREP_CUH
#define APA_CUDA_PREP_CUH

#include "cuda/warp_mma/tile_nvfp4.cuh"

#include <float.h>

constexpr int SUMS_AHEAD = 32;
constexpr int PREP_THREADS = 256;

__device__ __forceinline__ float widen(uint16_t bits, int bf16)
{
    return bf16 ? widen<true>(bits) : widen<false>(bits);
}

__device__ __forceinline__ bool is_finite_16(uint16_t bits, int bf16)
{
    const uint16_t exponent = bf16 ? 0x7f80 : 0x7c00;
    return (bits & exponent) != exponent;
}

/* Keys of a tile as [64][D] in shared memory; bad[key] = 1 where a row is not finite, or lies beyond the sequence. */
template <int D, int THREADS>
__device__ __forceinline__ void stage_rows(uint16_t *to, int *bad, const apa_cuda_tensor &x, int b, int h, int tile,
                                           int Skv, int bf16)
{
    constexpr int CHUNKS = D / 8;
    if (threadIdx.x < APA_CUDA_TILE)
        bad[threadIdx.x] = tile * APA_CUDA_TILE + static_cast<int>(threadIdx.x) >= Skv;
    __syncthreads();
    const int chunk = threadIdx.x % CHUNKS;
    for (int r = threadIdx.x / CHUNKS; r < APA_CUDA_TILE; r += THREADS / CHUNKS) {
        const int64_t key = static_cast<int64_t>(tile) * APA_CUDA_TILE + r;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (key < Skv)
            value = *reinterpret_cast<const uint4 *>(row_pointer<uint16_t>(x, b, h, key) + chunk * 8);
        const uint32_t word[4] = {value.x, value.y, value.z, value.w};
        bool finite = true;
        for (int i = 0; i < 4; i++)
            finite = finite && is_finite_16(word[i] & 0xffff, bf16) && is_finite_16(word[i] >> 16, bf16);
        if (!finite)
            bad[r] = 1;
        *reinterpret_cast<uint4 *>(to + r * D + chunk * 8) = value;
    }
    __syncthreads();
}

template <int D> __device__ __forceinline__ float hadamard_norm()
{
    return D == 64 ? 0.125f : D == 128 ? 0.088388347648318440f : 0.0625f;
}

/* The tiles' sums in tile order: a chain of additions as long as there are tiles. The next values are on their way
 * while these are added. For one KV head, by one thread block. */
template <int D> __device__ __forceinline__ void mean_of_head(const apa_cuda_job &job, int head)
{
    __shared__ double count;
    const double *sums = job.tile_sum + static_cast<int64_t>(head) * job.tiles * (D + 1);
    for (int d = threadIdx.x; d <= D; d += blockDim.x) {
        const double *from = sums + d;
        double total = 0.0, next[SUMS_AHEAD];
        for (int i = 0; i < SUMS_AHEAD; i++)
            next[i] = i < job.tiles ? from[static_cast<int64_t>(i) * (D + 1)] : 0.0;
        for (int tile = 0; tile < job.tiles; tile += SUMS_AHEAD) {
            double now[SUMS_AHEAD];
#pragma unroll
            for (int i = 0; i < SUMS_AHEAD; i++) {
                now[i] = next[i];
                const int ahead = tile + SUMS_AHEAD + i;
                next[i] = ahead < job.tiles ? from[static_cast<int64_t>(ahead) * (D + 1)] : 0.0;
            }
#pragma unroll
            for (int i = 0; i < SUMS_AHEAD; i++)
                total += now[i]; /* + 0 past the end changes nothing but the sign of a zero */
        }
        if (d == D)
            count = total;
        else
            job.mean_sum[head * D + d] = total;
    }
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += blockDim.x)
        job.k_mean[static_cast<int64_t>(head) * D + d] =
            count > 0.0 ? static_cast<float>(job.mean_sum[head * D + d] / count) : 0.0f;
}

/* A row lies in D / E neighbouring lanes, element E·(lane of the row) + i. */

/* Walsh-Hadamard: butterflies at distances 1, 2, 4, …, then one product. */
template <int D, int E> __device__ __forceinline__ void hadamard(float (&x)[E])
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int distance = 1; distance < E; distance *= 2)
#pragma unroll
        for (int i = 0; i < E; i++)
            if ((i & distance) == 0) {
                const float a = x[i], b = x[i + distance];
                x[i] = a + b;
                x[i + distance] = a - b;
            }
#pragma unroll
    for (int m = 1; m < D / E; m *= 2)
#pragma unroll
        for (int i = 0; i < E; i++) {
            const float other = __shfl_xor_sync(0xffffffffu, x[i], m);
            x[i] = (lane & m) != 0 ? other - x[i] : x[i] + other;
        }
#pragma unroll
    for (int i = 0; i < E; i++)
        x[i] *= hadamard_norm<D>();
}

/* E 16-bit elements, 2·E bytes aligned to as much (to 16 at most). */
template <int E> __device__ __forceinline__ void load_elements(const uint16_t *from, uint16_t (&x)[E])
{
    if constexpr (E >= 8) {
#pragma unroll
        for (int i = 0; i < E; i += 8) {
            const uint4 value = *reinterpret_cast<const uint4 *>(from + i);
            const uint32_t word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
            for (int j = 0; j < 8; j++)
                x[i + j] = static_cast<uint16_t>(j % 2 == 0 ? word[j / 2] & 0xffff : word[j / 2] >> 16);
        }
    } else {
#pragma unroll
        for (int i = 0; i < E; i += 2) {
            const uint32_t pair = *reinterpret_cast<const uint32_t *>(from + i);
            x[i] = static_cast<uint16_t>(pair & 0xffff);
            x[i + 1] = static_cast<uint16_t>(pair >> 16);
        }
    }
}

/* Low bytes of four words, first one lowest. */
__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

/* Is the whole row finite? Every lane of the warp calls it. */
template <int D, int E> __device__ __forceinline__ bool row_is_finite(const float (&x)[E])
{
    constexpr uint32_t LANES = D / E, ROW = LANES == 32 ? 0xffffffffu : (1u << LANES % 32) - 1;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < E; i++)
        finite = finite && isfinite(x[i]);
    return (__ballot_sync(0xffffffffu, finite) >> (threadIdx.x & 31 & ~(LANES - 1)) & ROW) == ROW;
}

/* Largest |x| of a row. */
template <int D, int E> __device__ __forceinline__ float row_amax(const float (&x)[E])
{
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < E; i++)
        amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
    for (int m = 1; m < D / E; m *= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, m));
    return amax;
}

/* The mean of K in the channels of a thread that holds elements first … first + E - 1 of a key. */
template <int D, int E>
__device__ __forceinline__ void load_mean(float (&mean)[E], const apa_cuda_job &job, int head, int first)
{
#pragma unroll
    for (int i = 0; i < E; i++)
        mean[i] = job.k_mean[static_cast<int64_t>(head) * D + first + i];
}

/* A key as it is quantised: minus the mean, rotated; zeros where there is none or it is not finite (returns false). */
template <int D, int E>
__device__ __forceinline__ bool prepared_key(float (&x)[E], const apa_cuda_job &job, int head, int64_t key, int first,
                                             const float (&mean)[E])
{
#pragma unroll
    for (int i = 0; i < E; i++)
        x[i] = 0.0f;
    if (key < job.Skv) {
        uint16_t raw[E];
        load_elements<E>(row_pointer<uint16_t>(job.k, head / job.Hkv, head % job.Hkv, key) + first, raw);
#pragma unroll
        for (int i = 0; i < E; i++)
            x[i] = widen(raw[i], job.bf16) - mean[i];
    }
    if (job.hadamard)
        hadamard<D, E>(x);
    const bool finite = row_is_finite<D, E>(x); /* not so for any raw value that is not */
    if (!finite)
#pragma unroll
        for (int i = 0; i < E; i++)
            x[i] = 0.0f;
    return finite;
}

/* The same for a query of a warp, E = D / 32 elements a lane; raw: its bits, the sign of the scale in them. */
template <int D>
__device__ __forceinline__ bool prepared_query(float (&x)[D / 32], uint16_t (&raw)[D / 32], const apa_cuda_job &job,
                                               int b, int head, int64_t position)
{
    constexpr int E = D / 32;
    load_elements<E>(row_pointer<uint16_t>(job.q, b, head, position) + (threadIdx.x & 31) * E, raw);
#pragma unroll
    for (int i = 0; i < E; i++) {
        raw[i] ^= job.negate ? 0x8000 : 0;
        x[i] = widen(raw[i], job.bf16);
    }
    if (job.hadamard)
        hadamard<D, E>(x);
    const bool finite = row_is_finite<D, E>(x);
    if (!finite)
#pragma unroll
        for (int i = 0; i < E; i++)
            x[i] = 0.0f;
    return finite;
}

/* What every trait keeps of a query: the 16-bit fragments of its group in shared memory, and its shift q·mean. */
template <int D> struct QueryGroup {
    uint16_t halves[16 * D];
    int unjudged, many; /* some row is not finite or beyond the format; some row sees more than early_tiles tiles */
};

/* A lane's part of raw row r. */
template <int D> __device__ __forceinline__ void keep_halves(uint16_t *halves, const uint16_t (&raw)[D / 32], int r)
{
    constexpr int E = D / 32;
#pragma unroll
    for (int i = 0; i < E; i += 2) { /* pairs of neighbouring channels */
        const int d = (threadIdx.x & 31) * E + i, d16 = d % 16;
        *reinterpret_cast<uint32_t *>(halves + (d / 16 * 32 + r % 8 * 4 + d16 % 8 / 2) * 8 +
                                      (d16 / 8 * 2 + r / 8) * 2) = raw[i] | static_cast<uint32_t>(raw[i + 1]) << 16;
    }
}

/* q·mean in double, over the warp. */
template <int D>
__device__ __forceinline__ double dot_mean(const apa_cuda_job &job, const uint16_t (&raw)[D / 32],
                                           const float (&mean)[D / 32])
{
    double dot = 0.0;
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        dot += static_cast<double>(widen(raw[i], job.bf16)) * static_cast<double>(mean[i]);
#pragma unroll
    for (int m = 1; m < 32; m *= 2)
        dot += __shfl_xor_sync(0xffffffffu, dot, m);
    return dot;
}

/* Launchers of the formats, one file each. */
extern "C" int apa_cuda_keys_8(const apa_cuda_job *job, cudaStream_t stream);
extern "C" int apa_cuda_queries_8(const apa_cuda_job *job, cudaStream_t stream);
extern "C" int apa_cuda_keys_nvfp4(const apa_cuda_job *job, cudaStream_t stream);
extern "C" int apa_cuda_queries_nvfp4(const apa_cuda_job *job, cudaStream_t stream);

#endif
