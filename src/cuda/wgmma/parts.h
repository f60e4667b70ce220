/* A call in parts: some of its KV heads at a time, with their query heads. */
#ifndef APA_CUDA_WGMMA_PARTS_H
#define APA_CUDA_WGMMA_PARTS_H

#include "core/call.h"

/* How a call is cut: into parts of whole sequences, or of some heads of one. */
typedef struct apa_wgmma_parts {
    int64_t count;
    int64_t sequences, heads; /* of a part at most; where heads is not Hkv, sequences is 1 */
    int64_t in_sequence;      /* parts of one sequence */
} apa_wgmma_parts;

/* Parts of at most `most` KV heads (at least 1), about equal ones within a sequence. Neither B nor Hkv is 0. */
apa_wgmma_parts apa_wgmma_cut_heads(const apa_call *call, int64_t most);

/* Part `i` as a call: q, k, v, out and lse are those of its heads; masks, slopes, sinks (which the CUDA engine does not
 * take) and verdicts stay the whole call's. rows_before: rows of the call's verdicts before the part's. */
apa_call apa_wgmma_part(const apa_call *call, const apa_wgmma_parts *parts, int64_t i, int64_t *rows_before);

#endif
