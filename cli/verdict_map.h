/* A map of verdicts: which tiles of keys were hot, cold or skipped for which rows, one picture a head.
 *
 * A run gives a verdict for every (row, tile). A map keeps one for every cell, `row_span` rows (16) by `tile_span`
 * tiles (1; more of either only where a map would have more cells than it may), 2 bits each, and exact counts of (row,
 * tile) pairs beside them. The rows of a cell need not agree: a cell is hot if any of its (row, tile) pairs is, else
 * cold if any is, else skipped if any is; it is invisible if no row of it sees a key of it. */
#ifndef APA_CLI_VERDICT_MAP_H
#define APA_CLI_VERDICT_MAP_H

#include "cli.h"

#define CLI_MAP_CELLS ((int64_t)1 << 24) /* of all heads of a map: 4 MiB, and 5.6 MB as base64 */

typedef struct cli_map_head {
    int64_t batch, head;
    int64_t visible, hot, skipped; /* (row, tile) pairs; skipped is a part of what is not hot */
    uint8_t *cells;                /* apa_verdict of cell (y, x): bits 2·(i mod 4) of byte i/4, i = y·width + x */
} cli_map_head;

typedef struct cli_map {
    int64_t rows, keys, q_offset; /* Sq, Skv, position of row 0 among the keys */
    int64_t tile;                 /* keys per tile */
    int64_t row_span, tile_span;  /* of a cell */
    int64_t height, width;        /* cells */
    int64_t count;
    cli_map_head *heads; /* batch by batch */
} cli_map;

/* From the verdicts of a run, [B][Hq][Sq][ceil(Skv/tile)]. At most `room` cells, of all heads together. False: no
 * memory. cli_map_free() afterwards in either case. */
bool cli_map_make(const apa_problem *problem, int64_t tile, const uint8_t *verdicts, int64_t room, cli_map *map);
void cli_map_free(cli_map *map);

/* Verdict of a cell. */
apa_verdict cli_map_at(const cli_map *map, const cli_map_head *head, int64_t y, int64_t x);
/* Of several cells, as of several pairs. */
apa_verdict cli_verdict_join(apa_verdict a, apa_verdict b);

/* docs/command.md says what the object holds. */
json_t *cli_map_json(const cli_map *map);

/* The way back. Every size is checked; a mistake is complained about as one of the file `path` of --from. */
int cli_map_read(const char *path, const json_t *object, cli_map *map);

#endif
