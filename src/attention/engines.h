/* The engines of this build, fastest first. Adding one is a line in engines.c. */
#ifndef APA_ATTENTION_ENGINES_H
#define APA_ATTENTION_ENGINES_H

#include "core/engine.h"

/* Engine number i, NULL past the last. */
const apa_engine *apa_engine_at(size_t i);

#endif
