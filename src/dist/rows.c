/* States of rows. See rows.h. */
#include "dist/rows.h"

#include <math.h>

void apa_dist_row_clear(double *row, int64_t width)
{
    row[0] = -INFINITY;
    for (int64_t i = 1; i < width; i++)
        row[i] = 0.0;
}

/* Moves a row to a frame that is not lower. */
static void lift(double *row, int64_t width, double frame)
{
    const double factor = row[0] == -INFINITY ? 0.0 : exp(row[0] - frame);
    row[0] = frame;
    if (factor == 0.0) { /* by selection: an empty row's numbers are zeros anyway */
        for (int64_t i = 1; i < width; i++)
            row[i] = 0.0;
        return;
    }
    for (int64_t i = 1; i < width; i++)
        row[i] *= factor;
}

void apa_dist_row_add(double *row, int64_t width, double lse, const float *o, double sign)
{
    if (lse == -INFINITY)
        return;
    if (isnan(lse) || !(lse <= row[0]))
        lift(row, width, lse);
    const double weight = sign * exp(lse - row[0]);
    row[1] += weight;
    double *sum = row + APA_DIST_ROW_HEAD;
    for (int64_t d = 0; d < width - APA_DIST_ROW_HEAD; d++)
        sum[d] += weight * (double)o[d];
}

void apa_dist_row_merge(const double *from, double *to, int64_t width)
{
    if (from[0] == -INFINITY)
        return;
    if (isnan(from[0]) || !(from[0] <= to[0]))
        lift(to, width, from[0]);
    const double weight = exp(from[0] - to[0]);
    for (int64_t i = 1; i < width; i++)
        to[i] += weight * from[i];
}

double apa_dist_row_lse(const double *row)
{
    return row[0] == -INFINITY ? -INFINITY : row[0] + log(row[1]);
}
