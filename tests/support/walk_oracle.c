/* A second writing of the walk, from the formulas (docs/reference.md), made as unlike the engine as it can be: K and V
 * are dequantised to full arrays, nothing is tiled or rescaled, masses are absolute (2^s in long double, so no frame is
 * needed but for rounding P), and every format is a search through its table of values. */
#include "support/walk_oracle.h"

#include "support/problems.h"
#include "support/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { T = 64, MAX_ROWS = 64 };

/* ---- formats by search ---- */

static double ue4m3_value(int code)
{
    return code < 8 ? code / 512.0 : ldexp(1.0 + code % 8 / 8.0, code / 8 - 7);
}

static int ue4m3_nearest(double x)
{
    int best = 0;
    for (int c = 1; c <= 126; ++c) {
        const double d = fabs(x - ue4m3_value(c)), e = fabs(x - ue4m3_value(best));
        if (d > e)
            break; /* values rise */
        if (d < e || c % 2 == 0)
            best = c;
    }
    return best;
}

static double e2m1_nearest(double x)
{
    static const double value[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    int best = 0;
    for (int c = 1; c < 8; ++c) {
        const double d = fabs(fabs(x) - value[c]), e = fabs(fabs(x) - value[best]);
        if (d < e || (d == e && c % 2 == 0))
            best = c;
    }
    return x < 0 ? -value[best] : value[best];
}

static float largest(const float *x, int64_t n, int64_t stride)
{
    float top = 0;
    for (int64_t i = 0; i < n; ++i)
        top = fmaxf(top, fabsf(x[i * stride]));
    return top;
}

/* y = x after INT8, n values `stride` apart. */
static void round_int8(const float *x, double *y, int64_t n, int64_t stride)
{
    const float top = largest(x, n, stride);
    for (int64_t i = 0; i < n; ++i) {
        const float code = top == 0 ? 0 : fminf(127, fmaxf(-127, rintf(x[i * stride] * (127.0F / top))));
        y[i * stride] = (double)code * (double)(top / 127.0F);
    }
}

/* y = x after E4M3 with a given scale. Codes of E4M3 without the sign are those of UE4M3. */
static void round_e4m3(const float *x, double *y, int64_t n, int64_t stride, double scale)
{
    for (int64_t i = 0; i < n; ++i) {
        const double value = ue4m3_value(ue4m3_nearest(fabs((double)x[i * stride]) / scale)) * scale;
        y[i * stride] = x[i * stride] < 0 ? -value : value;
    }
}

static float block_error(const float *x, int64_t n, double scale)
{
    float error = 0;
    for (int64_t i = 0; i < n; ++i) {
        const float d = fabsf(x[i]) - (float)(fabs(e2m1_nearest((double)x[i] / scale)) * scale);
        error += d * d;
    }
    return error;
}

/* y = x after NVFP4 with a given tensor scale. */
static void round_nvfp4(const float *x, double *y, int64_t n, int64_t stride, float tensor, bool search)
{
    static const int offset[8] = {0, -1, 1, -2, 3, 4, 5, 6};
    for (int64_t i = 0; i < n; i += 16) {
        float u[16];
        const int64_t size = n - i < 16 ? n - i : 16;
        for (int64_t k = 0; k < size; ++k)
            u[k] = x[(i + k) * stride] / tensor;
        const float top = largest(u, size, 1);
        double best_scale = 0;
        float best = INFINITY;
        for (int k = 0; k < (search ? 8 : 1) && top > 0; ++k) {
            const int code = ue4m3_nearest((double)(top / 6.0F)) + offset[k];
            const double scale = ue4m3_value(code < 1 ? 1 : code > 126 ? 126 : code);
            const float error = block_error(u, size, scale);
            if (error < best) {
                best = error;
                best_scale = scale;
            }
        }
        for (int64_t k = 0; k < size; ++k)
            y[(i + k) * stride] =
                best_scale == 0 ? 0 : e2m1_nearest((double)u[k] / best_scale) * best_scale * (double)tensor;
    }
}

static float power_of_two_at_least(double x)
{
    double p = 0x1p-126;
    while (p < x)
        p *= 2;
    return (float)p;
}

/* ---- prep ---- */

typedef struct prepared {
    const apa_problem *p;
    const apa_recipe *recipe;
    int64_t b, hk, G, Sq, Skv, D, Dv, tiles;
    double scale;
    float *kf, *vf; /* prepared, FP32 */
    double *k, *v;  /* after the cold format */
    float *k_mean, *v_mean;
    float q[MAX_ROWS][1024]; /* of the group: prepared */
    double qc[MAX_ROWS][1024];
    float q_mean[MAX_ROWS][1024]; /* what smooth_q takes off, rotated */
} prepared;

static void transform(float *x, int64_t n)
{
    float y[1024];
    int64_t block = 1;
    for (; n % (2 * block) == 0; block *= 2) {
        for (int64_t i = 0; i < n; ++i)
            y[i] = (i & block) == 0 ? x[i] + x[i + block] : x[i - block] - x[i];
        memcpy(x, y, sizeof(float) * (size_t)n);
    }
    for (int64_t i = 0; i < n; ++i)
        x[i] *= (float)(1 / sqrt((double)block));
}

static void channel_means(const apa_tensor *x, const prepared *s, int64_t stride, float *mean)
{
    for (int64_t d = 0; d < x->shape[3]; ++d) {
        double total = 0, keys = 0;
        for (int64_t t = 0; t < s->tiles; t += stride) {
            double part = 0;
            for (int64_t j = t * T; j < s->Skv && j < t * T + T; ++j, ++keys)
                part += (double)(float)apa_test_get(x, s->b, s->hk, j, d);
            total += part;
        }
        mean[d] = (float)(total / keys);
    }
}

/* E4M3 as one scale for a tile has it, a power of two. */
static void round_tiles(const float *x, double *y, int64_t rows, int64_t dim)
{
    for (int64_t j = 0; j < rows; j += T) {
        const int64_t n = (rows - j < T ? rows - j : T) * dim;
        round_e4m3(x + j * dim, y + j * dim, n, 1,
                   (double)power_of_two_at_least((double)(largest(x + j * dim, n, 1) / 448.0F)));
    }
}

static void prepare_head(prepared *s)
{
    const bool nvfp4 = s->recipe->cold_format == APA_COLD_FORMAT_NVFP4,
               search = s->recipe->scale_search == APA_TOGGLE_ON;
    if (s->recipe->smooth_k == APA_TOGGLE_ON)
        channel_means(&s->p->k, s, s->recipe->smooth_k_stride, s->k_mean);
    if (s->recipe->smooth_v == APA_TOGGLE_ON)
        channel_means(&s->p->v, s, 1, s->v_mean);
    for (int64_t j = 0; j < s->Skv; ++j) {
        for (int64_t d = 0; d < s->D; ++d)
            s->kf[j * s->D + d] = (float)apa_test_get(&s->p->k, s->b, s->hk, j, d) - s->k_mean[d];
        if (s->recipe->hadamard == APA_TOGGLE_ON)
            transform(s->kf + j * s->D, s->D);
        for (int64_t c = 0; c < s->Dv; ++c)
            s->vf[j * s->Dv + c] = (float)apa_test_get(&s->p->v, s->b, s->hk, j, c) - s->v_mean[c];
    }
    if (s->recipe->cold_format == APA_COLD_FORMAT_E4M3) {
        round_tiles(s->kf, s->k, s->Skv, s->D);
        round_tiles(s->vf, s->v, s->Skv, s->Dv);
        return;
    }
    const float ks = power_of_two_at_least(4.0 * (double)largest(s->kf, s->Skv * s->D, 1) / 2688.0);
    const float vs = power_of_two_at_least(4.0 * (double)largest(s->vf, s->Skv * s->Dv, 1) / 2688.0);
    for (int64_t j = 0; j < s->Skv; ++j)
        if (nvfp4)
            round_nvfp4(s->kf + j * s->D, s->k + j * s->D, s->D, 1, ks, search);
        else
            round_int8(s->kf + j * s->D, s->k + j * s->D, s->D, 1);
    for (int64_t t = 0; t < s->tiles; ++t)
        for (int64_t c = 0; c < s->Dv; ++c) {
            const int64_t at = t * T * s->Dv + c, n = s->Skv - t * T < T ? s->Skv - t * T : T;
            if (nvfp4)
                round_nvfp4(s->vf + at, s->v + at, n, s->Dv, vs, search);
            else
                round_int8(s->vf + at, s->v + at, n, s->Dv);
        }
}

/* The mean of a query's block of 128, or of its head: zeros where there is none. */
static void query_mean(const prepared *s, int64_t h, int64_t i, float *mean)
{
    const int64_t length = s->recipe->q_mean == APA_Q_MEAN_HEAD ? s->Sq : 128, first = i / length * length;
    const int64_t end = first + length < s->Sq ? first + length : s->Sq;
    for (int64_t d = 0; d < s->D; ++d) {
        double sum = 0, part = 0;
        for (int64_t j = first; j < end && s->recipe->smooth_q == APA_TOGGLE_ON; ++j) {
            part += (double)(float)apa_test_get(&s->p->q, s->b, h, j, d);
            if (j % 128 == 127 || j == end - 1) {
                sum += part;
                part = 0;
            }
        }
        mean[d] = (float)(sum / (double)(end - first));
    }
}

/* x = query i of head h, smoothed and rotated. */
static void smoothed_query(const prepared *s, int64_t h, int64_t i, const float *mean, float *x)
{
    for (int64_t d = 0; d < s->D; ++d)
        x[d] = (float)apa_test_get(&s->p->q, s->b, h, i, d) - mean[d];
    if (s->recipe->hadamard == APA_TOGGLE_ON)
        transform(x, s->D);
}

/* The scale that 32 queries share. */
static double e4m3_query_scale(const prepared *s, int64_t h, int64_t i, const float *mean)
{
    float top = 0, x[1024];
    for (int64_t j = i / 32 * 32; j < s->Sq && j < i / 32 * 32 + 32; ++j) {
        smoothed_query(s, h, j, mean, x);
        top = fmaxf(top, largest(x, s->D, 1));
    }
    return (double)power_of_two_at_least((double)(top / 448.0F));
}

static void prepare_q(prepared *s, int r, int64_t h, int64_t i)
{
    static const float none[1024];
    float rest[1024];
    double term[1024];
    smoothed_query(s, h, i, none, s->q[r]);
    query_mean(s, h, i, s->q_mean[r]);
    smoothed_query(s, h, i, s->q_mean[r], rest);
    memset(s->qc[r], 0, sizeof s->qc[r]);
    if (s->recipe->cold_format == APA_COLD_FORMAT_E4M3)
        round_e4m3(rest, s->qc[r], s->D, 1, e4m3_query_scale(s, h, i, s->q_mean[r]));
    if (s->recipe->hadamard == APA_TOGGLE_ON)
        transform(s->q_mean[r], s->D);
    if (s->recipe->cold_format == APA_COLD_FORMAT_E4M3)
        return;
    const float scale = largest(rest, s->D, 1) / 2688.0F;
    for (int k = 0; k < s->recipe->q_terms; ++k) {
        if (s->recipe->cold_format == APA_COLD_FORMAT_NVFP4)
            round_nvfp4(rest, term, s->D, 1, scale, s->recipe->scale_search == APA_TOGGLE_ON);
        else
            round_int8(rest, term, s->D, 1);
        for (int64_t d = 0; d < s->D; ++d) {
            s->qc[r][d] += term[d];
            rest[d] = (float)((double)rest[d] - term[d]);
        }
    }
}

/* ---- the walk of a group ---- */

typedef struct group {
    prepared *s;
    int rows;
    int64_t i[MAX_ROWS], h[MAX_ROWS];
    double m[MAX_ROWS];          /* cold frame */
    double c[MAX_ROWS];          /* candidate */
    double s2[MAX_ROWS][T];      /* scores in log2 units, -inf where unseen */
    long double pq[MAX_ROWS][T]; /* absolute probabilities after rounding */
    long double mass[MAX_ROWS];  /* ℓ_t */
    long double lambda[MAX_ROWS];
    long double l[MAX_ROWS], o[MAX_ROWS][1024]; /* all cold tiles, absolute */
} group;

static bool sees_any(const group *g, int r, int64_t t)
{
    bool any = false;
    for (int64_t j = t * T; j < g->s->Skv && j < t * T + T; ++j)
        any |= g->i[r] < g->s->Sq && apa_test_sees(g->s->p, g->i[r], j);
    return any;
}

static bool sees_all(const group *g, int r, int64_t t)
{
    bool all = g->i[r] < g->s->Sq;
    for (int64_t j = t * T; j < g->s->Skv && j < t * T + T; ++j)
        all = all && apa_test_sees(g->s->p, g->i[r], j);
    return all;
}

static void round_p_nvfp4(group *g, int r)
{
    const apa_recipe *recipe = g->s->recipe;
    for (int b = 0; b < T; b += 16) {
        double p[16], top = 0, scale;
        for (int j = 0; j < 16; ++j) {
            p[j] = exp2(g->s2[r][b + j] - g->c[r] - recipe->lazy_tau);
            top = fmax(top, p[j]);
        }
        if (recipe->p_scale == APA_P_SCALE_POW2) {
            for (scale = 0x1p-6; scale < 256 * top;)
                scale *= 2;
        } else {
            int code = 8;
            while (ue4m3_value(code) < 256 * top)
                ++code;
            scale = ue4m3_value(code);
        }
        for (int j = 0; j < 16; ++j)
            g->pq[r][b + j] = (long double)(e2m1_nearest(p[j] * 1536 / scale) * scale / 1536) *
                              exp2l((long double)(g->c[r] + recipe->lazy_tau));
    }
}

/* Codes of E4M3 straight from the scores: eight to an octave. */
static void round_p_direct(group *g, int r, int64_t t, double top)
{
    static const double turn[8] = {0, 0, .5, .5, .25, .25, .75, .75};
    const double phase = g->s->recipe->p_phase == APA_TOGGLE_ON ? turn[t % 8] : 0;
    double frame = floor(top) - 1 + phase;
    while (frame < top)
        ++frame;
    for (int j = 0; j < T; ++j) {
        const double steps = 8 * (g->s2[r][j] - frame) + 120;
        const int code = steps < 0.5 ? 0 : (int)floor(steps + 0.5);
        g->pq[r][j] = (long double)(ue4m3_value(code) * exp2(-8 - .455 / 8)) * exp2l((long double)frame);
    }
}

static void score_tile(group *g, int64_t t)
{
    prepared *s = g->s;
    const bool nvfp4 = s->recipe->cold_format == APA_COLD_FORMAT_NVFP4;
    double top[MAX_ROWS];
    bool beyond = false;
    for (int r = 0; r < g->rows; ++r) {
        top[r] = -INFINITY;
        for (int64_t j = 0; j < T; ++j) {
            g->s2[r][j] = -INFINITY;
            g->pq[r][j] = 0;
            if (g->i[r] >= s->Sq || t * T + j >= s->Skv || !apa_test_sees(s->p, g->i[r], t * T + j))
                continue;
            double dot = 0, delta = 0;
            for (int64_t d = 0; d < s->D; ++d) {
                dot += g->s->qc[r][d] * s->k[(t * T + j) * s->D + d];
                delta += (double)s->q_mean[r][d] * (double)s->kf[(t * T + j) * s->D + d];
            }
            g->s2[r][j] = s->scale * (dot + (double)(float)delta) / log(2.0);
            top[r] = fmax(top[r], g->s2[r][j]);
        }
        beyond |= top[r] > g->m[r] + s->recipe->lazy_tau;
    }
    for (int r = 0; r < g->rows; ++r) {
        g->c[r] = beyond ? fmax(g->m[r], top[r]) : g->m[r];
        g->mass[r] = 0;
        if (top[r] == -INFINITY)
            continue;
        const bool e4m3 = s->recipe->cold_format == APA_COLD_FORMAT_E4M3;
        if (nvfp4)
            round_p_nvfp4(g, r);
        if (e4m3)
            round_p_direct(g, r, t, top[r]);
        for (int j = 0; j < T; ++j) {
            if (!nvfp4 && !e4m3)
                g->pq[r][j] = (long double)(rint(255 * exp2(g->s2[r][j] - top[r])) / 255) * exp2l((long double)top[r]);
            g->mass[r] += g->pq[r][j];
        }
    }
}

static void add_cold(group *g, int64_t t)
{
    for (int r = 0; r < g->rows; ++r) {
        g->m[r] = g->c[r];
        g->l[r] += g->mass[r];
        for (int64_t c = 0; c < g->s->Dv; ++c)
            for (int64_t j = 0; j < T && t * T + j < g->s->Skv; ++j)
                g->o[r][c] +=
                    g->pq[r][j] * (long double)(g->s->v[(t * T + j) * g->s->Dv + c] + (double)g->s->v_mean[c]);
    }
}

static long double bound(const group *g, int r, int64_t t)
{
    const prepared *s = g->s;
    const int64_t n = s->Skv - t * T < T ? s->Skv - t * T : T;
    double dot = 0;
    if (s->recipe->lambda_bound != APA_LAMBDA_BOUND_JENSEN || !sees_all(g, r, t))
        return 0;
    for (int64_t j = t * T; j < t * T + n; ++j)
        for (int64_t d = 0; d < s->D; ++d)
            dot += (double)g->s->q[r][d] * (double)s->kf[j * s->D + d];
    return (long double)n * expl((long double)(s->scale * dot / (double)n));
}

/* The exact part of a row over its hot tiles joins, and the row is written. */
static void finish(const group *g, int r, const uint8_t *hot, double *out, double *lse)
{
    const prepared *s = g->s;
    long double l = g->l[r], o[1024], shift = 0;
    memcpy(o, g->o[r], sizeof o);
    for (int64_t d = 0; d < s->D; ++d)
        shift += (long double)(s->scale * apa_test_get(&s->p->q, s->b, g->h[r], g->i[r], d) * (double)s->k_mean[d]);
    for (int64_t j = 0; j < s->Skv; ++j) {
        long double dot = 0;
        if (!hot[j / T] || !apa_test_sees(s->p, g->i[r], j))
            continue;
        for (int64_t d = 0; d < s->D; ++d)
            dot += (long double)(apa_test_get(&s->p->q, s->b, g->h[r], g->i[r], d) *
                                 apa_test_get(&s->p->k, s->b, s->hk, j, d));
        const long double w = expl((long double)s->scale * dot - shift);
        l += w;
        for (int64_t c = 0; c < s->Dv; ++c)
            o[c] += w * (long double)apa_test_get(&s->p->v, s->b, s->hk, j, c);
    }
    for (int64_t c = 0; c < s->Dv; ++c)
        out[c] = l == 0 ? 0 : (double)(o[c] / l);
    *lse = l == 0 ? -INFINITY : (double)(logl(l) + shift);
}

/* A share of exactly 0 is no matter of rounding, and ε >= 1 asks nobody. */
static void note_share(double eps, double share, double *closest)
{
    if (share > 0 && eps < 1)
        *closest = fmin(*closest, fabs(share - eps));
}

/* Logits so large that an INT8 score may be off by 32 log2 units: (|q|max·sqrt(D) + |q|)·|k|max/127. */
static bool beyond_int8(const prepared *s, int r)
{
    double squares = 0;
    for (int64_t d = 0; d < s->D; ++d)
        squares += s->qc[r][d] * s->qc[r][d];
    const double reach = (double)largest(s->q[r], s->D, 1) * sqrt((double)s->D) + sqrt(squares);
    const double error = reach * (double)largest(s->kf, s->Skv * s->D, 1) / 127;
    return s->recipe->cold_format == APA_COLD_FORMAT_INT8 && s->recipe->force == APA_FORCE_NONE && s->recipe->eps < 1 &&
           error * fabs(s->scale) * 1.4426950408889634 > 32;
}

static void walk_group(group *g, double *out, double *lse, uint8_t *verdicts, double *closest)
{
    prepared *s = g->s;
    const apa_recipe *recipe = s->recipe;
    int64_t visit[4096], visits = 0;
    uint8_t hot[4096] = {0};
    long double(*mass)[MAX_ROWS] = calloc((size_t)s->tiles + 1, sizeof *mass);
    int64_t most = 0;
    bool seen[4096] = {false}, beyond = false, early = recipe->early_tiles > 0 && recipe->eps < 1;
    assert_non_null(mass);
    assert_true(s->tiles <= 4096);
    for (int r = 0; r < g->rows; ++r) {
        int64_t n = 0;
        prepare_q(s, r, g->i[r] < s->Sq ? g->h[r] : 0, g->i[r] < s->Sq ? g->i[r] : 0);
        g->m[r] = -INFINITY;
        g->lambda[r] = g->l[r] = 0;
        memset(g->o[r], 0, sizeof g->o[r]);
        for (int64_t t = 0; t < s->tiles; ++t)
            if (sees_any(g, r, t)) {
                seen[t] = true;
                ++n;
            }
        most = n > most ? n : most;
        early = early && n <= recipe->early_tiles;
        beyond = beyond || (n > 0 && beyond_int8(s, r));
    }
    early = early || beyond;
    double eps = recipe->eps;
    if (recipe->eps_by == APA_EPS_BY_ROW && eps > 0 && eps < 1 && most > 0) {
        const double limit = eps > 0.1 ? eps : 0.1;
        eps *= sqrt((double)s->tiles / (double)most);
        eps = eps > limit ? limit : eps;
    }
    if (recipe->order == APA_ORDER_SINK_BACKWARD && s->tiles > 0 && seen[0])
        visit[visits++] = 0;
    for (int64_t k = 0; k < s->tiles; ++k) {
        const int64_t t = recipe->order == APA_ORDER_FORWARD ? k : s->tiles - 1 - k;
        if (seen[t] && !(recipe->order == APA_ORDER_SINK_BACKWARD && t == 0))
            visit[visits++] = t;
    }
    for (int64_t k = 0; k < visits; ++k) {
        const int64_t t = visit[k];
        if (early) {
            hot[t] = 1;
            continue;
        }
        score_tile(g, t);
        for (int r = 0; r < g->rows; ++r) {
            long double unseen = 0;
            if (!sees_any(g, r, t))
                continue;
            for (int64_t later = k + 1; later < visits; ++later)
                unseen += bound(g, r, visit[later]);
            mass[t][r] = g->mass[r];
            const double share = (double)(g->mass[r] / (g->lambda[r] + unseen + g->mass[r]));
            note_share(eps, share, closest);
            hot[t] |= eps < 1 && share > eps;
            g->lambda[r] += g->mass[r];
        }
        if (!hot[t])
            add_cold(g, t);
        else
            for (int r = 0; r < g->rows; ++r)
                g->m[r] = fmax(g->m[r], g->c[r] - recipe->frame_drop);
    }
    for (int64_t k = 0; k < visits && recipe->second_look == APA_TOGGLE_ON && !early; ++k) {
        bool stays = false;
        if (!hot[visit[k]])
            continue;
        for (int r = 0; r < g->rows; ++r) {
            if (!sees_any(g, r, visit[k]))
                continue;
            const double share = (double)(mass[visit[k]][r] / g->lambda[r]);
            note_share(eps, share, closest);
            stays |= share > eps;
        }
        if (stays)
            continue;
        hot[visit[k]] = 0;
        score_tile(g, visit[k]);
        add_cold(g, visit[k]);
    }
    for (int r = 0; r < g->rows; ++r) {
        if (g->i[r] >= s->Sq)
            continue;
        const int64_t pair = (s->b * s->p->q.shape[1] + g->h[r]) * s->Sq + g->i[r];
        finish(g, r, hot, out + pair * s->Dv, lse + pair);
        for (int64_t t = 0; t < s->tiles; ++t)
            verdicts[pair * s->tiles + t] = sees_any(g, r, t) ? hot[t] : APA_VERDICT_INVISIBLE;
    }
    free(mass);
}

static void walk_head(prepared *s, group *g, double *out, double *lse, uint8_t *verdicts, double *closest)
{
    const int64_t n = s->recipe->group;
    g->s = s;
    if (s->recipe->packing == APA_PACKING_HEAD) {
        for (int64_t i = 0; i < s->Sq; i += n)
            for (int64_t head = 0; head < s->G; ++head) {
                g->rows = (int)n;
                for (int64_t r = 0; r < n; ++r) {
                    g->i[r] = i + r;
                    g->h[r] = s->hk * s->G + head;
                }
                walk_group(g, out, lse, verdicts, closest);
            }
        return;
    }
    for (int64_t first = 0; first < s->Sq * s->G; first += n) {
        g->rows = 0;
        for (int64_t r = first; r < first + n && r < s->Sq * s->G; ++r) {
            g->i[g->rows] = r / s->G;
            g->h[g->rows++] = s->hk * s->G + r % s->G;
        }
        walk_group(g, out, lse, verdicts, closest);
    }
}

void apa_test_walk_oracle(const apa_problem *p, const apa_recipe *recipe, double *out, double *lse, uint8_t *verdicts,
                          double *closest)
{
    prepared *s = calloc(1, sizeof *s);
    group *g = calloc(1, sizeof *g);
    assert_true(s != NULL && g != NULL);
    *closest = INFINITY;
    for (int64_t bh = 0; bh < p->k.shape[0] * p->k.shape[1]; ++bh) {
        memset(s, 0, sizeof *s);
        s->p = p;
        s->recipe = recipe;
        s->b = bh / p->k.shape[1];
        s->hk = bh % p->k.shape[1];
        s->G = p->q.shape[1] / p->k.shape[1];
        s->Sq = p->q.shape[2];
        s->Skv = p->k.shape[2];
        s->D = p->k.shape[3];
        s->Dv = p->v.shape[3];
        s->tiles = (s->Skv + T - 1) / T;
        s->scale = isnan(p->softmax_scale) ? 1 / sqrt((double)s->D) : p->softmax_scale;
        s->kf = calloc((size_t)(s->Skv * s->D + 1), sizeof(float));
        s->vf = calloc((size_t)(s->Skv * s->Dv + 1), sizeof(float));
        s->k = calloc((size_t)(s->Skv * s->D + 1), sizeof(double));
        s->v = calloc((size_t)(s->Skv * s->Dv + 1), sizeof(double));
        s->k_mean = calloc((size_t)s->D, sizeof(float));
        s->v_mean = calloc((size_t)s->Dv, sizeof(float));
        assert_true(s->kf && s->vf && s->k && s->v && s->k_mean && s->v_mean);
        prepare_head(s);
        walk_head(s, g, out, lse, verdicts, closest);
        free(s->kf);
        free(s->vf);
        free(s->k);
        free(s->v);
        free(s->k_mean);
        free(s->v_mean);
    }
    free(s);
    free(g);
}
