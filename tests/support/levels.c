/* Levels of this machine and build: see levels.h. */
#include "support/levels.h"

#include "support/test.h"

#include <stdio.h>

/* Why a level is not run; NULL if it is. */
static const char *reason_to_skip(apa_isa isa)
{
    const apa_isa best = apa_cpu_best_isa();
    if (isa == APA_ISA_SCALAR)
        return NULL;
    if ((isa == APA_ISA_NEON) != (best == APA_ISA_NEON) || isa > best)
        return "this CPU or this build lacks it";
    if (apa_cpu_kernels_for(isa) == apa_cpu_kernels_for((apa_isa)(isa - 1)))
        return "no kernels of its own in this build";
    return NULL;
}

int apa_test_levels(apa_test_level level[APA_TEST_LEVELS_MAX])
{
    int n = 0;
    for (int isa = APA_ISA_SCALAR; isa <= APA_ISA_NEON; isa++) {
        const char *reason = reason_to_skip((apa_isa)isa);
        if (reason != NULL) {
            printf("# level %s skipped: %s\n", apa_isa_name((apa_isa)isa), reason);
            continue;
        }
        level[n].isa = (apa_isa)isa;
        level[n].name = apa_isa_name((apa_isa)isa);
        level[n++].kernels = apa_cpu_kernels_for((apa_isa)isa);
    }
    return n;
}

apa_context *apa_test_level_context(const apa_test_level *level, int32_t threads)
{
    apa_context_options options;
    apa_context *context;
    apa_context_options_init(&options);
    options.isa = level->name;
    options.threads = threads;
    if (apa_context_create(&context, &options) != APA_STATUS_OK)
        fail_msg("no context of level %s", level->name);
    return context;
}
