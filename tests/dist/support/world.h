/* Tests under mpirun: all ranks run the same program, make the same whole problem from the seed, and hand their shard
 * to the library; rank 0 holds what comes back against attention in one process.
 *
 * Only rank 0 prints. What only some ranks can judge goes through world_judge(), so that all leave a test together and
 * the next one begins with the same collectives everywhere. */
#ifndef APA_TESTS_DIST_WORLD_H
#define APA_TESTS_DIST_WORLD_H

#include "support/test.h"

#include "support/attend.h"

#include "apa/dist.h"

extern apa_context *context;
extern apa_dist *dist;
extern int32_t rank, ranks;

/* MPI, one context with one thread, an apa_dist; runs the tests; the exit status. */
int world_main(const char *name, const struct CMUnitTest *tests, size_t count);

typedef enum world_split {
    WORLD_ZIGZAG,
    WORLD_BLOCKS,
    WORLD_RAGGED, /* cuts anywhere, owners drawn, up to three runs of a rank, some ranks may get nothing */
    WORLD_ONE,    /* everything on the last rank */
    WORLD_SPLITS
} world_split;

typedef struct world_case {
    apa_test_shape shape;
    apa_dtype dtype;
    int causal;
    int64_t q_offset, window_left, window_right; /* 0 0 0 means default, none, none: see world_case_init() */
    apa_dist_queries queries;
    world_split split;
    apa_dist_exchange exchange;
    const char *preset, *settings;
    uint64_t seed;
    int compact; /* the rank's tensors hold its rows alone */
} world_case;

world_case world_case_init(int64_t Sq, int64_t Skv);

/* What to do to the whole problem before it is cut; may be NULL. */
typedef void (*world_change)(apa_test_problem *t);

typedef struct world_result {
    apa_test_problem *whole;        /* inputs; on rank 0 out and lse (f32) are those of the ranks, collected */
    apa_dist_statistics statistics; /* this rank's */
} world_result;

/* Runs a case on all ranks. Fails the test on any error. Free whole with apa_test_free(). */
world_result world_run(const world_case *c, world_change change);

/* Largest of the ranks' numbers. */
int32_t world_largest(int32_t value);

/* Fails the test on every rank when `right` is 0 on one of them, which says why: so all ranks leave a test together. */
void world_judge(int right, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Exact attention in double of t's problem, [rows][Dv] and [rows]. */
typedef struct world_truth {
    double *out, *lse;
} world_truth;
world_truth world_truth_make(const apa_test_problem *t);
void world_truth_free(world_truth *truth);

/* Relative L2 and LSE error of t's outputs. */
void world_errors(const apa_test_problem *t, const world_truth *truth, double *out_error, double *lse_error);

/* Relative L2 of one process that runs a preset on the whole problem, into t's outputs. */
double world_alone(apa_test_problem *t, const world_truth *truth, const char *preset, const char *settings);

#endif
