/* Softcap, slopes and masks of a block: what is read when, and how little of it. */
#include "cpu/bend.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE

/* Masks beyond ±2^100 could leave FP32 on the way to log2 units, and so could they within that times a slope over 2^20;
 * ALiBi slopes over 2^60 could with a distance. All these go to the exact pass. */
#define LOWEST_ESTIMATE -0x1p100f
#define HIGHEST_ESTIMATE 0x1p100f
#define LARGEST_MASK_SLOPE 0x1p20f
#define LARGEST_SLOPE 0x1p60f

void apa_cpu_bend_layout(const apa_cpu_shape *shape, apa_cpu_arena *arena, apa_cpu_block *block)
{
    const int64_t tiles = shape->masked ? shape->tiles : 0;
    uint16_t *seeing = apa_cpu_take(arena, shape->block_registers * tiles, sizeof *seeing);
    uint16_t *bent = apa_cpu_take(arena, tiles, sizeof *bent);
    uint16_t *wild = apa_cpu_take(arena, tiles, sizeof *wild);
    float *bias = apa_cpu_take(arena, shape->masked ? TILE * LANES : 0, sizeof *bias);
    if (arena->base == NULL)
        return;
    block->bend.seeing = seeing;
    block->bend.bent = bent;
    block->bend.wild = wild;
    block->bend.bias = bias;
}

/* ---- rows ---- */

static const char *mask_row(const apa_call *call, int64_t b, const apa_cpu_row *row)
{
    const apa_tensor *mask = &call->mask;
    const int64_t offset = b * mask->stride[0] + row->head * mask->stride[1] + row->position * mask->stride[2];
    return (const char *)mask->data + offset * (int64_t)apa_dtype_bytes(mask->dtype);
}

static float per_head(const apa_tensor *x, int64_t b, const apa_cpu_row *row, float absent)
{
    return x->dtype == APA_DTYPE_NONE ? absent : apa_call_per_head(x, b, row->head);
}

void apa_cpu_bend_load(apa_cpu_block *block)
{
    const apa_call *call = block->call;
    apa_cpu_bend *bend = &block->bend;
    bend->changes = apa_call_changes_scores(call);
    if (!bend->changes) {
        bend->every = bend->masked = bend->alibi = false;
        return;
    }
    bend->cap = (float)call->softcap;
    bend->alibi = call->alibi_slopes.dtype != APA_DTYPE_NONE;
    bend->masked = call->mask.dtype != APA_DTYPE_NONE;
    bend->every = bend->cap > 0.0f || bend->alibi;
    bend->bias_tile = -1;
    for (int r = 0; r < block->n; r++) {
        apa_cpu_register *reg = &block->reg[r];
        reg->drowned = false;
        for (int i = 0; i < LANES; i++) {
            const apa_cpu_row *row = &reg->row[i];
            const bool real = (reg->real >> i & 1) != 0;
            reg->slope[i] = real ? per_head(&call->alibi_slopes, block->b, row, 0.0f) : 0.0f;
            reg->mask_slope[i] = real ? per_head(&call->mask_slopes, block->b, row, 1.0f) : 1.0f;
            reg->mask_row[i] = real && bend->masked ? mask_row(call, block->b, row) : NULL;
            if (!(fabsf(reg->slope[i]) <= LARGEST_SLOPE) || !(reg->mask_slope[i] >= 0.0f) ||
                !(reg->mask_slope[i] <= LARGEST_MASK_SLOPE))
                reg->finite = false;
        }
    }
}

/* ---- looking ---- */

/* What some keys of a mask row do. */
enum {
    SHOWS = 1,   /* one is not left out */
    CHANGES = 2, /* one is not 0 (not true) */
    WILD = 4,    /* one is NaN or beyond HIGHEST_ESTIMATE */
    FLOATS = 8   /* one is over LOWEST_ESTIMATE */
};

static unsigned look_bool(const uint8_t *at, int64_t n)
{
    unsigned any = 0, all = 1;
    for (int64_t j = 0; j < n; j++) {
        any |= at[j];
        all &= at[j] != 0;
    }
    return (any != 0 ? SHOWS | FLOATS : 0u) | (all != 0 ? 0u : CHANGES);
}

/* f16 and bf16 by their bits; `infinity` is that of the format. No finite f16 is too low or too high; 0x7180 is bf16's
 * 2^100. */
static unsigned look_16(const uint16_t *at, int64_t n, uint16_t infinity)
{
    unsigned shown = 0, changed = 0, wild = 0, floats = 0;
    const uint16_t hidden = infinity | 0x8000u;
    const uint16_t high = infinity == 0x7f80 ? 0x7180 : infinity, low = high | 0x8000u;
    for (int64_t j = 0; j < n; j++) {
        const uint16_t bits = at[j], magnitude = bits & 0x7fff;
        shown |= bits != hidden;
        changed |= magnitude != 0;
        wild |= ((magnitude >= infinity) & (bits != hidden)) | ((bits >= high) & (bits < 0x8000));
        floats |= (bits < low);
    }
    return (shown ? SHOWS : 0u) | (changed ? CHANGES : 0u) | (wild ? WILD : 0u) | (floats ? FLOATS : 0u);
}

static unsigned look_32(const float *at, int64_t n)
{
    unsigned shown = 0, changed = 0, wild = 0, floats = 0;
    for (int64_t j = 0; j < n; j++) {
        const float x = at[j];
        shown |= !(x == -INFINITY);
        changed |= !(x == 0.0f);
        wild |= !(x < HIGHEST_ESTIMATE);
        floats |= x > LOWEST_ESTIMATE;
    }
    return (shown ? SHOWS : 0u) | (changed ? CHANGES : 0u) | (wild ? WILD : 0u) | (floats ? FLOATS : 0u);
}

static unsigned look(const apa_tensor *mask, const char *row, int64_t from, int64_t to)
{
    if (from >= to)
        return 0;
    const int64_t n = mask->stride[3] == 0 ? 1 : to - from; /* one value for all keys */
    const char *at = row + from * mask->stride[3] * (int64_t)apa_dtype_bytes(mask->dtype);
    switch (mask->dtype) {
    case APA_DTYPE_BOOL:
        return look_bool((const uint8_t *)at, n);
    case APA_DTYPE_F16:
        return look_16((const uint16_t *)(const void *)at, n, 0x7c00);
    case APA_DTYPE_BF16:
        return look_16((const uint16_t *)(const void *)at, n, 0x7f80);
    default:
        return look_32((const float *)(const void *)at, n);
    }
}

/* Do both registers have the same rows of the mask and the same positions? */
static bool same_rows(const apa_cpu_register *a, const apa_cpu_register *b)
{
    if (a->real != b->real || memcmp(a->mask_row, b->mask_row, sizeof a->mask_row) != 0)
        return false;
    for (int i = 0; i < LANES; i++)
        if (a->row[i].first != b->row[i].first || a->row[i].end != b->row[i].end)
            return false;
    return true;
}

/* One register and one tile; *floating: lanes with a value over LOWEST_ESTIMATE. Rows that several lanes share are read
 * once. */
static uint16_t look_at_tile(const apa_cpu_block *block, int r, int64_t tile, unsigned *found, uint16_t *floating)
{
    const apa_cpu_register *reg = &block->reg[r];
    const apa_tensor *mask = &block->call->mask;
    uint16_t seeing = 0;
    const char *row = NULL;
    int64_t from = 0, to = 0;
    unsigned flags = 0;
    *found = 0;
    for (int i = 0; i < LANES; i++) {
        if ((reg->real >> i & 1) == 0)
            continue;
        const int64_t first = reg->row[i].first > tile * TILE ? reg->row[i].first : tile * TILE;
        const int64_t end = reg->row[i].end < (tile + 1) * TILE ? reg->row[i].end : (tile + 1) * TILE;
        if (reg->mask_row[i] != row || first != from || end != to) {
            row = reg->mask_row[i];
            from = first;
            to = end;
            flags = look(mask, row, from, to);
        }
        *found |= flags;
        seeing |= (uint16_t)((flags & SHOWS) << i);
        if ((flags & FLOATS) != 0)
            *floating |= (uint16_t)(1u << i);
    }
    return seeing;
}

static void scan_register(apa_cpu_block *block, int r, int64_t first, int64_t end)
{
    apa_cpu_bend *bend = &block->bend;
    apa_cpu_register *reg = &block->reg[r];
    uint16_t *seeing = bend->seeing + r * block->shape->tiles;
    const uint16_t bit = (uint16_t)(1u << r);
    uint16_t floating = 0, shown = 0;
    for (int64_t tile = first; tile < end; tile++) {
        unsigned found;
        seeing[tile] = look_at_tile(block, r, tile, &found, &floating);
        shown |= seeing[tile];
        if ((found & CHANGES) != 0)
            bend->bent[tile] |= bit;
        if ((found & WILD) != 0)
            bend->wild[tile] |= bit;
    }
    reg->drowned = (shown & ~floating) != 0;
}

/* What register r-1 has found holds for r. */
static void copy_scan(apa_cpu_block *block, int r, int64_t first, int64_t end)
{
    apa_cpu_bend *bend = &block->bend;
    const int64_t tiles = block->shape->tiles;
    memcpy(bend->seeing + r * tiles + first, bend->seeing + (r - 1) * tiles + first,
           sizeof *bend->seeing * (size_t)(end - first));
    for (int64_t tile = first; tile < end; tile++) {
        bend->bent[tile] |= (uint16_t)((bend->bent[tile] >> (r - 1) & 1) << r);
        bend->wild[tile] |= (uint16_t)((bend->wild[tile] >> (r - 1) & 1) << r);
    }
    block->reg[r].drowned = block->reg[r - 1].drowned;
}

void apa_cpu_bend_scan(apa_cpu_block *block, int64_t first, int64_t end)
{
    apa_cpu_bend *bend = &block->bend;
    if (!bend->masked || first >= end)
        return;
    memset(bend->bent + first, 0, sizeof *bend->bent * (size_t)(end - first));
    memset(bend->wild + first, 0, sizeof *bend->wild * (size_t)(end - first));
    for (int r = 0; r < block->n; r++) {
        if (r > 0 && same_rows(&block->reg[r], &block->reg[r - 1]))
            copy_scan(block, r, first, end);
        else
            scan_register(block, r, first, end);
    }
}

/* ---- into the lanes ---- */

/* Keys of a mask row from `key` on as floats: 0 or -inf for a boolean one. */
static void load_row(const apa_cpu_block *block, const char *row, int64_t key, int64_t n, float *to)
{
    const apa_tensor *mask = &block->call->mask;
    const int64_t one = mask->stride[3] == 0, count = one ? 1 : n;
    const char *at = row + key * mask->stride[3] * (int64_t)apa_dtype_bytes(mask->dtype);
    if (mask->dtype == APA_DTYPE_BOOL)
        for (int64_t j = 0; j < count; j++)
            to[j] = at[j] != 0 ? 0.0f : -INFINITY;
    else
        block->kernels->widen(mask->dtype, at, count, to);
    for (int64_t j = 1; j < n && one; j++)
        to[j] = to[0];
}

static bool same_bias(const apa_cpu_register *a, const apa_cpu_register *b)
{
    return a->real == b->real && memcmp(a->mask_row, b->mask_row, sizeof a->mask_row) == 0 &&
           memcmp(a->mask_slope, b->mask_slope, sizeof a->mask_slope) == 0;
}

/* bias[key][lane] of register r in the tile; keys beyond the sequence and padding lanes get 0. */
static const float *load_bias(apa_cpu_block *block, int r, int64_t tile)
{
    apa_cpu_bend *bend = &block->bend;
    const apa_cpu_register *reg = &block->reg[r];
    if (bend->bias_tile == tile && (bend->bias_register == r || same_bias(reg, &block->reg[bend->bias_register])))
        return bend->bias;
    const int64_t rest = block->call->Skv - tile * TILE, n = rest < TILE ? rest : TILE;
    _Alignas(64) float rows[LANES][TILE] = {{0}};
    for (int i = 0; i < LANES; i++) {
        if (reg->mask_row[i] == NULL)
            continue;
        if (i > 0 && reg->mask_row[i] == reg->mask_row[i - 1] && reg->mask_slope[i] == reg->mask_slope[i - 1]) {
            memcpy(rows[i], rows[i - 1], sizeof rows[i]);
            continue;
        }
        load_row(block, reg->mask_row[i], tile * TILE, n, rows[i]);
        if (reg->mask_slope[i] == 1.0f)
            continue;
        for (int64_t j = 0; j < n; j++) /* -inf leaves out whatever the slope is: 0 times it would be NaN */
            rows[i][j] = rows[i][j] == -INFINITY ? -INFINITY : rows[i][j] * reg->mask_slope[i];
    }
    block->kernels->into_lanes(&rows[0][0], bend->bias);
    bend->bias_tile = tile;
    bend->bias_register = r;
    return bend->bias;
}

void apa_cpu_bend_scores(apa_cpu_block *block, int r, int64_t tile, float *s, int n, const float *factor)
{
    const apa_cpu_bend *bend = &block->bend;
    const apa_cpu_register *reg = &block->reg[r];
    float distance[LANES];
    const bool biased = bend->masked && (bend->bent[tile] >> r & 1) != 0;
    for (int i = 0; i < LANES && bend->alibi; i++) {
        /* As a wide number first: any offset is legal. Beyond 2^24 keys the distance rounds as FP32 does. */
        const double at = (double)reg->row[i].position + (double)block->call->q_offset - (double)(tile * TILE);
        distance[i] = (reg->real >> i & 1) != 0 ? (float)at : 0.0f;
    }
    block->kernels->bend(s, n, factor, bend->cap, bend->alibi ? reg->slope : NULL, distance,
                         biased ? load_bias(block, r, tile) : NULL);
}

uint16_t apa_cpu_bend_shown(apa_cpu_block *block, int r, int64_t tile, int key)
{
    uint16_t shown = 0;
    if (!block->bend.masked || (block->bend.bent[tile] >> r & 1) == 0)
        return 0xffff;
    const float *bias = load_bias(block, r, tile) + key * LANES;
    for (int i = 0; i < LANES; i++)
        shown |= (uint16_t)((bias[i] != -INFINITY) << i);
    return shown;
}
