/* The ISA levels and kernel tables that tests run: those that this machine and this build have. What is left out is
 * named in the output. */
#ifndef APA_TESTS_LEVELS_H
#define APA_TESTS_LEVELS_H

#include "cpu/kernels.h"

#define APA_TEST_LEVELS_MAX 6

typedef struct apa_test_level {
    apa_isa isa;
    const char *name;
    const apa_cpu_kernels *kernels;
} apa_test_level;

/* Levels with kernels of their own, each with the table that a context of it uses here: for tests of the engine.
 * Returns how many; prints a line for each level left out. The first is always scalar. */
int apa_test_levels(apa_test_level level[APA_TEST_LEVELS_MAX]);

/* Kernel tables, under their own names: a level may have more than one (avx2, avx2vnni). For tests of kernels. Order
 * and output as above. */
int apa_test_tables(apa_test_level table[APA_TEST_LEVELS_MAX]);

/* A context of one level. Fails the test if there is none. */
apa_context *apa_test_level_context(const apa_test_level *level, int32_t threads);

#endif
