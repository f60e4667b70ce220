/* apa_attention() with tiles that were quantised before. */
#ifndef APA_ATTENTION_ATTENTION_H
#define APA_ATTENTION_ATTENTION_H

#include "core/call.h"

/* kept: NULL, or [count], one for each sequence of a ragged or paged problem. */
apa_status apa_attention_over(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                              const apa_attention_options *options, apa_statistics *statistics,
                              const struct apa_kept *kept, int64_t count);

#endif
