/* The exact method. A row's bits depend on its own scores and on absolute key positions alone: tiles are walked in
 * rising order inside segments of 2048 keys, each segment starts from the empty state, and segments are merged by a
 * binary counter, which is a balanced tree over absolute segment numbers. Segments that a row doesn't see are empty
 * states, and those change no bit, so chunks, threads, batches and neighbours don't either. (The balanced tree: ELSA,
 * balanced merge, relative error O(u·log n).) */
#include "cpu/exact.h"

#include "cpu/decode.h"

#include "cpu/bend.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE

/* Keys `from` … of a tile that lie one stride apart, into block->k and block->v. */
static void load_run(apa_cpu_block *block, const char *k, const char *v, int64_t from, int64_t n)
{
    const apa_call *call = block->call;
    const int64_t Dp = block->shape->Dp, Dvp = block->shape->Dvp;
    const int64_t k_stride = call->k.stride[2] * (int64_t)apa_dtype_bytes(call->k.dtype);
    const int64_t v_stride = call->v.stride[2] * (int64_t)apa_dtype_bytes(call->v.dtype);
    for (int64_t i = from; i < from + n && block->pairs; i++) {
        uint16_t *to = (uint16_t *)(void *)block->k + i * Dp;
        memcpy(to, k + (i - from) * k_stride, (size_t)call->D * sizeof *to);
        memset(to + call->D, 0, sizeof *to * (size_t)(Dp - call->D));
    }
    if (!block->pairs)
        block->kernels->load_k(call->k.dtype, k, k_stride, n, call->D, Dp, block->k + from * Dp);
    block->v_poison |= block->kernels->load_v(call->v.dtype, v, v_stride, n, call->Dv, Dvp, from, block->v);
}

void apa_cpu_exact_load(apa_cpu_block *block, int64_t tile)
{
    const apa_call *call = block->call;
    const int64_t Dp = block->shape->Dp, Dvp = block->shape->Dvp, start = tile * TILE;
    const int64_t keys = call->Skv - start < TILE ? call->Skv - start : TILE;
    block->v_poison = 0;
    for (int64_t key = 0, n; key < keys; key += n) {
        n = apa_call_run(call, start + key, keys - key);
        load_run(block, apa_call_key(call, &call->k, block->b, block->kv_head, start + key),
                 apa_call_key(call, &call->v, block->b, block->kv_head, start + key), key, n);
    }
    if (keys < TILE) {
        const size_t size = block->pairs ? sizeof(uint16_t) : sizeof(float);
        memset((char *)block->k + (size_t)(keys * Dp) * size, 0, (size_t)((TILE - keys) * Dp) * size);
        for (int64_t c = 0; c < Dvp; c += 8)
            memset(block->v + c / 8 * APA_CPU_V_BLOCK + keys * 8, 0, sizeof *block->v * (size_t)((TILE - keys) * 8));
    }
    if (block->v_poison == 0)
        return;
    memcpy(block->v_raw, block->v, sizeof *block->v * (size_t)(Dvp / 8 * APA_CPU_V_BLOCK));
    for (int64_t key = 0; key < keys; key++)
        for (int64_t c = 0; c < Dvp && (block->v_poison >> key & 1) != 0; c += 8)
            memset(block->v + c / 8 * APA_CPU_V_BLOCK + key * 8, 0, sizeof *block->v * 8);
}

/* Values with a NaN or Inf are zero in block->v and come in here, for the lanes that see their key and for no other:
 * 0·NaN is NaN. */
static void add_poisoned(apa_cpu_block *block, int r, int64_t tile, const float *p, int n, const apa_cpu_span *span)
{
    apa_cpu_register *reg = &block->reg[r];
    for (int key = 0; key < TILE; key++) {
        if ((block->v_poison >> key & 1) == 0)
            continue;
        const uint16_t shown = apa_cpu_bend_shown(block, r, tile, key);
        for (int i = 0; i < LANES; i++) {
            if ((shown >> i & 1) == 0 || (span != NULL && (key < span->lo[i] || key >= span->hi[i])))
                continue;
            for (int64_t c = 0; c < block->shape->Dvp; c++)
                reg->o[c * LANES + i] +=
                    p[key * n * LANES + i] * block->v_raw[c / 8 * APA_CPU_V_BLOCK + key * 8 + c % 8];
        }
    }
}

static void panel(apa_cpu_block *block, int64_t tile, const int *registers, int n, const apa_cpu_span *span,
                  const bool *part, const apa_cpu_prefetch *prefetch)
{
    const apa_cpu_kernels *kernels = block->kernels;
    const float *q[APA_CPU_PANEL_F32];
    const uint32_t *q_pairs[APA_CPU_PANEL_F32];
    float *o[APA_CPU_PANEL_F32];
    for (int r = 0; r < n; r++) {
        q[r] = block->reg[registers[r]].q;
        q_pairs[r] = block->reg[registers[r]].q_pairs;
        o[r] = block->reg[registers[r]].o;
    }
    float maximum[APA_CPU_PANEL_F32 * LANES];
    if (block->pairs)
        kernels->scores_bf16(n, q_pairs, (const uint16_t *)(const void *)block->k, block->shape->Dp, block->s, maximum,
                             prefetch);
    else
        kernels->scores_f32(n, q, block->k, block->shape->Dp, block->s, maximum, prefetch);
    for (int r = 0; r < n; r++) {
        apa_cpu_register *reg = &block->reg[registers[r]];
        float alpha[LANES];
        const bool bends = apa_cpu_bends(block, registers[r], tile);
        if (bends)
            apa_cpu_bend_scores(block, registers[r], tile, block->s + r * LANES, n, NULL);
        if (kernels->softmax_f32(block->s + r * LANES, n, block->c, part[r] ? &span[r] : NULL,
                                 bends || part[r] ? NULL : maximum + r * LANES, &reg->state, alpha))
            kernels->scale_lanes(reg->o, block->shape->Dvp, alpha);
    }
    kernels->pv_f32(n, block->s, block->v, block->shape->Dvp, o);
    if (block->v_poison != 0)
        for (int r = 0; r < n; r++)
            add_poisoned(block, registers[r], tile, block->s + r * LANES, n, part[r] ? &span[r] : NULL);
}

/* K and V rows first … end-1 of the head, as far as they lie one stride apart; those on further pages are asked for
 * here. */
static apa_cpu_prefetch rows_ahead(const apa_cpu_block *block, int64_t first, int64_t end)
{
    const apa_call *call = block->call;
    const int64_t k_bytes = (int64_t)apa_dtype_bytes(call->k.dtype), v_bytes = (int64_t)apa_dtype_bytes(call->v.dtype);
    apa_cpu_prefetch ahead = {.stride = {call->k.stride[2] * k_bytes, call->v.stride[2] * v_bytes},
                              .bytes = {call->D * k_bytes, call->Dv * v_bytes}};
    if (first >= end)
        return ahead;
    ahead.rows = apa_call_run(call, first, end - first);
    ahead.row[0] = apa_call_key(call, &call->k, block->b, block->kv_head, first);
    ahead.row[1] = apa_call_key(call, &call->v, block->b, block->kv_head, first);
    for (int64_t key = first + ahead.rows; key < end; key++)
        for (int set = 0; set < 2; set++) {
            const char *row = apa_call_key(call, set == 0 ? &call->k : &call->v, block->b, block->kv_head, key);
            for (int64_t byte = 0; byte < ahead.bytes[set]; byte += 64)
                __builtin_prefetch(row + byte);
        }
    return ahead;
}

void apa_cpu_exact_tile(apa_cpu_block *block, int64_t tile, const int *registers, int n, int64_t next)
{
    int chosen[APA_CPU_BLOCK_REGISTERS], count = 0;
    apa_cpu_span span[APA_CPU_BLOCK_REGISTERS];
    bool part[APA_CPU_BLOCK_REGISTERS];
    for (int i = 0; i < n; i++) {
        const apa_cpu_view view = apa_cpu_block_view(block, registers[i], tile, &span[count]);
        if (view == APA_CPU_VIEW_NONE)
            continue;
        part[count] = view == APA_CPU_VIEW_PART;
        chosen[count++] = registers[i];
    }
    /* Panels of like size: a lone register waits for loads. Each asks for its share of the tile to come. */
    const int panels = (count + APA_CPU_PANEL_F32 - 1) / APA_CPU_PANEL_F32;
    const int64_t rest = block->call->Skv - next * TILE, ahead = next < 0 ? 0 : rest < TILE ? rest : TILE;
    for (int i = 0; i < panels; i++) {
        const int first = count * i / panels, end = count * (i + 1) / panels;
        const int64_t from = next * TILE + ahead * i / panels, to = next * TILE + ahead * (i + 1) / panels;
        const apa_cpu_prefetch prefetch = rows_ahead(block, from, to);
        panel(block, tile, chosen + first, end - first, span + first, part + first, &prefetch);
    }
}

void apa_cpu_node_layout(const apa_cpu_shape *shape, apa_cpu_arena *arena, apa_cpu_node *node)
{
    node->o = apa_cpu_take(arena, shape->block_registers * shape->Dvp * LANES, sizeof(float));
    node->state = apa_cpu_take(arena, shape->block_registers, sizeof(apa_cpu_state));
}

void apa_cpu_node_save(const apa_cpu_block *block, const apa_cpu_node *node)
{
    const int64_t size = block->shape->Dvp * LANES;
    for (int r = 0; r < block->n; r++) {
        memcpy(node->o + r * size, block->reg[r].o, sizeof(float) * (size_t)size);
        node->state[r] = block->reg[r].state;
    }
}

static void load_node(apa_cpu_block *block, const apa_cpu_node *node)
{
    const int64_t size = block->shape->Dvp * LANES;
    for (int r = 0; r < block->n; r++) {
        memcpy(block->reg[r].o, node->o + r * size, sizeof(float) * (size_t)size);
        block->reg[r].state = node->state[r];
    }
}

void apa_cpu_node_merge(apa_cpu_block *block, const apa_cpu_node *node)
{
    const int64_t Dvp = block->shape->Dvp;
    for (int r = 0; r < block->n; r++)
        block->kernels->merge_lanes(&node->state[r], node->o + r * Dvp * LANES, block->c, Dvp, &block->reg[r].state,
                                    block->reg[r].o);
}

/* Number `count` (from 0) of a sequence of states joins the binary counter: full levels are merged upwards. */
static void counter_push(apa_cpu_block *block, const apa_cpu_node *level, int64_t count)
{
    int i = 0;
    for (; (count >> i & 1) != 0; i++)
        apa_cpu_node_merge(block, &level[i]);
    apa_cpu_node_save(block, &level[i]);
}

/* Merges what `count` pushes have left, low levels first, into the block. */
static void counter_finish(apa_cpu_block *block, const apa_cpu_node *level, int64_t count)
{
    bool first = true;
    for (int i = 0; count >> i != 0; i++) {
        if ((count >> i & 1) == 0)
            continue;
        if (first)
            load_node(block, &level[i]);
        else
            apa_cpu_node_merge(block, &level[i]);
        first = false;
    }
    if (first)
        apa_cpu_block_clear(block);
}

/* First tile from `tile` on that some row sees; only a mask leaves out tiles between the first and the last. */
static int64_t next_seen(const apa_cpu_block *block, int64_t tile, int64_t end)
{
    while (tile < end && block->bend.masked && !apa_cpu_block_sees(block, tile))
        tile++;
    return tile;
}

static void segment(apa_cpu_block *block, int64_t first, int64_t end)
{
    int all[APA_CPU_BLOCK_REGISTERS];
    if (apa_cpu_decode_applies(block)) {
        apa_cpu_decode_segment(block, first, end);
        return;
    }
    for (int r = 0; r < block->n; r++)
        all[r] = r;
    apa_cpu_block_clear(block);
    for (int64_t tile = next_seen(block, first, end), next; tile < end; tile = next) {
        next = next_seen(block, tile + 1, end);
        apa_cpu_exact_load(block, tile);
        apa_cpu_exact_tile(block, tile, all, block->n, next < end ? next : -1);
    }
}

void apa_cpu_exact_chunk_tiles(const apa_cpu_shape *shape, int64_t chunk, int64_t *start, int64_t *stop)
{
    const int64_t tiles = shape->chunk_segments * APA_CPU_SEGMENT_TILES;
    *start = chunk * tiles;
    *stop = *start + tiles < shape->tiles ? *start + tiles : shape->tiles;
}

void apa_cpu_exact_chunk(apa_cpu_block *block, int64_t chunk, const apa_cpu_node *level)
{
    int64_t start, stop, first, end, count = 0;
    apa_cpu_exact_chunk_tiles(block->shape, chunk, &start, &stop);
    apa_cpu_block_tiles(block, &first, &end);
    end = end < stop ? end : stop;
    apa_cpu_bend_scan(block, first > start ? first : start, end);
    for (int64_t at = start; at < end; at += APA_CPU_SEGMENT_TILES, count++) {
        const int64_t last = at + APA_CPU_SEGMENT_TILES < end ? at + APA_CPU_SEGMENT_TILES : end;
        segment(block, at > first ? at : first, last);
        counter_push(block, level, count);
    }
    counter_finish(block, level, count);
}

void apa_cpu_exact_merge_chunks(apa_cpu_block *block, const apa_cpu_node *chunk, int64_t count,
                                const apa_cpu_node *level)
{
    for (int64_t i = 0; i < count; i++) {
        load_node(block, &chunk[i]);
        counter_push(block, level, i);
    }
    counter_finish(block, level, count);
}
