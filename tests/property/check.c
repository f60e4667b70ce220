/* For a case and an engine:
 *
 *   rows     every output and LSE within its bound of the oracle; NaN and -inf where they are due
 *   memory   inputs untouched; nothing written but the rows of the sequences
 *   counts   visible = hot + cold = the (row, tile) pairs in which the row sees a key; the map says the same
 *   tasks    the same bits whatever the order in which they run, and whoever's pool runs them
 *   packing  exact: ragged, paged and cut-off sequences have the bits of the same sequence alone, contiguous
 */
#include "property/check.h"

#include "support/oracle.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static verdict fails(checker *with, const char *format, ...) __attribute__((format(printf, 2, 3)));
static verdict fails(checker *with, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(with->message, sizeof with->message, format, arguments);
    va_end(arguments);
    return FAILS;
}

typedef struct result {
    case_outputs outputs;
    apa_statistics statistics;
    apa_status status;
} result;

static result run(const checker *with, apa_context *context, const property_case *made, uint8_t *verdicts)
{
    result r = {.outputs = case_outputs_make(made)};
    apa_problem problem = made->problem;
    apa_attention_options options;
    apa_recipe recipe;
    apa_attention_options_init(&options);
    apa_statistics_init(&r.statistics);
    options.engine = with->engine;
    options.verdicts = verdicts;
    problem.out = r.outputs.out;
    problem.lse = r.outputs.lse;
    r.status = apa_recipe_init(&recipe, made->method);
    if (r.status == APA_STATUS_OK)
        r.status = apa_attention(context, &problem, &recipe, &options, &r.statistics);
    return r;
}

/* ---- rows ---- */

static bool near(checker *with, double found, double expected, double bound)
{
    if (isnan(expected))
        return isnan(found);
    if (isinf(expected))
        return found == expected;
    const double error = fabs(found - expected);
    if (error > 0 && bound > 0 && error / bound > with->worst)
        with->worst = error / bound;
    return error <= bound; /* false for NaN */
}

static verdict check_row(checker *with, const property_case *made, const apa_problem *p, const oracle_sequence *s,
                         int64_t h, int64_t i, const oracle_row *row)
{
    for (int64_t c = 0; c < p->out.shape[3]; c++) {
        const double found = oracle_query_value(p, &p->out, s, h, i, c);
        const double bound = row->out_error[c] + oracle_rounding(p->out.dtype, row->out[c]) * 1.01;
        if (!near(with, found, row->out[c], bound))
            return fails(with,
                         "out of sequence %" PRId64 ", head %" PRId64 ", row %" PRId64 ", channel %" PRId64
                         ": %.9g, expected %.9g within %.3g",
                         s->b, h, i, c, found, row->out[c], bound);
    }
    if (made->problem.lse.dtype == APA_DTYPE_NONE)
        return HOLDS;
    const double found = oracle_query_value(p, &p->lse, s, h, i, 0);
    if (!near(with, found, row->lse, row->lse_error + oracle_rounding(p->lse.dtype, row->lse) * 1.01))
        return fails(with,
                     "lse of sequence %" PRId64 ", head %" PRId64 ", row %" PRId64 ": %.9g, expected %.9g within %.3g",
                     s->b, h, i, found, row->lse, row->lse_error);
    return HOLDS;
}

static verdict check_rows(checker *with, const property_case *made, const result *r, int64_t *visible)
{
    apa_problem p = made->problem;
    const apa_recipe *recipe = &r->statistics.recipe;
    const bool exact = strcmp(made->method, "exact") == 0;
    const oracle_cold cold = {!exact, recipe->smooth_k == APA_TOGGLE_ON, recipe->hadamard == APA_TOGGLE_ON};
    const double u = !exact ? 0x1p-22 : strcmp(with->engine, "reference") == 0 ? 0x1p-52 : 0x1p-24;
    const int64_t G = p.q.shape[1] / p.k.shape[1];
    oracle_row row;
    verdict v = HOLDS;
    p.out = r->outputs.out;
    p.lse = r->outputs.lse;
    *visible = 0;
    for (int64_t b = 0; b < oracle_count(&p) && v == HOLDS; b++) {
        const oracle_sequence s = oracle_at(&p, b);
        for (int64_t hkv = 0; hkv < p.k.shape[1] && v == HOLDS; hkv++) {
            oracle_keys keys = oracle_decode(&p, &s, hkv, &cold);
            for (int64_t h = hkv * G; h < (hkv + 1) * G && v == HOLDS; h++)
                for (int64_t i = 0; i < s.queries && v == HOLDS; i++) {
                    oracle_attend(&keys, h, i, u, &row);
                    *visible += row.tiles;
                    v = check_row(with, made, &p, &s, h, i, &row);
                }
            oracle_keys_free(&keys);
        }
    }
    return v;
}

/* ---- counts ---- */

static verdict check_map(checker *with, const property_case *made, const uint8_t *map, const apa_statistics *found)
{
    const apa_problem *p = &made->problem;
    const int64_t tiles = (p->k.shape[2] + 63) / 64;
    int64_t count[4] = {0}, at = 0;
    for (int64_t b = 0; b < oracle_count(p); b++) {
        const oracle_sequence s = oracle_at(p, b);
        for (int64_t h = 0; h < p->q.shape[1]; h++)
            for (int64_t i = 0; i < s.queries; i++)
                for (int64_t t = 0; t < tiles; t++, at++) {
                    bool sees = false;
                    for (int64_t j = 64 * t; j < 64 * t + 64 && j < s.keys; j++)
                        sees = sees || oracle_sees(p, &s, h, i, j);
                    if (map[at] > APA_VERDICT_INVISIBLE || sees != (map[at] != APA_VERDICT_INVISIBLE))
                        return fails(with,
                                     "verdict %d of head %" PRId64 ", row %" PRId64 ", tile %" PRId64 " that it %s",
                                     map[at], h, i, t, sees ? "sees" : "does not see");
                    count[map[at]]++;
                }
    }
    if (count[APA_VERDICT_HOT] != found->hot || count[APA_VERDICT_SKIPPED] != found->skipped ||
        count[APA_VERDICT_COLD] + count[APA_VERDICT_SKIPPED] != found->cold)
        return fails(with, "map of verdicts: %" PRId64 " hot, %" PRId64 " cold; counted %" PRId64 ", %" PRId64,
                     count[APA_VERDICT_HOT], count[APA_VERDICT_COLD] + count[APA_VERDICT_SKIPPED], found->hot,
                     found->cold);
    return HOLDS;
}

/* ---- the same bits ---- */

static bool same_rows(const apa_tensor *a, int64_t ab, int64_t ai, const apa_tensor *b, int64_t bb, int64_t bi,
                      int64_t rows)
{
    const size_t size = apa_dtype_bytes(a->dtype);
    for (int64_t h = 0; h < a->shape[1]; h++)
        for (int64_t i = 0; i < rows; i++) {
            const int64_t x = ab * a->stride[0] + h * a->stride[1] + (ai + i) * a->stride[2],
                          y = bb * b->stride[0] + h * b->stride[1] + (bi + i) * b->stride[2];
            if (memcmp((const char *)a->data + x * (int64_t)size, (const char *)b->data + y * (int64_t)size,
                       (size_t)a->shape[3] * size) != 0)
                return false;
        }
    return true;
}

static verdict check_tasks(checker *with, const property_case *made, const result *r)
{
    result other = run(with, with->backwards, made, NULL);
    verdict v = HOLDS;
    if (other.status != APA_STATUS_OK)
        v = fails(with, "with tasks backwards: %s", apa_context_message(with->backwards));
    for (int i = 0; i < 2 && v == HOLDS; i++)
        if (other.outputs.bytes[i] > 0 &&
            memcmp(other.outputs.memory[i], r->outputs.memory[i], r->outputs.bytes[i]) != 0)
            v = fails(with, "%s has other bits with tasks backwards", i == 0 ? "out" : "lse");
    case_outputs_free(&other.outputs);
    return v;
}

/* Rows of x from `entry`, `first` on, in new contiguous memory [1, H, rows, D]. */
static apa_tensor copy_rows(const apa_tensor *x, int64_t entry, int64_t first, int64_t rows)
{
    const size_t size = apa_dtype_bytes(x->dtype);
    apa_tensor to = apa_tensor_hnd(NULL, x->dtype, 1, x->shape[1], rows, x->shape[3]);
    to.data = malloc((size_t)(x->shape[1] * rows * x->shape[3]) * size + 1);
    for (int64_t h = 0; h < x->shape[1]; h++)
        for (int64_t i = 0; i < rows; i++)
            memcpy((char *)to.data + (h * rows + i) * x->shape[3] * (int64_t)size,
                   (const char *)x->data +
                       (entry * x->stride[0] + h * x->stride[1] + (first + i) * x->stride[2]) * (int64_t)size,
                   (size_t)x->shape[3] * size);
    return to;
}

static apa_tensor copy_keys(const apa_problem *p, const apa_tensor *x, const oracle_sequence *s)
{
    const size_t size = apa_dtype_bytes(x->dtype), row = (size_t)x->shape[3] * size;
    apa_tensor to = apa_tensor_hnd(NULL, x->dtype, 1, x->shape[1], s->keys, x->shape[3]);
    to.data = malloc((size_t)(x->shape[1] * s->keys) * row + 1);
    for (int64_t j = 0; j < s->keys; j++) {
        int64_t entry, at;
        oracle_key_place(p, s, j, &entry, &at);
        for (int64_t h = 0; h < x->shape[1]; h++)
            memcpy((char *)to.data + (size_t)(h * s->keys + j) * row,
                   (const char *)x->data +
                       (entry * x->stride[0] + h * x->stride[1] + at * x->stride[2]) * (int64_t)size,
                   row);
    }
    return to;
}

/* The sequence as a problem of its own; its copies are in *owned. */
static property_case alone(const property_case *made, const oracle_sequence *s, void *owned[3])
{
    const apa_problem *p = &made->problem;
    property_case one = {.method = made->method};
    apa_problem *to = &one.problem;
    const bool packed = p->cu_seqlens_q != NULL;
    const int64_t entry = packed ? 0 : s->b, first = packed ? p->cu_seqlens_q[s->b] : 0;
    *to = *p;
    to->q = copy_rows(&p->q, entry, first, s->queries);
    to->k = copy_keys(p, &p->k, s);
    to->v = copy_keys(p, &p->v, s);
    owned[0] = to->q.data;
    owned[1] = to->k.data;
    owned[2] = to->v.data;
    to->out.shape[0] = to->lse.shape[0] = 1;
    to->out.shape[2] = to->lse.shape[2] = s->queries;
    to->cu_seqlens_q = to->cu_seqlens_k = to->seqused_k = to->q_offsets = NULL;
    to->block_table = NULL;
    to->batch = 0;
    if (p->causal != APA_CAUSAL_TOP_LEFT)
        to->q_offset = s->q_offset;
    apa_tensor *const of[2] = {&to->attn_mask, &to->alibi_slopes};
    for (int i = 0; i < 2; i++) {
        const bool rows = i == 0 && packed && of[i]->shape[2] != 1;
        if (of[i]->dtype == APA_DTYPE_NONE)
            continue;
        const int64_t offset =
            (of[i]->shape[0] != 1 ? s->b * of[i]->stride[0] : 0) + (rows ? first * of[i]->stride[2] : 0);
        of[i]->data = (char *)of[i]->data + offset * (int64_t)apa_dtype_bytes(of[i]->dtype);
        of[i]->shape[0] = 1;
        of[i]->shape[2] = rows ? s->queries : of[i]->shape[2];
    }
    return one;
}

static verdict check_alone(checker *with, const property_case *made, const result *r)
{
    verdict v = HOLDS;
    for (int64_t b = 0; b < oracle_count(&made->problem) && v == HOLDS; b++) {
        const oracle_sequence s = oracle_at(&made->problem, b);
        const bool packed = made->problem.cu_seqlens_q != NULL;
        const int64_t entry = packed ? 0 : b, first = packed ? made->problem.cu_seqlens_q[b] : 0;
        void *owned[3];
        const property_case one = alone(made, &s, owned);
        result own = run(with, with->one, &one, NULL);
        if (own.status != APA_STATUS_OK)
            v = fails(with, "sequence %" PRId64 " alone: %s", b, apa_context_message(with->one));
        else if (!same_rows(&own.outputs.out, 0, 0, &r->outputs.out, entry, first, s.queries) ||
                 (own.outputs.lse.dtype != APA_DTYPE_NONE &&
                  !same_rows(&own.outputs.lse, 0, 0, &r->outputs.lse, entry, first, s.queries)))
            v = fails(with, "sequence %" PRId64 " has other bits alone and contiguous", b);
        case_outputs_free(&own.outputs);
        for (int i = 0; i < 3; i++)
            free(owned[i]);
    }
    return v;
}

/* ---- all ---- */

static bool differ(const apa_problem *p)
{
    return p->cu_seqlens_q != NULL || p->cu_seqlens_k != NULL || p->seqused_k != NULL || p->q_offsets != NULL ||
           p->block_table != NULL;
}

static verdict check_result(checker *with, const property_case *made, const result *r, const uint8_t *map)
{
    int64_t visible;
    const apa_statistics *s = &r->statistics;
    if (!case_inputs_untouched(made))
        return fails(with, "an input was written to");
    if (!case_outputs_intact(made, &r->outputs))
        return fails(with, "something beside the outputs' rows was written to");
    if (check_rows(with, made, r, &visible) == FAILS)
        return FAILS;
    if (s->visible != visible || s->hot + s->cold != visible || s->skipped > s->cold)
        return fails(with,
                     "%" PRId64 " visible, %" PRId64 " hot, %" PRId64 " cold, %" PRId64 " skipped; expected %" PRId64
                     " visible",
                     s->visible, s->hot, s->cold, s->skipped, visible);
    if (map != NULL && check_map(with, made, map, s) == FAILS)
        return FAILS;
    if (check_tasks(with, made, r) == FAILS)
        return FAILS;
    return differ(&made->problem) && strcmp(made->method, "exact") == 0 ? check_alone(with, made, r) : HOLDS;
}

verdict check_case(checker *with, const property_case *made)
{
    const apa_problem *p = &made->problem;
    const int64_t tiles = (p->k.shape[2] + 63) / 64;
    uint8_t *map = NULL;
    if (!differ(p)) {
        const size_t bytes = (size_t)(p->q.shape[0] * p->q.shape[1] * p->q.shape[2] * tiles) + 1;
        map = malloc(bytes);
        if (map == NULL)
            abort();
        memset(map, 0xEE, bytes);
    }
    result r = run(with, with->one, made, map);
    verdict v = HOLDS;
    if (p->q.dtype == APA_DTYPE_F64 && strcmp(with->engine, "reference") != 0) {
        snprintf(with->message, sizeof with->message, "f64");
        v = r.status == APA_STATUS_UNSUPPORTED ? REFUSED : fails(with, "f64 is not refused");
    } else if (r.status == APA_STATUS_UNSUPPORTED && with->may_refuse) {
        snprintf(with->message, sizeof with->message, "%s", apa_context_message(with->one));
        v = REFUSED;
    } else if (r.status != APA_STATUS_OK) {
        v = fails(with, "%s: %s", apa_status_name(r.status), apa_context_message(with->one));
    } else {
        v = check_result(with, made, &r, map);
    }
    case_outputs_free(&r.outputs);
    free(map);
    return v;
}
