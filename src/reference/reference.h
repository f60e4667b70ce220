/* The reference engine: what every other engine is measured against. */
#ifndef APA_REFERENCE_REFERENCE_H
#define APA_REFERENCE_REFERENCE_H

#include "core/engine.h"

/* Portable C11, sums in double, every recipe, all dtypes (f64 too). Never skips a tile. */
extern const apa_engine apa_reference_engine;

#endif
