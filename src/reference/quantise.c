/* Runs of values that share a scale, in every operand format, and the sums that they are multiplied into.
 *
 * Units. A quantised value is units · coarse scale; units are element code times block scale and replace the values in
 * place. In FP32, one operation each:
 *     int8    apa_int8_quantise()                     scale amax/127
 *     e4m3    scale = amax/range, not under 2^-126 (pow2_scales: rounded up to a power of two);   units = the E4M3
 * value nearest to x/scale nvfp4   x/tensor in blocks of 16 by apa_nvfp4_block() mx      blocks of 32, power-of-two
 * scale by apa_mx_scale(), element = E2M1 or E4M3 nearest to x/scale
 *
 * Sums. A matrix unit adds `step` products at a time to its accumulator (16 elements of 16 bits, 32 of 8, 64 of 4):
 *     f64     every product rounds as double does
 *     f32     the step's sum is exact (double), accumulator + sum rounds to FP32
 *     f16     the same, to FP16
 *     fp22    FP8 matrix units of Hopper: products and accumulator are cut to multiples of 2^(e - 13), e the largest
 * exponent among them, toward zero; their exact sum is cut to 13 stored mantissa bits Sources: SageAttention 2, arXiv
 * 2411.10958 (scales, 13 bits); DeepSeek-V3, arXiv 2412.19437 (alignment before adding); OCP Microscaling Formats 1.0.
 */
#include "reference/internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define FP22_BITS 13

/* ---- units ---- */

float apa_reference_amax(const float *x, int64_t n, int64_t stride)
{
    float amax = 0;
    for (int64_t i = 0; i < n; ++i)
        amax = fabsf(x[i * stride]) > amax ? fabsf(x[i * stride]) : amax;
    return amax;
}

double apa_reference_int8_units(float *x, int64_t n, int64_t stride, float amax)
{
    float value[APA_REFERENCE_DIM_MAX + 1] = {0};
    int8_t code[APA_REFERENCE_DIM_MAX + 1];
    for (int64_t i = 0; i < n; ++i)
        value[i] = x[i * stride];
    value[n] = amax; /* a neighbour that sets the scale */
    const float scale = apa_int8_quantise(value, (size_t)n + 1, code);
    for (int64_t i = 0; i < n; ++i)
        x[i * stride] = code[i];
    return (double)scale;
}

/* The smallest power of two that is >= x, a positive normal number. */
static float power_of_two(float x)
{
    int exponent;
    const float fraction = frexpf(x, &exponent);
    return ldexpf(1.0F, fraction == 0.5F ? exponent - 1 : exponent);
}

double apa_reference_e4m3_units(float *x, int64_t n, int64_t stride, float amax, float range, bool pow2)
{
    const float wanted = amax / range, held = wanted < FLT_MIN ? FLT_MIN : wanted;
    const float scale = pow2 ? power_of_two(held) : held;
    for (int64_t i = 0; i < n; ++i)
        x[i * stride] = (float)apa_format_round(APA_FORMAT_E4M3, (double)(x[i * stride] / scale));
    return (double)scale;
}

void apa_reference_nvfp4_units(float *x, int64_t n, int64_t stride, float scale, bool search)
{
    for (int64_t i = 0; i < n; i += APA_NVFP4_BLOCK) {
        const int64_t size = n - i < APA_NVFP4_BLOCK ? n - i : APA_NVFP4_BLOCK;
        float value[APA_NVFP4_BLOCK];
        uint8_t code[APA_NVFP4_BLOCK];
        for (int64_t u = 0; u < size; ++u)
            value[u] = x[(i + u) * stride] / scale;
        const uint8_t block = apa_nvfp4_block(value, (size_t)size, search, code, NULL);
        const double unit = apa_format_decode(APA_FORMAT_UE4M3, block);
        for (int64_t u = 0; u < size; ++u)
            x[(i + u) * stride] = (float)(unit * apa_format_decode(APA_FORMAT_E2M1, code[u]));
    }
}

void apa_reference_mx_units(float *x, int64_t n, int64_t stride, apa_format element, bool up)
{
    for (int64_t i = 0; i < n; i += APA_MX_BLOCK) {
        const int64_t size = n - i < APA_MX_BLOCK ? n - i : APA_MX_BLOCK;
        float value[APA_MX_BLOCK];
        for (int64_t u = 0; u < size; ++u)
            value[u] = x[(i + u) * stride];
        const double scale = apa_format_decode(APA_FORMAT_E8M0, apa_mx_scale(value, (size_t)size, element, up));
        for (int64_t u = 0; u < size; ++u)
            x[(i + u) * stride] = (float)(apa_format_round(element, (double)value[u] / scale) * scale);
    }
}

/* ---- rounding ---- */

/* The double of exponent e (biased field given) and a top mantissa bit: 1.5·2^(field - 1023). */
static double one_and_half(int64_t field)
{
    const uint64_t bits = (uint64_t)field << 52 | UINT64_C(1) << 51;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int64_t exponent_field(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (int64_t)(bits >> 52 & 0x7FF);
}

/* Adding and taking off 1.5·2^(52 + exponent of the last place) rounds to that place, to nearest, ties to even. */
double apa_reference_round(const apa_reference_grid *grid, double x)
{
    if (!isfinite(x))
        return x;
    int64_t field = exponent_field(x);
    if (field < grid->emin + 1023)
        field = grid->emin + 1023;
    if (field > 1023 + 512)
        return copysign(grid->beyond, x);
    const double magic = one_and_half(field + 52 - grid->mantissa);
    const double y = (fabs(x) + magic) - magic;
    return copysign(y > grid->largest ? grid->beyond : y, x);
}

const apa_reference_grid apa_reference_e2m1 = {1, 0, 6.0, 6.0};
const apa_reference_grid apa_reference_e4m3 = {3, -6, 448.0, 448.0};
const apa_reference_grid apa_reference_f16 = {10, -14, 65504.0, INFINITY};
const apa_reference_grid apa_reference_bf16 = {7, -126, 0x1.fep127, INFINITY};

double apa_reference_keep(apa_kept_format format, double x)
{
    if (format == APA_KEPT_F16)
        return apa_reference_round(&apa_reference_f16, x);
    return format == APA_KEPT_BF16 ? apa_reference_round(&apa_reference_bf16, x) : x;
}

/* ---- sums ---- */

/* x toward zero to a multiple of 2^last: the nearest multiple, one less where that is beyond x. */
static double cut(double x, int last)
{
    const double unit = ldexp(1.0, last), magic = 0x1.8p52 * unit, size = fabs(x);
    const double near = (size + magic) - magic;
    return copysign(near > size ? near - unit : near, x);
}

static double fp22_step(double sum, const double *product, int64_t n)
{
    double most = fabs(sum), total = 0;
    for (int64_t i = 0; i < n; ++i)
        most = fabs(product[i]) > most ? fabs(product[i]) : most;
    if (!(most >= DBL_MIN) || !isfinite(most))
        return isfinite(most) ? 0 : sum + most;
    const int last = (int)exponent_field(most) - 1023 - FP22_BITS;
    const double unit = ldexp(1.0, last), magic = 0x1.8p52 * unit;
    for (int64_t i = 0; i < n; ++i) {
        const double size = fabs(product[i]), near = (size + magic) - magic;
        const double kept = near > size ? near - unit : near;
        total += product[i] < 0 ? -kept : kept;
    }
    total += cut(sum, last);
    return total == 0 ? 0 : cut(total, (int)exponent_field(total) - 1023 - FP22_BITS);
}

double apa_reference_step(apa_accumulator kind, double sum, const double *product, int64_t n)
{
    double total = 0;
    if (kind == APA_ACCUMULATOR_FP22)
        return fp22_step(sum, product, n);
    for (int64_t i = 0; i < n; ++i)
        total += product[i];
    return apa_reference_to(kind, sum + total);
}
