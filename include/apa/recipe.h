/* libapa: recipes - a full description of one attention method's numerics.
 *
 * A preset is a name for a recipe; every field is a knob with a name and can be changed by itself
 * (apa_recipe_set("eps", "0.01")). Fields on "auto" are resolved by the engine that runs the recipe; the statistics of
 * a call hold the resolved recipe, and the reference engine runs any resolved recipe.
 *
 * The words (tile, group, frame, state, share, verdict) are defined in docs/design.md. */
#ifndef APA_RECIPE_H
#define APA_RECIPE_H

#include "apa/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Value 0 of every enumeration and of every toggle is "auto". */
typedef enum apa_toggle { APA_TOGGLE_AUTO = 0, APA_TOGGLE_OFF = 1, APA_TOGGLE_ON = 2 } apa_toggle;

/* Overrules the verdict: low = every tile cold, high = every tile hot. A tile with a non-finite value is always hot. */
typedef enum apa_force { APA_FORCE_NONE = 1, APA_FORCE_LOW = 2, APA_FORCE_HIGH = 3 } apa_force;

/* Whose share ε is. */
typedef enum apa_eps_by {
    APA_EPS_BY_AUTO = 0,
    APA_EPS_BY_CALL = 1, /* of every row */
    APA_EPS_BY_ROW = 2   /* of a row that sees all N tiles of the call; where a group's rows see n at most, it is
                            ε·sqrt(N/n), at most 0.1 (or ε, where that is more) */
} apa_eps_by;

/* Where the running sum λ of a row starts: at 0, or at Jensen's lower bound of the tiles not seen yet, Σ 64·exp(q·k̄_t).
 */
typedef enum apa_lambda_bound {
    APA_LAMBDA_BOUND_AUTO = 0,
    APA_LAMBDA_BOUND_NONE = 1,
    APA_LAMBDA_BOUND_JENSEN = 2
} apa_lambda_bound;

/* Tile order: tile 0, then from the last visible tile backwards; first to last; last to first. */
typedef enum apa_order {
    APA_ORDER_AUTO = 0,
    APA_ORDER_SINK_BACKWARD = 1,
    APA_ORDER_FORWARD = 2,
    APA_ORDER_REVERSE = 3
} apa_order;

/* How rows are numbered inside a KV head: rows = position·G + head; head = `group` positions of one head side by side.
 */
typedef enum apa_packing { APA_PACKING_AUTO = 0, APA_PACKING_ROWS = 1, APA_PACKING_HEAD = 2 } apa_packing;

typedef enum apa_cold_format {
    APA_COLD_FORMAT_AUTO = 0,
    APA_COLD_FORMAT_INT8 =
        1, /* symmetric INT8: Q per row, K per key, V per tile and channel, P unsigned per row and tile */
    APA_COLD_FORMAT_NVFP4 = 2, /* E2M1 with UE4M3 scales per 16 values and an FP32 scale per head (K, V) or row (Q) */
    APA_COLD_FORMAT_E4M3 = 3,  /* FP8: Q per row, K per key, V per tile and channel, P per row and tile */
    APA_COLD_FORMAT_MXFP4 = 4  /* E2M1 with power-of-two scales per 32 values */
} apa_cold_format;

/* What the exact pass reads: the inputs as they are, or rounded once to a 16-bit format. Sums are FP32 in the fast
 * engines, double in the reference. */
typedef enum apa_exact_format {
    APA_EXACT_FORMAT_AUTO = 0,
    APA_EXACT_FORMAT_INPUT = 1,
    APA_EXACT_FORMAT_F16 = 2,
    APA_EXACT_FORMAT_BF16 = 3
} apa_exact_format;

/* Scale of the probabilities before they are rounded. */
typedef enum apa_p_scale {
    APA_P_SCALE_AUTO = 0,
    APA_P_SCALE_ROW_TILE = 1, /* INT8: 255 over the row's maximum in the tile; needs no frame, so nothing collapses */
    APA_P_SCALE_UE4M3 = 2,    /* NVFP4: per 16 keys, smallest normal UE4M3 s >= 256·max P (APA 0.5 and later) */
    APA_P_SCALE_POW2 = 3,     /* NVFP4: per 16 keys, a power of two, exponent not under -6 (APA before 0.5) */
    APA_P_SCALE_STATIC = 4,   /* one constant, p_static_scale: codes of S·P, P against the running frame */
    APA_P_SCALE_TWO_LEVEL =
        5,              /* NVFP4: the row's maximum in the tile to 2688, then per 16 keys maximum/6 (SageAttention3) */
    APA_P_SCALE_MX = 6, /* per 32 keys, a power of two: MX */
    APA_P_SCALE_ROW_TILE_POW2 = 7 /* E4M3: 256 over the row's maximum in the tile rounded up to a power of two */
} apa_p_scale;

/* How scores are formed: both operands of Q·Kᵀ. */
typedef enum apa_qk_format {
    APA_QK_FORMAT_AUTO = 0, /* cold_format's */
    APA_QK_FORMAT_INT8 = 1,
    APA_QK_FORMAT_E4M3 = 2,
    APA_QK_FORMAT_NVFP4 = 3,
    APA_QK_FORMAT_MXFP4 = 4,
    APA_QK_FORMAT_EXACT = 5 /* the FP32 values of prep */
} apa_qk_format;

/* How the output is formed: both operands of P·V. */
typedef enum apa_pv_format {
    APA_PV_FORMAT_AUTO = 0, /* cold_format's */
    APA_PV_FORMAT_INT8 = 1, /* P unsigned */
    APA_PV_FORMAT_E4M3 = 2,
    APA_PV_FORMAT_NVFP4 = 3,
    APA_PV_FORMAT_MXFP4 = 4,
    APA_PV_FORMAT_MXFP8 = 5, /* E4M3 elements */
    APA_PV_FORMAT_F16 = 6,
    APA_PV_FORMAT_EXACT = 7
} apa_pv_format;

/* Which numbers of Q and of K share a coarse scale. Q blocks and warps are positions of one head, from position 0. */
typedef enum apa_qk_granularity {
    APA_QK_GRANULARITY_AUTO = 0,
    APA_QK_GRANULARITY_ROW = 1,    /* a query; a key */
    APA_QK_GRANULARITY_THREAD = 2, /* Q: positions equal mod 8 within 32; K: keys equal in (key mod 8)/2 within 64 */
    APA_QK_GRANULARITY_WARP = 3,   /* 32 queries; 64 keys */
    APA_QK_GRANULARITY_BLOCK = 4,  /* 128 queries; 64 keys */
    APA_QK_GRANULARITY_16 = 5,     /* NVFP4's own */
    APA_QK_GRANULARITY_32 = 6      /* MX's own */
} apa_qk_granularity;

typedef enum apa_v_granularity {
    APA_V_GRANULARITY_AUTO = 0,
    APA_V_GRANULARITY_TILE_CHANNEL = 1, /* a channel of a tile */
    APA_V_GRANULARITY_CHANNEL = 2,      /* a channel of the head */
    APA_V_GRANULARITY_BLOCK = 3,        /* a tile */
    APA_V_GRANULARITY_16 = 4,           /* 16 keys of a channel: NVFP4's own */
    APA_V_GRANULARITY_32 = 5            /* 32 keys of a channel: MX's own */
} apa_v_granularity;

/* The FP32 scale over NVFP4's block scales (K and V: of the head, Q: of the row). */
typedef enum apa_tensor_scale {
    APA_TENSOR_SCALE_AUTO = 0,
    APA_TENSOR_SCALE_NONE = 1, /* 1: block scales alone */
    APA_TENSOR_SCALE_AMAX = 2, /* largest value / 2688 */
    APA_TENSOR_SCALE_POW2 = 3  /* K and V: four times that, rounded up to a power of two; Q: as amax */
} apa_tensor_scale;

/* MX block scale: OCP's power of two, which clips, or one that holds the largest value. */
typedef enum apa_mx_rounding {
    APA_MX_ROUNDING_AUTO = 0,
    APA_MX_ROUNDING_FLOOR = 1,
    APA_MX_ROUNDING_UP = 2
} apa_mx_rounding;

/* The row sum is over the P that is multiplied, or over the P before rounding. */
typedef enum apa_p_sum { APA_P_SUM_AUTO = 0, APA_P_SUM_QUANTISED = 1, APA_P_SUM_EXACT = 2 } apa_p_sum;

/* P through the exponential, or codes straight from scores (no exponential). */
typedef enum apa_p_map { APA_P_MAP_AUTO = 0, APA_P_MAP_EXP = 1, APA_P_MAP_DIRECT = 2 } apa_p_map;

/* Which queries share the mean that smooth_q takes off: 128 positions of a query head, or all of the head. */
typedef enum apa_q_mean { APA_Q_MEAN_AUTO = 0, APA_Q_MEAN_BLOCK = 1, APA_Q_MEAN_HEAD = 2 } apa_q_mean;

/* What a sum of products is kept in (docs/recipes.md says where each one rounds). */
typedef enum apa_accumulator {
    APA_ACCUMULATOR_AUTO = 0,
    APA_ACCUMULATOR_F64 = 1,
    APA_ACCUMULATOR_F32 = 2,
    APA_ACCUMULATOR_FP22 = 3, /* 13 stored mantissa bits, truncated */
    APA_ACCUMULATOR_F16 = 4
} apa_accumulator;

/* How the exact pass goes over a row's keys. */
typedef enum apa_softmax {
    APA_SOFTMAX_AUTO = 0,
    APA_SOFTMAX_ONLINE = 1, /* running maximum and sum, key by key */
    APA_SOFTMAX_WHOLE = 2,  /* all of S, then all of P, both kept in s_format and p_format */
    APA_SOFTMAX_TREE = 3    /* ELSA: states of single keys merged as a balanced tree */
} apa_softmax;

typedef enum apa_kept_format {
    APA_KEPT_AUTO = 0,
    APA_KEPT_EXACT = 1,
    APA_KEPT_F16 = 2,
    APA_KEPT_BF16 = 3
} apa_kept_format;

/* What makes a tile hot. */
typedef enum apa_verdict_rule {
    APA_VERDICT_RULE_AUTO = 0,
    APA_VERDICT_RULE_NONE = 1,        /* nothing is judged: hot is what was selected, and early rows */
    APA_VERDICT_RULE_MASS = 2,        /* its share exceeds eps */
    APA_VERDICT_RULE_MASS_VALUE = 3,  /* share · score error · ‖its values' mean - o‖ / ‖o‖ exceeds eps */
    APA_VERDICT_RULE_COLD_BUDGET = 4, /* the largest shares, until what stays cold is at most eps of every row */
    APA_VERDICT_RULE_LAMP = 5         /* no tile is hot as a whole: sub-blocks inside it are (LampAttention) */
} apa_verdict_rule;

/* Hot tiles chosen before any score is formed (ThriftAttention). */
typedef enum apa_select {
    APA_SELECT_AUTO = 0,
    APA_SELECT_NONE = 1,
    APA_SELECT_BLOCK_MEAN = 2,
    APA_SELECT_QUEST = 3,
    APA_SELECT_LOCAL = 4
} apa_select;

/* LampAttention's two stages. */
typedef enum apa_lamp_stages {
    APA_LAMP_STAGES_AUTO = 0,
    APA_LAMP_STAGES_BOTH = 1,
    APA_LAMP_STAGES_FIRST = 2,
    APA_LAMP_STAGES_SECOND = 3
} apa_lamp_stages;

typedef struct apa_recipe {
    size_t size;   /* sizeof(apa_recipe), set by apa_recipe_init() */
    char name[24]; /* the preset this started from */

    /* the walk */
    apa_force force;               /* none, low, high */
    double eps;                    /* hot if a row's share exceeds it; NaN = auto; >= 1 never, < 0 always */
    apa_eps_by eps_by;             /* the same for all rows, or the larger the fewer tiles a row sees */
    apa_toggle second_look;        /* judge the hot candidates again against the final λ */
    apa_lambda_bound lambda_bound; /* start of λ */
    apa_order order;
    int32_t tile;        /* keys per tile; 64 */
    int32_t group;       /* rows that share a verdict; 0 = auto; 1 … 64 */
    apa_packing packing; /* which rows make a group */
    int32_t early_tiles; /* a group whose rows all see at most this many tiles is hot throughout; 0 = none, -1 = auto */
    double frame_drop;   /* δ, log2 units: a hot tile may lift the cold frame to (its maximum - δ) at most */
    double lazy_tau;     /* τ, log2 units: the frame moves only for scores beyond it by more than this */
    apa_toggle skip;     /* leave out tiles that provably change nothing */

    /* prep and formats */
    apa_cold_format cold_format;
    apa_exact_format exact_format;
    int32_t q_terms;         /* 1 or 2: quantise Q once, or Q and its residual; 0 = auto */
    apa_toggle scale_search; /* NVFP4 block scale: least squared error among candidates, or nearest */
    apa_p_scale p_scale;
    apa_toggle smooth_k; /* subtract K's mean per channel */
    apa_toggle smooth_v; /* subtract V's mean per channel from the cold tiles, add it back */
    apa_toggle hadamard; /* rotate Q and K of the cold tiles by a Walsh-Hadamard matrix */

    /* cold operands one by one */
    apa_qk_format qk_format;
    apa_pv_format pv_format;
    apa_toggle exact_q, exact_k, exact_p, exact_v; /* this operand is not quantised */
    apa_qk_granularity qk_scale_granularity;
    apa_v_granularity v_scale_granularity;
    apa_tensor_scale tensor_scale;
    apa_toggle pow2_scales; /* E4M3 operands: scales rounded up to powers of two */
    apa_mx_rounding mx_rounding;
    double v_range;        /* largest code of V (E4M3); NaN = the format's */
    double p_static_scale; /* S of p_scale static; NaN = the format's largest */
    apa_p_sum p_sum;
    apa_p_map p_map;
    apa_toggle p_phase;  /* frames of pairs of tiles take turns at four parts of an octave (p_scale row-tile-pow2) */
    apa_toggle smooth_q; /* subtract a mean from the queries, add its scores back in FP32 */
    apa_q_mean q_mean;   /* the mean of 128 queries, or of all of the head */

    /* sums */
    /* f64 stands for an engine's own wide sums: double in the reference engine, FP32 in the fast ones. */
    apa_accumulator accum;    /* what qk_accum and pv_accum take on auto */
    apa_accumulator qk_accum; /* Q·Kᵀ over the head dim */
    apa_accumulator pv_accum; /* P·V over keys */
    int32_t pv_flush;         /* keys after which P·V goes to an FP32 sum: 16, 32, 64; 0 = never, -1 = auto */
    apa_accumulator exact_accum;
    int32_t exact_flush; /* exact_accum f16: keys after which P·V goes to an FP32 sum; 0 = never, -1 = auto */

    /* the exact pass */
    apa_softmax softmax;
    apa_kept_format s_format, p_format; /* of softmax whole */

    /* other verdicts */
    int32_t early_rows; /* queries before this position among the keys are hot; 0 = none, -1 = auto: 256 if causal */
    apa_verdict_rule verdict;
    apa_select select;
    double fraction;                       /* of the tiles that select makes hot */
    apa_toggle force_sink, force_diagonal; /* tile 0, the last visible tile: always among the selected */
    double tau;        /* LampAttention: share of a row that a tile's 8-bit sub-blocks may hold; 1 = stage 1 alone */
    double margin;     /* LampAttention: natural units under the running maximum that count as safe */
    int32_t sub_block; /* LampAttention: keys that are recomputed together */
    apa_lamp_stages lamp_stages;

    int32_t smooth_k_stride; /* K's mean is that of the keys of tiles 0, n, 2n, … alone; 1 = of all, 0 = auto */
} apa_recipe;

/* Fills in a preset: "apa" (adaptive; the default everywhere), "exact", "cold" (apa with every tile cold).
 * Errors: INVALID_ARGUMENT (recipe NULL, name unknown; NULL name = "apa"). Thread-safe. */
APA_EXPORT apa_status apa_recipe_init(apa_recipe *recipe, const char *preset);

/* Names of the presets with a line about each, for help texts. i = 0, 1, …; NULL past the last. Static storage. */
APA_EXPORT const char *apa_recipe_preset_name(size_t i);
APA_EXPORT const char *apa_recipe_preset_about(size_t i);

/* One knob: its name in text, what it takes, its meaning and where it comes from. Static storage. */
typedef struct apa_recipe_knob {
    const char *name;
    const char *type;   /* "number", "integer", "choice" */
    const char *range;  /* "auto|off|on", "(-inf, inf)", "1 … 64" */
    const char *about;  /* one line */
    const char *source; /* which method or document it comes from */
} apa_recipe_knob;

/* Knob number i, NULL past the last. */
APA_EXPORT const apa_recipe_knob *apa_recipe_knob_at(size_t i);

/* Sets one knob from text ("auto" is accepted where the field has it; toggles take on, off, true, false, 1, 0, auto).
 * On an error, message (of message_size bytes, may be NULL) holds one line with the name, what was found and what was
 * expected, and the recipe is unchanged. Errors: INVALID_ARGUMENT. Thread-safe for different recipes. */
APA_EXPORT apa_status apa_recipe_set(apa_recipe *recipe, const char *knob, const char *value, char *message,
                                     size_t message_size);

/* Writes a knob's value as text, such that apa_recipe_set() takes it back. Errors: INVALID_ARGUMENT (unknown knob, text
 * does not fit). */
APA_EXPORT apa_status apa_recipe_get(const apa_recipe *recipe, const char *knob, char *text, size_t text_size);

/* Is the recipe sound by itself, whatever the engine and the problem? Ranges, NaN where none may be, combinations that
 * make no sense. Message as for apa_recipe_set(). Errors: INVALID_ARGUMENT. */
APA_EXPORT apa_status apa_recipe_check(const apa_recipe *recipe, char *message, size_t message_size);

#ifdef __cplusplus
}
#endif
#endif
