/* The command's results: synthetic inputs, outputs from every kind of file, the figures of eval and bench. */
#include "support/command.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void generators(void **unused)
{
    (void)unused;
    static const char *const kinds[] = {"randn", "outliers", "sink-tail", "topics"};
    for (int i = 0; i < 4; i++) {
        command_works(command_run("gen %s --out deep/er/a --shape 2,4,2,33,70,48,40 --seed 5", kinds[i]));
        command_works(command_run("gen %s --out b --shape 2,4,2,33,70,48,40 --seed=5 --dtype f64", kinds[i]));
        command_works(command_run("gen %s --out c --shape 2,4,2,33,70,48,40 --seed 6", kinds[i]));
        static const char *const names[] = {"q", "k", "v"};
        for (int t = 0; t < 3; t++) {
            char a[64], b[64], c[64];
            snprintf(a, sizeof a, "deep/er/a/%s.npy", names[t]);
            snprintf(b, sizeof b, "b/%s.npy", names[t]);
            snprintf(c, sizeof c, "c/%s.npy", names[t]);
            apa_array x = command_load(a), y = command_load(b), z = command_load(c);
            assert_int_equal(x.dims, 4);
            assert_int_equal(x.shape[0], 2);
            assert_int_equal(x.shape[1], t == 0 ? 4 : 2);
            assert_int_equal(x.shape[2], t == 0 ? 33 : 70);
            assert_int_equal(x.shape[3], t == 2 ? 40 : 48);
            int64_t different = 0;
            for (int64_t j = 0; j < x.elements; j++) {
                assert_true(fabs(command_at(&x, j) - command_at(&y, j)) <=
                            fabs(command_at(&y, j)) * 0x1p-11 + 0x1p-24); /* f16 of the same value */
                different += command_at(&x, j) != command_at(&z, j);
            }
            assert_true(different > x.elements / 2);
            apa_array_free(&x);
            apa_array_free(&y);
            apa_array_free(&z);
        }
    }
    assert_int_equal(system("rm -r deep b c"), 0);
    command_works(command_run("gen randn --out r --shape 1,2,2,2000,2000,16 --dtype f64"));
    apa_array k = command_load("r/k.npy");
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < k.elements; i++) {
        sum += command_at(&k, i);
        squares += command_at(&k, i) * command_at(&k, i);
    }
    assert_true(fabs(sum / (double)k.elements) < 0.02); /* 5 sigma: 1/sqrt(64000) is .004 */
    assert_true(fabs(squares / (double)k.elements - 1) < 0.03);
    apa_array_free(&k);
    assert_int_equal(system("rm -r r"), 0);
}

/* Plain attention in double of the generated files: for every row the sink's mass and the cosine of output and sink
 * value. */
static void sink_tail(void **unused)
{
    (void)unused;
    enum { H = 2, Sq = 8, Skv = 16384, D = 64 };
    static double p[Skv];
    command_works(command_run("gen sink-tail --out st --shape 1,%d,1,%d,%d,%d", H, Sq, Skv, D));
    apa_array q = command_load("st/q.npy"), k = command_load("st/k.npy"), v = command_load("st/v.npy");
    static double kd[Skv * D], vd[Skv * D], qd[H * Sq * D];
    apa_array_get_f64(&q, 0, q.elements, qd);
    apa_array_get_f64(&k, 0, k.elements, kd);
    apa_array_get_f64(&v, 0, v.elements, vd);
    for (int row = 0; row < H * Sq; row++) {
        const int visible = Skv - Sq + row % Sq + 1;
        double sum = 0, out[D] = {0}, dot = 0, out_norm = 0, sink_norm = 0, second = 0;
        for (int j = 0; j < visible; j++) {
            double score = 0;
            for (int d = 0; d < D; d++)
                score += qd[row * D + d] * kd[j * D + d] / 8;
            p[j] = exp(score);
            sum += p[j];
            if (j > 0)
                second = fmax(second, p[j]);
            for (int d = 0; d < D; d++)
                out[d] += p[j] * vd[j * D + d];
        }
        for (int d = 0; d < D; d++) {
            dot += out[d] * vd[d];
            out_norm += out[d] * out[d];
            sink_norm += vd[d] * vd[d];
        }
        assert_true(p[0] / sum > 0.85 && p[0] / sum < 0.95);
        assert_true(dot / sqrt(out_norm * sink_norm) < -0.9);
        assert_true(second / p[0] < 0x1p-14);
    }
    apa_array_free(&q);
    apa_array_free(&k);
    apa_array_free(&v);
    assert_int_equal(system("rm -r st"), 0);
}

/* Plain attention over the files' values against out and lse, causal with an offset and a left window (-1: none). */
static void check_output(const char *from, const char *out_path, const char *lse_path, int64_t offset, int64_t window,
                         double tolerance)
{
    char path[3][64];
    for (int i = 0; i < 3; i++)
        snprintf(path[i], sizeof path[i], "%s/%c.npy", from, "qkv"[i]);
    apa_array q = command_load(path[0]), k = command_load(path[1]), v = command_load(path[2]),
              out = command_load(out_path), lse = command_load(lse_path);
    const int64_t Hq = q.shape[1], Sq = q.shape[2], D = q.shape[3], G = Hq / k.shape[1], Skv = k.shape[2];
    assert_int_equal(out.elements, q.elements);
    assert_int_equal(lse.elements, Hq * Sq);
    for (int64_t h = 0; h < Hq; h++)
        for (int64_t i = 0; i < Sq; i++) {
            double sum = 0, sums[64] = {0};
            for (int64_t j = 0; j < Skv && j <= i + offset; j++) {
                double score = 0;
                if (window >= 0 && j < i + offset - window)
                    continue;
                for (int64_t d = 0; d < D; d++)
                    score += command_at(&q, (h * Sq + i) * D + d) * command_at(&k, (h / G * Skv + j) * D + d);
                score = exp(score / sqrt((double)D));
                sum += score;
                for (int64_t d = 0; d < D; d++)
                    sums[d] += score * command_at(&v, (h / G * Skv + j) * D + d);
            }
            const double found = command_at(&lse, h * Sq + i);
            assert_true(sum == 0 ? found == -INFINITY : fabs(found - log(sum)) <= tolerance);
            for (int64_t d = 0; d < D; d++)
                assert_true(fabs(command_at(&out, (h * Sq + i) * D + d) - (sum == 0 ? 0 : sums[d] / sum)) <= tolerance);
        }
    apa_array *const all[5] = {&q, &k, &v, &out, &lse};
    for (int i = 0; i < 5; i++)
        apa_array_free(all[i]);
}

static void runs(void **unused)
{
    (void)unused;
    command_works(command_run("run " IN "--out o.npy --lse l.npy --method exact --engine reference"));
    assert_non_null(strstr(command_out, "engine     reference"));
    check_output("in", "o.npy", "l.npy", 30, -1, 1e-6);
    command_works(command_run("run " IN "--out o.npy --lse l.npy --method exact"));
    check_output("in", "o.npy", "l.npy", 30, -1, 1e-5);
    command_works(command_run("run " IN "--out o.npy --lse l.npy"));
    check_output("in", "o.npy", "l.npy", 30, -1, 0.1);
    command_works(command_run("run " IN "--out o.npy --lse l.npy --method exact --q-offset -5 --window 7,0"));
    check_output("in", "o.npy", "l.npy", -5, 7, 1e-5);
    command_works(command_run("run --q f32/q.npy --k f32/k.npy --v f32/v.npy --out o.npy --lse l.npy --method exact"));
    check_output("f32", "o.npy", "l.npy", 30, -1, 1e-5);
    command_works(command_run(
        "run --q f64/q.npy --k f64/k.npy --v f64/v.npy --out o.npy --lse l.npy --method exact --out-dtype f64"));
    check_output("f64", "o.npy", "l.npy", 30, -1, 1e-12);
    command_works(command_run("run " IN "--out o.npy --lse l.npy --method exact --out-dtype f16"));
    check_output("in", "o.npy", "l.npy", 30, -1, 2e-3);
    apa_array half = command_load("o.npy"), lse = command_load("l.npy");
    assert_int_equal(half.type, APA_ARRAY_F16);
    assert_int_equal(lse.type, APA_ARRAY_F32);
    assert_int_equal(lse.dims, 3);
    apa_array_free(&half);
    apa_array_free(&lse);
    for (int threads = 1; threads <= 3; threads++) {
        command_works(command_run("run " IN "--out t%d.npy --threads %d", threads, threads));
        command_same_file("t1.npy", threads == 1 ? "t1.npy" : threads == 2 ? "t2.npy" : "t3.npy");
    }
    assert_int_equal(system("rm o.npy l.npy t1.npy t2.npy t3.npy"), 0);
}

/* Moves axes: [B,H,S,D] → [S,H,D], as f16 codes. */
static void put_nhd(const char *from, const char *to)
{
    char message[256];
    apa_array a = command_load(from), b;
    const int64_t H = a.shape[1], S = a.shape[2], D = a.shape[3], shape[3] = {S, H, D};
    assert_int_equal(apa_array_allocate(&b, APA_ARRAY_F16, 3, shape), APA_STATUS_OK);
    for (int64_t h = 0; h < H; h++)
        for (int64_t s = 0; s < S; s++)
            memcpy((uint16_t *)b.data + (s * H + h) * D, (uint16_t *)a.data + (h * S + s) * D, (size_t)D * 2);
    assert_int_equal(apa_array_write_npy(to, &b, message, sizeof message), APA_STATUS_OK);
    apa_array_free(&a);
    apa_array_free(&b);
}

/* The same inputs as nhd arrays, as a dump and as .safetensors give the same output. */
static void other_containers(void **unused)
{
    (void)unused;
    command_works(command_run("run " IN "--out hnd.npy --lse hnd-lse.npy"));
    put_nhd("in/q.npy", "nq.npy");
    put_nhd("in/k.npy", "nk.npy");
    put_nhd("in/v.npy", "nv.npy");
    command_works(command_run("run --q nq.npy --k nk.npy --v nv.npy --layout nhd --out nhd.npy --lse nhd-lse.npy"));
    apa_array a = command_load("hnd.npy"), b = command_load("nhd.npy");
    const int64_t H = a.shape[1], S = a.shape[2], D = a.shape[3];
    assert_int_equal(b.dims, 3);
    assert_int_equal(b.shape[0], S);
    assert_int_equal(b.shape[1], H);
    for (int64_t h = 0; h < H; h++)
        for (int64_t s = 0; s < S; s++)
            for (int64_t d = 0; d < D; d++)
                assert_true(command_at(&a, (h * S + s) * D + d) == command_at(&b, (s * H + h) * D + d));
    command_same_file("hnd-lse.npy", "nhd-lse.npy");
    apa_array_free(&a);
    apa_array_free(&b);

    apa_array q = command_load("nq.npy"), k = command_load("nk.npy"), v = command_load("nv.npy");
    const int32_t header[6] = {(int32_t)q.shape[0], (int32_t)k.shape[0], (int32_t)q.shape[1],
                               (int32_t)k.shape[1], (int32_t)q.shape[2], (int32_t)(k.shape[0] - q.shape[0])};
    FILE *file = fopen("d.bin", "wb");
    fwrite(header, 4, 6, file);
    fwrite(q.data, 2, (size_t)q.elements, file);
    fwrite(k.data, 2, (size_t)k.elements, file);
    fwrite(v.data, 2, (size_t)v.elements, file);
    fclose(file);
    command_works(command_run("run --dump d.bin --out dump.npy"));
    command_same_file("hnd.npy", "dump.npy");
    command_works(command_run("run --dump d.bin --q-offset 0 --out dump.npy"));
    command_works(command_run("run " IN "--q-offset 0 --out hnd0.npy"));
    command_same_file("hnd0.npy", "dump.npy");
    command_fails(command_run("run --dump d.bin --out d.bin"), 2, "is the input of --dump");

    char json[512];
    const long long nq = (long long)q.elements * 2, nk = (long long)k.elements * 2;
    const int length = snprintf(
        json, sizeof json,
        "{\"q\":{\"dtype\":\"F16\",\"shape\":[%lld,%lld,%lld],\"data_offsets\":[0,%lld]},\"k\":{\"dtype\":\"F16\","
        "\"shape\":[%lld,%lld,%lld],\"data_offsets\":[%lld,%lld]},\"v\":{\"dtype\":\"F16\",\"shape\":[%lld,%lld,%lld],"
        "\"data_offsets\":[%lld,%lld]}}",
        (long long)q.shape[0], (long long)q.shape[1], (long long)q.shape[2], nq, (long long)k.shape[0],
        (long long)k.shape[1], (long long)k.shape[2], nq, nq + nk, (long long)k.shape[0], (long long)k.shape[1],
        (long long)k.shape[2], nq + nk, nq + 2 * nk);
    const uint64_t bytes = (uint64_t)length;
    file = fopen("all.safetensors", "wb");
    fwrite(&bytes, 8, 1, file);
    fwrite(json, 1, (size_t)length, file);
    fwrite(q.data, 2, (size_t)q.elements, file);
    fwrite(k.data, 2, (size_t)k.elements, file);
    fwrite(v.data, 2, (size_t)v.elements, file);
    fclose(file);
    command_works(
        command_run("run --q all.safetensors:q --k all.safetensors:k --v all.safetensors:v --layout nhd --out st.npy"));
    command_same_file("nhd.npy", "st.npy");
    command_fails(
        command_run("run --q all.safetensors --k all.safetensors:k --v all.safetensors:v --layout nhd --out x.npy"), 2,
        "holds 3 tensors, expected FILE:NAME with one of: k, q, v");
    command_works(command_run("info --q all.safetensors --dump d.bin --k in/k.npy"));
    assert_non_null(strstr(command_out, "  k f16 [70, 2, 48]\n"));
    assert_non_null(strstr(command_out, "  q f16 [1, 4, 40, 48] (query 0 at position 30)\n"));
    assert_non_null(strstr(command_out, "  array f16 [1, 2, 70, 48]\n"));
    apa_array_free(&q);
    apa_array_free(&k);
    apa_array_free(&v);
    assert_int_equal(system("rm hnd*.npy nhd*.npy n?.npy d.bin dump.npy all.safetensors st.npy"), 0);
}

/* ------------------------------------------------------------------------------- eval, bench, info */

static void check_eval_object(const json_t *object)
{
    static const char *const numbers[] = {
        "pairs",          "pooled_cos",     "mean_cos",         "min_cos",      "lt_0_99",  "lt_0_9",
        "lt_0",           "rel_l2",         "rel_l2_max",       "max_abs",      "mean_abs", "lse_max_abs",
        "hot_share",      "skip_share",     "prep_ms",          "attention_ms", "exact_ms", "speedup",
        "norm_ratio_min", "norm_ratio_max", "candidates_share", "repeats",      "threads",  "workspace_bytes",
        "non_finite"};
    static const char *const texts[] = {"method", "engine", "kernel", "isa", "dtype"};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        assert_true(isfinite(command_number(object, numbers[i])));
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        assert_true(json_is_string(json_object_get(object, texts[i])));
    assert_int_equal(json_array_size(json_object_get(object, "min_cos_pair")), 3);
    assert_int_equal(json_array_size(json_object_get(object, "rel_l2_max_pair")), 3);
    assert_int_equal(command_number(json_object_get(object, "shape"), "Skv"), 70);
    const json_t *recipe = json_object_get(object, "recipe");
    for (size_t i = 0; apa_recipe_knob_at(i) != NULL; i++) {
        const json_t *value = json_object_get(recipe, apa_recipe_knob_at(i)->name);
        assert_true(json_is_number(value) || json_is_string(value));
        assert_false(json_is_string(value) && strcmp(json_string_value(value), "auto") == 0); /* as run */
    }
    assert_int_equal(command_number(object, "pairs"), 160);
}

static void evals(void **unused)
{
    (void)unused;
    command_works(command_run("eval " IN "--json e.json"));
    assert_non_null(strstr(command_out, "worst pair     batch 0, head "));
    static char text[1 << 16];
    command_read_text("e.json", text, sizeof text);
    json_t *one = command_parse(text);
    check_eval_object(one);
    assert_string_equal(json_string_value(json_object_get(one, "method")), "apa");
    assert_true(command_number(one, "min_cos") > 0.99 && command_number(one, "rel_l2") < 0.1);
    json_decref(one);

    command_works(command_run("eval " IN "--method exact --engine reference --json -"));
    one = command_parse(command_out); /* standard output holds JSON alone */
    check_eval_object(one);
    assert_true(command_number(one, "rel_l2") < 1e-6 && command_number(one, "hot_share") == 1);
    assert_int_equal(command_number(one, "repeats"), 1);
    json_decref(one);

    command_works(command_run("eval " IN "--compare exact,apa,cold --json e.json --repeats 2"));
    assert_non_null(strstr(command_out, "pooled cos"));
    command_read_text("e.json", text, sizeof text);
    json_t *three = command_parse(text);
    static const char *const names[] = {"exact", "apa", "cold"};
    assert_int_equal(json_array_size(three), 3);
    for (size_t i = 0; i < 3; i++) {
        const json_t *object = json_array_get(three, i);
        check_eval_object(object);
        assert_string_equal(json_string_value(json_object_get(object, "method")), names[i]);
        assert_int_equal(command_number(object, "repeats"), 2);
    }
    assert_true(command_number(json_array_get(three, 0), "rel_l2") <
                command_number(json_array_get(three, 2), "rel_l2"));
    assert_true(command_number(json_array_get(three, 2), "hot_share") == 0);
    json_decref(three);

    /* knobs arrive */
    command_works(command_run("eval " IN "--eps 2 --set group=8 --set second_look=off --engine reference --json -"));
    one = command_parse(command_out);
    assert_true(command_number(one, "hot_share") == 0);
    const json_t *recipe = json_object_get(one, "recipe");
    assert_true(command_number(recipe, "eps") == 2 && command_number(recipe, "group") == 8);
    assert_string_equal(json_string_value(json_object_get(recipe, "second_look")), "off");
    json_decref(one);
    assert_int_equal(unlink("e.json"), 0);
}

/* A row that sees nothing, and infinities in V: the figures that are not finite are null. */
static void eval_null(void **unused)
{
    (void)unused;
    char message[256];
    command_works(command_run("eval " IN "--q-offset -100 --json -"));
    json_t *none = command_parse(command_out);
    assert_true(command_number(none, "mean_cos") == 1 && command_number(none, "rel_l2") == 0 &&
                command_number(none, "lse_max_abs") == 0);
    assert_true(command_number(none, "hot_share") == 0);
    json_decref(none);
    /* an LSE of some 1e300 is beyond the f32 of the output */
    command_works(command_run("eval " IN "--scale 1e300 --method exact --engine reference --json -"));
    none = command_parse(command_out);
    assert_true(json_is_null(json_object_get(none, "lse_max_abs")));
    json_decref(none);
    apa_array v =
        command_load("f32/v.npy"); /* 1e39 of f64 is beyond f32: the output overflows where the truth does not */
    apa_array wide;
    assert_int_equal(apa_array_allocate(&wide, APA_ARRAY_F64, v.dims, v.shape), APA_STATUS_OK);
    for (int64_t i = 0; i < v.elements; i++)
        ((double *)wide.data)[i] = 1e39;
    assert_int_equal(apa_array_write_npy("wide.npy", &wide, message, sizeof message), APA_STATUS_OK);
    apa_array_free(&wide);
    apa_array_free(&v);
    command_works(command_run("run --q f64/q.npy --k f64/k.npy --v wide.npy --out o.npy --method exact"));
    apa_array out = command_load("o.npy");
    assert_true(isinf(command_at(&out, 0)));
    apa_array_free(&out);
    assert_int_equal(system("rm wide.npy o.npy"), 0);
}

static void benches(void **unused)
{
    (void)unused;
    static const char *const keys[] = {"total_ms",     "exact_ms",   "ratio",   "prep_ms",
                                       "attention_ms", "prep_share", "gflops",  "exact_gflops",
                                       "hot_share",    "skip_share", "threads", "repeats"};
    static const char *const sources[] = {"--shape 1,4,2,40,70,48",
                                          "--shape 1,4,2,40,70,48,16 --kind topics --dtype bf16",
                                          "--shape 1,4,2,40,70,48 --dtype f32 --no-causal", IN};
    for (size_t s = 0; s < sizeof sources / sizeof sources[0]; s++) {
        command_works(command_run("bench %s --repeats 3 --json -", sources[s]));
        json_t *object = command_parse(command_out);
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            assert_true(isfinite(command_number(object, keys[i])));
        const json_t *total = json_object_get(object, "total");
        assert_true(command_number(total, "min") <= command_number(total, "median") &&
                    command_number(total, "median") <= command_number(total, "max"));
        assert_true(command_number(total, "iqr") >= 0 && command_number(object, "ratio") > 0);
        /* visible keys of 40 rows at offset 30, or all of 70; 4 heads */
        const double pairs = 4.0 * (s == 2 ? 40 * 70 : 40 * 30 + 820), dims = s == 1 ? 48 + 16 : 96;
        const double expected = 2 * dims * pairs / (command_number(object, "total_ms") * 1e6);
        assert_true(fabs(command_number(object, "gflops") / expected - 1) < 1e-9);
        assert_true(json_is_string(json_object_get(object, "cpu")));
        json_decref(object);
    }
    command_works(command_run("bench --shape 1,4,2,40,70,48 --repeats 1"));
    assert_non_null(strstr(command_out, "x as fast as exact"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generators),       cmocka_unit_test(sink_tail), cmocka_unit_test(runs),
        cmocka_unit_test(other_containers), cmocka_unit_test(evals),     cmocka_unit_test(eval_null),
        cmocka_unit_test(benches),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
