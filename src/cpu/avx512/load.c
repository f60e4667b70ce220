/* Exact tiles: K and V from their tensors to f32.
 *
 * What bounds these loops is the way of the lines: 64 keys of both become 66 KiB, more than the first-level cache, and
 * every line written is fetched and thrown out again. So each store is a whole line: two keys of eight channels are one
 * of v. */
#include "cpu/avx512/avx512.h"
#include "cpu/avx512/rows.h"

APA_INLINE void load_k(apa_dtype dtype, const char *src, int64_t stride, int64_t n, int64_t D, int64_t Dp, float *k)
{
    for (int64_t key = 0; key < n; key++, src += stride, k += Dp) {
        int64_t d = 0;
        for (; d + LANES <= D; d += LANES)
            _mm512_storeu_ps(k + d, load16(dtype, src, d, 0xffff));
        if (d < Dp)
            _mm512_mask_storeu_ps(k + d, first_lanes(Dp - d), load16(dtype, src, d, first_lanes(D - d)));
    }
}

void apa_load_k_avx512(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t D, int64_t Dp, float *k)
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

/* Rows a and b (NULL: there is none) to key 0 and 1 of `v`. Returns their bits. */
APA_INLINE unsigned load_two(apa_dtype dtype, const char *a, const char *b, int64_t Dv, int64_t Dvp, float *v)
{
    const __mmask16 stored = b != NULL ? 0xffff : 0xff;
    __mmask16 bad_a = 0, bad_b = 0;
    for (int64_t c = 0; c < Dvp; c += LANES, v += 2 * APA_CPU_V_BLOCK) {
        const __mmask16 lanes = c + LANES <= Dv ? 0xffff : first_lanes(Dv - c > 0 ? Dv - c : 0);
        const __m512 x = load16(dtype, a, c, lanes);
        const __m512 y = b != NULL ? load16(dtype, b, c, lanes) : _mm512_setzero_ps();
        bad_a |= not_finite(x);
        bad_b |= not_finite(y);
        _mm512_mask_storeu_ps(v, stored, _mm512_shuffle_f32x4(x, y, 0x44));
        if (c + 8 < Dvp)
            _mm512_mask_storeu_ps(v + APA_CPU_V_BLOCK, stored, _mm512_shuffle_f32x4(x, y, 0xee));
    }
    return (unsigned)(bad_a != 0) | (unsigned)(bad_b != 0) << 1;
}

APA_INLINE uint64_t load_v(apa_dtype dtype, const char *src, int64_t stride, int64_t n, int64_t Dv, int64_t Dvp,
                           int64_t key, float *v)
{
    uint64_t poison = 0;
    int64_t i = 0;
    v += key * 8;
    for (; i + 2 <= n; i += 2)
        poison |= (uint64_t)load_two(dtype, src + i * stride, src + (i + 1) * stride, Dv, Dvp, v + i * 8) << (key + i);
    if (i < n)
        poison |= (uint64_t)load_two(dtype, src + i * stride, NULL, Dv, Dvp, v + i * 8) << (key + i);
    return poison;
}

uint64_t apa_load_v_avx512(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t Dv, int64_t Dvp,
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
