/* Inputs from files or generated, and outputs of matching shape. */
#include "cli.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

apa_array_type cli_type(const char *name)
{
    static const char *const names[] = {"f16", "bf16", "f32", "f64"};
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0)
            return (apa_array_type)(APA_ARRAY_F16 + i);
    return (apa_array_type)0;
}

/* Whatever keeps an input from being read is the caller's to mend: it is missing, or not what it should be. */
int cli_array_read(const char *option, const char *path, apa_array *array)
{
    char message[512];
    apa_status status = apa_array_read(path, array, message, sizeof message);
    if (status == APA_STATUS_OK)
        return CLI_DONE;
    return cli_complain(status == APA_STATUS_OUT_OF_MEMORY ? CLI_FAILED : CLI_MISUSE, "%s: %s", option, message);
}

static int read_dump(const cli_options *options, cli_inputs *inputs)
{
    char message[512];
    apa_dump dump;
    if (options->q != NULL || options->k != NULL || options->v != NULL)
        return cli_complain(CLI_MISUSE, "--dump: found %s beside it, expected --dump alone",
                            options->q != NULL   ? "--q"
                            : options->k != NULL ? "--k"
                                                 : "--v");
    if (options->layout != NULL)
        return cli_complain(CLI_MISUSE, "--layout: found beside --dump, whose layout is fixed");
    apa_status status = apa_dump_read(options->dump, &dump, message, sizeof message);
    if (status != APA_STATUS_OK)
        return cli_complain(status == APA_STATUS_OUT_OF_MEMORY ? CLI_FAILED : CLI_MISUSE, "--dump: %s", message);
    inputs->q = dump.q;
    inputs->k = dump.k;
    inputs->v = dump.v;
    inputs->problem.q_offset = dump.q_offset;
    return CLI_DONE;
}

/* What can be said of an array alone, before it is compared with another. */
static int check_array(const cli_options *options, const char *option, const char *path, const apa_array *array)
{
    char message[256];
    apa_tensor tensor;
    if (apa_array_tensor(array, options->layout != NULL && strcmp(options->layout, "nhd") == 0, &tensor, message,
                         sizeof message) != APA_STATUS_OK)
        return cli_complain(CLI_MISUSE, "%s: %s: %s", option, path, message);
    if (array->type == APA_ARRAY_BOOL)
        return cli_complain(CLI_MISUSE, "%s: %s: dtype bool, expected f16, bf16, f32 or f64", option, path);
    return CLI_DONE;
}

static int read_files(const cli_options *options, cli_inputs *inputs)
{
    const struct {
        const char *option, *path;
        apa_array *array;
    } file[3] = {{"--q", options->q, &inputs->q}, {"--k", options->k, &inputs->k}, {"--v", options->v, &inputs->v}};
    for (int i = 0; i < 3; i++)
        if (file[i].path == NULL)
            return cli_complain(CLI_MISUSE, "%s: not given, expected --q, --k and --v, or --dump", file[i].option);
    for (int i = 0; i < 3; i++) {
        int code = cli_array_read(file[i].option, file[i].path, file[i].array);
        if (code == CLI_DONE)
            code = check_array(options, file[i].option, file[i].path, file[i].array);
        if (code != CLI_DONE)
            return code;
        if (file[i].array->type != file[0].array->type)
            return cli_complain(CLI_MISUSE, "%s: %s: dtype %s, expected that of --q, %s", file[i].option, file[i].path,
                                apa_dtype_name((apa_dtype)file[i].array->type),
                                apa_dtype_name((apa_dtype)file[0].array->type));
    }
    return CLI_DONE;
}

/* Arrays → tensors, and the masks of the options. */
static int make_problem(const cli_options *options, cli_inputs *inputs)
{
    apa_problem *problem = &inputs->problem;
    const apa_array *const array[3] = {&inputs->q, &inputs->k, &inputs->v};
    apa_tensor *const tensor[3] = {&problem->q, &problem->k, &problem->v};
    const char *const path[3] = {options->q, options->k, options->v};
    inputs->nhd = options->layout != NULL && strcmp(options->layout, "nhd") == 0;
    for (int i = 0; i < 3; i++) {
        char message[256];
        if (apa_array_tensor(array[i], inputs->nhd, tensor[i], message, sizeof message) != APA_STATUS_OK)
            return cli_complain(CLI_MISUSE, "--%c: %s: %s", "qkv"[i], path[i] != NULL ? path[i] : "", message);
    }
    if (options->q_offset != APA_Q_OFFSET_DEFAULT)
        problem->q_offset = options->q_offset;
    problem->softmax_scale = options->scale;
    problem->causal = options->causal;
    problem->window_left = options->window[0];
    problem->window_right = options->window[1];
    return cli_scores_load(options, inputs);
}

int cli_inputs_load(const cli_options *options, cli_inputs *inputs)
{
    memset(inputs, 0, sizeof *inputs);
    apa_problem_init(&inputs->problem);
    int code = options->dump != NULL ? read_dump(options, inputs) : read_files(options, inputs);
    if (code == CLI_DONE)
        code = make_problem(options, inputs);
    if (code != CLI_DONE)
        cli_inputs_free(inputs);
    return code;
}

/* Elements of a 4-D shape as a double: no overflow, and exact enough to compare with a machine's memory. */
static double product(const int64_t shape[4])
{
    return (double)shape[0] * (double)shape[1] * (double)shape[2] * (double)shape[3];
}

static int allocate_inputs(const cli_options *options, cli_inputs *inputs, apa_array_type type, const int64_t q[4],
                           const int64_t k[4], const int64_t v[4])
{
    const double bytes = (double)apa_dtype_bytes((apa_dtype)type) * (product(q) + product(k) + product(v));
    if (bytes > cli_memory_bytes()) /* an allocation might seem to succeed, and the process be killed later */
        return cli_complain(CLI_MISUSE,
                            "--shape: \"%s\" needs %.3g GB, expected at most this machine's memory of %.3g GB",
                            options->shape_text, bytes * 1e-9, cli_memory_bytes() * 1e-9);
    apa_array *const array[3] = {&inputs->q, &inputs->k, &inputs->v};
    const int64_t *const shape[3] = {q, k, v};
    for (int i = 0; i < 3; i++) {
        apa_status status = apa_array_allocate(array[i], type, 4, shape[i]);
        if (status != APA_STATUS_OK)
            return cli_complain(cli_exit_code(status), "--shape: \"%s\" needs more memory than can be had",
                                options->shape_text);
    }
    return CLI_DONE;
}

int cli_inputs_generate(const cli_options *options, cli_inputs *inputs)
{
    memset(inputs, 0, sizeof *inputs);
    apa_problem_init(&inputs->problem);
    const int64_t *s = options->shape;
    const cli_synthetic shape = {options->kind != NULL ? options->kind : "randn",
                                 s[0],
                                 s[1],
                                 s[2],
                                 s[3],
                                 s[4],
                                 s[5],
                                 s[6],
                                 (uint64_t)options->seed};
    const apa_array_type type = cli_type(options->dtype != NULL ? options->dtype : "f16");
    const int64_t q[4] = {shape.B, shape.Hq, shape.Sq, shape.D}, k[4] = {shape.B, shape.Hkv, shape.Skv, shape.D},
                  v[4] = {shape.B, shape.Hkv, shape.Skv, shape.Dv};
    if (options->shape_text == NULL)
        return cli_complain(CLI_MISUSE, "--shape: not given, expected B,Hq,Hkv,Sq,Skv,D");
    size_t i = 0;
    while (cli_synthetic_kind(i) != NULL && strcmp(cli_synthetic_kind(i), shape.kind) != 0)
        i++;
    if (cli_synthetic_kind(i) == NULL)
        return cli_complain(CLI_MISUSE, "kind \"%s\", expected randn, outliers, sink-tail or topics", shape.kind);
    int code = allocate_inputs(options, inputs, type, q, k, v);
    if (code == CLI_DONE && !cli_synthetic_fill(&shape, &inputs->q, &inputs->k, &inputs->v))
        code = cli_complain(CLI_FAILED, "no memory for the generator");
    if (code == CLI_DONE)
        code = make_problem(options, inputs);
    if (code != CLI_DONE)
        cli_inputs_free(inputs);
    return code;
}

int cli_files_alone(const cli_options *o)
{
    const char *beside = o->shape_text != NULL ? "--shape"
                         : o->kind != NULL     ? "--kind"
                         : o->dtype != NULL    ? "--dtype"
                         : o->seeded           ? "--seed"
                                               : NULL;
    if (beside == NULL)
        return CLI_DONE;
    return cli_complain(CLI_MISUSE, "%s: found beside files of inputs, expected one or the other", beside);
}

int cli_pairs_check(const cli_options *options, const cli_inputs *inputs)
{
    const int64_t *q = inputs->problem.q.shape;
    if (q[0] > 0 && q[1] > 0 && q[2] > 0)
        return CLI_DONE;
    return cli_complain(CLI_MISUSE,
                        "%s: %s: batch %" PRId64 ", %" PRId64 " heads, %" PRId64
                        " queries: nothing to compare, expected at least 1 of each",
                        options->dump != NULL ? "--dump" : "--q", options->dump != NULL ? options->dump : options->q,
                        q[0], q[1], q[2]);
}

void cli_inputs_free(cli_inputs *inputs)
{
    apa_array_free(&inputs->q);
    apa_array_free(&inputs->k);
    apa_array_free(&inputs->v);
    cli_scores_free(inputs);
}

int cli_output_make(const cli_inputs *inputs, apa_array_type type, int64_t last, apa_array *array, apa_tensor *tensor)
{
    const int64_t *q = inputs->problem.q.shape;
    const bool nhd = inputs->nhd && last != 0;
    int64_t shape[4] = {q[0], nhd ? q[2] : q[1], nhd ? q[1] : q[2], last};
    const int32_t dims = inputs->q.dims - (last == 0), skip = 4 - inputs->q.dims;
    apa_status status = apa_array_allocate(array, type, dims, shape + skip);
    if (status != APA_STATUS_OK)
        return cli_complain(cli_exit_code(status), "no memory for the output");
    const int64_t dim = last == 0 ? 1 : last;
    *tensor = nhd ? apa_tensor_nhd(array->data, (apa_dtype)type, q[0], q[1], q[2], dim)
                  : apa_tensor_hnd(array->data, (apa_dtype)type, q[0], q[1], q[2], dim);
    return CLI_DONE;
}

/* a + b within the range of the type. */
static int64_t saturating_sum(int64_t a, int64_t b)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return a > 0 ? INT64_MAX : INT64_MIN;
    return sum;
}

/* Keys first … last of row i that the mask leaves, over its batch entries and heads; values: room for a row. */
static double through_mask(const apa_array *mask, const apa_problem *problem, int64_t i, int64_t first, int64_t last,
                           double *values)
{
    const int64_t *shape = problem->attn_mask.shape, length = shape[3];
    double seen = 0;
    for (int64_t bh = 0; bh < shape[0] * shape[1]; bh++) {
        apa_array_get_f64(mask, (bh * shape[2] + (shape[2] == 1 ? 0 : i)) * length, length, values);
        for (int64_t j = first; j <= last; j++) {
            const double value = values[length == 1 ? 0 : j];
            seen += mask->type == APA_ARRAY_BOOL ? value != 0 : value > -INFINITY || isnan(value);
        }
    }
    return seen / ((double)shape[0] * (double)shape[1]);
}

double cli_visible_pairs(const cli_inputs *inputs)
{
    const apa_problem *problem = &inputs->problem;
    const int64_t Sq = problem->q.shape[2], Skv = problem->k.shape[2];
    const int64_t offset = problem->q_offset == APA_Q_OFFSET_DEFAULT ? Skv - Sq : problem->q_offset;
    const bool masked = problem->attn_mask.dtype != APA_DTYPE_NONE;
    double pairs = 0, *values = masked ? malloc(sizeof *values * (size_t)problem->attn_mask.shape[3]) : NULL;
    for (int64_t i = 0; i < Sq && (!masked || values != NULL); i++) {
        const int64_t at = saturating_sum(offset, i);
        int64_t first = 0, last = Skv - 1;
        if (problem->window_left >= 0 && saturating_sum(at, -problem->window_left) > first)
            first = saturating_sum(at, -problem->window_left);
        if (problem->window_right >= 0 && saturating_sum(at, problem->window_right) < last)
            last = saturating_sum(at, problem->window_right);
        if (problem->causal && at < last)
            last = at;
        if (last >= first)
            pairs += masked ? through_mask(&inputs->bias, problem, i, first, last, values) : (double)(last - first + 1);
    }
    free(values);
    return pairs * (double)problem->q.shape[0] * (double)problem->q.shape[1];
}
