/* Guarded memory and kinds of values: see buffers.h. */
#include "support/buffers.h"

#include "support/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GUARD 256 /* bytes on each side; a few vectors */
#define GUARD_BYTE 0xA5

void *apa_test_take(apa_test_buffers *set, size_t bytes, size_t misalign)
{
    assert_true(set->n < APA_TEST_BUFFERS_MAX && misalign < 64);
    apa_test_buffer *buffer = &set->buffer[set->n++];
    buffer->bytes = bytes;
    buffer->total = (GUARD + 64 + bytes + GUARD + 63) / 64 * 64;
    buffer->memory = aligned_alloc(64, buffer->total);
    assert_non_null(buffer->memory);
    memset(buffer->memory, GUARD_BYTE, buffer->total);
    buffer->data = buffer->memory + GUARD + misalign;
    memset(buffer->data, 0xFF, bytes);
    buffer->before = NULL;
    return buffer->data;
}

void apa_test_freeze(apa_test_buffers *set, const void *data)
{
    for (int i = 0; i < set->n; i++) {
        apa_test_buffer *buffer = &set->buffer[i];
        if (buffer->data != data)
            continue;
        free(buffer->before);
        buffer->before = malloc(buffer->bytes + 1);
        assert_non_null(buffer->before);
        memcpy(buffer->before, buffer->data, buffer->bytes);
        return;
    }
    fail_msg("freeze: not a buffer of this set");
}

void apa_test_buffers_check(const apa_test_buffers *set, const char *what)
{
    for (int i = 0; i < set->n; i++) {
        const apa_test_buffer *buffer = &set->buffer[i];
        for (size_t at = 0; at < buffer->total; at++)
            if ((buffer->memory + at < buffer->data || buffer->memory + at >= buffer->data + buffer->bytes) &&
                buffer->memory[at] != GUARD_BYTE)
                fail_msg("%s: wrote outside buffer %d of %zu bytes, at %td", what, i, buffer->bytes,
                         buffer->memory + at - buffer->data);
        if (buffer->before != NULL && memcmp(buffer->before, buffer->data, buffer->bytes) != 0)
            fail_msg("%s: wrote to its input, buffer %d of %zu bytes", what, i, buffer->bytes);
    }
}

void apa_test_buffers_free(apa_test_buffers *set)
{
    for (int i = 0; i < set->n; i++) {
        free(set->buffer[i].memory);
        free(set->buffer[i].before);
    }
    set->n = 0;
}

const char *apa_test_kind_name(apa_test_kind kind)
{
    static const char *const name[APA_TEST_KINDS] = {"random", "constant", "one-hot",   "outlier", "huge",
                                                     "tiny",   "zero",     "subnormal", "inf",     "nan"};
    return name[kind];
}

static float one_of(apa_test_rng *rng, apa_test_kind kind, float constant)
{
    const float normal = (float)apa_test_normal(rng);
    const bool rare = apa_test_below(rng, 16) == 0, minus = (apa_test_bits(rng) & 1) != 0;
    switch (kind) {
    case APA_TEST_CONSTANT:
        return constant;
    case APA_TEST_ONE_HOT:
        return 0.0f;
    case APA_TEST_OUTLIER:
        return rare ? 1000.0f * normal : normal;
    case APA_TEST_HUGE:
        return 1e15f * normal;
    case APA_TEST_TINY:
        return 1e-15f * normal;
    case APA_TEST_ZERO:
        return minus ? -0.0f : 0.0f;
    case APA_TEST_SUBNORMAL:
        return 0x1p-126f * 0.5f * normal;
    case APA_TEST_INF:
        return rare ? (minus ? -INFINITY : INFINITY) : normal;
    case APA_TEST_NAN:
        return rare ? (minus ? -NAN : NAN) : normal;
    default:
        return normal;
    }
}

void apa_test_fill_kind(apa_test_rng *rng, apa_test_kind kind, float *value, int64_t n)
{
    const float constant = (float)apa_test_normal(rng);
    for (int64_t i = 0; i < n; i++)
        value[i] = one_of(rng, kind, constant);
    if (kind == APA_TEST_ONE_HOT && n > 0)
        value[apa_test_below(rng, n)] = 1.0f;
}

int64_t apa_test_ulps(float a, float b)
{
    int32_t x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    /* Sign and magnitude to a line on which neighbours differ by 1. */
    const int64_t p = x < 0 ? -(int64_t)(x & INT32_MAX) : x, q = y < 0 ? -(int64_t)(y & INT32_MAX) : y;
    return p > q ? p - q : q - p;
}
