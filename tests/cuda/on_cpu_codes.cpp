/* Scores and codes of P of a tile in 8 bits on a CPU, from usual scores to huge ones: tile_8.cuh against plain loops in
 * double. */
#include "tests/cuda/on_cpu.h"

static float value_e4m3(uint32_t code)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code & 0xff), __NV_E4M3)));
}

static float cpu_exp2_fast(float x)
{
    return x < -126.0f ? 0.0f : std::exp2(x);
}

static void cpu_load_shared(void *to, uint32_t address, size_t bytes)
{
    memcpy(to, at_address(address), bytes);
}

/* d = A·B + c of 16 × 8 × 32 bytes: with lane 4g + t, a[0] holds row g, columns 4t … 4t + 3, a[1] row g + 8, a[2] and
 * a[3] the same 16 columns further; b0 column g, rows 4t … 4t + 3, b1 the same 16 rows further. */
template <typename N, typename A, typename B>
static void cpu_mma_bytes(N (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const N (&c)[4], A of_a, B of_b)
{
    const auto both = [](uint32_t low, uint32_t high) { return low | static_cast<uint64_t>(high) << 32; };
    const auto byte = [](uint64_t eight, int i) { return static_cast<uint32_t>(eight >> 8 * i & 0xff); };
    const int g = static_cast<int>(threadIdx.x % 32 / 4), t = static_cast<int>(threadIdx.x % 4);
    N row[2][32], column[2][32];
    for (int h = 0; h < 2; h++)
        exchange(both(a[h], a[2 + h]), [&](auto of) {
            for (int k = 0; k < 32; k++)
                row[h][k] = of_a(byte(of(4 * g + k % 16 / 4), k / 16 * 4 + k % 4));
            return 0;
        });
    exchange(both(b0, b1), [&](auto of) {
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 32; k++)
                column[i][k] = of_b(byte(of(4 * (2 * t + i) + k % 16 / 4), k / 16 * 4 + k % 4));
        return 0;
    });
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 2; i++) {
            N sum = c[2 * h + i];
            for (int k = 0; k < 32; k++)
                sum += row[h][k] * column[i][k];
            d[2 * h + i] = sum;
        }
}

static int32_t as_signed(uint32_t byte)
{
    return static_cast<int8_t>(byte);
}

static int32_t as_unsigned(uint32_t byte)
{
    return static_cast<int32_t>(byte);
}

#define exp2_fast cpu_exp2_fast
#define load_shared_16(to, address) cpu_load_shared(to, address, 16)
#define load_shared_float(address) ([&](float x) { return cpu_load_shared(&x, address, 4), x; }(0.0f))
#define load_shared_float4(address)                                                                                    \
    ([&](float4 x) { return cpu_load_shared(&x, address, 16), x; }(make_float4(0.0f, 0.0f, 0.0f, 0.0f)))
#define mma_s8(d, a, b0, b1, c) cpu_mma_bytes(d, a, b0, b1, c, as_signed, as_signed)
#define mma_u8s8(d, a, b0, b1, c) cpu_mma_bytes(d, a, b0, b1, c, as_unsigned, as_signed)
#define mma_e4m3(d, a, b0, b1, c) cpu_mma_bytes(d, a, b0, b1, c, value_e4m3, value_e4m3)
#include "cuda/warp_mma/tile_8.cuh"

#include <random>

static std::mt19937 random_bits(5);

static int any_code()
{
    return static_cast<int>(random_bits() % 255) - 127;
}

/* A key's codes, queries' codes, their scales; what the lanes make of them. */
template <typename T, int MT> struct tile {
    int q[16 * MT][T::D], k[64][T::D];
    float q_scale[16 * MT], k_scale[64];
    int end[16 * MT]; /* keys that a row sees */
    float top[16 * MT], total[16 * MT];
    uint8_t code[16 * MT][64];
    uint32_t rows, blob;

    double score(int r, int j) const
    {
        int sum = 0;
        for (int d = 0; d < T::D; d++)
            sum += q[r][d] * k[j][d];
        const double scale = T::FINE ? static_cast<double>(k_scale[j]) * static_cast<double>(q_scale[r])
                                     : static_cast<double>(k_scale[j] * q_scale[r]);
        return sum * scale;
    }
};

alignas(16) static uint8_t in_shared[1 << 17];

/* Codes and scales as prep lays them out, in what passes for shared memory. */
template <typename T, int MT> static void lay_out(tile<T, MT> &x)
{
    uint8_t *blob = in_shared, *rows = in_shared + T::BYTES;
    for (int j = 0; j < 64; j++)
        for (int d = 0; d < T::D; d++)
            blob[T::K + (d / 32 * 4 + j / 16) * 512 + (j % 8 * 4 + d % 16 / 4) * 16 + j / 8 % 2 * 8 + d % 32 / 16 * 4 +
                 d % 4] = static_cast<uint8_t>(x.k[j][d]);
    float *scales = reinterpret_cast<float *>(blob + T::K_SCALE);
    for (int j = 0; j < 64; j++)
        scales[T::FINE ? j / 16 * 16 + j % 8 / 2 * 4 + j / 8 % 2 * 2 + j % 2 : j % 8 / 2] = x.k_scale[j];
    for (int r = 0; r < 16 * MT; r++)
        for (int d = 0; d < T::D; d++)
            rows[r / 16 * T::Q_BYTES + d / 32 * 512 + (r % 8 * 4 + d % 16 / 4) * 16 +
                 (d % 32 / 16 * 2 + r % 16 / 8) * 4 + d % 4] = static_cast<uint8_t>(x.q[r][d]);
    x.blob = address_of(blob);
    x.rows = address_of(rows);
}

template <typename T, int MT> static void lanes(tile<T, MT> &x)
{
    const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
    Scores<MT> scores;
    ThreadRows<MT> seen;
    float q_scale[2 * MT], top[2 * MT], total[2 * MT];
    for (int r = 0; r < 2 * MT; r++) {
        q_scale[r] = x.q_scale[r * 8 + g];
        seen.first[r] = 0;
        seen.end[r] = x.end[r * 8 + g];
    }
    scores_8<T, MT>(scores, x.blob, x.rows + static_cast<uint32_t>(lane) * 16, q_scale);
    mask<MT>(scores.s, seen, 0);
    tops_8<T, MT>(scores, top);
    typename T::template P<MT> p;
    probabilities_8<T, MT, true>(scores, top, p, total);
    for (int r = 0; r < 2 * MT; r++) {
        x.top[r * 8 + g] = top[r];
        x.total[r * 8 + g] = total[r];
        for (int n = 0; n < 8; n += 2)
            for (int i = 0; i < 4; i++)
                x.code[r * 8 + g][(n + i / 2) * 8 + t * 2 + i % 2] =
                    static_cast<uint8_t>(p[r / 2][n / 4][(n & 2) + r % 2] >> 8 * i);
    }
}

/* size: the scores' standard deviation, log2 units. */
template <typename T, int MT> static void check(const char *what, double size)
{
    static tile<T, MT> x;
    const double unit = size / (73.6 * 73.6 * std::sqrt(static_cast<double>(T::D)));
    for (int r = 0; r < 16 * MT; r++) {
        x.q_scale[r] = static_cast<float>(unit * (50.0 + random_bits() % 100) / 0.03);
        x.end[r] = r % 16 == 3 ? 0 : r % 16 == 5 ? 1 + static_cast<int>(random_bits() % 7) : r % 16 == 7 ? 45 : 64;
        for (int d = 0; d < T::D; d++)
            x.q[r][d] = any_code();
    }
    for (int j = 0; j < 64; j++) {
        x.k_scale[j] = T::FINE || j < 8 ? 0.03f * (50 + random_bits() % 100) / 10000 : x.k_scale[j % 8];
        if (!T::FINE)
            x.k_scale[j] = x.k_scale[j % 8 / 2 * 2];
        for (int d = 0; d < T::D; d++)
            x.k[j][d] = any_code();
    }
    lay_out(x);
    run_grid(1, 32, [] { lanes<T, MT>(x); });
    const int64_t before = wrong;
    for (int r = 0; r < 16 * MT; r++) {
        double top = -INFINITY, sum = 0.0, widest = 0.0;
        for (int j = 0; j < x.end[r]; j++)
            top = std::max(top, x.score(r, j));
        for (int j = 0; j < 64; j++)
            widest = std::max(widest, static_cast<double>(x.q_scale[r]) * static_cast<double>(x.k_scale[j]));
        /* integer sums begin at MAGIC, whose product with the scale is rounded */
        const double magic = T::FINE ? 0.75 * widest : std::min(0.75 * widest, 0.001);
        const double off = 1e-4 + 2e-7 * (x.end[r] == 0 ? 0.0 : std::fabs(top)) + magic;
        if (x.end[r] == 0)
            expect(x.top[r] == -INFINITY && x.total[r] == 0.0f, "a row that sees nothing", r, 0);
        else
            expect(std::fabs(x.top[r] - top) <= off, "largest score", r, 0);
        for (int j = 0; j < 64; j++) {
            const double code = T::PV_E4M3 ? value_e4m3(x.code[r][j]) : x.code[r][j];
            const double due = j < x.end[r] ? T::RANGE * std::exp2(x.score(r, j) - top) : 0.0;
            const double slack = due * (std::exp2(std::min(2.0 * off, 500.0)) - 1.0);
            sum += code;
            expect(std::fabs(code - due) <= slack + (T::PV_E4M3 ? due / 15.9 + 0.002 : 0.501), "code", r, j);
        }
        expect(x.total[r] == static_cast<float>(sum), "sum of codes", r, 0);
        /* FP32 has no place for log2 RANGE beside the largest scores */
        const double least = size > 1e6 ? 1.0 : T::FINE ? T::RANGE * std::exp2(-2.0 * magic) : 0.99 * T::RANGE;
        expect(x.end[r] == 0 || sum >= least, "codes of a row", r, 0);
    }
    printf("%s D %d, scores of %g: %lld of %lld wrong\n", what, T::D, size, static_cast<long long>(wrong - before),
           static_cast<long long>(checked));
}

int main()
{
    for (const double size : {0.5, 8.0, 60.0, 300.0, 1500.0, 1e4, 1e5, 1e9}) {
        check<Cold8<64, APA_CUDA_INT8_CODES, APA_CUDA_INT8_CODES, false>, 2>("INT8", size);
        check<Cold8<256, APA_CUDA_INT8_CODES, APA_CUDA_INT8_CODES, false>, 1>("INT8", size);
        check<Cold8<64, APA_CUDA_INT8_CODES, APA_CUDA_E4M3_CODES, false>, 1>("INT8, P in E4M3", size);
        check<Cold8<64, APA_CUDA_INT8_CODES, APA_CUDA_INT8_CODES, true>, 1>("INT8, fine scales", size);
    }
    return wrong == 0 ? 0 : 1;
}
