/* apa-mpi, the commands run and bench on several ranks: what its files share.
 *
 * All ranks parse the same command line and map the same files; each reads what it owns. A stage ends with an
 * agreement: if one rank could not, all leave, and the lowest rank that could not has said why, once. */
#ifndef APA_CLI_DIST_RANKS_H
#define APA_CLI_DIST_RANKS_H

#include "cli.h"

#include <apa/dist.h>

/* Options beside those of apa run and apa bench. */
typedef struct ranks_options {
    apa_dist_exchange exchange;
    int queries;  /* 0 auto, 1 sharded, 2 whole */
    int no_alone; /* bench: leave out the run of one rank */
    double silence_s;
} ranks_options;

void ranks_options_init(ranks_options *options);
/* Takes its own options out of argv; CLI_MISUSE with the line printed. */
int ranks_options_take(ranks_options *options, int *argc, char **argv);
void ranks_options_print(void);

/* Files as they lie on the disk; rows that nobody touches are never read. */
typedef struct ranks_file {
    void *memory;
    size_t bytes;
} ranks_file;

typedef struct ranks_inputs {
    cli_inputs whole; /* tensors of the whole sequences, shapes, masks */
    ranks_file file[3];
    int mapped; /* whole.q.data and so on lie in the files, or are the arrays' own */
} ranks_inputs;

int ranks_inputs_map(const cli_options *options, ranks_inputs *inputs);
int ranks_inputs_generate(const cli_options *options, ranks_inputs *inputs);
void ranks_inputs_free(ranks_inputs *inputs);

/* One job: the same on all ranks but for `part`. */
typedef struct ranks_job {
    const cli_options *options;
    const ranks_options *ranks_options;
    apa_dist *dist;
    apa_context *context;
    ranks_inputs inputs;
    apa_recipe recipe;
    apa_dist_problem part;
    apa_array out, lse;       /* of all rows, in the layout of q; pages that this rank does not write stay unused */
    apa_dist_statistics *all; /* of all ranks */
} ranks_job;

/* Shards, local outputs, room for statistics. lse: is it wanted? */
int ranks_job_cut(ranks_job *job, apa_array_type type, int lse);
void ranks_job_free(ranks_job *job);

/* One call; complains, on rank 0 alone where all ranks know. */
int ranks_job_attend(ranks_job *job, const apa_recipe *recipe, apa_dist_statistics *statistics);

/* A failed call of the library. A broken apa_dist ends the job here and now. */
int ranks_complain(const ranks_job *job, apa_status status);

/* Figures over ranks. */
double ranks_overlap(const apa_dist_statistics *s); /* share of transfer time that nobody waited for; NaN: none */
json_t *ranks_json(const apa_dist_statistics *all, int32_t n);
void ranks_json_totals(json_t *object, const apa_dist_statistics *all, int32_t n);
void ranks_print(const apa_dist_statistics *all, int32_t n);

int ranks_run(ranks_job *job);
int ranks_bench(ranks_job *job);

#endif
