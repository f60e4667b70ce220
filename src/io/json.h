/* A bounded JSON reader, just enough for the header of a .safetensors file: a cursor over bytes that are in memory
 * already.
 *
 * Every function returns false with `fault` set when the text is not what it wants; after that the cursor is of no more
 * use. Strings are decoded in place: escapes only ever get shorter. Depth is limited, so recursion is. */
#ifndef APA_IO_JSON_H
#define APA_IO_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct apa_json {
    char *at, *end;
    int depth;
    const char *fault;
} apa_json;

typedef struct apa_json_string {
    const char *text; /* not terminated */
    size_t length;
} apa_json_string;

/* The next character that is no white space is c: taken. Otherwise false, and nothing else changes. */
bool apa_json_take(apa_json *json, char c);

/* Nothing but white space is left. */
bool apa_json_at_end(apa_json *json);

bool apa_json_string_read(apa_json *json, apa_json_string *string);

/* A whole number, 0 … 2^63-1, without sign, fraction and exponent. */
bool apa_json_unsigned(apa_json *json, int64_t *value);

/* Any value, at most 16 levels deep. */
bool apa_json_skip(apa_json *json);

/* Between items: ',' → *more true, `close` → *more false, anything else a fault. A comma before `close` is a fault of
 * the item reader that comes next. */
bool apa_json_next(apa_json *json, char close, bool *more);

bool apa_json_equal(apa_json_string string, const char *text);

#endif
