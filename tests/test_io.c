/* Files that are good, byte by byte, and files that must be refused, each with its line. */
#include "support/files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------- .npy */

static const float six[6] = {0, 1, -2.5f, 3, 1e30f, -0.0f};

static void put_npy(const char *path, int major, const char *dict, const void *data, size_t data_size)
{
    unsigned char bytes[2048];
    file_put(path, bytes, file_make_npy(bytes, major, dict, data, data_size));
}

static void npy_good(void **unused)
{
    (void)unused;
    static const char *const dicts[] = {
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n",
        "{'descr': '=f4', 'fortran_order': False, 'shape': (2, 3)}",
        "{\"shape\":(2,3),\"descr\":\"<f4\",\"fortran_order\":False}   \n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }",
        "  { 'descr' : '<f4' ,\n 'fortran_order' : False , 'shape' : ( 2 , 3 , ) , }  ",
        "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 6, 1), }",
    };
    const char *path = file_path("good.npy");
    for (size_t i = 0; i < sizeof dicts / sizeof dicts[0]; i++)
        for (int major = 1; major <= 3; major++) {
            apa_array array;
            put_npy(path, major, dicts[i], six, sizeof six);
            assert_int_equal(apa_array_read(path, &array, file_message, sizeof file_message), APA_STATUS_OK);
            assert_int_equal(array.type, APA_ARRAY_F32);
            assert_int_equal(array.elements, 6);
            assert_int_equal(array.dims, i == 5 ? 3 : 2);
            assert_int_equal(array.shape[1], i == 5 ? 6 : 3);
            assert_int_equal((uintptr_t)array.data % 64, 0);
            assert_memory_equal(array.data, six, sizeof six);
            apa_array_free(&array);
            assert_null(array.data);
        }
}

/* numpy 2.4: numpy.save of array([[1.5, -2], [0.25, 65504]], float16), header padded to 128 bytes. */
static void npy_from_numpy(void **unused)
{
    (void)unused;
    static const char dict[] =
        "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 2), }                              "
        "                            \n";
    static const uint16_t codes[4] = {0x3e00, 0xc000, 0x3400, 0x7bff};
    const double expected[4] = {1.5, -2, 0.25, 65504};
    double values[4];
    apa_array array;
    const char *path = file_path("numpy.npy");
    put_npy(path, 1, dict, codes, sizeof codes);
    assert_int_equal(apa_array_read(path, &array, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(apa_array_get_f64(&array, 0, 4, values), APA_STATUS_OK);
    for (int i = 0; i < 4; i++)
        assert_true(values[i] == expected[i]);
    assert_int_equal(apa_array_get_f64(&array, 3, 2, values), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_array_get_f64(&array, -1, 1, values), APA_STATUS_INVALID_ARGUMENT);
    apa_array_free(&array);
}

static void npy_shapes(void **unused)
{
    (void)unused;
    apa_array array;
    const char *path = file_path("shape.npy");
    put_npy(path, 1, "{'descr': '<f8', 'fortran_order': False, 'shape': ()}", "\0\0\0\0\0\0\xf0\x3f", 8);
    assert_int_equal(apa_array_read(path, &array, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(array.dims, 0);
    assert_true(*(double *)array.data == 1.0);
    apa_array_free(&array);
    put_npy(path, 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (3,)}", "\0\1\1", 3);
    assert_int_equal(apa_array_read(path, &array, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(array.type, APA_ARRAY_BOOL);
    apa_array_free(&array);
    put_npy(path, 1, "{'descr': '<f4', 'fortran_order': True, 'shape': (0, 4, 5)}", "", 0);
    assert_int_equal(apa_array_read(path, &array, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(array.elements, 0);
    assert_non_null(array.data);
    apa_array_free(&array);
}

static void npy_refused(void **unused)
{
    (void)unused;
    const struct {
        const char *dict, *says;
    } bad[] = {
        {"{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3)}", "big endian"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3)}", "dtype '<i4', expected '<f2'"},
        {"{'descr': '|V2', 'fortran_order': False, 'shape': (2, 3)}", "use .safetensors"},
        {"{'descr': '', 'fortran_order': False, 'shape': (2, 3)}", "dtype ''"},
        {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 3)}", "structured"},
        {"{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}", "Fortran order"},
        {"{'descr': '<f4', 'fortran_order': 0, 'shape': (2, 3)}", "neither True nor False"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (6)}", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (-6,)}", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,6)}", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}", "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", "overflows"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4294967296, 4294967296)}", "overflows"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4)}",
         "truncated: header says 32 bytes of data, file has 24"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000)}",
         "truncated: header says 4000000000000 bytes of data, file has 24"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2)}",
         "too long: header says 16 bytes of data, file has 24"},
        {"{'descr': '<f4', 'fortran_order': False}", "missing"},
        {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", "twice"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'x': 1}", "other than"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)} x", "after the dict"},
        {"{'descr': '<f4' 'fortran_order': False, 'shape': (2, 3)}", "without ','"},
        {"[]", "no dict"},
        {"", "no dict"},
        {"{", "key"},
    };
    const char *path = file_path("bad.npy");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        put_npy(path, 1, bad[i].dict, six, sizeof six);
        file_refused(path, APA_STATUS_BAD_FILE, bad[i].says);
    }
    put_npy(path, 4, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", six, sizeof six);
    file_refused(path, APA_STATUS_BAD_FILE, "version 4.0");
    put_npy(path, 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (3,)}", "\0\1\2", 3);
    file_refused(path, APA_STATUS_BAD_FILE, "bool element 2 is 2");
    file_put(path, "\x93NUMPY\x02\0\xff\xff\xff\x7f{", 13);
    file_refused(path, APA_STATUS_BAD_FILE, "header of 2147483647 bytes");
    file_put(path, "NUMPY\x93....................", 24);
    file_refused(path, APA_STATUS_BAD_FILE, "magic");
    file_put(path, "", 0);
    file_refused(path, APA_STATUS_BAD_FILE, "truncated: 0 bytes");
    file_refused(file_path("missing.npy"), APA_STATUS_IO, "No such file");
    file_refused(file_path("x.txt"), APA_STATUS_UNSUPPORTED, "ending not known");
    const char *directory = file_path("directory.npy");
    assert_int_equal(mkdir(directory, 0700), 0);
    file_refused(directory, APA_STATUS_IO, "is a directory");
    assert_int_equal(rmdir(directory), 0);
    const char *fifo = file_path("fifo.npy");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    file_refused(fifo, APA_STATUS_IO, "a pipe or device");
    assert_int_equal(unlink(fifo), 0);
}

/* ------------------------------------------------------------------------------- .safetensors */

static void put_safetensors(const char *path, const char *header, size_t data_size)
{
    unsigned char bytes[8192];
    file_put(path, bytes, file_make_safetensors(bytes, header, data_size));
}

#define TWO "\"a\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]}"

static void safetensors_good(void **unused)
{
    (void)unused;
    const char *path = file_path("good.safetensors"), *name = file_path("good.safetensors:b");
    char by_a[256], text[512];
    apa_array array;
    put_safetensors(path,
                    " {\"__metadata__\":{\"format\":\"pt\",\"n\":[1,-2.5e3,true,null,{}]} , " TWO
                    ",\"b\":{\"data_offsets\":[12,15],\"x\":[[]],\"shape\":[3],\"dtype\":\"BOOL\"},"
                    "\"i\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[15,23]}}   ",
                    23);
    assert_int_equal(apa_array_read(name, &array, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(array.type, APA_ARRAY_BOOL);
    assert_int_equal(array.elements, 3);
    apa_array_free(&array);
    snprintf(by_a, sizeof by_a, "%s:a", path);
    assert_int_equal(apa_array_read(by_a, &array, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(array.type, APA_ARRAY_BF16);
    assert_int_equal(array.dims, 2);
    assert_int_equal(array.shape[0] * 10 + array.shape[1], 23);
    apa_array_free(&array);
    file_refused(path, APA_STATUS_BAD_FILE, "holds 3 tensors, expected FILE:NAME with one of: a, b, i");
    file_refused(file_path("good.safetensors:c"), APA_STATUS_BAD_FILE,
                 "no tensor of that name, expected one of: a, b, i");
    file_refused(file_path("good.safetensors:"), APA_STATUS_BAD_FILE, "no tensor of that name");
    file_refused(file_path("good.safetensors:i"), APA_STATUS_BAD_FILE, "dtype I64");
    assert_int_equal(apa_file_describe(path, text, sizeof text, file_message, sizeof file_message), APA_STATUS_OK);
    assert_string_equal(text, "a bf16 [2, 3]\nb bool [3]\ni I64 []\n");
    assert_int_equal(apa_file_describe(path, text, 10, file_message, sizeof file_message), APA_STATUS_INVALID_ARGUMENT);
    put_safetensors(path, "{\"\\u0061\\ud83d\\ude00\\n\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    snprintf(by_a, sizeof by_a, "%s:a\xf0\x9f\x98\x80\n", path);
    assert_int_equal(apa_array_read(by_a, &array, file_message, sizeof file_message), APA_STATUS_OK);
    apa_array_free(&array);
    assert_int_equal(apa_array_read(path, &array, file_message, sizeof file_message), APA_STATUS_OK); /* the only one */
    apa_array_free(&array);
    assert_int_equal(apa_file_describe(path, text, sizeof text, file_message, sizeof file_message), APA_STATUS_OK);
    assert_string_equal(text, "a\xf0\x9f\x98\x80? f32 [1]\n");
}

static void safetensors_refused(void **unused)
{
    (void)unused;
    const struct {
        const char *header;
        size_t data;
        const char *says;
    } bad[] = {
        {"{" TWO "}", 11, "do not lie in the file's 11 bytes"},
        {"{" TWO "}", 13, "speaks for 12 bytes of data, the file has 13"},
        {"{" TWO "," TWO "}", 12, "begins at byte 0 of the data, expected 12"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_"
         "offsets\":[4,8]}}",
         8, "twice"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "expected 8 from dtype and shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "do not lie"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1,5]}}", 5, "begins at byte 1"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "overflows"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[0,4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "overflows"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,0]}}", 0, "beyond 2^63"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "no whole number"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4, "fraction"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]}}", 4, "leading zero"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]}}", 4, "not two numbers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "without dtype, shape or data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
         "twice in one tensor"},
        {"{\"a\":[]}", 0, "no object"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}} x", 4, "after the JSON object"},
        {"{\"__metadata__\":[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]}", 0, "nesting"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ twice"},
        {"{\"\\ud800\":{}}", 0, "surrogate"},
        {"{\"\\ud800\\u0041\":{}}", 0, "surrogate"},
        {"{\"\\x\":{}}", 0, "unknown escape"},
        {"{\"\\u12g4\":{}}", 0, "hexadecimal"},
        {"{\"a\n\":{}}", 0, "control character"},
        {"{\"a", 0, "does not end"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,],\"data_offsets\":[0,4]}}", 4, "no whole number"},
        {"{}", 0, "holds no tensor"},
        {"", 0, "no JSON object"},
        {"[]", 0, "no JSON object"},
    };
    const char *path = file_path("bad.safetensors");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        put_safetensors(path, bad[i].header, bad[i].data);
        file_refused(path, APA_STATUS_BAD_FILE, bad[i].says);
    }
    file_put(path, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    file_refused(path, APA_STATUS_BAD_FILE, "header says 18446744073709551615 bytes, expected at most 2");
    file_put(path, "\0\0\0", 3);
    file_refused(path, APA_STATUS_BAD_FILE, "truncated: 3 bytes");
}

/* A header of many empty tensors: the list is bounded by the file, and names stay few in the message. */
static void safetensors_many(void **unused)
{
    (void)unused;
    const int count = 2000;
    char *header = malloc((size_t)count * 80), *at = header;
    *at++ = '{';
    for (int i = 0; i < count; i++)
        at += sprintf(at, "%s\"t%d\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}", i == 0 ? "" : ",", i);
    *at++ = '}';
    const uint64_t n = (uint64_t)(at - header);
    unsigned char *bytes = malloc(n + 8);
    memcpy(bytes, &n, 8);
    memcpy(bytes + 8, header, n);
    const char *path = file_path("many.safetensors");
    file_put(path, bytes, n + 8);
    file_refused(path, APA_STATUS_BAD_FILE, "holds 2000 tensors");
    assert_non_null(strstr(file_message, "…"));
    apa_array array;
    assert_int_equal(apa_array_read(file_path("many.safetensors:t1234"), &array, file_message, sizeof file_message),
                     APA_STATUS_OK);
    apa_array_free(&array);
    free(bytes);
    free(header);
}

/* ------------------------------------------------------------------------------- dumps */

static void dump_good(void **unused)
{
    (void)unused;
    const int32_t header[6] = {3, 5, 4, 2, 8, 2}; /* n, kv, nh, nkv, hd, off */
    unsigned char bytes[2048];
    char text[256];
    apa_dump dump;
    const char *path = file_path("a.dump");
    file_put(path, bytes, file_make_dump(bytes, header));
    assert_int_equal(apa_dump_read(path, &dump, file_message, sizeof file_message), APA_STATUS_OK);
    assert_int_equal(dump.q_offset, 2);
    const apa_array *const array[3] = {&dump.q, &dump.k, &dump.v};
    const int64_t heads[3] = {4, 2, 2}, positions[3] = {3, 5, 5}, start[3] = {0, 96, 96 + 80};
    for (int a = 0; a < 3; a++) {
        assert_int_equal(array[a]->dims, 4);
        assert_int_equal(array[a]->shape[0], 1);
        assert_int_equal(array[a]->shape[1], heads[a]);
        assert_int_equal(array[a]->shape[2], positions[a]);
        assert_int_equal(array[a]->shape[3], 8);
        for (int64_t h = 0; h < heads[a]; h++)
            for (int64_t s = 0; s < positions[a]; s++)
                for (int64_t d = 0; d < 8; d++)
                    assert_int_equal(((const uint16_t *)array[a]->data)[(h * positions[a] + s) * 8 + d],
                                     start[a] + (s * heads[a] + h) * 8 + d);
    }
    apa_dump_free(&dump);
    assert_null(dump.q.data);
    assert_int_equal(apa_file_describe(path, text, sizeof text, file_message, sizeof file_message), APA_STATUS_OK);
    assert_string_equal(text, "q f16 [1, 4, 3, 8] (query 0 at position 2)\nk f16 [1, 2, 5, 8]\nv f16 [1, 2, 5, 8]\n");
}

static void dump_refused(void **unused)
{
    (void)unused;
    static const struct {
        int32_t header[6];
        const char *says;
    } bad[] = {
        {{3, 5, 4, 2, 9, 2}, "truncated"},
        {{3, 5, 4, 2, 7, 2}, "too long"},
        {{-3, 5, 4, 2, 8, 2}, "n -3"},
        {{3, 5, 0, 2, 8, 2}, "nh 0"},
        {{3, 5, 4, 2, -8, 2}, "hd -8"},
        {{INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, 0}, "overflow"},
        {{0, 0, INT32_MAX, INT32_MAX, INT32_MAX, 0}, "overflow"},
        {{INT32_MAX, 5, INT32_MAX, 2, 1, 0}, "overflow"},
        {{30000, 5, 30000, 2, 1, 0}, "truncated"},
    };
    const int32_t good[6] = {3, 5, 4, 2, 8, 2};
    unsigned char bytes[2048];
    const size_t size = file_make_dump(bytes, good);
    const char *path = file_path("bad.dump");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        apa_dump dump;
        memcpy(bytes, bad[i].header, 24);
        file_put(path, bytes, size);
        assert_int_equal(apa_dump_read(path, &dump, file_message, sizeof file_message), APA_STATUS_BAD_FILE);
        if (strstr(file_message, bad[i].says) == NULL)
            print_error("%s\n", file_message);
        assert_non_null(strstr(file_message, bad[i].says));
        assert_null(dump.q.data);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(npy_good),         cmocka_unit_test(npy_from_numpy),   cmocka_unit_test(npy_shapes),
        cmocka_unit_test(npy_refused),      cmocka_unit_test(safetensors_good), cmocka_unit_test(safetensors_refused),
        cmocka_unit_test(safetensors_many), cmocka_unit_test(dump_good),        cmocka_unit_test(dump_refused),
    };
    return cmocka_run_group_tests(tests, file_setup, file_teardown);
}
