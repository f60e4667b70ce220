/* look, judge and judge_again of every ISA level: hand cases, and random walks against a transcription in double.
 *
 * Masses and λ agree within a few float roundings and the 2^x of each (REL); decisions must agree wherever the two
 * sides of a comparison are further apart than that. */
#include "support/test.h"

#include "support/buffers.h"
#include "support/levels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define SLACK APA_CPU_FRAME_SLACK
/* 2^x: u·ln 2 per unit of |x|, which is under 126 where the result matters, makes 5.2e-6; the rest (1.1e-7 of the
 * polynomial, products and one sum a tile, 6e-8 each) is weighed by masses that shrink as fast. */
#define REL 6e-6
/* Bounds of skipped tiles: the sum of score and error is rounded before the frame is taken off; |score| is under 4000
 * here, so u·ln 2·4000 = 1.7e-4 of the bound. The kernels keep a factor of two spare. */
#define BOUND_REL 4e-4

static apa_test_level level[APA_TEST_LEVELS_MAX];
static int levels;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    levels = apa_test_tables(level);
    return 0;
}

static apa_cpu_walk empty_walk(uint16_t real)
{
    apa_cpu_walk walk;
    memset(&walk, 0, sizeof walk);
    walk.real = real;
    for (int i = 0; i < LANES; i++) {
        walk.frame[i] = -INFINITY;
        walk.q_scale[i] = 1.0f;
    }
    return walk;
}

static void fill(float *x, float value)
{
    for (int i = 0; i < LANES; i++)
        x[i] = value;
}

/* A padding lane may be skipped before it has seen a key; what it sums up is never looked at. */
static void assert_no_nan(const apa_cpu_walk *walk)
{
    for (int i = 0; i < LANES; i++)
        assert_false((walk->real >> i & 1) != 0 &&
                     (isnan(walk->frame[i]) || isnan(walk->lambda[i]) || isnan(walk->cold[i]) ||
                      isnan(walk->skipped[i]) || isnan(walk->skipped_v[i])));
}

/* ---- hand cases ---- */

/* The first tile has share 1: a candidate for every eps under 1, for eps 1 none; lanes without keys stay empty. */
static void first_tile(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        for (int once = 0; once < 2; once++) {
            const apa_cpu_kernels *kernels = level[l].kernels;
            apa_cpu_walk walk = empty_walk(0x0001);
            float maximum[LANES], top[LANES], alpha[LANES], p_scale[LANES];
            int32_t sum[LANES] = {0};
            fill(maximum, -INFINITY);
            fill(alpha, 1.0f);
            maximum[0] = 3.0f;
            sum[0] = 255 + 51;
            /* Nothing may be skipped before there is a sum. */
            assert_false(kernels->look(&walk, maximum, 0.0f, 1.0f, top));
            assert_true(top[0] == 3.0f && top[1] == -INFINITY && walk.skipped[0] == 0.0f);
            const int judged = kernels->judge(&walk, top, sum, once == 0 ? 0.999f : 1.0f, alpha, p_scale);
            assert_int_equal((judged & APA_CPU_JUDGED_CANDIDATE) != 0, once == 0);
            assert_true(walk.frame[0] == 3.0f && walk.frame[1] == -INFINITY);
            assert_true(fabs(walk.lambda[0] - 1.2) < 1e-6 && walk.lambda[1] == 0.0f);
            assert_true(p_scale[0] == 1.0f / 255.0f && p_scale[1] == 0.0f);
            assert_true(alpha[1] == 1.0f);
            assert_no_nan(&walk);
        }
}

/* A frame lags by the slack and not by more; everything in it moves together. */
static void frame_moves(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        for (int more = 0; more < 2; more++) {
            apa_cpu_walk walk = empty_walk(0xffff);
            float top[LANES], alpha[LANES], p_scale[LANES];
            int32_t sum[LANES];
            for (int i = 0; i < LANES; i++) {
                walk.frame[i] = 1.0f;
                walk.lambda[i] = 256.0f;
                walk.cold[i] = 128.0f;
                walk.skipped[i] = 64.0f;
                walk.skipped_v[i] = 32.0f;
                sum[i] = 255;
                top[i] = 1.0f;
                alpha[i] = 1.0f;
            }
            top[4] = more ? 10.0f : 1.0f + SLACK;
            const int judged = level[l].kernels->judge(&walk, top, sum, 2.0f, alpha, p_scale);
            assert_int_equal(judged, more ? APA_CPU_JUDGED_MOVED : 0);
            assert_true(walk.frame[4] == (more ? 10.0f : 1.0f) && walk.frame[5] == 1.0f);
            if (more) {
                assert_true(alpha[4] == 0x1p-9f && alpha[5] == 1.0f);
                assert_true(walk.lambda[4] == 0.5f + 1.0f && walk.cold[4] == 0.25f);
                assert_true(walk.skipped[4] == 0.125f && walk.skipped_v[4] == 0.0625f);
            } else {
                assert_true(fabs(p_scale[4] - 256.0 / 255.0) < 1e-6 && fabs(walk.lambda[4] - 512.0) < 1e-4);
            }
            assert_true(walk.lambda[5] == 257.0f && walk.cold[5] == 128.0f && walk.skipped[5] == 64.0f);
        }
}

/* What λ will be at least keeps a tile from being a candidate as λ itself does, and moves with the frame; the second
 * look knows λ alone. */
static void floors(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        for (int high = 0; high < 2; high++) {
            const apa_cpu_kernels *kernels = level[l].kernels;
            apa_cpu_walk walk = empty_walk(0xffff);
            float top[LANES], alpha[LANES], p_scale[LANES];
            int32_t sum[LANES];
            fill(walk.frame, 0.0f);
            fill(walk.floor, high ? 100.0f : 1.5f);
            fill(top, 0.0f);
            for (int i = 0; i < LANES; i++)
                sum[i] = 255;
            /* Mass 1 of λ 1, of a floor of 100: over 0.5 of the one, under 0.5 of the other. */
            assert_int_equal(kernels->judge(&walk, top, sum, 0.5f, alpha, p_scale),
                             high ? 0 : APA_CPU_JUDGED_CANDIDATE);
            assert_true(kernels->judge_again(&walk, top, sum, 0.5f, p_scale));
            top[3] = 10.0f;
            kernels->judge(&walk, top, sum, 2.0f, alpha, p_scale);
            assert_true(walk.floor[3] == (high ? 100.0f : 1.5f) * 0x1p-10f && walk.floor[4] == (high ? 100.0f : 1.5f));
        }
}

/* Exactly eps is not more than eps; padding lanes never vote. */
static void edges(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        const apa_cpu_kernels *kernels = level[l].kernels;
        float top[LANES], alpha[LANES], p_scale[LANES];
        int32_t sum[LANES];
        fill(top, 0.0f);
        for (int i = 0; i < LANES; i++)
            sum[i] = 255;
        for (int voters = 0; voters < 3; voters++) {
            apa_cpu_walk walk = empty_walk(voters == 0 ? 0xffff : voters == 1 ? 0x0ffe : 0);
            fill(walk.frame, 0.0f);
            fill(walk.lambda, 1.0f);
            apa_cpu_walk again = walk;
            /* two tiles of mass 1: share one half */
            assert_int_equal(kernels->judge(&walk, top, sum, 0.5f, alpha, p_scale), 0);
            assert_int_equal(kernels->judge(&again, top, sum, nextafterf(0.5f, 0.0f), alpha, p_scale),
                             voters == 2 ? 0 : APA_CPU_JUDGED_CANDIDATE);
            assert_false(kernels->judge_again(&walk, top, sum, 0.5f, p_scale));
            assert_int_equal(kernels->judge_again(&walk, top, sum, nextafterf(0.5f, 0.0f), p_scale), voters != 2);
        }
        /* Only a padding lane has the mass. */
        apa_cpu_walk walk = empty_walk(0x7fff);
        fill(walk.frame, 0.0f);
        fill(walk.lambda, 1000.0f);
        walk.lambda[15] = 0.0f;
        assert_int_equal(kernels->judge(&walk, top, sum, 0.01f, alpha, p_scale), 0);
        assert_false(kernels->judge_again(&walk, top, sum, 0.01f, p_scale));
        walk.real = 0xffff;
        assert_true(kernels->judge_again(&walk, top, sum, 0.01f, p_scale));
    }
}

/* Skipping: only while the sum of all bounds stays under the limit in every real lane; nothing changes otherwise. */
static void skipping(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        const apa_cpu_kernels *kernels = level[l].kernels;
        apa_cpu_walk walk = empty_walk(0xffff);
        float maximum[LANES], top[LANES];
        fill(walk.frame, 0.0f);
        fill(walk.lambda, 1.0f);
        fill(maximum, -33.0f); /* bound 64·2^-33 = 2^-27: two fit under 2^-26, a third does not */
        for (int i = 0; i < 3; i++) {
            const apa_cpu_walk before = walk;
            assert_int_equal(kernels->look(&walk, maximum, 1.0f, 4.0f, top), i < 2);
            assert_true(top[7] == -33.0f);
            if (i == 2)
                assert_memory_equal(&walk, &before, sizeof walk);
        }
        assert_true(walk.skipped[3] == 0x1p-26f && walk.skipped_v[3] == 0x1p-24f);
        /* One real lane says no for all; a padding lane has no say. */
        fill(walk.skipped, 0.0f);
        maximum[2] = -31.0f;
        assert_false(kernels->look(&walk, maximum, 1.0f, 4.0f, top));
        walk.real = 0xfffb;
        assert_true(kernels->look(&walk, maximum, 1.0f, 4.0f, top));
        /* The score's error counts: 8 log2 units of it are too much. */
        walk.real = 0xffff;
        fill(walk.skipped, 0.0f);
        fill(maximum, -39.0f);
        fill(walk.error, 16.0f);
        assert_false(kernels->look(&walk, maximum, 0.5f, 1.0f, top));
        assert_true(kernels->look(&walk, maximum, 0.25f, 1.0f, top));
        /* Error infinite: never, also where the key scale is 0. */
        fill(walk.error, INFINITY);
        assert_false(kernels->look(&walk, maximum, 0.0f, 1.0f, top));
        assert_false(kernels->look(&walk, maximum, 1.0f, 1.0f, top));
        /* A lane that sees no key of the tile adds nothing, whatever its error. */
        fill(maximum, -INFINITY);
        const float kept = walk.skipped[0];
        assert_true(kernels->look(&walk, maximum, 1.0f, 1.0f, top));
        assert_true(walk.skipped[0] == kept);
        assert_no_nan(&walk);
    }
}

/* ---- random walks against double ---- */

typedef struct truth {
    double frame[LANES], lambda[LANES], skipped[LANES], skipped_v[LANES];
} truth;

static bool within_rel(double a, double b, double rel)
{
    return fabs(a - b) <= rel * fmax(fabs(a), fabs(b)) + 1e-37;
}

static bool near(double a, double b)
{
    return within_rel(a, b, REL);
}

/* look(): true when skipped; follows the kernel where rounding decides. */
static bool look_truth(truth *t, const apa_cpu_walk *walk, const float *top, float k_scale_max, float v_max,
                       bool kernel_says)
{
    double bound[LANES];
    bool within = true, close = false;
    for (int i = 0; i < LANES; i++) {
        bound[i] = top[i] == -INFINITY ? 0 : TILE * exp2(top[i] + (double)walk->error[i] * k_scale_max - t->frame[i]);
        if ((walk->real >> i & 1) == 0)
            continue;
        const double sum = t->skipped[i] + bound[i], limit = APA_CPU_SKIP_LIMIT * t->lambda[i];
        within = within && sum <= limit;
        close = close || within_rel(sum, limit, BOUND_REL);
    }
    assert_true(close || within == kernel_says);
    for (int i = 0; i < LANES && kernel_says; i++) {
        t->skipped[i] += bound[i];
        t->skipped_v[i] += bound[i] * v_max;
    }
    return kernel_says;
}

static void judge_truth(truth *t, const apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, int judged)
{
    bool candidate = false, close = false, moved = false;
    for (int i = 0; i < LANES; i++) {
        if (top[i] > t->frame[i] + SLACK) {
            const double factor = exp2(t->frame[i] - top[i]);
            t->frame[i] = top[i];
            t->lambda[i] *= factor;
            t->skipped[i] *= factor;
            t->skipped_v[i] *= factor;
            moved = true;
        }
        const double mass = top[i] == -INFINITY ? 0 : sum[i] * exp2(top[i] - t->frame[i]) / 255;
        t->lambda[i] += mass;
        if ((walk->real >> i & 1) != 0) {
            candidate = candidate || mass > eps * t->lambda[i];
            close = close || near(mass, eps * t->lambda[i]);
        }
    }
    assert_int_equal((judged & APA_CPU_JUDGED_MOVED) != 0, moved);
    assert_true(close || candidate == ((judged & APA_CPU_JUDGED_CANDIDATE) != 0));
}

static void random_tile(apa_test_rng *rng, double spread, float *maximum, int32_t *sum)
{
    for (int i = 0; i < LANES; i++) {
        maximum[i] = apa_test_below(rng, 8) == 0 ? -INFINITY : (float)(spread * apa_test_normal(rng));
        sum[i] = maximum[i] == -INFINITY ? 0 : 255 + (int32_t)apa_test_below(rng, 255 * 63 + 1);
    }
}

static void walk_once(const apa_test_level *at, apa_test_rng *rng, int *skips, int *candidates)
{
    const apa_cpu_kernels *kernels = at->kernels;
    const double spread = pow(10, 2.5 * apa_test_uniform(rng));
    const float eps = (float)exp2(-8 * apa_test_uniform(rng));
    apa_cpu_walk walk = empty_walk((uint16_t)apa_test_bits(rng));
    truth t;
    memset(&t, 0, sizeof t);
    for (int i = 0; i < LANES; i++) {
        t.frame[i] = -INFINITY;
        walk.q_scale[i] = (float)exp2(4 * apa_test_uniform(rng) - 3);
        walk.error[i] = (float)apa_test_uniform(rng);
    }
    for (int tile = 0; tile < 40; tile++) {
        apa_test_buffers set = {0};
        float *maximum = apa_test_take(&set, sizeof(float) * LANES, 4),
              *top = apa_test_take(&set, sizeof(float) * LANES, 8);
        float *alpha = apa_test_take(&set, sizeof(float) * LANES, 12),
              *p_scale = apa_test_take(&set, sizeof(float) * LANES, 4);
        int32_t *sum = apa_test_take(&set, sizeof(int32_t) * LANES, 8);
        const float k_scale_max = (float)apa_test_uniform(rng), v_max = (float)apa_test_uniform(rng);
        random_tile(rng, spread, maximum, sum);
        apa_test_freeze(&set, maximum);
        apa_test_freeze(&set, sum);
        apa_cpu_walk twin = walk;
        float other[LANES];
        const bool skip = kernels->look(&walk, maximum, k_scale_max, v_max, top);
        assert_int_equal(skip, kernels->look(&twin, maximum, k_scale_max, v_max, other));
        assert_memory_equal(&walk, &twin, sizeof walk);
        for (int i = 0; i < LANES; i++)
            assert_true(top[i] == (maximum[i] == -INFINITY ? -INFINITY : maximum[i] * walk.q_scale[i]));
        apa_test_freeze(&set, top);
        if (look_truth(&t, &walk, top, k_scale_max, v_max, skip)) {
            ++*skips;
        } else {
            const int judged = kernels->judge(&walk, top, sum, eps, alpha, p_scale);
            judge_truth(&t, &walk, top, sum, eps, judged);
            *candidates += (judged & APA_CPU_JUDGED_CANDIDATE) != 0;
            for (int i = 0; i < LANES; i++)
                assert_true(near(p_scale[i], top[i] == -INFINITY ? 0 : exp2(top[i] - t.frame[i]) / 255));
            apa_test_freeze(&set, p_scale);
            float again[LANES];
            twin = walk;
            kernels->judge_again(&walk, top, sum, eps, again);
            assert_memory_equal(again, p_scale, sizeof again);
            assert_memory_equal(&walk, &twin, sizeof walk);
        }
        for (int i = 0; i < LANES; i++)
            if ((walk.real >> i & 1) != 0 &&
                !(walk.frame[i] == (float)t.frame[i] && near(walk.lambda[i], t.lambda[i]) &&
                  within_rel(walk.skipped[i], t.skipped[i], BOUND_REL) &&
                  within_rel(walk.skipped_v[i], t.skipped_v[i], BOUND_REL)))
                fail_msg("%s tile %d lane %d: frame %a (%a), λ %a (%a), skipped %a (%a), by v %a (%a)", at->name, tile,
                         i, (double)walk.frame[i], t.frame[i], (double)walk.lambda[i], t.lambda[i],
                         (double)walk.skipped[i], t.skipped[i], (double)walk.skipped_v[i], t.skipped_v[i]);
        assert_no_nan(&walk);
        apa_test_buffers_check(&set, "look, judge");
        apa_test_buffers_free(&set);
    }
}

static void random_walks(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_test_rng rng = {apa_test_seed()};
        int skips = 0, candidates = 0;
        for (int i = 0; i < 200; i++)
            walk_once(&level[l], &rng, &skips, &candidates);
        printf("# walks %s: 8000 tiles, %d skipped, %d candidates\n", level[l].name, skips, candidates);
        assert_true(skips > 100 && candidates > 100);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_tile), cmocka_unit_test(frame_moves), cmocka_unit_test(floors),
        cmocka_unit_test(edges),      cmocka_unit_test(skipping),    cmocka_unit_test(random_walks),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
