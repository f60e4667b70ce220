/* The cache under test, the world beside it, and what steps and looks share. */
#ifndef APA_TESTS_PROPERTY_WORLD_H
#define APA_TESTS_PROPERTY_WORLD_H

#include "property/history.h"

#include "apa/kv_cache.h"
#include "support/attend.h"

#define SEQUENCES 6
#define MOST_KEYS 400 /* of a sequence */
#define QUERIES 3

typedef struct sequence {
    bool used;
    int64_t id, keys, key[MOST_KEYS];
} sequence;

typedef struct world {
    draw *from;
    bool trace;
    history_result result;
    apa_context *context;
    apa_kv_cache *cache;
    apa_kv_cache_options options;
    apa_recipe kept, exact;
    int64_t Hq;
    sequence of[SEQUENCES];
    apa_tensor k, v, q; /* the rows that keys are taken from, and the queries */
} world;

/* Notes the first failure; false. */
bool world_fails(world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* True, or the context's message as the failure. */
bool world_must(world *w, apa_status status, const char *what);

void *world_memory(int64_t bytes);

/* Keys with these numbers, in one array; data is to be freed. */
apa_tensor world_gather(const apa_tensor *x, const int64_t *key, int64_t n);

/* One sequence, by exact and by the kept tiles, over the cache, an array and a new cache. */
bool world_look(world *w, const sequence *s);

#endif
