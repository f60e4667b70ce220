#!/usr/bin/env python3
"""How the error of FP32 softmax sums grows with the number of keys: key by key against a balanced tree of merged states. Fills
docs/reproduce/elsa.md. Every sum of the exact pass is rounded to FP32; inputs are FP32; truth is double.

Usage: bench/reproduce/elsa.py [--write]"""
import math

import lab
import svg

LENGTHS, ROWS, D, U = (1024, 4096, 16384, 65536), 16, 32, 2.0 ** -24


def inputs_of(page, keys, sign):
    rng = lab.rng(keys)
    v = lab.normals(rng, keys * D)
    if sign == "one":
        v = lab.array.array("f", (abs(x) for x in v))
    folder = page.write_arrays("elsa", q=((1, 1, ROWS, D), lab.normals(rng, ROWS * D)), k=((1, 1, keys, D), lab.normals(rng, keys * D)),
                               v=((1, 1, keys, D), v))
    return page.arrays(folder, causal=False)


def growth(page):
    rows, series = [], {}
    for sign, label in (("one", "values of one sign"), ("both", "values of both signs")):
        for keys in LENGTHS:
            inputs, cells = inputs_of(page, keys, sign), [label, keys]
            label = ""
            for name, method, settings in (("key by key", "exact", ("exact_accum=f32",)), ("tree", "elsa", ())):
                r = page.evaluate(inputs, method, "--engine", "reference", settings=settings)
                cells += [f"{r['rel_l2']:.2e}", f"{r['rel_l2_max']:.2e}", f"{r['rel_l2'] / U:.1f} u"]
                series.setdefault((name, sign), []).append((keys, r["rel_l2"]))
            rows.append(cells + [f"{series['key by key', sign][-1][1] / series['tree', sign][-1][1]:.1f}x"])
    page.put("growth", lab.table(["", "keys", "key by key: rel L2", "worst row", "", "tree: rel L2", "worst row", "", "ratio"], rows))
    slopes = []
    for (name, sign), points in series.items():
        slope = math.log(points[-1][1] / points[0][1]) / math.log(points[-1][0] / points[0][0])
        slopes.append(f"{name}, {sign} sign{'s' if sign == 'both' else ''}: n^{slope:.2f}")
    page.put("slopes", "Slope from the first length to the last: " + "; ".join(slopes) + ".")
    page.plot("elsa-growth", svg.chart("Error of FP32 sums", "keys", "relative L2", [
        (f"{name}, {sign} sign{'s' if sign == 'both' else ''}", points) for (name, sign), points in series.items()], log_x=True, log_y=True,
        x_ticks=LENGTHS, legend="left"))


def main():
    page = lab.Lab("elsa", __doc__)
    growth(page)


if __name__ == "__main__":
    main()
