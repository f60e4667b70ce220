/* apa gen: synthetic q.npy, k.npy and v.npy, all three or none. */
#include "cli.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* "DIR/q.npy" and its fellows are at most this much longer than DIR. */
#define NAME_ROOM 8

/* The three files in a folder that is there. */
static int check_places(const cli_options *options)
{
    char path[CLI_PATH];
    int code = CLI_DONE;
    if (strlen(options->out) + NAME_ROOM >= sizeof path)
        return cli_complain(CLI_MISUSE, "--out: the path is too long");
    for (int i = 0; i < 3 && code == CLI_DONE; i++) {
        snprintf(path, sizeof path, "%s/%c.npy", options->out, "qkv"[i]);
        code = cli_path_check(options, "--out", path);
    }
    return code;
}

static int check_options(const cli_options *options)
{
    if (options->kind == NULL)
        return cli_complain(CLI_MISUSE, "gen: no kind given, expected randn, outliers, sink-tail or topics");
    if (options->out == NULL)
        return cli_complain(CLI_MISUSE, "--out: not given, expected a folder");
    const char *dtype = options->dtype != NULL ? options->dtype : "f16";
    if (strcmp(dtype, "bf16") == 0)
        return cli_complain(CLI_MISUSE, "--dtype: bf16 has no .npy type, expected f16, f32 or f64");
    if (cli_type(dtype) == 0)
        return cli_complain(CLI_MISUSE, "--dtype: \"%s\", expected f16, f32 or f64", dtype);
    struct stat info;
    if (stat(options->out, &info) != 0)
        return CLI_DONE;
    if (!S_ISDIR(info.st_mode))
        return cli_complain(CLI_MISUSE, "--out: %s: is a file, expected a folder", options->out);
    return check_places(options);
}

/* Makes the folder and those above it. *made: the folder itself was not there before. */
static int make_folder(const char *path, bool *made)
{
    char part[4096];
    const size_t length = strlen(path);
    *made = false;
    if (length + NAME_ROOM >= sizeof part)
        return cli_complain(CLI_MISUSE, "--out: the path is too long");
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        memcpy(part, path, i);
        part[i] = '\0';
        *made = mkdir(part, 0777) == 0;
        if (!*made && errno != EEXIST)
            return cli_complain(CLI_MISUSE, "--out: %s: cannot be made: %s", part, strerror(errno));
    }
    return CLI_DONE;
}

static int write_inputs(const cli_options *options, const cli_inputs *inputs)
{
    char path[3][4096];
    const apa_array *const array[3] = {&inputs->q, &inputs->k, &inputs->v};
    apa_output_file files[3];
    bool made;
    int code = make_folder(options->out, &made);
    if (code != CLI_DONE)
        return code;
    for (int i = 0; i < 3; i++) {
        snprintf(path[i], sizeof path[i], "%s/%c.npy", options->out, "qkv"[i]);
        files[i] = (apa_output_file){path[i], array[i], NULL, 0};
    }
    code = cli_files_write(files, 3);
    if (code != CLI_DONE && made)
        rmdir(options->out);
    return code;
}

int cli_gen(const cli_options *options)
{
    cli_inputs inputs;
    int code = check_options(options);
    if (code == CLI_DONE)
        code = cli_inputs_generate(options, &inputs);
    if (code != CLI_DONE)
        return code;
    code = write_inputs(options, &inputs);
    if (code == CLI_DONE)
        printf("%s: %s/q.npy, k.npy, v.npy: B %" PRId64 ", Hq %" PRId64 ", Hkv %" PRId64 ", Sq %" PRId64
               ", Skv %" PRId64 ", D %" PRId64 ", Dv %" PRId64 ", %s, seed %" PRId64 "\n",
               options->kind, options->out, options->shape[0], options->shape[1], options->shape[2], options->shape[3],
               options->shape[4], options->shape[5], options->shape[6], options->dtype != NULL ? options->dtype : "f16",
               options->seed);
    cli_inputs_free(&inputs);
    return code;
}
