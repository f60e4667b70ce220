/* Jensen's bound over what is still to come. See ahead.h. */
#include "dist/ahead.h"

#include "dist/codes.h"
#include "dist/hot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST_DIM 1024
#define LARGEST_GATHER ((int64_t)1 << 30) /* bytes of a rank; beyond it nothing counts as ahead, and more is hot */

static int64_t full_tiles(const apa_dist_run *run)
{
    return run->count / APA_DIST_TILE;
}

static int64_t shard_tiles(const apa_dist_shard *shard)
{
    int64_t tiles = 0;
    for (int32_t i = 0; i < shard->count; i++)
        tiles += full_tiles(&shard->run[i]);
    return tiles;
}

/* ------------------------------------------------------------------------------- means */

static void mean_of_tile(const apa_dist_job *job, int64_t head, int64_t row, float *to)
{
    const int64_t D = job->mine->D, b = head / job->mine->Hkv, h = head % job->mine->Hkv;
    double sum[LARGEST_DIM] = {0.0}, keys = 0.0;
    float key[LARGEST_DIM];
    for (int64_t i = 0; i < APA_DIST_TILE; i++) {
        const char *at = (const char *)job->k.data +
                         (b * job->k.stride[0] + h * job->k.stride[1] + (row + i) * job->k.stride[2]) * job->element;
        if (!apa_dist_widen(job->k.dtype, at, D, key))
            continue;
        keys += 1.0;
        for (int64_t d = 0; d < D; d++)
            sum[d] += (double)key[d];
    }
    for (int64_t d = 0; d < D; d++)
        to[d] = keys > 0.0 ? (float)(sum[d] / keys) : 0.0f;
    apa_dist_rotate(job, to);
}

/* [tiles of the shard][B·Hkv][D] */
static void own_means(const apa_dist_job *job, float *to)
{
    const int64_t heads = job->mine->B * job->mine->Hkv;
    for (int32_t i = 0; i < job->mine->k.count; i++)
        for (int64_t tile = 0; tile < full_tiles(&job->mine->k.run[i]); tile++)
            for (int64_t head = 0; head < heads; head++, to += job->mine->D)
                mean_of_tile(job, head, job->mine->k.run[i].at + tile * APA_DIST_TILE, to);
}

/* Gathers, and turns [rank][tile][head] into [head][tile]. */
static apa_status gather_means(apa_dist_ahead *ahead, int64_t most)
{
    apa_dist_job *job = ahead->job;
    const int64_t D = job->mine->D, heads = job->mine->B * job->mine->Hkv, slot = most * heads * D;
    float *all = malloc((size_t)(slot * job->ranks) * sizeof *all);
    if (all == NULL)
        return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for means", (int)job->rank);
    memset(all + slot * job->rank, 0, (size_t)slot * sizeof *all);
    own_means(job, all + slot * job->rank);
    apa_dist_op gather = {.kind = APA_DIST_OP_GATHER, .data = all, .bytes = slot * (int64_t)sizeof *all};
    if (apa_dist_wire_do(job->wire, &gather, "the means of the other ranks' tiles", &job->statistics->wait_ms) !=
        APA_STATUS_OK)
        return apa_dist_lost(job->dist);
    job->statistics->sent_lists += (job->ranks - 1) * gather.bytes;
    job->statistics->sent += (job->ranks - 1) * gather.bytes;
    job->statistics->received += (job->ranks - 1) * gather.bytes;
    int64_t to = 0;
    for (int32_t r = 0; r < job->ranks; r++)
        for (int64_t tile = 0; tile < shard_tiles(&job->card[r].k); tile++, to++)
            for (int64_t head = 0; head < heads; head++)
                memcpy(ahead->mean + (head * ahead->tiles + to) * D, all + slot * r + (tile * heads + head) * D,
                       (size_t)D * sizeof *all);
    free(all);
    return APA_STATUS_OK;
}

/* ------------------------------------------------------------------------------- sums */

/* Tiles first … first+n-1 of the run that every row of the block sees whole. */
static void seen_tiles(const apa_dist_card *card, const apa_dist_run *block, const apa_dist_run *run, int64_t *first,
                       int64_t *n)
{
    *first = *n = 0;
    for (int64_t tile = 0; tile < full_tiles(run); tile++) {
        const apa_dist_run keys = {run->first + tile * APA_DIST_TILE, APA_DIST_TILE, 0};
        const bool seen = apa_dist_sees_all(card, block, &keys);
        if (seen && *n == 0)
            *first = tile;
        else if (!seen && *n > 0)
            break;
        *n += seen;
    }
}

/* sign · the bound over one run, for rows i … i+rows-1 of a run of queries, all query heads of a KV head. */
static apa_status add_block(apa_dist_ahead *ahead, int32_t owner, int32_t run, int64_t head, int32_t q_run, int64_t from,
                            int64_t at, int64_t rows, double sign)
{
    apa_dist_job *job = ahead->job;
    const apa_dist_card *c = job->mine;
    const apa_dist_run block = {c->q.run[q_run].first + from, rows, 0};
    int64_t first, n;
    seen_tiles(c, &block, &job->card[owner].k.run[run], &first, &n);
    if (n == 0)
        return APA_STATUS_OK;
    const int64_t b = head / c->Hkv, h = head % c->Hkv;
    const float nothing = 0.0f;
    const apa_tensor all = apa_tensor_hnd(job->rotated, APA_DTYPE_F32, c->B, c->Hq, job->rows, c->D);
    apa_tensor q = apa_dist_view_heads(&all, b, h * job->G, job->G);
    q = apa_dist_view(&q, at, rows);
    const apa_tensor k = apa_tensor_hnd(
        ahead->mean + (head * ahead->tiles + ahead->first[owner * APA_DIST_RUNS + run] + first) * c->D, APA_DTYPE_F32, 1,
        1, n, c->D);
    apa_tensor v = apa_tensor_hnd(&nothing, APA_DTYPE_F32, 1, 1, n, 1);
    v.stride[2] = 0;
    apa_statistics ignored;
    apa_status status = apa_dist_attend(job, &q, 0, &k, &v, 0, 0, &ahead->exact, NULL, &ignored);
    for (int64_t row = 0; row < job->G * rows && status == APA_STATUS_OK; row++) {
        double *sum = ahead->sum + 2 * ((b * c->Hq + h * job->G + row / rows) * job->rows + at + row % rows);
        apa_dist_row_add(sum, 2, (double)job->lse_part[row] + log((double)APA_DIST_TILE), &nothing, sign);
    }
    return status;
}

apa_status apa_dist_ahead_meet(apa_dist_ahead *ahead, int32_t owner, int32_t run, int64_t head, int32_t q_run,
                               int64_t from, int64_t at, int64_t n)
{
    apa_status status = APA_STATUS_OK;
    for (int64_t i = 0; i < n && status == APA_STATUS_OK && ahead->mean != NULL; i += APA_DIST_BLOCK)
        status = add_block(ahead, owner, run, head, q_run, from + i, at + i,
                           n - i < APA_DIST_BLOCK ? n - i : APA_DIST_BLOCK, -1.0);
    return status;
}

double apa_dist_ahead_lse(const apa_dist_ahead *ahead, int64_t row)
{
    const double *sum = ahead->sum + 2 * row;
    return sum[1] > 0.0 ? apa_dist_row_lse(sum) : -INFINITY; /* what subtraction leaves may be a little under 0 */
}

/* All runs of other ranks, block by block. */
static apa_status add_all(apa_dist_ahead *ahead)
{
    const apa_dist_job *job = ahead->job;
    const apa_dist_card *c = job->mine;
    apa_status status = APA_STATUS_OK;
    int64_t at = 0;
    for (int32_t r = 0; r < c->q.count; at += c->q.run[r].count, r++)
        for (int64_t i = 0; i < c->q.run[r].count; i += APA_DIST_BLOCK) {
            const int64_t rest = c->q.run[r].count - i, rows = rest < APA_DIST_BLOCK ? rest : APA_DIST_BLOCK;
            for (int32_t owner = 0; owner < job->ranks; owner++)
                for (int32_t run = 0; run < job->card[owner].k.count && owner != job->rank; run++)
                    for (int64_t head = 0; head < c->B * c->Hkv && status == APA_STATUS_OK; head++)
                        status = add_block(ahead, owner, run, head, r, i, at + i, rows, 1.0);
        }
    return status;
}

apa_status apa_dist_ahead_make(apa_dist_job *job, apa_dist_ahead *ahead)
{
    const apa_dist_card *c = job->mine;
    const int64_t heads = c->B * c->Hkv, rows = c->B * c->Hq * job->rows;
    int64_t most = 0;
    memset(ahead, 0, sizeof *ahead);
    ahead->job = job;
    apa_recipe_init(&ahead->exact, "exact");
    ahead->first = calloc((size_t)job->ranks * APA_DIST_RUNS, sizeof *ahead->first);
    ahead->sum = malloc((size_t)(2 * rows) * sizeof *ahead->sum + 1);
    for (int32_t r = 0; r < job->ranks && ahead->first != NULL; r++) {
        for (int32_t i = 0; i < job->card[r].k.count; i++) {
            ahead->first[r * APA_DIST_RUNS + i] = ahead->tiles;
            ahead->tiles += full_tiles(&job->card[r].k.run[i]);
        }
        most = shard_tiles(&job->card[r].k) > most ? shard_tiles(&job->card[r].k) : most;
    }
    for (int64_t row = 0; row < rows && ahead->sum != NULL; row++)
        apa_dist_row_clear(ahead->sum + 2 * row, 2);
    const bool any = most > 0 && most * heads * c->D * (int64_t)sizeof(float) <= LARGEST_GATHER && job->ranks > 1;
    if (any)
        ahead->mean = malloc((size_t)(heads * ahead->tiles * c->D) * sizeof *ahead->mean);
    if (ahead->first == NULL || ahead->sum == NULL || (any && ahead->mean == NULL)) {
        apa_dist_ahead_free(ahead);
        return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for means", (int)job->rank);
    }
    apa_status status = any ? gather_means(ahead, most) : APA_STATUS_OK;
    if (status == APA_STATUS_OK && any)
        status = add_all(ahead);
    return status;
}

void apa_dist_ahead_free(apa_dist_ahead *ahead)
{
    free(ahead->mean);
    free(ahead->first);
    free(ahead->sum);
}
