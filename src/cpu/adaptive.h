/* The adaptive method: every visible tile in INT8, verdicts, the second look, and the exact pass over the hot tiles. */
#ifndef APA_CPU_ADAPTIVE_H
#define APA_CPU_ADAPTIVE_H

#include "cpu/block.h"
#include "cpu/prep.h"

/* A tile that the running test called hot, kept for the second look. */
typedef struct apa_cpu_candidate {
    float top[APA_CPU_LANES]; /* the tile's maxima, log2 units */
    int32_t sum[APA_CPU_LANES];
    int64_t tile;
    int64_t slot; /* its P in the pool; -1: the pool was full, P is made again when needed */
} apa_cpu_candidate;

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
    uint16_t all_hot;  /* registers that go straight to the exact pass */
    uint16_t *hot;     /* [tiles]: registers for which the tile is hot */
    uint16_t *skipped; /* [tiles]: registers that left the tile out */
    uint8_t *pool;     /* [slots][TILE·LANES] */
    uint8_t *p8;       /* [PANEL_I8][TILE·LANES]: P of the panel at hand */
    int64_t slots_used;
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

/* Runs the method on a loaded block and leaves its states ready to store. */
void apa_cpu_adaptive_run(apa_cpu_block *block, apa_cpu_adaptive *adaptive, const apa_cpu_prepared *prepared);

#endif
