/* The NEON kernels, contracts in cpu/kernels.h. Called only through the table in table.c. */
#ifndef APA_CPU_NEON_NEON_H
#define APA_CPU_NEON_NEON_H

#include "cpu/row.h"

APA_CPU_DECLARE(neon);
APA_CPU_DECLARE_DOT(neon);
APA_CPU_DECLARE_FEW(neon);

#endif
