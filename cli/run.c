/* apa run: attention from files to a file. */
#include "cli.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct run_state {
    const cli_options *options;
    cli_inputs inputs;
    apa_context *context;
    apa_array out, lse;
    apa_recipe recipe;
    apa_statistics statistics;
} run_state;

static int check_options(const cli_options *options)
{
    if (options->out == NULL)
        return cli_complain(CLI_MISUSE, "--out: not given, expected a file name");
    if (options->out_dtype != NULL && strcmp(options->out_dtype, "bf16") == 0)
        return cli_complain(CLI_MISUSE, "--out-dtype: bf16 has no .npy type, expected f16, f32 or f64");
    if (options->out_dtype != NULL && cli_type(options->out_dtype) == 0)
        return cli_complain(CLI_MISUSE, "--out-dtype: \"%s\", expected f16, f32 or f64", options->out_dtype);
    const char *const path[3] = {options->out, options->lse, options->json}, *const name[3] = {"--out", "--lse",
                                                                                               "--json"};
    int code = CLI_DONE;
    for (int i = 0; i < 3 && code == CLI_DONE; i++)
        code = cli_path_check(options, name[i], path[i]);
    for (int i = 0; i < 2 && code == CLI_DONE; i++)
        code = cli_ending_check(name[i], path[i], ".npy");
    for (int i = 0; i < 2 && code == CLI_DONE; i++)
        if (path[i] != NULL && strcmp(path[i], "-") == 0)
            code = cli_complain(CLI_MISUSE, "%s: - is for JSON alone, expected a file name", name[i]);
    for (int i = 1; i < 3 && code == CLI_DONE; i++)
        for (int j = 0; j < i && code == CLI_DONE; j++)
            if (path[i] != NULL && path[j] != NULL && strcmp(path[i], path[j]) == 0 && strcmp(path[i], "-") != 0)
                code =
                    cli_complain(CLI_MISUSE, "%s: %s: is also %s, expected different files", name[i], path[i], name[j]);
    return code;
}

/* Refuses what cannot run before memory is taken or time spent. */
static int plan(run_state *state, const apa_attention_options *options)
{
    apa_plan found;
    apa_plan_init(&found);
    apa_status status = apa_attention_plan(state->context, &state->inputs.problem, &state->recipe, options, &found);
    return status == APA_STATUS_OK ? CLI_DONE : cli_complain_context(state->options, state->context, status);
}

static int compute(run_state *state)
{
    apa_problem *problem = &state->inputs.problem;
    const apa_array_type type = cli_type(state->options->out_dtype != NULL ? state->options->out_dtype : "f32");
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = state->options->engine;
    /* The plan needs shapes alone, so a descriptor without memory goes first. */
    const int64_t *q = problem->q.shape;
    problem->out = apa_tensor_hnd(NULL, (apa_dtype)type, q[0], q[1], q[2], problem->v.shape[3]);
    int code = plan(state, &options);
    if (code == CLI_DONE)
        code = cli_output_make(&state->inputs, type, problem->v.shape[3], &state->out, &problem->out);
    if (code == CLI_DONE && state->options->lse != NULL)
        code = cli_output_make(&state->inputs, type == APA_ARRAY_F64 ? APA_ARRAY_F64 : APA_ARRAY_F32, 0, &state->lse,
                               &problem->lse);
    if (code != CLI_DONE)
        return code;
    apa_statistics_init(&state->statistics);
    cli_progress(NULL, "running", 0);
    apa_status status = apa_attention(state->context, problem, &state->recipe, &options, &state->statistics);
    cli_progress(NULL, "running", 1);
    return status == APA_STATUS_OK ? CLI_DONE : cli_complain_context(state->options, state->context, status);
}

/* The preset, ε where tiles are judged by it, and every knob that was asked to differ from the default recipe's. */
static void print_recipe(const apa_recipe *asked, const apa_recipe *ran)
{
    apa_recipe plain;
    apa_recipe_init(&plain, NULL);
    printf("recipe     %s", ran->name);
    if (ran->force == APA_FORCE_NONE)
        printf(" eps=%.4g", ran->eps);
    for (size_t i = 0; apa_recipe_knob_at(i) != NULL; i++) {
        const char *knob = apa_recipe_knob_at(i)->name;
        char wanted[64], usual[64], text[64];
        if (apa_recipe_get(asked, knob, wanted, sizeof wanted) != APA_STATUS_OK ||
            apa_recipe_get(&plain, knob, usual, sizeof usual) != APA_STATUS_OK ||
            apa_recipe_get(ran, knob, text, sizeof text) != APA_STATUS_OK)
            continue;
        if (strcmp(knob, "eps") != 0 && strcmp(wanted, usual) != 0)
            printf(" %s=%s", knob, text);
    }
}

static void print(const run_state *state)
{
    const apa_statistics *s = &state->statistics;
    const apa_problem *p = &state->inputs.problem;
    printf("shape      B %" PRId64 ", Hq %" PRId64 ", Hkv %" PRId64 ", Sq %" PRId64 ", Skv %" PRId64 ", D %" PRId64
           ", Dv %" PRId64 ", %s\n",
           p->q.shape[0], p->q.shape[1], p->k.shape[1], p->q.shape[2], p->k.shape[2], p->q.shape[3], p->v.shape[3],
           apa_dtype_name(p->q.dtype));
    printf("engine     %s: %s, %d threads\n", s->engine, s->kernel, (int)apa_context_threads(state->context));
    print_recipe(&state->recipe, &s->recipe);
    printf("\ntiles      %.2f %% hot, %.2f %% cold, of these %.2f %% skipped (%" PRId64 " visible)\n",
           100 * s->hot_share, s->visible > 0 ? 100 * (1 - s->hot_share) : 0, 100 * s->skip_share, s->visible);
    printf("time       prep %.3f ms, attention %.3f ms\n", s->prep_ms, s->attention_ms);
    printf("written    %s%s%s\n", state->options->out, state->options->lse != NULL ? ", " : "",
           state->options->lse != NULL ? state->options->lse : "");
}

static json_t *to_json(const run_state *state)
{
    const apa_statistics *s = &state->statistics;
    json_t *object = json_pack(
        "{s:s,s:s,s:s,s:s,s:i,s:o,s:s}", "method", s->recipe.name, "engine", s->engine, "kernel", s->kernel, "isa",
        apa_context_isa(state->context), "threads", (int)apa_context_threads(state->context), "shape",
        cli_json_problem_shape(&state->inputs.problem), "dtype", apa_dtype_name(state->inputs.problem.q.dtype));
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"hot_share", s->hot_share},
                   {"skip_share", s->skip_share},
                   {"candidates_share", s->visible > 0 ? (double)s->candidates / (double)s->visible : 0},
                   {"prep_ms", s->prep_ms},
                   {"attention_ms", s->attention_ms}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        json_object_set_new(object, numbers[i].key, cli_json_number(numbers[i].value));
    json_object_set_new(object, "workspace_bytes", json_integer((json_int_t)s->workspace_bytes));
    json_object_set_new(object, "out", json_string(state->options->out));
    json_object_set_new(object, "lse", state->options->lse != NULL ? json_string(state->options->lse) : json_null());
    json_object_set_new(object, "recipe", cli_json_recipe(&s->recipe));
    return object;
}

static int finish(run_state *state)
{
    apa_output_file files[3] = {{state->options->out, &state->out, NULL, 0}};
    size_t count = 1;
    if (state->options->lse != NULL)
        files[count++] = (apa_output_file){state->options->lse, &state->lse, NULL, 0};
    int code = cli_finish(state->options, to_json(state), files, count);
    if (code == CLI_DONE && cli_prints(state->options))
        print(state);
    return code;
}

int cli_run(const cli_options *options)
{
    run_state state;
    memset(&state, 0, sizeof state);
    state.options = options;
    int code = check_options(options);
    if (code == CLI_DONE)
        code = cli_recipe(options, options->method != NULL ? options->method : "apa", &state.recipe);
    if (code == CLI_DONE)
        code = cli_context_create(options, &state.context);
    if (code == CLI_DONE)
        code = cli_inputs_load(options, &state.inputs);
    if (code == CLI_DONE)
        code = compute(&state);
    if (code == CLI_DONE)
        code = finish(&state);
    cli_inputs_free(&state.inputs);
    apa_array_free(&state.out);
    apa_array_free(&state.lse);
    apa_context_destroy(state.context);
    return code;
}
