/* The INT8 kernels of the CPU engine, every ISA level against integer arithmetic written here.
 *
 * scores_i8 is exact by contract: the integer, converted to float, times the key's scale. softmax_i8 must be within
 * P_BOUND of the true 255·2^x: half a code of rounding, 255·1.0e-4 of the cubic, and the float errors of x and of the
 * cubic (|x|·2^x·ln 2·2^-23·255 at most, under 0.001). All levels must give the same bytes. pv_i8 has an exact integer
 * sum (under 2^24) and at most four roundings after it. */
#include "support/test.h"

#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define PANEL APA_CPU_PANEL_I8
#define U 0x1p-24
#define P_BOUND (0.5 + 255 * 1.03e-4 + 0.001)

static const int64_t dims[] = {8, 16, 24, 64, 72, 128, 136, 256, 1024};
#define DIMS (int)(sizeof dims / sizeof dims[0])

static apa_test_level level[APA_TEST_LEVELS_MAX];
static int levels;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    levels = apa_test_tables(level);
    return 0;
}

/* ---- codes ---- */

typedef enum codes_kind {
    CODES_RANDOM,
    CODES_HIGHEST,
    CODES_LOWEST,
    CODES_ZERO,
    CODES_ONE_HOT,
    CODES_KINDS
} codes_kind;

static int8_t signed_code(apa_test_rng *rng, codes_kind kind)
{
    switch (kind) {
    case CODES_HIGHEST:
        return 127;
    case CODES_LOWEST:
        return -127;
    case CODES_ZERO:
        return 0;
    case CODES_ONE_HOT:
        return (int8_t)(apa_test_below(rng, 64) == 0 ? 127 : 0);
    default:
        return (int8_t)(apa_test_below(rng, 255) - 127);
    }
}

/* ---- scores ---- */

typedef struct scores_data {
    apa_test_buffers set;
    const uint8_t *q8[PANEL];
    int8_t *k8;
    int32_t *bias;
    float *scale;
    int64_t Dp;
} scores_data;

static void make_scores(scores_data *x, apa_test_rng *rng, codes_kind q_kind, codes_kind k_kind, int64_t Dp)
{
    memset(x, 0, sizeof *x);
    x->Dp = Dp;
    for (int r = 0; r < PANEL; r++) {
        uint8_t *q8 = apa_test_take(&x->set, (size_t)(Dp * LANES), 0);
        for (int64_t i = 0; i < Dp * LANES; i++)
            q8[i] = (uint8_t)(signed_code(rng, q_kind) + 128);
        apa_test_freeze(&x->set, q8);
        x->q8[r] = q8;
    }
    x->k8 = apa_test_take(&x->set, (size_t)(Dp * TILE), 0);
    x->bias = apa_test_take(&x->set, sizeof(int32_t) * TILE, 0);
    x->scale = apa_test_take(&x->set, sizeof(float) * TILE, 0);
    for (int key = 0; key < TILE; key++) {
        x->bias[key] = 0;
        for (int64_t d = 0; d < Dp; d++) {
            x->k8[key * Dp + d] = signed_code(rng, k_kind);
            x->bias[key] -= 128 * x->k8[key * Dp + d];
        }
        x->scale[key] = key % 7 == 0 ? 0.0f : (float)exp2(40 * apa_test_uniform(rng) - 30);
    }
    apa_test_freeze(&x->set, x->k8);
    apa_test_freeze(&x->set, x->bias);
    apa_test_freeze(&x->set, x->scale);
}

static float true_score(const scores_data *x, int r, int key, int lane)
{
    int64_t sum = 0;
    for (int64_t d = 0; d < x->Dp; d++)
        sum += ((int64_t)x->q8[r][d / 4 * 4 * LANES + lane * 4 + d % 4] - 128) * x->k8[key * x->Dp + d];
    return (float)sum * x->scale[key];
}

static void check_scores(const apa_test_level *at, scores_data *x, int n)
{
    const size_t bytes = sizeof(float) * (size_t)(TILE * n * LANES);
    float *s = apa_test_take(&x->set, bytes, 0), *again = apa_test_take(&x->set, bytes, 0);
    float *maximum = apa_test_take(&x->set, sizeof(float) * (size_t)(n * LANES), 4), spare[PANEL * LANES];
    const char *row = (const char *)x->k8;
    const apa_cpu_prefetch prefetch = {{row, row}, {x->Dp, x->Dp}, {x->Dp, x->Dp}, TILE};
    at->kernels->scores_i8(n, x->q8, x->k8, x->bias, x->scale, x->Dp, s, maximum, NULL);
    at->kernels->scores_i8(n, x->q8, x->k8, x->bias, x->scale, x->Dp, again, spare, &prefetch);
    assert_memory_equal(s, again, bytes);
    assert_memory_equal(maximum, spare, sizeof(float) * (size_t)(n * LANES));
    for (int j = 0; j < n * LANES; j++) {
        float most = -INFINITY;
        for (int key = 0; key < TILE; key++)
            most = fmaxf(most, s[key * n * LANES + j]);
        assert_true(maximum[j] == most);
    }
    for (int key = 0; key < TILE; key++)
        for (int r = 0; r < n; r++)
            for (int i = 0; i < LANES; i++) {
                const float truth = true_score(x, r, key, i);
                if (!(s[(key * n + r) * LANES + i] == truth))
                    fail_msg("scores_i8 %s, Dp %d, panel of %d, register %d, key %d, lane %d: %a, expected %a",
                             at->name, (int)x->Dp, n, r, key, i, (double)s[(key * n + r) * LANES + i], (double)truth);
            }
}

static void scores(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        for (int i = 0; i < DIMS; i++)
            for (int kind = 0; kind < CODES_KINDS; kind++)
                for (int n = 1; n <= PANEL; n++) {
                    scores_data x;
                    if (dims[i] > 136 && n != 1 + (i + kind) % PANEL)
                        continue; /* one panel each for the large ones */
                    make_scores(&x, &rng, (codes_kind)((kind + n) % CODES_KINDS), (codes_kind)kind, dims[i]);
                    check_scores(&level[l], &x, n);
                    apa_test_buffers_check(&x.set, "scores_i8");
                    apa_test_buffers_free(&x.set);
                }
    }
}

/* ---- maximum and probabilities ---- */

typedef struct tile_data {
    apa_test_buffers set;
    int n, r;
    bool masked;
    float *s, *q_scale, *maximum;
    apa_cpu_span *span;
} tile_data;

static bool sees(const tile_data *x, int lane, int key)
{
    return !x->masked || (x->span->lo[lane] <= key && key < x->span->hi[lane]);
}

static void make_tile(tile_data *x, apa_test_rng *rng, bool masked)
{
    memset(x, 0, sizeof *x);
    x->n = 1 + (int)apa_test_below(rng, PANEL);
    x->r = (int)apa_test_below(rng, x->n);
    x->masked = masked;
    x->s = apa_test_take(&x->set, sizeof(float) * (size_t)(TILE * x->n * LANES), 0);
    x->q_scale = apa_test_take(&x->set, sizeof(float) * LANES, 4);
    x->maximum = apa_test_take(&x->set, sizeof(float) * LANES, 8);
    x->span = apa_test_take(&x->set, sizeof *x->span, 12);
    const double spread = pow(10.0, (double)apa_test_below(rng, 4) - 1);
    for (int i = 0; i < TILE * x->n * LANES; i++)
        x->s[i] = (float)(spread * apa_test_normal(rng));
    if (apa_test_below(rng, 4) == 0)
        apa_test_fill_kind(rng, (apa_test_kind)apa_test_below(rng, APA_TEST_FINITE_KINDS), x->s, TILE * x->n * LANES);
    for (int i = 0; i < LANES; i++) {
        const int32_t a = (int32_t)apa_test_below(rng, TILE + 1), b = (int32_t)apa_test_below(rng, TILE + 1);
        x->q_scale[i] = i == 3 ? 0.0f : (float)exp2(6 * apa_test_uniform(rng) - 4);
        x->span->lo[i] = i == 0 ? 0 : a < b ? a : b;
        x->span->hi[i] = i == 0 ? TILE : i == 1 ? x->span->lo[i] : a < b ? b : a;
    }
    apa_test_freeze(&x->set, x->s);
    apa_test_freeze(&x->set, x->q_scale);
    apa_test_freeze(&x->set, x->span);
}

static void check_maximum(const apa_test_level *at, tile_data *x)
{
    at->kernels->max_i8(x->s + x->r * LANES, x->n, x->masked ? x->span : NULL, x->maximum);
    for (int i = 0; i < LANES; i++) {
        float most = -INFINITY;
        for (int key = 0; key < TILE; key++)
            if (sees(x, i, key) && x->s[(key * x->n + x->r) * LANES + i] > most)
                most = x->s[(key * x->n + x->r) * LANES + i];
        assert_true(x->maximum[i] == most);
    }
}

static void check_probabilities(const apa_test_level *at, const tile_data *x, const uint8_t *p8, const int32_t *sum,
                                double *worst)
{
    for (int i = 0; i < LANES; i++) {
        int32_t total = 0;
        for (int key = 0; key < TILE; key++) {
            const uint8_t p = p8[key / 4 * 4 * LANES + i * 4 + key % 4];
            const float s = x->s[(key * x->n + x->r) * LANES + i];
            total += p;
            if (!sees(x, i, key)) {
                assert_int_equal(p, 0);
                continue;
            }
            if (s == x->maximum[i])
                assert_int_equal(p, 255);
            const double truth = 255 * exp2(((double)s - x->maximum[i]) * x->q_scale[i]), err = fabs(p - truth);
            if (!(err <= P_BOUND))
                fail_msg("softmax_i8 %s: code %d, expected %.4f", at->name, p, truth);
            *worst = err > *worst ? err : *worst;
        }
        assert_int_equal(sum[i], total);
    }
}

static void probabilities(void **state)
{
    (void)state;
    double worst[APA_TEST_LEVELS_MAX] = {0};
    apa_test_rng rng = {apa_test_seed()};
    for (int round = 0; round < 600; round++) {
        tile_data x;
        uint8_t *first = NULL;
        make_tile(&x, &rng, round % 2 == 0);
        for (int l = 0; l < levels; l++) {
            uint8_t *p8 = apa_test_take(&x.set, TILE * LANES, 0), *again = apa_test_take(&x.set, TILE * LANES, 0);
            int32_t *sum = apa_test_take(&x.set, sizeof(int32_t) * LANES, 4), sum_again[LANES];
            const apa_cpu_span *span = x.masked ? x.span : NULL;
            const float *s = x.s + x.r * LANES;
            check_maximum(&level[l], &x);
            level[l].kernels->softmax_i8(s, x.n, span, x.maximum, x.q_scale, p8, sum);
            level[l].kernels->softmax_i8(s, x.n, span, x.maximum, x.q_scale, again, sum_again);
            assert_memory_equal(p8, again, TILE * LANES);
            assert_memory_equal(sum, sum_again, sizeof sum_again);
            check_probabilities(&level[l], &x, p8, sum, &worst[l]);
            if (first != NULL)
                assert_memory_equal(p8, first, TILE * LANES); /* every level gives the bytes of the scalar one */
            first = first == NULL ? p8 : first;
        }
        apa_test_buffers_check(&x.set, "max_i8, softmax_i8");
        apa_test_buffers_free(&x.set);
    }
    for (int l = 0; l < levels; l++)
        printf("# softmax_i8 %s: worst error %.4f of a code\n", level[l].name, worst[l]);
}

/* 255·2^x for every x of a fine grid: the same rounding and the same bytes in every level. */
static void probabilities_sweep(void **state)
{
    (void)state;
    float x = 0.0f, one[LANES];
    double worst = 0;
    int wrong_side = 0, codes = 0;
    for (int i = 0; i < LANES; i++)
        one[i] = 1.0f;
    while (x > -12.0f) {
        float s[TILE * LANES] __attribute__((aligned(64))), maximum[LANES] = {0};
        uint8_t p8[APA_TEST_LEVELS_MAX][TILE * LANES] __attribute__((aligned(64)));
        int32_t sum[LANES];
        for (int i = 0; i < TILE * LANES; i++, x -= 0x1p-15f)
            s[i] = x;
        for (int l = 0; l < levels; l++) {
            level[l].kernels->softmax_i8(s, 1, NULL, maximum, one, p8[l], sum);
            assert_memory_equal(p8[l], p8[0], sizeof p8[l]);
        }
        for (int i = 0; i < TILE * LANES; i++, codes++) {
            const double truth = 255 * exp2((double)s[i]);
            const int p = p8[0][i / LANES / 4 * 4 * LANES + i % LANES * 4 + i / LANES % 4];
            assert_true(fabs(p - truth) <= P_BOUND);
            worst = fmax(worst, fabs(p - truth));
            wrong_side += p != (int)rint(truth);
        }
    }
    printf("# softmax_i8 sweep: worst %.4f of a code, %d of %d codes not the nearest\n", worst, wrong_side, codes);
    assert_true(wrong_side < codes / 20);
}

/* ---- P·V ---- */

static void check_pv(const apa_test_level *at, int64_t Dvp, const uint8_t *p8, const int8_t *v8, const float *v_scale,
                     const float *p_scale, const float *before, const float *o, double *worst)
{
    for (int64_t c = 0; c < Dvp; c++)
        for (int i = 0; i < LANES; i++) {
            int32_t sum = 0;
            for (int key = 0; key < TILE; key++)
                sum += p8[key / 4 * 4 * LANES + i * 4 + key % 4] * v8[(key / 4 * Dvp + c) * 4 + key % 4];
            const double product = (double)sum * v_scale[c] * p_scale[i], truth = before[c * LANES + i] + product;
            const double err = fabs(o[c * LANES + i] - truth);
            const double bound = 2.01 * U * fabs(product) + U * fabs(truth) + 2 * 0x1p-149;
            if (!(err <= bound))
                fail_msg("pv_i8 %s, Dvp %d: error %g, bound %g", at->name, (int)Dvp, err, bound);
            *worst = bound > 0 && err / bound > *worst ? err / bound : *worst;
        }
}

static void pv_case(const apa_test_level *at, apa_test_rng *rng, codes_kind kind, int64_t Dvp, int n, double *worst)
{
    apa_test_buffers set = {0};
    const size_t bytes = sizeof(float) * (size_t)(Dvp * LANES);
    const uint8_t *p8[PANEL];
    const float *p_scale[PANEL];
    float *before[PANEL], *o[PANEL], *again[PANEL], *alone = apa_test_take(&set, bytes, 0);
    int8_t *v8 = apa_test_take(&set, (size_t)(Dvp * TILE), 0);
    float *v_scale = apa_test_take(&set, sizeof(float) * (size_t)Dvp, 0);
    for (int64_t i = 0; i < Dvp * TILE; i++)
        v8[i] = signed_code(rng, kind);
    for (int64_t c = 0; c < Dvp; c++)
        v_scale[c] = c % 5 == 4 ? 0.0f : (float)exp2(30 * apa_test_uniform(rng) - 20);
    apa_test_freeze(&set, v8);
    apa_test_freeze(&set, v_scale);
    for (int r = 0; r < n; r++) {
        uint8_t *p = apa_test_take(&set, TILE * LANES, 0);
        float *scale = apa_test_take(&set, sizeof(float) * LANES, 4);
        for (int i = 0; i < TILE * LANES; i++)
            p[i] = (uint8_t)(kind == CODES_RANDOM   ? apa_test_below(rng, 256)
                             : kind == CODES_LOWEST ? 255 * apa_test_below(rng, 2)
                                                    : 255);
        for (int i = 0; i < LANES; i++)
            scale[i] = i == 2 ? 0.0f : (float)exp2(-20 * apa_test_uniform(rng));
        apa_test_freeze(&set, p);
        apa_test_freeze(&set, scale);
        p8[r] = p;
        p_scale[r] = scale;
        before[r] = apa_test_take(&set, bytes, 0);
        o[r] = apa_test_take(&set, bytes, 0);
        again[r] = apa_test_take(&set, bytes, 0);
        apa_test_fill_kind(rng, r == 0 ? APA_TEST_ZERO : APA_TEST_RANDOM, before[r], Dvp * LANES);
        memcpy(o[r], before[r], bytes);
        memcpy(again[r], before[r], bytes);
    }
    at->kernels->pv_i8(n, p8, v8, v_scale, p_scale, Dvp, o);
    at->kernels->pv_i8(n, p8, v8, v_scale, p_scale, Dvp, again);
    for (int r = 0; r < n; r++) {
        assert_memory_equal(o[r], again[r], bytes);
        check_pv(at, Dvp, p8[r], v8, v_scale, p_scale[r], before[r], o[r], worst);
        memcpy(alone, before[r], bytes);
        at->kernels->pv_i8(1, &p8[r], v8, v_scale, &p_scale[r], Dvp, &alone);
        assert_memory_equal(o[r], alone, bytes);
    }
    apa_test_buffers_check(&set, "pv_i8");
    apa_test_buffers_free(&set);
}

static void pv(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        double worst = 0;
        for (int i = 0; i < DIMS; i++)
            for (int kind = 0; kind < CODES_KINDS; kind++)
                for (int n = 1; n <= PANEL; n++)
                    if (dims[i] <= 136 || n == 1 + (i + kind) % PANEL)
                        pv_case(&level[l], &rng, (codes_kind)kind, dims[i], n, &worst);
        printf("# pv_i8 %s: worst error %.3f of the bound\n", level[l].name, worst);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores),
        cmocka_unit_test(probabilities),
        cmocka_unit_test(probabilities_sweep),
        cmocka_unit_test(pv),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
