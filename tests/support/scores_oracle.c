/* See scores_oracle.h. */
#include "support/scores_oracle.h"

#include "support/test.h"

#include <math.h>
#include <stdlib.h>

/* One sequence of a problem: where its rows and keys lie. */
typedef struct sequence {
    const apa_problem *p;
    int64_t b, Sq, Skv, q_batch, q_row, k_batch, k_row, offset;
} sequence;

static sequence sequence_at(const apa_problem *p, int64_t b)
{
    sequence s = {.p = p, .b = b, .Sq = p->q.shape[2], .Skv = p->k.shape[2], .q_batch = b, .k_batch = b};
    if (p->cu_seqlens_q != NULL) {
        s.q_batch = 0;
        s.q_row = p->cu_seqlens_q[b];
        s.Sq = p->cu_seqlens_q[b + 1] - s.q_row;
    }
    if (p->cu_seqlens_k != NULL) {
        s.k_batch = 0;
        s.k_row = p->cu_seqlens_k[b];
        s.Skv = p->cu_seqlens_k[b + 1] - s.k_row;
    }
    if (p->seqused_k != NULL)
        s.Skv = p->seqused_k[b];
    s.offset = p->q_offset == APA_Q_OFFSET_DEFAULT ? s.Skv - s.Sq : p->q_offset;
    if (p->causal == APA_CAUSAL_TOP_LEFT)
        s.offset = 0;
    if (p->q_offsets != NULL)
        s.offset = p->q_offsets[b];
    return s;
}

static double key_at(const sequence *s, const apa_tensor *x, int64_t h, int64_t j, int64_t d)
{
    const apa_problem *p = s->p;
    if (p->block_table == NULL)
        return apa_test_get(x, s->k_batch, h, s->k_row + j, d);
    const int64_t size = p->k.shape[2];
    return apa_test_get(x, p->block_table[s->b * p->block_table_stride + j / size], h, j % size, d);
}

static double broadcast(const apa_tensor *x, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const int64_t at[4] = {b, h, i, j};
    int64_t from[4];
    for (int axis = 0; axis < 4; axis++)
        from[axis] = x->shape[axis] == 1 ? 0 : at[axis];
    if (x->dtype == APA_DTYPE_BOOL)
        return ((const uint8_t *)
                    x->data)[from[0] * x->stride[0] + from[1] * x->stride[1] + from[2] * x->stride[2] + from[3]];
    return apa_test_get(x, from[0], from[1], from[2], from[3]);
}

/* The logit of a key that the row sees; false when it doesn't. */
static bool logit(const sequence *s, int64_t h, int64_t i, int64_t j, const double *q, double *value)
{
    const apa_problem *p = s->p;
    const long double apart = (long double)i + (long double)s->offset - (long double)j;
    if ((p->causal != APA_CAUSAL_NONE && apart < 0) || (p->window_left >= 0 && apart > (long double)p->window_left) ||
        (p->window_right >= 0 && -apart > (long double)p->window_right))
        return false;
    double bias = 0;
    if (p->attn_mask.dtype != APA_DTYPE_NONE) {
        const double mask = broadcast(&p->attn_mask, s->q_batch, h, s->q_row + i, j);
        if (p->attn_mask.dtype == APA_DTYPE_BOOL ? mask == 0 : mask == -INFINITY)
            return false;
        if (p->attn_mask.dtype != APA_DTYPE_BOOL)
            bias = mask * (p->mask_slopes.dtype != APA_DTYPE_NONE ? broadcast(&p->mask_slopes, 0, h, 0, 0) : 1.0);
    }
    const int64_t D = p->q.shape[3], hk = h / (p->q.shape[1] / p->k.shape[1]);
    double dot = 0;
    for (int64_t d = 0; d < D; d++)
        dot += q[d] * key_at(s, &p->k, hk, j, d);
    dot *= isnan(p->softmax_scale) ? 1.0 / sqrt((double)D) : p->softmax_scale;
    if (p->softcap > 0)
        dot = p->softcap * tanh(dot / p->softcap);
    if (p->alibi_slopes.dtype != APA_DTYPE_NONE)
        dot -= broadcast(&p->alibi_slopes, s->b, h, 0, 0) * fabs((double)apart);
    *value = dot + bias;
    return true;
}

static void row(const sequence *s, int64_t h, int64_t i, double *weight, bool *seen, double *out, double *lse,
                double *largest)
{
    const apa_problem *p = s->p;
    const int64_t D = p->q.shape[3], Dv = p->v.shape[3], hk = h / (p->q.shape[1] / p->k.shape[1]);
    const double sink = p->sinks.dtype != APA_DTYPE_NONE ? broadcast(&p->sinks, 0, h, 0, 0) : -INFINITY;
    double q[1024], top = sink, sum = 0;
    for (int64_t d = 0; d < D; d++)
        q[d] = apa_test_get(&p->q, s->q_batch, h, s->q_row + i, d);
    for (int64_t j = 0; j < s->Skv; j++) {
        seen[j] = logit(s, h, i, j, q, &weight[j]);
        if (seen[j])
            top = fmax(top, weight[j]);
        if (seen[j] && largest != NULL && isfinite(weight[j]))
            *largest = fmax(*largest, fabs(weight[j]));
    }
    for (int64_t j = 0; j < s->Skv; j++) {
        weight[j] = !seen[j] || weight[j] == -INFINITY ? 0.0 : exp(weight[j] - top);
        sum += weight[j];
    }
    if (sink != -INFINITY)
        sum += exp(sink - top);
    for (int64_t c = 0; c < Dv; c++) {
        out[c] = 0;
        for (int64_t j = 0; j < s->Skv; j++)
            if (seen[j])
                out[c] += weight[j] * key_at(s, &p->v, hk, j, c);
        if (sum != 0)
            out[c] /= sum;
    }
    *lse = sum == 0 ? -INFINITY : top + log(sum);
}

void apa_test_scores_oracle(const apa_problem *p, double *out, double *lse, double *largest)
{
    const bool packed = p->cu_seqlens_q != NULL || p->cu_seqlens_k != NULL;
    const int64_t B = packed ? p->batch : p->q.shape[0], Hq = p->q.shape[1], rows = p->q.shape[2], Dv = p->v.shape[3];
    if (largest != NULL)
        *largest = 0;
    for (int64_t b = 0; b < B; b++) {
        const sequence s = sequence_at(p, b);
        double *weight = malloc(sizeof *weight * (size_t)(s.Skv + 1));
        bool *seen = malloc(sizeof *seen * (size_t)(s.Skv + 1));
        assert_true(weight != NULL && seen != NULL);
        for (int64_t h = 0; h < Hq; h++)
            for (int64_t i = 0; i < s.Sq; i++) {
                const int64_t at = (s.q_batch * Hq + h) * rows + s.q_row + i;
                row(&s, h, i, weight, seen, out + at * Dv, lse + at, largest);
            }
        free(weight);
        free(seen);
    }
}
