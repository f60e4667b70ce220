/* Attention over several ranks against attention in one process: the exact exchange, sharded and whole queries. */
#include "support/world.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Exact: FP32 rounding of scores, exponentials and sums, as one process has it, and one rounding of the merged state
 * (the parts' LSE are FP32: 2^-24 of a number up to 10, so 6e-7 of a weight). */
#define EXACT_BOUND 3e-6

static const char *split_name(world_split split)
{
    static const char *const names[] = {"zigzag", "blocks", "ragged", "one"};
    return names[split];
}

static void check_exact(const world_case *c)
{
    world_result r = world_run(c, NULL);
    double out_error = 0, lse_error = 0;
    if (rank == 0) {
        world_truth truth = world_truth_make(r.whole);
        world_errors(r.whole, &truth, &out_error, &lse_error);
        world_truth_free(&truth);
    }
    apa_test_free(r.whole);
    world_judge(out_error <= EXACT_BOUND && lse_error <= EXACT_BOUND,
                "%s, causal %d, window %d,%d, Sq %d, Skv %d: out %g, lse %g", split_name(c->split), c->causal,
                (int)c->window_left, (int)c->window_right, (int)c->shape.Sq, (int)c->shape.Skv, out_error, lse_error);
}

static void exact_over_splits_and_masks(void **state)
{
    (void)state;
    static const struct {
        int64_t Sq, Skv, q_offset, left, right;
        int causal;
    } mask[] = {
        {333, 333, APA_Q_OFFSET_DEFAULT, -1, -1, 1},
        {333, 701, APA_Q_OFFSET_DEFAULT, -1, -1, 1},
        {129, 701, APA_Q_OFFSET_DEFAULT, -1, -1, 0},
        {257, 401, 17, 100, -1, 1},
        {257, 401, 300, 50, 30, 0},
        {200, 300, -90, -1, -1, 1}, /* rows that see nothing */
        {5, 900, APA_Q_OFFSET_DEFAULT, -1, -1, 1},
        {1, 3, APA_Q_OFFSET_DEFAULT, -1, -1, 1},
    };
    for (int split = 0; split < WORLD_SPLITS; split++)
        for (size_t i = 0; i < sizeof mask / sizeof mask[0]; i++) {
            world_case c = world_case_init(mask[i].Sq, mask[i].Skv);
            c.split = (world_split)split;
            c.causal = mask[i].causal;
            c.q_offset = mask[i].q_offset;
            c.window_left = mask[i].left;
            c.window_right = mask[i].right;
            c.compact = (int)(i + (size_t)split) % 2;
            check_exact(&c);
        }
}

static void exact_over_shapes(void **state)
{
    (void)state;
    static const apa_test_shape shape[] = {
        {2, 6, 2, 70, 150, 48, 40}, {1, 1, 1, 65, 65, 16, 8}, {3, 2, 2, 31, 97, 64, 64}};
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        for (int queries = 0; queries < 2; queries++) {
            world_case c = world_case_init(0, 0);
            c.shape = shape[i];
            c.causal = (int)i % 2;
            c.queries = (apa_dist_queries)queries;
            c.split = i == 2 ? WORLD_RAGGED : WORLD_ZIGZAG;
            check_exact(&c);
        }
}

static void decode(void **state)
{
    (void)state;
    for (int split = 0; split < WORLD_SPLITS; split++)
        for (int64_t Sq = 1; Sq <= 9; Sq += 4) {
            world_case c = world_case_init(Sq, 777);
            c.split = (world_split)split;
            c.causal = 1;
            c.queries = APA_DIST_QUERIES_WHOLE;
            c.compact = split % 2;
            check_exact(&c);
            c.window_left = 100;
            check_exact(&c);
        }
}

/* Nothing to attend to, nobody to attend. */
static void empty(void **state)
{
    (void)state;
    for (int queries = 0; queries < 2; queries++) {
        world_case c = world_case_init(40, 0);
        c.queries = (apa_dist_queries)queries;
        world_result r = world_run(&c, NULL);
        int right = 1;
        for (int64_t s = 0; s < 40 && rank == 0; s++)
            right = right && apa_test_get(&r.whole->problem.lse, 0, 1, s, 0) == -INFINITY &&
                    apa_test_get(&r.whole->problem.out, 0, 1, s, 3) == 0.0;
        apa_test_free(r.whole);
        world_judge(right, "not empty");
        c = world_case_init(0, 40);
        c.queries = (apa_dist_queries)queries;
        r = world_run(&c, NULL);
        apa_test_free(r.whole);
    }
}

/* The same shards give the same bits, however messages come. */
static void same_bits(void **state)
{
    (void)state;
    for (int queries = 0; queries < 2; queries++)
        for (int preset = 0; preset < 2; preset++) {
            world_case c = world_case_init(130, 900);
            c.causal = 1;
            c.queries = (apa_dist_queries)queries;
            c.preset = preset == 0 ? "exact" : "apa";
            c.split = WORLD_RAGGED;
            world_result first = world_run(&c, NULL);
            for (int i = 0; i < 3; i++) {
                world_result again = world_run(&c, NULL);
                const size_t bytes = 130 * 4 * 32 * sizeof(float);
                const int judges = rank == 0 || queries == 1; /* whole queries: on every rank */
                const int same =
                    !judges || memcmp(first.whole->problem.out.data, again.whole->problem.out.data, bytes) == 0;
                apa_test_free(again.whole);
                world_judge(same, "other bits");
            }
            apa_test_free(first.whole);
        }
}

/* With whole queries every rank gets the same. */
static void all_ranks_have_it(void **state)
{
    (void)state;
    world_case c = world_case_init(3, 500);
    c.queries = APA_DIST_QUERIES_WHOLE;
    world_result r = world_run(&c, NULL);
    double out_error, lse_error;
    world_truth truth = world_truth_make(r.whole);
    world_errors(r.whole, &truth, &out_error, &lse_error);
    world_truth_free(&truth);
    apa_test_free(r.whole);
    world_judge(out_error <= EXACT_BOUND && lse_error <= EXACT_BOUND, "out %g, lse %g", out_error, lse_error);
}

/* A NaN in a key reaches the rows that see it and no others, whoever holds it. */
static void poison_key(apa_test_problem *t)
{
    apa_test_set(&t->problem.k, 0, 0, 150, 3, NAN);
}

static void invisible_nan(void **state)
{
    (void)state;
    for (int preset = 0; preset < 2; preset++) {
        world_case c = world_case_init(300, 300);
        c.causal = 1;
        c.preset = preset == 0 ? "exact" : "apa";
        world_result r = world_run(&c, poison_key);
        int64_t wrong = 0;
        for (int64_t h = 0; h < 4 && rank == 0; h++)
            for (int64_t s = 0; s < 300; s++)
                wrong += (isnan(apa_test_get(&r.whole->problem.out, 0, h, s, 0)) != 0) != (h < 2 && s >= 150);
        apa_test_free(r.whole);
        world_judge(wrong == 0, "%lld rows wrong", (long long)wrong);
    }
}

/* The adaptive method: ranks judge against row sums that are at most those of all keys, so they are no further off than
 * one process, which in turn lies well under all tiles cold. */
static void adaptive(void **state)
{
    (void)state;
    for (int queries = 0; queries < 2; queries++)
        for (int causal = 0; causal < 2; causal++) {
            world_case c = world_case_init(queries == 0 ? 450 : 33, 1500);
            c.dtype = APA_DTYPE_F16;
            c.causal = causal;
            c.queries = (apa_dist_queries)queries;
            c.preset = "apa";
            c.settings = "eps=0.05";
            world_result r = world_run(&c, NULL);
            double out_error = 0, lse_error = 0, alone = 0, cold = 0;
            if (rank == 0) {
                world_truth truth = world_truth_make(r.whole);
                world_errors(r.whole, &truth, &out_error, &lse_error);
                alone = world_alone(r.whole, &truth, "apa", "eps=0.05");
                cold = world_alone(r.whole, &truth, "cold", "");
                world_truth_free(&truth);
                printf("# apa, causal %d: %.2e over ranks, %.2e alone, %.2e all cold\n", causal, out_error, alone,
                       cold);
            }
            apa_test_free(r.whole);
            world_judge(out_error <= 1.1 * alone + 1e-5 && out_error <= 0.5 * cold + 1e-5 && lse_error <= 0.01,
                        "out %g, alone %g, cold %g, lse %g", out_error, alone, cold, lse_error);
        }
}

static void splits_cover(void **state)
{
    (void)state;
    static const int64_t lengths[] = {0, 1, 63, 64, 65, 1000, 4096, INT64_MAX};
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
        for (int32_t n = 1; n <= 9; n++)
            for (int way = 0; way < 2; way++)
                for (int64_t granule = 1; granule <= 64; granule += 63) {
                    int64_t total = 0, most = 0, least = INT64_MAX;
                    for (int32_t r = 0; r < n; r++) {
                        const apa_dist_shard s = way == 0 ? apa_dist_split_blocks(lengths[l], n, r, granule)
                                                          : apa_dist_split_zigzag(lengths[l], n, r, granule);
                        const int64_t rows = apa_dist_shard_rows(&s);
                        total += rows;
                        most = rows > most ? rows : most;
                        least = rows < least ? rows : least;
                        for (int32_t i = 0; i < s.count; i++)
                            assert_true(s.run[i].first % granule == 0 && s.run[i].count > 0);
                    }
                    assert_true(total == lengths[l]);
                    assert_true(most - least <= 2 * granule);
                }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(splits_cover),
        cmocka_unit_test(exact_over_splits_and_masks),
        cmocka_unit_test(exact_over_shapes),
        cmocka_unit_test(decode),
        cmocka_unit_test(empty),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(all_ranks_have_it),
        cmocka_unit_test(invisible_nan),
        cmocka_unit_test(adaptive),
    };
    return world_main("dist_attention", tests, sizeof tests / sizeof tests[0]);
}
