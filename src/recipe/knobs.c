/* Knobs: the table made from knobs.def, and text in and out of a recipe's fields.
 *
 * Numbers are read and written in the "C" locale whatever the program has set: "0.005" means the same everywhere. */
#include "recipe/recipe_internal.h"

#include <errno.h>
#include <float.h>
#include <locale.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Fields of an enumeration are read and written as int32_t. */
_Static_assert(sizeof(apa_toggle) == sizeof(int32_t), "enumerations must have 32 bits");

#define APA_KNOB_CHOICE(field, first_, choices_, initial_, about_, source_)                                            \
    {.text = {.name = #field, .type = "choice", .range = choices_, .about = about_, .source = source_},                \
     .initial = initial_,                                                                                              \
     .offset = offsetof(apa_recipe, field),                                                                            \
     .kind = APA_KNOB_IS_CHOICE,                                                                                       \
     .first = (int32_t)(first_)},
#define APA_KNOB_NUMBER(field, automatic_, least_, most_, range_, initial_, about_, source_)                           \
    {.text = {.name = #field, .type = "number", .range = range_, .about = about_, .source = source_},                  \
     .initial = initial_,                                                                                              \
     .offset = offsetof(apa_recipe, field),                                                                            \
     .kind = APA_KNOB_IS_NUMBER,                                                                                       \
     .number_auto = automatic_,                                                                                        \
     .least = least_,                                                                                                  \
     .most = most_},
#define APA_KNOB_INTEGER(field, automatic_, low_, high_, step_, range_, initial_, about_, source_)                     \
    {.text = {.name = #field, .type = "integer", .range = range_, .about = about_, .source = source_},                 \
     .initial = initial_,                                                                                              \
     .offset = offsetof(apa_recipe, field),                                                                            \
     .kind = APA_KNOB_IS_INTEGER,                                                                                      \
     .integer_auto = automatic_,                                                                                       \
     .low = low_,                                                                                                      \
     .high = high_,                                                                                                    \
     .step = step_},

static const apa_knob knobs[] = {
#include "recipe/knobs.def"
};

const apa_knob *apa_knob_at(size_t i)
{
    return i < sizeof knobs / sizeof knobs[0] ? &knobs[i] : NULL;
}

const apa_knob *apa_knob_find(const char *name)
{
    for (size_t i = 0; apa_knob_at(i); i++) {
        if (strcmp(knobs[i].text.name, name) == 0) {
            return &knobs[i];
        }
    }
    return NULL;
}

static int32_t read_integer(const apa_knob *knob, const apa_recipe *recipe)
{
    int32_t value;
    memcpy(&value, (const char *)recipe + knob->offset, sizeof value);
    return value;
}

static double read_number(const apa_knob *knob, const apa_recipe *recipe)
{
    double value;
    memcpy(&value, (const char *)recipe + knob->offset, sizeof value);
    return value;
}

static void write_integer(const apa_knob *knob, apa_recipe *recipe, int32_t value)
{
    memcpy((char *)recipe + knob->offset, &value, sizeof value);
}

static void write_number(const apa_knob *knob, apa_recipe *recipe, double value)
{
    memcpy((char *)recipe + knob->offset, &value, sizeof value);
}

/* ---- choices: the names are the pieces of "auto|off|on" ------------------------------------------------------------
 */

/* Piece number i, not terminated, and its length; NULL past the last. */
static const char *choice_at(const apa_knob *knob, int32_t i, size_t *length)
{
    const char *piece = knob->text.range;
    for (; i > 0 && piece; i--) {
        piece = strchr(piece, '|');
        piece = piece ? piece + 1 : NULL;
    }
    *length = piece ? strcspn(piece, "|") : 0;
    return piece;
}

static bool is_toggle(const apa_knob *knob)
{
    return strcmp(knob->text.range, "auto|off|on") == 0;
}

static bool parse_choice(const apa_knob *knob, const char *text, apa_recipe *recipe)
{
    if (is_toggle(knob)) {
        text = strcmp(text, "true") == 0 || strcmp(text, "1") == 0    ? "on"
               : strcmp(text, "false") == 0 || strcmp(text, "0") == 0 ? "off"
                                                                      : text;
    }
    size_t length;
    const char *piece;
    for (int32_t i = 0; (piece = choice_at(knob, i, &length)) != NULL; i++) {
        if (strlen(text) == length && memcmp(text, piece, length) == 0) {
            write_integer(knob, recipe, knob->first + i);
            return true;
        }
    }
    return false;
}

/* ---- numbers -------------------------------------------------------------------------------------------------------
 */

/* Switches this thread to the "C" locale; give both results to locale_leave(). */
static locale_t locale_enter(locale_t *before)
{
    const locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    *before = c ? uselocale(c) : (locale_t)0;
    return c;
}

static void locale_leave(locale_t c, locale_t before)
{
    if (c) {
        uselocale(before);
        freelocale(c);
    }
}

/* Decimal or exponent notation, nothing before or after: not strtod's spaces, hexadecimals, "inf" and "nan". */
static bool looks_numeric(const char *text)
{
    return text[0] != '\0' && text[strspn(text, "0123456789+-.eE")] == '\0';
}

static bool parse_number(const apa_knob *knob, const char *text, apa_recipe *recipe)
{
    if (knob->number_auto && strcmp(text, "auto") == 0) {
        write_number(knob, recipe, (double)NAN);
        return true;
    }
    if (!looks_numeric(text)) {
        return false;
    }
    locale_t before;
    const locale_t c = locale_enter(&before);
    char *end;
    errno = 0;
    const double value = strtod(text, &end);
    const bool vanished = errno == ERANGE && value == 0; /* something, but less than a double can hold */
    locale_leave(c, before);
    if (vanished || *end != '\0' || end == text || !(value >= knob->least && value <= knob->most)) {
        return false;
    }
    write_number(knob, recipe, value);
    return true;
}

/* The shortest text of %.1g … %.17g that reads back as the same number: "0.005" and not "0.0050000000000000001", "100"
 * and not "1e+02". */
static int print_number(double value, char *text, size_t size)
{
    locale_t before;
    const locale_t c = locale_enter(&before);
    char digits[40], best[40];
    int length = 0;
    for (int precision = DBL_DECIMAL_DIG; precision >= 1; precision--) {
        const int n = snprintf(digits, sizeof digits, "%.*g", precision, value);
        if (length == 0 || (strtod(digits, NULL) == value && n <= length)) {
            length = n;
            memcpy(best, digits, sizeof best);
        }
    }
    locale_leave(c, before);
    snprintf(text, size, "%s", best);
    return length;
}

/* ---- integers ------------------------------------------------------------------------------------------------------
 */

static bool integer_in_range(const apa_knob *knob, long long value)
{
    return value >= knob->low && value <= knob->high && value % knob->step == 0;
}

static bool parse_integer(const apa_knob *knob, const char *text, apa_recipe *recipe)
{
    if (knob->integer_auto != APA_KNOB_NO_AUTO && strcmp(text, "auto") == 0) {
        write_integer(knob, recipe, knob->integer_auto);
        return true;
    }
    if (text[0] == '\0' || text[strspn(text, "0123456789+-")] != '\0') {
        return false;
    }
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (*end != '\0' || end == text || errno != 0 || !integer_in_range(knob, value)) {
        return false;
    }
    write_integer(knob, recipe, (int32_t)value);
    return true;
}

/* ---- all kinds -----------------------------------------------------------------------------------------------------
 */

bool apa_knob_parse(const apa_knob *knob, const char *text, apa_recipe *recipe)
{
    switch (knob->kind) {
    case APA_KNOB_IS_CHOICE:
        return parse_choice(knob, text, recipe);
    case APA_KNOB_IS_NUMBER:
        return parse_number(knob, text, recipe);
    case APA_KNOB_IS_INTEGER:
        return parse_integer(knob, text, recipe);
    }
    return false;
}

bool apa_knob_valid(const apa_knob *knob, const apa_recipe *recipe)
{
    switch (knob->kind) {
    case APA_KNOB_IS_CHOICE: {
        size_t length;
        const int64_t i = (int64_t)read_integer(knob, recipe) - knob->first;
        return i >= 0 && i <= INT32_MAX && choice_at(knob, (int32_t)i, &length) != NULL;
    }
    case APA_KNOB_IS_NUMBER: {
        const double value = read_number(knob, recipe);
        return isnan(value) ? knob->number_auto : value >= knob->least && value <= knob->most;
    }
    case APA_KNOB_IS_INTEGER:
        return integer_in_range(knob, read_integer(knob, recipe));
    }
    return false;
}

bool apa_knob_print(const apa_knob *knob, const apa_recipe *recipe, char *text, size_t size)
{
    if (!apa_knob_valid(knob, recipe)) {
        return false;
    }
    int length = 0;
    if (knob->kind == APA_KNOB_IS_CHOICE) {
        size_t piece_length;
        const char *piece = choice_at(knob, read_integer(knob, recipe) - knob->first, &piece_length);
        length = snprintf(text, size, "%.*s", (int)piece_length, piece);
    } else if (knob->kind == APA_KNOB_IS_NUMBER) {
        const double value = read_number(knob, recipe);
        length = isnan(value) ? snprintf(text, size, "auto") : print_number(value, text, size);
    } else {
        const int32_t value = read_integer(knob, recipe);
        length = value == knob->integer_auto ? snprintf(text, size, "auto") : snprintf(text, size, "%d", (int)value);
    }
    return length >= 0 && (size_t)length < size;
}

void apa_knob_print_raw(const apa_knob *knob, const apa_recipe *recipe, char *text, size_t size)
{
    if (knob->kind == APA_KNOB_IS_NUMBER) {
        print_number(read_number(knob, recipe), text, size);
    } else {
        snprintf(text, size, "%d", (int)read_integer(knob, recipe));
    }
}
