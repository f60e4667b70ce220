/* The safetensors reader. */
#include "fuzz/array.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char message[512] = "", text[4096];
    apa_array array;
    const char *path = fuzz_file(data, size, ".safetensors");
    const apa_status status = apa_array_read(path, &array, message, sizeof message);
    fuzz_outcome(status, &array, path, message);
    apa_array_free(&array);
    (void)apa_file_describe(path, text, sizeof text, message, sizeof message);
    return 0;
}
