/* Bounded copies of cuda_verify: with prepared tiles of a few windows of the keys (cuda:warp) or of a few KV heads
 * (cuda:wgmma) at a time a call gives the bits of the call that holds them all: out, LSE and counts, and by heads
 * verdicts. */
#include "tests/cuda/verify.h"

#include "tests/cuda/on_device.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct window_case {
    const char *kind, *method, *knobs;
    int64_t Hq, Hkv, Sq, Skv, D;
    int causal;
    int64_t left;
} window_case;

static const window_case cases[] = {
    {"topics", "apa", NULL, 6, 2, 512, 4096, 128, 0, -1},
    {"outliers", "apa", "eps=0.01", 6, 2, 300, 3001, 128, 1, -1},
    {"topics", "apa", NULL, 24, 8, 2048, 2048, 64, 1, -1}, /* units enough: the walk is not cut otherwise */
    {"sink-tail", "apa", "qk_scale_granularity=row", 3, 1, 100, 3000, 256, 1, -1},
    {"topics", "apa", "pv_format=e4m3", 4, 2, 500, 3000, 64, 1, 1100},
    {"topics", "apa", "cold_format=e4m3", 3, 1, 130, 5000, 128, 1, -1},
    {"topics", "apa", "second_look=off eps=0.05", 4, 2, 256, 3000, 128, 1, -1},
    {"topics", "apa", "smooth_k=off", 24, 8, 5, 3000, 128, 1, -1}, /* packing rows */
    {"randn", "cold", NULL, 4, 2, 512, 4096, 128, 1, -1},
};

static int check_case(apa_context *context, const window_case *c)
{
    on_device data;
    on_device_make(&data, c->kind, 1, c->Hq, c->Hkv, c->Sq, c->Skv, c->D);
    const apa_recipe recipe = on_device_recipe(c->method, c->knobs);
    apa_problem problem = data.problem;
    problem.causal = c->causal;
    problem.window_left = c->left;
    apa_cuda_options options;
    device_result whole;
    apa_cuda_options_init(&options);
    options.family = "warp";
    int failures = !on_device_run(context, &problem, &recipe, &options, &whole);
    /* windows of one tile (blobs are under 140·D bytes a tile), of a few, of half, of most */
    const int64_t tiles = (c->Skv + 63) / 64, held[] = {2, 9, tiles / 2, tiles * 3 / 4};
    for (size_t i = 0; i < sizeof held / sizeof *held && failures == 0; i++) {
        device_result got;
        options.copy_bytes = (size_t)(held[i] * c->Hkv * 140 * c->D);
        const int same = on_device_run(context, &problem, &recipe, &options, &got) && device_result_same(&got, &whole);
        if (!same)
            printf("  FAILED: %d tiles at a time: other bits\n", (int)held[i]);
        failures += !same;
        device_result_free(&got);
    }
    device_result_free(&whole);
    on_device_free(&data);
    printf("bounded copy, %s %s %s D %d: %d failures\n", c->kind, c->method, c->knobs == NULL ? "" : c->knobs,
           (int)c->D, failures);
    return failures;
}

typedef struct heads_case {
    const char *kind, *method, *knobs;
    int64_t B, Hq, Hkv, Sq, Skv, D;
    int causal;
} heads_case;

static const heads_case by_heads[] = {
    {"topics", "apa", NULL, 1, 12, 4, 100, 3000, 128, 0},     /* keys split among blocks */
    {"topics", "apa", NULL, 2, 24, 8, 2048, 2048, 128, 1},    /* both passes in one block */
    {"sink-tail", "apa", NULL, 3, 32, 32, 1024, 1500, 64, 1}, /* wide blocks */
    {"outliers", "apa", "smooth_q=off", 3, 4, 2, 5, 3001, 128, 1}, {"randn", "cold", NULL, 1, 8, 8, 300, 900, 128, 0},
};

/* Verdicts of a call's rows, from the device. */
static uint8_t *fetched(void *map, size_t bytes)
{
    uint8_t *host = malloc(bytes);
    on_device_expect(host == NULL ? cudaErrorMemoryAllocation : cudaSuccess, "verdicts");
    on_device_fetch(host, map, bytes);
    on_device_expect((int)cudaFree(map), "verdicts");
    return host;
}

static int check_heads(apa_context *context, const heads_case *c)
{
    on_device data;
    on_device_make(&data, c->kind, c->B, c->Hq, c->Hkv, c->Sq, c->Skv, c->D);
    const apa_recipe recipe = on_device_recipe(c->method, c->knobs);
    const int64_t tiles = (c->Skv + 63) / 64, heads = c->B * c->Hkv;
    /* of a pair of tiles; biases where smooth_q is on, at D 128 */
    const int64_t a_pair = c->D == 64 ? 24 * 1024 + 64 : 32 * 1024 + 64 + (c->knobs == NULL ? 4096 : 0),
                  a_head = (tiles + 1) / 2 * a_pair;
    const size_t bytes = (size_t)(c->B * c->Hq * c->Sq * tiles);
    const int64_t held[] = {1, 2, c->Hkv - 1, c->Hkv + 1, heads - 1}; /* as many as there are: the whole again */
    apa_problem problem = data.problem;
    problem.causal = c->causal;
    apa_cuda_options options;
    device_result whole;
    apa_cuda_options_init(&options);
    options.family = "wgmma";
    options.verdicts = on_device_copy(NULL, bytes);
    int failures = !on_device_run(context, &problem, &recipe, &options, &whole);
    uint8_t *expected = fetched(options.verdicts, bytes);
    for (size_t i = 0; i < sizeof held / sizeof *held && failures == 0; i++) {
        device_result got;
        if (i > 0 && (held[i] >= heads || held[i] <= held[i - 1]))
            continue;
        options.copy_bytes = (size_t)(held[i] * a_head);
        options.verdicts = on_device_copy(NULL, bytes);
        const int same = on_device_run(context, &problem, &recipe, &options, &got) && device_result_same(&got, &whole);
        uint8_t *map = fetched(options.verdicts, bytes);
        if (!same || memcmp(map, expected, bytes) != 0) {
            printf("  FAILED: %d KV heads at a time: other %s\n", (int)held[i], same ? "verdicts" : "bits");
            failures++;
        }
        free(map);
        device_result_free(&got);
    }
    free(expected);
    device_result_free(&whole);
    on_device_free(&data);
    printf("copy by heads, %s %s %s B %d D %d: %d failures\n", c->kind, c->method, c->knobs == NULL ? "" : c->knobs,
           (int)c->B, (int)c->D, failures);
    return failures;
}

static int verify_heads(apa_context *context, int quick)
{
    int failures = 0;
    for (size_t i = 0; i < sizeof by_heads / sizeof *by_heads; i++)
        if (!quick || by_heads[i].Hq * by_heads[i].Sq <= 1200)
            failures += check_heads(context, &by_heads[i]);
    return failures;
}

static int verify_windows(apa_context *context, int quick)
{
    int failures = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!quick || cases[i].Hq * cases[i].Sq <= 300)
            failures += check_case(context, &cases[i]);
    return failures;
}

int apa_verify_windowed(apa_context *context, const char *engine, int quick)
{
    int failures = 0;
    for (const char *const *family = on_device_families(context, engine); *family != NULL; family++)
        failures += strcmp(*family, "wgmma") == 0 ? verify_heads(context, quick) : verify_windows(context, quick);
    return failures;
}
