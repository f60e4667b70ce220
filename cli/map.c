/* apa map: which tiles were hot, cold or skipped, as a PNG; a panel a head, queries downwards, keys to the right.
 *
 * A cell of the map (verdict_map.h) becomes a rectangle of whole pixels. Where a panel would be wider or taller than
 * PANEL_MOST, several cells share a pixel, which then shows the hottest of them: a lone hot tile stays visible. */
#include "cli.h"
#include "from.h"
#include "picture.h"
#include "verdict_map.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Pixels. */
enum {
    MARGIN = 16,
    LINE = CLI_TEXT_HEIGHT + 8,
    WIDTH_LEAST = 720, /* so that the legend fits */
    PANEL_WIDE = 768,  /* one head alone fills about this */
    PANEL_TALL = 512,
    PANEL_SMALL = 240,  /* of many */
    PANEL_MOST = 16384, /* of all panels of a line, or of a column, together */
};

typedef struct source {
    cli_map map;
    char method[64];
    const char *name;
} source;

/* ------------------------------------------------------------------------------- where the map is from */

static int map_from_run(const cli_options *options, apa_context *context, cli_inputs *inputs, const apa_recipe *recipe,
                        source *from)
{
    apa_problem *problem = &inputs->problem;
    const apa_array_type type = problem->q.dtype == APA_DTYPE_F64 ? APA_ARRAY_F64 : APA_ARRAY_F32;
    const int64_t *q = problem->q.shape, Skv = problem->k.shape[2];
    apa_attention_options call;
    apa_attention_options_init(&call);
    call.engine = options->engine;
    problem->out = apa_tensor_hnd(NULL, (apa_dtype)type, q[0], q[1], q[2], problem->v.shape[3]);
    apa_plan plan;
    apa_plan_init(&plan);
    apa_status status = apa_attention_plan(context, problem, recipe, &call, &plan);
    if (status != APA_STATUS_OK)
        return cli_complain_context(options, context, status);
    const int64_t tile = plan.recipe.tile, shape[4] = {q[0], q[1], q[2], Skv / tile + (Skv % tile != 0)};
    apa_array out = {0}, verdicts = {0};
    int code = cli_output_make(inputs, type, problem->v.shape[3], &out, &problem->out);
    if (code == CLI_DONE && apa_array_allocate(&verdicts, APA_ARRAY_BOOL, 4, shape) != APA_STATUS_OK)
        code = cli_complain(CLI_FAILED, "no memory for the verdicts");
    call.verdicts = verdicts.data;
    cli_progress(NULL, "running", 0);
    if (code == CLI_DONE && (status = apa_attention(context, problem, recipe, &call, NULL)) != APA_STATUS_OK)
        code = cli_complain_context(options, context, status);
    cli_progress(NULL, "running", 1);
    if (code == CLI_DONE && !cli_map_make(problem, tile, verdicts.data, CLI_MAP_CELLS, &from->map))
        code = cli_complain(CLI_FAILED, "no memory for the map");
    apa_array_free(&out);
    apa_array_free(&verdicts);
    return code;
}

static int from_inputs(const cli_options *options, source *from)
{
    apa_recipe recipe;
    apa_context *context = NULL;
    cli_inputs inputs;
    memset(&inputs, 0, sizeof inputs);
    const char *method = options->method != NULL ? options->method : "apa";
    int code = cli_recipe(options, method, &recipe);
    if (code == CLI_DONE)
        code = cli_context_create(options, &context);
    if (code == CLI_DONE)
        code = cli_inputs_load(options, &inputs);
    if (code == CLI_DONE)
        code = map_from_run(options, context, &inputs, &recipe, from);
    snprintf(from->method, sizeof from->method, "%s", method);
    from->name = cli_base_name(options->dump != NULL ? options->dump : options->q != NULL ? options->q : "");
    cli_inputs_free(&inputs);
    apa_context_destroy(context);
    return code;
}

/* The one evaluation of the file that has a map, or of those the one of --method. */
static int from_file(const cli_options *options, source *from)
{
    const char *path = options->froms[0];
    json_t *evals;
    const json_t *found = NULL;
    cli_from_kind kind;
    int code = cli_from_load(path, &kind, &evals);
    if (code != CLI_DONE)
        return code;
    for (size_t i = 0; kind == CLI_FROM_EVAL && i < json_array_size(evals) && code == CLI_DONE; i++) {
        const json_t *eval = json_array_get(evals, i);
        const char *method = json_string_value(json_object_get(eval, "method"));
        if (json_object_get(eval, "map") == NULL || (options->method != NULL && strcmp(options->method, method) != 0))
            continue;
        if (found != NULL)
            code = cli_complain(CLI_MISUSE, "--from: %s: maps of several methods, expected --method to name one", path);
        found = eval;
        snprintf(from->method, sizeof from->method, "%s", method);
    }
    if (code == CLI_DONE && found == NULL)
        code = cli_complain(CLI_MISUSE, "--from: %s: no map%s%s in it, expected what apa eval --map --json wrote", path,
                            options->method != NULL ? " of " : "", options->method != NULL ? options->method : "");
    if (code == CLI_DONE)
        code = cli_map_read(path, json_object_get(found, "map"), &from->map);
    from->name = cli_base_name(path);
    json_decref(evals);
    return code;
}

/* ------------------------------------------------------------------------------- drawing */

/* How the panels lie: columns × lines of them; pixels of a cell, or cells of a pixel where there are too many. */
typedef struct layout {
    int64_t first, panels, columns, lines;
    int64_t scale[2], merge[2]; /* x, y */
    int64_t panel[2];           /* pixels of a panel's cells */
    int64_t width, height;      /* of the picture */
    bool batches;
} layout;

static int64_t up(int64_t n, int64_t d)
{
    return n / d + (n % d != 0);
}

/* The line over a panel. */
static void title_of(const cli_map_head *head, bool batches, char *title, size_t size)
{
    char batch[40] = "";
    if (batches)
        snprintf(batch, sizeof batch, "batch %" PRId64 " ", head->batch);
    snprintf(title, size, "%shead %" PRId64 "  %.2f %% hot", batch, head->head,
             head->visible > 0 ? 100 * (double)head->hot / (double)head->visible : 0);
}

static void arrange(const cli_map *map, int64_t head, layout *l)
{
    memset(l, 0, sizeof *l);
    l->first = head != CLI_ALL_HEADS ? head : 0;
    l->panels = head != CLI_ALL_HEADS ? 1 : map->count;
    while (l->columns * l->columns < l->panels)
        l->columns++;
    l->lines = up(l->panels, l->columns);
    int64_t title = 0; /* pixels of the longest one: a panel is no narrower */
    for (int64_t h = 0; h < map->count; h++)
        l->batches = l->batches || map->heads[h].batch > 0;
    for (int64_t h = l->first; h < l->first + l->panels; h++) {
        char text[96];
        title_of(&map->heads[h], l->batches, text, sizeof text);
        const int64_t n = (int64_t)strlen(text) * CLI_TEXT_STEP;
        title = n > title ? n : title;
    }
    const int64_t cells[2] = {map->width, map->height}, least[2] = {title, 1}, panels[2] = {l->columns, l->lines},
                  alone[2] = {PANEL_WIDE, PANEL_TALL};
    for (int i = 0; i < 2; i++) {
        const int64_t target = alone[i] / panels[i] > PANEL_SMALL ? alone[i] / panels[i] : PANEL_SMALL;
        const int64_t most = PANEL_MOST / panels[i] > 1 ? PANEL_MOST / panels[i] : 1;
        l->scale[i] = target / cells[i] > 1 ? target / cells[i] : 1;
        if (l->scale[i] * cells[i] < least[i])
            l->scale[i] = up(least[i], cells[i]);
        l->merge[i] = up(cells[i], most);
        l->panel[i] = up(cells[i], l->merge[i]) * l->scale[i];
    }
    l->width = MARGIN + l->columns * (l->panel[0] + 2 + MARGIN);
    l->width = l->width > WIDTH_LEAST ? l->width : WIDTH_LEAST;
    l->height = MARGIN + LINE + l->lines * (LINE + l->panel[1] + 2 + MARGIN) + 3 * LINE + MARGIN / 2;
}

/* The hottest of the cells that share pixel (x, y). */
static apa_verdict verdict_of(const cli_map *map, const cli_map_head *head, const layout *l, int64_t x, int64_t y)
{
    apa_verdict v = APA_VERDICT_INVISIBLE;
    for (int64_t cy = y * l->merge[1]; cy < (y + 1) * l->merge[1] && cy < map->height; cy++)
        for (int64_t cx = x * l->merge[0]; cx < (x + 1) * l->merge[0] && cx < map->width; cx++)
            v = cli_verdict_join(v, cli_map_at(map, head, cy, cx));
    return v;
}

static const cli_colour colour_of[4] = {[APA_VERDICT_COLD] = CLI_COLOUR_COLD,
                                        [APA_VERDICT_HOT] = CLI_COLOUR_HOT,
                                        [APA_VERDICT_SKIPPED] = CLI_COLOUR_SKIPPED,
                                        [APA_VERDICT_INVISIBLE] = CLI_COLOUR_INVISIBLE};

static void draw_panel(const cli_map *map, const cli_map_head *head, const layout *l, int64_t left, int64_t top,
                       cli_picture *picture)
{
    char title[96];
    title_of(head, l->batches, title, sizeof title);
    cli_picture_text(picture, left, top, title);
    top += LINE;
    cli_picture_fill(picture, left, top, l->panel[0] + 2, l->panel[1] + 2, CLI_COLOUR_FRAME);
    for (int64_t y = 0; y < l->panel[1] / l->scale[1]; y++)
        for (int64_t x = 0; x < l->panel[0] / l->scale[0]; x++)
            cli_picture_fill(picture, left + 1 + x * l->scale[0], top + 1 + y * l->scale[1], l->scale[0], l->scale[1],
                             colour_of[verdict_of(map, head, l, x, y)]);
}

static void draw_legend(const source *from, int64_t y, cli_picture *picture)
{
    static const struct {
        const char *name;
        apa_verdict verdict;
    } entry[] = {{"hot", APA_VERDICT_HOT},
                 {"cold", APA_VERDICT_COLD},
                 {"skipped", APA_VERDICT_SKIPPED},
                 {"not visible", APA_VERDICT_INVISIBLE}};
    const cli_map *map = &from->map;
    char text[160];
    int64_t x = MARGIN;
    for (size_t i = 0; i < sizeof entry / sizeof entry[0]; i++) {
        cli_picture_fill(picture, x, y, CLI_TEXT_HEIGHT, CLI_TEXT_HEIGHT, CLI_COLOUR_FRAME);
        cli_picture_fill(picture, x + 1, y + 1, CLI_TEXT_HEIGHT - 2, CLI_TEXT_HEIGHT - 2, colour_of[entry[i].verdict]);
        cli_picture_text(picture, x + CLI_TEXT_HEIGHT + 6, y, entry[i].name);
        x += CLI_TEXT_HEIGHT + 6 + CLI_TEXT_STEP * ((int64_t)strlen(entry[i].name) + 2);
    }
    snprintf(text, sizeof text, "right: keys 0 - %" PRId64 ", %" PRId64 " a cell", map->keys - 1,
             map->tile * map->tile_span);
    cli_picture_text(picture, MARGIN, y + LINE, text);
    int64_t last; /* --q-offset may be anything */
    if (__builtin_add_overflow(map->q_offset, map->rows - 1, &last))
        last = INT64_MAX;
    snprintf(text, sizeof text, "down: queries at %" PRId64 " - %" PRId64 ", %" PRId64 " a cell", map->q_offset, last,
             map->row_span);
    cli_picture_text(picture, MARGIN, y + 2 * LINE, text);
}

static bool draw(const source *from, const layout *l, cli_picture *picture)
{
    char title[256];
    if (!cli_picture_make(picture, l->width, l->height))
        return false;
    snprintf(title, sizeof title, "%s on %s", from->method, from->name);
    cli_picture_text(picture, MARGIN, MARGIN, title);
    for (int64_t i = 0; i < l->panels; i++)
        draw_panel(&from->map, &from->map.heads[l->first + i], l, MARGIN + i % l->columns * (l->panel[0] + 2 + MARGIN),
                   MARGIN + LINE + i / l->columns * (LINE + l->panel[1] + 2 + MARGIN), picture);
    draw_legend(from, l->height - MARGIN / 2 - 3 * LINE, picture);
    return true;
}

/* ------------------------------------------------------------------------------- the command */

static int check(const cli_options *options)
{
    const bool inputs = cli_from_has_inputs(options);
    if (options->out == NULL)
        return cli_complain(CLI_MISUSE, "--out: not given, expected a file name");
    if (strcmp(options->out, "-") == 0)
        return cli_complain(CLI_MISUSE, "--out: - is for text alone, expected a file name");
    if (options->from_count > 1 || (options->from_count == 1 && inputs))
        return cli_complain(CLI_MISUSE, "--from: found %s, expected one source of the map",
                            inputs ? "beside inputs" : "twice");
    if (options->from_count == 0 && !inputs)
        return cli_complain(CLI_MISUSE, "--from: not given, expected --from FILE, or --dump, or --q, --k and --v");
    int code = options->from_count > 0 ? cli_from_check_alone(options) : CLI_DONE;
    return code == CLI_DONE ? cli_from_check_out(options, ".png") : code;
}

static int check_map(const cli_options *options, const cli_map *map)
{
    if (map->height == 0 || map->width == 0 || map->count == 0)
        return cli_complain(CLI_MISUSE,
                            "--out: nothing to draw: %" PRId64 " heads, %" PRId64 " queries, %" PRId64 " keys",
                            map->count, map->rows, map->keys);
    if (options->head != CLI_ALL_HEADS && (options->head < 0 || options->head >= map->count))
        return cli_complain(CLI_MISUSE, "--head: %" PRId64 ", expected 0 ... %" PRId64, options->head, map->count - 1);
    return CLI_DONE;
}

static int write_picture(const cli_options *options, const source *from)
{
    layout l;
    cli_picture picture = {0};
    size_t size = 0;
    char *png = NULL;
    arrange(&from->map, options->head, &l);
    if (draw(from, &l, &picture))
        png = cli_picture_png(&picture, &size);
    cli_picture_free(&picture);
    if (png == NULL)
        return cli_complain(CLI_FAILED, "no memory for a picture of %" PRId64 " x %" PRId64 " pixels", l.width,
                            l.height);
    const apa_output_file file = {options->out, NULL, png, size};
    int code = cli_files_write(&file, 1);
    free(png);
    if (code == CLI_DONE)
        printf("%s: %" PRId64 " x %" PRId64 " pixels, %" PRId64 " of %" PRId64 " heads, cells of %" PRId64
               " queries x %" PRId64 " keys\n",
               options->out, l.width, l.height, l.panels, from->map.count, from->map.row_span,
               from->map.tile * from->map.tile_span);
    return code;
}

int cli_map_command(const cli_options *options)
{
    source from;
    memset(&from, 0, sizeof from);
    int code = check(options);
    if (code == CLI_DONE)
        code = options->from_count > 0 ? from_file(options, &from) : from_inputs(options, &from);
    if (code == CLI_DONE)
        code = check_map(options, &from.map);
    if (code == CLI_DONE)
        code = write_picture(options, &from);
    cli_map_free(&from.map);
    return code;
}
