/* The AVX-512 kernels, contracts in cpu/kernels.h. Called only through the table in table.c. */
#ifndef APA_CPU_AVX512_AVX512_H
#define APA_CPU_AVX512_AVX512_H

#include "cpu/row.h"

APA_CPU_DECLARE(avx512);
APA_CPU_DECLARE_DOT(avx512vnni);

#endif
