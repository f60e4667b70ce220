/* A block: up to 24 registers of one KV head, with everything a thread needs to work on it. */
#ifndef APA_CPU_BLOCK_H
#define APA_CPU_BLOCK_H

#include "cpu/shape.h"

/* One row of a register. */
typedef struct apa_cpu_row {
    int64_t position, head; /* query position, query head; position -1: padding */
    int64_t first, end;     /* visible keys */
} apa_cpu_row;

typedef struct apa_cpu_register {
    apa_cpu_row row[APA_CPU_LANES];
    uint16_t real;                  /* lanes that are rows */
    int64_t any_first, any_end;     /* keys that some lane sees */
    int64_t every_first, every_end; /* keys that every lane sees */
    bool finite;                    /* every query value is */
    float *q;                       /* [Dp][LANES] */
    uint32_t *q_pairs;              /* [Dp/2][LANES] pairs of BF16 values, where the block has dots of pairs */
    float *o;                       /* [Dvp][LANES] */
    float shift[APA_CPU_LANES];     /* q·k̄ in log2 units: what centred scores lack of the exact ones */
    apa_cpu_state state;
    /* calls that change scores (cpu/bend.h) */
    const char *mask_row[APA_CPU_LANES]; /* the mask's row of the lane, at key 0 */
    float mask_slope[APA_CPU_LANES], slope[APA_CPU_LANES];
    bool drowned; /* some row's visible mask values are all lower than INT8 estimates can tell from nothing */
} apa_cpu_register;

/* Softcap, slopes and mask of a block, see cpu/bend.h. */
typedef struct apa_cpu_bend {
    bool changes; /* the call changes scores: Q carries the scale, frames are natural */
    bool every;   /* on every tile: softcap or slopes */
    bool alibi, masked;
    float cap;         /* 0: none */
    uint16_t *seeing;  /* [registers][tiles]: lanes that the mask lets see some key */
    uint16_t *bent;    /* [tiles]: registers whose scores the mask changes */
    uint16_t *wild;    /* [tiles]: registers with a NaN or +inf (or 2^100) in the mask */
    float *bias;       /* [TILE][LANES], of the tile and register last asked for */
    int64_t bias_tile; /* -1: none */
    int bias_register;
} apa_cpu_bend;

typedef struct apa_cpu_block {
    const apa_call *call;
    const apa_cpu_shape *shape;
    const apa_cpu_kernels *kernels;
    int64_t b, kv_head, head; /* head = b·Hkv + kv_head */
    int n;                    /* registers */
    apa_cpu_register reg[APA_CPU_BLOCK_REGISTERS];
    float c; /* state frames times c are in log2 units: |softmax scale|·log2 e, log2 e where scores are natural */
    apa_cpu_bend bend;
    bool pairs; /* exact scores by scores_bf16: Q and K are BF16 and nothing has been multiplied into Q */
    /* scratch */
    float *k;          /* [TILE][Dp]; with pairs: BF16 values */
    float *v;          /* [Dvp/8][V_BLOCK] */
    uint64_t v_poison; /* keys of the loaded tile with a NaN or Inf in their value */
    float *v_raw;      /* [Dvp/8][V_BLOCK]: the tile with those values in it; v has zeros there */
    float *s;          /* [TILE][PANEL][LANES] */
} apa_cpu_block;

/* Takes a block's buffers from an arena. The block lives at the start of its own scratch. */
void apa_cpu_block_layout(const apa_cpu_shape *shape, apa_cpu_arena *arena, apa_cpu_block *block);

/* Sets the block to unit `unit` (= ((b·Hkv + kv_head)·blocks + block)): rows, visibility, Q in the lanes. Empties
 * states and shifts, not o. */
void apa_cpu_block_load(apa_cpu_block *block, const apa_call *call, const apa_cpu_shape *shape,
                        const apa_cpu_kernels *kernels, int64_t unit);

/* How a register sees a tile. */
typedef enum apa_cpu_view { APA_CPU_VIEW_NONE, APA_CPU_VIEW_PART, APA_CPU_VIEW_ALL } apa_cpu_view;

/* For PART, *span holds the keys that each lane sees by causal line and window; NONE too where a mask hides all. */
apa_cpu_view apa_cpu_block_view(const apa_cpu_block *block, int r, int64_t tile, apa_cpu_span *span);

/* Tiles that some row of the block sees by causal line and window: *first <= tile < *end. */
void apa_cpu_block_tiles(const apa_cpu_block *block, int64_t *first, int64_t *end);

/* Real lanes of register r that see at least one key of the tile. */
uint16_t apa_cpu_block_seeing(const apa_cpu_block *block, int r, int64_t tile);

/* Does any row of the block see a key of the tile? */
bool apa_cpu_block_sees(const apa_cpu_block *block, int64_t tile);

/* Zeroes o and empties the states. */
void apa_cpu_block_clear(apa_cpu_block *block);

/* Writes outputs and LSE of all real rows from the states; sinks join here. */
void apa_cpu_block_store(apa_cpu_block *block);

#endif
