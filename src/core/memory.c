/* Aligned memory and the clock. */
#define _DEFAULT_SOURCE /* madvise */
#include "core/context_internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define APA_ALIGNMENT ((size_t)64)
#define HUGE_PAGE ((size_t)2 << 20)

void *apa_aligned_allocate(size_t count, size_t bytes)
{
    if (bytes != 0 && count > (SIZE_MAX - APA_ALIGNMENT) / bytes)
        return NULL;
    size_t total = (count * bytes + APA_ALIGNMENT - 1) / APA_ALIGNMENT * APA_ALIGNMENT;
    if (total < HUGE_PAGE)
        return aligned_alloc(APA_ALIGNMENT, total == 0 ? APA_ALIGNMENT : total);
    /* Large pages where the system has them: a workspace is touched once per call, and 4 KiB faults would cost more
     * than the work on them. Advice only; failure changes nothing. */
    if (total > SIZE_MAX - HUGE_PAGE)
        return NULL;
    void *memory = aligned_alloc(HUGE_PAGE, (total + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (memory != NULL)
        (void)madvise(memory, total, MADV_HUGEPAGE);
    return memory;
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
