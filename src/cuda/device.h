/* Detection: which device is current, and what the engine needs to know about it. */
#ifndef APA_CUDA_DEVICE_H
#define APA_CUDA_DEVICE_H

#include "core/context_internal.h"

typedef struct apa_cuda_target {
    int32_t index, capability, multiprocessors;
    int64_t shared_bytes;       /* that one thread block may have */
    int64_t shared_bytes_of_sm; /* that a multiprocessor has */
} apa_cuda_target;

/* The current device. Errors: UNSUPPORTED with one line that says why there is none to use. */
apa_status apa_cuda_current(apa_context *context, apa_cuda_target *target);

#endif
