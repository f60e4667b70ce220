/* Sequences of a batch that differ: ragged tensors, used lengths, offsets, pages. Each becomes a call of its own with
 * B = 1, so that engines know nothing of how a batch is packed. */
#ifndef APA_ATTENTION_SEQUENCES_H
#define APA_ATTENTION_SEQUENCES_H

#include "core/call.h"

/* Do the sequences of the batch have lengths, offsets or pages of their own? */
bool apa_sequences_differ(const apa_problem *problem);

/* Sequences of the batch: B of a plain problem. The problem's dtypes and shapes need not be valid. */
int64_t apa_sequences_count(const apa_problem *problem);

/* Fails unless cu_seqlens, seqused_k, q_offsets and the block table fit the tensors. Reads these arrays, but page
 * numbers only when need_data is set. Tensors have been checked one by one. */
apa_status apa_sequences_check(apa_context *context, const apa_problem *problem, bool need_data);

/* The longest query side and the longest key side of any sequence. */
void apa_sequences_longest(const apa_problem *problem, int64_t *Sq, int64_t *Skv);

/* Sequence b of `whole`, the call of a checked problem whose sequences differ. Its recipe is the one that was
 * asked for, to be resolved for its own lengths. */
void apa_sequences_call(const apa_problem *problem, const apa_call *whole, int64_t b, apa_call *call);

#endif
