/* Who holds what: the two usual ways to cut a sequence.
 *
 * Zig-zag: of 2N pieces rank r has r and 2N-1-r. With a causal mask the work of piece p is about p + 1/2, and
 * r + (2N-1-r) is the same for all r. (The idea is that of striped and zig-zag ring attention: Brandon et al., arXiv
 * 2311.09431; here whole pieces, so that tiles stay whole.) */
#include "apa/dist.h"

#include <string.h>

/* Piece p of n: as equal as multiples of the granule allow, the last one takes what is left. */
static apa_dist_run piece(int64_t length, int64_t n, int64_t p, int64_t granule)
{
    const int64_t g = granule < 1 ? 1 : granule, whole = length < 0 ? 0 : length;
    const int64_t granules = whole / g + (whole % g != 0);
    /* p·granules/n without overflow: quotient and remainder apart */
    const int64_t each = granules / n, more = granules % n;
    const int64_t from = p * each + (p < more ? p : more), to = from + each + (p < more);
    apa_dist_run run = {from * g, 0, 0};
    if (run.first > whole)
        run.first = whole;
    run.count = (to >= granules ? whole : to * g) - run.first;
    return run;
}

static void append(apa_dist_shard *shard, apa_dist_run run)
{
    if (run.count == 0)
        return;
    run.at = apa_dist_shard_rows(shard);
    shard->run[shard->count++] = run;
}

apa_dist_shard apa_dist_split_blocks(int64_t length, int32_t ranks, int32_t rank, int64_t granule)
{
    apa_dist_shard shard;
    memset(&shard, 0, sizeof shard);
    append(&shard, piece(length, ranks, rank, granule));
    return shard;
}

apa_dist_shard apa_dist_split_zigzag(int64_t length, int32_t ranks, int32_t rank, int64_t granule)
{
    apa_dist_shard shard;
    memset(&shard, 0, sizeof shard);
    apa_dist_run early = piece(length, 2 * (int64_t)ranks, rank, granule);
    const apa_dist_run late = piece(length, 2 * (int64_t)ranks, 2 * (int64_t)ranks - 1 - rank, granule);
    if (early.count > 0 && early.first + early.count == late.first) { /* the two in the middle */
        early.count += late.count;
        append(&shard, early);
        return shard;
    }
    append(&shard, early);
    append(&shard, late);
    return shard;
}

int64_t apa_dist_shard_rows(const apa_dist_shard *shard)
{
    int64_t rows = 0;
    for (int32_t i = 0; i < shard->count; i++)
        rows += shard->run[i].count;
    return rows;
}
