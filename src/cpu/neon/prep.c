/* Prep of the NEON level. The text is cpu/lanes8/prep.h. */
#include "cpu/neon/neon.h"
#include "cpu/neon/vector.h"

#define SUFFIX neon
#include "cpu/lanes8/prep.h"
#include "cpu/lanes8/prep_tile.h"
