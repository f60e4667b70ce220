/* What the warp-MMA kernels take and what they refuse, and the table of their cold formats: host logic, without a CUDA
 * device or toolkit. */
#include "apa/cuda.h"

#include "cuda/accept.h"
#include "cuda/enqueue.h"
#include "cuda/job.h"
#include "cuda/trait.h"
#include "recipe/defaults.h"

#include "support/fixture.h"
#include "support/test.h"

#include <stdio.h>
#include <string.h>

enum { ROWS = 512, KEYS = 4096, DIM = 128 };

/* A preset with settings "a=b c=d", resolved as the engine does. */
static apa_recipe resolved(const char *preset, const char *settings)
{
    apa_recipe recipe;
    char copy[256], *next = copy;
    assert_int_equal(apa_recipe_init(&recipe, preset), APA_STATUS_OK);
    snprintf(copy, sizeof copy, "%s", settings);
    for (char *at = copy; *at != '\0'; at = next) {
        next = at + strcspn(at, " ");
        if (*next != '\0')
            *next++ = '\0';
        char *value = strchr(at, '=');
        assert_non_null(value);
        *value++ = '\0';
        assert_int_equal(apa_recipe_set(&recipe, at, value, NULL, 0), APA_STATUS_OK);
    }
    apa_cuda_trait_prefer(&recipe);
    apa_recipe_fill_auto(&recipe, ROWS, KEYS, DIM);
    if (recipe.skip == APA_TOGGLE_AUTO)
        recipe.skip = APA_TOGGLE_OFF;
    return recipe;
}

static void test_traits(void **state)
{
    (void)state;
    static const struct {
        const char *preset, *settings;
        int32_t number;
    } rows[] = {
        {"apa", "", APA_CUDA_INT8},
        {"cold", "", APA_CUDA_INT8},
        {"apa", "cold_format=int8", APA_CUDA_INT8},
        {"apa", "skip=on", APA_CUDA_INT8},
        {"apa", "eps_by=call", APA_CUDA_INT8},
        {"cold", "skip=on pv_format=e4m3", APA_CUDA_INT8_E4M3},
        {"apa", "qk_scale_granularity=row", APA_CUDA_INT8_FINE},
        {"apa", "v_scale_granularity=tile-channel", APA_CUDA_INT8_FINE},
        {"apa", "pv_format=e4m3", APA_CUDA_INT8_E4M3},
        {"apa", "qk_format=int8 pv_format=e4m3", APA_CUDA_INT8_E4M3},
        {"apa-e4m3", "", APA_CUDA_E4M3},
        {"apa-nvfp4", "", APA_CUDA_NVFP4},
        {"apa-nvfp4", "second_look=off", APA_CUDA_NVFP4},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const apa_recipe recipe = resolved(rows[i].preset, rows[i].settings);
        const char *knob = NULL;
        const apa_cuda_trait *trait = apa_cuda_trait_find(&recipe, &knob);
        assert_non_null(trait);
        assert_int_equal(trait->number, rows[i].number);
        assert_int_equal(apa_cuda_accept(context, &recipe), APA_STATUS_OK);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *preset, *settings, *knob;
    } rows[] = {
        {"apa-mxfp4", "", "qk_format"},
        {"apa", "cold_format=e4m3 qk_scale_granularity=row", "qk_scale_granularity"},
        {"apa", "qk_format=int8 pv_format=f16", "pv_format"},
        {"apa", "qk_scale_granularity=thread v_scale_granularity=tile-channel", "v_scale_granularity"},
        {"apa", "qk_scale_granularity=block", "qk_scale_granularity"},
        {"apa", "q_terms=2 qk_scale_granularity=row", "q_terms"},
        {"apa-nvfp4", "q_terms=1", "q_terms"},
        {"apa-nvfp4", "p_scale=pow2", "p_scale"},
        {"apa-nvfp4", "tensor_scale=amax", "tensor_scale"},
        {"apa-nvfp4", "order=forward", "order"},
        {"apa-nvfp4", "lambda_bound=jensen", "lambda_bound"},
        {"apa", "second_look=off order=reverse", "order"},
        {"apa", "p_scale=static", "p_scale"},
        {"apa", "group=32", "group"},
        {"apa", "tile=32", "tile"},
        {"apa", "smooth_v=on", "smooth_v"},
        {"apa", "smooth_q=on", "smooth_q"},
        {"apa", "eps_by=row", "eps_by"},
        {"apa-e4m3", "qk_format=exact", "qk_format"},
        {"apa", "skip=on qk_scale_granularity=row", "skip"},
        {"apa-e4m3", "skip=on", "skip"},
        {"apa-nvfp4", "skip=on", "skip"},
        {"apa", "exact_format=f16", "exact_format"},
        {"apa", "exact_accum=f16 exact_flush=0", "exact_flush"},
        {"exact", "exact_accum=f16 exact_flush=32", "exact_flush"},
        {"apa", "cold_format=e4m3 pv_accum=fp22", "pv_accum"},
        {"thrift", "", NULL},
        {"sage3", "", NULL},
        {"lamp", "", NULL},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const apa_recipe recipe = resolved(rows[i].preset, rows[i].settings);
        if (apa_cuda_accept(context, &recipe) != APA_STATUS_UNSUPPORTED)
            fail_msg("%s %s was taken", rows[i].preset, rows[i].settings);
        const char *message = apa_context_message(context);
        if (rows[i].knob != NULL &&
            (strncmp(message, rows[i].knob, strlen(rows[i].knob)) != 0 || message[strlen(rows[i].knob)] != ':'))
            fail_msg("%s %s: %s", rows[i].preset, rows[i].settings, message);
        assert_null(strchr(message, '\n'));
    }
}

/* Where all is hot nothing about cold tiles matters. */
static void test_all_hot(void **state)
{
    (void)state;
    const apa_recipe exact = resolved("exact", ""), below = resolved("apa-mxfp4", "eps=-1"),
                     cold = resolved("cold", ""), by_row = resolved("exact", "eps_by=row smooth_q=on qk_format=exact");
    assert_true(apa_cuda_all_hot(&exact));
    assert_true(apa_cuda_all_hot(&below));
    assert_false(apa_cuda_all_hot(&cold));
    assert_int_equal(apa_cuda_accept(context, &exact), APA_STATUS_OK);
    assert_int_equal(apa_cuda_accept(context, &below), APA_STATUS_OK);
    assert_int_equal(apa_cuda_accept(context, &by_row), APA_STATUS_OK);
}

/* FP16 sums: taken with their own end, of f16 alone. */
static void test_half_sums(void **state)
{
    (void)state;
    static const char *const presets[] = {"exact", "apa", "apa-nvfp4"};
    for (int i = 0; i < 3; i++) {
        const apa_recipe recipe = resolved(presets[i], "exact_accum=f16");
        assert_int_equal(recipe.exact_flush, APA_CUDA_TILE);
        assert_int_equal(apa_cuda_accept(context, &recipe), APA_STATUS_OK);
    }
    apa_call call = {.D = 64, .Dv = 64, .G = 1, .recipe = resolved("exact", "exact_accum=f16")};
    call.q.dtype = call.k.dtype = call.v.dtype = APA_DTYPE_F16;
    assert_int_equal(apa_cuda_check_shape(context, &call), APA_STATUS_OK);
    call.q.dtype = call.k.dtype = call.v.dtype = APA_DTYPE_BF16;
    assert_int_equal(apa_cuda_check_shape(context, &call), APA_STATUS_UNSUPPORTED);
    assert_non_null(strstr(apa_context_message(context), "exact_accum"));
}

/* What a device gets is something that it runs, with a reason. */
static void test_devices(void **state)
{
    (void)state;
    static const int32_t capabilities[] = {80, 86, 87, 89, 90, 100, 120, 121};
    for (size_t i = 0; i < sizeof capabilities / sizeof capabilities[0]; i++) {
        const char *why = NULL;
        const apa_cuda_trait *trait = apa_cuda_trait_of_device(capabilities[i], &why);
        assert_non_null(trait);
        assert_true(trait->native <= capabilities[i] && trait->capability <= capabilities[i]);
        assert_non_null(why);
        assert_in_range(strlen(why), 10, 159); /* apa_cuda_device.reason */
    }
}

/* Sizes that several files count on: a tile of NVFP4 at D 128 is 9216 bytes, pieces are multiples of 16. */
static void test_sizes(void **state)
{
    (void)state;
    assert_int_equal(apa_cuda_blob_bytes(APA_CUDA_NVFP4, 128), 9216);
    for (int32_t trait = 0; trait < APA_CUDA_TRAITS; trait++)
        for (int64_t D = 64; D <= 256; D *= 2) {
            assert_int_equal(apa_cuda_blob_bytes(trait, D) % 16, 0);
            assert_int_equal(apa_cuda_query_bytes(trait, D) % 128, 0);
        }
}

/* Builds without CUDA, and machines without a device, have the whole of apa/cuda.h, which says so in one line. */
static void test_absent(void **state)
{
    (void)state;
    int32_t devices = -1;
    apa_problem problem;
    apa_cuda_options options;
    apa_cuda_plan plan;
    size_t bytes = 7;
    if (apa_cuda_device_count(context, &devices) == APA_STATUS_OK)
        skip();
    assert_int_equal(devices, 0);
    apa_problem_init(&problem);
    static uint16_t in[64], out[64];
    problem.q = problem.k = problem.v = apa_tensor_hnd(in, APA_DTYPE_F16, 1, 1, 1, 64);
    problem.out = apa_tensor_hnd(out, APA_DTYPE_F16, 1, 1, 1, 64);
    memset(&options, 0xff, sizeof options);
    memset(&plan, 0xff, sizeof plan);
    apa_cuda_options_init(&options);
    apa_cuda_plan_init(&plan);
    assert_true(options.size == sizeof options && plan.size == sizeof plan);
    assert_true(options.stream == NULL && options.workspace == NULL && options.family == NULL);
    assert_true(options.prepared == NULL && options.prepared_room == 0 && options.prepared_mean == 0);
    assert_true(plan.workspace_bytes == 0 && plan.prepared_bytes == 0 && plan.engine[0] == '\0');
    for (int i = 0; i < 4; i++) {
        const apa_status status = i == 0   ? apa_cuda_attention_plan(context, &problem, NULL, &options, &plan)
                                  : i == 1 ? apa_cuda_attention_plan(context, &problem, NULL, NULL, &plan)
                                  : i == 2 ? apa_cuda_workspace_bytes(context, &problem, NULL, &bytes)
                                           : apa_cuda_attention(context, &problem, NULL, &options, NULL);
        const char *message = apa_context_message(context);
        assert_int_equal(status, APA_STATUS_UNSUPPORTED);
        assert_int_equal(strncmp(message, "cuda", 4), 0);
        assert_null(strchr(message, '\n'));
    }
    assert_true(bytes == 7 && plan.workspace_bytes == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_traits),    cmocka_unit_test(test_refusals), cmocka_unit_test(test_all_hot),
        cmocka_unit_test(test_half_sums), cmocka_unit_test(test_devices),  cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_absent),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
