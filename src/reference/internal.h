/* The reference engine from inside: what its files hand each other.
 *
 *   load.c         tensors ↔ doubles               resolve.c      autos and refusals
 *   quantise.c     formats of operands and of sums prep.c         K and V of one head, quantised
 *   query.c        Q: scales, smoothing, codes     cold.c         scores and the cold state
 *   probability.c  scores to quantised P           select.c       tiles made hot beforehand
 *   walk.c         order, λ, verdicts              verdict.c      verdicts that need the whole row first
 *   lamp.c         LampAttention's tile
 *   exact.c        exact tiles and the merge       softmax.c      the exact pass whole, and as a tree
 *   scores.c       softcap, slopes, masks, sinks: from scale·q·k to the score, and what a row sees
 *   reference.c    memory, threads, counts
 *
 * Quantised numbers are held as "units", the product of element code and block scale, which a float holds exactly, and
 * a coarse scale: K per key, V per tile and channel, Q per row, whatever numbers share one. Dot products of units are
 * exact in double: INT8 needs at most 127·127·1024 < 2^24, E4M3 46 bits, NVFP4 at most the bits from 2^-20 to 2^33. */
#ifndef APA_REFERENCE_INTERNAL_H
#define APA_REFERENCE_INTERNAL_H

#include "core/call.h"
#include "core/context_internal.h"
#include "formats/formats.h"
#include "recipe/defaults.h"

#include <math.h>

#define APA_REFERENCE_TILE 64      /* keys */
#define APA_REFERENCE_ROWS 64      /* rows of a block at most: the largest group */
#define APA_REFERENCE_DIM_MAX 1024 /* D and Dv */
#define APA_REFERENCE_Q_BLOCK 128  /* queries: the mean that smooth_q takes off, scales per block */
#define APA_REFERENCE_Q_WARP 32
#define APA_REFERENCE_LOG2E 1.4426950408889634074
#define APA_REFERENCE_LN2 0.69314718055994530942

/* Memory cut from one piece. base NULL only measures. After an overflow of size_t `size` is SIZE_MAX. */
typedef struct apa_reference_arena {
    char *base;
    size_t size;
} apa_reference_arena;

void *apa_reference_take(apa_reference_arena *arena, int64_t count, int64_t per, size_t bytes);

/* One KV head's prep. Tiles are 64 absolute keys; places of a tile beyond Skv hold zeros. */
typedef struct apa_reference_head {
    int64_t b, h;
    float *k_mean, *v_mean;   /* [D], [Dv]: zeros when not smoothed */
    float *k_units, *v_units; /* [tiles][D][64], [tiles][64][Dv] */
    double *k_scale;          /* [tiles][64] */
    double *v_scale;          /* [tiles][Dv] */
    double k_scale_max;       /* of all keys (INT8) */
    double *k_sum,
        *v_sum; /* [tiles][D], [tiles][Dv]: sums for the means; later k_sum is the tile's mean key (Jensen) */
    int64_t *k_count, *v_count; /* [tiles]: keys in these sums */
    float *k_amax, *v_amax;     /* [tiles] */
    uint8_t *forced;            /* [tiles]: holds a non-finite value, so it is hot */
    float *k_exact;             /* smooth_q, verdict mass_value: [tiles][D][64], prepared keys */
    float *q_mean;    /* smooth_q: [G][blocks of 128 queries][D], not rotated; q_mean head: all of a head the same */
    double *q_sum;    /* q_mean head: [blocks of 128 queries of all heads][D], and the */
    int64_t *q_count; /* queries in these sums */
    float *q_amax;    /* scales over several queries: [G][Sq], the largest value that shares the scale */
    float *v_channel; /* scales per channel: [Dv], largest value of the head */
    double *k_middle, *k_least, *k_most; /* select: [tiles][D], mean, minimum, maximum of the prepared keys */
    double *k_norm, *k_error;            /* verdict mass_value: [tiles], largest norm of a key and of its rounding */
} apa_reference_head;

/* sum·2^frame; (-inf, 0) is none. Frames are in log2 units. */
typedef struct apa_reference_mass {
    double frame, sum;
} apa_reference_mass;

static inline double apa_reference_mass_log2(apa_reference_mass mass)
{
    return mass.frame + log2(mass.sum); /* (-inf, 0) → -inf */
}

typedef struct apa_reference_row {
    bool real;              /* not padding */
    int64_t position, hq;   /* query and query head */
    int64_t first, end;     /* visible keys */
    double shift;           /* scale·q·k̄ (natural), taken off every score and added back to the LSE */
    double sink;            /* natural; -inf: none */
    bool finite;            /* q is, as FP32, and so are the head's slopes and sink */
    double q_scale[2];      /* of the two terms; 0 for a term that is not there */
    double q_norm, q_error; /* norms of q and of what its codes leave out */
    apa_reference_mass lambda;
    double cold_frame, cold_sum; /* cold state: o_cold and cold_sum are in units of 2^(cold_frame + τ) */
    double hot_max, hot_sum;     /* exact state, natural */
    /* of the tile at hand */
    double top;     /* largest cold score */
    double next;    /* candidate frame c */
    double phase;   /* what the frames of this tile are above integers (p_phase) */
    double p_frame; /* probabilities are 2^(score - p_frame), quantised */
    double p_sum;   /* ℓ_t: their sum */
} apa_reference_row;

/* What LampAttention did: sub-blocks of rows and tiles. */
typedef struct apa_reference_lamp {
    int64_t sub_blocks, recomputed; /* (row, sub-block) pairs */
    int64_t tiles, disruptive;      /* (row, tile) pairs; with two or more recomputed sub-blocks */
} apa_reference_lamp;

/* Up to 64 rows worked on together: a group in the walk. */
typedef struct apa_reference_block {
    const apa_call *call;
    const apa_reference_head *head; /* only b, h are set where no prep runs */
    int64_t rows;
    apa_reference_row row[APA_REFERENCE_ROWS];
    int64_t tile_first, tile_end; /* tiles that some real row sees lie in between */
    double *q;                    /* [rows][D], what the exact pass reads */
    double *q_prepared;           /* [rows][D], FP32 values that were quantised */
    double *q_units[2];           /* [rows][D] */
    double *cold, *hot;           /* [rows][Dv], o of the two states */
    double *kt, *v;               /* tile at hand, [D][64] and [64][Dv] */
    double *p;                    /* [rows][64] scores, then probabilities */
    double *code;                 /* [rows][64] P in units of the matrix product */
    double *q_mean;               /* smooth_q: [rows][D], the rows' q̄, rotated */
    double *delta;                /* smooth_q: [rows][64], q̄·k in FP32 */
    double *middle;               /* verdict mass_value: [rows][Dv], the output if all were cold */
    double *tree;                 /* softmax tree: states (m, S), then W */
    uint8_t *given;               /* [2·tiles]: selected beforehand; then scratch of cold_budget */
    uint8_t *verdict;             /* [tiles] */
    uint64_t *seen;               /* with a mask: [rows][tiles], the keys that a row sees, one bit each */
    uint8_t *spoilt;              /* with a mask: [tiles], it adds a NaN or +inf to a key that is seen */
    double *mass;                 /* [rows][tiles]: log2 ℓ_t of the visits */
    double *rest;                 /* [rows][tiles]: log2 of Jensen's bounds of what comes after a visit */
    double eps;                   /* of the group */
    int64_t visible, hot_count, cold_count, candidates;
    apa_reference_lamp lamp;
} apa_reference_block;

/* Keys lo … hi-1 of tile t, counted from the tile's first, that a row sees; lo >= hi: none. */
static inline void apa_reference_span(const apa_reference_row *row, int64_t t, int64_t *lo, int64_t *hi)
{
    const int64_t base = t * APA_REFERENCE_TILE;
    *lo = row->first > base ? row->first - base : 0;
    *hi = row->end - base < APA_REFERENCE_TILE ? row->end - base : APA_REFERENCE_TILE;
}

/* Tiles between the first and the last key that a row sees. */
static inline int64_t apa_reference_row_tiles(const apa_reference_row *row)
{
    return row->first < row->end ? (row->end - 1) / APA_REFERENCE_TILE - row->first / APA_REFERENCE_TILE + 1 : 0;
}

/* Bits lo … hi-1. */
static inline uint64_t apa_reference_bits(int64_t lo, int64_t hi)
{
    return lo >= hi ? 0 : UINT64_MAX << lo & UINT64_MAX >> (APA_REFERENCE_TILE - hi);
}

/* Keys of tile t that row r sees, one bit each. */
static inline uint64_t apa_reference_seen(const apa_reference_block *block, int64_t r, int64_t t)
{
    const apa_reference_row *row = &block->row[r];
    int64_t lo, hi;
    if (!row->real)
        return 0;
    if (block->seen != NULL)
        return block->seen[r * apa_call_tiles(block->call) + t];
    apa_reference_span(row, t, &lo, &hi);
    return apa_reference_bits(lo, hi);
}

static inline bool apa_reference_sees(const apa_reference_block *block, int64_t r, int64_t t)
{
    return apa_reference_seen(block, r, t) != 0;
}

/* Hot whatever is known of its mass: K, V or the mask hold something that is no number. */
static inline bool apa_reference_forced(const apa_reference_block *block, int64_t t)
{
    return block->head->forced[t] || (block->spoilt != NULL && block->spoilt[t]);
}

/* May tiles be hot for reasons of mass, selection or position? */
static inline bool apa_reference_may_heat(const apa_recipe *recipe)
{
    return recipe->force == APA_FORCE_NONE && recipe->eps < 1;
}

/* True when no verdict can be cold, so that nothing is quantised. */
static inline bool apa_reference_all_hot(const apa_recipe *recipe)
{
    return recipe->verdict != APA_VERDICT_RULE_LAMP &&
           (recipe->force == APA_FORCE_HIGH || (recipe->force == APA_FORCE_NONE && recipe->eps < 0));
}

/* Where INT8 scores can be off by this many log2 units (logits in the thousands), estimates say nothing about mass and
 * the group is hot throughout. */
#define APA_REFERENCE_SCORE_ERROR_MAX 32.0

/* Plain exact attention: no statistics at all. */
static inline bool apa_reference_plain(const apa_recipe *recipe)
{
    return apa_reference_all_hot(recipe) && recipe->smooth_k != APA_TOGGLE_ON;
}

/* A rounding grid: mantissa bits, exponent of the smallest normal, largest value, and what lies beyond it. */
typedef struct apa_reference_grid {
    int mantissa, emin;
    double largest, beyond;
} apa_reference_grid;

extern const apa_reference_grid apa_reference_e2m1, apa_reference_e4m3, apa_reference_f16, apa_reference_bf16;

/* load.c: n values of a row of q, k, v or a mask */
void apa_reference_load(const void *from, apa_dtype dtype, int64_t n, apa_exact_format format, double *row);
bool apa_reference_load_f32(const void *from, apa_dtype dtype, int64_t n, float *row); /* false: not finite */
const void *apa_reference_query(const apa_call *call, int64_t b, int64_t hq, int64_t i);
void apa_reference_store(const apa_tensor *x, int64_t b, int64_t h, int64_t s, const double *row);

/* scores.c */
void apa_reference_see(apa_reference_block *block); /* `seen` and `spoilt` of a block whose rows are set up */
/* s: scale·q·k of a tile's 64 keys becomes the score, natural, of the keys that row r sees. */
void apa_reference_bend(const apa_reference_block *block, int64_t r, int64_t t, double *s);
/* What a mask and ALiBi add to the scores of the seen keys, on average. */
double apa_reference_mean_addend(const apa_reference_block *block, int64_t r, int64_t t);
bool apa_reference_slopes_finite(const apa_call *call, int64_t b, int64_t hq);
double apa_reference_sink(const apa_call *call, int64_t b, int64_t hq); /* -inf: none */

/* resolve.c */
apa_status apa_reference_resolve(apa_context *context, apa_call *call);

/* quantise.c: n values x[0], x[stride], … become units; the scale is returned. amax: largest value that shares it. */
float apa_reference_amax(const float *x, int64_t n, int64_t stride);
double apa_reference_int8_units(float *x, int64_t n, int64_t stride, float amax);
double apa_reference_e4m3_units(float *x, int64_t n, int64_t stride, float amax, float range, bool pow2);
void apa_reference_nvfp4_units(float *x, int64_t n, int64_t stride, float scale, bool search);
void apa_reference_mx_units(float *x, int64_t n, int64_t stride, apa_format element, bool up);
/* The same as apa_format_round() where that saturates or overflows alike, without tables. */
double apa_reference_round(const apa_reference_grid *grid, double x);
double apa_reference_keep(apa_kept_format format, double x);

/* One number rounded to an accumulator's format (fp22: to FP32; its cuts are apa_reference_step()'s). */
static inline double apa_reference_to(apa_accumulator kind, double x)
{
    if (kind == APA_ACCUMULATOR_F16)
        return apa_reference_round(&apa_reference_f16, x);
    return kind == APA_ACCUMULATOR_F64 ? x : (double)(float)x;
}

/* sum + Σ product, n at once, in an accumulator. */
double apa_reference_step(apa_accumulator kind, double sum, const double *product, int64_t n);

/* prep.c */
void apa_reference_head_layout(apa_reference_arena *arena, const apa_call *call, apa_reference_head *head);
void apa_reference_prep(apa_context *context, const apa_call *call, apa_reference_head *head);
void apa_reference_hadamard(float *x, int64_t n);

/* query.c */
int64_t apa_reference_q_blocks(const apa_call *call);
void apa_reference_prep_queries(apa_context *context, const apa_call *call, apa_reference_head *head);
void apa_reference_quantise_q(apa_reference_block *block, int64_t r);

/* probability.c */
bool apa_reference_framed(const apa_recipe *recipe); /* does P stand against a running frame? */
double apa_reference_phase(const apa_recipe *recipe,
                           int64_t t);                  /* p_phase: how far frames of tile t lie off integers */
double apa_reference_tau(const apa_recipe *recipe);     /* lazy_tau where it does, else 0 */
double apa_reference_p_range(const apa_recipe *recipe); /* P = code / range */
void apa_reference_probabilities(const apa_recipe *recipe, apa_reference_row *row, double *p, double *code);

/* cold.c */
void apa_reference_cold_load(apa_reference_block *block, int64_t t); /* kt: the tile's keys */
void apa_reference_score_row(apa_reference_block *block, int64_t r, int64_t t);
void apa_reference_cold_scores(apa_reference_block *block, int64_t t); /* p, top, next, p_frame, p_sum of all rows */
void apa_reference_cold_add(apa_reference_block *block, int64_t t);    /* after cold_scores: the tile joins the state */
void apa_reference_cold_move(apa_reference_block *block, int64_t r, double frame);
void apa_reference_load_values(apa_reference_block *block, int64_t t); /* v: the tile's values */
/* After cold_scores and load_values: Σ P·V / ℓ_t. */
void apa_reference_tile_values(apa_reference_block *block, int64_t r, int64_t t, double *mean);

/* select.c */
void apa_reference_select(apa_reference_block *block);
int64_t apa_reference_select_count(const apa_call *call, int64_t seen); /* tiles of a group that sees `seen` */

/* walk.c */
int64_t apa_reference_visit_tile(const apa_reference_block *block, int64_t k); /* tile of visit k */
void apa_reference_demote(apa_reference_block *block, int64_t t);              /* a hot tile joins the cold state */
void apa_reference_walk(apa_reference_block *block);

static inline int64_t apa_reference_visits(const apa_reference_block *block)
{
    return block->tile_end - block->tile_first;
}

static inline bool apa_reference_stays_hot(const apa_reference_block *block, int64_t t)
{
    return apa_reference_forced(block, t) || block->given[t];
}

/* verdict.c: after a walk that left every tile to be judged hot */
void apa_reference_cold_budget(apa_reference_block *block);
void apa_reference_mass_value(apa_reference_block *block);

/* lamp.c */
void apa_reference_lamp_tile(apa_reference_block *block, int64_t t);

/* exact.c */
void apa_reference_dots(const double *q, const double *kt, int64_t D, double *dot);
void apa_reference_weighted_sum(const double *p, const double *v, int64_t Dv, uint64_t seen, double *o);
void apa_reference_load_tile(apa_reference_block *block, int64_t t);
void apa_reference_exact_tile(apa_reference_block *block, int64_t t);
void apa_reference_finish(const apa_reference_block *block);

/* softmax.c: all hot tiles of a block at once, for softmax whole and tree. */
int64_t apa_reference_tree_doubles(const apa_call *call);
void apa_reference_exact_whole(apa_reference_block *block);
void apa_reference_exact_tree(apa_reference_block *block);

#endif
