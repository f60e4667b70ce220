/* Files for the tests of src/io: a folder of our own, good files byte by byte, and what a refused file must look like.
 */
#ifndef APA_TESTS_FILES_H
#define APA_TESTS_FILES_H

#include "support/test.h"

#include "apa/io.h"

/* The folder under /tmp, and the last message of a reader or writer. */
extern char file_folder[];
extern char file_message[512];

/* Group set-up and tear-down: make the folder; remove it and what is in it. */
int file_setup(void **unused);
int file_teardown(void **unused);

/* FOLDER/name; valid for the next fifteen calls. */
const char *file_path(const char *name);
void file_put(const char *path, const void *bytes, size_t n);
int file_count(void);

/* A failed read: status, an empty array, and one line that names the file and holds `says`. */
void file_refused(const char *path, apa_status expected, const char *says);

/* Bytes of whole files; each returns its size. A .npy of the given version and dict; a .safetensors with data 0, 1, 0,
 * 1 …; a dump with the codes 0, 1, 2 …, header n, kv, nh, nkv, hd, off. */
size_t file_make_npy(unsigned char *to, int major, const char *dict, const void *data, size_t data_size);
size_t file_make_safetensors(unsigned char *to, const char *header, size_t data_size);
size_t file_make_dump(unsigned char *to, const int32_t header[6]);

#endif
