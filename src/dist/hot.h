/* Hot tiles of other ranks: found in codes, asked for, taken in exact form.
 *
 * A *unit* is one run of one other rank. When its codes have been attended to, some tiles hold more than eps of some
 * row: their part, as the codes have it, is taken out of the row's state again, and their exact keys are asked for.
 * Reader and owner go through the same units in the same order:
 *
 *   reader   codes → list of wanted tiles ────────→ owner   one bit per (batch, KV head) and tile
 *   reader   states += exact part     ←──────────── owner   the tiles, in order of the bits
 *
 * and each message is under way while both compute on the next unit. */
#ifndef APA_DIST_HOT_H
#define APA_DIST_HOT_H

#include "dist/job.h"

#define APA_DIST_BLOCK 64 /* positions that are looked at together, all query heads of a KV head */

/* A tile that is hot for some rows of a block. */
typedef struct apa_dist_hot {
    int32_t head;     /* batch·Hkv + KV head */
    int32_t tile;     /* of the run */
    int32_t q_run;    /* of this rank's queries */
    int32_t rows;     /* positions in the block */
    int64_t from, at; /* first row in the run; among the rank's rows */
    int64_t mask;     /* index of G words: bit i is position i of the block */
} apa_dist_hot;

typedef struct apa_dist_unit {
    int32_t shift, run;    /* of the other rank */
    int32_t from, to;      /* the rank that is read, the rank that reads */
    bool reads, is_read;   /* which of the two roles there are: other.run is needed here, own.run is needed there */
    uint8_t *want, *asked; /* bits: mine, the other's */
    char *in, *out;        /* tiles */
    apa_dist_op list_out, list_in, tiles_in, tiles_out;
    apa_dist_hot *hot;
    int64_t hot_count, hot_room;
    uint64_t *mask;
    int64_t mask_count, mask_room;
} apa_dist_unit;

apa_status apa_dist_unit_make(apa_dist_job *job, int32_t shift, int32_t run, apa_dist_unit *unit);
void apa_dist_unit_free(apa_dist_job *job, apa_dist_unit *unit);

/* Notes a hot tile of a block; mask has G words. Also sets the wanted bit. */
apa_status apa_dist_unit_note(apa_dist_job *job, apa_dist_unit *unit, apa_dist_hot hot, const uint64_t *mask);

/* Posts the lists; waits for them and posts the tiles; waits for these and adds their exact parts. */
apa_status apa_dist_unit_ask(apa_dist_job *job, apa_dist_unit *unit);
apa_status apa_dist_unit_answer(apa_dist_job *job, apa_dist_unit *unit);
apa_status apa_dist_unit_take(apa_dist_job *job, apa_dist_unit *unit, const apa_recipe *exact);

#endif
