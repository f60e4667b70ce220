/* Prep: three passes, each parallel over independent pieces. */
#include "cpu/prep.h"

#include <string.h>

#define LARGEST_DIM 1024
#define V_STRIP 256   /* channels */
#define ROWS_AHEAD 16 /* prefetch distance */

typedef struct prep_task {
    const apa_call *call;
    const apa_cpu_shape *shape;
    const apa_cpu_kernels *kernels;
    const apa_cpu_prepared *prepared;
} prep_task;

void apa_cpu_prepared_layout(const apa_call *call, const apa_cpu_shape *shape, apa_cpu_arena *arena,
                             apa_cpu_prepared *prepared)
{
    const int64_t heads = call->B * call->Hkv, tiles = heads * shape->tiles;
    prepared->k_mean = apa_cpu_take(arena, heads * shape->Dp, sizeof(float));
    prepared->k8 = apa_cpu_take(arena, tiles * APA_CPU_TILE * shape->Dp, 1);
    prepared->v8 = apa_cpu_take(arena, tiles * APA_CPU_TILE * shape->Dvp, 1);
    prepared->k_bias = apa_cpu_take(arena, tiles * APA_CPU_TILE, sizeof(int32_t));
    prepared->k_scale = apa_cpu_take(arena, tiles * APA_CPU_TILE, sizeof(float));
    prepared->v_scale = apa_cpu_take(arena, tiles * shape->Dvp, sizeof(float));
    prepared->k_scale_max = apa_cpu_take(arena, tiles, sizeof(float));
    prepared->v_max = apa_cpu_take(arena, tiles, sizeof(float));
    prepared->poisoned = apa_cpu_take(arena, tiles, 1);
    const bool smooth = call->recipe.smooth_k == APA_TOGGLE_ON;
    prepared->tile_sum = apa_cpu_take(arena, smooth ? tiles * (shape->Dp + 1) : 0, sizeof(double));
}

/* Row `key` of a KV head's tensor. */
static const char *row_at(const apa_tensor *tensor, int64_t head, int64_t key)
{
    const int64_t b = head / tensor->shape[1], h = head % tensor->shape[1];
    const int64_t offset = b * tensor->stride[0] + h * tensor->stride[1] + key * tensor->stride[2];
    return (const char *)tensor->data + offset * (int64_t)apa_dtype_bytes(tensor->dtype);
}

/* Rows are read once and in order, and still arrive late: a tile is too short for the hardware to catch on. */
static void ask_ahead(const apa_tensor *tensor, int64_t head, int64_t key)
{
    const int64_t ahead = key + ROWS_AHEAD;
    if (ahead >= tensor->shape[2])
        return;
    const char *row = row_at(tensor, head, ahead);
    const int64_t bytes = tensor->shape[3] * (int64_t)apa_dtype_bytes(tensor->dtype);
    for (int64_t byte = 0; byte < bytes; byte += 64)
        __builtin_prefetch(row + byte);
}

static int64_t keys_in_tile(const apa_call *call, int64_t tile)
{
    const int64_t rest = call->Skv - tile * APA_CPU_TILE;
    return rest < APA_CPU_TILE ? rest : APA_CPU_TILE;
}

static void sum_tile(void *argument, size_t index)
{
    const prep_task *task = argument;
    const apa_call *call = task->call;
    const int64_t head = (int64_t)index / task->shape->tiles, tile = (int64_t)index % task->shape->tiles;
    const int64_t keys = keys_in_tile(call, tile);
    double *sum = task->prepared->tile_sum + (int64_t)index * (task->shape->Dp + 1);
    memset(sum, 0, sizeof *sum * (size_t)(task->shape->Dp + 1));
    float row[LARGEST_DIM];
    for (int64_t key = 0; key < keys; key++) {
        ask_ahead(&call->k, head, tile * APA_CPU_TILE + key);
        if (!task->kernels->widen(call->k.dtype, row_at(&call->k, head, tile * APA_CPU_TILE + key), call->D, row))
            continue;
        task->kernels->accumulate(sum, row, call->D);
        sum[task->shape->Dp] += 1.0;
    }
}

static void mean_of_head(void *argument, size_t head)
{
    const prep_task *task = argument;
    const int64_t tiles = task->shape->tiles, Dp = task->shape->Dp;
    float *mean = task->prepared->k_mean + (int64_t)head * Dp;
    double sum[LARGEST_DIM + 1] = {0.0};
    for (int64_t tile = 0; tile < tiles; tile++) {
        const double *part = task->prepared->tile_sum + ((int64_t)head * tiles + tile) * (Dp + 1);
        for (int64_t d = 0; d <= Dp; d++)
            sum[d] += part[d];
    }
    for (int64_t d = 0; d < Dp; d++)
        mean[d] = sum[Dp] > 0.0 ? (float)(sum[d] / sum[Dp]) : 0.0f;
}

/* Codes, scales and biases of the K half of a tile. Returns whether every key is finite. */
static bool quantise_k_tile(const prep_task *task, int64_t head, int64_t tile, int64_t index)
{
    const apa_call *call = task->call;
    const apa_cpu_prepared *prepared = task->prepared;
    const int64_t Dp = task->shape->Dp, keys = keys_in_tile(call, tile);
    const float *mean = prepared->k_mean + head * Dp;
    int8_t *codes = prepared->k8 + index * APA_CPU_TILE * Dp;
    int32_t *bias = prepared->k_bias + index * APA_CPU_TILE;
    float *scale = prepared->k_scale + index * APA_CPU_TILE;
    float largest = 0.0f;
    bool finite = true;
    if (keys < APA_CPU_TILE || Dp != call->D)
        memset(codes, 0, (size_t)(APA_CPU_TILE * Dp));
    for (int64_t key = 0; key < APA_CPU_TILE; key++) {
        int32_t sum = 0;
        scale[key] = 0.0f;
        ask_ahead(&call->k, head, tile * APA_CPU_TILE + key);
        if (key < keys &&
            !task->kernels->quantise_k(call->k.dtype, row_at(&call->k, head, tile * APA_CPU_TILE + key), call->D, mean,
                                       task->shape->hadamard_block, codes + key * Dp, &scale[key], &sum))
            finite = false;
        bias[key] = -128 * sum;
        largest = scale[key] > largest ? scale[key] : largest;
    }
    prepared->k_scale_max[index] = largest;
    return finite;
}

static bool quantise_v_tile(const prep_task *task, int64_t head, int64_t tile, int64_t index)
{
    const apa_call *call = task->call;
    const apa_cpu_prepared *prepared = task->prepared;
    const int64_t Dvp = task->shape->Dvp, keys = keys_in_tile(call, tile);
    _Alignas(64) float values[APA_CPU_TILE * V_STRIP]; /* channels in strips, so that the stack holds any Dv */
    _Alignas(64) int8_t strip[APA_CPU_TILE * V_STRIP];
    int8_t *v8 = prepared->v8 + index * APA_CPU_TILE * Dvp;
    bool finite = true;
    float most = 0.0f;
    for (int64_t c = 0; c < Dvp; c += V_STRIP) {
        const int64_t width = Dvp - c < V_STRIP ? Dvp - c : V_STRIP;
        const int64_t real = call->Dv - c < width ? call->Dv - c : width;
        int8_t *codes = width == Dvp ? v8 : strip; /* one strip is the whole tile: no copy */
        if (keys < APA_CPU_TILE || real < width)
            memset(values, 0, sizeof values);
        for (int64_t key = 0; key < keys; key++) {
            if (c == 0)
                ask_ahead(&call->v, head, tile * APA_CPU_TILE + key);
            const char *source =
                row_at(&call->v, head, tile * APA_CPU_TILE + key) + c * (int64_t)apa_dtype_bytes(call->v.dtype);
            if (!task->kernels->widen(call->v.dtype, source, real, values + key * width)) {
                finite = false;
                memset(values + key * width, 0, sizeof *values * (size_t)width);
            }
        }
        const float largest = task->kernels->quantise_v(values, width, codes, prepared->v_scale + index * Dvp + c);
        most = largest > most ? largest : most;
        for (int64_t quad = 0; quad < APA_CPU_TILE / 4 && codes != v8; quad++)
            memcpy(v8 + (quad * Dvp + c) * 4, codes + quad * width * 4, (size_t)(width * 4));
    }
    prepared->v_max[index] = most;
    return finite;
}

static void quantise_tile(void *argument, size_t index)
{
    const prep_task *task = argument;
    const int64_t head = (int64_t)index / task->shape->tiles, tile = (int64_t)index % task->shape->tiles;
    const bool k_finite = quantise_k_tile(task, head, tile, (int64_t)index);
    const bool v_finite = quantise_v_tile(task, head, tile, (int64_t)index);
    task->prepared->poisoned[index] = !(k_finite && v_finite);
}

void apa_cpu_prepare(apa_context *context, const apa_call *call, const apa_cpu_shape *shape,
                     const apa_cpu_kernels *kernels, const apa_cpu_prepared *prepared)
{
    prep_task task = {call, shape, kernels, prepared};
    const size_t heads = (size_t)(call->B * call->Hkv), tiles = heads * (size_t)shape->tiles;
    if (call->recipe.smooth_k == APA_TOGGLE_ON) {
        apa_context_parallel(context, sum_tile, &task, tiles);
        apa_context_parallel(context, mean_of_head, &task, heads);
    } else {
        memset(prepared->k_mean, 0, sizeof(float) * heads * (size_t)shape->Dp);
    }
    apa_context_parallel(context, quantise_tile, &task, tiles);
}
