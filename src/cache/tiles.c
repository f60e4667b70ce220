/* Quantised tiles of growing sequences, and the statistics that they are made with. */
#include "cache/cache.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TILE APA_CPU_TILE
#define LARGEST_DIM 1024
#define TILES_MAX (INT64_MAX / 4)

/* Tiles come from slabs, so that a walk over them finds large pages; the first slab of a cache is small. */
#define FIRST_SLAB_TILES 4
#define SLAB_BYTES ((size_t)8 << 20)

/* Before the blobs of a tile. */
typedef struct tile_head {
    _Alignas(64) int64_t references;
    bool made;
    struct tile_head *next; /* of the free ones */
} tile_head;

/* Before the tiles of a slab. */
typedef struct slab_head {
    _Alignas(64) struct slab_head *before;
} slab_head;

static tile_head *head_of(const void *tile)
{
    return (tile_head *)(uintptr_t)tile - 1;
}

static size_t blob_bytes(const apa_kv_cache *cache)
{
    return apa_cpu_blob_bytes(cache->shape.Dp, cache->shape.Dvp);
}

size_t apa_cache_tile_bytes(const apa_kv_cache *cache)
{
    return sizeof(tile_head) + (size_t)cache->Hkv * blob_bytes(cache);
}

void apa_cache_tile_drop(apa_kv_cache *cache, const void *tile)
{
    if (tile == NULL || --head_of(tile)->references > 0)
        return;
    head_of(tile)->next = cache->free_tile;
    cache->free_tile = head_of(tile);
    cache->tiles--;
}

static bool make_slab(apa_kv_cache *cache)
{
    const size_t bytes = apa_cache_tile_bytes(cache), most = SLAB_BYTES / bytes > 1 ? SLAB_BYTES / bytes : 1;
    const size_t twice = cache->slab_tiles > 0 ? 2 * (size_t)cache->slab_tiles : FIRST_SLAB_TILES;
    const size_t n = twice < most ? twice : most;
    slab_head *slab = apa_aligned_allocate(1, sizeof *slab + n * bytes);
    if (slab == NULL)
        return false;
    slab->before = cache->slabs;
    cache->slabs = slab;
    cache->slab_tiles = (int64_t)n;
    for (size_t i = n; i-- > 0;) {
        tile_head *head = (tile_head *)(void *)((char *)(slab + 1) + i * bytes);
        head->next = cache->free_tile;
        cache->free_tile = head;
    }
    return true;
}

void apa_cache_tiles_free(apa_kv_cache *cache)
{
    for (slab_head *slab = cache->slabs, *before; slab != NULL; slab = before) {
        before = slab->before;
        apa_aligned_free(slab);
    }
}

void apa_cache_tile_share(const void *tile)
{
    if (tile != NULL)
        head_of(tile)->references++;
}

/* ---- room ---- */

/* First tile of the segment after one that begins at `start`. */
static int64_t next_segment(double growth, int64_t start)
{
    const double next = ceil(growth * (double)start);
    if (!(next < (double)TILES_MAX))
        return TILES_MAX;
    return (int64_t)next > start + 1 ? (int64_t)next : start + 1;
}

/* Segments of a sequence of so many tiles. */
static int64_t count_segments(double growth, int64_t tiles)
{
    int64_t n = 1;
    for (int64_t start = next_segment(growth, 0); start < tiles; start = next_segment(growth, start))
        n++;
    return n;
}

/* A larger array with the old content; the old one stays when there is none. */
static bool enlarge(void **array, int64_t old_count, int64_t count, size_t bytes)
{
    void *larger = apa_aligned_allocate((size_t)count, bytes);
    if (larger == NULL)
        return false;
    memset((char *)larger + (size_t)old_count * bytes, 0, (size_t)(count - old_count) * bytes);
    if (old_count > 0)
        memcpy(larger, *array, (size_t)old_count * bytes);
    apa_aligned_free(*array);
    *array = larger;
    return true;
}

static int64_t grown_room(int64_t room, int64_t needed)
{
    const int64_t more = room + room / 2;
    return more > needed ? more : needed;
}

static bool reserve_means(apa_kv_cache *cache, apa_cache_sequence *s, int64_t segments)
{
    if (segments <= s->mean_rows)
        return true;
    const int64_t rows = (segments + TILE - 1) / TILE * TILE, Dp = cache->shape.Dp;
    float *mean = apa_aligned_allocate((size_t)(cache->Hkv * rows * Dp), sizeof *mean);
    if (mean == NULL)
        return false;
    void *sum = s->sum, *start = s->segment_start;
    const bool had = enlarge(&sum, s->mean_rows, rows, sizeof(double) * (size_t)(cache->Hkv * (Dp + 1)));
    s->sum = sum;
    if (!had || !enlarge(&start, s->mean_rows, rows, sizeof *s->segment_start)) {
        apa_aligned_free(mean);
        return false;
    }
    s->segment_start = start;
    memset(mean, 0, sizeof *mean * (size_t)(cache->Hkv * rows * Dp));
    for (int64_t h = 0; h < cache->Hkv && s->mean_rows > 0; h++)
        memcpy(mean + h * rows * Dp, s->mean + h * s->mean_rows * Dp, sizeof *mean * (size_t)(s->mean_rows * Dp));
    apa_aligned_free(s->mean);
    s->mean = mean;
    s->mean_rows = rows;
    return true;
}

static bool reserve_tables(apa_kv_cache *cache, apa_cache_sequence *s, int64_t keys)
{
    const int64_t pages = apa_cache_pages_for(cache, keys), tiles = (keys + TILE - 1) / TILE;
    if (pages > s->page_room) {
        void *page = s->page;
        const int64_t room = grown_room(s->page_room, pages);
        if (!enlarge(&page, s->page_room, room, sizeof *s->page))
            return false;
        s->page = page;
        s->page_room = room;
    }
    if (!cache->keeps)
        return true;
    if (tiles > s->tile_room) {
        void *tile = s->tile, *top = s->top;
        const int64_t room = grown_room(s->tile_room, tiles);
        /* One after the other: an array that is larger than the other does no harm. */
        if (!enlarge(&top, s->tile_room, room, sizeof(float) * (size_t)cache->Hkv))
            return false;
        s->top = top;
        if (!enlarge(&tile, s->tile_room, room, sizeof *s->tile))
            return false;
        s->tile = tile;
        s->tile_room = room;
    }
    return reserve_means(cache, s, count_segments(cache->growth, tiles));
}

static bool fresh_tile(apa_kv_cache *cache, const void **tile)
{
    if (cache->free_tile == NULL && !make_slab(cache))
        return false;
    tile_head *head = cache->free_tile;
    cache->free_tile = head->next;
    *head = (tile_head){.references = 1};
    *tile = head + 1;
    cache->tiles++;
    return true;
}

void apa_cache_unreserve(apa_kv_cache *cache, apa_cache_sequence *s)
{
    for (int64_t t = apa_cache_whole(s->keys); cache->keeps && t < s->tile_room && s->tile[t] != NULL; t++) {
        apa_cache_tile_drop(cache, s->tile[t]);
        s->tile[t] = NULL;
    }
}

apa_status apa_cache_reserve_tables(apa_context *context, apa_kv_cache *cache, apa_cache_sequence *s, int64_t keys)
{
    if (reserve_tables(cache, s, keys))
        return APA_STATUS_OK;
    return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "kv_cache: no memory for a sequence's tables");
}

apa_status apa_cache_reserve(apa_context *context, apa_kv_cache *cache, apa_cache_sequence *s, int64_t keys)
{
    apa_status status = apa_cache_reserve_tables(context, cache, s, keys);
    if (status != APA_STATUS_OK)
        return status;
    for (int64_t t = apa_cache_whole(s->keys); cache->keeps && t < apa_cache_whole(keys); t++)
        if (s->tile[t] == NULL && !fresh_tile(cache, &s->tile[t])) {
            apa_cache_unreserve(cache, s);
            return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "kv_cache: no memory for quantised tiles");
        }
    return APA_STATUS_OK;
}

/* ---- statistics ---- */

typedef struct quantising {
    apa_kv_cache *cache;
    const apa_cpu_kernels *kernels;
    const apa_cache_growth *grown;
    int64_t count;
} quantising;

static float *mean_of(const apa_kv_cache *cache, const apa_cache_sequence *s, int64_t head, int64_t segment)
{
    return s->mean + (head * s->mean_rows + segment) * cache->shape.Dp;
}

static double *sum_of(const apa_kv_cache *cache, const apa_cache_sequence *s, int64_t head, int64_t segment)
{
    return s->sum + (segment * cache->Hkv + head) * (cache->shape.Dp + 1);
}

static bool smooths(const apa_kv_cache *cache)
{
    return cache->resolved.smooth_k == APA_TOGGLE_ON;
}

/* The first tile has no past: its mean is its own, of the keys that it has. */
static void first_mean(const quantising *work, const apa_cache_sequence *s, const apa_call *call, int64_t head)
{
    double sum[LARGEST_DIM + 1];
    apa_cpu_tile_sum(call, &work->cache->shape, work->kernels, 0, head, 0, sum);
    apa_cpu_tile_mean(&work->cache->shape, NULL, sum, 1, 0, mean_of(work->cache, s, head, 0), NULL);
}

/* Means of one head's segments from `from` on: each of all whole tiles before it. */
static void means_of_head(const quantising *work, const apa_cache_growth *grown, int64_t head, int64_t from)
{
    const apa_kv_cache *cache = work->cache;
    apa_cache_sequence *s = grown->sequence;
    const apa_call call = apa_cache_call(cache, s);
    const int64_t width = cache->shape.Dp + 1;
    if (!smooths(cache))
        return; /* they are zeros */
    if (grown->old_keys < TILE)
        first_mean(work, s, &call, head);
    for (int64_t segment = from > 1 ? from : 1; segment < s->segments; segment++) {
        double *total = sum_of(cache, s, head, segment), tile_sum[LARGEST_DIM + 1];
        memcpy(total, sum_of(cache, s, head, segment - 1), sizeof *total * (size_t)width);
        for (int64_t tile = s->segment_start[segment - 1]; tile < s->segment_start[segment]; tile++) {
            apa_cpu_tile_sum(&call, &cache->shape, work->kernels, 0, head, tile, tile_sum);
            apa_cpu_tile_mean(&cache->shape, total, tile_sum, 1, width, mean_of(cache, s, head, segment), total);
        }
    }
}

static int64_t segments_at(const apa_kv_cache *cache, int64_t keys)
{
    return keys == 0 ? 0 : count_segments(cache->growth, (keys + TILE - 1) / TILE);
}

static void means_task(void *argument, size_t index)
{
    const quantising *work = argument;
    const apa_cache_growth *grown = &work->grown[(int64_t)index / work->cache->Hkv];
    means_of_head(work, grown, (int64_t)index % work->cache->Hkv, segments_at(work->cache, grown->old_keys));
}

static void place_segments(const apa_kv_cache *cache, apa_cache_sequence *s)
{
    s->segments = segments_at(cache, s->keys);
    for (int64_t i = 0, start = 0; i < s->segments; i++, start = next_segment(cache->growth, start))
        s->segment_start[i] = start;
}

/* ---- tiles ---- */

static int64_t segment_of(const apa_cache_sequence *s, int64_t tile)
{
    int64_t segment = s->segments - 1;
    while (segment > 0 && s->segment_start[segment] > tile)
        segment--;
    return segment;
}

/* Items: heads of new tiles, sequence by sequence. */
static void tile_task(void *argument, size_t index)
{
    const quantising *work = argument;
    const apa_kv_cache *cache = work->cache;
    int64_t item = (int64_t)index, i = 0, tiles;
    for (;; i++) {
        tiles = apa_cache_whole(work->grown[i].sequence->keys) - apa_cache_whole(work->grown[i].old_keys);
        if (item < tiles * cache->Hkv)
            break;
        item -= tiles * cache->Hkv;
    }
    apa_cache_sequence *s = work->grown[i].sequence;
    const int64_t tile = apa_cache_whole(work->grown[i].old_keys) + item / cache->Hkv, head = item % cache->Hkv;
    if (head_of(s->tile[tile])->made) /* shared with a sequence that has it already */
        return;
    const apa_call call = apa_cache_call(cache, s);
    const int64_t segment = segment_of(s, tile);
    char *blob = (char *)(uintptr_t)s->tile[tile] + (size_t)head * blob_bytes(cache);
    apa_cpu_blob_make(&call, &cache->shape, work->kernels, 0, head, tile, (int32_t)segment,
                      mean_of(cache, s, head, segment), (apa_cpu_blob *)(void *)blob);
}

static void finish_tiles(apa_kv_cache *cache, const apa_cache_growth *grown)
{
    apa_cache_sequence *s = grown->sequence;
    const int64_t whole = apa_cache_whole(s->keys), Hkv = cache->Hkv;
    for (int64_t t = apa_cache_whole(grown->old_keys); t < whole; t++) {
        head_of(s->tile[t])->made = true;
        for (int64_t h = 0; h < Hkv; h++) {
            const char *blob = (const char *)s->tile[t] + (size_t)h * blob_bytes(cache);
            const float own = ((const apa_cpu_blob *)(const void *)blob)->k_scale_max;
            const float before = t > 0 ? s->top[(t - 1) * Hkv + h] : 0.0f;
            s->top[t * Hkv + h] = own > before ? own : before;
        }
    }
    for (int64_t t = s->dropped > 1 ? s->dropped : 1; cache->window_tiles > 0 && t < whole - cache->window_tiles; t++) {
        apa_cache_tile_drop(cache, s->tile[t]);
        s->tile[t] = NULL;
        s->dropped = t + 1;
    }
}

void apa_cache_quantise(apa_context *context, apa_kv_cache *cache, const apa_cache_growth *grown, int64_t count)
{
    quantising work = {cache, apa_cpu_kernels_for(apa_context_isa_level(context)), grown, count};
    int64_t tiles = 0;
    if (!cache->keeps)
        return;
    for (int64_t i = 0; i < count; i++) {
        place_segments(cache, grown[i].sequence);
        tiles += apa_cache_whole(grown[i].sequence->keys) - apa_cache_whole(grown[i].old_keys);
    }
    apa_context_parallel(context, means_task, &work, (size_t)(count * cache->Hkv));
    if (tiles > 0)
        apa_context_parallel(context, tile_task, &work, (size_t)(tiles * cache->Hkv));
    for (int64_t i = 0; i < count; i++)
        finish_tiles(cache, &grown[i]);
}

void apa_cache_shorten(apa_context *context, apa_kv_cache *cache, apa_cache_sequence *s)
{
    if (!cache->keeps)
        return;
    const int64_t whole = apa_cache_whole(s->keys);
    for (int64_t t = whole; t < s->tile_room; t++) {
        apa_cache_tile_drop(cache, s->tile[t]);
        s->tile[t] = NULL;
    }
    s->dropped = s->dropped < whole ? s->dropped : whole;
    place_segments(cache, s);
    if (s->keys == 0 || s->keys >= TILE)
        return;
    const apa_cache_growth now = {s, 0};
    const quantising work = {cache, apa_cpu_kernels_for(apa_context_isa_level(context)), &now, 1};
    for (int64_t head = 0; head < cache->Hkv; head++)
        means_of_head(&work, &now, head, s->segments);
}
