/* Keys on several GPUs: the CUDA engine on each rank's own keys, states over NCCL. See apa/dist_nccl.h.
 *
 * Workspace of a rank, R = B·Hq·Sq rows, P = ceil(R/N) of them its own to merge:
 *   part     out [N·P][Dv], lse [N·P]     its states of all rows
 *   theirs   out [N][P][Dv], lse [N][P]   all ranks' states of its own rows
 *   merged   out [N·P][Dv], lse [N·P]     its own rows first merged in place, then everybody's gathered
 * then whatever the engine asks for. */
#include "apa/dist_nccl.h"

#include "dist/nccl/merge.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define ALIGNMENT ((size_t)256)
#define LOOK_NS 200000 /* between two looks at a stream or a communicator */
#define MEETING_S 20.0

typedef struct nccl_call {
    apa_problem own; /* this rank's keys, out and lse in the workspace */
    apa_recipe recipe;
    int rank, ranks;
    int64_t rows, part, Dv; /* part: rows of a rank */
    float *out, *lse, *their_out, *their_lse, *all_out, *all_lse;
    char *engine; /* the engine's workspace */
    size_t engine_bytes, bytes;
} nccl_call;

void apa_dist_nccl_options_init(apa_dist_nccl_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
    options->meeting_s = MEETING_S;
}

static apa_status say(const apa_dist_nccl_options *options, apa_status status, const char *what, const char *text)
{
    if (options->message != NULL && options->message_size > 0)
        snprintf(options->message, options->message_size, "%s: %s", what, text);
    return status;
}

static apa_status failed(const apa_dist_nccl_options *options, int cuda)
{
    return say(options, APA_STATUS_INTERNAL, "CUDA", cudaGetErrorString((cudaError_t)cuda));
}

static void *take(char **at, size_t bytes)
{
    void *taken = *at;
    *at += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return taken;
}

/* Lays the workspace out from `base`, which may be NULL to measure. */
static void lay_out(nccl_call *call, char *base)
{
    char *at = base;
    const size_t all = (size_t)(call->ranks * call->part), floats = sizeof(float);
    call->out = take(&at, all * (size_t)call->Dv * floats);
    call->lse = take(&at, all * floats);
    call->their_out = take(&at, all * (size_t)call->Dv * floats);
    call->their_lse = take(&at, all * floats);
    call->all_out = take(&at, all * (size_t)call->Dv * floats);
    call->all_lse = take(&at, all * floats);
    call->engine = take(&at, call->engine_bytes);
    call->bytes = (size_t)(at - base);
}

/* The recipe as it is for all keys: what is on auto depends on how many there are, and on the kernels that the device
 * has. */
static apa_status resolve(apa_context *context, const apa_problem *problem, const apa_recipe *recipe, int64_t Skv,
                          apa_recipe *resolved)
{
    apa_problem whole = *problem;
    apa_attention_options options;
    apa_plan plan;
    apa_attention_options_init(&options);
    apa_plan_init(&plan);
    options.engine = "cuda";
    whole.k =
        apa_tensor_hnd(NULL, problem->k.dtype, problem->k.shape[0], problem->k.shape[1], Skv, problem->k.shape[3]);
    whole.v =
        apa_tensor_hnd(NULL, problem->v.dtype, problem->v.shape[0], problem->v.shape[1], Skv, problem->v.shape[3]);
    apa_status status = apa_attention_plan(context, &whole, recipe, &options, &plan);
    if (status == APA_STATUS_OK)
        *resolved = plan.recipe;
    return status;
}

static apa_status prepare(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                          const apa_dist_nccl_options *options, nccl_call *call)
{
    memset(call, 0, sizeof *call);
    if (context == NULL || problem == NULL || options == NULL || options->size != sizeof *options)
        return APA_STATUS_INVALID_ARGUMENT;
    if (options->communicator == NULL)
        return say(options, APA_STATUS_INVALID_ARGUMENT, "communicator", "NULL");
    if (options->Skv < 0 || options->k_first < 0 || options->k_first > options->Skv - problem->k.shape[2])
        return say(options, APA_STATUS_INVALID_ARGUMENT, "k_first", "this rank's keys reach beyond Skv");
    ncclComm_t communicator = (ncclComm_t)options->communicator;
    if (ncclCommUserRank(communicator, &call->rank) != ncclSuccess ||
        ncclCommCount(communicator, &call->ranks) != ncclSuccess)
        return say(options, APA_STATUS_INVALID_ARGUMENT, "communicator", "is none");
    apa_status status = resolve(context, problem, recipe, options->Skv, &call->recipe);
    if (status != APA_STATUS_OK)
        return status;
    const int64_t *q = problem->q.shape;
    call->own = *problem;
    call->own.q_offset =
        (problem->q_offset == APA_Q_OFFSET_DEFAULT ? options->Skv - q[2] : problem->q_offset) - options->k_first;
    call->Dv = problem->v.shape[3];
    call->rows = q[0] * q[1] * q[2];
    call->part = (call->rows + call->ranks - 1) / call->ranks;
    lay_out(call, NULL);
    call->own.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, q[0], q[1], q[2], call->Dv);
    call->own.lse = apa_tensor_hnd(NULL, APA_DTYPE_F32, q[0], q[1], q[2], 1);
    if (problem->k.shape[2] > 0)
        status = apa_cuda_workspace_bytes(context, &call->own, &call->recipe, &call->engine_bytes);
    return status;
}

apa_status apa_dist_nccl_workspace_bytes(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                         const apa_dist_nccl_options *options, size_t *bytes)
{
    nccl_call call;
    apa_status status = prepare(context, problem, recipe, options, &call);
    if (status != APA_STATUS_OK)
        return status;
    lay_out(&call, NULL);
    *bytes = call.bytes;
    return APA_STATUS_OK;
}

/* Own keys → part. */
static apa_status attend(apa_context *context, nccl_call *call, const apa_dist_nccl_options *options)
{
    const int64_t padding = call->ranks * call->part - call->rows;
    int code = 0;
    if (padding > 0)
        code = apa_dist_nccl_empty(call->out + call->rows * call->Dv, call->lse + call->rows, padding, call->Dv,
                                   options->stream);
    if (code == 0 && call->own.k.shape[2] == 0)
        code = apa_dist_nccl_empty(call->out, call->lse, call->rows, call->Dv, options->stream);
    if (code != 0)
        return failed(options, code);
    if (call->own.k.shape[2] == 0)
        return APA_STATUS_OK;
    apa_cuda_options cuda;
    apa_cuda_options_init(&cuda);
    cuda.stream = options->stream;
    cuda.workspace = call->engine;
    cuda.workspace_bytes = call->engine_bytes;
    call->own.out.data = call->out;
    call->own.lse.data = call->lse;
    return apa_cuda_attention(context, &call->own, &call->recipe, &cuda, NULL);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* A communicator that does not block says "in progress" until the ranks have met; that may be never. */
static ncclResult_t settle(ncclComm_t communicator, ncclResult_t code, double end)
{
    const struct timespec nap = {0, LOOK_NS};
    while (code == ncclInProgress && now_s() < end) {
        nanosleep(&nap, NULL);
        if (ncclCommGetAsyncError(communicator, &code) != ncclSuccess)
            return ncclInternalError;
    }
    return code;
}

static bool goes_on(ncclResult_t code)
{
    return code == ncclSuccess || code == ncclInProgress;
}

/* Every rank's rows of everybody. */
static ncclResult_t exchange(const nccl_call *call, ncclComm_t communicator, cudaStream_t stream, double end)
{
    const size_t lses = (size_t)call->part, outs = lses * (size_t)call->Dv;
    ncclResult_t code = ncclGroupStart();
    for (int r = 0; r < call->ranks && goes_on(code); r++) {
        code = ncclSend(call->out + (size_t)r * outs, outs, ncclFloat, r, communicator, stream);
        if (goes_on(code))
            code = ncclRecv(call->their_out + (size_t)r * outs, outs, ncclFloat, r, communicator, stream);
        if (goes_on(code))
            code = ncclSend(call->lse + (size_t)r * lses, lses, ncclFloat, r, communicator, stream);
        if (goes_on(code))
            code = ncclRecv(call->their_lse + (size_t)r * lses, lses, ncclFloat, r, communicator, stream);
    }
    const ncclResult_t ended = ncclGroupEnd();
    return goes_on(code) ? settle(communicator, ended, end) : code;
}

static ncclResult_t gather(const nccl_call *call, ncclComm_t communicator, cudaStream_t stream, double end)
{
    const size_t lses = (size_t)call->part, outs = lses * (size_t)call->Dv;
    ncclResult_t code =
        ncclAllGather(call->all_out + (size_t)call->rank * outs, call->all_out, outs, ncclFloat, communicator, stream);
    code = settle(communicator, code, end);
    if (code != ncclSuccess)
        return code;
    code =
        ncclAllGather(call->all_lse + (size_t)call->rank * lses, call->all_lse, lses, ncclFloat, communicator, stream);
    return settle(communicator, code, end);
}

apa_status apa_dist_nccl_attention(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                   const apa_dist_nccl_options *options)
{
    nccl_call call;
    apa_status status = prepare(context, problem, recipe, options, &call);
    if (status != APA_STATUS_OK)
        return status;
    lay_out(&call, options->workspace);
    if (options->workspace == NULL || options->workspace_bytes < call.bytes ||
        (uintptr_t)options->workspace % ALIGNMENT != 0)
        return say(options, APA_STATUS_INVALID_ARGUMENT, "workspace", "too small, or not aligned to 256 bytes");
    status = attend(context, &call, options);
    if (status != APA_STATUS_OK || call.rows == 0)
        return status;
    ncclComm_t communicator = (ncclComm_t)options->communicator;
    cudaStream_t stream = (cudaStream_t)options->stream;
    const double end = now_s() + options->meeting_s;
    ncclResult_t code = exchange(&call, communicator, stream, end);
    int merged = 0;
    if (code == ncclSuccess)
        merged = apa_dist_nccl_merge(call.their_out, call.their_lse, call.ranks, call.part, call.Dv,
                                     call.all_out + call.rank * call.part * call.Dv,
                                     call.all_lse + call.rank * call.part, stream);
    if (code == ncclSuccess && merged == 0)
        code = gather(&call, communicator, stream, end);
    if (code == ncclInProgress) {
        ncclCommAbort(communicator);
        return say(options, APA_STATUS_IO, "NCCL", "another rank has not come in time; the communicator is gone");
    }
    if (code != ncclSuccess)
        return say(options, APA_STATUS_INTERNAL, "NCCL", ncclGetErrorString(code));
    if (merged == 0)
        merged = apa_dist_nccl_store(call.all_out, call.all_lse, &problem->out, &problem->lse, stream);
    return merged == 0 ? APA_STATUS_OK : failed(options, merged);
}

apa_status apa_dist_nccl_wait(const apa_dist_nccl_options *options, double seconds)
{
    const double end = now_s() + seconds;
    const struct timespec nap = {0, LOOK_NS};
    ncclComm_t communicator = (ncclComm_t)options->communicator;
    for (;;) {
        ncclResult_t error = ncclSuccess;
        const cudaError_t done = cudaStreamQuery((cudaStream_t)options->stream);
        if (done == cudaSuccess)
            return APA_STATUS_OK;
        const char *why = NULL;
        if (done != cudaErrorNotReady)
            why = cudaGetErrorString(done);
        else if (ncclCommGetAsyncError(communicator, &error) != ncclSuccess ||
                 (error != ncclSuccess && error != ncclInProgress))
            why = ncclGetErrorString(error);
        else if (now_s() > end)
            why = "not done in time: another rank is lost or late";
        if (why != NULL) {
            ncclCommAbort(communicator);
            return say(options, APA_STATUS_IO, "NCCL", why);
        }
        nanosleep(&nap, NULL);
    }
}
