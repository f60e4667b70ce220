/* A tile of 64 keys in INT8: the blob that prep writes, scores, probabilities, P·V, for a warp with MT blocks of 16
 * rows.
 *
 * Blob, in this order (fragment order: every lane reads its 16 bytes at 512·n + 16·lane, so nothing is swizzled and
 * nothing computed): K codes  [d / 32][key / 16][lane][16]  lane 4g + t; byte 8·j + 4·half + i is key 16n + 8j + g,
 * channel 32·step + 16·half + 4t + i V codes  [channel / 8][lane][16]       lane 4g + t: channel 8n + g; byte 8·step +
 * 4·half + i is key 32·step + 16·half + {2t, 2t+1, 2t+8, 2t+9}[i] K scales [key / 16][t][4]              of keys 16n +
 * {2t, 2t+1, 2t+8, 2t+9} V scales [channel / 16][t][4]          likewise flag     16 bytes: 1 if a value was not finite
 * The order of the keys in V is that in which the scores of mma.m16n8k32 lie in the lanes, so that P goes from one
 * product to the next without leaving its lane.
 *
 * Integer sums start at MAGIC_BITS, the bits of 1.5·2^23: as long as |sum| < 2^22 the register read as a float is MAGIC
 * + sum exactly, and no conversion is needed: value·scale is one fused multiply-add, fma(x, scale, -MAGIC·scale). The
 * last term is rounded, which shifts all products with one scale by at most .75 of an integer step. 127·127·256 and
 * 255·127·64 are under 2^22.
 *
 * P of a row is 255·2^(s - top), top its largest score in the tile: no running frame is in it. */
#ifndef APA_CUDA_TILE_I8_CUH
#define APA_CUDA_TILE_I8_CUH

#include "cuda/warp_mma/tile_16.cuh"

constexpr int32_t MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;
constexpr float ROUNDER = 8388608.0f;           /* 2^23: adding it leaves the rounded integer in the low bits */
constexpr float LOG2_STEPS = 7.99435343685886f; /* log2 255 */

template <int D> struct Blob {
    static constexpr int K = 0, V = 64 * D, K_SCALE = 128 * D, V_SCALE = K_SCALE + 256, FLAG = V_SCALE + 4 * D;
    static constexpr int BYTES = FLAG + 16;
};

/* Integer sums that started at MAGIC → numbers: columns 2t and 2t + 1 have their own scales. */
__device__ __forceinline__ void scale_pair(float (&to)[4], const int32_t (&sum)[4], float even, float odd)
{
    const float minus_even = -MAGIC * even, minus_odd = -MAGIC * odd;
    to[0] = fmaf(__int_as_float(sum[0]), even, minus_even);
    to[1] = fmaf(__int_as_float(sum[1]), odd, minus_odd);
    to[2] = fmaf(__int_as_float(sum[2]), even, minus_even);
    to[3] = fmaf(__int_as_float(sum[3]), odd, minus_odd);
}

/* s = (Q·Kᵀ)·k scale: in units of the query's scale. load_q(mt, step, fragment): the 16 × 32 piece of Q at depth
 * 32·step. Products that wait for each other are 8·MT apart. */
template <int D, int MT, typename LoadQ>
__device__ __forceinline__ void scores_i8(float (&s)[MT][8][4], uint32_t blob, LoadQ load_q)
{
    const int lane = threadIdx.x & 31;
    const int32_t magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
    int32_t sum[MT][8][4];
#pragma unroll
    for (int step = 0; step < D / 32; step++) {
        uint32_t q[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            load_q(mt, step, q[mt]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t k[4];
            load_shared_16(k, blob + Blob<D>::K + (step * 4 + n) * 512 + lane * 16);
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    int32_t(&to)[4] = sum[mt][2 * n + j];
                    if (step == 0)
                        mma_s8(to, q[mt], k[2 * j], k[2 * j + 1], magic);
                    else
                        mma_s8(to, q[mt], k[2 * j], k[2 * j + 1], to);
                }
        }
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float4 scale = load_shared_float4(blob + Blob<D>::K_SCALE + n * 64 + (lane & 3) * 16);
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            scale_pair(s[mt][2 * n], sum[mt][2 * n], scale.x, scale.y);
            scale_pair(s[mt][2 * n + 1], sum[mt][2 * n + 1], scale.z, scale.w);
        }
    }
}

/* Scores → P as bytes in fragments, and Σ P of each row. top: log2 units; -inf where a row sees nothing (PARTLY). */
template <int MT, bool PARTLY>
__device__ __forceinline__ void probabilities_i8(const float (&s)[MT][8][4], const float (&q_scale)[2 * MT],
                                                 const float (&top)[2 * MT], uint32_t (&p)[MT][2][4],
                                                 float (&total)[2 * MT])
{
    const int32_t zero[4] = {0, 0, 0, 0};
    constexpr uint32_t ONES = 0x01010101u;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float scale = q_scale[2 * mt + h];
            const float shift = LOG2_STEPS - (PARTLY && top[2 * mt + h] == -CUDART_INF_F ? 0.0f : top[2 * mt + h]);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x[i] = __float_as_uint(exp2_fast(fmaf(s[mt][n + i / 2][2 * h + i % 2], scale, shift)) + ROUNDER);
                const uint32_t low = __byte_perm(x[0], x[1], 0x0040), high = __byte_perm(x[2], x[3], 0x0040);
                p[mt][n / 4][(n & 2) + h] = __byte_perm(low, high, 0x5410);
            }
        }
        int32_t sum[4];
        mma_u8s8(sum, p[mt][0], ONES, ONES, zero);
        mma_u8s8(sum, p[mt][1], ONES, ONES, sum);
        total[2 * mt] = static_cast<float>(sum[0]);
        total[2 * mt + 1] = static_cast<float>(sum[2]);
    }
}

/* o += (P·V)·v scale·weight for N blocks of 8 channels, of which block 0 has its codes at `codes` and its scales at
 * `scales`. AT_ONCE blocks at a time: products wait for none of the MT·AT_ONCE begun before. */
template <int N, int MT, int AT_ONCE>
__device__ __forceinline__ void add_values_i8(float (&o)[MT][N][4], const uint32_t (&p)[MT][2][4], uint32_t codes,
                                              uint32_t scales, const float (&weight)[2 * MT])
{
    const int lane = threadIdx.x & 31;
    const int32_t magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
    for (int first = 0; first < N; first += AT_ONCE) {
        uint32_t v[AT_ONCE][4];
        int32_t sum[AT_ONCE][MT][4];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            load_shared_16(v[n], codes + (first + n) * 512 + lane * 16);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
                mma_u8s8(sum[n][mt], p[mt][0], v[n][0], v[n][1], magic);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
                mma_u8s8(sum[n][mt], p[mt][1], v[n][2], v[n][3], sum[n][mt]);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n += 2) {
            const float4 scale = load_shared_float4(scales + (first + n) * 32 + (lane & 3) * 16);
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float(&to)[4] = o[mt][first + n + j];
                    float x[4];
                    scale_pair(x, sum[n + j][mt], j == 0 ? scale.x : scale.z, j == 0 ? scale.y : scale.w);
                    to[0] = fmaf(x[0], weight[2 * mt], to[0]);
                    to[1] = fmaf(x[1], weight[2 * mt], to[1]);
                    to[2] = fmaf(x[2], weight[2 * mt + 1], to[2]);
                    to[3] = fmaf(x[3], weight[2 * mt + 1], to[3]);
                }
        }
    }
}

#endif
