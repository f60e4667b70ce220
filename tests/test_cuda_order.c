/* The order in which the CUDA kernels take their work: blocks of a launch map one to one onto its pieces, whatever the
 * shape, the cut and the batch. No device needed. */
#include "cuda/order.h"

#include "support/fixture.h"
#include "support/problems.h"
#include "support/test.h"

#include <stdlib.h>

enum { SHAPES = 3000, MOST_PIECES = 60000 };

/* A job as the planners cut them: units of a KV head are its padded rows by 128. */
static apa_cuda_job job_of(int32_t B, int32_t Hkv, int32_t G, int32_t Sq, int packing_rows, int32_t splits)
{
    apa_cuda_job job = {.B = B, .Hkv = Hkv, .Hq = Hkv * G, .G = G, .Sq = Sq};
    job.packing_rows = packing_rows;
    job.splits = splits;
    job.Sq16 = (Sq + APA_CUDA_GROUP - 1) / APA_CUDA_GROUP * APA_CUDA_GROUP;
    job.rows = (packing_rows ? Sq : job.Sq16) * G;
    job.units = (job.rows + APA_CUDA_UNIT - 1) / APA_CUDA_UNIT;
    return job;
}

static apa_cuda_job random_job(apa_test_rng *rng)
{
    const int32_t B = (int32_t)(1 + apa_test_below(rng, 3)), Hkv = (int32_t)(1 + apa_test_below(rng, 5)),
                  G = (int32_t)(1 + apa_test_below(rng, 7)),
                  Sq = (int32_t)(1 + apa_test_below(rng, apa_test_below(rng, 4) == 0 ? 40 : 1100)),
                  splits = (int32_t)(1 + apa_test_below(rng, apa_test_below(rng, 2) == 0 ? 1 : 9));
    return job_of(B, Hkv, G, Sq, apa_test_below(rng, 3) == 0, splits);
}

static int64_t all_units(const apa_cuda_job *job)
{
    return (int64_t)job->B * job->Hkv * job->units;
}

/* Marks a piece of the batch; fails where it lies outside or was marked before. */
static void mark(uint8_t *seen, const apa_cuda_job *job, int64_t unit, int32_t split)
{
    assert_true(split >= 0 && split < job->splits);
    assert_true(unit >= job->unit_first && unit < job->unit_first + job->unit_count);
    uint8_t *at = &seen[(unit - job->unit_first) * job->splits + split];
    assert_int_equal(*at, 0);
    *at = 1;
}

/* Every item of the batch is a unit and split of it, each once; those of one KV head and split that follow each other
 * fall, so that rows that see more come first. */
static void check_items(const apa_cuda_job *job)
{
    apa_cuda_item before = {.head = -1};
    const int64_t n = job->unit_count * job->splits;
    uint8_t *seen = calloc((size_t)n + 1, 1);
    assert_non_null(seen);
    for (int64_t i = 0; i < n; i++) {
        const apa_cuda_item item = apa_cuda_item_of(job, i, job->splits);
        assert_true(item.number >= 0 && item.number < job->units);
        assert_true(item.index == (int64_t)item.head * job->units + item.number);
        mark(seen, job, item.index, item.split);
        if (!job->longest_first && item.head == before.head && item.split == before.split)
            assert_true(item.index < before.index);
        before = item;
    }
    free(seen);
}

/* Units in batches of any length, the last one shorter. */
static void test_items(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed()};
    for (int i = 0; i < SHAPES; i++) {
        apa_cuda_job job = random_job(&rng);
        const int64_t units = all_units(&job), batch = 1 + apa_test_below(&rng, units);
        if (units * job.splits > MOST_PIECES)
            continue;
        for (job.unit_first = 0; job.unit_first < units; job.unit_first += batch) {
            job.unit_count = units - job.unit_first < batch ? units - job.unit_first : batch;
            check_items(&job);
        }
    }
}

/* Longest first: each once, and positions never rise from one item to the next. */
static void test_items_longest_first(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 1};
    for (int i = 0; i < SHAPES / 10; i++) {
        const int32_t G = (int32_t)(1 + apa_test_below(&rng, 7)), blocks = (int32_t)(1 + apa_test_below(&rng, 9));
        apa_cuda_job job = job_of((int32_t)(1 + apa_test_below(&rng, 3)), (int32_t)(1 + apa_test_below(&rng, 5)), G,
                                  blocks * APA_CUDA_UNIT - (int32_t)apa_test_below(&rng, APA_CUDA_GROUP), 0,
                                  (int32_t)(1 + apa_test_below(&rng, 4)));
        assert_int_equal(job.units, G * blocks);
        job.longest_first = 1;
        job.unit_count = all_units(&job);
        check_items(&job);
        int32_t before = blocks;
        for (int64_t at = 0; at < job.unit_count * job.splits; at++) {
            const int32_t position = apa_cuda_item_of(&job, at, job.splits).number % blocks;
            assert_true(position <= before);
            before = position;
        }
    }
}

/* Every stretch of the batch's launch, with `rows` rows a block: all units of the batch, each once. Rows past the last
 * unit are there only where blocks are longer than units. */
static void check_stretches(const apa_cuda_job *job, int32_t rows)
{
    const int64_t in_head = job->unit_count < job->units ? job->unit_count : job->units;
    const int32_t all = (int32_t)(job->unit_count / in_head) * apa_cuda_stretches_of_head(job, rows) * job->splits;
    uint8_t *seen = calloc((size_t)(job->unit_count * job->splits) + 1, 1);
    assert_non_null(seen);
    for (int32_t i = 0; i < all; i++) {
        const apa_cuda_stretch stretch = apa_cuda_stretch_of(job, i, all, rows);
        assert_true(stretch.head >= 0 && stretch.head < job->B * job->Hkv);
        for (int32_t row = stretch.row; row < stretch.row + rows; row += APA_CUDA_UNIT) {
            const int64_t unit = (int64_t)stretch.head * job->units + row / APA_CUDA_UNIT;
            assert_int_equal(row % APA_CUDA_UNIT, 0);
            if (row / APA_CUDA_UNIT < job->units && unit < job->unit_first + job->unit_count)
                mark(seen, job, unit, stretch.split);
            else
                assert_true(row > stretch.row);
        }
    }
    for (int64_t i = 0; i < job->unit_count * job->splits; i++)
        assert_int_equal(seen[i], 1);
    free(seen);
}

/* The same counted from the end: rows that are not there come before the batch's first, in one block of a KV head. */
static void check_stretches_to_end(const apa_cuda_job *job, int32_t rows)
{
    const int32_t all = (int32_t)apa_cuda_stretches(job, rows) * job->splits, run = APA_CUDA_UNIT / 2;
    const int64_t first = job->unit_first * 2, count = job->unit_count * 2;
    uint8_t *seen = calloc((size_t)(count * job->splits) + 1, 1);
    assert_non_null(seen);
    for (int32_t i = 0; i < all; i++) {
        const apa_cuda_stretch stretch = apa_cuda_stretch_to_end(job, i, all, rows);
        assert_true(stretch.head >= 0 && stretch.head < job->B * job->Hkv);
        assert_true(stretch.split >= 0 && stretch.split < job->splits);
        assert_int_equal(stretch.row % run, 0);
        for (int32_t row = stretch.row; row < stretch.row + rows; row += run) {
            const int64_t at = (int64_t)stretch.head * job->units * 2 + row / run - first;
            if (row < 0 || at < 0) {
                assert_true(row < stretch.row + rows - run); /* no block is empty */
                continue;
            }
            assert_true(row < job->units * APA_CUDA_UNIT && at < count);
            assert_int_equal(seen[at * job->splits + stretch.split]++, 0);
        }
    }
    for (int64_t i = 0; i < count * job->splits; i++)
        assert_int_equal(seen[i], 1);
    free(seen);
}

/* Batches are whole KV heads or lie within one. */
static void test_stretches(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 2};
    for (int i = 0; i < SHAPES; i++) {
        apa_cuda_job job = random_job(&rng);
        const int64_t units = all_units(&job);
        if (units * job.splits > MOST_PIECES)
            continue;
        const int64_t heads = (int64_t)job.B * job.Hkv, within = 1 + apa_test_below(&rng, job.units),
                      batch = apa_test_below(&rng, 2) == 0 ? within : (1 + apa_test_below(&rng, heads)) * job.units;
        job.longest_first = (int32_t)apa_test_below(&rng, 2);
        for (job.unit_first = 0; job.unit_first < units; job.unit_first += job.unit_count) {
            const int64_t head_end = (job.unit_first / job.units + 1) * job.units,
                          end = batch < job.units ? head_end : units;
            job.unit_count = end - job.unit_first < batch ? end - job.unit_first : batch;
            check_stretches(&job, APA_CUDA_UNIT);
            check_stretches(&job, 2 * APA_CUDA_UNIT);
            check_stretches_to_end(&job, APA_CUDA_UNIT);
            check_stretches_to_end(&job, 3 * APA_CUDA_UNIT / 2);
        }
    }
}

/* Rows of a long causal KV head come in falling order, and every KV head's longest before any one's next. */
static void test_stretches_longest_first(void **state)
{
    (void)state;
    apa_cuda_job job = job_of(1, 8, 3, 32768, 0, 1);
    job.longest_first = 1;
    job.unit_count = 3 * job.units;
    const int32_t all = 3 * apa_cuda_stretches_of_head(&job, APA_CUDA_UNIT);
    int32_t before = INT32_MAX;
    for (int32_t i = 0; i < all; i++) {
        const apa_cuda_stretch stretch = apa_cuda_stretch_of(&job, i, all, APA_CUDA_UNIT);
        assert_int_equal(stretch.head, i % 3);
        assert_true(stretch.row <= before);
        before = stretch.row;
    }
    check_stretches(&job, APA_CUDA_UNIT);
}

/* Units of rows that see few tiles: those that lie in the beginning of a line, each once, long rows first. */
static void check_early(const apa_cuda_job *job)
{
    const int64_t n = apa_cuda_early_items(job);
    int64_t found = 0, expected = 0;
    int32_t before = INT32_MAX / 2;
    uint8_t *seen = calloc((size_t)all_units(job) + 1, 1);
    assert_non_null(seen);
    for (int64_t i = 0; i < n; i++) {
        const apa_cuda_item item = apa_cuda_early_item(job, i);
        if (item.number < 0)
            continue;
        assert_true(item.head >= 0 && item.head < job->B * job->Hkv && item.number < job->units && item.split == 0);
        assert_true(item.index == (int64_t)item.head * job->units + item.number);
        assert_int_equal(seen[item.index], 0);
        seen[item.index] = 1;
        found++;
        const int32_t in_line = item.number * APA_CUDA_UNIT % job->line;
        assert_true(in_line < before + APA_CUDA_UNIT); /* places of lines that begin inside a unit are shifted */
        before = in_line;
    }
    for (int64_t unit = 0; unit < all_units(job); unit++) {
        int early = 1;
        for (int32_t r = 0; r < APA_CUDA_UNIT; r++) { /* row by row, from what a row is (job.h) */
            const int32_t at = (int32_t)(unit % job->units) * APA_CUDA_UNIT + r;
            const int32_t place = job->packing_rows ? at : at % job->Sq16;
            early = early && at < job->rows && place < job->early_prefix;
        }
        assert_int_equal(seen[unit], early);
        expected += early;
    }
    assert_true(found == expected && expected <= n);
    free(seen);
}

/* Every row of the batch that there is has one kernel that writes it: the exact one, which takes whole units, or a
 * block of `rows` rows of the one that does both passes, 64 at a time, unless all of its units are the other's. */
static void check_writers(const apa_cuda_job *job, int32_t rows)
{
    enum { PART = 64 };
    const int64_t in_head = job->unit_count < job->units ? job->unit_count : job->units,
                  parts = job->unit_count * (APA_CUDA_UNIT / PART);
    const int32_t all = (int32_t)(job->unit_count / in_head) * apa_cuda_stretches_of_head(job, rows);
    uint8_t *writers = calloc((size_t)parts + 1, 1);
    assert_non_null(writers);
    for (int64_t part = 0; part < parts; part++) {
        const int64_t unit = job->unit_first + part / (APA_CUDA_UNIT / PART);
        writers[part] = (uint8_t)apa_cuda_is_early(job, (int32_t)(unit % job->units) * APA_CUDA_UNIT, APA_CUDA_UNIT);
    }
    for (int32_t i = 0; i < all; i++) {
        const apa_cuda_stretch block = apa_cuda_stretch_of(job, i, all, rows);
        for (int32_t row = block.row; row < block.row + rows; row += PART) {
            const int32_t number = row / APA_CUDA_UNIT;
            const int64_t local = (int64_t)block.head * job->units + number - job->unit_first;
            if (number < job->units && local < job->unit_count && !apa_cuda_in_early_units(job, block.row, rows) &&
                !apa_cuda_is_early(job, number * APA_CUDA_UNIT, APA_CUDA_UNIT))
                writers[local * (APA_CUDA_UNIT / PART) + row % APA_CUDA_UNIT / PART]++;
        }
    }
    for (int64_t part = 0; part < parts; part++)
        assert_int_equal(writers[part], 1);
    free(writers);
}

static void test_writers(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 4};
    int64_t with_some = 0;
    for (int i = 0; i < SHAPES; i++) {
        apa_cuda_job job = random_job(&rng);
        job.splits = 1;
        job.line = job.packing_rows ? job.rows : job.Sq16;
        job.early_prefix = (int32_t)apa_test_below(&rng, job.Sq) * (job.packing_rows ? job.G : 1);
        const int64_t units = all_units(&job), heads = units / job.units;
        if (units > MOST_PIECES)
            continue;
        with_some += apa_cuda_early_items(&job) > 0;
        /* all at once, head by head, and a head in parts */
        const int64_t batch[3] = {units, heads > 1 ? job.units : units, 1 + apa_test_below(&rng, job.units)};
        for (int b = 0; b < 3; b++)
            for (job.unit_first = 0; job.unit_first < units; job.unit_first += job.unit_count) {
                const int64_t left =
                    batch[b] < job.units ? job.units - job.unit_first % job.units : units - job.unit_first;
                job.unit_count = left < batch[b] ? left : batch[b];
                check_writers(&job, APA_CUDA_UNIT);
                check_writers(&job, 192);
            }
    }
    assert_true(with_some > SHAPES / 10);
}

static void test_early(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed() + 3};
    int64_t with_some = 0;
    for (int i = 0; i < SHAPES; i++) {
        apa_cuda_job job = random_job(&rng);
        job.line = job.packing_rows ? job.rows : job.Sq16;
        const int32_t positions = (int32_t)apa_test_below(&rng, job.Sq); /* not all of them: those calls are exact */
        job.early_prefix = positions * (job.packing_rows ? job.G : 1);
        if (all_units(&job) > MOST_PIECES)
            continue;
        check_early(&job);
        with_some += apa_cuda_early_items(&job) > 0;
    }
    assert_true(with_some > SHAPES / 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_items),     cmocka_unit_test(test_items_longest_first),
        cmocka_unit_test(test_stretches), cmocka_unit_test(test_stretches_longest_first),
        cmocka_unit_test(test_early),     cmocka_unit_test(test_writers),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
