/* Where a wave's memory lies, and who has which slot. */
#include "cpu/wave.h"

#include <sched.h>
#include <string.h>

/* ---- memory ---- */

/* What belongs to the job alone. */
static void lay_out_job(apa_cpu_arena *arena, apa_cpu_job *job)
{
    const apa_cpu_shape *shape = &job->shape;
    job->prepared = (apa_cpu_prepared){0};
    if (shape->adaptive)
        apa_cpu_prepared_layout(job->call, shape, arena, &job->prepared);
    const int64_t nodes = shape->chunks > 1 ? shape->units * shape->chunks : 0;
    job->chunk = apa_cpu_take(arena, nodes, sizeof(apa_cpu_node));
    for (int64_t i = 0; i < nodes; i++) {
        apa_cpu_node node;
        apa_cpu_node_layout(shape, arena, &node);
        if (arena->base != NULL)
            job->chunk[i] = node;
    }
}

static void lay_out_slot(const apa_cpu_shape *most, apa_cpu_arena *arena, apa_cpu_slot *slot)
{
    apa_cpu_block_layout(most, arena, &slot->block);
    if (most->adaptive)
        apa_cpu_adaptive_layout(most, arena, &slot->adaptive);
    for (int level = 0; level < most->levels; level++)
        apa_cpu_node_layout(most, arena, &slot->level[level]);
    if (arena->base != NULL) {
        atomic_flag_clear(&slot->taken);
        memset(&slot->phases, 0, sizeof slot->phases);
    }
}

static apa_cpu_job job_of(const apa_call *call, double all_work)
{
    apa_cpu_job job = {.call = call};
    apa_cpu_shape_of(call, all_work > 0.0 ? apa_cpu_work_of(call) / all_work : 1.0, &job.shape);
    return job;
}

size_t apa_cpu_wave_lay_out(const apa_context *context, const apa_call *calls, int64_t count, double all_work,
                            void *base, apa_cpu_wave *wave)
{
    apa_cpu_arena arena = {base, 0};
    apa_cpu_shape most = {0};
    int64_t tasks = 0;
    wave->jobs = count;
    wave->job = apa_cpu_take(&arena, count, sizeof *wave->job);
    for (int64_t i = 0; i < count; i++) {
        apa_cpu_job job = job_of(&calls[i], all_work);
        lay_out_job(&arena, &job);
        apa_cpu_shape_join(&most, &job.shape);
        tasks += job.shape.units * job.shape.chunks;
        if (base != NULL)
            wave->job[i] = job;
    }
    wave->slot_count = apa_context_threads(context) < tasks ? apa_context_threads(context) : tasks;
    wave->slots = apa_cpu_take(&arena, wave->slot_count, sizeof(apa_cpu_slot));
    apa_cpu_slot measured;
    for (int64_t i = 0; i < wave->slot_count; i++)
        lay_out_slot(&most, &arena, base == NULL ? &measured : &wave->slots[i]);
    return arena.used;
}

size_t apa_cpu_job_bytes(const apa_call *call, double all_work)
{
    apa_cpu_arena arena = {NULL, 0};
    apa_cpu_job job = job_of(call, all_work);
    lay_out_job(&arena, &job);
    return arena.used;
}

/* ---- slots ---- */

/* There are as many slots as threads, so one is free or about to be. */
apa_cpu_slot *apa_cpu_slot_take(apa_cpu_wave *wave)
{
    for (;;) {
        for (int64_t i = 0; i < wave->slot_count; i++)
            if (!atomic_flag_test_and_set_explicit(&wave->slots[i].taken, memory_order_acquire)) {
                if (wave->phases)
                    apa_cpu_phases_begin(&wave->slots[i].phases, wave->kernels);
                return &wave->slots[i];
            }
        sched_yield();
    }
}

void apa_cpu_slot_free(const apa_cpu_wave *wave, apa_cpu_slot *slot)
{
    if (wave->phases)
        apa_cpu_phases_end(&slot->phases);
    atomic_flag_clear_explicit(&slot->taken, memory_order_release);
}
