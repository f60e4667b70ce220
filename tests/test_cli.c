/* The command's manners: help, mistakes, full disks, signals, info. */
#include "support/command.h"

#include "apa/cuda.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void usage(void **unused)
{
    (void)unused;
    static const char *const helps[] = {"help",        "--help",    "-h",           "help run",
                                        "run --help",  "eval -h",   "bench --help", "gen --help",
                                        "info --help", "help info", "help sweep",   "sweep -h"};
    command_fails(command_run("%s", ""), 2, "no command, expected run, eval");
    for (size_t i = 0; i < sizeof helps / sizeof helps[0]; i++) {
        command_works(command_run("%s", helps[i]));
        assert_non_null(strstr(command_out, "usage: apa"));
    }
    command_works(command_run("--version"));
    assert_string_equal(command_out, "apa " APA_VERSION_STRING "\n");
}

/* Engines that are not in this build, or without a device, or on one that does not take 48 channels. */
static void engines(void **unused)
{
    (void)unused;
    static const char *const names[] = {"cuda", "cuda:wgmma", "cuda:warp"};
    int32_t devices = 0;
    bool built = false;
    (void)apa_cuda_device_count(NULL, &devices); /* an error: none */
    for (size_t i = 0; apa_engine_name(i) != NULL; i++)
        built = built || strncmp(apa_engine_name(i), "cuda", 4) == 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char says[64];
        snprintf(says, sizeof says, !built ? "--engine: %s: not in this build" : "cuda: no device", names[i]);
        command_fails(command_run("run " IN "--out x.npy --engine %s", names[i]), 2, devices > 0 ? "cuda" : says);
    }
}

static void mistakes(void **unused)
{
    (void)unused;
    static const struct {
        const char *arguments, *says;
    } bad[] = {
        {"walk", "\"walk\", expected run"},
        {"help walk", "\"walk\", expected run"},
        {"run " IN, "--out: not given"},
        {"run --out x.npy --q in/q.npy --k in/k.npy", "--v: not given"},
        {"run " IN "--out nowhere/x.npy", "--out: nowhere/x.npy: no folder \"nowhere\""},
        {"run " IN "--out in", "--out: in: is a directory"},
        {"run " IN "--out x.npy --lse nowhere/l.npy", "--lse: nowhere/l.npy"},
        {"run " IN "--out x.npy --json nowhere/j", "--json: nowhere/j"},
        {"run " IN "--out x.npy --lse x.npy", "--lse: x.npy: is also --out"},
        {"run " IN "--out in/k.npy", "--out: in/k.npy: is the input of --k"},
        {"run " IN "--out -", "- is for JSON alone"},
        {"run " IN "--out x.npy --out-dtype bf16", "bf16 has no .npy type"},
        {"run " IN "--out x.npy --out-dtype f8", "--out-dtype: \"f8\", expected f16"},
        {"run " IN "--out x.npy --out-dtype f64 --engine cpu", "f64"},
        {"run " IN "--out x.npy extra", "\"extra\": not an option"},
        {"run " IN "--out x.npy --colour", "--colour: no such option here; apa run --help lists them"},
        {"report " IN "--out x.html --colour", "--colour: no such option here; apa report --help lists them"},
        {"run " IN "--out x.npy --eps=inf", "apa: --eps: "},
        {"run " IN "--out x.npy --eps 1e-400", "apa: --eps: \"1e-400\", expected a number"},
        {"run " IN "--out x.npy --set eps=1e-400", "apa: --set: eps: "},
        {"run " IN "--out x.npy --shape 1,1,1,1,1,1", "--shape: no such option here"},
        {"run " IN "--out x.npy --causal=1", "--causal: takes no value, found \"1\""},
        {"run " IN "--out", "--out: nothing follows"},
        {"run " IN "--out=", "--out: empty"},
        {"run " IN "--out x.npy --eps nan", "--eps: \"nan\", expected a number"},
        {"run " IN "--out x.npy --eps 1e999", "--eps: \"1e999\""},
        {"run " IN "--out x.npy --eps 0x1p-3", "--eps: \"0x1p-3\""},
        {"run " IN "--out x.npy --eps '.01 '", "--eps: \".01 \""},
        {"run " IN "--out x.npy --eps ''", "--eps: \"\""},
        {"run " IN "--out x.npy --scale 1..2", "--scale: \"1..2\""},
        {"run " IN "--out x.npy --scale inf", "scale"},
        {"run " IN "--out x.npy --threads -1", "--threads: \"-1\""},
        {"run " IN "--out x.npy --threads 1.5", "--threads: \"1.5\""},
        {"run " IN "--out x.npy --q-offset 9223372036854775808", "--q-offset: \"9223372036854775808\""},
        {"run " IN "--out x.npy --window -2", "--window: \"-2\""},
        {"run " IN "--out x.npy --window 1,2,3", "--window: \"1,2,3\""},
        {"run " IN "--out x.npy --window 1,", "--window: \"1,\""},
        {"run " IN "--out x.npy --layout dhn", "--layout: \"dhn\", expected hnd or nhd"},
        {"run " IN "--out x.npy --layout nhd", "heads"},
        {"run " IN "--out x.npy --method best", "--method: \"best\", expected one of apa, exact, cold"},
        {"run " IN "--out x.npy --set tile", "--set: \"tile\", expected KEY=VALUE"},
        {"run " IN "--out x.npy --set tile=9", "--set: tile"},
        {"run " IN "--out x.npy --set colour=red", "colour"},
        {"run " IN "--out x.npy --engine tpu", "--engine: \"tpu\", expected one of auto"},
        {"run " IN "--out x.npy --softcap -30", "--softcap: -30, expected a positive number, or 0 for none"},
        {"run " IN "--out x.npy --softcap high", "--softcap: \"high\", expected a number"},
        {"run " IN "--out x.npy --sinks in/missing.npy", "--sinks: in/missing.npy: cannot be opened"},
        {"eval " IN "--sinks in/q.npy", "--sinks: in/q.npy: 7680 elements of f16 in 4 dimensions, expected [4]"},
        {"bench --shape 1,2,1,8,8,8 --alibi in/q.npy", "--alibi: in/q.npy: "},
        {"run " IN "--out x.npy --bias=in/cut.npy", "--bias: in/cut.npy: truncated"},
        {"run " IN "--out x.npy --bias in/k.npy", "--bias: in/k.npy: shape [1, 2, 70, 48], expected [1, 4, 40, 70"},
        {"run " IN "--out x.npy --bias f64/q.npy", "--bias: f64/q.npy: "},
        {"run " IN "--out in/k.npy --bias in/k.npy", "--out: in/k.npy: is the input of --k"},
        {"run --q in/missing.npy --k in/k.npy --v in/v.npy --out x.npy", "--q: in/missing.npy: cannot be opened"},
        {"run --q in/q.npy --k in/cut.npy --v in/v.npy --out x.npy", "--k: in/cut.npy: truncated"},
        {"run --q in/q.npy --k in/k.npy --v f32/v.npy --out x.npy",
         "--v: f32/v.npy: dtype f32, expected that of --q, f16"},
        {"run --q in/q.npy --k f32/k.npy --v in/v.npy --out x.npy",
         "--k: f32/k.npy: dtype f32, expected that of --q, f16"},
        {"run --q in/q.npy --k in/q.npy --v in/v.npy --out x.npy", "--v: in/v.npy: "},
        {"run --q in/q.txt --k in/k.npy --v in/v.npy --out x.npy", "--q: in/q.txt: ending not known"},
        {"run --dump in/q.npy --out x.npy", "--dump: in/q.npy: "},
        {"run --dump d.bin --q in/q.npy --out x.npy", "--dump: found --q beside it"},
        {"run --dump d.bin --layout hnd --out x.npy", "--layout: found beside --dump"},
        {"eval " IN "--compare exact,best", "--compare: \"best\", expected one of"},
        {"sweep " IN "--over method=exact,best", "--over: \"best\", expected one of"},
        {"sweep " IN "--method exact,best", "--method: \"best\", expected one of"},
        {"eval " IN "--softcap 2 --worst 3", "--worst: found beside --softcap, expected one of the two"},
        {"eval " IN "--bias in/k.npy --worst 3", "--worst: found beside --bias, expected one of the two"},
        {"eval " IN "--compare exact, --repeats 1", "--compare: \"\""},
        {"eval " IN "--compare exact --method apa", "--compare: found --method beside it"},
        {"eval " IN "--repeats 0", "--repeats: \"0\""},
        {"eval " IN "--out x.npy", "--out: no such option here"},
        {"bench", "--shape: not given"},
        {"bench --shape 1,2,1,8,8", "--shape: \"1,2,1,8,8\", expected B,Hq,Hkv"},
        {"bench --shape 1,2,1,8,8,8,8,8", "--shape: \"1,2,1,8,8,8,8,8\""},
        {"bench --shape 1,2,1,8,0,8", "sizes of at least 1"},
        {"bench --shape 1,3,2,8,8,8", "Hq is 3, expected a multiple of Hkv, 2"},
        {"bench --shape 1,2,1,8,8,2000", "dim is 2000"},
        {"bench --shape 1,2,1,8,8,8 --kind noise", "\"noise\", expected randn"},
        {"bench --shape 1,2,1,8,8,8 --dtype f64", "--dtype: \"f64\", expected f16, bf16 or f32"},
        {"bench " IN "--shape 1,2,1,8,8,8", "--shape: found beside files"},
        {"bench " IN "--seed 1", "--seed: found beside files"},
        {"gen", "no kind given"},
        {"gen randn --shape 1,1,1,1,1,1", "--out: not given"},
        {"gen randn --out g", "--shape: not given"},
        {"gen noise --out g --shape 1,1,1,1,1,1", "\"noise\", expected randn"},
        {"gen randn --out in/q.npy --shape 1,1,1,1,1,1", "is a file, expected a folder"},
        {"gen randn --out g --shape 1,1,1,1,1,1 --dtype bf16", "bf16 has no .npy type"},
        {"gen randn --out g --shape 1,1,1,1,1,1 --seed -1", "--seed: \"-1\""},
        {"gen randn --out g --shape 9999999999,99999999999,1,99999999,1,1", "--shape: "},
        {"info --q in/missing.npy", "--q: in/missing.npy: cannot be opened"},
        {"info --q in/cut.npy", "truncated"},
        {"info --json nowhere/j", "--json: nowhere/j"},
    };
    const int before = command_entries(".");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        command_fails(command_run("%s", bad[i].arguments), 2, bad[i].says);
        if (command_entries(".") != before)
            fail_msg("left something behind: %s", bad[i].arguments);
    }
    setenv("APA_ISA", "mmx", 1);
    command_fails(command_run("info"), 2, "APA_ISA: \"mmx\"");
    unsetenv("APA_ISA");
}

/* Not the caller's mistake: a full disk. Nothing remains, what was there stays. */
static void full_disk(void **unused)
{
    (void)unused;
    const int before = command_entries(".");
    command_fails(command_run("run " IN "--out x.npy --lse /dev/full"), 1, "/dev/full: cannot be written");
    assert_int_equal(command_entries("."), before);
    command_fails(command_run("run " IN "--out x.npy --lse l.npy --json /dev/full"), 1, "/dev/full: cannot be written");
    assert_int_equal(command_entries("."), before);
    command_works(command_run("run " IN "--out x.npy"));
    apa_array old = command_load("x.npy");
    char line[1024];
    snprintf(line, sizeof line, "ulimit -f 8; '%s' run " IN "--out x.npy --lse l.npy --no-causal 2>.stderr",
             APA_TEST_COMMAND);
    const int status = system(line);
    command_read_text(".stderr", command_err, sizeof command_err);
    command_out[0] = '\0';
    command_fails(WEXITSTATUS(status), 1, "x.npy: cannot be written: File too large");
    apa_array now = command_load("x.npy");
    assert_memory_equal(old.data, now.data, (size_t)old.elements * sizeof(float));
    apa_array_free(&old);
    apa_array_free(&now);
    assert_int_equal(unlink("x.npy"), 0);
    assert_int_equal(command_entries("."), before);
    assert_int_equal(mkdir("g", 0700), 0);
    assert_int_equal(mkdir("g/v.npy", 0700), 0);
    command_fails(command_run("gen randn --out g --shape 1,1,1,4,4,4"), 2, "--out: g/v.npy: is a directory");
    assert_int_equal(command_entries("g"), 1);
    assert_int_equal(rmdir("g/v.npy"), 0);
    assert_int_equal(rmdir("g"), 0);
    char help[1024];
    snprintf(help, sizeof help, "'%s' help >/dev/full 2>.stderr", APA_TEST_COMMAND);
    assert_int_equal(WEXITSTATUS(system(help)), 1);
}

/* Killed at any moment: all three files, whole, or none; never a temporary one. */
static void killed(void **unused)
{
    (void)unused;
    for (int delay_ms = 0; delay_ms <= 600; delay_ms += 30) {
        const pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            if (freopen("/dev/null", "w", stdout) == NULL)
                _exit(126);
            execl(APA_TEST_COMMAND, "apa", "gen", "randn", "--out", "killed", "--shape", "1,8,8,2048,4096,64",
                  "--dtype", "f32", (char *)NULL);
            _exit(127);
        }
        const struct timespec pause = {0, delay_ms * 1000000L};
        nanosleep(&pause, NULL);
        kill(child, delay_ms % 60 == 0 ? SIGTERM : SIGINT);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!command_exists("killed"))
            continue;
        const int found = command_entries("killed");
        assert_true(found == 0 || found == 3);
        static const char *const names[] = {"killed/q.npy", "killed/k.npy", "killed/v.npy"};
        for (int i = 0; i < 3 && found == 3; i++) {
            apa_array whole = command_load(names[i]);
            apa_array_free(&whole);
            assert_int_equal(unlink(names[i]), 0);
        }
        assert_int_equal(rmdir("killed"), 0);
    }
}

static void infos(void **unused)
{
    (void)unused;
    command_works(command_run("info"));
    assert_non_null(strstr(command_out, "reference"));
    assert_non_null(strstr(command_out, "default eps"));
    assert_null(strstr(command_out, "knobs ("));
    command_works(command_run("info --recipes"));
    for (size_t i = 0; apa_recipe_knob_at(i) != NULL; i++)
        assert_non_null(strstr(command_out, apa_recipe_knob_at(i)->name));
    command_works(command_run("info --json -"));
    json_t *object = command_parse(command_out);
    const json_t *engines = json_object_get(object, "engines");
    size_t count = 0;
    while (apa_engine_name(count) != NULL)
        count++;
    assert_int_equal(json_array_size(engines), count);
    const json_t *formats = json_object_get(json_array_get(engines, count - 1), "cold_formats");
    assert_true(command_number(json_object_get(json_object_get(formats, "int8"), "eps_at"), "2048") > 0);
    json_decref(object);
    command_works(command_run("info --q in/q.npy --json -"));
    object = command_parse(command_out);
    const json_t *file = json_array_get(json_object_get(object, "files"), 0);
    assert_string_equal(json_string_value(json_array_get(json_object_get(file, "arrays"), 0)),
                        "array f16 [1, 4, 40, 48]");
    json_decref(object);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(usage),     cmocka_unit_test(engines), cmocka_unit_test(mistakes),
        cmocka_unit_test(full_disk), cmocka_unit_test(killed),  cmocka_unit_test(infos),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
