/* 2^r for r in [-1/2, 1/2] (and, below, in [0, 1)) as polynomials with p(0) = 1, so that a row's maximum gives
 * exactly 1.
 *
 * Coefficients: least relative error fits (iteratively reweighted least squares on 4000 Chebyshev nodes), rounded to
 * float. Relative error of the polynomial itself: degree 6 1.6e-8 (under a quarter of an ulp), degree 3 1.0e-4 (INT8
 * probabilities round at 2e-3 of the tile's maximum, twenty times coarser). */
#ifndef APA_CPU_EXP2_H
#define APA_CPU_EXP2_H

#define APA_EXP2_6_C1 0x1.62e430p-1f
#define APA_EXP2_6_C2 0x1.ebfbdcp-3f
#define APA_EXP2_6_C3 0x1.c6aee8p-5f
#define APA_EXP2_6_C4 0x1.3b2d4cp-7f
#define APA_EXP2_6_C5 0x1.5f3e54p-10f
#define APA_EXP2_6_C6 0x1.41fbbcp-13f

/* The same for r in [0, 1), degree 6: 2.1e-9; with its roundings at most 6.1e-8, half an ulp. */
#define APA_EXP2_UP_C1 0x1.62e42cp-1f
#define APA_EXP2_UP_C2 0x1.ebfd3ap-3f
#define APA_EXP2_UP_C3 0x1.c68af6p-5f
#define APA_EXP2_UP_C4 0x1.3cfd82p-7f
#define APA_EXP2_UP_C5 0x1.473738p-10f
#define APA_EXP2_UP_C6 0x1.c44580p-13f

#define APA_EXP2_3_C1 0x1.62f5fap-1f
#define APA_EXP2_3_C2 0x1.f00c4cp-3f
#define APA_EXP2_3_C3 0x1.c2a216p-5f

/* tanh(x) by 2^z, z = 2·log2 e·|x|; from z = 40 on it is 1 in FP32. */
#define APA_TANH_SCALE 0x1.715476p+1f
#define APA_TANH_HIGHEST 40.0f

/* Arguments under this give 0 in every use here; clamping keeps -inf out of the range reduction. */
#define APA_EXP2_LOWEST -200.0f

#endif
