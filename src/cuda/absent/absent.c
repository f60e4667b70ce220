/* apa/cuda.h in a build without CUDA: every function is there and says so. */
#include "apa/cuda.h"

#include "core/context_internal.h"

#include <string.h>

static apa_status absent(apa_context *context)
{
    return context == NULL
               ? APA_STATUS_UNSUPPORTED
               : apa_fail(context, APA_STATUS_UNSUPPORTED, "cuda: not in this build (configure with APA_CUDA=ON)");
}

void apa_cuda_device_init(apa_cuda_device *device)
{
    memset(device, 0, sizeof *device);
    device->size = sizeof *device;
}

void apa_cuda_options_init(apa_cuda_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
}

apa_status apa_cuda_device_count(apa_context *context, int32_t *count)
{
    if (count != NULL)
        *count = 0;
    return absent(context);
}

apa_status apa_cuda_device_describe(apa_context *context, int32_t index, apa_cuda_device *device)
{
    (void)index;
    (void)device;
    return absent(context);
}

void apa_cuda_plan_init(apa_cuda_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    plan->size = sizeof *plan;
}

apa_status apa_cuda_attention_plan(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                   const apa_cuda_options *options, apa_cuda_plan *plan)
{
    (void)problem;
    (void)recipe;
    (void)options;
    (void)plan;
    return absent(context);
}

apa_status apa_cuda_workspace_bytes(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                    size_t *bytes)
{
    (void)problem;
    (void)recipe;
    (void)bytes;
    return absent(context);
}

apa_status apa_cuda_attention(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                              const apa_cuda_options *options, apa_recipe *resolved)
{
    (void)problem;
    (void)recipe;
    (void)options;
    (void)resolved;
    return absent(context);
}
