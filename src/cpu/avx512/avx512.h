/* The AVX-512 kernels, contracts in cpu/kernels.h. Called only through the table in table.c. */
#ifndef APA_CPU_AVX512_AVX512_H
#define APA_CPU_AVX512_AVX512_H

#include "cpu/row.h"

APA_CPU_DECLARE(avx512);
APA_CPU_DECLARE_DOT(avx512vnni);
APA_CPU_DECLARE_FEW(avx512);

/* INT8 tiles of few rows (few_i8.c). */
void apa_scores_few_i8_avx512(int R, const uint8_t *q8, const int8_t *k8, const int32_t *k8_bias, const float *k_scale,
                              int64_t Dp, float *s, const apa_cpu_prefetch *prefetch);
void apa_max_few_i8_avx512(int R, const float *s, const apa_cpu_span *span, float *maximum);
void apa_softmax_few_i8_avx512(int R, const float *s, const apa_cpu_span *span, const float *maximum,
                               const float *q_scale, uint8_t *p8, int32_t *sum);
void apa_pv_few_i8_avx512(int R, const uint8_t *p8, const int8_t *v8, const float *v_scale, const float *p_scale,
                          int64_t Dvp, float *o);
#define APA_AVX512_FEW_I8_ROW                                                                                          \
    .scores_few_i8 = apa_scores_few_i8_avx512, .max_few_i8 = apa_max_few_i8_avx512,                                    \
    .softmax_few_i8 = apa_softmax_few_i8_avx512, .pv_few_i8 = apa_pv_few_i8_avx512

/* Scores of a panel beside the exponentials of another (i8_beside.c). */
bool apa_scores_beside_i8_avx512(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                                 const float *k_scale, int64_t Dp, float *s, float *maximum,
                                 const apa_cpu_prefetch *prefetch, const apa_cpu_due *due);

/* With the BF16 dot product (bf16.c). */
void apa_scores_bf16_avx512(int n, const uint32_t *const *q, const uint16_t *k, int64_t Dp, float *s, float *maximum,
                            const apa_cpu_prefetch *prefetch);
void apa_scores_few_avx512bf16(apa_dtype dtype, const void *const *keys, int n, int64_t D, const apa_cpu_ahead *ahead,
                               int R, const float *q, float *s);
double apa_peak_bf16_avx512(int64_t rounds);

#endif
