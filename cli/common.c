/* Mistakes, context and recipe: what every subcommand sets up the same way. */
#include "cli.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cli_complain(int code, const char *format, ...)
{
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    for (char *c = line; *c != '\0'; c++) /* whatever a file name holds: one line, and nothing that moves a cursor */
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    fflush(stdout);
    fprintf(stderr, "apa: %s\n", line);
    return code;
}

int cli_exit_code(apa_status status)
{
    switch (status) {
    case APA_STATUS_OK:
        return CLI_DONE;
    case APA_STATUS_INVALID_ARGUMENT:
    case APA_STATUS_UNSUPPORTED:
    case APA_STATUS_BAD_FILE:
        return CLI_MISUSE;
    case APA_STATUS_OUT_OF_MEMORY:
    case APA_STATUS_IO:
    case APA_STATUS_INTERNAL:
        break;
    }
    return CLI_FAILED;
}

/* What the library calls attn_mask, alibi_slopes, sinks and softcap comes from these options. */
static int complain_scores(const cli_options *options, const char *message, int code)
{
    const struct {
        const char *name, *option, *file;
    } of[] = {{"attn_mask: ", "--bias", options->bias},
              {"alibi_slopes: ", "--alibi", options->alibi},
              {"sinks: ", "--sinks", options->sinks},
              {"softcap: ", "--softcap", ""}};
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
        const size_t n = strlen(of[i].name);
        if (of[i].file != NULL && strncmp(message, of[i].name, n) == 0)
            return cli_complain(code, "%s: %s%s%s", of[i].option, of[i].file, of[i].file[0] == '\0' ? "" : ": ",
                                message + n);
    }
    return cli_complain(code, "%s", message);
}

int cli_complain_context(const cli_options *options, const apa_context *context, apa_status status)
{
    const char *message = apa_context_message(context), *const path[3] = {options->q, options->k, options->v};
    const size_t input = message[0] != '\0' && message[1] == ':' ? strcspn("qkv", (char[2]){message[0], '\0'}) : 3;
    if (input < 3) {
        const char *file = options->dump != NULL ? options->dump : path[input];
        if (file != NULL)
            return cli_complain(cli_exit_code(status), "%s%s: %s: %s", options->dump != NULL ? "--dump " : "--",
                                (char[2]){message[0], '\0'}, file, message + 3);
    }
    return complain_scores(options, message, cli_exit_code(status));
}

/* An engine's name as this build has it. */
static int check_engine(const char *name)
{
    char known[128] = "auto";
    if (name == NULL || strcmp(name, "auto") == 0)
        return CLI_DONE;
    for (size_t i = 0; apa_engine_name(i) != NULL; i++) {
        const size_t n = strlen(name); /* "cuda" names its family: cuda:warp */
        if (strncmp(name, apa_engine_name(i), n) == 0 &&
            (apa_engine_name(i)[n] == '\0' || apa_engine_name(i)[n] == ':'))
            return CLI_DONE;
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, ", %s", apa_engine_name(i));
    }
    if (strcmp(name, "cuda") == 0 || strcmp(name, "cuda:warp") == 0 || strcmp(name, "cuda:wgmma") == 0)
        return cli_complain(CLI_MISUSE, "--engine: %s: not in this build, expected one of %s", name, known);
    return cli_complain(CLI_MISUSE, "--engine: \"%s\", expected one of %s", name, known);
}

int cli_context_create(const cli_options *options, apa_context **context)
{
    *context = NULL;
    int code = check_engine(options->engine);
    if (code != CLI_DONE)
        return code;
    apa_context_options chosen;
    apa_context_options_init(&chosen);
    chosen.threads = (int32_t)options->threads;
    apa_status status = apa_context_create(context, &chosen);
    if (status == APA_STATUS_OK)
        return CLI_DONE;
    const char *isa = getenv("APA_ISA");
    if (status == APA_STATUS_INVALID_ARGUMENT || status == APA_STATUS_UNSUPPORTED)
        return cli_complain(CLI_MISUSE,
                            "APA_ISA: \"%s\", expected scalar, avx2, avx512 or neon, and no more than this CPU has",
                            isa == NULL ? "" : isa);
    return cli_complain(CLI_FAILED, "no memory for %d threads", (int)options->threads);
}

/* lead: what a message about the setting begins with. */
static int apply_set(const char *lead, char *setting, apa_recipe *recipe)
{
    char message[2048];
    char *equals = strchr(setting, '=');
    *equals = '\0';
    apa_status status = apa_recipe_set(recipe, setting, equals + 1, message, sizeof message);
    *equals = '=';
    return status == APA_STATUS_OK ? CLI_DONE : cli_complain(cli_exit_code(status), "%s%s", lead, message);
}

int cli_recipe_set_up(const cli_options *options, const char *method, apa_recipe *recipe)
{
    char message[1024];
    if (apa_recipe_init(recipe, method) != APA_STATUS_OK) {
        message[0] = '\0';
        for (size_t i = 0; apa_recipe_preset_name(i) != NULL; i++) {
            const size_t used = strlen(message);
            snprintf(message + used, sizeof message - used, "%s%s", i == 0 ? "" : ", ", apa_recipe_preset_name(i));
        }
        return cli_complain(CLI_MISUSE, "%s: \"%s\", expected one of %s",
                            options->compare != NULL                             ? "--compare"
                            : options->method == NULL && options->over_count > 0 ? "--over"
                                                                                 : "--method",
                            method, message);
    }
    int code = CLI_DONE;
    if (!isnan(options->eps)) {
        snprintf(message, sizeof message, "eps=%.17g", options->eps);
        code = apply_set("--", message, recipe);
    }
    for (int i = 0; i < options->set_count && code == CLI_DONE; i++)
        code = apply_set("--set: ", options->sets[i], recipe);
    return code;
}

int cli_recipe(const cli_options *options, const char *method, apa_recipe *recipe)
{
    char message[512];
    int code = cli_recipe_set_up(options, method, recipe);
    if (code == CLI_DONE && apa_recipe_check(recipe, message, sizeof message) != APA_STATUS_OK)
        code = cli_complain(CLI_MISUSE, "recipe: %s", message);
    return code;
}
