/* FlashAttention's own test grid: its shapes, head dims, windows, caps and slopes, and its rule of tolerance.
 *
 * With o the result, o* the formula in double and o16 the formula written plainly in 16-bit tensors (every tensor
 * rounded: scaled q, S, S after cap and bias, P, O; sums inside a product in wide precision, as 16-bit frameworks have
 * it): max|o - o*| <= 2·max|o16 - o*| + atol,     atol = 2·max|(o* + 0.3) - 0.3 - o*| in 16 bits so what a kernel may
 * lose is twice what the plain implementation loses, and the rounding of the result itself. The grid and the rule are
 * those of the tests of Dao's FlashAttention 2; the 2048 squares are left to APA_TEST_FULL=1, which also crosses
 * everything with everything instead of walking through the combinations. */
#include "support/fixture.h"
#include "support/problems.h"
#include "support/test.h"

#include "formats/formats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct config {
    int64_t Sq, Skv, D, Hkv, left, right;
    bool causal, alibi;
    double softcap;
    apa_dtype dtype;
} config;

enum { HQ = 2 };

static double round_to(apa_dtype dtype, double x)
{
    return dtype == APA_DTYPE_F16 ? (double)apa_f16_to_f32(apa_f64_to_f16(x))
                                  : (double)apa_bf16_to_f32(apa_f64_to_bf16(x));
}

typedef struct data {
    double *q, *k, *v; /* [H][S][D], 16-bit values */
    uint16_t *q16, *k16, *v16, *out;
    double *truth, *plain; /* [HQ][Sq][D] */
    float slopes[HQ];
} data;

static void fill(apa_test_rng *rng, apa_dtype dtype, int64_t n, double **wide, uint16_t **narrow)
{
    *wide = malloc(sizeof **wide * (size_t)n);
    *narrow = malloc(sizeof **narrow * (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        const double x = apa_test_normal(rng);
        (*narrow)[i] = dtype == APA_DTYPE_F16 ? apa_f64_to_f16(x) : apa_f64_to_bf16(x);
        (*wide)[i] = round_to(dtype, x);
    }
}

static data make(const config *c, apa_test_rng *rng)
{
    data d = {.slopes = {0.3F, 0.05F}};
    const size_t n = (size_t)(HQ * c->Sq * c->D);
    fill(rng, c->dtype, HQ * c->Sq * c->D, &d.q, &d.q16);
    fill(rng, c->dtype, c->Hkv * c->Skv * c->D, &d.k, &d.k16);
    fill(rng, c->dtype, c->Hkv * c->Skv * c->D, &d.v, &d.v16);
    d.out = malloc(sizeof *d.out * n);
    d.truth = malloc(sizeof *d.truth * n);
    d.plain = malloc(sizeof *d.plain * n);
    return d;
}

static void drop(data *d)
{
    void *const all[] = {d->q, d->k, d->v, d->q16, d->k16, d->v16, d->out, d->truth, d->plain};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* Scores of a row; narrow: every step rounds. -inf where the key is not seen. */
static void scores(const config *c, const double *q, const double *k, float slope, int64_t i, bool narrow, double *s)
{
    const double scale = 1 / sqrt((double)c->D);
    const int64_t at = i + c->Skv - c->Sq;
    double scaled[256];
    for (int64_t d = 0; d < c->D; d++)
        scaled[d] = narrow ? round_to(c->dtype, q[d] * scale) : q[d] * scale;
    for (int64_t j = 0; j < c->Skv; j++) {
        double dot[4] = {0}, x;
        s[j] = -INFINITY;
        if ((c->causal && j > at) || (c->left >= 0 && j < at - c->left) || (c->right >= 0 && j > at + c->right))
            continue;
        for (int64_t d = 0; d < c->D; d++)
            dot[d % 4] += scaled[d] * k[j * c->D + d];
        x = dot[0] + dot[1] + dot[2] + dot[3];
        x = narrow ? round_to(c->dtype, x) : x;
        if (c->softcap > 0) {
            x = c->softcap * tanh(x / c->softcap);
            x = narrow ? round_to(c->dtype, x) : x;
        }
        if (c->alibi) {
            const double bias = -(double)slope * fabs((double)(at - j));
            x += narrow ? round_to(c->dtype, bias) : bias;
            x = narrow ? round_to(c->dtype, x) : x;
        }
        s[j] = x;
    }
}

static void attend_row(const config *c, const double *q, const double *k, const double *v, float slope, int64_t i,
                       bool narrow, double *o)
{
    double *s = malloc(sizeof *s * (size_t)c->Skv), top = -INFINITY, sum = 0;
    scores(c, q, k, slope, i, narrow, s);
    memset(o, 0, sizeof *o * (size_t)c->D);
    for (int64_t j = 0; j < c->Skv; j++)
        top = s[j] > top ? s[j] : top;
    for (int64_t j = 0; j < c->Skv; j++)
        sum += s[j] = s[j] == -INFINITY ? 0 : exp(s[j] - top);
    for (int64_t j = 0; j < c->Skv; j++) {
        const double p = sum == 0 ? 0 : narrow ? round_to(c->dtype, s[j] / sum) : s[j] / sum;
        for (int64_t d = 0; d < c->D && p != 0; d++)
            o[d] += p * v[j * c->D + d];
    }
    for (int64_t d = 0; d < c->D && narrow; d++)
        o[d] = round_to(c->dtype, o[d]);
    free(s);
}

static void run(const config *c, data *d, const char *engine)
{
    apa_problem p;
    apa_recipe recipe;
    apa_attention_options options;
    apa_problem_init(&p);
    apa_attention_options_init(&options);
    options.engine = engine;
    assert_int_equal(apa_recipe_init(&recipe, "exact"), APA_STATUS_OK);
    p.q = apa_tensor_hnd(d->q16, c->dtype, 1, HQ, c->Sq, c->D);
    p.k = apa_tensor_hnd(d->k16, c->dtype, 1, c->Hkv, c->Skv, c->D);
    p.v = apa_tensor_hnd(d->v16, c->dtype, 1, c->Hkv, c->Skv, c->D);
    p.out = apa_tensor_hnd(d->out, c->dtype, 1, HQ, c->Sq, c->D);
    p.causal = c->causal ? APA_CAUSAL_BOTTOM_RIGHT : APA_CAUSAL_NONE;
    p.window_left = c->left;
    p.window_right = c->right;
    p.softcap = c->softcap;
    if (c->alibi)
        p.alibi_slopes = apa_tensor_hnd(d->slopes, APA_DTYPE_F32, 1, HQ, 1, 1);
    if (apa_attention(context, &p, &recipe, &options, NULL) != APA_STATUS_OK)
        fail_msg("%s: %s", engine, apa_context_message(context));
}

static void check(const config *c, apa_test_rng *rng, double *worst)
{
    static const char *const engines[] = {"cpu", "reference"};
    data d = make(c, rng);
    double plain = 0, atol = 0;
    for (int64_t h = 0; h < HQ; h++)
        for (int64_t i = 0; i < c->Sq; i++) {
            const double *q = d.q + (h * c->Sq + i) * c->D, *k = d.k + h * c->Hkv / HQ * c->Skv * c->D,
                         *v = d.v + h * c->Hkv / HQ * c->Skv * c->D;
            attend_row(c, q, k, v, d.slopes[h], i, false, d.truth + (h * c->Sq + i) * c->D);
            attend_row(c, q, k, v, d.slopes[h], i, true, d.plain + (h * c->Sq + i) * c->D);
        }
    for (int64_t i = 0; i < HQ * c->Sq * c->D; i++) {
        const double x = round_to(c->dtype, d.truth[i]);
        const double moved = round_to(c->dtype, round_to(c->dtype, x + 0.3) - 0.3) - x;
        plain = fmax(plain, fabs(d.plain[i] - d.truth[i]));
        atol = fmax(atol, 2 * fabs(moved));
    }
    for (int e = 0; e < 2; e++) {
        double error = 0;
        run(c, &d, engines[e]);
        for (int64_t i = 0; i < HQ * c->Sq * c->D; i++) {
            const double found =
                c->dtype == APA_DTYPE_F16 ? (double)apa_f16_to_f32(d.out[i]) : (double)apa_bf16_to_f32(d.out[i]);
            error = isnan(found) ? NAN : fmax(error, fabs(found - d.truth[i]));
            if (isnan(error))
                break;
        }
        if (!(error <= 2 * plain + atol))
            fail_msg(
                "%s: Sq %d, Skv %d, D %d, causal %d, window %d %d, cap %g, alibi %d, %s: error %g, plain 16 bit %g",
                engines[e], (int)c->Sq, (int)c->Skv, (int)c->D, c->causal, (int)c->left, (int)c->right, c->softcap,
                c->alibi, apa_dtype_name(c->dtype), error, plain);
        *worst = fmax(*worst, error / plain);
    }
    drop(&d);
}

static const int64_t pairs[][2] = {{113, 203}, {128, 217}, {113, 211}, {108, 256},   {256, 512},   {512, 256},
                                   {1, 339},   {3, 1024},  {64, 800},  {1023, 1024}, {1024, 1023}, {2048, 2048}};
static const int64_t dims[] = {32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256};
enum { PAIRS = sizeof pairs / sizeof *pairs, QUICK_PAIRS = 9, DIMS = sizeof dims / sizeof *dims };

/* Number n of the grid for a pair of lengths: causal, local, dtype, cap, slopes and heads are its bits. */
static config nth(const int64_t *pair, int64_t D, int n, apa_test_rng *rng)
{
    config c = {.Sq = pair[0], .Skv = pair[1], .D = D, .left = -1, .right = -1};
    c.causal = (n & 1) != 0;
    if ((n & 2) != 0) {
        c.left = apa_test_below(rng, c.Skv);
        c.right = apa_test_below(rng, c.Skv);
    }
    c.dtype = (n & 4) != 0 ? APA_DTYPE_BF16 : APA_DTYPE_F16;
    c.softcap = (n & 8) != 0 ? 50 : 0;
    c.alibi = (n & 16) != 0;
    c.Hkv = (n & 32) != 0 ? 1 : HQ;
    return c;
}

static void grid(void **unused)
{
    (void)unused;
    apa_test_rng rng = {apa_test_seed()};
    const bool full = getenv("APA_TEST_FULL") != NULL;
    double worst = 0;
    int count = 0;
    for (int pair = 0; pair < (full ? PAIRS : QUICK_PAIRS); pair++)
        for (int n = 0; n < 64; n++)
            for (int d = 0; d < DIMS; d++) {
                /* quickly: a sixth of the 64 a pair, so that six pairs meet them all, and one dim each */
                if (!full && (n % 6 != pair % 6 || d != (n / 6 + 5 * pair) % DIMS))
                    continue;
                const config c = nth(pairs[pair], dims[d], n, &rng);
                check(&c, &rng, &worst);
                count++;
            }
    print_message("# %d points of the grid on two engines, the largest error is %.2f of the plain 16-bit one's\n",
                  count, worst);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(grid)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
