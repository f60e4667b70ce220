/* The property test: random problems on every engine, against the definition in double.
 *
 *     property [--cases N] [--seed S] [--engine NAME] [--may-refuse NAME] [--choices A,B,C...]
 *
 * Case n of seed s does not depend on the others. A failing case is shrunk and printed with the list of choices that
 * makes it again (--choices). Refusals of an engine that --may-refuse names are counted by reason; any other is a
 * failure. */
#include "property/check.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENGINES 2
#define REASONS 32
#define SHRINK_TRIES 3000

typedef struct settings {
    uint64_t seed;
    long cases;
    const char *engine, *may_refuse;
    char *choices;
} settings;

typedef struct reason {
    char engine[16], text[256];
    long count;
} reason;

typedef struct tally {
    checker engine[ENGINES];
    long held[ENGINES];
    reason reasons[REASONS];
} tally;

static const case_limits limits = {70, 330, 130};

static verdict judge(checker *with, draw *from)
{
    property_case *made = case_make(from, limits);
    const verdict v = check_case(with, made);
    case_free(made);
    return v;
}

static bool still_fails(void *user, draw *list)
{
    return judge(user, list) == FAILS;
}

static void report(checker *with, const draw *failing)
{
    draw smallest = draw_list(failing->choice, failing->count);
    printf("# %s: %s\n# shrinking ...\n", with->engine, with->message);
    fflush(stdout);
    draw_shrink(&smallest, still_fails, with, SHRINK_TRIES);
    draw again = draw_list(smallest.choice, smallest.count);
    property_case *made = case_make(&again, limits);
    const verdict v = check_case(with, made);
    printf("# the smallest case that fails (%s):\n#   %s\n", v == FAILS ? "again" : "NOT AGAIN", with->message);
    case_print(made);
    printf("# repeat with: --engine %s --choices ", with->engine);
    draw_print(&smallest);
    case_free(made);
}

static void count_refusal(tally *all, const checker *with)
{
    for (int i = 0; i < REASONS; i++) {
        reason *r = &all->reasons[i];
        if (r->count == 0) {
            snprintf(r->engine, sizeof r->engine, "%s", with->engine);
            snprintf(r->text, sizeof r->text, "%.255s", with->message);
        }
        if (strcmp(r->engine, with->engine) == 0 && strncmp(r->text, with->message, 255) == 0) {
            r->count++;
            return;
        }
    }
}

static bool one_case(tally *all, const draw *list)
{
    for (int e = 0; e < ENGINES; e++) {
        checker *with = &all->engine[e];
        if (with->engine == NULL)
            continue;
        draw from = draw_list(list->choice, list->count);
        const verdict v = judge(with, &from);
        if (v == FAILS) {
            report(with, list);
            return false;
        }
        all->held[e] += v == HOLDS;
        if (v == REFUSED)
            count_refusal(all, with);
    }
    return true;
}

static draw nth_case(const settings *chosen, long n)
{
    apa_test_rng mix = {chosen->seed * 0x9E3779B97F4A7C15u + (uint64_t)n};
    draw made = draw_random(apa_test_bits(&mix));
    property_case *unused = case_make(&made, limits); /* writes the choices down */
    case_free(unused);
    return made;
}

static bool parse(int argc, char **argv, settings *chosen)
{
    const char *seed = getenv("APA_TEST_SEED");
    *chosen = (settings){.seed = seed != NULL ? strtoull(seed, NULL, 10) : 1, .cases = 300};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--cases") == 0)
            chosen->cases = strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            chosen->seed = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--engine") == 0)
            chosen->engine = argv[i + 1];
        else if (strcmp(argv[i], "--may-refuse") == 0)
            chosen->may_refuse = argv[i + 1];
        else if (strcmp(argv[i], "--choices") == 0)
            chosen->choices = argv[i + 1];
        else
            return false;
    }
    return argc % 2 == 1;
}

static void backwards(void *pool, void (*task)(void *argument, size_t index), void *argument, size_t count)
{
    (void)pool;
    while (count-- > 0)
        task(argument, count);
}

static void open_engines(tally *all, const settings *chosen)
{
    static const char *const names[ENGINES] = {"reference", "cpu"};
    for (int e = 0; e < ENGINES; e++) {
        checker *with = &all->engine[e];
        apa_context_options options;
        apa_context_options_init(&options);
        with->engine = chosen->engine == NULL || strcmp(chosen->engine, names[e]) == 0 ? names[e] : NULL;
        with->may_refuse = chosen->may_refuse != NULL && strcmp(chosen->may_refuse, names[e]) == 0;
        options.threads = 1;
        if (apa_context_create(&with->one, &options) != APA_STATUS_OK)
            abort();
        options.parallel_for = backwards;
        if (apa_context_create(&with->backwards, &options) != APA_STATUS_OK)
            abort();
    }
}

static void print_tally(const tally *all, long cases)
{
    for (int e = 0; e < ENGINES; e++)
        if (all->engine[e].engine != NULL)
            printf("# %s: %ld of %ld hold, the largest error is %.3g of its bound\n", all->engine[e].engine,
                   all->held[e], cases, all->engine[e].worst);
    for (int i = 0; i < REASONS && all->reasons[i].count > 0; i++)
        printf("# %s refused %ld: %s\n", all->reasons[i].engine, all->reasons[i].count, all->reasons[i].text);
}

int main(int argc, char **argv)
{
    static tally all;
    settings chosen;
    bool holds = true;
    long n = 0;
    if (!parse(argc, argv, &chosen)) {
        fprintf(stderr,
                "usage: property [--cases N] [--seed S] [--engine NAME] [--may-refuse NAME] [--choices A,B...]\n");
        return 2;
    }
    open_engines(&all, &chosen);
    if (chosen.choices != NULL) {
        const draw list = draw_parse(chosen.choices);
        holds = one_case(&all, &list);
        n = 1;
    } else {
        printf("# seed %" PRIu64 " (repeat with --seed %" PRIu64 ")\n", chosen.seed, chosen.seed);
        for (; n < chosen.cases && holds; n++) {
            const draw list = nth_case(&chosen, n);
            holds = one_case(&all, &list);
        }
    }
    print_tally(&all, n);
    printf("%ld passed, %d failed\n", holds ? n : n - 1, !holds);
    for (int e = 0; e < ENGINES; e++) {
        apa_context_destroy(all.engine[e].one);
        apa_context_destroy(all.engine[e].backwards);
    }
    return !holds;
}
