/* The exchange of codes: every key comes as INT8 first, and in exact form where it matters.
 *
 *   own runs → codes;  reaches of all ranks (can INT8 judge these scores at all?);  means of all tiles (bound.c)
 *   shift 1 begins; own keys, which are exact, by the recipe
 *   for every unit u (a run of another rank):
 *       attention to its codes, tiles judged (walk.c)       codes of the next shift and tiles of u-1 are under way
 *       list of hot tiles goes out; tiles that others want of u-1 go out; exact tiles of u-2 are taken
 *
 * A rank knows the sums of a row over all keys that it has met so far, its own first, and a lower bound over those to
 * come, and judges against both. That is at most the sum over all keys, so what is hot against all keys is hot here,
 * and some more. */
#include "dist/walk.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Beyond this a cold estimate that is taken out again could leave more behind than FP32 sums have anyway: 2^8 of a
 * tile's mass at 2^-24 is still under 2^-15. The bound is met by hardly any score: the error is some tenth of it. */
#define LARGEST_SCORE_ERROR 8.0
#define UNITS_UNDER_WAY 3
#define LARGEST_DIM 1024

/* ------------------------------------------------------------------------------- before any key moves */

/* Queries in FP32, rotated; what they are made of goes into the reach. */
static void rotate_queries(apa_dist_job *job, apa_dist_reach *reach)
{
    const apa_dist_card *c = job->mine;
    float *to = job->rotated;
    for (int64_t head = 0; head < c->B * c->Hq; head++)
        for (int32_t r = 0; r < c->q.count; r++)
            for (int64_t i = 0; i < c->q.run[r].count; i++, to += c->D) {
                const char *row =
                    (const char *)job->q.data + (head / c->Hq * job->q.stride[0] + head % c->Hq * job->q.stride[1] +
                                                 (c->q.run[r].at + i) * job->q.stride[2]) *
                                                    job->element;
                float sum = 0.0f, top = 0.0f;
                if (!apa_dist_widen(job->q.dtype, row, c->D, to))
                    reach->unbounded = 1;
                apa_dist_rotate(job, to);
                for (int64_t d = 0; d < c->D; d++) {
                    sum += fabsf(to[d]);
                    top = fabsf(to[d]) > top ? fabsf(to[d]) : top;
                }
                reach->q_sum = sum > reach->q_sum ? sum : reach->q_sum;
                reach->q_top = top > reach->q_top ? top : reach->q_top;
            }
}

/* Every rank learns the reaches of all; *judges: INT8 will do. */
static apa_status agree_on_reach(apa_dist_job *job, const apa_dist_reach *mine, bool *judges)
{
    apa_dist_reach *all = calloc((size_t)job->ranks, sizeof *all);
    if (all == NULL)
        return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "no memory for %d ranks", (int)job->ranks);
    all[job->rank] = *mine;
    apa_dist_op gather = {.kind = APA_DIST_OP_GATHER, .data = all, .bytes = (int64_t)sizeof *all};
    if (apa_dist_wire_do(job->wire, &gather, "the size of the other ranks' scores", &job->statistics->wait_ms) !=
        APA_STATUS_OK)
        return apa_dist_lost(job->dist);
    const double error = apa_dist_score_error(job, all, job->ranks);
    *judges = error <= LARGEST_SCORE_ERROR;
    if (!*judges && isinf(error))
        snprintf(job->statistics->reason, sizeof job->statistics->reason, "a query is not finite");
    else if (!*judges)
        snprintf(job->statistics->reason, sizeof job->statistics->reason,
                 "INT8 scores could be off by %.3g log2 units, at most %g", error, LARGEST_SCORE_ERROR);
    free(all);
    return APA_STATUS_OK;
}

/* ------------------------------------------------------------------------------- units */

static int32_t most_runs(const apa_dist_job *job)
{
    int32_t most = 0;
    for (int32_t r = 0; r < job->ranks; r++)
        most = job->card[r].k.count > most ? job->card[r].k.count : most;
    return most;
}

static void meet_own(apa_dist_job *job)
{
    for (int64_t row = 0; row < job->mine->B * job->mine->Hq * job->rows; row++) {
        job->known[2 * row] = job->state[row * job->width];
        job->known[2 * row + 1] = job->state[row * job->width + 1];
    }
}

/* What a shift needs before its first unit: its keys, and the next shift on its way. */
static apa_status turn(apa_dist_traffic *traffic, int32_t shift, const char *run[APA_DIST_RUNS])
{
    apa_status status = apa_dist_traffic_arrive(traffic, shift, run);
    if (status == APA_STATUS_OK)
        status = apa_dist_traffic_gone(traffic, shift - 1);
    return status == APA_STATUS_OK ? apa_dist_traffic_begin(traffic, shift + 1) : status;
}

static apa_status run_units(apa_dist_walk *walk, apa_dist_traffic *traffic)
{
    apa_dist_job *job = walk->job;
    apa_dist_unit unit[UNITS_UNDER_WAY];
    const char *run[APA_DIST_RUNS] = {NULL};
    const int32_t runs = most_runs(job), units = (job->ranks - 1) * runs;
    apa_status status = APA_STATUS_OK;
    memset(unit, 0, sizeof unit);
    for (int32_t u = 0; u < units + 2 && status == APA_STATUS_OK; u++) {
        apa_dist_unit *now = &unit[u % UNITS_UNDER_WAY], *before = &unit[(u + 2) % UNITS_UNDER_WAY],
                      *last = &unit[(u + 1) % UNITS_UNDER_WAY];
        if (u < units) {
            if (u % runs == 0)
                status = turn(traffic, 1 + u / runs, run);
            if (status == APA_STATUS_OK)
                status = apa_dist_unit_make(job, 1 + u / runs, u % runs, now);
            if (status == APA_STATUS_OK && now->reads)
                status = apa_dist_walk_run(walk, now, run[u % runs]);
            if (status == APA_STATUS_OK)
                status = apa_dist_unit_ask(job, now);
        }
        if (status == APA_STATUS_OK && u >= 1 && u - 1 < units)
            status = apa_dist_unit_answer(job, before);
        if (status == APA_STATUS_OK && u >= 2) {
            status = apa_dist_unit_take(job, last, &walk->exact);
            apa_dist_unit_free(job, last);
        }
    }
    for (int i = 0; i < UNITS_UNDER_WAY; i++)
        apa_dist_unit_free(job, &unit[i]);
    return status == APA_STATUS_OK ? apa_dist_traffic_gone(traffic, job->ranks - 1) : status;
}

static apa_status exchange(apa_dist_job *job, apa_dist_traffic *traffic)
{
    apa_dist_walk walk;
    apa_status status = apa_dist_walk_make(job, &walk); /* gathers, so before anything long is on its way */
    if (status != APA_STATUS_OK)
        return status;
    status = apa_dist_traffic_begin(traffic, 1);
    if (status == APA_STATUS_OK)
        status = apa_dist_attend_own(job);
    if (status == APA_STATUS_OK) {
        meet_own(job);
        status = run_units(&walk, traffic);
    }
    apa_dist_walk_free(&walk);
    return status;
}

apa_status apa_dist_run_codes(apa_dist_job *job)
{
    apa_dist_statistics *s = job->statistics;
    apa_dist_traffic traffic;
    apa_dist_reach reach;
    bool judges = false;
    memset(&reach, 0, sizeof reach);
    apa_status status = apa_dist_traffic_make(job, apa_dist_codes_bytes, &traffic);
    if (status != APA_STATUS_OK)
        return status;
    const double start = apa_dist_now_ms();
    rotate_queries(job, &reach);
    for (int32_t i = 0; i < job->mine->k.count; i++)
        apa_dist_codes_pack(job, &job->mine->k.run[i], apa_dist_traffic_own(&traffic, i), &reach);
    s->pack_ms += apa_dist_now_ms() - start;
    status = agree_on_reach(job, &reach, &judges);
    if (status == APA_STATUS_OK && judges)
        status = exchange(job, &traffic);
    s->sent_codes = s->sent - s->sent_tiles - s->sent_lists;
    apa_dist_traffic_free(&traffic);
    if (status != APA_STATUS_OK || judges)
        return status;
    s->exchange = APA_DIST_EXCHANGE_EXACT;
    return apa_dist_run_exact(job);
}
