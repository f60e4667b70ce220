/* The public entry points: making, one attention call from check to finish, and the small collectives around it. */
#include "dist/job.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SILENCE_S 20.0

void apa_dist_options_init(apa_dist_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
    options->silence_s = SILENCE_S;
}

void apa_dist_problem_init(apa_dist_problem *problem)
{
    memset(problem, 0, sizeof *problem);
    problem->size = sizeof *problem;
    apa_problem_init(&problem->local);
}

void apa_dist_call_init(apa_dist_call *call)
{
    memset(call, 0, sizeof *call);
    call->size = sizeof *call;
}

void apa_dist_statistics_init(apa_dist_statistics *statistics)
{
    memset(statistics, 0, sizeof *statistics);
    statistics->size = sizeof *statistics;
}

apa_status apa_dist_fail(apa_dist *dist, apa_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(dist->message, sizeof dist->message, format, arguments);
    va_end(arguments);
    return status;
}

apa_status apa_dist_lost(apa_dist *dist)
{
    return apa_dist_fail(dist, APA_STATUS_IO, "%s", apa_dist_wire_fault(dist->wire));
}

apa_status apa_dist_create(apa_dist **dist, const void *communicator, const apa_dist_options *options, char *message,
                           size_t message_size)
{
    if (message != NULL && message_size > 0)
        message[0] = '\0';
    if (dist == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    *dist = NULL;
    if (options != NULL && (options->size != sizeof *options || !(options->silence_s >= 1.0))) {
        if (message != NULL)
            snprintf(message, message_size, "options: not set up by apa_dist_options_init(), or silence_s under 1");
        return APA_STATUS_INVALID_ARGUMENT;
    }
    apa_dist *made = calloc(1, sizeof *made);
    if (made == NULL)
        return APA_STATUS_OUT_OF_MEMORY;
    apa_dist_options chosen;
    apa_dist_options_init(&chosen);
    if (options != NULL)
        chosen = *options;
    apa_status status = apa_dist_wire_open(&made->wire, communicator, chosen.silence_s, chosen.lost, chosen.user,
                                           message, message_size);
    if (status != APA_STATUS_OK) {
        free(made);
        return status;
    }
    *dist = made;
    return APA_STATUS_OK;
}

void apa_dist_destroy(apa_dist *dist)
{
    if (dist == NULL || apa_dist_wire_is_broken(dist->wire))
        return;
    apa_dist_wire_close(dist->wire);
    free(dist);
}

void apa_dist_abort(apa_dist *dist, int exit_code)
{
    apa_dist_wire_abort(dist->wire, exit_code);
    abort(); /* MPI_Abort does not come back where it works */
}

int32_t apa_dist_rank(const apa_dist *dist)
{
    return apa_dist_wire_rank(dist->wire);
}

int32_t apa_dist_ranks(const apa_dist *dist)
{
    return apa_dist_wire_ranks(dist->wire);
}

const char *apa_dist_message(const apa_dist *dist)
{
    return dist == NULL ? "" : dist->message;
}

void apa_dist_keep_alive(apa_dist *dist, int on)
{
    apa_dist_wire_keep(dist->wire, on != 0);
}

/* Gathers one number of every rank: the largest. Also a barrier. */
static apa_status agree(apa_dist *dist, int32_t code, int32_t *largest, double *wait_ms)
{
    const int32_t ranks = apa_dist_ranks(dist);
    int32_t *all = malloc((size_t)ranks * sizeof *all);
    if (all == NULL)
        return apa_dist_fail(dist, APA_STATUS_OUT_OF_MEMORY, "no memory for %d numbers", (int)ranks);
    all[apa_dist_rank(dist)] = code;
    apa_dist_op gather = {.kind = APA_DIST_OP_GATHER, .data = all, .bytes = (int64_t)sizeof *all};
    if (apa_dist_wire_do(dist->wire, &gather, "all ranks to come this far", wait_ms) != APA_STATUS_OK)
        return apa_dist_lost(dist); /* all stays MPI's */
    *largest = all[0];
    for (int32_t r = 1; r < ranks; r++)
        *largest = all[r] > *largest ? all[r] : *largest;
    free(all);
    return APA_STATUS_OK;
}

apa_status apa_dist_agree(apa_dist *dist, int32_t code, int32_t *largest)
{
    if (apa_dist_wire_enter(dist->wire) != APA_STATUS_OK)
        return apa_dist_lost(dist);
    apa_status status = agree(dist, code, largest, NULL);
    apa_dist_wire_leave(dist->wire);
    return status;
}

/* ------------------------------------------------------------------------------- attention */

static apa_status run(apa_dist_job *job)
{
    if (job->problem->queries == APA_DIST_QUERIES_WHOLE)
        return apa_dist_run_whole(job);
    if (job->statistics->exchange == APA_DIST_EXCHANGE_CODES)
        return apa_dist_run_codes(job);
    return apa_dist_run_exact(job);
}

/* Memory that one rank lacks ends the call on all, before anything is sent. */
static apa_status allocate(apa_dist_job *job)
{
    int32_t largest = 0;
    const apa_status own = apa_dist_job_allocate(job);
    apa_status status = agree(job->dist, own != APA_STATUS_OK, &largest, &job->statistics->wait_ms);
    if (status == APA_STATUS_OK && largest != 0)
        status = apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "%s of states could not be had",
                               own != APA_STATUS_OK ? "memory" : "another rank: memory");
    return status;
}

static apa_status steps(apa_dist_job *job, const apa_recipe *recipe, const apa_dist_call *call)
{
    apa_dist_statistics *s = job->statistics;
    int32_t ignored;
    apa_status status = apa_dist_check(job, recipe, call);
    if (status != APA_STATUS_OK)
        return status;
    job->engine = job->mine->engine;
    job->width = APA_DIST_ROW_HEAD + job->mine->Dv;
    job->G = job->mine->Hq / job->mine->Hkv;
    s->recipe = job->recipe;
    s->exchange = APA_DIST_EXCHANGE_EXACT;
    if (call->exchange == APA_DIST_EXCHANGE_CODES && job->recipe.force == APA_FORCE_HIGH)
        snprintf(s->reason, sizeof s->reason, "the recipe has no cold tiles");
    else if (call->exchange == APA_DIST_EXCHANGE_CODES && job->problem->queries == APA_DIST_QUERIES_WHOLE)
        snprintf(s->reason, sizeof s->reason, "no key travels");
    else if (call->exchange == APA_DIST_EXCHANGE_CODES)
        s->exchange = APA_DIST_EXCHANGE_CODES;
    status = allocate(job);
    if (status == APA_STATUS_OK)
        status = run(job);
    if (status == APA_STATUS_OK)
        status = apa_dist_finish(job);
    /* Nobody leaves, and stops giving signs of life, before all are through. */
    if (status == APA_STATUS_OK)
        status = agree(job->dist, 0, &ignored, &s->wait_ms);
    return status;
}

apa_status apa_dist_attention(apa_dist *dist, apa_context *context, const apa_dist_problem *problem,
                              const apa_recipe *recipe, const apa_dist_call *call, apa_dist_statistics *statistics)
{
    if (dist == NULL || context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    apa_dist_call plain;
    apa_dist_statistics local;
    apa_recipe preset;
    apa_dist_call_init(&plain);
    apa_dist_statistics_init(&local);
    apa_recipe_init(&preset, NULL);
    if (problem == NULL || problem->size != sizeof *problem || problem->local.size != sizeof problem->local)
        return apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT, "problem: not set up by apa_dist_problem_init()");
    if ((recipe != NULL && recipe->size != sizeof *recipe) || (call != NULL && call->size != sizeof *call) ||
        (statistics != NULL && statistics->size != sizeof *statistics))
        return apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT, "recipe, call or statistics: not set up by its init");
    const double start = apa_dist_now_ms();
    const apa_problem *p = &problem->local;
    apa_dist_job job = {.dist = dist,
                        .wire = dist->wire,
                        .context = context,
                        .problem = problem,
                        .q = p->q,
                        .k = p->k,
                        .v = p->v,
                        .out = p->out,
                        .lse = p->lse,
                        .statistics = &local};
    if (apa_dist_wire_enter(dist->wire) != APA_STATUS_OK)
        return apa_dist_lost(dist);
    local.rank = job.rank = apa_dist_rank(dist);
    local.ranks = job.ranks = apa_dist_ranks(dist);
    job.element = (int64_t)apa_dtype_bytes(p->q.dtype);
    job.card = calloc((size_t)job.ranks, sizeof *job.card);
    apa_status status = job.card == NULL
                            ? apa_dist_fail(dist, APA_STATUS_OUT_OF_MEMORY, "no memory for %d ranks", (int)job.ranks)
                            : steps(&job, recipe == NULL ? &preset : recipe, call == NULL ? &plain : call);
    apa_dist_wire_leave(dist->wire);
    if (!apa_dist_wire_is_broken(dist->wire))
        apa_dist_job_free(&job);
    local.total_ms = apa_dist_now_ms() - start;
    if (statistics != NULL && status == APA_STATUS_OK)
        *statistics = local;
    return status;
}

apa_status apa_dist_statistics_gather(apa_dist *dist, const apa_dist_statistics *mine, apa_dist_statistics *all)
{
    if (apa_dist_wire_enter(dist->wire) != APA_STATUS_OK)
        return apa_dist_lost(dist);
    all[apa_dist_rank(dist)] = *mine;
    apa_dist_op gather = {.kind = APA_DIST_OP_GATHER, .data = all, .bytes = (int64_t)sizeof *all};
    apa_status status = apa_dist_wire_do(dist->wire, &gather, "the other ranks' statistics", NULL);
    apa_dist_wire_leave(dist->wire);
    return status == APA_STATUS_OK ? status : apa_dist_lost(dist);
}
