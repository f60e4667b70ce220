/* From a resolved call to kernels on a stream. */
#ifndef APA_CUDA_ENQUEUE_H
#define APA_CUDA_ENQUEUE_H

#include "core/call.h"
#include "cuda/device.h"

/* Fills in what the recipe leaves on auto; refuses what the kernels cannot do, with the reason. */
apa_status apa_cuda_resolve(apa_context *context, apa_call *call);

/* True when every tile is hot, so that the exact kernel does all. */
bool apa_cuda_all_hot(const apa_recipe *recipe);

size_t apa_cuda_device_bytes(const apa_call *call, const apa_cuda_target *target);

/* (row, tile) pairs that are visible: known without looking at data. */
int64_t apa_cuda_visible(const apa_call *call);

/* What goes with a call on the device. */
typedef struct apa_cuda_place {
    void *stream, *workspace;
    uint64_t *counts;  /* or NULL */
    uint8_t *verdicts; /* or NULL; call->verdicts is not used */
    void *prep_done;   /* a cudaEvent_t recorded between prep and attention, or NULL */
} apa_cuda_place;

/* The call's tensors are in device memory. Errors: INVALID_ARGUMENT (alignment), INTERNAL (text of the CUDA error). */
apa_status apa_cuda_enqueue(apa_context *context, const apa_call *call, const apa_cuda_target *target,
                            const apa_cuda_place *place);

#endif
