/* Steps of a history. */
#include "property/world.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STEPS 40

static void tell(const world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void tell(const world *w, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (w->trace) {
        printf("#   ");
        vprintf(format, arguments);
        printf("\n");
    }
    va_end(arguments);
}

static apa_tensor random_rows(apa_test_rng *rng, apa_dtype dtype, int64_t H, int64_t n, int64_t width, double drift)
{
    apa_tensor x = apa_tensor_hnd(NULL, dtype, 1, H, n, width);
    x.data = world_memory(H * n * width * (int64_t)apa_dtype_bytes(dtype));
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < n; i++)
            for (int64_t d = 0; d < width; d++)
                apa_test_set(&x, 0, h, i, d, apa_test_normal(rng) + drift * (double)(d % 3) * (double)i / (double)n);
    return x;
}

static bool open_world(world *w)
{
    static const int64_t page_sizes[] = {64, 1, 7, 16, 100, MOST_KEYS};
    static const apa_dtype dtypes[] = {APA_DTYPE_F32, APA_DTYPE_F16, APA_DTYPE_BF16};
    apa_context_options context;
    apa_context_options_init(&context);
    context.threads = 1;
    if (apa_context_create(&w->context, &context) != APA_STATUS_OK)
        abort();
    draw *from = w->from;
    apa_kv_cache_options *o = &w->options;
    apa_kv_cache_options_init(o);
    o->heads = draw_between(from, 1, 2);
    w->Hq = o->heads * draw_between(from, 1, 3);
    o->dim = draw_between(from, 1, 70);
    o->dim_v = draw_between(from, 1, 70);
    o->dtype = dtypes[draw_below(from, 3)];
    o->page_size = page_sizes[draw_below(from, 6)];
    o->pages = draw_between(from, 1, 3) * (MOST_KEYS / o->page_size + 1); /* at times too few */
    o->window_tiles = draw_below(from, 3) == 2 ? draw_between(from, 1, 3) : 0;
    o->growth = draw_chance(from, 30) ? 1 + 0.5 * (double)draw_below(from, 3) : 1.125;
    static const char *const settings[] = {"", "eps=0.3", "eps=0.3 smooth_k=off", "smooth_k=off"};
    w->kept = apa_test_recipe("apa", settings[draw_below(from, 4)]);
    w->exact = apa_test_recipe("exact", "");
    o->recipe = &w->kept;
    apa_test_rng rng = {draw_below(from, 1000) + 1};
    w->k = random_rows(&rng, o->dtype, o->heads, 2 * MOST_KEYS, o->dim, 2);
    w->v = random_rows(&rng, o->dtype, o->heads, 2 * MOST_KEYS, o->dim_v, 0);
    w->q = random_rows(&rng, o->dtype, w->Hq, QUERIES, o->dim, 0);
    tell(w,
         "heads %" PRId64 "/%" PRId64 ", D %" PRId64 "/%" PRId64 ", %s, %" PRId64 " pages of %" PRId64
         ", window %" PRId64 ", growth %g, smooth_k %s",
         w->Hq, o->heads, o->dim, o->dim_v, apa_dtype_name(o->dtype), o->pages, o->page_size, o->window_tiles,
         o->growth, w->kept.smooth_k == APA_TOGGLE_OFF ? "off" : "on");
    return world_must(w, apa_kv_cache_create(w->context, o, &w->cache), "create");
}

static void close_world(world *w)
{
    apa_kv_cache_destroy(w->cache);
    apa_context_destroy(w->context);
    free(w->k.data);
    free(w->v.data);
    free(w->q.data);
}

static sequence *unused(world *w)
{
    for (int i = 0; i < SEQUENCES; i++)
        if (!w->of[i].used)
            return &w->of[i];
    return NULL;
}

static sequence *any(world *w)
{
    const uint64_t first = draw_below(w->from, SEQUENCES);
    for (uint64_t i = 0; i < SEQUENCES; i++)
        if (w->of[(first + i) % SEQUENCES].used)
            return &w->of[(first + i) % SEQUENCES];
    return NULL;
}

static bool add(world *w)
{
    sequence *s = unused(w);
    if (s == NULL)
        return true;
    if (!world_must(w, apa_kv_cache_add(w->context, w->cache, &s->id), "add"))
        return false;
    tell(w, "add %" PRId64, s->id);
    s->used = true;
    s->keys = 0;
    return true;
}

static bool fork_one(world *w)
{
    sequence *to = unused(w), *of = any(w);
    if (to == NULL || of == NULL)
        return true;
    int64_t id;
    if (!world_must(w, apa_kv_cache_fork(w->context, w->cache, of->id, &id), "fork"))
        return false;
    tell(w, "fork %" PRId64 " of %" PRId64, id, of->id);
    *to = *of;
    to->id = id;
    return true;
}

static bool append(world *w)
{
    sequence *s = any(w);
    const int64_t wanted = draw_chance(w->from, 30) ? draw_between(w->from, 1, 200) : draw_between(w->from, 1, 9);
    const int64_t first = draw_below(w->from, MOST_KEYS);
    if (s == NULL)
        return true;
    const int64_t n = wanted < MOST_KEYS - s->keys ? wanted : MOST_KEYS - s->keys;
    int64_t numbers[MOST_KEYS];
    for (int64_t i = 0; i < n; i++)
        numbers[i] = first + i;
    apa_tensor k = world_gather(&w->k, numbers, n), v = world_gather(&w->v, numbers, n);
    const apa_status status = apa_kv_cache_append(w->context, w->cache, &s->id, 1, &k, &v);
    tell(w, "append %" PRId64 " keys from %" PRId64 " on to %" PRId64 " (%" PRId64 " before): %s", n, first, s->id,
         s->keys, apa_status_name(status));
    free(k.data);
    free(v.data);
    if (status == APA_STATUS_OUT_OF_MEMORY)
        return true; /* what it must not have changed is looked at later */
    memcpy(s->key + s->keys, numbers, sizeof *numbers * (size_t)n);
    s->keys += n;
    return world_must(w, status, "append");
}

static bool roll_back(world *w)
{
    sequence *s = any(w);
    const int64_t share = draw_between(w->from, 0, 16);
    if (s == NULL)
        return true;
    s->keys -= s->keys * share / 16;
    tell(w, "roll %" PRId64 " back to %" PRId64, s->id, s->keys);
    return world_must(w, apa_kv_cache_rollback(w->context, w->cache, s->id, s->keys), "rollback");
}

static bool remove_one(world *w, sequence *s)
{
    if (s == NULL)
        return true;
    tell(w, "remove %" PRId64, s->id);
    s->used = false;
    return world_must(w, apa_kv_cache_remove(w->context, w->cache, s->id), "remove");
}

static bool reload(world *w)
{
    char path[64];
    snprintf(path, sizeof path, "/tmp/apa-history-%ld", (long)getpid());
    tell(w, "save and load");
    if (!world_must(w, apa_kv_cache_save(w->context, w->cache, path), "save"))
        return false;
    apa_kv_cache_destroy(w->cache);
    const bool loaded = world_must(w, apa_kv_cache_load(w->context, path, &w->cache), "load");
    unlink(path);
    return loaded;
}

static bool numbers_agree(world *w)
{
    apa_kv_cache_usage usage;
    int64_t sequences = 0;
    for (int i = 0; i < SEQUENCES; i++) {
        const sequence *s = &w->of[i];
        sequences += s->used;
        if (s->used && apa_kv_cache_keys(w->cache, s->id) != s->keys)
            return world_fails(w, "sequence %" PRId64 " has %" PRId64 " keys, expected %" PRId64, s->id,
                               apa_kv_cache_keys(w->cache, s->id), s->keys);
    }
    apa_kv_cache_usage_init(&usage);
    if (!world_must(w, apa_kv_cache_usage_get(w->context, w->cache, &usage), "usage"))
        return false;
    if (usage.sequences != sequences || usage.pages_used + usage.pages_free != w->options.pages)
        return world_fails(w, "%" PRId64 " sequences, %" PRId64 " + %" PRId64 " pages, expected %" PRId64 ", %" PRId64,
                           usage.sequences, usage.pages_used, usage.pages_free, sequences, w->options.pages);
    if (sequences == 0 && (usage.pages_used != 0 || usage.tiles != 0))
        return world_fails(w, "an empty cache holds %" PRId64 " pages and %" PRId64 " tiles", usage.pages_used,
                           usage.tiles);
    return true;
}

static bool step(world *w)
{
    switch (draw_below(w->from, 12)) {
    case 0:
    case 1:
    case 2:
    case 3:
        return append(w);
    case 4:
    case 5:
        return add(w);
    case 6:
    case 7:
        return fork_one(w);
    case 8:
        return roll_back(w);
    case 9:
        return remove_one(w, any(w));
    case 10:
        return draw_chance(w->from, 40) ? reload(w) : true;
    default: {
        const sequence *s = any(w);
        return s == NULL || s->keys == 0 || world_look(w, s);
    }
    }
}

history_result history_play(draw *from, bool trace)
{
    world w = {.from = from, .trace = trace, .result = {.holds = true}};
    bool on = open_world(&w) && add(&w);
    const int64_t steps = draw_between(from, 1, STEPS);
    for (int64_t i = 0; i < steps && on; i++)
        on = step(&w) && numbers_agree(&w);
    for (int i = 0; i < SEQUENCES && on; i++)
        if (w.of[i].used && w.of[i].keys > 0)
            on = world_look(&w, &w.of[i]);
    for (int i = 0; i < SEQUENCES && on; i++)
        if (w.of[i].used)
            on = remove_one(&w, &w.of[i]) && numbers_agree(&w);
    close_world(&w);
    return w.result;
}
