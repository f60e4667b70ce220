/* One pair: rows as doubles, cosine and relative error.
 *
 * Squares may leave the range of a double (f64 inputs), so norms are taken of values multiplied by a power of two where
 * it is needed: `scale` below, nearly always 1. */
#include "eval/pair.h"

#include "core/context_internal.h"
#include "formats/formats.h"

#include <math.h>
#include <string.h>

#define SQUARE_SAFE                                                                                                    \
    1e140 /* the squares of a thousand values up to here, and of one down to 1/here, are normal numbers */

double apa_eval_element(const apa_tensor *t, int64_t offset)
{
    switch (t->dtype) {
    case APA_DTYPE_F16:
        return (double)apa_f16_to_f32(((const uint16_t *)t->data)[offset]);
    case APA_DTYPE_BF16:
        return (double)apa_bf16_to_f32(((const uint16_t *)t->data)[offset]);
    case APA_DTYPE_F32:
        return (double)((const float *)t->data)[offset];
    case APA_DTYPE_F64:
        return ((const double *)t->data)[offset];
    case APA_DTYPE_BOOL:
    case APA_DTYPE_NONE:
        break;
    }
    return NAN;
}

void apa_eval_pair_place(const apa_tensor *t, int64_t pair, int64_t place[3])
{
    place[0] = place[1] = place[2] = -1;
    if (pair < 0)
        return;
    place[2] = pair % t->shape[2];
    place[1] = pair / t->shape[2] % t->shape[1];
    place[0] = pair / t->shape[2] / t->shape[1];
}

int64_t apa_eval_pair_offset(const apa_tensor *t, int64_t pair)
{
    int64_t place[3];
    apa_eval_pair_place(t, pair, place);
    return place[0] * t->stride[0] + place[1] * t->stride[1] + place[2] * t->stride[2];
}

void apa_eval_load_row(const apa_tensor *t, int64_t pair, double *row)
{
    const int64_t offset = apa_eval_pair_offset(t, pair);
    for (int64_t d = 0; d < t->shape[3]; d++)
        row[d] = apa_eval_element(t, offset + d);
}

bool apa_eval_pair_count(const apa_tensor *t, int64_t *pairs)
{
    return !__builtin_mul_overflow(t->shape[0], t->shape[1], pairs) &&
           !__builtin_mul_overflow(*pairs, t->shape[2], pairs);
}

double apa_eval_safe_scale(double largest)
{
    if (largest == 0 || (largest < SQUARE_SAFE && largest > 1 / SQUARE_SAFE))
        return 1;
    int exponent;
    frexp(largest, &exponent);
    return ldexp(1.0, exponent > -1000 ? -exponent : 1000);
}

bool apa_eval_all_finite(const double *values, int64_t n)
{
    for (int64_t d = 0; d < n; d++)
        if (!isfinite(values[d]))
            return false;
    return true;
}

static double largest_of(const double *x, const double *y, int64_t n)
{
    double largest = 0;
    for (int64_t d = 0; d < n; d++)
        largest = fmax(largest, fmax(fabs(x[d]), fabs(y[d])));
    return largest;
}

apa_eval_pair apa_eval_compare(const double *x, const double *y, int64_t n)
{
    apa_eval_pair p;
    memset(&p, 0, sizeof p);
    p.scale = 1;
    p.truth_finite = apa_eval_all_finite(y, n);
    p.fault = p.truth_finite && !apa_eval_all_finite(x, n);
    if (!p.truth_finite || p.fault) {
        p.cos = p.fault ? -1 : NAN;
        p.rel = p.fault ? INFINITY : NAN;
        return p;
    }
    p.scale = apa_eval_safe_scale(largest_of(x, y, n));
    for (int64_t d = 0; d < n; d++) {
        const double u = x[d] * p.scale, w = y[d] * p.scale, difference = u - w, abs = fabs(x[d] - y[d]);
        p.xx += u * u;
        p.yy += w * w;
        p.xy += u * w;
        p.dd += difference * difference;
        p.sum_abs += abs;
        p.max_abs = fmax(p.max_abs, abs);
    }
    const double nx = sqrt(p.xx), ny = sqrt(p.yy);
    p.cos = nx == 0 && ny == 0 ? 1 : nx == 0 || ny == 0 ? 0 : p.xy / nx / ny;
    p.cos = p.cos > 1 ? 1 : p.cos < -1 ? -1 : p.cos; /* rounding may pass ±1 by some 1e-16 */
    p.rel = p.dd == 0 ? 0 : ny == 0 ? INFINITY : sqrt(p.dd) / ny;
    return p;
}

bool apa_eval_readable(const apa_tensor *t)
{
    bool empty = false;
    for (int i = 0; i < 4; i++) {
        if (t->shape[i] < 0)
            return false;
        empty = empty || t->shape[i] == 0;
    }
    return apa_dtype_bytes(t->dtype) != 0 && (empty || t->data != NULL);
}

apa_status apa_eval_check_outputs(apa_context *context, const apa_tensor *out, const apa_tensor *truth)
{
    int64_t pairs;
    if (out == NULL || truth == NULL || !apa_eval_readable(out) || !apa_eval_readable(truth))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "out, truth: not given, expected two tensors with data");
    if (memcmp(out->shape, truth->shape, sizeof out->shape) != 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "out, truth: shapes differ, expected equal ones");
    if (!apa_eval_pair_count(out, &pairs))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "out: shape overflows");
    return APA_STATUS_OK;
}
