/* Ceilings of the portable level. */
#include "cpu/scalar/scalar.h"

#define LANES APA_CPU_LANES

/* Ceilings in plain C: whatever the compiler makes of loops over 16 lanes. */
double apa_peak_scalar(apa_cpu_peak what, int64_t rounds, const void *memory, int64_t bytes)
{
    float sum[LANES] = {0.0f};
    if (what == APA_CPU_PEAK_READ) {
        uint64_t words = 0;
        for (int64_t i = 0; i < bytes / 8; i++)
            words |= ((const uint64_t *)memory)[i];
        __asm__ volatile("" : : "r"(words));
        return (double)bytes;
    }
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < LANES; i++) {
            const float x = -0.25f * (float)i - 0x1p-20f * (float)round;
            if (what == APA_CPU_PEAK_F32)
                sum[i] += 0x1p-30f * (float)round;
            else
                sum[i] += what == APA_CPU_PEAK_EXP2_F32 ? exp2_scalar(x) : (float)probability(x);
        }
    __asm__ volatile("" : : "r"(sum) : "memory");
    return (what == APA_CPU_PEAK_F32 ? 2.0 : 1.0) * LANES * (double)rounds;
}

double apa_peak_i8_scalar(int64_t rounds)
{
    int32_t sum[LANES] = {0};
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < LANES; i++)
            sum[i] += (int32_t)(uint8_t)(round + i) * (int32_t)(int8_t)round;
    __asm__ volatile("" : : "r"(sum) : "memory");
    return 2.0 * LANES * (double)rounds;
}
