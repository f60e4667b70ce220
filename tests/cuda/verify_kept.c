/* Keys that stay prepared between calls (options.prepared of apa/cuda.h): a prompt in chunks.
 *
 *   same bits   chunk by chunk out, LSE, counts and the whole of the memory are those of a call that makes every tile
 *               anew about the same mean
 *   kept        with all tiles cold and the keys of the tiles that are there turned into NaNs, nothing changes: they
 *               are not read again
 *   pages       K and V in pages give the same bits on the same memory
 *   error       of all pairs to the exact result, beside the call that takes all rows and keys at once about the mean
 * of all keys; the chunks' mean is that of the first CHUNK[0] keys alone */
#include "apa/eval.h"

#include "tests/cuda/on_device.h"
#include "tests/cuda/verify.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNKS = 6, KEYS = 1700, ROOM = 2000, PAGE = 48, PAGES = (KEYS + PAGE - 1) / PAGE, F16_NAN = 0x7fff };
/* within a tile, on the edge of a tile, of a pair, across several */
static const int64_t chunk[CHUNKS] = {300, 310, 576, 640, 1100, KEYS};

#define ERROR_TIMES 2.0 /* the chunks' error may be of the whole call's: their mean is another, their verdicts too */
#define ERROR_MORE 1e-3

static int expect(int holds, const char *what)
{
    if (!holds)
        printf("  FAILED: %s\n", what);
    return !holds;
}

/* Rows first … end - 1 of a tensor [1, H, S, D]. */
static apa_tensor rows_of(const apa_tensor *x, int64_t first, int64_t end)
{
    apa_tensor rows = *x;
    rows.data = (uint16_t *)x->data + first * x->stride[2];
    rows.shape[2] = end - first;
    return rows;
}

/* The queries of chunk i over all keys up to its end. */
static apa_problem chunk_of(const apa_problem *whole, int i)
{
    apa_problem problem = *whole;
    problem.q = rows_of(&whole->q, i == 0 ? 0 : chunk[i - 1], chunk[i]);
    problem.k = rows_of(&whole->k, 0, chunk[i]);
    problem.v = rows_of(&whole->v, 0, chunk[i]);
    return problem;
}

static apa_cuda_options options_of(const char *family, void *memory, size_t bytes, int64_t keys, int mean)
{
    apa_cuda_options options;
    apa_cuda_options_init(&options);
    options.family = family;
    options.prepared = memory;
    options.prepared_bytes = bytes;
    options.prepared_room = ROOM;
    options.prepared_keys = keys;
    options.prepared_mean = mean;
    return options;
}

static int same_memory(const void *a, const void *b, size_t bytes)
{
    char *copy[2] = {malloc(bytes), malloc(bytes)};
    on_device_fetch(copy[0], a, bytes);
    on_device_fetch(copy[1], b, bytes);
    const int same = memcmp(copy[0], copy[1], bytes) == 0;
    free(copy[0]);
    free(copy[1]);
    return same;
}

/* The last chunk with the memory of the chunks before it, but none of the values whose tiles are there, nor of the
 * keys; cuda:wgmma reads all keys for what the queries' mean adds to their scores. */
static int check_not_read(apa_context *context, const on_device *data, const apa_problem *whole, const char *family,
                          const apa_recipe *recipe, void *memory, size_t bytes, const device_result *expected)
{
    const int64_t there = chunk[CHUNKS - 2] / 128 * 128;
    const size_t size = (size_t)(data->Hkv * data->Skv * data->D) * sizeof(uint16_t);
    apa_problem problem = chunk_of(whole, CHUNKS - 1);
    device_result got;
    const int first = strcmp(family, "wgmma") == 0 ? 2 : 1;
    for (int which = first; which < 3; which++) {
        uint16_t *x = malloc(size);
        memcpy(x, data->host[which].data, size);
        for (int64_t h = 0; h < data->Hkv; h++)
            for (int64_t i = 0; i < there * data->D; i++)
                x[h * data->Skv * data->D + i] = F16_NAN;
        (which == 1 ? &problem.k : &problem.v)->data = on_device_copy(x, size);
        free(x);
    }
    const apa_cuda_options options = options_of(family, memory, bytes, chunk[CHUNKS - 2], 0);
    int failures = expect(on_device_run(context, &problem, recipe, &options, &got), "run");
    failures += expect(device_result_same(&got, expected), "tiles that are there are not made again");
    device_result_free(&got);
    if (first == 1)
        cudaFree(problem.k.data);
    cudaFree(problem.v.data);
    return failures;
}

/* The last chunk from pages. */
static int check_pages(apa_context *context, const on_device *data, const apa_problem *whole, const char *family,
                       const apa_recipe *recipe, void *memory, size_t bytes, const device_result *expected)
{
    static const int64_t keys = KEYS;
    const int64_t D = data->D, Hkv = data->Hkv;
    const size_t size = (size_t)(PAGES * Hkv * PAGE * D) * sizeof(uint16_t);
    int32_t table[PAGES];
    apa_problem problem = chunk_of(whole, CHUNKS - 1);
    device_result got;
    for (int i = 0; i < PAGES; i++)
        table[i] = (i * 7 + 3) % PAGES; /* no page twice: 36 = 4·9 and 7 have no factor in common */
    for (int which = 1; which < 3; which++) {
        const uint16_t *flat = data->host[which].data;
        uint16_t *pool = malloc(size);
        memset(pool, 0xff, size);
        for (int64_t h = 0; h < Hkv; h++)
            for (int64_t j = 0; j < KEYS; j++)
                memcpy(pool + ((table[j / PAGE] * Hkv + h) * PAGE + j % PAGE) * D, flat + (h * KEYS + j) * D,
                       (size_t)D * sizeof *pool);
        *(which == 1 ? &problem.k : &problem.v) =
            apa_tensor_hnd(on_device_copy(pool, size), APA_DTYPE_F16, PAGES, Hkv, PAGE, D);
        free(pool);
    }
    int32_t *there = on_device_copy(table, sizeof table);
    problem.block_table = there;
    problem.block_table_stride = PAGES;
    problem.seqused_k = &keys;
    const apa_cuda_options options = options_of(family, memory, bytes, chunk[CHUNKS - 2], 0);
    int failures = expect(on_device_run(context, &problem, recipe, &options, &got), "run of pages");
    failures += expect(device_result_same(&got, expected), "pages: the bits of flat keys");
    device_result_free(&got);
    cudaFree(there);
    cudaFree(problem.k.data);
    cudaFree(problem.v.data);
    return failures;
}

/* Chunks into `out` and `lse` [Hq][KEYS][D]; out NULL: bits alone. */
static int run_chunks(apa_context *context, const on_device *data, const apa_problem *whole, const char *family,
                      const apa_recipe *recipe, float *out, float *lse)
{
    int failures = 0;
    void *memory[2] = {NULL, NULL};
    size_t bytes = 0;
    for (int i = 0; i < CHUNKS; i++) {
        const apa_problem problem = chunk_of(whole, i);
        const int64_t first = i == 0 ? 0 : chunk[i - 1], rows = chunk[i] - first, D = data->D;
        device_result got[2];
        if (i == 0) {
            apa_cuda_plan plan;
            apa_problem ask = problem;
            ask.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, data->Hq, rows, D);
            const apa_cuda_options options = options_of(family, NULL, 0, 0, 0);
            apa_cuda_plan_init(&plan);
            failures += expect(apa_cuda_attention_plan(context, &ask, recipe, &options, &plan) == APA_STATUS_OK,
                               apa_context_message(context));
            bytes = plan.prepared_bytes;
            memory[0] = on_device_copy(NULL, bytes);
            memory[1] = on_device_copy(NULL, bytes);
        }
        for (int anew = 0; anew < 2; anew++) {
            const apa_cuda_options options = options_of(family, memory[anew], bytes, anew ? 0 : first, anew && i > 0);
            failures += expect(on_device_run(context, &problem, recipe, &options, &got[anew]), "run");
        }
        failures += expect(device_result_same(&got[0], &got[1]), "the bits of all tiles made anew");
        failures += expect(bytes > 0 && same_memory(memory[0], memory[1], bytes), "the same tiles");
        for (int64_t h = 0; h < data->Hq && out != NULL && got[0].out != NULL; h++) {
            memcpy(out + (h * KEYS + first) * D, got[0].out + h * rows * D, (size_t)(rows * D) * sizeof *out);
            memcpy(lse + h * KEYS + first, got[0].lse + h * rows, (size_t)rows * sizeof *lse);
        }
        if (i == CHUNKS - 1) {
            failures += check_pages(context, data, whole, family, recipe, memory[0], bytes, &got[0]);
            if (recipe->force == APA_FORCE_LOW)
                failures += check_not_read(context, data, whole, family, recipe, memory[0], bytes, &got[0]);
        }
        device_result_free(&got[0]);
        device_result_free(&got[1]);
    }
    cudaFree(memory[0]);
    cudaFree(memory[1]);
    return failures;
}

/* The chunks' error beside that of one call, both to the reference engine's exact result. */
static int check_error(apa_context *context, const on_device *data, const apa_problem *whole, const char *family,
                       const apa_recipe *recipe, float *out, float *lse)
{
    const size_t n = (size_t)(data->Hq * KEYS);
    float *truth = malloc(n * (size_t)data->D * sizeof *truth), *truth_lse = malloc(n * sizeof *truth_lse);
    apa_recipe exact = on_device_recipe("exact", NULL);
    apa_problem problem = *whole;
    apa_attention_options host;
    apa_cuda_options options;
    device_result once;
    apa_error error[2];
    problem.q.data = data->host[0].data;
    problem.k.data = data->host[1].data;
    problem.v.data = data->host[2].data;
    problem.out = apa_tensor_hnd(truth, APA_DTYPE_F32, 1, data->Hq, KEYS, data->D);
    problem.lse = apa_tensor_hnd(truth_lse, APA_DTYPE_F32, 1, data->Hq, KEYS, 1);
    apa_attention_options_init(&host);
    host.engine = "reference";
    int failures = expect(apa_attention(context, &problem, &exact, &host, NULL) == APA_STATUS_OK, "reference");
    apa_cuda_options_init(&options);
    options.family = family;
    failures += expect(on_device_run(context, whole, recipe, &options, &once), "run at once");
    for (int i = 0; i < 2 && once.out != NULL; i++) {
        const apa_tensor o = apa_tensor_hnd(i == 0 ? out : once.out, APA_DTYPE_F32, 1, data->Hq, KEYS, data->D),
                         l = apa_tensor_hnd(i == 0 ? lse : once.lse, APA_DTYPE_F32, 1, data->Hq, KEYS, 1);
        failures += expect(apa_error_measure(context, &o, &l, &problem.out, &problem.lse, &error[i]) == APA_STATUS_OK,
                           "measure");
    }
    if (failures == 0) {
        printf("  to exact, in chunks (at once): l2 %.1e (%.1e) worst %.1e (%.1e) lse %.1e (%.1e)\n", error[0].rel_l2,
               error[1].rel_l2, error[0].rel_l2_max, error[1].rel_l2_max, error[0].lse_max_abs, error[1].lse_max_abs);
        failures += expect(error[0].rel_l2 <= ERROR_TIMES * error[1].rel_l2 + ERROR_MORE, "relative L2 of the chunks");
        failures += expect(error[0].lse_max_abs <= ERROR_TIMES * error[1].lse_max_abs + 2 * ERROR_MORE, "LSE");
    }
    device_result_free(&once);
    free(truth);
    free(truth_lse);
    return failures;
}

static int check_kept(apa_context *context, const char *family, const char *method, const char *knobs, const char *kind,
                      int64_t D)
{
    on_device data;
    on_device_make(&data, kind, 1, 6, 2, KEYS, KEYS, D);
    const apa_recipe recipe = on_device_recipe(method, knobs);
    apa_problem whole = data.problem;
    whole.causal = 1;
    const size_t n = (size_t)(data.Hq * KEYS);
    float *out = malloc(n * (size_t)D * sizeof *out), *lse = malloc(n * sizeof *lse);
    int failures = run_chunks(context, &data, &whole, family, &recipe, out, lse);
    if (failures == 0)
        failures += check_error(context, &data, &whole, family, &recipe, out, lse);
    printf("kept keys, %s, %s %s %s D %d: %d failures\n", family, kind, method, knobs == NULL ? "" : knobs, (int)D,
           failures);
    free(out);
    free(lse);
    on_device_free(&data);
    return failures;
}

int apa_verify_kept(apa_context *context, const char *engine)
{
    static const struct {
        const char *family, *method, *knobs, *kind;
        int64_t D;
    } rows[] = {
        {"warp", "apa", "qk_scale_granularity=row", "outliers", 64},
        {"warp", "apa", "qk_scale_granularity=row", "topics", 128},
        {"warp", "apa", "qk_scale_granularity=row hadamard=on", "outliers", 128},
        {"warp", "apa", "qk_scale_granularity=row smooth_k=off", "topics", 128},
        {"warp", "cold", "qk_scale_granularity=row", "outliers", 256},
        {"wgmma", "apa", NULL, "outliers", 64},
        {"wgmma", "apa", NULL, "topics", 128},
        {"wgmma", "apa", "smooth_k=off", "topics", 128},
        {"wgmma", "cold", NULL, "outliers", 64},
        {"wgmma", "cold", NULL, "topics", 128},
    };
    int failures = 0;
    for (const char *const *family = on_device_families(context, engine); *family != NULL; family++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            if (strcmp(rows[i].family, *family) == 0)
                failures += check_kept(context, *family, rows[i].method, rows[i].knobs, rows[i].kind, rows[i].D);
    return failures;
}
