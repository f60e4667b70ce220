/* Eight floats or integers as two NEON registers, under the names that cpu/lanes8 is written in; cpu/avx2/vector.h has
 * the same names. Masks are all ones or all zeros in each lane. */
#ifndef APA_CPU_NEON_VECTOR_H
#define APA_CPU_NEON_VECTOR_H

#include "cpu/exp2.h"
#include "cpu/kernels.h"

#include <arm_neon.h>

#define APA_INLINE static inline __attribute__((always_inline))
#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define EIGHT 8

typedef struct v8f {
    float32x4_t a, b;
} v8f;
typedef struct v8i {
    int32x4_t a, b;
} v8i;
typedef struct v8m {
    uint32x4_t a, b;
} v8m;

APA_INLINE v8f v8f_load(const float *p)
{
    return (v8f){vld1q_f32(p), vld1q_f32(p + 4)};
}

APA_INLINE void v8f_store(float *p, v8f x)
{
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
}

APA_INLINE v8f v8f_set(float x)
{
    return (v8f){vdupq_n_f32(x), vdupq_n_f32(x)};
}

APA_INLINE v8f v8f_add(v8f x, v8f y)
{
    return (v8f){vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)};
}

APA_INLINE v8f v8f_sub(v8f x, v8f y)
{
    return (v8f){vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)};
}

APA_INLINE v8f v8f_mul(v8f x, v8f y)
{
    return (v8f){vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)};
}

APA_INLINE v8f v8f_div(v8f x, v8f y)
{
    return (v8f){vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)};
}

/* x·y + z and x·y - z, rounded once. */
APA_INLINE v8f v8f_fma(v8f x, v8f y, v8f z)
{
    return (v8f){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)};
}

APA_INLINE v8f v8f_fms(v8f x, v8f y, v8f z)
{
    return (v8f){vfmaq_f32(vnegq_f32(z.a), x.a, y.a), vfmaq_f32(vnegq_f32(z.b), x.b, y.b)};
}

/* The larger; the number where x is NaN. Nothing that is compared here can be a signalling NaN. */
APA_INLINE v8f v8f_max_drop_nan(v8f number, v8f x)
{
    return (v8f){vmaxnmq_f32(number.a, x.a), vmaxnmq_f32(number.b, x.b)};
}

/* The larger; NaN where x is. */
APA_INLINE v8f v8f_max_keep_nan(v8f number, v8f x)
{
    return (v8f){vmaxq_f32(number.a, x.a), vmaxq_f32(number.b, x.b)};
}

/* The smaller; NaN where x is. */
APA_INLINE v8f v8f_min_keep_nan(v8f number, v8f x)
{
    return (v8f){vminq_f32(number.a, x.a), vminq_f32(number.b, x.b)};
}

APA_INLINE v8f v8f_abs(v8f x)
{
    return (v8f){vabsq_f32(x.a), vabsq_f32(x.b)};
}

APA_INLINE v8m v8f_gt(v8f x, v8f y)
{
    return (v8m){vcgtq_f32(x.a, y.a), vcgtq_f32(x.b, y.b)};
}

APA_INLINE v8m v8f_ge(v8f x, v8f y)
{
    return (v8m){vcgeq_f32(x.a, y.a), vcgeq_f32(x.b, y.b)};
}

/* True where either is NaN. */
APA_INLINE v8m v8f_ne(v8f x, v8f y)
{
    return (v8m){vmvnq_u32(vceqq_f32(x.a, y.a)), vmvnq_u32(vceqq_f32(x.b, y.b))};
}

APA_INLINE v8f v8f_select(v8m mask, v8f yes, v8f no)
{
    return (v8f){vbslq_f32(mask.a, yes.a, no.a), vbslq_f32(mask.b, yes.b, no.b)};
}

/* x where the mask says so, 0 elsewhere, whatever x is there. */
APA_INLINE v8f v8f_keep(v8m mask, v8f x)
{
    return (v8f){vreinterpretq_f32_u32(vandq_u32(mask.a, vreinterpretq_u32_f32(x.a))),
                 vreinterpretq_f32_u32(vandq_u32(mask.b, vreinterpretq_u32_f32(x.b)))};
}

/* One bit a lane. */
APA_INLINE unsigned v8m_bits(v8m mask)
{
    static const uint32_t bit[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    return vaddvq_u32(vorrq_u32(vandq_u32(mask.a, vld1q_u32(bit)), vandq_u32(mask.b, vld1q_u32(bit + 4))));
}

APA_INLINE v8m v8m_or(v8m x, v8m y)
{
    return (v8m){vorrq_u32(x.a, y.a), vorrq_u32(x.b, y.b)};
}

APA_INLINE v8m v8m_and(v8m x, v8m y)
{
    return (v8m){vandq_u32(x.a, y.a), vandq_u32(x.b, y.b)};
}

APA_INLINE v8m v8m_none(void)
{
    return (v8m){vdupq_n_u32(0), vdupq_n_u32(0)};
}

/* Lanes that are NaN or infinite: |x| is not under infinity. */
APA_INLINE v8m v8f_not_finite(v8f x)
{
    const float32x4_t infinity = vdupq_n_f32(__builtin_inff());
    return (v8m){vmvnq_u32(vcaltq_f32(x.a, infinity)), vmvnq_u32(vcaltq_f32(x.b, infinity))};
}

APA_INLINE float v8f_reduce_max(v8f x)
{
    return vmaxvq_f32(vmaxq_f32(x.a, x.b));
}

APA_INLINE v8i v8i_load(const int32_t *p)
{
    return (v8i){vld1q_s32(p), vld1q_s32(p + 4)};
}

APA_INLINE void v8i_store(int32_t *p, v8i x)
{
    vst1q_s32(p, x.a);
    vst1q_s32(p + 4, x.b);
}

APA_INLINE v8i v8i_set(int32_t x)
{
    return (v8i){vdupq_n_s32(x), vdupq_n_s32(x)};
}

APA_INLINE v8i v8i_add(v8i x, v8i y)
{
    return (v8i){vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)};
}

APA_INLINE v8i v8i_or(v8i x, v8i y)
{
    return (v8i){vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b)};
}

APA_INLINE v8i v8i_min(v8i x, v8i y)
{
    return (v8i){vminq_s32(x.a, y.a), vminq_s32(x.b, y.b)};
}

APA_INLINE v8i v8i_max(v8i x, v8i y)
{
    return (v8i){vmaxq_s32(x.a, y.a), vmaxq_s32(x.b, y.b)};
}

APA_INLINE v8i v8i_left(v8i x, int bits)
{
    const int32x4_t by = vdupq_n_s32(bits);
    return (v8i){vshlq_s32(x.a, by), vshlq_s32(x.b, by)};
}

APA_INLINE v8m v8i_gt(v8i x, v8i y)
{
    return (v8m){vcgtq_s32(x.a, y.a), vcgtq_s32(x.b, y.b)};
}

APA_INLINE v8i v8i_keep(v8m mask, v8i x)
{
    return (v8i){vandq_s32(vreinterpretq_s32_u32(mask.a), x.a), vandq_s32(vreinterpretq_s32_u32(mask.b), x.b)};
}

/* The lowest byte of each lane. */
APA_INLINE v8i v8i_low_byte(v8i x)
{
    const int32x4_t byte = vdupq_n_s32(0xff);
    return (v8i){vandq_s32(x.a, byte), vandq_s32(x.b, byte)};
}

APA_INLINE v8f v8f_from_bits(v8i x)
{
    return (v8f){vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b)};
}

APA_INLINE v8i v8i_from_bits(v8f x)
{
    return (v8i){vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b)};
}

APA_INLINE v8f v8f_from_int(v8i x)
{
    return (v8f){vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)};
}

/* Rounds to the nearest, ties to even. */
APA_INLINE v8i v8i_from_float(v8f x)
{
    return (v8i){vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)};
}

APA_INLINE int32_t v8i_reduce_add(v8i x)
{
    return vaddvq_s32(vaddq_s32(x.a, x.b));
}

/* Sums of the four unsigned bytes of each lane. */
APA_INLINE v8i v8i_byte_sums(v8i x)
{
    return (v8i){vreinterpretq_s32_u32(vpaddlq_u16(vpaddlq_u8(vreinterpretq_u8_s32(x.a)))),
                 vreinterpretq_s32_u32(vpaddlq_u16(vpaddlq_u8(vreinterpretq_u8_s32(x.b))))};
}

/* Eight integers in -128 … 127 as bytes. */
APA_INLINE void v8i_store_bytes(int8_t *p, v8i x)
{
    vst1_s8(p, vmovn_s16(vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b))));
}

/* Eight 16-bit numbers as f32, and back (nearest even; a NaN becomes quiet and keeps the top of its payload). */
APA_INLINE v8f v8f_load_f16(const void *p)
{
    const float16x8_t x = vreinterpretq_f16_u8(vld1q_u8(p));
    return (v8f){vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)};
}

APA_INLINE v8f v8f_load_bf16(const void *p)
{
    const uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(p));
    return (v8f){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
                 vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))};
}

APA_INLINE void v8f_store_f16(void *p, v8f x)
{
    vst1q_u8(p, vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
}

APA_INLINE uint16x4_t bf16_bits(float32x4_t x)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}

APA_INLINE void v8f_store_bf16(void *p, v8f x)
{
    vst1q_u8(p, vreinterpretq_u8_u16(vcombine_u16(bf16_bits(x.a), bf16_bits(x.b))));
}

APA_INLINE void accumulate2(double *sum, float64x2_t x)
{
    vst1q_f64(sum, vaddq_f64(vld1q_f64(sum), x));
}

/* sum[0 … 7] += x, in double. */
APA_INLINE void v8f_accumulate(double *sum, v8f x)
{
    accumulate2(sum, vcvt_f64_f32(vget_low_f32(x.a)));
    accumulate2(sum + 2, vcvt_high_f64_f32(x.a));
    accumulate2(sum + 4, vcvt_f64_f32(vget_low_f32(x.b)));
    accumulate2(sum + 6, vcvt_high_f64_f32(x.b));
}

/* Lane i of partner is x[i^h]; upper has the lanes where i has the bit h. */
APA_INLINE float32x4_t butterfly(float32x4_t x, float32x4_t partner, uint32x4_t upper)
{
    return vbslq_f32(upper, vsubq_f32(partner, x), vaddq_f32(x, partner));
}

/* Butterflies of distance 1, 2 and 4: lane i gets x[i] + x[i^h], or x[i^h] - x[i] where i has the bit h. */
APA_INLINE v8f v8f_butterfly_1(v8f x)
{
    const uint32x4_t upper = vreinterpretq_u32_u64(vdupq_n_u64(0xffffffff00000000u));
    return (v8f){butterfly(x.a, vrev64q_f32(x.a), upper), butterfly(x.b, vrev64q_f32(x.b), upper)};
}

APA_INLINE v8f v8f_butterfly_2(v8f x)
{
    const uint32x4_t upper = vcombine_u32(vdup_n_u32(0), vdup_n_u32(0xffffffffu));
    return (v8f){butterfly(x.a, vextq_f32(x.a, x.a, 2), upper), butterfly(x.b, vextq_f32(x.b, x.b, 2), upper)};
}

APA_INLINE v8f v8f_butterfly_4(v8f x)
{
    return (v8f){vaddq_f32(x.a, x.b), vsubq_f32(x.a, x.b)};
}

APA_INLINE void v8_prefetch(const void *p)
{
    __builtin_prefetch(p, 0, 2);
}

#endif
