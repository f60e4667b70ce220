/* Softcap, slopes and bias, portable. */
#include "cpu/scalar/bend.h"

#include "cpu/exp2.h"
#include "cpu/kernels.h"

#include <math.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE

/* tanh(x) = E/(E + 2), E = e^(2|x|) - 1 = 2^n·(2^r - 1) + (2^n - 1) with 2|x|·log2 e = n + r: the polynomial of 2^r has
 * no constant term but 1, so 2^r - 1 keeps its leading digits where x is small. */
static float tanh_scalar(float x)
{
    float z = APA_TANH_SCALE * fabsf(x);
    z = z > APA_TANH_HIGHEST ? APA_TANH_HIGHEST : z; /* NaN stays */
    const float n = rintf(z), r = z - n, power = ldexpf(1.0f, n == n ? (int)n : 0);
    float p = APA_EXP2_6_C6 * r + APA_EXP2_6_C5;
    p = p * r + APA_EXP2_6_C4;
    p = p * r + APA_EXP2_6_C3;
    p = p * r + APA_EXP2_6_C2;
    p = p * r + APA_EXP2_6_C1;
    const float e = power * (p * r) + (power - 1.0f);
    return copysignf(e / (e + 2.0f), x);
}

void apa_bend_scalar(float *s, int n, const float *factor, float cap, const float *slope, const float *distance,
                     const float *bias)
{
    for (int key = 0; key < TILE; key++)
        for (int i = 0; i < LANES; i++) {
            float x = s[key * n * LANES + i];
            if (factor != NULL)
                x *= factor[i];
            if (cap > 0.0f)
                x = cap * tanh_scalar(x);
            if (slope != NULL)
                x -= slope[i] * fabsf(distance[i] - (float)key);
            if (bias != NULL)
                x = bias[key * LANES + i] == -INFINITY ? -INFINITY : x + bias[key * LANES + i];
            s[key * n * LANES + i] = x;
        }
}

void apa_into_lanes_scalar(const float *rows, float *lanes)
{
    for (int key = 0; key < TILE; key++)
        for (int i = 0; i < LANES; i++)
            lanes[key * LANES + i] = rows[i * TILE + key];
}
