/* Derived sizes of a call. */
#include "cpu/shape.h"

#include "cpu/prep.h"

#include <math.h>

/* With fewer units than this, blocks get smaller and exact work is cut along the keys too. A constant, so that results
 * and work do not depend on the machine. */
#define ENOUGH_UNITS 32
#define ALL_HOT(recipe) ((recipe)->force == APA_FORCE_HIGH && (recipe)->smooth_k == APA_TOGGLE_OFF)
#define LARGEST_POOL 4096 /* P tiles of 1 KiB */

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

int64_t apa_cpu_hadamard_block(int64_t D)
{
    return D & -D;
}

/* Registers of a block: as many as keep Q and O of a block in the second-level cache, fewer when there is little work.
 * The exact method reads and widens K and V anew for every block, so it takes wider ones (half a megabyte at most),
 * gives up no more width than it must, and is cut along the keys first. Sets of registers are 16 bits where there are
 * verdicts or a mask. */
static int choose_block_registers(const apa_call *call, const apa_cpu_shape *shape, int64_t enough)
{
    const int64_t width = shape->Dp > shape->Dvp ? shape->Dp : shape->Dvp;
    const bool wide = !shape->adaptive && !shape->masked;
    const int64_t cuts = shape->adaptive ? 1 : ceil_div(shape->tiles, APA_CPU_SEGMENT_TILES);
    int registers = (width <= 128 ? 12 : width <= 256 ? 6 : 3) * (wide ? 2 : 1);
    while (wide && registers > 3 && registers - 3 >= shape->registers)
        registers -= 3;
    while (registers > 3 && call->B * call->Hkv * cuts * ceil_div(shape->registers, registers) < enough)
        registers = wide ? registers - 3 : registers / 2;
    return registers;
}

static void cut_along_keys(apa_cpu_shape *shape, int64_t enough)
{
    const int64_t segments = ceil_div(shape->tiles, APA_CPU_SEGMENT_TILES);
    shape->chunk_segments = 1;
    shape->chunks = 1;
    if (!shape->adaptive && shape->units > 0)
        while (shape->chunk_segments < segments &&
               shape->units * ceil_div(segments, shape->chunk_segments * 2) >= enough)
            shape->chunk_segments *= 2;
    if (shape->adaptive || shape->units >= enough)
        while (shape->chunk_segments < segments)
            shape->chunk_segments *= 2;
    shape->chunks = segments == 0 ? 1 : ceil_div(segments, shape->chunk_segments);
    shape->levels = 1;
    for (int64_t n = shape->chunk_segments > shape->chunks ? shape->chunk_segments : shape->chunks; n > 1;
         n = (n + 1) / 2)
        shape->levels++;
}

double apa_cpu_work_of(const apa_call *call)
{
    return (double)call->B * (double)call->Hq * (double)(call->Sq + 1) * (double)(call->Skv + 1);
}

void apa_cpu_shape_of(const apa_call *call, double share, apa_cpu_shape *shape)
{
    const int64_t enough = (int64_t)ceil(ENOUGH_UNITS * share);
    shape->Dp = ceil_div(call->D, 8) * 8;
    shape->Dvp = ceil_div(call->Dv, 8) * 8;
    shape->tiles = ceil_div(call->Skv, APA_CPU_TILE);
    shape->registers = ceil_div(apa_call_rows(call), APA_CPU_LANES);
    /* Without rows or keys there is nothing to prepare: the exact path writes the empty rows. */
    shape->adaptive = !ALL_HOT(&call->recipe) && call->Sq > 0 && call->Skv > 0;
    shape->masked = call->mask.dtype != APA_DTYPE_NONE;
    shape->block_registers = choose_block_registers(call, shape, enough);
    shape->blocks = ceil_div(shape->registers, shape->block_registers);
    shape->units = call->B * call->Hkv * shape->blocks;
    cut_along_keys(shape, enough);
    shape->hadamard_block = call->recipe.hadamard == APA_TOGGLE_ON ? apa_cpu_hadamard_block(call->D) : 1;
    /* A diffuse row has about 1/eps candidates before the second look; twice that, and a few, are kept without asking.
     */
    double wanted = call->recipe.eps > 0.0 ? 2.0 / call->recipe.eps + 16.0 : 0.0;
    wanted = wanted < (double)shape->tiles ? wanted : (double)shape->tiles;
    wanted *= shape->block_registers;
    shape->pool_slots = shape->adaptive ? 1 + (int64_t)(wanted < LARGEST_POOL ? wanted : LARGEST_POOL) : 0;
    shape->mean_rows = call->kept != NULL && call->kept->segments > 1 ? call->kept->mean_rows : 0;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

void apa_cpu_shape_join(apa_cpu_shape *most, const apa_cpu_shape *shape)
{
    most->Dp = larger(most->Dp, shape->Dp);
    most->Dvp = larger(most->Dvp, shape->Dvp);
    most->tiles = larger(most->tiles, shape->tiles);
    most->block_registers = (int)larger(most->block_registers, shape->block_registers);
    most->levels = (int)larger(most->levels, shape->adaptive ? 0 : shape->levels);
    most->adaptive = most->adaptive || shape->adaptive;
    most->pool_slots = larger(most->pool_slots, shape->pool_slots);
    most->mean_rows = larger(most->mean_rows, shape->mean_rows);
    most->masked = most->masked || shape->masked;
}

void *apa_cpu_take(apa_cpu_arena *arena, int64_t count, size_t bytes)
{
    const size_t at = arena->used;
    size_t total;
    if (__builtin_mul_overflow((size_t)count, bytes, &total) || __builtin_add_overflow(total, (size_t)63, &total) ||
        __builtin_add_overflow(at, total / 64 * 64, &arena->used))
        arena->used = SIZE_MAX / 64 * 64; /* sticks, and no allocation of this size succeeds */
    return arena->base == NULL ? NULL : arena->base + at;
}
