/* apa_state_merge(): against attention over all keys at once, and its identities. */
#include "support/test.h"

#include "support/attend.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static apa_context *context;

static int set_up(void **state)
{
    (void)state;
    apa_context_options options;
    apa_context_options_init(&options);
    options.threads = 2;
    apa_test_seed();
    return apa_context_create(&context, &options) != APA_STATUS_OK;
}

static int tear_down(void **state)
{
    (void)state;
    apa_context_destroy(context);
    return 0;
}

/* Attention over keys first … end-1 of a problem. */
static void attend_keys(apa_test_problem *t, int64_t first, int64_t end, apa_dtype dtype, float *lse_memory,
                        void *out_memory)
{
    const apa_test_shape *s = &t->shape;
    apa_problem p = t->problem;
    const apa_recipe exact = apa_test_recipe("exact", "");
    p.q_offset = p.k.shape[2] - p.q.shape[2] - first;
    p.k.shape[2] = p.v.shape[2] = end - first;
    p.k.data = (float *)p.k.data + first * p.k.stride[2];
    p.v.data = (float *)p.v.data + first * p.v.stride[2];
    p.out = apa_tensor_hnd(out_memory, dtype, s->B, s->Hq, s->Sq, s->Dv);
    p.lse = apa_tensor_hnd(lse_memory, APA_DTYPE_F32, s->B, s->Hq, s->Sq, 1);
    if (apa_attention(context, &p, &exact, NULL, NULL) != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
}

/* Any cut, merged in any order, is attention over all keys; causal rows have empty states on the right. */
static void union_of_keys(void **state)
{
    (void)state;
    static const apa_dtype dtypes[] = {APA_DTYPE_F32, APA_DTYPE_F16, APA_DTYPE_BF16};
    static const double bound[] = {2e-6, 1e-3, 8e-3}; /* two roundings of 2^-11, 2^-8 */
    const apa_test_shape s = {2, 4, 2, 37, 150, 24, 16};
    const size_t rows = (size_t)(s.B * s.Hq * s.Sq), bytes = rows * 16 * sizeof(float);
    for (int d = 0; d < 3; d++)
        for (int64_t cut = 0; cut <= 150; cut += 25)
            for (int causal = 0; causal < 2; causal++) {
                apa_test_problem *t = apa_test_make(s, APA_DTYPE_F32, APA_DTYPE_F32, APA_TEST_HND, 8);
                void *out[2] = {malloc(bytes), malloc(bytes)};
                float *lse[2] = {malloc(rows * sizeof(float)), malloc(rows * sizeof(float))};
                double *truth = apa_test_doubles(&t->problem.out), *truth_lse = apa_test_doubles(&t->problem.lse);
                t->problem.causal = causal;
                t->problem.q_offset = 113;
                apa_test_fast_oracle(&t->problem, truth, truth_lse);
                attend_keys(t, 0, cut, dtypes[d], lse[0], out[0]);
                attend_keys(t, cut, 150, dtypes[d], lse[1], out[1]);
                apa_tensor o[2], l[2];
                for (int i = 0; i < 2; i++) {
                    o[i] = apa_tensor_hnd(out[i], dtypes[d], s.B, s.Hq, s.Sq, s.Dv);
                    l[i] = apa_tensor_hnd(lse[i], APA_DTYPE_F32, s.B, s.Hq, s.Sq, 1);
                }
                for (int swap = 0; swap < 2; swap++) {
                    assert_int_equal(apa_state_merge(context, &o[swap], &l[swap], &o[!swap], &l[!swap], &t->problem.out,
                                                     &t->problem.lse),
                                     APA_STATUS_OK);
                    const double error = apa_test_rel_l2(&t->problem.out, truth);
                    const double lse_error = apa_test_lse_error(&t->problem.lse, truth_lse);
                    if (!(error <= bound[d]) || !(lse_error <= 2e-6))
                        fail_msg("%s, cut at %d, causal %d: out %g, lse %g", apa_dtype_name(dtypes[d]), (int)cut,
                                 causal, error, lse_error);
                }
                /* In place gives the same bits: into a, then (fresh) into b. */
                if (dtypes[d] == APA_DTYPE_F32) {
                    apa_test_outputs apart = apa_test_keep(t);
                    assert_int_equal(apa_state_merge(context, &o[1], &l[1], &o[0], &l[0], &o[0], &l[0]), APA_STATUS_OK);
                    const size_t n = rows * 16 * sizeof(float);
                    assert_memory_equal(out[0], t->problem.out.data, n);
                    assert_memory_equal(lse[0], t->problem.lse.data, rows * sizeof(float));
                    attend_keys(t, 0, cut, dtypes[d], lse[0], out[0]);
                    assert_int_equal(apa_state_merge(context, &o[1], &l[1], &o[0], &l[0], &o[1], &l[1]), APA_STATUS_OK);
                    assert_memory_equal(out[1], t->problem.out.data, n);
                    apa_test_drop(&apart);
                }
                for (int i = 0; i < 2; i++) {
                    free(out[i]);
                    free(lse[i]);
                }
                free(truth);
                free(truth_lse);
                apa_test_free(t);
            }
}

/* One row of three values. */
typedef struct one_row {
    float o[3], lse;
} one_row;

static one_row merge(one_row a, one_row b)
{
    one_row result = {{77, 77, 77}, 77};
    const apa_tensor oa = apa_tensor_hnd(a.o, APA_DTYPE_F32, 1, 1, 1, 3),
                     la = apa_tensor_hnd(&a.lse, APA_DTYPE_F32, 1, 1, 1, 1);
    const apa_tensor ob = apa_tensor_hnd(b.o, APA_DTYPE_F32, 1, 1, 1, 3),
                     lb = apa_tensor_hnd(&b.lse, APA_DTYPE_F32, 1, 1, 1, 1);
    const apa_tensor o = apa_tensor_hnd(result.o, APA_DTYPE_F32, 1, 1, 1, 3);
    const apa_tensor l = apa_tensor_hnd(&result.lse, APA_DTYPE_F32, 1, 1, 1, 1);
    if (apa_state_merge(context, &oa, &la, &ob, &lb, &o, &l) != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
    return result;
}

static void identities(void **state)
{
    (void)state;
    const one_row empty = {{0, 0, 0}, -INFINITY}, x = {{1.1f, -0.0f, 0x1p-149f}, 3.3f}, far = {{5, 6, 7}, 1000.0f};
    one_row r = merge(empty, empty);
    assert_memory_equal(&r, &empty, sizeof r);
    /* The empty state changes no bit, not the sign of a zero either, whatever its output holds. */
    const one_row rubbish = {{NAN, INFINITY, 4}, -INFINITY};
    r = merge(x, empty);
    assert_memory_equal(&r, &x, sizeof r);
    r = merge(empty, x);
    assert_memory_equal(&r, &x, sizeof r);
    r = merge(rubbish, x);
    assert_memory_equal(&r, &x, sizeof r);
    r = merge(x, rubbish);
    assert_memory_equal(&r, &x, sizeof r);
    r = merge(rubbish, rubbish);
    assert_memory_equal(&r, &empty, sizeof r);
    /* A difference of 1000: the other has no weight in any precision. */
    r = merge(x, far);
    assert_memory_equal(&r, &far, sizeof r);
    r = merge(far, x);
    assert_memory_equal(&r, &far, sizeof r);
    /* Equal states: the same output, ln 2 more. */
    r = merge(x, x);
    assert_memory_equal(r.o, x.o, sizeof r.o);
    assert_true(fabs(r.lse - (3.3f + log(2.0))) < 1e-6);
    /* Hand values: weights 1 and 3. */
    const one_row a = {{8, 0, 4}, 0.0f}, b = {{4, 4, 4}, (float)log(3.0)};
    r = merge(a, b);
    assert_true(fabsf(r.o[0] - 5) < 1e-6f && fabsf(r.o[1] - 3) < 1e-6f && fabsf(r.o[2] - 4) < 1e-6f);
    assert_true(fabs(r.lse - log(4.0)) < 1e-6);
    /* LSE far out of exp's range */
    const one_row low = {{1, 2, 3}, -2.5e5f}, high = {{3, 2, 1}, -2.5e5f};
    r = merge(low, high);
    assert_true(r.o[0] == 2.0f && r.o[1] == 2.0f && r.o[2] == 2.0f && fabs(r.lse + 2.5e5) < 1.0);
}

static void not_a_number(void **state)
{
    (void)state;
    const one_row empty = {{0, 0, 0}, -INFINITY}, x = {{1, 2, 3}, 0.5f}, value = {{1, NAN, 3}, 0.25f},
                  lse = {{1, 2, 3}, NAN};
    for (int swap = 0; swap < 2; swap++) {
        one_row r = swap ? merge(value, x) : merge(x, value);
        assert_true(isfinite(r.o[0]) && isnan(r.o[1]) && isfinite(r.o[2]) && isfinite(r.lse));
        r = swap ? merge(lse, x) : merge(x, lse);
        assert_true(isnan(r.o[0]) && isnan(r.o[1]) && isnan(r.lse));
        r = swap ? merge(lse, empty) : merge(empty, lse);
        assert_true(isnan(r.lse) && !(r.o[0] == 0.0f));
        r = swap ? merge(value, empty) : merge(empty, value);
        assert_true(r.o[0] == 1 && isnan(r.o[1]) && r.lse == 0.25f);
    }
}

/* Strides, mixed dtypes, f64 LSE; gaps stay as they are. */
static void strides(void **state)
{
    (void)state;
    enum { B = 2, H = 3, S = 5, Dv = 4 };
    double a[B * S * H * Dv], la[B * H * S], out[B * H * S * (Dv + 1)], lse[B * H * S];
    float b[B * H * S * Dv], lb[B * H * S];
    apa_test_rng rng = {apa_test_seed()};
    for (int i = 0; i < B * H * S * Dv; i++) {
        a[i] = apa_test_normal(&rng);
        b[i] = (float)apa_test_normal(&rng);
    }
    for (int i = 0; i < B * H * S; i++) {
        la[i] = 3 * apa_test_normal(&rng);
        lb[i] = (float)(3 * apa_test_normal(&rng));
    }
    for (int i = 0; i < B * H * S * (Dv + 1); i++)
        out[i] = -99;
    const apa_tensor oa = apa_tensor_nhd(a, APA_DTYPE_F64, B, H, S, Dv),
                     lsa = apa_tensor_nhd(la, APA_DTYPE_F64, B, H, S, 1);
    const apa_tensor ob = apa_tensor_hnd(b, APA_DTYPE_F32, B, H, S, Dv),
                     lsb = apa_tensor_hnd(lb, APA_DTYPE_F32, B, H, S, 1);
    apa_tensor o = apa_tensor_hnd(out, APA_DTYPE_F64, B, H, S, Dv + 1),
               l = apa_tensor_hnd(lse, APA_DTYPE_F64, B, H, S, 1);
    o.shape[3] = Dv;
    assert_int_equal(apa_state_merge(context, &oa, &lsa, &ob, &lsb, &o, &l), APA_STATUS_OK);
    for (int64_t n = 0; n < B; n++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t s = 0; s < S; s++) {
                const double wa = exp(apa_test_get(&lsa, n, h, s, 0)), wb = exp(apa_test_get(&lsb, n, h, s, 0));
                assert_true(fabs(apa_test_get(&l, n, h, s, 0) - log(wa + wb)) < 1e-13);
                for (int64_t c = 0; c < Dv; c++) {
                    const double truth =
                        (wa * apa_test_get(&oa, n, h, s, c) + wb * apa_test_get(&ob, n, h, s, c)) / (wa + wb);
                    assert_true(fabs(apa_test_get(&o, n, h, s, c) - truth) < 1e-13);
                }
                assert_true(out[((n * H + h) * S + s) * (Dv + 1) + Dv] == -99);
            }
}

static void refusals(void **state)
{
    (void)state;
    float x[24] = {0}, y[8] = {0};
    const apa_tensor o = apa_tensor_hnd(x, APA_DTYPE_F32, 1, 2, 3, 4), l = apa_tensor_hnd(y, APA_DTYPE_F32, 1, 2, 3, 1);
    assert_int_equal(apa_state_merge(NULL, &o, &l, &o, &l, &o, &l), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_state_merge(context, &o, &l, &o, &l, &o, &l), APA_STATUS_OK);
    static const char *const name[6] = {"out_a", "lse_a", "out_b", "lse_b", "out", "lse"};
    for (int i = 0; i < 6; i++)
        for (int what = 0; what < 5; what++) {
            apa_tensor bad = i % 2 == 0 ? o : l;
            const apa_tensor *arg[6] = {&o, &l, &o, &l, &o, &l};
            arg[i] = what == 0 ? NULL : &bad;
            if (what == 1)
                bad.shape[2]++;
            else if (what == 2)
                bad.dtype = i % 2 == 0 ? APA_DTYPE_NONE : APA_DTYPE_F16;
            else if (what == 3)
                bad.data = NULL;
            else if (what == 4 && i % 2 == 0)
                bad.stride[3] = 2;
            else if (what == 4)
                continue;
            assert_int_equal(apa_state_merge(context, arg[0], arg[1], arg[2], arg[3], arg[4], arg[5]),
                             APA_STATUS_INVALID_ARGUMENT);
            /* a shape that differs is told of the first that does not agree with out_a's */
            if (!(what == 1 && i == 0))
                assert_non_null(strstr(apa_context_message(context), name[i]));
        }
}

/* A result may lie where an input lies, exactly, and overlap nothing else. */
static void overlaps(void **state)
{
    (void)state;
    float memory[64] = {0}, lse_memory[24] = {0};
    const apa_tensor a = apa_tensor_hnd(memory, APA_DTYPE_F32, 1, 2, 2, 4);
    const apa_tensor b = apa_tensor_hnd(memory + 16, APA_DTYPE_F32, 1, 2, 2, 4);
    const apa_tensor shifted = apa_tensor_hnd(memory + 12, APA_DTYPE_F32, 1, 2, 2, 4);
    const apa_tensor transposed = apa_tensor_nhd(memory, APA_DTYPE_F32, 1, 2, 2, 4);
    const apa_tensor far = apa_tensor_hnd(memory + 40, APA_DTYPE_F32, 1, 2, 2, 4);
    const apa_tensor l0 = apa_tensor_hnd(lse_memory, APA_DTYPE_F32, 1, 2, 2, 1);
    const apa_tensor l1 = apa_tensor_hnd(lse_memory + 4, APA_DTYPE_F32, 1, 2, 2, 1);
    const apa_tensor l2 = apa_tensor_hnd(lse_memory + 2, APA_DTYPE_F32, 1, 2, 2, 1);
    const apa_tensor l3 = apa_tensor_hnd(lse_memory + 8, APA_DTYPE_F32, 1, 2, 2, 1);
    const apa_tensor inside = apa_tensor_hnd(memory + 40, APA_DTYPE_F32, 1, 2, 2, 1);
    assert_int_equal(apa_state_merge(context, &a, &l0, &b, &l1, &a, &l0), APA_STATUS_OK);
    assert_int_equal(apa_state_merge(context, &a, &l0, &b, &l1, &b, &l3), APA_STATUS_OK);
    assert_int_equal(apa_state_merge(context, &a, &l0, &b, &l1, &far, &l3), APA_STATUS_OK);
    const apa_tensor *out[] = {&shifted, &transposed, &far, &far, &far};
    const apa_tensor *lse[] = {&l3, &l3, &l2, &inside, &a};
    for (int i = 0; i < 5; i++)
        assert_int_equal(apa_state_merge(context, &a, &l0, &b, &l1, out[i], lse[i]), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_state_merge(context, &a, &l0, &b, &l1, &shifted, &l3), APA_STATUS_INVALID_ARGUMENT);
    assert_string_equal(apa_context_message(context),
                        "out: overlaps out_a, expected memory of its own or exactly the tensor of an input");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(union_of_keys), cmocka_unit_test(identities), cmocka_unit_test(not_a_number),
        cmocka_unit_test(strides),       cmocka_unit_test(refusals),   cmocka_unit_test(overlaps),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
