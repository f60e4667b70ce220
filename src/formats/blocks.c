/* Scales of blocks: symmetric INT8, NVFP4 with its searched UE4M3 scale, and the MX power of two.
 *
 * These functions are the written definition of the codes: single FP32 operations in a stated order (see formats.h),
 * which a vector engine repeats bit for bit. The one sum (the NVFP4 search) runs in index order.
 *
 * Sources: SageAttention 2, arXiv 2411.10958 (symmetric INT8, amax/127); NVFP4 with one UE4M3 scale per 16 values and
 * the search around amax/6 as in APA 0.6; OCP Microscaling Formats 1.0, section 6.3 (MX scale). */
#include "formats/formats.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* |value| where it counts: non-finite values count as zero. */
static float finite_magnitude(float value)
{
    return isfinite(value) ? fabsf(value) : 0.0f;
}

static float block_maximum(const float *value, size_t n)
{
    float amax = 0.0f;
    for (size_t i = 0; i < n; i++) {
        const float a = finite_magnitude(value[i]);
        amax = a > amax ? a : amax;
    }
    return amax;
}

float apa_int8_quantise(const float *value, size_t n, int8_t *code)
{
    const float amax = block_maximum(value, n);
    if (amax < APA_INT8_AMAX_MIN) {
        memset(code, 0, n);
        return 0.0f;
    }
    const float inverse = 127.0f / amax;
    for (size_t i = 0; i < n; i++) {
        const float x = isfinite(value[i]) ? rintf(value[i] * inverse) : 0.0f;
        code[i] = (int8_t)(x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x);
    }
    return amax / 127.0f;
}

enum { E2M1_MIDPOINTS = 7, E2M1_SIGN = 8, UE4M3_LAST = 126 };

/* Midpoints of neighbouring E2M1 values. At a tie the even code wins: the upper one after an odd code. */
static const float e2m1_value[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
static const float e2m1_midpoint[E2M1_MIDPOINTS] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};

/* Codes of the block at one scale, and the squared error after the round trip. A midpoint times a UE4M3 value has at
 * most 7 significant bits, so |value| is compared with the exact threshold and no quotient is ever rounded; so is the
 * decoded value exact. */
static float e2m1_round_trip(const float *value, size_t n, float scale, uint8_t *code)
{
    float threshold[E2M1_MIDPOINTS];
    for (int j = 0; j < E2M1_MIDPOINTS; j++) {
        threshold[j] = e2m1_midpoint[j] * scale;
    }
    float error = 0.0f;
    for (size_t i = 0; i < n; i++) {
        const float a = finite_magnitude(value[i]);
        unsigned c = 0;
        for (int j = 0; j < E2M1_MIDPOINTS; j++) {
            c += j & 1 ? a >= threshold[j] : a > threshold[j];
        }
        const float difference = a - e2m1_value[c] * scale;
        const float square = difference * difference;
        error = error + square;
        code[i] = (uint8_t)(c | (signbit(value[i]) && isfinite(value[i]) ? E2M1_SIGN : 0));
    }
    return error;
}

uint8_t apa_nvfp4_block(const float *value, size_t n, bool search, uint8_t *code, bool *overflow)
{
    static const int offset[] = {0, -1, +1, -2, +3, +4, +5, +6};
    const size_t candidates = search ? sizeof offset / sizeof offset[0] : 1;
    assert(n <= APA_NVFP4_BLOCK);
    const float amax = block_maximum(value, n);
    if (overflow) {
        *overflow = amax > APA_NVFP4_AMAX_MAX;
    }
    if (amax == 0.0f) {
        memset(code, 0, n);
        return 0;
    }
    const int nearest = (int)apa_format_encode(APA_FORMAT_UE4M3, (double)(amax / 6.0f));
    uint8_t best = 0;
    float least = 0.0f;
    for (size_t k = 0; k < candidates; k++) {
        uint8_t trial[APA_NVFP4_BLOCK];
        int c = nearest + offset[k];
        c = c < 1 ? 1 : c > UE4M3_LAST ? UE4M3_LAST : c;
        const float error = e2m1_round_trip(value, n, (float)apa_format_decode(APA_FORMAT_UE4M3, (uint32_t)c), trial);
        if (k == 0 || error < least) {
            best = (uint8_t)c;
            least = error;
            memcpy(code, trial, n);
        }
    }
    return best;
}

uint8_t apa_mx_scale(const float *value, size_t n, apa_format element, bool round_up)
{
    const apa_format_info *info = apa_format_describe(element);
    assert(info && n <= APA_MX_BLOCK);
    const float amax = block_maximum(value, n);
    if (amax == 0.0f) {
        return 0;
    }
    /* Largest element = 1.f · 2^emax, so ilogb differences place amax in the binade of the largest element. */
    int exponent = ilogb((double)amax) - ilogb(info->max_finite);
    if (round_up && ldexp(info->max_finite, exponent) < (double)amax) {
        exponent++;
    }
    const int field = exponent + 127;
    return (uint8_t)(field < 0 ? 0 : field > 254 ? 254 : field);
}
