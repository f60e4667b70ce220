/* Error figures by hand, in every corner, and whole evaluations against the reference engine. */
#include "support/test.h"

#include "apa/eval.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEED 77u

static apa_context *context;
static uint64_t random_state = SEED;

/* Roughly normal: a sum of twelve uniforms. */
static double noise(void)
{
    double sum = -6;
    for (int i = 0; i < 12; i++) {
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        sum += (double)(random_state >> 11) * 0x1p-53;
    }
    return sum;
}

static void near(double found, double expected, double tolerance)
{
    if (!(fabs(found - expected) <= tolerance))
        print_error("found %.17g, expected %.17g\n", found, expected);
    assert_true(fabs(found - expected) <= tolerance);
}

static apa_error measure(const double *x, const double *y, int64_t H, int64_t S, int64_t D)
{
    apa_error error;
    const apa_tensor a = apa_tensor_hnd(x, APA_DTYPE_F64, 1, H, S, D), b = apa_tensor_hnd(y, APA_DTYPE_F64, 1, H, S, D);
    assert_int_equal(apa_error_measure(context, &a, NULL, &b, NULL, &error), APA_STATUS_OK);
    assert_int_equal(error.size, sizeof error);
    return error;
}

static void by_hand(void **unused)
{
    (void)unused;
    /* two heads, two rows, two channels: equal; doubled; orthogonal; opposite */
    const double x[8] = {1, 2, 6, 8, 0, 1, -1, 0}, y[8] = {1, 2, 3, 4, 1, 0, 1, 0};
    const apa_error e = measure(x, y, 2, 2, 2);
    assert_int_equal(e.pairs, 4);
    near(e.mean_cos, (1 + 1 + 0 - 1) / 4.0, 1e-15);
    near(e.min_cos, -1, 0);
    assert_int_equal(e.min_cos_pair[0] * 100 + e.min_cos_pair[1] * 10 + e.min_cos_pair[2], 11);
    assert_int_equal(e.lt_0_99, 2);
    assert_int_equal(e.lt_0_9, 2);
    assert_int_equal(e.lt_0, 1);
    near(e.pooled_cos, (5 + 50 + 0 - 1) / sqrt(107.0 * 32), 1e-15);
    near(e.rel_l2, sqrt((25.0 + 2 + 4) / 32), 1e-15);
    near(e.rel_l2_max, 2, 1e-15);
    assert_int_equal(e.rel_l2_max_pair[1] * 10 + e.rel_l2_max_pair[2], 11);
    near(e.max_abs, 4, 0);
    near(e.mean_abs, (3 + 4 + 1 + 1 + 2) / 8.0, 1e-15);
    near(e.norm_ratio_min, 1, 1e-15);
    near(e.norm_ratio_max, 2, 1e-15);
    assert_true(isnan(e.lse_max_abs));
    assert_int_equal(e.non_finite, 0);
}

/* Of equal worst pairs the first counts, within a block of pairs and across blocks. */
static void first_of_equals(void **unused)
{
    (void)unused;
    enum { S = 400 };
    static double x[S], y[S];
    for (int i = 0; i < S; i++) {
        y[i] = 1;
        x[i] = i == 140 || i == 150 || i == 390 ? -1 : 1;
    }
    const apa_error e = measure(x, y, 2, S / 2, 1);
    assert_int_equal(e.lt_0, 3);
    assert_int_equal(e.min_cos_pair[1] * 1000 + e.min_cos_pair[2], 140);
    assert_int_equal(e.rel_l2_max_pair[1] * 1000 + e.rel_l2_max_pair[2], 140);
}

static void zeros(void **unused)
{
    (void)unused;
    const double zero[4] = {0, -0.0, 0, 0}, one[4] = {0, 0, 1, 0};
    apa_error e = measure(zero, zero, 1, 2, 2);
    near(e.mean_cos, 1, 0);
    near(e.pooled_cos, 1, 0);
    near(e.rel_l2, 0, 0);
    near(e.rel_l2_max, 0, 0);
    near(e.norm_ratio_max, 1, 0);
    e = measure(one, zero, 1, 2, 2); /* something where nothing should be */
    near(e.min_cos, 0, 0);
    near(e.mean_cos, 0.5, 0);
    near(e.pooled_cos, 0, 0);
    assert_true(isinf(e.rel_l2) && isinf(e.rel_l2_max));
    e = measure(zero, one, 1, 2, 2); /* nothing where something should be */
    near(e.min_cos, 0, 0);
    near(e.rel_l2_max, 1, 0);
    near(e.norm_ratio_min, 0, 0);
    assert_int_equal(e.lt_0_9, 1);
    assert_int_equal(e.lt_0, 0);
    e = measure(zero, zero, 1, 0, 2); /* no pairs */
    assert_int_equal(e.pairs, 0);
    assert_true(isnan(e.mean_cos) && isnan(e.min_cos) && isnan(e.rel_l2) && isnan(e.mean_abs)); /* none, not perfect */
    assert_int_equal(e.min_cos_pair[0], -1);
}

static void non_finite(void **unused)
{
    (void)unused;
    const double fine[4] = {1, 2, 3, 4}, with_nan[4] = {1, 2, NAN, 4}, with_inf[4] = {1, INFINITY, 3, 4};
    const double *const bad[2] = {with_nan, with_inf};
    for (int i = 0; i < 2; i++) {
        apa_error e = measure(bad[i], fine, 1, 2, 2);
        assert_int_equal(e.non_finite, 1);
        near(e.min_cos, -1, 0);
        near(e.mean_cos, 0, 1e-15);
        near(e.pooled_cos, -1, 0);
        assert_int_equal(e.min_cos_pair[2], i == 0 ? 1 : 0);
        assert_int_equal(e.lt_0, 1);
        assert_true(isinf(e.rel_l2) && isinf(e.rel_l2_max) && isinf(e.max_abs) && isinf(e.mean_abs));
        assert_int_equal(e.truth_not_finite, 0);
        for (int same = 0; same < 2; same++) { /* without a truth a pair is neither perfect nor wrong: it is left out */
            const double half[4] = {0.5, 1, 1.5, 2}, *x = same ? bad[i] : half;
            e = measure(x, bad[i], 1, 2, 2);
            assert_int_equal(e.pairs, 2);
            assert_int_equal(e.truth_not_finite, 1);
            assert_int_equal(e.non_finite, 0);
            assert_int_equal(e.min_cos_pair[2], i);
            assert_int_equal(e.rel_l2_max_pair[2], i);
            assert_int_equal(e.lt_0_99, 0);
            near(e.min_cos + e.mean_cos + e.pooled_cos, 3, 1e-15);
            near(e.rel_l2, same ? 0 : 0.5, 1e-15);
            near(e.rel_l2_max, same ? 0 : 0.5, 1e-15);
            near(e.max_abs, same ? 0 : i == 0 ? 1 : 2, 1e-15);
            near(e.mean_abs, same ? 0 : i == 0 ? 0.75 : 1.75, 1e-15);
            near(e.norm_ratio_min, same ? 1 : 0.5, 1e-15);
        }
    }
}

/* Where no pair has a truth there is no figure, and none of many blocks hides one. */
static void truth_not_finite(void **unused)
{
    (void)unused;
    enum { PAIRS = 400 };
    double x[2 * PAIRS], y[2 * PAIRS];
    for (int i = 0; i < 2 * PAIRS; i++) {
        x[i] = 1;
        y[i] = NAN;
    }
    apa_error e = measure(x, y, 1, PAIRS, 2);
    assert_int_equal(e.truth_not_finite, PAIRS);
    assert_int_equal(e.lt_0_99 + e.non_finite, 0);
    assert_int_equal(e.min_cos_pair[2] + e.rel_l2_max_pair[2], -2);
    assert_true(isnan(e.pooled_cos) && isnan(e.mean_cos) && isnan(e.min_cos) && isnan(e.rel_l2));
    assert_true(isnan(e.rel_l2_max) && isnan(e.max_abs) && isnan(e.mean_abs));
    assert_true(isnan(e.norm_ratio_min) && isnan(e.norm_ratio_max));
    y[2 * 333] = 1; /* the third block's; one value alone is no truth of a pair */
    assert_int_equal(measure(x, y, 1, PAIRS, 2).truth_not_finite, PAIRS);
    y[2 * 333 + 1] = -1;
    e = measure(x, y, 1, PAIRS, 2);
    assert_int_equal(e.truth_not_finite, PAIRS - 1);
    assert_int_equal(e.min_cos_pair[2], 333);
    near(e.min_cos, 0, 1e-15);
    near(e.mean_cos, 0, 1e-15);
    near(e.rel_l2, sqrt(2), 1e-15);
    x[0] = NAN; /* beside a truth that is none */
    assert_int_equal(measure(x, y, 1, PAIRS, 2).non_finite, 0);
    x[2 * 333] = NAN;
    e = measure(x, y, 1, PAIRS, 2);
    assert_int_equal(e.non_finite, 1);
    near(e.mean_cos, -1, 0);
    assert_true(isinf(e.rel_l2));
}

/* Squares of these leave the range of a double. */
static void extreme_magnitudes(void **unused)
{
    (void)unused;
    static const double scales[] = {1e300, 1e200, 1e-200, 1e-300, 4e-320};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        const double s = scales[i], y[4] = {1 * s, 2 * s, 3 * s, 4 * s}, x[4] = {1 * s, 2 * s, 4 * s, 3 * s};
        const apa_error e = measure(x, y, 1, 2, 2);
        near(e.min_cos, 24.0 / 25, 1e-3);
        near(e.pooled_cos, 29.0 / 30, 1e-3);
        near(e.rel_l2, sqrt(2.0 / 30), 1e-3);
        near(e.rel_l2_max, sqrt(2.0) / 5, 1e-3);
        near(e.norm_ratio_min, 1, 1e-3);
    }
    /* a tiny pair beside a huge one keeps its own cosine */
    const double y[4] = {1e250, 0, 1e-250, 0}, x[4] = {1e250, 0, 0, 1e-250};
    const apa_error e = measure(x, y, 1, 2, 2);
    near(e.min_cos, 0, 1e-15);
    assert_int_equal(e.min_cos_pair[2], 1);
    near(e.pooled_cos, 1, 1e-15);
}

static void lse_differences(void **unused)
{
    (void)unused;
    const double out[4] = {1, 2, 3, 4};
    double a[4] = {1, -INFINITY, INFINITY, NAN};
    const double b[4] = {1.25, -INFINITY, INFINITY, NAN};
    apa_error e;
    const apa_tensor o = apa_tensor_hnd(out, APA_DTYPE_F64, 1, 2, 2, 1),
                     x = apa_tensor_hnd(a, APA_DTYPE_F64, 1, 2, 2, 1), y = apa_tensor_hnd(b, APA_DTYPE_F64, 1, 2, 2, 1);
    assert_int_equal(apa_error_measure(context, &o, &x, &o, &y, &e), APA_STATUS_OK);
    near(e.lse_max_abs, 0.25, 0);
    a[3] = 0; /* against NaN: no truth to compare with */
    assert_int_equal(apa_error_measure(context, &o, &x, &o, &y, &e), APA_STATUS_OK);
    near(e.lse_max_abs, 0.25, 0);
    a[0] = NAN; /* against a number */
    assert_int_equal(apa_error_measure(context, &o, &x, &o, &y, &e), APA_STATUS_OK);
    assert_true(isinf(e.lse_max_abs) && e.lse_max_abs > 0);
    const apa_tensor wrong = apa_tensor_hnd(a, APA_DTYPE_F64, 1, 1, 4, 1), none = {0};
    assert_int_equal(apa_error_measure(context, &o, &x, &o, &wrong, &e), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_error_measure(context, &o, &x, &wrong, &y, &e), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_error_measure(context, &o, &x, &o, &none, &e), APA_STATUS_OK);
    assert_true(isnan(e.lse_max_abs));
    assert_int_equal(apa_error_measure(context, &none, NULL, &o, NULL, &e), APA_STATUS_INVALID_ARGUMENT);
}

/* The same figures from any layout, and the same bits from any number of threads. */
static void layouts_and_threads(void **unused)
{
    (void)unused;
    enum { B = 2, H = 3, S = 101, D = 7 };
    static float hnd[B * H * S * D], nhd[B * S * H * D];
    static double truth[B * H * S * D];
    print_message("seed %u\n", SEED);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int s = 0; s < S; s++)
                for (int d = 0; d < D; d++) {
                    const int i = ((b * H + h) * S + s) * D + d;
                    truth[i] = noise();
                    hnd[i] = nhd[((b * S + s) * H + h) * D + d] = (float)(truth[i] + 0.1 * noise());
                }
    const apa_tensor t = apa_tensor_hnd(truth, APA_DTYPE_F64, B, H, S, D),
                     x[2] = {apa_tensor_hnd(hnd, APA_DTYPE_F32, B, H, S, D),
                             apa_tensor_nhd(nhd, APA_DTYPE_F32, B, H, S, D)};
    apa_error first, e;
    memset(&first, 0, sizeof first);
    for (int threads = 1; threads <= 5; threads++)
        for (int layout = 0; layout < 2; layout++) {
            apa_context *own;
            apa_context_options options;
            apa_context_options_init(&options);
            options.threads = threads;
            assert_int_equal(apa_context_create(&own, &options), APA_STATUS_OK);
            assert_int_equal(apa_error_measure(own, &x[layout], NULL, &t, NULL, &e), APA_STATUS_OK);
            apa_context_destroy(own);
            if (threads == 1 && layout == 0)
                first = e;
            assert_memory_equal(&e, &first, sizeof e);
        }
    near(first.rel_l2, 0.1, 0.01);
    assert_int_equal(first.pairs, B * H * S);
    double sum = 0; /* the mean cosine, the plain way */
    for (int p = 0; p < B * H * S; p++) {
        double xx = 0, yy = 0, xy = 0;
        for (int d = 0; d < D; d++) {
            const double u = (double)hnd[p * D + d], w = truth[p * D + d];
            xx += u * u;
            yy += w * w;
            xy += u * w;
        }
        sum += xy / sqrt(xx * yy);
    }
    near(first.mean_cos, sum / (B * H * S), 1e-13);
}

/* ------------------------------------------------------------------------------- evaluations */

enum { Hq = 4, Hkv = 2, Sq = 530, Skv = 600, Dim = 16 }; /* more rows than one slice of the truth holds */
static float q[Hq * Sq * Dim], k[Hkv * Skv * Dim], v[Hkv * Skv * Dim];

static apa_problem make_problem(void)
{
    apa_problem problem;
    apa_problem_init(&problem);
    problem.q = apa_tensor_hnd(q, APA_DTYPE_F32, 1, Hq, Sq, Dim);
    problem.k = apa_tensor_hnd(k, APA_DTYPE_F32, 1, Hkv, Skv, Dim);
    problem.v = apa_tensor_hnd(v, APA_DTYPE_F32, 1, Hkv, Skv, Dim);
    problem.causal = 1;
    return problem;
}

static void fill_inputs(void)
{
    random_state = SEED;
    for (size_t i = 0; i < sizeof q / sizeof q[0]; i++)
        q[i] = (float)noise();
    for (size_t i = 0; i < sizeof k / sizeof k[0]; i++) {
        k[i] = (float)noise();
        v[i] = (float)noise();
    }
}

typedef struct progress_log {
    int calls;
    double last;
    bool fine;
} progress_log;

static void note(void *user, const char *phase, double fraction)
{
    progress_log *entry = user;
    entry->calls++;
    entry->fine = entry->fine && phase != NULL && fraction >= 0 && fraction <= 1;
    entry->last = fraction;
}

/* Slices for progress change no bit, and agree with attention written out in plain loops. */
static void truth(void **unused)
{
    (void)unused;
    static double sliced[Hq * Sq * Dim], whole[Hq * Sq * Dim], sliced_lse[Hq * Sq], whole_lse[Hq * Sq];
    fill_inputs();
    const apa_problem problem = make_problem();
    const apa_tensor a = apa_tensor_hnd(sliced, APA_DTYPE_F64, 1, Hq, Sq, Dim),
                     b = apa_tensor_hnd(whole, APA_DTYPE_F64, 1, Hq, Sq, Dim),
                     c = apa_tensor_hnd(sliced_lse, APA_DTYPE_F64, 1, Hq, Sq, 1),
                     d = apa_tensor_hnd(whole_lse, APA_DTYPE_F64, 1, Hq, Sq, 1);
    progress_log progress = {0, 0, true};
    assert_int_equal(apa_truth_compute(context, &problem, &a, &c, note, &progress), APA_STATUS_OK);
    assert_int_equal(apa_truth_compute(context, &problem, &b, &d, NULL, NULL), APA_STATUS_OK);
    assert_memory_equal(sliced, whole, sizeof whole);
    assert_memory_equal(sliced_lse, whole_lse, sizeof whole_lse);
    assert_true(progress.calls >= 4 && progress.fine && progress.last == 1);
    for (int h = 0; h < Hq; h++)
        for (int i = 0; i < Sq; i += 97) {
            double sum = 0, out[Dim] = {0};
            for (int j = 0; j <= i + Skv - Sq; j++) {
                const float *key = k + (h / 2 * Skv + j) * Dim, *value = v + (h / 2 * Skv + j) * Dim;
                double score = 0;
                for (int e = 0; e < Dim; e++)
                    score += (double)q[(h * Sq + i) * Dim + e] * (double)key[e] / 4;
                sum += exp(score);
                for (int e = 0; e < Dim; e++)
                    out[e] += exp(score) * (double)value[e];
            }
            near(whole_lse[h * Sq + i], log(sum), 1e-12);
            for (int e = 0; e < Dim; e++)
                near(whole[(h * Sq + i) * Dim + e], out[e] / sum, 1e-12);
        }
    const apa_tensor f32 = apa_tensor_hnd(q, APA_DTYPE_F32, 1, Hq, Sq, Dim);
    assert_int_equal(apa_truth_compute(context, &problem, &f32, NULL, NULL, NULL), APA_STATUS_INVALID_ARGUMENT);
}

static void evaluations(void **unused)
{
    (void)unused;
    static double shared[Hq * Sq * Dim], shared_lse[Hq * Sq];
    fill_inputs();
    const apa_problem problem = make_problem();
    apa_evaluation_options options;
    apa_evaluation_options_init(&options);
    options.engine = "reference";
    options.repeats = 2;
    progress_log progress = {0, 0, true};
    options.progress = note;
    options.progress_user = &progress;
    apa_recipe recipe;
    apa_evaluation exact, cold, again;
    assert_int_equal(apa_recipe_init(&recipe, "exact"), APA_STATUS_OK);
    assert_int_equal(apa_evaluate(context, &problem, &recipe, &options, &exact), APA_STATUS_OK);
    assert_true(progress.calls > 4 && progress.fine && progress.last == 1);
    assert_int_equal(exact.error.pairs, Hq * Sq);
    near(exact.error.rel_l2, 0, 1e-7); /* the output's rounding to f32 */
    near(exact.error.lse_max_abs, 0, 1e-6);
    near(exact.statistics.hot_share, 1, 0);
    assert_string_equal(exact.statistics.engine, "reference");
    assert_true(exact.exact_ms > 0 && exact.speedup > 0 && exact.attention_ms > 0);

    assert_int_equal(apa_recipe_init(&recipe, "cold"), APA_STATUS_OK);
    options.time_exact = 0;
    options.progress = NULL;
    assert_int_equal(apa_evaluate(context, &problem, &recipe, &options, &cold), APA_STATUS_OK);
    assert_true(cold.error.rel_l2 > 1e-4 && cold.error.rel_l2 < 0.1);
    assert_true(isnan(cold.exact_ms) && isnan(cold.speedup));

    options.truth = apa_tensor_hnd(shared, APA_DTYPE_F64, 1, Hq, Sq, Dim);
    options.truth_lse = apa_tensor_hnd(shared_lse, APA_DTYPE_F64, 1, Hq, Sq, 1);
    assert_int_equal(apa_truth_compute(context, &problem, &options.truth, &options.truth_lse, NULL, NULL),
                     APA_STATUS_OK);
    assert_int_equal(apa_evaluate(context, &problem, &recipe, &options, &again), APA_STATUS_OK);
    assert_memory_equal(&again.error, &cold.error, sizeof cold.error);

    options.repeats = 0;
    assert_int_equal(apa_evaluate(context, &problem, &recipe, &options, &again), APA_STATUS_INVALID_ARGUMENT);
    options.repeats = 1;
    options.engine = "abacus";
    assert_int_equal(apa_evaluate(context, &problem, &recipe, &options, &again), APA_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(apa_context_message(context), "abacus"));
}

/* The method's output may be the caller's own, which it then fills. */
static void own_outputs(void **unused)
{
    (void)unused;
    static float out[Hq * Sq * Dim];
    fill_inputs();
    apa_problem problem = make_problem();
    problem.out = apa_tensor_hnd(out, APA_DTYPE_F32, 1, Hq, Sq, Dim);
    apa_evaluation_options options;
    apa_evaluation_options_init(&options);
    options.engine = "reference";
    options.repeats = 1;
    apa_evaluation evaluation;
    assert_int_equal(apa_evaluate(context, &problem, NULL, &options, &evaluation), APA_STATUS_OK);
    assert_true(evaluation.error.rel_l2 < 0.05);
    double squares = 0;
    for (size_t i = 0; i < sizeof out / sizeof out[0]; i++)
        squares += (double)out[i] * (double)out[i];
    assert_true(squares > 1);
}

static int start(void **unused)
{
    (void)unused;
    return apa_context_create(&context, NULL) != APA_STATUS_OK;
}

static int stop(void **unused)
{
    (void)unused;
    apa_context_destroy(context);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(by_hand),         cmocka_unit_test(first_of_equals),     cmocka_unit_test(zeros),
        cmocka_unit_test(non_finite),      cmocka_unit_test(truth_not_finite),    cmocka_unit_test(extreme_magnitudes),
        cmocka_unit_test(lse_differences), cmocka_unit_test(layouts_and_threads), cmocka_unit_test(truth),
        cmocka_unit_test(evaluations),     cmocka_unit_test(own_outputs),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
