/* Appending keys: everything that can fail first (pages, tables, tiles), then writing, which cannot. */
#include "cache/cache.h"

#include <inttypes.h>
#include <string.h>

/* The list's sequences, marked so that one that stands in it twice is noticed. */
static apa_status mark(apa_context *context, const apa_kv_cache *cache, const int64_t *numbers, int64_t count,
                       apa_cache_growth *grown)
{
    apa_status status = APA_STATUS_OK;
    int64_t n = 0;
    for (; n < count && status == APA_STATUS_OK; n++) {
        apa_cache_sequence *s = apa_cache_find(context, cache, numbers[n], &status);
        if (s == NULL)
            break;
        if (s->marked) {
            status = apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                              "sequences: %" PRId64 " stands there twice, expected different ones", numbers[n]);
            break;
        }
        s->marked = true;
        grown[n] = (apa_cache_growth){s, s->keys};
    }
    for (int64_t i = 0; i < n; i++)
        grown[i].sequence->marked = false;
    return status;
}

static apa_status check_tensor(apa_context *context, const apa_kv_cache *cache, const char *name, const apa_tensor *x,
                               int64_t count, int64_t n, int64_t width)
{
    if (x == NULL || x->dtype != cache->dtype)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: dtype %s, expected the cache's %s", name,
                        x == NULL ? "none" : apa_dtype_name(x->dtype), apa_dtype_name(cache->dtype));
    const int64_t expected[4] = {count, cache->Hkv, n, width};
    if (memcmp(x->shape, expected, sizeof expected) != 0 || n < 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "%s: shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], expected [%" PRId64
                        ", %" PRId64 ", %" PRId64 ", %" PRId64 "]",
                        name, x->shape[0], x->shape[1], x->shape[2], x->shape[3], count, cache->Hkv, n < 0 ? 0 : n,
                        width);
    if (x->stride[3] != 1 && width > 1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: last stride is %" PRId64 ", expected 1", name,
                        x->stride[3]);
    if (count > 0 && n > 0 && (x->data == NULL || (uintptr_t)x->data % apa_dtype_bytes(x->dtype) != 0))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: data is NULL or not aligned to its elements", name);
    return APA_STATUS_OK;
}

/* A last page in part that others hold, too, is copied before it is written to. */
static bool must_copy(const apa_kv_cache *cache, const apa_cache_sequence *s)
{
    return s->keys % cache->page_size != 0 && cache->references[s->page[s->keys / cache->page_size]] > 1;
}

/* Pages are counted for all sequences, so that all or none of them grow. A page that several of the list share is
 * counted as a copy for each, though the last of them may keep it. */
static apa_status check_pages(apa_context *context, const apa_kv_cache *cache, const apa_cache_growth *grown,
                              int64_t count, int64_t n)
{
    const int64_t free_pages = apa_cache_free_pages(cache);
    int64_t needed = 0;
    for (int64_t i = 0; i < count; i++) {
        const apa_cache_sequence *s = grown[i].sequence;
        int64_t keys;
        if (__builtin_add_overflow(s->keys, n, &keys))
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "k: %" PRId64 " keys are too many", n);
        needed += apa_cache_pages_for(cache, keys) - apa_cache_pages_for(cache, s->keys) + must_copy(cache, s);
        if (needed > free_pages)
            return apa_fail(context, APA_STATUS_OUT_OF_MEMORY,
                            "pages: %" PRId64 " or more needed for %" PRId64 " sequences, %" PRId64 " are free", needed,
                            count, free_pages);
    }
    return APA_STATUS_OK;
}

static void own_last_page(apa_kv_cache *cache, apa_cache_sequence *s)
{
    if (!must_copy(cache, s))
        return;
    const int64_t at = s->keys / cache->page_size, rows = s->keys % cache->page_size;
    const int64_t bytes = (int64_t)apa_dtype_bytes(cache->dtype);
    const int32_t shared = s->page[at], own = apa_cache_page_take(cache);
    for (int64_t h = 0; h < cache->Hkv; h++) {
        memcpy(apa_cache_row(cache, false, own, h, 0), apa_cache_row(cache, false, shared, h, 0),
               (size_t)(rows * cache->D * bytes));
        memcpy(apa_cache_row(cache, true, own, h, 0), apa_cache_row(cache, true, shared, h, 0),
               (size_t)(rows * cache->Dv * bytes));
    }
    s->page[at] = own;
    apa_cache_page_drop(cache, shared);
}

typedef struct writing {
    const apa_kv_cache *cache;
    const apa_cache_growth *grown;
    const apa_tensor *k, *v;
} writing;

static void write_head(void *argument, size_t index)
{
    const writing *work = argument;
    const apa_kv_cache *cache = work->cache;
    const int64_t i = (int64_t)index / cache->Hkv, h = (int64_t)index % cache->Hkv;
    const apa_cache_growth *grown = &work->grown[i];
    const int64_t bytes = (int64_t)apa_dtype_bytes(cache->dtype);
    for (int set = 0; set < 2; set++) {
        const apa_tensor *x = set == 0 ? work->k : work->v;
        const int64_t width = set == 0 ? cache->D : cache->Dv;
        for (int64_t j = 0; j < x->shape[2]; j++) {
            const int64_t key = grown->old_keys + j, from = i * x->stride[0] + h * x->stride[1] + j * x->stride[2];
            const int32_t page = grown->sequence->page[key / cache->page_size];
            memcpy(apa_cache_row(cache, set == 1, page, h, key % cache->page_size),
                   (const char *)x->data + from * bytes, (size_t)(width * bytes));
        }
    }
}

static void commit(apa_context *context, apa_kv_cache *cache, const apa_cache_growth *grown, int64_t count,
                   const apa_tensor *k, const apa_tensor *v)
{
    const int64_t n = k->shape[2];
    for (int64_t i = 0; i < count; i++) {
        apa_cache_sequence *s = grown[i].sequence;
        own_last_page(cache, s);
        for (int64_t p = apa_cache_pages_for(cache, s->keys); p < apa_cache_pages_for(cache, s->keys + n); p++)
            s->page[p] = apa_cache_page_take(cache);
        s->keys += n;
    }
    writing work = {cache, grown, k, v};
    apa_context_parallel(context, write_head, &work, (size_t)(count * cache->Hkv));
    apa_cache_quantise(context, cache, grown, count);
}

apa_status apa_kv_cache_append(apa_context *context, apa_kv_cache *cache, const int64_t *sequences, int64_t count,
                               const apa_tensor *k, const apa_tensor *v)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (cache == NULL || count < 0 || (count > 0 && sequences == NULL))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: missing", cache == NULL ? "cache" : "sequences");
    const int64_t n = k != NULL ? k->shape[2] : 0;
    apa_status status = check_tensor(context, cache, "k", k, count, n, cache->D);
    if (status == APA_STATUS_OK)
        status = check_tensor(context, cache, "v", v, count, n, cache->Dv);
    if (status != APA_STATUS_OK)
        return status;
    apa_cache_growth *grown = apa_aligned_allocate((size_t)count, sizeof *grown);
    if (grown == NULL)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "kv_cache: no memory for a list of sequences");
    int64_t reserved = 0;
    status = mark(context, cache, sequences, count, grown);
    if (status == APA_STATUS_OK)
        status = check_pages(context, cache, grown, count, n);
    for (; status == APA_STATUS_OK && reserved < count; reserved++)
        status = apa_cache_reserve(context, cache, grown[reserved].sequence, grown[reserved].old_keys + n);
    if (status == APA_STATUS_OK && n > 0 && count > 0)
        commit(context, cache, grown, count, k, v);
    for (int64_t i = 0; i < reserved && status != APA_STATUS_OK; i++)
        apa_cache_unreserve(cache, grown[i].sequence);
    apa_aligned_free(grown);
    return status;
}
