/* Recipes: presets, knobs by name, and what apa_recipe_check() refuses. Every expectation is written out here, not
 * taken from the knob table. */
#include "support/test.h"

#include "apa/recipe.h"
#include "recipe/defaults.h"
#include "recipe/recipe_internal.h"

#include <float.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { TEXT = 64, MESSAGE = 512 };

/* What each knob takes, in its own spelling (what get gives back), and what it refuses. */
typedef struct expectation {
    const char *name, *type, *apa; /* apa: the value in preset "apa" */
    const char *takes[8];
    const char *refuses[14];
} expectation;

#define TOGGLE(name)                                                                                                   \
    {                                                                                                                  \
        name, "choice", "auto", {"auto", "off", "on"},                                                                 \
        {                                                                                                              \
            "On", "yes", "2", "o", "off|on", "-1"                                                                      \
        }                                                                                                              \
    }

static const expectation expectations[] = {
    {"force", "choice", "none", {"none", "low", "high"}, {"auto", "hig", "high ", "1", "LOW", "none|low"}},
    {"eps",
     "number",
     "auto",
     {"auto", "0.005", "-1", "1", "0", "1e-300", "0.1", "1e+300"},
     {"nan", "NAN", "inf", "-inf", "infinity", "1e999", "1e-400", "0x1p-3", "0,5", " 1", "1 ", "1e", "--1"}},
    {"eps_by", "choice", "auto", {"auto", "call", "row"}, {"rows", "group", "on"}},
    TOGGLE("second_look"),
    {"lambda_bound", "choice", "auto", {"auto", "none", "jensen"}, {"off", "Jensen"}},
    {"order", "choice", "auto", {"auto", "sink-backward", "forward", "reverse"}, {"backward", "sink", "sink_backward"}},
    {"tile",
     "integer",
     "64",
     {"64", "16", "256", "128", "48"},
     {"auto", "0", "8", "63", "65", "272", "-64", "64.0", "6e1"}},
    {"group", "integer", "auto", {"auto", "1", "16", "64"}, {"-1", "65", "nan", "1.5", "99999999999999999999"}},
    {"packing", "choice", "auto", {"auto", "rows", "head"}, {"row", "heads"}},
    {"early_tiles",
     "integer",
     "auto",
     {"auto", "0", "1", "2147483647"},
     {"-2", "2147483648", "-9223372036854775809", "4294967295"}},
    {"frame_drop", "number", "32", {"32", "0", "100", "0.5"}, {"auto", "nan", "-0.001", "100.001", "inf"}},
    {"lazy_tau", "number", "4", {"4", "0", "8"}, {"auto", "nan", "-1", "8.01"}},
    TOGGLE("skip"),
    {"cold_format", "choice", "auto", {"auto", "int8", "nvfp4", "e4m3", "mxfp4"}, {"fp4", "INT8", "i8"}},
    {"exact_format", "choice", "auto", {"auto", "input", "f16", "bf16"}, {"f32", "fp16"}},
    {"q_terms", "integer", "auto", {"auto", "1", "2"}, {"3", "-1", "one"}},
    TOGGLE("scale_search"),
    {"p_scale",
     "choice",
     "auto",
     {"auto", "row-tile", "ue4m3", "pow2", "two-level", "mx", "row-tile-pow2"},
     {"row_tile", "e4m3"}},
    TOGGLE("smooth_k"),
    TOGGLE("smooth_v"),
    TOGGLE("hadamard"),
    {"qk_format", "choice", "auto", {"auto", "int8", "e4m3", "nvfp4", "mxfp4", "exact"}, {"fp8", "mxfp8"}},
    {"pv_format",
     "choice",
     "auto",
     {"auto", "int8", "e4m3", "nvfp4", "mxfp4", "mxfp8", "f16", "exact"},
     {"fp16", "bf16"}},
    TOGGLE("exact_q"),
    TOGGLE("exact_k"),
    TOGGLE("exact_p"),
    TOGGLE("exact_v"),
    {"qk_scale_granularity", "choice", "auto", {"auto", "row", "thread", "warp", "block", "16", "32"}, {"64", "key"}},
    {"v_scale_granularity", "choice", "auto", {"auto", "tile-channel", "channel", "block", "16", "32"}, {"row", "64"}},
    {"tensor_scale", "choice", "auto", {"auto", "none", "amax", "pow2"}, {"head"}},
    TOGGLE("pow2_scales"),
    {"mx_rounding", "choice", "auto", {"auto", "floor", "up"}, {"nearest"}},
    {"v_range", "number", "auto", {"auto", "2.25", "448", "0.015625"}, {"0", "449", "-1", "nan"}},
    {"p_static_scale", "number", "auto", {"auto", "1", "256", "65504"}, {"0", "65505", "nan"}},
    {"p_sum", "choice", "auto", {"auto", "quantised", "exact"}, {"quantized"}},
    {"p_map", "choice", "auto", {"auto", "exp", "direct"}, {"exp2"}},
    TOGGLE("p_phase"),
    TOGGLE("smooth_q"),
    {"q_mean", "choice", "auto", {"auto", "block", "head"}, {"on", "128"}},
    {"accum", "choice", "auto", {"auto", "f64", "f32", "fp22", "f16"}, {"fp32", "e4m3"}},
    {"qk_accum", "choice", "auto", {"auto", "f64", "f32", "fp22", "f16"}, {"fp32"}},
    {"pv_accum", "choice", "auto", {"auto", "f64", "f32", "fp22", "f16"}, {"fp32"}},
    {"pv_flush", "integer", "auto", {"auto", "0", "16", "32", "64"}, {"-2", "65", "1.5"}},
    {"exact_accum", "choice", "auto", {"auto", "f64", "f32", "f16"}, {"fp32"}},
    {"exact_flush", "integer", "auto", {"auto", "0"}, {"-2", "65", "1.5"}},
    {"softmax", "choice", "auto", {"auto", "online"}, {"flash"}},
    {"s_format", "choice", "auto", {"auto", "exact"}, {"f32"}},
    {"p_format", "choice", "auto", {"auto", "exact"}, {"f32"}},
    {"early_rows", "integer", "0", {"0", "auto", "256"}, {"-2", "2147483648"}},
    {"verdict", "choice", "auto", {"auto", "none", "mass", "mass_value", "cold_budget", "lamp"}, {"budget"}},
    {"select", "choice", "auto", {"auto", "none", "block_mean", "quest", "local"}, {"off"}},
    {"fraction", "number", "0.05", {"0.05", "0", "1", "0.25"}, {"auto", "1.01", "-0.1", "nan"}},
    {"force_sink", "choice", "auto", {"auto", "off"}, {"yes", "2"}},
    {"force_diagonal", "choice", "auto", {"auto", "off"}, {"yes", "2"}},
    {"tau", "number", "0.5", {"0.5", "0", "2", "1"}, {"auto", "2.01", "-1", "nan"}},
    {"margin", "number", "2", {"2", "0", "100"}, {"auto", "-1", "101"}},
    {"sub_block", "integer", "16", {"16", "4", "8", "32", "64"}, {"auto", "0", "2", "68", "7"}},
    {"lamp_stages", "choice", "auto", {"auto", "both", "first", "second"}, {"none"}},
    {"smooth_k_stride", "integer", "auto", {"auto", "1", "8", "65536"}, {"-1", "65537", "off", "1.5"}},
};
enum { KNOBS = sizeof expectations / sizeof expectations[0] };

static apa_recipe preset(const char *name)
{
    apa_recipe recipe;
    assert_int_equal(apa_recipe_init(&recipe, name), APA_STATUS_OK);
    return recipe;
}

static void assert_knob(const apa_recipe *recipe, const char *knob, const char *expected)
{
    char text[TEXT];
    assert_int_equal(apa_recipe_get(recipe, knob, text, sizeof text), APA_STATUS_OK);
    assert_string_equal(text, expected);
}

/* One line, and it names what it should. */
static void assert_message(const char *message, const char *name, const char *found, const char *expected)
{
    if (!strstr(message, name) || !strstr(message, found) || !strstr(message, expected) || strchr(message, '\n')) {
        fail_msg("message \"%s\" should name %s, %s and %s", message, name, found, expected);
    }
}

static void presets_are_what_they_say(void **state)
{
    (void)state;
    const apa_recipe apa = preset("apa"), unnamed = preset(NULL), exact = preset("exact"), cold = preset("cold");
    assert_memory_equal(&apa, &unnamed, sizeof apa);
    assert_int_equal(apa.size, sizeof(apa_recipe));
    assert_string_equal(apa.name, "apa");
    assert_int_equal(apa.force, APA_FORCE_NONE);
    assert_true(isnan(apa.eps) && apa.frame_drop == 32 && apa.lazy_tau == 4);
    assert_int_equal(apa.tile, 64);
    assert_int_equal(apa.group, 0);
    assert_int_equal(apa.early_tiles, -1);
    assert_int_equal(apa.q_terms, 0);
    for (int i = 0; i < KNOBS; i++) {
        assert_knob(&apa, expectations[i].name, expectations[i].apa);
        const bool forced = strcmp(expectations[i].name, "force") == 0;
        assert_knob(&cold, expectations[i].name, forced ? "low" : expectations[i].apa);
    }
    assert_string_equal(cold.name, "cold");
    assert_string_equal(exact.name, "exact");
    assert_int_equal(exact.force, APA_FORCE_HIGH);
    assert_int_equal(exact.order, APA_ORDER_FORWARD);
    assert_int_equal(exact.skip, APA_TOGGLE_OFF);
    assert_int_equal(exact.smooth_k, APA_TOGGLE_OFF);
    assert_int_equal(exact.smooth_v, APA_TOGGLE_OFF);
    assert_int_equal(exact.hadamard, APA_TOGGLE_OFF);
}

static void every_preset_is_sound_and_round_trips(void **state)
{
    (void)state;
    size_t i = 0;
    for (; apa_recipe_preset_name(i); i++) {
        const char *name = apa_recipe_preset_name(i);
        const apa_recipe recipe = preset(name);
        char message[MESSAGE] = "";
        assert_int_equal(apa_recipe_check(&recipe, message, sizeof message), APA_STATUS_OK);
        assert_string_equal(recipe.name, name);
        assert_true(strlen(name) < sizeof recipe.name);
        assert_true(strlen(apa_recipe_preset_about(i)) > 10 && !strchr(apa_recipe_preset_about(i), '\n'));
        /* From garbage back to the preset, knob by knob; only size and name are given. */
        apa_recipe copy;
        memset(&copy, 0x5A, sizeof copy);
        copy.size = sizeof copy;
        for (int k = 0; k < KNOBS; k++) {
            char text[TEXT];
            assert_int_equal(apa_recipe_get(&recipe, expectations[k].name, text, sizeof text), APA_STATUS_OK);
            assert_int_equal(apa_recipe_set(&copy, expectations[k].name, text, NULL, 0), APA_STATUS_OK);
        }
        assert_memory_equal(&copy.force, &recipe.force, sizeof copy.force);
        for (int k = 0; k < KNOBS; k++) {
            char text[TEXT];
            assert_int_equal(apa_recipe_get(&recipe, expectations[k].name, text, sizeof text), APA_STATUS_OK);
            assert_knob(&copy, expectations[k].name, text);
        }
    }
    assert_true(i >= 3);
    assert_null(apa_recipe_preset_about(i));
    apa_recipe untouched = preset("cold");
    assert_int_equal(apa_recipe_init(&untouched, "no such preset"), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_recipe_init(&untouched, ""), APA_STATUS_INVALID_ARGUMENT);
    assert_string_equal(untouched.name, "cold");
    assert_int_equal(apa_recipe_init(NULL, "apa"), APA_STATUS_INVALID_ARGUMENT);
}

static void the_table_is_complete_and_describes_itself(void **state)
{
    (void)state;
    for (size_t i = 0; i < KNOBS; i++) {
        const apa_recipe_knob *knob = apa_recipe_knob_at(i);
        assert_non_null(knob);
        assert_string_equal(knob->name, expectations[i].name);
        assert_string_equal(knob->type, expectations[i].type);
        assert_true(knob->range[0] && knob->about[0] && knob->source[0]);
        assert_true(!strchr(knob->about, '\n') && !strchr(knob->source, '\n'));
    }
    assert_null(apa_recipe_knob_at(KNOBS));
    /* No field without a row: setting every knob leaves no byte of a cleared recipe's fields unwritten. */
    size_t covered = offsetof(apa_recipe, force);
    for (size_t i = 0; i < KNOBS; i++) {
        const size_t bytes = apa_knob_at(i)->kind == APA_KNOB_IS_NUMBER ? sizeof(double) : sizeof(int32_t);
        const size_t aligned = (covered + bytes - 1) / bytes * bytes;
        assert_int_equal(apa_knob_at(i)->offset, aligned);
        covered = aligned + bytes;
    }
    assert_true(sizeof(apa_recipe) - covered < sizeof(double));
}

static void every_knob_takes_its_range(void **state)
{
    (void)state;
    for (int i = 0; i < KNOBS; i++) {
        apa_recipe recipe = preset("apa");
        for (int k = 0; k < 8 && expectations[i].takes[k]; k++) {
            char message[MESSAGE] = "untouched";
            const char *text = expectations[i].takes[k];
            assert_int_equal(apa_recipe_set(&recipe, expectations[i].name, text, message, sizeof message),
                             APA_STATUS_OK);
            assert_string_equal(message, "untouched");
            assert_knob(&recipe, expectations[i].name, text);
            assert_int_equal(apa_recipe_check(&recipe, message, sizeof message), APA_STATUS_OK);
            for (int other = 0; other < KNOBS; other++) {
                if (other != i) {
                    assert_knob(&recipe, expectations[other].name, expectations[other].apa);
                }
            }
        }
    }
}

static void every_knob_refuses_garbage(void **state)
{
    (void)state;
    static const char *const garbage[] = {"", "garbage", "auto ", "64x", "|", "none\nlow", "0x40", "99999999999"};
    const apa_recipe before = preset("apa");
    for (int i = 0; i < KNOBS; i++) {
        const apa_recipe_knob *knob = apa_recipe_knob_at((size_t)i);
        for (size_t k = 0; k < sizeof expectations[i].refuses / sizeof expectations[i].refuses[0] + 8; k++) {
            const size_t own = sizeof expectations[i].refuses / sizeof expectations[i].refuses[0];
            const char *text = k < own ? expectations[i].refuses[k] : garbage[k - own];
            apa_recipe recipe = before;
            char message[MESSAGE] = "";
            if (!text || (strcmp(text, "99999999999") == 0 && strcmp(expectations[i].name, "eps") == 0)) {
                continue; /* a large ε is a number like any other */
            }
            if (apa_recipe_set(&recipe, knob->name, text, message, sizeof message) != APA_STATUS_INVALID_ARGUMENT) {
                fail_msg("%s takes \"%s\"", knob->name, text);
            }
            char found[TEXT];
            snprintf(found, sizeof found, "found \"%s\"", strchr(text, '\n') ? "none?low" : text);
            char expected[TEXT * 4];
            snprintf(expected, sizeof expected, "expected %s", knob->range);
            assert_message(message, knob->name, found, expected);
            assert_int_equal(strncmp(message, knob->name, strlen(knob->name)), 0);
            assert_memory_equal(&recipe, &before, sizeof recipe);
        }
    }
}

static void toggles_take_the_usual_words(void **state)
{
    (void)state;
    static const char *const words[][2] = {{"true", "on"}, {"1", "on"}, {"false", "off"}, {"0", "off"}};
    apa_recipe recipe = preset("apa");
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        assert_int_equal(apa_recipe_set(&recipe, "smooth_v", words[i][0], NULL, 0), APA_STATUS_OK);
        assert_knob(&recipe, "smooth_v", words[i][1]);
        assert_int_equal(apa_recipe_set(&recipe, "order", words[i][0], NULL, 0), APA_STATUS_INVALID_ARGUMENT);
    }
}

static void bad_calls_are_named(void **state)
{
    (void)state;
    apa_recipe recipe = preset("apa");
    char message[MESSAGE], small[8], text[TEXT];
    assert_int_equal(apa_recipe_set(&recipe, "epz", "1", message, sizeof message), APA_STATUS_INVALID_ARGUMENT);
    assert_message(message, "knob", "\"epz\"", "hadamard");
    assert_int_equal(apa_recipe_set(&recipe, NULL, "1", message, sizeof message), APA_STATUS_INVALID_ARGUMENT);
    assert_message(message, "knob", "NULL", "name");
    assert_int_equal(apa_recipe_set(&recipe, "eps", NULL, message, sizeof message), APA_STATUS_INVALID_ARGUMENT);
    assert_message(message, "eps", "NULL", "auto|any finite number");
    assert_int_equal(apa_recipe_set(NULL, "eps", "1", message, sizeof message), APA_STATUS_INVALID_ARGUMENT);
    assert_message(message, "recipe", "NULL", "recipe");
    /* Long values are cut, small buffers end in 0, no buffer is fine. */
    char longer[2000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    assert_int_equal(apa_recipe_set(&recipe, "order", longer, message, sizeof message), APA_STATUS_INVALID_ARGUMENT);
    assert_message(message, "order", "xxx...\"", "auto|sink-backward|forward|reverse");
    memset(small, 'y', sizeof small);
    assert_int_equal(apa_recipe_set(&recipe, "order", "x", small, sizeof small), APA_STATUS_INVALID_ARGUMENT);
    assert_string_equal(small, "order: ");
    assert_int_equal(apa_recipe_set(&recipe, "order", "x", small, 0), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_recipe_get(&recipe, "epz", text, sizeof text), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_recipe_get(&recipe, "eps", text, 4), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_recipe_get(&recipe, "eps", text, 5), APA_STATUS_OK);
    assert_int_equal(apa_recipe_get(&recipe, "eps", NULL, 9), APA_STATUS_INVALID_ARGUMENT);
    assert_int_equal(apa_recipe_get(NULL, "eps", text, sizeof text), APA_STATUS_INVALID_ARGUMENT);
    recipe.size--;
    assert_int_equal(apa_recipe_set(&recipe, "eps", "1", message, sizeof message), APA_STATUS_INVALID_ARGUMENT);
    assert_message(message, "recipe.size", "found", "expected");
    assert_int_equal(apa_recipe_check(&recipe, message, sizeof message), APA_STATUS_INVALID_ARGUMENT);
    assert_message(message, "recipe.size", "found", "expected");
}

static void refused(const apa_recipe *recipe, const char *name, const char *found, const char *expected)
{
    char message[MESSAGE] = "";
    if (apa_recipe_check(recipe, message, sizeof message) != APA_STATUS_INVALID_ARGUMENT) {
        fail_msg("check takes %s %s", name, found);
    }
    assert_message(message, name, found, expected);
    assert_int_equal(strncmp(message, name, strlen(name)), 0);
}

#define REFUSED(field, value, found, expected)                                                                         \
    do {                                                                                                               \
        apa_recipe r_ = preset("apa");                                                                                 \
        r_.field = value;                                                                                              \
        refused(&r_, #field, "found " found, expected);                                                                \
    } while (0)

static void check_refuses_what_is_out_of_range(void **state)
{
    (void)state;
    REFUSED(eps, (double)INFINITY, "inf", "any finite number");
    REFUSED(eps, -(double)INFINITY, "-inf", "any finite number");
    REFUSED(frame_drop, (double)NAN, "nan", "0 … 100");
    REFUSED(frame_drop, -1, "-1", "0 … 100");
    REFUSED(frame_drop, 100.5, "100.5", "0 … 100");
    REFUSED(lazy_tau, (double)NAN, "nan", "0 … 8");
    REFUSED(lazy_tau, 8.5, "8.5", "0 … 8");
    REFUSED(tile, 0, "0", "multiple of 16");
    REFUSED(tile, 65, "65", "multiple of 16");
    REFUSED(tile, 272, "272", "16 … 256");
    REFUSED(tile, INT32_MIN, "-2147483648", "16 … 256");
    REFUSED(group, -1, "-1", "0 … 64");
    REFUSED(group, 65, "65", "0 … 64");
    REFUSED(early_tiles, -2, "-2", "-1 …");
    REFUSED(q_terms, 3, "3", "0 … 2");
    REFUSED(force, (apa_force)0, "0", "none|low|high");
    REFUSED(force, (apa_force)4, "4", "none|low|high");
    REFUSED(order, (apa_order)4, "4", "auto|sink-backward");
    REFUSED(order, (apa_order)-1, "-1", "auto|sink-backward");
    REFUSED(packing, (apa_packing)3, "3", "auto|rows|head");
    REFUSED(lambda_bound, (apa_lambda_bound)3, "3", "auto|none|jensen");
    REFUSED(cold_format, (apa_cold_format)5, "5", "auto|int8|nvfp4|e4m3|mxfp4");
    REFUSED(exact_format, (apa_exact_format)4, "4", "auto|input|f16|bf16");
    REFUSED(p_scale, (apa_p_scale)8, "8", "auto|row-tile|ue4m3|pow2|static|two-level|mx|row-tile-pow2");
    REFUSED(skip, (apa_toggle)3, "3", "auto|off|on");
    REFUSED(second_look, (apa_toggle)3, "3", "auto|off|on");
    REFUSED(scale_search, (apa_toggle)3, "3", "auto|off|on");
    REFUSED(smooth_k, (apa_toggle)3, "3", "auto|off|on");
    REFUSED(smooth_v, (apa_toggle)3, "3", "auto|off|on");
    REFUSED(hadamard, (apa_toggle)3, "3", "auto|off|on");
    apa_recipe endless = preset("apa");
    memset(endless.name, 'x', sizeof endless.name);
    refused(&endless, "recipe.name", "found no end", "23");
    assert_int_equal(apa_recipe_check(NULL, NULL, 0), APA_STATUS_INVALID_ARGUMENT);
    apa_recipe odd = preset("apa"); /* what get can't put into words it refuses */
    char text[TEXT];
    odd.order = (apa_order)9;
    assert_int_equal(apa_recipe_get(&odd, "order", text, sizeof text), APA_STATUS_INVALID_ARGUMENT);
}

/* "knob=value knob=value" over preset apa. */
static apa_recipe with(const char *settings)
{
    apa_recipe recipe = preset("apa");
    char text[512], message[MESSAGE] = "";
    assert_true(strlen(settings) < sizeof text);
    strcpy(text, settings);
    for (char *at = strtok(text, " "); at; at = strtok(NULL, " ")) {
        char *value = strchr(at, '=');
        assert_non_null(value);
        *value++ = '\0';
        if (apa_recipe_set(&recipe, at, value, message, sizeof message) != APA_STATUS_OK) {
            fail_msg("%s", message);
        }
    }
    return recipe;
}

static void check_refuses_pairs_that_make_no_sense(void **state)
{
    (void)state;
    /* p_scale by pv_format: a row per format, 1 where it goes together: auto row-tile ue4m3 pow2 static two-level mx
     * row-tile-pow2 */
    static const char *const formats[] = {"auto", "int8", "e4m3", "nvfp4", "mxfp4", "mxfp8", "f16", "exact"};
    static const char *const scales[] = {"auto",   "row-tile",  "ue4m3", "pow2",
                                         "static", "two-level", "mx",    "row-tile-pow2"};
    static const char goes[8][9] = {"11111111", "11001000", "11001001", "10111100",
                                    "10001010", "10001010", "10001000", "10001000"};
    for (int f = 0; f < 8; f++) {
        for (int p = 0; p < 8; p++) {
            char settings[128];
            snprintf(settings, sizeof settings, "lazy_tau=0 pv_format=%s p_scale=%s", formats[f], scales[p]);
            const apa_recipe recipe = with(settings);
            if (goes[f][p] == '1') {
                assert_int_equal(apa_recipe_check(&recipe, NULL, 0), APA_STATUS_OK);
            } else {
                refused(&recipe, "p_scale", scales[p], formats[f]);
            }
        }
    }
    static const char *const bad[][3] = {
        /* settings, the knob that is named, the reason */
        {"cold_format=nvfp4 p_scale=row-tile-pow2", "p_scale", "cold_format nvfp4, expected auto|ue4m3|pow2"},
        {"cold_format=int8 p_scale=row-tile-pow2", "p_scale", "cold_format int8, expected auto|row-tile"},
        {"cold_format=nvfp4 p_scale=row-tile", "p_scale", "cold_format nvfp4, expected auto|ue4m3|pow2"},
        {"cold_format=int8 p_scale=pow2", "p_scale", "cold_format int8, expected auto|row-tile"},
        {"pv_format=e4m3 p_scale=static p_static_scale=448", "p_static_scale", "2^lazy_tau"},
        {"pv_format=e4m3 p_scale=static", "lazy_tau", "2^lazy_tau"},
        {"pv_format=nvfp4 p_scale=static lazy_tau=0 p_static_scale=7", "p_static_scale", "inside the format"},
        {"p_scale=ue4m3 p_static_scale=7", "p_static_scale", "p_scale=static"},
        {"qk_format=int8 qk_scale_granularity=16", "qk_scale_granularity", "16 with nvfp4"},
        {"qk_format=nvfp4 qk_scale_granularity=block", "qk_scale_granularity", "16 with nvfp4"},
        {"qk_format=mxfp4 qk_scale_granularity=row", "qk_scale_granularity", "32 with mxfp4"},
        {"pv_format=e4m3 v_scale_granularity=16", "v_scale_granularity", "16 with nvfp4"},
        {"pv_format=mxfp8 v_scale_granularity=channel", "v_scale_granularity", "32 with mxfp4 or mxfp8"},
        {"qk_format=int8 q_terms=2 qk_scale_granularity=thread", "q_terms", "scale per row"},
        {"pv_format=int8 v_range=2", "v_range", "pv_format=e4m3"},
        {"pv_format=int8 p_map=direct", "p_map", "thresholds"},
        {"pv_format=e4m3 p_map=direct p_scale=row-tile", "p_map", "p_scale=static"},
        {"pv_format=nvfp4 p_map=direct p_scale=two-level", "p_map", "exponential of the maximum"},
        {"pv_format=nvfp4 p_map=direct p_scale=pow2 p_sum=exact", "p_map", "never exists"},
        {"pv_format=e4m3 p_scale=row-tile p_phase=on", "p_phase", "p_scale row-tile, expected auto|off"},
        {"smooth_q=off q_mean=head", "q_mean", "smooth_q=on"},
        {"pv_flush=17", "pv_flush", "16, 32 or 64"},
        {"qk_format=int8 qk_accum=fp22", "qk_accum", "integer sums"},
        {"qk_format=e4m3 qk_accum=f16", "qk_accum", "overflow"},
        {"pv_format=int8 accum=fp22", "accum", "integer sums"},
        {"pv_format=e4m3 pv_accum=f16", "pv_accum", "65504"},
        {"pv_format=e4m3 pv_accum=f16 pv_flush=0 v_range=2.25", "pv_accum", "65504"},
        {"pv_format=nvfp4 pv_accum=f16", "pv_accum", "65504"},
        {"exact_accum=fp22", "exact_accum", "f64|f32|f16"},
        {"exact_accum=f16 exact_flush=48", "exact_flush", "16, 32 or 64"},
        {"exact_flush=64", "exact_flush", "exact_accum=f16"},
        {"softmax=whole force=high exact_accum=f16 exact_flush=64", "exact_flush", "softmax=online"},
        {"softmax=whole", "softmax", "force=high"},
        {"softmax=tree force=low", "softmax", "force=high"},
        {"softmax=tree force=high smooth_k=on", "softmax", "smooth_k=off"},
        {"softmax=tree force=high exact_accum=f16", "softmax", "FP32"},
        {"s_format=f16", "s_format", "softmax=whole"},
        {"p_format=bf16 softmax=tree force=high", "p_format", "softmax=whole"},
        {"force_sink=on", "force_sink", "selection"},
        {"force_diagonal=on select=none", "force_diagonal", "selection"},
        {"sub_block=12", "sub_block", "divisor"},
        {"verdict=lamp select=quest", "verdict", "no hot tiles"},
        {"verdict=lamp qk_format=int8", "verdict", "narrows sums"},
        {"verdict=lamp cold_format=e4m3", "verdict", "narrows sums"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const apa_recipe recipe = with(bad[i][0]);
        refused(&recipe, bad[i][1], "found", bad[i][2]);
    }
    static const char *const good[] = {
        "pv_format=e4m3 pv_accum=f16 v_range=2.25",
        "pv_format=e4m3 p_scale=static p_static_scale=28",
        "softmax=whole force=high s_format=bf16 p_format=f16",
        "softmax=tree eps=-1 exact_accum=f32",
        "select=local force_sink=on force_diagonal=on",
        "verdict=lamp qk_format=exact pv_format=exact",
        "pv_format=e4m3 p_map=direct p_scale=static lazy_tau=0",
        "accum=fp22 pv_format=e4m3",
        "pv_format=e4m3 p_scale=row-tile-pow2 p_phase=on",
        "smooth_q=on q_mean=head",
        "p_phase=on q_mean=head", /* an engine may prefer what they refine */
        "qk_format=exact qk_accum=f16",
        "exact_accum=f16 exact_flush=64",
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        const apa_recipe recipe = with(good[i]);
        char message[MESSAGE] = "";
        if (apa_recipe_check(&recipe, message, sizeof message) != APA_STATUS_OK) {
            fail_msg("%s: %s", good[i], message);
        }
    }
}

/* Resolved, every preset is still sound and holds nothing on auto but what an engine or the mask decides. */
static void resolved_presets_are_sound(void **state)
{
    (void)state;
    for (size_t i = 0; apa_recipe_preset_name(i); i++) {
        apa_recipe recipe = preset(apa_recipe_preset_name(i));
        char message[MESSAGE] = "", text[TEXT];
        apa_recipe_fill_auto(&recipe, 100, 1000, 64);
        if (apa_recipe_check(&recipe, message, sizeof message) != APA_STATUS_OK) {
            fail_msg("%s: %s", recipe.name, message);
        }
        for (int k = 0; k < KNOBS; k++) {
            assert_int_equal(apa_recipe_get(&recipe, expectations[k].name, text, sizeof text), APA_STATUS_OK);
            if (strcmp(text, "auto") == 0 && strcmp(expectations[k].name, "skip") != 0 &&
                strcmp(expectations[k].name, "early_rows") != 0) {
                fail_msg("%s leaves %s on auto", recipe.name, expectations[k].name);
            }
        }
        /* ... and resolving again changes nothing */
        apa_recipe again = recipe;
        apa_recipe_fill_auto(&again, 5, 70, 33);
        assert_memory_equal(&again, &recipe, sizeof recipe);
    }
}

/* Only plain recipes are plain; one knob beyond is found by name. */
static void what_is_beyond_the_walk_is_named(void **state)
{
    (void)state;
    static const char *const plain[] = {"",          "cold_format=nvfp4", "force=low",   "eps=0.3",  "cold_format=e4m3",
                                        "accum=f32", "exact_accum=f32",   "smooth_v=on", "q_terms=2"};
    static const char *const beyond[][2] = {
        {"eps_by=row", "eps_by"},
        {"qk_format=e4m3", "qk_format"},
        {"pv_format=exact", "pv_format"},
        {"exact_q=on", "exact_q"},
        {"exact_k=on", "exact_k"},
        {"exact_p=on", "exact_p"},
        {"exact_v=on", "exact_v"},
        {"qk_scale_granularity=warp", "qk_scale_granularity"},
        {"v_scale_granularity=channel", "v_scale_granularity"},
        {"cold_format=nvfp4 tensor_scale=none", "tensor_scale"},
        {"p_scale=static lazy_tau=0", "p_scale"},
        {"cold_format=e4m3 v_range=2.25", "v_range"},
        {"p_sum=exact", "p_sum"},
        {"cold_format=nvfp4 p_map=direct p_scale=pow2", "p_map"},
        {"p_phase=on", "p_phase"},
        {"smooth_q=on", "smooth_q"},
        {"q_mean=head", "q_mean"},
        {"cold_format=e4m3 qk_accum=fp22", "qk_accum"},
        {"cold_format=e4m3 pv_accum=fp22", "pv_accum"},
        {"pv_flush=32", "pv_flush"},
        {"exact_accum=f16", "exact_accum"},
        {"softmax=tree force=high", "softmax"},
        {"early_rows=1", "early_rows"},
        {"verdict=none", "verdict"},
        {"verdict=cold_budget", "verdict"},
        {"select=local verdict=mass", "select"},
    };
    const char *knob = NULL;
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
        apa_recipe recipe = with(plain[i]);
        apa_recipe_fill_auto(&recipe, 100, 1000, 64);
        if (apa_recipe_beyond_walk(&recipe, &knob)) {
            fail_msg("\"%s\": %s is beyond", plain[i], knob);
        }
    }
    for (size_t i = 0; i < sizeof beyond / sizeof beyond[0]; i++) {
        apa_recipe recipe = with(beyond[i][0]);
        apa_recipe_fill_auto(&recipe, 100, 1000, 64);
        assert_true(apa_recipe_beyond_walk(&recipe, &knob));
        assert_string_equal(knob, beyond[i][1]);
    }
}

static void numbers_do_not_depend_on_the_locale(void **state)
{
    (void)state;
    static const char *const comma[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "de_DE", "fr_FR"};
    bool found = false;
    for (size_t i = 0; i < 4 && !found; i++) {
        found = setlocale(LC_ALL, comma[i]) != NULL;
    }
    print_message("locale with a decimal comma: %s\n", found ? setlocale(LC_ALL, NULL) : "none here, skipped");
    apa_recipe recipe = preset("apa");
    assert_int_equal(apa_recipe_set(&recipe, "eps", "0.0125", NULL, 0), APA_STATUS_OK);
    assert_true(recipe.eps == 0.0125);
    assert_knob(&recipe, "eps", "0.0125");
    assert_int_equal(apa_recipe_set(&recipe, "eps", "0,0125", NULL, 0), APA_STATUS_INVALID_ARGUMENT);
    setlocale(LC_ALL, "C");
    /* Text holds every bit of a number. */
    const double awkward[] = {0.1, 1.0 / 3, DBL_MAX, -DBL_MAX, 5e-324, 0x1.23456789abcdfp-7};
    for (size_t i = 0; i < sizeof awkward / sizeof awkward[0]; i++) {
        char text[TEXT];
        recipe.eps = awkward[i];
        assert_int_equal(apa_recipe_get(&recipe, "eps", text, sizeof text), APA_STATUS_OK);
        recipe.eps = 0;
        assert_int_equal(apa_recipe_set(&recipe, "eps", text, NULL, 0), APA_STATUS_OK);
        assert_true(recipe.eps == awkward[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets_are_what_they_say),
        cmocka_unit_test(every_preset_is_sound_and_round_trips),
        cmocka_unit_test(the_table_is_complete_and_describes_itself),
        cmocka_unit_test(every_knob_takes_its_range),
        cmocka_unit_test(every_knob_refuses_garbage),
        cmocka_unit_test(toggles_take_the_usual_words),
        cmocka_unit_test(bad_calls_are_named),
        cmocka_unit_test(check_refuses_what_is_out_of_range),
        cmocka_unit_test(check_refuses_pairs_that_make_no_sense),
        cmocka_unit_test(resolved_presets_are_sound),
        cmocka_unit_test(what_is_beyond_the_walk_is_named),
        cmocka_unit_test(numbers_do_not_depend_on_the_locale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
