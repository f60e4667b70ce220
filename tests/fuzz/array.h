/* What holds of every outcome of a reader. */
#ifndef APA_TESTS_FUZZ_ARRAY_H
#define APA_TESTS_FUZZ_ARRAY_H

#include "apa/io.h"
#include "fuzz/fuzz.h"

#include <string.h>

/* A refusal has one line that names the file; a sound array can be read to its last element and holds what it says. */
static inline void fuzz_outcome(apa_status status, const apa_array *array, const char *path, const char *message)
{
    if (status != APA_STATUS_OK) {
        FUZZ_HOLDS(status == APA_STATUS_BAD_FILE);
        FUZZ_HOLDS(strncmp(message, path, strlen(path)) == 0 && strchr(message, '\n') == NULL);
        FUZZ_HOLDS(array->data == NULL && array->elements == 0);
        return;
    }
    int64_t product = 1;
    double first, last;
    FUZZ_HOLDS(array->dims >= 0 && array->dims <= 8 && array->data != NULL);
    for (int32_t i = 0; i < array->dims; i++)
        product *= array->shape[i];
    FUZZ_HOLDS(product == array->elements);
    if (product > 0) {
        FUZZ_HOLDS(apa_array_get_f64(array, 0, 1, &first) == APA_STATUS_OK);
        FUZZ_HOLDS(apa_array_get_f64(array, product - 1, 1, &last) == APA_STATUS_OK);
    }
}

#endif
