/* What may happen at once. The rule (apa/context.h): one context serves one call at a time, different contexts are
 * independent, also where they read the same inputs, share a recipe, or are made and destroyed meanwhile; a caller who
 * wants one context for several threads locks around its calls. Each of these is done here, by threads that start
 * together; the results must be those of the same calls one after the other, bit by bit. scripts/tsan.sh runs it under
 * ThreadSanitizer. */
#include "support/problems.h"
#include "support/test.h"

#include "apa/apa.h"
#include "apa/state.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, ROUNDS = 3, HQ = 4, HKV = 2, SQ = 40, SKV = 200, DIM = 32 };

static float q[HQ * SQ * DIM], k[HKV * SKV * DIM], v[HKV * SKV * DIM];
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

/* pthreadpool is a library that ThreadSanitizer does not see into: under it, and here anyway, a pool of plain threads.
 */
#if defined(__SANITIZE_THREAD__)
#define SANITIZES_THREADS true
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SANITIZES_THREADS true
#endif
#endif
#ifndef SANITIZES_THREADS
#define SANITIZES_THREADS false
#endif

typedef struct share {
    void (*task)(void *argument, size_t index);
    void *argument;
    size_t first, count;
} share;

static void *run_share(void *argument)
{
    const share *mine = argument;
    for (size_t i = mine->first; i < mine->count; i += THREADS)
        mine->task(mine->argument, i);
    return NULL;
}

static void spread(void *pool, void (*task)(void *argument, size_t index), void *argument, size_t count)
{
    pthread_t thread[THREADS];
    share shares[THREADS];
    (void)pool;
    for (size_t i = 0; i < THREADS; i++) {
        shares[i] = (share){task, argument, i, count};
        if (pthread_create(&thread[i], NULL, run_share, &shares[i]) != 0)
            abort();
    }
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
}

/* way 0: one thread; 1: the library's own pool; 2: a caller's */
static apa_status new_context(int way, apa_context **context)
{
    apa_context_options options;
    apa_context_options_init(&options);
    options.threads = way == 0 ? 1 : 2;
    options.parallel_for = way == 2 || (way == 1 && SANITIZES_THREADS) ? spread : NULL;
    return apa_context_create(context, &options);
}

typedef struct caller {
    const char *engine, *method;
    apa_context *context; /* NULL: one of its own, made for each call */
    bool locks;
    float out[HQ * SQ * DIM], lse[HQ * SQ];
    apa_status status;
} caller;

static apa_status attend(apa_context *context, caller *c)
{
    apa_problem p;
    apa_recipe recipe;
    apa_attention_options options;
    apa_problem_init(&p);
    apa_attention_options_init(&options);
    options.engine = c->engine;
    p.q = apa_tensor_hnd(q, APA_DTYPE_F32, 1, HQ, SQ, DIM);
    p.k = apa_tensor_hnd(k, APA_DTYPE_F32, 1, HKV, SKV, DIM);
    p.v = apa_tensor_hnd(v, APA_DTYPE_F32, 1, HKV, SKV, DIM);
    p.out = apa_tensor_hnd(c->out, APA_DTYPE_F32, 1, HQ, SQ, DIM);
    p.lse = apa_tensor_hnd(c->lse, APA_DTYPE_F32, 1, HQ, SQ, 1);
    p.causal = APA_CAUSAL_BOTTOM_RIGHT;
    const apa_status status = apa_recipe_init(&recipe, c->method);
    return status == APA_STATUS_OK ? apa_attention(context, &p, &recipe, &options, NULL) : status;
}

static void *call(void *argument)
{
    caller *c = argument;
    for (int round = 0; round < ROUNDS && c->status == APA_STATUS_OK; round++) {
        apa_context *context = c->context;
        if (context == NULL)
            c->status = new_context(round, &context);
        if (c->locks)
            pthread_mutex_lock(&one_at_a_time);
        if (c->status == APA_STATUS_OK)
            c->status = attend(context, c);
        if (c->locks)
            pthread_mutex_unlock(&one_at_a_time);
        if (c->context == NULL)
            apa_context_destroy(context);
    }
    return NULL;
}

/* All callers at once; then each alone, and the same bits. */
static void together(caller *callers)
{
    pthread_t thread[THREADS];
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, call, &callers[i]), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(thread[i], NULL), 0);
    for (int i = 0; i < THREADS; i++) {
        caller *alone = malloc(sizeof *alone);
        assert_non_null(alone);
        assert_int_equal(callers[i].status, APA_STATUS_OK);
        memset(alone, 0, sizeof *alone);
        alone->engine = callers[i].engine;
        alone->method = callers[i].method;
        call(alone);
        assert_int_equal(alone->status, APA_STATUS_OK);
        assert_memory_equal(alone->out, callers[i].out, sizeof alone->out);
        assert_memory_equal(alone->lse, callers[i].lse, sizeof alone->lse);
        free(alone);
    }
}

static caller *new_callers(void)
{
    static const char *const engines[] = {"cpu", "reference", "cpu", "cpu"}, *const methods[] = {"apa", "apa", "exact",
                                                                                                 "cold"};
    caller *callers = calloc(THREADS, sizeof *callers);
    assert_non_null(callers);
    for (int i = 0; i < THREADS; i++) {
        callers[i].engine = engines[i];
        callers[i].method = methods[i];
    }
    return callers;
}

static void contexts_of_their_own(void **unused)
{
    (void)unused;
    caller *callers = new_callers();
    together(callers);
    free(callers);
}

/* Kept from call to call, each with a pool. */
static void contexts_that_stay(void **unused)
{
    (void)unused;
    caller *callers = new_callers();
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(new_context(1 + i % 2, &callers[i].context), APA_STATUS_OK);
    together(callers);
    for (int i = 0; i < THREADS; i++)
        apa_context_destroy(callers[i].context);
    free(callers);
}

static void one_context_and_a_lock(void **unused)
{
    (void)unused;
    caller *callers = new_callers();
    apa_context *shared;
    assert_int_equal(new_context(1, &shared), APA_STATUS_OK);
    for (int i = 0; i < THREADS; i++) {
        callers[i].context = shared;
        callers[i].locks = true;
    }
    together(callers);
    apa_context_destroy(shared);
    free(callers);
}

/* What says it is thread-safe: names, presets, knobs, defaults. */
static void *look_up(void *argument)
{
    apa_status *status = argument;
    for (int round = 0; round < 50; round++) {
        apa_recipe recipe;
        char text[64];
        for (size_t i = 0; apa_recipe_preset_name(i) != NULL && *status == APA_STATUS_OK; i++)
            *status = apa_recipe_init(&recipe, apa_recipe_preset_name(i));
        for (size_t i = 0; apa_recipe_knob_at(i) != NULL && *status == APA_STATUS_OK; i++)
            *status = apa_recipe_get(&recipe, apa_recipe_knob_at(i)->name, text, sizeof text);
        for (size_t i = 0; apa_engine_name(i) != NULL; i++)
            if (apa_engine_name(i)[0] == '\0')
                *status = APA_STATUS_INTERNAL;
    }
    return NULL;
}

static void tables(void **unused)
{
    (void)unused;
    pthread_t thread[THREADS];
    apa_status status[THREADS] = {APA_STATUS_OK};
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, look_up, &status[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(thread[i], NULL), 0);
        assert_int_equal(status[i], APA_STATUS_OK);
    }
}

static int set_up(void **unused)
{
    (void)unused;
    apa_test_rng rng = {apa_test_seed()};
    for (size_t i = 0; i < sizeof q / sizeof *q; i++)
        q[i] = (float)apa_test_normal(&rng);
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        k[i] = (float)apa_test_normal(&rng);
        v[i] = (float)apa_test_normal(&rng);
    }
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(contexts_of_their_own), cmocka_unit_test(contexts_that_stay),
                                       cmocka_unit_test(one_context_and_a_lock), cmocka_unit_test(tables)};
    return cmocka_run_group_tests(tests, set_up, NULL);
}
