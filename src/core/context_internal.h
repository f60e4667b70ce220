/* The context from inside: error text, parallel loops, scratch memory, CPU level. */
#ifndef APA_CORE_CONTEXT_INTERNAL_H
#define APA_CORE_CONTEXT_INTERNAL_H

#include "apa/context.h"

#include <stdarg.h>

/* ISA levels in rising order within an architecture family. A level includes what is under it. */
typedef enum apa_isa { APA_ISA_SCALAR = 0, APA_ISA_AVX2 = 1, APA_ISA_AVX512 = 2, APA_ISA_NEON = 3 } apa_isa;

/* Highest level that this CPU, its operating system and this build have. AVX2 means AVX2+FMA+F16C; AVX512 means F, BW,
 * DQ, VL, VNNI, VBMI; NEON means AArch64 with the dot product (FEAT_DotProd). */
apa_isa apa_cpu_best_isa(void);

/* AVX-VNNI: the level avx2 has a second table for it, because CPUs with AVX-512 may lack it. */
int apa_cpu_has_avxvnni(void);

/* AVX-512 BF16: the level avx512 has a second table for it. */
int apa_cpu_has_avx512bf16(void);

const char *apa_isa_name(apa_isa isa);

apa_isa apa_context_isa_level(const apa_context *context);

/* Sets the message and returns status: `return apa_fail(context, APA_STATUS_UNSUPPORTED, "tile: ...", ...)`. */
apa_status apa_fail(apa_context *context, apa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* task(argument, i) for i in 0 … count-1 on the context's threads; returns when all are done. */
void apa_context_parallel(apa_context *context, void (*task)(void *argument, size_t index), void *argument,
                          size_t count);

/* Sends the pool's threads to sleep. Between the loops of a call they spin, which is quick; after the last one that
 * would burn a core for tens of milliseconds while the program's own threads want it. */
void apa_context_rest(apa_context *context);

/* Scratch memory of the context, 64-byte aligned, at least `bytes`; kept until the context goes. NULL when there is
 * none to be had. Valid until the next call of this function. */
void *apa_context_workspace(apa_context *context, size_t bytes);

/* 64-byte aligned memory; NULL on failure or overflow of count·bytes. Free with apa_aligned_free(). */
void *apa_aligned_allocate(size_t count, size_t bytes);
void apa_aligned_free(void *memory);

/* Monotonic milliseconds. */
double apa_now_ms(void);

#endif
