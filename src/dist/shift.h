/* Shifts: in shift s = 1 … N-1 rank r gets what it needs of rank (r - s) mod N, and gives to rank (r + s) mod N.
 *
 * Every shift is a permutation, so no rank is sender or receiver twice at a time; what a rank needs follows from the
 * cards, so both ends agree about it without a word: the runs of which some query of the receiver sees a key. */
#ifndef APA_DIST_SHIFT_H
#define APA_DIST_SHIFT_H

#include "dist/job.h"

/* The rank that this rank gets from in a shift, and the one that it gives to. */
int32_t apa_dist_shift_from(const apa_dist_job *job, int32_t shift);
int32_t apa_dist_shift_to(const apa_dist_job *job, int32_t shift);

/* Does rank `reader` need run i of rank `owner`? */
bool apa_dist_needs(const apa_dist_job *job, int32_t reader, int32_t owner, int32_t i);

/* Bytes of a run in whatever form; called with the run's card and length. */
typedef int64_t (*apa_dist_run_bytes)(const apa_dist_job *job, int64_t keys);

/* Packed keys of this rank on their way out, and those of two shifts on their way in. */
typedef struct apa_dist_traffic {
    apa_dist_job *job;
    apa_dist_run_bytes run_bytes;
    char *own;   /* this rank's runs, packed one after the other */
    char *in[2]; /* the shift that is worked on, and the next one */
    apa_dist_op out_op[2][APA_DIST_RUNS], in_op[2][APA_DIST_RUNS];
} apa_dist_traffic;

/* Makes room. The caller then packs each of its runs to apa_dist_traffic_own(). */
apa_status apa_dist_traffic_make(apa_dist_job *job, apa_dist_run_bytes run_bytes, apa_dist_traffic *traffic);
char *apa_dist_traffic_own(const apa_dist_traffic *traffic, int32_t i);
void apa_dist_traffic_free(apa_dist_traffic *traffic);

/* Begins a shift (1 … N-1; others: nothing), after the one before the last has ended on both sides. */
apa_status apa_dist_traffic_begin(apa_dist_traffic *traffic, int32_t shift);
/* Waits until the shift's keys are here. run[i] is where run i of the other rank lies, NULL if it is not needed. */
apa_status apa_dist_traffic_arrive(apa_dist_traffic *traffic, int32_t shift, const char *run[APA_DIST_RUNS]);
/* Waits until what the shift gave away is gone. */
apa_status apa_dist_traffic_gone(apa_dist_traffic *traffic, int32_t shift);

#endif
