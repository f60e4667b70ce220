/* What the readers and the writer share: messages of one line, a file of known size, arrays without zeroing.
 *
 * The rule of every reader: a size that a file claims is compared with the file's length before memory is asked for, so
 * a hostile file costs at most its own size in memory. */
#ifndef APA_IO_IO_INTERNAL_H
#define APA_IO_IO_INTERNAL_H

#include "apa/io.h"

#include <stdarg.h>
#include <stdbool.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the readers and writers copy little-endian data as it is"
#endif

/* Where the one-line message of a failure goes. */
typedef struct apa_io_report {
    const char *path; /* NULL: the message begins with what was found */
    char *message;    /* may be NULL */
    size_t size;
} apa_io_report;

/* Writes "path: ..." and returns status. Control bytes (a hostile name may hold some) become '?'. */
apa_status apa_io_fail(const apa_io_report *report, apa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A regular file, open for reading, of known size. */
typedef struct apa_io_file {
    int descriptor;
    int64_t size;
} apa_io_file;

apa_status apa_io_open(const char *path, apa_io_file *file, const apa_io_report *report);
void apa_io_close(apa_io_file *file);

/* Reads exactly `bytes` bytes at `offset`. A file that shrinks meanwhile is BAD_FILE. */
apa_status apa_io_read(const apa_io_file *file, int64_t offset, void *to, int64_t bytes, const apa_io_report *report);

/* Bytes of an element; 0 for an unknown type. "f16" and so on. */
int64_t apa_io_type_bytes(apa_array_type type);
const char *apa_io_type_name(apa_array_type type);

/* Elements of a shape: false if negative or if the product of the non-zero dimensions exceeds 2^59 (so that byte
 * offsets and strides are safe also when another dimension is 0). */
bool apa_io_count(int32_t dims, const int64_t *shape, int64_t *elements);

/* An array whose content is about to be read. */
apa_status apa_io_make(apa_array *array, apa_array_type type, int32_t dims, const int64_t *shape,
                       const apa_io_report *report);

/* Makes the array and reads its elements, contiguous at `offset`; a BOOL must hold 0 and 1 alone. */
apa_status apa_io_fill(const apa_io_file *file, int64_t offset, apa_array_type type, int32_t dims, const int64_t *shape,
                       apa_array *array, const apa_io_report *report);

/* Text that grows up to a limit, for lists in messages and descriptions. */
typedef struct apa_io_text {
    char *text;
    size_t size, used;
    bool overflow;
} apa_io_text;

void apa_io_append(apa_io_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void apa_io_append_shape(apa_io_text *text, int32_t dims, const int64_t *shape);

/* The formats. */
typedef struct apa_npy_header {
    apa_array_type type;
    int32_t dims;
    int64_t shape[8];
    int64_t elements, data_offset;
} apa_npy_header;

/* Parses and checks a header against the file's size. */
apa_status apa_npy_header_read(const apa_io_file *file, apa_npy_header *header, const apa_io_report *report);

/* Header bytes of a .npy 1.0 (magic to newline, a multiple of 64), into text. Returns their number. */
size_t apa_npy_header_write(const apa_array *array, char text[512]);

apa_status apa_npy_read(const char *path, apa_array *array, const apa_io_report *report);

/* name NULL: the only tensor. */
apa_status apa_safetensors_read(const char *path, const char *name, apa_array *array, const apa_io_report *report);
apa_status apa_safetensors_describe(const char *path, apa_io_text *text, const apa_io_report *report);

apa_status apa_dump_describe(const char *path, apa_io_text *text, const apa_io_report *report);

#endif
