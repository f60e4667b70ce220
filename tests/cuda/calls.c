/* Calls of the device-pointer interface beyond the plain one, without a device (launches are caught by plan.c): which
 * family runs, sequences of their own lengths, pages, keys that stay prepared, and what is refused. */
#include "cuda/plan.h"

#include "support/fixture.h"
#include "support/test.h"

#include <string.h>

static void expect_refusal(apa_status found, apa_status expected, const char *name)
{
    const char *message = apa_context_message(context);
    if (found != expected || strncmp(message, name, strlen(name)) != 0)
        fail_msg("%s: status %d, %s", name, (int)found, message);
    assert_null(strchr(message, '\n'));
}

static apa_recipe recipe_of(const char *method, const char *knob, const char *value)
{
    apa_recipe recipe;
    assert_int_equal(apa_recipe_init(&recipe, method), APA_STATUS_OK);
    /* calls as short as these would be left to the exact kernel */
    assert_int_equal(apa_recipe_set(&recipe, "early_tiles", "0", NULL, 0), APA_STATUS_OK);
    if (knob != NULL)
        assert_int_equal(apa_recipe_set(&recipe, knob, value, NULL, 0), APA_STATUS_OK);
    return recipe;
}

/* Plans and launches with the options; checks that the named engine ran. */
static apa_cuda_plan run_call(const apa_cuda_target *target, const apa_problem *p, const apa_recipe *recipe,
                              apa_cuda_options *options, const char *engine)
{
    apa_cuda_plan plan;
    apa_cuda_plan_init(&plan);
    memset(&at, 0, sizeof at);
    at.target = *target;
    apa_status status = apa_cuda_attention_plan(context, p, recipe, options, &plan);
    if (status != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
    assert_string_equal(plan.engine, engine);
    at.hopper = strcmp(engine, "cuda:wgmma") == 0;
    at.bytes = plan.workspace_bytes;
    at.kept_bytes = plan.prepared_bytes;
    options->workspace = BASE;
    options->workspace_bytes = plan.workspace_bytes;
    options->prepared = plan.prepared_bytes > 0 ? KEPT : NULL;
    options->prepared_bytes = plan.prepared_bytes;
    status = apa_cuda_attention(context, p, recipe, options, NULL);
    if (status != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
    return plan;
}

static void test_families(void **state)
{
    (void)state;
    const shape s = {1, 6, 2, 500, 3000, 128, 1, -1};
    const apa_problem p = problem_of(&s);
    static const struct {
        const char *family, *engine;
    } rows[] = {{NULL, "cuda:wgmma"}, {"auto", "cuda:wgmma"}, {"wgmma", "cuda:wgmma"}, {"warp", "cuda:warp"}};
    static const char *const method[] = {"exact", "apa"};
    apa_cuda_options options;
    apa_cuda_plan plan;
    for (int i = 0; i < 2; i++) {
        const apa_recipe recipe = recipe_of(method[i], NULL, NULL);
        for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
            apa_cuda_options_init(&options);
            options.family = rows[row].family;
            plan = run_call(&h200, &p, &recipe, &options, rows[row].engine);
            options.workspace_bytes = plan.workspace_bytes - 1;
            if (plan.workspace_bytes > 0)
                expect_refusal(apa_cuda_attention(context, &p, &recipe, &options, NULL), APA_STATUS_INVALID_ARGUMENT,
                               "workspace:");
        }
        options.family = NULL;
        run_call(&rtx_4090, &p, &recipe, &options, "cuda:warp");
        apa_cuda_plan_init(&plan);
        options.family = "wgmma";
        expect_refusal(apa_cuda_attention_plan(context, &p, &recipe, &options, &plan), APA_STATUS_UNSUPPORTED,
                       "cuda:wgmma:");
        options.family = "cuda:warp";
        expect_refusal(apa_cuda_attention_plan(context, &p, &recipe, &options, &plan), APA_STATUS_INVALID_ARGUMENT,
                       "family:");
    }
    /* what one family does not take is the other's where the choice is free, and refused where it is not */
    const apa_recipe int8 = recipe_of("apa", "cold_format", "int8");
    apa_cuda_options_init(&options);
    run_call(&h200, &p, &int8, &options, "cuda:warp");
    options.family = "wgmma";
    expect_refusal(apa_cuda_attention_plan(context, &p, &int8, &options, &plan), APA_STATUS_UNSUPPORTED, "qk_format:");
    plan.size = 0;
    expect_refusal(apa_cuda_attention_plan(context, &p, NULL, NULL, &plan), APA_STATUS_INVALID_ARGUMENT, "plan:");
    apa_cuda_plan_init(&plan);
    options.size = 1;
    expect_refusal(apa_cuda_attention_plan(context, &p, NULL, &options, &plan), APA_STATUS_INVALID_ARGUMENT,
                   "options:");
}

/* Formats of cold tiles on Hopper: scores are E4M3 at D 128, and those of the inputs at D 64, where no mean comes off
 * the queries. What is refused is cuda:warp's, if anybody's. */
static void test_formats(void **state)
{
    (void)state;
    static const struct {
        const char *method, *knob, *value;
        const char *refused[2]; /* at D 64, at D 128: the knob that the refusal names, NULL: taken */
        bool warp[2];           /* whether cuda:warp takes it */
    } rows[] = {
        {"apa", NULL, NULL, {NULL, NULL}, {true, true}},
        {"cold", NULL, NULL, {NULL, NULL}, {true, true}},
        {"apa-e4m3", NULL, NULL, {NULL, NULL}, {true, true}},
        {"apa-e4m3", "qk_format", "e4m3", {"qk_format:", NULL}, {true, true}},
        {"apa-e4m3", "qk_format", "exact", {NULL, "qk_format:"}, {false, false}},
        {"apa-e4m3", "pv_format", "int8", {"pv_format:", "pv_format:"}, {false, false}},
        {"apa", "pv_format", "e4m3", {"qk_format:", "qk_format:"}, {true, true}},
        {"apa", "smooth_q", "on", {"smooth_q:", NULL}, {false, false}},
        {"apa", "smooth_q", "off", {NULL, NULL}, {true, true}},
        {"apa", "p_phase", "off", {NULL, NULL}, {true, true}},
        {"apa", "v_scale_granularity", "tile-channel", {"v_scale_granularity:", "v_scale_granularity:"}, {true, true}},
        {"apa", "hadamard", "on", {"hadamard:", "hadamard:"}, {true, true}},
        {"apa", "eps_by", "call", {NULL, NULL}, {true, true}},
        {"apa", "eps_by", "row", {NULL, NULL}, {false, false}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int wide = 0; wide < 2; wide++) {
            const shape s = {1, 6, 2, 500, 3000, wide ? 128 : 64, 1, -1};
            const apa_problem p = problem_of(&s);
            const apa_recipe recipe = recipe_of(rows[i].method, rows[i].knob, rows[i].value);
            apa_cuda_options options;
            apa_cuda_plan plan;
            apa_cuda_options_init(&options);
            for (int warp = 0; warp < 2; warp++) {
                const bool taken = warp ? rows[i].warp[wide] : rows[i].refused[wide] == NULL;
                options.family = warp ? "warp" : "wgmma";
                if (taken) {
                    run_call(&h200, &p, &recipe, &options, warp ? "cuda:warp" : "cuda:wgmma");
                    continue;
                }
                at.target = h200;
                apa_cuda_plan_init(&plan);
                expect_refusal(apa_cuda_attention_plan(context, &p, &recipe, &options, &plan), APA_STATUS_UNSUPPORTED,
                               warp ? "" : rows[i].refused[wide]);
            }
        }
}

/* ------------------------------------------------------------------------------- sequences that differ */

static void check_ragged(const char *family, const char *engine, const char *method, const int64_t *cu_q,
                         const int64_t *cu_k, int64_t batch)
{
    const shape s = {1, 6, 2, 420, 2048, 128, 1, -1};
    const apa_recipe recipe = recipe_of(method, NULL, NULL);
    const bool exact = strcmp(method, "exact") == 0;
    apa_problem p = problem_of(&s);
    apa_cuda_options options;
    p.cu_seqlens_q = cu_q;
    p.cu_seqlens_k = cu_k;
    p.batch = batch;
    apa_cuda_options_init(&options);
    options.family = family;
    run_call(&h200, &p, &recipe, &options, engine);
    int64_t next = 0;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t rows = cu_q[b + 1] - cu_q[b];
        if (rows == 0) /* nothing to launch */
            continue;
        assert_true(next < plan_sequences(exact));
        const apa_cuda_job *job = &at.job[next++];
        assert_int_equal(job->Sq, rows);
        assert_int_equal(job->Skv, cu_k[b + 1] - cu_k[b]);
        assert_ptr_equal(job->q.data, (char *)p.q.data + cu_q[b] * s.D * 2);
        assert_ptr_equal(job->out.data, (char *)p.out.data + cu_q[b] * s.D * 2);
        assert_ptr_equal(job->v.data, (char *)p.v.data + cu_k[b] * s.D * 2);
        assert_true(job->end_offset == job->Skv - job->Sq + 1);
    }
    assert_int_equal(plan_sequences(exact), next);
    assert_int_equal(at.gathers, 0);
}

/* Each sequence is a call of its own on its part of the tensors. */
static void test_ragged(void **state)
{
    (void)state;
    static const int64_t cu_q[] = {0, 100, 100, 101, 400, 420}, cu_k[] = {0, 700, 710, 710, 2000, 2020};
    static const int64_t full_q[] = {0, 100, 120, 420}, full_k[] = {0, 700, 710, 2020};
    static const char *const method[] = {"exact", "apa"};
    for (int i = 0; i < 2; i++) {
        check_ragged("warp", "cuda:warp", method[i], cu_q, cu_k, 5); /* some without queries or keys */
        check_ragged("warp", "cuda:warp", method[i], full_q, full_k, 3);
        check_ragged("wgmma", "cuda:wgmma", method[i], full_q, full_k, 3);
        check_ragged("auto", "cuda:wgmma", method[i], full_q, full_k, 3);
        check_ragged("warp", "cuda:warp", method[i], cu_q, cu_k, 0);
        check_ragged("auto", "cuda:wgmma", method[i], cu_q, cu_k, 0);
    }
}

/* Plans `p`, which is refused. */
static void refuse(const apa_problem *p, const apa_recipe *recipe, const apa_cuda_options *options, apa_status expected,
                   const char *name)
{
    apa_cuda_plan plan;
    memset(&at, 0, sizeof at);
    at.target = h200;
    apa_cuda_plan_init(&plan);
    expect_refusal(apa_cuda_attention_plan(context, p, recipe, options, &plan), expected, name);
    expect_refusal(apa_cuda_attention(context, p, recipe, options, NULL), expected, name);
    assert_int_equal(at.launches, 0);
}

static void test_ragged_refusals(void **state)
{
    (void)state;
    static const int64_t cu[] = {0, 100, 300}, used[] = {500, 700}, offsets[] = {0, 5};
    static const int32_t table[16];
    const shape s = {1, 6, 2, 300, 1000, 128, 1, -1}, two = {2, 6, 2, 300, 1000, 128, 1, -1};
    const int64_t *const on_device = (const int64_t *)(void *)TABLE;
    apa_cuda_options options;
    apa_cuda_options_init(&options);
    apa_problem p = problem_of(&s);
    p.batch = 2;
    p.cu_seqlens_k = cu;
    p.cu_seqlens_q = on_device;
    refuse(&p, NULL, &options, APA_STATUS_INVALID_ARGUMENT, "cu_seqlens_q: in device memory");
    p.cu_seqlens_q = cu;
    p.cu_seqlens_k = on_device;
    refuse(&p, NULL, &options, APA_STATUS_INVALID_ARGUMENT, "cu_seqlens_k: in device memory");
    p.cu_seqlens_k = cu;
    options.verdicts = (uint8_t *)BASE;
    refuse(&p, NULL, &options, APA_STATUS_UNSUPPORTED, "verdicts:");
    apa_cuda_options_init(&options);
    options.family = "wgmma";
    options.prepared_room = 1000;
    refuse(&p, NULL, &options, APA_STATUS_UNSUPPORTED, "prepared_room:");
    apa_cuda_options_init(&options);
    p.q.stride[2] += 4; /* the second sequence's rows are not aligned */
    expect_refusal(apa_cuda_attention(context, &p, NULL, &options, NULL), APA_STATUS_INVALID_ARGUMENT, "q:");
    p = problem_of(&two);
    p.seqused_k = on_device;
    refuse(&p, NULL, &options, APA_STATUS_INVALID_ARGUMENT, "seqused_k: in device memory");
    p.seqused_k = used;
    p.q_offsets = on_device;
    refuse(&p, NULL, &options, APA_STATUS_INVALID_ARGUMENT, "q_offsets: in device memory");
    p.q_offsets = offsets;
    p.block_table = table;
    p.block_table_stride = 8;
    refuse(&p, NULL, &options, APA_STATUS_INVALID_ARGUMENT, "block_table: in host memory");
}

/* K and V are laid flat at the head of the workspace, and every kernel reads them there. */
static void check_paged(const char *family, const char *engine, const char *method)
{
    static const int64_t used[] = {1000, 37, 960};
    enum { PAGES = 99, PAGE = 48, ENTRIES = 30 };
    const shape s = {3, 6, 2, 70, PAGE, 128, 1, -1};
    const apa_recipe recipe = recipe_of(method, NULL, NULL);
    apa_problem p = problem_of(&s);
    apa_cuda_options options;
    p.k = apa_tensor_nhd(p.k.data, APA_DTYPE_F16, PAGES, s.Hkv, PAGE, s.D);
    p.v = apa_tensor_nhd(p.v.data, APA_DTYPE_F16, PAGES, s.Hkv, PAGE, s.D);
    p.block_table = (const int32_t *)(void *)TABLE;
    p.block_table_stride = ENTRIES;
    p.seqused_k = used;
    apa_cuda_options_init(&options);
    options.family = family;
    run_call(&h200, &p, &recipe, &options, engine);
    assert_int_equal(at.gathers, 3);
    assert_int_equal(plan_sequences(strcmp(method, "exact") == 0), 3);
    for (int b = 0; b < 3; b++) {
        const apa_cuda_pages *pages = &at.pages[b];
        const apa_cuda_job *job = &at.job[b];
        assert_ptr_equal(pages->table, p.block_table + ENTRIES * b);
        assert_true(pages->pages == PAGES && pages->Skv == used[b] && pages->Hkv == s.Hkv && pages->D == s.D);
        assert_int_equal(pages->page_size, used[b] < PAGE ? used[b] : PAGE);
        assert_ptr_equal(pages->from[0].data, p.k.data);
        assert_ptr_equal(pages->from[1].data, p.v.data);
        assert_memory_equal(pages->from[0].stride, p.k.stride, sizeof pages->from[0].stride);
        assert_ptr_equal(job->k.data, pages->to[0]);
        assert_ptr_equal(job->v.data, pages->to[1]);
        assert_true(job->k.stride[1] == used[b] * s.D && job->k.stride[2] == s.D && job->Skv == used[b]);
    }
}

static void test_paged(void **state)
{
    (void)state;
    static const char *const method[] = {"exact", "apa"};
    for (int i = 0; i < 2; i++) {
        check_paged("warp", "cuda:warp", method[i]);
        check_paged("wgmma", "cuda:wgmma", method[i]);
    }
}

/* ------------------------------------------------------------------------------- kept keys */

static void check_kept(const shape *s, const apa_recipe *recipe, const char *engine, int64_t keys, int mean,
                       int32_t first_tile)
{
    const apa_problem p = problem_of(s);
    apa_cuda_options options;
    apa_cuda_options_init(&options);
    options.family = engine + strlen("cuda:");
    options.prepared_room = 5000;
    options.prepared_keys = keys;
    options.prepared_mean = mean;
    const apa_cuda_plan plan = run_call(&h200, &p, recipe, &options, engine);
    assert_true(plan.prepared_bytes > 0);
    const apa_cuda_job *job = &at.job[0];
    assert_int_equal(job->room, at.hopper ? 80 : 79);
    assert_int_equal(job->first_tile, first_tile);
    assert_int_equal(job->mean_given, keys > 0 || mean);
    options.prepared_bytes--;
    expect_refusal(apa_cuda_attention(context, &p, recipe, &options, NULL), APA_STATUS_INVALID_ARGUMENT, "prepared:");
    options.prepared_bytes++;
    options.prepared = KEPT + 16;
    expect_refusal(apa_cuda_attention(context, &p, recipe, &options, NULL), APA_STATUS_INVALID_ARGUMENT, "prepared:");
    options.prepared = NULL;
    expect_refusal(apa_cuda_attention(context, &p, recipe, &options, NULL), APA_STATUS_INVALID_ARGUMENT, "prepared:");
}

static void test_kept(void **state)
{
    (void)state;
    const apa_recipe fine = recipe_of("apa", "qk_scale_granularity", "row"), apa = recipe_of("apa", NULL, NULL);
    const shape few = {2, 6, 2, 300, 1500, 64, 1, -1},
                many = {2, 99, 33, 300, 1500, 64, 1, -1}, /* 528 units: blocks of Hopper's do both passes */
        biased = {2, 99, 33, 300, 1500, 128, 1, -1};      /* and biases, which are no part of what is kept */
    static const int64_t keys[] = {0, 63, 64, 1000, 1088, 1471, 1500};
    static const int32_t warp[] = {0, 0, 1, 15, 17, 22, 23}, wgmma[] = {0, 0, 0, 14, 16, 22, 22};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        check_kept(&few, &fine, "cuda:warp", keys[i], 0, warp[i]);
        check_kept(&few, &apa, "cuda:wgmma", keys[i], 0, wgmma[i]);
        assert_int_equal(at.both_launches, 0);
        check_kept(&many, &apa, "cuda:wgmma", keys[i], 0, wgmma[i]);
        assert_int_equal(at.both_launches, 1);
        check_kept(&biased, &apa, "cuda:wgmma", keys[i], 0, wgmma[i]);
        assert_true(at.both_launches == 1 && at.job[0].smooth_q);
    }
    check_kept(&few, &apa, "cuda:wgmma", 0, 1, 0);
}

static void test_kept_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *knob, *value, *family;
        int64_t room, keys;
        apa_status status;
        const char *name;
    } rows[] = {
        {NULL, NULL, NULL, 5000, 0, APA_STATUS_INVALID_ARGUMENT, "family:"},
        {NULL, NULL, "auto", 5000, 0, APA_STATUS_INVALID_ARGUMENT, "family:"},
        {NULL, NULL, "wgmma", 1499, 0, APA_STATUS_INVALID_ARGUMENT, "prepared_room:"},
        {NULL, NULL, "wgmma", INT64_C(1) << 40, 0, APA_STATUS_INVALID_ARGUMENT, "prepared_room:"},
        {NULL, NULL, "wgmma", 0, 100, APA_STATUS_INVALID_ARGUMENT, "prepared_room:"},
        {NULL, NULL, "wgmma", 5000, 1501, APA_STATUS_INVALID_ARGUMENT, "prepared_keys:"},
        {NULL, NULL, "wgmma", 5000, -1, APA_STATUS_INVALID_ARGUMENT, "prepared_keys:"},
        {NULL, NULL, "warp", 5000, 0, APA_STATUS_UNSUPPORTED, "prepared:"},
        {"pv_format", "e4m3", "warp", 5000, 0, APA_STATUS_UNSUPPORTED, "prepared:"},
        {"cold_format", "e4m3", "warp", 5000, 0, APA_STATUS_UNSUPPORTED, "prepared:"},
        {"cold_format", "nvfp4", "warp", 5000, 0, APA_STATUS_UNSUPPORTED, "prepared:"},
    };
    const shape s = {1, 6, 2, 300, 1500, 64, 1, -1};
    apa_problem p = problem_of(&s);
    apa_cuda_options options;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const apa_recipe recipe = recipe_of("apa", rows[i].knob, rows[i].value);
        apa_cuda_options_init(&options);
        options.family = rows[i].family;
        options.prepared_room = rows[i].room;
        options.prepared_keys = rows[i].keys;
        refuse(&p, &recipe, &options, rows[i].status, rows[i].name);
    }
    /* all tiles hot: nothing is prepared, and no memory needed */
    const apa_recipe exact = recipe_of("exact", NULL, NULL);
    apa_cuda_options_init(&options);
    options.family = "wgmma";
    options.prepared_room = 5000;
    assert_true(run_call(&h200, &p, &exact, &options, "cuda:wgmma").prepared_bytes == 0);
    /* a call that prepares and has nobody to ask */
    p.q.shape[2] = p.out.shape[2] = 0;
    refuse(&p, NULL, &options, APA_STATUS_INVALID_ARGUMENT, "prepared_room:");
}

/* ------------------------------------------------------------------------------- bounded copies */

/* Bytes of a tile of all KV heads. */
static int64_t tile_bytes(const shape *s, bool fine)
{
    return s->B * s->Hkv * (2 * 64 * s->D + 16 + (fine ? 64 * 4 + s->D * 4 : 16));
}

static void check_bounded(const shape *s, const apa_recipe *recipe, bool fine, int64_t held, int preps)
{
    const apa_problem p = problem_of(s);
    const int64_t tiles = (s->Skv + 63) / 64, a_tile = tile_bytes(s, fine);
    apa_cuda_options options;
    apa_cuda_options_init(&options);
    options.family = "warp";
    const apa_cuda_plan whole = run_call(&h200, &p, recipe, &options, "cuda:warp");
    options.copy_bytes = (size_t)((held + 1) * a_tile - 1);
    const apa_cuda_plan bounded = run_call(&h200, &p, recipe, &options, "cuda:warp");
    const int64_t saved = (int64_t)whole.workspace_bytes - (int64_t)bounded.workspace_bytes;
    assert_true(saved > (tiles - held) * a_tile - 256 && saved < (tiles - held) * a_tile + 256);
    assert_int_equal(at.job[0].held, held);
    assert_int_equal(at.preps, preps);
    options.copy_bytes = (size_t)(tiles * a_tile);
    assert_true(run_call(&h200, &p, recipe, &options, "cuda:warp").workspace_bytes == whole.workspace_bytes);
    assert_int_equal(at.job[0].windowed, 0);
}

static void test_bounded(void **state)
{
    (void)state;
    const shape one = {1, 6, 2, 300, 1500, 64, 1, -1}, many = {1, 24, 8, 16384, 122880, 128, 1, -1};
    const apa_recipe apa = recipe_of("apa", NULL, NULL), cold = recipe_of("cold", NULL, NULL),
                     fine = recipe_of("apa", "qk_scale_granularity", "row");
    /* 24 tiles: 23 beside the sink in windows of held - 1; twice with corrections, but for the first, which is there */
    check_bounded(&one, &apa, false, 9, 2 * 3);
    check_bounded(&one, &cold, false, 9, 3);
    check_bounded(&one, &fine, true, 2, 2 * 23);
    check_bounded(&one, &apa, false, 23, 2 * 2);
    /* several batches of units */
    const apa_problem p = problem_of(&many);
    apa_cuda_options options;
    apa_cuda_options_init(&options);
    options.family = "warp";
    options.copy_bytes = (size_t)(241 * tile_bytes(&many, false));
    run_call(&h200, &p, &apa, &options, "cuda:warp"); /* 1919 tiles: 8 windows */
    const int64_t batches = (many.Hkv * 3 * 128 + at.job[0].unit_count - 1) / at.job[0].unit_count;
    assert_true(batches > 1);
    assert_int_equal(at.preps, batches * 2 * 8);
}

/* Hopper bounds the copy by KV heads: parts of the call one after the other, cut as the whole is. */
static void check_heads(const shape *s, int64_t most, int64_t parts, const int64_t *heads)
{
    const apa_problem p = problem_of(s);
    const apa_recipe recipe = recipe_of("apa", NULL, NULL);
    const int64_t a_head = (s->Skv + 127) / 128 * (s->D == 64 ? 16384 + 8192 + 64 : 2 * 16384 + 64 + 4096);
    apa_cuda_options options;
    apa_cuda_options_init(&options);
    const apa_cuda_plan whole = run_call(&h200, &p, &recipe, &options, "cuda:wgmma");
    const apa_cuda_job all = at.job[0];
    assert_int_equal(plan_sequences(false), 1);
    options.copy_bytes = (size_t)((most + 1) * a_head - 1);
    const apa_cuda_plan bounded = run_call(&h200, &p, &recipe, &options, "cuda:wgmma");
    assert_true(bounded.workspace_bytes + (size_t)((s->B * s->Hkv - most) * a_head) <= whole.workspace_bytes);
    assert_int_equal(plan_sequences(false), parts);
    int64_t before = 0;
    for (int64_t i = 0; i < parts; i++) {
        const apa_cuda_job *job = &at.job[i];
        const int64_t b = before / s->Hkv, h = before % s->Hkv, G = s->Hq / s->Hkv;
        assert_int_equal((int64_t)job->B * job->Hkv, heads[i]);
        assert_int_equal(job->Hq, job->Hkv * G);
        assert_true(job->splits == all.splits && job->hot_splits == all.hot_splits && job->slots == all.slots &&
                    job->wide == all.wide);
        assert_true((const char *)job->k.data - (const char *)all.k.data ==
                    2 * (b * all.k.stride[0] + h * all.k.stride[1]));
        assert_true((const char *)job->out.data - (const char *)all.out.data ==
                    (int64_t)apa_dtype_bytes((apa_dtype)all.out.dtype) *
                        (b * all.out.stride[0] + h * G * all.out.stride[1]));
        before += heads[i];
    }
    assert_int_equal(before, s->B * s->Hkv);
    options.copy_bytes = (size_t)(s->B * s->Hkv * a_head);
    assert_true(run_call(&h200, &p, &recipe, &options, "cuda:wgmma").workspace_bytes == whole.workspace_bytes);
    assert_int_equal(plan_sequences(false), 1);
    options.copy_bytes = (size_t)(a_head - 1);
    refuse(&p, &recipe, &options, APA_STATUS_INVALID_ARGUMENT, "copy_bytes:");
}

static void test_bounded_by_heads(void **state)
{
    (void)state;
    const shape full = {1, 24, 8, 2048, 122880, 128, 0, -1}, wide = {1, 32, 32, 16384, 16384, 64, 1, -1},
                few = {3, 6, 2, 300, 1500, 128, 1, -1};
    check_heads(&full, 3, 3, (const int64_t[]){3, 3, 2});
    check_heads(&full, 7, 2, (const int64_t[]){4, 4});
    check_heads(&wide, 9, 4, (const int64_t[]){8, 8, 8, 8});
    check_heads(&few, 1, 6, (const int64_t[]){1, 1, 1, 1, 1, 1}); /* its keys are split among blocks */
    check_heads(&few, 5, 2, (const int64_t[]){4, 2});             /* whole sequences */
}

static void test_bounded_refusals(void **state)
{
    (void)state;
    const shape s = {1, 6, 2, 300, 1500, 64, 1, -1};
    const apa_problem p = problem_of(&s);
    static const struct {
        const char *knob, *value, *family;
        int64_t tiles, room;
        apa_status status;
    } rows[] = {
        {NULL, NULL, NULL, 9, 0, APA_STATUS_INVALID_ARGUMENT},
        {NULL, NULL, "wgmma", 9, 0, APA_STATUS_INVALID_ARGUMENT},
        {NULL, NULL, "warp", 1, 0, APA_STATUS_INVALID_ARGUMENT},
        {"qk_scale_granularity", "row", "warp", 9, 5000, APA_STATUS_INVALID_ARGUMENT},
        {"skip", "on", "warp", 9, 0, APA_STATUS_UNSUPPORTED},
        {"cold_format", "nvfp4", "warp", 9, 0, APA_STATUS_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const apa_recipe recipe = recipe_of("apa", rows[i].knob, rows[i].value);
        apa_cuda_options options;
        apa_cuda_options_init(&options);
        options.family = rows[i].family;
        options.prepared_room = rows[i].room;
        options.copy_bytes = (size_t)(rows[i].tiles * tile_bytes(&s, false));
        refuse(&p, &recipe, &options, rows[i].status, "copy_bytes:");
    }
    /* no copy, no bound */
    const apa_recipe exact = recipe_of("exact", NULL, NULL);
    apa_cuda_options options;
    apa_cuda_options_init(&options);
    options.family = "warp";
    options.copy_bytes = 1;
    run_call(&h200, &p, &exact, &options, "cuda:warp");
}

int apa_test_calls(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_formats),
        cmocka_unit_test(test_ragged),
        cmocka_unit_test(test_ragged_refusals),
        cmocka_unit_test(test_paged),
        cmocka_unit_test(test_kept),
        cmocka_unit_test(test_kept_refusals),
        cmocka_unit_test(test_bounded),
        cmocka_unit_test(test_bounded_by_heads),
        cmocka_unit_test(test_bounded_refusals),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
