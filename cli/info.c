/* apa info: engines, machine, presets and knobs; what a file holds. */
#include "cli.h"

#include <apa/cuda.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DESCRIPTION_LIMIT ((size_t)16 << 20)

/* What the files hold, as JSON: [{file, arrays: [text, ...]}]; printed too unless JSON has standard output. */
static int describe_file(const cli_options *options, const char *option, const char *path, json_t *list)
{
    char message[512];
    apa_status status = APA_STATUS_INVALID_ARGUMENT;
    char *text = NULL;
    for (size_t size = 65536; status == APA_STATUS_INVALID_ARGUMENT && size <= DESCRIPTION_LIMIT; size *= 16) {
        free(text);
        text = malloc(size);
        if (text == NULL)
            return cli_complain(CLI_FAILED, "no memory for the description of %s", path);
        status = apa_file_describe(path, text, size, message, sizeof message);
    }
    if (status != APA_STATUS_OK) {
        free(text);
        return cli_complain(status == APA_STATUS_OUT_OF_MEMORY ? CLI_FAILED : CLI_MISUSE, "%s: %s", option, message);
    }
    json_t *arrays = json_array();
    if (cli_prints(options))
        printf("%s\n", path);
    for (char *line = text; *line != '\0';) {
        char *end = line + strcspn(line, "\n");
        const bool more = *end != '\0';
        *end = '\0';
        json_array_append_new(arrays, json_string(line));
        if (cli_prints(options))
            printf("  %s\n", line);
        line = more ? end + 1 : end;
    }
    json_array_append_new(list, json_pack("{s:s,s:o}", "file", path, "arrays", arrays));
    free(text);
    return CLI_DONE;
}

/* What the file is read as goes by its name, as everywhere else; --dump is for files that are named otherwise. */
static int check_ending(const char *option, const char *path, bool dump)
{
    const size_t n = strlen(path);
    const bool array = (n > 4 && strcmp(path + n - 4, ".npy") == 0) || strstr(path, ".safetensors") != NULL;
    if (array == !dump)
        return CLI_DONE;
    return cli_complain(CLI_MISUSE, "%s: %s: %s", option, path,
                        dump ? "named as arrays are, expected a QKV dump"
                             : "ending not known, expected .npy, .safetensors or .safetensors:NAME");
}

static int describe_files(const cli_options *options)
{
    const struct {
        const char *option, *path;
    } file[4] = {{"--q", options->q}, {"--k", options->k}, {"--v", options->v}, {"--dump", options->dump}};
    json_t *list = json_array();
    int code = CLI_DONE;
    for (int i = 0; i < 4 && code == CLI_DONE; i++)
        if (file[i].path != NULL)
            code = check_ending(file[i].option, file[i].path, i == 3);
    for (int i = 0; i < 4 && code == CLI_DONE; i++)
        if (file[i].path != NULL)
            code = describe_file(options, file[i].option, file[i].path, list);
    apa_output_file files[1];
    if (code == CLI_DONE)
        return cli_finish(options, json_pack("{s:o}", "files", list), files, 0);
    json_decref(list);
    return code;
}

/* Lengths that the default eps is shown at: it may depend on the number of keys. */
static const int64_t lengths[] = {2048, 16384, 131072};
#define LENGTHS (sizeof lengths / sizeof lengths[0])

/* What eps becomes for a cold format on an engine at a number of keys; false where the engine has no such format. */
static bool resolved_eps(apa_context *context, const char *engine, const char *cold_format, int64_t Skv, double *eps,
                         char kernel[64])
{
    char text[64];
    apa_recipe recipe;
    apa_problem problem;
    apa_attention_options options;
    apa_plan plan;
    apa_problem_init(&problem);
    problem.q = apa_tensor_hnd(NULL, APA_DTYPE_F16, 1, 8, 1024, 128);
    problem.k = problem.v = apa_tensor_hnd(NULL, APA_DTYPE_F16, 1, 8, Skv, 128);
    problem.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, 8, 1024, 128);
    problem.causal = 1;
    apa_attention_options_init(&options);
    options.engine = engine;
    apa_plan_init(&plan);
    if (apa_recipe_init(&recipe, "apa") != APA_STATUS_OK ||
        apa_recipe_set(&recipe, "cold_format", cold_format, NULL, 0) != APA_STATUS_OK ||
        apa_attention_plan(context, &problem, &recipe, &options, &plan) != APA_STATUS_OK ||
        apa_recipe_get(&plan.recipe, "eps", text, sizeof text) != APA_STATUS_OK)
        return false;
    memcpy(kernel, plan.kernel, 64);
    *eps = strtod(text, NULL);
    return true;
}

/* One line of a cold format, and its JSON: one eps, or the rule and what it gives at some lengths. */
static json_t *describe_format(const char *format, const double eps[LENGTHS], const char *kernel, bool print)
{
    json_t *at = json_object();
    char text[160] = "", key[32];
    bool same = true;
    for (size_t i = 0; i < LENGTHS; i++) {
        const size_t used = strlen(text);
        same = same && eps[i] == eps[0];
        snprintf(key, sizeof key, "%" PRId64, lengths[i]);
        json_object_set_new(at, key, cli_json_number(eps[i]));
        snprintf(text + used, sizeof text - used, "%s%.4g at %s", i == 0 ? "" : ", ", eps[i], key);
    }
    const char *rule = same ? "the same at every length" : "0.22/sqrt(ceil(Skv/64)), at most 0.1";
    if (print && same)
        printf("    cold format %-8s default eps %-8.4g kernel %s\n", format, eps[0], kernel);
    else if (print)
        printf("    cold format %-8s default eps %s:\n                         %s keys; kernel %s\n", format, rule,
               text, kernel);
    return json_pack("{s:o,s:s,s:o,s:s}", "eps", same ? cli_json_number(eps[0]) : json_null(), "eps_rule", rule,
                     "eps_at", at, "kernel", kernel);
}

static const apa_recipe_knob *find_knob(const char *name)
{
    for (size_t i = 0; apa_recipe_knob_at(i) != NULL; i++)
        if (strcmp(apa_recipe_knob_at(i)->name, name) == 0)
            return apa_recipe_knob_at(i);
    return NULL;
}

/* One engine: a line, and a line for every cold format that it has. */
static json_t *describe_engine(apa_context *context, const char *engine, bool print)
{
    const apa_recipe_knob *knob = find_knob("cold_format");
    json_t *formats = json_object();
    if (print)
        printf("  %s\n", engine);
    for (const char *at = knob != NULL ? knob->range : ""; *at != '\0';) {
        char format[32], kernel[64];
        double eps[LENGTHS];
        const size_t n = strcspn(at, "|");
        snprintf(format, sizeof format, "%.*s", (int)n, at);
        at += at[n] == '|' ? n + 1 : n;
        bool known = strcmp(format, "auto") != 0;
        for (size_t i = 0; i < LENGTHS && known; i++)
            known = resolved_eps(context, engine, format, lengths[i], &eps[i], kernel);
        if (known)
            json_object_set_new(formats, format, describe_format(format, eps, kernel, print));
    }
    return json_pack("{s:s,s:o}", "name", engine, "cold_formats", formats);
}

static json_t *describe_presets(bool print)
{
    json_t *list = json_array();
    if (print)
        printf("presets\n");
    for (size_t i = 0; apa_recipe_preset_name(i) != NULL; i++) {
        if (print)
            printf("  %-18s %s\n", apa_recipe_preset_name(i), apa_recipe_preset_about(i));
        json_array_append_new(
            list, json_pack("{s:s,s:s}", "name", apa_recipe_preset_name(i), "about", apa_recipe_preset_about(i)));
    }
    return list;
}

/* Every knob, with its value in the preset "apa" as default. */
static json_t *describe_knobs(bool print)
{
    json_t *list = json_array();
    apa_recipe recipe;
    if (apa_recipe_init(&recipe, NULL) != APA_STATUS_OK)
        return list;
    if (print)
        printf("knobs (--set NAME=VALUE)\n");
    for (size_t i = 0; apa_recipe_knob_at(i) != NULL; i++) {
        const apa_recipe_knob *knob = apa_recipe_knob_at(i);
        char value[64] = "";
        if (apa_recipe_get(&recipe, knob->name, value, sizeof value) != APA_STATUS_OK)
            value[0] = '\0';
        if (print)
            printf("  %-20s %-8s %s, default %s\n                       %s [%s]\n", knob->name, knob->type, knob->range,
                   value, knob->about, knob->source);
        json_array_append_new(list,
                              json_pack("{s:s,s:s,s:s,s:s,s:s,s:s}", "name", knob->name, "type", knob->type, "range",
                                        knob->range, "default", value, "about", knob->about, "source", knob->source));
    }
    return list;
}

static json_t *describe_machine(const apa_context *context, bool print)
{
    char cpu[128];
    cli_cpu_name(cpu, sizeof cpu);
    if (print) {
        printf("apa %s\n", apa_version_string());
        printf("cpu %s, %" PRId64 " cores online, %d threads in use, instruction set level %s\n", cpu, cli_cpu_cores(),
               (int)apa_context_threads(context), apa_context_isa(context));
    }
    return json_pack("{s:s,s:s,s:I,s:i,s:s}", "version", apa_version_string(), "cpu", cpu, "cores",
                     (json_int_t)cli_cpu_cores(), "threads", (int)apa_context_threads(context), "isa",
                     apa_context_isa(context));
}

/* CUDA devices, what each runs and why; an empty list, and the reason in print, where there is none. */
static json_t *describe_cuda_devices(apa_context *context, bool print)
{
    json_t *list = json_array();
    int32_t count = 0;
    if (apa_cuda_device_count(context, &count) != APA_STATUS_OK && print)
        printf("  %s\n", apa_context_message(context));
    for (int32_t i = 0; i < count; i++) {
        apa_cuda_device device;
        apa_cuda_device_init(&device);
        if (apa_cuda_device_describe(context, i, &device) != APA_STATUS_OK)
            continue;
        if (print)
            printf("  cuda device %d: %s, compute capability %d.%d; kernels %s, cold format %s (%s)\n", (int)i,
                   device.name, (int)device.capability / 10, (int)device.capability % 10,
                   device.kernels[0] != '\0' ? device.kernels : "none",
                   device.cold_format[0] != '\0' ? device.cold_format : "none", device.reason);
        json_array_append_new(list, json_pack("{s:i,s:s,s:i,s:i,s:s,s:s,s:s}", "index", (int)i, "name", device.name,
                                              "capability", (int)device.capability, "multiprocessors",
                                              (int)device.multiprocessors, "kernels", device.kernels, "cold_format",
                                              device.cold_format, "reason", device.reason));
    }
    return list;
}

int cli_info(const cli_options *options)
{
    int code = cli_path_check(options, "--json", options->json);
    if (code != CLI_DONE)
        return code;
    if (options->q != NULL || options->k != NULL || options->v != NULL || options->dump != NULL)
        return describe_files(options);
    apa_context *context;
    code = cli_context_create(options, &context);
    if (code != CLI_DONE)
        return code;
    const bool print = cli_prints(options);
    json_t *object = describe_machine(context, print), *engines = json_array();
    if (print)
        printf("engines\n");
    bool cuda = false;
    for (size_t i = 0; apa_engine_name(i) != NULL; i++) {
        cuda = cuda || strncmp(apa_engine_name(i), "cuda", 4) == 0;
        json_array_append_new(engines, describe_engine(context, apa_engine_name(i), print));
    }
    if (print && !cuda)
        printf("  cuda: not in this build\n");
    json_object_set_new(object, "engines", engines);
    json_object_set_new(object, "cuda_devices", describe_cuda_devices(context, print && cuda));
    json_object_set_new(object, "presets", describe_presets(print));
    json_object_set_new(object, "knobs", describe_knobs(print && options->recipes));
    apa_output_file files[1];
    code = cli_finish(options, object, files, 0);
    apa_context_destroy(context);
    return code;
}
