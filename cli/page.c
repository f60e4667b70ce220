/* apa report: evaluations and sweeps as one HTML page that needs no other file and no network.
 *
 * The page is fixed text that the build puts into the program; what was measured goes into it as one JSON object,
 * {apa, results: [{kind, file, data}]}, exactly as apa eval and apa sweep write it. Everything that is drawn is drawn
 * from that by the page's own script, so a figure on the page is a figure of the JSON. */
#include "page.h"
#include "cli.h"
#include "from.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORST_PAIRS 20
#define DEVICES "zen4,h200,rtx5090"

static int check(const cli_options *options)
{
    const bool inputs = cli_from_has_inputs(options);
    if (options->out == NULL)
        return cli_complain(CLI_MISUSE, "--out: not given, expected a file name");
    if (options->from_count == 0 && !inputs)
        return cli_complain(CLI_MISUSE, "--from: not given, expected --from FILE, or --dump, or --q, --k and --v");
    if (!inputs && options->method != NULL)
        return cli_complain(CLI_MISUSE, "--method: found without inputs to run on, expected it beside --dump or --q, "
                                        "--k and --v");
    int code = inputs ? CLI_DONE : cli_from_check_alone(options);
    return code == CLI_DONE ? cli_from_check_out(options, ".html") : code;
}

/* A file's name may be any bytes; where it is no UTF-8, what is not ASCII becomes a question mark. */
static json_t *name_of(const char *path)
{
    json_t *name = json_string(cli_base_name(path));
    char *copy = name == NULL ? strdup(cli_base_name(path)) : NULL;
    for (char *c = copy; c != NULL && *c != '\0'; c++)
        *c = (unsigned char)*c < 0x80 ? *c : '?';
    if (copy != NULL)
        name = json_string(copy);
    free(copy);
    return name;
}

static void add(json_t *results, const char *kind, const char *path, json_t *data)
{
    json_array_append_new(results, json_pack("{s:s,s:o,s:o}", "kind", kind, "file", name_of(path), "data", data));
}

/* The evaluation that apa eval would make with everything on that the page shows. */
static int add_run(const cli_options *options, json_t *results)
{
    cli_options all = *options;
    json_t *evals = NULL;
    all.map = all.histogram = all.per_head = 1;
    /* Pairs are not taken apart where scores are changed; asked for by name it is refused with the reason. */
    const bool changed =
        options->softcap != 0 || options->bias != NULL || options->alibi != NULL || options->sinks != NULL;
    if (all.worst == 0 && !changed)
        all.worst = WORST_PAIRS;
    if (all.device == NULL)
        all.device = DEVICES;
    int code = cli_eval_result(&all, &evals);
    for (size_t i = 0; i < json_array_size(evals); i++)
        add(results, "eval", options->dump != NULL ? options->dump : options->q, json_incref(json_array_get(evals, i)));
    json_decref(evals);
    return code;
}

static int add_file(const char *path, json_t *results)
{
    cli_from_kind kind;
    json_t *value;
    int code = cli_from_load(path, &kind, &value);
    if (code != CLI_DONE)
        return code;
    if (kind == CLI_FROM_SWEEP)
        add(results, "sweep", path, json_incref(value));
    for (size_t i = 0; kind == CLI_FROM_EVAL && i < json_array_size(value); i++)
        add(results, "eval", path, json_incref(json_array_get(value, i)));
    json_decref(value);
    return CLI_DONE;
}

/* JSON that may stand inside a script element: there a "<" could end the element or begin a comment. In JSON it can
 * only be inside a string, where it has another spelling. */
static void put_json(FILE *to, const char *text)
{
    for (; *text != '\0'; text++)
        if (*text == '<')
            fputs("\\u003c", to);
        else
            fputc(*text, to);
}

/* The page with `text` in the place of the mark; NULL: no memory. free() it. */
static char *fill(const char *text, size_t *size)
{
    const size_t mark = strlen(CLI_PAGE_MARK);
    size_t at = 0;
    while (at + mark <= cli_page_size && memcmp(cli_page_html + at, CLI_PAGE_MARK, mark) != 0)
        at++;
    char *page = NULL;
    FILE *to = open_memstream(&page, size);
    if (to == NULL)
        return NULL;
    fwrite(cli_page_html, 1, at, to);
    put_json(to, text);
    fwrite(cli_page_html + at + mark, 1, cli_page_size - at - mark, to);
    const bool failed = ferror(to) != 0;
    if (fclose(to) != 0 || failed) {
        free(page);
        return NULL;
    }
    return page;
}

static int write_page(const cli_options *options, const json_t *results)
{
    json_t *data = json_pack("{s:s,s:O}", "apa", apa_version_string(), "results", results);
    char *text = data != NULL ? json_dumps(data, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    size_t size = 0;
    char *page = text != NULL ? fill(text, &size) : NULL;
    json_decref(data);
    free(text);
    if (page == NULL)
        return cli_complain(CLI_FAILED, "no memory for the page");
    const bool printed = strcmp(options->out, "-") == 0;
    const apa_output_file file = {options->out, NULL, page, size};
    int code = CLI_DONE;
    if (printed)
        fwrite(page, 1, size, stdout);
    else
        code = cli_files_write(&file, 1);
    free(page);
    if (code == CLI_DONE && !printed)
        printf("%s: %.1f MB, %zu result%s\n", options->out, 1e-6 * (double)size, json_array_size(results),
               json_array_size(results) == 1 ? "" : "s");
    return code;
}

int cli_report(const cli_options *options)
{
    json_t *results = json_array();
    if (results == NULL)
        return cli_complain(CLI_FAILED, "no memory");
    int code = check(options);
    /* Files first: a mistake in one of them is found before time is spent. */
    json_t *read = json_array();
    for (int i = 0; i < options->from_count && code == CLI_DONE; i++)
        code = add_file(options->froms[i], read);
    if (code == CLI_DONE && cli_from_has_inputs(options))
        code = add_run(options, results);
    json_array_extend(results, read);
    json_decref(read);
    if (code == CLI_DONE)
        code = write_page(options, results);
    json_decref(results);
    return code;
}
