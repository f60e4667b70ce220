/* Rows of all ranks to one: the root takes them rank by rank and lays them where they belong. */
#include "dist/job.h"

#include <stdlib.h>
#include <string.h>

typedef struct gathering {
    apa_dist *dist;
    const apa_dist_problem *problem;
    int32_t root;
    apa_dist_shard *shard; /* of all ranks */
} gathering;

/* Copies rows between a tensor and packed memory, [batch][heads][count][dim]. */
static void copy_rows(const apa_tensor *tensor, int64_t at, int64_t count, char *packed, bool to_tensor)
{
    const int64_t element = (int64_t)apa_dtype_bytes(tensor->dtype), bytes = tensor->shape[3] * element;
    for (int64_t row = 0; row < tensor->shape[0] * tensor->shape[1] * count; row++, packed += bytes) {
        const int64_t head = row / count, b = head / tensor->shape[1], h = head % tensor->shape[1];
        char *there =
            (char *)tensor->data +
            (b * tensor->stride[0] + h * tensor->stride[1] + (at + row % count) * tensor->stride[2]) * element;
        memcpy(to_tensor ? there : packed, to_tensor ? packed : there, (size_t)bytes);
    }
}

/* One run of one rank, one tensor. */
static apa_status move_run(const gathering *g, int32_t owner, const apa_dist_run *run, const apa_tensor *part,
                           const apa_tensor *whole)
{
    const int32_t rank = apa_dist_rank(g->dist);
    const int64_t bytes =
        part->shape[0] * part->shape[1] * run->count * part->shape[3] * (int64_t)apa_dtype_bytes(part->dtype);
    if (bytes == 0 || (rank != owner && rank != g->root))
        return APA_STATUS_OK;
    char *packed = malloc((size_t)bytes);
    if (packed == NULL)
        return apa_dist_fail(g->dist, APA_STATUS_OUT_OF_MEMORY, "no memory for the rows of rank %d", (int)owner);
    if (rank == owner)
        copy_rows(part, run->at, run->count, packed, false);
    apa_status status = APA_STATUS_OK;
    if (owner != g->root) {
        apa_dist_op op = {.kind = rank == owner ? APA_DIST_OP_SEND : APA_DIST_OP_RECEIVE,
                          .data = packed,
                          .bytes = bytes,
                          .peer = rank == owner ? g->root : owner,
                          .tag = APA_DIST_TAG_ROWS};
        if (apa_dist_wire_do(g->dist->wire, &op, "rows of the output", NULL) != APA_STATUS_OK)
            return apa_dist_lost(g->dist); /* packed stays MPI's */
    }
    if (rank == g->root)
        copy_rows(whole, run->first, run->count, packed, true);
    free(packed);
    return status;
}

static apa_status collect(const gathering *g, const apa_tensor *whole_out, const apa_tensor *whole_lse)
{
    const apa_problem *p = &g->problem->local;
    apa_status status = APA_STATUS_OK;
    for (int32_t owner = 0; owner < apa_dist_ranks(g->dist); owner++)
        for (int32_t i = 0; i < g->shard[owner].count && status == APA_STATUS_OK; i++) {
            status = move_run(g, owner, &g->shard[owner].run[i], &p->out, whole_out);
            if (status == APA_STATUS_OK && p->lse.dtype != APA_DTYPE_NONE)
                status = move_run(g, owner, &g->shard[owner].run[i], &p->lse, whole_lse);
        }
    return status;
}

/* The root's tensors must take what comes. */
static bool fits(const apa_dist_problem *problem, const apa_tensor *whole, const apa_tensor *part)
{
    if (part->dtype == APA_DTYPE_NONE)
        return true;
    return whole != NULL && whole->dtype == part->dtype && whole->shape[0] == part->shape[0] &&
           whole->shape[1] == part->shape[1] && whole->shape[2] == problem->Sq && whole->shape[3] == part->shape[3];
}

apa_status apa_dist_collect(apa_dist *dist, const apa_dist_problem *problem, int32_t root, const apa_tensor *whole_out,
                            const apa_tensor *whole_lse)
{
    const int32_t rank = apa_dist_rank(dist), ranks = apa_dist_ranks(dist);
    gathering g = {dist, problem, root, calloc((size_t)ranks, sizeof(apa_dist_shard))};
    int32_t code = 0, largest = 0;
    if (g.shard == NULL || root < 0 || root >= ranks ||
        (rank == root &&
         !(fits(problem, whole_out, &problem->local.out) && fits(problem, whole_lse, &problem->local.lse))))
        code = 1;
    apa_status status = apa_dist_agree(dist, code, &largest);
    if (status == APA_STATUS_OK && largest != 0)
        status = apa_dist_fail(
            dist, APA_STATUS_INVALID_ARGUMENT,
            "collect: root %d, expected a rank whose tensors have the whole output's shape and dtype", (int)root);
    if (status == APA_STATUS_OK && apa_dist_wire_enter(dist->wire) != APA_STATUS_OK)
        status = apa_dist_lost(dist);
    if (status != APA_STATUS_OK) {
        free(g.shard);
        return status;
    }
    g.shard[rank] = problem->q_shard;
    apa_dist_op gather = {.kind = APA_DIST_OP_GATHER, .data = g.shard, .bytes = (int64_t)sizeof *g.shard};
    status = apa_dist_wire_do(dist->wire, &gather, "the other ranks' shards", NULL);
    status = status == APA_STATUS_OK ? collect(&g, whole_out, whole_lse) : apa_dist_lost(dist);
    if (status == APA_STATUS_OK)
        status = apa_dist_agree(dist, 0, &largest);
    apa_dist_wire_leave(dist->wire);
    if (!apa_dist_wire_is_broken(dist->wire))
        free(g.shard);
    return status;
}
