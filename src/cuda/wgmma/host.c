/* The engine "cuda:wgmma": what it takes, how the work is cut, the workspace, the launches. Moving host tensors, masks
 * and numbers of a job are those of the CUDA engine (cuda/engine.c, cuda/enqueue.c). */
#include "cuda/arena.h"
#include "cuda/engine.h"
#include "cuda/enqueue.h"
#include "cuda/order.h"
#include "cuda/wgmma/launch.h"
#include "cuda/wgmma/maps.h"
#include "recipe/defaults.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define CAPABILITY 90                  /* wgmma of sm_90a runs on 9.0 and on nothing else */
#define BATCH_BYTES (INT64_C(1) << 30) /* of the buffers that grow with rows · keys or rows · splits */
#define MOST_HOT_SPLITS 8
#define EPS_PART (2.0 / 3.0) /* of the default ε, without smooth_q: a real head's error is under 5·10⁻³ then */
#define EPS_64 0.1           /* of every row where scores are exact and only P and V are rounded (docs/accuracy.md) */
/* A row of n tiles with even shares has them all hot while 1/n > ε, and a group of 16 a little longer: at n·ε = 1
 * … 1.25 (1.25 … 1.5) .9 (.35) of its tiles are hot on normal noise, .3 (.15) on topics, .1 on a real head. A tile of
 * both passes costs more than one of the exact kernel from about a fifth hot on, so a unit whose rows see no more than
 * that goes to the exact kernel at once. */
#define EARLY_SHARES 1.5
#define EARLY_SHARES_64 4.0
#define MOST_STRIDE 8 /* with LEAST_SAMPLE tiles in it a sample's mean changes no error by a tenth */
#define LEAST_SAMPLE 128
#define PAIR_BIAS_BYTES 4096 /* tile_e4m3.cuh: 32 a key, for as many query heads of a KV head as: */
#define MOST_BIAS_HEADS 8
#define QUERY_BYTES 128               /* of codes: tile_e4m3.cuh */
#define SLOT_BYTES (INT64_C(1) << 30) /* of the candidates of blocks that do both passes */
#define LEAST_WIDE_WAVES 4            /* fewer wide blocks leave more idle at the end than they gain */
#define LARGEST_COLD_DIM 128          /* at 256 channels the sums of two products do not fit the registers */

/* ------------------------------------------------------------------------------- what is taken */

static apa_status refuse(apa_context *context, const char *what, const char *found)
{
    return apa_fail(context, APA_STATUS_UNSUPPORTED, "%s: %s, which the cuda:wgmma engine does not take", what, found);
}

/* Tiles up to which a group is hot throughout: n of them, where n·ε of a group that sees n is the limit. */
static int32_t early_tiles(const apa_recipe *recipe, const apa_call *call)
{
    const double shares = call->D == 64 ? EARLY_SHARES_64 : EARLY_SHARES;
    const double tiles = (double)apa_call_tiles(call);
    if (recipe->force != APA_FORCE_NONE || !(recipe->eps > 0.0 && recipe->eps < 1.0) || tiles == 0.0)
        return 0;
    double most = shares / recipe->eps;
    if (recipe->eps_by == APA_EPS_BY_ROW) /* n·ε·sqrt(tiles / n), or n times the most that ε may be */
        most = fmax(most * most / tiles, shares / apa_recipe_most_eps(recipe));
    return (int32_t)fmin(most, INT32_MAX);
}

/* K's mean from a part of the keys, as long as that is LEAST_SAMPLE tiles. */
static int32_t sample_stride(int64_t tiles)
{
    int32_t stride = 1;
    while (stride < MOST_STRIDE && tiles / (2 * stride) >= LEAST_SAMPLE)
        stride *= 2;
    return stride;
}

/* At D 64 products are not what takes the time, and E4M3 scores cost more accuracy than there is to win
 * (docs/cuda-wgmma.md): scores there are those of the inputs, in FP16. */
static bool has_exact_scores(int64_t D)
{
    return D == 64;
}

static apa_qk_format qk_format_of(int64_t D)
{
    return has_exact_scores(D) ? APA_QK_FORMAT_EXACT : APA_QK_FORMAT_E4M3;
}

/* Does the recipe ask for the kernels' formats, at least where it says anything? */
static bool takes_formats(const apa_recipe *recipe, int64_t D)
{
    return apa_recipe_qk_format(recipe) == qk_format_of(D) && apa_recipe_pv_format(recipe) == APA_PV_FORMAT_E4M3;
}

/* The queries' mean and the phases of P cure what E4M3 does not average (docs/accuracy.md). Rows that are packed
 * position by position have a query head each: their scores' biases are not those of a warp. */
static void prefer_smooth(apa_recipe *recipe, const apa_call *call)
{
    apa_recipe resolved = *recipe;
    apa_recipe_fill_auto(&resolved, call->Sq, call->Skv, call->D);
    if (recipe->smooth_q == APA_TOGGLE_AUTO && !has_exact_scores(call->D) && resolved.packing != APA_PACKING_ROWS &&
        call->G <= MOST_BIAS_HEADS)
        recipe->smooth_q = APA_TOGGLE_ON;
    if (recipe->smooth_q == APA_TOGGLE_ON && recipe->q_mean == APA_Q_MEAN_AUTO)
        recipe->q_mean = APA_Q_MEAN_HEAD;
    if (recipe->p_phase == APA_TOGGLE_AUTO && recipe->p_scale == APA_P_SCALE_ROW_TILE_POW2)
        recipe->p_phase = APA_TOGGLE_ON;
}

/* ε, and whose it is; an ε that was given is that of every row, unless eps_by was given too. */
static void prefer_eps(apa_recipe *recipe, const apa_call *call)
{
    const bool open = isnan(recipe->eps), exact_scores = has_exact_scores(call->D);
    if (recipe->eps_by == APA_EPS_BY_AUTO)
        recipe->eps_by = open && !exact_scores ? APA_EPS_BY_ROW : APA_EPS_BY_CALL;
    if (open)
        recipe->eps = exact_scores ? EPS_64
                                   : (recipe->smooth_q == APA_TOGGLE_ON ? 1.0 : EPS_PART) *
                                         apa_recipe_default_eps(APA_COLD_FORMAT_E4M3, call->Skv, recipe->tile);
}

/* What the E4M3 kernels do, where the recipe leaves it open. */
static void prefer(apa_recipe *recipe, const apa_call *call)
{
    if (recipe->cold_format == APA_COLD_FORMAT_AUTO && recipe->qk_format == APA_QK_FORMAT_AUTO &&
        recipe->pv_format == APA_PV_FORMAT_AUTO)
        recipe->cold_format = APA_COLD_FORMAT_E4M3;
    if (recipe->cold_format == APA_COLD_FORMAT_E4M3 && recipe->qk_format == APA_QK_FORMAT_AUTO)
        recipe->qk_format = qk_format_of(call->D);
    if (!takes_formats(recipe, call->D))
        return;
    if (recipe->cold_format == APA_COLD_FORMAT_AUTO) /* both formats were given */
        recipe->cold_format = APA_COLD_FORMAT_E4M3;
    if (recipe->qk_scale_granularity == APA_QK_GRANULARITY_AUTO)
        recipe->qk_scale_granularity = APA_QK_GRANULARITY_WARP;
    if (recipe->v_scale_granularity == APA_V_GRANULARITY_AUTO)
        recipe->v_scale_granularity = APA_V_GRANULARITY_BLOCK;
    if (recipe->p_scale == APA_P_SCALE_AUTO && isnan(recipe->p_static_scale))
        recipe->p_scale = APA_P_SCALE_ROW_TILE_POW2;
    if (recipe->p_map == APA_P_MAP_AUTO && recipe->p_scale == APA_P_SCALE_ROW_TILE_POW2)
        recipe->p_map = APA_P_MAP_DIRECT;
    if (recipe->pow2_scales == APA_TOGGLE_AUTO)
        recipe->pow2_scales = APA_TOGGLE_ON;
    prefer_smooth(recipe, call);
    prefer_eps(recipe, call);
    if (recipe->smooth_k_stride == 0)
        recipe->smooth_k_stride = sample_stride(apa_call_tiles(call));
    if (recipe->early_tiles < 0)
        recipe->early_tiles = early_tiles(recipe, call);
}

static apa_status refuse_knob(apa_context *context, const apa_recipe *recipe, const char *knob)
{
    char found[32] = "";
    apa_recipe_get(recipe, knob, found, sizeof found);
    return refuse(context, knob, found);
}

/* A resolved recipe with cold tiles, for G query heads a KV head. */
static apa_status check_cold(apa_context *context, const apa_recipe *recipe, int64_t G, int64_t D)
{
    const bool exact_scores = has_exact_scores(D);
    const struct {
        const char *knob;
        bool taken;
    } rows[] = {
        {"tile", recipe->tile == APA_CUDA_TILE},
        {"group", recipe->group == APA_CUDA_GROUP},
        {"exact_format", recipe->exact_format == APA_EXACT_FORMAT_INPUT},
        {"qk_format", recipe->qk_format == qk_format_of(D)},
        {"pv_format", recipe->pv_format == APA_PV_FORMAT_E4M3},
        {"qk_scale_granularity", recipe->qk_scale_granularity == APA_QK_GRANULARITY_WARP},
        {"v_scale_granularity", recipe->v_scale_granularity == APA_V_GRANULARITY_BLOCK},
        {"p_scale", recipe->p_scale == APA_P_SCALE_ROW_TILE_POW2},
        {"p_map", recipe->p_map == APA_P_MAP_DIRECT},
        {"pow2_scales", recipe->pow2_scales == APA_TOGGLE_ON},
        {"q_terms", recipe->q_terms == 1},
        {"smooth_v", recipe->smooth_v == APA_TOGGLE_OFF},
        {"hadamard", recipe->hadamard == APA_TOGGLE_OFF},
        {"smooth_q", recipe->smooth_q == APA_TOGGLE_OFF ||
                         (!exact_scores && recipe->packing != APA_PACKING_ROWS && G <= MOST_BIAS_HEADS)},
        {"q_mean", recipe->smooth_q == APA_TOGGLE_OFF || recipe->q_mean == APA_Q_MEAN_HEAD},
        {"skip", recipe->skip == APA_TOGGLE_OFF},
        {"second_look", recipe->second_look == APA_TOGGLE_ON}, /* verdicts fall when λ is complete */
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (!rows[i].taken)
            return refuse_knob(context, recipe, rows[i].knob);
    apa_recipe plain = *recipe;
    const char *knob;
    plain.qk_scale_granularity = APA_QK_GRANULARITY_ROW;
    plain.v_scale_granularity = APA_V_GRANULARITY_TILE_CHANNEL;
    plain.p_scale = APA_P_SCALE_ROW_TILE;
    plain.p_map = APA_P_MAP_EXP;
    plain.pow2_scales = APA_TOGGLE_OFF;
    plain.smooth_k_stride = 1;
    plain.smooth_q = plain.p_phase = APA_TOGGLE_OFF;
    plain.q_mean = APA_Q_MEAN_BLOCK;
    plain.eps_by = APA_EPS_BY_CALL;
    if (exact_scores)
        plain.qk_format = APA_QK_FORMAT_E4M3;
    return apa_recipe_beyond_walk(&plain, &knob) ? refuse_knob(context, recipe, knob) : APA_STATUS_OK;
}

static apa_status resolve_cold(apa_context *context, apa_call *call)
{
    char found[32];
    prefer(&call->recipe, call);
    apa_recipe_fill_auto(&call->recipe, call->Sq, call->Skv, call->D);
    if (call->recipe.skip == APA_TOGGLE_AUTO)
        call->recipe.skip = APA_TOGGLE_OFF;
    if (call->D > LARGEST_COLD_DIM) {
        snprintf(found, sizeof found, "%d with cold tiles", (int)call->D);
        return refuse(context, "dim", found);
    }
    const apa_status status = check_cold(context, &call->recipe, call->G, call->D);
    return status == APA_STATUS_OK ? apa_cuda_check_shape(context, call) : status;
}

static apa_status resolve(apa_context *context, apa_call *call)
{
    apa_cuda_target target;
    apa_status status = apa_cuda_current(context, &target);
    if (status != APA_STATUS_OK)
        return status;
    if (target.capability != CAPABILITY)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "cuda:wgmma: needs compute capability 9.0, device %d has %d.%d", (int)target.index,
                        (int)target.capability / 10, (int)target.capability % 10);
    if (call->recipe.exact_accum == APA_ACCUMULATOR_F16) /* of cuda:warp alone */
        return refuse_knob(context, &call->recipe, "exact_accum");
    status = apa_cuda_all_hot(&call->recipe) ? apa_cuda_resolve(context, call) : resolve_cold(context, call);
    if (status != APA_STATUS_OK)
        return status;
    if (call->pages != NULL)
        return APA_STATUS_OK; /* they are laid flat first */
    const char *objection = apa_wgmma_map_objection(&call->k);
    if (objection != NULL)
        return refuse(context, "k", objection);
    objection = apa_wgmma_map_objection(&call->v);
    return objection != NULL ? refuse(context, "v", objection) : APA_STATUS_OK;
}

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
             all_exact(call)             ? ""
             : has_exact_scores(call->D) ? "f16/e4m3+"
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

/* Fills in the job; returns the units of a batch. */
static int64_t make_job(const apa_call *call, const apa_cuda_target *target, const apa_cuda_kept *kept,
                        apa_cuda_arena *at, apa_cuda_job *job)
{
    const bool all_hot = all_exact_of(call, kept);
    apa_cuda_arena own = {kept->memory, 0};
    apa_cuda_describe(call, job);
    apa_cuda_keep(kept, 2, job);
    job->early_prefix = all_hot ? 0 : (int32_t)early_positions(job) * (job->packing_rows ? job->G : 1);
    cut(call, target, job);
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

size_t apa_wgmma_device_bytes(const apa_call *call, const apa_cuda_target *target, const apa_cuda_kept *kept)
{
    const apa_cuda_kept nothing = {0};
    apa_cuda_arena at = {NULL, 0};
    apa_cuda_job job;
    if (is_empty(call))
        return apa_cuda_device_bytes(call, target, &nothing);
    make_job(call, target, kept, &at, &job);
    return at.used;
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
    if (error == 0) /* without verdicts, too: tiles that need frames of their own were held back */
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

apa_status apa_wgmma_enqueue(apa_context *context, const apa_call *call, const apa_cuda_target *target,
                             const apa_cuda_place *place)
{
    const bool all_hot = all_exact_of(call, &place->kept);
    apa_cuda_arena at = {place->workspace, 0};
    apa_cuda_job job;
    if (is_empty(call)) {
        apa_cuda_place plain = *place;
        plain.kept = (apa_cuda_kept){0};
        return apa_cuda_enqueue(context, call, target, &plain);
    }
    apa_status status = apa_cuda_check_aligned(context, "q", &call->q);
    if (status == APA_STATUS_OK)
        status = apa_cuda_check_aligned(context, "k", &call->k);
    if (status == APA_STATUS_OK)
        status = apa_cuda_check_aligned(context, "v", &call->v);
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
    .resolve = resolve,
    .kernel_name = kernel_name,
    .workspace_bytes = workspace_bytes,
    .run = run,
};

const apa_cuda_family apa_cuda_wgmma_family = {&apa_cuda_wgmma_engine, apa_wgmma_device_bytes, apa_wgmma_kept_bytes,
                                               apa_wgmma_enqueue};
