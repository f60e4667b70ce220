/* Outputs of a case: where they lie, and whether only they were written. And what a case is like, for people. */
#include "property/case.h"
#include "support/oracle.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD 64
#define PATTERN 0xA5

/* [B, S, H, D + 2] in memory: rows of all heads side by side, with gaps. */
static apa_tensor place(const apa_tensor *described, unsigned char **memory, size_t *bytes)
{
    apa_tensor x = *described;
    const size_t size = apa_dtype_bytes(x.dtype);
    const int64_t dim = x.shape[3] + 2, stride[4] = {x.shape[2] * x.shape[1] * dim, dim, x.shape[1] * dim, 1};
    if (x.dtype == APA_DTYPE_NONE)
        return x;
    memcpy(x.stride, stride, sizeof stride);
    *bytes = (size_t)(x.shape[0] * stride[0] + 2 * GUARD) * size;
    *memory = malloc(*bytes);
    if (*memory == NULL)
        abort();
    memset(*memory, PATTERN, *bytes);
    x.data = *memory + GUARD * size;
    return x;
}

case_outputs case_outputs_make(const property_case *made)
{
    case_outputs outputs = {0};
    outputs.out = place(&made->problem.out, &outputs.memory[0], &outputs.bytes[0]);
    outputs.lse = place(&made->problem.lse, &outputs.memory[1], &outputs.bytes[1]);
    return outputs;
}

void case_outputs_free(case_outputs *outputs)
{
    free(outputs->memory[0]);
    free(outputs->memory[1]);
}

/* Marks the bytes of the rows of all sequences. */
static void mark(const property_case *made, const apa_tensor *x, const unsigned char *memory, unsigned char *mine)
{
    const apa_problem *p = &made->problem;
    const size_t size = apa_dtype_bytes(x->dtype);
    for (int64_t b = 0; b < oracle_count(p); b++) {
        const oracle_sequence s = oracle_at(p, b);
        for (int64_t h = 0; h < x->shape[1]; h++)
            for (int64_t i = 0; i < s.queries; i++) {
                const int64_t entry = p->cu_seqlens_q != NULL ? 0 : b,
                              row = p->cu_seqlens_q != NULL ? p->cu_seqlens_q[b] + i : i;
                const int64_t offset = entry * x->stride[0] + h * x->stride[1] + row * x->stride[2];
                const size_t at = (size_t)((unsigned char *)x->data - memory) + (size_t)offset * size;
                memset(mine + at, 1, (size_t)x->shape[3] * size);
            }
    }
}

bool case_outputs_intact(const property_case *made, const case_outputs *outputs)
{
    const apa_tensor *const x[2] = {&outputs->out, &outputs->lse};
    bool intact = true;
    for (int i = 0; i < 2; i++) {
        if (x[i]->dtype == APA_DTYPE_NONE)
            continue;
        unsigned char *mine = calloc(outputs->bytes[i], 1);
        if (mine == NULL)
            abort();
        mark(made, x[i], outputs->memory[i], mine);
        for (size_t at = 0; at < outputs->bytes[i]; at++)
            intact = intact && (mine[at] || outputs->memory[i][at] == PATTERN);
        free(mine);
    }
    return intact;
}

static void print_tensor(const char *name, const apa_tensor *x)
{
    if (x->dtype == APA_DTYPE_NONE)
        return;
    printf("#   %-12s %s [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "] strides %" PRId64 ", %" PRId64
           ", %" PRId64 "\n",
           name, apa_dtype_name(x->dtype), x->shape[0], x->shape[1], x->shape[2], x->shape[3], x->stride[0],
           x->stride[1], x->stride[2]);
}

static void print_numbers(const char *name, const int64_t *x, int64_t n)
{
    if (x == NULL)
        return;
    printf("#   %-12s", name);
    for (int64_t i = 0; i < n; i++)
        printf(" %" PRId64, x[i]);
    printf("\n");
}

void case_print(const property_case *made)
{
    const apa_problem *p = &made->problem;
    const int64_t n = oracle_count(p);
    printf("#   %s%s%s\n", made->method, made->poisoned ? ", NaN in what nobody sees" : "",
           made->spoilt ? ", a NaN or Inf that may be seen" : "");
    print_tensor("q", &p->q);
    print_tensor("k", &p->k);
    print_tensor("v", &p->v);
    print_tensor("out", &p->out);
    print_tensor("lse", &p->lse);
    print_tensor("attn_mask", &p->attn_mask);
    print_tensor("mask_slopes", &p->mask_slopes);
    print_tensor("alibi_slopes", &p->alibi_slopes);
    print_tensor("sinks", &p->sinks);
    printf("#   causal %d, window %" PRId64 ", %" PRId64 ", softcap %g, scale %g", p->causal, p->window_left,
           p->window_right, p->softcap, p->softmax_scale);
    if (p->q_offset != APA_Q_OFFSET_DEFAULT)
        printf(", q_offset %" PRId64, p->q_offset);
    printf("\n");
    print_numbers("cu_seqlens_q", p->cu_seqlens_q, n + 1);
    print_numbers("cu_seqlens_k", p->cu_seqlens_k, n + 1);
    print_numbers("seqused_k", p->seqused_k, n);
    print_numbers("q_offsets", p->q_offsets, n);
    if (p->block_table != NULL)
        printf("#   paged, page size %" PRId64 "\n", p->k.shape[2]);
}
