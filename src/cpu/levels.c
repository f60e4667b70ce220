/* Which kernel table a level uses on this machine. */
#include "cpu/kernels.h"

const apa_cpu_kernels *apa_cpu_kernels_for(apa_isa isa)
{
#ifdef APA_HAVE_AVX512
    if (isa == APA_ISA_AVX512)
        return apa_cpu_has_avx512bf16() ? &apa_cpu_kernels_avx512bf16 : &apa_cpu_kernels_avx512;
#endif
#ifdef APA_HAVE_AVX2
    if (isa == APA_ISA_AVX2 || isa == APA_ISA_AVX512) {
#ifdef APA_HAVE_AVXVNNI
        if (apa_cpu_has_avxvnni())
            return &apa_cpu_kernels_avx2vnni;
#endif
        return &apa_cpu_kernels_avx2;
    }
#endif
#ifdef APA_HAVE_NEON
    if (isa == APA_ISA_NEON)
        return &apa_cpu_kernels_neon;
#endif
    (void)isa;
    return &apa_cpu_kernels_scalar;
}
