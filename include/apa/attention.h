/* libapa: attention, softmax(scale·Q·Kᵀ + mask)·V.
 *
 * FlashAttention-style online softmax with log-sum-exp merge (Dao et al., arXiv 2205.14135), and adaptive precision:
 * every tile of keys in a cheap format, the few that hold a row's probability again in the exact one, merged exactly.
 */
#ifndef APA_ATTENTION_H
#define APA_ATTENTION_H

#include "apa/context.h"
#include "apa/recipe.h"
#include "apa/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "The queries are the last Sq positions of the keys": position of query 0 = Skv - Sq. */
#define APA_Q_OFFSET_DEFAULT INT64_MIN

typedef struct apa_problem {
    size_t size; /* sizeof(apa_problem), set by apa_problem_init() */

    /* Inputs, all f16, bf16, f32 or (reference engine) f64; one dtype for q, k and v. Never written to.
     * q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]; Hq a multiple of Hkv (grouped queries: query head h
     * reads KV head h / (Hq/Hkv)). B, Sq and Skv may be 0; D and Dv are 1 … 1024. */
    apa_tensor q, k, v;

    /* Outputs; must not overlap the inputs or each other. out [B, Hq, Sq, Dv], any dtype (f64: reference engine).
     * lse [B, Hq, Sq, 1], f32 (f64: reference engine), or dtype APA_DTYPE_NONE when not wanted: the natural log of the
     * sum of exponentials of the scaled scores. A row that sees no key has out 0 and lse -inf. */
    apa_tensor out, lse;

    double softmax_scale; /* NaN (the default) = 1/sqrt(D) */
    int32_t causal;       /* 0 (the default) or 1: query i sees keys up to i + q_offset */
    int64_t q_offset;     /* position of query 0 among the keys; APA_Q_OFFSET_DEFAULT = Skv - Sq (bottom-right) */
    /* Query i sees keys i + q_offset - window_left … i + q_offset + window_right, both ends included; -1 = no bound. */
    int64_t window_left, window_right;
} apa_problem;

/* Zeroes the tensors and fills in the defaults above. */
APA_EXPORT void apa_problem_init(apa_problem *problem);

/* Verdicts as numbers, one byte per (row, tile). */
typedef enum apa_verdict {
    APA_VERDICT_COLD = 0,
    APA_VERDICT_HOT = 1,
    APA_VERDICT_SKIPPED = 2,  /* cold, and provably without effect, so left out */
    APA_VERDICT_INVISIBLE = 3 /* the row sees no key of the tile */
} apa_verdict;

typedef struct apa_attention_options {
    size_t size; /* sizeof(apa_attention_options), set by apa_attention_options_init() */
    /* "auto" (NULL too), "reference", "cpu". auto is the fastest engine that supports the problem. */
    const char *engine;
    /* Scratch memory, 64-byte aligned, at least apa_plan.workspace_bytes; NULL = the context's own, which grows to the
     * largest call and is kept until the context is destroyed. */
    void *workspace;
    size_t workspace_bytes;
    /* When not NULL: receives the verdict of every row and tile, contiguous [B][Hq][Sq][tiles], tiles = ceil(Skv/tile).
     */
    uint8_t *verdicts;
} apa_attention_options;

APA_EXPORT void apa_attention_options_init(apa_attention_options *options);

/* What a call did. Counts are of visible (row, tile) pairs: a row and a tile of which it sees at least one key. */
typedef struct apa_statistics {
    size_t size; /* sizeof(apa_statistics), set by apa_statistics_init() */
    char engine[16];
    char kernel[64];                     /* which kernels ran, e.g. "i8+f32 avx512vnni" */
    apa_recipe recipe;                   /* as run: nothing on auto */
    int64_t visible, hot, cold, skipped; /* visible = hot + cold; skipped is a part of cold */
    int64_t candidates;                  /* hot by the running sum, before the second look */
    double hot_share, skip_share;        /* hot / visible, skipped / visible; 0 when nothing is visible */
    double prep_ms, attention_ms;        /* wall time; attention excludes prep */
    size_t workspace_bytes;
    /* Verdict lamp: sub-blocks of rows, and those recomputed in 16 bits; tiles of rows, and the disruptive ones, in
     * which two or more sub-blocks were. 0 otherwise. */
    int64_t lamp_sub_blocks, lamp_recomputed, lamp_tiles, lamp_disruptive;
} apa_statistics;

APA_EXPORT void apa_statistics_init(apa_statistics *statistics);

/* What a call would do. */
typedef struct apa_plan {
    size_t size; /* sizeof(apa_plan), set by apa_plan_init() */
    char engine[16];
    char kernel[64];
    apa_recipe recipe; /* resolved */
    double softmax_scale;
    int64_t q_offset;
    size_t workspace_bytes;
} apa_plan;

APA_EXPORT void apa_plan_init(apa_plan *plan);

/* Validates a call and says how it would run, without reading any tensor data (data pointers may be NULL).
 * recipe NULL = preset "apa"; options NULL = defaults. Errors: INVALID_ARGUMENT, UNSUPPORTED; text in the context. */
APA_EXPORT apa_status apa_attention_plan(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                         const apa_attention_options *options, apa_plan *plan);

/* Runs attention. recipe NULL = preset "apa"; options NULL = defaults; statistics may be NULL.
 * Blocks until done. Deterministic: the same bits for the same inputs and ISA level, whatever the number of threads.
 * On an error that was found before the run (INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY) no output is written. */
APA_EXPORT apa_status apa_attention(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                    const apa_attention_options *options, apa_statistics *statistics);

/* Names of the engines in this build, best first; NULL past the last. Static storage. Thread-safe. */
APA_EXPORT const char *apa_engine_name(size_t i);

#ifdef __cplusplus
}
#endif
#endif
