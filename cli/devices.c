/* Device profiles by name, and a modelled cost as JSON. */
#include "cli.h"

#include <stdio.h>
#include <string.h>

static int add_device(const char *name, size_t n, cli_devices *devices)
{
    char copy[32], known[512] = "all";
    snprintf(copy, sizeof copy, "%.*s", (int)n, name);
    const apa_device_profile *profile = n < sizeof copy ? apa_device_profile_find(copy) : NULL;
    for (size_t i = 0; profile == NULL && apa_device_profile_at(i) != NULL; i++) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, ", %s", apa_device_profile_at(i)->name);
    }
    if (profile == NULL)
        return cli_complain(CLI_MISUSE, "--device: \"%.*s\", expected one of %s", (int)n, name, known);
    for (int i = 0; i < devices->count; i++)
        if (devices->profile[i] == profile)
            return CLI_DONE; /* named twice */
    if (devices->count == CLI_DEVICES)
        return cli_complain(CLI_MISUSE, "--device: more than %d devices", CLI_DEVICES);
    devices->profile[devices->count++] = profile;
    return CLI_DONE;
}

int cli_devices_choose(const char *list, const char *fallback, cli_devices *devices)
{
    int code = CLI_DONE;
    devices->count = 0;
    if (list == NULL)
        list = fallback;
    if (list == NULL)
        return CLI_DONE;
    if (strcmp(list, "all") == 0) {
        for (size_t i = 0; apa_device_profile_at(i) != NULL && code == CLI_DONE; i++)
            code = add_device(apa_device_profile_at(i)->name, strlen(apa_device_profile_at(i)->name), devices);
        return code;
    }
    for (;;) {
        const size_t n = strcspn(list, ",");
        code = add_device(list, n, devices);
        if (code != CLI_DONE || list[n] == '\0')
            return code;
        list += n + 1;
    }
}

json_t *cli_json_cost(const apa_cost *cost)
{
    json_t *object = json_object(), *macs = json_object(), *replaced = json_array();
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"prep_ms", cost->prep_ms},
                   {"attention_ms", cost->attention_ms},
                   {"total_ms", cost->prep_ms + cost->attention_ms},
                   {"exact_ms", cost->exact_ms},
                   {"speedup", cost->speedup},
                   {"score_macs", cost->score_macs},
                   {"value_macs", cost->value_macs},
                   {"exact_macs", cost->exact_macs},
                   {"select_macs", cost->select_macs},
                   {"exponentials", cost->exponentials},
                   {"prep_bytes", cost->prep_bytes},
                   {"attention_bytes", cost->attention_bytes}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        json_object_set_new(object, numbers[i].key, cli_json_number(numbers[i].value));
    for (int u = 0; u < APA_UNIT_COUNT; u++) {
        json_object_set_new(macs, apa_unit_name((apa_unit)u), cli_json_number(cost->macs[u]));
        if (cost->replaced & 1u << u)
            json_array_append_new(replaced, json_string(apa_unit_name((apa_unit)u)));
    }
    json_object_set_new(object, "macs", macs);
    json_object_set_new(object, "replaced", replaced);
    return object;
}
