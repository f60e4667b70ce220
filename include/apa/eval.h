/* libapa: what a method does to the output, over every pair.
 *
 * A pair is one output vector: a (query position, query head). Every figure here is over all pairs; nothing is sampled. */
#ifndef APA_EVAL_H
#define APA_EVAL_H

#include "apa/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Errors of an output x against a truth y. cos = x·y / (|x||y|); two zero vectors have cosine 1, one zero vector cosine 0. A
 * pair with a NaN or Inf in x where y is finite counts as cosine -1 with infinite error, and in non_finite. */
typedef struct apa_error {
    size_t size; /* sizeof(apa_error), set by the functions below */
    int64_t pairs;
    double pooled_cos; /* all outputs as one vector */
    double mean_cos, min_cos;
    int64_t min_cos_pair[3];              /* batch, head, row of the worst cosine (first of equals) */
    int64_t lt_0_99, lt_0_9, lt_0;        /* pairs with a cosine below */
    double rel_l2;                        /* |x - y| / |y| over all outputs; 0 when both are all zero */
    double rel_l2_max;                    /* the worst pair's (pairs with y = 0: 0 if x = 0, else inf) */
    int64_t rel_l2_max_pair[3];           /* batch, head, row */
    double max_abs, mean_abs;             /* over all elements */
    double norm_ratio_min, norm_ratio_max; /* |x|/|y| over pairs with y != 0: magnitude, which a cosine does not see */
    double lse_max_abs;                   /* max |lse_x - lse_y|, natural log; equal infinities differ by 0; NaN if no LSE */
    int64_t non_finite;                   /* pairs with a NaN or Inf in x and none in y */
} apa_error;

/* Compares out (and lse, dtype NONE when not there) with truth, [B,H,S,Dv] (lse [B,H,S,1]), any dtypes. Sums in double in a
 * fixed order. Errors: INVALID_ARGUMENT (shapes disagree). */
APA_EXPORT apa_status apa_error_measure(apa_context *context, const apa_tensor *out, const apa_tensor *lse,
                                        const apa_tensor *truth, const apa_tensor *truth_lse, apa_error *error);

/* Called with 0 … 1 as work goes on, from the calling thread. */
typedef void (*apa_progress)(void *user, const char *phase, double fraction);

/* Exact attention in double: the reference engine's exact method. out [B,Hq,Sq,Dv] f64, lse [B,Hq,Sq,1] f64 (dtype NONE: not
 * wanted); the problem's own out and lse are not used. progress may be NULL; no bit depends on it. Errors: as
 * apa_attention(). */
APA_EXPORT apa_status apa_truth_compute(apa_context *context, const apa_problem *problem, const apa_tensor *out,
                                        const apa_tensor *lse, apa_progress progress, void *progress_user);

typedef struct apa_evaluation_options {
    size_t size;        /* sizeof(apa_evaluation_options), set by apa_evaluation_options_init() */
    const char *engine; /* for the method and for its exact counterpart; NULL = "auto" */
    int32_t repeats;    /* timed runs of method and exact, interleaved; at least 1 (default 3); medians are reported */
    /* f64 truth computed before, [B,Hq,Sq,Dv] and [B,Hq,Sq,1] (dtype NONE: the reference engine computes it). Lets several
     * methods share one truth. */
    apa_tensor truth, truth_lse;
    int32_t time_exact; /* 1 (default): time the same engine's exact method too; 0: exact_ms is NaN */
    apa_progress progress; /* may be NULL */
    void *progress_user;
} apa_evaluation_options;

APA_EXPORT void apa_evaluation_options_init(apa_evaluation_options *options);

typedef struct apa_evaluation {
    size_t size; /* sizeof(apa_evaluation) */
    apa_error error;
    apa_statistics statistics; /* of the last timed run */
    double prep_ms, attention_ms, exact_ms; /* medians */
    double speedup;                         /* exact_ms / (prep_ms + attention_ms); NaN without exact_ms */
} apa_evaluation;

/* Runs a method on a problem's inputs (its out and lse may have dtype NONE: not needed) and measures it against exact
 * attention in double. Errors: as apa_attention(). */
APA_EXPORT apa_status apa_evaluate(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                   const apa_evaluation_options *options, apa_evaluation *evaluation);

#ifdef __cplusplus
}
#endif
#endif
