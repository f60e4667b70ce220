/* libapa: tensor descriptors.
 *
 * A tensor is [batch, heads, seq, dim] with strides in elements, so the HND and NHD layouts, slices of a fused QKV
 * buffer and broadcast views (stride 0) are all descriptions of memory, never copies. The last stride must be 1. */
#ifndef APA_TENSOR_H
#define APA_TENSOR_H

#include "apa/version.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum apa_dtype {
    APA_DTYPE_NONE = 0, /* a tensor that is not given */
    APA_DTYPE_F16 = 1,  /* IEEE binary16 */
    APA_DTYPE_BF16 = 2,
    APA_DTYPE_F32 = 3,
    APA_DTYPE_F64 = 4, /* the reference engine only */
    APA_DTYPE_BOOL = 5 /* one byte, true where it is not 0; masks only */
} apa_dtype;

typedef struct apa_tensor {
    void *data; /* first element; inputs are never written to. Alignment: that of the element */
    apa_dtype dtype;
    int64_t shape[4];  /* batch, heads, seq, dim */
    int64_t stride[4]; /* in elements; stride[3] must be 1; a stride of 0 repeats (inputs only) */
} apa_tensor;

/* Contiguous [batch][heads][seq][dim] ("HND"). */
APA_EXPORT apa_tensor apa_tensor_hnd(const void *data, apa_dtype dtype, int64_t batch, int64_t heads, int64_t seq,
                                     int64_t dim);

/* Contiguous [batch][seq][heads][dim] ("NHD"), described in the library's axis order. */
APA_EXPORT apa_tensor apa_tensor_nhd(const void *data, apa_dtype dtype, int64_t batch, int64_t heads, int64_t seq,
                                     int64_t dim);

/* Bytes per element: 2, 2, 4, 8, 1; 0 for APA_DTYPE_NONE and unknown values. "f16", "bf16", "f32", "f64", "bool",
 * "none". */
APA_EXPORT size_t apa_dtype_bytes(apa_dtype dtype);
APA_EXPORT const char *apa_dtype_name(apa_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
