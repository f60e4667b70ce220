/* Results in files: is it what eval or sweep wrote? What the page and the picture rely on is checked here; a figure
 * that is missing or null is none. */
#include "from.h"

#include "verdict_map.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPECTED "expected what --json of apa eval or apa sweep wrote"

const char *cli_base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

bool cli_from_has_inputs(const cli_options *o)
{
    return o->q != NULL || o->k != NULL || o->v != NULL || o->dump != NULL;
}

int cli_from_check_alone(const cli_options *o)
{
    const struct {
        const char *name;
        bool given;
    } run[] = {{"--compare", o->compare != NULL},
               {"--eps", !isnan(o->eps)},
               {"--set", o->set_count > 0},
               {"--engine", o->engine != NULL},
               {"--layout", o->layout != NULL},
               {"--no-causal", !o->causal},
               {"--q-offset", o->q_offset != APA_Q_OFFSET_DEFAULT},
               {"--scale", !isnan(o->scale)},
               {"--window", o->window_text != NULL},
               {"--softcap", o->softcap != 0},
               {"--bias", o->bias != NULL},
               {"--alibi", o->alibi != NULL},
               {"--sinks", o->sinks != NULL},
               {"--repeats", o->repeats != 0},
               {"--worst", o->worst != 0},
               {"--worst-by", o->worst_by != NULL},
               {"--attribute", o->attribute != 0},
               {"--device", o->device != NULL}};
    for (size_t i = 0; i < sizeof run / sizeof run[0]; i++)
        if (run[i].given)
            return cli_complain(CLI_MISUSE,
                                "%s: found without inputs to run on, expected it beside --dump or --q, --k "
                                "and --v",
                                run[i].name);
    return CLI_DONE;
}

int cli_from_check_out(const cli_options *options, const char *ending)
{
    struct stat out, in;
    int code = cli_path_check(options, "--out", options->out);
    const bool there = code == CLI_DONE && stat(options->out, &out) == 0 && S_ISREG(out.st_mode);
    for (int i = 0; i < options->from_count && there; i++)
        if (stat(options->froms[i], &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
            return cli_complain(CLI_MISUSE, "--out: %s: is the input of --from, expected another file", options->out);
    return code == CLI_DONE ? cli_ending_check("--out", options->out, ending) : code;
}

static bool is_text(const json_t *object, const char *key)
{
    return json_is_string(json_object_get(object, key));
}

static bool is_eval(const json_t *object)
{
    const json_t *shape = json_object_get(object, "shape");
    return is_text(object, "method") && is_text(object, "engine") && is_text(object, "kernel") &&
           json_is_integer(json_object_get(object, "pairs")) && json_is_object(json_object_get(object, "recipe")) &&
           json_is_object(shape) && json_object_get(object, "pooled_cos") != NULL;
}

static bool is_sweep(const json_t *object)
{
    const json_t *rows = json_object_get(object, "rows");
    if (!json_is_array(rows) || !json_is_array(json_object_get(object, "knobs")) ||
        !json_is_array(json_object_get(object, "devices")) || !json_is_object(json_object_get(object, "shape")))
        return false;
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *row = json_array_get(rows, i);
        if (!is_text(row, "method") || !json_is_object(json_object_get(row, "knobs")) ||
            !json_is_object(json_object_get(row, "cost")))
            return false;
    }
    return json_array_size(rows) > 0;
}

/* Every object an eval, every map sound. */
static int check_evals(const char *path, const json_t *evals)
{
    int code = CLI_DONE;
    if (json_array_size(evals) == 0)
        return cli_complain(CLI_MISUSE, "--from: %s: an empty array, " EXPECTED, path);
    for (size_t i = 0; i < json_array_size(evals) && code == CLI_DONE; i++) {
        const json_t *eval = json_array_get(evals, i), *object = json_object_get(eval, "map");
        if (!is_eval(eval))
            return cli_complain(CLI_MISUSE, "--from: %s: neither an evaluation nor a sweep, " EXPECTED, path);
        cli_map map;
        memset(&map, 0, sizeof map);
        if (object != NULL)
            code = cli_map_read(path, object, &map);
        cli_map_free(&map);
    }
    return code;
}

/* A regular file, opened; without waiting for the writer of a pipe. */
static int open_regular(const char *path, int *descriptor)
{
    struct stat info;
    *descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*descriptor < 0)
        return cli_complain(CLI_MISUSE, "--from: %s: cannot be opened: %s, " EXPECTED, path, strerror(errno));
    if (fstat(*descriptor, &info) == 0 && S_ISREG(info.st_mode))
        return CLI_DONE;
    close(*descriptor);
    return cli_complain(CLI_MISUSE, "--from: %s: is %s, expected a regular file", path,
                        S_ISDIR(info.st_mode) ? "a directory" : "a pipe or device");
}

int cli_from_load(const char *path, cli_from_kind *kind, json_t **value)
{
    json_error_t error;
    int descriptor, opened = open_regular(path, &descriptor);
    if (opened != CLI_DONE)
        return opened;
    *value = json_loadfd(descriptor, 0, &error);
    close(descriptor);
    if (*value == NULL)
        return cli_complain(CLI_MISUSE, "--from: %s: no JSON (line %d: %s), " EXPECTED, path, error.line, error.text);
    *kind = CLI_FROM_EVAL;
    if (is_sweep(*value)) {
        *kind = CLI_FROM_SWEEP;
        return CLI_DONE;
    }
    if (!json_is_array(*value))
        *value = json_pack("[o]", *value);
    int code = check_evals(path, *value);
    if (code != CLI_DONE) {
        json_decref(*value);
        *value = NULL;
    }
    return code;
}
