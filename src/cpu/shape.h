/* What the CPU engine derives from a call: padded sizes, how the work is cut, where everything lies in the workspace.
 *
 * Work is cut by shape alone, never by the number of threads, and a row's arithmetic does not depend on the cut:
 *   register  16 packed rows, one per lane
 *   block     up to 24 registers of one KV head (12 in the adaptive method and under a mask, whose sets of registers
 * are 16 bits): the unit that a thread works on; K/V tiles are shared by all its rows segment   32 tiles (2048 keys) at
 * absolute positions: exact states are made per segment and merged in one balanced tree chunk     a power of two of
 * segments: the unit along the keys when there are few blocks (decode) */
#ifndef APA_CPU_SHAPE_H
#define APA_CPU_SHAPE_H

#include "core/call.h"
#include "cpu/kernels.h"

#define APA_CPU_BLOCK_REGISTERS 24
#define APA_CPU_SEGMENT_TILES 32

typedef struct apa_cpu_shape {
    int64_t Dp, Dvp;                /* D, Dv rounded up to 8 */
    int64_t tiles;                  /* along the keys */
    int64_t registers, blocks;      /* per KV head */
    int block_registers;            /* at most */
    int64_t units;                  /* B·Hkv·blocks */
    int64_t chunk_segments, chunks; /* exact method only; chunks = 1: no partial states are kept */
    int levels;                     /* depth of the merge tree inside a chunk */
    bool adaptive;                  /* anything but all tiles hot without smoothing */
    int64_t hadamard_block;         /* 1: no rotation */
    int64_t pool_slots;             /* stored P tiles of hot candidates, per block */
    int64_t mean_rows;              /* kept tiles in more than one segment: rows of their means; else 0 */
    bool masked;
} apa_cpu_shape;

/* The call's share of the work it is done together with: 1 alone, 1/n as one of n equal ones. Only how the work is cut
 * depends on it. */
void apa_cpu_shape_of(const apa_call *call, double share, apa_cpu_shape *shape);

/* Makes *most large enough for both: scratch laid out by it serves either. */
void apa_cpu_shape_join(apa_cpu_shape *most, const apa_cpu_shape *shape);

/* Multiplications, about. */
double apa_cpu_work_of(const apa_call *call);

/* Largest power of two that divides D: the Walsh-Hadamard matrix is block diagonal with blocks of this size. */
int64_t apa_cpu_hadamard_block(int64_t D);

/* A running offset into the workspace; every piece starts at a multiple of 64. base may be NULL to measure only. After
 * an overflow the size stays beyond what can be allocated. */
typedef struct apa_cpu_arena {
    char *base;
    size_t used;
} apa_cpu_arena;

void *apa_cpu_take(apa_cpu_arena *arena, int64_t count, size_t bytes);

#endif
