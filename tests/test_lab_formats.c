/* Formats and sums of the reference engine's cold operands: rounding grids against the number formats, narrow
 * accumulators and probability codes by hand. */
#include "support/test.h"

#include "reference/internal.h"
#include "support/problems.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void same_rounding(apa_format format, const apa_reference_grid *grid, double x)
{
    const double expected = apa_format_round(format, x), got = apa_reference_round(grid, x);
    if (memcmp(&expected, &got, sizeof got) != 0)
        fail_msg("format %d: %a rounds to %a, not %a", (int)format, x, got, expected);
}

/* Values of every size, halves between codes, their neighbours, both signs. */
static void test_grids(void **state)
{
    static const struct {
        apa_format format;
        const apa_reference_grid *grid;
        int codes;
    } rows[] = {{APA_FORMAT_E2M1, &apa_reference_e2m1, 8},
                {APA_FORMAT_E4M3, &apa_reference_e4m3, 127},
                {APA_FORMAT_F16, &apa_reference_f16, 31744},
                {APA_FORMAT_BF16, &apa_reference_bf16, 32640}};
    apa_test_rng rng = {apa_test_seed()};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        for (int c = 0; c + 1 < rows[i].codes; ++c) {
            const double a = apa_format_decode(rows[i].format, (uint32_t)c);
            const double b = apa_format_decode(rows[i].format, (uint32_t)c + 1), middle = a / 2 + b / 2;
            const double probe[] = {a, middle, nextafter(middle, -1), nextafter(middle, INFINITY)};
            for (int k = 0; k < 8; ++k)
                same_rounding(rows[i].format, rows[i].grid, k % 2 ? -probe[k / 2] : probe[k / 2]);
        }
        for (int k = 0; k < 200000; ++k)
            same_rounding(rows[i].format, rows[i].grid,
                          ldexp(apa_test_uniform(&rng) - 0.5, (int)apa_test_below(&rng, 320) - 160));
        assert_true(isnan(apa_reference_round(rows[i].grid, NAN)));
    }
    same_rounding(APA_FORMAT_F16, &apa_reference_f16, 65519.99);
    same_rounding(APA_FORMAT_F16, &apa_reference_f16, 65520);
    same_rounding(APA_FORMAT_E4M3, &apa_reference_e4m3, 1e300);
    same_rounding(APA_FORMAT_E2M1, &apa_reference_e2m1, 0);
}

static double fp22(double sum, const double *product, int64_t n)
{
    return apa_reference_step(APA_ACCUMULATOR_FP22, sum, product, n);
}

/* 13 stored bits behind the leading one; addends are cut before they are added, so small ones vanish one by one. */
static void test_fp22(void **state)
{
    (void)state;
    assert_true(fp22(1, (const double[]){0x1p-13}, 1) == 1 + 0x1p-13);
    assert_true(fp22(1, (const double[]){0x1p-14}, 1) == 1);
    assert_true(fp22(1, (const double[]){0x1.8p-13}, 1) == 1 + 0x1p-13);
    assert_true(fp22(1, (const double[]){-0x1p-14}, 1) == 1); /* toward zero: -0 */
    assert_true(fp22(-1, (const double[]){-0x1.ffp-13}, 1) == -1 - 0x1p-13);
    const double many[32] = {[0] = 0x1p-14, [1] = 0x1p-14, [2] = 0x1p-14,  [3] = 0x1p-14,
                             [8] = 0x1p-14, [9] = 0x1p-14, [10] = 0x1p-14, [31] = 0x1p-14};
    assert_true(fp22(1, many, 32) == 1);       /* 8 of 2^-14 are 2^-11, and all are lost */
    assert_true(fp22(0, many, 32) == 0x1p-11); /* among themselves they are not */
    assert_true(fp22(1.5, (const double[]){0.75}, 1) == 2.25);
    assert_true(fp22(1 + 0x1p-13, (const double[]){1}, 1) == 2); /* 2 + 2^-13 has 14 bits behind: cut */
    assert_true(fp22(3, (const double[]){-3}, 1) == 0);
    assert_true(fp22(0, NULL, 0) == 0);
    assert_true(isnan(fp22(NAN, (const double[]){1}, 1)) || isnan(fp22(0, (const double[]){NAN, 1}, 2)));
}

static void test_f16_and_f32_sums(void **state)
{
    (void)state;
    const double tiny[16] = {0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14,
                             0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14, 0x1p-14};
    /* 16 · 2^-14 = 2^-10 is one ulp of FP16 at 1: an instruction's products are summed before they are rounded */
    assert_true(apa_reference_step(APA_ACCUMULATOR_F16, 1, tiny, 16) == 1 + 0x1p-10);
    assert_true(apa_reference_step(APA_ACCUMULATOR_F16, 1, tiny, 8) == 1); /* a tie, to even */
    assert_true(apa_reference_step(APA_ACCUMULATOR_F16, 65504, (const double[]){16}, 1) == INFINITY);
    assert_true(apa_reference_step(APA_ACCUMULATOR_F32, 1, (const double[]){0x1p-24}, 1) == 1);
    assert_true(apa_reference_step(APA_ACCUMULATOR_F32, 1, (const double[]){0x1.8p-24}, 1) == 1 + 0x1p-23);
    assert_true(apa_reference_step(APA_ACCUMULATOR_F64, 1, (const double[]){0x1p-24}, 1) == 1 + 0x1p-24);
}

/* ---- probabilities of one tile by hand ---- */

typedef struct tile {
    apa_reference_row row;
    double p[APA_REFERENCE_TILE], code[APA_REFERENCE_TILE];
} tile;

/* Scores (log2) of the first n keys, the others unseen, against a frame; preset and one more setting. */
static tile codes_of(const char *preset, const char *knob, const char *value, double frame, const double *s, int n)
{
    tile t = {.row = {.next = frame, .top = -INFINITY}};
    apa_recipe recipe;
    assert_int_equal(apa_recipe_init(&recipe, preset), APA_STATUS_OK);
    if (knob)
        assert_int_equal(apa_recipe_set(&recipe, knob, value, NULL, 0), APA_STATUS_OK);
    apa_recipe_fill_auto(&recipe, 64, 64, 64);
    for (int j = 0; j < APA_REFERENCE_TILE; ++j) {
        t.p[j] = j < n ? s[j] : -INFINITY;
        t.row.top = t.p[j] > t.row.top ? t.p[j] : t.row.top;
    }
    apa_reference_probabilities(&recipe, &t.row, t.p, t.code);
    return t;
}

static void assert_codes(const tile *t, const double *expected, int n)
{
    for (int j = 0; j < APA_REFERENCE_TILE; ++j) {
        const double want = j < n ? expected[j] : 0;
        if (!(t->code[j] == want))
            fail_msg("code %d is %g, not %g", j, t->code[j], want);
    }
}

static void test_static_codes(void **state)
{
    (void)state;
    /* S = 1: 1, 1/2, 3·2^-10 (a subnormal step of 2^-9: a tie between 1 and 2, to even 2^-8), 2^-10 (tie, to 0) */
    const double s[] = {0, -1, log2(3) - 10, -10};
    const tile one = codes_of("pcast", NULL, NULL, 0, s, 4);
    assert_codes(&one, (const double[]){1, 0.5, 0x1p-8, 0}, 4);
    assert_true(fabs(one.row.p_sum - (1.5 + 3 * 0x1p-10 + 0x1p-10)) <= 1e-15); /* before rounding */
    /* S = 256 and a frame 2 higher: the same numbers times 64 */
    const tile s256 = codes_of("pcast-reverse", NULL, NULL, 2, s, 4);
    assert_codes(&s256, (const double[]){64, 32, 0.1875, 0.0625}, 4);
    /* quantised sum */
    const tile own = codes_of("pcast", "p_sum", "quantised", 0, s, 4);
    assert_true(own.row.p_sum == 1.5 + 0x1p-8);
    /* ThriftAttention: E2M1 of 6·P: 6, 3, 1.5, .75 → a tie between .5 and 1, to even 1; .375 → .5 */
    const tile thrift = codes_of("thrift", NULL, NULL, 0, (const double[]){0, -1, -2, -3, -4, -5}, 6);
    assert_codes(&thrift, (const double[]){6, 3, 1.5, 1, 0.5, 0}, 6);
}

/* The row's largest score, 1.5, rounded up to the frame 2: 256·2^(s - 2) is 181.02, 90.51, 8, of steps 16, 8, 1. Direct
 * codes are 8·(s - 2) + 120 = 116, 108, 80: 1.5·2^7, 1.5·2^6, 2^3, in units of 2^(.455/8)/256. */
static void test_row_tile_pow2_codes(void **state)
{
    (void)state;
    const double s[] = {1.5, 0.5, -3, -1000};
    const tile t = codes_of("apa-e4m3", "p_scale", "row-tile-pow2", -INFINITY, s, 4);
    assert_codes(&t, (const double[]){176, 88, 8, 0}, 4);
    assert_true(t.row.p_frame == 2 && t.row.p_sum == 272.0 / 256);
    const tile direct = codes_of("directp-e4m3", "p_scale", "row-tile-pow2", -INFINITY, s, 4);
    assert_codes(&direct, (const double[]){192, 96, 8, 0}, 4);
    assert_true(fabs(direct.row.p_sum * 256 * exp2(0.455 / 8) - 296) <= 1e-12);
    const tile lone = codes_of("apa-e4m3", "p_scale", "row-tile-pow2", -INFINITY, (const double[]){-4}, 1);
    assert_codes(&lone, (const double[]){256}, 1); /* a power of two is its own frame */
}

/* The fourth pair of tiles has frames of an integer and three quarters: 1.75 here. 256·2^(s - 1.75) is 215.3, 107.6,
 * 9.51 in steps of 16, 8, 1; direct codes are 118, 110, 82. */
static void test_phases(void **state)
{
    (void)state;
    const double s[] = {1.5, 0.5, -3};
    apa_recipe recipe;
    for (int direct = 0; direct < 2; ++direct) {
        tile t = {.row = {.top = 1.5}};
        assert_int_equal(apa_recipe_init(&recipe, direct ? "directp-e4m3" : "apa-e4m3"), APA_STATUS_OK);
        assert_int_equal(apa_recipe_set(&recipe, "p_scale", "row-tile-pow2", NULL, 0), APA_STATUS_OK);
        assert_int_equal(apa_recipe_set(&recipe, "p_phase", "on", NULL, 0), APA_STATUS_OK);
        apa_recipe_fill_auto(&recipe, 64, 64, 64);
        t.row.phase = apa_reference_phase(&recipe, 6);
        for (int j = 0; j < APA_REFERENCE_TILE; ++j)
            t.p[j] = j < 3 ? s[j] : -INFINITY;
        apa_reference_probabilities(&recipe, &t.row, t.p, t.code);
        assert_true(t.row.p_frame == 1.75);
        assert_codes(&t, direct ? (const double[]){224, 112, 10} : (const double[]){208, 104, 10}, 3);
    }
    for (int64_t t = 0; t < 20; ++t)
        assert_true(apa_reference_phase(&recipe, t) == ((const double[]){0, 0.5, 0.25, 0.75})[t / 2 % 4]);
    recipe.p_phase = APA_TOGGLE_OFF;
    assert_true(apa_reference_phase(&recipe, 2) == 0);
}

/* Scales up to a power of two: 7/448 = 2^-6 stays, 8/448 becomes 2^-5; codes differ by their exponents alone. */
static void test_pow2_scales(void **state)
{
    (void)state;
    float x[] = {7, -0.6F, 0}, y[] = {8, -0.6F, 0};
    assert_true(apa_reference_e4m3_units(x, 3, 1, 7, 448, true) == 0x1p-6);
    assert_true(x[0] == 448 && x[1] == -40 && x[2] == 0); /* .6·64 = 38.4, of step 4 */
    assert_true(apa_reference_e4m3_units(y, 3, 1, 8, 448, true) == 0x1p-5);
    assert_true(y[0] == 256 && y[1] == -20 && y[2] == 0);
}

/* SageAttention3: the row's largest P to 2688; groups 2688 and 168 have scales 448 and 28, and 168·2^-3.5 = 14.8 → 14;
 * a group that is not seen at all, and one whose scale rounds to 0, are 0. */
static void test_two_level_codes(void **state)
{
    double s[64];
    (void)state;
    for (int j = 0; j < 64; ++j)
        s[j] = -1000;
    s[0] = 5, s[1] = 4, s[16] = 1, s[17] = -2.5, s[32] = -20;
    const tile t = codes_of("sage3", NULL, NULL, -INFINITY, s, 64);
    double expected[64] = {[0] = 2688, [1] = 1344, [16] = 168, [17] = 14};
    assert_codes(&t, expected, 64);
    assert_true(t.row.p_frame == 5);
    const tile few = codes_of("sage3", NULL, NULL, -INFINITY, s, 2);
    assert_codes(&few, expected, 2);
}

/* MXFP4, rounded up: the largest P of 32 keys, 1, has scale 1/4 (6/4 >= 1 and 6/8 < 1); floor has 2^-2 too; 7/8 of
 * 2^-4: up 2^-6 (6·2^-6 >= .0547), floor 2^-7, and .0547·2^7 = 7 is clipped to 6. */
static void test_mx_codes(void **state)
{
    (void)state;
    const double s[] = {0, -1, -3, -1000};
    const tile up = codes_of("apa-mxfp4", "mx_rounding", "up", -4, s, 4); /* τ = 4: P = 2^s */
    assert_codes(&up, (const double[]){1, 0.5, 0.125, 0}, 4);
    double far[64];
    for (int j = 0; j < 64; ++j)
        far[j] = -1000;
    far[40] = log2(0.9) - 4;
    const tile floor_ = codes_of("apa-mxfp4", NULL, NULL, -4, far, 64);
    double expected[64] = {[40] = 6 * 0x1p-7};
    assert_codes(&floor_, expected, 64);
    const tile above = codes_of("apa-mxfp4", "mx_rounding", "up", -4, far, 64);
    expected[40] = 4 * 0x1p-6; /* .0563·2^6 = 3.6 */
    assert_codes(&above, expected, 64);
}

/* Direct codes against rounding the exponential: the same, away from the midpoints themselves. */
static void test_direct_codes(void **state)
{
    apa_test_rng rng = {apa_test_seed() + 7};
    (void)state;
    for (int trial = 0; trial < 200; ++trial) {
        double s[64];
        for (int j = 0; j < 64; ++j)
            s[j] = 4 * apa_test_normal(&rng) - 12;
        const tile direct = codes_of("directp", NULL, NULL, 0, s, 64),
                   exp_ = codes_of("directp", "p_map", "exp", 0, s, 64);
        assert_codes(&direct, exp_.code, 64);
    }
    /* P = 1 in a block of scale 256; 6·P just over the midpoints .75 and .25, and under .25 */
    const double s[] = {0, log2(0.76 / 6), log2(0.26 / 6), log2(0.24 / 6)};
    const tile t = codes_of("directp", NULL, NULL, 0, s, 4);
    assert_codes(&t, (const double[]){6 * 256, 1 * 256, 0.5 * 256, 0}, 4);
}

/* E4M3: floor(8·log2(256 P) + 56 - .455 + .5). P = 1: code 120 = 256. 2^-.5: 116.045 → 116 = 192. 2^-16: 64 - 8 + .045
 * - ... */
static void test_direct_e4m3_codes(void **state)
{
    (void)state;
    const double s[] = {0, -0.5, -1, -15.0, -15.1, -1000};
    const tile t = codes_of("directp-e4m3", NULL, NULL, 0, s, 6);
    /* 8·(8 - 15) + 56.045 = .045 → code 0; 8·7.5 + 56.045 = 116.045 → 116: 1.5·2^7 */
    assert_codes(&t, (const double[]){256, 192, 128, 0, 0, 0}, 6);
    const tile low = codes_of("directp-e4m3", NULL, NULL, 0, (const double[]){-14.8, -14}, 2);
    /* 8·(-6.8) + 56.045 = 1.645 → 1 = 2^-9; 8·(-6) + 56.045 = 8.045 → 8 = 2^-6 */
    assert_codes(&low, (const double[]){0x1p-9, 0x1p-6}, 2);
    /* mean relative error over even logarithms: 3.14 % rms against 2.65 % for rounding (figures of docs/recipes.md) */
    double direct = 0, rounded = 0, bias = 0;
    const int n = 64 * 400;
    for (int i = 0; i < n; i += 64) {
        double x[64];
        for (int j = 0; j < 64; ++j)
            x[j] = -8.0 * (i + j + 0.5) / n;
        const tile a = codes_of("directp-e4m3", NULL, NULL, 0, x, 64);
        const tile b = codes_of("directp-e4m3", "p_map", "exp", 0, x, 64);
        for (int j = 0; j < 64; ++j) {
            const double truth = 256 * exp2(x[j]);
            direct += (a.code[j] / truth - 1) * (a.code[j] / truth - 1) / n;
            rounded += (b.code[j] / truth - 1) * (b.code[j] / truth - 1) / n;
            bias += (a.code[j] / truth - 1) / n;
        }
    }
    printf("# direct E4M3 codes: rms %.4f, bias %.5f; rounded %.4f\n", sqrt(direct), bias, sqrt(rounded));
    assert_true(fabs(sqrt(direct) - 0.0314) <= 0.0005);
    assert_true(fabs(sqrt(rounded) - 0.0265) <= 0.0005);
    assert_true(fabs(bias) <= 0.003);
}

/* ---- selection counts ---- */

static void test_selection_counts(void **state)
{
    apa_call call = {
        .Sq = 2048 * 64, .Skv = 2048 * 64, .D = 64, .Dv = 64, .causal = true, .window_left = -1, .window_right = -1};
    static const double fraction[] = {0.05, 0.10, 0.25};
    static const int64_t expected[] = {52, 105, 274};
    (void)state;
    assert_int_equal(apa_recipe_init(&call.recipe, "thrift"), APA_STATUS_OK);
    apa_recipe_fill_auto(&call.recipe, call.Sq, call.Skv, 64);
    for (int i = 0; i < 3; ++i) {
        call.recipe.fraction = fraction[i];
        call.causal = true;
        assert_int_equal(apa_reference_select_count(&call, 2048), expected[i]);
        assert_int_equal(apa_reference_select_count(&call, 10), 10);
        call.causal = false;
        assert_int_equal(apa_reference_select_count(&call, 2048), (int64_t)round(fraction[i] * 2048));
        assert_int_equal(apa_reference_select_count(&call, 3), fraction[i] * 3 > 0.5 ? 1 : 1);
    }
    /* the closed form is the k whose pairs are nearest to f of all; a chunk at the end counts its own pairs */
    call.causal = true;
    call.recipe.fraction = 0.1;
    call.Sq = 64 * 16;
    call.q_offset = call.Skv - call.Sq;
    assert_int_equal(apa_reference_select_count(&call, 2048), (int64_t)round(0.1 * (2033 + 2048) / 2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grids),
        cmocka_unit_test(test_fp22),
        cmocka_unit_test(test_f16_and_f32_sums),
        cmocka_unit_test(test_static_codes),
        cmocka_unit_test(test_row_tile_pow2_codes),
        cmocka_unit_test(test_phases),
        cmocka_unit_test(test_pow2_scales),
        cmocka_unit_test(test_two_level_codes),
        cmocka_unit_test(test_mx_codes),
        cmocka_unit_test(test_direct_codes),
        cmocka_unit_test(test_direct_e4m3_codes),
        cmocka_unit_test(test_selection_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
