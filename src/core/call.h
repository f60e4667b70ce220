/* A validated call: what every engine gets. Nothing in it is on auto, every number has been checked. */
#ifndef APA_CORE_CALL_H
#define APA_CORE_CALL_H

#include "apa/attention.h"

#include <stdbool.h>

typedef struct apa_call {
    apa_tensor q, k, v, out, lse; /* lse.dtype NONE when not wanted */
    int64_t B, Hq, Hkv, G, Sq, Skv, D, Dv;
    double scale;
    bool causal;
    int64_t q_offset, window_left, window_right; /* windows: -1 = no bound */
    apa_recipe recipe;
    uint8_t *verdicts; /* NULL, or [B][Hq][Sq][tiles] */
} apa_call;

/* Keys that query i sees: first <= j < end; first == end when it sees none. Overflow-safe for any q_offset and window.
 */
void apa_call_visible(const apa_call *call, int64_t i, int64_t *first, int64_t *end);

/* Tiles of the key axis. */
static inline int64_t apa_call_tiles(const apa_call *call)
{
    return (call->Skv + call->recipe.tile - 1) / call->recipe.tile;
}

/* Row r (0 … Sq·G-1) of a KV head → position and head within the group, by the recipe's packing and group. With head
 * packing positions come in blocks of `group`, so Sq is rounded up and rows with position >= Sq are padding:
 * apa_call_rows() is the padded number. */
int64_t apa_call_rows(const apa_call *call);
void apa_call_row(const apa_call *call, int64_t r, int64_t *position, int64_t *head);

#endif
