/* Calls through the public API as a caller makes them, with everything around them watched: guards about the workspace
 * and the outputs, inputs that must stay as they are. */
#ifndef APA_TESTS_ATTEND_H
#define APA_TESTS_ATTEND_H

#include "support/problems.h"

/* Runs an engine ("cpu", "reference") on a problem, with a workspace of exactly the planned size, filled with NaN and
 * guarded on both sides. Any failure, a broken guard or a changed input fails the test. verdicts may be NULL; so may
 * statistics. */
void apa_test_attend(apa_context *context, const char *engine, apa_test_problem *t, const apa_recipe *recipe,
                     uint8_t *verdicts, apa_statistics *statistics);

/* The preset with settings "knob=value knob=value" (may be ""). */
apa_recipe apa_test_recipe(const char *preset, const char *settings);

/* As apa_test_oracle(), which it is held against in test_cpu_engine.c, but with the inputs widened once and the loops
 * in an order that compilers vectorise. Only keys that a row sees are read. */
void apa_test_fast_oracle(const apa_problem *p, double *out, double *lse);

/* A copy of an output's whole memory, and whether two runs left the same bytes in out and lse. */
typedef struct apa_test_outputs {
    unsigned char *out, *lse;
    size_t out_bytes, lse_bytes;
} apa_test_outputs;

apa_test_outputs apa_test_keep(const apa_test_problem *t);
int apa_test_differs(const apa_test_problem *t, const apa_test_outputs *kept);
void apa_test_drop(apa_test_outputs *kept);

/* |a - b| / |b| over two outputs of one shape. */
double apa_test_distance(const apa_tensor *a, const apa_tensor *b);

#endif
