/* Launchers of the merge on a device. */
#ifndef APA_DIST_NCCL_MERGE_H
#define APA_DIST_NCCL_MERGE_H

#include "apa/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rows states of `ranks` ranks, out [ranks][rows][Dv], lse [ranks][rows], merged in order of rank into out0 [rows][Dv],
 * lse0 [rows]. Returns a cudaError_t. */
int apa_dist_nccl_merge(const float *out, const float *lse, int64_t ranks, int64_t rows, int64_t Dv, float *out0,
                        float *lse0, void *stream);

/* Empty states: out zeros, lse -inf. */
int apa_dist_nccl_empty(float *out, float *lse, int64_t rows, int64_t Dv, void *stream);

/* [B][H][S] rows in order → out (f16, bf16, f32, any strides) and lse (f32; dtype NONE: not wanted). */
int apa_dist_nccl_store(const float *rows_out, const float *rows_lse, const apa_tensor *out, const apa_tensor *lse,
                        void *stream);

#ifdef __cplusplus
}
#endif
#endif
