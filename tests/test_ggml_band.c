/* The plugin's reading of ggml masks: every band it reports must say exactly what the mask said. */
#include "../plugins/ggml/band.c"
#include "support/problems.h"
#include "support/test.h"

#include <stdio.h>
#include <stdlib.h>

#define ROWS 24
#define KEYS 40

static bool band_sees(const apa_ggml_band *band, int64_t i, int64_t j)
{
    const int64_t at = band->q_offset + i;
    if (j >= band->keys)
        return false;
    return !band->causal || (j <= at && (band->width < 0 || j > at - band->width));
}

/* Every causal or plain band over small shapes: found, and right in every place. */
static void test_bands_are_found(void **state)
{
    (void)state;
    uint16_t mask[ROWS * KEYS];
    int found = 0;
    for (int64_t rows = 1; rows <= 5; rows++)
        for (int64_t offset = 0; offset < 12; offset++)
            for (int64_t width = 0; width <= 14; width++) {
                const int64_t keys = 16;
                for (int64_t i = 0; i < rows; i++)
                    for (int64_t j = 0; j < keys; j++) {
                        const bool sees = j <= offset + i && (width == 0 || j > offset + i - width);
                        mask[i * KEYS + j] = sees ? 0x0000 : 0xFC00;
                    }
                apa_ggml_band band = {0};
                assert_true(apa_ggml_find_band(mask, rows, keys, KEYS, &band));
                found++;
                for (int64_t i = 0; i < rows; i++)
                    for (int64_t j = 0; j < keys; j++)
                        assert_int_equal(band_sees(&band, i, j), mask[i * KEYS + j] == 0x0000);
            }
    assert_int_equal(found, 5 * 12 * 15);
}

static void test_the_same_keys_for_all(void **state)
{
    (void)state;
    uint16_t mask[ROWS * KEYS];
    for (int64_t end = 1; end <= KEYS; end++) {
        for (int64_t i = 0; i < ROWS; i++)
            for (int64_t j = 0; j < KEYS; j++)
                mask[i * KEYS + j] = j < end ? 0x0000 : 0xFC00;
        apa_ggml_band band = {0};
        assert_true(apa_ggml_find_band(mask, ROWS, KEYS, KEYS, &band));
        assert_false(band.causal);
        assert_int_equal(band.keys, end);
    }
}

/* One wrong value anywhere, and it is no band, or a band that still says the same. */
static void test_a_changed_value_is_seen(void **state)
{
    (void)state;
    apa_test_rng rng = {apa_test_seed()};
    uint16_t mask[ROWS * KEYS];
    int refused = 0;
    for (int round = 0; round < 4000; round++) {
        const int64_t offset = apa_test_below(&rng, KEYS), width = apa_test_below(&rng, 20);
        for (int64_t i = 0; i < ROWS; i++)
            for (int64_t j = 0; j < KEYS; j++)
                mask[i * KEYS + j] = j <= offset + i && (width == 0 || j > offset + i - width) ? 0x0000 : 0xFC00;
        static const uint16_t odd[] = {0x0000, 0xFC00, 0x8000, 0x3C00, 0x7E00, 0x0001, 0x7C00};
        mask[apa_test_below(&rng, ROWS * KEYS)] = odd[apa_test_below(&rng, 7)];
        apa_ggml_band band = {0};
        if (!apa_ggml_find_band(mask, ROWS, KEYS, KEYS, &band)) {
            refused++;
            continue;
        }
        for (int64_t i = 0; i < ROWS; i++)
            for (int64_t j = 0; j < KEYS; j++)
                assert_int_equal(mask[i * KEYS + j], band_sees(&band, i, j) ? 0x0000 : 0xFC00);
    }
    assert_in_range(refused, 1000, 3999);
}

static void test_rows_without_keys_are_no_band(void **state)
{
    (void)state;
    uint16_t mask[2 * KEYS];
    for (int64_t j = 0; j < 2 * KEYS; j++)
        mask[j] = j < KEYS ? 0x0000 : 0xFC00;
    apa_ggml_band band = {0};
    assert_false(apa_ggml_find_band(mask, 2, KEYS, KEYS, &band));
    assert_false(apa_ggml_find_band(mask + KEYS, 1, KEYS, KEYS, &band));
}

int main(void)
{
    printf("seed %llu\n", (unsigned long long)apa_test_seed());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bands_are_found), cmocka_unit_test(test_the_same_keys_for_all),
        cmocka_unit_test(test_a_changed_value_is_seen), cmocka_unit_test(test_rows_without_keys_are_no_band)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
