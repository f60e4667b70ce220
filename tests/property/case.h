/* A random problem with all of its memory: shapes, strides, dtypes, masks, sequences, values. */
#ifndef APA_TESTS_PROPERTY_CASE_H
#define APA_TESTS_PROPERTY_CASE_H

#include "property/draw.h"

#define CASE_BLOCKS 20
#define CASE_SEQUENCES 4

/* How large a case may get. */
typedef struct case_limits {
    int64_t Sq, Skv, D;
} case_limits;

typedef struct property_case {
    apa_problem problem; /* outputs described, without memory: case_outputs() */
    const char *method;
    bool poisoned; /* keys that nobody sees hold NaN and infinities */
    bool spoilt;   /* a key that somebody may see does */
    int64_t cu_q[CASE_SEQUENCES + 1], cu_k[CASE_SEQUENCES + 1], used[CASE_SEQUENCES], offsets[CASE_SEQUENCES];
    int32_t *pages;
    /* inputs: as allocated, and copies to compare with afterwards */
    void *block[CASE_BLOCKS], *before[CASE_BLOCKS];
    size_t bytes[CASE_BLOCKS];
    int blocks;
    apa_test_rng rng; /* of values */
} property_case;

property_case *case_make(draw *from, case_limits limits);
void case_free(property_case *made);

/* Inputs as they were? */
bool case_inputs_untouched(const property_case *made);

/* Outputs of a run: memory with a pattern around and between the elements. */
typedef struct case_outputs {
    apa_tensor out, lse; /* lse.dtype NONE when the case wants none */
    unsigned char *memory[2];
    size_t bytes[2];
} case_outputs;

case_outputs case_outputs_make(const property_case *made);
void case_outputs_free(case_outputs *outputs);
/* Is all that is not an element still the pattern? `written` rows alone may differ (cu_seqlens_q). */
bool case_outputs_intact(const property_case *made, const case_outputs *outputs);

/* One line a property of the case, to standard output. */
void case_print(const property_case *made);

#endif
