/* The CUDA engines against the reference engine, on a device: one command, one table, exit 0 when all holds.
 *
 * Every case runs the engine, then the reference engine with the recipe that the engine resolved, and looks at all
 * pairs: error      relative L2 and worst pair of the outputs, and the largest difference of the LSE verdicts   equal,
 * but for tiles whose share is within WINDOW of ε: those are hot at ε(1 - WINDOW) and cold at ε(1 + WINDOW) in the
 * reference engine; counted, and no others are allowed. Rounding moves a share by the step of one code of P in a sum
 * that is at least 255 (.4 %) and by the FP32 error of scores. repeats    five runs with the same bits Then: codes bit
 * for bit, values that are not finite, and the device-pointer interface inside a captured graph.
 *
 *   verify [quick] [below90] [ENGINE] [METHOD]   quick: small shapes alone, for compute-sanitizer; below90: nothing
 * that needs code for sm_90 (a build with APA_CUDA_ARCHS=89-virtual, whose kernels copy as older devices do, has no
 * NVFP4); ENGINE: cuda (the best that takes a case), cuda:warp, cuda:wgmma; METHOD: cases of one preset alone */
#include "apa/apa.h"
#include "apa/cuda.h"
#include "apa/eval.h"

#include "cli/cli.h"
#include "core/call.h"
#include "cuda/job.h"
#include "tests/cuda/verify.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WINDOW 0.01
#define REPEATS 5

static int failures, below_90;
static const char *engine = "cuda", *only_method;

void cli_progress(void *user, const char *phase, double fraction)
{
    (void)user;
    (void)phase;
    (void)fraction;
}

static void check(int holds, const char *what)
{
    if (holds)
        return;
    failures++;
    printf("  FAILED: %s\n", what);
}

typedef struct test_case {
    const char *kind, *method, *set;
    int64_t B, Hq, Hkv, Sq, Skv, D;
    int bf16, causal;
    int64_t q_offset, left, right;
    double scale, tolerance;
} test_case;

/* exact in 16 bits: P is rounded to 11 bits (f16), 8 bits (bf16) before the product */
#define F16 1e-3
#define BF16 6e-3
/* FP16 sums: at most 4 roundings to 11 bits a tile, wherever the matrix unit has them. */
#define HALF_SUMS 3e-3
#define HALF "exact_accum=f16"
/* On sm_90 E4M3 products are sums of 16-bit ones in FP32; matrix units that have E4M3 keep about 13 bits of a sum. */
#define E4M3 2e-3
/* E2M1 has 8 steps: a P on the edge of two (by an error of 2^-22 in a score) moves by a third. */
#define NVFP4 3e-3
/* ... and where a score is on the edge of frame + τ, one side moves a group's frames and the other does not: all P of
 * these rows are rounded anew, and the rows are off by about the format's own error. */
#define NVFP4_WORST 0.2
/* With the keys cut (from 1024 on, where there are few rows), NVFP4's frames are those of the parts: other roundings of
 * P than the whole walk's. */
#define NVFP4_CUT 6e-2
#define WINDOW_CUT 0.5
#define DEFAULT APA_Q_OFFSET_DEFAULT
#define FINE "qk_scale_granularity=row v_scale_granularity=tile-channel"

/* "wide": exact at D = 64 in blocks of 192 rows on Hopper, from four a multiprocessor on (wgmma/host.c; an H200 has
 * 132): many KV heads of few rows. */
static const test_case small_cases[] = {
    {"randn", "exact", NULL, 1, 2, 1, 100, 190, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 2, 3, 1, 33, 129, 128, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"randn", "exact", NULL, 1, 2, 2, 70, 200, 256, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 66, 8, 8, 20, 130, 64, 0, 1, DEFAULT, -1, -1, NAN, F16}, /* wide */
    {"randn", "exact", HALF, 1, 2, 1, 100, 190, 64, 0, 1, DEFAULT, -1, -1, NAN, HALF_SUMS},
    {"randn", "exact", HALF, 1, 2, 2, 70, 200, 256, 0, 0, DEFAULT, -1, -1, NAN, HALF_SUMS},
    {"outliers", "apa", NULL, 1, 2, 1, 100, 333, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "eps=0.02", 2, 3, 1, 50, 640, 128, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"randn", "cold", NULL, 1, 2, 2, 70, 200, 256, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"topics", "apa", FINE, 1, 2, 1, 50, 640, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "pv_format=e4m3 eps=0.02", 1, 3, 1, 50, 640, 128, 0, 0, DEFAULT, -1, -1, NAN, E4M3},
    {"outliers", "apa", "cold_format=e4m3 eps=0.02", 1, 2, 2, 70, 200, 256, 0, 1, DEFAULT, -1, -1, NAN, E4M3},
    {"topics", "apa", "cold_format=nvfp4", 1, 2, 1, 50, 333, 64, 0, 1, DEFAULT, -1, -1, NAN, NVFP4},
    {"topics", "apa", "cold_format=nvfp4 eps=0.03", 1, 3, 1, 50, 640, 128, 1, 0, DEFAULT, -1, -1, NAN, BF16},
};

static const test_case cases[] = {
    /* exact: dims, types, masks, odd lengths, grouped heads, few rows, splits */
    {"randn", "exact", NULL, 1, 4, 4, 512, 1024, 64, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 1, 6, 2, 384, 1000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 2, 2, 2, 257, 777, 256, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 1, 4, 1, 256, 512, 128, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"outliers", "exact", NULL, 1, 6, 2, 300, 2000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"sink-tail", "exact", NULL, 1, 3, 1, 128, 8192, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 1, 4, 2, 500, 900, 128, 0, 1, 100, 300, -1, NAN, F16},
    {"randn", "exact", NULL, 1, 4, 2, 500, 900, 64, 0, 0, -200, 64, 64, NAN, F16},
    {"randn", "exact", NULL, 1, 24, 8, 1, 5000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 3, 8, 2, 7, 65, 64, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"randn", "exact", NULL, 1, 2, 1, 640, 640, 128, 0, 1, DEFAULT, -1, -1, -0.2, F16},
    {"randn", "exact", NULL, 1, 2, 1, 64, 640, 128, 0, 0, DEFAULT, -1, -1, 0.0, F16},
    {"randn", "exact", NULL, 1, 2, 1, 64, 640, 128, 0, 0, DEFAULT, -1, -1, 3.0, F16},
    {"randn", "exact", NULL, 1, 2, 2, 200, 100, 128, 0, 1, DEFAULT, -1, -1, NAN, F16}, /* rows that see nothing */
    /* wide: rows that are not there, in one line, rows that grow by units with a window, four splits */
    {"randn", "exact", NULL, 8, 44, 22, 200, 700, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "exact", "packing=rows", 8, 66, 22, 150, 300, 64, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"randn", "exact", NULL, 11, 24, 24, 256, 512, 64, 0, 1, DEFAULT, 100, -1, NAN, F16},
    {"topics", "exact", NULL, 1, 134, 67, 70, 2000, 64, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"randn", "exact", HALF, 1, 6, 2, 384, 1000, 128, 0, 1, DEFAULT, -1, -1, NAN, HALF_SUMS},
    {"sink-tail", "exact", HALF, 1, 3, 1, 128, 8192, 128, 0, 1, DEFAULT, -1, -1, NAN, HALF_SUMS},
    {"outliers", "exact", HALF, 1, 4, 2, 300, 2000, 64, 0, 1, 1500, 1100, -1, NAN, HALF_SUMS},
    {"topics", "exact", HALF, 1, 24, 8, 1, 5000, 256, 0, 1, DEFAULT, -1, -1, NAN, HALF_SUMS},
    {"randn", "exact", HALF, 1, 2, 1, 64, 640, 128, 0, 0, DEFAULT, -1, -1, 3.0, HALF_SUMS},
    /* adaptive */
    {"topics", "apa", HALF, 1, 6, 2, 512, 8192, 128, 0, 0, DEFAULT, -1, -1, NAN, HALF_SUMS},
    {"sink-tail", "apa", HALF, 1, 3, 1, 256, 16384, 64, 0, 1, DEFAULT, -1, -1, NAN, HALF_SUMS},
    {"outliers", "apa", HALF, 1, 2, 2, 300, 3001, 256, 0, 1, DEFAULT, -1, -1, NAN, HALF_SUMS},
    {"topics", "apa", "exact_accum=f16 cold_format=nvfp4 eps=0.02", 1, 6, 2, 512, 950, 128, 0, 0, DEFAULT, -1, -1, NAN,
     HALF_SUMS},
    {"topics", "apa", NULL, 1, 6, 2, 512, 8192, 128, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", NULL, 1, 3, 1, 1024, 4096, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"sink-tail", "apa", NULL, 1, 3, 1, 256, 16384, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "apa", NULL, 1, 6, 2, 300, 3001, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "apa", NULL, 1, 4, 2, 512, 4096, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "apa", "eps=0.005", 1, 4, 2, 512, 4096, 128, 1, 1, DEFAULT, -1, -1, 0.2, BF16},
    {"topics", "apa", NULL, 2, 4, 2, 200, 2777, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", NULL, 1, 2, 2, 333, 2048, 256, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"topics", "apa", NULL, 1, 4, 2, 500, 3000, 128, 0, 1, 1500, 1100, -1, NAN, F16},
    {"topics", "apa", "hadamard=off", 1, 4, 2, 130, 3000, 128, 0, 0, 300, 400, 700, NAN, F16},
    {"topics", "apa", "smooth_k=off", 1, 4, 2, 130, 3000, 128, 0, 0, DEFAULT, -1, -1, -0.09, F16},
    /* rows of few tiles: whole units, a part of one, in lines that begin inside a unit, with a window, packed by rows,
       all */
    {"topics", "apa", "early_tiles=8", 1, 2, 1, 1024, 1024, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "early_tiles=9", 1, 2, 1, 1024, 1024, 128, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"outliers", "apa", "early_tiles=11", 2, 6, 2, 1000, 1500, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "apa", "early_tiles=10", 1, 6, 2, 1000, 1000, 128, 0, 1, DEFAULT, 900, -1, NAN, F16},
    {"topics", "apa", "early_tiles=7 packing=rows", 1, 6, 2, 700, 900, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "early_tiles=4", 1, 4, 2, 500, 900, 128, 0, 1, DEFAULT, 150, -1, NAN, F16},
    {"topics", "apa", "early_tiles=auto", 1, 3, 1, 8192, 8192, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "early_tiles=auto", 1, 2, 1, 300, 2000, 64, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "early_tiles=auto", 1, 3, 1, 8192, 8192, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", NULL, 2, 24, 8, 5, 3000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16}, /* packing rows */
    {"topics", "apa", NULL, 1, 12, 4, 40, 3000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "cold", NULL, 1, 4, 2, 512, 4096, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "cold", NULL, 1, 2, 1, 300, 3000, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "cold", NULL, 1, 2, 2, 200, 100, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", NULL, 1, 3, 1, 128, 32768, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "apa", NULL, 2, 2, 1, 64, 32768, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "exact", NULL, 50, 4, 4, 3, 70, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "force=high", 1, 4, 2, 256, 1000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "second_look=off eps=0.05", 1, 4, 2, 256, 3000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    /* groups that see one tile and groups that see all of them, whose ε differ where it is by row; and where it is not
     */
    {"topics", "apa", NULL, 1, 3, 1, 1500, 1500, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "eps_by=call", 1, 3, 1, 1500, 1500, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", NULL, 1, 4, 2, 700, 3000, 128, 0, 1, DEFAULT, 300, -1, NAN, F16},
    {"topics", "apa", NULL, 1, 3, 1, 1500, 1500, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    /* so many units that none is split: on Hopper a block does both passes of one */
    {"outliers", "apa", NULL, 4, 24, 8, 700, 700, 128, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"topics", "apa", NULL, 4, 24, 8, 384, 2048, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "apa", NULL, 4, 24, 8, 384, 1500, 64, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"sink-tail", "apa", "early_tiles=20", 4, 24, 8, 384, 1600, 128, 0, 1, DEFAULT, 1290, -1, NAN, F16},
    {"randn", "apa", "smooth_q=off eps=0.03", 2, 48, 4, 384, 2000, 128, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "cold", NULL, 4, 24, 8, 384, 1000, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "cold", NULL, 4, 24, 8, 384, 1000, 64, 0, 1, DEFAULT, -1, -1, 100.0,
     F16}, /* scores beyond what codes hold on Hopper, and so far from 0 that exponents need another way elsewhere */
    {"randn", "cold", "pv_format=e4m3", 1, 4, 2, 384, 1000, 64, 0, 1, DEFAULT, -1, -1, 100.0, E4M3}, /* likewise */
    {"sink-tail", "cold", NULL, 4, 24, 8, 384, 1000, 128, 0, 1, DEFAULT, -1, -1, -0.1,
     F16}, /* tiles far apart, negated */
    {"topics", "apa", "eps=0.05", 4, 24, 8, 384, 1500, 128, 0, 1, DEFAULT, 700, -1, NAN, F16},
    /* D 64 in so many units that blocks have three warpgroups; rows of few tiles that end inside such a block */
    {"topics", "apa", "early_tiles=3", 8, 44, 22, 400, 400, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "apa", NULL, 8, 44, 22, 200, 700, 64, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"randn", "cold", NULL, 8, 44, 22, 200, 700, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "packing=rows early_tiles=2", 8, 66, 22, 150, 300, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "eps=0.05 early_tiles=0", 8, 44, 22, 400, 400, 64, 0, 1, DEFAULT, 150, -1, NAN, F16},
    /* other cold formats */
    {"topics", "apa", FINE, 1, 6, 2, 512, 8192, 128, 0, 0, DEFAULT, -1, -1, NAN, F16},
    {"outliers", "apa", FINE, 1, 6, 2, 300, 3001, 128, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"sink-tail", "apa", FINE, 1, 3, 1, 100, 3000, 256, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"randn", "cold", FINE, 1, 4, 2, 512, 4096, 64, 0, 1, DEFAULT, -1, -1, NAN, F16},
    {"topics", "apa", "pv_format=e4m3", 1, 6, 2, 512, 8192, 128, 0, 0, DEFAULT, -1, -1, NAN, E4M3},
    {"sink-tail", "apa", "pv_format=e4m3", 1, 3, 1, 256, 16384, 128, 0, 1, DEFAULT, -1, -1, NAN, E4M3},
    {"outliers", "apa", "pv_format=e4m3", 2, 4, 2, 200, 2777, 64, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"randn", "cold", "pv_format=e4m3", 1, 2, 2, 200, 1000, 256, 0, 1, DEFAULT, -1, -1, NAN, E4M3},
    {"topics", "apa", "cold_format=e4m3", 1, 6, 2, 512, 8192, 128, 0, 0, DEFAULT, -1, -1, NAN, E4M3},
    {"sink-tail", "apa", "cold_format=e4m3", 1, 3, 1, 256, 16384, 128, 0, 1, DEFAULT, -1, -1, NAN, E4M3},
    {"outliers", "apa", "cold_format=e4m3", 1, 6, 2, 300, 3001, 128, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"topics", "apa", "cold_format=e4m3 hadamard=on", 1, 4, 2, 500, 3000, 64, 0, 1, 1500, 1100, -1, NAN, E4M3},
    {"topics", "apa", "cold_format=e4m3", 1, 2, 2, 333, 2048, 256, 0, 1, DEFAULT, -1, -1, NAN, E4M3},
    {"randn", "cold", "cold_format=e4m3", 1, 4, 2, 512, 4096, 128, 0, 1, DEFAULT, -1, -1, NAN, E4M3},
    {"topics", "apa", "cold_format=nvfp4 eps=0.02", 1, 6, 2, 512, 950, 128, 0, 0, DEFAULT, -1, -1, NAN, NVFP4},
    {"sink-tail", "apa", "cold_format=nvfp4", 1, 3, 1, 256, 960, 128, 0, 1, DEFAULT, -1, -1, NAN, NVFP4},
    {"outliers", "apa", "cold_format=nvfp4 eps=0.05", 1, 6, 2, 300, 941, 128, 1, 1, DEFAULT, -1, -1, NAN, BF16},
    {"topics", "apa", "cold_format=nvfp4 eps=0.03", 2, 4, 2, 200, 777, 64, 0, 1, DEFAULT, -1, -1, NAN, NVFP4},
    {"topics", "apa", "cold_format=nvfp4 eps=0.03", 1, 2, 2, 333, 950, 256, 0, 1, DEFAULT, -1, -1, NAN, NVFP4},
    {"topics", "apa", "cold_format=nvfp4 eps=0.05", 1, 4, 2, 500, 960, 128, 0, 1, 600, 400, -1, NAN, NVFP4},
    {"topics", "apa", "cold_format=nvfp4 eps=0.05", 2, 24, 8, 5, 900, 128, 0, 1, DEFAULT, -1, -1, NAN, NVFP4},
    {"randn", "cold", "cold_format=nvfp4", 1, 4, 2, 512, 960, 128, 0, 1, DEFAULT, -1, -1, NAN, NVFP4},
    {"outliers", "cold", "cold_format=nvfp4", 1, 2, 1, 100, 900, 64, 1, 0, DEFAULT, -1, -1, NAN, BF16},
    {"randn", "cold", "cold_format=nvfp4 hadamard=on", 1, 2, 1, 200, 960, 256, 0, 1, DEFAULT, -1, -1, 0.1, NVFP4},
    {"sink-tail", "cold", "cold_format=nvfp4 smooth_k=off hadamard=on", 1, 2, 1, 100, 640, 128, 0, 1, DEFAULT, -1, -1,
     NAN, NVFP4},
    {"topics", "apa", "cold_format=nvfp4 second_look=off", 1, 6, 2, 512, 4096, 128, 0, 1, DEFAULT, -1, -1, NAN, NVFP4},
    {"topics", "apa", "cold_format=nvfp4 scale_search=off second_look=off frame_drop=0 lazy_tau=2", 1, 3, 1, 256, 3000,
     128, 0, 1, DEFAULT, -1, -1, NAN, NVFP4},
    {"topics", "apa", "cold_format=nvfp4", 1, 6, 2, 512, 8192, 128, 0, 0, DEFAULT, -1, -1, NAN, NVFP4_CUT},
};

/* Tiles left out. A key holds all of a row (sink-tail with steeper scores, so that the other tiles are sure to be lost
 * in FP32), and a share of the visible tiles between two bounds has to be skipped. At 3.5 times the usual scale masses
 * are small enough but the other tiles' values, 50 times the sink's, would show: all come back. */
typedef struct skip_case {
    test_case common;
    double least, most;
} skip_case;

#define SKIP "skip=on"

static const skip_case small_skip_cases[] = {
    {{"sink-tail", "apa", SKIP, 1, 2, 1, 64, 500, 64, 0, 1, DEFAULT, -1, -1, 0.5625, F16}, 0.5, 1},
    {{"sink-tail", "apa", SKIP, 1, 2, 1, 64, 500, 64, 0, 1, DEFAULT, -1, -1, 0.4375, F16}, 0, 0.05},
};

static const skip_case skip_cases[] = {
    {{"sink-tail", "apa", SKIP, 4, 24, 8, 768, 1024, 64, 0, 1, DEFAULT, -1, -1, 0.5625, F16}, 0.5, 1},
    {{"sink-tail", "apa", SKIP, 4, 24, 8, 768, 1024, 64, 0, 1, DEFAULT, -1, -1, 0.4375, F16}, 0, 0.05},
    {{"sink-tail", "cold", "skip=on pv_format=e4m3", 1, 3, 1, 256, 2048, 128, 0, 0, DEFAULT, -1, -1, 0.4, E4M3},
     0.1,
     1},
    {{"sink-tail", "apa", SKIP, 1, 2, 2, 100, 1000, 256, 1, 1, DEFAULT, -1, -1, 0.28, BF16}, 0.05, 1},
    {{"sink-tail", "apa", SKIP, 2, 8, 2, 5, 500, 128, 0, 1, DEFAULT, -1, -1, 0.4, F16}, 0.05, 1}, /* packing rows */
    {{"sink-tail", "apa", SKIP, 1, 4, 2, 300, 500, 128, 0, 1, DEFAULT, 450, -1, 0.4, F16}, 0.01, 1},
    {{"randn", "apa", SKIP, 1, 4, 2, 512, 4096, 128, 0, 1, DEFAULT, -1, -1, NAN, F16}, 0, 0},
    {{"topics", "apa", SKIP, 1, 6, 2, 300, 2000, 128, 0, 1, DEFAULT, -1, -1, 0.2, F16}, 0, 1},
};

typedef struct run_data {
    cli_synthetic shape;
    apa_array q, k, v;
    apa_problem problem;
    int64_t pairs, tiles;
    float *out[2], *lse[2]; /* engine, reference */
    uint8_t *verdict[4];    /* engine, reference, reference at ε(1 - WINDOW), at ε(1 + WINDOW) */
} run_data;

static apa_tensor tensor_of(const apa_array *a)
{
    const apa_dtype dtype = a->type == APA_ARRAY_BF16 ? APA_DTYPE_BF16 : APA_DTYPE_F16;
    return apa_tensor_hnd(a->data, dtype, a->shape[0], a->shape[1], a->shape[2], a->shape[3]);
}

static int make_array(apa_array *a, int bf16, int64_t B, int64_t H, int64_t S, int64_t D)
{
    const int64_t shape[4] = {B, H, S, D};
    return apa_array_allocate(a, bf16 ? APA_ARRAY_BF16 : APA_ARRAY_F16, 4, shape) == APA_STATUS_OK;
}

static int prepare(const test_case *c, run_data *data)
{
    memset(data, 0, sizeof *data);
    const cli_synthetic shape = {c->kind, c->B, c->Hq, c->Hkv, c->Sq, c->Skv, c->D, c->D, 7};
    data->shape = shape;
    if (!make_array(&data->q, c->bf16, c->B, c->Hq, c->Sq, c->D) ||
        !make_array(&data->k, c->bf16, c->B, c->Hkv, c->Skv, c->D) ||
        !make_array(&data->v, c->bf16, c->B, c->Hkv, c->Skv, c->D) ||
        !cli_synthetic_fill(&shape, &data->q, &data->k, &data->v))
        return 0;
    data->pairs = c->B * c->Hq * c->Sq;
    data->tiles = (c->Skv + 63) / 64;
    for (int i = 0; i < 2; i++) {
        data->out[i] = malloc((size_t)(data->pairs * c->D) * sizeof(float));
        data->lse[i] = malloc((size_t)data->pairs * sizeof(float));
    }
    for (int i = 0; i < 4; i++)
        data->verdict[i] = malloc((size_t)(data->pairs * data->tiles));
    apa_problem_init(&data->problem);
    data->problem.q = tensor_of(&data->q);
    data->problem.k = tensor_of(&data->k);
    data->problem.v = tensor_of(&data->v);
    data->problem.softmax_scale = c->scale;
    data->problem.causal = c->causal;
    data->problem.q_offset = c->q_offset;
    data->problem.window_left = c->left;
    data->problem.window_right = c->right;
    return 1;
}

static void give_back(run_data *data)
{
    apa_array_free(&data->q);
    apa_array_free(&data->k);
    apa_array_free(&data->v);
    for (int i = 0; i < 2; i++) {
        free(data->out[i]);
        free(data->lse[i]);
    }
    for (int i = 0; i < 4; i++)
        free(data->verdict[i]);
}

static apa_status run(apa_context *context, const run_data *data, const char *which, const apa_recipe *recipe,
                      float *out, float *lse, uint8_t *verdict, apa_statistics *statistics)
{
    apa_problem problem = data->problem;
    const cli_synthetic *s = &data->shape;
    problem.out = apa_tensor_hnd(out, APA_DTYPE_F32, s->B, s->Hq, s->Sq, s->D);
    problem.lse = apa_tensor_hnd(lse, APA_DTYPE_F32, s->B, s->Hq, s->Sq, 1);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = which;
    options.verdicts = verdict;
    apa_statistics_init(statistics);
    const apa_status status = apa_attention(context, &problem, recipe, &options, statistics);
    if (status != APA_STATUS_OK)
        printf("  %s: %s\n", which, apa_context_message(context));
    return status;
}

/* The preset without rows that go to the exact pass for their few tiles: in these short contexts that would be all of
 * them. Cases of their own have some. */
static void init_recipe(apa_recipe *recipe, const char *method)
{
    apa_recipe_init(recipe, method);
    recipe->early_tiles = 0;
}

/* Direct codes step by 2^(1/8), and a score's last bits are the engine's own: where it lies on the edge between two
 * codes, engine and reference take different ones. An output then differs by a part of what the format itself leaves,
 * and a mass by a step in a few of its 64 terms. */
#define COARSE_WINDOW 0.2 /* a step up in the mass, a step down in λ: 2^(2/8) */
#define COARSE_PART 0.5   /* of the reference's own error, that the difference may be */
#define COARSE_WORSE 1.15 /* times the reference's own error, that the engine's may be */

static int is_coarse(const apa_recipe *recipe)
{
    return recipe->p_map == APA_P_MAP_DIRECT && recipe->force != APA_FORCE_HIGH;
}

/* Verdicts of the reference with another ε, which stays by row or is that of every row. */
static void run_moved(apa_context *context, run_data *data, const apa_recipe *recipe, double eps, apa_eps_by by,
                      uint8_t *verdict)
{
    float *out = malloc((size_t)(data->pairs * data->shape.D) * sizeof *out),
          *lse = malloc((size_t)data->pairs * sizeof *lse);
    apa_recipe moved = *recipe;
    apa_statistics statistics;
    moved.eps = eps;
    moved.eps_by = by;
    run(context, data, "reference", &moved, out, lse, verdict, &statistics);
    free(out);
    free(lse);
}

/* ε by row is at most MOST_EPS, which a moved ε cannot move: verdicts of rows whose ε is that, or would be with a
 * larger one, may be on either side of MOST_EPS(1 ± window), too. Adds those to verdict[2] and verdict[3]. */
#define MOST_EPS 0.1

static void move_most_eps(apa_context *context, run_data *data, const apa_recipe *recipe, double window)
{
    const size_t n = (size_t)(data->pairs * data->tiles);
    uint8_t *const side[2] = {malloc(n), malloc(n)};
    const double most = recipe->eps > MOST_EPS ? recipe->eps : MOST_EPS;
    for (int i = 0; i < 2; i++)
        run_moved(context, data, recipe, most * (i == 0 ? 1 - window : 1 + window), APA_EPS_BY_CALL, side[i]);
    for (int64_t row = 0; row < data->pairs; row++) {
        const int64_t begin = row * data->tiles;
        int64_t seen = 0;
        for (int64_t t = begin; t < begin + data->tiles; t++)
            seen += data->verdict[1][t] != APA_VERDICT_INVISIBLE;
        /* of its group's rows some may see more: they have a smaller ε, and the verdict of the moved one counts */
        if (seen == 0 || recipe->eps * (1 + window) * sqrt((double)data->tiles / (double)seen) < most)
            continue;
        for (int64_t t = begin; t < begin + data->tiles; t++) {
            if (side[0][t] == APA_VERDICT_HOT)
                data->verdict[2][t] = APA_VERDICT_HOT;
            if (side[1][t] == APA_VERDICT_COLD)
                data->verdict[3][t] = APA_VERDICT_COLD;
        }
    }
    free(side[0]);
    free(side[1]);
}

static void compare_verdicts(apa_context *context, run_data *data, const apa_recipe *recipe, double window,
                             int64_t *differ, int64_t *wrong)
{
    const size_t n = (size_t)(data->pairs * data->tiles);
    *differ = *wrong = 0;
    for (size_t i = 0; i < n; i++) /* left out as cold */
        data->verdict[0][i] = data->verdict[0][i] == APA_VERDICT_SKIPPED ? APA_VERDICT_COLD : data->verdict[0][i];
    for (size_t i = 0; i < n; i++)
        *differ += data->verdict[0][i] != data->verdict[1][i];
    if (*differ == 0)
        return;
    for (int i = 0; i < 2; i++)
        run_moved(context, data, recipe, recipe->eps * (i == 0 ? 1 - window : 1 + window), recipe->eps_by,
                  data->verdict[2 + i]);
    if (recipe->eps_by == APA_EPS_BY_ROW)
        move_most_eps(context, data, recipe, window);
    for (size_t i = 0; i < n; i++)
        if (data->verdict[0][i] != data->verdict[1][i])
            *wrong += !(data->verdict[2][i] == APA_VERDICT_HOT && data->verdict[3][i] == APA_VERDICT_COLD);
}

/* What the engine (0) and the reference (1) have made, against the exact result. */
static void measure_to_exact(apa_context *context, run_data *data, const test_case *c, apa_error (*error)[2])
{
    float *out = malloc((size_t)(data->pairs * c->D) * sizeof *out), *lse = malloc((size_t)data->pairs * sizeof *lse);
    apa_recipe exact;
    apa_statistics statistics;
    apa_recipe_init(&exact, "exact");
    run(context, data, "reference", &exact, out, lse, NULL, &statistics);
    const apa_tensor o = apa_tensor_hnd(out, APA_DTYPE_F32, c->B, c->Hq, c->Sq, c->D),
                     l = apa_tensor_hnd(lse, APA_DTYPE_F32, c->B, c->Hq, c->Sq, 1);
    for (int i = 0; i < 2; i++) {
        const apa_tensor own = apa_tensor_hnd(data->out[i], APA_DTYPE_F32, c->B, c->Hq, c->Sq, c->D),
                         own_lse = apa_tensor_hnd(data->lse[i], APA_DTYPE_F32, c->B, c->Hq, c->Sq, 1);
        check(apa_error_measure(context, &own, &own_lse, &o, &l, &(*error)[i]) == APA_STATUS_OK, "measure");
    }
    printf("  to exact: l2 %.1e (reference %.1e) worst %.1e (%.1e) lse %.1e (%.1e) min cos %.5f (%.5f)\n",
           (*error)[0].rel_l2, (*error)[1].rel_l2, (*error)[0].rel_l2_max, (*error)[1].rel_l2_max,
           (*error)[0].lse_max_abs, (*error)[1].lse_max_abs, (*error)[0].min_cos, (*error)[1].min_cos);
    free(out);
    free(lse);
}

/* Engine and reference against the exact result. */
static void check_coarse(apa_context *context, run_data *data, const test_case *c, const apa_error *difference)
{
    apa_error error[2];
    measure_to_exact(context, data, c, &error);
    check(error[0].rel_l2 <= COARSE_WORSE * error[1].rel_l2 + c->tolerance, "relative L2 to the exact result");
    check(error[0].rel_l2_max <= 2 * error[1].rel_l2_max + 10 * c->tolerance, "worst pair to the exact result");
    check(error[0].lse_max_abs <= 2 * error[1].lse_max_abs + 2e-3, "LSE to the exact result");
    check(difference->rel_l2 <= COARSE_PART * error[1].rel_l2 + c->tolerance, "relative L2");
    /* both may be as far from the exact result as that, and not on the same side */
    check(difference->rel_l2_max <= 1.5 * error[1].rel_l2_max + 20 * c->tolerance, "worst pair");
}

/* Scores of so large a scale are beyond what codes on Hopper hold. All tiles are then computed exactly, though the
 * recipe wants them cold: the reference, whose cold tiles hold any score, is not what to compare with. */
#define LARGE_SCALE 100.0

static int is_beyond_codes(const test_case *c, const apa_statistics *statistics)
{
    return strcmp(statistics->engine, "cuda:wgmma") == 0 && c->scale >= LARGE_SCALE &&
           statistics->recipe.force == APA_FORCE_LOW && statistics->visible > 0 &&
           statistics->hot == statistics->visible;
}

static void check_beyond_codes(apa_context *context, run_data *data, const test_case *c)
{
    apa_error error[2];
    measure_to_exact(context, data, c, &error);
    check(error[0].rel_l2 <= F16, "relative L2 to the exact result");
}

static void run_case(apa_context *context, const test_case *c)
{
    if (only_method != NULL && strcmp(only_method, c->method) != 0)
        return;
    if (below_90 && c->set != NULL && strstr(c->set, "nvfp4") != NULL)
        return;
    if (strcmp(engine, "cuda:wgmma") == 0 && c->set != NULL && strstr(c->set, HALF) != NULL)
        return; /* of cuda:warp alone */
    run_data data;
    apa_recipe recipe;
    apa_statistics statistics, reference;
    char text[256];
    snprintf(text, sizeof text, "%s %s%s%s B%d %d/%d %dx%d D%d %s%s", c->kind, c->method, c->set == NULL ? "" : " ",
             c->set == NULL ? "" : c->set, (int)c->B, (int)c->Hq, (int)c->Hkv, (int)c->Sq, (int)c->Skv, (int)c->D,
             c->bf16 ? "bf16" : "f16", c->causal ? " causal" : "");
    if (!prepare(c, &data)) {
        check(0, "no memory");
        return;
    }
    init_recipe(&recipe, c->method);
    for (const char *at = c->set; at != NULL && *at != '\0'; at += *at == ' ') {
        char knob[64], value[64];
        int length = 0;
        check(sscanf(at, "%63[^= ]=%63[^ ]%n", knob, value, &length) == 2 &&
                  apa_recipe_set(&recipe, knob, value, NULL, 0) == APA_STATUS_OK,
              at);
        at += length > 0 ? (size_t)length : strlen(at);
    }
    memset(data.out[0], 0xff, (size_t)(data.pairs * c->D) * sizeof(float));
    if (run(context, &data, engine, &recipe, data.out[0], data.lse[0], data.verdict[0], &statistics) == APA_STATUS_OK &&
        run(context, &data, "reference", &statistics.recipe, data.out[1], data.lse[1], data.verdict[1], &reference) ==
            APA_STATUS_OK) {
        apa_error error;
        const apa_tensor o[2] = {apa_tensor_hnd(data.out[0], APA_DTYPE_F32, c->B, c->Hq, c->Sq, c->D),
                                 apa_tensor_hnd(data.out[1], APA_DTYPE_F32, c->B, c->Hq, c->Sq, c->D)};
        const apa_tensor l[2] = {apa_tensor_hnd(data.lse[0], APA_DTYPE_F32, c->B, c->Hq, c->Sq, 1),
                                 apa_tensor_hnd(data.lse[1], APA_DTYPE_F32, c->B, c->Hq, c->Sq, 1)};
        int64_t differ = 0, wrong = 0, uneven = 0;
        const int beyond = is_beyond_codes(c, &statistics);
        if (!beyond)
            compare_verdicts(context, &data, &statistics.recipe,
                             is_coarse(&statistics.recipe) ? COARSE_WINDOW
                             : c->tolerance == NVFP4_CUT   ? WINDOW_CUT
                                                           : WINDOW,
                             &differ, &wrong);
        check(apa_error_measure(context, &o[0], &l[0], &o[1], &l[1], &error) == APA_STATUS_OK, "measure");
        float *again = malloc((size_t)(data.pairs * c->D) * sizeof *again),
              *lse = malloc((size_t)data.pairs * sizeof *lse);
        for (int i = 1; i < REPEATS; i++) {
            apa_statistics other;
            run(context, &data, engine, &recipe, again, lse, NULL, &other);
            uneven += memcmp(again, data.out[0], (size_t)(data.pairs * c->D) * sizeof *again) != 0 ||
                      memcmp(lse, data.lse[0], (size_t)data.pairs * sizeof *lse) != 0 || other.hot != statistics.hot;
        }
        free(again);
        free(lse);
        printf("%-10s %-64s l2 %.1e worst %.1e lse %.1e hot %5.1f%% (%.1f%%) verdicts %lld/%lld\n", statistics.engine,
               text, error.rel_l2, error.rel_l2_max, error.lse_max_abs, 100 * statistics.hot_share,
               statistics.visible == 0 ? 0.0 : 100.0 * (double)statistics.candidates / (double)statistics.visible,
               (long long)differ, (long long)wrong);
        if (beyond) {
            check_beyond_codes(context, &data, c);
        } else if (is_coarse(&statistics.recipe)) {
            check_coarse(context, &data, c, &error);
        } else {
            check(error.rel_l2 <= c->tolerance, "relative L2");
            check(error.rel_l2_max <= (c->tolerance == NVFP4 ? NVFP4_WORST : 20 * c->tolerance), "worst pair");
            /* cuda:warp sums P as it is multiplied: in BF16 half a step is 2^-8 */
            check(error.lse_max_abs <= (c->bf16 ? 4e-3 : 2e-3), "LSE");
        }
        check(wrong == 0, "verdicts away from the threshold");
        check(statistics.visible == reference.visible, "visible pairs");
        check(beyond || differ > 0 || statistics.hot == reference.hot, "hot pairs");
        check(uneven == 0, "repeats");
    } else {
        printf("%s\n", text);
        check(0, "run");
    }
    fflush(stdout);
    give_back(&data);
}

/* Skipped tiles change nothing but the last bits: with them and without, by the same engine. */
static void run_skip_case(apa_context *context, const skip_case *skip)
{
    const test_case *c = &skip->common;
    if (only_method != NULL && strcmp(only_method, c->method) != 0)
        return;
    run_case(context, c);
    run_data data;
    apa_recipe recipe;
    apa_statistics statistics[2];
    apa_error error;
    if (!prepare(c, &data)) {
        check(0, "no memory");
        return;
    }
    int64_t shown = 0;
    apa_recipe_init(&recipe, c->method);
    if (strstr(c->set, "pv_format=e4m3") != NULL)
        recipe.pv_format = APA_PV_FORMAT_E4M3;
    for (int i = 0; i < 2; i++) {
        recipe.skip = i == 0 ? APA_TOGGLE_ON : APA_TOGGLE_OFF;
        check(run(context, &data, "cuda:warp", &recipe, data.out[i], data.lse[i], data.verdict[i], &statistics[i]) ==
                  APA_STATUS_OK,
              "run");
    }
    for (int64_t i = 0; i < data.pairs * data.tiles; i++)
        shown += data.verdict[0][i] == APA_VERDICT_SKIPPED;
    const apa_tensor o[2] = {apa_tensor_hnd(data.out[0], APA_DTYPE_F32, c->B, c->Hq, c->Sq, c->D),
                             apa_tensor_hnd(data.out[1], APA_DTYPE_F32, c->B, c->Hq, c->Sq, c->D)};
    const apa_tensor l[2] = {apa_tensor_hnd(data.lse[0], APA_DTYPE_F32, c->B, c->Hq, c->Sq, 1),
                             apa_tensor_hnd(data.lse[1], APA_DTYPE_F32, c->B, c->Hq, c->Sq, 1)};
    check(apa_error_measure(context, &o[0], &l[0], &o[1], &l[1], &error) == APA_STATUS_OK, "measure");
    printf("  skipped %.1f%%, to the run without: l2 %.1e worst %.1e lse %.1e\n", 100 * statistics[0].skip_share,
           error.rel_l2, error.rel_l2_max, error.lse_max_abs);
    check(statistics[0].skip_share >= skip->least && statistics[0].skip_share <= skip->most, "share of skipped tiles");
    check(shown == statistics[0].skipped && statistics[1].skipped == 0, "skipped tiles in the map of verdicts");
    check(statistics[0].hot == statistics[1].hot, "hot pairs");
    /* tiles that were brought back were added in another order */
    const double back = skip->most == 0.0 ? 30.0 : 1.0;
    check(error.rel_l2 <= 1e-6 * back && error.rel_l2_max <= 1e-5 * back * back, "another output with skipped tiles");
    check(error.lse_max_abs <= 2e-5, "another LSE with skipped tiles"); /* of up to 45: FP32 */
    give_back(&data);
}

/* ------------------------------------------------------------------------------- values that are not finite */

static const test_case not_finite_cases[] = {
    {"randn", "exact", NULL, 1, 2, 1, 200, 500, 128, 0, 1, DEFAULT, -1, -1, NAN, 0},
    {"randn", "exact", NULL, 1, 360, 180, 200, 500, 64, 0, 1, DEFAULT, -1, -1, NAN, 0}, /* wide */
    {"randn", "apa", NULL, 1, 2, 1, 200, 500, 128, 0, 1, DEFAULT, -1, -1, NAN, 0},
};

/* NaN in K and in V of a key of KV head 0: rows that see it are NaN (all of them, or some channels), the others have
 * the bits of the run without it (exact) or are finite (adaptive). */
static void check_not_finite(apa_context *context, const test_case *c)
{
    if (only_method != NULL && strcmp(only_method, c->method) != 0)
        return;
    const int64_t poisoned = 390, D = c->D;
    run_data data;
    apa_recipe recipe;
    apa_statistics statistics;
    if (!prepare(c, &data)) {
        check(0, "no memory");
        return;
    }
    init_recipe(&recipe, c->method);
    for (int which = 0; which < 2; which++) {
        uint16_t *x = (uint16_t *)(which == 0 ? data.k.data : data.v.data) + poisoned * D + 5, kept = *x;
        run(context, &data, engine, &recipe, data.out[1], data.lse[1], NULL, &statistics);
        *x = 0x7e00;
        run(context, &data, engine, &recipe, data.out[0], data.lse[0], NULL, &statistics);
        *x = kept;
        int64_t wrong = 0;
        for (int64_t h = 0; h < c->Hq; h++)
            for (int64_t i = 0; i < c->Sq; i++) {
                const int sees = h < c->Hq / c->Hkv && i + c->Skv - c->Sq >= poisoned;
                const float *row = data.out[0] + (h * c->Sq + i) * D;
                for (int64_t d = 0; d < D; d++) {
                    const int nan_due = sees && (which == 0 || d == 5);
                    wrong += nan_due ? !isnan(row[d]) : !isfinite(row[d]);
                }
                if (!sees && strcmp(c->method, "exact") == 0)
                    wrong += memcmp(row, data.out[1] + (h * c->Sq + i) * D, (size_t)D * sizeof *row) != 0;
            }
        printf("NaN in %s of a key, %s, %lld heads: %lld wrong\n", which == 0 ? "K" : "V", c->method, (long long)c->Hq,
               (long long)wrong);
        check(wrong == 0, "not finite");
    }
    give_back(&data);
}

/* ------------------------------------------------------------------------------- pages */

/* K and V in shuffled pages give the bits of the flat call. */
static void check_paged(apa_context *context, const char *method)
{
    const test_case c = {"topics", method, NULL, 1, 6, 2, 100, 1000, 128, 0, 1, DEFAULT, -1, -1, NAN, 0};
    enum { PAGE = 48, PAGES = 23, USED = (1000 + PAGE - 1) / PAGE };
    run_data data;
    apa_recipe recipe;
    apa_statistics statistics;
    apa_array pages[2] = {{0}};
    int32_t table[USED];
    const int64_t used = 1000;
    if (!prepare(&c, &data) || !make_array(&pages[0], 0, PAGES, c.Hkv, PAGE, c.D) ||
        !make_array(&pages[1], 0, PAGES, c.Hkv, PAGE, c.D)) {
        check(0, "no memory");
        return;
    }
    init_recipe(&recipe, method);
    run(context, &data, engine, &recipe, data.out[1], data.lse[1], NULL, &statistics);
    for (int i = 0; i < USED; i++)
        table[i] = (i * 7 + 3) % PAGES; /* 7 and 23 have no factor in common: no page twice */
    for (int which = 0; which < 2; which++) {
        const uint16_t *flat = (which == 0 ? &data.k : &data.v)->data;
        uint16_t *to = pages[which].data;
        memset(to, 0xff, (size_t)(PAGES * c.Hkv * PAGE * c.D) * sizeof *to); /* NaN where nothing is in use */
        for (int64_t h = 0; h < c.Hkv; h++)
            for (int64_t j = 0; j < used; j++)
                memcpy(to + ((table[j / PAGE] * c.Hkv + h) * PAGE + j % PAGE) * c.D, flat + (h * used + j) * c.D,
                       (size_t)c.D * sizeof *to);
    }
    apa_problem problem = data.problem;
    problem.k = tensor_of(&pages[0]);
    problem.v = tensor_of(&pages[1]);
    problem.block_table = table;
    problem.block_table_stride = USED;
    problem.seqused_k = &used;
    problem.out = apa_tensor_hnd(data.out[0], APA_DTYPE_F32, 1, c.Hq, c.Sq, c.D);
    problem.lse = apa_tensor_hnd(data.lse[0], APA_DTYPE_F32, 1, c.Hq, c.Sq, 1);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = engine;
    apa_statistics_init(&statistics);
    const apa_status status = apa_attention(context, &problem, &recipe, &options, &statistics);
    check(status == APA_STATUS_OK, apa_context_message(context));
    const int same = memcmp(data.out[0], data.out[1], (size_t)(data.pairs * c.D) * sizeof(float)) == 0 &&
                     memcmp(data.lse[0], data.lse[1], (size_t)data.pairs * sizeof(float)) == 0;
    printf("pages of %d keys, %s: %s\n", PAGE, method, same ? "the bits of the flat call" : "other bits");
    check(same, "paged");
    apa_array_free(&pages[0]);
    apa_array_free(&pages[1]);
    give_back(&data);
}

/* ------------------------------------------------------------------------------- device pointers */

/* A call captured into a graph and replayed gives the bits of the host-tensor call. */
static void check_graph(apa_context *context, const char *method)
{
    if (only_method != NULL && strcmp(only_method, method) != 0)
        return;
    const test_case c = {"topics", method, NULL, 1, 6, 2, 300, 2000, 128, 0, 1, DEFAULT, -1, -1, NAN, 0};
    run_data data;
    apa_recipe recipe, resolved;
    apa_statistics statistics;
    if (!prepare(&c, &data)) {
        check(0, "no memory");
        return;
    }
    init_recipe(&recipe, method);
    recipe.early_tiles = 29; /* of 32: a unit of each head, where the engine has a way of its own for them */
    run(context, &data, engine, &recipe, data.out[1], data.lse[1], NULL, &statistics);
    const size_t q = (size_t)(c.Hq * c.Sq * c.D), kv = (size_t)(c.Hkv * c.Skv * c.D), rows = (size_t)(c.Hq * c.Sq);
    void *device[6] = {0};
    apa_cuda_options options;
    apa_cuda_plan plan;
    apa_cuda_options_init(&options);
    apa_cuda_plan_init(&plan);
    options.family = strcmp(engine, "cuda") == 0 ? "auto" : engine + strlen("cuda:");
    apa_problem problem = data.problem;
    problem.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, c.Hq, c.Sq, c.D);
    problem.lse = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, c.Hq, c.Sq, 1);
    check(apa_cuda_attention_plan(context, &problem, &recipe, &options, &plan) == APA_STATUS_OK, "plan");
    const size_t sizes[6] = {q * 2, kv * 2,   kv * 2,
                             q * 4, rows * 4, plan.workspace_bytes > 0 ? plan.workspace_bytes : 256};
    const void *from[3] = {data.q.data, data.k.data, data.v.data};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 6 && error == cudaSuccess; i++)
        error = cudaMalloc(&device[i], sizes[i]);
    for (int i = 0; i < 3 && error == cudaSuccess; i++)
        error = cudaMemcpy(device[i], from[i], sizes[i], cudaMemcpyHostToDevice);
    problem.q.data = device[0];
    problem.k.data = device[1];
    problem.v.data = device[2];
    problem.out.data = device[3];
    problem.lse.data = device[4];
    cudaStream_t stream = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    if (error == cudaSuccess)
        error = cudaStreamCreate(&stream);
    options.stream = stream;
    options.workspace = device[5];
    options.workspace_bytes = sizes[5];
    if (error == cudaSuccess)
        error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    const apa_status status = apa_cuda_attention(context, &problem, &recipe, &options, &resolved);
    check(status == APA_STATUS_OK, apa_context_message(context));
    if (error == cudaSuccess)
        error = cudaStreamEndCapture(stream, &graph);
    if (error == cudaSuccess)
        error = cudaGraphInstantiate(&executable, graph, 0);
    for (int i = 0; i < 2 && error == cudaSuccess; i++) {
        error = cudaMemset(device[3], 0xff, sizes[3]);
        if (error == cudaSuccess)
            error = cudaGraphLaunch(executable, stream);
        if (error == cudaSuccess)
            error = cudaStreamSynchronize(stream);
        if (error == cudaSuccess)
            error = cudaMemcpy(data.out[0], device[3], sizes[3], cudaMemcpyDeviceToHost);
        check(error == cudaSuccess && memcmp(data.out[0], data.out[1], sizes[3]) == 0, "graph replay gives other bits");
    }
    printf("graph, %s: %s\n", method, cudaGetErrorString(error));
    check(error == cudaSuccess, "graph");
    for (int i = 0; i < 6; i++)
        cudaFree(device[i]);
    give_back(&data);
}

int main(int argc, char **argv)
{
    int quick = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "quick") == 0)
            quick = 1;
        else if (strcmp(argv[i], "below90") == 0)
            below_90 = 1;
        else if (strncmp(argv[i], "cuda", 4) == 0)
            engine = argv[i];
        else
            only_method = argv[i];
    }
    apa_context *context;
    if (apa_context_create(&context, NULL) != APA_STATUS_OK)
        return 1;
    int32_t devices;
    if (apa_cuda_device_count(context, &devices) != APA_STATUS_OK) {
        printf("%s\n", apa_context_message(context));
        return 1;
    }
    failures += below_90 ? 0 : apa_verify_fragments();
    for (int trait = 0; trait < APA_CUDA_TRAITS; trait++)
        if (!below_90 || trait != APA_CUDA_NVFP4)
            for (int64_t D = 64; D <= 256; D *= 2)
                failures += apa_verify_codes(trait, D, D == 128);
    for (size_t i = 0; i < sizeof not_finite_cases / sizeof not_finite_cases[0]; i++)
        check_not_finite(context, &not_finite_cases[i]);
    check_paged(context, "exact");
    check_paged(context, "apa");
    check_graph(context, "exact");
    check_graph(context, "apa");
    failures += apa_verify_device(context, engine);
    failures += apa_verify_kept(context, engine);
    failures += apa_verify_windowed(context, engine, quick);
    for (size_t i = 0; i < sizeof small_cases / sizeof small_cases[0]; i++)
        run_case(context, &small_cases[i]);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0] && !quick; i++)
        run_case(context, &cases[i]);
    /* cuda:wgmma takes skip=off alone */
    for (size_t i = 0; i < sizeof small_skip_cases / sizeof small_skip_cases[0] && strcmp(engine, "cuda:wgmma") != 0;
         i++)
        run_skip_case(context, &small_skip_cases[i]);
    for (size_t i = 0; i < sizeof skip_cases / sizeof skip_cases[0] && !quick && strcmp(engine, "cuda:wgmma") != 0; i++)
        run_skip_case(context, &skip_cases[i]);
    apa_context_destroy(context);
    printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
