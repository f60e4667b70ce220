/* Masks, slopes, caps, sinks and pages on the reference engine, with every recipe that can have them. */
#include "support/attend.h"
#include "support/fixture.h"
#include "support/oracle.h"
#include "support/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 1, HQ = 4, HKV = 2, SQ = 33, SKV = 200, DIM = 64, PAGE = 24, PAGES = 20 };

typedef struct bench {
    double q[HQ * SQ * DIM], k[HKV * SKV * DIM], v[HKV * SKV * DIM], out[HQ * SQ * DIM], lse[HQ * SQ];
    double k_pages[PAGES * HKV * PAGE * DIM], v_pages[PAGES * HKV * PAGE * DIM];
    float mask[SQ * SKV], alibi[HQ], sinks[HQ];
    int32_t table[PAGES];
    int64_t used;
    apa_problem problem;
} bench;

/* Causal, in double, values as FP32 holds them so that no recipe rounds its inputs. */
static bench *make(void)
{
    bench *t = calloc(1, sizeof *t);
    apa_test_rng rng = {apa_test_seed()};
    assert_non_null(t);
    for (size_t i = 0; i < sizeof t->q / sizeof *t->q; i++)
        t->q[i] = (double)(float)apa_test_normal(&rng);
    for (size_t i = 0; i < sizeof t->k / sizeof *t->k; i++) {
        t->k[i] = (double)(float)apa_test_normal(&rng);
        t->v[i] = (double)(float)apa_test_normal(&rng);
    }
    for (int i = 0; i < SQ * SKV; i++)
        t->mask[i] = apa_test_uniform(&rng) < 0.3 ? -INFINITY : (float)apa_test_normal(&rng);
    for (int h = 0; h < HQ; h++) {
        t->alibi[h] = 0.02F * (float)(h + 1);
        t->sinks[h] = (float)h - 1;
    }
    apa_problem *p = &t->problem;
    apa_problem_init(p);
    p->q = apa_tensor_hnd(t->q, APA_DTYPE_F64, B, HQ, SQ, DIM);
    p->k = apa_tensor_hnd(t->k, APA_DTYPE_F64, B, HKV, SKV, DIM);
    p->v = apa_tensor_hnd(t->v, APA_DTYPE_F64, B, HKV, SKV, DIM);
    p->out = apa_tensor_hnd(t->out, APA_DTYPE_F64, B, HQ, SQ, DIM);
    p->lse = apa_tensor_hnd(t->lse, APA_DTYPE_F64, B, HQ, SQ, 1);
    p->causal = APA_CAUSAL_BOTTOM_RIGHT;
    return t;
}

static void add_mask(bench *t)
{
    t->problem.attn_mask = apa_tensor_hnd(t->mask, APA_DTYPE_F32, 1, 1, SQ, SKV);
}
static void add_alibi(bench *t)
{
    t->problem.alibi_slopes = apa_tensor_hnd(t->alibi, APA_DTYPE_F32, 1, HQ, 1, 1);
}
static void add_sinks(bench *t)
{
    t->problem.sinks = apa_tensor_hnd(t->sinks, APA_DTYPE_F32, 1, HQ, 1, 1);
}

/* The same keys in pages in reverse order, with NaN wherever no key is. */
static void to_pages(bench *t)
{
    apa_problem *p = &t->problem;
    memset(t->k_pages, 0xFF, sizeof t->k_pages);
    memset(t->v_pages, 0xFF, sizeof t->v_pages);
    for (int j = 0; j < SKV; j++)
        for (int h = 0; h < HKV; h++) {
            const int page = PAGES - 1 - j / PAGE;
            const size_t to = (size_t)((page * HKV + h) * PAGE + j % PAGE) * DIM, from = (size_t)(h * SKV + j) * DIM;
            memcpy(t->k_pages + to, t->k + from, sizeof *t->k * DIM);
            memcpy(t->v_pages + to, t->v + from, sizeof *t->v * DIM);
        }
    for (int i = 0; i < PAGES; i++)
        t->table[i] = i * PAGE < SKV ? PAGES - 1 - i : -1;
    t->used = SKV;
    p->k = apa_tensor_hnd(t->k_pages, APA_DTYPE_F64, PAGES, HKV, PAGE, DIM);
    p->v = apa_tensor_hnd(t->v_pages, APA_DTYPE_F64, PAGES, HKV, PAGE, DIM);
    p->block_table = t->table;
    p->block_table_stride = PAGES;
    p->seqused_k = &t->used;
}

static apa_status run(bench *t, const apa_recipe *recipe, apa_statistics *statistics)
{
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "reference";
    if (statistics != NULL)
        apa_statistics_init(statistics);
    memset(t->out, 0xFF, sizeof t->out);
    memset(t->lse, 0xFF, sizeof t->lse);
    return apa_attention(context, &t->problem, recipe, &options, statistics);
}

static void works(bench *t, const char *preset, const char *settings, apa_statistics *statistics)
{
    const apa_recipe recipe = apa_test_recipe(preset, settings);
    if (run(t, &recipe, statistics) != APA_STATUS_OK)
        fail_msg("%s %s: %s", preset, settings, apa_context_message(context));
}

/* Relative L2 of the output, and the largest error of an LSE over max(1, |LSE|). */
static double error_of(const bench *t, double *lse_error)
{
    const apa_problem *p = &t->problem;
    const oracle_sequence s = oracle_at(p, 0);
    const oracle_cold cold = {0};
    double apart = 0, size = 0;
    *lse_error = 0;
    for (int hkv = 0; hkv < HKV; hkv++) {
        oracle_keys keys = oracle_decode(p, &s, hkv, &cold);
        for (int h = hkv * HQ / HKV; h < (hkv + 1) * HQ / HKV; h++)
            for (int i = 0; i < SQ; i++) {
                oracle_row row;
                oracle_attend(&keys, h, i, 0x1p-52, &row);
                for (int d = 0; d < DIM; d++) {
                    const double found = t->out[(h * SQ + i) * DIM + d];
                    apart += (found - row.out[d]) * (found - row.out[d]);
                    size += row.out[d] * row.out[d];
                }
                const double off = fabs(t->lse[h * SQ + i] - row.lse) / fmax(1, fabs(row.lse));
                *lse_error = off > *lse_error || isnan(off) ? off : *lse_error;
            }
        oracle_keys_free(&keys);
    }
    return sqrt(apart / size);
}

/* Recipes that choose tiles by q·k alone, or hold q·k alone in their formats, refuse what changes scores. */
static bool refuses(const char *preset)
{
    return strncmp(preset, "thrift", 6) == 0 || strcmp(preset, "lamp") == 0;
}

/* A preset's error with masks, slopes and sinks is what it is without them, but for luck: at most four times, and
 * where the method is exact, nothing. The worst LSE of a few rows is luck altogether: 0.1 where codes are coarse. */
static void every_preset(void **unused)
{
    (void)unused;
    for (size_t i = 0; apa_recipe_preset_name(i) != NULL; i++) {
        const char *name = apa_recipe_preset_name(i);
        const char *settings = strncmp(name, "apa", 3) == 0 ? "eps=1" : ""; /* the same tiles cold with and without */
        const apa_recipe recipe = apa_test_recipe(name, settings);
        bench *t = make();
        double lse_plain, lse;
        works(t, name, settings, NULL);
        const double plain = error_of(t, &lse_plain);
        add_mask(t);
        add_alibi(t);
        add_sinks(t);
        const apa_status status = run(t, &recipe, NULL);
        assert_int_equal(status == APA_STATUS_UNSUPPORTED, refuses(name));
        if (status == APA_STATUS_OK) {
            const double with = error_of(t, &lse);
            if (!(with <= 4 * plain + 1e-12) || !(lse <= (lse_plain > 1e-5 ? 0.1 : 4 * lse_plain + 1e-12)))
                fail_msg("%s: error %g, LSE %g; plain %g, %g", name, with, lse, plain, lse_plain);
        }
        free(t);
    }
}

/* Softcap too, where K isn't smoothed. */
static void every_preset_capped(void **unused)
{
    (void)unused;
    for (size_t i = 0; apa_recipe_preset_name(i) != NULL; i++) {
        const char *name = apa_recipe_preset_name(i);
        const char *settings = strncmp(name, "apa", 3) == 0 ? "eps=1" : ""; /* the same tiles cold with and without */
        const apa_recipe recipe = apa_test_recipe(name, settings);
        bench *t = make();
        double lse_plain, lse;
        works(t, name, settings, NULL);
        const double plain = error_of(t, &lse_plain);
        t->problem.softcap = 2;
        add_sinks(t);
        const apa_status status = run(t, &recipe, NULL);
        if ((status == APA_STATUS_UNSUPPORTED) !=
            ((refuses(name) && strcmp(name, "thrift-local") != 0) || recipe.smooth_k == APA_TOGGLE_ON))
            fail_msg("%s: %s", name, apa_context_message(context));
        if (status == APA_STATUS_OK) {
            const double with = error_of(t, &lse);
            if (!(with <= 4 * plain + 1e-12) || !(lse <= (lse_plain > 1e-5 ? 0.1 : 4 * lse_plain + 1e-12)))
                fail_msg("%s: error %g, LSE %g; plain %g, %g", name, with, lse, plain, lse_plain);
        }
        free(t);
    }
}

/* Pages hold the same keys, so every recipe leaves the same bits; NaN in unused slots and pages goes nowhere. */
static void every_preset_paged(void **unused)
{
    (void)unused;
    for (size_t i = 0; apa_recipe_preset_name(i) != NULL; i++) {
        const char *name = apa_recipe_preset_name(i);
        bench *t = make();
        double *flat = malloc(sizeof t->out + sizeof t->lse);
        if (!refuses(name)) {
            add_mask(t);
            add_sinks(t);
        }
        works(t, name, "", NULL);
        memcpy(flat, t->out, sizeof t->out);
        memcpy(flat + HQ * SQ * DIM, t->lse, sizeof t->lse);
        to_pages(t);
        works(t, name, "", NULL);
        if (memcmp(flat, t->out, sizeof t->out) != 0 || memcmp(flat + HQ * SQ * DIM, t->lse, sizeof t->lse) != 0)
            fail_msg("%s: other bits from pages", name);
        free(flat);
        free(t);
    }
}

/* Everything at -2.5e5: the same weights, the LSE lower by that. No sentinel may be near. */
static void far_below(void **unused)
{
    (void)unused;
    static const char *const presets[] = {"exact", "apa", "cold", "apa-nvfp4", "elsa"};
    for (size_t n = 0; n < sizeof presets / sizeof *presets; n++) {
        bench *t = make();
        double lse_error;
        for (int i = 0; i < SQ * SKV; i++)
            t->mask[i] = i % SKV < 128 ? -INFINITY : -2.5e5F; /* and two leading tiles are masked wholly */
        add_mask(t);
        works(t, presets[n], "", NULL);
        const double error = error_of(t, &lse_error);
        const double bound = n == 0 ? 1e-9 : n == 4 ? 0.1 : 0.5; /* FP32 scores of 2.5e5 have steps of 1/64 */
        if (!(error <= bound) || !(lse_error <= 1e-6))
            fail_msg("%s: error %g, LSE %g", presets[n], error, lse_error);
        free(t);
    }
}

/* A mask that leaves nothing: no output, and an LSE of -inf or the sink, exactly. */
static void nothing_left(void **unused)
{
    (void)unused;
    static const char *const presets[] = {"exact", "apa", "cold", "apa-nvfp4", "elsa", "standard"};
    for (size_t n = 0; n < 2 * sizeof presets / sizeof *presets; n++) {
        bench *t = make();
        apa_statistics statistics;
        for (int i = 0; i < SQ * SKV; i++)
            t->mask[i] = i / SKV % 2 == 0 ? -INFINITY : t->mask[i]; /* every second row */
        add_mask(t);
        t->sinks[1] = 0.1F;
        if (n % 2 == 1)
            add_sinks(t);
        works(t, presets[n / 2], "", &statistics);
        for (int h = 0; h < HQ; h++)
            for (int i = 0; i < SQ; i += 2) {
                for (int d = 0; d < DIM; d++)
                    assert_true(t->out[(h * SQ + i) * DIM + d] == 0);
                assert_true(t->lse[h * SQ + i] == (n % 2 == 1 ? (double)t->sinks[h] : -INFINITY));
            }
        free(t);
    }
}

/* The sink is in λ: before one that holds all but e^-60 of the mass, no tile is worth a second look. */
static void sink_starts_the_sum(void **unused)
{
    (void)unused;
    bench *t = make();
    apa_statistics statistics;
    works(t, "apa", "eps=0.05", &statistics);
    assert_true(statistics.hot > 0);
    for (int h = 0; h < HQ; h++)
        t->sinks[h] = 80;
    add_sinks(t);
    works(t, "apa", "eps=0.05", &statistics);
    assert_int_equal(statistics.hot, 0);
    assert_int_equal(statistics.candidates, 0);
    works(t, "apa", "verdict=cold_budget eps=0.05", &statistics);
    assert_int_equal(statistics.hot, 0);
    works(t, "apa", "verdict=mass_value eps=0.05", &statistics);
    assert_int_equal(statistics.hot, 0);
    free(t);
}

/* The sink is nothing to the frame: a P that stands against a running maximum (NVFP4, static FP8) would round to zero
 * under one. Outputs are those without it times the share that is left, to double's rounding. */
static void sink_leaves_the_frame(void **unused)
{
    (void)unused;
    static const char *const settings[] = {"cold_format=nvfp4", "cold_format=e4m3 p_scale=static lazy_tau=0",
                                           "cold_format=int8", "cold_format=mxfp4"};
    for (size_t n = 0; n < sizeof settings / sizeof *settings; n++) {
        bench *t = make();
        double *out = malloc(sizeof t->out), *lse = malloc(sizeof t->lse);
        works(t, "cold", settings[n], NULL);
        memcpy(out, t->out, sizeof t->out);
        memcpy(lse, t->lse, sizeof t->lse);
        for (int h = 0; h < HQ; h++)
            t->sinks[h] = 40;
        add_sinks(t);
        works(t, "cold", settings[n], NULL);
        for (int row = 0; row < HQ * SQ; row++) {
            const double left = 1 / (1 + exp(40 - lse[row]));
            for (int d = 0; d < DIM; d++) {
                const double expected = out[row * DIM + d] * left;
                assert_true(fabs(t->out[row * DIM + d] - expected) <= 1e-9 * left);
            }
            assert_true(fabs(t->lse[row] - (40 + log1p(exp(lse[row] - 40)))) <= 1e-9);
        }
        free(out);
        free(lse);
        free(t);
    }
}

/* A key that a mask hides from every row changes no bit of exact, whatever it holds; nor does a tail that it hides. */
static void hidden_is_absent(void **unused)
{
    (void)unused;
    bench *t = make(), *shorter = make();
    bool seen[SQ * SKV];
    for (int i = 0; i < SQ * SKV; i++)
        seen[i] = i % SKV < 150 && i % SKV != 70;
    t->problem.attn_mask = apa_tensor_hnd(seen, APA_DTYPE_BOOL, 1, 1, SQ, SKV);
    shorter->problem.attn_mask = t->problem.attn_mask;
    shorter->problem.k.shape[2] = shorter->problem.v.shape[2] = 150;
    t->problem.causal = shorter->problem.causal = APA_CAUSAL_NONE;
    for (int h = 0; h < HKV; h++)
        for (int j = 0; j < SKV; j++)
            for (int d = 0; d < DIM && (j == 70 || j >= 150); d++)
                t->k[(h * SKV + j) * DIM + d] = t->v[(h * SKV + j) * DIM + d] = d % 2 == 0 ? NAN : INFINITY;
    works(t, "exact", "", NULL);
    works(shorter, "exact", "", NULL);
    assert_memory_equal(t->out, shorter->out, sizeof t->out);
    assert_memory_equal(t->lse, shorter->lse, sizeof t->lse);
    works(t, "apa", "", NULL);
    for (size_t i = 0; i < sizeof t->out / sizeof *t->out; i++)
        assert_true(isfinite(t->out[i]));
    free(t);
    free(shorter);
}

/* A row that sees nothing has no say: its NaN query makes no tile of the group hot. */
static void blind_rows_have_no_say(void **unused)
{
    (void)unused;
    bench *t = make();
    apa_statistics statistics;
    for (int j = 0; j < SKV; j++)
        t->mask[3 * SKV + j] = -INFINITY;
    for (int h = 0; h < HQ; h++)
        t->q[(h * SQ + 3) * DIM] = NAN;
    add_mask(t);
    works(t, "apa", "eps=0.9999", &statistics);
    assert_int_equal(statistics.hot, 0);
    for (size_t i = 0; i < sizeof t->out / sizeof *t->out; i++)
        assert_true(isfinite(t->out[i]));
    free(t);
}

/* What can't be had, and why. */
static void refusals(void **unused)
{
    (void)unused;
    bench *t = make();
    const struct {
        const char *preset, *settings, *says;
        void (*add)(bench *);
    } refused[] = {{"lamp", "", "verdict: lamp together with", add_mask},
                   {"lamp", "", "verdict: lamp together with", add_sinks},
                   {"thrift", "", "select: together with softcap, attn_mask or alibi_slopes", add_alibi},
                   {"thrift-local", "", "select: together with attn_mask", add_mask}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const apa_recipe recipe = apa_test_recipe(refused[i].preset, refused[i].settings);
        const apa_problem before = t->problem;
        refused[i].add(t);
        assert_int_equal(run(t, &recipe, NULL), APA_STATUS_UNSUPPORTED);
        assert_non_null(strstr(apa_context_message(context), refused[i].says));
        t->problem = before;
    }
    add_alibi(t);
    add_sinks(t);
    works(t, "thrift-local", "", NULL); /* positions alone: slopes and sinks are nothing to the choice */
    free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_preset),           cmocka_unit_test(every_preset_capped),
        cmocka_unit_test(every_preset_paged),     cmocka_unit_test(far_below),
        cmocka_unit_test(nothing_left),           cmocka_unit_test(sink_starts_the_sum),
        cmocka_unit_test(sink_leaves_the_frame),  cmocka_unit_test(hidden_is_absent),
        cmocka_unit_test(blind_rows_have_no_say), cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
