/* Arrays in memory, and the entry points that choose a format by a path's ending. */
#include "io/io_internal.h"

#include "core/context_internal.h"
#include "formats/formats.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ELEMENTS ((int64_t)1 << 59)
#define MAX_DIMS 8

int64_t apa_io_type_bytes(apa_array_type type)
{
    switch (type) {
    case APA_ARRAY_BOOL:
        return 1;
    case APA_ARRAY_F16:
    case APA_ARRAY_BF16:
        return 2;
    case APA_ARRAY_F32:
        return 4;
    case APA_ARRAY_F64:
        return 8;
    }
    return 0;
}

const char *apa_io_type_name(apa_array_type type)
{
    switch (type) {
    case APA_ARRAY_BOOL:
        return "bool";
    case APA_ARRAY_F16:
        return "f16";
    case APA_ARRAY_BF16:
        return "bf16";
    case APA_ARRAY_F32:
        return "f32";
    case APA_ARRAY_F64:
        return "f64";
    }
    return "unknown";
}

bool apa_io_count(int32_t dims, const int64_t *shape, int64_t *elements)
{
    int64_t product = 1;
    bool empty = false;
    if (dims < 0 || dims > MAX_DIMS)
        return false;
    for (int32_t i = 0; i < dims; i++) {
        if (shape[i] < 0)
            return false;
        if (shape[i] == 0)
            empty = true;
        else if (__builtin_mul_overflow(product, shape[i], &product) || product > MAX_ELEMENTS)
            return false;
    }
    *elements = empty ? 0 : product;
    return true;
}

apa_status apa_io_make(apa_array *array, apa_array_type type, int32_t dims, const int64_t *shape,
                       const apa_io_report *report)
{
    memset(array, 0, sizeof *array);
    int64_t elements;
    const int64_t bytes = apa_io_type_bytes(type);
    if (bytes == 0 || !apa_io_count(dims, shape, &elements))
        return apa_io_fail(report, APA_STATUS_INVALID_ARGUMENT, "type or shape of the array is out of range");
    array->data = apa_aligned_allocate((size_t)elements, (size_t)bytes);
    if (array->data == NULL)
        return apa_io_fail(report, APA_STATUS_OUT_OF_MEMORY, "%" PRId64 " bytes of memory could not be had",
                           elements * bytes);
    array->type = type;
    array->dims = dims;
    for (int32_t i = 0; i < dims; i++)
        array->shape[i] = shape[i];
    array->elements = elements;
    return APA_STATUS_OK;
}

apa_status apa_io_fill(const apa_io_file *file, int64_t offset, apa_array_type type, int32_t dims, const int64_t *shape,
                       apa_array *array, const apa_io_report *report)
{
    apa_status status = apa_io_make(array, type, dims, shape, report);
    if (status != APA_STATUS_OK)
        return status;
    status = apa_io_read(file, offset, array->data, array->elements * apa_io_type_bytes(type), report);
    const unsigned char *byte = array->data;
    for (int64_t i = 0; status == APA_STATUS_OK && type == APA_ARRAY_BOOL && i < array->elements; i++)
        if (byte[i] > 1)
            status =
                apa_io_fail(report, APA_STATUS_BAD_FILE, "bool element %" PRId64 " is %d, expected 0 or 1", i, byte[i]);
    if (status != APA_STATUS_OK)
        apa_array_free(array);
    return status;
}

apa_status apa_array_allocate(apa_array *array, apa_array_type type, int32_t dims, const int64_t *shape)
{
    const apa_io_report silent = {NULL, NULL, 0};
    if (array == NULL || (shape == NULL && dims > 0))
        return APA_STATUS_INVALID_ARGUMENT;
    apa_status status = apa_io_make(array, type, dims, shape, &silent);
    if (status == APA_STATUS_OK)
        memset(array->data, 0, (size_t)(array->elements * apa_io_type_bytes(type)));
    return status;
}

void apa_array_free(apa_array *array)
{
    if (array == NULL)
        return;
    apa_aligned_free(array->data);
    memset(array, 0, sizeof *array);
}

/* ------------------------------------------------------------------------------- elements as doubles */

static bool in_range(const apa_array *array, int64_t first, int64_t count)
{
    return array != NULL && first >= 0 && count >= 0 && first <= array->elements && count <= array->elements - first;
}

apa_status apa_array_get_f64(const apa_array *array, int64_t first, int64_t count, double *values)
{
    if (!in_range(array, first, count))
        return APA_STATUS_INVALID_ARGUMENT;
    const int64_t bytes = apa_io_type_bytes(array->type);
    const char *from = (const char *)array->data + first * bytes;
    for (int64_t i = 0; i < count; i++, from += bytes)
        switch (array->type) {
        case APA_ARRAY_F16:
            values[i] = (double)apa_f16_to_f32(*(const uint16_t *)(const void *)from);
            break;
        case APA_ARRAY_BF16:
            values[i] = (double)apa_bf16_to_f32(*(const uint16_t *)(const void *)from);
            break;
        case APA_ARRAY_F32:
            values[i] = (double)*(const float *)(const void *)from;
            break;
        case APA_ARRAY_F64:
            values[i] = *(const double *)(const void *)from;
            break;
        case APA_ARRAY_BOOL:
            values[i] = *from != 0;
            break;
        default:
            return APA_STATUS_INVALID_ARGUMENT;
        }
    return APA_STATUS_OK;
}

apa_status apa_array_set_f64(apa_array *array, int64_t first, int64_t count, const double *values)
{
    if (!in_range(array, first, count))
        return APA_STATUS_INVALID_ARGUMENT;
    const int64_t bytes = apa_io_type_bytes(array->type);
    char *to = (char *)array->data + first * bytes;
    for (int64_t i = 0; i < count; i++, to += bytes)
        switch (array->type) {
        case APA_ARRAY_F16:
            *(uint16_t *)(void *)to = apa_f64_to_f16(values[i]);
            break;
        case APA_ARRAY_BF16:
            *(uint16_t *)(void *)to = apa_f64_to_bf16(values[i]);
            break;
        case APA_ARRAY_F32:
            *(float *)(void *)to = (float)values[i];
            break;
        case APA_ARRAY_F64:
            *(double *)(void *)to = values[i];
            break;
        case APA_ARRAY_BOOL:
            if (!(values[i] == 0 || values[i] == 1))
                return APA_STATUS_INVALID_ARGUMENT;
            *to = values[i] == 1;
            break;
        default:
            return APA_STATUS_INVALID_ARGUMENT;
        }
    return APA_STATUS_OK;
}

apa_status apa_array_tensor(const apa_array *array, int nhd, apa_tensor *tensor, char *message, size_t message_size)
{
    const apa_io_report report = {NULL, message, message_size};
    if (array == NULL || tensor == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (array->type == APA_ARRAY_BOOL)
        return apa_io_fail(&report, APA_STATUS_INVALID_ARGUMENT, "array of bool, expected f16, bf16, f32 or f64");
    if (array->dims != 3 && array->dims != 4)
        return apa_io_fail(&report, APA_STATUS_INVALID_ARGUMENT, "%d dimensions, expected 3 %s or 4 %s",
                           (int)array->dims, nhd ? "[S, H, D]" : "[H, S, D]", nhd ? "[B, S, H, D]" : "[B, H, S, D]");
    /* The array types of numbers are the tensor dtypes, value for value. */
    const apa_dtype dtype = (apa_dtype)array->type;
    const int64_t *last = array->shape + array->dims - 3;
    const int64_t batch = array->dims == 4 ? array->shape[0] : 1;
    *tensor = nhd ? apa_tensor_nhd(array->data, dtype, batch, last[1], last[0], last[2])
                  : apa_tensor_hnd(array->data, dtype, batch, last[0], last[1], last[2]);
    return APA_STATUS_OK;
}

/* ------------------------------------------------------------------------------- formats by ending */

static const char safetensors_ending[] = ".safetensors";

static bool ends_with(const char *path, const char *ending)
{
    const size_t n = strlen(path), m = strlen(ending);
    return n >= m && strcmp(path + n - m, ending) == 0;
}

/* Splits FILE.safetensors:NAME. *file is to be freed; *name points into path, or is NULL when no name is given. False:
 * not such a path (or no memory: *file NULL with *name set). */
static bool split_safetensors(const char *path, char **file, const char **name)
{
    *file = NULL;
    *name = NULL;
    size_t length = strlen(path);
    if (!ends_with(path, safetensors_ending)) {
        const char *found = strstr(path, ".safetensors:");
        if (found == NULL)
            return false;
        length = (size_t)(found - path) + strlen(safetensors_ending);
        *name = path + length + 1;
    }
    *file = malloc(length + 1);
    if (*file != NULL) {
        memcpy(*file, path, length);
        (*file)[length] = '\0';
    }
    return true;
}

apa_status apa_array_read(const char *path, apa_array *array, char *message, size_t message_size)
{
    if (path == NULL || array == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    memset(array, 0, sizeof *array);
    const apa_io_report report = {path, message, message_size};
    if (ends_with(path, ".npy"))
        return apa_npy_read(path, array, &report);
    char *file;
    const char *name;
    if (!split_safetensors(path, &file, &name))
        return apa_io_fail(&report, APA_STATUS_UNSUPPORTED,
                           "ending not known, expected .npy, .safetensors or .safetensors:NAME");
    if (file == NULL)
        return apa_io_fail(&report, APA_STATUS_OUT_OF_MEMORY, "no memory for the file's name");
    apa_status status = apa_safetensors_read(file, name, array, &report);
    free(file);
    return status;
}

static apa_status describe_npy(const char *path, apa_io_text *text, const apa_io_report *report)
{
    apa_io_file file;
    apa_status status = apa_io_open(path, &file, report);
    if (status != APA_STATUS_OK)
        return status;
    apa_npy_header header;
    status = apa_npy_header_read(&file, &header, report);
    apa_io_close(&file);
    if (status != APA_STATUS_OK)
        return status;
    apa_io_append(text, "array %s ", apa_io_type_name(header.type));
    apa_io_append_shape(text, header.dims, header.shape);
    apa_io_append(text, "\n");
    return APA_STATUS_OK;
}

apa_status apa_file_describe(const char *path, char *text, size_t text_size, char *message, size_t message_size)
{
    if (path == NULL || text == NULL || text_size == 0)
        return APA_STATUS_INVALID_ARGUMENT;
    text[0] = '\0';
    const apa_io_report report = {path, message, message_size};
    apa_io_text list = {text, text_size, 0, false};
    apa_status status;
    char *file;
    const char *name;
    if (ends_with(path, ".npy")) {
        status = describe_npy(path, &list, &report);
    } else if (split_safetensors(path, &file, &name)) {
        status = file == NULL ? apa_io_fail(&report, APA_STATUS_OUT_OF_MEMORY, "no memory for the file's name")
                              : apa_safetensors_describe(file, &list, &report);
        free(file);
    } else {
        status = apa_dump_describe(path, &list, &report);
    }
    if (status == APA_STATUS_OK && list.overflow)
        status =
            apa_io_fail(&report, APA_STATUS_INVALID_ARGUMENT, "the list of arrays is longer than %zu bytes", text_size);
    return status;
}
