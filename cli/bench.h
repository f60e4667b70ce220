/* apa bench from inside: where the time goes, and what the machine does at best. */
#ifndef APA_CLI_BENCH_H
#define APA_CLI_BENCH_H

#include "cli.h"

/* ------------------------------------------------------------------------------- ceilings (bench_ceilings.c) */

/* Measured at the context's level: on one thread, and on all that the options ask for. */
typedef struct bench_ceilings {
    bool measured;
    int threads;
    apa_ceilings one, all;
} bench_ceilings;

/* One context for each of the two, so that the caller's is left alone. */
int bench_ceilings_measure(const cli_options *options, bench_ceilings *ceilings);
void bench_ceilings_print(const bench_ceilings *ceilings);
json_t *bench_ceilings_json(const bench_ceilings *ceilings);

/* ------------------------------------------------------------------------------- phases (bench_phases.c) */

/* The phases of one run with clocks on. total_ms: its prep and attention; plain_ms: the median without clocks. */
typedef struct bench_phases {
    bool measured;
    apa_phase_cost phase[APA_PHASES];
    double total_ms, plain_ms;
} bench_phases;

/* Takes over the phases of a run; not measured when the engine has none. */
void bench_phases_take(bench_phases *phases, const apa_statistics *statistics, double plain_ms);

/* ceilings may be not measured. */
void bench_phases_print(const char *method, const bench_phases *phases, const bench_ceilings *ceilings);
json_t *bench_phases_json(const bench_phases *phases, const bench_ceilings *ceilings);

/* All bytes that the phases moved. */
double bench_phases_bytes(const bench_phases *phases);

#endif
