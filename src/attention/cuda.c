/* apa/cuda.h: attention on device pointers. Validation is that of every call; a build without CUDA has src/cuda/absent
 * instead. */
#include "apa/cuda.h"

#ifdef APA_HAVE_CUDA

#include "attention/plan.h"
#include "attention/sequences.h"
#include "cuda/engine.h"
#include "cuda/enqueue.h"

#include <string.h>

void apa_cuda_options_init(apa_cuda_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
}

static apa_status plan(apa_context *context, const apa_problem *problem, const apa_recipe *recipe, bool need_data,
                       apa_call *call, apa_cuda_target *target, apa_cuda_family *family)
{
    apa_attention_options options;
    const apa_engine *engine;
    if (problem != NULL && problem->size == sizeof *problem && apa_sequences_differ(problem))
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "cu_seqlens, seqused_k, q_offsets or block_table: on device pointers the cuda engine takes "
                        "flat sequences of one length");
    apa_attention_options_init(&options);
    options.engine = "cuda";
    apa_status status = apa_plan_call(context, problem, recipe, &options, need_data, call, &engine);
    if (status != APA_STATUS_OK)
        return status;
    const bool hopper = engine == &apa_cuda_wgmma_engine;
    family->device_bytes = hopper ? apa_wgmma_device_bytes : apa_cuda_device_bytes;
    family->enqueue = hopper ? apa_wgmma_enqueue : apa_cuda_enqueue;
    return apa_cuda_current(context, target);
}

apa_status apa_cuda_workspace_bytes(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                    size_t *bytes)
{
    apa_call call;
    apa_cuda_target target;
    apa_cuda_family family;
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (bytes == NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "bytes: NULL");
    apa_status status = plan(context, problem, recipe, false, &call, &target, &family);
    if (status == APA_STATUS_OK)
        *bytes = family.device_bytes(&call, &target);
    return status;
}

apa_status apa_cuda_attention(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                              const apa_cuda_options *options, apa_recipe *resolved)
{
    apa_call call;
    apa_cuda_target target;
    apa_cuda_family family;
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (options == NULL || options->size != sizeof *options)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "options: NULL or not set up by apa_cuda_options_init()");
    apa_status status = plan(context, problem, recipe, true, &call, &target, &family);
    if (status != APA_STATUS_OK)
        return status;
    const size_t bytes = family.device_bytes(&call, &target);
    if (bytes > 0 &&
        (options->workspace == NULL || options->workspace_bytes < bytes || (uintptr_t)options->workspace % 256 != 0))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "workspace: %zu bytes at alignment %zu, expected %zu bytes of device memory aligned to 256",
                        options->workspace == NULL ? (size_t)0 : options->workspace_bytes,
                        (size_t)((uintptr_t)options->workspace % 256), bytes);
    const apa_cuda_place place = {options->stream, options->workspace, options->counts, options->verdicts, NULL};
    status = family.enqueue(context, &call, &target, &place);
    if (status == APA_STATUS_OK && resolved != NULL)
        *resolved = call.recipe;
    return status;
}

#endif
