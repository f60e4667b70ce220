/* The cost model: operations counted from what a run did, divided by a device's rates. docs/cost-model.md derives every
 * formula; this file follows its order.
 *
 * With N visible (query, key) pairs and the shares hot, skipped and candidates of a run's statistics:
 *   scored   = pairs that get a cold score        = N, or N·(1 - hot) where hot tiles are known beforehand
 *   again    = N·(candidates - hot)                 tiles demoted by the second look: scored twice
 *   valued   = N·(1 - hot - skipped)                pairs in the cold P·V
 *   exact    = N·hot, and for LampAttention the scores of recomputed sub-blocks */
#include "apa/eval.h"

#include "core/call.h"
#include "core/context_internal.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

static const apa_device_profile profiles[] = {
#define APA_DEVICE(name_, about_, f32, f16, fp8, int8, fp4, half_sums_, exponentials_, cold_scores_, prep_values_,     \
                   bytes_, reach_, overlap_)                                                                           \
    {                                                                                                                  \
        .name = name_,                                                                                                 \
        .about = about_,                                                                                               \
        .rate = {f32 * .5e12, f16 * .5e12, fp8 * .5e12, int8 * .5e12, fp4 * .5e12},                                    \
        .half_sums = half_sums_,                                                                                       \
        .exponentials = exponentials_ * 1e9,                                                                           \
        .cold_scores = cold_scores_ * 1e9,                                                                             \
        .prep_values = prep_values_ * 1e9,                                                                             \
        .bytes = bytes_ * 1e9,                                                                                         \
        .reach = reach_,                                                                                               \
        .overlap = overlap_,                                                                                           \
    },
#include "eval/devices.def"
#undef APA_DEVICE
};
#define PROFILES (sizeof profiles / sizeof profiles[0])

const apa_device_profile *apa_device_profile_at(size_t i)
{
    return i < PROFILES ? &profiles[i] : NULL;
}

const apa_device_profile *apa_device_profile_find(const char *name)
{
    for (size_t i = 0; name != NULL && i < PROFILES; i++)
        if (strcmp(profiles[i].name, name) == 0)
            return &profiles[i];
    return NULL;
}

const char *apa_unit_name(apa_unit unit)
{
    static const char *const names[APA_UNIT_COUNT] = {"f32", "f16", "fp8", "int8", "fp4"};
    return (unsigned)unit < APA_UNIT_COUNT ? names[unit] : NULL;
}

/* ------------------------------------------------------------------------------- which unit */

/* ELSA is an FP32 method without matrix units. */
static apa_unit exact_unit(const apa_recipe *r, apa_dtype dtype)
{
    if (r->softmax == APA_SOFTMAX_TREE)
        return APA_UNIT_F32;
    const bool half = dtype == APA_DTYPE_F16 || dtype == APA_DTYPE_BF16;
    return half || r->exact_format == APA_EXACT_FORMAT_F16 || r->exact_format == APA_EXACT_FORMAT_BF16 ? APA_UNIT_F16
                                                                                                       : APA_UNIT_F32;
}

static apa_unit cold_unit(apa_cold_format format)
{
    return format == APA_COLD_FORMAT_E4M3                                       ? APA_UNIT_FP8
           : format == APA_COLD_FORMAT_NVFP4 || format == APA_COLD_FORMAT_MXFP4 ? APA_UNIT_FP4
                                                                                : APA_UNIT_INT8;
}

/* Operands left exact are multiplied as in the exact pass. */
static apa_unit score_unit(const apa_recipe *r, apa_dtype dtype)
{
    if (r->verdict == APA_VERDICT_RULE_LAMP)
        return APA_UNIT_FP8; /* sums in 8 bits: no matrix unit does that; counted as if one did */
    if (r->exact_q == APA_TOGGLE_ON || r->exact_k == APA_TOGGLE_ON)
        return exact_unit(r, dtype);
    switch (r->qk_format) {
    case APA_QK_FORMAT_INT8:
        return APA_UNIT_INT8;
    case APA_QK_FORMAT_E4M3:
        return APA_UNIT_FP8;
    case APA_QK_FORMAT_NVFP4:
    case APA_QK_FORMAT_MXFP4:
        return APA_UNIT_FP4;
    case APA_QK_FORMAT_EXACT:
        return exact_unit(r, dtype);
    case APA_QK_FORMAT_AUTO:
        break;
    }
    return cold_unit(r->cold_format);
}

static apa_unit value_unit(const apa_recipe *r, apa_dtype dtype)
{
    if (r->exact_p == APA_TOGGLE_ON || r->exact_v == APA_TOGGLE_ON)
        return exact_unit(r, dtype);
    switch (r->pv_format) {
    case APA_PV_FORMAT_INT8:
        return APA_UNIT_INT8;
    case APA_PV_FORMAT_E4M3:
    case APA_PV_FORMAT_MXFP8:
        return APA_UNIT_FP8;
    case APA_PV_FORMAT_NVFP4:
    case APA_PV_FORMAT_MXFP4:
        return APA_UNIT_FP4;
    case APA_PV_FORMAT_F16:
        return APA_UNIT_F16;
    case APA_PV_FORMAT_EXACT:
        return exact_unit(r, dtype);
    case APA_PV_FORMAT_AUTO:
        break;
    }
    return cold_unit(r->cold_format);
}

/* The unit that does it on a device: E2M1 doubled is a small integer, so INT8 takes its place; 16 bits hold FP8 and
 * INT8 exactly; FP32 holds everything. */
static apa_unit unit_on(const apa_device_profile *device, apa_unit unit)
{
    static const apa_unit wider[APA_UNIT_COUNT] = {
        [APA_UNIT_F32] = APA_UNIT_F32,  [APA_UNIT_F16] = APA_UNIT_F32,  [APA_UNIT_FP8] = APA_UNIT_F16,
        [APA_UNIT_INT8] = APA_UNIT_F16, [APA_UNIT_FP4] = APA_UNIT_INT8,
    };
    while (unit != APA_UNIT_F32 && !(device->rate[unit] > 0))
        unit = wider[unit];
    return unit;
}

/* Bytes that one quantised value takes, its block scale included. */
static double code_bytes(apa_unit unit)
{
    static const double bytes[APA_UNIT_COUNT] = {4, 2, 1, 1, 0.5 + 1.0 / 16};
    return bytes[unit];
}

/* ------------------------------------------------------------------------------- counting */

typedef struct cost_job {
    const apa_problem *problem;
    const apa_recipe *recipe;
    const apa_device_profile *device;
    apa_cost *cost;
    double visible;                  /* N */
    double hot, skipped, candidates; /* shares */
    double recomputed;               /* LampAttention: share of the sub-blocks of scores that were formed twice */
    apa_unit scores, values, exact;  /* units asked for */
    double kv_heads, q_heads;        /* B·Hkv, B·Hq */
    double Sq, Skv, D, Dv;
    double seconds; /* of products, with reach */
} cost_job;

/* Multiply-accumulates into the table and their time into `seconds`. */
static void add_products(cost_job *job, apa_unit unit, double macs, apa_accumulator sums)
{
    const apa_device_profile *device = job->device;
    const apa_unit by = unit_on(device, unit);
    double rate = device->rate[by];
    if (macs <= 0)
        return;
    if (sums == APA_ACCUMULATOR_F16 && (by == APA_UNIT_F16 || by == APA_UNIT_FP8))
        rate *= device->half_sums;
    if (by != unit)
        job->cost->replaced |= 1u << unit;
    job->cost->macs[by] += macs;
    job->seconds += macs / (rate * device->reach);
}

static bool all_hot(const apa_recipe *r)
{
    return r->force == APA_FORCE_HIGH || (r->force == APA_FORCE_NONE && r->eps < 0);
}

/* Does every tile get a cold score, the hot ones too? Not where the choice is made before. */
static bool scores_hot_tiles(const apa_recipe *r)
{
    return r->verdict != APA_VERDICT_RULE_NONE;
}

/* Products that choose: FP32, against means or bounds of tiles. */
static double select_macs(const cost_job *job)
{
    const apa_recipe *r = job->recipe;
    const double per_tile = job->visible / r->tile * job->D;
    double macs = 0;
    if (r->lambda_bound == APA_LAMBDA_BOUND_JENSEN)
        macs += per_tile; /* every row against every tile's mean key */
    if (r->select == APA_SELECT_BLOCK_MEAN)
        macs += per_tile / r->tile; /* block means against block means */
    if (r->select == APA_SELECT_QUEST)
        macs += 2 * per_tile / r->tile;
    if (r->verdict == APA_VERDICT_RULE_MASS_VALUE)
        macs += job->visible / r->tile * job->Dv; /* distance of the tile's mean value from o */
    if (r->smooth_q == APA_TOGGLE_ON)
        macs += r->q_mean == APA_Q_MEAN_HEAD /* q̄·Kᵀ, one query mean for a head, or for 128 rows */
                    ? job->q_heads * job->Skv * job->D
                    : job->visible / 128 * job->D;
    return macs;
}

static double cold_scored(const cost_job *job)
{
    const double again = job->candidates > job->hot ? job->candidates - job->hot : 0;
    const double once = scores_hot_tiles(job->recipe) ? 1 : 1 - job->hot;
    return job->visible * (once + (job->recipe->second_look == APA_TOGGLE_ON ? again : 0));
}

static void count_attention(cost_job *job)
{
    const apa_recipe *r = job->recipe;
    apa_cost *cost = job->cost;
    const bool cold = !all_hot(r);
    const int32_t terms = r->q_terms > 1 ? r->q_terms : 1;
    const double scored = cold ? cold_scored(job) : 0;
    const double valued = cold ? job->visible * fmax(0, 1 - job->hot - job->skipped) : 0;
    const double exact = job->visible * (cold ? job->hot : 1), again = cold ? job->visible * job->recomputed : 0;
    cost->score_macs = scored * job->D * terms;
    cost->value_macs = valued * job->Dv;
    cost->exact_macs = exact * (job->D + job->Dv) + again * job->D;
    cost->select_macs = cold ? select_macs(job) : 0;
    add_products(job, job->scores, cost->score_macs, r->qk_accum);
    add_products(job, job->values, cost->value_macs, r->pv_accum);
    add_products(job, job->exact, cost->exact_macs, r->exact_accum);
    add_products(job, APA_UNIT_F32, cost->select_macs, APA_ACCUMULATOR_F32);
    const double cold_exponentials = fmax(0, scored - job->visible * job->skipped);
    cost->exponentials = exact + again + (r->p_map == APA_P_MAP_DIRECT ? 0 : cold_exponentials);
    const double finishing = scored / job->device->cold_scores,
                 exponentiating = cost->exponentials / job->device->exponentials;
    job->seconds =
        job->device->overlap ? fmax(job->seconds, exponentiating) : job->seconds + exponentiating + finishing;
}

/* What prep does with one operand: passes over it (0: it is used as it is) and bytes that each value then takes. */
typedef struct prepared {
    int passes;
    double code;
} prepared;

/* coded: quantised; changed: smoothed or rotated; whole: some statistic of the whole head comes first. */
static prepared prepare(bool coded, bool changed, bool whole, apa_unit unit, double in)
{
    if (!coded && !changed)
        return (prepared){0, in};
    return (prepared){whole ? 2 : 1, coded ? code_bytes(unit) : in};
}

/* Every byte once: codes of K and V, the hot tiles' share of the originals, Q and the output. */
static void count_traffic(cost_job *job)
{
    const apa_recipe *r = job->recipe;
    const double in = (double)apa_dtype_bytes(job->problem->q.dtype), queries = job->q_heads * job->Sq,
                 keys = job->kv_heads * job->Skv;
    const double hot = all_hot(r) ? 1 : job->hot;
    job->cost->attention_bytes = queries * (in * job->D + 4 * job->Dv) + hot * keys * in * (job->D + job->Dv);
    if (r->softmax == APA_SOFTMAX_WHOLE)
        job->cost->attention_bytes += hot * job->visible * 4 * 2; /* S and P in 16 bits, written and read */
    if (all_hot(r))
        return;
    const bool head_scale = r->tensor_scale == APA_TENSOR_SCALE_AMAX || r->tensor_scale == APA_TENSOR_SCALE_POW2;
    const bool scores = r->qk_format != APA_QK_FORMAT_EXACT && r->verdict != APA_VERDICT_RULE_LAMP;
    const bool values = r->pv_format != APA_PV_FORMAT_EXACT && r->exact_v != APA_TOGGLE_ON;
    const bool rotated = r->hadamard == APA_TOGGLE_ON, smooth_k = r->smooth_k == APA_TOGGLE_ON,
               smooth_q = r->smooth_q == APA_TOGGLE_ON, smooth_v = r->smooth_v == APA_TOGGLE_ON;
    const prepared q = prepare(scores && r->exact_q != APA_TOGGLE_ON, rotated || smooth_q, false, job->scores, in);
    const prepared k = prepare(scores && r->exact_k != APA_TOGGLE_ON, rotated || smooth_k,
                               smooth_k || (head_scale && job->scores == APA_UNIT_FP4), job->scores, in);
    const prepared v = prepare(values, smooth_v,
                               smooth_v || (head_scale && job->values == APA_UNIT_FP4) ||
                                   r->v_scale_granularity == APA_V_GRANULARITY_CHANNEL,
                               job->values, in);
    job->cost->attention_bytes += keys * (k.code * job->D + v.code * job->Dv);
    job->cost->prep_values = keys * ((k.passes > 0 ? job->D : 0) + (v.passes > 0 ? job->Dv : 0));
    job->cost->prep_bytes = (k.passes > 0 ? keys * job->D * (in * k.passes + k.code) : 0) +
                            (v.passes > 0 ? keys * job->Dv * (in * v.passes + v.code) : 0) +
                            (q.passes > 0 ? queries * job->D * (in + q.code * (r->q_terms > 1 ? r->q_terms : 1)) : 0);
}

/* The exact method: every pair once, FP32 sums. */
static double exact_seconds(const cost_job *job)
{
    const apa_device_profile *device = job->device;
    const double in = (double)apa_dtype_bytes(job->problem->q.dtype);
    const apa_unit unit = unit_on(device, in == 2 ? APA_UNIT_F16 : APA_UNIT_F32);
    const double products = job->visible * (job->D + job->Dv) / (device->rate[unit] * device->reach),
                 exponentials = job->visible / device->exponentials,
                 bytes = job->q_heads * job->Sq * (in * job->D + 4 * job->Dv) +
                         job->kv_heads * job->Skv * in * (job->D + job->Dv);
    const double compute = device->overlap ? fmax(products, exponentials) : products + exponentials;
    return fmax(compute, bytes / device->bytes);
}

static double visible_pairs(const apa_problem *problem)
{
    apa_call call;
    memset(&call, 0, sizeof call);
    call.Sq = problem->q.shape[2];
    call.Skv = problem->k.shape[2];
    call.causal = problem->causal != 0;
    call.q_offset = problem->q_offset == APA_Q_OFFSET_DEFAULT ? call.Skv - call.Sq : problem->q_offset;
    if (problem->causal == APA_CAUSAL_TOP_LEFT)
        call.q_offset = 0;
    call.window_left = problem->window_left;
    call.window_right = problem->window_right;
    double pairs = 0;
    for (int64_t i = 0; i < call.Sq; i++) {
        int64_t first, end;
        apa_call_visible(&call, i, &first, &end);
        pairs += end > first ? (double)(end - first) : 0;
    }
    return pairs * (double)problem->q.shape[0] * (double)problem->q.shape[1];
}

apa_status apa_cost_estimate(apa_context *context, const apa_problem *problem, const apa_statistics *statistics,
                             const apa_device_profile *device, apa_cost *cost)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (problem == NULL || problem->size != sizeof *problem || statistics == NULL ||
        statistics->size != sizeof *statistics || device == NULL || cost == NULL || statistics->recipe.tile < 1)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "problem, statistics, device or cost: not given, expected those of a run");
    if (apa_dtype_bytes(problem->q.dtype) == 0 || !(device->rate[APA_UNIT_F32] > 0) || !(device->reach > 0) ||
        !(device->bytes > 0) || !(device->exponentials > 0) || !(device->cold_scores > 0) || !(device->prep_values > 0))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "device: expected positive rates, and an f32 one");
    memset(cost, 0, sizeof *cost);
    cost->size = sizeof *cost;
    const double visible = statistics->visible > 0 ? (double)statistics->visible : 1;
    cost_job job = {.problem = problem,
                    .recipe = &statistics->recipe,
                    .device = device,
                    .cost = cost,
                    .visible = visible_pairs(problem),
                    .hot = (double)statistics->hot / visible,
                    .skipped = (double)statistics->skipped / visible,
                    .candidates = (double)statistics->candidates / visible,
                    .recomputed = statistics->lamp_sub_blocks > 0
                                      ? (double)statistics->lamp_recomputed / (double)statistics->lamp_sub_blocks
                                      : 0,
                    .scores = score_unit(&statistics->recipe, problem->q.dtype),
                    .values = value_unit(&statistics->recipe, problem->q.dtype),
                    .exact = exact_unit(&statistics->recipe, problem->q.dtype),
                    .kv_heads = (double)problem->k.shape[0] * (double)problem->k.shape[1],
                    .q_heads = (double)problem->q.shape[0] * (double)problem->q.shape[1],
                    .Sq = (double)problem->q.shape[2],
                    .Skv = (double)problem->k.shape[2],
                    .D = (double)problem->q.shape[3],
                    .Dv = (double)problem->v.shape[3],
                    .seconds = 0};
    count_attention(&job);
    count_traffic(&job);
    cost->attention_ms = 1e3 * fmax(job.seconds, cost->attention_bytes / device->bytes);
    cost->prep_ms = 1e3 * fmax(cost->prep_bytes / device->bytes, cost->prep_values / device->prep_values);
    cost->exact_ms = 1e3 * exact_seconds(&job);
    cost->speedup = cost->exact_ms / (cost->prep_ms + cost->attention_ms);
    return APA_STATUS_OK;
}
