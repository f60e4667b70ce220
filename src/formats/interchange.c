/* f16 and bf16 to and from f32 and f64: what tensors are read and written with.
 *
 * Bit code rather than the compiler's _Float16 and __bf16: it is plain C11, the same on every compiler, and rounds a
 * double once (a double that goes through float first is rounded twice). Widening is exact; narrowing is the encoder of
 * formats.c (IEEE 754-2019 binary16; bf16 is the upper half of binary32, rounded). */
#include "formats/formats.h"

#include <string.h>

static float float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float apa_f16_to_f32(uint16_t bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    const uint32_t magnitude = bits & 0x7FFF;
    if (magnitude >= 0x7C00) { /* infinity, or a NaN: quieted, as conversions do */
        const uint32_t quiet = magnitude > 0x7C00 ? 0x00400000 : 0;
        return float_from_bits(sign | 0x7F800000 | (magnitude & 0x03FF) << 13 | quiet);
    }
    if (magnitude >= 0x0400) { /* normal: move the fields, exponent bias 15 → 127 */
        return float_from_bits(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
    }
    const float value = (float)magnitude * 0x1p-24f; /* subnormal or zero; exact */
    return sign ? -value : value;
}

uint16_t apa_f64_to_f16(double value)
{
    return (uint16_t)apa_format_encode(APA_FORMAT_F16, value);
}

uint16_t apa_f32_to_f16(float value)
{
    return apa_f64_to_f16((double)value);
}

float apa_bf16_to_f32(uint16_t bits)
{
    return float_from_bits((uint32_t)bits << 16);
}

uint16_t apa_f64_to_bf16(double value)
{
    return (uint16_t)apa_format_encode(APA_FORMAT_BF16, value);
}

uint16_t apa_f32_to_bf16(float value)
{
    return apa_f64_to_bf16((double)value);
}
