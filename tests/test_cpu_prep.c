/* Row kernels of the CPU engine's prep, every ISA level: widening, rounding, quantisation, rotation. Everything here is
 * exact or repeats a stated order of single float operations, so every comparison is of bits (but hadamard against its
 * matrix). */
#include "support/test.h"

#include "formats/formats.h"
#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define TILE APA_CPU_TILE

static const apa_dtype dtypes[] = {APA_DTYPE_F16, APA_DTYPE_BF16, APA_DTYPE_F32};
static const int64_t lengths[] = {1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 64, 100, 127, 128, 129, 255, 256, 1023, 1024};
#define LENGTHS (int)(sizeof lengths / sizeof lengths[0])

static apa_test_level level[APA_TEST_LEVELS_MAX];
static int levels;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    levels = apa_test_tables(level);
    return 0;
}

static float from_code(apa_dtype dtype, uint16_t code)
{
    return dtype == APA_DTYPE_F16 ? apa_f16_to_f32(code) : apa_bf16_to_f32(code);
}

static float widened(apa_dtype dtype, const void *src, int64_t i)
{
    return dtype == APA_DTYPE_F32 ? ((const float *)src)[i] : from_code(dtype, ((const uint16_t *)src)[i]);
}

static bool same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* n elements of a kind in a dtype, at an odd element of the memory. */
static void *make_source(apa_test_buffers *set, apa_test_rng *rng, apa_test_kind kind, apa_dtype dtype, int64_t n)
{
    float values[1024];
    void *src = apa_test_take(set, (size_t)n * apa_dtype_bytes(dtype), apa_dtype_bytes(dtype));
    apa_test_fill_kind(rng, kind, values, n);
    for (int64_t i = 0; i < n; i++)
        if (dtype == APA_DTYPE_F32)
            ((float *)src)[i] = values[i];
        else
            ((uint16_t *)src)[i] = dtype == APA_DTYPE_F16 ? apa_f32_to_f16(values[i]) : apa_f32_to_bf16(values[i]);
    apa_test_freeze(set, src);
    return src;
}

/* ---- widening ---- */

static void widen_case(const apa_cpu_kernels *kernels, apa_test_rng *rng, apa_test_kind kind, apa_dtype dtype,
                       int64_t n)
{
    apa_test_buffers set = {0};
    const void *src = make_source(&set, rng, kind, dtype, n);
    float *dst = apa_test_take(&set, sizeof(float) * (size_t)n, 4);
    bool finite = true;
    const bool said = kernels->widen(dtype, src, n, dst);
    for (int64_t i = 0; i < n; i++) {
        finite = finite && isfinite(widened(dtype, src, i));
        assert_true(same_bits(dst[i], widened(dtype, src, i)));
    }
    assert_int_equal(said, finite);
    apa_test_buffers_check(&set, "widen");
    apa_test_buffers_free(&set);
}

/* rows rows of n elements, a few apart, as keys and as values from a random key on. */
static void load_case(const apa_cpu_kernels *kernels, apa_test_rng *rng, apa_test_kind kind, apa_dtype dtype, int64_t n)
{
    apa_test_buffers set = {0};
    const int64_t Dp = (n + 7) / 8 * 8, rows = 1 + apa_test_below(rng, 6), at = apa_test_below(rng, TILE - rows + 1);
    const int64_t stride = (n + apa_test_below(rng, 4)) * (int64_t)apa_dtype_bytes(dtype);
    char *src = apa_test_take(&set, (size_t)(rows * stride), apa_dtype_bytes(dtype));
    for (int64_t i = 0; i < rows; i++) {
        apa_test_buffers one = {0};
        memcpy(src + i * stride, make_source(&one, rng, i % 3 == 0 ? kind : APA_TEST_RANDOM, dtype, n),
               (size_t)n * apa_dtype_bytes(dtype));
        apa_test_buffers_free(&one);
    }
    apa_test_freeze(&set, src);
    float *k = apa_test_take(&set, sizeof(float) * (size_t)(rows * Dp), 0);
    float *v = apa_test_take(&set, sizeof(float) * (size_t)(Dp / 8 * APA_CPU_V_BLOCK), 0);
    kernels->load_k(dtype, src, stride, rows, n, Dp, k);
    const uint64_t said = kernels->load_v(dtype, src, stride, rows, n, Dp, at, v);
    uint64_t poison = 0;
    for (int64_t c = 0; c < Dp; c++)
        for (int64_t key = 0; key < TILE; key++) {
            const float found = v[c / 8 * APA_CPU_V_BLOCK + key * 8 + c % 8];
            uint32_t bits;
            memcpy(&bits, &found, sizeof bits);
            if (key < at || key >= at + rows) {
                assert_int_equal(bits, 0xFFFFFFFF); /* other keys are not touched */
                continue;
            }
            const float x = c < n ? widened(dtype, src + (key - at) * stride, c) : 0.0f;
            poison |= (uint64_t)!isfinite(x) << key;
            assert_true(same_bits(found, x));
            assert_true(same_bits(k[(key - at) * Dp + c], x));
        }
    assert_true(said == poison);
    apa_test_buffers_check(&set, "load_k, load_v");
    apa_test_buffers_free(&set);
}

typedef void (*one_case)(const apa_cpu_kernels *, apa_test_rng *, apa_test_kind, apa_dtype, int64_t);

static void every_case(one_case run)
{
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        for (int d = 0; d < 3; d++)
            for (int i = 0; i < LENGTHS; i++)
                for (int kind = 0; kind < APA_TEST_KINDS; kind++)
                    run(level[l].kernels, &rng, (apa_test_kind)kind, dtypes[d], lengths[i]);
    }
}

static void widen(void **state)
{
    (void)state;
    every_case(widen_case);
}

static void load(void **state)
{
    (void)state;
    every_case(load_case);
}

/* Every 16-bit code widens as the formats say, and narrows back to itself (a NaN to a quiet one). */
static void all_codes(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        for (int d = 0; d < 2; d++)
            for (uint32_t start = 0; start < 65536; start += 1000) {
                uint16_t code[1000], back[1000];
                float value[1000];
                const int64_t n = start + 1000 <= 65536 ? 1000 : 65536 - start;
                bool finite = true;
                for (int64_t i = 0; i < n; i++)
                    code[i] = (uint16_t)(start + i);
                const bool said = level[l].kernels->widen(dtypes[d], code, n, value);
                level[l].kernels->narrow(dtypes[d], value, n, back);
                for (int64_t i = 0; i < n; i++) {
                    const float truth = from_code(dtypes[d], code[i]);
                    finite = finite && isfinite(truth);
                    assert_true(same_bits(value[i], truth));
                    const uint16_t quiet = dtypes[d] == APA_DTYPE_F16 ? 0x0200 : 0x0040;
                    assert_int_equal(back[i], isnan(truth) ? code[i] | quiet : code[i]);
                }
                assert_int_equal(said, finite);
            }
}

/* ---- narrowing ---- */

/* Around every boundary of rounding: midpoints of neighbouring 16-bit numbers, and a float either side. */
static void narrow_midpoints(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        for (int d = 0; d < 2; d++)
            for (uint32_t code = 0; code < 0x8000; code += 1) {
                const float low = from_code(dtypes[d], (uint16_t)code),
                            high = from_code(dtypes[d], (uint16_t)(code + 1));
                if (!isfinite(low))
                    continue;
                const float middle = isinf(high) ? (dtypes[d] == APA_DTYPE_F16 ? 65520.0f : 0x1.ffp127f)
                                                 : (float)(((double)low + high) / 2);
                float value[7] = {middle, nextafterf(middle, 0.0f), nextafterf(middle, INFINITY), low};
                for (int i = 0; i < 3; i++)
                    value[4 + i] = -value[i];
                uint16_t got[7];
                level[l].kernels->narrow(dtypes[d], value, 7, got);
                for (int i = 0; i < 7; i++)
                    assert_int_equal(got[i],
                                     dtypes[d] == APA_DTYPE_F16 ? apa_f32_to_f16(value[i]) : apa_f32_to_bf16(value[i]));
            }
}

static void narrow_case(const apa_cpu_kernels *kernels, apa_test_rng *rng, apa_test_kind kind, apa_dtype dtype,
                        int64_t n)
{
    apa_test_buffers set = {0};
    float *value = apa_test_take(&set, sizeof(float) * (size_t)n, 4);
    void *dst = apa_test_take(&set, (size_t)n * apa_dtype_bytes(dtype), apa_dtype_bytes(dtype));
    apa_test_fill_kind(rng, kind, value, n);
    apa_test_freeze(&set, value);
    kernels->narrow(dtype, value, n, dst);
    for (int64_t i = 0; i < n; i++)
        if (dtype == APA_DTYPE_F32)
            assert_true(same_bits(((float *)dst)[i], value[i]));
        else
            assert_int_equal(((uint16_t *)dst)[i],
                             dtype == APA_DTYPE_F16 ? apa_f32_to_f16(value[i]) : apa_f32_to_bf16(value[i]));
    apa_test_buffers_check(&set, "narrow");
    apa_test_buffers_free(&set);
}

static void narrow(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        for (int d = 0; d < 3; d++)
            for (int i = 0; i < LENGTHS; i++)
                for (int kind = 0; kind < APA_TEST_KINDS; kind++)
                    narrow_case(level[l].kernels, &rng, (apa_test_kind)kind, dtypes[d], lengths[i]);
    }
}

/* ---- quantisation ---- */

static void quantise_row_case(const apa_cpu_kernels *kernels, apa_test_buffers *set, const float *value, int64_t n)
{
    int8_t *code = apa_test_take(set, (size_t)n, 1), truth[1024];
    const float scale = kernels->quantise_row(value, n, code), expected = apa_int8_quantise(value, (size_t)n, truth);
    assert_true(same_bits(scale, expected));
    assert_memory_equal(code, truth, (size_t)n);
}

static void quantise_row(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        for (int i = 0; i < LENGTHS; i++)
            for (int kind = 0; kind < APA_TEST_FINITE_KINDS; kind++) {
                apa_test_buffers set = {0};
                float *value = apa_test_take(&set, sizeof(float) * (size_t)lengths[i], 4);
                apa_test_fill_kind(&rng, (apa_test_kind)kind, value, lengths[i]);
                if (kind == APA_TEST_CONSTANT) /* ties: multiples of half a code */
                    for (int64_t d = 0; d < lengths[i]; d++)
                        value[d] = d == 0 ? 127.0f : (float)(apa_test_below(&rng, 509) - 254) * 0.5f;
                apa_test_freeze(&set, value);
                quantise_row_case(level[l].kernels, &set, value, lengths[i]);
                apa_test_buffers_check(&set, "quantise_row");
                apa_test_buffers_free(&set);
            }
    }
}

/* Either side of the least maximum that counts, the largest floats, and all zeros. */
static void quantise_edges(void **state)
{
    (void)state;
    const float most[] = {APA_INT8_AMAX_MIN,
                          nextafterf(APA_INT8_AMAX_MIN, 0.0f),
                          nextafterf(APA_INT8_AMAX_MIN, 1.0f),
                          0x1p-149f,
                          0x1.fffffep127f,
                          0.0f,
                          -0.0f};
    for (int l = 0; l < levels; l++)
        for (int i = 0; i < 7; i++) {
            apa_test_buffers set = {0};
            float *value = apa_test_take(&set, sizeof(float) * 17, 4);
            for (int d = 0; d < 17; d++)
                value[d] = d == 11 ? most[i] : most[i] * 0.4f;
            quantise_row_case(level[l].kernels, &set, value, 17);
            apa_test_buffers_check(&set, "quantise");
            apa_test_buffers_free(&set);
        }
}

/* ---- rotation ---- */

/* The stated order: butterflies of distance 1, 2, 4, …, then one product with 1/sqrt(block) as a float. */
static void rotate(float *x, int64_t n, int64_t block)
{
    float root = 1.0f;
    for (int64_t b = block; b > 1; b /= 4)
        root *= b == 2 ? (float)sqrt(0.5) : 0.5f;
    for (int64_t start = 0; start < n; start += block)
        for (int64_t h = 1; h < block; h *= 2)
            for (int64_t i = 0; i < block; i++)
                if ((i & h) == 0) {
                    const float a = x[start + i], b = x[start + i + h];
                    x[start + i] = a + b;
                    x[start + i + h] = a - b;
                }
    for (int64_t i = 0; i < n && block > 1; i++)
        x[i] *= root;
}

static int parity(uint64_t x)
{
    return __builtin_popcountll(x) & 1;
}

static double matrix_error(const float *before, const float *x, int64_t n, int64_t block)
{
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double truth = 0;
        for (int64_t j = 0; j < block; j++)
            truth += (parity((uint64_t)(i % block & j)) ? -1.0 : 1.0) * before[i / block * block + j];
        truth /= sqrt((double)block);
        error += (x[i] - truth) * (x[i] - truth);
        norm += truth * truth;
    }
    return error == 0 ? 0 : sqrt(error / norm);
}

static void hadamard(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        double worst = 0;
        for (int64_t block = 1; block <= 1024; block *= 2)
            for (int64_t copies = 1; copies * block <= 1024 && copies <= 5; copies += 2)
                for (int kind = 0; kind < APA_TEST_ZERO; kind++) {
                    apa_test_buffers set = {0};
                    const int64_t n = block * copies;
                    float *x = apa_test_take(&set, sizeof(float) * (size_t)n, 4), before[1024], truth[1024];
                    apa_test_fill_kind(&rng, (apa_test_kind)kind, x, n);
                    memcpy(before, x, sizeof(float) * (size_t)n);
                    memcpy(truth, x, sizeof(float) * (size_t)n);
                    rotate(truth, n, block);
                    level[l].kernels->hadamard(x, n, block);
                    assert_memory_equal(x, truth, sizeof(float) * (size_t)n);
                    const double error = matrix_error(before, x, n, block);
                    assert_true(error <= 1e-6);
                    worst = fmax(worst, error);
                    apa_test_buffers_check(&set, "hadamard");
                    apa_test_buffers_free(&set);
                }
        printf("# hadamard %s: worst relative error against the matrix %.2g\n", level[l].name, worst);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(widen),          cmocka_unit_test(load),
        cmocka_unit_test(all_codes),      cmocka_unit_test(narrow_midpoints),
        cmocka_unit_test(narrow),         cmocka_unit_test(quantise_row),
        cmocka_unit_test(quantise_edges), cmocka_unit_test(hadamard),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
