/* Inputs of a rank: files are mapped, so that a rank reads the pages of its own rows and no others.
 *
 * What a file holds is what apa_file_describe() says of it, which checks header and length; the elements of a .npy are
 * the last bytes of the file, those of a dump follow its header of 24 bytes. .safetensors are read whole. */
#include "ranks.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define DUMP_HEADER 24

static bool ends_with(const char *path, const char *ending)
{
    const size_t n = strlen(path), m = strlen(ending);
    return n >= m && strcmp(path + n - m, ending) == 0;
}

static int map_file(const char *option, const char *path, ranks_file *file)
{
    struct stat info;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0 || fstat(descriptor, &info) != 0) {
        if (descriptor >= 0)
            close(descriptor);
        return cli_complain(CLI_MISUSE, "%s: %s: cannot be opened", option, path);
    }
    file->bytes = (size_t)info.st_size;
    file->memory = mmap(NULL, file->bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    close(descriptor);
    if (file->memory == MAP_FAILED) {
        file->memory = NULL;
        return cli_complain(CLI_FAILED, "%s: %s: cannot be mapped", option, path);
    }
    return CLI_DONE;
}

/* One line of a description, "name dtype [a, b, c]", as an array without data. */
static bool parse_line(const char *line, apa_array *array)
{
    char type[16];
    int at = 0;
    memset(array, 0, sizeof *array);
    if (sscanf(line, "%*s %15s [%n", type, &at) != 1 || at == 0)
        return false;
    array->type = strcmp(type, "bool") == 0 ? APA_ARRAY_BOOL : cli_type(type);
    array->elements = 1;
    const char *c = line + at;
    while (*c != ']' && array->dims < 8) {
        char *end;
        array->shape[array->dims] = strtoll(c, &end, 10);
        if (end == c)
            return false;
        array->elements *= array->shape[array->dims++];
        c = end + strspn(end, ", ");
    }
    return array->type != 0 && *c == ']';
}

static int describe(const char *option, const char *path, char *text, size_t size)
{
    char message[512];
    apa_status status = apa_file_describe(path, text, size, message, sizeof message);
    return status == APA_STATUS_OK ? CLI_DONE : cli_complain(CLI_MISUSE, "%s: %s", option, message);
}

static int map_array(const char *option, const char *path, apa_array *array, ranks_file *file)
{
    char text[1024];
    if (path == NULL)
        return cli_complain(CLI_MISUSE, "%s: not given, expected --q, --k and --v, or --dump", option);
    if (!ends_with(path, ".npy")) {
        char message[512];
        apa_status status = apa_array_read(path, array, message, sizeof message);
        return status == APA_STATUS_OK ? CLI_DONE : cli_complain(CLI_MISUSE, "%s: %s", option, message);
    }
    int code = describe(option, path, text, sizeof text);
    if (code == CLI_DONE && (!parse_line(text, array) || array->type == APA_ARRAY_BOOL))
        code = cli_complain(CLI_MISUSE, "%s: %s: expected an array of numbers", option, path);
    if (code == CLI_DONE)
        code = map_file(option, path, file);
    if (code == CLI_DONE)
        array->data =
            (char *)file->memory + file->bytes - (size_t)array->elements * apa_dtype_bytes((apa_dtype)array->type);
    return code;
}

static int map_arrays(const cli_options *options, ranks_inputs *inputs)
{
    static const char *const option[3] = {"--q", "--k", "--v"};
    const char *const path[3] = {options->q, options->k, options->v};
    apa_array *const array[3] = {&inputs->whole.q, &inputs->whole.k, &inputs->whole.v};
    int code = CLI_DONE;
    for (int i = 0; i < 3 && code == CLI_DONE; i++)
        code = map_array(option[i], path[i], array[i], &inputs->file[i]);
    return code;
}

static int map_dump(const cli_options *options, ranks_inputs *inputs)
{
    char text[1024];
    apa_array *const array[3] = {&inputs->whole.q, &inputs->whole.k, &inputs->whole.v};
    if (options->q != NULL || options->k != NULL || options->v != NULL || options->layout != NULL)
        return cli_complain(CLI_MISUSE, "--dump: found --q, --k, --v or --layout beside it, expected --dump alone");
    int code = describe("--dump", options->dump, text, sizeof text);
    if (code == CLI_DONE)
        code = map_file("--dump", options->dump, &inputs->file[0]);
    const char *line = text;
    int64_t at = DUMP_HEADER;
    for (int i = 0; i < 3 && code == CLI_DONE; i++) {
        if (line == NULL || !parse_line(line, array[i]))
            return cli_complain(CLI_FAILED, "--dump: %s: cannot be described", options->dump);
        array[i]->data = (char *)inputs->file[0].memory + at;
        at += 2 * array[i]->elements;
        line = strchr(line, '\n');
        line = line == NULL ? NULL : line + 1;
    }
    const char *offset = strstr(text, "at position ");
    if (code == CLI_DONE && offset != NULL)
        inputs->whole.problem.q_offset = strtoll(offset + strlen("at position "), NULL, 10);
    return code;
}

/* A dump holds positions first. */
static void view_dump(ranks_inputs *inputs)
{
    apa_problem *p = &inputs->whole.problem;
    const apa_array *const array[3] = {&inputs->whole.q, &inputs->whole.k, &inputs->whole.v};
    apa_tensor *const tensor[3] = {&p->q, &p->k, &p->v};
    for (int i = 0; i < 3; i++) {
        const int64_t *n = array[i]->shape; /* [1, heads, positions, dim] by the description */
        *tensor[i] = apa_tensor_nhd(array[i]->data, (apa_dtype)array[i]->type, n[0], n[1], n[2], n[3]);
    }
}

static int refuse_scores(const cli_options *o)
{
    const char *option = o->softcap != 0    ? "--softcap"
                         : o->bias != NULL  ? "--bias"
                         : o->alibi != NULL ? "--alibi"
                         : o->sinks != NULL ? "--sinks"
                                            : NULL;
    return option == NULL ? CLI_DONE : cli_complain(CLI_MISUSE, "%s: is not distributed yet", option);
}

static int make_problem(const cli_options *options, ranks_inputs *inputs)
{
    apa_problem *p = &inputs->whole.problem;
    const apa_array *const array[3] = {&inputs->whole.q, &inputs->whole.k, &inputs->whole.v};
    apa_tensor *const tensor[3] = {&p->q, &p->k, &p->v};
    inputs->whole.nhd = options->layout != NULL && strcmp(options->layout, "nhd") == 0;
    for (int i = 0; i < 3 && options->dump == NULL; i++) {
        char message[256];
        if (apa_array_tensor(array[i], inputs->whole.nhd, tensor[i], message, sizeof message) != APA_STATUS_OK)
            return cli_complain(CLI_MISUSE, "--%c: %s", "qkv"[i], message);
    }
    if (options->dump != NULL)
        view_dump(inputs);
    for (int i = 0; i < 3; i++)
        if (inputs->mapped && (uintptr_t)tensor[i]->data % apa_dtype_bytes(tensor[i]->dtype) != 0)
            return cli_complain(CLI_MISUSE, "--%c: its numbers do not lie at multiples of their size in the file",
                                "qkv"[i]);
    if (options->q_offset != APA_Q_OFFSET_DEFAULT)
        p->q_offset = options->q_offset;
    p->softmax_scale = options->scale;
    p->causal = options->causal;
    p->window_left = options->window[0];
    p->window_right = options->window[1];
    return CLI_DONE;
}

int ranks_inputs_map(const cli_options *options, ranks_inputs *inputs)
{
    int code = refuse_scores(options);
    apa_problem_init(&inputs->whole.problem);
    inputs->mapped = 1;
    if (code == CLI_DONE)
        code = options->dump != NULL ? map_dump(options, inputs) : map_arrays(options, inputs);
    return code == CLI_DONE ? make_problem(options, inputs) : code;
}

int ranks_inputs_generate(const cli_options *options, ranks_inputs *inputs)
{
    const int code = refuse_scores(options);
    return code == CLI_DONE ? cli_inputs_generate(options, &inputs->whole) : code;
}

void ranks_inputs_free(ranks_inputs *inputs)
{
    apa_array *const array[3] = {&inputs->whole.q, &inputs->whole.k, &inputs->whole.v};
    for (int i = 0; i < 3; i++) {
        const char *data = array[i]->data, *from = inputs->file[inputs->file[i].memory == NULL ? 0 : i].memory;
        const size_t bytes = inputs->file[inputs->file[i].memory == NULL ? 0 : i].bytes;
        if (from != NULL && data >= from && data <= from + bytes)
            array[i]->data = NULL; /* not the array's own */
    }
    cli_inputs_free(&inputs->whole);
    for (int i = 0; i < 3; i++)
        if (inputs->file[i].memory != NULL)
            munmap(inputs->file[i].memory, inputs->file[i].bytes);
}
