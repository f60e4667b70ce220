/* The exact kernels of the CPU engine, every ISA level against double arithmetic written here.
 *
 * Bounds, with u = 2^-24 (half a unit in the last place of 1) and γ(n) = n·u/(1 - n·u), the usual bound of n roundings
 * in a row (Higham, Accuracy and Stability, 3.1), plus n·2^-149 for results that are subnormal:
 *   scores_f32   a chain of Dp products and sums: γ(Dp + 1)·Σ|q·k|. A fused chain has one rounding less a step.
 *   pv_f32       the same over 64 keys, then one add: γ(65)·Σ|p·v| + u·|o + Σ|
 *   softmax_f32  p = 2^x with x = (s - frame)·c: two roundings of u·|x|, each worth ln 2 of relative error in p; the
 *                polynomial 1.6e-8 and its last three roundings 2·2^-23 in all (EXP2_BOUND). Sums: 18 additions of
 *                non-negative numbers, γ(20), on top of the error of each p. */
#include "support/test.h"

#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define PANEL APA_CPU_PANEL_F32
#define U 0x1p-24
#define LEAST 0x1p-149
#define LN_2 0.69314718055994530942
#define EXP2_BOUND (1.6e-8 + 0x1.6p-23)

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

static double gamma_of(int64_t n)
{
    return (double)n * U / (1.0 - (double)n * U);
}

/* Fails unless err <= bound; keeps the worst ratio. A NaN in either fails. */
static void judge(double err, double bound, double *worst, const char *what, const apa_test_level *at, int64_t dim,
                  int n)
{
    if (!(err <= bound))
        fail_msg("%s, %s, dim %d, panel of %d: error %g, bound %g", what, at->name, (int)dim, n, err, bound);
    if (bound > 0 && err / bound > *worst)
        *worst = err / bound;
}

/* ---- scores ---- */

static void check_scores(const apa_test_level *at, int n, const float *const *q, const float *k, int64_t Dp,
                         const float *s, double *worst)
{
    for (int key = 0; key < TILE; key++)
        for (int r = 0; r < n; r++)
            for (int i = 0; i < LANES; i++) {
                double sum = 0, size = 0;
                for (int64_t d = 0; d < Dp; d++) {
                    const double product = (double)q[r][d * LANES + i] * k[key * Dp + d];
                    sum += product;
                    size += fabs(product);
                }
                judge(fabs(s[(key * n + r) * LANES + i] - sum), gamma_of(Dp + 1) * size + (double)(2 * Dp) * LEAST,
                      worst, "scores_f32", at, Dp, n);
            }
}

/* What a panel's scores leave as maxima: the largest of each lane, NaN left out. */
static void check_maxima(int n, const float *s, const float *maximum)
{
    for (int i = 0; i < n * LANES; i++) {
        float most = -INFINITY;
        for (int key = 0; key < TILE; key++)
            most = s[key * n * LANES + i] > most ? s[key * n * LANES + i] : most;
        assert_true(maximum[i] == most);
    }
}

static void scores_case(const apa_test_level *at, apa_test_kind kind, int64_t Dp, apa_test_rng *rng, double *worst)
{
    apa_test_buffers set = {0};
    const size_t row = sizeof(float) * (size_t)(Dp * LANES), tile = sizeof(float) * TILE * LANES;
    const float *q[PANEL];
    float *single[PANEL];
    for (int r = 0; r < PANEL; r++) {
        float *values = apa_test_take(&set, row, 0);
        apa_test_fill_kind(rng, kind, values, Dp * LANES);
        apa_test_freeze(&set, values);
        q[r] = values;
    }
    float *k = apa_test_take(&set, sizeof(float) * (size_t)(TILE * Dp), 0);
    apa_test_fill_kind(rng, kind, k, TILE * Dp);
    apa_test_freeze(&set, k);
    for (int n = 1; n <= PANEL; n++) {
        float *s = apa_test_take(&set, tile * (size_t)n, 0), *again = apa_test_take(&set, tile * (size_t)n, 0);
        at->kernels->scores_f32(n, q, k, Dp, s, NULL, NULL);
        /* Asking for memory on the way, or for the maxima, changes nothing. */
        const apa_cpu_prefetch prefetch = {
            {(const char *)k, (const char *)k}, {4 * Dp, 4 * Dp}, {4 * Dp, 4 * Dp}, TILE};
        float *maximum = apa_test_take(&set, sizeof(float) * (size_t)(n * LANES), 4);
        at->kernels->scores_f32(n, q, k, Dp, again, maximum, &prefetch);
        assert_memory_equal(s, again, tile * (size_t)n);
        check_maxima(n, s, maximum);
        if (n == PANEL)
            check_scores(at, n, q, k, Dp, s, worst);
        /* A register's bits do not depend on its neighbours in the panel. */
        for (int r = 0; r < n; r++) {
            single[r] = apa_test_take(&set, tile, 0);
            at->kernels->scores_f32(1, &q[r], k, Dp, single[r], NULL, NULL);
            for (int key = 0; key < TILE; key++)
                assert_memory_equal(s + (key * n + r) * LANES, single[r] + key * LANES, sizeof(float) * LANES);
        }
    }
    apa_test_buffers_check(&set, "scores_f32");
    apa_test_buffers_free(&set);
}

static void scores(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        double worst = 0;
        for (int i = 0; i < DIMS; i++)
            for (int kind = 0; kind < APA_TEST_FINITE_KINDS; kind++)
                scores_case(&level[l], (apa_test_kind)kind, dims[i], &rng, &worst);
        printf("# scores_f32 %s: worst error %.3f of the bound\n", level[l].name, worst);
    }
}

/* A NaN or Inf touches the scores of its own key and row, no other. */
static void scores_not_finite(void **state)
{
    (void)state;
    static const float bad[3] = {NAN, INFINITY, -INFINITY};
    for (int l = 0; l < levels; l++)
        for (int b = 0; b < 3; b++) {
            apa_test_buffers set = {0};
            apa_test_rng rng = {apa_test_seed()};
            const int64_t Dp = 24;
            float *q = apa_test_take(&set, sizeof(float) * (size_t)(Dp * LANES), 0);
            float *k = apa_test_take(&set, sizeof(float) * (size_t)(Dp * TILE), 0);
            float *s = apa_test_take(&set, sizeof(float) * TILE * LANES, 0);
            apa_test_fill_kind(&rng, APA_TEST_RANDOM, q, Dp * LANES);
            apa_test_fill_kind(&rng, APA_TEST_RANDOM, k, Dp * TILE);
            q[3 * LANES + 5] = bad[b];
            k[17 * Dp + 2] = bad[b];
            float *maximum = apa_test_take(&set, sizeof(float) * LANES, 0);
            level[l].kernels->scores_f32(1, (const float *const[]){q}, k, Dp, s, maximum, NULL);
            check_maxima(1, s, maximum);
            for (int key = 0; key < TILE; key++)
                for (int i = 0; i < LANES; i++)
                    assert_int_equal(!isfinite(s[key * LANES + i]), key == 17 || i == 5);
            apa_test_buffers_check(&set, "scores_f32");
            apa_test_buffers_free(&set);
        }
}

/* ---- P·V ---- */

static void check_pv(const apa_test_level *at, int n, int r, const float *p, const float *v, int64_t Dvp,
                     const float *before, const float *o, double *worst)
{
    for (int64_t c = 0; c < Dvp; c++)
        for (int i = 0; i < LANES; i++) {
            double sum = 0, size = 0;
            for (int key = 0; key < TILE; key++) {
                const double product =
                    (double)p[(key * n + r) * LANES + i] * v[c / 8 * APA_CPU_V_BLOCK + key * 8 + c % 8];
                sum += product;
                size += fabs(product);
            }
            const double truth = before[c * LANES + i] + sum;
            judge(fabs(o[c * LANES + i] - truth),
                  gamma_of(TILE + 1) * (1 + U) * size + U * fabs(truth) + 2 * TILE * LEAST, worst, "pv_f32", at, Dvp,
                  n);
        }
}

static void pv_case(const apa_test_level *at, apa_test_kind kind, int64_t Dvp, int n, apa_test_rng *rng, double *worst)
{
    apa_test_buffers set = {0};
    const size_t bytes = sizeof(float) * (size_t)(Dvp * LANES);
    float *p = apa_test_take(&set, sizeof(float) * (size_t)(TILE * n * LANES), 0);
    float *v = apa_test_take(&set, sizeof(float) * (size_t)(Dvp / 8 * APA_CPU_V_BLOCK), 0);
    float *before[PANEL], *o[PANEL], *again[PANEL], *alone = apa_test_take(&set, bytes, 0);
    for (int64_t i = 0; i < TILE * n * LANES; i++)
        p[i] = apa_test_below(rng, 4) == 0 ? 0.0f : (float)apa_test_uniform(rng);
    apa_test_fill_kind(rng, kind, v, Dvp / 8 * APA_CPU_V_BLOCK);
    apa_test_freeze(&set, p);
    apa_test_freeze(&set, v);
    for (int r = 0; r < n; r++) {
        before[r] = apa_test_take(&set, bytes, 0);
        o[r] = apa_test_take(&set, bytes, 0);
        again[r] = apa_test_take(&set, bytes, 0);
        apa_test_fill_kind(rng, r == 0 ? APA_TEST_ZERO : kind, before[r], Dvp * LANES);
        memcpy(o[r], before[r], bytes);
        memcpy(again[r], before[r], bytes);
    }
    at->kernels->pv_f32(n, p, v, Dvp, o);
    at->kernels->pv_f32(n, p, v, Dvp, again);
    for (int r = 0; r < n; r++) {
        float packed[TILE * LANES] __attribute__((aligned(64)));
        assert_memory_equal(o[r], again[r], bytes);
        check_pv(at, n, r, p, v, Dvp, before[r], o[r], worst);
        for (int key = 0; key < TILE; key++)
            memcpy(packed + key * LANES, p + (key * n + r) * LANES, sizeof(float) * LANES);
        memcpy(alone, before[r], bytes);
        at->kernels->pv_f32(1, packed, v, Dvp, &alone);
        assert_memory_equal(o[r], alone, bytes);
    }
    apa_test_buffers_check(&set, "pv_f32");
    apa_test_buffers_free(&set);
}

static void pv(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        double worst = 0;
        for (int i = 0; i < DIMS; i++)
            for (int kind = 0; kind < APA_TEST_FINITE_KINDS; kind++)
                pv_case(&level[l], (apa_test_kind)kind, dims[i], 1 + (i + kind) % PANEL, &rng, &worst);
        printf("# pv_f32 %s: worst error %.3f of the bound\n", level[l].name, worst);
    }
}

static void scale_lanes(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        for (int rows = 1; rows <= 33; rows += 8) {
            apa_test_buffers set = {0};
            apa_test_rng rng = {apa_test_seed()};
            const int64_t n = rows * LANES;
            float *x = apa_test_take(&set, sizeof(float) * (size_t)n, 0),
                  *alpha = apa_test_take(&set, sizeof(float) * LANES, 4);
            float *before = apa_test_take(&set, sizeof(float) * (size_t)n, 0);
            apa_test_fill_kind(&rng, APA_TEST_OUTLIER, x, n);
            for (int i = 0; i < LANES; i++)
                alpha[i] = i == 3 ? 0.0f : i == 4 ? 1.0f : (float)apa_test_uniform(&rng);
            memcpy(before, x, sizeof(float) * (size_t)n);
            apa_test_freeze(&set, alpha);
            level[l].kernels->scale_lanes(x, rows, alpha);
            for (int64_t i = 0; i < n; i++)
                assert_true(x[i] == before[i] * alpha[i % LANES]);
            apa_test_buffers_check(&set, "scale_lanes");
            apa_test_buffers_free(&set);
        }
}

/* ---- softmax ---- */

typedef struct softmax_case {
    int n, r; /* panel, register */
    float c;
    bool masked;
    apa_cpu_span span;
    apa_cpu_state state;
} softmax_case;

static bool sees(const softmax_case *x, int lane, int key)
{
    return !x->masked || (x->span.lo[lane] <= key && key < x->span.hi[lane]);
}

/* One lane: what the kernel left against double arithmetic on the scores s it was given. */
static void check_softmax_lane(const apa_test_level *at, const softmax_case *x, int i, const float *s, const float *p,
                               const apa_cpu_state *after, const float *alpha, double *worst)
{
    const float before = x->state.frame[i], frame = after->frame[i];
    double most = -INFINITY, sum = 0, sum_error = 0;
    for (int key = 0; key < TILE; key++)
        if (sees(x, i, key))
            most = fmax(most, s[key * x->n * LANES + i]);
    const double rise = (most - before) * x->c, slack = 3 * U * fabs(rise) + LEAST;
    /* The frame moves exactly when the rule says so, and to the maximum itself; within the rounding of the rise both
     * are right. A first score always moves it. */
    if (most == -INFINITY)
        assert_true(frame == before);
    else if (before == -INFINITY)
        assert_true(frame == most);
    else if (frame != before)
        assert_true(frame == most && rise + slack > APA_CPU_FRAME_SLACK);
    else
        assert_true(rise - slack <= APA_CPU_FRAME_SLACK);
    if (frame == before) {
        assert_true(alpha[i] == 1.0f);
    } else {
        const double move = before == -INFINITY ? -INFINITY : ((double)before - frame) * x->c, scaled = exp2(move);
        const double error = scaled > 0 ? scaled * (EXP2_BOUND + LN_2 * 2.01 * U * fabs(move)) : 0;
        judge(fabs(alpha[i] - scaled), error + LEAST, worst, "alpha", at, 0, x->n);
    }
    for (int key = 0; key < TILE; key++) {
        const float got = p[key * x->n * LANES + i];
        if (!sees(x, i, key)) {
            assert_true(got == 0.0f);
            continue;
        }
        /* a difference and a product, each rounded once */
        const double argument = ((double)s[key * x->n * LANES + i] - frame) * x->c;
        const double truth = exp2(argument), rounded = LN_2 * 2.01 * U * fabs(argument);
        judge(fabs(got - truth), truth * (EXP2_BOUND + 1.01 * rounded) + LEAST, worst, "softmax_f32", at, 0, x->n);
        sum += got;
        sum_error += got;
    }
    const double old = (double)x->state.sum[i] * alpha[i];
    judge(fabs(after->sum[i] - (old + sum)), gamma_of(20) * (old + sum_error) + LEAST, worst, "softmax_f32 sum", at, 0,
          x->n);
}

static void run_softmax(const apa_test_level *at, softmax_case *x, const float *s, double *worst)
{
    apa_test_buffers set = {0};
    const size_t bytes = sizeof(float) * (size_t)(TILE * x->n * LANES);
    float *p = apa_test_take(&set, bytes, 0), *again = apa_test_take(&set, bytes, 0);
    float *alpha = apa_test_take(&set, sizeof(float) * LANES, 0);
    apa_cpu_state *after = apa_test_take(&set, sizeof *after, 0), state = x->state;
    apa_cpu_span *span = apa_test_take(&set, sizeof *span, 0);
    memcpy(p, s, bytes);
    memcpy(again, s, bytes);
    *after = x->state;
    *span = x->span;
    apa_test_freeze(&set, span);
    float *at_register = p + x->r * LANES, other[LANES], maximum[LANES];
    for (int i = 0; i < LANES; i++) {
        maximum[i] = -INFINITY;
        for (int key = 0; key < TILE; key++)
            maximum[i] =
                at_register[key * x->n * LANES + i] > maximum[i] ? at_register[key * x->n * LANES + i] : maximum[i];
    }
    const bool moved = at->kernels->softmax_f32(at_register, x->n, x->c, x->masked ? span : NULL, NULL, after, alpha);
    at->kernels->softmax_f32(again + x->r * LANES, x->n, x->c, x->masked ? span : NULL, x->masked ? NULL : maximum,
                             &state, other);
    assert_memory_equal(p, again, bytes);
    assert_memory_equal(after, &state, sizeof state);
    assert_memory_equal(alpha, other, sizeof other);
    bool any = false;
    for (int i = 0; i < LANES; i++) {
        any = any || alpha[i] != 1.0f;
        check_softmax_lane(at, x, i, s + x->r * LANES, at_register, after, alpha, worst);
    }
    assert_int_equal(moved, any);
    /* The panel's other registers are left alone. */
    for (int key = 0; key < TILE; key++)
        for (int r = 0; r < x->n; r++)
            if (r != x->r)
                assert_memory_equal(p + (key * x->n + r) * LANES, s + (key * x->n + r) * LANES, sizeof(float) * LANES);
    apa_test_buffers_check(&set, "softmax_f32");
    apa_test_buffers_free(&set);
}

static void random_softmax(const apa_test_level *at, apa_test_rng *rng, double *worst)
{
    static const float scales[] = {0.0f, 0.18f, 1.0f, 1.4426950f};
    softmax_case x = {.n = 1 + (int)apa_test_below(rng, APA_CPU_PANEL_I8)};
    x.r = (int)apa_test_below(rng, x.n);
    x.c = scales[apa_test_below(rng, 4)];
    x.masked = apa_test_below(rng, 2) == 0;
    float s[TILE * APA_CPU_PANEL_I8 * LANES];
    const double spread = pow(10.0, (double)apa_test_below(rng, 5) - 1.0);
    for (int i = 0; i < TILE * x.n * LANES; i++)
        s[i] = (float)(spread * apa_test_normal(rng));
    for (int i = 0; i < LANES; i++) {
        const bool empty = apa_test_below(rng, 4) == 0;
        x.state.frame[i] = empty ? -INFINITY : (float)(spread * apa_test_normal(rng));
        x.state.sum[i] = empty ? 0.0f : (float)(1000 * apa_test_uniform(rng));
        const int32_t a = (int32_t)apa_test_below(rng, TILE + 1), b = (int32_t)apa_test_below(rng, TILE + 1);
        x.span.lo[i] = i == 0 ? 0 : a < b ? a : b; /* lane 0 full, lane 1 empty, the rest anything */
        x.span.hi[i] = i == 0 ? TILE : i == 1 ? x.span.lo[i] : a < b ? b : a;
        if (x.masked && i == 2) /* whatever stands in a key that no one sees */
            for (int key = 0; key < TILE; key++)
                if (!sees(&x, i, key))
                    s[(key * x.n + x.r) * LANES + i] = key % 3 == 0 ? NAN : key % 3 == 1 ? INFINITY : -INFINITY;
    }
    run_softmax(at, &x, s, worst);
}

static void softmax(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        double worst = 0;
        for (int i = 0; i < 400; i++)
            random_softmax(&level[l], &rng, &worst);
        printf("# softmax_f32 %s: worst error %.3f of the bound\n", level[l].name, worst);
    }
}

/* The frame moves for more than the slack and not for the slack itself; a first key always moves it. */
static void softmax_frame(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_cpu_state x;
        float s[TILE * LANES] __attribute__((aligned(64))), alpha[LANES];
        for (int i = 0; i < LANES; i++) {
            x.frame[i] = i == 0 ? -INFINITY : 2.0f;
            x.sum[i] = i == 0 ? 0.0f : 1.0f;
            for (int key = 0; key < TILE; key++)
                s[key * LANES + i] = -30.0f;
        }
        s[7 * LANES + 1] = 10.0f;                    /* exactly the slack over the frame: stays */
        s[9 * LANES + 2] = nextafterf(10.0f, 11.0f); /* more than it: moves */
        s[63 * LANES + 3] = 200.0f;                  /* leaps */
        assert_true(level[l].kernels->softmax_f32(s, 1, 1.0f, NULL, NULL, &x, alpha));
        assert_true(x.frame[0] == -30.0f && alpha[0] == 0.0f && x.sum[0] == 64.0f);
        assert_true(x.frame[1] == 2.0f && alpha[1] == 1.0f && s[7 * LANES + 1] == 256.0f);
        assert_true(x.frame[2] == nextafterf(10.0f, 11.0f) && s[9 * LANES + 2] == 1.0f);
        assert_true(x.frame[3] == 200.0f && s[63 * LANES + 3] == 1.0f && x.sum[3] == 1.0f);
        assert_true(x.frame[4] == 2.0f && alpha[4] == 1.0f);
        /* Nothing moves any more: false, and sums grow by what is added. */
        float t[TILE * LANES] __attribute__((aligned(64)));
        memset(t, 0, sizeof t);
        x.frame[0] = x.frame[3] = 0.0f;
        assert_false(level[l].kernels->softmax_f32(t, 1, 0.0f, NULL, NULL, &x, alpha));
        for (int i = 0; i < LANES; i++)
            assert_true(alpha[i] == 1.0f);
    }
}

/* Scores of -inf weigh nothing, also when a lane has seen nothing else; NaN and +inf make the row NaN. */
static void softmax_not_finite(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_cpu_state x;
        float s[TILE * LANES] __attribute__((aligned(64))), alpha[LANES];
        for (int i = 0; i < LANES; i++) {
            x.frame[i] = -INFINITY;
            x.sum[i] = 0.0f;
        }
        for (int j = 0; j < TILE * LANES; j++)
            s[j] = j % LANES == 0 ? -INFINITY : 0.0f;
        s[5 * LANES + 1] = -INFINITY;
        s[5 * LANES + 2] = NAN;
        s[5 * LANES + 3] = INFINITY;
        level[l].kernels->softmax_f32(s, 1, 1.0f, NULL, NULL, &x, alpha);
        assert_true(x.frame[0] == -INFINITY && x.sum[0] == 0.0f && s[9 * LANES] == 0.0f);
        assert_true(x.sum[1] == 63.0f && s[5 * LANES + 1] == 0.0f);
        assert_true(isnan(x.sum[2]) && isnan(s[5 * LANES + 2]));
        assert_true(isnan(x.sum[3]));
        assert_true(x.sum[4] == 64.0f);
        /* The state goes on from there as if those keys had not been. */
        for (int j = 0; j < TILE * LANES; j++)
            s[j] = 3.0f;
        level[l].kernels->softmax_f32(s, 1, 1.0f, NULL, NULL, &x, alpha);
        assert_true(x.frame[0] == 3.0f && x.sum[0] == 64.0f);
        assert_true(isnan(x.sum[2]) && isnan(x.sum[3]));
    }
}

/* 2^x over [-160, 8] in steps of 2^-13, and at whole numbers. */
static void exponential(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        double worst = 0;
        float x = -160.0f;
        while (x < 8.0f) {
            apa_cpu_state frame = {{0}, {0}};
            float s[TILE * LANES] __attribute__((aligned(64))), at[TILE * LANES], alpha[LANES];
            for (int i = 0; i < TILE * LANES; i++, x += 0x1p-13f)
                at[i] = s[i] = x < 8.0f ? x : 8.0f;
            level[l].kernels->softmax_f32(s, 1, 1.0f, NULL, NULL, &frame, alpha);
            for (int i = 0; i < TILE * LANES; i++) {
                const double truth = exp2((double)at[i]), err = fabs(s[i] - truth);
                if (!(err <= truth * EXP2_BOUND + LEAST))
                    fail_msg("exp2 %s at %a: %a, expected %a", level[l].name, (double)at[i], (double)s[i], truth);
                if (at[i] == rintf(at[i]) && at[i] >= -149.0f)
                    assert_true((double)s[i] == truth);
                if (truth >= 0x1p-126 && err / truth > worst)
                    worst = err / truth;
            }
        }
        printf("# exp2 %s: worst relative error %.3g (%.2f of 2^-23) over [-126, 8]\n", level[l].name, worst,
               worst * 0x1p23);
    }
}

/* ---- states ---- */

/* Two states against double: each weight within the exponential's bound and its argument's roundings, each sum in two
 * more roundings. */
static void merge_case(const apa_test_level *at, apa_test_rng *rng, int rows, float c, double *worst)
{
    apa_test_buffers set = {0};
    const int64_t n = rows * LANES;
    const size_t bytes = sizeof(float) * (size_t)n;
    apa_cpu_state *left = apa_test_take(&set, sizeof *left, 0), *own = apa_test_take(&set, sizeof *own, 0), before;
    float *left_o = apa_test_take(&set, bytes, 0), *o = apa_test_take(&set, bytes, 0);
    float *was = apa_test_take(&set, bytes, 0);
    apa_test_fill_kind(rng, APA_TEST_RANDOM, left_o, n);
    apa_test_fill_kind(rng, APA_TEST_RANDOM, o, n);
    for (int i = 0; i < LANES; i++) {
        /* lanes 0 and 3 have no left state, 1 and 3 no right one, 2 has equal frames */
        left->frame[i] = i == 0 || i == 3 ? -INFINITY : (float)(20 * apa_test_normal(rng));
        own->frame[i] = i == 1 || i == 3 ? -INFINITY : i == 2 ? left->frame[i] : (float)(20 * apa_test_normal(rng));
        left->sum[i] = left->frame[i] == -INFINITY ? 0.0f : (float)(1000 * apa_test_uniform(rng));
        own->sum[i] = own->frame[i] == -INFINITY ? 0.0f : (float)(1000 * apa_test_uniform(rng));
        for (int64_t row = 0; row < rows; row++) {
            left_o[row * LANES + i] *= left->frame[i] == -INFINITY ? 0.0f : 1.0f;
            o[row * LANES + i] *= own->frame[i] == -INFINITY ? 0.0f : 1.0f;
        }
    }
    memcpy(was, o, bytes);
    before = *own;
    apa_test_freeze(&set, left);
    apa_test_freeze(&set, left_o);
    at->kernels->merge_lanes(left, left_o, c, rows, own, o);
    for (int i = 0; i < LANES; i++) {
        const double a = left->frame[i], b = before.frame[i], most = a > b ? a : b;
        const double x = a == most ? 0 : (a - most) * c, y = b == most ? 0 : (b - most) * c;
        const double wa = a == most        ? 1
                          : a == -INFINITY ? 0
                                           : exp2(x),
                     wb = b == most        ? 1
                          : b == -INFINITY ? 0
                                           : exp2(y);
        const double ea = wa > 0 ? EXP2_BOUND + LN_2 * 2.01 * U * fabs(x) : 0;
        const double eb = wb > 0 ? EXP2_BOUND + LN_2 * 2.01 * U * fabs(y) : 0;
        assert_true((double)own->frame[i] == most);
        for (int64_t row = -1; row < rows; row++) {
            const int64_t j = row * LANES + i;
            const double p = row < 0 ? left->sum[i] : left_o[j], q = row < 0 ? before.sum[i] : was[j];
            const float got = row < 0 ? own->sum[i] : o[j];
            judge(fabs(got - (p * wa + q * wb)),
                  fabs(p * wa) * (ea + gamma_of(2)) + fabs(q * wb) * (eb + gamma_of(2)) + 4 * LEAST, worst,
                  "merge_lanes", at, rows, 1);
            if (i < 2) /* an empty state changes no bit */
                assert_true(got == (float)(i == 0 ? q : p));
        }
    }
    apa_test_buffers_check(&set, "merge_lanes");
    apa_test_buffers_free(&set);
}

static void merge_lanes(void **state)
{
    (void)state;
    static const float scales[] = {0.0f, 0.18f, 1.4426950f, 30.0f};
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        double worst = 0;
        for (int i = 0; i < 64; i++)
            merge_case(&level[l], &rng, 1 + i % 40, scales[i % 4], &worst);
        printf("# merge_lanes %s: worst error %.3f of the bound\n", level[l].name, worst);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores),        cmocka_unit_test(scores_not_finite),  cmocka_unit_test(pv),
        cmocka_unit_test(scale_lanes),   cmocka_unit_test(merge_lanes),        cmocka_unit_test(softmax),
        cmocka_unit_test(softmax_frame), cmocka_unit_test(softmax_not_finite), cmocka_unit_test(exponential),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
