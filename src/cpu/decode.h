/* The exact method on a block of few rows (decode).
 *
 * A block with at most FEW rows, in whichever lanes of its registers they lie, walks its tiles with the kernels of few
 * rows, K and V straight from their tensors. A row's bits are those of the other way, so exact's promise holds: they
 * don't depend on Sq. Masks, softcap and slopes take the other way. */
#ifndef APA_CPU_DECODE_H
#define APA_CPU_DECODE_H

#include "cpu/block.h"

bool apa_cpu_decode_applies(const apa_cpu_block *block);

/* Tiles first … end-1 from empty states into the block's states and o. */
void apa_cpu_decode_segment(apa_cpu_block *block, int64_t first, int64_t end);

#endif
