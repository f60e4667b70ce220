/* Pairs of which pass 1 guessed one tile wrong, or both: added to a warpgroup's state or taken out of it.
 *
 * A pair goes through the same products and the same rounding as in pass 1, so its codes of P are the same bits; those
 * of a tile that stays are cleared. What is taken out leaves rounding of FP32 sums and of the 13 bits of one pair's
 * E4M3 sum behind.
 *
 * One warp feeds a ring of pairs with what is to be done to each; the warpgroups work on it at their own pace, each
 * with the scores of its next pair under way beside P·V of the one at hand. */
#ifndef APA_CUDA_WGMMA_FIX_PAIR_CUH
#define APA_CUDA_WGMMA_FIX_PAIR_CUH

#include "cuda/wgmma/cold_walk.cuh"
#include "cuda/wgmma/fix.h"

constexpr uint32_t NO_PAIR = 0xffffffffu; /* ends the ring */

#ifdef APA_CUDA_BULK

template <int D> struct FixRing {
    static constexpr int ENTRY_AT = Pair<D>::META_AT + 64; /* in a stage */
    uint32_t base, barriers;                               /* of each stage 16 bytes: full, empty */
    int stages, warps;                                     /* warps that read it */

    __device__ uint32_t stage(int i) const
    {
        return base + i % stages * Pair<D>::STAGE;
    }
    __device__ uint32_t full(int i) const
    {
        return barriers + i % stages * 16;
    }
    __device__ uint32_t empty(int i) const
    {
        return full(i) + 8;
    }
    __device__ uint32_t phase(int i) const
    {
        return i / stages & 1;
    }
    __device__ void set_barriers() const
    {
        for (int i = 0; i < stages; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), warps);
        }
    }
};

/* One thread. */
template <int D, bool BIAS>
__device__ __forceinline__ void push_fix(const FixRing<D> &ring, int at, const apa_wgmma_fix &fix,
                                         const apa_cuda_job &job, int head)
{
    const uint32_t entry[4] = {fix.pair, fix.first, fix.second, fix.out};
    barrier_wait(ring.empty(at), ring.phase(at) ^ 1);
    store_shared_16(ring.stage(at) + ring.ENTRY_AT, entry);
    if (fix.pair != NO_PAIR)
        copy_pair<D, BIAS>(ring.stage(at), ring.full(at), job, head, static_cast<int>(fix.pair));
    else
        barrier_arrive(ring.full(at));
}

/* The warp has read stage i. */
template <int D> __device__ __forceinline__ void leave_fix(const FixRing<D> &ring, int i)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0)
        barrier_arrive(ring.empty(i));
}

/* The next entry from place `at` on, before place `end`, that is for this warpgroup; NO_PAIR at the ring's end, and
 * where there is none. A warpgroup that still holds a place must not wait for the one that follows it in the same
 * stage. */
template <int D>
__device__ __forceinline__ apa_wgmma_fix next_fix(const FixRing<D> &ring, int &at, int end, const WarpPlace &my)
{
    for (; at < end; at++) {
        barrier_wait(ring.full(at), ring.phase(at));
        uint32_t word[4];
        load_shared_16(word, ring.stage(at) + ring.ENTRY_AT);
        if (word[0] == NO_PAIR || ((word[1] | word[2]) >> own_group() / 4 * 4 & 15) != 0)
            return {word[0], word[1], word[2], word[3]};
        leave_fix(ring, at);
    }
    return {NO_PAIR, 0, 0, 0};
}

/* What is done to a pair for a warp's rows. */
struct FixStep {
    float top[2], v_scale, sign;
    bool changes[2];
    CodeUnits codes;
};

/* The frames of a pair's scores. What is taken out was added in the frame of the pair; what is added has a frame of its
 * own, two tiles a common one. */
template <int D>
__device__ __forceinline__ FixStep frame_fix(PairState<D> &pair, const apa_wgmma_fix &entry, const float (&q_unit)[2],
                                             uint32_t stage, const WarpPlace &my)
{
    const int number = static_cast<int>(entry.pair);
    const bool take_out = (entry.out >> own_group() & 1) != 0;
    const PairMeta meta = load_meta(stage + Pair<D>::META_AT);
    const float unit[2] = {q_unit[0] * meta.k_scale, q_unit[1] * meta.k_scale};
    FixStep step = {{0.0f, 0.0f},
                    meta.v_scale,
                    take_out ? -1.0f : 1.0f,
                    {(entry.first >> own_group() & 1) != 0, (entry.second >> own_group() & 1) != 0},
                    {}};
    if (is_partial(my, meta, number)) {
        ThreadRows<1> seen;
        load_rows(seen, my.row_table);
        mask_pair(pair.s, seen, number * PAIR_KEYS, meta.poisoned);
    }
#pragma unroll
    for (int n = 0; n < 32; n++)
        if (!take_out && !step.changes[n / 16])
            pair.s[n] = MINUS_INF_2;
    step.codes = frame_pair(pair.s, unit, meta.phase, step.top);
    return step;
}

template <int D> __device__ __forceinline__ void code_fix(PairState<D> &pair, const FixStep &step)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        code_step(pair.p[k], pair.s, step.codes, k);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            pair.p[k][i] = step.changes[k / 2] ? pair.p[k][i] : 0u;
}

template <int D>
__device__ __forceinline__ void add_fix(ColdRows<D> &rows, const PairState<D> &pair, const FixStep &step)
{
    if (!step.changes[0] && !step.changes[1])
        return;
    meet_frames<D>(rows, step.top);
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        weight[h] = step.sign * weight_of(step.top[h], rows.frame[h]);
        rows.lambda[h] += (pair.acc[D / 8][2 * h] + pair.acc[D / 8][2 * h + 1]) * weight[h];
    }
    add_pair<D>(rows, pair.acc, weight, step.v_scale);
}

/* All that the ring brings. rows.lambda is without what was held back. */
template <int D, bool BIAS, typename Queries>
__device__ __forceinline__ void fix_all(ColdRows<D> &rows, const Queries &queries, const float (&q_unit)[2],
                                        const FixRing<D> &ring, const WarpPlace &my)
{
    for (int at = 0;;) {
        const apa_wgmma_fix entry = next_fix(ring, at, 0x7fffffff, my);
        if (entry.pair == NO_PAIR)
            return;
        PairState<D> pair;
        products_fence();
        issue_pair_scores<D, BIAS>(pair.s, queries, ring.stage(at));
        products_wait<0>();
        pin(pair.s);
        FixStep step = frame_fix(pair, entry, q_unit, ring.stage(at), my);
        for (;;) {
            int ahead = at + 1;
            const apa_wgmma_fix following = next_fix(ring, ahead, at + ring.stages, my);
            code_fix(pair, step);
            pin(pair.p);
            const int now = at;
            at = ahead;
            if (following.pair == NO_PAIR) {
                products_fence();
                issue_pair_values<D>(pair.acc, pair.p, ring.stage(now));
                products_wait<0>();
                pin(pair.acc);
                leave_fix(ring, now);
                add_fix(rows, pair, step);
                break;
            }
            pin(pair.s);
            products_fence();
            issue_pair_scores<D, BIAS>(pair.s, queries, ring.stage(ahead));
            issue_pair_values<D>(pair.acc, pair.p, ring.stage(now));
            products_wait<1>();
            pin(pair.s);
            const FixStep after = frame_fix(pair, following, q_unit, ring.stage(ahead), my);
            products_wait<0>();
            pin(pair.acc);
            leave_fix(ring, now);
            add_fix(rows, pair, step);
            step = after;
        }
    }
}

#endif
#endif
