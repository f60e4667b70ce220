/* Sizes at the edge of 64 bits: what a fuzzer found, with the right answers. */
#include "support/fixture.h"
#include "support/test.h"

#include "apa/apa.h"

#include <string.h>

/* Strides that can't be told don't wrap around to small ones. */
static void strides_saturate(void **unused)
{
    (void)unused;
    const int64_t big = INT64_C(1) << 40;
    const apa_tensor hnd = apa_tensor_hnd(NULL, APA_DTYPE_F16, 2, big, big, big),
                     nhd = apa_tensor_nhd(NULL, APA_DTYPE_F16, 2, big, big, big);
    assert_true(hnd.stride[0] == INT64_MAX && hnd.stride[1] == INT64_MAX && hnd.stride[2] == big);
    assert_true(nhd.stride[0] == INT64_MAX && nhd.stride[1] == big && nhd.stride[2] == INT64_MAX);
    const apa_tensor sound = apa_tensor_nhd(NULL, APA_DTYPE_F16, 2, 3, 5, 7);
    assert_true(sound.stride[0] == 105 && sound.stride[1] == 7 && sound.stride[2] == 21 && sound.stride[3] == 1);
}

static apa_problem sized(int64_t B, int64_t Hq, int64_t Hkv, int64_t Sq, int64_t Skv)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = apa_tensor_hnd(NULL, APA_DTYPE_F32, B, Hq, Sq, 8);
    p.k = p.v = apa_tensor_hnd(NULL, APA_DTYPE_F32, B, Hkv, Skv, 8);
    p.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, B, Hq, Sq, 8);
    return p;
}

/* More than 2^59 elements, stretched by strides of 0 or kept from existing by an extent of 0. */
static void beyond_all_sizes(void **unused)
{
    (void)unused;
    static const char *const engines[] = {"cpu", "reference"};
    const int64_t big = INT64_C(1) << 57;
    const apa_problem bad[] = {sized(0, 1, 1, 1, INT64_MAX), sized(0, INT64_MAX - 1, 1, 1, 1), sized(0, 1, 1, big, 1),
                               sized(1, 1, 1, 0, big), sized(INT32_MAX, big, 1, 0, 1)};
    for (size_t i = 0; i < 2 * sizeof bad / sizeof *bad; i++) {
        apa_attention_options options;
        apa_plan plan;
        apa_attention_options_init(&options);
        apa_plan_init(&plan);
        options.engine = engines[i % 2];
        assert_int_equal(apa_attention_plan(context, &bad[i / 2], NULL, &options, &plan), APA_STATUS_INVALID_ARGUMENT);
        assert_non_null(strstr(apa_context_message(context), "expected at most 2^59 elements"));
    }
    apa_problem repeats = sized(1, 1, 1, 1, 1);
    apa_plan plan;
    apa_plan_init(&plan);
    repeats.k.shape[2] = repeats.v.shape[2] = big; /* the one key again and again */
    repeats.k.stride[2] = repeats.v.stride[2] = 0;
    assert_int_equal(apa_attention_plan(context, &repeats, NULL, NULL, &plan), APA_STATUS_INVALID_ARGUMENT);
    const apa_problem sound = sized(INT32_MAX, 1, 1, 1, 0); /* as large as a batch may be */
    assert_int_equal(apa_attention_plan(context, &sound, NULL, NULL, &plan), APA_STATUS_OK);
}

/* A mask over no keys has no data and needs none. */
static void mask_of_nothing(void **unused)
{
    (void)unused;
    static const char *const engines[] = {"cpu", "reference"};
    static float q[16], out[16], lse[2];
    for (int e = 0; e < 2; e++) {
        apa_attention_options options;
        apa_attention_options_init(&options);
        options.engine = engines[e];
        apa_problem p = sized(1, 2, 1, 1, 0);
        p.q.data = q;
        p.out.data = out;
        p.lse = apa_tensor_hnd(lse, APA_DTYPE_F32, 1, 2, 1, 1);
        p.attn_mask = apa_tensor_hnd(NULL, APA_DTYPE_BOOL, 1, 2, 1, 0);
        memset(out, 0x5A, sizeof out);
        assert_int_equal(apa_attention(context, &p, NULL, &options, NULL), APA_STATUS_OK);
        for (int i = 0; i < 16; i++)
            assert_true(out[i] == 0);
        assert_true(lse[0] < 0 && lse[0] - lse[0] != 0); /* -inf */
    }
}

/* q, k and v of different types: each is read by its own. */
static void types_of_their_own(void **unused)
{
    (void)unused;
    static const char *const engines[] = {"cpu", "reference"};
    const float q[2] = {1, 0}, v[6] = {1, 2, 3, 4, 5, 6};
    const uint16_t k[6] = {0, 0, 0, 0, 0, 0}; /* f16 zeros: the plain mean of v */
    for (int e = 0; e < 2; e++) {
        float out[2] = {0};
        apa_attention_options options;
        apa_recipe recipe;
        apa_attention_options_init(&options);
        options.engine = engines[e];
        assert_int_equal(apa_recipe_init(&recipe, "exact"), APA_STATUS_OK);
        apa_problem p;
        apa_problem_init(&p);
        p.q = apa_tensor_hnd(q, APA_DTYPE_F32, 1, 1, 1, 2);
        p.k = apa_tensor_hnd(k, APA_DTYPE_F16, 1, 1, 3, 2);
        p.v = apa_tensor_hnd(v, APA_DTYPE_F32, 1, 1, 3, 2);
        p.out = apa_tensor_hnd(out, APA_DTYPE_F32, 1, 1, 1, 2);
        assert_int_equal(apa_attention(context, &p, &recipe, &options, NULL), APA_STATUS_OK);
        assert_true(out[0] == 3 && out[1] == 4);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(strides_saturate), cmocka_unit_test(beyond_all_sizes),
                                       cmocka_unit_test(mask_of_nothing), cmocka_unit_test(types_of_their_own)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
