/* K of a tile: sums for the mean, codes.
 *
 * A key of D = 64, 128 or 256 is widened, centred and rotated in registers; its codes are made a few keys later, when
 * the maxima of a batch have been found. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/rows.h"
#include "formats/formats.h"

#include <string.h>

#define LARGEST_DIM 1024
#define BATCH 8 /* keys */

/* ---- sums ---- */

/* The largest exponent field of 16-bit rows tells at once whether all of them are finite. */
APA_INLINE bool all_finite_16(uint16_t infinity, const void *const *rows, int n, int64_t D)
{
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d += 32) {
            const __mmask32 lanes = D - d >= 32 ? 0xffffffffu : (1u << (D - d)) - 1u;
            const __m512i x = _mm512_maskz_loadu_epi16(lanes, (const uint16_t *)rows[i] + d);
            most = _mm512_max_epu16(most, _mm512_and_si512(x, magnitude));
        }
    return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16((short)infinity)) == 0;
}

/* sum[d] of 16·width channels from `at` on over rows that are all finite: each channel's rows in order. lanes: of the
 * last 16. */
APA_INLINE void sum_columns(int width, apa_dtype dtype, const void *const *rows, int n, int64_t at, __mmask16 lanes,
                            const void *const *ahead, double *sum)
{
    const int64_t size = dtype == APA_DTYPE_F32 ? 4 : 2;
    /* A sum as a multiply-add by a 1 that the compiler can't see: conversions and sums share two pipes, and conversions
     * fill them. */
    __m512d x[2 * 4], one = _mm512_set1_pd(1.0);
    __asm__("" : "+v"(one));
    for (int i = 0; i < 2 * width; i++) {
        const __mmask8 part = i < 2 * width - 2 ? 0xff : (__mmask8)(lanes >> (i % 2 * 8));
        x[i] = _mm512_maskz_loadu_pd(part, sum + 8 * i);
    }
    for (int key = 0; key < n; key++) {
        ask_for_part(ahead, key, at * size, width * 16 * size);
        for (int i = 0; i < 2 * width; i++) {
            const __mmask8 part = i < 2 * width - 2 ? 0xff : (__mmask8)(lanes >> (i % 2 * 8));
            x[i] = _mm512_fmadd_pd(_mm512_cvtps_pd(load8(dtype, rows[key], at + 8 * i, part)), one, x[i]);
        }
    }
    for (int i = 0; i < 2 * width; i++) {
        const __mmask8 part = i < 2 * width - 2 ? 0xff : (__mmask8)(lanes >> (i % 2 * 8));
        _mm512_mask_storeu_pd(sum + 8 * i, part, x[i]);
    }
}

APA_INLINE int sum_k(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead, double *sum)
{
    const void *kept[TILE];
    const void *const *from = rows;
    int count = n;
    if (dtype == APA_DTYPE_F32 || !all_finite_16(dtype == APA_DTYPE_F16 ? 0x7c00 : 0x7f80, rows, n, D)) {
        count = 0;
        for (int i = 0; i < n; i++) {
            __mmask16 bad = 0;
            for (int64_t d = 0; d < D; d += 16)
                bad |= not_finite(load16(dtype, rows[i], d, first_lanes(D - d)));
            if (bad == 0)
                kept[count++] = rows[i];
        }
        from = kept;
    }
    int64_t d = 0;
    for (; d + 64 <= D; d += 64)
        sum_columns(4, dtype, from, count, d, 0xffff, ahead, sum + d);
    for (; d < D; d += 16)
        sum_columns(1, dtype, from, count, d, first_lanes(D - d), ahead, sum + d);
    return count;
}

int apa_sum_k_avx512(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead, double *sum)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return sum_k(APA_DTYPE_F16, rows, n, D, ahead, sum);
    case APA_DTYPE_BF16:
        return sum_k(APA_DTYPE_BF16, rows, n, D, ahead, sum);
    default:
        return sum_k(APA_DTYPE_F32, rows, n, D, ahead, sum);
    }
}

/* ---- codes ---- */

/* 64 values as codes, in order, from four registers of integers: two packs leave each 128-bit part with four values of
 * every register, and one permutation puts them straight. |x| <= amax times 127/amax is at most 127 + 2^-16, which
 * rounds to 127: nothing is left to clamp. */
APA_INLINE __m512i pack64(const float *x, __m512 inverse)
{
    __m512i c[4];
    for (int i = 0; i < 4; i++)
        c[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(x + 16 * i), inverse));
    const __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(c[0], c[1]), _mm512_packs_epi32(c[2], c[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, packed);
}

/* Butterflies of distance 16·h over keys of n registers, m in all. One flat loop: nested ones stay loops and keep x in
 * memory, which was half of the kernel's time. */
APA_INLINE void butterflies_across(int n, int m, int h, __m512 *x)
{
    for (int i = 0; i < m; i++)
        if (h < n && (i & h) == 0) {
            const __m512 a = x[i], b = x[i + h];
            x[i] = _mm512_add_ps(a, b);
            x[i + h] = _mm512_sub_ps(a, b);
        }
}

/* m/n keys of n registers: widened, centred, rotated, to memory. most[key]: the largest magnitude of each lane;
 * magnitudes compare as integers, and NaN and Inf are the largest (an input that is one stays one through differences,
 * sums and products). Step by step over all registers, so that each instruction finds its operands ready: vector by
 * vector the chains fill the scheduler and the units wait. */
APA_INLINE void turned(int n, int m, apa_dtype dtype, const void *const *rows, const float *mean, bool rotate,
                       float (*to)[16 * LANES], __m512i *most)
{
    __m512 x[16];
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512 root = _mm512_set1_ps(hadamard_scale(16 * n));
    for (int i = 0; i < m; i++)
        x[i] = _mm512_sub_ps(load16(dtype, rows[i / n], i % n * 16, 0xffff), _mm512_loadu_ps(mean + i % n * 16));
    if (rotate) {
        butterflies_within(m, x);
        butterflies_across(n, m, 1, x);
        butterflies_across(n, m, 2, x);
        butterflies_across(n, m, 4, x);
        butterflies_across(n, m, 8, x);
        for (int i = 0; i < m; i++)
            x[i] = _mm512_mul_ps(x[i], root);
    }
    for (int i = 0; i < m; i++) {
        const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x[i]), magnitude);
        _mm512_store_ps(to[i / n] + i % n * LANES, x[i]);
        most[i / n] = i % n == 0 ? bits : _mm512_max_epu32(most[i / n], bits);
    }
}

/* The maximum (or sum) over the lanes of each of eight registers, in the order of the registers. Each step folds two
 * registers into one that holds the halves of both. */
APA_INLINE __m512i fold(__m512i a, __m512i b, bool add)
{
    return add ? _mm512_add_epi32(a, b) : _mm512_max_epu32(a, b);
}

APA_INLINE __m256i reduce_eight(const __m512i *x, bool add)
{
    __m512i a[4], b[2];
    for (int i = 0; i < 4; i++) /* 32-bit neighbours: x[2i], x[2i+1] alternate */
        a[i] = fold(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]), add);
    for (int i = 0; i < 2; i++) /* each 128-bit part: one value of each of x[4i] … x[4i+3] */
        b[i] = fold(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]), add);
    /* parts 0, 1 of both and parts 2, 3 of both */
    const __m512i c = fold(_mm512_shuffle_i64x2(b[0], b[1], 0x44), _mm512_shuffle_i64x2(b[0], b[1], 0xee), add);
    const __m512i d = fold(c, _mm512_shuffle_i64x2(c, c, 0xb1), add);
    return _mm512_castsi512_si256(_mm512_shuffle_i64x2(d, d, 0x88));
}

/* Codes of a key; returns their sums lane by lane. far: they go past the caches. A line that is written whole need not
 * be read first, and by the time the walk comes to a tile's codes most have left the caches anyway. */
APA_INLINE __m512i coded(int n, const float *x, float inverse, bool far, int8_t *code)
{
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < n; i += 4) {
        const __m512i codes = pack64(x + 16 * i, _mm512_set1_ps(inverse));
        total = _mm512_dpbusd_epi32(total, _mm512_set1_epi8(1), codes);
        if (far)
            _mm512_stream_si512((__m512i *)(void *)(code + i * 16), codes);
        else
            _mm512_storeu_si512(code + i * 16, codes);
    }
    return total;
}

/* `count` (1 … BATCH) keys of 16·n values with the rotation over all of them (or none), in three rounds over the batch:
 * turned, with their maxima; the maxima reduced and divided by at once; coded. One key alone is a chain of some 120
 * cycles that leaves the units idle, and two or three of them don't fit into the window of the core.
 * Returns whether they are finite throughout; one that is not has a scale of 0 and codes of 0. */
APA_INLINE bool key_batch(int n, apa_dtype dtype, const void *const *rows, int count, const void *const *ahead,
                          const float *mean, bool rotate, int8_t *k8, int32_t *bias, float *scale)
{
    float x[BATCH][16 * 16] __attribute__((aligned(64)));
    __m512i part[BATCH];
    const __mmask8 real = (__mmask8)((1u << count) - 1u);
    for (int j = 0; j < BATCH; j++)
        part[j] = _mm512_setzero_si512();
    for (int j = 0; j < count; j++)
        ask_for_part(ahead, j, 0, 16 * n * (dtype == APA_DTYPE_F32 ? 4 : 2));
    int i = 0;
    for (; n <= 8 && i + 2 <= count; i += 2)
        turned(n, 2 * n, dtype, rows + i, mean, rotate, x + i, part + i);
    for (; i < count; i++)
        turned(n, n, dtype, rows + i, mean, rotate, x + i, part + i);
    const __m256i bits = reduce_eight(part, false);
    const __m256 amax = _mm256_castsi256_ps(bits);
    const __mmask8 infinite = _mm256_cmpge_epu32_mask(bits, _mm256_set1_epi32(0x7f800000));
    const __mmask8 usable =
        _mm256_mask_cmp_ps_mask((__mmask8)~infinite, amax, _mm256_set1_ps(APA_INT8_AMAX_MIN), _CMP_GE_OQ);
    float inverse[BATCH];
    _mm256_storeu_ps(inverse, _mm256_maskz_div_ps(usable, _mm256_set1_ps(127.0f), amax));
    _mm256_mask_storeu_ps(scale, real, _mm256_maskz_div_ps(usable, amax, _mm256_set1_ps(127.0f)));
    for (i = 0; i < count; i++)
        part[i] = coded(n, x[i], inverse[i], ahead != NULL, k8 + i * 16 * n);
    for (i = 0; i < count && infinite != 0; i++)
        if ((infinite >> i & 1) != 0) {
            part[i] = _mm512_setzero_si512();
            _mm_sfence();
            memset(k8 + i * 16 * n, 0, (size_t)(16 * n));
        }
    const __m256i sums = _mm256_mullo_epi32(reduce_eight(part, true), _mm256_set1_epi32(-128));
    _mm256_mask_storeu_epi32(bias, real, sums);
    return (infinite & real) == 0;
}

/* Any D and block, through memory. */
static bool any_key(apa_dtype dtype, const void *src, int64_t D, const float *mean, int64_t block, int8_t *code,
                    int32_t *bias, float *scale)
{
    float row[LARGEST_DIM];
    bool finite = apa_widen_avx512(dtype, src, D, row);
    for (int64_t d = 0; d < D; d++)
        row[d] -= mean[d];
    if (block > 1)
        apa_hadamard_avx512(row, D, block);
    finite = apa_widen_avx512(APA_DTYPE_F32, row, D, row) && finite;
    memset(code, 0, (size_t)D);
    *scale = finite ? apa_quantise_row_avx512(row, D, code) : 0.0f;
    int32_t sum = 0;
    for (int64_t d = 0; d < D; d++)
        sum += code[d];
    *bias = -128 * sum;
    return finite;
}

APA_INLINE bool whole_keys(int n, apa_dtype dtype, const void *const *rows, int keys, const void *const *ahead,
                           const float *mean, bool rotate, int8_t *k8, int32_t *bias, float *k_scale)
{
    bool finite = true;
    for (int key = 0; key < keys; key += BATCH) {
        const int count = keys - key < BATCH ? keys - key : BATCH;
        finite = key_batch(n, dtype, rows + key, count, ahead != NULL ? ahead + key : NULL, mean, rotate,
                           k8 + key * 16 * n, bias + key, k_scale + key) &&
                 finite;
    }
    if (ahead != NULL)
        _mm_sfence(); /* other threads see the codes in the order of later stores */
    return finite;
}

static bool any_keys(apa_dtype dtype, const void *const *rows, int keys, int64_t D, const void *const *ahead,
                     const float *mean, int64_t block, int8_t *k8, int32_t *bias, float *k_scale)
{
    const int64_t Dp = (D + 7) / 8 * 8;
    bool finite = true;
    for (int key = 0; key < keys; key++) {
        ask_for_part(ahead, key, 0, D * (int64_t)apa_dtype_bytes(dtype));
        int8_t *code = k8 + key * Dp;
        memset(code + D, 0, (size_t)(Dp - D));
        finite = any_key(dtype, rows[key], D, mean, block, code, &bias[key], &k_scale[key]) && finite;
    }
    return finite;
}

/* Keys that the tile doesn't have. */
static void clear_rest(int keys, int64_t D, int8_t *k8, int32_t *bias, float *k_scale)
{
    const int64_t Dp = (D + 7) / 8 * 8;
    memset(k8 + keys * Dp, 0, (size_t)((TILE - keys) * Dp));
    memset(bias + keys, 0, sizeof *bias * (size_t)(TILE - keys));
    memset(k_scale + keys, 0, sizeof *k_scale * (size_t)(TILE - keys));
}

APA_INLINE bool quantise_k(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead,
                           const float *mean, int64_t block, int8_t *k8, int32_t *bias, float *k_scale)
{
    if (D == 64 && block == 64)
        return whole_keys(4, dtype, rows, n, ahead, mean, true, k8, bias, k_scale);
    if (D == 128 && block == 128)
        return whole_keys(8, dtype, rows, n, ahead, mean, true, k8, bias, k_scale);
    if (D == 128 && block == 1)
        return whole_keys(8, dtype, rows, n, ahead, mean, false, k8, bias, k_scale);
    if (D == 256 && block == 256)
        return whole_keys(16, dtype, rows, n, ahead, mean, true, k8, bias, k_scale);
    return any_keys(dtype, rows, n, D, ahead, mean, block, k8, bias, k_scale);
}

bool apa_quantise_k_avx512(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead,
                           const float *mean, int64_t block, int8_t *k8, int32_t *bias, float *k_scale)
{
    clear_rest(n, D, k8, bias, k_scale);
    switch (dtype) {
    case APA_DTYPE_F16:
        return quantise_k(APA_DTYPE_F16, rows, n, D, ahead, mean, block, k8, bias, k_scale);
    case APA_DTYPE_BF16:
        return quantise_k(APA_DTYPE_BF16, rows, n, D, ahead, mean, block, k8, bias, k_scale);
    default:
        return quantise_k(APA_DTYPE_F32, rows, n, D, ahead, mean, block, k8, bias, k_scale);
    }
}
