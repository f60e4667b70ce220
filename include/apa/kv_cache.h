/* libapa: a KV cache - keys and values of growing sequences, with what the adaptive method makes of them kept beside.
 *
 * Keys and values lie in pages of `page_size` rows; a sequence is a list of pages, pages may be shared (a fork costs no
 * copy until one side writes), and whatever reads pages (apa_problem.block_table) can read these. A flat cache is one
 * page per sequence. For recipes with cold tiles every whole tile of 64 keys is quantised once, when its last key
 * arrives, and kept; a decode step then reads one byte a value instead of two. Statistics of K (its mean) come from the
 * past alone and are renewed where the context has grown by `growth`, so that a tile depends on nothing but the keys up
 * to it: chunk sizes, forks, roll-backs and reloads change no bit of it (docs/kv-cache.md).
 *
 * One call at a time per cache; any context may be used with any cache. Every change is whole or not at all: a failed
 * call leaves the cache as it was. Unless said otherwise functions return INVALID_ARGUMENT for the caller's mistakes
 * and OUT_OF_MEMORY when pages or memory run out, with the text in the context. */
#ifndef APA_KV_CACHE_H
#define APA_KV_CACHE_H

#include "apa/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct apa_kv_cache apa_kv_cache;

typedef struct apa_kv_cache_options {
    size_t size;               /* sizeof(apa_kv_cache_options), set by apa_kv_cache_options_init() */
    int64_t heads, dim, dim_v; /* Hkv, D and Dv: of one layer */
    apa_dtype dtype;           /* of keys and values: f16 (the default), bf16 or f32 */
    int64_t page_size;         /* keys a page; 64 is the default. Flat: the longest context */
    int64_t pages;             /* how many there are. Memory is touched as it is filled */
    /* How tiles are quantised (smooth_k, hadamard); NULL = preset "apa". Recipes without cold tiles ("exact"), and
     * those that the CPU engine does not run, keep none. */
    const apa_recipe *recipe;
    /* K's mean is renewed at tile max(t + 1, ceil(growth·t)) after tile t. >= 1; 1.125 is the default. */
    double growth;
    /* 0 (the default): quantised tiles are all kept. Else tile 0 and the last so many; others are quantised again by
     * the calls that see them, with the same bits. */
    int64_t window_tiles;
} apa_kv_cache_options;

APA_EXPORT void apa_kv_cache_options_init(apa_kv_cache_options *options);

/* Makes an empty cache, to be given to apa_kv_cache_destroy(). *cache is NULL on an error. */
APA_EXPORT apa_status apa_kv_cache_create(apa_context *context, const apa_kv_cache_options *options,
                                          apa_kv_cache **cache);

/* Frees a cache; NULL is allowed. */
APA_EXPORT void apa_kv_cache_destroy(apa_kv_cache *cache);

/* ---- sequences: numbers from 0 on; a removed one's number is given out again ---- */

/* An empty sequence. */
APA_EXPORT apa_status apa_kv_cache_add(apa_context *context, apa_kv_cache *cache, int64_t *sequence);

/* A sequence that begins as `from` is now. Pages and tiles are shared. */
APA_EXPORT apa_status apa_kv_cache_fork(apa_context *context, apa_kv_cache *cache, int64_t from, int64_t *sequence);

/* Drops all keys from number `keys` on (speculative decoding). */
APA_EXPORT apa_status apa_kv_cache_rollback(apa_context *context, apa_kv_cache *cache, int64_t sequence, int64_t keys);

APA_EXPORT apa_status apa_kv_cache_remove(apa_context *context, apa_kv_cache *cache, int64_t sequence);

/* Keys of a sequence; -1 when there is no such sequence. */
APA_EXPORT int64_t apa_kv_cache_keys(const apa_kv_cache *cache, int64_t sequence);

/* What is left and what is used. */
typedef struct apa_kv_cache_usage {
    size_t size; /* sizeof(apa_kv_cache_usage), set by apa_kv_cache_usage_init() */
    int64_t sequences, pages_used, pages_free;
    int64_t tiles;     /* quantised tiles that are held, shared ones counted once */
    size_t tile_bytes; /* and their memory */
} apa_kv_cache_usage;

APA_EXPORT void apa_kv_cache_usage_init(apa_kv_cache_usage *usage);
APA_EXPORT apa_status apa_kv_cache_usage_get(apa_context *context, const apa_kv_cache *cache,
                                             apa_kv_cache_usage *usage);

/* Appends n keys to each of `count` different sequences: k [count, heads, n, dim], v [count, heads, n, dim_v] of the
 * cache's dtype, any strides with a unit last one. All or none. */
APA_EXPORT apa_status apa_kv_cache_append(apa_context *context, apa_kv_cache *cache, const int64_t *sequences,
                                          int64_t count, const apa_tensor *k, const apa_tensor *v);

/* ---- attention ---- */

/* Sets the problem's k, v, block table and used lengths to the cache's: batch entry b is sequences[b]. The rest of the
 * problem is the caller's (q [count, Hq, Sq, D], or packed by cu_seqlens_q with batch = count). `used` and `table` are
 * the caller's memory: count numbers, and count·stride of them, stride >= the longest sequence's pages (NULL: *stride
 * is set to what is needed, and nothing else). Valid until the cache changes. For use with any engine; tiles that are
 * kept take part only in apa_kv_cache_attend(). */
APA_EXPORT apa_status apa_kv_cache_view(apa_context *context, const apa_kv_cache *cache, const int64_t *sequences,
                                        int64_t count, apa_problem *problem, int64_t *used, int32_t *table,
                                        int64_t *stride);

/* apa_attention() over sequences of the cache: q, out, lse, masks and everything else of `problem` as there (k, v,
 * cu_seqlens_k, seqused_k and block_table are filled in here and must be empty). A sequence may stand in the list more
 * than once. recipe NULL = the cache's. options->workspace is best left NULL: no plan says how much is needed. Errors:
 * those of apa_attention(); UNSUPPORTED when the recipe asks for tiles other than those that are kept (softcap takes
 * smoothing off: make the cache with smooth_k=off). */
APA_EXPORT apa_status apa_kv_cache_attend(apa_context *context, const apa_kv_cache *cache, const int64_t *sequences,
                                          int64_t count, const apa_problem *problem, const apa_recipe *recipe,
                                          const apa_attention_options *options, apa_statistics *statistics);

/* ---- files ---- */

/* Writes the whole cache; the file appears complete or not at all. Errors: IO. */
APA_EXPORT apa_status apa_kv_cache_save(apa_context *context, const apa_kv_cache *cache, const char *path);

/* Reads what apa_kv_cache_save() wrote; sequences keep their numbers. Errors: IO, BAD_FILE (no cache, another version,
 * cut off, changed), OUT_OF_MEMORY; *cache is NULL then. */
APA_EXPORT apa_status apa_kv_cache_load(apa_context *context, const char *path, apa_kv_cache **cache);

#ifdef __cplusplus
}
#endif
#endif
