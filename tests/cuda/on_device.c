/* Tensors in device memory (on_device.h). */
#include "tests/cuda/on_device.h"

#include "cli/cli.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD_BYTES = 4096, GUARD = 0xa5, SEED = 7 };

void on_device_expect(int error, const char *what)
{
    if (error == 0)
        return;
    printf("%s: %s\n", what, cudaGetErrorString((cudaError_t)error));
    exit(1);
}

void *on_device_copy(const void *from, size_t bytes)
{
    void *to = NULL;
    on_device_expect(cudaMalloc(&to, bytes > 0 ? bytes : 1), "device memory");
    if (from != NULL)
        on_device_expect(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
    else
        on_device_expect(cudaMemset(to, 0xff, bytes), "fill");
    return to;
}

void on_device_fetch(void *to, const void *from, size_t bytes)
{
    on_device_expect(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy from the device");
}

static void make(apa_array *a, apa_tensor *tensor, int64_t B, int64_t H, int64_t S, int64_t D)
{
    const int64_t shape[4] = {B, H, S, D};
    if (apa_array_allocate(a, APA_ARRAY_F16, 4, shape) != APA_STATUS_OK) {
        printf("no memory\n");
        exit(1);
    }
    *tensor = apa_tensor_hnd(NULL, APA_DTYPE_F16, B, H, S, D);
}

void on_device_make(on_device *to, const char *kind, int64_t B, int64_t Hq, int64_t Hkv, int64_t Sq, int64_t Skv,
                    int64_t D)
{
    const cli_synthetic shape = {kind, B, Hq, Hkv, Sq, Skv, D, D, SEED};
    *to = (on_device){.B = B, .Hq = Hq, .Hkv = Hkv, .Sq = Sq, .Skv = Skv, .D = D};
    apa_problem_init(&to->problem);
    make(&to->host[0], &to->problem.q, B, Hq, Sq, D);
    make(&to->host[1], &to->problem.k, B, Hkv, Skv, D);
    make(&to->host[2], &to->problem.v, B, Hkv, Skv, D);
    if (!cli_synthetic_fill(&shape, &to->host[0], &to->host[1], &to->host[2])) {
        printf("no memory\n");
        exit(1);
    }
    to->problem.q.data = on_device_copy(to->host[0].data, (size_t)(B * Hq * Sq * D) * 2);
    to->problem.k.data = on_device_copy(to->host[1].data, (size_t)(B * Hkv * Skv * D) * 2);
    to->problem.v.data = on_device_copy(to->host[2].data, (size_t)(B * Hkv * Skv * D) * 2);
}

void on_device_free(on_device *made)
{
    for (int i = 0; i < 3; i++)
        apa_array_free(&made->host[i]);
    cudaFree(made->problem.q.data);
    cudaFree(made->problem.k.data);
    cudaFree(made->problem.v.data);
}

/* Fetches and frees the buffers of a call; are the bytes behind the workspace what they were? */
static int take_results(device_result *result, void *const memory[4], size_t workspace)
{
    uint8_t guard[GUARD_BYTES];
    int intact = 1;
    on_device_fetch(result->out, memory[0], (size_t)(result->rows * result->D) * sizeof(float));
    on_device_fetch(result->lse, memory[1], (size_t)result->rows * sizeof(float));
    on_device_fetch(result->counts, memory[2], sizeof result->counts);
    on_device_fetch(guard, (char *)memory[3] + workspace, GUARD_BYTES);
    for (int i = 0; i < GUARD_BYTES; i++)
        intact = intact && guard[i] == GUARD;
    for (int i = 0; i < 4; i++)
        cudaFree(memory[i]);
    if (!intact)
        printf("  bytes behind the workspace were written\n");
    return intact;
}

int on_device_run(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                  const apa_cuda_options *options, device_result *result)
{
    apa_cuda_plan plan;
    apa_cuda_plan_init(&plan);
    memset(result, 0, sizeof *result);
    const int64_t B = problem->q.shape[0], Hq = problem->q.shape[1], Sq = problem->q.shape[2], D = problem->q.shape[3];
    apa_problem call = *problem;
    call.out = apa_tensor_hnd(NULL, APA_DTYPE_F32, B, Hq, Sq, D);
    call.lse = apa_tensor_hnd(NULL, APA_DTYPE_F32, B, Hq, Sq, 1);
    apa_status status = apa_cuda_attention_plan(context, &call, recipe, options, &plan);
    if (status != APA_STATUS_OK) {
        printf("  plan: %s\n", apa_context_message(context));
        return 0;
    }
    result->rows = B * Hq * Sq;
    result->D = D;
    result->prepared_bytes = plan.prepared_bytes;
    memcpy(result->engine, plan.engine, sizeof result->engine);
    result->out = malloc((size_t)(result->rows * D) * sizeof(float) + 1);
    result->lse = malloc((size_t)result->rows * sizeof(float) + 1);
    void *const memory[4] = {on_device_copy(NULL, (size_t)(result->rows * D) * sizeof(float)),
                             on_device_copy(NULL, (size_t)result->rows * sizeof(float)),
                             on_device_copy(NULL, sizeof result->counts),
                             on_device_copy(NULL, plan.workspace_bytes + GUARD_BYTES)};
    on_device_expect(cudaMemset((char *)memory[3] + plan.workspace_bytes, GUARD, GUARD_BYTES), "guard");
    call.out.data = memory[0];
    call.lse.data = memory[1];
    apa_cuda_options own = *options;
    own.counts = memory[2];
    own.workspace = memory[3];
    own.workspace_bytes = plan.workspace_bytes;
    status = apa_cuda_attention(context, &call, recipe, &own, NULL);
    if (status != APA_STATUS_OK)
        printf("  run: %s\n", apa_context_message(context));
    on_device_expect(cudaDeviceSynchronize(), "attention");
    return take_results(result, memory, plan.workspace_bytes) && status == APA_STATUS_OK;
}

void device_result_free(device_result *result)
{
    free(result->out);
    free(result->lse);
    result->out = result->lse = NULL;
}

int device_result_same(const device_result *a, const device_result *b)
{
    return a->rows == b->rows && a->out != NULL && b->out != NULL &&
           memcmp(a->out, b->out, (size_t)(a->rows * a->D) * sizeof(float)) == 0 &&
           memcmp(a->lse, b->lse, (size_t)a->rows * sizeof(float)) == 0 &&
           memcmp(a->counts, b->counts, sizeof a->counts) == 0;
}

const char *const *on_device_families(apa_context *context, const char *engine)
{
    static const char *found[3];
    static const char *const all[] = {"warp", "wgmma"};
    apa_cuda_device device;
    int current = 0, n = 0;
    on_device_expect(cudaGetDevice(&current), "device");
    apa_cuda_device_init(&device);
    if (apa_cuda_device_describe(context, current, &device) != APA_STATUS_OK)
        on_device_expect(1, "device");
    for (int i = 0; i < 2; i++) {
        const int named = strncmp(engine, "cuda:", 5) == 0;
        if ((!named || strcmp(engine + 5, all[i]) == 0) && (i == 0 || device.capability == 90))
            found[n++] = all[i];
    }
    found[n] = NULL;
    return found;
}

apa_recipe on_device_recipe(const char *method, const char *knobs)
{
    apa_recipe recipe;
    int fine = apa_recipe_init(&recipe, method) == APA_STATUS_OK;
    for (const char *at = knobs; at != NULL && *at != '\0'; at += *at == ' ') {
        char knob[64], value[64];
        int length = 0;
        fine = fine && sscanf(at, "%63[^= ]=%63[^ ]%n", knob, value, &length) == 2 &&
               apa_recipe_set(&recipe, knob, value, NULL, 0) == APA_STATUS_OK;
        at += length > 0 ? (size_t)length : strlen(at);
    }
    if (!fine) {
        printf("no recipe %s %s\n", method, knobs == NULL ? "" : knobs);
        exit(1);
    }
    return recipe;
}
