/* The NCCL backend on real devices: a program to be run by hand, one thread and one GPU a rank.
 *
 *   nccl_verify              right? small shapes against the reference engine; a rank that does not come
 *   nccl_verify --time       fast? 4096 queries, 262144 keys, 24/8 heads, D 128: all GPUs against one
 * Exit status 0 when everything that was checked held. */
#include <apa/apa.h>
#include <apa/dist_nccl.h>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST_RANKS 16
#define REPEATS 9
#define WAIT_S 5.0

typedef struct shape {
    int64_t B, Hq, Hkv, Sq, Skv, D;
    int causal;
} shape;

/* One run over all ranks; every thread has its own rank. */
typedef struct task {
    const shape *s;
    const char *preset;
    const uint16_t *q, *k, *v; /* on the host */
    int64_t cut[LARGEST_RANKS + 1];
    int rank, ranks, repeats;
    bool absent; /* this rank does not take part */
    ncclUniqueId id;
    float *out, *lse; /* of this rank, on the host */
    double ms;        /* median */
    char said[256];
    apa_status status;
    pthread_barrier_t *start;
} task;

/* ---- data: codes of f16 normals, drawn from a table of quantiles ---- */

static uint16_t table[65536];

static uint16_t to_f16(double x)
{
    int exponent;
    const double m = frexp(fabs(x), &exponent); /* m in [.5, 1) */
    const uint16_t sign = x < 0 ? 0x8000 : 0;
    if (x == 0 || exponent < -13)
        return (uint16_t)(sign | (uint16_t)lrint(fabs(x) * 0x1p24));
    return (uint16_t)(sign | (uint16_t)(((exponent + 14) << 10) + (int)lrint((m * 2 - 1) * 1024)));
}

static void make_table(void)
{
    uint64_t state = 7;
    for (int i = 0; i < 65536; i += 2) {
        double u[2];
        for (int j = 0; j < 2; j++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            u[j] = ((double)(state >> 11) + 0.5) * 0x1p-53;
        }
        table[i] = to_f16(sqrt(-2 * log(u[0])) * cos(6.283185307179586 * u[1]));
        table[i + 1] = to_f16(sqrt(-2 * log(u[0])) * sin(6.283185307179586 * u[1]));
    }
}

static uint16_t *random_f16(int64_t n, uint64_t seed)
{
    uint16_t *x = malloc((size_t)n * sizeof *x + 8);
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (int64_t i = 0; i < n; i += 4) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        for (int64_t j = i; j < i + 4 && j < n; j++)
            x[j] = table[state >> 16 * (j - i) & 0xffff];
    }
    return x;
}

/* ---- one rank ---- */

static void *device_copy(const void *from, size_t bytes)
{
    void *to = NULL;
    if (cudaMalloc(&to, bytes + 256) != cudaSuccess ||
        (from != NULL && cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) != cudaSuccess)) {
        fprintf(stderr, "no device memory for %zu bytes\n", bytes);
        exit(1);
    }
    return to;
}

/* This rank's keys of [H][Skv][D] as [H][n][D] on the device. */
static void *device_keys(const task *t, const uint16_t *whole)
{
    const shape *s = t->s;
    const int64_t from = t->cut[t->rank], n = t->cut[t->rank + 1] - from, heads = s->B * s->Hkv;
    void *to = device_copy(NULL, (size_t)(heads * n * s->D * 2));
    for (int64_t h = 0; h < heads && n > 0; h++)
        cudaMemcpy((char *)to + h * n * s->D * 2, whole + (h * s->Skv + from) * s->D, (size_t)(n * s->D * 2),
                   cudaMemcpyHostToDevice);
    return to;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void run(task *t, apa_context *context, apa_problem *p, apa_dist_nccl_options *options, const apa_recipe *recipe)
{
    double times[REPEATS + 2];
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int i = 0; i < t->repeats + 2 && t->status == APA_STATUS_OK; i++) {
        float ms = 0;
        pthread_barrier_wait(t->start);
        if (t->absent)
            break;
        cudaEventRecord(begin, options->stream);
        t->status = apa_dist_nccl_attention(context, p, recipe, options);
        cudaEventRecord(end, options->stream);
        if (t->status == APA_STATUS_OK)
            t->status = apa_dist_nccl_wait(options, WAIT_S);
        cudaEventElapsedTime(&ms, begin, end);
        times[i] = ms;
    }
    qsort(times + 2, (size_t)t->repeats, sizeof *times, by_value); /* the first two are not timed */
    t->ms = times[2 + t->repeats / 2];
    if (t->status != APA_STATUS_OK && t->said[0] == '\0')
        snprintf(t->said, sizeof t->said, "%s", apa_context_message(context));
}

/* A communicator that does not block. */
static bool join(ncclComm_t *communicator, const task *t)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t code = ncclCommInitRankConfig(communicator, t->ranks, t->id, t->rank, &config);
    while (code == ncclInProgress)
        if (ncclCommGetAsyncError(*communicator, &code) != ncclSuccess)
            return false;
    return code == ncclSuccess;
}

static void *rank_main(void *argument)
{
    task *t = argument;
    const shape *s = t->s;
    const int64_t n = t->cut[t->rank + 1] - t->cut[t->rank];
    apa_context *context;
    apa_recipe recipe;
    apa_problem p;
    apa_dist_nccl_options options;
    ncclComm_t communicator;
    cudaStream_t stream;
    size_t bytes = 0;
    cudaSetDevice(t->rank);
    cudaStreamCreate(&stream);
    if (apa_context_create(&context, NULL) != APA_STATUS_OK || apa_recipe_init(&recipe, t->preset) != APA_STATUS_OK ||
        !join(&communicator, t)) {
        fprintf(stderr, "rank %d: no communicator\n", t->rank);
        exit(1);
    }
    apa_problem_init(&p);
    apa_dist_nccl_options_init(&options);
    p.q = apa_tensor_hnd(device_copy(t->q, (size_t)(s->B * s->Hq * s->Sq * s->D * 2)), APA_DTYPE_F16, s->B, s->Hq,
                         s->Sq, s->D);
    p.k = apa_tensor_hnd(device_keys(t, t->k), APA_DTYPE_F16, s->B, s->Hkv, n, s->D);
    p.v = apa_tensor_hnd(device_keys(t, t->v), APA_DTYPE_F16, s->B, s->Hkv, n, s->D);
    const size_t rows = (size_t)(s->B * s->Hq * s->Sq);
    p.out = apa_tensor_hnd(device_copy(NULL, rows * (size_t)s->D * 4), APA_DTYPE_F32, s->B, s->Hq, s->Sq, s->D);
    p.lse = apa_tensor_hnd(device_copy(NULL, rows * 4), APA_DTYPE_F32, s->B, s->Hq, s->Sq, 1);
    p.causal = s->causal;
    options.communicator = communicator;
    options.stream = stream;
    options.Skv = s->Skv;
    options.k_first = t->cut[t->rank];
    options.meeting_s = WAIT_S;
    options.message = t->said;
    options.message_size = sizeof t->said;
    t->status = apa_dist_nccl_workspace_bytes(context, &p, &recipe, &options, &bytes);
    options.workspace = device_copy(NULL, bytes);
    options.workspace_bytes = bytes;
    run(t, context, &p, &options, &recipe);
    if (t->status == APA_STATUS_OK && !t->absent) {
        t->out = malloc(rows * (size_t)s->D * 4);
        t->lse = malloc(rows * 4);
        cudaMemcpy(t->out, p.out.data, rows * (size_t)s->D * 4, cudaMemcpyDeviceToHost);
        cudaMemcpy(t->lse, p.lse.data, rows * 4, cudaMemcpyDeviceToHost);
    }
    void *const memory[] = {p.q.data, p.k.data, p.v.data, p.out.data, p.lse.data, options.workspace};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0] && t->status == APA_STATUS_OK && !t->absent; i++)
        cudaFree(memory[i]);
    if (t->status == APA_STATUS_OK && !t->absent)
        ncclCommDestroy(communicator);
    apa_context_destroy(context);
    return NULL;
}

/* All ranks; equal cut, or everything but an odd rest on the last rank, or the last rank empty. */
static void run_all(task *t, int ranks, const shape *s, const char *preset, const uint16_t *const data[3], int way,
                    int repeats, int absent)
{
    pthread_t thread[LARGEST_RANKS];
    pthread_barrier_t start;
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    pthread_barrier_init(&start, NULL, (unsigned)ranks);
    for (int r = 0; r < ranks; r++) {
        memset(&t[r], 0, sizeof t[r]);
        t[r].s = s;
        t[r].preset = preset;
        t[r].q = data[0];
        t[r].k = data[1];
        t[r].v = data[2];
        t[r].rank = r;
        t[r].ranks = ranks;
        t[r].repeats = repeats;
        t[r].absent = r == absent;
        t[r].id = id;
        t[r].start = &start;
        for (int i = 0; i <= ranks; i++)
            t[r].cut[i] = i == ranks ? s->Skv
                          : way == 0 ? s->Skv * i / ranks
                          : way == 1 ? i * 37
                                     : (i + 1 == ranks ? s->Skv : s->Skv * i / (ranks - 1 > 0 ? ranks - 1 : 1));
        if (way == 2 && ranks > 1)
            t[r].cut[ranks - 1] = s->Skv;
    }
    for (int r = 0; r < ranks; r++)
        pthread_create(&thread[r], NULL, rank_main, &t[r]);
    for (int r = 0; r < ranks; r++)
        pthread_join(thread[r], NULL);
    pthread_barrier_destroy(&start);
}

static double distance(const float *a, const float *b, size_t n)
{
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++)
        if (!(a[i] == b[i])) {
            difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
            size += 0;
        }
    for (size_t i = 0; i < n; i++)
        size += isfinite(b[i]) ? (double)b[i] * b[i] : 0;
    return sqrt(difference / size);
}

static int check(int ranks, const shape *s, const char *preset, int way, double bound)
{
    task t[LARGEST_RANKS];
    const size_t rows = (size_t)(s->B * s->Hq * s->Sq);
    uint16_t *const data[3] = {random_f16(s->B * s->Hq * s->Sq * s->D, 1), random_f16(s->B * s->Hkv * s->Skv * s->D, 2),
                               random_f16(s->B * s->Hkv * s->Skv * s->D, 3)};
    float *truth = malloc(rows * (size_t)s->D * 4), *truth_lse = malloc(rows * 4);
    apa_context *context;
    apa_recipe exact;
    apa_problem p;
    apa_attention_options options;
    apa_problem_init(&p);
    apa_attention_options_init(&options);
    options.engine = "cpu";
    p.q = apa_tensor_hnd(data[0], APA_DTYPE_F16, s->B, s->Hq, s->Sq, s->D);
    p.k = apa_tensor_hnd(data[1], APA_DTYPE_F16, s->B, s->Hkv, s->Skv, s->D);
    p.v = apa_tensor_hnd(data[2], APA_DTYPE_F16, s->B, s->Hkv, s->Skv, s->D);
    p.out = apa_tensor_hnd(truth, APA_DTYPE_F32, s->B, s->Hq, s->Sq, s->D);
    p.lse = apa_tensor_hnd(truth_lse, APA_DTYPE_F32, s->B, s->Hq, s->Sq, 1);
    p.causal = s->causal;
    apa_context_create(&context, NULL);
    apa_recipe_init(&exact, "exact");
    apa_attention(context, &p, &exact, &options, NULL);
    run_all(t, ranks, s, preset, (const uint16_t *const *)data, way, 1, -1);
    int wrong = 0;
    for (int r = 0; r < ranks; r++) {
        const bool ran = t[0].status == APA_STATUS_OK && t[r].status == APA_STATUS_OK;
        const double error = ran ? distance(t[r].out, truth, rows * (size_t)s->D) : NAN;
        const double lse_error = ran ? distance(t[r].lse, truth_lse, rows) : NAN;
        size_t differ = 0;
        for (size_t i = 0; ran && i < rows * (size_t)s->D; i++)
            differ += memcmp(&t[r].out[i], &t[0].out[i], sizeof t[r].out[i]) != 0;
        const bool same = ran && differ == 0;
        const bool right = error <= bound && lse_error <= bound && same;
        wrong += !right;
        if (r == 0 || !right)
            printf("%s %d ranks, cut %d, %s, Sq %d, Skv %d, D %d, causal %d, rank %d: out %.2e, lse %.2e, %zu of %zu "
                   "values not rank 0's %s\n",
                   right ? "ok  " : "FAIL", ranks, way, preset, (int)s->Sq, (int)s->Skv, (int)s->D, s->causal, r, error,
                   lse_error, differ, rows * (size_t)s->D, t[r].said);
    }
    for (int r = 0; r < ranks; r++) {
        free(t[r].out);
        free(t[r].lse);
    }
    for (int i = 0; i < 3; i++)
        free(data[i]);
    free(truth);
    free(truth_lse);
    apa_context_destroy(context);
    return wrong;
}

/* The last rank stays away: the others must come back by themselves. */
static int check_absent(int ranks)
{
    task t[LARGEST_RANKS];
    const shape s = {1, 8, 2, 64, 4096, 128, 0};
    uint16_t *const data[3] = {random_f16(8 * 64 * 128, 1), random_f16(2 * 4096 * 128, 2),
                               random_f16(2 * 4096 * 128, 3)};
    run_all(t, ranks, &s, "exact", (const uint16_t *const *)data, 0, 1, ranks - 1);
    const bool right = ranks == 1 || t[0].status == APA_STATUS_IO;
    printf("%s a rank that does not come: status %d, %s\n", right ? "ok  " : "FAIL", (int)t[0].status, t[0].said);
    return !right;
}

static int time_it(int ranks)
{
    const shape s = {1, 24, 8, 4096, 262144, 128, 0};
    static const char *const presets[] = {"exact", "apa"};
    uint16_t *const data[3] = {random_f16(24 * 4096 * 128, 1), random_f16(8 * s.Skv * 128, 2),
                               random_f16(8 * s.Skv * 128, 3)};
    int failed = 0;
    for (int i = 0; i < 2; i++) {
        task one[LARGEST_RANKS], all[LARGEST_RANKS];
        run_all(one, 1, &s, presets[i], (const uint16_t *const *)data, 0, REPEATS, -1);
        run_all(all, ranks, &s, presets[i], (const uint16_t *const *)data, 0, REPEATS, -1);
        double slowest = 0;
        failed += one[0].status != APA_STATUS_OK;
        for (int r = 0; r < ranks; r++) {
            failed += all[r].status != APA_STATUS_OK;
            slowest = all[r].ms > slowest ? all[r].ms : slowest;
        }
        printf("%-6s 4096 x 262144, 24/8, D 128: 1 GPU %.3f ms, %d GPUs %.3f ms: %.2fx; rel L2 between them %.2e\n",
               presets[i], one[0].ms, ranks, slowest, one[0].ms / slowest,
               one[0].out != NULL && all[0].out != NULL ? distance(all[0].out, one[0].out, (size_t)24 * 4096 * 128)
                                                        : NAN);
        fflush(stdout);
    }
    return failed != 0;
}

int main(int argc, char **argv)
{
    int ranks = 0, wrong = 0;
    if (cudaGetDeviceCount(&ranks) != cudaSuccess || ranks < 1) {
        printf("skipped: no device\n");
        return 0;
    }
    ranks = ranks > LARGEST_RANKS ? LARGEST_RANKS : ranks;
    setvbuf(stdout, NULL, _IOLBF, 0);
    make_table();
    if (argc > 1 && strcmp(argv[1], "--time") == 0)
        return time_it(ranks);
    static const shape shapes[] = {
        {1, 6, 2, 77, 3001, 128, 1},
        {2, 4, 4, 33, 900, 64, 0},
        {1, 3, 1, 1, 5000, 128, 1},
        {1, 8, 2, 300, 300, 256, 1},
        {1, 4, 2, 130, 16000, 128, 0}}; /* on Hopper too with cold tiles on each of 2 ranks */
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int way = 0; way < 3; way++) {
            wrong += check(ranks, &shapes[i], "exact", way, 1.5e-3); /* P in f16 */
            if (way == 0)
                wrong += check(ranks, &shapes[i], "apa", way, 7e-2); /* E4M3 tiles on Hopper: all cold is at 5.7e-2 */
        }
    wrong += check_absent(ranks);
    printf("%d failures\n", wrong);
    return wrong != 0;
}
