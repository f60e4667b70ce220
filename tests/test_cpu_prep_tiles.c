/* Tile kernels of the CPU engine's prep, every ISA level: sums of K, codes of K and V. They repeat a stated order of
 * single operations, so every comparison is of bits; the truth is that order written out here. */
#include "support/test.h"

#include "formats/formats.h"
#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define TILE APA_CPU_TILE
#define LARGEST_DIM 1024

static const apa_dtype dtypes[] = {APA_DTYPE_F16, APA_DTYPE_BF16, APA_DTYPE_F32};
static const int64_t widths[] = {1, 7, 16, 24, 33, 64, 80, 100, 128, 136, 256, 1024};
#define WIDTHS (int)(sizeof widths / sizeof widths[0])
static const int counts[] = {64, 1, 3, 8, 13, 63};
#define COUNTS (int)(sizeof counts / sizeof counts[0])

static apa_test_level level[APA_TEST_LEVELS_MAX];
static int levels;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    levels = apa_test_tables(level);
    return 0;
}

static bool same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* A tile of n rows of D elements: each at an odd element, none next to the one before. */
typedef struct tile {
    apa_dtype dtype;
    int n;
    int64_t D;
    const void *rows[TILE];
    float value[TILE][LARGEST_DIM]; /* what the elements are as floats */
    bool finite[TILE];
} tile;

static void make_tile(apa_test_buffers *set, apa_test_rng *rng, apa_test_kind kind, apa_dtype dtype, int n, int64_t D,
                      tile *made)
{
    static float values[TILE * LARGEST_DIM];
    const int64_t stride = D + 3;
    const size_t size = apa_dtype_bytes(dtype);
    char *memory = apa_test_take(set, (size_t)(n * stride) * size, size);
    *made = (tile){.dtype = dtype, .n = n, .D = D};
    apa_test_fill_kind(rng, kind, values, n * D);
    for (int i = 0; i < n; i++) {
        char *row = memory + (size_t)(i * stride) * size;
        made->rows[i] = row;
        made->finite[i] = true;
        for (int64_t d = 0; d < D; d++) {
            const float x = values[i * D + d];
            const uint16_t code = dtype == APA_DTYPE_F16 ? apa_f32_to_f16(x) : apa_f32_to_bf16(x);
            if (dtype == APA_DTYPE_F32)
                memcpy(row + (size_t)d * size, &x, size);
            else
                memcpy(row + (size_t)d * size, &code, size);
            const float back = dtype == APA_DTYPE_F16 ? apa_f16_to_f32(code) : apa_bf16_to_f32(code);
            made->value[i][d] = dtype == APA_DTYPE_F32 ? x : back;
            made->finite[i] = made->finite[i] && isfinite(made->value[i][d]);
        }
    }
    apa_test_freeze(set, memory);
}

/* Runs a case over levels, dtypes, widths, row counts (all of them at three widths) and kinds of values. */
static void every_tile(void (*run)(const apa_cpu_kernels *kernels, apa_test_buffers *set, apa_test_rng *rng,
                                   const tile *made, apa_test_kind kind),
                       const char *what)
{
    static tile made;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        for (int w = 0; w < WIDTHS; w++)
            for (int c = widths[w] == 1024 ? COUNTS - 2 : 0;
                 c < (widths[w] == 1024                                        ? COUNTS - 1
                      : widths[w] == 33 || widths[w] == 64 || widths[w] == 128 ? COUNTS
                                                                               : 2);
                 c++)
                for (int d = 0; d < 3; d++)
                    for (int kind = 0; kind < APA_TEST_KINDS; kind++) {
                        apa_test_buffers set = {0};
                        make_tile(&set, &rng, (apa_test_kind)kind, dtypes[d], counts[c], widths[w], &made);
                        run(level[l].kernels, &set, &rng, &made, (apa_test_kind)kind);
                        apa_test_buffers_check(&set, what);
                        apa_test_buffers_free(&set);
                    }
    }
}

/* ---- sums of K ---- */

static void sum_k_case(const apa_cpu_kernels *kernels, apa_test_buffers *set, apa_test_rng *rng, const tile *made,
                       apa_test_kind kind)
{
    (void)kind;
    double *sum = apa_test_take(set, sizeof(double) * (size_t)made->D, 8), truth[LARGEST_DIM];
    int count = 0;
    for (int64_t d = 0; d < made->D; d++)
        sum[d] = truth[d] = apa_test_normal(rng);
    for (int i = 0; i < made->n; i++) {
        count += made->finite[i];
        for (int64_t d = 0; d < made->D && made->finite[i]; d++)
            truth[d] += made->value[i][d];
    }
    assert_int_equal(kernels->sum_k(made->dtype, made->rows, made->n, made->D, made->rows, sum), count);
    assert_memory_equal(sum, truth, sizeof(double) * (size_t)made->D);
}

static void sum_k(void **state)
{
    (void)state;
    every_tile(sum_k_case, "sum_k");
}

/* ---- codes of K ---- */

/* Butterflies of distance 1, 2, 4, …, then one product with 1/sqrt(block) as a float. */
static void rotate(float *x, int64_t n, int64_t block)
{
    float root = 1.0f;
    for (int64_t b = block; b > 1; b /= 4)
        root *= b == 2 ? 0.70710678118654752f : 0.5f;
    for (int64_t start = 0; start < n && block > 1; start += block) {
        for (int64_t h = 1; h < block; h *= 2)
            for (int64_t i = 0; i < block; i++)
                if ((i & h) == 0) {
                    const float a = x[start + i], b = x[start + i + h];
                    x[start + i] = a + b;
                    x[start + i + h] = a - b;
                }
        for (int64_t i = 0; i < block; i++)
            x[start + i] *= root;
    }
}

static void check_key(const tile *made, int key, const float *mean, int64_t block, const int8_t *code, int32_t bias,
                      float scale, bool *finite)
{
    const int64_t D = made->D, Dp = (D + 7) / 8 * 8;
    float row[LARGEST_DIM] = {0}, truth_scale = 0.0f;
    int8_t truth[LARGEST_DIM] = {0};
    int32_t truth_bias = 0;
    bool good = key < made->n;
    for (int64_t d = 0; d < D && key < made->n; d++)
        row[d] = made->value[key][d] - mean[d];
    rotate(row, D, block);
    for (int64_t d = 0; d < D; d++)
        good = good && isfinite(row[d]);
    if (good)
        truth_scale = apa_int8_quantise(row, (size_t)D, truth);
    else
        *finite = *finite && key >= made->n;
    for (int64_t d = 0; d < D; d++)
        truth_bias -= 128 * truth[d];
    assert_true(same_bits(scale, truth_scale));
    assert_memory_equal(code, truth, (size_t)Dp);
    assert_int_equal(bias, truth_bias);
}

static void quantise_k_block(const apa_cpu_kernels *kernels, apa_test_rng *rng, const tile *made, apa_test_kind kind,
                             int64_t block)
{
    apa_test_buffers set = {0};
    const int64_t Dp = (made->D + 7) / 8 * 8;
    float *mean = apa_test_take(&set, sizeof(float) * (size_t)Dp, 0);
    int8_t *k8 = apa_test_take(&set, (size_t)(TILE * Dp), 0);
    int32_t *bias = apa_test_take(&set, TILE * sizeof *bias, 0);
    float *scale = apa_test_take(&set, TILE * sizeof *scale, 0);
    bool finite = true;
    apa_test_fill_kind(rng, kind == APA_TEST_HUGE ? APA_TEST_HUGE : APA_TEST_RANDOM, mean, Dp);
    apa_test_freeze(&set, mean);
    const bool said =
        kernels->quantise_k(made->dtype, made->rows, made->n, made->D, NULL, mean, block, k8, bias, scale);
    for (int key = 0; key < TILE; key++)
        check_key(made, key, mean, block, k8 + key * Dp, bias[key], scale[key], &finite);
    assert_int_equal(said, finite);
    apa_test_buffers_check(&set, "quantise_k");
    apa_test_buffers_free(&set);
}

static void quantise_k_case(const apa_cpu_kernels *kernels, apa_test_buffers *set, apa_test_rng *rng, const tile *made,
                            apa_test_kind kind)
{
    (void)set;
    quantise_k_block(kernels, rng, made, kind, 1);
    quantise_k_block(kernels, rng, made, kind, made->D & -made->D);
}

static void quantise_k(void **state)
{
    (void)state;
    every_tile(quantise_k_case, "quantise_k");
}

/* Centring or rotating finite keys of the largest size overflows: said so, not coded; its neighbours are. */
static void quantise_k_overflow(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        for (int64_t D = 16; D <= 256; D *= 2) {
            const apa_cpu_kernels *kernels = level[l].kernels;
            float key[3][256], mean[256] = {0}, scale[TILE];
            static int8_t code[TILE * 256] __attribute__((aligned(64)));
            int32_t bias[TILE];
            const void *rows[3] = {key[0], key[1], key[2]};
            for (int64_t d = 0; d < D; d++) {
                key[0][d] = key[2][d] = 1.0f;
                key[1][d] = 3e38f;
            }
            assert_false(kernels->quantise_k(APA_DTYPE_F32, rows, 3, D, NULL, mean, D, code, bias, scale));
            assert_true(scale[0] > 0.0f && scale[1] == 0.0f && same_bits(scale[2], scale[0]));
            assert_int_equal(bias[1], 0);
            assert_int_equal(bias[2], bias[0]);
            assert_true(kernels->quantise_k(APA_DTYPE_F32, rows, 3, D, NULL, mean, 1, code, bias, scale));
            assert_int_equal(bias[1], -128 * 127 * D);
            for (int64_t d = 0; d < D; d++)
                mean[d] = -3e38f;
            assert_false(kernels->quantise_k(APA_DTYPE_F32, rows, 3, D, NULL, mean, 1, code, bias, scale));
        }
}

/* ---- codes of V ---- */

static void quantise_v_case(const apa_cpu_kernels *kernels, apa_test_buffers *set, apa_test_rng *rng, const tile *made,
                            apa_test_kind kind)
{
    (void)rng;
    (void)kind;
    const int64_t Dv = made->D, Dvp = (Dv + 7) / 8 * 8;
    int8_t *v8 = apa_test_take(set, (size_t)(Dvp * TILE), 0);
    float *v_scale = apa_test_take(set, sizeof(float) * (size_t)Dvp, 4), most = 0.0f, largest = NAN;
    bool finite = true;
    const bool said = kernels->quantise_v(made->dtype, made->rows, made->n, Dv, made->rows, v8, v_scale, &largest);
    for (int64_t c = 0; c < Dvp; c++) {
        float column[TILE] = {0};
        int8_t code[TILE];
        for (int key = 0; key < made->n && c < Dv; key++) {
            column[key] = made->finite[key] ? made->value[key][c] : 0.0f;
            finite = finite && made->finite[key];
            most = fmaxf(most, fabsf(column[key]));
        }
        assert_true(same_bits(v_scale[c], apa_int8_quantise(column, TILE, code)));
        for (int key = 0; key < TILE; key++)
            assert_int_equal(v8[(key / 4 * Dvp + c) * 4 + key % 4], code[key]);
    }
    assert_int_equal(said, finite);
    assert_true(largest == most);
}

static void quantise_v(void **state)
{
    (void)state;
    every_tile(quantise_v_case, "quantise_v");
}

/* The smallest maximum that is quantised, and its neighbours; the largest float. */
static void edges(void **state)
{
    (void)state;
    const float most[] = {APA_INT8_AMAX_MIN,
                          nextafterf(APA_INT8_AMAX_MIN, 0.0f),
                          nextafterf(APA_INT8_AMAX_MIN, 1.0f),
                          0x1p-149f,
                          0x1.fffffep127f,
                          0.0f,
                          -0.0f};
    static tile made;
    for (int l = 0; l < levels; l++)
        for (int i = 0; i < 7; i++) {
            apa_test_buffers set = {0};
            apa_test_rng rng = {apa_test_seed()};
            static float x[TILE][16];
            made = (tile){.dtype = APA_DTYPE_F32, .n = TILE, .D = 16};
            for (int key = 0; key < TILE; key++) {
                made.rows[key] = x[key];
                made.finite[key] = true;
                for (int d = 0; d < 16; d++)
                    made.value[key][d] = x[key][d] = (key + d) % 7 == 3 ? -most[i] : most[i] * 0.3f;
            }
            quantise_v_case(level[l].kernels, &set, &rng, &made, APA_TEST_RANDOM);
            quantise_k_block(level[l].kernels, &rng, &made, APA_TEST_RANDOM, 1);
            apa_test_buffers_check(&set, "edges");
            apa_test_buffers_free(&set);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sum_k),      cmocka_unit_test(quantise_k), cmocka_unit_test(quantise_k_overflow),
        cmocka_unit_test(quantise_v), cmocka_unit_test(edges),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
