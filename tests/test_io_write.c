/* Arrays in memory, and the writer: all files or none. */
#include "support/files.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static void array_limits(void **unused)
{
    (void)unused;
    apa_array array;
    apa_tensor tensor;
    const int64_t negative[2] = {2, -1}, huge[3] = {INT64_MAX, INT64_MAX, 0}, fine[3] = {2, 3, 4},
                  four[4] = {2, 3, 4, 5};
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_F32, 2, negative), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_F32, 3, huge), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_F32, 9, huge), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_array_allocate(&array, (apa_array_type)77, 3, fine), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_F32, 3, fine), APA_STATUS_OK);
    for (int i = 0; i < 24; i++)
        assert_true(((float *)array.data)[i] == 0);
    assert_int_equal(apa_array_tensor(&array, 1, &tensor, file_message, sizeof file_message), APA_STATUS_OK);
    const int64_t nhd_shape[4] = {1, 3, 2, 4}, nhd_stride[4] = {24, 4, 12, 1};
    assert_memory_equal(tensor.shape, nhd_shape, sizeof nhd_shape);
    assert_memory_equal(tensor.stride, nhd_stride, sizeof nhd_stride);
    apa_array_free(&array);
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_BF16, 4, four), APA_STATUS_OK);
    assert_int_equal(apa_array_tensor(&array, 0, &tensor, file_message, sizeof file_message), APA_STATUS_OK);
    assert_memory_equal(tensor.shape, four, sizeof four);
    assert_int_equal(tensor.dtype, APA_DTYPE_BF16);
    const char *path = file_path("bf16.npy");
    assert_int_equal(apa_array_write_npy(path, &array, file_message, sizeof file_message), APA_STATUS_UNSUPPORTED);
    assert_non_null(strstr(file_message, "bf16 has no .npy type"));
    apa_array_free(&array);
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_BOOL, 3, fine), APA_STATUS_OK);
    assert_int_equal(apa_array_tensor(&array, 0, &tensor, file_message, sizeof file_message),
                     APA_STATUS_INVALID_ARGUMENT);
    const double half = 0.5, one = 1;
    assert_int_equal(apa_array_set_f64(&array, 0, 1, &half), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_array_set_f64(&array, 0, 1, &one), APA_STATUS_OK);
    assert_int_equal(apa_array_set_f64(&array, 24, 1, &one), APA_STATUS_INVALID_ARGUMENT);
    apa_array_free(&array);
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_F32, 2, fine), APA_STATUS_OK);
    assert_int_equal(apa_array_tensor(&array, 0, &tensor, file_message, sizeof file_message),
                     APA_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(file_message, "2 dimensions, expected 3"));
    apa_array_free(&array);
}

static void write_and_read(void **unused)
{
    (void)unused;
    static const apa_array_type types[] = {APA_ARRAY_F16, APA_ARRAY_F32, APA_ARRAY_F64, APA_ARRAY_BOOL};
    const int64_t shape[8] = {1, 2, 1, 3, 1, 1, 2, 1};
    const char *path = file_path("round.npy");
    for (int t = 0; t < 4; t++)
        for (int32_t dims = 0; dims <= 8; dims++) {
            apa_array array, back;
            assert_int_equal(apa_array_allocate(&array, types[t], dims, shape), APA_STATUS_OK);
            for (int64_t i = 0; i < array.elements; i++) {
                const double value = types[t] == APA_ARRAY_BOOL ? (double)(i % 2) : (double)i * 0.375 - 1;
                assert_int_equal(apa_array_set_f64(&array, i, 1, &value), APA_STATUS_OK);
            }
            assert_int_equal(apa_array_write_npy(path, &array, file_message, sizeof file_message), APA_STATUS_OK);
            assert_int_equal(apa_array_read(path, &back, file_message, sizeof file_message), APA_STATUS_OK);
            assert_int_equal(back.type, array.type);
            assert_int_equal(back.dims, dims);
            assert_memory_equal(back.shape, array.shape, sizeof back.shape);
            for (int64_t i = 0; i < array.elements; i++) {
                double a, b;
                apa_array_get_f64(&array, i, 1, &a);
                apa_array_get_f64(&back, i, 1, &b);
                assert_true(a == b);
            }
            apa_array_free(&array);
            apa_array_free(&back);
        }
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    const mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(info.st_mode & 0777, 0666 & ~mask);
    unlink(path);
}

/* The header byte for byte: what numpy 2.4 writes for shape (2,), but for numpy's own amount of padding. */
static void written_header(void **unused)
{
    (void)unused;
    static const char dict[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
    char bytes[256];
    apa_array array;
    const int64_t shape[1] = {2};
    const char *path = file_path("header.npy");
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_F32, 1, shape), APA_STATUS_OK);
    assert_int_equal(apa_array_write_npy(path, &array, file_message, sizeof file_message), APA_STATUS_OK);
    apa_array_free(&array);
    FILE *file = fopen(path, "rb");
    const size_t n = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    assert_int_equal(n, 128 + 8);
    assert_memory_equal(bytes, "\x93NUMPY\x01\x00\x76\x00", 10);
    assert_memory_equal(bytes + 10, dict, strlen(dict));
    for (size_t i = 10 + strlen(dict); i < 127; i++)
        assert_int_equal(bytes[i], ' ');
    assert_int_equal(bytes[127], '\n');
    unlink(path);
}

/* Several files: all or none, and the old content stays when the new cannot be written. */
static void all_or_none(void **unused)
{
    (void)unused;
    apa_array array, back;
    const int64_t shape[1] = {100000};
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_F32, 1, shape), APA_STATUS_OK);
    const int before = file_count();
    char a[256], b[256], text[256];
    snprintf(a, sizeof a, "%s/pair-a.npy", file_folder);
    snprintf(b, sizeof b, "%s/nowhere/pair-b.npy", file_folder);
    snprintf(text, sizeof text, "%s/pair.txt", file_folder);
    apa_output_file files[3] = {{a, &array, NULL, 0}, {b, &array, NULL, 0}, {text, NULL, "hello\n", 6}};
    assert_int_equal(apa_files_write(files, 3, file_message, sizeof file_message), APA_STATUS_IO);
    assert_int_equal(strncmp(file_message, b, strlen(b)), 0);
    assert_int_equal(file_count(), before);

    files[1].path = a;
    assert_int_equal(apa_files_write(files, 3, file_message, sizeof file_message), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(file_count(), before);

    file_put(a, "old", 3);
    snprintf(b, sizeof b, "%s/pair-b.npy", file_folder);
    files[1].path = b;
    /* A full disk, as a limit on file sizes: writing fails half way. */
    struct rlimit old, small;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    small.rlim_cur = 100000;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    const apa_status status = apa_files_write(files, 3, file_message, sizeof file_message);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, handler);
    assert_int_equal(status, APA_STATUS_IO);
    assert_non_null(strstr(file_message, "cannot be written"));
    assert_int_equal(file_count(), before + 1);
    struct stat info;
    assert_int_equal(stat(a, &info), 0);
    assert_int_equal(info.st_size, 3);

    assert_int_equal(apa_files_write(files, 3, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(file_count(), before + 3);
    assert_int_equal(apa_array_read(b, &back, file_message, sizeof file_message), APA_STATUS_OK);
    apa_array_free(&back);
    assert_int_equal(stat(text, &info), 0);
    assert_int_equal(info.st_size, 6);
    unlink(a);
    unlink(b);
    unlink(text);
    apa_array_free(&array);
}

/* A device is written to, not replaced; a link keeps being one. */
static void special_targets(void **unused)
{
    (void)unused;
    apa_array array, back;
    const int64_t shape[1] = {4};
    struct stat info;
    assert_int_equal(apa_array_allocate(&array, APA_ARRAY_F64, 1, shape), APA_STATUS_OK);
    assert_int_equal(apa_array_write_npy("/dev/null", &array, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(stat("/dev/null", &info), 0);
    assert_true(S_ISCHR(info.st_mode));
    assert_int_equal(apa_array_write_npy("/dev/full", &array, file_message, sizeof file_message), APA_STATUS_IO);
    assert_int_equal(apa_array_write_npy(file_folder, &array, file_message, sizeof file_message), APA_STATUS_IO);
    const char *target = file_path("target.npy"), *link = file_path("link.npy");
    file_put(target, "x", 1);
    assert_int_equal(symlink(target, link), 0);
    assert_int_equal(apa_array_write_npy(link, &array, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    assert_int_equal(apa_array_read(target, &back, file_message, sizeof file_message), APA_STATUS_OK);
    apa_array_free(&back);
    apa_array_free(&array);
    unlink(target);
    unlink(link);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(array_limits), cmocka_unit_test(write_and_read),  cmocka_unit_test(written_header),
        cmocka_unit_test(all_or_none),  cmocka_unit_test(special_targets),
    };
    return cmocka_run_group_tests(tests, file_setup, file_teardown);
}
