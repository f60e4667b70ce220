/* The CPU engine on calls that change scores - softcap, ALiBi, masks, sinks - at every ISA level, against double; and
 * what hidden keys, sentinels and empty rows must come to. */
#include "support/test.h"

#include "support/attend.h"
#include "support/levels.h"
#include "support/scores_oracle.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LSE_BOUND 1e-5  /* of max(1, |lse|) */
#define COLD_BOUND 0.03 /* relative L2, and of LSE */
#define CASES 160

static apa_test_level level[APA_TEST_LEVELS_MAX];
static apa_context *contexts[APA_TEST_LEVELS_MAX];
static int levels;
static double worst_exact, worst_lse, worst_cold, worst_apa;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    levels = apa_test_levels(level);
    for (int l = 0; l < levels; l++)
        contexts[l] = apa_test_level_context(&level[l], 1);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        apa_context_destroy(contexts[l]);
    printf("# exact: error over its bound %.3g, LSE %.3g; relative L2 of cold %.3g, of apa %.3g\n", worst_exact,
           worst_lse, worst_cold, worst_apa);
    return 0;
}

/* ---- cases ---- */

/* A problem with the memory of what it adds. */
typedef struct scored {
    apa_test_problem *t;
    void *memory[4];
    int n;
    char text[160];
} scored;

static void *keep(scored *s, size_t bytes)
{
    s->memory[s->n] = malloc(bytes + 1);
    assert_non_null(s->memory[s->n]);
    return s->memory[s->n++];
}

static void drop(scored *s)
{
    for (int i = 0; i < s->n; i++)
        free(s->memory[i]);
    apa_test_free(s->t);
}

/* A mask of a dtype over the axes whose bit is set in `axes` (batch, head, row, key); rows a little apart. */
static void add_mask(scored *s, apa_dtype dtype, int axes)
{
    const apa_test_shape *x = &s->t->shape;
    const int64_t full[4] = {x->B, x->Hq, x->Sq, x->Skv};
    apa_tensor mask = {.dtype = dtype, .stride = {0, 0, 0, 1}};
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; axis--) {
        mask.shape[axis] = (axes >> axis & 1) != 0 ? full[axis] : 1;
        mask.stride[axis] = stride;
        stride *= mask.shape[axis] + (axis == 3 ? 3 : 0);
    }
    const size_t bytes = (size_t)stride * apa_dtype_bytes(dtype);
    mask.data = keep(s, bytes);
    memset(mask.data, 0xFF, bytes); /* gaps: NaN, true */
    s->t->problem.attn_mask = mask;
}

/* kind 0: random values and a tenth of the keys hidden; 1: random walls of 50 … 200 keys; 2: all open but a few tiles;
 * 3: everything hidden. */
static void fill_mask(scored *s, apa_test_rng *rng, int kind)
{
    const apa_tensor *m = &s->t->problem.attn_mask;
    for (int64_t b = 0; b < m->shape[0]; b++)
        for (int64_t h = 0; h < m->shape[1]; h++)
            for (int64_t i = 0; i < m->shape[2]; i++) {
                bool open = apa_test_uniform(rng) < 0.5;
                int64_t left = 0;
                for (int64_t j = 0; j < m->shape[3]; j++) {
                    if (left-- <= 0) {
                        left = 50 + apa_test_below(rng, 150);
                        open = !open;
                    }
                    const bool hidden = kind == 0   ? apa_test_uniform(rng) < 0.1
                                        : kind == 1 ? !open
                                        : kind == 2 ? j / 64 % 3 == 1 && j % 5 == 0
                                                    : true;
                    double value = kind == 0 ? apa_test_normal(rng) : 0.0;
                    if (m->dtype == APA_DTYPE_BOOL)
                        ((uint8_t *)m->data)[b * m->stride[0] + h * m->stride[1] + i * m->stride[2] + j] =
                            (uint8_t)(hidden ? 0 : 1 + apa_test_below(rng, 255));
                    else
                        apa_test_set(m, b, h, i, j, hidden ? -INFINITY : value);
                }
            }
}

static apa_tensor per_head(scored *s, int64_t B, apa_test_rng *rng, double centre, double spread)
{
    const int64_t Hq = s->t->shape.Hq;
    float *value = keep(s, sizeof(float) * (size_t)(B * Hq));
    for (int64_t i = 0; i < B * Hq; i++)
        value[i] = (float)(centre + spread * apa_test_normal(rng));
    return apa_tensor_hnd(value, APA_DTYPE_F32, B, Hq, 1, 1);
}

static scored draw(apa_test_rng *rng, int number)
{
    static const apa_dtype mask_dtype[] = {APA_DTYPE_BOOL, APA_DTYPE_F16, APA_DTYPE_BF16, APA_DTYPE_F32};
    static const int64_t heads[][2] = {{1, 1}, {3, 1}, {4, 2}, {6, 3}};
    static const int64_t dims[] = {8, 16, 20, 64, 128};
    const int h = (int)apa_test_below(rng, 4);
    apa_test_shape shape = {1 + apa_test_below(rng, 2),
                            heads[h][0],
                            heads[h][1],
                            1 + apa_test_below(rng, number % 3 == 0 ? 5 : 60),
                            apa_test_below(rng, number % 4 == 0 ? 3000 : 400),
                            dims[apa_test_below(rng, 5)],
                            dims[apa_test_below(rng, 5)]};
    scored s = {
        .t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, (apa_test_layout)(number % 3), apa_test_bits(rng))};
    apa_problem *p = &s.t->problem;
    const int what = 1 + (int)apa_test_below(rng, 31);
    p->causal = (int32_t)apa_test_below(rng, 3);
    if (apa_test_below(rng, 3) == 0) {
        p->window_left = apa_test_below(rng, 200);
        p->window_right = apa_test_below(rng, 100) - 1;
    }
    int axes = 0, kind = 0;
    apa_dtype dtype = APA_DTYPE_NONE;
    if ((what & 1) != 0) {
        axes = (int)apa_test_below(rng, 16);
        kind = (int)apa_test_below(rng, 8);
        kind = kind == 7 ? 3 : kind % 3;
        dtype = mask_dtype[apa_test_below(rng, 4)];
        add_mask(&s, dtype, axes);
        fill_mask(&s, rng, kind);
        if (dtype != APA_DTYPE_BOOL && apa_test_below(rng, 3) == 0)
            p->mask_slopes = per_head(&s, 1, rng, 1.0, 0.3);
    }
    if ((what & 2) != 0)
        p->softcap = 0.5 + 30 * apa_test_uniform(rng);
    if ((what & 4) != 0)
        p->alibi_slopes = per_head(&s, apa_test_below(rng, 2) == 0 ? 1 : shape.B, rng, 0.05, 0.1);
    if ((what & 8) != 0)
        p->sinks = per_head(&s, 1, rng, 1.0, 2.0);
    if ((what & 16) != 0)
        p->softmax_scale = apa_test_normal(rng) * 0.5;
    snprintf(s.text, sizeof s.text,
             "case %d: B %d Hq %d Hkv %d Sq %d Skv %d D %d Dv %d causal %d mask %s axes %x kind %d cap %g what %x",
             number, (int)shape.B, (int)shape.Hq, (int)shape.Hkv, (int)shape.Sq, (int)shape.Skv, (int)shape.D,
             (int)shape.Dv, p->causal, apa_dtype_name(dtype), (unsigned)axes, kind, p->softcap, (unsigned)what);
    return s;
}

/* ---- against double ---- */

static void run(scored *s, int l, const char *preset, const char *settings, apa_statistics *statistics)
{
    const apa_recipe recipe = apa_test_recipe(preset, settings);
    apa_test_fill(&s->t->problem.out, NAN);
    apa_test_fill(&s->t->problem.lse, NAN);
    apa_test_attend(contexts[l], "cpu", s->t, &recipe, NULL, statistics);
}

static void compare(const scored *s, int l, const char *method, const double *out, const double *lse, double bound,
                    double lse_bound, double *worst)
{
    const double error = apa_test_rel_l2(&s->t->problem.out, out),
                 lse_error = apa_test_lse_error(&s->t->problem.lse, lse);
    if (!(error <= bound) || !(lse_error <= lse_bound))
        fail_msg("%s %s, %s: out %g (%g allowed), lse %g (%g)", level[l].name, method, s->text, error, bound, lse_error,
                 lse_bound);
    *worst = fmax(*worst, error);
    if (lse_bound == LSE_BOUND)
        worst_lse = fmax(worst_lse, lse_error);
}

/* A logit is off by a few units in its last place, and so is its weight. */
static double exact_bound(double largest)
{
    return 3e-6 + 4 * 0x1p-23 * largest;
}

static void random_cases(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 77};
    for (int number = 0; number < CASES; number++) {
        scored s = draw(&rng, number);
        double *out = apa_test_doubles(&s.t->problem.out), *lse = apa_test_doubles(&s.t->problem.lse), largest;
        apa_test_scores_oracle(&s.t->problem, out, lse, &largest);
        for (int l = 0; l < levels; l++) {
            if (l == 0 && number % 4 == 0)
                continue; /* scalar is slow; the long ones are left to the others */
            apa_statistics statistics, hot;
            double worst = 0;
            run(&s, l, "exact", "", &statistics);
            compare(&s, l, "exact", out, lse, exact_bound(largest), LSE_BOUND, &worst);
            worst_exact = fmax(worst_exact, worst / exact_bound(largest));
            run(&s, l, "apa", "eps=-1", &hot);
            compare(&s, l, "apa eps=-1", out, lse, 2 * exact_bound(largest), LSE_BOUND, &worst);
            assert_int_equal(hot.visible, statistics.visible);
            assert_int_equal(hot.hot, hot.visible);
            /* An INT8 score is off by some hundredths of the size of its factors, and a row may see one key. */
            const double cold = COLD_BOUND + 0.02 * largest;
            run(&s, l, "cold", "", &hot);
            compare(&s, l, "cold", out, lse, cold, cold, &worst_cold);
            assert_int_equal(hot.visible, statistics.visible);
            run(&s, l, "apa", "", &hot);
            compare(&s, l, "apa", out, lse, cold, cold, &worst_apa);
        }
        free(out);
        free(lse);
        drop(&s);
    }
}

/* ---- hidden keys ---- */

static void must_run(apa_context *context, const apa_problem *p, const char *preset, const char *settings)
{
    apa_attention_options options;
    const apa_recipe recipe = apa_test_recipe(preset, settings);
    apa_attention_options_init(&options);
    options.engine = "cpu";
    if (apa_attention(context, p, &recipe, &options, NULL) != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
}

static void set_mask(const apa_tensor *mask, int64_t i, int64_t j, bool hidden)
{
    if (mask->dtype == APA_DTYPE_BOOL)
        ((uint8_t *)mask->data)[i * mask->stride[2] + j] = !hidden;
    else
        apa_test_set(mask, 0, 0, i, j, hidden ? -INFINITY : 0.0);
}

/* Keys 10 … 19 and 130 are hidden from even rows: a NaN or Inf there reaches odd rows alone, and in exact changes no
 * bit of the even ones. */
static void hidden_keys(void **state)
{
    (void)state;
    static const apa_dtype dtype[] = {APA_DTYPE_BOOL, APA_DTYPE_F16, APA_DTYPE_F32};
    static const double poison[] = {NAN, INFINITY, -INFINITY};
    static const char *const method[] = {"exact", "apa", "cold"};
    for (int run_number = 0; run_number < 3 * 3 * 3 * 2; run_number++) {
        const int m = run_number % 3, in_v = run_number / 27;
        const double bad = poison[run_number / 9 % 3];
        const apa_test_shape shape = {1, 4, 2, 33, 200, 16, 16};
        scored s = {.t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 21)};
        apa_problem *p = &s.t->problem;
        add_mask(&s, dtype[run_number / 3 % 3], 4 | 8);
        for (int64_t i = 0; i < shape.Sq; i++)
            for (int64_t j = 0; j < shape.Skv; j++)
                set_mask(&p->attn_mask, i, j, i % 2 == 0 && ((j >= 10 && j < 20) || j == 130));
        for (int l = 0; l < levels; l++) {
            const apa_tensor *target = in_v ? &p->v : &p->k;
            const double before = apa_test_get(target, 0, 0, 15, 3), later = apa_test_get(target, 0, 1, 130, 5);
            must_run(contexts[l], p, method[m], "");
            apa_test_outputs clean = apa_test_keep(s.t);
            apa_test_set(target, 0, 0, 15, 3, bad);
            apa_test_set(target, 0, 1, 130, 5, bad);
            must_run(contexts[l], p, method[m], "");
            for (int64_t h = 0; h < 4; h++)
                for (int64_t i = 0; i < shape.Sq; i++)
                    for (int64_t c = 0; c < 16; c++) {
                        const double x = apa_test_get(&p->out, 0, h, i, c);
                        if (i % 2 == 0)
                            assert_true(isfinite(x));
                        if (i % 2 != 0 && in_v && c == (h < 2 ? 3 : 5))
                            assert_false(isfinite(x));
                        if (i % 2 != 0 && !in_v && isnan(bad))
                            assert_true(isnan(x));
                        if (i % 2 == 0 && m == 0) {
                            const int64_t at = (const float *)p->out.data - (const float *)s.t->memory[3] +
                                               (h * shape.Sq + i) * 16 + c;
                            assert_memory_equal((float *)s.t->memory[3] + at, (float *)(void *)clean.out + at, 4);
                        }
                    }
            apa_test_set(target, 0, 0, 15, 3, before);
            apa_test_set(target, 0, 1, 130, 5, later);
            apa_test_drop(&clean);
        }
        drop(&s);
    }
}

/* Rows that see nothing: output 0, LSE -inf or their sink. Every way to hide everything. */
static void nothing_seen(void **state)
{
    (void)state;
    static const char *const method[] = {"exact", "apa", "cold"};
    for (int way = 0; way < 3 * 3 * 2; way++) {
        const apa_test_shape shape = {2, 4, 2, 20, 150, 16, 24};
        scored s = {.t = apa_test_make(shape, APA_DTYPE_F16, APA_DTYPE_F32, APA_TEST_HND, 5)};
        apa_test_rng rng = {3};
        add_mask(&s,
                 way % 3 == 0   ? APA_DTYPE_BOOL
                 : way % 3 == 1 ? APA_DTYPE_BF16
                                : APA_DTYPE_F32,
                 way % 2 == 0 ? 15 : 0);
        fill_mask(&s, &rng, 3);
        if (way >= 9)
            s.t->problem.sinks = per_head(&s, 1, &rng, 0.0, 3.0);
        for (int l = 0; l < levels; l++) {
            apa_statistics statistics;
            run(&s, l, method[way / 3 % 3], "", &statistics);
            assert_int_equal(statistics.visible, 0);
            for (int64_t b = 0; b < 2; b++)
                for (int64_t h = 0; h < 4; h++)
                    for (int64_t i = 0; i < 20; i++) {
                        const double expected = way >= 9 ? apa_test_get(&s.t->problem.sinks, 0, h, 0, 0) : -INFINITY;
                        assert_true(apa_test_get(&s.t->problem.lse, b, h, i, 0) == expected);
                        for (int64_t c = 0; c < 24; c++)
                            assert_true(apa_test_get(&s.t->problem.out, b, h, i, c) == 0.0);
                    }
        }
        drop(&s);
    }
}

/* Logits of -2.5e5 (and of the lowest number there is) throughout are logits like any other: by q·k, by a mask, with
 * leading tiles hidden. Powers of two and equal sums keep them exact, so equal keys weigh the same. */
static void no_sentinel(void **state)
{
    (void)state;
    static const char *const method[] = {"exact", "apa", "cold"};
    for (int way = 0; way < 4; way++)
        for (int m = 0; m < 3; m++) {
            const apa_test_shape shape = {1, 2, 1, 5, 300, 16, 16};
            scored s = {.t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 5)};
            apa_problem *p = &s.t->problem;
            const double logit = way == 2 ? -FLT_MAX : -2.5e5;
            p->softmax_scale = 1.0;
            apa_test_fill(&p->q, way == 0 ? -500.0 : 0.0);
            apa_test_fill(&p->k, 31.25); /* 16 · -500 · 31.25 */
            add_mask(&s, APA_DTYPE_F32, 12);
            for (int64_t i = 0; i < 5; i++)
                for (int64_t j = 0; j < 300; j++)
                    apa_test_set(&p->attn_mask, 0, 0, i, j, j < 130 ? -INFINITY : way == 0 ? 0.0 : logit);
            if (way == 3) /* one key over all the others: they weigh nothing */
                for (int64_t i = 0; i < 5; i++)
                    apa_test_set(&p->attn_mask, 0, 0, i, 200 + i, 1.0);
            double *out = apa_test_doubles(&p->out), *lse = apa_test_doubles(&p->lse);
            apa_test_scores_oracle(p, out, lse, NULL);
            for (int l = 0; l < levels; l++) {
                double worst = 0;
                run(&s, l, method[m], "", NULL);
                compare(&s, l, method[m], out, lse, m == 0 ? 2e-6 : 0.01, LSE_BOUND, &worst);
            }
            free(out);
            free(lse);
            drop(&s);
        }
}

/* ---- sinks ---- */

/* A sink divides the output and nothing else: no frame rises, so what it leaves has the accuracy that it had. */
static void sinks_divide(void **state)
{
    (void)state;
    static const double sink[] = {-20, 0, 9, 60, 200};
    for (int i = 0; i < 5; i++)
        for (int l = 0; l < levels; l++) {
            const apa_test_shape shape = {1, 4, 2, 40, 1500, 64, 64};
            scored s = {.t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 8)};
            apa_problem *p = &s.t->problem;
            float value[4];
            apa_statistics with, without;
            run(&s, l, "cold", "", &without);
            apa_test_outputs plain = apa_test_keep(s.t);
            for (int h = 0; h < 4; h++)
                value[h] = (float)sink[i] + 0.25f * (float)h;
            p->sinks = apa_tensor_hnd(value, APA_DTYPE_F32, 1, 4, 1, 1);
            run(&s, l, "cold", "", &with);
            const ptrdiff_t out_at = (const float *)p->out.data - (const float *)s.t->memory[3],
                            lse_at = (const float *)p->lse.data - (const float *)s.t->memory[4];
            for (int64_t row = 0; row < 4 * 40; row++) {
                const double lse = ((const float *)(void *)plain.lse)[lse_at + row], own = value[row / 40];
                const double share = 1 / (1 + exp(own - lse));
                const double joined = fmax(lse, own) + log1p(exp(-fabs(lse - own)));
                assert_true(fabs(((const float *)p->lse.data)[row] - joined) <= 1e-5 * fmax(1, fabs(joined)));
                for (int64_t c = 0; c < 64; c++) {
                    const double x = ((const float *)p->out.data)[row * 64 + c],
                                 y = ((const float *)(void *)plain.out)[out_at + row * 64 + c] * share;
                    if (!(fabs(x - y) <= 2e-5 * fabs(y) + 1e-44)) /* LSE itself is rounded to float */
                        fail_msg("sink %g: %g, expected %g", sink[i], x, y);
                }
            }
            /* Mass that the sink holds makes tiles small: none becomes hot by it. */
            p->sinks.dtype = APA_DTYPE_NONE;
            run(&s, l, "apa", "eps=0.05", &without);
            p->sinks.dtype = APA_DTYPE_F32;
            run(&s, l, "apa", "eps=0.05", &with);
            assert_true(with.hot <= without.hot);
            if (sink[i] >= 60)
                assert_int_equal(with.hot, 0);
            apa_test_drop(&plain);
            drop(&s);
        }
}

/* ---- the same bits ---- */

/* Rows one by one and all together, one thread and three: the same bits in exact, whatever changes the scores. */
static void same_bits(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 5};
    for (int number = 0; number < 12; number++) {
        const apa_test_shape shape = {1, 4, 2, 37, number % 2 == 0 ? 500 : 5000, 32, 24};
        scored s = {.t = apa_test_make(shape, APA_DTYPE_BF16, APA_DTYPE_F32, APA_TEST_HND, 6)};
        apa_problem *p = &s.t->problem;
        add_mask(&s, number % 3 == 0 ? APA_DTYPE_BOOL : number % 3 == 1 ? APA_DTYPE_F16 : APA_DTYPE_F32, 14);
        fill_mask(&s, &rng, number % 3);
        p->causal = 1;
        p->softcap = number % 4 < 2 ? 20.0 : 0.0;
        p->alibi_slopes = per_head(&s, 1, &rng, 0.02, 0.02);
        p->sinks = per_head(&s, 1, &rng, 0.5, 1.0);
        for (int l = 1; l < levels; l++) {
            must_run(contexts[l], p, "exact", "");
            apa_test_outputs whole = apa_test_keep(s.t);
            apa_context *threads = apa_test_level_context(&level[l], 3);
            apa_test_fill(&p->out, NAN);
            must_run(threads, p, "exact", "");
            assert_false(apa_test_differs(s.t, &whole));
            apa_test_fill(&p->out, NAN);
            apa_test_fill(&p->lse, NAN);
            for (int64_t i = 0; i < shape.Sq;) {
                const int64_t wanted = 1 + apa_test_below(&rng, 9);
                const int64_t rows = wanted > shape.Sq - i ? shape.Sq - i : wanted;
                apa_problem part = *p;
                apa_tensor *cut[] = {&part.q, &part.out, &part.lse, &part.attn_mask};
                for (int k = 0; k < 4; k++) {
                    cut[k]->data =
                        (char *)cut[k]->data + i * cut[k]->stride[2] * (int64_t)apa_dtype_bytes(cut[k]->dtype);
                    cut[k]->shape[2] = rows;
                }
                part.q_offset = shape.Skv - shape.Sq + i;
                must_run(threads, &part, "exact", "");
                i += rows;
            }
            assert_false(apa_test_differs(s.t, &whole));
            apa_test_drop(&whole);
            apa_context_destroy(threads);
        }
        drop(&s);
    }
}

/* ---- the reference engine ---- */

/* The same tiles are seen and the same ones are hot, whatever changes the scores; only shares within rounding of eps
 * may fall on either side. */
static void verdicts(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 9};
    int64_t pairs = 0, differ = 0, hot = 0;
    for (int number = 0; number < 8; number++) {
        const apa_test_shape shape = {1, 4, 2, number % 2 == 0 ? 32 : 3, 1000, 32, 16};
        const int64_t n = shape.Hq * shape.Sq * ((shape.Skv + 63) / 64);
        scored s = {.t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 12)};
        apa_problem *p = &s.t->problem;
        p->causal = 1;
        p->softmax_scale = 0.25; /* sharper rows than usual: some tiles hold more than others */
        if (number != 1) {
            add_mask(&s, number % 3 == 0 ? APA_DTYPE_BOOL : APA_DTYPE_F32, number < 4 ? 12 : 14);
            fill_mask(&s, &rng, number % 3);
        }
        if (number % 2 == 1)
            p->softcap = 12.0;
        if (number >= 4)
            p->alibi_slopes = per_head(&s, 1, &rng, 0.01, 0.005);
        if (number >= 2)
            p->sinks = per_head(&s, 1, &rng, 4.0, 1.0);
        const apa_recipe recipe = apa_test_recipe("apa", "eps=0.15");
        uint8_t *mine = malloc((size_t)n), *theirs = malloc((size_t)n);
        apa_test_attend(contexts[0], "reference", s.t, &recipe, theirs, NULL);
        double *out = apa_test_doubles(&p->out), *lse = apa_test_doubles(&p->lse);
        for (int64_t i = 0, h = 0; h < shape.Hq; h++)
            for (int64_t r = 0; r < shape.Sq; r++) {
                lse[h * shape.Sq + r] = apa_test_get(&p->lse, 0, h, r, 0);
                for (int64_t c = 0; c < shape.Dv; c++)
                    out[i++] = apa_test_get(&p->out, 0, h, r, c);
            }
        for (int l = 1; l < levels; l++) {
            double worst = 0;
            int64_t apart = 0;
            apa_test_attend(contexts[l], "cpu", s.t, &recipe, mine, NULL);
            for (int64_t i = 0; i < n; i++) {
                assert_int_equal(mine[i] == APA_VERDICT_INVISIBLE, theirs[i] == APA_VERDICT_INVISIBLE);
                apart += (mine[i] == APA_VERDICT_HOT) != (theirs[i] == APA_VERDICT_HOT);
                hot += mine[i] == APA_VERDICT_HOT;
                pairs += mine[i] != APA_VERDICT_INVISIBLE;
            }
            differ += apart;
            if (apart == 0)
                compare(&s, l, "apa against the reference engine", out, lse, 2e-3, 2e-3, &worst);
        }
        free(mine);
        free(theirs);
        free(out);
        free(lse);
        drop(&s);
    }
    printf("# verdicts: %lld of %lld pairs hot, %lld differ from the reference engine\n", (long long)hot,
           (long long)pairs, (long long)differ);
    assert_true(hot > pairs / 100 && hot < pairs / 2);
    assert_true(differ * 500 <= pairs);
}

/* ---- what is refused ---- */

static void refusals(void **state)
{
    (void)state;
    const apa_test_shape shape = {1, 2, 1, 4, 70, 16, 16};
    scored s = {.t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 5)};
    apa_test_rng rng = {3};
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "cpu";
    s.t->problem.sinks = per_head(&s, 1, &rng, 0, 1);
    apa_recipe recipe = apa_test_recipe("apa", "second_look=off");
    assert_int_equal(apa_attention(contexts[0], &s.t->problem, &recipe, &options, NULL), APA_STATUS_UNSUPPORTED);
    assert_non_null(strstr(apa_context_message(contexts[0]), "second_look"));
    recipe = apa_test_recipe("apa", "");
    s.t->problem.softcap = 1e-30;
    assert_int_equal(apa_attention(contexts[0], &s.t->problem, &recipe, &options, NULL), APA_STATUS_UNSUPPORTED);
    assert_non_null(strstr(apa_context_message(contexts[0]), "softcap"));
    drop(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_cases), cmocka_unit_test(hidden_keys),  cmocka_unit_test(nothing_seen),
        cmocka_unit_test(no_sentinel),  cmocka_unit_test(sinks_divide), cmocka_unit_test(same_bits),
        cmocka_unit_test(verdicts),     cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests_name("cpu_scores", tests, set_up, tear_down);
}
