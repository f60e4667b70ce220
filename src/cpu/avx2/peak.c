/* Ceilings of the AVX2 level. The text is cpu/lanes8/peak.h; that of the INT8 products stands beside them. */
#include "cpu/avx2/avx2.h"
#include "cpu/avx2/vector.h"

#define SUFFIX avx2
#define HIDE(x) __asm__ volatile("" : "+x"(x))
#define KEEP(x) __asm__ volatile("" : : "x"(x))
#include "cpu/lanes8/peak.h"
