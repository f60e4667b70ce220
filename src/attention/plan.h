/* Plan: the one place where a call is validated, refused, and given an engine. After it nothing branches on what was
 * asked. */
#ifndef APA_ATTENTION_PLAN_H
#define APA_ATTENTION_PLAN_H

#include "core/engine.h"

/* Validates, picks the engine and resolves the recipe. Data pointers are checked only when need_data is set.
 * recipe and options may be NULL. */
apa_status apa_plan_call(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                         const apa_attention_options *options, bool need_data, apa_call *call,
                         const apa_engine **engine);

#endif
