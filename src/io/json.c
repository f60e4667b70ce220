/* The bounded JSON reader. Grammar: RFC 8259. */
#include "io/json.h"

#include <string.h>

#define MAX_DEPTH 16

static bool fault(apa_json *json, const char *what)
{
    json->fault = what;
    return false;
}

static void skip_space(apa_json *json)
{
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\t' || *json->at == '\n' || *json->at == '\r'))
        json->at++;
}

bool apa_json_take(apa_json *json, char c)
{
    skip_space(json);
    if (json->at == json->end || *json->at != c)
        return false;
    json->at++;
    return true;
}

bool apa_json_at_end(apa_json *json)
{
    skip_space(json);
    return json->at == json->end;
}

bool apa_json_equal(apa_json_string string, const char *text)
{
    return string.length == strlen(text) && memcmp(string.text, text, string.length) == 0;
}

/* Four hexadecimal digits; -1 if they are not. */
static int32_t hex4(apa_json *json)
{
    int32_t value = 0;
    if (json->end - json->at < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        const char c = *json->at++;
        const int32_t digit = c >= '0' && c <= '9'   ? c - '0'
                              : c >= 'a' && c <= 'f' ? c - 'a' + 10
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                     : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

static char *put_utf8(char *to, int32_t c)
{
    if (c < 0x80) {
        *to++ = (char)c;
    } else if (c < 0x800) {
        *to++ = (char)(0xc0 | c >> 6);
        *to++ = (char)(0x80 | (c & 0x3f));
    } else if (c < 0x10000) {
        *to++ = (char)(0xe0 | c >> 12);
        *to++ = (char)(0x80 | (c >> 6 & 0x3f));
        *to++ = (char)(0x80 | (c & 0x3f));
    } else {
        *to++ = (char)(0xf0 | c >> 18);
        *to++ = (char)(0x80 | (c >> 12 & 0x3f));
        *to++ = (char)(0x80 | (c >> 6 & 0x3f));
        *to++ = (char)(0x80 | (c & 0x3f));
    }
    return to;
}

/* After "\u": one code point, from two escapes when the first is a high surrogate. */
static bool unicode_escape(apa_json *json, char **to)
{
    int32_t c = hex4(json);
    if (c < 0)
        return fault(json, "\\u without four hexadecimal digits");
    if (c >= 0xdc00 && c <= 0xdfff)
        return fault(json, "a lone surrogate");
    if (c >= 0xd800 && c <= 0xdbff) {
        if (json->end - json->at < 6 || json->at[0] != '\\' || json->at[1] != 'u')
            return fault(json, "a lone surrogate");
        json->at += 2;
        const int32_t low = hex4(json);
        if (low < 0xdc00 || low > 0xdfff)
            return fault(json, "a lone surrogate");
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    }
    *to = put_utf8(*to, c);
    return true;
}

static bool escape(apa_json *json, char **to)
{
    static const char from[] = "\"\\/bfnrt", into[] = "\"\\/\b\f\n\r\t";
    if (json->at == json->end)
        return fault(json, "a string that does not end");
    const char c = *json->at++;
    if (c == 'u')
        return unicode_escape(json, to);
    const char *found = c == '\0' ? NULL : strchr(from, c);
    if (found == NULL)
        return fault(json, "an unknown escape");
    *(*to)++ = into[found - from];
    return true;
}

bool apa_json_string_read(apa_json *json, apa_json_string *string)
{
    if (!apa_json_take(json, '"'))
        return fault(json, "no string where one must be");
    char *to = json->at;
    string->text = to;
    while (json->at < json->end) {
        const char c = *json->at++;
        if (c == '"') {
            string->length = (size_t)(to - string->text);
            return true;
        }
        if ((unsigned char)c < 0x20)
            return fault(json, "a control character in a string");
        if (c != '\\')
            *to++ = c;
        else if (!escape(json, &to))
            return false;
    }
    return fault(json, "a string that does not end");
}

static bool is_digit(const apa_json *json)
{
    return json->at < json->end && *json->at >= '0' && *json->at <= '9';
}

bool apa_json_unsigned(apa_json *json, int64_t *value)
{
    skip_space(json);
    if (!is_digit(json))
        return fault(json, "no whole number where one must be");
    const char *first = json->at;
    *value = 0;
    while (is_digit(json))
        if (__builtin_mul_overflow(*value, 10, value) || __builtin_add_overflow(*value, *json->at++ - '0', value))
            return fault(json, "a number beyond 2^63");
    if (*first == '0' && json->at - first > 1)
        return fault(json, "a number with a leading zero");
    if (json->at < json->end && (*json->at == '.' || *json->at == 'e' || *json->at == 'E'))
        return fault(json, "a fraction where a whole number must be");
    return true;
}

static bool skip_digits(apa_json *json)
{
    if (!is_digit(json))
        return fault(json, "a malformed number");
    while (is_digit(json))
        json->at++;
    return true;
}

static bool skip_number(apa_json *json)
{
    apa_json_take(json, '-');
    if (!skip_digits(json))
        return false;
    if (json->at < json->end && *json->at == '.') {
        json->at++;
        if (!skip_digits(json))
            return false;
    }
    if (json->at < json->end && (*json->at == 'e' || *json->at == 'E')) {
        json->at++;
        if (json->at < json->end && (*json->at == '+' || *json->at == '-'))
            json->at++;
        return skip_digits(json);
    }
    return true;
}

static bool skip_word(apa_json *json, const char *word)
{
    const size_t n = strlen(word);
    if ((size_t)(json->end - json->at) < n || memcmp(json->at, word, n) != 0)
        return fault(json, "an unknown word");
    json->at += n;
    return true;
}

bool apa_json_next(apa_json *json, char close, bool *more)
{
    *more = apa_json_take(json, ',');
    if (*more || apa_json_take(json, close))
        return true;
    return fault(json, "neither ',' nor a closing bracket after an item");
}

static bool skip_items(apa_json *json, char close)
{
    if (apa_json_take(json, close))
        return true;
    for (bool more = true; more;) {
        apa_json_string key;
        if (close == '}' && !apa_json_string_read(json, &key))
            return false;
        if (close == '}' && !apa_json_take(json, ':'))
            return fault(json, "a key without ':'");
        if (!apa_json_skip(json) || !apa_json_next(json, close, &more))
            return false;
    }
    return true;
}

bool apa_json_skip(apa_json *json)
{
    skip_space(json);
    if (json->at == json->end)
        return fault(json, "the end where a value must be");
    switch (*json->at) {
    case '{':
    case '[': {
        const char close = *json->at++ == '{' ? '}' : ']';
        if (++json->depth > MAX_DEPTH)
            return fault(json, "more than 16 levels of nesting");
        const bool fine = skip_items(json, close);
        json->depth--;
        return fine;
    }
    case '"': {
        apa_json_string ignored;
        return apa_json_string_read(json, &ignored);
    }
    case 't':
        return skip_word(json, "true");
    case 'f':
        return skip_word(json, "false");
    case 'n':
        return skip_word(json, "null");
    default:
        return skip_number(json);
    }
}
