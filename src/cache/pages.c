/* Pages, sequences, and what both are made of. */
#include "cache/cache.h"

#include <inttypes.h>
#include <string.h>

/* ---- pages ---- */

int64_t apa_cache_pages_for(const apa_kv_cache *cache, int64_t keys)
{
    return keys / cache->page_size + (keys % cache->page_size != 0);
}

int64_t apa_cache_free_pages(const apa_kv_cache *cache)
{
    return cache->returned_pages + cache->pages - cache->fresh_page;
}

int32_t apa_cache_page_take(apa_kv_cache *cache)
{
    const int32_t page =
        cache->returned_pages > 0 ? cache->returned[--cache->returned_pages] : (int32_t)cache->fresh_page++;
    cache->references[page] = 1;
    return page;
}

void apa_cache_page_drop(apa_kv_cache *cache, int32_t page)
{
    if (--cache->references[page] == 0)
        cache->returned[cache->returned_pages++] = page;
}

char *apa_cache_row(const apa_kv_cache *cache, bool values, int32_t page, int64_t head, int64_t row)
{
    const int64_t width = values ? cache->Dv : cache->D;
    const int64_t at = ((page * cache->Hkv + head) * cache->page_size + row) * width;
    return (values ? cache->v : cache->k) + at * (int64_t)apa_dtype_bytes(cache->dtype);
}

apa_call apa_cache_call(const apa_kv_cache *cache, const apa_cache_sequence *sequence)
{
    apa_call call = {.B = 1,
                     .Hq = cache->Hkv,
                     .Hkv = cache->Hkv,
                     .G = 1,
                     .Sq = 1,
                     .Skv = sequence->keys,
                     .D = cache->D,
                     .Dv = cache->Dv,
                     .pages = sequence->page,
                     .page_size = cache->page_size,
                     .recipe = cache->resolved};
    call.k = apa_tensor_hnd(cache->k, cache->dtype, cache->pages, cache->Hkv, cache->page_size, cache->D);
    call.v = apa_tensor_hnd(cache->v, cache->dtype, cache->pages, cache->Hkv, cache->page_size, cache->Dv);
    return call;
}

/* ---- sequences ---- */

apa_cache_sequence *apa_cache_find(apa_context *context, const apa_kv_cache *cache, int64_t number, apa_status *status)
{
    *status = APA_STATUS_OK;
    if (number >= 0 && number < cache->room && cache->sequence[number] != NULL)
        return cache->sequence[number];
    *status =
        apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "sequence: %" PRId64 ", expected one of the cache's", number);
    return NULL;
}

static apa_status make_room(apa_context *context, apa_kv_cache *cache, int64_t number)
{
    if (number < cache->room)
        return APA_STATUS_OK;
    const int64_t room = number + 1 + cache->room / 2;
    apa_cache_sequence **larger = apa_aligned_allocate((size_t)room, sizeof *larger);
    if (larger == NULL)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "kv_cache: no memory for %" PRId64 " sequences", room);
    for (int64_t i = 0; i < room; i++)
        larger[i] = i < cache->room ? cache->sequence[i] : NULL;
    apa_aligned_free(cache->sequence);
    cache->sequence = larger;
    cache->room = room;
    return APA_STATUS_OK;
}

apa_status apa_cache_sequence_make(apa_context *context, apa_kv_cache *cache, int64_t number,
                                   apa_cache_sequence **sequence)
{
    apa_status status = make_room(context, cache, number);
    if (status != APA_STATUS_OK)
        return status;
    *sequence = apa_aligned_allocate(1, sizeof **sequence);
    if (*sequence == NULL)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "kv_cache: no memory for a sequence");
    memset(*sequence, 0, sizeof **sequence);
    cache->sequence[number] = *sequence;
    cache->sequences++;
    return APA_STATUS_OK;
}

void apa_cache_sequence_free(apa_kv_cache *cache, int64_t number)
{
    apa_cache_sequence *s = cache->sequence[number];
    for (int64_t i = 0; i < apa_cache_pages_for(cache, s->keys); i++)
        apa_cache_page_drop(cache, s->page[i]);
    for (int64_t t = 0; t < s->tile_room; t++)
        apa_cache_tile_drop(cache, s->tile[t]);
    void *const piece[] = {s->page, (void *)(uintptr_t)s->tile, s->top, s->mean, s->sum, s->segment_start, s};
    for (size_t i = 0; i < sizeof piece / sizeof piece[0]; i++)
        apa_aligned_free(piece[i]);
    cache->sequence[number] = NULL;
    cache->sequences--;
}

/* ---- public ---- */

static apa_status check(apa_context *context, const apa_kv_cache *cache)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    return cache != NULL ? APA_STATUS_OK : apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "cache: NULL");
}

apa_status apa_kv_cache_add(apa_context *context, apa_kv_cache *cache, int64_t *sequence)
{
    apa_status status = check(context, cache);
    if (status != APA_STATUS_OK)
        return status;
    if (sequence == NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "sequence: NULL");
    int64_t number = 0;
    while (number < cache->room && cache->sequence[number] != NULL)
        number++;
    if (number == APA_CACHE_SEQUENCES_MAX)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "kv_cache: more than 2^20 sequences");
    apa_cache_sequence *made;
    status = apa_cache_sequence_make(context, cache, number, &made);
    if (status == APA_STATUS_OK)
        *sequence = number;
    return status;
}

/* The sequence `to` is empty and gets all that `from` has. */
static void share(apa_kv_cache *cache, const apa_cache_sequence *from, apa_cache_sequence *to)
{
    const int64_t pages = apa_cache_pages_for(cache, from->keys);
    const int64_t Hkv = cache->Hkv, Dp = cache->shape.Dp;
    for (int64_t i = 0; i < pages; i++) {
        to->page[i] = from->page[i];
        cache->references[from->page[i]]++;
    }
    to->keys = from->keys;
    if (!cache->keeps)
        return;
    for (int64_t t = 0; t < apa_cache_whole(from->keys); t++) {
        to->tile[t] = from->tile[t];
        apa_cache_tile_share(from->tile[t]);
        memcpy(to->top + t * Hkv, from->top + t * Hkv, sizeof *to->top * (size_t)Hkv);
    }
    to->dropped = from->dropped;
    to->segments = from->segments;
    for (int64_t i = 0; i < from->segments; i++) {
        to->segment_start[i] = from->segment_start[i];
        memcpy(to->sum + i * Hkv * (Dp + 1), from->sum + i * Hkv * (Dp + 1),
               sizeof *to->sum * (size_t)(Hkv * (Dp + 1)));
        for (int64_t h = 0; h < Hkv; h++)
            memcpy(to->mean + (h * to->mean_rows + i) * Dp, from->mean + (h * from->mean_rows + i) * Dp,
                   sizeof *to->mean * (size_t)Dp);
    }
}

apa_status apa_kv_cache_fork(apa_context *context, apa_kv_cache *cache, int64_t from, int64_t *sequence)
{
    apa_status status = check(context, cache);
    if (status != APA_STATUS_OK)
        return status;
    const apa_cache_sequence *source = apa_cache_find(context, cache, from, &status);
    if (source == NULL)
        return status;
    int64_t number;
    status = apa_kv_cache_add(context, cache, &number);
    if (status != APA_STATUS_OK)
        return status;
    apa_cache_sequence *made = cache->sequence[number];
    /* Tables, and no fresh tiles: room for the keys of a tile in part, at most. */
    status = apa_cache_reserve_tables(context, cache, made, source->keys);
    if (status != APA_STATUS_OK) {
        apa_cache_sequence_free(cache, number);
        return status;
    }
    share(cache, source, made);
    *sequence = number;
    return APA_STATUS_OK;
}

apa_status apa_kv_cache_rollback(apa_context *context, apa_kv_cache *cache, int64_t sequence, int64_t keys)
{
    apa_status status = check(context, cache);
    if (status != APA_STATUS_OK)
        return status;
    apa_cache_sequence *s = apa_cache_find(context, cache, sequence, &status);
    if (s == NULL)
        return status;
    if (keys < 0 || keys > s->keys)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "keys: %" PRId64 ", expected 0 … the %" PRId64 " of the sequence", keys, s->keys);
    for (int64_t i = apa_cache_pages_for(cache, keys); i < apa_cache_pages_for(cache, s->keys); i++)
        apa_cache_page_drop(cache, s->page[i]);
    const bool shorter = keys < s->keys;
    s->keys = keys;
    if (shorter)
        apa_cache_shorten(context, cache, s);
    return APA_STATUS_OK;
}

apa_status apa_kv_cache_remove(apa_context *context, apa_kv_cache *cache, int64_t sequence)
{
    apa_status status = check(context, cache);
    if (status == APA_STATUS_OK && apa_cache_find(context, cache, sequence, &status) != NULL)
        apa_cache_sequence_free(cache, sequence);
    return status;
}

int64_t apa_kv_cache_keys(const apa_kv_cache *cache, int64_t sequence)
{
    if (cache == NULL || sequence < 0 || sequence >= cache->room || cache->sequence[sequence] == NULL)
        return -1;
    return cache->sequence[sequence]->keys;
}
