/* The walk of one group over its tiles: order, the running sum λ, verdicts, and the second look.
 *
 * A visited tile gives every row that sees it ℓ_t, the sum of its quantised probabilities. It is a candidate for the
 * exact pass if ℓ_t > ε·(λ + ℓ_t) in some real row that sees it, λ being the row's sum over the tiles seen before (and
 * Jensen's bound of those still to come: by convexity Σ_j 2^(s_j) >= n·2^(mean s) with mean s = q·k̄_t). With the second
 * look λ is complete before the verdict falls: candidates with ℓ_t <= ε·λ_final in every such row join the cold state
 * after the walk, in walk order, their probabilities rounded anew in the frame that the state has by then.
 *
 * λ is kept as sum·2^frame with its own frame, the highest one met, so that no score however large overflows it. Tiles
 * that are hot without being judged (non-finite values) are not scored and add nothing to λ: λ is then too small, which
 * can only make more tiles hot. */
#include "reference/internal.h"

#include <math.h>
#include <string.h>

/* ---- masses ---- */

static void mass_add(apa_reference_mass *mass, double frame, double sum)
{
    if (!(sum > 0))
        return;
    if (frame > mass->frame) {
        mass->sum = mass->sum * exp2(mass->frame - frame) + sum;
        mass->frame = frame;
    } else {
        mass->sum += sum * exp2(frame - mass->frame);
    }
}

/* ---- order ---- */

int64_t apa_reference_visit_tile(const apa_reference_block *block, int64_t k)
{
    switch (block->call->recipe.order) {
    case APA_ORDER_FORWARD:
        return block->tile_first + k;
    case APA_ORDER_REVERSE:
        return block->tile_end - 1 - k;
    default: /* the sink tile first where the group sees it, then backwards */
        if (block->tile_first > 0)
            return block->tile_end - 1 - k;
        return k == 0 ? 0 : block->tile_end - k;
    }
}

static int64_t rows_seeing(const apa_reference_block *block, int64_t t)
{
    int64_t n = 0;
    for (int64_t r = 0; r < block->rows; ++r)
        n += apa_reference_sees(block, r, t);
    return n;
}

/* ---- Jensen's start of λ ---- */

/* log2 of the bound of tile t in a row; -inf where there is none (partly visible, not judged, or scores bent by a cap,
 * whose mean is not that of the mean key). */
static double jensen_bound(const apa_reference_block *block, int64_t r, int64_t t)
{
    const apa_call *call = block->call;
    const int64_t left = call->Skv - t * APA_REFERENCE_TILE;
    const int64_t keys = left < APA_REFERENCE_TILE ? left : APA_REFERENCE_TILE;
    const double *mean = block->head->k_sum + t * call->D, *q = block->q_prepared + r * call->D;
    if (apa_reference_seen(block, r, t) != apa_reference_bits(0, keys) || apa_reference_forced(block, t) ||
        call->softcap != 0.0)
        return -INFINITY;
    double dot = 0;
    for (int64_t d = 0; d < call->D; ++d)
        dot += q[d] * mean[d];
    return log2((double)keys) + call->scale * APA_REFERENCE_LOG2E * dot +
           APA_REFERENCE_LOG2E * apa_reference_mean_addend(block, r, t);
}

/* rest[r][k] = log2 of the bounds of all visits after visit k, summed from the end: no bound is ever subtracted. */
static void sum_bounds(apa_reference_block *block)
{
    const int64_t visits = apa_reference_visits(block), tiles = apa_call_tiles(block->call);
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_mass after = {-INFINITY, 0};
        for (int64_t k = visits - 1; k >= 0; --k) {
            block->rest[r * tiles + k] = apa_reference_mass_log2(after);
            const double bound = jensen_bound(block, r, apa_reference_visit_tile(block, k));
            mass_add(&after, bound, bound == -INFINITY ? 0.0 : 1.0);
        }
    }
}

/* ---- verdicts ---- */

/* About the worst error of an INT8 score of the row, log2 units: half a step of one factor times the norm of the other,
 * both ways, with |k| <= sqrt(D)·max|k|, and a spare factor of two to three over the root mean square. */
static bool beyond_int8(const apa_reference_block *block, int64_t r)
{
    const apa_call *call = block->call;
    const double *units = block->q_units[0] + r * call->D;
    double squares = 0;
    const bool int8 = call->recipe.qk_format == APA_QK_FORMAT_INT8 && call->recipe.exact_q != APA_TOGGLE_ON &&
                      call->recipe.exact_k != APA_TOGGLE_ON;
    if (!int8 || call->recipe.verdict == APA_VERDICT_RULE_NONE || !apa_reference_may_heat(&call->recipe))
        return false;
    for (int64_t d = 0; d < call->D; ++d)
        squares += units[d] * units[d];
    const double error =
        block->row[r].q_scale[0] * (127.0 * sqrt((double)call->D) + sqrt(squares)) * block->head->k_scale_max;
    return error * fabs(call->scale) * APA_REFERENCE_LOG2E > APA_REFERENCE_SCORE_ERROR_MAX;
}

/* Is the row's place among the keys (without a mask: among the queries) before early_rows? */
static bool early_row(const apa_call *call, const apa_reference_row *row)
{
    const int64_t offset = call->causal ? call->q_offset : 0;
    return offset < call->recipe.early_rows && row->position < call->recipe.early_rows - offset;
}

/* ε of the group: by the most tiles that a row of it sees. */
static double group_eps(const apa_reference_block *block)
{
    int64_t most = 0;
    for (int64_t r = 0; r < block->rows; ++r) {
        const apa_reference_row *row = &block->row[r];
        const int64_t seen = row->real ? apa_reference_row_tiles(row) : 0;
        most = seen > most ? seen : most;
    }
    return apa_recipe_group_eps(&block->call->recipe, apa_call_tiles(block->call), most);
}

/* Is the group hot whatever λ says: forced or ε < 0, a query that is not finite or beyond what INT8 can judge, few
 * tiles, or an early row? */
static bool hot_throughout(const apa_reference_block *block)
{
    const apa_recipe *recipe = &block->call->recipe;
    const bool may = apa_reference_may_heat(recipe);
    bool early = may && recipe->early_tiles > 0, hybrid = false, finite = true;
    if (apa_reference_all_hot(recipe))
        return true;
    for (int64_t r = 0; r < block->rows; ++r) {
        const apa_reference_row *row = &block->row[r];
        const int64_t seen = apa_reference_row_tiles(row);
        if (!row->real || seen == 0)
            continue;
        early = early && seen <= recipe->early_tiles;
        hybrid = hybrid || (may && early_row(block->call, row));
        finite = finite && row->finite && !beyond_int8(block, r);
    }
    return early || hybrid || !finite;
}

/* After cold_scores: is the tile of visit k a candidate? Then λ takes it in. */
static bool judge(apa_reference_block *block, int64_t k, int64_t t)
{
    const apa_recipe *recipe = &block->call->recipe;
    const bool may = apa_reference_may_heat(recipe) && recipe->verdict == APA_VERDICT_RULE_MASS;
    const int64_t tiles = apa_call_tiles(block->call);
    bool candidate = false;
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        if (!apa_reference_sees(block, r, t))
            continue;
        mass_add(&row->lambda, row->p_frame, row->p_sum);
        apa_reference_mass all = row->lambda;
        if (recipe->lambda_bound == APA_LAMBDA_BOUND_JENSEN && block->rest[r * tiles + k] != -INFINITY)
            mass_add(&all, block->rest[r * tiles + k], 1.0);
        const double own = row->p_sum * exp2(row->p_frame - all.frame);
        candidate = candidate || (may && row->p_sum > 0 && own > block->eps * all.sum);
        block->mass[r * tiles + k] = row->p_sum > 0 ? row->p_frame + log2(row->p_sum) : -INFINITY;
    }
    return candidate;
}

/* A hot tile may lift the cold frame, but only to δ under its own (where P needs a frame). */
static void lift_frames(apa_reference_block *block)
{
    if (!apa_reference_framed(&block->call->recipe))
        return;
    for (int64_t r = 0; r < block->rows; ++r)
        if (block->row[r].next != -INFINITY)
            apa_reference_cold_move(block, r, block->row[r].next - block->call->recipe.frame_drop);
}

void apa_reference_demote(apa_reference_block *block, int64_t t)
{
    block->verdict[t] = APA_VERDICT_COLD;
    apa_reference_cold_scores(block, t);
    apa_reference_cold_add(block, t);
}

static void second_look(apa_reference_block *block)
{
    const int64_t tiles = apa_call_tiles(block->call);
    for (int64_t k = 0; k < apa_reference_visits(block); ++k) {
        const int64_t t = apa_reference_visit_tile(block, k);
        bool hot = apa_reference_stays_hot(block, t);
        if (block->verdict[t] != APA_VERDICT_HOT)
            continue;
        for (int64_t r = 0; r < block->rows && !hot; ++r)
            hot = apa_reference_sees(block, r, t) &&
                  exp2(block->mass[r * tiles + k] - apa_reference_mass_log2(block->row[r].lambda)) > block->eps;
        if (!hot)
            apa_reference_demote(block, t);
    }
}

/* ---- the walk ---- */

/* Does the verdict need the whole row first (verdict.c)? */
static bool judges_last(const apa_recipe *recipe)
{
    return apa_reference_may_heat(recipe) &&
           (recipe->verdict == APA_VERDICT_RULE_COLD_BUDGET || recipe->verdict == APA_VERDICT_RULE_MASS_VALUE);
}

static void visit(apa_reference_block *block, int64_t k)
{
    const apa_recipe *recipe = &block->call->recipe;
    const int64_t t = apa_reference_visit_tile(block, k);
    block->verdict[t] = APA_VERDICT_HOT;
    if (apa_reference_forced(block, t))
        return;
    if (recipe->verdict == APA_VERDICT_RULE_LAMP) {
        block->verdict[t] = APA_VERDICT_COLD;
        apa_reference_lamp_tile(block, t);
        return;
    }
    apa_reference_cold_scores(block, t);
    const bool hot = judge(block, k, t) || block->given[t];
    if (judges_last(recipe)) {
        if (recipe->verdict == APA_VERDICT_RULE_MASS_VALUE)
            apa_reference_cold_add(block, t);
    } else if (hot) {
        lift_frames(block);
    } else {
        block->verdict[t] = APA_VERDICT_COLD;
        apa_reference_cold_add(block, t);
    }
}

static void count(apa_reference_block *block)
{
    for (int64_t t = block->tile_first; t < block->tile_end; ++t) {
        const int64_t n = rows_seeing(block, t);
        block->visible += n;
        block->hot_count += block->verdict[t] == APA_VERDICT_HOT ? n : 0;
        block->cold_count += block->verdict[t] == APA_VERDICT_COLD ? n : 0;
    }
}

/* After the visits, with λ complete. */
static void last_verdicts(apa_reference_block *block)
{
    const apa_recipe *recipe = &block->call->recipe;
    if (judges_last(recipe) && recipe->verdict == APA_VERDICT_RULE_COLD_BUDGET)
        apa_reference_cold_budget(block);
    else if (judges_last(recipe))
        apa_reference_mass_value(block);
    else if (recipe->second_look == APA_TOGGLE_ON)
        second_look(block);
}

void apa_reference_walk(apa_reference_block *block)
{
    const apa_recipe *recipe = &block->call->recipe;
    const int64_t visits = apa_reference_visits(block);
    const bool throughout = hot_throughout(block);
    block->eps = group_eps(block);
    memset(block->verdict, APA_VERDICT_INVISIBLE, (size_t)apa_call_tiles(block->call));
    if (!throughout && recipe->lambda_bound == APA_LAMBDA_BOUND_JENSEN)
        sum_bounds(block);
    if (!apa_reference_all_hot(recipe))
        apa_reference_select(block);
    for (int64_t k = 0; k < visits; ++k) {
        const int64_t t = apa_reference_visit_tile(block, k), n = rows_seeing(block, t);
        if (n == 0)
            continue;
        if (throughout)
            block->verdict[t] = APA_VERDICT_HOT;
        else
            visit(block, k);
        block->candidates += block->verdict[t] == APA_VERDICT_HOT ? n : 0;
    }
    if (!throughout)
        last_verdicts(block);
    count(block);
}
