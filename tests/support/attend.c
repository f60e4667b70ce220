/* Calls through the public API: see attend.h. */
#include "support/attend.h"

#include "support/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD 256
#define GUARD_BYTE 0x5C

static void remember_inputs(apa_test_problem *t)
{
    for (int i = 0; i < 3; i++) {
        free(t->inputs_before[i]);
        t->inputs_before[i] = malloc(t->bytes[i] + 1);
        assert_non_null(t->inputs_before[i]);
        memcpy(t->inputs_before[i], t->memory[i], t->bytes[i]);
    }
}

void apa_test_attend(apa_context *context, const char *engine, apa_test_problem *t, const apa_recipe *recipe,
                     uint8_t *verdicts, apa_statistics *statistics)
{
    apa_attention_options options;
    apa_plan plan;
    apa_statistics own;
    apa_attention_options_init(&options);
    apa_plan_init(&plan);
    apa_statistics_init(&own);
    options.engine = engine;
    options.verdicts = verdicts;
    if (apa_attention_plan(context, &t->problem, recipe, &options, &plan) != APA_STATUS_OK)
        fail_msg("plan: %s", apa_context_message(context));
    const size_t total = (GUARD + plan.workspace_bytes + GUARD + 63) / 64 * 64;
    unsigned char *memory = aligned_alloc(64, total);
    assert_non_null(memory);
    memset(memory, GUARD_BYTE, total);
    memset(memory + GUARD, 0xFF, plan.workspace_bytes);
    options.workspace = memory + GUARD;
    options.workspace_bytes = plan.workspace_bytes;
    remember_inputs(t);
    if (apa_attention(context, &t->problem, recipe, &options, &own) != APA_STATUS_OK)
        fail_msg("attention: %s", apa_context_message(context));
    for (size_t i = 0; i < total; i++)
        if ((i < GUARD || i >= GUARD + plan.workspace_bytes) && memory[i] != GUARD_BYTE)
            fail_msg("workspace: wrote outside its %zu bytes, at %td", plan.workspace_bytes, (ptrdiff_t)i - GUARD);
    free(memory);
    assert_false(apa_test_guards_broken(t));
    assert_string_equal(own.engine, engine);
    assert_int_equal(own.visible, own.hot + own.cold);
    assert_true(own.hot >= 0 && own.cold >= 0 && own.skipped >= 0 && own.skipped <= own.cold);
    if (statistics != NULL)
        *statistics = own;
}

apa_recipe apa_test_recipe(const char *preset, const char *settings)
{
    apa_recipe recipe;
    char text[512], message[256], *rest = text;
    assert_int_equal(apa_recipe_init(&recipe, preset), APA_STATUS_OK);
    assert_true(strlen(settings) < sizeof text);
    memcpy(text, settings, strlen(settings) + 1);
    while (*rest != '\0') {
        char *value = strchr(rest, '='), *next = strchr(rest, ' ');
        assert_non_null(value);
        *value++ = '\0';
        if (next != NULL)
            *next++ = '\0';
        if (apa_recipe_set(&recipe, rest, value, message, sizeof message) != APA_STATUS_OK)
            fail_msg("%s", message);
        rest = next != NULL ? next : value + strlen(value);
    }
    return recipe;
}

/* ---- oracle ---- */

typedef struct oracle_head {
    const apa_problem *p;
    int64_t Skv, D, Dv;
    double scale;
    double *kt, *v, *s; /* [D][Skv], [Skv][Dv], [Skv] */
} oracle_head;

static void oracle_load(oracle_head *head, int64_t b, int64_t h)
{
    for (int64_t j = 0; j < head->Skv; j++) {
        for (int64_t d = 0; d < head->D; d++)
            head->kt[d * head->Skv + j] = apa_test_get(&head->p->k, b, h, j, d);
        for (int64_t c = 0; c < head->Dv; c++)
            head->v[j * head->Dv + c] = apa_test_get(&head->p->v, b, h, j, c);
    }
}

/* Visible keys are one range: its ends, each key asked by itself. */
static void oracle_range(const apa_problem *p, int64_t i, int64_t *first, int64_t *end)
{
    const int64_t Skv = p->k.shape[2];
    for (*first = 0; *first < Skv && !apa_test_sees(p, i, *first); ++*first)
        ;
    for (*end = *first; *end < Skv && apa_test_sees(p, i, *end); ++*end)
        ;
}

static void oracle_row(oracle_head *head, int64_t b, int64_t h, int64_t i, double *out, double *lse)
{
    int64_t first, end;
    double most = -INFINITY, sum = 0;
    oracle_range(head->p, i, &first, &end);
    memset(head->s + first, 0, sizeof(double) * (size_t)(end - first));
    for (int64_t d = 0; d < head->D; d++) {
        const double q = apa_test_get(&head->p->q, b, h, i, d), *k = head->kt + d * head->Skv;
        for (int64_t j = first; j < end; j++)
            head->s[j] += q * k[j];
    }
    for (int64_t j = first; j < end; j++) {
        head->s[j] *= head->scale;
        most = fmax(most, head->s[j]);
    }
    memset(out, 0, sizeof(double) * (size_t)head->Dv);
    for (int64_t j = first; j < end; j++) {
        const double p = head->s[j] == -INFINITY ? 0 : exp(head->s[j] - most);
        sum += p;
        for (int64_t c = 0; c < head->Dv; c++)
            out[c] += p * head->v[j * head->Dv + c];
    }
    for (int64_t c = 0; c < head->Dv && sum != 0; c++)
        out[c] /= sum;
    *lse = sum == 0 ? -INFINITY : most + log(sum);
}

void apa_test_fast_oracle(const apa_problem *p, double *out, double *lse)
{
    oracle_head head = {.p = p, .Skv = p->k.shape[2], .D = p->k.shape[3], .Dv = p->v.shape[3]};
    const int64_t Hq = p->q.shape[1], Hkv = p->k.shape[1], Sq = p->q.shape[2];
    head.scale = isnan(p->softmax_scale) ? 1.0 / sqrt((double)head.D) : p->softmax_scale;
    head.kt = malloc(sizeof(double) * (size_t)(head.D * head.Skv + 1));
    head.v = malloc(sizeof(double) * (size_t)(head.Dv * head.Skv + 1));
    head.s = malloc(sizeof(double) * (size_t)(head.Skv + 1));
    assert_true(head.kt != NULL && head.v != NULL && head.s != NULL);
    for (int64_t b = 0; b < p->q.shape[0]; b++)
        for (int64_t h = 0; h < Hq; h++) {
            if (h % (Hq / Hkv) == 0)
                oracle_load(&head, b, h / (Hq / Hkv));
            for (int64_t i = 0; i < Sq; i++)
                oracle_row(&head, b, h, i, out + ((b * Hq + h) * Sq + i) * head.Dv, lse + (b * Hq + h) * Sq + i);
        }
    free(head.kt);
    free(head.v);
    free(head.s);
}

/* ---- comparing ---- */

apa_test_outputs apa_test_keep(const apa_test_problem *t)
{
    apa_test_outputs kept = {malloc(t->bytes[3]), malloc(t->bytes[4]), t->bytes[3], t->bytes[4]};
    assert_true(kept.out != NULL && kept.lse != NULL);
    memcpy(kept.out, t->memory[3], kept.out_bytes);
    memcpy(kept.lse, t->memory[4], kept.lse_bytes);
    return kept;
}

int apa_test_differs(const apa_test_problem *t, const apa_test_outputs *kept)
{
    assert_true(kept->out_bytes == t->bytes[3] && kept->lse_bytes == t->bytes[4]);
    return memcmp(kept->out, t->memory[3], kept->out_bytes) != 0 ||
           memcmp(kept->lse, t->memory[4], kept->lse_bytes) != 0;
}

void apa_test_drop(apa_test_outputs *kept)
{
    free(kept->out);
    free(kept->lse);
    memset(kept, 0, sizeof *kept);
}

double apa_test_distance(const apa_tensor *a, const apa_tensor *b)
{
    double *truth = apa_test_doubles(b);
    int64_t at = 0;
    for (int64_t n = 0; n < b->shape[0]; n++)
        for (int64_t h = 0; h < b->shape[1]; h++)
            for (int64_t s = 0; s < b->shape[2]; s++)
                for (int64_t d = 0; d < b->shape[3]; d++)
                    truth[at++] = apa_test_get(b, n, h, s, d);
    const double distance = apa_test_rel_l2(a, truth);
    free(truth);
    return distance;
}
