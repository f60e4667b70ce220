#!/usr/bin/env python3
"""Speed on a real model's attention: `apa bench` on dumps, apa against the same engine's exact, one row a context length.

    bench/real_speed.py DUMPS... [--apa build/apa] [--threads 1] [--repeats 3] [--page docs/performance.md] [--json OUT]

DUMPS are files of data/make_dumps.sh, named MODEL_LLAYER_KEYS.dump. The table has the median and the extremes over the
layers of a length, and the spread by hot share; times include prep. Standard library only."""
import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

BEGIN, END = "<!-- real: begin -->", "<!-- real: end -->"
BANDS = ((0.0, 0.02), (0.02, 0.05), (0.05, 0.1), (0.1, 0.2), (0.2, 1.01))


def bench(apa, dump, threads, repeats):
    done = subprocess.run([apa, "bench", "--dump", dump, "--threads", str(threads), "--repeats", str(repeats), "--json", "-"],
                          capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{dump}: apa bench failed: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    name = re.fullmatch(r"(.*)_L(\d+)_(\d+)\.dump", Path(dump).name)
    if not name:
        sys.exit(f"{dump}: expected a name like model_L05_8192.dump")
    print(f"{dump}: {found['ratio']:.2f}x at {100 * found['hot_share']:.1f} % hot", file=sys.stderr)
    return {"model": name[1], "layer": int(name[2]), "keys": int(name[3]), **found}


def spread(values, form):
    return f"{form % statistics.median(values)} ({form % min(values)} … {form % max(values)})"


def tables(rows, threads, repeats):
    shape = rows[0]["shape"]
    out = [f"{rows[0]['model']}, {len({r['layer'] for r in rows})} layers, {shape['Hq']}/{shape['Hkv']} heads, D {shape['D']}, "
           f"the last {shape['Sq']} queries, {threads} thread{'s' if threads != 1 else ''} of an {rows[0]['cpu']} "
           f"(kernels {rows[0]['kernel']}), medians of {repeats}; over the layers: median (least … most).", "",
           "| keys | exact GFLOP/s | apa ms | apa against exact | hot | prep |", "|---|---|---|---|---|---|"]
    for keys in sorted({r["keys"] for r in rows}):
        some = [r for r in rows if r["keys"] == keys]
        out.append(f"| {keys} | {spread([r['exact_gflops'] for r in some], '%.0f')} | {spread([r['total_ms'] for r in some], '%.0f')} | "
                   f"{spread([r['ratio'] for r in some], '%.2f')} | {spread([100 * r['hot_share'] for r in some], '%.1f')} % | "
                   f"{100 * statistics.median(r['prep_share'] for r in some):.1f} % |")
    out += ["", "| hot tiles | dumps | apa against exact |", "|---|---|---|"]
    for low, high in BANDS:
        some = [r["ratio"] for r in rows if low <= r["hot_share"] < high]
        if some:
            out.append(f"| {100 * low:.0f} … {min(100, 100 * high):.0f} % | {len(some)} | {spread(some, '%.2f')} |")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+")
    parser.add_argument("--apa", default="build/apa")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [bench(options.apa, dump, options.threads, options.repeats) for dump in options.dumps]
    body = tables(rows, options.threads, options.repeats)
    print(body)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    if options.page:
        page = options.page.read_text("utf-8")
        if page.count(BEGIN) != 1 or page.count(END) != 1:
            sys.exit(f"{options.page}: expected {BEGIN} and {END}, once each")
        options.page.write_text(f"{page.split(BEGIN)[0]}{BEGIN}\n{body}{END}{page.split(END)[1]}", "utf-8")


if __name__ == "__main__":
    main()
