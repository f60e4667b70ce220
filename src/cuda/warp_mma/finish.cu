/* The end of a row: its partial states in one frame, the quotient, the output. A warp a row; parts in a fixed order. */
#include "cuda/chain.cuh"
#include "cuda/warp_mma/store.cuh"

constexpr int FINISH_THREADS = 256;

struct Part {
    const float *o;
    float frame, sum;
};

/* Part number i of a row, cold (or exact) splits first, then hot ones. A cold frame becomes a raw one. */
template <int D>
__device__ __forceinline__ Part part_of(const apa_cuda_job &job, int adaptive, int64_t unit_local, int r, int i)
{
    Part part;
    if (i < job.splits) {
        const int64_t at = (i * job.unit_count + unit_local) * APA_CUDA_UNIT + r;
        part.o = job.part_o + at * D;
        part.frame = job.part_frame[at];
        part.sum = job.part_sum[at];
        if (adaptive && job.all_hot[unit_local * APA_CUDA_UNIT_GROUPS + r / 16] != 0)
            part.frame = -CUDART_INF_F;
        else if (adaptive)
            part.frame += job.shift[unit_local * APA_CUDA_UNIT + r];
        return part;
    }
    const int64_t at = ((i - job.splits) * job.unit_count + unit_local) * APA_CUDA_UNIT + r;
    part.o = job.hot_o + at * D;
    part.frame = job.hot_frame[at];
    part.sum = job.hot_sum[at];
    return part;
}

template <int D>
static __global__ void __launch_bounds__(FINISH_THREADS)
    finish_kernel(const __grid_constant__ apa_cuda_job job, int adaptive)
{
    chain_go();
    const int lane = threadIdx.x & 31;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (FINISH_THREADS / 32) + threadIdx.x / 32;
    Unit unit;
    unit.local = index / APA_CUDA_UNIT;
    unit.index = unit.local + job.unit_first;
    unit.head = static_cast<int>(unit.index / job.units);
    unit.number = static_cast<int>(unit.index % job.units);
    const int r = static_cast<int>(index % APA_CUDA_UNIT), parts = job.splits + (adaptive ? job.hot_splits : 0);
    const Row row = row_of(job, unit, r);
    chain_wait();
    if (!row.real || (adaptive != 0 && is_early(job, unit)) ||
        (adaptive != 0 && job.again != 0 && job.list_count[unit.local * 2 + 1] == 0))
        return;
    float frame = -CUDART_INF_F;
    for (int i = 0; i < parts; i++) {
        const Part part = part_of<D>(job, adaptive, unit.local, r, i);
        frame = part.frame > frame || isnan(part.frame) ? part.frame : frame;
    }
    float sum = 0.0f, o[D / 32] = {};
    for (int i = 0; i < parts; i++) {
        const Part part = part_of<D>(job, adaptive, unit.local, r, i);
        /* A part without a frame saw nothing, or only non-finite numbers: those count as they are. */
        const bool seen = part.frame != -CUDART_INF_F;
        if (!seen && i < job.splits && adaptive)
            continue;
        const float weight = seen ? exp2f(part.frame - frame) : 1.0f;
        sum += part.sum * weight;
#pragma unroll
        for (int c = 0; c < D / 64; c++) {
            const float2 x = *reinterpret_cast<const float2 *>(part.o + c * 64 + lane * 2);
            o[2 * c] += x.x * weight;
            o[2 * c + 1] += x.y * weight;
        }
    }
    const int b = unit.head / job.Hkv;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int64_t at = b * job.out.stride[0] + row.head * job.out.stride[1] + row.position * job.out.stride[2];
#pragma unroll
    for (int c = 0; c < D / 64; c++)
        store_pair(job.out, at + c * 64 + lane * 2, o[2 * c] * inverse, o[2 * c + 1] * inverse);
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
