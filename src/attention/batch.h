/* Runs the sequences of a batch that differ, each with the recipe as its own lengths resolve it. */
#ifndef APA_ATTENTION_BATCH_H
#define APA_ATTENTION_BATCH_H

#include "core/engine.h"

/* Scratch bytes of apa_batch_run(), or an error: a sequence that the engine refuses, or no memory for the calls. */
apa_status apa_batch_workspace_bytes(apa_context *context, const apa_engine *engine, const apa_problem *problem,
                                     const apa_call *whole, size_t *bytes);

/* Statistics are sums over all sequences; the recipe is that of the longest. */
apa_status apa_batch_run(apa_context *context, const apa_engine *engine, const apa_problem *problem,
                         const apa_call *whole, void *workspace, apa_statistics *statistics);

#endif
