/* Seeded problems, and a naive oracle to hold results against.
 *
 * The oracle is written apart from the engines: for each row all logits at once, their maximum, exponentials, division;
 * no tiles, no running state. A key is in or out by testing it alone. */
#ifndef APA_TESTS_PROBLEMS_H
#define APA_TESTS_PROBLEMS_H

#include "apa/apa.h"
#include "core/call.h"
#include "core/engine.h"

/* The seed of a test program: APA_TEST_SEED from the environment, or 1. Printed once. */
uint64_t apa_test_seed(void);

typedef struct apa_test_rng {
    uint64_t state;
} apa_test_rng;

uint64_t apa_test_bits(apa_test_rng *rng);            /* SplitMix64 */
double apa_test_uniform(apa_test_rng *rng);           /* [0, 1) */
double apa_test_normal(apa_test_rng *rng);            /* N(0, 1) */
int64_t apa_test_below(apa_test_rng *rng, int64_t n); /* 0 … n-1 */

typedef struct apa_test_shape {
    int64_t B, Hq, Hkv, Sq, Skv, D, Dv;
} apa_test_shape;

/* How the tensors lie: contiguous HND; NHD; slices, with gaps between rows that hold NaN. */
typedef enum apa_test_layout { APA_TEST_HND, APA_TEST_NHD, APA_TEST_SLICE } apa_test_layout;

/* A problem with its memory. Outputs have guard elements around them and NaN-like patterns in the gaps. */
typedef struct apa_test_problem {
    apa_problem problem;
    apa_test_shape shape;
    apa_test_layout layout;
    void *memory[5]; /* q, k, v, out, lse */
    size_t bytes[5];
    void *inputs_before[3]; /* copies of q, k, v as apa_test_run() found them */
} apa_test_problem;

/* Inputs N(0, 1) of dtype `in`; out of dtype `out`, lse f64 if out is f64, else f32. */
apa_test_problem *apa_test_make(apa_test_shape shape, apa_dtype in, apa_dtype out, apa_test_layout layout,
                                uint64_t seed);
void apa_test_free(apa_test_problem *t);

double apa_test_get(const apa_tensor *x, int64_t b, int64_t h, int64_t s, int64_t d);
void apa_test_set(const apa_tensor *x, int64_t b, int64_t h, int64_t s, int64_t d, double value);
void apa_test_fill(const apa_tensor *x, double value);

/* 0 when guards and gaps of the outputs and all of the inputs are what they were before apa_test_run(). */
int apa_test_guards_broken(const apa_test_problem *t);

/* Does query i see key j? From the definition, in wide arithmetic. */
bool apa_test_sees(const apa_problem *p, int64_t i, int64_t j);

/* Exact attention in double into contiguous out [B][Hq][Sq][Dv] and lse [B][Hq][Sq] (may be NULL). */
void apa_test_oracle(const apa_problem *p, double *out, double *lse);

/* A validated call of the problem, unresolved recipe. */
apa_call apa_test_call(const apa_problem *p, const apa_recipe *recipe);

/* Resolves and runs one engine, with its own workspace (filled with a pattern, guarded behind); any failure fails the
 * test. verdicts may be NULL. */
void apa_test_run(const apa_engine *engine, apa_context *context, apa_test_problem *t, const apa_recipe *recipe,
                  uint8_t *verdicts, apa_statistics *statistics);

/* |out - truth| / |truth| over everything; NaN if a NaN stands in one and not in the other, or infinities differ.
 * Places where both are NaN, or the same infinity, are left out. */
double apa_test_rel_l2(const apa_tensor *out, const double *truth);
/* The largest |lse - truth| / max(1, |truth|), with the same rule. */
double apa_test_lse_error(const apa_tensor *lse, const double *truth);

/* As many doubles as the tensor has elements, from malloc. */
double *apa_test_doubles(const apa_tensor *x);

#endif
