/* Scores of a cold tile, and the state that sums cold tiles.
 *
 * Scores are in log2 units, s = scale·log₂e·((Σ_terms q_scale·q·k)·k_scale + ΔS); softcap, slopes and mask come in
 * between (scores.c), in natural units. The dot product of units is exact in double, or summed in the accumulator
 * qk_accum; ΔS = q̄·k (smooth_q) has the dot product of prepared values in double, rounded once to FP32.
 *
 * A row's state has a frame m. Where P stands against it (probability.c): if no score of the group exceeds its row's m
 * + τ, the candidate c is m, else c = max(m, top) in every row. Otherwise the frame is the maximum so far and τ = 0.
 * The state stands in the frame c + τ: o += P·V, l += Σ P.
 *
 * pv_accum f64: everything in double. Else P's codes times V's units are summed over pv_flush keys in the accumulator,
 * the products of one matrix instruction at a time (quantise.c); then that sum is added to an FP32 sum, scaled, and
 * added to the FP32 state. pv_flush 0: the state itself is the accumulator. */
#include "reference/internal.h"

#include <math.h>
#include <string.h>

/* ---- scores ---- */

/* Products that a matrix unit adds at a time. */
static int64_t qk_step(apa_qk_format format)
{
    const bool fp4 = format == APA_QK_FORMAT_NVFP4 || format == APA_QK_FORMAT_MXFP4;
    return fp4 ? 64 : format == APA_QK_FORMAT_EXACT ? 16 : 32;
}

static int64_t pv_step(apa_pv_format format)
{
    const bool fp4 = format == APA_PV_FORMAT_NVFP4 || format == APA_PV_FORMAT_MXFP4;
    return fp4 ? 64 : format >= APA_PV_FORMAT_F16 ? 16 : 32;
}

static void narrow_dots(const apa_call *call, const double *q, const double *kt, double *dot)
{
    const int64_t step = qk_step(call->recipe.qk_format);
    double product[64];
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        double sum = 0;
        for (int64_t d = 0; d < call->D; d += step) {
            const int64_t n = call->D - d < step ? call->D - d : step;
            for (int64_t i = 0; i < n; ++i)
                product[i] = q[d + i] * kt[(d + i) * APA_REFERENCE_TILE + j];
            sum = apa_reference_step(call->recipe.qk_accum, sum, product, n);
        }
        dot[j] = sum;
    }
}

/* q̄·k of the tile's keys; rows of one head and block of 128 queries have the same. */
static void delta_row(apa_reference_block *block, int64_t r, int64_t t)
{
    const apa_call *call = block->call;
    const apa_reference_row *row = &block->row[r], *before = row - 1;
    const float *kt = block->head->k_exact + t * call->D * APA_REFERENCE_TILE;
    const double *mean = block->q_mean + r * call->D;
    double *delta = block->delta + r * APA_REFERENCE_TILE;
    if (r > 0 && apa_reference_sees(block, r - 1, t) && before->hq == row->hq &&
        before->position / APA_REFERENCE_Q_BLOCK == row->position / APA_REFERENCE_Q_BLOCK) {
        memcpy(delta, delta - APA_REFERENCE_TILE, sizeof(double) * APA_REFERENCE_TILE);
        return;
    }
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        double dot = 0;
        for (int64_t d = 0; d < call->D; ++d)
            dot += mean[d] * (double)kt[d * APA_REFERENCE_TILE + j];
        delta[j] = (double)(float)dot;
    }
}

void apa_reference_score_row(apa_reference_block *block, int64_t r, int64_t t)
{
    const apa_call *call = block->call;
    const bool shifted = call->recipe.smooth_q == APA_TOGGLE_ON;
    const double *k_scale = block->head->k_scale + t * APA_REFERENCE_TILE,
                 *delta = shifted ? block->delta + r * APA_REFERENCE_TILE : NULL;
    apa_reference_row *row = &block->row[r];
    double *s = block->p + r * APA_REFERENCE_TILE, dot[2][APA_REFERENCE_TILE] = {{0}};
    const uint64_t seen = apa_reference_seen(block, r, t);
    const bool bent = apa_call_changes_scores(call);
    const double unit = bent ? call->scale : call->scale * APA_REFERENCE_LOG2E; /* what bends is natural */
    for (int term = 0; term < call->recipe.q_terms; ++term) {
        const double *units = block->q_units[term] + r * call->D;
        if (call->recipe.qk_accum == APA_ACCUMULATOR_F64)
            apa_reference_dots(units, block->kt, call->D, dot[term]);
        else
            narrow_dots(call, units, block->kt, dot[term]);
    }
    if (shifted)
        delta_row(block, r, t);
    row->top = -INFINITY;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        s[j] = -INFINITY;
        if ((seen >> j & 1) == 0)
            continue;
        const double q_dot = row->q_scale[0] * dot[0][j] + row->q_scale[1] * dot[1][j];
        s[j] = unit * q_dot * k_scale[j];
        if (shifted)
            s[j] += unit * delta[j];
    }
    apa_reference_bend(block, r, t, s);
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        if (bent)
            s[j] *= APA_REFERENCE_LOG2E;
        row->top = s[j] > row->top ? s[j] : row->top;
    }
}

/* The candidate frames c of all rows. */
static void candidate_frames(apa_reference_block *block)
{
    const double tau = apa_reference_tau(&block->call->recipe);
    bool move = !apa_reference_framed(&block->call->recipe);
    for (int64_t r = 0; r < block->rows; ++r)
        move = move || (block->row[r].real && block->row[r].top > block->row[r].cold_frame + tau);
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        row->next = move && row->top > row->cold_frame ? row->top : row->cold_frame;
    }
}

void apa_reference_cold_load(apa_reference_block *block, int64_t t)
{
    const int64_t n = block->call->D * APA_REFERENCE_TILE;
    const float *units = block->head->k_units + t * n;
    for (int64_t i = 0; i < n; ++i)
        block->kt[i] = (double)units[i];
}

void apa_reference_cold_scores(apa_reference_block *block, int64_t t)
{
    apa_reference_cold_load(block, t);
    for (int64_t r = 0; r < block->rows; ++r) {
        block->row[r].top = -INFINITY;
        if (apa_reference_sees(block, r, t))
            apa_reference_score_row(block, r, t);
    }
    candidate_frames(block);
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        row->phase = apa_reference_phase(&block->call->recipe, t);
        row->p_sum = 0;
        if (apa_reference_sees(block, r, t))
            apa_reference_probabilities(&block->call->recipe, row, block->p + r * APA_REFERENCE_TILE,
                                        block->code + r * APA_REFERENCE_TILE);
    }
}

/* ---- state ---- */

static bool wide(const apa_call *call)
{
    return call->recipe.pv_accum == APA_ACCUMULATOR_F64;
}

/* What the state's numbers are kept in. */
static apa_accumulator state_kind(const apa_call *call)
{
    return wide(call) ? APA_ACCUMULATOR_F64 : call->recipe.pv_flush == 0 ? call->recipe.pv_accum : APA_ACCUMULATOR_F32;
}

void apa_reference_cold_move(apa_reference_block *block, int64_t r, double frame)
{
    const apa_accumulator kind = state_kind(block->call);
    apa_reference_row *row = &block->row[r];
    if (!(frame > row->cold_frame))
        return;
    const double move = exp2(row->cold_frame - frame); /* 0 from the empty state */
    row->cold_sum =
        apa_reference_to(wide(block->call) ? APA_ACCUMULATOR_F64 : APA_ACCUMULATOR_F32, row->cold_sum * move);
    for (int64_t c = 0; c < block->call->Dv; ++c) {
        double *o = &block->cold[r * block->call->Dv + c];
        *o = kind == APA_ACCUMULATOR_F64    ? *o * move
             : kind == APA_ACCUMULATOR_FP22 ? apa_reference_step(kind, 0, (const double[]){*o * move}, 1)
                                            : apa_reference_to(kind, *o * move);
    }
    row->cold_frame = frame;
}

/* Column c of codes·units over the tile, through the accumulator; factor takes a sum into the state. */
static double narrow_column(const apa_call *call, const double *code, const double *v, uint64_t seen, double o,
                            double factor)
{
    const apa_recipe *recipe = &call->recipe;
    const int64_t step = pv_step(recipe->pv_format), flush = recipe->pv_flush;
    double product[64], sum = 0, flushed = 0;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; j += step) {
        const int64_t end = j + step;
        int64_t n = 0;
        for (int64_t i = j; i < end; ++i)
            if ((seen >> i & 1) != 0)
                product[n++] = code[i] * v[i * call->Dv] * (flush == 0 ? factor : 1.0);
        if (flush == 0) {
            o = apa_reference_step(recipe->pv_accum, o, product, n);
            continue;
        }
        sum = apa_reference_step(recipe->pv_accum, sum, product, n);
        if (end % flush == 0) {
            flushed = (double)(float)(flushed + sum);
            sum = 0;
        }
    }
    return flush == 0 ? o : (double)(float)(o + (double)(float)(factor * flushed));
}

static void cold_add_row(apa_reference_block *block, int64_t r, int64_t t)
{
    const apa_call *call = block->call;
    const double *v_scale = block->head->v_scale + t * call->Dv;
    apa_reference_row *row = &block->row[r];
    double pv[APA_REFERENCE_DIM_MAX] = {0};
    const uint64_t seen = apa_reference_seen(block, r, t);
    apa_reference_cold_move(block, r, row->next);
    /* 1 where P stands against the frame */
    const double weight = exp2(row->p_frame - (row->cold_frame + apa_reference_tau(&call->recipe)));
    row->cold_sum += weight * row->p_sum;
    if (!wide(call)) {
        const double range = apa_reference_p_range(&call->recipe);
        row->cold_sum = (double)(float)row->cold_sum;
        for (int64_t c = 0; c < call->Dv; ++c)
            block->cold[r * call->Dv + c] =
                narrow_column(call, block->code + r * APA_REFERENCE_TILE, block->v + c, seen,
                              block->cold[r * call->Dv + c], weight * v_scale[c] / range);
        return;
    }
    apa_reference_weighted_sum(block->p + r * APA_REFERENCE_TILE, block->v, call->Dv, seen, pv);
    for (int64_t c = 0; c < call->Dv; ++c)
        block->cold[r * call->Dv + c] += weight * v_scale[c] * pv[c];
}

void apa_reference_load_values(apa_reference_block *block, int64_t t)
{
    const int64_t n = APA_REFERENCE_TILE * block->call->Dv;
    const float *units = block->head->v_units + t * n;
    for (int64_t i = 0; i < n; ++i)
        block->v[i] = (double)units[i];
}

void apa_reference_cold_add(apa_reference_block *block, int64_t t)
{
    apa_reference_load_values(block, t);
    for (int64_t r = 0; r < block->rows; ++r)
        if (apa_reference_sees(block, r, t))
            cold_add_row(block, r, t);
}

void apa_reference_tile_values(apa_reference_block *block, int64_t r, int64_t t, double *mean)
{
    const apa_call *call = block->call;
    memset(mean, 0, sizeof(double) * (size_t)call->Dv);
    apa_reference_weighted_sum(block->p + r * APA_REFERENCE_TILE, block->v, call->Dv, apa_reference_seen(block, r, t),
                               mean);
    for (int64_t c = 0; c < call->Dv; ++c)
        mean[c] *= block->head->v_scale[t * call->Dv + c] / block->row[r].p_sum;
}
