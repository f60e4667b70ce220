/* The kernels between scores and softmax, every table against double: each step by itself and together, NaN, Inf, -inf
 * that selects; and rows into lanes. */
#include "support/test.h"

#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define UNIT 0x1p-23

static apa_test_level table[APA_TEST_LEVELS_MAX];
static int tables;
static double worst;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    tables = apa_test_tables(table);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    printf("# worst error over its bound: %.3g\n", worst);
    return 0;
}

typedef struct lanes_of {
    float factor[LANES], slope[LANES], distance[LANES];
} lanes_of;

/* what: 1 factor, 2 cap, 4 slopes, 8 bias; size: of the scores. */
static void one_case(const apa_cpu_kernels *kernels, apa_test_rng *rng, int n, int what, double size)
{
    apa_test_buffers set = {0};
    float *s = apa_test_take(&set, sizeof(float) * (size_t)(TILE * n * LANES), 0);
    float *bias = apa_test_take(&set, sizeof(float) * TILE * LANES, 0);
    const float cap = (what & 2) != 0 ? (float)(0.5 + 40 * apa_test_uniform(rng)) : 0.0f;
    const int r = (int)apa_test_below(rng, n);
    lanes_of lane;
    double truth[TILE][LANES], bound[TILE][LANES];
    for (int i = 0; i < LANES; i++) {
        lane.factor[i] = (float)apa_test_uniform(rng);
        lane.slope[i] = (float)(0.5 * apa_test_normal(rng));
        lane.distance[i] = (float)(apa_test_below(rng, 4000) - 1000);
    }
    for (int i = 0; i < TILE * n * LANES; i++)
        s[i] = 7.0f;
    for (int key = 0; key < TILE; key++)
        for (int i = 0; i < LANES; i++) {
            const int kind = (int)apa_test_below(rng, 40);
            float x = (float)(size * apa_test_normal(rng)), b = (float)apa_test_normal(rng);
            x = kind == 0 ? NAN : kind == 1 ? INFINITY : kind == 2 ? -INFINITY : kind == 3 ? -0.0f : x;
            b = kind % 7 == 5 ? -INFINITY : b;
            s[(key * n + r) * LANES + i] = x;
            bias[key * LANES + i] = b;
            double y = x, error = 0;
            if ((what & 1) != 0)
                y *= (double)lane.factor[i];
            error += fabs(y) * UNIT;
            if ((what & 2) != 0) {
                y = (double)cap * tanh(y);
                error = 5 * fabs(y) * UNIT; /* an error of y before it is less after: tanh is flat */
            }
            if ((what & 4) != 0) {
                const double d = (double)lane.slope[i] * fabs((double)lane.distance[i] - key);
                y -= d;
                error += (fabs(d) + fabs(y)) * UNIT;
            }
            if ((what & 8) != 0) {
                y = b == -INFINITY ? -INFINITY : y + (double)b;
                error += fabs(y) * UNIT;
            }
            truth[key][i] = y;
            bound[key][i] = error + 1e-44;
        }
    apa_test_freeze(&set, bias);
    kernels->bend(s + r * LANES, n, (what & 1) != 0 ? lane.factor : NULL, cap, (what & 4) != 0 ? lane.slope : NULL,
                  (what & 4) != 0 ? lane.distance : NULL, (what & 8) != 0 ? bias : NULL);
    for (int at = 0; at < TILE * n * LANES; at++) {
        const int key = at / (n * LANES), i = at % LANES;
        if (at / LANES % n != r) {
            assert_true(s[at] == 7.0f);
            continue;
        }
        const double x = (double)s[at], y = truth[key][i];
        if (isnan(y) || isinf(y)) {
            assert_true(isnan(y) ? isnan(x) : x == y);
            continue;
        }
        if (!(fabs(x - y) <= bound[key][i]))
            fail_msg("%s, what %d, cap %g: %.9g, expected %.9g", kernels->name, what, (double)cap, x, y);
        worst = fmax(worst, fabs(x - y) / bound[key][i]);
    }
    apa_test_buffers_check(&set, kernels->name);
    apa_test_buffers_free(&set);
}

static void steps(void **state)
{
    (void)state;
    static const double size[] = {1e-30, 1e-4, 0.05, 0.3, 1, 4, 30, 1e6};
    apa_test_rng rng = {apa_test_seed()};
    for (int t = 0; t < tables; t++)
        for (int what = 0; what < 16; what++)
            for (int i = 0; i < 8; i++)
                for (int n = 1; n <= APA_CPU_PANEL_I8; n++)
                    one_case(table[t].kernels, &rng, n, what, size[i]);
}

static void rows_into_lanes(void **state)
{
    (void)state;
    for (int t = 0; t < tables; t++) {
        apa_test_buffers set = {0};
        float *rows = apa_test_take(&set, sizeof(float) * TILE * LANES, 0);
        float *lanes = apa_test_take(&set, sizeof(float) * TILE * LANES, 0);
        for (int i = 0; i < TILE * LANES; i++)
            rows[i] = (float)i;
        apa_test_freeze(&set, rows);
        table[t].kernels->into_lanes(rows, lanes);
        for (int i = 0; i < LANES; i++)
            for (int key = 0; key < TILE; key++)
                assert_true(lanes[key * LANES + i] == (float)(i * TILE + key));
        apa_test_buffers_check(&set, table[t].name);
        apa_test_buffers_free(&set);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(steps), cmocka_unit_test(rows_into_lanes)};
    return cmocka_run_group_tests_name("cpu_kernels_bend", tests, set_up, tear_down);
}
