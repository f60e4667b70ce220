/* The walk makes P of one panel beside the scores of the next where a level's kernels can. A call that asks for phases
 * takes them one by one (src/cpu/phases.c), so two runs of one call must agree in every bit, verdicts too: over panels
 * of four and of three, of unlike sizes, seen in part, skipped and hot, and head dims with and without such a kernel.
 */
#include "support/test.h"

#include "support/attend.h"
#include "support/levels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILE 64

static apa_test_level level[APA_TEST_LEVELS_MAX];
static apa_context *context[APA_TEST_LEVELS_MAX];
static int levels;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    levels = apa_test_levels(level);
    for (int l = 0; l < levels; l++)
        context[l] = apa_test_level_context(&level[l], 2);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++)
        apa_context_destroy(context[l]);
    return 0;
}

typedef struct trial {
    apa_test_shape shape;
    const char *settings;
    int causal;
    int64_t window_left;
    double loud; /* some keys are this many times as large: hot tiles, and skipped ones */
} trial;

static apa_test_problem *make(const trial *x)
{
    apa_test_problem *t = apa_test_make(x->shape, APA_DTYPE_F16, APA_DTYPE_F32, APA_TEST_HND, apa_test_seed());
    t->problem.causal = x->causal;
    t->problem.window_left = x->window_left;
    for (int64_t h = 0; h < x->shape.Hkv; h++)
        for (int64_t j = 0; j < x->shape.Skv && x->loud > 0.0; j += 131)
            for (int64_t d = 0; d < x->shape.D; d++)
                apa_test_set(&t->problem.k, 0, h, j, d, x->loud * apa_test_get(&t->problem.k, 0, h, j, d));
    return t;
}

static apa_statistics attend(int l, apa_test_problem *t, const apa_recipe *recipe, int32_t phases, uint8_t *verdicts)
{
    apa_attention_options options;
    apa_statistics done;
    apa_attention_options_init(&options);
    apa_statistics_init(&done);
    options.engine = "cpu";
    options.phases = phases;
    options.verdicts = verdicts;
    assert_int_equal(apa_attention(context[l], &t->problem, recipe, &options, &done), APA_STATUS_OK);
    return done;
}

static void same_bits(void **state)
{
    (void)state;
    /* Blocks are of 3 registers, one panel, until there are 32 KV heads' worth of them: then 192 rows are three panels
     * of 4, 100 rows panels of 4 and 3, 150 rows 4, 3 and 3. */
    static const trial trials[] = {
        {{1, 32, 32, 192, 700, 64, 64}, "eps=0.05 early_tiles=0", 1, -1, 3.0},
        {{4, 8, 8, 100, 600, 128, 64}, "eps=0.05 early_tiles=0", 1, -1, 0.0},
        {{4, 16, 8, 75, 500, 96, 64}, "eps=0.05 early_tiles=0", 0, -1, 3.0},
        {{1, 3, 1, 130, 2500, 128, 128}, "eps=0.05", 1, -1, 0.0},
        {{1, 3, 1, 130, 2500, 128, 64}, "eps=0.02", 1, -1, 4.0},
        {{1, 6, 2, 260, 1500, 64, 64}, "eps=0.05", 0, -1, 6.0},
        {{1, 1, 1, 100, 2000, 96, 96}, "eps=0.05", 1, 900, 3.0},
        {{2, 4, 2, 70, 1300, 256, 256}, "eps=0.05", 1, -1, 2.0},
        {{1, 2, 1, 150, 1300, 192, 40}, "eps=0.05", 1, -1, 2.0},
        {{1, 2, 1, 150, 1300, 80, 80}, "eps=0.05", 1, -1, 2.0},
        {{1, 3, 1, 130, 2000, 128, 128}, "eps=1", 1, -1, 30.0},
        {{1, 3, 1, 130, 2000, 128, 128}, "eps=0.001 second_look=off", 1, -1, 0.0},
    };
    double hot = 0.0, skipped = 0.0;
    for (int l = 0; l < levels; l++)
        for (size_t i = 0; i < sizeof trials / sizeof trials[0]; i++) {
            apa_test_problem *t = make(&trials[i]);
            const apa_recipe recipe = apa_test_recipe("apa", trials[i].settings);
            const apa_test_shape *s = &trials[i].shape;
            const size_t bytes = (size_t)(s->B * s->Hq * s->Sq * ((s->Skv + TILE - 1) / TILE));
            uint8_t *verdicts[2] = {calloc(1, bytes), calloc(1, bytes)};
            assert_true(verdicts[0] != NULL && verdicts[1] != NULL);
            const apa_statistics one = attend(l, t, &recipe, 0, verdicts[0]);
            apa_test_outputs kept = apa_test_keep(t);
            apa_test_fill(&t->problem.out, -7.0);
            const apa_statistics other = attend(l, t, &recipe, 1, verdicts[1]);
            if (apa_test_differs(t, &kept) || memcmp(verdicts[0], verdicts[1], bytes) != 0)
                fail_msg("%s, trial %d: bits differ", level[l].name, (int)i);
            assert_int_equal(one.hot, other.hot);
            assert_int_equal(one.skipped, other.skipped);
            assert_int_equal(one.candidates, other.candidates);
            hot += one.hot_share;
            skipped += one.skip_share;
            apa_test_drop(&kept);
            apa_test_free(t);
            free(verdicts[0]);
            free(verdicts[1]);
        }
    assert_true(hot > 0.0 && skipped > 0.0); /* the trials have what they are for */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bits)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
