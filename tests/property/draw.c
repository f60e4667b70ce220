/* Choices, and how a list of them is made smaller. */
#include "property/draw.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

draw draw_random(uint64_t seed)
{
    draw made = {.rng = {seed}};
    return made;
}

draw draw_list(const uint64_t *choice, size_t count)
{
    draw made = {.replays = true};
    made.count = count < DRAW_CHOICES ? count : DRAW_CHOICES;
    memcpy(made.choice, choice, made.count * sizeof *choice);
    return made;
}

draw draw_parse(const char *text)
{
    uint64_t list[DRAW_CHOICES];
    size_t count = 0;
    char *end;
    for (; *text != '\0' && count < DRAW_CHOICES; text = *end == ',' ? end + 1 : end)
        list[count++] = strtoull(text, &end, 10);
    return draw_list(list, count);
}

void draw_print(const draw *list)
{
    for (size_t i = 0; i < list->count; i++)
        printf("%s%" PRIu64, i == 0 ? "" : ",", list->choice[i]);
    printf("\n");
}

uint64_t draw_below(draw *from, uint64_t n)
{
    if (from->replays) {
        const uint64_t value = from->at < from->count ? from->choice[from->at] : 0;
        from->at++;
        return value < n ? value : n - 1;
    }
    const uint64_t value = from->count < DRAW_CHOICES ? apa_test_bits(&from->rng) % n : 0;
    if (from->count < DRAW_CHOICES)
        from->choice[from->count++] = value;
    return value;
}

int64_t draw_between(draw *from, int64_t least, int64_t most)
{
    return least + (int64_t)draw_below(from, (uint64_t)(most - least) + 1);
}

bool draw_chance(draw *from, int percent)
{
    return draw_below(from, 100) >= (uint64_t)(100 - percent);
}

typedef struct shrinker {
    draw *best;
    bool (*fails)(void *user, draw *list);
    void *user;
    int tries;
} shrinker;

/* Takes the list as the best one if it still fails. */
static bool attempt(shrinker *s, const draw *list)
{
    draw trial = draw_list(list->choice, list->count);
    if (s->tries-- <= 0 || !s->fails(s->user, &trial))
        return false;
    *s->best = draw_list(list->choice, list->count);
    return true;
}

static bool leave_out(shrinker *s, size_t length)
{
    bool better = false;
    for (size_t at = s->best->count; at-- > 0;) {
        if (at + length > s->best->count)
            continue;
        draw trial = *s->best;
        memmove(trial.choice + at, trial.choice + at + length, (trial.count - at - length) * sizeof *trial.choice);
        trial.count -= length;
        better = attempt(s, &trial) || better;
    }
    return better;
}

/* A choice becomes smaller: 0, a half, one less. */
static bool lower(shrinker *s, size_t at)
{
    bool better = false;
    for (int way = 0; way < 3; way++) {
        draw trial = *s->best;
        const uint64_t old = at < trial.count ? trial.choice[at] : 0;
        if (old == 0)
            break;
        trial.choice[at] = way == 0 ? 0 : way == 1 ? old / 2 : old - 1;
        better = attempt(s, &trial) || better;
    }
    return better;
}

void draw_shrink(draw *failing, bool (*fails)(void *user, draw *list), void *user, int tries)
{
    shrinker s = {failing, fails, user, tries};
    for (bool better = true; better && s.tries > 0;) {
        better = false;
        for (size_t length = 8; length > 0; length /= 2)
            better = leave_out(&s, length) || better;
        for (size_t at = 0; at < failing->count; at++)
            better = lower(&s, at) || better;
    }
}
