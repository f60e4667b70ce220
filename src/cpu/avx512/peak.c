/* The ceilings of this level: loops of the instructions that the kernels live on, with operands in registers and enough
 * independent sums to fill two units of latency 4. The empty assembly statements at the end keep results alive. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/vector.h"

#define SUMS 16

static double multiply_adds(int64_t rounds)
{
    __m512 sum[SUMS];
    __m512 a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(0x1p-30f);
    __asm__ volatile("" : "+v"(a), "+v"(b)); /* a compiler that knew them would see that no sum ever changes */
    for (int i = 0; i < SUMS; i++)
        sum[i] = _mm512_set1_ps(1.0f);
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < SUMS; i++)
            sum[i] = _mm512_fmadd_ps(a, b, sum[i]);
    for (int i = 0; i < SUMS; i++)
        __asm__ volatile("" : : "v"(sum[i]));
    return 2.0 * LANES * SUMS * (double)rounds;
}

static double exponentials_f32(int64_t rounds)
{
    __m512 sum[4];
    for (int i = 0; i < 4; i++)
        sum[i] = _mm512_setzero_ps();
    for (int64_t round = 0; round < rounds; round++) {
        __m512 x[8];
        for (int i = 0; i < 8; i++)
            x[i] = _mm512_set1_ps(-0.25f * (float)i - 0x1p-20f * (float)(round & 1023));
        apa_avx512_exp2_of(8, x);
        for (int i = 0; i < 8; i++)
            sum[i & 3] = _mm512_add_ps(sum[i & 3], x[i]);
    }
    for (int i = 0; i < 4; i++)
        __asm__ volatile("" : : "v"(sum[i]));
    return 8.0 * LANES * (double)rounds;
}

static double exponentials_i8(int64_t rounds)
{
    __m512i sum = _mm512_setzero_si512();
    __m512 x[8];
    for (int i = 0; i < 8; i++)
        x[i] = _mm512_set1_ps(-0.25f * (float)i);
    for (int64_t round = 0; round < rounds; round++) {
        __m512i p[8];
        apa_avx512_probabilities(8, x, p);
        for (int i = 0; i < 8; i++)
            x[i] = _mm512_sub_ps(x[i], _mm512_set1_ps(0x1p-20f));
        sum = _mm512_dpbusd_epi32(sum, apa_avx512_pack4(p), _mm512_set1_epi8(1));
        sum = _mm512_dpbusd_epi32(sum, apa_avx512_pack4(p + 4), _mm512_set1_epi8(1));
    }
    __asm__ volatile("" : : "v"(sum));
    return 8.0 * LANES * (double)rounds;
}

static double read_in_order(const char *memory, int64_t bytes)
{
    __m512i sum[8];
    for (int i = 0; i < 8; i++)
        sum[i] = _mm512_setzero_si512();
    for (int64_t at = 0; at < bytes; at += 512) {
        _mm_prefetch(memory + at + 4096, _MM_HINT_T0);
        for (int i = 0; i < 8; i++)
            sum[i] = _mm512_xor_si512(sum[i], _mm512_load_si512(memory + at + 64 * i));
    }
    for (int i = 0; i < 8; i++)
        __asm__ volatile("" : : "v"(sum[i]));
    return (double)bytes;
}

double apa_peak_avx512(apa_cpu_peak what, int64_t rounds, const void *memory, int64_t bytes)
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

double apa_peak_i8_avx512vnni(int64_t rounds)
{
    __m512i sum[SUMS];
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-1);
    /* Unrolled: the sums stay in registers only where every index is a constant. */
#pragma GCC unroll 16
    for (int i = 0; i < SUMS; i++)
        sum[i] = _mm512_setzero_si512();
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++)
            apa_avx512_dot4(&sum[i], a, b);
#pragma GCC unroll 16
    for (int i = 0; i < SUMS; i++)
        __asm__ volatile("" : : "v"(sum[i]));
    return 2.0 * 4 * LANES * SUMS * (double)rounds;
}
