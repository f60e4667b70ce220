/* The context: options, ISA levels and APA_ISA, errors, names, messages; and the small tables of names. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "support/test.h"

#include "apa/apa.h"
#include "support/levels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static apa_status create(apa_context **context, int32_t threads, const char *isa)
{
    apa_context_options options;
    apa_context_options_init(&options);
    options.threads = threads;
    options.isa = isa;
    return apa_context_create(context, &options);
}

static int no_environment(void **state)
{
    (void)state;
    return unsetenv("APA_ISA");
}

static void options_start(void **state)
{
    (void)state;
    apa_context_options options;
    memset(&options, 0xAB, sizeof options);
    apa_context_options_init(&options);
    assert_int_equal(options.size, sizeof options);
    assert_int_equal(options.threads, 0);
    assert_null(options.isa);
    assert_true(options.parallel_for == NULL && options.pool == NULL);
}

static void defaults(void **state)
{
    (void)state;
    apa_context *context = NULL;
    assert_int_equal(apa_context_create(&context, NULL), APA_STATUS_OK);
    assert_non_null(context);
    assert_true(apa_context_threads(context) >= 1);
    assert_string_equal(apa_context_isa(context), apa_isa_name(apa_cpu_best_isa()));
    assert_string_equal(apa_context_message(context), "");
    apa_context_destroy(context);
    apa_context_destroy(NULL);
    assert_string_equal(apa_context_message(NULL), "");
}

static void threads(void **state)
{
    (void)state;
    static const int32_t good[] = {1, 2, 3, 17}, bad[] = {-1, INT32_MIN, 4097, INT32_MAX};
    for (int i = 0; i < 4; i++) {
        apa_context *context = NULL;
        assert_int_equal(create(&context, good[i], NULL), APA_STATUS_OK);
        /* asked for, or four per core where that is less */
        const long most = 4 * sysconf(_SC_NPROCESSORS_ONLN);
        assert_true(apa_context_threads(context) == good[i] ||
                    (apa_context_threads(context) < good[i] && apa_context_threads(context) <= most));
        apa_context_destroy(context);
        context = (apa_context *)&context;
        assert_int_equal(create(&context, bad[i], NULL), APA_STATUS_INVALID_ARGUMENT);
        assert_null(context);
    }
}

static void bad_arguments(void **state)
{
    (void)state;
    apa_context_options options;
    apa_context *context = (apa_context *)&options;
    assert_int_equal(apa_context_create(NULL, NULL), APA_STATUS_INVALID_ARGUMENT);
    apa_context_options_init(&options);
    options.size = 0;
    assert_int_equal(apa_context_create(&context, &options), APA_STATUS_INVALID_ARGUMENT);
    assert_null(context);
    options.size = sizeof options + 8;
    assert_int_equal(apa_context_create(&context, &options), APA_STATUS_INVALID_ARGUMENT);
}

/* Every level by name: those of this machine work, the others are refused, unknown names are the caller's mistake. */
static void levels(void **state)
{
    (void)state;
    static const char *const unknown[] = {"avx", "AVX2", "avx512vnni", " scalar", "sse"};
    apa_context *context;
    apa_test_level level[APA_TEST_LEVELS_MAX];
    const int n = apa_test_levels(level);
    for (int l = 0; l < n; l++) {
        assert_int_equal(create(&context, 1, level[l].name), APA_STATUS_OK);
        assert_string_equal(apa_context_isa(context), level[l].name);
        assert_int_equal(apa_context_isa_level(context), level[l].isa);
        apa_context_destroy(context);
    }
    const apa_isa best = apa_cpu_best_isa();
    for (int isa = 0; isa <= APA_ISA_NEON; isa++) {
        const bool fits = isa == APA_ISA_SCALAR || isa == (int)best || (best != APA_ISA_NEON && isa < (int)best);
        assert_int_equal(create(&context, 1, apa_isa_name((apa_isa)isa)),
                         fits ? APA_STATUS_OK : APA_STATUS_UNSUPPORTED);
        assert_true(fits == (context != NULL));
        apa_context_destroy(context);
    }
    for (int i = 0; i < 5; i++) {
        assert_int_equal(create(&context, 1, unknown[i]), APA_STATUS_INVALID_ARGUMENT);
        assert_null(context);
    }
    assert_int_equal(create(&context, 1, ""), APA_STATUS_OK);
    assert_string_equal(apa_context_isa(context), apa_isa_name(best));
    apa_context_destroy(context);
}

/* APA_ISA caps the level where the caller says nothing; the caller's word counts more. */
static void environment(void **state)
{
    (void)state;
    apa_context *context;
    const char *best = apa_isa_name(apa_cpu_best_isa());
    setenv("APA_ISA", "scalar", 1);
    assert_int_equal(apa_context_create(&context, NULL), APA_STATUS_OK);
    assert_string_equal(apa_context_isa(context), "scalar");
    apa_context_destroy(context);
    assert_int_equal(create(&context, 1, best), APA_STATUS_OK);
    assert_string_equal(apa_context_isa(context), best);
    apa_context_destroy(context);
    setenv("APA_ISA", "fastest", 1);
    assert_int_equal(apa_context_create(&context, NULL), APA_STATUS_INVALID_ARGUMENT);
    assert_null(context);
    assert_int_equal(create(&context, 1, "scalar"), APA_STATUS_OK);
    apa_context_destroy(context);
    setenv("APA_ISA", apa_cpu_best_isa() == APA_ISA_NEON ? "avx512" : "neon", 1);
    assert_int_equal(apa_context_create(&context, NULL), APA_STATUS_UNSUPPORTED);
    assert_null(context);
    setenv("APA_ISA", "", 1);
    assert_int_equal(apa_context_create(&context, NULL), APA_STATUS_OK);
    assert_string_equal(apa_context_isa(context), best);
    apa_context_destroy(context);
    unsetenv("APA_ISA");
}

/* A message names the argument, what was found and what was expected, and stays after a call that worked. */
static void messages(void **state)
{
    (void)state;
    apa_context *context;
    apa_problem problem;
    apa_plan plan;
    float x[64] = {0};
    assert_int_equal(create(&context, 1, NULL), APA_STATUS_OK);
    apa_plan_init(&plan);
    apa_problem_init(&problem);
    problem.q = apa_tensor_hnd(x, APA_DTYPE_F32, 1, 1, 4, 8);
    problem.k = problem.v = problem.q;
    problem.out = problem.q;
    assert_int_equal(apa_attention_plan(context, &problem, NULL, NULL, &plan), APA_STATUS_OK);
    assert_string_equal(apa_context_message(context), "");
    problem.k.shape[3] = 7;
    assert_int_equal(apa_attention_plan(context, &problem, NULL, NULL, &plan), APA_STATUS_INVALID_ARGUMENT);
    const char *text = apa_context_message(context);
    assert_non_null(strstr(text, "k"));
    assert_non_null(strstr(text, "7"));
    assert_non_null(strstr(text, "expected"));
    assert_null(strchr(text, '\n'));
    /* an engine that is not, an engine that cannot */
    apa_attention_options options;
    apa_attention_options_init(&options);
    problem.k.shape[3] = 8;
    options.engine = "gpu";
    assert_int_equal(apa_attention_plan(context, &problem, NULL, &options, &plan), APA_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(apa_context_message(context), "\"gpu\""));
    options.engine = "cpu";
    problem.q.dtype = problem.k.dtype = problem.v.dtype = APA_DTYPE_F64;
    assert_int_equal(apa_attention_plan(context, &problem, NULL, &options, &plan), APA_STATUS_UNSUPPORTED);
    assert_non_null(strstr(apa_context_message(context), "f64"));
    options.engine = "auto";
    assert_int_equal(apa_attention_plan(context, &problem, NULL, &options, &plan), APA_STATUS_OK);
    assert_string_equal(plan.engine, "reference");
    assert_int_equal(apa_attention_plan(NULL, &problem, NULL, &options, &plan), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_attention(NULL, &problem, NULL, NULL, NULL), APA_STATUS_INVALID_ARGUMENT);
    apa_context_destroy(context);
}

/* What the CPU engine does not do is refused by name, and auto finds the engine that does. */
static void refusals(void **state)
{
    (void)state;
    static const char *const knob[][2] = {
        {"cold_format", "nvfp4"}, {"q_terms", "2"}, {"group", "8"}, {"exact_format", "f16"}, {"smooth_v", "on"}};
    apa_context *context;
    apa_problem problem;
    float x[64] = {0};
    assert_int_equal(create(&context, 1, NULL), APA_STATUS_OK);
    apa_problem_init(&problem);
    problem.q = problem.k = problem.v = problem.out = apa_tensor_hnd(x, APA_DTYPE_F32, 1, 1, 4, 16);
    for (int i = 0; i < 5; i++) {
        apa_recipe recipe;
        apa_attention_options options;
        apa_plan plan;
        apa_plan_init(&plan);
        apa_attention_options_init(&options);
        assert_int_equal(apa_recipe_init(&recipe, "apa"), APA_STATUS_OK);
        assert_int_equal(apa_recipe_set(&recipe, knob[i][0], knob[i][1], NULL, 0), APA_STATUS_OK);
        options.engine = "cpu";
        assert_int_equal(apa_attention_plan(context, &problem, &recipe, &options, &plan), APA_STATUS_UNSUPPORTED);
        assert_non_null(strstr(apa_context_message(context), knob[i][0]));
        options.engine = NULL;
        assert_int_equal(apa_attention_plan(context, &problem, &recipe, &options, &plan), APA_STATUS_OK);
        assert_string_equal(plan.engine, "reference");
    }
    apa_context_destroy(context);
}

static void names(void **state)
{
    (void)state;
    char version[32];
    assert_string_equal(apa_status_name(APA_STATUS_OK), "APA_STATUS_OK");
    assert_string_equal(apa_status_name(APA_STATUS_INVALID_ARGUMENT), "APA_STATUS_INVALID_ARGUMENT");
    assert_string_equal(apa_status_name(APA_STATUS_UNSUPPORTED), "APA_STATUS_UNSUPPORTED");
    assert_string_equal(apa_status_name(APA_STATUS_OUT_OF_MEMORY), "APA_STATUS_OUT_OF_MEMORY");
    assert_string_equal(apa_status_name(APA_STATUS_IO), "APA_STATUS_IO");
    assert_string_equal(apa_status_name(APA_STATUS_BAD_FILE), "APA_STATUS_BAD_FILE");
    assert_string_equal(apa_status_name(APA_STATUS_INTERNAL), "APA_STATUS_INTERNAL");
    assert_string_equal(apa_status_name((apa_status)7), "APA_STATUS_UNKNOWN");
    assert_string_equal(apa_dtype_name(APA_DTYPE_BF16), "bf16");
    assert_string_equal(apa_dtype_name((apa_dtype)99), "none");
    assert_int_equal(apa_dtype_bytes(APA_DTYPE_F16), 2);
    assert_int_equal(apa_dtype_bytes(APA_DTYPE_F64), 8);
    assert_int_equal(apa_dtype_bytes((apa_dtype)99), 0);
    snprintf(version, sizeof version, "%d.%d.%d", APA_VERSION_MAJOR, APA_VERSION_MINOR, APA_VERSION_PATCH);
    assert_string_equal(apa_version_string(), version);
    assert_int_equal(apa_version_number(), APA_VERSION_MAJOR * 10000 + APA_VERSION_MINOR * 100 + APA_VERSION_PATCH);
    bool cpu = false, reference = false;
    for (size_t i = 0; apa_engine_name(i) != NULL; i++) {
        cpu = cpu || strcmp(apa_engine_name(i), "cpu") == 0;
        reference = reference || strcmp(apa_engine_name(i), "reference") == 0;
    }
    assert_true(cpu && reference);
}

static void tensors(void **state)
{
    (void)state;
    const apa_tensor hnd = apa_tensor_hnd(NULL, APA_DTYPE_F16, 2, 3, 5, 7),
                     nhd = apa_tensor_nhd(NULL, APA_DTYPE_F16, 2, 3, 5, 7);
    const int64_t shape[4] = {2, 3, 5, 7}, rows[4] = {105, 35, 7, 1}, heads[4] = {105, 7, 21, 1};
    assert_memory_equal(hnd.shape, shape, sizeof shape);
    assert_memory_equal(nhd.shape, shape, sizeof shape);
    assert_memory_equal(hnd.stride, rows, sizeof rows);
    assert_memory_equal(nhd.stride, heads, sizeof heads);
}

/* Every index once, in any order; none for a count of 0. */
static void mark(void *argument, size_t index)
{
    ((unsigned char *)argument)[index]++;
}

static void parallel(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 4; n++) {
        apa_context *context;
        unsigned char seen[1000] = {0};
        assert_int_equal(create(&context, n, NULL), APA_STATUS_OK);
        apa_context_parallel(context, mark, seen, 0);
        assert_int_equal(seen[0], 0);
        apa_context_parallel(context, mark, seen, 1);
        apa_context_parallel(context, mark, seen + 1, 999);
        for (int i = 0; i < 1000; i++)
            assert_int_equal(seen[i], 1);
        apa_context_destroy(context);
    }
}

#define NO_LIMITS 255

/* Emulators of another processor (qemu-user) take a limit of memory and do not keep it. */
static bool limits_hold(size_t too_much)
{
    void *memory = mmap(NULL, too_much, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return true;
    munmap(memory, too_much);
    return false;
}

/* In a child: memory for two more stacks and no third one. Exit status: threads of the context, 0 on a failure,
 * NO_LIMITS. */
static void with_few_stacks(int32_t wanted)
{
    unsigned char seen[100] = {0};
    pthread_attr_t attributes;
    size_t stack = 0;
    long pages = 0;
    apa_context *context;
    FILE *file = fopen("/proc/self/statm", "r");
    alarm(30); /* it hung here, once */
    if (file == NULL || fscanf(file, "%ld", &pages) != 1 || pthread_attr_init(&attributes) != 0 ||
        pthread_attr_getstacksize(&attributes, &stack) != 0)
        _exit(0);
    fclose(file);
    const rlim_t most = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + (rlim_t)stack * 5 / 2;
    const struct rlimit limit = {most, most};
    if (setrlimit(RLIMIT_AS, &limit) != 0)
        _exit(0);
    if (!limits_hold(stack * 4))
        _exit(NO_LIMITS);
    if (create(&context, wanted, NULL) != APA_STATUS_OK)
        _exit(0);
    apa_context_parallel(context, mark, seen, 100);
    for (int i = 0; i < 100; i++)
        if (seen[i] != 1)
            _exit(0);
    const int threads = apa_context_threads(context);
    apa_context_destroy(context);
    _exit(threads);
}

/* Where the system does not let all threads be, there are fewer, and the work is done. */
static void few_threads(void **state)
{
    (void)state;
    apa_context *context;
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        with_few_stacks(4096);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == NO_LIMITS) {
        print_message("skipped: memory has no limits here\n");
        return;
    }
    assert_int_equal(create(&context, 4096, NULL), APA_STATUS_OK);
    const int32_t most = apa_context_threads(context); /* four a core */
    apa_context_destroy(context);
    print_message("%d threads where there may be %d\n", WEXITSTATUS(status), (int)most);
    assert_in_range(WEXITSTATUS(status), 1, 3);
    assert_true(most > 3);
}

static void aligned_memory(void **state)
{
    (void)state;
    static const size_t bytes[] = {0, 1, 63, 64, 65, 4096, (size_t)5 << 20};
    for (int i = 0; i < 7; i++) {
        unsigned char *memory = apa_aligned_allocate(bytes[i], 1);
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % 64, 0);
        memset(memory, 1, bytes[i]);
        apa_aligned_free(memory);
    }
    assert_null(apa_aligned_allocate(SIZE_MAX, 2));
    assert_null(apa_aligned_allocate(SIZE_MAX / 8 + 2, 8));
    assert_null(apa_aligned_allocate(SIZE_MAX, 1));
    apa_aligned_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(few_threads), /* first: stacks of threads that have ended are kept for others */
        cmocka_unit_test(options_start), cmocka_unit_test(defaults), cmocka_unit_test(threads),
        cmocka_unit_test(bad_arguments), cmocka_unit_test(levels),   cmocka_unit_test(environment),
        cmocka_unit_test(messages),      cmocka_unit_test(refusals), cmocka_unit_test(names),
        cmocka_unit_test(tensors),       cmocka_unit_test(parallel), cmocka_unit_test(aligned_memory),
    };
    return cmocka_run_group_tests(tests, no_environment, NULL);
}
