/* K and V as INT8 codes, the form in which the cold pass needs them.
 *
 * The definition is that of every engine's prep (docs/formats.md, docs/design.md): the run's mean of K per channel, in
 * double, tile by tile, over keys that are wholly finite; centred keys rotated by a block-diagonal Walsh-Hadamard
 * matrix; one scale per key; V with one scale per tile and channel. Tiles begin at the run's first key.
 *
 * What comes out of the codes again is code·scale in FP32. Quantised once more by an engine (no mean, no rotation,
 * tiles at the same keys) it gives the same codes: the largest of a block has the code 127, so the scale comes out as
 * it was, to a rounding of FP32. So an engine that is given these values walks the tiles as it would have walked its
 * own.
 *
 * A packed run holds for every (batch, KV head), 64-byte aligned:
 *   float mean[D]   (rotated)   float k_scale[keys]   float v_scale[tiles][Dv]   uint8 poisoned[tiles]
 *   int8 k[keys][D]   int8 v[keys][Dv]
 * At D = Dv = 128 that is 268 bytes a key and a head (and 512 for the mean), where 16 bits have 512. */
#ifndef APA_DIST_CODES_H
#define APA_DIST_CODES_H

#include "dist/job.h"

/* One (batch, KV head) of a packed run. */
typedef struct apa_dist_codes {
    float *mean, *k_scale, *v_scale;
    uint8_t *poisoned; /* the tile holds a NaN or an infinity, which codes can't say: always hot */
    int8_t *k, *v;
} apa_dist_codes;

int64_t apa_dist_codes_bytes(const apa_dist_job *job, int64_t keys); /* of a whole run, an apa_dist_run_bytes */
apa_dist_codes apa_dist_codes_at(const apa_dist_job *job, const char *packed, int64_t keys, int64_t head);

static inline int64_t apa_dist_tiles(int64_t keys)
{
    return (keys + APA_DIST_TILE - 1) / APA_DIST_TILE;
}

/* What decides whether INT8 can judge scores at all: largest values over a rank. */
typedef struct apa_dist_reach {
    int32_t unbounded; /* a query is not finite */
    float q_sum, q_top, k_sum, k_scale;
} apa_dist_reach;

/* Codes of one of the rank's runs, all heads. Raises reach->k_*. */
void apa_dist_codes_pack(const apa_dist_job *job, const apa_dist_run *run, char *packed, apa_dist_reach *reach);

/* k [keys][D], v [keys][Dv]. */
void apa_dist_codes_unpack(const apa_dist_job *job, const apa_dist_codes *codes, int64_t keys, float *k, float *v);

/* Rotates rows of D numbers as prep does. */
void apa_dist_rotate(const apa_dist_job *job, float *row);

/* One row of the inputs in FP32. False when it holds a NaN or an infinity. */
bool apa_dist_widen(apa_dtype dtype, const void *row, int64_t n, float *to);

/* Largest error of a score in log2 units, as bounded from the ranks' reaches. */
double apa_dist_score_error(const apa_dist_job *job, const apa_dist_reach *reach, int32_t ranks);

#endif
