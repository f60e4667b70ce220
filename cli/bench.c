/* apa bench: a method and the same engine's exact method, timed in turn; phases and ceilings on the way.
 *
 * One untimed run of each comes first. Scratch memory is allocated once for all runs, as an engine that calls attention
 * layer after layer would have it. Times are prep + attention. The ratio is the median over the repeats of exact time /
 * method time of the same repeat, so that slow drifts of the machine cancel. Effective GFLOP/s count 2·(D + Dv)
 * operations for every visible (query, key) pair, whatever a method really does.
 *
 * Phases come from one more run of each with clocks around the kernels (bench_phases.c), so that no timed run pays for
 * them. */
#include "bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct timing {
    double median, low, high, spread; /* spread: the interquartile range */
} timing;

typedef struct bench_state {
    const cli_options *options;
    cli_inputs inputs;
    apa_context *context;
    apa_array out, exact_out, scratch;
    apa_recipe recipe, exact;
    apa_statistics statistics;
    char exact_kernel[64];
    int64_t repeats;
    double *times; /* method, exact, ratio, prep, attention: repeats each */
    timing method_ms, exact_ms;
    double ratio, prep_ms, attention_ms, gflops, exact_gflops;
    char cpu[128];
    bench_phases phases, exact_phases;
    bench_ceilings ceilings;
} bench_state;

static int get_inputs(bench_state *state)
{
    const cli_options *o = state->options;
    const bool files = o->q != NULL || o->k != NULL || o->v != NULL || o->dump != NULL;
    if (files && cli_files_alone(o) != CLI_DONE)
        return CLI_MISUSE;
    if (!files && o->shape_text == NULL)
        return cli_complain(CLI_MISUSE,
                            "--shape: not given, expected B,Hq,Hkv,Sq,Skv,D, or files with --q, --k, --v or --dump");
    if (!files && o->layout != NULL)
        return cli_complain(CLI_MISUSE, "--layout: found without --q, --k and --v");
    if (o->dtype != NULL && (cli_type(o->dtype) == 0 || strcmp(o->dtype, "f64") == 0))
        return cli_complain(CLI_MISUSE, "--dtype: \"%s\", expected f16, bf16 or f32", o->dtype);
    return files ? cli_inputs_load(o, &state->inputs) : cli_inputs_generate(o, &state->inputs);
}

static int run_once(bench_state *state, bool exact, const char *engine, bool phases, apa_statistics *statistics)
{
    apa_problem problem = state->inputs.problem;
    const int64_t *q = problem.q.shape;
    const apa_array *out = exact ? &state->exact_out : &state->out;
    problem.out = apa_tensor_hnd(out->data, (apa_dtype)out->type, q[0], q[1], q[2], problem.v.shape[3]);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = engine;
    options.phases = phases;
    options.workspace = state->scratch.data;
    options.workspace_bytes = (size_t)state->scratch.elements;
    apa_statistics_init(statistics);
    apa_status status =
        apa_attention(state->context, &problem, exact ? &state->exact : &state->recipe, &options, statistics);
    return status == APA_STATUS_OK ? CLI_DONE : cli_complain_context(state->options, state->context, status);
}

/* Scratch bytes of one of the two methods; refuses what cannot run. */
static int plan(bench_state *state, bool exact, const char *engine, apa_plan *found)
{
    apa_problem problem = state->inputs.problem;
    const int64_t *q = problem.q.shape;
    problem.out = apa_tensor_hnd(NULL, problem.q.dtype == APA_DTYPE_F64 ? APA_DTYPE_F64 : APA_DTYPE_F32, q[0], q[1],
                                 q[2], problem.v.shape[3]);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = engine;
    apa_plan_init(found);
    apa_status status =
        apa_attention_plan(state->context, &problem, exact ? &state->exact : &state->recipe, &options, found);
    return status == APA_STATUS_OK ? CLI_DONE : cli_complain_context(state->options, state->context, status);
}

static int make_scratch(bench_state *state)
{
    apa_plan method, exact;
    int code = plan(state, false, state->options->engine, &method);
    if (code == CLI_DONE)
        code = plan(state, true, method.engine, &exact);
    if (code != CLI_DONE)
        return code;
    const size_t most = method.workspace_bytes > exact.workspace_bytes ? method.workspace_bytes : exact.workspace_bytes;
    const int64_t bytes = (int64_t)most;
    if (apa_array_allocate(&state->scratch, APA_ARRAY_BOOL, 1, &bytes) != APA_STATUS_OK)
        return cli_complain(CLI_FAILED, "no memory for %" PRId64 " bytes of scratch", bytes);
    return CLI_DONE;
}

static int make_outputs(bench_state *state)
{
    const int64_t *q = state->inputs.problem.q.shape, shape[4] = {q[0], q[1], q[2], state->inputs.problem.v.shape[3]};
    const apa_array_type type = state->inputs.q.type == APA_ARRAY_F64 ? APA_ARRAY_F64 : APA_ARRAY_F32;
    if (apa_array_allocate(&state->out, type, 4, shape) != APA_STATUS_OK ||
        apa_array_allocate(&state->exact_out, type, 4, shape) != APA_STATUS_OK)
        return cli_complain(CLI_FAILED, "no memory for the outputs");
    state->times = calloc(5 * (size_t)state->repeats, sizeof *state->times);
    return state->times != NULL ? CLI_DONE
                                : cli_complain(CLI_FAILED, "no memory for %" PRId64 " times", state->repeats);
}

static int measure(bench_state *state)
{
    const int64_t n = state->repeats;
    double *method = state->times, *exact = method + n, *ratio = exact + n, *prep = ratio + n, *attention = prep + n;
    apa_statistics *s = &state->statistics, e;
    int code = run_once(state, false, state->options->engine, false, s);
    char engine[16];
    memcpy(engine, s->engine, sizeof engine); /* auto might choose another engine for exact */
    if (code == CLI_DONE)
        code = run_once(state, true, engine, false, &e);
    for (int64_t i = 0; i < n && code == CLI_DONE; i++) {
        cli_progress(NULL, "timing", (double)i / (double)n);
        code = run_once(state, false, engine, false, s);
        if (code == CLI_DONE)
            code = run_once(state, true, engine, false, &e);
        prep[i] = s->prep_ms;
        attention[i] = s->attention_ms;
        method[i] = s->prep_ms + s->attention_ms;
        exact[i] = e.prep_ms + e.attention_ms;
        ratio[i] = exact[i] / method[i];
    }
    cli_progress(NULL, "timing", 1);
    if (code == CLI_DONE)
        memcpy(state->exact_kernel, e.kernel, sizeof state->exact_kernel);
    return code;
}

/* One more run of each with clocks on. */
static int measure_phases(bench_state *state)
{
    apa_statistics s;
    int code = run_once(state, false, state->statistics.engine, true, &s);
    if (code != CLI_DONE)
        return code;
    bench_phases_take(&state->phases, &s, state->method_ms.median);
    code = run_once(state, true, state->statistics.engine, true, &s);
    if (code == CLI_DONE)
        bench_phases_take(&state->exact_phases, &s, state->exact_ms.median);
    return code;
}

static timing summary(double *values, int64_t n)
{
    cli_sort(values, n);
    return (timing){cli_quantile(values, n, 0.5), values[0], values[n - 1],
                    cli_quantile(values, n, 0.75) - cli_quantile(values, n, 0.25)};
}

static void summarise(bench_state *state)
{
    const int64_t n = state->repeats;
    const apa_problem *p = &state->inputs.problem;
    const double work = 2 * ((double)p->q.shape[3] + (double)p->v.shape[3]) * cli_visible_pairs(&state->inputs);
    state->method_ms = summary(state->times, n);
    state->exact_ms = summary(state->times + n, n);
    state->ratio = summary(state->times + 2 * n, n).median;
    state->prep_ms = summary(state->times + 3 * n, n).median;
    state->attention_ms = summary(state->times + 4 * n, n).median;
    state->gflops = work / (state->method_ms.median * 1e6);
    state->exact_gflops = work / (state->exact_ms.median * 1e6);
    cli_cpu_name(state->cpu, sizeof state->cpu);
}

static double prep_share(const bench_state *state)
{
    return state->prep_ms / (state->prep_ms + state->attention_ms);
}

static json_t *timing_json(const timing *t)
{
    json_t *object = json_object();
    json_object_set_new(object, "median", cli_json_number(t->median));
    json_object_set_new(object, "min", cli_json_number(t->low));
    json_object_set_new(object, "max", cli_json_number(t->high));
    json_object_set_new(object, "iqr", cli_json_number(t->spread));
    return object;
}

static json_t *to_json(const bench_state *state)
{
    const apa_statistics *s = &state->statistics;
    json_t *object = json_pack(
        "{s:s,s:s,s:s,s:s,s:s,s:s,s:i,s:o,s:s,s:b,s:I,s:o,s:o}", "method", s->recipe.name, "engine", s->engine,
        "kernel", s->kernel, "exact_kernel", state->exact_kernel, "cpu", state->cpu, "isa",
        apa_context_isa(state->context), "threads", (int)apa_context_threads(state->context), "shape",
        cli_json_problem_shape(&state->inputs.problem), "dtype", apa_dtype_name(state->inputs.problem.q.dtype),
        "causal", state->inputs.problem.causal, "repeats", (json_int_t)state->repeats, "total",
        timing_json(&state->method_ms), "exact", timing_json(&state->exact_ms));
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"total_ms", state->method_ms.median},
                   {"exact_ms", state->exact_ms.median},
                   {"ratio", state->ratio},
                   {"prep_ms", state->prep_ms},
                   {"attention_ms", state->attention_ms},
                   {"prep_share", prep_share(state)},
                   {"gflops", state->gflops},
                   {"exact_gflops", state->exact_gflops},
                   {"hot_share", s->hot_share},
                   {"skip_share", s->skip_share}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        json_object_set_new(object, numbers[i].key, cli_json_number(numbers[i].value));
    json_object_set_new(object, "workspace_bytes", json_integer((json_int_t)s->workspace_bytes));
    json_object_set_new(object, "recipe", cli_json_recipe(&s->recipe));
    if (state->phases.measured) {
        json_object_set_new(object, "phases", bench_phases_json(&state->phases, &state->ceilings));
        json_object_set_new(object, "exact_phases", bench_phases_json(&state->exact_phases, &state->ceilings));
        json_object_set_new(object, "bytes_moved", cli_json_number(bench_phases_bytes(&state->phases)));
        json_object_set_new(object, "exact_bytes_moved", cli_json_number(bench_phases_bytes(&state->exact_phases)));
    }
    if (state->ceilings.measured)
        json_object_set_new(object, "ceilings", bench_ceilings_json(&state->ceilings));
    return object;
}

static void print(const bench_state *state)
{
    const apa_statistics *s = &state->statistics;
    const apa_problem *p = &state->inputs.problem;
    printf("B %" PRId64 ", Hq %" PRId64 ", Hkv %" PRId64 ", Sq %" PRId64 ", Skv %" PRId64 ", D %" PRId64 ", Dv %" PRId64
           ", %s, %s\n",
           p->q.shape[0], p->q.shape[1], p->k.shape[1], p->q.shape[2], p->k.shape[2], p->q.shape[3], p->v.shape[3],
           apa_dtype_name(p->q.dtype), p->causal ? "causal" : "not causal");
    printf("engine %s, %s, %d threads, %s\n\n", s->engine, apa_context_isa(state->context),
           (int)apa_context_threads(state->context), state->cpu);
    printf("%-10s %12s %12s %12s %12s %10s  %s\n", "method", "median ms", "min ms", "max ms", "spread ms", "GFLOP/s",
           "kernel");
    printf("%-10s %12.3f %12.3f %12.3f %12.3f %10.1f  %s\n", s->recipe.name, state->method_ms.median,
           state->method_ms.low, state->method_ms.high, state->method_ms.spread, state->gflops, s->kernel);
    printf("%-10s %12.3f %12.3f %12.3f %12.3f %10.1f  %s\n\n", "exact", state->exact_ms.median, state->exact_ms.low,
           state->exact_ms.high, state->exact_ms.spread, state->exact_gflops, state->exact_kernel);
    printf("%.2fx as fast as exact (median of %" PRId64
           " ratios); prep %.3f ms (%.1f %%), attention %.3f ms; hot %.2f %%, skipped %.2f %%\n",
           state->ratio, state->repeats, state->prep_ms, 100 * prep_share(state), state->attention_ms,
           100 * s->hot_share, 100 * s->skip_share);
    bench_phases_print(s->recipe.name, &state->phases, &state->ceilings);
    bench_phases_print("exact", &state->exact_phases, &state->ceilings);
    if (state->phases.measured)
        printf("\nbytes moved: %.1f MB, exact %.1f MB\n", bench_phases_bytes(&state->phases) / 1e6,
               bench_phases_bytes(&state->exact_phases) / 1e6);
    if (state->ceilings.measured) {
        printf("\n");
        bench_ceilings_print(&state->ceilings);
    }
}

/* The machine alone, without a problem. */
static int ceilings_only(const cli_options *options)
{
    bench_ceilings ceilings = {0};
    int code = cli_path_check(options, "--json", options->json);
    if (code == CLI_DONE)
        code = bench_ceilings_measure(options, &ceilings);
    if (code != CLI_DONE)
        return code;
    char cpu[128];
    cli_cpu_name(cpu, sizeof cpu);
    json_t *object = json_pack("{s:s,s:o}", "cpu", cpu, "ceilings", bench_ceilings_json(&ceilings));
    apa_output_file files[1];
    code = cli_finish(options, object, files, 0);
    if (code == CLI_DONE && cli_prints(options))
        bench_ceilings_print(&ceilings);
    return code;
}

int cli_bench(const cli_options *options)
{
    const bool problem = options->shape_text != NULL || options->q != NULL || options->k != NULL ||
                         options->v != NULL || options->dump != NULL;
    if (options->ceilings && !problem)
        return ceilings_only(options);
    bench_state state;
    memset(&state, 0, sizeof state);
    state.options = options;
    state.repeats = options->repeats != 0 ? options->repeats : 7;
    int code = cli_path_check(options, "--json", options->json);
    if (code == CLI_DONE)
        code = cli_recipe(options, options->method != NULL ? options->method : "apa", &state.recipe);
    if (code == CLI_DONE && apa_recipe_init(&state.exact, "exact") != APA_STATUS_OK)
        code = cli_complain(CLI_FAILED, "preset exact is missing");
    if (code == CLI_DONE)
        code = cli_context_create(options, &state.context);
    if (code == CLI_DONE)
        code = get_inputs(&state);
    if (code == CLI_DONE)
        code = make_scratch(&state);
    if (code == CLI_DONE)
        code = make_outputs(&state);
    if (code == CLI_DONE)
        code = measure(&state);
    if (code == CLI_DONE) {
        summarise(&state);
        code = measure_phases(&state);
    }
    if (code == CLI_DONE && options->ceilings)
        code = bench_ceilings_measure(options, &state.ceilings);
    if (code == CLI_DONE) {
        apa_output_file files[1];
        code = cli_finish(options, to_json(&state), files, 0);
    }
    if (code == CLI_DONE && cli_prints(options))
        print(&state);
    free(state.times);
    cli_inputs_free(&state.inputs);
    apa_array_free(&state.out);
    apa_array_free(&state.exact_out);
    apa_array_free(&state.scratch);
    apa_context_destroy(state.context);
    return code;
}
