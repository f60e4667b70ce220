/* Random cases that can be shrunk.
 *
 * A case is made from a list of choices, each a whole number from 0 to some n - 1, in which 0 is the simplest. At
 * random they come from a generator and are written down; a list of choices makes the same case again. So a failing
 * case is made smaller without knowing what it means: choices are left out, zeroed, halved, lowered, for as long as it
 * still fails (the idea of Hypothesis: MacIver and Donaldson, ECOOP 2020). A list that ends early goes on with zeros.
 */
#ifndef APA_TESTS_PROPERTY_DRAW_H
#define APA_TESTS_PROPERTY_DRAW_H

#include "support/problems.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DRAW_CHOICES 512

typedef struct draw {
    uint64_t choice[DRAW_CHOICES];
    size_t count, at; /* choices there are, and the next one */
    bool replays;     /* from the list; else from rng, onto the list */
    apa_test_rng rng;
} draw;

draw draw_random(uint64_t seed);
draw draw_list(const uint64_t *choice, size_t count);

/* A list as text, "3,0,41", and back. */
draw draw_parse(const char *text);
void draw_print(const draw *list); /* and the end of the line */

uint64_t draw_below(draw *from, uint64_t n);                   /* 0 … n-1 */
int64_t draw_between(draw *from, int64_t least, int64_t most); /* both included, `least` the simplest */
bool draw_chance(draw *from, int percent);                     /* false is the simplest */

/* Makes the list in `failing` as short and small as it gets while fails(user, list) holds; at most `tries` calls. */
void draw_shrink(draw *failing, bool (*fails)(void *user, draw *list), void *user, int tries);

#endif
