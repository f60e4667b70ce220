/* Prep: the steps of a call, and their pieces. */
#include "cpu/prep.h"

#include "cpu/floor.h"

#include <string.h>

#define LARGEST_DIM 1024
#define TILE APA_CPU_TILE
/* Bytes of K that are expected to stay in the last-level cache from the first reading to the second. */
#define K_BYTES_AT_ONCE ((int64_t)8 << 20)

/* ---- layout ---- */

static size_t up_to_64(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

size_t apa_cpu_blob_bytes(int64_t Dp, int64_t Dvp)
{
    const size_t codes = (size_t)(TILE * (Dp + Dvp)), per_key = TILE * (sizeof(int32_t) + sizeof(float));
    return sizeof(apa_cpu_blob) + codes + per_key + up_to_64((size_t)Dvp * sizeof(float));
}

static apa_cpu_tile tile_of(const apa_cpu_shape *shape, const apa_cpu_blob *blob)
{
    const char *k8 = (const char *)(blob + 1), *v8 = k8 + TILE * shape->Dp, *bias = v8 + TILE * shape->Dvp;
    const char *k_scale = bias + TILE * sizeof(int32_t), *v_scale = k_scale + TILE * sizeof(float);
    return (apa_cpu_tile){.blob = blob,
                          .k8 = (const int8_t *)k8,
                          .v8 = (const int8_t *)v8,
                          .k_bias = (const int32_t *)(const void *)bias,
                          .k_scale = (const float *)(const void *)k_scale,
                          .v_scale = (const float *)(const void *)v_scale};
}

/* Tiles that some row of the call sees: *first <= tile < *end. Both ends of what a row sees rise with its position. */
static void seen_tiles(const apa_call *call, int64_t *first, int64_t *end)
{
    int64_t key, unused;
    apa_call_visible(call, 0, &key, &unused);
    *first = key / TILE;
    apa_call_visible(call, call->Sq - 1, &unused, &key);
    *end = (key + TILE - 1) / TILE;
}

static int64_t count_missing(const apa_call *call)
{
    int64_t missing = 0, first, end;
    seen_tiles(call, &first, &end);
    for (int64_t tile = first; tile < end; tile++)
        missing += call->kept->tile[tile] == NULL;
    return missing;
}

static bool smooths(const apa_call *call)
{
    return call->recipe.smooth_k == APA_TOGGLE_ON;
}

void apa_cpu_prepared_layout(const apa_call *call, const apa_cpu_shape *shape, apa_cpu_arena *arena,
                             apa_cpu_prepared *prepared)
{
    const int64_t heads = call->B * call->Hkv, tiles = heads * shape->tiles;
    const bool own = call->kept == NULL;
    *prepared = (apa_cpu_prepared){.kept = call->kept, .blob_bytes = apa_cpu_blob_bytes(shape->Dp, shape->Dvp)};
    prepared->missing_tiles = own ? 0 : count_missing(call);
    prepared->mean_rows = own ? 1 : call->kept->mean_rows;
    prepared->heads = heads;
    prepared->floor_groups = apa_cpu_floor_applies(call) ? (shape->tiles + TILE - 1) / TILE : 0;
    prepared->blobs = apa_cpu_take(arena, own ? tiles : prepared->missing_tiles * call->Hkv, prepared->blob_bytes);
    prepared->table = apa_cpu_take(arena, own ? 0 : shape->tiles, sizeof *prepared->table);
    prepared->missing = apa_cpu_take(arena, prepared->missing_tiles, sizeof *prepared->missing);
    prepared->k_mean = apa_cpu_take(arena, own ? heads * shape->Dp : 0, sizeof(float));
    prepared->k_scale_top = apa_cpu_take(arena, heads, sizeof(float));
    prepared->tile_sum = apa_cpu_take(arena, own && smooths(call) ? tiles * (shape->Dp + 1) : 0, sizeof(double));
    const int64_t means = heads * prepared->floor_groups * TILE;
    prepared->floor_k8 = apa_cpu_take(arena, means * shape->Dp, 1);
    prepared->floor_bias = apa_cpu_take(arena, means, sizeof(int32_t));
    prepared->floor_scale = apa_cpu_take(arena, means, sizeof(float));
    prepared->floor_whole = apa_cpu_take(arena, means, 1);
    if (arena->base == NULL || own)
        return;
    int64_t missing = 0, first, end;
    seen_tiles(call, &first, &end);
    for (int64_t tile = 0; tile < shape->tiles; tile++) {
        prepared->table[tile] = call->kept->tile[tile];
        if (call->kept->tile[tile] != NULL || tile < first || tile >= end)
            continue;
        prepared->table[tile] = prepared->blobs + (size_t)(missing * call->Hkv) * prepared->blob_bytes;
        prepared->missing[missing++] = tile;
    }
}

static const apa_cpu_blob *blob_at(const apa_cpu_prepared *prepared, const apa_cpu_shape *shape, int64_t head,
                                   int64_t tile)
{
    const char *at = prepared->kept != NULL
                         ? (const char *)prepared->table[tile] + (size_t)head * prepared->blob_bytes
                         : prepared->blobs + (size_t)(head * shape->tiles + tile) * prepared->blob_bytes;
    return (const apa_cpu_blob *)(const void *)at;
}

apa_cpu_tile apa_cpu_prepared_tile(const apa_cpu_prepared *prepared, const apa_cpu_shape *shape, int64_t head,
                                   int64_t tile)
{
    return tile_of(shape, blob_at(prepared, shape, head, tile));
}

const float *apa_cpu_prepared_mean(const apa_cpu_prepared *prepared, const apa_cpu_shape *shape, int64_t head,
                                   int64_t segment)
{
    const float *mean = prepared->kept != NULL ? prepared->kept->k_mean : prepared->k_mean;
    return mean + (head * prepared->mean_rows + segment) * shape->Dp;
}

/* ---- pieces ---- */

static int64_t keys_in_tile(const apa_call *call, int64_t tile)
{
    const int64_t rest = call->Skv - tile * TILE;
    return rest < TILE ? rest : TILE;
}

static int rows_at(const apa_call *call, const apa_tensor *tensor, int64_t b, int64_t kv_head, int64_t tile,
                   const void **rows)
{
    const int64_t start = tile * TILE, keys = keys_in_tile(call, tile);
    const int64_t step = tensor->stride[2] * (int64_t)apa_dtype_bytes(tensor->dtype);
    for (int64_t i = 0, n; i < keys; i += n) {
        const char *row = apa_call_key(call, tensor, b, kv_head, start + i);
        n = apa_call_run(call, start + i, keys - i);
        for (int64_t j = 0; j < n; j++)
            rows[i + j] = row + j * step;
    }
    return (int)keys;
}

/* A tile whose rows may be asked for during the work on `tile`: the next one, or itself where there is no whole one. */
static int64_t tile_ahead(const apa_call *call, int64_t tile)
{
    return (tile + 2) * TILE <= call->Skv ? tile + 1 : tile;
}

void apa_cpu_tile_sum(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_kernels *kernels, int64_t b,
                      int64_t kv_head, int64_t tile, double *sum)
{
    const void *rows[TILE], *ahead[TILE];
    memset(sum, 0, sizeof *sum * (size_t)(shape->Dp + 1));
    const int n = rows_at(call, &call->k, b, kv_head, tile, rows);
    rows_at(call, &call->k, b, kv_head, tile_ahead(call, tile), ahead);
    sum[shape->Dp] = kernels->sum_k(call->k.dtype, rows, n, call->D, ahead, sum);
}

void apa_cpu_tile_mean(const apa_cpu_shape *shape, const double *before, const double *sum, int64_t tiles,
                       int64_t stride, float *mean, double *after)
{
    const int64_t Dp = shape->Dp;
    double total[LARGEST_DIM + 1] = {0.0};
    if (before != NULL)
        memcpy(total, before, sizeof *total * (size_t)(Dp + 1));
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int64_t d = 0; d <= Dp; d++)
            total[d] += sum[tile * stride + d];
    for (int64_t d = 0; d < Dp; d++)
        mean[d] = total[Dp] > 0.0 ? (float)(total[d] / total[Dp]) : 0.0f;
    if (after != NULL)
        memcpy(after, total, sizeof *total * (size_t)(Dp + 1));
}

void apa_cpu_blob_make(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_kernels *kernels, int64_t b,
                       int64_t kv_head, int64_t tile, int32_t segment, const float *mean, apa_cpu_blob *blob)
{
    int8_t *k8 = (int8_t *)(blob + 1), *v8 = k8 + TILE * shape->Dp;
    int32_t *bias = (int32_t *)(void *)(v8 + TILE * shape->Dvp);
    float *k_scale = (float *)(void *)(bias + TILE), *v_scale = k_scale + TILE, largest = 0.0f;
    const void *rows[TILE], *values[TILE], *ahead[TILE];

    /* K takes three times as long as V and has mostly stayed in the last-level cache since its sums were made. So V is
     * asked for during the work on K, and the next tile's K during that on V. */
    const int n = rows_at(call, &call->k, b, kv_head, tile, rows);
    rows_at(call, &call->v, b, kv_head, tile, values);
    const bool k_finite =
        kernels->quantise_k(call->k.dtype, rows, n, call->D, values, mean, shape->hadamard_block, k8, bias, k_scale);
    for (int key = 0; key < TILE; key++)
        largest = k_scale[key] > largest ? k_scale[key] : largest;
    blob->k_scale_max = largest;

    rows_at(call, &call->k, b, kv_head, tile_ahead(call, tile), ahead);
    const bool v_finite = kernels->quantise_v(call->v.dtype, values, n, call->Dv, ahead, v8, v_scale, &blob->v_max);
    blob->segment = segment;
    blob->poisoned = !(k_finite && v_finite);
}

/* ---- steps ---- */

int64_t apa_cpu_prep_heads_at_once(const apa_call *call)
{
    const int64_t bytes = call->Skv * call->D * (int64_t)apa_dtype_bytes(call->k.dtype), heads = call->B * call->Hkv;
    const int64_t fit = K_BYTES_AT_ONCE / (bytes > 0 ? bytes : 1);
    return call->kept != NULL || !smooths(call) || fit > heads ? heads : fit > 0 ? fit : 1;
}

int64_t apa_cpu_prep_items(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_prepared *prepared,
                           apa_cpu_prep_step step)
{
    const int64_t heads = prepared->heads;
    const bool own = prepared->kept == NULL;
    switch (step) {
    case APA_CPU_PREP_SUMS:
        return own && smooths(call) ? heads * shape->tiles : 0;
    case APA_CPU_PREP_MEANS:
        return own ? heads : 0;
    case APA_CPU_PREP_TILES:
        return own ? heads * shape->tiles : prepared->missing_tiles * call->Hkv;
    case APA_CPU_PREP_TOPS:
        return heads;
    case APA_CPU_PREP_FLOORS:
        return heads * prepared->floor_groups;
    case APA_CPU_PREP_STEPS:
        break;
    }
    return 0;
}

static void make_mean(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_prepared *prepared, int64_t head)
{
    const int64_t stride = shape->Dp + 1;
    float *mean = prepared->k_mean + head * shape->Dp;
    if (smooths(call))
        apa_cpu_tile_mean(shape, NULL, prepared->tile_sum + head * shape->tiles * stride, shape->tiles, stride, mean,
                          NULL);
    else
        memset(mean, 0, sizeof *mean * (size_t)shape->Dp);
}

/* Last segment that starts at or before a tile. */
static int64_t segment_of(const apa_kept *kept, int64_t tile)
{
    int64_t low = 0, high = kept->segments - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (kept->segment_start[middle] <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static void make_tile(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_kernels *kernels,
                      const apa_cpu_prepared *prepared, int64_t item)
{
    const bool own = prepared->kept == NULL;
    item += own ? prepared->first_head * shape->tiles : 0;
    const int64_t head = own ? item / shape->tiles : item % call->Hkv;
    const int64_t tile = own ? item % shape->tiles : prepared->missing[item / call->Hkv];
    const int64_t segment = own ? 0 : segment_of(prepared->kept, tile);
    apa_cpu_blob *blob = (apa_cpu_blob *)(void *)(prepared->blobs + (size_t)item * prepared->blob_bytes);
    apa_cpu_blob_make(call, shape, kernels, head / call->Hkv, head % call->Hkv, tile, (int32_t)segment,
                      apa_cpu_prepared_mean(prepared, shape, head, segment), blob);
}

/* Whoever keeps tiles knows the maximum over whole ones; a last tile in part is the call's own. */
static void make_top(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_prepared *prepared, int64_t head)
{
    float top = 0.0f;
    if (prepared->kept != NULL) {
        top = prepared->kept->k_scale_top != NULL ? prepared->kept->k_scale_top[head] : 0.0f;
        if (call->Skv % TILE != 0 && prepared->table[shape->tiles - 1] != NULL) {
            const float most = blob_at(prepared, shape, head, shape->tiles - 1)->k_scale_max;
            top = most > top ? most : top;
        }
        prepared->k_scale_top[head] = top;
        return;
    }
    for (int64_t tile = 0; tile < shape->tiles; tile++) {
        const float most = blob_at(prepared, shape, head, tile)->k_scale_max;
        top = most > top ? most : top;
    }
    prepared->k_scale_top[head] = top;
}

void apa_cpu_prep_item(const apa_call *call, const apa_cpu_shape *shape, const apa_cpu_kernels *kernels,
                       const apa_cpu_prepared *prepared, apa_cpu_prep_step step, int64_t item)
{
    switch (step) {
    case APA_CPU_PREP_SUMS: {
        const int64_t piece = prepared->first_head * shape->tiles + item, head = piece / shape->tiles;
        apa_cpu_tile_sum(call, shape, kernels, head / call->Hkv, head % call->Hkv, piece % shape->tiles,
                         prepared->tile_sum + piece * (shape->Dp + 1));
        break;
    }
    case APA_CPU_PREP_MEANS:
        make_mean(call, shape, prepared, prepared->first_head + item);
        break;
    case APA_CPU_PREP_TILES:
        make_tile(call, shape, kernels, prepared, item);
        break;
    case APA_CPU_PREP_TOPS:
        make_top(call, shape, prepared, prepared->first_head + item);
        break;
    case APA_CPU_PREP_FLOORS:
        apa_cpu_floor_prepare(call, shape, kernels, prepared, prepared->first_head + item / prepared->floor_groups,
                              item % prepared->floor_groups);
        break;
    case APA_CPU_PREP_STEPS:
        break;
    }
}
