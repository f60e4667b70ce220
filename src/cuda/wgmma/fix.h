/* What has to be done to a pair of tiles whose cold sums pass 1 guessed wrong: arithmetic alone, readable from C and
 * CUDA C++, so that it is tested without a device. Bytes hold a bit for each of a unit's eight groups of rows. */
#ifndef APA_CUDA_WGMMA_FIX_H
#define APA_CUDA_WGMMA_FIX_H

#include <stdint.h>

#ifdef __CUDACC__
#define APA_WGMMA_BOTH __host__ __device__ __forceinline__
#else
#define APA_WGMMA_BOTH inline
#endif

/* groups: bit g, group g's sums of the first tile change, bit 8 + g, of the second one; bit 16 + g: they are taken out,
 * else added. What is added has a frame of its own, two tiles a common one. */
typedef struct apa_wgmma_fix {
    uint32_t pair, groups;
} apa_wgmma_fix;

/* At once where both tiles change alike and share a frame, else one by one. then: nothing where its groups are 0. */
typedef struct apa_wgmma_pair_fix {
    apa_wgmma_fix now, then;
} apa_wgmma_pair_fix;

static APA_WGMMA_BOTH apa_wgmma_fix apa_wgmma_fix_entry(uint32_t pair, uint32_t first, uint32_t second,
                                                        uint32_t take_out)
{
    apa_wgmma_fix fix = {pair, first | second << 8 | take_out << 16};
    return fix;
}

/* fix, hot: the bytes of the first tile and << 8 of the second one: groups for which pass 1 guessed wrong (hot, and its
 * sums were added: they come out; cold, and they were held back: they go in), and for which it is hot. apart: groups
 * whose sums of the two tiles are too far from each other for one frame. */
static APA_WGMMA_BOTH apa_wgmma_pair_fix apa_wgmma_fix_of_pair(uint32_t pair, uint32_t fix, uint32_t hot,
                                                               uint32_t apart)
{
    const uint32_t fix_0 = fix & 255, fix_1 = fix >> 8 & 255, hot_0 = hot & 255, hot_1 = hot >> 8 & 255;
    const uint32_t at_once = fix_0 & fix_1 & ~(hot_0 ^ hot_1) & ~apart;
    const uint32_t second = at_once | (fix_1 & ~fix_0), later = fix_0 & fix_1 & ~at_once;
    apa_wgmma_pair_fix both;
    both.now = apa_wgmma_fix_entry(pair, fix_0, second, (fix_0 & hot_0) | (fix_1 & ~fix_0 & hot_1));
    both.then = apa_wgmma_fix_entry(pair, 0, later, later & hot_1);
    return both;
}

#endif
