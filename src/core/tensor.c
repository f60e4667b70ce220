/* Tensor descriptors. */
#include "apa/tensor.h"

/* A stride that can't be told becomes one that no check lets through, where there are elements for it to reach. */
static int64_t product(int64_t a, int64_t b)
{
    int64_t value;
    return __builtin_mul_overflow(a, b, &value) ? INT64_MAX : value;
}

apa_tensor apa_tensor_hnd(const void *data, apa_dtype dtype, int64_t batch, int64_t heads, int64_t seq, int64_t dim)
{
    const int64_t head = product(seq, dim);
    apa_tensor tensor = {
        (void *)(uintptr_t)data, dtype, {batch, heads, seq, dim}, {product(heads, head), head, dim, 1}};
    return tensor;
}

apa_tensor apa_tensor_nhd(const void *data, apa_dtype dtype, int64_t batch, int64_t heads, int64_t seq, int64_t dim)
{
    const int64_t row = product(heads, dim);
    apa_tensor tensor = {(void *)(uintptr_t)data, dtype, {batch, heads, seq, dim}, {product(seq, row), dim, row, 1}};
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
