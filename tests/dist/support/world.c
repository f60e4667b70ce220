/* See world.h. */
#include "support/world.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

apa_context *context;
apa_dist *dist;
int32_t rank, ranks;

int world_main(const char *name, const struct CMUnitTest *tests, size_t count)
{
    int level, size;
    char message[256];
    apa_context_options options;
    apa_context_options_init(&options);
    options.threads = 1;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (apa_context_create(&context, &options) != APA_STATUS_OK ||
        apa_dist_create(&dist, NULL, NULL, message, sizeof message) != APA_STATUS_OK) {
        fprintf(stderr, "no context or no apa_dist\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    rank = apa_dist_rank(dist);
    ranks = apa_dist_ranks(dist);
    if (rank != 0 && freopen("/dev/null", "w", stdout) == NULL)
        MPI_Abort(MPI_COMM_WORLD, 1);
    printf("# %d ranks\n", (int)ranks);
    apa_test_seed();
    const int failed = _cmocka_run_group_tests(name, tests, count, NULL, NULL);
    const int32_t most = world_largest(failed);
    apa_dist_destroy(dist);
    apa_context_destroy(context);
    MPI_Finalize();
    return most != 0;
}

int32_t world_largest(int32_t value)
{
    int32_t largest = 0;
    if (apa_dist_agree(dist, value, &largest) != APA_STATUS_OK)
        fail_msg("%s", apa_dist_message(dist));
    return largest;
}

void world_judge(int right, const char *format, ...)
{
    if (!right) {
        va_list arguments;
        va_start(arguments, format);
        fprintf(stderr, "rank %d: ", (int)rank);
        vfprintf(stderr, format, arguments);
        fputc('\n', stderr);
        va_end(arguments);
    }
    if (world_largest(!right) != 0)
        fail_msg("a rank says no");
}

world_case world_case_init(int64_t Sq, int64_t Skv)
{
    world_case c;
    memset(&c, 0, sizeof c);
    c.shape = (apa_test_shape){1, 4, 2, Sq, Skv, 32, 32};
    c.dtype = APA_DTYPE_F32;
    c.q_offset = APA_Q_OFFSET_DEFAULT;
    c.window_left = c.window_right = -1;
    c.preset = "exact";
    c.settings = "";
    c.seed = apa_test_seed() + 7;
    return c;
}

/* ---- who gets what: the same on every rank, from the seed ---- */

static apa_dist_shard ragged(int64_t length, uint64_t seed)
{
    apa_dist_shard mine;
    apa_test_rng rng = {seed};
    memset(&mine, 0, sizeof mine);
    int32_t runs[64] = {0};
    for (int64_t at = 0; at < length;) {
        const int64_t rest = length - at, most = length / ranks / 2 + 2;
        int64_t n = 1 + apa_test_below(&rng, most);
        int32_t owner = (int32_t)apa_test_below(&rng, ranks);
        n = n < rest ? n : rest;
        while (runs[owner] == 4) /* the rest of a full rank goes to the next */
            owner = (owner + 1) % ranks;
        int32_t full = 0;
        for (int32_t r = 0; r < ranks; r++)
            full += runs[r] == 4;
        if (full == ranks - 1 && runs[owner] == 3)
            n = rest;
        runs[owner]++;
        if (owner == rank) {
            mine.run[mine.count] = (apa_dist_run){at, n, apa_dist_shard_rows(&mine)};
            mine.count++;
        }
        at += n;
    }
    return mine;
}

static apa_dist_shard cut(world_split split, int64_t length, uint64_t seed)
{
    apa_dist_shard shard;
    memset(&shard, 0, sizeof shard);
    switch (split) {
    case WORLD_ZIGZAG:
        return apa_dist_split_zigzag(length, ranks, rank, 64);
    case WORLD_BLOCKS:
        return apa_dist_split_blocks(length, ranks, rank, 1);
    case WORLD_RAGGED:
        return ragged(length, seed);
    default:
        if (rank == ranks - 1)
            shard = (apa_dist_shard){1, {{0, length, 0}}};
        return shard;
    }
}

/* ---- a rank's part of a tensor ---- */

/* The shard's rows, contiguous, in memory of their own (*memory, to be freed). */
static apa_tensor compact_rows(const apa_tensor *whole, const apa_dist_shard *shard, void **memory)
{
    const int64_t *n = whole->shape, rows = apa_dist_shard_rows(shard),
                  element = (int64_t)apa_dtype_bytes(whole->dtype);
    *memory = malloc((size_t)(n[0] * n[1] * rows * n[3] * element + 1));
    apa_tensor part = apa_tensor_hnd(*memory, whole->dtype, n[0], n[1], rows, n[3]);
    for (int64_t head = 0; head < n[0] * n[1]; head++)
        for (int32_t r = 0; r < shard->count; r++)
            for (int64_t i = 0; i < shard->run[r].count; i++)
                memcpy((char *)*memory + (head * rows + shard->run[r].at + i) * n[3] * element,
                       (char *)whole->data + (head / n[1] * whole->stride[0] + head % n[1] * whole->stride[1] +
                                              (shard->run[r].first + i) * whole->stride[2]) *
                                                 element,
                       (size_t)(n[3] * element));
    return part;
}

static void point_at_whole(apa_dist_shard *shard)
{
    for (int32_t i = 0; i < shard->count; i++)
        shard->run[i].at = shard->run[i].first;
}

static apa_dist_problem make_part(const world_case *c, apa_test_problem *t, void *memory[5])
{
    apa_dist_problem p;
    apa_dist_problem_init(&p);
    p.Sq = c->shape.Sq;
    p.Skv = c->shape.Skv;
    p.queries = c->queries;
    p.q_shard = cut(c->split, p.Sq, c->seed + 1);
    p.k_shard = cut(c->split, p.Skv, c->seed + 2);
    p.local = t->problem;
    const bool whole_queries = c->queries == APA_DIST_QUERIES_WHOLE;
    if (c->compact) {
        p.local.k = compact_rows(&t->problem.k, &p.k_shard, &memory[1]);
        p.local.v = compact_rows(&t->problem.v, &p.k_shard, &memory[2]);
    } else {
        point_at_whole(&p.k_shard);
    }
    if (c->compact && !whole_queries) {
        p.local.q = compact_rows(&t->problem.q, &p.q_shard, &memory[0]);
        p.local.out = compact_rows(&t->problem.out, &p.q_shard, &memory[3]);
        p.local.lse = compact_rows(&t->problem.lse, &p.q_shard, &memory[4]);
    } else if (!whole_queries) {
        point_at_whole(&p.q_shard);
    }
    return p;
}

/* Rank 0's tensors take what all ranks made; its own rows lie there already when its tensors are the whole's. */
static apa_status collect(const world_case *c, apa_test_problem *t, const apa_dist_problem *p)
{
    apa_test_problem *other = NULL;
    apa_tensor out = t->problem.out, lse = t->problem.lse;
    if (c->queries == APA_DIST_QUERIES_WHOLE)
        return APA_STATUS_OK;
    if (!c->compact) { /* into another tensor, so that nothing passes for collected that was there before */
        other = apa_test_make(c->shape, c->dtype, APA_DTYPE_F32, APA_TEST_HND, c->seed);
        out = other->problem.out;
        lse = other->problem.lse;
    }
    apa_status status = apa_dist_collect(dist, p, 0, &out, &lse);
    if (!c->compact && rank == 0) {
        apa_tensor from[2] = {out, lse}, to[2] = {t->problem.out, t->problem.lse};
        for (int i = 0; i < 2; i++)
            for (int64_t b = 0; b < to[i].shape[0]; b++)
                for (int64_t h = 0; h < to[i].shape[1]; h++)
                    for (int64_t s = 0; s < to[i].shape[2]; s++)
                        for (int64_t d = 0; d < to[i].shape[3]; d++)
                            apa_test_set(&to[i], b, h, s, d, apa_test_get(&from[i], b, h, s, d));
    }
    if (other != NULL)
        apa_test_free(other);
    return status;
}

world_result world_run(const world_case *c, world_change change)
{
    world_result result;
    void *memory[5] = {NULL};
    apa_recipe recipe = apa_test_recipe(c->preset, c->settings);
    apa_dist_call call;
    apa_dist_call_init(&call);
    apa_dist_statistics_init(&result.statistics);
    call.exchange = c->exchange;
    apa_test_problem *t = apa_test_make(c->shape, c->dtype, APA_DTYPE_F32, APA_TEST_HND, c->seed);
    t->problem.causal = c->causal;
    t->problem.q_offset = c->q_offset;
    t->problem.window_left = c->window_left;
    t->problem.window_right = c->window_right;
    if (change != NULL)
        change(t);
    const apa_dist_problem p = make_part(c, t, memory);
    apa_status status = apa_dist_attention(dist, context, &p, &recipe, &call, &result.statistics);
    if (status == APA_STATUS_OK)
        status = collect(c, t, &p);
    for (int i = 0; i < 5; i++)
        free(memory[i]);
    result.whole = t;
    if (status != APA_STATUS_OK)
        fprintf(stderr, "rank %d: %s\n", (int)rank, apa_dist_message(dist));
    if (world_largest(status != APA_STATUS_OK) != 0)
        fail_msg("a rank failed");
    return result;
}

world_truth world_truth_make(const apa_test_problem *t)
{
    const world_truth truth = {apa_test_doubles(&t->problem.out), apa_test_doubles(&t->problem.lse)};
    apa_test_fast_oracle(&t->problem, truth.out, truth.lse);
    return truth;
}

void world_truth_free(world_truth *truth)
{
    free(truth->out);
    free(truth->lse);
}

void world_errors(const apa_test_problem *t, const world_truth *truth, double *out_error, double *lse_error)
{
    *out_error = apa_test_rel_l2(&t->problem.out, truth->out);
    *lse_error = apa_test_lse_error(&t->problem.lse, truth->lse);
}

double world_alone(apa_test_problem *t, const world_truth *truth, const char *preset, const char *settings)
{
    double out_error, lse_error;
    apa_recipe recipe = apa_test_recipe(preset, settings);
    if (apa_attention(context, &t->problem, &recipe, NULL, NULL) != APA_STATUS_OK)
        fail_msg("%s", apa_context_message(context));
    world_errors(t, truth, &out_error, &lse_error);
    return out_error;
}
