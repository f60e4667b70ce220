/* Whole problems through the API: the bytes are the choices of the property test (property/case.h), two a choice, and
 * all that it checks must hold on every engine. The fuzzer finds combinations, the sanitizers what they touch. */
#include "fuzz/fuzz.h"
#include "property/check.h"

static checker engines[2] = {{.engine = "reference", .may_refuse = true}, {.engine = "cpu", .may_refuse = true}};

static void backwards(void *pool, void (*task)(void *argument, size_t index), void *argument, size_t count)
{
    (void)pool;
    while (count-- > 0)
        task(argument, count);
}

static void open_engines(void)
{
    for (int e = 0; e < 2 && engines[e].one == NULL; e++) {
        apa_context_options options;
        apa_context_options_init(&options);
        options.threads = 1;
        FUZZ_HOLDS(apa_context_create(&engines[e].one, &options) == APA_STATUS_OK);
        options.parallel_for = backwards;
        FUZZ_HOLDS(apa_context_create(&engines[e].backwards, &options) == APA_STATUS_OK);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const case_limits limits = {12, 100, 24};
    uint64_t choice[DRAW_CHOICES];
    size_t count = 0;
    open_engines();
    for (size_t i = 0; i + 1 < size && count < DRAW_CHOICES; i += 2)
        choice[count++] = (uint64_t)data[i] | (uint64_t)data[i + 1] << 8;
    for (int e = 0; e < 2; e++) {
        draw from = draw_list(choice, count);
        property_case *made = case_make(&from, limits);
        if (check_case(&engines[e], made) == FAILS) {
            fprintf(stderr, "%s: %s\n", engines[e].engine, engines[e].message);
            case_print(made);
            fflush(stdout);
            abort();
        }
        case_free(made);
    }
    return 0;
}
