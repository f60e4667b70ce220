/* Memory that can't be had: every allocation of every call is made to fail in turn.
 *
 * The program is linked with --wrap for the allocators, so that each call of the library to malloc(), calloc(),
 * realloc() or aligned_alloc() goes through here. A call that can't have its n-th allocation must say OUT_OF_MEMORY
 * with a line, leave nothing allocated, write no output, and work when it is made again. n rises until a call needs
 * fewer. */
#include "support/files.h"
#include "support/test.h"

#include "apa/apa.h"
#include "apa/eval.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void __wrap_free(void *memory);

enum { BLOCKS = 4096 };

static long countdown = -1;       /* allocations until one fails; negative: none does */
static const void *block[BLOCKS]; /* those that are allocated; what the C library itself allocates is not among them */
static int failed;

static int fails(void)
{
    if (countdown < 0 || countdown-- > 0)
        return 0;
    failed = 1;
    return 1;
}

static void replace(const void *old, const void *new)
{
    for (int i = 0; i < BLOCKS; i++)
        if (block[i] == old) {
            block[i] = new;
            return;
        }
}

static void *counted(void *memory)
{
    if (memory != NULL)
        replace(NULL, memory);
    return memory;
}

static int live(void)
{
    int count = 0;
    for (int i = 0; i < BLOCKS; i++)
        count += block[i] != NULL;
    return count;
}

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : counted(__real_malloc(bytes));
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : counted(__real_calloc(count, bytes));
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    if (fails())
        return NULL;
    if (memory != NULL)
        replace(memory, NULL);
    return counted(__real_realloc(memory, bytes));
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return fails() ? NULL : counted(__real_aligned_alloc(alignment, bytes));
}

void __wrap_free(void *memory)
{
    if (memory != NULL)
        replace(memory, NULL);
    __real_free(memory);
}

/* ---- what is called ---- */

enum { HQ = 4, HKV = 2, SQ = 20, SKV = 150, DIM = 32, PAGE = 16, PAGES = 12 };

typedef struct world {
    apa_context *context;
    float q[HQ * SQ * DIM], k[PAGES * HKV * PAGE * DIM], v[PAGES * HKV * PAGE * DIM], out[HQ * SQ * DIM], lse[HQ * SQ];
    float mask[SQ * SKV];
    int64_t cu[3], used[1];
    int32_t table[PAGES];
    const char *engine, *method;
    int kind; /* 0 plain, 1 ragged, 2 paged */
    char message[512];
} world;

static apa_problem problem_of(world *w)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = apa_tensor_hnd(w->q, APA_DTYPE_F32, 1, HQ, SQ, DIM);
    p.k = apa_tensor_hnd(w->k, APA_DTYPE_F32, 1, HKV, SKV, DIM);
    p.v = apa_tensor_hnd(w->v, APA_DTYPE_F32, 1, HKV, SKV, DIM);
    p.out = apa_tensor_hnd(w->out, APA_DTYPE_F32, 1, HQ, SQ, DIM);
    p.lse = apa_tensor_hnd(w->lse, APA_DTYPE_F32, 1, HQ, SQ, 1);
    p.causal = APA_CAUSAL_BOTTOM_RIGHT;
    if (w->kind == 1) {
        p.cu_seqlens_q = w->cu;
        p.batch = 2;
        p.k = apa_tensor_hnd(w->k, APA_DTYPE_F32, 2, HKV, SKV / 2, DIM);
        p.v = apa_tensor_hnd(w->v, APA_DTYPE_F32, 2, HKV, SKV / 2, DIM);
    } else if (w->kind == 2) {
        p.k = apa_tensor_hnd(w->k, APA_DTYPE_F32, PAGES, HKV, PAGE, DIM);
        p.v = apa_tensor_hnd(w->v, APA_DTYPE_F32, PAGES, HKV, PAGE, DIM);
        p.block_table = w->table;
        p.block_table_stride = PAGES;
        p.seqused_k = w->used;
    } else {
        p.attn_mask = apa_tensor_hnd(w->mask, APA_DTYPE_F32, 1, 1, SQ, SKV);
    }
    return p;
}

static apa_status attend(world *w)
{
    const apa_problem p = problem_of(w);
    apa_attention_options options;
    apa_recipe recipe;
    apa_attention_options_init(&options);
    options.engine = w->engine;
    apa_status status = apa_recipe_init(&recipe, w->method);
    status = status == APA_STATUS_OK ? apa_attention(w->context, &p, &recipe, &options, NULL) : status;
    snprintf(w->message, sizeof w->message, "%s", apa_context_message(w->context));
    return status;
}

static apa_status plan(world *w)
{
    const apa_problem p = problem_of(w);
    apa_plan made;
    apa_plan_init(&made);
    const apa_status status = apa_attention_plan(w->context, &p, NULL, NULL, &made);
    snprintf(w->message, sizeof w->message, "%s", apa_context_message(w->context));
    return status;
}

static apa_status evaluate(world *w)
{
    apa_problem p = problem_of(w);
    apa_evaluation_options options;
    apa_evaluation evaluation;
    apa_recipe recipe;
    apa_evaluation_options_init(&options);
    p.out.dtype = p.lse.dtype = APA_DTYPE_NONE; /* it has its own */
    options.repeats = 1;
    options.engine = w->engine;
    apa_status status = apa_recipe_init(&recipe, "apa");
    if (status == APA_STATUS_OK)
        status = apa_evaluate(w->context, &p, &recipe, &options, &evaluation);
    snprintf(w->message, sizeof w->message, "%s", apa_context_message(w->context));
    return status;
}

static apa_status create(world *w)
{
    apa_context *made;
    const apa_status status = apa_context_create(&made, NULL);
    assert_true(status == APA_STATUS_OK || made == NULL);
    apa_context_destroy(made);
    snprintf(w->message, sizeof w->message, "none");
    return status;
}

static apa_status read_file(world *w)
{
    apa_array array;
    apa_dump dump;
    memset(w->message, 0, sizeof w->message);
    if (strcmp(w->method, "dump") == 0) {
        const apa_status status = apa_dump_read(file_path("x.bin"), &dump, w->message, sizeof w->message);
        apa_dump_free(&dump);
        return status;
    }
    const apa_status status = apa_array_read(file_path(w->method), &array, w->message, sizeof w->message);
    apa_array_free(&array);
    return status;
}

static apa_status write_file(world *w)
{
    const int64_t shape[1] = {4};
    apa_array array = {w->q, APA_ARRAY_F32, 1, {4}, 4};
    const apa_output_file files[2] = {{file_path("a.npy"), &array, NULL, 0}, {file_path("b.txt"), NULL, "text", 4}};
    (void)shape;
    memset(w->message, 0, sizeof w->message);
    return apa_files_write(files, 2, w->message, sizeof w->message);
}

/* ---- every allocation in turn ---- */

static void fail_each(const char *name, apa_status (*call)(world *), world *w)
{
    const int before = live();
    long n = 0;
    for (int done = 0; !done; n += !done) {
        /* a fresh context each time: one that has run already keeps its workspace */
        assert_int_equal(apa_context_create(&w->context, NULL), APA_STATUS_OK);
        memset(w->out, 0x5A, sizeof w->out);
        memset(w->lse, 0x5A, sizeof w->lse);
        failed = 0;
        countdown = n;
        const apa_status status = call(w);
        countdown = -1;
        done = !failed;
        if (done && status != APA_STATUS_OK)
            fail_msg("%s: without a failure: %s: %s", name, apa_status_name(status), w->message);
        if (!done && (status != APA_STATUS_OUT_OF_MEMORY || w->message[0] == '\0'))
            fail_msg("%s: allocation %ld fails: %s, \"%s\"", name, n, apa_status_name(status), w->message);
        for (size_t i = 0; i < sizeof w->out && !done; i++)
            assert_int_equal(((unsigned char *)w->out)[i], 0x5A);
        if (call(w) != APA_STATUS_OK) /* nothing of the failure remains */
            fail_msg("%s: allocation %ld failed; again without: %s", name, n, w->message);
        apa_context_destroy(w->context);
        if (live() != before)
            fail_msg("%s: allocation %ld fails: %d blocks are left", name, n, live() - before);
    }
    print_message("# %s: %ld allocations, each failed once\n", name, n);
    assert_true(n > 0);
}

static world *new_world(void)
{
    static world w;
    memset(&w, 0, sizeof w);
    for (size_t i = 0; i < sizeof w.q / sizeof *w.q; i++)
        w.q[i] = (float)sin((double)i);
    for (size_t i = 0; i < sizeof w.k / sizeof *w.k; i++) {
        w.k[i] = (float)cos((double)i);
        w.v[i] = (float)sin(0.5 * (double)i);
    }
    w.cu[1] = 7;
    w.cu[2] = SQ;
    w.used[0] = SKV;
    for (int i = 0; i < PAGES; i++)
        w.table[i] = PAGES - 1 - i;
    return &w;
}

static void attention(void **unused)
{
    (void)unused;
    static const char *const engines[] = {"reference", "cpu"}, *const methods[] = {"exact", "apa", "elsa", "sage3"};
    for (int e = 0; e < 2; e++)
        for (int m = 0; m < (e == 0 ? 4 : 2); m++)
            for (int kind = 0; kind < 3; kind++) {
                char name[64];
                world *w = new_world();
                w->engine = engines[e];
                w->method = methods[m];
                w->kind = kind;
                snprintf(name, sizeof name, "%s, %s, %s", w->engine, w->method,
                         kind == 0   ? "plain"
                         : kind == 1 ? "ragged"
                                     : "paged");
                fail_each(name, attend, w);
            }
}

static void plans(void **unused)
{
    (void)unused;
    world *w = new_world();
    w->kind = 1; /* of a ragged batch: the calls of its sequences */
    fail_each("plan", plan, w);
}

static void evaluation(void **unused)
{
    (void)unused;
    world *w = new_world();
    w->engine = "reference";
    fail_each("evaluate", evaluate, w);
}

static void contexts(void **unused)
{
    (void)unused;
    world *w = new_world();
    fail_each("context", create, w);
}

static void files(void **unused)
{
    (void)unused;
    static const char *const names[] = {"x.npy", "x.safetensors", "dump"};
    const float data[6] = {1, 2, 3, 4, 5, 6};
    unsigned char bytes[1024];
    file_put(file_path("x.npy"), bytes,
             file_make_npy(bytes, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (6,), }\n", data, sizeof data));
    file_put(file_path("x.safetensors"), bytes,
             file_make_safetensors(bytes, "{\"x\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,8]}}", 8));
    file_put(file_path("x.bin"), bytes, file_make_dump(bytes, (const int32_t[6]){2, 3, 2, 1, 2, 1}));
    for (int i = 0; i < 3; i++) {
        world *w = new_world();
        w->method = names[i];
        fail_each(names[i], read_file, w);
    }
    fail_each("write", write_file, new_world());
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(attention), cmocka_unit_test(plans),
                                       cmocka_unit_test(evaluation), cmocka_unit_test(contexts),
                                       cmocka_unit_test(files)};
    return cmocka_run_group_tests(tests, file_setup, file_teardown);
}
