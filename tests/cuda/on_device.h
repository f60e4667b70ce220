/* Tensors in device memory for the parts of cuda_verify that call apa_cuda_attention(). What fails for want of a device
 * or of memory ends the program. */
#ifndef APA_TESTS_CUDA_ON_DEVICE_H
#define APA_TESTS_CUDA_ON_DEVICE_H

#include "apa/apa.h"
#include "apa/cuda.h"
#include "apa/io.h"

/* Made-up q, k and v of one type, on the host and on the device. */
typedef struct on_device {
    int64_t B, Hq, Hkv, Sq, Skv, D;
    apa_array host[3];
    apa_problem problem; /* q, k, v on the device; scale and masks the defaults */
} on_device;

void on_device_make(on_device *to, const char *kind, int64_t B, int64_t Hq, int64_t Hkv, int64_t Sq, int64_t Skv,
                    int64_t D);
void on_device_free(on_device *made);

/* Device memory with a copy of `from`, or (NULL) bytes of 0xff, which are NaNs. */
void *on_device_copy(const void *from, size_t bytes);
void on_device_fetch(void *to, const void *from, size_t bytes);
void on_device_expect(int error, const char *what); /* a cudaError_t */

/* What a call gave, on the host. */
typedef struct device_result {
    int64_t rows, D; /* rows: B·Hq·Sq */
    float *out, *lse;
    uint64_t counts[APA_CUDA_COUNT_NUMBER];
    char engine[16];
    size_t prepared_bytes;
} device_result;

/* Output and LSE (f32) in buffers of their own, workspace of just the size of the plan and full of NaNs at first, with
 * bytes behind it that have to stay. The options are the caller's but for these. Returns 0 and prints why where the
 * library refuses. */
int on_device_run(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                  const apa_cuda_options *options, device_result *result);
void device_result_free(device_result *result);

/* Bit for bit, out, LSE and counts. */
int device_result_same(const device_result *a, const device_result *b);

/* NULL-terminated: those of `engine` ("cuda": all) that the device has. */
const char *const *on_device_families(apa_context *context, const char *engine);

/* A preset with knobs "a=b c=d". */
apa_recipe on_device_recipe(const char *method, const char *knobs);

#endif
