#include "cuda/wgmma/parts.h"

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t at_most(int64_t x, int64_t most)
{
    return x < most ? x : most;
}

apa_wgmma_parts apa_wgmma_cut_heads(const apa_call *call, int64_t most)
{
    if (most < 1)
        most = 1;
    if (most >= call->Hkv) {
        const int64_t sequences = at_most(most / call->Hkv, call->B);
        return (apa_wgmma_parts){ceil_div(call->B, sequences), sequences, call->Hkv, 1};
    }
    const int64_t heads = ceil_div(call->Hkv, ceil_div(call->Hkv, most)), in_sequence = ceil_div(call->Hkv, heads);
    return (apa_wgmma_parts){call->B * in_sequence, 1, heads, in_sequence};
}

static void move_to(apa_tensor *x, int64_t b, int64_t h, int64_t sequences, int64_t heads)
{
    if (x->dtype == APA_DTYPE_NONE)
        return;
    if (x->data != NULL)
        x->data = (char *)x->data + (b * x->stride[0] + h * x->stride[1]) * (int64_t)apa_dtype_bytes(x->dtype);
    x->shape[0] = sequences;
    x->shape[1] = heads;
}

apa_call apa_wgmma_part(const apa_call *call, const apa_wgmma_parts *parts, int64_t i, int64_t *rows_before)
{
    const int64_t b = i / parts->in_sequence * parts->sequences, h = i % parts->in_sequence * parts->heads;
    apa_call part = *call;
    part.B = at_most(call->B - b, parts->sequences);
    part.Hkv = at_most(call->Hkv - h, parts->heads);
    part.Hq = part.Hkv * call->G;
    move_to(&part.q, b, h * call->G, part.B, part.Hq);
    move_to(&part.k, b, h, part.B, part.Hkv);
    move_to(&part.v, b, h, part.B, part.Hkv);
    move_to(&part.out, b, h * call->G, part.B, part.Hq);
    move_to(&part.lse, b, h * call->G, part.B, part.Hq);
    *rows_before = (b * call->Hq + h * call->G) * call->Sq;
    return part;
}
