/* Checks of single tensors. */
#ifndef APA_ATTENTION_TENSORS_H
#define APA_ATTENTION_TENSORS_H

#include "core/call.h"

/* Shape not negative, unit last stride, every offset the strides reach representable in bytes; data not NULL and
 * aligned when need_data is set. */
apa_status apa_tensor_check(apa_context *context, const char *name, const apa_tensor *tensor, bool is_output,
                            bool need_data);

/* Overlap is certain when two tensors start at one place or when both are dense and their bytes meet. Views that
 * interleave (a fused buffer) are the caller's word. Checked tensors only. */
bool apa_tensors_overlap(const apa_tensor *a, const apa_tensor *b);

/* Fails when an output is certain to overlap an input or another output. */
apa_status apa_tensor_check_overlap(apa_context *context, const apa_problem *problem);

#endif
