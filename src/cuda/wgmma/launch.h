/* What the host hands the Hopper kernels: the job of the CUDA engine (cuda/job.h), whose buffers for prepared tiles and
 * queries hold other layouts here (tile_e4m3.cuh), and the tensor maps of K and V. */
#ifndef APA_CUDA_WGMMA_LAUNCH_H
#define APA_CUDA_WGMMA_LAUNCH_H

#include "cuda/job.h"

#include <cuda.h>

/* Keys and values as the tensor copy engine reads them: boxes of 64 channels × the kernel's keys. */
typedef struct apa_wgmma_maps {
    CUtensorMap k, v;
} apa_wgmma_maps;

#ifdef __cplusplus
extern "C" {
#endif

/* Keys that a block of the exact kernel takes at a time. */
int64_t apa_wgmma_exact_keys(int64_t D);

/* Rows of a wide block of it; those of a unit where there are no wide ones. */
int64_t apa_wgmma_exact_rows(int64_t D);

/* Blocks a split of pass 1. The job's units are whole KV heads, or lie within one. */
int64_t apa_wgmma_cold_blocks(const apa_cuda_job *job);

/* Bytes of a pair of prepared tiles, and parts in which the keys are summed for their mean. */
int64_t apa_wgmma_pair_bytes(int64_t D);
int64_t apa_wgmma_sum_parts(const apa_cuda_job *job);

/* Tiles that a block's masks of verdicts have room for, where it does both passes. */
int64_t apa_wgmma_most_tiles_of_both(void);

/* Launchers: put work on `stream` and return; 0 or a cudaError_t. */
int apa_wgmma_launch_exact(const apa_cuda_job *job, const apa_wgmma_maps *maps, void *stream);
int apa_wgmma_launch_prep_keys(const apa_cuda_job *job, void *stream);
int apa_wgmma_launch_prep_queries(const apa_cuda_job *job, void *stream);
int apa_wgmma_launch_cold(const apa_cuda_job *job, void *stream);
int apa_wgmma_launch_fix(const apa_cuda_job *job, void *stream);
int apa_wgmma_launch_both(const apa_cuda_job *job, const apa_wgmma_maps *maps, void *stream);
int apa_wgmma_launch_hot(const apa_cuda_job *job, const apa_wgmma_maps *maps, void *stream);

#ifdef __cplusplus
}
#endif

#endif
