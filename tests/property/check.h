/* What must hold of every case. */
#ifndef APA_TESTS_PROPERTY_CHECK_H
#define APA_TESTS_PROPERTY_CHECK_H

#include "property/case.h"

typedef struct checker {
    apa_context *one, *backwards; /* one thread; a pool that takes tasks from the last to the first */
    const char *engine;
    bool may_refuse;   /* a refusal is counted, not a failure */
    char message[512]; /* of a failure or a refusal */
    double worst;      /* largest error over its bound so far */
} checker;

typedef enum verdict { HOLDS, REFUSED, FAILS } verdict;

verdict check_case(checker *with, const property_case *made);

#endif
