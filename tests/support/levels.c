/* Levels of this machine and build: see levels.h. */
#include "support/levels.h"

#include "support/test.h"

#include <stdio.h>

/* The tables of this build. Each needs the CPU to have its level, and what else it says. */
static const struct {
    apa_isa isa;
    const apa_cpu_kernels *kernels;
    int (*needs)(void);
} built[] = {
    {APA_ISA_SCALAR, &apa_cpu_kernels_scalar, NULL},
#ifdef APA_HAVE_AVX2
    {APA_ISA_AVX2, &apa_cpu_kernels_avx2, NULL},
#endif
#ifdef APA_HAVE_AVXVNNI
    {APA_ISA_AVX2, &apa_cpu_kernels_avx2vnni, apa_cpu_has_avxvnni},
#endif
#ifdef APA_HAVE_AVX512
    {APA_ISA_AVX512, &apa_cpu_kernels_avx512, NULL},
    {APA_ISA_AVX512, &apa_cpu_kernels_avx512bf16, apa_cpu_has_avx512bf16},
#endif
#ifdef APA_HAVE_NEON
    {APA_ISA_NEON, &apa_cpu_kernels_neon, NULL},
#endif
};
#define BUILT (int)(sizeof built / sizeof built[0])

static int cpu_has(apa_isa isa)
{
    const apa_isa best = apa_cpu_best_isa();
    return isa == APA_ISA_SCALAR || isa == best || (best != APA_ISA_NEON && isa < best);
}

static int build_has(apa_isa isa)
{
    for (int i = 0; i < BUILT; i++)
        if (built[i].isa == isa)
            return 1;
    return 0;
}

int apa_test_levels(apa_test_level level[APA_TEST_LEVELS_MAX])
{
    int n = 0;
    for (int i = APA_ISA_SCALAR; i <= APA_ISA_NEON; i++) {
        const apa_isa isa = (apa_isa)i;
        if (!cpu_has(isa) || !build_has(isa)) {
            printf("# level %s skipped: %s\n", apa_isa_name(isa),
                   build_has(isa) ? "this CPU lacks it" : "not in this build");
            continue;
        }
        level[n].isa = isa;
        level[n].name = apa_isa_name(isa);
        level[n++].kernels = apa_cpu_kernels_for(isa);
    }
    return n;
}

int apa_test_tables(apa_test_level table[APA_TEST_LEVELS_MAX])
{
    int n = 0;
    for (int i = APA_ISA_SCALAR; i <= APA_ISA_NEON; i++)
        if (!build_has((apa_isa)i))
            printf("# kernels of level %s skipped: not in this build\n", apa_isa_name((apa_isa)i));
    for (int i = 0; i < BUILT; i++) {
        if (!cpu_has(built[i].isa) || (built[i].needs != NULL && !built[i].needs())) {
            printf("# kernels %s skipped: this CPU lacks them\n", built[i].kernels->name);
            continue;
        }
        table[n].isa = built[i].isa;
        table[n].name = built[i].kernels->name;
        table[n++].kernels = built[i].kernels;
    }
    return n;
}

apa_context *apa_test_level_context(const apa_test_level *level, int32_t threads)
{
    apa_context_options options;
    apa_context *context;
    apa_context_options_init(&options);
    options.isa = apa_isa_name(level->isa);
    options.threads = threads;
    if (apa_context_create(&context, &options) != APA_STATUS_OK)
        fail_msg("no context of level %s", level->name);
    return context;
}
