/* apa run on several ranks: every rank its rows, rank 0 the files, which appear when all is done, whole or not at all.
 */
#include "ranks.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check_options(const cli_options *o)
{
    if (o->out == NULL)
        return cli_complain(CLI_MISUSE, "--out: not given, expected a file name");
    const char *type = o->out_dtype == NULL ? "f32" : o->out_dtype;
    if (strcmp(type, "f16") != 0 && strcmp(type, "f32") != 0)
        return cli_complain(CLI_MISUSE, "--out-dtype: \"%s\", expected f16 or f32 on several ranks", type);
    const char *const path[3] = {o->out, o->lse, o->json}, *const name[3] = {"--out", "--lse", "--json"};
    int code = CLI_DONE;
    for (int i = 0; i < 3 && code == CLI_DONE; i++) {
        code = cli_path_check(o, name[i], path[i]);
        if (code == CLI_DONE && i < 2)
            code = cli_ending_check(name[i], path[i], ".npy");
        if (code == CLI_DONE && i < 2 && path[i] != NULL && strcmp(path[i], "-") == 0)
            code = cli_complain(CLI_MISUSE, "%s: - is for JSON alone, expected a file name", name[i]);
        for (int j = 0; j < i && code == CLI_DONE; j++)
            if (path[i] != NULL && path[j] != NULL && strcmp(path[i], path[j]) == 0)
                code =
                    cli_complain(CLI_MISUSE, "%s: %s: is also %s, expected different files", name[i], path[i], name[j]);
    }
    return code;
}

/* Rank 0 looks at the outputs' places; all hear. */
static int check(const ranks_job *job)
{
    int32_t largest = 0;
    const int code = apa_dist_rank(job->dist) == 0 ? check_options(job->options) : CLI_DONE;
    apa_status status = apa_dist_agree(job->dist, code, &largest);
    return status == APA_STATUS_OK ? (int)largest : ranks_complain(job, status);
}

static json_t *to_json(const ranks_job *job)
{
    const int32_t n = apa_dist_ranks(job->dist);
    const apa_dist_statistics *s = &job->all[0];
    json_t *object = json_pack(
        "{s:s,s:s,s:s,s:s,s:i,s:i,s:o,s:s,s:s}", "method", s->recipe.name, "engine", s->engine, "kernel", s->kernel,
        "isa", apa_context_isa(job->context), "threads", (int)apa_context_threads(job->context), "ranks", (int)n,
        "shape", cli_json_problem_shape(&job->inputs.whole.problem), "dtype", apa_dtype_name(job->part.local.q.dtype),
        "queries", job->part.queries == APA_DIST_QUERIES_WHOLE ? "whole" : "sharded");
    ranks_json_totals(object, job->all, n);
    json_object_set_new(object, "per_rank", ranks_json(job->all, n));
    json_object_set_new(object, "out", json_string(job->options->out));
    json_object_set_new(object, "lse", job->options->lse != NULL ? json_string(job->options->lse) : json_null());
    json_object_set_new(object, "recipe", cli_json_recipe(&s->recipe));
    return object;
}

static void print(const ranks_job *job)
{
    const apa_problem *p = &job->inputs.whole.problem;
    const apa_dist_statistics *s = &job->all[0];
    printf("shape      B %" PRId64 ", Hq %" PRId64 ", Hkv %" PRId64 ", Sq %" PRId64 ", Skv %" PRId64 ", D %" PRId64
           ", Dv %" PRId64 ", %s\n",
           p->q.shape[0], p->q.shape[1], p->k.shape[1], p->q.shape[2], p->k.shape[2], p->q.shape[3], p->v.shape[3],
           apa_dtype_name(p->q.dtype));
    printf("engine     %s: %s, %d ranks of %d threads, queries %s, recipe %s eps=%.4g\n", s->engine, s->kernel,
           (int)s->ranks, (int)apa_context_threads(job->context),
           job->part.queries == APA_DIST_QUERIES_WHOLE ? "whole" : "sharded", s->recipe.name, s->recipe.eps);
    ranks_print(job->all, s->ranks);
    printf("written    %s%s%s\n", job->options->out, job->options->lse != NULL ? ", " : "",
           job->options->lse != NULL ? job->options->lse : "");
}

static int write_files(const ranks_job *job)
{
    apa_output_file files[3] = {{job->options->out, &job->out, NULL, 0}};
    size_t count = 1;
    if (job->options->lse != NULL)
        files[count++] = (apa_output_file){job->options->lse, &job->lse, NULL, 0};
    int code = cli_finish(job->options, to_json(job), files, count);
    if (code == CLI_DONE && cli_prints(job->options))
        print(job);
    return code;
}

/* Writing may take longer than silence is borne, so rank 0 gives signs of life meanwhile. */
static int finish(const ranks_job *job)
{
    int code = CLI_DONE;
    int32_t largest = 0;
    if (apa_dist_rank(job->dist) == 0) {
        apa_dist_keep_alive(job->dist, 1);
        code = write_files(job);
        apa_dist_keep_alive(job->dist, 0);
    }
    apa_status status = apa_dist_agree(job->dist, code, &largest);
    return status == APA_STATUS_OK ? (int)largest : ranks_complain(job, status);
}

int ranks_run(ranks_job *job)
{
    apa_dist_statistics mine;
    int32_t largest = 0;
    int code = check(job);
    if (code != CLI_DONE)
        return code;
    code = ranks_job_cut(job, cli_type(job->options->out_dtype != NULL ? job->options->out_dtype : "f32"),
                         job->options->lse != NULL);
    apa_status status = apa_dist_agree(job->dist, code, &largest);
    if (status != APA_STATUS_OK)
        return ranks_complain(job, status);
    if (largest != 0)
        return (int)largest;
    code = ranks_job_attend(job, &job->recipe, &mine);
    if (code != CLI_DONE)
        return code;
    status = apa_dist_statistics_gather(job->dist, &mine, job->all);
    if (status == APA_STATUS_OK && job->part.queries == APA_DIST_QUERIES_SHARDED)
        status = apa_dist_collect(job->dist, &job->part, 0, &job->part.local.out, &job->part.local.lse);
    return status == APA_STATUS_OK ? finish(job) : ranks_complain(job, status);
}
