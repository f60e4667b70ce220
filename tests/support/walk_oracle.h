/* The walk once more, written apart from the engines, for tests of moderate scores. See walk_oracle.c. */
#ifndef APA_TESTS_WALK_ORACLE_H
#define APA_TESTS_WALK_ORACLE_H

#include "apa/apa.h"

/* out [B][Hq][Sq][Dv], lse [B][Hq][Sq], verdicts [B][Hq][Sq][tiles]. The recipe must be resolved, inputs finite, E4M3
 * that of direct codes with scales of powers of two (K and V a tile, Q 32 positions), force none, scores within a few
 * hundred. *closest gets the smallest |share - eps| met (a verdict nearer to it than rounding is not decided by
 * mathematics). */
void apa_test_walk_oracle(const apa_problem *p, const apa_recipe *recipe, double *out, double *lse, uint8_t *verdicts,
                          double *closest);

#endif
