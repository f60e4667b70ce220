/* Hot tiles: lists, tiles, exact parts. See hot.h. */
#include "dist/hot.h"

#include "dist/codes.h"
#include "dist/shift.h"

#include <stdlib.h>
#include <string.h>

static const apa_dist_run *run_of(const apa_dist_job *job, int32_t owner, int32_t run)
{
    return &job->card[owner].k.run[run];
}

static int64_t heads(const apa_dist_job *job)
{
    return job->mine->B * job->mine->Hkv;
}

static int64_t list_bytes(const apa_dist_job *job, int64_t keys)
{
    return (heads(job) * apa_dist_tiles(keys) + 7) / 8;
}

static bool bit(const uint8_t *bits, int64_t i)
{
    return bits[i / 8] >> i % 8 & 1;
}

static int64_t keys_in_tile(int64_t keys, int64_t tile)
{
    const int64_t rest = keys - tile * APA_DIST_TILE;
    return rest < APA_DIST_TILE ? rest : APA_DIST_TILE;
}

/* Bytes of one tile: its keys, then their values. */
static int64_t tile_bytes(const apa_dist_job *job, int64_t keys)
{
    return keys * (job->mine->D + job->mine->Dv) * job->element;
}

static int64_t listed_bytes(const apa_dist_job *job, const uint8_t *bits, int64_t keys)
{
    const int64_t tiles = apa_dist_tiles(keys);
    int64_t bytes = 0;
    for (int64_t i = 0; i < heads(job) * tiles; i++)
        if (bit(bits, i))
            bytes += tile_bytes(job, keys_in_tile(keys, i % tiles));
    return bytes;
}

/* ------------------------------------------------------------------------------- a unit's memory */

apa_status apa_dist_unit_make(apa_dist_job *job, int32_t shift, int32_t run, apa_dist_unit *unit)
{
    memset(unit, 0, sizeof *unit);
    unit->shift = shift;
    unit->run = run;
    unit->from = apa_dist_shift_from(job, shift);
    unit->to = apa_dist_shift_to(job, shift);
    unit->reads = run < job->card[unit->from].k.count && apa_dist_needs(job, job->rank, unit->from, run);
    unit->is_read = run < job->mine->k.count && apa_dist_needs(job, unit->to, job->rank, run);
    if (unit->reads)
        unit->want = calloc((size_t)list_bytes(job, run_of(job, unit->from, run)->count), 1);
    if (unit->is_read)
        unit->asked = calloc((size_t)list_bytes(job, job->mine->k.run[run].count), 1);
    if ((unit->reads && unit->want == NULL) || (unit->is_read && unit->asked == NULL))
        return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for a list of tiles",
                             (int)job->rank);
    return APA_STATUS_OK;
}

void apa_dist_unit_free(apa_dist_job *job, apa_dist_unit *unit)
{
    if (apa_dist_wire_is_broken(job->wire))
        return;
    free(unit->want);
    free(unit->asked);
    free(unit->in);
    free(unit->out);
    free(unit->hot);
    free(unit->mask);
    memset(unit, 0, sizeof *unit);
}

/* Room for `more` further elements. */
static bool grow(void **memory, int64_t count, int64_t *room, int64_t more, size_t bytes)
{
    if (count + more <= *room)
        return true;
    const int64_t wanted = 2 * (count + more) + 64;
    void *larger = realloc(*memory, (size_t)wanted * bytes);
    if (larger == NULL)
        return false;
    *memory = larger;
    *room = wanted;
    return true;
}

apa_status apa_dist_unit_note(apa_dist_job *job, apa_dist_unit *unit, apa_dist_hot hot, const uint64_t *mask)
{
    void *entries = unit->hot, *words = unit->mask;
    const bool grown = grow(&entries, unit->hot_count, &unit->hot_room, 1, sizeof *unit->hot) &&
                       grow(&words, unit->mask_count, &unit->mask_room, job->G, sizeof *unit->mask);
    unit->hot = entries;
    unit->mask = words;
    if (!grown)
        return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for hot tiles", (int)job->rank);
    hot.mask = unit->mask_count;
    memcpy(unit->mask + unit->mask_count, mask, (size_t)job->G * sizeof *mask);
    unit->mask_count += job->G;
    unit->hot[unit->hot_count++] = hot;
    const int64_t i = hot.head * apa_dist_tiles(run_of(job, unit->from, unit->run)->count) + hot.tile;
    unit->want[i / 8] |= (uint8_t)(1u << i % 8);
    return APA_STATUS_OK;
}

/* ------------------------------------------------------------------------------- messages */

static apa_status post(apa_dist_job *job, apa_dist_op *op, apa_dist_op_kind kind, void *data, int64_t bytes,
                       int32_t peer, int32_t tag)
{
    *op = (apa_dist_op){.kind = kind, .data = data, .bytes = bytes, .peer = peer, .tag = tag};
    if (kind == APA_DIST_OP_SEND)
        job->statistics->sent += bytes;
    else
        job->statistics->received += bytes;
    return apa_dist_wire_post(job->wire, op) == APA_STATUS_OK ? APA_STATUS_OK : apa_dist_lost(job->dist);
}

static apa_status wait(apa_dist_job *job, apa_dist_op *op, const char *what)
{
    return apa_dist_wire_wait(job->wire, op, what, &job->statistics->wait_ms) == APA_STATUS_OK
               ? APA_STATUS_OK
               : apa_dist_lost(job->dist);
}

apa_status apa_dist_unit_ask(apa_dist_job *job, apa_dist_unit *unit)
{
    apa_status status = APA_STATUS_OK;
    if (unit->is_read)
        status = post(job, &unit->list_in, APA_DIST_OP_RECEIVE, unit->asked,
                      list_bytes(job, job->mine->k.run[unit->run].count), unit->to, APA_DIST_TAG_LIST);
    if (unit->reads && status == APA_STATUS_OK) {
        const int64_t keys = run_of(job, unit->from, unit->run)->count, bytes = list_bytes(job, keys);
        status = post(job, &unit->list_out, APA_DIST_OP_SEND, unit->want, bytes, unit->from, APA_DIST_TAG_LIST);
        job->statistics->sent_lists += bytes;
        job->statistics->remote_tiles += heads(job) * apa_dist_tiles(keys);
        for (int64_t i = 0; i < heads(job) * apa_dist_tiles(keys); i++)
            job->statistics->wanted_tiles += bit(unit->want, i);
    }
    return status;
}

static char *pack_rows(char *to, const apa_tensor *tensor, int64_t head, int64_t at, int64_t count)
{
    const int64_t element = (int64_t)apa_dtype_bytes(tensor->dtype), bytes = tensor->shape[3] * element;
    const int64_t b = head / tensor->shape[1], h = head % tensor->shape[1];
    for (int64_t i = 0; i < count; i++, to += bytes)
        memcpy(to,
               (const char *)tensor->data +
                   (b * tensor->stride[0] + h * tensor->stride[1] + (at + i) * tensor->stride[2]) * element,
               (size_t)bytes);
    return to;
}

/* The listed tiles of one's own run, packed in order of the bits. */
static void pack_tiles(const apa_dist_job *job, const apa_dist_unit *unit)
{
    const apa_dist_run *run = &job->mine->k.run[unit->run];
    const int64_t tiles = apa_dist_tiles(run->count);
    char *to = unit->out;
    for (int64_t i = 0; i < heads(job) * tiles; i++) {
        if (!bit(unit->asked, i))
            continue;
        const int64_t at = run->at + i % tiles * APA_DIST_TILE, keys = keys_in_tile(run->count, i % tiles);
        to = pack_rows(to, &job->k, i / tiles, at, keys);
        to = pack_rows(to, &job->v, i / tiles, at, keys);
    }
}

/* Waits for the other's list and sends what is on it. */
static apa_status send_tiles(apa_dist_job *job, apa_dist_unit *unit)
{
    apa_status status = wait(job, &unit->list_in, "a list of tiles");
    if (status != APA_STATUS_OK)
        return status;
    const int64_t bytes = listed_bytes(job, unit->asked, job->mine->k.run[unit->run].count);
    const double start = apa_dist_now_ms();
    unit->out = malloc((size_t)bytes + 1);
    if (unit->out == NULL)
        return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for tiles", (int)job->rank);
    pack_tiles(job, unit);
    job->statistics->pack_ms += apa_dist_now_ms() - start;
    job->statistics->sent_tiles += bytes;
    return post(job, &unit->tiles_out, APA_DIST_OP_SEND, unit->out, bytes, unit->to, APA_DIST_TAG_TILES);
}

apa_status apa_dist_unit_answer(apa_dist_job *job, apa_dist_unit *unit)
{
    apa_status status = unit->is_read ? send_tiles(job, unit) : APA_STATUS_OK;
    if (status != APA_STATUS_OK || !unit->reads)
        return status;
    const int64_t bytes = listed_bytes(job, unit->want, run_of(job, unit->from, unit->run)->count);
    unit->in = malloc((size_t)bytes + 1);
    if (unit->in == NULL)
        return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for tiles", (int)job->rank);
    return post(job, &unit->tiles_in, APA_DIST_OP_RECEIVE, unit->in, bytes, unit->from, APA_DIST_TAG_TILES);
}

/* ------------------------------------------------------------------------------- exact parts */

/* Where every wanted tile lies among those that came: bytes from the start, indexed by bit. */
static int64_t *places(const apa_dist_job *job, const apa_dist_unit *unit, int64_t keys)
{
    const int64_t tiles = apa_dist_tiles(keys), n = heads(job) * tiles;
    int64_t *place = malloc((size_t)(n + 1) * sizeof *place), at = 0;
    for (int64_t i = 0; i < n && place != NULL; i++) {
        place[i] = at;
        if (bit(unit->want, i))
            at += tile_bytes(job, keys_in_tile(keys, i % tiles));
    }
    return place;
}

/* Adds `count` neighbouring tiles of one block, entries hot[0 … count-1]; count > 1 only for full tiles that every row
 * of the block sees whole. */
static apa_status add_tiles(apa_dist_job *job, apa_dist_unit *unit, const apa_dist_hot *hot, int64_t count,
                            int64_t place, const apa_recipe *exact)
{
    const apa_dist_card *c = job->mine;
    const apa_dist_run *run = run_of(job, unit->from, unit->run), *q_run = &c->q.run[hot->q_run];
    const int64_t b = hot->head / c->Hkv, h = hot->head % c->Hkv, keys = keys_in_tile(run->count, hot->tile);
    const apa_dtype dtype = (apa_dtype)c->dtype;
    apa_tensor q = apa_dist_view_heads(&job->q, b, h * job->G, job->G);
    q = apa_dist_view(&q, q_run->at + hot->from, hot->rows);
    q.shape[0] = count;
    q.stride[0] = 0;
    apa_tensor k = apa_tensor_hnd(unit->in + place, dtype, count, 1, keys, c->D);
    apa_tensor v = apa_tensor_hnd(unit->in + place + keys * c->D * job->element, dtype, count, 1, keys, c->Dv);
    k.stride[0] = v.stride[0] = keys * (c->D + c->Dv);
    apa_statistics ignored;
    apa_status status =
        apa_dist_attend(job, &q, q_run->first + hot->from, &k, &v, run->first + (int64_t)hot->tile * APA_DIST_TILE,
                        count == 1, exact, NULL, &ignored);
    const double start = apa_dist_now_ms();
    for (int64_t t = 0; t < count && status == APA_STATUS_OK; t++)
        for (int64_t g = 0; g < job->G; g++)
            for (int64_t i = 0; i < hot->rows; i++) {
                const int64_t part = (t * job->G + g) * hot->rows + i;
                if (unit->mask[hot[t].mask + g] >> i & 1)
                    apa_dist_row_add(apa_dist_state(job, b, h * job->G + g, hot->at + i), job->width,
                                     (double)job->lse_part[part], job->out_part + part * c->Dv, 1.0);
            }
    job->statistics->pack_ms += apa_dist_now_ms() - start;
    return status;
}

/* Entries from hot[0] on that one engine call can take: neighbouring tiles of one block, all seen whole. */
static int64_t neighbours(const apa_dist_job *job, const apa_dist_unit *unit, const apa_dist_hot *hot, int64_t rest)
{
    const apa_dist_run *run = run_of(job, unit->from, unit->run), *q_run = &job->mine->q.run[hot->q_run];
    const int64_t most = job->part_rows / (job->G * hot->rows);
    int64_t n = 0;
    while (n < rest && n < most && hot[n].head == hot->head && hot[n].at == hot->at && hot[n].tile == hot->tile + n) {
        const apa_dist_run block = {q_run->first + hot->from, hot->rows, 0};
        const int64_t first = (int64_t)hot[n].tile * APA_DIST_TILE;
        const apa_dist_run tile = {run->first + first, keys_in_tile(run->count, hot[n].tile), 0};
        if (tile.count != APA_DIST_TILE || !apa_dist_sees_all(job->mine, &block, &tile))
            break;
        n++;
    }
    return n < 1 ? 1 : n;
}

apa_status apa_dist_unit_take(apa_dist_job *job, apa_dist_unit *unit, const apa_recipe *exact)
{
    apa_status status = wait(job, &unit->list_out, "its list of tiles to be taken");
    if (status == APA_STATUS_OK)
        status = wait(job, &unit->tiles_in, "hot tiles");
    if (status == APA_STATUS_OK && unit->reads) {
        const int64_t keys = run_of(job, unit->from, unit->run)->count;
        int64_t *place = places(job, unit, keys);
        if (place == NULL)
            return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for tiles", (int)job->rank);
        job->statistics->transfer_ms += unit->tiles_in.ended_ms - unit->tiles_in.begun_ms;
        for (int64_t i = 0, n; i < unit->hot_count && status == APA_STATUS_OK; i += n) {
            const apa_dist_hot *hot = &unit->hot[i];
            n = neighbours(job, unit, hot, unit->hot_count - i);
            status = add_tiles(job, unit, hot, n, place[hot->head * apa_dist_tiles(keys) + hot->tile], exact);
        }
        free(place);
    }
    return status == APA_STATUS_OK ? wait(job, &unit->tiles_out, "its tiles to be taken") : status;
}
