/* Sequences of their own lengths and pages, of tensors in device memory. */
#ifndef APA_CUDA_PAGES_H
#define APA_CUDA_PAGES_H

#include "core/call.h"
#include "core/context_internal.h"

/* Are lengths and offsets where the host can read them, and the block table where the device can? The problem has not
 * been checked. Errors: INVALID_ARGUMENT. */
apa_status apa_cuda_check_places(apa_context *context, const apa_problem *problem);

/* Bytes of a paged call's K and V laid flat; 0 of a flat call. A multiple of 256. */
size_t apa_cuda_flat_bytes(const apa_call *call);

/* Puts the laying flat on the stream and makes the call one of flat tensors in `memory`; a flat call is left as it is.
 * Errors: INTERNAL (text of the CUDA error). */
apa_status apa_cuda_lay_flat(apa_context *context, apa_call *call, void *memory, void *stream);

#endif
