/* Tasks: what a thread does at a time, step by step. */
#ifndef APA_CPU_TASK_H
#define APA_CPU_TASK_H

#include "cpu/wave.h"

/* After the steps of prep: walks, and the merging of chunks. */
enum { APA_CPU_STEP_WALK = APA_CPU_PREP_STEPS, APA_CPU_STEP_MERGE };

/* Number of a job's tasks in a step. */
int64_t apa_cpu_tasks_of(const apa_cpu_job *job, int step);

/* Task `task` of the job in the wave's step. Any order, any thread: no bit depends on it. */
void apa_cpu_task_run(apa_cpu_wave *wave, const apa_cpu_job *job, int64_t task);

#endif
