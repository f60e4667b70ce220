/* Settings from the environment: a plugin has no other way to be asked. */
#include "attention.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Under these the exact method is as fast: quantising K and V pays when many queries read them and tiles are many. */
#define MIN_QUERIES 32
#define MIN_KEYS 1024

static bool read_count(const char *name, int64_t *value, char *message, size_t size)
{
    const char *text = getenv(name);
    if (text == NULL || *text == '\0')
        return true;
    char *end;
    errno = 0;
    const long long number = strtoll(text, &end, 10);
    if (errno != 0 || *end != '\0' || number < 0) {
        snprintf(message, size, "%s: \"%s\", expected a number from 0 on", name, text);
        return false;
    }
    *value = number;
    return true;
}

/* "knob=value knob=value", as the command's --set takes them one by one. */
static bool apply_set(apa_recipe *recipe, const char *text, char *message, size_t size)
{
    char setting[256];
    for (const char *at = text; *at != '\0';) {
        const size_t length = strcspn(at, " ,");
        if (length >= sizeof setting) {
            snprintf(message, size, "APA_SET: a setting longer than %zu bytes", sizeof setting - 1);
            return false;
        }
        memcpy(setting, at, length);
        setting[length] = '\0';
        at += length;
        at += strspn(at, " ,");
        char why[200], *equals = strchr(setting, '=');
        if (length == 0)
            continue;
        if (equals == NULL) {
            snprintf(message, size, "APA_SET: \"%s\", expected knob=value", setting);
            return false;
        }
        *equals = '\0';
        if (apa_recipe_set(recipe, setting, equals + 1, why, sizeof why) != APA_STATUS_OK) {
            snprintf(message, size, "APA_SET: %s", why);
            return false;
        }
    }
    return true;
}

bool apa_ggml_settings_load(apa_ggml_settings *settings, char *message, size_t size)
{
    const char *method = getenv("APA_METHOD"), *eps = getenv("APA_EPS"), *set = getenv("APA_SET");
    char why[200];
    apa_ggml_settings wanted = {.min_queries = MIN_QUERIES, .min_keys = MIN_KEYS};
    apa_recipe_init(&wanted.recipe, NULL);
    apa_recipe_init(&wanted.exact, "exact");
    *settings = wanted;
    if (method != NULL && *method != '\0' && apa_recipe_init(&wanted.recipe, method) != APA_STATUS_OK) {
        snprintf(message, size, "APA_METHOD: \"%s\" is no method", method);
        return false;
    }
    if (eps != NULL && *eps != '\0' && apa_recipe_set(&wanted.recipe, "eps", eps, why, sizeof why) != APA_STATUS_OK) {
        snprintf(message, size, "APA_EPS: %s", why);
        return false;
    }
    if (set != NULL && !apply_set(&wanted.recipe, set, message, size))
        return false;
    if (!read_count("APA_MIN_QUERIES", &wanted.min_queries, message, size) ||
        !read_count("APA_MIN_KEYS", &wanted.min_keys, message, size))
        return false;
    int64_t statistics = 0;
    if (!read_count("APA_STATISTICS", &statistics, message, size))
        return false;
    wanted.statistics = statistics > 0;
    *settings = wanted;
    return true;
}
