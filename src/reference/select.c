/* Hot tiles chosen before any score is formed (ThriftAttention; Sharratt 2026, and its repository).
 *
 * A group is a block of queries; q̄ is the mean of its rows of one head, k̄_t the mean of a tile's keys, both as
 * prepared. block_mean   score(t) = q̄·k̄_t                    quest   Σ_d max(q̄_d·kmin_d, q̄_d·kmax_d)        local   t
 * itself Where a group holds rows of several heads (decoding: one query), the score is the largest over the heads: one
 * list per KV head. Subtracting K's mean shifts all scores of a head alike, so it changes no choice of a group of one
 * head.
 *
 * How many. A fraction f of the pairs of blocks. All of N visible: max(1, round(f·N)). Under a causal square every row
 * of blocks takes the same k, min(k, visible) of them, and Σ min(k, i) = f·N(N+1)/2 gives k = ((2N+1) - √((2N+1)² -
 * 4fN(N+1)))/2, rounded and at least 1. The other causal shapes take the k whose chosen pairs are nearest to f of all
 * (the smaller of two). Ties go to the earlier tile. force_sink and force_diagonal take their tiles out of the same k.
 */
#include "reference/internal.h"

#include <math.h>
#include <string.h>

/* Tiles that the block of rows n sees when the sequence is cut in blocks of `group` queries: the last row's. */
static int64_t seen_by(const apa_call *call, int64_t n)
{
    int64_t first, end, position = (n + 1) * call->recipe.group - 1;
    position = position < call->Sq ? position : call->Sq - 1;
    apa_call_visible(call, position, &first, &end);
    return first < end ? (end - 1) / APA_REFERENCE_TILE - first / APA_REFERENCE_TILE + 1 : 0;
}

static int64_t nearest_count(const apa_call *call, double fraction)
{
    const int64_t blocks = (call->Sq + call->recipe.group - 1) / call->recipe.group;
    double all = 0, least = INFINITY;
    int64_t best = 1;
    for (int64_t n = 0; n < blocks; ++n)
        all += (double)seen_by(call, n);
    for (int64_t k = 1; k <= apa_call_tiles(call); ++k) {
        double chosen = 0;
        for (int64_t n = 0; n < blocks; ++n)
            chosen += (double)(seen_by(call, n) < k ? seen_by(call, n) : k);
        if (!(fabs(chosen - fraction * all) < least))
            break;
        least = fabs(chosen - fraction * all);
        best = k;
    }
    return best;
}

int64_t apa_reference_select_count(const apa_call *call, int64_t seen)
{
    const double f = call->recipe.fraction, N = (double)apa_call_tiles(call);
    double k;
    if (!call->causal)
        k = round(f * (double)seen);
    else if (call->Sq == call->Skv && call->q_offset == 0 && call->window_left < 0)
        k = round((2 * N + 1 - sqrt((2 * N + 1) * (2 * N + 1) - 4 * f * N * (N + 1))) / 2);
    else
        k = (double)nearest_count(call, f);
    k = k < 1 ? 1 : k;
    return k < (double)seen ? (int64_t)k : seen;
}

/* The mean of the group's real rows of query head hq; false if it has none. */
static bool mean_query(const apa_reference_block *block, int64_t hq, double *mean)
{
    const int64_t D = block->call->D;
    int64_t n = 0;
    memset(mean, 0, sizeof(double) * (size_t)D);
    for (int64_t r = 0; r < block->rows; ++r) {
        const apa_reference_row *row = &block->row[r];
        if (!row->real || row->hq != hq || row->first >= row->end)
            continue;
        for (int64_t d = 0; d < D; ++d)
            mean[d] += block->q_prepared[r * D + d];
        ++n;
    }
    for (int64_t d = 0; d < D && n > 0; ++d)
        mean[d] /= (double)n;
    return n > 0;
}

static double tile_score(const apa_reference_block *block, const double *q, int64_t t)
{
    const int64_t D = block->call->D;
    const apa_reference_head *head = block->head;
    double score = 0;
    if (block->call->recipe.select == APA_SELECT_LOCAL)
        return (double)t;
    for (int64_t d = 0; d < D; ++d) {
        if (block->call->recipe.select == APA_SELECT_BLOCK_MEAN)
            score += q[d] * head->k_middle[t * D + d];
        else
            score += q[d] * (q[d] >= 0 ? head->k_most[t * D + d] : head->k_least[t * D + d]);
    }
    return score;
}

static bool seen_by_any(const apa_reference_block *block, int64_t t)
{
    for (int64_t r = 0; r < block->rows; ++r)
        if (apa_reference_sees(block, r, t))
            return true;
    return false;
}

/* given[t] = 1 for the k tiles of the largest score. score is scratch of the tiles. */
static void take_best(apa_reference_block *block, double *score, int64_t k)
{
    for (; k > 0; --k) {
        int64_t best = -1;
        for (int64_t t = block->tile_first; t < block->tile_end; ++t)
            if (block->given[t] == 0 && score[t] > -INFINITY && (best < 0 || score[t] > score[best]))
                best = t;
        if (best < 0)
            return;
        block->given[best] = 1;
    }
}

void apa_reference_select(apa_reference_block *block)
{
    const apa_call *call = block->call;
    const apa_recipe *recipe = &call->recipe;
    double mean[APA_REFERENCE_DIM_MAX], *score = block->mass; /* not yet in use */
    int64_t seen = 0, forced = 0;
    memset(block->given, 0, (size_t)apa_call_tiles(call));
    if (recipe->select <= APA_SELECT_NONE || !apa_reference_may_heat(recipe) || block->tile_end == 0)
        return;
    for (int64_t t = block->tile_first; t < block->tile_end; ++t) {
        score[t] = -INFINITY;
        seen += seen_by_any(block, t);
    }
    for (int64_t g = 0; g < call->G; ++g) {
        if (!mean_query(block, block->head->h * call->G + g, mean))
            continue;
        for (int64_t t = block->tile_first; t < block->tile_end; ++t) {
            const double own = seen_by_any(block, t) ? tile_score(block, mean, t) : -INFINITY;
            score[t] = own > score[t] ? own : score[t];
        }
    }
    if (recipe->force_sink == APA_TOGGLE_ON && block->tile_first == 0)
        block->given[0] = 1;
    if (recipe->force_diagonal == APA_TOGGLE_ON)
        block->given[block->tile_end - 1] = 1;
    for (int64_t t = block->tile_first; t < block->tile_end; ++t)
        forced += block->given[t];
    take_best(block, score, apa_reference_select_count(call, seen) - forced);
}
