/* .npy: magic "\x93NUMPY", version, header length, a Python dict literal with descr, fortran_order and shape, the data.
 *
 * The dict is read by a small recursive-descent parser over the header's bytes; it takes what numpy writes in
 * versions 1.0, 2.0 and 3.0 and whatever else the grammar of those three values allows (any order of keys, either
 * quote, spaces). Source: the format description in numpy's documentation (numpy.lib.format). */
#include "io/io_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* numpy itself refuses headers over 10000 bytes by default; ours hold at most 8 numbers and some padding. */
#define MAX_HEADER ((int64_t)65536)

typedef struct cursor {
    const char *at, *end;
} cursor;

typedef struct dict {
    char descr[32];
    bool has_descr, has_order, has_shape, structured, fortran;
    int32_t dims;
    int64_t shape[8];
    const char *fault; /* what is wrong, when parsing fails */
} dict;

static void skip_space(cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\n' || *c->at == '\r'))
        c->at++;
}

static bool take(cursor *c, char wanted)
{
    skip_space(c);
    if (c->at == c->end || *c->at != wanted)
        return false;
    c->at++;
    return true;
}

static bool take_word(cursor *c, const char *word)
{
    skip_space(c);
    const size_t n = strlen(word);
    if ((size_t)(c->end - c->at) < n || memcmp(c->at, word, n) != 0)
        return false;
    c->at += n;
    return true;
}

/* A string without escapes (none of ours needs one). */
static bool take_string(cursor *c, char *to, size_t size)
{
    skip_space(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"'))
        return false;
    const char quote = *c->at++;
    size_t n = 0;
    while (c->at < c->end && *c->at != quote) {
        if (*c->at == '\\' || (unsigned char)*c->at < 0x20 || n + 1 >= size)
            return false;
        to[n++] = *c->at++;
    }
    to[n] = '\0';
    return take(c, quote);
}

static bool take_integer(cursor *c, int64_t *value)
{
    skip_space(c);
    if (c->at == c->end || *c->at < '0' || *c->at > '9')
        return false;
    *value = 0;
    while (c->at < c->end && *c->at >= '0' && *c->at <= '9')
        if (__builtin_mul_overflow(*value, 10, value) || __builtin_add_overflow(*value, *c->at++ - '0', value))
            return false;
    if (c->at < c->end && *c->at == 'L') /* long integers, as Python 2 wrote them */
        c->at++;
    return true;
}

static bool take_shape(cursor *c, dict *d)
{
    d->fault = "shape is not a tuple of at most 8 integers";
    if (!take(c, '('))
        return false;
    d->dims = 0;
    while (!take(c, ')')) {
        if (d->dims == 8 || !take_integer(c, &d->shape[d->dims]))
            return false;
        d->dims++;
        const bool comma = take(c, ',');
        skip_space(c);
        const bool closes = c->at < c->end && *c->at == ')';
        if (!comma && (!closes || d->dims == 1)) /* (3) is a number, (3,) a tuple */
            return false;
    }
    return true;
}

static bool take_item(cursor *c, const char *key, dict *d)
{
    if (strcmp(key, "descr") == 0 && !d->has_descr) {
        d->has_descr = true;
        skip_space(c);
        d->structured = c->at < c->end && *c->at == '[';
        d->fault = d->structured ? NULL : "descr is not a short string";
        return !d->structured && take_string(c, d->descr, sizeof d->descr);
    }
    if (strcmp(key, "fortran_order") == 0 && !d->has_order) {
        d->has_order = true;
        d->fault = "fortran_order is neither True nor False";
        d->fortran = take_word(c, "True");
        return d->fortran || take_word(c, "False");
    }
    if (strcmp(key, "shape") == 0 && !d->has_shape) {
        d->has_shape = true;
        return take_shape(c, d);
    }
    d->fault = "a key twice, or other than descr, fortran_order and shape";
    return false;
}

static bool take_dict(cursor *c, dict *d)
{
    d->fault = "no dict literal";
    if (!take(c, '{'))
        return false;
    while (!take(c, '}')) {
        char key[32];
        d->fault = "a key that is no short string";
        if (!take_string(c, key, sizeof key))
            return false;
        d->fault = "a key without ':'";
        if (!take(c, ':') || !take_item(c, key, d))
            return false;
        const bool comma = take(c, ',');
        skip_space(c);
        d->fault = "items without ',' or '}' between them";
        if (!comma && !(c->at < c->end && *c->at == '}'))
            return false;
    }
    skip_space(c);
    d->fault = c->at != c->end ? "bytes after the dict" : "descr, fortran_order or shape missing";
    return c->at == c->end && d->has_descr && d->has_order && d->has_shape;
}

static apa_status type_of(const dict *d, apa_array_type *type, const apa_io_report *report)
{
    static const struct {
        const char *descr;
        apa_array_type type;
    } known[] = {{"f2", APA_ARRAY_F16}, {"f4", APA_ARRAY_F32}, {"f8", APA_ARRAY_F64}, {"b1", APA_ARRAY_BOOL}};
    const char order = d->descr[0];
    for (size_t i = 0; i < sizeof known / sizeof known[0] && order != '\0'; i++) {
        if (strcmp(d->descr + 1, known[i].descr) != 0)
            continue;
        if (order == '>' && known[i].type != APA_ARRAY_BOOL)
            return apa_io_fail(report, APA_STATUS_BAD_FILE, "dtype '%s' is big endian, expected little endian",
                               d->descr);
        /* '|' is numpy's mark for "one byte, no order". */
        if (order == '<' || order == '=' || known[i].type == APA_ARRAY_BOOL) {
            *type = known[i].type;
            return APA_STATUS_OK;
        }
    }
    return apa_io_fail(report, APA_STATUS_BAD_FILE, "dtype '%s', expected '<f2', '<f4', '<f8' or '|b1'%s", d->descr,
                       strcmp(d->descr + (order != '\0'), "V2") == 0 ? " (bf16 has no .npy type: use .safetensors)"
                                                                     : "");
}

static apa_status header_from_dict(const dict *d, apa_npy_header *header, const apa_io_report *report)
{
    apa_status status = type_of(d, &header->type, report);
    if (status != APA_STATUS_OK)
        return status;
    header->dims = d->dims;
    memcpy(header->shape, d->shape, sizeof header->shape);
    if (!apa_io_count(d->dims, d->shape, &header->elements))
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "shape overflows, expected at most 2^59 elements");
    int long_axes = 0;
    for (int32_t i = 0; i < d->dims; i++)
        long_axes += d->shape[i] > 1;
    if (d->fortran && long_axes > 1 && header->elements > 0)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "Fortran order, expected C order (numpy.ascontiguousarray)");
    return APA_STATUS_OK;
}

/* Magic, version and length; *offset and *length are the dict's place. */
static apa_status read_preamble(const apa_io_file *file, int64_t *offset, int64_t *length, const apa_io_report *report)
{
    unsigned char head[12] = {0};
    const int64_t got = file->size < 12 ? file->size : 12;
    apa_status status = apa_io_read(file, 0, head, got, report);
    if (status != APA_STATUS_OK)
        return status;
    if (got < 10)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "truncated: %" PRId64 " bytes, expected a .npy header",
                           file->size);
    if (memcmp(head, "\x93NUMPY", 6) != 0)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "does not begin with the .npy magic");
    if (head[6] < 1 || head[6] > 3 || head[7] != 0)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, ".npy version %d.%d, expected 1.0, 2.0 or 3.0", head[6],
                           head[7]);
    const bool wide = head[6] > 1;
    *offset = wide ? 12 : 10;
    *length = (int64_t)head[8] | (int64_t)head[9] << 8;
    if (wide)
        *length |= (int64_t)head[10] << 16 | (int64_t)head[11] << 24;
    if (*length > MAX_HEADER)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "header of %" PRId64 " bytes, expected at most %" PRId64,
                           *length, MAX_HEADER);
    if (*length > file->size - *offset)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "truncated: header says %" PRId64 " bytes, file has %" PRId64,
                           *length, file->size < *offset ? 0 : file->size - *offset);
    return APA_STATUS_OK;
}

apa_status apa_npy_header_read(const apa_io_file *file, apa_npy_header *header, const apa_io_report *report)
{
    int64_t offset = 0, length = 0;
    apa_status status = read_preamble(file, &offset, &length, report);
    if (status != APA_STATUS_OK)
        return status;
    char *text = malloc((size_t)length + 1);
    if (text == NULL)
        return apa_io_fail(report, APA_STATUS_OUT_OF_MEMORY, "no memory for the header");
    dict d;
    memset(&d, 0, sizeof d);
    memset(header, 0, sizeof *header);
    status = apa_io_read(file, offset, text, length, report);
    cursor c = {text, text + length};
    if (status == APA_STATUS_OK && !take_dict(&c, &d))
        status = d.structured ? apa_io_fail(report, APA_STATUS_BAD_FILE,
                                            "structured dtype, expected '<f2', '<f4', '<f8' or '|b1'")
                              : apa_io_fail(report, APA_STATUS_BAD_FILE, "malformed header: %s", d.fault);
    free(text);
    if (status == APA_STATUS_OK)
        status = header_from_dict(&d, header, report);
    if (status != APA_STATUS_OK)
        return status;
    header->data_offset = offset + length;
    const int64_t needed = header->elements * apa_io_type_bytes(header->type), found = file->size - header->data_offset;
    if (found != needed)
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "%s: header says %" PRId64 " bytes of data, file has %" PRId64,
                           found < needed ? "truncated" : "too long", needed, found);
    return APA_STATUS_OK;
}

apa_status apa_npy_read(const char *path, apa_array *array, const apa_io_report *report)
{
    apa_io_file file;
    apa_status status = apa_io_open(path, &file, report);
    if (status != APA_STATUS_OK)
        return status;
    apa_npy_header header;
    status = apa_npy_header_read(&file, &header, report);
    if (status == APA_STATUS_OK)
        status = apa_io_fill(&file, header.data_offset, header.type, header.dims, header.shape, array, report);
    apa_io_close(&file);
    return status;
}

size_t apa_npy_header_write(const apa_array *array, char text[512])
{
    static const char *const descr[] = {"", "<f2", "", "<f4", "<f8", "|b1"};
    apa_io_text out = {text, 512, 10, false};
    memcpy(text, "\x93NUMPY\x01\x00\x00\x00", 10);
    apa_io_append(&out, "{'descr': '%s', 'fortran_order': False, 'shape': (", descr[array->type]);
    for (int32_t i = 0; i < array->dims; i++)
        apa_io_append(&out, "%s%" PRId64 "%s", i == 0 ? "" : " ", array->shape[i],
                      i + 1 < array->dims || array->dims == 1 ? "," : "");
    apa_io_append(&out, "), }");
    while ((out.used + 1) % 64 != 0) /* data aligned to 64 bytes in the file, as numpy has it */
        apa_io_append(&out, " ");
    apa_io_append(&out, "\n");
    const size_t length = out.used - 10;
    text[8] = (char)(length & 0xff);
    text[9] = (char)(length >> 8);
    return out.used;
}
