/* Options: one table, one parser. A row says what an option is called, what it takes, where its value goes, which
 * subcommands know it, and what help says about it. */
#include "cli.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PICTURES = CLI_REPORT | CLI_MAP,
    CALLS = CLI_RUN | CLI_EVAL | CLI_BENCH | CLI_SWEEP | PICTURES,
    ONE = CALLS & ~CLI_SWEEP, /* of one method */
    EVALS = CLI_EVAL | CLI_REPORT,
    FILES = CALLS | CLI_INFO,
    ALL = FILES | CLI_GEN
};

typedef enum kind { TEXT, NUMBER, INTEGER, RAISE, LOWER, SETTING, GRID, SOURCE } kind;

typedef struct option_row {
    const char *name, *takes; /* takes NULL: a flag */
    kind kind;
    size_t at; /* offset in cli_options */
    int64_t low, high;
    int commands;
    const char *about;
} option_row;

#define AT(field) offsetof(cli_options, field)

static const option_row rows[] = {
    {"--q", "FILE", TEXT, AT(q), 0, 0, FILES, "queries: [H,S,D] or [B,H,S,D]"},
    {"--k", "FILE", TEXT, AT(k), 0, 0, FILES, "keys"},
    {"--v", "FILE", TEXT, AT(v), 0, 0, FILES, "values"},
    {"--dump", "FILE", TEXT, AT(dump), 0, 0, FILES, "q, k, v and the query offset from one QKV dump"},
    {"--layout", "hnd|nhd", TEXT, AT(layout), 0, 0, CALLS,
     "axes of the arrays: heads first (default), or positions first"},
    {"--out", "FILE", TEXT, AT(out), 0, 0, CLI_RUN, "output, .npy in q's layout"},
    {"--out", "DIR", TEXT, AT(out), 0, 0, CLI_GEN, "folder for q.npy, k.npy and v.npy; made if missing"},
    {"--from", "FILE", SOURCE, 0, 0, 0, CLI_REPORT, "JSON of apa eval or apa sweep; repeatable; beside inputs too"},
    {"--from", "FILE", SOURCE, 0, 0, 0, CLI_MAP, "JSON of apa eval --map, instead of inputs"},
    {"--out", "FILE", TEXT, AT(out), 0, 0, CLI_REPORT, "the page, .html: one file that needs no other"},
    {"--out", "FILE", TEXT, AT(out), 0, 0, CLI_MAP, "the picture, .png"},
    {"--head", "N", INTEGER, AT(head), CLI_ALL_HEADS + 1, INT64_MAX, CLI_MAP,
     "one head alone (of batch b and query head h: b*Hq + h); default all"},
    {"--out-dtype", "f16|f32|f64", TEXT, AT(out_dtype), 0, 0, CLI_RUN, "type of the output; default f32"},
    {"--lse", "FILE", TEXT, AT(lse), 0, 0, CLI_RUN, "log of the sum of exponentials, .npy [B,H,S]"},
    {"--method", "NAME", TEXT, AT(method), 0, 0, ONE, "preset: apa (default), exact, cold; see apa info"},
    {"--method", "NAME,NAME...", TEXT, AT(method), 0, 0, CLI_SWEEP, "presets to vary; default apa"},
    {"--over", "KEY=V1,V2...", GRID, 0, 0, 0, CLI_SWEEP,
     "a knob and its values; repeatable: every combination; method and eps too"},
    {"--compare", "NAME,NAME...", TEXT, AT(compare), 0, 0, EVALS, "several presets in one table, one truth"},
    {"--eps", "X", NUMBER, AT(eps), 0, 0, CALLS,
     "a tile is hot if a row's share of it exceeds X; default by cold format"},
    {"--set", "KEY=VALUE", SETTING, 0, 0, 0, CALLS, "one knob of the recipe; repeatable; see apa info --recipes"},
    {"--engine", "NAME", TEXT, AT(engine), 0, 0, CALLS, "auto (default), reference, cpu, cuda[:warp|:wgmma]"},
    {"--threads", "N", INTEGER, AT(threads), 0, 4096, CALLS,
     "threads; default 0, one per core; no result depends on it"},
    {"--causal", NULL, RAISE, AT(causal), 0, 0, CALLS, "query i sees keys up to i + offset (default)"},
    {"--no-causal", NULL, LOWER, AT(causal), 0, 0, CALLS, "every query sees every key"},
    {"--q-offset", "N", INTEGER, AT(q_offset), INT64_MIN + 1, INT64_MAX, CALLS,
     "position of query 0 among the keys; default Skv - Sq, or the dump's"},
    {"--scale", "X", NUMBER, AT(scale), 0, 0, CALLS, "factor of the scores; default 1/sqrt(D)"},
    {"--window", "L[,R]", TEXT, AT(window_text), 0, 0, CALLS, "keys i+offset-L ... i+offset+R only; -1 is no bound"},
    {"--softcap", "X", NUMBER, AT(softcap), 0, 0, CALLS, "scores s become X*tanh(s/X), before any bias; 0 is none"},
    {"--bias", "FILE", TEXT, AT(bias), 0, 0, CALLS,
     "[Sq,Skv], [H,Sq,Skv] or [B,H,Sq,Skv], 1 repeats: floats are added to scores, bool true is attended"},
    {"--alibi", "FILE", TEXT, AT(alibi), 0, 0, CALLS, "[Hq] slopes: slope*|i+offset-j| is taken off a score"},
    {"--sinks", "FILE", TEXT, AT(sinks), 0, 0, CALLS, "[Hq] logits that join the sum of exponentials, without a value"},
    {"--shape", "B,Hq,Hkv,Sq,Skv,D[,Dv]", TEXT, AT(shape_text), 0, 0, CLI_BENCH | CLI_GEN, "sizes of synthetic inputs"},
    {"--kind", "KIND", TEXT, AT(kind), 0, 0, CLI_BENCH, "synthetic inputs: randn (default) and the others above"},
    {"--dtype", "f16|bf16|f32", TEXT, AT(dtype), 0, 0, CLI_BENCH, "type of synthetic inputs; default f16"},
    {"--dtype", "f16|f32|f64", TEXT, AT(dtype), 0, 0, CLI_GEN, "type of the arrays; default f16"},
    {"--seed", "N", INTEGER, AT(seed), 0, INT64_MAX, CLI_BENCH | CLI_GEN, "seed of synthetic inputs; default 1"},
    {"--repeats", "N", INTEGER, AT(repeats), 1, 100000, EVALS | CLI_BENCH | CLI_SWEEP,
     "timed runs; default 3 (eval, report; reference engine: 1), 7 (bench) or 1 (sweep)"},
    {"--ceilings", NULL, RAISE, AT(ceilings), 0, 0, CLI_BENCH,
     "measure what the machine does at best; alone, or beside a shape or files"},
    {"--worst", "N", INTEGER, AT(worst), 1, 1000000, EVALS, "list the N worst pairs, taken apart; report: default 20"},
    {"--worst-by", "cos|rel", TEXT, AT(worst_by), 0, 0, EVALS,
     "worst is the lowest cosine (default) or the largest relative L2"},
    {"--histogram", NULL, RAISE, AT(histogram), 0, 0, EVALS, "all pairs by cosine and relative L2, two bins a decade"},
    {"--per-head", NULL, RAISE, AT(per_head), 0, 0, EVALS, "error and hot share of every head"},
    {"--attribute", NULL, RAISE, AT(attribute), 0, 0, EVALS,
     "error by operand: Q, K, V, P and sums quantised one at a time (reference engine)"},
    {"--map", NULL, RAISE, AT(map), 0, 0, EVALS, "the map of verdicts in the JSON, for apa report and apa map --from"},
    {"--device", "NAME,NAME...", TEXT, AT(device), 0, 0, EVALS | CLI_SWEEP,
     "modelled cost on these devices, or all; sweep, report: default zen4,h200,rtx5090"},
    {"--csv", "FILE", TEXT, AT(csv), 0, 0, CLI_SWEEP, "the table as CSV; - is standard output"},
    {"--recipes", NULL, RAISE, AT(recipes), 0, 0, CLI_INFO, "all knobs: type, range, default, source"},
    {"--json", "FILE", TEXT, AT(json), 0, 0, FILES & ~PICTURES, "the figures as JSON; - is standard output"},
    {"--help", NULL, RAISE, AT(help), 0, 0, ALL, "this text"},
};
#define ROWS (sizeof rows / sizeof rows[0])

void cli_options_print(int command)
{
    for (size_t i = 0; i < ROWS; i++) {
        if (!(rows[i].commands & command))
            continue;
        char left[64];
        snprintf(left, sizeof left, "%s%s%s", rows[i].name, rows[i].takes != NULL ? " " : "",
                 rows[i].takes != NULL ? rows[i].takes : "");
        if (strlen(left) > 26)
            printf("  %s\n  %-26s %s\n", left, "", rows[i].about);
        else
            printf("  %-26s %s\n", left, rows[i].about);
    }
}

/* The row of "--name" or "--name=value"; NULL if the subcommand has none. */
static const option_row *find_row(const char *argument, int command)
{
    const size_t n = strcspn(argument, "=");
    for (size_t i = 0; i < ROWS; i++)
        if ((rows[i].commands & command) && strlen(rows[i].name) == n && memcmp(rows[i].name, argument, n) == 0)
            return &rows[i];
    return NULL;
}

/* All of text is one number of the range of a double. Spaces and hexadecimal forms are no numbers here; inf is, where
 * the library takes it. */
static bool parse_number(const char *text, double *value)
{
    char *end;
    if (text[0] == '\0' || strpbrk(text, " \t\n\r\v\fxX") != NULL)
        return false;
    errno = 0;
    *value = strtod(text, &end);
    return *end == '\0' && !isnan(*value) && !(errno == ERANGE && (isinf(*value) || *value == 0));
}

static bool parse_integer(const char *text, size_t length, int64_t *value)
{
    char copy[32], *end;
    if (length == 0 || length >= sizeof copy)
        return false;
    memcpy(copy, text, length);
    copy[length] = '\0';
    if (strspn(copy, "+-0123456789") != length)
        return false;
    errno = 0;
    const long long parsed = strtoll(copy, &end, 10);
    *value = (int64_t)parsed;
    return *end == '\0' && end != copy && errno == 0;
}

/* "1,2,3" → numbers; returns how many, -1 if malformed or more than room. */
static int parse_list(const char *text, int64_t *to, int room)
{
    int count = 0;
    for (;;) {
        const size_t n = strcspn(text, ",");
        if (count == room || !parse_integer(text, n, &to[count]))
            return -1;
        count++;
        if (text[n] == '\0')
            return count;
        text += n + 1;
    }
}

static int store(cli_options *options, const option_row *row, char *value)
{
    void *at = (char *)options + row->at;
    switch (row->kind) {
    case TEXT:
        if (value[0] == '\0')
            return cli_complain(CLI_MISUSE, "%s: empty, expected %s", row->name, row->takes);
        *(const char **)at = value;
        return CLI_DONE;
    case NUMBER:
        if (!parse_number(value, at))
            return cli_complain(CLI_MISUSE, "%s: \"%s\", expected a number that a double can hold", row->name, value);
        return CLI_DONE;
    case INTEGER:
        if (!parse_integer(value, strlen(value), at) || *(int64_t *)at < row->low || *(int64_t *)at > row->high)
            return cli_complain(CLI_MISUSE, "%s: \"%s\", expected a whole number %" PRId64 " ... %" PRId64, row->name,
                                value, row->low, row->high);
        return CLI_DONE;
    case RAISE:
    case LOWER:
        *(int *)at = row->kind == RAISE;
        return CLI_DONE;
    case SETTING:
        if (strchr(value, '=') == NULL || value[0] == '=')
            return cli_complain(CLI_MISUSE, "--set: \"%s\", expected KEY=VALUE", value);
        options->sets[options->set_count++] = value;
        return CLI_DONE;
    case GRID:
        if (strchr(value, '=') == NULL || value[0] == '=' || value[strlen(value) - 1] == '=')
            return cli_complain(CLI_MISUSE, "--over: \"%s\", expected KEY=VALUE,VALUE...", value);
        options->overs[options->over_count++] = value;
        return CLI_DONE;
    case SOURCE:
        if (value[0] == '\0')
            return cli_complain(CLI_MISUSE, "%s: empty, expected %s", row->name, row->takes);
        options->froms[options->from_count++] = value;
        return CLI_DONE;
    }
    return CLI_DONE;
}

static int parse_texts(cli_options *options)
{
    if (options->layout != NULL && strcmp(options->layout, "hnd") != 0 && strcmp(options->layout, "nhd") != 0)
        return cli_complain(CLI_MISUSE, "--layout: \"%s\", expected hnd or nhd", options->layout);
    if (options->window_text != NULL) {
        const int count = parse_list(options->window_text, options->window, 2);
        if (count < 1 || options->window[0] < -1 || options->window[1] < -1)
            return cli_complain(CLI_MISUSE, "--window: \"%s\", expected L or L,R, whole numbers, -1 for no bound",
                                options->window_text);
    }
    if (options->shape_text != NULL) {
        const int count = parse_list(options->shape_text, options->shape, 7);
        if (count < 6)
            return cli_complain(CLI_MISUSE, "--shape: \"%s\", expected B,Hq,Hkv,Sq,Skv,D or B,Hq,Hkv,Sq,Skv,D,Dv",
                                options->shape_text);
        if (count == 6)
            options->shape[6] = options->shape[5];
        for (int i = 0; i < 7; i++)
            if (options->shape[i] < 1)
                return cli_complain(CLI_MISUSE, "--shape: \"%s\", expected sizes of at least 1", options->shape_text);
        if (options->shape[1] % options->shape[2] != 0)
            return cli_complain(CLI_MISUSE, "--shape: Hq is %" PRId64 ", expected a multiple of Hkv, %" PRId64,
                                options->shape[1], options->shape[2]);
    }
    return CLI_DONE;
}

static const char *name_of(int command)
{
    static const struct {
        int command;
        const char *name;
    } of[] = {{CLI_RUN, "run"}, {CLI_EVAL, "eval"},   {CLI_SWEEP, "sweep"}, {CLI_REPORT, "report"},
              {CLI_MAP, "map"}, {CLI_BENCH, "bench"}, {CLI_GEN, "gen"},     {CLI_INFO, "info"}};
    size_t i = 0;
    while (of[i].command != command && i + 1 < sizeof of / sizeof of[0])
        i++;
    return of[i].name;
}

static int parse_arguments(cli_options *options, int command, int argc, char **argv)
{
    int code = CLI_DONE;
    for (int i = 0; i < argc && code == CLI_DONE; i++) {
        if (argv[i][0] != '-') {
            if (command != CLI_GEN || options->kind != NULL)
                return cli_complain(CLI_MISUSE, "\"%s\": not an option, expected --name", argv[i]);
            options->kind = argv[i];
            continue;
        }
        const option_row *row = find_row(strcmp(argv[i], "-h") == 0 ? "--help" : argv[i], command);
        if (row == NULL)
            return cli_complain(CLI_MISUSE, "%s: no such option here; apa %s --help lists them", argv[i],
                                name_of(command));
        char *value = strchr(argv[i], '=');
        if (row->takes == NULL && value != NULL)
            return cli_complain(CLI_MISUSE, "%s: takes no value, found \"%s\"", row->name, value + 1);
        if (row->takes != NULL && value == NULL && i + 1 == argc)
            return cli_complain(CLI_MISUSE, "%s: nothing follows, expected %s", row->name, row->takes);
        code = store(options, row, row->takes == NULL ? NULL : value != NULL ? value + 1 : argv[++i]);
        if (options->help)
            return CLI_DONE;
    }
    return code;
}

int cli_options_parse(cli_options *options, int command, int argc, char **argv)
{
    memset(options, 0, sizeof *options);
    options->eps = options->scale = NAN;
    options->q_offset = APA_Q_OFFSET_DEFAULT;
    options->window[0] = options->window[1] = -1;
    options->causal = 1;
    options->seed = -1;
    options->head = CLI_ALL_HEADS;
    options->sets = calloc((size_t)argc + 1, sizeof *options->sets);
    options->overs = calloc((size_t)argc + 1, sizeof *options->overs);
    options->froms = calloc((size_t)argc + 1, sizeof *options->froms);
    if (options->sets == NULL || options->overs == NULL || options->froms == NULL)
        return cli_complain(CLI_FAILED, "no memory for the options");
    int code = parse_arguments(options, command, argc, argv);
    options->seeded = options->seed >= 0;
    options->seed = options->seeded ? options->seed : 1;
    return code != CLI_DONE || options->help ? code : parse_texts(options);
}

void cli_options_free(cli_options *options)
{
    free(options->sets);
    free(options->overs);
    free(options->froms);
    options->sets = options->overs = options->froms = NULL;
}
