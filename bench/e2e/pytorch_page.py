#!/usr/bin/env python3
"""The PyTorch part of docs/end-to-end.md from what pytorch.py measured: tables between two markers, and a picture.

    pytorch_page.py pytorch.json [more.json ...] [--page docs/end-to-end.md]

Runs of one machine may each hold a part (times from a quiet hour, perplexities from any); a part that several hold is
taken from the first of them.
What stands between the markers <!-- pytorch: begin --> and <!-- pytorch: end --> is replaced; the rest of the page
is left alone. The picture is end-to-end-pytorch.svg beside the page.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- pytorch: begin -->", "<!-- pytorch: end -->"
PARTS = ("prefill", "perplexity", "perplexity_emulated")
BARELY = 1e-6  # a change smaller than this has no room on a logarithmic axis

WIDTH, LEFT, RIGHT, ROW, TOP = 760, 210, 90, 20, 54
INK, PALE, BETTER, WORSE = "#24292f", "#d0d7de", "#0969da", "#bc4c00"


# ------------------------------------------------------------------------------- tables


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def prefill_table(rows: list[dict[str, Any]]) -> str:
    base = {row["tokens"]: row for row in rows if row["method"] == "PyTorch SDPA"}
    made = []
    for row in rows:
        first = base[row["tokens"]]
        made.append(
            [
                str(row["tokens"]),
                row["method"],
                f"{row['total_ms']:.0f}",
                f"{row['min_ms']:.0f} … {row['max_ms']:.0f}",
                f"{first['total_ms'] / row['total_ms']:.2f}x",
                f"{row['attention_ms']:.0f}",
                share(row["attention_ms"] / row["total_ms"]),
                f"{first['attention_ms'] / row['attention_ms']:.2f}x",
                share(row["hot_share"]),
            ]
        )
    return table(
        [
            "tokens",
            "attention by",
            "prefill ms",
            "min … max",
            "against PyTorch",
            "attention ms",
            "its share",
            "against PyTorch",
            "tiles exact",
        ],
        made,
    )


def perplexity_table(rows: list[dict[str, Any]]) -> str:
    made = []
    for row in rows:
        change = "" if row is rows[0] else f"{100 * row['against_first']:+.4f} % ± {100 * row['standard_error']:.4f}"
        made.append(
            [
                row["method"],
                f"{row['perplexity']:.4f}",
                change,
                f"{row['mean_abs_difference']:.5f}",
                f"{row['max_abs_difference']:.3f}",
                share(row["hot_share"]),
            ]
        )
    return table(
        ["attention by", "perplexity", "change", "mean change of a token's loss", "largest", "tiles exact"], made
    )


# ------------------------------------------------------------------------------- the picture


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(words)}</text>'


def picture(found: dict[str, Any]) -> str:
    """Every method on one logarithmic axis: how far its perplexity is from PyTorch's."""
    groups = [
        (rows, f"{rows[0]['tokens'] + rows[0]['tokens'] // (rows[0]['chunk'] - 1)} tokens")
        for rows in (found["perplexity"], found["perplexity_emulated"])
        if rows
    ]
    changes = [abs(row["against_first"]) for rows, _ in groups for row in rows[1:]]
    low = math.floor(math.log10(max(min(changes), BARELY)))
    high = math.ceil(math.log10(max(max(changes), 10 * BARELY)))
    span = WIDTH - LEFT - RIGHT

    def place(change: float) -> float:
        return LEFT + span * (math.log10(max(abs(change), 10.0**low)) - low) / max(high - low, 1)

    height = TOP + sum(ROW * (len(rows) + 1) for rows, _ in groups) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>',
        text(8, 18, "Change of perplexity against PyTorch's own attention (SmolLM2-135M)", size=14),
    ]
    for power in range(low, high + 1):
        x = place(10.0**power)
        parts += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 8}" stroke="{PALE}"/>',
            text(x, TOP - 14, f"{100 * 10.0**power:g} %", "middle", 11),
        ]
    y = TOP + 6
    for rows, label in groups:
        parts.append(text(8, y + 4, label, size=11, colour="#57606a"))
        for row in rows[1:]:
            y += ROW
            change = row["against_first"]
            colour = BETTER if abs(change) <= 1e-3 else WORSE
            parts += [
                text(LEFT - 10, y + 4, row["method"], "end"),
                f'<line x1="{LEFT}" x2="{place(change):.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>',
                f'<circle cx="{place(change):.1f}" cy="{y}" r="4" fill="{colour}"/>',
                text(WIDTH - 8, y + 4, f"{100 * change:+.3g} %", "end", 11),
            ]
        y += ROW
    return "\n".join([*parts, "</svg>", ""])


# ------------------------------------------------------------------------------- the page


def section(found: dict[str, Any]) -> str:
    m = found["machine"]
    parts = [
        f"{' and '.join(f'`{c}`' for c in found['commands'])} on {m['threads']} threads of an {m['cpu']} (level {m['isa']}), PyTorch {m['torch']}, "
        f"Transformers {m['transformers']}, float32."
    ]
    if found["prefill"]:
        parts += [
            "### Prefill",
            "A whole forward pass that keeps the cache and the last token's logits; medians, the ways taken in "
            "turn. *attention ms* is the time inside the attention calls of all layers.",
            prefill_table(found["prefill"]),
        ]
    if found["perplexity"]:
        rows = found["perplexity"]
        chunks = rows[0]["tokens"] // (rows[0]["chunk"] - 1)
        parts += [
            "### Perplexity",
            f"{found['text']}, {chunks} chunk{'s' if chunks > 1 else ''} of {rows[0]['chunk']} tokens from token {found['start']} on, "
            "each read from an empty cache. *change* is of the perplexity, with the standard error of the mean over tokens; "
            "the losses of tokens are natural logs.",
            perplexity_table(rows),
        ]
    if found["perplexity_emulated"]:
        rows = found["perplexity_emulated"]
        parts += [
            "### Emulated methods",
            "Number formats that a CPU has no instructions for, run bit for bit by the reference "
            f"engine, on the first {rows[0]['chunk']} tokens alone; the first rows again, for comparison. Their times mean "
            "nothing.",
            perplexity_table(rows),
        ]
    if found["perplexity"] or found["perplexity_emulated"]:
        parts.append("![change of perplexity by method](end-to-end-pytorch.svg)")
    return "\n\n".join(parts)


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    if any(run["machine"] != runs[0]["machine"] for run in runs):
        sys.exit("pytorch_page.py: the runs are of different machines or versions")
    found = dict(runs[0])
    for part in PARTS:
        found[part] = next((run[part] for run in runs if run[part]), [])
    return found | {"commands": [run["command"] for run in runs]}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "end-to-end.md")
    args = parser.parse_args(argv)
    found = together([json.loads(path.read_text("utf-8")) for path in args.json])
    page = args.page.read_text("utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        sys.exit(f"pytorch_page.py: {args.page}: expected {BEGIN} and {END}, once each")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    args.page.write_text(f"{before}{BEGIN}\n\n{section(found)}\n\n{END}{after}", "utf-8")
    if found["perplexity"] or found["perplexity_emulated"]:
        args.page.with_name("end-to-end-pytorch.svg").write_text(picture(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
