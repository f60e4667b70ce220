/* The BF16 dot product's scores, where a table has them, against chains in double: each pair is rounded twice, and what
 * is under 2^-126 counts as zero. */
#include "support/test.h"

#include "formats/formats.h"
#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define TILE APA_CPU_TILE
#define LANES APA_CPU_LANES

static apa_test_level table[APA_TEST_LEVELS_MAX];
static int tables;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    tables = apa_test_tables(table);
    return 0;
}

static float value_of(uint16_t code)
{
    return apa_bf16_to_f32(code);
}

static void fill(apa_test_rng *rng, apa_test_kind kind, uint16_t *codes, int64_t n)
{
    float values[1024];
    for (int64_t at = 0; at < n; at += 1024) {
        const int64_t some = n - at < 1024 ? n - at : 1024;
        apa_test_fill_kind(rng, kind, values, some);
        for (int64_t i = 0; i < some; i++)
            codes[at + i] = apa_f32_to_bf16(values[i]);
    }
}

/* D roundings of at most half an ulp of the sum of magnitudes, and D sums or products flushed. */
static void check_score(const apa_test_level *level, float found, const uint16_t *q, const uint16_t *k, int64_t Dp)
{
    double truth = 0.0, magnitude = 0.0;
    for (int64_t d = 0; d < Dp; d++) {
        const double x = (double)value_of(q[d / 2 * 2 * LANES + d % 2]) * (double)value_of(k[d]);
        truth += x;
        magnitude += fabs(x);
    }
    if (isnan(truth)) {
        assert_true(isnan(found));
        return;
    }
    if (isinf(truth)) {
        assert_true(found == (float)truth);
        return;
    }
    const double bound = (double)Dp * (0x1p-24 * magnitude + 0x1p-126);
    if (!(fabs((double)found - truth) <= bound))
        fail_msg("%s: %.9g, expected %.9g within %g", level->name, (double)found, truth, bound);
}

static void scores_case(const apa_test_level *level, apa_test_rng *rng, apa_test_kind kind, int n, int64_t Dp)
{
    apa_test_buffers set = {0};
    const uint32_t *q[APA_CPU_PANEL_F32];
    uint16_t *k = apa_test_take(&set, sizeof *k * (size_t)(TILE * Dp), 0);
    float *s = apa_test_take(&set, sizeof *s * (size_t)(TILE * n * LANES), 0);
    fill(rng, kind, k, TILE * Dp);
    apa_test_freeze(&set, k);
    for (int r = 0; r < n; r++) {
        uint16_t *row = apa_test_take(&set, sizeof *row * (size_t)(Dp * LANES), 0);
        fill(rng, kind, row, Dp * LANES);
        apa_test_freeze(&set, row);
        q[r] = (const uint32_t *)(const void *)row;
    }
    float *maximum = apa_test_take(&set, sizeof *s * (size_t)(n * LANES), 0);
    level->kernels->scores_bf16(n, q, k, Dp, s, maximum, NULL);
    for (int i = 0; i < n * LANES; i++) {
        float most = -INFINITY;
        for (int key = 0; key < TILE; key++)
            most = s[key * n * LANES + i] > most ? s[key * n * LANES + i] : most;
        assert_true(maximum[i] == most);
    }
    for (int key = 0; key < TILE; key++)
        for (int r = 0; r < n; r++)
            for (int i = 0; i < LANES; i++)
                check_score(level, s[(key * n + r) * LANES + i], (const uint16_t *)(const void *)q[r] + 2 * i,
                            k + key * Dp, Dp);
    apa_test_buffers_check(&set, "scores_bf16");
    apa_test_buffers_free(&set);
}

static void scores_bf16(void **state)
{
    (void)state;
    static const int64_t widths[] = {8, 16, 40, 64, 128, 256};
    for (int l = 0; l < tables; l++) {
        apa_test_rng rng = {apa_test_seed()};
        if (table[l].kernels->scores_bf16 == NULL) {
            printf("# %s has no BF16 dot product\n", table[l].name);
            continue;
        }
        for (int w = 0; w < 6; w++)
            for (int n = 1; n <= APA_CPU_PANEL_F32; n++)
                for (int kind = 0; kind < APA_TEST_KINDS; kind++)
                    scores_case(&table[l], &rng, (apa_test_kind)kind, n, widths[w]);
    }
}

/* The ceilings do what they say they did. */
static void peaks(void **state)
{
    (void)state;
    static char memory[4096] __attribute__((aligned(64)));
    for (int l = 0; l < tables; l++) {
        const apa_cpu_kernels *kernels = table[l].kernels;
        for (int what = APA_CPU_PEAK_F32; what < APA_CPU_PEAK_READ; what++) {
            const double once = kernels->peak((apa_cpu_peak)what, 10, NULL, 0);
            assert_true(once > 0.0 && kernels->peak((apa_cpu_peak)what, 30, NULL, 0) == 3.0 * once);
        }
        assert_true(kernels->peak(APA_CPU_PEAK_READ, 0, memory, 4096) == 4096.0);
        assert_true(kernels->peak_i8(20) == 2.0 * kernels->peak_i8(10) && kernels->peak_i8(10) > 0.0);
        assert_int_equal(kernels->peak_bf16 == NULL, kernels->scores_bf16 == NULL);
        if (kernels->peak_bf16 != NULL)
            assert_true(kernels->peak_bf16(20) == 2.0 * kernels->peak_bf16(10) && kernels->peak_bf16(10) > 0.0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_bf16),
        cmocka_unit_test(peaks),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
