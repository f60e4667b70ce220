/* Parts of cuda_verify. Each prints a line and returns the number of failures. */
#ifndef APA_TESTS_CUDA_VERIFY_H
#define APA_TESTS_CUDA_VERIFY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Every place of the NVFP4 product's fragments (src/cuda/nvfp4.cuh), one element at a time, against plain loops. */
int apa_verify_fragments(void);

/* Prep of a trait (src/cuda/job.h): mean of K, codes and scales of K, V and Q, bit for bit. */
int apa_verify_codes(int32_t trait, int64_t D, int bf16);

#ifdef __cplusplus
}
#endif

#endif
