/* What the machine calls itself. */
#include "cli.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

/* The value of "model name : ..." (x86) in /proc/cpuinfo; elsewhere the architecture. */
void cli_cpu_name(char *name, size_t size)
{
    char line[512];
    name[0] = '\0';
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL)
            continue;
        colon += strspn(colon, ": \t");
        snprintf(name, size, "%.*s", (int)strcspn(colon, "\n"), colon);
        break;
    }
    if (file != NULL)
        fclose(file);
    struct utsname system;
    if (name[0] == '\0' && uname(&system) == 0)
        snprintf(name, size, "%s", system.machine);
}

int64_t cli_cpu_cores(void)
{
    return (int64_t)sysconf(_SC_NPROCESSORS_ONLN);
}

double cli_memory_bytes(void)
{
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? (double)pages * (double)page : INFINITY;
}
