/* Every rank has all queries: no key moves. Each rank attends to its own keys; one reduction merges the states.
 *
 * The operator merges in order of rank (it is not declared commutative), so a partition and a number of ranks fix the
 * bits: the library's reduction depends on those alone. Long lists of rows go in pieces, so that counts fit MPI and the
 * buffers of a reduction stay small. */
#include "dist/job.h"

#include <stdlib.h>

#define REDUCE_BYTES ((int64_t)64 << 20)

apa_status apa_dist_run_whole(apa_dist_job *job)
{
    apa_dist_statistics *s = job->statistics;
    const int64_t rows = job->mine->B * job->mine->Hq * job->rows;
    const int64_t bytes = job->width * (int64_t)sizeof(double), step = REDUCE_BYTES / bytes;
    apa_status status = apa_dist_attend_own(job);
    for (int64_t at = 0; at < rows && status == APA_STATUS_OK && job->ranks > 1; at += step) {
        const int64_t n = rows - at < step ? rows - at : step;
        apa_dist_op reduce = {.kind = APA_DIST_OP_REDUCE,
                              .data = job->state + at * job->width,
                              .rows = (int32_t)n,
                              .width = (int32_t)job->width};
        if (apa_dist_wire_do(job->wire, &reduce, "the states of the other ranks", &s->wait_ms) != APA_STATUS_OK)
            return apa_dist_lost(job->dist);
        s->transfer_ms += reduce.ended_ms - reduce.begun_ms;
        s->sent_states += n * bytes;
    }
    s->sent = s->received = s->sent_states;
    return status;
}
