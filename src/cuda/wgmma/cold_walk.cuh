/* Pass 1 of a warpgroup: every tile in E4M3, whatever its verdict; tiles in pairs (tile_e4m3.cuh).
 *
 * A block takes rows in line: two warpgroups of 64 rows (or three, both_passes.cu), and one thread that keeps a ring of
 * pairs full. Queries stay in registers, or with three warpgroups in shared memory.
 *
 *     step i of a warpgroup    codes of P(i), half of them, issue their part of P(i)·V(i); the other half
 *                              issue S(i+1) = Q·Kᵀ; weights of pair i
 *                              wait for P·V: masses, verdicts, o += weight·P·V in FP32, while S(i+1) goes on
 *                              wait for S(i+1): frames of P(i+1), while the other warpgroup multiplies
 *
 * Warpgroups issue as they come, and fall into step by themselves. Rare code works from shared memory, so that it takes
 * no registers from the loop.
 *
 * Sums of E4M3 products keep about 13 bits, so they are taken over one pair. Verdicts fall on a guess as
 * in cuda/warp_mma: a tile whose mass in some row exceeds ε of λ so far is a candidate, written down with its masses,
 * and held back if it would still pass with λ grown at its pace so far, or if its pair's tiles are too far apart for
 * one frame; what was guessed wrong is set right when λ is complete (fix_pair.cuh). Rows of a verdict are the 16 of a
 * warp: a warp leaves out what it holds back. All of that is found out behind one branch, which few pairs take where
 * keys are not split: a step is one chain of instructions, and each costs time.
 *
 * Where candidates are written down is the caller's: an object with write(), called by all lanes of a warp. */
#ifndef APA_CUDA_WGMMA_COLD_WALK_CUH
#define APA_CUDA_WGMMA_COLD_WALK_CUH

#include "cuda/wgmma/lane_rows.cuh"
#include "cuda/wgmma/tile_e4m3.cuh"

constexpr int COLD_GROUPS = 2, MOST_COLD_GROUPS = 3; /* warpgroups */

/* The ring of a block with so many warpgroups. A shape adds where its barriers lie: FULL_AT, for each stage the one
 * that says it is full and the one that says it has been read. */
template <int D, int WARPGROUPS> struct ColdRing {
    static constexpr int GROUPS = WARPGROUPS, ROWS = GROUPS * WARPGROUP_ROWS, WARPS = GROUPS * 4; /* that multiply */
    static constexpr int STAGES = D == 64 && GROUPS == 2 ? 6 : 5, RING_BYTES = STAGES * Pair<D>::STAGE;
    static constexpr int THREADS = (GROUPS + 1) * 128;
    static constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 24 : 32, CONSUMER_REGISTERS = GROUPS == 2 ? 240 : 160;
};

#ifdef APA_CUDA_BULK

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

/* Is it a unit of the KV head and of the batch? */
__device__ __forceinline__ bool is_there(const apa_cuda_job &job, const Unit &unit)
{
    return unit.number < job.units && unit.local < job.unit_count;
}

/* Pairs that some row of the block sees, cut to its split. All threads call it. */
template <int GROUPS>
__device__ __forceinline__ PairRange block_pairs(const apa_cuda_job &job, const apa_cuda_stretch &place)
{
    __shared__ int range[2];
    if (threadIdx.x == 0) {
        range[0] = job.tiles;
        range[1] = 0;
    }
    __syncthreads();
    if (threadIdx.x < GROUPS * WARPGROUP_ROWS) {
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

/* Of the block's groups of 16 rows, that of the warp. */
__device__ __forceinline__ int own_group()
{
    return static_cast<int>(threadIdx.x / 32);
}

/* What a warp rarely needs. */
struct WarpPlace {
    const apa_cuda_job &job;
    const Unit &unit;
    int first_row;          /* in the unit */
    uint32_t row_table;     /* of the warp, in shared memory */
    PairRange pairs, whole; /* whole: pairs that every row of the warp sees to the last key */
    int most_tiles;         /* that a row of the warp sees */
};

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

/* ε of the warp's group, in shared memory: a register that lives through the walk is one too many. */
__device__ __forceinline__ uint32_t eps_place()
{
    __shared__ float of_warp[MOST_COLD_GROUPS * 4];
    return shared_address(of_warp + threadIdx.x / 32);
}

/* What the warp's rows see goes to its table, and which pairs all of them see whole to its place. there: else they are
 * rows of no unit of the batch, and see nothing. Returns which keys all of them see. */
__device__ __forceinline__ WholeKeys see_rows(WarpPlace &my, bool there)
{
    const Row row = lane_row(my.job, my.unit, my.first_row);
    const WholeKeys keys = whole_keys(row);
    const int first = there ? row.first : 0, end = there ? row.end : 0;
    store_rows(my.row_table, first, end);
    my.whole.first = (keys.first + PAIR_KEYS - 1) / PAIR_KEYS;
    /* a reduction, so that it stays in a register of the warp: that it is the same in all lanes is not seen otherwise
     */
    my.whole.end = __reduce_min_sync(0xffffffffu, there ? max(my.whole.first, keys.end / PAIR_KEYS) : my.whole.first);
    my.most_tiles = __reduce_max_sync(0xffffffffu, tiles_seen(first, end));
    if ((threadIdx.x & 31) == 0)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(eps_place()), "f"(group_eps(my.job, my.most_tiles)) : "memory");
    __syncwarp();
    return keys;
}

/* A pair whose P·V is under way. */
struct PairAhead {
    float top[2], weight[2], v_scale;
    float
        apart; /* times the smaller sum of a row's two tiles: below the larger one, they are too far from each other */
};

/* Masses of a candidate pair: of tile mass_tile(), row g + 8·mass_h() of lane 4g + 2·h + tile. */
__device__ __forceinline__ int mass_tile()
{
    return threadIdx.x & 1;
}

__device__ __forceinline__ int mass_h()
{
    return threadIdx.x >> 1 & 1;
}

/* P·V of a pair is there: masses and sums. Returns whether the lane saw a tile whose share so far is above ε. No sum
 * waits for what the warp's lanes say together: a pair that is held back is added, too, and taken out again
 * (note_of()). */
template <int D>
__device__ __forceinline__ bool take_in(ColdRows<D> &rows, const float (&acc)[D / 8 + 1][4], const PairAhead &pair,
                                        float eps)
{
    bool above = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float first = acc[D / 8][2 * h] * pair.weight[h], second = acc[D / 8][2 * h + 1] * pair.weight[h];
        rows.lambda[h] += first + second;
        above = above || fmaxf(first, second) > eps * rows.lambda[h];
    }
    add_pair<D>(rows, acc, pair.weight, pair.v_scale);
    return above;
}

/* What is to be written down of a pair. */
struct Note {
    float mass;       /* log2, of mass_tile() and mass_h() */
    bool held, apart; /* apart: held because its tiles are too far from each other */
};

/* Pair number i of the walk, of which some lane saw a tile above ε, was taken in: its masses, and whether it is held
 * back. One that is goes out of o again; λ keeps it, and rows.held says how much that is. What adding it rounded away
 * stays away: 2^-24 of the pair's own sums, which come back with the hot tile or by a correction. */
template <int D>
__device__ __forceinline__ Note note_of(ColdRows<D> &rows, const float (&acc)[D / 8 + 1][4], const PairAhead &pair,
                                        float eps, const WarpPlace &my, int i)
{
    const float pairs = static_cast<float>(my.pairs.end - my.pairs.first) * static_cast<float>(my.job.splits);
    const float to_hold = eps * fmaxf(1.0f, __fdividef(pairs, static_cast<float>(i + 1)));
    const float of_first = mass_h() == 0 ? acc[D / 8][0] : acc[D / 8][2],
                of_second = mass_h() == 0 ? acc[D / 8][1] : acc[D / 8][3],
                sum = mass_tile() == 0 ? of_first : of_second, frame = mass_h() == 0 ? pair.top[0] : pair.top[1];
    bool hold = false, apart = false;
    float both[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float first = acc[D / 8][2 * h] * pair.weight[h], second = acc[D / 8][2 * h + 1] * pair.weight[h],
                    most = fmaxf(first, second);
        both[h] = first + second;
        hold = hold || most > to_hold * rows.lambda[h];
        apart = apart || (most > eps * rows.lambda[h] && fminf(first, second) * pair.apart < most);
    }
    Note note;
    note.mass = sum > 0.0f ? frame + log2_fast(sum) - LOG2_P_RANGE : -CUDART_INF_F;
    note.apart = __any_sync(0xffffffffu, apart) != 0;
    note.held = __any_sync(0xffffffffu, hold) != 0 || note.apart;
    if (note.held) {
        const float weight[2] = {-pair.weight[0], -pair.weight[1]};
        rows.held[0] += both[0];
        rows.held[1] += both[1];
        add_pair<D>(rows, acc, weight, pair.v_scale);
    }
    return note;
}

/* Whether the warp has to look at each key of pair `number`. */
__device__ __forceinline__ bool is_partial(const WarpPlace &my, const PairMeta &meta, int number)
{
    return static_cast<uint32_t>(number - my.whole.first) >= static_cast<uint32_t>(my.whole.end - my.whole.first) ||
           meta.poisoned != 0;
}

/* The frames of a pair's scores. */
__device__ __forceinline__ CodeUnits frame_step(uint32_t (&s)[32], PairAhead &pair, const float (&q_unit)[2],
                                                const PairMeta &meta, bool partial, const WarpPlace &my, int number)
{
    const float unit[2] = {q_unit[0] * meta.k_scale, q_unit[1] * meta.k_scale};
    /* Where rows see a part of a tile, sums say nothing of how far its keys are. */
    pair.apart = partial ? CUDART_INF_F : APART;
    if (__builtin_expect(partial, 0)) {
        ThreadRows<1> seen;
        load_rows(seen, my.row_table);
        mask_pair(s, seen, number * PAIR_KEYS, meta.poisoned);
    }
    return frame_pair(s, unit, meta.phase, pair.top);
}

/* Scores of the first pair of the walk, and their frames. */
template <int D, bool BIAS, typename Queries>
__device__ __forceinline__ PairMeta begin(PairState<D> &pair, PairAhead &next, CodeUnits &codes, const Queries &queries,
                                          const float (&q_unit)[2], uint32_t stage, const WarpPlace &my)
{
    const int number = pair_at(my.pairs, 0);
    products_fence();
    issue_pair_scores<D, BIAS>(pair.s, queries, stage);
    const PairMeta meta = load_meta(stage + Pair<D>::META_AT);
    products_wait<0>();
    pin(pair.s);
    codes = frame_step(pair.s, next, q_unit, meta, is_partial(my, meta, number), my, number);
    return meta;
}

template <int D, bool BIAS, typename Queries, typename Candidates, typename Shape>
__device__ __forceinline__ void walk(ColdRows<D> &rows, const Queries &queries, const float (&q_unit)[2],
                                     uint32_t shared, const WarpPlace &my, Candidates &candidates)
{
    const int n = my.pairs.end - my.pairs.first;
    if (n == 0)
        return;
    Cursor<D, Shape> here(shared), ahead(shared);
    PairState<D> pair;
    PairAhead next;
    CodeUnits codes;
    barrier_wait(here.full, here.phase);
    PairMeta meta = begin<D, BIAS>(pair, next, codes, queries, q_unit, here.stage, my);
    if (n > 1)
        ahead.advance();
    bool ready = false;
    for (int i = 0; i < n; i++) { /* the last step multiplies its own keys once more, for nothing */
        next.v_scale = meta.v_scale;
        code_and_issue_values<D>(pair, codes, here.stage);
        if (!ready)
            barrier_wait(ahead.full, ahead.phase);
        pin(pair.s);
        products_fence();
        issue_pair_scores<D, BIAS>(pair.s, queries, ahead.stage);
        meta = load_meta(ahead.stage + Pair<D>::META_AT);
        meet_frames<D>(rows, next.top);
#pragma unroll
        for (int h = 0; h < 2; h++)
            next.weight[h] = weight_of(next.top[h], rows.frame[h]);
        const uint32_t release = here.empty();
        here = ahead;
        if (i + 2 < n)
            ahead.advance();
        const int number = pair_at(my.pairs, i + 1);
        const bool partial = is_partial(my, meta, number);
        products_wait<1>();
        pin(pair.acc);
        const float eps = __uint_as_float(load_shared_4(eps_place()));
        const bool above = take_in<D>(rows, pair.acc, next, eps);
        /* This branch stands between both waits: the assembler would take P·V in behind the second one else, and not
         * beside the scores' products (1.5 % slower, and without turns 3). */
        if (__builtin_expect(__any_sync(0xffffffffu, above) != 0, 0)) {
            const Note note = note_of<D>(rows, pair.acc, next, eps, my, i);
            candidates.write(note, my, pair_at(my.pairs, i));
        }
        products_wait<0>();
        pin(pair.s);
        __syncwarp();
        if ((threadIdx.x & 31) == 0)
            barrier_arrive(release);
        codes = frame_step(pair.s, next, q_unit, meta, partial, my, number);
        ready = barrier_test(ahead.full, ahead.phase);
    }
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
