/* Verdicts and the end of rows on a CPU: judge.cu and finish.cu against plain loops. */
#include "tests/cuda/on_cpu.h"

#include "cuda/warp_mma/finish.cu"
#include "cuda/warp_mma/judge.cu"

#include <random>

enum { HKV = 2, G = 3, MORE_ROOM = 3 /* tiles */ };
constexpr float EPS = 0.02f;

struct shape {
    int D, Sq, Skv, splits, hot_splits, early_tiles, packing_rows, counted, f16_out;
    int eps_by_row = 0, left = -1; /* left: keys before its own that a row sees; -1: all */
};

static std::mt19937 random_bits(3);

static float between(float a, float b)
{
    return std::uniform_real_distribution<float>(a, b)(random_bits);
}

static bool chance(float p)
{
    return between(0.0f, 1.0f) < p;
}

/* What pass 1 and pass 2 leave, made up, and what the two kernels write. */
struct call {
    shape s;
    apa_cuda_job job = {};
    size_t units, rows, tiles;
    std::vector<uint8_t> poisoned, all_hot, candidate, hot_mask, verdict;
    std::vector<uint16_t> fix_mask, out_16;
    std::vector<uint32_t> hot_tile, fix_tile;
    std::vector<int32_t> list_count;
    std::vector<float> mass, part_frame, part_lambda, part_sum, part_o, hot_frame, hot_sum, hot_o, shift, out, lse;
    unsigned long long counts[APA_CUDA_COUNTS] = {};

    explicit call(const shape &of) : s(of)
    {
        describe();
        make_up();
        connect();
    }
    bool early(size_t unit) const
    {
        return apa_cuda_is_early(&job, static_cast<int32_t>(unit % job.units) * 128, 128) != 0;
    }
    struct keys {
        int first, end;
        bool some() const
        {
            return first < end;
        }
        bool in(int tile) const
        {
            return some() && first < (tile + 1) * 64 && end > tile * 64;
        }
    };
    /* Keys that a row sees, its number among all rows of the output; none and -1 for padding. */
    keys sees(size_t unit, int r, int64_t *row = nullptr) const
    {
        const int at = static_cast<int>(unit % job.units) * 128 + r, position = s.packing_rows ? at / G : at % job.Sq16,
                  in_group = s.packing_rows ? at % G : at / job.Sq16;
        const bool real = at < job.rows && position < s.Sq;
        if (row != nullptr)
            *row = real ? (static_cast<int64_t>(unit) / job.units * G + in_group) * s.Sq + position : -1;
        if (!real)
            return {0, 0};
        const int own = position + s.Skv - s.Sq;
        return {s.left < 0 ? 0 : std::max(0, own - s.left), std::max(0, std::min(s.Skv, own + 1))};
    }

  private:
    void describe()
    {
        job.B = 1;
        job.Hq = HKV * G;
        job.Hkv = HKV;
        job.G = G;
        job.Sq = s.Sq;
        job.Skv = s.Skv;
        job.D = s.D;
        job.tiles = (s.Skv + 63) / 64;
        job.room = job.tiles + MORE_ROOM;
        job.packing_rows = s.packing_rows;
        job.Sq16 = (s.Sq + 15) / 16 * 16;
        job.rows = (s.packing_rows ? s.Sq : job.Sq16) * G;
        job.units = (job.rows + 127) / 128;
        job.line = s.packing_rows ? job.rows : job.Sq16;
        job.first_offset = s.left < 0 ? -(INT64_C(1) << 40) : s.Skv - s.Sq - s.left;
        job.end_offset = s.Skv - s.Sq + 1;
        job.eps = EPS;
        job.log2_eps = std::log2(EPS);
        job.eps_root = s.eps_by_row ? EPS * std::sqrt(static_cast<float>(job.tiles)) : 0.0f;
        job.eps_most = 0.1f;
        job.second_look = job.judged = 1;
        job.early_tiles = s.early_tiles;
        const int early = s.early_tiles * 64 - (s.Skv - s.Sq);
        job.early_prefix = s.early_tiles > 0 && early > 0 ? early * (s.packing_rows ? G : 1) : 0;
        job.splits = s.splits;
        job.hot_splits = s.hot_splits;
        job.unit_count = HKV * job.units;
        units = static_cast<size_t>(job.unit_count);
        rows = units * 128;
        tiles = static_cast<size_t>(job.tiles);
    }
    template <typename F> static void fill(std::vector<float> &x, size_t n, F value)
    {
        x.resize(n);
        for (float &one : x)
            one = value();
    }
    void make_up()
    {
        const size_t splits = static_cast<size_t>(s.splits), D = static_cast<size_t>(s.D);
        for (int i = 0; i < HKV * job.room; i++)
            poisoned.push_back(chance(0.02f));
        for (size_t i = 0; i < units * 8; i++)
            all_hot.push_back(chance(0.1f));
        for (size_t i = 0; i < units * 8 * tiles; i++)
            candidate.push_back(chance(0.1f)    ? APA_CUDA_CANDIDATE_ADDED
                                : chance(0.1f)  ? APA_CUDA_CANDIDATE_HELD
                                : chance(0.05f) ? APA_CUDA_SKIPPED_TILE
                                                : 0);
        /* of 16 rows few decide, or most groups would be hot whatever ε is */
        const float decides = s.eps_by_row ? 0.05f : 1.0f;
        fill(mass, rows * tiles, [=] { return chance(decides) ? between(-4, 10) : -20.0f; });
        fill(part_frame, splits * rows, [] { return chance(0.1f) ? -INFINITY : between(0, 10); });
        fill(part_lambda, splits * rows, [] { return between(0, 20); });
        fill(part_sum, splits * rows, [] { return between(0, 20); });
        fill(part_o, splits * rows * D, [] { return between(-2, 2); });
        fill(shift, rows, [] { return between(0, 3); });
        const size_t hot = static_cast<size_t>(s.hot_splits) * rows; /* what is not written must not be read */
        hot_frame.assign(hot, 1e30f);
        hot_sum.assign(hot, 1e30f);
        hot_o.assign(hot * D, 1e30f);
        hot_tile.assign(units * tiles, 77777);
        fix_tile.assign(units * tiles, 77777);
        hot_mask.resize(units * tiles);
        fix_mask.resize(units * tiles);
        list_count.assign(units * 2, -5);
        const size_t pairs = static_cast<size_t>(HKV * G * s.Sq);
        verdict.assign(pairs * tiles, 9);
        out.assign(pairs * D, 555.0f);
        out_16.assign(pairs * D, 0);
        lse.assign(pairs, 555.0f);
    }
    void connect()
    {
        job.poisoned = poisoned.data();
        job.all_hot = all_hot.data();
        job.candidate = candidate.data();
        job.mass = mass.data();
        job.part_frame = part_frame.data();
        job.part_lambda = part_lambda.data();
        job.part_sum = part_sum.data();
        job.part_o = part_o.data();
        job.shift = shift.data();
        job.hot_frame = hot_frame.data();
        job.hot_sum = hot_sum.data();
        job.hot_o = hot_o.data();
        job.hot_tile = hot_tile.data();
        job.hot_mask = hot_mask.data();
        job.fix_tile = fix_tile.data();
        job.fix_mask = fix_mask.data();
        job.list_count = list_count.data();
        job.counts = s.counted ? counts : nullptr;
        job.verdicts = s.counted ? verdict.data() : nullptr;
        const int64_t D = s.D, Sq = s.Sq;
        job.out = {s.f16_out ? static_cast<void *>(out_16.data()) : out.data(),
                   {HKV * G * Sq * D, Sq * D, D},
                   s.f16_out ? APA_DTYPE_F16 : APA_DTYPE_F32};
        job.lse = {lse.data(), {HKV * G * Sq, Sq, 1}, APA_DTYPE_F32};
    }
};

/* ε of a group: that of the call, or the larger the fewer of the call's tiles its rows see, up to 0.1. */
static double eps_of(const call &c, size_t unit, int group)
{
    int most = 0;
    for (int r = 0; r < 16; r++) {
        const call::keys sees = c.sees(unit, group * 16 + r);
        int tiles = 0;
        for (int tile = sees.first / 64; tile <= (sees.end - 1) / 64 && sees.some(); tile++)
            tiles++;
        most = std::max(most, tiles);
    }
    return c.s.eps_by_row && most > 0 ? std::min(EPS * std::sqrt(c.job.tiles / double(most)), 0.1) : EPS;
}

/* log2 of ε times a row's λ. */
static float least_mass(const call &c, size_t row, double eps)
{
    double frame = -INFINITY, sum = 0.0;
    for (size_t at = row; at < c.part_frame.size(); at += c.rows)
        frame = std::max(frame, double{c.part_frame[at]});
    for (size_t at = row; at < c.part_frame.size() && frame > -INFINITY; at += c.rows)
        sum += c.part_lambda[at] * std::exp2(c.part_frame[at] - frame);
    return static_cast<float>(frame == -INFINITY ? frame : frame + std::log2(sum)) + static_cast<float>(std::log2(eps));
}

/* One group's verdict on a tile, and the bits of it in the two lists. */
struct verdict_of_group {
    bool hot, fix;
};

static verdict_of_group check_verdict(const call &c, size_t unit, size_t tile, int group,
                                      uint64_t (&counts)[APA_CUDA_COUNTS])
{
    const bool early = c.early(unit);
    const size_t at = (unit * 8 + group) * c.tiles + tile;
    const int kind = early || c.candidate[at] == APA_CUDA_SKIPPED_TILE ? 0 : c.candidate[at]; /* skipped: cold */
    const bool forced =
        early || c.poisoned[unit / c.job.units * c.job.room + tile] != 0 || c.all_hot[unit * 8 + group] != 0;
    const double eps = kind != 0 ? eps_of(c, unit, group) : EPS;
    bool hot = false;
    int rows = 0;
    for (int r = 0; r < 16; r++) {
        const call::keys sees = c.sees(unit, group * 16 + r);
        rows += sees.in(static_cast<int>(tile));
        hot =
            hot || (kind != 0 && sees.some() && c.mass[at * 16 + r] > least_mass(c, unit * 128 + group * 16 + r, eps));
    }
    if (rows == 0)
        return {false, false};
    hot = hot || forced;
    counts[APA_CUDA_VISIBLE] += static_cast<uint64_t>(rows);
    counts[APA_CUDA_HOT] += static_cast<uint64_t>(hot ? rows : 0);
    counts[APA_CUDA_CANDIDATES] += static_cast<uint64_t>(hot || kind != 0 ? rows : 0);
    for (int r = 0; r < 16 && c.s.counted; r++) {
        int64_t row;
        if (c.sees(unit, group * 16 + r, &row).in(static_cast<int>(tile)))
            expect(c.verdict[static_cast<size_t>(row) * c.tiles + tile] == hot, "verdict", row, tile);
    }
    return {hot, !forced && kind == (hot ? APA_CUDA_CANDIDATE_ADDED : APA_CUDA_CANDIDATE_HELD)};
}

static void check_lists(const call &c)
{
    uint64_t counts[APA_CUDA_COUNTS] = {};
    for (size_t unit = 0; unit < c.units; unit++) {
        int hots = 0, fixes = 0;
        for (size_t tile = 0; tile < c.tiles; tile++) {
            int hot = 0, fix = 0;
            for (int group = 0; group < 8; group++) {
                const verdict_of_group one = check_verdict(c, unit, tile, group, counts);
                hot |= one.hot << group;
                fix |= one.fix << group;
            }
            const size_t list = unit * c.tiles;
            if (hot != 0 && !c.early(unit)) {
                expect(c.hot_tile[list + hots] == tile && c.hot_mask[list + hots] == hot, "hot list", unit, tile);
                hots++;
            }
            if (fix != 0) {
                expect(c.fix_tile[list + fixes] == tile && c.fix_mask[list + fixes] == (fix | (fix & hot) << 8),
                       "list of corrections", unit, tile);
                fixes++;
            }
        }
        expect(c.list_count[unit * 2] == hots && c.list_count[unit * 2 + 1] == fixes, "lengths", unit, hots);
    }
    for (int i = 0; i < APA_CUDA_COUNTS && c.s.counted; i++)
        expect(c.counts[i] == counts[i], "count", i, static_cast<int64_t>(counts[i]));
}

/* Hot parts of random lists, written where hot.cu writes them; whether it does. */
static std::vector<bool> make_up_hot(call &c)
{
    std::vector<bool> written;
    for (size_t unit = 0; unit < c.units; unit++) {
        int &count = c.list_count[unit * 2];
        count = chance(0.3f) ? 0 : chance(0.5f) ? 1 + static_cast<int>(between(0, 5)) : count;
        const int part = (count + c.s.hot_splits - 1) / c.s.hot_splits;
        for (int split = 0; split < c.s.hot_splits; split++) {
            written.push_back(std::min(count, split * part) < std::min(count, (split + 1) * part));
            for (size_t r = 0; r < 128 && written.back(); r++) {
                const size_t at = split * c.rows + unit * 128 + r;
                const bool saw = chance(0.8f);
                c.hot_frame[at] = saw ? between(0, 12) : -INFINITY;
                c.hot_sum[at] = saw ? between(0, 10) : 0.0f;
                for (int d = 0; d < c.s.D; d++)
                    c.hot_o[at * c.s.D + d] = saw ? between(-0.5f, 0.5f) : 0.0f;
            }
        }
    }
    return written;
}

struct part {
    double frame, sum;
    const float *o;
};

static std::vector<part> parts_of(const call &c, size_t unit, size_t r, const std::vector<bool> &written)
{
    std::vector<part> parts;
    const size_t D = static_cast<size_t>(c.s.D), row = unit * 128 + r;
    for (int split = 0; split < c.s.splits; split++) {
        const size_t at = split * c.rows + row;
        const double frame = c.all_hot[unit * 8 + r / 16] != 0 ? -INFINITY : c.part_frame[at] + c.shift[row];
        if (frame > -INFINITY)
            parts.push_back({frame, c.part_sum[at], &c.part_o[at * D]});
    }
    for (int split = 0; split < c.s.hot_splits; split++) {
        const size_t at = split * c.rows + row;
        if (written[unit * c.s.hot_splits + split])
            parts.push_back({c.hot_frame[at], c.hot_sum[at], &c.hot_o[at * D]});
    }
    return parts;
}

static void check_row(const call &c, size_t unit, size_t r, size_t row, const std::vector<bool> &written)
{
    const std::vector<part> parts = parts_of(c, unit, r, written);
    double frame = -INFINITY, sum = 0.0;
    for (const part &one : parts)
        frame = std::max(frame, one.frame);
    for (const part &one : parts)
        sum += one.frame > -INFINITY ? one.sum * std::exp2(one.frame - frame) : 0.0;
    expect(near(c.lse[row], sum == 0.0 ? -INFINITY : (frame + std::log2(sum)) * std::log(2.0), 1e-5), "LSE", row, 0);
    for (int d = 0; d < c.s.D; d++) {
        double o = 0.0;
        for (const part &one : parts)
            o += one.frame > -INFINITY ? one.o[d] * std::exp2(one.frame - frame) : 0.0;
        const size_t at = row * static_cast<size_t>(c.s.D) + d;
        const double is = c.s.f16_out ? value_16(c.out_16[at], false) : c.out[at];
        expect(near(is, sum == 0.0 ? 0.0 : o / sum, c.s.f16_out ? 1e-3 : 1e-5), "output", row, d);
    }
}

static void check(const shape &s)
{
    call c(s);
    apa_cuda_launch_judge(&c.job, nullptr);
    check_lists(c);
    const std::vector<bool> written = make_up_hot(c);
    apa_cuda_launch_finish(&c.job, 1, nullptr);
    for (size_t unit = 0; unit < c.units; unit++)
        for (int r = 0; r < 128; r++) {
            int64_t row;
            c.sees(unit, r, &row);
            if (row >= 0 && c.early(unit)) /* the exact kernel's */
                expect(c.lse[row] == 555.0f, "early row", row, 0);
            else if (row >= 0)
                check_row(c, unit, r, row, written);
        }
    printf("judge, finish D %d %d x %d, splits %d and %d, early tiles %d, packing %s, left %d, eps by %s: %lld of %lld "
           "wrong\n",
           s.D, s.Sq, s.Skv, s.splits, s.hot_splits, s.early_tiles, s.packing_rows ? "rows" : "head", s.left,
           s.eps_by_row ? "row" : "call", static_cast<long long>(wrong), static_cast<long long>(checked));
}

int main()
{
    check({128, 40, 300, 1, 2, 0, 0, 1, 0});
    check({64, 70, 8000, 2, 3, 0, 0, 1, 1});
    check({128, 300, 700, 3, 8, 8, 0, 1, 1}); /* lines that begin inside a unit */
    check({128, 150, 550, 3, 1, 8, 1, 0, 1});
    check({64, 10, 40000, 37, 8, 0, 1, 1, 0}); /* more than 32 parts, more tiles than threads of the small block */
    check({256, 20, 200, 2, 2, 0, 0, 0, 1});
    check({64, 1000, 1000, 2, 1, 0, 0, 1, 0, 1}); /* groups of 1 … 16 tiles, ε from 0.1 to 0.02 */
    check({64, 500, 900, 1, 2, 8, 1, 1, 1, 1});
    check({64, 400, 3000, 2, 1, 0, 0, 1, 0, 1, 150}); /* three or four tiles of 47 that do not begin at the first */
    check({64, 60, 20, 1, 1, 0, 0, 1, 0, 1});         /* groups, and rows of others, that see nothing */
    return wrong == 0 ? 0 : 1;
}
