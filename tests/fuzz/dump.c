/* The reader of QKV dumps. */
#include "fuzz/array.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char message[512] = "", text[4096];
    apa_dump dump;
    const char *path = fuzz_file(data, size, ".bin");
    const apa_status status = apa_dump_read(path, &dump, message, sizeof message);
    const apa_array *const all[3] = {&dump.q, &dump.k, &dump.v};
    for (int i = 0; i < 3; i++)
        fuzz_outcome(status, all[i], path, message);
    apa_dump_free(&dump);
    (void)apa_file_describe(path, text, sizeof text, message, sizeof message);
    return 0;
}
