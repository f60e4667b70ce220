/* The end of a row: its partial states in one frame, the quotient, the output. A warp a row; parts in a fixed order:
 * cold (or exact) splits first, then hot ones. A lane reads the frames and sums of a few parts, and sums of values are
 * on their way together. Hot parts of an empty piece of the list (hot.cu) were not written, and are left out. */
#include "cuda/chain.cuh"
#include "cuda/warp_mma/store.cuh"

constexpr int FINISH_THREADS = 256;
constexpr int PARTS_OF_LANE = 3; /* 64 splits and 8 hot ones at most */
constexpr int AHEAD = 4;         /* parts whose values are read at once */

/* One row's parts. */
struct RowParts {
    const apa_cuda_job &job;
    int64_t unit_local;
    int r, splits, hot;

    /* Row of the buffers that part i stands in. */
    __device__ int64_t at(int i) const
    {
        const int64_t piece = i < splits ? i : i - splits;
        return (piece * job.unit_count + unit_local) * APA_CUDA_UNIT + r;
    }
    __device__ const float *o(int i) const
    {
        return (i < splits ? job.part_o : job.hot_o) + at(i) * job.D;
    }
    __device__ int count() const
    {
        return splits + hot;
    }
};

/* Hot parts of a unit that hold some of its list. */
__device__ __forceinline__ int hot_parts(const apa_cuda_job &job, int64_t unit_local)
{
    const int count = job.list_count[unit_local * 2], part = (count + job.hot_splits - 1) / job.hot_splits;
    return count == 0 ? 0 : (count + part - 1) / part;
}

/* RUN neighbouring output elements, two or four, each rounded once. */
template <int RUN>
__device__ __forceinline__ void store_run(const apa_cuda_tensor &out, int64_t at, const float *x, bool aligned)
{
    if (RUN == 2 || !aligned) {
#pragma unroll
        for (int i = 0; i < RUN; i += 2)
            store_pair(out, at + i, x[i], x[i + 1]);
    } else if (out.dtype == APA_DTYPE_F32) {
        *reinterpret_cast<float4 *>(static_cast<float *>(out.data) + at) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
        const bool bf16 = out.dtype == APA_DTYPE_BF16;
        *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(out.data) + at) =
            make_uint2(bf16 ? pack_16<true>(x[0], x[1]) : pack_16<false>(x[0], x[1]),
                       bf16 ? pack_16<true>(x[2], x[3]) : pack_16<false>(x[2], x[3]));
    }
}

template <int D>
static __global__ void __launch_bounds__(FINISH_THREADS)
    finish_kernel(const __grid_constant__ apa_cuda_job job, int adaptive)
{
    chain_go();
    constexpr int E = D / 32; /* of a lane: neighbours, two or four */
    constexpr int RUN = E < 4 ? 2 : 4, RUNS = E / RUN;
    const int lane = threadIdx.x & 31;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (FINISH_THREADS / 32) + threadIdx.x / 32;
    const Unit unit = unit_at(job, index / APA_CUDA_UNIT);
    const int r = static_cast<int>(index % APA_CUDA_UNIT);
    const Row row = row_of(job, unit, r);
    chain_wait();
    if (!row.real || (adaptive != 0 && is_early(job, unit)) ||
        (adaptive != 0 && job.again != 0 && job.list_count[unit.local * 2 + 1] == 0))
        return;
    const RowParts parts = {job, unit.local, r, job.splits, adaptive != 0 ? hot_parts(job, unit.local) : 0};
    float frames[PARTS_OF_LANE], sums[PARTS_OF_LANE], frame = -CUDART_INF_F;
#pragma unroll
    for (int k = 0; k < PARTS_OF_LANE; k++) {
        const int i = k * 32 + lane;
        frames[k] = -CUDART_INF_F;
        sums[k] = 0.0f;
        if (i >= parts.count())
            continue;
        const bool cold = i < job.splits;
        frames[k] = (cold ? job.part_frame : job.hot_frame)[parts.at(i)];
        sums[k] = (cold ? job.part_sum : job.hot_sum)[parts.at(i)];
        if (cold && adaptive != 0) /* a cold frame becomes a raw one */
            frames[k] = job.all_hot[unit.local * APA_CUDA_UNIT_GROUPS + r / 16] != 0
                            ? -CUDART_INF_F
                            : frames[k] + job.shift[unit.local * APA_CUDA_UNIT + r];
        frame = frames[k] > frame || isnan(frames[k]) ? frames[k] : frame;
    }
#pragma unroll
    for (int m = 16; m > 0; m /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, frame, m);
        frame = other > frame || isnan(other) ? other : frame;
    }
    float sum = 0.0f, o[E] = {};
#pragma unroll
    for (int k = 0; k < PARTS_OF_LANE; k++) {
        /* A part without a frame saw nothing, or only non-finite numbers: those count as they are, in the exact parts.
         */
        const bool seen = frames[k] != -CUDART_INF_F, cold = k * 32 + lane < job.splits && adaptive != 0;
        const float weights = seen ? exp2f(frames[k] - frame) : 1.0f;
        const uint32_t taken = __ballot_sync(0xffffffffu, seen || !cold);
        const int n = min(32, parts.count() - k * 32);
#pragma unroll AHEAD
        for (int j = 0; j < n; j++) {
            const float weight = __shfl_sync(0xffffffffu, weights, j), part = __shfl_sync(0xffffffffu, sums[k], j);
            if ((taken >> j & 1) == 0)
                continue;
            sum += part * weight;
            const float *from = parts.o(k * 32 + j) + lane * RUN;
#pragma unroll
            for (int c = 0; c < RUNS; c++) {
                float x[RUN];
                if constexpr (RUN == 4) {
                    const float4 four = *reinterpret_cast<const float4 *>(from + c * 32 * RUN);
                    x[0] = four.x;
                    x[1] = four.y;
                    x[2] = four.z;
                    x[3] = four.w;
                } else {
                    const float2 two = *reinterpret_cast<const float2 *>(from + c * 32 * RUN);
                    x[0] = two.x;
                    x[1] = two.y;
                }
#pragma unroll
                for (int i = 0; i < RUN; i++)
                    o[c * RUN + i] += x[i] * weight;
            }
        }
    }
    const int b = unit.head / job.Hkv;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int64_t at = b * job.out.stride[0] + row.head * job.out.stride[1] + row.position * job.out.stride[2];
    const bool aligned = is_aligned(job.out);
#pragma unroll
    for (int i = 0; i < E; i++)
        o[i] *= inverse;
#pragma unroll
    for (int c = 0; c < RUNS; c++)
        store_run<RUN>(job.out, at + c * 32 * RUN + lane * RUN, o + c * RUN, aligned);
    if (lane == 0)
        store_lse(job.lse, b, row.head, row.position, frame, sum);
}

template <int D> static int launch(const apa_cuda_job *job, int adaptive, cudaStream_t stream)
{
    const int64_t blocks = job->unit_count * APA_CUDA_UNIT / (FINISH_THREADS / 32);
    return launch_chained(job->chained, finish_kernel<D>, blocks, FINISH_THREADS, 0, stream, *job, adaptive);
}

extern "C" int apa_cuda_launch_finish(const apa_cuda_job *job, int adaptive, void *stream_pointer)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
    return job->D == 64    ? launch<64>(job, adaptive, stream)
           : job->D == 128 ? launch<128>(job, adaptive, stream)
                           : launch<256>(job, adaptive, stream);
}
