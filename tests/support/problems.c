/* Seeded problems and the naive oracle: see problems.h. */
#include "support/problems.h"

#include "formats/formats.h"
#include "support/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD_ELEMENTS 32
#define GUARD_BYTE 0xA5
#define SLICE_GAP 3 /* elements between rows */

/* ---- random numbers ---- */

uint64_t apa_test_seed(void)
{
    static uint64_t seed = 0;
    if (seed == 0) {
        const char *text = getenv("APA_TEST_SEED");
        seed = text == NULL || *text == 0 ? 1 : strtoull(text, NULL, 10);
        printf("# seed %llu (repeat with APA_TEST_SEED=%llu)\n", (unsigned long long)seed, (unsigned long long)seed);
    }
    return seed;
}

uint64_t apa_test_bits(apa_test_rng *rng)
{
    uint64_t z = rng->state += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
}

double apa_test_uniform(apa_test_rng *rng)
{
    return (double)(apa_test_bits(rng) >> 11) * 0x1p-53;
}

double apa_test_normal(apa_test_rng *rng)
{
    const double radius = sqrt(-2.0 * log(1.0 - apa_test_uniform(rng)));
    return radius * cos(6.283185307179586 * apa_test_uniform(rng));
}

int64_t apa_test_below(apa_test_rng *rng, int64_t n)
{
    return (int64_t)(apa_test_bits(rng) % (uint64_t)n);
}

/* ---- tensors ---- */

static int64_t offset_of(const apa_tensor *x, int64_t b, int64_t h, int64_t s, int64_t d)
{
    return b * x->stride[0] + h * x->stride[1] + s * x->stride[2] + d * x->stride[3]; /* negative where a stride is */
}

double apa_test_get(const apa_tensor *x, int64_t b, int64_t h, int64_t s, int64_t d)
{
    const int64_t at = offset_of(x, b, h, s, d);
    switch (x->dtype) {
    case APA_DTYPE_F16:
        return (double)apa_f16_to_f32(((const uint16_t *)x->data)[at]);
    case APA_DTYPE_BF16:
        return (double)apa_bf16_to_f32(((const uint16_t *)x->data)[at]);
    case APA_DTYPE_F32:
        return (double)((const float *)x->data)[at];
    default:
        return ((const double *)x->data)[at];
    }
}

void apa_test_set(const apa_tensor *x, int64_t b, int64_t h, int64_t s, int64_t d, double value)
{
    const int64_t at = offset_of(x, b, h, s, d);
    switch (x->dtype) {
    case APA_DTYPE_F16:
        ((uint16_t *)x->data)[at] = apa_f64_to_f16(value);
        break;
    case APA_DTYPE_BF16:
        ((uint16_t *)x->data)[at] = apa_f64_to_bf16(value);
        break;
    case APA_DTYPE_F32:
        ((float *)x->data)[at] = (float)value;
        break;
    default:
        ((double *)x->data)[at] = value;
    }
}

/* Calls visit for every element, in order. */
#define FOR_ELEMENTS(x, b, h, s, d)                                                                                    \
    for (int64_t b = 0; b < (x)->shape[0]; ++b)                                                                        \
        for (int64_t h = 0; h < (x)->shape[1]; ++h)                                                                    \
            for (int64_t s = 0; s < (x)->shape[2]; ++s)                                                                \
                for (int64_t d = 0; d < (x)->shape[3]; ++d)

void apa_test_fill(const apa_tensor *x, double value)
{
    FOR_ELEMENTS(x, b, h, s, d)
    apa_test_set(x, b, h, s, d, value);
}

static apa_tensor make_tensor(apa_test_problem *t, int which, apa_dtype dtype, apa_test_layout layout, int64_t B,
                              int64_t H, int64_t S, int64_t D)
{
    const int64_t row = layout == APA_TEST_SLICE ? D + SLICE_GAP : D;
    const size_t elements = (size_t)(B * H * S * row) + (size_t)2 * GUARD_ELEMENTS;
    apa_tensor x = {.dtype = dtype, .shape = {B, H, S, D}, .stride = {H * S * row, S * row, row, 1}};
    if (layout == APA_TEST_NHD) {
        x.stride[1] = row;
        x.stride[2] = H * row;
    }
    t->bytes[which] = elements * apa_dtype_bytes(dtype);
    t->memory[which] = malloc(t->bytes[which]);
    assert_non_null(t->memory[which]);
    memset(t->memory[which], which < 3 ? 0xFF : GUARD_BYTE, t->bytes[which]); /* 0xFF… is a NaN in every dtype */
    x.data = (char *)t->memory[which] + GUARD_ELEMENTS * apa_dtype_bytes(dtype);
    return x;
}

static void randomise(const apa_tensor *x, apa_test_rng *rng)
{
    FOR_ELEMENTS(x, b, h, s, d)
    apa_test_set(x, b, h, s, d, apa_test_normal(rng));
}

apa_test_problem *apa_test_make(apa_test_shape shape, apa_dtype in, apa_dtype out, apa_test_layout layout,
                                uint64_t seed)
{
    apa_test_problem *t = calloc(1, sizeof *t);
    apa_test_rng rng = {seed * 0x2545F4914F6CDD1DU + apa_test_seed()};
    const apa_dtype lse = out == APA_DTYPE_F64 ? APA_DTYPE_F64 : APA_DTYPE_F32;
    assert_non_null(t);
    apa_problem_init(&t->problem);
    t->shape = shape;
    t->layout = layout;
    t->problem.q = make_tensor(t, 0, in, layout, shape.B, shape.Hq, shape.Sq, shape.D);
    t->problem.k = make_tensor(t, 1, in, layout, shape.B, shape.Hkv, shape.Skv, shape.D);
    t->problem.v = make_tensor(t, 2, in, layout, shape.B, shape.Hkv, shape.Skv, shape.Dv);
    t->problem.out = make_tensor(t, 3, out, layout, shape.B, shape.Hq, shape.Sq, shape.Dv);
    t->problem.lse = make_tensor(t, 4, lse, layout, shape.B, shape.Hq, shape.Sq, 1);
    randomise(&t->problem.q, &rng);
    randomise(&t->problem.k, &rng);
    randomise(&t->problem.v, &rng);
    return t;
}

void apa_test_free(apa_test_problem *t)
{
    if (t == NULL)
        return;
    for (int i = 0; i < 5; ++i)
        free(t->memory[i]);
    for (int i = 0; i < 3; ++i)
        free(t->inputs_before[i]);
    free(t);
}

/* Everything of an output's memory but its elements must still hold the guard byte. */
static int output_broken(const apa_test_problem *t, int which, const apa_tensor *x)
{
    const size_t size = apa_dtype_bytes(x->dtype);
    unsigned char *copy = malloc(t->bytes[which]);
    int broken = 0;
    assert_non_null(copy);
    memcpy(copy, t->memory[which], t->bytes[which]);
    FOR_ELEMENTS(x, b, h, s, d)
    memset(copy + (GUARD_ELEMENTS + offset_of(x, b, h, s, d)) * (int64_t)size, GUARD_BYTE, size);
    for (size_t i = 0; i < t->bytes[which]; ++i)
        broken |= copy[i] != GUARD_BYTE;
    free(copy);
    return broken;
}

int apa_test_guards_broken(const apa_test_problem *t)
{
    int broken = output_broken(t, 3, &t->problem.out) || output_broken(t, 4, &t->problem.lse);
    for (int i = 0; i < 3; ++i)
        broken |= t->inputs_before[i] == NULL || memcmp(t->inputs_before[i], t->memory[i], t->bytes[i]) != 0;
    return broken;
}

/* ---- oracle ---- */

bool apa_test_sees(const apa_problem *p, int64_t i, int64_t j)
{
    const int64_t offset = p->q_offset == APA_Q_OFFSET_DEFAULT ? p->k.shape[2] - p->q.shape[2] : p->q_offset;
    /* long double: 64-bit sums fit where its significand has 64 bits, and elsewhere tests stay under 2^52 */
    const long double distance = (long double)j - ((long double)i + (long double)offset);
    if (p->causal && distance > 0)
        return false;
    if (p->window_left >= 0 && distance < -(long double)p->window_left)
        return false;
    return !(p->window_right >= 0 && distance > (long double)p->window_right);
}

static void oracle_row(const apa_problem *p, int64_t b, int64_t hq, int64_t i, double *weight, double *out, double *lse)
{
    const int64_t hk = hq / (p->q.shape[1] / p->k.shape[1]), D = p->q.shape[3], Skv = p->k.shape[2];
    const double scale = isnan(p->softmax_scale) ? 1.0 / sqrt((double)D) : p->softmax_scale;
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < Skv; ++j) {
        if (!apa_test_sees(p, i, j))
            continue;
        double dot = 0;
        for (int64_t d = 0; d < D; ++d)
            dot += apa_test_get(&p->q, b, hq, i, d) * apa_test_get(&p->k, b, hk, j, d);
        weight[j] = scale * dot;
        top = fmax(top, weight[j]);
    }
    for (int64_t j = 0; j < Skv; ++j)
        if (apa_test_sees(p, i, j)) {
            weight[j] = top == -INFINITY && !isnan(weight[j]) ? 0.0 : exp(weight[j] - top);
            sum += weight[j];
        }
    for (int64_t c = 0; c < p->v.shape[3]; ++c) {
        double total = 0;
        for (int64_t j = 0; j < Skv; ++j)
            if (apa_test_sees(p, i, j))
                total += weight[j] * apa_test_get(&p->v, b, hk, j, c);
        out[c] = sum == 0 ? total : total / sum;
    }
    if (lse != NULL)
        *lse = sum == 0 ? -INFINITY : top + log(sum);
}

void apa_test_oracle(const apa_problem *p, double *out, double *lse)
{
    const int64_t Hq = p->q.shape[1], Sq = p->q.shape[2], Dv = p->v.shape[3];
    double *weight = malloc(sizeof(double) * (size_t)(p->k.shape[2] + 1));
    assert_non_null(weight);
    for (int64_t b = 0; b < p->q.shape[0]; ++b)
        for (int64_t h = 0; h < Hq; ++h)
            for (int64_t i = 0; i < Sq; ++i) {
                const int64_t at = (b * Hq + h) * Sq + i;
                oracle_row(p, b, h, i, weight, out + at * Dv, lse == NULL ? NULL : lse + at);
            }
    free(weight);
}

/* ---- running ---- */

apa_call apa_test_call(const apa_problem *p, const apa_recipe *recipe)
{
    apa_call call = {.q = p->q, .k = p->k, .v = p->v, .out = p->out, .lse = p->lse, .recipe = *recipe};
    call.B = p->q.shape[0];
    call.Hq = p->q.shape[1];
    call.Hkv = p->k.shape[1];
    call.G = call.Hq / call.Hkv;
    call.Sq = p->q.shape[2];
    call.Skv = p->k.shape[2];
    call.D = p->q.shape[3];
    call.Dv = p->v.shape[3];
    call.scale = isnan(p->softmax_scale) ? 1.0 / sqrt((double)call.D) : p->softmax_scale;
    call.causal = p->causal != 0;
    call.q_offset = p->q_offset == APA_Q_OFFSET_DEFAULT ? call.Skv - call.Sq : p->q_offset;
    call.window_left = p->window_left;
    call.window_right = p->window_right;
    return call;
}

static void remember_inputs(apa_test_problem *t)
{
    for (int i = 0; i < 3; ++i) {
        free(t->inputs_before[i]);
        t->inputs_before[i] = malloc(t->bytes[i]);
        assert_non_null(t->inputs_before[i]);
        memcpy(t->inputs_before[i], t->memory[i], t->bytes[i]);
    }
}

void apa_test_run(const apa_engine *engine, apa_context *context, apa_test_problem *t, const apa_recipe *recipe,
                  uint8_t *verdicts, apa_statistics *statistics)
{
    enum { behind = 256 };
    apa_call call = apa_test_call(&t->problem, recipe);
    apa_statistics own;
    call.verdicts = verdicts;
    apa_statistics_init(&own);
    remember_inputs(t);
    if (engine->resolve(context, &call) != APA_STATUS_OK)
        fail_msg("resolve: %s", apa_context_message(context));
    const size_t bytes = engine->workspace_bytes(context, &call);
    unsigned char *workspace = apa_aligned_allocate(bytes + behind, 1);
    assert_non_null(workspace);
    memset(workspace, 0xFF, bytes + behind); /* NaN: what is read unwritten shows */
    if (engine->run(context, &call, workspace, &own) != APA_STATUS_OK)
        fail_msg("run: %s", apa_context_message(context));
    for (size_t i = 0; i < behind; ++i)
        assert_int_equal(workspace[bytes + i], 0xFF);
    apa_aligned_free(workspace);
    assert_int_equal(own.visible, own.hot + own.cold);
    assert_true(own.candidates >= own.hot);
    if (statistics != NULL)
        *statistics = own;
}

/* ---- comparing ---- */

double *apa_test_doubles(const apa_tensor *x)
{
    double *memory = malloc(sizeof(double) * (size_t)(x->shape[0] * x->shape[1] * x->shape[2] * x->shape[3] + 1));
    assert_non_null(memory);
    return memory;
}

double apa_test_rel_l2(const apa_tensor *out, const double *truth)
{
    double error = 0, norm = 0;
    size_t at = 0;
    FOR_ELEMENTS(out, b, h, s, d)
    {
        const double x = apa_test_get(out, b, h, s, d), y = truth[at++];
        if (isnan(x) != isnan(y) || ((isinf(x) || isinf(y)) && x != y))
            return NAN;
        if (isnan(x) || isinf(x))
            continue;
        error += (x - y) * (x - y);
        norm += y * y;
    }
    return error == 0 ? 0.0 : sqrt(error / norm);
}

double apa_test_lse_error(const apa_tensor *lse, const double *truth)
{
    double worst = 0;
    size_t at = 0;
    FOR_ELEMENTS(lse, b, h, s, d)
    {
        const double x = apa_test_get(lse, b, h, s, d), y = truth[at++];
        if (isnan(x) != isnan(y) || ((isinf(x) || isinf(y)) && x != y))
            return NAN;
        if (!isnan(x) && !isinf(x))
            worst = fmax(worst, fabs(x - y) / fmax(1.0, fabs(y)));
    }
    return worst;
}
