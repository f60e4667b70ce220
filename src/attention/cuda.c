/* apa/cuda.h: attention on device pointers. Validation is that of every call; sequences that differ become calls of
 * their own, one after the other in one workspace. A build without CUDA has src/cuda/absent instead. */
#include "apa/cuda.h"

#ifdef APA_HAVE_CUDA

#include "attention/plan.h"
#include "attention/sequences.h"
#include "cuda/engine.h"
#include "cuda/enqueue.h"
#include "cuda/job.h"
#include "cuda/pages.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define DEVICE_ALIGNMENT 256

void apa_cuda_options_init(apa_cuda_options *options)
{
    memset(options, 0, sizeof *options);
    options->size = sizeof *options;
}

void apa_cuda_plan_init(apa_cuda_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    plan->size = sizeof *plan;
}

/* Best first. */
static const apa_cuda_family *const families[] = {&apa_cuda_wgmma_family, &apa_cuda_warp_family};
enum { FAMILIES = sizeof families / sizeof families[0] };

/* A validated call: all its sequences. */
typedef struct device_call {
    const apa_problem *problem;
    apa_call whole; /* resolved; where sequences differ, for the longest sides */
    const apa_cuda_family *family;
    bool named; /* the family was asked for by name */
    bool differ;
    int64_t count; /* of calls: sequences that differ, or 1 */
    apa_cuda_target target;
    apa_cuda_kept kept;
    size_t workspace_bytes, kept_bytes;
} device_call;

/* ------------------------------------------------------------------------------- validation */

static apa_status check_family(apa_context *context, const char *family, char *engine, size_t size)
{
    const bool any = family == NULL || strcmp(family, "auto") == 0;
    if (!any && strcmp(family, "warp") != 0 && strcmp(family, "wgmma") != 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "family: \"%.32s\", expected auto, warp or wgmma",
                        family);
    snprintf(engine, size, "cuda%s%s", any ? "" : ":", any ? "" : family);
    return APA_STATUS_OK;
}

static apa_status check_kept(apa_context *context, const apa_cuda_options *options, const device_call *to)
{
    const apa_call *call = &to->whole;
    const int64_t room = options->prepared_room, keys = options->prepared_keys;
    if (options->copy_bytes > 0 && room > 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "copy_bytes: with prepared_room, expected one of the two: what is kept is whole");
    if (room == 0 && keys == 0 && options->prepared_mean == 0)
        return APA_STATUS_OK;
    if (!to->named)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "family: auto with prepared_room, expected warp or wgmma: tiles are kept in one's own format");
    if (to->differ && to->count != 1)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "prepared_room: of %" PRId64 " sequences that differ, expected one", to->count);
    const int64_t most = (INT32_MAX / (call->B * call->Hkv + 1) - 2) * APA_CUDA_TILE; /* tiles are counted in 32 bits */
    if (room < call->Skv || room > most)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "prepared_room: %" PRId64 ", expected %" PRId64 " … %" PRId64 " keys", room, call->Skv, most);
    if (keys < 0 || keys > call->Skv)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "prepared_keys: %" PRId64 ", expected 0 … %" PRId64, keys,
                        call->Skv);
    if (call->B == 0 || call->Sq == 0 || call->Skv == 0)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                        "prepared_room: without queries or keys, expected some of each");
    return APA_STATUS_OK;
}

static apa_status check_memory(apa_context *context, const char *name, const void *memory, size_t found,
                               size_t expected)
{
    if (expected == 0 || (memory != NULL && found >= expected && (uintptr_t)memory % DEVICE_ALIGNMENT == 0))
        return APA_STATUS_OK;
    return apa_fail(context, APA_STATUS_INVALID_ARGUMENT,
                    "%s: %zu bytes at alignment %zu, expected %zu bytes of device memory aligned to %d", name,
                    memory == NULL ? (size_t)0 : found, (size_t)((uintptr_t)memory % DEVICE_ALIGNMENT), expected,
                    DEVICE_ALIGNMENT);
}

/* ------------------------------------------------------------------------------- sequences */

/* Call number b and who runs it: where the choice is free a sequence that the best family refuses is the next one's. */
static apa_status sequence_of(apa_context *context, const device_call *from, int64_t b, apa_call *call,
                              const apa_cuda_family **family)
{
    apa_status status = APA_STATUS_OK;
    *family = from->family;
    *call = from->whole;
    if (!from->differ)
        return status;
    apa_sequences_call(from->problem, &from->whole, b, call);
    for (int i = 0; i < FAMILIES; i++) {
        if (from->named && families[i] != from->family)
            continue;
        *family = families[i];
        call->recipe = call->asked;
        status = families[i]->engine->resolve(context, call);
        if (status == APA_STATUS_OK)
            return apa_fail(context, APA_STATUS_OK, "%s", ""); /* what others had against it is no failure */
    }
    return status;
}

/* Every sequence is checked before the first is launched; the workspace is that of the largest. */
static apa_status measure(apa_context *context, bool need_data, device_call *to)
{
    apa_status status = APA_STATUS_OK;
    for (int64_t b = 0; b < to->count && status == APA_STATUS_OK; b++) {
        apa_call call;
        const apa_cuda_family *family;
        status = sequence_of(context, to, b, &call, &family);
        if (status == APA_STATUS_OK && need_data)
            status = apa_cuda_check_aligned(context, &call);
        if (status == APA_STATUS_OK && to->kept.room > 0)
            status = family->kept_bytes(context, &call, to->kept.room, &to->kept_bytes);
        if (status == APA_STATUS_OK)
            status = family->check_copy(context, &call, to->kept.copy_bytes);
        if (status != APA_STATUS_OK)
            break;
        const size_t bytes = apa_cuda_flat_bytes(&call) + family->device_bytes(&call, &to->target, &to->kept);
        to->workspace_bytes = bytes > to->workspace_bytes ? bytes : to->workspace_bytes;
    }
    return status;
}

static apa_status plan(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                       const apa_cuda_options *options, apa_plan_data data, device_call *to)
{
    apa_attention_options common;
    const apa_engine *engine;
    char name[16];
    memset(to, 0, sizeof *to);
    apa_status status = check_family(context, options->family, name, sizeof name);
    if (status == APA_STATUS_OK && problem != NULL && problem->size == sizeof *problem) {
        to->problem = problem;
        to->differ = apa_sequences_differ(problem);
        status = apa_cuda_check_places(context, problem);
    }
    if (status != APA_STATUS_OK)
        return status;
    apa_attention_options_init(&common);
    common.engine = name;
    common.verdicts = options->verdicts;
    status = apa_plan_call(context, problem, recipe, &common, data, &to->whole, &engine);
    if (status == APA_STATUS_OK)
        status = apa_cuda_current(context, &to->target);
    if (status != APA_STATUS_OK)
        return status;
    for (int i = 0; i < FAMILIES; i++)
        if (families[i]->engine == engine)
            to->family = families[i];
    to->named = strchr(name, ':') != NULL;
    to->count = to->differ ? to->whole.B : 1;
    status = check_kept(context, options, to);
    if (status != APA_STATUS_OK)
        return status;
    to->kept = (apa_cuda_kept){options->prepared, options->prepared_room, options->prepared_keys,
                               options->prepared_mean != 0, options->copy_bytes};
    return measure(context, data == APA_PLAN_DEVICE_DATA, to);
}

/* ------------------------------------------------------------------------------- the functions */

static apa_status check_options(apa_context *context, const apa_cuda_options *options)
{
    if (options != NULL && options->size == sizeof *options)
        return APA_STATUS_OK;
    return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "options: NULL or not set up by apa_cuda_options_init()");
}

apa_status apa_cuda_attention_plan(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                   const apa_cuda_options *options, apa_cuda_plan *found)
{
    device_call call;
    apa_cuda_options defaults;
    apa_cuda_options_init(&defaults);
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (found == NULL || found->size != sizeof *found)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "plan: NULL or not set up by apa_cuda_plan_init()");
    options = options == NULL ? &defaults : options;
    apa_status status = check_options(context, options);
    if (status == APA_STATUS_OK)
        status = plan(context, problem, recipe, options, APA_PLAN_NO_DATA, &call);
    if (status != APA_STATUS_OK)
        return status;
    snprintf(found->engine, sizeof found->engine, "%s", call.family->engine->name);
    call.family->engine->kernel_name(context, &call.whole, found->kernel, sizeof found->kernel);
    found->recipe = call.whole.recipe;
    found->workspace_bytes = call.workspace_bytes;
    found->prepared_bytes = call.kept_bytes;
    return status;
}

apa_status apa_cuda_workspace_bytes(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                    size_t *bytes)
{
    apa_cuda_plan found;
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (bytes == NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "bytes: NULL");
    apa_cuda_plan_init(&found);
    const apa_status status = apa_cuda_attention_plan(context, problem, recipe, NULL, &found);
    if (status == APA_STATUS_OK)
        *bytes = found.workspace_bytes;
    return status;
}

static apa_status enqueue(apa_context *context, const device_call *from, const apa_cuda_options *options)
{
    apa_cuda_place place = {
        .stream = options->stream, .counts = options->counts, .verdicts = options->verdicts, .kept = from->kept};
    if (from->count == 0) /* nobody else clears the counts then */
        return apa_cuda_clear_results(&from->whole, &place) == 0
                   ? APA_STATUS_OK
                   : apa_fail(context, APA_STATUS_INTERNAL, "cuda: counts: cannot be cleared");
    apa_status status = APA_STATUS_OK;
    for (int64_t b = 0; b < from->count && status == APA_STATUS_OK; b++) {
        apa_call call;
        const apa_cuda_family *family;
        status = sequence_of(context, from, b, &call, &family);
        if (status != APA_STATUS_OK)
            break;
        place.workspace = (char *)options->workspace + apa_cuda_flat_bytes(&call);
        status = apa_cuda_lay_flat(context, &call, options->workspace, options->stream);
        if (status == APA_STATUS_OK)
            status = family->enqueue(context, &call, &from->target, &place);
        place.add_counts = true;
    }
    return status;
}

apa_status apa_cuda_attention(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                              const apa_cuda_options *options, apa_recipe *resolved)
{
    device_call call;
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    apa_status status = check_options(context, options);
    if (status == APA_STATUS_OK)
        status = plan(context, problem, recipe, options, APA_PLAN_DEVICE_DATA, &call);
    if (status == APA_STATUS_OK)
        status = check_memory(context, "workspace", options->workspace, options->workspace_bytes, call.workspace_bytes);
    if (status == APA_STATUS_OK)
        status = check_memory(context, "prepared", options->prepared, options->prepared_bytes, call.kept_bytes);
    if (status == APA_STATUS_OK)
        status = enqueue(context, &call, options);
    if (status == APA_STATUS_OK && resolved != NULL)
        *resolved = call.whole.recipe;
    return status;
}

#endif
