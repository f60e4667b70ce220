/* Reads a mask once, row by row: 0s must form one run, -infs everything else, and the runs must fit one band. */
#include "band.h"

#define SEEN 0x0000u   /* +0 */
#define HIDDEN 0xFC00u /* -inf */

/* The run of keys that a row sees; false when it holds anything but one run of 0 among -inf. */
static bool row_run(const uint16_t *row, int64_t keys, int64_t *first, int64_t *end)
{
    int64_t from = 0, to;
    while (from < keys && row[from] == HIDDEN)
        from++;
    for (to = from; to < keys && row[to] == SEEN;)
        to++;
    unsigned other = 0;
    for (int64_t j = to; j < keys; j++)
        other |= row[j] ^ HIDDEN;
    *first = from;
    *end = to;
    return other == 0 && from < to;
}

/* Row i of a causal band: sees up to q_offset + i, and width keys at most. */
static bool fits_causal(const apa_ggml_band *band, int64_t i, int64_t keys, int64_t first, int64_t end)
{
    const int64_t line = band->q_offset + i + 1;
    if (end != (line < keys ? line : keys))
        return false;
    const int64_t least = band->width < 0 ? 0 : line - band->width;
    return first == (least > 0 ? least : 0);
}

bool apa_ggml_find_band(const uint16_t *mask, int64_t rows, int64_t keys, size_t stride, apa_ggml_band *band)
{
    int64_t first, end, last_first, last_end;
    if (!row_run(mask, keys, &first, &end) ||
        !row_run(mask + (size_t)(rows - 1) * stride, keys, &last_first, &last_end))
        return false;
    *band = (apa_ggml_band){.causal = true, .q_offset = end - 1, .width = -1, .keys = last_end};
    if (rows > 1 && last_end == end) { /* the same keys for all */
        if (first != 0 || last_first != 0)
            return false;
        band->causal = false;
    } else if (last_first > 0) { /* a window shows where its left edge has left key 0 */
        band->width = band->q_offset + rows - last_first;
    }
    for (int64_t i = 0; i < rows; i++) {
        if (!row_run(mask + (size_t)i * stride, keys, &first, &end))
            return false;
        if (band->causal ? !fits_causal(band, i, keys, first, end) : (first != 0 || end != band->keys))
            return false;
    }
    return true;
}
