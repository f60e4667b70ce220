/* INT8 tiles on AVX-VNNI: vpdpbusd multiplies 4 unsigned by 4 signed bytes and adds to 32 bits, exactly. The offset of
 * the queries costs -128·Σ(key codes), which the accumulators start from; probabilities are unsigned by nature. */
#include <immintrin.h>
#include <stdint.h>

#define QUAD_BYTES 64
#define ROW_OFFSET 0
#define SIDE 6
#define SUFFIX avx2vnni

typedef __m256i row_operand;

static inline __attribute__((always_inline)) const uint8_t *rows_prepare(uint8_t *scratch, const uint8_t *rows,
                                                                         int64_t quads)
{
    (void)scratch;
    (void)quads;
    return rows;
}

static inline __attribute__((always_inline)) row_operand row_load(const uint8_t *p)
{
    return _mm256_load_si256((const __m256i *)(const void *)p);
}

/* Inline assembly for what it is in the 512-bit kernels: some compilers copy and spill the sums of the intrinsic.
 * {vex}: the encoding of AVX-VNNI, not that of AVX512-VNNI. */
static inline __attribute__((always_inline)) void dot4(__m256i *sum, row_operand row, __m256i codes)
{
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(*sum) : "x"(row), "x"(codes));
}

#include "cpu/avx2/i8_kernels.h"
