/* Damaged files: truncated at every byte, and changed at random bytes. A reader answers with a line or a sound array;
 * that it touches no memory beyond is for the sanitizers to see. */
#include "support/files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEED 20240611u

static uint64_t random_state;

static uint64_t random_bits(void)
{
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t z = random_state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static const float six[6] = {0, 1, -2.5f, 3, 1e30f, -0.0f};

/* Reads whatever is there; the outcome must be an error with a line, or an array whose every element can be read. */
static int survives(const char *path, const char *ending)
{
    char text[4096];
    double value;
    memset(file_message, 0, sizeof file_message);
    apa_status status;
    if (strcmp(ending, "dump") == 0) {
        apa_dump dump;
        status = apa_dump_read(path, &dump, file_message, sizeof file_message);
        for (int64_t i = 0; status == APA_STATUS_OK && i < dump.v.elements; i++)
            assert_int_equal(apa_array_get_f64(&dump.v, i, 1, &value), APA_STATUS_OK);
        apa_dump_free(&dump);
    } else {
        apa_array array;
        status = apa_array_read(path, &array, file_message, sizeof file_message);
        int64_t product = 1;
        for (int32_t i = 0; status == APA_STATUS_OK && i < array.dims; i++)
            product *= array.shape[i];
        if (status == APA_STATUS_OK)
            assert_int_equal(product, array.elements);
        for (int64_t i = 0; status == APA_STATUS_OK && i < array.elements; i++)
            assert_int_equal(apa_array_get_f64(&array, i, 1, &value), APA_STATUS_OK);
        apa_array_free(&array);
    }
    if (status != APA_STATUS_OK) {
        assert_int_equal(status, APA_STATUS_BAD_FILE);
        assert_true(strlen(file_message) > strlen(path));
        assert_null(strchr(file_message, '\n'));
    }
    apa_file_describe(path, text, sizeof text, file_message, sizeof file_message);
    return status == APA_STATUS_OK;
}

static void damage(const char *ending, const unsigned char *good, size_t size, int rounds)
{
    unsigned char bytes[4096];
    char name[64];
    snprintf(name, sizeof name, "damaged.%s", ending);
    const char *path = file_path(name);
    for (size_t n = 0; n < size; n++) {
        file_put(path, good, n);
        assert_false(survives(path, ending)); /* every truncation is noticed */
    }
    random_state = SEED;
    print_message("seed %u, %s\n", SEED, ending);
    for (int round = 0; round < rounds; round++) {
        memcpy(bytes, good, size);
        const int changes = 1 + (int)(random_bits() % 4);
        for (int c = 0; c < changes; c++) {
            const size_t at = random_bits() % size;
            switch (random_bits() % 3) {
            case 0:
                bytes[at] ^= (unsigned char)(1u << random_bits() % 8);
                break;
            case 1:
                bytes[at] = (unsigned char)random_bits();
                break;
            default:
                bytes[at] = (unsigned char)"0129{}[](),:'\"\\eL<u-"[random_bits() % 20];
            }
        }
        file_put(path, bytes, size);
        survives(path, ending);
    }
    unlink(path);
}

static void damaged_files(void **unused)
{
    (void)unused;
    unsigned char bytes[4096];
    const int32_t header[6] = {3, 5, 4, 2, 8, 2};
    size_t size =
        file_make_npy(bytes, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", six, sizeof six);
    damage("npy", bytes, size, 4000);
    size = file_make_npy(bytes, 3, "{'descr': '|b1', 'fortran_order': False, 'shape': (1, 3), }", "\0\1\1", 3);
    damage("npy", bytes, size, 4000);
    size = file_make_safetensors(
        bytes,
        "{\"__metadata__\":{\"format\":\"pt\"},\"\\u0061\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_"
        "offsets\":[0,24]}}",
        24);
    damage("safetensors", bytes, size, 8000);
    size = file_make_dump(bytes, header);
    damage("dump", bytes, size, 4000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damaged_files),
    };
    return cmocka_run_group_tests(tests, file_setup, file_teardown);
}
