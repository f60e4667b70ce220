/* One pair: its row of an output, its row of the truth, and how far they are apart. */
#ifndef APA_EVAL_PAIR_H
#define APA_EVAL_PAIR_H

#include "apa/context.h"
#include "apa/tensor.h"

#include <stdbool.h>
#include <stdint.h>

/* Pairs that one task takes. Sums are made block by block and added in order, so that no figure depends on threads. */
#define APA_EVAL_BLOCK_PAIRS ((int64_t)128)

/* The element at an offset, as a double. */
double apa_eval_element(const apa_tensor *t, int64_t offset);

/* Pair number → offset of its row: pairs are numbered [B][H][S] whatever the layout. */
int64_t apa_eval_pair_offset(const apa_tensor *t, int64_t pair);
void apa_eval_load_row(const apa_tensor *t, int64_t pair, double *row);
/* batch, head, row; -1 each for pair -1. */
void apa_eval_pair_place(const apa_tensor *t, int64_t pair, int64_t place[3]);
/* B·H·S; false when it overflows. */
bool apa_eval_pair_count(const apa_tensor *t, int64_t *pairs);

/* 1 where squares of values up to `largest` are harmless, else a power of two that brings `largest` near 1. */
double apa_eval_safe_scale(double largest);

typedef struct apa_eval_pair {
    bool truth_finite;       /* no NaN or Inf in y; else there is nothing to compare with: cos and rel NaN, sums 0 */
    bool fault;              /* a NaN or Inf in x where y has none: cos -1, rel infinite, sums 0 */
    double cos, rel;         /* as apa_error has them */
    double xx, yy, xy, dd;   /* sums of squares and products, in units of 1/scale² */
    double scale;            /* of this pair */
    double max_abs, sum_abs; /* of x - y */
} apa_eval_pair;

/* x and y are n values of the output and of the truth. */
apa_eval_pair apa_eval_compare(const double *x, const double *y, int64_t n);

bool apa_eval_all_finite(const double *values, int64_t n);

/* Are these tensors that can be compared? Names in messages: out, truth. */
apa_status apa_eval_check_outputs(apa_context *context, const apa_tensor *out, const apa_tensor *truth);
bool apa_eval_readable(const apa_tensor *t);

#endif
