/* libapa: arrays in files.
 *
 * Reads .npy (f16, f32, f64, bool; C order), .safetensors ("file.safetensors:name"; BF16 too) and the QKV dump format
 * of the APA documents; writes .npy. Readers are bounded: every size and offset of a file is checked before it is used.
 * Writers are atomic: the file appears whole under its name or not at all. All functions are thread-safe for different
 * objects. */
#ifndef APA_IO_H
#define APA_IO_H

#include "apa/status.h"
#include "apa/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum apa_array_type {
    APA_ARRAY_F16 = 1,
    APA_ARRAY_BF16 = 2,
    APA_ARRAY_F32 = 3,
    APA_ARRAY_F64 = 4,
    APA_ARRAY_BOOL = 5 /* one byte an element, 0 or 1 */
} apa_array_type;

/* An array of 0 to 8 dimensions, contiguous, last dimension fastest. The data belongs to the array. */
typedef struct apa_array {
    void *data; /* 64-byte aligned; not NULL even when the array has no elements */
    apa_array_type type;
    int32_t dims;
    int64_t shape[8];
    int64_t elements;
} apa_array;

/* Reads one array. `path` ends in .npy, or is FILE.safetensors:NAME (":NAME" may be left out when the file holds one
 * tensor). On an error *array is empty and message holds one line: file, what was found, what was expected.
 * Errors: IO (missing, unreadable), BAD_FILE (truncated, malformed, a dtype that is not in the list above, Fortran
 * order), UNSUPPORTED (an ending that is not known), OUT_OF_MEMORY. */
APA_EXPORT apa_status apa_array_read(const char *path, apa_array *array, char *message, size_t message_size);

/* Frees what apa_array_read() or apa_array_allocate() gave; *array becomes empty. */
APA_EXPORT void apa_array_free(apa_array *array);

/* A zeroed array. Errors: INVALID_ARGUMENT (negative or overflowing shape), OUT_OF_MEMORY. */
APA_EXPORT apa_status apa_array_allocate(apa_array *array, apa_array_type type, int32_t dims, const int64_t *shape);

/* Writes a .npy (format 1.0, little endian). BF16 has no .npy type and is refused. The data goes to a temporary file
 * beside `path`, which is renamed at the end. Errors: IO, UNSUPPORTED. */
APA_EXPORT apa_status apa_array_write_npy(const char *path, const apa_array *array, char *message, size_t message_size);

/* Elements first … first+count-1, in storage order, as doubles; and back, rounded once to the array's type (nearest,
 * ties to even). BOOL: 0 and 1. Errors: INVALID_ARGUMENT (beyond the array; set: a BOOL other than 0 or 1). */
APA_EXPORT apa_status apa_array_get_f64(const apa_array *array, int64_t first, int64_t count, double *values);
APA_EXPORT apa_status apa_array_set_f64(apa_array *array, int64_t first, int64_t count, const double *values);

/* One file to write: an array as .npy, or when array is NULL the bytes of text as they are. */
typedef struct apa_output_file {
    const char *path;
    const apa_array *array;
    const char *text;
    size_t text_size;
} apa_output_file;

/* Writes several files: all of them appear, whole, or none. Each goes to a temporary file beside its path, is brought
 * to the disk, and only when all are complete are they renamed. An existing path that is no regular file (/dev/null, a
 * pipe) is written to directly, and a signal with a handler without SA_RESTART ends the wait for it (IO); a symbolic
 * link is followed. A file that is replaced keeps its mode, and needs no permission of its own to be replaced: the
 * folder's counts. Errors: IO (message names the file; no temporary file
 * remains), UNSUPPORTED (BF16), INVALID_ARGUMENT (the same path twice). */
APA_EXPORT apa_status apa_files_write(const apa_output_file *files, size_t count, char *message, size_t message_size);

/* One QKV dump: little-endian int32 n, kv, nh, nkv, hd, off, then FP16 Q[n][nh][hd], K[kv][nkv][hd], V[kv][nkv][hd].
 * n queries at positions off … off+n-1 of kv keys; nh query heads, nkv KV heads. Arrays come as [1, heads, seq, dim].
 */
typedef struct apa_dump {
    apa_array q, k, v;
    int64_t q_offset;
} apa_dump;

/* Reads a dump. Errors as apa_array_read(). The arrays are re-laid to [1][heads][seq][dim]. */
APA_EXPORT apa_status apa_dump_read(const char *path, apa_dump *dump, char *message, size_t message_size);
APA_EXPORT void apa_dump_free(apa_dump *dump);

/* Views a 3-D [H,S,D] or 4-D [B,H,S,D] array (nhd: [S,H,D] or [B,S,H,D]) as a tensor. Errors: INVALID_ARGUMENT (other
 * numbers of dimensions, BOOL). */
APA_EXPORT apa_status apa_array_tensor(const apa_array *array, int nhd, apa_tensor *tensor, char *message,
                                       size_t message_size);

/* Lists what a file holds, one line per array ("name dtype [shape]"), into text. For .npy, .safetensors and dumps (any
 * other ending is tried as a dump). Errors as apa_array_read(), INVALID_ARGUMENT when text is too small. */
APA_EXPORT apa_status apa_file_describe(const char *path, char *text, size_t text_size, char *message,
                                        size_t message_size);

#ifdef __cplusplus
}
#endif
#endif
