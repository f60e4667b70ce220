/* From a resolved call to kernels on a stream. */
#ifndef APA_CUDA_ENQUEUE_H
#define APA_CUDA_ENQUEUE_H

#include "core/call.h"
#include "cuda/accept.h"
#include "cuda/device.h"

/* Fills in what the recipe leaves on auto; refuses what the kernels cannot do, with the reason. */
apa_status apa_cuda_resolve(apa_context *context, apa_call *call);

/* Memory of the caller's in which prepared keys lie between calls (options.prepared of apa/cuda.h). */
typedef struct apa_cuda_kept {
    void *memory;
    int64_t room, keys; /* of a sequence; room 0: nothing is kept, and the workspace holds what is prepared */
    bool mean;          /* the mean lies there already */
    size_t copy_bytes;  /* most bytes of prepared tiles in the workspace, where nothing is kept; 0: what they take */
} apa_cuda_kept;

size_t apa_cuda_device_bytes(const apa_call *call, const apa_cuda_target *target, const apa_cuda_kept *kept);

/* Bytes of kept keys, 0 where nothing is prepared. Errors: UNSUPPORTED (the cold format has scales that are not a
 * tile's own). */
apa_status apa_cuda_kept_bytes(apa_context *context, const apa_call *call, int64_t room, size_t *bytes);

/* Can this call's copy be bounded so? Errors: UNSUPPORTED (cold format, skipping), INVALID_ARGUMENT (too few bytes). */
apa_status apa_cuda_check_copy(apa_context *context, const apa_call *call, size_t copy_bytes);

/* (row, tile) pairs that are visible: known without looking at data. */
int64_t apa_cuda_visible(const apa_call *call);

/* What goes with a call on the device. */
typedef struct apa_cuda_place {
    void *stream, *workspace;
    uint64_t *counts;  /* or NULL */
    uint8_t *verdicts; /* or NULL; call->verdicts is not used */
    void *prep_done;   /* a cudaEvent_t recorded between prep and attention, or NULL */
    bool add_counts;   /* counts go on from what they are */
    apa_cuda_kept kept;
} apa_cuda_place;

/* The call's tensors are in device memory. Errors: INVALID_ARGUMENT (alignment), INTERNAL (text of the CUDA error). */
apa_status apa_cuda_enqueue(apa_context *context, const apa_call *call, const apa_cuda_target *target,
                            const apa_cuda_place *place);

/* ---- what kernel families share ---- */

struct apa_cuda_job;

/* A family's own workspace and work on the stream, as apa_cuda_device_bytes(), apa_cuda_kept_bytes(),
 * apa_cuda_check_copy() and apa_cuda_enqueue(). */
typedef struct apa_cuda_family {
    const struct apa_engine *engine;
    size_t (*device_bytes)(const apa_call *call, const apa_cuda_target *target, const apa_cuda_kept *kept);
    apa_status (*kept_bytes)(apa_context *context, const apa_call *call, int64_t room, size_t *bytes);
    apa_status (*check_copy)(apa_context *context, const apa_call *call, size_t copy_bytes);
    apa_status (*enqueue)(apa_context *context, const apa_call *call, const apa_cuda_target *target,
                          const apa_cuda_place *place);
} apa_cuda_family;

extern const apa_cuda_family apa_cuda_warp_family, apa_cuda_wgmma_family;

/* Tensors in host memory: to the device, the family's work there, results back. */
apa_status apa_cuda_run(apa_context *context, const apa_call *call, const apa_cuda_family *family,
                        apa_statistics *statistics);

/* A job's tensors, masks, shape and numbers; the rest of it is zero. */
void apa_cuda_describe(const apa_call *call, struct apa_cuda_job *job);

/* Room for tiles, and which of them are there; `together` of them share scales. */
void apa_cuda_keep(const apa_cuda_kept *kept, int32_t together, struct apa_cuda_job *job);

/* No verdict, and counts of 0 where they do not go on. Returns 0 or a cudaError_t. */
int apa_cuda_clear_results(const apa_call *call, const apa_cuda_place *place);

/* Parts of the keys, such that the blocks of `units` units come out in nearly full waves of `slots`. */
int32_t apa_cuda_choose_splits(const struct apa_cuda_job *job, int64_t units, int64_t slots);

/* Types, dims and features of a call that no kernel family goes beyond. */
apa_status apa_cuda_check_shape(apa_context *context, const apa_call *call);

/* Are q, k and v aligned as the kernels read them? Errors: INVALID_ARGUMENT, naming one. */
apa_status apa_cuda_check_aligned(apa_context *context, const apa_call *call);

/* The hopper family (wgmma/host.c). */
size_t apa_wgmma_device_bytes(const apa_call *call, const apa_cuda_target *target, const apa_cuda_kept *kept);
apa_status apa_wgmma_kept_bytes(apa_context *context, const apa_call *call, int64_t room, size_t *bytes);
apa_status apa_wgmma_check_copy(apa_context *context, const apa_call *call, size_t copy_bytes);
apa_status apa_wgmma_enqueue(apa_context *context, const apa_call *call, const apa_cuda_target *target,
                             const apa_cuda_place *place);

#endif
