/* Options of apa-mpi that apa does not have. */
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void ranks_options_print(void)
{
    printf("  --exchange auto|exact|codes  how keys travel to sharded queries: as they are (auto), or INT8 codes and\n"
           "                             the exact form of hot tiles\n"
           "  --queries auto|sharded|whole  keys come to the queries, or every rank has all queries and states are\n"
           "                             merged; auto: whatever moves fewer bytes\n"
           "  --silence S                seconds without a sign of life after which a rank counts as lost; default 20\n"
           "  --no-alone                 bench: leave out the run of one rank on the whole problem\n\n");
}

static int choose(const char *option, const char *value, const char *const *names, int *to)
{
    char list[128] = "";
    for (int i = 0; names[i] != NULL; i++) {
        if (strcmp(value, names[i]) == 0) {
            *to = i;
            return CLI_DONE;
        }
        const size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", i == 0 ? "" : ", ", names[i]);
    }
    return cli_complain(CLI_MISUSE, "%s: \"%s\", expected one of %s", option, value, list);
}

static int store(ranks_options *options, const char *name, const char *value)
{
    static const char *const exchanges[] = {"auto", "exact", "codes", NULL}, *const queries[] = {"auto", "sharded",
                                                                                                 "whole", NULL};
    int exchange = 0;
    if (strcmp(name, "--exchange") == 0) {
        const int code = choose(name, value, exchanges, &exchange);
        options->exchange = (apa_dist_exchange)exchange;
        return code;
    }
    if (strcmp(name, "--queries") == 0)
        return choose(name, value, queries, &options->queries);
    char *end;
    const double silence = strtod(value, &end);
    if (*end == '\0' && end != value && silence >= 1.0 && isfinite(silence))
        options->silence_s = silence;
    else
        return cli_complain(CLI_MISUSE, "--silence: \"%s\", expected seconds, at least 1", value);
    return CLI_DONE;
}

void ranks_options_init(ranks_options *options)
{
    *options = (ranks_options){APA_DIST_EXCHANGE_AUTO, 0, 0, 20.0};
}

int ranks_options_take(ranks_options *options, int *argc, char **argv)
{
    static const char *const names[] = {"--exchange", "--queries", "--silence"};
    int left = 0, code = CLI_DONE;
    for (int i = 0; i < *argc && code == CLI_DONE; i++) {
        const char *equals = strchr(argv[i], '=');
        const size_t n = equals != NULL ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        const char *name = NULL;
        for (int j = 0; j < 3; j++)
            if (strlen(names[j]) == n && strncmp(argv[i], names[j], n) == 0)
                name = names[j];
        if (strcmp(argv[i], "--no-alone") == 0)
            options->no_alone = 1;
        else if (name == NULL)
            argv[left++] = argv[i];
        else if (equals == NULL && i + 1 == *argc)
            code = cli_complain(CLI_MISUSE, "%s: nothing follows, expected a value", name);
        else
            code = store(options, name, equals != NULL ? equals + 1 : argv[++i]);
    }
    *argc = left;
    return code;
}
