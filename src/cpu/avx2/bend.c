/* Softcap, slopes and bias of the AVX2 level. The text of the arithmetic is cpu/lanes8/bend.h. */
#include "cpu/avx2/avx2.h"
#include "cpu/avx2/vector.h"

#define SUFFIX avx2
#include "cpu/lanes8/bend.h"

/* Eight rows of eight keys: pairs, quads and halves change places. */
APA_INLINE void transpose8(const float *rows, float *lanes)
{
    __m256 row[8], pair[8], quad[8];
    for (int i = 0; i < 8; i++)
        row[i] = _mm256_loadu_ps(rows + i * TILE);
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            quad[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + 2 + j], 0x44);
            quad[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + 2 + j], 0xee);
        }
    for (int j = 0; j < 4; j++) {
        _mm256_storeu_ps(lanes + j * LANES, _mm256_permute2f128_ps(quad[j], quad[j + 4], 0x20));
        _mm256_storeu_ps(lanes + (j + 4) * LANES, _mm256_permute2f128_ps(quad[j], quad[j + 4], 0x31));
    }
}

void apa_into_lanes_avx2(const float *rows, float *lanes)
{
    for (int i = 0; i < LANES; i += 8)
        for (int key = 0; key < TILE; key += 8)
            transpose8(rows + i * TILE + key, lanes + key * LANES + i);
}
