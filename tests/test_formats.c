/* Number formats against an oracle that shares no code with them: a table of every value, built from the format's
 * definition by adding steps, and a search for the neighbours of the value to encode. Steps, values and midpoints are
 * exact in double.
 *
 * As a filter for tests/oracle/formats_oracle.py: `test_formats encode NAME` reads raw doubles and writes uint32 codes,
 * `test_formats decode NAME` the other way round. */
#include "support/test.h"

#include "formats/formats.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CODES = 1 << 16 };

/* The definition, written down a second time: fields, bias, and what the top codes are. */
typedef struct definition {
    apa_format format;
    const char *name;
    int sign, exponent, mantissa, bias;
    enum { NO_SPECIALS, TOP_CODE_NAN, IEEE_SPECIALS } specials;
    bool overflows_to_infinity;
    double max, normal, subnormal;
} definition;

static const definition definitions[] = {
    {APA_FORMAT_F16, "f16", 1, 5, 10, 15, IEEE_SPECIALS, true, 65504, 6.103515625e-05, 5.9604644775390625e-08},
    {APA_FORMAT_BF16, "bf16", 1, 8, 7, 127, IEEE_SPECIALS, true, 3.3895313892515355e38, 1.1754943508222875e-38,
     9.183549615799121e-41},
    {APA_FORMAT_E2M1, "e2m1", 1, 2, 1, 1, NO_SPECIALS, false, 6, 1, .5},
    {APA_FORMAT_E4M3, "e4m3", 1, 4, 3, 7, TOP_CODE_NAN, false, 448, .015625, .001953125},
    {APA_FORMAT_UE4M3, "ue4m3", 0, 4, 3, 7, TOP_CODE_NAN, false, 448, .015625, .001953125},
    {APA_FORMAT_E5M2, "e5m2", 1, 5, 2, 15, IEEE_SPECIALS, false, 57344, 6.103515625e-05, 1.52587890625e-05},
    {APA_FORMAT_UE5M3, "ue5m3", 0, 5, 3, 15, TOP_CODE_NAN, false, 114688, 6.103515625e-05, 7.62939453125e-06},
    {APA_FORMAT_E4M11, "e4m11", 1, 4, 11, 7, TOP_CODE_NAN, false, 511.75, .015625, 7.62939453125e-06},
    {APA_FORMAT_UE5M11, "ue5m11", 0, 5, 11, 15, TOP_CODE_NAN, false, 131008, 6.103515625e-05, 2.98023223876953125e-08},
};
enum { DEFINITIONS = sizeof definitions / sizeof definitions[0] };

/* Magnitudes of the codes 0 … finite-1, and past them the value that would come next. */
typedef struct table {
    double value[MAX_CODES + 1];
    uint32_t finite;
} table;

static void build(const definition *d, table *t)
{
    const uint32_t magnitudes = 1u << (d->exponent + d->mantissa);
    t->finite =
        d->specials == IEEE_SPECIALS ? magnitudes - (1u << d->mantissa) : magnitudes - (d->specials == TOP_CODE_NAN);
    double step = 1.0;
    for (int i = 0; i < d->bias - 1 + d->mantissa; i++) {
        step /= 2;
    }
    t->value[0] = 0.0;
    for (uint32_t code = 1; code <= t->finite; code++) {
        t->value[code] = t->value[code - 1] + step;
        if ((code & ((1u << d->mantissa) - 1)) == 0 && code >> d->mantissa >= 2) {
            step *= 2; /* a new binade starts at this code; binade 1 still has the steps of the subnormals */
        }
    }
}

static uint32_t expected_code(const definition *d, const table *t, double x)
{
    const uint32_t sign = d->sign && signbit(x) ? 1u << (d->exponent + d->mantissa) : 0;
    if (!d->sign && x < 0) {
        return 0;
    }
    const double a = fabs(x);
    uint32_t low = 0, high = t->finite; /* value[low] <= a < value[high], or a is past the end */
    if (a >= t->value[high]) {
        return sign | (d->overflows_to_infinity ? t->finite : t->finite - 1);
    }
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (t->value[middle] <= a) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const double midpoint = (t->value[low] + t->value[high]) / 2;
    uint32_t code = a > midpoint || (a == midpoint && (low & 1)) ? high : low;
    if (code == t->finite && !d->overflows_to_infinity) {
        code--;
    }
    return sign | code;
}

static table oracle, f16_values, bf16_values; /* large, so not on the stack */
static uint64_t checked;

static void check_value(const definition *d, double x)
{
    const uint32_t code = apa_format_encode(d->format, x), expected = expected_code(d, &oracle, x);
    if (code != expected) {
        fail_msg("%s: %.17g encodes as %#x, expected %#x", d->name, x, (unsigned)code, (unsigned)expected);
    }
    checked++;
}

/* The value with both signs, and its neighbours in double and in float. */
static void check_around(const definition *d, double x)
{
    const double around[] = {x, nextafter(x, HUGE_VAL), nextafter(x, -HUGE_VAL)};
    for (int i = 0; i < 3; i++) {
        check_value(d, around[i]);
        check_value(d, -around[i]);
    }
    const float single = (float)x;
    const float around_single[] = {single, nextafterf(single, HUGE_VALF), nextafterf(single, -HUGE_VALF)};
    for (int i = 0; i < 3; i++) {
        check_value(d, (double)around_single[i]);
        check_value(d, -(double)around_single[i]);
    }
}

static uint64_t seed = 20240607;
static uint64_t random_bits(void)
{
    uint64_t z = (seed += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static void every_format_matches_its_definition(void **state)
{
    (void)state;
    for (int f = 0; f < DEFINITIONS; f++) {
        const definition *d = &definitions[f];
        const apa_format_info *info = apa_format_describe(d->format);
        build(d, &oracle);
        assert_string_equal(info->name, d->name);
        assert_int_equal(info->bits, d->sign + d->exponent + d->mantissa);
        assert_int_equal(info->sign_bits, d->sign);
        assert_int_equal(info->exponent_bits, d->exponent);
        assert_int_equal(info->mantissa_bits, d->mantissa);
        assert_int_equal(info->bias, d->bias);
        assert_true(info->has_infinity == (d->specials == IEEE_SPECIALS));
        assert_true(info->has_nan == (d->specials != NO_SPECIALS));
        assert_true(info->max_finite == d->max && oracle.value[oracle.finite - 1] == d->max);
        assert_true(info->min_normal == d->normal && oracle.value[1u << d->mantissa] == d->normal);
        assert_true(info->min_subnormal == d->subnormal && oracle.value[1] == d->subnormal);
    }
    assert_null(apa_format_describe(APA_FORMAT_COUNT));
}

static void every_code_decodes_and_encodes_back(void **state)
{
    (void)state;
    for (int f = 0; f < DEFINITIONS; f++) {
        const definition *d = &definitions[f];
        build(d, &oracle);
        const int magnitude_bits = d->exponent + d->mantissa;
        for (uint32_t code = 0; code < 1u << (magnitude_bits + d->sign); code++) {
            const uint32_t magnitude = code & ((1u << magnitude_bits) - 1);
            const bool negative = code >> magnitude_bits;
            const double x = apa_format_decode(d->format, code);
            if (magnitude < oracle.finite) {
                assert_true(x == (negative ? -oracle.value[magnitude] : oracle.value[magnitude]));
                assert_true(!signbit(x) == !negative);
                assert_int_equal(apa_format_encode(d->format, x), code);
                assert_true(apa_format_round(d->format, x) == x);
            } else if (d->specials == IEEE_SPECIALS && magnitude == oracle.finite) {
                assert_true(isinf(x) && !signbit(x) == !negative);
                assert_int_equal(apa_format_encode(d->format, x), d->overflows_to_infinity ? code : code - 1);
            } else {
                assert_true(isnan(x));
                const uint32_t back = apa_format_encode(d->format, x);
                assert_true(isnan(apa_format_decode(d->format, back)));
            }
        }
    }
}

static void every_f16_and_bf16_value_encodes_as_the_nearest(void **state)
{
    (void)state;
    build(&definitions[0], &f16_values);
    build(&definitions[1], &bf16_values);
    for (int f = 0; f < DEFINITIONS; f++) {
        build(&definitions[f], &oracle);
        for (uint32_t i = 0; i < f16_values.finite; i++) {
            check_value(&definitions[f], f16_values.value[i]);
            check_value(&definitions[f], -f16_values.value[i]);
        }
        for (uint32_t i = 0; i < bf16_values.finite; i++) {
            check_value(&definitions[f], bf16_values.value[i]);
            check_value(&definitions[f], -bf16_values.value[i]);
        }
    }
}

static void halfway_points_and_their_neighbours(void **state)
{
    (void)state;
    for (int f = 0; f < DEFINITIONS; f++) {
        build(&definitions[f], &oracle);
        for (uint32_t code = 0; code < oracle.finite; code++) { /* the last midpoint is the overflow threshold */
            check_around(&definitions[f], oracle.value[code]);
            check_around(&definitions[f], (oracle.value[code] + oracle.value[code + 1]) / 2);
        }
        check_around(&definitions[f], oracle.value[oracle.finite]);
    }
}

static void specials_and_random_doubles(void **state)
{
    (void)state;
    for (int f = 0; f < DEFINITIONS; f++) {
        const definition *d = &definitions[f];
        build(d, &oracle);
        const double extremes[] = {0.0,      0x1p-1074, 0x1.fffffffffffffp-1023, 0x1p-1022,
                                   0x1p-149, 1e300,     0x1.fffffffffffffp1023};
        for (size_t i = 0; i < sizeof extremes / sizeof extremes[0]; i++) {
            check_value(d, extremes[i]);
            check_value(d, -extremes[i]);
        }
        check_value(d, (double)INFINITY);
        check_value(d, -(double)INFINITY);
        for (int i = 0; i < 200000; i++) {
            const uint64_t bits = random_bits();
            double any;
            memcpy(&any, &bits, sizeof any);
            if (!isnan(any)) {
                check_value(d, any);
            }
            /* around the format's own range, with few or many mantissa bits */
            const double mantissa = (double)(random_bits() >> (11 + bits % 50));
            check_value(d, ldexp(bits >> 63 ? -mantissa : mantissa, (int)(bits >> 8 & 127) - 120));
        }
    }
    print_message("%llu encodings compared\n", (unsigned long long)checked);
}

static void nan_keeps_its_sign_and_turns_quiet(void **state)
{
    (void)state;
    const double quiet = (double)NAN;
    uint64_t bits = UINT64_C(0x7FF0000000000001); /* signalling, payload in the lowest bit */
    double signalling;
    memcpy(&signalling, &bits, sizeof signalling);
    const struct {
        apa_format format;
        uint32_t positive, negative;
    } cases[] = {
        {APA_FORMAT_F16, 0x7E00, 0xFE00},
        {APA_FORMAT_BF16, 0x7FC0, 0xFFC0},
        {APA_FORMAT_E5M2, 0x7E, 0xFE},
        {APA_FORMAT_E4M3, 0x7F, 0xFF},
        {APA_FORMAT_UE4M3, 0x7F, 0x7F},
        {APA_FORMAT_UE5M3, 0xFF, 0xFF},
        {APA_FORMAT_E4M11, 0x7FFF, 0xFFFF},
        {APA_FORMAT_UE5M11, 0xFFFF, 0xFFFF},
        {APA_FORMAT_E8M0, 0xFF, 0xFF},
        {APA_FORMAT_E2M1, 0, 0},
        {APA_FORMAT_INT8, 0, 0},
    };
    assert_int_equal(sizeof cases / sizeof cases[0], APA_FORMAT_COUNT);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(apa_format_encode(cases[i].format, copysign(quiet, 1.0)), cases[i].positive);
        assert_int_equal(apa_format_encode(cases[i].format, copysign(quiet, -1.0)), cases[i].negative);
        assert_int_equal(apa_format_encode(cases[i].format, signalling), cases[i].positive);
    }
    bits = UINT64_C(0xFFFD540000000000); /* payload bits that f16 has room for */
    double payload;
    memcpy(&payload, &bits, sizeof payload);
    assert_int_equal(apa_format_encode(APA_FORMAT_F16, payload), 0xFF55);
}

static void e8m0_is_the_nearest_power_of_two(void **state)
{
    (void)state;
    const apa_format e8m0 = APA_FORMAT_E8M0;
    double power = 1.0;
    for (int i = 0; i < 127; i++) {
        power /= 2;
    }
    assert_int_equal(apa_format_encode(e8m0, power / 2), 0);
    assert_int_equal(apa_format_encode(e8m0, power * .75), 0);
    for (uint32_t code = 0; code < 255; code++, power *= 2) {
        const uint32_t above = code == 254 ? 254 : code + 1;
        assert_true(apa_format_decode(e8m0, code) == power);
        assert_int_equal(apa_format_encode(e8m0, power), code);
        assert_int_equal(apa_format_encode(e8m0, nextafter(power, HUGE_VAL)), code);
        assert_int_equal(apa_format_encode(e8m0, nextafter(power, 0)), code);
        assert_int_equal(apa_format_encode(e8m0, nextafter(1.5 * power, 0)), code);
        assert_int_equal(apa_format_encode(e8m0, 1.5 * power), above);
        assert_int_equal(apa_format_encode(e8m0, nextafter(1.5 * power, HUGE_VAL)), above);
        assert_int_equal(apa_format_encode(e8m0, -power), 0);
    }
    assert_true(isnan(apa_format_decode(e8m0, 255)));
    assert_int_equal(apa_format_encode(e8m0, 0.0), 0);
    assert_int_equal(apa_format_encode(e8m0, -0.0), 0);
    assert_int_equal(apa_format_encode(e8m0, 0x1p-1074), 0);
    assert_int_equal(apa_format_encode(e8m0, 1e300), 254);
    assert_int_equal(apa_format_encode(e8m0, (double)INFINITY), 254);
    assert_int_equal(apa_format_encode(e8m0, -(double)INFINITY), 0);
}

static void int8_is_the_nearest_integer(void **state)
{
    (void)state;
    const apa_format int8 = APA_FORMAT_INT8;
    for (int code = 0; code < 256; code++) {
        const int value = code < 128 ? code : code - 256;
        assert_true(apa_format_decode(int8, (uint32_t)code) == value);
        assert_int_equal(apa_format_encode(int8, value), value == -128 ? 0x81 : code);
    }
    for (int n = -127; n < 127; n++) {
        const double middle = n + .5;
        const int even = n % 2 == 0 ? n : n + 1;
        assert_true(apa_format_round(int8, middle) == even);
        assert_true(apa_format_round(int8, nextafter(middle, -1e9)) == n);
        assert_true(apa_format_round(int8, nextafter(middle, 1e9)) == n + 1);
    }
    const double beyond[] = {127.4, 127.5, 128, 1e9, 1e300, (double)INFINITY};
    for (size_t i = 0; i < sizeof beyond / sizeof beyond[0]; i++) {
        assert_int_equal(apa_format_encode(int8, beyond[i]), 127);
        assert_int_equal(apa_format_encode(int8, -beyond[i]), 0x81);
    }
    assert_int_equal(apa_format_encode(int8, -0.0), 0);
    assert_int_equal(apa_format_encode(int8, 0x1p-1074), 0);
}

static uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void interchange_types_widen_exactly_and_narrow_once(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 65536; code++) {
        const double half = apa_format_decode(APA_FORMAT_F16, code), brain = apa_format_decode(APA_FORMAT_BF16, code);
        const float from_half = apa_f16_to_f32((uint16_t)code), from_brain = apa_bf16_to_f32((uint16_t)code);
        const bool half_nan = isnan(half), brain_nan = isnan(brain);
        assert_true(half_nan ? isnan(from_half) : float_bits(from_half) == float_bits((float)half));
        assert_true(brain_nan ? isnan(from_brain) : float_bits(from_brain) == float_bits((float)brain));
        assert_int_equal(apa_f32_to_f16(from_half), half_nan ? code | 0x200 : code);
        assert_int_equal(apa_f32_to_bf16(from_brain), brain_nan ? code | 0x40 : code);
    }
    /* Through float these would be ties, and go down. */
    assert_int_equal(apa_f64_to_f16(1 + 0x1p-11 + 0x1p-40), 0x3C01);
    assert_int_equal(apa_f64_to_bf16(1 + 0x1p-8 + 0x1p-40), 0x3F81);
    assert_int_equal(apa_f32_to_f16(65519.996f), 0x7BFF);
    assert_int_equal(apa_f32_to_f16(65520.0f), 0x7C00);
    assert_int_equal(apa_f32_to_bf16(3.4028235e38f), 0x7F80);
    assert_int_equal(apa_f32_to_f16(-0.0f), 0x8000);
    assert_int_equal(apa_f32_to_bf16(-0.0f), 0x8000);
}

#if defined(__FLT16_MAX__) && !defined(__clang__)
/* The compiler's own binary16, over floats from the whole range. */
static void f16_agrees_with_the_compiler(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < UINT64_C(0x100000000); i += 4099) {
        const uint32_t bits = (uint32_t)i;
        float value;
        memcpy(&value, &bits, sizeof value);
        const _Float16 half = (_Float16)value;
        uint16_t code;
        memcpy(&code, &half, sizeof code);
        assert_int_equal(apa_f32_to_f16(value), code);
        assert_int_equal(float_bits(apa_f16_to_f32(code)), float_bits((float)half));
    }
}
#endif

static int filter(const char *mode, const char *name)
{
    apa_format format = 0;
    while (format < APA_FORMAT_COUNT && strcmp(apa_format_describe(format)->name, name) != 0) {
        format++;
    }
    const bool encode = strcmp(mode, "encode") == 0;
    if (format == APA_FORMAT_COUNT || (!encode && strcmp(mode, "decode") != 0)) {
        fprintf(stderr, "test_formats: expected encode|decode and a format's name\n");
        return 2;
    }
    double value;
    uint32_t code;
    if (encode) {
        while (fread(&value, sizeof value, 1, stdin) == 1) {
            code = apa_format_encode(format, value);
            fwrite(&code, sizeof code, 1, stdout);
        }
    } else {
        while (fread(&code, sizeof code, 1, stdin) == 1) {
            value = apa_format_decode(format, code);
            fwrite(&value, sizeof value, 1, stdout);
        }
    }
    return fflush(stdout) || ferror(stdin) ? 1 : 0;
}

int main(int argc, char **argv)
{
    if (argc == 3) {
        return filter(argv[1], argv[2]);
    }
    print_message("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_matches_its_definition),
        cmocka_unit_test(every_code_decodes_and_encodes_back),
        cmocka_unit_test(every_f16_and_bf16_value_encodes_as_the_nearest),
        cmocka_unit_test(halfway_points_and_their_neighbours),
        cmocka_unit_test(specials_and_random_doubles),
        cmocka_unit_test(nan_keeps_its_sign_and_turns_quiet),
        cmocka_unit_test(e8m0_is_the_nearest_power_of_two),
        cmocka_unit_test(int8_is_the_nearest_integer),
        cmocka_unit_test(interchange_types_widen_exactly_and_narrow_once),
#if defined(__FLT16_MAX__) && !defined(__clang__)
        cmocka_unit_test(f16_agrees_with_the_compiler),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
