/* Pairs taken apart: by hand, and against a plain softmax; worst pairs, histograms, heads; error by operand. */
#include "support/test.h"

#include "apa/eval.h"

#include "support/problems.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static apa_context *context;

static void near(double found, double expected, double tolerance)
{
    if (!(fabs(found - expected) <= tolerance))
        print_error("found %.17g, expected %.17g\n", found, expected);
    assert_true(fabs(found - expected) <= tolerance);
}

static double square(double x)
{
    return x * x;
}

/* ------------------------------------------------------------------------------- taking apart, by hand */

/* One head, one channel, four keys in two tiles of two; exp(k) are 1, 2, 3, 4, so with q = 1 and scale 1 the
 * probabilities are .1, .2, .3, .4 and with q = 0 they are .25 each. */
static const double hand_k[4] = {0, 0.69314718055994530942, 1.0986122886681096914, 1.3862943611198906188},
                    hand_v[4] = {1, 3, -2, -1};

static apa_problem hand_problem(const double *q, int64_t Sq, const double *v)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = apa_tensor_hnd(q, APA_DTYPE_F64, 1, 1, Sq, 1);
    p.k = apa_tensor_hnd(hand_k, APA_DTYPE_F64, 1, 1, 4, 1);
    p.v = apa_tensor_hnd(v, APA_DTYPE_F64, 1, 1, 4, 1);
    p.softmax_scale = 1;
    return p;
}

static apa_pair_detail examine(const apa_problem *problem, const double *out, const uint8_t *verdicts, int64_t row)
{
    const apa_tensor o = apa_tensor_hnd(out, APA_DTYPE_F64, 1, 1, problem->q.shape[2], 1);
    const apa_pair_error pair = {0, 0, row, 0, 0};
    apa_pair_detail detail;
    assert_int_equal(apa_pairs_examine(context, problem, &o, 2, verdicts, &pair, 1, &detail), APA_STATUS_OK);
    assert_int_equal(detail.size, sizeof detail);
    assert_int_equal(detail.error.row, row);
    return detail;
}

static void by_hand(void **unused)
{
    (void)unused;
    const double q[2] = {0, 1}, out[2] = {0.5, -0.4};
    /* row 0: hot, cold; row 1: skipped, hot */
    const uint8_t verdicts[4] = {APA_VERDICT_HOT, APA_VERDICT_COLD, APA_VERDICT_SKIPPED, APA_VERDICT_HOT};
    const apa_problem p = hand_problem(q, 2, hand_v);
    apa_pair_detail d = examine(&p, out, verdicts, 0);
    /* hot (1 + 3)/4 = 1, cold (-2 - 1)/4 = -.75, together .25; the output is twice that */
    near(d.hot_norm, 1, 1e-15);
    near(d.cold_norm, 0.75, 1e-15);
    near(d.truth_norm, 0.25, 1e-15);
    near(d.cancellation, 7, 1e-13);
    near(d.cold_mass, 0.5, 1e-15);
    near(d.largest_cold_share, 0.5, 1e-15);
    assert_int_equal(d.largest_cold_tile, 1);
    near(d.out_norm, 0.5, 0);
    near(d.error.rel_l2, 1, 1e-14);
    near(d.error.cos, 1, 0);
    near(d.lse, log(4), 1e-15);
    assert_int_equal(d.position, 2); /* two queries at the end of four keys */
    assert_int_equal(d.keys, 4);
    assert_int_equal(d.tiles * 100 + d.hot_tiles * 10 + d.skipped_tiles, 210);
    d = examine(&p, out, verdicts, 1);
    /* cold .1·1 + .2·3 = .7 of mass .3, hot -.3·2 - .4 = -1: together -.3 */
    near(d.hot_norm, 1, 1e-15);
    near(d.cold_norm, 0.7, 1e-15);
    near(d.truth_norm, 0.3, 1e-15);
    near(d.cold_mass, 0.3, 1e-15);
    near(d.largest_cold_share, 0.3, 1e-15);
    assert_int_equal(d.largest_cold_tile, 0);
    near(d.cancellation, 1.7 / 0.3, 1e-13);
    near(d.lse, log(10), 1e-15);
    near(d.error.rel_l2, 1.0 / 3, 1e-13);
    assert_int_equal(d.tiles * 100 + d.hot_tiles * 10 + d.skipped_tiles, 211);
}

/* All hot, all cold, nothing seen, values that are 0, only half a tile visible. */
static void corners(void **unused)
{
    (void)unused;
    const double q[2] = {1, 1}, out[2] = {-0.3, 0}, zero[4] = {0, 0, 0, 0};
    const uint8_t hot[4] = {1, 1, 1, 1}, cold[4] = {0, 0, 0, 0};
    apa_problem p = hand_problem(q, 2, hand_v);
    apa_pair_detail d = examine(&p, out, hot, 0);
    near(d.cold_mass, 0, 0);
    near(d.cold_norm, 0, 0);
    near(d.cancellation, 1, 1e-14);
    near(d.largest_cold_share, 0, 0);
    assert_int_equal(d.largest_cold_tile, -1);
    near(d.error.rel_l2, 0, 1e-14);
    d = examine(&p, out, cold, 0);
    near(d.cold_mass, 1, 0);
    near(d.hot_norm, 0, 0);
    near(d.largest_cold_share, 0.7, 1e-15);
    assert_int_equal(d.largest_cold_tile, 1);
    d = examine(&p, out, cold, 1); /* an output of 0 */
    near(d.out_norm, 0, 0);
    near(d.error.cos, 0, 0);
    near(d.error.rel_l2, 1, 1e-15);
    p = hand_problem(q, 2, zero);
    d = examine(&p, out, cold, 1); /* rightly so */
    near(d.truth_norm, 0, 0);
    near(d.cancellation, 1, 0);
    near(d.error.cos, 1, 0);
    p = hand_problem(q, 2, hand_v);
    p.causal = 1;
    p.q_offset = -1; /* row 0 sees nothing, row 1 key 0 */
    d = examine(&p, out, cold, 0);
    assert_int_equal(d.tiles + d.keys, 0);
    assert_int_equal(d.position, -1);
    near(d.cold_mass, 0, 0);
    near(d.truth_norm, 0, 0);
    assert_true(isinf(d.lse) && d.lse < 0);
    d = examine(&p, out, cold, 1);
    assert_int_equal(d.tiles * 10 + d.keys, 11);
    near(d.truth_norm, 1, 0);
    near(d.lse, 0, 0);
}

/* A NaN that the row cannot see is nowhere; one that it sees is in every figure. Scores of -inf have no mass. */
static void not_finite(void **unused)
{
    (void)unused;
    const double q[1] = {1}, out[1] = {1}, v[4] = {1, 1, NAN, 1};
    const uint8_t verdicts[2] = {APA_VERDICT_HOT, APA_VERDICT_COLD};
    apa_problem p = hand_problem(q, 1, v);
    p.causal = 1;
    p.q_offset = 1;
    apa_pair_detail d = examine(&p, out, verdicts, 0);
    near(d.truth_norm, 1, 0);
    near(d.error.rel_l2, 0, 0);
    p.q_offset = 2;
    d = examine(&p, out, verdicts, 0);
    assert_true(isnan(d.truth_norm) && isnan(d.cold_norm) && !isnan(d.hot_norm) && !isnan(d.cold_mass));
    assert_true(isnan(d.error.cos) && isnan(d.error.rel_l2)); /* there is no truth to compare with */
    const double k[4] = {-INFINITY, -INFINITY, 0, 0}, fine[4] = {5, 5, 1, 1};
    p = hand_problem(q, 1, fine);
    p.k = apa_tensor_hnd(k, APA_DTYPE_F64, 1, 1, 4, 1);
    d = examine(&p, out, verdicts, 0);
    near(d.cold_mass, 1, 0);
    near(d.truth_norm, 1, 0);
    near(d.lse, log(2), 1e-15);
    const double all[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    p.k = apa_tensor_hnd(all, APA_DTYPE_F64, 1, 1, 4, 1);
    d = examine(&p, out, verdicts, 0);
    near(d.truth_norm, 0, 0);
    near(d.cold_mass, 0, 0);
    assert_true(isinf(d.lse) && d.lse < 0);
    /* logits in the thousands: no overflow */
    const double huge[4] = {1e6, 1e6, 1e6 + 1, -1e6};
    p.k = apa_tensor_hnd(huge, APA_DTYPE_F64, 1, 1, 4, 1);
    d = examine(&p, out, verdicts, 0);
    near(d.cold_mass, exp(1) / (2 + exp(1)), 1e-12);
}

static void refusals(void **unused)
{
    (void)unused;
    const double q[2] = {1, 1}, out[2] = {0, 0};
    const uint8_t verdicts[4] = {0, 0, 0, 0};
    const apa_problem p = hand_problem(q, 2, hand_v);
    const apa_tensor o = apa_tensor_hnd(out, APA_DTYPE_F64, 1, 1, 2, 1),
                     wrong = apa_tensor_hnd(out, APA_DTYPE_F64, 1, 1, 1, 2);
    const apa_pair_error outside = {0, 0, 2, 0, 0}, inside = {0, 0, 1, 0, 0};
    apa_pair_detail d;
    assert_int_equal(apa_pairs_examine(context, &p, &o, 2, verdicts, &outside, 1, &d), APA_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(apa_context_message(context), "row 2"));
    assert_int_equal(apa_pairs_examine(context, &p, &wrong, 2, verdicts, &inside, 1, &d), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_pairs_examine(context, &p, &o, 0, verdicts, &inside, 1, &d), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_pairs_examine(context, &p, &o, 2, NULL, &inside, 1, &d), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_pairs_examine(context, &p, &o, 2, verdicts, NULL, 0, NULL), APA_STATUS_OK);
}

/* ------------------------------------------------------------------------------- taking apart, against plain softmax
 */

/* The parts of one pair, all probabilities at once, keys tested one by one. */
static void check_pair(const apa_problem *p, const uint8_t *map, const apa_pair_detail *d)
{
    enum { MAX = 512, DIM = 64 };
    const int64_t Skv = p->k.shape[2], D = p->q.shape[3], Dv = p->v.shape[3],
                  kv = d->error.head / (p->q.shape[1] / p->k.shape[1]);
    double prob[MAX], part[2][DIM] = {{0}}, sum = 0, mass[8] = {0}, cold = 0, largest = 0, top = -INFINITY;
    assert_true(Skv <= MAX && Dv <= DIM);
    for (int64_t j = 0; j < Skv; j++) {
        double dot = 0;
        for (int64_t e = 0; e < D; e++)
            dot += apa_test_get(&p->q, d->error.batch, d->error.head, d->error.row, e) *
                   apa_test_get(&p->k, d->error.batch, kv, j, e);
        prob[j] = apa_test_sees(p, d->error.row, j) ? dot / sqrt((double)D) : -INFINITY;
        top = fmax(top, prob[j]);
    }
    for (int64_t j = 0; j < Skv; j++)
        sum += prob[j] = prob[j] == -INFINITY ? 0 : exp(prob[j] - top);
    for (int64_t j = 0; j < Skv && sum > 0; j++) {
        const int hot = map[j / 64] == APA_VERDICT_HOT;
        mass[j / 64] += prob[j] / sum;
        cold += hot ? 0 : prob[j] / sum;
        for (int64_t e = 0; e < Dv; e++)
            part[hot][e] += prob[j] / sum * apa_test_get(&p->v, d->error.batch, kv, j, e);
    }
    double norms[3] = {0, 0, 0};
    for (int64_t e = 0; e < Dv; e++) {
        norms[0] += square(part[0][e]);
        norms[1] += square(part[1][e]);
        norms[2] += square(part[0][e] + part[1][e]);
    }
    for (int64_t t = 0; t * 64 < Skv; t++)
        if (map[t] != APA_VERDICT_HOT && map[t] != APA_VERDICT_INVISIBLE)
            largest = fmax(largest, mass[t]);
    near(d->cold_norm, sqrt(norms[0]), 1e-12);
    near(d->hot_norm, sqrt(norms[1]), 1e-12);
    near(d->truth_norm, sqrt(norms[2]), 1e-12);
    near(d->cold_mass, cold, 1e-12);
    near(d->largest_cold_share, largest, 1e-12);
}

/* Every pair of a run of the reference engine, with masks, grouped heads, 16 bit inputs and odd layouts. */
static void against_plain_softmax(void **unused)
{
    (void)unused;
    static const struct {
        apa_dtype dtype;
        apa_test_layout layout;
        int causal;
        int64_t q_offset, left, right;
    } cases[] = {{APA_DTYPE_F16, APA_TEST_HND, 1, APA_Q_OFFSET_DEFAULT, -1, -1},
                 {APA_DTYPE_BF16, APA_TEST_NHD, 0, APA_Q_OFFSET_DEFAULT, -1, -1},
                 {APA_DTYPE_F32, APA_TEST_SLICE, 1, 150, 90, -1},
                 {APA_DTYPE_F32, APA_TEST_HND, 0, 3, 40, 70}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        const apa_test_shape shape = {2, 4, 2, 9, 300, 16, 24};
        apa_test_problem *t = apa_test_make(shape, cases[c].dtype, APA_DTYPE_F32, cases[c].layout, apa_test_seed() + c);
        t->problem.causal = cases[c].causal;
        t->problem.q_offset = cases[c].q_offset;
        t->problem.window_left = cases[c].left;
        t->problem.window_right = cases[c].right;
        enum { PAIRS = 2 * 4 * 9, TILES = 5 };
        uint8_t verdicts[PAIRS * TILES];
        apa_attention_options options;
        apa_attention_options_init(&options);
        options.engine = "reference";
        options.verdicts = verdicts;
        apa_recipe recipe;
        assert_int_equal(apa_recipe_init(&recipe, "apa"), APA_STATUS_OK);
        recipe.eps = 0.25;
        assert_int_equal(apa_attention(context, &t->problem, &recipe, &options, NULL), APA_STATUS_OK);
        apa_pair_error pairs[PAIRS];
        apa_pair_detail details[PAIRS];
        int64_t hot = 0, cold = 0;
        for (int64_t i = 0; i < PAIRS; i++)
            pairs[i] = (apa_pair_error){i / 36, i / 9 % 4, i % 9, 0, 0};
        assert_int_equal(apa_pairs_examine(context, &t->problem, &t->problem.out, 64, verdicts, pairs, PAIRS, details),
                         APA_STATUS_OK);
        for (int64_t i = 0; i < PAIRS; i++) {
            check_pair(&t->problem, verdicts + i * TILES, &details[i]);
            assert_true(details[i].error.rel_l2 < 0.1);
            hot += details[i].hot_tiles;
            cold += details[i].tiles - details[i].hot_tiles;
        }
        assert_true(hot > 0 && cold > 0); /* the case says something about both */
        apa_test_free(t);
    }
}

/* ------------------------------------------------------------------------------- lists */

static apa_tensor two_heads(const double *x)
{
    return apa_tensor_hnd(x, APA_DTYPE_F64, 1, 2, 2, 2);
}

/* equal; doubled; orthogonal; opposite */
static const double lists_x[8] = {1, 2, 6, 8, 0, 1, -1, 0}, lists_y[8] = {1, 2, 3, 4, 1, 0, 1, 0};

static void worst(void **unused)
{
    (void)unused;
    const apa_tensor x = two_heads(lists_x), y = two_heads(lists_y);
    apa_pair_error list[8];
    int64_t found;
    assert_int_equal(apa_worst_pairs(context, &x, &y, APA_WORST_BY_COS, 8, list, &found), APA_STATUS_OK);
    assert_int_equal(found, 4);
    static const int by_cos[4] = {11, 10, 0, 1}, by_rel[4] = {11, 10, 1, 0};
    for (int i = 0; i < 4; i++)
        assert_int_equal(list[i].head * 10 + list[i].row, by_cos[i]);
    near(list[0].cos, -1, 0);
    near(list[0].rel_l2, 2, 1e-15);
    near(list[1].rel_l2, sqrt(2), 1e-15);
    assert_int_equal(apa_worst_pairs(context, &x, &y, APA_WORST_BY_REL, 8, list, &found), APA_STATUS_OK);
    for (int i = 0; i < 4; i++)
        assert_int_equal(list[i].head * 10 + list[i].row, by_rel[i]);
    assert_int_equal(apa_worst_pairs(context, &x, &y, APA_WORST_BY_REL, 2, list, &found), APA_STATUS_OK);
    assert_int_equal(found, 2);
    assert_int_equal(list[1].head * 10 + list[1].row, 10);
    assert_int_equal(apa_worst_pairs(context, &x, &y, APA_WORST_BY_COS, 0, list, &found), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_worst_pairs(context, &x, &y, (apa_worst_by)7, 1, list, &found), APA_STATUS_INVALID_ARGUMENT);
    const apa_tensor other = apa_tensor_hnd(lists_y, APA_DTYPE_F64, 1, 1, 4, 2);
    assert_int_equal(apa_worst_pairs(context, &x, &other, APA_WORST_BY_COS, 1, list, &found),
                     APA_STATUS_INVALID_ARGUMENT);
}

/* A thousand pairs in random order against a sort; equals stay in their order. */
static void worst_of_many(void **unused)
{
    (void)unused;
    enum { N = 1000, WANTED = 37 };
    static double x[N], y[N];
    apa_test_rng rng = {apa_test_seed()};
    apa_pair_error list[WANTED];
    int64_t found;
    for (int i = 0; i < N; i++) {
        y[i] = 1;
        x[i] = 1 + (double)apa_test_below(&rng, 200); /* many equals */
    }
    const apa_tensor a = apa_tensor_hnd(x, APA_DTYPE_F64, 1, 1, N, 1), b = apa_tensor_hnd(y, APA_DTYPE_F64, 1, 1, N, 1);
    assert_int_equal(apa_worst_pairs(context, &a, &b, APA_WORST_BY_REL, WANTED, list, &found), APA_STATUS_OK);
    assert_int_equal(found, WANTED);
    for (int i = 0; i < WANTED; i++) {
        int worse = 0, before = 0;
        for (int j = 0; j < N; j++) {
            worse += x[j] > x[list[i].row];
            before += x[j] == x[list[i].row] && j < list[i].row;
        }
        assert_int_equal(worse + before, i);
    }
}

static void histogram(void **unused)
{
    (void)unused;
    const apa_tensor x = two_heads(lists_x), y = two_heads(lists_y);
    apa_histogram h;
    assert_int_equal(apa_histogram_measure(context, &x, &y, &h), APA_STATUS_OK);
    assert_int_equal(h.size, sizeof h);
    assert_int_equal(h.pairs, 4);
    assert_int_equal(h.cos[0], 2);  /* cosine 1 */
    assert_int_equal(h.cos[21], 2); /* 1 - cosine is 1 and 2, from 1 to under 3.16 */
    assert_int_equal(h.rel_l2[0], 1);
    assert_int_equal(h.rel_l2[21], 3); /* 1, 1.41 and 2 */
    /* half off; a hundred times too large; not finite */
    const double a[3] = {0.5, 100, NAN}, b[3] = {1, 1, 1};
    const apa_tensor u = apa_tensor_hnd(a, APA_DTYPE_F64, 1, 1, 3, 1), w = apa_tensor_hnd(b, APA_DTYPE_F64, 1, 1, 3, 1);
    assert_int_equal(apa_histogram_measure(context, &u, &w, &h), APA_STATUS_OK);
    assert_int_equal(h.rel_l2[20], 1);
    assert_int_equal(h.rel_l2[23], 2);
    assert_int_equal(h.cos[0], 2);
    assert_int_equal(h.cos[21], 1);
    assert_int_equal(h.truth_not_finite, 0);
    /* the other way round the third pair has no truth: it is in no bin and not among the worst */
    apa_pair_error worst[3];
    int64_t found;
    assert_int_equal(apa_histogram_measure(context, &w, &u, &h), APA_STATUS_OK);
    assert_int_equal(h.pairs, 3);
    assert_int_equal(h.truth_not_finite, 1);
    assert_int_equal(h.cos[0], 2);
    int64_t in_bins = 0;
    for (int i = 0; i < APA_HISTOGRAM_BINS; i++)
        in_bins += h.cos[i] + h.rel_l2[i];
    assert_int_equal(in_bins, 4);
    assert_int_equal(apa_worst_pairs(context, &w, &u, APA_WORST_BY_REL, 3, worst, &found), APA_STATUS_OK);
    assert_int_equal(found, 2);
    assert_int_equal(worst[0].row * 10 + worst[1].row, 1); /* 1 for 0.5, then 1 for 100 */
    apa_head_error head;
    assert_int_equal(apa_heads_measure(context, &w, &u, NULL, 1, &head), APA_STATUS_OK);
    assert_int_equal(head.truth_not_finite, 1);
    near(head.rel_l2_max, 1, 0);
    for (int i = 0; i < APA_HISTOGRAM_BINS - 1; i++)
        near(apa_histogram_edge(i) / pow(10, (i - 20) / 2.0), 1, 1e-14);
    assert_true(isnan(apa_histogram_edge(-1)) && isnan(apa_histogram_edge(APA_HISTOGRAM_BINS - 1)));
    const apa_tensor none = apa_tensor_hnd(a, APA_DTYPE_F64, 1, 1, 0, 1);
    assert_int_equal(apa_histogram_measure(context, &none, &none, &h), APA_STATUS_OK);
    assert_int_equal(h.pairs, 0);
}

static void heads(void **unused)
{
    (void)unused;
    const apa_tensor x = two_heads(lists_x), y = two_heads(lists_y);
    /* [head][row][3 tiles] */
    const uint8_t verdicts[12] = {1, 0, 3, 1, 1, 2, 3, 3, 3, 0, 0, 2};
    apa_head_error h[2];
    assert_int_equal(apa_heads_measure(context, &x, &y, verdicts, 3, h), APA_STATUS_OK);
    assert_int_equal(h[0].head + 10 * h[1].head, 10);
    near(h[0].mean_cos, 1, 1e-15);
    near(h[0].rel_l2, sqrt(25.0 / 30), 1e-15);
    near(h[0].rel_l2_max, 1, 1e-15);
    near(h[0].hot_share, 3.0 / 5, 1e-15);
    near(h[0].skip_share, 1.0 / 5, 1e-15);
    near(h[1].mean_cos, -0.5, 1e-15);
    near(h[1].min_cos, -1, 0);
    assert_int_equal(h[1].min_cos_row, 1);
    assert_int_equal(h[1].lt_0_99, 2);
    near(h[1].hot_share, 0, 0);
    near(h[1].skip_share, 1.0 / 3, 1e-15);
    assert_int_equal(apa_heads_measure(context, &x, &y, NULL, 0, h), APA_STATUS_OK);
    assert_true(isnan(h[0].hot_share) && isnan(h[1].skip_share));
    assert_int_equal(apa_heads_measure(context, &x, &y, verdicts, -1, h), APA_STATUS_INVALID_ARGUMENT);
}

/* ------------------------------------------------------------------------------- operands */

enum { Heads = 2, Rows = 40, Keys = 200, Dim = 16 };

static apa_problem operand_problem(float *q, float *k, float *v)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = apa_tensor_hnd(q, APA_DTYPE_F32, 1, Heads, Rows, Dim);
    p.k = apa_tensor_hnd(k, APA_DTYPE_F32, 1, Heads, Keys, Dim);
    p.v = apa_tensor_hnd(v, APA_DTYPE_F32, 1, Heads, Keys, Dim);
    p.causal = 1;
    return p;
}

static apa_recipe recipe_of(const char *preset, const char *const settings[][2], size_t count)
{
    char message[256];
    apa_recipe recipe;
    assert_int_equal(apa_recipe_init(&recipe, preset), APA_STATUS_OK);
    for (size_t i = 0; i < count; i++)
        if (apa_recipe_set(&recipe, settings[i][0], settings[i][1], message, sizeof message) != APA_STATUS_OK)
            fail_msg("%s", message);
    return recipe;
}

static apa_attribution attribute(const apa_problem *p, const apa_recipe *recipe, int64_t pairs)
{
    apa_attribution a;
    if (apa_attribute(context, p, recipe, NULL, APA_WORST_BY_COS, pairs, NULL, NULL, &a) != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
    assert_int_equal(a.size, sizeof a);
    return a;
}

/* Operands that their format holds exactly add no error: integers with a largest magnitude of 127 in every row of Q,
 * every key of K and every channel of a tile of V. What is left is P's. */
static void operands_without_error(void **unused)
{
    (void)unused;
    static float q[Heads * Rows * Dim], k[Heads * Keys * Dim], v[Heads * Keys * Dim];
    apa_test_rng rng = {apa_test_seed() + 5};
    for (int i = 0; i < Heads * Rows * Dim; i++)
        q[i] = i % Dim == 0 ? 127 : (float)apa_test_below(&rng, 255) - 127;
    for (int i = 0; i < Heads * Keys * Dim; i++) {
        k[i] = i % Dim == 0 ? 127 : (float)apa_test_below(&rng, 255) - 127;
        v[i] = i / Dim % Keys % 64 == 0 ? 127 : (float)apa_test_below(&rng, 255) - 127;
    }
    apa_problem p = operand_problem(q, k, v);
    p.softmax_scale = 1e-4;
    static const char *const settings[][2] = {{"hadamard", "off"}, {"smooth_k", "off"}};
    const apa_recipe recipe = recipe_of("int8", settings, 2);
    const apa_attribution a = attribute(&p, &recipe, 7);
    assert_int_equal(a.worst, 7);
    assert_true(a.all.ran && a.none.ran);
    near(a.none.rel_l2, 0, 1e-12);
    near(a.only[APA_OPERAND_Q].rel_l2, 0, 1e-12);
    near(a.only[APA_OPERAND_K].rel_l2, 0, 1e-12);
    near(a.only[APA_OPERAND_V].rel_l2, 0, 1e-12);
    assert_true(a.only[APA_OPERAND_P].rel_l2 > 1e-5);
    near(a.only[APA_OPERAND_P].rel_l2, a.all.rel_l2, 1e-12);
    near(a.only[APA_OPERAND_P].worst_rel_l2, a.all.worst_rel_l2, 1e-12);
    near(a.all_but[APA_OPERAND_P].rel_l2, 0, 1e-12);
    near(a.all_but[APA_OPERAND_Q].rel_l2, a.all.rel_l2, 1e-12);
    assert_true(a.all.worst_mean_cos <= a.all.mean_cos && a.all.worst_min_cos == a.all.min_cos);
    near(a.all.verdicts_changed, 0, 0);
    near(a.only[APA_OPERAND_P].verdicts_changed, 0, 0); /* force=low */
    near(a.all.hot_share, 0, 0);
    /* FP32 or wider sums in the reference: nothing to leave out */
    assert_false(a.only[APA_OPERAND_ACCUMULATOR].ran || a.all_but[APA_OPERAND_ACCUMULATOR].ran);
    assert_non_null(strstr(a.only[APA_OPERAND_ACCUMULATOR].refusal, "not quantised"));
    near(a.only[APA_OPERAND_ACCUMULATOR].rel_l2, a.none.rel_l2, 0);
    near(a.all_but[APA_OPERAND_ACCUMULATOR].rel_l2, a.all.rel_l2, 0);
}

/* The same as evaluating recipes with the knobs set by hand, and with the sums of a narrow accumulator. */
static void operands_by_knobs(void **unused)
{
    (void)unused;
    static float q[Heads * Rows * Dim], k[Heads * Keys * Dim], v[Heads * Keys * Dim];
    apa_test_rng rng = {apa_test_seed() + 6};
    for (int i = 0; i < Heads * Rows * Dim; i++)
        q[i] = (float)(2 * apa_test_normal(&rng));
    for (int i = 0; i < Heads * Keys * Dim; i++) {
        k[i] = (float)apa_test_normal(&rng);
        v[i] = (float)apa_test_normal(&rng);
    }
    apa_problem p = operand_problem(q, k, v);
    static const char *const settings[][2] = {{"cold_format", "e4m3"}, {"pv_accum", "fp22"},   {"eps", "0.4"},
                                              {"exact_q", "on"},       {"exact_k", "on"},      {"exact_p", "on"},
                                              {"exact_v", "on"},       {"cold_format", "e4m3"}};
    const apa_recipe recipe = recipe_of("apa", settings, 3);
    const apa_attribution a = attribute(&p, &recipe, 5);
    static double out[Heads * Rows * Dim];
    p.out = apa_tensor_hnd(out, APA_DTYPE_F64, 1, Heads, Rows, Dim);
    apa_evaluation_options options;
    apa_evaluation_options_init(&options);
    options.engine = "reference";
    options.repeats = 1;
    options.time_exact = 0;
    apa_evaluation e;
    assert_int_equal(apa_evaluate(context, &p, &recipe, &options, &e), APA_STATUS_OK);
    near(a.all.rel_l2, e.error.rel_l2, 0);
    near(a.all.min_cos, e.error.min_cos, 0);
    near(a.all.hot_share, e.statistics.hot_share, 0);
    assert_true(a.all.hot_share > 0 && a.all.hot_share < 1);
    apa_recipe sums = recipe_of("apa", settings, 7);
    assert_int_equal(apa_evaluate(context, &p, &sums, &options, &e), APA_STATUS_OK);
    assert_true(a.only[APA_OPERAND_ACCUMULATOR].ran);
    near(a.only[APA_OPERAND_ACCUMULATOR].rel_l2, e.error.rel_l2, 0);
    assert_true(a.only[APA_OPERAND_ACCUMULATOR].rel_l2 > a.none.rel_l2);
    apa_recipe no_p = recipe;
    no_p.exact_p = APA_TOGGLE_ON;
    assert_int_equal(apa_evaluate(context, &p, &no_p, &options, &e), APA_STATUS_OK);
    near(a.all_but[APA_OPERAND_P].rel_l2, e.error.rel_l2, 0);
    near(a.none.rel_l2, 0, 1e-6);
    for (int i = 0; i < APA_OPERAND_COUNT; i++)
        assert_true(a.only[i].ran && a.all_but[i].ran && a.only[i].rel_l2 > a.none.rel_l2);
    /* nothing cold: nothing to take apart; codes without exponentials: P can be left alone all the same */
    const apa_recipe exact = recipe_of("exact", settings, 0), direct = recipe_of("directp", settings, 0);
    const apa_attribution nothing = attribute(&p, &exact, 5), codes = attribute(&p, &direct, 5);
    near(nothing.none.rel_l2, nothing.all.rel_l2, 0);
    near(codes.none.rel_l2, 0, 1e-6);
    assert_true(codes.none.ran && codes.all.rel_l2 > 0.01);
    for (int i = 0; i < APA_OPERAND_COUNT; i++) {
        assert_false(nothing.only[i].ran || nothing.all_but[i].ran);
        assert_int_equal(codes.only[i].ran, i != APA_OPERAND_ACCUMULATOR);
    }
    /* a method that the engine refuses is an error, and so is a call that makes no sense */
    apa_attribution b;
    apa_recipe bad = recipe;
    bad.tile = 7;
    assert_int_equal(apa_attribute(context, &p, &bad, NULL, APA_WORST_BY_COS, 1, NULL, NULL, &b),
                     APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_attribute(context, &p, &recipe, NULL, (apa_worst_by)0, 1, NULL, NULL, &b),
                     APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_attribute(context, &p, &recipe, NULL, APA_WORST_BY_COS, -1, NULL, NULL, &b),
                     APA_STATUS_INVALID_ARGUMENT);
    assert_null(apa_operand_name(APA_OPERAND_COUNT));
    assert_string_equal(apa_operand_name(APA_OPERAND_V), "v");
}

static int setup(void **unused)
{
    (void)unused;
    print_message("seed %llu\n", (unsigned long long)apa_test_seed());
    return apa_context_create(&context, NULL) != APA_STATUS_OK;
}

static int teardown(void **unused)
{
    (void)unused;
    apa_context_destroy(context);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(by_hand),
        cmocka_unit_test(corners),
        cmocka_unit_test(not_finite),
        cmocka_unit_test(refusals),
        cmocka_unit_test(worst),
        cmocka_unit_test(against_plain_softmax),
        cmocka_unit_test(worst_of_many),
        cmocka_unit_test(histogram),
        cmocka_unit_test(heads),
        cmocka_unit_test(operands_without_error),
        cmocka_unit_test(operands_by_knobs),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
