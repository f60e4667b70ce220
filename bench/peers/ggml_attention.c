/* ggml's CPU backend on one attention problem: GGML_OP_FLASH_ATTN_EXT with K and V in f16 or q8_0, timed and written
 * out.
 *
 *   ggml_attention Q K V OUT Hq Hkv Sq Skv D causal f16|q8_0 threads repeats
 *
 * Q, K and V are raw f16, [heads][positions][D]; OUT becomes raw f32, [Sq][Hq][D], ggml's order. Prints the
 * milliseconds of each timed run; one untimed run comes first, and quantising K and V is not timed. The mask is f16,
 * [Sq][Skv], as llama.cpp makes it. */
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct problem {
    int64_t Hq, Hkv, Sq, Skv, D;
    int causal, threads, repeats;
    enum ggml_type type;
} problem;

static void die(const char *what)
{
    fprintf(stderr, "ggml_attention: %s\n", what);
    exit(1);
}

static void *read_file(const char *path, size_t bytes)
{
    void *data = malloc(bytes);
    FILE *file = fopen(path, "rb");
    if (data == NULL || file == NULL || fread(data, 1, bytes, file) != bytes)
        die(path);
    fclose(file);
    return data;
}

static void set_q(struct ggml_tensor *q, const ggml_fp16_t *from)
{
    const int64_t n = ggml_nelements(q);
    float *row = malloc((size_t)n * sizeof *row);
    ggml_fp16_to_fp32_row(from, row, n);
    ggml_backend_tensor_set(q, row, 0, (size_t)n * sizeof *row);
    free(row);
}

static void set_kv(struct ggml_tensor *x, const ggml_fp16_t *from, int64_t D)
{
    const int64_t n = ggml_nelements(x);
    if (x->type == GGML_TYPE_F16) {
        ggml_backend_tensor_set(x, from, 0, ggml_nbytes(x));
        return;
    }
    float *row = malloc((size_t)n * sizeof *row);
    void *codes = malloc(ggml_nbytes(x));
    ggml_fp16_to_fp32_row(from, row, n);
    ggml_quantize_chunk(x->type, row, codes, 0, n / D, D, NULL);
    ggml_backend_tensor_set(x, codes, 0, ggml_nbytes(x));
    free(codes);
    free(row);
}

/* Query i sees keys up to i + Skv - Sq. */
static void set_mask(struct ggml_tensor *mask, const problem *p)
{
    ggml_fp16_t *values = calloc((size_t)(p->Sq * p->Skv), sizeof *values);
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    for (int64_t i = 0; i < p->Sq; i++)
        for (int64_t j = i + p->Skv - p->Sq + 1; j < p->Skv; j++)
            values[i * p->Skv + j] = hidden;
    ggml_backend_tensor_set(mask, values, 0, ggml_nbytes(mask));
    free(values);
}

int main(int argc, char **argv)
{
    if (argc != 14)
        die("expected Q K V OUT Hq Hkv Sq Skv D causal f16|q8_0 threads repeats");
    problem p = {atoll(argv[5]), atoll(argv[6]), atoll(argv[7]),
                 atoll(argv[8]), atoll(argv[9]), atoi(argv[10]),
                 atoi(argv[12]), atoi(argv[13]), strcmp(argv[11], "f16") == 0 ? GGML_TYPE_F16 : GGML_TYPE_Q8_0};
    const struct ggml_init_params size = {ggml_tensor_overhead() * 16 + ggml_graph_overhead(), NULL, true};
    struct ggml_context *context = ggml_init(size);
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, p.threads);
    struct ggml_tensor *q = ggml_new_tensor_4d(context, GGML_TYPE_F32, p.D, p.Sq, p.Hq, 1);
    struct ggml_tensor *k = ggml_new_tensor_4d(context, p.type, p.D, p.Skv, p.Hkv, 1);
    struct ggml_tensor *v = ggml_new_tensor_4d(context, p.type, p.D, p.Skv, p.Hkv, 1);
    struct ggml_tensor *mask = p.causal ? ggml_new_tensor_4d(context, GGML_TYPE_F16, p.Skv, p.Sq, 1, 1) : NULL;
    struct ggml_tensor *out = ggml_flash_attn_ext(context, q, k, v, mask, (float)(1.0 / sqrt((double)p.D)), 0.0f, 0.0f);
    struct ggml_cgraph *graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, out);
    if (ggml_backend_alloc_ctx_tensors(context, cpu) == NULL)
        die("no memory");
    const size_t q_bytes = (size_t)(p.Hq * p.Sq * p.D) * 2, k_bytes = (size_t)(p.Hkv * p.Skv * p.D) * 2;
    ggml_fp16_t *q16 = read_file(argv[1], q_bytes), *k16 = read_file(argv[2], k_bytes),
                *v16 = read_file(argv[3], k_bytes);
    set_q(q, q16);
    set_kv(k, k16, p.D);
    set_kv(v, v16, p.D);
    if (mask != NULL)
        set_mask(mask, &p);
    for (int i = 0; i <= p.repeats; i++) {
        const int64_t start = ggml_time_us();
        if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS)
            die("the graph failed");
        if (i > 0)
            printf("%.4f\n", (double)(ggml_time_us() - start) / 1e3);
    }
    float *result = malloc(ggml_nbytes(out));
    ggml_backend_tensor_get(out, result, 0, ggml_nbytes(out));
    FILE *file = fopen(argv[4], "wb");
    if (file == NULL || fwrite(result, 1, ggml_nbytes(out), file) != ggml_nbytes(out) || fclose(file) != 0)
        die(argv[4]);
    return 0;
}
