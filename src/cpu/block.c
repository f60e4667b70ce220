/* Loading and storing a block; visibility. */
#include "cpu/block.h"

#include "cpu/bend.h"

#include <math.h>
#include <string.h>

#define LARGEST_DIM 1024
#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define LOG2_E 1.4426950408889634074
#define LN_2 0.69314718055994530942

void apa_cpu_block_layout(const apa_cpu_shape *shape, apa_cpu_arena *arena, apa_cpu_block *block)
{
    /* One line of padding between registers: their rows would lie a multiple of 4 KiB apart otherwise. */
    float *q = apa_cpu_take(arena, shape->block_registers * (shape->Dp + 1) * LANES, sizeof(float));
    uint32_t *q_pairs = apa_cpu_take(arena, shape->block_registers * (shape->Dp / 2 + 1) * LANES, sizeof *q_pairs);
    float *o = apa_cpu_take(arena, shape->block_registers * (shape->Dvp + 1) * LANES, sizeof(float));
    float *k = apa_cpu_take(arena, TILE * shape->Dp, sizeof(float));
    float *v = apa_cpu_take(arena, shape->Dvp / 8 * APA_CPU_V_BLOCK, sizeof(float));
    float *v_raw = apa_cpu_take(arena, shape->Dvp / 8 * APA_CPU_V_BLOCK, sizeof(float));
    float *s = apa_cpu_take(arena, TILE * APA_CPU_PANEL_I8 * LANES, sizeof(float));
    apa_cpu_bend_layout(shape, arena, block);
    if (arena->base == NULL)
        return;
    for (int r = 0; r < shape->block_registers; r++) {
        block->reg[r].q = q + r * (shape->Dp + 1) * LANES;
        block->reg[r].q_pairs = q_pairs + r * (shape->Dp / 2 + 1) * LANES;
        block->reg[r].o = o + r * (shape->Dvp + 1) * LANES;
    }
    block->k = k;
    block->v = v;
    block->v_raw = v_raw;
    block->s = s;
}

static bool row_is_padding(const apa_cpu_register *reg, int lane)
{
    return (reg->real >> lane & 1) == 0;
}

static void set_rows(apa_cpu_block *block, apa_cpu_register *reg, int64_t first_row)
{
    const apa_call *call = block->call;
    const int64_t rows = apa_call_rows(call);
    int some = -1;
    reg->real = 0;
    for (int i = 0; i < LANES; i++) {
        apa_cpu_row *row = &reg->row[i];
        row->position = -1;
        if (first_row + i >= rows)
            continue;
        int64_t position, head;
        apa_call_row(call, first_row + i, &position, &head);
        if (position >= call->Sq)
            continue;
        row->position = position;
        row->head = block->kv_head * call->G + head;
        apa_call_visible(call, position, &row->first, &row->end);
        reg->real |= (uint16_t)(1u << i);
        some = i;
    }
    /* Padding lanes see what a real lane sees, so that they never make a tile partly visible; they never vote. */
    for (int i = 0; i < LANES; i++)
        if (row_is_padding(reg, i)) {
            reg->row[i].first = some < 0 ? 0 : reg->row[some].first;
            reg->row[i].end = some < 0 ? 0 : reg->row[some].end;
        }
    reg->any_first = reg->every_first = reg->row[0].first;
    reg->any_end = reg->every_end = reg->row[0].end;
    bool any = false;
    for (int i = 0; i < LANES; i++) {
        const apa_cpu_row *row = &reg->row[i];
        reg->every_first = row->first > reg->every_first ? row->first : reg->every_first;
        reg->every_end = row->end < reg->every_end ? row->end : reg->every_end;
        if (row->first >= row->end)
            continue;
        reg->any_first = !any || row->first < reg->any_first ? row->first : reg->any_first;
        reg->any_end = !any || row->end > reg->any_end ? row->end : reg->any_end;
        any = true;
    }
    if (!any)
        reg->any_first = reg->any_end = 0;
}

static const char *query_row(const apa_call *call, int64_t b, const apa_cpu_row *row)
{
    const int64_t offset = b * call->q.stride[0] + row->head * call->q.stride[1] + row->position * call->q.stride[2];
    return (const char *)call->q.data + offset * (int64_t)apa_dtype_bytes(call->q.dtype);
}

/* What Q is multiplied by: the sign of a negative softmax scale, or all of it where scores are to be natural. */
static float query_factor(const apa_call *call)
{
    if (!apa_call_changes_scores(call))
        return call->scale < 0.0 ? -1.0f : 1.0f;
    return (float)(call->softcap > 0.0 ? call->scale / call->softcap : call->scale);
}

/* Q into the lanes. */
static void load_queries(apa_cpu_block *block, apa_cpu_register *reg)
{
    const apa_call *call = block->call;
    const float factor = query_factor(call);
    float row[LARGEST_DIM];
    memset(reg->q, 0, sizeof *reg->q * (size_t)(block->shape->Dp * LANES));
    reg->finite = true;
    for (int i = 0; i < LANES; i++) {
        if (row_is_padding(reg, i))
            continue;
        if (!block->kernels->widen(call->q.dtype, query_row(call, block->b, &reg->row[i]), call->D, row))
            reg->finite = false;
        for (int64_t d = 0; d < call->D; d++)
            reg->q[d * LANES + i] = factor * row[d];
    }
}

/* The same as pairs of BF16 values: the upper halves of floats that are such values. */
static void pair_queries(const apa_cpu_block *block, apa_cpu_register *reg)
{
    for (int64_t d = 0; d < block->shape->Dp; d += 2)
        for (int i = 0; i < LANES; i++) {
            uint32_t even, odd;
            memcpy(&even, &reg->q[d * LANES + i], sizeof even);
            memcpy(&odd, &reg->q[(d + 1) * LANES + i], sizeof odd);
            reg->q_pairs[d / 2 * LANES + i] = even >> 16 | (odd & 0xffff0000u);
        }
}

void apa_cpu_block_load(apa_cpu_block *block, const apa_call *call, const apa_cpu_shape *shape,
                        const apa_cpu_kernels *kernels, int64_t unit)
{
    block->call = call;
    block->shape = shape;
    block->kernels = kernels;
    const int64_t index = unit % shape->blocks, head = unit / shape->blocks;
    block->b = head / call->Hkv;
    block->kv_head = head % call->Hkv;
    block->head = head;
    block->c = (float)(apa_call_changes_scores(call) ? LOG2_E : fabs(call->scale) * LOG2_E);
    block->pairs = kernels->scores_bf16 != NULL && call->q.dtype == APA_DTYPE_BF16 && call->k.dtype == APA_DTYPE_BF16 &&
                   !apa_call_changes_scores(call);
    const int64_t first = index * shape->block_registers, rest = shape->registers - first;
    block->n = (int)(rest < shape->block_registers ? rest : shape->block_registers);
    for (int r = 0; r < block->n; r++) {
        set_rows(block, &block->reg[r], (first + r) * LANES);
        load_queries(block, &block->reg[r]);
        if (block->pairs)
            pair_queries(block, &block->reg[r]);
        memset(block->reg[r].shift, 0, sizeof block->reg[r].shift);
    }
    apa_cpu_bend_load(block);
}

static uint16_t shown_by_mask(const apa_cpu_block *block, int r, int64_t tile)
{
    return block->bend.masked ? block->bend.seeing[r * block->shape->tiles + tile] : (uint16_t)0xffff;
}

apa_cpu_view apa_cpu_block_view(const apa_cpu_block *block, int r, int64_t tile, apa_cpu_span *span)
{
    const apa_cpu_register *reg = &block->reg[r];
    const int64_t start = tile * TILE, stop = start + TILE;
    if (stop <= reg->any_first || start >= reg->any_end || shown_by_mask(block, r, tile) == 0)
        return APA_CPU_VIEW_NONE;
    if (reg->every_first <= start && stop <= reg->every_end)
        return APA_CPU_VIEW_ALL;
    bool any = false;
    for (int i = 0; i < LANES; i++) {
        const int64_t lo = reg->row[i].first - start, hi = reg->row[i].end - start;
        span->lo[i] = (int32_t)(lo < 0 ? 0 : lo > TILE ? TILE : lo);
        span->hi[i] = (int32_t)(hi < 0 ? 0 : hi > TILE ? TILE : hi);
        any = any || span->lo[i] < span->hi[i];
    }
    return any ? APA_CPU_VIEW_PART : APA_CPU_VIEW_NONE;
}

void apa_cpu_block_tiles(const apa_cpu_block *block, int64_t *first, int64_t *end)
{
    *first = *end = 0;
    for (int r = 0; r < block->n; r++) {
        const apa_cpu_register *reg = &block->reg[r];
        if (reg->any_first >= reg->any_end)
            continue;
        const int64_t from = reg->any_first / TILE, to = (reg->any_end + TILE - 1) / TILE;
        *first = *end == 0 || from < *first ? from : *first;
        *end = to > *end ? to : *end;
    }
}

uint16_t apa_cpu_block_seeing(const apa_cpu_block *block, int r, int64_t tile)
{
    const apa_cpu_register *reg = &block->reg[r];
    uint16_t lanes = 0;
    if ((tile + 1) * TILE <= reg->any_first || tile * TILE >= reg->any_end)
        return 0;
    if (block->bend.masked)
        return shown_by_mask(block, r, tile) & reg->real;
    if (reg->every_first <= tile * TILE && (tile + 1) * TILE <= reg->every_end)
        return reg->real;
    for (int i = 0; i < LANES; i++) {
        const apa_cpu_row *row = &reg->row[i];
        if (row->first < row->end && row->first < (tile + 1) * TILE && row->end > tile * TILE)
            lanes |= (uint16_t)(1u << i);
    }
    return lanes & reg->real;
}

bool apa_cpu_block_sees(const apa_cpu_block *block, int64_t tile)
{
    bool any = false;
    for (int r = 0; r < block->n && !any; r++)
        any = apa_cpu_block_seeing(block, r, tile) != 0;
    return any;
}

void apa_cpu_block_clear(apa_cpu_block *block)
{
    for (int r = 0; r < block->n; r++) {
        apa_cpu_register *reg = &block->reg[r];
        memset(reg->o, 0, sizeof *reg->o * (size_t)(block->shape->Dvp * LANES));
        for (int i = 0; i < LANES; i++) {
            reg->state.frame[i] = -INFINITY;
            reg->state.sum[i] = 0.0f;
        }
    }
}

static char *output_row(const apa_tensor *tensor, int64_t b, const apa_cpu_row *row)
{
    const int64_t offset = b * tensor->stride[0] + row->head * tensor->stride[1] + row->position * tensor->stride[2];
    return (char *)tensor->data + offset * (int64_t)apa_dtype_bytes(tensor->dtype);
}

/* A sink joins the denominator: total = sum·2^(frame·c) + e^sink. The row's natural LSE becomes ln(total), its sums are
 * to be divided by sum·(1 + e^(sink - lse)), which may overflow: o is 0 then. In double, so that neither has to be in
 * the other's range; a sink of -inf changes no bit. */
static double join_sink(const apa_cpu_block *block, const apa_cpu_row *row, double lse, double *divisor)
{
    const double sink = (double)apa_call_per_head(&block->call->sinks, block->b, row->head);
    if (sink == -INFINITY)
        return lse;
    const double top = sink > lse ? sink : lse, own = lse == top ? 1.0 : exp(lse - top);
    const double total = own + (sink == top ? 1.0 : exp(sink - top));
    *divisor *= total / own;
    return top + log(total) + (sink != sink ? sink : 0.0);
}

/* A row that saw no key has sum 0: its output is 0 and its LSE -inf (or its sink), by selection. */
static double finish_row(const apa_cpu_block *block, const apa_cpu_register *reg, int lane, double *divisor)
{
    const double sum = reg->state.sum[lane], frame = reg->state.frame[lane];
    double lse = sum == 0.0 ? -INFINITY : (frame * (double)block->c + log2(sum)) * LN_2;
    *divisor = sum == 0.0 ? 1.0 : sum;
    if (block->call->sinks.dtype != APA_DTYPE_NONE)
        lse = join_sink(block, &reg->row[lane], lse, divisor);
    return lse;
}

static void store_register(apa_cpu_block *block, apa_cpu_register *reg)
{
    const apa_call *call = block->call;
    float row[LARGEST_DIM], divisor[LANES];
    double lse[LANES];
    for (int i = 0; i < LANES; i++) {
        double exact = 1.0;
        lse[i] = row_is_padding(reg, i) ? 0.0 : finish_row(block, reg, i, &exact);
        divisor[i] = (float)exact;
    }
    for (int64_t c = 0; c < call->Dv; c++)
        for (int i = 0; i < LANES; i++)
            reg->o[c * LANES + i] /= divisor[i];
    for (int i = 0; i < LANES; i++) {
        if (row_is_padding(reg, i))
            continue;
        for (int64_t c = 0; c < call->Dv; c++)
            row[c] = reg->o[c * LANES + i];
        block->kernels->narrow(call->out.dtype, row, call->Dv, output_row(&call->out, block->b, &reg->row[i]));
        if (call->lse.dtype != APA_DTYPE_NONE)
            *(float *)output_row(&call->lse, block->b, &reg->row[i]) = (float)lse[i];
    }
}

void apa_cpu_block_store(apa_cpu_block *block)
{
    for (int r = 0; r < block->n; r++)
        store_register(block, &block->reg[r]);
}
