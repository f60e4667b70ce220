/* Tensor descriptors. */
#include "apa/tensor.h"

apa_tensor apa_tensor_hnd(const void *data, apa_dtype dtype, int64_t batch, int64_t heads, int64_t seq, int64_t dim)
{
    apa_tensor tensor = {
        (void *)(uintptr_t)data, dtype, {batch, heads, seq, dim}, {heads * seq * dim, seq * dim, dim, 1}};
    return tensor;
}

apa_tensor apa_tensor_nhd(const void *data, apa_dtype dtype, int64_t batch, int64_t heads, int64_t seq, int64_t dim)
{
    apa_tensor tensor = {
        (void *)(uintptr_t)data, dtype, {batch, heads, seq, dim}, {seq * heads * dim, dim, heads * dim, 1}};
    return tensor;
}

size_t apa_dtype_bytes(apa_dtype dtype)
{
    switch (dtype) {
    case APA_DTYPE_F16:
    case APA_DTYPE_BF16:
        return 2;
    case APA_DTYPE_F32:
        return 4;
    case APA_DTYPE_F64:
        return 8;
    case APA_DTYPE_BOOL:
        return 1;
    case APA_DTYPE_NONE:
        break;
    }
    return 0;
}

const char *apa_dtype_name(apa_dtype dtype)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return "f16";
    case APA_DTYPE_BF16:
        return "bf16";
    case APA_DTYPE_F32:
        return "f32";
    case APA_DTYPE_F64:
        return "f64";
    case APA_DTYPE_BOOL:
        return "bool";
    case APA_DTYPE_NONE:
        break;
    }
    return "none";
}
