/* The command, run on files in a folder of its own. */
#ifndef APA_TESTS_COMMAND_H
#define APA_TESTS_COMMAND_H

#include "support/test.h"

#include "apa/apa.h"
#include "apa/io.h"

#include <jansson.h>
#include <stdbool.h>

/* Group set-up: a folder under /tmp that becomes the working directory, with in/ (f16), f32/ and f64/ holding q.npy,
 * k.npy and v.npy of B 1, Hq 4, Hkv 2, Sq 40, Skv 70, D 48; in/cut.npy is truncated, in/q.txt a q.npy by another name.
 */
int command_setup(void **unused);
int command_teardown(void **unused);

#define IN "--q in/q.npy --k in/k.npy --v in/v.npy "

/* What the last command printed. */
extern char command_out[1 << 18], command_err[1 << 14];

/* Runs "apa ..." and returns its exit status. */
int command_run(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Exit status 0 and nothing on standard error. */
void command_works(int code);

/* That exit status, nothing on standard output, and one line "apa: ..." that holds `says`. */
void command_fails(int code, int expected, const char *says);

void command_read_text(const char *name, char *to, size_t size);
bool command_exists(const char *name);
/* Entries of a folder, but for hidden ones. */
int command_entries(const char *path);

apa_array command_load(const char *path);
double command_at(const apa_array *array, int64_t i);
/* Two arrays with equal elements. */
void command_same_file(const char *a, const char *b);

json_t *command_parse(const char *text);
double command_number(const json_t *object, const char *key);

#endif
