/* Prep of the adaptive method: K's mean, rotated and quantised K and V tiles of every KV head.
 *
 * Stated order, the same in the reference engine: the mean of channel d is the sum over tiles in order of the tile's
 * sum over its keys in order, both in double, over the keys whose row is wholly finite, divided by their number and
 * rounded once to f32. A centred key is (f32)k - mean in f32, rotated by the block-diagonal Walsh-Hadamard matrix
 * (butterflies of distance 1, 2, 4, …, then one product with 1/sqrt(block)), then quantised per key. V is quantised per
 * tile and channel.
 *
 * A quantised tile is one piece of memory, a *blob*, so that it can be kept and shared beyond a call:
 *   header | k8 [TILE][Dp] | v8 [TILE/4][Dvp][4] | k_bias [TILE] int32 | k_scale [TILE] | v_scale [Dvp] | padding
 * Tiles of a sequence may have lost different means: those that lost the same one are a *segment*, and the walk moves
 * its frames by the difference of q·k̄ where it goes from one segment to another. A call's own tiles are all segment 0.
 */
#ifndef APA_CPU_PREP_H
#define APA_CPU_PREP_H

#include "cpu/shape.h"

typedef struct apa_cpu_blob {
    _Alignas(64) float k_scale_max; /* largest key scale, largest |v| */
    float v_max;
    int32_t segment;
    int32_t poisoned; /* holds a NaN or Inf, so it is forced hot */
} apa_cpu_blob;

/* A blob's parts. */
typedef struct apa_cpu_tile {
    const apa_cpu_blob *blob;
    const int8_t *k8, *v8;
    const int32_t *k_bias;
    const float *k_scale, *v_scale;
} apa_cpu_tile;

size_t apa_cpu_blob_bytes(int64_t Dp, int64_t Dvp);

/* Tiles of one sequence that were quantised before the call; apa_call.kept of a call with B = 1. */
typedef struct apa_kept {
    /* [tiles], one for every TILE keys or part of it: Hkv blobs side by side each; NULL: not kept, made for the call
     * when it sees the tile. A tile in part (the last one) is never kept. */
    const void *const *tile;
    const float *k_scale_top; /* [Hkv]: the largest key scale of all whole tiles, kept or not; NULL: there are none */
    const int64_t *segment_start; /* [segments]: first tile */
    const float *k_mean;          /* [Hkv][mean_rows][Dp]: a row per segment; mean_rows a multiple of TILE */
    int64_t segments, mean_rows;
    /* how they were made; a call that resolves to anything else can't use them */
    bool smooth_k;
    int64_t hadamard_block;
} apa_kept;

typedef struct apa_cpu_prepared {
    const apa_kept *kept; /* NULL: all tiles are the call's own */
    char *blobs;          /* the call's own: [B·Hkv][tiles], or those that it misses: [missing][Hkv] */
    const void **table;   /* with kept: [tiles], kept or own */
    int64_t *missing;     /* with kept: numbers of the tiles that it sees and that are not */
    int64_t missing_tiles;
    size_t blob_bytes;
    int64_t mean_rows;
    float *k_mean;      /* the call's own: [B·Hkv][Dp]; zeros when K is not smoothed */
    float *k_scale_top; /* [B·Hkv]: largest key scale of all tiles */
    double *tile_sum;   /* [B·Hkv][tiles][Dp + 1]: scratch; the last element counts the keys */
    /* Tiles' mean keys as keys, 64 to a tile (cpu/floor.h); floor_groups such tiles a head, 0: the call has no use for
     * them */
    int64_t floor_groups;
    int8_t *floor_k8;     /* [B·Hkv][floor_groups][TILE][Dp] */
    int32_t *floor_bias;  /* [B·Hkv][floor_groups][TILE] */
    float *floor_scale;   /* [B·Hkv][floor_groups][TILE] */
    uint8_t *floor_whole; /* [B·Hkv][floor_groups][TILE]: has 64 keys, all of them finite, as are their values */
    /* Heads that the steps are at: K is read twice, and the second time should find it in the last-level cache. */
    int64_t first_head, heads;
} apa_cpu_prepared;

/* Lays the arrays out in an arena (base NULL: measures). */
void apa_cpu_prepared_layout(const apa_call *call, const apa_cpu_shape *shape, apa_cpu_arena *arena,
                             apa_cpu_prepared *prepared);

/* Tile `tile` of head b·Hkv + kv_head. */
apa_cpu_tile apa_cpu_prepared_tile(const apa_cpu_prepared *prepared, const apa_cpu_shape *shape, int64_t head,
                                   int64_t tile);

/* The mean that a head's segment has lost: [Dp], and those of the segments after it behind it. */
const float *apa_cpu_prepared_mean(const apa_cpu_prepared *prepared, const apa_cpu_shape *shape, int64_t head,
                                   int64_t segment);

/* Prep is some steps, one after the other; the items of a step are independent of each other, so that those of many
 * calls go side by side. They are those of heads first_head … first_head + heads - 1 (of all heads with kept tiles). */
typedef enum apa_cpu_prep_step {
    APA_CPU_PREP_SUMS,   /* of tiles */
    APA_CPU_PREP_MEANS,  /* of heads */
    APA_CPU_PREP_TILES,  /* codes */
    APA_CPU_PREP_TOPS,   /* k_scale_top of heads */
    APA_CPU_PREP_FLOORS, /* means of tiles as keys */
    APA_CPU_PREP_STEPS
} apa_cpu_prep_step;

int64_t apa_cpu_prep_items(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_prepared *prepared,
                           apa_cpu_prep_step step);
void apa_cpu_prep_item(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_kernels *kernels,
                       const apa_cpu_prepared *prepared, apa_cpu_prep_step step, int64_t item);

/* Heads whose K the last-level cache may be expected to hold. */
int64_t apa_cpu_prep_heads_at_once(const apa_call *call);

/* ---- the pieces, for whoever keeps tiles ---- */

/* Sums over the keys of a tile, in the order above: sum [Dp + 1]. */
void apa_cpu_tile_sum(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_kernels *kernels, int64_t b,
                      int64_t kv_head, int64_t tile, double *sum);

/* mean [Dp] of `tiles` sums, `stride` doubles apart; before: the sum of what came before them, or NULL. after: the sum
 * of all, or NULL. */
void apa_cpu_tile_mean(const apa_cpu_shape *shape, const double *before, const double *sum, int64_t tiles,
                       int64_t stride, float *mean, double *after);

/* Quantises a tile of which Skv may cut off a part. mean [Dp]. */
void apa_cpu_blob_make(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_kernels *kernels, int64_t b,
                       int64_t kv_head, int64_t tile, int32_t segment, const float *mean, apa_cpu_blob *blob);

#endif
