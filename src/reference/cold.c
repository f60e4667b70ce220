/* The cold format: Q's codes, scores, probabilities, and the state that sums them.
 *
 * Scores are in log2 units, s = scale·log₂e·(Σ_terms q_scale·q·k)·k_scale, with the dot product of units exact.
 *
 * INT8 (P scale row-tile): P = rint(255·2^(s - top))/255 with top the row's maximum in the tile, so P needs no frame.
 *     The state's frame is the maximum so far.
 * NVFP4 (APA): a row's state has a frame m. If no score of the group exceeds its row's m + τ, the candidate c is m,
 *     else c = max(m, top) in every row. P = 2^(s - c - τ) <= 1; per 16 keys P' = P·1536/s₈ rounded to E2M1, with
 *     s₈ >= 256·max P and >= 2^-6, the smallest such normal UE4M3 (or power of two, where P' lands in (3, 6]); P counts
 * as P'·s₈/1536. Here 1536 = 6·256: max P maps to 6 at most, and P = 1 to s₈ = 256, inside UE4M3's 448. The state
 * stands in the frame c + τ (τ = 0 in INT8): o += P·V, l += Σ P, P quantised in both. */
#include "reference/internal.h"

#include "formats/formats.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define INT8_P_STEPS 255.0
#define NVFP4_BLOCK 16
#define NVFP4_RANGE 2688.0F
#define NVFP4_P_SCALE 256.0
#define NVFP4_P_RANGE 1536.0      /* 6·256 */
#define UE4M3_MIN_NORMAL 0.015625 /* 2^-6 */
#define UE4M3_STEPS 16.0          /* significands of normals are 8/16 … 15/16 by 1/16 */

static bool is_nvfp4(const apa_call *call)
{
    return call->recipe.cold_format == APA_COLD_FORMAT_NVFP4;
}

static double tau_of(const apa_call *call)
{
    return is_nvfp4(call) ? call->recipe.lazy_tau : 0.0;
}

/* ---- Q ---- */

/* units and scale of one INT8 term; x keeps the FP32 residual x - scale·code. */
static double int8_term(float *x, int64_t D, double *units)
{
    int8_t code[APA_REFERENCE_DIM_MAX];
    const double scale = (double)apa_int8_quantise(x, (size_t)D, code);
    for (int64_t d = 0; d < D; ++d) {
        units[d] = code[d];
        x[d] = (float)((double)x[d] - scale * units[d]);
    }
    return scale;
}

/* The same in NVFP4, with the row's scale given. */
static void nvfp4_term(float *x, int64_t D, float scale, bool search, double *units)
{
    for (int64_t i = 0; i < D; i += NVFP4_BLOCK) {
        const int64_t size = D - i < NVFP4_BLOCK ? D - i : NVFP4_BLOCK;
        float value[NVFP4_BLOCK];
        uint8_t code[NVFP4_BLOCK];
        for (int64_t u = 0; u < size; ++u)
            value[u] = x[i + u] / scale;
        const double unit =
            apa_format_decode(APA_FORMAT_UE4M3, apa_nvfp4_block(value, (size_t)size, search, code, NULL));
        for (int64_t u = 0; u < size; ++u) {
            units[i + u] = unit * apa_format_decode(APA_FORMAT_E2M1, code[u]);
            x[i + u] = (float)((double)x[i + u] - (double)scale * units[i + u]);
        }
    }
}

void apa_reference_quantise_q(apa_reference_block *block, int64_t r)
{
    const apa_call *call = block->call;
    const int64_t D = call->D;
    apa_reference_row *row = &block->row[r];
    float x[APA_REFERENCE_DIM_MAX], amax = 0;
    row->finite = apa_reference_load_f32(&call->q, block->head->b, row->hq, row->position, x);
    if (call->recipe.hadamard == APA_TOGGLE_ON)
        apa_reference_hadamard(x, D);
    for (int64_t d = 0; d < D; ++d) {
        row->finite = row->finite && isfinite(x[d]);
        amax = fabsf(x[d]) > amax ? fabsf(x[d]) : amax;
        block->q_prepared[r * D + d] = (double)x[d];
    }
    row->q_scale[0] = row->q_scale[1] = 0;
    if (!row->finite)
        return; /* the group is hot throughout */
    /* not under the smallest normal float, so that it can be divided by */
    const float nvfp4_scale = amax / NVFP4_RANGE < FLT_MIN ? FLT_MIN : amax / NVFP4_RANGE;
    for (int term = 0; term < call->recipe.q_terms; ++term) {
        double *units = block->q_units[term] + r * D;
        row->q_scale[term] = (double)nvfp4_scale;
        if (is_nvfp4(call))
            nvfp4_term(x, D, nvfp4_scale, call->recipe.scale_search == APA_TOGGLE_ON, units);
        else
            row->q_scale[term] = int8_term(x, D, units);
    }
}

/* ---- scores ---- */

static void score_row(apa_reference_block *block, int64_t r, int64_t t)
{
    const apa_call *call = block->call;
    const double *k_scale = block->head->k_scale + t * APA_REFERENCE_TILE;
    apa_reference_row *row = &block->row[r];
    double *s = block->p + r * APA_REFERENCE_TILE, dot[2][APA_REFERENCE_TILE] = {{0}};
    int64_t lo, hi;
    apa_reference_span(row, t, &lo, &hi);
    for (int term = 0; term < call->recipe.q_terms; ++term)
        apa_reference_dots(block->q_units[term] + r * call->D, block->kt, call->D, dot[term]);
    row->top = -INFINITY;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        s[j] = -INFINITY;
        if (j < lo || j >= hi)
            continue;
        const double q_dot = row->q_scale[0] * dot[0][j] + row->q_scale[1] * dot[1][j];
        s[j] = call->scale * APA_REFERENCE_LOG2E * q_dot * k_scale[j];
        row->top = s[j] > row->top ? s[j] : row->top;
    }
}

/* The candidate frames c of all rows. */
static void candidate_frames(apa_reference_block *block)
{
    const double tau = tau_of(block->call);
    bool move = !is_nvfp4(block->call);
    for (int64_t r = 0; r < block->rows; ++r)
        move = move || (block->row[r].real && block->row[r].top > block->row[r].cold_frame + tau);
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        row->next = move && row->top > row->cold_frame ? row->top : row->cold_frame;
    }
}

/* ---- probabilities ---- */

static void int8_probabilities(apa_reference_row *row, double *p)
{
    row->p_frame = row->top;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j)
        p[j] = p[j] == -INFINITY ? 0.0 : rint(INT8_P_STEPS * exp2(p[j] - row->top)) / INT8_P_STEPS;
}

/* Smallest normal UE4M3, or power of two, that is >= x, and >= 2^-6. */
static double p_scale_of(double x, apa_p_scale kind)
{
    int exponent;
    if (!(x > UE4M3_MIN_NORMAL))
        return UE4M3_MIN_NORMAL;
    const double fraction = frexp(x, &exponent); /* in [1/2, 1) */
    const double up =
        kind == APA_P_SCALE_POW2 ? (fraction > 0.5 ? 1.0 : 0.5) : ceil(fraction * UE4M3_STEPS) / UE4M3_STEPS;
    return ldexp(up, exponent);
}

static void nvfp4_probabilities(apa_reference_row *row, double *p, apa_p_scale kind, double tau)
{
    row->p_frame = row->next + tau;
    for (int64_t g = 0; g < APA_REFERENCE_TILE; g += NVFP4_BLOCK) {
        double top = 0;
        for (int64_t j = g; j < g + NVFP4_BLOCK; ++j) {
            /* s - c first: a score that sets the frame has P = 2^-τ exactly, on the edge between two scales */
            p[j] = p[j] == -INFINITY ? 0.0 : exp2(p[j] - row->next - tau);
            top = p[j] > top ? p[j] : top;
        }
        const double scale = p_scale_of(NVFP4_P_SCALE * top, kind);
        for (int64_t j = g; j < g + NVFP4_BLOCK; ++j)
            p[j] = apa_format_round(APA_FORMAT_E2M1, p[j] * NVFP4_P_RANGE / scale) * scale / NVFP4_P_RANGE;
    }
}

void apa_reference_cold_scores(apa_reference_block *block, int64_t t)
{
    const apa_call *call = block->call;
    const float *units = block->head->k_units + t * call->D * APA_REFERENCE_TILE;
    for (int64_t i = 0; i < call->D * APA_REFERENCE_TILE; ++i)
        block->kt[i] = (double)units[i];
    for (int64_t r = 0; r < block->rows; ++r) {
        block->row[r].top = -INFINITY;
        if (apa_reference_sees(&block->row[r], t))
            score_row(block, r, t);
    }
    candidate_frames(block);
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        double *p = block->p + r * APA_REFERENCE_TILE;
        row->p_sum = 0;
        if (!apa_reference_sees(row, t))
            continue;
        if (is_nvfp4(call))
            nvfp4_probabilities(row, p, call->recipe.p_scale, tau_of(call));
        else
            int8_probabilities(row, p);
        for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j)
            row->p_sum += p[j];
    }
}

/* ---- state ---- */

void apa_reference_cold_move(apa_reference_block *block, int64_t r, double frame)
{
    apa_reference_row *row = &block->row[r];
    if (!(frame > row->cold_frame))
        return;
    const double move = exp2(row->cold_frame - frame); /* 0 from the empty state */
    row->cold_sum *= move;
    for (int64_t c = 0; c < block->call->Dv; ++c)
        block->cold[r * block->call->Dv + c] *= move;
    row->cold_frame = frame;
}

static void cold_add_row(apa_reference_block *block, int64_t r, int64_t t)
{
    const apa_call *call = block->call;
    const double *v_scale = block->head->v_scale + t * call->Dv;
    apa_reference_row *row = &block->row[r];
    double pv[APA_REFERENCE_DIM_MAX] = {0};
    int64_t lo, hi;
    apa_reference_span(row, t, &lo, &hi);
    apa_reference_cold_move(block, r, row->next);
    const double weight = exp2(row->p_frame - (row->cold_frame + tau_of(call))); /* 1 in NVFP4 */
    apa_reference_weighted_sum(block->p + r * APA_REFERENCE_TILE, block->v, call->Dv, lo, hi, pv);
    row->cold_sum += weight * row->p_sum;
    for (int64_t c = 0; c < call->Dv; ++c)
        block->cold[r * call->Dv + c] += weight * v_scale[c] * pv[c];
}

void apa_reference_cold_add(apa_reference_block *block, int64_t t)
{
    const apa_call *call = block->call;
    const float *units = block->head->v_units + t * APA_REFERENCE_TILE * call->Dv;
    for (int64_t i = 0; i < APA_REFERENCE_TILE * call->Dv; ++i)
        block->v[i] = (double)units[i];
    for (int64_t r = 0; r < block->rows; ++r)
        if (apa_reference_sees(&block->row[r], t))
            cold_add_row(block, r, t);
}
