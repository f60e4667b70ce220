/* The NEON row of the kernel table. */
#include "cpu/neon/neon.h"

const apa_cpu_kernels apa_cpu_kernels_neon = {
    .name = "neondot",
    .widen = apa_widen_neon,
    .widen_v = apa_widen_v_neon,
    .scores_f32 = apa_scores_f32_neon,
    .softmax_f32 = apa_softmax_f32_neon,
    .pv_f32 = apa_pv_f32_neon,
    .scale_lanes = apa_scale_lanes_neon,
    .scores_i8 = apa_scores_i8_neon,
    .max_i8 = apa_max_i8_neon,
    .softmax_i8 = apa_softmax_i8_neon,
    .look = apa_look_neon,
    .judge = apa_judge_neon,
    .judge_again = apa_judge_again_neon,
    .pv_i8 = apa_pv_i8_neon,
    .accumulate = apa_accumulate_neon,
    .quantise_v = apa_quantise_v_neon,
    .quantise_k = apa_quantise_k_neon,
    .quantise_row = apa_quantise_row_neon,
    .narrow = apa_narrow_neon,
    .hadamard = apa_hadamard_neon,
};
