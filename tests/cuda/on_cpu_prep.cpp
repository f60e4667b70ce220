/* Prep of the Hopper engine on a CPU: means, pairs, biases and queries against plain loops (layouts:
 * cuda/wgmma/tile_e4m3.cuh). */
#include "tests/cuda/on_cpu.h"

#define unpack_e4m3 ptx_unpack_e4m3
#include "cuda/wgmma/prep.cuh"
#undef unpack_e4m3
static float value_e4m3(uint32_t code)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3)));
}
static float2 unpack_e4m3(uint32_t codes)
{
    return make_float2(value_e4m3(codes & 0xff), value_e4m3(codes >> 8));
}

/* Each has a launch() of its own. */
#define launch launch_bias
#include "cuda/wgmma/bias.cu"
#undef launch
#define launch launch_means
#include "cuda/wgmma/means.cu"
#undef launch
#define launch launch_pairs
#include "cuda/wgmma/pairs.cu"
#undef launch
#include "cuda/wgmma/prep.cu"

#include <random>

enum { HKV = 2, MORE_ROOM = 3 /* tiles */, QUERY_ROW = 128 /* bytes of a query's codes */ };

struct shape {
    int bf16, Skv, Sq, stride /* 0: no smoothing */, early_tiles, packing_rows;
    float size; /* of keys and values */
    int G = 2, smooth_q = 0 /* of D 128 alone */, p_phase = 0, negate = 0;
    float spike = 0.0f; /* two queries of each head, of opposite signs, so large */
    int slots = 0;      /* blocks do both passes: there are no candidates of units to clear, but slots */
};

/* A call: inputs, the job, and the buffers that it fills. */
template <int D> struct call {
    shape s;
    apa_cuda_job job = {};
    std::vector<uint16_t> q, k, v;
    std::vector<double> tile_sum;
    std::vector<double> q_sum;
    std::vector<float> mean, largest, q_scale, shift, q_range, q_mean, q_head_scale;
    std::vector<uint8_t> blob, poisoned, q_codes, all_hot, candidate, key_bias;
    std::vector<uint32_t> slot_taken;

    explicit call(const shape &of) : s(of)
    {
        fill_inputs();
        describe();
        allocate();
    }
    float key(int h, int j, int d) const
    {
        return value_16(k[(static_cast<size_t>(h) * s.Skv + j) * D + d], s.bf16);
    }
    float value(int h, int j, int d) const
    {
        return value_16(v[(static_cast<size_t>(h) * s.Skv + j) * D + d], s.bf16);
    }
    float query(int hq, int position, int d) const
    {
        const float x = value_16(q[(static_cast<size_t>(hq) * s.Sq + position) * D + d], s.bf16);
        return s.negate ? -x : x;
    }
    bool finite_query(int hq, int position) const
    {
        bool all = true;
        for (int d = 0; d < D; d++)
            all = all && isfinite(query(hq, position, d));
        return all;
    }
    bool finite_key(int h, int j) const
    {
        bool all = true;
        for (int d = 0; d < D; d++)
            all = all && isfinite(key(h, j, d));
        return all;
    }
    bool finite_value(int h, int j) const
    {
        bool all = true;
        for (int d = 0; d < D; d++)
            all = all && isfinite(value(h, j, d));
        return all;
    }

  private:
    void fill_inputs()
    {
        std::mt19937 random(static_cast<unsigned>(7 + D + s.Skv));
        std::normal_distribution<float> normal;
        const uint16_t infinite = s.bf16 ? 0x7f80 : 0x7c00, nan = s.bf16 ? 0xffc1 : 0xfe01;
        for (int i = 0; i < HKV * s.Skv * D; i++) {
            k.push_back(bits_16((normal(random) + 1.5f) * s.size, s.bf16));
            v.push_back(bits_16(normal(random) * s.size, s.bf16));
        }
        for (int i = 0; i < HKV * s.G * s.Sq * D; i++) /* heads of different means */
            q.push_back(
                bits_16(normal(random) + (s.smooth_q ? 0.7f * static_cast<float>(i / D / s.Sq % 5) : 0.0f), s.bf16));
        for (int hq = 0; hq < HKV * s.G && s.spike > 0.0f; hq++)
            for (int i = 0; i < 2 * D; i++)
                q[(static_cast<size_t>(hq) * s.Sq + 16) * D + i] = bits_16(i < D ? s.spike : -s.spike, s.bf16);
        k[70 * D + 3] = infinite; /* a key of the first head, and the last of the second; a value; a query */
        k[k.size() - D + 1] = nan;
        v[(static_cast<size_t>(s.Skv) + 5) * D + 60] = nan;
        q[(static_cast<size_t>(s.Sq) + 3) * D + 2] = infinite;
    }
    apa_cuda_tensor tensor(std::vector<uint16_t> &x, int heads, int length) const
    {
        return {x.data(), {int64_t{heads} * length * D, int64_t{length} * D, D}, s.bf16 ? 2 : 1};
    }
    void describe()
    {
        job.B = 1;
        job.Hq = HKV * s.G;
        job.Hkv = HKV;
        job.G = s.G;
        job.Sq = s.Sq;
        job.Skv = s.Skv;
        job.D = D;
        job.bf16 = s.bf16;
        job.packing_rows = s.packing_rows;
        job.tiles = (s.Skv + 63) / 64;
        job.room = job.tiles + MORE_ROOM;
        job.Sq16 = (s.Sq + 15) / 16 * 16;
        job.rows = (s.packing_rows ? s.Sq : job.Sq16) * s.G;
        job.units = (job.rows + 127) / 128;
        job.unit_count = HKV * job.units;
        job.line = s.packing_rows ? job.rows : job.Sq16;
        job.q = tensor(q, HKV * s.G, s.Sq);
        job.k = tensor(k, HKV, s.Skv);
        job.v = tensor(v, HKV, s.Skv);
        job.first_offset = -(INT64_C(1) << 40);
        job.end_offset = s.Skv - s.Sq + 1; /* causal */
        job.c_exact = 0.1275;
        job.c = 0.1275f;
        job.smooth = s.stride > 0;
        job.smooth_stride = s.stride > 0 ? s.stride : 1;
        job.smooth_q = s.smooth_q;
        job.p_phase = s.p_phase;
        job.negate = s.negate;
        job.early_tiles = s.early_tiles;
        const int early = s.early_tiles * 64 - (s.Skv - s.Sq);
        job.early_prefix = early > 0 && s.early_tiles > 0 ? early * (s.packing_rows ? s.G : 1) : 0;
    }
    void allocate()
    {
        const size_t units = static_cast<size_t>(job.unit_count), pairs = static_cast<size_t>(job.room + 1) / 2,
                     heads = s.smooth_q ? static_cast<size_t>(job.Hq) : 0,
                     blocks = (static_cast<size_t>(s.Sq) + 127) / 128;
        tile_sum.resize(static_cast<size_t>(HKV * apa_wgmma_sum_parts(&job) * (D + 1)));
        mean.assign(HKV * D, -1.0f);
        largest.assign(HKV, 9e9f);
        blob.assign(HKV * pairs * Pair<D>::BYTES, 0xee);
        poisoned.assign(static_cast<size_t>(HKV * job.room), 9);
        q_codes.assign(units * 128 * QUERY_ROW, 0xee);
        q_scale.resize(units * 128);
        shift.resize(units * 128);
        all_hot.assign(units * 8, 7);
        candidate.assign(units * 8 * static_cast<size_t>(job.tiles), 5);
        q_sum.resize(heads * blocks * (D + 1));
        q_range.resize(heads * blocks * 2 * D);
        q_mean.resize(heads * D);
        q_head_scale.resize(heads);
        key_bias.assign(s.smooth_q ? HKV * static_cast<size_t>((job.tiles + 1) / 2) * 128 * 32 : 0, 0x7f); /* NaN */
        job.q_sum = q_sum.data();
        job.q_range = q_range.data();
        job.q_mean = q_mean.data();
        job.q_head_scale = q_head_scale.data();
        job.key_bias = key_bias.data();
        job.tile_sum = tile_sum.data();
        job.k_mean = mean.data();
        job.k_scale_max = largest.data();
        job.blob = blob.data();
        job.poisoned = poisoned.data();
        job.q_codes = q_codes.data();
        job.q_scale = q_scale.data();
        job.shift = shift.data();
        job.all_hot = all_hot.data();
        job.candidate = s.slots > 0 ? nullptr : candidate.data();
        slot_taken.assign(static_cast<size_t>(s.slots) + 1, 5); /* and one that is not there */
        job.slots = s.slots;
        job.slot_taken = slot_taken.data();
    }
};

static uint8_t code(float x)
{
    return static_cast<uint8_t>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
}

/* Codes of Q and K: FP16 at D 64, whose scores are those of the inputs, E4M3 at D 128. The largest ones' products add
 * up to what FP16 sums hold. */
template <int D> constexpr float LARGEST = D == 64 ? 31.0f : 14.0f;
static_assert(31 * 31 * 64 < 65504 && 14 * 14 * 128 < 65504);

template <int D> static uint16_t qk_code(float x)
{
    return D == 64 ? bits_16(x, false) : code(x);
}

template <int D> static float qk_value(uint16_t code)
{
    return D == 64 ? value_16(code, false) : value_e4m3(code);
}

/* Code of a channel in a row of 128 bytes, whose byte `byte` lies at place(byte). */
template <int D, typename F> static uint16_t qk_code_at(const uint8_t *from, int d, F place)
{
    if (D == 128)
        return from[place(d)];
    return static_cast<uint16_t>(from[place(2 * d)] | from[place(2 * d + 1)] << 8);
}

/* The same number: -0 is 0. */
template <int D> static bool same_code(uint16_t a, uint16_t b)
{
    const uint16_t sign = D == 64 ? 0x8000 : 0x80;
    return a == b || (a | b) == sign;
}

template <int D> static void check_mean(const call<D> &c, int h)
{
    for (int d = 0; d < D; d++) {
        double sum = 0.0;
        int keys = 0;
        for (int j = 0; j < c.s.Skv && c.s.stride > 0; j++)
            if (j / 64 % c.s.stride == 0 && c.finite_key(h, j)) {
                sum += c.key(h, j, d);
                keys++;
            }
        const double due = keys == 0 ? 0.0 : sum / keys;
        expect(std::fabs(c.mean[h * D + d] - due) <= 1e-5 * (std::fabs(due) + c.s.size), "mean", h, d);
    }
}

template <int D> static const uint8_t *blob_of(const call<D> &c, int h, int number)
{
    return c.blob.data() + (static_cast<size_t>(h) * ((c.job.room + 1) / 2) + number) * Pair<D>::BYTES;
}

template <int D> static PairMeta meta_of(const call<D> &c, int h, int number)
{
    PairMeta meta;
    memcpy(&meta, blob_of(c, h, number) + Pair<D>::META, sizeof meta);
    return meta;
}

/* V follows 128 rows of K of 128 bytes. */
template <int D> constexpr int V_AT = 128 * 128;
static_assert(Pair<64>::K == 0 && Pair<64>::BYTES == 128 * 128 + 64 * 128 + 64);
static_assert(Pair<128>::K == 0 && Pair<128>::BYTES == 128 * 128 + 128 * 128 + 64);

/* Codes, scales and flags of a pair; returns the largest square of a key's norm. */
template <int D> static float check_pair(const call<D> &c, int h, int number)
{
    const int first = number * 128, end = std::min(c.s.Skv, first + 128);
    const float *mean = c.mean.data() + h * D;
    float k_most = 0.0f, v_most = 0.0f, square_most = 0.0f;
    bool poisoned[2] = {};
    for (int j = first; j < end; j++) {
        const bool k_good = c.finite_key(h, j), v_good = c.finite_value(h, j);
        float square = 0.0f;
        poisoned[(j - first) / 64] = poisoned[(j - first) / 64] || !k_good || !v_good;
        for (int d = 0; d < D; d++) {
            const float x = k_good ? c.key(h, j, d) - mean[d] : 0.0f;
            k_most = std::max(k_most, std::fabs(x));
            square += x * x;
            v_most = std::max(v_most, v_good ? std::fabs(c.value(h, j, d)) : 0.0f);
        }
        square_most = std::max(square_most, square);
    }
    const float k_scale = power_of_two(k_most * (1.0f / LARGEST<D>)),
                v_scale = power_of_two(v_most * (1.0f / V_LARGEST));
    const uint8_t *blob = blob_of(c, h, number);
    const PairMeta meta = meta_of(c, h, number);
    const float phases[] = {0.0f, 0.5f, 0.25f, 0.75f};
    expect(meta.k_scale == k_scale && meta.v_scale == v_scale, "scale", h, number);
    expect(meta.phase == (c.s.p_phase ? phases[number % 4] : 0.0f), "phase", h, number);
    expect(meta.poisoned == (poisoned[0] ? 1u : 0u) + (poisoned[1] ? 2u : 0u), "poisoned", h, number);
    for (int tile = 0; tile < 2; tile++)
        if (2 * number + tile < c.job.tiles)
            expect(c.poisoned[h * c.job.room + 2 * number + tile] == poisoned[tile], "poisoned", h, 2 * number + tile);
    for (int place = 0; place < 128; place++) { /* of K: a key; of V: where a key's probability lies */
        const int key = first + place, of_v = first + place / 32 * 32 + key_of_slot(place % 32);
        const bool k_there = key < end && c.finite_key(h, key), v_there = of_v < end && c.finite_value(h, of_v);
        for (int d = 0; d < D; d++) {
            const uint16_t k_due = k_there ? qk_code<D>((c.key(h, key, d) - mean[d]) / k_scale) : 0,
                           k_is = qk_code_at<D>(blob, d, [&](int byte) {
                               return static_cast<int>(swizzled(place, byte / 16)) + byte % 16;
                           });
            const uint8_t v_due = v_there ? code(c.value(h, of_v, d) / v_scale) : 0,
                          v_is = blob[V_AT<D> + swizzled(d, place / 16) + place % 16];
            expect(same_code<D>(k_is, k_due) && std::fabs(qk_value<D>(k_is)) <= LARGEST<D>, "code of K", key, d);
            expect(v_is == v_due, "code of V", of_v, d);
        }
    }
    return square_most;
}

/* What a query is multiplied by before its scale divides it; the unit of scores. */
struct unit_of_scores {
    double change;
    float unit;
    explicit unit_of_scores(const apa_cuda_job &job)
    {
        const float exponent = power_of_two(job.c);
        unit = __half2float(__float2half_rn(CODES_PER_OCTAVE * (job.c / exponent))) * exponent;
        change = CODES_PER_OCTAVE * job.c_exact / double{unit};
    }
};

/* The mean of a query head, and the scale of what is left of its queries. */
template <int D> static void check_query_mean(const call<D> &c, int hq)
{
    const float *mean = c.q_mean.data() + hq * D;
    double square = 0.0;
    float most = 0.0f;
    for (int d = 0; d < D; d++) {
        double sum = 0.0;
        int queries = 0;
        for (int position = 0; position < c.s.Sq; position++)
            if (c.finite_query(hq, position)) {
                sum += c.query(hq, position, d);
                most = std::max(most, std::fabs(c.query(hq, position, d) - mean[d]));
                queries++;
            }
        expect(near(mean[d], sum / queries, 1e-6), "mean of queries", hq, d);
        square += double{mean[d]} * mean[d];
    }
    const float due = power_of_two(std::max(most / 14.0f, static_cast<float>(std::sqrt(square)) / 253.0f));
    expect(c.q_head_scale[hq] == due, "scale of a query head", hq, 0);
}

/* A key's bias, of three digits in rows of 32 bytes, whose halves change places every four keys. */
static float bias_of_digits(const uint8_t *pair, int key, int g)
{
    float sum = 0.0f;
    for (int digit = 0; digit < 3; digit++) {
        const int byte = 3 * g + digit, half = byte / 16 ^ (key / 4 & 1);
        sum += value_e4m3(pair[key * 32 + half * 16 + byte % 16]) * (digit == 0 ? 256.0f : digit == 1 ? 16.0f : 1.0f);
    }
    return sum;
}

/* q_mean·(key - mean) of every finite key of a pair, in units of its codes' products; zeros for heads that there are
 * not. Keys behind the last one are masked, and are numbers all the same. */
template <int D> static void check_bias(const call<D> &c, int h, int number)
{
    const float *mean = c.mean.data() + h * D, k_scale = meta_of(c, h, number).k_scale;
    const uint8_t *pair = c.key_bias.data() + (static_cast<size_t>(h) * ((c.job.tiles + 1) / 2) + number) * 128 * 32;
    for (int g = 0; g < 10; g++)
        for (int i = 0; i < 128; i++) {
            const int hq = h * c.s.G + g, key = number * 128 + i;
            const float is = bias_of_digits(pair, i, g);
            double due = 0.0, size = 0.0;
            if (g >= c.s.G || key >= c.s.Skv) {
                expect(g < c.s.G ? isfinite(is) : is == 0.0f, "bias that nobody asks for", hq, key);
                continue;
            }
            if (!c.finite_key(h, key))
                continue;
            for (int d = 0; d < D; d++) {
                const double x = c.key(h, key, d), m = c.q_mean[hq * D + d];
                due += m * (x - mean[d]);
                size += std::fabs(m) * (std::fabs(x) + std::fabs(mean[d]));
            }
            const double factor = unit_of_scores(c.job).change / (double{c.q_head_scale[hq]} * k_scale);
            expect(std::fabs(is - due * factor) <= std::fabs(due * factor) / 4096.0 + 3e-5 * size * factor + 1.0 / 1024,
                   "bias", hq, key);
        }
}

/* Where byte `byte` of row r of a group's codes lies: A operands of 32 bytes a row. */
static int place_of_query(int r, int byte)
{
    const int step = byte / 32, in_step = byte % 32;
    return (step * 32 + r % 8 * 4 + in_step % 16 / 4) * 16 + (in_step / 16 * 2 + r / 8) * 4 + in_step % 4;
}

/* Codes of `x`, which the kernel multiplies in FP32, in two parts: within 2^-22 of the product. E4M3 has so few codes
 * that this is on the edge of none in these inputs. */
template <int D> static bool is_code_of(uint16_t is, double x)
{
    if (D == 128)
        return is == qk_code<D>(static_cast<float>(x));
    const float least = static_cast<float>(x * (1.0 - 0x1p-22)), most = static_cast<float>(x * (1.0 + 0x1p-22));
    return same_code<D>(is, qk_code<D>(least)) || same_code<D>(is, qk_code<D>(most));
}

/* What a score may lose to codes, in octaves, beside the rounding of their mantissas (RELATIVE of a channel). */
template <int D> constexpr double RELATIVE = D == 64 ? 1.0 / 2047 : 1.0 / 15;
template <int D> static double most_lost()
{
    return D == 64 ? 1e-4 : std::sqrt(D / 144.0);
}

/* A group's codes, scales, shifts, and whether it is hot throughout. */
template <int D> static void check_group(const call<D> &c, int unit, int group)
{
    const apa_cuda_job &job = c.job;
    const int h = unit / job.units, G = c.s.G;
    const unit_of_scores of_scores(job);
    bool unjudged = false, many = false;
    for (int r = 0; r < 16; r++) {
        const int at = unit % job.units * 128 + group * 16 + r, position = job.packing_rows ? at / G : at % job.Sq16,
                  in_group = job.packing_rows ? at % G : at / job.Sq16;
        const bool real = at < job.rows && position < job.Sq;
        const size_t row = static_cast<size_t>(unit) * 128 + group * 16 + r;
        /* padding of a group counts as rows of its head */
        const int hq = h * G + (at < job.rows ? in_group : 0);
        float x[D], most = 0.0f;
        double exact[D];
        double dot = 0.0, square = 0.0, mean_square = 0.0;
        const bool finite = !real || c.finite_query(hq, position);
        for (int d = 0; d < D; d++) {
            x[d] = real ? c.query(hq, position, d) : 0.0f;
            dot += double{x[d]} * c.mean[h * D + d];
        }
        for (int d = 0; d < D; d++) {
            const float q_mean = c.s.smooth_q ? c.q_mean[hq * D + d] : 0.0f;
            exact[d] = finite ? (x[d] - q_mean) * of_scores.change : 0.0;
            x[d] = static_cast<float>(exact[d]);
            most = std::max(most, std::fabs(x[d]));
            square += double{x[d]} * x[d];
            mean_square += double{q_mean} * q_mean;
        }
        const float scale = c.s.smooth_q ? c.q_head_scale[hq] : power_of_two(most * (1.0f / LARGEST<D>));
        const double largest = job.c * (std::sqrt(square) + std::sqrt(mean_square)) * std::sqrt(c.largest[h]);
        const int sees = real ? (position + job.Skv - job.Sq) / 64 + 1 : 0;
        many = many || sees > job.early_tiles;
        const double norm = std::sqrt(c.largest[h]), bound = c.s.smooth_q ? job.c * scale * norm / 1024.0 : 0.0;
        unjudged = unjudged || (sees > 0 && (!finite || of_scores.unit * scale * norm > 7.0 * 65504.0 ||
                                             bound > 1.0 / 12 || !(largest <= (c.s.p_phase ? 365.0 : 1900.0))));
        expect(c.q_scale[row] == of_scores.unit * scale, "scale of Q", unit, row);
        /* codes lose a 16th of a channel (FP16: a 2048th), and of the score next to nothing else where the group is
         * judged */
        double lost = 0.0;
        for (int d = 0; d < D; d++) {
            const double error = std::fabs(x[d] - double{qk_value<D>(qk_code<D>(x[d] / scale))} * scale),
                         rest = error - std::fabs(x[d]) * RELATIVE<D>;
            lost += rest > 0.0 ? rest * rest : 0.0;
        }
        lost = job.c * std::sqrt(lost * c.largest[h]);
        expect(!real || sees <= 0 || c.all_hot[static_cast<size_t>(unit) * 8 + group] != 0 || lost <= most_lost<D>(),
               "octaves of a score lost to the scale of the head", unit, row);
        expect(near(c.shift[row], isfinite(dot) ? dot * job.c_exact : 0.0, 1e-5), "shift", unit, row);
        for (int d = 0; d < D; d++) {
            const uint16_t is =
                qk_code_at<D>(c.q_codes.data() + (static_cast<size_t>(unit) * 8 + group) * 16 * QUERY_ROW, d,
                              [&](int byte) { return place_of_query(r, byte); });
            expect(is_code_of<D>(is, exact[d] / scale), "code of Q", row, d);
        }
    }
    expect(c.all_hot[static_cast<size_t>(unit) * 8 + group] == (unjudged || (job.early_tiles > 0 && !many)), "all hot",
           unit, group);
}

template <int D> static void check(const shape &s)
{
    call<D> c(s);
    apa_wgmma_launch_prep_keys(&c.job, nullptr);
    apa_wgmma_launch_prep_queries(&c.job, nullptr);
    for (int h = 0; h < HKV; h++) {
        float square = 0.0f;
        check_mean<D>(c, h);
        for (int number = 0; number < (c.job.tiles + 1) / 2; number++)
            square = std::max(square, check_pair<D>(c, h, number));
        for (int number = 0; number < (c.job.tiles + 1) / 2 && s.smooth_q; number++)
            check_bias<D>(c, h, number);
        for (int g = 0; g < s.G && s.smooth_q; g++)
            check_query_mean<D>(c, h * s.G + g);
        expect(std::fabs(c.largest[h] - square) <= 1e-5f * square, "largest norm", h, 0);
    }
    for (int slot = 0; slot <= s.slots; slot++)
        expect(c.slot_taken[static_cast<size_t>(slot)] == (slot < s.slots ? 0u : 5u), "slot", slot, 0);
    int early_units = 0;
    for (int unit = 0; unit < c.job.unit_count; unit++) {
        const bool early = apa_cuda_is_early(&c.job, unit % c.job.units * 128, 128) != 0;
        early_units += early;
        for (int i = 0; i < 8 * c.job.tiles; i++) /* candidates are cleared, but for units that nobody judges */
            expect(c.candidate[static_cast<size_t>(unit) * 8 * c.job.tiles + i] == (early || s.slots > 0 ? 5 : 0),
                   "candidate", unit, i);
        for (int group = 0; group < 8 && !early; group++)
            check_group<D>(c, unit, group);
    }
    printf("prep D %d %s %d x %d, %d query heads each, stride %d, packing %s, smooth_q %d, p_phase %d, slots %d, "
           "%d early units: %lld of %lld wrong\n",
           D, s.bf16 ? "bf16" : "f16", s.Sq, s.Skv, s.G, s.stride, s.packing_rows ? "rows" : "head", s.smooth_q,
           s.p_phase, s.slots, early_units, static_cast<long long>(wrong), static_cast<long long>(checked));
}

/* Pairs before `first_tile` are there already, and get the same biases as with new ones. */
template <int D> static void check_kept(const shape &s, int first_tile)
{
    call<D> c(s);
    apa_wgmma_launch_prep_keys(&c.job, nullptr);
    const call<D> before = c;
    std::fill(c.key_bias.begin(), c.key_bias.end(), uint8_t{0x7f});
    c.job.first_tile = first_tile;
    c.job.mean_given = 1;
    apa_wgmma_launch_prep_keys(&c.job, nullptr);
    for (size_t i = 0; i < c.key_bias.size(); i++)
        expect(c.key_bias[i] == before.key_bias[i], "bias of kept keys", first_tile, static_cast<int64_t>(i));
    expect(c.blob == before.blob && c.poisoned == before.poisoned && c.mean == before.mean &&
               c.largest == before.largest && c.q_mean == before.q_mean && c.q_head_scale == before.q_head_scale,
           "kept keys", first_tile, 0);
    printf("kept D %d, %d of %d tiles: %lld of %lld wrong\n", D, first_tile, c.job.tiles, static_cast<long long>(wrong),
           static_cast<long long>(checked));
}

/* So many queries that a block sums up more than one round of them. */
template <int D> static void check_many_queries(const shape &s)
{
    call<D> c(s);
    apa_wgmma_launch_prep_keys(&c.job, nullptr);
    for (int hq = 0; hq < c.job.Hq; hq++)
        check_query_mean<D>(c, hq);
    printf("means D %d of %d queries: %lld of %lld wrong\n", D, s.Sq, static_cast<long long>(wrong),
           static_cast<long long>(checked));
}

/* Every finite 16-bit float as a double, without a conversion. */
static void check_small_double()
{
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int bits = 0; bits < 1 << 16; bits++) {
            const float x = value_16(static_cast<uint16_t>(bits), bf16 != 0);
            expect(!isfinite(x) || small_double(x) * FROM_SMALL == double{x}, "small double", bf16, bits);
        }
}

int main()
{
    check_small_double();
    check<128>({0, 200, 40, 1, 0, 0, 1.0f});
    check<128>({1, 330, 300, 2, 3, 0, 1e-3f});
    check<64>({0, 460, 300, 3, 4, 0, 3000.0f}); /* scores beyond the format */
    check<64>({1, 129, 100, 0, 1, 1, 1.0f});
    check<64>({1, 460, 300, 2, 4, 0, 1e-4f});
    check<64>({0, 200, 20, 1, 0, 0, 1e-3f, 8, 0, 1, 0});
    check<64>({1, 390, 300, 1, 0, 0, 30.0f, 3, 0, 1, 1}); /* scores at the end of what phases leave */
    check<64>({0, 390, 300, 1, 0, 0, 1.0f, 2, 0, 0, 0, 20000.0f});
    check<64>({1, 390, 300, 1, 0, 0, 1.0f, 2, 0, 0, 1, 1e6f});
    check<64>({0, 330, 150, 1, 3, 0, 1.0f, 2, 0, 1, 0, 0.0f, 5}); /* for blocks that do both passes */
    check<128>({0, 600, 500, 4, 5, 1, 1e-4f});
    check<128>({0, 330, 150, 1, 0, 0, 1.0f, 3, 1, 1, 1});
    check<128>({1, 460, 300, 2, 4, 0, 1.0f, 2, 1, 0, 0});
    check<128>({0, 200, 20, 1, 0, 0, 1e-3f, 8, 1, 1, 0}); /* as many query heads as biases have room for */
    check<128>({1, 200, 20, 2, 0, 0, 1.0f, 7, 1, 0, 1});
    check<128>({1, 390, 40, 0, 0, 0, 30.0f, 2, 1, 1, 0}); /* scores beyond the format, and no mean of K */
    /* one query's size sets the scale of its head */
    check<128>({0, 390, 300, 1, 0, 0, 1.0f, 2, 1, 1, 0, 2000.0f});
    check<128>({0, 390, 300, 1, 0, 0, 1.0f, 2, 1, 1, 0, 20000.0f});
    check<128>({1, 390, 300, 1, 0, 0, 1.0f, 2, 1, 1, 0, 1e6f});
    check<128>({0, 330, 150, 1, 3, 0, 1.0f, 2, 1, 1, 0, 0.0f, 5}); /* for blocks that do both passes */
    check_kept<64>({1, 460, 20, 1, 0, 0, 1.0f, 5, 0, 1, 0}, 4);
    check_kept<128>({0, 460, 20, 1, 0, 0, 1.0f, 5, 1, 1, 0}, 4);
    check_kept<128>({1, 1400, 20, 1, 0, 0, 1.0f, 3, 1, 1, 1}, 22); /* all of them; two blocks' pairs */
    check_many_queries<128>({1, 100, 8300, 1, 0, 0, 1.0f, 1, 1, 1, 1});
    check_many_queries<128>({0, 100, 33000, 1, 0, 0, 1.0f, 1, 1, 1, 0}); /* five rounds */
    return wrong == 0 ? 0 : 1;
}
