/* Recipes: presets by name, knobs by name.
 *
 * Nothing here knows a single knob: a knob is a row of knobs.def, a preset a row of presets.def, the rules between
 * knobs are in check.c. */
#include "recipe/recipe_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct preset {
    const char *name, *settings, *about;
} preset;

#define APA_PRESET(name_, settings_, about_) {.name = name_, .settings = settings_, .about = about_},
static const preset presets[] = {
#include "recipe/presets.def"
};
enum { PRESETS = sizeof presets / sizeof presets[0], SETTING_MAX = 64, FOUND_MAX = 48, NAMES_MAX = 1024 };

/* A fail writes one line, where there is room for one, and gives the status back. */
apa_status apa_recipe_fail(char *message, size_t size, const char *format, ...)
{
    if (message && size > 0) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(message, size, format, arguments);
        va_end(arguments);
    }
    return APA_STATUS_INVALID_ARGUMENT;
}

/* A caller's text for a message: quoted, on one line, cut when long. */
static const char *quoted(const char *text, char found[FOUND_MAX])
{
    enum { ROOM = FOUND_MAX - 6 }; /* quotes, "...", end */
    size_t n = 0;
    found[n++] = '"';
    for (const char *c = text; *c && n <= ROOM; c++) {
        found[n++] = (unsigned char)*c < 0x20 || *c == 0x7F ? '?' : *c;
    }
    snprintf(found + n, FOUND_MAX - n, "%s", strlen(text) > ROOM ? "...\"" : "\"");
    return found;
}

/* ---- presets -------------------------------------------------------------------------------------------------------
 */

const char *apa_recipe_preset_name(size_t i)
{
    return i < PRESETS ? presets[i].name : NULL;
}

const char *apa_recipe_preset_about(size_t i)
{
    return i < PRESETS ? presets[i].about : NULL;
}

/* "knob=value knob=value": false at the first one that is not sound. */
static bool apply(const char *settings, apa_recipe *recipe)
{
    while (*settings) {
        char setting[SETTING_MAX];
        const size_t length = strcspn(settings, " ");
        if (length >= sizeof setting) {
            return false;
        }
        memcpy(setting, settings, length);
        setting[length] = '\0';
        char *value = strchr(setting, '=');
        if (!value) {
            return false;
        }
        *value++ = '\0';
        const apa_knob *knob = apa_knob_find(setting);
        if (!knob || !apa_knob_parse(knob, value, recipe)) {
            return false;
        }
        settings += length;
        settings += strspn(settings, " ");
    }
    return true;
}

apa_status apa_recipe_init(apa_recipe *recipe, const char *name)
{
    size_t i = 0;
    while (name && i < PRESETS && strcmp(presets[i].name, name) != 0) {
        i++;
    }
    if (!recipe || i == PRESETS) {
        return APA_STATUS_INVALID_ARGUMENT;
    }
    apa_recipe made;
    memset(&made, 0, sizeof made); /* padding too: equal recipes are equal bytes */
    made.size = sizeof made;
    snprintf(made.name, sizeof made.name, "%s", presets[i].name);
    for (size_t k = 0; apa_knob_at(k); k++) {
        if (!apa_knob_parse(apa_knob_at(k), apa_knob_at(k)->initial, &made)) {
            return APA_STATUS_INTERNAL;
        }
    }
    if (!apply(presets[i].settings, &made)) {
        return APA_STATUS_INTERNAL;
    }
    memcpy(recipe, &made, sizeof made);
    return APA_STATUS_OK;
}

/* ---- knobs ---------------------------------------------------------------------------------------------------------
 */

const apa_recipe_knob *apa_recipe_knob_at(size_t i)
{
    const apa_knob *knob = apa_knob_at(i);
    return knob ? &knob->text : NULL;
}

/* All knob names, "a, b, c". */
static void list_knobs(char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; apa_knob_at(i) && used < size; i++) {
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "", apa_knob_at(i)->text.name);
    }
}

static apa_status check_size(const apa_recipe *recipe, char *message, size_t message_size)
{
    if (!recipe) {
        return apa_recipe_fail(message, message_size, "recipe: found NULL, expected a recipe");
    }
    if (recipe->size != sizeof *recipe) {
        return apa_recipe_fail(message, message_size,
                               "recipe.size: found %zu, expected %zu (apa_recipe_init() sets it)", recipe->size,
                               sizeof *recipe);
    }
    return APA_STATUS_OK;
}

apa_status apa_recipe_set(apa_recipe *recipe, const char *name, const char *value, char *message, size_t message_size)
{
    char found[FOUND_MAX];
    const apa_status status = check_size(recipe, message, message_size);
    if (status != APA_STATUS_OK) {
        return status;
    }
    if (!name) {
        return apa_recipe_fail(message, message_size, "knob: found NULL, expected a knob's name");
    }
    const apa_knob *knob = apa_knob_find(name);
    if (!knob) {
        char names[NAMES_MAX];
        list_knobs(names, sizeof names);
        return apa_recipe_fail(message, message_size, "knob: found %s, expected one of %s", quoted(name, found), names);
    }
    if (!value) {
        return apa_recipe_fail(message, message_size, "%s: found NULL, expected %s", name, knob->text.range);
    }
    if (!apa_knob_parse(knob, value, recipe)) {
        return apa_recipe_fail(message, message_size, "%s: found %s, expected %s", name, quoted(value, found),
                               knob->text.range);
    }
    return APA_STATUS_OK;
}

apa_status apa_recipe_get(const apa_recipe *recipe, const char *name, char *text, size_t text_size)
{
    const apa_knob *knob = name ? apa_knob_find(name) : NULL;
    char value[SETTING_MAX];
    if (!knob || !text || check_size(recipe, NULL, 0) != APA_STATUS_OK ||
        !apa_knob_print(knob, recipe, value, sizeof value) || strlen(value) >= text_size) {
        return APA_STATUS_INVALID_ARGUMENT;
    }
    memcpy(text, value, strlen(value) + 1);
    return APA_STATUS_OK;
}

/* ---- soundness -----------------------------------------------------------------------------------------------------
 */

apa_status apa_recipe_check(const apa_recipe *recipe, char *message, size_t message_size)
{
    const apa_status status = check_size(recipe, message, message_size);
    if (status != APA_STATUS_OK) {
        return status;
    }
    if (!memchr(recipe->name, '\0', sizeof recipe->name)) {
        return apa_recipe_fail(message, message_size, "recipe.name: found no end, expected at most %zu characters",
                               sizeof recipe->name - 1);
    }
    for (size_t i = 0; apa_knob_at(i); i++) {
        const apa_knob *knob = apa_knob_at(i);
        if (!apa_knob_valid(knob, recipe)) {
            char found[SETTING_MAX];
            apa_knob_print_raw(knob, recipe, found, sizeof found);
            return apa_recipe_fail(message, message_size, "%s: found %s, expected %s", knob->text.name, found,
                                   knob->text.range);
        }
    }
    return apa_recipe_check_pairs(recipe, message, message_size);
}
