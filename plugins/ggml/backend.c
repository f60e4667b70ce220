/* libggml-apa: a loadable ggml backend with one operator, FLASH_ATTN_EXT, on the CPU.
 *
 * It registers an accelerator device that works in the CPU's own buffers, as ggml's BLAS backend does, so the scheduler
 * hands it the nodes that it supports and moves no data. Everything else stays with ggml. */
#include "attention.h"

#include <ggml-backend-impl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "APA"

typedef struct backend_state {
    apa_context *context;
    apa_ggml_scratch scratch;
    apa_ggml_settings settings;
    apa_ggml_totals totals;
} backend_state;

/* ggml asks for support from any thread, before there is a backend: a context for planning alone, under a lock. */
static pthread_mutex_t planner_lock = PTHREAD_MUTEX_INITIALIZER;
static apa_context *planner;
static apa_ggml_settings planner_settings;

static apa_context *make_context(int threads)
{
    apa_context_options options;
    apa_context_options_init(&options);
    options.threads = threads;
    apa_context *context = NULL;
    const apa_status status = apa_context_create(&context, &options);
    if (status != APA_STATUS_OK)
        fprintf(stderr, "ggml-apa: no context: %s\n", apa_status_name(status));
    return context;
}

/* Called with the lock held. */
static bool planner_ready(void)
{
    if (planner == NULL)
        planner = make_context(1);
    return planner != NULL;
}

static const char *backend_name(ggml_backend_t backend)
{
    (void)backend;
    return NAME;
}

static double share(int64_t part, int64_t whole)
{
    return whole > 0 ? (double)part / (double)whole : 0.0;
}

static void print_totals(const apa_ggml_totals *t)
{
    fprintf(stderr,
            "ggml-apa: nodes %lld bands %lld masks %lld all_ms %.1f prep_ms %.1f attention_ms %.1f hot_share %.4f "
            "skip_share %.4f kernel \"%s\"\n",
            (long long)t->nodes, (long long)t->bands, (long long)t->masks, t->all_ms, t->prep_ms, t->attention_ms,
            share(t->hot, t->visible), share(t->skipped, t->visible), t->kernel);
}

static void backend_free(ggml_backend_t backend)
{
    backend_state *state = backend->context;
    if (state->settings.statistics && state->totals.nodes > 0)
        print_totals(&state->totals);
    apa_context_destroy(state->context);
    apa_ggml_scratch_free(&state->scratch);
    free(state);
    free(backend);
}

static bool is_view(enum ggml_op op)
{
    return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_PERMUTE ||
           op == GGML_OP_TRANSPOSE;
}

static enum ggml_status graph_compute(ggml_backend_t backend, struct ggml_cgraph *graph)
{
    backend_state *state = backend->context;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        if (is_view(node->op) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || ggml_nelements(node) == 0)
            continue;
        if (node->op != GGML_OP_FLASH_ATTN_EXT) {
            fprintf(stderr, "ggml-apa: %s was given to it, it takes FLASH_ATTN_EXT only\n", ggml_op_desc(node));
            return GGML_STATUS_FAILED;
        }
        const enum ggml_status status =
            apa_ggml_run(state->context, &state->settings, &state->scratch, node, &state->totals);
        if (status != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "ggml-apa: %s: %s\n", node->name, apa_context_message(state->context));
            return status;
        }
    }
    return GGML_STATUS_SUCCESS;
}

static void set_n_threads(ggml_backend_t backend, int threads)
{
    backend_state *state = backend->context;
    if (threads < 1 || threads == apa_context_threads(state->context))
        return;
    apa_context *context = make_context(threads);
    if (context == NULL)
        return;
    apa_context_destroy(state->context);
    state->context = context;
}

static const struct ggml_backend_i backend_interface = {
    .get_name = backend_name,
    .free = backend_free,
    .graph_compute = graph_compute,
};

static const char *device_name(ggml_backend_dev_t device)
{
    (void)device;
    return NAME;
}

static const char *device_description(ggml_backend_dev_t device)
{
    (void)device;
    return "libapa adaptive-precision attention " APA_VERSION_STRING;
}

static void device_memory(ggml_backend_dev_t device, size_t *available, size_t *total)
{
    (void)device;
    *available = *total = 0; /* the host's: nothing to report */
}

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t device)
{
    (void)device;
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static void device_props(ggml_backend_dev_t device, struct ggml_backend_dev_props *props)
{
    memset(props, 0, sizeof *props);
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
    props->caps.buffer_from_host_ptr = true;
}

static ggml_backend_t device_init(ggml_backend_dev_t device, const char *params)
{
    static uint8_t guid[16] = {0x61, 0x70, 0x61, 0x2d, 0x67, 0x67, 0x6d, 0x6c,
                               0x9e, 0x42, 0x1b, 0xd7, 0x53, 0xc0, 0x8a, 0x01};
    (void)params;
    backend_state *state = calloc(1, sizeof *state);
    struct ggml_backend *backend = calloc(1, sizeof *backend);
    if (state != NULL)
        state->context = make_context(0);
    if (state == NULL || backend == NULL || state->context == NULL) {
        free(state);
        free(backend);
        return NULL;
    }
    pthread_mutex_lock(&planner_lock);
    state->settings = planner_settings;
    pthread_mutex_unlock(&planner_lock);
    backend->guid = &guid;
    backend->iface = backend_interface;
    backend->device = device;
    backend->context = state;
    return backend;
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device)
{
    (void)device;
    return ggml_backend_cpu_buffer_type();
}

static ggml_backend_buffer_t device_buffer_from_host_ptr(ggml_backend_dev_t device, void *memory, size_t size,
                                                         size_t max_tensor_size)
{
    (void)device;
    (void)max_tensor_size;
    return ggml_backend_cpu_buffer_from_ptr(memory, size);
}

static bool device_supports_op(ggml_backend_dev_t device, const struct ggml_tensor *op)
{
    (void)device;
    if (is_view(op->op))
        return true;
    if (op->op != GGML_OP_FLASH_ATTN_EXT)
        return false;
    pthread_mutex_lock(&planner_lock);
    const bool supported = planner_ready() && apa_ggml_supports(planner, &planner_settings, op);
    pthread_mutex_unlock(&planner_lock);
    return supported;
}

static bool device_supports_buffer_type(ggml_backend_dev_t device, ggml_backend_buffer_type_t type)
{
    (void)device;
    return ggml_backend_buft_is_host(type);
}

static const struct ggml_backend_device_i device_interface = {
    .get_name = device_name,
    .get_description = device_description,
    .get_memory = device_memory,
    .get_type = device_type,
    .get_props = device_props,
    .init_backend = device_init,
    .get_buffer_type = device_buffer_type,
    .buffer_from_host_ptr = device_buffer_from_host_ptr,
    .supports_op = device_supports_op,
    .supports_buft = device_supports_buffer_type,
};

static const char *registry_name(ggml_backend_reg_t registry)
{
    (void)registry;
    return NAME;
}

static size_t registry_device_count(ggml_backend_reg_t registry)
{
    (void)registry;
    return 1;
}

static ggml_backend_dev_t registry_device(ggml_backend_reg_t registry, size_t index)
{
    static struct ggml_backend_device device;
    if (index != 0)
        return NULL;
    device = (struct ggml_backend_device){.iface = device_interface, .reg = registry};
    return &device;
}

/* ISO C has no conversion between pointers to functions and to data; every platform with loadable backends has one. */
static void *registry_function(ggml_backend_reg_t registry, const char *name)
{
    (void)registry;
    void (*const function)(ggml_backend_t, int) = set_n_threads;
    void *address = NULL;
    if (strcmp(name, "ggml_backend_set_n_threads") == 0)
        memcpy(&address, &function, sizeof address);
    return address;
}

/* NULL, and ggml goes on without the backend, where the environment asks for something that there isn't. */
static ggml_backend_reg_t apa_registry(void)
{
    static struct ggml_backend_reg registry = {.api_version = GGML_BACKEND_API_VERSION,
                                               .iface = {.get_name = registry_name,
                                                         .get_device_count = registry_device_count,
                                                         .get_device = registry_device,
                                                         .get_proc_address = registry_function}};
    char message[256];
    pthread_mutex_lock(&planner_lock);
    const bool loaded = apa_ggml_settings_load(&planner_settings, message, sizeof message);
    pthread_mutex_unlock(&planner_lock);
    if (!loaded)
        fprintf(stderr, "ggml-apa: %s; the backend is not loaded\n", message);
    return loaded ? &registry : NULL;
}

/* Under a name that ggml looks for by itself (docs/llama-cpp.md) the one with the highest score is loaded. */
static int apa_score(void)
{
    return 1000;
}

GGML_BACKEND_DL_IMPL(apa_registry)
GGML_BACKEND_DL_SCORE_IMPL(apa_score)
