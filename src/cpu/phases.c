/* A clock around every kernel of the walk. See cpu/phases.h. */
#include "cpu/phases.h"

#include <stddef.h>

#ifndef __x86_64__
#ifndef __aarch64__
#include "core/context_internal.h"
#endif
#endif

uint64_t apa_cpu_ticks(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return (uint64_t)(apa_now_ms() * 1e6);
#endif
}

const char *apa_phase_name(int phase)
{
    static const char *const name[APA_PHASES] = {"prep",         "scores",     "softmax",      "verdict",
                                                 "values",       "exact_load", "exact_scores", "exact_softmax",
                                                 "exact_values", "other"};
    return phase < 0 || phase >= APA_PHASES ? NULL : name[phase];
}

/* Kernels know no caller, so the account at hand is the thread's. It is set for the length of a task alone. */
static _Thread_local apa_cpu_phases *at_hand;

static void spend(apa_phase phase, uint64_t since, double operations)
{
    at_hand->ticks[phase] += apa_cpu_ticks() - since;
    at_hand->operations[phase] += operations;
}

/* Two operations for each of the tile's keys, the registers' rows and `width` values. */
static double products(int n, int64_t width)
{
    return 2.0 * APA_CPU_TILE * APA_CPU_LANES * (double)n * (double)width;
}

static double exponentials(void)
{
    return (double)APA_CPU_TILE * APA_CPU_LANES;
}

static double element_bytes(apa_dtype dtype, int64_t n)
{
    return (double)n * (double)apa_dtype_bytes(dtype);
}

static bool timed_widen(apa_dtype dtype, const void *src, int64_t n, float *dst)
{
    const uint64_t since = apa_cpu_ticks();
    const bool finite = at_hand->kernels->widen(dtype, src, n, dst);
    spend(APA_PHASE_EXACT_LOAD, since, 0.0);
    at_hand->bytes[APA_PHASE_EXACT_LOAD] += element_bytes(dtype, n);
    return finite;
}

static void timed_load_k(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t D, int64_t Dp, float *k)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->load_k(dtype, src, stride, n, D, Dp, k);
    spend(APA_PHASE_EXACT_LOAD, since, 0.0);
    at_hand->bytes[APA_PHASE_EXACT_LOAD] += element_bytes(dtype, n * D);
}

static uint64_t timed_load_v(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t Dv, int64_t Dvp,
                             int64_t key, float *v)
{
    const uint64_t since = apa_cpu_ticks();
    const uint64_t poison = at_hand->kernels->load_v(dtype, src, stride, n, Dv, Dvp, key, v);
    spend(APA_PHASE_EXACT_LOAD, since, 0.0);
    at_hand->bytes[APA_PHASE_EXACT_LOAD] += element_bytes(dtype, n * Dv);
    at_hand->loaded = true;
    return poison;
}

static void timed_scores_f32(int n, const float *const *q, const float *k, int64_t Dp, float *s, float *maximum,
                             const apa_cpu_prefetch *prefetch)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->scores_f32(n, q, k, Dp, s, maximum, prefetch);
    spend(APA_PHASE_EXACT_SCORES, since, products(n, Dp));
}

static void timed_scores_bf16(int n, const uint32_t *const *q, const uint16_t *k, int64_t Dp, float *s, float *maximum,
                              const apa_cpu_prefetch *prefetch)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->scores_bf16(n, q, k, Dp, s, maximum, prefetch);
    spend(APA_PHASE_EXACT_SCORES, since, products(n, Dp));
    if (at_hand->loaded) /* no kernel of the table has seen these keys */
        at_hand->bytes[APA_PHASE_EXACT_LOAD] += element_bytes(APA_DTYPE_BF16, APA_CPU_TILE * Dp);
    at_hand->loaded = false;
}

static bool timed_softmax_f32(float *s, int n, float c, const apa_cpu_span *span, const float *maximum,
                              apa_cpu_state *state, float *alpha)
{
    const uint64_t since = apa_cpu_ticks();
    const bool moved = at_hand->kernels->softmax_f32(s, n, c, span, maximum, state, alpha);
    spend(APA_PHASE_EXACT_SOFTMAX, since, exponentials());
    at_hand->exact = true;
    return moved;
}

static void timed_pv_f32(int n, const float *p, const float *v, int64_t Dvp, float *const *o)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->pv_f32(n, p, v, Dvp, o);
    spend(APA_PHASE_EXACT_VALUES, since, products(n, Dvp));
}

static void timed_scores_few(apa_dtype dtype, const void *const *keys, int n, int64_t D, const apa_cpu_ahead *ahead,
                             int R, const float *q, float *s)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->scores_few(dtype, keys, n, D, ahead, R, q, s);
    spend(APA_PHASE_EXACT_SCORES, since, 2.0 * (double)(n * R) * (double)D);
    at_hand->bytes[APA_PHASE_EXACT_SCORES] += element_bytes(dtype, n * D);
}

static void timed_softmax_few(int R, float *s, float c, const apa_cpu_span *span, apa_cpu_state *state, float *alpha)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->softmax_few(R, s, c, span, state, alpha);
    spend(APA_PHASE_EXACT_SOFTMAX, since, (double)(APA_CPU_TILE * R));
}

static bool timed_pv_few(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const apa_cpu_ahead *ahead,
                         int R, const float *p, const float *alpha, bool check, float *o)
{
    const uint64_t since = apa_cpu_ticks();
    const bool finite = at_hand->kernels->pv_few(dtype, values, n, Dv, ahead, R, p, alpha, check, o);
    spend(APA_PHASE_EXACT_VALUES, since, 2.0 * (double)(n * R) * (double)Dv);
    at_hand->bytes[APA_PHASE_EXACT_VALUES] += element_bytes(dtype, n * Dv);
    return finite;
}

static void timed_scale_lanes(float *x, int64_t rows, const float *alpha)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->scale_lanes(x, rows, alpha);
    spend(at_hand->exact ? APA_PHASE_EXACT_VALUES : APA_PHASE_VALUES, since, 0.0);
}

static void timed_scores_i8(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                            const float *k_scale, int64_t Dp, float *s, float *maximum,
                            const apa_cpu_prefetch *prefetch)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->scores_i8(n, q8, k8, k8_bias, k_scale, Dp, s, maximum, prefetch);
    spend(APA_PHASE_SCORES, since, products(n, Dp));
    if (at_hand->k8 != k8)
        at_hand->bytes[APA_PHASE_SCORES] +=
            (double)(APA_CPU_TILE * (Dp + 8)); /* codes, and 8 bytes of scale and bias */
    at_hand->k8 = k8;
}

static void timed_max_i8(const float *s, int n, const apa_cpu_span *span, float *maximum)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->max_i8(s, n, span, maximum);
    spend(APA_PHASE_SCORES, since, 0.0);
}

static void timed_softmax_i8(const float *s, int n, const apa_cpu_span *span, const float *maximum,
                             const float *q_scale, uint8_t *p8, int32_t *sum)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->softmax_i8(s, n, span, maximum, q_scale, p8, sum);
    spend(APA_PHASE_SOFTMAX, since, exponentials());
}

static bool timed_look(apa_cpu_walk *walk, const float *maximum, float k_scale_max, float v_max, float *top)
{
    const uint64_t since = apa_cpu_ticks();
    const bool skip = at_hand->kernels->look(walk, maximum, k_scale_max, v_max, top);
    spend(APA_PHASE_VERDICT, since, 0.0);
    return skip;
}

static int timed_judge(apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *alpha,
                       float *p_scale)
{
    const uint64_t since = apa_cpu_ticks();
    const int judged = at_hand->kernels->judge(walk, top, sum, eps, alpha, p_scale);
    spend(APA_PHASE_VERDICT, since, 0.0);
    at_hand->exact = false;
    return judged;
}

static bool timed_judge_again(const apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *p_scale)
{
    const uint64_t since = apa_cpu_ticks();
    const bool hot = at_hand->kernels->judge_again(walk, top, sum, eps, p_scale);
    spend(APA_PHASE_VERDICT, since, 0.0);
    return hot;
}

static void timed_pv_i8(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale,
                        const float *const *p_scale, int64_t Dvp, float *const *o)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->pv_i8(n, p8, v8, v_scale, p_scale, Dvp, o);
    spend(APA_PHASE_VALUES, since, products(n, Dvp));
    if (at_hand->v8 != v8)
        at_hand->bytes[APA_PHASE_VALUES] += (double)((APA_CPU_TILE + 4) * Dvp); /* codes and scales */
    at_hand->v8 = v8;
}

/* ---- INT8 tiles of few rows: a block has one register, so every call reads its own tile ---- */

static void timed_scores_few_i8(int R, const uint8_t *q8, const int8_t *k8, const int32_t *k8_bias,
                                const float *k_scale, int64_t Dp, float *s, const apa_cpu_prefetch *prefetch)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->scores_few_i8(R, q8, k8, k8_bias, k_scale, Dp, s, prefetch);
    spend(APA_PHASE_SCORES, since, 2.0 * (double)(APA_CPU_TILE * R) * (double)Dp);
    at_hand->bytes[APA_PHASE_SCORES] += (double)(APA_CPU_TILE * (Dp + 8));
}

static void timed_max_few_i8(int R, const float *s, const apa_cpu_span *span, float *maximum)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->max_few_i8(R, s, span, maximum);
    spend(APA_PHASE_SCORES, since, 0.0);
}

static void timed_softmax_few_i8(int R, const float *s, const apa_cpu_span *span, const float *maximum,
                                 const float *q_scale, uint8_t *p8, int32_t *sum)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->softmax_few_i8(R, s, span, maximum, q_scale, p8, sum);
    spend(APA_PHASE_SOFTMAX, since, (double)(APA_CPU_TILE * R));
}

static void timed_pv_few_i8(int R, const uint8_t *p8, const int8_t *v8, const float *v_scale, const float *p_scale,
                            int64_t Dvp, float *o)
{
    const uint64_t since = apa_cpu_ticks();
    at_hand->kernels->pv_few_i8(R, p8, v8, v_scale, p_scale, Dvp, o);
    spend(APA_PHASE_VALUES, since, 2.0 * (double)(APA_CPU_TILE * R) * (double)Dvp);
    at_hand->bytes[APA_PHASE_VALUES] += (double)((APA_CPU_TILE + 4) * Dvp);
}

apa_cpu_kernels apa_cpu_phases_table(const apa_cpu_kernels *kernels)
{
    apa_cpu_kernels timed = *kernels;
    timed.widen = timed_widen;
    timed.load_k = timed_load_k;
    timed.load_v = timed_load_v;
    timed.scores_f32 = timed_scores_f32;
    timed.scores_bf16 = kernels->scores_bf16 != NULL ? timed_scores_bf16 : NULL;
    timed.softmax_f32 = timed_softmax_f32;
    timed.pv_f32 = timed_pv_f32;
    timed.scores_few = kernels->scores_few != NULL ? timed_scores_few : NULL;
    timed.softmax_few = kernels->softmax_few != NULL ? timed_softmax_few : NULL;
    timed.pv_few = kernels->pv_few != NULL ? timed_pv_few : NULL;
    if (kernels->scores_few_i8 != NULL) {
        timed.scores_few_i8 = timed_scores_few_i8;
        timed.max_few_i8 = timed_max_few_i8;
        timed.softmax_few_i8 = timed_softmax_few_i8;
        timed.pv_few_i8 = timed_pv_few_i8;
    }
    timed.scale_lanes = timed_scale_lanes;
    timed.scores_i8 = timed_scores_i8;
    timed.scores_beside_i8 = NULL; /* two phases at once: the walk takes them one by one, with the same bits */
    timed.max_i8 = timed_max_i8;
    timed.softmax_i8 = timed_softmax_i8;
    timed.look = timed_look;
    timed.judge = timed_judge;
    timed.judge_again = timed_judge_again;
    timed.pv_i8 = timed_pv_i8;
    return timed;
}

void apa_cpu_phases_begin(apa_cpu_phases *phases, const apa_cpu_kernels *kernels)
{
    phases->kernels = kernels;
    phases->k8 = phases->v8 = NULL;
    phases->began = apa_cpu_ticks();
    at_hand = phases;
}

/* Other is what no kernel took of the task. */
void apa_cpu_phases_end(apa_cpu_phases *phases)
{
    phases->ticks[APA_PHASE_OTHER] += apa_cpu_ticks() - phases->began;
    at_hand = NULL;
}

void apa_cpu_phases_add(const apa_cpu_phases *phases, double ticks_per_ms, apa_phase_cost *cost)
{
    double kernels = 0.0;
    for (int phase = 0; phase < APA_PHASES; phase++) {
        const double ms = (double)phases->ticks[phase] / ticks_per_ms;
        kernels += phase == APA_PHASE_OTHER ? 0.0 : ms;
        cost[phase].ms += phase == APA_PHASE_OTHER ? ms - kernels : ms;
        cost[phase].operations += phases->operations[phase];
        cost[phase].bytes += phases->bytes[phase];
    }
}
