/* apa sweep: methods over values of their knobs, every combination, against one truth; error, hot share and modelled
 * cost of each.
 *
 * A key or a value that no recipe could have is the caller's mistake and ends the call at once. A combination that
 * makes no sense together, or that no engine runs, is a row that says so: a grid over several methods has such corners.
 */
#include "sweep.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------- the grid */

/* "a,b,c" → pointers into the text, which is cut. */
static int split(const char *option, char *text, const char **value, int *count)
{
    for (;;) {
        const size_t n = strcspn(text, ",");
        if (n == 0)
            return cli_complain(CLI_MISUSE, "%s: an empty value, expected values with one comma between", option);
        if (*count == SWEEP_VALUES)
            return cli_complain(CLI_MISUSE, "%s: more than %d values", option, SWEEP_VALUES);
        value[(*count)++] = text;
        if (text[n] == '\0')
            return CLI_DONE;
        text[n] = '\0';
        text += n + 1;
    }
}

static int read_axis(sweep_state *state, const char *over)
{
    const size_t n = strcspn(over, "=");
    if (n == strlen("method") && memcmp(over, "method", n) == 0) {
        if (state->method_list != NULL)
            return cli_complain(CLI_MISUSE, "--over: method: given before, expected one list of methods");
        state->method_list = strdup(over + n + 1);
        return state->method_list == NULL ? cli_complain(CLI_FAILED, "no memory")
                                          : split("--over: method", state->method_list, state->method, &state->methods);
    }
    if (state->axes == SWEEP_AXES)
        return cli_complain(CLI_MISUSE, "--over: more than %d knobs", SWEEP_AXES);
    sweep_axis *axis = &state->axis[state->axes];
    axis->text = strdup(over);
    if (axis->text == NULL)
        return cli_complain(CLI_FAILED, "no memory");
    axis->text[n] = '\0';
    state->axes++; /* now it is freed with the others */
    for (int i = 0; i + 1 < state->axes; i++)
        if (strcmp(state->axis[i].text, axis->text) == 0)
            return cli_complain(CLI_MISUSE, "--over: %s: given twice, expected one list of its values", axis->text);
    return split("--over", axis->text + n + 1, axis->value, &axis->count);
}

/* Every value of every axis must be one that its knob takes. */
static int check_values(const sweep_state *state)
{
    for (int i = 0; i < state->axes; i++)
        for (int j = 0; j < state->axis[i].count; j++) {
            char message[2048]; /* room for the names of all knobs */
            apa_recipe recipe;
            apa_recipe_init(&recipe, NULL);
            if (apa_recipe_set(&recipe, state->axis[i].text, state->axis[i].value[j], message, sizeof message) !=
                APA_STATUS_OK)
                return cli_complain(CLI_MISUSE, "--over: %s", message);
        }
    return CLI_DONE;
}

static int read_grid(sweep_state *state)
{
    const cli_options *o = state->options;
    int code = CLI_DONE;
    if (o->method == NULL && o->over_count == 0)
        return cli_complain(CLI_MISUSE, "--over: not given, expected --over KEY=V1,V2... or several --method");
    if (o->method != NULL) {
        state->method_list = strdup(o->method);
        code = state->method_list == NULL ? cli_complain(CLI_FAILED, "no memory")
                                          : split("--method", state->method_list, state->method, &state->methods);
    }
    for (int i = 0; i < o->over_count && code == CLI_DONE; i++)
        code = read_axis(state, o->overs[i]);
    if (code == CLI_DONE && state->methods == 0)
        state->method[state->methods++] = "apa";
    return code == CLI_DONE ? check_values(state) : code;
}

/* Row i of the grid: the first method with the last axis running fastest, then the next. */
static int make_row(sweep_state *state, int64_t i, sweep_row *row)
{
    char message[512];
    for (int a = state->axes - 1; a >= 0; a--) {
        row->value[a] = state->axis[a].value[i % state->axis[a].count];
        i /= state->axis[a].count;
    }
    row->method = state->method[i];
    int code = cli_recipe_set_up(state->options, row->method, &row->recipe);
    for (int a = 0; a < state->axes && code == CLI_DONE; a++)
        if (apa_recipe_set(&row->recipe, state->axis[a].text, row->value[a], message, sizeof message) != APA_STATUS_OK)
            code = cli_complain(CLI_MISUSE, "--over: %s", message);
    if (code == CLI_DONE && apa_recipe_check(&row->recipe, message, sizeof message) != APA_STATUS_OK)
        snprintf(row->refusal, sizeof row->refusal, "%.255s", message);
    return code;
}

static int make_rows(sweep_state *state)
{
    int code = CLI_DONE;
    state->rows = state->methods;
    for (int a = 0; a < state->axes; a++) {
        state->rows *= state->axis[a].count; /* at most SWEEP_ROWS · SWEEP_VALUES before the check */
        if (state->rows > SWEEP_ROWS)
            return cli_complain(CLI_MISUSE, "--over: more than %d combinations", SWEEP_ROWS);
    }
    state->row = calloc((size_t)state->rows, sizeof *state->row);
    if (state->row == NULL)
        return cli_complain(CLI_FAILED, "no memory for %" PRId64 " rows", state->rows);
    for (int64_t i = 0; i < state->rows && code == CLI_DONE; i++)
        code = make_row(state, i, &state->row[i]);
    return code;
}

/* ------------------------------------------------------------------------------- running it */

/* Finds what no engine runs, before the truth is computed. An error of the problem itself is the caller's mistake. */
static int plan_rows(sweep_state *state)
{
    apa_problem problem = state->inputs.problem;
    const apa_dtype dtype = problem.q.dtype == APA_DTYPE_F64 ? APA_DTYPE_F64 : APA_DTYPE_F32;
    const int64_t *q = problem.q.shape;
    problem.out = apa_tensor_hnd(NULL, dtype, q[0], q[1], q[2], problem.v.shape[3]);
    apa_attention_options options;
    apa_attention_options_init(&options);
    apa_recipe exact;
    apa_plan plan;
    apa_plan_init(&plan);
    options.engine = "reference";
    apa_status status = apa_recipe_init(&exact, "exact");
    if (status == APA_STATUS_OK)
        status = apa_attention_plan(state->context, &problem, &exact, &options, &plan);
    if (status != APA_STATUS_OK)
        return cli_complain_context(state->options, state->context, status);
    options.engine = state->options->engine;
    int64_t refused = 0;
    for (int64_t i = 0; i < state->rows; i++) {
        sweep_row *row = &state->row[i];
        if (row->refusal[0] == '\0' &&
            apa_attention_plan(state->context, &problem, &row->recipe, &options, &plan) != APA_STATUS_OK)
            snprintf(row->refusal, sizeof row->refusal, "%.255s", apa_context_message(state->context));
        refused += row->refusal[0] != '\0';
    }
    if (refused == state->rows)
        return cli_complain(CLI_MISUSE, "--over: no combination can run; the first: %s", state->row[0].refusal);
    return CLI_DONE;
}

static int find_truth(sweep_state *state, apa_evaluation_options *e)
{
    int code =
        cli_output_make(&state->inputs, APA_ARRAY_F64, state->inputs.problem.v.shape[3], &state->truth, &e->truth);
    if (code == CLI_DONE)
        code = cli_output_make(&state->inputs, APA_ARRAY_F64, 0, &state->truth_lse, &e->truth_lse);
    if (code != CLI_DONE)
        return code;
    apa_status status =
        apa_truth_compute(state->context, &state->inputs.problem, &e->truth, &e->truth_lse, cli_progress, NULL);
    return status == APA_STATUS_OK ? CLI_DONE : cli_complain_context(state->options, state->context, status);
}

static void progress(void *user, const char *phase, double fraction)
{
    const sweep_state *state = user;
    char text[64];
    (void)phase;
    snprintf(text, sizeof text, "row %" PRId64 " of %" PRId64, state->at + 1, state->rows);
    cli_progress(NULL, text, fraction);
}

static int run_rows(sweep_state *state)
{
    apa_evaluation_options e;
    apa_evaluation_options_init(&e);
    e.engine = state->options->engine;
    e.repeats = (int32_t)(state->options->repeats != 0 ? state->options->repeats : 1);
    e.time_exact = 0;
    e.progress = progress;
    e.progress_user = state;
    int code = find_truth(state, &e);
    for (state->at = 0; state->at < state->rows && code == CLI_DONE; state->at++) {
        sweep_row *row = &state->row[state->at];
        if (row->refusal[0] != '\0')
            continue;
        apa_status status = apa_evaluate(state->context, &state->inputs.problem, &row->recipe, &e, &row->result);
        for (int d = 0; d < state->devices.count && status == APA_STATUS_OK; d++)
            status = apa_cost_estimate(state->context, &state->inputs.problem, &row->result.statistics,
                                       state->devices.profile[d], &row->cost[d]);
        if (status != APA_STATUS_OK)
            code = cli_complain_context(state->options, state->context, status);
    }
    return code;
}

static int report(sweep_state *state)
{
    const cli_options *o = state->options;
    apa_output_file files[2];
    size_t count = 0;
    char *csv = NULL;
    const bool csv_printed = o->csv != NULL && strcmp(o->csv, "-") == 0;
    sweep_mark_pareto(state);
    if (o->csv != NULL) {
        csv = sweep_csv(state);
        if (csv == NULL)
            return cli_complain(CLI_FAILED, "no memory for the CSV text");
        if (!csv_printed)
            files[count++] = (apa_output_file){o->csv, NULL, csv, strlen(csv)};
    }
    int code = cli_finish(o, sweep_json(state), files, count);
    if (code == CLI_DONE && csv_printed)
        fputs(csv, stdout);
    else if (code == CLI_DONE && cli_prints(o))
        sweep_print(state);
    free(csv);
    return code;
}

static int check_outputs(const cli_options *options)
{
    int code = cli_path_check(options, "--json", options->json);
    if (code == CLI_DONE)
        code = cli_path_check(options, "--csv", options->csv);
    if (code == CLI_DONE && options->json != NULL && options->csv != NULL && strcmp(options->json, options->csv) == 0)
        code = cli_complain(CLI_MISUSE, "--csv: %s: is also --json, expected another file", options->csv);
    return code;
}

int cli_sweep(const cli_options *options)
{
    sweep_state *state = calloc(1, sizeof *state);
    if (state == NULL)
        return cli_complain(CLI_FAILED, "no memory");
    state->options = options;
    int code = check_outputs(options);
    if (code == CLI_DONE)
        code = cli_devices_choose(options->device, "zen4,h200,rtx5090", &state->devices);
    if (code == CLI_DONE)
        code = read_grid(state);
    if (code == CLI_DONE)
        code = make_rows(state);
    if (code == CLI_DONE)
        code = cli_context_create(options, &state->context);
    if (code == CLI_DONE)
        code = cli_inputs_load(options, &state->inputs);
    if (code == CLI_DONE)
        code = cli_pairs_check(options, &state->inputs);
    if (code == CLI_DONE)
        code = plan_rows(state);
    if (code == CLI_DONE)
        code = run_rows(state);
    if (code == CLI_DONE)
        code = report(state);
    for (int i = 0; i < state->axes; i++)
        free(state->axis[i].text);
    free(state->method_list);
    free(state->row);
    cli_inputs_free(&state->inputs);
    apa_array_free(&state->truth);
    apa_array_free(&state->truth_lse);
    apa_context_destroy(state->context);
    free(state);
    return code;
}
