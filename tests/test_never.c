/* What must never break (docs/design.md, "Never"), one by one: every ISA level of the CPU engine and the reference
 * engine, exact and adaptive. */
#define _GNU_SOURCE /* mmap's MAP_NORESERVE, MAP_ANONYMOUS */
#include "support/test.h"

#include "support/attend.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RUNNERS_MAX (APA_TEST_LEVELS_MAX + 1)
#define TILE 64

/* An engine at a level. */
typedef struct runner {
    const char *engine, *level;
    apa_context *context;
} runner;

static runner runners[RUNNERS_MAX];
static int count;

static int set_up(void **state)
{
    (void)state;
    apa_test_level level[APA_TEST_LEVELS_MAX];
    apa_test_seed();
    const int levels = apa_test_levels(level);
    for (int l = 0; l < levels; l++)
        runners[count++] = (runner){"cpu", level[l].name, apa_test_level_context(&level[l], 1)};
    runners[count++] = (runner){"reference", "-", apa_test_level_context(&level[0], 1)};
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < count; i++)
        apa_context_destroy(runners[i].context);
    return 0;
}

/* Methods; the first is exact. */
static const char *const method[][2] = {
    {"exact", ""}, {"apa", "eps=0.05"}, {"apa", "eps=0.005 second_look=off"}, {"cold", ""}};
#define METHODS 4

/* Everything below runs for every runner r and method m. */
#define FOR_ALL(r, m)                                                                                                  \
    for (int r = 0; r < count; r++)                                                                                    \
        for (int m = 0; m < METHODS; m++)

static void attend(int r, int m, apa_test_problem *t)
{
    const apa_recipe recipe = apa_test_recipe(method[m][0], method[m][1]);
    apa_test_fill(&t->problem.out, 123.0);
    apa_test_fill(&t->problem.lse, 123.0);
    apa_test_attend(runners[r].context, runners[r].engine, t, &recipe, NULL, NULL);
}

static apa_test_problem *make(apa_test_shape shape)
{
    return apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 77);
}

static double out_at(const apa_test_problem *t, int64_t h, int64_t s, int64_t c)
{
    return apa_test_get(&t->problem.out, 0, h, s, c);
}

static double lse_at(const apa_test_problem *t, int64_t h, int64_t s)
{
    return apa_test_get(&t->problem.lse, 0, h, s, 0);
}

static void assert_empty_row(int r, int m, const apa_test_problem *t, int64_t h, int64_t s)
{
    if (lse_at(t, h, s) != -INFINITY)
        fail_msg("%s %s %s: row %d sees nothing, lse %g", runners[r].engine, runners[r].level, method[m][0], (int)s,
                 lse_at(t, h, s));
    for (int64_t c = 0; c < t->shape.Dv; c++)
        assert_true(out_at(t, h, s, c) == 0.0);
}

/* 1. A row that sees no key: O = 0, LSE = -inf, next to rows that see some; and no keys at all. */
static void empty_rows(void **state)
{
    (void)state;
    FOR_ALL(r, m)
    {
        apa_test_problem *t = make((apa_test_shape){1, 4, 2, 100, 150, 24, 16});
        t->problem.causal = 1;
        t->problem.q_offset = -41; /* rows 0 … 40 see nothing */
        attend(r, m, t);
        for (int64_t h = 0; h < 4; h++)
            for (int64_t s = 0; s < 100; s++)
                if (s <= 40)
                    assert_empty_row(r, m, t, h, s);
                else
                    assert_true(isfinite(lse_at(t, h, s)) && isfinite(out_at(t, h, s, 3)));
        /* A window beyond the last key; one before the first. */
        for (int side = 0; side < 2; side++) {
            t->problem.causal = 0;
            t->problem.q_offset = side == 0 ? 400 : -400;
            t->problem.window_left = t->problem.window_right = 100;
            attend(r, m, t);
            for (int64_t s = 0; s < 100; s++)
                assert_empty_row(r, m, t, 1, s);
        }
        apa_test_free(t);
        t = make((apa_test_shape){1, 2, 1, 20, 0, 8, 8});
        attend(r, m, t);
        for (int64_t s = 0; s < 20; s++)
            assert_empty_row(r, m, t, 0, s);
        apa_test_free(t);
    }
}

/* Keys with a score of -inf weigh nothing, alone in a tile too; a row of them only has no mass. */
static void minus_infinity(void **state)
{
    (void)state;
    FOR_ALL(r, m)
    {
        apa_test_problem *t = make((apa_test_shape){1, 1, 1, 20, 200, 8, 8});
        double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
        apa_test_fill(&t->problem.q, 1.0);
        for (int64_t j = 0; j < 200; j++)
            if (j < TILE || j % 3 == 0)
                for (int64_t d = 0; d < 8; d++)
                    apa_test_set(&t->problem.k, 0, 0, j, d, -INFINITY);
        t->problem.causal = 1;
        t->problem.q_offset = 55; /* the first rows see tile 0 alone */
        apa_test_fast_oracle(&t->problem, out, lse);
        attend(r, m, t);
        const double error = apa_test_rel_l2(&t->problem.out, out),
                     lse_error = apa_test_lse_error(&t->problem.lse, lse);
        if (!(error < 0.02) || !(lse_error < 0.01))
            fail_msg("%s %s %s: %g, %g", runners[r].engine, runners[r].level, method[m][0], error, lse_error);
        assert_empty_row(r, m, t, 0, 0);
        free(out);
        free(lse);
        apa_test_free(t);
    }
}

/* ---- 2. what is not finite ---- */

/* Puts a value into K or V of the keys that only some rows, or none, see. */
static void poison(apa_test_problem *t, int which, int64_t key, double value)
{
    const apa_tensor *x = which == 0 ? &t->problem.k : &t->problem.v;
    for (int64_t d = 0; d < x->shape[3]; d += which == 0 ? 3 : 2)
        apa_test_set(x, 0, 0, key, d, value);
}

/* Invisible keys, in the same tile as visible ones, change no bit in exact, and in no method touch a row. */
static void invisible_keys(void **state)
{
    (void)state;
    static const double value[] = {NAN, INFINITY, -INFINITY, 3e38};
    FOR_ALL(r, m)
    {
        /* A finite key counts in K's mean, seen or not. Where tiles may be hot a row then goes to the exact pass; the
         * method that may not is left without. */
        const int values = m == 3 || (m > 0 && strcmp(runners[r].engine, "reference") == 0) ? 3 : 4;
        for (int masks = 0; masks < 3; masks++) {
            apa_test_problem *t = make((apa_test_shape){1, 2, 1, 30, 300, 16, 16});
            apa_test_outputs clean;
            double *before = apa_test_doubles(&t->problem.out);
            /* causal: keys from 170 on unseen; windows: keys under 100 and from 150 on unseen (row 29: 129 … 149) */
            t->problem.causal = masks == 0;
            t->problem.q_offset = masks == 0 ? 140 : 120;
            t->problem.window_left = masks == 1 ? 20 : -1;
            t->problem.window_right = masks == 1 ? 0 : masks == 2 ? 5 : -1;
            attend(r, m, t);
            clean = apa_test_keep(t);
            for (int64_t i = 0; i < 2 * 30 * 16; i++)
                before[i] = ((float *)t->problem.out.data)[i];
            for (int v = 0; v < values; v++)
                for (int which = 0; which < 2; which++) {
                    static const int64_t key[] = {170, 175, 190, 191, 192, 299};
                    for (int k = 0; k < 6; k++)
                        poison(t, which, key[k], value[(v + k) % values]);
                    if (masks == 1)
                        poison(t, which, 64 + 31, value[v]); /* beside key 100 in tile 1 */
                }
            attend(r, m, t);
            if (m == 0 && apa_test_differs(t, &clean))
                fail_msg("%s %s exact, masks %d: an invisible key changed bits", runners[r].engine, runners[r].level,
                         masks);
            const double distance = apa_test_rel_l2(&t->problem.out, before);
            /* Verdicts and the mean of K may change, accuracy may not. */
            if (!(distance < 0.03))
                fail_msg("%s %s %s, masks %d: invisible keys moved the output by %g", runners[r].engine,
                         runners[r].level, method[m][0], masks, distance);
            for (int64_t i = 0; i < 2 * 30 * 16; i++)
                assert_true(isfinite(((float *)t->problem.out.data)[i]));
            apa_test_drop(&clean);
            free(before);
            apa_test_free(t);
        }
    }
}

/* A NaN that a row can see reaches it, and only it: rows before see nothing of it. */
static void visible_nan(void **state)
{
    (void)state;
    FOR_ALL(r, m)
    {
        for (int which = 0; which < 3; which++) {
            apa_test_problem *t = make((apa_test_shape){1, 2, 1, 200, 200, 16, 16});
            t->problem.causal = 1;
            if (which < 2)
                poison(t, which, 100, NAN);
            else
                apa_test_set(&t->problem.q, 0, 1, 100, 5, NAN);
            attend(r, m, t);
            for (int64_t h = 0; h < 2; h++)
                for (int64_t s = 0; s < 200; s++) {
                    const bool sees = which < 2 ? s >= 100 : s == 100 && h == 1;
                    for (int64_t c = 0; c < 16; c++)
                        if (isnan(out_at(t, h, s, c)) != (sees && (which != 1 || c % 2 == 0)))
                            fail_msg("%s %s %s, NaN in %c: row %d, channel %d is %g", runners[r].engine,
                                     runners[r].level, method[m][0], "kvq"[which], (int)s, (int)c, out_at(t, h, s, c));
                    assert_int_equal(isnan(lse_at(t, h, s)), sees && which != 1);
                }
            apa_test_free(t);
        }
    }
}

/* An infinite value of V comes through where it is seen, with its sign. */
static void visible_infinity(void **state)
{
    (void)state;
    FOR_ALL(r, m)
    {
        apa_test_problem *t = make((apa_test_shape){1, 1, 1, 90, 90, 8, 8});
        t->problem.causal = 1;
        apa_test_set(&t->problem.v, 0, 0, 70, 2, -INFINITY);
        attend(r, m, t);
        for (int64_t s = 0; s < 90; s++) {
            assert_true(s < 70 ? isfinite(out_at(t, 0, s, 2)) : out_at(t, 0, s, 2) == -INFINITY);
            assert_true(isfinite(out_at(t, 0, s, 3)) && isfinite(lse_at(t, 0, s)));
        }
        apa_test_free(t);
    }
}

/* ---- 3. range ---- */

/* Scores far beyond what a float can take a step of one in (f16 inputs reach 2.7e11 at D 64): equal ones still weigh
 * the same, and none of the frame's roundings may turn into a power of two. */
static void equal_huge_scores(void **state)
{
    (void)state;
    static const double size[] = {2e4, 65504.0};
    FOR_ALL(r, m)
    for (int i = 0; i < 2; i++) {
        apa_test_problem *t = make((apa_test_shape){1, 1, 1, 10, 100, 64, 8});
        t->problem.softmax_scale = 0.125;
        for (int64_t d = 0; d < 64; d++) {
            for (int64_t s = 0; s < 10; s++)
                apa_test_set(&t->problem.q, 0, 0, s, d, size[i]);
            for (int64_t j = 0; j < 100; j++)
                apa_test_set(&t->problem.k, 0, 0, j, d, size[i]);
        }
        for (int64_t j = 0; j < 100; j++)
            for (int64_t c = 0; c < 8; c++)
                apa_test_set(&t->problem.v, 0, 0, j, c, 1.0);
        attend(r, m, t);
        for (int64_t s = 0; s < 10; s++) {
            const double lse = size[i] * size[i] * 64 * t->problem.softmax_scale;
            if (!(fabs(lse_at(t, 0, s) / lse - 1) <= (m == 3 ? 0.02 : 1e-6)))
                fail_msg("%s %s %s: LSE %g, expected %g", runners[r].engine, runners[r].level, method[m][0],
                         lse_at(t, 0, s), lse);
            for (int64_t c = 0; c < 8; c++)
                if (!(fabs(out_at(t, 0, s, c) - 1) <= 1e-5))
                    fail_msg("%s %s %s, scores of %g: out %g", runners[r].engine, runners[r].level, method[m][0],
                             size[i] * size[i] * 64, out_at(t, 0, s, c));
        }
        apa_test_free(t);
    }
}

/* Logits of ±2.5e5, one key far above the rest of the row: the output is its value, the LSE its logit. */
static void large_logits(void **state)
{
    (void)state;
    FOR_ALL(r, m)
    {
        apa_test_problem *t = make((apa_test_shape){1, 2, 1, 50, 300, 16, 16});
        t->problem.softmax_scale = 1.0;
        for (int64_t h = 0; h < 2; h++)
            for (int64_t s = 0; s < 50; s++)
                for (int64_t d = 0; d < 16; d++)
                    apa_test_set(&t->problem.q, 0, h, s, d, d == 0 ? (h == 0 ? 500 : -500) : 0);
        for (int64_t j = 0; j < 300; j++)
            for (int64_t d = 0; d < 16; d++)
                apa_test_set(&t->problem.k, 0, 0, j, d,
                             d == 0 ? (j == 37    ? 500
                                       : j == 211 ? -500
                                                  : (double)(j % 7) - 3)
                                    : 0);
        attend(r, m, t);
        for (int64_t h = 0; h < 2; h++)
            for (int64_t s = 0; s < 50; s++) {
                const double tolerance = m == 3 ? 0.02 : 1e-6; /* cold: the winner's INT8 score and value */
                if (!(fabs(lse_at(t, h, s) - 2.5e5) <= tolerance * 2.5e5))
                    fail_msg("%s %s %s: LSE %g", runners[r].engine, runners[r].level, method[m][0], lse_at(t, h, s));
                for (int64_t c = 0; c < 16; c++) {
                    const double truth = apa_test_get(&t->problem.v, 0, 0, h == 0 ? 37 : 211, c);
                    if (!(fabs(out_at(t, h, s, c) - truth) <= (m == 3 ? 0.03 : 1e-6)))
                        fail_msg("%s %s %s: out %g, expected %g", runners[r].engine, runners[r].level, method[m][0],
                                 out_at(t, h, s, c), truth);
                }
            }
        apa_test_free(t);
    }
}

/* Random logits of that size: nothing but numbers, and within what f32 scores can give of the truth. */
static void large_random_logits(void **state)
{
    (void)state;
    for (int r = 0; r < count; r++)
        for (int m = 0; m < 2; m++) {
            apa_test_problem *t = make((apa_test_shape){1, 2, 1, 60, 400, 64, 16});
            double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
            t->problem.softmax_scale = 1e4; /* N(0, 8e4²) */
            t->problem.causal = 1;
            apa_test_fast_oracle(&t->problem, out, lse);
            attend(r, m, t);
            const double error = apa_test_rel_l2(&t->problem.out, out),
                         lse_error = apa_test_lse_error(&t->problem.lse, lse);
            if (!(error < 1e-4) || !(lse_error < 2e-6))
                fail_msg("%s %s %s: %g, %g", runners[r].engine, runners[r].level, method[m][0], error, lse_error);
            free(out);
            free(lse);
            apa_test_free(t);
        }
}

/* Queries near the end of f32, whose rotation overflows, on keys near its start: logits are N(0, 5²) and no NaN comes
 * out. */
static void large_queries(void **state)
{
    (void)state;
    for (int r = 0; r < count; r++)
        for (int m = 0; m < 3; m++) {
            apa_test_problem *t = make((apa_test_shape){1, 2, 1, 40, 2000, 16, 16});
            double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
            apa_test_fill(&t->problem.q, 1e38);
            for (int64_t j = 0; j < 2000; j++)
                for (int64_t d = 0; d < 16; d++)
                    apa_test_set(&t->problem.k, 0, 0, j, d, 5e-38 * apa_test_get(&t->problem.k, 0, 0, j, d));
            t->problem.causal = 1;
            apa_test_fast_oracle(&t->problem, out, lse);
            attend(r, m, t);
            const double error = apa_test_rel_l2(&t->problem.out, out),
                         lse_error = apa_test_lse_error(&t->problem.lse, lse);
            if (!(error < 1e-5) || !(lse_error < 1e-5))
                fail_msg("%s %s %s: %g, %g", runners[r].engine, runners[r].level, method[m][0], error, lse_error);
            free(out);
            free(lse);
            apa_test_free(t);
        }
}

/* Blocks of zeros and of subnormals: scale 0, codes 0, no NaN. */
static void zeros(void **state)
{
    (void)state;
    static const double value[] = {0.0, -0.0, 0x1p-149, 0x1p-126};
    FOR_ALL(r, m)
    {
        for (int v = 0; v < 4; v++)
            for (int which = 0; which < 3; which++) {
                apa_test_problem *t = make((apa_test_shape){1, 2, 1, 40, 200, 16, 16});
                t->problem.causal = 1;
                apa_test_fill(which == 0 ? &t->problem.q : which == 1 ? &t->problem.k : &t->problem.v, value[v]);
                attend(r, m, t);
                for (int64_t s = 0; s < 40; s++) {
                    for (int64_t c = 0; c < 16; c++)
                        assert_true(which == 2 ? fabs(out_at(t, 1, s, c)) <= 0x1.01p-126
                                               : isfinite(out_at(t, 1, s, c)));
                    /* q or k nothing: equal weights */
                    assert_true(which == 2 || fabs(lse_at(t, 1, s) - log((double)(s + 161))) <= 1e-5);
                }
                apa_test_free(t);
            }
    }
}

/* ---- 6. magnitude, LSE, order ---- */

/* V = 1 gives 1: the sum is of the probabilities that were multiplied. */
static void ones(void **state)
{
    (void)state;
    double worst = 0;
    FOR_ALL(r, m)
    {
        apa_test_problem *t = make((apa_test_shape){1, 4, 2, 150, 900, 64, 24});
        t->problem.causal = 1;
        apa_test_fill(&t->problem.v, 1.0);
        attend(r, m, t);
        for (int64_t h = 0; h < 4; h++)
            for (int64_t s = 0; s < 150; s++)
                for (int64_t c = 0; c < 24; c++) {
                    const double error = fabs(out_at(t, h, s, c) - 1.0);
                    /* every product p·1 and every sum of them is made as ℓ is, but in another order */
                    if (!(error <= 8 * 0x1p-23))
                        fail_msg("%s %s %s: %.9g", runners[r].engine, runners[r].level, method[m][0],
                                 out_at(t, h, s, c));
                    worst = fmax(worst, error);
                }
        apa_test_free(t);
    }
    printf("# V = 1: worst %.2f of 2^-23\n", worst * 0x1p23);
}

/* Equal keys: LSE = logit + log n. */
static void equal_keys(void **state)
{
    (void)state;
    FOR_ALL(r, m)
    {
        apa_test_problem *t = make((apa_test_shape){1, 2, 1, 30, 777, 16, 8});
        for (int64_t j = 1; j < 777; j++)
            for (int64_t d = 0; d < 16; d++)
                apa_test_set(&t->problem.k, 0, 0, j, d, apa_test_get(&t->problem.k, 0, 0, 0, d));
        t->problem.causal = 1;
        attend(r, m, t);
        for (int64_t h = 0; h < 2; h++)
            for (int64_t s = 0; s < 30; s++) {
                double logit = 0;
                for (int64_t d = 0; d < 16; d++)
                    logit += apa_test_get(&t->problem.q, 0, h, s, d) * apa_test_get(&t->problem.k, 0, 0, 0, d) / 4;
                const double truth = logit + log((double)(777 - 30 + s + 1));
                /* smoothing leaves keys of 0, so cold is as exact as exact */
                if (!(fabs(lse_at(t, h, s) - truth) <= 4e-6 * fmax(1, fabs(truth))))
                    fail_msg("%s %s %s: LSE %.9g, expected %.9g", runners[r].engine, runners[r].level, method[m][0],
                             lse_at(t, h, s), truth);
            }
        apa_test_free(t);
    }
}

/* V = identity: channel c is the weight of key c, and no other. */
static void column_order(void **state)
{
    (void)state;
    FOR_ALL(r, m)
    {
        enum { n = 136 }; /* two tiles and a part of one; channels in blocks of 8 */
        apa_test_problem *t = make((apa_test_shape){1, 2, 1, 40, n, 32, n});
        apa_test_fill(&t->problem.v, 0.0);
        for (int64_t j = 0; j < n; j++)
            apa_test_set(&t->problem.v, 0, 0, j, j, 1.0);
        attend(r, m, t);
        for (int64_t h = 0; h < 2; h++)
            for (int64_t s = 0; s < 40; s++)
                for (int64_t j = 0; j < n; j++) {
                    double logit = 0;
                    for (int64_t d = 0; d < 32; d++)
                        logit += apa_test_get(&t->problem.q, 0, h, s, d) * apa_test_get(&t->problem.k, 0, 0, j, d) /
                                 sqrt(32);
                    const double truth = exp(logit - lse_at(t, h, s)), error = fabs(out_at(t, h, s, j) - truth);
                    if (!(error <= (m == 0 ? 2e-6 : 0.03)))
                        fail_msg("%s %s %s: key %d weighs %g, expected %g", runners[r].engine, runners[r].level,
                                 method[m][0], (int)j, out_at(t, h, s, j), truth);
                }
        apa_test_free(t);
    }
}

/* ---- 5. offsets of 64 bits ---- */

/* Rows, heads and batches lie gigabytes apart in memory that is reserved, not used. */
static void huge_strides(void **state)
{
    (void)state;
    enum { B = 2, Hq = 4, Hkv = 2, Sq = 5, Skv = 70, D = 16 };
    const int64_t row = ((int64_t)1 << 25) + 64, head = row * 80, batch = head * 5; /* 2^25·80·5·2 = 2^34.6 elements */
    const size_t bytes = (size_t)(batch * B) * sizeof(float);
    float *memory[5];
    apa_test_problem *t =
        apa_test_make((apa_test_shape){B, Hq, Hkv, Sq, Skv, D, D}, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 12);
    t->problem.causal = 1;
    for (int i = 0; i < 5; i++) {
        memory[i] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory[i] == MAP_FAILED) {
            printf("# huge strides skipped: %zu bytes of address space not to be had\n", bytes);
            for (int j = 0; j < i; j++)
                munmap(memory[j], bytes);
            apa_test_free(t);
            skip();
        }
    }
    apa_problem far = t->problem;
    apa_tensor *tensor[5] = {&far.q, &far.k, &far.v, &far.out, &far.lse};
    const apa_tensor *near[5] = {&t->problem.q, &t->problem.k, &t->problem.v, &t->problem.out, &t->problem.lse};
    for (int i = 0; i < 5; i++) {
        tensor[i]->data = memory[i];
        tensor[i]->stride[0] = batch;
        tensor[i]->stride[1] = head;
        tensor[i]->stride[2] = row;
        for (int64_t b = 0; b < near[i]->shape[0] && i < 3; b++)
            for (int64_t h = 0; h < near[i]->shape[1]; h++)
                for (int64_t s = 0; s < near[i]->shape[2]; s++)
                    for (int64_t d = 0; d < near[i]->shape[3]; d++)
                        apa_test_set(tensor[i], b, h, s, d, apa_test_get(near[i], b, h, s, d));
    }
    FOR_ALL(r, m)
    {
        const apa_recipe recipe = apa_test_recipe(method[m][0], method[m][1]);
        apa_attention_options options;
        apa_attention_options_init(&options);
        options.engine = runners[r].engine;
        attend(r, m, t);
        if (apa_attention(runners[r].context, &far, &recipe, &options, NULL) != APA_STATUS_OK)
            fail_msg("%s", apa_context_message(runners[r].context));
        for (int i = 3; i < 5; i++)
            for (int64_t b = 0; b < B; b++)
                for (int64_t h = 0; h < Hq; h++)
                    for (int64_t s = 0; s < Sq; s++)
                        for (int64_t d = 0; d < near[i]->shape[3]; d++)
                            assert_true(apa_test_get(tensor[i], b, h, s, d) == apa_test_get(near[i], b, h, s, d));
    }
    for (int i = 0; i < 5; i++)
        munmap(memory[i], bytes);
    apa_test_free(t);
}

/* ---- 7. determinism ---- */

static void reruns(void **state)
{
    (void)state;
    FOR_ALL(r, m)
    {
        apa_test_problem *t = make((apa_test_shape){1, 6, 2, 100, 700, 64, 64});
        t->problem.causal = 1;
        attend(r, m, t);
        apa_test_outputs first = apa_test_keep(t);
        for (int i = 0; i < 3; i++) {
            attend(r, m, t);
            assert_false(apa_test_differs(t, &first));
        }
        apa_test_drop(&first);
        apa_test_free(t);
    }
}

/* GQA that does not divide is an error, not a rounding. */
static void heads_that_do_not_divide(void **state)
{
    (void)state;
    for (int r = 0; r < count; r++) {
        apa_test_problem *t = make((apa_test_shape){1, 6, 2, 4, 4, 8, 8});
        apa_attention_options options;
        apa_attention_options_init(&options);
        options.engine = runners[r].engine;
        t->problem.q.shape[1] = t->problem.out.shape[1] = t->problem.lse.shape[1] = 5;
        apa_test_fill(&t->problem.out, 123.0);
        assert_int_equal(apa_attention(runners[r].context, &t->problem, NULL, &options, NULL),
                         APA_STATUS_INVALID_ARGUMENT);
        assert_non_null(strstr(apa_context_message(runners[r].context), "heads"));
        assert_true(out_at(t, 0, 0, 0) == 123.0);
        apa_test_free(t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(empty_rows),
        cmocka_unit_test(minus_infinity),
        cmocka_unit_test(invisible_keys),
        cmocka_unit_test(visible_nan),
        cmocka_unit_test(visible_infinity),
        cmocka_unit_test(large_logits),
        cmocka_unit_test(equal_huge_scores),
        cmocka_unit_test(large_random_logits),
        cmocka_unit_test(large_queries),
        cmocka_unit_test(zeros),
        cmocka_unit_test(ones),
        cmocka_unit_test(equal_keys),
        cmocka_unit_test(column_order),
        cmocka_unit_test(huge_strides),
        cmocka_unit_test(reruns),
        cmocka_unit_test(heads_that_do_not_divide),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
