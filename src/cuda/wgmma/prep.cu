/* Prep on Hopper: the mean of K, pairs of tiles and queries in E4M3 (layouts in tile_e4m3.cuh).
 *
 * Every scale is the smallest power of two that keeps the largest value in range, so multiplying by its inverse is
 * exact and a code is the rounding of one FP32 number: k - mean, v, or q. Rows that are not finite count as zeros and
 * mark their tile. */
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/tile_e4m3.cuh"

#include <float.h>

constexpr int SUM_TILES = 8; /* tiles whose keys one block adds up */
constexpr int PREP_THREADS = 256;
constexpr int MEAN_STRIPES = 8;

#ifdef APA_CUDA_BULK

__device__ __forceinline__ bool finite_pair(uint32_t x, int bf16)
{
    const uint32_t exponent = bf16 ? 0x7f807f80u : 0x7c007c00u, one = bf16 ? 0x00800080u : 0x04000400u;
    return (((x & exponent) + one) & 0x80008000u) == 0;
}

__device__ __forceinline__ bool finite_8(const uint4 &x, int bf16)
{
    return finite_pair(x.x, bf16) && finite_pair(x.y, bf16) && finite_pair(x.z, bf16) && finite_pair(x.w, bf16);
}

__device__ __forceinline__ float2 widen_pair(uint32_t x, int bf16)
{
    return bf16 ? make_float2(widen<true>(x & 0xffff), widen<true>(x >> 16))
                : make_float2(widen<false>(x & 0xffff), widen<false>(x >> 16));
}

__device__ __forceinline__ void widen_8(const uint4 &x, int bf16, float (&to)[8])
{
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = widen_pair(word[i], bf16);
        to[2 * i] = two.x;
        to[2 * i + 1] = two.y;
    }
}

/* Is the row finite, of which LANES neighbouring lanes hold a part each? */
template <int LANES> __device__ __forceinline__ bool row_finite(bool own)
{
    constexpr uint32_t mask = LANES == 32 ? 0xffffffffu : (1u << LANES % 32) - 1;
    return (__ballot_sync(0xffffffffu, own) >> (threadIdx.x & 31 & ~(LANES - 1)) & mask) == mask;
}

/* Smallest power of two that is >= x; 1 for 0. */
__device__ __forceinline__ float power_of_two(float x)
{
    if (!(x >= FLT_MIN))
        return x > 0.0f ? FLT_MIN : 1.0f;
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float((bits + 0x7fffffu) & 0x7f800000u);
}

#endif

/* Sums over the finite keys of SUM_TILES tiles: float over a thread's few keys, then double. Element D counts them. */
template <int D>
static __global__ void __launch_bounds__(PREP_THREADS) wgmma_sum_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    constexpr int LANES = D / 8, ROWS = PREP_THREADS / LANES, KEYS = SUM_TILES * APA_CUDA_TILE;
    __shared__ float sums[ROWS][D];
    __shared__ int counts[ROWS];
    const int parts = (job.tiles + SUM_TILES - 1) / SUM_TILES;
    const int head = blockIdx.x / parts, part = blockIdx.x % parts;
    const int lane = threadIdx.x % LANES, r = threadIdx.x / LANES;
    const int64_t first = static_cast<int64_t>(part) * KEYS;
    const uint16_t *from = row_pointer<uint16_t>(job.k, head / job.Hkv, head % job.Hkv, first + r) + lane * 8;
    float sum[8] = {};
    int count = 0;
#pragma unroll 8
    for (int key = r; key < KEYS; key += ROWS, from += ROWS * job.k.stride[2]) {
        const bool there = first + key < job.Skv;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (there)
            x = *reinterpret_cast<const uint4 *>(from);
        if (!row_finite<LANES>(finite_8(x, job.bf16)) || !there)
            continue;
        float value[8];
        widen_8(x, job.bf16, value);
        count++;
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += value[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sums[r][lane * 8 + i] = sum[i];
    if (lane == 0)
        counts[r] = count;
    __syncthreads();
    double *to = job.tile_sum + static_cast<int64_t>(blockIdx.x) * (D + 1);
    for (int d = threadIdx.x; d <= D; d += PREP_THREADS) {
        double total = 0.0;
        for (int i = 0; i < ROWS; i++)
            total += d == D ? static_cast<double>(counts[i]) : static_cast<double>(sums[i][d]);
        to[d] = total;
    }
#endif
}

/* The parts' sums → the mean; a block a head, MEAN_STRIPES threads a channel. */
template <int D>
static __global__ void __launch_bounds__(D *MEAN_STRIPES) wgmma_mean_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    __shared__ double sums[MEAN_STRIPES][D], counts[MEAN_STRIPES];
    const int parts = (job.tiles + SUM_TILES - 1) / SUM_TILES, head = blockIdx.x;
    const int d = threadIdx.x % D, stripe = threadIdx.x / D;
    const double *from = job.tile_sum + static_cast<int64_t>(head) * parts * (D + 1);
    double sum = 0.0, count = 0.0;
#pragma unroll 8
    for (int part = stripe; part < parts; part += MEAN_STRIPES) {
        sum += from[static_cast<int64_t>(part) * (D + 1) + d];
        if (d == 0)
            count += from[static_cast<int64_t>(part) * (D + 1) + D];
    }
    sums[stripe][d] = sum;
    if (d == 0)
        counts[stripe] = count;
    __syncthreads();
    if (stripe != 0)
        return;
    double keys = counts[0];
    for (int i = 1; i < MEAN_STRIPES; i++) {
        sum += sums[i][d];
        keys += counts[i];
    }
    job.k_mean[head * D + d] = keys > 0.0 ? static_cast<float>(sum / keys) : 0.0f;
#endif
}

/* What a block of the pair kernel finds out about its pair. */
struct PairFacts {
    int k_amax, v_amax, k_square; /* bits of floats that are not negative rise with them */
    int poisoned[2];
};

#ifdef APA_CUDA_BULK

__device__ __forceinline__ void raise(int *to, float own)
{
    const int most = __reduce_max_sync(0xffffffffu, __float_as_int(own));
    if ((threadIdx.x & 31) == 0)
        atomicMax(to, most);
}

/* V of the pair from [key][D] in shared memory to [channel][128 places]: a thread two channels and 32 places. */
template <int D>
__device__ __forceinline__ void transpose_values(uint8_t *to, const uint32_t *values, float inverse, int bf16)
{
    const int c = threadIdx.x % (D / 2), quarter = threadIdx.x / (D / 2);
    if (quarter >= 4)
        return;
    uint32_t code[2][8];
#pragma unroll
    for (int word = 0; word < 8; word++) {
        float2 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 two = widen_pair(values[(32 * quarter + key_of_slot(4 * word + i)) * (D / 2) + c], bf16);
            x[i] = make_float2(two.x * inverse, two.y * inverse);
        }
        code[0][word] = pack_e4m3(x[0].x, x[1].x) | pack_e4m3(x[2].x, x[3].x) << 16;
        code[1][word] = pack_e4m3(x[0].y, x[1].y) | pack_e4m3(x[2].y, x[3].y) << 16;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int piece = 0; piece < 2; piece++)
            *reinterpret_cast<uint4 *>(to + swizzled(2 * c + half, 2 * quarter + piece)) = make_uint4(
                code[half][4 * piece], code[half][4 * piece + 1], code[half][4 * piece + 2], code[half][4 * piece + 3]);
}

#endif

template <int D>
static __global__ void __launch_bounds__(PREP_THREADS, 3) wgmma_pair_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
    constexpr int LANES = D / 8, ROWS = PREP_THREADS / LANES, TURNS = PAIR_KEYS / ROWS;
    __shared__ __align__(16) uint16_t values[PAIR_KEYS * D];
    __shared__ PairFacts facts;
    const int first_pair = job.first_tile / 2, pairs = (job.tiles + 1) / 2 - first_pair;
    const int head = blockIdx.x / pairs, number = first_pair + blockIdx.x % pairs;
    const int lane = threadIdx.x % LANES, r = threadIdx.x / LANES, b = head / job.Hkv, h = head % job.Hkv;
    const int64_t first = static_cast<int64_t>(number) * PAIR_KEYS;
    uint8_t *blob = job.blob + (static_cast<int64_t>(head) * ((job.room + 1) / 2) + number) * Pair<D>::BYTES;
    if (threadIdx.x == 0)
        facts = {0, 0, 0, {0, 0}};
    uint4 k[TURNS], v[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int64_t key = first + turn * ROWS + r;
        k[turn] = v[turn] = make_uint4(0, 0, 0, 0);
        if (key < job.Skv) {
            k[turn] = *reinterpret_cast<const uint4 *>(row_pointer<uint16_t>(job.k, b, h, key) + lane * 8);
            v[turn] = *reinterpret_cast<const uint4 *>(row_pointer<uint16_t>(job.v, b, h, key) + lane * 8);
        }
    }
    float mean[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        mean[i] = job.k_mean[head * D + lane * 8 + i];
    __syncthreads();
    float k_amax = 0.0f, v_amax = 0.0f, k_square = 0.0f;
    uint32_t k_there = 0; /* bit per turn: the key is there and finite */
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int key = turn * ROWS + r;
        const bool there = first + key < job.Skv;
        const bool k_good = row_finite<LANES>(finite_8(k[turn], job.bf16)),
                   v_good = row_finite<LANES>(finite_8(v[turn], job.bf16));
        float x[8], square = 0.0f;
        if (!v_good)
            v[turn] = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4 *>(values + key * D + lane * 8) = v[turn];
        widen_8(v[turn], job.bf16, x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v_amax = fmaxf(v_amax, fabsf(x[i]));
        const bool good = there && k_good;
        k_there |= good ? 1u << turn : 0u;
        widen_8(k[turn], job.bf16, x);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = good ? x[i] - mean[i] : 0.0f;
            k_amax = fmaxf(k_amax, fabsf(x[i]));
            square = fmaf(x[i], x[i], square);
        }
#pragma unroll
        for (int m = 1; m < LANES; m *= 2)
            square += __shfl_xor_sync(0xffffffffu, square, m);
        k_square = fmaxf(k_square, square);
        if (there && !(k_good && v_good))
            facts.poisoned[key / APA_CUDA_TILE] = 1;
    }
    raise(&facts.k_amax, k_amax);
    raise(&facts.v_amax, v_amax);
    raise(&facts.k_square, k_square);
    __syncthreads();
    const float k_scale = power_of_two(__int_as_float(facts.k_amax) * (1.0f / QK_LARGEST)),
                v_scale = power_of_two(__int_as_float(facts.v_amax) * (1.0f / V_LARGEST));
    const float inverse = 1.0f / k_scale;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int key = turn * ROWS + r;
        float x[8];
        widen_8(k[turn], job.bf16, x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = (k_there >> turn & 1) != 0 ? (x[i] - mean[i]) * inverse : 0.0f;
        *reinterpret_cast<uint2 *>(blob + Pair<D>::K + key_piece<D>(key, lane / 2) + lane % 2 * 8) = make_uint2(
            pack_e4m3(x[0], x[1]) | pack_e4m3(x[2], x[3]) << 16, pack_e4m3(x[4], x[5]) | pack_e4m3(x[6], x[7]) << 16);
    }
    transpose_values<D>(blob + Pair<D>::V, reinterpret_cast<const uint32_t *>(values), 1.0f / v_scale, job.bf16);
    if (threadIdx.x == 0) {
        *reinterpret_cast<uint4 *>(blob + Pair<D>::META) =
            make_uint4(__float_as_uint(k_scale), __float_as_uint(v_scale), facts.poisoned[0], facts.poisoned[1]);
        atomicMax(reinterpret_cast<int *>(job.k_scale_max) + head, facts.k_square);
    }
    if (threadIdx.x < 2 && 2 * number + static_cast<int>(threadIdx.x) < job.tiles)
        job.poisoned[static_cast<int64_t>(head) * job.room + 2 * number + threadIdx.x] =
            static_cast<uint8_t>(facts.poisoned[threadIdx.x]);
#endif
}

/* A block a group of 16 rows, a warp two of them: codes, units, shifts, and whether the group is hot throughout. A
 * score's unit, 8·c·(scales), goes into an FP16 product: c is rounded to FP16, and what that changes goes into q. */
template <int D>
static __global__ void __launch_bounds__(PREP_THREADS) wgmma_query_kernel(const __grid_constant__ apa_cuda_job job)
{
#ifdef APA_CUDA_BULK
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
    const float c_exponent = power_of_two(job.c); /* so that FP16 holds what is left, between 4 and 8 */
    const float c_rounded = __half2float(__float2half_rn(CODES_PER_OCTAVE * (job.c / c_exponent)));
    const double change = CODES_PER_OCTAVE * job.c_exact / (static_cast<double>(c_rounded) * c_exponent);
    float mean[E];
#pragma unroll
    for (int i = 0; i < E; i++)
        mean[i] = job.k_mean[static_cast<int64_t>(unit.head) * D + lane * E + i];
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        const int r = turn * 8 + threadIdx.x / 32, d = lane * E;
        const Row row = row_of(job, unit, group * 16 + r);
        float x[E] = {}, amax = 0.0f, square = 0.0f;
        double dot = 0.0;
        bool finite = true;
#pragma unroll
        for (int i = 0; i < E; i += 2) {
            uint32_t raw = 0;
            if (row.real)
                raw = *reinterpret_cast<const uint32_t *>(
                    row_pointer<uint16_t>(job.q, unit.head / job.Hkv, row.head, row.position) + d + i);
            raw ^= job.negate ? 0x80008000u : 0u;
            finite = finite && finite_pair(raw, job.bf16);
            const float2 two = widen_pair(raw, job.bf16);
            x[i] = two.x;
            x[i + 1] = two.y;
            const int d16 = (d + i) % 16; /* fragment order of 16-bit A operands */
            *reinterpret_cast<uint32_t *>(halves + ((d + i) / 16 * 32 + r % 8 * 4 + d16 % 8 / 2) * 8 +
                                          (d16 / 8 * 2 + r / 8) * 2) = raw;
        }
        finite = row_finite<32>(finite);
#pragma unroll
        for (int i = 0; i < E; i++) {
            dot += static_cast<double>(x[i]) * static_cast<double>(mean[i]);
            x[i] = finite ? static_cast<float>(static_cast<double>(x[i]) * change) : 0.0f;
            amax = fmaxf(amax, fabsf(x[i]));
            square = fmaf(x[i], x[i], square);
        }
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            dot += __shfl_xor_sync(0xffffffffu, dot, m);
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, m));
            square += __shfl_xor_sync(0xffffffffu, square, m);
        }
        const float scale = power_of_two(amax * (1.0f / QK_LARGEST)), inverse = 1.0f / scale;
#pragma unroll
        for (int i = 0; i < E; i += 2) { /* fragment order of 8-bit A operands */
            const int d32 = (d + i) % 32;
            *reinterpret_cast<uint16_t *>(codes + ((d + i) / 32 * 32 + r % 8 * 4 + d32 % 16 / 4) * 16 +
                                          (d32 / 16 * 2 + r / 8) * 4 + d32 % 4) =
                static_cast<uint16_t>(pack_e4m3(x[i] * inverse, x[i + 1] * inverse));
        }
        if (lane == 0) {
            const int64_t at = unit.local * APA_CUDA_UNIT + group * 16 + r;
            const int sees = row.first < row.end ? (row.end - 1) / APA_CUDA_TILE - row.first / APA_CUDA_TILE + 1 : 0;
            const double shift = dot * job.c_exact;
            job.q_scale[at] = c_rounded * c_exponent * scale;
            job.shift[at] = isfinite(shift) ? static_cast<float>(shift) : 0.0f;
            const float largest = job.c * sqrtf(square) * sqrtf(job.k_scale_max[unit.head]);
            if (sees > 0 && (!finite || !(largest <= SCORE_LIMIT)))
                unjudged = 1;
            if (sees > job.early_tiles)
                many = 1;
        }
    }
    __syncthreads();
    const int64_t at = unit.local * APA_CUDA_UNIT_GROUPS + group;
    for (int i = threadIdx.x; i < D; i += PREP_THREADS)
        reinterpret_cast<uint4 *>(job.q_codes + at * 16 * D)[i] = reinterpret_cast<const uint4 *>(codes)[i];
    for (int i = threadIdx.x; i < 2 * D; i += PREP_THREADS)
        reinterpret_cast<uint4 *>(job.q16 + at * 32 * D)[i] = reinterpret_cast<const uint4 *>(halves)[i];
    if (threadIdx.x == 0)
        job.all_hot[at] = static_cast<uint8_t>(unjudged != 0 || (job.early_tiles > 0 && many == 0));
#endif
}

template <int D> static int launch_keys(const apa_cuda_job *job, cudaStream_t stream)
{
    const int heads = job->B * job->Hkv;
    const int64_t parts = apa_wgmma_sum_parts(job->tiles), pairs = (job->tiles + 1) / 2 - job->first_tile / 2;
    cudaError_t error = cudaSuccess;
    if (job->first_tile == 0) /* else it holds the maximum of the pairs that are there */
        error = cudaMemsetAsync(job->k_scale_max, 0, sizeof(float) * static_cast<size_t>(heads), stream);
    if (error == cudaSuccess && !job->smooth)
        error = cudaMemsetAsync(job->k_mean, 0, sizeof(float) * static_cast<size_t>(heads) * D, stream);
    if (error != cudaSuccess)
        return error;
    if (job->smooth && !job->mean_given) {
        wgmma_sum_kernel<D><<<static_cast<unsigned>(heads * parts), PREP_THREADS, 0, stream>>>(*job);
        wgmma_mean_kernel<D><<<static_cast<unsigned>(heads), D * MEAN_STRIPES, 0, stream>>>(*job);
    }
    if (pairs > 0)
        wgmma_pair_kernel<D><<<static_cast<unsigned>(heads * pairs), PREP_THREADS, 0, stream>>>(*job);
    return cudaGetLastError();
}

template <int D> static int launch_queries(const apa_cuda_job *job, cudaStream_t stream)
{
    wgmma_query_kernel<D>
        <<<static_cast<unsigned>(job->unit_count * APA_CUDA_UNIT_GROUPS), PREP_THREADS, 0, stream>>>(*job);
    return cudaGetLastError();
}

extern "C" int64_t apa_wgmma_sum_parts(int64_t tiles)
{
    return (tiles + SUM_TILES - 1) / SUM_TILES;
}

extern "C" int apa_wgmma_launch_prep_keys(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    return job->D == 64 ? launch_keys<64>(job, stream) : launch_keys<128>(job, stream);
}

extern "C" int apa_wgmma_launch_prep_queries(const apa_cuda_job *job, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    return job->D == 64 ? launch_queries<64>(job, stream) : launch_queries<128>(job, stream);
}
