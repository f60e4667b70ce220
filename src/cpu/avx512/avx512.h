/* The AVX-512 kernels, contracts in cpu/kernels.h. Called only through the table in table.c. */
#ifndef APA_CPU_AVX512_AVX512_H
#define APA_CPU_AVX512_AVX512_H

#include "cpu/kernels.h"

bool apa_widen_avx512(apa_dtype dtype, const void *src, int64_t n, float *dst);
bool apa_widen_v_avx512(apa_dtype dtype, const void *src, int64_t n, int64_t Dvp, int64_t key, float *v);
void apa_scores_f32_avx512(int n, const float *const *q, const float *k, int64_t Dp, float *s,
                           const apa_cpu_prefetch *prefetch);
bool apa_softmax_f32_avx512(float *s, int n, float c, const apa_cpu_span *span, apa_cpu_state *state, float *alpha);
void apa_pv_f32_avx512(int n, const float *p, const float *v, int64_t Dvp, float *const *o);
void apa_scale_lanes_avx512(float *x, int64_t rows, const float *alpha);
void apa_scores_i8_avx512vnni(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                              const float *k_scale, int64_t Dp, float *s, float *maximum,
                              const apa_cpu_prefetch *prefetch);
void apa_max_i8_avx512(const float *s, int n, const apa_cpu_span *span, float *maximum);
void apa_softmax_i8_avx512(const float *s, int n, const apa_cpu_span *span, const float *maximum, const float *q_scale,
                           uint8_t *p8, int32_t *sum);
void apa_pv_i8_avx512vnni(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale,
                          const float *const *p_scale, int64_t Dvp, float *const *o);
bool apa_look_avx512(apa_cpu_walk *walk, const float *maximum, float k_scale_max, float v_max, float *top);
int apa_judge_avx512(apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *alpha, float *p_scale);
bool apa_judge_again_avx512(const apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *p_scale);
void apa_accumulate_avx512(double *sum, const float *value, int64_t n);
float apa_quantise_v_avx512(const float *v, int64_t Dvp, int8_t *v8, float *v_scale);
void apa_narrow_avx512(apa_dtype dtype, const float *value, int64_t n, void *dst);
bool apa_quantise_k_avx512(apa_dtype dtype, const void *src, int64_t D, const float *mean, int64_t block, int8_t *code,
                           float *scale, int32_t *sum);
float apa_quantise_row_avx512(const float *value, int64_t n, int8_t *code);
void apa_hadamard_avx512(float *value, int64_t n, int64_t block);

#endif
