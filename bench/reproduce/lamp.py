#!/usr/bin/env python3
"""LampAttention: sub-blocks recomputed and disruptive tiles against the threshold τ and the safety margin, with either stage off. Fills
docs/reproduce/lamp.md. The part gemma wants `data/make_dumps.sh --out dumps/gemma3 --model gemma3 --lengths 2048`.

Usage: bench/reproduce/lamp.py [--dumps dumps] [--write]"""
import lab

TAUS, MARGINS = "0,0.02,0.1,0.25,0.5,0.75,1", "0,0.5,1,2,4,8"
HEAD = ["recomputed", "disruptive", "rel L2", "worst pair", "min cos"]


def cells(r):
    return [lab.percent(r["lamp_recomputed"], 2), lab.percent(r["lamp_disruptive"], 2), f"{r['rel_l2']:.2e}", f"{r['rel_l2_max']:.2e}",
            f"{r['min_cos']:.6f}"]


def lamp(page, inputs, *over, settings=()):
    return page.sweep(inputs, "--engine", "reference", "--method", "lamp", *over, "--device", "rtx5090", settings=settings)


def steps(values):
    """Does the list of rates never go up / never go down?"""
    return all(b <= a for a, b in zip(values, values[1:])), all(b >= a for a, b in zip(values, values[1:]))


def tau(page):
    rows, said = [], []
    for label, inputs in [("committed sample", page.slice(lab.SAMPLE, 64))] + [
            (f"`{kind}` 1,4,2,64,4096,64", page.generate(kind, "1,4,2,64,4096,64")) for kind in ("topics", "randn")]:
        for force in ("low", "high"):
            r = lamp(page, inputs, settings=("force=" + force,))[0]
            rows.append([label, f"all {force}"] + cells(r))
            label = ""
        found = lamp(page, inputs, "--over", "tau=" + TAUS)
        rows += [["", f"τ {r['knobs']['tau']}"] + cells(r) for r in found]
        said.append(all(steps([r[key] for r in found])[0] for key in ("lamp_recomputed", "lamp_disruptive")))
    page.put("tau", lab.table(["inputs", "margin 2"] + HEAD, rows) +
             f"\n\nBoth rates fall or stay as τ grows: {', '.join('yes' if s else 'NO' for s in said)}.")


def margin(page):
    inputs, rows = page.slice(lab.SAMPLE, 64), []
    for value in ("1", "0.5"):
        found = lamp(page, inputs, "--over", "margin=" + MARGINS, settings=("tau=" + value,))
        rows += [[f"τ {value}" if i == 0 else "", r["knobs"]["margin"]] + cells(r) for i, r in enumerate(found)]
        if not all(steps([r[key] for r in found])[1] for key in ("lamp_recomputed", "lamp_disruptive")):
            rows.append(["", "NOT monotone"] + [""] * 5)
    page.put("margin", lab.table(["", "margin"] + HEAD, rows))


def stages(page):
    inputs, rows = page.slice(lab.SAMPLE, 64), []
    for stage in ("both", "first", "second"):
        found = lamp(page, inputs, "--over", "tau=0.1,0.5,1", settings=("lamp_stages=" + stage,)) if stage != "first" else lamp(
            page, inputs, settings=("lamp_stages=first",))
        rows += [[f"`{stage}`" if i == 0 else "", r["knobs"].get("tau", "-")] + cells(r) for i, r in enumerate(found)]
    page.put("stages", lab.table(["`lamp_stages`", "τ"] + HEAD, rows))
    rows = []
    for group in (1, 16):
        for r in lamp(page, inputs, "--over", "sub_block=4,8,16,32", settings=(f"group={group}",)):
            rows.append([group, r["knobs"]["sub_block"]] + cells(r))
    page.put("groups", lab.table(["rows a group", "sub-block"] + HEAD, rows))


def gemma(page):
    rows = []
    for layer in (5, 11, 17):
        path = page.dump(f"gemma3/gemma3-270m_L{layer:02d}_2048.dump")
        if not path:
            return
        inputs, label = page.slice(path, 64), f"layer {layer}"
        for name, settings in (("all low", ("force=low",)), ("τ 1", ("tau=1",)), ("τ .5", ("tau=0.5",)), ("τ .1", ("tau=0.1",)),
                               ("τ .5, groups of 16", ("tau=0.5", "group=16"))):
            rows.append([label, name] + cells(lamp(page, inputs, settings=settings)[0]))
            label = ""
    page.put("gemma", lab.table(["Gemma 3 270M, 2048 keys", ""] + HEAD, rows))


def main():
    page = lab.Lab("lamp", __doc__)
    for part in (tau, margin, stages, gemma):
        if page.wants(part.__name__):
            part(page)


if __name__ == "__main__":
    main()
