/* What a sequence of the cache gives, against an array and against a new cache. */
#include "property/world.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BOUND 0.05 /* of the adaptive method's relative L2: INT8 tiles of small contexts, nearly none of them exact */

bool world_fails(world *w, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (w->result.holds)
        vsnprintf(w->result.message, sizeof w->result.message, format, arguments);
    va_end(arguments);
    w->result.holds = false;
    return false;
}

bool world_must(world *w, apa_status status, const char *what)
{
    return status == APA_STATUS_OK || world_fails(w, "%s: %s", what, apa_context_message(w->context));
}

void *world_memory(int64_t bytes)
{
    void *made = malloc((size_t)bytes + 1);
    if (made == NULL)
        abort();
    return made;
}

apa_tensor world_gather(const apa_tensor *x, const int64_t *key, int64_t n)
{
    const int64_t size = (int64_t)apa_dtype_bytes(x->dtype), width = x->shape[3];
    apa_tensor to = apa_tensor_hnd(NULL, x->dtype, 1, x->shape[1], n, width);
    to.data = world_memory(x->shape[1] * n * width * size);
    for (int64_t h = 0; h < x->shape[1]; h++)
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)to.data + (h * n + i) * width * size,
                   (const char *)x->data + (h * x->stride[1] + key[i] * x->stride[2]) * size, (size_t)(width * size));
    return to;
}

typedef struct view {
    float *out, *lse;
    size_t out_bytes, lse_bytes;
} view;

static apa_problem problem_into(const world *w, view *r)
{
    apa_problem p;
    r->out_bytes = sizeof(float) * (size_t)(w->Hq * QUERIES * w->options.dim_v);
    r->lse_bytes = sizeof(float) * (size_t)(w->Hq * QUERIES);
    r->out = world_memory((int64_t)r->out_bytes);
    r->lse = world_memory((int64_t)r->lse_bytes);
    apa_problem_init(&p);
    p.q = w->q;
    p.out = apa_tensor_hnd(r->out, APA_DTYPE_F32, 1, w->Hq, QUERIES, w->options.dim_v);
    p.lse = apa_tensor_hnd(r->lse, APA_DTYPE_F32, 1, w->Hq, QUERIES, 1);
    p.causal = APA_CAUSAL_BOTTOM_RIGHT;
    return p;
}

static view over_cache(world *w, const apa_kv_cache *cache, int64_t id, const apa_recipe *recipe)
{
    view r;
    const apa_problem p = problem_into(w, &r);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "cpu";
    world_must(w, apa_kv_cache_attend(w->context, cache, &id, 1, &p, recipe, &options, NULL), "attend");
    return r;
}

static view over_array(world *w, const apa_tensor *k, const apa_tensor *v)
{
    view r;
    apa_problem p = problem_into(w, &r);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "cpu";
    p.k = *k;
    p.v = *v;
    world_must(w, apa_attention(w->context, &p, &w->exact, &options, NULL), "attention");
    return r;
}

static view over_new_cache(world *w, const apa_tensor *k, const apa_tensor *v)
{
    apa_kv_cache_options options = w->options;
    apa_kv_cache *cache = NULL;
    int64_t id = 0;
    view r = {0};
    options.page_size = 64;
    options.pages = MOST_KEYS / 64 + 1;
    options.window_tiles = 0;
    if (world_must(w, apa_kv_cache_create(w->context, &options, &cache), "create") &&
        world_must(w, apa_kv_cache_add(w->context, cache, &id), "add") &&
        world_must(w, apa_kv_cache_append(w->context, cache, &id, 1, k, v), "append"))
        r = over_cache(w, cache, id, NULL);
    apa_kv_cache_destroy(cache);
    return r;
}

static bool same(const view *a, const view *b)
{
    return memcmp(a->out, b->out, a->out_bytes) == 0 && memcmp(a->lse, b->lse, a->lse_bytes) == 0;
}

static double distance(const view *a, const view *b)
{
    double error = 0, norm = 0;
    for (size_t i = 0; i < a->out_bytes / sizeof(float); i++) {
        error += pow((double)a->out[i] - (double)b->out[i], 2);
        norm += pow((double)b->out[i], 2);
    }
    return error == 0 ? 0 : sqrt(error / norm);
}

static void drop(view *r)
{
    free(r->out);
    free(r->lse);
}

bool world_look(world *w, const sequence *s)
{
    apa_tensor k = world_gather(&w->k, s->key, s->keys), v = world_gather(&w->v, s->key, s->keys);
    view exact = over_cache(w, w->cache, s->id, &w->exact), flat = over_array(w, &k, &v);
    view cold = over_cache(w, w->cache, s->id, NULL), fresh = over_new_cache(w, &k, &v);
    w->result.looks++;
    if (w->result.holds && !same(&exact, &flat))
        world_fails(w, "exact over sequence %" PRId64 " of %" PRId64 " keys: other bits than over an array", s->id,
                    s->keys);
    if (w->result.holds && !same(&cold, &fresh))
        world_fails(w, "apa over sequence %" PRId64 " of %" PRId64 " keys: other bits than over a new cache", s->id,
                    s->keys);
    if (w->result.holds) {
        const double error = distance(&cold, &exact);
        w->result.worst = fmax(w->result.worst, error);
        if (!(error <= BOUND))
            world_fails(w, "apa over sequence %" PRId64 " of %" PRId64 " keys: relative L2 %g", s->id, s->keys, error);
    }
    view *all[] = {&exact, &flat, &cold, &fresh};
    for (int i = 0; i < 4; i++)
        drop(all[i]);
    free(k.data);
    free(v.data);
    return w->result.holds;
}
