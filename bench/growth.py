#!/usr/bin/env python3
"""How cost and memory grow with the number of keys: apa bench from 1024 to 131072 keys, and 2^20 keys with 64 queries.

    growth.py APA [--repeats 3] [--threads 0] [--longest 131072] [--page docs/performance.md]

APA is the command. Prints a markdown table; --page puts it between that page's markers, with a picture beside it. Standard
library only. Time is per visible (query, key) pair of a query head, so a method whose work is linear in the keys has a
level line. Memory is the workspace that the plan asks for, held against a formula of the shape (WORKSPACE below)."""
import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench" / "reproduce"))
import svg  # noqa: E402

BEGIN, END = "<!-- growth: begin -->", "<!-- growth: end -->"
WORKSPACE = (
    "tiles·Hkv·(72·(D + Dv) + 665 + D rounded up to 8) + threads·(tiles·(144·R + 4) + min(4096, R·min(2/ε + 16, tiles))·1024 "
    "+ about 0.6 MB), tiles of 64 keys, R = 12 registers of 16 rows in a block, or 6 or 3 where there are few blocks"
)


def formula(shape, threads, eps):
    """Bytes of the adaptive method. A tile and KV head: a blob of codes, biases and scales (64·(D + Dv) + 64·8 + 4·Dv + 64), the
    sums for the mean (8·(D + 1)), one mean as a key (D + 9). A thread: the block's registers' candidates (144 bytes a tile each), two
    16-bit maps, the kept P, and the block itself."""
    _, heads, kv_heads, queries, keys, D, Dv = shape
    tiles = -(-keys // 64)
    registers, of_block = -(-queries // 16) * (heads // kv_heads), 12
    while of_block > 3 and kv_heads * -(-registers // of_block) < 32:  # smaller blocks where there are few
        of_block //= 2
    head_tile = 64 + 64 * (D + Dv) + 64 * 8 + 4 * Dv + 8 * (D + 1) + D + 9
    pool = min(4096, of_block * min(2 / eps + 16 if eps > 0 else 0, tiles)) * 1024
    block = of_block * 4 * 16 * (2.5 * D + 2 * Dv) + 4 * 64 * (D + 2 * Dv) + 64 * 1024
    return kv_heads * tiles * head_tile + threads * (tiles * (of_block * 144 + 4) + pool + block)


def measure(command, shape, repeats, threads):
    arguments = [command, "bench", "--shape", ",".join(map(str, shape)), "--repeats", str(repeats), "--json", "-"]
    if threads:
        arguments += ["--threads", str(threads)]
    result = subprocess.run(arguments, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def row_of(shape, report):
    batch, heads, _, queries, keys, D, Dv = [*shape, shape[5]] if len(shape) == 6 else shape
    pairs = batch * heads * (queries * keys - queries * (queries - 1) / 2)
    full = [batch, heads, shape[2], queries, keys, D, Dv]
    expected = formula(full, report["threads"], report["recipe"]["eps"])
    return {
        "shape": f"{queries} × {keys}, {heads}/{shape[2]}",
        "keys": keys,
        "apa_ns": report["total_ms"] * 1e6 / pairs,
        "exact_ns": report["exact_ms"] * 1e6 / pairs,
        "ratio": report["ratio"],
        "hot": report["hot_share"],
        "workspace": report["workspace_bytes"],
        "formula": expected,
    }


def table(rows):
    lines = [
        "| queries × keys, heads | apa, ns a pair | exact, ns a pair | apa against exact | hot | workspace | formula |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['shape']} | {r['apa_ns']:.3f} | {r['exact_ns']:.3f} | {r['ratio']:.2f}x | {100 * r['hot']:.1f} % | "
            f"{r['workspace'] / 1e6:.1f} MB | {r['formula'] / 1e6:.1f} MB |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("apa")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--longest", type=int, default=131072)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    shapes, keys = [], 1024
    while keys <= options.longest:
        shapes.append([1, 24, 8, 512, keys, 128])
        keys *= 2
    shapes.append([1, 3, 1, 64, 1 << 20, 128])
    rows, report = [], None
    for shape in shapes:
        report = measure(options.apa, shape, options.repeats, options.threads)
        rows.append(row_of(shape, report))
        print(f"{rows[-1]['shape']}: apa {rows[-1]['apa_ns']:.3f} ns, exact {rows[-1]['exact_ns']:.3f} ns", file=sys.stderr)
    text = (
        f"{report['cpu']}, {report['threads']} threads, level {report['isa']}, f16, D 128, causal, randn; "
        f"`bench/growth.py APA --repeats {options.repeats}`, medians. Workspace by formula: {WORKSPACE}.\n\n" + table(rows)
    )
    print(text)
    if options.page is None:
        return
    old = options.page.read_text()
    if BEGIN not in old or END not in old:
        raise SystemExit(f"growth.py: {options.page}: no markers {BEGIN} and {END}")
    head, rest = old.split(BEGIN, 1)
    options.page.write_text(head + BEGIN + "\n" + text + "\n\n![Time a pair against keys](growth.svg)\n" + END + rest.split(END, 1)[1])
    series = [("apa", [(r["keys"], r["apa_ns"]) for r in rows]), ("exact", [(r["keys"], r["exact_ns"]) for r in rows])]
    picture = svg.chart("Time a visible pair", "keys", "ns", series, log_x=True)
    (options.page.parent / "growth.svg").write_text(picture)


if __name__ == "__main__":
    main()
