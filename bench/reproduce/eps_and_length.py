#!/usr/bin/env python3
"""What ε buys, and how hot share and modelled gain go with the length of the context, on real layers. Fills
docs/reproduce/eps-and-length.md. The parts after the first want the dumps of `data/make_dumps.sh --out dumps`, and those of
`data/make_dumps.sh --out dumps/gemma3 --model gemma3`.

Usage: bench/reproduce/eps_and_length.py [--dumps dumps] [--write]"""
import os

import lab
import svg

LENGTHS, LAYERS, QUERIES, CHUNK = (2048, 8192, 12288, 32768), (2, 7, 12, 17, 22, 27), 32, 2048

METHODS = ("apa-0.6, ε .005", "apa-int8, ε by its rule", "apa-int8, ε .005")


def ratio(cost, queries):
    """Modelled gain over exact for a chunk of CHUNK queries: prep is paid once for the keys, the rest per query."""
    times = CHUNK / queries
    return cost["exact_ms"] * times / (cost["prep_ms"] + cost["attention_ms"] * times)


def tradeoff(page):
    inputs = page.slice(lab.SAMPLE, 128)
    for method, eps in (("apa-0.6", "0,0.001,0.002,0.005,0.01,0.02,0.05,1"), ("apa-int8", "0,0.002,0.005,0.01,0.02,0.04,0.08,1"),
                        ("apa-nvfp4", "0,0.001,0.002,0.005,0.01,0.02,0.05,1")):
        rows = page.sweep(inputs, "--engine", "reference", "--method", method, "--over", "eps=" + eps, "--device", "rtx5090,h200,zen4")
        page.put(method, lab.table(["ε", "hot", "rel L2", "worst pair", "min cos", "rtx5090", "h200", "zen4"], [
            [r["knobs"]["eps"], lab.percent(r["hot_share"]), f"{r['rel_l2']:.2e}", f"{r['rel_l2_max']:.2e}", f"{r['min_cos']:.6f}"] +
            [f"{ratio(r['cost'][d], 128):.2f}x" for d in ("rtx5090", "h200", "zen4")] for r in rows]))


def runs(page, keys, model, layers):
    """Method label -> one row of figures a layer, for the last QUERIES queries of all heads."""
    found = {label: [] for label in METHODS}
    for layer in layers:
        path = page.dump(f"{model}_L{layer:02d}_{keys}.dump")
        if path:
            inputs = page.slice(path, QUERIES)
            rows = page.sweep(inputs, "--engine", "reference", "--method", "apa-0.6,apa-int8", "--device", "zen4")
            rows += page.sweep(inputs, "--engine", "reference", "--method", "apa-int8", "--device", "zen4", settings=("eps=0.005",))
            for label, row in zip(METHODS, rows):
                found[label].append(row)
            os.remove(inputs[1])
    return found


def length(page):
    by_length(page, "length", "smollm2-135m", LAYERS)


def gemma(page):
    by_length(page, "gemma", "gemma3/gemma3-270m", (5, 11, 17))


def by_length(page, name, model, layers_of_model):
    all_found = {keys: runs(page, keys, model, layers_of_model) for keys in LENGTHS}
    rows, series = [], []
    for label in METHODS:
        points, first = [], label
        for keys, found in all_found.items():
            layers = found[label]
            if not layers:
                return
            hot = [r["hot_share"] for r in layers]
            points.append((keys, 100 * sum(hot) / len(hot)))
            rows.append([first, keys, lab.percent(sum(hot) / len(hot)), f"{lab.percent(min(hot))} … {lab.percent(max(hot))}",
                         f"{(sum(r['rel_l2'] ** 2 for r in layers) / len(layers)) ** .5:.2e}", f"{min(r['min_cos'] for r in layers):.6f}"] +
                        [f"{sum(ratio(r['cost']['zen4'], QUERIES) for r in layers) / len(layers):.2f}x"])
            first = ""
        series.append((label, points))
    page.put(name, lab.table(["method", "keys", "hot, mean", "layers", "rel L2, rms", "min cos", "zen4"], rows))
    page.plot("hot-share" if name == "length" else f"hot-share-{name}", svg.chart("Hot share of real layers", "keys", "hot share, %", series, log_x=True, x_ticks=LENGTHS))


def measured(page):
    """Times on this machine, the CPU engine: the default recipe against exact, taken in turn."""
    rows = []
    for keys in LENGTHS:
        for layer in (7, 17):
            path = page.dump(f"smollm2-135m_L{layer:02d}_{keys}.dump")
            if path:
                r = page.json("bench", "--dump", path, "--engine", "cpu", "--repeats", 5)
                rows.append([keys, layer, f"{r['exact_ms']:.0f}", f"{r['prep_ms']:.1f}", f"{r['total_ms']:.0f}", f"{r['ratio']:.2f}x",
                             lab.percent(r["hot_share"]), lab.percent(r["skip_share"])])
    if rows:
        page.put("measured", lab.table(["keys", "layer", "exact, ms", "prep, ms", "prep + attention, ms", "ratio", "hot", "skipped"], rows))


def main():
    page = lab.Lab("eps-and-length", __doc__)
    for part in (tradeoff, length, gemma, measured):
        if page.wants(part.__name__):
            part(page)


if __name__ == "__main__":
    main()
