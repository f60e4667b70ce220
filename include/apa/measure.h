/* libapa: how near a call came to the machine's limits. Two sides of one question: where a call's time went, and what
 * the machine does at best. */
#ifndef APA_MEASURE_H
#define APA_MEASURE_H

#include "apa/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The parts of a call of the cpu engine, in the order in which they come. */
typedef enum apa_phase {
    APA_PHASE_PREP = 0,      /* K's mean, codes of K and V */
    APA_PHASE_SCORES,        /* INT8 scores and their maxima */
    APA_PHASE_SOFTMAX,       /* probabilities of INT8 tiles */
    APA_PHASE_VERDICT,       /* skipping, frames, verdicts */
    APA_PHASE_VALUES,        /* INT8 P·V and the rescaling of outputs */
    APA_PHASE_EXACT_LOAD,    /* K and V of exact tiles widened to f32 */
    APA_PHASE_EXACT_SCORES,  /* exact tiles: Q·K */
    APA_PHASE_EXACT_SOFTMAX, /* exact tiles: exponentials and frames */
    APA_PHASE_EXACT_VALUES,  /* exact tiles: P·V */
    APA_PHASE_OTHER,         /* queries into place, merging, writing outputs, the walk itself */
    APA_PHASES
} apa_phase;

/* What one phase cost, summed over the threads. */
typedef struct apa_phase_cost {
    double ms;         /* thread milliseconds: two threads that work for 1 ms are 2 */
    double operations; /* of the two products, a multiply-add counting as two; exponentials of a softmax; else 0 */
    double bytes; /* of K and V or their codes that came from outside the thread's own buffers, and codes written */
} apa_phase_cost;

/* "prep", "scores" and so on; NULL past the last. Static storage. */
APA_EXPORT const char *apa_phase_name(int phase);

/* Best rates of the context's threads together, by loops of bare instructions at the context's ISA level. */
typedef struct apa_ceilings {
    size_t size;       /* sizeof(apa_ceilings), set by apa_ceilings_init() */
    double f32_flops;  /* FP32 multiply-adds in registers, two operations each, per second */
    double bf16_flops; /* BF16 dot products likewise; 0 where the CPU has none or the build does not use it */
    double i8_ops;     /* INT8 dot products, as the level's INT8 tiles make them */
    double exp2_f32;   /* 2^x to an ulp of FP32, values per second */
    double exp2_i8;    /* 2^x as 8-bit probabilities need it, packed to bytes and summed */
    double read_bytes; /* bytes per second read in order from memory that no cache holds */
} apa_ceilings;

APA_EXPORT void apa_ceilings_init(apa_ceilings *ceilings);

/* Measures for about `seconds` a figure (best of short turns), with all threads of the context at work. Takes 256 MiB
 * for a moment. Errors: INVALID_ARGUMENT, OUT_OF_MEMORY; text in the context. Not for use beside other calls. */
APA_EXPORT apa_status apa_ceilings_measure(apa_context *context, double seconds, apa_ceilings *ceilings);

#ifdef __cplusplus
}
#endif
#endif
