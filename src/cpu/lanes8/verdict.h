/* Verdicts over eight lanes: see cpu/lanes8/softmax.h for how this text becomes kernels.
 *
 * One register's tile masses, λ and frame; the arithmetic of every lane is that of the portable level. */
#include "cpu/lanes8/common.h"

#include <math.h>

/* The bits of `real` that belong to the half that starts at lane i. */
APA_INLINE unsigned voters(const apa_cpu_walk *walk, int i)
{
    return (unsigned)walk->real >> i & 0xffu;
}

/* top and the bound of what the tile adds to each lane of one half; false when a real lane is over the limit. */
APA_INLINE bool look_half(const apa_cpu_walk *walk, int i, const float *maximum, float k_scale_max, float *top,
                          v8f *bound)
{
    const v8f lowest = v8f_set(-INFINITY), most = v8f_load(maximum + i);
    const v8m seen = v8f_ne(most, lowest);
    const v8f x = v8f_select(seen, v8f_mul(most, v8f_load(walk->q_scale + i)), lowest);
    v8f_store(top + i, x);
    const v8f highest = v8f_fma(v8f_load(walk->error + i), v8f_set(k_scale_max), x);
    const v8f power = v8f_exp2(v8f_sub(highest, v8f_load(walk->frame + i)));
    *bound = v8f_keep(seen, v8f_mul(power, v8f_set((float)TILE)));
    const v8f skipped = v8f_add(v8f_load(walk->skipped + i), *bound);
    const v8f limit = v8f_mul(v8f_load(walk->lambda + i), v8f_set(APA_CPU_SKIP_LIMIT));
    return (voters(walk, i) & ~v8m_bits(v8f_ge(limit, skipped))) == 0;
}

bool KERNEL(look)(apa_cpu_walk *walk, const float *maximum, float k_scale_max, float v_max, float *top)
{
    v8f bound[2];
    const bool low = look_half(walk, 0, maximum, k_scale_max, top, &bound[0]);
    const bool high = look_half(walk, EIGHT, maximum, k_scale_max, top, &bound[1]);
    if (!low || !high)
        return false;
    for (int h = 0; h < 2; h++) {
        float *skipped = walk->skipped + h * EIGHT, *skipped_v = walk->skipped_v + h * EIGHT;
        v8f_store(skipped, v8f_add(v8f_load(skipped), bound[h]));
        v8f_store(skipped_v, v8f_fma(bound[h], v8f_set(v_max), v8f_load(skipped_v)));
    }
    return true;
}

APA_INLINE void scale8(float *x, v8f factor)
{
    v8f_store(x, v8f_mul(v8f_load(x), factor));
}

APA_INLINE v8f tile_scale(v8f top, v8f frame)
{
    const v8m seen = v8f_ne(top, v8f_set(-INFINITY));
    return v8f_keep(seen, v8f_mul(v8f_exp2(v8f_sub(top, frame)), v8f_set(1.0f / 255.0f)));
}

APA_INLINE bool exceeds(const apa_cpu_walk *walk, int i, v8f mass, float eps, v8f lambda)
{
    return (voters(walk, i) & v8m_bits(v8f_gt(mass, v8f_mul(v8f_set(eps), lambda)))) != 0;
}

/* Moves a half's frame where a top leaps; returns the factors. */
APA_INLINE v8f move_walk(apa_cpu_walk *walk, int i, v8f top, v8m moves)
{
    const v8f frame = v8f_load(walk->frame + i), moved = v8f_select(moves, top, frame);
    const v8f factor = v8f_select(moves, v8f_exp2(v8f_sub(frame, moved)), v8f_set(1.0f));
    v8f_store(walk->frame + i, moved);
    scale8(walk->lambda + i, factor);
    scale8(walk->floor + i, factor);
    scale8(walk->cold + i, factor);
    scale8(walk->skipped + i, factor);
    scale8(walk->skipped_v + i, factor);
    return factor;
}

int KERNEL(judge)(apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *alpha, float *p_scale)
{
    int judged = 0;
    for (int i = 0; i < LANES; i += EIGHT) {
        const v8f x = v8f_load(top + i);
        const v8m moves = v8f_gt(x, v8f_add(v8f_load(walk->frame + i), v8f_set(APA_CPU_FRAME_SLACK)));
        v8f factor = v8f_set(1.0f);
        if (v8m_bits(moves) != 0)
            factor = move_walk(walk, i, x, moves);
        v8f_store(alpha + i, factor);
        if (v8m_bits(v8f_ne(factor, v8f_set(1.0f))) != 0)
            judged |= APA_CPU_JUDGED_MOVED;
        const v8f scale = tile_scale(x, v8f_load(walk->frame + i));
        v8f_store(p_scale + i, scale);
        const v8f mass = v8f_mul(v8f_from_int(v8i_load(sum + i)), scale);
        const v8f lambda = v8f_add(v8f_load(walk->lambda + i), mass);
        v8f_store(walk->lambda + i, lambda);
        if (exceeds(walk, i, mass, eps, v8f_max_drop_nan(lambda, v8f_load(walk->floor + i))))
            judged |= APA_CPU_JUDGED_CANDIDATE;
    }
    return judged;
}

bool KERNEL(judge_again)(const apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *p_scale)
{
    bool hot = false;
    for (int i = 0; i < LANES; i += EIGHT) {
        const v8f scale = tile_scale(v8f_load(top + i), v8f_load(walk->frame + i));
        v8f_store(p_scale + i, scale);
        const v8f mass = v8f_mul(v8f_from_int(v8i_load(sum + i)), scale);
        hot = exceeds(walk, i, mass, eps, v8f_load(walk->lambda + i)) || hot;
    }
    return hot;
}
