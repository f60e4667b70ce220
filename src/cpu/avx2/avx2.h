/* The AVX2 kernels, contracts in cpu/kernels.h. Called only through the tables in table.c. */
#ifndef APA_CPU_AVX2_AVX2_H
#define APA_CPU_AVX2_AVX2_H

#include "cpu/row.h"

APA_CPU_DECLARE(avx2);
APA_CPU_DECLARE_DOT(avx2);
APA_CPU_DECLARE_DOT(avx2vnni);
APA_CPU_DECLARE_FEW(avx2);

#endif
