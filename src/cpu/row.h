/* A level's row of the kernel table, written once for all levels: what its kernels are called, declared and where they
 * stand in the table. Contracts are in cpu/kernels.h; nobody calls these functions but through a table.
 *
 * `isa` ends the names of a level's kernels; `dot` those of its two INT8 products, which a level may have in more than
 * one way (avx2, avx2vnni). A kernel that is missing does not link. */
#ifndef APA_CPU_ROW_H
#define APA_CPU_ROW_H

#include "cpu/kernels.h"

#define APA_CPU_DECLARE(isa)                                                                                           \
    bool apa_widen_##isa(apa_dtype dtype, const void *src, int64_t n, float *dst);                                     \
    void apa_load_k_##isa(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t D, int64_t Dp,          \
                          float *k);                                                                                   \
    uint64_t apa_load_v_##isa(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t Dv, int64_t Dvp,    \
                              int64_t key, float *v);                                                                  \
    void apa_scores_f32_##isa(int n, const float *const *q, const float *k, int64_t Dp, float *s, float *maximum,      \
                              const apa_cpu_prefetch *prefetch);                                                       \
    bool apa_softmax_f32_##isa(float *s, int n, float c, const apa_cpu_span *span, const float *maximum,               \
                               apa_cpu_state *state, float *alpha);                                                    \
    void apa_bend_##isa(float *s, int n, const float *factor, float cap, const float *slope, const float *distance,    \
                        const float *bias);                                                                            \
    void apa_into_lanes_##isa(const float *rows, float *lanes);                                                        \
    void apa_pv_f32_##isa(int n, const float *p, const float *v, int64_t Dvp, float *const *o);                        \
    void apa_scale_lanes_##isa(float *x, int64_t rows, const float *alpha);                                            \
    void apa_merge_lanes_##isa(const apa_cpu_state *left, const float *left_o, float c, int64_t rows,                  \
                               apa_cpu_state *state, float *o);                                                        \
    void apa_max_i8_##isa(const float *s, int n, const apa_cpu_span *span, float *maximum);                            \
    void apa_softmax_i8_##isa(const float *s, int n, const apa_cpu_span *span, const float *maximum,                   \
                              const float *q_scale, uint8_t *p8, int32_t *sum);                                        \
    bool apa_look_##isa(apa_cpu_walk *walk, const float *maximum, float k_scale_max, float v_max, float *top);         \
    int apa_judge_##isa(apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *alpha,             \
                        float *p_scale);                                                                               \
    bool apa_judge_again_##isa(const apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps,              \
                               float *p_scale);                                                                        \
    int apa_sum_k_##isa(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead,          \
                        double *sum);                                                                                  \
    bool apa_quantise_k_##isa(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead,    \
                              const float *mean, int64_t block, int8_t *k8, int32_t *bias, float *k_scale);            \
    bool apa_quantise_v_##isa(apa_dtype dtype, const void *const *rows, int n, int64_t Dv, const void *const *ahead,   \
                              int8_t *v8, float *v_scale, float *largest);                                             \
    float apa_quantise_row_##isa(const float *value, int64_t n, int8_t *code);                                         \
    void apa_narrow_##isa(apa_dtype dtype, const float *value, int64_t n, void *dst);                                  \
    void apa_hadamard_##isa(float *value, int64_t n, int64_t block);                                                   \
    double apa_peak_##isa(apa_cpu_peak what, int64_t rounds, const void *memory, int64_t bytes)

#define APA_CPU_DECLARE_DOT(dot)                                                                                       \
    void apa_scores_i8_##dot(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,                \
                             const float *k_scale, int64_t Dp, float *s, float *maximum,                               \
                             const apa_cpu_prefetch *prefetch);                                                        \
    void apa_pv_i8_##dot(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale,                      \
                         const float *const *p_scale, int64_t Dvp, float *const *o);                                   \
    double apa_peak_i8_##dot(int64_t rounds)

/* Kernels of few rows, apart: avx512bf16 has scores of its own. */
#define APA_CPU_DECLARE_FEW(isa)                                                                                       \
    void apa_scores_few_##isa(apa_dtype dtype, const void *const *keys, int n, int64_t D, const apa_cpu_ahead *ahead,  \
                              int R, const float *q, float *s);                                                        \
    void apa_softmax_few_##isa(int R, float *s, float c, const apa_cpu_span *span, apa_cpu_state *state,               \
                               float *alpha);                                                                          \
    bool apa_pv_few_##isa(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const apa_cpu_ahead *ahead,   \
                          int R, const float *p, const float *alpha, bool check, float *o)

#define APA_CPU_FEW_ROW(isa)                                                                                           \
    .scores_few = apa_scores_few_##isa, .softmax_few = apa_softmax_few_##isa, .pv_few = apa_pv_few_##isa

/* The initialiser of a table, but for its name. */
#define APA_CPU_ROW(isa, dot)                                                                                          \
    .widen = apa_widen_##isa, .load_k = apa_load_k_##isa, .load_v = apa_load_v_##isa,                                  \
    .scores_f32 = apa_scores_f32_##isa, .softmax_f32 = apa_softmax_f32_##isa, .bend = apa_bend_##isa,                  \
    .into_lanes = apa_into_lanes_##isa, .pv_f32 = apa_pv_f32_##isa, .scale_lanes = apa_scale_lanes_##isa,              \
    .merge_lanes = apa_merge_lanes_##isa, .scores_i8 = apa_scores_i8_##dot, .max_i8 = apa_max_i8_##isa,                \
    .softmax_i8 = apa_softmax_i8_##isa, .look = apa_look_##isa, .judge = apa_judge_##isa,                              \
    .judge_again = apa_judge_again_##isa, .pv_i8 = apa_pv_i8_##dot, .sum_k = apa_sum_k_##isa,                          \
    .quantise_v = apa_quantise_v_##isa, .quantise_k = apa_quantise_k_##isa, .quantise_row = apa_quantise_row_##isa,    \
    .narrow = apa_narrow_##isa, .hadamard = apa_hadamard_##isa, .peak = apa_peak_##isa, .peak_i8 = apa_peak_i8_##dot

#endif
