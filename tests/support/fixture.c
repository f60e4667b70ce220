/* One context for a group of tests. */
#include "support/fixture.h"

#include "support/problems.h"

apa_context *context;

int set_up(void **state)
{
    (void)state;
    apa_test_seed();
    return apa_context_create(&context, NULL) != APA_STATUS_OK;
}

int tear_down(void **state)
{
    (void)state;
    apa_context_destroy(context);
    return 0;
}
