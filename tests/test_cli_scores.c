/* --softcap, --bias, --alibi, --sinks: what reaches the library is what the files hold. The oracle works one pair at a
 * time from the arrays, in double. */
#include "support/command.h"
#include "support/problems.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HQ = 4, HKV = 2, SQ = 40, SKV = 70, DIM = 48 };

static apa_array make(const char *name, apa_array_type type, int32_t dims, const int64_t *shape,
                      double (*value)(int64_t))
{
    apa_array array;
    char message[256];
    assert_int_equal(apa_array_allocate(&array, type, dims, shape), APA_STATUS_OK);
    for (int64_t i = 0; i < array.elements; i++) {
        const double x = value(i);
        assert_int_equal(apa_array_set_f64(&array, i, 1, &x), APA_STATUS_OK);
    }
    assert_int_equal(apa_array_write_npy(name, &array, message, sizeof message), APA_STATUS_OK);
    return array;
}

static double hashed(int64_t i)
{
    apa_test_rng rng = {apa_test_seed() + (uint64_t)i * 7919};
    return apa_test_normal(&rng);
}
static double bias_value(int64_t i)
{
    return hashed(i) < -0.5 ? -INFINITY : hashed(i + 1000000);
}
static double bool_value(int64_t i)
{
    return hashed(i) > -0.3;
}
static double sink_value(int64_t i)
{
    return 2 * (double)i - 3;
}
static double slope_value(int64_t i)
{
    return 0.5 / (double)(1 << i);
}

typedef struct scores {
    double softcap;
    const apa_array *bias, *alibi, *sinks; /* NULL: not given */
} scores;

/* The score of a pair, -inf where the key is left out. Causal, bottom-right. */
static double score(const scores *with, const apa_array *q, const apa_array *k, int64_t h, int64_t i, int64_t j)
{
    const int64_t at = i + SKV - SQ;
    double s = 0;
    if (j > at)
        return -INFINITY;
    for (int64_t d = 0; d < DIM; d++)
        s += command_at(q, (h * SQ + i) * DIM + d) * command_at(k, (h / 2 * SKV + j) * DIM + d);
    s /= sqrt(DIM);
    if (with->softcap > 0)
        s = with->softcap * tanh(s / with->softcap);
    if (with->alibi != NULL)
        s -= (double)(float)command_at(with->alibi, h) * fabs((double)(at - j));
    if (with->bias != NULL) {
        const int64_t heads = with->bias->dims == 2 ? 1 : with->bias->shape[with->bias->dims - 3];
        const double b = command_at(with->bias, ((heads == 1 ? 0 : h) * SQ + i) * SKV + j);
        s = with->bias->type == APA_ARRAY_BOOL ? (b != 0 ? s : -INFINITY) : s + b;
    }
    return s;
}

static void check_row(const scores *with, const apa_array qkv[3], const apa_array *out, const apa_array *lse, int64_t h,
                      int64_t i)
{
    const double sink = with->sinks == NULL ? -INFINITY : (double)(float)command_at(with->sinks, h);
    double s[SKV], top = sink, sum = 0, o[DIM] = {0};
    for (int64_t j = 0; j < SKV; j++) {
        s[j] = score(with, &qkv[0], &qkv[1], h, i, j);
        top = fmax(top, s[j]);
    }
    for (int64_t j = 0; j < SKV; j++)
        sum += s[j] = s[j] == -INFINITY ? 0 : exp(s[j] - top);
    sum += sink == -INFINITY ? 0 : exp(sink - top);
    for (int64_t d = 0; d < DIM; d++) {
        for (int64_t j = 0; j < SKV; j++)
            o[d] += s[j] * command_at(&qkv[2], (h / 2 * SKV + j) * DIM + d);
        o[d] = sum == 0 ? 0 : o[d] / sum;
        const double error = fabs(command_at(out, (h * SQ + i) * DIM + d) - o[d]);
        if (!(error <= 1e-5)) /* FP32 sums of 70 values of a few units: 70·2^-24·4 */
            fail_msg("head %d, row %d: off by %g", (int)h, (int)i, error);
    }
    const double expected = sum == 0 ? -INFINITY : top + log(sum), found = command_at(lse, h * SQ + i);
    if (!(found == expected || fabs(found - expected) <= 1e-5 * fmax(1, fabs(expected))))
        fail_msg("head %d, row %d: lse %g, expected %g", (int)h, (int)i, found, expected);
}

static void check(const scores *with, const char *options)
{
    apa_array qkv[3] = {command_load("f32/q.npy"), command_load("f32/k.npy"), command_load("f32/v.npy")};
    command_works(command_run("run --q f32/q.npy --k f32/k.npy --v f32/v.npy --method exact --out o.npy --lse l.npy %s",
                              options));
    apa_array out = command_load("o.npy"), lse = command_load("l.npy");
    for (int64_t h = 0; h < HQ; h++)
        for (int64_t i = 0; i < SQ; i++)
            check_row(with, qkv, &out, &lse, h, i);
    for (int i = 0; i < 3; i++)
        apa_array_free(&qkv[i]);
    apa_array_free(&out);
    apa_array_free(&lse);
}

static void each_and_all(void **unused)
{
    (void)unused;
    const int64_t full[3] = {HQ, SQ, SKV}, plain[2] = {SQ, SKV}, heads[1] = {HQ};
    apa_array bias = make("bias.npy", APA_ARRAY_F32, 3, full, bias_value),
              half = make("half.npy", APA_ARRAY_F16, 2, plain, hashed),
              mask = make("mask.npy", APA_ARRAY_BOOL, 2, plain, bool_value),
              sinks = make("sinks.npy", APA_ARRAY_F64, 1, heads, sink_value),
              alibi = make("alibi.npy", APA_ARRAY_F16, 1, heads, slope_value);
    check(&(scores){0}, "--softcap 0");
    check(&(scores){.softcap = 2}, "--softcap 2");
    check(&(scores){.bias = &bias}, "--bias bias.npy");
    check(&(scores){.bias = &half}, "--bias half.npy --engine reference");
    check(&(scores){.bias = &mask}, "--bias=mask.npy");
    check(&(scores){.sinks = &sinks}, "--sinks sinks.npy");
    check(&(scores){.alibi = &alibi}, "--alibi alibi.npy");
    check(&(scores){1.5, &bias, &alibi, &sinks}, "--softcap 1.5 --bias bias.npy --alibi alibi.npy --sinks sinks.npy");
    command_fails(command_run("run " IN "--out bias.npy --bias bias.npy"), 2,
                  "--out: bias.npy: is the input of --bias");
    apa_array_free(&bias);
    apa_array_free(&half);
    apa_array_free(&mask);
    apa_array_free(&sinks);
    apa_array_free(&alibi);
}

/* The truth of eval has the same masks: exact attention is as far from it as FP32 is. */
static void evaluation(void **unused)
{
    (void)unused;
    command_works(command_run("eval " IN
                              "--method exact --softcap 1.5 --bias bias.npy --alibi alibi.npy --sinks sinks.npy "
                              "--repeats 1 --json -"));
    json_t *json = command_parse(command_out);
    assert_true(command_number(json, "rel_l2_max") <= 1e-5);
    assert_true(command_number(json, "lse_max_abs") <= 1e-4);
    assert_true(command_number(json, "pairs") == HQ * SQ);
    json_decref(json);
    command_works(command_run("eval " IN "--engine reference --softcap 1.5 --bias bias.npy --repeats 1 --json -"));
    json = command_parse(command_out);
    assert_true(command_number(json, "rel_l2") <= 0.05); /* INT8 tiles */
    json_decref(json);
    command_works(command_run("bench --q in/q.npy --k in/k.npy --v in/v.npy --bias mask.npy --repeats 1"));
    command_fails(command_run("eval " IN "--bias mask.npy --worst 1 --engine reference --repeats 1"), 2, "taken apart");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_and_all), cmocka_unit_test(evaluation)};
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
