/* Prep of the adaptive method: K's mean, rotated and quantised K and V tiles of every KV head.
 *
 * Stated order, the same in the reference engine: the mean of channel d is the sum over tiles in order of the tile's
 * sum over its keys in order, both in double, over the keys whose row is wholly finite, divided by their number and
 * rounded once to f32. A centred key is (f32)k - mean in f32, rotated by the block-diagonal Walsh-Hadamard matrix
 * (butterflies of distance 1, 2, 4, …, then one product with 1/sqrt(block)), then quantised per key. V is quantised per
 * tile and channel. */
#ifndef APA_CPU_PREP_H
#define APA_CPU_PREP_H

#include "cpu/shape.h"

typedef struct apa_cpu_prepared {
    float *k_mean;      /* [B·Hkv][Dp]; zeros when K is not smoothed */
    int8_t *k8;         /* [B·Hkv][tiles][TILE][Dp] */
    int8_t *v8;         /* [B·Hkv][tiles][TILE/4][Dvp][4] */
    int32_t *k_bias;    /* [B·Hkv][tiles][TILE] */
    float *k_scale;     /* [B·Hkv][tiles][TILE] */
    float *v_scale;     /* [B·Hkv][tiles][Dvp] */
    float *k_scale_max; /* [B·Hkv][tiles] */
    float *v_max;       /* [B·Hkv][tiles] */
    uint8_t *poisoned;  /* [B·Hkv][tiles]: holds a NaN or Inf, so it is forced hot */
    double *tile_sum;   /* [B·Hkv][tiles][Dp + 1]: scratch; the last element counts the keys */
} apa_cpu_prepared;

/* Lays the arrays out in an arena (base NULL: measures). */
void apa_cpu_prepared_layout(const apa_call *call, const apa_cpu_shape *shape, apa_cpu_arena *arena,
                             apa_cpu_prepared *prepared);

void apa_cpu_prepare(apa_context *context, const apa_call *call, const apa_cpu_shape *shape,
                     const apa_cpu_kernels *kernels, const apa_cpu_prepared *prepared);

#endif
