/* What a problem says about scores: causal line, window, softcap, masks, slopes, sinks. Checked and brought into the
 * form of a call. */
#ifndef APA_ATTENTION_SCORES_H
#define APA_ATTENTION_SCORES_H

#include "core/call.h"

/* Fails unless they are valid for a batch of `batch` sequences of up to Skv keys. Tensors q, k, v have been checked. */
apa_status apa_scores_check(apa_context *context, const apa_problem *problem, int64_t batch, int64_t Skv,
                            bool need_data);

/* softcap, mask, slopes and sinks of a checked problem, each repeating by strides of 0. Needs B, Hq, Sq and Skv. */
void apa_scores_fill(const apa_problem *problem, apa_call *call);

#endif
