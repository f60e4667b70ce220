/* What must hold of knobs whatever the data: transforms that change nothing in exact arithmetic, LampAttention's two
 * ends, the P-Cast fraction, verdicts that keep their promises, selection, early rows, non-finite values, threads. */
#include "support/test.h"

#include "reference/internal.h"
#include "reference/reference.h"
#include "support/attend.h"
#include "support/fixture.h"
#include "support/problems.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* N(0,1) with a mean in K and V, an outlier channel in Q, grouped heads, several blocks of 128 queries. */
static apa_test_problem *problem(apa_test_shape shape, uint64_t seed)
{
    apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_SLICE, seed);
    t->problem.causal = 1;
    for (int64_t h = 0; h < shape.Hkv; ++h)
        for (int64_t j = 0; j < shape.Skv; ++j) {
            for (int64_t d = 0; d < shape.D; ++d)
                apa_test_set(&t->problem.k, 0, h, j, d,
                             apa_test_get(&t->problem.k, 0, h, j, d) + 0.3 * (double)(d % 5));
            for (int64_t d = 0; d < shape.Dv; ++d)
                apa_test_set(&t->problem.v, 0, h, j, d,
                             apa_test_get(&t->problem.v, 0, h, j, d) + 0.5 * (double)(d % 3));
        }
    return t;
}

static double run(apa_test_problem *t, const char *preset, const char *settings, uint8_t *map,
                  apa_statistics *statistics, double *lse_error)
{
    const apa_recipe recipe = apa_test_recipe(preset, settings);
    double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
    apa_test_run(&apa_reference_engine, context, t, &recipe, map, statistics);
    apa_test_oracle(&t->problem, out, lse);
    const double error = apa_test_rel_l2(&t->problem.out, out);
    if (lse_error != NULL)
        *lse_error = apa_test_lse_error(&t->problem.lse, lse);
    free(out);
    free(lse);
    return error;
}

/* ---- transforms ---- */

/* With operands that are not quantised, smoothing and rotation leave FP32 rounding of prep and nothing more. */
static void test_transforms_change_nothing(void **state)
{
    static const char *const knobs[] = {"",
                                        "smooth_k=on",
                                        "smooth_q=on",
                                        "smooth_q=on q_mean=head",
                                        "smooth_v=on",
                                        "hadamard=on",
                                        "smooth_k=on smooth_q=on smooth_v=on hadamard=on"};
    static const apa_test_shape shapes[] = {{1, 4, 2, 150, 210, 32, 16}, {1, 2, 1, 300, 300, 48, 8}};
    (void)state;
    for (size_t s = 0; s < 2; ++s)
        for (size_t k = 0; k < sizeof knobs / sizeof knobs[0]; ++k) {
            apa_test_problem *t = problem(shapes[s], 3 + s);
            char settings[256];
            double lse;
            snprintf(settings, sizeof settings,
                     "force=low qk_format=exact pv_format=exact smooth_k=off hadamard=off %s", knobs[k]);
            const double error = run(t, "apa", settings, NULL, NULL, &lse);
            if (!(error <= 1e-6) || !(lse <= 1e-6))
                fail_msg("%s: rel_l2 %g, lse %g", knobs[k], error, lse);
            apa_test_free(t);
        }
}

/* Left exact one by one, operands bring back exactly their own part of the error. */
static void test_operands_left_exact(void **state)
{
    static const char *const methods[] = {"int8", "sage2", "sage3", "directp-e4m3", "ffpa-fp4-mxfp8"};
    static const char *const only[] = {"exact_k=on exact_p=on exact_v=on", "exact_q=on exact_p=on exact_v=on",
                                       "exact_q=on exact_k=on exact_v=on", "exact_q=on exact_k=on exact_p=on"};
    (void)state;
    for (size_t m = 0; m < sizeof methods / sizeof methods[0]; ++m) {
        apa_test_problem *t = problem((apa_test_shape){1, 2, 1, 140, 400, 32, 16}, 7);
        const char *plain = "early_rows=0 p_map=exp pv_accum=f64";
        char settings[256];
        const double whole = run(t, methods[m], plain, NULL, NULL, NULL);
        snprintf(settings, sizeof settings, "%s exact_q=on exact_k=on exact_p=on exact_v=on", plain);
        const double none = run(t, methods[m], settings, NULL, NULL, NULL);
        assert_true(none <= 1e-6 && whole > 1e-4);
        for (int i = 0; i < 4; ++i) {
            snprintf(settings, sizeof settings, "%s %s", plain, only[i]);
            const double part = run(t, methods[m], settings, NULL, NULL, NULL);
            if (!(part > 1e-5 && part < whole * 1.2))
                fail_msg("%s %s: %g of %g", methods[m], only[i], part, whole);
        }
        apa_test_free(t);
    }
}

/* In an adaptive recipe they change verdicts by what their own rounding decides, and no more. */
static void test_operands_left_exact_keep_verdicts(void **state)
{
    static const char *const settings[] = {"exact_q=on", "exact_k=on", "exact_p=on", "exact_v=on"};
    apa_test_problem *t = problem((apa_test_shape){1, 2, 1, 140, 900, 32, 16}, 9);
    apa_statistics plain, one;
    (void)state;
    apa_statistics_init(&plain);
    apa_statistics_init(&one);
    run(t, "apa", "cold_format=int8 eps=0.1", NULL, &plain, NULL);
    assert_true(plain.hot > 0 && plain.hot < plain.visible);
    for (int i = 0; i < 4; ++i) {
        char text[64];
        snprintf(text, sizeof text, "cold_format=int8 eps=0.1 %s", settings[i]);
        run(t, "apa", text, NULL, &one, NULL);
        assert_true(fabs(one.hot_share - plain.hot_share) <= 0.03);
    }
    apa_test_free(t);
}

/* ---- errors that do not average ---- */

#define DIRECT                                                                                                         \
    "force=low cold_format=e4m3 pow2_scales=on qk_scale_granularity=warp v_scale_granularity=block "                   \
    "p_scale=row-tile-pow2 p_map=direct "

/* Queries are one vector, of elements ±size, plus noise; values are their keys. */
static apa_test_problem *common_query(double size, double noise)
{
    apa_test_problem *t = problem((apa_test_shape){1, 1, 1, 160, 4096, 64, 64}, 23);
    t->problem.causal = 0;
    for (int64_t i = 0; i < 160; ++i)
        for (int64_t d = 0; d < 64; ++d) {
            const double x = noise * apa_test_get(&t->problem.q, 0, 0, i, d);
            apa_test_set(&t->problem.q, 0, 0, i, d, x + (d % 3 == 0 ? size : -size));
        }
    for (int64_t j = 0; j < 4096; ++j)
        for (int64_t d = 0; d < 64; ++d)
            apa_test_set(&t->problem.v, 0, 0, j, d, apa_test_get(&t->problem.k, 0, 0, j, d));
    return t;
}

/* The rounding error e of a query adds e·k to its scores: one linear function of the keys for the whole row. Where
 * values go with keys it stays, however many keys there are. What the queries share need not be rounded. */
static void test_a_common_query_is_taken_off(void **state)
{
    static const char *const quiet = "exact_k=on exact_p=on exact_v=on p_map=exp ";
    static const char *const settings[] = {"", "smooth_q=on", "smooth_q=on q_mean=head"};
    double error[3];
    (void)state;
    for (int i = 0; i < 3; ++i) {
        apa_test_problem *t = common_query(1.1, 0.1);
        char text[300];
        snprintf(text, sizeof text, DIRECT "%s%s", quiet, settings[i]);
        error[i] = run(t, "apa", text, NULL, NULL, NULL);
        apa_test_free(t);
    }
    if (!(error[1] < error[0] / 5) || !(error[2] < error[0] / 5))
        fail_msg("rel_l2 %g; block %g, head %g", error[0], error[1], error[2]);
}

/* Scores of a narrow spread stand at one place between integer frames in all tiles, where direct codes err one way: the
 * row sum is off by that, however many tiles there are. Four phases err in turns. */
static void test_phases_cancel(void **state)
{
    static const char *const quiet = "exact_q=on exact_k=on exact_v=on ";
    double lse[2];
    (void)state;
    for (int on = 0; on < 2; ++on) {
        apa_test_problem *t = common_query(0, 0.25);
        char text[300];
        snprintf(text, sizeof text, DIRECT "%sp_phase=%s", quiet, on ? "on" : "off");
        run(t, "apa", text, NULL, NULL, &lse[on]);
        apa_test_free(t);
    }
    if (!(lse[1] < lse[0] / 2) || !(lse[1] < 3e-4))
        fail_msg("largest error of the LSE %g, with phases %g", lse[0], lse[1]);
}

/* ---- LampAttention ---- */

static void same_output(const char *a, const char *b)
{
    apa_test_problem *t[2];
    const char *settings[2] = {a, b};
    for (int i = 0; i < 2; ++i) {
        t[i] = problem((apa_test_shape){1, 4, 2, 50, 300, 32, 16}, 19);
        run(t[i], "lamp", settings[i], NULL, NULL, NULL);
    }
    if (memcmp(t[0]->memory[3], t[1]->memory[3], t[0]->bytes[3]) != 0 ||
        memcmp(t[0]->memory[4], t[1]->memory[4], t[0]->bytes[4]) != 0)
        fail_msg("\"%s\" and \"%s\" differ", a, b);
    apa_test_free(t[0]);
    apa_test_free(t[1]);
}

static void test_lamp_ends(void **state)
{
    (void)state;
    same_output("force=low", "lamp_stages=second tau=2");
    same_output("force=low sub_block=8", "lamp_stages=second tau=1 sub_block=64");
    same_output("force=high", "margin=100");
    same_output("force=high sub_block=64", "margin=100 tau=0 sub_block=4");
    same_output("force=high group=16", "margin=100 group=1"); /* choices apart, rows don't touch each other */
    apa_test_problem *t = problem((apa_test_shape){1, 4, 2, 50, 300, 32, 16}, 19);
    const double low = run(t, "lamp", "force=low", NULL, NULL, NULL),
                 high = run(t, "lamp", "force=high", NULL, NULL, NULL);
    const double mixed = run(t, "lamp", "", NULL, NULL, NULL);
    printf("# lamp: all low %.4f, tau .5 %.4f, all high %.6f\n", low, mixed, high);
    assert_true(high < 1e-3 && mixed < low && mixed > high && low < 0.3);
    apa_test_free(t);
}

static double rate(apa_test_problem *t, const char *knob, double value, double *disruptive)
{
    apa_statistics statistics;
    char settings[128];
    apa_statistics_init(&statistics);
    snprintf(settings, sizeof settings, "%s=%g%s", knob, value, strcmp(knob, "margin") == 0 ? " tau=1" : "");
    run(t, "lamp", settings, NULL, &statistics, NULL);
    assert_true(statistics.lamp_tiles == statistics.visible && statistics.lamp_sub_blocks <= 4 * statistics.visible &&
                statistics.lamp_sub_blocks > 3 * statistics.visible);
    *disruptive = (double)statistics.lamp_disruptive / (double)statistics.lamp_tiles;
    return (double)statistics.lamp_recomputed / (double)statistics.lamp_sub_blocks;
}

static void test_lamp_rates(void **state)
{
    static const double taus[] = {0, 0.02, 0.1, 0.25, 0.5, 0.75, 1, 2}, margins[] = {0, 0.5, 1, 2, 4, 8, 100};
    apa_test_problem *t = problem((apa_test_shape){1, 4, 2, 60, 900, 32, 16}, 23);
    double before = 2, disruptive_before = 2, disruptive;
    (void)state;
    for (size_t i = 0; i < sizeof taus / sizeof taus[0]; ++i) {
        const double now = rate(t, "tau", taus[i], &disruptive);
        printf("# lamp tau %.2f: recomputed %.4f, disruptive %.4f\n", taus[i], now, disruptive);
        assert_true(now <= before && disruptive <= disruptive_before && now > 0 && now <= 1);
        before = now;
        disruptive_before = disruptive;
    }
    before = disruptive_before = 0;
    for (size_t i = 0; i < sizeof margins / sizeof margins[0]; ++i) {
        const double now = rate(t, "margin", margins[i], &disruptive);
        printf("# lamp margin %.1f: recomputed %.4f, disruptive %.4f\n", margins[i], now, disruptive);
        assert_true(now >= before && disruptive >= disruptive_before);
        before = now;
        disruptive_before = disruptive;
    }
    assert_true(before == 1);
    apa_test_free(t);
}

/* ---- P-Cast ---- */

static double normal_below(double x)
{
    return 0.5 * erfc(-x / sqrt(2));
}

/* Forward order, scores N(0, 1), 4 sink keys at a gap: how many of the other P round to zero, over rows of their own,
 * against Φ of the distance of each row's own frame: S·e^(s - m) <= 2^-10, that is s <= m - 10·ln 2 - ln S. */
static void test_pcast_fraction(void **state)
{
    enum { ROWS = 200, KEYS = 1024 };
    apa_test_rng rng = {apa_test_seed() + 77};
    (void)state;
    for (int S = 1; S <= 256; S += 255)
        for (int gap = 2; gap <= 14; ++gap) {
            char settings[64];
            snprintf(settings, sizeof settings, "p_static_scale=%d", S);
            apa_recipe recipe = apa_test_recipe("pcast", settings);
            int64_t zeros = 0, reverse_zeros = 0, all = 0;
            double expected = 0, closed = normal_below(gap + 1 - 10 * log(2) - log(S));
            apa_recipe_fill_auto(&recipe, 64, KEYS, 64);
            for (int r = 0; r < ROWS; ++r) {
                static double s[KEYS];
                double p[64], code[64], first = -INFINITY, frame = -INFINITY;
                for (int j = 0; j < KEYS; ++j) {
                    s[j] = apa_test_normal(&rng) + (j < 4 ? gap : 0);
                    first = j < 4 && s[j] > first ? s[j] : first;
                }
                for (int pass = 0; pass < 2; ++pass) { /* forward, reverse */
                    apa_reference_row row = {.next = -INFINITY};
                    frame = -INFINITY;
                    for (int k = 0; k < KEYS / 64; ++k) {
                        const int t = pass == 0 ? k : KEYS / 64 - 1 - k;
                        for (int j = 0; j < 64; ++j) {
                            p[j] = s[t * 64 + j] * APA_REFERENCE_LOG2E;
                            frame = p[j] > frame ? p[j] : frame;
                        }
                        row.next = frame;
                        apa_reference_probabilities(&recipe, &row, p, code);
                        for (int j = t == 0 ? 4 : 0; j < 64; ++j) {
                            zeros += pass == 0 && code[j] == 0;
                            reverse_zeros += pass == 1 && t > 0 && code[j] == 0;
                            all += pass == 0;
                        }
                    }
                }
                expected += normal_below(first - 10 * log(2) - log(S)) / ROWS;
            }
            const double fraction = (double)zeros / (double)all;
            printf("# P-Cast S %3d gap %2d: zero %.4f, averaged over rows %.4f, closed form %.4f, reverse %.6f\n", S,
                   gap, fraction, expected, closed, (double)reverse_zeros / (double)all);
            assert_true(fabs(fraction - expected) <= 0.005);
            assert_true(S == 1 || reverse_zeros == 0);
        }
}

/* ---- verdicts ---- */

/* exact mass of every tile of a row, as shares */
static void row_shares(const apa_problem *p, int64_t h, int64_t i, double *share)
{
    const int64_t G = p->q.shape[1] / p->k.shape[1], Skv = p->k.shape[2];
    double top = -INFINITY, all = 0;
    double *s = malloc(sizeof(double) * (size_t)Skv);
    assert_non_null(s);
    for (int64_t j = 0; j < Skv; ++j) {
        s[j] = 0;
        for (int64_t d = 0; d < p->k.shape[3]; ++d)
            s[j] += apa_test_get(&p->q, 0, h, i, d) * apa_test_get(&p->k, 0, h / G, j, d);
        s[j] = apa_test_sees(p, i, j) ? s[j] / sqrt((double)p->k.shape[3]) : -INFINITY;
        top = fmax(top, s[j]);
    }
    memset(share, 0, sizeof(double) * (size_t)((Skv + 63) / 64));
    for (int64_t j = 0; j < Skv; ++j) {
        share[j / 64] += exp(s[j] - top);
        all += exp(s[j] - top);
    }
    for (int64_t t = 0; t < (Skv + 63) / 64; ++t)
        share[t] /= all;
    free(s);
}

/* With exact formats, groups of one row: what stays cold is within the budget, and no fewer hot tiles would do. */
static void test_cold_budget(void **state)
{
    enum { TILES = 14 };
    (void)state;
    for (int n = 0; n < 4; ++n) {
        static const double budgets[] = {0.01, 0.1, 0.5, 0.9};
        apa_test_problem *t = problem((apa_test_shape){1, 2, 1, 40, TILES * 64 - 10, 16, 8}, 29);
        uint8_t map[2 * 40 * TILES];
        double share[TILES];
        char settings[160];
        snprintf(settings, sizeof settings,
                 "verdict=cold_budget eps=%g group=1 qk_format=exact pv_format=exact hadamard=off", budgets[n]);
        assert_true(run(t, "apa", settings, map, NULL, NULL) <= 1e-6);
        for (int64_t h = 0; h < 2; ++h)
            for (int64_t i = 0; i < 40; ++i) {
                const uint8_t *verdict = map + (h * 40 + i) * TILES;
                double cold = 0, smallest_hot = 1;
                row_shares(&t->problem, h, i, share);
                for (int k = 0; k < TILES; ++k) {
                    cold += verdict[k] == APA_VERDICT_COLD ? share[k] : 0;
                    smallest_hot = verdict[k] == APA_VERDICT_HOT ? fmin(smallest_hot, share[k]) : smallest_hot;
                }
                for (int k = 0; k < TILES; ++k)
                    assert_true(verdict[k] != APA_VERDICT_COLD || share[k] <= smallest_hot * (1 + 1e-6));
                if (!(cold <= budgets[n] * (1 + 1e-6)) ||
                    !(smallest_hot == 1 || cold + smallest_hot > budgets[n] * (1 - 1e-6)))
                    fail_msg("budget %g: row %d has %g cold, smallest hot %g", budgets[n], (int)i, cold, smallest_hot);
            }
        apa_test_free(t);
    }
    /* in a group the budget holds for each of its rows */
    apa_test_problem *t = problem((apa_test_shape){1, 2, 1, 40, TILES * 64, 16, 8}, 31);
    uint8_t map[2 * 40 * TILES];
    double share[TILES];
    run(t, "apa", "verdict=cold_budget eps=0.2 group=16 qk_format=exact pv_format=exact hadamard=off", map, NULL, NULL);
    for (int64_t i = 0; i < 40; ++i) {
        double cold = 0;
        row_shares(&t->problem, 1, i, share);
        for (int k = 0; k < TILES; ++k)
            cold += map[(40 + i) * TILES + k] == APA_VERDICT_COLD ? share[k] : 0;
        assert_true(cold <= 0.2 * (1 + 1e-6));
    }
    apa_test_free(t);
}

/* Where all values are equal, nothing is at stake and nothing is hot; a larger ε leaves fewer tiles hot and more error.
 */
static void test_mass_value(void **state)
{
    apa_test_problem *t = problem((apa_test_shape){1, 2, 1, 64, 800, 32, 8}, 37);
    apa_statistics statistics;
    double hot = 2, error = -1;
    (void)state;
    apa_statistics_init(&statistics);
    static const double eps[] = {1e-6, 1e-4, 1e-3, 0.1};
    for (int i = 0; i < 4; ++i) {
        char settings[128];
        snprintf(settings, sizeof settings, "cold_format=nvfp4 verdict=mass_value eps=%g group=4", eps[i]);
        const double now = run(t, "apa", settings, NULL, &statistics, NULL);
        printf("# mass_value eps %g: hot %.4f, rel_l2 %.5f\n", eps[i], statistics.hot_share, now);
        assert_true(statistics.hot_share <= hot && now >= error);
        hot = statistics.hot_share;
        error = now;
    }
    assert_true(hot == 0);
    apa_test_fill(&t->problem.v, 1.5);
    run(t, "apa", "cold_format=int8 verdict=mass_value eps=1e-9", NULL, &statistics, NULL);
    assert_true(statistics.hot == 0 && statistics.cold == statistics.visible);
    apa_test_free(t);
}

/* Selected tiles are exact, whatever mass says; sink and diagonal are among them; the count is the fraction's. */
static void test_selection(void **state)
{
    enum { TILES = 12 };
    apa_test_problem *t = problem((apa_test_shape){1, 2, 1, 128, TILES * 64, 16, 8}, 43);
    uint8_t map[2 * 128 * TILES];
    (void)state;
    t->problem.causal = 0;
    static const char *const rules[] = {"block_mean", "quest", "local"};
    for (int k = 0; k < 3; ++k)
        for (int forced = 0; forced < 2; ++forced) {
            char settings[160];
            snprintf(settings, sizeof settings, "select=%s fraction=0.33 %s", rules[k],
                     forced ? "force_sink=on force_diagonal=on" : "");
            run(t, "thrift", settings, map, NULL, NULL);
            for (int64_t r = 0; r < 2 * 128; ++r) {
                int hot = 0;
                for (int n = 0; n < TILES; ++n)
                    hot += map[r * TILES + n] == APA_VERDICT_HOT;
                assert_int_equal(hot, 4); /* round(.33·12) */
                assert_true(!forced ||
                            (map[r * TILES] == APA_VERDICT_HOT && map[r * TILES + TILES - 1] == APA_VERDICT_HOT));
                if (k == 2 && !forced)
                    for (int n = 0; n < TILES; ++n)
                        assert_int_equal(map[r * TILES + n], n >= TILES - 4 ? APA_VERDICT_HOT : APA_VERDICT_COLD);
            }
        }
    /* with the mass verdict as well, selected tiles stay hot through the second look */
    run(t, "apa", "select=local fraction=0.33 verdict=mass eps=0.99", map, NULL, NULL);
    for (int n = 0; n < TILES; ++n)
        assert_int_equal(map[n], n >= TILES - 4 ? APA_VERDICT_HOT : APA_VERDICT_COLD);
    /* all selected is exact, none but the forced is force=low */
    assert_true(run(t, "thrift", "fraction=1 exact_accum=f64 exact_format=input", NULL, NULL, NULL) <= 1e-12);
    apa_test_free(t);
}

static void test_early_rows(void **state)
{
    enum { TILES = 5 };
    apa_test_problem *t = problem((apa_test_shape){1, 2, 1, 300, 300, 16, 8}, 47);
    static uint8_t map[2 * 300 * TILES];
    (void)state;
    run(t, "ffpa-fp8", "", map, NULL, NULL);
    double *out = apa_test_doubles(&t->problem.out), rest = 0;
    apa_test_oracle(&t->problem, out, NULL);
    for (int64_t h = 0; h < 2; ++h)
        for (int64_t i = 0; i < 300; ++i)
            for (int64_t c = 0; c < 8; ++c) {
                const double error = fabs(apa_test_get(&t->problem.out, 0, h, i, c) - out[(h * 300 + i) * 8 + c]);
                assert_true(i >= 256 || error <= 1e-6); /* K's mean is FP32 */
                rest = i >= 256 && error > rest ? error : rest;
                assert_int_equal(map[(h * 300 + i) * TILES], i < 256 ? APA_VERDICT_HOT : APA_VERDICT_COLD);
            }
    assert_true(rest > 1e-4);
    free(out);
    /* positions among the keys: of 300 queries at the end of 300 + 200 none is early, at an offset of -44 all that see
     * a key are */
    t->problem.q_offset = 256;
    run(t, "ffpa-fp8", "", map, NULL, NULL);
    assert_int_equal(map[0], APA_VERDICT_COLD);
    t->problem.q_offset = -44;
    run(t, "ffpa-fp8", "", map, NULL, NULL);
    assert_int_equal(map[43 * TILES], APA_VERDICT_INVISIBLE);
    assert_int_equal(map[299 * TILES], APA_VERDICT_HOT);
    t->problem.causal = 0;
    run(t, "ffpa-fp8", "", map, NULL, NULL);
    assert_int_equal(map[0], APA_VERDICT_COLD);
    apa_test_free(t);
}

/* A short last tile has no say in what INT8 can judge: keys of a hundredth give large queries their verdicts, not the
 * exact pass. */
static void test_short_last_tile(void **state)
{
    (void)state;
    for (int64_t Skv = 128; Skv <= 161; Skv += 33) {
        apa_test_problem *t =
            apa_test_make((apa_test_shape){1, 1, 1, 16, Skv, 16, 8}, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 81);
        apa_statistics statistics;
        apa_statistics_init(&statistics);
        for (int64_t j = 0; j < Skv; ++j)
            for (int64_t d = 0; d < 16; ++d)
                apa_test_set(&t->problem.k, 0, 0, j, d, 0.01 * apa_test_get(&t->problem.k, 0, 0, j, d));
        for (int64_t i = 0; i < 16; ++i)
            for (int64_t d = 0; d < 16; ++d)
                apa_test_set(&t->problem.q, 0, 0, i, d, 30 * apa_test_get(&t->problem.q, 0, 0, i, d));
        run(t, "apa", "cold_format=int8 eps=0.9", NULL, &statistics, NULL);
        assert_true(statistics.hot == 0);
        apa_test_free(t);
    }
}

/* ---- the Never list ---- */

/* A NaN in a key that a row can't see does not touch the row, in any preset; one that it sees does. */
static void test_non_finite(void **state)
{
    static const double poison[] = {NAN, INFINITY};
    (void)state;
    for (size_t k = 0; apa_recipe_preset_name(k) != NULL; ++k)
        for (int i = 0; i < 6; ++i) {
            apa_test_problem *t = problem((apa_test_shape){1, 2, 1, 100, 200, 16, 8}, 52);
            const apa_tensor *x = i / 2 == 0 ? &t->problem.q : i / 2 == 1 ? &t->problem.k : &t->problem.v;
            apa_test_set(x, 0, 0, i / 2 == 0 ? 50 : 150, 3, poison[i % 2]); /* key 150: rows 50 … 99 */
            const double error = run(t, apa_recipe_preset_name(k), "", NULL, NULL, NULL);
            if (!(error < 0.7))
                fail_msg("%s, poison %d: rel_l2 %g", apa_recipe_preset_name(k), i, error);
            apa_test_free(t);
        }
}

/* Zeros, tiny and huge inputs stay finite; V = 1 gives 1 where the sum is over the P that is multiplied. */
static void test_ranges(void **state)
{
    static const double sizes[] = {0, 1e-38, 1e-20, 1e4};
    (void)state;
    for (size_t k = 0; apa_recipe_preset_name(k) != NULL; ++k)
        for (int which = 0; which < 3; ++which)
            for (int i = 0; i < 4; ++i) {
                apa_test_problem *t = apa_test_make((apa_test_shape){1, 2, 1, 7, 130, 16, 8}, APA_DTYPE_F32,
                                                    APA_DTYPE_F64, APA_TEST_HND, 53);
                const apa_tensor *x = which == 0 ? &t->problem.q : which == 1 ? &t->problem.k : &t->problem.v;
                const char *name = apa_recipe_preset_name(k);
                /* S beyond f16 is infinite there, as it is in an f16 framework */
                const bool overflows = strcmp(name, "standard") == 0 && i == 3;
                for (int64_t h = 0; h < x->shape[1]; ++h)
                    for (int64_t s = 0; s < x->shape[2]; ++s)
                        for (int64_t d = 0; d < x->shape[3]; ++d)
                            apa_test_set(x, 0, h, s, d, sizes[i] * apa_test_get(x, 0, h, s, d));
                const apa_recipe recipe = apa_test_recipe(name, "");
                apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
                for (int64_t s = 0; s < 7; ++s)
                    for (int64_t c = 0; c < 8; ++c)
                        if (!overflows && !isfinite(apa_test_get(&t->problem.out, 0, 1, s, c)))
                            fail_msg("%s, input %d times %g: row %d is not finite", name, which, sizes[i], (int)s);
                apa_test_free(t);
            }
}

/* The same bits with any number of threads. */
static void test_threads(void **state)
{
    (void)state;
    for (size_t k = 0; apa_recipe_preset_name(k) != NULL; ++k) {
        apa_test_problem *t[2];
        for (int i = 0; i < 2; ++i) {
            apa_context_options options;
            apa_context *own;
            const apa_recipe recipe = apa_test_recipe(apa_recipe_preset_name(k), "");
            apa_context_options_init(&options);
            options.threads = i == 0 ? 1 : 3;
            assert_int_equal(apa_context_create(&own, &options), APA_STATUS_OK);
            t[i] = problem((apa_test_shape){2, 4, 2, 33, 300, 16, 16}, 54);
            apa_test_run(&apa_reference_engine, own, t[i], &recipe, NULL, NULL);
            apa_context_destroy(own);
        }
        assert_memory_equal(t[0]->memory[3], t[1]->memory[3], t[0]->bytes[3]);
        assert_memory_equal(t[0]->memory[4], t[1]->memory[4], t[0]->bytes[4]);
        apa_test_free(t[0]);
        apa_test_free(t[1]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transforms_change_nothing),
        cmocka_unit_test(test_operands_left_exact),
        cmocka_unit_test(test_operands_left_exact_keep_verdicts),
        cmocka_unit_test(test_a_common_query_is_taken_off),
        cmocka_unit_test(test_phases_cancel),
        cmocka_unit_test(test_lamp_ends),
        cmocka_unit_test(test_lamp_rates),
        cmocka_unit_test(test_pcast_fraction),
        cmocka_unit_test(test_cold_budget),
        cmocka_unit_test(test_mass_value),
        cmocka_unit_test(test_selection),
        cmocka_unit_test(test_early_rows),
        cmocka_unit_test(test_short_last_tile),
        cmocka_unit_test(test_non_finite),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
