/* Jensen's bound. See bound.h. */
#include "dist/bound.h"

#include "dist/codes.h"
#include "dist/hot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST_DIM 1024
#define LARGEST_GATHER ((int64_t)1 << 30) /* bytes of a rank; beyond it nothing is sure, and more is hot */

/* A full tile: where it begins in the sequence, and where its means lie among those that were gathered. */
typedef struct tile_place {
    int64_t first;
    const float *mean; /* [B·Hkv][D] */
} tile_place;

typedef struct bound {
    apa_dist_job *job;
    int64_t tiles;
    int64_t *first; /* [tiles], rising */
    float *mean;    /* [B·Hkv][tiles][D] in that order, rotated */
    apa_recipe exact;
} bound;

static int64_t shard_tiles(const apa_dist_shard *shard)
{
    int64_t tiles = 0;
    for (int32_t i = 0; i < shard->count; i++)
        tiles += shard->run[i].count / APA_DIST_TILE;
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
        for (int64_t tile = 0; tile < job->mine->k.run[i].count / APA_DIST_TILE; tile++)
            for (int64_t head = 0; head < heads; head++, to += job->mine->D)
                mean_of_tile(job, head, job->mine->k.run[i].at + tile * APA_DIST_TILE, to);
}

static int by_first(const void *a, const void *b)
{
    const tile_place *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

/* What was gathered, [rank][tile][head], in order of position, [head][tile]. */
static apa_status sort_means(bound *b, const float *all, int64_t slot)
{
    const apa_dist_job *job = b->job;
    const int64_t D = job->mine->D, heads = job->mine->B * job->mine->Hkv;
    tile_place *place = malloc((size_t)b->tiles * sizeof *place);
    int64_t n = 0;
    if (place == NULL)
        return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for means", (int)job->rank);
    for (int32_t r = 0; r < job->ranks; r++) {
        const float *mean = all + slot * r;
        for (int32_t i = 0; i < job->card[r].k.count; i++)
            for (int64_t tile = 0; tile < job->card[r].k.run[i].count / APA_DIST_TILE; tile++, mean += heads * D)
                place[n++] = (tile_place){job->card[r].k.run[i].first + tile * APA_DIST_TILE, mean};
    }
    qsort(place, (size_t)n, sizeof *place, by_first);
    for (int64_t tile = 0; tile < n; tile++) {
        b->first[tile] = place[tile].first;
        for (int64_t head = 0; head < heads; head++)
            memcpy(b->mean + (head * n + tile) * D, place[tile].mean + head * D, (size_t)D * sizeof *all);
    }
    free(place);
    return APA_STATUS_OK;
}

static apa_status gather_means(bound *b, int64_t most)
{
    apa_dist_job *job = b->job;
    const int64_t slot = most * job->mine->B * job->mine->Hkv * job->mine->D;
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
    apa_status status = sort_means(b, all, slot);
    free(all);
    return status;
}

/* ------------------------------------------------------------------------------- sums */

/* Tiles first … first+n-1 that every row of the block sees whole: what a query sees is one stretch of keys, so they are
 * neighbours in order of position. */
static void seen_tiles(const bound *b, const apa_dist_run *block, int64_t *first, int64_t *n)
{
    *first = *n = 0;
    for (int64_t tile = 0; tile < b->tiles; tile++) {
        const apa_dist_run keys = {b->first[tile], APA_DIST_TILE, 0};
        const bool seen = apa_dist_sees_all(b->job->mine, block, &keys);
        if (seen && *n == 0)
            *first = tile;
        else if (!seen && *n > 0)
            break;
        *n += seen;
    }
}

/* Rows at … at+rows-1 of this rank, positions from … of a run of queries: one engine call a KV head. */
static apa_status bound_block(const bound *b, const apa_dist_run *block, int64_t at, double *lse)
{
    apa_dist_job *job = b->job;
    const apa_dist_card *c = job->mine;
    const apa_tensor all = apa_tensor_hnd(job->rotated, APA_DTYPE_F32, c->B, c->Hq, job->rows, c->D);
    const float nothing = 0.0f;
    int64_t first, n;
    apa_status status = APA_STATUS_OK;
    seen_tiles(b, block, &first, &n);
    for (int64_t head = 0; head < c->B * c->Hkv && n > 0 && status == APA_STATUS_OK; head++) {
        const int64_t batch = head / c->Hkv, q_head = head % c->Hkv * job->G;
        apa_tensor q = apa_dist_view_heads(&all, batch, q_head, job->G);
        q = apa_dist_view(&q, at, block->count);
        const apa_tensor k = apa_tensor_hnd(b->mean + (head * b->tiles + first) * c->D, APA_DTYPE_F32, 1, 1, n, c->D);
        apa_tensor v = apa_tensor_hnd(&nothing, APA_DTYPE_F32, 1, 1, n, 1);
        v.stride[2] = 0;
        apa_statistics ignored;
        status = apa_dist_attend(job, &q, 0, &k, &v, 0, 0, &b->exact, NULL, &ignored);
        for (int64_t row = 0; row < job->G * block->count && status == APA_STATUS_OK; row++)
            lse[(batch * c->Hq + q_head + row / block->count) * job->rows + at + row % block->count] =
                (double)job->lse_part[row] + log((double)APA_DIST_TILE);
    }
    return status;
}

static apa_status bound_rows(const bound *b, double *lse)
{
    const apa_dist_card *c = b->job->mine;
    apa_status status = APA_STATUS_OK;
    int64_t at = 0;
    for (int32_t r = 0; r < c->q.count; at += c->q.run[r].count, r++)
        for (int64_t i = 0; i < c->q.run[r].count && status == APA_STATUS_OK; i += APA_DIST_BLOCK) {
            const int64_t rest = c->q.run[r].count - i;
            const apa_dist_run block = {c->q.run[r].first + i, rest < APA_DIST_BLOCK ? rest : APA_DIST_BLOCK, 0};
            status = bound_block(b, &block, at + i, lse);
        }
    return status;
}

apa_status apa_dist_bound_find(apa_dist_job *job, double *lse)
{
    const apa_dist_card *c = job->mine;
    const int64_t heads = c->B * c->Hkv;
    int64_t most = 0;
    bound b = {.job = job};
    apa_recipe_init(&b.exact, "exact");
    for (int64_t row = 0; row < c->B * c->Hq * job->rows; row++)
        lse[row] = -INFINITY;
    for (int32_t r = 0; r < job->ranks; r++) {
        const int64_t tiles = shard_tiles(&job->card[r].k);
        b.tiles += tiles;
        most = tiles > most ? tiles : most;
    }
    if (b.tiles == 0 || job->ranks == 1 || most * heads * c->D * (int64_t)sizeof(float) > LARGEST_GATHER)
        return APA_STATUS_OK;
    b.first = malloc((size_t)b.tiles * sizeof *b.first);
    b.mean = malloc((size_t)(heads * b.tiles * c->D) * sizeof *b.mean);
    apa_status status =
        b.first != NULL && b.mean != NULL
            ? gather_means(&b, most)
            : apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for means", (int)job->rank);
    if (status == APA_STATUS_OK)
        status = bound_rows(&b, lse);
    free(b.first);
    free(b.mean);
    return status;
}
