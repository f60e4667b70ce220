/* Pass 1 of a warpgroup: every tile in E4M3, whatever its verdict; tiles in pairs (tile_e4m3.cuh).
 *
 * A block takes 128 rows in line: two warpgroups of 64 rows, and one thread that keeps a ring of pairs full. Queries
 * stay in registers.
 *
 *     step i of a warpgroup    issue S(i+1) = Q·Kᵀ
 *                              P·V of pair i-1: masses, verdicts, o += weight·P·V in FP32, while S(i+1) goes on
 *                              issue P(i)·V(i); frames of pair i
 *                              wait for S(i+1): codes of P(i+1), while P·V goes on
 *                              wait for P·V
 *
 * so that the arithmetic of either product runs beside the other one, and beside the other warpgroup's: the two take
 * turns at issuing. Rare code works from shared memory, so that it takes no registers from the loop.
 *
 * Sums of E4M3 products keep about 13 bits, so they are taken over one pair. Verdicts fall on a guess as
 * in cuda/warp_mma: a tile whose mass in some row exceeds ε of λ so far is a candidate, written down with its masses,
 * and held back if it would still pass with λ grown at its pace so far; what was guessed wrong is set right when λ is
 * complete (fix_pair.cuh). Rows of a verdict are the 16 of a warp: a warp leaves out what it holds back.
 *
 * Where candidates are written down is the caller's: an object with write(), called by all lanes of a warp, while the
 * other warpgroup has its turn. */
#ifndef APA_CUDA_WGMMA_COLD_WALK_CUH
#define APA_CUDA_WGMMA_COLD_WALK_CUH

#include "cuda/wgmma/tile_e4m3.cuh"

constexpr int COLD_GROUPS = 2, COLD_ROWS = COLD_GROUPS * 64;

/* The ring of a block. A shape adds where its barriers lie: FULL_AT, for each stage the one that says it is full and
 * the one that says it has been read. */
template <int D> struct ColdRing {
    static constexpr int STAGES = D == 64 ? 8 : 5, RING_BYTES = STAGES * Pair<D>::STAGE;
    static constexpr int THREADS = (COLD_GROUPS + 1) * 128;
};

#ifdef APA_CUDA_BULK

constexpr int COLD_PRODUCER_REGISTERS = 24, COLD_CONSUMER_REGISTERS = 240;
constexpr int TURN = 1; /* and 2, named barriers: the warpgroup may issue */

/* A place in the ring, one step after the other. Its addresses are kept, so that a step does not begin by working them
 * out. */
template <int D, typename S> struct Cursor {
    uint32_t base, stage, full, phase = 0;

    __device__ explicit Cursor(uint32_t shared) : base(shared), stage(shared), full(shared + S::FULL_AT)
    {
    }
    __device__ uint32_t empty() const
    {
        return full + 8;
    }
    __device__ void advance()
    {
        stage += Pair<D>::STAGE;
        full += 16;
        if (stage == base + S::RING_BYTES) {
            stage = base;
            full = base + S::FULL_AT;
            phase ^= 1;
        }
    }
};

/* The sink pair, then from the last one backwards; backwards alone where the sink is not among them. */
__device__ __forceinline__ int pair_at(const PairRange &pairs, int i)
{
    return pairs.first > 0 ? pairs.end - 1 - i : i == 0 ? 0 : pairs.end - i;
}

/* The unit that holds a row of the line. */
__device__ __forceinline__ Unit unit_of_row(const apa_cuda_job &job, const apa_cuda_stretch &place, int row)
{
    Unit unit;
    unit.head = place.head;
    unit.number = row / APA_CUDA_UNIT;
    unit.index = static_cast<int64_t>(place.head) * job.units + unit.number;
    unit.local = unit.index - job.unit_first;
    unit.split = place.split;
    return unit;
}

/* Pairs that some row of the block sees, cut to its split. All threads call it. */
__device__ __forceinline__ PairRange block_pairs(const apa_cuda_job &job, const apa_cuda_stretch &place)
{
    __shared__ int range[2];
    if (threadIdx.x == 0) {
        range[0] = job.tiles;
        range[1] = 0;
    }
    __syncthreads();
    if (threadIdx.x < COLD_ROWS) {
        const int at = place.row + static_cast<int>(threadIdx.x);
        const Row row = row_of(job, unit_of_row(job, place, at), at % APA_CUDA_UNIT);
        if (row.first < row.end) {
            atomicMin(&range[0], row.first / PAIR_KEYS);
            atomicMax(&range[1], (row.end - 1) / PAIR_KEYS + 1);
        }
    }
    __syncthreads();
    const int part = ((job.tiles + 1) / 2 + job.splits - 1) / job.splits;
    PairRange pairs = {max(range[0], place.split * part), min(range[1], (place.split + 1) * part)};
    pairs.end = max(pairs.end, pairs.first);
    return pairs;
}

/* What a warp rarely needs. */
struct WarpPlace {
    const apa_cuda_job &job;
    const Unit &unit;
    int first_row;          /* in the unit */
    uint32_t row_table;     /* of the warp, in shared memory */
    PairRange pairs, whole; /* whole: pairs that every row of the warp sees to the last key */
};

/* What the thread's rows see: kept in shared memory, as few pairs need it. */
__device__ __forceinline__ void store_rows(uint32_t table, const ThreadRows<1> &seen)
{
    const uint32_t at = table + (threadIdx.x & 31) / 4 * 8;
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at), "r"(seen.first[0]), "r"(seen.end[0]) : "memory");
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at + 64), "r"(seen.first[1]), "r"(seen.end[1]) : "memory");
}

__device__ __forceinline__ void load_rows(ThreadRows<1> &seen, uint32_t table)
{
    const uint32_t at = table + (threadIdx.x & 31) / 4 * 8;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(seen.first[0]), "=r"(seen.end[0]) : "r"(at) : "memory");
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(seen.first[1]), "=r"(seen.end[1]) : "r"(at + 64) : "memory");
}

template <int D> __device__ __forceinline__ void clear(ColdRows<D> &rows)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows.frame[h] = -CUDART_INF_F;
        rows.lambda[h] = rows.held[h] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < D / 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            rows.o[k][i] = 0.0f;
}

/* What the warp's rows see goes to its table, and which pairs all of them see whole to its place. */
__device__ __forceinline__ void see_rows(WarpPlace &my)
{
    ThreadRows<1> seen;
    const WarpView view = warp_rows<1>(my.job, my.unit, my.first_row, seen);
    store_rows(my.row_table, seen);
    __syncwarp();
    my.whole.first = (view.every_first + PAIR_KEYS - 1) / PAIR_KEYS;
    my.whole.end = max(my.whole.first, view.every_end / PAIR_KEYS);
}

/* A pair whose P·V is under way. */
struct PairAhead {
    float top[2], weight[2], v_scale;
    float
        apart; /* times the smaller sum of a row's two tiles: below the larger one, they are too far from each other */
};

/* Masses of a candidate pair, log2: of tile mass_tile(), row g + 8·mass_h() of lane 4g + 2·h + tile. */
__device__ __forceinline__ int mass_tile()
{
    return threadIdx.x & 1;
}

__device__ __forceinline__ int mass_h()
{
    return threadIdx.x >> 1 & 1;
}

__device__ __forceinline__ float log2_mass(const float (&sums)[4], const float (&top)[2])
{
    const float first = mass_tile() == 0 ? sums[0] : sums[1], second = mass_tile() == 0 ? sums[2] : sums[3];
    const float sum = mass_h() == 0 ? first : second, frame = mass_h() == 0 ? top[0] : top[1];
    return sum > 0.0f ? frame + log2_fast(sum) - LOG2_P_RANGE : -CUDART_INF_F;
}

/* What is to be written down of a pair. */
struct Note {
    float mass;             /* log2_mass() */
    bool some, held, apart; /* apart: held because its tiles are too far from each other */
};

/* P·V of pair number i of the walk is there: masses, verdicts, sums. */
template <int D>
__device__ __forceinline__ Note take_in(ColdRows<D> &rows, const float (&acc)[D / 8 + 1][4], const PairAhead &pair,
                                        const WarpPlace &my, int i)
{
    float most[2], both[2];
    bool above = false, apart = false;
    Note note = {0.0f, false, false, false};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float first = acc[D / 8][2 * h] * pair.weight[h], second = acc[D / 8][2 * h + 1] * pair.weight[h];
        both[h] = first + second;
        most[h] = fmaxf(first, second);
        rows.lambda[h] += both[h];
        above = above || most[h] > my.job.eps * rows.lambda[h];
        apart = apart || fminf(first, second) * pair.apart < most[h];
    }
    note.some = __any_sync(0xffffffffu, above || apart);
    if (__builtin_expect(note.some, 0)) {
        const float pairs = static_cast<float>(my.pairs.end - my.pairs.first) * static_cast<float>(my.job.splits);
        const float held_above = my.job.eps * fmaxf(1.0f, __fdividef(pairs, static_cast<float>(i + 1)));
        const bool high = most[0] > held_above * rows.lambda[0] || most[1] > held_above * rows.lambda[1];
        const uint32_t why = __reduce_or_sync(0xffffffffu, (high ? 1u : 0u) | (apart ? 2u : 0u));
        note.mass = log2_mass(acc[D / 8], pair.top);
        note.held = why != 0;
        note.apart = (why & 2) != 0;
        if (note.held) {
            rows.held[0] += both[0];
            rows.held[1] += both[1];
            return note;
        }
    }
    add_pair<D>(rows, acc, pair.weight, pair.v_scale);
    return note;
}

/* Whether the warp has to look at each key of pair `number`. */
__device__ __forceinline__ bool is_partial(const WarpPlace &my, const PairMeta &meta, int number)
{
    return static_cast<uint32_t>(number - my.whole.first) >= static_cast<uint32_t>(my.whole.end - my.whole.first) ||
           meta.poisoned != 0;
}

/* Scores → codes and frames. */
__device__ __forceinline__ void soften_step(uint32_t (&s)[32], PairAhead &pair, const float (&q_unit)[2],
                                            const PairMeta &meta, bool partial, const WarpPlace &my, int number)
{
    const float unit[2] = {q_unit[0] * meta.k_scale, q_unit[1] * meta.k_scale};
    pair.apart = APART;
    if (__builtin_expect(partial, 0)) {
        ThreadRows<1> seen;
        const int key = number * PAIR_KEYS;
        load_rows(seen, my.row_table);
        mask_pair(s, seen, key, meta.poisoned);
        /* a row that sees nothing of a tile has no sum of it */
        const int middle = key + APA_CUDA_TILE, first = max(seen.first[0], seen.first[1]),
                  end = min(seen.end[0], seen.end[1]);
        if (first >= middle || end <= middle || meta.poisoned != 0)
            pair.apart = CUDART_INF_F;
    }
    soften_pair(s, unit, meta.phase, pair.top);
}

/* Scores of the first pair of the walk → codes. */
template <int D, bool BIAS>
__device__ __forceinline__ PairMeta begin(PairState<D> &pair, PairAhead &next, const uint32_t (&q)[D / 32][4],
                                          const uint32_t (&picks)[4], const float (&q_unit)[2], uint32_t stage,
                                          const WarpPlace &my)
{
    const int number = pair_at(my.pairs, 0);
    products_fence();
    issue_pair_scores<D, BIAS>(pair.s, q, picks, stage);
    const PairMeta meta = load_meta(stage + Pair<D>::META_AT);
    products_wait<0>();
    pin(pair.s);
    soften_step(pair.s, next, q_unit, meta, is_partial(my, meta, number), my, number);
#pragma unroll
    for (int k = 0; k <= D / 8; k++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            pair.acc[k][j] = 0.0f; /* there is nothing to take in before the first */
    return meta;
}

template <int D, bool BIAS, typename Candidates, typename Shape>
__device__ __forceinline__ void walk(ColdRows<D> &rows, const uint32_t (&q)[D / 32][4], const uint32_t (&picks)[4],
                                     const float (&q_unit)[2], uint32_t shared, const WarpPlace &my,
                                     Candidates &candidates)
{
    const int n = my.pairs.end - my.pairs.first;
    if (n == 0)
        return;
    Cursor<D, Shape> here(shared), ahead(shared);
    PairState<D> pair;
    PairAhead next, last = {{0.0f, 0.0f}, {0.0f, 0.0f}, 0.0f, CUDART_INF_F};
    barrier_wait(here.full, here.phase);
    PairMeta meta = begin<D, BIAS>(pair, next, q, picks, q_unit, here.stage, my);
    if (n > 1)
        ahead.advance();
    bool ready = false;
    const int group = threadIdx.x / 128;
    if (group == 1)
        named_barrier_arrive(TURN, COLD_GROUPS * 128);
    for (int i = 0; i < n; i++) { /* the last step multiplies its own keys once more, for nothing */
        next.v_scale = meta.v_scale;
        pack_pair(pair.s, pair.p);
        if (!ready)
            barrier_wait(ahead.full, ahead.phase);
        named_barrier(TURN + group, COLD_GROUPS * 128);
        pin(pair.s);
        pin(pair.p);
        products_fence();
        issue_pair_scores<D, BIAS>(pair.s, q, picks, ahead.stage);
        meta = load_meta(ahead.stage + Pair<D>::META_AT);
        const Note note = take_in<D>(rows, pair.acc, last, my, i - 1);
        pin(pair.acc);
        products_fence();
        issue_pair_values<D>(pair.acc, pair.p, here.stage);
        if (group == 0 || i + 1 < n)
            named_barrier_arrive(TURN + 1 - group, COLD_GROUPS * 128);
        if (__builtin_expect(note.some, 0))
            candidates.write(note, my, pair_at(my.pairs, i - 1));
        meet_frames<D>(rows, next.top);
#pragma unroll
        for (int h = 0; h < 2; h++)
            next.weight[h] = weight_of(next.top[h], rows.frame[h]);
        last = next;
        const uint32_t release = here.empty();
        here = ahead;
        if (i + 2 < n)
            ahead.advance();
        const int number = pair_at(my.pairs, i + 1);
        const bool partial = is_partial(my, meta, number);
        products_wait<1>();
        pin(pair.s);
        soften_step(pair.s, next, q_unit, meta, partial, my, number);
        ready = barrier_test(ahead.full, ahead.phase);
        products_wait<0>();
        pin(pair.acc);
        __syncwarp();
        if ((threadIdx.x & 31) == 0)
            barrier_arrive(release);
    }
    const Note note = take_in<D>(rows, pair.acc, last, my, n - 1);
    if (note.some)
        candidates.write(note, my, pair_at(my.pairs, n - 1));
}

/* A pair's codes, meta and biases into `stage`. */
template <int D, bool BIAS>
__device__ __forceinline__ void copy_pair(uint32_t stage, uint32_t full, const apa_cuda_job &job, int head, int number)
{
    const uint8_t *from = job.blob + (head * static_cast<int64_t>((job.room + 1) / 2) + number) * Pair<D>::BYTES;
    const uint32_t bias_bytes = BIAS ? BIAS_BYTES : 0;
    barrier_expect(full, Pair<D>::BYTES + bias_bytes);
    copy_bulk(stage, from, Pair<D>::META, full);
    copy_bulk(stage + Pair<D>::META_AT, from + Pair<D>::META, 64, full);
    if (BIAS)
        copy_bulk(stage + Pair<D>::BIAS_AT, bias_of(job, head, number), bias_bytes, full);
}

/* One thread keeps the ring full. */
template <int D, bool BIAS, typename Shape>
__device__ __forceinline__ void feed_pairs(uint32_t shared, const apa_cuda_job &job, const apa_cuda_stretch &place,
                                           const PairRange &pairs)
{
    Cursor<D, Shape> at(shared);
    for (int i = 0; i < pairs.end - pairs.first; i++, at.advance()) {
        barrier_wait(at.empty(), at.phase ^ 1);
        copy_pair<D, BIAS>(at.stage, at.full, job, place.head, pair_at(pairs, i));
    }
}

#endif

#endif
