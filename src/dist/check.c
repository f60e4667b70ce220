/* What does not agree is refused, on every rank with the same line, before any key moves.
 *
 * A rank checks its own arguments, writes card and verdict, and gathers the cards of all; from then on every rank
 * decides from the same bytes. A line names the rank, what it has, and what rank 0 has. */
#include "dist/job.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------- one rank's own arguments */

static apa_status say(apa_dist_card *card, apa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static apa_status say(apa_dist_card *card, apa_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(card->message, sizeof card->message, format, arguments);
    va_end(arguments);
    card->status = (int32_t)status;
    return status;
}

/* Runs lie in the sequence and in the tensor. */
static apa_status check_shard(apa_dist_card *card, const char *name, const apa_dist_shard *shard, int64_t length,
                              const apa_tensor *tensor)
{
    if (shard->count < 0 || shard->count > APA_DIST_RUNS)
        return say(card, APA_STATUS_INVALID_ARGUMENT, "%s: %d runs, expected 0 … %d", name, (int)shard->count,
                   APA_DIST_RUNS);
    for (int32_t i = 0; i < shard->count; i++) {
        const apa_dist_run *run = &shard->run[i];
        if (run->first < 0 || run->count < 0 || run->first > length || run->count > length - run->first)
            return say(card, APA_STATUS_INVALID_ARGUMENT,
                       "%s: run %d is %" PRId64 " positions from %" PRId64 ", expected them within 0 … %" PRId64, name,
                       (int)i, run->count, run->first, length);
        if (run->at < 0 || run->at > tensor->shape[2] || run->count > tensor->shape[2] - run->at)
            return say(card, APA_STATUS_INVALID_ARGUMENT,
                       "%s: run %d is rows %" PRId64 " … %" PRId64 " of a tensor of %" PRId64, name, (int)i, run->at,
                       run->at + run->count, tensor->shape[2]);
    }
    return APA_STATUS_OK;
}

static apa_status check_data(apa_dist_card *card, const char *name, const apa_tensor *tensor)
{
    const bool empty = tensor->shape[0] == 0 || tensor->shape[2] == 0;
    if (!empty && tensor->data == NULL)
        return say(card, APA_STATUS_INVALID_ARGUMENT, "%s: data is NULL", name);
    if (tensor->dtype == APA_DTYPE_F64)
        return say(card, APA_STATUS_UNSUPPORTED, "%s: f64 is not distributed, expected f16, bf16 or f32", name);
    return APA_STATUS_OK;
}

/* Whatever a problem can hold beside what is passed on here. */
static const char *beyond(const apa_problem *p)
{
    const struct {
        const char *name;
        bool given;
    } field[] = {
        {"softcap", p->softcap != 0},
        {"attn_mask", p->attn_mask.dtype != APA_DTYPE_NONE},
        {"mask_slopes", p->mask_slopes.dtype != APA_DTYPE_NONE},
        {"alibi_slopes", p->alibi_slopes.dtype != APA_DTYPE_NONE},
        {"sinks", p->sinks.dtype != APA_DTYPE_NONE},
        {"cu_seqlens", p->cu_seqlens_q != NULL || p->cu_seqlens_k != NULL},
        {"seqused_k", p->seqused_k != NULL},
        {"q_offsets", p->q_offsets != NULL},
        {"block_table", p->block_table != NULL},
    };
    for (size_t i = 0; i < sizeof field / sizeof field[0]; i++)
        if (field[i].given)
            return field[i].name;
    return p->causal == APA_CAUSAL_TOP_LEFT ? "causal: top-left" : NULL;
}

static void fill(apa_dist_card *card, const apa_dist_problem *problem, const apa_recipe *recipe,
                 const apa_dist_call *call)
{
    const apa_problem *p = &problem->local;
    memset(card, 0, sizeof *card);
    card->B = p->q.shape[0];
    card->Hq = p->q.shape[1];
    card->D = p->q.shape[3];
    card->Hkv = p->k.shape[1];
    card->Dv = p->v.shape[3];
    card->Sq = problem->Sq;
    card->Skv = problem->Skv;
    card->q_offset = p->q_offset == APA_Q_OFFSET_DEFAULT ? problem->Skv - problem->Sq : p->q_offset;
    card->window_left = p->window_left;
    card->window_right = p->window_right;
    card->scale = isnan(p->softmax_scale) ? 1.0 / sqrt((double)card->D) : p->softmax_scale;
    card->dtype = (int32_t)p->q.dtype;
    card->out_dtype = (int32_t)p->out.dtype;
    card->lse_dtype = (int32_t)p->lse.dtype;
    card->causal = p->causal;
    card->queries = (int32_t)problem->queries;
    card->exchange = (int32_t)call->exchange;
    snprintf(card->engine, sizeof card->engine, "%s", call->engine == NULL ? "auto" : call->engine);
    card->recipe = *recipe;
    card->q = problem->q_shard;
    card->k = problem->k_shard;
    if (problem->queries == APA_DIST_QUERIES_WHOLE)
        card->q = (apa_dist_shard){1, {{0, problem->Sq, 0}}};
}

/* FNV-1a over the rows of the queries. */
static uint64_t hash_queries(const apa_tensor *q)
{
    uint64_t hash = 0xcbf29ce484222325u;
    const int64_t element = (int64_t)apa_dtype_bytes(q->dtype);
    for (int64_t row = 0; row < q->shape[0] * q->shape[1] * q->shape[2]; row++) {
        const int64_t s = row % q->shape[2], h = row / q->shape[2] % q->shape[1], b = row / q->shape[2] / q->shape[1];
        const unsigned char *byte =
            (const unsigned char *)q->data + (b * q->stride[0] + h * q->stride[1] + s * q->stride[2]) * element;
        for (int64_t i = 0; i < q->shape[3] * element; i += 2)
            hash = (hash ^ (uint64_t)(byte[i] | byte[i + 1] << 8)) * 0x100000001b3u;
    }
    return hash;
}

apa_problem apa_dist_whole_problem(const apa_dist_card *card)
{
    apa_problem whole;
    apa_problem_init(&whole);
    const apa_dtype dtype = (apa_dtype)card->dtype;
    whole.q = apa_tensor_hnd(NULL, dtype, card->B, card->Hq, card->Sq, card->D);
    whole.k = apa_tensor_hnd(NULL, dtype, card->B, card->Hkv, card->Skv, card->D);
    whole.v = apa_tensor_hnd(NULL, dtype, card->B, card->Hkv, card->Skv, card->Dv);
    whole.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, card->B, card->Hq, card->Sq, card->Dv);
    whole.lse = apa_tensor_hnd(NULL, APA_DTYPE_F32, card->B, card->Hq, card->Sq, 1);
    whole.softmax_scale = card->scale;
    whole.causal = card->causal;
    whole.q_offset = card->q_offset;
    whole.window_left = card->window_left;
    whole.window_right = card->window_right;
    return whole;
}

/* The plan of the whole says what the engines think of shape and recipe, the plan of the part what they think of the
 * tensors. */
static apa_status ask_engine(apa_dist_job *job, apa_dist_card *card)
{
    apa_attention_options options;
    apa_plan plan;
    apa_attention_options_init(&options);
    apa_plan_init(&plan);
    options.engine = card->engine;
    const apa_problem whole = apa_dist_whole_problem(card);
    apa_status status = apa_attention_plan(job->context, &job->problem->local, &card->recipe, &options, &plan);
    if (status == APA_STATUS_OK)
        status = apa_attention_plan(job->context, &whole, &card->recipe, &options, &plan);
    if (status != APA_STATUS_OK)
        return say(card, status, "%s", apa_context_message(job->context));
    job->recipe = plan.recipe;
    return APA_STATUS_OK;
}

/* What the exchange of codes can say of tiles: the codes are INT8 as the engines' own prep makes them. */
static apa_status check_codes(apa_dist_job *job, apa_dist_card *card)
{
    const apa_recipe *r = &job->recipe;
    if (card->exchange != APA_DIST_EXCHANGE_CODES || r->force == APA_FORCE_HIGH)
        return APA_STATUS_OK;
    if (r->cold_format != APA_COLD_FORMAT_INT8 || r->tile != APA_DIST_TILE || r->q_terms != 1 ||
        r->smooth_k_stride > 1 || r->smooth_v == APA_TOGGLE_ON || r->eps_by == APA_EPS_BY_ROW ||
        (r->verdict != APA_VERDICT_RULE_MASS && r->verdict != APA_VERDICT_RULE_AUTO))
        return say(card, APA_STATUS_UNSUPPORTED,
                   "exchange: codes, and the recipe \"%s\" has not INT8 cold tiles of 64 keys, one Q term, K's mean "
                   "of all keys, V as it is and a verdict by mass with one eps for all rows, expected exchange exact",
                   r->name);
    return APA_STATUS_OK;
}

static apa_status check_own(apa_dist_job *job, apa_dist_card *card)
{
    const apa_dist_problem *problem = job->problem;
    const apa_problem *p = &problem->local;
    if (problem->Sq < 0 || problem->Skv < 0)
        return say(card, APA_STATUS_INVALID_ARGUMENT, "Sq %" PRId64 ", Skv %" PRId64 ", expected 0 or more",
                   problem->Sq, problem->Skv);
    if (problem->queries != APA_DIST_QUERIES_SHARDED && problem->queries != APA_DIST_QUERIES_WHOLE)
        return say(card, APA_STATUS_INVALID_ARGUMENT, "queries: %d, expected sharded or whole", (int)problem->queries);
    if (card->exchange < APA_DIST_EXCHANGE_AUTO || card->exchange > APA_DIST_EXCHANGE_CODES)
        return say(card, APA_STATUS_INVALID_ARGUMENT, "exchange: %d, expected auto, exact or codes",
                   (int)card->exchange);
    if (beyond(p) != NULL)
        return say(card, APA_STATUS_UNSUPPORTED, "%s: is not distributed", beyond(p));
    const apa_tensor *const tensor[5] = {&p->q, &p->k, &p->v, &p->out, &p->lse};
    static const char *const name[5] = {"q", "k", "v", "out", "lse"};
    apa_status status = ask_engine(job, card);
    for (int i = 0; i < 5 && status == APA_STATUS_OK; i++)
        if (tensor[i]->dtype != APA_DTYPE_NONE)
            status = check_data(card, name[i], tensor[i]);
    if (status == APA_STATUS_OK)
        status = check_shard(card, "q_shard", &card->q, card->Sq, &p->q);
    if (status == APA_STATUS_OK)
        status = check_shard(card, "k_shard", &card->k, card->Skv, &p->k);
    return status == APA_STATUS_OK ? check_codes(job, card) : status;
}

/* ------------------------------------------------------------------------------- all ranks' cards */

static apa_status compare_recipes(apa_dist *dist, const apa_dist_card *a, const apa_dist_card *b, int32_t rank)
{
    if (strcmp(a->recipe.name, b->recipe.name) != 0)
        return apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT, "rank %d: recipe \"%s\", rank 0 has \"%s\"", (int)rank,
                             b->recipe.name, a->recipe.name);
    for (size_t i = 0; apa_recipe_knob_at(i) != NULL; i++) {
        const char *knob = apa_recipe_knob_at(i)->name;
        char in_a[64] = "", in_b[64] = "";
        apa_recipe_get(&a->recipe, knob, in_a, sizeof in_a);
        apa_recipe_get(&b->recipe, knob, in_b, sizeof in_b);
        if (strcmp(in_a, in_b) != 0)
            return apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT, "rank %d: recipe with %s %s, rank 0 has %s",
                                 (int)rank, knob, in_b, in_a);
    }
    return APA_STATUS_OK;
}

static apa_status compare(apa_dist *dist, const apa_dist_card *a, const apa_dist_card *b, int32_t rank)
{
    const struct {
        const char *name;
        int64_t a, b;
    } number[] = {
        {"batch", a->B, b->B},
        {"q heads", a->Hq, b->Hq},
        {"k heads", a->Hkv, b->Hkv},
        {"dim of q and k", a->D, b->D},
        {"dim of v", a->Dv, b->Dv},
        {"Sq", a->Sq, b->Sq},
        {"Skv", a->Skv, b->Skv},
        {"q_offset", a->q_offset, b->q_offset},
        {"window_left", a->window_left, b->window_left},
        {"window_right", a->window_right, b->window_right},
        {"causal", a->causal, b->causal},
        {"queries", a->queries, b->queries},
        {"exchange", a->exchange, b->exchange},
    };
    for (size_t i = 0; i < sizeof number / sizeof number[0]; i++)
        if (number[i].a != number[i].b)
            return apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT, "rank %d: %s %" PRId64 ", rank 0 has %" PRId64,
                                 (int)rank, number[i].name, number[i].b, number[i].a);
    const struct {
        const char *name;
        int32_t a, b;
    } type[] = {
        {"inputs", a->dtype, b->dtype}, {"out", a->out_dtype, b->out_dtype}, {"lse", a->lse_dtype, b->lse_dtype}};
    for (size_t i = 0; i < sizeof type / sizeof type[0]; i++)
        if (type[i].a != type[i].b)
            return apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT, "rank %d: %s of dtype %s, rank 0 has %s", (int)rank,
                                 type[i].name, apa_dtype_name((apa_dtype)type[i].b),
                                 apa_dtype_name((apa_dtype)type[i].a));
    if (a->scale != b->scale)
        return apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT, "rank %d: softmax_scale %.17g, rank 0 has %.17g",
                             (int)rank, b->scale, a->scale);
    if (strcmp(a->engine, b->engine) != 0)
        return apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT, "rank %d: engine \"%s\", rank 0 has \"%s\"", (int)rank,
                             b->engine, a->engine);
    if (a->q_hash != b->q_hash)
        return apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT,
                             "rank %d: other queries than rank 0, expected the same on every rank", (int)rank);
    return compare_recipes(dist, a, b, rank);
}

typedef struct owned_run {
    int64_t first, count;
    int32_t rank;
} owned_run;

static int by_first(const void *a, const void *b)
{
    const owned_run *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

/* Every position of the sequence belongs to one rank. */
static apa_status check_cover(apa_dist *dist, const apa_dist_card *card, int32_t ranks, bool keys, int64_t length)
{
    const char *name = keys ? "k_shard" : "q_shard";
    owned_run *run = malloc((size_t)ranks * APA_DIST_RUNS * sizeof *run);
    size_t n = 0;
    int64_t at = 0;
    int32_t before = 0;
    apa_status status = APA_STATUS_OK;
    if (run == NULL)
        return apa_dist_fail(dist, APA_STATUS_OUT_OF_MEMORY, "no memory for the runs of %d ranks", (int)ranks);
    for (int32_t r = 0; r < ranks; r++) {
        const apa_dist_shard *shard = keys ? &card[r].k : &card[r].q;
        for (int32_t i = 0; i < shard->count; i++)
            if (shard->run[i].count > 0)
                run[n++] = (owned_run){shard->run[i].first, shard->run[i].count, r};
    }
    qsort(run, n, sizeof *run, by_first);
    for (size_t i = 0; i < n && status == APA_STATUS_OK; i++) {
        if (run[i].first < at)
            status = apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT,
                                   "%s: position %" PRId64 " belongs to ranks %d and %d, expected one", name,
                                   run[i].first, (int)before, (int)run[i].rank);
        else if (run[i].first > at)
            break;
        at = run[i].first + run[i].count;
        before = run[i].rank;
    }
    if (status == APA_STATUS_OK && at != length)
        status = apa_dist_fail(dist, APA_STATUS_INVALID_ARGUMENT,
                               "%s: position %" PRId64 " belongs to no rank, expected all of 0 … %" PRId64, name, at,
                               length - 1);
    free(run);
    return status;
}

apa_status apa_dist_check(apa_dist_job *job, const apa_recipe *recipe, const apa_dist_call *call)
{
    apa_dist *dist = job->dist;
    apa_dist_card *mine = &job->card[job->rank];
    fill(mine, job->problem, recipe, call);
    if (check_own(job, mine) == APA_STATUS_OK && job->problem->queries == APA_DIST_QUERIES_WHOLE)
        mine->q_hash = hash_queries(&job->problem->local.q);
    job->mine = mine;
    apa_dist_op gather = {.kind = APA_DIST_OP_GATHER, .data = job->card, .bytes = (int64_t)sizeof *job->card};
    if (apa_dist_wire_do(job->wire, &gather, "the other ranks' problems", &job->statistics->wait_ms) != APA_STATUS_OK)
        return apa_dist_lost(dist);
    for (int32_t r = 0; r < job->ranks; r++)
        if (job->card[r].status != APA_STATUS_OK)
            return apa_dist_fail(dist, (apa_status)job->card[r].status, "rank %d: %s", (int)r, job->card[r].message);
    apa_status status = APA_STATUS_OK;
    for (int32_t r = 1; r < job->ranks && status == APA_STATUS_OK; r++)
        status = compare(dist, &job->card[0], &job->card[r], r);
    if (status == APA_STATUS_OK)
        status = check_cover(dist, job->card, job->ranks, true, mine->Skv);
    if (status == APA_STATUS_OK && job->problem->queries == APA_DIST_QUERIES_SHARDED)
        status = check_cover(dist, job->card, job->ranks, false, mine->Sq);
    return status;
}
