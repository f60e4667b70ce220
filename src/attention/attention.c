/* The public entry points: plan, workspace, run. */
#include "attention/attention.h"

#include "attention/batch.h"
#include "attention/plan.h"
#include "attention/sequences.h"

#include <math.h>
#include <string.h>

void apa_problem_init(apa_problem *problem)
{
    memset(problem, 0, sizeof *problem);
    problem->size = sizeof *problem;
    problem->softmax_scale = NAN;
    problem->q_offset = APA_Q_OFFSET_DEFAULT;
    problem->window_left = -1;
    problem->window_right = -1;
}

void apa_attention_options_init(apa_attention_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
}

void apa_statistics_init(apa_statistics *statistics)
{
    memset(statistics, 0, sizeof *statistics);
    statistics->size = sizeof *statistics;
}

void apa_plan_init(apa_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    plan->size = sizeof *plan;
}

static void copy_name(char *to, size_t size, const char *from)
{
    size_t n = strlen(from);
    n = n < size - 1 ? n : size - 1;
    memcpy(to, from, n);
    to[n] = '\0';
}

static apa_status workspace_bytes(apa_context *context, const apa_problem *problem, const apa_engine *engine,
                                  const apa_call *call, size_t *bytes)
{
    if (apa_sequences_differ(problem))
        return apa_batch_workspace_bytes(context, engine, problem, call, bytes);
    *bytes = engine->workspace_bytes(context, call);
    return APA_STATUS_OK;
}

apa_status apa_attention_plan(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                              const apa_attention_options *options, apa_plan *plan)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (plan == NULL || plan->size != sizeof *plan)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "plan: NULL or not set up by apa_plan_init()");
    apa_call call;
    const apa_engine *engine;
    apa_status status = apa_plan_call(context, problem, recipe, options, APA_PLAN_NO_DATA, &call, &engine);
    if (status != APA_STATUS_OK)
        return status;
    copy_name(plan->engine, sizeof plan->engine, engine->name);
    engine->kernel_name(context, &call, plan->kernel, sizeof plan->kernel);
    plan->recipe = call.recipe;
    plan->softmax_scale = call.scale;
    plan->q_offset = call.q_offset;
    return workspace_bytes(context, problem, engine, &call, &plan->workspace_bytes);
}

apa_status apa_attention(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                         const apa_attention_options *options, apa_statistics *statistics)
{
    return apa_attention_over(context, problem, recipe, options, statistics, NULL, 0);
}

apa_status apa_attention_over(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                              const apa_attention_options *options, apa_statistics *statistics,
                              const struct apa_kept *kept, int64_t count)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (statistics != NULL && statistics->size != sizeof *statistics)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "statistics: not set up by apa_statistics_init()");
    apa_call call;
    const apa_engine *engine;
    apa_status status = apa_plan_call(context, problem, recipe, options, APA_PLAN_HOST_DATA, &call, &engine);
    if (status != APA_STATUS_OK)
        return status;
    if (kept != NULL && (!apa_sequences_differ(problem) || call.B != count))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "batch: %lld sequences, expected the %lld of the list",
                        (long long)call.B, (long long)count);
    call.kept = kept;

    size_t bytes;
    status = workspace_bytes(context, problem, engine, &call, &bytes);
    if (status != APA_STATUS_OK)
        return status;
    void *workspace = NULL;
    if (options != NULL && options->workspace != NULL) {
        if (options->workspace_bytes < bytes || (uintptr_t)options->workspace % 64 != 0)
            return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                            "workspace: %zu bytes at alignment %zu, expected %zu bytes aligned to 64",
                            options->workspace_bytes, (size_t)((uintptr_t)options->workspace % 64), bytes);
        workspace = options->workspace;
    } else if (bytes > 0) {
        workspace = apa_context_workspace(context, bytes);
        if (workspace == NULL)
            return apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "workspace: %zu bytes could not be had", bytes);
    }

    apa_statistics local;
    apa_statistics_init(&local);
    copy_name(local.engine, sizeof local.engine, engine->name);
    engine->kernel_name(context, &call, local.kernel, sizeof local.kernel);
    local.recipe = call.recipe;
    local.workspace_bytes = bytes;
    status = apa_sequences_differ(problem) ? apa_batch_run(context, engine, problem, &call, workspace, &local)
                                           : engine->run(context, &call, workspace, &local);
    apa_context_rest(context);
    if (status != APA_STATUS_OK)
        return status;
    if (local.visible > 0) {
        local.hot_share = (double)local.hot / (double)local.visible;
        local.skip_share = (double)local.skipped / (double)local.visible;
    }
    if (statistics != NULL)
        *statistics = local;
    return APA_STATUS_OK;
}
