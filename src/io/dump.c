/* QKV dumps: six int32, then FP16 Q[n][nh][hd], K[kv][nkv][hd], V[kv][nkv][hd], positions first.
 *
 * The arrays come out as [1][heads][positions][hd]. Each is read in blocks of whole positions and dealt out to its
 * heads, so that no second copy of the file is held. */
#include "io/io_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define HEADER_BYTES ((int64_t)24)
#define BLOCK_BYTES ((int64_t)4 << 20)

typedef struct dump_header {
    int32_t n, kv, nh, nkv, hd, off;
    int64_t q_bytes, kv_bytes;
} dump_header;

/* 2·positions·heads·dim, false on overflow (also of heads·dim alone, when there are no positions). */
static bool array_bytes(int64_t positions, int64_t heads, int64_t dim, int64_t *bytes)
{
    const int64_t shape[3] = {positions, heads, dim};
    int64_t elements;
    if (!apa_io_count(3, shape, &elements))
        return false;
    *bytes = 2 * elements; /* at most 2^60 */
    return true;
}

static apa_status read_header(const apa_io_file *file, dump_header *h, const apa_io_report *report)
{
    int32_t field[6];
    if (file->size < HEADER_BYTES)
        return apa_io_fail(report, APA_STATUS_BAD_FILE,
                           "truncated: %" PRId64 " bytes, expected a QKV dump header of 24", file->size);
    apa_status status = apa_io_read(file, 0, field, HEADER_BYTES, report);
    if (status != APA_STATUS_OK)
        return status;
    *h = (dump_header){field[0], field[1], field[2], field[3], field[4], field[5], 0, 0};
    if (h->n < 0 || h->kv < 0 || h->nh < 1 || h->nkv < 1 || h->hd < 1)
        return apa_io_fail(
            report, APA_STATUS_BAD_FILE,
            "not a QKV dump: n %d, kv %d, nh %d, nkv %d, hd %d; expected n, kv at least 0, the rest at least 1", h->n,
            h->kv, h->nh, h->nkv, h->hd);
    int64_t total;
    if (!array_bytes(h->n, h->nh, h->hd, &h->q_bytes) || !array_bytes(h->kv, h->nkv, h->hd, &h->kv_bytes) ||
        __builtin_mul_overflow(h->kv_bytes, 2, &total) || __builtin_add_overflow(total, h->q_bytes, &total) ||
        __builtin_add_overflow(total, HEADER_BYTES, &total))
        return apa_io_fail(report, APA_STATUS_BAD_FILE, "not a QKV dump: the sizes in its header overflow");
    if (total != file->size)
        return apa_io_fail(report, APA_STATUS_BAD_FILE,
                           "%s: header (n %d, kv %d, nh %d, nkv %d, hd %d) says %" PRId64 " bytes, file has %" PRId64,
                           file->size < total ? "truncated" : "not a QKV dump, or too long", h->n, h->kv, h->nh, h->nkv,
                           h->hd, total, file->size);
    return APA_STATUS_OK;
}

/* Reads [positions][heads][dim] at offset into [1][heads][positions][dim]. */
static apa_status read_relaid(const apa_io_file *file, int64_t offset, int64_t positions, int64_t heads, int64_t dim,
                              apa_array *array, const apa_io_report *report)
{
    const int64_t shape[4] = {1, heads, positions, dim};
    apa_status status = apa_io_make(array, APA_ARRAY_F16, 4, shape, report);
    if (status != APA_STATUS_OK || positions == 0)
        return status;
    const int64_t position_bytes = heads * dim * 2, row_bytes = dim * 2;
    int64_t step = BLOCK_BYTES / position_bytes;
    step = step < 1 ? 1 : step > positions ? positions : step;
    char *block = malloc((size_t)(step * position_bytes));
    if (block == NULL)
        return apa_io_fail(report, APA_STATUS_OUT_OF_MEMORY, "no memory for a block of %" PRId64 " bytes",
                           step * position_bytes);
    for (int64_t from = 0; from < positions && status == APA_STATUS_OK; from += step) {
        const int64_t count = positions - from < step ? positions - from : step;
        status = apa_io_read(file, offset + from * position_bytes, block, count * position_bytes, report);
        for (int64_t h = 0; h < heads && status == APA_STATUS_OK; h++)
            for (int64_t s = 0; s < count; s++)
                memcpy((char *)array->data + (h * positions + from + s) * row_bytes,
                       block + s * position_bytes + h * row_bytes, (size_t)row_bytes);
    }
    free(block);
    return status;
}

apa_status apa_dump_read(const char *path, apa_dump *dump, char *message, size_t message_size)
{
    if (path == NULL || dump == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    memset(dump, 0, sizeof *dump);
    const apa_io_report report = {path, message, message_size};
    apa_io_file file;
    apa_status status = apa_io_open(path, &file, &report);
    if (status != APA_STATUS_OK)
        return status;
    dump_header h;
    status = read_header(&file, &h, &report);
    if (status == APA_STATUS_OK)
        status = read_relaid(&file, HEADER_BYTES, h.n, h.nh, h.hd, &dump->q, &report);
    if (status == APA_STATUS_OK)
        status = read_relaid(&file, HEADER_BYTES + h.q_bytes, h.kv, h.nkv, h.hd, &dump->k, &report);
    if (status == APA_STATUS_OK)
        status = read_relaid(&file, HEADER_BYTES + h.q_bytes + h.kv_bytes, h.kv, h.nkv, h.hd, &dump->v, &report);
    apa_io_close(&file);
    if (status != APA_STATUS_OK)
        apa_dump_free(dump);
    else
        dump->q_offset = h.off;
    return status;
}

void apa_dump_free(apa_dump *dump)
{
    if (dump == NULL)
        return;
    apa_array_free(&dump->q);
    apa_array_free(&dump->k);
    apa_array_free(&dump->v);
    dump->q_offset = 0;
}

apa_status apa_dump_describe(const char *path, apa_io_text *text, const apa_io_report *report)
{
    apa_io_file file;
    apa_status status = apa_io_open(path, &file, report);
    if (status != APA_STATUS_OK)
        return status;
    dump_header h;
    status = read_header(&file, &h, report);
    apa_io_close(&file);
    if (status == APA_STATUS_OK) {
        const int64_t q[4] = {1, h.nh, h.n, h.hd}, kv[4] = {1, h.nkv, h.kv, h.hd};
        apa_io_append(text, "q f16 ");
        apa_io_append_shape(text, 4, q);
        apa_io_append(text, " (query 0 at position %d)\nk f16 ", h.off);
        apa_io_append_shape(text, 4, kv);
        apa_io_append(text, "\nv f16 ");
        apa_io_append_shape(text, 4, kv);
        apa_io_append(text, "\n");
    }
    return status;
}
