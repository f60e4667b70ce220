/* apa bench on several ranks: the recipe and the exact method in turn, medians over repeats for every rank, and beside
 * them one rank that does all the work alone. */
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct bench_state {
    ranks_job *job;
    int64_t repeats;
    apa_recipe exact;
    apa_dist_statistics *run;        /* [repeats] of this rank, the recipe's */
    double *longest, *exact_longest; /* [repeats]: the slowest rank's time */
    double total_ms, exact_ms;       /* medians of these */
    double alone_ms, exact_alone_ms; /* one rank, the whole problem; NaN: left out */
} bench_state;

/* The slowest rank's total of the statistics that were gathered. */
static int slowest(const bench_state *b, const apa_dist_statistics *mine, double *longest)
{
    ranks_job *job = b->job;
    apa_status status = apa_dist_statistics_gather(job->dist, mine, job->all);
    if (status != APA_STATUS_OK)
        return ranks_complain(job, status);
    *longest = 0;
    for (int32_t r = 0; r < apa_dist_ranks(job->dist); r++)
        *longest = job->all[r].total_ms > *longest ? job->all[r].total_ms : *longest;
    return CLI_DONE;
}

static int measure(bench_state *b)
{
    ranks_job *job = b->job;
    apa_dist_statistics mine;
    int code = CLI_DONE;
    for (int64_t i = -1; i < b->repeats && code == CLI_DONE; i++) { /* -1: not timed */
        double longest = 0, exact_longest = 0;
        code = ranks_job_attend(job, &b->exact, &mine);
        if (code == CLI_DONE)
            code = slowest(b, &mine, &exact_longest);
        if (code == CLI_DONE)
            code = ranks_job_attend(job, &job->recipe, &mine);
        if (code == CLI_DONE)
            code = slowest(b, &mine, &longest);
        if (i < 0)
            continue;
        b->run[i] = mine;
        b->longest[i] = longest;
        b->exact_longest[i] = exact_longest;
    }
    return code;
}

static double median(double *values, int64_t n)
{
    cli_sort(values, n);
    return cli_quantile(values, n, 0.5);
}

/* The middle one of this rank's runs for each of the times; counts are those of the last. */
static apa_dist_statistics middle(const bench_state *b)
{
    apa_dist_statistics m = b->run[b->repeats - 1];
    double *const to[5] = {&m.total_ms, &m.compute_ms, &m.pack_ms, &m.wait_ms, &m.transfer_ms};
    double values[5];
    double *sorted = malloc((size_t)b->repeats * sizeof *sorted);
    for (int t = 0; t < 5 && sorted != NULL; t++) {
        for (int64_t i = 0; i < b->repeats; i++) {
            const apa_dist_statistics *s = &b->run[i];
            const double of[5] = {s->total_ms, s->compute_ms, s->pack_ms, s->wait_ms, s->transfer_ms};
            sorted[i] = of[t];
        }
        values[t] = median(sorted, b->repeats);
        *to[t] = values[t];
    }
    free(sorted);
    return m;
}

/* One rank, everything, in one process, while the others rest. */
static double alone(const bench_state *b, const apa_recipe *recipe)
{
    ranks_job *job = b->job;
    double times[3];
    for (int i = 0; i < 3; i++) {
        apa_problem problem = job->inputs.whole.problem;
        apa_attention_options options;
        apa_statistics statistics;
        apa_attention_options_init(&options);
        apa_statistics_init(&statistics);
        options.engine = job->options->engine;
        problem.out = job->part.local.out;
        if (apa_attention(job->context, &problem, recipe, &options, &statistics) != APA_STATUS_OK) {
            cli_complain(CLI_FAILED, "one rank alone: %s", apa_context_message(job->context));
            return NAN;
        }
        times[i] = statistics.prep_ms + statistics.attention_ms;
    }
    return median(times, 3);
}

static int measure_alone(bench_state *b)
{
    int32_t ignored;
    b->alone_ms = b->exact_alone_ms = NAN;
    if (b->job->ranks_options->no_alone)
        return CLI_DONE;
    if (apa_dist_rank(b->job->dist) == 0) {
        apa_dist_keep_alive(b->job->dist, 1);
        b->alone_ms = alone(b, &b->job->recipe);
        b->exact_alone_ms = alone(b, &b->exact);
        apa_dist_keep_alive(b->job->dist, 0);
    }
    apa_status status = apa_dist_agree(b->job->dist, 0, &ignored);
    return status == APA_STATUS_OK ? CLI_DONE : ranks_complain(b->job, status);
}

static json_t *to_json(const bench_state *b)
{
    const ranks_job *job = b->job;
    const int32_t n = apa_dist_ranks(job->dist);
    const apa_dist_statistics *s = &job->all[0];
    char cpu[128];
    cli_cpu_name(cpu, sizeof cpu);
    json_t *object = json_pack(
        "{s:s,s:s,s:s,s:s,s:s,s:i,s:i,s:o,s:s,s:b,s:I,s:s}", "method", s->recipe.name, "engine", s->engine, "kernel",
        s->kernel, "cpu", cpu, "isa", apa_context_isa(job->context), "threads", (int)apa_context_threads(job->context),
        "ranks", (int)n, "shape", cli_json_problem_shape(&job->inputs.whole.problem), "dtype",
        apa_dtype_name(job->part.local.q.dtype), "causal", job->part.local.causal, "repeats", (json_int_t)b->repeats,
        "queries", job->part.queries == APA_DIST_QUERIES_WHOLE ? "whole" : "sharded");
    json_object_set_new(object, "total_ms", cli_json_number(b->total_ms));
    json_object_set_new(object, "exact_ms", cli_json_number(b->exact_ms));
    json_object_set_new(object, "ratio", cli_json_number(b->exact_ms / b->total_ms));
    json_object_set_new(object, "alone_ms", cli_json_number(b->alone_ms));
    json_object_set_new(object, "exact_alone_ms", cli_json_number(b->exact_alone_ms));
    json_object_set_new(object, "scaling", cli_json_number(b->alone_ms / b->total_ms));
    json_object_set_new(object, "exact_scaling", cli_json_number(b->exact_alone_ms / b->exact_ms));
    ranks_json_totals(object, job->all, n);
    json_object_set_new(object, "per_rank", ranks_json(job->all, n));
    json_object_set_new(object, "recipe", cli_json_recipe(&s->recipe));
    return object;
}

static void print(const bench_state *b)
{
    const ranks_job *job = b->job;
    const apa_dist_statistics *s = &job->all[0];
    printf("%d ranks of %d threads, engine %s, %s, queries %s\n", (int)s->ranks, (int)apa_context_threads(job->context),
           s->engine, s->kernel, job->part.queries == APA_DIST_QUERIES_WHOLE ? "whole" : "sharded");
    printf("%-10s %12.3f ms (slowest rank, median of %d)", s->recipe.name, b->total_ms, (int)b->repeats);
    if (!isnan(b->alone_ms))
        printf(", one rank alone %.3f ms: %.2fx", b->alone_ms, b->alone_ms / b->total_ms);
    printf("\n%-10s %12.3f ms", "exact", b->exact_ms);
    if (!isnan(b->exact_alone_ms))
        printf(", one rank alone %.3f ms: %.2fx", b->exact_alone_ms, b->exact_alone_ms / b->exact_ms);
    printf("\n");
    ranks_print(job->all, s->ranks);
}

static int report(bench_state *b)
{
    ranks_job *job = b->job;
    const apa_dist_statistics mine = middle(b);
    apa_status status = apa_dist_statistics_gather(job->dist, &mine, job->all);
    if (status != APA_STATUS_OK)
        return ranks_complain(job, status);
    b->total_ms = median(b->longest, b->repeats);
    b->exact_ms = median(b->exact_longest, b->repeats);
    if (apa_dist_rank(job->dist) != 0)
        return CLI_DONE;
    apa_output_file files[1];
    int code = cli_finish(job->options, to_json(b), files, 0);
    if (code == CLI_DONE && cli_prints(job->options))
        print(b);
    return code;
}

int ranks_bench(ranks_job *job)
{
    bench_state b;
    memset(&b, 0, sizeof b);
    b.job = job;
    b.repeats = job->options->repeats != 0 ? job->options->repeats : 5;
    b.run = calloc((size_t)b.repeats, sizeof *b.run);
    b.longest = calloc((size_t)b.repeats, sizeof *b.longest);
    b.exact_longest = calloc((size_t)b.repeats, sizeof *b.exact_longest);
    int32_t largest = 0;
    int code = b.run != NULL && b.longest != NULL && b.exact_longest != NULL
                   ? ranks_job_cut(job, APA_ARRAY_F32, 0)
                   : cli_complain(CLI_FAILED, "no memory for the times");
    if (code == CLI_DONE && apa_recipe_init(&b.exact, "exact") != APA_STATUS_OK)
        code = cli_complain(CLI_FAILED, "preset exact is missing");
    apa_status status = apa_dist_agree(job->dist, code, &largest);
    code = status == APA_STATUS_OK ? (int)largest : ranks_complain(job, status);
    if (code == CLI_DONE)
        code = measure(&b);
    if (code == CLI_DONE)
        code = measure_alone(&b);
    if (code == CLI_DONE)
        code = report(&b);
    free(b.run);
    free(b.longest);
    free(b.exact_longest);
    return code;
}
