/* Cutting the work, laying out the workspace, launching. */
#include "cuda/arena.h"
#include "cuda/enqueue.h"

#include "apa/cuda.h"
#include "cuda/accept.h"
#include "cuda/job.h"
#include "cuda/trait.h"
#include "recipe/defaults.h"

#include <cuda_runtime_api.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

_Static_assert((int)APA_CUDA_COUNTS == (int)APA_CUDA_COUNT_NUMBER && (int)APA_CUDA_SKIPPED == APA_CUDA_COUNT_SKIPPED,
               "counts are the caller's");

#define LOG2_E 1.4426950408889634074
#define FAR (INT64_C(1) << 62)
#define BATCH_BYTES (INT64_C(1) << 30) /* of the buffers that grow with rows · keys or rows · splits */
#define LEAST_HELD 2                   /* tiles of a bounded copy: the sink and one more */
#define LEAST_TILES 8                  /* of a split */
#define MOST_SPLITS 64
#define MOST_HOT_SPLITS 8
#define LEAST_EPS_TO_SKIP 0x1p-20
#define BLOCK_RESERVE                                                                                                  \
    1280 /* shared memory of a block that is not asked for: static, and the 1 KB that the driver takes */

/* ------------------------------------------------------------------------------- what is taken */

/* The row of the table; call it for recipes that were accepted and are not all hot. */
static const apa_cuda_trait *trait_of(const apa_recipe *recipe)
{
    const char *knob;
    return apa_cuda_trait_find(recipe, &knob);
}

static apa_status check_shape(apa_context *context, const apa_call *call, const apa_cuda_target *target)
{
    const apa_status status = apa_cuda_check_shape(context, call);
    if (status != APA_STATUS_OK)
        return status;
    const bool all_hot = apa_cuda_all_hot(&call->recipe);
    const apa_cuda_trait *trait = all_hot ? NULL : trait_of(&call->recipe);
    if (trait != NULL && target->capability < trait->capability)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "cold_format: %s needs compute capability %d.%d, this device has %d.%d", trait->name,
                        (int)trait->capability / 10, (int)trait->capability % 10, (int)target->capability / 10,
                        (int)target->capability % 10);
    const int64_t cold = all_hot ? 0 : apa_cuda_cold_shared_bytes(trait->number, call->D, target->capability);
    const int64_t hot = all_hot ? apa_cuda_exact_shared_bytes(call->D) : apa_cuda_hot_shared_bytes(call->D);
    const int64_t need = cold > hot ? cold : hot;
    if (need > target->shared_bytes)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "dim: %lld needs %lld bytes of shared memory in a block, this device has %lld",
                        (long long)call->D, (long long)need, (long long)target->shared_bytes);
    return APA_STATUS_OK;
}

apa_status apa_cuda_resolve(apa_context *context, apa_call *call)
{
    apa_cuda_target target;
    apa_status status = apa_cuda_current(context, &target);
    if (status != APA_STATUS_OK)
        return status;
    apa_cuda_trait_prefer(&call->recipe);
    apa_recipe_fill_auto(&call->recipe, call->Sq, call->Skv, call->D);
    if (call->recipe.skip == APA_TOGGLE_AUTO)
        call->recipe.skip = APA_TOGGLE_OFF;
    status = apa_cuda_accept(context, &call->recipe);
    return status == APA_STATUS_OK ? check_shape(context, call, &target) : status;
}

/* ------------------------------------------------------------------------------- the job */

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* a + b, kept within ±2^62, so that adding a position cannot overflow. */
static int64_t bounded_sum(int64_t a, int64_t b)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return a > 0 ? FAR : -FAR;
    return sum > FAR ? FAR : sum < -FAR ? -FAR : sum;
}

static apa_cuda_tensor tensor_of(const apa_tensor *x)
{
    const apa_cuda_tensor tensor = {x->data, {x->stride[0], x->stride[1], x->stride[2]}, (int32_t)x->dtype};
    return tensor;
}

static void set_masks(const apa_call *call, apa_cuda_job *job)
{
    int64_t right = FAR;
    if (call->window_right >= 0)
        right = bounded_sum(call->q_offset, call->window_right);
    if (call->causal && call->q_offset < right)
        right = call->q_offset;
    job->end_offset = right == FAR ? FAR : bounded_sum(right, 1);
    job->first_offset = call->window_left >= 0 ? bounded_sum(call->q_offset, -call->window_left) : -FAR;
}

static void set_shape(const apa_call *call, apa_cuda_job *job)
{
    job->B = (int32_t)call->B;
    job->Hq = (int32_t)call->Hq;
    job->Hkv = (int32_t)call->Hkv;
    job->G = (int32_t)call->G;
    job->Sq = (int32_t)call->Sq;
    job->Skv = (int32_t)call->Skv;
    job->D = (int32_t)call->D;
    job->bf16 = call->q.dtype == APA_DTYPE_BF16;
    job->packing_rows = call->recipe.packing == APA_PACKING_ROWS;
    job->tiles = job->room = job->held = (int32_t)apa_call_tiles(call);
    job->window_first = 1;
    job->window_before = INT32_MAX;
    job->Sq16 = (int32_t)(ceil_div(call->Sq, APA_CUDA_GROUP) * APA_CUDA_GROUP);
    job->rows = (int32_t)((job->packing_rows ? call->Sq : job->Sq16) * call->G);
    job->units = (int32_t)ceil_div(job->rows, APA_CUDA_UNIT);
    job->line = job->packing_rows ? job->rows : job->Sq16;
}

static void set_numbers(const apa_call *call, apa_cuda_job *job)
{
    const double c = fabs(call->scale) * LOG2_E;
    /* A scale of zero makes all scores equal: so does one that no score can feel, without 0·inf at masked keys. */
    job->c_exact = c < (double)FLT_MIN ? (double)FLT_MIN : c;
    job->c = (float)job->c_exact;
    job->negate = call->scale < 0.0;
    const apa_recipe *recipe = &call->recipe;
    job->half_sums = recipe->exact_accum == APA_ACCUMULATOR_F16;
    const double eps = recipe->force == APA_FORCE_LOW ? 2.0 : recipe->eps;
    job->eps = (float)eps;
    job->log2_eps = eps > 0.0 ? (float)log2(eps) : -INFINITY;
    const bool by_row = recipe->eps_by == APA_EPS_BY_ROW && eps > 0.0 && eps < 1.0;
    job->eps_root = by_row ? (float)(eps * sqrt((double)apa_call_tiles(call))) : 0.0f;
    job->eps_most = (float)apa_recipe_most_eps(recipe);
    job->smooth = recipe->smooth_k == APA_TOGGLE_ON;
    job->smooth_q = recipe->smooth_q == APA_TOGGLE_ON;
    job->p_phase = recipe->p_phase == APA_TOGGLE_ON;
    job->smooth_stride = recipe->smooth_k_stride;
    job->hadamard = recipe->hadamard == APA_TOGGLE_ON;
    job->judged = recipe->force == APA_FORCE_NONE && recipe->eps < 1.0;
    job->early_tiles = job->judged ? recipe->early_tiles : 0;
    job->second_look = recipe->second_look == APA_TOGGLE_ON;
    job->hold_all = !job->second_look;
    /* what is skipped is below every ε that is not absurd, so it is cold */
    job->skip = recipe->skip == APA_TOGGLE_ON && eps >= LEAST_EPS_TO_SKIP;
    job->tau = (float)recipe->lazy_tau;
    job->delta = (float)recipe->frame_drop;
    job->search = recipe->scale_search == APA_TOGGLE_ON;
    const apa_cuda_trait *trait = apa_cuda_all_hot(recipe) ? NULL : trait_of(recipe);
    job->trait = trait == NULL ? APA_CUDA_INT8 : trait->number; /* none: the recipe is another family's */
}

int32_t apa_cuda_choose_splits(const apa_cuda_job *job, int64_t units, int64_t slots)
{
    int32_t best = 1;
    double least = INFINITY;
    for (int32_t splits = 1; splits <= MOST_SPLITS && (splits == 1 || job->tiles / splits >= LEAST_TILES); splits++) {
        const double waves = (double)ceil_div(units * splits, slots) / splits;
        const double cost = waves * (1.0 + 0.01 * splits); /* a split writes and reads its sums */
        if (cost < least * 0.98) {
            least = cost;
            best = splits;
        }
    }
    return best;
}

static void cut(const apa_call *call, const apa_cuda_target *target, bool all_hot, apa_cuda_job *job)
{
    const int64_t units = (int64_t)job->B * job->Hkv * job->units;
    job->capability = target->capability;
    const int64_t shared =
        all_hot ? apa_cuda_exact_shared_bytes(job->D) : apa_cuda_cold_shared_bytes(job->trait, job->D, job->capability);
    const int64_t fit = target->shared_bytes_of_sm / (shared + BLOCK_RESERVE);
    const int64_t slots = target->multiprocessors * (job->D <= 128 && fit >= 2 ? 2 : 1);
    const bool triangle = call->causal && !job->packing_rows && job->Sq16 % APA_CUDA_UNIT == 0;
    job->splits = units == 0 ? 1 : triangle && units >= 2 * slots ? 1 : apa_cuda_choose_splits(job, units, slots);
    if (!all_hot && job->judged && !job->second_look)
        job->splits = 1; /* verdicts fall on the way, against λ of all that came before */
    job->hot_splits = 1;
    while (job->hot_splits < MOST_HOT_SPLITS && units * job->hot_splits < 8 * target->multiprocessors)
        job->hot_splits++;
    job->longest_first = triangle;
    job->shared_bytes_of_sm = target->shared_bytes_of_sm;
}

/* ------------------------------------------------------------------------------- workspace */

/* What calls can leave to later ones. */
static void lay_out_kept(apa_cuda_job *job, apa_cuda_arena *at)
{
    const int64_t heads = (int64_t)job->B * job->Hkv;
    job->k_mean = apa_cuda_take(at, heads * job->D, sizeof(float));
    job->blob = apa_cuda_take(at, heads * job->held * apa_cuda_blob_bytes(job->trait, job->D), 1);
    job->poisoned = apa_cuda_take(at, heads * job->room, 1);
    job->k_scale_max = apa_cuda_take(at, heads, sizeof(float));
}

/* Buffers of all tiles, then those of `units` units; prepared keys go to `kept`. */
static void lay_out(apa_cuda_job *job, bool all_hot, int64_t units, apa_cuda_arena *at, apa_cuda_arena *kept)
{
    const int64_t heads = (int64_t)job->B * job->Hkv, tiles = heads * job->tiles, D = job->D;
    const int64_t rows = units * APA_CUDA_UNIT, parts = all_hot && job->splits == 1 ? 0 : job->splits;
    job->part_o = apa_cuda_take(at, parts * rows * D, sizeof(float));
    job->part_frame = apa_cuda_take(at, parts * rows, sizeof(float));
    job->part_sum = apa_cuda_take(at, parts * rows, sizeof(float));
    if (all_hot)
        return;
    job->tile_sum = apa_cuda_take(at, job->smooth ? tiles * (D + 1) : 0, sizeof(double));
    job->mean_sum = apa_cuda_take(at, job->smooth ? heads * D : 0, sizeof(double));
    lay_out_kept(job, kept);
    job->k_amax = apa_cuda_take(at, heads, sizeof(float));
    job->v_amax = apa_cuda_take(at, heads * D, sizeof(float));
    job->v_scale = apa_cuda_take(at, heads * D, sizeof(float));
    job->q_codes = apa_cuda_take(at, units * apa_cuda_query_bytes(job->trait, D), 1);
    job->q16 = apa_cuda_take(at, rows * D, 2);
    job->q_scale = apa_cuda_take(at, rows, sizeof(float));
    job->shift = apa_cuda_take(at, rows, sizeof(float));
    job->all_hot = apa_cuda_take(at, units * APA_CUDA_UNIT_GROUPS, 1);
    job->candidate = apa_cuda_take(at, units * APA_CUDA_UNIT_GROUPS * job->tiles, 1);
    job->mass = apa_cuda_take(at, units * APA_CUDA_UNIT * job->tiles, sizeof(float));
    job->part_lambda = apa_cuda_take(at, parts * rows, sizeof(float));
    job->part_skipped = apa_cuda_take(at, job->skip ? parts * rows : 0, sizeof(float));
    job->hot_tile = apa_cuda_take(at, units * job->tiles, sizeof(uint32_t));
    job->hot_mask = apa_cuda_take(at, units * job->tiles, sizeof(uint8_t));
    job->fix_tile = apa_cuda_take(at, units * job->tiles, sizeof(uint32_t));
    job->fix_mask = apa_cuda_take(at, units * job->tiles, sizeof(uint16_t));
    job->list_count = apa_cuda_take(at, 2 * units, sizeof(int32_t));
    const int64_t hot_parts = apa_cuda_finishes_in_pass_2(job) ? 0 : job->hot_splits;
    job->hot_o = apa_cuda_take(at, hot_parts * rows * D, sizeof(float));
    job->hot_frame = apa_cuda_take(at, hot_parts * rows, sizeof(float));
    job->hot_sum = apa_cuda_take(at, hot_parts * rows, sizeof(float));
}

/* Units that are worked on at once: all, or as many as keep the growing buffers within BATCH_BYTES. */
static int64_t batch_units(const apa_cuda_job *job, bool all_hot, int64_t units)
{
    const int64_t sums = (int64_t)(job->splits + (all_hot ? 0 : job->hot_splits)) * APA_CUDA_UNIT * (job->D + 2) * 4;
    const int64_t masses = all_hot ? 0 : (int64_t)job->tiles * APA_CUDA_UNIT_GROUPS * (16 * 4 + 1 + 1);
    const int64_t each = all_hot && job->splits == 1 ? 1 : sums + masses, most = BATCH_BYTES / each;
    const int64_t batches = ceil_div(units, most < 1 ? 1 : most);
    return batches == 0 ? 0 : ceil_div(units, batches);
}

void apa_cuda_describe(const apa_call *call, apa_cuda_job *job)
{
    memset(job, 0, sizeof *job);
    job->q = tensor_of(&call->q);
    job->k = tensor_of(&call->k);
    job->v = tensor_of(&call->v);
    job->out = tensor_of(&call->out);
    job->lse = tensor_of(&call->lse);
    set_masks(call, job);
    set_shape(call, job);
    set_numbers(call, job);
}

void apa_cuda_keep(const apa_cuda_kept *kept, int32_t together, apa_cuda_job *job)
{
    if (kept->room == 0)
        return;
    const int64_t keys = kept->keys < job->Skv ? kept->keys : job->Skv, step = (int64_t)together * APA_CUDA_TILE;
    job->room = job->held = (int32_t)(ceil_div(kept->room, step) * together);
    job->first_tile = (int32_t)(keys / step * together); /* one that is not whole is made anew */
    job->mean_given = kept->mean || keys > 0;
}

/* Tiles of a KV head that fit; a job's own where that is all of them. */
static int64_t tiles_within(const apa_cuda_job *job, size_t copy_bytes)
{
    const int64_t a_tile = (int64_t)job->B * job->Hkv * apa_cuda_blob_bytes(job->trait, job->D);
    const size_t fit = copy_bytes / (size_t)(a_tile > 0 ? a_tile : 1);
    return copy_bytes == 0 || fit >= (size_t)job->tiles ? job->tiles : (int64_t)fit;
}

apa_status apa_cuda_check_copy(apa_context *context, const apa_call *call, size_t copy_bytes)
{
    apa_cuda_job job;
    if (copy_bytes == 0 || apa_cuda_all_hot(&call->recipe))
        return APA_STATUS_OK;
    apa_cuda_describe(call, &job);
    const int64_t held = tiles_within(&job, copy_bytes);
    if (held == job.tiles)
        return APA_STATUS_OK;
    if (job.trait == APA_CUDA_NVFP4 || job.skip)
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "copy_bytes: with %s, expected 8-bit cold tiles and skip=off",
                        job.skip ? "skip=on" : "nvfp4");
    if (held < LEAST_HELD)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "copy_bytes: %zu, expected 0 or at least %lld",
                        copy_bytes,
                        (long long)((int64_t)LEAST_HELD * job.B * job.Hkv * apa_cuda_blob_bytes(job.trait, job.D)));
    return APA_STATUS_OK;
}

/* Returns the units of a batch. */
static int64_t make_job(const apa_call *call, const apa_cuda_target *target, const apa_cuda_kept *kept,
                        apa_cuda_arena *at, apa_cuda_job *job)
{
    const bool all_hot = apa_cuda_all_hot(&call->recipe);
    apa_cuda_arena own = {kept->memory, 0};
    apa_cuda_describe(call, job);
    apa_cuda_keep(kept, 1, job);
    if (!all_hot && kept->room == 0 && tiles_within(job, kept->copy_bytes) < job->tiles) {
        job->windowed = 1;
        job->held = (int32_t)tiles_within(job, kept->copy_bytes);
    }
    cut(call, target, all_hot, job);
    const int64_t units = (int64_t)job->B * job->Hkv * job->units, batch = batch_units(job, all_hot, units);
    job->longest_first = job->longest_first && batch == units;
    lay_out(job, all_hot, batch, at, kept->room > 0 ? &own : at);
    return batch;
}

size_t apa_cuda_device_bytes(const apa_call *call, const apa_cuda_target *target, const apa_cuda_kept *kept)
{
    apa_cuda_arena at = {NULL, 0};
    apa_cuda_job job;
    make_job(call, target, kept, &at, &job);
    return at.used;
}

apa_status apa_cuda_kept_bytes(apa_context *context, const apa_call *call, int64_t room, size_t *bytes)
{
    const apa_cuda_kept kept = {.room = room};
    apa_cuda_arena at = {NULL, 0};
    apa_cuda_job job;
    *bytes = 0;
    if (apa_cuda_all_hot(&call->recipe))
        return APA_STATUS_OK;
    const apa_cuda_trait *trait = trait_of(&call->recipe);
    if (trait->number != APA_CUDA_INT8_FINE)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "prepared: %s has scales of a whole head, which new keys change, expected cold tiles with "
                        "scales of their own (cuda:warp: cold_format=int8 qk_scale_granularity=row)",
                        trait->name);
    apa_cuda_describe(call, &job);
    apa_cuda_keep(&kept, 1, &job);
    lay_out_kept(&job, &at);
    *bytes = at.used;
    return APA_STATUS_OK;
}

int64_t apa_cuda_visible(const apa_call *call)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < call->Sq; i++) {
        int64_t first, end;
        apa_call_visible(call, i, &first, &end);
        if (first < end)
            sum += (end - 1) / APA_CUDA_TILE - first / APA_CUDA_TILE + 1;
    }
    return sum * call->B * call->Hq;
}

/* ------------------------------------------------------------------------------- launching */

static apa_status check_tensor(apa_context *context, const char *name, const apa_tensor *x)
{
    if (x->shape[0] * x->shape[1] * x->shape[2] == 0)
        return APA_STATUS_OK;
    bool strides = true;
    for (int axis = 0; axis < 3; axis++)
        strides = strides && (x->shape[axis] == 1 || x->stride[axis] % 8 == 0);
    if ((uintptr_t)x->data % 16 == 0 && strides)
        return APA_STATUS_OK;
    return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                    "%s: data and rows not aligned to 16 bytes, expected strides that are multiples of 8 elements",
                    name);
}

apa_status apa_cuda_check_aligned(apa_context *context, const apa_call *call)
{
    apa_status status = check_tensor(context, "q", &call->q);
    if (status == APA_STATUS_OK)
        status = check_tensor(context, "k", &call->k);
    return status == APA_STATUS_OK ? check_tensor(context, "v", &call->v) : status;
}

/* Skipped tiles that mattered after all, and the rows that want them. */
static int bring_back(apa_cuda_job *job, void *stream)
{
    int error = apa_cuda_launch_recheck(job, stream);
    job->again = 1;
    if (error == 0)
        error = apa_cuda_launch_fix(job, stream);
    if (error == 0)
        error = apa_cuda_launch_hot(job, stream);
    if (error == 0 && !apa_cuda_finishes_in_pass_2(job))
        error = apa_cuda_launch_finish(job, 1, stream);
    job->again = 0;
    return error;
}

typedef int launcher(const apa_cuda_job *job, void *stream);

/* The window that comes first: the last one, which may be shorter than the others. */
static int32_t last_window(const apa_cuda_job *job)
{
    return (job->tiles - 2) / (job->held - 1) * (job->held - 1) + 1;
}

/* Before the first batch: all tiles, or the last window, with the statistics over all keys. */
static int prepare_keys(apa_cuda_job *job, void *stream)
{
    if (job->windowed)
        job->window_first = last_window(job);
    const int error = apa_cuda_launch_prep_keys(job, stream);
    job->statistics_given = job->windowed;
    return error;
}

/* The launch where all tiles are there; of a bounded copy once a window, the last window first as the walk goes, each
 * prepared before unless it is there. */
static int over_windows(apa_cuda_job *job, launcher *launch, void *stream)
{
    if (!job->windowed)
        return launch(job, stream);
    int error = 0;
    job->window_before = INT32_MAX;
    for (int32_t first = last_window(job); error == 0 && first > 0; first -= job->held - 1) {
        const bool there = first == job->window_first;
        job->window_first = first;
        if (!there)
            error = apa_cuda_launch_prep_keys(job, stream);
        if (error == 0)
            error = launch(job, stream);
        job->window_before = first;
    }
    return error;
}

static int run_batch(apa_cuda_job *job, const apa_cuda_place *place)
{
    int error = apa_cuda_launch_prep_queries(job, place->stream);
    if (error == 0 && job->unit_first == 0 && place->prep_done != NULL)
        error = cudaEventRecord(place->prep_done, place->stream);
    if (error == 0)
        error = over_windows(job, apa_cuda_launch_cold, place->stream);
    if (error == 0 && job->windowed && job->unit_first == 0) /* can they be judged? asks for the scales of all keys */
        error = apa_cuda_launch_prep_queries(job, place->stream);
    if (error == 0)
        error = apa_cuda_launch_judge(job, place->stream);
    if (error == 0 && job->judged) /* without verdicts nothing was guessed */
        error = over_windows(job, apa_cuda_launch_fix, place->stream);
    if (error == 0)
        error = apa_cuda_launch_hot(job, place->stream);
    if (error == 0 && !apa_cuda_finishes_in_pass_2(job))
        error = apa_cuda_launch_finish(job, 1, place->stream);
    if (error == 0 && job->skip)
        error = bring_back(job, place->stream);
    return error;
}

static int run_adaptive(apa_cuda_job *job, int64_t batch, const apa_cuda_place *place)
{
    const int64_t units = (int64_t)job->B * job->Hkv * job->units;
    int error = prepare_keys(job, place->stream);
    for (job->unit_first = 0; error == 0 && job->unit_first < units; job->unit_first += batch) {
        job->unit_count = units - job->unit_first < batch ? units - job->unit_first : batch;
        error = run_batch(job, place);
    }
    return error;
}

static int run_exact(apa_cuda_job *job, int64_t batch, const apa_cuda_place *place)
{
    const int64_t units = (int64_t)job->B * job->Hkv * job->units;
    int error = place->prep_done != NULL ? (int)cudaEventRecord(place->prep_done, place->stream) : 0;
    for (job->unit_first = 0; error == 0 && job->unit_first < units; job->unit_first += batch) {
        job->unit_count = units - job->unit_first < batch ? units - job->unit_first : batch;
        error = apa_cuda_launch_exact(job, place->stream);
        if (error == 0 && job->splits > 1)
            error = apa_cuda_launch_finish(job, 0, place->stream);
    }
    return error;
}

int apa_cuda_clear_results(const apa_call *call, const apa_cuda_place *place)
{
    int error = 0;
    if (place->verdicts != NULL)
        error = cudaMemsetAsync(place->verdicts, APA_VERDICT_INVISIBLE,
                                (size_t)(call->B * call->Hq * call->Sq * apa_call_tiles(call)), place->stream);
    if (error == 0 && place->counts != NULL && !place->add_counts)
        error = cudaMemsetAsync(place->counts, 0, sizeof(uint64_t) * APA_CUDA_COUNTS, place->stream);
    return error;
}

apa_status apa_cuda_enqueue(apa_context *context, const apa_call *call, const apa_cuda_target *target,
                            const apa_cuda_place *place)
{
    const bool all_hot = apa_cuda_all_hot(&call->recipe);
    apa_cuda_arena at = {place->workspace, 0};
    apa_cuda_job job;
    const apa_status status = apa_cuda_check_aligned(context, call);
    if (status != APA_STATUS_OK)
        return status;
    const int64_t batch = make_job(call, target, &place->kept, &at, &job);
    job.counts = (unsigned long long *)place->counts;
    job.verdicts = place->verdicts;
    int error = apa_cuda_clear_results(call, place);
    if (error == 0)
        error = all_hot ? run_exact(&job, batch, place) : run_adaptive(&job, batch, place);
    if (error == 0 && all_hot && (place->counts != NULL || place->verdicts != NULL))
        error = apa_cuda_launch_all_hot(&job, place->stream);
    if (error != 0)
        return apa_fail(context, APA_STATUS_INTERNAL, "cuda: %s", cudaGetErrorString((cudaError_t)error));
    return APA_STATUS_OK;
}
