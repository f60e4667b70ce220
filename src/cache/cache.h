/* The KV cache from inside.
 *
 *   pages    k [pages][Hkv][page_size][D], v likewise with Dv; a count of references each
 *   sequence pages in order | whole tiles in order | statistics of K at the tiles where its mean is renewed
 *   tile     a header and Hkv blobs (cpu/prep.h), shared between sequences by a count of references
 *
 * Sharing is safe because nothing that is shared is ever written to: a page that others hold is copied before a key is
 * appended to it, a tile is made once, when it is whole. And it is right because a tile is a function of the keys up to
 * its last one: the mean of a segment is over whole tiles before it, segments begin at tiles that the growth factor
 * alone determines. */
#ifndef APA_CACHE_CACHE_H
#define APA_CACHE_CACHE_H

#include "apa/kv_cache.h"
#include "cpu/prep.h"

#define APA_CACHE_SEQUENCES_MAX ((int64_t)1 << 20)

typedef struct apa_cache_sequence {
    int64_t keys;
    int32_t *page; /* [page_room] */
    int64_t page_room;
    const void **tile; /* [tile_room]: blobs of whole tiles; NULL where out of the window, and past the whole ones */
    float *top;        /* [tile_room][Hkv]: largest key scale of tiles 0 … t */
    int64_t tile_room;
    int64_t dropped; /* tiles 1 … dropped-1 have left the window */
    /* means, a row per segment: [Hkv][mean_rows][Dp]; sums over all tiles before the segment: [mean_rows][Hkv][Dp+1] */
    float *mean;
    double *sum;
    int64_t *segment_start; /* [mean_rows] */
    int64_t segments, mean_rows;
    bool marked; /* in the list of the call at hand */
} apa_cache_sequence;

struct apa_kv_cache {
    int64_t Hkv, D, Dv, page_size, pages, window_tiles;
    apa_dtype dtype;
    double growth;
    apa_recipe recipe;   /* as it was given */
    apa_recipe resolved; /* for the pieces of prep */
    bool keeps;          /* quantised tiles */
    apa_cpu_shape shape; /* Dp, Dvp, hadamard_block */
    char *k, *v;
    int32_t *references;                /* [pages] */
    int32_t *returned;                  /* [pages]: a stack of pages that were used and are free */
    int64_t returned_pages, fresh_page; /* pages from fresh_page on were never used */
    apa_cache_sequence **sequence;      /* [room], NULL where there is none */
    int64_t sequences, room;
    int64_t tiles; /* held */
    void *slabs;   /* memory of tiles, each slab linked to the one before; given back with the cache */
    void *free_tile;
    int64_t slab_tiles; /* of the latest */
};

/* ---- tiles (tiles.c) ---- */

size_t apa_cache_tile_bytes(const apa_kv_cache *cache);
/* Gives the memory of all tiles back. */
void apa_cache_tiles_free(apa_kv_cache *cache);
/* Drops a reference; NULL is allowed. */
void apa_cache_tile_drop(apa_kv_cache *cache, const void *tile);
void apa_cache_tile_share(const void *tile);

/* Whole tiles of so many keys. */
static inline int64_t apa_cache_whole(int64_t keys)
{
    return keys / APA_CPU_TILE;
}

/* Room in the sequence for `keys` keys: arrays, and fresh tiles in the places of those that will be whole and are not
 * there yet. On a failure nothing that can be seen has changed. */
apa_status apa_cache_reserve(apa_context *context, apa_kv_cache *cache, apa_cache_sequence *sequence, int64_t keys);
/* The arrays alone. */
apa_status apa_cache_reserve_tables(apa_context *context, apa_kv_cache *cache, apa_cache_sequence *sequence,
                                    int64_t keys);
/* Takes back the fresh tiles of a reservation that is not used. */
void apa_cache_unreserve(apa_kv_cache *cache, apa_cache_sequence *sequence);

/* A sequence that has got keys old_keys … keys-1. */
typedef struct apa_cache_growth {
    apa_cache_sequence *sequence;
    int64_t old_keys;
} apa_cache_growth;

/* Statistics and tiles of sequences that have grown into their reservations (old_keys 0: from the beginning). */
void apa_cache_quantise(apa_context *context, apa_kv_cache *cache, const apa_cache_growth *grown, int64_t count);

/* Tiles, segments and the mean of the first tile after keys were dropped. */
void apa_cache_shorten(apa_context *context, apa_kv_cache *cache, apa_cache_sequence *sequence);

/* ---- pages and sequences (pages.c) ---- */

int64_t apa_cache_pages_for(const apa_kv_cache *cache, int64_t keys);
int64_t apa_cache_free_pages(const apa_kv_cache *cache);
int32_t apa_cache_page_take(apa_kv_cache *cache); /* there must be one */
void apa_cache_page_drop(apa_kv_cache *cache, int32_t page);
char *apa_cache_row(const apa_kv_cache *cache, bool values, int32_t page, int64_t head, int64_t row);

/* NULL, with a message, when there is none. */
apa_cache_sequence *apa_cache_find(apa_context *context, const apa_kv_cache *cache, int64_t number, apa_status *status);
/* A new empty sequence at a number that is free. */
apa_status apa_cache_sequence_make(apa_context *context, apa_kv_cache *cache, int64_t number,
                                   apa_cache_sequence **sequence);
void apa_cache_sequence_free(apa_kv_cache *cache, int64_t number);

/* What prep reads: the sequence's keys as a call of B = 1. */
apa_call apa_cache_call(const apa_kv_cache *cache, const apa_cache_sequence *sequence);

#endif
