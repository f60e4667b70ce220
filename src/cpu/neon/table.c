/* The NEON row of the kernel table. */
#include "cpu/neon/neon.h"

const apa_cpu_kernels apa_cpu_kernels_neon = {.name = "neondot", APA_CPU_ROW(neon, neon), APA_CPU_FEW_ROW(neon)};
