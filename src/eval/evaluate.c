/* A method against the truth: runs, times, measures.
 *
 * Scratch memory is allocated and touched once for all runs, so that no run pays for fresh pages. Method and exact are
 * timed in turn, repeat by repeat, so that a machine that slows down slows both; the figures are medians. The truth is
 * the reference engine's exact attention in double; it is computed in slices of rows (which by the contract of `exact`
 * changes no bit) so that progress can be told. */
#include "apa/eval.h"

#include "attention/sequences.h"
#include "core/context_internal.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRUTH_ROWS ((int64_t)512) /* positions per slice: enough rows for every thread */

void apa_evaluation_options_init(apa_evaluation_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
    options->repeats = 3;
    options->time_exact = 1;
}

/* ------------------------------------------------------------------------------- truth */

/* `count` entries of an axis, from `first`. */
static apa_tensor slice(apa_tensor tensor, int axis, int64_t first, int64_t count)
{
    const int64_t bytes = (int64_t)apa_dtype_bytes(tensor.dtype);
    if (tensor.data != NULL)
        tensor.data = (char *)tensor.data + first * tensor.stride[axis] * bytes;
    tensor.shape[axis] = count;
    return tensor;
}

/* The same of something that may repeat along the axis, or not be given. */
static apa_tensor slice_repeating(apa_tensor tensor, int axis, int64_t first, int64_t count)
{
    return tensor.dtype == APA_DTYPE_NONE || tensor.shape[axis] == 1 ? tensor : slice(tensor, axis, first, count);
}

static apa_problem slice_problem(const apa_problem *whole, int64_t batch, int64_t kv_head, int64_t row, int64_t rows)
{
    const int64_t G = whole->q.shape[1] / whole->k.shape[1];
    apa_problem part = *whole;
    apa_tensor *const of_queries[3] = {&part.q, &part.out, &part.lse}, *const of_keys[2] = {&part.k, &part.v};
    for (int i = 0; i < 3; i++)
        if (of_queries[i]->dtype != APA_DTYPE_NONE)
            *of_queries[i] = slice(slice(slice(*of_queries[i], 0, batch, 1), 1, kv_head * G, G), 2, row, rows);
    for (int i = 0; i < 2; i++)
        *of_keys[i] = slice(slice(*of_keys[i], 0, batch, 1), 1, kv_head, 1);
    apa_tensor *const of_heads[4] = {&part.attn_mask, &part.mask_slopes, &part.alibi_slopes, &part.sinks};
    for (int i = 0; i < 4; i++)
        *of_heads[i] = slice_repeating(slice_repeating(*of_heads[i], 0, batch, 1), 1, kv_head * G, G);
    part.attn_mask = slice_repeating(part.attn_mask, 2, row, rows);
    part.q_offset += row;
    return part;
}

static apa_status truth_in_slices(apa_context *context, const apa_problem *problem, const apa_recipe *exact,
                                  const apa_attention_options *options, apa_progress progress, void *user)
{
    const int64_t B = problem->q.shape[0], Hkv = problem->k.shape[1], Sq = problem->q.shape[2];
    const int64_t per_head = (Sq + TRUTH_ROWS - 1) / TRUTH_ROWS, slices = B * Hkv * per_head;
    apa_status status = APA_STATUS_OK;
    for (int64_t i = 0; i < slices && status == APA_STATUS_OK; i++) {
        progress(user, "truth", (double)i / (double)slices);
        const int64_t row = i % per_head * TRUTH_ROWS, rows = Sq - row < TRUTH_ROWS ? Sq - row : TRUTH_ROWS;
        const apa_problem part = slice_problem(problem, i / per_head / Hkv, i / per_head % Hkv, row, rows);
        status = apa_attention(context, &part, exact, options, NULL);
    }
    progress(user, "truth", 1);
    return status;
}

apa_status apa_truth_compute(apa_context *context, const apa_problem *problem, const apa_tensor *out,
                             const apa_tensor *lse, apa_progress progress, void *progress_user)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (problem == NULL || out == NULL || out->dtype != APA_DTYPE_F64 ||
        (lse != NULL && lse->dtype != APA_DTYPE_NONE && lse->dtype != APA_DTYPE_F64))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "truth: expected a problem, an f64 out, and an f64 lse or none");
    apa_problem whole = *problem;
    whole.out = *out;
    memset(&whole.lse, 0, sizeof whole.lse);
    if (lse != NULL)
        whole.lse = *lse;
    apa_recipe exact;
    apa_status status = apa_recipe_init(&exact, "exact");
    if (status != APA_STATUS_OK)
        return apa_fail(context, APA_STATUS_INTERNAL, "preset \"exact\" is missing");
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "reference";
    apa_plan plan;
    apa_plan_init(&plan);
    status = apa_attention_plan(context, &whole, &exact, &options, &plan);
    if (status != APA_STATUS_OK)
        return status;
    int64_t last_offset;
    if (apa_sequences_differ(&whole)) /* each has an offset of its own */
        return apa_attention(context, &whole, &exact, &options, NULL);
    whole.q_offset = plan.q_offset;
    if (whole.causal == APA_CAUSAL_TOP_LEFT)
        whole.causal = APA_CAUSAL_BOTTOM_RIGHT; /* with the offset that it stands for */
    if (progress == NULL || __builtin_add_overflow(whole.q_offset, whole.q.shape[2], &last_offset))
        return apa_attention(context, &whole, &exact, &options, NULL);
    return truth_in_slices(context, &whole, &exact, &options, progress, progress_user);
}

/* ------------------------------------------------------------------------------- evaluation */

typedef struct evaluation_run {
    apa_context *context;
    const apa_evaluation_options *options;
    apa_problem problem, exact_problem;
    apa_recipe exact;
    apa_tensor truth, truth_lse;
    void *memory[7];
    int buffers;
    void *workspace;
    size_t workspace_bytes;
    double *times; /* prep, attention, exact: repeats each */
} evaluation_run;

/* A contiguous [B,H,S,dim] of our own. */
static bool make_tensor(evaluation_run *run, apa_dtype dtype, int64_t dim, apa_tensor *tensor)
{
    const int64_t *q = run->problem.q.shape;
    int64_t elements;
    if (__builtin_mul_overflow(q[0], q[1], &elements) || __builtin_mul_overflow(elements, q[2], &elements) ||
        __builtin_mul_overflow(elements, dim, &elements) || elements < 0)
        return false;
    void *data = apa_aligned_allocate((size_t)elements, apa_dtype_bytes(dtype));
    if (data == NULL)
        return false;
    run->memory[run->buffers++] = data;
    *tensor = apa_tensor_hnd(data, dtype, q[0], q[1], q[2], dim);
    return true;
}

static apa_status no_memory(evaluation_run *run)
{
    return apa_fail(run->context, APA_STATUS_OUT_OF_MEMORY, "no memory for the outputs to compare");
}

/* Outputs where the caller has none: f32, or f64 for f64 inputs. */
static apa_status make_outputs(evaluation_run *run)
{
    const int64_t Dv = run->problem.v.shape[3];
    const apa_dtype dtype = run->problem.q.dtype == APA_DTYPE_F64 ? APA_DTYPE_F64 : APA_DTYPE_F32;
    if (run->problem.out.dtype == APA_DTYPE_NONE && !make_tensor(run, dtype, Dv, &run->problem.out))
        return no_memory(run);
    if (run->problem.lse.dtype == APA_DTYPE_NONE && !make_tensor(run, dtype, 1, &run->problem.lse))
        return no_memory(run);
    run->exact_problem = run->problem;
    if (run->options->time_exact && (!make_tensor(run, run->problem.out.dtype, Dv, &run->exact_problem.out) ||
                                     !make_tensor(run, run->problem.lse.dtype, 1, &run->exact_problem.lse)))
        return no_memory(run);
    return APA_STATUS_OK;
}

static void tell(const evaluation_run *run, const char *phase, double fraction)
{
    if (run->options->progress != NULL)
        run->options->progress(run->options->progress_user, phase, fraction);
}

static apa_status find_truth(evaluation_run *run)
{
    run->truth = run->options->truth;
    run->truth_lse = run->options->truth_lse;
    if (run->truth.dtype != APA_DTYPE_NONE)
        return APA_STATUS_OK;
    if (!make_tensor(run, APA_DTYPE_F64, run->problem.v.shape[3], &run->truth) ||
        !make_tensor(run, APA_DTYPE_F64, 1, &run->truth_lse))
        return no_memory(run);
    return apa_truth_compute(run->context, &run->problem, &run->truth, &run->truth_lse, run->options->progress,
                             run->options->progress_user);
}

static apa_status time_runs(evaluation_run *run, const apa_recipe *recipe, apa_statistics *statistics)
{
    const int32_t repeats = run->options->repeats;
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = run->options->engine;
    options.workspace = run->workspace;
    options.workspace_bytes = run->workspace_bytes;
    apa_status status = APA_STATUS_OK;
    for (int32_t i = 0; i < repeats && status == APA_STATUS_OK; i++) {
        tell(run, "runs", (double)i / repeats);
        options.verdicts = i == repeats - 1 ? run->options->verdicts : NULL;
        apa_statistics_init(statistics);
        status = apa_attention(run->context, &run->problem, recipe, &options, statistics);
        run->times[i] = statistics->prep_ms;
        run->times[repeats + i] = statistics->attention_ms;
        if (status != APA_STATUS_OK || !run->options->time_exact)
            continue;
        apa_attention_options same = options;
        same.verdicts = NULL;
        same.engine = statistics->engine; /* auto might choose another engine for exact */
        apa_statistics exact_statistics;
        apa_statistics_init(&exact_statistics);
        status = apa_attention(run->context, &run->exact_problem, &run->exact, &same, &exact_statistics);
        run->times[2 * repeats + i] = exact_statistics.prep_ms + exact_statistics.attention_ms;
    }
    tell(run, "runs", 1);
    return status;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int32_t n)
{
    qsort(values, (size_t)n, sizeof *values, by_value);
    return n % 2 != 0 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

/* Refuses what cannot run, before the long computation of the truth, and gets scratch memory for method and exact. */
static apa_status plan_runs(evaluation_run *run, const apa_recipe *recipe)
{
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = run->options->engine;
    apa_plan method, exact;
    apa_plan_init(&method);
    apa_plan_init(&exact);
    apa_status status = apa_attention_plan(run->context, &run->problem, recipe, &options, &method);
    if (status == APA_STATUS_OK && run->options->time_exact) {
        options.engine = method.engine;
        status = apa_attention_plan(run->context, &run->exact_problem, &run->exact, &options, &exact);
    }
    if (status != APA_STATUS_OK)
        return status;
    run->workspace_bytes =
        method.workspace_bytes > exact.workspace_bytes ? method.workspace_bytes : exact.workspace_bytes;
    run->workspace = run->memory[run->buffers++] = apa_aligned_allocate(1, run->workspace_bytes);
    if (run->workspace == NULL)
        return apa_fail(run->context, APA_STATUS_OUT_OF_MEMORY, "workspace: %zu bytes could not be had",
                        run->workspace_bytes);
    memset(run->workspace, 0, run->workspace_bytes);
    return APA_STATUS_OK;
}

static apa_status evaluate(evaluation_run *run, const apa_recipe *recipe, apa_evaluation *evaluation)
{
    const int32_t repeats = run->options->repeats;
    apa_evaluation result;
    memset(&result, 0, sizeof result);
    result.size = sizeof result;
    apa_status status = make_outputs(run);
    if (status == APA_STATUS_OK)
        status = plan_runs(run, recipe);
    if (status == APA_STATUS_OK)
        status = find_truth(run);
    if (status == APA_STATUS_OK)
        status = time_runs(run, recipe, &result.statistics);
    if (status == APA_STATUS_OK)
        status = apa_error_measure(run->context, &run->problem.out, &run->problem.lse, &run->truth, &run->truth_lse,
                                   &result.error);
    if (status != APA_STATUS_OK)
        return status;
    result.prep_ms = median(run->times, repeats);
    result.attention_ms = median(run->times + repeats, repeats);
    result.exact_ms = result.speedup = NAN;
    if (run->options->time_exact) {
        result.exact_ms = median(run->times + 2 * repeats, repeats);
        result.speedup = result.exact_ms / (result.prep_ms + result.attention_ms);
    }
    *evaluation = result;
    return APA_STATUS_OK;
}

apa_status apa_evaluate(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                        const apa_evaluation_options *options, apa_evaluation *evaluation)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (problem == NULL || problem->size != sizeof *problem || evaluation == NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "problem or evaluation: NULL, or problem not set up");
    apa_evaluation_options defaults;
    apa_evaluation_options_init(&defaults);
    if (options == NULL)
        options = &defaults;
    if (options->size != sizeof *options || options->repeats < 1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "evaluation options: not set up, or repeats under 1");
    evaluation_run run;
    memset(&run, 0, sizeof run);
    run.context = context;
    run.options = options;
    run.problem = *problem;
    run.times = apa_aligned_allocate(3 * (size_t)options->repeats, sizeof *run.times);
    apa_status status = run.times == NULL ? no_memory(&run) : apa_recipe_init(&run.exact, "exact");
    if (status == APA_STATUS_OK)
        status = evaluate(&run, recipe, evaluation);
    for (int i = 0; i < run.buffers; i++)
        apa_aligned_free(run.memory[i]);
    apa_aligned_free(run.times);
    return status;
}
