/* The reference engine from inside: what its files hand each other.
 *
 *   load.c     tensors ↔ doubles            resolve.c  autos and refusals
 *   prep.c     K and V of one head, quantised    cold.c     Q, scores, probabilities, cold state
 *   walk.c     order, λ, verdicts, second look   exact.c    exact tiles and the merge
 *   reference.c  memory, threads, counts
 *
 * Quantised numbers are held as "units", the product of element code and block scale, which a float holds exactly, and
 * a coarse scale: K per key (INT8) or per head (NVFP4), V per tile and channel or per head, Q per row. Dot products of
 * units are exact in double: INT8 needs at most 127·127·1024 < 2^24, NVFP4 at most the bits from 2^-20 to 2^33. */
#ifndef APA_REFERENCE_INTERNAL_H
#define APA_REFERENCE_INTERNAL_H

#include "core/call.h"
#include "core/context_internal.h"

#define APA_REFERENCE_TILE 64      /* keys */
#define APA_REFERENCE_ROWS 64      /* rows of a block at most: the largest group */
#define APA_REFERENCE_DIM_MAX 1024 /* D and Dv */
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
} apa_reference_head;

/* sum·2^frame; (-inf, 0) is none. Frames are in log2 units. */
typedef struct apa_reference_mass {
    double frame, sum;
} apa_reference_mass;

typedef struct apa_reference_row {
    bool real;            /* not padding */
    int64_t position, hq; /* query and query head */
    int64_t first, end;   /* visible keys */
    double shift;         /* scale·q·k̄ (natural), taken off every score and added back to the LSE */
    bool finite;          /* q is, as FP32 */
    double q_scale[2];    /* of the two terms; 0 for a term that is not there */
    apa_reference_mass lambda;
    double cold_frame, cold_sum; /* cold state: o_cold and cold_sum are in units of 2^(cold_frame + τ) */
    double hot_max, hot_sum;     /* exact state, natural */
    /* of the tile at hand */
    double top;     /* largest cold score */
    double next;    /* candidate frame c */
    double p_frame; /* probabilities are 2^(score - p_frame), quantised */
    double p_sum;   /* ℓ_t: their sum */
} apa_reference_row;

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
    uint8_t *verdict;             /* [tiles] */
    double *mass;                 /* [rows][tiles]: log2 ℓ_t of the visits */
    double *rest;                 /* [rows][tiles]: log2 of Jensen's bounds of what comes after a visit */
    int64_t visible, hot_count, cold_count, candidates;
} apa_reference_block;

/* Keys lo … hi-1 of tile t, counted from the tile's first, that a row sees; lo >= hi: none. */
static inline void apa_reference_span(const apa_reference_row *row, int64_t t, int64_t *lo, int64_t *hi)
{
    const int64_t base = t * APA_REFERENCE_TILE;
    *lo = row->first > base ? row->first - base : 0;
    *hi = row->end - base < APA_REFERENCE_TILE ? row->end - base : APA_REFERENCE_TILE;
}

static inline bool apa_reference_sees(const apa_reference_row *row, int64_t t)
{
    int64_t lo, hi;
    apa_reference_span(row, t, &lo, &hi);
    return row->real && lo < hi;
}

/* True when no verdict can be cold, so that nothing is quantised. */
static inline bool apa_reference_all_hot(const apa_recipe *recipe)
{
    return recipe->force == APA_FORCE_HIGH || (recipe->force == APA_FORCE_NONE && recipe->eps < 0);
}

/* INT8 scores are within about |q||k|/127 of the truth at worst. Where that can exceed this many log2 units (logits in the
 * thousands), estimates say nothing about mass and the group is hot throughout. */
#define APA_REFERENCE_SCORE_ERROR_MAX 32.0

/* Plain exact attention: no statistics at all. */
static inline bool apa_reference_plain(const apa_recipe *recipe)
{
    return apa_reference_all_hot(recipe) && recipe->smooth_k != APA_TOGGLE_ON;
}

/* load.c */
void apa_reference_load(const apa_tensor *x, int64_t b, int64_t h, int64_t s, apa_exact_format format, double *row);
bool apa_reference_load_f32(const apa_tensor *x, int64_t b, int64_t h, int64_t s, float *row); /* false: not finite */
void apa_reference_store(const apa_tensor *x, int64_t b, int64_t h, int64_t s, const double *row);

/* resolve.c */
apa_status apa_reference_resolve(apa_context *context, apa_call *call);

/* prep.c */
void apa_reference_head_layout(apa_reference_arena *arena, const apa_call *call, apa_reference_head *head);
void apa_reference_prep(apa_context *context, const apa_call *call, apa_reference_head *head);
void apa_reference_hadamard(float *x, int64_t n);

/* cold.c */
void apa_reference_quantise_q(apa_reference_block *block, int64_t r);
void apa_reference_cold_scores(apa_reference_block *block, int64_t t); /* p, top, next, p_frame, p_sum of all rows */
void apa_reference_cold_add(apa_reference_block *block, int64_t t);    /* after cold_scores: the tile joins the state */
void apa_reference_cold_move(apa_reference_block *block, int64_t r, double frame);

/* walk.c */
void apa_reference_walk(apa_reference_block *block);

/* exact.c */
void apa_reference_dots(const double *q, const double *kt, int64_t D, double *dot);
void apa_reference_weighted_sum(const double *p, const double *v, int64_t Dv, int64_t lo, int64_t hi, double *o);
void apa_reference_exact_tile(apa_reference_block *block, int64_t t);
void apa_reference_finish(const apa_reference_block *block);

#endif
