/* Aligned memory and the clock. */
#include "core/context_internal.h"

#include <stdlib.h>
#include <time.h>

#define APA_ALIGNMENT ((size_t)64)

void *apa_aligned_allocate(size_t count, size_t bytes)
{
    if (bytes != 0 && count > (SIZE_MAX - APA_ALIGNMENT) / bytes)
        return NULL;
    size_t total = (count * bytes + APA_ALIGNMENT - 1) / APA_ALIGNMENT * APA_ALIGNMENT;
    return aligned_alloc(APA_ALIGNMENT, total == 0 ? APA_ALIGNMENT : total);
}

void apa_aligned_free(void *memory)
{
    free(memory);
}

double apa_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}
