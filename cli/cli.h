/* The command `apa`, from inside: what its subcommands share.
 *
 * The command uses the public headers alone. Every subcommand is one function that takes parsed options and returns the
 * exit status: 0 done, 2 the caller's mistake, 1 anything else. A mistake is one line on stderr that begins with "apa:
 * ". */
#ifndef APA_CLI_CLI_H
#define APA_CLI_CLI_H

#include <apa/apa.h>
#include <apa/eval.h>
#include <apa/io.h>

#include <jansson.h>
#include <stdbool.h>

enum { CLI_DONE = 0, CLI_FAILED = 1, CLI_MISUSE = 2 };

/* ------------------------------------------------------------------------------- options (options.c) */

enum {
    CLI_RUN = 1,
    CLI_EVAL = 2,
    CLI_BENCH = 4,
    CLI_GEN = 8,
    CLI_INFO = 16,
    CLI_SWEEP = 32,
    CLI_REPORT = 64,
    CLI_MAP = 128
};

#define CLI_ALL_HEADS INT64_MIN

typedef struct cli_options {
    const char *kind; /* gen KIND, or --kind */
    const char *q, *k, *v, *dump, *out, *lse, *json;
    const char *method, *compare, *engine, *layout, *out_dtype, *dtype, *shape_text, *window_text;
    const char *worst_by, *device, *csv;
    const char *bias, *alibi, *sinks;
    double eps, scale;              /* NaN when not given */
    double softcap;                 /* 0 when not given */
    int64_t q_offset;               /* APA_Q_OFFSET_DEFAULT when not given */
    int64_t window[2];              /* -1 = no bound */
    int64_t threads, repeats, seed; /* repeats 0 when not given */
    int seeded;                     /* --seed was given */
    int64_t worst;                  /* pairs to list; 0 when not given */
    int64_t shape[7];               /* B, Hq, Hkv, Sq, Skv, D, Dv; all 0 when not given */
    int64_t head;                   /* CLI_ALL_HEADS when not given */
    int causal, recipes, help, histogram, per_head, attribute, map, ceilings;
    char **sets; /* --set key=value, split in place by cli_recipe() */
    int set_count;
    char **overs; /* --over key=v1,v2 */
    int over_count;
    char **froms; /* --from FILE */
    int from_count;
} cli_options;

/* Parses the arguments after the subcommand's name. Returns CLI_DONE, or CLI_MISUSE with the line printed.
 * cli_options_free() afterwards in either case. */
int cli_options_parse(cli_options *options, int command, int argc, char **argv);
void cli_options_free(cli_options *options);

/* The options of a subcommand, one line each. */
void cli_options_print(int command);

/* ------------------------------------------------------------------------------- mistakes (common.c) */

/* Prints "apa: ..." as one line and returns `code`. */
int cli_complain(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The exit status that a library status means. */
int cli_exit_code(apa_status status);

/* Complains with the context's message; one that begins with q, k or v gets the option and file that it came from. */
int cli_complain_context(const cli_options *options, const apa_context *context, apa_status status);

/* ------------------------------------------------------------------------------- setting up (common.c, inputs.c) */

int cli_context_create(const cli_options *options, apa_context **context);

/* Preset `method` with --eps and --set applied, and checked. */
int cli_recipe(const cli_options *options, const char *method, apa_recipe *recipe);
/* The same, not yet checked as a whole. */
int cli_recipe_set_up(const cli_options *options, const char *method, apa_recipe *recipe);

typedef struct cli_inputs {
    apa_array q, k, v;
    apa_array bias, alibi, sinks; /* those that were given */
    apa_problem problem;          /* inputs, masks and scale; no outputs */
    bool nhd;
} cli_inputs;

/* The array of an option, or a complaint that names it. */
int cli_array_read(const char *option, const char *path, apa_array *array);
/* From --q --k --v or --dump. */
int cli_inputs_load(const cli_options *options, cli_inputs *inputs);
/* From --shape, --kind, --dtype, --seed. */
int cli_inputs_generate(const cli_options *options, cli_inputs *inputs);
void cli_inputs_free(cli_inputs *inputs);
/* Files of inputs are given (bench): is no option of synthetic ones beside them? */
int cli_files_alone(const cli_options *options);
/* Is there a (query, head) pair to compare? */
int cli_pairs_check(const cli_options *options, const cli_inputs *inputs);

/* An output array in the layout and number of dimensions of q, and its tensor; last 0: an LSE, [B,H,S] whatever the
 * layout. */
int cli_output_make(const cli_inputs *inputs, apa_array_type type, int64_t last, apa_array *array, apa_tensor *tensor);

/* --softcap, --bias, --alibi and --sinks: part of loading and generating inputs, once q is there (scores.c). */
int cli_scores_load(const cli_options *options, cli_inputs *inputs);
void cli_scores_free(cli_inputs *inputs);

/* "f16", "f32", "f64", "bf16" → type; 0 if it is none of them. */
apa_array_type cli_type(const char *name);

/* (query, key) pairs that are visible, over all batches and heads. The problem is one that a plan has taken. */
double cli_visible_pairs(const cli_inputs *inputs);

/* ------------------------------------------------------------------------------- synthetic data (synthetic.c) */

typedef struct cli_synthetic {
    const char *kind;
    int64_t B, Hq, Hkv, Sq, Skv, D, Dv;
    uint64_t seed;
} cli_synthetic;

/* "randn" and so on; NULL past the last. */
const char *cli_synthetic_kind(size_t i);
const char *cli_synthetic_about(size_t i);

/* Fills q [B,Hq,Sq,D], k [B,Hkv,Skv,D] and v [B,Hkv,Skv,Dv], already allocated. False: no memory. */
bool cli_synthetic_fill(const cli_synthetic *shape, apa_array *q, apa_array *k, apa_array *v);

/* ------------------------------------------------------------------------------- places for output (place.c) */

#define CLI_PATH 4096     /* bytes of a path, its end included */
#define CLI_TRIAL_ROOM 64 /* bytes that the name of a temporary file adds to a folder */

/* Is there a place to write `path` to, and is it none of the inputs? Complains naming `option`. NULL paths are fine. */
int cli_path_check(const cli_options *options, const char *option, const char *path);
/* Does a file that is to be written have the ending of what will be in it? */
int cli_ending_check(const char *option, const char *path, const char *ending);

/* ------------------------------------------------------------------------------- output (report.c) */

/* Writes files, all or none; SIGINT, SIGTERM and SIGHUP wait until the files are whole or gone, and end the wait for a
 * pipe. */
int cli_files_write(const apa_output_file *files, size_t count);

/* Shares of the sub-blocks that LampAttention recomputed and of its disruptive tiles; NaN for other methods. */
double cli_lamp_recomputed(const apa_statistics *statistics);
double cli_lamp_disruptive(const apa_statistics *statistics);

/* Number as JSON, null when it is not finite. */
json_t *cli_json_number(double value);
json_t *cli_json_recipe(const apa_recipe *recipe);
json_t *cli_json_problem_shape(const apa_problem *problem);

/* Writes value to --json (NULL: nothing; "-": stdout) together with `count` files (of room for one more). */
int cli_finish(const cli_options *options, json_t *value, apa_output_file *files, size_t count);

/* Does human text go to stdout? Not when JSON does. */
bool cli_prints(const cli_options *options);

/* Progress for a terminal; nothing when stderr is none. Ends with fraction 1. */
void cli_progress(void *user, const char *phase, double fraction);

/* CPU model as the system names it; cores online; bytes of main memory, infinite when not known (machine.c). */
void cli_cpu_name(char *name, size_t size);
int64_t cli_cpu_cores(void);
double cli_memory_bytes(void);

/* Sorts; the p-quantile of sorted values, linear between neighbours (report.c). */
void cli_sort(double *values, int64_t n);
double cli_quantile(const double *sorted, int64_t n, double p);

/* ------------------------------------------------------------------------------- diagnosis (diagnose.c) */

/* What --worst, --histogram, --per-head and --attribute found about one method; starts as zeros. */
typedef struct cli_diagnosis {
    apa_pair_detail *worst;
    int64_t worst_count;
    apa_head_error *heads;
    int64_t head_count;
    bool has_histogram, has_attribution;
    apa_histogram histogram;
    apa_attribution attribution;
} cli_diagnosis;

/* Is anything of the kind asked for? And is the call sound? */
bool cli_diagnosis_wanted(const cli_options *options);
int cli_diagnosis_check(const cli_options *options);

/* problem.out: the method's output; recipe: as it ran; verdicts: of that run. */
int cli_diagnose(const cli_options *options, apa_context *context, const apa_problem *problem, const apa_tensor *truth,
                 const apa_recipe *recipe, const uint8_t *verdicts, cli_diagnosis *diagnosis);
void cli_diagnosis_free(cli_diagnosis *diagnosis);

/* Keys worst, histogram, heads, attribution, those that there are. */
void cli_diagnosis_json(const cli_diagnosis *diagnosis, json_t *object);
void cli_diagnosis_print(const cli_options *options, const cli_diagnosis *diagnosis);

/* ------------------------------------------------------------------------------- modelled cost (devices.c) */

#define CLI_DEVICES 16

typedef struct cli_devices {
    int count;
    const apa_device_profile *profile[CLI_DEVICES];
} cli_devices;

/* "h200,zen4" or "all"; NULL: `fallback`, which may be NULL for none. */
int cli_devices_choose(const char *list, const char *fallback, cli_devices *devices);
json_t *cli_json_cost(const apa_cost *cost);

/* ------------------------------------------------------------------------------- subcommands */

/* On several ranks of mpirun or srun: run and bench become apa-mpi and this does not return, or it complains
 * (launched.c). */
int cli_launched(int argc, char **argv);

int cli_run(const cli_options *options);
int cli_eval(const cli_options *options);
/* What cli_eval() writes as JSON, as an array of one object a method; prints nothing. The caller owns *result. */
int cli_eval_result(const cli_options *options, json_t **result);
int cli_sweep(const cli_options *options);
int cli_bench(const cli_options *options);
int cli_gen(const cli_options *options);
int cli_info(const cli_options *options);
int cli_report(const cli_options *options);
int cli_map_command(const cli_options *options);

#endif
