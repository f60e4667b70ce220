/* Few rows: see cpu/decode.h. */
#include "cpu/decode.h"

#include <math.h>
#include <string.h>

#define LANES APA_CPU_LANES
#define TILE APA_CPU_TILE
#define FEW APA_CPU_FEW
#define LARGEST_DIM 1024

/* The block's rows as lanes 0 … R-1 of one register, and what is known of them so far. */
typedef struct few_rows {
    int R, reg[FEW], lane[FEW];
    int64_t first[FEW], end[FEW]; /* visible keys */
    int64_t Do;
    apa_cpu_state state;
    float q[LARGEST_DIM * FEW] __attribute__((aligned(64))); /* [D][FEW] */
    float o[FEW * LARGEST_DIM] __attribute__((aligned(64))); /* [FEW][Do] */
} few_rows;

static int count_rows(const apa_cpu_block *block)
{
    int rows = 0;
    for (int r = 0; r < block->n; r++)
        rows += __builtin_popcount(block->reg[r].real);
    return rows;
}

bool apa_cpu_decode_applies(const apa_cpu_block *block)
{
    /* Where BF16 keys go through the BF16 dot product, queries must be BF16 too. */
    const bool narrow = block->call->k.dtype == APA_DTYPE_BF16 && block->kernels->scores_bf16 != NULL && !block->pairs;
    return !block->bend.changes && !narrow && count_rows(block) <= FEW;
}

static int64_t up_to_16(int64_t n)
{
    return (n + 15) / 16 * 16;
}

static void take_rows(const apa_cpu_block *block, few_rows *few)
{
    few->R = 0;
    few->Do = up_to_16(block->call->Dv);
    memset(few->q, 0, sizeof *few->q * (size_t)(up_to_16(block->call->D) * FEW));
    memset(few->o, 0, sizeof *few->o * (size_t)(FEW * few->Do));
    for (int i = 0; i < LANES; i++) {
        few->state.frame[i] = -INFINITY;
        few->state.sum[i] = 0.0f;
    }
    for (int r = 0; r < block->n; r++)
        for (int i = 0; i < LANES; i++) {
            const apa_cpu_register *reg = &block->reg[r];
            if ((reg->real >> i & 1) == 0)
                continue;
            few->reg[few->R] = r;
            few->lane[few->R] = i;
            few->first[few->R] = reg->row[i].first;
            few->end[few->R] = reg->row[i].end;
            for (int64_t d = 0; d < block->call->D; d++)
                few->q[d * FEW + few->R] = reg->q[d * LANES + i];
            few->R++;
        }
}

static void give_rows(apa_cpu_block *block, const few_rows *few)
{
    apa_cpu_block_clear(block);
    for (int row = 0; row < few->R; row++) {
        apa_cpu_register *reg = &block->reg[few->reg[row]];
        const int i = few->lane[row];
        reg->state.frame[i] = few->state.frame[row];
        reg->state.sum[i] = few->state.sum[row];
        for (int64_t c = 0; c < block->call->Dv; c++)
            reg->o[c * LANES + i] = few->o[row * few->Do + c];
    }
}

/* Which keys of a tile the rows see; lanes without a row see none. Returns whether any row sees any, and in *all
 * whether every row sees every one. */
static bool look_at(const few_rows *few, int64_t tile, apa_cpu_span *span, bool *all)
{
    bool any = false;
    *all = true;
    memset(span, 0, sizeof *span);
    for (int row = 0; row < few->R; row++) {
        const int64_t lo = few->first[row] - tile * TILE, hi = few->end[row] - tile * TILE;
        span->lo[row] = (int32_t)(lo < 0 ? 0 : lo > TILE ? TILE : lo);
        span->hi[row] = (int32_t)(hi < 0 ? 0 : hi > TILE ? TILE : hi);
        any = any || span->lo[row] < span->hi[row];
        *all = *all && span->lo[row] == 0 && span->hi[row] == TILE;
    }
    return any;
}

/* P·V of a tile with a NaN or Inf in some value, as the other way does it: such values count as zeros in the sums and
 * are added one by one to the rows that see them. */
static void add_values_with_care(const apa_cpu_block *block, few_rows *few, const void *const *values, int n,
                                 const apa_cpu_span *span, const float *alpha)
{
    static const uint64_t zeros[LARGEST_DIM * sizeof(float) / sizeof(uint64_t)] = {0};
    const apa_call *call = block->call;
    const void *cleaned[TILE];
    const float *p = block->s;
    float v[LARGEST_DIM] = {0.0f};
    for (int key = 0; key < n; key++)
        cleaned[key] = block->kernels->widen(call->v.dtype, values[key], call->Dv, v) ? values[key] : zeros;
    block->kernels->pv_few(call->v.dtype, cleaned, n, call->Dv, NULL, few->R, p, alpha, false, few->o);
    for (int key = 0; key < n; key++) {
        if (cleaned[key] == values[key])
            continue;
        block->kernels->widen(call->v.dtype, values[key], call->Dv, v);
        for (int row = 0; row < few->R; row++)
            for (int64_t c = 0; c < call->Dv && span->lo[row] <= key && key < span->hi[row]; c++)
                few->o[row * few->Do + c] += p[row * TILE + key] * v[c];
    }
}

/* Rows of a tile of K or V. Returns how many. */
static int rows_of(const apa_cpu_block *block, const apa_tensor *tensor, int64_t tile, const void **rows)
{
    const apa_call *call = block->call;
    const int64_t start = tile * TILE, keys = call->Skv - start < TILE ? call->Skv - start : TILE;
    const int64_t step = tensor->stride[2] * (int64_t)apa_dtype_bytes(tensor->dtype);
    for (int64_t i = 0, n; i < keys; i += n) {
        const char *row = apa_call_key(call, tensor, block->b, block->kv_head, start + i);
        n = apa_call_run(call, start + i, keys - i);
        for (int64_t j = 0; j < n; j++)
            rows[i + j] = row + j * step;
    }
    return (int)keys;
}

/* Two tiles' rows of K and of V: the one at hand and the next. Scores ask for the values of their tile and P·V for the
 * next keys: two tiles' parts lie in the first-level cache then, not four, which would drive each other out. */
typedef struct tile_rows {
    const void *k[2][TILE], *v[2][TILE];
    int n[2];
} tile_rows;

static void fill_rows(const apa_cpu_block *block, int64_t tile, int at, tile_rows *rows)
{
    rows_of(block, &block->call->k, tile, rows->k[at]);
    rows->n[at] = rows_of(block, &block->call->v, tile, rows->v[at]);
}

/* Keys of a segment's first tile that no tile before has asked for: all at once, but in order. */
static void ask_for_keys(const apa_cpu_block *block, const tile_rows *rows, int at)
{
    const int64_t bytes = block->call->D * (int64_t)apa_dtype_bytes(block->call->k.dtype);
    for (int i = 0; i < rows->n[at]; i++)
        for (int64_t byte = 0; byte < bytes; byte += 64)
            __builtin_prefetch((const char *)rows->k[at][i] + byte);
}

/* Does some row see a tile from `tile` on? The next segment's first tile is asked for like any other. */
static bool goes_on(const apa_cpu_block *block, const few_rows *few, int64_t tile)
{
    bool sees = false;
    for (int row = 0; row < few->R; row++)
        sees = sees || few->end[row] > tile * TILE;
    return sees && tile < block->shape->tiles;
}

static void one_tile(apa_cpu_block *block, few_rows *few, const tile_rows *rows, int at, bool has_next,
                     const apa_cpu_span *span)
{
    const apa_cpu_kernels *kernels = block->kernels;
    const apa_call *call = block->call;
    const int n = rows->n[at];
    const apa_cpu_ahead values = {rows->v[at], n, call->Dv * (int64_t)apa_dtype_bytes(call->v.dtype)};
    const apa_cpu_ahead keys = {rows->k[!at], rows->n[!at], call->D * (int64_t)apa_dtype_bytes(call->k.dtype)};
    float alpha[LANES];
    kernels->scores_few(call->k.dtype, rows->k[at], n, call->D, &values, few->R, few->q, block->s);
    kernels->softmax_few(few->R, block->s, block->c, span, &few->state, alpha);
    if (!kernels->pv_few(call->v.dtype, rows->v[at], n, call->Dv, has_next ? &keys : NULL, few->R, block->s, alpha,
                         true, few->o)) {
        apa_cpu_span all = {{0}, {0}};
        for (int row = 0; row < few->R; row++)
            all.hi[row] = TILE;
        add_values_with_care(block, few, rows->v[at], n, span != NULL ? span : &all, alpha);
    }
}

void apa_cpu_decode_segment(apa_cpu_block *block, int64_t first, int64_t end)
{
    few_rows few;
    tile_rows rows;
    int at = 0;
    take_rows(block, &few);
    if (first < end) {
        fill_rows(block, first, at, &rows);
        ask_for_keys(block, &rows, at);
    }
    for (int64_t tile = first; tile < end; tile++, at = !at) {
        const bool has_next = tile + 1 < end || goes_on(block, &few, tile + 1);
        apa_cpu_span span;
        bool all;
        if (has_next)
            fill_rows(block, tile + 1, !at, &rows);
        if (look_at(&few, tile, &span, &all))
            one_tile(block, &few, &rows, at, has_next, all ? NULL : &span);
    }
    give_rows(block, &few);
}
