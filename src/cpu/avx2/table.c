/* The AVX2 rows of the kernel table: without and with AVX-VNNI, which differ in the two INT8 products alone. */
#include "cpu/avx2/avx2.h"

#define APA_AVX2_ROW                                                                                                   \
    .widen = apa_widen_avx2, .widen_v = apa_widen_v_avx2, .scores_f32 = apa_scores_f32_avx2,                           \
    .softmax_f32 = apa_softmax_f32_avx2, .pv_f32 = apa_pv_f32_avx2, .scale_lanes = apa_scale_lanes_avx2,               \
    .max_i8 = apa_max_i8_avx2, .softmax_i8 = apa_softmax_i8_avx2, .look = apa_look_avx2, .judge = apa_judge_avx2,      \
    .judge_again = apa_judge_again_avx2, .accumulate = apa_accumulate_avx2, .quantise_v = apa_quantise_v_avx2,         \
    .quantise_k = apa_quantise_k_avx2, .quantise_row = apa_quantise_row_avx2, .narrow = apa_narrow_avx2,               \
    .hadamard = apa_hadamard_avx2

const apa_cpu_kernels apa_cpu_kernels_avx2 = {
    .name = "avx2",
    .scores_i8 = apa_scores_i8_avx2,
    .pv_i8 = apa_pv_i8_avx2,
    APA_AVX2_ROW,
};

#ifdef APA_HAVE_AVXVNNI
const apa_cpu_kernels apa_cpu_kernels_avx2vnni = {
    .name = "avx2vnni",
    .scores_i8 = apa_scores_i8_avx2vnni,
    .pv_i8 = apa_pv_i8_avx2vnni,
    APA_AVX2_ROW,
};
#endif
