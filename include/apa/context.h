/* libapa: the context - threads, memory, CPU level, the last error's text.
 *
 * The library keeps no global mutable state; what a call needs beside its arguments lives here.
 * One context serves one call at a time: give each calling thread its own, or lock around it.
 * Different contexts are independent. */
#ifndef APA_CONTEXT_H
#define APA_CONTEXT_H

#include "apa/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct apa_context apa_context;

/* A caller's own thread pool: must call task(argument, index) once for every index in 0 … count-1, in any order and
 * from any threads, and return when all have returned. Tasks don't block on each other. */
typedef void (*apa_parallel_for)(void *pool, void (*task)(void *argument, size_t index), void *argument, size_t count);

typedef struct apa_context_options {
    size_t size; /* sizeof(apa_context_options), set by apa_context_options_init() */
    /* Threads of the library's own pool; 0 = one per core that the process may use; more than four per core are not
     * started (waiting threads spin), nor are more than the system allows, which is tried when the context is made
     * (apa_context_threads() says how many there are; a limit that is reached between the trial and the start, an
     * instant later, makes the call wait for ever). With parallel_for: how many tasks run at once (more than that wait
     * for each other). Scratch memory grows with it; no result depends on it. */
    int32_t threads;
    /* Highest instruction set level the CPU engine may use: "scalar", "avx2", "avx512", "neon"; NULL = what the
     * environment variable APA_ISA says, and where that is unset or empty what the CPU has. A level that the CPU lacks
     * is refused. */
    const char *isa;
    /* A caller's thread pool and its handle, or NULL for the library's own. */
    apa_parallel_for parallel_for;
    void *pool;
} apa_context_options;

/* Fills in the defaults: own pool, all cores, best ISA. */
APA_EXPORT void apa_context_options_init(apa_context_options *options);

/* Makes a context. options may be NULL for the defaults. The caller owns *context and gives it to
 * apa_context_destroy(). Errors: INVALID_ARGUMENT (context NULL, options->size not a known size, threads < 0 or > 4096,
 * isa or APA_ISA unknown), UNSUPPORTED (isa or APA_ISA beyond this CPU), OUT_OF_MEMORY. On an error *context is set to
 * NULL. */
APA_EXPORT apa_status apa_context_create(apa_context **context, const apa_context_options *options);

/* Frees a context; NULL is allowed. */
APA_EXPORT void apa_context_destroy(apa_context *context);

/* One line that says what went wrong in the last call on this context that did not return APA_STATUS_OK: which
 * argument, what was found, what was expected. Empty string if nothing failed yet. Valid until the next call on the
 * context. */
APA_EXPORT const char *apa_context_message(const apa_context *context);

/* Threads in use, and the ISA level in use ("scalar", "avx2", "avx512", "neon"; static storage). */
APA_EXPORT int32_t apa_context_threads(const apa_context *context);
APA_EXPORT const char *apa_context_isa(const apa_context *context);

#ifdef __cplusplus
}
#endif
#endif
