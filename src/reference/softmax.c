/* The exact pass in two other orders: S and P held whole, and as a balanced tree.
 *
 * Whole (standard attention): S = the score (scores.c) rounded to s_format; m = max S; l = Σ e^(S - m); P = e^(S - m)/l
 * rounded to p_format; o = P·V, 16 keys at a time in exact_accum. Three passes over the keys form S anew each time, so
 * nothing is stored. The LSE is that of the rounded S. S beyond f16 is infinite, and the row NaN, as it is in an f16
 * framework.
 *
 * Tree (ELSA; Hsu et al. 2026): every key is a state (m, S, W) = (s, 1, v), and
 *     (m₁, S₁, W₁) ⊕ (m₂, S₂, W₂) = (m, S₁·e^(m₁-m) + S₂·e^(m₂-m), W₁·e^(m₁-m) + W₂·e^(m₂-m)),   m = max(m₁, m₂),
 * each operation rounded to FP32 (or none in f64). States of equal size are merged as keys come (a binary counter), so
 * a row needs one state per level; what is left over at the end is merged from the smallest up. Keys count from the
 * row's first. */
#include "reference/internal.h"

#include <math.h>
#include <string.h>

#define TREE_LEVELS 48

/* Natural scores of a tile's keys in double; those of keys that are not seen mean nothing. */
static void scores(const apa_reference_block *block, int64_t r, int64_t t, double *s)
{
    apa_reference_dots(block->q + r * block->call->D, block->kt, block->call->D, s);
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j)
        s[j] *= block->call->scale;
    apa_reference_bend(block, r, t, s);
}

/* ---- whole ---- */

static double kept_score(const apa_reference_block *block, double s)
{
    return block->call->recipe.s_format == APA_KEPT_EXACT
               ? apa_reference_to(block->call->recipe.exact_accum == APA_ACCUMULATOR_F64 ? APA_ACCUMULATOR_F64
                                                                                         : APA_ACCUMULATOR_F32,
                                  s)
               : apa_reference_keep(block->call->recipe.s_format, s);
}

/* o += P·V of the keys that are seen, 16 at a time. */
static void whole_values(apa_reference_block *block, const double *p, uint64_t seen, double *o)
{
    const apa_call *call = block->call;
    double product[16];
    for (int64_t c = 0; c < call->Dv; ++c)
        for (int64_t j = 0; j < APA_REFERENCE_TILE; j += 16) {
            int64_t n = 0;
            for (int64_t i = j; i < j + 16; ++i)
                if ((seen >> i & 1) != 0)
                    product[n++] = p[i] * block->v[i * call->Dv + c];
            o[c] = n == 0 ? o[c] : apa_reference_step(call->recipe.exact_accum, o[c], product, n);
        }
}

static void whole_row(apa_reference_block *block, int64_t r, int64_t t, int pass)
{
    const apa_call *call = block->call;
    apa_reference_row *row = &block->row[r];
    const uint64_t seen = apa_reference_seen(block, r, t);
    double s[APA_REFERENCE_TILE];
    scores(block, r, t, s);
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        if ((seen >> j & 1) == 0)
            continue;
        s[j] = kept_score(block, s[j]);
        if (pass == 0)
            row->hot_max = s[j] > row->hot_max ? s[j] : row->hot_max;
        else
            s[j] = s[j] == -INFINITY ? 0.0 : exp(s[j] - row->hot_max);
        if (pass == 1)
            row->hot_sum = apa_reference_to(call->recipe.exact_accum == APA_ACCUMULATOR_F64 ? APA_ACCUMULATOR_F64
                                                                                            : APA_ACCUMULATOR_F32,
                                            row->hot_sum + s[j]);
        else if (pass == 2)
            s[j] = apa_reference_keep(call->recipe.p_format, s[j] / row->hot_sum);
    }
    if (pass == 2)
        whole_values(block, s, seen, block->hot + r * call->Dv);
}

/* The sink is a score like the others, of a key without a value: it is in the maximum and in the sum. After the pass it
 * is part of the row's state. */
static void take_sinks(apa_reference_block *block, int pass)
{
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        const double sink = row->sink == -INFINITY ? -INFINITY : kept_score(block, row->sink);
        if (!row->real || row->first >= row->end || sink == -INFINITY)
            continue;
        if (pass == 0)
            row->hot_max = sink;
        else
            row->hot_sum = sink == row->hot_max ? 1.0 : exp(sink - row->hot_max);
        row->sink = pass == 0 ? row->sink : -INFINITY;
    }
}

void apa_reference_exact_whole(apa_reference_block *block)
{
    for (int pass = 0; pass < 3; ++pass) {
        if (pass < 2)
            take_sinks(block, pass);
        for (int64_t t = block->tile_first; t < block->tile_end; ++t) {
            apa_reference_load_tile(block, t);
            for (int64_t r = 0; r < block->rows; ++r)
                if (apa_reference_sees(block, r, t))
                    whole_row(block, r, t, pass);
        }
    }
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        if (row->hot_sum == 0)
            continue;
        row->hot_max += log(row->hot_sum); /* o is normalised: the state of one unit of mass */
        row->hot_sum = 1;
    }
}

/* ---- tree ---- */

/* States of one row, the largest first. */
typedef struct tree {
    double *state; /* [levels][2 + Dv]: m, S, W */
    int8_t level[TREE_LEVELS];
    int depth;
} tree;

static double rounded(const apa_call *call, double x)
{
    return apa_reference_to(call->recipe.exact_accum, x);
}

int64_t apa_reference_tree_doubles(const apa_call *call)
{
    return TREE_LEVELS * (call->Dv + 2);
}

/* The last two states become one. */
static void merge_last(const apa_call *call, tree *t)
{
    const int64_t size = call->Dv + 2;
    double *a = t->state + (t->depth - 2) * size, *b = a + size;
    const double m = a[0] > b[0] ? a[0] : b[0];
    const double u = a[0] == m ? 1.0 : rounded(call, exp(rounded(call, a[0] - m)));
    const double w = b[0] == m ? 1.0 : rounded(call, exp(rounded(call, b[0] - m)));
    --t->depth;
    ++t->level[t->depth - 1];
    a[0] = m;
    if (call->recipe.exact_accum == APA_ACCUMULATOR_F32) /* the same sums, in float arithmetic */
        for (int64_t i = 1; i < size; ++i)
            a[i] = (double)((float)a[i] * (float)u + (float)b[i] * (float)w);
    else
        for (int64_t i = 1; i < size; ++i)
            a[i] = a[i] * u + b[i] * w;
}

static void push_key(const apa_call *call, tree *t, double s, const double *v)
{
    double *leaf = t->state + t->depth * (call->Dv + 2);
    const double one = s == -INFINITY ? 0.0 : exp(s - s); /* NaN of an infinite or NaN score, as in the other orders */
    leaf[0] = rounded(call, s);
    leaf[1] = one;
    for (int64_t c = 0; c < call->Dv; ++c)
        leaf[2 + c] = rounded(call, one * v[c]);
    t->level[t->depth++] = 0;
    while (t->depth > 1 && t->level[t->depth - 1] == t->level[t->depth - 2])
        merge_last(call, t);
}

static void push_tile(apa_reference_block *block, int64_t r, int64_t t, tree *to)
{
    const apa_call *call = block->call;
    const uint64_t seen = apa_reference_seen(block, r, t);
    double s[APA_REFERENCE_TILE];
    scores(block, r, t, s);
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j)
        if ((seen >> j & 1) != 0)
            push_key(call, to, s[j], block->v + j * call->Dv);
}

void apa_reference_exact_tree(apa_reference_block *block)
{
    const apa_call *call = block->call;
    tree trees[APA_REFERENCE_ROWS];
    for (int64_t r = 0; r < block->rows; ++r)
        trees[r] = (tree){.state = block->tree + r * apa_reference_tree_doubles(call)};
    for (int64_t t = block->tile_first; t < block->tile_end; ++t) {
        apa_reference_load_tile(block, t);
        for (int64_t r = 0; r < block->rows; ++r)
            if (apa_reference_sees(block, r, t))
                push_tile(block, r, t, &trees[r]);
    }
    for (int64_t r = 0; r < block->rows; ++r) {
        if (trees[r].depth == 0)
            continue;
        while (trees[r].depth > 1)
            merge_last(call, &trees[r]);
        block->row[r].hot_max = trees[r].state[0];
        block->row[r].hot_sum = trees[r].state[1];
        memcpy(block->hot + r * call->Dv, trees[r].state + 2, sizeof(double) * (size_t)call->Dv);
    }
}
