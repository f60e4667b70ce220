/* The property test of the KV cache: random histories (history.h).
 *
 *     cache_property [--cases N] [--seed S] [--choices A,B,C...]
 *
 * As property.c: case n of seed s does not depend on the others, a failing history is shrunk and printed with the
 * choices that make it again. */
#include "property/history.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHRINK_TRIES 2000

static bool still_fails(void *user, draw *list)
{
    (void)user;
    return !history_play(list, false).holds;
}

static void report(const draw *failing, const char *message)
{
    draw smallest = draw_list(failing->choice, failing->count);
    printf("# %s\n# shrinking ...\n", message);
    fflush(stdout);
    draw_shrink(&smallest, still_fails, NULL, SHRINK_TRIES);
    draw again = draw_list(smallest.choice, smallest.count);
    printf("# the smallest history that fails:\n");
    const history_result r = history_play(&again, true);
    printf("# %s\n# repeat with: --choices ", r.holds ? "NOT AGAIN" : r.message);
    draw_print(&smallest);
}

/* Plays a list of choices; false when it fails. */
static bool play(const draw *list, bool trace, double *worst, long *looks)
{
    draw from = *list;
    const history_result r = history_play(&from, trace);
    *worst = r.worst > *worst ? r.worst : *worst;
    *looks += r.looks;
    if (!r.holds)
        report(&from, r.message);
    return r.holds;
}

int main(int argc, char **argv)
{
    const char *seed_text = getenv("APA_TEST_SEED"), *choices = NULL;
    uint64_t seed = seed_text != NULL ? strtoull(seed_text, NULL, 10) : 1;
    long cases = 100, n = 0, looks = 0;
    double worst = 0;
    bool holds = true;
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value != NULL && strcmp(argv[i], "--cases") == 0)
            cases = strtol(value, NULL, 10);
        else if (value != NULL && strcmp(argv[i], "--seed") == 0)
            seed = strtoull(value, NULL, 10);
        else if (value != NULL && strcmp(argv[i], "--choices") == 0)
            choices = value;
        else {
            fprintf(stderr, "usage: cache_property [--cases N] [--seed S] [--choices A,B...]\n");
            return 2;
        }
    }
    if (choices != NULL) {
        const draw list = draw_parse(choices);
        holds = play(&list, true, &worst, &looks);
        n = 1;
    } else {
        printf("# seed %" PRIu64 " (repeat with --seed %" PRIu64 ")\n", seed, seed);
        for (; n < cases && holds; n++) {
            apa_test_rng mix = {seed * 0x9E3779B97F4A7C15u + (uint64_t)n};
            const draw list = draw_random(apa_test_bits(&mix));
            holds = play(&list, false, &worst, &looks);
        }
    }
    printf("# %ld looks at a sequence; the adaptive method's largest relative L2 is %.3g\n", looks, worst);
    printf("%ld passed, %d failed\n", holds ? n : n - 1, !holds);
    return !holds;
}
