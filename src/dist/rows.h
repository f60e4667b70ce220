/* States of rows while they grow: width = 2 + Dv doubles a row, (frame, sum, unnormalised output).
 *
 * A result (o, lse) over some keys is the state (lse, 1, o). Sums live in double whatever the engines give, so that a
 * row is rounded once, at the end, and so that a part that was added can be taken away again: what is left is off by
 * the rounding of the part as it was given (FP32), relative to the whole. The empty state is (-inf, 0, 0); differences
 * of -inf are never formed. */
#ifndef APA_DIST_ROWS_H
#define APA_DIST_ROWS_H

#include <stdint.h>

#define APA_DIST_ROW_HEAD 2 /* frame, sum */

void apa_dist_row_clear(double *row, int64_t width);

/* row += sign · exp(lse) · (1, o); an lse of -inf adds nothing, a NaN makes the row NaN. */
void apa_dist_row_add(double *row, int64_t width, double lse, const float *o, double sign);

/* to = from ∘ to. */
void apa_dist_row_merge(const double *from, double *to, int64_t width);

/* Natural log of the row's mass; -inf when empty. */
double apa_dist_row_lse(const double *row);

#endif
