/* What the host hands the kernels: one plain struct, passed by value, readable from C and CUDA C++.
 *
 * Words of the CUDA engine:
 *   row    a (query head of the KV head, position). Rows of a KV head are numbered head by head, positions rounded up
 * to 16
 *          (`Sq16`), so that 16 rows in line are 16 positions of one head; with packing `rows` they are position by
 *          position over the heads. Either way 16 rows in line are one group of the recipe.
 *   unit   128 rows in line: 8 groups, what one thread block works on. Units of a KV head are padded, never shared.
 *   split  a contiguous part of the tiles of a unit, when there are too few units to fill the device
 * All frames are in log2 units. A *raw* frame belongs to scores of the keys as given, a *centred* one to scores of the
 * keys minus their mean; raw = centred + shift, shift = q·mean. */
#ifndef APA_CUDA_JOB_H
#define APA_CUDA_JOB_H

#include <stdint.h>

enum { APA_CUDA_TILE = 64, APA_CUDA_GROUP = 16, APA_CUDA_UNIT = 128, APA_CUDA_UNIT_GROUPS = 8 };

/* Cold formats that there are kernels for; rows of the table in trait.c. */
enum {
    APA_CUDA_INT8_FINE, /* INT8, scales per key, and per tile and channel of V */
    APA_CUDA_INT8,      /* INT8, scales per MMA thread's keys, and per channel of V */
    APA_CUDA_INT8_E4M3, /* INT8 scores, E4M3 P·V, scales as before */
    APA_CUDA_E4M3,      /* E4M3, scales as before */
    APA_CUDA_NVFP4,     /* E2M1 with UE4M3 scales per 16, Q in two terms */
    APA_CUDA_TRAITS
};
enum { APA_CUDA_INT8_CODES, APA_CUDA_E4M3_CODES };

typedef struct apa_cuda_tensor {
    void *data;
    int64_t stride[3]; /* batch, head, position, in elements; the last axis is contiguous */
    int32_t dtype;     /* apa_dtype; 0: not there */
} apa_cuda_tensor;

/* A tile whose mass in a group exceeded ε·λ when it was visited: its cold sums are in the cold state, or were held back
 * because it looked as if it would stay hot. Skipped: no candidate; left out because it can add nothing. */
enum { APA_CUDA_CANDIDATE_ADDED = 1, APA_CUDA_CANDIDATE_HELD = 2, APA_CUDA_SKIPPED_TILE = 4 };

/* Counters, in this order. */
enum { APA_CUDA_VISIBLE, APA_CUDA_HOT, APA_CUDA_CANDIDATES, APA_CUDA_SKIPPED, APA_CUDA_COUNTS };

typedef struct apa_cuda_job {
    apa_cuda_tensor q, k, v, out, lse;
    int32_t B, Hq, Hkv, G, Sq, Skv, D;
    int32_t bf16, packing_rows, longest_first;
    int32_t Sq16, rows, units, tiles; /* rows, units: per KV head */
    int64_t first_offset, end_offset; /* position p sees keys clamp(p + first_offset) … clamp(p + end_offset) - 1 */
    float c;                          /* |softmax scale|·log2 e, not 0 */
    int32_t negate;                   /* the scale was negative: q counts as -q */
    double c_exact;                   /* the same as c, not rounded */
    int32_t half_sums;                /* exact tiles: P·V sums of a tile in FP16; f16 alone */

    /* the adaptive method */
    float log2_eps, eps; /* eps >= 1: no candidates */
    float eps_root;      /* ε is by row: ε·sqrt(tiles of the call), */
    float eps_most;      /* ... and what a group's may be at most; eps_root 0: it is the same for all */
    int32_t smooth, hadamard, early_tiles;
    int32_t trait, hold_all, second_look; /* hold_all: no candidate is added in pass 1 */
    float tau, delta;                     /* frame rules of NVFP4, log2 units */
    int32_t search;                       /* NVFP4: block scales of least error */
    int32_t skip;                         /* leave out tiles that can add nothing */
    int32_t again;                        /* corrections and pass 2 once more, for units that want skipped tiles back */
    int32_t judged;                       /* verdicts are asked for: neither forced nor switched off by ε */

    /* how the work is cut */
    int32_t splits, hot_splits, capability; /* capability: the device's, 90 */
    int64_t shared_bytes_of_sm;
    int64_t unit_first, unit_count; /* of all B·Hkv·units; the buffers marked (batch) start at unit_first */

    /* prepared keys: all anew, or those that an earlier call has not left */
    int32_t room;       /* tiles of a KV head that blob and poisoned have room for; at least `tiles` */
    int32_t first_tile; /* those before it are there already (of pairs: even) */
    int32_t mean_given; /* k_mean is there already */
    /* ... or, of a bounded copy, those of one window at a time and tile 0 */
    int32_t windowed;
    int32_t held;             /* tiles of a KV head that blob has room for; `room` where it is not bounded */
    int32_t window_first;     /* blob holds tiles from this on, and tile 0 before them; 1 where it holds all */
    int32_t window_before;    /* the same of the window before; INT32_MAX: this is the first */
    int32_t statistics_given; /* sums and maxima over all keys are there already */

    /* workspace */
    double *tile_sum;    /* [B·Hkv][tiles][D + 1]; Hopper: [B·Hkv][parts of the sample][D + 1] */
    double *mean_sum;    /* [B·Hkv][D] */
    float *k_mean;       /* [B·Hkv][D] */
    uint8_t *blob;       /* [B·Hkv][held][blob bytes]: apa_cuda_blob_slot() */
    uint8_t *poisoned;   /* [B·Hkv][room] */
    float *k_scale_max;  /* [B·Hkv]: INT8 */
    float *k_amax;       /* [B·Hkv]: NVFP4, then its head scale */
    float *v_amax;       /* [B·Hkv][D]: of a channel, where V's scales are the head's */
    float *v_scale;      /* [B·Hkv][D] */
    uint8_t *q_codes;    /* (batch) [unit][8 groups] in fragment order, as the trait has them */
    uint8_t *q16;        /* (batch) [unit][128·D·2] in fragment order; not on Hopper */
    float *q_scale;      /* (batch) [unit][128] */
    float *shift;        /* (batch) [unit][128] */
    uint8_t *all_hot;    /* (batch) [unit][8] */
    uint8_t *candidate;  /* (batch) [unit][8][tiles]: 0 no; else an APA_CUDA_CANDIDATE_* */
    float *mass;         /* (batch) [unit][8][tiles][16]: log2 of a row's mass in a candidate tile */
    float *part_o;       /* (batch) [split][unit][128][D] */
    float *part_frame;   /* (batch) [split][unit][128] */
    float *part_sum;     /* (batch) [split][unit][128] */
    float *part_lambda;  /* (batch) [split][unit][128]: mass of all tiles; part_sum leaves out those held back */
    float *part_skipped; /* (batch) [split][unit][128]: log2 of what skipped tiles had at most; with skip alone */
    uint32_t *hot_tile;  /* (batch) [unit][tiles]: what pass 2 computes exactly, */
    uint8_t *hot_mask;   /* (batch) [unit][tiles]: and for which groups */
    uint32_t *fix_tile;  /* (batch) [unit][tiles]: whose cold sums have to change, */
    uint16_t *fix_mask;  /* (batch) [unit][tiles]: groups; << 8: groups that take them out, the others add them */
    int32_t *list_count; /* (batch) [unit][2]: entries of the two lists */
    float *hot_o;        /* (batch) [hot split][unit][128][D] */
    float *hot_frame;    /* (batch) [hot split][unit][128] */
    float *hot_sum;      /* (batch) [hot split][unit][128] */
    unsigned long long *counts; /* [APA_CUDA_COUNTS], or NULL */
    uint8_t *verdicts;          /* [B][Hq][Sq][tiles], or NULL */

    /* Hopper */
    int32_t smooth_stride;      /* the mean is of every smooth_stride-th tile */
    int32_t line, early_prefix; /* the first early_prefix rows of every `line` see early_tiles tiles at most, and units
                                   of them alone go to the exact kernel (order.h); 0: none do */
    int32_t early_only;         /* the exact kernel takes those units and no other */
    int32_t smooth_q, p_phase;  /* the mean of a query head off its queries; frames of P in phases */
    double *q_sum;              /* [B·Hq][blocks of 128 positions][D + 1]: sums, and how many queries are in them */
    float *q_range;             /* [B·Hq][blocks of 128 positions][2][D]: the smallest and the largest */
    float *q_mean;              /* [B·Hq][D] */
    float *q_head_scale;        /* [B·Hq]: of all queries of a head */
    uint8_t *key_bias; /* [B·Hkv][pairs][4096]: q_mean·(key - k_mean), in units of the codes' products (bias.cuh) */
    /* Both passes in one kernel (both_passes.cu): a block works on its rows to their end, in one of `slots` slots; 0:
     * passes are kernels of their own. Blocks that are under way at the same time have different slots. Then, with w
     * warpgroups a block, 2, or 3 where it is wide, mass [slot][4w][pairs][32], hot_tile [slot][w][tiles], and no
     * buffer of lists, parts or candidates. */
    int32_t slots;
    uint32_t *slot_taken;     /* [slots]: 0 before and after the kernel */
    uint32_t *candidate_pair; /* [slot][4w][pairs][2]: of a warp, in the order of its walk */
    int32_t chained;          /* the launch before this one in the stream was a kernel of the call (chain.cuh) */
    int32_t wide;             /* blocks of the exact kernel and of both passes may be longer than units: 192 rows */
} apa_cuda_job;

/* Bytes of a tile's blob: codes of K and V, their scales, a flag (see tile_8.cuh, tile_nvfp4.cuh). */
static inline int64_t apa_cuda_blob_bytes(int32_t trait, int64_t D)
{
    return trait == APA_CUDA_NVFP4       ? 72 * D
           : trait == APA_CUDA_INT8_FINE ? 2 * 64 * D + 64 * 4 + D * 4 + 16
                                         : 2 * 64 * D + 16 + 16;
}

/* Number of a tile's blob. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int64_t
    apa_cuda_blob_slot(const apa_cuda_job *job, int32_t head, int32_t tile)
{
    return (int64_t)head * job->held + (tile == 0 ? 0 : tile - job->window_first + 1);
}

/* Bytes of a unit's queries. */
static inline int64_t apa_cuda_query_bytes(int32_t trait, int64_t D)
{
    return trait == APA_CUDA_NVFP4 ? APA_CUDA_UNIT_GROUPS * 2 * (8 * D + (D / 64 + 1) / 2 * 128) : APA_CUDA_UNIT * D;
}

/* One cold and one hot part a unit: pass 2 goes on with the cold state and writes the result itself. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int
    apa_cuda_finishes_in_pass_2(const apa_cuda_job *job)
{
    return job->splits == 1 && job->hot_splits == 1;
}

#ifdef __cplusplus
extern "C" {
#endif

/* Launchers: put work on `stream` and return; 0 or a cudaError_t. */
int apa_cuda_launch_exact(const apa_cuda_job *job, void *stream);
int apa_cuda_launch_prep_keys(const apa_cuda_job *job, void *stream);
int apa_cuda_launch_prep_queries(const apa_cuda_job *job, void *stream);
int apa_cuda_launch_cold(const apa_cuda_job *job, void *stream);
int apa_cuda_launch_judge(const apa_cuda_job *job, void *stream);
int apa_cuda_launch_fix(const apa_cuda_job *job, void *stream);
int apa_cuda_launch_hot(const apa_cuda_job *job, void *stream);
int apa_cuda_launch_recheck(const apa_cuda_job *job, void *stream);
int apa_cuda_launch_finish(const apa_cuda_job *job, int adaptive, void *stream);
/* Counts and verdicts of a call whose every visible tile is hot. */
int apa_cuda_launch_all_hot(const apa_cuda_job *job, void *stream);

/* Shared memory that a thread block of the kernels needs, for the check against the device. */
int64_t apa_cuda_exact_shared_bytes(int64_t D);
int64_t apa_cuda_cold_shared_bytes(int32_t trait, int64_t D, int32_t capability);
int64_t apa_cuda_hot_shared_bytes(int64_t D);

#ifdef __cplusplus
}
#endif

#endif
