/* Where the command's output goes: pipes that nobody reads, places that cannot be written to, names that do not fit. */
#include "support/command.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void pause_ms(int ms)
{
    const struct timespec pause = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

/* A run that writes some 1 MB into ./pipe, and an LSE beside it. */
static pid_t start_run(void)
{
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child != 0)
        return child;
    if (freopen("/dev/null", "w", stdout) == NULL || freopen(".stderr", "w", stderr) == NULL)
        _exit(126);
    execl(APA_TEST_COMMAND, "apa", "run", "--q", "wide/q.npy", "--k", "wide/k.npy", "--v", "wide/v.npy", "--out",
          "pipe", "--lse", "lse.npy", "--threads", "1", (char *)NULL);
    _exit(127);
}

/* Its status; killed and a failure if it does not end within some seconds. */
static int wait_for(pid_t child)
{
    int status;
    for (int i = 0; i < 1000; i++) {
        if (waitpid(child, &status, WNOHANG) == child)
            return status;
        pause_ms(10);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    fail_msg("still there after 10 s");
    return status;
}

/* Signals end the wait for a reader, in open() and in write(), at whatever moment they come; nothing remains. */
static void stopped_at_a_pipe(void **unused)
{
    (void)unused;
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    command_works(command_run("gen randn --out wide --shape 1,4,1,1024,64,64"));
    assert_int_equal(mkfifo("pipe", 0600), 0);
    const int before = command_entries(".");
    for (int i = 0; i < 9; i++) {
        /* open for both: the writer's open() succeeds, and write() waits once the pipe is full */
        const int reader = i % 2 == 0 ? -1 : open("pipe", O_RDWR);
        const pid_t child = start_run();
        pause_ms(20 + 40 * i);
        kill(child, signals[i % 3]);
        const int status = wait_for(child);
        assert_true(WIFSIGNALED(status));
        assert_int_equal(WTERMSIG(status), signals[i % 3]);
        assert_int_equal(command_entries("."), before);
        if (reader >= 0)
            close(reader);
    }
}

/* A reader that goes is an error like others; one that reads all gets the file. */
static void readers(void **unused)
{
    (void)unused;
    char start[16];
    const int before = command_entries(".");
    pid_t child = start_run();
    int reader = open("pipe", O_RDONLY);
    assert_int_equal(read(reader, start, sizeof start), sizeof start);
    close(reader);
    int status = wait_for(child);
    command_read_text(".stderr", command_err, sizeof command_err);
    command_out[0] = '\0';
    assert_true(WIFEXITED(status));
    command_fails(WEXITSTATUS(status), 1, "apa: pipe: cannot be written: Broken pipe\n");
    assert_int_equal(command_entries("."), before);
    child = fork();
    if (child == 0)
        _exit(system("cat pipe >copy.npy") != 0);
    command_works(command_run("run --q wide/q.npy --k wide/k.npy --v wide/v.npy --threads 1 --out pipe --lse lse.npy"));
    assert_int_equal(wait_for(child), 0);
    command_works(command_run("run --q wide/q.npy --k wide/k.npy --v wide/v.npy --threads 1 --out same.npy"));
    command_same_file("copy.npy", "same.npy");
    command_fails(command_run("report --from pipe --out x.html"), 2,
                  "--from: pipe: is a pipe or device, expected a regular file");
    command_fails(command_run("map --from wide --out x.png"), 2,
                  "--from: wide: is a directory, expected a regular file");
    command_fails(command_run("run --q pipe --k in/k.npy --v in/v.npy --out x.npy"), 2, "--q: pipe: ");
    assert_int_equal(system("rm -r pipe copy.npy same.npy lse.npy wide"), 0);
}

/* What is known before the work is the caller's mistake, whatever the command. */
static void places(void **unused)
{
    (void)unused;
    char long_name[260], text[2048];
    memset(long_name, 'n', sizeof long_name);
    memcpy(long_name + 256, ".x", 3);
    static const char *const commands[] = {"run " IN "--out %s/x.npy",     "run " IN "--out x.npy --json %s/x",
                                           "eval " IN "--json %s/x",       "map " IN "--out %s/x.png",
                                           "report " IN "--out %s/x.html", "gen randn --shape 1,1,1,4,4,4 --out %s"};
    assert_int_equal(mkdir("closed", 0500), 0);
    assert_int_equal(symlink("/proc/self", "link"), 0);
    const int before = command_entries(".");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        const char *option = strstr(commands[i], "--json %s") != NULL ? "--json: " : "--out: ";
        snprintf(text, sizeof text, commands[i], "/proc/self"); /* no ordinary files there, whoever asks */
        command_fails(command_run("%s", text), 2, option);
        assert_non_null(strstr(command_err, "cannot be written to"));
        snprintf(text, sizeof text, commands[i], "link");
        command_fails(command_run("%s", text), 2, option);
        if (geteuid() != 0) { /* root may write anywhere */
            snprintf(text, sizeof text, commands[i], "closed");
            command_fails(command_run("%s", text), 2, "cannot be written to: Permission denied");
        }
        assert_int_equal(command_entries("."), before);
    }
    command_fails(command_run("run " IN "--out %s", long_name), 2, "--out: nnn");
    command_fails(command_run("eval " IN "--json %s", long_name), 2, "--json: nnn");
    long_name[251] = '\0'; /* with its ending as long as a name may be */
    command_works(command_run("run " IN "--out %s.npy", long_name));
    snprintf(text, sizeof text, "%s.npy", long_name);
    assert_int_equal(unlink(text), 0);
    assert_int_equal(unlink("link"), 0);
    assert_int_equal(rmdir("closed"), 0);
}

/* A name says what is in a file; a pipe or device may have any. Links are followed, modes kept. */
static void names(void **unused)
{
    (void)unused;
    struct stat info;
    command_fails(command_run("run " IN "--out x.txt"), 2, "--out: x.txt: ending not known, expected .npy");
    command_fails(command_run("run " IN "--out x.npy --lse .npy"), 2, "--lse: .npy: ending not known");
    command_fails(command_run("map " IN "--out x.jpg"), 2, "--out: x.jpg: ending not known, expected .png");
    command_fails(command_run("report " IN "--out x.npy"), 2, "--out: x.npy: ending not known, expected .html");
    command_works(command_run("run " IN "--out /dev/null"));
    command_fails(command_run("info --dump in/q.npy"), 2, "--dump: in/q.npy: named as arrays are");
    command_fails(command_run("info --q in/q.txt"), 2, "--q: in/q.txt: ending not known");
    assert_int_equal(mkdir("at", 0700), 0);
    command_works(command_run("run " IN "--out at/x.npy"));
    assert_int_equal(chmod("at/x.npy", 0440), 0);
    assert_int_equal(symlink("at/x.npy", "y.npy"), 0);
    command_works(command_run("run " IN "--out y.npy --no-causal"));
    assert_int_equal(lstat("y.npy", &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    assert_int_equal(stat("at/x.npy", &info), 0);
    assert_int_equal(info.st_mode & 07777, 0440);
    assert_int_equal(system("rm -rf at y.npy"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stopped_at_a_pipe),
        cmocka_unit_test(readers),
        cmocka_unit_test(places),
        cmocka_unit_test(names),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
