/* When the frames of exact scores move, for eight rows: shared by the softmax of many and of few rows. Include after
 * lanes8/common.h. */
#ifndef APA_CPU_LANES8_FRAME_H
#define APA_CPU_LANES8_FRAME_H

#include <math.h>

/* Returns the rows' factors and leaves what scores are taken against in *base. A row without a frame moves to its first
 * score whatever c is; one that sees no score does not move. */
APA_INLINE v8f move_frame(v8f maximum, float c, float *frame_at, v8f *base)
{
    const v8f lowest = v8f_set(-INFINITY), one = v8f_set(1.0f), zero = v8f_set(0.0f), scale = v8f_set(c);
    const v8f old = v8f_load(frame_at);
    const v8m has_frame = v8f_ne(old, lowest);
    /* where there is no frame yet, a rise over the slack is made up */
    const v8f rise = v8f_select(has_frame, v8f_mul(v8f_sub(maximum, old), scale), v8f_set(2.0f * APA_CPU_FRAME_SLACK));
    const v8f reached = v8f_select(v8f_ne(maximum, lowest), rise, zero);
    const v8m moves = v8f_gt(reached, v8f_set(APA_CPU_FRAME_SLACK));
    const v8f frame = v8f_select(moves, maximum, old);
    v8f factor = one;
    if (v8m_bits(moves) != 0) {
        const v8f power = v8f_exp2(v8f_mul(v8f_sub(old, frame), scale));
        factor = v8f_select(moves, v8f_select(has_frame, power, zero), one);
    }
    v8f_store(frame_at, frame);
    /* No finite score yet: -inf scores weigh nothing, and -inf - -inf would be NaN. */
    *base = v8f_keep(v8f_ne(frame, lowest), frame);
    return factor;
}

#endif
