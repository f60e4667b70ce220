/* apa eval: what a method does to the output, over every pair; one method in detail, or several in one table. */
#include "cli.h"
#include "verdict_map.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_METHODS 32

typedef struct eval_state {
    const cli_options *options;
    cli_inputs inputs;
    apa_context *context;
    apa_array truth, truth_lse;
    apa_array out; /* of one method after the other, where it is diagnosed */
    apa_evaluation_options evaluation_options;
    cli_devices devices;
    int count;
    char names[MAX_METHODS][24];
    apa_recipe recipe[MAX_METHODS];
    int32_t tile[MAX_METHODS];
    apa_evaluation result[MAX_METHODS];
    cli_diagnosis diagnosis[MAX_METHODS];
    cli_map map[MAX_METHODS]; /* with --map */
} eval_state;

/* "exact,apa,cold" or the one --method. */
static int choose_methods(eval_state *state)
{
    const char *list = state->options->compare;
    if (list == NULL)
        list = state->options->method != NULL ? state->options->method : "apa";
    else if (state->options->method != NULL)
        return cli_complain(CLI_MISUSE, "--compare: found --method beside it, expected one of the two");
    for (;;) {
        const size_t n = state->options->compare != NULL ? strcspn(list, ",") : strlen(list);
        if (state->count == MAX_METHODS)
            return cli_complain(CLI_MISUSE, "--compare: more than %d methods", MAX_METHODS);
        if (n == 0 || n >= sizeof state->names[0])
            return cli_complain(CLI_MISUSE, "%s: \"%s\", expected names of presets",
                                state->options->compare != NULL ? "--compare" : "--method", list);
        char *name = state->names[state->count];
        memcpy(name, list, n);
        name[n] = '\0';
        int code = cli_recipe(state->options, name, &state->recipe[state->count]);
        if (code != CLI_DONE)
            return code;
        state->count++;
        if (list[n] == '\0')
            return CLI_DONE;
        list += n + 1;
    }
}

/* Every method must be able to run before the truth is computed. The reference engine takes its time, so it runs once.
 */
static int plan_all(eval_state *state)
{
    apa_problem problem = state->inputs.problem;
    const apa_dtype dtype = problem.q.dtype == APA_DTYPE_F64 ? APA_DTYPE_F64 : APA_DTYPE_F32;
    const int64_t *q = problem.q.shape;
    problem.out = apa_tensor_hnd(NULL, dtype, q[0], q[1], q[2], problem.v.shape[3]);
    problem.lse = apa_tensor_hnd(NULL, dtype, q[0], q[1], q[2], 1);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = state->options->engine;
    bool slow = false;
    for (int i = 0; i < state->count; i++) {
        apa_plan plan;
        apa_plan_init(&plan);
        apa_status status = apa_attention_plan(state->context, &problem, &state->recipe[i], &options, &plan);
        if (status != APA_STATUS_OK)
            return cli_complain_context(state->options, state->context, status);
        state->tile[i] = plan.recipe.tile;
        slow = slow || strcmp(plan.engine, "reference") == 0;
    }
    apa_evaluation_options *e = &state->evaluation_options;
    apa_evaluation_options_init(e);
    e->engine = state->options->engine;
    e->repeats = (int32_t)(state->options->repeats != 0 ? state->options->repeats : slow ? 1 : 3);
    e->progress = cli_progress;
    return CLI_DONE;
}

static int find_truth(eval_state *state)
{
    apa_evaluation_options *e = &state->evaluation_options;
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

static int evaluate(eval_state *state, int i, const apa_problem *problem)
{
    apa_status status =
        apa_evaluate(state->context, problem, &state->recipe[i], &state->evaluation_options, &state->result[i]);
    return status == APA_STATUS_OK ? CLI_DONE : cli_complain_context(state->options, state->context, status);
}

/* With the output and the verdicts kept for the diagnosis and the map. */
static int evaluate_and_diagnose(eval_state *state, int i)
{
    apa_problem problem = state->inputs.problem;
    const apa_array_type type = problem.q.dtype == APA_DTYPE_F64 ? APA_ARRAY_F64 : APA_ARRAY_F32;
    const int64_t *q = problem.q.shape, Skv = problem.k.shape[2];
    const int64_t shape[4] = {q[0], q[1], q[2], Skv / state->tile[i] + (Skv % state->tile[i] != 0)};
    apa_array verdicts;
    memset(&verdicts, 0, sizeof verdicts);
    apa_array_free(&state->out);
    int code = cli_output_make(&state->inputs, type, problem.v.shape[3], &state->out, &problem.out);
    if (code == CLI_DONE && apa_array_allocate(&verdicts, APA_ARRAY_BOOL, 4, shape) != APA_STATUS_OK)
        code = cli_complain(CLI_FAILED, "no memory for the verdicts");
    state->evaluation_options.verdicts = verdicts.data;
    if (code == CLI_DONE)
        code = evaluate(state, i, &problem);
    if (code == CLI_DONE)
        code = cli_diagnose(state->options, state->context, &problem, &state->evaluation_options.truth,
                            &state->result[i].statistics.recipe, verdicts.data, &state->diagnosis[i]);
    if (code == CLI_DONE && state->options->map &&
        !cli_map_make(&problem, state->tile[i], verdicts.data, CLI_MAP_CELLS / state->count, &state->map[i]))
        code = cli_complain(CLI_FAILED, "no memory for the map");
    state->evaluation_options.verdicts = NULL;
    apa_array_free(&verdicts);
    return code;
}

static int evaluate_all(eval_state *state)
{
    int code = CLI_DONE;
    for (int i = 0; i < state->count && code == CLI_DONE; i++)
        code = cli_diagnosis_wanted(state->options) || state->options->map ? evaluate_and_diagnose(state, i)
                                                                           : evaluate(state, i, &state->inputs.problem);
    return code;
}

/* What the method would cost on a device. */
static apa_cost modelled(const eval_state *state, int i, int device)
{
    apa_cost cost;
    memset(&cost, 0, sizeof cost);
    apa_cost_estimate(state->context, &state->inputs.problem, &state->result[i].statistics,
                      state->devices.profile[device], &cost); /* nothing of it can fail after a run */
    return cost;
}

/* ------------------------------------------------------------------------------- JSON */

static json_t *place_json(const int64_t place[3])
{
    return json_pack("[I,I,I]", (json_int_t)place[0], (json_int_t)place[1], (json_int_t)place[2]);
}

static json_t *result_json(const eval_state *state, int i)
{
    const apa_evaluation *r = &state->result[i];
    const apa_error *e = &r->error;
    const apa_statistics *s = &r->statistics;
    const double candidates = s->visible > 0 ? (double)s->candidates / (double)s->visible : 0;
    json_t *object = json_pack("{s:s,s:s,s:s}", "method", state->names[i], "engine", s->engine, "kernel", s->kernel);
    const struct {
        const char *key;
        int64_t value;
    } counts[] = {{"pairs", e->pairs},
                  {"lt_0_99", e->lt_0_99},
                  {"lt_0_9", e->lt_0_9},
                  {"lt_0", e->lt_0},
                  {"non_finite", e->non_finite},
                  {"truth_not_finite", e->truth_not_finite},
                  {"repeats", state->evaluation_options.repeats},
                  {"threads", apa_context_threads(state->context)},
                  {"workspace_bytes", (int64_t)s->workspace_bytes}};
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"pooled_cos", e->pooled_cos},
                   {"mean_cos", e->mean_cos},
                   {"min_cos", e->min_cos},
                   {"rel_l2", e->rel_l2},
                   {"rel_l2_max", e->rel_l2_max},
                   {"max_abs", e->max_abs},
                   {"mean_abs", e->mean_abs},
                   {"norm_ratio_min", e->norm_ratio_min},
                   {"norm_ratio_max", e->norm_ratio_max},
                   {"lse_max_abs", e->lse_max_abs},
                   {"hot_share", s->hot_share},
                   {"skip_share", s->skip_share},
                   {"candidates_share", candidates},
                   {"lamp_recomputed", cli_lamp_recomputed(s)},
                   {"lamp_disruptive", cli_lamp_disruptive(s)},
                   {"prep_ms", r->prep_ms},
                   {"attention_ms", r->attention_ms},
                   {"exact_ms", r->exact_ms},
                   {"speedup", r->speedup}};
    for (size_t j = 0; j < sizeof counts / sizeof counts[0]; j++)
        json_object_set_new(object, counts[j].key, json_integer((json_int_t)counts[j].value));
    for (size_t j = 0; j < sizeof numbers / sizeof numbers[0]; j++)
        json_object_set_new(object, numbers[j].key, cli_json_number(numbers[j].value));
    json_object_set_new(object, "min_cos_pair", place_json(e->min_cos_pair));
    json_object_set_new(object, "rel_l2_max_pair", place_json(e->rel_l2_max_pair));
    json_object_set_new(object, "isa", json_string(apa_context_isa(state->context)));
    json_object_set_new(object, "shape", cli_json_problem_shape(&state->inputs.problem));
    json_object_set_new(object, "dtype", json_string(apa_dtype_name(state->inputs.problem.q.dtype)));
    json_object_set_new(object, "recipe", cli_json_recipe(&s->recipe));
    cli_diagnosis_json(&state->diagnosis[i], object);
    if (state->map[i].heads != NULL)
        json_object_set_new(object, "map", cli_map_json(&state->map[i]));
    if (state->devices.count > 0) {
        json_t *costs = json_object();
        for (int j = 0; j < state->devices.count; j++) {
            const apa_cost cost = modelled(state, i, j);
            json_object_set_new(costs, state->devices.profile[j]->name, cli_json_cost(&cost));
        }
        json_object_set_new(object, "cost", costs);
    }
    return object;
}

static json_t *all_json(const eval_state *state)
{
    json_t *array = json_array();
    for (int i = 0; i < state->count; i++)
        json_array_append_new(array, result_json(state, i));
    return array;
}

/* ------------------------------------------------------------------------------- text */

static void print_errors(const apa_error *e)
{
    if (e->pairs == e->truth_not_finite) {
        printf("errors           none: the truth has a NaN or Inf in each of the %" PRId64 " pairs\n", e->pairs);
        return;
    }
    printf("cosine           pooled %.9f   mean %.9f   min %.9f\n", e->pooled_cos, e->mean_cos, e->min_cos);
    printf("  worst pair     batch %" PRId64 ", head %" PRId64 ", row %" PRId64 "\n", e->min_cos_pair[0],
           e->min_cos_pair[1], e->min_cos_pair[2]);
    printf("  pairs below    0.99: %" PRId64 "   0.9: %" PRId64 "   0: %" PRId64 "   not finite: %" PRId64 "\n",
           e->lt_0_99, e->lt_0_9, e->lt_0, e->non_finite);
    if (e->truth_not_finite > 0)
        printf("  left out       truth not finite: %" PRId64 "\n", e->truth_not_finite);
    printf("relative L2      all %.3e   worst pair %.3e (batch %" PRId64 ", head %" PRId64 ", row %" PRId64 ")\n",
           e->rel_l2, e->rel_l2_max, e->rel_l2_max_pair[0], e->rel_l2_max_pair[1], e->rel_l2_max_pair[2]);
    printf("absolute         max %.3e   mean %.3e   LSE max %.3e\n", e->max_abs, e->mean_abs, e->lse_max_abs);
    printf("norm ratio       %.6f ... %.6f\n", e->norm_ratio_min, e->norm_ratio_max);
}

static void print_one(const eval_state *state)
{
    const apa_evaluation *r = &state->result[0];
    const apa_error *e = &r->error;
    const apa_statistics *s = &r->statistics;
    printf("method %s, engine %s (%s), %d threads, %" PRId64 " pairs against exact attention in double\n\n",
           state->names[0], s->engine, s->kernel, (int)apa_context_threads(state->context), e->pairs);
    print_errors(e);
    printf("tiles            hot %.2f %%   skipped %.2f %%   (candidates %.2f %%)\n", 100 * s->hot_share,
           100 * s->skip_share, s->visible > 0 ? 100.0 * (double)s->candidates / (double)s->visible : 0);
    if (s->lamp_sub_blocks > 0)
        printf("sub-blocks       recomputed %.2f %%   disruptive tiles %.2f %%\n", 100 * cli_lamp_recomputed(s),
               100 * cli_lamp_disruptive(s));
    printf("time             prep %.3f ms   attention %.3f ms   exact %.3f ms   ratio %.2fx (medians of %d)\n",
           r->prep_ms, r->attention_ms, r->exact_ms, r->speedup, (int)state->evaluation_options.repeats);
}

static void print_table(const eval_state *state)
{
    const apa_problem *p = &state->inputs.problem;
    printf("B %" PRId64 ", Hq %" PRId64 ", Hkv %" PRId64 ", Sq %" PRId64 ", Skv %" PRId64 ", D %" PRId64
           ", %s; %" PRId64 " pairs against exact attention in double; %d threads\n\n",
           p->q.shape[0], p->q.shape[1], p->k.shape[1], p->q.shape[2], p->k.shape[2], p->q.shape[3],
           apa_dtype_name(p->q.dtype), state->result[0].error.pairs, (int)apa_context_threads(state->context));
    if (state->result[0].error.truth_not_finite > 0)
        printf("truth not finite: %" PRId64 " of the pairs, left out of every figure\n\n",
               state->result[0].error.truth_not_finite);
    /* Each method is timed against the exact method of its own engine in turns, so each row has an exact time of its
     * own. */
    printf("%-18s %11s %11s %11s %10s %10s %7s %7s %9s %12s %9s %9s  %s\n", "method", "pooled cos", "mean cos",
           "min cos", "rel L2", "worst L2", "hot %", "skip %", "prep ms", "attention ms", "exact ms", "vs exact",
           "kernel");
    for (int i = 0; i < state->count; i++) {
        const apa_evaluation *r = &state->result[i];
        printf("%-18s %11.8f %11.8f %11.8f %10.3e %10.3e %7.2f %7.2f %9.2f %12.2f %9.2f %8.2fx  %s\n", state->names[i],
               r->error.pooled_cos, r->error.mean_cos, r->error.min_cos, r->error.rel_l2, r->error.rel_l2_max,
               100 * r->statistics.hot_share, 100 * r->statistics.skip_share, r->prep_ms, r->attention_ms, r->exact_ms,
               r->speedup, r->statistics.kernel);
    }
}

static void print_costs(const eval_state *state)
{
    if (state->devices.count > 0)
        printf("\nmodelled cost (docs/cost-model.md)\n%-16s %-10s %10s %13s %10s %9s  %s\n", "method", "device",
               "prep ms", "attention ms", "exact ms", "vs exact", "units replaced by wider ones");
    for (int i = 0; i < state->count; i++)
        for (int j = 0; j < state->devices.count; j++) {
            const apa_cost c = modelled(state, i, j);
            printf("%-18s %-10s %10.4f %13.4f %10.4f %8.2fx ", state->names[i], state->devices.profile[j]->name,
                   c.prep_ms, c.attention_ms, c.exact_ms, c.speedup);
            for (int u = 0; u < APA_UNIT_COUNT; u++)
                if (c.replaced & 1u << u)
                    printf(" %s", apa_unit_name((apa_unit)u));
            printf("\n");
        }
}

static void print(const eval_state *state)
{
    state->options->compare != NULL ? print_table(state) : print_one(state);
    print_costs(state);
    for (int i = 0; i < state->count && cli_diagnosis_wanted(state->options); i++) {
        if (state->count > 1)
            printf("\n---- %s\n", state->names[i]);
        cli_diagnosis_print(state->options, &state->diagnosis[i]);
    }
}

/* Everything but output. */
static int compute(eval_state *state)
{
    const cli_options *options = state->options;
    int code = choose_methods(state);
    if (code == CLI_DONE)
        code = cli_diagnosis_check(options);
    if (code == CLI_DONE)
        code = cli_devices_choose(options->device, NULL, &state->devices);
    if (code == CLI_DONE)
        code = cli_path_check(options, "--json", options->json);
    if (code == CLI_DONE)
        code = cli_context_create(options, &state->context);
    if (code == CLI_DONE)
        code = cli_inputs_load(options, &state->inputs);
    if (code == CLI_DONE)
        code = cli_pairs_check(options, &state->inputs);
    if (code == CLI_DONE)
        code = plan_all(state);
    if (code == CLI_DONE)
        code = find_truth(state);
    return code == CLI_DONE ? evaluate_all(state) : code;
}

static void drop(eval_state *state)
{
    for (int i = 0; i < MAX_METHODS; i++) {
        cli_diagnosis_free(&state->diagnosis[i]);
        cli_map_free(&state->map[i]);
    }
    apa_array_free(&state->out);
    cli_inputs_free(&state->inputs);
    apa_array_free(&state->truth);
    apa_array_free(&state->truth_lse);
    apa_context_destroy(state->context);
    free(state);
}

int cli_eval_result(const cli_options *options, json_t **result)
{
    eval_state *state = calloc(1, sizeof *state);
    if (state == NULL)
        return cli_complain(CLI_FAILED, "no memory");
    state->options = options;
    int code = compute(state);
    if (code == CLI_DONE)
        *result = all_json(state);
    drop(state);
    return code;
}

int cli_eval(const cli_options *options)
{
    if (options->map && options->json == NULL)
        return cli_complain(CLI_MISUSE, "--map: found without --json FILE, where the map goes");
    eval_state *state = calloc(1, sizeof *state);
    if (state == NULL)
        return cli_complain(CLI_FAILED, "no memory");
    state->options = options;
    int code = compute(state);
    apa_output_file files[1];
    if (code == CLI_DONE)
        code = cli_finish(options, options->compare == NULL ? result_json(state, 0) : all_json(state), files, 0);
    if (code == CLI_DONE && cli_prints(options))
        print(state);
    drop(state);
    return code;
}
