/* Asking for memory that will be read soon, for the kernels of few rows.
 *
 * One core reads memory at its full rate only when the requests come in rising order of address: then the prefetchers
 * of the second-level cache join in, which have more requests in flight than a core's own. So rows are asked for whole,
 * one after the other, whatever order the kernel reads its own rows in, and evenly over the kernel's steps: in one
 * burst they would fill the queue of outstanding misses and stall it. */
#ifndef APA_CPU_AHEAD_H
#define APA_CPU_AHEAD_H

#include "cpu/kernels.h"

typedef struct apa_cpu_asking {
    const apa_cpu_ahead *ahead; /* NULL: nothing to ask for */
    int64_t steps, due;
    int next;
} apa_cpu_asking;

/* `steps`: how often apa_cpu_ask() will be called until all rows have been asked for. */
static inline apa_cpu_asking apa_cpu_asking_over(const apa_cpu_ahead *ahead, int64_t steps)
{
    return (apa_cpu_asking){ahead, steps, 0, 0};
}

static inline __attribute__((always_inline)) void apa_cpu_ask(apa_cpu_asking *asking)
{
    if (asking->ahead == NULL)
        return;
    for (asking->due += asking->ahead->n; asking->due >= asking->steps; asking->due -= asking->steps) {
        const char *row = asking->ahead->row[asking->next++];
        for (int64_t byte = 0; byte < asking->ahead->bytes; byte += 64)
            __builtin_prefetch(row + byte);
    }
}

#endif
