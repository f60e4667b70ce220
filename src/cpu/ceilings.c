/* What the machine does at best: the bare loops of the context's level, on all its threads at once.
 *
 * Rates are work over wall time of a parallel loop with one piece a thread, the best of several turns: a turn that
 * another program disturbed says less about the machine. */
#include "apa/measure.h"
#include "cpu/kernels.h"

#include <string.h>

#define READ_BYTES ((int64_t)256 << 20)
#define READ_UNIT 512
#define TURN_MS 20.0
#define LARGEST_THREADS 4096

typedef struct turn {
    const apa_cpu_kernels *kernels;
    int what; /* apa_cpu_peak, PEAK_I8 or PEAK_BF16 */
    int64_t rounds, piece;
    const char *memory;
    double done[LARGEST_THREADS];
} turn;

enum { PEAK_I8 = APA_CPU_PEAK_READ + 1, PEAK_BF16 };

static void run_turn(void *argument, size_t index)
{
    turn *now = argument;
    if (now->what == PEAK_I8)
        now->done[index] = now->kernels->peak_i8(now->rounds);
    else if (now->what == PEAK_BF16)
        now->done[index] = now->kernels->peak_bf16(now->rounds);
    else
        now->done[index] =
            now->kernels->peak((apa_cpu_peak)now->what, now->rounds,
                               now->memory == NULL ? NULL : now->memory + (int64_t)index * now->piece, now->piece);
}

/* One turn's rate in work per second; *ms: how long it took. */
static double rate(apa_context *context, turn *now, size_t threads, double *ms)
{
    const double start = apa_now_ms();
    apa_context_parallel(context, run_turn, now, threads);
    *ms = apa_now_ms() - start;
    double work = 0.0;
    for (size_t i = 0; i < threads; i++)
        work += now->done[i];
    return *ms > 0.0 ? work / *ms * 1e3 : 0.0;
}

/* More rounds than this in no time: the compiler has left the loop out, and there is no figure. */
#define LARGEST_ROUNDS ((int64_t)1 << 40)

/* Best rate over about `seconds`; rounds are doubled until a turn is long enough to be timed. 0: none was. */
static double best_rate(apa_context *context, turn *now, int what, double seconds)
{
    const size_t threads = (size_t)apa_context_threads(context);
    double ms, best = 0.0;
    now->what = what;
    now->rounds = 1000;
    while (rate(context, now, threads, &ms), what != APA_CPU_PEAK_READ && ms < TURN_MS)
        if ((now->rounds *= 2) > LARGEST_ROUNDS)
            return 0.0;
    const double start = apa_now_ms();
    do {
        const double found = rate(context, now, threads, &ms);
        best = found > best ? found : best;
    } while (apa_now_ms() - start < seconds * 1e3);
    return best;
}

void apa_ceilings_init(apa_ceilings *ceilings)
{
    memset(ceilings, 0, sizeof *ceilings);
    ceilings->size = sizeof *ceilings;
}

apa_status apa_ceilings_measure(apa_context *context, double seconds, apa_ceilings *ceilings)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (ceilings == NULL || ceilings->size != sizeof *ceilings)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "ceilings: NULL or not set up by apa_ceilings_init()");
    if (!(seconds > 0.0 && seconds <= 60.0))
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "seconds: %g, expected more than 0 and at most 60",
                        seconds);
    const int64_t threads = apa_context_threads(context);
    turn *now = apa_aligned_allocate(1, sizeof *now);
    char *memory = apa_aligned_allocate((size_t)READ_BYTES, 1);
    apa_status status = APA_STATUS_OK;
    if (now == NULL || memory == NULL) {
        status = apa_fail(context, APA_STATUS_OUT_OF_MEMORY, "ceilings: no memory for %lld bytes to read",
                          (long long)READ_BYTES);
        goto done;
    }
    memset(memory, 1, (size_t)READ_BYTES);
    now->kernels = apa_cpu_kernels_for(apa_context_isa_level(context));
    now->memory = NULL;
    ceilings->f32_flops = best_rate(context, now, APA_CPU_PEAK_F32, seconds);
    if (now->kernels->peak_bf16 != NULL)
        ceilings->bf16_flops = best_rate(context, now, PEAK_BF16, seconds);
    ceilings->i8_ops = best_rate(context, now, PEAK_I8, seconds);
    ceilings->exp2_f32 = best_rate(context, now, APA_CPU_PEAK_EXP2_F32, seconds);
    ceilings->exp2_i8 = best_rate(context, now, APA_CPU_PEAK_EXP2_I8, seconds);
    now->memory = memory;
    now->piece = READ_BYTES / threads / READ_UNIT * READ_UNIT;
    ceilings->read_bytes = best_rate(context, now, APA_CPU_PEAK_READ, seconds);
done:
    apa_aligned_free(memory);
    apa_aligned_free(now);
    return status;
}
