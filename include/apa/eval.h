/* libapa: what a method does to the output, over every pair.
 *
 * A pair is one output vector: a (query position, query head). Every figure here is over all pairs; nothing is sampled.
 */
#ifndef APA_EVAL_H
#define APA_EVAL_H

#include "apa/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Errors of an output x against a truth y. cos = x·y / (|x||y|); two zero vectors have cosine 1, one zero vector cosine
 * 0. A pair with a NaN or Inf in x where y is finite counts as cosine -1 with infinite error, and in non_finite. A pair
 * with a NaN or Inf in y has no truth to be compared with: it counts in truth_not_finite and in `pairs`, and is left
 * out of every other figure; where no pair is left, those that are means, extremes or ratios are NaN. */
typedef struct apa_error {
    size_t size;       /* sizeof(apa_error), set by the functions below */
    int64_t pairs;     /* all of them */
    double pooled_cos; /* all outputs as one vector */
    double mean_cos, min_cos;
    int64_t min_cos_pair[3];               /* batch, head, row of the worst cosine (first of equals) */
    int64_t lt_0_99, lt_0_9, lt_0;         /* pairs with a cosine below */
    double rel_l2;                         /* |x - y| / |y| over all outputs; 0 when both are all zero */
    double rel_l2_max;                     /* the worst pair's (pairs with y = 0: 0 if x = 0, else inf) */
    int64_t rel_l2_max_pair[3];            /* batch, head, row */
    double max_abs, mean_abs;              /* over all elements */
    double norm_ratio_min, norm_ratio_max; /* |x|/|y| over pairs with y != 0: magnitude, which a cosine does not see */
    double lse_max_abs; /* max |lse_x - lse_y|, natural log, where lse_y is no NaN; equal infinities differ by 0; NaN if
                           no LSE */
    int64_t non_finite; /* pairs with a NaN or Inf in x and none in y */
    int64_t truth_not_finite; /* pairs with a NaN or Inf in y */
} apa_error;

/* Compares out (and lse, dtype NONE when not there) with truth, [B,H,S,Dv] (lse [B,H,S,1]), any dtypes. Sums in double
 * in a fixed order. Errors: INVALID_ARGUMENT (shapes disagree). */
APA_EXPORT apa_status apa_error_measure(apa_context *context, const apa_tensor *out, const apa_tensor *lse,
                                        const apa_tensor *truth, const apa_tensor *truth_lse, apa_error *error);

/* Called with 0 … 1 as work goes on, from the calling thread. */
typedef void (*apa_progress)(void *user, const char *phase, double fraction);

/* Exact attention in double: the reference engine's exact method. out [B,Hq,Sq,Dv] f64, lse [B,Hq,Sq,1] f64 (dtype
 * NONE: not wanted); the problem's own out and lse are not used. progress may be NULL; no bit depends on it. Errors: as
 * apa_attention(). */
APA_EXPORT apa_status apa_truth_compute(apa_context *context, const apa_problem *problem, const apa_tensor *out,
                                        const apa_tensor *lse, apa_progress progress, void *progress_user);

typedef struct apa_evaluation_options {
    size_t size;        /* sizeof(apa_evaluation_options), set by apa_evaluation_options_init() */
    const char *engine; /* for the method and for its exact counterpart; NULL = "auto" */
    int32_t repeats;    /* timed runs of method and exact, interleaved; at least 1 (default 3); medians are reported */
    /* f64 truth computed before, [B,Hq,Sq,Dv] and [B,Hq,Sq,1] (dtype NONE: the reference engine computes it). Lets
     * several methods share one truth. */
    apa_tensor truth, truth_lse;
    int32_t time_exact;    /* 1 (default): time the same engine's exact method too; 0: exact_ms is NaN */
    apa_progress progress; /* may be NULL */
    void *progress_user;
    /* When not NULL: receives the verdicts of the last timed run, as apa_attention_options.verdicts (whose cost, a byte
     * per row and tile, is then in that run's time). */
    uint8_t *verdicts;
} apa_evaluation_options;

APA_EXPORT void apa_evaluation_options_init(apa_evaluation_options *options);

typedef struct apa_evaluation {
    size_t size; /* sizeof(apa_evaluation) */
    apa_error error;
    apa_statistics statistics;              /* of the last timed run */
    double prep_ms, attention_ms, exact_ms; /* medians */
    double speedup;                         /* exact_ms / (prep_ms + attention_ms); NaN without exact_ms */
} apa_evaluation;

/* Runs a method on a problem's inputs (its out and lse may have dtype NONE: not needed) and measures it against exact
 * attention in double. Errors: as apa_attention(). */
APA_EXPORT apa_status apa_evaluate(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                   const apa_evaluation_options *options, apa_evaluation *evaluation);

/* ---- Where the error comes from -------------------------------------------------------------------------------------
 * docs/diagnosis.md says what each figure means and how to read it. */

typedef enum apa_worst_by { APA_WORST_BY_COS = 1, APA_WORST_BY_REL = 2 } apa_worst_by;

/* A pair and how far it is off. */
typedef struct apa_pair_error {
    int64_t batch, head, row;
    double cos, rel_l2;
} apa_pair_error;

/* The `wanted` pairs of lowest cosine, or of largest relative L2, worst first; of equals the first in [B][H][S] order.
 * Pairs whose truth is not finite are none of them. Writes min(wanted, pairs) to worst and their number to *found.
 * Scratch: 16 bytes a pair. Errors: INVALID_ARGUMENT (shapes disagree, wanted < 1, by unknown), OUT_OF_MEMORY. */
APA_EXPORT apa_status apa_worst_pairs(apa_context *context, const apa_tensor *out, const apa_tensor *truth,
                                      apa_worst_by by, int64_t wanted, apa_pair_error *worst, int64_t *found);

/* One pair taken apart. o = o_hot + o_cold is the EXACT output of the row, computed in double from Q, K, V by a plain
 * loop of its own, split by the verdicts of a run: o_hot is what its hot tiles contribute to the output (their share of
 * the probability mass times their values), o_cold what the others do (skipped ones too). */
typedef struct apa_pair_detail {
    size_t size;          /* sizeof(apa_pair_detail), set by apa_pairs_examine() */
    apa_pair_error error; /* against this file's own exact output, which a truth of any source should agree with; NaN
                             where that is not finite */
    int64_t position;     /* of the query among the keys: row + q_offset */
    int64_t keys;         /* visible ones */
    int64_t tiles, hot_tiles, skipped_tiles; /* visible ones; skipped are not hot */
    double cold_mass;                        /* share of the exact probability mass that lies in cold tiles, 0 … 1 */
    double largest_cold_share;               /* of the mass, of one cold tile; 0 when there is none */
    int64_t largest_cold_tile;               /* its number; -1 when there is none */
    double truth_norm, hot_norm, cold_norm;  /* |o|, |o_hot|, |o_cold| */
    double cancellation; /* (|o_hot| + |o_cold|) / |o|: 1 = none; how much a part's relative error grows */
    double out_norm;     /* of the method's output */
    double lse;          /* exact, natural log */
} apa_pair_detail;

/* Takes `count` pairs apart: batch, head and row of pairs[i] are read, details[i] is written. tile: keys per tile of
 * the run; verdicts [B][Hq][Sq][ceil(Skv/tile)] as apa_attention() wrote them; out: the run's output. Deterministic.
 * Errors: INVALID_ARGUMENT (shapes, a pair outside), OUT_OF_MEMORY. */
APA_EXPORT apa_status apa_pairs_examine(apa_context *context, const apa_problem *problem, const apa_tensor *out,
                                        int32_t tile, const uint8_t *verdicts, const apa_pair_error *pairs,
                                        int64_t count, apa_pair_detail *details);

/* Errors of all pairs sorted into bins, two to a decade. Bin 0 holds values under apa_histogram_edge(0), bin i values
 * from edge(i-1) to under edge(i), the last bin all from the last edge on, infinite ones too. */
#define APA_HISTOGRAM_BINS 24
typedef struct apa_histogram {
    size_t size;
    int64_t pairs;
    int64_t cos[APA_HISTOGRAM_BINS];    /* of 1 - cosine */
    int64_t rel_l2[APA_HISTOGRAM_BINS]; /* of the pair's relative L2 */
    int64_t truth_not_finite;           /* pairs that are in `pairs` and in no bin */
} apa_histogram;

/* 10^((i - 20)/2) for i = 0 … APA_HISTOGRAM_BINS - 2; NaN elsewhere. */
APA_EXPORT double apa_histogram_edge(int32_t i);

/* Errors: as apa_error_measure(). */
APA_EXPORT apa_status apa_histogram_measure(apa_context *context, const apa_tensor *out, const apa_tensor *truth,
                                            apa_histogram *histogram);

/* One head's errors and shares. */
typedef struct apa_head_error {
    size_t size; /* sizeof(apa_head_error), set by apa_heads_measure() */
    int64_t batch, head;
    double mean_cos, min_cos;
    int64_t min_cos_row; /* first of equals; -1 when the head has no rows with a finite truth */
    double rel_l2, rel_l2_max;
    int64_t lt_0_99;
    double hot_share, skip_share; /* of its visible (row, tile) pairs; NaN without verdicts */
    int64_t truth_not_finite;     /* pairs without a truth, which are in no other figure of errors */
} apa_head_error;

/* heads: B·Hq of them, batch by batch. verdicts may be NULL; tiles = ceil(Skv/tile) of the run. Errors: as
 * apa_error_measure(). */
APA_EXPORT apa_status apa_heads_measure(apa_context *context, const apa_tensor *out, const apa_tensor *truth,
                                        const uint8_t *verdicts, int64_t tiles, apa_head_error *heads);

/* What a cold tile's error is made of. */
typedef enum apa_operand {
    APA_OPERAND_Q = 0,
    APA_OPERAND_K = 1,
    APA_OPERAND_V = 2,
    APA_OPERAND_P = 3,
    APA_OPERAND_ACCUMULATOR = 4, /* the sums of Q·K and P·V */
    APA_OPERAND_COUNT = 5
} apa_operand;

/* "q", "k", "v", "p", "accumulator"; NULL for a number that is none. Static storage. */
APA_EXPORT const char *apa_operand_name(apa_operand operand);

/* One run of an attribution. */
typedef struct apa_attribution_run {
    int32_t ran; /* 0: refusal says why. Of an operand that the recipe does not quantise the figures are those of `none`
                  * and `all`; of a combination that the engine refuses they are 0 */
    char refusal[160];
    double rel_l2, mean_cos, min_cos; /* over all pairs */
    double worst_rel_l2, worst_mean_cos,
        worst_min_cos; /* over the worst pairs of the unchanged recipe: together, mean, min */
    double hot_share;
    double verdicts_changed; /* share of the visible (row, tile) pairs whose hot or cold differs from the unchanged
                                recipe's */
} apa_attribution_run;

typedef struct apa_attribution {
    size_t size;              /* sizeof(apa_attribution) */
    apa_recipe recipe;        /* as run, nothing on auto */
    int64_t worst;            /* pairs in the worst_* figures */
    apa_attribution_run all;  /* the recipe as it is */
    apa_attribution_run none; /* nothing quantised: what is left is rounding of the output and the exact pass */
    apa_attribution_run only[APA_OPERAND_COUNT];    /* this operand quantised, the others not */
    apa_attribution_run all_but[APA_OPERAND_COUNT]; /* this operand not quantised, the others are */
} apa_attribution;

/* Runs a recipe on the reference engine with operands of the cold tiles quantised one at a time, and all but one (up to
 * twelve runs). truth: as in apa_evaluation_options (NULL or dtype NONE: computed). The worst pairs are the `worst`
 * ones of lowest cosine (by REL: largest relative L2) of the unchanged recipe. Errors: as apa_attention(). */
APA_EXPORT apa_status apa_attribute(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                    const apa_tensor *truth, apa_worst_by by, int64_t worst, apa_progress progress,
                                    void *progress_user, apa_attribution *attribution);

/* ---- What a method would cost on a device ---------------------------------------------------------------------------
 * A model, not a measurement: operations counted, divided by documented rates. docs/cost-model.md has the formulas, the
 * source of every rate, and predictions beside measurements. */

/* Units that multiply. */
typedef enum apa_unit {
    APA_UNIT_F32 = 0,
    APA_UNIT_F16 = 1, /* f16 or bf16 factors */
    APA_UNIT_FP8 = 2,
    APA_UNIT_INT8 = 3,
    APA_UNIT_FP4 = 4,
    APA_UNIT_COUNT = 5
} apa_unit;

APA_EXPORT const char *apa_unit_name(apa_unit unit); /* "f32" ...; NULL for a number that is none */

typedef struct apa_device_profile {
    const char *name;            /* "rtx5090" */
    const char *about;           /* one line */
    double rate[APA_UNIT_COUNT]; /* multiply-accumulates a second at peak; 0: the device has no such unit */
    double half_sums;            /* factor of the F16 and FP8 rates when sums are kept in f16 */
    double exponentials;         /* a second */
    double cold_scores; /* cold scores a second that are converted, scaled and flushed; infinite: not counted */
    double prep_values; /* values of K and V a second that prep can make; infinite: memory alone bounds it */
    double bytes;       /* of memory traffic a second */
    double reach;       /* share of the peak rates that long products reach */
    int32_t overlap;    /* 1: products and exponentials run side by side (GPUs), 0: one after the other (CPUs) */
} apa_device_profile;

/* Profile number i, NULL past the last; by name, NULL when there is none. Static storage. Thread-safe. */
APA_EXPORT const apa_device_profile *apa_device_profile_at(size_t i);
APA_EXPORT const apa_device_profile *apa_device_profile_find(const char *name);

typedef struct apa_cost {
    size_t size; /* sizeof(apa_cost), set by apa_cost_estimate() */
    /* counts */
    double score_macs, value_macs; /* cold Q·K and P·V */
    double exact_macs;             /* exact pass */
    double select_macs;            /* block means, Jensen bounds, smoothed queries' correction: FP32 */
    double macs[APA_UNIT_COUNT];   /* all of these, by the unit that does them on this device */
    double exponentials;
    double prep_values, prep_bytes, attention_bytes;
    /* times */
    double prep_ms, attention_ms;
    double exact_ms;   /* the exact method on the same device */
    double speedup;    /* exact_ms / (prep_ms + attention_ms) */
    uint32_t replaced; /* bit u: the recipe asks for unit u, which the device has not; a wider one does it */
} apa_cost;

/* Counts what `statistics` (of a run of this problem: resolved recipe, hot, skipped and candidate counts) says was done
 * and divides by the device's rates. Reads shapes, dtype and masks of the problem, no data. Errors: INVALID_ARGUMENT.
 */
APA_EXPORT apa_status apa_cost_estimate(apa_context *context, const apa_problem *problem,
                                        const apa_statistics *statistics, const apa_device_profile *device,
                                        apa_cost *cost);

#ifdef __cplusplus
}
#endif
#endif
