/* States of several ranks, merged on the device: a warp a row, lanes over channels.
 *
 * With M the largest lse, w_r = exp(lse_r - M): o = Σ w_r·o_r / Σ w_r, lse = M + ln Σ w_r, ranks in order, so that the
 * bits depend on the cut of the keys alone. Weights and their sum are double (one lane's work is the same as all
 * lanes'), values FP32. Empty states (-inf) are left out by selection; all empty gives (0, -inf). */
#include "dist/nccl/merge.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

#define WARPS 8
#define LANES 32

__global__ void merge_rows(const float *out, const float *lse, int64_t ranks, int64_t rows, int64_t Dv, float *out0,
                           float *lse0)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    if (row >= rows)
        return;
    float most = -CUDART_INF_F;
    bool bad = false;
    for (int64_t r = 0; r < ranks; r++) {
        const float l = lse[r * rows + row];
        bad = bad || l != l;
        most = l > most ? l : most;
    }
    double sum = 0.0;
    for (int64_t r = 0; r < ranks; r++) {
        const float l = lse[r * rows + row];
        sum += l == -CUDART_INF_F ? 0.0 : exp((double)l - (double)most);
    }
    const bool empty = most == -CUDART_INF_F && !bad;
    for (int64_t d = lane; d < Dv; d += LANES) {
        float o = 0.0f;
        for (int64_t r = 0; r < ranks; r++) {
            const float l = lse[r * rows + row];
            if (l != -CUDART_INF_F)
                o += (float)(exp((double)l - (double)most) / sum) * out[(r * rows + row) * Dv + d];
        }
        out0[row * Dv + d] = empty ? 0.0f : o;
    }
    if (lane == 0)
        lse0[row] = empty ? -CUDART_INF_F : (float)((double)most + log(sum));
}

__global__ void empty_rows(float *out, float *lse, int64_t rows, int64_t Dv)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * Dv;
         i += (int64_t)gridDim.x * blockDim.x) {
        out[i] = 0.0f;
        if (i < rows)
            lse[i] = -CUDART_INF_F;
    }
}

struct place {
    void *data;
    int dtype;
    int64_t heads, seq, dim, stride[3];
};

__device__ void put(const place &to, int64_t at, float value)
{
    if (to.dtype == APA_DTYPE_F16)
        static_cast<__half *>(to.data)[at] = __float2half_rn(value);
    else if (to.dtype == APA_DTYPE_BF16)
        static_cast<__nv_bfloat16 *>(to.data)[at] = __float2bfloat16_rn(value);
    else
        static_cast<float *>(to.data)[at] = value;
}

__global__ void store_rows(const float *from, place to, int64_t n)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t d = i % to.dim, row = i / to.dim, s = row % to.seq, h = row / to.seq % to.heads,
                      b = row / to.seq / to.heads;
        put(to, b * to.stride[0] + h * to.stride[1] + s * to.stride[2] + d, from[i]);
    }
}

static unsigned blocks_for(int64_t n)
{
    const int64_t blocks = (n + 255) / 256;
    return (unsigned)(blocks < 1 ? 1 : blocks > 65535 ? 65535 : blocks);
}

static place place_of(const apa_tensor *tensor)
{
    return {tensor->data,     (int)tensor->dtype, tensor->shape[1],
            tensor->shape[2], tensor->shape[3],   {tensor->stride[0], tensor->stride[1], tensor->stride[2]}};
}

extern "C" int apa_dist_nccl_merge(const float *out, const float *lse, int64_t ranks, int64_t rows, int64_t Dv,
                                   float *out0, float *lse0, void *stream)
{
    if (rows == 0)
        return 0;
    merge_rows<<<(unsigned)((rows + WARPS - 1) / WARPS), WARPS * LANES, 0, static_cast<cudaStream_t>(stream)>>>(
        out, lse, ranks, rows, Dv, out0, lse0);
    return (int)cudaGetLastError();
}

extern "C" int apa_dist_nccl_empty(float *out, float *lse, int64_t rows, int64_t Dv, void *stream)
{
    empty_rows<<<blocks_for(rows * Dv), 256, 0, static_cast<cudaStream_t>(stream)>>>(out, lse, rows, Dv);
    return (int)cudaGetLastError();
}

extern "C" int apa_dist_nccl_store(const float *rows_out, const float *rows_lse, const apa_tensor *out,
                                   const apa_tensor *lse, void *stream)
{
    const int64_t rows = out->shape[0] * out->shape[1] * out->shape[2];
    store_rows<<<blocks_for(rows * out->shape[3]), 256, 0, static_cast<cudaStream_t>(stream)>>>(rows_out, place_of(out),
                                                                                                rows * out->shape[3]);
    if (lse->dtype != APA_DTYPE_NONE)
        store_rows<<<blocks_for(rows), 256, 0, static_cast<cudaStream_t>(stream)>>>(rows_lse, place_of(lse), rows);
    return (int)cudaGetLastError();
}
