/* Places for outputs: found wanting before any work is done.
 *
 * Whether a file can be made in a folder is tried, not derived from modes: a file system may be mounted read-only, hold
 * no ordinary files (/proc), or not take a name of that length. */
#define _XOPEN_SOURCE 700 /* realpath */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* An output that is one of the inputs would replace it. */
static int check_not_input(const cli_options *options, const char *option, const char *path)
{
    const char *const input[] = {options->q,    options->k,     options->v,    options->dump,
                                 options->bias, options->alibi, options->sinks};
    static const char *const name[] = {"--q", "--k", "--v", "--dump", "--bias", "--alibi", "--sinks"};
    struct stat out, in;
    if (stat(path, &out) != 0 || !S_ISREG(out.st_mode))
        return CLI_DONE;
    for (size_t i = 0; i < sizeof name / sizeof name[0]; i++)
        if (input[i] != NULL && stat(input[i], &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
            return cli_complain(CLI_MISUSE, "%s: %s: is the input of %s, expected another file", option, path, name[i]);
    return CLI_DONE;
}

/* The folder of a path into `folder`, of CLI_PATH bytes; false: too long. */
static bool folder_of(const char *path, char *folder)
{
    const char *slash = strrchr(path, '/');
    const size_t length = slash == NULL ? 0 : slash == path ? 1 : (size_t)(slash - path);
    if (length + CLI_TRIAL_ROOM >= CLI_PATH)
        return false;
    memcpy(folder, length > 0 ? path : ".", length > 0 ? length : 1);
    folder[length > 0 ? length : 1] = '\0';
    return true;
}

/* 0, or the errno of making a file in the folder. No signal comes between making and removing it. */
static int try_folder(const char *folder)
{
    char name[CLI_PATH + CLI_TRIAL_ROOM];
    sigset_t all, before;
    snprintf(name, sizeof name, "%s/.apa-tmp-%ld", folder, (long)getpid());
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    const int descriptor = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    const int reason = descriptor < 0 ? errno : 0;
    if (descriptor >= 0) {
        close(descriptor);
        unlink(name);
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    return reason == EEXIST ? 0 : reason;
}

static int check_folder(const char *option, const char *path)
{
    struct stat info;
    char folder[CLI_PATH];
    if (!folder_of(path, folder))
        return cli_complain(CLI_MISUSE, "%s: the path is too long", option);
    if (stat(folder, &info) != 0 || !S_ISDIR(info.st_mode))
        return cli_complain(CLI_MISUSE, "%s: %s: no folder \"%s\", expected one to write to", option, path, folder);
    const int refused = try_folder(folder);
    if (refused == ENOSPC || refused == EDQUOT) /* a full disk is no mistake of the call */
        return cli_complain(CLI_FAILED, "%s: %s: cannot be created: %s", option, path, strerror(refused));
    if (refused != 0)
        return cli_complain(CLI_MISUSE, "%s: %s: folder \"%s\" cannot be written to: %s", option, path, folder,
                            strerror(refused));
    return CLI_DONE;
}

int cli_path_check(const cli_options *options, const char *option, const char *path)
{
    struct stat info;
    if (path == NULL || strcmp(path, "-") == 0)
        return CLI_DONE;
    const int absent = stat(path, &info) != 0 ? errno : 0;
    if (absent == ENAMETOOLONG || absent == ELOOP)
        return cli_complain(CLI_MISUSE, "%s: %s: cannot be written: %s", option, path, strerror(absent));
    if (absent != 0)
        return check_folder(option, path);
    if (S_ISDIR(info.st_mode))
        return cli_complain(CLI_MISUSE, "%s: %s: is a directory, expected a file name", option, path);
    if (!S_ISREG(info.st_mode)) /* a device or a pipe: its folder does not matter */
        return access(path, W_OK) == 0
                   ? CLI_DONE
                   : cli_complain(CLI_MISUSE, "%s: %s: cannot be written to: %s", option, path, strerror(errno));
    int code = check_not_input(options, option, path);
    char *target = realpath(path, NULL); /* the file at the end of a symbolic link is the one that is replaced */
    if (code == CLI_DONE)
        code = check_folder(option, target != NULL ? target : path);
    free(target);
    return code;
}

int cli_ending_check(const char *option, const char *path, const char *ending)
{
    struct stat info;
    const size_t n = path != NULL ? strlen(path) : 0, m = strlen(ending);
    if (path == NULL || strcmp(path, "-") == 0 || (n > m && strcmp(path + n - m, ending) == 0))
        return CLI_DONE;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) /* /dev/null or a pipe may have any name */
        return CLI_DONE;
    return cli_complain(CLI_MISUSE, "%s: %s: ending not known, expected %s", option, path, ending);
}
