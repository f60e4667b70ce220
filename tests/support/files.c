/* Files for the tests of src/io. */
#include "support/files.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char file_folder[] = "/tmp/apa-test-io-XXXXXX";
char file_message[512];

int file_setup(void **unused)
{
    (void)unused;
    return mkdtemp(file_folder) == NULL;
}

const char *file_path(const char *name)
{
    static char path[16][320];
    static int turn;
    turn = (turn + 1) % 16;
    snprintf(path[turn], sizeof path[turn], "%s/%s", file_folder, name);
    return path[turn];
}

void file_put(const char *path, const void *bytes, size_t n)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

int file_count(void)
{
    int count = 0;
    DIR *listing = opendir(file_folder);
    assert_non_null(listing);
    for (struct dirent *entry = readdir(listing); entry != NULL; entry = readdir(listing))
        count += entry->d_name[0] != '.';
    closedir(listing);
    return count;
}

void file_refused(const char *path, apa_status expected, const char *says)
{
    apa_array array;
    memset(file_message, 'x', sizeof file_message);
    const apa_status status = apa_array_read(path, &array, file_message, sizeof file_message);
    if (status != expected || strstr(file_message, says) == NULL)
        print_error("%s: status %d, message \"%s\", expected %d and \"%s\"\n", path, (int)status, file_message,
                    (int)expected, says);
    assert_int_equal(status, expected);
    assert_non_null(strstr(file_message, says));
    assert_int_equal(strncmp(file_message, path, strlen(path)), 0);
    assert_null(strchr(file_message, '\n'));
    assert_null(array.data);
}

size_t file_make_npy(unsigned char *to, int major, const char *dict, const void *data, size_t data_size)
{
    const size_t n = strlen(dict), head = major == 1 ? 10 : 12;
    memcpy(to, "\x93NUMPY", 6);
    to[6] = (unsigned char)major;
    to[7] = 0;
    to[8] = (unsigned char)(n & 255);
    to[9] = (unsigned char)(n >> 8);
    if (major > 1)
        to[10] = to[11] = 0;
    memcpy(to + head, dict, n);
    memcpy(to + head + n, data, data_size);
    return head + n + data_size;
}

size_t file_make_safetensors(unsigned char *to, const char *header, size_t data_size)
{
    const uint64_t n = strlen(header);
    memcpy(to, &n, 8);
    memcpy(to + 8, header, n);
    for (size_t i = 0; i < data_size; i++)
        to[8 + n + i] = (unsigned char)(i & 1);
    return 8 + n + data_size;
}

size_t file_make_dump(unsigned char *to, const int32_t header[6])
{
    const size_t values = (size_t)(header[0] * header[2] + 2 * header[1] * header[3]) * (size_t)header[4];
    memcpy(to, header, 24);
    for (size_t i = 0; i < values; i++) {
        const uint16_t code = (uint16_t)i;
        memcpy(to + 24 + 2 * i, &code, 2);
    }
    return 24 + 2 * values;
}

int file_teardown(void **unused)
{
    (void)unused;
    DIR *listing = opendir(file_folder);
    for (struct dirent *entry = readdir(listing); entry != NULL; entry = readdir(listing))
        if (entry->d_name[0] != '.')
            unlink(file_path(entry->d_name));
    closedir(listing);
    return rmdir(file_folder);
}
