/* Descriptors as no caller should write them: any dtype, shape, stride, offset, window, table. The plan answers with a
 * status and one line, or takes the problem; what it takes and is small enough is then run in memory that is exactly as
 * large as the strides reach, so that the sanitizers see one element too many. */
#include "apa/apa.h"
#include "fuzz/fuzz.h"

#include <math.h>
#include <string.h>

enum { NUMBERS = 9, MOST_BYTES = 1 << 16, MOST_PAIRS = 1 << 15, MOST_WORKSPACE = 1 << 26 };

typedef struct bytes {
    const uint8_t *at, *end;
} bytes;

static uint8_t next(bytes *from)
{
    return from->at < from->end ? *from->at++ : 0;
}

/* Small numbers mostly, now and then one at an edge. */
static int64_t number(bytes *from)
{
    static const int64_t edges[] = {
        -1, INT64_MIN, INT64_MAX, INT32_MAX, (int64_t)1 << 32, (int64_t)1 << 59, INT64_MIN + 1, 1025, 64};
    const uint8_t x = next(from);
    return x < 240 ? x % 9 : edges[x % 9];
}

static double real(bytes *from)
{
    static const double edges[] = {0, NAN, INFINITY, -1, 1, 1e-300, 1e300, 0.125, 30};
    return edges[next(from) % 9];
}

/* First and last element that the strides reach, from data. False: nothing, or too much. */
static int reach(const apa_tensor *x, int64_t *low, int64_t *high)
{
    *low = *high = 0;
    for (int i = 0; i < 4; i++) {
        int64_t span;
        if (x->shape[i] == 0)
            return 0;
        if (__builtin_mul_overflow(x->stride[i], x->shape[i] - 1, &span) || span > MOST_BYTES || span < -MOST_BYTES)
            return 0;
        *(span < 0 ? low : high) += span;
    }
    return (*high - *low + 1) * 8 <= MOST_BYTES;
}

static apa_tensor describe(bytes *from)
{
    apa_tensor x = {.dtype = (apa_dtype)(next(from) % 8)};
    const uint8_t how = next(from);
    for (int i = 0; i < 4; i++)
        x.shape[i] = number(from);
    if (how < 200) { /* sound strides */
        int64_t stride = 1;
        for (int i = 3; i >= 0; i--) {
            x.stride[i] = stride;
            if (__builtin_mul_overflow(stride, x.shape[i], &stride))
                stride = 1;
        }
    }
    for (int i = 0; i < 4 && how >= 160; i++)
        x.stride[i] = i == 3 && how < 250 ? 1 : number(from);
    return x;
}

/* The shapes that go with q's, so that many descriptors get past the first check. */
static void match(apa_problem *p, bytes *from)
{
    const int64_t *q = p->q.shape;
    if (next(from) >= 200)
        return;
    const int64_t Hkv = q[1] > 1 && q[1] % 2 == 0 ? q[1] / 2 : 1, Skv = number(from), Dv = number(from);
    p->k = apa_tensor_hnd(NULL, p->q.dtype, q[0], Hkv, Skv, q[3]);
    p->v = apa_tensor_hnd(NULL, p->q.dtype, q[0], Hkv, Skv, Dv);
    p->out = apa_tensor_hnd(NULL, p->out.dtype, q[0], q[1], q[2], Dv);
    p->lse = apa_tensor_hnd(NULL, next(from) % 2 ? APA_DTYPE_F32 : APA_DTYPE_NONE, q[0], q[1], q[2], 1);
}

typedef struct tables {
    int64_t cu_q[NUMBERS], cu_k[NUMBERS], used[NUMBERS], offsets[NUMBERS];
    int32_t pages[NUMBERS * NUMBERS];
} tables;

/* The arrays are as long as the contract asks for: batch + 1, batch, batch rows of the table. */
static void sequences(apa_problem *p, bytes *from, tables *t)
{
    const uint8_t which = next(from);
    const int64_t rows = which % 2 ? next(from) % (NUMBERS - 1) : p->q.shape[0];
    for (int i = 0; i < NUMBERS; i++) {
        t->cu_q[i] = (int64_t)((i == 0 ? 0 : (uint64_t)t->cu_q[i - 1]) + (uint64_t)number(from));
        t->cu_k[i] = (i == 0 ? 0 : t->cu_k[i - 1]) + next(from) % 5;
        t->used[i] = number(from);
        t->offsets[i] = number(from);
    }
    for (int i = 0; i < NUMBERS * NUMBERS; i++)
        t->pages[i] = (int32_t)number(from);
    if (rows < 0 || rows >= NUMBERS)
        return;
    p->batch = rows;
    p->cu_seqlens_q = which & 1 ? t->cu_q : NULL;
    p->cu_seqlens_k = (which & 3) == 3 ? t->cu_k : NULL;
    p->seqused_k = which & 4 ? t->used : NULL;
    p->q_offsets = which & 8 ? t->offsets : NULL;
    p->block_table = which & 16 ? t->pages : NULL;
    p->block_table_stride = which & 32 ? number(from) : NUMBERS;
    if (p->block_table != NULL && (p->block_table_stride > NUMBERS || p->k.shape[2] < 1))
        p->block_table = NULL; /* a row of the table must be as long as its stride says */
}

static apa_problem build(bytes *from, tables *t)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = describe(from);
    p.k = describe(from);
    p.v = describe(from);
    p.out = describe(from);
    p.lse = describe(from);
    match(&p, from);
    p.softmax_scale = real(from);
    p.causal = (int32_t)(next(from) % 5) - 1;
    p.q_offset = next(from) % 4 ? APA_Q_OFFSET_DEFAULT : number(from);
    p.window_left = next(from) % 2 ? -1 : number(from);
    p.window_right = next(from) % 2 ? -1 : number(from);
    p.softcap = next(from) % 2 ? 0 : real(from);
    const uint8_t given = next(from);
    if (given & 1)
        p.attn_mask = describe(from);
    if (given & 2) /* repeats everywhere */
        p.attn_mask = apa_tensor_hnd(NULL, (apa_dtype)(next(from) % 8), 1, 1, 1, 1);
    if (given & 4)
        p.sinks = given & 8 ? describe(from) : apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, p.q.shape[1], 1, 1);
    if (given & 16)
        p.alibi_slopes = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, p.q.shape[1], 1, 1);
    if (given & 32)
        p.mask_slopes = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, p.q.shape[1], 1, 1);
    if (given & 64)
        sequences(&p, from, t);
    if (given == 255)
        p.size = 3;
    return p;
}

static apa_context *context;

static void run(apa_problem *p, const apa_recipe *recipe, const apa_attention_options *options)
{
    apa_tensor *const all[] = {
        &p->q, &p->k, &p->v, &p->out, &p->lse, &p->attn_mask, &p->mask_slopes, &p->alibi_slopes, &p->sinks};
    void *memory[9] = {NULL};
    int fits = 1;
    double pairs = (double)p->q.shape[0] * (double)p->q.shape[1] * (double)p->q.shape[2] * (double)p->k.shape[2];
    if (p->block_table != NULL)
        pairs *= NUMBERS;
    for (int i = 0; i < 9 && fits; i++) {
        int64_t low, high;
        int empty = all[i]->dtype == APA_DTYPE_NONE;
        for (int axis = 0; axis < 4; axis++)
            empty = empty || all[i]->shape[axis] == 0;
        if (empty)
            continue;
        fits = reach(all[i], &low, &high);
        if (!fits)
            break;
        const size_t size = apa_dtype_bytes(all[i]->dtype);
        memory[i] = calloc((size_t)(high - low + 1), size);
        all[i]->data = memory[i] == NULL ? NULL : (char *)memory[i] - low * (int64_t)size;
    }
    if (fits && pairs <= MOST_PAIRS) {
        const apa_status status = apa_attention(context, p, recipe, options, NULL);
        FUZZ_HOLDS(status == APA_STATUS_OK || apa_context_message(context)[0] != '\0');
    }
    for (int i = 0; i < 9; i++)
        free(memory[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const engines[] = {NULL, "cpu", "reference", "auto", "none"};
    static const char *const presets[] = {"exact", "apa", "cold", "sage2", "apa-nvfp4", "elsa", "standard", "lamp"};
    bytes from = {data, data + size};
    static tables t;
    apa_attention_options options;
    apa_recipe recipe;
    apa_plan plan;
    if (context == NULL) {
        apa_context_options how;
        apa_context_options_init(&how);
        how.threads = 1;
        FUZZ_HOLDS(apa_context_create(&context, &how) == APA_STATUS_OK);
    }
    apa_attention_options_init(&options);
    options.engine = engines[next(&from) % 5];
    FUZZ_HOLDS(apa_recipe_init(&recipe, presets[next(&from) % 8]) == APA_STATUS_OK);
    apa_problem p = build(&from, &t);
    apa_plan_init(&plan);
    const apa_status status = apa_attention_plan(context, &p, &recipe, &options, &plan);
    if (status == APA_STATUS_OK && plan.workspace_bytes > MOST_WORKSPACE)
        return 0;
    if (status == APA_STATUS_OK) {
        run(&p, &recipe, &options);
        return 0;
    }
    const char *message = apa_context_message(context);
    FUZZ_HOLDS(status == APA_STATUS_INVALID_ARGUMENT || status == APA_STATUS_UNSUPPORTED ||
               status == APA_STATUS_OUT_OF_MEMORY);
    FUZZ_HOLDS(message[0] != '\0' && strchr(message, '\n') == NULL);
    return 0;
}
