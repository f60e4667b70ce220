/* Prep on the device against the written definitions of the codes (src/formats/formats.h), bit for bit: the mean of K,
 * codes and scales of K, V and Q, in the places that the tile layouts say (src/cuda/warp_mma/tile_8.cuh,
 * tile_nvfp4.cuh). */
#include "apa/apa.h"

#include "cli/cli.h"
#include "core/call.h"
#include "cuda/enqueue.h"
#include "cuda/job.h"
#include "tests/cuda/verify.h"
#include "formats/formats.h"
#include "recipe/defaults.h"

#include <cuda_runtime_api.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 2, KEYS = 1000, QUERIES = 200, TILE = 64, SEED = 7 };

typedef struct sides {
    int32_t trait;
    int64_t D, tiles;
    float *q, *k, *v; /* prepared: q and k rotated, k minus its mean */
    float mean[HEADS][256];
    uint8_t *blob, *codes; /* from the device */
    float *q_scale, *v_scale, *k_mean;
    int64_t bad_mean, bad_k, bad_v, bad_q;
} sides;

static bool is_e4m3(int32_t trait, bool values)
{
    return trait == APA_CUDA_E4M3 || (values && trait == APA_CUDA_INT8_E4M3);
}

static void hadamard(float *x, int64_t D)
{
    for (int64_t step = 1; step < D; step *= 2)
        for (int64_t i = 0; i < D; i += 2 * step)
            for (int64_t u = i; u < i + step; u++) {
                const float a = x[u], b = x[u + step];
                x[u] = a + b;
                x[u + step] = a - b;
            }
    for (int64_t d = 0; d < D; d++)
        x[d] *= (float)(1.0 / sqrt((double)D));
}

static float amax_of(const float *x, int64_t n, int64_t stride)
{
    float amax = 0;
    for (int64_t i = 0; i < n; i++)
        amax = fabsf(x[i * stride]) > amax ? fabsf(x[i * stride]) : amax;
    return amax;
}

/* Code of a value whose group's largest is amax, 8 bits; and the group's scale. */
static uint8_t code_8(bool e4m3, float x, float amax, float *scale)
{
    if (e4m3) {
        const float wanted = amax / 448.0f;
        *scale = wanted < FLT_MIN ? FLT_MIN : wanted;
        return (uint8_t)apa_format_encode(APA_FORMAT_E4M3, (double)(x / *scale));
    }
    const float pair[2] = {x, amax};
    int8_t code[2];
    *scale = apa_int8_quantise(pair, 2, code);
    return (uint8_t)code[0];
}

/* ---- 8 bits ---- */

static void check_k_8(sides *s, int64_t h, int64_t t, const uint8_t *blob)
{
    const int64_t D = s->D;
    const bool fine = s->trait == APA_CUDA_INT8_FINE;
    const float *k = s->k + (h * KEYS + t * TILE) * D;
    const int64_t n = KEYS - t * TILE < TILE ? KEYS - t * TILE : TILE;
    float shared[4] = {0};
    for (int64_t key = 0; key < n; key++) {
        const float own = amax_of(k + key * D, D, 1);
        shared[key % 8 / 2] = own > shared[key % 8 / 2] ? own : shared[key % 8 / 2];
    }
    for (int64_t key = 0; key < n; key++) {
        const float amax = fine ? amax_of(k + key * D, D, 1) : shared[key % 8 / 2];
        float scale = 0, stored;
        for (int64_t d = 0; d < D; d++) {
            const int64_t lane = key % 8 * 4 + d % 16 / 4;
            const int64_t at = ((d / 32 * 4 + key / 16) * 32 + lane) * 16 + key / 8 % 2 * 8 + d % 32 / 16 * 4 + d % 4;
            s->bad_k += blob[at] != code_8(is_e4m3(s->trait, false), k[key * D + d], amax, &scale);
        }
        const int64_t place = fine ? key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2 : key % 8 / 2;
        memcpy(&stored, blob + 128 * D + place * 4, 4);
        s->bad_k += memcmp(&stored, &scale, 4) != 0;
    }
}

static void check_v_8(sides *s, int64_t h, int64_t t, const uint8_t *blob)
{
    const int64_t D = s->D, n = KEYS - t * TILE < TILE ? KEYS - t * TILE : TILE;
    const bool fine = s->trait == APA_CUDA_INT8_FINE;
    for (int64_t d = 0; d < D; d++) {
        const float *v = s->v + (h * KEYS + t * TILE) * D + d;
        const float amax = fine ? amax_of(v, n, D) : amax_of(s->v + h * KEYS * D + d, KEYS, D);
        float scale = 0, stored;
        for (int64_t lane = 0; lane < 4; lane++)
            for (int64_t i = 0; i < 16; i++) {
                const int64_t key = i / 8 * 32 + i / 4 % 2 * 16 + i % 4 / 2 * 8 + lane * 2 + i % 2;
                const float x = key < n ? v[key * D] : 0.0f;
                s->bad_v += blob[64 * D + (d * 4 + lane) * 16 + i] != code_8(is_e4m3(s->trait, true), x, amax, &scale);
            }
        if (fine)
            memcpy(&stored, blob + 128 * D + 256 + (d / 16 * 16 + d % 8 / 2 * 4 + d / 8 % 2 * 2 + d % 2) * 4, 4);
        else
            stored = s->v_scale[h * D + d];
        s->bad_v += memcmp(&stored, &scale, 4) != 0;
    }
}

/* Row r of the unit of head h: position r, one query head a KV head. */
static void check_q_8(sides *s, int64_t h, int64_t r, const uint8_t *codes, float q_scale, double c)
{
    const int64_t D = s->D;
    const float *q = s->q + h * QUERIES * D;
    float amax = 0, scale = 0;
    for (int64_t i = r / 32 * 32; i < r / 32 * 32 + 32 && i < QUERIES; i++)
        if (s->trait == APA_CUDA_INT8_FINE ? i == r : i % 8 == r % 8) {
            const float own = amax_of(q + i * D, D, 1);
            amax = own > amax ? own : amax;
        }
    for (int64_t d = 0; d < D; d++) {
        const int64_t at =
            r / 16 * 16 * D + (d / 32 * 32 + r % 8 * 4 + d % 16 / 4) * 16 + (d % 32 / 16 * 2 + r % 16 / 8) * 4 + d % 4;
        s->bad_q += codes[at] != code_8(is_e4m3(s->trait, false), q[r * D + d], amax, &scale);
    }
    const float wanted = (float)((double)scale * c);
    s->bad_q += memcmp(&wanted, &q_scale, 4) != 0;
}

/* ---- NVFP4 ---- */

static float head_scale(const float *x, int64_t n)
{
    const double need = 4.0 * (double)amax_of(x, n, 1) / 2688.0;
    int exponent;
    const double fraction = frexp(need, &exponent);
    return (float)ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

static int nibble(const uint8_t *bytes, int64_t at)
{
    return bytes[at / 2] >> (at % 2 * 4) & 15;
}

/* Elements k = 16·block + i of a depth step, of column g of block n, as word half and nibble of lane 4g + t. */
static int64_t nvfp4_place(int64_t n, int64_t g, int64_t block, int64_t i)
{
    const int64_t t = block % 2 * 2 + i / 8;
    return (n / 2 * 512 + (4 * g + t) * 16 + n % 2 * 8 + block / 2 * 4) * 2 + i % 8;
}

static void check_k_nvfp4(sides *s, int64_t h, int64_t t, const uint8_t *blob)
{
    const int64_t D = s->D;
    const float scale = head_scale(s->k + h * KEYS * D, KEYS * D);
    for (int64_t n = 0; n < 8; n++)
        for (int64_t g = 0; g < 8; g++) {
            /* column g = 2·(lane of the quad) + i */
            const int64_t key = 16 * (2 * (n / 4) + g / 4) + 8 * (g / 2 % 2) + 2 * (n % 4) + g % 2, j = t * TILE + key;
            for (int64_t d16 = 0; d16 < D / 16 && j < KEYS; d16++) {
                float value[16];
                uint8_t code[16];
                for (int64_t i = 0; i < 16; i++)
                    value[i] = s->k[(h * KEYS + j) * D + d16 * 16 + i] / scale;
                const uint8_t block = apa_nvfp4_block(value, 16, true, code, NULL);
                for (int64_t i = 0; i < 16; i++)
                    s->bad_k += nibble(blob, d16 / 4 * 4096 + nvfp4_place(n, g, d16 % 4, i)) != code[i];
                s->bad_k += blob[64 * D + d16 / 4 * 256 + (4 * g + n % 4) * 8 + n / 4 * 4 + d16 % 4] != block;
            }
        }
}

static void check_v_nvfp4(sides *s, int64_t h, int64_t t, const uint8_t *blob)
{
    const int64_t D = s->D;
    const float scale = head_scale(s->v + h * KEYS * D, KEYS * D);
    for (int64_t c = 0; c < D; c++)
        for (int64_t group = 0; group < 4; group++) {
            float value[16] = {0};
            uint8_t code[16];
            for (int64_t i = 0; i < 16 && t * TILE + group * 16 + i < KEYS; i++)
                value[i] = s->v[(h * KEYS + t * TILE + group * 16 + i) * D + c] / scale;
            const uint8_t block = apa_nvfp4_block(value, 16, true, code, NULL);
            const int64_t n = c / 8, g = c % 8;
            for (int64_t i = 0; i < 16; i++)
                s->bad_v += nibble(blob + 32 * D, nvfp4_place(n, g, group, i)) != code[i];
            s->bad_v += blob[68 * D + c / 64 * 256 + (4 * g + n % 4) * 8 + n % 8 / 4 * 4 + group] != block;
        }
    s->bad_v += s->v_scale[h * D] != scale;
}

static void check_q_nvfp4(sides *s, int64_t h, int64_t r, const uint8_t *codes, float q_scale, double c)
{
    const int64_t D = s->D, term_bytes = 8 * D + (D / 64 + 1) / 2 * 128, g = r % 8;
    const float own = amax_of(s->q + (h * QUERIES + r) * D, D, 1) / 2688.0f, scale = own < FLT_MIN ? FLT_MIN : own;
    float rest[256];
    memcpy(rest, s->q + (h * QUERIES + r) * D, sizeof(float) * (size_t)D);
    for (int64_t term = 0; term < 2; term++) {
        const uint8_t *at = codes + r / 16 * 2 * term_bytes + term * term_bytes;
        for (int64_t d16 = 0; d16 < D / 16; d16++) {
            const int64_t step = d16 / 4, block = d16 % 4;
            float value[16];
            uint8_t code[16];
            for (int64_t i = 0; i < 16; i++)
                value[i] = rest[d16 * 16 + i] / scale;
            const uint8_t stored = apa_nvfp4_block(value, 16, true, code, NULL);
            for (int64_t i = 0; i < 16; i++) {
                const int64_t lane = 4 * g + block % 2 * 2 + i / 8;
                s->bad_q +=
                    nibble(at, (step * 512 + lane * 16 + (block / 2 * 2 + r % 16 / 8) * 4) * 2 + i % 8) != code[i];
                const float units =
                    (float)(apa_format_decode(APA_FORMAT_UE4M3, stored) * apa_format_decode(APA_FORMAT_E2M1, code[i]));
                rest[d16 * 16 + i] = (float)((double)rest[d16 * 16 + i] - (double)scale * (double)units);
            }
            s->bad_q += at[8 * D + step / 2 * 128 + (4 * g + step % 2 * 2 + r % 16 / 8) * 4 + block] != stored;
        }
    }
    const float wanted = (float)((double)scale * (double)head_scale(s->k + h * KEYS * D, KEYS * D) * c);
    s->bad_q += memcmp(&wanted, &q_scale, 4) != 0;
}

/* ---- both sides ---- */

static int make(apa_array *a, int bf16, int64_t H, int64_t S, int64_t D)
{
    const int64_t shape[4] = {1, H, S, D};
    return apa_array_allocate(a, bf16 ? APA_ARRAY_BF16 : APA_ARRAY_F16, 4, shape) == APA_STATUS_OK;
}

static float *widened(const apa_array *a, int bf16, int64_t n)
{
    float *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)apa_format_decode(bf16 ? APA_FORMAT_BF16 : APA_FORMAT_F16, ((const uint16_t *)a->data)[i]);
    return x;
}

static void prepare(sides *s)
{
    const int64_t D = s->D;
    for (int64_t h = 0; h < HEADS; h++) {
        for (int64_t d = 0; d < D; d++) {
            double total = 0;
            for (int64_t t = 0; t < s->tiles; t++) {
                double sum = 0;
                for (int64_t j = t * TILE; j < (t + 1) * TILE && j < KEYS; j++)
                    sum += (double)s->k[(h * KEYS + j) * D + d];
                total += sum;
            }
            s->mean[h][d] = (float)(total / (double)KEYS);
            s->bad_mean += memcmp(&s->mean[h][d], &s->k_mean[h * D + d], 4) != 0;
        }
        for (int64_t j = 0; j < KEYS; j++) {
            float *k = s->k + (h * KEYS + j) * D;
            for (int64_t d = 0; d < D; d++)
                k[d] -= s->mean[h][d];
            hadamard(k, D);
        }
        for (int64_t i = 0; i < QUERIES; i++)
            hadamard(s->q + (h * QUERIES + i) * D, D);
    }
}

static void check_all(sides *s, double c)
{
    const int64_t blob_bytes = apa_cuda_blob_bytes(s->trait, s->D), unit_bytes = apa_cuda_query_bytes(s->trait, s->D);
    const int64_t units = (QUERIES + 15) / 16 * 16;
    const bool nvfp4 = s->trait == APA_CUDA_NVFP4;
    for (int64_t h = 0; h < HEADS; h++) {
        for (int64_t t = 0; t < s->tiles; t++) {
            const uint8_t *blob = s->blob + (h * s->tiles + t) * blob_bytes;
            (nvfp4 ? check_k_nvfp4 : check_k_8)(s, h, t, blob);
            (nvfp4 ? check_v_nvfp4 : check_v_8)(s, h, t, blob);
        }
        const int64_t per_head = (units + APA_CUDA_UNIT - 1) / APA_CUDA_UNIT;
        for (int64_t r = 0; r < QUERIES; r++)
            (nvfp4 ? check_q_nvfp4 : check_q_8)(s, h, r, s->codes + h * per_head * unit_bytes,
                                                s->q_scale[h * per_head * APA_CUDA_UNIT + r], c);
    }
}

/* Device memory of a prep; everything is freed at the end. */
static void *device_take(void **list, int *count, size_t bytes)
{
    void *at = NULL;
    if (cudaMalloc(&at, bytes) == cudaSuccess)
        list[(*count)++] = at;
    return at;
}

static apa_recipe recipe_of(int32_t trait)
{
    static const char *const settings[APA_CUDA_TRAITS][4] = {
        {"int8", "int8", "row", "tile-channel"}, {"int8", "int8", "thread", "channel"},
        {"int8", "e4m3", "thread", "channel"},   {"e4m3", "e4m3", "thread", "channel"},
        {"nvfp4", "nvfp4", "16", "16"},
    };
    apa_recipe recipe;
    apa_recipe_init(&recipe, "apa");
    apa_recipe_set(&recipe, "cold_format", settings[trait][0], NULL, 0);
    apa_recipe_set(&recipe, "qk_format", settings[trait][0], NULL, 0);
    apa_recipe_set(&recipe, "pv_format", settings[trait][1], NULL, 0);
    apa_recipe_set(&recipe, "qk_scale_granularity", settings[trait][2], NULL, 0);
    apa_recipe_set(&recipe, "v_scale_granularity", settings[trait][3], NULL, 0);
    apa_recipe_set(&recipe, "hadamard", "on", NULL, 0);
    return recipe;
}

static cudaError_t on_device(sides *s, const apa_call *call, const apa_array *a, double *c)
{
    apa_cuda_job job;
    void *list[24] = {0};
    int count = 0;
    const size_t D = (size_t)s->D, tiles = (size_t)s->tiles;
    apa_cuda_describe(call, &job);
    *c = job.c_exact;
    const size_t units = (size_t)(HEADS * job.units), rows = units * APA_CUDA_UNIT;
    const size_t blobs = HEADS * tiles * (size_t)apa_cuda_blob_bytes(s->trait, s->D);
    const size_t codes = units * (size_t)apa_cuda_query_bytes(s->trait, s->D);
    job.splits = job.hot_splits = 1;
    job.unit_count = (int64_t)units;
    void **const inputs[3] = {&job.q.data, &job.k.data, &job.v.data};
    const size_t input_bytes[3] = {HEADS * QUERIES * D * 2, HEADS * KEYS * D * 2, HEADS * KEYS * D * 2};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 3 && error == cudaSuccess; i++) {
        *inputs[i] = device_take(list, &count, input_bytes[i]);
        error = cudaMemcpy(*inputs[i], a[i].data, input_bytes[i], cudaMemcpyHostToDevice);
    }
    job.tile_sum = device_take(list, &count, HEADS * tiles * (D + 1) * 8);
    job.mean_sum = device_take(list, &count, HEADS * D * 8);
    job.k_mean = device_take(list, &count, HEADS * D * 4);
    job.blob = device_take(list, &count, blobs);
    job.poisoned = device_take(list, &count, HEADS * tiles);
    job.k_scale_max = device_take(list, &count, HEADS * 4);
    job.k_amax = device_take(list, &count, HEADS * 4);
    job.v_amax = device_take(list, &count, HEADS * D * 4);
    job.v_scale = device_take(list, &count, HEADS * D * 4);
    job.q_codes = device_take(list, &count, codes);
    job.q16 = device_take(list, &count, rows * D * 2);
    job.q_scale = device_take(list, &count, rows * 4);
    job.shift = device_take(list, &count, rows * 4);
    job.all_hot = device_take(list, &count, units * APA_CUDA_UNIT_GROUPS);
    s->blob = malloc(blobs);
    s->codes = malloc(codes);
    s->q_scale = malloc(rows * 4);
    s->v_scale = malloc(HEADS * D * 4);
    s->k_mean = malloc(HEADS * D * 4);
    if (error == cudaSuccess)
        error = (cudaError_t)apa_cuda_launch_prep_keys(&job, NULL);
    if (error == cudaSuccess)
        error = (cudaError_t)apa_cuda_launch_prep_queries(&job, NULL);
    const void *const from[5] = {job.blob, job.q_codes, job.q_scale, job.v_scale, job.k_mean};
    void *const to[5] = {s->blob, s->codes, s->q_scale, s->v_scale, s->k_mean};
    const size_t bytes[5] = {blobs, codes, rows * 4, HEADS * D * 4, HEADS * D * 4};
    for (int i = 0; i < 5 && error == cudaSuccess; i++)
        error = cudaMemcpy(to[i], from[i], bytes[i], cudaMemcpyDeviceToHost);
    for (int i = 0; i < count; i++)
        cudaFree(list[i]);
    return error;
}

int apa_verify_codes(int32_t trait, int64_t D, int bf16)
{
    sides s = {.trait = trait, .D = D, .tiles = (KEYS + TILE - 1) / TILE};
    apa_array a[3] = {{0}};
    const cli_synthetic shape = {"outliers", 1, HEADS, HEADS, QUERIES, KEYS, D, D, SEED};
    if (!make(&a[0], bf16, HEADS, QUERIES, D) || !make(&a[1], bf16, HEADS, KEYS, D) ||
        !make(&a[2], bf16, HEADS, KEYS, D) || !cli_synthetic_fill(&shape, &a[0], &a[1], &a[2])) {
        printf("codes: no memory\n");
        return 1;
    }
    const apa_dtype dtype = bf16 ? APA_DTYPE_BF16 : APA_DTYPE_F16;
    apa_call call = {.B = 1, .Hq = HEADS, .Hkv = HEADS, .G = 1, .Sq = QUERIES, .Skv = KEYS, .D = D, .Dv = D};
    call.q = apa_tensor_hnd(a[0].data, dtype, 1, HEADS, QUERIES, D);
    call.k = apa_tensor_hnd(a[1].data, dtype, 1, HEADS, KEYS, D);
    call.v = apa_tensor_hnd(a[2].data, dtype, 1, HEADS, KEYS, D);
    call.scale = 1.0 / sqrt((double)D);
    call.window_left = call.window_right = -1;
    call.recipe = recipe_of(trait);
    apa_recipe_fill_auto(&call.recipe, QUERIES, KEYS, D);
    double c = 0;
    const cudaError_t error = on_device(&s, &call, a, &c);
    if (error == cudaSuccess) {
        s.q = widened(&a[0], bf16, HEADS * QUERIES * D);
        s.k = widened(&a[1], bf16, HEADS * KEYS * D);
        s.v = widened(&a[2], bf16, HEADS * KEYS * D);
        prepare(&s);
        check_all(&s, c);
    }
    printf("codes of trait %d, D%d %s: %lld of K's mean, %lld of K, %lld of V, %lld of Q differ%s%s\n", (int)trait,
           (int)D, bf16 ? "bf16" : "f16", (long long)s.bad_mean, (long long)s.bad_k, (long long)s.bad_v,
           (long long)s.bad_q,
           error == cudaSuccess ? "" : ", FAILED: ", error == cudaSuccess ? "" : cudaGetErrorString(error));
    void *const owned[] = {s.q, s.k, s.v, s.blob, s.codes, s.q_scale, s.v_scale, s.k_mean};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++)
        free(owned[i]);
    for (int i = 0; i < 3; i++)
        apa_array_free(&a[i]);
    return error != cudaSuccess || s.bad_mean + s.bad_k + s.bad_v + s.bad_q > 0;
}
