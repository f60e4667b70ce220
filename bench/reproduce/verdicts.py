#!/usr/bin/env python3
"""Rules that make a tile hot, against each other: the error that is left against the share of tiles computed exactly. Fills
docs/reproduce/verdicts.md. Needs NumPy (build/venv) for the part study alone.

Usage: bench/reproduce/verdicts.py [--write]"""
import math
import os
import subprocess
import sys

import lab
import svg

MASS = ("0.0025", "0.005", "0.01", "0.02", "0.04", "0.08")
RULES = [
    ("running test", ("verdict=mass", "second_look=off", "lambda_bound=none"), MASS),
    ("Jensen start", ("verdict=mass", "second_look=off", "lambda_bound=jensen"), MASS),
    ("second look", ("verdict=mass", "second_look=on", "lambda_bound=none"), MASS),
    ("mass_value", ("verdict=mass_value",), ("0.0003", "0.001", "0.003", "0.01", "0.03")),
    ("cold_budget", ("verdict=cold_budget",), ("0.025", "0.05", "0.1", "0.2", "0.4")),
]
GROUPS = (1, 4, 16, 64)


def inputs_of(page):
    return [("sample", "the committed sample (last 64 queries, 3 heads, 12288 keys)", page.slice(lab.SAMPLE, 64)),
            ("topics", "`topics` 1,4,2,128,8192,64", page.generate("topics", "1,4,2,128,8192,64")),
            ("randn", "`randn` 1,4,2,128,4096,64", page.generate("randn", "1,4,2,128,4096,64"))]


def curves(page, inputs, method, group):
    """Rule -> [(eps, hot share, relative L2, smallest cosine)]."""
    found = {}
    for name, settings, eps in RULES:
        rows = page.sweep(inputs, "--engine", "reference", "--method", method, "--over", "eps=" + ",".join(eps), "--device", "rtx5090",
                          settings=settings + (f"group={group}", "skip=off"))
        found[name] = [(e, r["hot_share"], r["rel_l2"], r["min_cos"]) for e, r in zip(eps, rows)]
    return found


def pareto(found):
    points = [p for curve in found.values() for p in curve]
    return {p for p in points if not any(o[1] <= p[1] and o[2] <= p[2] and (o[1] < p[1] or o[2] < p[2]) for o in points)}


def error_at(curve, hot):
    """Relative L2 at a hot share, on straight lines through the logs; None outside what was measured."""
    points = sorted((h, e) for _, h, e, _ in curve if h > 0)
    for (h0, e0), (h1, e1) in zip(points, points[1:]):
        if h0 <= hot <= h1 and h1 > h0:
            part = math.log(hot / h0) / math.log(h1 / h0)
            return math.exp(math.log(e0) + part * math.log(e1 / e0))
    return None


def compare(page):
    summary = []
    for name, label, inputs in inputs_of(page):
        for group in GROUPS:
            found = curves(page, inputs, "apa-int8", group)
            if group == 16:
                best = pareto(found)
                page.put(name, lab.table(["rule", "ε", "hot", "rel L2", "min cos", "Pareto"], [
                    [rule if i == 0 else "", p[0], lab.percent(p[1]), f"{p[2]:.2e}", f"{p[3]:.6f}", "*" if p in best else ""]
                    for rule, curve in found.items() for i, p in enumerate(curve)]))
                page.plot(f"verdicts-{name}", svg.chart(f"INT8, groups of 16: {name}", "hot share, %", "relative L2", [
                    (rule, sorted((100 * p[1], p[2]) for p in curve if p[1] > 0)) for rule, curve in found.items()],
                    log_x=True, log_y=True))
            for hot in (.03, .06, .12):
                cells = [error_at(curve, hot) for curve in found.values()]
                if sum(c is not None for c in cells) >= 3:
                    summary.append([name, group, lab.percent(hot, 0)] + ["-" if c is None else f"{c:.2e}" for c in cells])
    page.put("groups", lab.table(["inputs", "group", "hot"] + [r[0] for r in RULES], summary))


def nvfp4(page):
    found = curves(page, page.slice(lab.SAMPLE, 64), "apa-nvfp4", 16)
    best = pareto(found)
    page.put("nvfp4", lab.table(["rule", "ε", "hot", "rel L2", "min cos", "Pareto"], [
        [rule if i == 0 else "", p[0], lab.percent(p[1]), f"{p[2]:.2e}", f"{p[3]:.6f}", "*" if p in best else ""]
        for rule, curve in found.items() for i, p in enumerate(curve)]))


def study(page):
    python = os.path.join(lab.ROOT, "build", "venv", "bin", "python")
    done = subprocess.run([python if os.path.exists(python) else sys.executable, os.path.join(lab.ROOT, "bench", "verdict_study.py"),
                           lab.SAMPLE, "--queries", "64"], stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        page.put("study", "```\n" + done.stdout.strip() + "\n```")


def main():
    page = lab.Lab("verdicts", __doc__)
    for part in (compare, nvfp4, study):
        if page.wants(part.__name__):
            part(page)


if __name__ == "__main__":
    main()
