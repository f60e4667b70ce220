/* The CPU engine: FP32 exact tiles, INT8 cold tiles, kernels chosen once per context. */
#ifndef APA_CPU_ENGINE_H
#define APA_CPU_ENGINE_H

#include "core/engine.h"

extern const apa_engine apa_cpu_engine;

#endif
