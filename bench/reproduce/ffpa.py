#!/usr/bin/env python3
"""FFPA's knobs one at a time, and the early rows of a causal square of normals. Fills docs/reproduce/ffpa.md.

Usage: bench/reproduce/ffpa.py [--write]"""
import array

import lab

FP8 = [("default of the interface", ()), ("smooth-K off", ("smooth_k=off",)), ("smooth-V on", ("smooth_v=on",)),
       ("Q/K scales per thread", ("qk_scale_granularity=thread",)), ("V scales per block", ("v_scale_granularity=block",)),
       ("QK in INT8", ("qk_format=int8",)), ("QK in INT8, per thread", ("qk_format=int8", "qk_scale_granularity=thread")),
       ("P·V sums FP16", ("pv_accum=f16", "pv_flush=64", "v_range=2.25")), ("Hadamard", ("hadamard=on",)),
       ("Hadamard, QK in INT8 per thread", ("hadamard=on", "qk_format=int8", "qk_scale_granularity=thread")),
       ("QK exact", ("exact_q=on", "exact_k=on")), ("V exact", ("exact_v=on",)), ("P exact", ("exact_p=on",))]
FP4 = [("default of the interface", ()), ("Q not smoothed", ("smooth_q=off",)), ("K not smoothed", ("smooth_k=off",)),
       ("smooth-V on", ("smooth_v=on",)), ("Hadamard", ("hadamard=on",)), ("P·V in MXFP8", ("pv_format=mxfp8", "p_scale=static")),
       ("QK exact", ("exact_q=on", "exact_k=on")), ("V exact", ("exact_v=on",)), ("P exact", ("exact_p=on",))]
SQUARE = "1,2,2,1024,1024,64"


def inputs_of(page):
    return [("committed sample", page.slice(lab.SAMPLE, 64)), ("`outliers`", page.generate("outliers", "1,4,2,128,4096,64")),
            ("`randn`", page.generate("randn", "1,4,2,128,4096,64"))]


def knobs(page):
    for name, method, cases in (("fp8", "ffpa-fp8", FP8), ("fp4", "ffpa-fp4", FP4)):
        rows = [[label] for label, _ in cases]
        for _, inputs in inputs_of(page):
            for row, (_, settings) in zip(rows, cases):
                found = page.sweep(inputs, "--engine", "reference", "--method", method, "--device", "rtx5090", settings=settings)[0]
                row.append("refused" if found["refused"] else f"{found['rel_l2']:.2e} / {found['min_cos']:.4f}")
        page.put(name, lab.table(["`" + method + "`"] + [label for label, _ in inputs_of(page)], rows))


def presets(page):
    methods = "ffpa-fp8,ffpa-fp8-default,ffpa-fp8-cache-dit,ffpa-fp8-perblock,ffpa-fp4,ffpa-fp4-mxfp8,sage2,sage2pp,sage3"
    rows = {m: [f"`{m}`"] for m in methods.split(",")}
    for _, inputs in inputs_of(page):
        for found in page.sweep(inputs, "--engine", "reference", "--method", methods, "--device", "rtx5090"):
            rows[found["method"]].append(f"{found['rel_l2']:.2e} / {found['min_cos']:.4f}")
    page.put("presets", lab.table(["preset"] + [label for label, _ in inputs_of(page)], rows.values()))


def output(page, inputs, method, settings=()):
    out = page.work("ffpa_out.npy")
    page.apa("run", *inputs, "--method", method, "--engine", "reference", "--out", out, *(w for s in settings for w in ("--set", s)))
    return lab.read_npy(out)


def early(page):
    """Largest and mean absolute error by rows of a causal square; and the error over the norm of the row."""
    inputs, rows = page.generate("randn", SQUARE), []
    (_, H, S, D), truth = output(page, inputs, "exact")
    ranges = ((0, 16), (16, 64), (64, 256), (256, S))
    for method, settings in (("ffpa-fp8", ("early_rows=0",)), ("ffpa-fp8", ()), ("ffpa-fp8", ("early_rows=0", "v_scale_granularity=block")),
                             ("ffpa-fp4", ("early_rows=0",)), ("ffpa-fp4", ()), ("ffpa-fp4-mxfp8", ("early_rows=0",)), ("sage3", ())):
        _, o = output(page, inputs, method, settings)
        cells = [f"`{method}`", " ".join(settings) or "-"]
        all_errors = [abs(a - b) for a, b in zip(o, truth)]
        cells += [f"{max(all_errors):.3f}", f"{sum(all_errors) / len(all_errors):.4f}"]
        for first, last in ranges:
            at = [(h * S + i) * D + c for h in range(H) for i in range(first, last) for c in range(D)]
            error = sum(all_errors[x] ** 2 for x in at)
            power = sum(truth[x] ** 2 for x in at)
            cells.append(f"{max(all_errors[x] for x in at):.3f} / {(error / power) ** .5:.3f}")
        rows.append(cells)
    page.put("early", lab.table(["method", "set", "max abs", "mean abs"] + [f"rows {a} … {b - 1}" for a, b in ranges], rows))


def main():
    page = lab.Lab("ffpa", __doc__)
    for part in (presets, knobs, early):
        if page.wants(part.__name__):
            part(page)


if __name__ == "__main__":
    main()
