/* Attention from its definition, in double, one pair at a time, straight from the public problem: an opinion apart from
 * every engine. And what an engine may be off by, derived from the same numbers. */
#ifndef APA_TESTS_ORACLE_H
#define APA_TESTS_ORACLE_H

#include "apa/apa.h"

#include <stdbool.h>

#define ORACLE_DIM 1024

/* Sequence b of the problem: its queries and keys, and the position of query 0. */
typedef struct oracle_sequence {
    int64_t b, queries, keys, q_offset;
} oracle_sequence;

int64_t oracle_count(const apa_problem *p);
oracle_sequence oracle_at(const apa_problem *p, int64_t b);

/* Element d of row i of a q, out or lse; of key j of k or v. As doubles. */
double oracle_query_value(const apa_problem *p, const apa_tensor *x, const oracle_sequence *s, int64_t h, int64_t i,
                          int64_t d);
/* Where key j lies: entry and row of the tensor. */
void oracle_key_place(const apa_problem *p, const oracle_sequence *s, int64_t j, int64_t *entry, int64_t *row);

/* Does query i of head h see key j? */
bool oracle_sees(const apa_problem *p, const oracle_sequence *s, int64_t h, int64_t i, int64_t j);

/* What cold tiles may add to the error of a row: see oracle.c. */
typedef struct oracle_cold {
    bool on;
    bool smooth_k, hadamard;
} oracle_cold;

typedef struct oracle_row {
    double out[ORACLE_DIM], lse;
    double out_error[ORACLE_DIM], lse_error; /* bounds, but for the rounding of the result to its own type */
    int64_t tiles;                           /* of 64 keys, of which the row sees some */
} oracle_row;

/* Keys and values of a sequence and KV head as doubles, and scratch of a row. */
typedef struct oracle_keys {
    const apa_problem *p;
    oracle_sequence s;
    oracle_cold cold;
    int64_t hkv, D, Dv;
    double *k, *v, *most, *sum, *weight, *error;
    bool *seen;
    void *memory;
} oracle_keys;

oracle_keys oracle_decode(const apa_problem *p, const oracle_sequence *s, int64_t hkv, const oracle_cold *cold);
void oracle_keys_free(oracle_keys *keys);

/* Row i of query head h, one of those that read the KV head. u: the unit roundoff of an engine's sums. */
void oracle_attend(oracle_keys *keys, int64_t h, int64_t i, double u, oracle_row *row);

/* Half a unit in the last place of a number of the type near x. */
double oracle_rounding(apa_dtype dtype, double x);

double oracle_load(const apa_tensor *x, int64_t offset);

#endif
