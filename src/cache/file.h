/* A file that is written or read in one go, with a checksum over all that went through. */
#ifndef APA_CACHE_FILE_H
#define APA_CACHE_FILE_H

#include "core/context_internal.h"

#include <stdbool.h>
#include <stdio.h>

typedef struct apa_cache_file {
    apa_context *context;
    const char *path;
    FILE *stream;
    uint64_t checksum;
    int64_t left;      /* reading: bytes before the checksum at the end */
    apa_status status; /* the first failure; later calls do nothing */
} apa_cache_file;

/* CRC-64 (polynomial of ECMA-182, reflected; initial and final value all ones). */
uint64_t apa_cache_crc(uint64_t crc, const void *data, size_t bytes);

/* Keeps the first failure of a file: "path: ...". */
void apa_cache_file_fail(apa_cache_file *file, apa_status status, const char *what);

void apa_cache_put(apa_cache_file *file, const void *data, size_t bytes);

/* Reads exactly `bytes`, which must be left. */
void apa_cache_get(apa_cache_file *file, void *data, size_t bytes);

#endif
