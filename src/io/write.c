/* Atomic writer: every file goes to a temporary name beside its own, and names change only when all files are complete.
 *
 *     O.npy.apa-tmp-4711-0  --fsync-->  complete  --rename-->  O.npy        (all files reach "complete" first)
 *
 * Opening or writing a pipe or a device, which may wait for ever, ends with a signal whose handler asks for that (no
 * SA_RESTART). On any failure every temporary file is unlinked. If a rename fails after another has succeeded (which
 * takes a directory that changes under our feet), the files already renamed are unlinked, too: none rather than some.
 */
#define _XOPEN_SOURCE 700 /* realpath */
#include "io/io_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define WRITE_STEP ((size_t)1 << 30)
#define NAME_TRIES 100
#define NAME_KEPT 200 /* bytes of a name that its temporary file has, too */

typedef struct pending {
    apa_io_report report;
    char *target;    /* the path, links followed */
    char *temporary; /* NULL: written directly (a device or pipe), or not begun */
    int descriptor;
    bool renamed;
} pending;

static apa_status fail_errno(const pending *p, const char *what, int reason)
{
    return apa_io_fail(&p->report, APA_STATUS_IO, "%s: %s", what, strerror(reason));
}

static apa_status write_all(const pending *p, const void *data, size_t bytes)
{
    const char *at = data;
    while (bytes > 0) {
        const ssize_t put = write(p->descriptor, at, bytes < WRITE_STEP ? bytes : WRITE_STEP);
        if (put < 0 && errno == EINTR && p->temporary != NULL)
            continue; /* a file does not keep us waiting; a pipe may do so for ever, and a signal ends that */
        if (put < 0)
            return fail_errno(p, "cannot be written", errno);
        at += put;
        bytes -= (size_t)put;
    }
    return APA_STATUS_OK;
}

/* Creates the temporary file. Not mkstemp(): the mode is to follow the umask, as for any new file. */
static apa_status create_temporary(pending *p)
{
    const size_t size = strlen(p->target) + 64;
    char *name = malloc(size);
    if (name == NULL)
        return apa_io_fail(&p->report, APA_STATUS_OUT_OF_MEMORY, "no memory for a file name");
    const char *slash = strrchr(p->target, '/'), *base = slash != NULL ? slash + 1 : p->target;
    const size_t most =
        (size_t)(base - p->target) + NAME_KEPT; /* a name may have 255 bytes, of which the end is ours */
    const int kept = (int)(strlen(p->target) < most ? strlen(p->target) : most);
    int reason = EEXIST;
    for (int i = 0; i < NAME_TRIES && reason == EEXIST; i++) {
        snprintf(name, size, "%.*s.apa-tmp-%ld-%d", kept, p->target, (long)getpid(), i);
        p->descriptor = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        reason = p->descriptor < 0 ? errno : 0;
    }
    if (reason != 0) {
        free(name);
        return fail_errno(p, "cannot be created", reason);
    }
    p->temporary = name;
    return APA_STATUS_OK;
}

static apa_status open_target(pending *p)
{
    struct stat info;
    if (stat(p->report.path, &info) == 0) {
        if (S_ISDIR(info.st_mode))
            return apa_io_fail(&p->report, APA_STATUS_IO, "is a directory, expected a file name");
        if (!S_ISREG(info.st_mode)) { /* renaming over /dev/null would replace it */
            p->descriptor = open(p->report.path, O_WRONLY | O_CLOEXEC);
            return p->descriptor >= 0 ? APA_STATUS_OK : fail_errno(p, "cannot be opened", errno);
        }
        p->target = realpath(p->report.path, NULL);
        if (p->target == NULL)
            return fail_errno(p, "cannot be resolved", errno);
        apa_status status = create_temporary(p);
        if (status == APA_STATUS_OK && fchmod(p->descriptor, info.st_mode & 07777) != 0)
            status = fail_errno(p, "cannot be given its mode", errno);
        return status;
    }
    p->target = malloc(strlen(p->report.path) + 1);
    if (p->target == NULL)
        return apa_io_fail(&p->report, APA_STATUS_OUT_OF_MEMORY, "no memory for a file name");
    memcpy(p->target, p->report.path, strlen(p->report.path) + 1);
    return create_temporary(p);
}

static apa_status write_content(const pending *p, const apa_output_file *file)
{
    if (file->array == NULL)
        return write_all(p, file->text, file->text_size);
    char header[512];
    const size_t header_bytes = apa_npy_header_write(file->array, header);
    apa_status status = write_all(p, header, header_bytes);
    if (status == APA_STATUS_OK)
        status =
            write_all(p, file->array->data, (size_t)(file->array->elements * apa_io_type_bytes(file->array->type)));
    return status;
}

/* From nothing to a complete temporary file. */
static apa_status prepare(pending *p, const apa_output_file *file)
{
    apa_status status = open_target(p);
    if (status == APA_STATUS_OK)
        status = write_content(p, file);
    if (status == APA_STATUS_OK && p->temporary != NULL && fsync(p->descriptor) != 0 && errno != EINVAL)
        status = fail_errno(p, "cannot be brought to the disk", errno);
    if (p->descriptor >= 0 && close(p->descriptor) != 0 && status == APA_STATUS_OK)
        status = fail_errno(p, "cannot be closed", errno);
    p->descriptor = -1;
    return status;
}

static apa_status check_files(const apa_output_file *files, size_t count, const apa_io_report *report)
{
    apa_io_report at = *report;
    for (size_t i = 0; i < count; i++) {
        at.path = files[i].path == NULL ? "(no path)" : files[i].path;
        const apa_array *array = files[i].array;
        if (files[i].path == NULL || (array == NULL && files[i].text == NULL) || (array != NULL && array->data == NULL))
            return apa_io_fail(&at, APA_STATUS_INVALID_ARGUMENT, "no path or nothing to write");
        if (array != NULL && array->type == APA_ARRAY_BF16)
            return apa_io_fail(&at, APA_STATUS_UNSUPPORTED, "bf16 has no .npy type, expected f16, f32, f64 or bool");
        if (array != NULL && (apa_io_type_bytes(array->type) == 0 || array->dims < 0 || array->dims > 8))
            return apa_io_fail(&at, APA_STATUS_INVALID_ARGUMENT,
                               "the array's type or number of dimensions is out of range");
        for (size_t j = 0; j < i; j++)
            if (strcmp(files[i].path, files[j].path) == 0)
                return apa_io_fail(&at, APA_STATUS_INVALID_ARGUMENT, "named for two outputs, expected different files");
    }
    return APA_STATUS_OK;
}

static void finish(pending *list, size_t count, apa_status status)
{
    for (size_t i = 0; i < count; i++) {
        if (status != APA_STATUS_OK && list[i].temporary != NULL)
            unlink(list[i].renamed ? list[i].target : list[i].temporary);
        free(list[i].temporary);
        free(list[i].target);
    }
    free(list);
}

apa_status apa_files_write(const apa_output_file *files, size_t count, char *message, size_t message_size)
{
    if (files == NULL && count > 0)
        return APA_STATUS_INVALID_ARGUMENT;
    const apa_io_report report = {"outputs", message, message_size};
    apa_status status = check_files(files, count, &report);
    if (status != APA_STATUS_OK || count == 0)
        return status;
    pending *list = calloc(count, sizeof *list);
    if (list == NULL)
        return apa_io_fail(&report, APA_STATUS_OUT_OF_MEMORY, "no memory for the list of files");
    for (size_t i = 0; i < count; i++) {
        list[i].report = report;
        list[i].report.path = files[i].path;
        list[i].descriptor = -1;
    }
    for (size_t i = 0; i < count && status == APA_STATUS_OK; i++)
        status = prepare(&list[i], &files[i]);
    for (size_t i = 0; i < count && status == APA_STATUS_OK; i++) {
        if (list[i].temporary == NULL)
            continue;
        if (rename(list[i].temporary, list[i].target) != 0)
            status = fail_errno(&list[i], "cannot be renamed from its temporary file", errno);
        else
            list[i].renamed = true;
    }
    finish(list, count, status);
    return status;
}

apa_status apa_array_write_npy(const char *path, const apa_array *array, char *message, size_t message_size)
{
    const apa_output_file file = {path, array, NULL, 0};
    if (array == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    return apa_files_write(&file, 1, message, message_size);
}
