/* Paged K and V on the device: the pages of a sequence become flat tensors in the workspace, and the kernels see what
 * they always see. That costs one more reading and one writing of K and V a call, and saves every kernel the table. */
#include "cuda/pages.h"

#include "cuda/arena.h"
#include "cuda/gather.h"

#include <cuda_runtime_api.h>

enum { KNOWN_NOT = -1 };

/* A cudaMemoryType, or KNOWN_NOT where the driver does not say. */
static int memory_of(const void *data)
{
    struct cudaPointerAttributes found;
    if (cudaPointerGetAttributes(&found, data) == cudaSuccess)
        return (int)found.type;
    (void)cudaGetLastError(); /* a later call must not find it */
    return KNOWN_NOT;
}

apa_status apa_cuda_check_places(apa_context *context, const apa_problem *problem)
{
    const struct {
        const char *name;
        const int64_t *data;
    } rows[] = {{"cu_seqlens_q", problem->cu_seqlens_q},
                {"cu_seqlens_k", problem->cu_seqlens_k},
                {"seqused_k", problem->seqused_k},
                {"q_offsets", problem->q_offsets}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].data != NULL && memory_of(rows[i].data) == (int)cudaMemoryTypeDevice)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                            "%s: in device memory, expected host memory: lengths decide what is launched",
                            rows[i].name);
    if (problem->block_table != NULL && memory_of(problem->block_table) == (int)cudaMemoryTypeUnregistered)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "block_table: in host memory, expected memory that the device reads");
    return APA_STATUS_OK;
}

/* K and V; NULL only measures. */
static size_t lay_out(const apa_call *call, void *memory, void *to[2])
{
    apa_cuda_arena at = {memory, 0};
    for (int i = 0; i < 2; i++)
        to[i] = apa_cuda_take(&at, call->Hkv * call->Skv * call->D, apa_dtype_bytes(call->k.dtype));
    return at.used;
}

size_t apa_cuda_flat_bytes(const apa_call *call)
{
    void *to[2];
    return call->pages == NULL ? 0 : lay_out(call, NULL, to);
}

static apa_cuda_tensor tensor_of(const apa_tensor *x)
{
    const apa_cuda_tensor tensor = {x->data, {x->stride[0], x->stride[1], x->stride[2]}, (int32_t)x->dtype};
    return tensor;
}

apa_status apa_cuda_lay_flat(apa_context *context, apa_call *call, void *memory, void *stream)
{
    if (call->pages == NULL)
        return APA_STATUS_OK;
    apa_cuda_pages pages = {.from = {tensor_of(&call->k), tensor_of(&call->v)},
                            .table = call->pages,
                            .pages = call->k.shape[0],
                            .Hkv = (int32_t)call->Hkv,
                            .Skv = (int32_t)call->Skv,
                            .D = (int32_t)call->D,
                            .page_size = (int32_t)(call->page_size < call->Skv ? call->page_size : call->Skv)};
    lay_out(call, memory, pages.to);
    const int error = call->Skv > 0 ? apa_cuda_launch_gather(&pages, stream) : 0;
    if (error != 0)
        return apa_fail(context, APA_STATUS_INTERNAL, "cuda: %s", cudaGetErrorString((cudaError_t)error));
    call->k = apa_tensor_hnd(pages.to[0], call->k.dtype, 1, call->Hkv, call->Skv, call->D);
    call->v = apa_tensor_hnd(pages.to[1], call->v.dtype, 1, call->Hkv, call->Skv, call->D);
    call->pages = NULL;
    return APA_STATUS_OK;
}
