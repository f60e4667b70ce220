/* apa sweep from inside: the grid (sweep.c) and what is made of it (sweep_report.c). */
#ifndef APA_CLI_SWEEP_H
#define APA_CLI_SWEEP_H

#include "cli.h"

#define SWEEP_AXES 8
#define SWEEP_VALUES 256 /* of one axis, and methods */
#define SWEEP_ROWS 10000

/* --over key=v1,v2 */
typedef struct sweep_axis {
    char *text; /* key and values, cut in place */
    const char *value[SWEEP_VALUES];
    int count;
} sweep_axis;

typedef struct sweep_row {
    const char *method;
    const char *value[SWEEP_AXES];
    apa_recipe recipe;
    char refusal[256]; /* empty: it ran */
    apa_evaluation result;
    apa_cost cost[CLI_DEVICES];
    bool pareto[CLI_DEVICES]; /* no other row has less error at no more cost, or as little at less */
} sweep_row;

typedef struct sweep_state {
    const cli_options *options;
    cli_inputs inputs;
    apa_context *context;
    apa_array truth, truth_lse;
    cli_devices devices;
    char *method_list;
    const char *method[SWEEP_VALUES];
    int methods, axes;
    sweep_axis axis[SWEEP_AXES];
    int64_t rows, at; /* at: the one that is running */
    sweep_row *row;
} sweep_state;

/* Sets `pareto` of every row on every device. */
void sweep_mark_pareto(sweep_state *state);

json_t *sweep_json(const sweep_state *state);
/* The table as CSV; NULL when there is no memory for it. free() it. */
char *sweep_csv(const sweep_state *state);
void sweep_print(const sweep_state *state);

#endif
