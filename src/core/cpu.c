/* What the CPU has, by cpuinfo. A level counts only when this build has kernels for it. */
#include "core/context_internal.h"

#include <cpuinfo.h>

apa_isa apa_cpu_best_isa(void)
{
    if (!cpuinfo_initialize())
        return APA_ISA_SCALAR;
#ifdef APA_HAVE_AVX512
    if (cpuinfo_has_x86_fma3() && cpuinfo_has_x86_f16c() && cpuinfo_has_x86_avx512f() && cpuinfo_has_x86_avx512bw() &&
        cpuinfo_has_x86_avx512dq() && cpuinfo_has_x86_avx512vl() && cpuinfo_has_x86_avx512vnni() &&
        cpuinfo_has_x86_avx512vbmi())
        return APA_ISA_AVX512;
#endif
    return APA_ISA_SCALAR;
}

const char *apa_isa_name(apa_isa isa)
{
    static const char *const name[] = {"scalar", "avx2", "avx512", "neon"};
    return name[isa];
}
