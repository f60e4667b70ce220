/* apa-mpi: apa run and apa bench under mpirun. `apa` itself links no MPI and starts this program when it finds itself
 * on several ranks. */
#include "ranks.h"

#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HELPED = -1 }; /* a help text was printed, and that is all */

/* ------------------------------------------------------------------------------- one voice */

/* What ranks other than 0 would say while the job is set up: kept, and said if nobody before them had anything. */
typedef struct voice {
    int32_t rank;
    int real; /* stderr */
    FILE *kept;
} voice;

static void hush(voice *v, int32_t rank)
{
    v->rank = rank;
    v->kept = rank == 0 ? NULL : tmpfile();
    v->real = -1;
    if (v->kept == NULL)
        return;
    fflush(stderr);
    v->real = dup(STDERR_FILENO);
    dup2(fileno(v->kept), STDERR_FILENO);
}

static void speak(voice *v, bool aloud)
{
    char line[4096];
    if (v->kept == NULL || v->real < 0)
        return;
    fflush(stderr);
    dup2(v->real, STDERR_FILENO);
    close(v->real);
    rewind(v->kept);
    while (aloud && fgets(line, sizeof line, v->kept) != NULL)
        fprintf(stderr, "%s", line);
    fclose(v->kept);
    v->kept = NULL;
}

/* Lowest rank with a code other than 0, or -1; *code becomes that rank's. */
static int32_t lowest_failure(const ranks_job *job, int *code)
{
    const int32_t ranks = apa_dist_ranks(job->dist), own = ranks - apa_dist_rank(job->dist);
    int32_t largest = 0;
    apa_status status = apa_dist_agree(job->dist, *code == CLI_DONE ? 0 : 8 * own + (*code & 7), &largest);
    if (status != APA_STATUS_OK)
        return *code = ranks_complain(job, status), apa_dist_rank(job->dist);
    *code = largest % 8;
    return largest == 0 ? -1 : ranks - largest / 8;
}

/* ------------------------------------------------------------------------------- set-up */

/* The job ends here and now, wherever this rank is; nothing has been written yet. */
static void lost(void *user, const char *message)
{
    (void)user;
    fprintf(stderr, "apa: %s\n", message);
    fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, CLI_FAILED);
}

static int make_dist(ranks_job *job)
{
    char message[512];
    apa_dist_options options;
    apa_dist_options_init(&options);
    options.silence_s = job->ranks_options->silence_s;
    options.lost = lost;
    apa_status status = apa_dist_create(&job->dist, NULL, &options, message, sizeof message);
    return status == APA_STATUS_OK ? CLI_DONE : cli_complain(cli_exit_code(status), "%s", message);
}

static int set_up(ranks_job *job, bool bench)
{
    const cli_options *o = job->options;
    const bool files = o->q != NULL || o->k != NULL || o->v != NULL || o->dump != NULL;
    int code = bench && files ? cli_files_alone(o) : CLI_DONE;
    if (code == CLI_DONE)
        code = cli_recipe(o, o->method != NULL ? o->method : "apa", &job->recipe);
    if (code == CLI_DONE)
        code = cli_context_create(o, &job->context);
    if (code == CLI_DONE)
        code = bench && !files ? ranks_inputs_generate(o, &job->inputs) : ranks_inputs_map(o, &job->inputs);
    return code;
}

static void usage(void)
{
    printf("usage: mpirun -n N apa-mpi run|bench [options]      (or: mpirun -n N apa run|bench [options])\n\n"
           "Attention over keys that lie on N ranks. Options are those of apa run and apa bench, and:\n");
    ranks_options_print();
}

static int parse(int argc, char **argv, cli_options *options, ranks_options *own, bool *bench)
{
    memset(options, 0, sizeof *options);
    if (argc < 2 || (strcmp(argv[1], "run") != 0 && strcmp(argv[1], "bench") != 0)) {
        if (argc < 2)
            return cli_complain(CLI_MISUSE, "no command, expected run, bench or help");
        if (strcmp(argv[1], "help") != 0 && strcmp(argv[1], "--help") != 0)
            return cli_complain(CLI_MISUSE, "\"%s\", expected run, bench or help", argv[1]);
        usage();
        return HELPED;
    }
    *bench = strcmp(argv[1], "bench") == 0;
    int count = argc - 2;
    int code = ranks_options_take(own, &count, argv + 2);
    if (code == CLI_DONE)
        code = cli_options_parse(options, *bench ? CLI_BENCH : CLI_RUN, count, argv + 2);
    if (code == CLI_DONE && options->help) {
        usage();
        cli_options_print(*bench ? CLI_BENCH : CLI_RUN);
        code = HELPED;
    }
    return code;
}

static int body(int argc, char **argv)
{
    int rank;
    bool bench = false;
    voice v;
    cli_options options;
    ranks_options own;
    ranks_job job;
    memset(&job, 0, sizeof job);
    job.options = &options;
    job.ranks_options = &own;
    ranks_options_init(&own);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank != 0 && freopen("/dev/null", "w", stdout) == NULL)
        return CLI_FAILED;
    hush(&v, rank);
    int code = parse(argc, argv, &options, &own, &bench);
    const int made = make_dist(&job);
    if (made != CLI_DONE) { /* MPI itself: nothing can be agreed on */
        speak(&v, true);
        MPI_Abort(MPI_COMM_WORLD, made);
    }
    const bool helped = code == HELPED; /* on all ranks alike */
    if (code == CLI_DONE) {
        apa_dist_keep_alive(job.dist, 1);
        code = set_up(&job, bench);
        apa_dist_keep_alive(job.dist, 0);
    }
    const int32_t failed = helped ? -1 : lowest_failure(&job, &code);
    speak(&v, failed == rank);
    if (failed < 0 && !helped)
        code = bench ? ranks_bench(&job) : ranks_run(&job);
    ranks_job_free(&job);
    apa_dist_destroy(job.dist);
    cli_options_free(&options);
    return code == HELPED ? CLI_DONE : code;
}

int main(int argc, char **argv)
{
    int level;
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of write() */
    if (MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS)
        return cli_complain(CLI_FAILED, "MPI could not be initialised");
    int code = body(argc, argv);
    if ((fflush(stdout) != 0 || ferror(stdout)) && code == CLI_DONE)
        code = cli_complain(CLI_FAILED, "standard output: cannot be written");
    MPI_Finalize();
    return code;
}
