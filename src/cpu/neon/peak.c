/* Ceilings of the NEON level. The text is cpu/lanes8/peak.h; that of the INT8 products stands beside them. */
#include "cpu/neon/neon.h"
#include "cpu/neon/vector.h"

#define SUFFIX neon
#define HIDE(x) __asm__ volatile("" : "+w"((x).a), "+w"((x).b))
#define KEEP(x) __asm__ volatile("" : : "w"((x).a), "w"((x).b))
#include "cpu/lanes8/peak.h"
