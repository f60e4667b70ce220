/* Started by mpirun or srun on several ranks? `apa` links no MPI: run and bench are then the business of apa-mpi, which
 * lies beside it where the build had MPI. Without it N processes would each do the whole work and write one file. */
#define _DEFAULT_SOURCE /* readlink */
#include "cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int number_of(const char *variable)
{
    const char *text = getenv(variable);
    return text == NULL ? 0 : atoi(text);
}

/* Ranks as the launcher tells its processes: Open MPI; MPICH and others through PMI; srun with a PMIx plugin. */
static int ranks(void)
{
    int n = number_of("OMPI_COMM_WORLD_SIZE");
    if (n == 0)
        n = number_of("PMI_SIZE");
    if (n == 0 && getenv("PMIX_RANK") != NULL)
        n = number_of("SLURM_NTASKS");
    return n;
}

int cli_launched(int argc, char **argv)
{
    char path[4096];
    const bool ours = argc > 1 && (strcmp(argv[1], "run") == 0 || strcmp(argv[1], "bench") == 0);
    if (!ours || ranks() < 2)
        return CLI_DONE;
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - sizeof "-mpi");
    if (n > 0) {
        memcpy(path + n, "-mpi", sizeof "-mpi");
        execv(path, argv); /* comes back only when there is none */
    }
    /* Every rank comes here: one speaks. */
    if (number_of("OMPI_COMM_WORLD_RANK") + number_of("PMI_RANK") + number_of("PMIX_RANK") > 0)
        return CLI_MISUSE;
    return cli_complain(CLI_MISUSE,
                        "%s: started on %d ranks, and %s cannot be started (%s): a build with MPI has it (APA_MPI)",
                        argv[1], ranks(), n > 0 ? path : "apa-mpi", strerror(errno));
}
