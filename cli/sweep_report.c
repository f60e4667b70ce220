/* What a sweep found: marks of the best rows, table, JSON, CSV. */
#include "sweep.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool ran(const sweep_row *row)
{
    return row->refusal[0] == '\0';
}

static double total_ms(const sweep_row *row, int device)
{
    return row->cost[device].prep_ms + row->cost[device].attention_ms;
}

/* a at least as good in both, and better in one. */
static bool dominates(const sweep_row *a, const sweep_row *b, int device)
{
    const double ea = a->result.error.rel_l2, eb = b->result.error.rel_l2, ca = total_ms(a, device),
                 cb = total_ms(b, device);
    return ea <= eb && ca <= cb && (ea < eb || ca < cb);
}

void sweep_mark_pareto(sweep_state *state)
{
    for (int d = 0; d < state->devices.count; d++)
        for (int64_t i = 0; i < state->rows; i++) {
            sweep_row *row = &state->row[i];
            row->pareto[d] = ran(row) && isfinite(row->result.error.rel_l2) && isfinite(total_ms(row, d));
            for (int64_t j = 0; j < state->rows && row->pareto[d]; j++)
                row->pareto[d] = !(ran(&state->row[j]) && dominates(&state->row[j], row, d));
        }
}

/* ------------------------------------------------------------------------------- figures of a row */

#define FIGURES 14

typedef struct figure {
    const char *key;
    double value;
} figure;

/* Shared by JSON and CSV. */
static void figures_of(const sweep_row *row, figure figures[FIGURES])
{
    const apa_error *e = &row->result.error;
    const apa_statistics *s = &row->result.statistics;
    const figure all[FIGURES] = {{"rel_l2", e->rel_l2},
                                 {"rel_l2_max", e->rel_l2_max},
                                 {"pooled_cos", e->pooled_cos},
                                 {"mean_cos", e->mean_cos},
                                 {"min_cos", e->min_cos},
                                 {"lt_0_99", (double)e->lt_0_99},
                                 {"lse_max_abs", e->lse_max_abs},
                                 {"hot_share", s->hot_share},
                                 {"skip_share", s->skip_share},
                                 {"candidates_share", s->visible > 0 ? (double)s->candidates / (double)s->visible : 0},
                                 {"lamp_recomputed", cli_lamp_recomputed(s)},
                                 {"lamp_disruptive", cli_lamp_disruptive(s)},
                                 {"prep_ms", row->result.prep_ms},
                                 {"attention_ms", row->result.attention_ms}};
    memcpy(figures, all, sizeof all);
}

/* ------------------------------------------------------------------------------- JSON */

static json_t *row_json(const sweep_state *state, const sweep_row *row)
{
    json_t *object = json_pack("{s:s}", "method", row->method), *knobs = json_object(), *costs = json_object();
    for (int a = 0; a < state->axes; a++)
        json_object_set_new(knobs, state->axis[a].text, json_string(row->value[a]));
    json_object_set_new(object, "knobs", knobs);
    json_object_set_new(object, "refused", ran(row) ? json_null() : json_string(row->refusal));
    json_object_set_new(object, "cost", costs);
    if (!ran(row))
        return object;
    figure figures[FIGURES];
    figures_of(row, figures);
    for (int i = 0; i < FIGURES; i++)
        json_object_set_new(object, figures[i].key,
                            strncmp(figures[i].key, "lt_", 3) == 0
                                ? json_integer((json_int_t)figures[i].value) /* counts */
                                : cli_json_number(figures[i].value));
    json_object_set_new(object, "engine", json_string(row->result.statistics.engine));
    json_object_set_new(object, "kernel", json_string(row->result.statistics.kernel));
    for (int d = 0; d < state->devices.count; d++) {
        json_t *cost = cli_json_cost(&row->cost[d]);
        json_object_set_new(cost, "pareto", json_boolean(row->pareto[d]));
        json_object_set_new(costs, state->devices.profile[d]->name, cost);
    }
    json_object_set_new(object, "recipe", cli_json_recipe(&row->result.statistics.recipe));
    return object;
}

/* Pairs that are left out of every figure of every row. */
static int64_t truth_not_finite(const sweep_state *state)
{
    for (int64_t i = 0; i < state->rows; i++)
        if (ran(&state->row[i]))
            return state->row[i].result.error.truth_not_finite;
    return 0;
}

json_t *sweep_json(const sweep_state *state)
{
    const apa_problem *p = &state->inputs.problem;
    json_t *rows = json_array(), *devices = json_array(), *knobs = json_array();
    const int64_t lost = truth_not_finite(state);
    for (int64_t i = 0; i < state->rows; i++)
        json_array_append_new(rows, row_json(state, &state->row[i]));
    for (int d = 0; d < state->devices.count; d++)
        json_array_append_new(devices, json_pack("{s:s,s:s}", "name", state->devices.profile[d]->name, "about",
                                                 state->devices.profile[d]->about));
    for (int a = 0; a < state->axes; a++)
        json_array_append_new(knobs, json_string(state->axis[a].text));
    return json_pack("{s:o,s:s,s:b,s:I,s:I,s:i,s:s,s:o,s:o,s:o}", "shape", cli_json_problem_shape(p), "dtype",
                     apa_dtype_name(p->q.dtype), "causal", p->causal, "pairs",
                     (json_int_t)(p->q.shape[0] * p->q.shape[1] * p->q.shape[2]), "truth_not_finite", (json_int_t)lost,
                     "threads", (int)apa_context_threads(state->context), "isa", apa_context_isa(state->context),
                     "knobs", knobs, "devices", devices, "rows", rows);
}

/* ------------------------------------------------------------------------------- CSV */

/* Commas, quotes and line ends are harmless inside quotes; a quote is doubled. */
static void put_text(FILE *to, const char *text)
{
    fputc('"', to);
    for (; *text != '\0'; text++) {
        if (*text == '"')
            fputc('"', to);
        fputc(*text, to);
    }
    fputc('"', to);
}

static void put_number(FILE *to, double value)
{
    if (isfinite(value))
        fprintf(to, ",%.17g", value);
    else
        fputc(',', to);
}

static void put_header(FILE *to, const sweep_state *state)
{
    figure figures[FIGURES];
    fprintf(to, "method");
    for (int a = 0; a < state->axes; a++)
        fprintf(to, ",%s", state->axis[a].text);
    figures_of(&state->row[0], figures);
    fprintf(to, ",engine");
    for (int i = 0; i < FIGURES; i++)
        fprintf(to, ",%s", figures[i].key);
    for (int d = 0; d < state->devices.count; d++) {
        const char *name = state->devices.profile[d]->name;
        fprintf(to, ",%s_prep_ms,%s_attention_ms,%s_exact_ms,%s_speedup,%s_pareto", name, name, name, name, name);
    }
    fprintf(to, ",refused\n");
}

static void put_row(FILE *to, const sweep_state *state, const sweep_row *row)
{
    figure figures[FIGURES];
    fprintf(to, "%s", row->method);
    for (int a = 0; a < state->axes; a++)
        fprintf(to, ",%s", row->value[a]);
    fprintf(to, ",%s", ran(row) ? row->result.statistics.engine : "");
    figures_of(row, figures);
    for (int i = 0; i < FIGURES; i++)
        put_number(to, ran(row) ? figures[i].value : NAN);
    for (int d = 0; d < state->devices.count; d++) {
        const apa_cost *c = &row->cost[d];
        const double value[4] = {c->prep_ms, c->attention_ms, c->exact_ms, c->speedup};
        for (int i = 0; i < 4; i++)
            put_number(to, ran(row) ? value[i] : NAN);
        fprintf(to, ",%d", row->pareto[d]);
    }
    fputc(',', to);
    put_text(to, row->refusal);
    fputc('\n', to);
}

char *sweep_csv(const sweep_state *state)
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (to == NULL)
        return NULL;
    put_header(to, state);
    for (int64_t i = 0; i < state->rows; i++)
        put_row(to, state, &state->row[i]);
    const bool failed = ferror(to) != 0;
    if (fclose(to) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}

/* ------------------------------------------------------------------------------- text */

static int widest(const sweep_state *state, int axis)
{
    size_t width = axis < 0 ? strlen("method") : strlen(state->axis[axis].text);
    for (int64_t i = 0; i < state->rows; i++) {
        const size_t n = strlen(axis < 0 ? state->row[i].method : state->row[i].value[axis]);
        width = n > width ? n : width;
    }
    return (int)width;
}

void sweep_print(const sweep_state *state)
{
    const apa_problem *p = &state->inputs.problem;
    printf("B %" PRId64 ", Hq %" PRId64 ", Hkv %" PRId64 ", Sq %" PRId64 ", Skv %" PRId64 ", D %" PRId64
           ", %s; every pair against exact attention in double\n",
           p->q.shape[0], p->q.shape[1], p->k.shape[1], p->q.shape[2], p->k.shape[2], p->q.shape[3],
           apa_dtype_name(p->q.dtype));
    printf(
        "device columns: modelled prep + attention ms and ratio to exact there; * no row has less error for less\n\n");
    if (truth_not_finite(state) > 0)
        printf("truth not finite: %" PRId64 " of the pairs, left out of every figure\n\n", truth_not_finite(state));
    printf("%-*s", widest(state, -1), "method");
    for (int a = 0; a < state->axes; a++)
        printf("  %-*s", widest(state, a), state->axis[a].text);
    printf(" %10s %10s %11s %7s %7s  %-9s", "rel L2", "worst L2", "min cos", "hot %", "skip %", "engine");
    for (int d = 0; d < state->devices.count; d++)
        printf(" %19s ", state->devices.profile[d]->name);
    printf("\n");
    for (int64_t i = 0; i < state->rows; i++) {
        const sweep_row *row = &state->row[i];
        const apa_error *e = &row->result.error;
        const apa_statistics *s = &row->result.statistics;
        printf("%-*s", widest(state, -1), row->method);
        for (int a = 0; a < state->axes; a++)
            printf("  %-*s", widest(state, a), row->value[a]);
        if (!ran(row)) {
            printf(" refused: %s\n", row->refusal);
            continue;
        }
        printf(" %10.3e %10.3e %11.8f %7.2f %7.2f  %-9s", e->rel_l2, e->rel_l2_max, e->min_cos, 100 * s->hot_share,
               100 * s->skip_share, s->engine);
        for (int d = 0; d < state->devices.count; d++)
            printf(" %11.4f %6.2fx%c", total_ms(row, d), row->cost[d].speedup, row->pareto[d] ? '*' : ' ');
        printf("\n");
    }
}
