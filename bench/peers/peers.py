#!/usr/bin/env python3
"""libapa and other CPU attention on the same arrays in one run; a table and a picture for docs/performance.md.

    peers.py FOLDER [--shapes prefill-4k,decode-32k,...] [--repeats 5] [--threads 2] [--json FILE] [--page docs/performance.md]

FOLDER is what run.sh has filled. Q, K and V are random f16, N(0, 1); every peer gets these values in the type that it is
asked for. Prefill is causal with the last query at the last key. All ways are run in turn, round after round, and the
median is reported; each is run once before. Every output is held against attention in float64, and a peer whose error is not
small is named so and has no time. What is not there is in the table with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
WRONG = 0.05  # relative L2 beyond which an output is no result; 8-bit K and V stay an order of magnitude below


@dataclass
class Shape:
    name: str
    Hq: int
    Hkv: int
    Sq: int
    Skv: int
    D: int

    @property
    def causal(self) -> bool:
        return self.Sq > 1

    @property
    def flops(self) -> float:
        hidden = self.Sq * (self.Sq - 1) // 2 if self.causal else 0
        return 4.0 * self.D * self.Hq * (self.Sq * self.Skv - hidden)


SHAPES = [
    Shape("prefill-4k", 24, 8, 512, 4096, 128),
    Shape("prefill-16k", 24, 8, 512, 16384, 128),
    Shape("square-2k", 24, 8, 2048, 2048, 128),
    Shape("prefill-16k-d64", 9, 3, 512, 16384, 64),
    Shape("decode-32k", 24, 8, 1, 32768, 128),
]


@dataclass
class Way:
    """One way to the result: run() is timed and returns milliseconds, or None when the caller's clock counts."""

    name: str
    run: Callable[[], float | None]
    output: Callable[[], np.ndarray]
    times: list[float] = field(default_factory=list)


# ------------------------------------------------------------------------------- the truth


def truth(shape: Shape, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    out = np.empty((shape.Hq, shape.Sq, shape.D))
    group = shape.Hq // shape.Hkv
    for h in range(shape.Hq):
        kh, vh = k[h // group].astype(np.float64), v[h // group].astype(np.float64)
        s = q[h].astype(np.float64) @ kh.T / np.sqrt(shape.D)
        if shape.causal:
            i, j = np.arange(shape.Sq)[:, None], np.arange(shape.Skv)[None, :]
            s[j > i + shape.Skv - shape.Sq] = -np.inf
        s = np.exp(s - s.max(axis=1, keepdims=True))
        out[h] = s @ vh / s.sum(axis=1, keepdims=True)
    return out


def visible_mask(shape: Shape) -> np.ndarray:
    i, j = np.arange(shape.Sq)[:, None], np.arange(shape.Skv)[None, :]
    return j <= i + shape.Skv - shape.Sq


# ------------------------------------------------------------------------------- the ways


def of_apa(folder: Path, shape: Shape, work: Path, threads: int, method: str) -> Way:
    command = [str(folder / "apa" / "apa")]
    inputs = ["--q", f"{work}/q.npy", "--k", f"{work}/k.npy", "--v", f"{work}/v.npy", "--threads", str(threads)]
    inputs += ["--method", method, "--causal" if shape.causal else "--no-causal"]

    def run() -> float:
        result = subprocess.run([*command, "bench", *inputs, "--repeats", "3", "--json", "-"], check=True, capture_output=True)
        return float(json.loads(result.stdout)["total_ms"])

    def output() -> np.ndarray:
        subprocess.run([*command, "run", *inputs, "--out", f"{work}/apa.npy"], check=True, capture_output=True)
        return np.load(work / "apa.npy").reshape(shape.Hq, shape.Sq, shape.D)

    return Way(f"libapa {method}", run, output)


def of_ggml(folder: Path, shape: Shape, work: Path, threads: int, kind: str) -> Way:
    program = folder / "ggml_attention"
    if not program.exists():
        raise RuntimeError("ggml's CPU backend could not be built")
    command = [str(program), *(f"{work}/{x}.raw" for x in "qkv"), f"{work}/ggml.raw"]
    command += [str(x) for x in (shape.Hq, shape.Hkv, shape.Sq, shape.Skv, shape.D, int(shape.causal), kind, threads)]

    def run() -> float:
        result = subprocess.run([*command, "3"], check=True, capture_output=True, text=True)
        return statistics.median(float(line) for line in result.stdout.split())

    def output() -> np.ndarray:
        subprocess.run([*command, "1"], check=True, capture_output=True)
        return np.fromfile(work / "ggml.raw", np.float32).reshape(shape.Sq, shape.Hq, shape.D).transpose(1, 0, 2)

    return Way(f"llama.cpp flash attention, K/V {kind}", run, output)


def of_torch(shape: Shape, arrays: list[np.ndarray], threads: int, kind: str) -> Way:
    import torch

    torch.set_num_threads(threads)
    q, k, v = (torch.from_numpy(x.copy())[None].to(getattr(torch, kind)) for x in arrays)
    mask = torch.from_numpy(visible_mask(shape)) if shape.causal and shape.Sq != shape.Skv else None
    held: list[Any] = [None]

    def run() -> None:
        with torch.inference_mode():
            held[0] = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=shape.causal and mask is None, enable_gqa=True
            )

    return Way(f"PyTorch SDPA {kind}", run, lambda: held[0][0].float().numpy())


def of_onnx_attention(shape: Shape, arrays: list[np.ndarray], threads: int) -> Way:
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    def info(name: str, dims: list[int]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)

    names = ["q", "k", "v"] + (["mask"] if shape.causal else [])
    node = helper.make_node("Attention", names, ["out"])
    inputs = [info("q", [1, shape.Hq, shape.Sq, shape.D]), info("k", [1, shape.Hkv, shape.Skv, shape.D]),
              info("v", [1, shape.Hkv, shape.Skv, shape.D])]
    if shape.causal:
        inputs.append(info("mask", [shape.Sq, shape.Skv]))
    graph = helper.make_graph([node], "attention", inputs, [info("out", [1, shape.Hq, shape.Sq, shape.D])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {name: x[None].astype(np.float32) for name, x in zip("qkv", arrays)}
    if shape.causal:
        feed["mask"] = np.where(visible_mask(shape), 0.0, -np.inf).astype(np.float32)
    held: list[Any] = [None]

    def run() -> None:
        held[0] = session.run(None, feed)[0]

    return Way("ONNX Runtime Attention float32", run, lambda: held[0][0])


def of_onnx_gqa(shape: Shape, arrays: list[np.ndarray], threads: int, kind: str) -> Way:
    """The contrib operator wants as many new keys as queries; the keys before them come as the past, which it copies."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    Hq, Hkv, Sq, Skv, D = shape.Hq, shape.Hkv, shape.Sq, shape.Skv, shape.D
    element = TensorProto.FLOAT16 if kind == "float16" else TensorProto.FLOAT
    past = Skv - Sq

    def info(name: str, dims: list[int], of: int = element) -> Any:
        return helper.make_tensor_value_info(name, of, dims)

    node = helper.make_node("GroupQueryAttention", ["q", "k", "v", "past_k", "past_v", "lengths", "total"],
                            ["out", "all_k", "all_v"], domain="com.microsoft", num_heads=Hq, kv_num_heads=Hkv)
    inputs = [info("q", [1, Sq, Hq * D]), info("k", [1, Sq, Hkv * D]), info("v", [1, Sq, Hkv * D]),
              info("past_k", [1, Hkv, past, D]), info("past_v", [1, Hkv, past, D]),
              info("lengths", [1], TensorProto.INT32), info("total", [1], TensorProto.INT32)]
    outputs = [info("out", [1, Sq, Hq * D]), info("all_k", [1, Hkv, Skv, D]), info("all_v", [1, Hkv, Skv, D])]
    model = helper.make_model(helper.make_graph([node], "gqa", inputs, outputs), ir_version=10,
                              opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    q, k, v = (x.astype(kind) for x in arrays)
    flat = lambda x: np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(1, x.shape[1], -1)  # noqa: E731
    feed = {"q": flat(q), "k": flat(k[:, past:]), "v": flat(v[:, past:]), "past_k": k[None, :, :past].copy(),
            "past_v": v[None, :, :past].copy(), "lengths": np.array([Skv - 1], np.int32), "total": np.array([Skv], np.int32)}
    held: list[Any] = [None]

    def run() -> None:
        held[0] = session.run(["out"], feed)[0]

    def output() -> np.ndarray:
        return held[0].astype(np.float32).reshape(Sq, Hq, D).transpose(1, 0, 2)

    return Way(f"ONNX Runtime GroupQueryAttention {kind}", run, output)


def of_openvino(shape: Shape, arrays: list[np.ndarray], threads: int, kind: str) -> Way:
    """K and V are repeated for the query heads before the clock starts: the operator has no groups."""
    import openvino as ov
    from openvino import opset13 as ops

    group = shape.Hq // shape.Hkv
    q, k, v = (x[None].astype(np.float32) for x in arrays)
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    parameters = [ops.parameter(list(x.shape), ov.Type.f32) for x in (q, k, v)]
    feed = [q, k, v]
    if shape.causal:
        parameters.append(ops.parameter([1, 1, shape.Sq, shape.Skv], ov.Type.f32))
        feed.append(np.where(visible_mask(shape), 0.0, -np.inf).astype(np.float32)[None, None])
    node = ops.scaled_dot_product_attention(*parameters, causal=False)
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16" if kind == "bfloat16" else "f32"}
    request = ov.Core().compile_model(ov.Model([node], parameters), "CPU", hints).create_infer_request()
    held: list[Any] = [None]

    def run() -> None:
        held[0] = request.infer(feed, share_inputs=True)[0]

    return Way(f"OpenVINO SDPA {kind}", run, lambda: np.asarray(held[0])[0])


# ------------------------------------------------------------------------------- measuring


def make_ways(folder: Path, shape: Shape, arrays: list[np.ndarray], work: Path, threads: int) -> tuple[list[Way], dict[str, str]]:
    makers: list[tuple[str, Callable[[], Way]]] = [
        ("libapa exact", lambda: of_apa(folder, shape, work, threads, "exact")),
        ("libapa apa", lambda: of_apa(folder, shape, work, threads, "apa")),
        ("llama.cpp flash attention, K/V f16", lambda: of_ggml(folder, shape, work, threads, "f16")),
        ("llama.cpp flash attention, K/V q8_0", lambda: of_ggml(folder, shape, work, threads, "q8_0")),
        ("PyTorch SDPA float32", lambda: of_torch(shape, arrays, threads, "float32")),
        ("PyTorch SDPA bfloat16", lambda: of_torch(shape, arrays, threads, "bfloat16")),
        ("ONNX Runtime Attention float32", lambda: of_onnx_attention(shape, arrays, threads)),
        ("ONNX Runtime GroupQueryAttention float32", lambda: of_onnx_gqa(shape, arrays, threads, "float32")),
        ("OpenVINO SDPA float32", lambda: of_openvino(shape, arrays, threads, "float32")),
        ("OpenVINO SDPA bfloat16", lambda: of_openvino(shape, arrays, threads, "bfloat16")),
    ]
    ways, absent = [], {}
    for name, make in makers:
        try:
            ways.append(make())
        except Exception as error:  # whatever keeps a peer out is the table's to say
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return ways, absent


def measure(folder: Path, shape: Shape, repeats: int, threads: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((h, s, shape.D), np.float32).astype(np.float16)
              for h, s in ((shape.Hq, shape.Sq), (shape.Hkv, shape.Skv), (shape.Hkv, shape.Skv))]
    work = folder / "arrays"
    work.mkdir(exist_ok=True)
    for name, x in zip("qkv", arrays):
        np.save(work / f"{name}.npy", x)
        x.tofile(work / f"{name}.raw")
    expected = truth(shape, *arrays)
    ways, absent = make_ways(folder, shape, arrays, work, threads)
    results: dict[str, Any] = {name: {"absent": why} for name, why in absent.items()}
    live = []
    for way in ways:
        try:
            way.run()
            error = float(np.linalg.norm(way.output() - expected) / np.linalg.norm(expected))
            results[way.name] = {"rel_l2": error}
            if error <= WRONG:
                live.append(way)
            else:
                results[way.name]["absent"] = f"wrong: relative L2 {error:.3g}"
        except Exception as failure:
            results[way.name] = {"absent": f"{type(failure).__name__}: {str(failure).splitlines()[0][:120] if str(failure) else ''}"}
    for _ in range(repeats):
        for way in live:
            start = time.perf_counter()
            own = way.run()
            way.times.append(own if own is not None else (time.perf_counter() - start) * 1e3)
    for way in live:
        ms = statistics.median(way.times)
        results[way.name] |= {"ms": ms, "gflops": shape.flops / ms / 1e6, "low": min(way.times), "high": max(way.times)}
    return {"shape": vars(shape), "ways": results}


# ------------------------------------------------------------------------------- the page


def machine() -> dict[str, Any]:
    name = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {"cpu": name, "cores": os.cpu_count(), "load": os.getloadavg()[0]}


def versions() -> str:
    found = []
    for package in ("torch", "onnxruntime", "openvino"):
        try:
            found.append(f"{package} {__import__(package).__version__}")
        except Exception:
            found.append(f"{package} absent")
    return ", ".join(found) + ", ggml of llama-cpp-python 0.3.36"


def describe(shape: dict[str, Any]) -> str:
    return f"{shape['Sq']} × {shape['Skv']}, {shape['Hq']}/{shape['Hkv']}, D {shape['D']}"


def cell(result: dict[str, Any]) -> str:
    if "ms" not in result:
        return result.get("absent", "")
    return f"{result['ms']:.2f} ms, {result['gflops']:.0f} GFLOP/s, {result['rel_l2']:.1e}"


def markdown(report: dict[str, Any]) -> str:
    cases = report["cases"]
    names = list(dict.fromkeys(name for case in cases for name in case["ways"]))
    order = ["libapa exact", "libapa apa"]
    names = [n for n in order if n in names] + sorted(n for n in names if n not in order)
    m = report["machine"]
    lines = [
        f"{m['cpu']}, {report['threads']} threads, load {m['load']:.1f} when it began; {report['versions']}; {report['command']}. Each cell: "
        "median of the rounds, effective GFLOP/s (4·D a visible pair), relative L2 against float64.",
        "",
        "| | " + " | ".join(describe(case["shape"]) for case in cases) + " |",
        "|---|" + "---|" * len(cases),
    ]
    lines += [f"| {name} | " + " | ".join(cell(case["ways"].get(name, {})) for case in cases) + " |" for name in names]
    lines += ["", "![Effective GFLOP/s](peers.svg)"]
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "apa"
    import matplotlib.pyplot as plt

    cases = report["cases"]
    figure, axes = plt.subplots(len(cases), 1, figsize=(8, 1.9 * len(cases)), layout="constrained")
    for axis, case in zip(np.atleast_1d(axes), cases):
        ways = [(n, r["gflops"]) for n, r in case["ways"].items() if "gflops" in r]
        ways.sort(key=lambda way: way[1])
        colours = ["#0969da" if n.startswith("libapa") else "#8c959f" for n, _ in ways]
        bars = axis.barh([n for n, _ in ways], [g for _, g in ways], color=colours)
        axis.bar_label(bars, [f"{g:.0f}" for _, g in ways], padding=3, fontsize=7)
        axis.set_title(describe(case["shape"]) + ("" if case["shape"]["Sq"] > 1 else " (decode)"), fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(axes)[-1].set_xlabel("effective GFLOP/s", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def put_on_page(page: Path, text: str) -> None:
    old = page.read_text()
    if BEGIN not in old or END not in old:
        raise SystemExit(f"peers.py: {page}: no markers {BEGIN} and {END}")
    head, rest = old.split(BEGIN, 1)
    page.write_text(head + BEGIN + "\n" + text + "\n" + END + rest.split(END, 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", default=",".join(s.name for s in SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    wanted = options.shapes.split(",")
    unknown = [name for name in wanted if name not in {s.name for s in SHAPES}]
    if unknown:
        parser.error(f"--shapes: {unknown[0]}, expected some of {', '.join(s.name for s in SHAPES)}")
    report: dict[str, Any] = {"machine": machine(), "threads": options.threads, "versions": versions(), "cases": [],
                              "command": f"`bench/peers/run.sh FOLDER --repeats {options.repeats}`"}
    for shape in SHAPES:
        if shape.name in wanted:
            report["cases"].append(measure(options.folder, shape, options.repeats, options.threads))
            print(markdown(report).split("\n\n![")[0], flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.page:
        put_on_page(options.page, markdown(report))
        draw(report, options.page.parent / "peers.svg")


if __name__ == "__main__":
    main()
