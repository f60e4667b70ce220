#!/usr/bin/env python3
"""ThriftAttention: how much of the gap between all NVFP4 and exact the chosen blocks recover. Fills docs/reproduce/thrift.md. The
parts layers and length want the dumps of `data/make_dumps.sh --out dumps`.

Recovery of the error is 1 − e/e₀, with e the relative L2 over all pairs and e₀ that of the same recipe with every tile cold.

Usage: bench/reproduce/thrift.py [--dumps dumps] [--write]"""
import lab

QUERIES, LENGTHS, LAYERS = 128, (2048, 8192, 12288, 32768), (7, 12, 17, 22)
FORCED = [("-", ()), ("sink", ("force_sink=on",)), ("diagonal", ("force_diagonal=on",)), ("both", ("force_sink=on", "force_diagonal=on"))]


def cold(page, inputs):
    return page.sweep(inputs, "--engine", "reference", "--method", "thrift", "--device", "rtx5090", settings=("force=low",))[0]["rel_l2"]


def choices(page):
    inputs = page.slice(lab.SAMPLE, QUERIES)
    floor, rows = cold(page, inputs), []
    for method in ("thrift", "thrift-quest", "thrift-local"):
        for label, settings in FORCED:
            found = page.sweep(inputs, "--engine", "reference", "--method", method, "--over", "fraction=0.05,0.10,0.25", "--device", "rtx5090",
                               settings=settings)
            rows.append([f"`{method}`", label] + [f"{r['rel_l2']:.2e} / {lab.percent(1 - r['rel_l2'] / floor)}" for r in found] +
                        [lab.percent(found[0]["hot_share"])])
    page.put("choices", f"All NVFP4 (`--set force=low`): {floor:.2e}.\n\n" + lab.table(
        ["choice", "forced", "5 %: rel L2 / recovered", "10 %", "25 %", "really chosen at 5 %"], rows))


def over_layers(page, keys):
    """Per layer (last 64 queries, one KV head): error with every tile cold, and by forced or not the errors at three fractions."""
    found = []
    for layer in LAYERS:
        path = page.dump(f"smollm2-135m_L{layer:02d}_{keys}.dump")
        if path:
            inputs = page.slice(path, 64, layer % 3)
            errors = [[r["rel_l2"] for r in page.sweep(inputs, "--engine", "reference", "--method", "thrift", "--over", "fraction=0.05,0.10,0.25",
                                                       "--device", "rtx5090", settings=FORCED[i][1])] for i in (0, 3)]
            found.append((cold(page, inputs), errors))
    return found


def length(page):
    rows = []
    for keys in LENGTHS:
        found = over_layers(page, keys)
        if not found:
            return
        for which, label in enumerate(("-", "both")):
            cells = []
            for i in range(3):
                shares = [1 - errors[which][i] / floor for floor, errors in found]
                cells.append(f"{lab.percent(sum(shares) / len(shares))} ({lab.percent(min(shares))} … {lab.percent(max(shares))})")
            floors = (sum(f[0] ** 2 for f in found) / len(found)) ** .5
            rows.append([keys if which == 0 else "", label, f"{floors:.2e}" if which == 0 else ""] + cells)
    page.put("length", lab.table(["keys", "forced", "all NVFP4, rms", "5 % recovers", "10 %", "25 %"], rows))


def against(page):
    inputs = page.slice(lab.SAMPLE, QUERIES)
    rows = []
    for method, settings in (("thrift", ("fraction=0.10",)), ("thrift", ("fraction=0.10", "force_sink=on", "force_diagonal=on")),
                             ("thrift-quest", ("fraction=0.10",)), ("thrift", ("fraction=0.10", "force_sink=on", "force_diagonal=on", "smooth_k=on")),
                             ("thrift", ("select=none", "verdict=mass", "second_look=on", "eps=0.02")),
                             ("apa-nvfp4", ("eps=0.01", "q_terms=1", "scale_search=off", "smooth_k=off")),
                             ("apa-nvfp4", ("eps=0.01", "q_terms=1", "scale_search=off")), ("apa-nvfp4", ("eps=0.01",))):
        r = page.sweep(inputs, "--engine", "reference", "--method", method, "--device", "rtx5090", settings=settings)[0]
        rows.append([f"`{method}`", " ".join(settings), lab.percent(r["hot_share"]), f"{r['rel_l2']:.2e}", f"{r['min_cos']:.6f}"])
    page.put("against", lab.table(["method", "settings", "hot", "rel L2", "min cos"], rows))


def main():
    page = lab.Lab("thrift", __doc__)
    for part in (choices, against, length):
        if page.wants(part.__name__):
            part(page)


if __name__ == "__main__":
    main()
