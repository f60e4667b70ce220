/* Error by operand: a recipe run again and again on the reference engine, with the operands of its cold tiles quantised
 * one at a time, and all but one.
 *
 * The knobs exact_q, exact_k, exact_p, exact_v leave an operand at the value that would have been quantised; qk_accum
 * and pv_accum f64 leave the sums unrounded. Every run judges its tiles by its own scores, so a few verdicts can differ
 * from the unchanged recipe's: each run reports how many. Runs start from the recipe as resolved by the first one, so
 * that no auto resolves differently. */
#include "apa/eval.h"

#include "core/context_internal.h"
#include "eval/pair.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *apa_operand_name(apa_operand operand)
{
    static const char *const names[APA_OPERAND_COUNT] = {"q", "k", "v", "p", "accumulator"};
    return (unsigned)operand < APA_OPERAND_COUNT ? names[operand] : NULL;
}

#define ALL_OPERANDS ((1u << APA_OPERAND_COUNT) - 1)
#define RUNS (2 + 2 * APA_OPERAND_COUNT)

typedef struct attribution_job {
    apa_context *context;
    apa_problem problem; /* with outputs of our own */
    apa_tensor truth;
    apa_recipe recipe; /* resolved, once the first run is done */
    int64_t pairs, tiles;
    uint8_t *verdicts, *first_verdicts;
    apa_worst_by by;
    int64_t wanted, worst_count;
    apa_pair_error *worst; /* of the unchanged recipe */
    void *memory[3];
    apa_progress progress;
    void *progress_user;
    int done;
} attribution_job;

/* The recipe with only the operands of the mask quantised. Codes straight from scores are what P's rounding is there; a
 * P that is not rounded comes from exponentials. */
static apa_recipe with_operands(const apa_recipe *recipe, unsigned mask)
{
    apa_recipe r = *recipe;
    apa_toggle *const exact[4] = {&r.exact_q, &r.exact_k, &r.exact_v, &r.exact_p}; /* order of apa_operand */
    for (int i = 0; i < 4; i++)
        if (!(mask & 1u << i))
            *exact[i] = APA_TOGGLE_ON;
    if (!(mask & 1u << APA_OPERAND_P))
        r.p_map = APA_P_MAP_EXP;
    if (!(mask & 1u << APA_OPERAND_ACCUMULATOR))
        r.qk_accum = r.pv_accum = APA_ACCUMULATOR_F64;
    return r;
}

/* Does leaving this operand alone differ from the recipe? Not where it is exact already, or nothing can be cold. */
static bool is_quantised(const apa_recipe *recipe, apa_operand operand)
{
    if (recipe->force == APA_FORCE_HIGH || (recipe->force == APA_FORCE_NONE && recipe->eps < 0))
        return false;
    const bool qk = recipe->qk_format != APA_QK_FORMAT_EXACT, pv = recipe->pv_format != APA_PV_FORMAT_EXACT;
    switch (operand) {
    case APA_OPERAND_Q:
        return qk && recipe->exact_q != APA_TOGGLE_ON;
    case APA_OPERAND_K:
        return qk && recipe->exact_k != APA_TOGGLE_ON;
    case APA_OPERAND_V:
        return pv && recipe->exact_v != APA_TOGGLE_ON;
    case APA_OPERAND_P:
        return pv && recipe->exact_p != APA_TOGGLE_ON;
    case APA_OPERAND_ACCUMULATOR:
        return recipe->qk_accum != APA_ACCUMULATOR_F64 || recipe->pv_accum != APA_ACCUMULATOR_F64;
    case APA_OPERAND_COUNT:
        break;
    }
    return false;
}

/* Worst pairs of the unchanged recipe, in this run: as one vector, mean and minimum of the cosine. */
static apa_status measure_worst(attribution_job *job, apa_attribution_run *run)
{
    const int64_t Dv = job->problem.v.shape[3], *shape = job->problem.out.shape;
    double *rows = apa_aligned_allocate(2, (size_t)Dv * sizeof *rows), yy = 0, dd = 0, cos = 0, min = INFINITY;
    if (rows == NULL)
        return apa_fail(job->context, APA_STATUS_OUT_OF_MEMORY, "no memory for two rows");
    bool fault = false;
    for (int64_t i = 0; i < job->worst_count; i++) {
        const apa_pair_error *w = &job->worst[i];
        const int64_t pair = (w->batch * shape[1] + w->head) * shape[2] + w->row;
        apa_eval_load_row(&job->problem.out, pair, rows);
        apa_eval_load_row(&job->truth, pair, rows + Dv);
        const apa_eval_pair p = apa_eval_compare(rows, rows + Dv, Dv);
        fault = fault || p.fault;
        yy += p.yy / p.scale / p.scale;
        dd += p.dd / p.scale / p.scale;
        cos += p.cos;
        min = fmin(min, p.cos);
    }
    apa_aligned_free(rows);
    run->worst_rel_l2 = job->worst_count == 0 ? NAN : fault ? INFINITY : dd == 0 ? 0 : sqrt(dd) / sqrt(yy);
    run->worst_mean_cos = job->worst_count > 0 ? cos / (double)job->worst_count : NAN;
    run->worst_min_cos = job->worst_count > 0 ? min : NAN;
    return APA_STATUS_OK;
}

static double verdicts_changed(const attribution_job *job)
{
    int64_t visible = 0, changed = 0;
    for (int64_t i = 0; i < job->pairs * job->tiles; i++) {
        visible += job->first_verdicts[i] != APA_VERDICT_INVISIBLE;
        changed += (job->first_verdicts[i] == APA_VERDICT_HOT) != (job->verdicts[i] == APA_VERDICT_HOT);
    }
    return visible > 0 ? (double)changed / (double)visible : 0;
}

static void tell(const attribution_job *job)
{
    if (job->progress != NULL)
        job->progress(job->progress_user, "operands", (double)job->done / RUNS);
}

/* One run on the reference engine; statistics.recipe is what ran. A refused recipe is no error but a run that is not.
 */
static apa_status run_once(attribution_job *job, const apa_recipe *recipe, apa_attribution_run *run, bool first,
                           apa_statistics *statistics)
{
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "reference";
    options.verdicts = first ? job->first_verdicts : job->verdicts;
    apa_statistics_init(statistics);
    tell(job);
    apa_status status = apa_recipe_check(recipe, run->refusal, sizeof run->refusal);
    if (status == APA_STATUS_OK)
        status = apa_attention(job->context, &job->problem, recipe, &options, statistics);
    if (status == APA_STATUS_INVALID_ARGUMENT || status == APA_STATUS_UNSUPPORTED) {
        if (first)
            return status;
        if (run->refusal[0] == '\0')
            snprintf(run->refusal, sizeof run->refusal, "%s", apa_context_message(job->context));
        return APA_STATUS_OK;
    }
    job->done++;
    run->ran = status == APA_STATUS_OK;
    return status;
}

static apa_status measure(attribution_job *job, apa_attribution_run *run, const apa_statistics *statistics)
{
    apa_error error;
    apa_status status = apa_error_measure(job->context, &job->problem.out, NULL, &job->truth, NULL, &error);
    if (status == APA_STATUS_OK)
        status = measure_worst(job, run);
    if (status != APA_STATUS_OK)
        return status;
    run->rel_l2 = error.rel_l2;
    run->mean_cos = error.mean_cos;
    run->min_cos = error.min_cos;
    run->hot_share = statistics->hot_share;
    run->verdicts_changed = verdicts_changed(job);
    return APA_STATUS_OK;
}

static apa_status run_with(attribution_job *job, unsigned mask, apa_attribution_run *run)
{
    apa_statistics statistics;
    const apa_recipe recipe = with_operands(&job->recipe, mask);
    apa_status status = run_once(job, &recipe, run, false, &statistics);
    return status == APA_STATUS_OK && run->ran ? measure(job, run, &statistics) : status;
}

/* The recipe as it is: settles the autos, the verdicts to compare with, and the worst pairs. */
static apa_status run_unchanged(attribution_job *job, const apa_recipe *recipe, apa_attribution *result)
{
    apa_statistics statistics;
    apa_status status = run_once(job, recipe, &result->all, true, &statistics);
    if (status != APA_STATUS_OK)
        return status;
    memcpy(job->verdicts, job->first_verdicts, (size_t)(job->pairs * job->tiles));
    job->recipe = result->recipe = statistics.recipe;
    if (job->wanted > 0)
        status = apa_worst_pairs(job->context, &job->problem.out, &job->truth, job->by, job->wanted, job->worst,
                                 &job->worst_count);
    result->worst = job->worst_count;
    return status == APA_STATUS_OK ? measure(job, &result->all, &statistics) : status;
}

static apa_status run_all(attribution_job *job, const apa_recipe *recipe, apa_attribution *result)
{
    apa_status status = run_unchanged(job, recipe, result);
    unsigned quantised = 0;
    for (int i = 0; i < APA_OPERAND_COUNT; i++)
        quantised |= is_quantised(&job->recipe, (apa_operand)i) ? 1u << i : 0;
    if (status == APA_STATUS_OK && quantised != 0)
        status = run_with(job, 0, &result->none);
    else
        result->none = result->all;
    for (int i = 0; i < APA_OPERAND_COUNT && status == APA_STATUS_OK; i++) {
        if (!(quantised & 1u << i)) {
            result->only[i] = result->none;
            result->all_but[i] = result->all;
            result->only[i].ran = result->all_but[i].ran = 0;
            snprintf(result->only[i].refusal, sizeof result->only[i].refusal, "not quantised by this recipe");
            snprintf(result->all_but[i].refusal, sizeof result->all_but[i].refusal, "not quantised by this recipe");
            continue;
        }
        status = run_with(job, 1u << i, &result->only[i]);
        if (status == APA_STATUS_OK)
            status = run_with(job, ALL_OPERANDS & ~(1u << i), &result->all_but[i]);
    }
    if (job->progress != NULL)
        job->progress(job->progress_user, "operands", 1);
    return status;
}

/* Output, verdict maps, list of worst pairs; and the truth where the caller has none. */
static apa_status make_memory(attribution_job *job, const apa_recipe *recipe)
{
    const int64_t *q = job->problem.q.shape, Dv = job->problem.v.shape[3];
    apa_attention_options options;
    apa_plan plan;
    apa_plan_init(&plan);
    apa_attention_options_init(&options);
    options.engine = "reference";
    job->problem.out = apa_tensor_hnd(NULL, APA_DTYPE_F64, q[0], q[1], q[2], Dv);
    memset(&job->problem.lse, 0, sizeof job->problem.lse);
    apa_status status = apa_attention_plan(job->context, &job->problem, recipe, &options, &plan);
    if (status != APA_STATUS_OK)
        return status;
    int64_t map;
    const int32_t tile = plan.recipe.tile;
    job->tiles = job->problem.k.shape[2] / tile + (job->problem.k.shape[2] % tile != 0);
    if (!apa_eval_pair_count(&job->problem.q, &job->pairs) || __builtin_mul_overflow(job->pairs, job->tiles, &map))
        return apa_fail(job->context, APA_STATUS_INVALID_ARGUMENT, "q: shape overflows");
    job->wanted = job->wanted < job->pairs ? job->wanted : job->pairs;
    job->memory[0] = apa_aligned_allocate((size_t)job->pairs, (size_t)Dv * sizeof(double));
    job->memory[1] = apa_aligned_allocate((size_t)map, 2);
    job->memory[2] = apa_aligned_allocate((size_t)job->wanted, sizeof *job->worst);
    if (job->memory[0] == NULL || job->memory[1] == NULL || job->memory[2] == NULL)
        return apa_fail(job->context, APA_STATUS_OUT_OF_MEMORY, "no memory for outputs and verdicts");
    job->problem.out.data = job->memory[0];
    job->first_verdicts = job->memory[1];
    job->verdicts = job->first_verdicts + map;
    job->worst = job->memory[2];
    return APA_STATUS_OK;
}

static apa_status attribute(attribution_job *job, const apa_recipe *recipe, const apa_tensor *truth,
                            apa_attribution *result)
{
    apa_status status = make_memory(job, recipe);
    if (status != APA_STATUS_OK)
        return status;
    if (truth != NULL && truth->dtype != APA_DTYPE_NONE) {
        job->truth = *truth;
        status = apa_eval_check_outputs(job->context, &job->problem.out, truth);
        return status == APA_STATUS_OK ? run_all(job, recipe, result) : status;
    }
    job->truth = job->problem.out;
    job->truth.data = apa_aligned_allocate((size_t)job->pairs, (size_t)job->problem.v.shape[3] * sizeof(double));
    if (job->truth.data == NULL)
        return apa_fail(job->context, APA_STATUS_OUT_OF_MEMORY, "no memory for the truth");
    status = apa_truth_compute(job->context, &job->problem, &job->truth, NULL, job->progress, job->progress_user);
    if (status == APA_STATUS_OK)
        status = run_all(job, recipe, result);
    apa_aligned_free(job->truth.data);
    return status;
}

apa_status apa_attribute(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                         const apa_tensor *truth, apa_worst_by by, int64_t worst, apa_progress progress,
                         void *progress_user, apa_attribution *attribution)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (problem == NULL || problem->size != sizeof *problem || recipe == NULL || attribution == NULL || worst < 0 ||
        (by != APA_WORST_BY_COS && by != APA_WORST_BY_REL))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "problem, recipe, by, worst or attribution: not given or out of range");
    attribution_job job;
    memset(&job, 0, sizeof job);
    memset(attribution, 0, sizeof *attribution);
    attribution->size = sizeof *attribution;
    job.context = context;
    job.problem = *problem;
    job.by = by;
    job.wanted = worst;
    job.progress = progress;
    job.progress_user = progress_user;
    apa_status status = attribute(&job, recipe, truth, attribution);
    for (size_t i = 0; i < sizeof job.memory / sizeof job.memory[0]; i++)
        apa_aligned_free(job.memory[i]);
    return status;
}
