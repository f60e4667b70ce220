/* The INT8 kernels of few rows against those over lanes, in every table that has them: the same bits. */
#include "support/test.h"

#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define FEW APA_CPU_FEW

static apa_test_level table[APA_TEST_LEVELS_MAX];
static int tables;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    tables = apa_test_tables(table);
    return 0;
}

static void one_case(const apa_cpu_kernels *kernels, apa_test_rng *rng, int R, int64_t Dp, int64_t Dvp, bool part)
{
    const int64_t Dq = (Dp + 63) / 64 * 64, Do = (Dvp + 15) / 16 * 16;
    apa_test_buffers set = {0};
    uint8_t *q_lanes = apa_test_take(&set, (size_t)(Dp * LANES), 0),
            *q_few = apa_test_take(&set, (size_t)(FEW * Dq), 0);
    int8_t *k8 = apa_test_take(&set, (size_t)(TILE * Dp), 0), *v8 = apa_test_take(&set, (size_t)(TILE * Dvp), 0);
    int32_t *bias = apa_test_take(&set, sizeof(int32_t) * TILE, 0);
    float *k_scale = apa_test_take(&set, sizeof(float) * TILE, 0),
          *v_scale = apa_test_take(&set, sizeof(float) * (size_t)Dvp, 0);
    float *s = apa_test_take(&set, sizeof(float) * TILE * LANES, 0),
          *s_few = apa_test_take(&set, sizeof(float) * TILE * FEW, 0);
    uint8_t *p8 = apa_test_take(&set, TILE * LANES, 0), *p8_few = apa_test_take(&set, TILE * FEW, 0);
    float *o = apa_test_take(&set, sizeof(float) * (size_t)(Dvp * LANES), 0),
          *o_few = apa_test_take(&set, sizeof(float) * (size_t)(Do * FEW), 0);
    float most[2][LANES], q_scale[LANES], p_scale[LANES];
    int32_t sum[2][LANES];
    apa_cpu_span span;
    memset(q_lanes, 128, (size_t)(Dp * LANES));
    for (int r = 0; r < R; r++)
        for (int64_t d = 0; d < Dp; d++) {
            const uint8_t code = (uint8_t)(1 + apa_test_below(rng, 255));
            q_lanes[d / 4 * 4 * LANES + r * 4 + d % 4] = q_few[r * Dq + d] = code;
        }
    for (int key = 0; key < TILE; key++) {
        int32_t total = 0;
        for (int64_t d = 0; d < Dp; d++)
            total += k8[key * Dp + d] = (int8_t)(apa_test_below(rng, 255) - 127);
        bias[key] = -128 * total;
        k_scale[key] = (float)(0.5 + apa_test_uniform(rng));
    }
    for (int64_t i = 0; i < TILE * Dvp; i++)
        v8[i] = (int8_t)(apa_test_below(rng, 255) - 127);
    for (int64_t c = 0; c < Dvp; c++)
        v_scale[c] = (float)apa_test_normal(rng);
    for (int i = 0; i < LANES; i++) {
        q_scale[i] = (float)(1e-4 * apa_test_uniform(rng));
        p_scale[i] = (float)apa_test_uniform(rng);
        span.lo[i] = (int32_t)apa_test_below(rng, TILE);
        span.hi[i] = (int32_t)apa_test_below(rng, TILE + 1);
    }
    for (int64_t i = 0; i < Dvp * LANES; i++)
        o[i] = (float)apa_test_normal(rng);
    memset(o_few, 0, sizeof(float) * (size_t)(Do * FEW));
    for (int r = 0; r < R; r++)
        for (int64_t c = 0; c < Dvp; c++)
            o_few[r * Do + c] = o[c * LANES + r];
    const void *const input[] = {q_lanes, q_few, k8, v8, bias, k_scale, v_scale};
    for (size_t i = 0; i < sizeof input / sizeof input[0]; i++)
        apa_test_freeze(&set, input[i]);
    const uint8_t *const q[1] = {q_lanes}, *const p[1] = {p8};
    float *const out[1] = {o};
    const float *const scale[1] = {p_scale};
    const apa_cpu_span *sees = part ? &span : NULL;

    kernels->scores_i8(1, q, k8, bias, k_scale, Dp, s, most[0], NULL);
    if (part)
        kernels->max_i8(s, 1, &span, most[0]);
    kernels->softmax_i8(s, 1, sees, most[0], q_scale, p8, sum[0]);
    kernels->pv_i8(1, p, v8, v_scale, scale, Dvp, out);
    kernels->scores_few_i8(R, q_few, k8, bias, k_scale, Dp, s_few, NULL);
    kernels->max_few_i8(R, s_few, sees, most[1]);
    kernels->softmax_few_i8(R, s_few, sees, most[1], q_scale, p8_few, sum[1]);
    kernels->pv_few_i8(R, p8_few, v8, v_scale, p_scale, Dvp, o_few);

    for (int r = 0; r < R; r++) {
        for (int key = 0; key < TILE; key++) {
            assert_memory_equal(&s_few[r * TILE + key], &s[key * LANES + r], sizeof(float));
            assert_int_equal(p8_few[r * TILE + key], p8[key / 4 * 4 * LANES + r * 4 + key % 4]);
        }
        assert_true(most[0][r] == most[1][r]);
        assert_int_equal(sum[0][r], sum[1][r]);
        for (int64_t c = 0; c < Dvp; c++)
            assert_memory_equal(&o_few[r * Do + c], &o[c * LANES + r], sizeof(float));
    }
    for (int r = R; r < LANES; r++) {
        assert_true(most[1][r] == -INFINITY);
        assert_int_equal(sum[1][r], 0);
    }
    apa_test_buffers_check(&set, kernels->name);
    apa_test_buffers_free(&set);
}

static void same_bits(void **state)
{
    (void)state;
    static const int64_t dims[] = {8, 16, 24, 64, 72, 128, 192, 256, 1024};
    apa_test_rng rng = {apa_test_seed()};
    int with = 0;
    for (int t = 0; t < tables; t++) {
        if (table[t].kernels->scores_few_i8 == NULL)
            continue;
        with++;
        for (int R = 1; R <= FEW; R++)
            for (int d = 0; d < 9; d++)
                for (int part = 0; part < 2; part++)
                    one_case(table[t].kernels, &rng, R, dims[d], dims[(d + R) % 9], part != 0);
    }
    printf("# %d tables have kernels of few rows\n", with);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bits)};
    return cmocka_run_group_tests_name("cpu_kernels_few_i8", tests, set_up, NULL);
}
