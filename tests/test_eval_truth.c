/* The truth of evaluations, computed in slices of batch, heads and rows when progress is told: masks, slopes, sinks and
 * offsets must be sliced along, and every bit stay. */
#include "support/fixture.h"
#include "support/problems.h"
#include "support/test.h"

#include "apa/eval.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { B = 2, HQ = 4, HKV = 2, SQ = 530, SKV = 90, DIM = 8 }; /* rows of two slices */

typedef struct arrays {
    float q[B * HQ * SQ * DIM], k[B * HKV * SKV * DIM], v[B * HKV * SKV * DIM];
    float mask[B * HQ * SQ * SKV], alibi[B * HQ], sinks[HQ];
    double out[2][B * HQ * SQ * DIM], lse[2][B * HQ * SQ];
    int64_t offsets[B];
} arrays;

static arrays *a;
static int told;

static void tell(void *user, const char *phase, double fraction)
{
    (void)user;
    (void)phase;
    (void)fraction;
    told++;
}

static void compute(const apa_problem *p, int n, apa_progress progress)
{
    const apa_tensor out = apa_tensor_hnd(a->out[n], APA_DTYPE_F64, B, HQ, SQ, DIM),
                     lse = apa_tensor_hnd(a->lse[n], APA_DTYPE_F64, B, HQ, SQ, 1);
    memset(a->out[n], 0xFF, sizeof a->out[n]);
    if (apa_truth_compute(context, p, &out, &lse, progress, NULL) != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
}

static void same_in_slices(const apa_problem *p)
{
    compute(p, 0, NULL);
    told = 0;
    compute(p, 1, tell);
    assert_memory_equal(a->out[0], a->out[1], sizeof a->out[0]);
    assert_memory_equal(a->lse[0], a->lse[1], sizeof a->lse[0]);
}

static apa_problem plain(void)
{
    apa_problem p;
    apa_problem_init(&p);
    p.q = apa_tensor_hnd(a->q, APA_DTYPE_F32, B, HQ, SQ, DIM);
    p.k = apa_tensor_hnd(a->k, APA_DTYPE_F32, B, HKV, SKV, DIM);
    p.v = apa_tensor_hnd(a->v, APA_DTYPE_F32, B, HKV, SKV, DIM);
    p.causal = APA_CAUSAL_BOTTOM_RIGHT;
    return p;
}

static void slices(void **unused)
{
    (void)unused;
    apa_problem p = plain();
    p.softcap = 3;
    p.attn_mask = apa_tensor_hnd(a->mask, APA_DTYPE_F32, B, HQ, SQ, SKV);
    p.alibi_slopes = apa_tensor_hnd(a->alibi, APA_DTYPE_F32, B, HQ, 1, 1);
    p.mask_slopes = apa_tensor_hnd(a->sinks, APA_DTYPE_F32, 1, HQ, 1, 1);
    p.sinks = apa_tensor_hnd(a->sinks, APA_DTYPE_F32, 1, HQ, 1, 1);
    same_in_slices(&p);
    assert_true(told > B * HKV);
    p.attn_mask = apa_tensor_hnd(a->mask, APA_DTYPE_F32, 1, 1, SQ, SKV); /* repeats */
    p.causal = APA_CAUSAL_TOP_LEFT;
    same_in_slices(&p);
    p.attn_mask = apa_tensor_hnd(a->mask, APA_DTYPE_F32, B, 1, 1, SKV);
    p.causal = APA_CAUSAL_NONE;
    p.window_left = 7;
    same_in_slices(&p);
}

/* Sequences that differ are computed whole. */
static void differing(void **unused)
{
    (void)unused;
    apa_problem p = plain();
    p.q_offsets = a->offsets;
    same_in_slices(&p);
}

static int fill(void **state)
{
    apa_test_rng rng = {apa_test_seed()};
    a = calloc(1, sizeof *a);
    if (a == NULL)
        return 1;
    float *const all[] = {a->q, a->k, a->v, a->mask, a->alibi, a->sinks};
    const size_t count[] = {sizeof a->q / 4,    sizeof a->k / 4,     sizeof a->v / 4,
                            sizeof a->mask / 4, sizeof a->alibi / 4, sizeof a->sinks / 4};
    for (int i = 0; i < 6; i++)
        for (size_t j = 0; j < count[i]; j++)
            all[i][j] = (float)apa_test_normal(&rng);
    for (size_t j = 0; j < sizeof a->mask / 4; j += 3)
        a->mask[j] = -INFINITY;
    a->offsets[0] = 10;
    a->offsets[1] = -5;
    return set_up(state);
}

static int drop(void **state)
{
    free(a);
    return tear_down(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(slices), cmocka_unit_test(differing)};
    return cmocka_run_group_tests(tests, fill, drop);
}
