/* Few rows on the CPU engine, every ISA level: the kernels against the scalar ones, and exact's promise that a row's
 * bits don't depend on how many queries the call has. */
#include "support/test.h"

#include "formats/formats.h"
#include "support/attend.h"
#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TILE APA_CPU_TILE
#define LANES APA_CPU_LANES
#define FEW APA_CPU_FEW
#define LARGEST_DIM 1024

static apa_test_level table[APA_TEST_LEVELS_MAX], level[APA_TEST_LEVELS_MAX];
static apa_context *context[APA_TEST_LEVELS_MAX];
static int tables, levels;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    tables = apa_test_tables(table);
    levels = apa_test_levels(level);
    for (int l = 0; l < levels; l++)
        context[l] = apa_test_level_context(&level[l], 2);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        apa_context_destroy(context[l]);
    return 0;
}

/* ---- kernels ---- */

static void store(apa_dtype dtype, void *at, int64_t i, double x)
{
    apa_tensor one = apa_tensor_hnd(at, dtype, 1, 1, 1, i + 1);
    apa_test_set(&one, 0, 0, 0, i, x);
}

/* Chains of at most 1024 links of products of numbers of size 1: sums differ between a multiply-add and a product with
 * a sum by n·2^-24 of the sum of the magnitudes. */
static void few_case(const apa_cpu_kernels *kernels, apa_test_rng *rng, apa_dtype dtype, int64_t D, int n, int R)
{
    apa_test_buffers set = {0};
    const size_t size = apa_dtype_bytes(dtype);
    const int64_t Do = (D + 15) / 16 * 16, stride = D + 3;
    char *memory = apa_test_take(&set, (size_t)(n * stride) * size, size);
    float *q = apa_test_take(&set, sizeof(float) * (size_t)(Do * FEW), 0);
    float *s = apa_test_take(&set, sizeof(float) * FEW * TILE, 0);
    float *p = apa_test_take(&set, sizeof(float) * FEW * TILE, 0);
    float *o = apa_test_take(&set, sizeof(float) * (size_t)(FEW * Do), 0), alpha[LANES];
    static float s_truth[FEW * TILE], o_truth[FEW * LARGEST_DIM];
    const void *rows[TILE];
    for (int key = 0; key < n; key++) {
        rows[key] = memory + (size_t)(key * stride) * size;
        for (int64_t d = 0; d < D; d++)
            store(dtype, memory, key * stride + d, apa_test_normal(rng));
    }
    for (int64_t i = 0; i < Do * FEW; i++) {
        const float x = (float)apa_test_normal(rng); /* queries are of the keys' type */
        q[i] = i / FEW >= D ? 0.0f : dtype == APA_DTYPE_BF16 ? apa_bf16_to_f32(apa_f32_to_bf16(x)) : x;
        o[i] = o_truth[i] = (float)apa_test_normal(rng);
    }
    for (int i = 0; i < FEW * TILE; i++) {
        p[i] = (float)apa_test_uniform(rng);
        s[i] = s_truth[i] = 0.0f;
        alpha[i % LANES] = i % 3 == 0 ? 0.5f : 1.0f;
    }
    apa_test_freeze(&set, memory);
    apa_test_freeze(&set, q);
    apa_test_freeze(&set, p);
    /* Any number of rows: exactly so many pointers, for a sanitizer to watch. */
    const int asked = 1 + (int)apa_test_below(rng, n);
    const void **ask = malloc(sizeof *ask * (size_t)asked);
    assert_non_null(ask);
    memcpy(ask, rows, sizeof *ask * (size_t)asked);
    const apa_cpu_ahead ahead = {ask, asked, D * (int64_t)size};
    kernels->scores_few(dtype, rows, n, D, R % 2 == 0 ? &ahead : NULL, R, q, s);
    table[0].kernels->scores_few(dtype, rows, n, D, NULL, R, q, s_truth);
    assert_true(kernels->pv_few(dtype, rows, n, D, R % 2 == 0 ? &ahead : NULL, R, p, alpha, true, o));
    assert_true(table[0].kernels->pv_few(dtype, rows, n, D, NULL, R, p, alpha, true, o_truth));
    for (int key = 0; key < TILE; key++)
        for (int r = 0; r < R; r++)
            if (!(fabsf(s[r * TILE + key] - s_truth[r * TILE + key]) <= (float)D * 16.0f * (float)D * 0x1p-24f))
                fail_msg("score of key %d, row %d: %g, expected %g", key, r, (double)s[r * TILE + key],
                         (double)s_truth[r * TILE + key]);
    for (int key = n; key < TILE; key++)
        for (int r = 0; r < R; r++)
            assert_true(s[r * TILE + key] == 0.0f);
    for (int r = 0; r < R; r++)
        for (int64_t c = 0; c < D; c++)
            if (!(fabsf(o[r * Do + c] - o_truth[r * Do + c]) <= 65.0f * 64.0f * 6.0f * 0x1p-24f))
                fail_msg("channel %d, row %d: %g, expected %g", (int)c, r, (double)o[r * Do + c],
                         (double)o_truth[r * Do + c]);
    free(ask);
    apa_test_buffers_check(&set, "few");
    apa_test_buffers_free(&set);
}

static void kernels_of_few_rows(void **state)
{
    (void)state;
    static const int64_t widths[] = {1, 7, 16, 40, 64, 80, 128, 256};
    static const int counts[] = {64, 1, 17, 63};
    static const apa_dtype dtypes[] = {APA_DTYPE_F16, APA_DTYPE_BF16, APA_DTYPE_F32};
    for (int l = 0; l < tables; l++) {
        apa_test_rng rng = {apa_test_seed()};
        assert_non_null(table[l].kernels->scores_few);
        for (int w = 0; w < 8; w++)
            for (int c = 0; c < 4; c++)
                for (int d = 0; d < 3; d++)
                    for (int R = 1; R <= FEW; R++)
                        few_case(table[l].kernels, &rng, dtypes[d], widths[w], counts[c], R);
    }
}

/* softmax_few has the bits of the same table's softmax_f32, whose lanes are the rows. */
static void softmax_of_few(void **state)
{
    (void)state;
    for (int l = 0; l < tables; l++) {
        const apa_cpu_kernels *kernels = table[l].kernels;
        apa_test_rng rng = {apa_test_seed()};
        for (int trial = 0; trial < 400; trial++) {
            static float few[FEW * TILE] __attribute__((aligned(64))), many[TILE * LANES] __attribute__((aligned(64)));
            apa_cpu_state a, b;
            apa_cpu_span span;
            float alpha_a[LANES], alpha_b[LANES];
            const int R = 1 + trial % FEW;
            const float c = trial % 5 == 0 ? 0.0f : 0.2f + 3.0f * (float)apa_test_uniform(&rng);
            memset(many, 0, sizeof many);
            for (int i = 0; i < LANES; i++) {
                a.frame[i] = trial % 3 == 0 ? -INFINITY : 5.0f * (float)apa_test_normal(&rng);
                a.sum[i] = trial % 3 == 0 ? 0.0f : (float)apa_test_uniform(&rng);
                span.lo[i] = (int32_t)apa_test_below(&rng, TILE);
                span.hi[i] = (int32_t)apa_test_below(&rng, TILE + 1);
            }
            for (int r = 0; r < R; r++)
                for (int key = 0; key < TILE; key++) {
                    const float x = trial % 7 == 0 && key % 9 == r ? -INFINITY : 6.0f * (float)apa_test_normal(&rng);
                    few[r * TILE + key] = many[key * LANES + r] = x;
                }
            b = a;
            kernels->softmax_few(R, few, c, trial % 2 == 0 ? &span : NULL, &a, alpha_a);
            kernels->softmax_f32(many, 1, c, trial % 2 == 0 ? &span : NULL, NULL, &b, alpha_b);
            for (int r = 0; r < R; r++) {
                assert_memory_equal(&a.frame[r], &b.frame[r], sizeof(float));
                assert_memory_equal(&a.sum[r], &b.sum[r], sizeof(float));
                assert_memory_equal(&alpha_a[r], &alpha_b[r], sizeof(float));
                for (int key = 0; key < TILE; key++)
                    assert_memory_equal(&few[r * TILE + key], &many[key * LANES + r], sizeof(float));
            }
        }
    }
}

/* A value that is none is said so, and o stays as it was. */
static void values_that_are_none(void **state)
{
    (void)state;
    for (int l = 0; l < tables; l++)
        for (int bad = 0; bad < 3; bad++) {
            static float v[TILE][24], p[FEW * TILE], o[FEW * 32] __attribute__((aligned(64)));
            const void *rows[TILE];
            float alpha[LANES];
            for (int key = 0; key < TILE; key++) {
                rows[key] = v[key];
                for (int c = 0; c < 24; c++)
                    v[key][c] = 1.0f;
            }
            for (int i = 0; i < FEW * TILE; i++)
                p[i] = 0.0f;
            for (int i = 0; i < FEW * 32; i++)
                o[i] = 3.0f;
            for (int i = 0; i < LANES; i++)
                alpha[i] = 0.5f;
            v[41][17] = bad == 0 ? NAN : bad == 1 ? INFINITY : 1.0f;
            assert_int_equal(table[l].kernels->pv_few(APA_DTYPE_F32, rows, TILE, 24, NULL, 3, p, alpha, true, o),
                             bad == 2);
            assert_true(o[0] == (bad == 2 ? 1.5f : 3.0f) && o[2 * 32 + 17] == o[0]);
            assert_true(table[l].kernels->pv_few(APA_DTYPE_F32, rows, TILE, 24, NULL, 3, p, alpha, false, o));
            assert_true(isfinite(o[2 * 32 + 17]) == (bad == 2) && o[16] == (bad == 2 ? 0.75f : 1.5f));
        }
}

/* ---- the engine ---- */

typedef struct trial {
    apa_test_shape shape;
    apa_dtype dtype;
    int64_t window; /* to the left; -1: none */
    bool poison;    /* some keys and values are NaN or Inf */
    const char *settings;
} trial;

static apa_test_problem *make(const trial *x, int64_t Sq, apa_test_layout layout)
{
    apa_test_shape shape = x->shape;
    shape.Sq = Sq;
    apa_test_problem *t = apa_test_make(shape, x->dtype, APA_DTYPE_F32, layout, 5);
    t->problem.causal = 1;
    t->problem.window_left = x->window;
    for (int64_t j = 3; x->poison && j < shape.Skv; j += 97)
        for (int64_t h = 0; h < shape.Hkv; h++) {
            apa_test_set(&t->problem.v, 0, h, j, 1, j % 2 == 0 ? NAN : INFINITY);
            if (j % 5 == 0)
                apa_test_set(&t->problem.k, 0, h, j, 0, NAN);
        }
    return t;
}

/* The last rows of a call of 40 queries and a call of those queries alone: the same bits. */
static void check(const trial *x, int64_t few)
{
    const apa_recipe recipe = apa_test_recipe("exact", x->settings);
    for (int l = 0; l < levels; l++) {
        apa_test_problem *many = make(x, 40, APA_TEST_HND), *one = make(x, few, APA_TEST_SLICE);
        for (int64_t h = 0; h < x->shape.Hq; h++)
            for (int64_t i = 0; i < few; i++)
                for (int64_t d = 0; d < x->shape.D; d++)
                    apa_test_set(&one->problem.q, 0, h, i, d, apa_test_get(&many->problem.q, 0, h, 40 - few + i, d));
        for (int64_t h = 0; h < x->shape.Hkv; h++)
            for (int64_t j = 0; j < x->shape.Skv; j++) {
                for (int64_t d = 0; d < x->shape.D; d++)
                    apa_test_set(&one->problem.k, 0, h, j, d, apa_test_get(&many->problem.k, 0, h, j, d));
                for (int64_t d = 0; d < x->shape.Dv; d++)
                    apa_test_set(&one->problem.v, 0, h, j, d, apa_test_get(&many->problem.v, 0, h, j, d));
            }
        apa_test_attend(context[l], "cpu", many, &recipe, NULL, NULL);
        apa_test_attend(context[l], "cpu", one, &recipe, NULL, NULL);
        for (int64_t h = 0; h < x->shape.Hq; h++)
            for (int64_t i = 0; i < few; i++) {
                const int64_t row = 40 - few + i;
                const float a = (float)apa_test_get(&one->problem.lse, 0, h, i, 0),
                            b = (float)apa_test_get(&many->problem.lse, 0, h, row, 0);
                assert_true(a == b || (isnan(a) && isnan(b)));
                for (int64_t c = 0; c < x->shape.Dv; c++) {
                    const float y = (float)apa_test_get(&one->problem.out, 0, h, i, c),
                                z = (float)apa_test_get(&many->problem.out, 0, h, row, c);
                    if (!(y == z || (isnan(y) && isnan(z))))
                        fail_msg("%s, D %d, %d queries, head %d, query %d, channel %d: %.9g alone, %.9g among 40",
                                 level[l].name, (int)x->shape.D, (int)few, (int)h, (int)i, (int)c, (double)y,
                                 (double)z);
                }
            }
        apa_test_free(many);
        apa_test_free(one);
    }
}

static void same_bits_as_among_many(void **state)
{
    (void)state;
    static const trial trials[] = {
        {{1, 3, 1, 0, 5000, 128, 128}, APA_DTYPE_F16, -1, false, ""},
        {{1, 6, 2, 0, 700, 64, 64}, APA_DTYPE_BF16, -1, false, "packing=head"},
        {{1, 6, 2, 0, 700, 64, 64}, APA_DTYPE_F16, -1, false, "packing=rows"},
        {{1, 2, 2, 0, 300, 40, 24}, APA_DTYPE_F32, -1, false, ""},
        {{1, 8, 1, 0, 900, 80, 80}, APA_DTYPE_F16, 130, false, ""},
        {{1, 7, 1, 0, 260, 33, 17}, APA_DTYPE_F32, 65, false, ""},
        {{1, 4, 1, 0, 1100, 128, 128}, APA_DTYPE_F16, 300, true, ""},
        {{1, 3, 1, 0, 640, 256, 128}, APA_DTYPE_BF16, -1, true, ""},
        {{1, 1, 1, 0, 41, 16, 16}, APA_DTYPE_F16, -1, true, ""},
    };
    for (size_t i = 0; i < sizeof trials / sizeof trials[0]; i++)
        for (int64_t few = 1; few * trials[i].shape.Hq / trials[i].shape.Hkv <= 9 && few <= 4; few++)
            check(&trials[i], few);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_of_few_rows),
        cmocka_unit_test(softmax_of_few),
        cmocka_unit_test(values_that_are_none),
        cmocka_unit_test(same_bits_as_among_many),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
