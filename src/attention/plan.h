/* Plan: the one place where a call is validated, refused, and given an engine. After it nothing branches on what was
 * asked. */
#ifndef APA_ATTENTION_PLAN_H
#define APA_ATTENTION_PLAN_H

#include "core/engine.h"

/* What of a problem is read: nothing but its numbers; data pointers, that they are there, and page numbers; the same
 * of tensors and a block table in a device's memory, which the host cannot look into. */
typedef enum apa_plan_data { APA_PLAN_NO_DATA, APA_PLAN_HOST_DATA, APA_PLAN_DEVICE_DATA } apa_plan_data;

/* Validates, picks the engine and resolves the recipe. recipe and options may be NULL. */
apa_status apa_plan_call(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                         const apa_attention_options *options, apa_plan_data data, apa_call *call,
                         const apa_engine **engine);

#endif
