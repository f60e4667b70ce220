/* Scores of a few rows, keys in the lanes: what is the same whatever the width of a register. The file that includes
 * this defines scores_rows(), the scores of a whole tile for a number of rows that is a constant there. */
#ifndef APA_CPU_FEW_KEYS_H
#define APA_CPU_FEW_KEYS_H

#include "cpu/ahead.h"

#include <string.h>

#define KEYS 32     /* taken through all of d side by side: their memory is read in order, as it was asked for */
#define KEY_STEP 32 /* bytes of each that a step takes at most */
#define LARGEST_DIM 1024

/* What lies beyond the last whole step of the keys, filled up with zeros: a step of its own. */
typedef struct tail_rows {
    const void *row[KEYS];
    char bytes[KEYS][KEY_STEP];
} tail_rows;

static void take_tails(const void *const *keys, int64_t at, int64_t bytes, tail_rows *tails)
{
    memset(tails->bytes, 0, sizeof tails->bytes);
    for (int i = 0; i < KEYS; i++) {
        memcpy(tails->bytes[i], (const char *)keys[i] + at, (size_t)bytes);
        tails->row[i] = tails->bytes[i];
    }
}

APA_INLINE void scores_rows(int R, apa_dtype dtype, const void *const *keys, int64_t D, const apa_cpu_ahead *ahead,
                            const float *q, float *s);

/* One text for each number of rows: the chains live in registers. */
APA_INLINE void scores_typed(apa_dtype dtype, const void *const *keys, int64_t D, const apa_cpu_ahead *ahead, int R,
                             const float *q, float *s)
{
    switch (R) {
    case 1:
        scores_rows(1, dtype, keys, D, ahead, q, s);
        break;
    case 2:
        scores_rows(2, dtype, keys, D, ahead, q, s);
        break;
    case 3:
        scores_rows(3, dtype, keys, D, ahead, q, s);
        break;
    case 4:
        scores_rows(4, dtype, keys, D, ahead, q, s);
        break;
    case 5:
    case 6:
        scores_rows(6, dtype, keys, D, ahead, q, s);
        break;
    default:
        scores_rows(APA_CPU_FEW, dtype, keys, D, ahead, q, s);
    }
}

/* The kernel: n keys, zeros for those that a tile lacks. */
APA_INLINE void scores_of_tile(apa_dtype dtype, const void *const *keys, int n, int64_t D, const apa_cpu_ahead *ahead,
                               int R, const float *q, float *s)
{
    static const uint64_t zeros[LARGEST_DIM * sizeof(float) / sizeof(uint64_t)] = {0};
    const void *whole[APA_CPU_TILE];
    const void *const *from = n < APA_CPU_TILE ? whole : keys;
    for (int key = 0; n < APA_CPU_TILE && key < APA_CPU_TILE; key++)
        whole[key] = key < n ? keys[key] : zeros;
    if (dtype == APA_DTYPE_F16)
        scores_typed(APA_DTYPE_F16, from, D, ahead, R, q, s);
    else if (dtype == APA_DTYPE_BF16)
        scores_typed(APA_DTYPE_BF16, from, D, ahead, R, q, s);
    else
        scores_typed(APA_DTYPE_F32, from, D, ahead, R, q, s);
}

#endif
