/* Number formats: encode, decode, round. See docs/formats.md for the table.
 *
 * All conversions round to nearest, ties to even, once, from the given double; results beyond the largest finite value
 * saturate to it, and so do infinities, in the formats without an infinity and in E5M2 (f16 and bf16, the interchange
 * types, overflow to infinity as IEEE 754 has it). NaN goes to the format's NaN, with its sign where the format has
 * one; f16, bf16 and E5M2 also keep the top bits of the payload and set the quiet bit. E2M1 and int8 have no NaN: NaN
 * encodes as 0, callers keep non-finite values away. Signed formats keep the sign of zero. Unsigned formats encode
 * negative values as 0.
 *
 * E8M0 holds only powers of two: values are rounded to the nearest power of two in value. The midpoint of 2^e and
 * 2^(e+1) is 1.5·2^e and goes up: with one digit neither neighbour is even, and IEEE 754-2019 then takes the larger.
 * Zero, negatives and all under 2^-127 go to 2^-127, all over 2^127 to 2^127. ml_dtypes' float8_e8m0fnu is the same
 * from 2^-126 up to where values round beyond 2^127; there and for zero, negatives and infinities it gives NaN (0xFF),
 * and it takes everything between 2^-127 and 2^-126 up, which is not always the nearest.
 *
 * Everything here is pure and thread-safe, and assumes no rounding mode except where it says FP32 operation. */
#ifndef APA_FORMATS_FORMATS_H
#define APA_FORMATS_FORMATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum apa_format {
    APA_FORMAT_F16,
    APA_FORMAT_BF16,
    APA_FORMAT_E2M1,
    APA_FORMAT_E4M3,
    APA_FORMAT_UE4M3,
    APA_FORMAT_E5M2,
    APA_FORMAT_E8M0,
    APA_FORMAT_UE5M3,
    APA_FORMAT_E4M11,
    APA_FORMAT_UE5M11,
    APA_FORMAT_INT8, /* -127 … 127 as integers, two's complement; -128 decodes but is never made */
    APA_FORMAT_COUNT
} apa_format;

typedef struct apa_format_info {
    const char *name; /* "e4m3" */
    int bits;         /* significant code bits: sign + exponent + mantissa; 4, 7, 8 or 16 */
    int sign_bits, exponent_bits, mantissa_bits, bias;
    double max_finite, min_normal,
        min_subnormal; /* magnitudes; where there are no subnormals min_subnormal = min_normal */
    bool has_infinity, has_nan;
} apa_format_info;

/* Static storage; NULL for a number that is no format. */
const apa_format_info *apa_format_describe(apa_format format);

/* The code in the low `bits` bits, the others 0. */
uint32_t apa_format_encode(apa_format format, double value);
/* Exact. Bits of the code above `bits` are ignored. */
double apa_format_decode(apa_format format, uint32_t code);
/* decode(encode(value)) */
double apa_format_round(apa_format format, double value);

/* The interchange types, for tensors. Widening is exact (a signalling f16 NaN becomes quiet, a bf16 keeps its bits);
 * narrowing is apa_format_encode() of the value, rounded once. */
float apa_f16_to_f32(uint16_t bits);
uint16_t apa_f32_to_f16(float value);
uint16_t apa_f64_to_f16(double value);
float apa_bf16_to_f32(uint16_t bits);
uint16_t apa_f32_to_bf16(float value);
uint16_t apa_f64_to_bf16(double value);

/* ---- Block scales -------------------------------------------------------------------------------------------------
 * The written definition of the codes, for engines to repeat bit for bit: every operation below is one FP32 operation
 * in the default rounding mode (nearest even), never contracted to an FMA, never a reciprocal estimate, in the order
 * given. No result depends on whether subnormals are flushed to zero. In all three a non-finite value counts as +0: it
 * is left out of the maximum and its code is 0 (engines force such tiles hot; nothing here spreads it). */

/* The least block maximum that is not zero to INT8: 127·2^-126. From here on 127/amax is finite and amax/127 is normal;
 * under it (so for every subnormal maximum, where 127/amax overflows) a block is all zero. */
#define APA_INT8_AMAX_MIN 0x1.fcp-120f

/* Symmetric INT8 of n values (any n; 0 gives scale 0):
 *   amax  = max |value|;            amax < APA_INT8_AMAX_MIN: scale = 0, all codes 0, done
 *   inv   = 127.0f / amax
 *   code  = rint(value · inv), nearest even, clamped to -127 … 127
 *   scale = amax / 127.0f           (not 1/inv)
 * Returns the scale; value ≈ code·scale. */
float apa_int8_quantise(const float *value, size_t n, int8_t *code);

#define APA_NVFP4_BLOCK 16
/* Largest block maximum whose amax/6 still rounds to 448: 6·464, 464 being the midpoint between 448 and the next step.
 */
#define APA_NVFP4_AMAX_MAX 2784.0f

/* One NVFP4 block of n <= 16 values (in units of the tensor scale): picks the UE4M3 block scale and the E2M1 codes.
 *   amax  = max |value|;            amax = 0: scale code 0, codes 0, done
 *   c0    = UE4M3 code nearest to amax / 6.0f (division; ties to even; saturating)
 *   trial = c0 + {0,-1,+1,-2,+3,+4,+5,+6} in this order, clamped to 1 … 126; only c0 without search
 *   s     = the trial's value; codes = E2M1 nearest to value/s, ties to even: |value| against midpoint·s, which is
 * exact in FP32 (so is comparing an FP32 quotient value/s with the midpoints: it never rounds onto or past one) error =
 * Σ (|value| - decoded·s)², summed in FP32 from 0 in index order: subtract, square, add and keeps the trial with the
 * least error, the earlier one of equals (`<`, so a sum that overflows to infinity replaces nothing). The sign bit of a
 * code is the value's, also when it rounds to zero. code holds one E2M1 code per byte. *overflow (may be NULL) = amax >
 * APA_NVFP4_AMAX_MAX: amax/6 rounds beyond 448, so the tensor scale is too small. */
uint8_t apa_nvfp4_block(const float *value, size_t n, bool search, uint8_t *code, bool *overflow);

#define APA_MX_BLOCK 32

/* MX block scale of n <= 32 values: the E8M0 code of 2^(floor(log2 amax) - emax), emax the exponent of the element
 * format's largest value (OCP MX 1.0: amax can land up to 2^(emax+1), so it clips); with round_up of amax/max_finite
 * rounded up to a power of two (nothing clips). Exponents outside -127 … 127 saturate; an all-zero block has code 0
 * (2^-127). */
uint8_t apa_mx_scale(const float *value, size_t n, apa_format element, bool round_up);

#endif
