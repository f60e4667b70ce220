/* The definition, and error bounds.
 *
 * Sums in precision u (n keys, dims D and Dv), L = Σ e^(s_j - m), everything over visible keys.
 *
 * Scores: δ_j = u·((D + 4)·|scale|·Σ|q_d·k_d| + 8·(|s| + |distance term| + |mask term|)), for a dot product of D
 * terms and then a few operations; tanh has slope at most 1. δ is the largest.
 *
 * Weights are off by e^δ either way, in numerator and denominator, and sums of n terms by n·u:
 *     |Δo| <= (e^(2δ) - 1 + (n + 16)·u)·max|v|          and never more than 2·max|v|: o is an average
 *     |Δlse| <= δ + (n + 16)·u + 8·u·|lse|
 *
 * Cold tiles (INT8). With q', k' after smoothing and rotation and a_q, a_k their largest elements, codes are off by
 * half a step of a/127; P of a tile has 255 steps under its maximum p_t; V half a step of the channel's largest:
 *     δ_j += |scale|·(a_q/254·‖k'‖₁ + a_k/254·‖q'‖₁ + D·a_q·a_k/254²)
 *     |Δo|, |Δlse| += 2·e^(2δ)·Σ_t n_t·p_t / (510·L)    times max|v| for o
 *     |Δo_c| += max|v_c|/254
 * with the largest values of all keys of the sequence in place of those of the tile. They hold whatever a verdict
 * says, since a hot tile has none of these errors. */
#include "support/oracle.h"

#include "formats/formats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TILE 64

double oracle_load(const apa_tensor *x, int64_t offset)
{
    switch (x->dtype) {
    case APA_DTYPE_F16:
        return (double)apa_f16_to_f32(((const uint16_t *)x->data)[offset]);
    case APA_DTYPE_BF16:
        return (double)apa_bf16_to_f32(((const uint16_t *)x->data)[offset]);
    case APA_DTYPE_F32:
        return (double)((const float *)x->data)[offset];
    case APA_DTYPE_F64:
        return ((const double *)x->data)[offset];
    case APA_DTYPE_BOOL:
        return ((const unsigned char *)x->data)[offset] != 0;
    case APA_DTYPE_NONE:
        break;
    }
    return NAN;
}

static double element(const apa_tensor *x, int64_t b, int64_t h, int64_t s, int64_t d)
{
    return oracle_load(x, b * x->stride[0] + h * x->stride[1] + s * x->stride[2] + d * x->stride[3]);
}

/* The same of something whose extents of 1 repeat. */
static double repeated(const apa_tensor *x, int64_t b, int64_t h, int64_t s, int64_t d)
{
    return element(x, x->shape[0] == 1 ? 0 : b, x->shape[1] == 1 ? 0 : h, x->shape[2] == 1 ? 0 : s,
                   x->shape[3] == 1 ? 0 : d);
}

int64_t oracle_count(const apa_problem *p)
{
    return p->cu_seqlens_q != NULL || p->cu_seqlens_k != NULL ? p->batch : p->q.shape[0];
}

oracle_sequence oracle_at(const apa_problem *p, int64_t b)
{
    oracle_sequence s = {.b = b, .queries = p->q.shape[2], .keys = p->k.shape[2]};
    if (p->cu_seqlens_q != NULL)
        s.queries = p->cu_seqlens_q[b + 1] - p->cu_seqlens_q[b];
    if (p->cu_seqlens_k != NULL)
        s.keys = p->cu_seqlens_k[b + 1] - p->cu_seqlens_k[b];
    if (p->seqused_k != NULL)
        s.keys = p->seqused_k[b];
    s.q_offset = p->q_offset != APA_Q_OFFSET_DEFAULT ? p->q_offset : s.keys - s.queries;
    if (p->causal == APA_CAUSAL_TOP_LEFT)
        s.q_offset = 0;
    if (p->q_offsets != NULL)
        s.q_offset = p->q_offsets[b];
    return s;
}

double oracle_query_value(const apa_problem *p, const apa_tensor *x, const oracle_sequence *s, int64_t h, int64_t i,
                          int64_t d)
{
    return p->cu_seqlens_q != NULL ? element(x, 0, h, p->cu_seqlens_q[s->b] + i, d) : element(x, s->b, h, i, d);
}

void oracle_key_place(const apa_problem *p, const oracle_sequence *s, int64_t j, int64_t *entry, int64_t *row)
{
    *entry = s->b;
    *row = j;
    if (p->cu_seqlens_k != NULL) {
        *entry = 0;
        *row = p->cu_seqlens_k[s->b] + j;
    }
    if (p->block_table != NULL) {
        const int64_t size = p->k.shape[2];
        *entry = p->block_table[s->b * p->block_table_stride + j / size];
        *row = j % size;
    }
}

static double key_value(const apa_problem *p, const apa_tensor *x, const oracle_sequence *s, int64_t hkv, int64_t j,
                        int64_t d)
{
    int64_t entry, row;
    oracle_key_place(p, s, j, &entry, &row);
    return element(x, entry, hkv, row, d);
}

static double mask_value(const apa_problem *p, const oracle_sequence *s, int64_t h, int64_t i, int64_t j)
{
    return p->cu_seqlens_q != NULL ? repeated(&p->attn_mask, 0, h, p->cu_seqlens_q[s->b] + i, j)
                                   : repeated(&p->attn_mask, s->b, h, i, j);
}

bool oracle_sees(const apa_problem *p, const oracle_sequence *s, int64_t h, int64_t i, int64_t j)
{
    const double at = (double)i + (double)s->q_offset, key = (double)j;
    if (p->causal != APA_CAUSAL_NONE && key > at)
        return false;
    if (p->window_left >= 0 && key < at - (double)p->window_left)
        return false;
    if (p->window_right >= 0 && key > at + (double)p->window_right)
        return false;
    if (p->attn_mask.dtype == APA_DTYPE_NONE)
        return true;
    const double value = mask_value(p, s, h, i, j);
    return p->attn_mask.dtype == APA_DTYPE_BOOL ? value != 0 : value != -INFINITY;
}

/* ---- keys of a sequence and KV head, decoded once ---- */

static void rotate(double *x, int64_t n)
{
    const int64_t block = n & -n;
    for (int64_t at = 0; at < n; at += block) {
        for (int64_t h = 1; h < block; h *= 2)
            for (int64_t i = 0; i < block; i += 2 * h)
                for (int64_t j = i; j < i + h; j++) {
                    const double a = x[at + j], b = x[at + j + h];
                    x[at + j] = a + b;
                    x[at + j + h] = a - b;
                }
        for (int64_t i = 0; i < block; i++)
            x[at + i] /= sqrt((double)block);
    }
}

static void size_of(const double *x, int64_t n, double *most, double *sum)
{
    *most = *sum = 0;
    for (int64_t d = 0; d < n; d++) {
        *most = fabs(x[d]) > *most ? fabs(x[d]) : *most;
        *sum += fabs(x[d]);
    }
}

static bool finite_row(const double *x, int64_t n)
{
    bool finite = true;
    for (int64_t d = 0; d < n; d++)
        finite = finite && isfinite(x[d]);
    return finite;
}

/* most and sum: the largest element of a key and its 1-norm, smoothed and rotated; 0 where it is not finite. */
static void measure(oracle_keys *keys, const oracle_cold *cold)
{
    const int64_t n = keys->s.keys, D = keys->D;
    double mean[ORACLE_DIM] = {0}, k[ORACLE_DIM], count = 0;
    for (int64_t j = 0; j < n && cold->smooth_k; j++)
        if (finite_row(keys->k + j * D, D)) {
            count++;
            for (int64_t d = 0; d < D; d++)
                mean[d] += keys->k[j * D + d];
        }
    for (int64_t j = 0; j < n; j++) {
        keys->most[j] = keys->sum[j] = 0;
        if (!finite_row(keys->k + j * D, D))
            continue;
        for (int64_t d = 0; d < D; d++)
            k[d] = keys->k[j * D + d] - (count > 0 ? mean[d] / count : 0);
        if (cold->hadamard)
            rotate(k, D);
        size_of(k, D, &keys->most[j], &keys->sum[j]);
    }
}

oracle_keys oracle_decode(const apa_problem *p, const oracle_sequence *s, int64_t hkv, const oracle_cold *cold)
{
    oracle_keys keys = {.p = p, .s = *s, .hkv = hkv, .cold = *cold, .D = p->k.shape[3], .Dv = p->v.shape[3]};
    const size_t n = (size_t)s->keys + 1;
    keys.memory = malloc(sizeof(double) * n * (size_t)(keys.D + keys.Dv + 4) + n);
    if (keys.memory == NULL)
        abort();
    keys.k = keys.memory;
    keys.v = keys.k + n * (size_t)keys.D;
    keys.most = keys.v + n * (size_t)keys.Dv;
    keys.sum = keys.most + n;
    keys.weight = keys.sum + n;
    keys.error = keys.weight + n;
    keys.seen = (bool *)(keys.error + n);
    for (int64_t j = 0; j < s->keys; j++) {
        for (int64_t d = 0; d < keys.D; d++)
            keys.k[j * keys.D + d] = key_value(p, &p->k, s, hkv, j, d);
        for (int64_t d = 0; d < keys.Dv; d++)
            keys.v[j * keys.Dv + d] = key_value(p, &p->v, s, hkv, j, d);
    }
    if (cold->on)
        measure(&keys, cold);
    return keys;
}

void oracle_keys_free(oracle_keys *keys)
{
    free(keys->memory);
}

/* ---- scores ---- */

/* One score; *error: what sums in precision u may be off by. */
static double score(const oracle_keys *keys, const double *q, int64_t h, int64_t i, int64_t j, double u, double *error)
{
    const apa_problem *p = keys->p;
    const oracle_sequence *s = &keys->s;
    const double scale = isnan(p->softmax_scale) ? 1 / sqrt((double)keys->D) : p->softmax_scale;
    const double *k = keys->k + j * keys->D;
    double dot = 0, size = 0, distance = 0, added = 0;
    for (int64_t d = 0; d < keys->D; d++) {
        dot += q[d] * k[d];
        size += fabs(q[d] * k[d]);
    }
    double value = scale * dot;
    if (p->softcap > 0)
        value = p->softcap * tanh(value / p->softcap);
    if (p->alibi_slopes.dtype != APA_DTYPE_NONE)
        distance = repeated(&p->alibi_slopes, s->b, h, 0, 0) * fabs((double)i + (double)s->q_offset - (double)j);
    if (p->attn_mask.dtype != APA_DTYPE_NONE && p->attn_mask.dtype != APA_DTYPE_BOOL) {
        added = mask_value(p, s, h, i, j);
        added *= p->mask_slopes.dtype != APA_DTYPE_NONE ? repeated(&p->mask_slopes, s->b, h, 0, 0) : 1;
    }
    *error = u * ((double)(keys->D + 4) * fabs(scale) * size + 8 * (fabs(value) + fabs(distance) + fabs(added)));
    return value - distance + added;
}

/* Scores of a row into keys->weight, -inf where a key is not seen; the largest score and the largest error bound. */
static void score_row(oracle_keys *keys, int64_t h, int64_t i, double u, oracle_row *row, double *top, double *delta)
{
    const int64_t D = keys->D;
    const double scale = fabs(isnan(keys->p->softmax_scale) ? 1 / sqrt((double)D) : keys->p->softmax_scale);
    double q[ORACLE_DIM], rotated[ORACLE_DIM], most, sum;
    int64_t last_tile = -1;
    for (int64_t d = 0; d < D; d++)
        q[d] = rotated[d] = oracle_query_value(keys->p, &keys->p->q, &keys->s, h, i, d);
    if (keys->cold.hadamard)
        rotate(rotated, D);
    size_of(rotated, D, &most, &sum);
    *top = -INFINITY;
    *delta = 0;
    row->tiles = 0;
    for (int64_t j = 0; j < keys->s.keys; j++) {
        double *s = &keys->weight[j], *error = &keys->error[j];
        *s = -INFINITY;
        *error = 0;
        keys->seen[j] = oracle_sees(keys->p, &keys->s, h, i, j);
        if (!keys->seen[j])
            continue;
        *s = score(keys, q, h, i, j, u, error);
        if (keys->cold.on)
            *error += scale * (most / 254 * keys->sum[j] + keys->most[j] / 254 * sum +
                               (double)D * most * keys->most[j] / (254 * 254));
        row->tiles += j / TILE != last_tile;
        last_tile = j / TILE;
        *top = *s > *top ? *s : *top;
        *delta = *error > *delta ? *error : *delta;
    }
}

/* ---- the row ---- */

/* Σ_t n_t·p_t over the tiles. */
static double steps(const oracle_keys *keys)
{
    double sum = 0;
    for (int64_t t = 0; t < keys->s.keys; t += TILE) {
        double most = 0, n = 0;
        for (int64_t j = t; j < keys->s.keys && j < t + TILE; j++) {
            n += keys->weight[j] > 0;
            most = keys->weight[j] > most ? keys->weight[j] : most;
        }
        sum += n * most;
    }
    return sum;
}

/* Averages and their bounds: `relative` is what weights and sums may be off by. */
static void average(const oracle_keys *keys, double mass, double relative, oracle_row *row)
{
    const int64_t Dv = keys->Dv;
    double most[ORACLE_DIM] = {0}, all[ORACLE_DIM] = {0};
    memset(row->out, 0, sizeof row->out);
    for (int64_t j = 0; j < keys->s.keys; j++)
        for (int64_t c = 0; c < Dv; c++) {
            const double v = keys->v[j * Dv + c];
            all[c] = fabs(v) > all[c] && isfinite(v) ? fabs(v) : all[c]; /* a tile's scale is over all of its keys */
            if (!keys->seen[j])
                continue;
            most[c] = fabs(v) > most[c] ? fabs(v) : most[c];
            row->out[c] += keys->weight[j] * v;
        }
    for (int64_t c = 0; c < Dv; c++) {
        const double step = keys->cold.on ? all[c] / 254 : 0;
        row->out[c] = mass == 0 ? (isnan(row->out[c]) ? NAN : 0) : row->out[c] / mass;
        row->out_error[c] = relative * most[c] + step;
        if (!(row->out_error[c] <= 2 * most[c] + step))
            row->out_error[c] = 2 * most[c] + step;
    }
}

void oracle_attend(oracle_keys *keys, int64_t h, int64_t i, double u, oracle_row *row)
{
    const apa_tensor *sinks = &keys->p->sinks;
    const double sink = sinks->dtype != APA_DTYPE_NONE ? repeated(sinks, keys->s.b, h, 0, 0) : -INFINITY;
    double mass = 0, top, delta;
    score_row(keys, h, i, u, row, &top, &delta);
    top = sink > top ? sink : top;
    for (int64_t j = 0; j < keys->s.keys; j++) {
        keys->weight[j] = keys->weight[j] == -INFINITY ? 0 : exp(keys->weight[j] - top);
        mass += keys->weight[j];
    }
    mass += sink == -INFINITY ? 0 : sink == top ? 1 : exp(sink - top);
    row->lse = mass == 0 ? -INFINITY : top + log(mass);
    const double grown = expm1(2 * delta), sums = ((double)keys->s.keys + 16) * u;
    double stepped = keys->cold.on && mass > 0 ? 2 * (grown + 1) * steps(keys) / (510 * mass) : 0;
    if (isnan(stepped)) /* scores so uncertain that nothing is known of P */
        stepped = INFINITY;
    average(keys, mass, grown + sums + stepped, row);
    row->lse_error = delta + sums + 8 * u * fabs(row->lse) + stepped;
}

double oracle_rounding(apa_dtype dtype, double x)
{
    switch (dtype) {
    case APA_DTYPE_F16:
        return fmax(fabs(x) * 0x1p-11, 0x1p-25);
    case APA_DTYPE_BF16:
        return fmax(fabs(x) * 0x1p-8, 0x1p-134);
    case APA_DTYPE_F32:
        return fmax(fabs(x) * 0x1p-24, 0x1p-150);
    default:
        return fabs(x) * 0x1p-53;
    }
}
