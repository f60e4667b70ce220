/* Keys in pages, laid flat by the device. */
#ifndef APA_CUDA_GATHER_H
#define APA_CUDA_GATHER_H

#include "cuda/job.h"

/* The pages of one sequence; everything that is pointed to lies in device memory. */
typedef struct apa_cuda_pages {
    apa_cuda_tensor from[2]; /* K and V: [pages][Hkv][page_size][D], 16 bits */
    void *to[2];             /* [Hkv][Skv][D], aligned to 16 bytes */
    const int32_t *table;    /* page of keys j·page_size …; read when the stream gets there */
    int64_t pages;
    int32_t Hkv, Skv, D, page_size; /* page_size: at most Skv, a larger page being one of as many keys */
} apa_cuda_pages;

#ifdef __cplusplus
extern "C" {
#endif

/* A page that is not there (its number is negative or `pages` and more) is not read: its keys and values are NaN.
 * Returns 0 or a cudaError_t. */
int apa_cuda_launch_gather(const apa_cuda_pages *pages, void *stream);

#ifdef __cplusplus
}
#endif

#endif
