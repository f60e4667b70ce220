/* The portable kernels, contracts in cpu/kernels.h. Called through the table in table.c; a level may fall back on one.
 */
#ifndef APA_CPU_SCALAR_SCALAR_H
#define APA_CPU_SCALAR_SCALAR_H

#include "cpu/exp2.h"
#include "cpu/row.h"

#include <math.h>
#include <string.h>

APA_CPU_DECLARE(scalar);
APA_CPU_DECLARE_DOT(scalar);
APA_CPU_DECLARE_FEW(scalar);

/* 2^n by its bits, for a whole number n; 0 under the subnormals, through two factors where the result is subnormal. */
static inline float power_of_two(float n)
{
    if (n < -126.0f)
        return n < -150.0f ? 0.0f : power_of_two(n + 60.0f) * 0x1p-60f;
    if (n > 127.0f)
        return INFINITY;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

static inline float exp2_scalar(float x)
{
    if (x != x || x == INFINITY)
        return NAN;
    x = x < APA_EXP2_LOWEST ? APA_EXP2_LOWEST : x;
    const float n = rintf(x), r = x - n;
    float p = APA_EXP2_6_C6 * r + APA_EXP2_6_C5;
    p = p * r + APA_EXP2_6_C4;
    p = p * r + APA_EXP2_6_C3;
    p = p * r + APA_EXP2_6_C2;
    p = p * r + APA_EXP2_6_C1;
    p = p * r + 1.0f;
    return p * power_of_two(n);
}

/* round(255·2^x) for x <= 0 */
static inline uint8_t probability(float x)
{
    x = x < APA_EXP2_LOWEST ? APA_EXP2_LOWEST : x;
    const float n = rintf(x), r = x - n;
    float p = (float)((double)(255.0f * APA_EXP2_3_C3) * r + (double)(255.0f * APA_EXP2_3_C2));
    p = (float)((double)p * r + (double)(255.0f * APA_EXP2_3_C1));
    p = (float)((double)p * r + 255.0);
    return (uint8_t)lrintf(p * power_of_two(n));
}

#endif
