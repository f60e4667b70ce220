/* The adaptive method on a block of few rows (decode): the same walk with kernels whose lanes are keys and channels.
 *
 * A decode step has the G rows of one query position a KV head. In the lanes of a register most of the INT8 work would
 * be for nothing; with at most FEW rows the walk is bound by reading codes instead, one byte a value. Masks, softcap
 * and slopes take the other way. */
#include "cpu/adaptive.h"

#include <string.h>

#define LANES APA_CPU_LANES
#define FEW APA_CPU_FEW
#define LARGEST_DIM 1024

/* Row stride of o. */
static int64_t row_of_o(const apa_cpu_block *block)
{
    return (block->shape->Dvp + 15) / 16 * 16;
}

void apa_cpu_few_begin(const apa_cpu_block *block, apa_cpu_adaptive *adaptive)
{
    const uint16_t real = block->reg[0].real;
    const int64_t Dp = block->shape->Dp, Dq = (Dp + 63) / 64 * 64;
    const int R = __builtin_popcount(real);
    adaptive->few = 0;
    if (block->kernels->scores_few_i8 == NULL || block->bend.changes || block->n != 1 || R == 0 || R > FEW ||
        real != (1u << R) - 1u)
        return;
    adaptive->few = R;
    for (int row = 0; row < R; row++)
        for (int64_t d = 0; d < Dp; d += 4)
            memcpy(adaptive->q_few + row * Dq + d, adaptive->q8[0] + d * LANES + row * 4, 4);
}

void apa_cpu_few_scale(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const float *alpha)
{
    const int64_t Do = row_of_o(block);
    for (int row = 0; row < adaptive->few; row++)
        for (int64_t c = 0; c < Do; c++)
            block->reg[0].o[row * Do + c] *= alpha[row];
}

void apa_cpu_few_end(apa_cpu_block *block, apa_cpu_adaptive *adaptive)
{
    const int64_t Do = row_of_o(block), Dvp = block->shape->Dvp;
    float rows[FEW * LARGEST_DIM], *o = block->reg[0].o;
    if (adaptive->few == 0)
        return;
    memcpy(rows, o, sizeof *rows * (size_t)(adaptive->few * Do));
    memset(o, 0, sizeof *o * (size_t)(Dvp * LANES));
    for (int row = 0; row < adaptive->few; row++)
        for (int64_t c = 0; c < Dvp; c++)
            o[c * LANES + row] = rows[row * Do + c];
    adaptive->few = 0;
}
