/* Block scales: INT8, NVFP4 and MX against values worked out by hand, and NVFP4 against a plain search in double over
 * blocks whose arithmetic is exact, so that even ties must agree.
 *
 * As a filter for tests/oracle/formats_oracle.py: `test_blocks int8 N`, `test_blocks nearest N` and `test_blocks search
 * N` read blocks of N raw floats and write a float scale (int8) or a byte (NVFP4) and N code bytes for each. */
#include "support/test.h"

#include "formats/formats.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t seed = 77;
static uint64_t random_bits(void)
{
    uint64_t z = (seed += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

#define assert_codes(code, ...)                                                                                        \
    do {                                                                                                               \
        const int expected_codes[] = {__VA_ARGS__};                                                                    \
        for (size_t i_ = 0; i_ < sizeof expected_codes / sizeof expected_codes[0]; i_++) {                             \
            assert_int_equal((code)[i_], expected_codes[i_]);                                                          \
        }                                                                                                              \
    } while (0)

/* ---- INT8 ----------------------------------------------------------------------------------------------------------
 */

static void int8_rounds_to_nearest_even(void **state)
{
    (void)state;
    int8_t code[8];
    const float value[8] = {127, .5f, 1.5f, 2.5f, -.5f, -1.5f, -126.5f, 0};
    assert_true(apa_int8_quantise(value, 8, code) == 1.0f);
    assert_codes(code, 127, 0, 2, 2, 0, -2, -126, 0);
    const float outlier[4] = {-1000, 3.9f, 4, 11.9f}; /* a step is 7.874 */
    assert_true(apa_int8_quantise(outlier, 4, code) == 1000.0f / 127.0f);
    assert_codes(code, -127, 0, 1, 2);
    const float one[1] = {-3e-5f};
    assert_true(apa_int8_quantise(one, 1, code) == 3e-5f / 127.0f);
    assert_codes(code, -127);
}

static void int8_zero_and_tiny_blocks_stay_zero(void **state)
{
    (void)state;
    int8_t code[3] = {9, 9, 9};
    assert_true(apa_int8_quantise((const float[]){0, -0.0f, 0}, 3, code) == 0.0f);
    assert_codes(code, 0, 0, 0);
    assert_true(apa_int8_quantise(NULL, 0, code) == 0.0f);
    const float least = APA_INT8_AMAX_MIN;
    const float under[] = {nextafterf(least, 0), FLT_MIN, FLT_MIN / 2, FLT_TRUE_MIN};
    for (size_t i = 0; i < sizeof under / sizeof under[0]; i++) {
        memset(code, 9, sizeof code);
        assert_true(apa_int8_quantise((const float[]){under[i], -under[i], 0}, 3, code) == 0.0f);
        assert_codes(code, 0, 0, 0);
    }
    assert_true(apa_int8_quantise((const float[]){least, -least / 127, least / 2}, 3, code) == FLT_MIN);
    assert_codes(code, 127, -1, 64);
    assert_true(apa_int8_quantise((const float[]){FLT_MAX, -FLT_MAX, FLT_MAX / 4}, 3, code) == FLT_MAX / 127.0f);
    assert_codes(code, 127, -127, 32);
}

static void int8_counts_non_finite_values_as_zero(void **state)
{
    (void)state;
    int8_t code[4];
    assert_true(apa_int8_quantise((const float[]){NAN, 254, INFINITY, -2}, 4, code) == 2.0f);
    assert_codes(code, 0, 127, 0, -1);
    assert_true(apa_int8_quantise((const float[]){NAN, -INFINITY}, 2, code) == 0.0f);
    assert_codes(code, 0, 0);
}

static void int8_error_is_half_a_step(void **state)
{
    (void)state;
    for (int round = 0; round < 20000; round++) {
        float value[64];
        int8_t code[64];
        float amax = 0;
        const int exponent = (int)(random_bits() % 240) - 118;
        for (int i = 0; i < 64; i++) {
            value[i] = (float)ldexp((double)(int64_t)random_bits(), exponent - 63);
            amax = fmaxf(amax, fabsf(value[i]));
        }
        const double scale = apa_int8_quantise(value, 64, code);
        assert_true(scale == (double)(amax / 127.0f));
        /* Three roundings to float stand between value and code·scale: inverse, product and scale, each 127·2^-24 of a
         * step at most. */
        const double bound = scale * (0.5 + 3 * 127 * 0x1p-24);
        for (int i = 0; i < 64; i++) {
            assert_true(fabs(value[i] - code[i] * scale) <= bound);
        }
    }
}

/* ---- NVFP4 ---------------------------------------------------------------------------------------------------------
 */

static void nvfp4_hand_blocks(void **state)
{
    (void)state;
    uint8_t code[16];
    bool overflow = true;
    /* Every E2M1 value with scale 1 (code 0x38): no error, so the search stays. 2 has an exact block as well (scale 1.5
     * and value 4 for the 6), which comes later and loses the tie. */
    const float exact[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    assert_int_equal(apa_nvfp4_block(exact, 16, true, code, &overflow), 0x38);
    assert_codes(code, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    assert_false(overflow);
    /* A lone 6 is exact at scale 1 and, as 4·1.5, at 0x3C too: the earlier offset keeps it. */
    assert_int_equal(apa_nvfp4_block((const float[]){6, 0}, 2, true, code, NULL), 0x38);
    assert_codes(code, 7, 0);
    /* Midpoints go to the even code: .25, .75, 1.25, 1.75, 2.5, 3.5, 5 */
    const float ties[8] = {6, .25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, -5};
    assert_int_equal(apa_nvfp4_block(ties, 8, false, code, NULL), 0x38);
    assert_codes(code, 7, 0, 2, 2, 4, 4, 6, 14);
    /* 5/6 is nearest to 13/16 (0x35), which makes 5 a 4.875; with 1.25 (0x3A) it is 4·1.25. */
    assert_int_equal(apa_nvfp4_block((const float[]){5, -5}, 2, false, code, NULL), 0x35);
    assert_codes(code, 7, 15);
    assert_int_equal(apa_nvfp4_block((const float[]){5, -5}, 2, true, code, NULL), 0x3A);
    assert_codes(code, 6, 14);
    /* An outlier of 600: its scale 100 is halfway between 96 (0x6C) and 104 (0x6D), so the even one. */
    assert_int_equal(apa_nvfp4_block((const float[]){600, 1, -1}, 3, false, code, NULL), 0x6C);
    assert_codes(code, 7, 0, 8);
}

static void nvfp4_edges(void **state)
{
    (void)state;
    uint8_t code[16];
    bool overflow = true;
    memset(code, 9, sizeof code);
    assert_int_equal(apa_nvfp4_block((const float[]){0, -0.0f, 0}, 3, true, code, &overflow), 0);
    assert_codes(code, 0, 0, 0, 9);
    assert_false(overflow);
    assert_int_equal(apa_nvfp4_block(NULL, 0, true, code, NULL), 0);
    /* 448 holds up to amax/6 = 464; past it the codes saturate and the flag says so. */
    assert_int_equal(apa_nvfp4_block((const float[]){2784, 448}, 2, false, code, &overflow), 126);
    assert_codes(code, 7, 2);
    assert_false(overflow);
    const float beyond = nextafterf(2784, 3000);
    assert_int_equal(apa_nvfp4_block(&beyond, 1, false, code, &overflow), 126);
    assert_true(overflow);
    assert_int_equal(apa_nvfp4_block((const float[]){FLT_MAX}, 1, true, code, &overflow), 126);
    assert_codes(code, 7);
    assert_true(overflow);
    /* Too small for the least scale 2^-9: the values go to zero, the scale is not zero. */
    assert_int_equal(apa_nvfp4_block((const float[]){1e-40f, -1e-40f}, 2, true, code, &overflow), 1);
    assert_codes(code, 0, 8);
    assert_int_equal(apa_nvfp4_block((const float[]){0x1p-9f * .25f}, 1, false, code, NULL), 1);
    assert_codes(code, 0);
    assert_int_equal(apa_nvfp4_block((const float[]){NAN, 6, -INFINITY}, 3, true, code, &overflow), 0x38);
    assert_codes(code, 0, 7, 0);
    assert_false(overflow);
}

/* A UE4M3 value from its fields. */
static double ue4m3(int code)
{
    return code < 8 ? code * 0x1p-9 : ldexp(8 + code % 8, code / 8 - 10);
}

static const double e2m1[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};

/* Nearest by distance; of two at the same distance the even one. */
static int nearest_e2m1(double a)
{
    int best = 0;
    for (int c = 1; c < 8; c++) {
        const double closer = fabs(e2m1[best] - a) - fabs(e2m1[c] - a);
        best = closer > 0 || (closer == 0 && c % 2 == 0) ? c : best;
    }
    return best;
}

static int nearest_ue4m3(double a)
{
    int best = 0;
    for (int c = 1; c < 127; c++) {
        const double closer = fabs(ue4m3(best) - a) - fabs(ue4m3(c) - a);
        best = closer > 0 || (closer == 0 && c % 2 == 0) ? c : best;
    }
    return best;
}

static int clamp_scale(int code)
{
    return code < 1 ? 1 : code > 126 ? 126 : code;
}

static void nvfp4_search_matches_a_plain_search(void **state)
{
    (void)state;
    static const int offset[8] = {0, -1, 1, -2, 3, 4, 5, 6};
    int64_t ties = 0, clamped = 0, chosen[8] = {0};
    for (int round = 0; round < 100000; round++) {
        /* Small integers times a power of two: all products, differences, squares and sums fit FP32. */
        float value[16];
        const size_t n = 1 + random_bits() % 16;
        const int64_t bound = 1 + (int64_t)(random_bits() % 60);
        const double unit = ldexp(1.0, (int)(random_bits() % 22) - 13); /* both ends of the scale codes too */
        double amax = 0;
        for (size_t i = 0; i < n; i++) {
            value[i] = (float)((double)((int64_t)(random_bits() % (uint64_t)(2 * bound + 1)) - bound) * unit);
            amax = fmax(amax, fabs(value[i]));
        }
        uint8_t code[16], nearest_code[16];
        const int scale = apa_nvfp4_block(value, n, true, code, NULL);
        const int nearest = apa_nvfp4_block(value, n, false, nearest_code, NULL);
        assert_int_equal(nearest, amax == 0 ? 0 : clamp_scale(nearest_ue4m3(amax / 6)));
        if (amax == 0) {
            continue;
        }
        const int centre = nearest_ue4m3(amax / 6);
        double least = HUGE_VAL;
        int best = 0;
        for (int k = 0; k < 8; k++) {
            const double s = ue4m3(clamp_scale(centre + offset[k]));
            double error = 0;
            for (size_t i = 0; i < n; i++) {
                const double difference = fabs(value[i]) - e2m1[nearest_e2m1(fabs(value[i]) / s)] * s;
                error += difference * difference;
            }
            ties += error == least;
            best = error < least ? k : best;
            least = error < least ? error : least;
        }
        assert_int_equal(scale, clamp_scale(centre + offset[best]));
        clamped += scale != centre + offset[best];
        chosen[best]++;
        for (size_t i = 0; i < n; i++) {
            assert_int_equal(code[i], nearest_e2m1(fabs(value[i]) / ue4m3(scale)) + (signbit(value[i]) ? 8 : 0));
            assert_int_equal(nearest_code[i],
                             nearest_e2m1(fabs(value[i]) / ue4m3(nearest)) + (signbit(value[i]) ? 8 : 0));
        }
    }
    assert_true(ties > 0 && clamped > 0);
    for (int k = 0; k < 8; k++) {
        assert_true(chosen[k] > 0);
    }
}

/* What the header promises engines: an FP32 quotient never moves a value onto or past a midpoint. */
static void quotients_in_float_give_the_same_codes(void **state)
{
    (void)state;
    static const double midpoint[7] = {.25, .75, 1.25, 1.75, 2.5, 3.5, 5};
    for (int s = 1; s < 127; s++) {
        const float scale = (float)ue4m3(s);
        for (int j = 0; j < 7; j++) {
            const float middle = (float)(midpoint[j] * ue4m3(s));
            const float around[3] = {nextafterf(middle, 0), middle, nextafterf(middle, HUGE_VALF)};
            for (int i = 0; i < 3; i++) {
                const float quotient = around[i] / scale;
                const int side = (around[i] > middle) - (around[i] < middle);
                assert_int_equal((quotient > (float)midpoint[j]) - (quotient < (float)midpoint[j]), side);
            }
        }
        const float middle = (float)(6 * (ue4m3(s) + ue4m3(s - 1)) / 2);
        const float around[3] = {nextafterf(middle, 0), middle, nextafterf(middle, HUGE_VALF)};
        const int expected[3] = {s - 1, s % 2 ? s - 1 : s, s};
        for (int i = 0; i < 3; i++) {
            uint8_t code;
            assert_int_equal(apa_nvfp4_block(&around[i], 1, false, &code, NULL), clamp_scale(expected[i]));
        }
    }
}

/* ---- MX ------------------------------------------------------------------------------------------------------------
 */

static uint8_t mx(float amax, apa_format element, bool round_up)
{
    const float value[3] = {amax / 2, -amax, 0};
    return apa_mx_scale(value, 3, element, round_up);
}

static void mx_scales(void **state)
{
    (void)state;
    const apa_format e2m1_format = APA_FORMAT_E2M1;
    const struct {
        float amax;
        apa_format element;
        int floor, up;
    } cases[] = {
        {6, e2m1_format, 127, 127},
        {nextafterf(6, 7), e2m1_format, 127, 128}, /* OCP clips, rounding up doesn't */
        {7.99f, e2m1_format, 127, 128},
        {8, e2m1_format, 128, 128},
        {1, e2m1_format, 125, 125},
        {1.5f, e2m1_format, 125, 125},
        {1.75f, e2m1_format, 125, 126},
        {448, APA_FORMAT_E4M3, 127, 127},
        {449, APA_FORMAT_E4M3, 127, 128},
        {57344, APA_FORMAT_E5M2, 127, 127},
        {57345, APA_FORMAT_E5M2, 127, 128},
        {127, APA_FORMAT_INT8, 127, 127},
        {127.5f, APA_FORMAT_INT8, 127, 128},
        {FLT_MAX, e2m1_format, 252, 253},
        {FLT_MIN, e2m1_format, 0, 0}, /* 2^-128 is out of range */
        {FLT_TRUE_MIN, e2m1_format, 0, 0},
        {0, e2m1_format, 0, 0},
        {FLT_MAX, APA_FORMAT_INT8, 248, 249},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(mx(cases[i].amax, cases[i].element, false), cases[i].floor);
        assert_int_equal(mx(cases[i].amax, cases[i].element, true), cases[i].up);
    }
    assert_int_equal(apa_mx_scale((const float[]){NAN, 8, INFINITY}, 3, e2m1_format, false), 128);
    assert_int_equal(apa_mx_scale(NULL, 0, e2m1_format, false), 0);
    for (int i = 0; i < 100000; i++) { /* rounded up, the maximum fits and at half the scale it would not */
        const float amax = (float)ldexp(1 + (double)(random_bits() >> 12) * 0x1p-52, (int)(random_bits() % 240) - 118);
        const int field = mx(amax, APA_FORMAT_E4M3, true);
        assert_true(ldexp(448, field - 127) >= (double)amax);
        assert_true(field == 0 || ldexp(448, field - 128) < (double)amax);
    }
}

static int filter(const char *mode, size_t n)
{
    float value[APA_MX_BLOCK];
    uint8_t code[APA_MX_BLOCK];
    if (n == 0 || n > APA_NVFP4_BLOCK) {
        fprintf(stderr, "test_blocks: expected int8|nearest|search and a block size of 1 … %d\n", APA_NVFP4_BLOCK);
        return 2;
    }
    while (fread(value, sizeof value[0], n, stdin) == n) {
        if (strcmp(mode, "int8") == 0) {
            int8_t integer[APA_MX_BLOCK];
            const float scale = apa_int8_quantise(value, n, integer);
            fwrite(&scale, sizeof scale, 1, stdout);
            memcpy(code, integer, n);
        } else {
            const uint8_t scale = apa_nvfp4_block(value, n, strcmp(mode, "search") == 0, code, NULL);
            fwrite(&scale, 1, 1, stdout);
        }
        fwrite(code, 1, n, stdout);
    }
    return fflush(stdout) || ferror(stdin) ? 1 : 0;
}

int main(int argc, char **argv)
{
    if (argc == 3) {
        return filter(argv[1], (size_t)strtoul(argv[2], NULL, 10));
    }
    print_message("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(int8_rounds_to_nearest_even),
        cmocka_unit_test(int8_zero_and_tiny_blocks_stay_zero),
        cmocka_unit_test(int8_counts_non_finite_values_as_zero),
        cmocka_unit_test(int8_error_is_half_a_step),
        cmocka_unit_test(nvfp4_hand_blocks),
        cmocka_unit_test(nvfp4_edges),
        cmocka_unit_test(nvfp4_search_matches_a_plain_search),
        cmocka_unit_test(quotients_in_float_give_the_same_codes),
        cmocka_unit_test(mx_scales),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
