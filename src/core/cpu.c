/* What the CPU has, by cpuinfo (which also asks whether the operating system keeps the wide registers). A level counts
 * only when this build has kernels for it. */
#include "core/context_internal.h"

#include <cpuinfo.h>
#ifdef APA_HAVE_AVXVNNI
#include <cpuid.h>
#endif

#ifdef APA_HAVE_AVX2
static int has_avx2(void)
{
    return cpuinfo_has_x86_avx2() && cpuinfo_has_x86_fma3() && cpuinfo_has_x86_f16c();
}
#endif

apa_isa apa_cpu_best_isa(void)
{
    if (!cpuinfo_initialize())
        return APA_ISA_SCALAR;
#ifdef APA_HAVE_AVX512
    if (has_avx2() && cpuinfo_has_x86_avx512f() && cpuinfo_has_x86_avx512bw() && cpuinfo_has_x86_avx512dq() &&
        cpuinfo_has_x86_avx512vl() && cpuinfo_has_x86_avx512vnni() && cpuinfo_has_x86_avx512vbmi())
        return APA_ISA_AVX512;
#endif
#ifdef APA_HAVE_AVX2
    if (has_avx2())
        return APA_ISA_AVX2;
#endif
#ifdef APA_HAVE_NEON
    if (cpuinfo_has_arm_neon() && cpuinfo_has_arm_neon_dot())
        return APA_ISA_NEON;
#endif
    return APA_ISA_SCALAR;
}

/* CPUID leaf 7, subleaf 1, EAX bit 4: Intel's manual, volume 2A. Its registers are those of AVX2. */
int apa_cpu_has_avxvnni(void)
{
#ifdef APA_HAVE_AVXVNNI
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return cpuinfo_initialize() && has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1) != 0;
#else
    return 0;
#endif
}

int apa_cpu_has_avx512bf16(void)
{
#ifdef APA_HAVE_AVX512
    return apa_cpu_best_isa() == APA_ISA_AVX512 && cpuinfo_has_x86_avx512bf16();
#else
    return 0;
#endif
}

const char *apa_isa_name(apa_isa isa)
{
    static const char *const name[] = {"scalar", "avx2", "avx512", "neon"};
    return name[isa];
}
