/* A pair of tiles, 128 keys: the blob that prep writes, scores in FP16 sums, probabilities as codes, P·V, for a
 * warpgroup of 64 rows. Codes of Q and K are E4M3 at D 128 and FP16 at D 64, where products are not what takes the
 * time; V and P are E4M3.
 *
 * Blob: K codes    [key][D], rows of 128 bytes in the 128-byte swizzle
 *       V codes    [channel][128 keys], 128-byte swizzle, the keys of each 32 in the order of key_of_slot()
 *       meta       PairMeta
 * In shared memory 8 rows of ones follow V (ones_row()): P·V has 8 more columns, the even ones sum P over the first
 * tile, the odd ones over the second. Row sums cost no more than that.
 *
 * Scales are powers of two, so that one of a pair serves as well as one of a tile or a key: an E4M3 code is the same up
 * to its exponent unless it is small enough to be subnormal. Codes of Q and K are at most qk_largest(), whose square
 * times D is below 65504, so FP16 sums cannot overflow.
 *
 * P. With y = 8·s, s a score in log2 units, and an integer frame n within a half of the largest s,
 *     code = round(8·(s - n) + 64 + 56),    clamped to 0
 * is an E4M3 number near 256·2^(s - n)·1.04: eight codes to a power of two, 56 the code of 1 (the mantissa is linear,
 * its logarithm is not: hence the 1.04 = 2^(.455 / 8), P_RANGE / 256). One FP16 fused multiply-add gives 1024 + code,
 * whose unit in the last place is 1: the rounding and the integer in one. No exponential is taken.
 *
 * n is common to a pair in pass 1. A code has 14.5 octaves, so that a tile far below its neighbour loses its small
 * probabilities: 64 keys under 2^-14.5, at most .28 % of its neighbour's sum. Where that neighbour is above ε and the
 * sums of its row are more than APART from each other, pass 1 holds both tiles back, and fix_pair.cuh adds them one by
 * one, each in its own frame. Elsewhere it is left at that: .28 % of a share under ε, but of any share where a row sees
 * a part of a tile, or without ε. */
#ifndef APA_CUDA_WGMMA_TILE_E4M3_CUH
#define APA_CUDA_WGMMA_TILE_E4M3_CUH

#include "cuda/wgmma/tile_16.cuh"

constexpr int PAIR_KEYS = 128;
constexpr float V_LARGEST = 448.0f;
constexpr float P_RANGE = 266.29388f; /* 256·2^(.455 / 8) */
constexpr float LOG2_P_RANGE = 8.056875f;
constexpr float CODES_PER_OCTAVE = 8.0f;
constexpr float SCORE_LIMIT = 1900.0f;          /* log2 units: beyond it 1144 - 8·n is not exact in FP16 */
constexpr float SCORE_LIMIT_OF_PHASES = 365.0f; /* the same where n is a multiple of 1/4 */
constexpr float APART = 4096.0f;                /* of two sums: 12 octaves */
constexpr float PAIR_SLACK = 40.0f;    /* a row's frame moves for a pair that is this much above it; sums are FP32 */
constexpr float ROUNDER = 12582912.0f; /* 1.5·2^23: its unit in the last place is 1 */

/* Biases of a pair's keys (bias.cuh), as one more step of the scores' products: 32 bytes a key, in E4M3, BIAS_DIGITS
 * for each of at most BIAS_HEADS query heads, rows in the 32-byte swizzle. A warp's rows are of one query head: their
 * operand has the digits' weights at its place and zeros elsewhere. */
constexpr int BIAS_HEADS = 8, BIAS_DIGITS = 3, BIAS_ROW = 32, BIAS_BYTES = PAIR_KEYS * BIAS_ROW;

/* How a pair stands in memory. */
struct PairMeta {
    float k_scale, v_scale;
    uint32_t poisoned; /* bit per tile: it holds a value that is not finite */
    float phase;       /* what frames are above integers */
    uint32_t unused[12];
};

template <int D> struct Pair {
    static constexpr int QK_BYTES = D == 64 ? 2 : 1; /* of a code of Q or K */
    static constexpr int K = 0, V = PAIR_KEYS * D * QK_BYTES, META = V + PAIR_KEYS * D, BYTES = META + 64;
    /* in shared memory */
    static constexpr int ONES_AT = META, META_AT = ONES_AT + 1024, BIAS_AT = META_AT + 1024,
                         STAGE = BIAS_AT + (D == 64 ? 0 : BIAS_BYTES);
    static_assert(D * QK_BYTES == 128, "rows of Q and K, in steps of 32 bytes");
};

constexpr int SCORE_STEPS = 4;

/* A warp's queries, A operands of the scores: in registers, and what picks their biases; or of a whole warpgroup in
 * shared memory, rows of 128 bytes in the 128-byte swizzle, where there are too few registers. */
struct QueriesInRegisters {
    uint32_t q[SCORE_STEPS][4], picks[4];
};

struct QueriesInShared {
    uint32_t at;
};

/* Of a code of Q or K: E4M3 448 / 2^5. */
template <int D> __host__ __device__ constexpr float qk_largest()
{
    return D == 64 ? 31.0f : 14.0f;
}

/* Key, within 32, whose probability lies at place `slot` of the A operand: that of the scores' sums. */
__host__ __device__ constexpr int key_of_slot(int slot)
{
    return slot / 16 * 16 + slot / 2 % 2 * 8 + slot % 16 / 4 * 2 + slot % 2;
}

/* Byte offset of byte `byte` of a key's biases. */
__host__ __device__ constexpr int bias_place(int key, int byte)
{
    return key * BIAS_ROW + (((byte >> 4) ^ (key >> 2 & 1)) << 4) + byte % 16;
}

/* Frames of the pairs take turns at four parts of an octave: the error of a code is periodic in it, and rows whose
 * scores lie close together would meet it at one phase in all pairs. */
__host__ __device__ constexpr float phase_of(int number)
{
    return static_cast<float>(number % 2) / 2.0f + static_cast<float>(number / 2 % 2) / 4.0f;
}

#ifdef APA_CUDA_BULK

constexpr uint32_t MINUS_INF_2 = 0xfc00fc00u;

/* What a warp keeps of its rows; index h: row g + 8h of the lane. */
template <int D> struct ColdRows {
    float o[D / 8][4];
    float frame[2], lambda[2], held[2]; /* held: what of λ was held back */
};

/* A pair at hand. */
template <int D> struct PairState {
    uint32_t s[32];          /* scores: [2·block + h] two keys each */
    uint32_t p[4][4];        /* codes as A operands */
    float acc[D / 8 + 1][4]; /* P·V, the last block the row sums: [2h + tile] */
};

/* What picks the biases of query head `head` of its KV head, as an A operand of 16 rows of it. */
__device__ __forceinline__ void bias_operand(uint32_t (&a)[4], int head)
{
    constexpr uint32_t WEIGHTS = 0x385878; /* 256, 16, 1, the first in the lowest byte */
#pragma unroll
    for (int half = 0; half < 2; half++) { /* bytes between the head's first and the word's */
        const int after = head * BIAS_DIGITS - (half * 16 + static_cast<int>(threadIdx.x & 3) * 4);
        const uint32_t later = after >= 0 && after < 4 ? WEIGHTS << 8 * after : 0u;
        uint32_t word = after < 0 && after > -BIAS_DIGITS ? WEIGHTS >> -8 * after : later;
        asm volatile("" : "+r"(word)); /* else it is worked out again in every step of the walk */
        a[2 * half] = a[2 * half + 1] = word;
    }
}

/* Scores of the pair at `stage`. */
template <int D, bool BIAS>
__device__ __forceinline__ void issue_pair_scores(uint32_t (&s)[32], const QueriesInRegisters &queries, uint32_t stage)
{
    static_assert(!BIAS || D == 128, "biases are E4M3, as the codes are");
    const uint64_t k = k_major(stage + Pair<D>::K);
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; step++)
        if constexpr (D == 64)
            product_f16_f16(s, queries.q[step], k + step * 2, step != 0);
        else
            product_e4m3_f16(s, queries.q[step], k + step * 2, step != 0);
    if (BIAS) { /* rows of 32 bytes: blocks of 8 rows are 256, swizzle mode 3 */
        const uint64_t rows = 3ull << 62 | (256ull >> 4) << 32 | 1ull << 16;
        product_e4m3_f16(s, queries.picks, rows | ((stage + Pair<D>::BIAS_AT) & 0x3ffff) >> 4, 1);
    }
    products_commit();
}

template <int D, bool BIAS>
__device__ __forceinline__ void issue_pair_scores(uint32_t (&s)[32], const QueriesInShared &queries, uint32_t stage)
{
    static_assert(D == 64 && !BIAS, "FP16 codes");
    const uint64_t q = k_major(queries.at), k = k_major(stage + Pair<D>::K);
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; step++)
        product_f16_f16(s, q + step * 2, k + step * 2, step != 0);
    products_commit();
}

__device__ __forceinline__ uint32_t fma_2(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

__device__ __forceinline__ float low_half(uint32_t x)
{
    return __half2float(__ushort_as_half(static_cast<uint16_t>(x)));
}

__device__ __forceinline__ float high_half(uint32_t x)
{
    return __half2float(__ushort_as_half(static_cast<uint16_t>(x >> 16)));
}

/* Keys that a row does not see, and tiles with values that are not finite, get -inf. */
__device__ __forceinline__ void mask_pair(uint32_t (&s)[32], const ThreadRows<1> &rows, int first_key,
                                          uint32_t poisoned)
{
    const int key = first_key + (threadIdx.x & 3) * 2;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < 16; n++) {
            /* of the two keys of a register; a tile with such values has none that are seen */
            const int first = rows.first[h] - (key + n * 8),
                      end = (poisoned >> n / 8 & 1) != 0 ? -1 : rows.end[h] - (key + n * 8);
            const uint32_t low = first <= 0 && end > 0 ? 0xffffu : 0u, high = first <= 1 && end > 1 ? 0xffff0000u : 0u;
            s[2 * n + h] = (s[2 * n + h] & (low | high)) | (MINUS_INF_2 & ~(low | high));
        }
}

/* Largest of the scores of one row of the pair that a lane holds, in each half. */
__device__ __forceinline__ uint32_t top_of(const uint32_t (&s)[32], int h)
{
    uint32_t top[4];
#pragma unroll
    for (int n = 0; n < 4; n++)
        top[n] = max_16_2<false>(max_16_2<false>(s[8 * n + h], s[8 * n + 2 + h]),
                                 max_16_2<false>(s[8 * n + 4 + h], s[8 * n + 6 + h]));
    return max_16_2<false>(max_16_2<false>(top[0], top[1]), max_16_2<false>(top[2], top[3]));
}

/* What makes codes of scores: 1024 + code = score·unit + offset, numbers of a row in both halves. */
struct CodeUnits {
    uint32_t unit[2], offset[2];
};

/* The frames of a pair's rows: the largest score of a row rounded to an integer and the pair's phase, so that a code is
 * at most 124. unit[h]: what a score has to be multiplied by for 8·log2, FP16 holds it (prep.cu). top[h]: the frame of
 * a row, -inf where it sees nothing (all codes are 0 then: an infinite offset makes them no numbers, which lose against
 * 1024). */
__device__ __forceinline__ CodeUnits frame_pair(const uint32_t (&s)[32], const float (&unit)[2], float phase,
                                                float (&top)[2])
{
    const uint32_t first = top_of(s, 0), second = top_of(s, 1);
    uint32_t both = max_16_2<false>(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
    both = max_16_2<false>(both, __shfl_xor_sync(0xffffffffu, both, 1));
    both = max_16_2<false>(both, __shfl_xor_sync(0xffffffffu, both, 2));
    top[0] = fmaf(low_half(both), unit[0] * (1.0f / CODES_PER_OCTAVE), -phase);
    top[1] = fmaf(high_half(both), unit[1] * (1.0f / CODES_PER_OCTAVE), -phase);
    CodeUnits codes;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        top[h] = (top[h] + ROUNDER) - ROUNDER + phase;
        const float offset = fmaf(-CODES_PER_OCTAVE, top[h], 1024.0f + 120.0f);
        codes.offset[h] = pack_16<false>(offset, offset);
        codes.unit[h] = pack_16<false>(unit[h], unit[h]);
    }
    return codes;
}

/* Scores of the 32 keys of a step of P·V → codes as an A operand. */
__device__ __forceinline__ void code_step(uint32_t (&p)[4], const uint32_t (&s)[32], const CodeUnits &codes, int step)
{
    uint32_t code[4][2]; /* 1024 + code: [block][h] two keys each */
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            code[n][h] =
                max_16_2<false>(fma_2(s[8 * step + 2 * n + h], codes.unit[h], codes.offset[h]), 0x64006400u); /* 1024 */
#pragma unroll
    for (int i = 0; i < 4; i++)
        p[i] = __byte_perm(code[i / 2 * 2][i % 2], code[i / 2 * 2 + 1][i % 2], 0x6420);
}

/* P·V of the pair at `stage`. */
template <int D>
__device__ __forceinline__ void issue_pair_values(float (&acc)[D / 8 + 1][4], const uint32_t (&p)[4][4], uint32_t stage)
{
    const uint64_t v = k_major(stage + Pair<D>::V);
#pragma unroll
    for (int step = 0; step < 4; step++)
        product_e4m3(acc, p[step], v + step * 2, step != 0);
    products_commit();
}

/* The same of scores, with fences: the first two steps are multiplied while the codes of the others are made. */
template <int D>
__device__ __forceinline__ void code_and_issue_values(PairState<D> &pair, const CodeUnits &codes, uint32_t stage)
{
    const uint64_t v = k_major(stage + Pair<D>::V);
    pin(pair.acc);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        code_step(pair.p[step], pair.s, codes, step);
        pin(pair.p[step]);
        if (step % 2 == 0)
            continue;
        products_fence();
        product_e4m3(pair.acc, pair.p[step - 1], v + (step - 1) * 2, step != 1);
        product_e4m3(pair.acc, pair.p[step], v + step * 2, 1);
    }
    products_commit();
}

/* 2^(frame - the row's own); 0 where a row sees nothing. */
__device__ __forceinline__ float weight_of(float frame, float own)
{
    return frame == -CUDART_INF_F ? 0.0f : exp2_fast(frame - own);
}

/* The rows' frames move where a pair's leap over them. */
template <int D> __device__ __forceinline__ void meet_frames(ColdRows<D> &rows, const float (&top)[2])
{
    if (!__any_sync(0xffffffffu, top[0] > rows.frame[0] + PAIR_SLACK || top[1] > rows.frame[1] + PAIR_SLACK))
        return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!(top[h] > rows.frame[h] + PAIR_SLACK))
            continue;
        const float alpha = exp2_fast(rows.frame[h] - top[h]);
        rows.frame[h] = top[h];
        rows.lambda[h] *= alpha;
        rows.held[h] *= alpha;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            rows.o[n][2 * h] *= alpha;
            rows.o[n][2 * h + 1] *= alpha;
        }
    }
}

/* o += weight·P·V of a pair. */
template <int D>
__device__ __forceinline__ void add_pair(ColdRows<D> &rows, const float (&acc)[D / 8 + 1][4], const float (&weight)[2],
                                         float v_scale)
{
    const float w0 = weight[0] * v_scale, w1 = weight[1] * v_scale;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        rows.o[n][0] = fmaf(acc[n][0], w0, rows.o[n][0]);
        rows.o[n][1] = fmaf(acc[n][1], w0, rows.o[n][1]);
        rows.o[n][2] = fmaf(acc[n][2], w1, rows.o[n][2]);
        rows.o[n][3] = fmaf(acc[n][3], w1, rows.o[n][3]);
    }
}

/* 16 bytes of place `at` in the rows of ones behind V. */
__device__ __forceinline__ void write_ones(uint32_t ones, int at)
{
    const int row = at / 8, place = at % 8, piece = place ^ (row & 7);
    const uint32_t one = (piece < 4) == (row % 2 == 0) ? 0x38383838u : 0u;
    const uint32_t word[4] = {one, one, one, one};
    store_shared_16(ones + at * 16, word);
}

__device__ __forceinline__ PairMeta load_meta(uint32_t address)
{
    PairMeta meta;
    uint32_t x[4];
    load_shared_16(x, address);
    meta.k_scale = __uint_as_float(x[0]);
    meta.v_scale = __uint_as_float(x[1]);
    meta.poisoned = x[2];
    meta.phase = __uint_as_float(x[3]);
    return meta;
}

/* A warp's queries as A operands; zeros where there are none. */
__device__ __forceinline__ void load_pair_queries(uint32_t (&q)[SCORE_STEPS][4], const apa_cuda_job &job,
                                                  const Unit &unit, int warp, bool there)
{
    const uint4 *codes = reinterpret_cast<const uint4 *>(job.q_codes + (unit.local * APA_CUDA_UNIT + warp * 16) * 128);
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; step++) {
        const uint4 x = there ? codes[step * 32 + (threadIdx.x & 31)] : make_uint4(0, 0, 0, 0);
        q[step][0] = x.x;
        q[step][1] = x.y;
        q[step][2] = x.z;
        q[step][3] = x.w;
    }
}

/* The same into shared memory, a warp's 16 rows of its warpgroup's; fence and barrier are the caller's. */
__device__ __forceinline__ void share_pair_queries(uint32_t at, const uint32_t (&q)[SCORE_STEPS][4])
{
    const uint32_t row = threadIdx.x / 32 % 4 * 16 + (threadIdx.x & 31) / 4, word = (threadIdx.x & 3) * 4;
#pragma unroll
    for (uint32_t step = 0; step < SCORE_STEPS; step++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            store_shared_4(at + swizzled(row + i % 2 * 8, step * 2 + i / 2) + word, q[step][i]);
}

/* A warp's rows into the parts of pass 1, from row number `first_row` on; out of units of codes. */
template <int D>
__device__ __forceinline__ void store_cold(const ColdRows<D> &rows, const apa_cuda_job &job, int64_t first_row)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t row = first_row + h * 8 + (lane >> 2);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *reinterpret_cast<float2 *>(job.part_o + row * D + n * 8 + (lane & 3) * 2) =
                make_float2(rows.o[n][2 * h] * (1.0f / P_RANGE), rows.o[n][2 * h + 1] * (1.0f / P_RANGE));
        if ((lane & 3) == 0) {
            job.part_frame[row] = rows.frame[h];
            job.part_sum[row] = (rows.lambda[h] - rows.held[h]) * (1.0f / P_RANGE);
        }
    }
}

struct PairRange {
    int first, end;
};

/* Biases of a pair. */
__device__ __forceinline__ const uint8_t *bias_of(const apa_cuda_job &job, int head, int number)
{
    return job.key_bias + (static_cast<int64_t>(head) * ((job.tiles + 1) / 2) + number) * BIAS_BYTES;
}

#endif
#endif
