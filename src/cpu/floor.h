/* A floor under the final λ, known before the walk.
 *
 * Judged against a λ that has only begun, the first 1/ε tiles of a diffuse row are candidates: their P is kept and they
 * are judged again. By Jensen's inequality the mass of a tile is at least its number of keys times the exponential of
 * the score of its mean key. Prep quantises the mean of every whole tile like a key; a row's scores with them, 1/64 of
 * the work of all scores, bound what λ will be at least, and a tile whose mass is no more than ε of that is cold at
 * once. Verdicts don't change: the second look judges candidates by the final λ, and what was cold by the floor is cold
 * by a λ that is no smaller. That it is no smaller is checked at the end of the walk, since codes are rounded: where it
 * doesn't hold the block is walked again without a floor. */
#ifndef APA_CPU_FLOOR_H
#define APA_CPU_FLOOR_H

#include "cpu/adaptive.h"

/* Is there a floor for this call? It needs the sums of K's tiles, a second look, and scores that are plain products. */
bool apa_cpu_floor_applies(const apa_call *call);

/* Prep: codes of the means of tiles 64·group … 64·group+63 of a KV head, from the tiles' sums. */
void apa_cpu_floor_prepare(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_kernels *kernels,
                           const apa_cpu_prepared *prepared, int64_t head, int64_t group);

/* Sets floor and frame of the block's registers, whose queries have been quantised. */
void apa_cpu_floor_set(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared);

/* After the walk: is every λ at least its floor? */
bool apa_cpu_floor_held(const apa_cpu_block *block, const apa_cpu_adaptive *adaptive);

#endif
