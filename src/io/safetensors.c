/* .safetensors: u64 header length, a JSON object (name → dtype, shape, data_offsets), then the tensors' bytes.
 *
 * The whole header is parsed and checked before any tensor is read: names differ, every tensor's bytes match its shape,
 * and the tensors cover the data part without gaps or overlaps, as the format demands. Source: the format's public
 * README. */
#include "io/io_internal.h"
#include "io/json.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HEADER ((int64_t)100 << 20) /* the format's own limit: 100 MB */
#define MAX_DIMS 8

typedef struct tensor_entry {
    apa_json_string name, dtype;
    int32_t dims; /* more than MAX_DIMS is allowed in the file, but such a tensor cannot be read */
    int64_t shape[MAX_DIMS];
    int64_t elements;
    int64_t begin, end; /* bytes from the start of the data part */
} tensor_entry;

typedef struct tensor_list {
    char *header;
    tensor_entry *entry;
    size_t count, room;
    int64_t data_offset, data_bytes;
} tensor_list;

static const struct {
    const char *name;
    int64_t bytes;
    int type; /* apa_array_type, 0 when it is no type of ours */
} dtypes[] = {{"F16", 2, APA_ARRAY_F16},
              {"BF16", 2, APA_ARRAY_BF16},
              {"F32", 4, APA_ARRAY_F32},
              {"F64", 8, APA_ARRAY_F64},
              {"BOOL", 1, APA_ARRAY_BOOL},
              {"I8", 1, 0},
              {"U8", 1, 0},
              {"F8_E4M3", 1, 0},
              {"F8_E5M2", 1, 0},
              {"F8_E8M0", 1, 0},
              {"I16", 2, 0},
              {"U16", 2, 0},
              {"I32", 4, 0},
              {"U32", 4, 0},
              {"I64", 8, 0},
              {"U64", 8, 0},
              {"C64", 8, 0}};

/* Index into dtypes, -1 for a name that is not there (newer formats; sub-byte types). */
static int dtype_index(apa_json_string name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (apa_json_equal(name, dtypes[i].name))
            return (int)i;
    return -1;
}

static bool parse_fault(apa_json *json, const char *what)
{
    json->fault = what;
    return false;
}

/* "[1, 2, 3]" into at most `room` numbers; *count may exceed it. *product: of all of them, -1 on overflow. */
static bool parse_numbers(apa_json *json, int64_t *to, int32_t room, int32_t *count, int64_t *product)
{
    *count = 0;
    *product = 1;
    bool empty = false;
    if (!apa_json_take(json, '['))
        return parse_fault(json, "no array where one must be");
    if (apa_json_take(json, ']'))
        return true;
    for (bool more = true; more; ++*count) {
        int64_t value;
        if (!apa_json_unsigned(json, &value))
            return false;
        if (*count < room)
            to[*count] = value;
        if (value == 0)
            empty = true;
        else if (*product > 0 && (__builtin_mul_overflow(*product, value, product) || *product > (int64_t)1 << 59))
            *product = -1;
        if (!apa_json_next(json, ']', &more))
            return false;
    }
    if (empty && *product > 0)
        *product = 0;
    return true;
}

static bool parse_field(apa_json *json, tensor_entry *entry, unsigned *seen)
{
    apa_json_string key;
    if (!apa_json_string_read(json, &key))
        return false;
    if (!apa_json_take(json, ':'))
        return parse_fault(json, "a key without ':'");
    const unsigned bit = apa_json_equal(key, "dtype")          ? 1
                         : apa_json_equal(key, "shape")        ? 2
                         : apa_json_equal(key, "data_offsets") ? 4
                                                               : 0;
    if (bit == 0)
        return apa_json_skip(json);
    if (*seen & bit)
        return parse_fault(json, "dtype, shape or data_offsets twice in one tensor");
    *seen |= bit;
    if (bit == 1)
        return apa_json_string_read(json, &entry->dtype);
    if (bit == 2)
        return parse_numbers(json, entry->shape, MAX_DIMS, &entry->dims, &entry->elements);
    int64_t offset[2], ignored;
    int32_t count;
    if (!parse_numbers(json, offset, 2, &count, &ignored))
        return false;
    if (count != 2)
        return parse_fault(json, "data_offsets that are not two numbers");
    entry->begin = offset[0];
    entry->end = offset[1];
    return true;
}

static bool parse_tensor(apa_json *json, tensor_entry *entry)
{
    unsigned seen = 0;
    if (!apa_json_take(json, '{'))
        return parse_fault(json, "a tensor that is no object");
    if (!apa_json_take(json, '}'))
        for (bool more = true; more;)
            if (!parse_field(json, entry, &seen) || !apa_json_next(json, '}', &more))
                return false;
    return seen == 7 || parse_fault(json, "a tensor without dtype, shape or data_offsets");
}

/* A place for one more entry. An entry takes over 40 bytes of header, so the list is bounded by the file. */
static tensor_entry *add_entry(tensor_list *list)
{
    if (list->count == list->room) {
        const size_t room = list->room == 0 ? 16 : list->room * 2;
        tensor_entry *grown = realloc(list->entry, room * sizeof *grown);
        if (grown == NULL)
            return NULL;
        list->entry = grown;
        list->room = room;
    }
    tensor_entry *entry = &list->entry[list->count++];
    memset(entry, 0, sizeof *entry);
    return entry;
}

static bool parse_header(apa_json *json, tensor_list *list)
{
    bool metadata = false;
    if (!apa_json_take(json, '{'))
        return parse_fault(json, "no JSON object");
    if (!apa_json_take(json, '}'))
        for (bool more = true; more;) {
            apa_json_string name;
            if (!apa_json_string_read(json, &name))
                return false;
            if (!apa_json_take(json, ':'))
                return parse_fault(json, "a key without ':'");
            if (apa_json_equal(name, "__metadata__")) {
                if (metadata)
                    return parse_fault(json, "__metadata__ twice");
                metadata = true;
                if (!apa_json_skip(json))
                    return false;
            } else {
                tensor_entry *entry = add_entry(list);
                if (entry == NULL)
                    return parse_fault(json, NULL);
                entry->name = name;
                if (!parse_tensor(json, entry))
                    return false;
            }
            if (!apa_json_next(json, '}', &more))
                return false;
        }
    return apa_json_at_end(json) || parse_fault(json, "bytes after the JSON object");
}

static int by_name(const void *a, const void *b)
{
    const apa_json_string *x = &((const tensor_entry *)a)->name, *y = &((const tensor_entry *)b)->name;
    const size_t n = x->length < y->length ? x->length : y->length;
    const int order = memcmp(x->text, y->text, n);
    return order != 0 ? order : (x->length > y->length) - (x->length < y->length);
}

static int by_place(const void *a, const void *b)
{
    const tensor_entry *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static int shown(apa_json_string name)
{
    return name.length > 60 ? 60 : (int)name.length;
}

static apa_status check_entry(const tensor_list *list, const tensor_entry *entry, const apa_io_report *report)
{
    const int n = shown(entry->name);
    const char *name = entry->name.text;
    if (entry->begin > entry->end || entry->end > list->data_bytes)
        return apa_io_fail(report, APA_STATUS_BAD_FILE,
                           "%.*s: data_offsets %" PRId64 " … %" PRId64 " do not lie in the file's %" PRId64
                           " bytes of data",
                           n, name, entry->begin, entry->end, list->data_bytes);
    if (entry->elements < 0)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "%.*s: shape overflows, expected at most 2^59 elements", n,
                           name);
    const int index = dtype_index(entry->dtype);
    if (index >= 0 && entry->elements * dtypes[index].bytes != entry->end - entry->begin)
        return apa_io_fail(report, APA_STATUS_BAD_FILE,
                           "%.*s: data_offsets span %" PRId64 " bytes, expected %" PRId64 " from dtype and shape", n,
                           name, entry->end - entry->begin, entry->elements * dtypes[index].bytes);
    return APA_STATUS_OK;
}

/* Leaves the list in order of names. */
static apa_status check_list(tensor_list *list, const apa_io_report *report)
{
    for (size_t i = 0; i < list->count; i++) {
        apa_status status = check_entry(list, &list->entry[i], report);
        if (status != APA_STATUS_OK)
            return status;
    }
    if (list->count > 0)
        qsort(list->entry, list->count, sizeof *list->entry, by_place);
    int64_t covered = 0;
    for (size_t i = 0; i < list->count; i++) {
        const tensor_entry *entry = &list->entry[i];
        if (entry->begin != covered)
            return apa_io_fail(report, APA_STATUS_BAD_FILE,
                               "%.*s: begins at byte %" PRId64 " of the data, expected %" PRId64, shown(entry->name),
                               entry->name.text, entry->begin, covered);
        covered = entry->end;
    }
    if (covered != list->data_bytes)
        return apa_io_fail(report, APA_STATUS_BAD_FILE,
                           "the header speaks for %" PRId64 " bytes of data, the file has %" PRId64, covered,
                           list->data_bytes);
    if (list->count > 0)
        qsort(list->entry, list->count, sizeof *list->entry, by_name);
    for (size_t i = 1; i < list->count; i++)
        if (by_name(&list->entry[i - 1], &list->entry[i]) == 0)
            return apa_io_fail(report, APA_STATUS_BAD_FILE, "the name \"%.*s\" is there twice",
                               shown(list->entry[i].name), list->entry[i].name.text);
    return APA_STATUS_OK;
}

static void free_list(tensor_list *list)
{
    free(list->entry);
    free(list->header);
    memset(list, 0, sizeof *list);
}

static apa_status read_list(const apa_io_file *file, tensor_list *list, const apa_io_report *report)
{
    unsigned char head[8];
    memset(list, 0, sizeof *list);
    if (file->size < 8)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "truncated: %" PRId64 " bytes, expected a header", file->size);
    apa_status status = apa_io_read(file, 0, head, 8, report);
    if (status != APA_STATUS_OK)
        return status;
    uint64_t length;
    memcpy(&length, head, 8);
    if (length > (uint64_t)MAX_HEADER || (int64_t)length > file->size - 8)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "header says %" PRIu64 " bytes, expected at most %" PRId64,
                           length, file->size - 8 < MAX_HEADER ? file->size - 8 : MAX_HEADER);
    list->header = malloc((size_t)length + 1);
    if (list->header == NULL)
        return apa_io_fail(report, APA_STATUS_OUT_OF_MEMORY, "no memory for a header of %" PRIu64 " bytes", length);
    list->data_offset = 8 + (int64_t)length;
    list->data_bytes = file->size - list->data_offset;
    status = apa_io_read(file, 8, list->header, (int64_t)length, report);
    apa_json json = {list->header, list->header + length, 0, NULL};
    if (status == APA_STATUS_OK && !parse_header(&json, list))
        status = json.fault == NULL ? apa_io_fail(report, APA_STATUS_OUT_OF_MEMORY, "no memory for the list of tensors")
                                    : apa_io_fail(report, APA_STATUS_BAD_FILE, "malformed header: %s", json.fault);
    if (status == APA_STATUS_OK)
        status = check_list(list, report);
    if (status != APA_STATUS_OK)
        free_list(list);
    return status;
}

/* Names for a message: as many as fit. */
static void list_names(const tensor_list *list, char *text, size_t size)
{
    apa_io_text names = {text, size, 0, false};
    text[0] = '\0';
    for (size_t i = 0; i < list->count; i++) {
        const size_t before = names.used;
        apa_io_append(&names, "%s%.*s", i == 0 ? "" : ", ", shown(list->entry[i].name), list->entry[i].name.text);
        if (names.overflow || names.used + 6 > size) {
            names.overflow = false;
            names.used = before;
            apa_io_append(&names, ", …");
            return;
        }
    }
}

static apa_status find_entry(const tensor_list *list, const char *name, const tensor_entry **found,
                             const apa_io_report *report)
{
    char names[200];
    for (size_t i = 0; name != NULL && i < list->count; i++)
        if (apa_json_equal(list->entry[i].name, name)) {
            *found = &list->entry[i];
            return APA_STATUS_OK;
        }
    if (name == NULL && list->count == 1) {
        *found = &list->entry[0];
        return APA_STATUS_OK;
    }
    list_names(list, names, sizeof names);
    if (list->count == 0)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "holds no tensor");
    if (name == NULL)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "holds %zu tensors, expected FILE:NAME with one of: %s",
                           list->count, names);
    return apa_io_fail(report, APA_STATUS_BAD_FILE, "no tensor of that name, expected one of: %s", names);
}

apa_status apa_safetensors_read(const char *path, const char *name, apa_array *array, const apa_io_report *report)
{
    apa_io_file file;
    apa_status status = apa_io_open(path, &file, report);
    if (status != APA_STATUS_OK)
        return status;
    tensor_list list;
    const tensor_entry *entry = NULL;
    status = read_list(&file, &list, report);
    if (status == APA_STATUS_OK)
        status = find_entry(&list, name, &entry, report);
    if (status == APA_STATUS_OK) {
        const int index = dtype_index(entry->dtype);
        if (index < 0 || dtypes[index].type == 0)
            status = apa_io_fail(report, APA_STATUS_BAD_FILE, "dtype %.*s, expected F16, BF16, F32, F64 or BOOL",
                                 shown(entry->dtype), entry->dtype.text);
        else if (entry->dims > MAX_DIMS)
            status = apa_io_fail(report, APA_STATUS_BAD_FILE, "%d dimensions, expected at most %d", (int)entry->dims,
                                 MAX_DIMS);
        else
            status = apa_io_fill(&file, list.data_offset + entry->begin, (apa_array_type)dtypes[index].type,
                                 entry->dims, entry->shape, array, report);
    }
    free_list(&list);
    apa_io_close(&file);
    return status;
}

/* The name with control bytes as '?', so that one array stays one line. */
static void append_name(apa_io_text *text, apa_json_string name)
{
    for (size_t i = 0; i < name.length; i++) {
        const unsigned char c = (unsigned char)name.text[i];
        apa_io_append(text, "%c", c < 0x20 || c == 0x7f ? '?' : c);
    }
}

apa_status apa_safetensors_describe(const char *path, apa_io_text *text, const apa_io_report *report)
{
    apa_io_file file;
    apa_status status = apa_io_open(path, &file, report);
    if (status != APA_STATUS_OK)
        return status;
    tensor_list list;
    status = read_list(&file, &list, report);
    for (size_t i = 0; status == APA_STATUS_OK && i < list.count; i++) {
        const tensor_entry *entry = &list.entry[i];
        const int index = dtype_index(entry->dtype);
        append_name(text, entry->name);
        if (index >= 0 && dtypes[index].type != 0)
            apa_io_append(text, " %s ", apa_io_type_name((apa_array_type)dtypes[index].type));
        else
            apa_io_append(text, " %.*s ", shown(entry->dtype), entry->dtype.text);
        apa_io_append_shape(text, entry->dims > MAX_DIMS ? MAX_DIMS : entry->dims, entry->shape);
        apa_io_append(text, entry->dims > MAX_DIMS ? " and more dimensions\n" : "\n");
    }
    free_list(&list);
    apa_io_close(&file);
    return status;
}
