/* Ceilings of the machine: FP32 and BF16 multiply-adds, INT8 dot products, exponentials, reading from memory. */
#include "bench.h"

#include <stddef.h>
#include <stdio.h>

#define SECONDS_A_FIGURE 0.3

typedef struct ceiling_row {
    const char *key, *label;
    size_t at;
} ceiling_row;

static const ceiling_row rows[] = {
    {"f32_flops", "FP32 multiply-add GFLOP/s", offsetof(apa_ceilings, f32_flops)},
    {"bf16_flops", "BF16 dot product GFLOP/s", offsetof(apa_ceilings, bf16_flops)},
    {"i8_ops", "INT8 dot product GOP/s", offsetof(apa_ceilings, i8_ops)},
    {"exp2_f32", "2^x, FP32          G/s", offsetof(apa_ceilings, exp2_f32)},
    {"exp2_i8", "2^x, 8 bits packed G/s", offsetof(apa_ceilings, exp2_i8)},
    {"read_bytes", "reading memory    GB/s", offsetof(apa_ceilings, read_bytes)},
};
#define ROWS (sizeof rows / sizeof rows[0])

static double value(const apa_ceilings *ceilings, size_t row)
{
    return *(const double *)(const void *)((const char *)ceilings + rows[row].at);
}

static int measure_with(const cli_options *options, int64_t threads, apa_ceilings *found, int *used)
{
    cli_options one = *options;
    one.threads = threads;
    apa_context *context = NULL;
    int code = cli_context_create(&one, &context);
    apa_ceilings_init(found);
    if (code == CLI_DONE) {
        const apa_status status = apa_ceilings_measure(context, SECONDS_A_FIGURE, found);
        if (status != APA_STATUS_OK)
            code = cli_complain_context(options, context, status);
        *used = (int)apa_context_threads(context);
    }
    apa_context_destroy(context);
    return code;
}

int bench_ceilings_measure(const cli_options *options, bench_ceilings *ceilings)
{
    int one;
    cli_progress(NULL, "ceilings", 0);
    int code = measure_with(options, 1, &ceilings->one, &one);
    cli_progress(NULL, "ceilings", 0.5);
    if (code == CLI_DONE)
        code = measure_with(options, options->threads, &ceilings->all, &ceilings->threads);
    cli_progress(NULL, "ceilings", 1);
    ceilings->measured = code == CLI_DONE;
    return code;
}

void bench_ceilings_print(const bench_ceilings *ceilings)
{
    char cpu[128];
    cli_cpu_name(cpu, sizeof cpu);
    printf("ceilings of %s\n%-28s %12s %9d threads\n", cpu, "", "1 thread", ceilings->threads);
    for (size_t i = 0; i < ROWS; i++) {
        const double one = value(&ceilings->one, i) / 1e9, all = value(&ceilings->all, i) / 1e9;
        if (one > 0)
            printf("%-28s %12.1f %17.1f\n", rows[i].label, one, all);
        else
            printf("%-28s %12s %17s\n", rows[i].label, "none", "none");
    }
}

json_t *bench_ceilings_json(const bench_ceilings *ceilings)
{
    json_t *object = json_object(), *one = json_object(), *all = json_object();
    for (size_t i = 0; i < ROWS; i++) {
        json_object_set_new(one, rows[i].key, cli_json_number(value(&ceilings->one, i)));
        json_object_set_new(all, rows[i].key, cli_json_number(value(&ceilings->all, i)));
    }
    json_object_set_new(object, "threads", json_integer(ceilings->threads));
    json_object_set_new(object, "one_thread", one);
    json_object_set_new(object, "all_threads", all);
    return object;
}
