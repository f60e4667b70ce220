/* The CPU engine on ragged and paged batches: every sequence has the bits that it has alone in a flat call, in exact
 * and apa, for any page size, any number of threads; long and far-away memory by sparse mappings. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "support/test.h"

#include "support/attend.h"
#include "support/levels.h"
#include "support/scores_oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static apa_test_level level[APA_TEST_LEVELS_MAX];
static apa_context *contexts[APA_TEST_LEVELS_MAX], *single[APA_TEST_LEVELS_MAX];
static int levels;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    levels = apa_test_levels(level);
    for (int l = 0; l < levels; l++) {
        contexts[l] = apa_test_level_context(&level[l], 2);
        single[l] = apa_test_level_context(&level[l], 1);
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int l = 0; l < levels; l++) {
        apa_context_destroy(contexts[l]);
        apa_context_destroy(single[l]);
    }
    return 0;
}

static void must_run(apa_context *context, const apa_problem *p, const char *preset, apa_statistics *statistics)
{
    apa_attention_options options;
    const apa_recipe recipe = apa_test_recipe(preset, "");
    apa_attention_options_init(&options);
    options.engine = "cpu";
    if (statistics != NULL)
        apa_statistics_init(statistics);
    if (apa_attention(context, p, &recipe, &options, statistics) != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
}

/* ---- sequences of a batch, and the same ones alone ---- */

#define MOST 40

typedef struct ragged {
    int64_t B, Hq, Hkv, D, Dv, page_size, pages;
    int64_t queries[MOST], keys[MOST], offset[MOST], cu_q[MOST + 1], cu_k[MOST + 1];
    int32_t *table;
    int64_t table_stride;
    apa_dtype dtype;
    apa_problem p;         /* the batch */
    apa_problem one[MOST]; /* each sequence, flat and contiguous, its outputs in `alone` */
    float *out, *lse, *alone_out, *alone_lse;
    void *memory[8];
    int n;
} ragged;

static void *keep(ragged *r, size_t bytes, int fill)
{
    void *memory = malloc(bytes + 64);
    assert_non_null(memory);
    memset(memory, fill, bytes + 64);
    r->memory[r->n++] = memory;
    return memory;
}

static void drop(ragged *r)
{
    for (int i = 0; i < r->n; i++)
        free(r->memory[i]);
}

static void random_row(apa_test_rng *rng, const apa_tensor *x, int64_t h, int64_t row)
{
    for (int64_t d = 0; d < x->shape[3]; d++)
        apa_test_set(x, 0, h, row, d, apa_test_normal(rng));
}

static void copy_row(const apa_tensor *from, int64_t b, int64_t h, int64_t row, const apa_tensor *to, int64_t to_row)
{
    for (int64_t d = 0; d < from->shape[3]; d++)
        apa_test_set(to, 0, h, to_row, d, apa_test_get(from, b, h, row, d));
}

/* Pages in a random order, at random places; the rest of the last page and unused pages hold NaN. */
static void make_pages(ragged *r, apa_test_rng *rng, const apa_tensor *flat_k, const apa_tensor *flat_v)
{
    int64_t used = 0, most = 1;
    for (int64_t b = 0; b < r->B; b++) {
        const int64_t pages = (r->keys[b] + r->page_size - 1) / r->page_size;
        used += pages;
        most = pages > most ? pages : most;
    }
    const size_t bytes = apa_dtype_bytes(r->dtype);
    r->pages = used + 3;
    r->table_stride = most + 1;
    int32_t *order = keep(r, sizeof(int32_t) * (size_t)r->pages, 0);
    r->table = keep(r, sizeof(int32_t) * (size_t)(r->B * r->table_stride), 0xFF);
    for (int64_t i = 0; i < r->pages; i++) {
        const int64_t j = apa_test_below(rng, i + 1);
        order[i] = order[j];
        order[j] = (int32_t)i;
    }
    void *k = keep(r, (size_t)(r->pages * r->Hkv * r->page_size * r->D) * bytes, 0xFF);
    void *v = keep(r, (size_t)(r->pages * r->Hkv * r->page_size * r->Dv) * bytes, 0xFF);
    r->p.k = apa_tensor_nhd(k, r->dtype, r->pages, r->Hkv, r->page_size, r->D);
    r->p.v = apa_tensor_hnd(v, r->dtype, r->pages, r->Hkv, r->page_size, r->Dv);
    int64_t next = 0;
    for (int64_t b = 0; b < r->B; b++)
        for (int64_t j = 0; j < r->keys[b]; j++) {
            if (j % r->page_size == 0)
                r->table[b * r->table_stride + j / r->page_size] = order[next++];
            const int64_t page = r->table[b * r->table_stride + j / r->page_size];
            apa_tensor to_k = r->p.k, to_v = r->p.v;
            to_k.data = (char *)to_k.data + (size_t)(page * to_k.stride[0]) * bytes;
            to_v.data = (char *)to_v.data + (size_t)(page * to_v.stride[0]) * bytes;
            for (int64_t h = 0; h < r->Hkv; h++) {
                copy_row(flat_k, 0, h, r->cu_k[b] + j, &to_k, j % r->page_size);
                copy_row(flat_v, 0, h, r->cu_k[b] + j, &to_v, j % r->page_size);
            }
        }
}

static apa_tensor rows_of(const apa_tensor *x, int64_t from, int64_t n)
{
    apa_tensor part = *x;
    part.data = (char *)x->data + (size_t)(from * x->stride[2]) * apa_dtype_bytes(x->dtype);
    part.shape[2] = n;
    return part;
}

/* queries and keys are set; page_size 0: packed by cu_seqlens_k. */
static void make(ragged *r, apa_test_rng *rng)
{
    for (int64_t b = 0; b < r->B; b++) {
        r->cu_q[b + 1] = r->cu_q[b] + r->queries[b];
        r->cu_k[b + 1] = r->cu_k[b] + r->keys[b];
    }
    const int64_t rows = r->cu_q[r->B] + 2, keys = r->cu_k[r->B];
    const size_t bytes = apa_dtype_bytes(r->dtype);
    apa_problem_init(&r->p);
    apa_problem *p = &r->p;
    p->q = apa_tensor_nhd(keep(r, (size_t)(rows * r->Hq * r->D) * bytes, 0), r->dtype, 1, r->Hq, rows, r->D);
    const apa_tensor k =
        apa_tensor_nhd(keep(r, (size_t)(keys * r->Hkv * r->D) * bytes, 0), r->dtype, 1, r->Hkv, keys, r->D);
    const apa_tensor v =
        apa_tensor_nhd(keep(r, (size_t)(keys * r->Hkv * r->Dv) * bytes, 0), r->dtype, 1, r->Hkv, keys, r->Dv);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < r->Hq; h++)
            random_row(rng, &p->q, h, i);
    for (int64_t j = 0; j < keys; j++)
        for (int64_t h = 0; h < r->Hkv; h++) {
            random_row(rng, &k, h, j);
            random_row(rng, &v, h, j);
        }
    const size_t outs = sizeof(float) * (size_t)(rows * r->Hq * r->Dv), lses = sizeof(float) * (size_t)(rows * r->Hq);
    r->out = malloc(outs);
    r->alone_out = malloc(outs);
    r->lse = malloc(lses);
    r->alone_lse = malloc(lses);
    p->out = apa_tensor_nhd(r->out, APA_DTYPE_F32, 1, r->Hq, rows, r->Dv);
    p->lse = apa_tensor_hnd(r->lse, APA_DTYPE_F32, 1, r->Hq, rows, 1);
    p->cu_seqlens_q = r->cu_q;
    p->batch = r->B;
    p->causal = 1;
    if (r->page_size == 0) {
        p->k = k;
        p->v = v;
        p->cu_seqlens_k = r->cu_k;
    } else {
        make_pages(r, rng, &k, &v);
        p->block_table = r->table;
        p->block_table_stride = r->table_stride;
        p->seqused_k = r->keys;
    }
    for (int64_t b = 0; b < r->B; b++) {
        apa_problem *one = &r->one[b];
        apa_problem_init(one);
        one->causal = 1;
        one->q = rows_of(&p->q, r->cu_q[b], r->queries[b]);
        one->k = rows_of(&k, r->cu_k[b], r->keys[b]);
        one->v = rows_of(&v, r->cu_k[b], r->keys[b]);
        apa_tensor out = p->out, lse = p->lse;
        out.data = r->alone_out;
        lse.data = r->alone_lse;
        one->out = rows_of(&out, r->cu_q[b], r->queries[b]);
        one->lse = rows_of(&lse, r->cu_q[b], r->queries[b]);
    }
}

/* Levels from `from` on: the portable one is slow. */
static void check(ragged *r, int from, const char *what)
{
    const size_t outs = sizeof(float) * (size_t)(r->p.out.shape[2] * r->Hq * r->Dv),
                 lses = sizeof(float) * (size_t)(r->p.out.shape[2] * r->Hq);
    for (int l = from; l < levels; l++)
        for (int m = 0; m < 2; m++) {
            apa_statistics whole, one;
            int64_t visible = 0, hot = 0, skipped = 0;
            memset(r->out, 0x5C, outs);
            memset(r->alone_out, 0x5C, outs);
            memset(r->lse, 0x5C, lses);
            memset(r->alone_lse, 0x5C, lses);
            must_run(contexts[l], &r->p, m == 0 ? "exact" : "apa", &whole);
            for (int64_t b = 0; b < r->B; b++) {
                must_run(single[l], &r->one[b], m == 0 ? "exact" : "apa", &one);
                visible += one.visible;
                hot += one.hot;
                skipped += one.skipped;
            }
            if (memcmp(r->out, r->alone_out, outs) != 0 || memcmp(r->lse, r->alone_lse, lses) != 0)
                fail_msg("%s, %s, %s, page size %d: differs from its sequences alone", what, level[l].name,
                         m == 0 ? "exact" : "apa", (int)r->page_size);
            assert_int_equal(whole.visible, visible);
            assert_int_equal(whole.hot, hot);
            assert_int_equal(whole.skipped, skipped);
        }
    for (size_t i = 0; i < outs / sizeof(float); i++)
        assert_false(isnan(r->out[i]));
}

static void free_all(ragged *r)
{
    free(r->out);
    free(r->alone_out);
    free(r->lse);
    free(r->alone_lse);
    drop(r);
}

/* Empty sequences, more queries than keys, one key, more than a segment: together. */
static void lengths(void **state)
{
    (void)state;
    static const int64_t queries[] = {5, 0, 1, 40, 7, 3, 1, 0, 20, 1}, keys[] = {70, 9, 0, 31, 5000, 1, 300, 0, 20, 65};
    static const int64_t page_sizes[] = {0, 1, 5, 16, 64, 100, 256, 8192};
    static const apa_dtype dtype[] = {APA_DTYPE_F32, APA_DTYPE_F16, APA_DTYPE_BF16};
    apa_test_rng rng = {apa_test_seed()};
    for (int i = 0; i < 8; i++) {
        ragged r = {.B = 10, .Hq = 6, .Hkv = 2, .D = i % 2 == 0 ? 32 : 20, .Dv = i % 3 == 0 ? 24 : 16};
        r.page_size = page_sizes[i];
        r.dtype = dtype[i % 3];
        memcpy(r.queries, queries, sizeof queries);
        memcpy(r.keys, keys, sizeof keys);
        make(&r, &rng);
        check(&r, i != 3, "lengths");
        if (i % 2 == 0) { /* windows and offsets of their own */
            for (int64_t b = 0; b < r.B; b++)
                r.offset[b] = r.keys[b] - r.queries[b] - b % 3;
            r.p.window_left = 200;
            r.p.q_offsets = r.offset;
            for (int64_t b = 0; b < r.B; b++) {
                r.one[b].window_left = 200;
                r.one[b].q_offset = r.offset[b];
            }
            check(&r, 1, "offsets");
        }
        free_all(&r);
    }
}

/* Batched decode: many sequences of one query each. */
static void decode(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 1};
    ragged r = {.B = MOST, .Hq = 8, .Hkv = 2, .D = 64, .Dv = 64, .page_size = 16, .dtype = APA_DTYPE_F16};
    for (int64_t b = 0; b < r.B; b++) {
        r.queries[b] = 1;
        r.keys[b] = 1 + apa_test_below(&rng, b == 7 ? 6000 : 400);
    }
    make(&r, &rng);
    check(&r, 1, "decode");
    free_all(&r);
}

/* Masks, slopes and sinks go with their sequence. */
static void scores_of_sequences(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 2};
    for (int paged = 0; paged < 2; paged++) {
        ragged r = {.B = 6, .Hq = 4, .Hkv = 2, .D = 32, .Dv = 32, .page_size = paged * 24, .dtype = APA_DTYPE_F32};
        static const int64_t queries[] = {3, 1, 0, 20, 9, 1}, keys[] = {100, 70, 5, 20, 300, 0};
        memcpy(r.queries, queries, sizeof queries);
        memcpy(r.keys, keys, sizeof keys);
        make(&r, &rng);
        const int64_t rows = r.p.q.shape[2];
        float slopes[6 * 4], sinks[4], *mask = malloc(sizeof(float) * (size_t)(rows * 300));
        for (int i = 0; i < 24; i++)
            slopes[i] = 0.01f * (float)i;
        for (int i = 0; i < 4; i++)
            sinks[i] = (float)i - 1.0f;
        for (int64_t i = 0; i < rows * 300; i++)
            mask[i] = apa_test_uniform(&rng) < 0.2 ? -INFINITY : (float)apa_test_normal(&rng);
        r.p.attn_mask = apa_tensor_hnd(mask, APA_DTYPE_F32, 1, 1, rows, 300);
        r.p.alibi_slopes = apa_tensor_hnd(slopes, APA_DTYPE_F32, 6, 4, 1, 1);
        r.p.sinks = apa_tensor_hnd(sinks, APA_DTYPE_F32, 1, 4, 1, 1);
        r.p.softcap = 15.0;
        for (int64_t b = 0; b < r.B; b++) {
            apa_problem *one = &r.one[b];
            one->softcap = 15.0;
            one->sinks = r.p.sinks;
            one->attn_mask = rows_of(&r.p.attn_mask, r.cu_q[b], r.queries[b]);
            one->alibi_slopes = apa_tensor_hnd(slopes + 4 * b, APA_DTYPE_F32, 1, 4, 1, 1);
        }
        check(&r, 0, "scores");
        double *out = apa_test_doubles(&r.p.out), *lse = apa_test_doubles(&r.p.lse);
        apa_test_scores_oracle(&r.p, out, lse, NULL);
        must_run(contexts[levels - 1], &r.p, "exact", NULL);
        for (int64_t h = 0; h < 4; h++)
            for (int64_t i = 0; i < r.cu_q[r.B]; i++) {
                const double x = apa_test_get(&r.p.lse, 0, h, i, 0), y = lse[h * rows + i];
                assert_true(x == y || fabs(x - y) <= 1e-5 * fmax(1, fabs(y)));
                for (int64_t c = 0; c < 32; c++)
                    assert_true(fabs(apa_test_get(&r.p.out, 0, h, i, c) - out[(h * rows + i) * 32 + c]) <= 1e-5);
            }
        free(out);
        free(lse);
        free(mask);
        free_all(&r);
    }
}

/* ---- long, wide and far ---- */

static void *sparse(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

/* Rows that lie beyond 2^31 elements from their tensor's start, in every axis; zeros elsewhere. */
static void far_rows(void **state)
{
    (void)state;
    enum { keys = 130, D = 16 };
    const int64_t far = (int64_t)1 << 26, head = far * 160; /* 2^26 · 129 > 2^33 */
    const size_t bytes = (size_t)(2 * head) * 2;
    uint16_t *k = sparse(bytes);
    static float q[2 * D], out[2 * D], lse[2], near_out[2 * D], near_lse[2];
    static uint16_t near_k[2 * keys * D];
    apa_test_rng rng = {4};
    const apa_tensor far_k = {k, APA_DTYPE_F16, {1, 2, keys, D}, {0, head, far, 1}};
    const apa_tensor near = apa_tensor_hnd(near_k, APA_DTYPE_F16, 1, 2, keys, D);
    for (int64_t h = 0; h < 2; h++)
        for (int64_t j = 0; j < keys; j++) {
            random_row(&rng, &near, h, j);
            memcpy(k + h * head + j * far, near_k + (h * keys + j) * D, 2 * D);
        }
    uint16_t q16[2 * D];
    for (int i = 0; i < 2 * D; i++)
        q[i] = (float)apa_test_normal(&rng);
    const apa_tensor qt = apa_tensor_hnd(q16, APA_DTYPE_F16, 1, 2, 1, D);
    for (int i = 0; i < 2 * D; i++)
        apa_test_set(&qt, 0, i / D, 0, i % D, q[i]);
    for (int l = 0; l < levels; l++)
        for (int m = 0; m < 2; m++) {
            apa_problem p;
            apa_problem_init(&p);
            p.q = qt;
            p.k = p.v = far_k;
            p.out = apa_tensor_hnd(out, APA_DTYPE_F32, 1, 2, 1, D);
            p.lse = apa_tensor_hnd(lse, APA_DTYPE_F32, 1, 2, 1, 1);
            must_run(contexts[l], &p, m == 0 ? "exact" : "apa", NULL);
            p.k = p.v = near;
            p.out.data = near_out;
            p.lse.data = near_lse;
            must_run(contexts[l], &p, m == 0 ? "exact" : "apa", NULL);
            assert_memory_equal(out, near_out, sizeof out);
            assert_memory_equal(lse, near_lse, sizeof lse);
        }
    munmap(k, bytes);
}

/* More than 4 194 304 keys, all the same by a stride of 0: the output is their value, the LSE their logit plus ln n.
 * One key of another value at the end shows that the last one counts. */
static void many_keys(void **state)
{
    (void)state;
    const int64_t keys = 4194304 + 77;
    float q[8], k[8], v[8], out[8], lse[1];
    for (int i = 0; i < 8; i++) {
        q[i] = 0.25f * (float)i;
        k[i] = 0.5f;
        v[i] = (float)(i - 3);
    }
    for (int l = 1; l < levels; l++)
        for (int m = 0; m < 2; m++) {
            apa_problem p;
            apa_problem_init(&p);
            p.q = apa_tensor_hnd(q, APA_DTYPE_F32, 1, 1, 1, 8);
            p.k = (apa_tensor){k, APA_DTYPE_F32, {1, 1, keys, 8}, {0, 0, 0, 1}};
            p.v = (apa_tensor){v, APA_DTYPE_F32, {1, 1, keys, 8}, {0, 0, 0, 1}};
            p.out = apa_tensor_hnd(out, APA_DTYPE_F32, 1, 1, 1, 8);
            p.lse = apa_tensor_hnd(lse, APA_DTYPE_F32, 1, 1, 1, 1);
            p.causal = 1;
            must_run(contexts[l], &p, m == 0 ? "exact" : "apa", NULL);
            const double logit = 7 * 0.25 * 4 * 0.5 / sqrt(8), expected = logit + log((double)keys);
            assert_true(fabs(lse[0] - expected) <= 1e-5 * expected);
            for (int i = 0; i < 8; i++)
                assert_true(fabs(out[i] - v[i]) <= (m == 0 ? 1e-5 : 0.02) * 5);
        }
}

/* A batch of many entries, and one of 2^31 - 1 without rows. */
static void many_entries(void **state)
{
    (void)state;
    enum { B = 3000 };
    static float q[B * 8], k[8 * 3], out[B * 8];
    apa_test_rng rng = {9};
    for (int i = 0; i < B * 8; i++)
        q[i] = (float)apa_test_normal(&rng);
    for (int i = 0; i < 24; i++)
        k[i] = (float)apa_test_normal(&rng);
    apa_problem p;
    for (int m = 0; m < 2; m++) {
        apa_problem_init(&p);
        p.q = apa_tensor_hnd(q, APA_DTYPE_F32, B, 1, 1, 8);
        p.k = p.v = (apa_tensor){k, APA_DTYPE_F32, {B, 1, 3, 8}, {0, 0, 8, 1}};
        p.out = apa_tensor_hnd(out, APA_DTYPE_F32, B, 1, 1, 8);
        must_run(contexts[levels - 1], &p, m == 0 ? "exact" : "apa", NULL);
        double *truth = apa_test_doubles(&p.out), *lse = malloc(sizeof(double) * B);
        apa_test_scores_oracle(&p, truth, lse, NULL);
        assert_true(apa_test_rel_l2(&p.out, truth) <= (m == 0 ? 1e-6 : 0.02));
        free(truth);
        free(lse);
        p.q.shape[0] = p.k.shape[0] = p.v.shape[0] = p.out.shape[0] = INT32_MAX;
        p.q.shape[2] = p.out.shape[2] = 0;
        must_run(contexts[levels - 1], &p, m == 0 ? "exact" : "apa", NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lengths),  cmocka_unit_test(decode),    cmocka_unit_test(scores_of_sequences),
        cmocka_unit_test(far_rows), cmocka_unit_test(many_keys), cmocka_unit_test(many_entries),
    };
    return cmocka_run_group_tests_name("cpu_ragged", tests, set_up, tear_down);
}
