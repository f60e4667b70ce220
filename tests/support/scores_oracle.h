/* Attention in double with everything that a problem can ask for: softcap, slopes, masks, sinks, ragged and paged
 * batches. Written from the definitions in apa/attention.h, key by key; nothing of the engines' tiles or states. */
#ifndef APA_TESTS_SCORES_ORACLE_H
#define APA_TESTS_SCORES_ORACLE_H

#include "support/problems.h"

/* out [extents of p->out] and lse, contiguous; rows of no sequence are left alone. *largest (may be NULL) gets the
 * largest |logit| that a row saw. */
void apa_test_scores_oracle(const apa_problem *p, double *out, double *lse, double *largest);

#endif
