/* Where a method's error comes from: worst pairs, histogram, heads, operands; as tables and as JSON. */
#include "cli.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ATTRIBUTED_PAIRS 20 /* worst pairs that --attribute looks at when --worst doesn't say */

bool cli_diagnosis_wanted(const cli_options *options)
{
    return options->worst > 0 || options->histogram || options->per_head || options->attribute;
}

static apa_worst_by worst_by(const cli_options *options)
{
    return options->worst_by != NULL && strcmp(options->worst_by, "rel") == 0 ? APA_WORST_BY_REL : APA_WORST_BY_COS;
}

int cli_diagnosis_check(const cli_options *options)
{
    const char *changed = options->bias != NULL    ? "--bias"
                          : options->alibi != NULL ? "--alibi"
                          : options->sinks != NULL ? "--sinks"
                          : options->softcap != 0  ? "--softcap"
                                                   : NULL;
    if (options->worst > 0 && changed != NULL)
        return cli_complain(CLI_MISUSE,
                            "--worst: found beside %s, expected one of the two: with changed scores no pair "
                            "is taken apart",
                            changed);
    if (options->worst_by == NULL)
        return CLI_DONE;
    if (strcmp(options->worst_by, "cos") != 0 && strcmp(options->worst_by, "rel") != 0)
        return cli_complain(CLI_MISUSE, "--worst-by: \"%s\", expected cos or rel", options->worst_by);
    if (options->worst == 0 && !options->attribute)
        return cli_complain(CLI_MISUSE, "--worst-by: found without --worst N or --attribute");
    return CLI_DONE;
}

/* ------------------------------------------------------------------------------- finding */

static apa_status find_worst(const cli_options *options, apa_context *context, const apa_problem *problem,
                             const apa_tensor *truth, int32_t tile, const uint8_t *verdicts, cli_diagnosis *d)
{
    const int64_t *q = problem->q.shape, pairs = q[0] * q[1] * q[2];
    const int64_t wanted = options->worst < pairs ? options->worst : pairs;
    if (options->worst == 0)
        return APA_STATUS_OK;
    apa_pair_error *list = calloc((size_t)wanted + 1, sizeof *list);
    d->worst = calloc((size_t)wanted + 1, sizeof *d->worst);
    apa_status status = list == NULL || d->worst == NULL ? APA_STATUS_OUT_OF_MEMORY : APA_STATUS_OK;
    if (status == APA_STATUS_OK && wanted > 0)
        status = apa_worst_pairs(context, &problem->out, truth, worst_by(options), wanted, list, &d->worst_count);
    for (int64_t done = 0; done < d->worst_count && status == APA_STATUS_OK; done += 64) {
        const int64_t left = d->worst_count - done;
        cli_progress(NULL, "worst pairs", (double)done / (double)d->worst_count);
        status = apa_pairs_examine(context, problem, &problem->out, tile, verdicts, list + done, left < 64 ? left : 64,
                                   d->worst + done);
    }
    cli_progress(NULL, "worst pairs", 1);
    free(list);
    return status;
}

static apa_status find_heads(apa_context *context, const apa_problem *problem, const apa_tensor *truth, int32_t tile,
                             const uint8_t *verdicts, cli_diagnosis *d)
{
    const int64_t Skv = problem->k.shape[2];
    d->head_count = problem->q.shape[0] * problem->q.shape[1];
    d->heads = calloc((size_t)d->head_count + 1, sizeof *d->heads);
    if (d->heads == NULL)
        return APA_STATUS_OUT_OF_MEMORY;
    return apa_heads_measure(context, &problem->out, truth, verdicts, Skv / tile + (Skv % tile != 0), d->heads);
}

int cli_diagnose(const cli_options *options, apa_context *context, const apa_problem *problem, const apa_tensor *truth,
                 const apa_recipe *recipe, const uint8_t *verdicts, cli_diagnosis *d)
{
    apa_status status = find_worst(options, context, problem, truth, recipe->tile, verdicts, d);
    if (status == APA_STATUS_OK && options->histogram) {
        status = apa_histogram_measure(context, &problem->out, truth, &d->histogram);
        d->has_histogram = true;
    }
    if (status == APA_STATUS_OK && options->per_head)
        status = find_heads(context, problem, truth, recipe->tile, verdicts, d);
    if (status == APA_STATUS_OK && options->attribute) {
        status =
            apa_attribute(context, problem, recipe, truth, worst_by(options),
                          options->worst > 0 ? options->worst : ATTRIBUTED_PAIRS, cli_progress, NULL, &d->attribution);
        d->has_attribution = true;
    }
    if (status == APA_STATUS_OK)
        return CLI_DONE;
    if (status == APA_STATUS_OUT_OF_MEMORY)
        return cli_complain(CLI_FAILED, "no memory for the diagnosis");
    return cli_complain_context(options, context, status);
}

void cli_diagnosis_free(cli_diagnosis *diagnosis)
{
    free(diagnosis->worst);
    free(diagnosis->heads);
    memset(diagnosis, 0, sizeof *diagnosis);
}

/* ------------------------------------------------------------------------------- JSON */

/* A row of an object: an integer or a number. */
typedef struct field {
    const char *key;
    bool whole;
    int64_t integer;
    double number;
} field;

#define WHOLE(key, value)                                                                                              \
    {                                                                                                                  \
        key, true, value, 0                                                                                            \
    }
#define REAL(key, value)                                                                                               \
    {                                                                                                                  \
        key, false, 0, value                                                                                           \
    }

static json_t *fields_json(const field *fields, size_t count)
{
    json_t *object = json_object();
    for (size_t i = 0; i < count; i++)
        json_object_set_new(object, fields[i].key,
                            fields[i].whole ? json_integer((json_int_t)fields[i].integer)
                                            : cli_json_number(fields[i].number));
    return object;
}

static json_t *pair_json(const apa_pair_detail *p)
{
    const field fields[] = {WHOLE("batch", p->error.batch),
                            WHOLE("head", p->error.head),
                            WHOLE("row", p->error.row),
                            WHOLE("position", p->position),
                            WHOLE("keys", p->keys),
                            REAL("cos", p->error.cos),
                            REAL("rel_l2", p->error.rel_l2),
                            WHOLE("tiles", p->tiles),
                            WHOLE("hot_tiles", p->hot_tiles),
                            WHOLE("skipped_tiles", p->skipped_tiles),
                            REAL("cold_mass", p->cold_mass),
                            REAL("largest_cold_share", p->largest_cold_share),
                            WHOLE("largest_cold_tile", p->largest_cold_tile),
                            REAL("truth_norm", p->truth_norm),
                            REAL("hot_norm", p->hot_norm),
                            REAL("cold_norm", p->cold_norm),
                            REAL("cancellation", p->cancellation),
                            REAL("out_norm", p->out_norm),
                            REAL("lse", p->lse)};
    return fields_json(fields, sizeof fields / sizeof fields[0]);
}

static json_t *head_json(const apa_head_error *h)
{
    const field fields[] = {WHOLE("batch", h->batch),
                            WHOLE("head", h->head),
                            REAL("mean_cos", h->mean_cos),
                            REAL("min_cos", h->min_cos),
                            WHOLE("min_cos_row", h->min_cos_row),
                            REAL("rel_l2", h->rel_l2),
                            REAL("rel_l2_max", h->rel_l2_max),
                            WHOLE("lt_0_99", h->lt_0_99),
                            WHOLE("truth_not_finite", h->truth_not_finite),
                            REAL("hot_share", h->hot_share),
                            REAL("skip_share", h->skip_share)};
    return fields_json(fields, sizeof fields / sizeof fields[0]);
}

static json_t *run_json(const apa_attribution_run *r)
{
    const field fields[] = {REAL("rel_l2", r->rel_l2),
                            REAL("mean_cos", r->mean_cos),
                            REAL("min_cos", r->min_cos),
                            REAL("worst_rel_l2", r->worst_rel_l2),
                            REAL("worst_mean_cos", r->worst_mean_cos),
                            REAL("worst_min_cos", r->worst_min_cos),
                            REAL("hot_share", r->hot_share),
                            REAL("verdicts_changed", r->verdicts_changed)};
    json_t *object = fields_json(fields, sizeof fields / sizeof fields[0]);
    json_object_set_new(object, "ran", json_boolean(r->ran));
    if (!r->ran)
        json_object_set_new(object, "refusal", json_string(r->refusal));
    return object;
}

static json_t *attribution_json(const apa_attribution *a)
{
    json_t *operands = json_object();
    for (int i = 0; i < APA_OPERAND_COUNT; i++)
        json_object_set_new(operands, apa_operand_name((apa_operand)i),
                            json_pack("{s:o,s:o}", "only", run_json(&a->only[i]), "all_but", run_json(&a->all_but[i])));
    return json_pack("{s:I,s:o,s:o,s:o,s:o}", "worst_pairs", (json_int_t)a->worst, "all", run_json(&a->all), "none",
                     run_json(&a->none), "operands", operands, "recipe", cli_json_recipe(&a->recipe));
}

static json_t *histogram_json(const apa_histogram *h)
{
    json_t *edges = json_array(), *cos = json_array(), *rel = json_array();
    for (int i = 0; i < APA_HISTOGRAM_BINS; i++) {
        if (i < APA_HISTOGRAM_BINS - 1)
            json_array_append_new(edges, json_real(apa_histogram_edge(i)));
        json_array_append_new(cos, json_integer((json_int_t)h->cos[i]));
        json_array_append_new(rel, json_integer((json_int_t)h->rel_l2[i]));
    }
    return json_pack("{s:o,s:o,s:o,s:I}", "edges", edges, "one_minus_cos", cos, "rel_l2", rel, "truth_not_finite",
                     (json_int_t)h->truth_not_finite);
}

void cli_diagnosis_json(const cli_diagnosis *d, json_t *object)
{
    if (d->worst != NULL) {
        json_t *list = json_array();
        for (int64_t i = 0; i < d->worst_count; i++)
            json_array_append_new(list, pair_json(&d->worst[i]));
        json_object_set_new(object, "worst", list);
    }
    if (d->has_histogram)
        json_object_set_new(object, "histogram", histogram_json(&d->histogram));
    if (d->heads != NULL) {
        json_t *list = json_array();
        for (int64_t i = 0; i < d->head_count; i++)
            json_array_append_new(list, head_json(&d->heads[i]));
        json_object_set_new(object, "heads", list);
    }
    if (d->has_attribution)
        json_object_set_new(object, "attribution", attribution_json(&d->attribution));
}

/* ------------------------------------------------------------------------------- text */

static void print_worst(const cli_options *options, const cli_diagnosis *d)
{
    printf("\nworst %" PRId64
           " pairs by %s; norms of the exact output, of what hot and what cold tiles add to it, and of the "
           "method's\n",
           d->worst_count, worst_by(options) == APA_WORST_BY_COS ? "cosine" : "relative L2");
    printf("%5s %5s %8s %9s %11s %10s %6s %6s %10s %10s %8s %10s %10s %10s %7s %10s\n", "batch", "head", "row",
           "position", "cosine", "rel L2", "tiles", "hot", "cold mass", "largest", "in tile", "|o|", "|hot|", "|cold|",
           "cancel", "|out|");
    for (int64_t i = 0; i < d->worst_count; i++) {
        const apa_pair_detail *p = &d->worst[i];
        printf("%5" PRId64 " %5" PRId64 " %8" PRId64 " %9" PRId64 " %11.8f %10.3e %6" PRId64 " %6" PRId64
               " %10.3e %10.3e %8" PRId64 " %10.3e %10.3e %10.3e %7.2f %10.3e\n",
               p->error.batch, p->error.head, p->error.row, p->position, p->error.cos, p->error.rel_l2, p->tiles,
               p->hot_tiles, p->cold_mass, p->largest_cold_share, p->largest_cold_tile, p->truth_norm, p->hot_norm,
               p->cold_norm, p->cancellation, p->out_norm);
    }
}

static void print_bar(int64_t count, int64_t pairs)
{
    char bar[41] = "";
    const int length = (int)ceil(40 * (double)count / (double)pairs);
    memset(bar, '#', (size_t)length);
    bar[length] = '\0';
    printf(" %10" PRId64 " %-40s", count, bar);
}

static void print_histogram(const apa_histogram *h)
{
    int first = APA_HISTOGRAM_BINS - 1, last = 0;
    for (int i = 0; i < APA_HISTOGRAM_BINS; i++)
        if (h->cos[i] != 0 || h->rel_l2[i] != 0) {
            first = i < first ? i : first;
            last = i;
        }
    if (h->pairs == h->truth_not_finite)
        return;
    printf("\n%-22s %10s %-40s %10s\n", "pairs from ... to under", "1 - cosine", "", "rel L2");
    for (int i = first; i <= last; i++) {
        if (i == 0)
            printf("%10s %11.3g", "", apa_histogram_edge(0));
        else if (i == APA_HISTOGRAM_BINS - 1)
            printf("%10.3g %11s", apa_histogram_edge(i - 1), "");
        else
            printf("%10.3g %11.3g", apa_histogram_edge(i - 1), apa_histogram_edge(i));
        print_bar(h->cos[i], h->pairs);
        print_bar(h->rel_l2[i], h->pairs);
        printf("\n");
    }
}

static void print_heads(const cli_diagnosis *d)
{
    printf("\n%5s %5s %12s %12s %8s %10s %10s %8s %7s %7s\n", "batch", "head", "mean cos", "min cos", "in row",
           "rel L2", "worst L2", "< 0.99", "hot %", "skip %");
    for (int64_t i = 0; i < d->head_count; i++) {
        const apa_head_error *h = &d->heads[i];
        printf("%5" PRId64 " %5" PRId64 " %12.9f %12.9f %8" PRId64 " %10.3e %10.3e %8" PRId64 " %7.2f %7.2f\n",
               h->batch, h->head, h->mean_cos, h->min_cos, h->min_cos_row, h->rel_l2, h->rel_l2_max, h->lt_0_99,
               100 * h->hot_share, 100 * h->skip_share);
    }
}

static void print_run(const char *name, const apa_attribution_run *r)
{
    printf("  %-22s", name);
    if (!r->ran) {
        printf(" %s\n", r->refusal);
        return;
    }
    printf(" %10.3e %11.8f %11.8f   %10.3e %11.8f %11.8f %7.2f %9.4f\n", r->rel_l2, r->mean_cos, r->min_cos,
           r->worst_rel_l2, r->worst_mean_cos, r->worst_min_cos, 100 * r->hot_share, 100 * r->verdicts_changed);
}

static void print_attribution(const apa_attribution *a)
{
    char name[32];
    printf("\nerror by operand of the cold tiles (reference engine), over all pairs and over the %" PRId64 " worst\n",
           a->worst);
    printf("  %-22s %10s %11s %11s   %10s %11s %11s %7s %9s\n", "quantised", "rel L2", "mean cos", "min cos", "rel L2",
           "mean cos", "min cos", "hot %", "flipped %");
    print_run("all, as the method is", &a->all);
    print_run("none", &a->none);
    for (int i = 0; i < APA_OPERAND_COUNT; i++) {
        snprintf(name, sizeof name, "only %s", apa_operand_name((apa_operand)i));
        print_run(name, &a->only[i]);
    }
    for (int i = 0; i < APA_OPERAND_COUNT; i++) {
        if (!a->only[i].ran && strcmp(a->only[i].refusal, a->all_but[i].refusal) == 0)
            continue; /* the line above says it */
        snprintf(name, sizeof name, "all but %s", apa_operand_name((apa_operand)i));
        print_run(name, &a->all_but[i]);
    }
}

void cli_diagnosis_print(const cli_options *options, const cli_diagnosis *d)
{
    if (d->worst != NULL)
        print_worst(options, d);
    if (d->has_histogram)
        print_histogram(&d->histogram);
    if (d->heads != NULL)
        print_heads(d);
    if (d->has_attribution)
        print_attribution(&d->attribution);
}
