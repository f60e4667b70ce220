/* LampAttention (arXiv 2609.39361): scores of a tile in simulated 8 bits, the sensitive sub-blocks again in 16.
 *
 * Per row and tile, natural units, M the running maximum, α the running sum moved to M:
 *     low    z = scale·q·k summed 16 products at a time in E4M3;  y = UE5M3(M - z);   p = UE5M3(e^-y)
 *     high   the same in E4M11;                                   y = UE5M11(M - z);  p = UE5M11(e^-y)
 * A sub-block is `sub_block` keys; a choice holds for all rows of the group, and a sub-block is high if any row wants
 * it.
 *
 * Stage 1. Sub-blocks in falling order of threat, their largest low score. The first one whose threat is at most M -
 * margin ends the stage; each one before it is recomputed, and M rises to its high scores. So M is set by high scores.
 * Stage 2. With Y_b the share of sub-block b in α + Σ p: the largest low sub-blocks are recomputed until Σ_low Y_b <=
 * τ. Why: η(z) = e^z/(α + Σ e^z) moves by dη_i = η_i·(δ_i - Σ_j η_j δ_j) for score errors δ, so ‖dη‖₁ <= 2·Σ η_j(1 -
 * η_j)|δ_j|, and with |δ_j| <= u on low entries and the carried state exact, ‖dη‖₁ <= 2u·Σ_low η_j: the mass of what
 * stays low is the bound in units of 2u, and τ limits it. All sub-blocks cost the same, so taking the largest first
 * needs the fewest. τ >= 1 recomputes nothing. M stays what stage 1 made it; a high score above it has y = 0. Without
 * stage 1, M is the largest low score. force=low: no stage runs; force=high: every sub-block is high.
 *
 * α, o and their moves are double: the paper's 16-bit registers of o are not modelled. p and V are multiplied exactly.
 */
#include "reference/internal.h"

#include <math.h>
#include <string.h>

#define STEP 16
#define SUB_BLOCKS_MAX (APA_REFERENCE_TILE / 4)

static const apa_reference_grid e4m11 = {11, -6, 511.75, 511.75};
static const apa_reference_grid ue5m3 = {3, -14, 114688.0, 114688.0};
static const apa_reference_grid ue5m11 = {11, -14, 131008.0, 131008.0};

static double summed_score(const apa_call *call, const double *q, const double *key, const apa_reference_grid *grid)
{
    double sum = 0;
    for (int64_t d = 0; d < call->D; d += STEP) {
        double part = 0;
        for (int64_t i = d; i < d + STEP && i < call->D; ++i)
            part += call->scale * q[i] * key[i * APA_REFERENCE_TILE];
        sum = apa_reference_round(grid, sum + part);
    }
    return sum;
}

/* Scores of sub-block b in a row; returns the largest, -inf if nothing is seen. */
static double score_sub_block(apa_reference_block *block, int64_t r, int64_t t, int64_t b,
                              const apa_reference_grid *grid)
{
    const apa_call *call = block->call;
    const int64_t size = call->recipe.sub_block;
    double *s = block->p + r * APA_REFERENCE_TILE, top = -INFINITY;
    int64_t lo, hi;
    apa_reference_span(&block->row[r], t, &lo, &hi);
    for (int64_t j = b * size; j < (b + 1) * size; ++j) {
        s[j] = j < lo || j >= hi ? -INFINITY : summed_score(call, block->q_units[0] + r * call->D, block->kt + j, grid);
        top = s[j] > top ? s[j] : top;
    }
    return top;
}

/* The tile of one row: threats, and the running maximum that its exponentials are taken against. */
typedef struct lamp_row {
    double threat[SUB_BLOCKS_MAX], M;
} lamp_row;

/* Sub-block of the largest threat that is not yet in `done`; -1: none. */
static int64_t next_threat(const lamp_row *row, const bool *done, int64_t n)
{
    int64_t best = -1;
    for (int64_t b = 0; b < n; ++b)
        if (!done[b] && row->threat[b] > -INFINITY && (best < 0 || row->threat[b] > row->threat[best]))
            best = b;
    return best;
}

/* Sub-blocks that stage 1 recomputes for the row join `high`. Scores of the row are made high as it goes. */
static void first_stage(apa_reference_block *block, int64_t r, int64_t t, int64_t n, lamp_row *row, bool *high)
{
    bool done[SUB_BLOCKS_MAX] = {false};
    for (;;) {
        const int64_t b = next_threat(row, done, n);
        if (b < 0 || row->threat[b] <= row->M - block->call->recipe.margin)
            return;
        done[b] = high[b] = true;
        const double top = score_sub_block(block, r, t, b, &e4m11);
        row->M = top > row->M ? top : row->M;
    }
}

static double mass_of(const apa_reference_block *block, int64_t r, int64_t b, double M, bool high)
{
    const int64_t size = block->call->recipe.sub_block;
    const double *s = block->p + r * APA_REFERENCE_TILE;
    const apa_reference_grid *grid = high ? &ue5m11 : &ue5m3;
    double sum = 0;
    for (int64_t j = b * size; j < (b + 1) * size; ++j) {
        const double y = M - s[j];
        if (s[j] > -INFINITY)
            sum += apa_reference_round(grid, exp(-apa_reference_round(grid, y > 0 ? y : 0)));
    }
    return sum;
}

/* The low sub-blocks that stage 2 recomputes for the row join `high`. */
static void second_stage(apa_reference_block *block, int64_t r, int64_t n, const lamp_row *row, bool *high)
{
    const apa_reference_row *state = &block->row[r];
    double mass[SUB_BLOCKS_MAX], low = 0;
    double all = state->hot_sum > 0 ? state->hot_sum * exp(state->hot_max - row->M) : 0;
    bool wants[SUB_BLOCKS_MAX];
    for (int64_t b = 0; b < n; ++b) {
        mass[b] = mass_of(block, r, b, row->M, high[b]);
        wants[b] = high[b];
        all += mass[b];
        low += high[b] ? 0 : mass[b];
    }
    while (low > block->call->recipe.tau * all) {
        int64_t best = -1;
        for (int64_t b = 0; b < n; ++b)
            if (!wants[b] && mass[b] > 0 && (best < 0 || mass[b] > mass[best]))
                best = b;
        if (best < 0)
            break;
        wants[best] = true;
        low = 0; /* summed anew: no rounding is left over when nothing stays low */
        for (int64_t b = 0; b < n; ++b)
            low += wants[b] ? 0 : mass[b];
    }
    memcpy(high, wants, sizeof *wants * (size_t)n);
}

/* The row's exponentials join its state. */
static void add_row(apa_reference_block *block, int64_t r, int64_t t, double M, const bool *high)
{
    const apa_call *call = block->call;
    apa_reference_row *row = &block->row[r];
    double *p = block->p + r * APA_REFERENCE_TILE, *o = block->hot + r * call->Dv;
    int64_t lo, hi;
    apa_reference_span(row, t, &lo, &hi);
    if (M > row->hot_max) {
        const double move = exp(row->hot_max - M);
        row->hot_sum *= move;
        for (int64_t c = 0; c < call->Dv; ++c)
            o[c] *= move;
        row->hot_max = M;
    }
    for (int64_t j = lo; j < hi; ++j) {
        const apa_reference_grid *grid = high[j / call->recipe.sub_block] ? &ue5m11 : &ue5m3;
        const double y = M - p[j];
        p[j] = apa_reference_round(grid, exp(-apa_reference_round(grid, y > 0 ? y : 0)));
        row->hot_sum += p[j];
    }
    apa_reference_weighted_sum(p, block->v, call->Dv, apa_reference_bits(lo, hi), o);
}

static void choose(apa_reference_block *block, int64_t t, int64_t n, lamp_row *rows, bool *high)
{
    const apa_recipe *recipe = &block->call->recipe;
    bool first[SUB_BLOCKS_MAX] = {false}, second[SUB_BLOCKS_MAX] = {false};
    for (int64_t r = 0; r < block->rows; ++r)
        if (apa_reference_sees(block, r, t) && recipe->lamp_stages != APA_LAMP_STAGES_SECOND)
            first_stage(block, r, t, n, &rows[r], first);
    for (int64_t r = 0; r < block->rows; ++r) { /* what one row recomputes is high for all */
        if (!apa_reference_sees(block, r, t))
            continue;
        for (int64_t b = 0; b < n; ++b) {
            const double top = first[b] ? score_sub_block(block, r, t, b, &e4m11) : rows[r].threat[b];
            rows[r].M =
                top > rows[r].M && (first[b] || recipe->lamp_stages == APA_LAMP_STAGES_SECOND) ? top : rows[r].M;
        }
    }
    memcpy(second, first, sizeof second);
    for (int64_t r = 0; r < block->rows && recipe->lamp_stages != APA_LAMP_STAGES_FIRST; ++r) {
        bool own[SUB_BLOCKS_MAX];
        if (!apa_reference_sees(block, r, t))
            continue;
        memcpy(own, first, sizeof own);
        second_stage(block, r, n, &rows[r], own);
        for (int64_t b = 0; b < n; ++b)
            second[b] = second[b] || own[b];
    }
    for (int64_t r = 0; r < block->rows; ++r)
        for (int64_t b = 0; b < n; ++b)
            if (second[b] && !first[b] && apa_reference_sees(block, r, t))
                score_sub_block(block, r, t, b, &e4m11);
    memcpy(high, second, sizeof second);
}

static void count_tile(apa_reference_block *block, int64_t t, int64_t n, const bool *high)
{
    const int64_t size = block->call->recipe.sub_block;
    for (int64_t r = 0; r < block->rows; ++r) {
        int64_t lo, hi, recomputed = 0;
        if (!apa_reference_sees(block, r, t))
            continue;
        apa_reference_span(&block->row[r], t, &lo, &hi);
        for (int64_t b = lo / size; b * size < hi && b < n; ++b) {
            block->lamp.sub_blocks += 1;
            recomputed += high[b];
        }
        block->lamp.recomputed += recomputed;
        block->lamp.tiles += 1;
        block->lamp.disruptive += recomputed >= 2;
    }
}

void apa_reference_lamp_tile(apa_reference_block *block, int64_t t)
{
    const apa_recipe *recipe = &block->call->recipe;
    const int64_t n = APA_REFERENCE_TILE / recipe->sub_block;
    const apa_reference_grid *grid = recipe->force == APA_FORCE_HIGH ? &e4m11 : &apa_reference_e4m3;
    bool high[SUB_BLOCKS_MAX] = {false};
    lamp_row rows[APA_REFERENCE_ROWS];
    apa_reference_cold_load(block, t);
    apa_reference_load_values(block, t);
    for (int64_t r = 0; r < block->rows; ++r) {
        double top = -INFINITY;
        if (!apa_reference_sees(block, r, t))
            continue;
        for (int64_t b = 0; b < n; ++b) {
            rows[r].threat[b] = score_sub_block(block, r, t, b, grid);
            top = rows[r].threat[b] > top ? rows[r].threat[b] : top;
        }
        rows[r].M = block->row[r].hot_max;
        if (recipe->force != APA_FORCE_NONE && top > rows[r].M)
            rows[r].M = top;
    }
    if (recipe->force == APA_FORCE_NONE)
        choose(block, t, n, rows, high);
    else
        for (int64_t b = 0; b < n; ++b)
            high[b] = recipe->force == APA_FORCE_HIGH;
    for (int64_t r = 0; r < block->rows; ++r)
        if (apa_reference_sees(block, r, t))
            add_row(block, r, t, rows[r].M, high);
    count_tile(block, t, n, high);
}
