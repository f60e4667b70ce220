/* Runs resolved calls: memory, tasks, threads. The functions of the engine table (core/engine.h) that do so. */
#ifndef APA_CPU_WORK_H
#define APA_CPU_WORK_H

#include "core/engine.h"

size_t apa_cpu_workspace_bytes(const apa_context *context, const apa_call *call);
apa_status apa_cpu_run(apa_context *context, const apa_call *call, void *workspace, apa_statistics *statistics);

size_t apa_cpu_batch_workspace_bytes(const apa_context *context, const apa_call *calls, int64_t count);
apa_status apa_cpu_run_batch(apa_context *context, const apa_call *calls, int64_t count, void *workspace,
                             apa_statistics *statistics);

#endif
