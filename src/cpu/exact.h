/* Exact tiles, and the exact method: segments of keys at absolute positions, merged in one balanced tree. */
#ifndef APA_CPU_EXACT_H
#define APA_CPU_EXACT_H

#include "cpu/block.h"

/* Widens tile `tile` of the block's KV head into block->k and block->v. */
void apa_cpu_exact_load(apa_cpu_block *block, int64_t tile);

/* Adds the loaded tile to the states of the registers listed (those that don't see it are left alone). next: a tile
 * that will be loaded soon, so that its memory is asked for on the way; -1: none. */
void apa_cpu_exact_tile(apa_cpu_block *block, int64_t tile, const int *registers, int n, int64_t next);

/* A stored state of a block. */
typedef struct apa_cpu_node {
    float *o;             /* [registers][Dvp][LANES] */
    apa_cpu_state *state; /* [registers] */
} apa_cpu_node;

void apa_cpu_node_layout(const apa_cpu_shape *shape, apa_cpu_arena *arena, apa_cpu_node *node);

/* node = the block's states. */
void apa_cpu_node_save(const apa_cpu_block *block, const apa_cpu_node *node);

/* The block's states = merge(node, the block's states). An empty state changes no bit of the other. */
void apa_cpu_node_merge(apa_cpu_block *block, const apa_cpu_node *node);

/* Tiles of chunk number `chunk`: *start <= tile < *stop. */
void apa_cpu_exact_chunk_tiles(const apa_cpu_shape *shape, int64_t chunk, int64_t *start, int64_t *stop);

/* Walks chunk number `chunk` of the keys; leaves its merged state in the block. level: scratch, shape->levels nodes. */
void apa_cpu_exact_chunk(apa_cpu_block *block, int64_t chunk, const apa_cpu_node *level);

/* Merges chunks 0 … count-1 (one node each, 64-bit indices) by the same tree into the block. */
void apa_cpu_exact_merge_chunks(apa_cpu_block *block, const apa_cpu_node *chunk, int64_t count,
                                const apa_cpu_node *level);

#endif
