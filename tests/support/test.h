/* cmocka with what it wants included first. */
#ifndef APA_TESTS_TEST_H
#define APA_TESTS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#endif
