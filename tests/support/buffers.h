/* Guarded memory and kinds of values for kernel tests. */
#ifndef APA_TESTS_BUFFERS_H
#define APA_TESTS_BUFFERS_H

#include "support/problems.h"

#include <stdbool.h>
#include <stddef.h>

#define APA_TEST_BUFFERS_MAX 64

typedef struct apa_test_buffer {
    unsigned char *memory, *data, *before; /* before: an input's content, NULL for outputs */
    size_t bytes, total;
} apa_test_buffer;

/* A test's buffers; starts as {0}. */
typedef struct apa_test_buffers {
    apa_test_buffer buffer[APA_TEST_BUFFERS_MAX];
    int n;
} apa_test_buffers;

/* `bytes` at a multiple of 64 plus `misalign`, between guards. Starts as NaN in every float format. */
void *apa_test_take(apa_test_buffers *set, size_t bytes, size_t misalign);

/* Declares data an input: its content must stay as it is now. */
void apa_test_freeze(apa_test_buffers *set, const void *data);

/* Fails the test when a guard or an input has changed. */
void apa_test_buffers_check(const apa_test_buffers *set, const char *what);

/* Frees everything and empties the set. */
void apa_test_buffers_free(apa_test_buffers *set);

/* What floats can be made of. The first APA_TEST_FINITE_KINDS are finite. */
typedef enum apa_test_kind {
    APA_TEST_RANDOM,    /* N(0, 1) */
    APA_TEST_CONSTANT,  /* one value */
    APA_TEST_ONE_HOT,   /* one 1, the rest 0 */
    APA_TEST_OUTLIER,   /* N(0, 1) with a few values 1000 times as large */
    APA_TEST_HUGE,      /* ±1e15: products and sums stay in range */
    APA_TEST_TINY,      /* ±1e-15 */
    APA_TEST_ZERO,      /* +0 and -0 */
    APA_TEST_SUBNORMAL, /* some of them normal */
    APA_TEST_FINITE_KINDS,
    APA_TEST_INF = APA_TEST_FINITE_KINDS, /* N(0, 1) with a few +Inf and -Inf */
    APA_TEST_NAN,                         /* N(0, 1) with a few NaN */
    APA_TEST_KINDS
} apa_test_kind;

const char *apa_test_kind_name(apa_test_kind kind);
void apa_test_fill_kind(apa_test_rng *rng, apa_test_kind kind, float *value, int64_t n);

/* Units in the last place between two finite floats of any sign. */
int64_t apa_test_ulps(float a, float b);

#endif
