/* Exact tiles for a few rows at the NEON level. The text is cpu/lanes8/few.h. */
#include "cpu/neon/neon.h"
#include "cpu/neon/vector.h"

/* Four vectors of four: lane j of x[i] → lane i of x[j]. */
APA_INLINE void turn4(float32x4_t *x)
{
    const float32x4x2_t low = vzipq_f32(x[0], x[2]), high = vzipq_f32(x[1], x[3]);
    const float32x4x2_t first = vzipq_f32(low.val[0], high.val[0]), last = vzipq_f32(low.val[1], high.val[1]);
    x[0] = first.val[0];
    x[1] = first.val[1];
    x[2] = last.val[0];
    x[3] = last.val[1];
}

/* Quarters are turned, and the two off the diagonal change places. */
APA_INLINE void turn8(v8f *x)
{
    float32x4_t quarter[4][4];
    for (int i = 0; i < 4; i++) {
        quarter[0][i] = x[i].a;
        quarter[1][i] = x[i].b;
        quarter[2][i] = x[4 + i].a;
        quarter[3][i] = x[4 + i].b;
    }
    for (int part = 0; part < 4; part++)
        turn4(quarter[part]);
    for (int i = 0; i < 4; i++) {
        x[i] = (v8f){quarter[0][i], quarter[2][i]};
        x[4 + i] = (v8f){quarter[1][i], quarter[3][i]};
    }
}

#define SUFFIX neon
#include "cpu/lanes8/few.h"
