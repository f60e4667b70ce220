/* A random history of a KV cache, held at every step against what the sequences must be.
 *
 * The world beside the cache is a list of key numbers for every sequence; the keys themselves are rows of one array. A
 * history adds, forks, appends, rolls back, removes, saves and loads; when it looks at a sequence,
 *
 *   exact    over the cache has the bits of exact over the same keys in one array
 *   kept     the adaptive method has the bits that it has over a new cache which got the keys in one append
 *   near     and is within a bound of exact
 *   numbers  sequences, keys and pages are those of the world; an append that finds no page changes nothing
 *   end      a cache whose sequences are all removed holds no page and no tile
 */
#ifndef APA_TESTS_PROPERTY_HISTORY_H
#define APA_TESTS_PROPERTY_HISTORY_H

#include "property/draw.h"

typedef struct history_result {
    bool holds;
    char message[512]; /* of the failure */
    double worst;      /* relative L2 of the adaptive method against exact */
    long looks;
} history_result;

/* Plays the history that the choices tell; `trace` prints every step. */
history_result history_play(draw *from, bool trace);

#endif
