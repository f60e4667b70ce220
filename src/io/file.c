/* Files for the readers: messages, opening, exact reads. */
#include "io/io_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* One read() call moves at most this much: some systems stop short of 2^31 in any case. */
#define READ_STEP ((int64_t)1 << 30)

static void one_line(char *text)
{
    for (; *text != '\0'; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            *text = '?';
}

apa_status apa_io_fail(const apa_io_report *report, apa_status status, const char *format, ...)
{
    if (report->message == NULL || report->size == 0)
        return status;
    const int used = report->path == NULL ? 0 : snprintf(report->message, report->size, "%s: ", report->path);
    if (used >= 0 && (size_t)used < report->size) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(report->message + used, report->size - (size_t)used, format, arguments);
        va_end(arguments);
    }
    one_line(report->message);
    return status;
}

apa_status apa_io_open(const char *path, apa_io_file *file, const apa_io_report *report)
{
    /* Not blocking, so that a FIFO without a writer is refused below and not waited for. */
    file->descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->descriptor < 0)
        return apa_io_fail(report, APA_STATUS_IO, "cannot be opened: %s", strerror(errno));
    struct stat info;
    if (fstat(file->descriptor, &info) != 0) {
        const int reason = errno;
        apa_io_close(file);
        return apa_io_fail(report, APA_STATUS_IO, "cannot be examined: %s", strerror(reason));
    }
    if (!S_ISREG(info.st_mode)) {
        apa_io_close(file);
        return apa_io_fail(report, APA_STATUS_IO, "is %s, expected a regular file",
                           S_ISDIR(info.st_mode) ? "a directory" : "a pipe or device");
    }
    file->size = (int64_t)info.st_size;
    return APA_STATUS_OK;
}

void apa_io_close(apa_io_file *file)
{
    if (file->descriptor >= 0)
        close(file->descriptor);
    file->descriptor = -1;
}

apa_status apa_io_read(const apa_io_file *file, int64_t offset, void *to, int64_t bytes, const apa_io_report *report)
{
    unsigned char *at = to;
    while (bytes > 0) {
        const ssize_t got = pread(file->descriptor, at, (size_t)(bytes < READ_STEP ? bytes : READ_STEP), (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return apa_io_fail(report, APA_STATUS_IO, "cannot be read: %s", strerror(errno));
        if (got == 0)
            return apa_io_fail(report, APA_STATUS_BAD_FILE,
                               "truncated: ends at byte %" PRId64 ", expected %" PRId64 " more", offset, bytes);
        at += got;
        offset += got;
        bytes -= got;
    }
    return APA_STATUS_OK;
}

void apa_io_append(apa_io_text *text, const char *format, ...)
{
    if (text->overflow)
        return;
    va_list arguments;
    va_start(arguments, format);
    const int n = vsnprintf(text->text + text->used, text->size - text->used, format, arguments);
    va_end(arguments);
    if (n < 0 || (size_t)n >= text->size - text->used)
        text->overflow = true;
    else
        text->used += (size_t)n;
}

void apa_io_append_shape(apa_io_text *text, int32_t dims, const int64_t *shape)
{
    apa_io_append(text, "[");
    for (int32_t i = 0; i < dims; i++)
        apa_io_append(text, "%s%" PRId64, i == 0 ? "" : ", ", shape[i]);
    apa_io_append(text, "]");
}
