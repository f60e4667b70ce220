/* Walks of units and chunks, their verdicts and counts; merging of chunks. */
#include "cpu/task.h"

/* The kernels that a task's block works with. */
static const apa_cpu_kernels *walk_kernels(const apa_cpu_wave *wave)
{
    return wave->phases ? &wave->timed : wave->kernels;
}

/* Verdicts of a block on tiles start … stop-1, when the caller wants them. */
static void write_verdicts(const apa_cpu_block *block, const apa_cpu_adaptive *adaptive, int64_t start, int64_t stop)
{
    const apa_call *call = block->call;
    const int64_t tiles = block->shape->tiles;
    for (int r = 0; r < block->n && call->verdicts != NULL; r++)
        for (int64_t tile = start; tile < stop; tile++) {
            const uint16_t seeing = apa_cpu_block_seeing(block, r, tile);
            const bool hot = adaptive == NULL || (adaptive->hot[tile] >> r & 1) != 0;
            const bool skipped = adaptive != NULL && (adaptive->skipped[tile] >> r & 1) != 0;
            const uint8_t seen = (uint8_t)(hot ? APA_VERDICT_HOT : skipped ? APA_VERDICT_SKIPPED : APA_VERDICT_COLD);
            for (int i = 0; i < APA_CPU_LANES; i++) {
                const apa_cpu_row *row = &block->reg[r].row[i];
                if (row->position < 0)
                    continue;
                const int64_t at = (block->b * call->Hq + row->head) * call->Sq + row->position;
                call->verdicts[at * tiles + tile] = (seeing >> i & 1) != 0 ? seen : APA_VERDICT_INVISIBLE;
            }
        }
}

/* Rows that see a tile and tiles, over tiles start … stop-1. */
static int64_t count_visible(const apa_cpu_block *block, int64_t start, int64_t stop)
{
    int64_t visible = 0;
    for (int r = 0; r < block->n; r++) {
        for (int64_t tile = start; tile < stop && block->bend.masked; tile++)
            visible += __builtin_popcount(apa_cpu_block_seeing(block, r, tile));
        for (int i = 0; i < APA_CPU_LANES && !block->bend.masked; i++) {
            const apa_cpu_row *row = &block->reg[r].row[i];
            if (row->position < 0 || row->first >= row->end)
                continue;
            const int64_t first = row->first / APA_CPU_TILE, last = (row->end - 1) / APA_CPU_TILE;
            const int64_t from = first > start ? first : start, to = last < stop - 1 ? last : stop - 1;
            visible += to >= from ? to - from + 1 : 0;
        }
    }
    return visible;
}

static void walk_adaptive(apa_cpu_wave *wave, const apa_cpu_job *job, apa_cpu_slot *slot, int64_t unit)
{
    apa_cpu_block_load(&slot->block, job->call, &job->shape, walk_kernels(wave), unit);
    apa_cpu_adaptive_run(&slot->block, &slot->adaptive, &job->prepared);
    write_verdicts(&slot->block, &slot->adaptive, 0, job->shape.tiles);
    apa_cpu_block_store(&slot->block);
    wave->visible += slot->adaptive.visible;
    wave->hot += slot->adaptive.hot_pairs;
    wave->skipped += slot->adaptive.skipped_pairs;
    wave->candidates += slot->adaptive.candidate_pairs;
}

static void walk_exact(apa_cpu_wave *wave, const apa_cpu_job *job, apa_cpu_slot *slot, int64_t task)
{
    const int64_t chunks = job->shape.chunks;
    int64_t start, stop;
    apa_cpu_block_load(&slot->block, job->call, &job->shape, walk_kernels(wave), task / chunks);
    apa_cpu_exact_chunk(&slot->block, task % chunks, slot->level);
    apa_cpu_exact_chunk_tiles(&job->shape, task % chunks, &start, &stop);
    const int64_t visible = count_visible(&slot->block, start, stop);
    wave->visible += visible;
    wave->hot += visible;
    write_verdicts(&slot->block, NULL, start, stop);
    if (chunks > 1)
        apa_cpu_node_save(&slot->block, &job->chunk[task]);
    else
        apa_cpu_block_store(&slot->block);
}

static void merge_chunks(apa_cpu_wave *wave, const apa_cpu_job *job, apa_cpu_slot *slot, int64_t unit)
{
    apa_cpu_block_load(&slot->block, job->call, &job->shape, walk_kernels(wave), unit);
    apa_cpu_exact_merge_chunks(&slot->block, job->chunk + unit * job->shape.chunks, job->shape.chunks, slot->level);
    apa_cpu_block_store(&slot->block);
}

int64_t apa_cpu_tasks_of(const apa_cpu_job *job, int step)
{
    const apa_cpu_shape *shape = &job->shape;
    if (step == APA_CPU_STEP_WALK)
        return shape->units * shape->chunks;
    if (step == APA_CPU_STEP_MERGE)
        return shape->chunks > 1 ? shape->units : 0;
    return shape->adaptive && shape->units > 0
               ? apa_cpu_prep_items(job->call, shape, &job->prepared, (apa_cpu_prep_step)step)
               : 0;
}

void apa_cpu_task_run(apa_cpu_wave *wave, const apa_cpu_job *job, int64_t task)
{
    if (wave->step < APA_CPU_STEP_WALK) {
        apa_cpu_prep_item(job->call, &job->shape, wave->kernels, &job->prepared, (apa_cpu_prep_step)wave->step, task);
        return;
    }
    apa_cpu_slot *slot = apa_cpu_slot_take(wave);
    /* Last units first: with a causal mask they are the longest of their head. */
    if (wave->step == APA_CPU_STEP_MERGE)
        merge_chunks(wave, job, slot, task);
    else if (job->shape.adaptive)
        walk_adaptive(wave, job, slot, job->shape.units - 1 - task);
    else
        walk_exact(wave, job, slot, job->shape.units * job->shape.chunks - 1 - task);
    apa_cpu_slot_free(wave, slot);
}
