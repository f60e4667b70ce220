/* Attention to another rank's codes: the engine's adaptive walk, and which tiles it must have in exact form.
 *
 * The engine is given the codes as numbers and runs the recipe on them, so its cold tiles are what they would be on the
 * original keys, and a tile that it calls hot comes out with exact products of codes. Hot for the engine is a candidate
 * here: it judged against this run's sums alone. For a candidate the part of that tile is computed by itself, its share
 * of what the row has met, or is sure to hold (bound.h), is taken, and if that is over eps the part leaves the state
 * again and the tile is asked for (hot.h). */
#ifndef APA_DIST_WALK_H
#define APA_DIST_WALK_H

#include "dist/codes.h"
#include "dist/hot.h"
#include "dist/shift.h"

typedef struct apa_dist_walk {
    apa_dist_job *job;
    apa_recipe on_codes, exact; /* the recipe without what prep has done already; every tile exact */
    double threshold;           /* ln eps; +inf: nothing is hot for its share, -inf: everything */
    float *k, *v;               /* codes of one head as numbers */
    uint8_t *verdicts;
    int64_t verdict_room;
    double *offset; /* [G][rows of a part]: scale·q·mean, what the codes' scores lack */
    double *met;    /* [G][rows of a part]: LSE that shares are taken against */
    int64_t part_room;
    uint64_t *mask; /* G words */
    double *sure;   /* [B][Hq][rows]: LSE of what a row is sure to hold */
} apa_dist_walk;

/* Collective. */
apa_status apa_dist_walk_make(apa_dist_job *job, apa_dist_walk *walk);
void apa_dist_walk_free(apa_dist_walk *walk);

/* All of this rank's queries against the codes of one run of another rank. */
apa_status apa_dist_walk_run(apa_dist_walk *walk, apa_dist_unit *unit, const char *packed);

#endif
