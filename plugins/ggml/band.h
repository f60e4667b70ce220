/* What an attention mask of ggml says, when it says something simple.
 *
 * ggml has no causal flag: the mask, FP16 [rows][keys], holds 0 where a key is seen and -inf where it isn't. A mask of
 * one sequence in order is a band: row i sees keys first_i … end_i - 1 with end_i = offset + 1 + i (causal), or the
 * same keys for every row (not causal), and with a sliding window first_i = end_i - width from some row on. Told so,
 * the library skips what is masked instead of reading and adding the mask. */
#ifndef APA_GGML_BAND_H
#define APA_GGML_BAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct apa_ggml_band {
    bool causal;
    int64_t q_offset; /* causal: row 0 sees keys up to this one */
    int64_t width;    /* causal: keys a row sees at most, -1 = no bound */
    int64_t keys;     /* not causal: every row sees keys 0 … keys - 1; causal: no row sees a key from here on */
} apa_ggml_band;

/* mask: bits of FP16, row i at mask + i·stride. True when the mask is a band; rows >= 1 and keys >= 1. */
bool apa_ggml_find_band(const uint16_t *mask, int64_t rows, int64_t keys, size_t stride, apa_ggml_band *band);

#endif
