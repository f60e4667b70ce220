/* What an engine is: four functions behind one table. Engines do not know each other; src/attention knows them all. */
#ifndef APA_CORE_ENGINE_H
#define APA_CORE_ENGINE_H

#include "core/call.h"
#include "core/context_internal.h"

typedef struct apa_engine {
    const char *name;
    /* Can it run the call? Resolves every auto field of call->recipe, or fails with the reason. Reads no tensor data.
     */
    apa_status (*resolve)(apa_context *context, apa_call *call);
    /* Which kernels would run, for people: "i8+f32 avx512". */
    void (*kernel_name)(const apa_context *context, const apa_call *call, char *name, size_t size);
    /* Scratch bytes of run(). */
    size_t (*workspace_bytes)(const apa_context *context, const apa_call *call);
    /* Runs a resolved call. workspace is 64-byte aligned and large enough (NULL if 0 bytes). Fills in the counts and
     * times of statistics (never NULL). */
    apa_status (*run)(apa_context *context, const apa_call *call, void *workspace, apa_statistics *statistics);
    /* A ragged batch: `count` calls of one sequence each (B = 1), resolved one by one. Statistics as run(), over all.
     * NULL: they are run one after the other. */
    size_t (*batch_workspace_bytes)(const apa_context *context, const apa_call *calls, int64_t count);
    apa_status (*run_batch)(apa_context *context, const apa_call *calls, int64_t count, void *workspace,
                            apa_statistics *statistics);
} apa_engine;

#endif
