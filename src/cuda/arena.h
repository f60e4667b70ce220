/* Memory cut from one piece of the device's; base NULL only measures. Every piece starts at a multiple of 256 bytes. */
#ifndef APA_CUDA_ARENA_H
#define APA_CUDA_ARENA_H

#include <stddef.h>
#include <stdint.h>

typedef struct apa_cuda_arena {
    char *base;
    size_t used;
} apa_cuda_arena;

static inline void *apa_cuda_take(apa_cuda_arena *at, int64_t count, size_t bytes)
{
    const size_t offset = at->used;
    at->used += ((size_t)count * bytes + 255) / 256 * 256;
    return at->base == NULL ? NULL : at->base + offset;
}

#endif
