/* Rows of tensors as doubles and FP32, and back with one rounding. */
#include "reference/internal.h"

#include "formats/formats.h"

#include <math.h>

/* Every value of f16, bf16 and f32 is a double; the cast loses nothing. */
static void load_f64(const void *from, apa_dtype dtype, int64_t n, double *row)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        for (int64_t i = 0; i < n; ++i)
            row[i] = apa_f16_to_f32(((const uint16_t *)from)[i]);
        break;
    case APA_DTYPE_BF16:
        for (int64_t i = 0; i < n; ++i)
            row[i] = apa_bf16_to_f32(((const uint16_t *)from)[i]);
        break;
    case APA_DTYPE_F32:
        for (int64_t i = 0; i < n; ++i)
            row[i] = ((const float *)from)[i];
        break;
    case APA_DTYPE_F64:
        for (int64_t i = 0; i < n; ++i)
            row[i] = ((const double *)from)[i];
        break;
    case APA_DTYPE_BOOL:
    case APA_DTYPE_NONE:
        break;
    }
}

void apa_reference_load(const void *from, apa_dtype dtype, int64_t n, apa_exact_format format, double *row)
{
    load_f64(from, dtype, n, row);
    if (format == APA_EXACT_FORMAT_F16 && dtype != APA_DTYPE_F16)
        for (int64_t i = 0; i < n; ++i)
            row[i] = apa_f16_to_f32(apa_f64_to_f16(row[i]));
    if (format == APA_EXACT_FORMAT_BF16 && dtype != APA_DTYPE_BF16)
        for (int64_t i = 0; i < n; ++i)
            row[i] = apa_bf16_to_f32(apa_f64_to_bf16(row[i]));
}

bool apa_reference_load_f32(const void *from, apa_dtype dtype, int64_t n, float *row)
{
    double value[APA_REFERENCE_DIM_MAX];
    bool finite = true;
    load_f64(from, dtype, n, value);
    for (int64_t i = 0; i < n; ++i) {
        row[i] = (float)value[i];
        finite = finite && isfinite(row[i]);
    }
    return finite;
}

const void *apa_reference_query(const apa_call *call, int64_t b, int64_t hq, int64_t i)
{
    const apa_tensor *q = &call->q;
    const int64_t offset = b * q->stride[0] + hq * q->stride[1] + i * q->stride[2];
    return (const char *)q->data + offset * (int64_t)apa_dtype_bytes(q->dtype);
}

void apa_reference_store(const apa_tensor *x, int64_t b, int64_t h, int64_t s, const double *row)
{
    const int64_t at = b * x->stride[0] + h * x->stride[1] + s * x->stride[2];
    for (int64_t i = 0; i < x->shape[3]; ++i) {
        switch (x->dtype) {
        case APA_DTYPE_F16:
            ((uint16_t *)x->data)[at + i] = apa_f64_to_f16(row[i]);
            break;
        case APA_DTYPE_BF16:
            ((uint16_t *)x->data)[at + i] = apa_f64_to_bf16(row[i]);
            break;
        case APA_DTYPE_F32:
            ((float *)x->data)[at + i] = (float)row[i];
            break;
        case APA_DTYPE_F64:
            ((double *)x->data)[at + i] = row[i];
            break;
        case APA_DTYPE_BOOL:
        case APA_DTYPE_NONE:
            break;
        }
    }
}
