/* The command, run on files. */
#include "support/command.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/apa-test-cli-XXXXXX";
char command_out[1 << 18], command_err[1 << 14];

void command_read_text(const char *name, char *to, size_t size)
{
    FILE *file = fopen(name, "rb");
    assert_non_null(file);
    to[fread(to, 1, size - 1, file)] = '\0';
    fclose(file);
}

int command_run(const char *format, ...)
{
    char arguments[1024], line[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(arguments, sizeof arguments, format, list);
    va_end(list);
    snprintf(line, sizeof line, "'%s' %s >.stdout 2>.stderr", APA_TEST_COMMAND, arguments);
    const int status = system(line);
    command_read_text(".stdout", command_out, sizeof command_out);
    command_read_text(".stderr", command_err, sizeof command_err);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void command_works(int code)
{
    if (code != 0)
        print_error("exit %d: %s\n", code, command_err);
    assert_int_equal(code, 0);
    assert_string_equal(command_err, "");
}

void command_fails(int code, int expected, const char *says)
{
    if (code != expected || strstr(command_err, says) == NULL)
        print_error("exit %d: \"%s\", expected %d and \"%s\"\n", code, command_err, expected, says);
    assert_int_equal(code, expected);
    assert_non_null(strstr(command_err, says));
    assert_int_equal(strncmp(command_err, "apa: ", 5), 0);
    assert_ptr_equal(strchr(command_err, '\n'), command_err + strlen(command_err) - 1); /* one line */
    assert_string_equal(command_out, "");
}

bool command_exists(const char *name)
{
    struct stat info;
    return lstat(name, &info) == 0;
}

int command_entries(const char *path)
{
    int count = 0;
    DIR *listing = opendir(path);
    assert_non_null(listing);
    for (struct dirent *entry = readdir(listing); entry != NULL; entry = readdir(listing))
        count += entry->d_name[0] != '.';
    closedir(listing);
    return count;
}

apa_array command_load(const char *path)
{
    char message[256];
    apa_array array;
    if (apa_array_read(path, &array, message, sizeof message) != APA_STATUS_OK)
        fail_msg("%s", message);
    return array;
}

double command_at(const apa_array *array, int64_t i)
{
    double value = NAN;
    assert_int_equal(apa_array_get_f64(array, i, 1, &value), APA_STATUS_OK);
    return value;
}

void command_same_file(const char *a, const char *b)
{
    apa_array x = command_load(a), y = command_load(b);
    assert_int_equal(x.elements, y.elements);
    for (int64_t i = 0; i < x.elements; i++)
        if (!(command_at(&x, i) == command_at(&y, i)))
            fail_msg("%s and %s differ at %lld", a, b, (long long)i);
    apa_array_free(&x);
    apa_array_free(&y);
}

json_t *command_parse(const char *text)
{
    json_error_t error;
    json_t *value = json_loads(text, 0, &error);
    if (value == NULL)
        fail_msg("%s in: %s", error.text, text);
    return value;
}

double command_number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_number(value))
        fail_msg("%s is no number", key);
    return json_number_value(value);
}

int command_setup(void **unused)
{
    (void)unused;
    if (mkdtemp(folder) == NULL || chdir(folder) != 0)
        return 1;
    static const char *const dtypes[][2] = {{"in", "f16"}, {"f32", "f32"}, {"f64", "f64"}};
    for (int i = 0; i < 3; i++)
        if (command_run("gen randn --out %s --shape 1,4,2,40,70,48 --dtype %s", dtypes[i][0], dtypes[i][1]) != 0)
            return 1;
    return system("head -c 1000 in/k.npy > in/cut.npy && cp in/q.npy in/q.txt");
}

int command_teardown(void **unused)
{
    (void)unused;
    char line[128];
    snprintf(line, sizeof line, "rm -r '%s'", folder);
    return chdir("/") != 0 || system(line) != 0;
}
