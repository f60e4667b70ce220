/* The exchange of codes: what comes out, what was sent, and what is refused or done in another way and said. */
#include "support/world.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Scores of sigma 2.5, so that some tiles hold much of a row; K with a large constant part, which its mean must take.
 */
static void peaked(apa_test_problem *t)
{
    const apa_tensor *q = &t->problem.q, *k = &t->problem.k;
    for (int64_t h = 0; h < q->shape[1]; h++)
        for (int64_t s = 0; s < q->shape[2]; s++)
            for (int64_t d = 0; d < q->shape[3]; d++)
                apa_test_set(q, 0, h, s, d, 2.5 * apa_test_get(q, 0, h, s, d));
    for (int64_t h = 0; h < k->shape[1]; h++)
        for (int64_t s = 0; s < k->shape[2]; s++)
            apa_test_set(k, 0, h, s, 5, 4.0 + apa_test_get(k, 0, h, s, 5));
}

/* One key holds nine tenths of every row, the rest is even: one tile is hot wherever it lies. */
static void sink(apa_test_problem *t)
{
    const apa_tensor *q = &t->problem.q, *k = &t->problem.k;
    for (int64_t h = 0; h < q->shape[1]; h++)
        for (int64_t s = 0; s < q->shape[2]; s++)
            for (int64_t d = 0; d < q->shape[3]; d++)
                apa_test_set(q, 0, h, s, d,
                             d == 2 ? log(9.0 * (double)k->shape[2]) : 0.25 * apa_test_get(q, 0, h, s, d));
    for (int64_t h = 0; h < k->shape[1]; h++)
        for (int64_t s = 0; s < k->shape[2]; s++)
            apa_test_set(k, 0, h, s, 2, s == 0 ? sqrt((double)k->shape[3]) : 0.0);
}

static world_case codes_case(int64_t Sq, int64_t Skv, const char *preset, const char *settings)
{
    world_case c = world_case_init(Sq, Skv);
    c.dtype = APA_DTYPE_F16;
    c.exchange = APA_DIST_EXCHANGE_CODES;
    c.causal = 1;
    c.preset = preset;
    c.settings = settings;
    return c;
}

/* Against exact attention in double. The recipe's own bound: a cold tile of share x adds x times the format's error, so
 * a row is off by at most sqrt(eps) of that (docs/design.md), for which every tile cold stands here. It holds whatever
 * the tiles are; runs cut them elsewhere than one process does, so which of them are hot differs, and with it the
 * error, by the share of a tile here and there. */
static void check(const world_case *c, world_change change)
{
    world_result r = world_run(c, change);
    double out_error = 0, lse_error = 0, alone = 0, cold = 0;
    if (rank == 0) {
        world_truth truth = world_truth_make(r.whole);
        world_errors(r.whole, &truth, &out_error, &lse_error);
        alone = world_alone(r.whole, &truth, c->preset, c->settings);
        cold = world_alone(r.whole, &truth, "cold", "");
        world_truth_free(&truth);
        printf("# %s %s causal %d: %.2e over ranks, %.2e alone, %.2e cold; %lld of %lld tiles wanted; %.1f %% of f16\n",
               c->preset, c->settings, c->causal, out_error, alone, cold, (long long)r.statistics.wanted_tiles,
               (long long)r.statistics.remote_tiles,
               r.statistics.sent_f16 > 0 ? 100.0 * (double)r.statistics.sent / (double)r.statistics.sent_f16 : 0.0);
    }
    const apa_recipe *ran = &r.statistics.recipe;
    const double bound = (ran->force == APA_FORCE_LOW ? 1.1 : 1.1 * sqrt(ran->eps)) * cold + 2e-5;
    const int32_t exchange = (int32_t)r.statistics.exchange;
    apa_test_free(r.whole);
    world_judge(exchange == APA_DIST_EXCHANGE_CODES && out_error <= bound && lse_error <= 0.01,
                "exchange %d, out %g, bound %g, alone %g, cold %g, lse %g", (int)exchange, out_error, bound, alone,
                cold, lse_error);
}

static void adaptive(void **state)
{
    (void)state;
    for (int split = 0; split < WORLD_SPLITS - 1; split++)
        for (int causal = 0; causal < 2; causal++) {
            world_case c = codes_case(301, 1500, "apa", "eps=0.05");
            c.split = (world_split)split;
            c.causal = causal;
            c.compact = causal;
            check(&c, peaked);
        }
}

static void masks_and_shapes(void **state)
{
    (void)state;
    world_case c = codes_case(300, 1100, "apa", "eps=0.03");
    c.window_left = 260;
    check(&c, peaked);
    c.causal = 0;
    c.window_right = 33;
    c.split = WORLD_RAGGED;
    check(&c, peaked);
    c = codes_case(700, 700, "apa", "eps=0.1");
    c.shape = (apa_test_shape){1, 6, 2, 700, 700, 48, 40};
    c.dtype = APA_DTYPE_BF16;
    check(&c, NULL);
    c.dtype = APA_DTYPE_F32;
    c.shape = (apa_test_shape){2, 2, 2, 130, 600, 24, 136};
    c.q_offset = 333;
    check(&c, NULL);
}

/* Few rows, so that some tiles are hot for one of them and some for none. */
static void some_hot(void **state)
{
    (void)state;
    world_case c = codes_case(21, 3000, "apa", "eps=0.03");
    c.causal = 0;
    c.split = WORLD_BLOCKS;
    check(&c, peaked);
    world_result r = world_run(&c, peaked);
    apa_test_free(r.whole);
    const apa_dist_statistics *s = &r.statistics;
    world_judge(ranks == 1 || s->remote_tiles == 0 || (s->wanted_tiles > 0 && s->wanted_tiles < s->remote_tiles),
                "%lld of %lld tiles wanted", (long long)s->wanted_tiles, (long long)s->remote_tiles);
}

/* The adaptive advantage: half the bytes for the cold tiles, one exact tile of each head. A rank that has not met the
 * sink yet knows that there is much ahead of its rows, so no even tile looks large. */
static void sink_tail(void **state)
{
    (void)state;
    world_case c = codes_case(140, 64 * 64, "apa", "");
    c.shape.D = c.shape.Dv = 64;
    c.split = WORLD_BLOCKS;
    check(&c, sink);
    world_result r = world_run(&c, sink);
    apa_test_free(r.whole);
    apa_dist_statistics all[8];
    world_judge(apa_dist_statistics_gather(dist, &r.statistics, all) == APA_STATUS_OK, "no statistics");
    double sent = 0, f16 = 0;
    for (int32_t i = 0; i < ranks; i++) {
        sent += (double)all[i].sent;
        f16 += (double)all[i].sent_f16;
        world_judge(all[i].wanted_tiles <= c.shape.Hkv, "rank %d wants %lld tiles", (int)i,
                    (long long)all[i].wanted_tiles);
    }
    world_judge(sent <= 0.7 * f16, "%.1f %% of f16", 100 * sent / f16);
}

/* All cold: nothing is asked for. */
static void all_cold(void **state)
{
    (void)state;
    world_case c = codes_case(257, 1500, "cold", "");
    world_result r = world_run(&c, peaked);
    apa_test_free(r.whole);
    world_judge(r.statistics.wanted_tiles == 0 && r.statistics.sent_tiles == 0, "%lld tiles wanted",
                (long long)r.statistics.wanted_tiles);
    check(&c, peaked);
}

/* eps under 0: every tile of other ranks comes in exact form too, the codes' part is taken out, and what is left of it
 * is FP32 rounding of the parts. */
static void all_hot(void **state)
{
    (void)state;
    world_case c = codes_case(300, 1300, "apa", "eps=-1");
    world_result r = world_run(&c, peaked);
    double out_error = 0, lse_error = 0;
    if (rank == 0) {
        world_truth truth = world_truth_make(r.whole);
        world_errors(r.whole, &truth, &out_error, &lse_error);
        world_truth_free(&truth);
        printf("# all hot: %.2e, lse %.2e\n", out_error, lse_error);
    }
    apa_test_free(r.whole);
    world_judge(out_error <= 2e-5 && lse_error <= 2e-5, "out %g, lse %g", out_error, lse_error);
    world_judge(ranks == 1 || r.statistics.wanted_tiles > 0 || r.statistics.remote_tiles == 0, "no tile wanted of %lld",
                (long long)r.statistics.remote_tiles);
}

/* Codes are half of 16 bits, and they are counted. */
static void bytes(void **state)
{
    (void)state;
    world_case c = codes_case(64, 64 * 64, "cold", "");
    c.split = WORLD_BLOCKS;
    c.shape.D = c.shape.Dv = 128;
    c.causal = 0;
    world_result r = world_run(&c, NULL);
    apa_test_free(r.whole);
    const apa_dist_statistics *s = &r.statistics;
    const double share = s->sent_f16 > 0 ? (double)s->sent_codes / (double)s->sent_f16 : 0.53;
    world_judge(s->sent == s->sent_codes + s->sent_tiles + s->sent_lists && share >= 0.52 && share <= 0.56 &&
                    (ranks == 1 || s->sent_f16 > 0),
                "%.1f %% of f16", 100 * share);
    apa_dist_statistics all[8];
    world_judge(apa_dist_statistics_gather(dist, s, all) == APA_STATUS_OK, "no statistics");
    int64_t sent = 0, received = 0;
    for (int32_t i = 0; i < ranks; i++) {
        assert_int_equal(all[i].rank, i);
        sent += all[i].sent;
        received += all[i].received;
    }
    assert_int_equal(sent, received);
}

static void same_bits(void **state)
{
    (void)state;
    world_case c = codes_case(300, 1300, "apa", "eps=0.05");
    c.split = WORLD_RAGGED;
    world_result first = world_run(&c, peaked);
    for (int i = 0; i < 3; i++) {
        world_result again = world_run(&c, peaked);
        const int same = rank != 0 || memcmp(first.whole->problem.out.data, again.whole->problem.out.data,
                                             300 * 4 * 32 * sizeof(float)) == 0;
        apa_test_free(again.whole);
        world_judge(same, "other bits");
    }
    apa_test_free(first.whole);
}

/* A NaN that codes cannot say: its tile is exact for the rows that see it, and the others do not notice. */
static void poison(apa_test_problem *t)
{
    peaked(t);
    apa_test_set(&t->problem.k, 0, 0, 700, 3, NAN);
    apa_test_set(&t->problem.v, 0, 1, 200, 1, INFINITY);
}

static void poisoned_tiles(void **state)
{
    (void)state;
    world_case c = codes_case(1000, 1000, "apa", "eps=0.05");
    world_result r = world_run(&c, poison), clean = world_run(&c, peaked);
    int64_t wrong = 0;
    for (int64_t h = 0; h < 4 && rank == 0; h++)
        for (int64_t s = 0; s < 1000; s++)
            for (int64_t d = 0; d < 32; d++) {
                const double got = apa_test_get(&r.whole->problem.out, 0, h, s, d);
                const double usual = apa_test_get(&clean.whole->problem.out, 0, h, s, d);
                const bool bad = h < 2 ? s >= 700 : s >= 200 && d == 1;
                if ((bad ? isfinite(got) : !(fabs(got - usual) <= 0.05)) && wrong++ == 0)
                    fprintf(stderr, "head %d, row %d, channel %d: %g, without the NaN %g\n", (int)h, (int)s, (int)d,
                            got, usual);
            }
    apa_test_free(r.whole);
    apa_test_free(clean.whole);
    world_judge(wrong == 0, "%lld wrong", (long long)wrong);
}

/* Scores that INT8 cannot judge go the other way, and the statistics say so. */
static void huge(apa_test_problem *t)
{
    for (int64_t s = 0; s < t->shape.Sq; s++)
        for (int64_t d = 0; d < t->shape.D; d++)
            apa_test_set(&t->problem.q, 0, 0, s, d, 300.0 * apa_test_get(&t->problem.q, 0, 0, s, d));
}

static void bad_query(apa_test_problem *t)
{
    apa_test_set(&t->problem.q, 0, 1, 77, 3, NAN);
}

static void said_and_exact(void **state)
{
    (void)state;
    static const struct {
        world_change change;
        const char *says;
    } way[] = {{huge, "log2 units"}, {bad_query, "not finite"}};
    for (int i = 0; i < 2; i++) {
        world_case c = codes_case(300, 900, "apa", "");
        world_result r = world_run(&c, way[i].change);
        int64_t wrong = 0;
        for (int64_t s = 0; s < 300 && rank == 0 && i == 1; s++)
            wrong += (isnan(apa_test_get(&r.whole->problem.out, 0, 1, s, 0)) != 0) != (s == 77);
        apa_test_free(r.whole);
        world_judge(wrong == 0, "%lld rows wrong", (long long)wrong);
        world_judge(r.statistics.exchange == APA_DIST_EXCHANGE_EXACT &&
                        strstr(r.statistics.reason, way[i].says) != NULL,
                    "exchange %d, \"%s\"", (int)r.statistics.exchange, r.statistics.reason);
    }
    world_case c = codes_case(300, 900, "exact", "");
    world_result r = world_run(&c, NULL);
    apa_test_free(r.whole);
    world_judge(r.statistics.exchange == APA_DIST_EXCHANGE_EXACT &&
                    strstr(r.statistics.reason, "no cold tiles") != NULL,
                "exchange %d, \"%s\"", (int)r.statistics.exchange, r.statistics.reason);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adaptive),       cmocka_unit_test(masks_and_shapes), cmocka_unit_test(some_hot),
        cmocka_unit_test(sink_tail),      cmocka_unit_test(all_cold),         cmocka_unit_test(all_hot),
        cmocka_unit_test(bytes),          cmocka_unit_test(same_bits),        cmocka_unit_test(poisoned_tiles),
        cmocka_unit_test(said_and_exact),
    };
    return world_main("dist_codes", tests, sizeof tests / sizeof tests[0]);
}
