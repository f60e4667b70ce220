/* The bytes of an input as a file: the readers take paths. */
#define _POSIX_C_SOURCE 200809L
#include "fuzz/fuzz.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char path[64];

static void remove_file(void)
{
    unlink(path);
}

const char *fuzz_file(const uint8_t *data, size_t size, const char *ending)
{
    if (path[0] == '\0') {
        struct stat info;
        const int shared = stat("/dev/shm", &info) == 0 && S_ISDIR(info.st_mode);
        snprintf(path, sizeof path, "%s/apa-fuzz-%ld%s", shared ? "/dev/shm" : "/tmp", (long)getpid(), ending);
        atexit(remove_file);
    }
    const int descriptor = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (descriptor < 0 || write(descriptor, data, size) != (ssize_t)size)
        abort();
    close(descriptor);
    return path;
}
