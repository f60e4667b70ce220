/* Where a call's time goes: the kernel table with a clock around every kernel.
 *
 * The walk calls kernels through a table and never knows which one it has. A call that asks for phases gets a copy of
 * its level's table whose entries read the time stamp counter, run the real kernel, and add the difference to the
 * thread's account. Nothing else changes, no bit of a result does, and calls that don't ask pay nothing. The price of
 * asking is two counter reads a kernel call (some 40 cycles each on Zen 5; about 5 % of an adaptive walk). */
#ifndef APA_CPU_PHASES_H
#define APA_CPU_PHASES_H

#include "apa/measure.h"
#include "cpu/kernels.h"

/* One thread's account. While a task runs it is the thread's current one. */
typedef struct apa_cpu_phases {
    const apa_cpu_kernels *kernels; /* the real ones */
    uint64_t began;
    uint64_t ticks[APA_PHASES];
    double operations[APA_PHASES], bytes[APA_PHASES];
    const void *k8, *v8; /* tile that was read last: the registers of a block share it */
    bool loaded;         /* values of an exact tile have come since its keys were last counted */
    bool exact;          /* the softmax before was an exact one */
} apa_cpu_phases;

/* Counter ticks; apa_cpu_ticks_per_ms() by a clock over the time since (ticks, ms). */
uint64_t apa_cpu_ticks(void);

/* kernels with a clock around each. */
apa_cpu_kernels apa_cpu_phases_table(const apa_cpu_kernels *kernels);

/* A task of this thread begins or ends; kernels of the table above may be called in between only. */
void apa_cpu_phases_begin(apa_cpu_phases *phases, const apa_cpu_kernels *kernels);
void apa_cpu_phases_end(apa_cpu_phases *phases);

/* Adds an account to the costs; ticks_per_ms as measured over the call. */
void apa_cpu_phases_add(const apa_cpu_phases *phases, double ticks_per_ms, apa_phase_cost *cost);

#endif
