/* Parts of cuda_verify. Each prints a line and returns the number of failures. */
#ifndef APA_TESTS_CUDA_VERIFY_H
#define APA_TESTS_CUDA_VERIFY_H

#include "apa/context.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Every place of the NVFP4 product's fragments (src/cuda/nvfp4.cuh), one element at a time, against plain loops. */
int apa_verify_fragments(void);

/* Prep of a trait (src/cuda/job.h): mean of K, codes and scales of K, V and Q, bit for bit. */
int apa_verify_codes(int32_t trait, int64_t D, int bf16);

/* apa_cuda_attention(): families, pages, graphs whose table changes, ragged batches, bit for bit against plain calls.
 * engine: "cuda" (every family that the device has), "cuda:warp", "cuda:wgmma". */
int apa_verify_device(apa_context *context, const char *engine);

/* The same of keys that stay prepared between calls, against calls that prepare all. */
int apa_verify_kept(apa_context *context, const char *engine);

/* Copies that are bounded, against calls that hold all tiles; quick: of few rows. */
int apa_verify_windowed(apa_context *context, const char *engine, int quick);

#ifdef __cplusplus
}
#endif

#endif
