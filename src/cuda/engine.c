/* Engine table entry "cuda:warp": host tensors go to the device, results come back. */
#include "cuda/engine.h"

#include "cuda/enqueue.h"
#include "cuda/job.h"
#include "cuda/trait.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void kernel_name(const apa_context *context, const apa_call *call, char *name, size_t size)
{
    (void)context;
    int index = 0, major = 0, minor = 0;
    if (cudaGetDevice(&index) == cudaSuccess) {
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    }
    const char *knob;
    const apa_cuda_trait *trait = apa_cuda_all_hot(&call->recipe) ? NULL : apa_cuda_trait_find(&call->recipe, &knob);
    const bool software = trait != NULL && 10 * major + minor < trait->native;
    snprintf(name, size, "%s%s%s%s warp-mma on sm_%d%d", trait == NULL ? "" : trait->name,
             software ? " (in software)" : "", trait == NULL ? "" : "+", apa_dtype_name(call->q.dtype), major, minor);
}

/* Scratch is device memory, taken by run(). */
static size_t workspace_bytes(const apa_context *context, const apa_call *call)
{
    (void)context;
    (void)call;
    return 0;
}

/* Everything that a run holds; freed as one. */
typedef struct session {
    cudaStream_t stream;
    cudaEvent_t event[3]; /* start, prep done, end */
    void *device[8];      /* q, k, v, out, lse, workspace, counts, verdicts */
    void *staging;        /* host, for a tensor that is not contiguous */
} session;

enum { Q, K, V, OUT, LSE, WORKSPACE, COUNTS, VERDICTS };

static void release(session *at)
{
    for (int i = 0; i < 8; i++)
        if (at->device[i] != NULL)
            cudaFree(at->device[i]);
    for (int i = 0; i < 3; i++)
        if (at->event[i] != NULL)
            cudaEventDestroy(at->event[i]);
    if (at->stream != NULL)
        cudaStreamDestroy(at->stream);
    free(at->staging);
}

static size_t bytes_of(const apa_tensor *x)
{
    return x->dtype == APA_DTYPE_NONE
               ? 0
               : (size_t)(x->shape[0] * x->shape[1] * x->shape[2] * x->shape[3]) * apa_dtype_bytes(x->dtype);
}

static apa_tensor packed_like(const apa_tensor *x, void *data)
{
    return apa_tensor_hnd(data, x->dtype, x->shape[0], x->shape[1], x->shape[2], x->shape[3]);
}

static bool is_packed(const apa_tensor *x)
{
    const apa_tensor packed = packed_like(x, x->data);
    return memcmp(x->stride, packed.stride, sizeof packed.stride) == 0;
}

/* Rows between a strided tensor and a contiguous buffer. */
static void copy_rows(const apa_tensor *x, char *packed, bool to_tensor)
{
    const size_t element = apa_dtype_bytes(x->dtype), row = (size_t)x->shape[3] * element;
    for (int64_t b = 0; b < x->shape[0]; b++)
        for (int64_t h = 0; h < x->shape[1]; h++)
            for (int64_t s = 0; s < x->shape[2]; s++, packed += row) {
                char *at =
                    (char *)x->data + (b * x->stride[0] + h * x->stride[1] + s * x->stride[2]) * (int64_t)element;
                if (to_tensor)
                    memcpy(at, packed, row);
                else
                    memcpy(packed, at, row);
            }
}

static void *stage(session *at, size_t bytes)
{
    free(at->staging);
    at->staging = malloc(bytes > 0 ? bytes : 1);
    return at->staging;
}

static cudaError_t take(session *at, int which, size_t bytes)
{
    return bytes == 0 ? cudaSuccess : cudaMalloc(&at->device[which], bytes);
}

static cudaError_t upload(session *at, int which, const apa_tensor *x)
{
    const size_t bytes = bytes_of(x);
    cudaError_t error = take(at, which, bytes);
    if (error != cudaSuccess || bytes == 0)
        return error;
    const void *from = x->data;
    if (!is_packed(x)) {
        if (stage(at, bytes) == NULL)
            return cudaErrorMemoryAllocation;
        copy_rows(x, at->staging, false);
        from = at->staging;
    }
    return cudaMemcpy(at->device[which], from, bytes, cudaMemcpyHostToDevice);
}

/* K or V as the device gets it: pages one after another, so that kernels see flat tensors only. */
static apa_tensor flat_keys(const apa_call *call, const apa_tensor *x, void *data)
{
    return call->pages == NULL ? packed_like(x, data)
                               : apa_tensor_hnd(data, x->dtype, 1, call->Hkv, call->Skv, x->shape[3]);
}

static cudaError_t upload_keys(session *at, int which, const apa_call *call, const apa_tensor *x)
{
    if (call->pages == NULL)
        return upload(at, which, x);
    const size_t row = (size_t)x->shape[3] * apa_dtype_bytes(x->dtype), bytes = (size_t)(call->Hkv * call->Skv) * row;
    const cudaError_t error = take(at, which, bytes);
    if (error != cudaSuccess || bytes == 0)
        return error;
    char *to = stage(at, bytes);
    if (to == NULL)
        return cudaErrorMemoryAllocation;
    for (int64_t h = 0; h < call->Hkv; h++)
        for (int64_t j = 0; j < call->Skv; j++, to += row)
            memcpy(to, apa_call_key(call, x, 0, h, j), row);
    return cudaMemcpy(at->device[which], at->staging, bytes, cudaMemcpyHostToDevice);
}

static cudaError_t download(session *at, int which, const apa_tensor *x)
{
    const size_t bytes = bytes_of(x);
    if (bytes == 0)
        return cudaSuccess;
    if (is_packed(x))
        return cudaMemcpy(x->data, at->device[which], bytes, cudaMemcpyDeviceToHost);
    if (stage(at, bytes) == NULL)
        return cudaErrorMemoryAllocation;
    const cudaError_t error = cudaMemcpy(at->staging, at->device[which], bytes, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess)
        copy_rows(x, at->staging, true);
    return error;
}

static cudaError_t move_in(session *at, const apa_call *call, size_t workspace, size_t verdicts)
{
    cudaError_t error = cudaStreamCreateWithFlags(&at->stream, cudaStreamNonBlocking);
    for (int i = 0; i < 3 && error == cudaSuccess; i++)
        error = cudaEventCreate(&at->event[i]);
    if (error == cudaSuccess)
        error = upload(at, Q, &call->q);
    if (error == cudaSuccess)
        error = upload_keys(at, K, call, &call->k);
    if (error == cudaSuccess)
        error = upload_keys(at, V, call, &call->v);
    if (error == cudaSuccess)
        error = take(at, OUT, bytes_of(&call->out));
    if (error == cudaSuccess)
        error = take(at, LSE, bytes_of(&call->lse));
    if (error == cudaSuccess)
        error = take(at, WORKSPACE, workspace);
    if (error == cudaSuccess)
        error = take(at, COUNTS, sizeof(uint64_t) * APA_CUDA_COUNTS);
    if (error == cudaSuccess)
        error = take(at, VERDICTS, verdicts);
    /* A copy out of pageable memory may return before all of it is there, and a non-blocking stream does not wait for
     * the default one. */
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(NULL);
    return error;
}

static cudaError_t move_out(session *at, const apa_call *call, size_t verdicts, apa_statistics *statistics)
{
    uint64_t counts[APA_CUDA_COUNTS];
    float prep = 0.0f, attention = 0.0f;
    cudaError_t error = cudaStreamSynchronize(at->stream);
    if (error == cudaSuccess)
        error = cudaEventElapsedTime(&prep, at->event[0], at->event[1]);
    if (error == cudaSuccess)
        error = cudaEventElapsedTime(&attention, at->event[1], at->event[2]);
    if (error == cudaSuccess)
        error = cudaMemcpy(counts, at->device[COUNTS], sizeof counts, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess && verdicts > 0)
        error = cudaMemcpy(call->verdicts, at->device[VERDICTS], verdicts, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess)
        error = download(at, OUT, &call->out);
    if (error == cudaSuccess)
        error = download(at, LSE, &call->lse);
    if (error != cudaSuccess)
        return error;
    statistics->visible = (int64_t)counts[APA_CUDA_VISIBLE];
    statistics->hot = (int64_t)counts[APA_CUDA_HOT];
    statistics->candidates = (int64_t)counts[APA_CUDA_CANDIDATES];
    statistics->cold = statistics->visible - statistics->hot;
    statistics->skipped = (int64_t)counts[APA_CUDA_SKIPPED];
    statistics->prep_ms = (double)prep;
    statistics->attention_ms = (double)attention;
    return cudaSuccess;
}

static apa_status cuda_failed(apa_context *context, cudaError_t error, size_t bytes)
{
    if (error == cudaErrorMemoryAllocation)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY,
                        "cuda: no device memory for the tensors and %zu bytes of workspace", bytes);
    return apa_fail(context, APA_STATUS_INTERNAL, "cuda: %s", cudaGetErrorString(error));
}

apa_status apa_cuda_run(apa_context *context, const apa_call *call, const apa_cuda_family *family,
                        apa_statistics *statistics)
{
    apa_cuda_target target;
    apa_status status = apa_cuda_current(context, &target);
    if (status != APA_STATUS_OK)
        return status;
    const apa_cuda_kept nothing = {0};
    const size_t bytes = family->device_bytes(call, &target, &nothing);
    const size_t verdicts = call->verdicts == NULL ? 0 : (size_t)(call->B * call->Hq * call->Sq * apa_call_tiles(call));
    session at = {0};
    cudaError_t error = move_in(&at, call, bytes, verdicts);
    if (error == cudaSuccess) {
        apa_call moved = *call;
        moved.q = packed_like(&call->q, at.device[Q]);
        moved.k = flat_keys(call, &call->k, at.device[K]);
        moved.v = flat_keys(call, &call->v, at.device[V]);
        moved.pages = NULL;
        moved.out = packed_like(&call->out, at.device[OUT]);
        moved.lse = packed_like(&call->lse, at.device[LSE]);
        const apa_cuda_place place = {.stream = at.stream,
                                      .workspace = at.device[WORKSPACE],
                                      .counts = at.device[COUNTS],
                                      .verdicts = at.device[VERDICTS],
                                      .prep_done = at.event[1]};
        error = cudaEventRecord(at.event[0], at.stream);
        if (error == cudaSuccess)
            error = cudaEventRecord(at.event[1],
                                    at.stream); /* also where there are no rows, so nothing is recorded later */
        status = family->enqueue(context, &moved, &target, &place);
        if (error == cudaSuccess && status == APA_STATUS_OK)
            error = cudaEventRecord(at.event[2], at.stream);
        if (error == cudaSuccess && status == APA_STATUS_OK)
            error = move_out(&at, call, verdicts, statistics);
    }
    if (error != cudaSuccess)
        status = cuda_failed(context, error, bytes);
    statistics->workspace_bytes = bytes;
    release(&at);
    return status;
}

static apa_status run(apa_context *context, const apa_call *call, void *workspace, apa_statistics *statistics)
{
    (void)workspace;
    return apa_cuda_run(context, call, &apa_cuda_warp_family, statistics);
}

const apa_engine apa_cuda_warp_engine = {
    .name = "cuda:warp",
    .resolve = apa_cuda_resolve,
    .kernel_name = kernel_name,
    .workspace_bytes = workspace_bytes,
    .run = run,
};

const apa_cuda_family apa_cuda_warp_family = {&apa_cuda_warp_engine, apa_cuda_device_bytes, apa_cuda_kept_bytes,
                                              apa_cuda_check_copy, apa_cuda_enqueue};
