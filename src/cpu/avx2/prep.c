/* Prep of the AVX2 level. The text is cpu/lanes8/prep.h. */
#include "cpu/avx2/avx2.h"
#include "cpu/avx2/vector.h"

#define SUFFIX avx2
#include "cpu/lanes8/prep.h"
#include "cpu/lanes8/prep_tile.h"
