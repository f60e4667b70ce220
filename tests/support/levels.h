/* The ISA levels that tests run: those that this machine and this build have. Levels left out are named in the output.
 */
#ifndef APA_TESTS_LEVELS_H
#define APA_TESTS_LEVELS_H

#include "cpu/kernels.h"

#define APA_TEST_LEVELS_MAX 4

typedef struct apa_test_level {
    apa_isa isa;
    const char *name;
    const apa_cpu_kernels *kernels;
} apa_test_level;

/* Fills in the levels with kernels of their own and returns how many; prints a line for each level left out. The first
 * is always scalar. */
int apa_test_levels(apa_test_level level[APA_TEST_LEVELS_MAX]);

/* A context of one level. Fails the test if there is none. */
apa_context *apa_test_level_context(const apa_test_level *level, int32_t threads);

#endif
