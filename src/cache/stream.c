/* Bytes of a cache's file and their checksum. */
#include "cache/file.h"

#include <errno.h>
#include <string.h>

uint64_t apa_cache_crc(uint64_t crc, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    uint64_t table[256];
    for (uint64_t i = 0; i < 256; i++) {
        uint64_t x = i;
        for (int bit = 0; bit < 8; bit++)
            x = (x & 1) != 0 ? x >> 1 ^ 0xC96C5795D7870F42u : x >> 1;
        table[i] = x;
    }
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++)
        crc = table[(crc ^ at[i]) & 0xff] ^ crc >> 8;
    return ~crc;
}

void apa_cache_file_fail(apa_cache_file *file, apa_status status, const char *what)
{
    if (file->status == APA_STATUS_OK)
        file->status = apa_fail(file->context, status, "%s: %s", file->path, what);
}

void apa_cache_put(apa_cache_file *file, const void *data, size_t bytes)
{
    if (file->status != APA_STATUS_OK || bytes == 0)
        return;
    if (fwrite(data, 1, bytes, file->stream) != bytes)
        apa_cache_file_fail(file, APA_STATUS_IO, strerror(errno));
    file->checksum = apa_cache_crc(file->checksum, data, bytes);
}

void apa_cache_get(apa_cache_file *file, void *data, size_t bytes)
{
    if (bytes == 0) /* an empty list has no memory */
        return;
    memset(data, 0, bytes);
    if (file->status != APA_STATUS_OK)
        return;
    if (file->left < 0 || bytes > (size_t)file->left) {
        apa_cache_file_fail(file, APA_STATUS_BAD_FILE, "ends before what it announces");
        return;
    }
    if (fread(data, 1, bytes, file->stream) != bytes)
        apa_cache_file_fail(file, APA_STATUS_IO, ferror(file->stream) ? strerror(errno) : "was cut off while read");
    file->left -= (int64_t)bytes;
}
