/* What every fuzz target is: libFuzzer's entry point, a verdict by abort(). With clang and APA_FUZZ the program is
 * libFuzzer's; otherwise main() is that of driver.c, which runs files and simple changes of them, so that the targets
 * are built and run with every compiler. */
#ifndef APA_TESTS_FUZZ_H
#define APA_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_HOLDS(condition)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* The bytes as a file of that ending, in memory where the system has it. One file a process, written over each time. */
const char *fuzz_file(const uint8_t *data, size_t size, const char *ending);

#endif
