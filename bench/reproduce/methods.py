#!/usr/bin/env python3
"""SageAttention3 against APA on the same inputs, and an exact pass with FP16 sums against APA. Fills docs/reproduce/methods.md. Real
layers other than the committed sample come from `data/make_dumps.sh --out dumps`.

Usage: bench/reproduce/methods.py [--dumps dumps] [--write]"""
import lab

REAL = [(f"layer {layer}, 32768 keys", f"smollm2-135m_L{layer:02d}_32768.dump") for layer in (5, 12, 24)]


def inputs_of(page):
    found = [("committed sample", page.slice(lab.SAMPLE, 128))]
    for label, name in REAL:
        path = page.dump(name)
        if path:
            found.append((label, page.slice(path, 24)))
    for kind, shape in (("randn", "1,4,2,128,4096,64"), ("outliers", "1,4,2,128,4096,64"), ("topics", "1,4,2,128,8192,64"),
                        ("sink-tail", "1,4,2,64,16384,64")):
        found.append((f"`{kind}` {shape}", page.generate(kind, shape)))
    return found


def sage3(page):
    methods, rows = "sage3,apa-0.6,apa-nvfp4,int8,apa-int8", []
    for label, inputs in inputs_of(page):
        for r in page.sweep(inputs, "--engine", "reference", "--method", methods, "--device", "rtx5090"):
            rows.append([label, f"`{r['method']}`", f"{r['rel_l2']:.2e}", f"{r['rel_l2_max']:.2e}", f"{r['min_cos']:.6f}", round(r["lt_0_99"]),
                         lab.percent(r["hot_share"])])
            label = ""
    page.put("sage3", lab.table(["inputs", "method", "rel L2", "worst pair", "min cos", "< .99", "hot"], rows))


def tail(page):
    """What of SageAttention3 fails on sink-tail: one thing at a time left unquantised."""
    inputs, rows = page.generate("sink-tail", "1,4,2,64,16384,64"), []
    for method, setting in (("sage3", None), ("sage3", "exact_v=on"), ("sage3", "exact_p=on"), ("sage3", "p_sum=quantised"),
                            ("int8", None), ("int8", "exact_v=on")):
        r = page.sweep(inputs, "--engine", "reference", "--method", method, "--device", "rtx5090", settings=(setting,) if setting else ())[0]
        rows.append([f"`{method}`", f"`{setting}`" if setting else "as it is", f"{r['rel_l2']:.2e}", f"{r['min_cos']:.6f}"])
    page.put("tail", lab.table(["`sink-tail`", "", "rel L2", "min cos"], rows))


def exact(page):
    rows = []
    for label, inputs in inputs_of(page):
        for name, method, settings in (("all exact, FP16 sums", "exact", ("exact_format=f16", "exact_accum=f16")),
                                       ("all exact, FP32 sums", "exact", ("exact_format=f16", "exact_accum=f32")),
                                       ("APA 0.6, FP16 sums", "apa-0.6", ()), ("APA 0.6, FP32 sums", "apa-0.6", ("exact_accum=f32",)),
                                       ("`apa-int8`", "apa-int8", ())):
            r = page.sweep(inputs, "--engine", "reference", "--method", method, "--device", "rtx5090", settings=settings)[0]
            rows.append([label, name, f"{r['rel_l2']:.2e}", f"{r['rel_l2_max']:.2e}", f"{r['min_cos']:.7f}", lab.percent(r["hot_share"])])
            label = ""
    page.put("exact", lab.table(["inputs", "run", "rel L2", "worst pair", "min cos", "hot"], rows))


def main():
    page = lab.Lab("methods", __doc__)
    for part in (sage3, tail, exact):
        if page.wants(part.__name__):
            part(page)


if __name__ == "__main__":
    main()
