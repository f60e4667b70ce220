/* Small floats: one description per format, one encoder and one decoder for all of them.
 *
 * A code is [sign][exponent field][mantissa]. Without the sign, codes of a format rise with their values, and the value
 * of the code after the largest mantissa is the next power of two. So an encoder needs no cases for carries: it rounds
 * the significand to an integer n in units of the binade's last place, and exponent·2^mantissa_bits + n is the code,
 * carried or not, normal or subnormal. Only integers are used, so the floating-point rounding mode has no say.
 *
 * Sources: IEEE 754-2019 (binary16, rounding); OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP
 * Microscaling Formats 1.0 (E2M1, E8M0); LampAttention, arXiv 2609.39361 (UE5M3, E4M11, UE5M11: its text leaves the top
 * codes open, here they follow E4M3). */
#include "formats/formats.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* Extremes follow from the fields: emin = 1 - bias, min_normal = 2^emin, min_subnormal = 2^(emin - mantissa_bits);
 * max_finite belongs to the code under the first infinity or NaN. The tests recompute all of them. */
static const apa_format_info infos[APA_FORMAT_COUNT] = {
    /*                    name   bits s  e  m  bias       max    min normal  min subnormal inf    nan */
    [APA_FORMAT_F16] = {"f16", 16, 1, 5, 10, 15, 65504.0, 0x1p-14, 0x1p-24, true, true},
    [APA_FORMAT_BF16] = {"bf16", 16, 1, 8, 7, 127, 0x1.fep127, 0x1p-126, 0x1p-133, true, true},
    [APA_FORMAT_E2M1] = {"e2m1", 4, 1, 2, 1, 1, 6.0, 1.0, 0.5, false, false},
    [APA_FORMAT_E4M3] = {"e4m3", 8, 1, 4, 3, 7, 448.0, 0x1p-6, 0x1p-9, false, true},
    [APA_FORMAT_UE4M3] = {"ue4m3", 7, 0, 4, 3, 7, 448.0, 0x1p-6, 0x1p-9, false, true},
    [APA_FORMAT_E5M2] = {"e5m2", 8, 1, 5, 2, 15, 57344.0, 0x1p-14, 0x1p-16, true, true},
    [APA_FORMAT_E8M0] = {"e8m0", 8, 0, 8, 0, 127, 0x1p127, 0x1p-127, 0x1p-127, false, true},
    [APA_FORMAT_UE5M3] = {"ue5m3", 8, 0, 5, 3, 15, 114688.0, 0x1p-14, 0x1p-17, false, true},
    [APA_FORMAT_E4M11] = {"e4m11", 16, 1, 4, 11, 7, 511.75, 0x1p-6, 0x1p-17, false, true},
    [APA_FORMAT_UE5M11] = {"ue5m11", 16, 0, 5, 11, 15, 131008.0, 0x1p-14, 0x1p-25, false, true},
    [APA_FORMAT_INT8] = {"int8", 8, 1, 0, 7, 0, 127.0, 1.0, 1.0, false, false},
};

enum {
    DOUBLE_MANTISSA_BITS = 52,
    DOUBLE_BIAS = 1023,
    DOUBLE_TOP_EXPONENT = 2047,
    E8M0_MAX = 254,
    E8M0_NAN = 255,
    INT8_MAX_CODE = 127
};

/* A double taken apart: |x| = significand · 2^(exponent - 52), significand in [2^52, 2^53) - or 0 for zero and for
 * double's subnormals, which every format here rounds to zero (the finest has steps of 2^-133). */
typedef struct parts {
    bool negative, nan, infinite;
    uint64_t significand;
    int exponent;
} parts;

static parts take_apart(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint64_t fraction = bits & ((UINT64_C(1) << DOUBLE_MANTISSA_BITS) - 1);
    const int field = (int)((bits >> DOUBLE_MANTISSA_BITS) & DOUBLE_TOP_EXPONENT);
    parts p = {.negative = bits >> 63 != 0, .exponent = field - DOUBLE_BIAS, .significand = fraction};
    if (field == DOUBLE_TOP_EXPONENT) {
        p.nan = fraction != 0;
        p.infinite = fraction == 0;
    } else if (field == 0) {
        p.significand = 0;
    } else {
        p.significand |= UINT64_C(1) << DOUBLE_MANTISSA_BITS;
    }
    return p;
}

/* significand / 2^shift to the nearest integer, ties to even; shift >= 1. */
static uint64_t shift_nearest_even(uint64_t significand, int shift)
{
    if (shift > DOUBLE_MANTISSA_BITS + 1) {
        return 0; /* significand < 2^53, so the quotient is under 1/2 */
    }
    const uint64_t floor = significand >> shift;
    const uint64_t rest = significand - (floor << shift);
    const uint64_t half = UINT64_C(1) << (shift - 1);
    return floor + (rest > half || (rest == half && (floor & 1)));
}

/* Codes without the sign bit: the largest finite one, and the first one after it (infinity, NaN, or past the format).
 */
static uint32_t largest_code(const apa_format_info *info)
{
    const uint32_t all_ones = (1u << (info->exponent_bits + info->mantissa_bits)) - 1;
    if (info->has_infinity) {
        return all_ones - (1u << info->mantissa_bits);
    }
    return info->has_nan ? all_ones - 1 : all_ones;
}

/* IEEE-like formats keep the top bits of a NaN's payload and set the quiet bit, as the CPU's own conversions do; the
 * others have one NaN. */
static uint32_t nan_code(const apa_format_info *info, const parts *p)
{
    if (!info->has_infinity) {
        return info->has_nan ? largest_code(info) + 1 : 0;
    }
    const uint32_t payload = (uint32_t)(p->significand >> (DOUBLE_MANTISSA_BITS - info->mantissa_bits));
    return (largest_code(info) + 1) | payload | (1u << (info->mantissa_bits - 1));
}

static uint32_t magnitude_code(apa_format format, const apa_format_info *info, const parts *p)
{
    const uint32_t largest = largest_code(info);
    const bool to_infinity = format == APA_FORMAT_F16 || format == APA_FORMAT_BF16;
    const uint32_t beyond = to_infinity ? largest + 1 : largest;
    const int emin = 1 - info->bias;
    if (p->exponent >= emin + (1 << info->exponent_bits)) {
        return beyond; /* infinity's exponent too; zero's is the least there is */
    }
    const int under = p->exponent < emin ? emin - p->exponent : 0;
    const uint64_t n = shift_nearest_even(p->significand, DOUBLE_MANTISSA_BITS - info->mantissa_bits + under);
    const int binade = under > 0 ? 0 : p->exponent - emin;
    const uint64_t code = ((uint64_t)binade << info->mantissa_bits) + n;
    return code > largest ? beyond : (uint32_t)code;
}

static uint32_t encode_float(apa_format format, double value)
{
    const apa_format_info *info = &infos[format];
    const parts p = take_apart(value);
    const uint32_t sign = (uint32_t)p.negative << (info->exponent_bits + info->mantissa_bits);
    if (p.nan) {
        const uint32_t code = nan_code(info, &p);
        return info->has_nan && info->sign_bits ? code | sign : code;
    }
    if (!info->sign_bits) {
        return p.negative ? 0 : magnitude_code(format, info, &p);
    }
    return magnitude_code(format, info, &p) | sign;
}

/* Powers of two only: the midpoint of 2^e and 2^(e+1) is 1.5·2^e. With one digit of precision neither neighbour is the
 * even one, and IEEE 754-2019 (4.3.1) then delivers the larger: a significand with its second bit set goes up. */
static uint32_t encode_e8m0(double value)
{
    const int bias = infos[APA_FORMAT_E8M0].bias;
    const parts p = take_apart(value);
    if (p.nan) {
        return E8M0_NAN;
    }
    if (p.negative || p.exponent < -bias) { /* zero's exponent too */
        return 0;
    }
    if (p.infinite || p.exponent > bias) {
        return E8M0_MAX;
    }
    const int up = (int)(p.significand >> (DOUBLE_MANTISSA_BITS - 1) & 1);
    const int rounded = p.exponent + bias + up;
    return (uint32_t)(rounded > E8M0_MAX ? E8M0_MAX : rounded);
}

static uint32_t encode_int8(double value)
{
    const parts p = take_apart(value);
    if (p.nan) {
        return 0;
    }
    int magnitude = INT8_MAX_CODE;
    if (!p.infinite && p.exponent < 7) {
        magnitude = (int)shift_nearest_even(p.significand, DOUBLE_MANTISSA_BITS - p.exponent);
        magnitude = magnitude > INT8_MAX_CODE ? INT8_MAX_CODE : magnitude;
    }
    return (uint32_t)(p.negative ? -magnitude : magnitude) & 0xFF;
}

const apa_format_info *apa_format_describe(apa_format format)
{
    return (unsigned)format < APA_FORMAT_COUNT ? &infos[format] : NULL;
}

uint32_t apa_format_encode(apa_format format, double value)
{
    assert((unsigned)format < APA_FORMAT_COUNT);
    switch (format) {
    case APA_FORMAT_E8M0:
        return encode_e8m0(value);
    case APA_FORMAT_INT8:
        return encode_int8(value);
    default:
        return encode_float(format, value);
    }
}

static double decode_float(const apa_format_info *info, uint32_t code)
{
    const int magnitude_bits = info->exponent_bits + info->mantissa_bits;
    const uint32_t magnitude = code & ((1u << magnitude_bits) - 1);
    const uint32_t largest = largest_code(info);
    double value;
    if (magnitude > largest) {
        value = info->has_infinity && magnitude == largest + 1 ? (double)INFINITY : (double)NAN;
    } else {
        const uint32_t field = magnitude >> info->mantissa_bits;
        const uint32_t fraction = magnitude & ((1u << info->mantissa_bits) - 1);
        const uint32_t significand = field ? fraction | (1u << info->mantissa_bits) : fraction;
        const int exponent = field ? (int)field - info->bias : 1 - info->bias;
        value = ldexp((double)significand, exponent - info->mantissa_bits);
    }
    return info->sign_bits && (code >> magnitude_bits & 1) ? -value : value;
}

double apa_format_decode(apa_format format, uint32_t code)
{
    assert((unsigned)format < APA_FORMAT_COUNT);
    switch (format) {
    case APA_FORMAT_E8M0:
        return (code & 0xFF) == E8M0_NAN ? (double)NAN : ldexp(1.0, (int)(code & 0xFF) - infos[format].bias);
    case APA_FORMAT_INT8:
        return (double)(int)(((code & 0xFF) ^ 0x80)) - 128.0;
    default:
        return decode_float(&infos[format], code);
    }
}

double apa_format_round(apa_format format, double value)
{
    return apa_format_decode(format, apa_format_encode(format, value));
}
