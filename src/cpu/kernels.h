/* Kernel table of the CPU engine: what a kernel gets, what it must do, who has it.
 *
 * Rows live in the lanes. A *register* is 16 packed rows side by side; Q, scores, probabilities and outputs are
 * [..][lane] with 16 lanes, so maxima, sums and verdicts are vertical and K and V are read as broadcasts, never
 * transposed. A *panel* is 1 … APA_CPU_PANEL_F32 (APA_CPU_PANEL_I8) registers that one kernel call handles side by
 * side; panels may mix any registers, hence the arrays of pointers.
 *
 * Layouts (floats unless said otherwise; TILE = 64 keys, LANES = 16 rows; Dp = D rounded up to 8, Dvp likewise):
 *   q[r]     [Dp][LANES]                     query register r, f32
 *   k        [TILE][Dp]                      key tile, f32, zero padded
 *   v        [Dvp/8][V_BLOCK]                value tile, f32, zero padded; a block is [TILE][8] and a line of
 *                                            padding, or blocks would share their cache sets
 *   s        [TILE][n][LANES]                scores of a panel of n registers
 *   o[r]     [Dvp][LANES]                    unnormalised output of register r
 *   q8[r]    [Dp/4][LANES][4] uint8          query codes + 128
 *   k8       [TILE][Dp] int8                 key codes
 *   k8_bias  [TILE] int32                    -128·Σ codes of a key: takes the offset of q8 back
 *   v8       [TILE/4][Dvp][4] int8           value codes
 *   p8[r]    [TILE/4][LANES][4] uint8        probabilities, 255 = the row's maximum in the tile
 *
 * All pointers are 64-byte aligned except where a kernel says otherwise. Kernels are pure: no allocation, no globals;
 * two threads may run them at once on different outputs. Every ISA level must give the bits of the scalar level for the
 * integer kernels and for quantisation; float kernels agree within the bounds in tests/test_cpu_kernels_*.c. */
#ifndef APA_CPU_KERNELS_H
#define APA_CPU_KERNELS_H

#include "core/context_internal.h"
#include "apa/tensor.h"

#include <stdbool.h>

#define APA_CPU_LANES 16
#define APA_CPU_TILE 64
#define APA_CPU_PANEL_F32 3
#define APA_CPU_V_BLOCK (APA_CPU_TILE * 8 + 16)
#define APA_CPU_PANEL_I8 4
/* Rows that the kernels of few rows take; their buffers are for this many whatever the number. */
#define APA_CPU_FEW 8

/* The adaptive walk of one register: everything a verdict needs, in the lanes. Log2 units. */
typedef struct apa_cpu_walk {
    _Alignas(64) float frame[APA_CPU_LANES]; /* what cold sums, λ and o are taken against; -inf until a key was seen */
    float lambda[APA_CPU_LANES];             /* λ: sum over all tiles seen so far, hot ones included */
    float floor[APA_CPU_LANES];              /* λ at the end is at least this: cpu/floor.h; 0: nothing known */
    float cold[APA_CPU_LANES];               /* sum over the cold tiles */
    float q_scale[APA_CPU_LANES];   /* query scale · |softmax scale| · log2 e, so score·q_scale is in log2 units */
    float error[APA_CPU_LANES];     /* bound of a score's error per unit of the tile's largest key scale */
    float skipped[APA_CPU_LANES];   /* upper bound of what the skipped tiles would add to λ */
    float skipped_v[APA_CPU_LANES]; /* the same weighted by each tile's largest |v|: what they would add to o */
    uint16_t real;                  /* lanes that are rows; the others never vote */
} apa_cpu_walk;

/* A tile may be skipped while the bounds of all skipped tiles stay under this part of λ. Half a unit in the last place
 * of an FP32 sum is at least 2^-25 of it; one more factor of two is left for the quantisation of λ itself. */
#define APA_CPU_SKIP_LIMIT 0x1p-26f

/* What judge() found. */
enum { APA_CPU_JUDGED_CANDIDATE = 1, APA_CPU_JUDGED_MOVED = 2 };

/* Visible keys of each lane inside a tile: lo[i] <= key < hi[i]. */
typedef struct apa_cpu_span {
    int32_t lo[APA_CPU_LANES], hi[APA_CPU_LANES];
} apa_cpu_span;

/* Online-softmax state of one register over exact scores. The frame is in units of the raw scores q·k (times c it is in
 * log2 units); -inf until a lane has seen a key. */
typedef struct apa_cpu_state {
    float frame[APA_CPU_LANES], sum[APA_CPU_LANES];
} apa_cpu_state;

/* Memory that will be read soon: two sets of rows (K and V of the next tile). A score kernel asks for a part of it
 * after each of its blocks of keys, so that requests are spread over its work; it may ask for less or nothing. Rows
 * past the end are the caller's to avoid: rows is the number left for this kernel call. */
typedef struct apa_cpu_prefetch {
    const char *row[2];
    int64_t stride[2]; /* bytes from row to row */
    int64_t bytes[2];  /* bytes of a row */
    int64_t rows;
} apa_cpu_prefetch;

/* The same for the kernels of few rows, which read K and V from their tensors: n rows of `bytes`, asked for in order.
 */
typedef struct apa_cpu_ahead {
    const void *const *row;
    int n;
    int64_t bytes;
} apa_cpu_ahead;

/* A panel whose scores are known and whose probabilities are due; every lane sees the whole tile. */
typedef struct apa_cpu_due {
    const float *maximum;                   /* [n][LANES] */
    const float *q_scale[APA_CPU_PANEL_I8]; /* [LANES] each */
    uint8_t *p8;                            /* [n][TILE·LANES] */
    int32_t *sum;                           /* [n][LANES] */
} apa_cpu_due;

/* What peak() measures. */
typedef enum apa_cpu_peak {
    APA_CPU_PEAK_F32,      /* FP32 multiply-adds */
    APA_CPU_PEAK_EXP2_F32, /* 2^x as softmax_f32 makes it, summed */
    APA_CPU_PEAK_EXP2_I8,  /* 2^x as softmax_i8 makes it, packed and summed */
    APA_CPU_PEAK_READ      /* `bytes` (a multiple of 512) at `memory` (64-byte aligned), once; rounds is not read */
} apa_cpu_peak;

typedef struct apa_cpu_kernels {
    const char *name; /* for people: "avx512vnni" */

    /* Widens n elements of a row to f32. src need only be aligned to its element. Returns true when all are finite. */
    bool (*widen)(apa_dtype dtype, const void *src, int64_t n, float *dst);

    /* n rows of D elements, `stride` bytes apart, into the first rows of k; elements D … Dp-1 become 0. */
    void (*load_k)(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t D, int64_t Dp, float *k);

    /* n value rows of Dv elements into rows key … key+n-1 of v; elements Dv … Dvp-1 become 0. Returns a bit for each
     * row with a NaN or Inf, at its key. */
    uint64_t (*load_v)(apa_dtype dtype, const void *src, int64_t stride, int64_t n, int64_t Dv, int64_t Dvp,
                       int64_t key, float *v);

    /* s[key][r][lane] = Σ_d q[r][d][lane]·k[key][d], one fused multiply-add chain over rising d. 1 <= n <= PANEL_F32.
     * maximum[r][lane], unless NULL: the largest over all keys of the tile, NaN left out; -inf where all are NaN. */
    void (*scores_f32)(int n, const float *const *q, const float *k, int64_t Dp, float *s, float *maximum,
                       const apa_cpu_prefetch *prefetch);

    /* BF16 inputs by a BF16 dot product; NULL at levels without one. As scores_f32 with q[r] [Dp/2][LANES] pairs of
     * BF16 values (the lower d in the lower half) and k [TILE][Dp] BF16; a pair joins its chain in two roundings.
     * Inputs and sums under 2^-126 count as zero. */
    void (*scores_bf16)(int n, const uint32_t *const *q, const uint16_t *k, int64_t Dp, float *s, float *maximum,
                        const apa_cpu_prefetch *prefetch);

    /* One register of a panel of n (s points at its first lane, rows are n·LANES floats apart): masks by span (NULL:
     * all keys visible), moves the frame of a lane when its tile maximum exceeds it by more than APA_CPU_FRAME_SLACK/c
     * (or when it has seen no key yet), turns scores into p = 2^((s - frame)·c), 0 for masked keys, in place, and adds
     * their sum to the state. The difference comes first: at scores of 10^9 a rounded s·c would be off by whole powers
     * of two. c may not be negative. maximum: what scores_f32 left for the register where all keys count as they are;
     * NULL: found here. alpha[lane] = 2^((old frame - new frame)·c), 1 where it did not move. Returns true when any
     * alpha is not 1 (o must be scaled before P·V is added). */
    bool (*softmax_f32)(float *s, int n, float c, const apa_cpu_span *span, const float *maximum, apa_cpu_state *state,
                        float *alpha);

    /* Scores of calls that change them, one register of a panel of n in place (all but s, n and cap may be NULL):
     *   x = s·factor[lane];  x = cap·tanh(x) where cap > 0;  x -= slope[lane]·|distance[lane] - key|;
     *   x += bias[key][lane], and -inf whatever x was where bias is -inf.
     * Within 4 ulp of tanh, the rest rounds as written. */
    void (*bend)(float *s, int n, const float *factor, float cap, const float *slope, const float *distance,
                 const float *bias);

    /* lanes[key][lane] = rows[lane][key]: rows [LANES][TILE], lanes [TILE][LANES]. */
    void (*into_lanes)(const float *rows, float *lanes);

    /* o[r][c][lane] += Σ_key p[key][r][lane]·v[key][c]: the tile's sum first (one chain over rising keys), then one
     * add. */
    void (*pv_f32)(int n, const float *p, const float *v, int64_t Dvp, float *const *o);

    /* The same for R <= FEW rows, straight from the tensors. Keys and values are n (1 … TILE) rows as in prep; `ahead`
     * (NULL: nothing) is asked for on the way; q is [D rounded up to 16][FEW], zero padded; s is [FEW][TILE]. The
     * chains are those of scores_f32 (scores_bf16 for BF16 where there is one), softmax_f32 and pv_f32, so a table's
     * bits are the same on either way. */
    void (*scores_few)(apa_dtype dtype, const void *const *keys, int n, int64_t D, const apa_cpu_ahead *ahead, int R,
                       const float *q, float *s);

    /* softmax_f32 on rows: lane r of span, state and alpha is row r. */
    void (*softmax_few)(int R, float *s, float c, const apa_cpu_span *span, apa_cpu_state *state, float *alpha);

    /* o [FEW][Dv rounded up to 16] = o·alpha[row] + Σ p·v, the tile's sum first. With `check` it returns false, and
     * leaves o alone, when some sum is not finite: a value may be none, which rows that don't see it must not notice.
     */
    bool (*pv_few)(apa_dtype dtype, const void *const *values, int n, int64_t Dv, const apa_cpu_ahead *ahead, int R,
                   const float *p, const float *alpha, bool check, float *o);

    /* INT8 tiles for R rows (lanes 0 … R-1 of a register), NULL where a level has none. Bits as the kernels over lanes.
     * q8 [FEW][Dp rounded up to 64], codes + 128; s, p8 [FEW][TILE]; o [FEW][Dvp rounded up to 16], of which pv_few_i8
     * may touch rows from R on. maximum and sum are of LANES; lanes from R on get -inf and 0. */
    void (*scores_few_i8)(int R, const uint8_t *q8, const int8_t *k8, const int32_t *k8_bias, const float *k_scale,
                          int64_t Dp, float *s, const apa_cpu_prefetch *prefetch);
    void (*max_few_i8)(int R, const float *s, const apa_cpu_span *span, float *maximum);
    void (*softmax_few_i8)(int R, const float *s, const apa_cpu_span *span, const float *maximum, const float *q_scale,
                           uint8_t *p8, int32_t *sum);
    void (*pv_few_i8)(int R, const uint8_t *p8, const int8_t *v8, const float *v_scale, const float *p_scale,
                      int64_t Dvp, float *o);

    /* x[i][lane] *= alpha[lane] for i < rows. */
    void (*scale_lanes)(float *x, int64_t rows, const float *alpha);

    /* Merges the state (left, left_o) into (state, o), o [rows][LANES]: both are brought to the larger of the two
     * frames and added, the left one first. A state of a lane without a frame (-inf, its sums 0) changes no bit of the
     * other. */
    void (*merge_lanes)(const apa_cpu_state *left, const float *left_o, float c, int64_t rows, apa_cpu_state *state,
                        float *o);

    /* INT8. dot products of a panel of n registers with a tile, times the key's scale:
     * s[key][r][lane] = (float)(Σ_d (q8 - 128)·k8)·k_scale[key]; maximum[r][lane] is their maximum over all keys of the
     * tile (max_i8 has it for a tile that is seen in part). 1 <= n <= PANEL_I8. */
    void (*scores_i8)(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias, const float *k_scale,
                      int64_t Dp, float *s, float *maximum, const apa_cpu_prefetch *prefetch);

    /* scores_i8 of a panel and softmax_i8 of another of as many registers, where they use different units; the bits are
     * theirs. s holds the scores of `due` and gets the new ones; maximum is another place than due's. Returns false,
     * with nothing done, for an n or Dp that it has no way for. NULL at levels that gain nothing by it. */
    bool (*scores_beside_i8)(int n, const uint8_t *const *q8, const int8_t *k8, const int32_t *k8_bias,
                             const float *k_scale, int64_t Dp, float *s, float *maximum,
                             const apa_cpu_prefetch *prefetch, const apa_cpu_due *due);

    /* Row maxima of one register of a panel over the visible keys; -inf where a lane sees none. */
    void (*max_i8)(const float *s, int n, const apa_cpu_span *span, float *maximum);

    /* p8 = round(255·2^((s - maximum)·q_scale)) for visible keys, 0 for the others; sum[lane] = Σ p8 as an integer. */
    void (*softmax_i8)(const float *s, int n, const apa_cpu_span *span, const float *maximum, const float *q_scale,
                       uint8_t *p8, int32_t *sum);

    /* top[lane] = maximum·q_scale in log2 units (-inf where maximum is). Returns true when skipping the tile keeps
     * every real lane's bounds under APA_CPU_SKIP_LIMIT, and then has added them to skipped and skipped_v. */
    bool (*look)(apa_cpu_walk *walk, const float *maximum, float k_scale_max, float v_max, float *top);

    /* Adds the tile's mass (sum·2^top/255) to λ, moving the frame first where top exceeds it by more than
     * APA_CPU_FRAME_SLACK: frame, λ, floor, cold, skipped and skipped_v move, and o must be multiplied by alpha when
     * MOVED is set. CANDIDATE: the mass exceeds eps·λ in some real lane, and eps·floor too. p_scale[lane] = 2^(top -
     * frame)/255. */
    int (*judge)(apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *alpha, float *p_scale);

    /* The second look: does the tile's mass exceed eps·λ in some real lane, with λ as it is now? p_scale as judge(). */
    bool (*judge_again)(const apa_cpu_walk *walk, const float *top, const int32_t *sum, float eps, float *p_scale);

    /* o[r][c][lane] += (float)(Σ_key p8·v8)·v_scale[c]·p_scale[r][lane]; p_scale is already in the frame of o. */
    void (*pv_i8)(int n, const uint8_t *const *p8, const int8_t *v8, const float *v_scale, const float *const *p_scale,
                  int64_t Dvp, float *const *o);

    /* Prep reads a tile as n rows (1 … TILE) of D elements, rows[i] aligned to its element; `ahead` is NULL or n
     * rows that will be read soon, whose memory is asked for on the way. */

    /* sum[d] += Σ of the rows that are wholly finite, in order, in double. Returns their number. */
    int (*sum_k)(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead, double *sum);

    /* Keys: widened, minus mean, rotated in blocks of `block` (1: not), quantised as apa_int8_quantise(), all in f32 in
     * this order; bias as k8_bias. Codes D … Dp-1, and codes, scale and bias of the keys from n on, are 0. Returns
     * whether every key and its centred and rotated form is finite; a key that is not has codes, scale and bias of 0.
     */
    bool (*quantise_k)(apa_dtype dtype, const void *const *rows, int n, int64_t D, const void *const *ahead,
                       const float *mean, int64_t block, int8_t *k8, int32_t *bias, float *k_scale);

    /* Values: per channel the scale and codes of apa_int8_quantise() over the tile's finite rows, the others and those
     * from n on counting as zeros; codes in the layout of v8, Dvp channels (0 from Dv on). *largest: the largest |v| of
     * the finite rows. Returns whether every row is finite. */
    bool (*quantise_v)(apa_dtype dtype, const void *const *rows, int n, int64_t Dv, const void *const *ahead,
                       int8_t *v8, float *v_scale, float *largest);

    /* Symmetric INT8 of n values exactly as apa_int8_quantise(). */
    float (*quantise_row)(const float *value, int64_t n, int8_t *code);

    /* Rounds n values to a tensor's dtype (f16, bf16, f32). dst need only be aligned to its element. */
    void (*narrow)(apa_dtype dtype, const float *value, int64_t n, void *dst);

    /* Ceilings (apa_ceilings_measure): a loop of bare instructions in registers, or over memory, of about `rounds`
     * steps. Return what was done: multiply-adds as two operations, values of 2^x, bytes read. */
    double (*peak)(apa_cpu_peak what, int64_t rounds, const void *memory, int64_t bytes);
    double (*peak_i8)(int64_t rounds);
    double (*peak_bf16)(int64_t rounds); /* NULL where scores_bf16 is */

    /* In place Walsh-Hadamard transform of consecutive blocks of `block` (a power of two) values, times 1/sqrt(block).
     */
    void (*hadamard)(float *value, int64_t n, int64_t block);
} apa_cpu_kernels;

/* A lane's frame may lag its scores by this many log2 units: sums stay far under FP32's range (2^8 a key), and o is
 * rescaled only when a maximum leaps. Depends on the lane's own scores alone, so a row's bits don't depend on its
 * neighbours. */
#define APA_CPU_FRAME_SLACK 8.0f

/* The table of a level; levels without kernels of their own fall to the next lower one. */
const apa_cpu_kernels *apa_cpu_kernels_for(apa_isa isa);

extern const apa_cpu_kernels apa_cpu_kernels_scalar;
#ifdef APA_HAVE_AVX2
extern const apa_cpu_kernels apa_cpu_kernels_avx2;
#ifdef APA_HAVE_AVXVNNI
extern const apa_cpu_kernels apa_cpu_kernels_avx2vnni; /* the same but for the INT8 products; part of the level avx2 */
#endif
#endif
#ifdef APA_HAVE_AVX512
extern const apa_cpu_kernels apa_cpu_kernels_avx512;
extern const apa_cpu_kernels apa_cpu_kernels_avx512bf16; /* and the BF16 dot product; part of the level avx512 */
#endif
#ifdef APA_HAVE_NEON
extern const apa_cpu_kernels apa_cpu_kernels_neon;
#endif

#endif
