/* A tile of 64 keys in NVFP4: the blob that prep writes, scores, probabilities, P·V, for a warp with MT blocks of 16
 * rows.
 *
 * Blob, 72·D bytes (9216 at D = 128), in fragment order; lane 4g + t:
 *   K codes   [d / 64][n / 2][lane][16]    score columns n even: 8 bytes b[0], b[1] of channels 64·step + 8t …, + 32; n
 *             odd likewise
 *   V codes   [channel / 16][lane][16]     channel 16n + g: b[0], b[1] of keys 8t …, 32 + 8t …; then channel 16n + 8 +
 * g K scales  [d / 64][lane][2] words      word j: of the key in column g of n = 4j + t; a byte for 16 channels each V
 * scales  [channel / 64][lane][2]      word j: of channel 64·a + 8·(4j + t) + g; a byte for 16 keys each A tile with a
 * value that is not finite has ~0 for its first word of scales. Queries of a group, 2 terms: codes [d / 64][lane][16] =
 * a[0] … a[3]; scales [(d / 64) / 2][lane] words, of row g + 8·(t & 1), depth step 2·i + (t >> 1): from_a picks the
 * step.
 *
 * Score columns are permuted keys, such that the columns in a lane are the eight places of P that the lane has to hold
 * for the next product: column 2t + i of block n is key 16·(2·(n / 4) + t / 2) + 8·(t % 2) + 2·(n % 4) + i. A block of
 * 16 keys that shares a scale of P lies in two neighbouring lanes, four columns blocks each.
 *
 * P stands against the frame c: P = 2^(score - c - τ), s = the smallest normal UE4M3 >= 256·max P of the block, codes =
 * E2M1(1536·P / s). The codes' input is 2^(score - c - τ + log2(1536) - log2 s), one exponential each.
 * Source: APA 0.6 (docs/recipes.md); the reference engine's src/reference/probability.c. */
#ifndef APA_CUDA_TILE_NVFP4_CUH
#define APA_CUDA_TILE_NVFP4_CUH

#include "cuda/nvfp4.cuh"
#include "cuda/warp_mma/tile_8.cuh"

/* log2(6·256): P = 1 is this much under a code of 1 at a scale of 1. */
constexpr float NVFP4_LOG2_RANGE = 10.584962500721156f;
constexpr float NVFP4_LOG2_SCALE = 8.0f;        /* log2 256 */
constexpr float UE4M3_LEAST_NORMAL = 0.015625f; /* 2^-6 */
/* A score that sets the frame has 256·P on a step of the scale exactly; so many units in the last place above a step
 * still count as on it. */
constexpr uint32_t ON_THE_STEP = 64;

template <int DIM> struct ColdNvfp4 {
    static constexpr int D = DIM, STEPS = D / 64;
    static constexpr bool FRAMED = true, FINE = false, PV_E4M3 = false, QK_E4M3 = false;
    static constexpr bool SKIPS = false;
    static constexpr int ARCH = 900; /* conversions to E4M3 aside, nothing forbids less: it saves machine code */
    static constexpr int K = 0, V = 32 * D, K_SCALE = 64 * D, V_SCALE = 68 * D, BYTES = 72 * D;
    static constexpr int TERM_SCALES = (STEPS + 1) / 2 * 128, TERM_BYTES = 8 * D + TERM_SCALES;
    static constexpr int Q_BYTES = 2 * TERM_BYTES; /* a group's */
    static constexpr float LOG2_RANGE = NVFP4_LOG2_RANGE;
    struct Rows {
        uint32_t code[4], scale; /* A fragment and its scales */
    };
    template <int MT> using P = Rows[MT];

    __device__ static bool poisoned(uint32_t blob)
    {
        return load_shared_4(blob + K_SCALE) == 0xffffffffu;
    }
};

struct KeysForNvfp4 {
    __host__ __device__ static constexpr int of(int t, int n, int i)
    {
        return 16 * (2 * (n / 4) + t / 2) + 8 * (t % 2) + 2 * (n % 4) + i;
    }
    __device__ static int key(int n, int i)
    {
        return of(threadIdx.x & 3, n, i);
    }
};

/* s = (Q₁ + Q₂)·Kᵀ in units of Q's row scale and K's head scale, which are both in q_scale. */
template <typename T, int MT>
__device__ __forceinline__ void scores_nvfp4(Scores<MT> &to, uint32_t blob, uint32_t q_shared,
                                             const float (&q_scale)[2 * MT])
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                to.s[mt][n][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < T::STEPS; step++) {
        uint32_t q[MT][2][4], q_scales[MT][2], k_scales[2];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int term = 0; term < 2; term++) {
                const uint32_t at = q_shared + mt * T::Q_BYTES + term * T::TERM_BYTES;
                load_shared_16(q[mt][term], at + step * 512 + lane * 16);
                q_scales[mt][term] = load_shared_4(at + 8 * T::D + step / 2 * 128 + lane * 4);
            }
        load_shared_8(k_scales, blob + T::K_SCALE + step * 256 + lane * 8);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            uint32_t k[4];
            load_shared_16(k, blob + T::K + (step * 4 + pair) * 512 + lane * 16);
#pragma unroll
            for (int term = 0; term < 2; term++)
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int mt = 0; mt < MT; mt++)
                        mma_nvfp4(to.s[mt][2 * pair + j], q[mt][term], k[2 * j], k[2 * j + 1], q_scales[mt][term],
                                  step & 1, k_scales[pair / 2], (2 * pair + j) & 3);
        }
    }
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        to.scale[r] = q_scale[r];
        to.zero[r] = 0.0f;
    }
}

/* Largest s of each row in each of the lane's two blocks, over the two lanes that share a block; and of the row in the
 * tile, in log2 units. */
template <int MT>
__device__ __forceinline__ void tops_nvfp4(const Scores<MT> &from, float (&block)[2 * MT][2], float (&top)[2 * MT])
{
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float(&s)[8][4] = from.s[r / 2];
            float most = fmaxf(s[4 * half][2 * (r % 2)], s[4 * half][2 * (r % 2) + 1]);
#pragma unroll
            for (int n = 4 * half + 1; n < 4 * half + 4; n++)
                most = fmaxf(most, fmaxf(s[n][2 * (r % 2)], s[n][2 * (r % 2) + 1]));
            block[r][half] = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        }
        const float most = fmaxf(block[r][0], block[r][1]);
        top[r] = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)) * from.scale[r];
    }
}

/* Smallest normal UE4M3 code that is at least x. */
__device__ __forceinline__ uint32_t ue4m3_at_least(float x)
{
    const uint32_t bits = __float_as_uint(fmaxf(x, UE4M3_LEAST_NORMAL));
    return ((bits + (0xfffffu - ON_THE_STEP)) >> 20) - ((127u - 7u) << 3);
}

/* Scores → P in fragments against frames c + τ, and Σ of each row's codes·scales, which is 1536·ΣP. */
template <typename T, int MT>
__device__ __forceinline__ void probabilities_nvfp4(const Scores<MT> &from, const float (&block)[2 * MT][2],
                                                    const float (&frame)[2 * MT], float tau,
                                                    typename T::template P<MT> &p, float (&total)[2 * MT])
{
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        uint32_t own = 0; /* bytes: row g, blocks t/2 and 2 + t/2; row g + 8 likewise */
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = 2 * mt + h;
            const float scale = from.scale[r], c = frame[r] == -CUDART_INF_F ? 0.0f : frame[r];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float need = exp2_fast(fmaf(block[r][half], scale, NVFP4_LOG2_SCALE - tau - c));
                const uint32_t code = ue4m3_at_least(need);
                own |= code << (16 * h + 8 * half);
                const float shift = NVFP4_LOG2_RANGE - tau - c - log2_fast(ue4m3_value(code));
                float x[8];
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        x[2 * n + i] = exp2_fast(fmaf(from.s[mt][4 * half + n][2 * h + i], scale, shift));
                p[mt].code[2 * half + h] = pack_e2m1(x);
            }
        }
        /* lane t = 0 (and 2) collects row g's four scales, t = 1 (and 3) row g + 8's */
        const uint32_t other = __shfl_xor_sync(0xffffffffu, own, 2);
        const uint32_t low = t < 2 ? own : other, high = t < 2 ? other : own;
        p[mt].scale = (t & 1) == 0 ? __byte_perm(low, high, 0x5140) : __byte_perm(low, high, 0x7362);
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        mma_nvfp4(sum, p[mt].code, 0x22222222u, 0x22222222u, p[mt].scale, 0, 0x38383838u, 0);
        total[2 * mt] = sum[0];
        total[2 * mt + 1] = sum[2];
    }
}

/* o += P·V in units of V's head scale. */
template <typename T, int MT>
__device__ __forceinline__ void add_values_nvfp4(float (&o)[MT][T::D / 8][4], const typename T::template P<MT> &p,
                                                 uint32_t blob)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int a = 0; a < T::STEPS; a++) {
        uint32_t scales[2];
        load_shared_8(scales, blob + T::V_SCALE + a * 256 + lane * 8);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            uint32_t v[4];
            load_shared_16(v, blob + T::V + (a * 4 + pair) * 512 + lane * 16);
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
                    mma_nvfp4(o[mt][a * 8 + 2 * pair + j], p[mt].code, v[2 * j], v[2 * j + 1], p[mt].scale, 0,
                              scales[pair / 2], (2 * pair + j) & 3);
        }
    }
}

#endif
