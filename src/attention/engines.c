/* The table of engines. */
#include "attention/engines.h"

#include "cpu/engine.h"
#include "reference/reference.h"
#ifdef APA_HAVE_CUDA
#include "cuda/engine.h"
#endif

static const apa_engine *const engines[] = {
#ifdef APA_HAVE_CUDA
    &apa_cuda_wgmma_engine, &apa_cuda_warp_engine,
#endif
    &apa_cpu_engine, &apa_reference_engine};

const apa_engine *apa_engine_at(size_t i)
{
    return i < sizeof engines / sizeof engines[0] ? engines[i] : NULL;
}

const char *apa_engine_name(size_t i)
{
    const apa_engine *engine = apa_engine_at(i);
    return engine == NULL ? NULL : engine->name;
}
