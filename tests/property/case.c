/* Making a case. Choices decide what a case is like; values come from a generator whose seed is one of the choices.
 * Memory that no tensor describes (gaps, guards, the rest of pages) is all ones: NaN in every float type, true in
 * masks.
 */
#include "property/case.h"

#include "formats/formats.h"
#include "support/oracle.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD 64 /* elements before and after */
#define PATTERN 0xFF

/* ---- memory and elements ---- */

static void *keep(property_case *made, size_t bytes)
{
    void *memory = malloc(bytes);
    if (memory == NULL || made->blocks == CASE_BLOCKS)
        abort();
    memset(memory, PATTERN, bytes);
    made->block[made->blocks] = memory;
    made->bytes[made->blocks++] = bytes;
    return memory;
}

static void store(const apa_tensor *x, int64_t offset, double value)
{
    switch (x->dtype) {
    case APA_DTYPE_F16:
        ((uint16_t *)x->data)[offset] = apa_f64_to_f16(value);
        break;
    case APA_DTYPE_BF16:
        ((uint16_t *)x->data)[offset] = apa_f64_to_bf16(value);
        break;
    case APA_DTYPE_F32:
        ((float *)x->data)[offset] = (float)value;
        break;
    case APA_DTYPE_F64:
        ((double *)x->data)[offset] = value;
        break;
    case APA_DTYPE_BOOL:
        ((unsigned char *)x->data)[offset] = value != 0;
        break;
    case APA_DTYPE_NONE:
        break;
    }
}

static int64_t offset_of(const apa_tensor *x, int64_t b, int64_t h, int64_t s)
{
    return b * x->stride[0] + h * x->stride[1] + s * x->stride[2];
}

/* ---- layouts ---- */

typedef enum layout { HND, NHD, GAPS, NHD_GAPS, BACKWARDS, LAYOUTS } layout;

/* Strides of a shape; *elements: what they reach over, *first: the element that [0,0,0,0] is. */
static void lay_out(layout how, const int64_t *shape, int64_t *stride, int64_t *elements, int64_t *first)
{
    const bool nhd = how == NHD || how == NHD_GAPS, gaps = how == GAPS || how == NHD_GAPS;
    const int64_t dim = shape[3] + (gaps ? 3 : 0);
    const int64_t inner = nhd ? shape[1] : shape[2], outer = nhd ? shape[2] : shape[1];
    const int64_t middle = inner * dim + (gaps ? 5 : 0), entry = outer * middle;
    stride[0] = entry;
    stride[nhd ? 2 : 1] = middle;
    stride[nhd ? 1 : 2] = dim;
    stride[3] = 1;
    *elements = shape[0] * entry;
    *first = 0;
    if (how == BACKWARDS && shape[2] > 0) {
        *first = (shape[2] - 1) * stride[2];
        stride[2] = -stride[2];
    }
}

/* A tensor in a layout of its own, off from where an allocation is aligned by some elements. */
static apa_tensor tensor_of(property_case *made, draw *from, apa_dtype dtype, int64_t B, int64_t H, int64_t S,
                            int64_t D)
{
    const layout how = (layout)draw_below(from, LAYOUTS);
    const int64_t off = draw_between(from, 0, 3);
    apa_tensor x = {.dtype = dtype, .shape = {B, H, S, D}};
    int64_t elements, first;
    lay_out(how, x.shape, x.stride, &elements, &first);
    const size_t size = apa_dtype_bytes(dtype);
    char *memory = keep(made, (size_t)(elements + 2 * GUARD + off) * size);
    x.data = memory + (size_t)(GUARD + off + first) * size;
    return x;
}

/* An input may repeat over its batch or its heads. */
static void repeat(draw *from, apa_tensor *x)
{
    if (draw_chance(from, 8))
        x->stride[0] = 0;
    if (draw_chance(from, 8))
        x->stride[1] = 0;
}

/* q, k and v as parts of one [B, S, heads, D] array. */
static void fuse(property_case *made, apa_problem *p)
{
    const int64_t B = p->q.shape[0], Hq = p->q.shape[1], H = Hq + 2 * p->k.shape[1], S = p->q.shape[2],
                  D = p->q.shape[3];
    const size_t size = apa_dtype_bytes(p->q.dtype);
    char *memory = keep(made, (size_t)(B * S * H * D + 2 * GUARD) * size);
    apa_tensor *const part[3] = {&p->q, &p->k, &p->v};
    const int64_t first[3] = {0, Hq, Hq + p->k.shape[1]};
    for (int i = 0; i < 3; i++) {
        part[i]->data = memory + (size_t)(GUARD + first[i] * D) * size;
        const int64_t stride[4] = {S * H * D, D, H * D, 1};
        memcpy(part[i]->stride, stride, sizeof stride);
    }
}

/* ---- values ---- */

typedef enum values { NORMAL, ONES, ZERO, EQUAL_ROWS, OUTLIERS, LARGE, TINY, SHARP, VALUES } values;

static void fill(property_case *made, const apa_tensor *x, values how, double size)
{
    for (int64_t b = 0; b < x->shape[0]; b++)
        for (int64_t h = 0; h < x->shape[1]; h++)
            for (int64_t s = 0; s < x->shape[2]; s++)
                for (int64_t d = 0; d < x->shape[3]; d++) {
                    double value = apa_test_normal(&made->rng) * size;
                    if (how == ONES || how == ZERO)
                        value = how == ONES;
                    else if (how == EQUAL_ROWS)
                        value = sin((double)d) * size;
                    else if (how == OUTLIERS && d % 16 == 3)
                        value *= 20;
                    else if (how == SHARP && s % 37 == 5)
                        value *= 6;
                    store(x, offset_of(x, b, h, s) + d, value);
                }
}

static double size_of(values how)
{
    return how == LARGE ? 100 : how == TINY ? 1e-3 : 1;
}

/* ---- sizes ---- */

static int64_t dim_of(draw *from, int64_t most)
{
    static const int64_t usual[] = {1, 8, 16, 32, 64, 80, 96, 128};
    const int64_t n = draw_chance(from, 60) ? usual[draw_below(from, 8)] : draw_between(from, 1, most);
    return n < most ? n : most;
}

static int64_t queries_of(draw *from, int64_t most)
{
    const int64_t n = draw_chance(from, 30) ? draw_between(from, 0, most) : draw_between(from, 0, 9);
    return n < most ? n : most;
}

static int64_t keys_of(draw *from, int64_t most)
{
    const int64_t n = draw_chance(from, 50)   ? draw_between(from, 0, most)
                      : draw_chance(from, 50) ? 64 * draw_between(from, 0, 3) + draw_between(from, 0, 2) - 1
                                              : draw_between(from, 0, 20);
    return n < 0 ? 0 : n < most ? n : most;
}

static apa_dtype dtype_of(draw *from)
{
    static const apa_dtype of[] = {APA_DTYPE_F32, APA_DTYPE_F16, APA_DTYPE_BF16};
    return of[draw_below(from, 3)];
}

/* ---- lines, scores ---- */

static void choose_lines(property_case *made, draw *from)
{
    apa_problem *p = &made->problem;
    const int64_t far = p->k.shape[2] + p->q.shape[2] + 3;
    p->causal = (int32_t)draw_below(from, 3);
    if (p->causal != APA_CAUSAL_TOP_LEFT && draw_chance(from, 25))
        p->q_offset = draw_between(from, 0, 2 * far) - far;
    if (draw_chance(from, 25))
        p->window_left = draw_between(from, 0, draw_chance(from, 50) ? 9 : far);
    if (draw_chance(from, 20))
        p->window_right = draw_between(from, 0, draw_chance(from, 50) ? 9 : far);
    if (draw_chance(from, 20)) {
        static const double scales[] = {1, 0, -0.5, 0.01, 3};
        p->softmax_scale = scales[draw_below(from, 5)];
    }
    if (draw_chance(from, 25)) {
        static const double caps[] = {30, 5, 1, 0.01, 1000};
        p->softcap = caps[draw_below(from, 5)];
    }
}

static apa_tensor per_head(property_case *made, draw *from, int64_t batch, double (*value)(property_case *, int64_t))
{
    apa_tensor x = tensor_of(made, from, APA_DTYPE_F32, batch, made->problem.q.shape[1], 1, 1);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < x.shape[1]; h++)
            store(&x, offset_of(&x, b, h, 0), value(made, h));
    return x;
}

static double slope_value(property_case *made, int64_t h)
{
    return apa_test_below(&made->rng, 8) == 0 ? 0 : exp2(-8.0 * (double)(h + 1) / 4);
}

static double sink_value(property_case *made, int64_t h)
{
    const int64_t kind = apa_test_below(&made->rng, 8);
    (void)h;
    return kind == 0 ? -INFINITY : kind == 1 ? 80 : kind == 2 ? -500 : 3 * apa_test_normal(&made->rng);
}

typedef enum pattern { SPECKLED, NOTHING, ALL, HEAD_MASKED, BLOCKS, ROWS, PATTERNS } pattern;

/* Is (i, j) left in? */
static bool left_in(property_case *made, pattern how, int64_t i, int64_t j, int percent)
{
    switch (how) {
    case NOTHING:
        return false;
    case ALL:
        return true;
    case HEAD_MASKED: /* whole tiles at the start are masked */
        return j >= 70;
    case BLOCKS:
        return i / 8 == j / 24 % 3;
    case ROWS:
        return i % 3 != 1;
    default:
        return apa_test_below(&made->rng, 100) < percent;
    }
}

static void choose_mask(property_case *made, draw *from, int64_t batch, int64_t Skv)
{
    static const apa_dtype types[] = {APA_DTYPE_BOOL, APA_DTYPE_F32, APA_DTYPE_F16, APA_DTYPE_BF16};
    static const int densities[] = {50, 95, 5};
    const apa_problem *p = &made->problem;
    const apa_dtype type = types[draw_below(from, 4)];
    const int64_t B = draw_chance(from, 40) && p->cu_seqlens_q == NULL ? batch : 1,
                  H = draw_chance(from, 50) ? p->q.shape[1] : 1, S = draw_chance(from, 80) ? p->q.shape[2] : 1,
                  K = draw_chance(from, 90) ? Skv + draw_between(from, 0, 2) : 1;
    const pattern how = (pattern)draw_below(from, PATTERNS);
    const int density = densities[draw_below(from, 3)];
    const bool huge = draw_chance(from, 15), odd = draw_chance(from, 15);
    apa_tensor x = tensor_of(made, from, type, B, H, S, K);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t i = 0; i < S; i++)
                for (int64_t j = 0; j < K; j++) {
                    const bool in = left_in(made, how, i, j, density);
                    double value = type == APA_DTYPE_BOOL ? in : in ? apa_test_normal(&made->rng) : -INFINITY;
                    if (huge && in && type != APA_DTYPE_BOOL)
                        value = type == APA_DTYPE_F16 ? -65504 : -2.5e5;
                    if (odd && i == 0 && j == K / 2 && type != APA_DTYPE_BOOL)
                        value = made->rng.state % 2 ? NAN : INFINITY;
                    store(&x, offset_of(&x, b, h, i) + j, value);
                }
    made->problem.attn_mask = x;
    if (type != APA_DTYPE_BOOL && draw_chance(from, 30))
        made->problem.mask_slopes = per_head(made, from, 1, slope_value);
}

static void choose_scores(property_case *made, draw *from, int64_t batch, int64_t Skv)
{
    if (draw_chance(from, 50))
        choose_mask(made, from, batch, Skv);
    if (draw_chance(from, 25))
        made->problem.alibi_slopes = per_head(made, from, draw_chance(from, 50) ? batch : 1, slope_value);
    if (draw_chance(from, 30))
        made->problem.sinks = per_head(made, from, 1, sink_value);
}

/* ---- sequences ---- */

typedef enum packing { PLAIN, RAGGED_Q, RAGGED_K, RAGGED, USED, OFFSETS, PAGED, PAGED_RAGGED_Q, KINDS } packing;

/* Lengths one after the other; their sum. */
static int64_t cut(draw *from, int64_t *cu, int64_t batch, int64_t most, bool keys)
{
    cu[0] = 0;
    for (int64_t b = 0; b < batch; b++)
        cu[b + 1] = cu[b] + (keys ? keys_of(from, most) : queries_of(from, most));
    return cu[batch];
}

/* A table whose pages are dealt out in a random order, now and then one page twice. */
static void deal_pages(property_case *made, draw *from, int64_t batch, int64_t page_size, int64_t most, int64_t *pages)
{
    apa_problem *p = &made->problem;
    int64_t width = 0;
    for (int64_t b = 0; b < batch; b++) {
        made->used[b] = keys_of(from, most);
        const int64_t n = (made->used[b] + page_size - 1) / page_size;
        width = n > width ? n : width;
    }
    width += draw_between(from, 0, 2);
    *pages = batch * width + 1;
    made->pages = keep(made, sizeof(int32_t) * (size_t)(batch * width + 1)); /* entries that are not used: -1 */
    const int64_t step = draw_chance(from, 50) ? 1 : *pages - 1;             /* prime to *pages */
    const bool shared = draw_chance(from, 20);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i * page_size < made->used[b]; i++)
            made->pages[b * width + i] = (int32_t)(((shared ? 0 : b * width) + i + 1) * step % *pages);
    p->block_table = made->pages;
    p->block_table_stride = width;
    p->seqused_k = made->used;
}

/* Sets batch, lengths and tables; the extents of q and k come back. */
static void choose_sequences(property_case *made, draw *from, packing how, case_limits limits, int64_t *batch,
                             int64_t q[2], int64_t k[2])
{
    apa_problem *p = &made->problem;
    const bool ragged_q = how == RAGGED_Q || how == RAGGED || how == PAGED_RAGGED_Q,
               ragged_k = how == RAGGED_K || how == RAGGED;
    *batch = draw_chance(from, 5) ? 0 : draw_between(from, 1, how == PLAIN ? 2 : CASE_SEQUENCES - 1);
    q[0] = k[0] = *batch;
    if (ragged_q) {
        q[0] = 1;
        q[1] = cut(from, made->cu_q, *batch, limits.Sq / 2, false) + draw_between(from, 0, 1);
        p->cu_seqlens_q = made->cu_q;
    } else {
        q[1] = queries_of(from, limits.Sq);
    }
    if (ragged_k) {
        k[0] = 1;
        k[1] = cut(from, made->cu_k, *batch, limits.Skv / 2, true) + draw_between(from, 0, 1);
        p->cu_seqlens_k = made->cu_k;
    } else if (how == PAGED || how == PAGED_RAGGED_Q) {
        static const int64_t sizes[] = {16, 1, 64, 5, 37, 128};
        k[1] = sizes[draw_below(from, 6)];
        deal_pages(made, from, *batch, k[1], limits.Skv / 2, &k[0]);
    } else {
        k[1] = keys_of(from, limits.Skv);
    }
    if (how == USED || (ragged_k && draw_chance(from, 25))) {
        for (int64_t b = 0; b < *batch; b++)
            made->used[b] = draw_between(from, 0, ragged_k ? made->cu_k[b + 1] - made->cu_k[b] : k[1]);
        p->seqused_k = made->used;
    }
    p->batch = ragged_q || ragged_k ? *batch : 0;
}

static void choose_offsets(property_case *made, draw *from, packing how, int64_t batch)
{
    apa_problem *p = &made->problem;
    if (p->causal == APA_CAUSAL_TOP_LEFT || p->q_offset != APA_Q_OFFSET_DEFAULT ||
        !(how == OFFSETS || (how != PLAIN && draw_chance(from, 20))))
        return;
    for (int64_t b = 0; b < batch; b++)
        made->offsets[b] = draw_between(from, 0, 80) - 20;
    p->q_offsets = made->offsets;
}

/* ---- what nobody may read ---- */

/* Rows of k and v that some query sees, [entries][Hkv][rows]. */
static unsigned char *mark_seen(const apa_problem *p)
{
    const int64_t *shape = p->k.shape, G = p->q.shape[1] / shape[1];
    unsigned char *seen = calloc((size_t)(shape[0] * shape[1] * shape[2]) + 1, 1);
    if (seen == NULL)
        abort();
    for (int64_t b = 0; b < oracle_count(p); b++) {
        const oracle_sequence s = oracle_at(p, b);
        for (int64_t h = 0; h < p->q.shape[1]; h++)
            for (int64_t j = 0; j < s.keys; j++) {
                int64_t entry, row;
                oracle_key_place(p, &s, j, &entry, &row);
                unsigned char *mark = &seen[(entry * shape[1] + h / G) * shape[2] + row];
                for (int64_t i = 0; i < s.queries && *mark == 0; i++)
                    *mark = oracle_sees(p, &s, h, i, j);
            }
    }
    return seen;
}

static void poison_row(property_case *made, const apa_tensor *x, int64_t b, int64_t h, int64_t s)
{
    for (int64_t d = 0; d < x->shape[3]; d++) {
        const int64_t which = apa_test_below(&made->rng, 4);
        store(x, offset_of(x, b, h, s) + d, which == 0 ? INFINITY : which == 1 ? -INFINITY : NAN);
    }
}

static void poison(property_case *made)
{
    const apa_problem *p = &made->problem;
    unsigned char *seen = mark_seen(p);
    for (int64_t b = 0; b < p->k.shape[0]; b++)
        for (int64_t h = 0; h < p->k.shape[1]; h++)
            for (int64_t s = 0; s < p->k.shape[2]; s++)
                if (!seen[(b * p->k.shape[1] + h) * p->k.shape[2] + s]) {
                    poison_row(made, &p->k, b, h, s);
                    poison_row(made, &p->v, b, h, s);
                }
    free(seen);
}

/* One element of one key, or value, somebody may see. */
static void spoil(property_case *made, bool key)
{
    const apa_tensor *x = key ? &made->problem.k : &made->problem.v;
    if (x->shape[0] * x->shape[1] * x->shape[2] == 0)
        return;
    const int64_t b = apa_test_below(&made->rng, x->shape[0]), h = apa_test_below(&made->rng, x->shape[1]),
                  s = apa_test_below(&made->rng, x->shape[2]), d = apa_test_below(&made->rng, x->shape[3]);
    store(x, offset_of(x, b, h, s) + d, key && s % 2 == 0 ? INFINITY : NAN);
}

/* ---- the case ---- */

static void describe(apa_tensor *x, apa_dtype dtype, int64_t B, int64_t H, int64_t S, int64_t D)
{
    *x = (apa_tensor){.dtype = dtype, .shape = {B, H, S, D}};
}

static void place_inputs(property_case *made, draw *from, bool *repeats)
{
    apa_problem *p = &made->problem;
    apa_tensor *const x[3] = {&p->q, &p->k, &p->v};
    const bool alike = p->q.dtype == p->k.dtype && p->q.dtype == p->v.dtype && p->q.shape[3] == p->v.shape[3] &&
                       p->q.shape[2] == p->k.shape[2] && p->q.shape[0] == p->k.shape[0];
    *repeats = false;
    if (alike && draw_chance(from, 30)) {
        fuse(made, p);
        return;
    }
    for (int i = 0; i < 3; i++) {
        *x[i] = tensor_of(made, from, x[i]->dtype, x[i]->shape[0], x[i]->shape[1], x[i]->shape[2], x[i]->shape[3]);
        repeat(from, x[i]);
        *repeats = *repeats || (i > 0 && (x[i]->stride[0] == 0 || x[i]->stride[1] == 0));
    }
}

static void choose_values(property_case *made, draw *from, bool repeats)
{
    apa_problem *p = &made->problem;
    const apa_tensor *const x[3] = {&p->q, &p->k, &p->v};
    for (int i = 0; i < 3; i++) {
        const values how = (values)draw_below(from, VALUES);
        fill(made, x[i], how, size_of(how));
    }
    made->poisoned = !repeats && draw_chance(from, 60);
    if (made->poisoned)
        poison(made);
    made->spoilt = draw_chance(from, 8);
    if (made->spoilt)
        spoil(made, draw_chance(from, 50));
}

static void choose_shapes(property_case *made, draw *from, case_limits limits, const int64_t q[2], const int64_t k[2])
{
    apa_problem *p = &made->problem;
    static const apa_dtype wide[] = {APA_DTYPE_F32, APA_DTYPE_F16, APA_DTYPE_BF16};
    const int64_t Hkv = draw_between(from, 1, 3), G = draw_between(from, 1, 4);
    const int64_t D = dim_of(from, limits.D), Dv = draw_chance(from, 40) ? dim_of(from, limits.D) : D;
    apa_dtype type = dtype_of(from);
    const bool mixed = draw_chance(from, 10);
    describe(&p->q, type, q[0], Hkv * G, q[1], D);
    describe(&p->k, mixed ? dtype_of(from) : type, k[0], Hkv, k[1], D);
    describe(&p->v, mixed ? dtype_of(from) : type, k[0], Hkv, k[1], Dv);
    describe(&p->out, wide[draw_below(from, 3)], q[0], Hkv * G, q[1], Dv);
    if (draw_chance(from, 80))
        describe(&p->lse, APA_DTYPE_F32, q[0], Hkv * G, q[1], 1);
    if (draw_chance(from, 4)) { /* all in double: the reference engine */
        p->q.dtype = p->k.dtype = p->v.dtype = p->out.dtype = APA_DTYPE_F64;
        p->lse.dtype = p->lse.dtype != APA_DTYPE_NONE ? APA_DTYPE_F64 : APA_DTYPE_NONE;
    }
}

property_case *case_make(draw *from, case_limits limits)
{
    static const char *const methods[] = {"exact", "apa", "cold"};
    property_case *made = calloc(1, sizeof *made);
    int64_t batch, q[2], k[2], Skv = 0;
    bool repeats;
    if (made == NULL)
        abort();
    apa_problem_init(&made->problem);
    made->rng.state = draw_below(from, 1000000);
    made->method = methods[draw_below(from, 8) * 3 / 8]; /* mostly exact, then apa */
    if (draw_chance(from, 4)) /* few queries, many keys: more than one of the segments that states are merged from */
        limits = (case_limits){4, 14 * limits.Skv, 16};
    const packing how = (packing)(draw_chance(from, 60) ? draw_below(from, KINDS) : PLAIN);
    choose_sequences(made, from, how, limits, &batch, q, k);
    choose_shapes(made, from, limits, q, k);
    place_inputs(made, from, &repeats);
    choose_lines(made, from);
    choose_offsets(made, from, how, batch);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t keys = oracle_at(&made->problem, b).keys;
        Skv = keys > Skv ? keys : Skv;
    }
    if (made->problem.cu_seqlens_k == NULL && made->problem.block_table == NULL && made->problem.seqused_k == NULL)
        Skv = k[1];
    choose_scores(made, from, batch, Skv);
    choose_values(made, from, repeats);
    for (int i = 0; i < made->blocks; i++) {
        made->before[i] = malloc(made->bytes[i] + 1);
        if (made->before[i] == NULL)
            abort();
        memcpy(made->before[i], made->block[i], made->bytes[i]);
    }
    return made;
}

void case_free(property_case *made)
{
    for (int i = 0; i < made->blocks; i++) {
        free(made->block[i]);
        free(made->before[i]);
    }
    free(made);
}

bool case_inputs_untouched(const property_case *made)
{
    for (int i = 0; i < made->blocks; i++)
        if (memcmp(made->block[i], made->before[i], made->bytes[i]) != 0)
            return false;
    return true;
}
