/* libapa on CUDA devices: attention on device pointers, in a stream.
 *
 * apa_attention() with engine "cuda" takes tensors in host memory and moves the data itself; the functions here are for
 * data that already lies on the device. They exist in every build: one without CUDA returns UNSUPPORTED and says so. */
#ifndef APA_CUDA_H
#define APA_CUDA_H

#include "apa/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A device and what this build can do with it. */
typedef struct apa_cuda_device {
    size_t size;        /* sizeof(apa_cuda_device), set by apa_cuda_device_init() */
    char name[96];      /* as the driver calls it */
    int32_t capability; /* 10·major + minor: 90 */
    int32_t multiprocessors;
    int64_t memory_bytes;
    char kernels[16];     /* "warp-mma", "wgmma, warp-mma", or "" when the device is too old */
    char cold_format[16]; /* what recipes with cold_format=auto run: "int8", "e4m3" */
    char reason[160];     /* why, one line */
} apa_cuda_device;

APA_EXPORT void apa_cuda_device_init(apa_cuda_device *device);

/* Devices that the process can see. Errors: UNSUPPORTED (no CUDA in this build, no driver, no device: *count is 0 and
 * the context, if not NULL, says why). Thread-safe for different contexts. */
APA_EXPORT apa_status apa_cuda_device_count(apa_context *context, int32_t *count);

/* Describes device `index`. Errors: INVALID_ARGUMENT, UNSUPPORTED. */
APA_EXPORT apa_status apa_cuda_device_describe(apa_context *context, int32_t index, apa_cuda_device *device);

/* Order of options.counts: pairs of (row, tile) that are visible, of these hot, hot by the running sum before the
 * second look, and skipped. */
enum {
    APA_CUDA_COUNT_VISIBLE = 0,
    APA_CUDA_COUNT_HOT = 1,
    APA_CUDA_COUNT_CANDIDATES = 2,
    APA_CUDA_COUNT_SKIPPED = 3,
    APA_CUDA_COUNT_NUMBER = 4
};

typedef struct apa_cuda_options {
    size_t size;  /* sizeof(apa_cuda_options), set by apa_cuda_options_init() */
    void *stream; /* a cudaStream_t of the current device; NULL = the default stream */
    /* Device memory, 256-byte aligned, at least apa_cuda_workspace_bytes(). It belongs to the call until the stream has
     * passed it; calls in one stream may share it. */
    void *workspace;
    size_t workspace_bytes;
    uint64_t *counts;  /* device memory, APA_CUDA_COUNT_NUMBER elements, or NULL */
    uint8_t *verdicts; /* device memory, [B][Hq][Sq][ceil(Skv/64)] of apa_verdict, or NULL */
} apa_cuda_options;

APA_EXPORT void apa_cuda_options_init(apa_cuda_options *options);

/* Device memory that apa_cuda_attention() needs for such a problem (data pointers may be NULL) on the current device.
 */
APA_EXPORT apa_status apa_cuda_workspace_bytes(apa_context *context, const apa_problem *problem,
                                               const apa_recipe *recipe, size_t *bytes);

/* Puts one attention call on the stream and returns; every tensor of the problem is in device memory. No
 * synchronisation and no allocation happens inside, so the call can be captured into a CUDA graph. Deterministic: the
 * same bits for the same inputs on the same kind of device. q, k, v: f16 or bf16; data 16-byte aligned, strides
 * multiples of 8 elements; D = Dv = 64, 128 or 256; out f16, bf16 or f32; lse f32. recipe NULL = preset "apa".
 * resolved, if not NULL, receives the recipe as it runs. Errors: INVALID_ARGUMENT, UNSUPPORTED (nothing was put on the
 * stream), INTERNAL (a CUDA error; its text in the context). */
APA_EXPORT apa_status apa_cuda_attention(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                         const apa_cuda_options *options, apa_recipe *resolved);

#ifdef __cplusplus
}
#endif
#endif
