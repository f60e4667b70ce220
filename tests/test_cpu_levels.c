/* The CPU engine, level against level: a short end-to-end test of every ISA level that this machine (or an emulator)
 * has. The long ones are test_cpu_engine and test_cpu_adaptive.
 *
 * exact  against attention in double.
 * cold   against the portable level: codes, integer sums and probabilities are the same bits in every level, so what
 *        differs is the rounding of a few scales: frames and sums, one 2^x each a tile.
 * apa    against the portable level: a verdict may turn over where a mass is within rounding of eps·λ, so tiles counted
 *        hot may differ by a few. */
#include "support/test.h"

#include "support/attend.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXACT_BOUND 2e-6 /* relative, over all outputs: as test_cpu_engine.c */
#define LSE_BOUND 2e-6
#define COLD_BOUND 2e-6
#define APA_BOUND 2e-4 /* one tile's INT8 error where a verdict turned over */

static apa_test_level level[APA_TEST_LEVELS_MAX];
static apa_context *context[APA_TEST_LEVELS_MAX], *two_threads[APA_TEST_LEVELS_MAX];
static int levels;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    levels = apa_test_levels(level);
    for (int l = 0; l < levels; l++) {
        context[l] = apa_test_level_context(&level[l], 1);
        two_threads[l] = apa_test_level_context(&level[l], 2);
        printf("# level %s uses kernels %s\n", level[l].name, level[l].kernels->name);
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_context_destroy(context[l]);
        apa_context_destroy(two_threads[l]);
    }
    return 0;
}

typedef struct levels_case {
    apa_test_shape shape;
    apa_dtype dtype;
    int causal;
    int64_t window_left;
} levels_case;

static const levels_case cases[] = {
    {{1, 6, 2, 40, 300, 64, 64}, APA_DTYPE_F16, 1, -1}, /* G = 3: a panel of every size, a tail tile */
    {{1, 2, 2, 19, 130, 128, 128}, APA_DTYPE_BF16, 0, -1},
    {{2, 4, 1, 33, 200, 20, 12}, APA_DTYPE_F32, 1, 90}, /* odd dims, a window */
    {{1, 8, 1, 1, 1000, 72, 40}, APA_DTYPE_F16, 1, -1}, /* decode: half a register */
    {{1, 1, 1, 70, 70, 256, 8}, APA_DTYPE_F32, 1, -1},
};
#define CASES (int)(sizeof cases / sizeof cases[0])

static apa_test_problem *make(const levels_case *c)
{
    apa_test_problem *t = apa_test_make(c->shape, c->dtype, APA_DTYPE_F32, APA_TEST_NHD, (uint64_t)c->shape.Skv);
    t->problem.causal = c->causal;
    t->problem.window_left = c->window_left;
    return t;
}

#ifdef APA_HAVE_AVX2
/* Is `flag` a word of the first "flags" line of /proc/cpuinfo? */
static bool kernel_says(const char *flag)
{
    char line[8192], *word = NULL;
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file != NULL && word == NULL && fgets(line, sizeof line, file) != NULL)
        word = strncmp(line, "flags", 5) == 0 ? strtok(line, " \t\n") : NULL;
    while (word != NULL && strcmp(word, flag) != 0)
        word = strtok(NULL, " \t\n");
    if (file != NULL)
        fclose(file);
    return word != NULL;
}

/* What cpu.c found is what the operating system says. */
static void detection(void **state)
{
    (void)state;
    if (!kernel_says("fpu")) {
        printf("# no flags in /proc/cpuinfo to compare with\n");
        skip();
    }
    const bool avx2 = kernel_says("avx2") && kernel_says("fma") && kernel_says("f16c");
    const apa_isa best = apa_cpu_best_isa();
    assert_int_equal(best >= APA_ISA_AVX2, avx2);
#ifdef APA_HAVE_AVXVNNI
    assert_int_equal(apa_cpu_has_avxvnni() != 0, avx2 && kernel_says("avx_vnni"));
#endif
    assert_string_equal(apa_cpu_kernels_for(APA_ISA_AVX2)->name, apa_cpu_has_avxvnni() ? "avx2vnni" : "avx2");
    if (best == APA_ISA_AVX512)
        assert_true(kernel_says("avx512f") && kernel_says("avx512_vnni") && kernel_says("avx512vbmi"));
}
#endif

static void exact(void **state)
{
    (void)state;
    const apa_recipe recipe = apa_test_recipe("exact", "");
    double worst = 0;
    for (int i = 0; i < CASES; i++) {
        apa_test_problem *t = make(&cases[i]);
        double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
        apa_test_fast_oracle(&t->problem, out, lse);
        for (int l = 0; l < levels; l++) {
            apa_test_fill(&t->problem.out, NAN);
            apa_test_attend(context[l], "cpu", t, &recipe, NULL, NULL);
            const double error = apa_test_rel_l2(&t->problem.out, out);
            const double lse_error = apa_test_lse_error(&t->problem.lse, lse);
            if (!(error <= EXACT_BOUND) || !(lse_error <= LSE_BOUND))
                fail_msg("exact, level %s, case %d: out %g, lse %g", level[l].name, i, error, lse_error);
            worst = fmax(worst, fmax(error, lse_error));
        }
        free(out);
        free(lse);
        apa_test_free(t);
    }
    printf("# exact: worst error %.3g\n", worst);
}

/* Every level against the first; the same bits from two threads. */
static void against_portable(const char *preset, const char *settings, double bound)
{
    const apa_recipe recipe = apa_test_recipe(preset, settings);
    double worst = 0;
    int64_t hot = 0, differs = 0;
    for (int i = 0; i < CASES; i++) {
        apa_test_problem *t = make(&cases[i]), *portable = make(&cases[i]);
        apa_statistics first, statistics;
        apa_statistics_init(&first);
        apa_test_attend(context[0], "cpu", portable, &recipe, NULL, &first);
        hot += first.hot;
        for (int l = 1; l < levels; l++) {
            apa_test_fill(&t->problem.out, NAN);
            apa_statistics_init(&statistics);
            apa_test_attend(context[l], "cpu", t, &recipe, NULL, &statistics);
            const double error = apa_test_distance(&t->problem.out, &portable->problem.out);
            if (!(error <= bound))
                fail_msg("%s %s, level %s, case %d: %g from the portable level", preset, settings, level[l].name, i,
                         error);
            worst = fmax(worst, error);
            differs += llabs((long long)statistics.hot - (long long)first.hot);
            apa_test_outputs one = apa_test_keep(t);
            apa_test_fill(&t->problem.out, NAN);
            apa_test_attend(two_threads[l], "cpu", t, &recipe, NULL, NULL);
            assert_false(apa_test_differs(t, &one));
            apa_test_drop(&one);
        }
        apa_test_free(t);
        apa_test_free(portable);
    }
    printf("# %s %s: worst distance %.3g; %lld hot, %lld of them differ\n", preset, settings, worst, (long long)hot,
           (long long)differs);
    assert_true(differs * 100 <= hot);
}

static void cold(void **state)
{
    (void)state;
    against_portable("cold", "", COLD_BOUND);
}

static void adaptive(void **state)
{
    (void)state;
    against_portable("apa", "", APA_BOUND);
    against_portable("apa", "eps=0.3", APA_BOUND);
    against_portable("apa", "eps=0.1 second_look=off", APA_BOUND);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifdef APA_HAVE_AVX2
        cmocka_unit_test(detection),
#endif
        cmocka_unit_test(exact),
        cmocka_unit_test(cold),
        cmocka_unit_test(adaptive),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
