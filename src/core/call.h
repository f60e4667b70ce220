/* A validated call: what every engine gets. Nothing in it is on auto, every number has been checked. */
#ifndef APA_CORE_CALL_H
#define APA_CORE_CALL_H

#include "apa/attention.h"

#include <stdbool.h>

typedef struct apa_call {
    apa_tensor q, k, v, out, lse; /* lse.dtype NONE when not wanted */
    int64_t B, Hq, Hkv, G, Sq, Skv, D, Dv;
    double scale;
    bool causal;                                 /* either alignment: q_offset says which */
    int64_t q_offset, window_left, window_right; /* windows: -1 = no bound */

    double softcap;                              /* 0: none */
    apa_tensor mask;                             /* dtype NONE, or [B, Hq, Sq, Skv]: a stride of 0 where it repeats */
    apa_tensor mask_slopes, alibi_slopes, sinks; /* dtype NONE, or f32 [B, Hq, 1, 1], repeating by stride 0 */

    /* Paged K and V (B is 1 then): NULL, or the page of keys j·page_size … of the one sequence. */
    const int32_t *pages;
    int64_t page_size;
    /* NULL, or tiles of K and V that an engine quantised before (cpu/prep.h); engines may leave them aside. */
    const struct apa_kept *kept;

    apa_recipe recipe;
    apa_recipe asked;  /* the recipe before an engine resolved it */
    uint8_t *verdicts; /* NULL, or [B][Hq][Sq][tiles] */
    bool phases;       /* time the phases */
} apa_call;

/* Row of key (or value) j: of x = &call->k or &call->v. All reads of K and V go through here or apa_call_run(). */
static inline const void *apa_call_key(const apa_call *call, const apa_tensor *x, int64_t b, int64_t h, int64_t j)
{
    if (call->pages != NULL) {
        b = call->pages[j / call->page_size];
        j = j % call->page_size;
    }
    const int64_t offset = b * x->stride[0] + h * x->stride[1] + j * x->stride[2];
    return (const char *)x->data + offset * (int64_t)apa_dtype_bytes(x->dtype);
}

/* Keys from j on, at most n, that lie one stride[2] apart. */
static inline int64_t apa_call_run(const apa_call *call, int64_t j, int64_t n)
{
    const int64_t left = call->pages == NULL ? n : call->page_size - j % call->page_size;
    return left < n ? left : n;
}

/* A number per (b, query head) of mask_slopes, alibi_slopes or sinks. */
static inline float apa_call_per_head(const apa_tensor *x, int64_t b, int64_t hq)
{
    return ((const float *)x->data)[b * x->stride[0] + hq * x->stride[1]];
}

/* Anything between scale·q·k and the softmax other than causal line and window? */
static inline bool apa_call_changes_scores(const apa_call *call)
{
    return call->softcap != 0.0 || call->mask.dtype != APA_DTYPE_NONE || call->alibi_slopes.dtype != APA_DTYPE_NONE;
}

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
