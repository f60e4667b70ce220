/* The device-pointer interface on a device: families, pages and ragged batches, all bit for bit against plain calls. */
#include "tests/cuda/on_device.h"
#include "tests/cuda/verify.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { F16_NAN = 0x7fff };

static int expect(int holds, const char *what)
{
    if (!holds)
        printf("  FAILED: %s\n", what);
    return !holds;
}

/* ------------------------------------------------------------------------------- families */

/* The family that is asked for runs, with the bits of the engine of that name on host tensors. */
static int check_family(apa_context *context, const char *family, const char *method)
{
    on_device data;
    device_result got;
    apa_cuda_options options;
    apa_attention_options host;
    apa_statistics statistics;
    char engine[16];
    on_device_make(&data, "topics", 2, 6, 2, 200, 1500, 128);
    const apa_recipe recipe = on_device_recipe(method, NULL);
    apa_problem problem = data.problem;
    problem.causal = 1;
    apa_cuda_options_init(&options);
    options.family = family;
    int failures = expect(on_device_run(context, &problem, &recipe, &options, &got), "run");
    snprintf(engine, sizeof engine, "cuda:%s", family);
    failures += expect(strcmp(got.engine, engine) == 0, "the family that was asked for");
    const size_t n = (size_t)(got.rows * got.D);
    float *out = malloc(n * sizeof *out + 1);
    problem.q.data = data.host[0].data;
    problem.k.data = data.host[1].data;
    problem.v.data = data.host[2].data;
    problem.out = apa_tensor_hnd(out, APA_DTYPE_F32, data.B, data.Hq, data.Sq, data.D);
    apa_attention_options_init(&host);
    host.engine = engine;
    apa_statistics_init(&statistics);
    failures += expect(apa_attention(context, &problem, &recipe, &host, &statistics) == APA_STATUS_OK, "host tensors");
    failures += expect(n > 0 && memcmp(out, got.out, n * sizeof *out) == 0 && strcmp(statistics.engine, engine) == 0 &&
                           statistics.hot == (int64_t)got.counts[APA_CUDA_COUNT_HOT],
                       "the bits of host tensors");
    printf("family %s, %s: %d failures\n", family, method, failures);
    free(out);
    device_result_free(&got);
    on_device_free(&data);
    return failures;
}

/* ------------------------------------------------------------------------------- pages */

enum { SEQUENCES = 3, PAGE = 48, PAGES = 61, ENTRIES = 22 };
static const int64_t used[SEQUENCES] = {1000, 37, 960};

typedef struct paged {
    on_device pool;    /* k, v: a page is a batch entry; q: Sq of PAGES, of which the first SEQUENCES are used */
    on_device queries; /* q of the sequences */
    apa_problem problem;
    int32_t table[SEQUENCES * ENTRIES];
    int32_t *on_device; /* the table */
} paged;

/* Any pages, `change` apart from other fillings; one out of range where the caller says so. */
static void fill_table(paged *to, int change, int32_t wrong)
{
    for (int i = 0; i < SEQUENCES * ENTRIES; i++)
        to->table[i] = (i * 17 + change) % PAGES;
    if (wrong != 0)
        to->table[20] = wrong; /* keys 960 … 999 of the first sequence */
    on_device_expect(cudaMemcpy(to->on_device, to->table, sizeof to->table, cudaMemcpyHostToDevice), "table");
}

static void make_paged(paged *to, int64_t D)
{
    on_device_make(&to->pool, "outliers", PAGES, 2, 2, 1, PAGE, D);
    on_device_make(&to->queries, "outliers", SEQUENCES, 6, 2, 100, 64, D);
    to->on_device = on_device_copy(NULL, sizeof to->table);
    to->problem = to->queries.problem;
    to->problem.k = to->pool.problem.k;
    to->problem.v = to->pool.problem.v;
    to->problem.causal = 1;
    to->problem.block_table = to->on_device;
    to->problem.block_table_stride = ENTRIES;
    to->problem.seqused_k = used;
}

static void free_paged(paged *made)
{
    on_device_free(&made->pool);
    on_device_free(&made->queries);
    cudaFree(made->on_device);
}

/* K or V of sequence b as the table has it, by the host; NaN where there is no such page. */
static void *flat_of(const paged *from, int which, int64_t b)
{
    const int64_t Hkv = from->pool.Hkv, D = from->pool.D;
    const uint16_t *pool = from->pool.host[which].data;
    uint16_t *flat = malloc((size_t)(Hkv * used[b] * D) * sizeof *flat);
    for (int64_t h = 0; h < Hkv; h++)
        for (int64_t j = 0; j < used[b]; j++) {
            const int64_t page = from->table[b * ENTRIES + j / PAGE];
            uint16_t *to = flat + (h * used[b] + j) * D;
            for (int64_t d = 0; d < D; d++)
                to[d] = page < 0 || page >= PAGES ? F16_NAN : pool[((page * Hkv + h) * PAGE + j % PAGE) * D + d];
        }
    void *copy = on_device_copy(flat, (size_t)(Hkv * used[b] * D) * sizeof *flat);
    free(flat);
    return copy;
}

/* `got`, of all sequences, against a flat call of each. */
static int compare_to_flat(apa_context *context, const paged *from, const apa_recipe *recipe,
                           const apa_cuda_options *options, const device_result *got)
{
    int failures = 0;
    const int64_t Hq = from->queries.Hq, Sq = from->queries.Sq, D = from->queries.D, rows = Hq * Sq;
    uint64_t sum[APA_CUDA_COUNT_NUMBER] = {0};
    for (int64_t b = 0; b < SEQUENCES; b++) {
        device_result flat;
        apa_problem problem = from->queries.problem;
        problem.causal = 1;
        problem.q =
            apa_tensor_hnd((uint16_t *)from->queries.problem.q.data + b * rows * D, APA_DTYPE_F16, 1, Hq, Sq, D);
        problem.k = apa_tensor_hnd(flat_of(from, 1, b), APA_DTYPE_F16, 1, from->pool.Hkv, used[b], D);
        problem.v = apa_tensor_hnd(flat_of(from, 2, b), APA_DTYPE_F16, 1, from->pool.Hkv, used[b], D);
        failures += expect(on_device_run(context, &problem, recipe, options, &flat), "flat run");
        failures += expect(flat.out != NULL && got->out != NULL &&
                               memcmp(flat.out, got->out + b * rows * D, (size_t)(rows * D) * sizeof(float)) == 0 &&
                               memcmp(flat.lse, got->lse + b * rows, (size_t)rows * sizeof(float)) == 0,
                           "the bits of the flat call");
        for (int i = 0; i < APA_CUDA_COUNT_NUMBER; i++)
            sum[i] += flat.counts[i];
        cudaFree(problem.k.data);
        cudaFree(problem.v.data);
        device_result_free(&flat);
    }
    return failures + expect(memcmp(sum, got->counts, sizeof sum) == 0, "counts are those of all sequences");
}

static int check_pages(apa_context *context, const char *family, const char *method, const char *knobs, int64_t D)
{
    static const int32_t wrong[] = {0, -1, PAGES, INT32_MIN, INT32_MAX};
    int failures = 0;
    paged data;
    apa_cuda_options options;
    make_paged(&data, D);
    const apa_recipe recipe = on_device_recipe(method, knobs);
    apa_cuda_options_init(&options);
    options.family = family;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        device_result got;
        int64_t nan = 0;
        fill_table(&data, (int)i, wrong[i]);
        failures += expect(on_device_run(context, &data.problem, &recipe, &options, &got), "run");
        failures += compare_to_flat(context, &data, &recipe, &options, &got);
        for (int64_t row = 0; row < got.rows; row++)
            nan += isnan(got.out[row * D]) != 0;
        /* rows 60 … 99 of 6 heads of the first sequence see the page that is not there */
        failures += expect(nan == (wrong[i] == 0 ? 0 : 6 * 40), "rows that see the page are NaN, and no others");
        device_result_free(&got);
    }
    printf("pages, %s, %s %s D %d: %d failures\n", family, method, knobs == NULL ? "" : knobs, (int)D, failures);
    free_paged(&data);
    return failures;
}

/* A call that was captured follows the table. */
static int check_graph(apa_context *context, const char *family, const char *method)
{
    int failures = 0;
    paged data;
    apa_cuda_options options;
    apa_cuda_plan plan;
    device_result got = {0};
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    make_paged(&data, 128);
    const apa_recipe recipe = on_device_recipe(method, NULL);
    apa_cuda_options_init(&options);
    apa_cuda_plan_init(&plan);
    options.family = family;
    fill_table(&data, 0, 0);
    got.rows = SEQUENCES * data.queries.Hq * data.queries.Sq;
    got.D = data.queries.D;
    const size_t out = (size_t)(got.rows * got.D) * sizeof(float), lse = (size_t)got.rows * sizeof(float);
    apa_problem problem = data.problem;
    problem.out =
        apa_tensor_hnd(on_device_copy(NULL, out), APA_DTYPE_F32, SEQUENCES, data.queries.Hq, data.queries.Sq, got.D);
    problem.lse =
        apa_tensor_hnd(on_device_copy(NULL, lse), APA_DTYPE_F32, SEQUENCES, data.queries.Hq, data.queries.Sq, 1);
    failures += expect(apa_cuda_attention_plan(context, &problem, &recipe, &options, &plan) == APA_STATUS_OK, "plan");
    apa_cuda_options own = options;
    own.workspace = on_device_copy(NULL, plan.workspace_bytes);
    own.workspace_bytes = plan.workspace_bytes;
    own.counts = on_device_copy(NULL, sizeof got.counts);
    on_device_expect(cudaStreamCreate(&stream), "stream");
    own.stream = stream;
    on_device_expect(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    failures += expect(apa_cuda_attention(context, &problem, &recipe, &own, NULL) == APA_STATUS_OK,
                       apa_context_message(context));
    on_device_expect(cudaStreamEndCapture(stream, &graph), "capture");
    on_device_expect(cudaGraphInstantiate(&executable, graph, 0), "graph");
    got.out = malloc(out);
    got.lse = malloc(lse);
    for (int replay = 0; replay < 3; replay++) {
        fill_table(&data, 5 * replay, 0);
        on_device_expect(cudaGraphLaunch(executable, stream), "graph");
        on_device_expect(cudaStreamSynchronize(stream), "graph");
        on_device_fetch(got.out, problem.out.data, out);
        on_device_fetch(got.lse, problem.lse.data, lse);
        on_device_fetch(got.counts, own.counts, sizeof got.counts);
        failures += compare_to_flat(context, &data, &recipe, &options, &got);
    }
    printf("pages in a graph whose table changes, %s, %s: %d failures\n", family, method, failures);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    cudaFree(problem.out.data);
    cudaFree(problem.lse.data);
    cudaFree(own.workspace);
    cudaFree(own.counts);
    device_result_free(&got);
    free_paged(&data);
    return failures;
}

/* ------------------------------------------------------------------------------- ragged batches */

/* Sequence `to` of packed rows `from` …, as a view. */
static apa_tensor view(const apa_tensor *packed, const int64_t *cu, int64_t b)
{
    apa_tensor tensor = *packed;
    tensor.data = (uint16_t *)packed->data + cu[b] * packed->stride[2];
    tensor.shape[2] = cu[b + 1] - cu[b];
    return tensor;
}

/* The same problem with tensors in host memory. */
static int ragged_on_host(apa_context *context, const on_device *data, const apa_problem *ragged,
                          const apa_recipe *recipe, const device_result *expected)
{
    const size_t n = (size_t)(expected->rows * expected->D);
    float *out = malloc(n * sizeof *out + 1), *lse = malloc((size_t)expected->rows * sizeof *lse + 1);
    apa_problem problem = *ragged;
    apa_attention_options options;
    problem.q.data = data->host[0].data;
    problem.k.data = data->host[1].data;
    problem.v.data = data->host[2].data;
    problem.out = apa_tensor_hnd(out, APA_DTYPE_F32, 1, data->Hq, data->Sq, data->D);
    problem.lse = apa_tensor_hnd(lse, APA_DTYPE_F32, 1, data->Hq, data->Sq, 1);
    apa_attention_options_init(&options);
    options.engine = expected->engine;
    int failures =
        expect(apa_attention(context, &problem, recipe, &options, NULL) == APA_STATUS_OK, apa_context_message(context));
    failures += expect(n > 0 && memcmp(out, expected->out, n * sizeof *out) == 0 &&
                           memcmp(lse, expected->lse, (size_t)expected->rows * sizeof *lse) == 0,
                       "the bits of host tensors");
    free(out);
    free(lse);
    return failures;
}

/* Packed sequences, some without queries or without keys, against a call of each. */
static int check_ragged(apa_context *context, const char *family, const char *method)
{
    static const int64_t cu_q[] = {0, 100, 100, 101, 400, 420}, cu_k[] = {0, 700, 710, 710, 2000, 2020};
    enum { BATCH = 5, NO_KEYS = 2 };
    int failures = 0;
    on_device data;
    device_result got;
    apa_cuda_options options;
    uint64_t sum[APA_CUDA_COUNT_NUMBER] = {0};
    on_device_make(&data, "topics", 1, 6, 2, 420, 2020, 128);
    const apa_recipe recipe = on_device_recipe(method, NULL);
    apa_problem problem = data.problem;
    problem.causal = 1;
    problem.cu_seqlens_q = cu_q;
    problem.cu_seqlens_k = cu_k;
    problem.batch = BATCH;
    apa_cuda_options_init(&options);
    options.family = family;
    failures += expect(on_device_run(context, &problem, &recipe, &options, &got), "run");
    for (int64_t b = 0; b < BATCH && got.out != NULL; b++) {
        device_result one;
        apa_problem own = data.problem;
        own.causal = 1;
        own.q = view(&data.problem.q, cu_q, b);
        own.k = view(&data.problem.k, cu_k, b);
        own.v = view(&data.problem.v, cu_k, b);
        failures += expect(on_device_run(context, &own, &recipe, &options, &one), "run of one sequence");
        const int64_t rows = own.q.shape[2], D = data.D;
        for (int64_t h = 0; h < data.Hq; h++) {
            const float *out = got.out + (h * data.Sq + cu_q[b]) * D, *lse = got.lse + h * data.Sq + cu_q[b];
            failures += expect(memcmp(out, one.out + h * rows * D, (size_t)(rows * D) * sizeof *out) == 0 &&
                                   memcmp(lse, one.lse + h * rows, (size_t)rows * sizeof *lse) == 0,
                               "the bits of the sequence alone");
            if (b == NO_KEYS)
                failures += expect(out[0] == 0.0f && isinf(lse[0]) && lse[0] < 0.0f, "no keys: 0 and -inf");
        }
        for (int i = 0; i < APA_CUDA_COUNT_NUMBER; i++)
            sum[i] += one.counts[i];
        device_result_free(&one);
    }
    failures += expect(memcmp(sum, got.counts, sizeof sum) == 0, "counts are those of all sequences");
    failures += ragged_on_host(context, &data, &problem, &recipe, &got);
    printf("ragged, %s, %s: %d failures\n", family, method, failures);
    device_result_free(&got);
    on_device_free(&data);
    return failures;
}

int apa_verify_device(apa_context *context, const char *engine)
{
    static const char *const methods[] = {"exact", "apa"};
    int failures = 0;
    for (const char *const *family = on_device_families(context, engine); *family != NULL; family++) {
        for (int i = 0; i < 2; i++) {
            failures += check_family(context, *family, methods[i]);
            failures += check_pages(context, *family, methods[i], NULL, 128);
            failures += check_pages(context, *family, methods[i], NULL, 64);
            failures += check_graph(context, *family, methods[i]);
            failures += check_ragged(context, *family, methods[i]);
        }
        failures += check_pages(context, *family, "exact", NULL, 256);
    }
    return failures;
}
