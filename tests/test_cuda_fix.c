/* What both passes do about tiles that pass 1 guessed wrong (cuda/wgmma/fix.h): for every state that a group can be in,
 * each tile changes once, in the right direction, and two at once only where they may. No device needed. */
#include "cuda/wgmma/fix.h"

#include "support/problems.h"
#include "support/test.h"

enum { GROUPS = 12, STATES = 32 };

/* State of a group: bits fix of the first and second tile, hot of the two, apart. */
static uint32_t bit(int state, int which)
{
    return (uint32_t)(state >> which & 1);
}

/* How often an entry adds (+1) or takes out (-1) a tile of a group. */
static int changes(const apa_wgmma_fix *fix, int group, int tile)
{
    const int there = (int)((tile == 0 ? fix->first : fix->second) >> group & 1), out = (int)(fix->out >> group & 1);
    return there == 0 ? 0 : out != 0 ? -1 : 1;
}

static void check_group(const apa_wgmma_pair_fix *both, int group, int state)
{
    for (int tile = 0; tile < 2; tile++) {
        const int now = changes(&both->now, group, tile), then = changes(&both->then, group, tile);
        const int due = bit(state, tile) == 0 ? 0 : bit(state, 2 + tile) != 0 ? -1 : 1;
        assert_true(now == 0 || then == 0);
        assert_int_equal(now + then, due);
    }
    const bool together = changes(&both->now, group, 0) != 0 && changes(&both->now, group, 1) != 0;
    const bool may = bit(state, 0) != 0 && bit(state, 1) != 0 && bit(state, 2) == bit(state, 3) && bit(state, 4) == 0;
    assert_int_equal(together, may);
    assert_true(changes(&both->then, group, 0) == 0 || changes(&both->then, group, 1) == 0);
}

static void check_pair(const int *state)
{
    uint32_t mask[5] = {0};
    for (int g = 0; g < GROUPS; g++)
        for (int i = 0; i < 5; i++)
            mask[i] |= bit(state[g], i) << g;
    const apa_wgmma_pair_fix both = apa_wgmma_fix_of_pair(77, mask[0], mask[1], mask[2], mask[3], mask[4]);
    assert_true(both.now.pair == 77 && both.then.pair == 77);
    assert_true((both.now.first | both.now.second) != 0 || (mask[0] | mask[1]) == 0); /* the ring is fed with it */
    assert_true((both.now.out & ~(both.now.first | both.now.second)) == 0);
    assert_true((both.then.out & ~(both.then.first | both.then.second)) == 0);
    assert_true((both.now.first | both.now.second | both.then.first | both.then.second) >> GROUPS == 0);
    for (int g = 0; g < GROUPS; g++)
        check_group(&both, g, state[g]);
}

/* Every state of a group beside every state of its neighbours. */
static void test_states(void **unused)
{
    (void)unused;
    int state[GROUPS];
    for (int group = 0; group < GROUPS; group++)
        for (int own = 0; own < STATES; own++)
            for (int others = 0; others < STATES; others++) {
                for (int g = 0; g < GROUPS; g++)
                    state[g] = g == group ? own : others;
                check_pair(state);
            }
}

static void test_random_states(void **unused)
{
    (void)unused;
    apa_test_rng rng = {apa_test_seed()};
    for (int i = 0; i < 20000; i++) {
        int state[GROUPS];
        for (int g = 0; g < GROUPS; g++)
            state[g] = (int)apa_test_below(&rng, STATES);
        check_pair(state);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_states), cmocka_unit_test(test_random_states)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
