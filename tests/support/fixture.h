/* The group fixture of tests that need one context with the defaults. */
#ifndef APA_TESTS_FIXTURE_H
#define APA_TESTS_FIXTURE_H

#include "apa/context.h"

extern apa_context *context;

int set_up(void **state);    /* prints the seed, makes the context */
int tear_down(void **state); /* frees it */

#endif
