/* Prep of one KV head: statistics in a fixed order, then quantised tiles. Three passes, each a parallel loop over
 * tiles.
 *
 * 1. Means. k̄ per channel: the keys of a tile are summed in order in double, a key with a non-finite element left out
 *    entirely; the tiles' sums are added in tile order, divided by the number of keys summed, rounded once to FP32; 0
 * when no key is finite. v̄ likewise. With smooth_k_stride n, k̄ is over tiles 0, n, 2n, … alone. Inputs count as their
 * FP32 value (f64 is rounded once). Keys are those in use, whatever rows see of them.
 * 2. Prepared values in FP32: k - k̄ with one rounding, then the Hadamard rotation; v - v̄. Their maxima (NVFP4). A key
 * or value row that is not finite then forces its tile hot and stands as zeros.
 * 3. Codes (quantise.c). INT8 and E4M3: K with the scale that qk_scale_granularity says, V that of v_scale_granularity.
 * NVFP4: blocks of 16 along D for K and along keys for V (the last block may be short), in units of the head's tensor
 * scale: 4·amax/2688 rounded up to a power of two (with the exact maximum a block's amax/6 is at most 112 then, so
 * UE4M3, 448, cannot overflow), amax/2688, or 1. MX: blocks of 32. An exact operand stays as prepared. */
#include "reference/internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define NVFP4_RANGE 2688.0 /* 6·448, the largest E2M1 times the largest UE4M3 */
#define NVFP4_HEADROOM 4.0 /* APA's: its maximum is from a sample */

typedef struct prep_job {
    const apa_call *call;
    apa_reference_head *head;
    float k_scale, v_scale; /* NVFP4: of the head */
} prep_job;

static bool shared_q_scale(const apa_recipe *recipe)
{
    return recipe->qk_scale_granularity >= APA_QK_GRANULARITY_THREAD &&
           recipe->qk_scale_granularity <= APA_QK_GRANULARITY_BLOCK;
}

/* Are the prepared keys needed beside their codes? */
static bool keeps_keys(const apa_recipe *recipe)
{
    return recipe->smooth_q == APA_TOGGLE_ON || recipe->verdict == APA_VERDICT_RULE_MASS_VALUE;
}

void apa_reference_head_layout(apa_reference_arena *arena, const apa_call *call, apa_reference_head *head)
{
    const int64_t tiles = apa_call_tiles(call), D = call->D, Dv = call->Dv, T = APA_REFERENCE_TILE;
    head->k_mean = apa_reference_take(arena, 1, D, sizeof(float));
    head->v_mean = apa_reference_take(arena, 1, Dv, sizeof(float));
    head->k_sum = apa_reference_take(arena, tiles, D, sizeof(double));
    head->v_sum = apa_reference_take(arena, tiles, Dv, sizeof(double));
    head->k_count = apa_reference_take(arena, tiles, 1, sizeof(int64_t));
    head->v_count = apa_reference_take(arena, tiles, 1, sizeof(int64_t));
    if (apa_reference_all_hot(&call->recipe))
        return;
    head->k_units = apa_reference_take(arena, tiles, D * T, sizeof(float));
    head->v_units = apa_reference_take(arena, tiles, Dv * T, sizeof(float));
    head->k_scale = apa_reference_take(arena, tiles, T, sizeof(double));
    head->v_scale = apa_reference_take(arena, tiles, Dv, sizeof(double));
    head->k_amax = apa_reference_take(arena, tiles, 1, sizeof(float));
    head->v_amax = apa_reference_take(arena, tiles, 1, sizeof(float));
    head->forced = apa_reference_take(arena, tiles, 1, sizeof(uint8_t));
    const apa_recipe *recipe = &call->recipe;
    if (keeps_keys(recipe))
        head->k_exact = apa_reference_take(arena, tiles, D * T, sizeof(float));
    if (recipe->smooth_q == APA_TOGGLE_ON) {
        const int64_t blocks = call->G * apa_reference_q_blocks(call);
        head->q_mean = apa_reference_take(arena, blocks, D, sizeof(float));
        if (recipe->q_mean == APA_Q_MEAN_HEAD) {
            head->q_sum = apa_reference_take(arena, blocks, D, sizeof(double));
            head->q_count = apa_reference_take(arena, blocks, 1, sizeof(int64_t));
        }
    }
    if (shared_q_scale(recipe))
        head->q_amax = apa_reference_take(arena, call->G, call->Sq, sizeof(float));
    if (recipe->v_scale_granularity == APA_V_GRANULARITY_CHANNEL)
        head->v_channel = apa_reference_take(arena, 1, Dv, sizeof(float));
    if (recipe->select > APA_SELECT_NONE) {
        head->k_middle = apa_reference_take(arena, tiles, D, sizeof(double));
        head->k_least = apa_reference_take(arena, tiles, D, sizeof(double));
        head->k_most = apa_reference_take(arena, tiles, D, sizeof(double));
    }
    if (recipe->verdict == APA_VERDICT_RULE_MASS_VALUE) {
        head->k_norm = apa_reference_take(arena, tiles, 1, sizeof(double));
        head->k_error = apa_reference_take(arena, tiles, 1, sizeof(double));
    }
}

static int64_t keys_of(const apa_call *call, int64_t t)
{
    const int64_t left = call->Skv - t * APA_REFERENCE_TILE;
    return left < APA_REFERENCE_TILE ? left : APA_REFERENCE_TILE;
}

/* ---- 1. means ---- */

static void sum_tile(const prep_job *job, const apa_tensor *x, int64_t t, int64_t n, double *sum, int64_t *count)
{
    const int64_t dim = x->shape[3];
    float row[APA_REFERENCE_DIM_MAX];
    memset(sum, 0, sizeof(double) * (size_t)dim);
    *count = 0;
    for (int64_t j = 0; j < n; ++j) {
        const void *key = apa_call_key(job->call, x, job->head->b, job->head->h, t * APA_REFERENCE_TILE + j);
        if (!apa_reference_load_f32(key, x->dtype, dim, row))
            continue;
        *count += 1;
        for (int64_t d = 0; d < dim; ++d)
            sum[d] += (double)row[d];
    }
}

static void sum_task(void *argument, size_t index)
{
    const prep_job *job = argument;
    const apa_call *call = job->call;
    const int64_t t = (int64_t)index, n = keys_of(call, t);
    if (call->recipe.smooth_k == APA_TOGGLE_ON && t % call->recipe.smooth_k_stride == 0)
        sum_tile(job, &call->k, t, n, job->head->k_sum + t * call->D, job->head->k_count + t);
    if (call->recipe.smooth_v == APA_TOGGLE_ON)
        sum_tile(job, &call->v, t, n, job->head->v_sum + t * call->Dv, job->head->v_count + t);
}

/* Over tiles 0, stride, 2·stride, … */
static void mean_of(const double *sum, const int64_t *count, int64_t tiles, int64_t stride, int64_t dim, float *mean)
{
    int64_t keys = 0;
    for (int64_t t = 0; t < tiles; t += stride)
        keys += count[t];
    for (int64_t d = 0; d < dim; ++d) {
        double total = 0;
        for (int64_t t = 0; t < tiles; t += stride)
            total += sum[t * dim + d];
        mean[d] = keys == 0 ? 0.0F : (float)(total / (double)keys);
    }
}

/* ---- 2. prepared values ---- */

/* Orthonormal Walsh-Hadamard transform in FP32: butterflies (a, b) → (a+b, a-b) at distances 1, 2, 4, …, then one
 * product with float(1/√n). n is a power of two. */
static void transform(float *x, int64_t n)
{
    for (int64_t h = 1; h < n; h *= 2)
        for (int64_t i = 0; i < n; i += 2 * h)
            for (int64_t j = i; j < i + h; ++j) {
                const float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
    const float norm = (float)(1.0 / sqrt((double)n));
    for (int64_t i = 0; i < n; ++i)
        x[i] *= norm;
}

/* Block diagonal, with the largest power of two that divides n as the block: any head dim can be rotated. */
void apa_reference_hadamard(float *x, int64_t n)
{
    const int64_t block = n & -n;
    for (int64_t i = 0; i < n; i += block)
        transform(x + i, block);
}

static bool prepared_row(const prep_job *job, const apa_tensor *x, int64_t s, const float *mean, bool rotate,
                         float *row)
{
    const int64_t dim = x->shape[3];
    bool finite = apa_reference_load_f32(apa_call_key(job->call, x, job->head->b, job->head->h, s), x->dtype, dim, row);
    for (int64_t d = 0; d < dim; ++d)
        row[d] -= mean[d];
    if (rotate)
        apa_reference_hadamard(row, dim);
    for (int64_t d = 0; d < dim; ++d)
        finite = finite && isfinite(row[d]);
    if (!finite)
        memset(row, 0, sizeof(float) * (size_t)dim);
    return finite;
}

/* Jensen needs the tile's mean key: in double over the prepared keys in order. */
static void mean_key(const prep_job *job, int64_t t, int64_t n)
{
    const int64_t D = job->call->D;
    const float *kt = job->head->k_units + t * D * APA_REFERENCE_TILE;
    for (int64_t d = 0; d < D; ++d) {
        double sum = 0;
        for (int64_t j = 0; j < n; ++j)
            sum += (double)kt[d * APA_REFERENCE_TILE + j];
        job->head->k_sum[t * D + d] = sum / (double)n;
    }
}

/* Means and extremes of the prepared keys, for selection. */
static void key_extremes(const prep_job *job, int64_t t, int64_t n)
{
    const int64_t D = job->call->D;
    const float *kt = job->head->k_units + t * D * APA_REFERENCE_TILE;
    for (int64_t d = 0; d < D; ++d) {
        const float *key = kt + d * APA_REFERENCE_TILE;
        double sum = 0, least = (double)key[0], most = (double)key[0];
        for (int64_t j = 0; j < n; ++j) {
            sum += (double)key[j];
            least = (double)key[j] < least ? (double)key[j] : least;
            most = (double)key[j] > most ? (double)key[j] : most;
        }
        job->head->k_middle[t * D + d] = sum / (double)n;
        job->head->k_least[t * D + d] = least;
        job->head->k_most[t * D + d] = most;
    }
}

static void fill_task(void *argument, size_t index)
{
    const prep_job *job = argument;
    const apa_call *call = job->call;
    apa_reference_head *head = job->head;
    const int64_t t = (int64_t)index, n = keys_of(call, t), D = call->D, Dv = call->Dv, T = APA_REFERENCE_TILE;
    float *kt = head->k_units + t * D * T, *v = head->v_units + t * T * Dv;
    float key[APA_REFERENCE_DIM_MAX];
    bool finite = true;
    memset(kt, 0, sizeof(float) * (size_t)(D * T));
    memset(v, 0, sizeof(float) * (size_t)(T * Dv));
    head->k_amax[t] = head->v_amax[t] = 0;
    for (int64_t j = 0; j < n; ++j) {
        const bool rotate = call->recipe.hadamard == APA_TOGGLE_ON;
        finite &= prepared_row(job, &call->k, t * T + j, head->k_mean, rotate, key);
        for (int64_t d = 0; d < D; ++d)
            kt[d * T + j] = key[d];
        finite &= prepared_row(job, &call->v, t * T + j, head->v_mean, false, v + j * Dv);
    }
    head->k_amax[t] = apa_reference_amax(kt, D * T, 1);
    head->v_amax[t] = apa_reference_amax(v, T * Dv, 1);
    head->forced[t] = !finite;
    if (call->recipe.lambda_bound == APA_LAMBDA_BOUND_JENSEN)
        mean_key(job, t, n);
    if (call->recipe.select > APA_SELECT_NONE)
        key_extremes(job, t, n);
    if (keeps_keys(&call->recipe))
        memcpy(head->k_exact + t * D * T, kt, sizeof(float) * (size_t)(D * T));
}

/* ---- 3. codes ---- */

/* Largest value among the keys of a tile that share key j's scale. */
static float key_amax(const apa_call *call, const float *kt, int64_t j, int64_t n, float tile_amax)
{
    float amax = 0;
    switch (call->recipe.qk_scale_granularity) {
    case APA_QK_GRANULARITY_WARP:
    case APA_QK_GRANULARITY_BLOCK:
        return tile_amax;
    case APA_QK_GRANULARITY_THREAD: /* columns 2i and 2i+1 of each 8 belong to thread i of a quad */
        for (int64_t i = 0; i < n; ++i)
            if (i % 8 / 2 == j % 8 / 2) {
                const float own = apa_reference_amax(kt + i, call->D, APA_REFERENCE_TILE);
                amax = own > amax ? own : amax;
            }
        return amax;
    default:
        return apa_reference_amax(kt + j, call->D, APA_REFERENCE_TILE);
    }
}

static void quantise_keys(const prep_job *job, int64_t t, int64_t n)
{
    const apa_call *call = job->call;
    const apa_recipe *recipe = &call->recipe;
    const int64_t D = call->D, T = APA_REFERENCE_TILE;
    float *kt = job->head->k_units + t * D * T, amax[APA_REFERENCE_TILE];
    double *scale = job->head->k_scale + t * T;
    for (int64_t j = 0; j < n; ++j)
        amax[j] = key_amax(call, kt, j, n, job->head->k_amax[t]);
    for (int64_t j = 0; j < T; ++j)
        scale[j] = 1;
    for (int64_t j = 0; j < n && recipe->exact_k != APA_TOGGLE_ON; ++j)
        switch (recipe->qk_format) {
        case APA_QK_FORMAT_INT8:
            scale[j] = apa_reference_int8_units(kt + j, D, T, amax[j]);
            break;
        case APA_QK_FORMAT_E4M3:
            scale[j] = apa_reference_e4m3_units(kt + j, D, T, amax[j], 448.0F, recipe->pow2_scales == APA_TOGGLE_ON);
            break;
        case APA_QK_FORMAT_NVFP4:
            scale[j] = (double)job->k_scale;
            apa_reference_nvfp4_units(kt + j, D, T, job->k_scale, recipe->scale_search == APA_TOGGLE_ON);
            break;
        case APA_QK_FORMAT_MXFP4:
            apa_reference_mx_units(kt + j, D, T, APA_FORMAT_E2M1, recipe->mx_rounding == APA_MX_ROUNDING_UP);
            break;
        default:
            break;
        }
}

/* The scale of channel c of the tile; v[0], v[Dv], … its n values, which become units. */
static double quantise_channel(const prep_job *job, int64_t t, int64_t c, float *v, int64_t n)
{
    const apa_call *call = job->call;
    const apa_recipe *recipe = &call->recipe;
    const bool up = recipe->mx_rounding == APA_MX_ROUNDING_UP;
    const int64_t Dv = call->Dv;
    const float amax = recipe->v_scale_granularity == APA_V_GRANULARITY_CHANNEL ? job->head->v_channel[c]
                       : recipe->v_scale_granularity == APA_V_GRANULARITY_BLOCK ? job->head->v_amax[t]
                                                                                : apa_reference_amax(v, n, Dv);
    if (recipe->exact_v == APA_TOGGLE_ON)
        return 1;
    switch (recipe->pv_format) {
    case APA_PV_FORMAT_INT8:
        return apa_reference_int8_units(v, n, Dv, amax);
    case APA_PV_FORMAT_E4M3:
        return apa_reference_e4m3_units(v, n, Dv, amax, (float)recipe->v_range, recipe->pow2_scales == APA_TOGGLE_ON);
    case APA_PV_FORMAT_NVFP4:
        apa_reference_nvfp4_units(v, n, Dv, job->v_scale, recipe->scale_search == APA_TOGGLE_ON);
        return (double)job->v_scale;
    case APA_PV_FORMAT_MXFP4:
        apa_reference_mx_units(v, n, Dv, APA_FORMAT_E2M1, up);
        return 1;
    case APA_PV_FORMAT_MXFP8:
        apa_reference_mx_units(v, n, Dv, APA_FORMAT_E4M3, up);
        return 1;
    case APA_PV_FORMAT_F16:
        for (int64_t j = 0; j < n; ++j)
            v[j * Dv] = (float)apa_reference_round(&apa_reference_f16, (double)v[j * Dv]);
        return 1;
    default:
        return 1;
    }
}

/* Largest norm of a key of the tile, and of what its codes leave out; `before` is the tile as prepared. */
static void key_errors(const prep_job *job, int64_t t, int64_t n, const float *before)
{
    const int64_t D = job->call->D, T = APA_REFERENCE_TILE;
    const float *kt = job->head->k_units + t * D * T;
    job->head->k_norm[t] = job->head->k_error[t] = 0;
    for (int64_t j = 0; j < n; ++j) {
        double norm = 0, error = 0;
        for (int64_t d = 0; d < D; ++d) {
            const double x = (double)before[d * T + j], y = (double)kt[d * T + j] * job->head->k_scale[t * T + j];
            norm += x * x;
            error += (x - y) * (x - y);
        }
        job->head->k_norm[t] = norm > job->head->k_norm[t] ? norm : job->head->k_norm[t];
        job->head->k_error[t] = error > job->head->k_error[t] ? error : job->head->k_error[t];
    }
    job->head->k_norm[t] = sqrt(job->head->k_norm[t]);
    job->head->k_error[t] = sqrt(job->head->k_error[t]);
}

static void quantise_task(void *argument, size_t index)
{
    const prep_job *job = argument;
    const apa_call *call = job->call;
    apa_reference_head *head = job->head;
    const int64_t t = (int64_t)index, n = keys_of(call, t), D = call->D, Dv = call->Dv, T = APA_REFERENCE_TILE;
    quantise_keys(job, t, n);
    if (call->recipe.verdict == APA_VERDICT_RULE_MASS_VALUE)
        key_errors(job, t, n, head->k_exact + t * D * T);
    for (int64_t c = 0; c < Dv; ++c)
        head->v_scale[t * Dv + c] = quantise_channel(job, t, c, head->v_units + t * T * Dv + c, n);
}

/* ---- scales of the head ---- */

/* The tensor scale: not under the smallest normal float, so that it can be divided by. */
static float head_scale(apa_tensor_scale kind, const float *amax, int64_t tiles)
{
    const float top = apa_reference_amax(amax, tiles, 1);
    const double need = NVFP4_HEADROOM * (double)top / NVFP4_RANGE;
    int exponent;
    if (kind == APA_TENSOR_SCALE_NONE)
        return 1;
    if (kind == APA_TENSOR_SCALE_AMAX)
        return top / (float)NVFP4_RANGE < FLT_MIN ? FLT_MIN : top / (float)NVFP4_RANGE;
    if (need <= (double)FLT_MIN)
        return FLT_MIN;
    const double fraction = frexp(need, &exponent); /* need = fraction·2^exponent, fraction in [1/2, 1) */
    return (float)ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

static void channel_maxima(const apa_call *call, apa_reference_head *head)
{
    for (int64_t c = 0; c < call->Dv; ++c)
        head->v_channel[c] = apa_reference_amax(head->v_units + c, apa_call_tiles(call) * APA_REFERENCE_TILE, call->Dv);
}

void apa_reference_prep(apa_context *context, const apa_call *call, apa_reference_head *head)
{
    const int64_t tiles = apa_call_tiles(call);
    prep_job job = {.call = call, .head = head};
    memset(head->k_mean, 0, sizeof(float) * (size_t)call->D);
    memset(head->v_mean, 0, sizeof(float) * (size_t)call->Dv);
    if (call->recipe.smooth_k == APA_TOGGLE_ON || call->recipe.smooth_v == APA_TOGGLE_ON)
        apa_context_parallel(context, sum_task, &job, (size_t)tiles);
    if (call->recipe.smooth_k == APA_TOGGLE_ON)
        mean_of(head->k_sum, head->k_count, tiles, call->recipe.smooth_k_stride, call->D, head->k_mean);
    if (call->recipe.smooth_v == APA_TOGGLE_ON)
        mean_of(head->v_sum, head->v_count, tiles, 1, call->Dv, head->v_mean);
    if (apa_reference_all_hot(&call->recipe))
        return;
    apa_context_parallel(context, fill_task, &job, (size_t)tiles);
    job.k_scale = head_scale(call->recipe.tensor_scale, head->k_amax, tiles);
    job.v_scale = head_scale(call->recipe.tensor_scale, head->v_amax, tiles);
    if (call->recipe.v_scale_granularity == APA_V_GRANULARITY_CHANNEL)
        channel_maxima(call, head);
    apa_reference_prep_queries(context, call, head);
    apa_context_parallel(context, quantise_task, &job, (size_t)tiles);
    head->k_scale_max = 0;
    for (int64_t j = 0; j < call->Skv; ++j) /* scales of places beyond the sequence mean nothing */
        head->k_scale_max = head->k_scale[j] > head->k_scale_max ? head->k_scale[j] : head->k_scale_max;
}
