/* Which piece of the work a thread block takes: arithmetic alone, readable from C and CUDA C++, so that it is tested
 * without a device. Each function maps the blocks of a launch one to one onto its pieces. */
#ifndef APA_CUDA_ORDER_H
#define APA_CUDA_ORDER_H

#include "cuda/job.h"

#ifdef __CUDACC__
#define APA_CUDA_BOTH __host__ __device__ __forceinline__
#else
#define APA_CUDA_BOTH inline
#endif

/* A unit and a split of its keys. */
typedef struct apa_cuda_item {
    int64_t index; /* of all units */
    int64_t local; /* in the batch */
    int32_t head, number, split;
} apa_cuda_item;

/* Item `item` of the batch's unit_count·splits. Whole inputs: the units of a KV head run side by side, so that they
 * find its tiles in the cache. Causal ones (longest_first, and then all units are one batch): the longest rows first,
 * so that the short ones fill the gaps at the end. */
static APA_CUDA_BOTH apa_cuda_item apa_cuda_item_of(const apa_cuda_job *job, int64_t item, int32_t splits)
{
    apa_cuda_item to;
    const int32_t blocks = job->Sq16 / APA_CUDA_UNIT; /* longest_first only where this is exact */
    if (job->longest_first) {
        const int64_t heads = (int64_t)job->B * job->Hkv;
        to.split = (int32_t)(item % splits);
        const int64_t rest = item / splits;
        to.head = (int32_t)(rest % heads);
        const int32_t v = (int32_t)(rest / heads);
        to.number = v % job->G * blocks + (blocks - 1 - v / job->G);
        to.index = (int64_t)to.head * job->units + to.number;
        to.local = to.index - job->unit_first;
        return to;
    }
    /* [head][split][unit of the head]; the batch may begin and end inside a head. */
    const int64_t begin = job->unit_first, end = begin + job->unit_count, whole = (int64_t)job->units * splits;
    int64_t at = begin, left = item;
    const int64_t first_end = (begin / job->units + 1) * job->units,
                  in_first = (first_end < end ? first_end : end) - begin;
    if (left >= in_first * splits) {
        left -= in_first * splits;
        at = first_end + left / whole * job->units;
        left %= whole;
    }
    const int64_t head_end = (at / job->units + 1) * job->units, n = (head_end < end ? head_end : end) - at;
    to.split = (int32_t)(left / n);
    to.index = at + (n - 1 - left % n); /* long rows first where rows grow */
    to.head = (int32_t)(to.index / job->units);
    to.number = (int32_t)(to.index % job->units);
    to.local = to.index - job->unit_first;
    return to;
}

/* Rows of a KV head from `row` on, as numbered in its line, and a split of their keys. */
typedef struct apa_cuda_stretch {
    int32_t head, row, split;
} apa_cuda_stretch;

/* Blocks of `rows` rows that a split of a KV head's part of the batch takes. The batch is whole KV heads, or lies
 * within one. */
static APA_CUDA_BOTH int32_t apa_cuda_stretches_of_head(const apa_cuda_job *job, int32_t rows)
{
    const int32_t units = (int32_t)(job->unit_count < job->units ? job->unit_count : job->units);
    return (units * APA_CUDA_UNIT + rows - 1) / rows;
}

/* Stretch `at` of a launch of `all`. Long rows first where rows grow. */
static APA_CUDA_BOTH apa_cuda_stretch apa_cuda_stretch_of(const apa_cuda_job *job, int32_t at, int32_t all,
                                                          int32_t rows)
{
    const int32_t blocks = apa_cuda_stretches_of_head(job, rows), heads = all / (blocks * job->splits);
    const int32_t first_head = (int32_t)(job->unit_first / job->units),
                  first_row = (int32_t)(job->unit_first % job->units) * APA_CUDA_UNIT;
    apa_cuda_stretch to;
    if (job->longest_first) {
        to.head = first_head + at % heads;
        at /= heads;
        to.split = at % job->splits;
        to.row = first_row + (blocks - 1 - at / job->splits) * rows;
    } else { /* blocks of a head and split side by side: they find its tiles in the cache */
        to.row = first_row + (blocks - 1 - at % blocks) * rows;
        at /= blocks;
        to.split = at % job->splits;
        to.head = first_head + at / job->splits;
    }
    return to;
}

/* The same with the blocks counted from the end of the head's part of the batch: where `rows` does not divide it, the
 * block with rows that are not there is its first, which sees least where rows grow. Those rows have smaller numbers
 * than the part's first, below 0 at the head's beginning. */
static APA_CUDA_BOTH apa_cuda_stretch apa_cuda_stretch_to_end(const apa_cuda_job *job, int32_t at, int32_t all,
                                                              int32_t rows)
{
    const int32_t units = (int32_t)(job->unit_count < job->units ? job->unit_count : job->units);
    apa_cuda_stretch to = apa_cuda_stretch_of(job, at, all, rows);
    to.row -= apa_cuda_stretches_of_head(job, rows) * rows - units * APA_CUDA_UNIT;
    return to;
}

/* Blocks of a launch for one split. */
static APA_CUDA_BOTH int64_t apa_cuda_stretches(const apa_cuda_job *job, int32_t rows)
{
    const int64_t in_head = job->unit_count < job->units ? job->unit_count : job->units;
    return job->unit_count / in_head * apa_cuda_stretches_of_head(job, rows);
}

/* ---- rows that see few tiles ----
 *
 * Rows of a KV head lie in lines: a query head's positions, or, with packing `rows`, all of them in one. A line begins
 * with those that see few keys. Units that hold such rows alone go to the exact kernel and to no other. */

/* Are all of the `rows` rows from `row` of a KV head on among them? */
static APA_CUDA_BOTH int apa_cuda_is_early(const apa_cuda_job *job, int32_t row, int32_t rows)
{
    return job->early_prefix > 0 && row % job->line + rows <= job->early_prefix;
}

/* Do these rows lie in such units alone? A block that takes them has nothing to do then; where rows are no multiple of
 * a unit's, it may hold a part of one that is none. */
static APA_CUDA_BOTH int apa_cuda_in_early_units(const apa_cuda_job *job, int32_t row, int32_t rows)
{
    int32_t unit = row / APA_CUDA_UNIT;
    int all = 1;
    if (rows == APA_CUDA_UNIT && row % APA_CUDA_UNIT == 0) /* one unit: kernels that have no others need no loop */
        return apa_cuda_is_early(job, row, rows);
    for (; all != 0 && unit * APA_CUDA_UNIT < row + rows; unit++)
        all = apa_cuda_is_early(job, unit * APA_CUDA_UNIT, APA_CUDA_UNIT);
    return all;
}

/* Blocks of the launch for those units. */
static APA_CUDA_BOTH int64_t apa_cuda_early_items(const apa_cuda_job *job)
{
    return job->early_prefix == 0
               ? 0
               : (int64_t)job->B * job->Hkv * (job->rows / job->line) * (job->early_prefix / APA_CUDA_UNIT);
}

/* Block `item` of them: long rows first, heads side by side. A line may begin inside a unit and hold one unit less than
 * others: number -1. */
static APA_CUDA_BOTH apa_cuda_item apa_cuda_early_item(const apa_cuda_job *job, int64_t item)
{
    const int32_t lines = job->rows / job->line, most = job->early_prefix / APA_CUDA_UNIT;
    const int64_t across = (int64_t)job->B * job->Hkv * lines;
    const int32_t place = most - 1 - (int32_t)(item / across), in_head = (int32_t)(item % lines);
    apa_cuda_item to;
    to.head = (int32_t)(item % across / lines);
    to.number = (in_head * job->line + APA_CUDA_UNIT - 1) / APA_CUDA_UNIT + place;
    to.index = (int64_t)to.head * job->units + to.number;
    to.local = to.index - job->unit_first;
    to.split = 0;
    if (!apa_cuda_is_early(job, to.number * APA_CUDA_UNIT, APA_CUDA_UNIT))
        to.number = -1;
    return to;
}

#endif
