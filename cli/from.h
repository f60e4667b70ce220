/* --from: results that apa eval and apa sweep wrote with --json. */
#ifndef APA_CLI_FROM_H
#define APA_CLI_FROM_H

#include "cli.h"

typedef enum cli_from_kind { CLI_FROM_EVAL = 1, CLI_FROM_SWEEP = 2 } cli_from_kind;

/* Reads a file. Of an eval *value is an array, one object a method, each with a map that can be read where it has one;
 * of a sweep the object. The caller owns *value; NULL on a mistake, which is complained about. */
int cli_from_load(const char *path, cli_from_kind *kind, json_t **value);

/* Was anything given that only a run of its own needs? Complains naming the option: beside --from alone it would do
 * nothing. */
int cli_from_check_alone(const cli_options *options);

/* Are there inputs for a run (--q, --k, --v or --dump)? */
bool cli_from_has_inputs(const cli_options *options);

/* --out: a place to write to, and none of the inputs or --from files. */
int cli_from_check_out(const cli_options *options, const char *ending);

/* The part of a path after the last slash. */
const char *cli_base_name(const char *path);

#endif
