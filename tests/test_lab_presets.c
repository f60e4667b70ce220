/* Every preset on every kind of input and on real tensors: finite, plausible, and what the documents say of each. */
#include "support/test.h"

#include "apa/io.h"
#include "reference/reference.h"
#include "support/attend.h"
#include "support/fixture.h"
#include "support/problems.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- inputs ---- */

static void scale_channel(const apa_tensor *x, int64_t d, double factor)
{
    for (int64_t h = 0; h < x->shape[1]; ++h)
        for (int64_t s = 0; s < x->shape[2]; ++s)
            apa_test_set(x, 0, h, s, d, factor * apa_test_get(x, 0, h, s, d));
}

/* randn; a K channel 20 times as large that q hardly uses; keys in segments that share a direction. */
static apa_test_problem *make_kind(const char *kind, apa_test_shape shape, uint64_t seed)
{
    apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F16, APA_DTYPE_F64, APA_TEST_HND, seed);
    apa_test_rng rng = {seed};
    t->problem.causal = 1;
    if (strcmp(kind, "outliers") == 0) {
        scale_channel(&t->problem.k, 3, 20);
        scale_channel(&t->problem.q, 3, 0.05);
    }
    for (int64_t h = 0; h < shape.Hkv && strcmp(kind, "topics") == 0; ++h)
        for (int64_t first = 0; first < shape.Skv; first += 96)
            for (int64_t d = 0; d < shape.D; ++d) {
                const double k = 1.5 * apa_test_normal(&rng), v = apa_test_normal(&rng);
                for (int64_t j = first; j < first + 96 && j < shape.Skv; ++j) {
                    apa_test_set(&t->problem.k, 0, h, j, d, apa_test_get(&t->problem.k, 0, h, j, d) + k);
                    apa_test_set(&t->problem.v, 0, h, j, d, apa_test_get(&t->problem.v, 0, h, j, d) + v);
                }
            }
    return t;
}

/* A sink of 4 keys at a gap over a tail of even scores, whose small values all point one way: the tail decides the
 * output. The last channel of K carries the gap, that of Q is 1; other scores are N(0, .3²). scale = 1. */
static apa_test_problem *make_sink(int64_t Sq, int64_t Skv, double gap, double spread, double sink_value,
                                   double tail_value, uint64_t seed)
{
    apa_test_problem *t =
        apa_test_make((apa_test_shape){1, 1, 1, Sq, Skv, 16, 16}, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, seed);
    t->problem.softmax_scale = 1;
    for (int64_t i = 0; i < Sq; ++i) {
        double norm = 0;
        for (int64_t d = 0; d < 15; ++d)
            norm += apa_test_get(&t->problem.q, 0, 0, i, d) * apa_test_get(&t->problem.q, 0, 0, i, d);
        for (int64_t d = 0; d < 15; ++d)
            apa_test_set(&t->problem.q, 0, 0, i, d, apa_test_get(&t->problem.q, 0, 0, i, d) * spread / sqrt(norm));
        apa_test_set(&t->problem.q, 0, 0, i, 15, 1);
    }
    for (int64_t j = 0; j < Skv; ++j) {
        apa_test_set(&t->problem.k, 0, 0, j, 15, j < 4 ? gap : 0);
        for (int64_t c = 0; c < 16 && tail_value != 0; ++c)
            apa_test_set(&t->problem.v, 0, 0, j, c, j < 4 ? sink_value : tail_value);
    }
    return t;
}

/* ---- running ---- */

typedef struct result {
    double rel_l2, lse;
    apa_statistics statistics;
} result;

/* A problem with its truth. */
typedef struct sample {
    apa_test_problem *t;
    double *out, *lse;
} sample;

static sample take(apa_test_problem *t)
{
    sample got = {t, apa_test_doubles(&t->problem.out), apa_test_doubles(&t->problem.lse)};
    apa_test_oracle(&t->problem, got.out, got.lse);
    return got;
}

static void drop(sample *x)
{
    free(x->out);
    free(x->lse);
    apa_test_free(x->t);
}

static result run(const sample *x, const char *preset, const char *settings)
{
    const apa_recipe recipe = apa_test_recipe(preset, settings);
    apa_test_problem *t = x->t;
    result got = {0};
    apa_statistics_init(&got.statistics);
    apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, &got.statistics);
    got.rel_l2 = apa_test_rel_l2(&t->problem.out, x->out);
    got.lse = apa_test_lse_error(&t->problem.lse, x->lse);
    for (int64_t h = 0; h < t->shape.Hq; ++h)
        for (int64_t s = 0; s < t->shape.Sq; ++s)
            for (int64_t c = 0; c < t->shape.Dv; ++c)
                if (!isfinite(apa_test_get(&t->problem.out, 0, h, s, c)))
                    fail_msg("%s: head %d row %d is not finite", preset, (int)h, (int)s);
    return got;
}

/* The relative L2 that a preset stays under on smooth inputs: about three times what it is there. A preset without a
 * row fails the test. */
static double plausible(const char *preset)
{
    static const struct {
        const char *name;
        double bound;
    } rows[] = {
        {"exact", 1e-12},      {"standard", 2e-3},    {"elsa", 1e-6},        {"apa", 0.05},      {"cold", 0.05},
        {"int8", 0.05},        {"apa-int8", 0.05},    {"apa-e4m3", 0.1},     {"apa-nvfp4", 0.3}, {"apa-mxfp4", 0.4},
        {"apa-0.2", 0.3},      {"apa-0.3", 0.3},      {"apa-0.4", 0.3},      {"apa-0.5", 0.3},   {"apa-0.6", 0.3},
        {"ffpa-fp8", 0.15},    {"ffpa-fp4", 0.4},     {"sage2", 0.1},        {"sage2pp", 0.1},   {"sage3", 0.4},
        {"pcast", 0.1},        {"lamp", 0.1},         {"thrift", 0.5},       {"directp", 0.6},   {"directp-e4m3", 0.15},
        {"ffpa-fp8-def", 0.1}, {"ffpa-fp8-cac", 0.1}, {"ffpa-fp8-per", 0.1},
    };
    double bound = NAN;
    size_t longest = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        const size_t n = strlen(rows[i].name);
        if (strncmp(preset, rows[i].name, n) == 0 && n > longest) {
            longest = n;
            bound = rows[i].bound;
        }
    }
    return bound;
}

static void test_every_preset_on_every_kind(void **state)
{
    static const char *const kinds[] = {"randn", "outliers", "topics"};
    (void)state;
    for (size_t k = 0; k < 3; ++k) {
        sample x = take(make_kind(kinds[k], (apa_test_shape){1, 4, 2, 90, 720, 32, 32}, 11 + k));
        for (size_t i = 0; apa_recipe_preset_name(i) != NULL; ++i) {
            const result got = run(&x, apa_recipe_preset_name(i), "early_rows=0");
            const double bound = plausible(apa_recipe_preset_name(i)) * (k == 1 ? 3 : 1);
            if (!(got.rel_l2 <= bound) || !(got.lse <= 1))
                fail_msg("%s on %s: rel_l2 %g (bound %g), lse %g", apa_recipe_preset_name(i), kinds[k], got.rel_l2,
                         bound, got.lse);
            assert_true(got.statistics.hot + got.statistics.cold == got.statistics.visible);
        }
        drop(&x);
    }
}

/* A sink 11 over an even tail whose values decide: some presets lose the tail, and say so, but none loses a number. */
static void test_every_preset_on_a_sink(void **state)
{
    apa_test_problem *t = make_sink(32, 2048, 11, 0.3, 0.001, 1, 43);
    (void)state;
    t->problem.causal = 0;
    sample x = take(t);
    for (size_t i = 0; apa_recipe_preset_name(i) != NULL; ++i) {
        const result got = run(&x, apa_recipe_preset_name(i), "");
        if (!(got.rel_l2 <= 2) || !(got.lse <= 0.1))
            fail_msg("%s: rel_l2 %g, lse %g", apa_recipe_preset_name(i), got.rel_l2, got.lse);
    }
    drop(&x);
}

static void test_every_preset_on_odd_shapes(void **state)
{
    static const apa_test_shape shapes[] = {
        {2, 3, 1, 1, 130, 48, 16}, {1, 2, 2, 70, 70, 24, 40}, {1, 1, 1, 5, 1, 16, 1}, {1, 6, 2, 3, 65, 33, 17}};
    (void)state;
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; ++k) {
        apa_test_problem *t = apa_test_make(shapes[k], APA_DTYPE_BF16, APA_DTYPE_F32, APA_TEST_SLICE, 31 + k);
        t->problem.causal = k != 0;
        sample x = take(t);
        for (size_t i = 0; apa_recipe_preset_name(i) != NULL; ++i) {
            const result got = run(&x, apa_recipe_preset_name(i), "");
            const double bound = 2 * plausible(apa_recipe_preset_name(i)) + 1e-6;
            if (!(got.rel_l2 <= bound))
                fail_msg("%s on shape %d: rel_l2 %g", apa_recipe_preset_name(i), (int)k, got.rel_l2);
            assert_int_equal(apa_test_guards_broken(t), 0);
        }
        drop(&x);
    }
}

/* The last 24 queries of the committed sample against all of its 12288 keys. */
static void test_every_preset_on_real_tensors(void **state)
{
    apa_dump dump;
    char message[256];
    (void)state;
    if (apa_dump_read(APA_TEST_DATA_DIR "/smollm2-135m_L17_h0_12288.dump", &dump, message, sizeof message) !=
        APA_STATUS_OK)
        fail_msg("%s", message);
    const int64_t Sq = 24, all = dump.q.shape[2], Skv = dump.k.shape[2], D = dump.q.shape[3];
    apa_test_problem *t = apa_test_make((apa_test_shape){1, dump.q.shape[1], 1, Sq, Skv, D, D}, APA_DTYPE_F16,
                                        APA_DTYPE_F64, APA_TEST_HND, 1);
    t->problem.causal = 1;
    for (int64_t h = 0; h < dump.q.shape[1]; ++h)
        memcpy((uint16_t *)t->problem.q.data + h * Sq * D, (const uint16_t *)dump.q.data + (h * all + all - Sq) * D,
               (size_t)(Sq * D) * sizeof(uint16_t));
    memcpy(t->problem.k.data, dump.k.data, (size_t)(Skv * D) * sizeof(uint16_t));
    memcpy(t->problem.v.data, dump.v.data, (size_t)(Skv * D) * sizeof(uint16_t));
    apa_dump_free(&dump);
    sample x = take(t);
    for (size_t i = 0; apa_recipe_preset_name(i) != NULL; ++i) {
        const result got = run(&x, apa_recipe_preset_name(i), "");
        printf("# %-20s rel_l2 %.5f lse %.4f hot %.4f\n", apa_recipe_preset_name(i), got.rel_l2, got.lse,
               got.statistics.hot_share);
        if (!(got.rel_l2 <= 4 * plausible(apa_recipe_preset_name(i))))
            fail_msg("%s: rel_l2 %g", apa_recipe_preset_name(i), got.rel_l2);
    }
    /* Thrift: a growing share of the gap; with sink and diagonal more. */
    const double share[] = {run(&x, "thrift", "fraction=0.05").rel_l2, run(&x, "thrift", "fraction=0.1").rel_l2,
                            run(&x, "thrift", "fraction=0.25").rel_l2,
                            run(&x, "thrift", "fraction=0.05 force_sink=on force_diagonal=on").rel_l2};
    printf("# thrift at .05, .10, .25: %.4f %.4f %.4f; .05 with sink and diagonal %.4f\n", share[0], share[1], share[2],
           share[3]);
    assert_true(share[1] < share[0] && share[2] < share[1] && share[3] < share[0]);
    assert_true(share[0] < run(&x, "thrift", "force=low").rel_l2);
    /* Two-term Q and searched scales lower the error of the original. */
    assert_true(run(&x, "apa-0.5", "").rel_l2 < run(&x, "apa-0.4", "").rel_l2);
    drop(&x);
}

/* ---- what the documents say ---- */

/* A hot sink 11 over the tail: with no frame drop the tail's probabilities round to zero. */
static void test_frame_collapse_of_apa_0_2(void **state)
{
    apa_test_problem *t = make_sink(32, 4096, 11, 0.3, 0.001, 1, 41);
    (void)state;
    t->problem.causal = 0;
    sample x = take(t);
    assert_true(run(&x, "apa-0.2", "").rel_l2 > 0.9);
    assert_true(run(&x, "apa-0.3", "").rel_l2 < 0.2);
    assert_true(run(&x, "apa-0.6", "").rel_l2 < 0.05);
    drop(&x);
}

/* MSE of forward S = 1 against reverse S = 256 where the sink is moderate. */
static void test_pcast_order_and_scale(void **state)
{
    (void)state;
    for (int gap = 4; gap <= 7; ++gap) {
        apa_test_problem *t = make_sink(64, 4096, gap, 1, 0, 0, 50 + (uint64_t)gap);
        t->problem.causal = 0;
        sample x = take(t);
        const double forward = run(&x, "pcast", "").rel_l2, reverse = run(&x, "pcast-reverse", "").rel_l2;
        const double ratio = forward * forward / (reverse * reverse);
        printf("# P-Cast gap %d: MSE forward S = 1 over reverse S = 256: %.2f\n", gap, ratio);
        assert_true(ratio >= 3);
        drop(&x);
    }
}

/* P·V in 16 bits: a sink of weight 1 and tail keys of e^-11 each, 16 of which are under half an FP16 ulp of 1. The
 * exact pass of the original adds them to o and loses them; the sum l does not. Where FP16 sums end with their tile,
 * only the 63 keys beside the sink are lost. */
static void test_exact_pass_with_f16_sums(void **state)
{
    apa_test_problem *t = make_sink(16, 4100, 11, 0, 1, 1, 61);
    (void)state;
    t->problem.causal = 0;
    for (int64_t j = 0; j < 4; ++j)
        apa_test_set(&t->problem.k, 0, 0, j, 15, j == 0 ? 11 : 0);
    const apa_recipe f16 = apa_test_recipe("exact", "exact_accum=f16"),
                     f32 = apa_test_recipe("exact", "exact_accum=f32");
    static const char *const flushed[] = {"exact_accum=f16 exact_flush=64", "exact_accum=f16 exact_flush=16"};
    apa_test_run(&apa_reference_engine, context, t, &f16, NULL, NULL);
    const double l = 1 + 4099 * exp(-11);
    assert_true(fabs(apa_test_get(&t->problem.out, 0, 0, 3, 5) - 1 / l) <= 1e-3);
    apa_test_run(&apa_reference_engine, context, t, &f32, NULL, NULL);
    assert_true(fabs(apa_test_get(&t->problem.out, 0, 0, 3, 5) - 1) <= 1e-4);
    for (int i = 0; i < 2; ++i) {
        const apa_recipe recipe = apa_test_recipe("exact", flushed[i]);
        apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
        /* 64 keys at 16 a time: sums of ones are exact, the sink's tile loses or keeps what rounding makes of it */
        assert_true(fabs(apa_test_get(&t->problem.out, 0, 0, 3, 5) - 1) <= 63 * exp(-11) + 1e-5);
        assert_true(fabs(apa_test_get(&t->problem.out, 0, 0, 3, 5) - 1 / l) >= .05);
    }
    apa_test_free(t);
}

/* Balanced merging keeps FP32 sums nearer than adding key by key. */
static void test_elsa_grows_slower(void **state)
{
    double growth[2][2];
    (void)state;
    for (int i = 0; i < 2; ++i) {
        apa_test_problem *t = apa_test_make((apa_test_shape){1, 1, 1, 8, i == 0 ? 1024 : 16384, 16, 8}, APA_DTYPE_F32,
                                            APA_DTYPE_F64, APA_TEST_HND, 71);
        for (int64_t j = 0; j < t->shape.Skv; ++j) /* values of one sign: sums that grow */
            for (int64_t c = 0; c < 8; ++c)
                apa_test_set(&t->problem.v, 0, 0, j, c, 1 + fabs(apa_test_get(&t->problem.v, 0, 0, j, c)));
        sample x = take(t);
        growth[i][0] = run(&x, "exact", "exact_accum=f32").rel_l2;
        growth[i][1] = run(&x, "elsa", "").rel_l2;
        printf("# %d keys: FP32 sums key by key %.2e, balanced tree %.2e\n", (int)t->shape.Skv, growth[i][0],
               growth[i][1]);
        drop(&x);
    }
    assert_true(growth[1][1] < 0.25 * growth[1][0]);
    assert_true(growth[1][1] < 3 * growth[0][1]);
    assert_true(growth[1][1] > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_preset_on_every_kind), cmocka_unit_test(test_every_preset_on_a_sink),
        cmocka_unit_test(test_every_preset_on_odd_shapes), cmocka_unit_test(test_every_preset_on_real_tensors),
        cmocka_unit_test(test_frame_collapse_of_apa_0_2),  cmocka_unit_test(test_pcast_order_and_scale),
        cmocka_unit_test(test_exact_pass_with_f16_sums),   cmocka_unit_test(test_elsa_grows_slower),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
