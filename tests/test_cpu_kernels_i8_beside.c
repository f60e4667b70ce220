/* scores_beside_i8: the bits of scores_i8 of one panel and of softmax_i8 of another, from one place for their scores.
 * For sizes that a kernel has no way for it must say so and leave everything as it was. */
#include "support/test.h"

#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define PANEL APA_CPU_PANEL_I8

static const int64_t dims[] = {8, 64, 72, 80, 96, 128, 136, 192, 256, 1024};
#define DIMS (int)(sizeof dims / sizeof dims[0])

static apa_test_level table[APA_TEST_LEVELS_MAX];
static int tables;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    tables = apa_test_tables(table);
    return 0;
}

typedef struct panels {
    apa_test_buffers set;
    int n;
    int64_t Dp;
    /* the panel to score */
    const uint8_t *q8[PANEL];
    int8_t *k8;
    int32_t *bias;
    float *k_scale;
    /* the panel that is due: its scores, maxima and scales */
    float *before, *most, *q_scale;
} panels;

static void make(panels *x, apa_test_rng *rng, int n, int64_t Dp)
{
    memset(x, 0, sizeof *x);
    x->n = n;
    x->Dp = Dp;
    for (int r = 0; r < n; r++) {
        uint8_t *q8 = apa_test_take(&x->set, (size_t)(Dp * LANES), 0);
        for (int64_t i = 0; i < Dp * LANES; i++)
            q8[i] = (uint8_t)apa_test_below(rng, 256);
        x->q8[r] = q8;
    }
    x->k8 = apa_test_take(&x->set, (size_t)(Dp * TILE), 0);
    x->bias = apa_test_take(&x->set, sizeof(int32_t) * TILE, 4);
    x->k_scale = apa_test_take(&x->set, sizeof(float) * TILE, 4);
    for (int key = 0; key < TILE; key++) {
        x->bias[key] = 0;
        for (int64_t d = 0; d < Dp; d++) {
            x->k8[key * Dp + d] = (int8_t)(apa_test_below(rng, 255) - 127);
            x->bias[key] -= 128 * x->k8[key * Dp + d];
        }
        x->k_scale[key] = key % 9 == 0 ? 0.0f : (float)exp2(20 * apa_test_uniform(rng) - 15);
    }
    x->before = apa_test_take(&x->set, sizeof(float) * (size_t)(TILE * n * LANES), 0);
    x->most = apa_test_take(&x->set, sizeof(float) * (size_t)(n * LANES), 4);
    x->q_scale = apa_test_take(&x->set, sizeof(float) * (size_t)(n * LANES), 4);
    for (int j = 0; j < n * LANES; j++) {
        x->most[j] = -INFINITY;
        x->q_scale[j] = j % 11 == 3 ? 0.0f : (float)exp2(12 * apa_test_uniform(rng) - 6);
        for (int key = 0; key < TILE; key++) {
            const float s = (float)((apa_test_uniform(rng) - 0.5) * 40.0);
            x->before[key * n * LANES + j] = s;
            x->most[j] = fmaxf(x->most[j], s);
        }
    }
    apa_test_freeze(&x->set, x->k8);
    apa_test_freeze(&x->set, x->before);
    apa_test_freeze(&x->set, x->most);
    apa_test_freeze(&x->set, x->q_scale);
}

/* The two kernels one after the other, and both at once. Returns whether there is a way for both at once. */
static bool check(const apa_test_level *at, panels *x)
{
    const int n = x->n;
    const size_t s_bytes = sizeof(float) * (size_t)(TILE * n * LANES), lanes = sizeof(float) * (size_t)(n * LANES);
    float *s = apa_test_take(&x->set, s_bytes, 0), *s_both = apa_test_take(&x->set, s_bytes, 0);
    float *most = apa_test_take(&x->set, lanes, 4), *most_both = apa_test_take(&x->set, lanes, 4);
    uint8_t *p8 = apa_test_take(&x->set, (size_t)(n * TILE * LANES), 0);
    uint8_t *p8_both = apa_test_take(&x->set, (size_t)(n * TILE * LANES), 0);
    int32_t *sum = apa_test_take(&x->set, lanes, 4), *sum_both = apa_test_take(&x->set, lanes, 4);
    apa_cpu_due due = {.maximum = x->most, .p8 = p8_both, .sum = sum_both};
    const char *row = (const char *)x->k8;
    const apa_cpu_prefetch prefetch = {{row, row}, {x->Dp, x->Dp}, {x->Dp, x->Dp}, TILE};
    for (int r = 0; r < n; r++) {
        due.q_scale[r] = x->q_scale + r * LANES;
        at->kernels->softmax_i8(x->before + r * LANES, n, NULL, x->most + r * LANES, x->q_scale + r * LANES,
                                p8 + r * TILE * LANES, sum + r * LANES);
    }
    at->kernels->scores_i8(n, x->q8, x->k8, x->bias, x->k_scale, x->Dp, s, most, NULL);
    memcpy(s_both, x->before, s_bytes);
    if (!at->kernels->scores_beside_i8(n, x->q8, x->k8, x->bias, x->k_scale, x->Dp, s_both, most_both, &prefetch,
                                       &due)) {
        assert_memory_equal(s_both, x->before, s_bytes);
        return false;
    }
    assert_memory_equal(s_both, s, s_bytes);
    assert_memory_equal(most_both, most, lanes);
    assert_memory_equal(p8_both, p8, (size_t)(n * TILE * LANES));
    assert_memory_equal(sum_both, sum, lanes);
    return true;
}

static void both_at_once(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed()};
    for (int t = 0; t < tables; t++) {
        if (table[t].kernels->scores_beside_i8 == NULL) {
            printf("# %s has no scores_beside_i8\n", table[t].name);
            continue;
        }
        int ways = 0;
        for (int i = 0; i < DIMS; i++)
            for (int n = 1; n <= PANEL; n++) {
                panels x;
                make(&x, &rng, n, dims[i]);
                const bool way = check(&table[t], &x);
                apa_test_buffers_check(&x.set, "scores_beside_i8");
                apa_test_buffers_free(&x.set);
                ways += way;
                if (n == PANEL && (dims[i] == 64 || dims[i] == 128))
                    assert_true(way);
            }
        printf("# %s: %d of %d sizes\n", table[t].name, ways, DIMS * PANEL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(both_at_once)};
    return cmocka_run_group_tests(tests, set_up, NULL);
}
