/* libapa: attention, softmax(scale·Q·Kᵀ + mask)·V.
 *
 * FlashAttention-style online softmax with log-sum-exp merge (Dao et al., arXiv 2205.14135), and adaptive precision:
 * every tile of keys in a cheap format, the few that hold a row's probability again in the exact one, merged exactly.
 */
#ifndef APA_ATTENTION_H
#define APA_ATTENTION_H

#include "apa/context.h"
#include "apa/measure.h"
#include "apa/recipe.h"
#include "apa/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "The queries are the last Sq positions of the keys": position of query 0 = Skv - Sq. */
#define APA_Q_OFFSET_DEFAULT INT64_MIN

/* Which keys a query sees along the diagonal. */
typedef enum apa_causal {
    APA_CAUSAL_NONE = 0,
    APA_CAUSAL_BOTTOM_RIGHT = 1, /* query i sees keys up to i + q_offset, by default the last query sees the last key */
    APA_CAUSAL_TOP_LEFT = 2      /* the same with q_offset 0 (it may not be given), also for the window and ALiBi */
} apa_causal;

typedef struct apa_problem {
    size_t size; /* sizeof(apa_problem), set by apa_problem_init() */

    /* Inputs, each f16, bf16 or f32, or all of them f64 (reference engine); the cuda engines want one dtype for all
     * three. Never written to.
     * q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]; Hq a multiple of Hkv (grouped queries: query head h
     * reads KV head h / (Hq/Hkv)). B, Sq and Skv may be 0; D and Dv are 1 … 1024. Ragged and paged: below. */
    apa_tensor q, k, v;

    /* Outputs; must not overlap the inputs or each other. out [B, Hq, Sq, Dv], any dtype (f64: reference engine).
     * lse [B, Hq, Sq, 1], f32 (f64: reference engine), or dtype APA_DTYPE_NONE when not wanted: the natural log of the
     * sum of exponentials of the scores, sink included. A row that sees no key has out 0 and lse -inf (or its sink). */
    apa_tensor out, lse;

    /* How a score comes about, in this order (natural units):
     *   s = softmax_scale·q·k
     *   s = softcap·tanh(s / softcap)               where softcap > 0
     *   s = s - alibi_slopes[h]·|i + q_offset - j|  where given; query i, key j
     *   s = s + mask_slopes[h]·attn_mask[b, h, i, j]  where given; a boolean mask selects instead
     * A key is left out where a boolean mask is 0, where a float mask is -inf, beyond the causal line and outside the
     * window: by selection, so that nothing it holds reaches the row. */
    double softmax_scale; /* NaN (the default) = 1/sqrt(D) */
    int32_t causal;       /* apa_causal; APA_CAUSAL_NONE is the default */
    int64_t q_offset;     /* position of query 0 among the keys; APA_Q_OFFSET_DEFAULT = Skv - Sq (bottom-right) */
    /* Query i sees keys i + q_offset - window_left … i + q_offset + window_right, both ends included; -1 = no bound. */
    int64_t window_left, window_right;

    double softcap; /* 0 (the default): none; else positive and finite */
    /* Boolean (bool: other than 0 is attended) or added (f16, bf16, f32; f64: reference engine). Each of the first
     * three extents is the problem's or 1, which repeats; the last is 1 or at least the (longest) Skv, and what lies
     * beyond Skv is not read. With cu_seqlens_q rows are those of the packed q. -inf leaves a key out; NaN and +inf
     * spread. */
    apa_tensor attn_mask;
    apa_tensor mask_slopes;  /* f32 [1, Hq, 1, 1]: a float mask is multiplied by it, head by head (ggml's max_bias) */
    apa_tensor alibi_slopes; /* f32 [B or 1, Hq, 1, 1] (Press et al., arXiv 2108.12409) */
    /* f32 [1, Hq, 1, 1]: a logit per head that joins the denominator and the LSE and has no value (learnable sinks).
     * -inf: none. A row that sees no key has out 0 and lse = its sink. */
    apa_tensor sinks;

    /* Ragged batches. NULL, or `batch` + 1 numbers, rising from 0: sequence b of the batch is rows cu_seqlens[b] …
     * cu_seqlens[b+1]-1 along the seq axis of a tensor whose batch axis is 1. cu_seqlens_q holds for q, out and lse,
     * cu_seqlens_k for k and v; either may be given alone, the other side then has `batch` batch entries. Sequences
     * may be empty; rows of a tensor beyond the last sequence are neither read nor written. */
    const int64_t *cu_seqlens_q, *cu_seqlens_k;
    int64_t batch; /* sequences; read only with cu_seqlens_q or cu_seqlens_k */
    /* NULL, or one number per sequence: keys in use, at most what its row of k holds. Keys beyond are never read. */
    const int64_t *seqused_k;
    /* NULL, or one number per sequence in place of q_offset. */
    const int64_t *q_offsets;
    /* Paged K and V: NULL, or one row of page numbers per sequence. k is then [pages, Hkv, page_size, D] and v [pages,
     * Hkv, page_size, Dv]; key j of sequence b is row j % page_size of page block_table[b·block_table_stride +
     * j/page_size]. Any page size; pages may be shared between sequences; only pages that hold used keys are looked
     * up. Needs seqused_k; excludes cu_seqlens_k. apa_cuda_attention() wants the table in device memory. */
    const int32_t *block_table;
    int64_t block_table_stride;
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
     * Refused for problems whose sequences differ (cu_seqlens, seqused_k, q_offsets, block_table). */
    uint8_t *verdicts;
    /* Other than 0: the cpu engine times its phases (apa_statistics.phase), which costs some per cent. */
    int32_t phases;
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
    /* Where the time went, when options.phases asked for it and the engine can tell; all zeros otherwise. */
    apa_phase_cost phase[APA_PHASES];
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
