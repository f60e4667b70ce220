/* A pair of which pass 1 guessed one tile wrong, or both: added to a warpgroup's state or taken out of it.
 *
 * The pair goes through the same products and the same rounding as in pass 1, so its codes of P are the same bits; those
 * of a tile that stays are cleared. What is taken out leaves rounding of FP32 sums and of the 13 bits of one pair's E4M3
 * sum behind. */
#ifndef APA_CUDA_WGMMA_FIX_PAIR_CUH
#define APA_CUDA_WGMMA_FIX_PAIR_CUH

#include "cuda/wgmma/cold_walk.cuh"

/* groups: bit g, group g's sums of the first tile change, bit 8 + g, of the second one; bit 16 + g: they are taken out,
 * else added. */
struct FixEntry {
    uint32_t pair, groups;
};

__device__ __forceinline__ uint32_t fix_entry(uint32_t first, uint32_t second, uint32_t take_out)
{
    return first | second << 8 | take_out << 16;
}

#ifdef APA_CUDA_BULK

/* Scores of the pair at `stage` that the warp's rows see. */
template <int D, bool BIAS>
__device__ __forceinline__ void scores_again(PairState<D> &pair, const uint32_t (&q)[D / 32][4],
                                             const uint32_t (&picks)[4], uint32_t stage, int number,
                                             const PairMeta &meta, const WarpPlace &my)
{
    products_fence();
    issue_pair_scores<D, BIAS>(pair.s, q, picks, stage);
    products_wait<0>();
    pin(pair.s);
    if (is_partial(my, meta, number)) {
        ThreadRows<1> seen;
        load_rows(seen, my.row_table);
        mask_pair(pair.s, seen, number * PAIR_KEYS, meta.poisoned);
    }
}

/* What is taken out was added in the frame of the pair; what is added has a frame of its own, two tiles a common one. By
 * the whole warpgroup. */
template <int D, bool BIAS>
__device__ __forceinline__ void fix_one(ColdRows<D> &rows, const uint32_t (&q)[D / 32][4], const uint32_t (&picks)[4],
                                        const float (&q_unit)[2], uint32_t stage, const FixEntry &entry,
                                        const WarpPlace &my)
{
    const int number = static_cast<int>(entry.pair);
    const uint32_t own = entry.groups >> my.first_row / 16;
    const bool changes[2] = {(own & 1) != 0, (own & 0x100) != 0}, take_out = (own & 0x10000) != 0;
    const PairMeta meta = load_meta(stage + Pair<D>::META_AT);
    const float unit[2] = {q_unit[0] * meta.k_scale, q_unit[1] * meta.k_scale};
    PairState<D> pair;
    scores_again<D, BIAS>(pair, q, picks, stage, number, meta, my);
#pragma unroll
    for (int n = 0; n < 32; n++)
        if (!take_out && !changes[n / 16])
            pair.s[n] = MINUS_INF_2;
    float top[2];
    soften_pair(pair.s, unit, meta.phase, top);
    pack_pair(pair.s, pair.p);
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            pair.p[step][i] = changes[step / 2] ? pair.p[step][i] : 0u;
    pin(pair.p);
    products_fence();
    issue_pair_values<D>(pair.acc, pair.p, stage);
    products_wait<0>();
    pin(pair.acc);
    if (!changes[0] && !changes[1])
        return;
    meet_frames<D>(rows, top);
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        weight[h] = (take_out ? -1.0f : 1.0f) * weight_of(top[h], rows.frame[h]);
        rows.lambda[h] += (pair.acc[D / 8][2 * h] + pair.acc[D / 8][2 * h + 1]) * weight[h];
    }
    add_pair<D>(rows, pair.acc, weight, meta.v_scale);
}

#endif
#endif
