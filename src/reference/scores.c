/* What stands between scale·q·k and the softmax, and which keys a row sees.
 *
 * In natural units and in this order (include/apa/attention.h):
 *     s = softcap·tanh(s / softcap)
 *     s = s - slope·|i + q_offset - j|           ALiBi: Press et al., arXiv 2108.12409
 *     s = s + mask_slope·mask[i][j]
 * Sums in double; a caller that keeps scores in a narrower format rounds the result once. Softcap and distance before
 * the mask: ONNX's Attention (operator set 24) has it so.
 *
 * Visibility is a set of 64 bits per row and tile. A bit that is not set is never read: what a mask leaves out is left
 * out of sums by selection, so that a NaN there goes nowhere. Where a float mask leaves no number (NaN, +inf) for a key
 * that is seen, the tile is hot for the whole group, as one that holds such a value itself would be. */
#include "reference/internal.h"

#include <math.h>
#include <string.h>

/* Element (b, h, i, j) of a float mask times the head's slope; -inf where the key is left out. */
static double added(const apa_call *call, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const apa_tensor *mask = &call->mask;
    const int64_t at = b * mask->stride[0] + h * mask->stride[1] + i * mask->stride[2] + j * mask->stride[3];
    const char *element = (const char *)mask->data + at * (int64_t)apa_dtype_bytes(mask->dtype);
    double value;
    if (mask->dtype == APA_DTYPE_BOOL)
        return *(const unsigned char *)element != 0 ? 0.0 : -INFINITY;
    apa_reference_load(element, mask->dtype, 1, APA_EXACT_FORMAT_INPUT, &value);
    if (value == -INFINITY || call->mask_slopes.dtype == APA_DTYPE_NONE)
        return value;
    return value * (double)apa_call_per_head(&call->mask_slopes, b, h);
}

/* Keys of tile t that the row sees through causal line and window. */
static uint64_t within_lines(const apa_reference_row *row, int64_t t)
{
    int64_t lo, hi;
    apa_reference_span(row, t, &lo, &hi);
    return apa_reference_bits(lo, hi);
}

/* What the mask leaves of a row and tile; notes a value that is no number. */
static uint64_t through_mask(apa_reference_block *block, const apa_reference_row *row, int64_t t)
{
    uint64_t seen = within_lines(row, t);
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        if ((seen >> j & 1) == 0)
            continue;
        const double value = added(block->call, block->head->b, row->hq, row->position, t * APA_REFERENCE_TILE + j);
        if (value == -INFINITY)
            seen &= ~(UINT64_C(1) << j);
        else if (!isfinite(value) && block->spoilt != NULL)
            block->spoilt[t] = 1;
    }
    return seen;
}

void apa_reference_see(apa_reference_block *block)
{
    const int64_t tiles = apa_call_tiles(block->call);
    if (block->seen == NULL)
        return;
    if (block->spoilt != NULL)
        memset(block->spoilt, 0, (size_t)tiles);
    for (int64_t r = 0; r < block->rows; ++r) {
        apa_reference_row *row = &block->row[r];
        uint64_t any = 0;
        memset(block->seen + r * tiles, 0, sizeof *block->seen * (size_t)tiles);
        if (!row->real || row->first >= row->end)
            continue;
        for (int64_t t = row->first / APA_REFERENCE_TILE; t <= (row->end - 1) / APA_REFERENCE_TILE; ++t)
            any |= block->seen[r * tiles + t] = through_mask(block, row, t);
        if (any == 0)
            row->end = row->first; /* sees nothing: such a row has no say in what its group does */
    }
}

bool apa_reference_slopes_finite(const apa_call *call, int64_t b, int64_t hq)
{
    return (call->alibi_slopes.dtype == APA_DTYPE_NONE || isfinite(apa_call_per_head(&call->alibi_slopes, b, hq))) &&
           (call->mask_slopes.dtype == APA_DTYPE_NONE || isfinite(apa_call_per_head(&call->mask_slopes, b, hq)));
}

/* What is added to the score of key j after the cap. */
static double addend(const apa_reference_block *block, const apa_reference_row *row, int64_t j)
{
    const apa_call *call = block->call;
    double sum = 0;
    if (call->alibi_slopes.dtype != APA_DTYPE_NONE)
        sum -= (double)apa_call_per_head(&call->alibi_slopes, block->head->b, row->hq) *
               fabs((double)row->position + (double)call->q_offset - (double)j);
    if (call->mask.dtype != APA_DTYPE_NONE)
        sum += added(call, block->head->b, row->hq, row->position, j);
    return sum;
}

void apa_reference_bend(const apa_reference_block *block, int64_t r, int64_t t, double *s)
{
    const apa_call *call = block->call;
    const uint64_t seen = apa_reference_seen(block, r, t);
    if (!apa_call_changes_scores(call))
        return;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        if ((seen >> j & 1) == 0)
            continue;
        if (call->softcap != 0.0)
            s[j] = call->softcap * tanh(s[j] / call->softcap);
        s[j] += addend(block, &block->row[r], t * APA_REFERENCE_TILE + j);
    }
}

double apa_reference_mean_addend(const apa_reference_block *block, int64_t r, int64_t t)
{
    const uint64_t seen = apa_reference_seen(block, r, t);
    double sum = 0;
    int64_t n = 0;
    if (!apa_call_changes_scores(block->call))
        return 0.0;
    for (int64_t j = 0; j < APA_REFERENCE_TILE; ++j) {
        if ((seen >> j & 1) == 0)
            continue;
        sum += addend(block, &block->row[r], t * APA_REFERENCE_TILE + j);
        ++n;
    }
    return n == 0 ? 0.0 : sum / (double)n;
}

double apa_reference_sink(const apa_call *call, int64_t b, int64_t hq)
{
    return call->sinks.dtype == APA_DTYPE_NONE ? -INFINITY : (double)apa_call_per_head(&call->sinks, b, hq);
}
