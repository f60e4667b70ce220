/* A wave: the jobs that share the workspace at once, and the slots of scratch that threads work in.
 *
 *   workspace: jobs | per job: prepared tiles, partial states | slots, one a thread */
#ifndef APA_CPU_WAVE_H
#define APA_CPU_WAVE_H

#include "cpu/adaptive.h"
#include "cpu/exact.h"
#include "cpu/phases.h"

#include <stdatomic.h>

#define APA_CPU_LARGEST_LEVELS 64

/* A thread's scratch: a block and what its method needs. */
typedef struct apa_cpu_slot {
    apa_cpu_block block;
    apa_cpu_adaptive adaptive;
    apa_cpu_node level[APA_CPU_LARGEST_LEVELS];
    apa_cpu_phases phases; /* when the call asks */
    atomic_flag taken;
} apa_cpu_slot;

/* One call with what is prepared for it. */
typedef struct apa_cpu_job {
    const apa_call *call;
    apa_cpu_shape shape;
    apa_cpu_prepared prepared;
    apa_cpu_node *chunk; /* [units][chunks], exact method with more than one chunk */
    int64_t first;       /* of the step at hand: number of the job's first task */
} apa_cpu_job;

typedef struct apa_cpu_wave {
    const apa_cpu_kernels *kernels;
    apa_cpu_kernels timed; /* the same with clocks, when the calls ask for phases */
    bool phases;
    apa_cpu_job *job; /* largest first */
    int64_t jobs;
    apa_cpu_slot *slots;
    int64_t slot_count;
    int step;
    _Atomic int64_t visible, hot, skipped, candidates;
} apa_cpu_wave;

/* Lays out the wave of `count` calls, all_work the work of all that are done together (0: these alone); with base NULL
 * it only measures. Returns the bytes it takes. */
size_t apa_cpu_wave_lay_out(const apa_context *context, const apa_call *calls, int64_t count, double all_work,
                            void *base, apa_cpu_wave *wave);

/* What a call's job takes for itself, slots apart. */
size_t apa_cpu_job_bytes(const apa_call *call, double all_work);

/* A free slot, which is the caller's until it is freed. */
apa_cpu_slot *apa_cpu_slot_take(apa_cpu_wave *wave);
void apa_cpu_slot_free(const apa_cpu_wave *wave, apa_cpu_slot *slot);

#endif
