/* From ggml's tensors to the library's: ne and nb are innermost first and in bytes, ours outermost first and in
 * elements.
 *
 *   src[0] q    f32  [D, rows, Hq, B]        src[3] mask  f16 [keys, rows or more, 1 or Hq, 1 or B], may be NULL
 *   src[1] k    any  [D, keys, Hkv, B]       src[4] sinks f32 [Hq], may be NULL
 *   src[2] v    any  [Dv, keys, Hkv, B]      node         f32 [Dv, Hq, rows, B]
 *   op_params: scale, max_bias (ALiBi: the mask holds distances, heads their slopes), logit softcap
 *
 * K and V in f32, f16 and bf16 are read where they lie. Other types are widened to f32 first, exactly. */
#include "attention.h"

#include "band.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct params {
    float scale, max_bias, softcap;
} params;

static params params_of(const struct ggml_tensor *node)
{
    params p;
    memcpy(&p, node->op_params, sizeof p);
    return p;
}

static apa_dtype dtype_of(enum ggml_type type)
{
    switch (type) {
    case GGML_TYPE_F32:
        return APA_DTYPE_F32;
    case GGML_TYPE_F16:
        return APA_DTYPE_F16;
    case GGML_TYPE_BF16:
        return APA_DTYPE_BF16;
    default:
        return APA_DTYPE_NONE;
    }
}

/* [ne3, ne2, ne1, ne0] with strides in elements. */
static apa_tensor tensor_of(const struct ggml_tensor *x, apa_dtype dtype)
{
    const int64_t bytes = (int64_t)apa_dtype_bytes(dtype);
    apa_tensor tensor = {.data = x->data, .dtype = dtype};
    for (int axis = 0; axis < 4; axis++) {
        tensor.shape[axis] = x->ne[3 - axis];
        tensor.stride[axis] = (int64_t)x->nb[3 - axis] / bytes;
    }
    tensor.stride[3] = 1;
    return tensor;
}

static bool is_aligned(const struct ggml_tensor *x, size_t bytes)
{
    return x->nb[0] == bytes && x->nb[1] % bytes == 0 && x->nb[2] % bytes == 0 && x->nb[3] % bytes == 0;
}

/* K or V: a type that is read as it is, or one that ggml can widen row by row. */
static bool takes_operand(const struct ggml_tensor *x)
{
    const apa_dtype dtype = dtype_of(x->type);
    if (dtype != APA_DTYPE_NONE)
        return is_aligned(x, apa_dtype_bytes(dtype));
    const struct ggml_type_traits *traits = ggml_get_type_traits(x->type);
    return traits != NULL && traits->to_float != NULL && x->nb[0] == traits->type_size;
}

/* Widened, contiguous [B][H][S][D]. */
static apa_tensor widened(const struct ggml_tensor *x, void *memory)
{
    return apa_tensor_hnd(memory, APA_DTYPE_F32, x->ne[3], x->ne[2], x->ne[1], x->ne[0]);
}

static apa_tensor operand(const struct ggml_tensor *x, void *memory)
{
    const apa_dtype dtype = dtype_of(x->type);
    return dtype == APA_DTYPE_NONE ? widened(x, memory) : tensor_of(x, dtype);
}

/* Everything but mask and slopes. */
static void problem_of(const struct ggml_tensor *node, void *const *memory, apa_problem *problem)
{
    const params p = params_of(node);
    apa_problem_init(problem);
    problem->q = tensor_of(node->src[0], APA_DTYPE_F32);
    problem->k = operand(node->src[1], memory[0]);
    problem->v = operand(node->src[2], memory[1]);
    problem->out = tensor_of(node, APA_DTYPE_F32);
    /* node is [Dv, Hq, rows, B]: heads inside rows */
    problem->out.shape[1] = node->ne[1];
    problem->out.shape[2] = node->ne[2];
    problem->out.stride[1] = (int64_t)(node->nb[1] / sizeof(float));
    problem->out.stride[2] = (int64_t)(node->nb[2] / sizeof(float));
    problem->softmax_scale = (double)p.scale;
    problem->softcap = (double)p.softcap;
    if (node->src[4] != NULL)
        problem->sinks = apa_tensor_hnd(node->src[4]->data, APA_DTYPE_F32, 1, node->src[4]->ne[0], 1, 1);
}

/* The mask as the library takes it: rows that the problem has, extents of 1 repeat. */
static apa_tensor mask_of(const struct ggml_tensor *node)
{
    apa_tensor mask = tensor_of(node->src[3], APA_DTYPE_F16);
    mask.shape[2] = node->src[0]->ne[1];
    return mask;
}

static bool mask_fits(const struct ggml_tensor *node)
{
    const struct ggml_tensor *mask = node->src[3], *q = node->src[0];
    if (mask == NULL)
        return true;
    return mask->type == GGML_TYPE_F16 && is_aligned(mask, 2) && mask->ne[0] >= node->src[1]->ne[1] &&
           mask->ne[1] >= q->ne[1] && (mask->ne[2] == 1 || mask->ne[2] == q->ne[2]) &&
           (mask->ne[3] == 1 || mask->ne[3] == q->ne[3]);
}

static bool shapes_fit(const struct ggml_tensor *node)
{
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    return q->type == GGML_TYPE_F32 && node->type == GGML_TYPE_F32 && is_aligned(q, sizeof(float)) &&
           is_aligned(node, sizeof(float)) && takes_operand(k) && takes_operand(v) && k->ne[0] == q->ne[0] &&
           k->ne[1] == v->ne[1] && k->ne[2] == v->ne[2] && k->ne[2] > 0 && q->ne[2] % k->ne[2] == 0 &&
           k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] && mask_fits(node);
}

static const apa_recipe *recipe_for(const apa_ggml_settings *settings, const struct ggml_tensor *node)
{
    const bool large = node->src[0]->ne[1] >= settings->min_queries && node->src[1]->ne[1] >= settings->min_keys;
    return large ? &settings->recipe : &settings->exact;
}

bool apa_ggml_supports(apa_context *context, const apa_ggml_settings *settings, const struct ggml_tensor *node)
{
    if (node->op != GGML_OP_FLASH_ATTN_EXT || !shapes_fit(node))
        return false;
    void *const nothing[2] = {NULL, NULL};
    apa_problem problem;
    problem_of(node, nothing, &problem);
    if (node->src[3] != NULL)
        problem.attn_mask = mask_of(node);
    if (params_of(node).max_bias > 0.0f)
        problem.mask_slopes = apa_tensor_hnd(NULL, APA_DTYPE_F32, 1, node->src[0]->ne[2], 1, 1);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "cpu";
    apa_plan plan;
    apa_plan_init(&plan);
    return apa_attention_plan(context, &problem, recipe_for(settings, node), &options, &plan) == APA_STATUS_OK;
}

/* Room for at least `bytes`, or NULL. */
static void *room(void **memory, size_t *has, size_t bytes)
{
    if (bytes > *has) {
        free(*memory);
        *memory = malloc(bytes);
        *has = *memory != NULL ? bytes : 0;
    }
    return *memory;
}

static bool widen(const struct ggml_tensor *x, int64_t keys, void **memory, size_t *has)
{
    if (dtype_of(x->type) != APA_DTYPE_NONE)
        return true;
    float *to = room(memory, has, (size_t)ggml_nelements(x) * sizeof(float));
    const ggml_to_float_t to_float = ggml_get_type_traits(x->type)->to_float;
    for (int64_t b = 0; b < x->ne[3] && to != NULL; b++)
        for (int64_t h = 0; h < x->ne[2]; h++)
            for (int64_t j = 0; j < keys; j++)
                to_float((const char *)x->data + (size_t)b * x->nb[3] + (size_t)h * x->nb[2] + (size_t)j * x->nb[1],
                         to + ((b * x->ne[2] + h) * x->ne[1] + j) * x->ne[0], x->ne[0]);
    return to != NULL;
}

/* One slope a head, as ggml has them: powers of two numbers, those past a power of two of heads in between. */
static bool fill_slopes(apa_ggml_scratch *scratch, int64_t heads, float max_bias)
{
    if (scratch->slope_count < heads) {
        free(scratch->slopes);
        scratch->slopes = malloc((size_t)heads * sizeof(float));
        scratch->slope_count = scratch->slopes != NULL ? heads : 0;
    }
    if (scratch->slopes == NULL)
        return false;
    const double power = (double)((int64_t)1 << (int)floor(log2((double)heads)));
    const float m0 = powf(2.0f, -max_bias / (float)power), m1 = powf(2.0f, -max_bias / 2.0f / (float)power);
    for (int64_t h = 0; h < heads; h++)
        scratch->slopes[h] =
            (double)h < power ? powf(m0, (float)(h + 1)) : powf(m1, (float)(2 * (h - (int64_t)power) + 1));
    return true;
}

/* A band instead of a mask, where every entry of the batch has the same one. */
static bool mask_is_band(const struct ggml_tensor *node, apa_ggml_band *band)
{
    const apa_tensor mask = mask_of(node);
    if (params_of(node).max_bias > 0.0f || mask.shape[1] != 1 || mask.shape[0] < 1 || mask.shape[2] < 1)
        return false;
    const int64_t keys = node->src[1]->ne[1];
    for (int64_t b = 0; b < mask.shape[0]; b++) {
        apa_ggml_band one;
        const uint16_t *at = (const uint16_t *)mask.data + b * mask.stride[0];
        if (!apa_ggml_find_band(at, mask.shape[2], keys, (size_t)mask.stride[2], &one))
            return false;
        if (b > 0 && (one.causal != band->causal || one.q_offset != band->q_offset || one.width != band->width ||
                      one.keys != band->keys))
            return false;
        *band = one;
    }
    return true;
}

static void apply_band(const apa_ggml_band *band, apa_problem *problem)
{
    problem->k.shape[2] = problem->v.shape[2] = band->keys;
    if (!band->causal)
        return;
    problem->causal = APA_CAUSAL_BOTTOM_RIGHT;
    problem->q_offset = band->q_offset;
    problem->window_left = band->width < 0 ? -1 : band->width - 1;
}

static void add_totals(apa_ggml_totals *totals, const apa_statistics *one)
{
    totals->visible += one->visible;
    totals->hot += one->hot;
    totals->skipped += one->skipped;
    totals->prep_ms += one->prep_ms;
    totals->attention_ms += one->attention_ms;
    if (one->visible > totals->kernel_visible) {
        totals->kernel_visible = one->visible;
        memcpy(totals->kernel, one->kernel, sizeof totals->kernel);
    }
}

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* K, V, mask and slopes of a node: what has to be read or made before the library is called. */
static bool make_problem(const struct ggml_tensor *node, apa_ggml_scratch *scratch, apa_problem *problem,
                         apa_ggml_totals *totals)
{
    const struct ggml_tensor *k = node->src[1], *v = node->src[2];
    const float max_bias = params_of(node).max_bias;
    apa_ggml_band band = {0};
    const bool has_mask = node->src[3] != NULL, is_band = has_mask && k->ne[1] > 0 && mask_is_band(node, &band);
    const int64_t keys = is_band ? band.keys : k->ne[1];
    if (!widen(k, keys, &scratch->memory[0], &scratch->bytes[0]) ||
        !widen(v, keys, &scratch->memory[1], &scratch->bytes[1]))
        return false;
    problem_of(node, scratch->memory, problem);
    totals->bands += is_band;
    totals->masks += has_mask && !is_band;
    if (is_band)
        apply_band(&band, problem);
    else if (has_mask)
        problem->attn_mask = mask_of(node);
    if (max_bias > 0.0f && has_mask) {
        if (!fill_slopes(scratch, node->src[0]->ne[2], max_bias))
            return false;
        problem->mask_slopes = apa_tensor_hnd(scratch->slopes, APA_DTYPE_F32, 1, node->src[0]->ne[2], 1, 1);
    }
    return true;
}

enum ggml_status apa_ggml_run(apa_context *context, const apa_ggml_settings *settings, apa_ggml_scratch *scratch,
                              const struct ggml_tensor *node, apa_ggml_totals *totals)
{
    const double start = now_ms();
    apa_problem problem;
    if (!make_problem(node, scratch, &problem, totals))
        return GGML_STATUS_ALLOC_FAILED;
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.engine = "cpu";
    apa_statistics statistics;
    apa_statistics_init(&statistics);
    const apa_status status = apa_attention(context, &problem, recipe_for(settings, node), &options, &statistics);
    add_totals(totals, &statistics);
    totals->nodes++;
    totals->all_ms += now_ms() - start;
    if (status == APA_STATUS_OK)
        return GGML_STATUS_SUCCESS;
    return status == APA_STATUS_OUT_OF_MEMORY ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_FAILED;
}

void apa_ggml_scratch_free(apa_ggml_scratch *scratch)
{
    free(scratch->memory[0]);
    free(scratch->memory[1]);
    free(scratch->slopes);
    memset(scratch, 0, sizeof *scratch);
}
