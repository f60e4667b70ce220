/* Widening, rounding, quantisation and rotation of rows, eight values at a time: see cpu/lanes8/softmax.h for how this
 * text becomes kernels. The last values of a row that is no multiple of eight go through a padded copy. */
#include "cpu/lanes8/common.h"
#include "formats/formats.h"

#include <string.h>

#define LARGEST_DIM 1024

/* ---- widening and rounding ---- */

APA_INLINE v8f load8(apa_dtype dtype, const char *src)
{
    if (dtype == APA_DTYPE_F32)
        return v8f_load((const float *)(const void *)src);
    return dtype == APA_DTYPE_F16 ? v8f_load_f16(src) : v8f_load_bf16(src);
}

/* Elements at … at+7 of a row of n; what lies past the end is 0 and its memory is not touched. */
APA_INLINE v8f load_upto8(apa_dtype dtype, const char *src, int64_t at, int64_t n)
{
    const int64_t size = dtype == APA_DTYPE_F32 ? 4 : 2;
    if (n - at >= EIGHT)
        return load8(dtype, src + at * size);
    char padded[EIGHT * 4] __attribute__((aligned(32))) = {0};
    if (n > at)
        memcpy(padded, src + at * size, (size_t)((n - at) * size));
    return load8(dtype, padded);
}

APA_INLINE void store_upto8(float *dst, int64_t at, int64_t n, v8f x)
{
    if (n - at >= EIGHT) {
        v8f_store(dst + at, x);
        return;
    }
    float padded[EIGHT];
    v8f_store(padded, x);
    memcpy(dst + at, padded, (size_t)(n - at) * sizeof *dst);
}

APA_INLINE bool widen(apa_dtype dtype, const char *src, int64_t n, float *dst)
{
    v8m bad = v8m_none();
    for (int64_t i = 0; i < n; i += EIGHT) {
        const v8f x = load_upto8(dtype, src, i, n);
        bad = v8m_or(bad, v8f_not_finite(x));
        store_upto8(dst, i, n, x);
    }
    return v8m_bits(bad) == 0;
}

bool KERNEL(widen)(apa_dtype dtype, const void *src, int64_t n, float *dst)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return widen(APA_DTYPE_F16, src, n, dst);
    case APA_DTYPE_BF16:
        return widen(APA_DTYPE_BF16, src, n, dst);
    default:
        return widen(APA_DTYPE_F32, src, n, dst);
    }
}

APA_INLINE void load_k(apa_dtype dtype, const char *src, int64_t stride, int64_t n, int64_t D, int64_t Dp, float *k)
{
    for (int64_t key = 0; key < n; key++)
        for (int64_t d = 0; d < Dp; d += EIGHT)
            v8f_store(k + key * Dp + d, load_upto8(dtype, src + key * stride, d, D));
}

void KERNEL(load_k)(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t D, int64_t Dp, float *k)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        load_k(APA_DTYPE_F16, src, stride, n, D, Dp, k);
        break;
    case APA_DTYPE_BF16:
        load_k(APA_DTYPE_BF16, src, stride, n, D, Dp, k);
        break;
    default:
        load_k(APA_DTYPE_F32, src, stride, n, D, Dp, k);
    }
}

APA_INLINE uint64_t load_v(apa_dtype dtype, const char *src, int64_t stride, int64_t n, int64_t Dv, int64_t Dvp,
                           int64_t key, float *v)
{
    uint64_t poison = 0;
    for (int64_t i = key; i < key + n; i++, src += stride) {
        v8m bad = v8m_none();
        for (int64_t c = 0; c < Dvp; c += EIGHT) {
            const v8f x = load_upto8(dtype, src, c, Dv);
            bad = v8m_or(bad, v8f_not_finite(x));
            v8f_store(v + c / EIGHT * APA_CPU_V_BLOCK + i * EIGHT, x);
        }
        poison |= (uint64_t)(v8m_bits(bad) != 0) << i;
    }
    return poison;
}

uint64_t KERNEL(load_v)(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t Dv, int64_t Dvp,
                        int64_t key, float *v)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return load_v(APA_DTYPE_F16, src, stride, n, Dv, Dvp, key, v);
    case APA_DTYPE_BF16:
        return load_v(APA_DTYPE_BF16, src, stride, n, Dv, Dvp, key, v);
    default:
        return load_v(APA_DTYPE_F32, src, stride, n, Dv, Dvp, key, v);
    }
}

void KERNEL(narrow)(apa_dtype dtype, const float *value, int64_t n, void *dst)
{
    if (dtype == APA_DTYPE_F32) {
        memcpy(dst, value, (size_t)n * sizeof *value);
        return;
    }
    uint16_t *out = dst;
    for (int64_t i = 0; i < n; i += EIGHT) {
        const v8f x = load_upto8(APA_DTYPE_F32, (const char *)value, i, n);
        uint16_t padded[EIGHT], *to = n - i >= EIGHT ? out + i : padded;
        if (dtype == APA_DTYPE_F16)
            v8f_store_f16(to, x);
        else
            v8f_store_bf16(to, x);
        if (to == padded)
            memcpy(out + i, padded, (size_t)(n - i) * sizeof *out);
    }
}

/* ---- INT8 ---- */

APA_INLINE v8i codes8(v8f x, v8f inverse)
{
    const v8i code = v8i_from_float(v8f_mul(x, inverse));
    return v8i_max(v8i_min(code, v8i_set(127)), v8i_set(-127));
}

/* Codes of a row whose largest magnitude is amax; *sum = Σ codes. Returns the scale. */
APA_INLINE float quantise(const float *value, int64_t n, float amax, int8_t *code, int32_t *sum)
{
    *sum = 0;
    if (amax < APA_INT8_AMAX_MIN) {
        memset(code, 0, (size_t)n);
        return 0.0f;
    }
    const v8f inverse = v8f_set(127.0f / amax);
    v8i total = v8i_set(0);
    for (int64_t i = 0; i < n; i += EIGHT) {
        const v8i c = codes8(load_upto8(APA_DTYPE_F32, (const char *)value, i, n), inverse);
        total = v8i_add(total, c);
        if (n - i >= EIGHT) {
            v8i_store_bytes(code + i, c);
            continue;
        }
        int8_t padded[EIGHT];
        v8i_store_bytes(padded, c);
        memcpy(code + i, padded, (size_t)(n - i));
    }
    *sum = v8i_reduce_add(total);
    return amax / 127.0f;
}

float KERNEL(quantise_row)(const float *value, int64_t n, int8_t *code)
{
    v8f most = v8f_set(0.0f);
    for (int64_t i = 0; i < n; i += EIGHT)
        most = v8f_max_drop_nan(most, v8f_abs(load_upto8(APA_DTYPE_F32, (const char *)value, i, n)));
    int32_t sum;
    return quantise(value, n, v8f_reduce_max(most), code, &sum);
}

/* ---- rotation ---- */

/* 1/sqrt(block), made of exact halves and at most one rounded 1/sqrt(2). */
APA_INLINE float hadamard_scale(int64_t block)
{
    float root = 1.0f;
    for (; block > 1; block /= 4)
        root *= block == 2 ? 0.70710678118654752f : 0.5f;
    return root;
}

/* Butterflies of distance 1, 2 and 4 as far as they stay inside a block. */
APA_INLINE v8f butterflies_within(v8f x, int64_t block)
{
    if (block >= 2)
        x = v8f_butterfly_1(x);
    if (block >= 4)
        x = v8f_butterfly_2(x);
    return block >= 8 ? v8f_butterfly_4(x) : x;
}

/* Butterflies of distance h, and of 2h too (`twice`), in one pass over the memory. */
APA_INLINE void butterflies_across(float *x, int64_t block, int64_t h, bool twice)
{
    for (int64_t i = 0; i < block; i += twice ? 4 * h : 2 * h)
        for (int64_t j = i; j < i + h; j += EIGHT) {
            const v8f a = v8f_load(x + j), b = v8f_load(x + j + h);
            const v8f sum = v8f_add(a, b), difference = v8f_sub(a, b);
            if (!twice) {
                v8f_store(x + j, sum);
                v8f_store(x + j + h, difference);
                continue;
            }
            const v8f c = v8f_load(x + j + 2 * h), d = v8f_load(x + j + 3 * h);
            const v8f sum2 = v8f_add(c, d), difference2 = v8f_sub(c, d);
            v8f_store(x + j, v8f_add(sum, sum2));
            v8f_store(x + j + h, v8f_add(difference, difference2));
            v8f_store(x + j + 2 * h, v8f_sub(sum, sum2));
            v8f_store(x + j + 3 * h, v8f_sub(difference, difference2));
        }
}

/* The distances from 8 up of one block. */
APA_INLINE void hadamard_across(float *x, int64_t block)
{
    int64_t h = EIGHT;
    for (; 2 * h < block; h *= 4)
        butterflies_across(x, block, h, true);
    if (h < block)
        butterflies_across(x, block, h, false);
}

void KERNEL(hadamard)(float *value, int64_t n, int64_t block)
{
    const v8f scale = v8f_set(hadamard_scale(block));
    const bool across = block > EIGHT;
    for (int64_t i = 0; i < n; i += EIGHT) {
        const v8f x = butterflies_within(load_upto8(APA_DTYPE_F32, (const char *)value, i, n), block);
        store_upto8(value, i, n, across ? x : v8f_mul(x, scale));
    }
    for (int64_t start = 0; across && start < n; start += block) {
        hadamard_across(value + start, block);
        for (int64_t i = start; i < start + block; i += EIGHT)
            v8f_store(value + i, v8f_mul(v8f_load(value + i), scale));
    }
}

/* ---- one key ---- */

/* The row stays in the first-level cache between the passes: centre and rotate inside vectors, rotate across, then
 * scale, test and find the maximum, then code. */
APA_INLINE bool quantise_k(apa_dtype dtype, const char *src, int64_t D, const float *mean, int64_t block, int8_t *code,
                           float *scale, int32_t *sum)
{
    float row[LARGEST_DIM] __attribute__((aligned(32)));
    const int64_t up = (D + EIGHT - 1) / EIGHT * EIGHT;
    for (int64_t i = 0; i < up; i += EIGHT) {
        const v8f centred = v8f_sub(load_upto8(dtype, src, i, D), load_upto8(APA_DTYPE_F32, (const char *)mean, i, D));
        v8f_store(row + i, butterflies_within(centred, block));
    }
    for (int64_t start = 0; block > EIGHT && start < D; start += block)
        hadamard_across(row + start, block);
    const v8f root = v8f_set(hadamard_scale(block));
    v8m bad = v8m_none();
    v8f most = v8f_set(0.0f);
    for (int64_t i = 0; i < up; i += EIGHT) {
        const v8f x = v8f_mul(v8f_load(row + i), root);
        v8f_store(row + i, x);
        /* A NaN or Inf of the input is one here too: differences, sums and products keep it. */
        bad = v8m_or(bad, v8f_not_finite(x));
        most = v8f_max_drop_nan(most, v8f_abs(x));
    }
    if (v8m_bits(bad) != 0)
        return false;
    *scale = quantise(row, D, v8f_reduce_max(most), code, sum);
    return true;
}
