/* A tile of 64 keys in 8-bit codes (INT8 or E4M3): the blob that prep writes, scores, probabilities, P·V, for a warp
 * with MT blocks of 16 rows.
 *
 * Blob, in this order (fragment order: every lane reads its 16 bytes at 512·n + 16·lane, so nothing is swizzled and
 * nothing computed):
 *   K codes   [d / 32][key / 16][lane][16]  lane 4g + t; byte 8·j + 4·half + i is key 16n + 8j + g, channel 32·step +
 *             16·half + 4t + i
 *   V codes   [channel / 8][lane][16]       lane 4g + t: channel 8n + g; byte 8·step + 4·half + i is key 32·step +
 *             16·half + {2t, 2t+1, 2t+8, 2t+9}[i]
 *   scales    fine:   K [key / 16][t][4] of keys 16n + {2t, 2t+1, 2t+8, 2t+9}, V [channel / 16][t][4] likewise
 *             coarse: K [t] of all keys j with j % 8 / 2 = t; V's are the head's (job.v_scale)
 *   flag      16 bytes: 1 if a value was not finite
 * The order of the keys in V is that in which the scores of mma.m16n8k32 lie in the lanes, so that P goes from one
 * product to the next without leaving its lane. Coarse scales are those of SageAttention 2: all of a lane's columns
 * share one, so a score is one fused multiply-add away from its exponent.
 *
 * A score in log2 units is s·scale[row] + zero[row], s what the matrix unit left behind. Integer sums start at
 * MAGIC_BITS, the bits of 1.5·2^23: as long as |sum| < 2^22 the register read as a float is MAGIC + sum exactly, and no
 * conversion is needed. zero = -MAGIC·scale is rounded, which shifts all products with one scale by at most .75 of an
 * integer step. 127·127·256 and 255·127·64 are under 2^22. E4M3 sums are floats, and zero is 0.
 *
 * P of a row is RANGE·2^(score - top), top its largest score in the tile: no running frame is in it, nothing drowns.
 * The exponent is s·scale + shift, where shift = log2 RANGE - top + zero may be much larger than any exponent: from
 * 2^16 on it is rounded by up to 2^-8, and 255·2^(2^-8) would be the code 256, a byte of 0 for the row's largest P. */
#ifndef APA_CUDA_TILE_8_CUH
#define APA_CUDA_TILE_8_CUH

#include "cuda/warp_mma/tile_16.cuh"

#include <float.h>

constexpr int32_t MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;
constexpr float FAR = 32768.0f;       /* sums as large are rounded by up to 2^-9 */
constexpr float ROUNDER = 8388608.0f; /* 2^23: adding it leaves the rounded integer in the low bits */

/* QK, PV: which codes. FINE: scales per key, and per tile and channel. */
template <int DIM, int QK, int PV, bool FINE_SCALES> struct Cold8 {
    static constexpr int D = DIM;
    static constexpr bool QK_E4M3 = QK == APA_CUDA_E4M3_CODES, PV_E4M3 = PV == APA_CUDA_E4M3_CODES, FINE = FINE_SCALES;
    static constexpr bool FRAMED = false;            /* P does not stand against the running frame */
    static constexpr bool SKIPS = !FINE && !QK_E4M3; /* there are kernels that leave out tiles (trait.h) */
    static constexpr int ARCH = QK_E4M3 || PV_E4M3 ? 890 : 800;
    static constexpr int K = 0, V = 64 * D, K_SCALE = 128 * D, V_SCALE = K_SCALE + (FINE ? 256 : 16);
    static constexpr int FLAG = V_SCALE + (FINE ? 4 * D : 0), BYTES = FLAG + 16;
    static constexpr int Q_BYTES = 16 * D; /* a group's */
    static constexpr float RANGE = PV_E4M3 ? 448.0f : 255.0f;
    static constexpr float LOG2_RANGE = PV_E4M3 ? 8.80735492205760f : 7.99435343685886f;
    template <int MT> using P = uint32_t[MT][2][4];

    __device__ static bool poisoned(uint32_t blob)
    {
        return load_shared_4(blob + FLAG) != 0;
    }
};

template <int MT> struct Scores {
    float s[MT][8][4];
    float scale[2 * MT], zero[2 * MT]; /* rows 2·mt + h */
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

/* s = Q·Kᵀ, and how to read it. q: shared memory, the lane's first 16 bytes of the first group; groups lie Q_BYTES
 * apart. Products that wait for each other are 8·MT apart. */
template <typename T, int MT>
__device__ __forceinline__ void scores_8(Scores<MT> &to, uint32_t blob, uint32_t q_shared,
                                         const float (&q_scale)[2 * MT])
{
    const int lane = threadIdx.x & 31;
    const int32_t magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
    const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int32_t sum[MT][8][4]; /* of INT8 */
#pragma unroll
    for (int step = 0; step < T::D / 32; step++) {
        uint32_t q[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            load_shared_16(q[mt], q_shared + mt * T::Q_BYTES + step * 512);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t k[4];
            load_shared_16(k, blob + T::K + (step * 4 + n) * 512 + lane * 16);
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    if constexpr (T::QK_E4M3) {
                        float(&d)[4] = to.s[mt][2 * n + j];
                        if (step == 0)
                            mma_e4m3(d, q[mt], k[2 * j], k[2 * j + 1], none);
                        else
                            mma_e4m3(d, q[mt], k[2 * j], k[2 * j + 1], d);
                    } else {
                        int32_t(&d)[4] = sum[mt][2 * n + j];
                        if (step == 0)
                            mma_s8(d, q[mt], k[2 * j], k[2 * j + 1], magic);
                        else
                            mma_s8(d, q[mt], k[2 * j], k[2 * j + 1], d);
                    }
                }
        }
    }
    if constexpr (T::FINE) {
        static_assert(!T::FINE || !T::QK_E4M3, "no such recipe");
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float4 k_scale = load_shared_float4(blob + T::K_SCALE + n * 64 + (lane & 3) * 16);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                scale_pair(to.s[mt][2 * n], sum[mt][2 * n], k_scale.x, k_scale.y);
                scale_pair(to.s[mt][2 * n + 1], sum[mt][2 * n + 1], k_scale.z, k_scale.w);
            }
        }
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            to.scale[r] = q_scale[r];
            to.zero[r] = 0.0f;
        }
    } else {
        if constexpr (!T::QK_E4M3) {
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        to.s[mt][n][i] = __int_as_float(sum[mt][n][i]);
        }
        const float k_scale = load_shared_float(blob + T::K_SCALE + (lane & 3) * 4);
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            to.scale[r] = fmaxf(k_scale * q_scale[r], FLT_MIN); /* -inf times it has to stay -inf */
            to.zero[r] = T::QK_E4M3 ? 0.0f : -MAGIC * to.scale[r];
        }
    }
}

/* own: a row's largest score in a lane. Is it, or the zero that it is counted from, too large for exponents of P? */
template <typename T> __device__ __forceinline__ bool is_far(float own, float zero)
{
    return T::FINE ? fabsf(own) >= FAR : zero <= -FAR;
}

/* Largest score of each row in the tile, log2 units; -inf where a row sees nothing. Where scores are far, s becomes the
 * distance from the lane's largest and zero the score of that one: each row of each lane for itself, so that a tile has
 * the same codes when it is taken out again (fix.cuh). */
template <typename T, int MT> __device__ __forceinline__ void tops_8(Scores<MT> &from, float (&top)[2 * MT])
{
    float largest[2 * MT];
    bool far = false;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most;
            if constexpr (!T::FINE && !T::QK_E4M3) { /* all positive or -inf, so integers rise with them */
                int32_t m = __float_as_int(from.s[mt][0][2 * h]);
                m = max(m, __float_as_int(from.s[mt][0][2 * h + 1]));
#pragma unroll
                for (int n = 1; n < 8; n++)
                    m = max_3(m, __float_as_int(from.s[mt][n][2 * h]), __float_as_int(from.s[mt][n][2 * h + 1]));
                most = __int_as_float(m);
            } else {
                most = fmaxf(from.s[mt][0][2 * h], from.s[mt][0][2 * h + 1]);
#pragma unroll
                for (int n = 1; n < 8; n++)
                    most = fmaxf(most, fmaxf(from.s[mt][n][2 * h], from.s[mt][n][2 * h + 1]));
            }
            const int r = 2 * mt + h;
            largest[r] = most;
            top[r] = fmaf(most, from.scale[r], from.zero[r]);
            far = far || is_far<T>(top[r], from.zero[r]);
        }
    if (!T::QK_E4M3 && __any_sync(0xffffffffu, far)) {
        constexpr float NONE = T::FINE ? 0.0f : MAGIC; /* s of a score of 0 */
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            if (!is_far<T>(top[r], from.zero[r]) || largest[r] == -CUDART_INF_F)
                continue;
            from.zero[r] = top[r] = __fmul_rn(largest[r] - NONE, from.scale[r]);
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 2 * (r % 2); i < 2 * (r % 2) + 2; i++)
                    from.s[r / 2][n][i] -= largest[r];
        }
    }
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
        top[r] = quad_max(top[r]);
}

/* RANGE·P = 2^(s·scale + shift). Where scores are far, s <= 0, and zero is top in one lane and less in others: however
 * sums are rounded, no code is beyond RANGE, and the largest is not 0. */
template <typename T> __device__ __forceinline__ float code_shift(float top, float zero)
{
    if constexpr (T::FINE)
        return zero - top + T::LOG2_RANGE;
    else if constexpr (T::QK_E4M3)
        return T::LOG2_RANGE - top + zero;
    else
        return fminf(T::LOG2_RANGE - top + zero, T::LOG2_RANGE); /* elsewhere zero is far below top */
}

/* Four numbers 0 … 255 → bytes, rounded. */
__device__ __forceinline__ uint32_t round_to_bytes(float a, float b, float c, float d)
{
    const uint32_t low = __byte_perm(__float_as_uint(a + ROUNDER), __float_as_uint(b + ROUNDER), 0x0040);
    const uint32_t high = __byte_perm(__float_as_uint(c + ROUNDER), __float_as_uint(d + ROUNDER), 0x0040);
    return __byte_perm(low, high, 0x5410);
}

/* Scores → codes of P in fragments, and Σ of each row's codes. PARTLY: top may be -inf. */
template <typename T, int MT, bool PARTLY>
__device__ __forceinline__ void probabilities_8(const Scores<MT> &from, const float (&top)[2 * MT],
                                                typename T::template P<MT> &p, float (&total)[2 * MT])
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = 2 * mt + h;
            const float shift = code_shift<T>(PARTLY && top[r] == -CUDART_INF_F ? 0.0f : top[r], from.zero[r]);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x[i] = exp2_fast(fmaf(from.s[mt][n + i / 2][2 * h + i % 2], from.scale[r], shift));
                if constexpr (T::PV_E4M3)
                    p[mt][n / 4][(n & 2) + h] = pack_e4m3(x[0], x[1]) | pack_e4m3(x[2], x[3]) << 16;
                else
                    p[mt][n / 4][(n & 2) + h] = round_to_bytes(x[0], x[1], x[2], x[3]);
            }
        }
        if constexpr (T::PV_E4M3) {
            constexpr uint32_t ONES = 0x38383838u;
            const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            float sum[4];
            mma_e4m3(sum, p[mt][0], ONES, ONES, none);
            mma_e4m3(sum, p[mt][1], ONES, ONES, sum);
            total[2 * mt] = sum[0];
            total[2 * mt + 1] = sum[2];
        } else {
            constexpr uint32_t ONES = 0x01010101u;
            const int32_t none[4] = {0, 0, 0, 0};
            int32_t sum[4];
            mma_u8s8(sum, p[mt][0], ONES, ONES, none);
            mma_u8s8(sum, p[mt][1], ONES, ONES, sum);
            total[2 * mt] = static_cast<float>(sum[0]);
            total[2 * mt + 1] = static_cast<float>(sum[2]);
        }
    }
}

/* P·V of N blocks of 8 channels, as the matrix unit leaves it. */
template <typename T, int MT, int N> struct Products {
    int32_t sum[N][MT][4]; /* INT8 */
    float real[N][MT][4];
};

/* Products that wait for each other are MT·N apart. */
template <typename T, int MT, int N>
__device__ __forceinline__ void multiply_values_8(Products<T, MT, N> &to, const typename T::template P<MT> &p,
                                                  uint32_t blob, int first)
{
    const int lane = threadIdx.x & 31;
    const int32_t magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
    const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t v[N][4];
#pragma unroll
    for (int n = 0; n < N; n++)
        load_shared_16(v[n], blob + T::V + (first + n) * 512 + lane * 16);
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                if constexpr (T::PV_E4M3) {
                    if (step == 0)
                        mma_e4m3(to.real[n][mt], p[mt][0], v[n][0], v[n][1], none);
                    else
                        mma_e4m3(to.real[n][mt], p[mt][1], v[n][2], v[n][3], to.real[n][mt]);
                } else {
                    if (step == 0)
                        mma_u8s8(to.sum[n][mt], p[mt][0], v[n][0], v[n][1], magic);
                    else
                        mma_u8s8(to.sum[n][mt], p[mt][1], v[n][2], v[n][3], to.sum[n][mt]);
                }
            }
}

/* o += (P·V)·weight, times V's scales where they are fine or SCALED says so (v_scale: the head's). */
template <typename T, int MT, int N, bool SCALED>
__device__ __forceinline__ void add_products_8(float (&o)[MT][T::D / 8][4], const Products<T, MT, N> &from,
                                               uint32_t blob, int first, const float (&weight)[2 * MT],
                                               const float *v_scale)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < N; n++) {
        float2 scale = make_float2(1.0f, 1.0f);
        if constexpr (T::FINE)
            scale = load_shared_float2(blob + T::V_SCALE + (first + n) / 2 * 64 + (lane & 3) * 16 + (n & 1) * 8);
        else if constexpr (SCALED)
            scale = *reinterpret_cast<const float2 *>(v_scale + (first + n) * 8 + (lane & 3) * 2);
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            float x[4];
            if constexpr (T::PV_E4M3) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x[i] = SCALED ? from.real[n][mt][i] * (i % 2 == 0 ? scale.x : scale.y) : from.real[n][mt][i];
            } else if constexpr (T::FINE) {
                scale_pair(x, from.sum[n][mt], scale.x, scale.y);
            } else { /* exact: what was added without scales comes out with them to the last integer */
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    x[i] = __int_as_float(from.sum[n][mt][i]) - MAGIC;
                    x[i] = SCALED ? x[i] * (i % 2 == 0 ? scale.x : scale.y) : x[i];
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                o[mt][first + n][i] = fmaf(x[i], weight[2 * mt + i / 2], o[mt][first + n][i]);
        }
    }
}

/* Both, from block FIRST on, of which the products are there already. */
template <typename T, int MT, int N, bool SCALED>
__device__ __forceinline__ void add_values_8(float (&o)[MT][T::D / 8][4], Products<T, MT, N> &products,
                                             const typename T::template P<MT> &p, uint32_t blob,
                                             const float (&weight)[2 * MT], const float *v_scale = nullptr)
{
#pragma unroll
    for (int first = 0; first < T::D / 8; first += N) {
        Products<T, MT, N> next;
        if (first + N < T::D / 8)
            multiply_values_8<T, MT, N>(next, p, blob, first + N);
        add_products_8<T, MT, N, SCALED>(o, products, blob, first, weight, v_scale);
        products = next;
    }
}

#endif
