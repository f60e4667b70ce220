/* The table of engines. */
#include "attention/engines.h"

#include "cpu/engine.h"
#include "reference/reference.h"

static const apa_engine *const engines[] = {&apa_cpu_engine, &apa_reference_engine};

const apa_engine *apa_engine_at(size_t i)
{
    return i < sizeof engines / sizeof engines[0] ? engines[i] : NULL;
}

const char *apa_engine_name(size_t i)
{
    const apa_engine *engine = apa_engine_at(i);
    return engine == NULL ? NULL : engine->name;
}
