/* Worst pairs, histogram, heads, operands and modelled cost in `apa eval`; grids in `apa sweep`. */
#include "support/command.h"

#include "apa/eval.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAIRS (4 * 40)

static void need_numbers(const json_t *object, const char *const *keys, size_t count)
{
    for (size_t i = 0; i < count; i++)
        assert_true(isfinite(command_number(object, keys[i])));
}

#define NEED(object, keys) need_numbers(object, keys, sizeof keys / sizeof keys[0])

static void worst(void **unused)
{
    (void)unused;
    static const char *const keys[] = {"batch",         "head",      "row",
                                       "position",      "keys",      "cos",
                                       "rel_l2",        "tiles",     "hot_tiles",
                                       "skipped_tiles", "cold_mass", "hot_norm",
                                       "cold_norm",     "out_norm",  "largest_cold_share",
                                       "truth_norm",    "lse",       "largest_cold_tile",
                                       "cancellation"};
    for (int by_rel = 0; by_rel < 2; by_rel++) {
        command_works(command_run("eval " IN "--worst 12 --worst-by %s --eps 0.9 --json -", by_rel ? "rel" : "cos"));
        json_t *object = command_parse(command_out);
        const json_t *list = json_object_get(object, "worst"), *first = json_array_get(list, 0);
        assert_int_equal(json_array_size(list), 12);
        double before = by_rel ? INFINITY : -1;
        for (size_t i = 0; i < 12; i++) {
            const json_t *pair = json_array_get(list, i);
            NEED(pair, keys);
            const double at = command_number(pair, by_rel ? "rel_l2" : "cos"), cold = command_number(pair, "cold_mass");
            assert_true(by_rel ? at <= before : at >= before);
            before = at;
            assert_true(cold >= 0 && cold <= 1 && command_number(pair, "largest_cold_share") <= cold);
            /* Sq 40 at the end of 70 keys, causal */
            assert_true(command_number(pair, "position") == command_number(pair, "row") + 30);
            assert_true(command_number(pair, "keys") == command_number(pair, "position") + 1);
            assert_true(command_number(pair, "tiles") == (command_number(pair, "keys") > 64 ? 2 : 1));
        }
        assert_true(fabs(command_number(first, by_rel ? "rel_l2" : "cos") -
                         command_number(object, by_rel ? "rel_l2_max" : "min_cos")) < 1e-12);
        const json_t *place = json_object_get(object, by_rel ? "rel_l2_max_pair" : "min_cos_pair");
        assert_true(json_integer_value(json_array_get(place, 1)) == command_number(first, "head"));
        assert_true(json_integer_value(json_array_get(place, 2)) == command_number(first, "row"));
        json_decref(object);
    }
    command_works(command_run("eval " IN "--worst 1000 --method exact --json -")); /* more than there are */
    json_t *object = command_parse(command_out);
    assert_int_equal(json_array_size(json_object_get(object, "worst")), PAIRS);
    assert_true(command_number(json_array_get(json_object_get(object, "worst"), 0), "cold_mass") == 0);
    assert_null(json_object_get(object, "histogram"));
    assert_null(json_object_get(object, "heads"));
    assert_null(json_object_get(object, "attribution"));
    assert_null(json_object_get(object, "cost"));
    json_decref(object);
}

static void histogram_and_heads(void **unused)
{
    (void)unused;
    static const char *const keys[] = {"batch",  "head",       "mean_cos", "min_cos",   "min_cos_row",
                                       "rel_l2", "rel_l2_max", "lt_0_99",  "hot_share", "skip_share"};
    command_works(command_run("eval " IN "--histogram --per-head --json -"));
    json_t *object = command_parse(command_out);
    const json_t *h = json_object_get(object, "histogram"), *list = json_object_get(object, "heads");
    const json_t *edges = json_object_get(h, "edges");
    assert_int_equal(json_array_size(edges), APA_HISTOGRAM_BINS - 1);
    static const char *const of[] = {"one_minus_cos", "rel_l2"};
    for (int k = 0; k < 2; k++) {
        const json_t *bins = json_object_get(h, of[k]);
        json_int_t sum = 0;
        assert_int_equal(json_array_size(bins), APA_HISTOGRAM_BINS);
        for (size_t i = 0; i < APA_HISTOGRAM_BINS; i++)
            sum += json_integer_value(json_array_get(bins, i));
        assert_int_equal(sum, PAIRS);
    }
    assert_int_equal(json_array_size(list), 4);
    double mean = 0, min = 1, hot = 0;
    for (size_t i = 0; i < 4; i++) {
        const json_t *head = json_array_get(list, i);
        NEED(head, keys);
        assert_true(command_number(head, "head") == (double)i);
        mean += command_number(head, "mean_cos") / 4;
        min = fmin(min, command_number(head, "min_cos"));
        hot += command_number(head, "hot_share") / 4; /* all heads see the same tiles */
    }
    assert_true(fabs(mean - command_number(object, "mean_cos")) < 1e-12);
    assert_true(fabs(hot - command_number(object, "hot_share")) < 1e-12);
    assert_true(min == command_number(object, "min_cos"));
    json_decref(object);
}

static void attribution(void **unused)
{
    (void)unused;
    static const char *const keys[] = {"rel_l2",         "mean_cos",      "min_cos",   "worst_rel_l2",
                                       "worst_mean_cos", "worst_min_cos", "hot_share", "verdicts_changed"};
    static const char *const operands[] = {"q", "k", "v", "p", "accumulator"};
    command_works(command_run("eval " IN "--attribute --method cold --json -"));
    json_t *object = command_parse(command_out);
    const json_t *a = json_object_get(object, "attribution");
    NEED(json_object_get(a, "all"), keys);
    NEED(json_object_get(a, "none"), keys);
    assert_true(command_number(a, "worst_pairs") == 20);
    const double all = command_number(json_object_get(a, "all"), "rel_l2"),
                 none = command_number(json_object_get(a, "none"), "rel_l2");
    assert_true(none < 1e-4 * all && fabs(all / command_number(object, "rel_l2") - 1) < 0.01);
    for (int i = 0; i < 5; i++) {
        const json_t *operand = json_object_get(json_object_get(a, "operands"), operands[i]);
        const json_t *only = json_object_get(operand, "only"), *but = json_object_get(operand, "all_but");
        NEED(only, keys);
        NEED(but, keys);
        assert_int_equal(json_is_true(json_object_get(only, "ran")), i < 4);
        if (i < 4)
            assert_true(command_number(only, "rel_l2") > none && command_number(only, "rel_l2") < 1.1 * all);
        else
            assert_non_null(strstr(json_string_value(json_object_get(but, "refusal")), "not quantised"));
    }
    json_decref(object);
    command_works(command_run("eval " IN "--attribute --worst 3 --histogram --per-head --device h200,zen4"));
    static const char *const says[] = {"worst 3 pairs by cosine", "only k", "all but p",    "1 - cosine", "hot %",
                                       "over the 3 worst",        "h200",   "modelled cost"};
    for (size_t i = 0; i < sizeof says / sizeof says[0]; i++)
        if (strstr(command_out, says[i]) == NULL)
            fail_msg("no \"%s\" in:\n%s", says[i], command_out);
    /* each method of a comparison has its own */
    command_works(command_run("eval " IN "--compare exact,cold --worst 2 --device all --json -"));
    object = command_parse(command_out);
    for (size_t i = 0; i < 2; i++) {
        const json_t *one = json_array_get(object, i);
        assert_int_equal(json_array_size(json_object_get(one, "worst")), 2);
        for (size_t d = 0; apa_device_profile_at(d) != NULL; d++) {
            const json_t *cost = json_object_get(json_object_get(one, "cost"), apa_device_profile_at(d)->name);
            assert_true(command_number(cost, "total_ms") > 0);
            assert_true(i == 1 || fabs(command_number(cost, "speedup") - 1) < 1e-12);
        }
    }
    json_decref(object);
    command_works(command_run("eval " IN "--compare exact,cold --worst 2"));
    assert_non_null(strstr(command_out, "---- cold"));
}

/* ------------------------------------------------------------------------------- sweeps */

static double total(const json_t *row, const char *device)
{
    return command_number(json_object_get(json_object_get(row, "cost"), device), "total_ms");
}

/* The mark by its definition, from the figures in the JSON. */
static void check_pareto(const json_t *rows, const char *device)
{
    int marked = 0;
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *row = json_array_get(rows, i);
        if (!json_is_null(json_object_get(row, "refused")))
            continue;
        const double error = command_number(row, "rel_l2"), ms = total(row, device);
        bool best = true;
        for (size_t j = 0; j < json_array_size(rows); j++) {
            const json_t *other = json_array_get(rows, j);
            if (!json_is_null(json_object_get(other, "refused")))
                continue;
            const double e = command_number(other, "rel_l2"), t = total(other, device);
            best = best && !((e < error && t <= ms) || (e <= error && t < ms));
        }
        const json_t *cost = json_object_get(json_object_get(row, "cost"), device);
        assert_int_equal(json_is_true(json_object_get(cost, "pareto")), best);
        marked += best;
    }
    assert_true(marked > 0);
}

static void grid(void **unused)
{
    (void)unused;
    static const char *const keys[] = {"rel_l2",           "rel_l2_max", "pooled_cos",  "mean_cos",
                                       "min_cos",          "lt_0_99",    "hot_share",   "skip_share",
                                       "candidates_share", "prep_ms",    "attention_ms"};
    command_works(command_run("sweep " IN
                              "--method apa,cold --over eps=0.05,0.6,0.9 --over q_terms=1,2 --device zen5,b200 "
                              "--engine reference --json - --csv t.csv"));
    json_t *object = command_parse(command_out);
    const json_t *rows = json_object_get(object, "rows");
    assert_int_equal(json_array_size(rows), 12);
    assert_true(command_number(object, "pairs") == PAIRS);
    static const char *const eps[] = {"0.05", "0.6", "0.9"};
    for (size_t i = 0; i < 12; i++) {
        const json_t *row = json_array_get(rows, i), *knobs = json_object_get(row, "knobs");
        NEED(row, keys);
        assert_string_equal(json_string_value(json_object_get(row, "method")), i < 6 ? "apa" : "cold");
        assert_string_equal(json_string_value(json_object_get(knobs, "eps")), eps[i / 2 % 3]);
        assert_string_equal(json_string_value(json_object_get(knobs, "q_terms")), i % 2 ? "2" : "1");
        const json_t *recipe = json_object_get(row, "recipe");
        assert_true(command_number(recipe, "eps") == strtod(eps[i / 2 % 3], NULL));
        assert_true(command_number(recipe, "q_terms") == (double)(1 + i % 2));
    }
    check_pareto(rows, "zen5");
    check_pareto(rows, "b200");
    /* less of a row is hot with a larger eps, and it is the same figure as eval's */
    assert_true(command_number(json_array_get(rows, 0), "hot_share") >=
                command_number(json_array_get(rows, 4), "hot_share"));
    const double error = command_number(json_array_get(rows, 5), "rel_l2");
    char csv[8192];
    command_read_text("t.csv", csv, sizeof csv);
    int lines = 0, commas = 0;
    for (const char *c = csv; *c != '\0'; c++) {
        lines += *c == '\n';
        commas += lines == 0 && *c == ',';
    }
    assert_int_equal(lines, 13);
    assert_int_equal(strncmp(csv, "method,eps,q_terms,engine,rel_l2,", 33), 0);
    assert_non_null(strstr(csv, "b200_speedup,b200_pareto,refused\n"));
    const char *second = strchr(csv, '\n') + 1;
    assert_int_equal(strncmp(second, "apa,0.05,1,reference,", 21), 0);
    assert_true(strtod(second + 21, NULL) == command_number(json_array_get(rows, 0), "rel_l2"));
    for (const char *c = second; *c != '\n'; c++)
        commas -= *c == ',';
    assert_int_equal(commas, 0);
    json_decref(object);
    assert_int_equal(system("rm t.csv"), 0);
    command_works(command_run("eval " IN "--engine reference --eps 0.9 --set q_terms=2 --json -"));
    object = command_parse(command_out);
    assert_true(command_number(object, "rel_l2") == error);
    json_decref(object);
}

static void corners(void **unused)
{
    (void)unused;
    /* what an engine does not run is a row that says so */
    command_works(command_run("sweep " IN "--engine cpu --over cold_format=int8,nvfp4 --json -"));
    json_t *object = command_parse(command_out);
    const json_t *rows = json_object_get(object, "rows");
    assert_int_equal(json_array_size(rows), 2);
    assert_true(json_is_null(json_object_get(json_array_get(rows, 0), "refused")));
    assert_non_null(strstr(json_string_value(json_object_get(json_array_get(rows, 1), "refused")), "nvfp4"));
    assert_null(json_object_get(json_array_get(rows, 1), "rel_l2"));
    json_decref(object);
    command_works(command_run("sweep " IN "--engine cpu --over cold_format=int8,nvfp4"));
    assert_non_null(strstr(command_out, "refused: "));
    command_works(command_run("sweep " IN "--engine cpu --over cold_format=int8,nvfp4 --csv -"));
    assert_int_equal(strncmp(command_out, "method,cold_format,engine,", 26), 0);
    /* LampAttention's own figures, and none for others */
    command_works(command_run("sweep " IN "--method lamp,cold --over tau=0.1,1 --json -"));
    object = command_parse(command_out);
    rows = json_object_get(object, "rows");
    assert_true(command_number(json_array_get(rows, 0), "lamp_recomputed") >=
                command_number(json_array_get(rows, 1), "lamp_recomputed"));
    assert_true(command_number(json_array_get(rows, 0), "lamp_recomputed") > 0);
    assert_true(command_number(json_array_get(rows, 0), "lamp_disruptive") <= 1);
    assert_true(json_is_null(json_object_get(json_array_get(rows, 2), "lamp_recomputed")));
    json_decref(object);
    /* methods alone, by either option; JSON to a file leaves the table */
    command_works(command_run("sweep " IN "--over method=exact,cold --json s.json"));
    assert_non_null(strstr(command_out, "rtx5090"));
    assert_true(command_exists("s.json"));
    static char once[sizeof command_out];
    snprintf(once, sizeof once, "%s", command_out);
    command_works(command_run("sweep " IN "--method exact,cold"));
    assert_string_equal(command_out, once);
    assert_int_equal(system("rm s.json"), 0);
}

static void mistakes(void **unused)
{
    (void)unused;
    static const struct {
        const char *arguments, *says;
    } bad[] = {
        {"eval " IN "--worst 0", "--worst: \"0\""},
        {"eval " IN "--worst -3", "--worst: \"-3\""},
        {"eval " IN "--worst 3 --worst-by size", "--worst-by: \"size\", expected cos or rel"},
        {"eval " IN "--worst-by rel", "--worst-by: found without --worst"},
        {"eval " IN "--histogram=1", "--histogram: takes no value"},
        {"eval " IN "--device abacus", "--device: \"abacus\", expected one of all, zen4"},
        {"eval " IN "--device h200,", "--device: \"\", expected one of all"},
        {"eval " IN "--over eps=1", "--over: no such option here"},
        {"sweep " IN, "--over: not given"},
        {"sweep " IN "--over eps", "--over: \"eps\", expected KEY=VALUE"},
        {"sweep " IN "--over eps=", "--over: \"eps=\""},
        {"sweep " IN "--over =1", "--over: \"=1\""},
        {"sweep " IN "--over eps=1,,2", "--over: an empty value"},
        {"sweep " IN "--over eps=1,2,", "--over: an empty value"},
        {"sweep " IN "--over eps=1 --over eps=2", "--over: eps: given twice"},
        {"sweep " IN "--over colour=red", "\"colour\""},
        {"sweep " IN "--over eps=1,red", "eps: found \"red\""},
        {"sweep " IN "--over group=4,65", "group"},
        {"sweep " IN "--over method=apa,best", "\"best\", expected one of apa"},
        {"sweep " IN "--method best --over eps=1", "\"best\", expected one of apa"},
        {"sweep " IN "--method apa --over method=cold", "--over: method: given before"},
        {"sweep " IN "--over eps=1 --device abacus", "--device: \"abacus\""},
        {"sweep " IN "--over eps=1 --json x --csv x", "--csv: x: is also --json"},
        {"sweep " IN "--over eps=1 --json - --csv -", "--csv: -: is also --json"},
        {"sweep " IN "--over eps=1 --csv nowhere/x", "--csv: nowhere/x"},
        {"sweep " IN "--over eps=1 --csv in/q.npy", "--csv: in/q.npy: is the input of --q"},
        {"sweep " IN "--over eps=1 --engine tpu", "--engine: \"tpu\""},
        {"sweep " IN "--over eps=1 --repeats 0", "--repeats: \"0\""},
        {"sweep " IN "--over cold_format=nvfp4 --engine cpu", "no combination can run; the first: "},
        {"sweep " IN "--over eps=1 --scale inf", "scale"},
        {"sweep --q in/q.npy --k in/cut.npy --v in/v.npy --over eps=1", "--k: in/cut.npy: truncated"},
        {"sweep --over eps=1", "--q: not given"},
    };
    const int before = command_entries(".");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        command_fails(command_run("%s", bad[i].arguments), 2, bad[i].says);
        if (command_entries(".") != before)
            fail_msg("left something behind: %s", bad[i].arguments);
    }
    /* too many of everything */
    char many[1024] = "";
    for (int i = 0; i < 9; i++)
        snprintf(many + strlen(many), sizeof many - strlen(many), " --over %s=%s",
                 (const char *const[]){"eps", "q_terms", "smooth_k", "smooth_v", "hadamard", "second_look", "group",
                                       "order", "packing"}[i],
                 (const char *const[]){"1", "1", "on", "on", "on", "on", "4", "forward", "rows"}[i]);
    command_fails(command_run("sweep " IN "%s", many), 2, "--over: more than 8 knobs");
}

static void default_eps(void **unused)
{
    (void)unused;
    command_works(command_run("info"));
    assert_non_null(strstr(command_out, "default eps 0.22/sqrt(ceil(Skv/64)), at most 0.1"));
    assert_non_null(strstr(command_out, "0.03889 at 2048, 0.01375 at 16384, 0.004861 at 131072 keys"));
    command_works(command_run("info --json -"));
    json_t *object = command_parse(command_out);
    const json_t *engines = json_object_get(object, "engines");
    static const double keys[] = {2048, 16384, 131072};
    static const char *const names[] = {"2048", "16384", "131072"};
    for (size_t i = 0; i < json_array_size(engines); i++) {
        const json_t *formats = json_object_get(json_array_get(engines, i), "cold_formats"),
                     *int8 = json_object_get(formats, "int8"), *nvfp4 = json_object_get(formats, "nvfp4");
        for (int j = 0; j < 3; j++) { /* what it does is what it says */
            const double rule = fmin(0.1, 0.22 / sqrt(ceil(keys[j] / 64)));
            if (int8 != NULL)
                assert_true(fabs(command_number(json_object_get(int8, "eps_at"), names[j]) - rule) < 1e-9);
            if (nvfp4 != NULL)
                assert_true(command_number(json_object_get(nvfp4, "eps_at"), names[j]) == 0.005);
        }
        if (int8 != NULL)
            assert_true(json_is_null(json_object_get(int8, "eps")));
        if (nvfp4 != NULL)
            assert_true(command_number(nvfp4, "eps") == 0.005);
    }
    json_decref(object);
}

/* An array of a type and shape, every element `value`. */
static void write_filled(const char *path, apa_array_type type, int32_t dims, const int64_t *shape, double value)
{
    char message[256];
    apa_array array;
    assert_int_equal(apa_array_allocate(&array, type, dims, shape), APA_STATUS_OK);
    for (int64_t i = 0; i < array.elements; i++)
        apa_array_set_f64(&array, i, 1, &value);
    assert_int_equal(apa_array_write_npy(path, &array, message, sizeof message), APA_STATUS_OK);
    apa_array_free(&array);
}

/* Keys that are NaN make a truth that is none: no figure is perfect, and the pairs are counted. */
static void no_truth(void **unused)
{
    (void)unused;
    static const char *const none[] = {"pooled_cos", "mean_cos", "min_cos",        "rel_l2",        "rel_l2_max",
                                       "max_abs",    "mean_abs", "norm_ratio_min", "norm_ratio_max"};
    static const int64_t bias[2] = {40, 70};
    apa_array k = command_load("in/k.npy");
    write_filled("k.npy", k.type, k.dims, k.shape, NAN);
    write_filled("bias.npy", APA_ARRAY_F32, 2, bias, NAN);
    static const char *const calls[] = {"--q in/q.npy --k k.npy --v in/v.npy --histogram --per-head --worst 2",
                                        IN "--bias bias.npy --histogram --per-head"};
    for (int i = 0; i < 2; i++) {
        command_works(command_run("eval %s", calls[i]));
        assert_non_null(strstr(command_out, "errors           none: the truth has a NaN or Inf in each of the 160"));
        assert_null(strstr(command_out, "1.000000"));
        command_works(command_run("eval %s --json -", calls[i]));
        json_t *object = command_parse(command_out);
        assert_int_equal(command_number(object, "pairs"), 160);
        assert_int_equal(command_number(object, "truth_not_finite"), 160);
        assert_int_equal(command_number(object, "lt_0_99") + command_number(object, "non_finite"), 0);
        for (size_t j = 0; j < sizeof none / sizeof none[0]; j++)
            assert_true(json_is_null(json_object_get(object, none[j])));
        assert_int_equal(json_array_size(json_object_get(object, "worst")), 0);
        assert_int_equal(command_number(json_object_get(object, "histogram"), "truth_not_finite"), 160);
        assert_int_equal(command_number(json_array_get(json_object_get(object, "heads"), 3), "truth_not_finite"), 40);
        json_decref(object);
    }
    command_works(command_run("report --q in/q.npy --k k.npy --v in/v.npy --out none.html"));
    command_works(command_run("sweep --q in/q.npy --k k.npy --v in/v.npy --over eps=0.1 --json -"));
    json_t *sweep = command_parse(command_out);
    assert_int_equal(command_number(sweep, "truth_not_finite"), 160);
    json_decref(sweep);
    /* the last key alone: the last row of each head sees it */
    const double nan = NAN;
    for (int64_t head = 0; head < k.shape[1]; head++)
        apa_array_set_f64(&k, (head + 1) * k.shape[2] * k.shape[3] - 1, 1, &nan);
    char message[256];
    assert_int_equal(apa_array_write_npy("k.npy", &k, message, sizeof message), APA_STATUS_OK);
    apa_array_free(&k);
    command_works(command_run("eval --q in/q.npy --k k.npy --v in/v.npy"));
    assert_non_null(strstr(command_out, "truth not finite: 4\n"));
    assert_int_equal(system("rm k.npy bias.npy none.html"), 0);
}

/* Nothing to compare, and arrays that can be no queries: the mistake is the queries'. */
static void no_queries(void **unused)
{
    (void)unused;
    static const int64_t shape[4] = {1, 4, 0, 48}, full[4] = {1, 4, 40, 48};
    write_filled("q.npy", APA_ARRAY_F16, 4, shape, 0);
    static const char *const commands[] = {"eval", "sweep --over eps=1,2", "report --out x.html"};
    for (int i = 0; i < 3; i++)
        command_fails(command_run("%s --q q.npy --k in/k.npy --v in/v.npy", commands[i]), 2,
                      "--q: q.npy: batch 1, 4 heads, 0 queries: nothing to compare");
    write_filled("q.npy", APA_ARRAY_BOOL, 4, full, 1);
    command_fails(command_run("eval --q q.npy --k in/k.npy --v in/v.npy"), 2, "--q: q.npy: array of bool");
    write_filled("q.npy", APA_ARRAY_F64, 0, full, 1);
    command_fails(command_run("eval --q q.npy --k in/k.npy --v in/v.npy"), 2, "--q: q.npy: 0 dimensions");
    assert_int_equal(unlink("q.npy"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(worst),       cmocka_unit_test(histogram_and_heads),
        cmocka_unit_test(attribution), cmocka_unit_test(grid),
        cmocka_unit_test(corners),     cmocka_unit_test(mistakes),
        cmocka_unit_test(default_eps), cmocka_unit_test(no_truth),
        cmocka_unit_test(no_queries),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
