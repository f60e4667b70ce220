/* `apa report` and `apa map`: what is in the page and in the picture against what `apa eval` says and against the
 * verdicts of the library itself. How the page looks in a browser is tests/report_browser.py's business. */
#include "support/command.h"

#include "apa/attention.h"

#include <math.h>
#include <png.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DUMP APA_TEST_DATA_DIR "/smollm2-135m_L17_h0_12288.dump"

/* ------------------------------------------------------------------------------- helpers */

static char *slurp(const char *name)
{
    FILE *file = fopen(name, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    const long size = ftell(file);
    rewind(file);
    char *text = malloc((size_t)size + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)size, file), size);
    text[size] = '\0';
    fclose(file);
    return text;
}

static void put(const char *name, const char *text)
{
    FILE *file = fopen(name, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    fclose(file);
}

static void put_json(const char *name, const json_t *value)
{
    char *text = json_dumps(value, JSON_REAL_PRECISION(17));
    put(name, text);
    free(text);
}

/* The data of a page. It stands between two tags and holds no "<" that could end it early. */
static json_t *page_data(const char *name)
{
    static const char open[] = "<script type=\"application/json\" id=\"data\">";
    char *page = slurp(name), *from = strstr(page, open);
    assert_non_null(from);
    from += strlen(open);
    char *to = strchr(from, '<');
    assert_non_null(to);
    assert_int_equal(strncmp(to, "</script>", 9), 0);
    *to = '\0';
    json_t *data = command_parse(from);
    free(page);
    return data;
}

static json_t *result_at(const json_t *data, size_t i, const char *kind)
{
    const json_t *result = json_array_get(json_object_get(data, "results"), i);
    assert_string_equal(json_string_value(json_object_get(result, "kind")), kind);
    return json_object_get(result, "data");
}

static json_t *load_json(const char *name)
{
    char *text = slurp(name);
    json_t *value = command_parse(text);
    free(text);
    return value;
}

/* All that a second run of the same call may change. */
static void forget_times(json_t *eval)
{
    static const char *const keys[] = {"prep_ms", "attention_ms", "exact_ms", "speedup"};
    for (size_t i = 0; i < 4; i++)
        json_object_del(eval, keys[i]);
}

static int value_of(char c)
{
    static const char all[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = strchr(all, c);
    return at != NULL && c != '\0' ? (int)(at - all) : 0;
}

/* Cell i of packed cells in base64: three bytes in four letters, four cells in a byte. */
static int cell_at(const char *text, int64_t i)
{
    const int64_t byte = i / 4;
    const char *four = text + byte / 3 * 4;
    const int word = value_of(four[0]) << 18 | value_of(four[1]) << 12 | value_of(four[2]) << 6 | value_of(four[3]);
    return word >> (16 - 8 * (byte % 3)) >> 2 * (i % 4) & 3;
}

/* ------------------------------------------------------------------------------- the map against the library */

typedef struct run {
    apa_dump dump;
    uint8_t *verdicts;
    int64_t heads, rows, keys, tiles;
} run;

/* The library's own verdicts on the sample, by its default recipe. */
static run run_sample(void)
{
    char message[256];
    run r;
    memset(&r, 0, sizeof r);
    assert_int_equal(apa_dump_read(DUMP, &r.dump, message, sizeof message), APA_STATUS_OK);
    apa_problem problem;
    apa_problem_init(&problem);
    assert_int_equal(apa_array_tensor(&r.dump.q, 0, &problem.q, message, sizeof message), APA_STATUS_OK);
    assert_int_equal(apa_array_tensor(&r.dump.k, 0, &problem.k, message, sizeof message), APA_STATUS_OK);
    assert_int_equal(apa_array_tensor(&r.dump.v, 0, &problem.v, message, sizeof message), APA_STATUS_OK);
    problem.causal = 1;
    problem.q_offset = r.dump.q_offset;
    r.heads = problem.q.shape[1];
    r.rows = problem.q.shape[2];
    r.keys = problem.k.shape[2];
    r.tiles = (r.keys + 63) / 64;
    const size_t values = (size_t)(r.heads * r.rows * problem.v.shape[3]);
    float *out = malloc(values * sizeof *out);
    r.verdicts = malloc((size_t)(r.heads * r.rows * r.tiles));
    assert_true(out != NULL && r.verdicts != NULL);
    problem.out = apa_tensor_hnd(out, APA_DTYPE_F32, 1, r.heads, r.rows, problem.v.shape[3]);
    apa_attention_options options;
    apa_attention_options_init(&options);
    options.verdicts = r.verdicts;
    apa_context *context;
    assert_int_equal(apa_context_create(&context, NULL), APA_STATUS_OK);
    assert_int_equal(apa_attention(context, &problem, NULL, &options, NULL), APA_STATUS_OK);
    apa_context_destroy(context);
    free(out);
    return r;
}

static void run_free(run *r)
{
    apa_dump_free(&r->dump);
    free(r->verdicts);
}

static uint8_t verdict(const run *r, int64_t head, int64_t row, int64_t tile)
{
    return r->verdicts[(head * r->rows + row) * r->tiles + tile];
}

/* What the 16 rows from 16·y on say of a tile together: hot before cold before skipped before invisible. */
static int together(const run *r, int64_t head, int64_t y, int64_t tile)
{
    bool seen[4] = {false, false, false, false};
    for (int64_t row = 16 * y; row < 16 * (y + 1) && row < r->rows; row++)
        seen[verdict(r, head, row, tile)] = true;
    return seen[APA_VERDICT_HOT]       ? APA_VERDICT_HOT
           : seen[APA_VERDICT_COLD]    ? APA_VERDICT_COLD
           : seen[APA_VERDICT_SKIPPED] ? APA_VERDICT_SKIPPED
                                       : APA_VERDICT_INVISIBLE;
}

static void sample_map(void **unused)
{
    (void)unused;
    run r = run_sample();
    command_works(command_run("report --dump " DUMP " --repeats 1 --out page.html"));
    json_t *data = page_data("page.html"), *eval = result_at(data, 0, "eval");
    const json_t *map = json_object_get(eval, "map"), *heads = json_object_get(map, "heads");
    static const char *const keys[] = {"rows",          "keys",           "q_offset", "tile",
                                       "rows_per_cell", "tiles_per_cell", "height",   "width"};
    const double values[] = {1024, 12288, 11264, 64, 16, 1, 64, 192};
    for (size_t i = 0; i < 8; i++)
        assert_true(command_number(map, keys[i]) == values[i]);
    assert_int_equal(json_array_size(heads), 3);
    int64_t hot_all = 0, visible_all = 0;
    for (int64_t h = 0; h < 3; h++) {
        const json_t *head = json_array_get(heads, (size_t)h);
        const char *cells = json_string_value(json_object_get(head, "cells"));
        int64_t count[4] = {0, 0, 0, 0}, sink = 0, diagonal = 0;
        assert_int_equal(strlen(cells), (64 * 192 / 4 + 2) / 3 * 4);
        for (int64_t y = 0; y < 64; y++) {
            for (int64_t x = 0; x < 192; x++)
                assert_int_equal(cell_at(cells, y * 192 + x), together(&r, h, y, x));
            sink += cell_at(cells, y * 192) == APA_VERDICT_HOT;
            diagonal += cell_at(cells, y * 192 + (11264 + 16 * y + 15) / 64) == APA_VERDICT_HOT;
        }
        assert_int_equal(sink, 64); /* what the real dump must show */
        assert_int_equal(diagonal, 64);
        for (int64_t i = 0; i < r.rows * r.tiles; i++)
            count[r.verdicts[h * r.rows * r.tiles + i]]++;
        assert_true(command_number(head, "head") == (double)h && command_number(head, "batch") == 0);
        assert_true(command_number(head, "hot") == (double)count[APA_VERDICT_HOT]);
        assert_true(command_number(head, "skipped") == (double)count[APA_VERDICT_SKIPPED]);
        assert_true(command_number(head, "visible") == (double)(r.rows * r.tiles - count[APA_VERDICT_INVISIBLE]));
        const json_t *figures = json_array_get(json_object_get(eval, "heads"), (size_t)h);
        assert_true(command_number(figures, "hot_share") ==
                    (double)count[APA_VERDICT_HOT] / command_number(head, "visible"));
        hot_all += count[APA_VERDICT_HOT];
        visible_all += r.rows * r.tiles - count[APA_VERDICT_INVISIBLE];
    }
    assert_true(command_number(eval, "hot_share") == (double)hot_all / (double)visible_all);
    assert_int_equal(json_array_size(json_object_get(eval, "worst")), 20);
    json_decref(data);
    run_free(&r);
}

/* ------------------------------------------------------------------------------- the page against eval and sweep */

static void same_as_eval(void **unused)
{
    (void)unused;
    command_works(command_run("eval " IN "--eps 0.3 --worst 20 --histogram --per-head --device zen4,h200,rtx5090 --map "
                              "--json eval.json"));
    command_works(command_run("report " IN "--eps 0.3 --out page.html"));
    json_t *data = page_data("page.html"), *shown = result_at(data, 0, "eval"), *eval = load_json("eval.json");
    assert_int_equal(json_array_size(json_object_get(data, "results")), 1);
    assert_string_equal(json_string_value(json_object_get(data, "apa")), APA_VERSION_STRING);
    forget_times(shown);
    forget_times(eval);
    assert_true(json_object_size(eval) > 30);
    assert_true(json_equal(shown, eval));
    json_decref(eval);
    json_decref(data);

    /* From the file it is the file. */
    command_works(command_run("report --from eval.json --out again.html"));
    data = page_data("again.html");
    eval = load_json("eval.json");
    assert_true(json_equal(result_at(data, 0, "eval"), eval));
    json_decref(eval);
    json_decref(data);
}

static void several(void **unused)
{
    (void)unused;
    command_works(command_run("eval " IN "--compare exact,cold --json two.json"));
    command_works(command_run("sweep " IN "--over eps=0.01,0.5 --json sweep.json"));
    command_works(
        command_run("report " IN "--compare apa,cold --repeats 1 --from two.json --from=sweep.json --out all.html"));
    assert_non_null(strstr(command_out, "all.html: "));
    json_t *data = page_data("all.html"), *two = load_json("two.json"), *sweep = load_json("sweep.json");
    const json_t *results = json_object_get(data, "results");
    assert_int_equal(json_array_size(results), 5);
    static const char *const methods[] = {"apa", "cold", "exact", "cold"}, *const files[] = {"q.npy", "q.npy",
                                                                                             "two.json", "two.json",
                                                                                             "sweep.json"};
    for (size_t i = 0; i < 4; i++)
        assert_string_equal(json_string_value(json_object_get(result_at(data, i, "eval"), "method")), methods[i]);
    for (size_t i = 0; i < 5; i++)
        assert_string_equal(json_string_value(json_object_get(json_array_get(results, i), "file")), files[i]);
    assert_true(json_equal(result_at(data, 2, "eval"), json_array_get(two, 0)));
    assert_true(json_equal(result_at(data, 3, "eval"), json_array_get(two, 1)));
    assert_true(json_equal(result_at(data, 4, "sweep"), sweep));
    json_decref(two);
    json_decref(sweep);
    json_decref(data);

    command_works(command_run("report --help"));
    assert_non_null(strstr(command_out, "usage: apa report"));
    command_works(command_run("help map"));
    assert_non_null(strstr(command_out, "A panel a head"));
    command_works(command_run("report --from sweep.json --out -")); /* to standard output, and nothing else there */
    char *page = slurp(".stdout");
    assert_int_equal(strncmp(page, "<!DOCTYPE html>", 15), 0);
    assert_string_equal(page + strlen(page) - 8, "</html>\n");
    free(page);
}

/* Names of files that are no UTF-8, and that hold what JSON and HTML have a meaning for. */
static void odd_names(void **unused)
{
    (void)unused;
    command_works(command_run("eval " IN "--map --json 'a\xff\"<\\b.json'"));
    command_works(command_run("report --from 'a\xff\"<\\b.json' --out odd.html"));
    json_t *data = page_data("odd.html");
    assert_string_equal(json_string_value(json_object_get(json_array_get(json_object_get(data, "results"), 0), "file")),
                        "a?\"<\\b.json");
    json_decref(data);
    command_works(command_run("map --from 'a\xff\"<\\b.json' --out odd.png"));
}

/* With changed scores the worst pairs are left out; asked for, they are refused. */
static void changed_scores(void **unused)
{
    (void)unused;
    command_works(command_run("report " IN "--softcap 30 --repeats 1 --out cap.html"));
    json_t *data = page_data("cap.html"), *eval = result_at(data, 0, "eval");
    assert_null(json_object_get(eval, "worst"));
    assert_non_null(json_object_get(eval, "map"));
    json_decref(data);
    command_works(command_run("map " IN "--softcap 30 --out cap.png"));
    command_fails(command_run("report " IN "--softcap 30 --worst 3 --out x.html"), 2, "softcap");
    assert_false(command_exists("x.html"));
}

/* One file: style, library, its licence and scripts are inside, nothing points outside, and nothing may be loaded. */
static void self_contained(void **unused)
{
    (void)unused;
    static const char *const inside[] = {"Content-Security-Policy\" content=\"default-src 'none';", "Chart.js v4",
                                         "Permission is hereby granted", "class VerdictMap", "--hot:"};
    static const char *const outside[] = {"src=",       "@import",          "url(",        "@STYLE@", "@MAIN@",
                                          "@APA_DATA@", "sourceMappingURL", "href=\"http", "fetch(",  "XMLHttpRequest"};
    command_works(command_run("report " IN "--repeats 1 --out page.html"));
    char *page = slurp("page.html");
    for (size_t i = 0; i < sizeof inside / sizeof inside[0]; i++)
        if (strstr(page, inside[i]) == NULL)
            fail_msg("the page has no \"%s\"", inside[i]);
    for (size_t i = 0; i < sizeof outside / sizeof outside[0]; i++)
        if (strstr(page, outside[i]) != NULL)
            fail_msg("the page has \"%s\"", outside[i]);
    free(page);

    /* Text of a file can't end the element that it stands in. */
    json_t *eval;
    command_works(command_run("eval " IN "--json eval.json"));
    eval = load_json("eval.json");
    json_object_set_new(eval, "method", json_string("</script><b>&<!--"));
    put_json("evil.json", eval);
    command_works(command_run("report --from evil.json --out evil.html"));
    json_t *data = page_data("evil.html"); /* finds that no "<" is there */
    assert_true(json_equal(result_at(data, 0, "eval"), eval));
    json_decref(eval);
    json_decref(data);
}

/* ------------------------------------------------------------------------------- the picture */

typedef struct picture {
    int64_t width, height;
    uint8_t *rgb;
} picture;

static picture read_png(const char *name)
{
    png_image image;
    picture p;
    memset(&image, 0, sizeof image);
    image.version = PNG_IMAGE_VERSION;
    assert_true(png_image_begin_read_from_file(&image, name));
    image.format = PNG_FORMAT_RGB;
    p.width = image.width;
    p.height = image.height;
    p.rgb = malloc(PNG_IMAGE_SIZE(image));
    assert_non_null(p.rgb);
    assert_true(png_image_finish_read(&image, NULL, p.rgb, 0, NULL));
    return p;
}

/* The colours that --help names, told apart without asking how they are spelt: red, pale blue, blue, grey. */
static int verdict_of_pixel(const picture *p, int64_t x, int64_t y)
{
    const uint8_t *c = p->rgb + 3 * (y * p->width + x);
    if (c[0] > 150 && c[2] < 100)
        return APA_VERDICT_HOT;
    if (c[2] - c[0] > 40)
        return APA_VERDICT_COLD;
    return c[2] - c[0] > 10 ? APA_VERDICT_SKIPPED : APA_VERDICT_INVISIBLE;
}

/* A panel's cells from (left, top) on, sx × sy pixels each. */
static void check_panel(const picture *p, const run *r, int64_t head, const int64_t at[2], const int64_t scale[2])
{
    for (int64_t y = 0; y < 64; y++)
        for (int64_t x = 0; x < 192; x++)
            for (int64_t corner = 0; corner < 2; corner++) {
                const int64_t px = at[0] + x * scale[0] + corner * (scale[0] - 1),
                              py = at[1] + y * scale[1] + corner * (scale[1] - 1);
                assert_true(px < p->width && py < p->height);
                if (verdict_of_pixel(p, px, py) != together(r, head, y, x))
                    fail_msg("head %d, cell %d, %d: pixel %d, %d shows %d, expected %d", (int)head, (int)y, (int)x,
                             (int)px, (int)py, verdict_of_pixel(p, px, py), together(r, head, y, x));
            }
}

static void sample_picture(void **unused)
{
    (void)unused;
    run r = run_sample();
    /* One head: 768/192 × 512/64 pixels a cell, after a margin, two lines of text and a frame. */
    command_works(command_run("map --dump " DUMP " --head 1 --out one.png"));
    assert_non_null(strstr(command_out, "one.png: 802 x 664 pixels, 1 of 3 heads, cells of 16 queries x 64 keys"));
    picture p = read_png("one.png");
    assert_true(p.width == 802 && p.height == 664);
    check_panel(&p, &r, 1, (int64_t[2]){17, 61}, (int64_t[2]){4, 8});
    for (int64_t y = 0; y < 64; y++) { /* the sink column and the diagonal */
        assert_int_equal(verdict_of_pixel(&p, 17, 61 + 8 * y), APA_VERDICT_HOT);
        assert_int_equal(verdict_of_pixel(&p, 17 + 4 * ((11264 + 16 * y + 15) / 64), 61 + 8 * y), APA_VERDICT_HOT);
    }
    free(p.rgb);
    /* All of them: two panels a line, 384/192 × 256/64. */
    command_works(command_run("map --dump " DUMP " --out all.png"));
    p = read_png("all.png");
    const int64_t step[2] = {384 + 2 + 16, 256 + 2 + 16 + 22};
    for (int64_t h = 0; h < 3; h++)
        check_panel(&p, &r, h, (int64_t[2]){17 + h % 2 * step[0], 61 + h / 2 * step[1]}, (int64_t[2]){2, 4});
    free(p.rgb);
    run_free(&r);
}

static void picture_from_file(void **unused)
{
    (void)unused;
    command_works(command_run("eval " IN "--compare apa,cold --eps 0.3 --map --json maps.json"));
    command_works(command_run("map --from maps.json --method apa --out file.png"));
    command_works(command_run("map " IN "--eps 0.3 --out run.png"));
    picture a = read_png("file.png"), b = read_png("run.png");
    assert_true(a.width == b.width && a.height == b.height);
    /* But for the first line, which names where it is from. */
    const size_t text = (size_t)(3 * 38 * a.width), all = (size_t)(3 * a.height * a.width);
    assert_memory_equal(a.rgb + text, b.rgb + text, all - text);
    free(a.rgb);
    free(b.rgb);
    command_works(
        command_run("map " IN "--threads 1 --eps 0.3 --out run1.png")); /* the same bytes, whatever the threads */
    char *one = slurp("run.png"), *other = slurp("run1.png");
    assert_memory_equal(one, other, 2000 < strlen(one) ? 2000 : strlen(one));
    assert_int_equal(system("cmp -s run.png run1.png"), 0);
    free(one);
    free(other);
}

/* ------------------------------------------------------------------------------- mistakes */

/* A map in a file whose key has another value. */
static void damaged(const char *key, json_t *value, const char *says)
{
    json_t *eval = load_json("good.json"), *map = json_object_get(eval, "map");
    json_t *head = json_array_get(json_object_get(map, "heads"), 1);
    json_object_set_new(json_object_get(map, key) != NULL ? map : head, key, value);
    put_json("bad.json", eval);
    json_decref(eval);
    command_fails(command_run("map --from bad.json --out x.png"), 2, says);
    command_fails(command_run("report --from bad.json --out x.html"), 2, says);
}

static void damaged_maps(void **unused)
{
    (void)unused;
    command_works(command_run("eval " IN "--map --json good.json"));
    command_works(command_run("map --from good.json --out good.png"));
    damaged("width", json_integer(3), "--from: bad.json: its map has sizes that do not agree");
    damaged("height", json_integer(1LL << 40), "its map has sizes");
    damaged("tile", json_integer(0), "its map has sizes");
    damaged("rows", json_integer(-1), "its map has sizes");
    damaged("rows_per_cell", json_real(16), "its map has sizes");
    damaged("q_offset", json_null(), "its map has sizes");
    damaged("heads", json_object(), "its map has sizes");
    damaged("cells", json_string(""), "--from: bad.json: head 1 of its map is not 3 x 2 cells");
    damaged("cells", json_string("AAAA"), "head 1 of its map holds no sound cells"); /* two bytes: AAA= */
    damaged("cells", json_string("A*A="), "head 1 of its map holds no sound cells");
    damaged("hot", json_integer(1000000), "head 1 of its map holds no sound cells and counts");
    damaged("batch", json_string("0"), "head 1 of its map holds no sound cells and counts");
    assert_false(command_exists("x.png"));
    assert_false(command_exists("x.html"));
}

static void mistakes(void **unused)
{
    (void)unused;
    command_works(command_run("eval " IN "--json plain.json"));
    command_works(command_run("eval " IN "--compare apa,cold --map --json maps.json"));
    command_works(command_run("sweep " IN "--over eps=0.5 --json sweep.json"));
    put("text.json", "these are no figures\n");
    put("other.json", "{\"method\": \"apa\"}\n");
    put("empty.json", "[]\n");
    put("old.html", "what was here before\n");
    static const struct {
        const char *arguments, *says;
    } bad[] = {
        {"report " IN, "--out: not given, expected a file name"},
        {"report --out x.html", "--from: not given, expected --from FILE, or --dump, or --q, --k and --v"},
        {"report --from plain.json --out nowhere/x.html", "--out: nowhere/x.html: no folder"},
        {"report --from plain.json --out in", "--out: in: is a directory"},
        {"report " IN "--out in/k.npy", "--out: in/k.npy: is the input of --k"},
        {"report --from plain.json --out plain.json", "--out: plain.json: is the input of --from"},
        {"report --from missing.json --out x.html", "--from: missing.json: cannot be opened"},
        {"report --from text.json --out x.html", "--from: text.json: no JSON (line 1"},
        {"report --from other.json --out x.html", "--from: other.json: neither an evaluation nor a sweep"},
        {"report --from empty.json --out x.html", "--from: empty.json: an empty array"},
        {"report --from= --out x.html", "--from: empty, expected FILE"},
        {"report --from plain.json --eps 0.1 --out x.html", "--eps: found without inputs to run on"},
        {"report --from plain.json --method apa --out x.html", "--method: found without inputs to run on"},
        {"report --from plain.json --device h200 --out x.html", "--device: found without inputs to run on"},
        {"report " IN "--from text.json --out old.html", "--from: text.json: no JSON"},
        {"report " IN "--method best --out old.html", "--method: \"best\", expected one of"},
        {"report " IN "--device abacus --out old.html", "--device: \"abacus\", expected one of"},
        {"report --q in/q.npy --k in/k.npy --out x.html", "--v: not given"},
        {"report --q in/q.npy --k in/cut.npy --v in/v.npy --out x.html", "--k: in/cut.npy: truncated"},
        {"report " IN "--json x.json --out x.html", "--json: no such option here"},
        {"map " IN, "--out: not given, expected a file name"},
        {"map --out x.png", "--from: not given, expected --from FILE, or --dump"},
        {"map " IN "--out -", "--out: - is for text alone"},
        {"map --from plain.json --out x.png",
         "--from: plain.json: no map in it, expected what apa eval --map --json wrote"},
        {"map --from sweep.json --out x.png", "--from: sweep.json: no map in it"},
        {"map --from maps.json --out x.png",
         "--from: maps.json: maps of several methods, expected --method to name one"},
        {"map --from maps.json --method exact --out x.png", "--from: maps.json: no map of exact in it"},
        {"map --from maps.json --from maps.json --out x.png", "--from: found twice, expected one source"},
        {"map " IN "--from maps.json --out x.png", "--from: found beside inputs, expected one source"},
        {"map --from maps.json --method apa --head 4 --out x.png", "--head: 4, expected 0 ... 3"},
        {"map " IN "--head -1 --out x.png", "--head: -1, expected 0 ... 3"},
        {"map " IN "--compare apa,cold --out x.png", "--compare: no such option here"},
        {"map " IN "--set tile=9 --out x.png", "--set: tile"},
        {"eval " IN "--map", "--map: found without --json FILE"},
    };
    const int before = command_entries(".");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        command_fails(command_run("%s", bad[i].arguments), 2, bad[i].says);
        if (command_entries(".") != before)
            fail_msg("\"%s\" left a file", bad[i].arguments);
    }
    command_read_text("old.html", command_out, sizeof command_out);
    assert_string_equal(command_out, "what was here before\n");
}

/* A full disk: one line, nothing half-written, what was there is still there. */
static void full_disk(void **unused)
{
    (void)unused;
    command_works(command_run("eval " IN "--json plain.json"));
    put("kept.html", "what was here before\n");
    char line[512];
    const int before = command_entries(".");
    snprintf(line, sizeof line, "ulimit -f 64; '%s' report --from plain.json --out kept.html >.stdout 2>.stderr",
             APA_TEST_COMMAND);
    assert_true(system(line) != 0);
    command_read_text(".stderr", command_err, sizeof command_err);
    assert_int_equal(strncmp(command_err, "apa: ", 5), 0);
    assert_ptr_equal(strchr(command_err, '\n'), command_err + strlen(command_err) - 1);
    assert_int_equal(command_entries("."), before);
    command_read_text("kept.html", command_out, sizeof command_out);
    assert_string_equal(command_out, "what was here before\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sample_map),     cmocka_unit_test(same_as_eval),      cmocka_unit_test(several),
        cmocka_unit_test(odd_names),      cmocka_unit_test(changed_scores),    cmocka_unit_test(self_contained),
        cmocka_unit_test(sample_picture), cmocka_unit_test(picture_from_file), cmocka_unit_test(damaged_maps),
        cmocka_unit_test(mistakes),       cmocka_unit_test(full_disk),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
