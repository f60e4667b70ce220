/* Options that change scores: --softcap, --bias, --alibi, --sinks. Files become tensors of the problem. */
#include "cli.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* [Sq, Skv], [H, Sq, Skv] or [B, H, Sq, Skv], whatever --layout says of the others. */
static int load_bias(const cli_options *options, cli_inputs *inputs)
{
    int64_t shape[4] = {1, 1, 1, 1};
    const int code = cli_array_read("--bias", options->bias, &inputs->bias);
    if (code != CLI_DONE)
        return code;
    const apa_array *array = &inputs->bias;
    if (array->dims < 2 || array->dims > 4)
        return cli_complain(CLI_MISUSE, "--bias: %s: %d dimensions, expected [Sq,Skv], [H,Sq,Skv] or [B,H,Sq,Skv]",
                            options->bias, (int)array->dims);
    for (int i = 0; i < array->dims; i++)
        shape[4 - array->dims + i] = array->shape[i];
    inputs->problem.attn_mask =
        apa_tensor_hnd(array->data, (apa_dtype)array->type, shape[0], shape[1], shape[2], shape[3]);
    return CLI_DONE;
}

/* One number a query head, of any float type: as FP32. */
static int load_per_head(const char *option, const char *path, int64_t heads, apa_array *array, apa_tensor *tensor)
{
    apa_array file = {0};
    int code = cli_array_read(option, path, &file);
    if (code != CLI_DONE)
        return code;
    if (file.type == APA_ARRAY_BOOL || file.dims != 1 || file.shape[0] != heads)
        code = cli_complain(CLI_MISUSE,
                            "%s: %s: %" PRId64 " elements of %s in %d dimensions, expected [%" PRId64
                            "] of f16, bf16, f32 or f64: one number a query head",
                            option, path, file.elements, apa_dtype_name((apa_dtype)file.type), (int)file.dims, heads);
    else if (apa_array_allocate(array, APA_ARRAY_F32, 1, &heads) != APA_STATUS_OK)
        code = cli_complain(CLI_FAILED, "%s: no memory", option);
    for (int64_t i = 0; i < heads && code == CLI_DONE; i++) {
        double value;
        apa_array_get_f64(&file, i, 1, &value);
        apa_array_set_f64(array, i, 1, &value);
    }
    apa_array_free(&file);
    *tensor = apa_tensor_hnd(array->data, APA_DTYPE_F32, 1, heads, 1, 1);
    return code;
}

int cli_scores_load(const cli_options *options, cli_inputs *inputs)
{
    apa_problem *problem = &inputs->problem;
    const int64_t heads = problem->q.shape[1];
    int code = CLI_DONE;
    problem->softcap = options->softcap;
    if (options->bias != NULL)
        code = load_bias(options, inputs);
    if (code == CLI_DONE && options->alibi != NULL)
        code = load_per_head("--alibi", options->alibi, heads, &inputs->alibi, &problem->alibi_slopes);
    if (code == CLI_DONE && options->sinks != NULL)
        code = load_per_head("--sinks", options->sinks, heads, &inputs->sinks, &problem->sinks);
    return code;
}

void cli_scores_free(cli_inputs *inputs)
{
    apa_array_free(&inputs->bias);
    apa_array_free(&inputs->alibi);
    apa_array_free(&inputs->sinks);
}
