/* The AVX-512 row of the kernel table. */
#include "cpu/avx512/avx512.h"

const apa_cpu_kernels apa_cpu_kernels_avx512 = {.name = "avx512vnni", APA_CPU_ROW(avx512, avx512vnni)};
