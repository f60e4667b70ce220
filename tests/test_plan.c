/* What the plan refuses of masks, slopes, sinks, ragged and paged batches, and in which words. */
#include "support/fixture.h"
#include "support/problems.h"
#include "support/test.h"

#include <math.h>
#include <string.h>

/* Two sequences of 3 + 5 queries over 4 + 6 keys, packed; 4 query heads on 2. Data pointers stay NULL: plans read none.
 */
static const int64_t cu_q[] = {0, 3, 8}, cu_k[] = {0, 4, 10};

static apa_problem packed(void)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = apa_tensor_hnd(NULL, APA_DTYPE_F16, 1, 4, 8, 16);
    p.k = p.v = apa_tensor_hnd(NULL, APA_DTYPE_F16, 1, 2, 10, 16);
    p.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, 4, 8, 16);
    p.cu_seqlens_q = cu_q;
    p.cu_seqlens_k = cu_k;
    p.batch = 2;
    return p;
}

/* The same sequences, padded to 5 queries and 6 keys. */
static apa_problem padded(void)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = apa_tensor_hnd(NULL, APA_DTYPE_F16, 2, 4, 5, 16);
    p.k = p.v = apa_tensor_hnd(NULL, APA_DTYPE_F16, 2, 2, 6, 16);
    p.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, 2, 4, 5, 16);
    return p;
}

static const int32_t pages[] = {0, 1, 2, 1, 3, 3};
static const int64_t used[] = {7, 3};

/* Pages of 4 keys: three a sequence. */
static apa_problem paged(void)
{
    apa_problem p = padded();
    p.k = p.v = apa_tensor_hnd(NULL, APA_DTYPE_F16, 4, 2, 4, 16);
    p.block_table = pages;
    p.block_table_stride = 3;
    p.seqused_k = used;
    return p;
}

static apa_status plan_of(const apa_problem *p, apa_plan *plan)
{
    apa_plan_init(plan);
    apa_attention_options options;
    apa_attention_options_init(&options);
    return apa_attention_plan(context, p, NULL, &options, plan);
}

static void expect_refusal(const apa_problem *p, apa_status status, const char *start)
{
    apa_plan plan;
    assert_int_equal(plan_of(p, &plan), status);
    const char *message = apa_context_message(context);
    if (strncmp(message, start, strlen(start)) != 0)
        fail_msg("said \"%s\", expected \"%s…\"", message, start);
    assert_null(strchr(message, '\n'));
}

#define REFUSED(p, text) expect_refusal(&(p), APA_STATUS_INVALID_ARGUMENT, text)

static void test_packed_is_taken(void **state)
{
    (void)state;
    apa_plan plan;
    apa_problem p = packed();
    assert_int_equal(plan_of(&p, &plan), APA_STATUS_OK);
    p = padded();
    p.seqused_k = (const int64_t[]){6, 0};
    assert_int_equal(plan_of(&p, &plan), APA_STATUS_OK);
    p = packed();
    p.cu_seqlens_k = NULL; /* one side packed, the other padded */
    p.k = p.v = apa_tensor_hnd(NULL, APA_DTYPE_F16, 2, 2, 6, 16);
    assert_int_equal(plan_of(&p, &plan), APA_STATUS_OK);
    p = packed();
    p.batch = 0;
    assert_int_equal(plan_of(&p, &plan), APA_STATUS_OK);
}

static void test_packed_refusals(void **state)
{
    (void)state;
    apa_problem p = packed();
    p.cu_seqlens_q = (const int64_t[]){0, 5, 3};
    REFUSED(p, "cu_seqlens_q: falls from 5 to 3 at sequence 1");
    p = packed();
    p.cu_seqlens_k = (const int64_t[]){0, 4, 11};
    REFUSED(p, "cu_seqlens_k: ends with 11, expected at most the tensor's 10 rows");
    p = packed();
    p.cu_seqlens_k = (const int64_t[]){1, 4, 10};
    REFUSED(p, "cu_seqlens_k: starts with 1, expected 0");
    p = packed();
    p.batch = -1;
    REFUSED(p, "batch: -1");
    p = packed();
    p.cu_seqlens_q = NULL;
    REFUSED(p, "q: batch is 1, expected 2");
    p = padded();
    p.cu_seqlens_q = cu_q;
    p.batch = 2;
    REFUSED(p, "q: batch is 2, expected 1 (packed by cu_seqlens_q)");
    p = padded();
    p.seqused_k = (const int64_t[]){6, 7};
    REFUSED(p, "seqused_k: 7 at sequence 1, expected 0 … 6");
    p.seqused_k = (const int64_t[]){-1, 6};
    REFUSED(p, "seqused_k: -1 at sequence 0");
}

static void test_paged_refusals(void **state)
{
    (void)state;
    apa_problem p = paged();
    p.seqused_k = NULL;
    REFUSED(p, "block_table: without seqused_k");
    p = paged();
    p.cu_seqlens_k = cu_k;
    p.batch = 2;
    REFUSED(p, "block_table: together with cu_seqlens_k");
    p = paged();
    p.seqused_k = (const int64_t[]){13, 3};
    REFUSED(p, "seqused_k: 13 at sequence 0, expected 0 … 12");
    p = paged();
    p.v = apa_tensor_hnd(NULL, APA_DTYPE_F16, 5, 2, 4, 16);
    REFUSED(p, "v: batch is 5, expected k's 4");
    p = paged();
    p.block_table_stride = -1;
    REFUSED(p, "block_table_stride: -1");
}

/* Pages beyond the last used key are not looked up; the others must exist. Page numbers are data: a run checks them. */
static void test_page_numbers(void **state)
{
    (void)state;
    uint16_t q[2 * 4 * 5 * 16] = {0}, kv[4 * 2 * 4 * 16] = {0};
    float out[2 * 4 * 5 * 16];
    apa_problem p = paged();
    p.q.data = q;
    p.k.data = p.v.data = kv;
    p.out.data = out;
    p.block_table = (const int32_t[]){0, 4, 0, 1, 0, 0};
    assert_int_equal(apa_attention(context, &p, NULL, NULL, NULL), APA_STATUS_INVALID_ARGUMENT);
    assert_string_equal(apa_context_message(context), "block_table: page 4 at sequence 0, entry 1, expected 0 … 3");
    p.block_table = (const int32_t[]){0, 3, -5, 1, -7, 99};
    assert_int_equal(apa_attention(context, &p, NULL, NULL, NULL), APA_STATUS_OK);
}

static void test_mask_refusals(void **state)
{
    (void)state;
    apa_problem p = padded();
    p.attn_mask = apa_tensor_hnd(NULL, APA_DTYPE_BOOL, 2, 1, 5, 5);
    REFUSED(p, "attn_mask: shape [2, 1, 5, 5], expected [2, 4, 5, 6 or more] or 1 where it repeats");
    p.attn_mask = apa_tensor_hnd(NULL, APA_DTYPE_F16, 1, 2, 5, 6);
    REFUSED(p, "attn_mask: shape [1, 2, 5, 6]");
    p.attn_mask = apa_tensor_hnd(NULL, APA_DTYPE_BOOL, 1, 4, 1, 6);
    p.mask_slopes = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, 4, 1, 1);
    REFUSED(p, "mask_slopes: without a float attn_mask");
    p = packed();
    p.attn_mask = apa_tensor_hnd(NULL, APA_DTYPE_F32, 2, 1, 8, 6);
    REFUSED(p, "attn_mask: shape [2, 1, 8, 6], expected [1, 4, 8, 6 or more]");
    p = padded();
    p.alibi_slopes = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, 2, 1, 1);
    REFUSED(p, "alibi_slopes: shape [1, 2, 1, 1], expected [1 or 2, 4, 1, 1]");
    p = padded();
    p.sinks = apa_tensor_hnd(NULL, APA_DTYPE_F16, 1, 4, 1, 1);
    REFUSED(p, "sinks: dtype f16, expected f32");
    p = padded();
    p.q.dtype = APA_DTYPE_BOOL;
    REFUSED(p, "q: dtype bool");
}

static void test_line_refusals(void **state)
{
    (void)state;
    apa_problem p = padded();
    p.causal = 3;
    REFUSED(p, "causal: 3, expected 0 (none), 1 (bottom-right) or 2 (top-left)");
    p = padded();
    p.causal = APA_CAUSAL_TOP_LEFT;
    p.q_offset = 0;
    REFUSED(p, "causal: top-left together with an offset");
    static const double caps[] = {-1.0, NAN, INFINITY};
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        p = padded();
        p.softcap = caps[i];
        REFUSED(p, "softcap: ");
    }
    p = padded();
    p.softcap = 20;
    apa_recipe recipe;
    apa_recipe_init(&recipe, NULL);
    recipe.smooth_k = APA_TOGGLE_ON;
    apa_plan plan;
    apa_plan_init(&plan);
    assert_int_equal(apa_attention_plan(context, &p, &recipe, NULL, &plan), APA_STATUS_UNSUPPORTED);
    assert_string_equal(apa_context_message(context), "smooth_k: on together with softcap, expected off or auto");
}

static void test_verdicts_need_one_shape(void **state)
{
    (void)state;
    uint8_t verdicts[1];
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.verdicts = verdicts;
    apa_problem p = packed();
    apa_plan plan;
    apa_plan_init(&plan);
    assert_int_equal(apa_attention_plan(context, &p, NULL, &options, &plan), APA_STATUS_UNSUPPORTED);
}

static void test_top_left_is_offset_zero(void **state)
{
    (void)state;
    apa_problem p = padded();
    apa_plan plan;
    p.causal = APA_CAUSAL_TOP_LEFT;
    assert_int_equal(plan_of(&p, &plan), APA_STATUS_OK);
    assert_int_equal(plan.q_offset, 0);
    p.causal = APA_CAUSAL_BOTTOM_RIGHT;
    assert_int_equal(plan_of(&p, &plan), APA_STATUS_OK);
    assert_int_equal(plan.q_offset, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_packed_is_taken),         cmocka_unit_test(test_packed_refusals),
        cmocka_unit_test(test_paged_refusals),          cmocka_unit_test(test_page_numbers),
        cmocka_unit_test(test_mask_refusals),           cmocka_unit_test(test_line_refusals),
        cmocka_unit_test(test_verdicts_need_one_shape), cmocka_unit_test(test_top_left_is_offset_zero)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
