/* The cost model: every count by hand, every time from counts and rates, the profiles sane, predictions beside
 * published figures. */
#include "support/test.h"

#include "apa/eval.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static apa_context *context;

static void near(double found, double expected)
{
    if (!(fabs(found - expected) <= 1e-12 * fabs(expected)))
        print_error("found %.17g, expected %.17g\n", found, expected);
    assert_true(fabs(found - expected) <= 1e-12 * fabs(expected));
}

/* A device whose numbers are powers of ten, so that every term shows. */
static const apa_device_profile ruler = {.name = "ruler",
                                         .about = "",
                                         .rate = {1e9, 1e10, 1e11, 1e12, 1e13},
                                         .half_sums = 2,
                                         .exponentials = 1e8,
                                         .cold_scores = 1e15,
                                         .prep_values = 1e15,
                                         .bytes = 1e18,
                                         .reach = 0.5,
                                         .overlap = 0};

/* 2 batches, 4 heads on 2, 3 queries, 128 keys, D 8, Dv 16: not causal, 2·4·3·128 = 3072 pairs. */
#define N 3072.0

static apa_problem make_problem(apa_dtype dtype)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = apa_tensor_hnd(NULL, dtype, 2, 4, 3, 8);
    p.k = apa_tensor_hnd(NULL, dtype, 2, 2, 128, 8);
    p.v = apa_tensor_hnd(NULL, dtype, 2, 2, 128, 16);
    return p;
}

/* A run of a recipe, resolved by the reference engine's plan, with the counts in sixteenths of the visible pairs. */
static apa_statistics ran(const char *settings, const apa_problem *problem, int hot, int skipped, int candidates)
{
    char text[256], message[256];
    apa_statistics s;
    apa_plan plan;
    apa_recipe recipe;
    apa_problem p = *problem;
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "reference";
    apa_plan_init(&plan);
    apa_statistics_init(&s);
    snprintf(text, sizeof text, "%s", settings);
    char *at = strtok(text, " ");
    assert_int_equal(apa_recipe_init(&recipe, at), APA_STATUS_OK);
    while ((at = strtok(NULL, " ")) != NULL) {
        char *value = strchr(at, '=');
        *value++ = '\0';
        if (apa_recipe_set(&recipe, at, value, message, sizeof message) != APA_STATUS_OK)
            fail_msg("%s", message);
    }
    p.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, p.q.shape[0], p.q.shape[1], p.q.shape[2], p.v.shape[3]);
    if (apa_attention_plan(context, &p, &recipe, &options, &plan) != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
    s.recipe = plan.recipe;
    s.visible = 1600;
    s.hot = 100 * hot;
    s.cold = 1600 - s.hot;
    s.skipped = 100 * skipped;
    s.candidates = 100 * candidates;
    return s;
}

static apa_cost estimate(const apa_problem *p, const apa_statistics *s, const apa_device_profile *device)
{
    apa_cost cost;
    assert_int_equal(apa_cost_estimate(context, p, s, device, &cost), APA_STATUS_OK);
    assert_int_equal(cost.size, sizeof cost);
    return cost;
}

static void exact_method(void **unused)
{
    (void)unused;
    apa_problem p = make_problem(APA_DTYPE_F16);
    apa_statistics s = ran("exact", &p, 16, 0, 16);
    apa_cost c = estimate(&p, &s, &ruler);
    near(c.exact_macs, N * 24);
    near(c.macs[APA_UNIT_F16], N * 24);
    near(c.score_macs + c.value_macs + c.select_macs + c.prep_ms + c.prep_values, 0);
    near(c.exponentials, N);
    near(c.attention_ms, 1e3 * (N * 24 / 5e9 + N / 1e8));
    near(c.exact_ms, c.attention_ms);
    near(c.speedup, 1);
    assert_int_equal(c.replaced, 0);
    near(c.attention_bytes, 2 * 4 * 3 * (2 * 8 + 4 * 16) + 2 * 2 * 128 * 2 * 24);
    p = make_problem(APA_DTYPE_F32);
    s = ran("exact", &p, 16, 0, 16);
    c = estimate(&p, &s, &ruler);
    near(c.macs[APA_UNIT_F32], N * 24);
    near(c.attention_ms, 1e3 * (N * 24 / 0.5e9 + N / 1e8));
    /* masks: a causal triangle at the end of the keys, and a window */
    p.causal = 1;
    near(estimate(&p, &s, &ruler).exponentials, 8 * (126 + 127 + 128));
    p.window_left = 9;
    near(estimate(&p, &s, &ruler).exponentials, 8 * 30);
    p.q_offset = -2;
    near(estimate(&p, &s, &ruler).exponentials, 8);
    /* S and P held whole go through memory four times; a merge tree has no matrix units */
    p = make_problem(APA_DTYPE_F16);
    s = ran("standard", &p, 16, 0, 16);
    near(estimate(&p, &s, &ruler).attention_bytes, 2 * 4 * 3 * (2 * 8 + 4 * 16) + 2 * 2 * 128 * 2 * 24 + 8 * N);
    s = ran("elsa", &p, 16, 0, 16);
    near(estimate(&p, &s, &ruler).macs[APA_UNIT_F32], N * 24);
}

static void adaptive(void **unused)
{
    (void)unused;
    const apa_problem p = make_problem(APA_DTYPE_F16);
    /* 2/16 hot, 4/16 skipped, 3/16 hot at first: one sixteenth scored again */
    const apa_statistics s = ran("apa-int8 q_terms=2 second_look=on lambda_bound=jensen", &p, 2, 4, 3);
    const apa_cost c = estimate(&p, &s, &ruler);
    near(c.score_macs, N * 17 / 16 * 8 * 2);
    near(c.value_macs, N * 10 / 16 * 16);
    near(c.exact_macs, N * 2 / 16 * 24);
    near(c.select_macs, N / 64 * 8);
    near(c.macs[APA_UNIT_INT8], c.score_macs + c.value_macs);
    near(c.macs[APA_UNIT_F16], c.exact_macs);
    near(c.macs[APA_UNIT_F32], c.select_macs);
    near(c.exponentials, N * (17.0 - 4 + 2) / 16);
    near(c.attention_ms, 1e3 * (c.macs[APA_UNIT_INT8] / 5e11 + c.macs[APA_UNIT_F16] / 5e9 + c.macs[APA_UNIT_F32] / 5e8 +
                                c.exponentials / 1e8 + N * 17 / 16 / 1e15));
    near(c.prep_values, 4 * 128 * 24);
    /* K twice (its mean) and its codes, V once and its codes; Q and two terms */
    near(c.prep_bytes, 512 * (8 * (2 * 2 + 1) + 16 * (2 + 1)) + 24 * 8 * (2 + 2));
    near(c.prep_ms, 1e3 * c.prep_values / 1e15);
    near(c.speedup, c.exact_ms / (c.attention_ms + c.prep_ms));
    apa_device_profile slow = ruler;
    slow.bytes = 1e3; /* memory bounds everything */
    const apa_cost m = estimate(&p, &s, &slow);
    near(m.prep_ms, m.prep_bytes);
    near(m.attention_ms, m.attention_bytes);
    slow = ruler;
    slow.overlap = 1; /* products and exponentials side by side: the exponentials are slower here */
    near(estimate(&p, &s, &slow).attention_ms, 1e3 * c.exponentials / 1e8);
    slow.exponentials = INFINITY;
    near(estimate(&p, &s, &slow).attention_ms,
         1e3 * (c.macs[APA_UNIT_INT8] / 5e11 + c.macs[APA_UNIT_F16] / 5e9 + c.macs[APA_UNIT_F32] / 5e8));
}

/* Units by format, chosen tiles that are not scored, codes without exponentials, sums in f16. */
static void methods(void **unused)
{
    (void)unused;
    const apa_problem p = make_problem(APA_DTYPE_F16);
    apa_statistics s = ran("apa-nvfp4 q_terms=1", &p, 0, 0, 0);
    apa_cost c = estimate(&p, &s, &ruler);
    near(c.macs[APA_UNIT_FP4], N * 24);
    near(c.prep_bytes, 512 * (8 * (2 * 2 + .5625) + 16 * (2 * 2 + .5625)) + 24 * 8 * (2 + .5625));
    s = ran("sage2", &p, 0, 0, 0);
    c = estimate(&p, &s, &ruler);
    near(c.macs[APA_UNIT_INT8], N * 8);
    near(c.macs[APA_UNIT_FP8], N * 16);
    s = ran("sage2pp", &p, 0, 0, 0);
    c = estimate(&p, &s, &ruler);
    near(c.attention_ms, 1e3 * (N * 8 / 5e11 + N * 16 / 1e11 + N / 1e8 + N / 1e15)); /* f16 sums: twice the rate */
    s = ran("thrift fraction=0.25", &p, 4, 0, 4);
    c = estimate(&p, &s, &ruler);
    near(c.score_macs, N * 12 / 16 * 8);
    near(c.value_macs, N * 12 / 16 * 16);
    near(c.exact_macs, N * 4 / 16 * 24);
    near(c.select_macs, N / 64 / 64 * 8);
    near(c.exponentials, N);
    s = ran("directp", &p, 0, 0, 0);
    near(estimate(&p, &s, &ruler).exponentials, 0);
    s = ran("pcast", &p, 0, 0, 0); /* scores as in the exact pass, P·V too: V is exact; nothing to prepare */
    c = estimate(&p, &s, &ruler);
    near(c.macs[APA_UNIT_F16], N * 24);
    near(c.prep_bytes + c.prep_values, 0);
    near(c.attention_bytes, 24 * (2 * 8 + 4 * 16) + 512 * 2 * 24);
    s = ran("sage3", &p, 0, 0, 0);
    near(estimate(&p, &s, &ruler).select_macs, N / 128 * 8);
    s = ran("lamp", &p, 0, 0, 0);
    s.lamp_sub_blocks = 8;
    s.lamp_recomputed = 2;
    c = estimate(&p, &s, &ruler);
    near(c.macs[APA_UNIT_FP8], N * 8);
    near(c.macs[APA_UNIT_F16], N * 16 + N / 4 * 8);
    near(c.exponentials, N * 1.25);
    near(c.prep_bytes + c.prep_values, 0);
    s = ran("apa eps=-1", &p, 16, 0, 16);
    c = estimate(&p, &s, &ruler);
    near(c.speedup, 1);
    near(c.prep_bytes, 0);
}

/* What a device has not, a wider unit does, and the estimate says so. */
static void replacements(void **unused)
{
    (void)unused;
    const apa_problem p = make_problem(APA_DTYPE_F16);
    const apa_statistics fp4 = ran("apa-nvfp4 q_terms=1", &p, 0, 0, 0), fp8 = ran("apa-e4m3", &p, 0, 0, 0);
    apa_device_profile d = ruler;
    d.rate[APA_UNIT_FP4] = 0;
    apa_cost c = estimate(&p, &fp4, &d);
    near(c.macs[APA_UNIT_INT8], N * 24);
    assert_int_equal(c.replaced, 1u << APA_UNIT_FP4);
    d.rate[APA_UNIT_INT8] = 0;
    near(estimate(&p, &fp4, &d).macs[APA_UNIT_F16], N * 24);
    d.rate[APA_UNIT_FP8] = 0;
    c = estimate(&p, &fp8, &d);
    near(c.macs[APA_UNIT_F16], N * 24);
    assert_int_equal(c.replaced, 1u << APA_UNIT_FP8);
    d.rate[APA_UNIT_F16] = 0;
    near(estimate(&p, &fp8, &d).macs[APA_UNIT_F32], N * 24);
    d.rate[APA_UNIT_F32] = 0;
    assert_int_equal(apa_cost_estimate(context, &p, &fp8, &d, &c), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_cost_estimate(context, &p, &fp8, NULL, &c), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_cost_estimate(context, NULL, &fp8, &ruler, &c), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_cost_estimate(context, &p, &fp8, &ruler, NULL), APA_STATUS_INVALID_ARGUMENT);
}

static void profiles(void **unused)
{
    (void)unused;
    static const char *const names[] = {"zen4", "zen5", "h200", "b200", "rtx5090", "rtx4090", "a100"};
    size_t count = 0;
    for (; apa_device_profile_at(count) != NULL; count++) {
        const apa_device_profile *d = apa_device_profile_at(count);
        assert_ptr_equal(apa_device_profile_find(d->name), d);
        assert_true(d->rate[APA_UNIT_F32] > 0 && d->reach > 0 && d->reach <= 1 && d->half_sums >= 1);
        assert_true(d->exponentials > 0 && d->cold_scores > 0 && d->prep_values > 0 && d->bytes > 0);
        /* a narrower unit that is there is no slower than the next wider one */
        for (int u = APA_UNIT_F16; u < APA_UNIT_COUNT; u++)
            assert_true(d->rate[u] == 0 || d->rate[u] >= d->rate[u == APA_UNIT_INT8 ? APA_UNIT_F16 : u - 1]);
    }
    assert_int_equal(count, sizeof names / sizeof names[0]);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        assert_non_null(apa_device_profile_find(names[i]));
    assert_null(apa_device_profile_find("abacus"));
    assert_null(apa_device_profile_find(NULL));
    assert_string_equal(apa_unit_name(APA_UNIT_FP4), "fp4");
    assert_null(apa_unit_name(APA_UNIT_COUNT));
}

/* Published and measured times that docs/cost-model.md compares with: the model stays within a factor of 1.8. */
static void beside_measurements(void **unused)
{
    (void)unused;
    static const struct {
        const char *method, *device;
        int64_t Hq, Hkv, Sq, Skv, D;
        int causal, hot; /* hot in sixteenths */
        double ms;
        const char *what;
    } known[] = {
        {"exact", "h200", 24, 8, 2048, 122880, 128, 0, 16, 4.9, "cuDNN FP16"},
        {"exact", "h200", 24, 8, 32768, 32768, 128, 1, 16, 11.5, "cuDNN FP16"},
        {"exact", "h200", 16, 16, 16384, 16384, 256, 1, 16, 3.30, "cuDNN FP16"},
        {"apa-e4m3 q_terms=1", "h200", 24, 8, 2048, 122880, 128, 0, 0, 2.93, "prototype, FP8 cold"},
        {"apa-0.6", "rtx5090", 24, 8, 2048, 122880, 128, 1, 2, 5.33, "APA 0.6.1"},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        apa_problem p;
        apa_problem_init(&p);
        p.q = apa_tensor_hnd(NULL, APA_DTYPE_F16, 1, known[i].Hq, known[i].Sq, known[i].D);
        p.k = p.v = apa_tensor_hnd(NULL, APA_DTYPE_F16, 1, known[i].Hkv, known[i].Skv, known[i].D);
        p.causal = known[i].causal;
        const apa_statistics s = ran(known[i].method, &p, known[i].hot, 0, known[i].hot);
        const apa_cost c = estimate(&p, &s, apa_device_profile_find(known[i].device));
        print_message("%-8s %-22s model %6.2f ms, known %6.2f ms\n", known[i].device, known[i].what, c.attention_ms,
                      known[i].ms);
        assert_true(c.attention_ms > known[i].ms / 1.8 && c.attention_ms < known[i].ms * 1.8);
    }
}

static int setup(void **unused)
{
    (void)unused;
    return apa_context_create(&context, NULL) != APA_STATUS_OK;
}

static int teardown(void **unused)
{
    (void)unused;
    apa_context_destroy(context);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_method), cmocka_unit_test(adaptive), cmocka_unit_test(methods),
        cmocka_unit_test(replacements), cmocka_unit_test(profiles), cmocka_unit_test(beside_measurements),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
