/* Exact tiles for a few rows at the AVX2 level. The text is cpu/lanes8/few.h. */
#include "cpu/avx2/avx2.h"
#include "cpu/avx2/vector.h"
#include "cpu/unroll.h"

/* Pairs and quads change places inside 128-bit parts, then the parts. */
APA_INLINE void turn8(v8f *x)
{
    v8f t[8];
    APA_UNROLL
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    APA_UNROLL
    for (int i = 0; i < 8; i += 4)
        APA_UNROLL
    for (int j = 0; j < 2; j++) {
        const __m256d a = _mm256_castps_pd(t[i + j]), b = _mm256_castps_pd(t[i + 2 + j]);
        x[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
        x[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
    APA_UNROLL
    for (int j = 0; j < 4; j++) {
        t[j] = _mm256_permute2f128_ps(x[j], x[j + 4], 0x20);
        t[j + 4] = _mm256_permute2f128_ps(x[j], x[j + 4], 0x31);
    }
    APA_UNROLL
    for (int i = 0; i < 8; i++)
        x[i] = t[i];
}

#define SUFFIX avx2
#include "cpu/lanes8/few.h"
