/* Verdicts that need the whole row first: the walk has scored every tile, λ is final, and nothing but forced and
 * selected tiles is placed yet (all stand as hot). What is cold after all is scored once more and joins the cold state,
 * in walk order.
 *
 *   cold_budget  the largest shares are made hot until the cold rest of every row is at most ε
 *   mass_value   a tile is hot if its share · score error · distance of its values from the output exceeds ε in some
 * row */
#include "reference/internal.h"

#include <math.h>
#include <string.h>

/* ---- cold_budget ---- */

/* The visit of the largest share of a row that is over its budget, among those that are still pending; -1: none. */
static int64_t largest_share(const apa_reference_block *block, const uint8_t *pending, const bool *over)
{
    const int64_t tiles = apa_call_tiles(block->call);
    double most = 0;
    int64_t best = -1;
    for (int64_t r = 0; r < block->rows; ++r)
        for (int64_t k = 0; k < apa_reference_visits(block) && over[r]; ++k)
            if (pending[k] && block->mass[r * tiles + k] > most) {
                best = k;
                most = block->mass[r * tiles + k];
            }
    return best;
}

/* mass becomes the shares of λ_final, 0 where the row does not see the tile or it is not to be judged; cold: their
 * sums. */
static void take_shares(apa_reference_block *block, uint8_t *pending, double *cold)
{
    const int64_t tiles = apa_call_tiles(block->call);
    for (int64_t k = 0; k < apa_reference_visits(block); ++k) {
        const int64_t t = apa_reference_visit_tile(block, k);
        pending[k] = block->verdict[t] == APA_VERDICT_HOT && !apa_reference_stays_hot(block, t);
        for (int64_t r = 0; r < block->rows; ++r) {
            double *share = &block->mass[r * tiles + k];
            const bool counts = pending[k] && apa_reference_sees(block, r, t);
            *share = counts ? exp2(*share - apa_reference_mass_log2(block->row[r].lambda)) : 0.0;
            cold[r] += *share;
        }
    }
}

/* Tiles are made hot, the largest share of a row that is over its budget first, until what stays cold is at most ε of λ
 * in every row. */
void apa_reference_cold_budget(apa_reference_block *block)
{
    const int64_t tiles = apa_call_tiles(block->call);
    uint8_t *pending = block->given + tiles; /* [visits] */
    double cold[APA_REFERENCE_ROWS] = {0};
    bool over[APA_REFERENCE_ROWS] = {false};
    take_shares(block, pending, cold);
    for (;;) {
        for (int64_t r = 0; r < block->rows; ++r)
            over[r] = cold[r] > block->eps;
        const int64_t k = largest_share(block, pending, over);
        if (k < 0)
            break;
        pending[k] = 0;
        for (int64_t r = 0; r < block->rows; ++r)
            cold[r] -= block->mass[r * tiles + k];
    }
    for (int64_t k = 0; k < apa_reference_visits(block); ++k)
        if (pending[k])
            apa_reference_demote(block, apa_reference_visit_tile(block, k));
}

/* ---- mass_value ---- */

/* share · score error · ‖v̄ - o‖/‖o‖ of the scored tile of visit k in a row, with o the output if every tile were cold.
 * The error of a score, natural units, from the norms of what rounding leaves out, as if it pointed anywhere in D
 * dimensions: |scale|·(‖δq‖‖k‖ + ‖q‖‖δk‖)/√D. */
static double value_at_stake(apa_reference_block *block, int64_t r, int64_t k, int64_t t)
{
    const apa_call *call = block->call;
    const apa_reference_row *row = &block->row[r];
    const double *o = block->middle + r * call->Dv;
    double mean[APA_REFERENCE_DIM_MAX], apart = 0, norm = 0;
    const double share = exp2(block->mass[r * apa_call_tiles(call) + k] - apa_reference_mass_log2(row->lambda));
    const double error = fabs(call->scale) *
                         (row->q_error * block->head->k_norm[t] + row->q_norm * block->head->k_error[t]) /
                         sqrt((double)call->D);
    apa_reference_tile_values(block, r, t, mean);
    for (int64_t c = 0; c < call->Dv; ++c) {
        apart += (mean[c] - o[c]) * (mean[c] - o[c]);
        norm += o[c] * o[c];
    }
    return share * error * sqrt(apart / (norm > 0 ? norm : 1.0));
}

/* The state that all tiles made is taken as the output to compare with, and begins anew. */
static void take_middle(apa_reference_block *block)
{
    const int64_t Dv = block->call->Dv;
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        const double frame = row->cold_frame + apa_reference_tau(&block->call->recipe);
        double all = row->cold_sum; /* and the sink, which λ has: without values, but in the denominator */
        if (row->sink != -INFINITY)
            all = exp2(apa_reference_mass_log2(row->lambda) - frame);
        for (int64_t c = 0; c < Dv; ++c)
            block->middle[r * Dv + c] = row->cold_sum > 0 ? block->cold[r * Dv + c] / all : 0.0;
        row->cold_frame = -INFINITY;
        row->cold_sum = 0;
    }
    memset(block->cold, 0, sizeof(double) * (size_t)(block->rows * Dv));
}

void apa_reference_mass_value(apa_reference_block *block)
{
    take_middle(block);
    for (int64_t k = 0; k < apa_reference_visits(block); ++k) {
        const int64_t t = apa_reference_visit_tile(block, k);
        bool hot = false;
        if (block->verdict[t] != APA_VERDICT_HOT || apa_reference_stays_hot(block, t))
            continue;
        apa_reference_cold_scores(block, t);
        apa_reference_load_values(block, t);
        for (int64_t r = 0; r < block->rows && !hot; ++r)
            hot = apa_reference_sees(block, r, t) && block->row[r].p_sum > 0 &&
                  value_at_stake(block, r, k, t) > block->eps;
        if (hot)
            continue;
        block->verdict[t] = APA_VERDICT_COLD;
        apa_reference_cold_add(block, t);
    }
}
