/* What the blocks of the Hopper engine do with their rows once, on a CPU: what rows see, queries into shared memory and
 * results out of it (lane_rows.cuh), and the counters of a block (verdicts.cuh); and what pass 1 does with a pair whose
 * products are there (cold_walk.cuh). All against plain loops. */
#include "tests/cuda/on_cpu.h"

#include "cuda/wgmma/lane_rows.cuh"
#include "cuda/wgmma/verdicts.cuh"

#include <random>

enum { HKV = 2, B = 2 };

static std::mt19937 random_bits(7);

static float between(float a, float b)
{
    return std::uniform_real_distribution<float>(a, b)(random_bits);
}

enum output { OUT_F16, OUT_BF16, OUT_F32, OUT_F16_ODD /* at no multiple of 16 bytes */ };

struct shape {
    int G, Sq, Skv, packing_rows, bf16, negate, lse;
    output out;
    int left = -1; /* keys before its own that a row sees; -1: all */
};

/* Tensors of a call, and what a warpgroup holds of its rows: made-up numbers, so that places are told apart. */
template <int D> struct call {
    shape s;
    apa_cuda_job job = {};
    size_t rows; /* of the output */
    std::vector<uint16_t> q, out_16;
    std::vector<float> out_32, lse;

    explicit call(const shape &of) : s(of)
    {
        job.B = B;
        job.Hkv = HKV;
        job.G = s.G;
        job.Hq = HKV * s.G;
        job.Sq = s.Sq;
        job.Skv = s.Skv;
        job.D = D;
        job.tiles = (s.Skv + 63) / 64;
        job.packing_rows = s.packing_rows;
        job.Sq16 = (s.Sq + 15) / 16 * 16;
        job.rows = (s.packing_rows ? s.Sq : job.Sq16) * s.G;
        job.units = (job.rows + 127) / 128;
        job.first_offset = s.left < 0 ? -(INT64_C(1) << 40) : s.Skv - s.Sq - s.left;
        job.end_offset = s.Skv - s.Sq + 1;
        job.bf16 = s.bf16;
        job.negate = s.negate;
        rows = static_cast<size_t>(B * job.Hq * s.Sq);
        for (size_t i = 0; i < rows * D; i++)
            q.push_back(bits_16(between(-3, 3), s.bf16 != 0));
        const int64_t stride[3] = {int64_t{job.Hq} * s.Sq * D, int64_t{s.Sq} * D, D};
        const int32_t dtype = s.out == OUT_F32 ? APA_DTYPE_F32 : s.out == OUT_BF16 ? APA_DTYPE_BF16 : APA_DTYPE_F16;
        out_16.assign(rows * D + 8, 0x7777);
        out_32.assign(rows * D, 7777.0f);
        lse.assign(rows, 7777.0f);
        job.q = {q.data(), {stride[0], stride[1], stride[2]}, 0};
        job.out = {s.out == OUT_F32 ? static_cast<void *>(out_32.data()) : out_at(0), {stride[0], stride[1], stride[2]}, dtype};
        if (s.lse)
            job.lse = {lse.data(), {int64_t{job.Hq} * s.Sq, s.Sq, 1}, APA_DTYPE_F32};
    }
    /* the vector's memory is at a multiple of 16 bytes */
    uint16_t *out_at(size_t i)
    {
        return out_16.data() + i + (s.out == OUT_F16_ODD ? 1 : 0);
    }
    float result(size_t i)
    {
        return s.out == OUT_F32 ? out_32[i] : value_16(*out_at(i), s.out == OUT_BF16);
    }
    bool untouched(size_t i)
    {
        return s.out == OUT_F32 ? out_32[i] == 7777.0f : *out_at(i) == 0x7777;
    }

    struct line {
        int64_t row; /* of the output; -1: padding */
        int first, end;
    };
    line line_of(int head, int at) const
    {
        const int position = s.packing_rows ? at / s.G : at % job.Sq16,
                  in_group = s.packing_rows ? at % s.G : at / job.Sq16;
        if (at >= job.rows || position >= s.Sq)
            return {-1, 0, 0};
        const int own = position + s.Skv - s.Sq, end = std::clamp(own + 1, 0, s.Skv),
                  first = s.left < 0 ? 0 : std::clamp(own - s.left, 0, end);
        return {(int64_t{head} * s.G + in_group) * s.Sq + position, first, end};
    }
};

/* Sums of a row of the line before they are divided; rows 3 mod 5 have seen nothing. */
static float sum_of(int at)
{
    return at % 5 == 3 ? 0.0f : 1.0f + static_cast<float>(at % 11);
}
static float value_of(int at, int channel)
{
    return static_cast<float>((at * 37 + channel * 11) % 201 - 100) / 16.0f;
}
static float frame_of(int at)
{
    return static_cast<float>(at % 13) - 4.0f;
}

/* A warpgroup's queries, then its results, where an address is a multiple of 1024: pointers need not be. */
static uint8_t shared_memory[64 * 256 * 2 + 1024];
static uint32_t queries_place()
{
    return (shared_address(shared_memory) + 1023) & ~1023u;
}

static uint8_t table_memory[4 * 128];
static ThreadRows<1> rows_of_thread[128];
static WholeKeys whole_of_warp[4];

/* A warpgroup's 64 rows from `first` of a unit on. */
template <int D> static void run_rows(call<D> &c, int head, int number, int first)
{
    const Unit unit = {int64_t{head} * c.job.units + number, 0, head, number, 0};
    const uint32_t queries = queries_place();
    memset(shared_memory, 0x55, sizeof shared_memory);
    run_grid(1, 128, [&] {
        const int warp = static_cast<int>(threadIdx.x / 32), first_row = first + warp * 16;
        const Row row = lane_row(c.job, unit, first_row);
        ask_for_queries<D>(queries, c.job, head / HKV, row);
        whole_of_warp[warp] = whole_keys(row);
        store_rows(shared_address(table_memory) + warp * 128, row.first, row.end);
        queries_there<D>(queries, c.job);
        __syncthreads();
        load_rows(rows_of_thread[threadIdx.x], shared_address(table_memory) + warp * 128);
    });
    for (int r = 0; r < 64; r++) {
        const auto due = c.line_of(head, number * 128 + first + r);
        for (int d = 0; d < D; d++) {
            uint16_t is, should = 0;
            memcpy(&is, at_address(queries) + d / 64 * 64 * 128 + r * 128 + ((d % 64 / 8 ^ r % 8) << 4) + d % 8 * 2, 2);
            if (due.row >= 0)
                should = c.q[static_cast<size_t>(due.row) * D + d] ^ (c.s.negate ? 0x8000 : 0);
            /* the sign of padding's zeros does not matter */
            expect(due.row >= 0 ? is == should : (is & 0x7fff) == 0, "query", number * 128 + first + r, d);
        }
        const int lane = r % 16 % 8 * 4, h = r % 16 / 8;
        for (int t = 0; t < 4; t++) {
            const ThreadRows<1> &is = rows_of_thread[r / 16 * 32 + lane + t];
            expect(is.first[h] == due.first && is.end[h] == due.end, "keys of a row", r, t);
        }
    }
    for (int warp = 0; warp < 4; warp++) {
        int whole_first = 0, whole_end = INT32_MAX;
        for (int r = 0; r < 16; r++) {
            const auto due = c.line_of(head, number * 128 + first + warp * 16 + r);
            whole_first = due.row < 0 ? whole_first : std::max(whole_first, due.first);
            whole_end = due.row < 0 ? whole_end : std::min(whole_end, due.end);
        }
        expect(whole_of_warp[warp].first == whole_first && whole_of_warp[warp].end == whole_end, "keys of all rows", number,
               warp);
    }
    run_grid(1, 128, [&] {
        const int warp = static_cast<int>(threadIdx.x / 32), first_row = first + warp * 16,
                  g = static_cast<int>(threadIdx.x & 31) / 4, t = threadIdx.x & 3;
        State16<D, 1> state;
        for (int h = 0; h < 2; h++) {
            const int at = number * 128 + first_row + g + 8 * h;
            state.X[h] = frame_of(at);
            state.l[0][2 * h] = state.l[0][2 * h + 1] = sum_of(at);
            for (int n = 0; n < D / 8; n++)
                for (int j = 0; j < 2; j++)
                    state.o[0][n][2 * h + j] = value_of(at, n * 8 + t * 2 + j);
        }
        store_lane_rows<D>(state, c.job, unit, head / HKV, first_row, lane_row(c.job, unit, first_row),
                           queries + warp * 16 * D * 2);
    });
}

template <int D> static void check_rows(const shape &s)
{
    call<D> c(s);
    std::vector<int> line(c.rows, -1);
    for (int head = 0; head < B * HKV; head++)
        for (int number = 0; number < c.job.units; number++)
            for (int first = 0; first < 128; first += 64) {
                if (head == 1 && number == 0)
                    continue; /* nobody writes these */
                run_rows(c, head, number, first);
                for (int r = 0; r < 64; r++) {
                    const auto due = c.line_of(head, number * 128 + first + r);
                    if (due.row >= 0)
                        line[static_cast<size_t>(due.row)] = number * 128 + first + r;
                }
            }
    for (size_t row = 0; row < c.rows; row++) {
        const int at = line[row];
        const float l = at < 0 ? 0.0f : sum_of(at), inverse = l == 0.0f ? 0.0f : 1.0f / l;
        for (int d = 0; d < D; d++) {
            const size_t i = row * D + static_cast<size_t>(d);
            if (at < 0) {
                expect(c.untouched(i), "result that nobody has", static_cast<int64_t>(row), d);
                continue;
            }
            const float whole = value_of(at, d) * inverse;
            const float due = s.out == OUT_F32 ? whole : value_16(bits_16(whole, s.out == OUT_BF16), s.out == OUT_BF16);
            expect(c.result(i) == due, "result", static_cast<int64_t>(row), d);
        }
        if (!s.lse || at < 0)
            expect(c.lse[row] == 7777.0f, "LSE that nobody has", static_cast<int64_t>(row), 0);
        else if (l == 0.0f)
            expect(c.lse[row] == -INFINITY, "LSE of no key", static_cast<int64_t>(row), 0);
        else
            expect(near(c.lse[row], (frame_of(at) + std::log2(l)) * std::log(2.0), 1e-6), "LSE", static_cast<int64_t>(row), 0);
    }
    printf("rows D %d, %d heads a KV head, %d x %d, packing %s, left %d, output %d: %lld of %lld wrong\n", D, s.G, s.Sq, s.Skv,
           s.packing_rows ? "rows" : "head", s.left, s.out, static_cast<long long>(wrong), static_cast<long long>(checked));
}

/* ---- counters ---- */

constexpr int COUNTED_TILES = 96;
alignas(16) static uint8_t hot_memory[COUNTED_TILES * 2], candidate_memory[COUNTED_TILES * 2];
static uint8_t seen_memory[192 * 8];

/* Rows of a block see what `sees` says; masks are made up, but of tiles first … end - 1 alone. */
template <int GROUPS, typename Sees> static void check_counts(const char *name, int first, int end, Sees sees)
{
    using M = Masks<GROUPS>;
    constexpr int ROWS = GROUPS * 64;
    memset(hot_memory, 0, sizeof hot_memory);
    memset(candidate_memory, 0, sizeof candidate_memory);
    uint64_t hot = 0, either = 0, visible = 0;
    const auto set = [](uint8_t *masks, int tile, int group) {
        masks[tile * M::BYTES + group / 8] |= static_cast<uint8_t>(1 << group % 8);
    };
    for (int r = 0; r < ROWS; r++) {
        const std::pair<int32_t, int32_t> keys = sees(r);
        memcpy(seen_memory + r * 8, &keys.first, 4);
        memcpy(seen_memory + r * 8 + 4, &keys.second, 4);
        for (int tile = 0; tile < COUNTED_TILES; tile++)
            visible += keys.first < std::min(keys.second, (tile + 1) * 64) && keys.second > tile * 64;
    }
    for (int tile = first; tile < end; tile++)
        for (int group = 0; group < GROUPS * 4; group++) {
            const bool is_hot = between(0, 1) < 0.2f, is_candidate = between(0, 1) < 0.3f;
            if (is_hot)
                set(hot_memory, tile, group);
            if (is_candidate)
                set(candidate_memory, tile, group);
            for (int r = group * 16; r < group * 16 + 16; r++) {
                const auto [key, key_end] = sees(r);
                const bool in = key < std::min(key_end, (tile + 1) * 64) && key_end > tile * 64;
                hot += is_hot && in;
                either += (is_hot || is_candidate) && in;
            }
        }
    const M masks = {shared_address(hot_memory), 0, shared_address(candidate_memory), 0};
    uint64_t is[3] = {0, 0, 0};
    run_grid(1, 32, [&] {
        const CountedRows<GROUPS> rows(shared_address(seen_memory));
        uint32_t hot_rows = 0, candidates = 0;
        count_masks(hot_rows, candidates, rows, first, end, masks);
        const unsigned all[3] = {__reduce_add_sync(0xffffffffu, rows.visible), __reduce_add_sync(0xffffffffu, hot_rows),
                                 __reduce_add_sync(0xffffffffu, candidates)};
        if (threadIdx.x == 0)
            for (int i = 0; i < 3; i++)
                is[i] = all[i];
    });
    expect(is[0] == visible, "visible", static_cast<int64_t>(is[0]), static_cast<int64_t>(visible));
    expect(is[1] == hot, "hot", static_cast<int64_t>(is[1]), static_cast<int64_t>(hot));
    expect(is[2] == either, "candidates", static_cast<int64_t>(is[2]), static_cast<int64_t>(either));
    printf("counters of %d rows, %s: %lld of %lld wrong\n", ROWS, name, static_cast<long long>(wrong),
           static_cast<long long>(checked));
}

template <int GROUPS> static void check_all_counts()
{
    using keys = std::pair<int, int>;
    check_counts<GROUPS>("all see all", 0, 80, [](int) { return keys{0, 5120}; });
    check_counts<GROUPS>("a last tile in part", 0, 81, [](int) { return keys{0, 5121}; });
    check_counts<GROUPS>("causal", 0, 80, [](int r) { return keys{0, 4900 + r}; });
    check_counts<GROUPS>("causal, few keys", 0, 3, [](int r) { return keys{0, 1 + r % 100}; });
    check_counts<GROUPS>("a window", 17, 90, [](int r) { return keys{1100 + 3 * r, 5000 + 3 * r}; });
    check_counts<GROUPS>("padding", 0, 70, [](int r) { return r % 64 < 40 ? keys{0, 4400 + r} : keys{0, 0}; });
    check_counts<GROUPS>("nothing", 0, 0, [](int) { return keys{0, 0}; });
}

/* ---- a pair of tiles is taken in ---- */

/* A warp's pair, made up: number `step` of `pairs`; shares of λ about `share`, one tile of a row `ratio` times the
 * other; of every other row `odd_share`, where it is not 0, and then the ratio of the rest is 2. */
struct taking {
    float share, ratio, apart;
    int step, pairs, splits;
    float odd_share = 0.0f;
};

struct taken_row {
    float mass[2], weight, top, lambda, held; /* mass: as P·V has it */
};

/* In all lanes but for `above` and `mass`. */
struct taken_pair {
    bool above[32], some, held, apart;
    float mass[32];
};

template <int D> static void check_taking(const taking &s)
{
    constexpr float EPS = 0.02f, V_SCALE = 0.5f;
    taken_row row[16];
    std::vector<float> sums(16 * D), before(16 * D), after(16 * D);
    for (int i = 0; i < 16; i++) {
        const bool odd = i % 2 == 1 && s.odd_share > 0.0f, first = between(0, 1) < 0.5f;
        const float weight = std::exp2(std::floor(between(-3, 4))), lambda = between(1, 2),
                    large = (odd ? s.odd_share : s.share) * lambda * between(0.9f, 1.1f);
        row[i] = {{large / weight, large / weight}, weight, std::floor(between(-20, 20)), lambda, between(0, 1)};
        row[i].mass[first ? 0 : 1] /= odd || s.odd_share == 0.0f ? s.ratio : 2.0f;
    }
    for (size_t i = 0; i < sums.size(); i++) {
        sums[i] = between(-5, 5);
        before[i] = between(-1, 1);
    }
    const std::vector<taken_row> was(row, row + 16);
    taken_pair is = {};
    apa_cuda_job job = {};
    job.splits = s.splits;
    const Unit unit = {};
    run_grid(1, 32, [&] {
        const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
        const WarpPlace my = {job, unit, 0, 0, {0, s.pairs}, {0, 0}, 0};
        ColdRows<D> rows;
        PairAhead pair;
        float acc[D / 8 + 1][4];
        pair.v_scale = V_SCALE;
        pair.apart = s.apart;
        for (int h = 0; h < 2; h++) {
            const taken_row &r = was[static_cast<size_t>(g + 8 * h)];
            rows.lambda[h] = r.lambda;
            rows.held[h] = r.held;
            pair.top[h] = r.top;
            pair.weight[h] = r.weight;
            for (int tile = 0; tile < 2; tile++)
                acc[D / 8][2 * h + tile] = r.mass[tile];
            for (int n = 0; n < D / 8; n++)
                for (int i = 0; i < 2; i++) {
                    const int at = (g + 8 * h) * D + 8 * n + 2 * t + i;
                    acc[n][2 * h + i] = sums[static_cast<size_t>(at)];
                    rows.o[n][2 * h + i] = before[static_cast<size_t>(at)];
                }
        }
        is.above[lane] = take_in<D>(rows, acc, pair, EPS);
        if (__any_sync(0xffffffffu, is.above[lane])) {
            const Note note = note_of<D>(rows, acc, pair, EPS, my, s.step);
            is.mass[lane] = note.mass;
            if (lane == 0) {
                is.some = true;
                is.held = note.held;
                is.apart = note.apart;
            }
        }
        for (int h = 0; h < 2; h++) {
            if (t == 0) {
                row[g + 8 * h].lambda = rows.lambda[h];
                row[g + 8 * h].held = rows.held[h];
            }
            for (int n = 0; n < D / 8; n++)
                for (int i = 0; i < 2; i++)
                    after[static_cast<size_t>((g + 8 * h) * D + 8 * n + 2 * t + i)] = rows.o[n][2 * h + i];
        }
    });
    bool some = false, held = false, apart = false;
    for (const taken_row &r : was) {
        const float mass[2] = {r.mass[0] * r.weight, r.mass[1] * r.weight}, lambda = r.lambda + mass[0] + mass[1];
        const float most = std::max(mass[0], mass[1]), least = std::min(mass[0], mass[1]);
        const float pace = std::max(1.0f, static_cast<float>(s.pairs * s.splits) / static_cast<float>(s.step + 1));
        some = some || most > EPS * lambda;
        held = held || most > EPS * pace * lambda;
        apart = apart || (most > EPS * lambda && least * s.apart < most);
    }
    held = held || apart;
    expect(is.some == some && is.held == (some && held) && is.apart == (some && apart), "note", is.some, is.held);
    for (int r = 0; r < 16; r++) {
        const taken_row &w = was[static_cast<size_t>(r)];
        const float both = (w.mass[0] + w.mass[1]) * w.weight;
        expect(near(row[r].lambda, w.lambda + both, 1e-6), "lambda", r, 0);
        expect(near(row[r].held, w.held + (some && held ? both : 0.0f), 1e-6), "held", r, 0);
        for (int d = 0; d < D; d++) {
            const size_t at = static_cast<size_t>(r * D + d);
            const float x = sums[at] * w.weight * V_SCALE, due = some && held ? before[at] : before[at] + x;
            expect(std::fabs(after[at] - due) <= 3e-7f * (1.0f + std::fabs(x)), "o", r, d);
        }
        for (int tile = 0; tile < 2 && some; tile++) {
            const int lane = r % 8 * 4 + r / 8 * 2 + tile;
            expect(std::fabs(is.mass[lane] - (w.top + std::log2(w.mass[tile] / P_RANGE))) < 1e-4f, "mass", r, tile);
        }
    }
    printf("a pair taken in, D %d, share %g, ratio %g, step %d of %d: %s%s, %lld of %lld wrong\n", D, static_cast<double>(s.share),
           static_cast<double>(s.ratio), s.step, s.pairs, is.held ? "held" : is.some ? "written down" : "added",
           is.apart ? ", apart" : "", static_cast<long long>(wrong), static_cast<long long>(checked));
}

template <int D> static void check_all_takings()
{
    check_taking<D>({0.001f, 3.0f, APART, 40, 50, 1});      /* nothing to write down */
    check_taking<D>({0.001f, 1e5f, APART, 40, 50, 1});      /* far apart, and under ε */
    check_taking<D>({0.2f, 3.0f, APART, 2, 50, 1});         /* above ε, but not at this pace */
    check_taking<D>({0.2f, 3.0f, APART, 40, 50, 1});        /* held back */
    check_taking<D>({0.2f, 3.0f, APART, 40, 50, 20});       /* ... not where others have most of the keys */
    check_taking<D>({0.2f, 1e5f, APART, 2, 50, 1});         /* far apart, above ε */
    check_taking<D>({0.2f, 1e5f, CUDART_INF_F, 2, 50, 1});  /* ... where rows see a part of a tile: not 0 there */
    check_taking<D>({0.2f, 1e5f, APART, 2, 50, 1, 0.001f}); /* rows above ε, and others that are far apart */
    check_taking<D>({0.026f, 1.1f, APART, 40, 50, 1});      /* a tile's share counts, not the pair's */
    check_taking<D>({0.021f, 3.0f, APART, 40, 50, 1});      /* some rows above ε */
}

int main()
{
    check_all_takings<64>();
    check_all_takings<128>();
    check_rows<128>({3, 200, 300, 0, 0, 0, 1, OUT_F16});
    check_rows<128>({3, 75, 300, 1, 1, 1, 1, OUT_BF16});
    check_rows<128>({1, 130, 100, 0, 0, 1, 0, OUT_F32, 20}); /* rows that see nothing */
    check_rows<128>({2, 40, 500, 0, 1, 0, 1, OUT_F16_ODD, 100});
    check_rows<64>({2, 150, 150, 0, 1, 0, 1, OUT_F16});
    check_rows<64>({5, 33, 900, 1, 0, 1, 0, OUT_BF16});
    check_rows<256>({1, 70, 70, 0, 0, 1, 1, OUT_F16});
    check_rows<256>({2, 20, 64, 1, 1, 0, 0, OUT_F32});
    check_all_counts<2>();
    check_all_counts<3>();
    return wrong == 0 ? 0 : 1;
}
