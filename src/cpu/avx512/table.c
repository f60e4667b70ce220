/* The AVX-512 row of the kernel table. */
#include "cpu/avx512/avx512.h"

const apa_cpu_kernels apa_cpu_kernels_avx512 = {
    .name = "avx512vnni",
    .widen = apa_widen_avx512,
    .widen_v = apa_widen_v_avx512,
    .scores_f32 = apa_scores_f32_avx512,
    .softmax_f32 = apa_softmax_f32_avx512,
    .pv_f32 = apa_pv_f32_avx512,
    .scale_lanes = apa_scale_lanes_avx512,
    .scores_i8 = apa_scores_i8_avx512vnni,
    .max_i8 = apa_max_i8_avx512,
    .softmax_i8 = apa_softmax_i8_avx512,
    .look = apa_look_avx512,
    .judge = apa_judge_avx512,
    .judge_again = apa_judge_again_avx512,
    .pv_i8 = apa_pv_i8_avx512vnni,
    .accumulate = apa_accumulate_avx512,
    .quantise_v = apa_quantise_v_avx512,
    .quantise_k = apa_quantise_k_avx512,
    .quantise_row = apa_quantise_row_avx512,
    .narrow = apa_narrow_avx512,
    .hadamard = apa_hadamard_avx512,
};
