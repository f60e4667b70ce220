/* The engine "cuda:wgmma": how the work is cut, the workspace, the launches. What it takes is in accept.c; moving host
 * tensors, masks and numbers of a job are those of the CUDA engine (cuda/engine.c, cuda/enqueue.c). */
#include "cuda/arena.h"
#include "cuda/engine.h"
#include "cuda/enqueue.h"
#include "cuda/order.h"
#include "cuda/wgmma/accept.h"
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/maps.h"
#include "cuda/wgmma/parts.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#define BATCH_BYTES (INT64_C(1) << 30) /* of the buffers that grow with rows · keys or rows · splits */
#define MOST_HOT_SPLITS 8
#define PAIR_BIAS_BYTES 4096          /* tile_e4m3.cuh: 32 a key, for up to eight query heads */
#define QUERY_BYTES 128               /* of codes: tile_e4m3.cuh */
#define SLOT_BYTES (INT64_C(1) << 30) /* of the candidates of blocks that do both passes */
#define LEAST_WIDE_WAVES 4            /* fewer wide blocks leave more idle at the end than they gain */

/* ------------------------------------------------------------------------------- rows that see few tiles */

/* Keys of a window that is this wide lie in at most tiles_of_window() tiles, wherever it begins. */
static int64_t tiles_of_window(int64_t keys)
{
    return keys <= 0 ? 0 : (keys + APA_CUDA_TILE - 2) / APA_CUDA_TILE + 1;
}

/* Positions 0 … n - 1 see at most early_tiles tiles, as far as it follows from the last key that they see, or from the
 * window's width. n may be less than there are: others are judged group by group. */
static int64_t early_positions(const apa_cuda_job *job)
{
    const int64_t keys = (int64_t)job->early_tiles * APA_CUDA_TILE, far = INT64_C(1) << 60;
    if (keys == 0)
        return 0;
    const bool window = job->first_offset > -far && job->end_offset < far;
    if (job->Skv <= keys || (window && tiles_of_window(job->end_offset - job->first_offset) <= job->early_tiles))
        return job->Sq;
    const int64_t n = keys - job->end_offset + 1; /* position p sees keys up to p + end_offset - 1 */
    return n < 0 ? 0 : n > job->Sq ? job->Sq : n;
}

/* Is every tile hot, whatever the data? */
static bool all_exact(const apa_call *call)
{
    apa_cuda_job job;
    if (apa_cuda_all_hot(&call->recipe))
        return true;
    apa_cuda_describe(call, &job);
    return early_positions(&job) == job.Sq;
}

/* The same, but a caller who keeps prepared keys wants them made. */
static bool all_exact_of(const apa_call *call, const apa_cuda_kept *kept)
{
    return kept->room > 0 ? apa_cuda_all_hot(&call->recipe) : all_exact(call);
}

static void kernel_name(const apa_context *context, const apa_call *call, char *name, size_t size)
{
    (void)context;
    snprintf(name, size, "%s%s wgmma on sm_90a",
             all_exact(call)                       ? ""
             : apa_wgmma_has_exact_scores(call->D) ? "f16/e4m3+"
                                                   : "e4m3+",
             apa_dtype_name(call->q.dtype));
}

/* ------------------------------------------------------------------------------- the job */

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t all_units(const apa_cuda_job *job)
{
    return (int64_t)job->B * job->Hkv * job->units;
}

/* Groups of 16 rows of a block that does both passes. */
static int64_t groups_of_slot(const apa_cuda_job *job)
{
    return job->wide ? apa_wgmma_exact_rows(job->D) / APA_CUDA_GROUP : APA_CUDA_UNIT_GROUPS;
}

static void cut(const apa_call *call, const apa_cuda_target *target, apa_cuda_job *job)
{
    const int64_t units = all_units(job), slots = target->multiprocessors;
    const bool triangle = call->causal && !job->packing_rows && job->Sq16 % APA_CUDA_UNIT == 0;
    job->splits = triangle && units >= 2 * slots ? 1 : apa_cuda_choose_splits(job, units, slots);
    job->hot_splits = 1; /* a unit has two blocks in pass 2, a multiprocessor too */
    while (job->hot_splits < MOST_HOT_SPLITS && units * job->hot_splits < 4 * slots)
        job->hot_splits++;
    job->longest_first = triangle;
    const int64_t rows = apa_wgmma_exact_rows(job->D), heads = (int64_t)job->B * job->Hkv;
    job->wide = rows > APA_CUDA_UNIT &&
                heads * ceil_div(job->units * APA_CUDA_UNIT, rows) * job->splits >= LEAST_WIDE_WAVES * slots;
    job->shared_bytes_of_sm = target->shared_bytes_of_sm;
    /* without splits a block can do both passes of its unit */
    const int64_t slot_bytes = groups_of_slot(job) * ceil_div(job->tiles, 2) * (32 * 4 + 8);
    if (job->splits == 1 && job->tiles <= apa_wgmma_most_tiles_of_both() && slots * slot_bytes <= SLOT_BYTES)
        job->slots = (int32_t)slots;
}

/* The job of some of the call's heads, cut as the whole call's is. */
static void narrow(const apa_call *part, apa_cuda_job *job)
{
    apa_cuda_job own;
    apa_cuda_describe(part, &own);
    job->q = own.q;
    job->k = own.k;
    job->v = own.v;
    job->out = own.out;
    job->lse = own.lse;
    job->B = own.B;
    job->Hq = own.Hq;
    job->Hkv = own.Hkv;
}

/* Prepared keys: all of them; what calls can leave to later ones. */
static void lay_out_kept(apa_cuda_job *job, apa_cuda_arena *at)
{
    const int64_t heads = (int64_t)job->B * job->Hkv;
    job->k_mean = apa_cuda_take(at, heads * job->D, sizeof(float));
    job->k_scale_max = apa_cuda_take(at, heads, sizeof(float));
    job->blob = apa_cuda_take(at, heads * ceil_div(job->room, 2) * apa_wgmma_pair_bytes(job->D), 1);
    job->poisoned = apa_cuda_take(at, heads * job->room, 1);
}

/* What smooth_q needs. */
static void lay_out_means(apa_cuda_job *job, apa_cuda_arena *at)
{
    const int64_t heads = job->smooth_q ? (int64_t)job->B * job->Hq : 0;
    job->q_sum = apa_cuda_take(at, heads * ceil_div(job->Sq, 128) * (job->D + 1), sizeof(double));
    job->q_range = apa_cuda_take(at, heads * ceil_div(job->Sq, 128) * 2 * job->D, sizeof(float));
    job->q_mean = apa_cuda_take(at, heads * job->D, sizeof(float));
    job->q_head_scale = apa_cuda_take(at, heads, sizeof(float));
    job->key_bias = apa_cuda_take(at, heads / job->G * ceil_div(job->tiles, 2) * PAIR_BIAS_BYTES, 1);
}

static void lay_out_queries(apa_cuda_job *job, int64_t units, apa_cuda_arena *at)
{
    const int64_t rows = units * APA_CUDA_UNIT;
    job->q_codes = apa_cuda_take(at, rows * QUERY_BYTES, 1);
    job->q_scale = apa_cuda_take(at, rows, sizeof(float));
    job->shift = apa_cuda_take(at, rows, sizeof(float));
    job->all_hot = apa_cuda_take(at, units * APA_CUDA_UNIT_GROUPS, 1);
}

/* What blocks need that do both passes. */
static void lay_out_slots(apa_cuda_job *job, apa_cuda_arena *at)
{
    const int64_t pairs = (int64_t)job->slots * groups_of_slot(job) * ceil_div(job->tiles, 2);
    job->slot_taken = apa_cuda_take(at, job->slots, sizeof(uint32_t));
    job->mass = apa_cuda_take(at, pairs * 32, sizeof(float));
    job->candidate_pair = apa_cuda_take(at, 2 * pairs, sizeof(uint32_t));
    job->hot_tile = apa_cuda_take(at, (int64_t)job->slots * groups_of_slot(job) / 4 * job->tiles,
                                  sizeof(uint32_t)); /* a list for each warpgroup of 4 groups */
}

/* What `units` units need for a pass over cold tiles and one over hot ones. */
static void lay_out_passes(apa_cuda_job *job, int64_t units, apa_cuda_arena *at)
{
    const int64_t rows = units * APA_CUDA_UNIT, groups = units * APA_CUDA_UNIT_GROUPS, D = job->D;
    job->candidate = apa_cuda_take(at, groups * job->tiles, 1);
    job->mass = apa_cuda_take(at, rows * job->tiles, sizeof(float));
    job->part_lambda = apa_cuda_take(at, job->splits * rows, sizeof(float));
    job->hot_tile = apa_cuda_take(at, units * job->tiles, sizeof(uint32_t));
    job->hot_mask = apa_cuda_take(at, units * job->tiles, sizeof(uint8_t));
    job->fix_tile = apa_cuda_take(at, units * job->tiles, sizeof(uint32_t));
    job->fix_mask = apa_cuda_take(at, units * job->tiles, sizeof(uint16_t));
    job->list_count = apa_cuda_take(at, 2 * units, sizeof(int32_t));
    job->hot_o = apa_cuda_take(at, job->hot_splits * rows * D, sizeof(float));
    job->hot_frame = apa_cuda_take(at, job->hot_splits * rows, sizeof(float));
    job->hot_sum = apa_cuda_take(at, job->hot_splits * rows, sizeof(float));
}

static void lay_out(apa_cuda_job *job, bool all_hot, int64_t units, apa_cuda_arena *at, apa_cuda_arena *kept)
{
    const int64_t parts = (all_hot && job->splits == 1) || job->slots > 0 ? 0 : job->splits,
                  rows = units * APA_CUDA_UNIT;
    job->part_o = apa_cuda_take(at, parts * rows * job->D, sizeof(float));
    job->part_frame = apa_cuda_take(at, parts * rows, sizeof(float));
    job->part_sum = apa_cuda_take(at, parts * rows, sizeof(float));
    if (all_hot)
        return;
    job->tile_sum = apa_cuda_take(
        at, job->smooth ? (int64_t)job->B * job->Hkv * apa_wgmma_sum_parts(job) * (job->D + 1) : 0, sizeof(double));
    lay_out_kept(job, kept);
    lay_out_means(job, at);
    lay_out_queries(job, units, at);
    if (job->slots > 0)
        lay_out_slots(job, at);
    else
        lay_out_passes(job, units, at);
}

/* Units that are worked on at once: all, or as many as keep the growing buffers within BATCH_BYTES: whole KV heads, or
 * a part of one. */
static int64_t batch_units(const apa_cuda_job *job, bool all_hot)
{
    const int64_t sums = (int64_t)(job->splits + (all_hot ? 0 : job->hot_splits)) * APA_CUDA_UNIT * (job->D + 2) * 4;
    const int64_t masses = all_hot ? 0 : (int64_t)job->tiles * APA_CUDA_UNIT_GROUPS * (16 * 4 + 1 + 1);
    const int64_t queries =
        APA_CUDA_UNIT * (int64_t)(QUERY_BYTES + 8); /* of blocks that do both passes nothing else grows */
    const int64_t heads = (int64_t)job->B * job->Hkv, least = BATCH_BYTES / (job->slots > 0 ? queries : sums + masses);
    if (all_hot && job->splits == 1)
        return all_units(job);
    if (least < job->units)
        return ceil_div(job->units, ceil_div(job->units, least < 1 ? 1 : least));
    return ceil_div(heads, ceil_div(heads, least / job->units)) * job->units;
}

/* Units of the batch that begins at job->unit_first. */
static int64_t batch_length(const apa_cuda_job *job, int64_t batch)
{
    const int64_t head_end = (job->unit_first / job->units + 1) * job->units;
    const int64_t end = batch < job->units ? head_end : all_units(job);
    return end - job->unit_first < batch ? end - job->unit_first : batch;
}

/* Fills in the job of a part of `whole`, which is cut as that is, so that its bits are those of the whole; returns the
 * units of a batch. */
static int64_t make_job(const apa_call *call, const apa_call *whole, const apa_cuda_target *target,
                        const apa_cuda_kept *kept, apa_cuda_arena *at, apa_cuda_job *job)
{
    const bool all_hot = all_exact_of(call, kept);
    apa_cuda_arena own = {kept->memory, 0};
    apa_cuda_describe(whole, job);
    apa_cuda_keep(kept, 2, job);
    cut(whole, target, job);
    narrow(call, job);
    job->early_prefix = all_hot ? 0 : (int32_t)early_positions(job) * (job->packing_rows ? job->G : 1);
    if (all_hot)
        job->slots = 0;
    const int64_t batch = batch_units(job, all_hot);
    /* pass 1 orders the blocks of any batch, the exact kernel those of all units */
    job->longest_first = job->longest_first && (!all_hot || batch == all_units(job));
    lay_out(job, all_hot, batch, at, kept->room > 0 ? &own : at);
    return batch;
}

/* No rows, or no keys: nothing is multiplied, zeros are written; cuda:warp's launches do. */
static bool is_empty(const apa_call *call)
{
    return call->B == 0 || call->Sq == 0 || call->Skv == 0;
}

/* Bytes of a KV head's prepared tiles, with the biases of their keys. */
static int64_t copy_of_head(const apa_call *call)
{
    const int64_t biases = call->recipe.smooth_q == APA_TOGGLE_ON ? PAIR_BIAS_BYTES : 0;
    return ceil_div(apa_call_tiles(call), 2) * (apa_wgmma_pair_bytes(call->D) + biases);
}

/* Where options.copy_bytes bounds the prepared tiles, KV heads are worked on some at a time. */
static apa_wgmma_parts parts_of(const apa_call *call, const apa_cuda_kept *kept)
{
    const int64_t heads = call->B * call->Hkv;
    if (kept->copy_bytes == 0 || kept->room > 0 || all_exact(call))
        return apa_wgmma_cut_heads(call, heads);
    const size_t fit = kept->copy_bytes / (size_t)copy_of_head(call);
    return apa_wgmma_cut_heads(call, fit < (size_t)heads ? (int64_t)fit : heads);
}

apa_status apa_wgmma_check_copy(apa_context *context, const apa_call *call, size_t copy_bytes)
{
    if (copy_bytes == 0 || is_empty(call) || all_exact(call) || copy_bytes >= (size_t)copy_of_head(call))
        return APA_STATUS_OK;
    return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "copy_bytes: %zu, expected 0 or at least %lld", copy_bytes,
                    (long long)copy_of_head(call));
}

size_t apa_wgmma_device_bytes(const apa_call *call, const apa_cuda_target *target, const apa_cuda_kept *kept)
{
    const apa_cuda_kept nothing = {0};
    size_t most = 0;
    if (is_empty(call))
        return apa_cuda_device_bytes(call, target, &nothing);
    const apa_wgmma_parts parts = parts_of(call, kept);
    for (int64_t i = 0; i < parts.count; i++) { /* they follow each other in the same memory */
        int64_t rows_before;
        const apa_call part = apa_wgmma_part(call, &parts, i, &rows_before);
        apa_cuda_arena at = {NULL, 0};
        apa_cuda_job job;
        make_job(&part, call, target, kept, &at, &job);
        most = at.used > most ? at.used : most;
    }
    return most;
}

apa_status apa_wgmma_kept_bytes(apa_context *context, const apa_call *call, int64_t room, size_t *bytes)
{
    const apa_cuda_kept kept = {.room = room};
    apa_cuda_arena at = {NULL, 0};
    apa_cuda_job job;
    (void)context;
    apa_cuda_describe(call, &job);
    apa_cuda_keep(&kept, 2, &job);
    if (!apa_cuda_all_hot(&call->recipe))
        lay_out_kept(&job, &at);
    *bytes = at.used;
    return APA_STATUS_OK;
}

/* ------------------------------------------------------------------------------- launching */

static int run_exact(apa_cuda_job *job, int64_t batch, const apa_cuda_place *place)
{
    const int64_t units = all_units(job);
    apa_wgmma_maps maps;
    int error = apa_wgmma_make_maps(job, (uint32_t)apa_wgmma_exact_keys(job->D), &maps);
    if (error == 0 && place->prep_done != NULL)
        error = (int)cudaEventRecord(place->prep_done, place->stream);
    for (job->unit_first = 0; error == 0 && job->unit_first < units; job->unit_first += job->unit_count) {
        job->unit_count = batch_length(job, batch);
        job->chained = 0;
        error = apa_wgmma_launch_exact(job, &maps, place->stream);
        job->chained = 1;
        if (error == 0 && job->splits > 1)
            error = apa_cuda_launch_finish(job, 0, place->stream);
    }
    return error;
}

/* Units of rows that see few tiles, all of the call at once. */
static int run_early(const apa_cuda_job *job, const apa_wgmma_maps *maps, const apa_cuda_place *place)
{
    apa_cuda_job early = *job;
    early.early_only = 1;
    early.splits = 1;
    return apa_wgmma_launch_exact(&early, maps, place->stream);
}

/* Pass 1, verdicts, corrections and pass 2 of a batch as kernels, the exact kernel's part in their midst. */
static int run_passes(apa_cuda_job *job, const apa_wgmma_maps *maps, const apa_wgmma_maps *early_maps,
                      const apa_cuda_place *place)
{
    int error = apa_wgmma_launch_cold(job, place->stream);
    job->chained = 1;
    if (error == 0 && job->unit_first == 0 && apa_cuda_early_items(job) > 0)
        error = run_early(job, early_maps, place); /* fills the end of pass 1 */
    if (error == 0)
        error = apa_cuda_launch_judge(job, place->stream);
    if (error == 0 && job->judged) /* else nothing was held back, and nothing is taken out */
        error = apa_wgmma_launch_fix(job, place->stream);
    if (error == 0)
        error = apa_wgmma_launch_hot(job, maps, place->stream);
    if (error == 0)
        error = apa_cuda_launch_finish(job, 1, place->stream);
    return error;
}

/* The same by blocks that do all of it. */
static int run_both(apa_cuda_job *job, const apa_wgmma_maps *maps, const apa_wgmma_maps *early_maps,
                    const apa_cuda_place *place)
{
    int error = apa_wgmma_launch_both(job, maps, place->stream);
    job->chained = 1;
    if (error == 0 && job->unit_first == 0 && apa_cuda_early_items(job) > 0)
        error = run_early(job, early_maps, place);
    return error;
}

static int run_adaptive(apa_cuda_job *job, int64_t batch, const apa_cuda_place *place)
{
    const int64_t units = all_units(job);
    apa_wgmma_maps maps, early_maps;
    int error = apa_wgmma_make_maps(job, APA_CUDA_TILE, &maps);
    if (error == 0 && apa_cuda_early_items(job) > 0)
        error = apa_wgmma_make_maps(job, (uint32_t)apa_wgmma_exact_keys(job->D), &early_maps);
    if (error == 0)
        error = apa_wgmma_launch_prep_keys(job, place->stream);
    job->chained = (job->tiles + 1) / 2 > job->first_tile / 2 || (job->smooth && !job->mean_given) ||
                   job->smooth_q; /* the keys took a kernel */
    for (job->unit_first = 0; error == 0 && job->unit_first < units; job->unit_first += job->unit_count) {
        job->unit_count = batch_length(job, batch);
        error = apa_wgmma_launch_prep_queries(job, place->stream);
        job->chained = 1;
        if (error == 0 && job->unit_first == 0 && place->prep_done != NULL) {
            error = cudaEventRecord(place->prep_done, place->stream);
            job->chained = 0;
        }
        if (error == 0)
            error =
                job->slots > 0 ? run_both(job, &maps, &early_maps, place) : run_passes(job, &maps, &early_maps, place);
    }
    return error;
}

/* A part of the call, whose results were cleared. Returns 0 or a cudaError_t. */
static int enqueue_part(const apa_call *part, const apa_call *call, const apa_cuda_target *target,
                        const apa_cuda_place *place)
{
    const bool all_hot = all_exact_of(part, &place->kept);
    apa_cuda_arena at = {place->workspace, 0};
    apa_cuda_job job;
    const int64_t batch = make_job(part, call, target, &place->kept, &at, &job);
    job.counts = (unsigned long long *)place->counts;
    job.verdicts = place->verdicts;
    const int error = all_hot ? run_exact(&job, batch, place) : run_adaptive(&job, batch, place);
    return error == 0 && all_hot && (place->counts != NULL || place->verdicts != NULL)
               ? apa_cuda_launch_all_hot(&job, place->stream)
               : error;
}

apa_status apa_wgmma_enqueue(apa_context *context, const apa_call *call, const apa_cuda_target *target,
                             const apa_cuda_place *place)
{
    apa_cuda_place at = *place;
    if (is_empty(call)) {
        at.kept = (apa_cuda_kept){0};
        return apa_cuda_enqueue(context, call, target, &at);
    }
    const apa_status status = apa_cuda_check_aligned(context, call);
    if (status != APA_STATUS_OK)
        return status;
    const apa_wgmma_parts parts = parts_of(call, &place->kept);
    int error = apa_cuda_clear_results(call, place);
    for (int64_t i = 0; error == 0 && i < parts.count; i++) {
        int64_t rows_before;
        const apa_call part = apa_wgmma_part(call, &parts, i, &rows_before);
        at.verdicts = place->verdicts == NULL ? NULL : place->verdicts + rows_before * apa_call_tiles(call);
        error = enqueue_part(&part, call, target, &at);
        at.prep_done = NULL; /* asked for where nothing bounds the copy, and there is one part */
    }
    if (error != 0)
        return apa_fail(context, APA_STATUS_INTERNAL, "cuda: %s", cudaGetErrorString((cudaError_t)error));
    return APA_STATUS_OK;
}

static size_t workspace_bytes(const apa_context *context, const apa_call *call)
{
    (void)context;
    (void)call;
    return 0;
}

static apa_status run(apa_context *context, const apa_call *call, void *workspace, apa_statistics *statistics)
{
    (void)workspace;
    return apa_cuda_run(context, call, &apa_cuda_wgmma_family, statistics);
}

const apa_engine apa_cuda_wgmma_engine = {
    .name = "cuda:wgmma",
    .resolve = apa_wgmma_resolve,
    .kernel_name = kernel_name,
    .workspace_bytes = workspace_bytes,
    .run = run,
};

const apa_cuda_family apa_cuda_wgmma_family = {&apa_cuda_wgmma_engine, apa_wgmma_device_bytes, apa_wgmma_kept_bytes,
                                               apa_wgmma_check_copy, apa_wgmma_enqueue};
