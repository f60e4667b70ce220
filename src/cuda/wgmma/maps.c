/* Tensor maps. The function that encodes one lives in the driver, which the library does not link: it is asked for by
 * name whenever maps are made. */
#include "apa/tensor.h"

#include "cuda/wgmma/maps.h"

#include <cuda_runtime_api.h>

#define STRIDE_END (INT64_C(1) << 40) /* bytes */
#define BOX_CHANNELS 64               /* 128 bytes: the span of the swizzle */
#define ENCODE_SINCE 12000            /* CUDA version that brought cuTensorMapEncodeTiled */

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

const char *apa_wgmma_map_objection(const apa_tensor *x)
{
    for (int axis = 0; axis < 3; axis++) {
        if (x->shape[axis] <= 1)
            continue;
        if (x->stride[axis] <= 0)
            return "a stride of 0 or less";
        if (x->stride[axis] >= STRIDE_END / 2)
            return "a stride of 2^40 bytes or more";
    }
    return NULL;
}

/* 16-bit elements [batch][head][key][D]; an axis of length 1 may have any stride, so it gets one that is allowed. */
static int make_map(encode_function encode, const apa_cuda_tensor *x, const int64_t length[4], int bf16, uint32_t keys,
                    CUtensorMap *map)
{
    cuuint64_t size[4], stride[3];
    for (int axis = 0; axis < 4; axis++)
        size[axis] = (cuuint64_t)length[3 - axis];
    for (int axis = 0; axis < 3; axis++)
        stride[axis] = length[2 - axis] == 1 ? (cuuint64_t)length[3] * 2 : (cuuint64_t)x->stride[2 - axis] * 2;
    const cuuint32_t box[4] = {BOX_CHANNELS, keys, 1, 1}, step[4] = {1, 1, 1, 1};
    const CUresult result =
        encode(map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, x->data, size, stride,
               box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

int apa_wgmma_make_maps(const apa_cuda_job *job, uint32_t keys, apa_wgmma_maps *maps)
{
    union {
        void *object;
        encode_function function;
    } encode = {NULL};
    enum cudaDriverEntryPointQueryResult found;
    int error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode.object, ENCODE_SINCE,
                                                 cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess)
        return error != cudaSuccess ? error : (int)cudaErrorNotSupported;
    const int64_t length[4] = {job->B, job->Hkv, job->Skv, job->D};
    error = make_map(encode.function, &job->k, length, job->bf16, keys, &maps->k);
    return error != cudaSuccess ? error : make_map(encode.function, &job->v, length, job->bf16, keys, &maps->v);
}
