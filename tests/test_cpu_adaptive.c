/* The CPU engine's adaptive method, every ISA level, against the reference engine running the very recipe that the CPU
 * engine resolved (but for skipping, which is no verdict).
 *
 * Codes agree bit for bit, scores and probabilities to float rounding, so a tile's mass may differ by a code here and
 * there. Verdicts are held by a sandwich: what the reference calls hot at ε·(1 + MARGIN) must be hot here, and what is
 * hot here must be hot in the reference at ε·(1 - MARGIN). Masses are at least 255 codes; two codes rounded the other
 * way are 0.8 %. */
#include "support/test.h"

#include "support/attend.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MARGIN 0.008
#define FLIPS 0.002 /* of the visible pairs may have another verdict than the reference at the same ε */
/* Distance of the outputs, verdicts that fell the other way included. The cubic of the fast engine rounds one
 * probability in a hundred to the other code (test_cpu_kernels_i8.c: 0.52 of a code at most), a noise of 0.1 codes
 * against the 0.29 of the rounding itself: about 1e-3 of an output that is the mean of random values, 1e-4 of the LSE
 * of a row. */
#define OUT_BOUND 1.5e-3
#define LSE_BOUND 3e-4
#define TILE 64

static apa_test_level level[APA_TEST_LEVELS_MAX];
static apa_context *context[APA_TEST_LEVELS_MAX];
static int levels;
static double worst_out, worst_flips;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    levels = apa_test_levels(level);
    for (int l = 0; l < levels; l++)
        context[l] = apa_test_level_context(&level[l], 1);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        apa_context_destroy(context[l]);
    printf("# apa against the reference: worst output distance %.3g, most flipped verdicts %.3g of the visible pairs\n",
           worst_out, worst_flips);
    return 0;
}

/* ---- inputs ---- */

typedef enum input_kind { INPUT_RANDOM, INPUT_PEAKED, INPUT_SHIFTED, INPUT_OUTLIER } input_kind;

/* A direction of ±1 with no pattern, so that rotating it spreads it evenly. */
static double direction(int64_t d)
{
    return ((uint32_t)(d + 1) * 2654435761u >> 13 & 1) != 0 ? 1.0 : -1.0;
}

/* Peaked: queries and some keys lie along one direction; shifted: K has a large mean; outlier: a loud channel in Q and
 * K. */
static void shape_inputs(apa_test_problem *t, input_kind kind)
{
    const apa_test_shape *s = &t->shape;
    for (int64_t b = 0; b < s->B && kind != INPUT_RANDOM; b++) {
        for (int64_t h = 0; h < s->Hq && kind != INPUT_SHIFTED; h++)
            for (int64_t i = 0; i < s->Sq; i++)
                for (int64_t d = 0; d < s->D; d++) {
                    const double q = apa_test_get(&t->problem.q, b, h, i, d);
                    if (kind == INPUT_PEAKED)
                        apa_test_set(&t->problem.q, b, h, i, d, 0.3 * q + 1.5 * direction(d));
                    else if (d == s->D / 2)
                        apa_test_set(&t->problem.q, b, h, i, d, 20 * q);
                }
        for (int64_t h = 0; h < s->Hkv; h++)
            for (int64_t j = 0; j < s->Skv; j++)
                for (int64_t d = 0; d < s->D; d++) {
                    const double k = apa_test_get(&t->problem.k, b, h, j, d);
                    if (kind == INPUT_PEAKED && (j < 4 || j % 331 == 77))
                        apa_test_set(&t->problem.k, b, h, j, d, 0.5 * k + 2.0 * direction(d));
                    else if (kind == INPUT_SHIFTED)
                        apa_test_set(&t->problem.k, b, h, j, d, 0.7 * k + (double)(d % 5) - 1);
                    else if (kind == INPUT_OUTLIER && d == s->D / 2)
                        apa_test_set(&t->problem.k, b, h, j, d, 0.1 * k + 8);
                }
    }
}

typedef struct trial {
    apa_test_shape shape;
    const char *settings, *masks; /* masks: "", "causal", "window" */
    input_kind kind;
    apa_dtype dtype;
} trial;

static apa_test_problem *make(const trial *x)
{
    apa_test_problem *t = apa_test_make(x->shape, x->dtype, APA_DTYPE_F32, APA_TEST_HND, 31);
    t->problem.causal = strcmp(x->masks, "causal") == 0;
    if (strcmp(x->masks, "window") == 0) {
        t->problem.window_left = 500;
        t->problem.window_right = 30;
    }
    shape_inputs(t, x->kind);
    return t;
}

static int64_t pairs_of(const trial *x)
{
    return x->shape.B * x->shape.Hq * x->shape.Sq * ((x->shape.Skv + TILE - 1) / TILE);
}

/* ---- comparing ---- */

typedef struct truth {
    apa_test_problem *t;
    uint8_t *verdict, *strict, *lenient; /* at ε, ε·(1 + MARGIN), ε·(1 - MARGIN) */
    apa_statistics statistics;
} truth;

static void make_truth(truth *r, const trial *x, const apa_recipe *resolved)
{
    apa_recipe recipe = *resolved;
    const size_t pairs = (size_t)pairs_of(x);
    uint8_t **map[3] = {&r->strict, &r->lenient, &r->verdict};
    const double factor[3] = {1 + MARGIN, 1 - MARGIN, 1};
    r->t = make(x);
    recipe.skip = APA_TOGGLE_OFF;
    for (int i = 0; i < 3; i++) { /* the one at ε last: its output stays */
        recipe.eps = resolved->eps * (resolved->eps > 0 && resolved->eps < 1 ? factor[i] : 1);
        *map[i] = malloc(pairs);
        assert_non_null(*map[i]);
        apa_test_attend(context[0], "reference", r->t, &recipe, *map[i], &r->statistics);
    }
}

static void free_truth(truth *r)
{
    apa_test_free(r->t);
    free(r->verdict);
    free(r->strict);
    free(r->lenient);
}

/* Returns how many verdicts fell the other way. */
static int64_t compare_verdicts(const trial *x, const uint8_t *got, const truth *r, const apa_statistics *s,
                                const char *name)
{
    int64_t count[4] = {0}, flips = 0;
    for (int64_t i = 0; i < pairs_of(x); i++) {
        assert_in_range(got[i], APA_VERDICT_COLD, APA_VERDICT_INVISIBLE);
        count[got[i]]++;
        assert_int_equal(got[i] == APA_VERDICT_INVISIBLE, r->verdict[i] == APA_VERDICT_INVISIBLE);
        const bool hot = got[i] == APA_VERDICT_HOT;
        if ((r->strict[i] == APA_VERDICT_HOT && !hot) || (hot && r->lenient[i] != APA_VERDICT_HOT))
            fail_msg("%s, %s %s: pair %d is %s and the reference is sure that it is not", name, x->settings, x->masks,
                     (int)i, hot ? "hot" : "cold");
        flips += hot != (r->verdict[i] == APA_VERDICT_HOT);
    }
    assert_int_equal(count[APA_VERDICT_HOT], s->hot);
    assert_int_equal(count[APA_VERDICT_SKIPPED], s->skipped);
    assert_int_equal(count[APA_VERDICT_COLD] + count[APA_VERDICT_SKIPPED], s->cold);
    assert_int_equal(s->visible, r->statistics.visible);
    return flips;
}

static apa_statistics check(const trial *x)
{
    const apa_recipe asked = apa_test_recipe("apa", x->settings);
    apa_test_problem *t = make(x);
    apa_statistics statistics = {0};
    truth r = {0};
    uint8_t *verdict = malloc((size_t)pairs_of(x));
    for (int l = 0; l < levels; l++) {
        memset(verdict, 0xEE, (size_t)pairs_of(x));
        apa_test_fill(&t->problem.out, NAN);
        apa_test_attend(context[l], "cpu", t, &asked, verdict, &statistics);
        if (l == 0)
            make_truth(&r, x, &statistics.recipe);
        const double flips =
            (double)compare_verdicts(x, verdict, &r, &statistics, level[l].name) / (double)statistics.visible;
        const double distance = apa_test_distance(&t->problem.out, &r.t->problem.out);
        double *lse = apa_test_doubles(&r.t->problem.lse);
        for (int64_t i = 0; i < x->shape.B * x->shape.Hq * x->shape.Sq; i++)
            lse[i] = ((const float *)r.t->problem.lse.data)[i];
        const double lse_distance = apa_test_lse_error(&t->problem.lse, lse);
        free(lse);
        if (!(flips <= FLIPS) || !(distance <= OUT_BOUND) || !(lse_distance <= LSE_BOUND))
            fail_msg("%s, \"%s\" %s, D %d: %g of the verdicts flipped, outputs %g apart, LSE %g", level[l].name,
                     x->settings, x->masks, (int)x->shape.D, flips, distance, lse_distance);
        worst_out = fmax(worst_out, distance);
        worst_flips = fmax(worst_flips, flips);
    }
    free(verdict);
    free_truth(&r);
    apa_test_free(t);
    return statistics;
}

/* ---- against the reference ---- */

static void against_reference(void **state)
{
    (void)state;
    static const trial trials[] = {
        {{1, 6, 2, 130, 1500, 64, 64}, "", "causal", INPUT_RANDOM, APA_DTYPE_F16},
        {{1, 6, 2, 130, 1500, 64, 64}, "", "causal", INPUT_PEAKED, APA_DTYPE_F16},
        {{1, 4, 1, 100, 1300, 128, 64}, "eps=0.02", "", INPUT_PEAKED, APA_DTYPE_BF16},
        {{2, 2, 2, 90, 900, 16, 24}, "eps=0.05", "causal", INPUT_SHIFTED, APA_DTYPE_F32},
        {{1, 3, 1, 5, 1000, 128, 128}, "eps=0.03", "", INPUT_OUTLIER, APA_DTYPE_F16},
        {{1, 2, 1, 200, 700, 64, 64}, "eps=0.1", "window", INPUT_RANDOM, APA_DTYPE_F16},
        {{1, 6, 2, 64, 1500, 64, 8}, "eps=0.01 second_look=off", "causal", INPUT_PEAKED, APA_DTYPE_F32},
        {{1, 2, 1, 70, 1500, 64, 64}, "eps=0.05 order=forward", "causal", INPUT_PEAKED, APA_DTYPE_F16},
        {{1, 2, 1, 70, 1500, 64, 64}, "eps=0.05 order=reverse packing=rows", "causal", INPUT_RANDOM, APA_DTYPE_F16},
        {{1, 2, 1, 70, 800, 64, 64}, "smooth_k=off", "", INPUT_SHIFTED, APA_DTYPE_F16},
        {{1, 2, 1, 70, 800, 64, 64}, "hadamard=off", "causal", INPUT_OUTLIER, APA_DTYPE_F16},
        {{1, 2, 1, 300, 300, 16, 16}, "early_tiles=3", "causal", INPUT_RANDOM, APA_DTYPE_F16},
        {{1, 2, 1, 70, 800, 128, 128}, "skip=off", "causal", INPUT_PEAKED, APA_DTYPE_F16},
        {{1, 2, 1, 700, 700, 64, 64}, "eps=0.02 eps_by=row", "causal", INPUT_PEAKED, APA_DTYPE_F16},
        {{1, 3, 1, 300, 1000, 64, 64}, "eps=0.02 eps_by=row second_look=off", "window", INPUT_RANDOM, APA_DTYPE_F16},
        {{1, 4, 1, 5, 900, 64, 64}, "eps=0.02 eps_by=row packing=rows", "causal", INPUT_PEAKED, APA_DTYPE_F32},
        {{1, 2, 1, 70, 800, 33, 7}, "eps=0.05", "causal", INPUT_RANDOM, APA_DTYPE_F32},
        {{1, 2, 1, 70, 800, 80, 80}, "", "causal", INPUT_PEAKED, APA_DTYPE_F16},
        {{1, 2, 1, 70, 800, 100, 256}, "hadamard=on", "", INPUT_PEAKED, APA_DTYPE_F16},
        {{1, 1, 1, 40, 600, 256, 256}, "", "causal", INPUT_PEAKED, APA_DTYPE_BF16},
        {{1, 4, 4, 1, 3000, 64, 64}, "", "", INPUT_PEAKED, APA_DTYPE_F16},
    };
    for (size_t i = 0; i < sizeof trials / sizeof trials[0]; i++) {
        const apa_statistics s = check(&trials[i]);
        if (strstr(trials[i].settings, "second_look=off") == NULL && strstr(trials[i].settings, "early") == NULL)
            assert_true(s.candidates >= s.hot);
    }
}

/* A negative scale, and scale 0: every key weighs the same. */
static void scales(void **state)
{
    (void)state;
    static const double scale[] = {-0.125, 0.0, 0.5};
    for (int i = 0; i < 3; i++)
        for (int l = 0; l < levels; l++) {
            trial x = {{1, 2, 1, 60, 500, 64, 16}, "eps=0.05", "causal", INPUT_SHIFTED, APA_DTYPE_F16};
            const apa_recipe recipe = apa_test_recipe("apa", x.settings);
            apa_test_problem *t = make(&x);
            t->problem.softmax_scale = scale[i];
            double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
            apa_test_fast_oracle(&t->problem, out, lse);
            apa_test_attend(context[l], "cpu", t, &recipe, NULL, NULL);
            const double error = apa_test_rel_l2(&t->problem.out, out),
                         lse_error = apa_test_lse_error(&t->problem.lse, lse);
            if (!(error <= 0.03) || !(lse_error <= 0.01))
                fail_msg("%s, scale %g: out %g, lse %g from exact", level[l].name, scale[i], error, lse_error);
            free(out);
            free(lse);
            apa_test_free(t);
        }
}

/* ---- the ends of ε ---- */

static void ends_of_eps(void **state)
{
    (void)state;
    static const char *const masks[] = {"", "causal", "window"};
    for (int m = 0; m < 3; m++)
        for (int l = 0; l < levels; l++) {
            trial x = {{1, 4, 2, 90, 800, 64, 64}, "", masks[m], INPUT_SHIFTED, APA_DTYPE_F16};
            const apa_recipe all = apa_test_recipe("apa", "eps=-1"), exact = apa_test_recipe("exact", "");
            const apa_recipe never = apa_test_recipe("apa", "eps=1"), low = apa_test_recipe("apa", "force=low");
            const apa_recipe cold = apa_test_recipe("cold", ""), high = apa_test_recipe("apa", "force=high");
            apa_test_problem *a = make(&x), *b = make(&x);
            uint8_t *verdict[2] = {malloc((size_t)pairs_of(&x)), malloc((size_t)pairs_of(&x))};
            apa_statistics s;
            apa_test_attend(context[l], "cpu", a, &all, verdict[0], &s);
            apa_test_attend(context[l], "cpu", b, &exact, verdict[1], NULL);
            assert_int_equal(s.hot, s.visible);
            assert_memory_equal(verdict[0], verdict[1], (size_t)pairs_of(&x));
            assert_true(apa_test_distance(&a->problem.out, &b->problem.out) <= 2e-6);
            for (int64_t i = 0; i < 4 * 90; i++) {
                const float p = ((float *)a->problem.lse.data)[i], q = ((float *)b->problem.lse.data)[i];
                assert_true(fabsf(p - q) <= 2e-6f * fmaxf(1, fabsf(q)));
            }
            apa_test_outputs hot = apa_test_keep(a);
            apa_test_attend(context[l], "cpu", a, &high, NULL, NULL);
            assert_false(apa_test_differs(a, &hot));
            apa_test_drop(&hot);
            /* ε = 1, force=low and the preset cold are one thing */
            apa_test_attend(context[l], "cpu", a, &never, verdict[0], &s);
            apa_test_outputs kept = apa_test_keep(a);
            assert_int_equal(s.hot, 0);
            assert_int_equal(s.candidates, 0);
            apa_test_attend(context[l], "cpu", a, &low, verdict[1], &s);
            assert_false(apa_test_differs(a, &kept));
            assert_memory_equal(verdict[0], verdict[1], (size_t)pairs_of(&x));
            apa_test_attend(context[l], "cpu", a, &cold, NULL, NULL);
            assert_false(apa_test_differs(a, &kept));
            apa_test_drop(&kept);
            free(verdict[0]);
            free(verdict[1]);
            apa_test_free(a);
            apa_test_free(b);
        }
}

/* ---- skipping ---- */

/* Returns the skipped share. */
static double skip_once(int l, const char *settings, double scale, double *worst)
{
    const trial x = {{1, 4, 1, 100, 3000, 64, 64}, settings, "causal", INPUT_PEAKED, APA_DTYPE_F32};
    const apa_recipe on = apa_test_recipe("apa", settings);
    apa_recipe off = on;
    apa_test_problem *a = make(&x), *b = make(&x);
    apa_statistics s, t;
    off.skip = APA_TOGGLE_OFF;
    a->problem.softmax_scale = b->problem.softmax_scale = scale;
    apa_test_attend(context[l], "cpu", a, &on, NULL, &s);
    apa_test_attend(context[l], "cpu", b, &off, NULL, &t);
    assert_int_equal(t.skipped, 0);
    assert_int_equal(s.hot, t.hot);
    assert_int_equal(s.visible, t.visible);
    const double distance = apa_test_distance(&a->problem.out, &b->problem.out);
    /* The skipped part is under 2^-25; not skipping adds it with a rounding per tile, up to 47 of 2^-25 each at random.
     */
    if (!(distance <= 0x1p-22))
        fail_msg("%s, scale %g: skipping moved the output by %g, with %g of the pairs skipped", level[l].name, scale,
                 distance, s.skip_share);
    *worst = fmax(*worst, distance);
    apa_test_free(a);
    apa_test_free(b);
    return s.skip_share;
}

/* From tails far under the limit to tails about it. The peaks are 192·scale high, the rest is N(0, (12·scale)²). */
static void skipping(void **state)
{
    (void)state;
    static const double scale[] = {0.5, 0.3, 0.2, 0.17, 0.15};
    double worst = 0;
    for (int l = 0; l < levels; l++)
        for (int i = 0; i < 5; i++) {
            const double share = skip_once(l, "", scale[i], &worst), cold = skip_once(l, "force=low", scale[i], &worst);
            printf("# %s, scale %g: skipped %.3f of the pairs, %.3f with all tiles cold\n", level[l].name, scale[i],
                   share, cold);
            assert_true(i > 0 || (share > 0.5 && cold > 0.5));
        }
    printf("# skipping moved the output by %.3g at most\n", worst);
}

/* Tiles with all of the mass have no value, the skipped ones a large one: they are the whole output and must come back.
 */
static void brought_back(void **state)
{
    (void)state;
    for (int hot = 0; hot < 2; hot++)
        for (int l = 0; l < levels; l++) {
            trial x = {{1, 2, 1, 40, 640, 16, 8}, "", "", INPUT_RANDOM, APA_DTYPE_F32};
            const apa_recipe on = apa_test_recipe("apa", hot ? "eps=0.05" : "force=low");
            apa_recipe off = on;
            apa_test_problem *a = make(&x), *b;
            apa_statistics s;
            double most = 0;
            off.skip = APA_TOGGLE_OFF;
            for (int64_t j = 0; j < 640; j++) {
                for (int64_t d = 0; d < 16; d++)
                    apa_test_set(&a->problem.k, 0, 0, j, d,
                                 (j < 64 ? 3.0 : -3.0) + 0.01 * apa_test_get(&a->problem.k, 0, 0, j, d));
                for (int64_t c = 0; c < 8; c++)
                    apa_test_set(&a->problem.v, 0, 0, j, c, j < 64 ? 0.0 : 1e30 * (double)(c + 1));
            }
            apa_test_fill(&a->problem.q, 1.5);
            /* scores ±72·scale = ±36 natural: e^-72 = 2^-104 between the tiles */
            a->problem.softmax_scale = 0.5;
            b = make(&x);
            memcpy(b->memory[0], a->memory[0], a->bytes[0]);
            memcpy(b->memory[1], a->memory[1], a->bytes[1]);
            memcpy(b->memory[2], a->memory[2], a->bytes[2]);
            b->problem.softmax_scale = 0.5;
            apa_test_attend(context[l], "cpu", a, &on, NULL, &s);
            assert_int_equal(s.skipped, 0);
            assert_int_equal(s.hot, hot ? 2 * 40 : 0);
            apa_test_attend(context[l], "cpu", b, &off, NULL, NULL);
            const double distance = apa_test_distance(&a->problem.out, &b->problem.out);
            if (!(distance <= 1e-6))
                fail_msg("%s: brought back tiles differ by %g", level[l].name, distance);
            for (int64_t c = 0; c < 8; c++)
                most = fmax(most, apa_test_get(&a->problem.out, 0, 1, 39, c));
            assert_true(most > 0.1 && most < 1e3); /* 8e30·9·2^-104 = 3.6 before quantisation */
            /* The same with small values: now they are nothing and stay out. */
            for (int64_t j = 0; j < 640; j++)
                for (int64_t c = 0; c < 8; c++)
                    apa_test_set(&a->problem.v, 0, 0, j, c, 1.0);
            apa_test_attend(context[l], "cpu", a, &on, NULL, &s);
            assert_int_equal(s.skipped, 2 * 40 * 9);
            apa_test_free(a);
            apa_test_free(b);
        }
}

/* ---- many candidates ---- */

/* Each tile of the walk holds more than all before it: every one is a candidate at ε = 0.5, far more than P is kept
 * for, and all but the last are demoted by the second look. */
static void pool_overflow(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        trial x = {{1, 2, 1, 100, 6400, 16, 16}, "", "", INPUT_RANDOM, APA_DTYPE_F32};
        const apa_recipe recipe = apa_test_recipe("apa", "eps=0.5 smooth_k=off");
        apa_test_problem *a = make(&x), *b;
        apa_statistics s, t;
        for (int64_t j = 0; j < 6400; j++) { /* walked: tile 0, then 99, 98, … 1 */
            const double rung = j < 64 ? 0.0 : 100.0 - (double)(j / 64);
            for (int64_t d = 0; d < 16; d++)
                apa_test_set(&a->problem.k, 0, 0, j, d, rung * 0.1 + 0.001 * apa_test_get(&a->problem.k, 0, 0, j, d));
        }
        apa_test_fill(&a->problem.q, 1.0);
        a->problem.softmax_scale = 0.8; /* a rung: 16·0.1·0.8 = 1.28 natural, a factor of 3.6 */
        b = make(&x);
        for (int i = 0; i < 3; i++)
            memcpy(b->memory[i], a->memory[i], a->bytes[i]);
        b->problem.softmax_scale = 0.8;
        apa_test_attend(context[l], "cpu", a, &recipe, NULL, &s);
        assert_true(s.candidates >= 90 * 200 && s.hot <= 3 * 200 && s.hot >= 200);
        apa_recipe resolved = s.recipe;
        resolved.skip = APA_TOGGLE_OFF;
        apa_test_attend(context[0], "reference", b, &resolved, NULL, &t);
        assert_int_equal(s.hot, t.hot);
        assert_int_equal(s.candidates, t.candidates);
        const double distance = apa_test_distance(&a->problem.out, &b->problem.out);
        if (!(distance <= OUT_BOUND))
            fail_msg("%s: %g from the reference", level[l].name, distance);
        apa_test_free(a);
        apa_test_free(b);
    }
    /* Small ε on diffuse rows: everything is a candidate and stays hot. */
    const trial diffuse = {{1, 2, 1, 40, 2000, 16, 16}, "eps=0.0001", "causal", INPUT_RANDOM, APA_DTYPE_F16};
    const apa_statistics s = check(&diffuse);
    assert_true(s.hot_share > 0.99);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_reference), cmocka_unit_test(scales),       cmocka_unit_test(ends_of_eps),
        cmocka_unit_test(skipping),          cmocka_unit_test(brought_back), cmocka_unit_test(pool_overflow),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
