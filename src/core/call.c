/* What a row sees, and which row is which. */
#include "core/call.h"

/* i + offset + d, clamped to [low, high] (low >= -1), i >= 0; no intermediate overflows. offset + d comes first: where
 * the two have different signs they may cancel, where they have the same sign and overflow, i does not bring the sum
 * back. */
static int64_t clamped_sum(int64_t i, int64_t offset, int64_t d, int64_t low, int64_t high)
{
    int64_t sum;
    if (__builtin_add_overflow(offset, d, &sum))
        return d > 0 ? high : low;
    if (__builtin_add_overflow(sum, i, &sum))
        return high;
    return sum < low ? low : sum > high ? high : sum;
}

void apa_call_visible(const apa_call *call, int64_t i, int64_t *first, int64_t *end)
{
    const int64_t Skv = call->Skv;
    int64_t from = 0, to = Skv;
    if (call->window_left >= 0)
        from = clamped_sum(i, call->q_offset, -call->window_left, 0, Skv);
    if (call->window_right >= 0) {
        const int64_t bound = clamped_sum(i, call->q_offset, call->window_right, -1, Skv) + 1;
        to = bound < to ? bound : to;
    }
    if (call->causal) {
        const int64_t bound = clamped_sum(i, call->q_offset, 0, -1, Skv) + 1;
        to = bound < to ? bound : to;
    }
    *first = from < to ? from : to;
    *end = to;
}

static int64_t position_blocks(const apa_call *call)
{
    return (call->Sq + call->recipe.group - 1) / call->recipe.group;
}

int64_t apa_call_rows(const apa_call *call)
{
    if (call->recipe.packing == APA_PACKING_HEAD)
        return position_blocks(call) * call->recipe.group * call->G;
    return call->Sq * call->G;
}

void apa_call_row(const apa_call *call, int64_t r, int64_t *position, int64_t *head)
{
    if (call->recipe.packing == APA_PACKING_HEAD) {
        const int64_t group = r / call->recipe.group, lane = r % call->recipe.group;
        *position = group / call->G * call->recipe.group + lane;
        *head = group % call->G;
    } else {
        *position = r / call->G;
        *head = r % call->G;
    }
}
