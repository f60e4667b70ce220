/* The walk over codes. See walk.h. */
#include "dist/walk.h"

#include "dist/bound.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define VERDICT_BYTES ((int64_t)128 << 20) /* of one engine call */
#define TILES_AT_ONCE 16
#define GUESS_MARGIN 1.25
#define JUDGED_ROWS                                                                                                    \
    3072 /* query heads × positions of an engine call: enough that its prep of the run is a few percent */

/* One engine call: rows from … from+n-1 of a run of queries, all query heads of a KV head, against a run of codes. */
typedef struct part {
    apa_dist_unit *unit;
    const apa_dist_run *run, *q_run; /* keys; queries */
    int32_t q_index;
    int64_t head, batch, kv_head;
    int64_t at, from, n; /* among the rank's rows; in the run of queries */
    int64_t tiles;
    apa_tensor q; /* rotated, [1, G, n, D] */
    const apa_dist_codes *codes;
    bool any_poison; /* some tile of the head */
    double guess;    /* of the largest share of the run in a row */
} part;

apa_status apa_dist_walk_make(apa_dist_job *job, apa_dist_walk *walk)
{
    const apa_dist_card *c = job->mine;
    int64_t keys = 0;
    memset(walk, 0, sizeof *walk);
    walk->job = job;
    walk->on_codes = job->recipe;
    walk->on_codes.smooth_k = APA_TOGGLE_OFF;
    walk->on_codes.hadamard = APA_TOGGLE_OFF;
    apa_recipe_init(&walk->exact, "exact");
    walk->threshold = job->recipe.force == APA_FORCE_LOW || job->recipe.eps >= 1.0 ? INFINITY
                      : job->recipe.eps > 0.0                                      ? log(job->recipe.eps)
                                                                                   : -INFINITY;
    for (int32_t r = 0; r < job->ranks; r++)
        for (int32_t i = 0; i < job->card[r].k.count; i++)
            keys = job->card[r].k.run[i].count > keys ? job->card[r].k.run[i].count : keys;
    const int64_t tiles = apa_dist_tiles(keys) + 1;
    walk->part_room = VERDICT_BYTES / (tiles * job->G) / APA_DIST_BLOCK * APA_DIST_BLOCK;
    walk->part_room = walk->part_room < APA_DIST_BLOCK ? APA_DIST_BLOCK : walk->part_room;
    walk->part_room = walk->part_room < job->rows ? walk->part_room : job->rows;
    const int64_t most = job->part_rows / job->G / APA_DIST_BLOCK * APA_DIST_BLOCK;
    walk->part_room = walk->part_room < most ? walk->part_room : most;
    const size_t rows = (size_t)(job->G * walk->part_room) + 1;
    walk->k = malloc((size_t)(keys * c->D) * sizeof(float) + 1);
    walk->v = malloc((size_t)(keys * c->Dv) * sizeof(float) + 1);
    walk->verdicts = malloc(rows * (size_t)tiles);
    walk->offset = malloc(rows * sizeof(double));
    walk->met = malloc(rows * sizeof(double));
    walk->mask = malloc((size_t)job->G * sizeof *walk->mask);
    walk->sure = malloc((size_t)(c->B * c->Hq * job->rows) * sizeof *walk->sure + 1);
    apa_status status = APA_STATUS_OK;
    if (walk->k == NULL || walk->v == NULL || walk->verdicts == NULL || walk->offset == NULL || walk->met == NULL ||
        walk->mask == NULL || walk->sure == NULL)
        status = apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for a walk over codes",
                               (int)job->rank);
    if (status == APA_STATUS_OK)
        status = apa_dist_bound_find(job, walk->sure);
    if (status != APA_STATUS_OK)
        apa_dist_walk_free(walk);
    return status;
}

void apa_dist_walk_free(apa_dist_walk *walk)
{
    free(walk->k);
    free(walk->v);
    free(walk->verdicts);
    free(walk->offset);
    free(walk->met);
    free(walk->mask);
    free(walk->sure);
}

/* ------------------------------------------------------------------------------- candidates */

/* Is the tile worth a look for the block's rows i … i+rows-1 of the part? Only if the engine called it hot for a row in
 * which the whole run holds more than eps of what the row has met (`offset` holds that difference by then), or if codes
 * cannot say what is in it. */
static bool is_candidate(const apa_dist_walk *walk, const part *p, int64_t i, int64_t rows, int64_t tile)
{
    if (p->codes->poisoned[tile])
        return true;
    for (int64_t g = 0; g < walk->job->G; g++)
        for (int64_t row = g * p->n + i; row < g * p->n + i + rows; row++)
            if (walk->verdicts[row * p->tiles + tile] == APA_VERDICT_HOT && walk->met[row] < INFINITY)
                return true;
    return false;
}

/* Does row `at` of the part leave the tile to the exact pass? */
static bool leaves(const apa_dist_walk *walk, const part *p, int64_t at, int64_t tile, float lse)
{
    return lse != -INFINITY && (p->codes->poisoned[tile] || walk->verdicts[at * p->tiles + tile] == APA_VERDICT_HOT);
}

/* Is the tile hot: does it hold more than eps of some row of the block? */
static bool is_hot(const apa_dist_walk *walk, const part *p, int64_t i, int64_t rows, int64_t tile, const float *lse)
{
    for (int64_t g = 0; g < walk->job->G; g++)
        for (int64_t row = 0; row < rows; row++) {
            const int64_t at = g * p->n + i + row;
            const double share = (double)lse[g * rows + row] + walk->offset[at] - walk->met[at];
            if (leaves(walk, p, at, tile, lse[g * rows + row]) && (p->codes->poisoned[tile] || share > walk->threshold))
                return true;
        }
    return false;
}

/* A hot tile's part leaves the state of every row for which the engine called it hot (verdicts are a group's, here as
 * there): bits of mask. Returns how many rows. */
static int64_t take_out(apa_dist_walk *walk, const part *p, int64_t i, int64_t rows, int64_t tile, const float *lse,
                        const float *out, uint64_t *mask)
{
    apa_dist_job *job = walk->job;
    int64_t taken = 0;
    memset(mask, 0, (size_t)job->G * sizeof *mask);
    if (!is_hot(walk, p, i, rows, tile, lse))
        return 0;
    for (int64_t g = 0; g < job->G; g++)
        for (int64_t row = 0; row < rows; row++) {
            const int64_t at = g * p->n + i + row, here = g * rows + row;
            if (!leaves(walk, p, at, tile, lse[here]))
                continue;
            mask[g] |= (uint64_t)1 << row;
            taken++;
            apa_dist_row_add(apa_dist_state(job, p->batch, p->kv_head * job->G + g, p->at + i + row), job->width,
                             (double)lse[here] + walk->offset[at], out + here * job->mine->Dv, -1.0);
        }
    return taken;
}

/* Candidates tile … tile+count-1 for one block; count > 1 only for full tiles that all rows see whole. */
static apa_status judge(apa_dist_walk *walk, const part *p, int64_t i, int64_t rows, int64_t tile, int64_t count)
{
    apa_dist_job *job = walk->job;
    const apa_dist_card *c = job->mine;
    const int64_t first = tile * APA_DIST_TILE, rest = p->run->count - first;
    const int64_t keys = rest < APA_DIST_TILE ? rest : APA_DIST_TILE;
    apa_tensor q = apa_dist_view(&p->q, i, rows);
    q.shape[0] = count;
    q.stride[0] = 0;
    const apa_tensor k = apa_tensor_hnd(walk->k + first * c->D, APA_DTYPE_F32, count, 1, keys, c->D);
    const apa_tensor v = apa_tensor_hnd(walk->v + first * c->Dv, APA_DTYPE_F32, count, 1, keys, c->Dv);
    apa_statistics ignored;
    apa_status status = apa_dist_attend(job, &q, p->q_run->first + p->from + i, &k, &v, p->run->first + first,
                                        count == 1, &walk->exact, NULL, &ignored);
    const double start = apa_dist_now_ms();
    for (int64_t t = 0; t < count && status == APA_STATUS_OK; t++) {
        const int64_t at = t * job->G * rows;
        const int64_t taken =
            take_out(walk, p, i, rows, tile + t, job->lse_part + at, job->out_part + at * c->Dv, walk->mask);
        const apa_dist_hot hot = {(int32_t)p->head, (int32_t)(tile + t), p->q_index, (int32_t)rows,
                                  p->from + i,      p->at + i,           0};
        job->statistics->hot += taken;
        if (taken > 0)
            status = apa_dist_unit_note(job, p->unit, hot, walk->mask);
    }
    job->statistics->pack_ms += apa_dist_now_ms() - start;
    return status;
}

static apa_status judge_block(apa_dist_walk *walk, const part *p, int64_t i, int64_t rows)
{
    const apa_dist_run block = {p->q_run->first + p->from + i, rows, 0};
    apa_status status = APA_STATUS_OK;
    for (int64_t tile = 0, count; tile < p->tiles && status == APA_STATUS_OK; tile += count) {
        count = 1;
        if (!is_candidate(walk, p, i, rows, tile))
            continue;
        const apa_dist_run keys = {p->run->first + tile * APA_DIST_TILE, APA_DIST_TILE, 0};
        if (apa_dist_sees_all(walk->job->mine, &block, &keys) && (tile + 1) * APA_DIST_TILE <= p->run->count) {
            apa_dist_run more = keys;
            while (count < TILES_AT_ONCE && (tile + count + 1) * APA_DIST_TILE <= p->run->count &&
                   is_candidate(walk, p, i, rows, tile + count)) {
                more.first += APA_DIST_TILE;
                if (!apa_dist_sees_all(walk->job->mine, &block, &more))
                    break;
                count++;
            }
        }
        status = judge(walk, p, i, rows, tile, count);
    }
    return status;
}

/* ------------------------------------------------------------------------------- the walk */

static double dot(const float *a, const float *b, int64_t n)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* Adds the engine's result to states and to what is known, and sets `offset` and `met`. A row in which the whole run
 * holds no more than eps gets `met` +inf: nothing in it can be hot. */
static void add(apa_dist_walk *walk, const part *p)
{
    apa_dist_job *job = walk->job;
    const apa_dist_card *c = job->mine;
    const double start = apa_dist_now_ms();
    const float nothing = 0.0f;
    for (int64_t g = 0; g < job->G; g++)
        for (int64_t i = 0; i < p->n; i++) {
            const int64_t at = g * p->n + i, head = p->batch * c->Hq + p->kv_head * job->G + g;
            const float *q = (const float *)p->q.data + g * p->q.stride[1] + i * p->q.stride[2];
            double *known = job->known + 2 * (head * job->rows + p->at + i);
            walk->offset[at] = c->scale * dot(q, p->codes->mean, c->D);
            const double lse = (double)job->lse_part[at] + walk->offset[at];
            apa_dist_row_add(job->state + (head * job->rows + p->at + i) * job->width, job->width, lse,
                             job->out_part + at * c->Dv, 1.0);
            apa_dist_row_add(known, APA_DIST_ROW_HEAD, lse, &nothing, 1.0);
            const double met = apa_dist_row_lse(known), sure = walk->sure[head * job->rows + p->at + i];
            walk->met[at] = met < sure ? sure : met;
            if (!(lse - walk->met[at] > walk->threshold))
                walk->met[at] = INFINITY;
        }
    job->statistics->pack_ms += apa_dist_now_ms() - start;
}

/* Largest share that the whole run has in a row of the part, by the engine's result; at most 1. */
static double largest_share(const apa_dist_walk *walk, const part *p)
{
    const apa_dist_job *job = walk->job;
    const apa_dist_card *c = job->mine;
    const float nothing = 0.0f;
    double most = 0.0;
    for (int64_t at = 0; at < job->G * p->n; at++) {
        const int64_t g = at / p->n, i = at % p->n;
        const int64_t row = (p->batch * c->Hq + p->kv_head * job->G + g) * job->rows + p->at + i;
        const float *q = (const float *)p->q.data + g * p->q.stride[1] + i * p->q.stride[2];
        const double lse = (double)job->lse_part[at] + c->scale * dot(q, p->codes->mean, c->D);
        double known[APA_DIST_ROW_HEAD] = {job->known[2 * row], job->known[2 * row + 1]};
        apa_dist_row_add(known, APA_DIST_ROW_HEAD, lse, &nothing, 1.0);
        const double met = apa_dist_row_lse(known), sure = walk->sure[row];
        const double share = lse == -INFINITY ? 0.0 : exp(lse - (met < sure ? sure : met));
        most = share > most ? share : most;
    }
    return most < 1.0 ? most : 1.0;
}

/* The engine judges against this run alone. Where the run holds at most a share w of every row, a tile that holds more
 * than eps of a row holds more than eps/w of the run: with that for its eps the engine finds every candidate, and not
 * all the tiles of a run that matters little. w is guessed from the rows before and checked; a guess that was too low
 * costs another walk over the part. */
static apa_status attend_part(apa_dist_walk *walk, part *p, apa_statistics *statistics)
{
    apa_dist_job *job = walk->job;
    const apa_dist_card *c = job->mine;
    const double eps = job->recipe.eps;
    const bool judged = walk->threshold < INFINITY && eps > 0.0;
    const apa_tensor k = apa_tensor_hnd(walk->k, APA_DTYPE_F32, 1, 1, p->run->count, c->D);
    const apa_tensor v = apa_tensor_hnd(walk->v, APA_DTYPE_F32, 1, 1, p->run->count, c->Dv);
    for (;;) {
        if (judged)
            walk->on_codes.eps = eps / p->guess < 1.0 ? eps / p->guess : 1.0;
        apa_status status = apa_dist_attend(job, &p->q, p->q_run->first + p->from, &k, &v, p->run->first, 1,
                                            &walk->on_codes, walk->verdicts, statistics);
        if (status != APA_STATUS_OK || !judged)
            return status;
        const double start = apa_dist_now_ms();
        const double share = largest_share(walk, p), guess = p->guess;
        p->guess = GUESS_MARGIN * share < 1.0 ? GUESS_MARGIN * share : 1.0;
        p->guess = p->guess < eps ? eps : p->guess;
        job->statistics->pack_ms += apa_dist_now_ms() - start;
        if (share <= guess)
            return APA_STATUS_OK;
    }
}

static apa_status walk_part(apa_dist_walk *walk, part *p)
{
    apa_dist_job *job = walk->job;
    apa_statistics statistics;
    apa_status status = attend_part(walk, p, &statistics);
    if (status != APA_STATUS_OK)
        return status;
    statistics.hot = 0; /* candidates; judge() counts */
    apa_dist_count(job, &statistics);
    add(walk, p);
    const bool judged = walk->threshold < INFINITY;
    for (int64_t i = 0; i < p->n && status == APA_STATUS_OK && (judged || p->any_poison); i += APA_DIST_BLOCK)
        status = judge_block(walk, p, i, p->n - i < APA_DIST_BLOCK ? p->n - i : APA_DIST_BLOCK);
    return status;
}

/* Rows of the part that begins at `from`: one block to learn from, then more. */
static int64_t part_rows(const apa_dist_walk *walk, const part *p, int64_t from)
{
    const int64_t rest = p->q_run->count - from;
    int64_t rows = walk->threshold == INFINITY ? walk->part_room
                   : from == 0                 ? APA_DIST_BLOCK
                                               : JUDGED_ROWS / walk->job->G;
    rows = rows / APA_DIST_BLOCK * APA_DIST_BLOCK;
    rows = rows < APA_DIST_BLOCK ? APA_DIST_BLOCK : rows;
    rows = rows < walk->part_room ? rows : walk->part_room;
    return rows < rest ? rows : rest;
}

static apa_status walk_head(apa_dist_walk *walk, part *p)
{
    apa_dist_job *job = walk->job;
    const apa_dist_card *c = job->mine;
    int64_t at = 0;
    apa_status status = APA_STATUS_OK;
    for (int32_t r = 0; r < c->q.count; at += c->q.run[r].count, r++) {
        p->q_index = r;
        p->q_run = &c->q.run[r];
        p->guess = 1.0;
        for (p->from = 0; p->from < p->q_run->count && status == APA_STATUS_OK; p->from += p->n) {
            p->at = at + p->from;
            p->n = part_rows(walk, p, p->from);
            const apa_dist_run rows = {p->q_run->first + p->from, p->n, 0};
            if (!apa_dist_sees(c, &rows, p->run))
                continue;
            const apa_tensor all = apa_tensor_hnd(job->rotated, APA_DTYPE_F32, c->B, c->Hq, job->rows, c->D);
            p->q = apa_dist_view_heads(&all, p->batch, p->kv_head * job->G, job->G);
            p->q = apa_dist_view(&p->q, p->at, p->n);
            status = walk_part(walk, p);
        }
    }
    return status;
}

apa_status apa_dist_walk_run(apa_dist_walk *walk, apa_dist_unit *unit, const char *packed)
{
    apa_dist_job *job = walk->job;
    const apa_dist_card *c = job->mine;
    part p;
    memset(&p, 0, sizeof p);
    p.unit = unit;
    p.run = &job->card[unit->from].k.run[unit->run];
    p.tiles = apa_dist_tiles(p.run->count);
    apa_status status = APA_STATUS_OK;
    for (p.head = 0; p.head < c->B * c->Hkv && status == APA_STATUS_OK; p.head++) {
        const apa_dist_codes codes = apa_dist_codes_at(job, packed, p.run->count, p.head);
        const double start = apa_dist_now_ms();
        apa_dist_codes_unpack(job, &codes, p.run->count, walk->k, walk->v);
        job->statistics->pack_ms += apa_dist_now_ms() - start;
        p.codes = &codes;
        p.any_poison = memchr(codes.poisoned, 1, (size_t)p.tiles) != NULL;
        p.batch = p.head / c->Hkv;
        p.kv_head = p.head % c->Hkv;
        status = walk_head(walk, &p);
    }
    return status;
}
