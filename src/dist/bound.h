/* What a row is sure to hold: Jensen's bound over the tiles of all ranks.
 *
 * Judged against what has been met so far, every tile of a diffuse row looks large at first: with N ranks the first
 * 2/N of the keys would all be hot. But the sum of exponentials of a tile of 64 keys is at least 64·exp(score of their
 * mean), and for a diffuse row hardly more. So ranks give each other the mean of every full tile of K (4·D bytes a
 * tile and head, 1/64 of K in FP32), and a row is judged against the larger of two lower bounds of its sum: what it has
 * met, and this. What is hot against all keys is hot against both.
 *
 * Tiles count that every row of a block of queries sees whole; NaN and infinities are left out of means. */
#ifndef APA_DIST_BOUND_H
#define APA_DIST_BOUND_H

#include "dist/job.h"

/* Collective. lse [B][Hq][rows] receives the natural log of the bound, -inf where nothing is sure. */
apa_status apa_dist_bound_find(apa_dist_job *job, double *lse);

#endif
