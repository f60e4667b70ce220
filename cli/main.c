/* apa: the command. Finds the subcommand, parses its options, runs it. */
#include "cli.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

typedef struct subcommand {
    const char *name;
    int mask;
    int (*run)(const cli_options *options);
    const char *usage, *about;
} subcommand;

static const subcommand subcommands[] = {
    {"run", CLI_RUN, cli_run, "apa run --q Q.npy --k K.npy --v V.npy --out O.npy [--lse L.npy] [options]",
     "attention from files to a file"},
    {"eval", CLI_EVAL, cli_eval, "apa eval --q Q.npy --k K.npy --v V.npy [options]",
     "a method's error over every pair, against exact attention in double"},
    {"sweep", CLI_SWEEP, cli_sweep, "apa sweep --q Q.npy --k K.npy --v V.npy --over KEY=V1,V2,... [options]",
     "error and modelled cost of methods over values of their knobs"},
    {"report", CLI_REPORT, cli_report,
     "apa report --dump F | --q Q --k K --v V | --from FILE.json --out R.html [options]",
     "an evaluation or a sweep as one page: map of verdicts, errors, times"},
    {"map", CLI_MAP, cli_map_command, "apa map --dump F | --q Q --k K --v V | --from FILE.json --out M.png [options]",
     "which tiles were hot, cold or skipped, as a picture"},
    {"bench", CLI_BENCH, cli_bench, "apa bench --shape B,Hq,Hkv,Sq,Skv,D[,Dv] [options]",
     "time of a method and of the same engine's exact method"},
    {"gen", CLI_GEN, cli_gen, "apa gen KIND --out DIR --shape B,Hq,Hkv,Sq,Skv,D[,Dv] [options]",
     "synthetic q.npy, k.npy and v.npy"},
    {"info", CLI_INFO, cli_info, "apa info [--q FILE ...] [--recipes]", "engines, presets, knobs; what a file holds"},
};
#define SUBCOMMANDS (sizeof subcommands / sizeof subcommands[0])

static const subcommand *find(const char *name)
{
    for (size_t i = 0; i < SUBCOMMANDS; i++)
        if (strcmp(subcommands[i].name, name) == 0)
            return &subcommands[i];
    return NULL;
}

static void print_usage(void)
{
    printf("usage: apa COMMAND [options]\n\n");
    for (size_t i = 0; i < SUBCOMMANDS; i++)
        printf("  %-6s %s\n         %s\n", subcommands[i].name, subcommands[i].about, subcommands[i].usage);
    printf("  help   this text; apa COMMAND --help lists a command's options\n\n"
           "Arrays are .npy (f16, f32, f64), FILE.safetensors:NAME (bf16 too), or a QKV dump (--dump).\n"
           "Exit status: 0 done, 2 a mistake in the call or its files, 1 anything else.\n");
}

static int print_help(const subcommand *command)
{
    printf("usage: %s\n\n%s\n\n", command->usage, command->about);
    if (command->mask == CLI_GEN || command->mask == CLI_BENCH) {
        printf("kinds:\n");
        for (size_t i = 0; cli_synthetic_kind(i) != NULL; i++)
            printf("  %-10s %s\n", cli_synthetic_kind(i), cli_synthetic_about(i));
        printf("\n");
    }
    if (command->mask == CLI_MAP)
        printf("A panel a head: queries downwards, 16 a cell; keys to the right, a tile a cell. Red: hot, blue: cold, "
               "pale\n"
               "blue: skipped, grey: not visible. A cell is hot if a verdict of any of its rows is.\n\n");
    printf("options:\n");
    cli_options_print(command->mask);
    return CLI_DONE;
}

/* apa help [COMMAND] */
static int help(int argc, char **argv)
{
    if (argc == 0) {
        print_usage();
        return CLI_DONE;
    }
    const subcommand *command = find(argv[0]);
    if (command == NULL)
        return cli_complain(CLI_MISUSE, "help: \"%s\", expected run, eval, sweep, report, map, bench, gen or info",
                            argv[0]);
    return print_help(command);
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2)
        return cli_complain(CLI_MISUSE, "no command, expected run, eval, sweep, report, map, bench, gen, info or help");
    const char *name = argv[1];
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        return help(argc - 2, argv + 2);
    if (strcmp(name, "--version") == 0 || strcmp(name, "version") == 0) {
        printf("apa %s\n", apa_version_string());
        return CLI_DONE;
    }
    const subcommand *command = find(name);
    if (command == NULL)
        return cli_complain(CLI_MISUSE, "\"%s\", expected run, eval, sweep, report, map, bench, gen, info or help",
                            name);
    cli_options options;
    int code = cli_options_parse(&options, command->mask, argc - 2, argv + 2);
    if (code == CLI_DONE)
        code = options.help ? print_help(command) : command->run(&options);
    cli_options_free(&options);
    return code;
}

int main(int argc, char **argv)
{
    /* A file size limit shall be an error of write(), after which the temporary file is removed, not a sudden death. */
    signal(SIGXFSZ, SIG_IGN);
    int code = cli_launched(argc, argv);
    if (code == CLI_DONE)
        code = dispatch(argc, argv);
    if ((fflush(stdout) != 0 || ferror(stdout)) && code == CLI_DONE)
        code = cli_complain(CLI_FAILED, "standard output: cannot be written");
    return code;
}
