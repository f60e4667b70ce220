/* The reference engine's walk: cold formats by hand and against a second writing, verdicts, second look, Jensen's
 * start, the frame collapse, non-finite values, determinism. */
#include "support/test.h"

#include "reference/reference.h"
#include "support/attend.h"
#include "support/fixture.h"
#include "support/problems.h"
#include "support/walk_oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LN2 0.69314718055994530942

static apa_recipe resolved(const apa_test_problem *t, apa_recipe recipe)
{
    apa_call call = apa_test_call(&t->problem, &recipe);
    if (apa_reference_engine.resolve(context, &call) != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
    return call.recipe;
}

static int64_t map_size(const apa_test_problem *t)
{
    return t->shape.B * t->shape.Hq * t->shape.Sq * ((t->shape.Skv + 63) / 64);
}

static uint8_t *new_map(const apa_test_problem *t)
{
    uint8_t *map = malloc((size_t)map_size(t) + 1);
    assert_non_null(map);
    memset(map, 0xEE, (size_t)map_size(t) + 1);
    return map;
}

static apa_test_problem *randn(apa_test_shape shape, uint64_t seed)
{
    apa_test_problem *t = apa_test_make(shape, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_SLICE, seed);
    t->problem.causal = 1;
    return t;
}

/* ---- by hand ---- */

/* scale = ln 2, so scores in log2 units are q·k: 0 and -2. P = 255/255 and rint(63.75) = 64/255. V: 1 and -.5 in a
 * channel of maximum 1 have codes 127 and rint(-63.5) = -64; 0 and 3 are exact. */
static void test_int8_by_hand(void **state)
{
    apa_test_problem *t =
        apa_test_make((apa_test_shape){1, 1, 1, 1, 2, 2, 2}, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 1);
    static const double k[] = {0, 0, -2, 0}, v[] = {1, 0, -0.5, 3};
    const apa_recipe recipe = apa_test_recipe("apa", "cold_format=int8 force=low smooth_k=off");
    (void)state;
    t->problem.softmax_scale = LN2;
    apa_test_set(&t->problem.q, 0, 0, 0, 0, 1);
    apa_test_set(&t->problem.q, 0, 0, 0, 1, 0);
    for (int64_t j = 0; j < 4; ++j) {
        apa_test_set(&t->problem.k, 0, 0, j / 2, j % 2, k[j]);
        apa_test_set(&t->problem.v, 0, 0, j / 2, j % 2, v[j]);
    }
    apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
    assert_true(fabs(apa_test_get(&t->problem.out, 0, 0, 0, 0) - (255 - 64 * 64.0 / 127) / 319) <= 1e-7);
    assert_true(fabs(apa_test_get(&t->problem.out, 0, 0, 0, 1) - 64 * 3.0 / 319) <= 1e-7);
    assert_true(fabs(apa_test_get(&t->problem.lse, 0, 0, 0, 0) - log(319.0 / 255)) <= 1e-7);
    apa_test_free(t);
}

/* scale = ln 2; q = e₀. Row scale 1/2688, block scale 448, code 6: q is exact. Keys 0, -2, -2.5 along e₀: head scale
 * 4·2.5/2688 up to 2^-8, units -512 and -640; amax/6 = 85.3 → 88 and 106.7 → 104, but five codes further up lie 128 and
 * 160, where code 4 is exact: the search finds them. τ = 4: P = 2^-4·{1, 2^-2, 2^-2.5}; the block's scale is the
 * smallest UE4M3 >= 256/16 = 16, so P' = 96·P = 6, 1.5, 1.06 → 1: relative to the first 1, 1/4, 1/6. V: 1, -3, 2 with
 * head scale 2^-7 and block scale 64 are 2, -6, 4: exact. */
static void test_nvfp4_by_hand(void **state)
{
    apa_test_problem *t =
        apa_test_make((apa_test_shape){1, 1, 1, 1, 3, 16, 1}, APA_DTYPE_F32, APA_DTYPE_F64, APA_TEST_HND, 1);
    static const double k[] = {0, -2, -2.5}, v[] = {1, -3, 2};
    apa_recipe recipe = apa_test_recipe("apa", "cold_format=nvfp4 force=low smooth_k=off q_terms=1 lazy_tau=4");
    (void)state;
    t->problem.softmax_scale = LN2;
    apa_test_fill(&t->problem.q, 0);
    apa_test_fill(&t->problem.k, 0);
    apa_test_set(&t->problem.q, 0, 0, 0, 0, 1);
    for (int64_t j = 0; j < 3; ++j) {
        apa_test_set(&t->problem.k, 0, 0, j, 0, k[j]);
        apa_test_set(&t->problem.v, 0, 0, j, 0, v[j]);
    }
    apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
    assert_true(fabs(apa_test_get(&t->problem.out, 0, 0, 0, 0) - (1 - 3.0 / 4 + 2.0 / 6) / (17.0 / 12)) <= 1e-7);
    assert_true(fabs(apa_test_get(&t->problem.lse, 0, 0, 0, 0) - log(17.0 / 12)) <= 1e-7);
    apa_test_free(t);
}

/* ---- against the second writing ---- */

static void compare(apa_test_problem *t, const char *knobs)
{
    const apa_recipe recipe = resolved(t, apa_test_recipe("apa", knobs));
    double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse), closest;
    uint8_t *got = new_map(t), *expected = new_map(t);
    apa_test_run(&apa_reference_engine, context, t, &recipe, got, NULL);
    apa_test_walk_oracle(&t->problem, &recipe, out, lse, expected, &closest);
    const double error = apa_test_rel_l2(&t->problem.out, out), lse_error = apa_test_lse_error(&t->problem.lse, lse);
    assert_true(closest > 1e-12); /* else the seed is a bad one */
    if (!(error <= 1e-11) || !(lse_error <= 1e-11) || memcmp(got, expected, (size_t)map_size(t) + 1) != 0)
        fail_msg("%s: rel_l2 %g, lse %g, verdicts %s", knobs, error, lse_error,
                 memcmp(got, expected, (size_t)map_size(t)) != 0 ? "differ" : "agree");
    assert_false(apa_test_guards_broken(t));
    free(out);
    free(lse);
    free(got);
    free(expected);
}

/* What the Hopper kernels run. */
#define DIRECT                                                                                                         \
    "cold_format=e4m3 pow2_scales=on qk_scale_granularity=warp v_scale_granularity=block p_scale=row-tile-pow2 "       \
    "p_map=direct "

static const char *const recipes[] = {
    "cold_format=int8",
    "cold_format=nvfp4",
    "cold_format=int8 eps=0.07 second_look=off",
    "cold_format=int8 eps=0.07 q_terms=2 smooth_v=on",
    "cold_format=int8 eps=0.07 lambda_bound=jensen second_look=off group=5 packing=rows",
    "cold_format=int8 eps=0.1 hadamard=on smooth_v=on lambda_bound=jensen order=forward",
    "cold_format=int8 eps=1 smooth_k=off",
    "cold_format=int8 eps=0.03 early_tiles=3 group=8",
    "cold_format=int8 eps=0.05 smooth_k_stride=3",
    "cold_format=nvfp4 eps=0.07 second_look=off frame_drop=0 lazy_tau=0 q_terms=1 p_scale=pow2 scale_search=off",
    "cold_format=nvfp4 eps=0.07 frame_drop=3 lazy_tau=1.5",
    "cold_format=nvfp4 eps=0.07 frame_drop=32 lazy_tau=4 smooth_v=on hadamard=on",
    "cold_format=nvfp4 eps=0.12 order=reverse lambda_bound=jensen group=64 packing=head",
    "cold_format=nvfp4 eps=0.12 order=forward smooth_k=off group=1",
    "cold_format=nvfp4 eps=0.09 order=forward group=7 packing=rows early_tiles=2",
    "cold_format=nvfp4 eps=2 p_scale=pow2",
    "cold_format=nvfp4 eps=0",
    DIRECT "eps=0.07",
    DIRECT "eps=0.04 eps_by=row",
    "cold_format=int8 eps=0.05 eps_by=row early_tiles=2 group=5 packing=rows",
    "cold_format=nvfp4 eps=0.12 eps_by=row",
    DIRECT "eps=0.1 smooth_q=on q_mean=head p_phase=on",
    DIRECT "eps=0.08 smooth_q=on smooth_v=on hadamard=on p_phase=on order=forward",
    "cold_format=int8 eps=0.07 smooth_q=on q_mean=head q_terms=2",
};

static void test_second_writing(void **state)
{
    static const apa_test_shape shapes[] = {{1, 2, 1, 35, 333, 32, 24},
                                            {2, 3, 3, 9, 520, 16, 7},
                                            {1, 2, 1, 140, 350, 8, 8},
                                            {1, 6, 2, 17, 128, 64, 64},
                                            {1, 5, 1, 1, 450, 8, 17}};
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; ++i)
        for (size_t k = 0; k < sizeof recipes / sizeof recipes[0]; ++k) {
            apa_test_problem *t = randn(shapes[i], 100 * i + k);
            t->problem.softmax_scale = k % 2 ? 0.6 : NAN;
            compare(t, recipes[k]);
            apa_test_free(t);
        }
}

/* A group whose first tile is out of sight, rows without keys, padding rows, non-causal. */
static void test_second_writing_masks(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof recipes / sizeof recipes[0]; ++k) {
        apa_test_problem *t = randn((apa_test_shape){1, 4, 2, 37, 400, 16, 16}, 40 + k);
        t->problem.softmax_scale = 0.8;
        t->problem.causal = k % 2;
        t->problem.window_left = 90;
        t->problem.window_right = k % 3 == 0 ? -1 : 30;
        t->problem.q_offset = k % 4 == 0 ? -12 : 380;
        compare(t, recipes[k]);
        apa_test_free(t);
    }
}

/* Odd dims: short NVFP4 blocks. */
static void test_second_writing_dims(void **state)
{
    static const int64_t dims[] = {1, 15, 17, 33, 100, 256};
    (void)state;
    for (size_t i = 0; i < 6; ++i) {
        apa_test_problem *t = randn((apa_test_shape){1, 2, 2, 18, 250, dims[i], dims[5 - i]}, 70 + i);
        compare(t, "cold_format=nvfp4 eps=0.11 smooth_v=on");
        compare(t, "cold_format=int8 eps=0.11 smooth_v=on q_terms=2");
        compare(t, DIRECT "eps=0.11 smooth_v=on smooth_q=on q_mean=head p_phase=on");
        apa_test_free(t);
    }
}

/* ---- verdicts ---- */

static void test_eps_ends(void **state)
{
    static const char *const formats[] = {"int8", "nvfp4"};
    (void)state;
    for (int f = 0; f < 2; ++f)
        for (int smooth_v = 0; smooth_v < 2; ++smooth_v) {
            apa_test_problem *t = randn((apa_test_shape){2, 6, 2, 70, 391, 48, 40}, 20);
            double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
            char knobs[200];
            apa_statistics statistics;
            apa_recipe recipe;
            apa_test_oracle(&t->problem, out, lse);
            for (int i = 0; i < 3;
                 ++i) { /* all hot by ε < 0, by force, by early tiles: equal to exact up to rounding */
                static const char *const hot[] = {"eps=-1", "force=high", "eps=0.5 early_tiles=7"};
                snprintf(knobs, sizeof knobs, "cold_format=%s smooth_v=%s %s", formats[f], smooth_v ? "on" : "off",
                         hot[i]);
                recipe = apa_test_recipe("apa", knobs);
                apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, &statistics);
                assert_true(apa_test_rel_l2(&t->problem.out, out) <= 1e-12);
                assert_true(apa_test_lse_error(&t->problem.lse, lse) <= 1e-12);
                assert_true(statistics.hot == statistics.visible && statistics.candidates == statistics.visible);
            }
            unsigned char *kept = malloc(t->bytes[3]);
            assert_non_null(kept);
            for (int i = 0; i < 2; ++i) { /* all cold by ε = 1 and by force: the same bits */
                static const char *const cold[] = {"eps=1 early_tiles=7", "force=low early_tiles=7"};
                snprintf(knobs, sizeof knobs, "cold_format=%s smooth_v=%s %s", formats[f], smooth_v ? "on" : "off",
                         cold[i]);
                recipe = apa_test_recipe("apa", knobs);
                apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, &statistics);
                assert_true(statistics.cold == statistics.visible && statistics.candidates == 0);
                if (i == 0)
                    memcpy(kept, t->memory[3], t->bytes[3]);
                assert_memory_equal(kept, t->memory[3], t->bytes[3]);
                const double error = apa_test_rel_l2(&t->problem.out, out);
                assert_true(error > 1e-4 && error < (f == 0 ? 0.03 : 0.35));
            }
            free(kept);
            free(out);
            free(lse);
            apa_test_free(t);
        }
}

/* Even rows over 64 tiles: the k-th tile's running share is 1/k, so at ε = .021 the first 47 are candidates; the final
 * share of each is 1/64 = .0156: the second look demotes them all. With Jensen's start (exact for even rows) none is.
 */
static void test_even_rows(void **state)
{
    apa_test_problem *t = randn((apa_test_shape){1, 2, 1, 16, 4096, 16, 16}, 1);
    static const char *const knobs[] = {"eps=0.021 second_look=off", "eps=0.021",
                                        "eps=0.021 second_look=off lambda_bound=jensen"};
    static const int64_t candidates[] = {47, 47, 0}, hot[] = {47, 0, 0};
    double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
    (void)state;
    t->problem.causal = 0;
    apa_test_fill(&t->problem.k, 0.25);
    apa_test_oracle(&t->problem, out, lse);
    for (int f = 0; f < 2; ++f)
        for (int i = 0; i < 3; ++i) {
            char text[200];
            apa_statistics statistics;
            snprintf(text, sizeof text, "cold_format=%s %s", f ? "nvfp4" : "int8", knobs[i]);
            const apa_recipe recipe = apa_test_recipe("apa", text);
            apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, &statistics);
            assert_int_equal(statistics.visible, 32 * 64);
            assert_int_equal(statistics.candidates, 32 * candidates[i]);
            assert_int_equal(statistics.hot, 32 * hot[i]);
            assert_true(fabs(statistics.hot_share - (double)hot[i] / 64) <= 1e-12);
            /* equal keys: lse is exact (P is 1 everywhere) */
            assert_true(apa_test_lse_error(&t->problem.lse, lse) <= 1e-6);
            assert_true(apa_test_rel_l2(&t->problem.out, out) < (f ? 0.2 : 0.02));
        }
    free(out);
    free(lse);
    apa_test_free(t);
}

/* Jensen's start never makes a tile cold whose share of the whole row exceeds ε by more than the cold estimate's error,
 * and it spares candidates. */
static void test_jensen_is_sound(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 3; ++seed) {
        apa_test_problem *t = randn((apa_test_shape){1, 3, 1, 50, 2000, 32, 8}, 60 + seed);
        const double eps = 0.06;
        double *lse = apa_test_doubles(&t->problem.lse), *out = apa_test_doubles(&t->problem.out);
        uint8_t *map = new_map(t);
        apa_statistics plain, jensen;
        t->problem.softmax_scale = 0.1 + 0.1 * (double)seed;
        apa_recipe recipe = apa_test_recipe("apa", "cold_format=int8 eps=0.06 second_look=off");
        apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, &plain);
        recipe = apa_test_recipe("apa", "cold_format=int8 eps=0.06 second_look=off lambda_bound=jensen");
        apa_test_run(&apa_reference_engine, context, t, &recipe, map, &jensen);
        apa_test_oracle(&t->problem, out, lse);
        int64_t cold = 0;
        for (int64_t h = 0; h < 3; ++h)
            for (int64_t i = 0; i < 50; ++i)
                for (int64_t tile = 0; tile < 32; ++tile) {
                    double mass = 0;
                    if (map[(h * 50 + i) * 32 + tile] != APA_VERDICT_COLD)
                        continue;
                    ++cold;
                    for (int64_t j = tile * 64; j < tile * 64 + 64 && j < 2000; ++j) {
                        double dot = 0;
                        for (int64_t d = 0; d < 32 && apa_test_sees(&t->problem, i, j); ++d)
                            dot += apa_test_get(&t->problem.q, 0, h, i, d) * apa_test_get(&t->problem.k, 0, 0, j, d);
                        if (apa_test_sees(&t->problem, i, j))
                            mass += exp(t->problem.softmax_scale * dot - lse[h * 50 + i]);
                    }
                    assert_true(mass <= eps * 1.05);
                }
        assert_true(cold == jensen.cold && cold > 0);
        assert_true(jensen.hot < plain.hot);
        free(lse);
        free(out);
        free(map);
        apa_test_free(t);
    }
}

/* The seed's collapse: a sink key 15 log2 units over a tail of 256 tiles that weighs half as much in sum. With δ = 0
 * the sink sets the frame and the tail rounds to zero; with δ = 32 it does not. INT8's P needs no frame. */
static void test_frame_collapse(void **state)
{
    apa_test_problem *t = randn((apa_test_shape){1, 1, 1, 16, 16384 + 64, 16, 16}, 3);
    double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
    static const char *const knobs[] = {"cold_format=nvfp4 frame_drop=0", "cold_format=nvfp4 frame_drop=32",
                                        "cold_format=int8"};
    double error[3], lse_error[3];
    (void)state;
    t->problem.causal = 0;
    t->problem.softmax_scale = LN2;
    apa_test_fill(&t->problem.q, 0);
    apa_test_fill(&t->problem.k, 0);
    for (int64_t i = 0; i < 16; ++i)
        apa_test_set(&t->problem.q, 0, 0, i, 0, 1);
    for (int64_t j = 0; j < t->shape.Skv; ++j) {
        apa_test_set(&t->problem.k, 0, 0, j, 0, j == 0 ? 8 : -7);
        for (int64_t c = 0; c < 16; ++c)
            apa_test_set(&t->problem.v, 0, 0, j, c, j == 0 ? 1 : -2);
    }
    apa_test_oracle(&t->problem, out, lse);
    for (int i = 0; i < 3; ++i) {
        const apa_recipe recipe = apa_test_recipe("apa", knobs[i]);
        apa_statistics statistics;
        apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, &statistics);
        error[i] = apa_test_rel_l2(&t->problem.out, out);
        lse_error[i] = apa_test_lse_error(&t->problem.lse, lse);
        assert_int_equal(statistics.hot, 16); /* the sink tile */
    }
    assert_true(error[0] > 0.5 && lse_error[0] > 0.05);
    assert_true(error[1] < 0.05 && lse_error[1] < 0.02);
    assert_true(error[2] < 0.05 && lse_error[2] < 0.02);
    free(out);
    free(lse);
    apa_test_free(t);
}

/* ---- values ---- */

/* V = 1 gives 1, whatever P is rounded to; V = identity shows every column in its place; rows without keys. */
static void test_identities(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof recipes / sizeof recipes[0]; ++k) {
        apa_test_problem *t = randn((apa_test_shape){1, 4, 2, 40, 192, 32, 192}, 30 + k);
        apa_recipe recipe = apa_test_recipe("apa", recipes[k]);
        double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
        t->problem.q_offset = -2;            /* rows 0 and 1 see nothing */
        recipe.scale_search = APA_TOGGLE_ON; /* without it 1 is not exact in NVFP4 */
        apa_test_fill(&t->problem.v, 1);
        apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
        for (int64_t s = 0; s < 40; ++s)
            for (int64_t c = 0; c < 192; ++c)
                assert_true(fabs(apa_test_get(&t->problem.out, 0, 3, s, c) - (s < 2 ? 0 : 1)) <= 1e-6);
        apa_test_fill(&t->problem.v, 0);
        for (int64_t h = 0; h < 2; ++h)
            for (int64_t j = 0; j < 192; ++j)
                apa_test_set(&t->problem.v, 0, h, j, j, 1);
        apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
        apa_test_oracle(&t->problem, out, lse);
        assert_true(apa_test_rel_l2(&t->problem.out, out) < 0.3);
        assert_true(apa_test_lse_error(&t->problem.lse, lse) < 0.3); /* NaN if -inf is not where it should be */
        free(out);
        free(lse);
        apa_test_free(t);
    }
}

/* Zeros, tiny and huge inputs: finite, and near the exact result where the format carries it. */
static void test_ranges(void **state)
{
    static const double sizes[] = {0, 1e-45, 1e-38, 1e-30, 1e-10, 1e10, 1e18, 3e38};
    (void)state;
    for (size_t k = 0; k < sizeof recipes / sizeof recipes[0]; ++k)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i)
            for (int which = 0; which < 3; ++which) {
                apa_test_problem *t = randn((apa_test_shape){1, 2, 1, 7, 140, 16, 8}, 50);
                const apa_recipe recipe = apa_test_recipe("apa", recipes[k]);
                const apa_tensor *x = which == 0 ? &t->problem.q : which == 1 ? &t->problem.k : &t->problem.v;
                double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
                for (int64_t h = 0; h < x->shape[1]; ++h)
                    for (int64_t s = 0; s < x->shape[2]; ++s)
                        for (int64_t d = 0; d < x->shape[3]; ++d) {
                            const double value = apa_test_get(x, 0, h, s, d);
                            apa_test_set(x, 0, h, s, d, fmax(-1, fmin(1, value / 4)) * sizes[i]);
                        }
                apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
                apa_test_oracle(&t->problem, out, lse);
                for (int64_t h = 0; h < 2; ++h)
                    for (int64_t s = 0; s < 7; ++s)
                        for (int64_t c = 0; c < 8; ++c)
                            assert_true(isfinite(apa_test_get(&t->problem.out, 0, h, s, c)));
                const double error = apa_test_rel_l2(&t->problem.out, out);
                const bool carried = sizes[i] <= 1 && (which < 2 || sizes[i] == 0 || sizes[i] >= 1e-30);
                if (carried && !(error < 0.25))
                    fail_msg("%s, input %d times %g: rel_l2 %g", recipes[k], which, sizes[i], error);
                free(out);
                free(lse);
                apa_test_free(t);
            }
}

/* Logits of ±2.5e5: the winner takes all, in every recipe. */
static void test_huge_logits(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof recipes / sizeof recipes[0]; ++k) {
        apa_test_problem *t = randn((apa_test_shape){1, 1, 1, 3, 300, 16, 4}, 51);
        const apa_recipe recipe = apa_test_recipe("apa", recipes[k]);
        t->problem.causal = 0;
        t->problem.softmax_scale = 1;
        apa_test_fill(&t->problem.q, 125);
        apa_test_fill(&t->problem.k, -125);
        for (int64_t d = 0; d < 16; ++d)
            apa_test_set(&t->problem.k, 0, 0, 201, d, 125);
        apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
        for (int64_t c = 0; c < 4; ++c) {
            const double v = apa_test_get(&t->problem.v, 0, 0, 201, c);
            const double got = apa_test_get(&t->problem.out, 0, 0, 2, c);
            if (!(fabs(got - v) <= 0.3 * fabs(v) + 0.3))
                fail_msg("%s: column %d is %g, not %g", recipes[k], (int)c, got, v);
        }
        assert_true(fabs(apa_test_get(&t->problem.lse, 0, 0, 2, 0) / 2.5e5 - 1) <=
                    0.1); /* 16 equal E2M1 values: 3 % of k - k̄, twice k */
        apa_test_free(t);
    }
}

/* NaN and Inf: rows that see one are as IEEE has them, all others are finite and right; the tile is hot even under
 * force=low; a key beyond a row's sight changes its bits only through nothing at all. */
static void test_non_finite(void **state)
{
    static const double poison[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    for (size_t k = 0; k < sizeof recipes / sizeof recipes[0]; ++k)
        for (int i = 0; i < 9; ++i) {
            apa_test_problem *t = randn((apa_test_shape){1, 2, 1, 100, 200, 16, 8}, 52);
            const apa_tensor *x = i / 3 == 0 ? &t->problem.q : i / 3 == 1 ? &t->problem.k : &t->problem.v;
            const apa_recipe recipe = apa_test_recipe("apa", recipes[k]);
            double *out = apa_test_doubles(&t->problem.out), *lse = apa_test_doubles(&t->problem.lse);
            uint8_t *map = new_map(t);
            apa_test_set(x, 0, 0, i / 3 == 0 ? 50 : 150, 3, poison[i % 3]); /* key 150: seen by rows 50 … 99 */
            apa_test_run(&apa_reference_engine, context, t, &recipe, map, NULL);
            apa_test_oracle(&t->problem, out, lse);
            const double error = apa_test_rel_l2(&t->problem.out, out); /* NaN unless NaN stands where it should */
            if (!(error < 0.3) || !(apa_test_lse_error(&t->problem.lse, lse) < 0.3))
                fail_msg("%s, poison %d: rel_l2 %g", recipes[k], i, error);
            if (i >= 3)
                for (int64_t h = 0; h < 2; ++h)
                    for (int64_t s = 0; s < 100; ++s)
                        assert_int_equal(map[(h * 100 + s) * 4 + 2], s >= 28 ? APA_VERDICT_HOT : APA_VERDICT_INVISIBLE);
            free(out);
            free(lse);
            free(map);
            apa_test_free(t);
        }
    /* q = +Inf against keys that are all negative: every score is -inf, and the smoothing's shift must not make it NaN.
     */
    for (size_t k = 0; k < sizeof recipes / sizeof recipes[0]; ++k) {
        apa_test_problem *inf = randn((apa_test_shape){1, 1, 1, 20, 130, 16, 8}, 54);
        const apa_recipe recipe = apa_test_recipe("apa", recipes[k]);
        for (int64_t j = 0; j < 130; ++j)
            apa_test_set(&inf->problem.k, 0, 0, j, 3, -1);
        apa_test_set(&inf->problem.q, 0, 0, 7, 3, INFINITY);
        apa_test_run(&apa_reference_engine, context, inf, &recipe, NULL, NULL);
        assert_true(apa_test_get(&inf->problem.out, 0, 0, 7, 2) == 0);
        assert_true(apa_test_get(&inf->problem.lse, 0, 0, 7, 0) == -INFINITY);
        assert_true(isfinite(apa_test_get(&inf->problem.out, 0, 0, 8, 2)));
        apa_test_free(inf);
    }
    /* A head whose keys are all NaN has no mean, and does not touch the other head. */
    apa_test_problem *t = randn((apa_test_shape){1, 2, 2, 20, 130, 16, 8}, 53);
    const apa_recipe recipe = apa_test_recipe("apa", "force=low smooth_v=on");
    (void)state;
    for (int64_t j = 0; j < 130; ++j)
        apa_test_set(&t->problem.k, 0, 0, j, 0, NAN);
    apa_test_run(&apa_reference_engine, context, t, &recipe, NULL, NULL);
    assert_true(isnan(apa_test_get(&t->problem.out, 0, 0, 5, 1)) &&
                isfinite(apa_test_get(&t->problem.out, 0, 1, 5, 1)));
    apa_test_free(t);
}

/* The same bits, verdicts and counts with any number of threads. */
static void test_threads(void **state)
{
    const apa_test_shape shape = {2, 6, 2, 33, 450, 16, 16};
    (void)state;
    for (size_t k = 0; k < sizeof recipes / sizeof recipes[0]; ++k) {
        apa_test_problem *t[2];
        apa_statistics statistics[2];
        uint8_t *map[2];
        const apa_recipe recipe = apa_test_recipe("apa", recipes[k]);
        for (int i = 0; i < 2; ++i) {
            apa_context_options options;
            apa_context *own;
            apa_context_options_init(&options);
            options.threads = i == 0 ? 1 : 3;
            assert_int_equal(apa_context_create(&own, &options), APA_STATUS_OK);
            t[i] = randn(shape, 54);
            map[i] = new_map(t[i]);
            apa_test_run(&apa_reference_engine, own, t[i], &recipe, map[i], &statistics[i]);
            apa_context_destroy(own);
        }
        assert_memory_equal(t[0]->memory[3], t[1]->memory[3], t[0]->bytes[3]);
        assert_memory_equal(t[0]->memory[4], t[1]->memory[4], t[0]->bytes[4]);
        assert_memory_equal(map[0], map[1], (size_t)map_size(t[0]) + 1);
        assert_true(statistics[0].hot == statistics[1].hot && statistics[0].candidates == statistics[1].candidates);
        assert_true(statistics[0].skipped == 0 && statistics[0].visible == statistics[1].visible);
        for (int i = 0; i < 2; ++i) {
            free(map[i]);
            apa_test_free(t[i]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_int8_by_hand),
        cmocka_unit_test(test_nvfp4_by_hand),
        cmocka_unit_test(test_second_writing),
        cmocka_unit_test(test_second_writing_masks),
        cmocka_unit_test(test_second_writing_dims),
        cmocka_unit_test(test_eps_ends),
        cmocka_unit_test(test_even_rows),
        cmocka_unit_test(test_jensen_is_sound),
        cmocka_unit_test(test_frame_collapse),
        cmocka_unit_test(test_identities),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_huge_logits),
        cmocka_unit_test(test_non_finite),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
