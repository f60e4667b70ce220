/* Rows of tensors as doubles and FP32, and back with one rounding. */
#include "reference/internal.h"

#include "formats/formats.h"

#include <math.h>

static int64_t offset_of(const apa_tensor *x, int64_t b, int64_t h, int64_t s)
{
    return b * x->stride[0] + h * x->stride[1] + s * x->stride[2];
}

/* Every value of f16, bf16 and f32 is a double; the cast loses nothing. */
static void load_f64(const apa_tensor *x, int64_t at, double *row)
{
    const int64_t n = x->shape[3];
    switch (x->dtype) {
    case APA_DTYPE_F16:
        for (int64_t i = 0; i < n; ++i)
            row[i] = apa_f16_to_f32(((const uint16_t *)x->data)[at + i]);
        break;
    case APA_DTYPE_BF16:
        for (int64_t i = 0; i < n; ++i)
            row[i] = apa_bf16_to_f32(((const uint16_t *)x->data)[at + i]);
        break;
    case APA_DTYPE_F32:
        for (int64_t i = 0; i < n; ++i)
            row[i] = ((const float *)x->data)[at + i];
        break;
    case APA_DTYPE_F64:
        for (int64_t i = 0; i < n; ++i)
            row[i] = ((const double *)x->data)[at + i];
        break;
    case APA_DTYPE_BOOL:
    case APA_DTYPE_NONE:
        break;
    }
}

void apa_reference_load(const apa_tensor *x, int64_t b, int64_t h, int64_t s, apa_exact_format format, double *row)
{
    const int64_t n = x->shape[3];
    load_f64(x, offset_of(x, b, h, s), row);
    if (format == APA_EXACT_FORMAT_F16 && x->dtype != APA_DTYPE_F16)
        for (int64_t i = 0; i < n; ++i)
            row[i] = apa_f16_to_f32(apa_f64_to_f16(row[i]));
    if (format == APA_EXACT_FORMAT_BF16 && x->dtype != APA_DTYPE_BF16)
        for (int64_t i = 0; i < n; ++i)
            row[i] = apa_bf16_to_f32(apa_f64_to_bf16(row[i]));
}

bool apa_reference_load_f32(const apa_tensor *x, int64_t b, int64_t h, int64_t s, float *row)
{
    double value[APA_REFERENCE_DIM_MAX];
    bool finite = true;
    load_f64(x, offset_of(x, b, h, s), value);
    for (int64_t i = 0; i < x->shape[3]; ++i) {
        row[i] = (float)value[i];
        finite = finite && isfinite(row[i]);
    }
    return finite;
}

void apa_reference_store(const apa_tensor *x, int64_t b, int64_t h, int64_t s, const double *row)
{
    const int64_t at = offset_of(x, b, h, s);
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
