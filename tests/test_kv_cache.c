/* The KV cache: every way to fill it gives the bits of one append, exact attention over it those of flat attention,
 * the adaptive method stays within a bound of double; sharing, roll-back, window, files, and what fails changes
 * nothing.
 */
#include "support/test.h"

#include "support/attend.h"
#include "support/levels.h"
#include "support/scores_oracle.h"

#include "apa/kv_cache.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The library's large allocations go through here, so that one of them can fail: number `failing` from now, if > 0. */
static long failing;
#define LARGEST_ALLOCATION ((size_t)1 << 31) /* sanitizers end the program where malloc() would return NULL */

void *aligned_alloc(size_t alignment, size_t bytes)
{
    void *memory = NULL;
    if ((failing > 0 && --failing == 0) || bytes > LARGEST_ALLOCATION)
        return NULL;
    return posix_memalign(&memory, alignment, bytes) == 0 ? memory : NULL;
}

static apa_test_level level[APA_TEST_LEVELS_MAX];
static apa_context *context;
static double worst_apa, worst_chunked;

static int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    const int levels = apa_test_levels(level);
    context = apa_test_level_context(&level[levels - 1], 1);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    apa_context_destroy(context);
    printf("# apa over a cache: worst relative L2 against double %.3g; chunks against one call %.3g\n", worst_apa,
           worst_chunked);
    return 0;
}

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        if ((call) != APA_STATUS_OK)                                                                                   \
            fail_msg("%s: %s", #call, apa_context_message(context));                                                   \
    } while (0)

/* ---- material: one long sequence of keys and values ---- */

typedef struct material {
    int64_t Hq, Hkv, D, Dv, keys;
    apa_dtype dtype;
    void *k_data, *v_data, *q_data;
    apa_tensor k, v, q; /* [1, H, keys, width] */
} material;

/* K has a mean that moves with position, as real ones do, and its heads differ. */
static material make_material(int64_t Hq, int64_t Hkv, int64_t D, int64_t Dv, int64_t keys, apa_dtype dtype)
{
    material m = {Hq, Hkv, D, Dv, keys, dtype, NULL, NULL, NULL, {0}, {0}, {0}};
    apa_test_rng rng = {apa_test_seed() + 11};
    const size_t bytes = apa_dtype_bytes(dtype);
    m.k_data = malloc((size_t)(Hkv * keys * D) * bytes);
    m.v_data = malloc((size_t)(Hkv * keys * Dv) * bytes);
    m.q_data = malloc((size_t)(Hq * keys * D) * bytes);
    assert_true(m.k_data != NULL && m.v_data != NULL && m.q_data != NULL);
    m.k = apa_tensor_nhd(m.k_data, dtype, 1, Hkv, keys, D);
    m.v = apa_tensor_nhd(m.v_data, dtype, 1, Hkv, keys, Dv);
    m.q = apa_tensor_nhd(m.q_data, dtype, 1, Hq, keys, D);
    for (int64_t j = 0; j < keys; j++)
        for (int64_t h = 0; h < Hq; h++)
            for (int64_t d = 0; d < (D > Dv ? D : Dv); d++) {
                if (h < Hkv && d < D)
                    apa_test_set(&m.k, 0, h, j, d,
                                 apa_test_normal(&rng) + (d % 5 == 0 ? 3 + 2 * (double)j / (double)keys : 0));
                if (h < Hkv && d < Dv)
                    apa_test_set(&m.v, 0, h, j, d, apa_test_normal(&rng));
                if (d < D)
                    apa_test_set(&m.q, 0, h, j, d, apa_test_normal(&rng));
            }
    return m;
}

static void free_material(material *m)
{
    free(m->k_data);
    free(m->v_data);
    free(m->q_data);
}

static apa_tensor rows(const apa_tensor *x, int64_t from, int64_t n)
{
    apa_tensor part = *x;
    part.data = (char *)x->data + (size_t)(from * x->stride[2]) * apa_dtype_bytes(x->dtype);
    part.shape[2] = n;
    return part;
}

static apa_kv_cache *make_cache(const material *m, int64_t page_size, int64_t pages, const char *preset,
                                const char *settings, int64_t window)
{
    apa_kv_cache_options options;
    apa_kv_cache *cache;
    const apa_recipe recipe = apa_test_recipe(preset, settings);
    apa_kv_cache_options_init(&options);
    options.heads = m->Hkv;
    options.dim = m->D;
    options.dim_v = m->Dv;
    options.dtype = m->dtype;
    options.page_size = page_size;
    options.pages = pages;
    options.recipe = &recipe;
    options.window_tiles = window;
    MUST(apa_kv_cache_create(context, &options, &cache));
    return cache;
}

static void append(apa_kv_cache *cache, int64_t sequence, const material *m, int64_t from, int64_t n)
{
    const apa_tensor k = rows(&m->k, from, n), v = rows(&m->v, from, n);
    MUST(apa_kv_cache_append(context, cache, &sequence, 1, &k, &v));
}

static int64_t add(apa_kv_cache *cache)
{
    int64_t sequence;
    MUST(apa_kv_cache_add(context, cache, &sequence));
    return sequence;
}

/* ---- attention ---- */

typedef struct result {
    float *out, *lse;
    int64_t B, Sq;
    size_t out_bytes, lse_bytes;
} result;

static result make_result(const material *m, int64_t B, int64_t Sq)
{
    result r = {
        NULL, NULL, B, Sq, sizeof(float) * (size_t)(B * m->Hq * Sq * m->Dv), sizeof(float) * (size_t)(B * m->Hq * Sq)};
    r.out = malloc(r.out_bytes + 1);
    r.lse = malloc(r.lse_bytes + 1);
    assert_true(r.out != NULL && r.lse != NULL);
    memset(r.out, 0xFF, r.out_bytes);
    memset(r.lse, 0xFF, r.lse_bytes);
    return r;
}

static void free_result(result *r)
{
    free(r->out);
    free(r->lse);
}

static apa_problem problem_of(const material *m, const result *r, int64_t from)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = rows(&m->q, from, r->Sq);
    p.q.shape[0] = r->B;
    p.q.stride[0] = 0; /* every sequence gets the same queries */
    p.out = apa_tensor_hnd(r->out, APA_DTYPE_F32, r->B, m->Hq, r->Sq, m->Dv);
    p.lse = apa_tensor_hnd(r->lse, APA_DTYPE_F32, r->B, m->Hq, r->Sq, 1);
    p.causal = APA_CAUSAL_BOTTOM_RIGHT;
    return p;
}

static void attend(const apa_kv_cache *cache, const int64_t *sequences, const apa_problem *p, const char *preset,
                   apa_statistics *statistics)
{
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "cpu";
    if (statistics != NULL)
        apa_statistics_init(statistics);
    apa_recipe recipe;
    if (preset != NULL)
        recipe = apa_test_recipe(preset, "");
    MUST(apa_kv_cache_attend(context, cache, sequences, p->q.shape[0], p, preset != NULL ? &recipe : NULL, &options,
                             statistics));
}

/* The last n of `keys` keys as queries, over a sequence of the cache. */
static result over_cache(const apa_kv_cache *cache, int64_t sequence, const material *m, int64_t keys, int64_t n,
                         const char *preset)
{
    result r = make_result(m, 1, n);
    const apa_problem p = problem_of(m, &r, keys - n);
    attend(cache, &sequence, &p, preset, NULL);
    return r;
}

static result over_flat_with(const material *m, int64_t keys, int64_t n, const char *preset, const char *settings)
{
    result r = make_result(m, 1, n);
    apa_problem p = problem_of(m, &r, keys - n);
    apa_attention_options options;
    const apa_recipe recipe = apa_test_recipe(preset, settings);
    apa_attention_options_init(&options);
    options.engine = "cpu";
    p.k = rows(&m->k, 0, keys);
    p.v = rows(&m->v, 0, keys);
    MUST(apa_attention(context, &p, &recipe, &options, NULL));
    return r;
}

static result over_flat(const material *m, int64_t keys, int64_t n, const char *preset)
{
    return over_flat_with(m, keys, n, preset, "");
}

static void same(const result *a, const result *b, const char *what)
{
    if (memcmp(a->out, b->out, a->out_bytes) != 0 || memcmp(a->lse, b->lse, a->lse_bytes) != 0)
        fail_msg("%s: the bits differ", what);
}

static double distance(const result *a, const result *b)
{
    double error = 0, norm = 0;
    for (size_t i = 0; i < a->out_bytes / sizeof(float); i++) {
        error += pow((double)a->out[i] - (double)b->out[i], 2);
        norm += pow((double)b->out[i], 2);
    }
    return sqrt(error / norm);
}

/* ---- filling ---- */

/* Any chunks, any page size: exact is flat attention bit for bit, apa that of one append, and near it. */
static void chunks(void **state)
{
    (void)state;
    static const int64_t page_sizes[] = {1, 7, 16, 64, 100, 1000};
    apa_test_rng rng = {apa_test_seed()};
    for (int i = 0; i < 6; i++) {
        material m = make_material(4, 2, i % 2 == 0 ? 32 : 20, 24, 1000, i % 3 == 0 ? APA_DTYPE_F16 : APA_DTYPE_F32);
        apa_kv_cache *whole = make_cache(&m, 64, 64, "apa", "", 0);
        apa_kv_cache *cut = make_cache(&m, page_sizes[i], 1000 / page_sizes[i] + 2, "apa", "", i % 2 == 0 ? 0 : 3);
        const int64_t b = add(cut);
        for (int64_t at = 0; at < 1000;) {
            const int64_t wanted = apa_test_below(&rng, 4) == 0 ? 1 : 1 + apa_test_below(&rng, 150);
            const int64_t n = wanted < 1000 - at ? wanted : 1000 - at;
            append(cut, b, &m, at, n);
            at += n;
            const int64_t a = add(whole), queries = n < 5 ? n : 5;
            append(whole, a, &m, 0, at);
            result one = over_cache(whole, a, &m, at, queries, NULL), other = over_cache(cut, b, &m, at, queries, NULL);
            same(&one, &other, "apa, one append and many");
            result exact = over_cache(cut, b, &m, at, queries, "exact"), flat = over_flat(&m, at, queries, "exact");
            same(&exact, &flat, "exact, cache and flat");
            const double error = distance(&other, &flat);
            if (!(error <= 0.03))
                fail_msg("apa over %d keys: relative L2 %g", (int)at, error);
            worst_apa = fmax(worst_apa, error);
            MUST(apa_kv_cache_remove(context, whole, a));
            result *all[] = {&one, &other, &exact, &flat};
            for (int r = 0; r < 4; r++)
                free_result(all[r]);
        }
        apa_kv_cache_destroy(whole);
        apa_kv_cache_destroy(cut);
        free_material(&m);
    }
}

/* Prefill in chunks, each attended when it is appended, against all rows at the end. */
static void chunked_prefill(void **state)
{
    (void)state;
    static const int64_t step[] = {1, 16, 48, 64, 200};
    const int64_t keys = 700;
    material m = make_material(4, 2, 64, 64, keys, APA_DTYPE_BF16);
    for (int method = 0; method < 2; method++)
        for (int i = 0; i < 5; i++) {
            apa_kv_cache *cache = make_cache(&m, 32, 40, method == 0 ? "exact" : "apa", "", 0);
            const int64_t s = add(cache);
            result parts = make_result(&m, 1, keys);
            for (int64_t at = 0; at < keys; at += step[i]) {
                const int64_t n = step[i] < keys - at ? step[i] : keys - at;
                append(cache, s, &m, at, n);
                result r = over_cache(cache, s, &m, at + n, n, NULL);
                for (int64_t h = 0; h < m.Hq; h++) {
                    memcpy(parts.out + (h * keys + at) * m.Dv, r.out + h * n * m.Dv,
                           sizeof(float) * (size_t)(n * m.Dv));
                    memcpy(parts.lse + h * keys + at, r.lse + h * n, sizeof(float) * (size_t)n);
                }
                free_result(&r);
            }
            result whole = over_cache(cache, s, &m, keys, keys, NULL), exact = over_flat(&m, keys, keys, "exact");
            if (method == 0) {
                same(&parts, &whole, "exact, chunks and one call");
                same(&parts, &exact, "exact, chunks and flat");
            } else {
                /* both are within the method's error of the exact result */
                const double apart = distance(&parts, &whole), error = distance(&whole, &exact);
                worst_chunked = fmax(worst_chunked, apart);
                if (!(error <= 0.02) || !(distance(&parts, &exact) <= 0.02) || !(apart <= 0.02))
                    fail_msg("apa in chunks of %d: %g from one call, %g and %g from exact", (int)step[i], apart,
                             distance(&parts, &exact), error);
            }
            free_result(&parts);
            free_result(&whole);
            free_result(&exact);
            apa_kv_cache_destroy(cache);
        }
    free_material(&m);
}

/* Batched: several sequences grow together and are attended together, each as if it were alone. */
static void batches(void **state)
{
    (void)state;
    enum { B = 5 };
    apa_context *own = context;
    material m = make_material(6, 2, 32, 32, 600, APA_DTYPE_F16);
    apa_kv_cache *cache = make_cache(&m, 16, 250, "apa", "", 0);
    int64_t sequence[B], keys[B] = {0, 60, 63, 300, 500};
    for (int b = 0; b < B; b++) {
        sequence[b] = add(cache);
        append(cache, sequence[b], &m, 0, keys[b]);
    }
    for (int step = 0; step < 4; step++) {
        apa_tensor k = rows(&m.k, 590, 1), v = rows(&m.v, 590, 1);
        k.shape[0] = v.shape[0] = B;
        k.stride[0] = v.stride[0] = 0;
        MUST(apa_kv_cache_append(context, cache, sequence, B, &k, &v));
        result all = make_result(&m, B, 1);
        const apa_problem p = problem_of(&m, &all, 590);
        apa_statistics statistics;
        context = apa_test_level_context(&level[0], 3); /* threads and levels make the same tiles */
        MUST(apa_kv_cache_rollback(context, cache, sequence[4], keys[4] + step));
        append(cache, sequence[4], &m, 590, 1);
        apa_context_destroy(context);
        context = own;
        attend(cache, sequence, &p, NULL, &statistics);
        assert_string_equal(statistics.engine, "cpu");
        for (int b = 0; b < B; b++) {
            assert_int_equal(apa_kv_cache_keys(cache, sequence[b]), keys[b] + step + 1);
            result one = make_result(&m, 1, 1);
            const apa_problem alone = problem_of(&m, &one, 590);
            attend(cache, &sequence[b], &alone, NULL, NULL);
            assert_memory_equal(one.out, all.out + b * m.Hq * m.Dv, one.out_bytes);
            assert_memory_equal(one.lse, all.lse + b * m.Hq, one.lse_bytes);
            free_result(&one);
        }
        free_result(&all);
    }
    apa_kv_cache_destroy(cache);
    free_material(&m);
}

/* Masks, slopes and sinks over a cache, and cu_seqlens_q, against double. */
static void scores(void **state)
{
    (void)state;
    material m = make_material(4, 2, 32, 24, 400, APA_DTYPE_F32);
    apa_kv_cache *cache = make_cache(&m, 48, 20, "apa", "smooth_k=off", 0);
    const int64_t list[2] = {add(cache), add(cache)}, cu[3] = {0, 7, 10};
    append(cache, list[0], &m, 0, 400);
    append(cache, list[1], &m, 100, 130);
    float sinks[4] = {0.5f, -1, 2, 0}, slopes[4] = {0.01f, 0.02f, 0, 0.1f}, *mask = malloc(sizeof(float) * 10 * 400);
    apa_test_rng rng = {4};
    for (int i = 0; i < 10 * 400; i++)
        mask[i] = apa_test_uniform(&rng) < 0.2 ? -INFINITY : (float)apa_test_normal(&rng);
    result r = make_result(&m, 1, 10);
    apa_problem p = problem_of(&m, &r, 0);
    p.cu_seqlens_q = cu;
    p.batch = 2;
    p.softcap = 20;
    p.sinks = apa_tensor_hnd(sinks, APA_DTYPE_F32, 1, 4, 1, 1);
    p.alibi_slopes = apa_tensor_hnd(slopes, APA_DTYPE_F32, 1, 4, 1, 1);
    p.attn_mask = apa_tensor_hnd(mask, APA_DTYPE_F32, 1, 1, 10, 400);
    apa_problem viewed = p;
    int64_t used[2], stride = 0;
    MUST(apa_kv_cache_view(context, cache, list, 2, NULL, NULL, NULL, &stride));
    assert_int_equal(stride, 9);
    int32_t table[18];
    MUST(apa_kv_cache_view(context, cache, list, 2, &viewed, used, table, &stride));
    double *out = apa_test_doubles(&p.out), *lse = apa_test_doubles(&p.lse);
    apa_test_scores_oracle(&viewed, out, lse, NULL);
    for (int method = 0; method < 2; method++) {
        apa_attention_options options;
        apa_attention_options_init(&options);
        options.engine = "cpu";
        const apa_recipe exact = apa_test_recipe("exact", "");
        MUST(apa_kv_cache_attend(context, cache, list, 2, &p, method == 0 ? &exact : NULL, &options, NULL));
        assert_true(apa_test_rel_l2(&p.out, out) <= (method == 0 ? 1e-5 : 0.03));
        assert_true(apa_test_lse_error(&p.lse, lse) <= (method == 0 ? 1e-5 : 0.03));
    }
    free(out);
    free(lse);
    free(mask);
    free_result(&r);
    apa_kv_cache_destroy(cache);
    free_material(&m);
}

/* ---- sharing ---- */

static apa_kv_cache_usage usage_of(const apa_kv_cache *cache)
{
    apa_kv_cache_usage usage;
    apa_kv_cache_usage_init(&usage);
    MUST(apa_kv_cache_usage_get(context, cache, &usage));
    return usage;
}

/* A fork shares everything until one side writes; then both are what they would be alone. */
static void forks(void **state)
{
    (void)state;
    material m = make_material(2, 2, 32, 32, 900, APA_DTYPE_F16);
    for (int flat = 0; flat < 2; flat++) {
        apa_kv_cache *cache = make_cache(&m, flat ? 1000 : 16, flat ? 6 : 200, "apa", "", 0);
        const int64_t a = add(cache);
        append(cache, a, &m, 0, 300);
        int64_t b, c;
        MUST(apa_kv_cache_fork(context, cache, a, &b));
        const apa_kv_cache_usage shared = usage_of(cache);
        assert_int_equal(shared.pages_used, flat ? 1 : 19);
        assert_int_equal(shared.tiles, 4);
        append(cache, b, &m, 500, 90); /* other keys than a gets */
        assert_int_equal(usage_of(cache).pages_used, flat ? 2 : 19 + 1 + 6);
        append(cache, a, &m, 300, 100);
        MUST(apa_kv_cache_fork(context, cache, b, &c));
        MUST(apa_kv_cache_rollback(context, cache, c, 310));
        append(cache, c, &m, 700, 3);
        /* the same three sequences without sharing */
        apa_kv_cache *apart = make_cache(&m, 64, 40, "apa", "", 0);
        const int64_t x = add(apart), y = add(apart), z = add(apart);
        append(apart, x, &m, 0, 400);
        append(apart, y, &m, 0, 300);
        append(apart, y, &m, 500, 90);
        append(apart, z, &m, 0, 300);
        append(apart, z, &m, 500, 10);
        append(apart, z, &m, 700, 3);
        const int64_t mine[] = {a, b, c}, theirs[] = {x, y, z};
        for (int i = 0; i < 3; i++)
            for (int method = 0; method < 2; method++) {
                const int64_t keys = apa_kv_cache_keys(apart, theirs[i]);
                assert_int_equal(apa_kv_cache_keys(cache, mine[i]), keys);
                result one = over_cache(cache, mine[i], &m, keys, 20, method == 0 ? "exact" : NULL);
                result other = over_cache(apart, theirs[i], &m, keys, 20, method == 0 ? "exact" : NULL);
                same(&one, &other, "shared and apart");
                free_result(&one);
                free_result(&other);
            }
        for (int i = 0; i < 3; i++)
            MUST(apa_kv_cache_remove(context, cache, mine[i]));
        assert_int_equal(usage_of(cache).pages_used, 0);
        assert_int_equal(usage_of(cache).tiles, 0);
        assert_int_equal(usage_of(cache).sequences, 0);
        apa_kv_cache_destroy(cache);
        apa_kv_cache_destroy(apart);
    }
    free_material(&m);
}

/* Speculation: roll back to anywhere, go on with other keys: as if the first ones had never been. */
static void rollbacks(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 3};
    material m = make_material(2, 1, 32, 16, 1200, APA_DTYPE_F32);
    for (int window = 0; window < 2; window++) {
        apa_kv_cache *cache = make_cache(&m, 24, 60, "apa", "", window * 2);
        const int64_t s = add(cache);
        int64_t keys = 0;
        for (int turn = 0; turn < 60; turn++) {
            const int64_t n = 1 + apa_test_below(&rng, turn % 7 == 0 ? 300 : 40);
            if (keys + n > 600 || apa_test_below(&rng, 3) == 0) {
                keys = apa_test_below(&rng, keys + 1);
                MUST(apa_kv_cache_rollback(context, cache, s, keys));
            }
            append(cache, s, &m, 600, n); /* wrong ones */
            MUST(apa_kv_cache_rollback(context, cache, s, keys));
            append(cache, s, &m, keys, n);
            keys += n;
            apa_kv_cache *fresh = make_cache(&m, 64, 20, "apa", "", 0);
            const int64_t f = add(fresh);
            append(fresh, f, &m, 0, keys);
            result one = over_cache(cache, s, &m, keys, 1, NULL), other = over_cache(fresh, f, &m, keys, 1, NULL);
            same(&one, &other, "rolled back and fresh");
            free_result(&one);
            free_result(&other);
            apa_kv_cache_destroy(fresh);
        }
        apa_kv_cache_destroy(cache);
    }
    free_material(&m);
}

/* ---- window and statistics ---- */

static void windows(void **state)
{
    (void)state;
    material m = make_material(2, 2, 32, 32, 2000, APA_DTYPE_F16);
    apa_kv_cache *all = make_cache(&m, 64, 40, "apa", "", 0), *some = make_cache(&m, 64, 40, "apa", "", 4);
    const int64_t a = add(all), b = add(some);
    for (int64_t at = 0; at < 2000; at += 100) {
        append(all, a, &m, at, 100);
        append(some, b, &m, at, 100);
        result one = over_cache(all, a, &m, at + 100, 30, NULL), other = over_cache(some, b, &m, at + 100, 30, NULL);
        same(&one, &other, "windowed copy");
        free_result(&one);
        free_result(&other);
    }
    assert_int_equal(usage_of(all).tiles, 31);
    assert_int_equal(usage_of(some).tiles, 5);
    apa_kv_cache_destroy(all);
    apa_kv_cache_destroy(some);
    free_material(&m);
}

/* K whose mean drifts far from where it began: renewed statistics keep the error of a fresh start, frozen ones don't.
 */
static void drift(void **state)
{
    (void)state;
    const int64_t keys = 4096;
    material m = make_material(2, 1, 64, 64, keys, APA_DTYPE_F32);
    for (int64_t j = 0; j < keys; j++)
        for (int64_t d = 0; d < 64; d += 8)
            apa_test_set(&m.k, 0, 0, j, d, apa_test_get(&m.k, 0, 0, j, d) + 30.0 * (double)j / (double)keys);
    double error[2];
    for (int frozen = 0; frozen < 2; frozen++) {
        apa_kv_cache_options options;
        apa_kv_cache *cache;
        const apa_recipe cold = apa_test_recipe("cold", "hadamard=off");
        apa_kv_cache_options_init(&options);
        options.heads = 1;
        options.dim = options.dim_v = 64;
        options.dtype = APA_DTYPE_F32;
        options.pages = 64;
        options.recipe = &cold;
        options.growth = frozen ? 1e30 : 1.125;
        MUST(apa_kv_cache_create(context, &options, &cache));
        const int64_t s = add(cache);
        append(cache, s, &m, 0, keys);
        result r = over_cache(cache, s, &m, keys, 64, NULL), exact = over_flat(&m, keys, 64, "exact");
        error[frozen] = distance(&r, &exact);
        free_result(&r);
        free_result(&exact);
        apa_kv_cache_destroy(cache);
    }
    result flat = over_flat_with(&m, keys, 64, "cold", "hadamard=off"), exact = over_flat(&m, keys, 64, "exact");
    const double one_mean = distance(&flat, &exact);
    printf("# drifting K, all cold, no rotation: mean renewed at 1.125 %.4f, frozen %.4f, one mean of all keys %.4f\n",
           error[0], error[1], one_mean);
    assert_true(error[0] < 0.7 * error[1]);
    assert_true(error[0] < 1.1 * one_mean);
    free_result(&flat);
    free_result(&exact);
    free_material(&m);
}

/* ---- files ---- */

static char path[64];

static void read_file(unsigned char **data, size_t *n)
{
    struct stat info;
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fstat(fileno(f), &info), 0);
    *n = (size_t)info.st_size;
    *data = malloc(*n);
    assert_int_equal(fread(*data, 1, *n, f), *n);
    fclose(f);
}

static void write_file(const unsigned char *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

static void refused(const char *says)
{
    apa_kv_cache *cache = (apa_kv_cache *)&path;
    const apa_status status = apa_kv_cache_load(context, path, &cache);
    if (status != APA_STATUS_BAD_FILE && status != APA_STATUS_IO)
        fail_msg("a bad file gave %s", apa_status_name(status));
    assert_null(cache);
    const char *message = apa_context_message(context);
    assert_non_null(strstr(message, path));
    assert_null(strchr(message, '\n'));
    if (says != NULL)
        assert_non_null(strstr(message, says));
}

/* The checksum as the file has it, written once more: what is behind it is to be reached by tests. */
static uint64_t crc(const unsigned char *data, size_t n)
{
    uint64_t x = ~(uint64_t)0;
    for (size_t i = 0; i < n; i++) {
        x ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            x = (x & 1) != 0 ? (x >> 1) ^ 0xC96C5795D7870F42u : x >> 1;
    }
    return ~x;
}

static void files(void **state)
{
    (void)state;
    material m = make_material(2, 2, 16, 8, 300, APA_DTYPE_F16);
    snprintf(path, sizeof path, "/tmp/apa_test_kv_cache_%ld", (long)getpid());
    apa_kv_cache *cache = make_cache(&m, 16, 64, "apa", "eps=0.03", 3);
    const int64_t a = add(cache), gone = add(cache), c = add(cache);
    append(cache, a, &m, 0, 200);
    append(cache, gone, &m, 50, 100);
    append(cache, c, &m, 20, 77);
    int64_t d;
    MUST(apa_kv_cache_fork(context, cache, a, &d));
    append(cache, d, &m, 30, 10);
    MUST(apa_kv_cache_remove(context, cache, gone));
    MUST(apa_kv_cache_save(context, cache, path));
    apa_kv_cache *back;
    MUST(apa_kv_cache_load(context, path, &back));
    assert_int_equal(apa_kv_cache_keys(back, gone), -1);
    assert_int_equal(usage_of(back).pages_used, usage_of(cache).pages_used);
    assert_int_equal(usage_of(back).tiles, usage_of(cache).tiles);
    const int64_t list[] = {a, c, d};
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 3; i++) {
            const int64_t keys = apa_kv_cache_keys(cache, list[i]);
            assert_int_equal(apa_kv_cache_keys(back, list[i]), keys);
            result one = over_cache(cache, list[i], &m, keys, 9, NULL),
                   other = over_cache(back, list[i], &m, keys, 9, NULL);
            same(&one, &other, "saved and loaded");
            free_result(&one);
            free_result(&other);
            append(cache, list[i], &m, 60, 33); /* and it goes on */
            append(back, list[i], &m, 60, 33);
        }
        assert_int_equal(add(back), add(cache));
    }
    apa_kv_cache_destroy(back);

    unsigned char *data;
    size_t n;
    read_file(&data, &n);
    for (size_t cut = 0; cut < n; cut += 1 + cut / 7) {
        write_file(data, cut);
        refused(NULL);
    }
    for (size_t at = 0; at < n; at += 1 + n / 300) {
        data[at] ^= 0x10;
        write_file(data, n);
        refused(NULL);
        data[at] ^= 0x10;
    }
    /* damage under a checksum that is right: numbers of the header, sequences and pages */
    for (size_t at = 8; at < n - 8 && at < 6000; at += 1 + at / 40) {
        for (int value = 0; value < 3; value++) {
            unsigned char before = data[at];
            data[at] = value == 0 ? 0xFF : value == 1 ? 0 : (unsigned char)(before + 1);
            const uint64_t sum = crc(data, n - 8);
            unsigned char kept[8];
            memcpy(kept, data + n - 8, 8);
            memcpy(data + n - 8, &sum, 8);
            write_file(data, n);
            apa_kv_cache *some = NULL;
            const apa_status status = apa_kv_cache_load(context, path, &some);
            assert_true((status == APA_STATUS_OK) == (some != NULL));
            apa_kv_cache_destroy(some);
            memcpy(data + n - 8, kept, 8);
            data[at] = before;
        }
    }
    data[8] = 2; /* version */
    const uint64_t sum = crc(data, n - 8);
    memcpy(data + n - 8, &sum, 8);
    write_file(data, n);
    refused("version");
    write_file((const unsigned char *)"not a cache, but long enough", 28);
    refused("APAKVC");
    unlink(path);
    refused(NULL);
    assert_int_equal(apa_kv_cache_save(context, cache, "/nowhere/at/all"), APA_STATUS_IO);
    free(data);
    apa_kv_cache_destroy(cache);
    free_material(&m);
}

/* ---- failures ---- */

/* Whichever allocation fails, the cache is as it was, and goes on. */
static void allocation_failures(void **state)
{
    (void)state;
    material m = make_material(2, 2, 16, 16, 1000, APA_DTYPE_F16);
    apa_kv_cache *cache = make_cache(&m, 16, 200, "apa", "", 0);
    const int64_t list[2] = {add(cache), add(cache)};
    append(cache, list[0], &m, 0, 100);
    append(cache, list[1], &m, 40, 300);
    result before[2];
    for (int i = 0; i < 2; i++)
        before[i] = over_cache(cache, list[i], &m, 1000, 2, NULL);
    apa_tensor k = rows(&m.k, 200, 600), v = rows(&m.v, 200, 600);
    k.shape[0] = v.shape[0] = 2;
    k.stride[0] = v.stride[0] = 0;
    const apa_kv_cache_usage usage = usage_of(cache);
    long tried = 0;
    apa_status status = APA_STATUS_OUT_OF_MEMORY;
    for (long at = 1; status != APA_STATUS_OK; at++, tried++) {
        failing = at;
        status = apa_kv_cache_append(context, cache, list, 2, &k, &v);
        failing = 0;
        if (status == APA_STATUS_OK)
            break;
        assert_int_equal(status, APA_STATUS_OUT_OF_MEMORY);
        const apa_kv_cache_usage now = usage_of(cache);
        assert_memory_equal(&now, &usage, sizeof now);
        for (int i = 0; i < 2; i++) {
            result r = over_cache(cache, list[i], &m, 1000, 2, NULL);
            same(&r, &before[i], "after a failed append");
            free_result(&r);
        }
        int64_t number = -7;
        failing = 1 + at % 5;
        if (apa_kv_cache_fork(context, cache, list[0], &number) == APA_STATUS_OK) {
            failing = 0;
            MUST(apa_kv_cache_remove(context, cache, number));
        }
        failing = 0;
        const apa_kv_cache_usage after = usage_of(cache);
        assert_memory_equal(&after, &usage, sizeof after);
        if (at % 2 == 0)
            continue; /* goes on with what the failed call has left */
        apa_kv_cache_destroy(cache);
        cache = make_cache(&m, 16, 200, "apa", "", 0);
        assert_int_equal(add(cache), list[0]);
        assert_int_equal(add(cache), list[1]);
        append(cache, list[0], &m, 0, 100);
        append(cache, list[1], &m, 40, 300);
    }
    printf("# %ld allocations failed one by one\n", tried);
    assert_true(tried >= 4);
    assert_int_equal(apa_kv_cache_keys(cache, list[1]), 900);
    for (int i = 0; i < 2; i++)
        free_result(&before[i]);
    apa_kv_cache_destroy(cache);
    for (long at = 1; at < 8; at++) { /* making one */
        apa_kv_cache_options options;
        apa_kv_cache_options_init(&options);
        options.heads = options.dim = options.dim_v = 2;
        options.pages = 3;
        failing = at;
        status = apa_kv_cache_create(context, &options, &cache);
        failing = 0;
        assert_true(status == APA_STATUS_OK ? cache != NULL : status == APA_STATUS_OUT_OF_MEMORY && cache == NULL);
        apa_kv_cache_destroy(cache);
    }
    free_material(&m);
}

static void expect_message(apa_status status, apa_status expected, const char *says)
{
    if (status != expected || strstr(apa_context_message(context), says) == NULL)
        fail_msg("%s \"%s\", expected %s with \"%s\"", apa_status_name(status), apa_context_message(context),
                 apa_status_name(expected), says);
}

static void mistakes(void **state)
{
    (void)state;
    material m = make_material(2, 2, 16, 16, 200, APA_DTYPE_F16);
    apa_kv_cache *cache = make_cache(&m, 16, 5, "apa", "", 0);
    const int64_t a = add(cache), twice[2] = {a, a}, missing = 17;
    apa_tensor k = rows(&m.k, 0, 100), v = rows(&m.v, 0, 100);
    expect_message(apa_kv_cache_append(context, cache, &a, 1, &k, &v), APA_STATUS_OUT_OF_MEMORY, "pages");
    k = rows(&m.k, 0, 10);
    expect_message(apa_kv_cache_append(context, cache, &a, 1, &k, &v), APA_STATUS_INVALID_ARGUMENT, "v: shape");
    v = rows(&m.v, 0, 10);
    expect_message(apa_kv_cache_append(context, cache, &missing, 1, &k, &v), APA_STATUS_INVALID_ARGUMENT, "17");
    k.shape[0] = v.shape[0] = 2;
    expect_message(apa_kv_cache_append(context, cache, twice, 2, &k, &v), APA_STATUS_INVALID_ARGUMENT, "twice");
    k.shape[0] = v.shape[0] = 1;
    k.dtype = APA_DTYPE_BF16;
    expect_message(apa_kv_cache_append(context, cache, &a, 1, &k, &v), APA_STATUS_INVALID_ARGUMENT, "k: dtype");
    append(cache, a, &m, 0, 70);
    expect_message(apa_kv_cache_rollback(context, cache, a, 71), APA_STATUS_INVALID_ARGUMENT, "71");
    result r = make_result(&m, 1, 3);
    apa_problem p = problem_of(&m, &r, 0);
    p.softcap = 10;
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "cpu";
    expect_message(apa_kv_cache_attend(context, cache, &a, 1, &p, NULL, &options, NULL), APA_STATUS_UNSUPPORTED,
                   "smooth_k");
    p.softcap = 0;
    expect_message(apa_kv_cache_attend(context, cache, &missing, 1, &p, NULL, &options, NULL),
                   APA_STATUS_INVALID_ARGUMENT, "17");
    p.seqused_k = &missing;
    expect_message(apa_kv_cache_attend(context, cache, &a, 1, &p, NULL, &options, NULL), APA_STATUS_INVALID_ARGUMENT,
                   "the cache's");
    free_result(&r);
    apa_kv_cache_destroy(cache);
    apa_kv_cache_options bad;
    apa_kv_cache_options_init(&bad);
    expect_message(apa_kv_cache_create(context, &bad, &cache), APA_STATUS_INVALID_ARGUMENT, "heads");
    bad.heads = bad.dim = bad.dim_v = 8;
    bad.pages = 4;
    bad.growth = 0.5;
    expect_message(apa_kv_cache_create(context, &bad, &cache), APA_STATUS_INVALID_ARGUMENT, "growth");
    free_material(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks),   cmocka_unit_test(chunked_prefill),
        cmocka_unit_test(batches),  cmocka_unit_test(scores),
        cmocka_unit_test(forks),    cmocka_unit_test(rollbacks),
        cmocka_unit_test(windows),  cmocka_unit_test(drift),
        cmocka_unit_test(files),    cmocka_unit_test(allocation_failures),
        cmocka_unit_test(mistakes),
    };
    return cmocka_run_group_tests_name("kv_cache", tests, set_up, tear_down);
}
