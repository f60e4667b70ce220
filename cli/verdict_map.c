/* Maps of verdicts: made from a run, written to JSON and read back. The layout is in verdict_map.h. */
#include "verdict_map.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static int64_t cells_of(int64_t n, int64_t span)
{
    return n / span + (n % span != 0);
}

static size_t packed_bytes(const cli_map *map)
{
    return (size_t)(cells_of(map->height * map->width, 4));
}

apa_verdict cli_verdict_join(apa_verdict a, apa_verdict b)
{
    static const uint8_t rank[4] = {
        [APA_VERDICT_INVISIBLE] = 0, [APA_VERDICT_SKIPPED] = 1, [APA_VERDICT_COLD] = 2, [APA_VERDICT_HOT] = 3};
    return rank[a & 3] >= rank[b & 3] ? a : b;
}

apa_verdict cli_map_at(const cli_map *map, const cli_map_head *head, int64_t y, int64_t x)
{
    const int64_t i = y * map->width + x;
    return (apa_verdict)(head->cells[i / 4] >> 2 * (i % 4) & 3);
}

void cli_map_free(cli_map *map)
{
    for (int64_t h = 0; map->heads != NULL && h < map->count; h++)
        free(map->heads[h].cells);
    free(map->heads);
    memset(map, 0, sizeof *map);
}

/* Heads with cells that are all 0. height·width is known not to overflow. */
static bool allocate(cli_map *map)
{
    map->heads = calloc((size_t)map->count + 1, sizeof *map->heads);
    for (int64_t h = 0; map->heads != NULL && h < map->count; h++) {
        map->heads[h].cells = calloc(packed_bytes(map) + 1, 1);
        if (map->heads[h].cells == NULL)
            return false;
    }
    return map->heads != NULL;
}

/* ------------------------------------------------------------------------------- from a run */

/* Cells of 16 rows by a tile, or of as many more as it takes to fit; whichever direction has more gives way. */
static void choose_spans(cli_map *map, int64_t room)
{
    const int64_t tiles = cells_of(map->keys, map->tile);
    map->row_span = 16;
    map->tile_span = 1;
    for (;;) {
        map->height = cells_of(map->rows, map->row_span);
        map->width = cells_of(tiles, map->tile_span);
        if (map->height * map->width <= room / (map->count > 0 ? map->count : 1) ||
            (map->height <= 1 && map->width <= 1))
            return;
        if (map->height >= map->width)
            map->row_span *= 2;
        else
            map->tile_span *= 2;
    }
}

/* One head: verdicts [rows][tiles]. A row of cells is gathered unpacked and then packed. */
static void fill(const cli_map *map, const uint8_t *verdicts, uint8_t *line, cli_map_head *head)
{
    const int64_t tiles = cells_of(map->keys, map->tile);
    for (int64_t y = 0; y < map->height; y++) {
        memset(line, APA_VERDICT_INVISIBLE, (size_t)map->width);
        for (int64_t r = y * map->row_span; r < (y + 1) * map->row_span && r < map->rows; r++)
            for (int64_t t = 0; t < tiles; t++) {
                const apa_verdict v = (apa_verdict)verdicts[r * tiles + t];
                uint8_t *cell = &line[t / map->tile_span];
                head->visible += v != APA_VERDICT_INVISIBLE;
                head->hot += v == APA_VERDICT_HOT;
                head->skipped += v == APA_VERDICT_SKIPPED;
                *cell = (uint8_t)cli_verdict_join((apa_verdict)*cell, v);
            }
        for (int64_t x = 0; x < map->width; x++) {
            const int64_t i = y * map->width + x;
            head->cells[i / 4] |= (uint8_t)(line[x] << 2 * (i % 4));
        }
    }
}

bool cli_map_make(const apa_problem *problem, int64_t tile, const uint8_t *verdicts, int64_t room, cli_map *map)
{
    const int64_t *q = problem->q.shape;
    memset(map, 0, sizeof *map);
    map->rows = q[2];
    map->keys = problem->k.shape[2];
    map->q_offset = problem->q_offset == APA_Q_OFFSET_DEFAULT ? map->keys - map->rows : problem->q_offset;
    map->tile = tile;
    map->count = q[0] * q[1];
    choose_spans(map, room);
    uint8_t *line = malloc((size_t)map->width + 1);
    const bool room_for_all = line != NULL && allocate(map);
    const int64_t tiles = cells_of(map->keys, tile);
    for (int64_t h = 0; room_for_all && h < map->count; h++) {
        map->heads[h].batch = h / q[1];
        map->heads[h].head = h % q[1];
        fill(map, verdicts + h * map->rows * tiles, line, &map->heads[h]);
    }
    free(line);
    return room_for_all;
}

/* ------------------------------------------------------------------------------- base64 (RFC 4648) */

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static json_t *base64(const uint8_t *bytes, size_t n)
{
    char *text = malloc((n + 2) / 3 * 4 + 1), *to = text;
    if (text == NULL)
        return NULL;
    for (size_t i = 0; i < n; i += 3) {
        const uint32_t left = n - i < 3 ? (uint32_t)(n - i) : 3;
        const uint32_t word =
            (uint32_t)bytes[i] << 16 | (left > 1 ? (uint32_t)bytes[i + 1] << 8 : 0) | (left > 2 ? bytes[i + 2] : 0u);
        for (uint32_t c = 0; c < 4; c++)
            *to++ = c <= left ? alphabet[word >> (18 - 6 * c) & 63] : '=';
    }
    json_t *value = json_stringn_nocheck(text, (size_t)(to - text));
    free(text);
    return value;
}

/* Exactly n bytes, or false. */
static bool base64_read(const char *text, size_t length, uint8_t *bytes, size_t n)
{
    if (length != (n + 2) / 3 * 4)
        return false;
    for (size_t i = 0; i < n; i += 3, text += 4) {
        const size_t left = n - i < 3 ? n - i : 3;
        uint32_t word = 0;
        for (size_t c = 0; c < 4; c++) {
            const char *at = text[c] != '\0' ? strchr(alphabet, text[c]) : NULL;
            if (c > left ? text[c] != '=' : at == NULL)
                return false;
            word = word << 6 | (c > left ? 0u : (uint32_t)(at - alphabet));
        }
        for (size_t j = 0; j < left; j++)
            bytes[i + j] = (uint8_t)(word >> (16 - 8 * j));
    }
    return true;
}

/* ------------------------------------------------------------------------------- JSON */

json_t *cli_map_json(const cli_map *map)
{
    json_t *heads = json_array();
    for (int64_t h = 0; h < map->count; h++) {
        const cli_map_head *head = &map->heads[h];
        json_array_append_new(heads, json_pack("{s:I,s:I,s:I,s:I,s:I,s:o}", "batch", (json_int_t)head->batch, "head",
                                               (json_int_t)head->head, "visible", (json_int_t)head->visible, "hot",
                                               (json_int_t)head->hot, "skipped", (json_int_t)head->skipped, "cells",
                                               base64(head->cells, packed_bytes(map))));
    }
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:o}", "rows", (json_int_t)map->rows, "keys",
                     (json_int_t)map->keys, "q_offset", (json_int_t)map->q_offset, "tile", (json_int_t)map->tile,
                     "rows_per_cell", (json_int_t)map->row_span, "tiles_per_cell", (json_int_t)map->tile_span, "height",
                     (json_int_t)map->height, "width", (json_int_t)map->width, "heads", heads);
}

/* An integer of the object between low and high. */
static bool get(const json_t *object, const char *key, int64_t low, int64_t high, int64_t *value)
{
    const json_t *found = json_object_get(object, key);
    *value = json_is_integer(found) ? (int64_t)json_integer_value(found) : INT64_MIN;
    return json_is_integer(found) && *value >= low && *value <= high;
}

static bool read_sizes(const json_t *object, cli_map *map)
{
    const int64_t most = INT64_MAX / 4;
    if (!get(object, "rows", 0, most, &map->rows) || !get(object, "keys", 0, most, &map->keys) ||
        !get(object, "q_offset", INT64_MIN + 1, INT64_MAX, &map->q_offset) ||
        !get(object, "tile", 1, most, &map->tile) || !get(object, "rows_per_cell", 1, most, &map->row_span) ||
        !get(object, "tiles_per_cell", 1, most, &map->tile_span) ||
        !get(object, "height", 0, INT32_MAX, &map->height) || !get(object, "width", 0, INT32_MAX, &map->width))
        return false;
    return map->height == cells_of(map->rows, map->row_span) &&
           map->width == cells_of(cells_of(map->keys, map->tile), map->tile_span);
}

static bool read_head(const json_t *object, const cli_map *map, cli_map_head *head)
{
    const json_t *cells = json_object_get(object, "cells");
    return get(object, "batch", 0, INT64_MAX, &head->batch) && get(object, "head", 0, INT64_MAX, &head->head) &&
           get(object, "visible", 0, INT64_MAX, &head->visible) && get(object, "hot", 0, head->visible, &head->hot) &&
           get(object, "skipped", 0, head->visible - head->hot, &head->skipped) && json_is_string(cells) &&
           base64_read(json_string_value(cells), json_string_length(cells), head->cells, packed_bytes(map));
}

int cli_map_read(const char *path, const json_t *object, cli_map *map)
{
    const json_t *heads = json_object_get(object, "heads");
    memset(map, 0, sizeof *map);
    if (!read_sizes(object, map) || !json_is_array(heads))
        return cli_complain(CLI_MISUSE,
                            "--from: %s: its map has sizes that do not agree, expected a map of apa eval --map", path);
    /* Before memory is asked for: the text of all cells must be there. */
    const size_t count = json_array_size(heads), expected = (packed_bytes(map) + 2) / 3 * 4;
    for (size_t h = 0; h < count; h++)
        if (json_string_length(json_object_get(json_array_get(heads, h), "cells")) != expected)
            return cli_complain(CLI_MISUSE,
                                "--from: %s: head %zu of its map is not %" PRId64 " x %" PRId64
                                " cells, expected a map of apa eval --map",
                                path, h, map->height, map->width);
    map->count = (int64_t)count;
    if (!allocate(map))
        return cli_complain(CLI_FAILED, "no memory for the map of %s", path);
    for (int64_t h = 0; h < map->count; h++)
        if (!read_head(json_array_get(heads, (size_t)h), map, &map->heads[h]))
            return cli_complain(CLI_MISUSE,
                                "--from: %s: head %" PRId64
                                " of its map holds no sound cells and counts, expected a map of apa eval --map",
                                path, h);
    return CLI_DONE;
}
