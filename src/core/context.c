/* The context: thread pool, ISA level, last message. */
#define _GNU_SOURCE /* sched_getaffinity: the cores that this process may use, not those that the machine has */
#include "core/context_internal.h"

#include <pthread.h>
#include <pthreadpool.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define APA_MAX_THREADS 4096
/* Idle threads of the pool spin for a while, so more than a few on a core cost more than they could ever give. */
#define THREADS_PER_CORE 4

struct apa_context {
    pthreadpool_t own_pool; /* NULL with one thread or a caller's pool */
    apa_parallel_for parallel_for;
    void *pool;
    int32_t threads;
    apa_isa isa;
    void *workspace; /* kept from call to call; grows */
    size_t workspace_bytes;
    char message[512];
};

void apa_context_options_init(apa_context_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
}

static int32_t usable_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (int32_t)CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online < 1 ? 1 : online > APA_MAX_THREADS ? APA_MAX_THREADS : (int32_t)online;
}

/* ------------------------------------------------------------------------------- how many threads there can be */

typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    bool open;
} gate;

static void *wait_at(void *argument)
{
    gate *g = argument;
    pthread_mutex_lock(&g->lock);
    while (!g->open)
        pthread_cond_wait(&g->opened, &g->lock);
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

/* How many of `wanted` threads, the caller's among them, the system lets there be at once; 0: no memory. pthreadpool
 * waits for ever for a thread that it could not start (a limit of processes, memory for stacks), so as many as it will
 * start are started here first, wait for each other, and end. What other programs start in between is not known here.
 */
static int32_t startable_threads(int32_t wanted)
{
    gate g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    pthread_t *thread = malloc((size_t)wanted * sizeof *thread);
    int32_t started = 0;
    if (thread == NULL)
        return 0;
    while (started < wanted - 1 && pthread_create(&thread[started], NULL, wait_at, &g) == 0)
        started++;
    pthread_mutex_lock(&g.lock);
    g.open = true;
    pthread_cond_broadcast(&g.opened);
    pthread_mutex_unlock(&g.lock);
    for (int32_t i = 0; i < started; i++)
        pthread_join(thread[i], NULL);
    free(thread);
    return started + 1;
}

/* The level that `name` asks for (NULL or "": the best), checked against what the CPU has. */
static apa_status choose_isa(const char *name, apa_isa *isa)
{
    const apa_isa best = apa_cpu_best_isa();
    if (name == NULL || name[0] == '\0') {
        *isa = best;
        return APA_STATUS_OK;
    }
    for (int level = APA_ISA_SCALAR; level <= APA_ISA_NEON; level++) {
        if (strcmp(name, apa_isa_name((apa_isa)level)) != 0)
            continue;
        *isa = (apa_isa)level;
        const int family_differs = (level == APA_ISA_NEON) != (best == APA_ISA_NEON);
        if (level != APA_ISA_SCALAR && (family_differs || level > (int)best))
            return APA_STATUS_UNSUPPORTED;
        return APA_STATUS_OK;
    }
    return APA_STATUS_INVALID_ARGUMENT;
}

apa_status apa_context_create(apa_context **context, const apa_context_options *options)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    *context = NULL;
    apa_context_options chosen;
    apa_context_options_init(&chosen);
    if (options != NULL) {
        if (options->size != sizeof *options || options->threads < 0 || options->threads > APA_MAX_THREADS)
            return APA_STATUS_INVALID_ARGUMENT;
        chosen = *options;
    }
    apa_isa isa;
    apa_status status = choose_isa(chosen.isa != NULL ? chosen.isa : getenv("APA_ISA"), &isa);
    if (status != APA_STATUS_OK)
        return status;

    apa_context *made = calloc(1, sizeof *made);
    if (made == NULL)
        return APA_STATUS_OUT_OF_MEMORY;
    made->isa = isa;
    made->parallel_for = chosen.parallel_for;
    made->pool = chosen.pool;
    const int32_t cores = usable_cores(),
                  most = cores < APA_MAX_THREADS / THREADS_PER_CORE ? cores * THREADS_PER_CORE : APA_MAX_THREADS;
    made->threads = chosen.threads == 0 ? cores : chosen.threads < most ? chosen.threads : most;
    if (chosen.parallel_for == NULL && made->threads > 1)
        made->threads = startable_threads(made->threads);
    if (chosen.parallel_for == NULL && made->threads > 1)
        made->own_pool = pthreadpool_create((size_t)made->threads);
    if (made->threads == 0 || (chosen.parallel_for == NULL && made->threads > 1 && made->own_pool == NULL)) {
        free(made);
        return APA_STATUS_OUT_OF_MEMORY;
    }
    *context = made;
    return APA_STATUS_OK;
}

void apa_context_destroy(apa_context *context)
{
    if (context == NULL)
        return;
    if (context->own_pool != NULL)
        pthreadpool_destroy(context->own_pool);
    apa_aligned_free(context->workspace);
    free(context);
}

const char *apa_context_message(const apa_context *context)
{
    return context == NULL ? "" : context->message;
}

int32_t apa_context_threads(const apa_context *context)
{
    return context->threads;
}

const char *apa_context_isa(const apa_context *context)
{
    return apa_isa_name(context->isa);
}

apa_isa apa_context_isa_level(const apa_context *context)
{
    return context->isa;
}

apa_status apa_fail(apa_context *context, apa_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(context->message, sizeof context->message, format, arguments);
    va_end(arguments);
    return status;
}

void *apa_context_workspace(apa_context *context, size_t bytes)
{
    if (bytes <= context->workspace_bytes)
        return context->workspace;
    apa_aligned_free(context->workspace);
    context->workspace = apa_aligned_allocate(1, bytes);
    context->workspace_bytes = context->workspace == NULL ? 0 : bytes;
    return context->workspace;
}

void apa_context_parallel(apa_context *context, void (*task)(void *argument, size_t index), void *argument,
                          size_t count)
{
    if (count == 0)
        return;
    if (context->parallel_for != NULL)
        context->parallel_for(context->pool, task, argument, count);
    else if (context->own_pool != NULL && count > 1)
        pthreadpool_parallelize_1d(context->own_pool, task, argument, count, 0);
    else
        for (size_t i = 0; i < count; i++)
            task(argument, i);
}

static void no_task(void *argument, size_t index)
{
    (void)argument;
    (void)index;
}

void apa_context_rest(apa_context *context)
{
    if (context->own_pool != NULL)
        pthreadpool_parallelize_1d(context->own_pool, no_task, NULL, (size_t)context->threads,
                                   PTHREADPOOL_FLAG_YIELD_WORKERS);
}
