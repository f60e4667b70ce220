/* Q of the cold tiles: scales that several queries share, the mean that smooth_q takes off, and the codes of a row.
 *
 * Blocks and warps of queries are 128 and 32 positions of one query head, counted from position 0.
 *
 * smooth_q: q̄ = the mean over a block's queries without a non-finite element, in order in double, rounded once to FP32.
 * q_mean head: over all queries of the head; the blocks' sums in double are added in order, then divided and rounded.
 * x = q - q̄ in FP32, then the Hadamard rotation, of q̄ too. amax of a query = the largest |x| among those that share
 * its scale. The walk does the same arithmetic again for its rows. What q̄ took off comes back as ΔS = q̄·k in FP32
 * (cold.c). */
#include "reference/internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define NVFP4_RANGE 2688.0F
#define Q_BLOCK APA_REFERENCE_Q_BLOCK

int64_t apa_reference_q_blocks(const apa_call *call)
{
    return (call->Sq + Q_BLOCK - 1) / Q_BLOCK;
}

typedef struct query_job {
    const apa_call *call;
    apa_reference_head *head;
} query_job;

static bool rotates(const apa_call *call)
{
    return call->recipe.hadamard == APA_TOGGLE_ON;
}

/* q - q̄, rotated; false when it is not finite. mean NULL = none. */
static bool smoothed(const apa_call *call, const apa_reference_head *head, int64_t hq, int64_t position,
                     const float *mean, float *x)
{
    bool finite = apa_reference_load_f32(apa_reference_query(call, head->b, hq, position), call->q.dtype, call->D, x);
    for (int64_t d = 0; d < call->D && mean != NULL; ++d)
        x[d] -= mean[d];
    if (rotates(call))
        apa_reference_hadamard(x, call->D);
    for (int64_t d = 0; d < call->D; ++d)
        finite = finite && isfinite(x[d]);
    return finite;
}

/* ---- means ---- */

/* The sum of queries first … end-1 that are finite; how many these are. */
static int64_t block_sum(const query_job *job, int64_t hq, int64_t first, int64_t end, double *sum)
{
    const apa_call *call = job->call;
    float x[APA_REFERENCE_DIM_MAX];
    int64_t n = 0;
    memset(sum, 0, sizeof(double) * (size_t)call->D);
    for (int64_t i = first; i < end; ++i) {
        if (!apa_reference_load_f32(apa_reference_query(call, job->head->b, hq, i), call->q.dtype, call->D, x))
            continue;
        for (int64_t d = 0; d < call->D; ++d)
            sum[d] += (double)x[d];
        ++n;
    }
    return n;
}

static void mean_of(const double *sum, int64_t n, int64_t D, float *mean)
{
    for (int64_t d = 0; d < D; ++d)
        mean[d] = n == 0 ? 0.0F : (float)(sum[d] / (double)n);
}

/* The mean of block number `index` among those of all heads, or its sum where the mean is to be the head's. */
static void mean_task(void *argument, size_t index)
{
    const query_job *job = argument;
    const apa_call *call = job->call;
    apa_reference_head *head = job->head;
    const int64_t blocks = apa_reference_q_blocks(call), n = (int64_t)index, first = n % blocks * Q_BLOCK;
    const int64_t hq = head->h * call->G + n / blocks, end = first + Q_BLOCK < call->Sq ? first + Q_BLOCK : call->Sq;
    double sum[APA_REFERENCE_DIM_MAX];
    if (head->q_sum != NULL)
        head->q_count[n] = block_sum(job, hq, first, end, head->q_sum + n * call->D);
    else
        mean_of(sum, block_sum(job, hq, first, end, sum), call->D, head->q_mean + n * call->D);
}

/* All blocks of query head g get the head's mean; its blocks' sums are added in order. */
static void head_mean(const apa_call *call, apa_reference_head *head, int64_t g)
{
    const int64_t blocks = apa_reference_q_blocks(call), D = call->D;
    double *total = head->q_sum + g * blocks * D;
    int64_t queries = head->q_count[g * blocks];
    for (int64_t n = 1; n < blocks; ++n) {
        queries += head->q_count[g * blocks + n];
        for (int64_t d = 0; d < D; ++d)
            total[d] += total[n * D + d];
    }
    for (int64_t n = 0; n < blocks; ++n)
        mean_of(total, queries, D, head->q_mean + (g * blocks + n) * D);
}

/* ---- scales ---- */

/* Queries with the same number within a block share a scale. */
static int64_t scale_number(apa_qk_granularity granularity, int64_t i)
{
    if (granularity == APA_QK_GRANULARITY_BLOCK)
        return i / Q_BLOCK;
    const int64_t warp = i / APA_REFERENCE_Q_WARP;
    return granularity == APA_QK_GRANULARITY_WARP ? warp : warp * 8 + i % 8;
}

static void scale_task(void *argument, size_t index)
{
    const query_job *job = argument;
    const apa_call *call = job->call;
    const apa_recipe *recipe = &call->recipe;
    const int64_t blocks = apa_reference_q_blocks(call), g = (int64_t)index / blocks, n = (int64_t)index % blocks;
    const int64_t hq = job->head->h * call->G + g, first = n * Q_BLOCK;
    const int64_t end = first + Q_BLOCK < call->Sq ? first + Q_BLOCK : call->Sq;
    const float *mean = job->head->q_mean != NULL ? job->head->q_mean + (int64_t)index * call->D : NULL;
    float own[Q_BLOCK] = {0}, x[APA_REFERENCE_DIM_MAX];
    for (int64_t i = first; i < end; ++i)
        if (smoothed(call, job->head, hq, i, mean, x))
            own[i - first] = apa_reference_amax(x, call->D, 1);
    for (int64_t i = first; i < end; ++i) {
        float amax = 0;
        for (int64_t other = first; other < end; ++other)
            if (scale_number(recipe->qk_scale_granularity, other) == scale_number(recipe->qk_scale_granularity, i))
                amax = own[other - first] > amax ? own[other - first] : amax;
        job->head->q_amax[g * call->Sq + i] = amax;
    }
}

void apa_reference_prep_queries(apa_context *context, const apa_call *call, apa_reference_head *head)
{
    query_job job = {call, head};
    const size_t blocks = (size_t)(call->G * apa_reference_q_blocks(call));
    if (head->q_mean != NULL)
        apa_context_parallel(context, mean_task, &job, blocks);
    for (int64_t g = 0; g < call->G && head->q_sum != NULL; ++g)
        head_mean(call, head, g);
    if (head->q_amax != NULL)
        apa_context_parallel(context, scale_task, &job, blocks);
}

/* ---- codes of a row ---- */

/* x becomes units; their scale. The NVFP4 row scale is the first term's for both. */
static double quantise_term(const apa_recipe *recipe, float *x, int64_t D, float amax, float row_scale)
{
    if (recipe->exact_q == APA_TOGGLE_ON)
        return 1;
    switch (recipe->qk_format) {
    case APA_QK_FORMAT_INT8:
        return apa_reference_int8_units(x, D, 1, amax);
    case APA_QK_FORMAT_E4M3:
        return apa_reference_e4m3_units(x, D, 1, amax, 448.0F, recipe->pow2_scales == APA_TOGGLE_ON);
    case APA_QK_FORMAT_NVFP4:
        apa_reference_nvfp4_units(x, D, 1, row_scale, recipe->scale_search == APA_TOGGLE_ON);
        return (double)row_scale;
    case APA_QK_FORMAT_MXFP4:
        apa_reference_mx_units(x, D, 1, APA_FORMAT_E2M1, recipe->mx_rounding == APA_MX_ROUNDING_UP);
        return 1;
    default:
        return 1;
    }
}

static double norm_of(const float *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; ++i)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

void apa_reference_quantise_q(apa_reference_block *block, int64_t r)
{
    const apa_call *call = block->call;
    const apa_recipe *recipe = &call->recipe;
    const apa_reference_head *head = block->head;
    const int64_t D = call->D;
    apa_reference_row *row = &block->row[r];
    const int64_t g = row->hq - head->h * call->G;
    const float *mean = head->q_mean;
    float rest[APA_REFERENCE_DIM_MAX], x[APA_REFERENCE_DIM_MAX];
    row->finite = smoothed(call, head, row->hq, row->position, NULL, rest);
    for (int64_t d = 0; d < D; ++d)
        block->q_prepared[r * D + d] = (double)rest[d];
    row->q_norm = norm_of(rest, D);
    row->q_scale[0] = row->q_scale[1] = row->q_error = 0;
    if (mean != NULL) {
        mean += (g * apa_reference_q_blocks(call) + row->position / Q_BLOCK) * D;
        row->finite = smoothed(call, head, row->hq, row->position, mean, rest) && row->finite;
    }
    if (!row->finite)
        return; /* the group is hot throughout */
    const float own = apa_reference_amax(rest, D, 1);
    float row_scale = own / NVFP4_RANGE < FLT_MIN ? FLT_MIN : own / NVFP4_RANGE;
    if (recipe->tensor_scale == APA_TENSOR_SCALE_NONE)
        row_scale = 1;
    for (int term = 0; term < recipe->q_terms; ++term) {
        double *units = block->q_units[term] + r * D;
        const float amax =
            head->q_amax != NULL ? head->q_amax[g * call->Sq + row->position] : apa_reference_amax(rest, D, 1);
        memcpy(x, rest, sizeof(float) * (size_t)D);
        row->q_scale[term] = quantise_term(recipe, x, D, amax, row_scale);
        for (int64_t d = 0; d < D; ++d) {
            units[d] = (double)x[d];
            rest[d] = (float)((double)rest[d] - row->q_scale[term] * units[d]);
        }
    }
    row->q_error = norm_of(rest, D);
    if (mean == NULL)
        return;
    memcpy(x, mean, sizeof(float) * (size_t)D);
    if (rotates(call))
        apa_reference_hadamard(x, D);
    for (int64_t d = 0; d < D; ++d)
        block->q_mean[r * D + d] = (double)x[d];
}
