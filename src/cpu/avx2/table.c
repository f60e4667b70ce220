/* The AVX2 rows of the kernel table: without and with AVX-VNNI, which differ in the two INT8 products alone. */
#include "cpu/avx2/avx2.h"

const apa_cpu_kernels apa_cpu_kernels_avx2 = {.name = "avx2", APA_CPU_ROW(avx2, avx2), APA_CPU_FEW_ROW(avx2)};

#ifdef APA_HAVE_AVXVNNI
const apa_cpu_kernels apa_cpu_kernels_avx2vnni = {
    .name = "avx2vnni", APA_CPU_ROW(avx2, avx2vnni), APA_CPU_FEW_ROW(avx2)};
#endif
