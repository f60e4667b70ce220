/* The CUDA engine against the reference engine, on a device: one command, one table, exit 0 when all holds.
 *
 * Every case runs the engine, then the reference engine with the recipe that the engine resolved, and looks at all
 * pairs: error      relative L2 and worst pair of the outputs, and the largest difference of the LSE verdicts   equal,
 * but for tiles whose share is within WINDOW of ε: those are hot at ε(1 - WINDOW) and cold at ε(1 + WINDOW) in the
 * reference engine; counted, and no others are allowed. Rounding moves a share by the step of one code of P in a sum
 * that is at least 255 (.4 %) and by the FP32 error of scores. repeats    five runs with the same bits Then: codes bit
 * for bit, values that are not finite, and the device-pointer interface inside a captured graph.
 *
 *   verify [quick]      quick: small shapes alone, for compute-sanitizer */
#include "apa/apa.h"
#include "apa/cuda.h"
#include "apa/eval.h"

#include "cli/cli.h"
#include "core/call.h"
#include "cuda/job.h"
#include "formats/formats.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WINDOW 0.01
#define REPEATS 5

static int failures;

void cli_progress(void *user, const char *phase, double fraction)
{
    (void)user;
    (void)phase;
    (void)fraction;
}

static void check(int holds, const char *what)
{
    if (holds)
        return;
    failures++;
    printf("  FAILED: %s\n", what);
}

typedef struct test_case {
    const char *kind, *method, *set;
    int64_t B, Hq, Hkv, Sq, Skv, D;
    int bf16, causal;
    int64_t q_offset, left, right;
    double scale, tolerance;
} test_case;

/* exact in 16 bits: P is rounded to 11 bits (f16), 8 bits (bf16) before the product */
#define F16 1e-3
#define BF16 6e-3
#define DEFAULT APA_Q_OFFSET_DEFAULT

static const test_case small_cases[] = {
    {"randn", "exact", NULL, 1, 2, 1, 100, 190, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 2, 3, 1, 33, 129, 128, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"randn", "exact", NULL, 1, 2, 2, 70, 200, 256, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "apa", NULL, 1, 2, 1, 100, 333, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "eps=0.02", 2, 3, 1, 50, 640, 128, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"randn", "cold", NULL, 1, 2, 2, 70, 200, 256, 1, 1, DEFAULT, -1, -1, NAN, BF16},
};

static const test_case cases[] = {
    /* exact: dims, types, masks, odd lengths, grouped heads, few rows, splits */
    {"randn", "exact", NULL, 1, 4, 4, 512, 1024, 64, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 1, 6, 2, 384, 1000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 2, 2, 2, 257, 777, 256, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 1, 4, 1, 256, 512, 128, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"outliers", "exact", NULL, 1, 6, 2, 300, 2000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"sink-tail", "exact", NULL, 1, 3, 1, 128, 8192, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 1, 4, 2, 500, 900, 128, 0, 1, 100, 300, -1, NAN, F16},
    {"randn", "exact", NULL, 1, 4, 2, 500, 900, 64, 0, 0, -200, 64, 64, NAN, F16},
    {"randn", "exact", NULL, 1, 24, 8, 1, 5000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 3, 8, 2, 7, 65, 64, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"randn", "exact", NULL, 1, 2, 1, 640, 640, 128, 0, 1, DEFAULT, -1, -1, -0.2, F16},
    {"randn", "exact", NULL, 1, 2, 1, 64, 640, 128, 0, 0, DEFAULT, -1, -1, 0.0, F16},
    {"randn", "exact", NULL, 1, 2, 1, 64, 640, 128, 0, 0, DEFAULT, -1, -1, 3.0, F16},
    {"randn", "exact", NULL, 1, 2, 2, 200, 100, 128, 0, 1, DEFAULT, -1, -1, NAN, F16}, /* rows that see nothing */
    /* adaptive */
    {"topics", "apa", NULL, 1, 6, 2, 512, 8192, 128, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", NULL, 1, 3, 1, 1024, 4096, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"sink-tail", "apa", NULL, 1, 3, 1, 256, 16384, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "apa", NULL, 1, 6, 2, 300, 3001, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "apa", NULL, 1, 4, 2, 512, 4096, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "apa", "eps=0.005", 1, 4, 2, 512, 4096, 128, 1, 1, DEFAULT, -1, -1, 0.2, BF16},
    {"topics", "apa", NULL, 2, 4, 2, 200, 2777, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", NULL, 1, 2, 2, 333, 2048, 256, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"topics", "apa", NULL, 1, 4, 2, 500, 3000, 128, 0, 1, 1500, 1100, -1, NAN, F16},
    {"topics", "apa", "hadamard=off", 1, 4, 2, 130, 3000, 128, 0, 0, 300, 400, 700, NAN, F16},
    {"topics", "apa", "smooth_k=off", 1, 4, 2, 130, 3000, 128, 0, 0, DEFAULT, -1, -1, -0.09, F16},
    {"topics", "apa", "early_tiles=8", 1, 2, 1, 1024, 1024, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", NULL, 2, 24, 8, 5, 3000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16}, /* packing rows */
    {"topics", "apa", NULL, 1, 12, 4, 40, 3000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "cold", NULL, 1, 4, 2, 512, 4096, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "cold", NULL, 1, 2, 1, 300, 3000, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "cold", NULL, 1, 2, 2, 200, 100, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", NULL, 1, 3, 1, 128, 32768, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "apa", NULL, 2, 2, 1, 64, 32768, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 50, 4, 4, 3, 70, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "force=high", 1, 4, 2, 256, 1000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
};

typedef struct run_data {
    cli_synthetic shape;
    apa_array q, k, v;
    apa_problem problem;
    int64_t pairs, tiles;
    float *out[2], *lse[2]; /* engine, reference */
    uint8_t *verdict[4];    /* engine, reference, reference at ε(1 - WINDOW), at ε(1 + WINDOW) */
} run_data;

static apa_tensor tensor_of(const apa_array *a)
{
    const apa_dtype dtype = a->type == APA_ARRAY_BF16 ? APA_DTYPE_BF16 : APA_DTYPE_F16;
    return apa_tensor_hnd(a->data, dtype, a->shape[0], a->shape[1], a->shape[2], a->shape[3]);
}

static int make_array(apa_array *a, int bf16, int64_t B, int64_t H, int64_t S, int64_t D)
{
    const int64_t shape[4] = {B, H, S, D};
    return apa_array_allocate(a, bf16 ? APA_ARRAY_BF16 : APA_ARRAY_F16, 4, shape) == APA_STATUS_OK;
}

static int prepare(const test_case *c, run_data *data)
{
    memset(data, 0, sizeof *data);
    const cli_synthetic shape = {c->kind, c->B, c->Hq, c->Hkv, c->Sq, c->Skv, c->D, c->D, 7};
    data->shape = shape;
    if (!make_array(&data->q, c->bf16, c->B, c->Hq, c->Sq, c->D) ||
        !make_array(&data->k, c->bf16, c->B, c->Hkv, c->Skv, c->D) ||
        !make_array(&data->v, c->bf16, c->B, c->Hkv, c->Skv, c->D) ||
        !cli_synthetic_fill(&shape, &data->q, &data->k, &data->v))
        return 0;
    data->pairs = c->B * c->Hq * c->Sq;
    data->tiles = (c->Skv + 63) / 64;
    for (int i = 0; i < 2; i++) {
        data->out[i] = malloc((size_t)(data->pairs * c->D) * sizeof(float));
        data->lse[i] = malloc((size_t)data->pairs * sizeof(float));
    }
    for (int i = 0; i < 4; i++)
        data->verdict[i] = malloc((size_t)(data->pairs * data->tiles));
    apa_problem_init(&data->problem);
    data->problem.q = tensor_of(&data->q);
    data->problem.k = tensor_of(&data->k);
    data->problem.v = tensor_of(&data->v);
    data->problem.softmax_scale = c->scale;
    data->problem.causal = c->causal;
    data->problem.q_offset = c->q_offset;
    data->problem.window_left = c->left;
    data->problem.window_right = c->right;
    return 1;
}

static void give_back(run_data *data)
{
    apa_array_free(&data->q);
    apa_array_free(&data->k);
    apa_array_free(&data->v);
    for (int i = 0; i < 2; i++) {
        free(data->out[i]);
        free(data->lse[i]);
    }
    for (int i = 0; i < 4; i++)
        free(data->verdict[i]);
}

static apa_status run(apa_context *context, const run_data *data, const char *engine, const apa_recipe *recipe,
                      float *out, float *lse, uint8_t *verdict, apa_statistics *statistics)
{
    apa_problem problem = data->problem;
    const cli_synthetic *s = &data->shape;
    problem.out = apa_tensor_hnd(out, APA_DTYPE_F32, s->B, s->Hq, s->Sq, s->D);
    problem.lse = apa_tensor_hnd(lse, APA_DTYPE_F32, s->B, s->Hq, s->Sq, 1);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = engine;
    options.verdicts = verdict;
    apa_statistics_init(statistics);
    const apa_status status = apa_attention(context, &problem, recipe, &options, statistics);
    if (status != APA_STATUS_OK)
        printf("  %s: %s\n", engine, apa_context_message(context));
    return status;
}

static void compare_verdicts(apa_context *context, run_data *data, const apa_recipe *recipe, int64_t *differ,
                             int64_t *wrong)
{
    const size_t n = (size_t)(data->pairs * data->tiles);
    *differ = *wrong = 0;
    for (size_t i = 0; i < n; i++)
        *differ += data->verdict[0][i] != data->verdict[1][i];
    if (*differ == 0)
        return;
    float *out = malloc((size_t)(data->pairs * data->shape.D) * sizeof *out),
          *lse = malloc((size_t)data->pairs * sizeof *lse);
    for (int i = 0; i < 2; i++) {
        apa_recipe moved = *recipe;
        apa_statistics statistics;
        moved.eps *= i == 0 ? 1 - WINDOW : 1 + WINDOW;
        run(context, data, "reference", &moved, out, lse, data->verdict[2 + i], &statistics);
    }
    for (size_t i = 0; i < n; i++)
        if (data->verdict[0][i] != data->verdict[1][i])
            *wrong += !(data->verdict[2][i] == APA_VERDICT_HOT && data->verdict[3][i] == APA_VERDICT_COLD);
    free(out);
    free(lse);
}

static void run_case(apa_context *context, const test_case *c)
{
    run_data data;
    apa_recipe recipe;
    apa_statistics statistics, reference;
    char text[256];
    snprintf(text, sizeof text, "%s %s %s B%d %d/%d %dx%d D%d %s%s", c->kind, c->method, c->set == NULL ? "" : c->set,
             (int)c->B, (int)c->Hq, (int)c->Hkv, (int)c->Sq, (int)c->Skv, (int)c->D, c->bf16 ? "bf16" : "f16",
             c->causal ? " causal" : "");
    if (!prepare(c, &data)) {
        check(0, "no memory");
        return;
    }
    apa_recipe_init(&recipe, c->method);
    if (c->set != NULL) {
        char knob[64];
        snprintf(knob, sizeof knob, "%s", c->set);
        char *value = strchr(knob, '=');
        *value++ = '\0';
        check(apa_recipe_set(&recipe, knob, value, NULL, 0) == APA_STATUS_OK, "knob");
    }
    memset(data.out[0], 0xff, (size_t)(data.pairs * c->D) * sizeof(float));
    if (run(context, &data, "cuda", &recipe, data.out[0], data.lse[0], data.verdict[0], &statistics) == APA_STATUS_OK &&
        run(context, &data, "reference", &statistics.recipe, data.out[1], data.lse[1], data.verdict[1], &reference) ==
            APA_STATUS_OK) {
        apa_error error;
        const apa_tensor o[2] = {apa_tensor_hnd(data.out[0], APA_DTYPE_F32, c->B, c->Hq, c->Sq, c->D),
                                 apa_tensor_hnd(data.out[1], APA_DTYPE_F32, c->B, c->Hq, c->Sq, c->D)};
        const apa_tensor l[2] = {apa_tensor_hnd(data.lse[0], APA_DTYPE_F32, c->B, c->Hq, c->Sq, 1),
                                 apa_tensor_hnd(data.lse[1], APA_DTYPE_F32, c->B, c->Hq, c->Sq, 1)};
        int64_t differ, wrong, uneven = 0;
        compare_verdicts(context, &data, &statistics.recipe, &differ, &wrong);
        check(apa_error_measure(context, &o[0], &l[0], &o[1], &l[1], &error) == APA_STATUS_OK, "measure");
        float *again = malloc((size_t)(data.pairs * c->D) * sizeof *again),
              *lse = malloc((size_t)data.pairs * sizeof *lse);
        for (int i = 1; i < REPEATS; i++) {
            apa_statistics other;
            run(context, &data, "cuda", &recipe, again, lse, NULL, &other);
            uneven += memcmp(again, data.out[0], (size_t)(data.pairs * c->D) * sizeof *again) != 0 ||
                      memcmp(lse, data.lse[0], (size_t)data.pairs * sizeof *lse) != 0 || other.hot != statistics.hot;
        }
        free(again);
        free(lse);
        printf("%-64s l2 %.1e worst %.1e lse %.1e hot %5.1f%% (%.1f%%) verdicts %lld/%lld\n", text, error.rel_l2,
               error.rel_l2_max, error.lse_max_abs, 100 * statistics.hot_share,
               statistics.visible == 0 ? 0.0 : 100.0 * (double)statistics.candidates / (double)statistics.visible,
               (long long)differ, (long long)wrong);
        check(error.rel_l2 <= c->tolerance, "relative L2");
        check(error.rel_l2_max <= 20 * c->tolerance, "worst pair");
        check(error.lse_max_abs <= 2e-3, "LSE");
        check(wrong == 0, "verdicts away from the threshold");
        check(statistics.visible == reference.visible, "visible pairs");
        check(differ > 0 || statistics.hot == reference.hot, "hot pairs");
        check(uneven == 0, "repeats");
    } else {
        printf("%s\n", text);
        check(0, "run");
    }
    fflush(stdout);
    give_back(&data);
}

/* ------------------------------------------------------------------------------- codes */

/* Blob and mean of the device against the stated order on the host. */
static void check_codes(int64_t D, int bf16)
{
    const test_case c = {"outliers", "apa", NULL, 1, 2, 2, 64, 1000, D, bf16, 0, DEFAULT, -1, -1, NAN, 0};
    run_data data;
    if (!prepare(&c, &data)) {
        check(0, "no memory");
        return;
    }
    const int64_t tiles = data.tiles, blob_bytes = apa_cuda_blob_bytes(D), rows = c.Hkv * c.Skv;
    uint8_t *blob = malloc((size_t)(c.Hkv * tiles * blob_bytes));
    float *mean = malloc((size_t)(c.Hkv * D) * sizeof *mean), *k = malloc((size_t)(rows * D) * sizeof *k),
          *v = malloc((size_t)(rows * D) * sizeof *v);
    apa_cuda_job job;
    memset(&job, 0, sizeof job);
    job.B = 1;
    job.Hkv = (int32_t)c.Hkv;
    job.Skv = (int32_t)c.Skv;
    job.D = (int32_t)D;
    job.tiles = (int32_t)tiles;
    job.bf16 = bf16;
    job.smooth = job.hadamard = 1;
    void *device[8] = {0};
    const size_t sizes[8] = {(size_t)(rows * D * 2),
                             (size_t)(rows * D * 2),
                             (size_t)(c.Hkv * tiles * blob_bytes),
                             (size_t)(c.Hkv * D) * 4,
                             (size_t)(c.Hkv * tiles * (D + 1)) * 8,
                             (size_t)(c.Hkv * tiles),
                             64,
                             (size_t)(c.Hkv * D) * 8};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 8 && error == cudaSuccess; i++)
        error = cudaMalloc(&device[i], sizes[i]);
    if (error == cudaSuccess)
        error = cudaMemcpy(device[0], data.k.data, sizes[0], cudaMemcpyHostToDevice);
    if (error == cudaSuccess)
        error = cudaMemcpy(device[1], data.v.data, sizes[1], cudaMemcpyHostToDevice);
    const apa_cuda_tensor kt = {device[0], {rows * D, c.Skv * D, D}, 0}, vt = {device[1], {rows * D, c.Skv * D, D}, 0};
    job.k = kt;
    job.v = vt;
    job.blob = device[2];
    job.k_mean = device[3];
    job.tile_sum = device[4];
    job.poisoned = device[5];
    job.k_scale_max = device[6];
    job.mean_sum = device[7];
    if (error == cudaSuccess)
        error = (cudaError_t)apa_cuda_launch_prep_keys(&job, NULL);
    if (error == cudaSuccess)
        error = cudaMemcpy(blob, device[2], sizes[2], cudaMemcpyDeviceToHost);
    if (error == cudaSuccess)
        error = cudaMemcpy(mean, device[3], sizes[3], cudaMemcpyDeviceToHost);
    check(error == cudaSuccess, "prep on the device");
    const apa_format format = bf16 ? APA_FORMAT_BF16 : APA_FORMAT_F16;
    for (int64_t i = 0; i < rows * D; i++) {
        k[i] = (float)apa_format_decode(format, ((const uint16_t *)data.k.data)[i]);
        v[i] = (float)apa_format_decode(format, ((const uint16_t *)data.v.data)[i]);
    }
    int64_t bad_mean = 0, bad_k = 0, bad_v = 0;
    for (int64_t h = 0; h < c.Hkv; h++) {
        float m[256];
        for (int64_t d = 0; d < D; d++) {
            double total = 0;
            for (int64_t t = 0; t < tiles; t++) {
                double sum = 0;
                for (int64_t j = t * 64; j < (t + 1) * 64 && j < c.Skv; j++)
                    sum += (double)k[(h * c.Skv + j) * D + d];
                total += sum;
            }
            m[d] = (float)(total / (double)c.Skv);
            bad_mean += memcmp(&m[d], &mean[h * D + d], 4) != 0;
        }
        for (int64_t j = 0; j < tiles * 64; j++) {
            const uint8_t *at = blob + (h * tiles + j / 64) * blob_bytes;
            const int64_t key = j % 64;
            float x[256] = {0}, scale;
            int8_t code[256];
            for (int64_t d = 0; d < D && j < c.Skv; d++)
                x[d] = k[(h * c.Skv + j) * D + d] - m[d];
            for (int64_t step = 1; step < D; step *= 2)
                for (int64_t i = 0; i < D; i += 2 * step)
                    for (int64_t u = i; u < i + step; u++) {
                        const float a = x[u], b = x[u + step];
                        x[u] = a + b;
                        x[u + step] = a - b;
                    }
            for (int64_t d = 0; d < D; d++)
                x[d] *= (float)(1.0 / sqrt((double)D));
            scale = apa_int8_quantise(x, (size_t)D, code);
            for (int64_t d = 0; d < D; d++) {
                const int64_t lane = key % 8 * 4 + d % 16 / 4;
                const int64_t offset =
                    ((d / 32 * 4 + key / 16) * 32 + lane) * 16 + key / 8 % 2 * 8 + d % 32 / 16 * 4 + d % 4;
                bad_k += (int8_t)at[offset] != code[d];
            }
            float stored;
            memcpy(&stored, at + 128 * D + (key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2) * 4, 4);
            bad_k += memcmp(&stored, &scale, 4) != 0;
        }
        for (int64_t t = 0; t < tiles; t++)
            for (int64_t d = 0; d < D; d++) {
                const uint8_t *at = blob + (h * tiles + t) * blob_bytes;
                float x[64] = {0}, scale, stored;
                int8_t code[64];
                for (int64_t j = 0; j < 64 && t * 64 + j < c.Skv; j++)
                    x[j] = v[(h * c.Skv + t * 64 + j) * D + d];
                scale = apa_int8_quantise(x, 64, code);
                for (int64_t lane = 0; lane < 4; lane++)
                    for (int64_t i = 0; i < 16; i++) {
                        const int64_t key = i / 8 * 32 + i / 4 % 2 * 16 + i % 4 / 2 * 8 + lane * 2 + i % 2;
                        bad_v += (int8_t)at[64 * D + (d * 4 + lane) * 16 + i] != code[key];
                    }
                memcpy(&stored, at + 128 * D + 256 + (d / 16 * 16 + d % 8 / 2 * 4 + d / 8 % 2 * 2 + d % 2) * 4, 4);
                bad_v += memcmp(&stored, &scale, 4) != 0;
            }
    }
    printf("codes D%d %s: %lld of K's mean, %lld of K, %lld of V differ\n", (int)D, bf16 ? "bf16" : "f16",
           (long long)bad_mean, (long long)bad_k, (long long)bad_v);
    check(bad_mean == 0 && bad_k == 0 && bad_v == 0, "codes");
    for (int i = 0; i < 8; i++)
        cudaFree(device[i]);
    free(blob);
    free(mean);
    free(k);
    free(v);
    give_back(&data);
}

/* ------------------------------------------------------------------------------- values that are not finite */

/* NaN in K and in V of a key: rows that see it are NaN (all of them, or some channels), the others have the bits of the
 * run without it (exact) or are finite (adaptive). */
static void check_not_finite(apa_context *context, const char *method)
{
    const test_case c = {"randn", method, NULL, 1, 2, 1, 200, 500, 128, 0, 1, DEFAULT, -1, -1, NAN, 0};
    const int64_t poisoned = 390, D = 128;
    run_data data;
    apa_recipe recipe;
    apa_statistics statistics;
    if (!prepare(&c, &data)) {
        check(0, "no memory");
        return;
    }
    apa_recipe_init(&recipe, method);
    for (int which = 0; which < 2; which++) {
        uint16_t *x = (uint16_t *)(which == 0 ? data.k.data : data.v.data) + poisoned * D + 5, kept = *x;
        run(context, &data, "cuda", &recipe, data.out[1], data.lse[1], NULL, &statistics);
        *x = 0x7e00;
        run(context, &data, "cuda", &recipe, data.out[0], data.lse[0], NULL, &statistics);
        *x = kept;
        int64_t wrong = 0;
        for (int64_t h = 0; h < c.Hq; h++)
            for (int64_t i = 0; i < c.Sq; i++) {
                const int sees = i + c.Skv - c.Sq >= poisoned;
                const float *row = data.out[0] + (h * c.Sq + i) * D;
                for (int64_t d = 0; d < D; d++) {
                    const int nan_due = sees && (which == 0 || d == 5);
                    wrong += nan_due ? !isnan(row[d]) : !isfinite(row[d]);
                }
                if (!sees && strcmp(method, "exact") == 0)
                    wrong += memcmp(row, data.out[1] + (h * c.Sq + i) * D, (size_t)D * sizeof *row) != 0;
            }
        printf("NaN in %s of a key, %s: %lld wrong\n", which == 0 ? "K" : "V", method, (long long)wrong);
        check(wrong == 0, "not finite");
    }
    give_back(&data);
}

/* ------------------------------------------------------------------------------- device pointers */

/* A call captured into a graph and replayed gives the bits of the host-tensor call. */
static void check_graph(apa_context *context, const char *method)
{
    const test_case c = {"topics", method, NULL, 1, 6, 2, 300, 2000, 128, 0, 1, DEFAULT, -1, -1, NAN, 0};
    run_data data;
    apa_recipe recipe, resolved;
    apa_statistics statistics;
    if (!prepare(&c, &data)) {
        check(0, "no memory");
        return;
    }
    apa_recipe_init(&recipe, method);
    run(context, &data, "cuda:warp", &recipe, data.out[1], data.lse[1], NULL, &statistics);
    const size_t q = (size_t)(c.Hq * c.Sq * c.D), kv = (size_t)(c.Hkv * c.Skv * c.D), rows = (size_t)(c.Hq * c.Sq);
    void *device[6] = {0};
    size_t bytes = 0;
    apa_problem problem = data.problem;
    problem.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, c.Hq, c.Sq, c.D);
    problem.lse = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, c.Hq, c.Sq, 1);
    check(apa_cuda_workspace_bytes(context, &problem, &recipe, &bytes) == APA_STATUS_OK, "workspace size");
    const size_t sizes[6] = {q * 2, kv * 2, kv * 2, q * 4, rows * 4, bytes > 0 ? bytes : 256};
    const void *from[3] = {data.q.data, data.k.data, data.v.data};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 6 && error == cudaSuccess; i++)
        error = cudaMalloc(&device[i], sizes[i]);
    for (int i = 0; i < 3 && error == cudaSuccess; i++)
        error = cudaMemcpy(device[i], from[i], sizes[i], cudaMemcpyHostToDevice);
    problem.q.data = device[0];
    problem.k.data = device[1];
    problem.v.data = device[2];
    problem.out.data = device[3];
    problem.lse.data = device[4];
    apa_cuda_options options;
    apa_cuda_options_init(&options);
    cudaStream_t stream = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    if (error == cudaSuccess)
        error = cudaStreamCreate(&stream);
    options.stream = stream;
    options.workspace = device[5];
    options.workspace_bytes = sizes[5];
    if (error == cudaSuccess)
        error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    const apa_status status = apa_cuda_attention(context, &problem, &recipe, &options, &resolved);
    check(status == APA_STATUS_OK, apa_context_message(context));
    if (error == cudaSuccess)
        error = cudaStreamEndCapture(stream, &graph);
    if (error == cudaSuccess)
        error = cudaGraphInstantiate(&executable, graph, 0);
    for (int i = 0; i < 2 && error == cudaSuccess; i++) {
        error = cudaMemset(device[3], 0xff, sizes[3]);
        if (error == cudaSuccess)
            error = cudaGraphLaunch(executable, stream);
        if (error == cudaSuccess)
            error = cudaStreamSynchronize(stream);
        if (error == cudaSuccess)
            error = cudaMemcpy(data.out[0], device[3], sizes[3], cudaMemcpyDeviceToHost);
        check(error == cudaSuccess && memcmp(data.out[0], data.out[1], sizes[3]) == 0, "graph replay gives other bits");
    }
    printf("graph, %s: %s\n", method, cudaGetErrorString(error));
    check(error == cudaSuccess, "graph");
    for (int i = 0; i < 6; i++)
        cudaFree(device[i]);
    give_back(&data);
}

int main(int argc, char **argv)
{
    const int quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    apa_context *context;
    if (apa_context_create(&context, NULL) != APA_STATUS_OK)
        return 1;
    int32_t devices;
    if (apa_cuda_device_count(context, &devices) != APA_STATUS_OK) {
        printf("%s\n", apa_context_message(context));
        return 1;
    }
    for (int64_t D = 64; D <= 256; D *= 2)
        for (int bf16 = 0; bf16 < 2; bf16++)
            check_codes(D, bf16);
    check_not_finite(context, "exact");
    check_not_finite(context, "apa");
    check_graph(context, "exact");
    check_graph(context, "apa");
    for (size_t i = 0; i < sizeof small_cases / sizeof small_cases[0]; i++)
        run_case(context, &small_cases[i]);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0] && !quick; i++)
        run_case(context, &cases[i]);
    apa_context_destroy(context);
    printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
