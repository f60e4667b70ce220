/* The smallest program: causal attention of 8 query heads over 2 KV heads. All keys count alike and all values are 1,
 * so every output must be 1. The part between the markers is the one that README.md shows. */
#include <apa/apa.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int attend(float *q, float *k, float *v, float *out, int64_t Hq, int64_t Hkv, int64_t S, int64_t D)
{
    /* README { */
    apa_context *context; /* threads, scratch memory, the last error's text */
    if (apa_context_create(&context, NULL) != APA_STATUS_OK)
        return 1;
    apa_problem problem;
    apa_problem_init(&problem);
    problem.q = apa_tensor_hnd(q, APA_DTYPE_F32, 1, Hq, S, D); /* [batch, heads, seq, dim]; any strides will do */
    problem.k = apa_tensor_hnd(k, APA_DTYPE_F32, 1, Hkv, S, D);
    problem.v = apa_tensor_hnd(v, APA_DTYPE_F32, 1, Hkv, S, D);
    problem.out = apa_tensor_hnd(out, APA_DTYPE_F32, 1, Hq, S, D);
    problem.causal = 1;
    apa_statistics done;
    apa_statistics_init(&done);
    apa_status status = apa_attention(context, &problem, NULL, NULL, &done); /* NULL: recipe "apa", defaults */
    if (status != APA_STATUS_OK)
        fprintf(stderr, "%s: %s\n", apa_status_name(status), apa_context_message(context));
    else
        printf("%s ran, %.1f %% of the tiles hot\n", done.kernel, 100.0 * done.hot_share);
    apa_context_destroy(context);
    /* } */
    return status != APA_STATUS_OK;
}

int main(void)
{
    enum { Hq = 8, Hkv = 2, S = 2048, D = 64 };
    float *q = calloc(Hq * S * D, sizeof *q), *k = calloc(Hkv * S * D, sizeof *k);
    float *v = calloc(Hkv * S * D, sizeof *v), *out = calloc(Hq * S * D, sizeof *out);
    int failed = q == NULL || k == NULL || v == NULL || out == NULL;
    for (int i = 0; !failed && i < Hkv * S * D; i++)
        v[i] = 1.0f;
    failed = failed || attend(q, k, v, out, Hq, Hkv, S, D);
    for (int i = 0; !failed && i < Hq * S * D; i++)
        failed = !(fabsf(out[i] - 1.0f) <= 1e-5f);
    free(q);
    free(k);
    free(v);
    free(out);
    return failed;
}
