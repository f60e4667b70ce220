/* What a row is sure to meet yet: Jensen's bound over tiles of other ranks.
 *
 * Judged against what has been met so far, every tile of a diffuse row looks large at first: with N ranks the first
 * 2/N of the keys would all be hot. But the sum of exponentials of a tile of 64 keys is at least 64·exp(score of their
 * mean), and for a diffuse row hardly more. So ranks give each other the mean of every full tile of K (4·D bytes a
 * tile and head, 1/64 of K in FP32), and a row's sum over tiles that it will meet, bounded in this way, is counted in
 * until they are met. It is a lower bound: a tile that is hot against all keys is hot against this too.
 *
 * Tiles count that every row of a block of queries sees whole; NaN and infinities are left out of means. */
#ifndef APA_DIST_AHEAD_H
#define APA_DIST_AHEAD_H

#include "dist/job.h"

typedef struct apa_dist_ahead {
    apa_dist_job *job;
    float *mean;          /* [B·Hkv][tiles][D], rotated, runs in order of rank and run; own runs too */
    int64_t tiles;        /* of all ranks */
    int64_t *first;       /* [ranks][APA_DIST_RUNS]: where a run's tiles begin */
    double *sum;          /* [B][Hq][rows][2]: frame and sum of what is ahead */
    apa_recipe exact;
} apa_dist_ahead;

/* Collective: the means of all ranks, and the sums over all runs of other ranks. */
apa_status apa_dist_ahead_make(apa_dist_job *job, apa_dist_ahead *ahead);
void apa_dist_ahead_free(apa_dist_ahead *ahead);

/* Run `run` of rank `owner` is met now by rows from … from+n-1 of a run of queries, rows at … of this rank: it is not
 * ahead any more. */
apa_status apa_dist_ahead_meet(apa_dist_ahead *ahead, int32_t owner, int32_t run, int64_t head, int32_t q_run,
                               int64_t from, int64_t at, int64_t n);

/* Natural log of what is ahead of a row; -inf when nothing is. row: (batch·Hq + head)·rows + row. */
double apa_dist_ahead_lse(const apa_dist_ahead *ahead, int64_t row);

#endif
