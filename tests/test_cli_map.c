/* Maps of verdicts by themselves (cli/verdict_map.c): cells of more than 16 rows or one tile, odd sizes, the way to
 * JSON and back. The source is compiled in: the command would need a problem of gigabytes to merge cells. */
#include "support/test.h"

#include "support/problems.h"

#include "../cli/verdict_map.c"

#include <stdio.h>

static char complaint[512];

int cli_complain(int code, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(complaint, sizeof complaint, format, list);
    va_end(list);
    return code;
}

static apa_test_rng rng;

static int64_t draw(int64_t n)
{
    return apa_test_below(&rng, n);
}

static apa_problem shape_of(int64_t B, int64_t H, int64_t Sq, int64_t Skv)
{
    apa_problem problem;
    apa_problem_init(&problem);
    problem.q = apa_tensor_hnd(NULL, APA_DTYPE_F16, B, H, Sq, 64);
    problem.k = apa_tensor_hnd(NULL, APA_DTYPE_F16, B, H, Skv, 64);
    return problem;
}

/* Hot is rare, so that the other three are seen in cells of many pairs, too. */
static uint8_t *draw_verdicts(size_t n, int64_t one_in)
{
    uint8_t *verdicts = malloc(n + 1);
    assert_non_null(verdicts);
    for (size_t i = 0; i < n; i++)
        verdicts[i] = draw(one_in) == 0 ? (uint8_t)draw(4) : APA_VERDICT_INVISIBLE;
    return verdicts;
}

static void same_map(const cli_map *a, const cli_map *b)
{
    assert_true(a->rows == b->rows && a->keys == b->keys && a->q_offset == b->q_offset && a->tile == b->tile);
    assert_true(a->row_span == b->row_span && a->tile_span == b->tile_span && a->height == b->height);
    assert_true(a->width == b->width && a->count == b->count);
    for (int64_t h = 0; h < a->count; h++) {
        assert_true(a->heads[h].batch == b->heads[h].batch && a->heads[h].head == b->heads[h].head);
        assert_true(a->heads[h].visible == b->heads[h].visible && a->heads[h].hot == b->heads[h].hot);
        assert_true(a->heads[h].skipped == b->heads[h].skipped);
        assert_memory_equal(a->heads[h].cells, b->heads[h].cells, packed_bytes(a));
    }
}

/* Every cell from its definition, and the counts. */
static void check_cells(const cli_map *map, const uint8_t *verdicts, int64_t tiles)
{
    for (int64_t h = 0; h < map->count; h++) {
        int64_t count[4] = {0, 0, 0, 0};
        for (int64_t y = 0; y < map->height; y++)
            for (int64_t x = 0; x < map->width; x++) {
                bool seen[4] = {false, false, false, false};
                for (int64_t r = y * map->row_span; r < map->rows && r < (y + 1) * map->row_span; r++)
                    for (int64_t t = x * map->tile_span; t < tiles && t < (x + 1) * map->tile_span; t++) {
                        const uint8_t v = verdicts[(h * map->rows + r) * tiles + t];
                        seen[v] = true;
                        count[v]++;
                    }
                const apa_verdict expected = seen[1]   ? APA_VERDICT_HOT
                                             : seen[0] ? APA_VERDICT_COLD
                                             : seen[2] ? APA_VERDICT_SKIPPED
                                                       : APA_VERDICT_INVISIBLE;
                assert_int_equal(cli_map_at(map, &map->heads[h], y, x), expected);
            }
        assert_int_equal(map->heads[h].hot, count[1]);
        assert_int_equal(map->heads[h].skipped, count[2]);
        assert_int_equal(map->heads[h].visible, count[0] + count[1] + count[2]);
    }
}

static void check_shape(int64_t B, int64_t H, int64_t Sq, int64_t Skv, int64_t tile, int64_t room)
{
    const apa_problem problem = shape_of(B, H, Sq, Skv);
    const int64_t tiles = (Skv + tile - 1) / tile;
    uint8_t *verdicts = draw_verdicts((size_t)(B * H * Sq * tiles), 1 + draw(200));
    cli_map map, back;
    assert_true(cli_map_make(&problem, tile, verdicts, room, &map));
    assert_true(map.count == B * H && map.rows == Sq && map.keys == Skv && map.q_offset == Skv - Sq);
    assert_true(map.height * map.row_span >= Sq && (map.height - 1) * map.row_span < Sq);
    assert_true(map.width * map.tile_span >= tiles && (map.width - 1) * map.tile_span < tiles);
    assert_true(map.count * map.height * map.width <= room || (map.height <= 1 && map.width <= 1));
    check_cells(&map, verdicts, tiles);
    for (int64_t h = 0; h < map.count; h++)
        assert_true(map.heads[h].batch == h / H && map.heads[h].head == h % H);

    json_t *object = cli_map_json(&map);
    char *text = json_dumps(object, 0);
    json_t *read = json_loads(text, 0, NULL);
    json_decref(object);
    assert_non_null(read);
    assert_int_equal(cli_map_read("f", read, &back), CLI_DONE);
    same_map(&map, &back);
    json_decref(read);
    free(text);
    cli_map_free(&back);
    cli_map_free(&map);
    free(verdicts);
}

static void shapes(void **unused)
{
    (void)unused;
    check_shape(1, 3, 64, 640, 64, CLI_MAP_CELLS);
    check_shape(2, 3, 37, 130, 64, CLI_MAP_CELLS); /* odd rows and tiles: a last byte that is not full */
    check_shape(1, 1, 1, 1, 64, CLI_MAP_CELLS);
    check_shape(1, 2, 100, 900, 64, 2 * 7 * 8); /* 7 × 15: the wider side gives way first */
    check_shape(1, 1, 900, 100, 64, 20);        /* and here the taller one */
    check_shape(1, 4, 333, 3333, 32, 4 * 50);
    check_shape(1, 5, 300, 3000, 64, 1);          /* no room at all: one cell a head */
    check_shape(1, 2, 0, 640, 64, CLI_MAP_CELLS); /* nothing to see */
    check_shape(1, 0, 16, 640, 64, CLI_MAP_CELLS);
    for (int i = 0; i < 40; i++)
        check_shape(1 + draw(2), 1 + draw(4), 1 + draw(200), 1 + draw(2000), 16 << draw(3), 1 + draw(2000));
}

static void spans(void **unused)
{
    (void)unused;
    cli_map map;
    const apa_problem problem = shape_of(1, 1, 12288, 12288);
    memset(&map, 0, sizeof map);
    map.rows = problem.q.shape[2];
    map.keys = problem.k.shape[2];
    map.tile = 64;
    map.count = 32;
    choose_spans(&map, CLI_MAP_CELLS); /* 32 heads of 12288 queries × 192 tiles need no merging: 1.2 MB packed */
    assert_true(map.row_span == 16 && map.tile_span == 1 && map.height == 768 && map.width == 192);
    map.rows = map.keys = 131072;
    choose_spans(&map, CLI_MAP_CELLS); /* 8192 × 2048 cells a head are 32 times too many */
    assert_true(map.height * map.width * 32 <= CLI_MAP_CELLS && map.height * map.width * 64 > CLI_MAP_CELLS);
    assert_true(map.row_span == 16 * 16 && map.tile_span == 2);
}

int main(void)
{
    rng.state = apa_test_seed();
    const struct CMUnitTest tests[] = {cmocka_unit_test(shapes), cmocka_unit_test(spans)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
