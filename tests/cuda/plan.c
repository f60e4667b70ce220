/* What the CUDA engine's host side hands its kernels, without a device: the launchers are caught (ld --wrap), the
 * device is made up. For every launch of a call the buffers that its kernels index, by formulas of this file's own, lie
 * in the workspace that was asked for, aligned, none in another; batches and blocks take every unit once. */
#include "cuda/order.h"
#include "cuda/wgmma/launch.h"
#include "support/fixture.h"
#include "support/problems.h"
#include "support/test.h"

#include "cuda/plan.h" /* last: its `at` is a name of locals above */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RANDOM_SHAPES = 400, MOST_ITEMS = 200000 };

/* Hopper's groups of n tiles are hot throughout where n·ε of the group is at most so many shares (wgmma/accept.c):
 * those of EARLY_SHARES and EARLY_SHARES_64, whatever they come to be. */
#define SHARES 1.5
#define SHARES_64 4.0
#define EPS_64 0.1
#define EPS_PER_ROOT_TILE 0.22 /* at D 128, ε·sqrt(tiles) with smooth_q; two thirds of it without */

plan_call at;

/* ------------------------------------------------------------------------------- what a launch may touch */

static void add_to(const char *memory, size_t size, const char *name, const void *from, int64_t bytes)
{
    if (bytes == 0)
        return;
    const uintptr_t first = (uintptr_t)from, end = first + (uintptr_t)bytes;
    if (first % 256 != 0 || first < (uintptr_t)memory || end > (uintptr_t)memory + size)
        fail_msg("%s: %lld bytes at %lld of %zu", name, (long long)bytes, (long long)(first - (uintptr_t)memory), size);
    for (int i = 0; i < at.count; i++)
        if (first < at.spans[i].end && at.spans[i].first < end)
            fail_msg("%s lies in %s", name, at.spans[i].name);
    assert_in_range(at.count, 0, MOST_SPANS - 1);
    at.spans[at.count++] = (span){name, first, end};
}

#define ADD_TO(memory, size, field, n)                                                                                 \
    add_to(memory, size, #field, job->field, (int64_t)(n) * (int64_t)sizeof *job->field)
#define ADD(field, n) ADD_TO(BASE, at.bytes, field, n)

static void add_parts(const apa_cuda_job *job)
{
    const int64_t rows = job->splits * job->unit_count * 128;
    ADD(part_o, rows * job->D);
    ADD(part_frame, rows);
    ADD(part_sum, rows);
}

static void add_keys(const apa_cuda_job *job)
{
    const int64_t heads = (int64_t)job->B * job->Hkv, T = job->tiles, D = job->D, R = job->room;
    char *const kept = at.kept_bytes > 0 ? KEPT : BASE;
    const size_t size = at.kept_bytes > 0 ? at.kept_bytes : at.bytes;
    assert_true(R >= T && job->first_tile >= 0 && job->first_tile <= T && (at.kept_bytes > 0 || R == T));
    ADD_TO(kept, size, k_mean, heads * D);
    ADD_TO(kept, size, k_scale_max, heads);
    ADD_TO(kept, size, poisoned, heads * R);
    if (at.hopper) {
        const int64_t query_heads = job->smooth_q ? (int64_t)job->B * job->Hq : 0;
        /* a warp's rows are of one query head; at D 64 codes are FP16, which biases are not */
        assert_true(!job->smooth_q || (!job->packing_rows && job->G <= 8 && D == 128));
        ADD(q_sum, query_heads * ((job->Sq + 127) / 128) * (D + 1));
        ADD(q_range, query_heads * ((job->Sq + 127) / 128) * 2 * D);
        ADD(q_mean, query_heads * D);
        ADD(q_head_scale, query_heads);
        ADD(key_bias, query_heads / job->G * ((T + 1) / 2) * 32 * 128);
        const int64_t sample = (T + job->smooth_stride - 1) / job->smooth_stride; /* 4 tiles a block */
        assert_true(job->first_tile % 2 == 0);
        ADD(tile_sum, job->smooth ? heads * ((sample + 3) / 4) * (D + 1) : 0);
        ADD_TO(kept, size, blob, heads * ((R + 1) / 2) * (128 * 128 + 128 * D + 64)); /* rows of K are 128 bytes */
        return;
    }
    const int64_t blob = job->trait == APA_CUDA_NVFP4       ? 64 * D + 8 * D /* 4 bits, a scale for 16 */
                         : job->trait == APA_CUDA_INT8_FINE ? 128 * D + 4 * 64 + 4 * D + 16
                                                            : 128 * D + 4 * 4 + 16;
    ADD(tile_sum, job->smooth ? heads * T * (D + 1) : 0);
    ADD(mean_sum, job->smooth ? heads * D : 0);
    assert_true(job->windowed ? job->held >= 2 && job->held < T : job->held == R);
    ADD_TO(kept, size, blob, heads * job->held * blob);
    ADD(k_amax, heads);
    ADD(v_amax, heads * D);
    ADD(v_scale, heads * D);
}

/* Of blocks that do both passes, and that what the passes as kernels of their own need is not there. */
/* Groups of 16 rows of a block that does both passes: three warpgroups where blocks are wide, else two. */
static int64_t groups_of_block(const apa_cuda_job *job)
{
    return job->wide ? 12 : 8;
}

static void add_slots(const apa_cuda_job *job)
{
    const int64_t S = job->slots, T = job->tiles, pairs = (T + 1) / 2, groups = groups_of_block(job);
    ADD(slot_taken, S);
    ADD(mass, S * groups * pairs * 32);
    ADD(candidate_pair, S * groups * pairs * 2);
    ADD(hot_tile, S * groups / 4 * T);
    assert_true(job->candidate == NULL && job->part_lambda == NULL && job->part_skipped == NULL);
    assert_true(job->hot_mask == NULL && job->fix_tile == NULL && job->fix_mask == NULL && job->list_count == NULL);
    assert_true(job->hot_o == NULL && job->hot_frame == NULL && job->hot_sum == NULL);
}

static void add_units(const apa_cuda_job *job)
{
    const int64_t U = job->unit_count, T = job->tiles, D = job->D;
    const bool nvfp4 = !at.hopper && job->trait == APA_CUDA_NVFP4;
    const int64_t scales = D == 64 ? 128 : D; /* of 16 rows and a term: D bytes, two depth steps of 64 a piece */
    const int64_t hot = !at.hopper && job->splits == 1 && job->hot_splits == 1 ? 0 : job->hot_splits * U * 128;
    ADD(q_codes, nvfp4 ? U * 8 * 2 * (8 * D + scales) : U * 128 * (at.hopper ? 128 : D));
    ADD(q16, at.hopper ? 0 : U * 128 * D * 2);
    ADD(q_scale, U * 128);
    ADD(shift, U * 128);
    ADD(all_hot, U * 8);
    if (job->slots > 0) {
        add_slots(job);
        return;
    }
    assert_true(job->slot_taken == NULL && job->candidate_pair == NULL);
    ADD(candidate, U * 8 * T);
    ADD(mass, U * 8 * T * 16);
    ADD(part_lambda, job->splits * U * 128);
    ADD(part_skipped, job->skip ? job->splits * U * 128 : 0);
    ADD(hot_tile, U * T);
    ADD(hot_mask, U * T);
    ADD(fix_tile, U * T);
    ADD(fix_mask, U * T);
    ADD(list_count, U * 2);
    ADD(hot_o, hot * D);
    ADD(hot_frame, hot);
    ADD(hot_sum, hot);
}

/* ------------------------------------------------------------------------------- how the work is cut */

static int64_t all_units(const apa_cuda_job *job)
{
    return (int64_t)job->B * job->Hkv * job->units;
}

/* Wide blocks of the exact kernel: each 64 rows and split of the batch once, beside rows that are not there. */
static void check_wide_blocks(const apa_cuda_job *job)
{
    const int32_t rows = (int32_t)apa_wgmma_exact_rows(job->D);
    const int64_t runs = job->unit_count * 2, all = apa_cuda_stretches(job, rows) * job->splits;
    assert_true(at.hopper && rows > APA_CUDA_UNIT && rows % 64 == 0);
    uint8_t *seen = calloc((size_t)(runs * job->splits) + 1, 1);
    assert_non_null(seen);
    for (int64_t i = 0; i < all; i++) {
        const apa_cuda_stretch to = apa_cuda_stretch_to_end(job, (int32_t)i, (int32_t)all, rows);
        assert_true(to.row % 64 == 0 && to.split >= 0 && to.split < job->splits);
        for (int32_t row = to.row; row < to.row + rows; row += 64) {
            const int64_t run = ((int64_t)to.head * job->units - job->unit_first) * 2 + row / 64;
            if (row < 0 || run < 0)
                continue;
            assert_true(row < job->units * APA_CUDA_UNIT && run < runs);
            assert_int_equal(seen[run * job->splits + to.split]++, 0);
        }
    }
    for (int64_t i = 0; i < runs * job->splits; i++)
        assert_int_equal(seen[i], 1);
    free(seen);
}

/* Blocks of pass 1, of both passes and of the exact kernel: each unit and split of the batch once. */
static void check_blocks(const apa_cuda_job *job, bool stretches)
{
    const int64_t n = job->unit_count * job->splits;
    if (n > MOST_ITEMS)
        return;
    uint8_t *seen = calloc((size_t)n + 1, 1);
    assert_non_null(seen);
    if (stretches)
        assert_true(apa_wgmma_cold_blocks(job) == job->unit_count);
    for (int64_t i = 0; i < n; i++) {
        int64_t unit;
        int32_t split;
        if (stretches) {
            const apa_cuda_stretch to = apa_cuda_stretch_of(job, (int32_t)i, (int32_t)n, APA_CUDA_UNIT);
            unit = (int64_t)to.head * job->units + to.row / APA_CUDA_UNIT - job->unit_first;
            split = to.split;
        } else {
            const apa_cuda_item to = apa_cuda_item_of(job, i, job->splits);
            unit = to.index - job->unit_first;
            split = to.split;
        }
        assert_true(unit >= 0 && unit < job->unit_count && split >= 0 && split < job->splits);
        assert_int_equal(seen[unit * job->splits + split]++, 0);
    }
    free(seen);
}

static bool is_pass_1(int step)
{
    return step == COLD || step == BOTH;
}

static void check_cut(const apa_cuda_job *job, int step)
{
    const int64_t units = all_units(job);
    assert_true(job->unit_first == at.next_unit[step] && job->unit_count > 0);
    at.next_unit[step] += job->unit_count;
    assert_true(at.next_unit[step] <= units);
    assert_true(job->splits >= 1 && job->hot_splits >= (step == EXACT ? 0 : 1));
    if (at.hopper && is_pass_1(step)) { /* whole KV heads or a part of one */
        const int64_t last = job->unit_first + job->unit_count - 1;
        assert_true(job->unit_first / job->units == last / job->units ||
                    (job->unit_first % job->units == 0 && job->unit_count % job->units == 0));
    } else if (job->longest_first) {
        assert_true(job->unit_count == units);
    }
    if (job->longest_first)
        assert_true(!job->packing_rows && job->units == job->Sq16 / APA_CUDA_UNIT * job->G);
    if (at.hopper && step == EXACT && job->wide && job->unit_count * job->splits <= MOST_ITEMS)
        check_wide_blocks(job);
    check_blocks(job, at.hopper && is_pass_1(step));
}

/* Hopper's blocks do both passes where no unit is split, the masks of verdicts have room for the tiles, and the
 * candidates of as many blocks as there are multiprocessors take 1 GiB at most: 136 bytes a pair of tiles and group. */
static void check_both(const apa_cuda_job *job, int step)
{
    const int64_t slots = at.target.multiprocessors, pairs = (job->tiles + 1) / 2;
    const bool both = at.hopper && step != EXACT && job->splits == 1 && job->tiles <= 8192 &&
                      slots * groups_of_block(job) * pairs * 136 <= INT64_C(1) << 30;
    assert_int_equal(job->slots, both ? slots : 0);
    assert_true(step == KEYS || step == QUERIES || both == (step == BOTH));
}

int64_t plan_sequences(bool exact)
{
    return exact ? at.sequences[EXACT] : at.sequences[COLD] + at.sequences[BOTH];
}

/* The first batch of a sequence begins the count of its units. */
static void begin(const apa_cuda_job *job, int step)
{
    if (job->unit_first != 0 || job->again)
        return;
    const int64_t number = is_pass_1(step) ? plan_sequences(false) : at.sequences[step];
    if ((step == EXACT || is_pass_1(step)) && number < MOST_SEQUENCES)
        at.job[number] = *job;
    at.next_unit[step] = 0;
    at.sequences[step]++;
}

/* Windows of a bounded copy: prepared before they are worked on, without gaps from the last tile to the first. Returns
 * whether more of them follow. */
static bool check_window(const apa_cuda_job *job, int step)
{
    if (!job->windowed)
        return false;
    if (step == KEYS) {
        at.prepared_window = job->window_first;
        at.preps++;
    }
    if (step != COLD && step != FIX)
        return false;
    const int32_t end = job->window_first + job->held - 1;
    assert_int_equal(job->window_first, at.prepared_window);
    assert_true(job->statistics_given && job->window_first >= 1);
    assert_true(job->window_before == INT32_MAX ? job->window_first < job->tiles && end >= job->tiles
                                                : job->window_before == end);
    return job->window_first > 1;
}

static int caught(const apa_cuda_job *job, int step, bool hopper)
{
    assert_true(hopper == at.hopper);
    /* the call's first kernel comes after whatever is in the stream; the exact kernel's batches each as the first */
    assert_int_equal(job->chained, hopper && step != KEYS && (step != EXACT || job->early_only));
    at.launches++;
    at.count = 0;
    if (step == EXACT && job->early_only) {
        at.early = *job;
        at.early_at = at.next_unit[COLD] + at.next_unit[BOTH];
        at.early_launches++;
        return 0;
    }
    check_both(job, step);
    const bool more = check_window(job, step);
    if (!more)
        begin(job, step);
    for (int i = 0; i < 2 && at.gathers > 0; i++)
        add_to(BASE, at.bytes, i == 0 ? "flat K" : "flat V", at.pages[at.gathers - 1].to[i],
               (int64_t)job->Hkv * job->Skv * job->D * 2);
    if (step == EXACT) {
        if (job->splits > 1)
            add_parts(job);
        check_cut(job, step);
        return 0;
    }
    apa_cuda_job batch = *job;
    if (step == KEYS)
        batch.unit_count = 0; /* no batch yet */
    if (job->slots == 0)
        add_parts(&batch);
    add_keys(&batch);
    add_units(&batch);
    if (more)
        return 0;
    if (step == BOTH)
        at.both_launches++;
    if (is_pass_1(step))
        check_cut(job, step);
    else if (step != KEYS && !job->again && !(step == QUERIES && job->window_first == 1 && job->windowed))
        at.next_unit[step] += job->unit_count;
    if (job->again) /* of a batch whose outputs were looked at, and only where there is something to bring back */
        assert_true(job->skip && (step == FIX || step == HOT || step == FINISH) &&
                    at.next_unit[RECHECK] == job->unit_first + job->unit_count);
    return 0;
}

#define CATCH(name, step, hopper)                                                                                      \
    int __wrap_##name(const apa_cuda_job *job, void *stream);                                                          \
    int __wrap_##name(const apa_cuda_job *job, void *stream)                                                           \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        return caught(job, step, hopper);                                                                              \
    }
#define CATCH_WITH_MAPS(name, step)                                                                                    \
    int __wrap_##name(const apa_cuda_job *job, const apa_wgmma_maps *maps, void *stream);                              \
    int __wrap_##name(const apa_cuda_job *job, const apa_wgmma_maps *maps, void *stream)                               \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        assert_true((uintptr_t)maps % 64 == 0);                                                                        \
        return caught(job, step, true);                                                                                \
    }

CATCH(apa_cuda_launch_exact, EXACT, false)
CATCH(apa_cuda_launch_prep_keys, KEYS, false)
CATCH(apa_cuda_launch_prep_queries, QUERIES, false)
CATCH(apa_cuda_launch_cold, COLD, false)
CATCH(apa_cuda_launch_fix, FIX, false)
CATCH(apa_cuda_launch_hot, HOT, false)
CATCH(apa_cuda_launch_recheck, RECHECK, false)
CATCH(apa_cuda_launch_judge, JUDGE, at.hopper)
CATCH(apa_wgmma_launch_prep_keys, KEYS, true)
CATCH(apa_wgmma_launch_prep_queries, QUERIES, true)
CATCH(apa_wgmma_launch_cold, COLD, true)
CATCH(apa_wgmma_launch_fix, FIX, true)
CATCH_WITH_MAPS(apa_wgmma_launch_exact, EXACT)
CATCH_WITH_MAPS(apa_wgmma_launch_hot, HOT)
CATCH_WITH_MAPS(apa_wgmma_launch_both, BOTH)

int __wrap_apa_cuda_launch_finish(const apa_cuda_job *job, int adaptive, void *stream);
int __wrap_apa_cuda_launch_finish(const apa_cuda_job *job, int adaptive, void *stream)
{
    (void)stream;
    if (adaptive)
        return caught(job, FINISH, at.hopper);
    assert_true(job->splits > 1);
    at.count = 0;
    add_parts(job);
    return 0;
}

int __wrap_apa_cuda_launch_gather(const apa_cuda_pages *pages, void *stream);
int __wrap_apa_cuda_launch_gather(const apa_cuda_pages *pages, void *stream)
{
    (void)stream;
    assert_in_range(at.gathers, 0, MOST_SEQUENCES - 1);
    at.pages[at.gathers++] = *pages;
    return 0;
}

cudaError_t __wrap_cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer);
cudaError_t __wrap_cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    const char *address = pointer;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = address >= BASE && address < DEVICE_END ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

int __wrap_apa_wgmma_make_maps(const apa_cuda_job *job, uint32_t keys, apa_wgmma_maps *maps);
int __wrap_apa_wgmma_make_maps(const apa_cuda_job *job, uint32_t keys, apa_wgmma_maps *maps)
{
    (void)job;
    assert_true(keys == 64 || keys == 128);
    memset(maps, 0, sizeof *maps);
    return 0;
}

apa_status __wrap_apa_cuda_current(apa_context *unused, apa_cuda_target *target);
apa_status __wrap_apa_cuda_current(apa_context *unused, apa_cuda_target *target)
{
    (void)unused;
    *target = at.target;
    return APA_STATUS_OK;
}

/* ------------------------------------------------------------------------------- calls */

const apa_cuda_target h200 = {0, 90, 132, 232448, 233472}, rtx_4090 = {0, 89, 128, 101376, 102400};
static const apa_cuda_target a100 = {0, 80, 108, 166912, 167936}, rtx_5090 = {0, 120, 170, 101376, 102400};

apa_problem problem_of(const shape *s)
{
    apa_problem p;
    char *data[4];
    for (int i = 0; i < 4; i++)
        data[i] = BASE + ((int64_t)(i + 1) << 42);
    apa_problem_init(&p);
    p.q = apa_tensor_hnd(data[0], APA_DTYPE_F16, s->B, s->Hq, s->Sq, s->D);
    p.k = apa_tensor_hnd(data[1], APA_DTYPE_F16, s->B, s->Hkv, s->Skv, s->D);
    p.v = apa_tensor_hnd(data[2], APA_DTYPE_F16, s->B, s->Hkv, s->Skv, s->D);
    p.out = apa_tensor_hnd(data[3], APA_DTYPE_F16, s->B, s->Hq, s->Sq, s->D);
    p.causal = s->causal;
    p.window_left = s->left;
    return p;
}

/* Tiles that a position sees. */
static int64_t tiles_seen(const shape *s, int64_t position)
{
    const int64_t place = position + s->Skv - s->Sq; /* bottom-right */
    int64_t end = s->causal ? place + 1 : s->Skv, first = s->left >= 0 ? place - s->left : 0;
    end = end > s->Skv ? s->Skv : end;
    first = first < 0 ? 0 : first;
    return first < end ? (end - 1) / 64 - first / 64 + 1 : 0;
}

/* Rows that see few tiles: the exact kernel takes their units, once a call and after a batch of pass 1 or of both
 * passes, and no row that sees more. Are all rows such ones? */
static bool check_few_tiles(const shape *s, const apa_recipe *resolved)
{
    const bool judged = resolved->force == APA_FORCE_NONE && resolved->eps >= 0.0 && resolved->eps < 1.0;
    const int64_t most = judged && at.hopper ? resolved->early_tiles : 0;
    bool all = true;
    for (int64_t i = 0; i < s->Sq; i++)
        all = all && tiles_seen(s, i) <= most;
    const apa_cuda_job *job = &at.early;
    assert_true(at.early_launches <= 1);
    for (int64_t i = 0; at.early_launches == 1 && i < apa_cuda_early_items(job); i++) {
        const apa_cuda_item item = apa_cuda_early_item(job, i);
        for (int64_t r = 0; item.number >= 0 && r < 128; r++) {
            const int64_t row = item.number * INT64_C(128) + r;
            assert_true(tiles_seen(s, job->packing_rows ? row / job->G : row % job->Sq16) <= most);
        }
    }
    if (at.early_launches == 1)
        assert_true(!all && at.early_at > 0 && job->splits == 1 && apa_cuda_early_items(job) > 0);
    if (!all && most > 0 && s->causal && s->left < 0) { /* whole units of such rows at the beginning of head 0? */
        const int64_t last = resolved->packing == APA_PACKING_ROWS ? 127 / (s->Hq / s->Hkv) : 127;
        assert_int_equal(at.early_launches, last < s->Sq && tiles_seen(s, last) <= most);
    }
    return all;
}

static bool hopper_takes(const char *knob)
{
    static const char *const taken[] = {"packing", "smooth_q", "eps", "eps_by"};
    bool found = knob == NULL;
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        found = found || strcmp(knob, taken[i]) == 0;
    return found;
}

/* Plans and launches; returns bytes of workspace, or -1 where the device does not take the call. */
static int64_t check_call(const apa_cuda_target *target, const shape *s, const char *method, const char *knob,
                          const char *value)
{
    apa_recipe recipe, resolved;
    apa_cuda_options options;
    memset(&at, 0, sizeof at);
    at.target = *target;
    assert_int_equal(apa_recipe_init(&recipe, method), APA_STATUS_OK);
    if (knob != NULL)
        assert_int_equal(apa_recipe_set(&recipe, knob, value, NULL, 0), APA_STATUS_OK);
    const apa_problem p = problem_of(s);
    apa_status status = apa_cuda_workspace_bytes(context, &p, &recipe, &at.bytes);
    if (status == APA_STATUS_UNSUPPORTED)
        return -1;
    assert_int_equal(status, APA_STATUS_OK);
    /* on compute capability 9.0 all but D = 256 with cold tiles, other cold formats, and empty axes */
    at.hopper = target->capability == 90 && s->Sq > 0 && s->Skv > 0 && hopper_takes(knob) &&
                (s->D <= 128 || strcmp(method, "exact") == 0);
    apa_cuda_options_init(&options);
    options.workspace = BASE;
    options.workspace_bytes = at.bytes;
    status = apa_cuda_attention(context, &p, &recipe, &options, &resolved);
    if (status != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
    const int64_t groups = (s->Sq + 15) / 16 * 16,
                  units = ((resolved.packing == APA_PACKING_ROWS ? s->Sq : groups) * (s->Hq / s->Hkv) + 127) / 128 *
                          s->B * s->Hkv;
    const bool few = check_few_tiles(s, &resolved), empty = s->Sq == 0 || s->Skv == 0;
    const int64_t cold = at.next_unit[COLD], both = at.next_unit[BOTH];
    /* a window's width may say less than its rows do */
    const bool exact = strcmp(method, "exact") == 0 || (few && !empty && (s->left < 0 || cold + both == 0));
    assert_true(at.next_unit[EXACT] == (exact ? units : 0) && cold + both == (exact ? 0 : units));
    assert_true(cold == 0 || both == 0);
    assert_true(at.next_unit[RECHECK] == (knob != NULL && strcmp(knob, "skip") == 0 ? units : 0));
    assert_true(at.next_unit[QUERIES] == cold + both);
    for (int step = JUDGE; step <= HOT; step++)
        if (step != FIX || at.hopper)
            assert_true(at.next_unit[step] == cold);
    assert_true(both == 0 || at.next_unit[FINISH] == 0);
    return (int64_t)at.bytes;
}

static const struct {
    const char *method, *knob, *value;
} methods[] = {
    {"exact", NULL, NULL},
    {"apa", NULL, NULL},
    {"cold", NULL, NULL},
    {"apa", "v_scale_granularity", "tile-channel"},
    {"apa", "cold_format", "nvfp4"},
    {"apa", "skip", "on"},
    {"exact", "exact_accum", "f16"},
};

static void check_shape(const shape *s)
{
    static const apa_cuda_target *const targets[] = {&h200, &a100, &rtx_4090, &rtx_5090};
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++)
        for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
            const int64_t bytes = check_call(targets[t], s, methods[i].method, methods[i].knob, methods[i].value);
            if (bytes < 0) /* too much shared memory, or NVFP4 below 9.0 */
                assert_true(targets[t] != &h200 &&
                            (s->D == 256 || (methods[i].value != NULL && strcmp(methods[i].value, "nvfp4") == 0)));
        }
}

static void test_shapes(void **state)
{
    (void)state;
    static const shape shapes[] = {
        {1, 24, 8, 2048, 122880, 128, 0, -1},   {1, 24, 8, 122880, 122880, 128, 1, -1},
        {1, 24, 8, 32768, 32768, 128, 1, -1},   {1, 32, 32, 16384, 16384, 64, 1, -1},
        {1, 16, 16, 16384, 16384, 256, 1, -1},  {1, 24, 8, 1, 122880, 128, 1, -1},
        {1, 2, 2, 70, 200, 256, 1, -1},         {1, 1, 1, 1, 1, 64, 0, -1},
        {50, 4, 4, 3, 70, 64, 1, -1},           {1, 7, 1, 640, 1000, 128, 1, -1},
        {2, 15, 3, 333, 4097, 64, 1, 700},      {1, 6, 2, 1024, 65, 128, 1, 64},
        {3, 8, 2, 0, 500, 128, 1, -1},          {3, 8, 2, 500, 0, 128, 1, -1},
        {1, 24, 8, 100000, 122880, 128, 1, -1}, {1, 40, 8, 4096, 1048576, 128, 1, -1},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_shape(&shapes[i]);
}

static void test_random_shapes(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed()};
    for (int i = 0; i < RANDOM_SHAPES; i++) {
        const int64_t Hkv = 1 + apa_test_below(&rng, 8), long_or_not = apa_test_below(&rng, 2) == 0 ? 300 : 40000;
        const shape s = {1 + apa_test_below(&rng, 4),
                         Hkv * (1 + apa_test_below(&rng, 9)),
                         Hkv,
                         1 + apa_test_below(&rng, apa_test_below(&rng, 2) == 0 ? 300 : 20000),
                         1 + apa_test_below(&rng, long_or_not),
                         INT64_C(64) << apa_test_below(&rng, 3),
                         (int)apa_test_below(&rng, 2),
                         apa_test_below(&rng, 3) == 0 ? apa_test_below(&rng, 2000) : -1};
        check_shape(&s);
    }
}

/* Tiles of the whole call up to which all its rows are left to the exact kernel. */
static int64_t longest_exact(int64_t D, const char *knob, const char *value)
{
    int64_t tiles = 0;
    bool exact = true;
    while (exact) {
        const shape s = {1, 24, 8, 2048, (tiles + 1) * 64, D, 0, -1};
        check_call(&h200, &s, "apa", knob, value);
        exact = plan_sequences(false) == 0 && at.next_unit[EXACT] > 0;
        tiles += exact;
    }
    return tiles;
}

/* A group that sees n of N tiles has ε·sqrt(N/n), if ε was left open at D 128, and else ε: rows of at most
 * (shares/ε)²/N or shares/ε tiles are left to the exact kernel. The first does not hang on N. */
static void test_rows_of_few_tiles(void **state)
{
    (void)state;
    const double root = SHARES / EPS_PER_ROOT_TILE, no_mean = root * 1.5;
    const int64_t by_row = (int64_t)(root * root) /* 46 */, by_row_no_mean = (int64_t)(no_mean * no_mean) /* 104 */,
                  of_64 = (int64_t)(SHARES_64 / EPS_64) /* 40 */;
    const struct {
        shape s;
        const char *knob, *value;
        int64_t tiles; /* of the rows that see few: 64 positions each, of which whole units count */
    } causal[] = {
        {{1, 24, 8, 32768, 32768, 128, 1, -1}, NULL, NULL, by_row},
        {{1, 24, 8, 16384, 16384, 128, 1, -1}, NULL, NULL, by_row},
        {{1, 24, 8, 122880, 122880, 128, 1, -1}, NULL, NULL, by_row},
        {{1, 24, 8, 32768, 32768, 128, 1, -1}, "smooth_q", "off", by_row_no_mean},
        {{1, 24, 8, 32768, 32768, 128, 1, -1}, "eps_by", "call", (int64_t)(root * sqrt(512))}, /* 154 */
        {{1, 24, 8, 32768, 32768, 128, 1, -1}, "eps", "0.02", (int64_t)(SHARES / 0.02)},       /* 75 */
        {{1, 24, 8, 32768, 32768, 64, 1, -1}, NULL, NULL, of_64},
        {{1, 24, 8, 122880, 122880, 64, 1, -1}, NULL, NULL, of_64},
        {{1, 24, 8, 32768, 32768, 64, 1, -1}, "eps", "0.03", (int64_t)(SHARES_64 / 0.03)}, /* 133 */
        {{1, 24, 8, 2048, 32768, 128, 1, -1}, NULL, NULL, 0},
        {{1, 24, 8, 2048, 32768, 64, 1, -1}, NULL, NULL, 0},
    };
    for (size_t i = 0; i < sizeof causal / sizeof *causal; i++) {
        const int64_t units = 24 * (causal[i].tiles * 64 / 128);
        check_call(&h200, &causal[i].s, "apa", causal[i].knob, causal[i].value);
        assert_int_equal(at.early_launches, units > 0);
        if (units > 0)
            assert_int_equal(apa_cuda_early_items(&at.early), units);
    }
    /* not causal: n is N, and both ways of counting ε meet */
    assert_int_equal(longest_exact(128, NULL, NULL), by_row);
    assert_int_equal(longest_exact(128, "eps_by", "call"), by_row);
    assert_int_equal(longest_exact(128, "smooth_q", "off"), by_row_no_mean);
    assert_int_equal(longest_exact(64, NULL, NULL), of_64);
}

/* ε of a job: by row where it was left open at D 128, the same for all rows elsewhere. */
static void test_eps(void **state)
{
    (void)state;
    static const struct {
        const apa_cuda_target *target;
        int64_t Skv, D;
        const char *knob, *value;
        double eps, root, most; /* root: 0 where it is that of the call */
    } calls[] = {
        {&h200, 32768, 128, NULL, NULL, EPS_PER_ROOT_TILE / 22.627417, EPS_PER_ROOT_TILE, 0.1},
        {&h200, 32768, 128, "smooth_q", "off", EPS_PER_ROOT_TILE / 33.941125, EPS_PER_ROOT_TILE / 1.5, 0.1},
        {&h200, 32768, 128, "packing", "rows", EPS_PER_ROOT_TILE / 33.941125, EPS_PER_ROOT_TILE / 1.5, 0.1},
        {&h200, 32768, 128, "eps_by", "call", EPS_PER_ROOT_TILE / 22.627417, 0, 0},
        {&h200, 32768, 128, "eps", "0.02", 0.02, 0, 0},
        {&h200, 32768, 64, NULL, NULL, EPS_64, 0, 0},
        {&h200, 32768, 64, "packing", "rows", EPS_64, 0, 0},
        {&h200, 32768, 64, "eps_by", "row", EPS_64, EPS_64 * 22.627417, 0.1},
        {&rtx_4090, 32768, 128, NULL, NULL, EPS_PER_ROOT_TILE / 22.627417, 0, 0},
        {&rtx_4090, 32768, 64, NULL, NULL, EPS_PER_ROOT_TILE / 22.627417, 0, 0},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        const shape s = {1, 24, 8, 32768, calls[i].Skv, calls[i].D, 1, -1};
        assert_true(check_call(calls[i].target, &s, "apa", calls[i].knob, calls[i].value) > 0);
        assert_int_equal(plan_sequences(false), 1);
        const apa_cuda_job *job = &at.job[0];
        assert_true(fabs(job->eps / calls[i].eps - 1.0) < 1e-6);
        assert_true(fabs(job->log2_eps - log2(calls[i].eps)) < 1e-5);
        assert_true(fabs(job->eps_root - calls[i].root) <= 1e-6 * calls[i].root);
        assert_true(calls[i].root == 0.0 || fabs(job->eps_most - calls[i].most) < 1e-6);
        assert_int_equal(job->smooth_q, at.hopper && calls[i].D == 128 &&
                                            (calls[i].knob == NULL || strncmp(calls[i].knob, "eps", 3) == 0));
    }
}

/* Which calls one kernel does both passes of, and in how many batches: those keep the prepared queries within 1 GiB. */
static void test_both_passes(void **state)
{
    (void)state;
    static const apa_cuda_target twice = {0, 90, 264, 232448, 233472}; /* as many multiprocessors */
    static const struct {
        const apa_cuda_target *target;
        shape s;
        const char *knob, *value;
        int batches; /* 0: the passes are kernels of their own */
    } calls[] = {
        {&h200, {1, 24, 8, 32768, 32768, 128, 1, -1}, NULL, NULL, 1},
        {&h200, {1, 24, 8, 32768, 32768, 128, 1, -1}, "packing", "rows", 1},
        {&h200, {1, 24, 8, 32768, 32768, 64, 1, -1}, NULL, NULL, 1},
        {&h200, {1, 24, 8, 32768, 32768, 128, 1, 20000}, NULL, NULL, 1},
        {&h200, {1, 24, 8, 2048, 122880, 128, 0, -1}, NULL, NULL, 1},   /* 384 units, in three nearly full waves */
        {&h200, {1, 24, 8, 1, 122880, 128, 0, -1}, NULL, NULL, 0},      /* split */
        {&h200, {1, 24, 8, 1024, 122880, 128, 1, -1}, NULL, NULL, 0},   /* 192 units: split */
        {&h200, {1, 24, 8, 32768, 524288, 128, 1, -1}, NULL, NULL, 1},  /* 8192 tiles */
        {&h200, {1, 24, 8, 32768, 524289, 128, 1, -1}, NULL, NULL, 0},  /* 8193 */
        {&h200, {1, 24, 8, 32768, 1048576, 128, 1, -1}, NULL, NULL, 0}, /* 16384 */
        {&h200, {1, 24, 8, 524288, 524288, 128, 1, -1}, NULL, NULL, 2}, /* four KV heads each */
        {&h200, {1, 8, 1, 1048576, 524288, 128, 0, -1}, NULL, NULL, 2}, /* half of the KV head each */
        {&twice, {1, 24, 8, 32768, 478464, 128, 1, -1}, NULL, NULL, 1}, /* 3738 pairs: 1 GiB but for 67 KiB */
        {&twice, {1, 24, 8, 32768, 478528, 128, 1, -1}, NULL, NULL, 0}, /* 3739 */
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        check_call(calls[i].target, &calls[i].s, "apa", calls[i].knob, calls[i].value);
        assert_int_equal(at.both_launches, calls[i].batches);
        assert_int_equal(at.sequences[COLD], calls[i].batches == 0);
    }
}

/* Wide blocks: exact at D 64, four a multiprocessor. Among these are the calls of verify.c that are to have them. */
static void test_wide_blocks(void **state)
{
    (void)state;
    static const struct {
        shape s;
        const char *knob, *value;
        int splits;
    } wide[] = {
        {{1, 32, 32, 16384, 16384, 64, 1, -1}, NULL, NULL, 1}, {{66, 8, 8, 20, 130, 64, 1, -1}, NULL, NULL, 1},
        {{8, 44, 22, 200, 700, 64, 1, -1}, NULL, NULL, 1},     {{8, 66, 22, 150, 300, 64, 1, -1}, "packing", "rows", 1},
        {{11, 24, 24, 256, 512, 64, 1, 100}, NULL, NULL, 1},   {{1, 134, 67, 70, 2000, 64, 1, -1}, NULL, NULL, 4},
        {{1, 360, 180, 200, 500, 64, 1, -1}, NULL, NULL, 1},
    };
    static const shape narrow[] = {{65, 8, 8, 20, 130, 64, 1, -1}, {1, 32, 32, 16384, 16384, 128, 1, -1}};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        check_call(&h200, &wide[i].s, "exact", wide[i].knob, wide[i].value);
        assert_true(at.job[0].wide && at.job[0].splits == wide[i].splits);
    }
    for (size_t i = 0; i < sizeof narrow / sizeof *narrow; i++) {
        check_call(&h200, &narrow[i], "exact", NULL, NULL);
        assert_false(at.job[0].wide);
    }
}

/* The figure of docs/cuda-wgmma.md, and its formula. */
static void test_documented_size(void **state)
{
    (void)state;
    const shape s = {1, 24, 8, 2048, 122880, 128, 0, -1};
    const double mib = (double)check_call(&h200, &s, "apa", NULL, NULL) / (1 << 20);
    print_message("workspace of 2048 x 122880, 24/8, D 128: %.1f MiB\n", mib);
    assert_true(mib > 411.0 && mib < 412.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_random_shapes),
        cmocka_unit_test(test_rows_of_few_tiles),
        cmocka_unit_test(test_eps),
        cmocka_unit_test(test_both_passes),
        cmocka_unit_test(test_wide_blocks),
        cmocka_unit_test(test_documented_size),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down) + apa_test_calls();
}
