/* Softcap, slopes and bias of the NEON level. The text of the arithmetic is cpu/lanes8/bend.h. */
#include "cpu/neon/neon.h"
#include "cpu/neon/vector.h"

#define SUFFIX neon
#include "cpu/lanes8/bend.h"

/* Four rows of four keys: a load that deals four rows' elements out, and stores. */
void apa_into_lanes_neon(const float *rows, float *lanes)
{
    for (int i = 0; i < LANES; i += 4)
        for (int key = 0; key < TILE; key += 4) {
            const float *at = rows + i * TILE + key;
            const float32x4x2_t low = vzipq_f32(vld1q_f32(at), vld1q_f32(at + 2 * TILE));
            const float32x4x2_t high = vzipq_f32(vld1q_f32(at + TILE), vld1q_f32(at + 3 * TILE));
            const float32x4x2_t first = vzipq_f32(low.val[0], high.val[0]), last = vzipq_f32(low.val[1], high.val[1]);
            vst1q_f32(lanes + key * LANES + i, first.val[0]);
            vst1q_f32(lanes + (key + 1) * LANES + i, first.val[1]);
            vst1q_f32(lanes + (key + 2) * LANES + i, last.val[0]);
            vst1q_f32(lanes + (key + 3) * LANES + i, last.val[1]);
        }
}
