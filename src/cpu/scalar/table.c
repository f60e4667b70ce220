/* The portable row of the kernel table. */
#include "cpu/scalar/scalar.h"

const apa_cpu_kernels apa_cpu_kernels_scalar = {.name = "scalar", APA_CPU_ROW(scalar, scalar), APA_CPU_FEW_ROW(scalar)};
