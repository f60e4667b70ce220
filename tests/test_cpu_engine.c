/* The CPU engine's exact method, every ISA level, against attention in double over all outputs: shapes, heads, dims,
 * dtypes, masks, layouts, scales; and what it promises about bits: the same for every cut of the queries, every number
 * of threads, a caller's own threads. */
#define _GNU_SOURCE
#include "support/test.h"

#include "support/attend.h"
#include "support/levels.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OUT_BOUND 2e-6 /* relative, over all outputs; f32 inputs and outputs */
#define LSE_BOUND 2e-6 /* of max(1, |lse|), the worst row */

static apa_test_level level[APA_TEST_LEVELS_MAX];
static apa_context *context[APA_TEST_LEVELS_MAX];
static int levels;
static double worst_out, worst_lse;

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
    printf("# exact, f32: worst relative error %.3g, worst LSE error %.3g\n", worst_out, worst_lse);
    return 0;
}

/* Runs exact in every level and compares with the oracle. */
static void check(apa_test_problem *t, double out_bound, double lse_bound)
{
    const apa_recipe exact = apa_test_recipe("exact", "");
    double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
    const apa_test_shape *s = &t->shape;
    apa_test_fast_oracle(&t->problem, out, lse);
    for (int l = 0; l < levels; l++) {
        apa_statistics statistics;
        apa_test_fill(&t->problem.out, NAN);
        apa_test_fill(&t->problem.lse, NAN);
        apa_test_attend(context[l], "cpu", t, &exact, NULL, &statistics);
        const double error = apa_test_rel_l2(&t->problem.out, out),
                     lse_error = apa_test_lse_error(&t->problem.lse, lse);
        if (!(error <= out_bound) || !(lse_error <= lse_bound))
            fail_msg(
                "%s B %d Hq %d Hkv %d Sq %d Skv %d D %d Dv %d %s layout %d causal %d: out %g (%g allowed), lse %g (%g)",
                level[l].name, (int)s->B, (int)s->Hq, (int)s->Hkv, (int)s->Sq, (int)s->Skv, (int)s->D, (int)s->Dv,
                apa_dtype_name(t->problem.q.dtype), (int)t->layout, t->problem.causal, error, out_bound, lse_error,
                lse_bound);
        assert_int_equal(statistics.hot, statistics.visible);
        assert_int_equal(statistics.skipped, 0);
        if (out_bound == OUT_BOUND) {
            worst_out = fmax(worst_out, error);
            worst_lse = fmax(worst_lse, lse_error);
        }
    }
    free(out);
    free(lse);
}

static void check_shape(apa_test_shape shape, apa_test_layout layout)
{
    apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, layout, (uint64_t)(shape.Sq + shape.D));
    /* A score's error grows as sqrt(D) while the scores of N(0, 1) values keep their size. */
    const double factor = shape.D > 256 ? 2 : 1;
    for (t->problem.causal = 0; t->problem.causal < 2; t->problem.causal++)
        check(t, factor * OUT_BOUND, factor * LSE_BOUND);
    apa_test_free(t);
}

/* ---- the oracle itself ---- */

static void oracles_agree(void **state)
{
    (void)state;
    apa_test_shape shape = {2, 6, 2, 37, 91, 20, 12};
    apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_SLICE, 5);
    double *out[2], *lse[2];
    t->problem.causal = 1;
    t->problem.window_left = 40;
    t->problem.q_offset = 3;
    for (int i = 0; i < 2; i++) {
        out[i] = apa_test_doubles(&t->problem.out);
        lse[i] = apa_test_doubles(&t->problem.lse);
    }
    apa_test_oracle(&t->problem, out[0], lse[0]);
    apa_test_fast_oracle(&t->problem, out[1], lse[1]);
    for (int64_t i = 0; i < 2 * 6 * 37; i++) {
        assert_true(lse[0][i] == lse[1][i] || fabs(lse[0][i] - lse[1][i]) < 1e-13);
        for (int64_t c = 0; c < 12; c++)
            assert_true(fabs(out[0][i * 12 + c] - out[1][i * 12 + c]) < 1e-13);
    }
    for (int i = 0; i < 2; i++) {
        free(out[i]);
        free(lse[i]);
    }
    apa_test_free(t);
}

/* ---- shapes ---- */

static const int64_t heads[3][2] = {{9, 3}, {5, 1}, {4, 4}};

static void small_shapes(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {{1, 1}, {3, 3}, {64, 1}, {1, 64}, {239, 1}, {17, 65}};
    static const int64_t dims[] = {1, 7, 16, 24, 33, 64, 80, 100, 128, 256};
    for (int i = 0; i < 6; i++)
        for (int h = 0; h < 3; h++)
            for (int d = 0; d < 10; d++) {
                /* Dv equal to D, another of the list, or 1024 */
                const int64_t Dv = (i + h + d) % 3 == 0 ? dims[d] : dims[(d + 3 + h) % 10];
                apa_test_shape shape = {1 + (i + d) % 2, heads[h][0], heads[h][1], sizes[i][0],
                                        sizes[i][1],     dims[d],     Dv};
                check_shape(shape, (apa_test_layout)((i + d) % 3));
            }
}

static void medium_shapes(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {{113, 203}, {113, 211}, {108, 256}, {127, 129}, {799, 3}, {256, 108}};
    static const int64_t dims[] = {16, 24, 64, 80, 128, 256, 7, 100};
    for (int i = 0; i < 6; i++)
        for (int h = 0; h < 3; h++)
            for (int d = (i + h) % 2; d < 8; d += 2) { /* half of them each time, all for every size and heads */
                const int64_t D = dims[d], Dv = (i + d / 2) % 2 == 0 ? D : dims[(i + h) % 8];
                apa_test_shape shape = {1, heads[h][0], heads[h][1], sizes[i][0], sizes[i][1], D, Dv};
                check_shape(shape, (apa_test_layout)((i + h + d / 2) % 3));
            }
}

static void large_shapes(void **state)
{
    (void)state;
    check_shape((apa_test_shape){1, 3, 1, 1023, 1024, 64, 64}, APA_TEST_HND);
    check_shape((apa_test_shape){1, 2, 2, 1024, 1023, 128, 128}, APA_TEST_NHD);
    check_shape((apa_test_shape){1, 1, 1, 20, 300, 1024, 1024}, APA_TEST_HND);
    check_shape((apa_test_shape){3, 2, 1, 33, 150, 1024, 8}, APA_TEST_SLICE);
}

/* No queries, no keys, no batch. */
static void nothing(void **state)
{
    (void)state;
    check_shape((apa_test_shape){1, 2, 1, 0, 5, 16, 16}, APA_TEST_HND);
    check_shape((apa_test_shape){1, 2, 1, 5, 0, 16, 16}, APA_TEST_HND);
    check_shape((apa_test_shape){0, 2, 1, 5, 5, 16, 16}, APA_TEST_HND);
}

/* More keys than a segment: few queries, so the keys are cut into chunks, and the merge tree is uneven. */
static void long_keys(void **state)
{
    (void)state;
    check_shape((apa_test_shape){1, 4, 2, 3, 5000, 32, 32}, APA_TEST_HND);
    check_shape((apa_test_shape){1, 1, 1, 1, 9000, 64, 24}, APA_TEST_HND);
    check_shape((apa_test_shape){1, 2, 1, 1, 70000, 8, 8}, APA_TEST_HND);
    check_shape((apa_test_shape){2, 20, 20, 40, 4200, 16, 16}, APA_TEST_HND); /* enough units not to be cut */
}

/* ---- dtypes ---- */

/* Half precision inputs are exact in f32; a 16-bit output adds its own rounding. */
static void dtypes(void **state)
{
    (void)state;
    static const apa_dtype in[] = {APA_DTYPE_F16, APA_DTYPE_BF16, APA_DTYPE_F32};
    static const double rounding[] = {0x1p-11, 0x1p-8, 0};
    for (int i = 0; i < 3; i++)
        for (int o = 0; o < 3; o++)
            for (int layout = 0; layout < 3; layout++) {
                apa_test_shape shape = {2, 6, 2, 70, 150, layout == 2 ? 33 : 64, layout == 1 ? 15 : 64};
                apa_test_problem *t = apa_test_make(shape, in[i], in[o], (apa_test_layout)layout, 3);
                t->problem.causal = layout != 0;
                check(t, OUT_BOUND + rounding[o], LSE_BOUND);
                apa_test_free(t);
            }
}

/* ---- masks ---- */

static void windows(void **state)
{
    (void)state;
    static const int64_t window[][2] = {{0, 0}, {5, -1}, {-1, 3}, {63, 64}, {100, 0}, {1, 200}, {INT64_MAX, INT64_MAX}};
    static const int64_t offset[] = {APA_Q_OFFSET_DEFAULT, 0, -40, 130, -1000, 1000, INT64_MAX, INT64_MIN + 1};
    for (int w = 0; w < 7; w++)
        for (int o = 0; o < 8; o++) {
            apa_test_shape shape = {1, 4, 2, 90, 200, 16, 16};
            apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 9);
            t->problem.window_left = window[w][0];
            t->problem.window_right = window[w][1];
            t->problem.q_offset = offset[o];
            for (t->problem.causal = 0; t->problem.causal < 2; t->problem.causal++)
                check(t, OUT_BOUND, LSE_BOUND);
            apa_test_free(t);
        }
}

static void scales(void **state)
{
    (void)state;
    static const double scale[] = {0.0, -0.25, 1.0, 1e-3, -2.0};
    for (int i = 0; i < 5; i++) {
        apa_test_shape shape = {1, 4, 2, 50, 130, 24, 24};
        apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 4);
        t->problem.softmax_scale = scale[i];
        for (t->problem.causal = 0; t->problem.causal < 2; t->problem.causal++)
            check(t, 2 * OUT_BOUND, LSE_BOUND); /* scale 2: logits four times as large as usual */
        apa_test_free(t);
    }
}

/* ---- strides ---- */

/* Views of other memory give the bits of a plain copy: fused QKV, one K/V head broadcast to a batch, keys read
 * backwards. */
static void views(void **state)
{
    (void)state;
    enum { B = 2, H = 3, S = 75, D = 20 };
    apa_test_rng rng = {apa_test_seed()};
    float *fused = malloc(sizeof(float) * B * S * 3 * H * D), *plain[3], *out[2];
    for (int i = 0; i < 3; i++)
        plain[i] = malloc(sizeof(float) * B * H * S * D);
    for (int i = 0; i < 2; i++)
        out[i] = malloc(sizeof(float) * B * H * S * D);
    for (int i = 0; i < B * S * 3 * H * D; i++)
        fused[i] = (float)apa_test_normal(&rng);
    for (int kind = 0; kind < 3; kind++)
        for (int l = 0; l < levels; l++) {
            apa_problem view, copy;
            apa_tensor *from[3] = {&view.q, &view.k, &view.v}, *to[3] = {&copy.q, &copy.k, &copy.v};
            apa_problem_init(&view);
            for (int i = 0; i < 3; i++) {
                apa_tensor x = {fused + i * H * D, APA_DTYPE_F32, {B, H, S, D}, {S * 3 * H * D, D, 3 * H * D, 1}};
                if (kind == 1 && i > 0)
                    x.stride[0] = x.stride[1] = 0;
                if (kind == 2 && i > 0) {
                    x.data = fused + i * H * D + (S - 1) * x.stride[2];
                    x.stride[2] = -x.stride[2];
                }
                *from[i] = x;
            }
            view.causal = kind != 0;
            view.out = apa_tensor_hnd(out[0], APA_DTYPE_F32, B, H, S, D);
            copy = view;
            copy.out.data = out[1];
            for (int i = 0; i < 3; i++) {
                *to[i] = apa_tensor_hnd(plain[i], APA_DTYPE_F32, B, H, S, D);
                for (int64_t e = 0; e < B * H * S * D; e++) {
                    const int64_t d = e % D, s = e / D % S, h = e / D / S % H, b = e / D / S / H;
                    const apa_tensor *x = from[i];
                    plain[i][e] = ((const float *)x->data)[b * x->stride[0] + h * x->stride[1] + s * x->stride[2] + d];
                }
            }
            for (int method = 0; method < 2; method++) {
                const apa_recipe recipe = apa_test_recipe(method == 0 ? "exact" : "apa", "");
                apa_attention_options options;
                apa_attention_options_init(&options);
                options.engine = "cpu";
                assert_int_equal(apa_attention(context[l], &view, &recipe, &options, NULL), APA_STATUS_OK);
                assert_int_equal(apa_attention(context[l], &copy, &recipe, &options, NULL), APA_STATUS_OK);
                assert_memory_equal(out[0], out[1], sizeof(float) * B * H * S * D);
            }
        }
    for (int i = 0; i < 3; i++)
        free(plain[i]);
    free(out[0]);
    free(out[1]);
    free(fused);
}

/* ---- the same bits ---- */

/* Queries from `from` on, n of them, as a problem of their own that writes into `part`. */
static apa_problem some_rows(const apa_test_problem *t, apa_test_problem *part, int64_t from, int64_t n)
{
    apa_problem p = t->problem;
    p.q_offset = t->shape.Skv - t->shape.Sq + from;
    apa_tensor *cut[3] = {&p.q, &p.out, &p.lse};
    p.out = part->problem.out;
    p.lse = part->problem.lse;
    for (int i = 0; i < 3; i++) {
        cut[i]->shape[2] = n;
        cut[i]->data = (float *)cut[i]->data + from * cut[i]->stride[2];
    }
    return p;
}

static void compare_cuts(apa_test_shape shape, const char *masks)
{
    static const int64_t cut[] = {1, 7, 64};
    const apa_recipe exact = apa_test_recipe("exact", "");
    apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 21);
    apa_test_problem *part = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 21);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "cpu";
    t->problem.causal = masks[0] == 'c';
    t->problem.window_left = masks[0] == 'w' ? 2100 : -1;
    for (int l = 0; l < levels; l++) {
        apa_test_attend(context[l], "cpu", t, &exact, NULL, NULL);
        apa_test_outputs whole = apa_test_keep(t);
        for (int i = 0; i < 3; i++) {
            apa_test_fill(&part->problem.out, NAN);
            for (int64_t from = 0; from < shape.Sq; from += cut[i]) {
                const int64_t n = shape.Sq - from < cut[i] ? shape.Sq - from : cut[i];
                const apa_problem p = some_rows(t, part, from, n);
                assert_int_equal(apa_attention(context[l], &p, &exact, &options, NULL), APA_STATUS_OK);
            }
            if (apa_test_differs(part, &whole))
                fail_msg("%s, %s, %d keys: chunks of %d queries give other bits than all at once", level[l].name, masks,
                         (int)shape.Skv, (int)cut[i]);
        }
        apa_test_drop(&whole);
    }
    apa_test_free(t);
    apa_test_free(part);
}

static void same_bits_for_every_cut(void **state)
{
    (void)state;
    compare_cuts((apa_test_shape){1, 3, 1, 70, 5000, 24, 16}, "causal");
    compare_cuts((apa_test_shape){1, 2, 2, 70, 8300, 16, 8}, "all");
    compare_cuts((apa_test_shape){1, 2, 1, 100, 6500, 8, 8}, "window");
    compare_cuts((apa_test_shape){1, 6, 2, 200, 200, 64, 64}, "causal");
    /* Enough heads for the widest blocks, 24 registers: 25 and 19 of them, 12 in chunks of 64. */
    compare_cuts((apa_test_shape){32, 3, 1, 130, 200, 8, 8}, "causal");
    compare_cuts((apa_test_shape){33, 3, 1, 100, 230, 16, 24}, "all");
}

/* ---- threads ---- */

typedef struct own_work {
    void (*task)(void *argument, size_t index);
    void *argument;
    size_t count;
    size_t next;
    pthread_mutex_t lock;
} own_work;

static void *own_thread(void *argument)
{
    own_work *work = argument;
    for (;;) {
        pthread_mutex_lock(&work->lock);
        const size_t index = work->next++;
        pthread_mutex_unlock(&work->lock);
        if (index >= work->count)
            return NULL;
        work->task(work->argument, work->count - 1 - index); /* any order will do: here from the end */
    }
}

static void own_parallel_for(void *pool, void (*task)(void *argument, size_t index), void *argument, size_t count)
{
    pthread_t thread[5];
    own_work work = {.task = task, .argument = argument, .count = count};
    pthread_mutex_init(&work.lock, NULL);
    for (int i = 0; i < 5; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, own_thread, &work), 0);
    for (int i = 0; i < 5; i++)
        pthread_join(thread[i], NULL);
    pthread_mutex_destroy(&work.lock);
    ++*(int *)pool;
}

static void same_bits_for_every_thread_count(void **state)
{
    (void)state;
    static const char *const method[][2] = {{"exact", ""}, {"apa", "eps=0.05"}, {"apa", "eps=0.001 second_look=off"}};
    static const apa_test_shape shape[] = {{2, 6, 2, 300, 700, 32, 32}, {1, 2, 1, 3, 9000, 16, 16}};
    for (int m = 0; m < 3; m++)
        for (int s = 0; s < 2; s++)
            for (int l = 0; l < levels; l++) {
                const apa_recipe recipe = apa_test_recipe(method[m][0], method[m][1]);
                apa_test_problem *t = apa_test_make(shape[s], APA_DTYPE_F16, APA_DTYPE_F32, APA_TEST_NHD, 6);
                apa_test_outputs first = {0};
                int calls = 0;
                t->problem.causal = 1;
                /* one, two, seven threads; a caller's five with room for 2 and for 5 tasks at once; one more run */
                static const int32_t threads[] = {1, 2, 7, 2, 5, 1};
                for (int run = 0; run < 6; run++) {
                    apa_context_options options;
                    apa_context *own;
                    apa_context_options_init(&options);
                    options.threads = threads[run];
                    options.isa = level[l].name;
                    options.parallel_for = run == 3 || run == 4 ? own_parallel_for : NULL;
                    options.pool = &calls;
                    assert_int_equal(apa_context_create(&own, &options), APA_STATUS_OK);
                    apa_test_fill(&t->problem.out, NAN);
                    apa_test_attend(own, "cpu", t, &recipe, NULL, NULL);
                    apa_context_destroy(own);
                    if (run == 0)
                        first = apa_test_keep(t);
                    else if (apa_test_differs(t, &first))
                        fail_msg("%s %s: run %d with %d threads gives other bits", level[l].name, method[m][0], run,
                                 (int)threads[run]);
                }
                assert_true(calls > 0);
                apa_test_drop(&first);
                apa_test_free(t);
            }
}

/* ---- workspace ---- */

static void workspace(void **state)
{
    (void)state;
    static const char *const method[] = {"exact", "apa"};
    for (int m = 0; m < 2; m++) {
        const apa_recipe recipe = apa_test_recipe(method[m], "");
        apa_test_problem *t =
            apa_test_make((apa_test_shape){1, 2, 1, 40, 300, 16, 16}, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 2);
        apa_attention_options options;
        apa_statistics statistics;
        apa_plan plan;
        apa_attention_options_init(&options);
        apa_statistics_init(&statistics);
        apa_plan_init(&plan);
        options.engine = "cpu";
        /* a plan needs no data */
        apa_problem shapes = t->problem;
        shapes.q.data = shapes.k.data = shapes.v.data = shapes.out.data = shapes.lse.data = NULL;
        assert_int_equal(apa_attention_plan(context[0], &shapes, &recipe, &options, &plan), APA_STATUS_OK);
        assert_true(plan.workspace_bytes > 0);
        unsigned char *memory = aligned_alloc(64, (plan.workspace_bytes + 127) / 64 * 64);
        apa_test_fill(&t->problem.out, 7.0);
        options.workspace = memory;
        options.workspace_bytes = plan.workspace_bytes - 1;
        assert_int_equal(apa_attention(context[0], &t->problem, &recipe, &options, NULL), APA_STATUS_INVALID_ARGUMENT);
        assert_non_null(strstr(apa_context_message(context[0]), "workspace"));
        options.workspace = memory + 32;
        options.workspace_bytes = plan.workspace_bytes;
        assert_int_equal(apa_attention(context[0], &t->problem, &recipe, &options, NULL), APA_STATUS_INVALID_ARGUMENT);
        assert_true(apa_test_get(&t->problem.out, 0, 0, 0, 0) == 7.0 &&
                    apa_test_get(&t->problem.out, 0, 1, 39, 15) == 7.0);
        options.workspace = memory;
        assert_int_equal(apa_attention(context[0], &t->problem, &recipe, &options, &statistics), APA_STATUS_OK);
        assert_int_equal(statistics.workspace_bytes, plan.workspace_bytes);
        apa_test_outputs given = apa_test_keep(t);
        options.workspace = NULL; /* the library's own memory gives the same bits */
        assert_int_equal(apa_attention(context[0], &t->problem, &recipe, &options, NULL), APA_STATUS_OK);
        assert_false(apa_test_differs(t, &given));
        apa_test_drop(&given);
        free(memory);
        apa_test_free(t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(oracles_agree),
        cmocka_unit_test(small_shapes),
        cmocka_unit_test(medium_shapes),
        cmocka_unit_test(large_shapes),
        cmocka_unit_test(nothing),
        cmocka_unit_test(long_keys),
        cmocka_unit_test(dtypes),
        cmocka_unit_test(windows),
        cmocka_unit_test(scales),
        cmocka_unit_test(views),
        cmocka_unit_test(same_bits_for_every_cut),
        cmocka_unit_test(same_bits_for_every_thread_count),
        cmocka_unit_test(workspace),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
