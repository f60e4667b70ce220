/* libapa: exact merge of attention results over disjoint sets of keys.
 *
 * With (o, lse) of two key sets, M = max(lse_a, lse_b), w = exp(lse - M):
 *   o = (w_a·o_a + w_b·o_b) / (w_a + w_b),   lse = M + ln(w_a + w_b).
 * The empty state is (0, -inf); merging it changes no bit of the other, and two empty states merge to the empty state.
 */
#ifndef APA_STATE_H
#define APA_STATE_H

#include "apa/context.h"
#include "apa/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Merges a and b into out/lse, row by row, in double, rounding once.
 * out_* are [B, H, S, Dv] (any dtype), lse_* are [B, H, S, 1], f32 or f64, natural logarithms. All shapes must agree.
 * The result may be the very tensor of a or b (same data, dtype and strides); other overlaps that are certain are
 * refused. Errors:
 * INVALID_ARGUMENT (text in the context). */
APA_EXPORT apa_status apa_state_merge(apa_context *context, const apa_tensor *out_a, const apa_tensor *lse_a,
                                      const apa_tensor *out_b, const apa_tensor *lse_b, const apa_tensor *out,
                                      const apa_tensor *lse);

#ifdef __cplusplus
}
#endif
#endif
