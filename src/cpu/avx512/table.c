/* The AVX-512 rows of the kernel table: without and with the BF16 dot product, which differ in BF16 scores alone. */
#include "cpu/avx512/avx512.h"

const apa_cpu_kernels apa_cpu_kernels_avx512 = {.name = "avx512vnni",
                                                APA_CPU_ROW(avx512, avx512vnni),
                                                APA_CPU_FEW_ROW(avx512),
                                                APA_AVX512_FEW_I8_ROW,
                                                .scores_beside_i8 = apa_scores_beside_i8_avx512};

const apa_cpu_kernels apa_cpu_kernels_avx512bf16 = {.name = "avx512bf16",
                                                    APA_CPU_ROW(avx512, avx512vnni),
                                                    .scores_few = apa_scores_few_avx512bf16,
                                                    .softmax_few = apa_softmax_few_avx512,
                                                    .pv_few = apa_pv_few_avx512,
                                                    APA_AVX512_FEW_I8_ROW,
                                                    .scores_beside_i8 = apa_scores_beside_i8_avx512,
                                                    .scores_bf16 = apa_scores_bf16_avx512,
                                                    .peak_bf16 = apa_peak_bf16_avx512};
