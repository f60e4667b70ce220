/* Making and freeing a cache; what it holds. */
#include "cache/cache.h"

#include "cpu/engine.h"
#include "recipe/defaults.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define GROWTH 1.125 /* the published rule of adaptive precision attention: docs/kv-cache.md */
#define LARGEST_DIM 1024

void apa_kv_cache_options_init(apa_kv_cache_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
    options->dtype = APA_DTYPE_F16;
    options->page_size = 64;
    options->growth = GROWTH;
}

void apa_kv_cache_usage_init(apa_kv_cache_usage *usage)
{
    memset(usage, 0, sizeof *usage);
    usage->size = sizeof *usage;
}

static apa_status expect(apa_context *context, const char *name, int64_t found, int64_t least, int64_t most)
{
    if (found >= least && found <= most)
        return APA_STATUS_OK;
    return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: %" PRId64 ", expected %" PRId64 " … %" PRId64, name,
                    found, least, most);
}

static apa_status check_options(apa_context *context, const apa_kv_cache_options *o)
{
    if (o == NULL || o->size != sizeof *o)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "options: NULL or not set up by apa_kv_cache_options_init()");
    apa_status status = expect(context, "heads", o->heads, 1, INT32_MAX);
    if (status == APA_STATUS_OK)
        status = expect(context, "dim", o->dim, 1, LARGEST_DIM);
    if (status == APA_STATUS_OK)
        status = expect(context, "dim_v", o->dim_v, 1, LARGEST_DIM);
    if (status == APA_STATUS_OK)
        status = expect(context, "page_size", o->page_size, 1, (int64_t)1 << 40);
    if (status == APA_STATUS_OK)
        status = expect(context, "pages", o->pages, 1, INT32_MAX);
    if (status == APA_STATUS_OK)
        status = expect(context, "window_tiles", o->window_tiles, 0, INT64_MAX);
    if (status != APA_STATUS_OK)
        return status;
    if (o->dtype != APA_DTYPE_F16 && o->dtype != APA_DTYPE_BF16 && o->dtype != APA_DTYPE_F32)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "dtype: %s, expected f16, bf16 or f32",
                        apa_dtype_name(o->dtype));
    if (!(o->growth >= 1.0))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "growth: %g, expected 1 or more", o->growth);
    if (o->recipe != NULL && o->recipe->size != sizeof *o->recipe)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "recipe: not set up by apa_recipe_init()");
    return APA_STATUS_OK;
}

/* Does the recipe have cold tiles that the CPU engine makes, and what do they look like? */
static apa_status set_recipe(apa_context *context, apa_kv_cache *cache, const apa_recipe *recipe)
{
    char message[256];
    if (recipe != NULL)
        cache->recipe = *recipe;
    else
        apa_recipe_init(&cache->recipe, NULL);
    apa_status status = apa_recipe_check(&cache->recipe, message, sizeof message);
    if (status != APA_STATUS_OK)
        return apa_fail(context, status, "recipe: %s", message);
    apa_call call = {
        .B = 1, .Hq = 1, .Hkv = 1, .G = 1, .Sq = 1, .Skv = 1, .D = cache->D, .Dv = cache->Dv, .scale = 1.0};
    call.recipe = cache->recipe;
    call.q.dtype = call.k.dtype = call.v.dtype = call.out.dtype = cache->dtype;
    status = apa_cpu_engine.resolve(context, &call);
    apa_cpu_shape_of(&call, 1.0, &cache->shape);
    cache->resolved = call.recipe;
    cache->keeps = status == APA_STATUS_OK && cache->shape.adaptive;
    apa_fail(context, APA_STATUS_OK, "%s", ""); /* what the engine has against the recipe is no failure here */
    return APA_STATUS_OK;
}

static apa_status allocate(apa_context *context, apa_kv_cache *cache)
{
    const int64_t bytes = (int64_t)apa_dtype_bytes(cache->dtype);
    int64_t rows;
    if (__builtin_mul_overflow(cache->pages, cache->page_size, &rows) ||
        __builtin_mul_overflow(rows, cache->Hkv * LARGEST_DIM * bytes, &rows))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "pages: %" PRId64 " of %" PRId64 " keys are too many",
                        cache->pages, cache->page_size);
    rows = cache->pages * cache->page_size * cache->Hkv;
    cache->k = apa_aligned_allocate((size_t)rows, (size_t)(cache->D * bytes));
    cache->v = apa_aligned_allocate((size_t)rows, (size_t)(cache->Dv * bytes));
    cache->references = apa_aligned_allocate((size_t)cache->pages, sizeof *cache->references);
    cache->returned = apa_aligned_allocate((size_t)cache->pages, sizeof *cache->returned);
    if (cache->k == NULL || cache->v == NULL || cache->references == NULL || cache->returned == NULL)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "kv_cache: no memory for %" PRId64 " pages", cache->pages);
    return APA_STATUS_OK;
}

apa_status apa_kv_cache_create(apa_context *context, const apa_kv_cache_options *options, apa_kv_cache **cache)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (cache == NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "cache: NULL");
    *cache = NULL;
    apa_status status = check_options(context, options);
    if (status != APA_STATUS_OK)
        return status;
    apa_kv_cache *made = apa_aligned_allocate(1, sizeof *made);
    if (made == NULL)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "kv_cache: no memory");
    memset(made, 0, sizeof *made);
    made->Hkv = options->heads;
    made->D = options->dim;
    made->Dv = options->dim_v;
    made->dtype = options->dtype;
    made->page_size = options->page_size;
    made->pages = options->pages;
    made->growth = options->growth;
    made->window_tiles = options->window_tiles;
    status = set_recipe(context, made, options->recipe);
    if (status == APA_STATUS_OK)
        status = allocate(context, made);
    if (status != APA_STATUS_OK) {
        apa_kv_cache_destroy(made);
        return status;
    }
    *cache = made;
    return APA_STATUS_OK;
}

void apa_kv_cache_destroy(apa_kv_cache *cache)
{
    if (cache == NULL)
        return;
    for (int64_t i = 0; i < cache->room; i++)
        if (cache->sequence[i] != NULL)
            apa_cache_sequence_free(cache, i);
    apa_cache_tiles_free(cache);
    void *const piece[] = {cache->k, cache->v, cache->references, cache->returned, cache->sequence, cache};
    for (size_t i = 0; i < sizeof piece / sizeof piece[0]; i++)
        apa_aligned_free(piece[i]);
}

apa_status apa_kv_cache_usage_get(apa_context *context, const apa_kv_cache *cache, apa_kv_cache_usage *usage)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (cache == NULL || usage == NULL || usage->size != sizeof *usage)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: NULL or not set up",
                        cache == NULL ? "cache" : "usage");
    usage->sequences = cache->sequences;
    usage->pages_free = apa_cache_free_pages(cache);
    usage->pages_used = cache->pages - usage->pages_free;
    usage->tiles = cache->tiles;
    usage->tile_bytes = (size_t)cache->tiles * apa_cache_tile_bytes(cache);
    return APA_STATUS_OK;
}
