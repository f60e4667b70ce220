#!/usr/bin/env python3
"""The cold frame that a hot sink sets: apa-0.2 against its fix, what each later version repaired, and how far a sample of pairs sees
the worst one. Fills docs/reproduce/frame-collapse.md. The parts history and sample want the dumps of
`data/make_dumps.sh --out dumps`; without them they run on the committed sample alone.

Usage: bench/reproduce/frame_collapse.py [--dumps dumps] [--write]"""
import array
import math
import os

import lab

VERSIONS = ["apa-0.2", "apa-0.3", "apa-0.4", "apa-0.5", "apa-0.6"]
LAYERS = [("smollm2-135m_L{:02d}_32768.dump", layer) for layer in (12, 18, 19, 20)]


def figures(result):
    return [f"{result['rel_l2']:.2e}", f"{result['rel_l2_max']:.2e}", f"{result['min_cos']:.6f}", result["lt_0"],
            lab.percent(result["hot_share"], 2)]


def synthetic(page):
    inputs = page.generate("sink-tail", "1,4,2,256,16384,64")
    rows = []
    for method, drop in [("apa-0.2", None), ("apa-0.2", 32), ("apa-0.3", 0), ("apa-0.3", None), ("apa-0.6", 0), ("apa-0.6", None),
                         ("apa-nvfp4", 0), ("apa-nvfp4", None), ("apa-e4m3", 0), ("apa-e4m3", None), ("apa-int8", 0), ("apa-int8", None)]:
        settings = [] if drop is None else [f"frame_drop={drop}"]
        result = page.evaluate(inputs, method, "--engine", "reference", settings=settings)
        rows.append([f"`{method}`", f"{result['recipe']['frame_drop']:g}" + ("" if drop is None else " (set)")] + figures(result))
    page.put("synthetic", lab.table(["method", "frame_drop", "rel L2", "worst pair", "min cos", "pairs < 0 of 1024", "hot"], rows))
    worst = page.evaluate(inputs, "apa-0.2", "--worst", 1, "--engine", "reference")["worst"][0]
    page.put("pair", f"`--worst 1` of `apa-0.2`: cosine {worst['cos']:.6f}; {worst['hot_tiles']} of {worst['tiles']} tiles hot; cold mass "
             f"{worst['cold_mass']:.4f}; norms: reference {worst['truth_norm']:.4f}, its hot part {worst['hot_norm']:.4f}, its cold part "
             f"{worst['cold_norm']:.4f}, output {worst['out_norm']:.4f}.")


def real_inputs(page, queries):
    """The committed sample whole, and `queries` of each layer."""
    found = [("the committed sample", page.slice(lab.SAMPLE, 1024))]
    for name, layer in LAYERS:
        path = page.dump(name.format(layer))
        if path:
            found.append((f"layer {layer}, 32768 keys", page.slice(path, queries)))
    return found


def real(page):
    rows = []
    for label, inputs in real_inputs(page, 128):
        for row in page.sweep(inputs, "--engine", "reference", "--method", ",".join(VERSIONS) + ",apa-int8", "--device", "rtx5090"):
            rows.append([label, f"`{row['method']}`", f"{row['rel_l2']:.2e}", f"{row['rel_l2_max']:.2e}", f"{row['min_cos']:.6f}",
                         round(row["lt_0_99"]), lab.percent(row["hot_share"])])
            label = ""
    page.put("history", lab.table(["inputs", "method", "rel L2", "worst pair", "min cos", "pairs < .99", "hot"], rows))


def blind(page):
    """Pairs whose verdict was wrong: a tile stayed cold whose exact share is far over ε."""
    path, rows = page.dump("smollm2-135m_L18_32768.dump"), []
    if not path:
        return
    inputs = page.slice(path, 64, 2)
    for method in ("apa-0.6", "apa-nvfp4", "apa-int8"):
        for pair in page.evaluate(inputs, method, "--engine", "reference", "--worst", 3)["worst"]:
            rows.append([f"`{method}`", pair["head"] + 6, pair["row"], f"{pair['cos']:.5f}", pair["hot_tiles"], f"{pair['cold_mass']:.4f}",
                         f"{pair['largest_cold_share']:.4f}", f"{pair['truth_norm']:.3f}", f"{pair['hot_norm']:.3f}", f"{pair['cold_norm']:.3f}",
                         f"{pair['out_norm']:.3f}"])
    page.put("blind", lab.table(["method", "head", "row", "cosine", "hot tiles of 512", "cold mass", "largest cold tile", "reference", "its hot part",
                                 "its cold part", "output"], rows))


def changed(page):
    """One knob of apa-0.6 at a time on the pairs of blind()."""
    path, rows = page.dump("smollm2-135m_L18_32768.dump"), []
    if not path:
        return
    inputs = page.slice(path, 64, 2)
    for setting in (None, "exact_k=on", "exact_q=on", "scale_search=off", "tensor_scale=amax", "hadamard=on", "q_terms=1"):
        r = page.evaluate(inputs, "apa-0.6", "--engine", "reference", "--worst", 192, settings=(setting,) if setting else ())
        shares = [pair["largest_cold_share"] for pair in r["worst"]]
        rows.append([f"`{setting}`" if setting else "as it is", f"{r['rel_l2']:.2e}", f"{r['min_cos']:.5f}", lab.percent(r["hot_share"]),
                     f"{max(shares):.4f}", sum(share > 0.0118 for share in shares)])
    page.put("changed", lab.table(["`apa-0.6`", "rel L2", "min cos", "hot", "largest cold tile", "pairs with one over .0118"], rows))


def attribution(page):
    rows, found = [], [("the committed sample", page.slice(lab.SAMPLE, 192), VERSIONS)]
    path = page.dump("smollm2-135m_L18_32768.dump")
    if path:
        found.append(("layer 18, 32768 keys, query heads 6 … 8", page.slice(path, 48, 2), VERSIONS[1:3] + VERSIONS[4:]))
    for label, inputs, methods in found:
        for method in methods:
            result = page.evaluate(inputs, method, "--engine", "reference", "--worst", 20, "--attribute")
            parts = result["attribution"]
            runs = [parts["all"]] + [parts["operands"][x]["only"] for x in "qkvp"] + [parts["none"]]
            cells = [label, f"`{method}`"] + [f"{run['worst_mean_cos']:.6f}" for run in runs] + [f"{parts['all']['rel_l2']:.2e}"]
            rows.append(cells)
            label = ""
    page.put("attribution", lab.table(["inputs", "method", "all", "only Q", "only K", "only V", "only P", "none",
                                       "rel L2 of all pairs"], rows))


def cosines(a, b, width):
    found = []
    for at in range(0, len(a), width):
        x, y = a[at:at + width], b[at:at + width]
        dot, xx, yy = (math.fsum(p * q for p, q in zip(u, w)) for u, w in ((x, y), (x, x), (y, y)))
        found.append(dot / math.sqrt(xx * yy) if xx > 0 and yy > 0 else float(xx == yy))
    return found


def sample(page):
    rng, rows = lab.rng(1), []
    for label, inputs in real_inputs(page, 256) + [("`sink-tail`", page.generate("sink-tail", "1,4,2,256,16384,64"))]:
        for method in ("apa-0.2", "apa-0.6"):
            outputs = []
            for which in ("exact", method):
                out = page.work("out.npy")
                page.apa("run", *inputs, "--method", which, "--engine", "reference", "--out", out)
                shape, values = lab.read_npy(out)
                outputs.append(array.array("d", values))
            os.remove(out)
            found = cosines(*outputs, shape[-1])
            count = max(1, round(len(found) / 100))
            minima = sorted(min(rng.sample(found, count)) for _ in range(1000))
            rows.append([label, f"`{method}`", len(found), count, f"{1 - min(found):.2e}", f"{1 - minima[500]:.2e}",
                         f"{1 - minima[950]:.2e}", f"{(1 - min(found)) / max(1e-300, 1 - minima[500]):.1f}x"])
            label = ""
    page.put("sample", lab.table(["inputs", "method", "pairs", "sampled", "1 − min cos, all pairs", "the 1 % sample's, median of 1000",
                                  "best 5 % of samples", "all / sample"], rows))


def main():
    page = lab.Lab("frame-collapse", __doc__)
    for part in (synthetic, real, blind, changed, attribution, sample):
        if page.wants(part.__name__):
            part(page)


if __name__ == "__main__":
    main()
