/* The adaptive method: every visible tile in INT8, verdicts, the second look, and the exact pass over the hot tiles. */
#ifndef APA_CPU_ADAPTIVE_H
#define APA_CPU_ADAPTIVE_H

#include "cpu/block.h"
#include "cpu/prep.h"

/* P of one register and tile. */
#define APA_CPU_P_BYTES (APA_CPU_TILE * APA_CPU_LANES)

/* A tile that the running test called hot, kept for the second look. */
typedef struct apa_cpu_candidate {
    float top[APA_CPU_LANES]; /* the tile's maxima, log2 units */
    int32_t sum[APA_CPU_LANES];
    int64_t tile;
    int64_t slot; /* its P in the pool; -1: the pool was full, P is made again when needed */
} apa_cpu_candidate;

/* A panel of the walk: registers side by side on one tile. */
typedef struct apa_cpu_panel {
    int n, reg[APA_CPU_PANEL_I8];
    bool part[APA_CPU_PANEL_I8];
    apa_cpu_span span[APA_CPU_PANEL_I8];
} apa_cpu_panel;

/* A panel on a tile whose scores are known and lie in block->s; P, verdicts and P·V are due. */
typedef struct apa_cpu_open {
    _Alignas(64) float maximum[APA_CPU_PANEL_I8 * APA_CPU_LANES], top[APA_CPU_PANEL_I8][APA_CPU_LANES];
    int32_t sum[APA_CPU_PANEL_I8 * APA_CPU_LANES];
    apa_cpu_panel at; /* at.n = 0: nothing is due */
    uint16_t skipped; /* places in the panel */
    apa_cpu_tile codes;
    int64_t tile;
} apa_cpu_open;

typedef struct apa_cpu_adaptive {
    apa_cpu_walk walk[APA_CPU_BLOCK_REGISTERS];
    uint8_t *q8[APA_CPU_BLOCK_REGISTERS];
    float q_reach[APA_CPU_BLOCK_REGISTERS]
                 [APA_CPU_LANES]; /* the query's part of a score's error, log2 units per key scale */
    apa_cpu_candidate *candidate[APA_CPU_BLOCK_REGISTERS]; /* [tiles] each, in walk order */
    int64_t candidates[APA_CPU_BLOCK_REGISTERS];
    float *shifts[APA_CPU_BLOCK_REGISTERS]; /* [mean_rows][LANES]: q·k̄ of every segment, log2 units */
    int32_t segment;                        /* whose shift the frames have lost */
    /* calls that change scores: INT8 products times factor are natural (of the cap), times plain_scale log2 units */
    float factor[APA_CPU_BLOCK_REGISTERS][APA_CPU_LANES], plain_scale[APA_CPU_BLOCK_REGISTERS][APA_CPU_LANES];
    /* A block of few rows (adaptive_few.c): their number, 0 for any other; their codes; o is [FEW][…] then */
    int few;
    _Alignas(64) uint8_t q_few[APA_CPU_FEW * 1024];
    float eps[APA_CPU_BLOCK_REGISTERS]; /* of each register's rows (eps_by) */
    uint16_t all_hot;                   /* registers that go straight to the exact pass */
    uint16_t *hot;                      /* [tiles]: registers for which the tile is hot */
    uint16_t *skipped;                  /* [tiles]: registers that left the tile out */
    uint16_t *judged;                   /* [tiles]: registers that hold the tile as a candidate */
    uint8_t *pool;                      /* [slots][TILE·LANES] */
    uint8_t *p8;                        /* [PANEL_I8][TILE·LANES]: P of the panel at hand */
    int64_t slots_used;
    apa_cpu_open open[2]; /* the panel at hand, and the one before where it is still open */
    int turn;             /* which of them was opened last */
    /* Most tiles need no look at any row: tiles that every register sees whole, and the registers' numbers of rows */
    int64_t whole_first, whole_end, rows[APA_CPU_BLOCK_REGISTERS];
    /* what happened, over (row, tile) pairs */
    int64_t visible, hot_pairs, skipped_pairs, candidate_pairs;
} apa_cpu_adaptive;

void apa_cpu_adaptive_layout(const apa_cpu_shape *shape, apa_cpu_arena *arena, apa_cpu_adaptive *adaptive);

/* Quantises the block's queries and finds the registers that go straight to the exact pass (adaptive_rows.c). */
void apa_cpu_adaptive_rows(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared);

/* The means of kept segments against every query: fills in shifts (adaptive_rows.c). */
void apa_cpu_adaptive_shifts(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared);

/* Frames and shifts from the segment that they are of to another (adaptive_rows.c). */
void apa_cpu_adaptive_move(apa_cpu_block *block, apa_cpu_adaptive *adaptive, int32_t segment);

/* Does the block, whose queries have been quantised, go the way of few rows (adaptive_few.c)? Its bits are the same. o
 * must be zeros. */
void apa_cpu_few_begin(const apa_cpu_block *block, apa_cpu_adaptive *adaptive);

/* o of few rows times alpha, or, at the end, back into the lanes. */
void apa_cpu_few_scale(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const float *alpha);
void apa_cpu_few_end(apa_cpu_block *block, apa_cpu_adaptive *adaptive);

/* ---- a panel on a tile (adaptive_tile.c); `i` is a place in the panel ---- */

/* Scores into block->s, and each register's maxima over the whole tile. */
void apa_cpu_panel_scores(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes,
                          const apa_cpu_panel *at, float *maximum, const apa_cpu_prefetch *prefetch);

/* What the call puts between a register's scores and its softmax, and the maxima over the keys that are seen. */
void apa_cpu_panel_settle(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_panel *at, int i,
                          int64_t tile, float *maximum);

/* Codes of P and their sums. */
void apa_cpu_panel_probabilities(const apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_panel *at,
                                 int i, const float *maximum, uint8_t *p8, int32_t *sum);

/* o += P·V for up to a panel of registers with their own P and scales. */
void apa_cpu_panel_values(apa_cpu_block *block, const apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes, int n,
                          const int *reg, const uint8_t *const *p8, const float (*p_scale)[APA_CPU_LANES]);

/* P of one register and tile once more, for a demoted candidate without stored P or a skipped tile that counts after
 * all. */
void apa_cpu_adaptive_p_again(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_tile *codes, int r,
                              int64_t tile, uint8_t *p8, float *maximum, int32_t *sum);

static inline void apa_cpu_walk_add_cold(apa_cpu_walk *walk, const int32_t *sum, const float *p_scale)
{
    for (int i = 0; i < APA_CPU_LANES; i++)
        walk->cold[i] += (float)sum[i] * p_scale[i];
}

/* Bits that are set: without the instruction, which baseline x86-64 lacks, the builtin is a call. */
static inline int64_t apa_cpu_lanes_in(uint16_t lanes)
{
    uint32_t x = lanes;
    x -= x >> 1 & 0x5555u;
    x = (x & 0x3333u) + (x >> 2 & 0x3333u);
    x = (x + (x >> 4)) & 0x0f0fu;
    return (x + (x >> 8)) & 0x1fu;
}

static inline bool apa_cpu_tile_is_whole(const apa_cpu_adaptive *adaptive, int64_t tile)
{
    return tile >= adaptive->whole_first && tile < adaptive->whole_end;
}

/* Tile number i of the recipe's order over [first, end). */
static inline int64_t apa_cpu_tile_in_order(apa_order order, int64_t first, int64_t end, int64_t i)
{
    if (order == APA_ORDER_FORWARD)
        return first + i;
    if (order == APA_ORDER_SINK_BACKWARD && first == 0)
        return i == 0 ? 0 : end - i;
    return end - 1 - i;
}

/* All visible tiles in INT8, from empty states (adaptive_walk.c). */
void apa_cpu_adaptive_walk(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared,
                           int64_t first, int64_t end, bool with_floor);

/* Runs the method on a loaded block and leaves its states ready to store. */
void apa_cpu_adaptive_run(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared);

#endif
