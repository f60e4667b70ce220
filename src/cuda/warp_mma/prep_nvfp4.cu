/* Prep in NVFP4: maxima and scales of the heads, tiles, queries in two terms. A block of 16 values is one thread's: its
 * scale is searched as apa_nvfp4_block() does (src/formats/blocks.c), by the same single operations in the same order.
 */
#include "cuda/warp_mma/prep.cuh"

constexpr float NVFP4_RANGE = 2688.0f; /* 6·448 */
constexpr double NVFP4_HEADROOM = 4.0; /* tensor_scale=pow2 */

/* Codes of a block: element i in bits 4i … of code[i / 8]. */
struct Nvfp4Block {
    uint32_t code[2], scale;
};

__device__ __forceinline__ float e2m1_value(uint32_t magnitude)
{
    /* 0, .5, 1, 1.5, 2, 3, 4, 6: the bits of FP16 times 2^-14 */
    return magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                         : __uint_as_float((magnitude << 22) + ((127u - 1u) << 23));
}

/* Codes at one scale and their squared error. Thresholds midpoint·scale and decoded values are exact. */
__device__ __forceinline__ float round_trip(const float (&value)[16], float scale, uint32_t (&code)[2])
{
    const float middle[7] = {0.25f * scale, 0.75f * scale, 1.25f * scale, 1.75f * scale,
                             2.5f * scale,  3.5f * scale,  5.0f * scale};
    float error = 0.0f;
    code[0] = code[1] = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float a = fabsf(value[i]);
        uint32_t c = 0;
#pragma unroll
        for (int j = 0; j < 7; j++)
            c += j % 2 != 0 ? a >= middle[j] : a > middle[j];
        const float difference = __fsub_rn(a, __fmul_rn(e2m1_value(c), scale));
        error = __fadd_rn(error, __fmul_rn(difference, difference));
        code[i / 8] |= (c | (__float_as_uint(value[i]) >> 31 << 3)) << (i % 8 * 4);
    }
    return error;
}

static __device__ __noinline__ Nvfp4Block quantise_block(const float (&value)[16], int search)
{
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++)
        amax = fmaxf(amax, fabsf(value[i]));
    Nvfp4Block best = {{0, 0}, 0};
    if (amax == 0.0f)
        return best;
    const int nearest = static_cast<int>(ue4m3_nearest(__fdiv_rn(amax, 6.0f)));
    float least = 0.0f;
#pragma unroll 1
    for (int k = 0; k < (search != 0 ? 8 : 1); k++) {
        const int offset = k < 4 ? (k == 0 ? 0 : k == 1 ? -1 : k == 2 ? 1 : -2) : k - 1; /* 0 -1 +1 -2 +3 +4 +5 +6 */
        const int trial = min(max(nearest + offset, 1), 126);
        uint32_t code[2];
        const float error = round_trip(value, ue4m3_value(trial), code);
        if (k == 0 || error < least) {
            least = error;
            best.scale = trial;
            best.code[0] = code[0];
            best.code[1] = code[1];
        }
    }
    return best;
}

/* ---- heads ---- */

/* Largest |x| of the prepared keys, 8 lanes a key. */
template <int D>
static __global__ void __launch_bounds__(PREP_THREADS) maxima_kernel(const __grid_constant__ apa_cuda_job job)
{
    constexpr int E = D / 8, KEYS = PREP_THREADS / 8;
    const int head = blockIdx.x / job.tiles, tile = blockIdx.x % job.tiles, sub = threadIdx.x & 7;
    float mean[E], x[E], amax = 0.0f;
    load_mean<D, E>(mean, job, head, sub * E);
    for (int turn = 0; turn < APA_CUDA_TILE / KEYS; turn++) {
        prepared_key<D, E>(x, job, head, static_cast<int64_t>(tile) * APA_CUDA_TILE + turn * KEYS + threadIdx.x / 8,
                           sub * E, mean);
        amax = fmaxf(amax, row_amax<D, E>(x));
    }
    const int most = __reduce_max_sync(0xffffffffu, __float_as_int(amax));
    if ((threadIdx.x & 31) == 0)
        atomicMax(reinterpret_cast<int *>(job.k_amax) + head, most);
}

/* 4·amax / 2688 up to a power of two, at least the smallest normal float. */
__device__ __forceinline__ float head_scale(float amax)
{
    const double need = NVFP4_HEADROOM * static_cast<double>(amax) / static_cast<double>(NVFP4_RANGE);
    if (need <= static_cast<double>(FLT_MIN))
        return FLT_MIN;
    const int exponent = ilogb(need);
    return static_cast<float>(ldexp(1.0, ldexp(1.0, exponent) == need ? exponent : exponent + 1));
}

/* Maxima → scales: K's in place, V's for every channel. A block a head. */
template <int D> static __global__ void scales_kernel(const __grid_constant__ apa_cuda_job job)
{
    __shared__ int most;
    if (threadIdx.x == 0)
        most = 0;
    __syncthreads();
    const int64_t at = static_cast<int64_t>(blockIdx.x) * D;
    for (int d = threadIdx.x; d < D; d += blockDim.x)
        atomicMax(&most, __float_as_int(job.v_amax[at + d]));
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += blockDim.x)
        job.v_scale[at + d] = head_scale(__int_as_float(most));
    if (threadIdx.x == 0)
        job.k_amax[blockIdx.x] = head_scale(job.k_amax[blockIdx.x]);
}

/* ---- tiles ---- */

template <int D> __device__ __forceinline__ void values_of_tile(const apa_cuda_job &job, int head, int tile)
{
    using T = ColdNvfp4<D>;
    __shared__ __align__(16) uint16_t rows[APA_CUDA_TILE * D];
    __shared__ int bad[APA_CUDA_TILE];
    uint8_t *blob = job.blob + (static_cast<int64_t>(head) * job.tiles + tile) * T::BYTES;
    stage_rows<D, PREP_THREADS>(rows, bad, job.v, head / job.Hkv, head % job.Hkv, tile, job.Skv, job.bf16);
    const float scale = job.v_scale[static_cast<int64_t>(head) * D];
    for (int task = threadIdx.x; task < 4 * D; task += PREP_THREADS) {
        const int c = task % D, group = task / D, g = c % 8, n = c / 8; /* keys 16·group … of channel c */
        float value[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int key = group * 16 + i;
            value[i] = bad[key] != 0 ? 0.0f : __fdiv_rn(widen(rows[key * D + c], job.bf16), scale);
        }
        const Nvfp4Block block = quantise_block(value, job.search);
        /* keys 8t + 32·half … are word half of lane 4g + t */
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const int t = (group % 2) * 2 + part;
            *reinterpret_cast<uint32_t *>(blob + T::V + n / 2 * 512 + (4 * g + t) * 16 + n % 2 * 8 + group / 2 * 4) =
                block.code[part];
        }
        blob[T::V_SCALE + c / 64 * 256 + (4 * g + n % 4) * 8 + n % 8 / 4 * 4 + group] =
            static_cast<uint8_t>(block.scale);
    }
    bool finite = true;
    if (threadIdx.x < APA_CUDA_TILE)
        finite = bad[threadIdx.x] == 0 || tile * APA_CUDA_TILE + static_cast<int>(threadIdx.x) >= job.Skv;
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0)
        job.poisoned[static_cast<int64_t>(head) * job.tiles + tile] = !finite;
}

template <int D>
static __global__ void __launch_bounds__(PREP_THREADS) values_kernel(const __grid_constant__ apa_cuda_job job)
{
    values_of_tile<D>(job, blockIdx.x / job.tiles, blockIdx.x % job.tiles);
}

template <int D>
static __global__ void __launch_bounds__(PREP_THREADS) means_kernel(const __grid_constant__ apa_cuda_job job)
{
    mean_of_head<D>(job, blockIdx.x);
}

template <int D>
static __global__ void __launch_bounds__(PREP_THREADS) keys_kernel(const __grid_constant__ apa_cuda_job job)
{
    using T = ColdNvfp4<D>;
    constexpr int E = D / 8, KEYS = PREP_THREADS / 8, BLOCKS = D / 16;
    __shared__ float rows[KEYS][D + 1];
    const int head = blockIdx.x / job.tiles, tile = blockIdx.x % job.tiles, sub = threadIdx.x & 7;
    uint8_t *blob = job.blob + static_cast<int64_t>(blockIdx.x) * T::BYTES;
    const float scale = job.k_amax[head];
    float mean[E], x[E];
    bool finite = true;
    load_mean<D, E>(mean, job, head, sub * E);
    for (int turn = 0; turn < APA_CUDA_TILE / KEYS; turn++) {
        const int first = turn * KEYS, own = threadIdx.x / 8;
        finite =
            prepared_key<D, E>(x, job, head, static_cast<int64_t>(tile) * APA_CUDA_TILE + first + own, sub * E, mean) &&
            finite;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < E; i++)
            rows[own][sub * E + i] = __fdiv_rn(x[i], scale);
        __syncthreads();
        for (int task = threadIdx.x; task < KEYS * BLOCKS; task += PREP_THREADS) {
            const int row = task % KEYS, d16 = task / KEYS, key = first + row;
            float value[16];
#pragma unroll
            for (int i = 0; i < 16; i++)
                value[i] = rows[row][d16 * 16 + i];
            const Nvfp4Block block = quantise_block(value, job.search);
            /* column of the key: the inverse of KeysForNvfp4::of() */
            const int n = key / 32 * 4 + key % 8 / 2, g = key / 16 % 2 * 4 + key / 8 % 2 * 2 + key % 2;
            const int step = d16 / 4, in_step = d16 % 4; /* channels 16·in_step … of the step */
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const int t = in_step % 2 * 2 + part;
                *reinterpret_cast<uint32_t *>(blob + T::K + (step * 4 + n / 2) * 512 + (4 * g + t) * 16 + n % 2 * 8 +
                                              in_step / 2 * 4) = block.code[part];
            }
            blob[T::K_SCALE + step * 256 + (4 * g + n % 4) * 8 + n / 4 * 4 + in_step] =
                static_cast<uint8_t>(block.scale);
        }
    }
    finite = __syncthreads_and(finite);
    if (threadIdx.x != 0)
        return;
    if (!finite)
        job.poisoned[blockIdx.x] = 1;
    if (!finite || job.poisoned[blockIdx.x] != 0)
        *reinterpret_cast<uint32_t *>(blob + T::K_SCALE) = 0xffffffffu;
}

/* ---- queries ---- */

/* A block a group of 16 rows. */
template <int D>
static __global__ void __launch_bounds__(PREP_THREADS) query_kernel(const __grid_constant__ apa_cuda_job job)
{
    using T = ColdNvfp4<D>;
    constexpr int E = D / 32, BLOCKS = D / 16;
    __shared__ __align__(16) QueryGroup<D> group;
    __shared__ __align__(16) uint8_t codes[T::Q_BYTES];
    __shared__ float rows[16][D + 1], row_scale[16];
    const int lane = threadIdx.x & 31, number = blockIdx.x % APA_CUDA_UNIT_GROUPS;
    const Unit unit = unit_at(job, blockIdx.x / APA_CUDA_UNIT_GROUPS);
    const float k_scale = job.tiles > 0 ? job.k_amax[unit.head] : 1.0f;
    if (threadIdx.x == 0)
        group.unjudged = group.many = 0;
    for (int i = threadIdx.x; i < T::Q_BYTES / 4; i += PREP_THREADS)
        reinterpret_cast<uint32_t *>(codes)[i] = 0; /* places of scales that no depth step uses */
    float mean[E];
    load_mean<D, E>(mean, job, unit.head, lane * E);
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < 16; r += PREP_THREADS / 32) {
        const Row row = row_of(job, unit, number * 16 + r);
        uint16_t raw[E] = {};
        float x[E] = {};
        bool finite = true;
        if (row.real)
            finite = prepared_query<D>(x, raw, job, unit.head / job.Hkv, row.head, row.position);
        const double shift = dot_mean<D>(job, raw, mean) * job.c_exact;
        const float scale = fmaxf(__fdiv_rn(row_amax<D, E>(x), NVFP4_RANGE), FLT_MIN);
        const int sees = tiles_seen(row.first, row.end);
        if (lane == 0) {
            const int64_t at = unit.local * APA_CUDA_UNIT + number * 16 + r;
            const double both = static_cast<double>(scale) * static_cast<double>(k_scale) * job.c_exact;
            job.q_scale[at] = fmaxf(static_cast<float>(both), FLT_MIN);
            job.shift[at] = isfinite(shift) ? static_cast<float>(shift) : 0.0f;
            row_scale[r] = scale;
            if (sees > 0 && !finite)
                group.unjudged = 1;
            if (sees > job.early_tiles)
                group.many = 1;
        }
        keep_halves<D>(group.halves, raw, r);
#pragma unroll
        for (int i = 0; i < E; i++)
            rows[r][lane * E + i] = x[i];
    }
    __syncthreads();
    for (int task = threadIdx.x; task < 16 * BLOCKS; task += PREP_THREADS) {
        const int r = task % 16, d16 = task / 16, g = r % 8, step = d16 / 4, in_step = d16 % 4;
        const float scale = row_scale[r];
        float rest[16];
#pragma unroll
        for (int i = 0; i < 16; i++)
            rest[i] = rows[r][d16 * 16 + i];
#pragma unroll 1
        for (int term = 0; term < 2; term++) {
            float value[16];
#pragma unroll
            for (int i = 0; i < 16; i++)
                value[i] = __fdiv_rn(rest[i], scale);
            const Nvfp4Block block = quantise_block(value, job.search);
            const float unit_scale = ue4m3_value(block.scale);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const uint32_t c = block.code[i / 8] >> (i % 8 * 4);
                const float units = ((c & 8) != 0 ? -1.0f : 1.0f) * e2m1_value(c & 7) * unit_scale;
                rest[i] = static_cast<float>(__dsub_rn(
                    static_cast<double>(rest[i]), __dmul_rn(static_cast<double>(scale), static_cast<double>(units))));
            }
            uint8_t *to = codes + term * T::TERM_BYTES;
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const int t = in_step % 2 * 2 + part;
                *reinterpret_cast<uint32_t *>(to + step * 512 + (4 * g + t) * 16 + (in_step / 2 * 2 + r / 8) * 4) =
                    block.code[part];
            }
            to[8 * D + step / 2 * 128 + (4 * g + step % 2 * 2 + r / 8) * 4 + in_step] =
                static_cast<uint8_t>(block.scale);
        }
    }
    __syncthreads();
    const int64_t at = unit.local * APA_CUDA_UNIT_GROUPS + number;
    for (int i = threadIdx.x; i < T::Q_BYTES / 16; i += PREP_THREADS)
        reinterpret_cast<uint4 *>(job.q_codes + at * T::Q_BYTES)[i] = reinterpret_cast<const uint4 *>(codes)[i];
    for (int i = threadIdx.x; i < 2 * D; i += PREP_THREADS)
        reinterpret_cast<uint4 *>(job.q16 + at * 32 * D)[i] = reinterpret_cast<const uint4 *>(group.halves)[i];
    if (threadIdx.x == 0)
        job.all_hot[at] = static_cast<uint8_t>(group.unjudged != 0 || (job.early_tiles > 0 && group.many == 0));
}

template <int D> static int launch_keys(const apa_cuda_job *job, cudaStream_t stream)
{
    const unsigned heads = static_cast<unsigned>(job->B * job->Hkv), blocks = heads * static_cast<unsigned>(job->tiles);
    if (job->smooth)
        means_kernel<D><<<heads, PREP_THREADS, 0, stream>>>(*job);
    maxima_kernel<D><<<blocks, PREP_THREADS, 0, stream>>>(*job);
    scales_kernel<D><<<heads, 128, 0, stream>>>(*job);
    values_kernel<D><<<blocks, PREP_THREADS, 0, stream>>>(*job);
    keys_kernel<D><<<blocks, PREP_THREADS, 0, stream>>>(*job);
    return cudaGetLastError();
}

extern "C" int apa_cuda_keys_nvfp4(const apa_cuda_job *job, cudaStream_t stream)
{
    return job->D == 64    ? launch_keys<64>(job, stream)
           : job->D == 128 ? launch_keys<128>(job, stream)
                           : launch_keys<256>(job, stream);
}

template <int D> static int launch_queries(const apa_cuda_job *job, cudaStream_t stream)
{
    query_kernel<D><<<static_cast<unsigned>(job->unit_count * APA_CUDA_UNIT_GROUPS), PREP_THREADS, 0, stream>>>(*job);
    return cudaGetLastError();
}

extern "C" int apa_cuda_queries_nvfp4(const apa_cuda_job *job, cudaStream_t stream)
{
    return job->D == 64    ? launch_queries<64>(job, stream)
           : job->D == 128 ? launch_queries<128>(job, stream)
                           : launch_queries<256>(job, stream);
}
