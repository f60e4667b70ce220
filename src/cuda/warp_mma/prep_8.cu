/* Prep in 8 bits: tiles and queries in INT8 or E4M3, with fine or coarse scales. */
#include "cuda/warp_mma/prep.cuh"

constexpr float INT8_AMAX_MIN =
    0x1.fcp-120f; /* below it a scale would be subnormal: all codes 0 (src/formats/formats.h) */
constexpr float E4M3_MOST = 448.0f;

/* What shares a scale, by its largest value. INT8: code = round(x·(127 / amax)); adding 1.5·2^23 rounds to nearest,
 * ties to even, as rintf() does; |x|·(127/amax) cannot round beyond 127. E4M3: code nearest to x / scale. */
template <int CODES> struct Quantiser {
    float scale, factor; /* INT8: factor = 127 / amax */

    __device__ explicit Quantiser(float amax)
    {
        if (CODES == APA_CUDA_E4M3_CODES) {
            scale = factor = fmaxf(__fdiv_rn(amax, E4M3_MOST), FLT_MIN);
        } else {
            const bool zero = amax < INT8_AMAX_MIN;
            factor = zero ? 0.0f : __fdiv_rn(127.0f, amax);
            scale = zero ? 0.0f : __fdiv_rn(amax, 127.0f);
        }
    }
    /* in the low byte */
    __device__ uint32_t code(float x) const
    {
        if (CODES == APA_CUDA_E4M3_CODES)
            return pack_e4m3(__fdiv_rn(x, factor), 0.0f);
        return __float_as_uint(__fadd_rn(__fmul_rn(x, factor), MAGIC));
    }
};

/* The tiles of a KV head that are prepared in one launch: those that are not there yet, or tile 0 and a window. */
__host__ __device__ __forceinline__ int fresh_tiles(const apa_cuda_job &job)
{
    const int behind = job.tiles - job.window_first;
    return job.windowed ? 1 + (behind < job.held - 1 ? behind : job.held - 1) : job.tiles - job.first_tile;
}

__device__ __forceinline__ int fresh_tile(const apa_cuda_job &job, int i)
{
    return !job.windowed ? job.first_tile + i : i == 0 ? 0 : job.window_first + i - 1;
}

/* K half of a tile's blob: 8 lanes a key. Sets the tile's flag if a key is not finite. */
template <typename T>
static __global__ void __launch_bounds__(PREP_THREADS) keys_kernel(const __grid_constant__ apa_cuda_job job)
{
    constexpr int D = T::D, E = D / 8, KEYS = PREP_THREADS / 8, TURNS = APA_CUDA_TILE / KEYS;
    constexpr int CODES = T::QK_E4M3 ? APA_CUDA_E4M3_CODES : APA_CUDA_INT8_CODES;
    __shared__ __align__(16) uint8_t codes[64 * D];
    __shared__ float scales[APA_CUDA_TILE];
    __shared__ int shared_amax[4];
    const int fresh = fresh_tiles(job), sub = threadIdx.x & 7;
    const int head = blockIdx.x / fresh, tile = fresh_tile(job, blockIdx.x % fresh);
    const int64_t place = static_cast<int64_t>(head) * job.room + tile;
    uint8_t *blob = job.blob + apa_cuda_blob_slot(&job, head, tile) * T::BYTES;
    float mean[E], x[TURNS][E], amax[TURNS];
    bool finite = true;
    if (threadIdx.x < 4)
        shared_amax[threadIdx.x] = 0;
    __syncthreads();
    load_mean<D, E>(mean, job, head, sub * E);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int key = turn * KEYS + threadIdx.x / 8;
        finite =
            prepared_key<D, E>(x[turn], job, head, static_cast<int64_t>(tile) * APA_CUDA_TILE + key, sub * E, mean) &&
            finite;
        amax[turn] = row_amax<D, E>(x[turn]);
        if (!T::FINE && sub == 0)
            atomicMax(&shared_amax[key % 8 / 2], __float_as_int(amax[turn]));
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int key = turn * KEYS + threadIdx.x / 8;
        const Quantiser<CODES> quantiser(T::FINE ? amax[turn] : __int_as_float(shared_amax[key % 8 / 2]));
        if (sub == 0)
            scales[key] = quantiser.scale;
#pragma unroll
        for (int i = 0; i < E; i += 4) {
            /* channel d of key: word (d / 32·4 + key / 16)·32 + key % 8·4 + d % 16 / 4, of these number key / 8 % 2·2 +
             * d % 32 / 16 */
            const int d = sub * E + i;
            *reinterpret_cast<uint32_t *>(codes + ((d / 32 * 4 + key / 16) * 32 + key % 8 * 4 + d % 16 / 4) * 16 +
                                          (key / 8 % 2 * 2 + d % 32 / 16) * 4) =
                low_bytes(quantiser.code(x[turn][i]), quantiser.code(x[turn][i + 1]), quantiser.code(x[turn][i + 2]),
                          quantiser.code(x[turn][i + 3]));
        }
    }
    finite = __syncthreads_and(finite);
    for (int i = threadIdx.x; i < 64 * D / 16; i += PREP_THREADS)
        reinterpret_cast<uint4 *>(blob + T::K)[i] = reinterpret_cast<const uint4 *>(codes)[i];
    if (threadIdx.x < 32) {
        const float a = scales[threadIdx.x * 2], b = scales[threadIdx.x * 2 + 1];
        /* bits of floats that are not negative rise with them */
        const int most = __reduce_max_sync(0xffffffffu, __float_as_int(fmaxf(a, b)));
        if (threadIdx.x == 0)
            atomicMax(reinterpret_cast<int *>(job.k_scale_max) + head, most);
        if (T::FINE) /* pair 8n + t of neighbouring keys: [n / 2][t][n % 2] */
            reinterpret_cast<float2 *>(
                blob + T::K_SCALE)[threadIdx.x / 8 * 8 + threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2] = make_float2(a, b);
        else if (threadIdx.x < 4)
            reinterpret_cast<float *>(blob + T::K_SCALE)[threadIdx.x] = a;
    }
    if (threadIdx.x == 0 && !finite) {
        *reinterpret_cast<uint32_t *>(blob + T::FLAG) = 1;
        job.poisoned[place] = 1;
    }
}

/* V half of a tile's blob, and its flag: a thread a channel and a part of the keys. Values that are not finite count as
 * 0. */
template <typename T> __device__ __forceinline__ void values_of_tile(const apa_cuda_job &job, int head, int tile)
{
    constexpr int D = T::D, PARTS = PREP_THREADS / D;
    constexpr int WORDS = 4 / PARTS; /* a word: 4 codes for each of 4 lanes, so 16 keys */
    constexpr int CODES = T::PV_E4M3 ? APA_CUDA_E4M3_CODES : APA_CUDA_INT8_CODES;
    __shared__ __align__(16) uint16_t rows[APA_CUDA_TILE * D];
    __shared__ int bad[APA_CUDA_TILE];
    __shared__ float most[PARTS][D];
    const int64_t place = static_cast<int64_t>(head) * job.room + tile;
    uint8_t *blob = job.blob + apa_cuda_blob_slot(&job, head, tile) * T::BYTES;
    stage_rows<D, PREP_THREADS>(rows, bad, job.v, head / job.Hkv, head % job.Hkv, tile, job.Skv, job.bf16);
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
    if (T::FINE) {
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            amax = fmaxf(amax, most[i][c]);
    } else {
        amax = job.v_amax[static_cast<int64_t>(head) * D + c];
    }
    const Quantiser<CODES> quantiser(amax);
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
                code[i] = quantiser.code(x[w * 16 + i / 2 * 8 + t * 2 + i % 2]);
            codes[(c * 4 + (t ^ (c / 2 & 3))) * 4 + part * WORDS + w] = low_bytes(code[0], code[1], code[2], code[3]);
        }
    if (T::FINE && part == 0)
        reinterpret_cast<float *>(blob + T::V_SCALE)[c / 16 * 16 + c % 8 / 2 * 4 + c / 8 % 2 * 2 + c % 2] =
            quantiser.scale;
    if (!T::FINE && part == 0 && tile == 0)
        job.v_scale[static_cast<int64_t>(head) * D + c] = quantiser.scale;
    bool finite = true;
    if (threadIdx.x < APA_CUDA_TILE)
        finite = bad[threadIdx.x] == 0 || tile * APA_CUDA_TILE + static_cast<int>(threadIdx.x) >= job.Skv;
    finite = __syncthreads_and(finite);
    for (int i = threadIdx.x; i < 64 * D / 16; i += PREP_THREADS)
        reinterpret_cast<uint4 *>(blob + T::V)[i] = reinterpret_cast<const uint4 *>(codes)[i ^ (i / 8 & 3)];
    if (threadIdx.x == 0) {
        *reinterpret_cast<uint4 *>(blob + T::FLAG) = make_uint4(!finite, 0, 0, 0);
        job.poisoned[place] = !finite;
    }
}

/* The first blocks make the means, one a head, the others the V halves of the tiles: neither needs the other, and the
 * long chains of the first run under the second. */
template <typename T>
static __global__ void __launch_bounds__(PREP_THREADS)
    values_kernel(const __grid_constant__ apa_cuda_job job, int means)
{
    if (static_cast<int>(blockIdx.x) < means) {
        mean_of_head<T::D>(job, blockIdx.x);
        return;
    }
    const int at = blockIdx.x - means, fresh = fresh_tiles(job);
    values_of_tile<T>(job, at / fresh, fresh_tile(job, at % fresh));
}

/* INT8 scores are within about so much of the truth at worst: half a step of one factor times the norm of the other,
 * both ways, |k| <= √D·max|k|. Where that can exceed this many log2 units, estimates say nothing about mass
 * (src/reference/walk.c). */
constexpr double SCORE_ERROR_MAX = 32.0;

/* Largest value among the queries that share a scale: positions equal modulo 8 within 32 of one head. */
template <int D>
__device__ __forceinline__ float shared_query_amax(const apa_cuda_job &job, int b, const Row &row, float own)
{
    for (int position = row.position / 32 * 32 + row.position % 8; position < min(row.position / 32 * 32 + 32, job.Sq);
         position += 8) {
        if (position == row.position)
            continue;
        float x[D / 32];
        uint16_t raw[D / 32];
        prepared_query<D>(x, raw, job, b, row.head, position);
        own = fmaxf(own, row_amax<D, D / 32>(x));
    }
    return own;
}

/* A block a group of 16 rows: codes, scales, shifts, and whether the group is hot throughout. */
template <typename T>
static __global__ void __launch_bounds__(PREP_THREADS) query_kernel(const __grid_constant__ apa_cuda_job job)
{
    constexpr int D = T::D, E = D / 32;
    constexpr int CODES = T::QK_E4M3 ? APA_CUDA_E4M3_CODES : APA_CUDA_INT8_CODES;
    __shared__ __align__(16) QueryGroup<D> group;
    __shared__ __align__(16) uint8_t codes[16 * D];
    const int lane = threadIdx.x & 31, number = blockIdx.x % APA_CUDA_UNIT_GROUPS;
    const Unit unit = unit_at(job, blockIdx.x / APA_CUDA_UNIT_GROUPS);
    const int b = unit.head / job.Hkv;
    if (threadIdx.x == 0)
        group.unjudged = group.many = 0;
    float mean[E];
    load_mean<D, E>(mean, job, unit.head, lane * E);
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < 16; r += PREP_THREADS / 32) {
        const Row row = row_of(job, unit, number * 16 + r);
        uint16_t raw[E] = {};
        float x[E] = {}, amax = 0.0f;
        bool finite = true;
        if (row.real) {
            finite = prepared_query<D>(x, raw, job, b, row.head, row.position);
            amax = row_amax<D, E>(x);
            if (!T::FINE)
                amax = shared_query_amax<D>(job, b, row, amax);
        }
        const double shift = dot_mean<D>(job, raw, mean) * job.c_exact;
        const Quantiser<CODES> quantiser(amax);
        uint32_t code[E];
        int squares = 0;
#pragma unroll
        for (int i = 0; i < E; i++) {
            code[i] = quantiser.code(x[i]);
            const int value = static_cast<int8_t>(code[i] & 0xff);
            squares += value * value;
        }
        squares = __reduce_add_sync(0xffffffffu, squares);
        const int sees = tiles_seen(row.first, row.end);
        if (lane == 0) {
            const int64_t at = unit.local * APA_CUDA_UNIT + number * 16 + r;
            const double scale = static_cast<double>(quantiser.scale);
            job.q_scale[at] = fmaxf(static_cast<float>(scale * job.c_exact), FLT_MIN);
            job.shift[at] = isfinite(shift) ? static_cast<float>(shift) : 0.0f;
            const double worst =
                T::QK_E4M3 ? 0.0
                           : scale * (127.0 * sqrt(static_cast<double>(D)) + sqrt(static_cast<double>(squares))) *
                                 static_cast<double>(job.k_scale_max[unit.head]) * job.c_exact;
            if (sees > 0 && (!finite || (job.judged && worst > SCORE_ERROR_MAX)))
                group.unjudged = 1;
            if (sees > job.early_tiles)
                group.many = 1;
        }
        keep_halves<D>(group.halves, raw, r);
#pragma unroll
        for (int i = 0; i < E; i += 2) { /* pairs of neighbouring channels */
            const int d = lane * E + i, d8 = d % 32;
            *reinterpret_cast<uint16_t *>(codes + (d / 32 * 32 + r % 8 * 4 + d8 % 16 / 4) * 16 +
                                          (d8 / 16 * 2 + r / 8) * 4 + d8 % 4) =
                static_cast<uint16_t>((code[i] & 0xff) | (code[i + 1] & 0xff) << 8);
        }
    }
    __syncthreads();
    const int64_t at = unit.local * APA_CUDA_UNIT_GROUPS + number;
    for (int i = threadIdx.x; i < D; i += PREP_THREADS)
        reinterpret_cast<uint4 *>(job.q_codes + at * 16 * D)[i] = reinterpret_cast<const uint4 *>(codes)[i];
    for (int i = threadIdx.x; i < 2 * D; i += PREP_THREADS)
        reinterpret_cast<uint4 *>(job.q16 + at * 32 * D)[i] = reinterpret_cast<const uint4 *>(group.halves)[i];
    if (threadIdx.x == 0)
        job.all_hot[at] = static_cast<uint8_t>(group.unjudged != 0 || (job.early_tiles > 0 && group.many == 0));
}

template <typename T> static int launch_keys(const apa_cuda_job *job, cudaStream_t stream)
{
    const int heads = job->B * job->Hkv, blocks = heads * fresh_tiles(*job);
    const int means = job->smooth && !job->mean_given && !job->statistics_given ? heads : 0;
    if (blocks + means > 0)
        values_kernel<T><<<static_cast<unsigned>(blocks + means), PREP_THREADS, 0, stream>>>(*job, means);
    if (blocks > 0)
        keys_kernel<T><<<static_cast<unsigned>(blocks), PREP_THREADS, 0, stream>>>(*job);
    return cudaGetLastError();
}

template <typename T> static int launch_queries(const apa_cuda_job *job, cudaStream_t stream)
{
    query_kernel<T><<<static_cast<unsigned>(job->unit_count * APA_CUDA_UNIT_GROUPS), PREP_THREADS, 0, stream>>>(*job);
    return cudaGetLastError();
}

template <int D> static int keys_of_trait(const apa_cuda_job *job, cudaStream_t stream)
{
    switch (job->trait) {
    case APA_CUDA_INT8_FINE:
        return launch_keys<Cold8<D, APA_CUDA_INT8_CODES, APA_CUDA_INT8_CODES, true>>(job, stream);
    case APA_CUDA_INT8:
        return launch_keys<Cold8<D, APA_CUDA_INT8_CODES, APA_CUDA_INT8_CODES, false>>(job, stream);
    case APA_CUDA_INT8_E4M3:
        return launch_keys<Cold8<D, APA_CUDA_INT8_CODES, APA_CUDA_E4M3_CODES, false>>(job, stream);
    default:
        return launch_keys<Cold8<D, APA_CUDA_E4M3_CODES, APA_CUDA_E4M3_CODES, false>>(job, stream);
    }
}

/* Queries know nothing of P·V. */
template <int D> static int queries_of_trait(const apa_cuda_job *job, cudaStream_t stream)
{
    switch (job->trait) {
    case APA_CUDA_INT8_FINE:
        return launch_queries<Cold8<D, APA_CUDA_INT8_CODES, APA_CUDA_INT8_CODES, true>>(job, stream);
    case APA_CUDA_E4M3:
        return launch_queries<Cold8<D, APA_CUDA_E4M3_CODES, APA_CUDA_E4M3_CODES, false>>(job, stream);
    default:
        return launch_queries<Cold8<D, APA_CUDA_INT8_CODES, APA_CUDA_INT8_CODES, false>>(job, stream);
    }
}

extern "C" int apa_cuda_keys_8(const apa_cuda_job *job, cudaStream_t stream)
{
    return job->D == 64    ? keys_of_trait<64>(job, stream)
           : job->D == 128 ? keys_of_trait<128>(job, stream)
                           : keys_of_trait<256>(job, stream);
}

extern "C" int apa_cuda_queries_8(const apa_cuda_job *job, cudaStream_t stream)
{
    return job->D == 64    ? queries_of_trait<64>(job, stream)
           : job->D == 128 ? queries_of_trait<128>(job, stream)
                           : queries_of_trait<256>(job, stream);
}
