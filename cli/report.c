/* What comes out: files, JSON, progress, order statistics. */
#include "cli.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------- files */

static volatile sig_atomic_t caught;

/* A call that waits for a pipe ends with EINTR. One that begins just after the signal would not: the alarm, which comes
 * here too, goes off every second until the writer is through. */
static void remember(int signal_number)
{
    if (caught == 0)
        caught = signal_number;
    alarm(1);
}

int cli_files_write(const apa_output_file *files, size_t count)
{
    enum { HELD = 4, SIGNALS = 5 };
    static const int signals[SIGNALS] = {SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGPIPE};
    struct sigaction hold, ignore, before[SIGNALS];
    memset(&hold, 0, sizeof hold);
    sigemptyset(&hold.sa_mask);
    ignore = hold;
    hold.sa_handler = remember;
    ignore.sa_handler = SIG_IGN; /* SIGPIPE: a reader that has gone is an error of write() */
    for (int i = 0; i < SIGNALS; i++) {
        sigaction(signals[i], NULL, &before[i]);
        if (i >= HELD)
            sigaction(signals[i], &ignore, NULL);
        else if (before[i].sa_handler != SIG_IGN || signals[i] == SIGALRM) /* nohup stays nohup */
            sigaction(signals[i], &hold, NULL);
    }
    char message[512];
    apa_status status = apa_files_write(files, count, message, sizeof message);
    alarm(0);
    for (int i = 0; i < SIGNALS; i++)
        sigaction(signals[i], &before[i], NULL);
    if (caught != 0)
        raise(caught);
    if (status == APA_STATUS_OK)
        return CLI_DONE;
    return cli_complain(cli_exit_code(status), "%s", message);
}

/* ------------------------------------------------------------------------------- JSON */

double cli_lamp_recomputed(const apa_statistics *s)
{
    return s->lamp_sub_blocks > 0 ? (double)s->lamp_recomputed / (double)s->lamp_sub_blocks : NAN;
}

double cli_lamp_disruptive(const apa_statistics *s)
{
    return s->lamp_tiles > 0 ? (double)s->lamp_disruptive / (double)s->lamp_tiles : NAN;
}

json_t *cli_json_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

/* Numbers as numbers; choices, auto and infinities as the text that --set takes. */
json_t *cli_json_recipe(const apa_recipe *recipe)
{
    json_t *object = json_object();
    json_object_set_new(object, "name", json_string(recipe->name));
    for (size_t i = 0; apa_recipe_knob_at(i) != NULL; i++) {
        const apa_recipe_knob *knob = apa_recipe_knob_at(i);
        char text[64], *end;
        if (apa_recipe_get(recipe, knob->name, text, sizeof text) != APA_STATUS_OK)
            continue;
        json_t *value;
        const double number = strtod(text, &end);
        if (strcmp(knob->type, "choice") == 0 || *end != '\0' || end == text || !isfinite(number))
            value = json_string(text);
        else if (strcmp(knob->type, "integer") == 0)
            value = json_integer((json_int_t)number);
        else
            value = json_real(number);
        json_object_set_new(object, knob->name, value);
    }
    return object;
}

json_t *cli_json_problem_shape(const apa_problem *problem)
{
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "B", (json_int_t)problem->q.shape[0], "Hq",
                     (json_int_t)problem->q.shape[1], "Hkv", (json_int_t)problem->k.shape[1], "Sq",
                     (json_int_t)problem->q.shape[2], "Skv", (json_int_t)problem->k.shape[2], "D",
                     (json_int_t)problem->q.shape[3], "Dv", (json_int_t)problem->v.shape[3]);
}

bool cli_prints(const cli_options *options)
{
    return options->json == NULL || strcmp(options->json, "-") != 0;
}

int cli_finish(const cli_options *options, json_t *value, apa_output_file *files, size_t count)
{
    int code = CLI_DONE;
    char *text = NULL;
    if (options->json != NULL) {
        text = json_dumps(value, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
        char *whole = text == NULL ? NULL : realloc(text, strlen(text) + 2);
        if (whole == NULL)
            code = cli_complain(CLI_FAILED, "no memory for the JSON text");
        else
            strcat(text = whole, "\n");
    }
    json_decref(value);
    if (code == CLI_DONE && text != NULL && cli_prints(options))
        files[count++] = (apa_output_file){options->json, NULL, text, strlen(text)};
    if (code == CLI_DONE)
        code = cli_files_write(files, count);
    if (code == CLI_DONE && text != NULL && !cli_prints(options))
        fputs(text, stdout);
    free(text);
    return code;
}

/* ------------------------------------------------------------------------------- progress and order statistics */

void cli_progress(void *user, const char *phase, double fraction)
{
    (void)user;
    if (!isatty(STDERR_FILENO))
        return;
    if (fraction < 1)
        fprintf(stderr, "\rapa: %s %3.0f %%\033[K", phase, 100 * fraction);
    else
        fprintf(stderr, "\r\033[K");
    fflush(stderr);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void cli_sort(double *values, int64_t n)
{
    qsort(values, (size_t)n, sizeof *values, by_value);
}

double cli_quantile(const double *sorted, int64_t n, double p)
{
    const double at = p * (double)(n - 1);
    const int64_t low = (int64_t)at;
    if (low + 1 >= n)
        return sorted[n - 1];
    return sorted[low] + (at - (double)low) * (sorted[low + 1] - sorted[low]);
}
