/* Prep of one KV head: statistics in a fixed order, then quantised tiles. Three passes, each a parallel loop over
 * tiles.
 *
 * 1. Means. k̄ per channel: the keys of a tile are summed in order in double, a key with a non-finite element left out
 *    entirely; the tiles' sums are added in tile order, divided by the number of keys summed, rounded once to FP32; 0
 * when no key is finite. v̄ likewise. Inputs count as their FP32 value (f64 is rounded once).
 * 2. Prepared values in FP32: k - k̄ with one rounding, then the Hadamard rotation; v - v̄. Their maxima (NVFP4). A key
 * or value row that is not finite then forces its tile hot and stands as zeros.
 * 3. Codes. INT8: K per key over D, V per channel over the tile's keys. NVFP4: head scale = 4·amax/2688 rounded up to a
 *    power of two, blocks of 16 along D for K and along keys for V (the last block may be short). With the exact
 * maximum a block's amax/6 is at most 112 in units of the head scale, so UE4M3 (448) cannot overflow. */
#include "reference/internal.h"

#include "formats/formats.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define NVFP4_BLOCK 16
#define NVFP4_RANGE 2688.0 /* 6·448, the largest E2M1 times the largest UE4M3 */
#define NVFP4_HEADROOM 4.0 /* APA's: its maximum is from a sample */

typedef struct prep_job {
    const apa_call *call;
    apa_reference_head *head;
    float k_scale, v_scale; /* NVFP4: of the head */
} prep_job;

void apa_reference_head_layout(apa_reference_arena *arena, const apa_call *call, apa_reference_head *head)
{
    const int64_t tiles = apa_call_tiles(call), D = call->D, Dv = call->Dv, T = APA_REFERENCE_TILE;
    head->k_mean = apa_reference_take(arena, 1, D, sizeof(float));
    head->v_mean = apa_reference_take(arena, 1, Dv, sizeof(float));
    head->k_sum = apa_reference_take(arena, tiles, D, sizeof(double));
    head->v_sum = apa_reference_take(arena, tiles, Dv, sizeof(double));
    head->k_count = apa_reference_take(arena, tiles, 1, sizeof(int64_t));
    head->v_count = apa_reference_take(arena, tiles, 1, sizeof(int64_t));
    if (apa_reference_all_hot(&call->recipe))
        return;
    head->k_units = apa_reference_take(arena, tiles, D * T, sizeof(float));
    head->v_units = apa_reference_take(arena, tiles, Dv * T, sizeof(float));
    head->k_scale = apa_reference_take(arena, tiles, T, sizeof(double));
    head->v_scale = apa_reference_take(arena, tiles, Dv, sizeof(double));
    head->k_amax = apa_reference_take(arena, tiles, 1, sizeof(float));
    head->v_amax = apa_reference_take(arena, tiles, 1, sizeof(float));
    head->forced = apa_reference_take(arena, tiles, 1, sizeof(uint8_t));
}

static int64_t keys_of(const apa_call *call, int64_t t)
{
    const int64_t left = call->Skv - t * APA_REFERENCE_TILE;
    return left < APA_REFERENCE_TILE ? left : APA_REFERENCE_TILE;
}

/* ---- 1. means ---- */

static void sum_tile(const apa_tensor *x, const apa_reference_head *head, int64_t t, int64_t n, double *sum,
                     int64_t *count)
{
    const int64_t dim = x->shape[3];
    float row[APA_REFERENCE_DIM_MAX];
    memset(sum, 0, sizeof(double) * (size_t)dim);
    *count = 0;
    for (int64_t j = 0; j < n; ++j) {
        if (!apa_reference_load_f32(x, head->b, head->h, t * APA_REFERENCE_TILE + j, row))
            continue;
        *count += 1;
        for (int64_t d = 0; d < dim; ++d)
            sum[d] += (double)row[d];
    }
}

static void sum_task(void *argument, size_t index)
{
    const prep_job *job = argument;
    const apa_call *call = job->call;
    const int64_t t = (int64_t)index, n = keys_of(call, t);
    if (call->recipe.smooth_k == APA_TOGGLE_ON)
        sum_tile(&call->k, job->head, t, n, job->head->k_sum + t * call->D, job->head->k_count + t);
    if (call->recipe.smooth_v == APA_TOGGLE_ON)
        sum_tile(&call->v, job->head, t, n, job->head->v_sum + t * call->Dv, job->head->v_count + t);
}

static void mean_of(const double *sum, const int64_t *count, int64_t tiles, int64_t dim, float *mean)
{
    int64_t keys = 0;
    for (int64_t t = 0; t < tiles; ++t)
        keys += count[t];
    for (int64_t d = 0; d < dim; ++d) {
        double total = 0;
        for (int64_t t = 0; t < tiles; ++t)
            total += sum[t * dim + d];
        mean[d] = keys == 0 ? 0.0F : (float)(total / (double)keys);
    }
}

/* ---- 2. prepared values ---- */

/* Orthonormal Walsh-Hadamard transform in FP32: butterflies (a, b) → (a+b, a-b) at distances 1, 2, 4, …, then one
 * product with float(1/√n). n is a power of two. */
static void transform(float *x, int64_t n)
{
    for (int64_t h = 1; h < n; h *= 2)
        for (int64_t i = 0; i < n; i += 2 * h)
            for (int64_t j = i; j < i + h; ++j) {
                const float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
    const float norm = (float)(1.0 / sqrt((double)n));
    for (int64_t i = 0; i < n; ++i)
        x[i] *= norm;
}

/* Block diagonal, with the largest power of two that divides n as the block: any head dim can be rotated. */
void apa_reference_hadamard(float *x, int64_t n)
{
    const int64_t block = n & -n;
    for (int64_t i = 0; i < n; i += block)
        transform(x + i, block);
}

static bool prepared_row(const apa_tensor *x, const apa_reference_head *head, int64_t s, const float *mean, bool rotate,
                         float *row)
{
    const int64_t dim = x->shape[3];
    bool finite = apa_reference_load_f32(x, head->b, head->h, s, row);
    for (int64_t d = 0; d < dim; ++d)
        row[d] -= mean[d];
    if (rotate)
        apa_reference_hadamard(row, dim);
    for (int64_t d = 0; d < dim; ++d)
        finite = finite && isfinite(row[d]);
    if (!finite)
        memset(row, 0, sizeof(float) * (size_t)dim);
    return finite;
}

static float amax_of(const float *x, int64_t n)
{
    float amax = 0;
    for (int64_t i = 0; i < n; ++i)
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    return amax;
}

/* Jensen needs the tile's mean key: in double over the prepared keys in order. */
static void mean_key(const prep_job *job, int64_t t, int64_t n)
{
    const int64_t D = job->call->D;
    const float *kt = job->head->k_units + t * D * APA_REFERENCE_TILE;
    for (int64_t d = 0; d < D; ++d) {
        double sum = 0;
        for (int64_t j = 0; j < n; ++j)
            sum += (double)kt[d * APA_REFERENCE_TILE + j];
        job->head->k_sum[t * D + d] = sum / (double)n;
    }
}

static void fill_task(void *argument, size_t index)
{
    const prep_job *job = argument;
    const apa_call *call = job->call;
    apa_reference_head *head = job->head;
    const int64_t t = (int64_t)index, n = keys_of(call, t), D = call->D, Dv = call->Dv, T = APA_REFERENCE_TILE;
    float *kt = head->k_units + t * D * T, *v = head->v_units + t * T * Dv;
    float key[APA_REFERENCE_DIM_MAX];
    bool finite = true;
    memset(kt, 0, sizeof(float) * (size_t)(D * T));
    memset(v, 0, sizeof(float) * (size_t)(T * Dv));
    head->k_amax[t] = head->v_amax[t] = 0;
    for (int64_t j = 0; j < n; ++j) {
        const bool rotate = call->recipe.hadamard == APA_TOGGLE_ON;
        finite &= prepared_row(&call->k, head, t * T + j, head->k_mean, rotate, key);
        for (int64_t d = 0; d < D; ++d)
            kt[d * T + j] = key[d];
        finite &= prepared_row(&call->v, head, t * T + j, head->v_mean, false, v + j * Dv);
    }
    head->k_amax[t] = amax_of(kt, D * T);
    head->v_amax[t] = amax_of(v, T * Dv);
    head->forced[t] = !finite;
    if (call->recipe.lambda_bound == APA_LAMBDA_BOUND_JENSEN)
        mean_key(job, t, n);
}

/* ---- 3. codes ---- */

/* The n values x[0], x[stride], … become units of their INT8 scale, which is returned. */
static double int8_units(float *x, int64_t n, int64_t stride)
{
    float value[APA_REFERENCE_DIM_MAX] = {0};
    int8_t code[APA_REFERENCE_DIM_MAX];
    for (int64_t i = 0; i < n; ++i)
        value[i] = x[i * stride];
    const float scale = apa_int8_quantise(value, (size_t)n, code);
    for (int64_t i = 0; i < n; ++i)
        x[i * stride] = code[i];
    return (double)scale;
}

/* The n values become units of the head's scale: element code times block scale. */
static void nvfp4_units(float *x, int64_t n, int64_t stride, float scale, bool search)
{
    for (int64_t i = 0; i < n; i += NVFP4_BLOCK) {
        const int64_t size = n - i < NVFP4_BLOCK ? n - i : NVFP4_BLOCK;
        float value[NVFP4_BLOCK];
        uint8_t code[NVFP4_BLOCK];
        for (int64_t u = 0; u < size; ++u)
            value[u] = x[(i + u) * stride] / scale;
        const uint8_t block = apa_nvfp4_block(value, (size_t)size, search, code, NULL);
        const double unit = apa_format_decode(APA_FORMAT_UE4M3, block);
        for (int64_t u = 0; u < size; ++u)
            x[(i + u) * stride] = (float)(unit * apa_format_decode(APA_FORMAT_E2M1, code[u]));
    }
}

static void quantise_task(void *argument, size_t index)
{
    const prep_job *job = argument;
    const apa_call *call = job->call;
    apa_reference_head *head = job->head;
    const int64_t t = (int64_t)index, n = keys_of(call, t), D = call->D, Dv = call->Dv, T = APA_REFERENCE_TILE;
    const bool search = call->recipe.scale_search == APA_TOGGLE_ON;
    const bool nvfp4 = call->recipe.cold_format == APA_COLD_FORMAT_NVFP4;
    float *kt = head->k_units + t * D * T, *v = head->v_units + t * T * Dv;
    for (int64_t j = 0; j < T; ++j)
        head->k_scale[t * T + j] = (double)job->k_scale;
    for (int64_t j = 0; j < n; ++j) {
        if (nvfp4)
            nvfp4_units(kt + j, D, T, job->k_scale, search);
        else
            head->k_scale[t * T + j] = int8_units(kt + j, D, T);
    }
    for (int64_t c = 0; c < Dv; ++c) {
        head->v_scale[t * Dv + c] = (double)job->v_scale;
        if (nvfp4)
            nvfp4_units(v + c, n, Dv, job->v_scale, search);
        else
            head->v_scale[t * Dv + c] = int8_units(v + c, n, Dv);
    }
}

/* 4·amax/2688 rounded up to a power of two, not under the smallest normal float, so that it can be divided by. */
static float head_scale(const float *amax, int64_t tiles)
{
    const double need = NVFP4_HEADROOM * (double)amax_of(amax, tiles) / NVFP4_RANGE;
    int exponent;
    if (need <= (double)FLT_MIN)
        return FLT_MIN;
    const double fraction = frexp(need, &exponent); /* need = fraction·2^exponent, fraction in [1/2, 1) */
    return (float)ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

void apa_reference_prep(apa_context *context, const apa_call *call, apa_reference_head *head)
{
    const int64_t tiles = apa_call_tiles(call);
    prep_job job = {.call = call, .head = head};
    memset(head->k_mean, 0, sizeof(float) * (size_t)call->D);
    memset(head->v_mean, 0, sizeof(float) * (size_t)call->Dv);
    if (call->recipe.smooth_k == APA_TOGGLE_ON || call->recipe.smooth_v == APA_TOGGLE_ON)
        apa_context_parallel(context, sum_task, &job, (size_t)tiles);
    if (call->recipe.smooth_k == APA_TOGGLE_ON)
        mean_of(head->k_sum, head->k_count, tiles, call->D, head->k_mean);
    if (call->recipe.smooth_v == APA_TOGGLE_ON)
        mean_of(head->v_sum, head->v_count, tiles, call->Dv, head->v_mean);
    if (apa_reference_all_hot(&call->recipe))
        return;
    apa_context_parallel(context, fill_task, &job, (size_t)tiles);
    job.k_scale = head_scale(head->k_amax, tiles);
    job.v_scale = head_scale(head->v_amax, tiles);
    apa_context_parallel(context, quantise_task, &job, (size_t)tiles);
    head->k_scale_max = 0;
    for (int64_t j = 0; j < tiles * APA_REFERENCE_TILE; ++j)
        head->k_scale_max = head->k_scale[j] > head->k_scale_max ? head->k_scale[j] : head->k_scale_max;
}
