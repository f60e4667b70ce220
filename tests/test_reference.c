/* The reference engine's exact attention against the naive oracle: shapes, dtypes, layouts, masks, special values. */
#include "support/test.h"

#include "reference/reference.h"
#include "support/fixture.h"
#include "support/problems.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static apa_recipe exact_recipe(void)
{
    apa_recipe recipe;
    assert_int_equal(apa_recipe_init(&recipe, "exact"), APA_STATUS_OK);
    return recipe;
}

/* Runs exact, compares with the oracle, checks guards and counts. */
static void check(apa_test_problem *t, double tolerance)
{
    const apa_recipe recipe = exact_recipe();
    double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
    apa_statistics statistics;
    apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, &statistics);
    apa_test_oracle(&t->problem, out, lse);
    const double error = apa_test_rel_l2(&t->problem.out, out);
    const double lse_error = apa_test_lse_error(&t->problem.lse, lse);
    const double lse_tolerance = t->problem.lse.dtype == APA_DTYPE_F64 ? 1e-12 : 1e-7;
    if (!(error <= tolerance) || !(lse_error <= lse_tolerance))
        fail_msg("B %d Hq %d Hkv %d Sq %d Skv %d D %d Dv %d layout %d: rel_l2 %g (%g allowed), lse %g", (int)t->shape.B,
                 (int)t->shape.Hq, (int)t->shape.Hkv, (int)t->shape.Sq, (int)t->shape.Skv, (int)t->shape.D,
                 (int)t->shape.Dv, (int)t->layout, error, tolerance, lse_error);
    assert_false(apa_test_guards_broken(t));
    assert_int_equal(statistics.hot, statistics.visible);
    free(out);
    free(lse);
}

static void check_shape(apa_test_shape shape, apa_test_layout layout, uint64_t seed)
{
    for (int causal = 0; causal < 2; ++causal) {
        apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F64, APA_DTYPE_F64, layout, seed);
        t->problem.causal = causal;
        check(t, 1e-12);
        apa_test_free(t);
    }
}

static void test_shapes(void **state)
{
    static const int64_t seq[][2] = {{1, 1},     {3, 3},     {64, 1},    {1, 64},    {239, 1}, {1, 239},
                                     {113, 203}, {113, 211}, {108, 256}, {127, 129}, {65, 64}, {64, 65}};
    static const int64_t heads[][2] = {{9, 3}, {5, 1}, {4, 4}};
    static const int64_t dims[][2] = {{16, 16}, {64, 64}, {33, 7}};
    (void)state;
    for (size_t s = 0; s < sizeof seq / sizeof seq[0]; ++s)
        for (size_t h = 0; h < sizeof heads / sizeof heads[0]; ++h) {
            const int64_t *d = dims[(s + h) % 3];
            const apa_test_shape shape = {
                1 + (int64_t)(s % 2), heads[h][0], heads[h][1], seq[s][0], seq[s][1], d[0], d[1]};
            check_shape(shape, (apa_test_layout)((s + h) % 3), s * 16 + h);
        }
}

static void test_dims(void **state)
{
    static const int64_t dims[] = {1, 2, 3, 8, 15, 17, 32, 80, 96, 127, 128, 129, 256, 1024};
    (void)state;
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; ++i) {
        check_shape((apa_test_shape){1, 2, 1, 19, 77, dims[i], dims[i]}, APA_TEST_SLICE, i);
        check_shape((apa_test_shape){1, 2, 2, 5, 130, dims[i], 9}, APA_TEST_NHD, i);
    }
}

static void test_random_shapes(void **state)
{
    apa_test_rng rng = {apa_test_seed()};
    (void)state;
    for (uint64_t i = 0; i < 60; ++i) {
        const int64_t Hkv = 1 + apa_test_below(&rng, 3), Sq = 1 + apa_test_below(&rng, 150);
        const apa_test_shape shape = {
            1 + apa_test_below(&rng, 2),  Hkv * (1 + apa_test_below(&rng, 5)), Hkv, Sq, 1 + apa_test_below(&rng, 300),
            1 + apa_test_below(&rng, 40), 1 + apa_test_below(&rng, 40)};
        check_shape(shape, (apa_test_layout)apa_test_below(&rng, 3), i);
    }
}

/* Dtypes of inputs and outputs: the oracle reads the rounded inputs; an output differs by its own rounding. */
static void test_dtypes(void **state)
{
    static const apa_dtype in[] = {APA_DTYPE_F16, APA_DTYPE_BF16, APA_DTYPE_F32, APA_DTYPE_F64};
    static const double half_step[] = {0x1p-11, 0x1p-8, 0x1p-24, 1e-12};
    (void)state;
    for (int i = 0; i < 4; ++i)
        for (int o = 0; o < 4; ++o) {
            apa_test_problem *t = apa_test_make((apa_test_shape){2, 6, 2, 37, 141, 48, 24}, in[i], in[o],
                                                APA_TEST_SLICE, (uint64_t)(i * 4 + o));
            t->problem.causal = 1;
            check(t, half_step[o]);
            apa_test_free(t);
        }
}

/* exact_format rounds each input once, and nothing else: the same as rounded inputs. */
static void test_exact_format(void **state)
{
    static const apa_dtype dtypes[] = {APA_DTYPE_F16, APA_DTYPE_BF16};
    static const apa_exact_format formats[] = {APA_EXACT_FORMAT_F16, APA_EXACT_FORMAT_BF16};
    const apa_test_shape shape = {1, 4, 2, 33, 100, 24, 24};
    (void)state;
    for (int i = 0; i < 2; ++i) {
        apa_test_problem *wide = apa_test_make(shape, APA_DTYPE_F64, APA_DTYPE_F64, APA_TEST_HND, 5);
        apa_test_problem *narrow = apa_test_make(shape, dtypes[i], APA_DTYPE_F64, APA_TEST_HND, 5);
        apa_recipe recipe = exact_recipe();
        recipe.exact_format = formats[i];
        double *out = apa_test_doubles(&wide->problem.out);
        apa_test_run(&apa_reference_engine, context, wide, &recipe, NULL, NULL);
        apa_test_oracle(&narrow->problem, out, NULL);
        assert_true(apa_test_rel_l2(&wide->problem.out, out) <= 1e-12);
        apa_test_oracle(&wide->problem, out, NULL);
        assert_true(apa_test_rel_l2(&wide->problem.out, out) > 1e-5); /* it did round */
        free(out);
        apa_test_free(wide);
        apa_test_free(narrow);
    }
}

static void test_masks(void **state)
{
    static const int64_t offsets[] = {
        APA_Q_OFFSET_DEFAULT, 0, 1, -1, -20, -1000, 63, 64, 65, 500, INT64_MAX, INT64_MAX - 5, INT64_MIN + 1};
    static const int64_t windows[][2] = {{-1, -1}, {0, 0},   {0, -1},  {-1, 0},
                                         {10, 3},  {70, -1}, {-1, 70}, {INT64_MAX, INT64_MAX}};
    (void)state;
    for (size_t o = 0; o < sizeof offsets / sizeof offsets[0]; ++o)
        for (size_t w = 0; w < sizeof windows / sizeof windows[0]; ++w)
            for (int causal = 0; causal < 2; ++causal) {
                apa_test_problem *t = apa_test_make((apa_test_shape){1, 3, 1, 40, 150, 8, 5}, APA_DTYPE_F64,
                                                    APA_DTYPE_F64, APA_TEST_HND, o * 8 + w);
                t->problem.causal = causal;
                t->problem.q_offset = offsets[o];
                t->problem.window_left = windows[w][0];
                t->problem.window_right = windows[w][1];
                check(t, 1e-12);
                apa_test_free(t);
            }
}

static void test_empty(void **state)
{
    static const apa_test_shape shapes[] = {{0, 2, 1, 5, 5, 4, 4}, {1, 2, 1, 0, 5, 4, 4}, {1, 2, 1, 5, 0, 4, 4}};
    (void)state;
    for (int i = 0; i < 3; ++i) {
        apa_test_problem *t = apa_test_make(shapes[i], APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 1);
        check(t, 0);
        if (i == 2)
            for (int64_t s = 0; s < 5; ++s) {
                assert_true(apa_test_get(&t->problem.out, 0, 1, s, 3) == 0);
                assert_true(apa_test_get(&t->problem.lse, 0, 1, s, 0) == -INFINITY);
            }
        apa_test_free(t);
    }
}

static void test_scales(void **state)
{
    static const double scales[] = {0, -0.3, 1, 25, 1e-300};
    (void)state;
    for (int i = 0; i < 5; ++i) {
        apa_test_problem *t =
            apa_test_make((apa_test_shape){1, 2, 2, 21, 130, 16, 8}, APA_DTYPE_F64, APA_DTYPE_F64, APA_TEST_HND, 3);
        t->problem.softmax_scale = scales[i];
        check(t, 1e-12);
        apa_test_free(t);
    }
}

/* Equal keys: lse = score + ln n. V = 1 gives 1. V = identity gives the probabilities, column by column. */
static void test_identities(void **state)
{
    const int64_t n = 96;
    apa_test_problem *t =
        apa_test_make((apa_test_shape){1, 3, 1, 7, n, 16, n}, APA_DTYPE_F64, APA_DTYPE_F64, APA_TEST_HND, 9);
    const apa_recipe recipe = exact_recipe();
    (void)state;
    apa_test_fill(&t->problem.v, 0);
    for (int64_t j = 0; j < n; ++j)
        apa_test_set(&t->problem.v, 0, 0, j, j, 1);
    apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
    for (int64_t j = 0; j < n; ++j) {
        double dot = 0;
        for (int64_t d = 0; d < 16; ++d)
            dot += apa_test_get(&t->problem.q, 0, 2, 6, d) * apa_test_get(&t->problem.k, 0, 0, j, d);
        const double p = exp(dot / 4 - apa_test_get(&t->problem.lse, 0, 2, 6, 0));
        assert_true(fabs(apa_test_get(&t->problem.out, 0, 2, 6, j) - p) <= 1e-14);
    }
    apa_test_fill(&t->problem.v, 1);
    apa_test_fill(&t->problem.k, 0.5);
    apa_test_fill(&t->problem.q, 1);
    apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
    assert_true(fabs(apa_test_get(&t->problem.lse, 0, 0, 0, 0) - (2 + log(96.0))) <= 1e-14);
    for (int64_t c = 0; c < n; ++c)
        assert_true(fabs(apa_test_get(&t->problem.out, 0, 1, 3, c) - 1) <= 1e-14);
    apa_test_free(t);
}

/* One large logit among others: ±2.5e5 as in the wild, ±1e300 as the limit of what doubles carry. */
static void test_huge_logits(void **state)
{
    static const double sizes[] = {2.5e5, 1e30, 1e300};
    (void)state;
    for (int i = 0; i < 6; ++i) {
        apa_test_problem *t =
            apa_test_make((apa_test_shape){1, 1, 1, 4, 200, 4, 4}, APA_DTYPE_F64, APA_DTYPE_F64, APA_TEST_HND, 4);
        t->problem.softmax_scale = 1;
        apa_test_fill(&t->problem.q, 1);
        apa_test_fill(&t->problem.k, i % 2 ? 0 : -sizes[i / 2] / 4);
        for (int64_t d = 0; d < 4; ++d)
            apa_test_set(&t->problem.k, 0, 0, 100, d, (i % 2 ? 1 : -1) * sizes[i / 2] / 4);
        check(t, 1e-12);
        for (int64_t d = 0; d < 4; ++d)
            assert_true(isfinite(apa_test_get(&t->problem.out, 0, 0, 3, d)));
        if (i % 2)
            assert_true(apa_test_get(&t->problem.out, 0, 0, 3, 2) == apa_test_get(&t->problem.v, 0, 0, 100, 2));
        apa_test_free(t);
    }
}

/* NaN and Inf in keys, values and queries: seen by exactly the rows that see them, and an invisible one changes no bit.
 */
static void test_non_finite(void **state)
{
    static const double poison[] = {NAN, INFINITY, -INFINITY};
    const apa_test_shape shape = {1, 2, 1, 100, 200, 8, 8};
    const apa_recipe recipe = exact_recipe();
    (void)state;
    for (int i = 0; i < 9; ++i) {
        apa_test_problem *clean = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 6);
        apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 6);
        const apa_tensor *x = i / 3 == 0 ? &t->problem.q : i / 3 == 1 ? &t->problem.k : &t->problem.v;
        clean->problem.causal = t->problem.causal = 1;
        apa_test_set(x, 0, 0, i / 3 == 0 ? 50 : 150, 3, poison[i % 3]); /* key 150: seen by rows 50 … 99 */
        apa_test_run(&apa_reference_engine, context, clean, &recipe, NULL, NULL);
        check(t, 1e-12);
        for (int64_t h = 0; h < 2; ++h)
            for (int64_t s = 0; s < 100; ++s) {
                const double got = apa_test_get(&t->problem.out, 0, h, s, 3);
                const bool touched = i / 3 == 0 ? s == 50 && h == 0 : s >= 50;
                if (!touched)
                    assert_true(got == apa_test_get(&clean->problem.out, 0, h, s, 3));
                else if (i % 3 == 0)
                    assert_true(isnan(got));
            }
        apa_test_free(clean);
        apa_test_free(t);
    }
}

/* A key whose score is -inf weighs nothing; a row of only such keys is a row that sees nothing. */
static void test_minus_infinite_scores(void **state)
{
    const apa_test_shape shape = {1, 1, 1, 2, 130, 4, 4};
    (void)state;
    for (int all = 0; all < 2; ++all) {
        apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 8);
        apa_test_fill(&t->problem.q, 1);
        for (int64_t j = 0; j < (all ? 130 : 70); ++j)
            apa_test_set(&t->problem.k, 0, 0, j, 0, -INFINITY);
        check(t, 1e-12);
        assert_true(isfinite(apa_test_get(&t->problem.out, 0, 0, 1, 0)));
        assert_true(isfinite(apa_test_get(&t->problem.lse, 0, 0, 1, 0)) == !all);
        apa_test_free(t);
    }
}

/* A row's bits depend on nothing but the row: not on threads, packing, group, nor on how many other rows there are. */
static void test_same_bits(void **state)
{
    const apa_test_shape shape = {2, 6, 2, 90, 333, 32, 32};
    apa_test_problem *whole = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 11);
    apa_recipe recipe = exact_recipe();
    (void)state;
    whole->problem.causal = 1;
    apa_test_run(&apa_reference_engine, context, whole, &recipe, NULL, NULL);
    for (int i = 1; i <= 3; ++i) {
        apa_test_problem *again = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 11);
        apa_context_options options;
        apa_context *other;
        apa_context_options_init(&options);
        options.threads = i;
        again->problem.causal = 1;
        recipe.packing = i % 2 ? APA_PACKING_ROWS : APA_PACKING_HEAD;
        recipe.group = i;
        assert_int_equal(apa_context_create(&other, &options), APA_STATUS_OK);
        apa_test_run(&apa_reference_engine, other, again, &recipe, NULL, NULL);
        assert_memory_equal(whole->memory[3], again->memory[3], whole->bytes[3]);
        assert_memory_equal(whole->memory[4], again->memory[4], whole->bytes[4]);
        apa_context_destroy(other);
        apa_test_free(again);
    }
    /* rows 40 … 49 alone, as a chunk */
    apa_test_problem *part =
        apa_test_make((apa_test_shape){2, 6, 2, 10, 333, 32, 32}, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 12);
    part->problem.q.data = (float *)whole->problem.q.data + 40 * 32;
    memcpy(part->problem.q.stride, whole->problem.q.stride, sizeof part->problem.q.stride);
    part->problem.k = whole->problem.k;
    part->problem.v = whole->problem.v;
    part->problem.causal = 1;
    part->problem.q_offset = 333 - 90 + 40;
    recipe = exact_recipe();
    apa_test_run(&apa_reference_engine, context, part, &recipe, NULL, NULL);
    for (int64_t b = 0; b < 2; ++b)
        for (int64_t h = 0; h < 6; ++h)
            for (int64_t s = 0; s < 10; ++s)
                for (int64_t c = 0; c < 32; ++c)
                    assert_true(apa_test_get(&part->problem.out, b, h, s, c) ==
                                apa_test_get(&whole->problem.out, b, h, s + 40, c));
    apa_test_free(part);
    apa_test_free(whole);
}

/* Broadcast (stride 0) and backward (negative stride) inputs; no LSE wanted. */
static void test_odd_strides(void **state)
{
    apa_test_problem *t =
        apa_test_make((apa_test_shape){2, 4, 2, 6, 70, 8, 8}, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 2);
    const apa_recipe recipe = exact_recipe();
    double *out = apa_test_doubles(&t->problem.out);
    (void)state;
    t->problem.k.stride[0] = 0;
    t->problem.v.data = (float *)t->problem.v.data + 69 * 8;
    t->problem.v.stride[2] = -8;
    apa_tensor lse = t->problem.lse;
    t->problem.lse.dtype = APA_DTYPE_NONE;
    apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
    apa_test_oracle(&t->problem, out, NULL);
    assert_true(apa_test_rel_l2(&t->problem.out, out) <= 1e-12);
    t->problem.lse = lse;
    assert_false(apa_test_guards_broken(t)); /* lse was not written: its elements count as guards */
    free(out);
    apa_test_free(t);
}

static void test_refusals(void **state)
{
    apa_test_problem *t =
        apa_test_make((apa_test_shape){1, 1, 1, 2, 2, 24, 24}, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 1);
    apa_recipe recipe;
    (void)state;
    assert_int_equal(apa_recipe_init(&recipe, "apa"), APA_STATUS_OK);
    for (int i = 0; i < 2; ++i) {
        apa_call call = apa_test_call(&t->problem, &recipe);
        if (i == 0)
            call.recipe.tile = 128;
        else
            call.recipe.p_scale = APA_P_SCALE_UE4M3;
        assert_int_equal(apa_reference_engine.resolve(context, &call), APA_STATUS_UNSUPPORTED);
        assert_non_null(strstr(apa_context_message(context), i == 0 ? "tile" : "p_scale"));
    }
    apa_call call = apa_test_call(&t->problem, &recipe);
    assert_int_equal(apa_reference_engine.resolve(context, &call), APA_STATUS_OK);
    assert_false(isnan(call.recipe.eps));
    assert_true(call.recipe.group == 16 && call.recipe.packing == APA_PACKING_ROWS && call.recipe.q_terms == 1);
    apa_test_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),        cmocka_unit_test(test_dims),
        cmocka_unit_test(test_random_shapes), cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_exact_format),  cmocka_unit_test(test_masks),
        cmocka_unit_test(test_empty),         cmocka_unit_test(test_scales),
        cmocka_unit_test(test_identities),    cmocka_unit_test(test_huge_logits),
        cmocka_unit_test(test_non_finite),    cmocka_unit_test(test_minus_infinite_scores),
        cmocka_unit_test(test_same_bits),     cmocka_unit_test(test_odd_strides),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
