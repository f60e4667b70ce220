/* libapa: recipes - a full description of one attention method's numerics.
 *
 * A preset is a name for a recipe; every field is a knob with a name and can be changed by itself
 * (apa_recipe_set("eps", "0.01")). Fields on "auto" are resolved by the engine that runs the recipe; the statistics of a
 * call hold the resolved recipe, and the reference engine runs any resolved recipe.
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

/* Where the running sum λ of a row starts: at 0, or at Jensen's lower bound of the tiles not seen yet, Σ 64·exp(q·k̄_t). */
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

/* How rows are numbered inside a KV head: rows = position·G + head; head = `group` positions of one head side by side. */
typedef enum apa_packing { APA_PACKING_AUTO = 0, APA_PACKING_ROWS = 1, APA_PACKING_HEAD = 2 } apa_packing;

typedef enum apa_cold_format {
    APA_COLD_FORMAT_AUTO = 0,
    APA_COLD_FORMAT_INT8 = 1, /* symmetric INT8: Q per row, K per key, V per tile and channel, P unsigned per row and tile */
    APA_COLD_FORMAT_NVFP4 = 2 /* E2M1 with UE4M3 scales per 16 values and an FP32 scale per head (K, V) or row (Q) */
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
    APA_P_SCALE_POW2 = 3      /* NVFP4: per 16 keys, a power of two, exponent not under -6 (APA before 0.5) */
} apa_p_scale;

typedef struct apa_recipe {
    size_t size;   /* sizeof(apa_recipe), set by apa_recipe_init() */
    char name[24]; /* the preset this started from */

    /* the walk */
    apa_force force;               /* none, low, high */
    double eps;                    /* hot if a row's share exceeds it; NaN = auto; >= 1 never, < 0 always */
    apa_toggle second_look;        /* judge the hot candidates again against the final λ */
    apa_lambda_bound lambda_bound; /* start of λ */
    apa_order order;
    int32_t tile;         /* keys per tile; 64 */
    int32_t group;        /* rows that share a verdict; 0 = auto; 1 … 64 */
    apa_packing packing;  /* which rows make a group */
    int32_t early_tiles;  /* a group whose rows all see at most this many tiles is hot throughout; 0 = none, -1 = auto */
    double frame_drop;    /* δ, log2 units: a hot tile may lift the cold frame to (its maximum - δ) at most */
    double lazy_tau;      /* τ, log2 units: the frame moves only for scores beyond it by more than this */
    apa_toggle skip;      /* leave out tiles that provably change nothing */

    /* prep and formats */
    apa_cold_format cold_format;
    apa_exact_format exact_format;
    int32_t q_terms;         /* 1 or 2: quantise Q once, or Q and its residual; 0 = auto */
    apa_toggle scale_search; /* NVFP4 block scale: least squared error among candidates, or nearest */
    apa_p_scale p_scale;
    apa_toggle smooth_k; /* subtract K's mean per channel */
    apa_toggle smooth_v; /* subtract V's mean per channel from the cold tiles, add it back */
    apa_toggle hadamard; /* rotate Q and K of the cold tiles by a Walsh-Hadamard matrix */
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
APA_EXPORT apa_status apa_recipe_set(apa_recipe *recipe, const char *knob, const char *value, char *message, size_t message_size);

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
