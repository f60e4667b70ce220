/* What apa bench says beyond times: the phases of a run, the bytes it moved, the machine's ceilings. */
#include "support/command.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const json_t *phase_of(const json_t *phases, const char *name)
{
    const json_t *phase = json_object_get(phases, name);
    assert_non_null(phase);
    assert_true(command_number(phase, "ms") >= 0.0);
    return phase;
}

/* All phases are there, their shares make 1, and the work is what the shape says: 2 operations a value for whole tiles
 * of 64 keys and whole registers of 16 rows. */
static void phases(void **unused)
{
    (void)unused;
    command_works(command_run(
        "bench --shape 1,4,2,64,256,48,40 --no-causal --engine cpu --threads 2 --method cold --repeats 2 --json -"));
    json_t *report = command_parse(command_out);
    const json_t *apa = json_object_get(report, "phases"), *exact = json_object_get(report, "exact_phases");
    double share = 0.0, bytes = 0.0;
    int count = 0;
    assert_non_null(apa);
    assert_non_null(exact);
    for (; apa_phase_name(count) != NULL; count++) {
        share += command_number(phase_of(apa, apa_phase_name(count)), "share");
        bytes += command_number(phase_of(apa, apa_phase_name(count)), "bytes");
    }
    assert_int_equal(count, APA_PHASES);
    assert_true(fabs(share - 1.0) <= 1e-9);
    assert_true(bytes > 0.0 && bytes == command_number(report, "bytes_moved"));
    assert_true(command_number(phase_of(apa, "scores"), "operations") == 2.0 * 4 * 64 * 256 * 48);
    assert_true(command_number(phase_of(apa, "values"), "operations") == 2.0 * 4 * 64 * 256 * 40);
    assert_true(command_number(phase_of(apa, "softmax"), "operations") == 4.0 * 64 * 256);
    assert_true(command_number(phase_of(apa, "exact_scores"), "operations") == 0.0);
    assert_true(command_number(phase_of(apa, "prep"), "ms") > 0.0);
    assert_true(command_number(phase_of(exact, "exact_scores"), "operations") == 2.0 * 4 * 64 * 256 * 48);
    assert_true(command_number(phase_of(exact, "exact_values"), "operations") == 2.0 * 4 * 64 * 256 * 40);
    assert_true(command_number(phase_of(exact, "prep"), "ms") == 0.0);
    json_decref(report);
    command_works(command_run("bench --shape 1,2,1,64,256,32 --engine cpu --repeats 1"));
    assert_non_null(strstr(command_out, "apa by phase"));
    assert_non_null(strstr(command_out, "exact by phase"));
    assert_non_null(strstr(command_out, "bytes moved: "));
}

/* A few rows count their own rows, not whole registers. */
static void phases_of_decode(void **unused)
{
    (void)unused;
    command_works(command_run("bench --shape 1,3,1,1,640,64 --engine cpu --method exact --repeats 1 --json -"));
    json_t *report = command_parse(command_out);
    const double done = command_number(phase_of(json_object_get(report, "phases"), "exact_scores"), "operations");
    const double few = 2.0 * 3 * 640 * 64, whole = 2.0 * 16 * 640 * 64; /* levels without kernels of few rows */
    assert_true(done == few || done == whole);
    json_decref(report);
}

/* The reference engine has no phases and says so by leaving them out. */
static void no_phases(void **unused)
{
    (void)unused;
    command_works(command_run("bench --shape 1,2,1,8,70,16 --engine reference --repeats 1 --json -"));
    json_t *report = command_parse(command_out);
    assert_null(json_object_get(report, "phases"));
    json_decref(report);
}

static void ceilings(void **unused)
{
    (void)unused;
    static const char *const keys[] = {"f32_flops", "i8_ops", "exp2_f32", "exp2_i8", "read_bytes"};
    command_works(command_run("bench --ceilings --threads 2 --json -"));
    json_t *report = command_parse(command_out);
    const json_t *found = json_object_get(report, "ceilings");
    assert_non_null(json_object_get(report, "cpu"));
    assert_true(command_number(found, "threads") == 2.0);
    for (int i = 0; i < 5; i++) {
        /* Anything that runs C does a million of these a second, and nothing 10^15. */
        const double one = command_number(json_object_get(found, "one_thread"), keys[i]);
        const double all = command_number(json_object_get(found, "all_threads"), keys[i]);
        assert_true(one > 1e6 && one < 1e15 && all > 1e6 && all < 1e15);
    }
    json_decref(report);
    command_fails(command_run("bench --ceilings --json no/where.json"), 2, "--json");
}

/* What the library refuses. */
static void refusals(void **unused)
{
    (void)unused;
    apa_context *context;
    apa_ceilings found;
    assert_int_equal(apa_context_create(&context, NULL), APA_STATUS_OK);
    apa_ceilings_init(&found);
    assert_int_equal(apa_ceilings_measure(NULL, 0.1, &found), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_ceilings_measure(context, 0.1, NULL), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_ceilings_measure(context, NAN, &found), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_ceilings_measure(context, 0.0, &found), APA_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(apa_context_message(context), "seconds"));
    found.size = 1;
    assert_int_equal(apa_ceilings_measure(context, 0.1, &found), APA_STATUS_INVALID_ARGUMENT);
    assert_null(apa_phase_name(-1));
    assert_null(apa_phase_name(APA_PHASES));
    apa_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(phases),   cmocka_unit_test(phases_of_decode), cmocka_unit_test(no_phases),
        cmocka_unit_test(ceilings), cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
