/* libapa: adaptive-precision attention. This header is the whole core API; apa/io.h (files) and apa/eval.h (error over
 * all pairs) come beside it. */
#ifndef APA_APA_H
#define APA_APA_H

#include "apa/attention.h"
#include "apa/context.h"
#include "apa/kv_cache.h"
#include "apa/measure.h"
#include "apa/recipe.h"
#include "apa/state.h"
#include "apa/status.h"
#include "apa/tensor.h"
#include "apa/version.h"

#endif
