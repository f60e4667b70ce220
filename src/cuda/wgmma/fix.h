/* What has to be done to a pair of tiles whose cold sums pass 1 guessed wrong: arithmetic alone, readable from C and
 * CUDA C++, so that it is tested without a device. Masks hold a bit for each of a block's groups of rows. */
#ifndef APA_CUDA_WGMMA_FIX_H
#define APA_CUDA_WGMMA_FIX_H

#include <stdint.h>

#ifdef __CUDACC__
#define APA_WGMMA_BOTH __host__ __device__ __forceinline__
#else
#define APA_WGMMA_BOTH inline
#endif

/* Groups whose sums of the first tile change, of the second one; out: those whose sums are taken out, else they are
 * added. What is added has a frame of its own, two tiles a common one. */
typedef struct apa_wgmma_fix {
    uint32_t pair, first, second, out;
} apa_wgmma_fix;

/* At once where both tiles change alike and share a frame, else one by one. then: nothing where no group changes. */
typedef struct apa_wgmma_pair_fix {
    apa_wgmma_fix now, then;
} apa_wgmma_pair_fix;

/* Of the first tile and the second one the groups for which pass 1 guessed wrong (hot, and its sums were added: they
 * come out; cold, and they were held back: they go in), and those for which it is hot. apart: groups whose sums of the
 * two tiles are too far from each other for one frame. */
static APA_WGMMA_BOTH apa_wgmma_pair_fix apa_wgmma_fix_of_pair(uint32_t pair, uint32_t fix_0, uint32_t fix_1,
                                                               uint32_t hot_0, uint32_t hot_1, uint32_t apart)
{
    const uint32_t at_once = fix_0 & fix_1 & ~(hot_0 ^ hot_1) & ~apart;
    const uint32_t second = at_once | (fix_1 & ~fix_0), later = fix_0 & fix_1 & ~at_once;
    const apa_wgmma_fix now = {pair, fix_0, second, (fix_0 & hot_0) | (fix_1 & ~fix_0 & hot_1)},
                        then = {pair, 0, later, later & hot_1};
    const apa_wgmma_pair_fix both = {now, then};
    return both;
}

#endif
