/* The bounded JSON reader: the bytes lie at the very end of an allocation, so that one byte too many is seen. A value
 * that is skipped ends where the cursor says; strings and numbers are read wherever they stand at the top. */
#include "fuzz/fuzz.h"
#include "io/json.h"

#include <string.h>

static void read_object(apa_json *json)
{
    bool more = !apa_json_take(json, '}');
    while (more) {
        apa_json_string key;
        if (!apa_json_string_read(json, &key) || !apa_json_take(json, ':'))
            return;
        (void)apa_json_equal(key, "dtype");
        int64_t number;
        apa_json before = *json;
        if (!apa_json_unsigned(json, &number)) {
            *json = before;
            if (!apa_json_skip(json))
                return;
        } else {
            FUZZ_HOLDS(number >= 0);
        }
        if (!apa_json_next(json, '}', &more))
            return;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + (size == 0));
    if (text == NULL)
        abort();
    memcpy(text, data, size);
    apa_json json = {.at = text, .end = text + size};
    if (apa_json_take(&json, '{'))
        read_object(&json);
    else if (apa_json_skip(&json))
        (void)apa_json_at_end(&json);
    FUZZ_HOLDS(json.at >= text && json.at <= text + size);
    free(text);
    return 0;
}
