/* Shifts of packed keys, with two buffers: while one is worked on, the next fills. See shift.h. */
#include "dist/shift.h"

#include <stdlib.h>
#include <string.h>

int32_t apa_dist_shift_from(const apa_dist_job *job, int32_t shift)
{
    return (job->rank + job->ranks - shift) % job->ranks;
}

int32_t apa_dist_shift_to(const apa_dist_job *job, int32_t shift)
{
    return (job->rank + shift) % job->ranks;
}

bool apa_dist_needs(const apa_dist_job *job, int32_t reader, int32_t owner, int32_t i)
{
    const apa_dist_card *r = &job->card[reader], *o = &job->card[owner];
    for (int32_t q = 0; q < r->q.count && r->B > 0; q++)
        if (apa_dist_sees(r, &r->q.run[q], &o->k.run[i]))
            return true;
    return false;
}

/* Runs begin at multiples of 64 bytes. */
static int64_t room(const apa_dist_traffic *traffic, int64_t keys)
{
    return (traffic->run_bytes(traffic->job, keys) + 63) / 64 * 64;
}

static int64_t shard_room(const apa_dist_traffic *traffic, int32_t owner)
{
    const apa_dist_shard *shard = &traffic->job->card[owner].k;
    int64_t bytes = 0;
    for (int32_t i = 0; i < shard->count; i++)
        bytes += room(traffic, shard->run[i].count);
    return bytes;
}

char *apa_dist_traffic_own(const apa_dist_traffic *traffic, int32_t i)
{
    const apa_dist_job *job = traffic->job;
    char *at = traffic->own;
    for (int32_t j = 0; j < i; j++)
        at += room(traffic, job->mine->k.run[j].count);
    return at;
}

apa_status apa_dist_traffic_make(apa_dist_job *job, apa_dist_run_bytes run_bytes, apa_dist_traffic *traffic)
{
    memset(traffic, 0, sizeof *traffic);
    traffic->job = job;
    traffic->run_bytes = run_bytes;
    int64_t most = 64;
    for (int32_t r = 0; r < job->ranks; r++)
        most = shard_room(traffic, r) > most ? shard_room(traffic, r) : most;
    traffic->own = malloc((size_t)shard_room(traffic, job->rank) + 64);
    for (int i = 0; i < 2; i++)
        traffic->in[i] = malloc((size_t)most);
    if (traffic->own != NULL && traffic->in[0] != NULL && traffic->in[1] != NULL)
        return APA_STATUS_OK;
    apa_dist_traffic_free(traffic);
    return apa_dist_fail(job->dist, APA_STATUS_OUT_OF_MEMORY, "rank %d: no memory for the keys of another rank",
                         (int)job->rank);
}

void apa_dist_traffic_free(apa_dist_traffic *traffic)
{
    if (traffic->job == NULL || apa_dist_wire_is_broken(traffic->job->wire))
        return; /* MPI may still write there */
    free(traffic->own);
    for (int i = 0; i < 2; i++)
        free(traffic->in[i]);
}

apa_status apa_dist_traffic_begin(apa_dist_traffic *traffic, int32_t shift)
{
    apa_dist_job *job = traffic->job;
    if (shift < 1 || shift >= job->ranks)
        return APA_STATUS_OK;
    const int32_t from = apa_dist_shift_from(job, shift), to = apa_dist_shift_to(job, shift);
    const apa_dist_card *c = job->mine;
    char *at = traffic->in[shift % 2];
    apa_status status = APA_STATUS_OK;
    for (int32_t i = 0; i < c->k.count && status == APA_STATUS_OK; i++) { /* what goes before what comes: wire.h */
        const int64_t keys = c->k.run[i].count;
        if (!apa_dist_needs(job, to, job->rank, i))
            continue;
        apa_dist_op *op = &traffic->out_op[shift % 2][i];
        *op = (apa_dist_op){.kind = APA_DIST_OP_SEND,
                            .data = apa_dist_traffic_own(traffic, i),
                            .bytes = traffic->run_bytes(job, keys),
                            .peer = to,
                            .tag = APA_DIST_TAG_KEYS};
        job->statistics->sent += op->bytes;
        job->statistics->sent_f16 += c->B * c->Hkv * keys * (c->D + c->Dv) * 2;
        status = apa_dist_wire_post(job->wire, op);
    }
    for (int32_t i = 0; i < job->card[from].k.count && status == APA_STATUS_OK; i++) {
        const int64_t keys = job->card[from].k.run[i].count;
        if (!apa_dist_needs(job, job->rank, from, i))
            continue;
        apa_dist_op *op = &traffic->in_op[shift % 2][i];
        *op = (apa_dist_op){.kind = APA_DIST_OP_RECEIVE,
                            .data = at,
                            .bytes = traffic->run_bytes(job, keys),
                            .peer = from,
                            .tag = APA_DIST_TAG_KEYS};
        at += room(traffic, keys);
        job->statistics->received += op->bytes;
        status = apa_dist_wire_post(job->wire, op);
    }
    return status == APA_STATUS_OK ? status : apa_dist_lost(job->dist);
}

apa_status apa_dist_traffic_arrive(apa_dist_traffic *traffic, int32_t shift, const char *run[APA_DIST_RUNS])
{
    apa_dist_job *job = traffic->job;
    const int32_t from = apa_dist_shift_from(job, shift);
    double begun = 0.0, ended = 0.0;
    for (int32_t i = 0; i < APA_DIST_RUNS; i++) {
        run[i] = NULL;
        if (i >= job->card[from].k.count || !apa_dist_needs(job, job->rank, from, i))
            continue;
        apa_dist_op *op = &traffic->in_op[shift % 2][i];
        if (apa_dist_wire_wait(job->wire, op, "keys", &job->statistics->wait_ms) != APA_STATUS_OK)
            return apa_dist_lost(job->dist);
        run[i] = op->data;
        begun = begun == 0.0 || op->begun_ms < begun ? op->begun_ms : begun;
        ended = op->ended_ms > ended ? op->ended_ms : ended;
    }
    job->statistics->transfer_ms += ended - begun;
    return APA_STATUS_OK;
}

apa_status apa_dist_traffic_gone(apa_dist_traffic *traffic, int32_t shift)
{
    apa_dist_job *job = traffic->job;
    if (shift < 1 || shift >= job->ranks)
        return APA_STATUS_OK;
    for (int32_t i = 0; i < APA_DIST_RUNS; i++)
        if (apa_dist_wire_wait(job->wire, &traffic->out_op[shift % 2][i], "its keys to be taken",
                               &job->statistics->wait_ms) != APA_STATUS_OK)
            return apa_dist_lost(job->dist);
    return APA_STATUS_OK;
}
