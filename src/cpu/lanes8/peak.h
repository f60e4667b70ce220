/* Ceilings over eight lanes: see cpu/lanes8/softmax.h for how this text becomes kernels. Loops of the instructions that
 * the kernels live on, with operands in registers; KEEP(x) keeps a result alive, HIDE(x) hides what a
 * variable holds. */
#include "cpu/lanes8/common.h"

#define SUMS 10 /* enough for two units of latency 4, and 16 registers hold them */

APA_INLINE double multiply_adds(int64_t rounds)
{
    v8f sum[SUMS];
    v8f a = v8f_set(1.0f), b = v8f_set(0x1p-30f);
    HIDE(a); /* a compiler that knew them would see that no sum ever changes */
    HIDE(b);
    for (int i = 0; i < SUMS; i++)
        sum[i] = v8f_set(1.0f);
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < SUMS; i++)
            sum[i] = v8f_fma(a, b, sum[i]);
    for (int i = 0; i < SUMS; i++)
        KEEP(sum[i]);
    return 2.0 * EIGHT * SUMS * (double)rounds;
}

APA_INLINE double exponentials_f32(int64_t rounds)
{
    v8f sum = v8f_set(0.0f), x = v8f_set(-0.25f);
    for (int64_t round = 0; round < rounds; round++) {
        sum = v8f_add(sum, v8f_exp2(x));
        x = v8f_sub(x, v8f_set(0x1p-20f));
    }
    KEEP(sum);
    return EIGHT * (double)rounds;
}

APA_INLINE double exponentials_i8(int64_t rounds)
{
    v8i sum = v8i_set(0);
    v8f x = v8f_set(-0.25f);
    for (int64_t round = 0; round < rounds; round++) {
        v8i packed = v8i_set(0);
        for (int i = 0; i < 4; i++) {
            packed = v8i_or(v8i_left(packed, 8), v8i_probability(x));
            x = v8f_sub(x, v8f_set(0x1p-20f));
        }
        sum = v8i_add(sum, v8i_byte_sums(packed));
    }
    KEEP(sum);
    return 4.0 * EIGHT * (double)rounds;
}

APA_INLINE double read_in_order(const char *memory, int64_t bytes)
{
    v8i sum[4] = {v8i_set(0), v8i_set(0), v8i_set(0), v8i_set(0)};
    for (int64_t at = 0; at < bytes; at += 128) {
        v8_prefetch(memory + at + 4096);
        v8_prefetch(memory + at + 4096 + 64);
        for (int i = 0; i < 4; i++)
            sum[i] = v8i_or(sum[i], v8i_load((const int32_t *)(const void *)(memory + at + 32 * i)));
    }
    for (int i = 0; i < 4; i++)
        KEEP(sum[i]);
    return (double)bytes;
}

double KERNEL(peak)(apa_cpu_peak what, int64_t rounds, const void *memory, int64_t bytes)
{
    switch (what) {
    case APA_CPU_PEAK_F32:
        return multiply_adds(rounds);
    case APA_CPU_PEAK_EXP2_F32:
        return exponentials_f32(rounds);
    case APA_CPU_PEAK_EXP2_I8:
        return exponentials_i8(rounds);
    default:
        return read_in_order(memory, bytes);
    }
}
