/* Prep: mean of K, INT8 tiles of K and V, INT8 queries. The codes are those of the reference engine, bit for bit: sums
 * in double in its order (keys of a tile in order, then tiles in order), single FP32 operations in its order. This file
 * must not be compiled with fast math. */
#include "cuda/warp_mma/tile_i8.cuh"

#include <float.h>

constexpr float INT8_AMAX_MIN =
    0x1.fcp-120f; /* below it a scale would be subnormal: all codes 0 (src/formats/formats.h) */
constexpr int SUMS_AHEAD = 32;
template <int D> constexpr int SUM_THREADS = D < 128 ? 128 : D;

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

/* Sum over a tile's finite keys, in order, in double; element D counts them. */
template <int D>
static __global__ void __launch_bounds__(SUM_THREADS<D>) sum_kernel(const __grid_constant__ apa_cuda_job job)
{
    constexpr int THREADS = SUM_THREADS<D>;
    __shared__ __align__(16) uint16_t rows[APA_CUDA_TILE * D];
    __shared__ int bad[APA_CUDA_TILE];
    const int head = blockIdx.x / job.tiles, tile = blockIdx.x % job.tiles, d = threadIdx.x;
    stage_rows<D, THREADS>(rows, bad, job.k, head / job.Hkv, head % job.Hkv, tile, job.Skv, job.bf16);
    double *to = job.tile_sum + static_cast<int64_t>(blockIdx.x) * (D + 1);
    if (d < D) {
        double sum = 0.0;
#pragma unroll 8
        for (int key = 0; key < APA_CUDA_TILE; key++)
            if (bad[key] == 0)
                sum += static_cast<double>(widen(rows[key * D + d], job.bf16));
        to[d] = sum;
    }
    if (d == 0) {
        int n = 0;
        for (int key = 0; key < APA_CUDA_TILE; key++)
            n += bad[key] == 0;
        to[D] = n;
    }
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

/* Codes of a row as apa_int8_quantise() makes them, in the low byte of each word; returns the scale. Adding 1.5·2^23
 * rounds to nearest, ties to even, as rintf() does; |x|·(127/amax) cannot round beyond 127. */
template <int D, int E> __device__ __forceinline__ float quantise(const float (&x)[E], uint32_t (&code)[E])
{
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < E; i++)
        amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
    for (int m = 1; m < D / E; m *= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, m));
    const bool zero = amax < INT8_AMAX_MIN;
    const float inverse = zero ? 0.0f : __fdiv_rn(127.0f, amax);
#pragma unroll
    for (int i = 0; i < E; i++)
        code[i] = __float_as_uint(__fadd_rn(__fmul_rn(x[i], inverse), MAGIC));
    return zero ? 0.0f : __fdiv_rn(amax, 127.0f);
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

constexpr int QUANTISE_THREADS = 256;

/* K half of a tile's blob: 8 lanes a key. Sets the tile's flag if a key is not finite. */
template <int D>
static __global__ void __launch_bounds__(QUANTISE_THREADS) keys_kernel(const __grid_constant__ apa_cuda_job job)
{
    constexpr int E = D / 8, KEYS = QUANTISE_THREADS / 8;
    __shared__ __align__(16) uint8_t codes[64 * D];
    __shared__ float scales[APA_CUDA_TILE];
    const int head = blockIdx.x / job.tiles, tile = blockIdx.x % job.tiles, sub = threadIdx.x & 7;
    uint8_t *blob = job.blob + static_cast<int64_t>(blockIdx.x) * Blob<D>::BYTES;
    float mean[E];
    bool finite = true;
#pragma unroll
    for (int i = 0; i < E; i += 4) {
        const float4 x = *reinterpret_cast<const float4 *>(job.k_mean + static_cast<int64_t>(head) * D + sub * E + i);
        mean[i] = x.x;
        mean[i + 1] = x.y;
        mean[i + 2] = x.z;
        mean[i + 3] = x.w;
    }
    const int64_t first = static_cast<int64_t>(tile) * APA_CUDA_TILE;
    const uint16_t *rows = row_pointer<uint16_t>(job.k, head / job.Hkv, head % job.Hkv, first) + sub * E;
#pragma unroll
    for (int turn = 0; turn < APA_CUDA_TILE / KEYS; turn++) {
        const int key = turn * KEYS + threadIdx.x / 8;
        float x[E] = {};
        const bool there = first + key < job.Skv;
        if (there) {
            uint16_t raw[E];
            load_elements<E>(rows + key * job.k.stride[2], raw);
#pragma unroll
            for (int i = 0; i < E; i++)
                x[i] = widen(raw[i], job.bf16) - mean[i];
        }
        if (job.hadamard)
            hadamard<D, E>(x);
        if (!row_is_finite<D, E>(x)) { /* so for every raw value that is not */
            finite = false;
#pragma unroll
            for (int i = 0; i < E; i++)
                x[i] = 0.0f;
        }
        uint32_t code[E];
        const float scale = quantise<D, E>(x, code);
        if (sub == 0)
            scales[key] = scale;
#pragma unroll
        for (int i = 0; i < E; i += 4) {
            /* channel d of key: word (d / 32·4 + key / 16)·32 + key % 8·4 + d % 16 / 4, of these number key / 8 % 2·2 +
             * d % 32 / 16 */
            const int d = sub * E + i;
            *reinterpret_cast<uint32_t *>(codes + ((d / 32 * 4 + key / 16) * 32 + key % 8 * 4 + d % 16 / 4) * 16 +
                                          (key / 8 % 2 * 2 + d % 32 / 16) * 4) =
                low_bytes(code[i], code[i + 1], code[i + 2], code[i + 3]);
        }
    }
    finite = __syncthreads_and(finite);
    for (int i = threadIdx.x; i < 64 * D / 16; i += QUANTISE_THREADS)
        reinterpret_cast<uint4 *>(blob + Blob<D>::K)[i] = reinterpret_cast<const uint4 *>(codes)[i];
    if (threadIdx.x < 32) {
        const float a = scales[threadIdx.x * 2], b = scales[threadIdx.x * 2 + 1];
        /* bits of floats that are not negative rise with them */
        const int most = __reduce_max_sync(0xffffffffu, __float_as_int(fmaxf(a, b)));
        if (threadIdx.x == 0)
            atomicMax(reinterpret_cast<int *>(job.k_scale_max) + head, most);
        /* pair 8n + t of neighbouring keys: [n / 2][t][n % 2] */
        reinterpret_cast<float2 *>(blob +
                                   Blob<D>::K_SCALE)[threadIdx.x / 8 * 8 + threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2] =
            make_float2(a, b);
    }
    if (threadIdx.x == 0 && !finite) {
        *reinterpret_cast<uint32_t *>(blob + Blob<D>::FLAG) = 1;
        job.poisoned[blockIdx.x] = 1;
    }
}

/* V half of a tile's blob, and its flag: a thread a channel and a part of the keys. Values that are not finite count as
 * 0. */
template <int D> __device__ __forceinline__ void values_of_tile(const apa_cuda_job &job, int head, int tile)
{
    constexpr int PARTS = QUANTISE_THREADS / D, WORDS = 4 / PARTS; /* a word: 4 codes for each of 4 lanes, so 16 keys */
    __shared__ __align__(16) uint16_t rows[APA_CUDA_TILE * D];
    __shared__ int bad[APA_CUDA_TILE];
    __shared__ float most[PARTS][D];
    uint8_t *blob = job.blob + (static_cast<int64_t>(head) * job.tiles + tile) * Blob<D>::BYTES;
    stage_rows<D, QUANTISE_THREADS>(rows, bad, job.v, head / job.Hkv, head % job.Hkv, tile, job.Skv, job.bf16);
    const int c = threadIdx.x % D, part = threadIdx.x / D;
    float x[WORDS * 16], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < WORDS * 16; i++) {
        const int key = part * WORDS * 16 + i;
        x[i] = bad[key] != 0 ? 0.0f : widen(rows[key * D + c], job.bf16);
        amax = fmaxf(amax, fabsf(x[i]));
    }
    most[part][c] = amax;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PARTS; i++)
        amax = fmaxf(amax, most[i][c]);
    const bool zero = amax < INT8_AMAX_MIN;
    const float inverse = zero ? 0.0f : __fdiv_rn(127.0f, amax);
    /* every value is in a register by now; 16-byte pieces of a channel swapped about, so that channels lie in other
     * banks */
    uint32_t *codes = reinterpret_cast<uint32_t *>(rows);
#pragma unroll
    for (int w = 0; w < WORDS; w++)
#pragma unroll
        for (int t = 0; t < 4; t++) {
            uint32_t code[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                code[i] = __float_as_uint(__fadd_rn(__fmul_rn(x[w * 16 + i / 2 * 8 + t * 2 + i % 2], inverse), MAGIC));
            codes[(c * 4 + (t ^ (c / 2 & 3))) * 4 + part * WORDS + w] = low_bytes(code[0], code[1], code[2], code[3]);
        }
    if (part == 0) {
        const float scale = zero ? 0.0f : __fdiv_rn(amax, 127.0f);
        reinterpret_cast<float *>(blob + Blob<D>::V_SCALE)[c / 16 * 16 + c % 8 / 2 * 4 + c / 8 % 2 * 2 + c % 2] = scale;
    }
    bool finite = true;
    if (threadIdx.x < APA_CUDA_TILE)
        finite = bad[threadIdx.x] == 0 || tile * APA_CUDA_TILE + static_cast<int>(threadIdx.x) >= job.Skv;
    finite = __syncthreads_and(finite);
    for (int i = threadIdx.x; i < 64 * D / 16; i += QUANTISE_THREADS)
        reinterpret_cast<uint4 *>(blob + Blob<D>::V)[i] = reinterpret_cast<const uint4 *>(codes)[i ^ (i / 8 & 3)];
    if (threadIdx.x == 0) {
        *reinterpret_cast<uint4 *>(blob + Blob<D>::FLAG) = make_uint4(!finite, 0, 0, 0);
        job.poisoned[static_cast<int64_t>(head) * job.tiles + tile] = !finite;
    }
}

/* The first blocks make the means, one a head, the others the V halves of the tiles: neither needs the other, and the
 * long chains of the first run under the second. */
template <int D>
static __global__ void __launch_bounds__(QUANTISE_THREADS)
    values_kernel(const __grid_constant__ apa_cuda_job job, int means)
{
    if (static_cast<int>(blockIdx.x) < means) {
        mean_of_head<D>(job, blockIdx.x);
        return;
    }
    const int at = blockIdx.x - means;
    values_of_tile<D>(job, at / job.tiles, at % job.tiles);
}

constexpr int QUERY_THREADS = 256;

/* INT8 scores are within about |q||k|/127 of the truth at worst. Where that can exceed this many log2 units, estimates
 * say nothing about mass (src/reference/walk.c). */
constexpr double SCORE_ERROR_MAX = 32.0;

/* A block a group of 16 rows: codes, scales, shifts, and whether the group is hot throughout. */
template <int D>
static __global__ void __launch_bounds__(QUERY_THREADS) query_kernel(const __grid_constant__ apa_cuda_job job)
{
    constexpr int E = D / 32;
    __shared__ int unjudged, many;
    __shared__ __align__(16) uint8_t codes[16 * D];
    __shared__ __align__(16) uint16_t halves[16 * D];
    const int lane = threadIdx.x & 31, group = blockIdx.x % APA_CUDA_UNIT_GROUPS;
    Unit unit;
    unit.local = blockIdx.x / APA_CUDA_UNIT_GROUPS;
    unit.index = unit.local + job.unit_first;
    unit.head = static_cast<int>(unit.index / job.units);
    unit.number = static_cast<int>(unit.index % job.units);
    if (threadIdx.x == 0)
        unjudged = many = 0;
    float mean[E];
#pragma unroll
    for (int i = 0; i < E; i++)
        mean[i] = job.k_mean[static_cast<int64_t>(unit.head) * D + lane * E + i];
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < 16 / (QUERY_THREADS / 32); turn++) {
        const int r = turn * (QUERY_THREADS / 32) + threadIdx.x / 32;
        const Row row = row_of(job, unit, group * 16 + r);
        uint16_t raw[E] = {};
        float x[E] = {};
        if (row.real)
            load_elements<E>(row_pointer<uint16_t>(job.q, unit.head / job.Hkv, row.head, row.position) + lane * E, raw);
        double dot = 0.0;
#pragma unroll
        for (int i = 0; i < E; i++) {
            raw[i] ^= job.negate ? 0x8000 : 0;
            x[i] = widen(raw[i], job.bf16);
            dot += static_cast<double>(x[i]) * static_cast<double>(mean[i]);
        }
#pragma unroll
        for (int m = 1; m < 32; m *= 2)
            dot += __shfl_xor_sync(0xffffffffu, dot, m);
        if (job.hadamard)
            hadamard<D, E>(x);
        const bool finite = row_is_finite<D, E>(x);
        if (!finite)
#pragma unroll
            for (int i = 0; i < E; i++)
                x[i] = 0.0f;
        uint32_t code[E];
        const float scale = quantise<D, E>(x, code);
        const int sees = row.first < row.end ? (row.end - 1) / APA_CUDA_TILE - row.first / APA_CUDA_TILE + 1 : 0;
        if (lane == 0) {
            const int64_t at = unit.local * APA_CUDA_UNIT + group * 16 + r;
            const double shift = dot * job.c_exact;
            job.q_scale[at] = fmaxf(static_cast<float>(static_cast<double>(scale) * job.c_exact), FLT_MIN);
            job.shift[at] = isfinite(shift) ? static_cast<float>(shift) : 0.0f;
            const double worst =
                127.0 * D * static_cast<double>(scale) * job.c_exact * static_cast<double>(job.k_scale_max[unit.head]);
            if (sees > 0 && (!finite || (job.judged && worst > SCORE_ERROR_MAX)))
                unjudged = 1;
            if (sees > job.early_tiles)
                many = 1;
        }
        const int d = lane * E;
#pragma unroll
        for (int i = 0; i < E; i += 2) { /* pairs of neighbouring channels */
            const int d8 = (d + i) % 32, d16 = (d + i) % 16;
            *reinterpret_cast<uint16_t *>(codes + ((d + i) / 32 * 32 + r % 8 * 4 + d8 % 16 / 4) * 16 +
                                          (d8 / 16 * 2 + r / 8) * 4 + d8 % 4) =
                static_cast<uint16_t>((code[i] & 0xff) | (code[i + 1] & 0xff) << 8);
            *reinterpret_cast<uint32_t *>(halves + ((d + i) / 16 * 32 + r % 8 * 4 + d16 % 8 / 2) * 8 +
                                          (d16 / 8 * 2 + r / 8) * 2) = raw[i] | static_cast<uint32_t>(raw[i + 1]) << 16;
        }
    }
    __syncthreads();
    const int64_t at = unit.local * APA_CUDA_UNIT_GROUPS + group;
    for (int i = threadIdx.x; i < D; i += QUERY_THREADS)
        reinterpret_cast<uint4 *>(job.q8 + at * 16 * D)[i] = reinterpret_cast<const uint4 *>(codes)[i];
    for (int i = threadIdx.x; i < 2 * D; i += QUERY_THREADS)
        reinterpret_cast<uint4 *>(job.q16 + at * 32 * D)[i] = reinterpret_cast<const uint4 *>(halves)[i];
    if (threadIdx.x == 0)
        job.all_hot[at] = static_cast<uint8_t>(unjudged != 0 || (job.early_tiles > 0 && many == 0));
}

template <int D> static int launch_keys(const apa_cuda_job *job, cudaStream_t stream)
{
    const int heads = job->B * job->Hkv;
    const int64_t blocks = static_cast<int64_t>(heads) * job->tiles;
    cudaError_t error = cudaMemsetAsync(job->k_scale_max, 0, sizeof(float) * static_cast<size_t>(heads), stream);
    if (error != cudaSuccess)
        return error;
    if (blocks == 0)
        return cudaMemsetAsync(job->k_mean, 0, sizeof(float) * static_cast<size_t>(heads) * D, stream);
    if (job->smooth)
        sum_kernel<D><<<static_cast<unsigned>(blocks), SUM_THREADS<D>, 0, stream>>>(*job);
    else
        error = cudaMemsetAsync(job->k_mean, 0, sizeof(float) * static_cast<size_t>(heads) * D, stream);
    if (error != cudaSuccess)
        return error;
    const int means = job->smooth ? heads : 0;
    values_kernel<D><<<static_cast<unsigned>(blocks + means), QUANTISE_THREADS, 0, stream>>>(*job, means);
    keys_kernel<D><<<static_cast<unsigned>(blocks), QUANTISE_THREADS, 0, stream>>>(*job);
    return cudaGetLastError();
}

template <int D> static int launch_queries(const apa_cuda_job *job, cudaStream_t stream)
{
    query_kernel<D><<<static_cast<unsigned>(job->unit_count * APA_CUDA_UNIT_GROUPS), QUERY_THREADS, 0, stream>>>(*job);
    return cudaGetLastError();
}

extern "C" int apa_cuda_launch_prep_keys(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    return job->D == 64    ? launch_keys<64>(job, stream)
           : job->D == 128 ? launch_keys<128>(job, stream)
                           : launch_keys<256>(job, stream);
}

extern "C" int apa_cuda_launch_prep_queries(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    return job->D == 64    ? launch_queries<64>(job, stream)
           : job->D == 128 ? launch_queries<128>(job, stream)
                           : launch_queries<256>(job, stream);
}
