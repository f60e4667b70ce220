/* The exchange of keys and values as they are.
 *
 *   shift 1 begins; own keys
 *   for s = 1 … N-1:  keys of shift s arrive; shift s+1 begins; attention to what arrived
 *
 * A packed run is K [B][Hkv][keys][D], then V [B][Hkv][keys][Dv]. */
#include "dist/shift.h"

#include <string.h>

static int64_t run_bytes(const apa_dist_job *job, int64_t keys)
{
    const apa_dist_card *c = job->mine;
    return c->B * c->Hkv * keys * (c->D + c->Dv) * job->element;
}

/* Rows at … at+count-1 of every head, one after the other; returns where it ended. */
static char *pack(char *to, const apa_tensor *tensor, int64_t at, int64_t count)
{
    const int64_t element = (int64_t)apa_dtype_bytes(tensor->dtype), bytes = tensor->shape[3] * element;
    for (int64_t head = 0; head < tensor->shape[0] * tensor->shape[1]; head++) {
        const int64_t b = head / tensor->shape[1], h = head % tensor->shape[1];
        const char *from = (const char *)tensor->data +
                           (b * tensor->stride[0] + h * tensor->stride[1] + at * tensor->stride[2]) * element;
        for (int64_t i = 0; i < count; i++, to += bytes, from += tensor->stride[2] * element)
            memcpy(to, from, (size_t)bytes);
    }
    return to;
}

static void pack_own(apa_dist_traffic *traffic)
{
    apa_dist_job *job = traffic->job;
    const double start = apa_dist_now_ms();
    for (int32_t i = 0; i < job->mine->k.count && job->ranks > 1; i++) {
        const apa_dist_run *run = &job->mine->k.run[i];
        char *at = pack(apa_dist_traffic_own(traffic, i), &job->k, run->at, run->count);
        pack(at, &job->v, run->at, run->count);
    }
    job->statistics->pack_ms += apa_dist_now_ms() - start;
}

static apa_status attend(apa_dist_job *job, const char *packed, const apa_dist_run *run)
{
    const apa_dist_card *c = job->mine;
    const apa_dtype dtype = (apa_dtype)c->dtype;
    const apa_tensor k = apa_tensor_hnd(packed, dtype, c->B, c->Hkv, run->count, c->D);
    const apa_tensor v = apa_tensor_hnd(packed + c->B * c->Hkv * run->count * c->D * job->element, dtype, c->B, c->Hkv,
                                        run->count, c->Dv);
    return apa_dist_attend_run(job, &k, &v, run);
}

apa_status apa_dist_run_exact(apa_dist_job *job)
{
    apa_dist_traffic traffic;
    apa_status status = apa_dist_traffic_make(job, run_bytes, &traffic);
    if (status != APA_STATUS_OK)
        return status;
    pack_own(&traffic);
    status = apa_dist_traffic_begin(&traffic, 1);
    if (status == APA_STATUS_OK)
        status = apa_dist_attend_own(job);
    for (int32_t s = 1; s < job->ranks && status == APA_STATUS_OK; s++) {
        const apa_dist_shard *shard = &job->card[apa_dist_shift_from(job, s)].k;
        const char *run[APA_DIST_RUNS];
        status = apa_dist_traffic_arrive(&traffic, s, run);
        if (status == APA_STATUS_OK)
            status = apa_dist_traffic_gone(&traffic, s - 1);
        if (status == APA_STATUS_OK)
            status = apa_dist_traffic_begin(&traffic, s + 1);
        for (int32_t i = 0; i < shard->count && status == APA_STATUS_OK; i++)
            if (run[i] != NULL)
                status = attend(job, run[i], &shard->run[i]);
    }
    if (status == APA_STATUS_OK && job->ranks > 1)
        status = apa_dist_traffic_gone(&traffic, job->ranks - 1);
    apa_dist_traffic_free(&traffic);
    return status;
}
