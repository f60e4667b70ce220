#!/usr/bin/env python3
"""P-Cast: what rounding P to E4M3 with a static scale loses, by the order of the tiles and the scale S. Fills
docs/reproduce/pcast.md and its plots.

The scores have to be N(0, 1) with four sink keys raised by a gap Δ. Queries are normals in 63 channels, scaled to a norm of
√63, keys normals times √(64/63), so that with the factor 1/√64 the scores of a query are N(0, 1); channel 63 holds √64 in every
query and Δ in the sink keys (times √64/√64). All in float32, not causal.

Which P round to zero is read off the library's own outputs: KV head t has the identity in the rows of tile t as its V and zeros
elsewhere, all heads the same Q and K. Output channel c of head t is then the rounded P of key 64t + c over the row sum.

Usage: bench/reproduce/pcast.py [--write]"""
import array
import math

import lab
import svg

ROWS, KEYS, MSE_KEYS, D, SINKS = 256, 1024, 4096, 64, 4
GAPS = list(range(2, 15))
CASES = [("forward", 1), ("forward", 256), ("forward", 448), ("reverse", 1), ("reverse", 256), ("reverse", 448)]


def phi(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


def make_query(rng):
    row = [rng.gauss(0, 1) for _ in range(D - 1)]
    norm = math.sqrt((D - 1) / sum(x * x for x in row))
    return [x * norm for x in row] + [math.sqrt(D)]


def make_keys(rng, count):
    factor = math.sqrt(D / (D - 1))
    return [[factor * rng.gauss(0, 1) for _ in range(D - 1)] + [0.0] for _ in range(count)]


def flat(rows):
    return array.array("f", (x for row in rows for x in row))


def lift(keys, gap):
    return [row[:-1] + [float(gap)] if j < SINKS else row for j, row in enumerate(keys)]


def identity_tiles(tiles):
    v = array.array("f", bytes(4 * tiles * KEYS * D))
    for t in range(tiles):
        for c in range(D):
            v[t * KEYS * D + (t * D + c) * D + c] = 1.0
    return v


def fractions(page, q, k, gap, v):
    """For each case: zeros among keys that are no sink, the same without tile 0, and Φ over each row's own sink maximum."""
    tiles = KEYS // 64
    keys = flat(lift(k, gap))
    folder = page.write_arrays("pcast_zero", q=((1, tiles, ROWS, D), flat(q) * tiles), k=((1, tiles, KEYS, D), keys * tiles),
                               v=((1, tiles, KEYS, D), v))
    tops = [max(sum(a * b for a, b in zip(row, key)) / math.sqrt(D) for key in lift(k[:SINKS], gap)) for row in q]
    found = {}
    for order, scale in CASES:
        out = page.work("pcast_out.npy")
        page.apa("run", *page.arrays(folder, causal=False), "--method", "pcast", "--set", f"order={order}", "--set",
                 f"p_static_scale={scale}", "--out", out)
        _, o = lab.read_npy(out)
        first = sum(1 for i in range(ROWS) for c in range(SINKS, D) if o[i * D + c] == 0)
        rest = sum(1 for x in o[ROWS * D:] if x == 0)
        average = sum(phi(top - 10 * math.log(2) - math.log(scale)) for top in tops) / ROWS
        closed = phi(gap + 1 - 10 * math.log(2) - math.log(scale))
        found[order, scale] = ((first + rest) / (ROWS * (KEYS - SINKS)), rest / (ROWS * (KEYS - 64)), average, closed)
    return found


def fraction(page):
    rng = lab.rng(2026)
    q, k, v = [make_query(rng) for _ in range(ROWS)], make_keys(rng, KEYS), identity_tiles(KEYS // 64)
    rows, series, worst, worst_closed, outside = [], {}, 0, 0, {}
    for gap in GAPS:
        found = fractions(page, q, k, gap, v)
        cells = [gap]
        for scale in (1, 256, 448):
            all_zero, _, average, closed = found["forward", scale]
            cells += [f"{all_zero:.4f}", f"{average:.4f}", f"{closed:.4f}"]
            worst, worst_closed = max(worst, abs(all_zero - average)), max(worst_closed, abs(all_zero - closed))
            series.setdefault((scale, "measured"), []).append((gap, all_zero))
            series.setdefault((scale, "closed form"), []).append((gap, closed))
        for scale in (1, 256, 448):
            cells.append(f"{found['reverse', scale][0]:.4f}")
            outside[scale] = max(outside.get(scale, 0), found["reverse", scale][1])
        rows.append(cells)
    head = ["Δ"] + [f"S {s} {what}" for s in (1, 256, 448) for what in ("forward", "Φ averaged", "closed form")]
    page.put("fraction", lab.table(head + [f"S {s} reverse" for s in (1, 256, 448)], rows))
    page.put("fraction-says", f"Largest distance of the measured fraction (forward) from Φ averaged over each row's own sink maximum: "
             f"**{worst:.4f}**; from the closed form: {worst_closed:.4f}. Reverse order, largest fraction outside the sink's own tile over "
             "all Δ: " + ", ".join(f"S {s}: {x:.6f}" for s, x in sorted(outside.items())) + ".")
    page.plot("pcast-fraction", svg.chart("P that rounds to zero, forward order", "gap Δ of the sink (natural units)", "fraction",
              [(f"S = {s}, {what}", points, "dots" if what == "measured" else "dash") for (s, what), points in series.items()],
              x_ticks=GAPS[::2], y_range=(0, 1), legend="left"))


def error(page):
    rng = lab.rng(77)
    q, k = [make_query(rng) for _ in range(ROWS)], make_keys(rng, MSE_KEYS)
    v = lab.normals(rng, MSE_KEYS * D)
    rows, series = [], {case: [] for case in CASES}
    for gap in GAPS:
        folder = page.write_arrays("pcast_mse", q=((1, 1, ROWS, D), flat(q)), k=((1, 1, MSE_KEYS, D), flat(lift(k, gap))),
                                   v=((1, 1, MSE_KEYS, D), v))
        found = page.sweep(page.arrays(folder, causal=False), "--method", "pcast", "--over", "order=forward,reverse", "--over",
                           "p_static_scale=1,256,448", "--device", "rtx5090")
        truth = page.work("pcast_truth.npy")
        page.apa("run", *page.arrays(folder, causal=False), "--method", "exact", "--out", truth)
        _, o = lab.read_npy(truth)
        power = math.fsum(x * x for x in o) / len(o)
        mse = {case: row["rel_l2"] ** 2 * power for case, row in zip(CASES, found)}
        for case in CASES:
            series[case].append((gap, mse[case]))
        rows.append([gap] + [f"{mse[case]:.2e}" for case in CASES] + [f"{mse['forward', 1] / mse['reverse', 256]:.2f}",
                    f"{mse['forward', 1] / mse['reverse', 1]:.2f}", f"{mse['forward', 1] / mse['forward', 256]:.2f}"])
    page.put("mse", lab.table(["Δ"] + [f"{order} S {scale}" for order, scale in CASES] +
                              ["fwd 1 / rev 256", "fwd 1 / rev 1", "fwd 1 / fwd 256"], rows))
    page.plot("pcast-mse", svg.chart("MSE of the output", "gap Δ of the sink (natural units)", "MSE",
              [(f"{order}, S = {scale}", points) for (order, scale), points in series.items()], log_y=True, x_ticks=GAPS[::2], legend="bottom"))


SINK_EXACT = ("force=none", "verdict=none", "select=local", "fraction=0", "force_sink=on")


def sink(page):
    """The same with the sink's tile exact, as a verdict or a selection would have it."""
    rng = lab.rng(77)
    q, k = [make_query(rng) for _ in range(ROWS)], make_keys(rng, MSE_KEYS)
    v, rows = lab.normals(rng, MSE_KEYS * D), []
    for gap in (4, 6, 8, 10, 14):
        folder = page.write_arrays("pcast_sink", q=((1, 1, ROWS, D), flat(q)), k=((1, 1, MSE_KEYS, D), flat(lift(k, gap))),
                                   v=((1, 1, MSE_KEYS, D), v))
        cells = [gap]
        for settings in ((), SINK_EXACT):
            found = page.sweep(page.arrays(folder, causal=False), "--method", "pcast", "--over", "order=forward,reverse", "--over",
                               "p_static_scale=1,256", "--device", "rtx5090", settings=settings)
            cells += [f"{found[i]['rel_l2']:.2e}" for i in (0, 3)]
        rows.append(cells)
    page.put("sink", lab.table(["Δ", "all cold: forward S 1", "reverse S 256", "sink tile exact: forward S 1", "reverse S 256"], rows))


def step(scale):
    """dp(S): the coarsest distance of neighbouring E4M3 codes that a P of (0, 1] meets, in units of P. P·S goes up to S, and the
    codes of (2^e, 2^(e+1)] are 2^(e-3) apart; S itself belongs to the interval that ends in it."""
    return 2.0 ** (math.ceil(math.log2(scale)) - 1 - 3) / scale


def coverage(scale):
    """Natural-log width of the P range (0, 1] that E4M3 holds as normal numbers under the scale S: from 2^-6/S to 1."""
    return math.log(scale) + 6 * math.log(2)


def scale_table(page):
    rows = []
    for scale in (1, 2, 16, 64, 128, 129, 192, 224, 240, 256, 257, 288, 320, 384, 448):
        exact = math.log2(scale).is_integer()
        rows.append([scale, f"2^{math.log2(step(scale)):.3f}", f"{step(scale):.5f}", f"{coverage(scale):.3f}",
                     f"{coverage(scale) / math.log(2):.2f}", f"2^{-10 - math.log2(scale):.2f}", "yes" if exact else "no"])
    page.put("scale", lab.table(["S", "dp(S)", "as a number", "normal range, nats", "binades", "rounds to zero up to", "exact to scale by"], rows))
    fine = [s / 2 for s in range(64, 897)]
    page.plot("pcast-step", svg.chart("Coarsest step of P: dp(S)", "S", "dp(S)", [("dp(S)", [(s, step(s)) for s in fine], "line"),
              ("powers of two", [(s, step(s)) for s in (32, 64, 128, 256)], "dots"), ("448", [(448, step(448))], "dots")], y_range=(0.05, 0.15)))
    page.plot("pcast-coverage", svg.chart("Normal range of P in E4M3", "S", "ln(1 / smallest normal P)", [("6 ln 2 + ln S", [
              (s, coverage(s)) for s in fine], "line"), ("powers of two", [(s, coverage(s)) for s in (32, 64, 128, 256)], "dots"),
              ("448", [(448, coverage(448))], "dots")], legend="left"))


def main():
    page = lab.Lab("pcast", __doc__)
    for name, part in (("fraction", fraction), ("mse", error), ("sink", sink), ("scale", scale_table)):
        if page.wants(name):
            part(page)


if __name__ == "__main__":
    main()
