/* The two INT8 products of the AVX2 level, written over one step: the text for i8.c and i8_vnni.c, which define
 *   QUAD_BYTES             of the 16 rows' operands of one step (a quad: 4 bytes of each row), two halves of eight rows
 *   rows_prepare(scratch, rows, quads)  turns quads of unsigned bytes into operands, or gives `rows` back as they are
 *   row_operand, row_load(p)            one half's operand
 *   dot4(&sum, row, codes) sum += Σ of the 4 products of each lane; codes are signed, in -127 … 127
 *   ROW_OFFSET             what the operands have taken off the unsigned bytes: 0 or 128
 *   SIDE                   keys or channels side by side: 4 or 6
 *   SUFFIX                 of the kernels' names
 *
 * A block is one register (two columns of eight lanes) by SIDE keys or channels: 2·SIDE sums, 2 columns, 1 broadcast,
 * of 16 registers. |Σ| <= 255·127·1024 < 2^31 for any D allowed, and 255·127·64 < 2^24 converts to float exactly. */
#include "cpu/avx2/avx2.h"
#include "cpu/avx2/vector.h"
#include "cpu/lanes8/common.h"

#include <math.h>
#include <string.h>

#define LARGEST_DIM 1024
#define OFFSET_OF_Q 128
/* Bytes of scratch a quad; 0: rows are read as they are. */
#define PREPARED (QUAD_BYTES == 4 * LANES ? 0 : QUAD_BYTES)

APA_INLINE __m256i broadcast4(const int8_t *bytes)
{
    int32_t word;
    memcpy(&word, bytes, sizeof word);
    return _mm256_set1_epi32(word);
}

/* Scores of one register of a panel of n with K keys; most is its running maximum. */
APA_INLINE void scores_block(int K, int n, const uint8_t *rows, const int8_t *k, const int32_t *bias,
                             const float *k_scale, int64_t Dp, float *s, __m256 *most)
{
    __m256i sum[SIDE][2];
    for (int j = 0; j < K; j++)
        for (int h = 0; h < 2; h++)
            sum[j][h] = _mm256_set1_epi32(ROW_OFFSET == OFFSET_OF_Q ? 0 : bias[j]);
    for (int64_t d = 0; d < Dp; d += 4) {
        const uint8_t *quad = rows + d / 4 * QUAD_BYTES;
        const row_operand row[2] = {row_load(quad), row_load(quad + QUAD_BYTES / 2)};
        for (int j = 0; j < K; j++) {
            const __m256i codes = broadcast4(k + j * Dp + d);
            dot4(&sum[j][0], row[0], codes);
            dot4(&sum[j][1], row[1], codes);
        }
    }
    for (int j = 0; j < K; j++)
        for (int h = 0; h < 2; h++) {
            const __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[j][h]), _mm256_set1_ps(k_scale[j]));
            most[h] = _mm256_max_ps(most[h], x);
            _mm256_store_ps(s + j * n * LANES + h * EIGHT, x);
        }
}

void KERNEL(scores_i8)(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias, const float *k_scale,
                       int64_t Dp, float *s, float *maximum, const apa_cpu_prefetch *prefetch)
{
    for (int r = 0; r < n; r++) {
        uint8_t scratch[PREPARED == 0 ? 1 : LARGEST_DIM / 4 * PREPARED] __attribute__((aligned(64)));
        const uint8_t *rows = rows_prepare(scratch, q8[r], Dp / 4);
        __m256 most[2] = {_mm256_set1_ps(-INFINITY), _mm256_set1_ps(-INFINITY)};
        int key = 0;
        for (; key + SIDE <= TILE; key += SIDE) {
            apa_lanes8_prefetch(prefetch, r * (TILE / SIDE) + key / SIDE, n * (TILE / SIDE));
            scores_block(SIDE, n, rows, k8 + key * Dp, k8_bias + key, k_scale + key, Dp, s + (key * n + r) * LANES,
                         most);
        }
        if (TILE % SIDE != 0)
            scores_block(TILE % SIDE, n, rows, k8 + key * Dp, k8_bias + key, k_scale + key, Dp,
                         s + (key * n + r) * LANES, most);
        _mm256_storeu_ps(maximum + r * LANES, most[0]);
        _mm256_storeu_ps(maximum + r * LANES + EIGHT, most[1]);
    }
}

/* ROW_OFFSET·Σ codes of each channel: gives back what row_load() took off P. Sums of 32 codes fit in 16 bits. */
APA_INLINE void channel_offsets(const int8_t *v8, int64_t Dvp, int32_t *offset)
{
    for (int64_t c = 0; c < Dvp; c += EIGHT) {
        __m256i sum = _mm256_setzero_si256();
        for (int quad = 0; quad < TILE / 4; quad++) {
            const __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)(v8 + (quad * Dvp + c) * 4));
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes));
        }
        v8i_store(offset + c, _mm256_madd_epi16(sum, _mm256_set1_epi16(ROW_OFFSET)));
    }
}

/* C channels of one register. */
APA_INLINE void pv_block(int C, const uint8_t *rows, const int8_t *v8, const int32_t *offset, const float *v_scale,
                         const float *p_scale, int64_t Dvp, float *o)
{
    __m256i sum[SIDE][2];
    for (int i = 0; i < C; i++)
        for (int h = 0; h < 2; h++)
            sum[i][h] = _mm256_set1_epi32(ROW_OFFSET == 0 ? 0 : offset[i]);
    for (int quad = 0; quad < TILE / 4; quad++) {
        const uint8_t *operands = rows + quad * QUAD_BYTES;
        const row_operand row[2] = {row_load(operands), row_load(operands + QUAD_BYTES / 2)};
        for (int i = 0; i < C; i++) {
            const __m256i codes = broadcast4(v8 + (quad * Dvp + i) * 4);
            dot4(&sum[i][0], row[0], codes);
            dot4(&sum[i][1], row[1], codes);
        }
    }
    for (int i = 0; i < C; i++)
        for (int h = 0; h < 2; h++) {
            float *out = o + i * LANES + h * EIGHT;
            const __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[i][h]), _mm256_set1_ps(v_scale[i]));
            _mm256_store_ps(out, _mm256_fmadd_ps(x, _mm256_loadu_ps(p_scale + h * EIGHT), _mm256_load_ps(out)));
        }
}

/* C channels from c on, of all registers. */
APA_INLINE void pv_channels(int C, int64_t c, int n, const uint8_t *const *rows, const int8_t *v8,
                            const int32_t *offset, const float *v_scale, const float *const *p_scale, int64_t Dvp,
                            float *const *o)
{
    const int32_t *start = ROW_OFFSET == 0 ? offset : offset + c;
    for (int r = 0; r < n; r++)
        pv_block(C, rows[r], v8 + c * 4, start, v_scale + c, p_scale[r], Dvp, o[r] + c * LANES);
}

void KERNEL(pv_i8)(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale, const float *const *p_scale,
                   int64_t Dvp, float *const *o)
{
    uint8_t scratch[APA_CPU_PANEL_I8][PREPARED == 0 ? 1 : TILE / 4 * PREPARED] __attribute__((aligned(64)));
    const uint8_t *rows[APA_CPU_PANEL_I8];
    for (int r = 0; r < n; r++)
        rows[r] = rows_prepare(scratch[r], p8[r], TILE / 4);
    int32_t offset[ROW_OFFSET == 0 ? 1 : LARGEST_DIM] = {0};
    if (ROW_OFFSET != 0)
        channel_offsets(v8, Dvp, offset);
    int64_t c = 0;
    for (; c + SIDE <= Dvp; c += SIDE)
        pv_channels(SIDE, c, n, rows, v8, offset, v_scale, p_scale, Dvp, o);
    /* Dvp is a multiple of 8: 0, 2 or 4 channels are left. */
    if (Dvp - c == 4)
        pv_channels(4, c, n, rows, v8, offset, v_scale, p_scale, Dvp, o);
    else if (Dvp - c == 2)
        pv_channels(2, c, n, rows, v8, offset, v_scale, p_scale, Dvp, o);
}

/* The ceiling of a step: 8 sums, operands in registers. */
double KERNEL(peak_i8)(int64_t rounds)
{
    uint8_t rows[4 * LANES] __attribute__((aligned(64))), scratch[QUAD_BYTES] __attribute__((aligned(64)));
    memset(rows, 131, sizeof rows);
    memset(scratch, 0, sizeof scratch);
    const row_operand row = row_load(rows_prepare(scratch, rows, 1));
    const __m256i codes = _mm256_set1_epi8(-1);
    __m256i sum[8];
    /* Unrolled: the sums stay in registers only where every index is a constant. */
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        sum[i] = _mm256_setzero_si256();
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m256i fresh = codes;
            __asm__ volatile("" : "+x"(fresh)); /* or what depends on codes alone leaves the loop */
            dot4(&sum[i], row, fresh);
        }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        __asm__ volatile("" : : "x"(sum[i]));
    return 2.0 * 4 * EIGHT * 8 * (double)rounds;
}
