/* What does not agree between ranks, or is wrong on one of them, is refused on all of them with the same line. */
#include "support/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A sound problem of this rank; the fields that a test changes come after. */
typedef struct refusal {
    apa_test_problem *t;
    apa_dist_problem p;
    apa_recipe recipe;
    apa_dist_call call;
} refusal;

static refusal sound(void)
{
    refusal r;
    r.t = apa_test_make((apa_test_shape){1, 4, 2, 50, 200, 16, 16}, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 3);
    r.recipe = apa_test_recipe("apa", "");
    apa_dist_call_init(&r.call);
    apa_dist_problem_init(&r.p);
    r.p.local = r.t->problem;
    r.p.Sq = 50;
    r.p.Skv = 200;
    r.p.q_shard = apa_dist_split_blocks(50, ranks, rank, 1);
    r.p.k_shard = apa_dist_split_blocks(200, ranks, rank, 1);
    for (int32_t i = 0; i < r.p.k_shard.count; i++)
        r.p.k_shard.run[i].at = r.p.k_shard.run[i].first;
    for (int32_t i = 0; i < r.p.q_shard.count; i++)
        r.p.q_shard.run[i].at = r.p.q_shard.run[i].first;
    return r;
}

/* All ranks are refused with one line, and outputs stay as they were. */
static void expect(refusal *r, apa_status expected, const char *says)
{
    float before = 0, after = 0;
    if (r->p.local.out.data != NULL)
        before = *(float *)r->p.local.out.data;
    apa_status status = apa_dist_attention(dist, context, &r->p, &r->recipe, &r->call, NULL);
    if (r->p.local.out.data != NULL)
        after = *(float *)r->p.local.out.data;
    const int right = status == expected && strstr(apa_dist_message(dist), says) != NULL &&
                      strchr(apa_dist_message(dist), '\n') == NULL && memcmp(&before, &after, sizeof after) == 0;
    apa_test_free(r->t);
    world_judge(right, "status %d, \"%s\", expected %d, \"%s\"", (int)status, apa_dist_message(dist), (int)expected,
                says);
}

/* The last rank has something else than rank 0; the line names both. */
static void disagreements(void **state)
{
    (void)state;
    const bool last = rank == ranks - 1;
    char says[128];
    if (ranks == 1)
        return;
    refusal r = sound();
    r.p.Skv = last ? 201 : 200;
    r.p.k_shard.run[0].count += last;
    r.p.local.k.shape[2] = r.p.local.v.shape[2] = last ? 201 : 200; /* refused before it is read */
    snprintf(says, sizeof says, "rank %d: Skv 201, rank 0 has 200", (int)ranks - 1);
    expect(&r, APA_STATUS_INVALID_ARGUMENT, says);

    r = sound();
    apa_test_problem *other = NULL;
    if (last) {
        other =
            apa_test_make((apa_test_shape){1, 4, 1, 50, 200, 16, 16}, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 3);
        r.p.local = other->problem;
    }
    snprintf(says, sizeof says, "rank %d: k heads 1, rank 0 has 2", (int)ranks - 1);
    expect(&r, APA_STATUS_INVALID_ARGUMENT, says);
    if (other != NULL)
        apa_test_free(other);

    r = sound();
    r.recipe = apa_test_recipe("apa", last ? "eps=0.01" : "eps=0.02");
    snprintf(says, sizeof says, "rank %d: recipe with eps 0.01, rank 0 has 0.02", (int)ranks - 1);
    expect(&r, APA_STATUS_INVALID_ARGUMENT, says);

    r = sound();
    r.p.local.softmax_scale = last ? 0.5 : 0.25;
    expect(&r, APA_STATUS_INVALID_ARGUMENT, "softmax_scale 0.5, rank 0 has 0.25");

    r = sound();
    r.p.local.causal = last;
    expect(&r, APA_STATUS_INVALID_ARGUMENT, "causal 1, rank 0 has 0");

    r = sound();
    r.call.exchange = last ? APA_DIST_EXCHANGE_CODES : APA_DIST_EXCHANGE_EXACT;
    expect(&r, APA_STATUS_INVALID_ARGUMENT, "exchange 2, rank 0 has 1");

    r = sound();
    r.p.queries = APA_DIST_QUERIES_WHOLE;
    if (last)
        apa_test_set(&r.p.local.q, 0, 0, 7, 3, 99.0);
    expect(&r, APA_STATUS_INVALID_ARGUMENT, "other queries than rank 0");
}

static void shards_that_do_not_cover(void **state)
{
    (void)state;
    refusal r = sound();
    if (rank == ranks - 1)
        r.p.k_shard.run[0].count--;
    expect(&r, APA_STATUS_INVALID_ARGUMENT, "k_shard: position 199 belongs to no rank");
    if (ranks == 1)
        return;
    r = sound();
    if (rank == 0)
        r.p.q_shard.run[0].count++;
    expect(&r, APA_STATUS_INVALID_ARGUMENT, "belongs to ranks 0 and 1, expected one");
    r = sound();
    if (rank == 1)
        r.p.k_shard.run[0].at = 190;
    expect(&r, APA_STATUS_INVALID_ARGUMENT, "rank 1: k_shard: run 0 is rows 190");
}

/* One rank's own mistake is told on all, with its number. */
static void one_rank_alone(void **state)
{
    (void)state;
    const bool last = rank == ranks - 1;
    char says[128];
    snprintf(says, sizeof says, "rank %d: k: data is NULL", (int)ranks - 1);
    refusal r = sound();
    if (last)
        r.p.local.k.data = NULL;
    expect(&r, APA_STATUS_INVALID_ARGUMENT, says);
    r = sound();
    if (last)
        r.call.engine = "none";
    expect(&r, APA_STATUS_INVALID_ARGUMENT, "engine: \"none\"");
    r = sound();
    if (last)
        r.p.local.softcap = 30.0;
    expect(&r, APA_STATUS_UNSUPPORTED, "softcap: is not distributed");
    r = sound();
    if (last)
        r.p.k_shard.count = 9;
    expect(&r, APA_STATUS_INVALID_ARGUMENT, "9 runs, expected 0");
}

/* The exchange of codes is of INT8 tiles. */
static void codes_of_other_recipes(void **state)
{
    (void)state;
    refusal r = sound();
    r.call.exchange = APA_DIST_EXCHANGE_CODES;
    r.recipe = apa_test_recipe("apa", "cold_format=nvfp4");
    r.call.engine = "reference";
    expect(&r, APA_STATUS_UNSUPPORTED, "exchange: codes");
}

/* A refusal breaks nothing. */
static void goes_on(void **state)
{
    (void)state;
    refusal r = sound();
    apa_status status = apa_dist_attention(dist, context, &r.p, &r.recipe, &r.call, NULL);
    apa_test_free(r.t);
    world_judge(status == APA_STATUS_OK, "status %d, \"%s\"", (int)status, apa_dist_message(dist));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(disagreements),  cmocka_unit_test(shards_that_do_not_cover),
        cmocka_unit_test(one_rank_alone), cmocka_unit_test(codes_of_other_recipes),
        cmocka_unit_test(goes_on),
    };
    return world_main("dist_refuse", tests, sizeof tests / sizeof tests[0]);
}
