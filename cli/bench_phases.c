/* Where a run's time went, phase by phase, and how near each phase came to its ceiling.
 *
 * Times are thread milliseconds of a run with clocks around the kernels; the clocks' own cost is what that run took
 * longer than the median without them, and is stated. A phase's ceiling is what bounds it: the level's multiply-add or
 * INT8 product for products, its exponential for softmax, one thread's share of the read bandwidth for loading. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void bench_phases_take(bench_phases *phases, const apa_statistics *statistics, double plain_ms)
{
    memcpy(phases->phase, statistics->phase, sizeof phases->phase);
    phases->total_ms = statistics->prep_ms + statistics->attention_ms;
    phases->plain_ms = plain_ms;
    phases->measured = false;
    for (int i = 0; i < APA_PHASES; i++)
        phases->measured = phases->measured || phases->phase[i].ms > 0;
}

double bench_phases_bytes(const bench_phases *phases)
{
    double bytes = 0;
    for (int i = 0; i < APA_PHASES; i++)
        bytes += phases->phase[i].bytes;
    return bytes;
}

static double thread_ms(const bench_phases *phases)
{
    double ms = 0;
    for (int i = 0; i < APA_PHASES; i++)
        ms += phases->phase[i].ms;
    return ms;
}

/* One thread's ceiling of a phase, per second, while all threads work; NaN where nothing bounds it. */
static double ceiling_of(int phase, const bench_ceilings *ceilings)
{
    const double threads = ceilings->threads;
    switch (phase) {
    case APA_PHASE_SCORES:
    case APA_PHASE_VALUES:
        return ceilings->all.i8_ops / threads;
    case APA_PHASE_SOFTMAX:
        return ceilings->all.exp2_i8 / threads;
    case APA_PHASE_EXACT_SCORES:
    case APA_PHASE_EXACT_VALUES:
        return ceilings->all.f32_flops / threads;
    case APA_PHASE_EXACT_SOFTMAX:
        return ceilings->all.exp2_f32 / threads;
    case APA_PHASE_PREP:
    case APA_PHASE_EXACT_LOAD:
        return ceilings->all.read_bytes / threads;
    default:
        return NAN;
    }
}

/* What the phase did of what its ceiling counts, per second. */
static double rate_of(int phase, const apa_phase_cost *cost)
{
    const bool loads = phase == APA_PHASE_PREP || phase == APA_PHASE_EXACT_LOAD;
    return cost->ms > 0 ? (loads ? cost->bytes : cost->operations) / cost->ms * 1e3 : NAN;
}

static void print_or_blank(double number, int width, int digits)
{
    if (number > 0)
        printf(" %*.*f", width, digits, number);
    else
        printf(" %*s", width, "");
}

void bench_phases_print(const char *method, const bench_phases *phases, const bench_ceilings *ceilings)
{
    if (!phases->measured)
        return;
    printf("\n%s by phase (thread ms; with clocks %+.1f %%)\n", method,
           100 * (phases->total_ms / phases->plain_ms - 1));
    printf("%-14s %10s %8s %10s %10s %10s\n", "phase", "ms", "share", "Gop/s", "MB",
           ceilings->measured ? "of peak" : "");
    for (int i = 0; i < APA_PHASES; i++) {
        const apa_phase_cost *cost = &phases->phase[i];
        if (!(cost->ms > 0))
            continue;
        printf("%-14s %10.3f %6.1f %%", apa_phase_name(i), cost->ms, 100 * cost->ms / thread_ms(phases));
        print_or_blank(cost->operations / cost->ms / 1e6, 10, 1);
        print_or_blank(cost->bytes / 1e6, 10, 1);
        const double share = ceilings->measured ? rate_of(i, cost) / ceiling_of(i, ceilings) : NAN;
        if (share > 0)
            printf(" %8.1f %%", 100 * share);
        printf("\n");
    }
}

json_t *bench_phases_json(const bench_phases *phases, const bench_ceilings *ceilings)
{
    json_t *object = json_object();
    for (int i = 0; i < APA_PHASES; i++) {
        const apa_phase_cost *cost = &phases->phase[i];
        json_t *phase = json_object();
        json_object_set_new(phase, "ms", cli_json_number(cost->ms));
        json_object_set_new(phase, "share", cli_json_number(cost->ms / thread_ms(phases)));
        json_object_set_new(phase, "operations", cli_json_number(cost->operations));
        json_object_set_new(phase, "bytes", cli_json_number(cost->bytes));
        if (ceilings->measured)
            json_object_set_new(phase, "of_ceiling", cli_json_number(rate_of(i, cost) / ceiling_of(i, ceilings)));
        json_object_set_new(object, apa_phase_name(i), phase);
    }
    json_object_set_new(object, "with_clocks_ms", cli_json_number(phases->total_ms));
    return object;
}
