/* Sequences go to the engine in windows: enough of them to keep all threads busy, few enough that their calls take no
 * memory to speak of. */
#include "attention/batch.h"

#include "attention/sequences.h"

#define WINDOW 1024

typedef struct batch {
    const apa_engine *engine;
    const apa_problem *problem;
    const apa_call *whole;
    int64_t count;
    apa_call *call; /* [WINDOW] */
} batch;

static apa_status open_batch(apa_context *context, const apa_engine *engine, const apa_problem *problem,
                             const apa_call *whole, batch *all)
{
    const int64_t count = apa_sequences_count(problem);
    *all = (batch){.engine = engine, .problem = problem, .whole = whole, .count = count};
    all->call = apa_aligned_allocate((size_t)(count < WINDOW ? count : WINDOW), sizeof *all->call);
    if (all->call == NULL)
        return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "batch: no memory for the calls of its sequences");
    return APA_STATUS_OK;
}

/* Sequences first … first+n-1, resolved. */
static apa_status load_window(apa_context *context, const batch *all, int64_t first, int64_t *n)
{
    *n = all->count - first < WINDOW ? all->count - first : WINDOW;
    for (int64_t i = 0; i < *n; i++) {
        apa_sequences_call(all->problem, all->whole, first + i, &all->call[i]);
        const apa_status status = all->engine->resolve(context, &all->call[i]);
        if (status != APA_STATUS_OK)
            return status;
    }
    return APA_STATUS_OK;
}

static size_t window_bytes(const apa_context *context, const batch *all, int64_t n)
{
    if (all->engine->run_batch != NULL)
        return all->engine->batch_workspace_bytes(context, all->call, n);
    size_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const size_t bytes = all->engine->workspace_bytes(context, &all->call[i]);
        most = bytes > most ? bytes : most;
    }
    return most;
}

apa_status apa_batch_workspace_bytes(apa_context *context, const apa_engine *engine, const apa_problem *problem,
                                     const apa_call *whole, size_t *bytes)
{
    batch all;
    apa_status status = open_batch(context, engine, problem, whole, &all);
    *bytes = 0;
    for (int64_t first = 0, n; status == APA_STATUS_OK && first < all.count; first += n) {
        status = load_window(context, &all, first, &n);
        const size_t window = status == APA_STATUS_OK ? window_bytes(context, &all, n) : 0;
        *bytes = window > *bytes ? window : *bytes;
    }
    apa_aligned_free(all.call);
    return status;
}

static void add(apa_statistics *sum, const apa_statistics *one)
{
    sum->visible += one->visible;
    sum->hot += one->hot;
    sum->cold += one->cold;
    sum->skipped += one->skipped;
    sum->candidates += one->candidates;
    sum->prep_ms += one->prep_ms;
    sum->attention_ms += one->attention_ms;
    sum->lamp_sub_blocks += one->lamp_sub_blocks;
    sum->lamp_recomputed += one->lamp_recomputed;
    sum->lamp_tiles += one->lamp_tiles;
    sum->lamp_disruptive += one->lamp_disruptive;
}

static apa_status run_window(apa_context *context, const batch *all, int64_t n, void *workspace,
                             apa_statistics *statistics)
{
    apa_status status = APA_STATUS_OK;
    apa_statistics one;
    apa_statistics_init(&one);
    if (all->engine->run_batch != NULL) {
        status = all->engine->run_batch(context, all->call, n, workspace, &one);
        add(statistics, &one);
        return status;
    }
    for (int64_t i = 0; i < n && status == APA_STATUS_OK; i++) {
        apa_statistics_init(&one);
        status = all->engine->run(context, &all->call[i], workspace, &one);
        add(statistics, &one);
    }
    return status;
}

apa_status apa_batch_run(apa_context *context, const apa_engine *engine, const apa_problem *problem,
                         const apa_call *whole, void *workspace, apa_statistics *statistics)
{
    batch all;
    apa_status status = open_batch(context, engine, problem, whole, &all);
    for (int64_t first = 0, n; status == APA_STATUS_OK && first < all.count; first += n) {
        status = load_window(context, &all, first, &n);
        if (status == APA_STATUS_OK)
            status = run_window(context, &all, n, workspace, statistics);
    }
    apa_aligned_free(all.call);
    return status;
}
