/* Attention over sequences of a cache: a paged problem, and the tiles that are kept. */
#include "attention/attention.h"
#include "cache/cache.h"

#include <inttypes.h>
#include <string.h>

static apa_status check_list(apa_context *context, const apa_kv_cache *cache, const int64_t *sequences, int64_t count,
                             int64_t *longest)
{
    apa_status status = APA_STATUS_OK;
    *longest = 0;
    if (cache == NULL || count < 0 || (count > 0 && sequences == NULL))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: missing", cache == NULL ? "cache" : "sequences");
    for (int64_t i = 0; i < count && status == APA_STATUS_OK; i++) {
        const apa_cache_sequence *s = apa_cache_find(context, cache, sequences[i], &status);
        if (s != NULL && apa_cache_pages_for(cache, s->keys) > *longest)
            *longest = apa_cache_pages_for(cache, s->keys);
    }
    return status;
}

apa_status apa_kv_cache_view(apa_context *context, const apa_kv_cache *cache, const int64_t *sequences, int64_t count,
                             apa_problem *problem, int64_t *used, int32_t *table, int64_t *stride)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    int64_t longest;
    apa_status status = check_list(context, cache, sequences, count, &longest);
    if (status != APA_STATUS_OK)
        return status;
    if (stride == NULL || (table != NULL && (used == NULL || problem == NULL || *stride < longest)))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "stride: too small or missing, or used or problem missing; expected %" PRId64 " or more pages",
                        longest);
    if (table == NULL) {
        *stride = longest;
        return APA_STATUS_OK;
    }
    for (int64_t i = 0; i < count; i++) {
        const apa_cache_sequence *s = cache->sequence[sequences[i]];
        const int64_t pages = apa_cache_pages_for(cache, s->keys);
        used[i] = s->keys;
        if (pages > 0)
            memcpy(table + i * *stride, s->page, sizeof *table * (size_t)pages);
    }
    problem->k = apa_tensor_hnd(cache->k, cache->dtype, cache->pages, cache->Hkv, cache->page_size, cache->D);
    problem->v = apa_tensor_hnd(cache->v, cache->dtype, cache->pages, cache->Hkv, cache->page_size, cache->Dv);
    problem->seqused_k = used;
    problem->block_table = table;
    problem->block_table_stride = *stride;
    return APA_STATUS_OK;
}

static apa_kept kept_of(const apa_kv_cache *cache, const apa_cache_sequence *s)
{
    const int64_t whole = apa_cache_whole(s->keys);
    return (apa_kept){.tile = s->tile,
                      .k_scale_top = whole > 0 ? s->top + (whole - 1) * cache->Hkv : NULL,
                      .segment_start = s->segment_start,
                      .k_mean = s->mean,
                      .segments = s->segments,
                      .mean_rows = s->mean_rows,
                      .smooth_k = cache->resolved.smooth_k == APA_TOGGLE_ON,
                      .hadamard_block = cache->shape.hadamard_block};
}

static apa_status check_problem(apa_context *context, const apa_problem *problem)
{
    if (problem == NULL || problem->size != sizeof *problem)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "problem: NULL or not set up by apa_problem_init()");
    if (problem->k.dtype != APA_DTYPE_NONE || problem->v.dtype != APA_DTYPE_NONE || problem->cu_seqlens_k != NULL ||
        problem->seqused_k != NULL || problem->block_table != NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "problem: k, v, cu_seqlens_k, seqused_k or block_table is set, expected none of them: they are "
                        "the cache's");
    return APA_STATUS_OK;
}

/* What attention over the list needs beside the problem; in one piece of memory. */
typedef struct listing {
    int64_t *used;
    int32_t *table;
    apa_kept *kept;
} listing;

static listing allocate(int64_t count, int64_t stride)
{
    const size_t used = sizeof(int64_t) * (size_t)(count + 1), kept = sizeof(apa_kept) * (size_t)(count + 1);
    size_t table;
    if (__builtin_mul_overflow((size_t)(count + 1), (size_t)(stride + 1) * sizeof(int32_t), &table))
        return (listing){0};
    char *memory = apa_aligned_allocate(1, used + kept + table);
    if (memory == NULL)
        return (listing){0};
    return (listing){(int64_t *)(void *)(memory + kept), (int32_t *)(void *)(memory + kept + used),
                     (apa_kept *)(void *)memory};
}

apa_status apa_kv_cache_attend(apa_context *context, const apa_kv_cache *cache, const int64_t *sequences, int64_t count,
                               const apa_problem *problem, const apa_recipe *recipe,
                               const apa_attention_options *options, apa_statistics *statistics)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    int64_t stride;
    apa_status status = check_list(context, cache, sequences, count, &stride);
    if (status == APA_STATUS_OK)
        status = check_problem(context, problem);
    if (status != APA_STATUS_OK)
        return status;
    listing list = allocate(count, stride);
    if (list.kept == NULL)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "kv_cache: no memory for a list of sequences");
    apa_problem paged = *problem;
    status = apa_kv_cache_view(context, cache, sequences, count, &paged, list.used, list.table, &stride);
    for (int64_t i = 0; i < count; i++)
        list.kept[i] = kept_of(cache, cache->sequence[sequences[i]]);
    if (status == APA_STATUS_OK)
        status = apa_attention_over(context, &paged, recipe != NULL ? recipe : &cache->recipe, options, statistics,
                                    cache->keeps && count > 0 ? list.kept : NULL, count);
    apa_aligned_free(list.kept);
    return status;
}
