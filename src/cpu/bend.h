/* What a call puts between q·k and the softmax: softcap, ALiBi slopes, masks. Calls without any of them never come
 * here.
 *
 * Units. A plain call keeps raw scores q·k and folds the softmax scale into the exponential. Here the scale (over the
 * cap, if there is one) goes into Q when a block is loaded, so that scores arrive in natural units (of the cap), and
 * frames are natural. The steps, in the order of apa_problem:
 *     x = cap·tanh(x)                  where there is a cap
 *     x = x - slope·|i + offset - j|   where there are slopes
 *     x = x + bias[key][lane]          where the tile's mask is not all 0 (all true) for the register; -inf selects
 * A mask is read twice: once per (register, tile) to see whether it shows anything at all and whether it changes
 * anything, before K and V are touched, so that hidden tiles cost nothing and open ones only that look; and once, for
 * tiles that it does change, into the lanes. Registers of several heads that share mask rows share both. */
#ifndef APA_CPU_BEND_H
#define APA_CPU_BEND_H

#include "cpu/block.h"

void apa_cpu_bend_layout(const apa_cpu_shape *shape, apa_cpu_arena *arena, apa_cpu_block *block);

/* Slopes and mask rows of the registers of a block whose rows are set. */
void apa_cpu_bend_load(apa_cpu_block *block);

/* Reads the mask of tiles first … end-1; before anything asks about them. */
void apa_cpu_bend_scan(apa_cpu_block *block, int64_t first, int64_t end);

/* Is there anything to do to the scores of a register and a tile that it sees? */
static inline bool apa_cpu_bends(const apa_cpu_block *block, int r, int64_t tile)
{
    const apa_cpu_bend *bend = &block->bend;
    return bend->every || (bend->masked && (bend->bent[tile] >> r & 1) != 0);
}

/* A NaN, +inf or value beyond 2^100 in the mask of a register and a tile: estimates would hide it. */
static inline bool apa_cpu_bend_is_wild(const apa_cpu_block *block, int r, int64_t tile)
{
    return block->bend.masked && (block->bend.wild[tile] >> r & 1) != 0;
}

/* The steps on register r of a panel of n (s points at its first lane). factor: NULL, or [LANES], what scores are
 * multiplied by first. */
void apa_cpu_bend_scores(apa_cpu_block *block, int r, int64_t tile, float *s, int n, const float *factor);

/* Lanes that the mask lets see a key of the tile, causal line and window aside. */
uint16_t apa_cpu_bend_shown(apa_cpu_block *block, int r, int64_t tile, int key);

#endif
