/* INT8 tiles on plain AVX2. vpmaddubsw adds two products of an unsigned by a signed byte into 16 bits and saturates:
 * 255·127·2 does not fit. So the offset of 128 is taken off the unsigned bytes and the sign of what is left goes to the
 * other factor: |a - 128| · sign(a - 128)·b, at most 128·127·2 = 32512 < 32767 in magnitude for every byte a and every
 * code b in -127 … 127. The scores are then right as they are; P·V gets 128·Σ codes of its channel back.
 *
 * A step is four instructions for 32 products; rows are split into size and sign once a call, for all keys or channels.
 */
#include <immintrin.h>
#include <stdint.h>

#define QUAD_BYTES 128 /* sizes and signs of 8 rows, then of the other 8 */
#define ROW_OFFSET 128
#define SIDE 4 /* a column takes two registers here */
#define SUFFIX avx2

typedef struct row_operand {
    __m256i size, sign;
} row_operand;

static inline __attribute__((always_inline)) const uint8_t *rows_prepare(uint8_t *scratch, const uint8_t *rows,
                                                                         int64_t quads)
{
    for (int64_t i = 0; i < 2 * quads; i++) {
        const __m256i bytes = _mm256_load_si256((const __m256i *)(const void *)(rows + i * 32));
        const __m256i x = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
        __m256i *to = (__m256i *)(void *)(scratch + i * 64);
        _mm256_store_si256(to, _mm256_abs_epi8(x));
        _mm256_store_si256(to + 1, x);
    }
    return scratch;
}

static inline __attribute__((always_inline)) row_operand row_load(const uint8_t *p)
{
    const __m256i *from = (const __m256i *)(const void *)p;
    return (row_operand){_mm256_load_si256(from), _mm256_load_si256(from + 1)};
}

static inline __attribute__((always_inline)) void dot4(__m256i *sum, row_operand row, __m256i codes)
{
    const __m256i pairs = _mm256_maddubs_epi16(row.size, _mm256_sign_epi8(codes, row.sign));
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#include "cpu/avx2/i8_kernels.h"
